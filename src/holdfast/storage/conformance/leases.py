"""One lease at a time: fences, extends, sweeps in two steps, and what a dead or frozen worker leaves behind."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from holdfast._core.jobs import Complete, Fail, LeaseRef, State, Update
from holdfast._core.replies import CancelResult, SettleResult
from holdfast.storage.conformance.verbs import Stage, fence


async def test_a_claim_gives_the_job_a_lease_and_counts_the_attempt(stage: Stage) -> None:
    await stage.enqueue("a", b"1")
    job = await stage.claim_one(worker="w1", lease=10)
    assert (job.id, job.payload, job.state, job.attempts) == ("a", b"1", State.RUNNING, 1)
    assert job.run is not None
    assert (job.run.worker, job.run.until_at) == ("w1", stage.wall(10))
    assert await stage.the("a") == job


@pytest.mark.parametrize("is_first", [True, False], ids=["first run", "second run"])
async def test_outcome_has_the_start_and_the_worker_of_the_last_run(stage: Stage, is_first: bool) -> None:
    starts: dict[str, int] = {}
    for id in ("completed", "failed", "cancelled", "taken back"):
        await stage.enqueue(id)
        if not is_first:
            await stage.retry(await stage.claim_one(worker="w1"))
        stage.clock.advance(1)
        run = await stage.claim_one(worker="é2")
        assert (run.started_at, run.worker) == (fence(run), "é2")
        starts[id] = fence(run)
        stage.clock.advance(5)
        if id in ("cancelled", "taken back"):
            await stage.cancel(id)
        match id:
            case "completed":
                await stage.complete(run, worker="é2")
            case "failed":
                await stage.fail(run, worker="é2")
            case "cancelled":
                await stage.release(run, worker="é2")
            case _:
                await stage.sweep(worker="é2")
        job = await stage.the(id)
        assert (job.started_at, job.worker) == (starts[id], "é2"), id
        assert job.outcome is not None
        assert job.outcome.ended_at - starts[id] == 5_000_000
    assert len(set(starts.values())) == 4


async def test_job_between_two_runs_has_neither_start_nor_worker(stage: Stage) -> None:
    await stage.enqueue("a")
    assert ((await stage.the("a")).started_at, (await stage.the("a")).worker) == (None, None)
    await stage.retry(await stage.claim_one())
    assert ((await stage.the("a")).started_at, (await stage.the("a")).worker) == (None, None)
    await stage.cancel("a")
    job = await stage.the("a")
    assert (job.state, job.started_at, job.worker) == (State.CANCELLED, None, None)


async def test_previous_outcome_keeps_the_start_of_its_run(stage: Stage) -> None:
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete(run)
    job = await stage.the("a")
    assert job.previous is not None
    assert (job.previous.started_at, job.previous.worker, job.started_at) == (fence(run), "w1", None)


@pytest.mark.parametrize("counts", ["stalls", "timeouts", None])
async def test_failure_by_a_stall_or_a_timeout_is_counted(
    stage: Stage, counts: Literal["stalls", "timeouts"] | None
) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.settle(Fail(job.id, fence(job), b"error", 60_000, None, counts))
    failed = await stage.the("a")
    assert failed.state is State.FAILED
    assert (failed.stalls, failed.timeouts) == (int(counts == "stalls"), int(counts == "timeouts"))


async def test_a_running_job_is_not_claimed_again(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    assert await stage.claim(10, worker="w2") == []


async def test_complete_is_ok_for_exactly_one_call(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    assert await stage.complete(job) is SettleResult.OK
    assert await stage.complete(job) is SettleResult.LOST


async def test_the_same_lease_settled_twice_in_one_batch_counts_once(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    settlement = Complete(job.id, fence(job))
    assert await stage.storage.settle("q", [settlement, settlement], worker="w1") == [
        SettleResult.OK,
        SettleResult.LOST,
    ]


async def test_only_the_current_fence_and_its_worker_settle(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(worker="w1")
    before = await stage.the("a")
    assert job.run is not None
    forged = replace(job, run=replace(job.run, fence=fence(job) + 1))
    assert await stage.complete(forged) is SettleResult.LOST
    assert await stage.complete(job, worker="w2") is SettleResult.LOST
    assert await stage.the("a") == before


async def test_a_late_settle_is_refused_after_the_lease_moved_on(stage: Stage) -> None:
    await stage.enqueue("a")
    late = await stage.claim_one(worker="w1")
    await stage.expire()
    current = await stage.claim_one(worker="w1")
    assert fence(current) > fence(late)
    before = await stage.the("a")
    for settle in (stage.complete, stage.fail, stage.retry, stage.release):
        assert await settle(late) is SettleResult.LOST
    assert (await stage.extend(late)).lost == [LeaseRef("a", fence(late))]
    assert await stage.the("a") == before
    assert await stage.complete(current) is SettleResult.OK


async def test_a_retried_job_is_leased_again_and_settles(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one())
    job = await stage.claim_one(worker="w2")
    assert (job.attempts, job.retries) == (2, 1)
    assert await stage.the("a") == job
    assert await stage.claim(10) == []
    assert await stage.complete(job, worker="w2") is SettleResult.OK


async def test_a_lease_past_its_deadline_but_not_swept_still_settles(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(lease=10)
    stage.clock.advance(1000)
    assert await stage.complete(job) is SettleResult.OK


async def test_an_expired_lease_is_first_marked_and_taken_back_half_a_lease_later(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=10)
    stage.clock.advance(9.999)
    assert (await stage.sweep()).overdue == []
    stage.clock.advance(0.001)
    assert (await stage.sweep()).overdue == ["a"]
    stage.clock.advance(4.999)
    assert (await stage.sweep()).stalled == []
    stage.clock.advance(0.001)
    assert (await stage.sweep()).stalled == ["a"]
    job = await stage.the("a")
    assert (job.state, job.stalls, job.retries) == (State.WAITING, 1, 0)


async def test_live_leases_are_not_taken_back_after_an_outage_of_many_leases(stage: Stage) -> None:
    for id in "abcde":
        await stage.enqueue(id)
    jobs = await stage.claim(5, lease=10)
    stage.clock.advance(500)
    for _ in range(20):  # A busy sweeper, while the holders reconnect within a quarter of a lease.
        await stage.sweep()
        stage.clock.advance(0.1)
    for job in jobs:
        assert (await stage.extend(job)).lost == []
    stage.clock.advance(9)
    assert (await stage.sweep()).stalled == []
    assert [await stage.complete(job) for job in jobs] == [SettleResult.OK] * 5


async def test_rare_sweep_takes_back_no_live_lease(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(lease=10)
    for _ in range(5):
        stage.clock.advance(500)
        assert (await stage.sweep()).stalled == []
        assert (await stage.extend(job, lease=10)).lost == []


async def test_job_of_a_killed_worker_is_due_again_within_one_and_a_half_leases(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=3)
    killed_at = stage.wall()
    while not await stage.claim(1, worker="w2"):
        claim = await stage.storage.claim("q", 1, worker="w2", lease_ms=1000)
        assert claim.next_sweep_at is not None
        stage.clock.advance((claim.next_sweep_at - claim.now) / 1_000_000)
    assert stage.wall() - killed_at == 4_500_000


async def test_extend_renews_the_lease_and_keeps_progress(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(lease=10)
    stage.clock.advance(8)
    await stage.extend(job, lease=20, progress=b"half")
    await stage.extend(job, lease=20)
    run = (await stage.the("a")).run
    assert run is not None
    assert (run.until_at, run.lease_ms, run.progress) == (stage.wall(20), 20_000, b"half")


async def test_extend_returns_a_cancel_request(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    assert await stage.cancel("a") is CancelResult.ASKED
    assert (await stage.extend(job)).cancel_asked == [LeaseRef("a", fence(job))]


async def test_sweeping_a_worker_takes_back_its_leases_at_once_and_no_others(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id)
    await stage.claim(2, worker="w1")
    await stage.claim(1, worker="w2")
    swept = await stage.sweep(worker="w1")
    assert (swept.stalled, swept.overdue) == (["a", "b"], [])
    assert [job.id for job in await stage.claim(3, worker="w3")] == ["a", "b"]
    assert (await stage.the("c")).worker == "w2"


async def test_a_stalled_job_keeps_its_place_in_front_the_first_time(stage: Stage) -> None:
    await stage.enqueue("first")
    stage.clock.advance(1)
    await stage.enqueue("second")
    await stage.claim_one()
    await stage.expire()
    assert [job.id for job in await stage.claim(2)] == ["first", "second"]


async def test_wait_doubles_from_the_second_stall_up_to_five_minutes(stage: Stage) -> None:
    await stage.enqueue("a")
    delays: list[float] = []
    for _ in range(9):
        job = await stage.the("a")
        stage.clock.advance(max(0, job.run_at - stage.wall()) / 1_000_000)
        await stage.claim_one(lease=10)
        await stage.expire(lease=10)
        delays.append(((await stage.the("a")).run_at - stage.wall()) / 1_000_000)
    assert delays[1:] == [10, 20, 40, 80, 160, 300, 300, 300]
    assert delays[0] < 0


async def test_sweep_is_bounded_and_reports_remaining_work(stage: Stage) -> None:
    for n in range(5):
        await stage.enqueue(f"{n}")
    await stage.claim(5, lease=10)
    stage.clock.advance(10)
    swept = await stage.sweep(3)
    assert (len(swept.overdue), swept.more) == (3, True)
    swept = await stage.sweep(3)
    assert (len(swept.overdue), swept.more) == (2, False)


async def test_marked_leases_do_not_hide_others_from_a_bounded_sweep(stage: Stage) -> None:
    for n in range(3):
        await stage.enqueue(f"{n}")
    await stage.claim(2, lease=10)
    stage.clock.advance(1)
    await stage.claim(1, lease=10)
    stage.clock.advance(9)
    assert len((await stage.sweep(2)).overdue) == 2
    stage.clock.advance(1)
    assert (await stage.sweep(2)).overdue == ["2"]


async def test_release_puts_the_job_back_in_its_place_uncounted(stage: Stage) -> None:
    await stage.enqueue("first")
    await stage.enqueue("second")
    job = await stage.claim_one()
    stage.clock.advance(1)
    assert await stage.release(job) is SettleResult.OK
    back = await stage.the("first")
    assert (back.retries, back.stalls, back.timeouts, back.attempts) == (0, 0, 0, 1)
    assert (await stage.claim_one()).id == "first"


async def test_reported_stall_without_a_delay_keeps_the_place_of_the_job(stage: Stage) -> None:
    await stage.enqueue("first")
    stage.clock.advance(1)
    await stage.enqueue("second")
    job = await stage.claim_one()
    assert await stage.retry(job, counts="stalls") is SettleResult.OK
    again = await stage.claim_one()
    assert (again.id, again.stalls, again.run_at, again.error) == ("first", 1, job.run_at, b"error")
    assert await stage.retry(again, counts="stalls", delay=5) is SettleResult.OK
    assert (await stage.claim_one()).id == "second"
    assert (await stage.the("first")).run_at == stage.wall(5)
