"""Replies that are lost, copies that come late, callers that go away: every call has its effect and its reply once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest

from holdfast._core.jobs import Complete, Fail, Job, Request, State, Update, Work
from holdfast._core.replies import CancelResult, Enqueued, Placed, SettleResult
from holdfast.errors import OptionError
from holdfast.storage import Settlement, audit, connect
from holdfast.storage.redis.script import SOURCES
from tests.proxy import Exchange, Proxy
from tests.redis.conftest import applied, call_of, contents, first, is_call, key, lost, namespace_of, opened, until
from tests.servers import Server, shared
from tests.storage.stage import Stage, fence

Prepare = Callable[[Stage], Awaitable[object]]
Act = Callable[[Stage], Awaitable[object]]


async def nothing(stage: Stage) -> None:
    pass


async def three(stage: Stage) -> None:
    for id, priority in (("a", 5), ("b", 9), ("c", 5)):
        await stage.enqueue(id, id.encode(), priority=priority)


async def running(stage: Stage) -> None:
    await three(stage)
    await stage.claim(2)


async def finished(stage: Stage) -> None:
    await running(stage)
    await stage.complete(await stage.the("a"), b"result of a")
    await stage.fail(await stage.the("b"), ttl=60)


async def following(stage: Stage) -> None:
    await running(stage)
    await stage.enqueue("a", b"following", update=Update())


async def asked_to_cancel(stage: Stage) -> None:
    await running(stage)
    await stage.cancel("a")


async def expired(stage: Stage) -> None:
    await running(stage)
    stage.clock.advance(10)


async def overdue(stage: Stage) -> None:
    await expired(stage)
    await stage.sweep()
    stage.clock.advance(5)


async def to_forget(stage: Stage) -> None:
    await finished(stage)
    stage.clock.advance(3600)


async def empty(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.purge("q", [State.WAITING])


async def announced(stage: Stage) -> None:
    await stage.storage.announce("w1", {"queues": ["q"]}, ttl_ms=10_000)
    stage.clock.advance(1)


async def to_be_evicted(stage: Stage) -> None:
    await announced(stage)
    await stage.storage.evict("w1")


def on_server(*args: str | bytes | int) -> object:
    server = shared("valkey")
    assert server is not None
    return server.command(*args)


def listed(stage: Stage) -> object:
    """The names of queues that the namespace has on its list."""
    return on_server("SMEMBERS", f"{{{namespace_of(stage)}}}:queues")


async def unindexed(stage: Stage) -> None:
    await running(stage)
    assert on_server("ZREM", key(stage, "running"), "a") == 1


async def miscounted(stage: Stage) -> None:
    await three(stage)
    assert on_server("ZREMRANGEBYRANK", key(stage, "w5"), 0, 0) == 1
    assert on_server("HDEL", key(stage, "jobs"), "a") == 1


async def enqueue_many(stage: Stage) -> object:
    """One of each: new, new twice, duplicate, updated, deferred, cached, and one that brings nothing."""
    requests = [
        Request("new", Work(b"1"), custom_id=True),
        Request("new", Work(b"2", priority=1), delay_ms=5000, update=Update()),
        Request("c", Work(b"3")),
        Request("c", Work(b"4"), update=Update(), keep_ms=1000),
        Request("a", Work(b"5")),
        Request("b", Work(None), update=Update(payload=False)),
        Request("none", Work(None), update=Update(payload=False)),
    ]
    return await stage.storage.enqueue("q", requests)


async def claim(stage: Stage) -> object:
    return await stage.storage.claim("q", 2, worker="w1", lease_ms=10_000)


async def settle_all(stage: Stage) -> object:
    a, b = await stage.the("a"), await stage.the("b")
    batch: list[Settlement] = [
        Complete("a", fence(a), b"r", result_ttl_ms=1000),
        Fail("b", fence(b), b"e", 1000),
        Complete("b", fence(b)),
    ]
    return await stage.storage.settle("q", batch, worker="w1")


def on_a(act: Callable[[Stage, Job], Awaitable[object]]) -> Act:
    async def acts(stage: Stage) -> object:
        return await act(stage, await stage.the("a"))

    return acts


CASES: dict[str, tuple[str, Prepare, Act]] = {
    "enqueue into a new queue": ("enqueue", nothing, lambda s: s.enqueue("a", b"1", priority=7, max_retries=3)),
    "enqueue a new one": ("enqueue", three, lambda s: s.enqueue("d", b"1", delay=5)),
    "enqueue an update": ("enqueue", three, lambda s: s.enqueue("a", b"2", update=Update())),
    "enqueue a deferred one": ("enqueue", running, lambda s: s.enqueue("a", b"2", update=Update())),
    "enqueue a duplicate": ("enqueue", three, lambda s: s.enqueue("a", b"2", keep=5)),
    "enqueue what is completed": ("enqueue", finished, lambda s: s.enqueue("a")),
    "enqueue what has failed": ("enqueue", finished, lambda s: s.enqueue("b")),
    "enqueue, forgetting others": ("enqueue", to_forget, lambda s: s.enqueue("d")),
    "enqueue many": ("enqueue", finished, enqueue_many),
    "claim": ("claim", three, claim),
    "claim from no queue": ("claim", nothing, claim),
    "claim from a paused queue": ("claim", lambda s: s.storage.pause("q", True, reason="x"), claim),
    "claim, marking leases": ("claim", expired, claim),
    "claim, taking leases back": ("claim", overdue, claim),
    "claim what ran before": ("claim", overdue, lambda s: s.storage.claim("q", 9, worker="w2", lease_ms=1000)),
    "complete": ("settle", running, on_a(lambda s, job: s.complete(job))),
    "complete without a trace": ("settle", running, on_a(lambda s, job: s.complete(job, None, ttl=0))),
    "complete what another follows": ("settle", following, on_a(lambda s, job: s.complete(job))),
    "fail": ("settle", running, on_a(lambda s, job: s.fail(job))),
    "fail with a follow-up": ("settle", running, on_a(lambda s, job: s.fail(job, follow_up=Work(b"f")))),
    "fail what should be cancelled": ("settle", asked_to_cancel, on_a(lambda s, job: s.fail(job))),
    "retry": ("settle", running, on_a(lambda s, job: s.retry(job, delay=3))),
    "release": ("settle", running, on_a(lambda s, job: s.release(job))),
    "settle several": ("settle", running, settle_all),
    "extend": ("extend", overdue, on_a(lambda s, job: s.extend(job, lease=20, progress=b"half"))),
    "extend what should be cancelled": ("extend", asked_to_cancel, on_a(lambda s, job: s.extend(job))),
    "extend what is lost": ("extend", running, on_a(lambda s, job: s.extend(job, worker="w2"))),
    "cancel": ("cancel", running, lambda s: s.storage.cancel("q", ["a", "b", "c", "d", "c"])),
    "keep": ("keep", finished, lambda s: s.storage.keep("q", ["a", "b", "c", "d"], 9_000_000)),
    "keep for a waiter": ("keep", running, lambda s: s.storage.keep("q", ["a", "c"], 9_000_000, at_least=True)),
    "prioritize": ("prioritize", running, lambda s: s.storage.prioritize("q", ["a", "b", "c", "d"], 9)),
    "pause": ("pause", three, lambda s: s.storage.pause("q", True, reason="because")),
    "pause a new queue": ("pause", nothing, lambda s: s.storage.pause("q", True)),
    "sweep, marking": ("sweep", expired, lambda s: s.sweep()),
    "sweep, taking back": ("sweep", overdue, lambda s: s.sweep(1)),
    "sweep a worker": ("sweep", running, lambda s: s.sweep(worker="w1")),
    "sweep, forgetting": ("sweep", to_forget, lambda s: s.sweep()),
    "purge": ("purge", finished, lambda s: s.storage.purge("q", list(State), 2)),
    "purge what runs": ("purge", running, lambda s: s.storage.purge("q", [State.RUNNING])),
    "drop": ("drop", empty, lambda s: s.storage.drop("q")),
    "drop a job": ("drop", finished, lambda s: s.storage.drop("q")),
    "announce": ("announce", nothing, lambda s: s.storage.announce("w1", {"queues": ["q"]}, ttl_ms=1000)),
    "announce and be told": ("announce", to_be_evicted, lambda s: s.storage.announce("w1", {"n": 1}, ttl_ms=9000)),
    "evict": ("evict", announced, lambda s: s.storage.evict("w1")),
    "evict nobody": ("evict", announced, lambda s: s.storage.evict("w2")),
    "repair": ("repair", unindexed, lambda s: audit(s.storage, "q", repair=True)),
    "recount": ("recount", miscounted, lambda s: audit(s.storage, "q", repair=True)),
}


@pytest.mark.parametrize("verdict", ["cut", "half"])
@pytest.mark.parametrize("case", CASES)
async def test_a_call_whose_reply_is_lost_is_made_again_with_one_effect_and_the_same_reply(
    proxy: Proxy, stage: Stage, clone: Stage, case: str, verdict: str
) -> None:
    verb, prepare, act = CASES[case]
    await prepare(stage)
    await prepare(clone)
    assert await contents(stage) == await contents(clone)
    start = len(proxy.log)
    proxy.rule = lost(verb, verdict)
    assert await act(stage) == await act(clone)
    calls = applied(proxy.log[start:], verb)
    assert len(calls) == 2, "it was not sent twice"
    assert call_of(calls[0]) == call_of(calls[1])
    assert calls[0].connection != calls[1].connection
    assert await contents(stage) == await contents(clone)
    assert listed(stage) == listed(clone)


@pytest.mark.parametrize("verdict", ["cut", "half"])
async def test_calls_after_a_lost_reply_are_unaffected(proxy: Proxy, stage: Stage, clone: Stage, verdict: str) -> None:
    """A whole life, with every second reply lost."""
    cut = iter(range(1000))
    proxy.rule = lambda exchange: verdict if call_of(exchange) and next(cut) % 2 == 0 else "pass"
    for each in (stage, clone):
        await following(each)
        await each.retry(await each.the("a"), delay=1)
        await each.fail(await each.the("b"), follow_up=Work(b"f"))
        each.clock.advance(1)
        assert [job.id for job in await each.claim(9, worker="w2")] == ["c", "a"]
        await each.expire()
        assert [job.id for job in await each.claim(9, worker="w3")] == ["c", "a"]
        assert await each.complete(await each.the("a"), worker="w3") is SettleResult.OK
        await each.cancel("c")
    proxy.rule = None
    assert await contents(stage) == await contents(clone)


async def purge_one(stage: Stage) -> object:
    return await stage.storage.purge("q", [State.WAITING], 1)


async def complete_next(stage: Stage) -> object:
    return await stage.complete(next(job for job in [await stage.the("a"), await stage.the("b")] if job.run))


LATE: dict[str, tuple[Prepare, Act, Act]] = {
    "enqueue": (nothing, lambda s: s.enqueue("a"), lambda s: s.enqueue("b")),
    "claim": (three, lambda s: s.claim(1), lambda s: s.claim(1)),
    "settle": (running, complete_next, complete_next),
    "extend": (running, on_a(lambda s, job: s.extend(job, lease=30)), on_a(lambda s, job: s.extend(job, lease=5))),
    "cancel": (three, lambda s: s.cancel("a"), lambda s: s.cancel("b")),
    "keep": (three, lambda s: s.keep("a", 500), lambda s: s.keep("a", 5)),
    "pause": (three, lambda s: s.storage.pause("q", True), lambda s: s.storage.pause("q", False)),
    "sweep": (running, lambda s: s.sweep(worker="w1"), lambda s: s.sweep()),
    "purge": (three, purge_one, purge_one),
    "announce": (
        nothing,
        lambda s: s.storage.announce("w", {"n": 1}, ttl_ms=9000),
        lambda s: s.storage.announce("w", {"n": 2}, ttl_ms=1000),
    ),
    "evict": (announced, lambda s: s.storage.evict("w1"), lambda s: s.storage.evict("w2")),
}


@pytest.mark.parametrize("verb", LATE)
async def test_late_first_copy_is_refused_after_a_later_call(
    proxy: Proxy, stage: Stage, clone: Stage, verb: str
) -> None:
    prepare, act, act_again = LATE[verb]
    await prepare(stage)
    await prepare(clone)
    proxy.before = first(lambda exchange: is_call(exchange, verb), "hold")
    assert await act(stage) == await act(clone)
    assert await act_again(stage) == await act_again(clone)
    if verb == "enqueue":  # What came between may have made room for the late copy to do harm.
        assert await stage.cancel("a") == await clone.cancel("a")
    before = await contents(stage)
    assert before == await contents(clone)
    assert await proxy.release() == [b"-HOLDFAST_SUPERSEDED\r\n"]
    assert await contents(stage) == before


@pytest.mark.parametrize("verb", LATE)
async def test_late_first_copy_after_its_repetition_changes_nothing(proxy: Proxy, stage: Stage, verb: str) -> None:
    prepare, act, _ = LATE[verb]
    await prepare(stage)
    start = len(proxy.log)
    proxy.before = first(lambda exchange: is_call(exchange, verb), "hold")
    await act(stage)
    (done,) = applied(proxy.log[start:], verb)
    before = await contents(stage)
    assert await proxy.release() == [done.reply]
    assert await contents(stage) == before


# Many calls at once


async def before_the_crowd(stage: Stage) -> None:
    await running(stage)
    await stage.storage.enqueue("q2", [Request("x", Work(b"x")), Request("y", Work(b"y"))])
    await stage.storage.claim("q2", 1, worker="w1", lease_ms=1000)


async def crowd(stage: Stage) -> list[object]:
    """Calls of all kinds on two queues, all made at the same moment."""
    storage, a, b = stage.storage, await stage.the("a"), await stage.the("b")
    calls: list[Coroutine[Any, Any, object]] = [
        stage.enqueue("n1", b"1"),
        stage.enqueue("n2", b"2", priority=8),
        stage.enqueue("c", b"3", update=Update()),
        stage.cancel("n1"),
        stage.claim(1, worker="w2"),
        stage.complete(a),
        stage.retry(b, delay=1),
        storage.enqueue("q2", [Request("z", Work(b"z"))]),
        storage.keep("q2", ["x", "y", "z"], 1000),
        storage.claim("q2", 1, worker="w2", lease_ms=1000),
        stage.enqueue("a", b"4"),
        stage.extend(b),
        storage.cancel("q2", ["z", "x"]),
        stage.claim(5, worker="w3"),
        storage.announce("w1", {"queues": ["q"]}, ttl_ms=1000),
        stage.sweep(worker="w2"),
    ]
    return list(await asyncio.gather(*calls))


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_pipeline_cut_anywhere_gives_all_callers_the_same_replies(
    proxy: Proxy, server: Server, clone: Stage, moment: str
) -> None:
    await before_the_crowd(clone)
    replies, after = await crowd(clone), await contents(clone)
    position, was_cut = 0, True
    while was_cut:
        seen: list[Exchange] = []

        def at_position(exchange: Exchange, at: int = position, seen: list[Exchange] = seen) -> str:
            if call_of(exchange) is None or exchange.reply.startswith(b"-ERR Function not found"):
                return "pass"
            seen.append(exchange)
            return "cut" if len(seen) == at + 1 else "pass"

        async with opened(proxy.url) as stage:
            await before_the_crowd(stage)
            setattr(proxy, "before" if moment == "before" else "rule", at_position)
            assert await crowd(stage) == replies, f"cut {moment} call {position}"
            proxy.before = proxy.rule = None
            assert await contents(stage) == after, f"cut {moment} call {position}"
        was_cut = len(seen) > position
        position += 1
    assert position > 10


async def test_pipeline_that_is_cut_repeatedly_still_ends(proxy: Proxy, stage: Stage, clone: Stage) -> None:
    """Each connection is good for one reply."""
    for each in (stage, clone):
        await before_the_crowd(each)
    served: set[int] = set()

    def once_each(exchange: Exchange) -> str:
        if call_of(exchange) is None:
            return "pass"
        again = exchange.connection in served
        served.add(exchange.connection)
        return "cut" if again else "pass"

    proxy.rule = once_each
    assert await crowd(stage) == await crowd(clone)
    proxy.rule = None
    assert len(served) > 5
    assert await contents(stage) == await contents(clone)


# The list of queues


async def test_queue_recreated_by_a_cancelled_caller_is_listed(proxy: Proxy, server: Server, stage: Stage) -> None:
    async with opened(server.url, like=stage) as other:
        await stage.enqueue("a")
        await stage.claim_one()
        await stage.complete(await stage.the("a"), ttl=0)
        assert await other.storage.drop("q") == 0
        enqueueing = asyncio.create_task(stage.enqueue("b"))
        await asyncio.sleep(0)
        enqueueing.cancel()
        await asyncio.wait([enqueueing])
        assert (await stage.enqueue("c")).placed is Placed.NEW
        assert await stage.the("b")
        assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == ["q"]


# Calls that are made again after a while


T = TypeVar("T")


async def without_a_reply(proxy: Proxy, verb: str, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The server has done it; the reply is lost, and there is no way back to it yet."""

    def lose(exchange: Exchange) -> str:
        if not applied([exchange], verb):
            return "pass"
        proxy.refuse, proxy.rule = True, None
        return "cut"

    proxy.rule = lose
    calling = asyncio.create_task(call)
    await until(lambda: proxy.refuse)
    return calling


async def claim_without_a_reply(proxy: Proxy, stage: Stage) -> asyncio.Task[list[Job]]:
    return await without_a_reply(proxy, "claim", stage.claim(2, worker="w1", lease=10))


async def test_repeated_enqueue_of_a_completed_id_returns_no_other_outcome(
    proxy: Proxy, server: Server, stage: Stage
) -> None:
    async with opened(server.url, like=stage) as other:
        await finished(stage)
        enqueueing = await without_a_reply(proxy, "enqueue", stage.enqueue("a"))
        await other.cancel("c")
        await other.enqueue("a", b"again", update=Update())
        await other.complete(await other.claim_one(), b"of another run")
        proxy.refuse = False
        reply = await enqueueing
        assert reply.placed is Placed.COMPLETED
        assert reply.outcome is None or reply.outcome.generation == reply.generation


async def test_cached_outcome_is_returned_though_the_same_call_restarts_the_job(clone: Stage) -> None:
    await finished(clone)
    outcome = (await clone.the("a")).outcome
    requests = [Request("a", Work(b"1")), Request("a", Work(b"2"), update=Update())]
    cached, started = await clone.storage.enqueue("q", requests)
    assert (cached.placed, started.placed) == (Placed.COMPLETED, Placed.NEW)
    assert cached.outcome == outcome


@pytest.mark.parametrize("size", [5, 100_000], ids=["small", "large"])
async def test_repeated_enqueue_returns_a_small_outcome_though_the_record_is_gone(
    proxy: Proxy, server: Server, stage: Stage, size: int
) -> None:
    async with opened(server.url, like=stage) as other:
        await stage.enqueue("a")
        await stage.complete(await stage.claim_one(), b"x" * size)
        outcome = (await stage.the("a")).outcome
        assert outcome is not None
        enqueueing = await without_a_reply(proxy, "enqueue", stage.enqueue("a"))
        await other.storage.purge("q", [State.COMPLETED])
        proxy.refuse = False
        met = outcome if size == 5 else None
        assert await enqueueing == Enqueued("a", Placed.COMPLETED, outcome.generation, State.COMPLETED, met)


async def test_a_repeated_enqueue_finds_a_large_outcome_again(proxy: Proxy, stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), b"x" * 100_000)
    enqueueing = await without_a_reply(proxy, "enqueue", stage.enqueue("a"))
    proxy.refuse = False
    assert (await enqueueing).outcome == (await stage.the("a")).outcome


def test_no_call_is_repeated_for_longer_than_its_reply_is_kept() -> None:
    (kept,) = re.findall(r"CALL_KEPT_MS, \w+ = (\d+)", SOURCES["keyspace"])
    connect(f"redis://127.0.0.1?timeout={int(kept) / 2000}")
    with pytest.raises(OptionError, match="timeout"):
        connect(f"redis://127.0.0.1?timeout={int(kept) / 1000 + 1}")


async def test_repeated_claim_omits_jobs_leased_by_another_worker_since(
    proxy: Proxy, server: Server, stage: Stage
) -> None:
    async with opened(server.url, like=stage) as other:
        for id in "abc":
            await stage.enqueue(id)
        claiming = await claim_without_a_reply(proxy, stage)
        fences = {id: fence(await other.the(id)) for id in "ab"}
        stage.clock.advance(10)
        assert (await other.sweep(1)).overdue == ["a"]
        stage.clock.advance(5)
        assert [(await other.sweep(1)).overdue, (await other.sweep(1)).stalled] == [["b"], ["a"]]
        assert [job.id for job in await other.claim(1, worker="w1")] == ["a"]
        proxy.refuse = False
        (held,) = await claiming
        assert (held.id, held.fence) == ("b", fences["b"])
        assert await stage.complete(held) is SettleResult.OK
        assert await stage.problems() == []


async def test_a_repeated_claim_gives_nothing_when_all_leases_are_gone(
    proxy: Proxy, server: Server, stage: Stage
) -> None:
    async with opened(server.url, like=stage) as other:
        await stage.enqueue("a")
        await stage.enqueue("b")
        claiming = await claim_without_a_reply(proxy, stage)
        await other.sweep(worker="w1")
        await other.storage.purge("q", [State.WAITING])
        proxy.refuse = False
        assert await claiming == []
        assert await stage.claim(2) == []


# Callers that go away


async def cancelled_after(turns: int, call: Coroutine[Any, Any, Any]) -> bool:
    """Cancel a call after so many turns of the loop. Whether it was still under way."""
    task = asyncio.create_task(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


def sent(proxy: Proxy, verb: str, id: str) -> bool:
    return any(is_call(exchange, verb) and id.encode() in exchange.command for exchange in proxy.log)


TURNS = range(25)


async def test_cancelled_enqueue_counts_if_sent_and_the_next_gets_its_own_reply(proxy: Proxy, stage: Stage) -> None:
    cancelled = 0
    for turns in TURNS:
        async with opened(proxy.url) as fresh:  # Its first enqueue also lists the queue.
            cancelled += await cancelled_after(turns, fresh.enqueue("first"))
            assert await fresh.enqueue("second") == Enqueued(
                "second", Placed.NEW, (await fresh.the("second")).generation
            )
            cancelled += await cancelled_after(turns, fresh.enqueue(f"third {turns}"))
            *replies, cancelling = await asyncio.gather(
                *(fresh.enqueue(f"{n}") for n in range(3)), fresh.cancel("second")
            )
            assert [reply.id for reply in replies if isinstance(reply, Enqueued)] == ["0", "1", "2"]
            assert cancelling is CancelResult.CANCELLED
            for id in ("first", f"third {turns}"):
                there = await fresh.get(id) is not None
                mine = [
                    exchange for exchange in proxy.log if key(fresh, "").encode() in b"".join(exchange.command[3:4])
                ]
                assert there == any(id.encode() in exchange.command for exchange in applied(mine, "enqueue"))
            assert await fresh.problems() == []
    assert cancelled > 3


async def test_cancelled_caller_does_not_affect_other_callers(proxy: Proxy, stage: Stage) -> None:
    for turns in TURNS:
        tasks = [asyncio.create_task(stage.enqueue(f"{turns}-{n}")) for n in range(6)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for n in (0, 2, 5):
            tasks[n].cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        for n, reply in enumerate(replies):
            assert isinstance(reply, Enqueued) or n in (0, 2, 5)
            if isinstance(reply, Enqueued):
                assert (reply.id, reply.placed) == (f"{turns}-{n}", Placed.NEW)
                assert reply.generation == (await stage.the(reply.id)).generation
            else:
                assert (await stage.get(f"{turns}-{n}") is not None) == sent(proxy, "enqueue", f"{turns}-{n}")
    assert await stage.problems() == []


async def test_leases_of_a_cancelled_claim_are_taken_back(proxy: Proxy, stage: Stage) -> None:
    for turns in TURNS:
        ids = [f"{turns}-{n}" for n in range(4)]
        await stage.storage.enqueue("q", [Request(id, Work(b"")) for id in ids])
        start = len(proxy.log)
        cancelled = await cancelled_after(turns, stage.claim(2, worker="gone"))
        mine = await stage.claim(4, worker="w1")
        theirs = ids[: 4 - len(mine)]
        assert [job.id for job in mine] == ids[len(theirs) :]
        assert [(await stage.the(id)).worker for id in theirs] == ["gone"] * len(theirs)
        assert len(theirs) == 2 * (len(applied(proxy.log[start:], "claim")) - 1)
        assert cancelled or theirs
        assert (await stage.sweep(worker="gone")).stalled == theirs
        mine += await stage.claim(4, worker="w1")
        assert sorted(job.id for job in mine) == ids
        assert [await stage.complete(job, ttl=0) for job in mine] == [SettleResult.OK] * 4
    assert await stage.problems() == []


async def test_a_cancelled_settle_counts_if_it_was_sent_and_the_next_gets_its_own_reply(
    proxy: Proxy, stage: Stage
) -> None:
    for turns in TURNS:
        await stage.enqueue(f"a{turns}")
        await stage.enqueue(f"b{turns}")
        a, b = await stage.claim(2)
        await cancelled_after(turns, stage.complete(a, b"of a"))
        assert await stage.fail(b, b"of b") is SettleResult.OK
        a_after, b_after = await stage.the(a.id), await stage.the(b.id)
        assert a_after.state is (State.COMPLETED if sent(proxy, "settle", a.id) else State.RUNNING)
        assert b_after.outcome is not None
        assert b_after.outcome.error == b"of b"
        again = await stage.complete(a, b"of a")
        assert again is (SettleResult.LOST if a_after.outcome else SettleResult.OK)
    assert await stage.problems() == []


async def test_callers_cancelled_during_a_cut_do_not_affect_others(proxy: Proxy, server: Server, stage: Stage) -> None:
    await stage.enqueue("before")
    async with AsyncExitStack() as later:
        later.callback(setattr, proxy, "refuse", False)
        proxy.rule = lost("enqueue", "cut")
        tasks = [asyncio.create_task(stage.enqueue(f"{n}")) for n in range(8)]
        await asyncio.sleep(0)
        proxy.refuse = True
        proxy.cut_all()
        for task in tasks[::2]:
            task.cancel()
        await asyncio.wait(tasks[::2])
    replies = await asyncio.gather(*tasks[1::2])
    assert [reply.id for reply in replies] == ["1", "3", "5", "7"]
    assert [reply.placed for reply in replies] == [Placed.NEW] * 4
    ids = [job.id for job in (await stage.storage.scan("q")).jobs]
    assert len(ids) == len(set(ids))
    assert {"before", "1", "3", "5", "7"} <= set(ids)
    assert await stage.problems() == []
