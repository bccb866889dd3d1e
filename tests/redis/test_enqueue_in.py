"""Enqueueing in somebody's pipeline on Redis and Valkey: what a server may do to it, and what it brings along."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import redis
import redis.asyncio
from redis.cluster import RedisCluster
from redis.exceptions import ExecAbortError, OutOfMemoryError, ReadOnlyError, ResponseError, WatchError

from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Request, Update, Work
from holdfast._core.replies import Placed
from holdfast.errors import OptionError
from holdfast.storage import audit, connect
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis.script import INJECTED_CLOCK, LAYOUT, SOURCES, Library
from tests import servers
from tests.redis.conftest import contents, key, namespace_of, opened
from tests.servers import Server
from tests.storage import keyspace
from tests.storage.stage import Stage, heard

MOST_BYTES = 57_000
"""How much a transaction may have to carry for each call."""


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> Server:
    found = servers.shared(request.param)
    if found is None:
        pytest.skip(servers.not_found())
    return found


@pytest.fixture
async def stage(server: Server) -> AsyncIterator[Stage]:
    async with opened(server.url) as stage:
        yield stage
        assert await stage.problems() == []
    assert keyspace.clear(server, namespace_of(stage)) == []


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    client = redis.Redis(port=server.port)
    yield client
    client.close()


@pytest.fixture
def note(client: redis.Redis) -> Iterator[str]:
    """A key of the caller's own."""
    name = f"note-{uuid.uuid4().hex}"
    yield name
    client.delete(name)


def request(id: str = "a", payload: bytes | None = b"payload", **options: Any) -> Request:
    return Request(id, Work(payload), custom_id=True, **options)


# Transactions that do not happen


async def test_changed_watched_key_discards_the_job(stage: Stage, client: redis.Redis, note: str) -> None:
    with client.pipeline() as pipeline:
        pipeline.watch(note)
        pipeline.multi()
        pipeline.incr(note)
        stage.storage.enqueue_in(pipeline, "q", [request()])
        client.set(note, 5)
        with pytest.raises(WatchError):
            pipeline.execute()
    assert (client.get(note), await stage.get()) == (b"5", None)


async def test_unchanged_watched_key_keeps_the_job(stage: Stage, client: redis.Redis, note: str) -> None:
    def bill(pipeline: Any) -> None:
        pipeline.get(note)
        pipeline.multi()
        pipeline.incr(note)
        stage.storage.enqueue_in(pipeline, "q", [request()])

    client.transaction(bill, note)
    assert (client.get(note), (await stage.the()).id) == (b"1", "a")


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_a_pipeline_that_would_send_at_once_is_refused(server: Server, stage: Stage, kind: str) -> None:
    if kind == "blocking":
        client: Any = redis.Redis(port=server.port)
        pipeline: Any = client.pipeline()
        pipeline.watch("x")
    else:
        client = redis.asyncio.Redis(port=server.port)
        pipeline = client.pipeline()
        await pipeline.watch("x")
    with pytest.raises(OptionError, match=r"multi\(\) first"):
        stage.storage.enqueue_in(pipeline, "q", [request()])
    pipeline.multi()
    stage.storage.enqueue_in(pipeline, "q", [request()])
    assert await stage.get() is None
    for left in (pipeline.reset(), client.aclose() if kind == "asyncio" else client.close()):
        if left is not None:
            await left


async def test_transaction_with_a_refused_command_stores_no_job(stage: Stage, client: redis.Redis) -> None:
    pipeline = client.pipeline()
    stage.storage.enqueue_in(pipeline, "q", [request()])
    pipeline.execute_command("NO", "SUCH", "COMMAND")
    with pytest.raises((ResponseError, ExecAbortError)):
        pipeline.execute()
    assert await stage.get() is None


@pytest.mark.parametrize("name", ["valkey", "redis"])
async def test_a_full_server_refuses_the_whole_transaction(name: Any) -> None:
    if servers.shared(name) is None:
        pytest.skip(servers.not_found())
    with Server(name) as server:
        async with opened(server.url) as stage:
            await stage.enqueue("before")
            server.command("CONFIG", "SET", "maxmemory", "1")
            with redis.Redis(port=server.port) as client:
                pipeline = client.pipeline()
                pipeline.delete(key(stage, "jobs"))  # Even a full server deletes.
                stage.storage.enqueue_in(pipeline, "q", [request()])
                with pytest.raises((OutOfMemoryError, ExecAbortError)):
                    pipeline.execute()
            server.command("CONFIG", "SET", "maxmemory", "0")
            assert [job.id for job in await stage.claim(5)] == ["before"]


async def test_a_replica_refuses_the_whole_transaction(server: Server, stage: Stage) -> None:
    with Server("valkey", "--replicaof", "127.0.0.1 1") as replica, redis.Redis(port=replica.port) as client:
        pipeline = client.pipeline()
        stage.storage.enqueue_in(pipeline, "q", [request()])
        with pytest.raises((ReadOnlyError, ExecAbortError)):
            pipeline.execute()


async def test_a_queue_of_a_newer_release_is_left_alone(stage: Stage, client: redis.Redis, note: str) -> None:
    newer = bytes([160 + LAYOUT + 1]) + b"newer"
    client.set(key(stage, "meta"), newer)
    pipeline = client.pipeline()
    pipeline.incr(note)
    stage.storage.enqueue_in(pipeline, "q", [request()])
    with pytest.raises(ResponseError, match=f"HOLDFAST_LAYOUT {LAYOUT + 1}"):
        pipeline.execute()
    assert (client.get(key(stage, "meta")), client.exists(key(stage, "jobs"))) == (newer, 0)
    assert client.get(note) == b"1"
    client.delete(key(stage, "meta"))


# What the server knows, and who hears of it


async def test_enqueue_works_after_the_scripts_were_flushed(stage: Stage, client: redis.Redis) -> None:
    await stage.enqueue("before")
    pipeline = client.pipeline()
    stage.storage.enqueue_in(pipeline, "q", [request("a")])
    stage.storage.enqueue_in(pipeline, "q", [request("b")])
    client.function_flush()
    client.script_flush()
    pipeline.execute()
    assert [job.id for job in await stage.claim(5)] == ["before", "a", "b"]


async def test_enqueue_in_a_pipeline_wakes_a_waiting_worker(stage: Stage, client: redis.Redis) -> None:
    async with stage.storage.subscribe(Topic("q", "wake")) as woken, stage.storage.subscribe(Topic("q")) as events:
        pipeline = client.pipeline()
        stage.storage.enqueue_in(pipeline, "q", [request("a"), request("b")])
        pipeline.execute()
        async with asyncio.timeout(10):
            assert (await anext(woken)).queue == "q"
        assert await heard(events, 2) == [(EventKind.ENQUEUED, "a"), (EventKind.ENQUEUED, "b")]


async def test_subscriber_gets_the_end_of_a_job_enqueued_in_a_pipeline(stage: Stage, client: redis.Redis) -> None:
    pipeline = client.pipeline()
    stage.storage.enqueue_in(pipeline, "q", [request("a", keep_ms=60_000)])
    pipeline.execute()
    async with stage.storage.subscribe(Topic("q", "ends", "a")) as events:
        await stage.complete(await stage.claim_one())
        assert await heard(events, 1) == [(EventKind.COMPLETED, "a")]


async def test_reply_is_readable_with_decode_responses(server: Server, stage: Stage) -> None:
    requests = [request("a"), request("a"), request("none", None, update=Update(payload=False))]
    with redis.Redis(port=server.port, decode_responses=True) as client:
        pipeline = client.pipeline()
        assert stage.storage.enqueue_in(pipeline, "q", requests) == [None, None, None]
        (replies,) = pipeline.execute()
    generation = (await stage.the()).generation
    assert replies == [[Placed.NEW, generation], [Placed.DUPLICATE, generation], [None, 0]]


async def test_pipeline_without_a_transaction_is_accepted(stage: Stage, client: redis.Redis) -> None:
    pipeline = client.pipeline(transaction=False)
    stage.storage.enqueue_in(pipeline, "q", [request("a")])
    pipeline.ping()
    assert pipeline.execute()[1] is True
    assert (await stage.claim_one()).id == "a"


async def test_each_call_is_one_command_and_sends_nothing(stage: Stage) -> None:
    with redis.Redis(port=1) as nowhere:  # Nobody answers there.
        pipeline = nowhere.pipeline()
        for id in "abc":
            stage.storage.enqueue_in(pipeline, "q", [request(id), request(id)])
        assert len(pipeline) == 3


async def test_server_clock_is_read_when_the_transaction_executes(server: Server, client: redis.Redis) -> None:
    async with connect(server.url, namespace=uuid.uuid4().hex) as storage:
        pipeline = client.pipeline()
        storage.enqueue_in(pipeline, "q", [request()])
        seconds, micros = client.time()
        pipeline.execute()
        (job,) = await storage.get("q", ["a"])
        assert job is not None
        assert job.generation > seconds * 1_000_000 + micros
        keyspace.clear(server, cast(RedisStorage, storage).namespace)


# What the script must not lack: damage


async def _garbled_record(stage: Stage, client: redis.Redis) -> None:
    await stage.enqueue("a", delay=60)
    client.hset(key(stage, "jobs"), "a", "garbled")


async def _garbled_lease(stage: Stage, client: redis.Redis) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    client.hset(key(stage, "runs"), "a", "x")


async def _stray_entry(stage: Stage, client: redis.Redis) -> None:
    await stage.enqueue("b", delay=60)
    client.zadd(key(stage, "completed"), {"b": 5, "nobody": 6})
    meta = bytearray(cast(bytes, client.get(key(stage, "meta"))))
    meta[29:37] = bytes(8)  # Something may have to be forgotten.
    client.set(key(stage, "meta"), bytes(meta))


@pytest.mark.parametrize("damage", [_garbled_record, _garbled_lease, _stray_entry])
@pytest.mark.parametrize("update", [None, Update(), Update(payload=False)])
async def test_damaged_record_is_treated_as_by_a_plain_enqueue(
    server: Server, stage: Stage, client: redis.Redis, damage: Any, update: Update | None
) -> None:
    async with opened(server.url) as plain:
        for each in (stage, plain):
            await damage(each, client)
        pipeline = client.pipeline()
        stage.storage.enqueue_in(pipeline, "q", [request("a", b"new", update=update)])
        ((told,),) = pipeline.execute()
        reply = await plain.enqueue("a", b"new", update=update)
        assert told == [None if reply.placed is None else reply.placed.encode(), reply.generation]
        assert await contents(stage) == await contents(plain)
        for each in (stage, plain):
            cursor: str | None = None
            while (step := await each.storage.repair("q", dry_run=False, cursor=cursor)).cursor is not None:
                cursor = step.cursor
        keyspace.clear(server, namespace_of(plain))


async def test_unreadable_metadata_refuses_the_command(stage: Stage, client: redis.Redis) -> None:
    await stage.enqueue("a", delay=60)
    client.set(key(stage, "meta"), "garbled")
    pipeline = client.pipeline()
    stage.storage.enqueue_in(pipeline, "q", [request("b", b"new")])
    with pytest.raises(redis.ResponseError, match="HOLDFAST_METADATA"):
        pipeline.execute()
    await audit(stage.storage, "q", repair=True)
    assert [job.id for job in (await stage.storage.scan("q")).jobs] == ["a"]


# Wrong uses


async def test_pipeline_of_another_database_is_refused(server: Server, stage: Stage) -> None:
    with redis.Redis(port=server.port, db=4) as client, pytest.raises(OptionError, match=r"database 4.*database 0"):
        stage.storage.enqueue_in(client.pipeline(), "q", [request()])
    with redis.Redis(port=server.port, db=4) as client:
        connect(f"{server.url}/4").enqueue_in(client.pipeline(), "q", [request()])


def test_client_instead_of_a_pipeline_is_refused(client: redis.Redis) -> None:
    storage = connect("redis://localhost:1")
    for wrong in (client, redis.asyncio.Redis(), None, object):
        with pytest.raises(OptionError, match="pass a pipeline of redis"):
            storage.enqueue_in(wrong, "q", [request()])


@pytest.mark.filterwarnings("ignore:Call to '__init__' function with deprecated:DeprecationWarning")  # redis-py 6.0
async def test_cluster_refuses_enqueue_in() -> None:
    cluster = servers.shared_cluster()
    with redis.Redis(port=cluster.nodes[0].port) as client, pytest.raises(OptionError, match="is a cluster"):
        connect(cluster.url).enqueue_in(client.pipeline(), "q", [request()])
    with RedisCluster(port=cluster.nodes[0].port, host="127.0.0.1") as clients:
        with pytest.raises(OptionError, match="ClusterPipeline is not a transaction"):
            connect(cluster.url).enqueue_in(clients.pipeline(), "q", [request()])


# The script


def test_enqueue_script_contains_only_what_enqueue_needs() -> None:
    script = Library(SOURCES, injected_clock=False).enqueue_in_multi
    assert script.startswith("#!lua\n")
    assert script.isascii()
    assert len(script) < MOST_BYTES
    assert not re.search(r"--|VERBS\.(?!enqueue)|allow-oom", script)
    assert INJECTED_CLOCK not in script
    assert INJECTED_CLOCK in Library(SOURCES, injected_clock=True).enqueue_in_multi


def test_script_defines_every_function_that_it_calls() -> None:
    """A file that is left out must not define what a file of the script uses."""
    script = Library(SOURCES, injected_clock=False).enqueue_in_multi
    tables = "clock|record|arguments|lifecycle|metadata|transaction|fast|enqueue|leases|calls"
    used = set(re.findall(rf"(?<![\w.:'])(?:{tables})\.\w+", script))
    defined = set(re.findall(rf"(?m)^function ((?:{tables})\.\w+)\(", script))
    for names in re.findall(rf"(?m)^((?:(?:{tables})\.\w+(?:, )?)+) = ", script):
        defined |= set(names.split(", "))
    assert used <= defined
    assert "lifecycle.enqueue" in defined


def test_two_storages_send_the_same_text() -> None:
    """A server keeps each text that it was sent: there is one for each release."""
    commands: list[Any] = []
    for name in ("one", "two"):
        pipeline = redis.Redis().pipeline()
        storage = connect("redis://localhost:1", namespace=name, clock=ManualClock())
        storage.enqueue_in(pipeline, name, [request(name)])
        commands.append(pipeline.command_stack[0][0])
    assert commands[0][1] == commands[1][1]
    assert commands[0][0] == "EVAL"
