"""The storage's clock steps back, or jumps ahead: absolute times, stamps, small steps, and what readers see."""

from __future__ import annotations

import random

import pytest

from holdfast._core.jobs import State, Update
from holdfast._core.replies import SettleResult
from holdfast.storage.conformance.clock_steps import HOUR, Arrange, SteppingStage, absolute, due_in, ids, running
from holdfast.storage.conformance.clock_steps import stage as stage
from holdfast.storage.conformance.verbs import Stage, fence

# absolute times


async def test_an_absolute_time_asked_for_before_the_step_follows_the_corrected_clock(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(2 * HOUR))
    stage.clock.advance(HOUR)
    await stage.step(-HOUR)
    assert await due_in(stage, 2 * HOUR)


async def test_absolute_time_follows_the_clock_after_any_number_of_claims(stage: SteppingStage) -> None:
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


async def test_absolute_time_shown_before_the_step_is_not_due_if_requested_after_it(
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


async def test_jobs_that_only_look_due_delay_due_jobs_by_a_bounded_number_of_claims(
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
        assert claim.next_run_at <= claim.now, "there is more to claim, but no claimer hears of it"
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


async def test_step_back_of_less_than_a_second_holds_the_clock(stage: SteppingStage) -> None:
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


async def test_absolute_time_is_exact_after_a_step_of_less_than_a_second(stage: SteppingStage) -> None:
    await stage.enqueue("a", run_at=stage.wall(100))
    stage.clock.advance(40)
    await stage.step(-0.9)
    assert await due_in(stage, 60.9)


# jumps ahead


async def test_claims_after_a_jump_ahead_take_back_no_live_lease(stage: SteppingStage) -> None:
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


async def test_jump_ahead_makes_jobs_due_by_the_new_clock(stage: SteppingStage) -> None:
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


async def test_no_job_is_lost_or_runs_twice_over_steps(stage: SteppingStage) -> None:
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
async def test_delays_and_absolute_times_are_right_through_random_clock_steps(stage: SteppingStage, seed: int) -> None:
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
