"""Asking again for an id that is there: keep, update, the `next` of a running job, restarts, and batches.

What an update should do is worked out here from small tables, never by asking the machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, Literal

import msgspec
import pytest

from holdfast._core.jobs import Job, Outcome, Request, State, Update, Work
from holdfast._core.replies import Enqueued, Placed, SettleResult
from tests.storage.stage import Stage

RunAt = bool | Literal["if_later", "if_earlier"]

RULES: list[RunAt] = [True, False, "if_later", "if_earlier"]
TAKES_RUN_AT: dict[tuple[RunAt, str], bool] = {
    (True, "later"): True,
    (True, "earlier"): True,
    (False, "later"): False,
    (False, "earlier"): False,
    ("if_later", "later"): True,
    ("if_later", "earlier"): False,
    ("if_earlier", "later"): False,
    ("if_earlier", "earlier"): True,
}
RESETS_COUNTS: dict[tuple[bool, bool | None], bool] = {
    (True, None): True,
    (True, True): True,
    (True, False): False,
    (False, None): False,
    (False, True): True,
    (False, False): False,
}
UPDATES = [Update(*rules) for rules in product((True, False), RULES, (None, True, False))]
LATER, EARLIER = 1000.0, -1000.0
"""Seconds from now: after, and before, any time that a job of these tests has of its own."""

STORED: Any = {"priority": 3, "codec": "raw", "timeout_ms": 1000, "max_retries": 1, "result_ttl_ms": 5000}
ASKED: Any = {"priority": 7, "codec": "json", "max_stalls": 4, "max_timeouts": 5, "dedup_ttl_ms": 6000}
STORED_WORK, ASKED_WORK = Work(b"stored", **STORED), Work(b"asked", **ASKED)


def rules_of(update: Update) -> str:
    return f"payload={update.payload},run_at={update.run_at},reset_counts={update.reset_counts}"


def counts(job: Job) -> tuple[int, int, int]:
    return job.retries, job.stalls, job.timeouts


async def ready(stage: Stage) -> Job:
    await stage.enqueue("a", b"stored", **STORED)
    return await stage.the("a")


async def scheduled(stage: Stage) -> Job:
    await stage.enqueue("a", b"stored", delay=500, **STORED)
    return await stage.the("a")


async def retrying(stage: Stage) -> Job:
    """It waits for its fifth attempt, with one of every count, due in 100 s."""
    await ready(stage)
    for count in ("retries", "stalls", "timeouts"):
        await stage.retry(await stage.claim_one(), counts=count)
    await stage.release(await stage.claim_one())
    await stage.enqueue("a", update=Update(payload=False), delay=100)
    return await stage.the("a")


async def running(stage: Stage) -> Job:
    """Its fourth attempt, with one of every count."""
    await ready(stage)
    for count in ("retries", "stalls", "timeouts"):
        await stage.retry(await stage.claim_one(), counts=count)
    return await stage.claim_one()


async def deferred(stage: Stage) -> Job:
    await running(stage)
    await stage.enqueue("a", b"next", update=Update())
    return await stage.the("a")


async def completed(stage: Stage) -> Job:
    await ready(stage)
    await stage.complete(await stage.claim_one(), b"result", ttl=3600)
    return await stage.the("a")


async def failed(stage: Stage) -> Job:
    job = await running(stage)
    await stage.fail(job)
    return await stage.the("a")


async def cancelled(stage: Stage) -> Job:
    await ready(stage)
    await stage.cancel("a")
    return await stage.the("a")


Arrange = Callable[[Stage], Awaitable[Job]]
WAITING: list[Arrange] = [ready, scheduled, retrying]
LIVE: list[Arrange] = [*WAITING, running, deferred]
FINISHED: list[Arrange] = [completed, failed, cancelled]
ENDED: list[Arrange] = [failed, cancelled]


def custom_id(arrange: Arrange) -> str:
    return arrange.__name__


async def complete(stage: Stage, job: Job) -> SettleResult:
    return await stage.complete(job)


async def fail(stage: Stage, job: Job) -> SettleResult:
    return await stage.fail(job)


async def retry(stage: Stage, job: Job) -> SettleResult:
    return await stage.retry(job, delay=50)


async def release(stage: Stage, job: Job) -> SettleResult:
    return await stage.release(job)


async def stall(stage: Stage, job: Job) -> SettleResult:
    assert (await stage.expire()).stalled == [job.id]
    return SettleResult.OK


End = Callable[[Stage, Job], Awaitable[SettleResult]]
ENDS: list[End] = [complete, fail]
RETURNS: list[End] = [retry, release, stall]


# keep


async def test_a_request_for_no_job_is_placed_new_with_its_stamp_as_generation(stage: Stage) -> None:
    reply = await stage.enqueue("a", b"asked")
    assert reply == Enqueued("a", Placed.NEW, stage.wall())
    job = await stage.the("a")
    assert (job.state, job.payload, job.generation, job.run_at) == (
        State.WAITING,
        b"asked",
        reply.generation,
        stage.wall(),
    )


@pytest.mark.parametrize("arrange", LIVE, ids=custom_id)
async def test_keep_leaves_a_live_job_as_it_is_and_answers_duplicate(stage: Stage, arrange: Arrange) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", b"asked", delay=9, **ASKED)
    assert reply == Enqueued("a", Placed.DUPLICATE, before.generation, before.state)
    assert await stage.the("a") == before


async def test_keep_on_a_completed_job_answers_from_its_cache_until_dedup_ttl_ends(stage: Stage) -> None:
    await ready(stage)
    await stage.complete(await stage.claim_one(), b"result", ttl=100, dedup=10)
    before = await stage.the("a")
    stage.clock.advance(9.999999)
    reply = await stage.enqueue("a", b"asked")
    assert reply == Enqueued("a", Placed.COMPLETED, before.generation, State.COMPLETED, before.outcome)
    assert reply.outcome is not None
    assert reply.outcome.result == b"result"
    assert await stage.the("a") == before


async def test_keep_on_a_completed_job_past_dedup_ttl_restarts_it(stage: Stage) -> None:
    await ready(stage)
    await stage.complete(await stage.claim_one(), b"result", ttl=100, dedup=10)
    before = await stage.the("a")
    stage.clock.advance(10)
    reply = await stage.enqueue("a", b"asked")
    assert reply == Enqueued("a", Placed.NEW, stage.wall(), State.COMPLETED)
    job = await stage.the("a")
    assert (job.state, job.payload, job.previous) == (State.WAITING, b"asked", before.outcome)


@pytest.mark.parametrize("arrange", ENDED, ids=custom_id)
async def test_keep_on_a_failed_or_cancelled_job_restarts_it_as_a_new_generation(
    stage: Stage, arrange: Arrange
) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", b"asked", **ASKED)
    assert reply == Enqueued("a", Placed.NEW, stage.wall(), before.state)
    job = await stage.the("a")
    assert (job.state, job.work, job.generation) == (State.WAITING, ASKED_WORK, reply.generation)
    assert (job.attempts, *counts(job)) == (0, 0, 0, 0)
    assert job.previous == before.outcome


@pytest.mark.parametrize("update", [None, Update()], ids=["keep", "update"])
@pytest.mark.parametrize("arrange", FINISHED, ids=custom_id)
async def test_past_its_forget_time_a_job_is_placed_as_if_it_had_never_been(
    stage: Stage, arrange: Arrange, update: Update | None
) -> None:
    await arrange(stage)
    stage.clock.advance(86_400)
    reply = await stage.enqueue("a", b"asked", update=update)
    assert reply == Enqueued("a", Placed.NEW, stage.wall())
    job = await stage.the("a")
    assert (job.state, job.payload, job.previous) == (State.WAITING, b"asked", None)


# update, where nothing runs


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_an_update_of_no_job_is_a_new_job_whatever_its_rules(stage: Stage, update: Update) -> None:
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    assert reply == Enqueued("a", Placed.NEW, stage.wall())
    job = await stage.the("a")
    assert (job.work, job.run_at) == (ASKED_WORK, stage.wall(60))


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_an_update_of_a_waiting_job_changes_what_its_rules_say(stage: Stage, update: Update, when: str) -> None:
    before = await retrying(stage)
    stage.clock.advance(1)
    asked_at = stage.wall(LATER if when == "later" else EARLIER)
    reply = await stage.enqueue("a", b"asked", update=update, run_at=asked_at, **ASKED)
    assert reply == Enqueued("a", Placed.UPDATED, stage.wall(), State.WAITING)
    job = await stage.the("a")
    assert job.work == (ASKED_WORK if update.payload else STORED_WORK)
    assert job.run_at == (asked_at if TAKES_RUN_AT[update.run_at, when] else before.run_at)
    assert counts(job) == ((0, 0, 0) if RESETS_COUNTS[update.payload, update.reset_counts] else (1, 1, 1))
    assert job.generation == reply.generation > before.generation


@pytest.mark.parametrize("arrange", WAITING, ids=custom_id)
async def test_an_update_of_a_waiting_job_is_placed_updated_and_never_lowers_its_attempts(
    stage: Stage, arrange: Arrange
) -> None:
    before = await arrange(stage)
    reply = await stage.enqueue("a", b"asked", update=Update())
    assert (reply.placed, reply.state) == (Placed.UPDATED, State.WAITING)
    assert (await stage.the("a")).attempts == before.attempts


async def test_resetting_the_counts_forgets_why_the_last_run_ended(stage: Stage) -> None:
    before = await retrying(stage)
    assert before.error is not None
    await stage.enqueue("a", update=Update(reset_counts=False))
    assert (await stage.the("a")).error == before.error
    await stage.enqueue("a", update=Update())
    assert (await stage.the("a")).error is None


@pytest.mark.parametrize("rule", ["if_later", "if_earlier"])
async def test_an_update_to_the_same_time_keeps_the_place_in_the_line(
    stage: Stage, rule: Literal["if_later", "if_earlier"]
) -> None:
    run_at = stage.wall(10)
    await stage.enqueue("first", run_at=run_at)
    await stage.enqueue("second", run_at=run_at)
    await stage.enqueue("first", b"asked", update=Update(run_at=rule), run_at=run_at)
    stage.clock.advance(10)
    assert [job.id for job in await stage.claim(2)] == ["first", "second"]


async def test_an_update_that_sets_the_time_goes_to_the_end_of_the_line(stage: Stage) -> None:
    run_at = stage.wall(10)
    await stage.enqueue("first", run_at=run_at)
    await stage.enqueue("second", run_at=run_at)
    await stage.enqueue("first", update=Update(), run_at=run_at)
    stage.clock.advance(10)
    assert [job.id for job in await stage.claim(2)] == ["second", "first"]


@pytest.mark.parametrize("rule", [True, "if_earlier"])
async def test_an_update_without_a_time_means_now(stage: Stage, rule: Literal[True, "if_earlier"]) -> None:
    await scheduled(stage)
    stage.clock.advance(5)
    await stage.enqueue("a", update=Update(run_at=rule))
    assert (await stage.the("a")).run_at == stage.wall()
    assert (await stage.claim_one()).id == "a"


async def test_a_delay_counts_from_the_update_and_not_from_the_first_request(stage: Stage) -> None:
    await scheduled(stage)
    stage.clock.advance(5)
    await stage.enqueue("a", update=Update(), delay=7)
    assert (await stage.the("a")).run_at == stage.wall(7)


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
@pytest.mark.parametrize("arrange", FINISHED, ids=custom_id)
async def test_an_update_restarts_a_finished_job_at_its_own_time_and_with_no_counts(
    stage: Stage, arrange: Arrange, update: Update
) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    assert reply == Enqueued("a", Placed.NEW, stage.wall(), before.state)
    job = await stage.the("a")
    assert (job.state, job.generation, job.run_at) == (State.WAITING, reply.generation, stage.wall(60))
    assert (job.attempts, *counts(job)) == (0, 0, 0, 0)
    assert job.previous == before.outcome


@pytest.mark.parametrize("arrange", FINISHED, ids=custom_id)
async def test_payload_true_on_a_finished_job_takes_the_requests_own(stage: Stage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.enqueue("a", b"asked", update=Update(), **ASKED)
    assert (await stage.the("a")).work == ASKED_WORK


@pytest.mark.parametrize("arrange", ENDED, ids=custom_id)
async def test_payload_false_on_a_failed_or_cancelled_job_takes_what_is_stored(stage: Stage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.enqueue("a", b"asked", update=Update(payload=False), **ASKED)
    assert (await stage.the("a")).work == STORED_WORK


async def test_payload_false_on_a_completed_job_takes_the_requests_own(stage: Stage) -> None:
    await completed(stage)
    await stage.enqueue("a", b"asked", update=Update(payload=False), **ASKED)
    assert (await stage.the("a")).work == ASKED_WORK


# update, while the job runs


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_an_update_of_a_running_job_is_deferred_and_leaves_the_run_alone(stage: Stage, update: Update) -> None:
    before = await running(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", b"asked", update=update, **ASKED)
    assert reply == Enqueued("a", Placed.DEFERRED, stage.wall(), State.RUNNING)
    job = await stage.the("a")
    assert job.deferred
    assert (job.work, job.generation, job.fence, counts(job)) == (
        before.work,
        before.generation,
        before.fence,
        (1, 1, 1),
    )


@pytest.mark.parametrize("end", ENDS, ids=custom_id)
@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_a_promoted_next_is_its_own_full_request_whatever_its_rules(
    stage: Stage, update: Update, end: End
) -> None:
    run = await running(stage)
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    run_at = stage.wall(60)
    stage.clock.advance(1)
    assert await end(stage, run) is SettleResult.OK
    job = await stage.the("a")
    assert (job.state, job.work, job.generation, job.run_at) == (State.WAITING, ASKED_WORK, reply.generation, run_at)
    assert (job.attempts, *counts(job), job.error) == (0, 0, 0, 0, None)


@pytest.mark.parametrize("end", ENDS, ids=custom_id)
async def test_a_promotion_keeps_the_ended_outcome_as_previous(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"asked", update=Update())
    stage.clock.advance(1)
    await end(stage, run)
    previous = (await stage.the("a")).previous
    state, result, error = {"complete": (State.COMPLETED, b"result", None), "fail": (State.FAILED, None, b"error")}[
        end.__name__
    ]
    assert previous is not None
    assert (previous.generation, previous.state, previous.ended_at) == (run.generation, state, stage.wall())
    assert (previous.result, previous.error) == (result, error)


async def test_a_promoted_next_does_not_start_before_its_time(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(), delay=60)
    await stage.complete(run)
    stage.clock.advance(59.999999)
    assert await stage.claim() == []
    stage.clock.advance(0.000001)
    assert (await stage.claim_one()).attempts == 1


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("end", RETURNS, ids=custom_id)
@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_a_merge_applies_the_settlement_then_the_rules_and_resets_counts_last(
    stage: Stage, update: Update, end: End, when: str
) -> None:
    run = await running(stage)
    stage.clock.advance(1)
    asked_at = stage.wall(LATER if when == "later" else EARLIER)
    reply = await stage.enqueue("a", b"asked", update=update, run_at=asked_at, **ASKED)
    assert await end(stage, run) is SettleResult.OK
    settled_run_at = {"retry": stage.wall(50), "release": run.run_at, "stall": stage.wall(10)}[end.__name__]
    settled_counts = {"retry": (2, 1, 1), "release": (1, 1, 1), "stall": (1, 2, 1)}[end.__name__]
    job = await stage.the("a")
    assert job.work == (ASKED_WORK if update.payload else STORED_WORK)
    assert job.run_at == (asked_at if TAKES_RUN_AT[update.run_at, when] else settled_run_at)
    assert counts(job) == ((0, 0, 0) if RESETS_COUNTS[update.payload, update.reset_counts] else settled_counts)
    assert (job.state, job.generation, job.attempts) == (State.WAITING, reply.generation, 4)
    assert job.previous is None


@pytest.mark.parametrize("end", RETURNS, ids=custom_id)
async def test_a_merge_lasts_as_long_as_one_run_and_is_not_deferred_any_more(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"asked", update=Update())
    assert (await stage.stats()).deferred == 1
    await end(stage, run)
    assert (await stage.stats()).deferred == 0
    assert not (await stage.claim_one()).deferred


@pytest.mark.parametrize("rule", [True, "if_earlier"])
async def test_an_update_without_a_time_means_its_own_now_also_on_a_merge(
    stage: Stage, rule: Literal[True, "if_earlier"]
) -> None:
    run = await running(stage)
    stage.clock.advance(1)
    asked_at = stage.wall()
    await stage.enqueue("a", update=Update(run_at=rule))
    stage.clock.advance(1)
    await stage.retry(run, delay=50)
    assert (await stage.the("a")).run_at == asked_at
    assert (await stage.claim_one()).id == "a"


async def test_an_update_without_a_time_does_not_hurry_a_backoff_it_may_only_put_off(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(run_at="if_later"))
    await stage.retry(run, delay=50)
    assert (await stage.the("a")).run_at == stage.wall(50)


SECOND_RUN_AT: dict[tuple[RunAt, str], Literal["first", "second"]] = {
    pair: "second" if takes else "first" for pair, takes in TAKES_RUN_AT.items()
}
"""Whose time a `next` has after a second update, by the second's rule and whether its time is later."""
RULE_OF_BOTH: dict[tuple[RunAt, RunAt], RunAt] = {
    (first, second): True if first is True else second for first, second in product(RULES, RULES)
}
"""Once taken stays taken; of the others the newer rule replaces the older."""
FIRST_S, BACKOFF_S = 100, 130
SECOND_S = {"later": 200, "earlier": 50}


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", RULES)
async def test_two_updates_of_run_at_promoted_by_completion(
    stage: Stage, first: RunAt, second: RunAt, when: str
) -> None:
    run = await running(stage)
    times = {"first": stage.wall(FIRST_S), "second": stage.wall(SECOND_S[when])}
    await stage.enqueue("a", update=Update(run_at=first), run_at=times["first"])
    await stage.enqueue("a", update=Update(run_at=second), run_at=times["second"])
    await stage.complete(run)
    assert (await stage.the("a")).run_at == times[SECOND_RUN_AT[second, when]]


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", RULES)
async def test_two_updates_of_run_at_merged_into_a_retry(stage: Stage, first: RunAt, second: RunAt, when: str) -> None:
    run = await running(stage)
    times = {"first": FIRST_S, "second": SECOND_S[when]}
    await stage.enqueue("a", update=Update(run_at=first), delay=times["first"])
    await stage.enqueue("a", update=Update(run_at=second), delay=times["second"])
    await stage.retry(run, delay=BACKOFF_S)
    asked = times[SECOND_RUN_AT[second, when]]
    taken = TAKES_RUN_AT[RULE_OF_BOTH[first, second], "later" if asked > BACKOFF_S else "earlier"]
    assert (await stage.the("a")).run_at == stage.wall(asked if taken else BACKOFF_S)


@pytest.mark.parametrize(
    ("first", "second", "merged", "promoted"),
    [
        (True, True, b"second", b"second"),
        (True, False, b"first", b"first"),
        (False, True, b"second", b"second"),
        (False, False, b"stored", b"first"),
    ],
)
@pytest.mark.parametrize("end", [release, complete], ids=custom_id)
async def test_of_two_updates_a_payload_once_taken_stays_taken(
    stage: Stage, end: End, first: bool, second: bool, merged: bytes, promoted: bytes
) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"first", update=Update(payload=first))
    await stage.enqueue("a", b"second", update=Update(payload=second))
    await end(stage, run)
    assert (await stage.the("a")).payload == (merged if end is release else promoted)


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_of_two_updates_either_may_reset_the_counts(stage: Stage, first: bool, second: bool) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(reset_counts=first))
    await stage.enqueue("a", update=Update(reset_counts=second))
    await stage.release(run)
    assert counts(await stage.the("a")) == ((0, 0, 0) if first or second else (1, 1, 1))


async def test_a_second_update_is_deferred_too_and_gives_next_its_generation(stage: Stage) -> None:
    run = await running(stage)
    first = await stage.enqueue("a", b"first", update=Update())
    second = await stage.enqueue("a", b"second", update=Update(payload=False, run_at=False))
    assert (second.placed, second.state) == (Placed.DEFERRED, State.RUNNING)
    assert second.generation > first.generation > run.generation
    await stage.complete(run)
    assert (await stage.the("a")).generation == second.generation


async def test_three_updates_of_one_run_make_one_more_run(stage: Stage) -> None:
    run = await running(stage)
    for payload in (b"first", b"second", b"third"):
        await stage.enqueue("a", payload, update=Update())
    await stage.complete(run)
    again = await stage.claim_one()
    assert again.payload == b"third"
    await stage.complete(again)
    assert await stage.claim() == []


# cancel and next


@pytest.mark.parametrize("end", [fail, *RETURNS], ids=custom_id)
async def test_a_cancel_drops_next_and_the_run_ends_cancelled(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    assert not (await stage.the("a")).deferred
    await end(stage, run)
    job = await stage.the("a")
    assert (job.state, job.generation) == (State.CANCELLED, run.generation)


async def test_a_cancel_that_loses_the_race_leaves_the_job_completed(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.complete(run)
    assert (await stage.the("a")).state is State.COMPLETED


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
@pytest.mark.parametrize("end", [*ENDS, *RETURNS], ids=custom_id)
async def test_a_next_set_after_the_cancel_is_promoted_and_never_merged(stage: Stage, end: End, update: Update) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"dropped", update=Update())
    await stage.cancel("a")
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    run_at = stage.wall(60)
    assert (reply.placed, reply.state) == (Placed.DEFERRED, State.RUNNING)
    await end(stage, run)
    job = await stage.the("a")
    assert (job.state, job.work, job.generation, job.run_at) == (State.WAITING, ASKED_WORK, reply.generation, run_at)
    assert (job.attempts, *counts(job)) == (0, 0, 0, 0)
    assert job.previous is not None
    assert (job.previous.generation, job.previous.state) == (
        run.generation,
        State.COMPLETED if end is complete else State.CANCELLED,
    )


async def test_a_second_cancel_drops_the_next_that_was_set_after_the_first(stage: Stage) -> None:
    run = await running(stage)
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.release(run)
    assert (await stage.the("a")).state is State.CANCELLED


# previous


async def test_a_merge_keeps_the_previous_outcome_of_an_earlier_generation(stage: Stage) -> None:
    before = await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.release(run)
    assert (await stage.the("a")).previous == before.outcome


async def test_a_new_outcome_takes_the_place_of_the_previous_one(stage: Stage) -> None:
    await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete(run)
    previous: Outcome | None = (await stage.the("a")).previous
    assert previous is not None
    assert (previous.generation, previous.state) == (run.generation, State.COMPLETED)


async def test_a_promotion_whose_outcome_is_not_remembered_keeps_the_previous_one(stage: Stage) -> None:
    before = await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete(run, ttl=0)
    assert (await stage.the("a")).previous == before.outcome


# the operator's retry


RETRY = {"payload": None, "update": Update(payload=False)}


@pytest.mark.parametrize("arrange", ENDED, ids=custom_id)
async def test_the_operators_retry_restarts_a_failed_or_cancelled_job_with_its_own_work(
    stage: Stage, arrange: Arrange
) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", Placed.NEW, stage.wall(), before.state)
    job = await stage.claim_one()
    assert (job.work, job.attempts, *counts(job)) == (STORED_WORK, 1, 0, 0, 0)
    assert job.previous == before.outcome


@pytest.mark.parametrize("arrange", LIVE, ids=custom_id)
async def test_the_operators_retry_of_a_live_job_is_a_duplicate_and_changes_nothing(
    stage: Stage, arrange: Arrange
) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", Placed.DUPLICATE, before.generation, before.state)
    assert await stage.the("a") == before


async def test_the_operators_retry_of_no_job_places_nothing(stage: Stage) -> None:
    assert await stage.enqueue("a", **RETRY) == Enqueued("a", None)  # type: ignore[arg-type]
    assert await stage.get("a") is None


@pytest.mark.parametrize("age", [0, 10], ids=["fresh", "past dedup_ttl"])
async def test_the_operators_retry_of_a_completed_job_places_nothing(stage: Stage, age: float) -> None:
    await ready(stage)
    await stage.complete(await stage.claim_one(), ttl=100, dedup=10)
    stage.clock.advance(age)
    before = await stage.the("a")
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", None, state=State.COMPLETED)
    assert await stage.the("a") == before


async def test_the_operators_retry_of_a_forgotten_failure_places_nothing(stage: Stage) -> None:
    await failed(stage)
    stage.clock.advance(86_400)
    assert await stage.enqueue("a", **RETRY) == Enqueued("a", None)  # type: ignore[arg-type]
    assert await stage.get("a") is None


# batches


def request(payload: bytes | None = b"payload", update: Update | None = None, id: str = "a") -> Request:
    return Request(id, Work(payload), update=update, custom_id=True)


def placed(replies: list[Enqueued]) -> list[Placed | None]:
    return [reply.placed for reply in replies]


async def test_one_id_several_times_in_a_batch_is_applied_in_order(stage: Stage) -> None:
    replies = await stage.storage.enqueue(
        "q", [request(b"1"), request(b"2"), request(b"3", Update()), request(b"4", Update(payload=False))]
    )
    assert placed(replies) == [Placed.NEW, Placed.DUPLICATE, Placed.UPDATED, Placed.UPDATED]
    new, duplicate, third, fourth = (reply.generation for reply in replies)
    assert new == duplicate < third < fourth
    job = await stage.the("a")
    assert (job.payload, job.generation) == (b"3", fourth)


async def test_one_running_id_several_times_in_a_batch_is_applied_in_order(stage: Stage) -> None:
    run = await running(stage)
    replies = await stage.storage.enqueue(
        "q", [request(b"1", Update()), request(b"2"), request(b"3", Update(payload=False)), request(b"4", Update())]
    )
    assert placed(replies) == [Placed.DEFERRED, Placed.DUPLICATE, Placed.DEFERRED, Placed.DEFERRED]
    await stage.complete(run)
    job = await stage.the("a")
    assert (job.payload, job.generation) == (b"4", replies[-1].generation)


async def test_a_finished_id_several_times_in_a_batch_restarts_once(stage: Stage) -> None:
    await failed(stage)
    retry_by_hand = request(None, Update(payload=False))
    replies = await stage.storage.enqueue("q", [retry_by_hand, retry_by_hand, request(b"2", Update())])
    assert placed(replies) == [Placed.NEW, Placed.DUPLICATE, Placed.UPDATED]
    assert [reply.state for reply in replies] == [State.FAILED, State.WAITING, State.WAITING]


async def test_an_item_that_places_nothing_does_not_hold_up_its_batch(stage: Stage) -> None:
    replies = await stage.storage.enqueue(
        "q", [request(id="b"), request(None, Update(payload=False)), request(b"1"), request(id="c")]
    )
    assert placed(replies) == [Placed.NEW, None, Placed.NEW, Placed.NEW]
    assert [job.id for job in await stage.claim(5)] == ["b", "a", "c"]


async def test_every_request_of_a_batch_has_a_generation_of_its_own(stage: Stage) -> None:
    replies = await stage.storage.enqueue("q", [request(id=f"{n}") for n in range(50)])
    generations = [reply.generation for reply in replies]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("known", ["0", "49", "50", "119"])
async def test_ids_that_nobody_chose_may_be_there_all_the_same(stage: Stage, known: str) -> None:
    (before,) = await stage.storage.enqueue("q", [Request(known, Work(b"payload"))])
    replies = await stage.storage.enqueue("q", [Request(f"{n}", Work(b"payload")) for n in range(120)])
    assert {reply.id for reply in replies if reply.placed is not Placed.NEW} == {known}
    assert replies[int(known)] == Enqueued(known, Placed.DUPLICATE, before.generation, State.WAITING)
    stats = await stage.stats()
    assert (stats.ready, stats.totals["enqueued"]) == (120, 120)


async def test_an_id_that_nobody_chose_may_be_in_a_batch_twice(stage: Stage) -> None:
    names = [f"{n}" for n in range(100)] + ["7"]
    replies = await stage.storage.enqueue("q", [Request(name, Work(b"payload")) for name in names])
    assert [reply.placed for reply in replies] == [Placed.NEW] * 100 + [Placed.DUPLICATE]
    assert replies[100].generation == replies[7].generation
    assert (await stage.stats()).totals["enqueued"] == 100


@pytest.mark.parametrize("asked", [{}, {"delay": 5}, {"run_at": True}, {"keep": 30}, {"update": Update()}], ids=str)
async def test_a_new_job_is_the_same_whether_or_not_its_id_was_chosen(stage: Stage, asked: dict[str, Any]) -> None:
    if "run_at" in asked:
        asked = {"run_at": stage.wall(5)}
    chosen = await stage.enqueue("chosen", b"asked", **ASKED, **asked)
    given = await stage.enqueue("given", b"asked", custom_id=False, **ASKED, **asked)
    assert (given.placed, given.generation) == (Placed.NEW, chosen.generation + 1)
    job = await stage.the("given")
    assert job.arrival == job.generation == given.generation
    first = {"id": "chosen", "custom_id": True, "generation": chosen.generation, "arrival": chosen.generation}
    assert msgspec.structs.replace(job, **first) == await stage.the("chosen")
