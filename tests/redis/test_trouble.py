"""Servers that are not ready, full, frozen, killed, closed to us or of another time: what callers see of it."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from holdfast._core.clock import ManualClock
from holdfast._core.events import Topic
from holdfast._core.jobs import Request, State, Work
from holdfast._core.replies import CancelResult, KeepResult, Placed, SettleResult
from holdfast.errors import LayoutTooNew, OptionError, StorageFull, StorageUnavailable
from holdfast.storage import audit, connect
from holdfast.storage.redis import connection, of_client
from holdfast.storage.redis.script import LAYOUT
from tests.proxy import HOST, Exchange, Proxy, slow_link
from tests.redis.conftest import contents, first, is_call, key, namespace_of, opened, until
from tests.servers import Server, free_port
from tests.storage.stage import Stage

SECRET = "s3cr3t-w0rd"
NOT_READY = [
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call FUNCTION KILL or SHUTDOWN NOSAVE.",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "CLUSTERDOWN The cluster is down",
]


@pytest.fixture
def own() -> Iterator[Server]:
    """A server that may be hurt."""
    with Server("valkey") as server:
        yield server


def calls_seen(server: Server) -> int:
    """How many calls of the library the server has run."""
    return int(server.info("commandstats")["cmdstat_fcall"].split(",")[0].removeprefix("calls="))


@pytest.fixture
async def hurt(own: Server) -> AsyncIterator[Stage]:
    """A storage on that server."""
    async with opened(own.url) as stage:
        yield stage


@pytest.fixture
async def to_own(own: Server) -> AsyncIterator[Proxy]:
    async with Proxy(own.port) as proxy:
        yield proxy


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing for half a second is taken for gone."""
    monkeypatch.setattr(connection, "REPLY_S", 0.5)


# A library that the server does not know (any more)


async def test_a_library_that_was_flushed_is_loaded_again(own: Server, hurt: Stage) -> None:
    for n in range(3):
        assert (await hurt.enqueue(f"{n}")).placed is Placed.NEW
        own.command("FUNCTION", "FLUSH")
        assert (await hurt.the(f"{n}")).id == f"{n}"
        own.command("FUNCTION", "FLUSH")
    assert [job.id for job in await hurt.claim(9)] == ["0", "1", "2"]
    assert await hurt.problems() == []


@pytest.mark.parametrize("position", [*range(12), 20, 30, 40])
async def test_library_flushed_during_fifty_calls_fails_none_of_them(own: Server, to_own: Proxy, position: int) -> None:
    async with opened(to_own.url) as stage:
        for n in range(5):
            await stage.storage.enqueue(f"q{n}", [Request("x", Work(b""))])
        calls = iter(range(1000))

        def flush(exchange: Exchange) -> str:
            if exchange.name == "FCALL" and next(calls) == position:
                own.command("FUNCTION", "FLUSH")
            return "pass"

        to_own.before = flush
        storage = stage.storage
        enqueues = [storage.enqueue(f"q{n % 5}", [Request(f"{n}", Work(b""))]) for n in range(40)]
        cancels = [storage.cancel(f"q{n}", [f"{n}"]) for n in range(5)]
        gets = [storage.get(f"q{n}", [f"{n + 5}"]) for n in range(5)]
        replies, cancelled, _ = await asyncio.gather(
            asyncio.gather(*enqueues), asyncio.gather(*cancels), asyncio.gather(*gets)
        )
        assert [reply.id for (reply,) in replies] == [f"{n}" for n in range(40)]
        assert cancelled == [[CancelResult.CANCELLED]] * 5
        stats = (await storage.snapshot()).queues
        assert sum(queue.totals["enqueued"] for queue in stats) == 45
        assert await stage.problems() == []


async def test_a_library_that_is_flushed_again_before_its_first_use_is_loaded_again(own: Server, to_own: Proxy) -> None:
    async with opened(to_own.url) as stage:
        calls = iter(range(1000))

        def flush(exchange: Exchange) -> str:
            if exchange.name == "FCALL" and next(calls) < 2:
                own.command("FUNCTION", "FLUSH")
            return "pass"

        to_own.before = flush
        assert (await stage.enqueue("a")).placed is Placed.NEW


# A server that is not ready


def is_any_call(exchange: Exchange) -> bool:
    return exchange.name == "FCALL"


@pytest.mark.parametrize("error", NOT_READY, ids=lambda error: error.split()[0])
async def test_call_is_repeated_until_the_server_is_ready(proxy: Proxy, stage: Stage, clone: Stage, error: str) -> None:
    for each in (stage, clone):
        await each.enqueue("a")
    proxy.before = first(is_any_call, f"error:{error}", times=3)
    assert await stage.enqueue("b") == await clone.enqueue("b")
    proxy.before = first(is_any_call, f"error:{error}", times=2)
    assert await stage.claim(2) == await clone.claim(2)
    proxy.before = first(is_any_call, f"error:{error}")
    assert await stage.get("a") == await clone.get("a")
    assert await contents(stage) == await contents(clone)


@pytest.mark.parametrize("error", NOT_READY, ids=lambda error: error.split()[0])
async def test_calls_queued_behind_a_not_ready_reply_are_made_once(
    proxy: Proxy, stage: Stage, clone: Stage, error: str
) -> None:
    async def crowd(stage: Stage) -> list[object]:
        calls: list[Coroutine[Any, Any, object]] = [
            stage.storage.enqueue(f"q{n % 4}", [Request(f"{n}", Work(b""))]) for n in range(20)
        ]
        return list(await asyncio.gather(*calls, stage.storage.claim("q1", 2, worker="w", lease_ms=1000)))

    for each in (stage, clone):
        for n in range(4):
            await each.storage.enqueue(f"q{n}", [Request("x", Work(b""))])
    calls = iter(range(1000))
    proxy.before = lambda exchange: f"error:{error}" if is_any_call(exchange) and next(calls) in (1, 3, 6) else "pass"
    assert await crowd(stage) == await crowd(clone)
    assert await contents(stage) == await contents(clone)


async def test_a_storage_opens_on_a_server_that_is_still_loading(proxy: Proxy) -> None:
    proxy.before = first(lambda exchange: exchange.name in ("INFO", "SET"), f"error:{NOT_READY[1]}", times=4)
    async with opened(proxy.url) as stage:
        assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_a_call_waits_for_a_replica_to_be_promoted(own: Server, to_own: Proxy) -> None:
    async with opened(to_own.url) as stage:
        await stage.enqueue("a")
        own.command("REPLICAOF", HOST, free_port())
        claiming = asyncio.create_task(stage.claim_one())
        enqueueing = asyncio.create_task(stage.enqueue("b"))
        await until(lambda: sum(exchange.reply.startswith(b"-READONLY") for exchange in to_own.log) > 2)
        assert not claiming.done()
        own.command("REPLICAOF", "NO", "ONE")
        assert (await claiming).id == "a"
        assert (await enqueueing).placed is Placed.NEW
        assert (await stage.stats()).totals == {"enqueued": 2, "claimed": 1}
        assert await stage.problems() == []


# A server that is full


@pytest.fixture
async def full(own: Server) -> AsyncIterator[Stage]:
    """A storage on a server without room: `a` to `d` run, `e` is completed, `f` to `h` wait."""
    async with opened(own.url) as stage:
        await fill(own, stage)
        yield stage


async def fill(own: Server, stage: Stage) -> None:
    for id in "eabcdfgh":
        await stage.enqueue(id)
    await stage.complete(await stage.claim_one())
    await stage.claim(4)
    own.command("CONFIG", "SET", "maxmemory", "1")


async def test_a_full_server_refuses_an_enqueue_and_nothing_is_changed(own: Server, full: Stage) -> None:
    before = await contents(full)
    for id in ("new", "f"):
        with pytest.raises(StorageFull, match=f"127.0.0.1:{own.port}"):
            await full.enqueue(id)
    with pytest.raises(StorageFull):
        await full.storage.enqueue("another", [Request("a", Work(b""))])
    assert await contents(full) == before
    own.command("CONFIG", "SET", "maxmemory", "0")
    assert (await full.enqueue("new")).placed is Placed.NEW
    assert (await full.storage.enqueue("another", [Request("a", Work(b""))]))[0].placed is Placed.NEW
    assert await full.problems() == []


async def test_full_server_accepts_all_verbs_except_enqueue(full: Stage) -> None:
    storage = full.storage
    assert await full.complete(await full.the("a")) is SettleResult.OK
    assert await full.retry(await full.the("b")) is SettleResult.OK
    assert await full.extend(await full.the("c"), progress=b"half") is not None
    assert [job.id for job in await full.claim(2)] == ["f", "g"]
    assert await full.keep("h", 5) is KeepResult.LIVE
    assert await full.cancel("h") is CancelResult.CANCELLED
    await storage.pause("q", True)
    await storage.pause("q", False)
    assert (await full.sweep(worker="w1")).stalled == ["c", "d", "f", "g"]
    assert (await storage.announce("w1", {"queues": ["q"]}, ttl_ms=1000)).evict is False
    assert await storage.evict("w1") is True
    assert await storage.purge("q", [State.WAITING, State.COMPLETED, State.CANCELLED], 100) == 8
    assert await storage.drop("q") == 0
    assert (await storage.snapshot()).queues == []


async def test_a_job_fails_with_its_follow_up_on_a_full_server(full: Stage) -> None:
    assert await full.fail(await full.the("a"), follow_up=Work(b"f")) is SettleResult.OK
    companion = await full.storage.scan("q/failed")
    assert len(companion.jobs) == 1
    assert [stats.queue for stats in (await full.storage.snapshot()).queues] == ["q", "q/failed"]
    assert await full.problems() == []


async def test_new_worker_drains_a_full_server(own: Server, full: Stage) -> None:
    async with opened(own.url, like=full) as other:
        job = await other.claim_one(worker="w2")
        assert await other.complete(job, worker="w2") is SettleResult.OK


async def test_full_server_without_the_library_is_drained(own: Server, full: Stage) -> None:
    own.command("FUNCTION", "FLUSH")
    job = await full.claim_one(worker="w2")
    assert await full.complete(job, worker="w2") is SettleResult.OK


async def test_a_queue_is_paused_on_a_full_server_by_a_client_that_never_used_it(own: Server) -> None:
    async with opened(own.url) as stage, opened(own.url, like=stage) as operator:
        await fill(own, stage)
        await operator.storage.pause("q", True, reason="full")
        assert (await stage.stats()).paused


async def test_storage_works_after_the_server_lost_all_data(own: Server, hurt: Stage) -> None:
    await hurt.enqueue("a")
    await hurt.fail(await hurt.claim_one(), follow_up=Work(b"f"))
    await hurt.enqueue("b")
    job = await hurt.claim_one()
    own.command("FLUSHALL")
    own.command("FUNCTION", "FLUSH")
    assert await hurt.complete(job) is SettleResult.LOST
    assert (await hurt.enqueue("b")).placed is Placed.NEW
    await hurt.fail(await hurt.claim_one(), follow_up=Work(b"f"))
    assert [stats.queue for stats in (await hurt.storage.snapshot()).queues] == ["q", "q/failed"]
    assert await hurt.problems() == []


# A server that says nothing


async def test_pending_calls_fail_when_the_storage_is_closed(own: Server) -> None:
    async with opened(own.url) as stage:
        await stage.enqueue("a")
        own.pause()
        calls: list[Coroutine[Any, Any, object]] = [stage.enqueue("b"), stage.enqueue("c"), stage.claim(1), stage.get()]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        errors = await asyncio.gather(*tasks, return_exceptions=True)
    own.resume()
    assert [type(error) for error in errors] == [StorageUnavailable] * 4


async def test_nothing_is_sent_and_no_connection_is_left_after_close(own: Server) -> None:
    async with opened(own.url) as stage:
        await stage.enqueue("a")
        await stage.enqueue("b")
        before = calls_seen(own)
        own.pause()
        claims = [asyncio.create_task(stage.claim(1, worker=f"w{number}")) for number in range(5)]
        await asyncio.sleep(0.01)
    errors = await asyncio.gather(*claims, return_exceptions=True)
    own.resume()
    assert [type(error) for error in errors] == [StorageUnavailable] * 5
    await asyncio.sleep(0.1)
    assert calls_seen(own) - before <= 1  # The claim that was in flight.
    assert own.info("clients")["connected_clients"] == "1"  # The test itself.


async def test_closed_storage_fails_calls_at_once_and_can_be_opened_again(own: Server) -> None:
    storage = connect(own.url)
    async with storage:
        own.pause()
        listening = asyncio.create_task(storage.subscribe(Topic("q")).__aenter__())
        await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        with pytest.raises(StorageUnavailable, match="closed"):
            await listening
    own.resume()
    async with storage, storage.subscribe(Topic("q")):
        assert await storage.get("q", ["a"]) == [None]


@pytest.mark.usefixtures("impatient")
async def test_call_to_a_frozen_server_succeeds_once_it_continues(
    own: Server, hurt: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    await hurt.enqueue("a")
    own.pause()
    calls = [asyncio.create_task(hurt.enqueue("b")), asyncio.create_task(hurt.claim(1))]
    await until(lambda: "no answer" in caplog.text)
    assert not any(call.done() for call in calls)
    own.resume()
    await asyncio.gather(*calls)
    assert [(await hurt.the(id)).state for id in "ab"] == [State.RUNNING, State.WAITING]
    assert (await hurt.stats()).totals == {"enqueued": 2, "claimed": 1}
    assert await hurt.problems() == []


async def test_repeated_call_after_a_timeout_reports_the_effect_of_the_first(own: Server) -> None:
    """A frozen server does what it was asked when it goes on, long after the caller has given up."""
    async with opened(f"{own.url}?timeout=0.5") as stage:
        for id in "ab":
            await stage.enqueue(id)
        await _given_up(own, lambda: stage.claim(2))
        claimed = await stage.claim(1)
        assert [(job.id, job.attempts) for job in claimed] == [("a", 2)]  # What came too late was given back first.
        assert (await stage.the("b")).state is State.WAITING
        await _given_up(own, lambda: stage.complete(claimed[0]))
        assert await stage.complete(claimed[0]) is SettleResult.OK
        assert await stage.complete(claimed[0]) is SettleResult.LOST
        await _given_up(own, lambda: stage.enqueue("c"))
        assert (await stage.enqueue("c")).placed is Placed.DUPLICATE  # It may be meant anew: nobody can tell.
        assert (await stage.stats()).totals == {"enqueued": 3, "claimed": 3, "released": 2, "completed": 1}
        assert await stage.problems() == []


async def test_settlement_repeated_in_another_batch_counts_as_done_once(own: Server) -> None:
    async with opened(f"{own.url}?timeout=0.5") as stage:
        for id in "abc":
            await stage.enqueue(id)
        a, b, c = await stage.claim(3)
        await _given_up(own, lambda: stage.complete(a))
        assert await asyncio.gather(*map(stage.complete, (b, a))) == [SettleResult.OK, SettleResult.OK]
        assert [await stage.complete(job) for job in (a, b)] == [SettleResult.LOST, SettleResult.LOST]
        await _given_up(own, lambda: stage.complete(c, b"first"))
        assert await stage.complete(c, b"another") is SettleResult.LOST
        assert (await stage.the("c")).outcome.result == b"first"  # type: ignore[union-attr]
        assert (await stage.stats()).totals == {"enqueued": 3, "claimed": 3, "completed": 3}
        assert await stage.problems() == []


async def _given_up(server: Server, call: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """A call that a frozen server does not answer in time, and carries out when it goes on."""
    server.pause()
    with pytest.raises(StorageUnavailable, match="did not answer in time"):
        await call()
    server.resume()
    with redis.Redis.from_url(server.url) as client:
        client.ping()


async def test_large_payload_passes_a_link_that_needs_longer_than_the_timeout(server: Server) -> None:
    """Each way takes 2 s. A connection that is silent for 0.5 s is broken, and this one is never silent."""
    payload = bytes(range(256)) * 3_000
    async with slow_link(server.port, bytes_per_s=400_000) as url, opened(f"{url}?timeout=1") as stage:
        assert (await stage.enqueue("a", payload)).placed is Placed.NEW
        job = await stage.claim_one()
        assert (job.payload, job.attempts) == (payload, 1)
        assert (await stage.stats()).totals == {"enqueued": 1, "claimed": 1}
        await stage.storage.purge("q", [State.WAITING])


async def test_call_to_a_frozen_server_ends_though_later_calls_leave(own: Server) -> None:
    """The system of the server takes the bytes of later calls. They are not a sign of life."""
    async with opened(f"{own.url}?timeout=1") as stage:
        await stage.enqueue("a")
        own.pause()
        first = asyncio.create_task(stage.get("a"))
        later: list[asyncio.Task[object]] = []
        while not first.done() and len(later) < 40:
            await asyncio.sleep(0.1)
            later.append(asyncio.create_task(stage.get("a")))
        own.resume()
        await asyncio.gather(*later, return_exceptions=True)
        assert len(later) < 25
        with pytest.raises(StorageUnavailable, match="in time"):
            await first


@pytest.mark.usefixtures("impatient")
async def test_half_open_connection_is_abandoned(proxy: Proxy, stage: Stage, clone: Stage) -> None:
    for each in (stage, clone):
        await each.enqueue("a")
    proxy.before = first(lambda exchange: is_call(exchange, "claim"), "stall")
    async with asyncio.timeout(5):
        assert await stage.claim(1) == await clone.claim(1)
    proxy.before = first(lambda exchange: is_call(exchange, "enqueue"), "stall")
    async with asyncio.timeout(5):
        assert await asyncio.gather(*(stage.enqueue(f"{n}") for n in range(5))) == await asyncio.gather(
            *(clone.enqueue(f"{n}") for n in range(5))
        )
    assert await contents(stage) == await contents(clone)


@pytest.mark.parametrize("turns", [1, 3, 30])
async def test_killed_server_with_appendfsync_always_loses_no_acknowledged_write(turns: int) -> None:
    with Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as own:
        async with opened(own.url) as stage:
            for n in range(5):
                await stage.enqueue(f"{n}")
            held = await stage.claim(2)
            calls = [asyncio.create_task(stage.enqueue(f"n{n}")) for n in range(30)]
            claiming = asyncio.create_task(stage.claim(2, worker="w2"))
            for _ in range(turns):
                await asyncio.sleep(0)
            own.kill()
            await asyncio.sleep(0)
            own.start()
            replies = await asyncio.gather(*calls)
            assert [(reply.id, reply.placed) for reply in replies] == [(f"n{n}", Placed.NEW) for n in range(30)]
            more = await claiming
            assert [job.id for job in more] == ["2", "3"]
            for reply in replies:
                assert (await stage.the(reply.id)).generation == reply.generation
            assert [await stage.complete(job) for job in held] == [SettleResult.OK] * 2
            assert [await stage.complete(job, worker="w2") for job in more] == [SettleResult.OK] * 2
            assert (await stage.stats()).totals == {"enqueued": 35, "claimed": 4, "completed": 4}
            assert await stage.problems() == []


# A server that is not there, or not for us


def shown(error: BaseException, caplog: pytest.LogCaptureFixture, storage: object) -> str:
    """Everything in which a password could be seen."""
    return "".join(traceback.format_exception(error)) + repr(error) + caplog.text + repr(storage) + str(storage)


async def test_server_that_stopped_is_named_within_the_timeout(own: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    own.command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "&*", "+@all")
    async with connect(f"redis://u:{SECRET}@{HOST}:{own.port}?timeout=1") as storage:
        await storage.enqueue("q", [Request("a", Work(b""))])
        own.kill()
        started = time.monotonic()
        calls: list[Coroutine[Any, Any, object]] = [
            storage.enqueue("q", [Request("b", Work(b""))]),
            storage.claim("q", 1, worker="w", lease_ms=1000),
            storage.get("q", ["a"]),
            storage.snapshot(),
        ]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StorageUnavailable)
            assert f"{HOST}:{own.port}" in str(error)
            assert SECRET not in shown(error, caplog, storage)
        assert time.monotonic() - started < 4


async def test_unreachable_server_is_named_when_a_storage_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    port = free_port()
    storage = connect(f"redis://u:{SECRET}@{HOST}:{port}?timeout=1")
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=f"{HOST}:{port}") as caught:
        await storage.__aenter__()
    assert time.monotonic() - started < 4
    assert SECRET not in shown(caught.value, caplog, storage)


async def test_a_storage_that_could_not_be_opened_can_be_opened_later(own: Server) -> None:
    own.kill()
    storage = connect(f"{own.url}?timeout=0.3")
    with pytest.raises(StorageUnavailable):
        await storage.__aenter__()
    own.start()
    async with storage:
        assert await storage.get("q", ["a"]) == [None]


async def test_wrong_password_is_refused_at_once_and_never_shown(own: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    own.command("ACL", "SETUSER", "u", "on", ">right", "~*", "&*", "+@all")
    storage = connect(f"redis://u:{SECRET}@{HOST}:{own.port}")
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=f"{HOST}:{own.port}") as caught:
        await storage.__aenter__()
    assert time.monotonic() - started < 4
    assert SECRET not in shown(caught.value, caplog, storage)


async def test_missing_password_is_refused_at_once(own: Server) -> None:
    own.command("CONFIG", "SET", "requirepass", SECRET)
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=f"{HOST}:{own.port}"):
        await connect(own.url).__aenter__()
    assert time.monotonic() - started < 4


async def test_user_without_function_permission_is_served_by_scripts(own: Server) -> None:
    own.command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "&*", "+@all", "-function")
    async with connect(f"redis://u:{SECRET}@{HOST}:{own.port}") as storage:
        await storage.enqueue("q", [Request("a", Work(b""))])
        assert len((await storage.claim("q", 1, worker="w", lease_ms=1000)).jobs) == 1
        own.command("CONFIG", "RESETSTAT")
        for _ in range(20):
            await storage.get("q", ["a"])
        sent = {name for name, calls in own.info("commandstats").items() if "calls=20," in calls}
        assert sent & {"cmdstat_evalsha", "cmdstat_fcall", "cmdstat_eval"} == {"cmdstat_evalsha"}
        assert int(own.info("stats")["total_net_input_bytes"]) < 20_000
        own.command("SCRIPT", "FLUSH")
        assert len(await storage.get("q", ["a"])) == 1
    assert own.command("FUNCTION", "LIST") == []


@pytest.mark.parametrize("missing", ["-@scripting", "-fcall", "resetkeys"])
async def test_a_user_without_permission_is_refused_at_once(
    own: Server, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    caplog.set_level(logging.DEBUG)
    own.command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "&*", "+@all", missing)
    storage = connect(f"redis://u:{SECRET}@{HOST}:{own.port}")
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=f"{HOST}:{own.port}") as caught:
        async with storage:
            await storage.enqueue("q", [Request("a", Work(b""))])
    assert time.monotonic() - started < 4
    assert "permission" in str(caught.value)
    assert SECRET not in shown(caught.value, caplog, storage)


async def test_database_that_does_not_exist_is_refused_at_once(own: Server) -> None:
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match="it has no database 99, use another number"):
        await connect(f"{own.url}/99").__aenter__()
    assert time.monotonic() - started < 4


async def test_server_with_eviction_is_refused_unless_allowed(own: Server) -> None:
    own.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(StorageUnavailable, match="allkeys-lru"):
        await connect(own.url).__aenter__()
    async with connect(f"{own.url}?eviction=allow") as storage:
        assert (await storage.enqueue("q", [Request("a", Work(b""))]))[0].placed is Placed.NEW


# Data of a newer Holdfast


def dump(server: Server, namespace: str) -> dict[bytes, object]:
    """Every key of a namespace, with its bytes."""
    keys: list[bytes] = server.command("KEYS", f"{{{namespace}*")
    return {key: server.command("DUMP", key) for key in keys}


async def test_a_namespace_of_a_newer_layout_is_refused_and_left_alone(server: Server) -> None:
    namespace = uuid.uuid4().hex
    server.command("SET", f"{{{namespace}}}:layout", 99)
    before = dump(server, namespace)
    assert len(before) == 1
    with pytest.raises(LayoutTooNew, match="99"):
        async with connect(server.url, namespace=namespace):
            pass
    assert dump(server, namespace) == before


async def test_namespace_of_an_older_layout_is_refused_and_left_alone(server: Server) -> None:
    namespace = uuid.uuid4().hex
    server.command("SET", f"{{{namespace}}}:layout", LAYOUT - 1)
    before = dump(server, namespace)
    with pytest.raises(StorageUnavailable, match=f"has layout {LAYOUT - 1}, which this Holdfast no longer reads"):
        async with connect(server.url, namespace=namespace):
            pass
    assert dump(server, namespace) == before


async def test_a_queue_of_a_newer_layout_is_refused_by_every_verb_and_left_alone(server: Server, clone: Stage) -> None:
    storage = clone.storage
    await clone.enqueue("a")
    job = await clone.claim_one()
    meta = server.command("GET", key(clone, "meta"))
    assert isinstance(meta, bytes)
    server.command("SET", key(clone, "meta"), bytes([meta[0] + 8]) + meta[1:] + b"more")
    before = dump(server, namespace_of(clone))
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
        lambda: clone.enqueue("a"),
        lambda: clone.claim(1),
        lambda: clone.complete(job),
        lambda: clone.fail(job, follow_up=Work(b"")),
        lambda: clone.extend(job),
        lambda: clone.cancel("a"),
        lambda: clone.keep("a", 5),
        lambda: storage.pause("q", True),
        lambda: clone.sweep(),
        lambda: storage.purge("q", list(State)),
        lambda: storage.drop("q"),
        lambda: storage.get("q", ["a"]),
        lambda: storage.scan("q"),
        lambda: storage.snapshot(),
        lambda: audit(storage, "q", repair=True),
    ]
    for call in calls:
        with pytest.raises(LayoutTooNew, match=f"layout '{LAYOUT + 8}'"):
            await call()
    after = dump(server, namespace_of(clone))
    listed = f"{{{namespace_of(clone)}}}:queues".encode()
    assert before.pop(listed) != b""
    after.pop(listed)  # `fail` lists its companion beforehand.
    assert after == before


# URLs and clients


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1?nonsense=1",
        "redis://127.0.0.1/nonsense",
        "redis://127.0.0.1/1/2",
        "redis://127.0.0.1/-1",
        "redis://127.0.0.1:nonsense",
        "redis://127.0.0.1:99999",
        "redis://127.0.0.1?timeout=nonsense",
        "redis://127.0.0.1?timeout=0",
        "redis://127.0.0.1?timeout=-1",
        "redis://127.0.0.1?timeout=nan",
        "redis://127.0.0.1?timeout=99999",
        "redis://127.0.0.1?eviction=maybe",
        "redis://127.0.0.1,127.0.0.2",
        "redis+sentinel://127.0.0.1",
        "redis+cluster://127.0.0.1/3",
    ],
)
def test_invalid_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(OptionError, match=r"127\.0\.0\.1|://\*\*\*") as caught:
        connect(url.replace("://", f"://u:{SECRET}@"))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_a_database_of_the_url_is_used(own: Server) -> None:
    async with connect(f"{own.url}/3") as storage:
        await storage.enqueue("q", [Request("a", Work(b""))])
    assert own.info("keyspace").keys() == {"db3"}


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 3}, {"socket_timeout": 0.2}])
async def test_a_storage_of_a_client_leaves_the_client_open_and_usable(server: Server, options: dict[str, Any]) -> None:
    client = redis.asyncio.Redis(host=HOST, port=server.port, **options)
    try:
        clock = ManualClock()
        async with of_client(client, namespace=uuid.uuid4().hex, clock=clock) as storage:
            stage = Stage(storage, clock)
            await stage.enqueue("ä", b"\xff\x00")
            job = await stage.claim_one()
            assert (job.id, job.payload) == ("ä", b"\xff\x00")
            assert await client.set("used", "beside it")
            assert await stage.complete(job, b"\xfe") is SettleResult.OK
            assert await stage.problems() == []
        text = await client.get("used")
        assert text == ("beside it" if options.get("decode_responses") else b"beside it")
    finally:
        await client.delete("used")
        await client.aclose()


def test_a_client_that_is_not_asynchronous_is_refused(server: Server) -> None:
    with redis.Redis(host=HOST, port=server.port) as client:
        with pytest.raises(OptionError, match=r"redis\.asyncio"):
            of_client(client)
