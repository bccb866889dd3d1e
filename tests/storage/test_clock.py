"""The storage's clock steps back, or jumps ahead: nothing is lost, nothing runs twice, lengths last their own length.

Every test runs twice: the step comes while the storage is open, and while it is closed.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Job, State, Update
from holdfast._core.replies import Placed, SettleResult
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence

HOUR = 3600
MICROSECOND = 0.000001


class SteppingStage(Stage):
    """A stage whose clock can step, and whose storage may be closed when it does."""

    def __init__(self, harness: Harness, clock: ManualClock, folder: Path, *, reopens: bool) -> None:
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
    request: pytest.FixtureRequest, harness: Harness, clock: ManualClock, tmp_path: Path
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
    """Is nothing due until just before so many seconds from now, and job "a" then?"""
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
async def test_what_was_due_stays_due(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.step(-HOUR)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_what_was_due_stays_due_after_a_second_step(stage: SteppingStage, arrange: Arrange) -> None:
    await arrange(stage)
    await stage.step(-HOUR)
    stage.clock.advance(5)
    await stage.step(-HOUR)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_what_was_due_stays_due_after_a_step_of_less_than_a_second(
    stage: SteppingStage, arrange: Arrange
) -> None:
    await arrange(stage)
    await stage.step(-0.9)
    assert ids(await stage.claim(10)) == ["a"]


@pytest.mark.parametrize("arrange", DUE)
async def test_a_run_that_ends_after_the_step_goes_back_to_where_it_is_due(
    stage: SteppingStage, arrange: Arrange
) -> None:
    await arrange(stage)
    job = await stage.claim_one()
    await stage.step(-HOUR)
    await stage.release(job)
    again = await stage.claim_one()
    await stage.expire()
    assert (again.id, ids(await stage.claim(10))) == ("a", ["a"])


async def test_what_was_due_keeps_its_order(stage: SteppingStage) -> None:
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


async def test_a_lease_that_is_overdue_at_the_step_is_taken_back_half_a_lease_after_its_mark(
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


async def test_a_living_holder_keeps_its_lease(stage: SteppingStage) -> None:
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


async def test_a_delay_lasts_its_own_length(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    assert await due_in(stage, 60)


async def test_a_delay_asked_for_after_the_step_lasts_its_own_length(stage: SteppingStage) -> None:
    await stage.step(-HOUR)
    await stage.enqueue("a", delay=100)
    assert await due_in(stage, 100)


async def test_a_backoff_lasts_its_own_length(stage: SteppingStage) -> None:
    await stage.retry(await running(stage), delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    assert await due_in(stage, 60)


async def test_a_stalled_jobs_delay_lasts_its_own_length(stage: SteppingStage) -> None:
    for _ in range(2):
        await running(stage, lease=10)
        await stage.expire(lease=10)
    stage.clock.advance(4)
    await stage.step(-HOUR)
    assert await due_in(stage, 6)


async def test_lengths_last_their_own_length_over_two_steps(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(10)
    await stage.step(-10 * HOUR)
    assert await due_in(stage, 50)


async def test_a_step_that_the_queue_slept_through_costs_at_most_the_length_again(stage: SteppingStage) -> None:
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


async def test_an_outcome_is_remembered_for_its_own_length(stage: SteppingStage) -> None:
    await stage.complete(await running(stage), ttl=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.sweep()).forgotten == 0
    assert await stage.get("a") is not None
    stage.clock.advance(MICROSECOND)
    assert await stage.get("a") is None
    assert (await stage.sweep()).forgotten == 1


async def test_what_was_forgotten_stays_forgotten(stage: SteppingStage) -> None:
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


async def test_a_completed_job_answers_from_its_cache_for_its_own_length(stage: SteppingStage) -> None:
    await stage.complete(await running(stage), ttl=1000, dedup=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.COMPLETED
    stage.clock.advance(MICROSECOND)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_what_a_waiter_asked_for_lasts_its_own_length(stage: SteppingStage) -> None:
    await stage.enqueue("a", keep=100)
    job = await stage.claim_one()
    stage.clock.advance(40)
    await stage.step(-HOUR)
    await stage.complete(job, ttl=0)
    stage.clock.advance(60 - MICROSECOND)
    assert await stage.get("a") is not None
    stage.clock.advance(MICROSECOND)
    assert await stage.get("a") is None


async def test_a_previous_outcome_is_remembered_for_its_own_length(stage: SteppingStage) -> None:
    await stage.fail(await running(stage), ttl=100)
    await stage.enqueue("a")
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stage.clock.advance(60 - MICROSECOND)
    assert (await stage.the("a")).previous is not None
    stage.clock.advance(MICROSECOND)
    assert (await stage.the("a")).previous is None


# absolute times


async def test_an_absolute_time_asked_for_before_the_step_follows_the_corrected_clock(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    assert await due_in(stage, 2 * HOUR)


async def test_an_absolute_time_is_put_back_however_often_it_is_looked_at(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    for _ in range(12):
        stage.clock.advance(HOUR / 6 - 1)
        assert await stage.claim(10) == []
    assert await due_in(stage, 12)


async def test_an_absolute_time_asked_for_after_the_step_follows_the_corrected_clock(stage: SteppingStage) -> None:
    await stage.step(-HOUR)
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    assert await due_in(stage, 2 * HOUR)


async def test_an_absolute_time_that_the_old_clock_had_shown_is_not_due_if_asked_for_after_the_step(
    stage: SteppingStage,
) -> None:
    await stage.step(-HOUR)
    await stage.enqueue("a", run_at=stage.wall(HOUR / 2))
    assert await stage.claim() == []
    assert await due_in(stage, HOUR / 2)


async def test_an_absolute_time_follows_the_clock_over_two_steps(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    stage.clock.advance(HOUR)
    await stage.step(-2 * HOUR)
    assert await due_in(stage, 3 * HOUR)


async def test_an_absolute_time_follows_the_clock_back_and_ahead_again(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    await stage.step(-HOUR)
    assert await stage.claim() == []
    await stage.step(HOUR)
    assert await due_in(stage, 2 * HOUR)


async def test_a_retry_at_a_time_follows_the_corrected_clock(stage: SteppingStage) -> None:
    await stage.retry(await running(stage), run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    assert await due_in(stage, 2 * HOUR)


async def test_a_next_at_a_time_follows_the_corrected_clock(stage: SteppingStage) -> None:
    job = await running(stage)
    await stage.enqueue("a", update=Update(), run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    await stage.complete(job)
    assert await due_in(stage, 2 * HOUR)


async def by_request(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(100))


async def by_retry(stage: Stage) -> None:
    await stage.retry(await running(stage), run_at=stage.wall(100))


@pytest.mark.parametrize("arrange", [by_request, by_retry])
async def test_a_claim_says_how_long_to_sleep_until_an_absolute_time(stage: SteppingStage, arrange: Arrange) -> None:
    await stage.step(-HOUR)
    await arrange(stage)
    claim = await stage.storage.claim("q", 1, worker="w1", lease_ms=1000)
    assert claim.next_run_at is not None
    assert claim.next_run_at - claim.now == 100_000_000


@pytest.mark.parametrize("arrange", [by_request, by_retry])
async def test_an_absolute_time_asked_for_after_the_step_is_counted_as_scheduled(
    stage: SteppingStage, arrange: Arrange
) -> None:
    await stage.step(-HOUR)
    await arrange(stage)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled) == (0, 2)


async def test_a_backoff_takes_the_place_of_an_absolute_time(stage: SteppingStage) -> None:
    await absolute(stage)
    job = await stage.claim_one()
    await stage.step(-HOUR)
    await stage.retry(job, delay=100)
    assert (await stage.the("a")).run_at == stage.wall(100)
    assert await due_in(stage, 100)


async def test_a_stalled_jobs_delay_takes_the_place_of_an_absolute_time(stage: SteppingStage) -> None:
    await absolute(stage)
    await stage.step(-HOUR)
    for _ in range(2):
        await stage.claim_one(lease=10)
        await stage.expire(lease=10)
    assert (await stage.the("a")).run_at == stage.wall(10)
    assert await due_in(stage, 10)


@pytest.mark.parametrize("limit", [1, 3, 20])
@pytest.mark.parametrize("claims", [False, True], ids=["nobody claims", "somebody claims"])
async def test_absolute_times_asked_for_before_and_after_the_step_keep_their_order(
    stage: SteppingStage, claims: bool, limit: int
) -> None:
    now = stage.wall() - HOUR * 1_000_000
    for seconds in (9000, 7000, 8000):
        await stage.enqueue(f"{seconds}", run_at=now + seconds * 1_000_000)
    await stage.enqueue("8000 too", run_at=now + 8000 * 1_000_000)
    await stage.step(-HOUR)
    for seconds in (8500, 6500, 7500):
        await stage.enqueue(f"{seconds}", run_at=now + seconds * 1_000_000)
    await stage.enqueue("8000 last", run_at=now + 8000 * 1_000_000)
    for _ in range(9):
        stage.clock.advance(1000)
        if claims and stage.wall() < now + 6500 * 1_000_000:
            assert await stage.claim(2) == []
    order: list[str] = []
    for _ in range(20):
        order += ids(await stage.claim(limit))
    assert order == ["6500", "7000", "7500", "8000", "8000 too", "8000 last", "8500", "9000"]


async def test_jobs_that_only_look_due_hold_up_what_is_due_for_a_bounded_number_of_claims(
    stage: SteppingStage,
) -> None:
    for n in range(30):
        await stage.enqueue(f"early {n}", run_at=stage.wall(HOUR))
    await stage.step(-HOUR)
    stage.clock.advance(HOUR)
    await stage.enqueue("now")
    for _ in range(30 // 5 + 1):
        claim = await stage.storage.claim("q", 5, worker="w1", lease_ms=1000)
        if claim.jobs:
            break
        assert claim.next_run_at is not None
        assert claim.next_run_at <= claim.now, "there is more to claim, and nobody is told"
    assert ids(claim.jobs) == ["now"]
    stage.clock.advance(HOUR)
    assert len(await stage.claim(50)) == 30


@pytest.mark.parametrize(
    ("rule", "seconds"), [("if_earlier", 5400), ("if_later", 7200)], ids=["if_earlier", "if_later"]
)
async def test_an_update_compares_absolute_times_as_their_callers_gave_them(
    stage: SteppingStage, rule: str, seconds: float
) -> None:
    now = stage.wall() - HOUR * 1_000_000
    await stage.enqueue("a", run_at=now + 7200 * 1_000_000)
    await stage.step(-HOUR)
    await stage.enqueue("a", update=Update(run_at=rule), run_at=now + 5400 * 1_000_000)  # type: ignore[arg-type]
    assert (await stage.the("a")).run_at == now + seconds * 1_000_000
    assert await due_in(stage, seconds)


@pytest.mark.parametrize(
    ("rule", "seconds"), [("if_earlier", 5400), ("if_later", 7200)], ids=["if_earlier", "if_later"]
)
async def test_a_second_update_of_next_compares_absolute_times_as_their_callers_gave_them(
    stage: SteppingStage, rule: str, seconds: float
) -> None:
    now = stage.wall() - HOUR * 1_000_000
    job = await running(stage)
    await stage.enqueue("a", update=Update(), run_at=now + 7200 * 1_000_000)
    await stage.step(-HOUR)
    await stage.enqueue("a", update=Update(run_at=rule), run_at=now + 5400 * 1_000_000)  # type: ignore[arg-type]
    await stage.complete(job)
    assert await due_in(stage, seconds)


@pytest.mark.parametrize(
    ("rule", "seconds"), [("if_earlier", 5400), ("if_later", 7200)], ids=["if_earlier", "if_later"]
)
async def test_a_merge_compares_absolute_times_as_their_callers_gave_them(
    stage: SteppingStage, rule: str, seconds: float
) -> None:
    now = stage.wall() - HOUR * 1_000_000
    job = await running(stage)
    await stage.enqueue("a", update=Update(run_at=rule), run_at=now + 7200 * 1_000_000)  # type: ignore[arg-type]
    await stage.step(-HOUR)
    await stage.retry(job, run_at=now + 5400 * 1_000_000)
    assert await due_in(stage, seconds)


# stamps


async def test_generations_and_fences_never_go_back(stage: SteppingStage) -> None:
    stamps: list[int] = []
    for seconds in (-HOUR, -0.5, -2 * HOUR, 10, -3, HOUR, -30 * HOUR):
        stamps.append((await stage.enqueue("a", update=Update())).generation)
        job = await stage.claim_one()
        stamps.append(fence(job))
        stamps.append((await stage.enqueue("a", update=Update())).generation)
        await stage.step(seconds)
        stamps.append((await stage.enqueue("a", update=Update())).generation)
        await stage.complete(job)
    assert stamps == sorted(set(stamps))


# small steps


async def test_a_step_of_less_than_a_second_is_waited_out(stage: SteppingStage) -> None:
    await stage.enqueue("a", delay=100)
    stage.clock.advance(40)
    await stage.step(-0.9)
    assert await due_in(stage, 60.9)


async def test_many_steps_of_less_than_a_second_take_no_lease_and_lose_nothing(stage: SteppingStage) -> None:
    job = await running(stage, lease=10)
    for _ in range(20):
        await stage.step(-0.9)
        stage.clock.advance(1)
        assert (await stage.sweep()).overdue == []
        assert (await stage.extend(job)).lost == []
    assert await stage.complete(job) is SettleResult.OK


async def test_a_small_step_is_not_seen_as_a_clock_to_follow(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(100))
    stage.clock.advance(40)
    await stage.step(-0.9)
    assert await due_in(stage, 60.9)


# jumps ahead


async def test_no_living_lease_is_reaped_by_the_claims_after_a_jump_ahead(stage: SteppingStage) -> None:
    for n in range(8):
        await stage.enqueue(f"{n}")
    jobs = await stage.claim(8, lease=10)
    await stage.step(HOUR)
    for _ in range(10):
        assert await stage.claim(8, worker="w2") == []
        stage.clock.advance(0.25)
    assert [(await stage.extend(job)).lost for job in jobs] == [[]] * 8
    stage.clock.advance(9)
    assert await stage.claim(8, worker="w2") == []
    assert [await stage.complete(job) for job in jobs] == [SettleResult.OK] * 8


async def test_a_lease_survives_a_jump_ahead_and_back(stage: SteppingStage) -> None:
    job = await running(stage, lease=10)
    await stage.step(HOUR)
    assert (await stage.sweep()).overdue == ["a"]
    await stage.step(-HOUR)
    stage.clock.advance(2.5)
    assert (await stage.sweep()).stalled == []
    assert (await stage.extend(job)).lost == []
    stage.clock.advance(9)
    assert (await stage.sweep()).overdue == []


async def test_a_jump_ahead_makes_due_what_the_clock_says_is_due(stage: SteppingStage) -> None:
    await stage.enqueue("absolute", run_at=stage.wall(HOUR))
    await stage.enqueue("delayed", delay=HOUR)
    await stage.enqueue("later", run_at=stage.wall(HOUR + 1))
    await stage.step(HOUR)
    assert ids(await stage.claim(10)) == ["absolute", "delayed"]


# what readers see


async def test_readers_see_run_at_in_wall_time(stage: SteppingStage) -> None:
    await stage.enqueue("delayed", delay=100)
    absolute = stage.wall(2 * HOUR)
    await stage.enqueue("absolute", run_at=absolute)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    assert (await stage.the("delayed")).run_at == stage.wall(60)
    assert (await stage.the("absolute")).run_at == absolute
    listed = {job.id: job.run_at for job in (await stage.storage.scan("q", state=State.WAITING)).jobs}
    assert (listed["delayed"], listed["absolute"]) == (stage.wall(60), absolute)
    stage.clock.advance(60)
    assert (await stage.claim_one()).run_at == stage.wall()


async def test_a_claimed_job_shows_the_absolute_time_that_it_was_given(stage: SteppingStage) -> None:
    run_at = stage.wall(2 * HOUR)
    await stage.enqueue("a", run_at=run_at)
    await stage.step(-HOUR)
    stage.clock.advance(3 * HOUR)
    job = await stage.claim_one()
    assert job.run_at == (await stage.the("a")).run_at == run_at


async def test_counts_and_ages_are_right_after_the_step(stage: SteppingStage) -> None:
    await stage.enqueue("ready")
    await stage.enqueue("scheduled", delay=100)
    stage.clock.advance(40)
    await stage.step(-HOUR)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled, stats.oldest_ready_ms) == (1, 2, 40_000)
    stage.clock.advance(60)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled, stats.oldest_ready_ms) == (2, 1, 100_000)


# all together


async def test_nothing_is_lost_and_nothing_runs_twice(stage: SteppingStage) -> None:
    for n in range(40):
        await stage.enqueue(f"{n}", delay=n % 7, priority=n % 3)
    held = await stage.claim(5, worker="dead")
    lives = await stage.claim(5, worker="lives")
    await stage.step(-HOUR)
    runs: dict[str, int] = {}
    for _ in range(60):
        stage.clock.advance(0.5)
        for job in lives:
            assert (await stage.extend(job, worker="lives")).lost == []
        for job in await stage.claim(10, worker="new"):
            assert job.id not in ids(lives)
            runs[job.id] = runs.get(job.id, 0) + 1
            assert await stage.complete(job, ttl=0, worker="new") is SettleResult.OK
    for job in lives:
        assert await stage.complete(job, worker="lives") is SettleResult.OK
    assert sorted(runs) == sorted({f"{n}" for n in range(40)} - set(ids(lives)))
    assert set(runs.values()) == {1}
    assert [await stage.complete(job, worker="dead") for job in held] == [SettleResult.LOST] * 5


@pytest.mark.parametrize("seed", range(8))
async def test_through_any_steps_delays_last_and_absolute_times_follow_what_the_clock_has_shown(
    stage: SteppingStage, seed: int
) -> None:
    rng = random.Random(seed)
    elapsed = 0.0
    lasts: dict[str, float] = {}
    """When, in time that has truly passed, each delay ends."""
    wants: dict[str, int] = {}
    """The absolute times that the clock has not shown since they were asked for."""
    due: set[str] = set()
    for n in range(60):
        match rng.randrange(4):
            case 0:
                seconds = rng.randrange(1, 4000)
                await stage.enqueue(f"{n}", delay=seconds)
                lasts[f"{n}"] = elapsed + seconds
            case 1:
                wants[f"{n}"] = stage.wall(rng.randrange(-2000, 6000))
                await stage.enqueue(f"{n}", run_at=wants[f"{n}"])
            case 2:
                await stage.step(-rng.randrange(2, 5000))
            case _:
                seconds = rng.randrange(1, 2000)
                stage.clock.advance(seconds)
                elapsed += seconds
        due |= {id for id, at in lasts.items() if at <= elapsed}
        due |= {id for id, at in wants.items() if at <= stage.wall()}
        lasts = {id: at for id, at in lasts.items() if id not in due}
        wants = {id: at for id, at in wants.items() if id not in due}
        if rng.random() < 0.3:
            claimed: set[str] = set()
            for _ in range(20):
                claimed |= set(ids(await stage.claim(10, lease=86_400)))
            assert claimed == due
            due = set()
