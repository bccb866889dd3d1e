"""Worqr's one walk of 38 steps, in parts, and what went wrong in it: queues, leases, and workers that are peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    DuplicateJob,
    Event,
    EventKind,
    Holdfast,
    JobCancelled,
    Placed,
    Queue,
    State,
    content_id,
    current_job,
)
from tests.app.conftest import until

App = Holdfast[Any]


class Listener:
    """What is heard of a queue."""

    def __init__(self, queue: Queue) -> None:
        self.events: list[Event] = []
        self._queue = queue

    async def __aenter__(self) -> Listener:
        self._task = asyncio.create_task(self._listen())
        await until(self._hears)
        self.events.clear()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def kinds(self, id: str) -> list[EventKind]:
        return [event.kind for event in self.events if event.id == id]

    async def _listen(self) -> None:
        async for event in self._queue.events():
            self.events.append(event)

    async def _hears(self) -> bool:
        knock = await self._queue.enqueue("knock", delay=60)
        await knock.cancel()
        await self._queue.purge(["cancelled"])
        return bool(self.events)


async def names(app: App) -> list[str]:
    return sorted(queue.queue for queue in (await app.stats()).queues)


# The walk


async def test_verbs_on_a_missing_queue_are_not_errors_and_do_not_create_it(app: App) -> None:
    queue = app.queue("nowhere")
    await queue.sweep()
    assert (await queue.repair()).problems == []
    assert await queue.purge() == 0
    assert await queue.delete()
    assert await queue.cancel("nobody") is CancelResult.MISSING
    stats = await queue.stats()
    assert (stats.ready, stats.running, stats.paused, stats.workers) == (0, 0, False, [])
    assert await names(app) == []


async def test_queue_exists_from_its_first_task_and_can_be_read_without_claiming(app: App) -> None:
    for name in ("q1", "q2", "q3"):
        await app.enqueue_many(app.queue(name).bind(f"task{n}") for n in (1, 2, 3))
    assert await names(app) == ["q1", "q2", "q3"]
    queue = app.queue("q1")
    for _ in range(2):
        assert (await queue.stats()).ready == 3
        waiting = [job.id async for job in queue.jobs(state="waiting")]
        tasks = [job.payload for id in waiting if (job := await queue.get(id)) is not None]
        assert tasks == ["task1", "task2", "task3"]


async def test_tasks_are_leased_completed_and_released_without_registration(app: App) -> None:
    queue = app.queue("q1")
    await app.enqueue_many(queue.bind(f"task{n}") for n in (1, 2, 3))
    first = await queue.lease(wait=0)
    assert first is not None
    assert (first.payload, bool(first.id)) == ("task1", True)
    assert await first.complete("result")
    second = await queue.lease(wait=0)
    assert second is not None
    assert second.payload == "task2"
    assert (await queue.stats()).ready == 1
    assert await second.release()
    assert (await queue.stats()).ready == 2
    taken = []
    while (lease := await queue.lease(wait=0)) is not None:
        taken.append(lease.payload)
        assert await lease.complete()
    assert taken == ["task2", "task3"]  # What was given back is in front.
    assert [job.id async for job in queue.jobs(state="waiting")] == []


async def test_worker_is_listed_with_its_queues_while_it_runs(app: App) -> None:
    @app.task(name="q1")
    async def one(n: int) -> int:
        return n

    @app.task(name="q2")
    async def two(n: int) -> int:
        return n

    async def workers_of(queue: str) -> list[str]:
        return (await app.queue(queue).stats()).workers

    async with app.worker("q1", name="peer"):
        await one.enqueue(1)

        async def is_listed() -> bool:
            return await workers_of("q1") == ["peer"]

        await until(is_listed)
        assert [worker.worker for worker in (await app.stats()).workers] == ["peer"]
        assert await workers_of("q2") == []


async def test_listener_gets_enqueued_claimed_and_completed_events(app: App) -> None:
    queue = app.queue("q1")
    async with Listener(queue) as listener:
        handle = await queue.enqueue("task", id="t")
        lease = await queue.lease(wait=0)
        assert lease is not None
        assert await lease.complete("result")
        await until(lambda: listener.kinds("t") == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.COMPLETED])
    assert await handle.result() == "result"  # It is stored, also for whoever did not listen.


async def test_cancel_reaches_the_lease_holder_and_the_task_does_not_return(app: App) -> None:
    stopped: list[str | None] = []
    started = asyncio.Event()

    @app.task(name="q1")
    async def forever() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(current_job().stopping)

    queue = app.queue("q1")
    async with Listener(queue) as listener, app.worker(lease=0.5):
        handle = await forever.using(id="f").enqueue()
        await until(started.is_set)
        assert await queue.cancel("f") is CancelResult.ASKED
        with pytest.raises(JobCancelled):
            await handle.result()
        await until(lambda: listener.kinds("f")[-2:] == [EventKind.CANCEL_ASKED, EventKind.CANCELLED])
        assert await queue.lease(wait=0) is None
    assert stopped == ["cancel"]
    assert (await queue.stats()).running == 0


async def test_deleting_a_queue_stops_its_runs_and_the_next_task_recreates_it(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="q1")
    async def forever(n: int) -> int:
        if n:
            return n
        started.set()
        await asyncio.sleep(3600)
        return 0

    queue = app.queue("q1")
    await app.queue("other").enqueue(1)
    async with app.worker(lease=0.5):
        handle = await forever.enqueue(0)
        await forever.using(delay=60).enqueue(5)
        await until(started.is_set)
        assert await queue.delete(wait=10)
        assert await names(app) == ["other"]
        assert await handle.state() is None
        assert await forever.call(7) == 7  # It is served again.
    assert await app.queue("other").delete()


async def test_unique_task_is_refused_while_live_and_accepted_after_its_end(app: App) -> None:
    queue = app.queue("q1")
    task = {"do": "this", "n": 1}

    async def unique() -> Placed | None:
        return (await queue.enqueue(task, id=content_id(task), on_conflict="raise", dedup_ttl=0)).placed

    assert await unique() is Placed.NEW
    with pytest.raises(DuplicateJob, match="waiting"):
        await unique()
    assert (await queue.stats()).ready == 1
    lease = await queue.lease(wait=0)
    assert lease is not None
    with pytest.raises(DuplicateJob, match="running"):
        await unique()
    assert await lease.complete()
    assert await unique() is Placed.NEW
    assert (await queue.enqueue(task)).placed is Placed.NEW  # Beside one that is not unique.
    assert (await queue.stats()).ready == 2
    clone = await queue.lease(wait=0)
    other = await queue.lease(wait=0)
    assert clone is not None
    assert other is not None
    assert await other.complete()  # The end of the plain one does not free the unique one.
    with pytest.raises(DuplicateJob):
        await unique()
    assert await clone.complete()
    assert (await queue.stats()).ready == 0
    await queue.enqueue({"after": "a refusal"})
    assert (await queue.stats()).ready == 1  # A refused one takes nothing from what comes after it.


@pytest.mark.parametrize("how", ["cancelled", "deleted", "purged"])
async def test_unique_task_that_was_removed_is_accepted_again(app: App, how: str) -> None:
    queue = app.queue("q1")
    await queue.enqueue("task", id="t", on_conflict="raise")
    if how == "cancelled":
        assert await queue.cancel("t")
    elif how == "deleted":
        assert await queue.delete()
    else:
        assert await queue.purge() == 1
    again = await queue.enqueue("task", id="t", on_conflict="raise")
    assert again.placed is Placed.NEW


async def test_one_of_many_unique_requests_of_two_peers_is_accepted(app: App, make_app: Callable[..., App]) -> None:
    async def ask(peer: App) -> bool:
        try:
            await peer.queue("q1").enqueue("task", id=content_id("task"), on_conflict="raise")
        except DuplicateJob:
            return False
        return True

    async with make_app() as other:
        replies = await asyncio.gather(*(ask(peer) for peer in [app, other] * 10))
    assert sorted(replies) == [False] * 19 + [True]
    assert (await app.queue("q1").stats()).ready == 1


# Peers that die


async def test_taking_back_leases_of_one_peer_leaves_the_other_peers(app: App, make_app: Callable[..., App]) -> None:
    queue = app.queue("q1")
    for n in range(3):
        await queue.enqueue(n, id=str(n))
    async with make_app() as other:
        dead, alive = await other.queue("q1").lease(wait=0), await queue.lease(wait=0)
        assert dead is not None
        assert alive is not None
        holder = await queue.get(dead.id)
        assert holder is not None
        assert (await queue.sweep(worker="nobody")).stalled == []
        assert (await queue.sweep(worker=holder.worker)).stalled == [dead.id]
        assert not await dead.complete()  # A zombie is told so.
        assert await queue.get(alive.id) is not None
        returned = await queue.lease(wait=0)
        assert returned is not None
        assert returned.id == dead.id  # To the front, not behind those that waited.
        assert await alive.complete()
        assert await returned.complete()


async def test_returned_job_wakes_a_waiting_worker(app: App, make_app: Callable[..., App]) -> None:
    queue = app.queue("q1")
    await queue.enqueue("task")
    held = await queue.lease(seconds=60, wait=0)
    assert held is not None
    async with make_app() as other:
        waiting = asyncio.create_task(other.queue("q1").lease(wait=30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert await held.release()
        lease = await asyncio.wait_for(waiting, 10)
    assert lease is not None
    assert (lease.payload, lease.attempt) == ("task", 2)


async def test_completion_of_a_lost_lease_is_neither_stored_nor_published(app: App) -> None:
    queue = app.queue("q1")
    handle = await queue.enqueue("task", id="t")
    async with Listener(queue) as listener:
        zombie = await queue.lease(seconds=0.1, wait=0)
        assert zombie is not None
        present = await queue.lease(wait=10)
        assert present is not None
        assert not await zombie.complete("wrong")
        assert await present.complete("right")
        await until(lambda: EventKind.COMPLETED in listener.kinds("t"))
    told = [kind for kind in listener.kinds("t") if kind is not EventKind.ENQUEUED]
    assert told == [EventKind.CLAIMED, EventKind.STALLED, EventKind.CLAIMED, EventKind.COMPLETED]
    assert await handle.result() == "right"


@pytest.mark.parametrize("name", ["error", "with_underscore", "a.b-c", "job", "__proto__"])
async def test_queue_with_an_unusual_name_works(app: App, name: str) -> None:
    @app.task(name=name)
    async def echo(n: int) -> int:
        return n

    async with Listener(app.queue(name)) as listener, app.worker():
        handle = await echo.using(id="x").enqueue(1)
        assert await handle.result() == 1
        await until(lambda: EventKind.COMPLETED in listener.kinds("x"))
    assert await names(app) == [name]


async def test_endless_task_has_one_owner_and_moves_when_the_owner_stops(
    app: App, make_app: Callable[..., App]
) -> None:
    owners: list[str] = []
    inside = 0

    def serve(peer: App) -> Any:
        @peer.task(name="feeds", singleton="feed:{name}", timeout=86_400, max_retries=1_000_000)
        async def own(name: str) -> None:
            nonlocal inside
            inside += 1
            assert inside == 1
            owners.append(current_job().worker)
            try:
                await asyncio.sleep(3600)
            finally:
                inside -= 1

        return own

    one, two = make_app(), make_app()
    own, _ = serve(one), serve(two)
    async with one, two:
        async with one.worker(name="one", grace=0, lease=0.5):
            assert (await own.using(on_conflict="keep").enqueue("prices")).placed is Placed.NEW
            await until(lambda: owners == ["one"])
            second = two.worker(name="two", grace=0, lease=0.5)
            serving = asyncio.create_task(second.run())
            assert (await own.using(on_conflict="keep").enqueue("prices")).placed is Placed.DUPLICATE
        await until(lambda: owners == ["one", "two"])
        job = await app.queue("feeds").get("feed:prices")
        assert job is not None
        assert (job.state, job.worker, job.stalls) == (State.RUNNING, "two", 0)
        second.stop()
        await serving
    assert inside == 0
