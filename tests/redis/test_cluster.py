"""A real cluster of three nodes: every verb, with queues on different nodes; moved slots, a node that goes away."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.crc import key_slot

from holdfast._client.waiters import wait
from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Request, State, Work
from holdfast._core.replies import CancelResult, KeepResult, Placed, SettleResult
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import Storage, audit, connect
from holdfast.storage.redis import RedisStorage, of_client
from holdfast.storage.redis.raw import Argument, Reply
from tests import servers
from tests.servers import Cluster, Server
from tests.storage.stage import Stage, heard


@pytest.fixture
def cluster() -> Cluster:
    return servers.shared_cluster()


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def storage(cluster: Cluster, namespace: str) -> AsyncIterator[Storage]:
    async with connect(cluster.url, clock=ManualClock(), namespace=namespace) as storage:
        yield storage


def slot_of(namespace: str, queue: str) -> int:
    return key_slot(f"{{{namespace}/{queue}}}".encode())


def node_of(cluster: Cluster, namespace: str, queue: str) -> int:
    """Which third of the slots a queue is in."""
    return slot_of(namespace, queue) * 3 // 16384


def queues_on_every_node(cluster: Cluster, namespace: str) -> list[str]:
    found: dict[int, str] = {}
    for n in range(1000):
        found.setdefault(node_of(cluster, namespace, f"q{n}"), f"q{n}")
    assert len(found) == 3
    return [found[node] for node in sorted(found)]


async def test_every_verb_works_with_queues_on_different_nodes(
    cluster: Cluster, storage: Storage, namespace: str
) -> None:
    clock: ManualClock = storage._clock  # type: ignore[attr-defined]
    for name in queues_on_every_node(cluster, namespace):
        stage = Stage(storage, clock, name)
        for id in ("done", "failed", "again", "back", "stale", "gone", "kept"):
            assert (await stage.enqueue(id)).placed is Placed.NEW
        assert await stage.cancel("gone") is CancelResult.CANCELLED
        assert await stage.keep("kept", 60) is KeepResult.LIVE
        jobs = {job.id: job for job in await stage.claim(10)}
        assert list(jobs) == ["done", "failed", "again", "back", "stale", "kept"]
        assert (await stage.extend(jobs["done"])).lost == []
        assert await stage.complete(jobs["done"]) is SettleResult.OK
        assert await stage.fail(jobs["failed"], follow_up=Work(b"alert")) is SettleResult.OK
        assert await stage.retry(jobs["again"]) is SettleResult.OK
        assert await stage.release(jobs["back"]) is SettleResult.OK
        assert await stage.complete(jobs["kept"]) is SettleResult.OK
        assert (await stage.expire()).stalled == ["stale"]
        (follow_up,) = (await storage.scan(f"{name}/failed")).jobs
        assert follow_up.id.startswith("failed@")
        assert {job.state for job in (await storage.scan(name)).jobs} == set(State) - {State.RUNNING}
        await storage.pause(name, True, reason="because")
        assert (await storage.claim(name, 1, worker="w", lease_ms=1000)).paused
        assert (await storage.announce(name, {"queues": [name]}, ttl_ms=60_000)).evict is False
        assert await storage.evict(name) is True
        assert (await audit(storage, name)).problems == []
        assert await storage.purge(name, [State.WAITING]) == 3
    snapshot = await storage.snapshot()
    assert len(snapshot.queues) == 6
    assert len(snapshot.workers) == 3
    assert await storage.drop("nowhere") == 0


async def test_hints_and_replies_arrive_from_every_node(cluster: Cluster, storage: Storage, namespace: str) -> None:
    async with asyncio.timeout(20):
        for name in queues_on_every_node(cluster, namespace):
            stage = Stage(storage, storage._clock, name)  # type: ignore[attr-defined]
            async with storage.subscribe(Topic(name), Topic(name, "wake")) as events:
                generation = (await stage.enqueue("a")).generation
                waiter = asyncio.create_task(wait(storage, name, "a", generation))
                job = await stage.claim_one()
                while (await stage.the("a")).keep_until_at == 0:  # noqa: ASYNC110 -- a waiter has no event to offer
                    await asyncio.sleep(0)
                await stage.complete(job, b"result")
                assert (await waiter).result == b"result"
                assert (await heard(events, 3))[::2] == [(EventKind.ENQUEUED, "a"), (EventKind.COMPLETED, "a")]


async def test_many_queues_at_once_go_to_their_own_nodes(cluster: Cluster, storage: Storage) -> None:
    names = [f"q{n}" for n in range(60)]
    request = [Request("a", Work(b"payload"))]
    replies = await asyncio.gather(*(storage.enqueue(name, request) for name in names))
    assert [reply[0].placed for reply in replies] == [Placed.NEW] * 60
    assert len((await storage.snapshot()).queues) == 60


async def test_calls_follow_a_slot_that_moved(namespace: str) -> None:
    with Cluster() as cluster:
        async with connect(f"{cluster.url}?timeout=20", namespace=namespace) as storage:
            (before,) = await storage.enqueue("q", [Request("a", Work(b"1"))])
            slot, home = slot_of(namespace, "q"), node_of(cluster, namespace, "q")
            source, target = cluster.nodes[home], cluster.nodes[(home + 1) % 3]
            move(slot, source, target)
            (after,) = await storage.enqueue("q", [Request("b", Work(b"2"))])
            assert after.generation > before.generation
            claim = await storage.claim("q", 10, worker="w", lease_ms=60_000)
            assert [job.id for job in claim.jobs] == ["a", "b"]
            assert target.command("CLUSTER", "COUNTKEYSINSLOT", slot) > 0
            assert (await audit(storage, "q")).problems == []


async def test_calls_wait_and_change_nothing_while_their_slot_migrates(namespace: str) -> None:
    with Cluster() as cluster:
        async with connect(f"{cluster.url}?timeout=20", namespace=namespace) as storage:
            await storage.enqueue("q", [Request("a", Work(b"1"))])
            slot, home = slot_of(namespace, "q"), node_of(cluster, namespace, "q")
            source, target = cluster.nodes[home], cluster.nodes[(home + 1) % 3]
            begin_move(slot, source, target)
            source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", f"{{{namespace}/q}}:jobs")
            enqueuing = asyncio.create_task(storage.enqueue("q", [Request("b", Work(b"2"))]))
            claiming = asyncio.create_task(storage.claim("q", 1, worker="w", lease_ms=60_000))
            await asyncio.sleep(0.3)
            assert not enqueuing.done()
            assert not claiming.done()
            touched = source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
            assert isinstance(touched, list)
            assert not any(key.endswith((b":runs", b":running")) for key in touched)
            migrate(slot, source, target)
            end_move(slot, source, target)
            enqueued, claim = await asyncio.gather(enqueuing, claiming)
            assert enqueued[0].placed is Placed.NEW
            assert [job.id for job in claim.jobs] == ["a"]
            assert (await audit(storage, "q")).problems == []


def move(slot: int, source: Server, target: Server) -> None:
    begin_move(slot, source, target)
    migrate(slot, source, target)
    end_move(slot, source, target)


def begin_move(slot: int, source: Server, target: Server) -> None:
    target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.command("CLUSTER", "MYID"))
    source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.command("CLUSTER", "MYID"))


def migrate(slot: int, source: Server, target: Server) -> None:
    keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
    assert isinstance(keys, list)
    source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)


def end_move(slot: int, source: Server, target: Server) -> None:
    for node in (target, source):
        node.command("CLUSTER", "SETSLOT", slot, "NODE", target.command("CLUSTER", "MYID"))


async def test_node_outage_only_delays_its_queues(namespace: str) -> None:
    with Cluster() as cluster:
        names = queues_on_every_node(cluster, namespace)
        for node in cluster.nodes:
            node.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
        async with connect(f"{cluster.url}?timeout=20", namespace=namespace) as storage:
            for name in names:
                await storage.enqueue(name, [Request("a", Work(b"1"))])
            cluster.nodes[1].pause()
            waits = asyncio.create_task(storage.enqueue(names[1], [Request("b", Work(b"1"))]))
            for name in (names[0], names[2]):
                (reply,) = await storage.enqueue(name, [Request("b", Work(b"1"))])
                assert reply.placed is Placed.NEW
            assert not waits.done()
            cluster.nodes[1].resume()
            async with asyncio.timeout(20):
                assert (await waits)[0].placed is Placed.NEW


async def test_unreachable_cluster_is_named(namespace: str) -> None:
    with pytest.raises(StorageUnavailable, match=r"127\.0\.0\.1"):
        async with connect("redis+cluster://127.0.0.1:1,127.0.0.1:2?timeout=1", namespace=namespace):
            pass


async def test_cluster_that_stops_is_unavailable_until_it_returns(namespace: str) -> None:
    with Cluster() as cluster:
        async with connect(f"{cluster.url}?timeout=1", namespace=namespace) as storage:
            name = queues_on_every_node(cluster, namespace)[0]
            await storage.enqueue(name, [Request("a", Work(b""))])
            for node in cluster.nodes:
                node.pause()
            with pytest.raises(StorageUnavailable):
                await storage.enqueue(name, [Request("b", Work(b""))])
            for node in cluster.nodes:
                node.resume()
            await asyncio.to_thread(cluster.wait_until_healthy)
            assert (await storage.enqueue(name, [Request("c", Work(b""))]))[0].placed is Placed.NEW


async def test_cluster_under_a_plain_url_is_refused_with_the_right_url(cluster: Cluster) -> None:
    async def enqueue_in_some() -> None:
        for n in range(20):
            async with connect(f"redis://127.0.0.1:{cluster.nodes[0].port}", namespace=f"n{n}") as storage:
                await storage.enqueue("q", [Request("a", Work(b""))])

    with pytest.raises(StorageUnavailable, match=r"redis\+cluster://"):
        await enqueue_in_some()


async def test_cluster_client_of_redis_py_is_accepted(cluster: Cluster, namespace: str) -> None:
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.nodes[2].port)
    async with of_client(client, namespace=namespace) as storage:
        for name in queues_on_every_node(cluster, namespace):
            assert (await storage.enqueue(name, [Request("a", Work(b""))]))[0].placed is Placed.NEW
    assert await client.ping(target_nodes=redis.asyncio.RedisCluster.RANDOM)
    await client.aclose()


def test_cluster_url_with_a_database_is_refused(cluster: Cluster) -> None:
    with pytest.raises(OptionError, match="only database 0"):
        connect(f"{cluster.url}/3")


async def test_queue_recreated_during_its_drop_stays_listed(
    cluster: Cluster, storage: Storage, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is on another node: the one who dropped it strikes it off late."""
    async with connect(cluster.url, clock=ManualClock(), namespace=namespace) as other:
        assert isinstance(other, RedisStorage)
        await storage.enqueue("q", [Request("a", Work(b""))])
        await storage.cancel("q", ["a"])
        command = other._calls.command

        async def late(key: str, *args: Argument) -> Reply:
            if args[0] == "SREM":
                await storage.enqueue("q", [Request("b", Work(b""))])
            return await command(key, *args)

        monkeypatch.setattr(other._calls, "command", late)
        while await other.drop("q"):
            pass
        assert [stats.queue for stats in (await storage.snapshot()).queues] == ["q"]


async def test_queue_that_another_client_dropped_is_listed_again(
    cluster: Cluster, storage: Storage, namespace: str
) -> None:
    async with connect(cluster.url, clock=ManualClock(), namespace=namespace) as other:
        await storage.enqueue("q", [Request("a", Work(b""))])
        while await other.drop("q"):
            pass
        assert (await storage.snapshot()).queues == []
        await storage.enqueue("q", [Request("b", Work(b""))])
        assert [stats.queue for stats in (await storage.snapshot()).queues] == ["q"]


def test_a_storage_can_be_used_on_one_event_loop_after_another(cluster: Cluster, namespace: str) -> None:
    storage = connect(cluster.url, namespace=namespace)
    assert isinstance(storage, RedisStorage)
    servers_known: Any = storage._servers

    async def use() -> None:
        async with storage:
            await storage.get("q", ["a"])
            slots = servers_known._slots
            wrong = [(*slots[at][:2], slots[at - 1][2]) for at in range(len(slots))]
            servers_known._slots = wrong  # Many callers meet MOVED at the same moment.
            assert await asyncio.gather(*(storage.get(f"q{n}", ["a"]) for n in range(30))) == [[None]] * 30

    for _ in range(2):
        asyncio.run(use())
