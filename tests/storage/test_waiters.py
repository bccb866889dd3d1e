"""Waiting for a job's end: what a record answers to whom, how a wait ends, and which hints arrive for which verb."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast._client import waiters
from holdfast._client.waiters import wait
from holdfast._core.clock import ManualClock
from holdfast._core.events import Event, Topic
from holdfast._core.jobs import Job, Outcome, Request, State, Update, Work
from holdfast._core.lifecycle import Answer, answer
from holdfast._core.replies import CancelResult, Placed
from holdfast.errors import JobCancelled, JobForgotten, OptionError, WaitTimeout
from holdfast.storage import Storage
from tests.storage.harness import Harness
from tests.storage.stage import Stage


@pytest.fixture(autouse=True)
def only_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking anyway is put off, so that a waiter which hears nothing is seen to hang."""
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 60)


async def ask_and_run(stage: Stage) -> Job:
    await stage.enqueue("a")
    return await stage.claim_one()


async def is_waited_for(stage: Stage, until: int = 1) -> None:
    """Let the waiters run, until one has asked to keep the outcome up to some time at least."""
    while (await stage.the("a")).keep_until_at < until:  # noqa: ASYNC110 -- a waiter has no event to offer
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)  # From asking to listening it is only a few turns of the loop.


async def told(stage: Stage, generation: int, wait_s: float | None = 30) -> Outcome | type[Exception]:
    try:
        return await wait(stage.storage, "q", "a", generation, wait_s=wait_s)
    except (JobCancelled, JobForgotten, WaitTimeout) as error:
        return type(error)


async def answer_after(
    stage: Stage, generation: int, act: Callable[[], Awaitable[object]], wait_s: float | None = 30
) -> Outcome | type[Exception]:
    """Begin to wait, then act: what the waiter is told."""
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiter = tasks.create_task(told(stage, generation, wait_s))
        await is_waited_for(stage)
        assert not waiter.done()
        await act()
    return waiter.result()


def ended(outcome: object) -> tuple[int, State, bytes | None]:
    """The generation, state and result or error of what must be an outcome."""
    assert isinstance(outcome, Outcome)
    return outcome.generation, outcome.state, outcome.result or outcome.error


# what a record answers


async def test_a_live_request_keeps_its_own_and_all_older_waiters_waiting(stage: Stage) -> None:
    generation = (await stage.enqueue("a")).generation
    for _ in range(2):
        job = await stage.the("a")
        assert answer(job, generation) is answer(job, generation - 1) is answer(job, 1) is Answer.PENDING
        await stage.claim()


async def test_a_waiter_for_next_waits_while_next_is_there(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())
    job = await stage.the("a")
    assert answer(job, run.generation) is answer(job, following.generation) is Answer.PENDING


async def test_request_without_a_live_successor_is_dropped(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    job = await stage.the("a")
    assert answer(job, run.generation) is Answer.PENDING
    assert answer(job, following.generation) is Answer.DROPPED


async def test_dropped_request_is_answered_by_a_later_one(stage: Stage) -> None:
    await ask_and_run(stage)
    dropped = await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())
    assert answer(await stage.the("a"), dropped.generation) is Answer.PENDING


async def test_a_dropped_request_is_not_answered_by_the_outcome_of_the_run_before_it(stage: Stage) -> None:
    run = await ask_and_run(stage)
    dropped = await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.complete(run)
    assert answer(await stage.the("a"), dropped.generation) is Answer.DROPPED


async def test_an_outcome_answers_its_own_and_all_older_waiters(stage: Stage) -> None:
    run = await ask_and_run(stage)
    await stage.complete(run)
    job = await stage.the("a")
    assert job.outcome is not None
    assert answer(job, run.generation) == answer(job, 1) == job.outcome
    assert answer(job, run.generation + 1) is Answer.DROPPED


async def test_a_previous_outcome_answers_its_waiters_while_the_next_generation_is_live(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())
    await stage.complete(run)
    job = await stage.the("a")
    assert answer(job, run.generation) == job.previous
    assert answer(job, following.generation) is Answer.PENDING


async def test_of_two_outcomes_the_oldest_that_is_not_older_than_the_request_answers(stage: Stage) -> None:
    first = await ask_and_run(stage)
    await stage.enqueue("a", update=Update())
    await stage.complete(first, b"first")
    second = await stage.claim_one()
    await stage.complete(second, b"second")
    job = await stage.the("a")
    answers = {generation: ended(answer(job, generation))[2] for generation in (1, first.generation, second.generation)}
    assert list(answers.values()) == [b"first", b"first", b"second"]
    assert ended(answer(job, first.generation + 1))[2] == b"second"


async def test_past_the_previous_outcomes_time_the_next_outcome_answers(stage: Stage) -> None:
    first = await ask_and_run(stage)
    await stage.enqueue("a", update=Update())
    await stage.complete(first, b"first", ttl=10)
    stage.clock.advance(10)
    assert answer(await stage.the("a"), first.generation) is Answer.PENDING
    await stage.complete(await stage.claim_one(), b"second")
    assert ended(answer(await stage.the("a"), first.generation))[2] == b"second"


async def test_request_without_a_record_is_forgotten(stage: Stage) -> None:
    await stage.complete(await ask_and_run(stage), ttl=0)
    assert answer(await stage.get("a"), 1) is Answer.FORGOTTEN


# how a wait ends


async def test_a_wait_ends_at_the_hint_that_the_job_completed(stage: Stage) -> None:
    run = await ask_and_run(stage)
    outcome = await answer_after(stage, run.generation, lambda: stage.complete(run, b"result"))
    assert ended(outcome) == (run.generation, State.COMPLETED, b"result")


async def test_a_wait_ends_at_the_hint_that_the_job_failed(stage: Stage) -> None:
    run = await ask_and_run(stage)
    outcome = await answer_after(stage, run.generation, lambda: stage.fail(run, b"why"))
    assert ended(outcome) == (run.generation, State.FAILED, b"why")


async def test_a_wait_for_a_job_that_has_ended_returns_at_once(stage: Stage) -> None:
    run = await ask_and_run(stage)
    await stage.complete(run, b"result")
    assert ended(await told(stage, run.generation, wait_s=0)) == (run.generation, State.COMPLETED, b"result")


async def test_a_wait_goes_on_through_a_retry(stage: Stage) -> None:
    run = await ask_and_run(stage)

    async def retry_and_complete() -> None:
        await stage.retry(run)
        await stage.complete(await stage.claim_one(), b"at last")

    assert ended(await answer_after(stage, run.generation, retry_and_complete))[2] == b"at last"


async def test_a_waiter_of_an_older_generation_is_answered_by_the_update_that_replaced_it(stage: Stage) -> None:
    first = await stage.enqueue("a", b"1")
    second = await stage.enqueue("a", b"2", update=Update())

    async def run() -> None:
        await stage.complete(await stage.claim_one(), b"of 2")

    assert ended(await answer_after(stage, first.generation, run)) == (second.generation, State.COMPLETED, b"of 2")


async def test_a_waiter_of_a_merged_generation_is_answered_by_next(stage: Stage) -> None:
    run = await ask_and_run(stage)

    async def merge() -> None:
        await stage.enqueue("a", update=Update())
        await stage.retry(run)
        await stage.complete(await stage.claim_one(), b"merged")

    assert ended(await answer_after(stage, run.generation, merge))[2] == b"merged"


async def test_a_waiter_for_next_is_not_answered_by_the_run_before_it(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())

    async def complete_both() -> None:
        await stage.complete(run, b"first")
        await asyncio.sleep(0.01)
        await stage.complete(await stage.claim_one(), b"second")

    outcome = await answer_after(stage, following.generation, complete_both)
    assert ended(outcome) == (following.generation, State.COMPLETED, b"second")


async def test_a_waiter_that_comes_late_is_answered_by_the_previous_outcome(stage: Stage) -> None:
    run = await ask_and_run(stage)
    await stage.enqueue("a", update=Update())
    await stage.complete(run, b"first")
    assert ended(await told(stage, run.generation, wait_s=0))[2] == b"first"


async def test_several_waiters_of_one_id_get_the_outcomes_of_their_generations(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        old = [tasks.create_task(told(stage, run.generation)) for _ in range(3)]
        new = [tasks.create_task(told(stage, following.generation)) for _ in range(3)]
        await is_waited_for(stage)
        await stage.complete(run, b"first")
        assert [ended(outcome)[2] for outcome in await asyncio.gather(*old)] == [b"first"] * 3
        assert not any(waiter.done() for waiter in new)
        await stage.complete(await stage.claim_one(), b"second")
    assert [ended(waiter.result())[2] for waiter in new] == [b"second"] * 3


async def test_waiter_is_not_answered_by_another_id(stage: Stage) -> None:
    run = await ask_and_run(stage)

    async def others() -> None:
        for id in "bcd":
            await stage.enqueue(id)
            await stage.complete(await stage.claim_one())
        await stage.complete(run, b"mine")

    assert ended(await answer_after(stage, run.generation, others))[2] == b"mine"


async def test_waiter_of_a_cancelled_job_gets_cancelled(stage: Stage) -> None:
    reply = await stage.enqueue("a")
    assert await answer_after(stage, reply.generation, stage.cancel) is JobCancelled


async def test_waiter_of_a_cancelled_run_is_answered_when_the_run_has_stopped(stage: Stage) -> None:
    run = await ask_and_run(stage)
    await stage.cancel("a")
    assert await answer_after(stage, run.generation, lambda: stage.release(run)) is JobCancelled


async def test_waiter_of_a_dropped_next_is_answered_at_once_while_the_run_continues(stage: Stage) -> None:
    await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())
    assert await answer_after(stage, following.generation, stage.cancel) is JobCancelled
    assert (await stage.the("a")).state is State.RUNNING


async def test_a_waiter_of_a_run_that_is_asked_to_cancel_may_still_see_it_complete(stage: Stage) -> None:
    run = await ask_and_run(stage)

    async def lose_the_race() -> None:
        await stage.cancel("a")
        await stage.complete(run, b"done")

    assert ended(await answer_after(stage, run.generation, lose_the_race))[2] == b"done"


async def test_waiter_of_a_purged_job_gets_forgotten(stage: Stage) -> None:
    reply = await stage.enqueue("a")
    told = await answer_after(stage, reply.generation, lambda: stage.storage.purge("q", [State.WAITING]))
    assert told is JobForgotten


async def test_wait_without_a_record_gets_forgotten(stage: Stage) -> None:
    assert await told(stage, 1) is JobForgotten
    run = await ask_and_run(stage)
    await stage.complete(run, ttl=10)
    stage.clock.advance(10)
    assert await told(stage, run.generation) is JobForgotten


async def test_wait_of_zero_seconds_reads_once(stage: Stage) -> None:
    run = await ask_and_run(stage)
    async with asyncio.timeout(1):
        assert await told(stage, run.generation, wait_s=0) is WaitTimeout
    await stage.complete(run)
    assert isinstance(await told(stage, run.generation, wait_s=0), Outcome)


async def test_a_wait_that_times_out_leaves_the_job_alone(stage: Stage) -> None:
    run = await ask_and_run(stage)
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout(1):
        assert await told(stage, run.generation, wait_s=0.05) is WaitTimeout
    assert asyncio.get_running_loop().time() - started >= 0.05
    assert (await stage.the("a")).state is State.RUNNING


async def test_a_wait_that_times_out_is_a_timeout_error_too(stage: Stage) -> None:
    run = await ask_and_run(stage)
    with pytest.raises(TimeoutError):
        await wait(stage.storage, "q", "a", run.generation, wait_s=0)


# keeping the outcome for a waiter


async def test_waiter_keeps_the_outcome_of_a_job_without_ttl(stage: Stage) -> None:
    run = await ask_and_run(stage)
    outcome = await answer_after(stage, run.generation, lambda: stage.complete(run, b"result", ttl=0))
    assert ended(outcome)[2] == b"result"


async def test_a_waiter_asks_for_ten_seconds_more_than_it_waits(stage: Stage) -> None:
    run = await ask_and_run(stage)
    await told(stage, run.generation, wait_s=0)
    assert (await stage.the("a")).keep_until_at == stage.wall(10)
    await answer_after(stage, run.generation, lambda: stage.complete(run, ttl=0), wait_s=20)
    job = await stage.the("a")
    assert job.outcome is not None
    assert job.outcome.forget_at == stage.wall(30)


async def test_a_waiter_for_next_keeps_both_outcomes(stage: Stage) -> None:
    run = await ask_and_run(stage)
    following = await stage.enqueue("a", update=Update())

    async def complete_both() -> None:
        await stage.complete(run, b"first", ttl=0)
        await stage.complete(await stage.claim_one(), b"second", ttl=0)

    assert ended(await answer_after(stage, following.generation, complete_both))[2] == b"second"
    assert ended(await told(stage, run.generation, wait_s=0))[2] == b"first"


async def test_a_wait_without_a_limit_asks_again_and_so_keeps_the_outcome(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(waiters, "ASK_AGAIN_S", 0.001)
    run = await ask_and_run(stage)

    async def run_for_long() -> None:
        await is_waited_for(stage, until=stage.wall(60))
        stage.clock.advance(59)
        await is_waited_for(stage, until=stage.wall(60))
        stage.clock.advance(59)
        await stage.complete(run, b"result", ttl=0)

    assert ended(await answer_after(stage, run.generation, run_for_long, wait_s=None))[2] == b"result"


async def test_a_wait_with_a_limit_asks_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 0.001)
    monkeypatch.setattr(waiters, "ASK_AGAIN_S", 0.001)
    run = await ask_and_run(stage)
    asked_until = stage.wall(40)

    async def go_on() -> None:
        stage.clock.advance(5)
        await asyncio.sleep(0.05)
        assert (await stage.the("a")).keep_until_at == asked_until
        await stage.complete(run)

    await answer_after(stage, run.generation, go_on, wait_s=30)


# lost hints


class Deaf:
    """A storage whose hints are all lost."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    @asynccontextmanager
    async def subscribe(self, *topics: Topic) -> AsyncIterator[AsyncIterator[Event]]:
        yield Silence()


class Silence:
    """Events that never come."""

    def __aiter__(self) -> Silence:
        return self

    async def __anext__(self) -> Event:
        return await asyncio.get_running_loop().create_future()

    async def within(self, seconds: float) -> Event | None:
        await asyncio.sleep(seconds)
        return None


@pytest.mark.parametrize("wait_s", [30, None])
async def test_wait_polls_when_its_hint_is_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, wait_s: float | None
) -> None:
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 0.01)
    run = await ask_and_run(stage)
    deaf = Stage(Deaf(stage.storage), stage.clock)  # type: ignore[arg-type]
    outcome = await answer_after(deaf, run.generation, lambda: stage.complete(run, b"result", ttl=0), wait_s)
    assert ended(outcome)[2] == b"result"


async def test_with_all_hints_lost_a_wait_still_ends_in_time(stage: Stage) -> None:
    run = await ask_and_run(stage)
    deaf = Stage(Deaf(stage.storage), stage.clock)  # type: ignore[arg-type]
    async with asyncio.timeout(1):
        assert await told(deaf, run.generation, wait_s=0.05) is WaitTimeout


async def test_hint_reaches_a_waiter_on_another_client_of_the_same_storage(
    stage: Stage, harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    run = await ask_and_run(stage)
    async with harness.open(clock, tmp_path) as elsewhere:
        outcome = await answer_after(
            Stage(elsewhere, clock), run.generation, lambda: stage.complete(run, b"from afar", ttl=0)
        )
    assert ended(outcome)[2] == b"from afar"


# which hints arrive


@asynccontextmanager
async def hearing(stage: Stage, *topics: Topic) -> AsyncIterator[Callable[[], Awaitable[list[Event]]]]:
    """Listen to topics; the function that it gives returns what was heard since it was last called."""

    async def heard() -> list[Event]:
        await stage.storage.enqueue("end", [Request("mark", Work(b""), update=Update())])
        events: list[Event] = []
        async with asyncio.timeout(10):
            while (event := await anext(source)).queue != "end":
                events.append(event)
        return events

    async with stage.storage.subscribe(*topics, Topic("end")) as source:
        yield heard


async def nothing(stage: Stage) -> None:
    pass


async def waiting(stage: Stage) -> None:
    await stage.enqueue("a")


async def running(stage: Stage) -> Job:
    return await ask_and_run(stage)


async def deferred(stage: Stage) -> Job:
    job = await running(stage)
    await stage.enqueue("a", update=Update())
    return job


async def cancelling(stage: Stage) -> Job:
    job = await running(stage)
    await stage.cancel("a")
    return job


async def cancelling_deferred(stage: Stage) -> Job:
    job = await cancelling(stage)
    await stage.enqueue("a", update=Update())
    return job


async def completed(stage: Stage) -> Job:
    job = await running(stage)
    await stage.complete(job, ttl=10)
    return job


async def forgettable(stage: Stage) -> None:
    await completed(stage)
    stage.clock.advance(10)


async def expired(stage: Stage) -> None:
    await running(stage)
    stage.clock.advance(10)


async def overdue(stage: Stage) -> None:
    await expired(stage)
    await stage.sweep()
    stage.clock.advance(5)


READY = {"enqueued", "updated", "retried", "timed_out", "stalled", "released", "promoted"}
ENDS = {"completed", "failed", "cancelled", "cancel_asked", "purged", "forgotten"}

Arrange = Callable[[Stage], Awaitable[Any]]
Act = Callable[[Stage, Job], Awaitable[object]]
HINTS: dict[str, tuple[Arrange, Act, list[str]]] = {
    "enqueue of none": (nothing, lambda s, j: s.enqueue(), ["enqueued"]),
    "enqueue of a delayed job": (nothing, lambda s, j: s.enqueue(delay=9), ["enqueued"]),
    "keep of waiting": (waiting, lambda s, j: s.enqueue(), []),
    "update of waiting": (waiting, lambda s, j: s.enqueue(update=Update()), ["updated"]),
    "keep of running": (running, lambda s, j: s.enqueue(), []),
    "update of running": (running, lambda s, j: s.enqueue(update=Update()), ["deferred"]),
    "keep of completed": (completed, lambda s, j: s.enqueue(), []),
    "update of completed": (completed, lambda s, j: s.enqueue(update=Update()), ["enqueued"]),
    "operator's retry of none": (nothing, lambda s, j: s.enqueue(payload=None, update=Update(payload=False)), []),
    "claim": (waiting, lambda s, j: s.claim(), ["claimed"]),
    "claim of nothing": (running, lambda s, j: s.claim(), []),
    "complete": (running, lambda s, j: s.complete(j), ["completed"]),
    "complete, not remembered": (running, lambda s, j: s.complete(j, ttl=0), ["completed"]),
    "complete with next": (deferred, lambda s, j: s.complete(j), ["completed", "promoted"]),
    "fail": (running, lambda s, j: s.fail(j), ["failed"]),
    "fail with next": (deferred, lambda s, j: s.fail(j), ["failed", "promoted"]),
    "retry": (running, lambda s, j: s.retry(j), ["retried"]),
    "retry after a stall": (running, lambda s, j: s.retry(j, counts="stalls"), ["stalled"]),
    "retry after a timeout": (running, lambda s, j: s.retry(j, counts="timeouts"), ["timed_out"]),
    "retry with next": (deferred, lambda s, j: s.retry(j), ["retried"]),
    "release": (running, lambda s, j: s.release(j), ["released"]),
    "a lost settle": (completed, lambda s, j: s.retry(j), []),
    "extend": (running, lambda s, j: s.extend(j), []),
    "cancel of none": (nothing, lambda s, j: s.cancel(), []),
    "cancel of waiting": (waiting, lambda s, j: s.cancel(), ["cancelled"]),
    "cancel of running": (running, lambda s, j: s.cancel(), ["cancel_asked"]),
    "cancel of deferred": (deferred, lambda s, j: s.cancel(), ["cancel_asked"]),
    "cancel again": (cancelling, lambda s, j: s.cancel(), []),
    "cancel again, with a new next": (cancelling_deferred, lambda s, j: s.cancel(), ["cancel_asked"]),
    "cancel of completed": (completed, lambda s, j: s.cancel(), []),
    "retry of a cancelled run": (cancelling, lambda s, j: s.retry(j), ["cancelled"]),
    "complete of a cancelled run": (cancelling, lambda s, j: s.complete(j), ["completed"]),
    "release of a cancelled run with next": (
        cancelling_deferred,
        lambda s, j: s.release(j),
        ["cancelled", "promoted"],
    ),
    "sweep that marks": (expired, lambda s, j: s.sweep(), []),
    "sweep that takes back": (overdue, lambda s, j: s.sweep(), ["stalled"]),
    "sweep of a worker": (running, lambda s, j: s.sweep(worker="w1"), ["stalled"]),
    "sweep that forgets": (forgettable, lambda s, j: s.sweep(), ["forgotten"]),
    "keep of an outcome": (completed, lambda s, j: s.keep("a", 99), []),
    "get": (forgettable, lambda s, j: s.get(), []),
    "pause": (waiting, lambda s, j: s.storage.pause("q", True), []),
    "purge of waiting": (waiting, lambda s, j: s.storage.purge("q", [State.WAITING]), ["purged"]),
    "purge of completed": (completed, lambda s, j: s.storage.purge("q", [State.COMPLETED]), ["forgotten"]),
    "purge of running": (running, lambda s, j: s.storage.purge("q", [State.RUNNING]), ["cancel_asked"]),
}


@pytest.mark.parametrize("only", ["all", "ready", "ends"])
@pytest.mark.parametrize("name", HINTS)
async def test_verbs_publish_their_hints_and_topics_filter_them(
    stage: Stage, name: str, only: Literal["all", "ready", "ends"]
) -> None:
    arrange, act, kinds = HINTS[name]
    job = await arrange(stage)
    async with hearing(stage, Topic("q", only)) as heard:
        await act(stage, job)
        events = await heard()
    wanted = {"all": READY | ENDS | {"deferred", "claimed"}, "ready": READY, "ends": ENDS}[only]
    assert [(event.kind, event.queue, event.id) for event in events] == [
        (kind, "q", "a") for kind in kinds if kind in wanted
    ]


async def test_topic_of_one_id_gets_no_hints_of_others(stage: Stage) -> None:
    async with hearing(stage, Topic("q", "all", "b")) as heard:
        for id in "abc":
            await stage.enqueue(id)
        await stage.cancel("a")
        await stage.cancel("b")
        assert [(event.kind, event.id) for event in await heard()] == [("enqueued", "b"), ("cancelled", "b")]


async def test_topic_of_one_queue_gets_no_hints_of_others(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    async with hearing(stage, Topic("q")) as heard:
        await other.enqueue("a")
        await stage.enqueue("b")
        assert [(event.queue, event.id) for event in await heard()] == [("q", "b")]


async def test_listener_with_several_topics_gets_each_hint_once(stage: Stage) -> None:
    async with hearing(stage, Topic("q", "ends"), Topic("q", "all", "a"), Topic("q/failed")) as heard:
        await stage.enqueue("a")
        await stage.enqueue("b")
        a, b = await stage.claim(2)
        await stage.fail(a, follow_up=Work(b"follow up"))
        await stage.complete(b)
        events = await heard()
    assert [(event.queue, event.kind, event.id) for event in events] == [
        ("q", "enqueued", "a"),
        ("q", "claimed", "a"),
        ("q", "failed", "a"),
        ("q/failed", "enqueued", f"a@{a.generation}"),
        ("q", "completed", "b"),
    ]


async def test_the_hints_of_a_batch_come_in_its_order(stage: Stage) -> None:
    names = [f"{n}" for n in range(30)]
    async with hearing(stage, Topic("q")) as heard:
        await stage.storage.enqueue("q", [Request(id, Work(b"payload")) for id in names])
        jobs = await stage.claim(30)
        for job in reversed(jobs):
            await stage.complete(job)
        events = await heard()
    assert [(event.kind, event.id) for event in events] == [
        *(("enqueued", id) for id in names),
        *(("claimed", id) for id in names),
        *(("completed", id) for id in reversed(names)),
    ]


async def test_a_hint_names_the_generation_that_it_is_about_and_when_it_is_due(stage: Stage) -> None:
    async with hearing(stage, Topic("q")) as heard:
        first = await stage.enqueue("a", delay=5)
        stage.clock.advance(5)
        job = await stage.claim_one()
        second = await stage.enqueue("a", update=Update(), delay=7)
        await heard()
        await stage.complete(job)
        completed, promoted = await heard()
    assert (completed.kind, completed.generation) == ("completed", first.generation)
    assert (promoted.kind, promoted.generation, promoted.run_at) == ("promoted", second.generation, stage.wall(7))


async def test_claim_that_takes_back_and_leases_a_job_publishes_both_in_order(stage: Stage) -> None:
    await overdue(stage)
    async with hearing(stage, Topic("q")) as heard:
        await stage.claim()
        assert [event.kind for event in await heard()] == ["stalled", "claimed"]


async def test_subscription_gets_no_earlier_hints(stage: Stage) -> None:
    await stage.enqueue("a")
    async with hearing(stage, Topic("q")) as heard:
        assert await stage.cancel("a") is CancelResult.CANCELLED
        assert [event.kind for event in await heard()] == ["cancelled"]
    assert (await stage.enqueue("a")).placed is Placed.NEW


@pytest.mark.parametrize("wait_s", [-1, -60.0, float("nan"), float("inf")])
async def test_wait_that_is_not_a_duration_is_refused(stage: Stage, wait_s: float) -> None:
    reply = await stage.enqueue("a")
    with pytest.raises(OptionError, match="wait"):
        await wait(stage.storage, "q", "a", reply.generation, wait_s=wait_s)
