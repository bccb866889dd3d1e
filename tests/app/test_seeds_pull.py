"""What Redis Work Queue's tests assert, and what went wrong in it, through the pull API: leases, and complete once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest

from holdfast import CancelResult, Holdfast, JobFailed, Lease, OptionError, Placed, State, current_job
from tests.app.conftest import until

App = Holdfast[Any]

JOBS = 100
"""Each of them asks for two more."""


class Unreliable:
    """A worker of the integration run. It drops leases before the work and after it, sleeps past them, settles twice,
    and works slowly now and then; but it never lies about what it has completed."""

    def __init__(self, app: App, name: str, seed: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.own, self.shared = app.queue("own"), app.queue("shared")
        self.completed: list[tuple[str, Any]] = []
        self.late = 0
        self.dropped = 0

    async def work(self, over: asyncio.Event) -> None:
        while not over.is_set():
            queue = self.own if self.rng.random() < 0.4 else self.shared
            lease = await queue.lease(seconds=0.2, wait=0.05)
            if lease is not None:
                await self.work_on(lease)

    async def work_on(self, lease: Lease) -> None:
        drop, late, slow = self.rng.randrange(9) == 0, self.rng.randrange(29) == 0, self.rng.randrange(23) == 0
        if drop:
            self.dropped += 1
            return
        if slow:
            await asyncio.sleep(0.1)
            await lease.extend()
        if lease.queue == "own":
            # Before the completion, so that none is missed; by id, so that a second run asks for no more.
            for which in ("left", "right"):
                await self.shared.enqueue({"of": lease.payload, "which": which}, id=f"{lease.payload}-{which}")
        if late:
            await asyncio.sleep(0.45)
        if self.rng.randrange(31) == 0:
            self.dropped += 1
            return
        replies = [*await asyncio.gather(lease.complete(), lease.complete()), await lease.complete()]
        assert replies.count(True) <= 1
        if True in replies:
            self.completed.append((lease.queue, lease.payload))
        else:
            self.late += 1


async def test_every_job_and_its_spawned_jobs_complete_once_with_faulty_workers(
    app: App, make_app: Callable[..., App]
) -> None:
    others = [make_app(), make_app()]
    apps = [app, *others]
    problems: list[object] = []
    over = asyncio.Event()

    async def clean() -> None:
        cleaner = make_app()
        async with cleaner:
            while not over.is_set():
                for name in ("own", "shared"):
                    await cleaner.queue(name).sweep()
                    problems.extend((await cleaner.queue(name).repair()).problems)
                await asyncio.sleep(0.02)

    async def is_done() -> bool:
        stats = [await app.queue(name).stats() for name in ("own", "shared")]
        return not any(s.ready + s.scheduled + s.running for s in stats) and stats[1].completed == 2 * JOBS

    await app.enqueue_many(app.queue("own").bind(n) for n in range(JOBS))
    workers = [Unreliable(apps[n % 3], f"w{n}", seed=n) for n in range(9)]
    async with others[0], others[1], asyncio.TaskGroup() as tasks:
        tasks.create_task(clean())
        for worker in workers:
            tasks.create_task(worker.work(over))
        try:
            await until(is_done, 40)
        finally:
            over.set()

    results = Counter((queue, repr(payload)) for worker in workers for queue, payload in worker.completed)
    expected = {("own", repr(n)) for n in range(JOBS)}
    expected |= {("shared", repr({"of": n, "which": which})) for n in range(JOBS) for which in ("left", "right")}
    assert set(results) == expected
    assert set(results.values()) == {1}
    assert problems == []
    assert sum(worker.dropped for worker in workers) > 10  # Else nothing was put to the test.
    assert sum(worker.late for worker in workers) > 0

    own, shared = await app.queue("own").stats(), await app.queue("shared").stats()
    assert (own.completed, own.failed, own.cancelled) == (JOBS, 0, 0)  # Kept for five minutes.
    assert (own.totals["completed"], shared.totals["completed"]) == (JOBS, 2 * JOBS)
    assert own.totals["stalled"] > 0
    assert await app.queue("shared").purge() == 2 * JOBS
    assert [job.id async for job in app.queue("shared").jobs()] == []


async def test_sweep_and_repair_of_a_busy_queue_change_nothing(app: App, make_app: Callable[..., App]) -> None:
    queue = app.queue("busy")
    await app.enqueue_many(queue.bind(n) for n in range(100))
    leases = [lease for _ in range(100) if (lease := await queue.lease(wait=0)) is not None]
    found: list[object] = []

    async def work() -> None:
        for n, lease in enumerate(leases):
            assert await [lease.complete, lease.fail, lease.release, lambda lease=lease: lease.retry(delay=60)][n % 4]()
            await asyncio.sleep(0)

    async with make_app() as cleaner:
        working = asyncio.create_task(work())
        while not working.done():
            await cleaner.queue("busy").sweep()
            found += (await cleaner.queue("busy").repair()).problems
            await asyncio.sleep(0)
        await working
    assert found == []
    stats = await queue.stats()
    assert (stats.ready, stats.scheduled, stats.running, stats.failed) == (25, 25, 0, 25)
    assert [stats.totals[kind] for kind in ("enqueued", "completed", "failed", "released", "retried")] == [100] + [
        25
    ] * 4


async def test_workers_of_one_queue_get_about_equal_shares(app: App, make_app: Callable[..., App]) -> None:
    done: Counter[str] = Counter()

    def serve(other: App) -> None:
        @other.task(name="even", concurrency=2)
        async def work(n: int) -> None:
            await asyncio.sleep(0.002)
            done[current_job().worker] += 1

    one, two = make_app(), make_app()
    serve(one)
    serve(two)
    async with one, two, one.worker(name="one"), two.worker(name="two"):
        await app.enqueue_many(app.queue("even").bind({"n": n}) for n in range(200))
        await until(lambda: sum(done.values()) == 200, 20)
    assert min(done["one"], done["two"]) >= 50, done


# Adding


async def test_new_ids_are_never_refused_and_ids_of_two_producers_are_stored_once(
    app: App, make_app: Callable[..., App]
) -> None:
    queue = app.queue("added")

    async def produce(other: App, ids: Iterable[int]) -> Counter[Placed | None]:
        placed: Counter[Placed | None] = Counter()
        for n in ids:
            placed[(await other.queue("added").enqueue(n, id=str(n))).placed] += 1
        return placed

    assert await produce(app, range(50)) == {Placed.NEW: 50}
    async with make_app() as other:
        one, two = await asyncio.gather(produce(app, range(50, 150)), produce(other, reversed(range(50, 150))))
    assert one + two == {Placed.NEW: 100, Placed.DUPLICATE: 100}
    taken = []
    while (lease := await queue.lease(wait=0)) is not None:
        taken.append(lease.id)
        assert await lease.complete()
    assert sorted(taken, key=int) == [str(n) for n in range(150)]


async def test_id_without_ttl_is_free_after_completion(app: App) -> None:
    queue = app.queue("again")
    first = await queue.enqueue("a", id="x", dedup_ttl=0)
    lease = await queue.lease(wait=0)
    assert lease is not None
    assert (await queue.enqueue("b", id="x", dedup_ttl=0)).placed is Placed.DUPLICATE
    assert await lease.complete("done")
    second = await queue.enqueue("c", id="x", dedup_ttl=0)
    assert second.placed is Placed.NEW
    assert await first.result() == "done"  # Whoever waits for the first still gets it.
    lease = await queue.lease(wait=0)
    assert lease is not None
    assert (lease.payload, await lease.complete()) == ("c", True)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00\xff\xfe not text", "text", "", None, 0, 1.5, True, [], {}, {"a": [1, None, "é"]}, "\u0000", 2**53],
    ids=repr,
)
async def test_payload_of_bytes_or_json_is_returned_unchanged(app: App, payload: Any) -> None:
    queue = app.queue("any")
    ids = {(await queue.enqueue(payload)).id for _ in range(2)}
    assert len(ids) == 2
    for _ in range(2):
        lease = await queue.lease(wait=0)
        assert lease is not None
        assert (lease.payload, type(lease.payload)) == (payload, type(payload))
        ids.discard(lease.id)
        assert await lease.complete(payload)
    assert ids == set()


async def test_namespaces_separate_equal_names(place: Any) -> None:
    one, two = Holdfast[Any](place.url, namespace=f"{place.namespace}-a"), place.app()
    async with one, two:
        await one.queue("q").enqueue("in a", id="x")
        assert await two.queue("q").get("x") is None
        assert await two.queue("q").lease(wait=0) is None
        lease = await one.queue("q").lease(wait=0)
        assert lease is not None
        assert await lease.complete()
        await one.queue("q").delete()


# Leases


async def test_expired_lease_moves_to_the_next_puller_and_the_late_holder_is_refused(app: App) -> None:
    queue = app.queue("items")
    handle = await queue.enqueue({"n": 1}, id="i")
    lost = await queue.lease(seconds=0.1, wait=0)
    assert lost is not None
    held = await queue.lease(seconds=30, wait=10)
    assert held is not None
    assert (held.id, held.payload, held.attempt) == ("i", {"n": 1}, 2)
    assert held.fence > lost.fence
    assert held.deadline > lost.deadline + timedelta(seconds=20)
    assert not await lost.complete("late")
    assert not await lost.retry()
    assert not await lost.fail()
    assert not await lost.release()
    assert not await lost.extend()
    assert await handle.state() is State.RUNNING
    assert await queue.lease(wait=0) is None
    assert (await queue.enqueue({"n": 2}, id="i")).placed is Placed.DUPLICATE
    assert await held.complete("good")
    assert not await held.complete("twice")
    assert await handle.result() == "good"
    job = await queue.get("i")
    assert job is not None
    assert (job.stalls, job.retries) == (1, 0)


async def test_a_lease_that_is_extended_is_not_taken_back(app: App) -> None:
    queue = app.queue("items")
    await queue.enqueue(1)
    async with queue.leased(seconds=0.3) as lease:  # Which extends by itself.
        assert lease is not None
        for _ in range(9):
            await asyncio.sleep(0.1)
            await queue.sweep()
            assert await queue.lease(wait=0) is None
    assert (await queue.stats()).totals.get("stalled", 0) == 0
    assert (await queue.stats()).totals["completed"] == 1


async def test_released_item_keeps_its_place_and_retried_item_waits_its_delay(app: App) -> None:
    queue = app.queue("items")
    for n in range(3):
        await queue.enqueue(n, id=str(n))
    first = await queue.lease(wait=0)
    assert first is not None
    assert await first.release()
    again = await queue.lease(wait=0)
    assert again is not None
    assert (again.id, again.attempt) == ("0", 2)
    assert await again.retry(delay=60)
    second = await queue.lease(wait=0)
    assert second is not None
    assert second.id == "1"
    assert await second.fail("cannot be done")
    assert await queue.cancel("2")
    assert await queue.lease(wait=0) is None
    stats = await queue.stats()
    assert (stats.ready, stats.scheduled, stats.retrying, stats.failed, stats.cancelled) == (0, 1, 1, 1, 1)
    with pytest.raises(JobFailed, match="cannot be done"):
        await queue.result("1")


@pytest.mark.parametrize("how", ["retried", "dropped"])
async def test_poison_item_fails_at_a_given_limit_and_else_is_leased_again(app: App, how: str) -> None:
    limited = app.queue("limited", max_retries=2, max_stalls=2)
    endless = app.queue("endless")

    async def spoil(lease: Lease) -> None:
        if how == "retried":
            assert await lease.retry()
        else:
            assert (await app.queue(lease.queue).sweep(worker=await holder(app, lease))).stalled == [lease.id]

    for queue in (limited, endless):
        await queue.enqueue("poison", id="p")
        for n in range(3):
            lease = await queue.lease(seconds=0.1, wait=5)
            assert lease is not None
            assert lease.attempt == n + 1
            await spoil(lease)

    async def has_failed() -> bool:
        assert await limited.lease(seconds=0.1, wait=0) is None
        return [job.id async for job in limited.jobs(state="failed")] == ["p"]

    await until(has_failed)
    failed = await limited.get("p")
    assert failed is not None
    assert (failed.state, failed.retries + failed.stalls) == (State.FAILED, 3 if how == "dropped" else 2)
    assert failed.error is not None
    assert failed.error.kind == ("stall" if how == "dropped" else "retriable")
    fourth = await endless.lease(seconds=0.1, wait=5)
    assert fourth is not None
    assert fourth.attempt == 4


async def holder(app: App, lease: Lease) -> str:
    job = await app.queue(lease.queue).get(lease.id)
    assert job is not None
    assert job.worker is not None
    return job.worker


async def test_lease_wait_ends_at_its_limit_or_with_the_first_item(app: App) -> None:
    queue = app.queue("awaited")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await queue.lease(wait=0) is None
    assert loop.time() - began < 5
    began = loop.time()
    assert await queue.lease(wait=0.2) is None  # Below a second, and neither an error nor for ever.
    assert 0.15 <= loop.time() - began < 5
    waiting = [asyncio.create_task(queue.lease(wait=30)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await queue.enqueue("one")
    done, left = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    lease = done.pop().result()
    assert lease is not None
    assert lease.payload == "one"
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    for seconds in (0, 0.05, 100_000):
        with pytest.raises(OptionError):
            await queue.lease(seconds=seconds)


async def test_holder_of_a_cancelled_item_sees_it_and_the_item_does_not_return(app: App) -> None:
    queue = app.queue("items")
    await queue.enqueue(1, id="i")
    lease = await queue.lease(wait=0)
    assert lease is not None
    assert await queue.cancel("i") is CancelResult.ASKED
    assert await lease.extend()
    assert lease.cancel_asked
    assert await lease.release()
    job = await queue.get("i")
    assert job is not None
    assert job.state is State.CANCELLED
    assert await queue.lease(wait=0) is None
    assert (await queue.enqueue(2, id="i")).placed is Placed.NEW


async def test_completing_before_the_work_is_at_most_once(app: App) -> None:
    queue = app.queue("fragile")
    await queue.enqueue("once")
    lease = await queue.lease(seconds=0.1, wait=0)
    assert lease is not None
    assert await lease.complete()
    for _ in range(3):  # Whatever becomes of the worker now, nobody gets it again.
        await asyncio.sleep(0.1)
        await queue.sweep()
        assert await queue.lease(wait=0) is None


async def test_ready_and_leased_counts_are_from_one_instant(app: App, make_app: Callable[..., App]) -> None:
    queue = app.queue("moving")
    await app.enqueue_many(queue.bind(n) for n in range(100))
    seen: list[int] = []

    async def move() -> None:
        leases = [lease for _ in range(100) if (lease := await queue.lease(seconds=30, wait=0)) is not None]
        for lease in leases:
            await lease.release()
            await asyncio.sleep(0)

    async with make_app() as other:
        moving = asyncio.create_task(move())
        while not moving.done():
            stats = await other.queue("moving").stats()
            seen.append(stats.ready + stats.running)
            await asyncio.sleep(0)
        await moving
    assert len(seen) > 3
    assert set(seen) == {100}
