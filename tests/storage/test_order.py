"""Which job is next, when it is due, how queues are listed, counted, paused and emptied, and who serves them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Fail, Job, Request, State, Update, Work
from holdfast._core.replies import Claim, Enqueued, Page, SettleResult
from holdfast.storage import connect
from tests.storage.stage import Stage, fence

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


async def test_a_high_priority_that_is_not_due_does_not_hold_up_a_low_one(stage: Stage) -> None:
    await stage.enqueue("high", delay=10, priority=9)
    await stage.enqueue("low", priority=0)
    assert ids(await stage.claim(2)) == ["low"]


async def test_at_the_same_instant_jobs_go_in_the_order_of_their_arrival_whatever_their_ids(stage: Stage) -> None:
    names = ["c", "a", "b", "zz", "0"]
    for id in names:
        await stage.enqueue(id)
    assert ids(await stage.claim(5)) == names


async def test_jobs_of_one_batch_go_in_its_order(stage: Stage) -> None:
    names = [f"{n}" for n in range(40)]
    random.Random(1).shuffle(names)
    await add(stage, *names)
    assert ids(await stage.claim(20)) + ids(await stage.claim(20)) == names


async def test_a_past_run_at_goes_before_what_arrived_earlier(stage: Stage) -> None:
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


async def test_a_claim_that_leaves_ready_jobs_says_so(stage: Stage) -> None:
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


@pytest.mark.parametrize("scheme", ["memory://", "sqlite:///{}/large.db"])
async def test_a_job_larger_than_a_mebibyte_is_claimed_alone(clock: ManualClock, tmp_path: Path, scheme: str) -> None:
    async with connect(scheme.format(tmp_path), clock=clock, max_payload=3 * MIB) as storage:
        stage = Stage(storage, clock)
        await stage.enqueue("large", bytes(2 * MIB))
        await stage.enqueue("small", b"1")
        assert ids(await stage.claim(10)) == ["large"]
        assert ids(await stage.claim(10)) == ["small"]
        assert await stage.problems() == []


# pages


async def pages(stage: Stage, state: State | None, limit: int) -> list[Page]:
    found = [await stage.storage.scan("q", state=state, limit=limit)]
    while found[-1].after is not None:
        found.append(await stage.storage.scan("q", state=state, after=found[-1].after, limit=limit))
    return found


async def scanned(stage: Stage, state: State | None, limit: int = 3) -> list[str]:
    found = await pages(stage, state, limit)
    assert all(len(page.jobs) <= limit for page in found)
    return [job.id for page in found for job in page.jobs]


async def populate(stage: Stage) -> None:
    """Seven jobs in every state."""
    for kind in ("cancelled", "completed", "failed", "running"):
        for n in range(7):
            await stage.enqueue(f"{kind}-{n}")
            if kind == "cancelled":
                await stage.cancel(f"{kind}-{n}")
                continue
            job = await stage.claim_one(lease=60 - n)
            if kind == "completed":
                await stage.complete(job, ttl=100 + n)
            elif kind == "failed":
                await stage.fail(job, ttl=200 - n)
    for n in range(7):
        await stage.enqueue(f"waiting-{n}", priority=n, delay=n % 2)


ORDER = {
    State.WAITING: [6, 5, 4, 3, 2, 1, 0],
    State.RUNNING: [6, 5, 4, 3, 2, 1, 0],
    State.COMPLETED: [0, 1, 2, 3, 4, 5, 6],
    State.FAILED: [6, 5, 4, 3, 2, 1, 0],
    State.CANCELLED: [0, 1, 2, 3, 4, 5, 6],
}
"""Waiting as they would be claimed, running by deadline, finished by forget time; then by id."""


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 200])
@pytest.mark.parametrize("state", State)
async def test_the_pages_of_a_state_add_up_in_its_order(stage: Stage, state: State, limit: int) -> None:
    await populate(stage)
    assert await scanned(stage, state, limit) == [f"{state}-{n}" for n in ORDER[state]]


@pytest.mark.parametrize("limit", [1, 4, 35, 200])
async def test_the_pages_of_all_states_are_those_of_each_one_after_the_other(stage: Stage, limit: int) -> None:
    await populate(stage)
    assert await scanned(stage, None, limit) == [f"{state}-{n}" for state in State for n in ORDER[state]]


async def test_waiting_jobs_are_listed_as_they_would_be_claimed(stage: Stage) -> None:
    rng = random.Random(3)
    for n in range(40):
        await stage.enqueue(f"{n}", run_at=stage.wall(rng.randrange(-3, 0)), priority=rng.randrange(10))
    listed = await scanned(stage, State.WAITING, 7)
    assert listed == ids(await stage.claim(40))


async def test_the_last_page_has_no_cursor_even_when_it_is_full(stage: Stage) -> None:
    await add(stage, *"abcd")
    assert [page.after is None for page in await pages(stage, State.WAITING, 2)] == [False, True]


async def test_a_queue_that_is_not_there_has_one_empty_page(stage: Stage) -> None:
    for state in (None, *State):
        assert await stage.storage.scan("nowhere", state=state) == Page([], None)


@pytest.mark.parametrize("state", [None, State.WAITING], ids=["all", "waiting"])
async def test_what_does_not_change_is_listed_once_while_other_jobs_come_and_go(
    stage: Stage, state: State | None
) -> None:
    await add(stage, *(f"go-{n:02}" for n in range(40)), priority=6)
    await add(stage, *(f"stay-{n:02}" for n in range(20)))
    listed: list[str] = []
    page = await stage.storage.scan("q", state=state, limit=3)
    turn = 0
    while True:
        listed += ids(page.jobs)
        if page.after is None:
            break
        for job in await stage.claim(1):
            assert job.id.startswith("go-")
            await stage.complete(job, ttl=0)
        await stage.enqueue(f"come-{turn:02}", priority=4)
        turn += 1
        page = await stage.storage.scan("q", state=state, after=page.after, limit=3)
    assert [id for id in listed if id.startswith("stay-")] == [f"stay-{n:02}" for n in range(20)]


async def test_a_scan_goes_on_though_the_job_at_its_cursor_is_gone(stage: Stage) -> None:
    await add(stage, *"abcde")
    page = await stage.storage.scan("q", state=State.WAITING, limit=2)
    await stage.claim(2)
    rest = await stage.storage.scan("q", state=State.WAITING, after=page.after, limit=10)
    assert ids(rest.jobs) == ["c", "d", "e"]


async def test_a_job_that_moves_on_during_a_scan_of_all_is_listed_where_it_is_found(stage: Stage) -> None:
    await add(stage, *"abcdef")
    page = await stage.storage.scan("q", limit=2)
    assert ids(page.jobs) == ["a", "b"]
    for job in await stage.claim(6):
        await stage.complete(job)
    rest = await stage.storage.scan("q", after=page.after, limit=10)
    assert ids(rest.jobs) == list("abcdef")


async def test_forgotten_records_make_pages_shorter_and_never_end_a_scan(stage: Stage) -> None:
    for n in range(6):
        await stage.enqueue(f"{n}")
        await stage.complete(await stage.claim_one(), ttl=10 if n < 4 else 100)
    stage.clock.advance(10)
    assert await scanned(stage, State.COMPLETED, 2) == ["4", "5"]


# snapshot


async def test_a_snapshot_counts_jobs_by_state_and_view(stage: Stage) -> None:
    await populate(stage)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled, stats.running) == (4, 3, 7)
    assert (stats.completed, stats.failed, stats.cancelled) == (7, 7, 7)
    assert (stats.retrying, stats.deferred) == (0, 0)


async def test_a_job_is_scheduled_until_its_time_and_ready_from_then_on(stage: Stage) -> None:
    await stage.enqueue("a", delay=5)
    stage.clock.advance(5 - MICROSECOND)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled) == (0, 1)
    stage.clock.advance(MICROSECOND)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled) == (1, 0)


async def test_retrying_is_waiting_with_retries_whether_due_or_not(stage: Stage) -> None:
    for count in ("retries", "stalls", "timeouts"):
        await stage.enqueue(count)
        await stage.retry(await stage.claim_one(), counts=count, delay=10)
    stats = await stage.stats()
    assert (stats.retrying, stats.scheduled) == (1, 3)
    stage.clock.advance(10)
    assert (await stage.stats()).retrying == 1
    await stage.claim(3)
    assert (await stage.stats()).retrying == 0


async def test_deferred_is_running_with_next(stage: Stage) -> None:
    await add(stage, "a", "b")
    await stage.claim(2)
    await stage.enqueue("a", update=Update())
    stats = await stage.stats()
    assert (stats.running, stats.deferred) == (2, 1)
    await stage.cancel("a")
    assert (await stage.stats()).deferred == 0


async def test_the_oldest_ready_age_counts_from_when_the_job_was_due(stage: Stage) -> None:
    await stage.enqueue("scheduled", delay=10, priority=1)
    stage.clock.advance(3)
    await stage.enqueue("ready", priority=8)
    stage.clock.advance(4)
    assert (await stage.stats()).oldest_ready_ms == 4000
    stage.clock.advance(13)
    assert (await stage.stats()).oldest_ready_ms == 17_000
    assert (await stage.claim_one()).id == "ready"
    assert (await stage.stats()).oldest_ready_ms == 10_000


async def test_a_past_run_at_is_as_old_as_its_request(stage: Stage) -> None:
    await stage.enqueue("a", run_at=stage.wall(-1000))
    stage.clock.advance(2)
    assert (await stage.stats()).oldest_ready_ms == 2000


async def test_with_nothing_ready_the_oldest_age_is_zero(stage: Stage) -> None:
    await stage.enqueue("scheduled", delay=1000)
    await stage.enqueue("running", priority=9)
    await stage.claim_one(lease=1000)
    stage.clock.advance(500)
    assert (await stage.stats()).oldest_ready_ms == 0


async def test_totals_count_what_has_happened_to_jobs(stage: Stage) -> None:
    await add(stage, "a", "b", "c", "d", "e")
    a, b, c, d = await stage.claim(4)
    await stage.enqueue("e", update=Update())
    await stage.enqueue("a", update=Update())
    await stage.complete(a, ttl=10)
    await stage.retry(b)
    await stage.retry(c, counts="timeouts")
    await stage.release(d)
    await stage.cancel("e")
    b = await stage.claim_one()
    await stage.cancel(b.id)
    await stage.fail(b)
    await stage.enqueue("c")
    assert (await stage.stats()).totals == {
        "enqueued": 5,
        "claimed": 5,
        "updated": 1,
        "deferred": 1,
        "completed": 1,
        "promoted": 1,
        "retried": 1,
        "timed_out": 1,
        "released": 1,
        "cancelled": 2,
        "cancel_asked": 1,
    }


async def test_totals_count_failures_stalls_purges_and_what_was_forgotten(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    a, _ = await stage.claim(2)
    await stage.fail(a, ttl=10)
    await stage.expire()
    await stage.sweep()
    await stage.storage.purge("q", [State.WAITING])
    totals = (await stage.stats()).totals
    assert {kind: totals[kind] for kind in ("failed", "stalled", "purged", "forgotten")} == {
        "failed": 1,
        "stalled": 1,
        "purged": 2,
        "forgotten": 1,
    }


# pause


async def test_a_paused_queue_gives_out_no_jobs_and_says_why(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.pause("q", True, reason="a release")
    claim = await ask(stage)
    assert (claim.jobs, claim.paused, claim.next_run_at) == ([], True, None)
    stats = await stage.stats()
    assert (stats.paused, stats.reason, stats.ready) == (True, "a release", 1)


async def test_a_resumed_queue_gives_out_its_jobs_in_order(stage: Stage) -> None:
    await stage.storage.pause("q", True, reason="a release")
    await add(stage, "a", "b")
    await stage.storage.pause("q", False, reason="ignored")
    claim = await ask(stage, 2)
    assert (ids(claim.jobs), claim.paused) == (["a", "b"], False)
    stats = await stage.stats()
    assert (stats.paused, stats.reason) == (False, "")


async def test_pause_stops_nothing_but_claims(stage: Stage) -> None:
    await add(stage, *"abcd")
    a, b, c = await stage.claim(3)
    await stage.storage.pause("q", True)
    assert (await stage.extend(a)).lost == []
    assert await stage.complete(a) is SettleResult.OK
    assert await stage.retry(b) is SettleResult.OK
    assert await stage.fail(c) is SettleResult.OK
    assert await stage.cancel("d")
    assert (await stage.enqueue("e")).generation
    assert (await stage.the("b")).state is State.WAITING
    assert await stage.claim(5) == []


async def test_a_paused_queue_is_still_swept_by_claims(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=10)
    await stage.storage.pause("q", True)
    for seconds in (10, 5):
        stage.clock.advance(seconds)
        await stage.claim()
    assert (await stage.the("a")).stalls == 1


async def test_a_queue_may_be_paused_before_it_has_a_job(stage: Stage) -> None:
    await stage.storage.pause("q", True, reason="not yet")
    await stage.enqueue("a")
    assert await stage.claim() == []


# purge


async def test_purge_deletes_only_the_states_it_is_given(stage: Stage) -> None:
    await populate(stage)
    assert await stage.storage.purge("q", [State.FAILED, State.WAITING]) == 14
    assert await scanned(stage, State.FAILED) == await scanned(stage, State.WAITING) == []
    stats = await stage.stats()
    assert (stats.running, stats.completed, stats.cancelled) == (7, 7, 7)


async def test_purge_is_bounded_and_called_until_it_is_done(stage: Stage) -> None:
    await add(stage, *"abcde")
    for job in await stage.claim(2):
        await stage.complete(job)
    done = [await stage.storage.purge("q", [State.WAITING, State.COMPLETED], 2) for _ in range(4)]
    assert done == [2, 2, 1, 0]
    assert await scanned(stage, None) == []


async def test_a_purged_job_is_gone_and_its_id_is_free(stage: Stage) -> None:
    first = await stage.enqueue("a")
    await stage.storage.purge("q", [State.WAITING])
    assert await stage.get("a") is None
    again = await stage.enqueue("a")
    assert (again.state, again.generation > first.generation) == (None, True)


async def test_purge_asks_running_jobs_to_cancel_once_and_drops_what_follows_them(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    a, *_ = await stage.claim(3)
    await stage.enqueue("a", update=Update())
    assert [await stage.storage.purge("q", [State.RUNNING], 2) for _ in range(3)] == [2, 1, 0]
    assert len((await stage.extend(a)).cancel_asked) == 1
    await stage.release(a)
    assert (await stage.the("a")).state is State.CANCELLED


async def test_purge_with_running_jobs_stays_within_its_limit(stage: Stage) -> None:
    await add(stage, *"abcd")
    await stage.claim(2)
    assert [await stage.storage.purge("q", list(State), 3) for _ in range(3)] == [3, 1, 0]


async def test_an_empty_queue_is_dropped_only_when_asked_for(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.purge("q", list(State))
    await stage.storage.purge("q", list(State))
    assert (await stage.stats()).totals["purged"] == 1
    assert await stage.storage.purge("q", list(State), drop=True) == 0
    assert (await stage.storage.snapshot()).queues == []


async def test_a_queue_with_a_record_left_is_not_dropped(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.storage.purge("q", list(State), drop=True)
    assert await stage.storage.purge("q", list(State), drop=True) == 0
    assert await stage.complete(job) is SettleResult.OK
    assert await stage.storage.purge("q", [State.WAITING], drop=True) == 0
    assert (await stage.the("a")).state is State.COMPLETED


async def test_a_dropped_queue_is_new_when_it_is_used_again(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.pause("q", True)
    while await stage.storage.purge("q", list(State), drop=True):
        pass
    await stage.enqueue("b")
    stats = await stage.stats()
    assert (stats.paused, stats.totals) == (False, {"enqueued": 1})
    assert ids(await stage.claim(5)) == ["b"]


async def test_the_stamps_of_a_dropped_queue_do_not_come_again(stage: Stage) -> None:
    generations = {reply.generation for reply in await add(stage, *"abc")}
    stale = await stage.claim_one()
    await stage.complete(stale, ttl=0)
    while await stage.storage.purge("q", list(State), drop=True):
        pass
    again = await add(stage, *"abc")
    claimed = await stage.claim(3)
    stamps = {reply.generation for reply in again} | {fence(job) for job in claimed}
    assert not stamps & (generations | {fence(stale)})
    assert await stage.complete(stale) is SettleResult.LOST


# workers


async def announce(stage: Stage, worker: str, *queues: str, ttl: float = 10) -> bool:
    """Returns whether the worker is told to stop."""
    return (await stage.storage.announce(worker, {"queues": list(queues), "pid": 1}, ttl_ms=round(ttl * 1000))).evict


async def workers(stage: Stage) -> list[str]:
    return [stats.worker for stats in (await stage.storage.snapshot()).workers]


async def test_a_worker_is_listed_under_the_queues_that_it_serves(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    await stage.enqueue("a")
    await other.enqueue("a")
    await announce(stage, "w2", "q")
    await announce(stage, "w1", "q", "other")
    assert await workers(stage) == ["w1", "w2"]
    assert ((await stage.stats()).workers, (await other.stats()).workers) == (["w1", "w2"], ["w1"])


async def test_the_last_announcement_counts(stage: Stage) -> None:
    await announce(stage, "w1", "q")
    stage.clock.advance(1)
    await stage.storage.announce("w1", {"pid": 2, "queues": []}, ttl_ms=5000)
    (stats,) = (await stage.storage.snapshot()).workers
    assert stats.facts == {"pid": 2, "queues": []}
    assert (stats.beat_at, stats.expires_at) == (stage.wall(), stage.wall(5))


async def test_a_worker_that_is_silent_for_its_time_is_there_no_more(stage: Stage) -> None:
    await stage.enqueue("a")
    await announce(stage, "w1", "q", ttl=10)
    stage.clock.advance(10 - MICROSECOND)
    assert await workers(stage) == ["w1"]
    stage.clock.advance(MICROSECOND)
    assert await workers(stage) == []
    assert (await stage.stats()).workers == []


async def test_a_worker_that_announces_itself_again_stays(stage: Stage) -> None:
    for _ in range(5):
        await announce(stage, "w1", "q", ttl=10)
        stage.clock.advance(9)
    assert await workers(stage) == ["w1"]


async def test_one_workers_announcement_does_not_remove_another_that_lives(stage: Stage) -> None:
    await announce(stage, "w1", ttl=10)
    await announce(stage, "w2", ttl=20)
    stage.clock.advance(10)
    await announce(stage, "w3")
    assert await workers(stage) == ["w2", "w3"]


async def test_an_evicted_worker_is_told_at_every_announcement_and_no_other_is(stage: Stage) -> None:
    assert not await announce(stage, "w1")
    await announce(stage, "w2")
    assert await stage.storage.evict("w1") is True
    (w1, w2) = (await stage.storage.snapshot()).workers
    assert (w1.evict_asked, w2.evict_asked) == (True, False)
    assert await announce(stage, "w1")
    assert await announce(stage, "w1")
    assert not await announce(stage, "w2")


async def test_a_worker_that_is_not_there_cannot_be_evicted(stage: Stage) -> None:
    assert await stage.storage.evict("w1") is False
    await announce(stage, "w1", ttl=10)
    stage.clock.advance(10)
    assert await stage.storage.evict("w1") is False


async def test_an_eviction_ends_with_the_worker_that_it_was_meant_for(stage: Stage) -> None:
    await announce(stage, "w1", ttl=10)
    await stage.storage.evict("w1")
    stage.clock.advance(10)
    assert not await announce(stage, "w1")


# queues and namespaces


async def test_queues_are_independent(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    await stage.enqueue("a", b"here")
    await other.enqueue("a", b"there")
    job = await stage.claim_one()
    await stage.storage.pause("q", True)
    assert await other.complete(job) is SettleResult.LOST
    assert (await other.claim_one()).payload == b"there"
    await stage.complete(job)
    await stage.storage.purge("q", list(State))
    assert (await other.the("a")).state is State.RUNNING
    stats = await other.stats()
    assert (stats.paused, stats.totals) == (False, {"enqueued": 1, "claimed": 1})


@pytest.mark.parametrize("scheme", ["memory://{}", "sqlite:///{}/jobs.db"])
async def test_namespaces_in_one_place_are_independent(clock: ManualClock, tmp_path: Path, scheme: str) -> None:
    url = scheme.format(tmp_path)
    async with (
        connect(url, clock=clock, namespace="one") as one_storage,
        connect(url, clock=clock, namespace="two") as two_storage,
    ):
        one, two = Stage(one_storage, clock), Stage(two_storage, clock)
        await one.enqueue("a", b"one")
        assert await two.get("a") is None
        assert await two.claim() == []
        await two.enqueue("a", b"two")
        await two.storage.pause("q", True)
        await announce(one, "w1", "q")
        await two.storage.evict("w1")
        job = await one.claim_one()
        assert job.payload == b"one"
        assert await two.complete(job) is SettleResult.LOST
        assert (await one.stats()).workers == ["w1"]
        assert (await two.stats()).workers == []
        await two.storage.purge("q", list(State))
        await two.storage.purge("q", list(State), drop=True)
        assert await one.complete(job) is SettleResult.OK
        assert (await one.stats()).completed == 1
        assert (await two.storage.snapshot()).queues == []
        assert not await announce(one, "w1")


# follow-ups


FOLLOW_UP = Work(b"follow up", codec="raw", priority=8, max_retries=3)


async def follow_ups(stage: Stage) -> list[Job]:
    return (await stage.storage.claim("q/failed", 10, worker="w2", lease_ms=10_000)).jobs


async def test_a_failure_enqueues_its_follow_up_in_the_same_step(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    (found,) = await stage.storage.get("q/failed", [f"a@{job.generation}"])
    assert found is not None
    assert (found.state, found.work, found.run_at) == (State.WAITING, FOLLOW_UP, stage.wall())
    assert (await stage.the("a")).state is State.FAILED


async def test_a_failure_without_a_follow_up_makes_no_companion_queue(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one())
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == ["q"]


async def test_a_failure_that_is_not_remembered_has_its_follow_up_too(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one(), ttl=0, follow_up=FOLLOW_UP)
    assert len(await follow_ups(stage)) == 1


async def test_a_failure_with_a_next_has_its_follow_up_too_under_the_failed_generation(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.fail(job, follow_up=FOLLOW_UP)
    assert ids(await follow_ups(stage)) == [f"a@{job.generation}"]
    assert (await stage.the("a")).generation > job.generation


async def test_every_failed_generation_has_a_follow_up_of_its_own(stage: Stage) -> None:
    wanted = []
    for _ in range(3):
        await stage.enqueue("a")
        job = await stage.claim_one()
        await stage.fail(job, follow_up=FOLLOW_UP)
        wanted.append(f"a@{job.generation}")
    assert ids(await follow_ups(stage)) == wanted


async def test_a_batch_of_failures_has_one_follow_up_each_in_order(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    jobs = await stage.claim(3)
    batch = [Fail(job.id, fence(job), b"error", 1000, FOLLOW_UP) for job in (*jobs, jobs[0])]
    replies = await stage.storage.settle("q", batch, worker="w1")
    assert replies == [SettleResult.OK] * 3 + [SettleResult.LOST]
    assert ids(await follow_ups(stage)) == [f"{job.id}@{job.generation}" for job in jobs]


async def test_a_cancelled_run_has_no_follow_up(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.cancel("a")
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    assert (await stage.the("a")).state is State.CANCELLED
    assert await follow_ups(stage) == []


async def test_a_cancelled_run_has_no_follow_up_when_its_next_is_promoted_either(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    assert (await stage.the("a")).state is State.WAITING
    assert await follow_ups(stage) == []


async def test_a_lost_failure_has_no_follow_up(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.expire()
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.LOST
    assert await follow_ups(stage) == []


async def test_the_longest_id_has_room_for_its_follow_up(stage: Stage) -> None:
    id = "x" * 512
    await stage.enqueue(id)
    job = await stage.claim_one()
    await stage.fail(job, follow_up=FOLLOW_UP)
    (found,) = await follow_ups(stage)
    assert found.id == f"{id}@{job.generation}"
    companion = Stage(stage.storage, stage.clock, "q/failed")
    assert await companion.complete(found, worker="w2") is SettleResult.OK
