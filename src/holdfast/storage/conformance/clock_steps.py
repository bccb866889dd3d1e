"""The storage's clock steps back, or jumps ahead: nothing is lost, nothing runs twice, lengths last their own length.

Every test runs twice: the step comes while the storage is open, and while it is closed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Job, State, Update
from holdfast._core.replies import Placed, SettleResult
from holdfast.storage.conformance.verbs import Stage, StorageHarness

HOUR = 3600
MICROSECOND = 0.000001


class SteppingStage(Stage):
    """A stage whose clock can step, and whose storage may be closed when it does."""

    def __init__(self, harness: StorageHarness, clock: ManualClock, folder: Path, *, reopens: bool) -> None:
        super().__init__(harness.open(clock, folder), clock)
        self._open = lambda: harness.open(clock, folder)
        self._reopens = reopens

    async def step(self, seconds: float) -> None:
        """The clock steps. The queue is in use: it sees what the clock showed before, and what it shows then."""
        await self._touch()
        if self._reopens:
            await self.storage.__aexit__(None, None, None)
        self.clock.advance(seconds)
        if self._reopens:
            self.storage = await self._open().__aenter__()
        await self._touch()

    async def _touch(self) -> None:
        await self.enqueue("touch", update=Update(), delay=1_000_000, priority=0)


@pytest.fixture(params=["open", "reopened"])
async def stage(
    request: pytest.FixtureRequest, harness: StorageHarness, clock: ManualClock, tmp_path: Path
) -> AsyncIterator[SteppingStage]:
    stage = SteppingStage(harness, clock, tmp_path, reopens=request.param == "reopened")
    await stage.storage.__aenter__()
    try:
        yield stage
        assert await stage.problems() == []
    finally:
        await stage.storage.__aexit__(None, None, None)


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


async def running(stage: Stage, lease: float = 10) -> Job:
    await stage.enqueue("a")
    return await stage.claim_one(lease=lease)


async def due_in(stage: Stage, seconds: float) -> bool:
    """Is nothing due until just before this many seconds from now, and job "a" then?"""
    stage.clock.advance(seconds - MICROSECOND)
    early = await stage.claim(10)
    stage.clock.advance(MICROSECOND)
    return not early and ids(await stage.claim(10)) == ["a"]


# what was due


async def plain(stage: Stage) -> None:
    await stage.enqueue("a")


async def delayed(stage: Stage) -> None:
    await stage.enqueue("a", delay=10)
    stage.clock.advance(10)


async def absolute(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(10))
    stage.clock.advance(10)


async def absolute_for_long(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(10))
    stage.clock.advance(2 * HOUR)


async def past(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(-10))


async def retried_after_a_delay(stage: Stage) -> None:
    await stage.retry(await running(stage), delay=10)
    stage.clock.advance(10)


async def retried_at_a_time(stage: Stage) -> None:
    await stage.retry(await running(stage), run_at=stage.wall(10))
    stage.clock.advance(10)


async def promoted_at_a_time(stage: Stage) -> None:
    job = await running(stage)
    await stage.enqueue("a", update=Update(), run_at=stage.wall(10))
    await stage.complete(job)
    stage.clock.advance(10)


DUE = [
    plain,
    delayed,
    absolute,
    absolute_for_long,
    past,
    retried_after_a_delay,
    retried_at_a_time,
    promoted_at_a_time,
]
Arrange = Callable[[Stage], Awaitable[None]]


@pytest.mark.parametrize("arrange", DUE)
async def test_due_job_stays_due_after_a_step(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.step(-HOUR)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_due_job_stays_due_after_a_second_step(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.step(-HOUR)
    stage.clock.advance(5)
    await stage.step(-HOUR)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_due_job_stays_due_after_a_step_of_less_than_a_second(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.step(-0.9)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_run_released_after_the_step_is_due_again(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    job = await stage.claim_one()
    await stage.step(-HOUR)
    await stage.release(job)
    again = await stage.claim_one()
    await stage.expire()
    assert (again.id, ids(await stage.claim(10))) == ("a", ["a"])


async def test_due_jobs_keep_their_order(stage: SteppingStage) -> None:
    now = stage.wall()
    for n, seconds in enumerate((9, 3, 7, 3, 5)):
        await stage.enqueue(f"{n}", run_at=now + seconds * 1_000_000)
    await stage.enqueue("delayed", delay=6)
    await stage.enqueue("high", delay=8, priority=9)
    stage.clock.advance(10)
    await stage.step(-HOUR)
    await stage.enqueue("after the step")
    assert ids(await stage.claim(10)) == ["high", "1", "3", "4", "delayed", "2", "0", "after the step"]


# leases


async def test_due_jobs_keep_their_order_beside_jobs_that_are_early_after_a_step(stage: SteppingStage) -> None:
    """The early ones are in front: they were requested for a wall time, which is later now."""
    for number in range(5):
        await stage.enqueue(f"early{number}", run_at=stage.clock.now_us() + 10_000_000)
    await stage.step(-HOUR)
    stage.clock.advance(20)
    await stage.enqueue("low", priority=2)
    await stage.enqueue("due")
    assert [ids(await stage.claim(1)) for _ in range(3)] == [["due"], ["low"], []]


async def test_a_lease_lasts_its_own_remaining_length_and_is_taken_back_in_two_steps(stage: SteppingStage) -> None:
    await running(stage, lease=10)
    stage.clock.advance(4)
    await stage.step(-HOUR)
    stage.clock.advance(6 - MICROSECOND)
    assert (await stage.sweep()).overdue == []
    stage.clock.advance(MICROSECOND)
    assert (await stage.sweep()).overdue == ["a"]
    stage.clock.advance(5 - MICROSECOND)
    assert (await stage.sweep()).stalled == []
    stage.clock.advance(MICROSECOND)
    assert (await stage.sweep()).stalled == ["a"]


async def test_overdue_lease_is_taken_back_half_a_lease_after_its_mark_over_a_step(
    stage: SteppingStage,
) -> None:
    await running(stage, lease=10)
    stage.clock.advance(10)
    assert (await stage.sweep()).overdue == ["a"]
    stage.clock.advance(2)
    await stage.step(-HOUR)
    stage.clock.advance(3 - MICROSECOND)
    assert (await stage.sweep()).stalled == []
    stage.clock.advance(MICROSECOND)
    assert (await stage.sweep()).stalled == ["a"]


async def test_a_claim_says_how_long_a_lease_has_left(stage: SteppingStage) -> None:
    await running(stage, lease=10)
    stage.clock.advance(4)
    await stage.step(-HOUR)
    claim = await stage.storage.claim("q", 1, worker="w2", lease_ms=1000)
    assert claim.next_sweep_at is not None
    assert claim.next_sweep_at - claim.now == 6_000_000


async def test_worker_that_extends_keeps_its_lease_over_a_step(stage: SteppingStage) -> None:
    job = await running(stage, lease=10)
    await stage.step(-HOUR)
    for _ in range(20):
        stage.clock.advance(2.5)
        await stage.sweep()
        assert await stage.claim(worker="w2") == []
        assert (await stage.extend(job, lease=10)).lost == []
    assert await stage.complete(job) is SettleResult.OK


async def test_a_lease_taken_after_the_step_is_like_any_other(stage: SteppingStage) -> None:
    await plain(stage)
    await stage.step(-HOUR)
    await stage.claim_one(lease=10)
    stage.clock.advance(10 - MICROSECOND)
    assert (await stage.sweep()).overdue == []
    stage.clock.advance(MICROSECOND)
    assert (await stage.sweep()).overdue == ["a"]


async def test_a_lease_settles_after_the_step_and_a_stale_one_does_not(stage: SteppingStage) -> None:
    stale = await running(stage)
    await stage.expire()
    job = await stage.claim_one()
    await stage.step(-HOUR)
    assert await stage.complete(stale) is SettleResult.LOST
    assert await stage.complete(job) is SettleResult.OK


# lengths


async def test_delay_keeps_its_length_over_a_step(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    assert await due_in(stage, 60)


async def test_delay_requested_after_the_step_keeps_its_length(stage: SteppingStage) -> None:
    await stage.step(-HOUR)
    await stage.enqueue("a", delay=100)
    assert await due_in(stage, 100)


async def test_backoff_keeps_its_length_over_a_step(stage: SteppingStage) -> None:
    await stage.retry(await running(stage), delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    assert await due_in(stage, 60)


async def test_delay_of_a_stalled_job_keeps_its_length_over_a_step(stage: SteppingStage) -> None:
    for _ in range(2):
        await running(stage, lease=10)
        await stage.expire(lease=10)
    stage.clock.advance(4)
    await stage.step(-HOUR)
    assert await due_in(stage, 6)


async def test_delay_keeps_its_length_over_two_steps(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(10)
    await stage.step(-10 * HOUR)
    assert await due_in(stage, 50)


async def test_delay_restarts_after_a_clock_step_that_no_call_saw(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40 - HOUR)
    await stage.sweep()
    assert await due_in(stage, 100)


async def test_a_claim_says_how_long_to_sleep(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    claim = await stage.storage.claim("q", 1, worker="w1", lease_ms=1000)
    assert claim.next_run_at is not None
    assert claim.next_run_at - claim.now == 60_000_000


# forget times


async def test_outcome_is_kept_for_its_ttl_over_a_step(stage: SteppingStage) -> None:
    await stage.complete(await running(stage), ttl=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.sweep()).forgotten == 0
    assert await stage.get("a") is not None
    stage.clock.advance(MICROSECOND)
    assert await stage.get("a") is None
    assert (await stage.sweep()).forgotten == 1


async def test_forgotten_record_stays_forgotten_after_a_step(stage: SteppingStage) -> None:
    await stage.complete(await running(stage), ttl=10)
    await stage.fail(await stage_other(stage), ttl=1000)
    stage.clock.advance(10)
    await stage.step(-HOUR)
    assert await stage.get("a") is None
    assert (await stage.enqueue("a")).state is None
    assert await stage.get("other") is not None


async def stage_other(stage: Stage) -> Job:
    await stage.enqueue("other")
    return await stage.claim_one()


async def test_cached_outcome_is_returned_for_its_ttl_over_a_step(stage: SteppingStage) -> None:
    await stage.complete(await running(stage), ttl=1000, dedup=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.COMPLETED
    stage.clock.advance(MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_keep_of_a_waiter_lasts_its_length_over_a_step(stage: SteppingStage) -> None:
    await stage.enqueue("a", keep=100)
    job = await stage.claim_one()
    stage.clock.advance(40)
    await stage.step(-HOUR)
    await stage.complete(job, ttl=0)
    stage.clock.advance(60 - MICROSECOND)
    assert await stage.get("a") is not None
    stage.clock.advance(MICROSECOND)
    assert await stage.get("a") is None


async def test_previous_outcome_is_kept_for_its_ttl_over_a_step(stage: SteppingStage) -> None:
    await stage.fail(await running(stage), ttl=100)
    await stage.enqueue("a")
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.the("a")).previous is not None
    stage.clock.advance(MICROSECOND)
    assert (await stage.the("a")).previous is None


# What readers see


async def test_times_of_a_lease_are_wall_times_after_a_step(stage: SteppingStage) -> None:
    await stage.step(-HOUR)
    stage.clock.advance(1)
    await stage.enqueue("a")
    claimed = await stage.claim_one(lease=30)
    for job in (claimed, await stage.the("a")):
        assert job.run is not None
        assert (job.run_at, job.created_at, job.run.until_at) == (stage.wall(), stage.wall(), stage.wall(30))
        assert job.started_at == stage.wall() + 1
    assert await stage.complete(claimed) is SettleResult.OK


async def test_times_of_an_outcome_are_wall_times_after_a_step(stage: SteppingStage) -> None:
    await stage.step(-HOUR)
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=60, dedup=30)
    (listed,) = (await stage.storage.scan("q", state=State.COMPLETED)).jobs
    for job in (listed, await stage.the("a")):
        assert job.outcome is not None
        times = (job.outcome.ended_at, job.outcome.dedup_at, job.outcome.forget_at)
        assert times == (stage.wall(), stage.wall(30), stage.wall(60))
    await stage.enqueue("a", update=Update())
    previous = (await stage.the("a")).previous
    assert previous is not None
    assert previous.forget_at == stage.wall(60)


# A quiet queue


@pytest.mark.parametrize("look", ["claim", "ready"])
async def test_step_back_stretches_a_delay_of_a_quiet_queue_by_at_most_a_minute(
    stage: SteppingStage, look: str
) -> None:
    await stage.enqueue("a", delay=100)
    for _ in range(9):
        stage.clock.advance(10)
        assert await stage.claim() == [] if look == "claim" else await stage.storage.ready(["q"]) == []
    stage.clock.advance(-HOUR)
    assert await stage.claim() == []
    stage.clock.advance(10 + 60)
    assert ids(await stage.claim()) == ["a"]
