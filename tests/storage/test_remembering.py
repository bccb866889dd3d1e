"""What is remembered of a job that ended, for how long, and what is left of it afterwards: nothing, to any verb."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._client import waiters
from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Job, Request, State, Update, Work
from holdfast._core.replies import CancelResult, KeepResult, Placed, SettleResult
from holdfast.storage import connect
from tests.storage.stage import Stage

MICROSECOND = 0.000001


async def running(stage: Stage, id: str = "a", **work: Any) -> Job:
    await stage.enqueue(id, **work)
    return await stage.claim_one()


async def remembered_for(stage: Stage, seconds: float, id: str = "a") -> bool:
    """Is the record there until just before so many seconds from now, and gone then?"""
    stage.clock.advance(seconds - MICROSECOND)
    until = await stage.get(id)
    stage.clock.advance(MICROSECOND)
    return until is not None and await stage.get(id) is None


# completed


async def test_a_completed_job_is_remembered_for_its_result_ttl(stage: Stage) -> None:
    await stage.complete(await running(stage), b"result", ttl=10)
    job = await stage.the("a")
    assert job.outcome is not None
    assert (job.state, job.outcome.result, job.outcome.ended_at) == (State.COMPLETED, b"result", stage.wall())
    assert await remembered_for(stage, 10)


async def test_a_dedup_ttl_shorter_than_the_result_ttl_ends_the_cache_and_not_the_record(stage: Stage) -> None:
    await stage.complete(await running(stage), ttl=10, dedup=3)
    assert await remembered_for(stage, 10)


async def test_a_dedup_ttl_longer_than_the_result_ttl_keeps_record_and_cache(stage: Stage) -> None:
    await stage.complete(await running(stage), b"result", ttl=3, dedup=10)
    stage.clock.advance(9)
    cached = await stage.enqueue("a")
    assert (cached.placed, cached.outcome) == (Placed.COMPLETED, (await stage.the("a")).outcome)
    assert await remembered_for(stage, 1)


async def test_a_result_ttl_alone_caches_nothing(stage: Stage) -> None:
    await stage.complete(await running(stage), ttl=10, dedup=0)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_record_without_ttl_is_gone_at_completion(stage: Stage) -> None:
    assert await stage.complete(await running(stage), ttl=0) is SettleResult.OK
    assert await stage.get("a") is None
    stats = await stage.stats()
    assert (stats.completed, stats.totals["completed"]) == (0, 1)
    assert (await stage.sweep()).forgotten == 0


async def test_the_times_to_live_are_those_of_the_settlement_and_count_from_it(stage: Stage) -> None:
    job = await running(stage, result_ttl_ms=1, dedup_ttl_ms=1)
    stage.clock.advance(5)
    await stage.complete(job, ttl=10)
    assert await remembered_for(stage, 10)


async def test_a_completed_record_drops_its_payload(stage: Stage) -> None:
    await stage.complete(await running(stage))
    assert (await stage.the("a")).payload is None


# failed and cancelled


async def test_a_failed_job_is_remembered_for_its_failure_ttl_with_payload_and_error(stage: Stage) -> None:
    await stage.fail(await running(stage), b"why", ttl=10)
    job = await stage.the("a")
    assert job.outcome is not None
    assert (job.state, job.payload, job.outcome.error) == (State.FAILED, b"payload", b"why")
    assert await remembered_for(stage, 10)


async def test_failure_without_ttl_is_gone_at_once(stage: Stage) -> None:
    await stage.fail(await running(stage), ttl=0)
    assert await stage.get("a") is None
    assert (await stage.stats()).totals["failed"] == 1


async def cancelled_waiting(stage: Stage, **work: Any) -> None:
    await stage.enqueue("a", **work)
    await stage.cancel("a")


async def cancelled_running(stage: Stage, **work: Any) -> None:
    job = await running(stage, "a", **work)
    await stage.cancel("a")
    await stage.release(job)


@pytest.mark.parametrize("end", [cancelled_waiting, cancelled_running])
@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        ({}, 3600),
        ({"result_ttl_ms": 0}, 60),
        ({"result_ttl_ms": 59_999}, 60),
        ({"result_ttl_ms": 60_001}, 60.001),
        ({"result_ttl_ms": 7_200_000}, 7200),
    ],
    ids=["default", "none", "shorter", "longer", "hours"],
)
async def test_a_cancelled_job_is_remembered_for_its_result_ttl_but_at_least_a_minute(
    stage: Stage, end: Callable[..., Awaitable[None]], work: dict[str, int], seconds: float
) -> None:
    await end(stage, **work)
    assert (await stage.the("a")).payload == b"payload"
    assert await remembered_for(stage, seconds)


# keep


async def finished(stage: Stage, state: State, ttl: float = 100) -> None:
    job = await running(stage)
    match state:
        case State.COMPLETED:
            await stage.complete(job, b"result", ttl=ttl)
        case State.FAILED:
            await stage.fail(job, ttl=ttl)
        case _:
            await stage.cancel("a")
            await stage.release(job)
            await stage.keep("a", ttl)


FINISHED = [State.COMPLETED, State.FAILED, State.CANCELLED]


@pytest.mark.parametrize("ttl", [5, 500], ids=["shorter", "longer"])
@pytest.mark.parametrize("state", FINISHED)
async def test_keep_sets_how_long_a_finished_job_is_remembered_from_now(stage: Stage, state: State, ttl: int) -> None:
    await finished(stage, state)
    stage.clock.advance(50)
    assert await stage.keep("a", ttl) is KeepResult.KEPT
    assert await remembered_for(stage, ttl)


@pytest.mark.parametrize("ttl", [5, 500], ids=["shorter", "longer"])
async def test_keep_moves_the_cached_answer_of_a_completed_job_too(stage: Stage, ttl: int) -> None:
    await stage.complete(await running(stage), b"result", ttl=100, dedup=50)
    await stage.keep("a", ttl)
    stage.clock.advance(ttl - MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.COMPLETED
    stage.clock.advance(MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.NEW


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
async def test_keep_does_not_make_a_failed_or_cancelled_job_answer_from_a_cache(stage: Stage, state: State) -> None:
    await finished(stage, state)
    await stage.keep("a", 500)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_keep_for_no_time_forgets_at_once(stage: Stage) -> None:
    await finished(stage, State.COMPLETED)
    assert await stage.keep("a", 0) is KeepResult.KEPT
    assert await stage.get("a") is None


@pytest.mark.parametrize("state", FINISHED)
async def test_keep_at_least_lengthens_and_never_shortens(stage: Stage, state: State) -> None:
    await finished(stage, state)
    before = await stage.the("a")
    assert await stage.keep("a", 99, at_least=True) is KeepResult.KEPT
    assert await stage.the("a") == before
    assert await stage.keep("a", 101, at_least=True) is KeepResult.KEPT
    assert await remembered_for(stage, 101)


async def test_keep_at_least_does_not_move_the_cached_answer(stage: Stage) -> None:
    await finished(stage, State.COMPLETED, ttl=10)
    await stage.keep("a", 100, at_least=True)
    stage.clock.advance(10)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def complete(stage: Stage, job: Job) -> SettleResult:
    return await stage.complete(job, ttl=100)


async def fail(stage: Stage, job: Job) -> SettleResult:
    return await stage.fail(job, ttl=100)


async def cancel(stage: Stage, job: Job) -> SettleResult:
    await stage.cancel("a")
    return await stage.release(job)


End = Callable[[Stage, Job], Awaitable[SettleResult]]
ENDS: list[End] = [complete, fail, cancel]


@pytest.mark.parametrize("ttl", [5, 500, 5000], ids=["shorter", "longer", "longest"])
@pytest.mark.parametrize("end", ENDS)
async def test_keep_on_a_live_job_is_applied_at_its_end(stage: Stage, end: End, ttl: int) -> None:
    job = await running(stage)
    assert await stage.keep("a", ttl) is KeepResult.LIVE
    stage.clock.advance(7)
    await end(stage, job)
    assert await remembered_for(stage, ttl)


async def test_keep_on_a_waiting_job_is_applied_at_its_end(stage: Stage) -> None:
    await stage.enqueue("a")
    assert await stage.keep("a", 5) is KeepResult.LIVE
    await stage.complete(await stage.claim_one(), ttl=0)
    assert await remembered_for(stage, 5)


async def test_keep_on_a_live_job_moves_its_cached_answer_too(stage: Stage) -> None:
    job = await running(stage)
    await stage.keep("a", 50)
    await stage.complete(job, ttl=10, dedup=100)
    stage.clock.advance(50 - MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.COMPLETED
    stage.clock.advance(MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_keep_on_a_live_job_lasts_through_a_retry_but_is_for_one_end_only(stage: Stage) -> None:
    job = await running(stage)
    await stage.keep("a", 500)
    await stage.retry(job)
    await stage.fail(await stage.claim_one(), ttl=10)
    assert (await stage.enqueue("a")).placed is Placed.NEW
    await stage.fail(await stage.claim_one(), ttl=10)
    assert await remembered_for(stage, 10)


async def test_keep_on_a_running_job_with_next_is_for_the_run_and_not_for_next(stage: Stage) -> None:
    job = await running(stage)
    await stage.keep("a", 500)
    await stage.enqueue("a", update=Update())
    await stage.complete(job, ttl=10)
    previous = (await stage.the("a")).previous
    assert previous is not None
    assert previous.forget_at == stage.wall(500)
    await stage.complete(await stage.claim_one(), ttl=10)
    assert await remembered_for(stage, 10)


@pytest.mark.parametrize("end", ENDS)
async def test_keep_at_least_on_a_live_job_counts_from_now_and_never_shortens(stage: Stage, end: End) -> None:
    job = await running(stage)
    await stage.keep("a", 9000, at_least=True)
    assert await stage.keep("a", 1, at_least=True) is KeepResult.LIVE
    stage.clock.advance(1000)
    await end(stage, job)
    assert await remembered_for(stage, 8000)


async def test_keep_at_least_does_not_shorten_a_result_ttl(stage: Stage) -> None:
    job = await running(stage)
    await stage.keep("a", 1, at_least=True)
    await stage.complete(job, ttl=100)
    assert await remembered_for(stage, 100)


async def test_a_waiters_keep_outlives_a_plain_keep_that_is_shorter(stage: Stage) -> None:
    job = await running(stage)
    await stage.keep("a", 50, at_least=True)
    await stage.keep("a", 5)
    await stage.complete(job, ttl=0)
    await stage.keep("a", 0)
    assert await remembered_for(stage, 50)


async def test_keep_of_a_missing_job_is_missing(stage: Stage) -> None:
    assert await stage.keep("a", 10) is KeepResult.MISSING
    await stage.enqueue("b")
    assert await stage.keep("a", 10) is KeepResult.MISSING


async def test_keep_answers_for_each_id_of_a_batch(stage: Stage) -> None:
    await finished(stage, State.COMPLETED)
    await stage.enqueue("b")
    replies = await stage.storage.keep("q", ["b", "missing", "a"], 10_000)
    assert replies == [KeepResult.LIVE, KeepResult.MISSING, KeepResult.KEPT]


# a request that will be waited for


@pytest.mark.parametrize("end", ENDS)
async def test_a_request_that_will_be_waited_for_is_remembered_for_at_least_its_keep(stage: Stage, end: End) -> None:
    await stage.enqueue("a", keep=9000)
    stage.clock.advance(4000)
    await end(stage, await stage.claim_one())
    assert await remembered_for(stage, 5000)


async def test_keep_of_a_request_alone_keeps_the_outcome(stage: Stage) -> None:
    await stage.enqueue("a", keep=30, custom_id=False)
    stage.clock.advance(10)
    await stage.complete(await stage.claim_one(), None, ttl=0)
    assert await remembered_for(stage, 20)


async def test_outcome_is_kept_ten_seconds_when_the_keep_of_a_waiter_is_over(stage: Stage) -> None:
    """Perhaps it is not: the clock may have stepped on."""
    await stage.enqueue("a", keep=30)
    job = await stage.claim_one()
    stage.clock.advance(3600)
    await stage.complete(job, ttl=0)
    assert await remembered_for(stage, 10)


@pytest.mark.parametrize("update", [None, Update(), Update(payload=False)], ids=["keep", "update", "payload=False"])
@pytest.mark.parametrize("claimed", [False, True], ids=["waiting", "running"])
async def test_keep_of_a_second_caller_is_respected(stage: Stage, claimed: bool, update: Update | None) -> None:
    await stage.enqueue("a", keep=10)
    job = await stage.claim_one() if claimed else None
    await stage.enqueue("a", keep=100, update=update)
    await stage.enqueue("a", keep=1, update=update)
    await stage.complete(job or await stage.claim_one(), ttl=0)
    if (await stage.the("a")).state is State.WAITING:
        await stage.complete(await stage.claim_one(), ttl=0)
    assert await remembered_for(stage, 100)


async def test_keep_of_a_waiter_of_a_restarted_job_is_respected(stage: Stage) -> None:
    await finished(stage, State.FAILED)
    await stage.enqueue("a", keep=30)
    await stage.complete(await stage.claim_one(), ttl=0)
    assert await remembered_for(stage, 30)


async def test_keep_of_a_waiter_survives_a_restart_by_another_caller(stage: Stage) -> None:
    await stage.enqueue("a", keep=100)
    await stage.fail(await stage.claim_one(), ttl=1)
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=0)
    assert await remembered_for(stage, 100)


# past the forget time


async def past_its_time(stage: Stage, state: State) -> None:
    await finished(stage, state, ttl=10)
    stage.clock.advance(10)


@pytest.mark.parametrize("state", FINISHED)
async def test_get_does_not_find_a_forgotten_job(stage: Stage, state: State) -> None:
    await past_its_time(stage, state)
    assert await stage.get("a") is None


@pytest.mark.parametrize("state", FINISHED)
async def test_enqueue_treats_a_forgotten_job_as_new(stage: Stage, state: State) -> None:
    await past_its_time(stage, state)
    reply = await stage.enqueue("a", b"again")
    assert (reply.placed, reply.state, reply.outcome) == (Placed.NEW, None, None)
    job = await stage.claim_one()
    assert (job.payload, job.previous) == (b"again", None)


@pytest.mark.parametrize("state", FINISHED)
async def test_cancel_does_not_find_a_forgotten_job(stage: Stage, state: State) -> None:
    await past_its_time(stage, state)
    assert await stage.cancel("a") is CancelResult.MISSING


@pytest.mark.parametrize("at_least", [False, True])
@pytest.mark.parametrize("state", FINISHED)
async def test_keep_does_not_revive_a_forgotten_job(stage: Stage, state: State, at_least: bool) -> None:
    await past_its_time(stage, state)
    assert await stage.keep("a", 1000, at_least=at_least) is KeepResult.MISSING
    assert await stage.get("a") is None


async def test_settle_and_extend_of_a_forgotten_job_return_lost(stage: Stage) -> None:
    job = await running(stage)
    await stage.complete(job, ttl=10)
    stage.clock.advance(10)
    for settle in (stage.complete, stage.fail, stage.retry, stage.release):
        assert await settle(job) is SettleResult.LOST
    assert len((await stage.extend(job)).lost) == 1
    assert await stage.get("a") is None


@pytest.mark.parametrize("all_states", [False, True], ids=["its state", "all states"])
@pytest.mark.parametrize("state", FINISHED)
async def test_scan_omits_a_forgotten_job(stage: Stage, state: State, all_states: bool) -> None:
    await past_its_time(stage, state)
    assert (await stage.storage.scan("q", state=None if all_states else state)).jobs == []


@pytest.mark.parametrize("state", FINISHED)
async def test_a_forgotten_job_is_not_counted_by_snapshot(stage: Stage, state: State) -> None:
    await past_its_time(stage, state)
    stats = await stage.stats()
    assert (stats.completed, stats.failed, stats.cancelled) == (0, 0, 0)


@pytest.mark.parametrize("state", FINISHED)
async def test_sweep_removes_only_expired_records(stage: Stage, state: State) -> None:
    await stage.complete(await running(stage, "b"), ttl=20)
    await past_its_time(stage, state)
    assert (await stage.sweep()).forgotten == 1
    assert (await stage.sweep()).forgotten == 0
    assert (await stage.stats()).totals["forgotten"] == 1
    assert await stage.get("b") is not None


async def test_a_sweep_forgets_at_most_its_limit_and_says_that_there_is_more(stage: Stage) -> None:
    for n in range(5):
        await stage.complete(await running(stage, f"{n}"), ttl=10)
    stage.clock.advance(10)
    sweeps = [await stage.sweep(2) for _ in range(3)]
    assert [(swept.forgotten, swept.more) for swept in sweeps] == [(2, True), (2, True), (1, False)]


async def test_without_workers_every_enqueue_forgets_more_than_it_adds(stage: Stage) -> None:
    for n in range(6):
        await stage.complete(await running(stage, f"{n}"), ttl=10)
    stage.clock.advance(10)
    forgotten = []
    for n in range(4):
        await stage.enqueue(f"new {n}")
        forgotten.append((await stage.stats()).totals.get("forgotten", 0))
    assert forgotten == [2, 4, 6, 6]


async def test_claim_forgets_a_few_old_records(stage: Stage) -> None:
    await past_its_time(stage, State.COMPLETED)
    await stage.claim()
    assert (await stage.stats()).totals["forgotten"] == 1


async def test_a_batch_that_asks_again_for_forgotten_ids_starts_them_all(stage: Stage) -> None:
    for n in range(4):
        await stage.complete(await running(stage, f"{n}"), ttl=10)
    stage.clock.advance(10)
    replies = await stage.storage.enqueue("q", [Request(f"{n}", Work(b"again")) for n in range(4)])
    assert [reply.placed for reply in replies] == [Placed.NEW] * 4
    assert [job.id for job in await stage.claim(10)] == ["0", "1", "2", "3"]


async def test_one_jobs_time_to_live_never_touches_another(stage: Stage) -> None:
    for id, ttl in (("a", 10), ("b", 20), ("c", 30)):
        await stage.complete(await running(stage, id), ttl=ttl)
    await stage.fail(await running(stage, "d"), ttl=5)
    await stage.keep("c", 15)
    there: dict[int, str] = {}
    for second in range(25):
        there[second] = "".join([id for id in "abcd" if await stage.get(id) is not None])
        await stage.sweep()
        stage.clock.advance(1)
    assert [there[second] for second in (0, 4, 5, 9, 10, 14, 15, 19, 20)] == [
        "abcd",
        "abcd",
        "abc",
        "abc",
        "bc",
        "bc",
        "b",
        "b",
        "",
    ]


async def test_a_time_to_live_in_one_queue_never_touches_another_queue(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    for queue, ttl in ((stage, 10), (other, 20)):
        await queue.complete(await running(queue), ttl=ttl)
    stage.clock.advance(10)
    await stage.sweep()
    await other.sweep()
    assert await stage.get("a") is None
    assert await other.get("a") is not None


# forgetting while somebody waits


async def test_outcome_kept_for_a_waiter_lasts_until_its_deadline_and_margin(stage: Stage) -> None:
    await finished(stage, State.COMPLETED, ttl=1)
    generation = (await stage.the("a")).generation
    assert (await waiters.wait(stage.storage, "q", "a", generation, wait_s=20)).result == b"result"
    stage.clock.advance(30 - MICROSECOND)
    await stage.sweep()
    assert await stage.get("a") is not None


# previous


async def restarted(stage: Stage, ttl: float = 10) -> int:
    """A job that failed, to be remembered for so long, and was asked for again. Returns the failed generation."""
    job = await running(stage)
    await stage.fail(job, ttl=ttl)
    await stage.enqueue("a")
    return job.generation


async def test_a_previous_outcome_is_read_until_its_own_forget_time(stage: Stage) -> None:
    generation = await restarted(stage)
    stage.clock.advance(10 - MICROSECOND)
    previous = (await stage.the("a")).previous
    assert previous is not None
    assert (previous.generation, previous.state) == (generation, State.FAILED)
    stage.clock.advance(MICROSECOND)
    job = await stage.the("a")
    assert (job.state, job.previous) == (State.WAITING, None)


async def test_a_claim_past_its_time_does_not_bring_a_previous_outcome_back(stage: Stage) -> None:
    await restarted(stage)
    stage.clock.advance(10)
    assert (await stage.claim_one()).previous is None
    assert (await stage.the("a")).previous is None


async def test_record_and_previous_outcome_expire_independently(stage: Stage) -> None:
    await restarted(stage, ttl=100)
    await stage.complete(await stage.claim_one(), ttl=10)
    job = await stage.the("a")
    assert (job.state, job.previous is not None) == (State.COMPLETED, True)
    assert await remembered_for(stage, 10)


async def test_the_next_write_drops_an_old_previous_outcome_from_the_file(clock: ManualClock, tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db", clock=clock) as storage:
        stage = Stage(storage, clock)
        await stage.complete(await running(stage), b"old-result", ttl=10, dedup=0)
        await stage.enqueue("a")
        assert b"old-result" in _rest(tmp_path / "jobs.db")
        clock.advance(10)
        await stage.keep("a", 1)
        assert b"old-result" not in _rest(tmp_path / "jobs.db")


def _rest(path: Path) -> bytes:
    db = sqlite3.connect(path)
    try:
        (rest,) = db.execute("SELECT rest FROM holdfast_jobs").fetchone()
        assert isinstance(rest, bytes)
        return rest
    finally:
        db.close()


# what is listed


async def listed(stage: Stage, state: State) -> list[str]:
    return [job.id for job in (await stage.storage.scan("q", state=state)).jobs]


async def test_failed_jobs_are_listed_with_their_errors(stage: Stage) -> None:
    for id in "ab":
        await stage.fail(await running(stage, id), f"why {id}".encode())
    jobs = (await stage.storage.scan("q", state=State.FAILED)).jobs
    assert [(job.id, job.outcome and job.outcome.error) for job in jobs] == [("a", b"why a"), ("b", b"why b")]
    assert (await stage.stats()).failed == 2


async def test_a_failure_in_previous_is_not_listed_or_counted(stage: Stage) -> None:
    await restarted(stage, ttl=1000)
    assert await listed(stage, State.FAILED) == []
    assert await listed(stage, State.WAITING) == ["a"]
    assert (await stage.stats()).failed == 0


async def test_a_failure_in_previous_is_not_listed_after_a_promotion(stage: Stage) -> None:
    job = await running(stage)
    await stage.enqueue("a", update=Update())
    await stage.fail(job)
    assert await listed(stage, State.FAILED) == []
    assert (await stage.stats()).totals["failed"] == 1


async def test_listed_jobs_carry_neither_payloads_nor_results(stage: Stage) -> None:
    await stage.complete(await running(stage, "done"), b"result")
    await stage.fail(await running(stage, "failed"))
    await running(stage, "running")
    await stage.enqueue("running", b"next payload", update=Update())
    await stage.enqueue("waiting")
    for job in (await stage.storage.scan("q")).jobs:
        assert job.payload is None, job.id
        assert job.outcome is None or job.outcome.result is None, job.id
        assert job.run is None or job.run.next is None or job.run.next.work.payload is None, job.id


async def test_a_long_error_is_left_out_of_a_list_and_a_short_one_is_not(stage: Stage) -> None:
    for id, error in (("long", b"x" * 5000), ("short", b"x" * 4096)):
        await stage.enqueue(id)
        await stage.fail(await stage.claim_one(), error)
    listed = {job.id: job.outcome for job in (await stage.storage.scan("q", state=State.FAILED)).jobs}
    assert listed["long"] is not None
    assert listed["short"] is not None
    assert (listed["long"].error, listed["short"].error) == (None, b"x" * 4096)
    outcome = (await stage.the("long")).outcome
    assert outcome is not None
    assert outcome.error == b"x" * 5000


@pytest.mark.parametrize("keep", [0, 60])
@pytest.mark.parametrize("runs", [1, 2, 3])
async def test_a_finished_record_counts_all_of_its_runs(stage: Stage, runs: int, keep: float) -> None:
    await stage.enqueue("a", keep=keep)
    for _ in range(runs - 1):
        await stage.release(await stage.claim_one())
    assert await stage.complete(await stage.claim_one(), b"result", ttl=60) is SettleResult.OK
    assert (await stage.the("a")).attempts == runs
