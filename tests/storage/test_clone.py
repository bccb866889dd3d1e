"""A twin: the same jobs from another thread, with an event loop of its own, as a heartbeat or a blocking caller has."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import redis.asyncio
from redis.asyncio.sentinel import Sentinel

from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Complete, Job, Request, Update, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import PayloadRejected, StorageUnavailable
from holdfast.storage import Storage, audit, connect
from holdfast.storage.local.memory import MemoryStorage
from holdfast.storage.redis import RedisStorage, of_client
from tests import servers
from tests.redis.test_sentinel import SERVICE, Watched
from tests.storage.stage import Stage, fence, heard

pytestmark = pytest.mark.suite("usual")

ROUNDS = 300
"""How often each of two threads enqueues, claims and settles."""

T = TypeVar("T")


async def in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run this on an event loop of its own, in a thread of its own."""
    return await asyncio.to_thread(asyncio.run, work)


async def with_clone(stage: Stage, work: Callable[[Stage], Coroutine[Any, Any, T]]) -> T:
    """Open a twin in another thread, do this with it, and close it."""

    async def main() -> T:
        async with stage.storage.clone() as clone:
            return await work(Stage(clone, stage.clock, stage.queue))

    return await in_a_thread(main())


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


# What one does, the other has


@pytest.mark.parametrize("only", ["ready", "wake"])
async def test_job_enqueued_by_a_clone_is_published_and_claimed(stage: Stage, only: Any) -> None:
    async with stage.storage.subscribe(Topic("q", only)) as events:
        reply = await with_clone(stage, lambda clone: clone.enqueue("a", b"from there"))
        async with asyncio.timeout(10):
            event = await anext(events)
    assert reply.placed is Placed.NEW
    assert (event.queue, event.kind in (EventKind.ENQUEUED, EventKind.UPDATED)) == ("q", True)
    assert (await stage.claim_one()).payload == b"from there"


async def test_clone_gets_events_of_the_original(stage: Stage) -> None:
    listening = threading.Event()

    async def listen(clone: Stage) -> list[tuple[EventKind, str]]:
        async with clone.storage.subscribe(Topic("q")) as events:
            listening.set()
            return await heard(events, 2)

    hearing = asyncio.create_task(with_clone(stage, listen))
    assert await asyncio.to_thread(listening.wait, 10)
    await stage.enqueue("a")
    await stage.claim_one()
    assert await hearing == [(EventKind.ENQUEUED, "a"), (EventKind.CLAIMED, "a")]


async def test_lease_is_extended_and_settled_through_the_other_storage(stage: Stage) -> None:
    await stage.enqueue("a")
    mine = await stage.claim_one(lease=10)
    stage.clock.advance(6)
    assert (await with_clone(stage, lambda clone: clone.extend(mine, lease=10))).lost == []
    stage.clock.advance(6)
    assert (await stage.sweep()).overdue == []
    assert await with_clone(stage, lambda clone: clone.complete(mine)) is SettleResult.OK
    await stage.enqueue("b")
    theirs = await with_clone(stage, lambda clone: clone.claim_one())
    assert (await stage.extend(theirs)).lost == []
    assert await stage.settle(Complete("b", fence(theirs), b"done")) is SettleResult.OK
    assert await stage.complete(mine) is SettleResult.LOST


@pytest.mark.usefixtures("restless")
async def test_two_threads_at_once_lose_nothing_and_claim_nothing_twice(stage: Stage) -> None:
    def work(name: str) -> Callable[[Stage], Coroutine[Any, Any, list[str]]]:
        async def main(clone: Stage) -> list[str]:
            done: list[str] = []
            for n in range(ROUNDS):
                await clone.enqueue(f"{name}{n}")
                await clone.enqueue("shared", update=Update())
                for job in await clone.claim(2, worker=name):
                    assert (await clone.extend(job, worker=name)).lost == []
                    assert await clone.complete(job, ttl=0, worker=name) is SettleResult.OK
                    done.append(job.id)
            return done

        return main

    ends = await asyncio.gather(*(with_clone(stage, work(name)) for name in ("a", "b")))
    left = await stage.claim(250)
    ran = Counter(id for id in [*ends[0], *ends[1], *(job.id for job in left)] if id != "shared")
    assert ran == Counter(f"{name}{n}" for name in ("a", "b") for n in range(ROUNDS))
    assert await stage.problems() == []
    totals = (await stage.stats()).totals
    assert totals[EventKind.COMPLETED] == len(ends[0]) + len(ends[1])
    assert totals[EventKind.CLAIMED] == totals[EventKind.COMPLETED] + len(left)


# Opened and closed for itself


async def test_closing_a_clone_leaves_the_original_open(stage: Stage) -> None:
    async with stage.storage.subscribe(Topic("q")) as events:
        for _ in range(2):
            await with_clone(stage, lambda clone: clone.get("a"))
        await stage.enqueue("a")
        assert await heard(events, 1) == [(EventKind.ENQUEUED, "a")]
    assert await stage.complete(await stage.claim_one()) is SettleResult.OK


async def test_clone_works_after_the_original_closed(stage: Stage, clock: ManualClock) -> None:
    storage = stage.storage.clone()
    async with storage:
        async with storage.clone() as clone:
            await storage.__aexit__(None, None, None)
            assert (await Stage(clone, clock).enqueue("a")).placed is Placed.NEW
            with pytest.raises(StorageUnavailable, match="not open"):
                await storage.get("q", ["a"])
        await storage.__aenter__()
        assert (await storage.get("q", ["a"]))[0] is not None


async def test_clone_is_not_open_before_it_is_opened(stage: Stage) -> None:
    with pytest.raises(StorageUnavailable, match="not open"):
        await stage.storage.clone().get("q", ["a"])


async def test_clone_of_an_unopened_clone_works(stage: Stage, clock: ManualClock) -> None:
    async with stage.storage.clone().clone() as clone:
        await Stage(clone, clock).enqueue("a")
    assert (await stage.the("a")).id == "a"


@pytest.mark.parametrize("url", ["memory://", "sqlite:///jobs.db", "redis://localhost:1"])
async def test_clone_has_the_same_limits(url: str) -> None:
    clone = connect(url, max_payload=3, namespace="mine").clone()
    with pytest.raises(PayloadRejected, match="at most 3"):
        await clone.enqueue("q", [Request("a", Work(b"four"))])
    assert clone.namespace == "mine"  # type: ignore[attr-defined]


async def test_clone_keeps_the_durability_setting(tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db?synchronous=full").clone() as clone:
        writer = clone._writer  # type: ignore[attr-defined]
        assert writer._db.execute("PRAGMA synchronous").fetchone() == (2,)


# Memory, where threads meet in one object


@pytest.mark.usefixtures("restless")
def test_threads_with_the_same_memory_url_share_one_storage() -> None:
    for _ in range(50):
        name, found, gate = uuid.uuid4().hex, list[Storage](), threading.Barrier(4)

        def open_it(name: str = name, found: list[Storage] = found, gate: threading.Barrier = gate) -> None:
            gate.wait()
            found.append(connect(f"memory://{name}"))

        _at_once(open_it, 4)
        assert len({id(storage) for storage in found}) == 1


class SlowToCount(MemoryStorage):
    """Takes its time between looking how often it was opened and saying so."""

    @property
    def _opened(self) -> int:
        opened: int = self.__dict__["opened"]
        time.sleep(0.0005)
        return opened

    @_opened.setter
    def _opened(self, opened: int) -> None:
        self.__dict__["opened"] = opened


async def test_memory_that_many_threads_enter_and_leave_stays_open_for_the_rest() -> None:
    async with SlowToCount() as storage:

        async def come_and_go() -> None:
            for _ in range(20):
                async with storage:
                    await storage.enqueue("q", [Request("a", Work(b""))])

        await asyncio.to_thread(_at_once, lambda: asyncio.run(come_and_go()), 4)
        assert len(await storage.get("q", ["a"])) == 1
    with pytest.raises(StorageUnavailable, match="not open"):
        await storage.get("q", ["a"])


def _at_once(work: Callable[[], None], number: int) -> None:
    troubles: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert troubles == []


# Redis, by every way to it


@asynccontextmanager
async def ways() -> AsyncIterator[dict[str, RedisStorage]]:
    """A client of each kind that somebody may have already."""
    server = servers.shared("valkey")
    assert server is not None
    node = servers.shared_cluster().nodes[0]
    client = redis.asyncio.Redis(host="127.0.0.1", port=server.port, db=3)
    cluster = redis.asyncio.RedisCluster(host="127.0.0.1", port=node.port)
    namespace = uuid.uuid4().hex
    yield {
        "a cluster's URL": cast(RedisStorage, connect(servers.shared_cluster().url, namespace=namespace)),
        "a client": of_client(client, namespace=namespace),
        "a cluster's client": of_client(cluster, namespace=namespace),
    }
    await client.aclose()
    await cluster.aclose()


@pytest.mark.parametrize("way", ["a cluster's URL", "a client", "a cluster's client"])
async def test_clone_uses_the_same_connection_options(way: str) -> None:
    async with ways() as found, found[way] as storage:
        await _back_and_forth(storage)
        assert storage._servers.options.database == (3 if way == "a client" else 0)


async def test_clones_have_different_client_ids() -> None:
    async with ways() as found:
        for storage in found.values():
            clone = storage.clone()
            assert clone._client != storage._client
            assert clone._servers is not storage._servers


@pytest.mark.parametrize("own", [False, True], ids=["a URL", "a client"])
async def test_clone_asks_the_sentinels_itself(own: bool) -> None:
    watched = Watched()
    try:
        sentinel = Sentinel([("127.0.0.1", watched.sentinel.port)])
        client = sentinel.master_for(SERVICE)
        storage = of_client(client) if own else connect(watched.url)
        async with storage:
            await _back_and_forth(storage)
            twin = storage.clone()
            assert isinstance(storage, RedisStorage)
            assert isinstance(twin, RedisStorage)
            assert twin._servers is not storage._servers
        for mine in (client, *sentinel.sentinels):
            await mine.aclose()
    finally:
        watched.stop()


async def _back_and_forth(storage: Storage) -> None:
    """A twin in another thread takes a job and leaves one, each of which the other has."""
    await storage.enqueue("q", [Request("there", Work(b"1"))])

    async def work() -> Job:
        async with storage.clone() as clone:
            await clone.enqueue("q", [Request("here", Work(b"2"))])
            (job,) = (await clone.claim("q", 1, worker="w", lease_ms=60_000)).jobs
            return job

    async with storage.subscribe(Topic("q")) as events:
        job = await in_a_thread(work())
        assert (EventKind.ENQUEUED, "here") in await heard(events, 2)
    assert job.id == "there"
    assert await storage.settle("q", [Complete("there", fence(job))], worker="w") == [SettleResult.OK]
    assert [job.id for job in (await storage.claim("q", 5, worker="w", lease_ms=60_000)).jobs] == ["here"]
    assert (await audit(storage, "q")).problems == []
