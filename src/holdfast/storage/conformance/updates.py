"""Enqueue of an id that exists: keep it, or update it, while nothing runs.

The expected result of an update comes from small tables, never from the code under test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any, Literal

import pytest

from holdfast._core.jobs import Job, State, Update, Work
from holdfast._core.replies import Enqueued, Placed, SettleResult
from holdfast.storage.conformance.verbs import Stage

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


async def test_remembered_failure_answers_requests_until_its_record_is_forgotten(stage: Stage) -> None:
    await ready(stage)
    await stage.fail(await stage.claim_one(), b"why", ttl=10, remember=True)
    before = await stage.the("a")
    stage.clock.advance(9.999999)
    reply = await stage.enqueue("a", b"asked")
    assert reply == Enqueued("a", Placed.FAILED, before.generation, State.FAILED, before.outcome)
    assert reply.outcome is not None
    assert reply.outcome.error == b"why"
    assert await stage.the("a") == before
    stage.clock.advance(0.000001)
    assert (await stage.enqueue("a", b"asked")).placed is Placed.NEW


async def test_keep_of_a_failure_moves_the_end_of_its_memory_only_if_it_is_remembered(stage: Stage) -> None:
    for id, remember in (("a", True), ("b", False)):
        await stage.enqueue(id)
        await stage.fail(await stage.claim_one(), ttl=10, remember=remember)
        await stage.keep(id, 100)
    stage.clock.advance(50)
    placed = [(await stage.enqueue(id)).placed for id in ("a", "b")]
    assert placed == [Placed.FAILED, Placed.NEW]


async def test_keep_before_a_remembered_failure_sets_how_long_it_is_remembered(stage: Stage) -> None:
    await ready(stage)
    job = await stage.claim_one()
    await stage.keep("a", 100)
    await stage.fail(job, ttl=10, remember=True)
    stage.clock.advance(99)
    assert (await stage.enqueue("a")).placed is Placed.FAILED
    stage.clock.advance(1)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_operator_retries_a_remembered_failure(stage: Stage) -> None:
    await ready(stage)
    await stage.fail(await stage.claim_one(), remember=True)
    assert (await stage.enqueue("a", None, update=Update(payload=False))).placed is Placed.NEW


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
async def test_enqueue_past_the_forget_time_places_a_new_job(
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
async def test_payload_true_on_a_finished_job_takes_the_payload_of_the_request(stage: Stage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.enqueue("a", b"asked", update=Update(), **ASKED)
    assert (await stage.the("a")).work == ASKED_WORK


@pytest.mark.parametrize("arrange", ENDED, ids=custom_id)
async def test_payload_false_on_a_failed_or_cancelled_job_takes_the_stored_payload(
    stage: Stage, arrange: Arrange
) -> None:
    await arrange(stage)
    await stage.enqueue("a", b"asked", update=Update(payload=False), **ASKED)
    assert (await stage.the("a")).work == STORED_WORK


async def test_payload_false_on_a_completed_job_takes_the_payload_of_the_request(stage: Stage) -> None:
    await completed(stage)
    await stage.enqueue("a", b"asked", update=Update(payload=False), **ASKED)
    assert (await stage.the("a")).work == ASKED_WORK
