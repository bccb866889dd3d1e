"""Which job is next, when it is due, and how much a claim takes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from holdfast._core.jobs import Job, Request, Update, Work
from holdfast._core.replies import Claim, Enqueued
from holdfast.storage.conformance.verbs import Stage

MICROSECOND = 0.000001
MIB = 1_048_576


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


async def ask(stage: Stage, limit: int = 1) -> Claim:
    return await stage.storage.claim("q", limit, worker="w1", lease_ms=10_000)


async def add(stage: Stage, *names: str, priority: int = 5) -> list[Enqueued]:
    """Enqueue jobs in one batch."""
    return await stage.storage.enqueue("q", [Request(id, Work(b"payload", priority=priority)) for id in names])


# order


async def test_a_higher_priority_goes_first_and_five_is_the_default(stage: Stage) -> None:
    for priority in (4, 0, 9, 6):
        await stage.enqueue(f"{priority}", priority=priority)
    await stage.enqueue("default")
    assert ids(await stage.claim(5)) == ["9", "6", "default", "4", "0"]


async def test_within_a_priority_the_earlier_run_at_goes_first(stage: Stage) -> None:
    for seconds in (30, 10, 20):
        await stage.enqueue(f"{seconds}", run_at=stage.wall(seconds))
    stage.clock.advance(30)
    assert ids(await stage.claim(3)) == ["10", "20", "30"]


async def test_a_higher_priority_goes_before_an_earlier_run_at(stage: Stage) -> None:
    await stage.enqueue("early", run_at=stage.wall(-100), priority=5)
    await stage.enqueue("high", priority=6)
    assert ids(await stage.claim(2)) == ["high", "early"]


async def test_high_priority_job_that_is_not_due_does_not_delay_a_low_one(stage: Stage) -> None:
    await stage.enqueue("high", delay=10, priority=9)
    await stage.enqueue("low", priority=0)
    assert ids(await stage.claim(2)) == ["low"]


async def test_jobs_due_at_the_same_instant_run_in_order_of_arrival(stage: Stage) -> None:
    names = ["c", "a", "b", "zz", "0"]
    for id in names:
        await stage.enqueue(id)
    assert ids(await stage.claim(5)) == names


async def test_jobs_of_one_batch_go_in_its_order(stage: Stage) -> None:
    names = [f"{n}" for n in range(40)]
    random.Random(1).shuffle(names)
    await add(stage, *names)
    assert ids(await stage.claim(20)) + ids(await stage.claim(20)) == names


async def test_past_run_at_goes_before_earlier_arrivals(stage: Stage) -> None:
    await stage.enqueue("now")
    await stage.enqueue("past", run_at=stage.wall(-1))
    assert ids(await stage.claim(2)) == ["past", "now"]


async def test_at_one_absolute_run_at_jobs_go_in_the_order_of_their_arrival(stage: Stage) -> None:
    run_at = stage.wall(60)
    for id in ("b", "a"):
        await stage.enqueue(id, run_at=run_at)
        stage.clock.advance(1)
    await stage.enqueue("c", delay=58)
    stage.clock.advance(60)
    assert ids(await stage.claim(3)) == ["b", "a", "c"]


async def test_a_retry_goes_to_the_end_of_the_line_of_its_run_at(stage: Stage) -> None:
    await add(stage, "a", "b")
    await stage.retry(await stage.claim_one())
    assert ids(await stage.claim(2)) == ["b", "a"]


async def test_many_jobs_come_out_by_priority_then_run_at_then_arrival(stage: Stage) -> None:
    rng = random.Random(7)
    wanted: list[tuple[int, int, int, str]] = []
    for n in range(120):
        priority, run_at = rng.randrange(10), stage.wall(rng.randrange(-5, 5))
        await stage.enqueue(f"{n}", run_at=run_at, priority=priority)
        wanted.append((-priority, run_at, n, f"{n}"))
    stage.clock.advance(5)
    claimed: list[str] = []
    while jobs := await stage.claim(rng.randrange(1, 30)):
        claimed += ids(jobs)
    assert claimed == [id for *_, id in sorted(wanted)]


# when a job is due


async def by_delay(stage: Stage) -> None:
    await stage.enqueue("a", delay=5)


async def by_run_at(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(5))


async def by_retry_after_a_delay(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one(), delay=5)


async def by_retry_at_a_time(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one(), run_at=stage.wall(5))


Arrange = Callable[[Stage], Awaitable[None]]
IN_FIVE_SECONDS: list[Arrange] = [by_delay, by_run_at, by_retry_after_a_delay, by_retry_at_a_time]


@pytest.mark.parametrize("arrange", IN_FIVE_SECONDS)
async def test_a_job_is_never_claimed_a_microsecond_early_and_is_due_exactly_at_its_time(
    stage: Stage, arrange: Arrange
) -> None:
    await arrange(stage)
    stage.clock.advance(5 - MICROSECOND)
    assert await stage.claim() == []
    stage.clock.advance(MICROSECOND)
    assert ids(await stage.claim()) == ["a"]


@pytest.mark.parametrize("arrange", IN_FIVE_SECONDS)
async def test_a_claim_says_when_the_next_job_is_due(stage: Stage, arrange: Arrange) -> None:
    await arrange(stage)
    claim = await ask(stage)
    assert (claim.jobs, claim.now, claim.next_run_at) == ([], stage.wall(), stage.wall(5))


async def test_a_batch_is_due_at_once_though_its_stamps_run_ahead_of_the_clock(stage: Stage) -> None:
    replies = await add(stage, "a", "b", "c")
    assert replies[-1].generation > stage.wall()
    assert [job.run_at for job in await stage.claim(3)] == [stage.wall()] * 3


async def test_stamps_that_run_ahead_of_the_clock_make_nothing_due_early(stage: Stage) -> None:
    await stage.enqueue("later", run_at=stage.wall(MICROSECOND))
    replies = await add(stage, *"abcde")
    assert replies[-1].generation > stage.wall(MICROSECOND)
    assert "later" not in ids(await stage.claim(10))


async def test_the_next_run_at_is_the_earliest_of_all_priorities(stage: Stage) -> None:
    for seconds, priority in ((30, 9), (10, 5), (20, 0)):
        await stage.enqueue(f"{priority}", delay=seconds, priority=priority)
    assert (await ask(stage)).next_run_at == stage.wall(10)


async def test_claim_reports_remaining_ready_jobs(stage: Stage) -> None:
    await add(stage, "a", "b")
    claim = await ask(stage, 1)
    assert claim.next_run_at is not None
    assert claim.next_run_at <= claim.now


async def test_with_nothing_waiting_there_is_no_next_run_at(stage: Stage) -> None:
    assert (await ask(stage)).next_run_at is None
    await stage.enqueue("a")
    assert (await ask(stage)).next_run_at is None


async def test_a_retry_at_a_time_in_the_past_is_due_at_once(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one(), run_at=stage.wall(-50))
    assert ids(await stage.claim()) == ["a"]


# how much a claim takes


async def test_a_claim_takes_no_more_than_its_limit(stage: Stage) -> None:
    await add(stage, *"abcde")
    assert ids(await stage.claim(2)) == ["a", "b"]
    assert ids(await stage.claim(250)) == ["c", "d", "e"]


async def test_a_claim_takes_no_more_than_a_mebibyte(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id, bytes(MIB // 2))
    await stage.enqueue("d", b"1")
    claim = await ask(stage, 10)
    assert ids(claim.jobs) == ["a", "b"]
    assert claim.next_run_at is not None
    assert claim.next_run_at <= claim.now
    assert ids(await stage.claim(10)) == ["c", "d"]


async def test_a_claim_does_not_pass_over_a_large_job_for_a_small_one(stage: Stage) -> None:
    await stage.enqueue("small", b"1")
    await stage.enqueue("large", bytes(MIB))
    await stage.enqueue("last", b"1")
    assert ids(await stage.claim(10)) == ["small"]
    assert ids(await stage.claim(10)) == ["large"]
    assert ids(await stage.claim(10)) == ["last"]


# A change of priority


async def test_new_priority_moves_a_waiting_job_and_changes_nothing_else(stage: Stage) -> None:
    await add(stage, "first", "a", "b")
    before = await stage.the("a")
    assert await stage.prioritize("a", 6)
    assert await stage.the("a") == replace(before, work=replace(before.work, priority=6))
    assert ids(await stage.claim(1)) == ["a"]
    assert await stage.prioritize("first", 0)
    assert ids(await stage.claim(2)) == ["b", "first"]


async def test_new_priority_of_a_running_job_is_that_of_its_retry(stage: Stage) -> None:
    await stage.enqueue()
    job = await stage.claim_one()
    assert await stage.prioritize("a", 9)
    running = await stage.the()
    assert running == replace(job, work=replace(job.work, priority=9))
    await stage.enqueue("b", priority=8)
    await stage.retry(job)
    assert ids(await stage.claim(2)) == ["a", "b"]


async def test_new_priority_is_also_that_of_the_deferred_request(stage: Stage) -> None:
    await stage.enqueue()
    job = await stage.claim_one()
    await stage.enqueue(payload=b"2", update=Update(), priority=1)
    assert await stage.prioritize("a", 9)
    await stage.complete(job)
    again = await stage.the()
    assert (again.work.payload, again.work.priority) == (b"2", 9)


@pytest.mark.parametrize("end", [Stage.complete, Stage.fail], ids=["complete", "fail"])
async def test_priority_of_a_job_that_has_ended_stays(
    stage: Stage, end: Callable[[Stage, Job], Awaitable[object]]
) -> None:
    await stage.enqueue()
    await end(stage, await stage.claim_one())
    before = await stage.get()
    assert not await stage.prioritize("a", 9)
    assert await stage.get() == before
    assert not await stage.prioritize("nobody", 9)


async def test_priorities_of_many_jobs_change_in_one_step(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    assert await stage.storage.prioritize("q", ["c", "nobody", "b", "c"], 7) == [True, False, True, True]
    assert ids(await stage.claim(3)) == ["b", "c", "a"]
