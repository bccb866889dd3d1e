"""Pages of jobs, and the snapshot of all queues."""

from __future__ import annotations

import random

import pytest

from holdfast._core.jobs import State, Update
from holdfast._core.replies import Page
from holdfast.storage.conformance.order import MICROSECOND, add, ids
from holdfast.storage.conformance.verbs import Stage

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
async def test_unchanged_jobs_are_listed_once_while_others_change(stage: Stage, state: State | None) -> None:
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
