"""How calls reach the Lua library: numbered, so that a repeated one changes nothing, and together, each caller with
its own part of the reply. A repetition is made here by sending a number again, as a client does whose reply was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import pytest

from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Complete, Fail, LeaseRef, Request, State, Work
from holdfast._core.replies import CancelResult, KeepResult, Placed, SettleResult
from holdfast.errors import StorageFull, StorageUnavailable
from holdfast.storage import connect
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis.codec import request_args, settlement_args
from holdfast.storage.redis.raw import Argument, Deliver, Reply
from holdfast.storage.validation import MAX_CALL_BYTES
from tests.storage.behind import RedisSaboteur
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence, heard

STORAGES = ("valkey", "redis")
NUMBER = 1000
"""Higher than any that the storage itself has used in these tests."""


@pytest.fixture
def saboteur(stage: Stage, harness: Harness) -> RedisSaboteur:
    assert isinstance(stage.storage, RedisStorage)
    return RedisSaboteur(stage.storage, harness.name)


async def call(stage: Stage, verb: str, number: int, args: Sequence[Argument]) -> Reply:
    """A call under a number of our choice."""
    assert isinstance(stage.storage, RedisStorage)
    calls, key = stage.storage._calls, stage.storage._key(stage.queue)
    return await calls._routed(key, calls._command(verb, key, number, args), calls._library)


ENQUEUE = request_args(Request("b", Work(b"payload"), custom_id=True))


# Numbers


async def test_a_call_that_is_repeated_gets_the_same_reply_and_changes_nothing(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    await stage.enqueue("a")
    await stage.enqueue("c")
    job = await stage.claim_one()
    calls: list[tuple[str, Sequence[Argument]]] = [
        ("enqueue", ENQUEUE),
        ("extend", ("w1", 20_000, "a", fence(job), "+half")),
        ("settle", ("w1", *settlement_args(Complete("a", fence(job), b"result")))),
        ("cancel", ("b",)),
        ("keep", (60_000, 1, "c")),
        ("prioritize", (9, "c")),
        ("pause", (1, "tests")),
        ("claim", (5, "w2", 10_000)),
        ("sweep", (5, "")),
        ("purge", (5, "1")),
    ]
    for verb, args in calls:
        first = await call(stage, verb, NUMBER, args)
        stage.clock.advance(1)
        before = saboteur.contents()
        assert await call(stage, verb, NUMBER, args) == first, verb
        assert saboteur.contents() == before, verb


async def test_a_call_with_a_lower_number_is_refused_and_changes_nothing(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await call(stage, "cancel", NUMBER, ("x",))
    before = saboteur.contents()
    with pytest.raises(StorageUnavailable, match="a later call"):
        await call(stage, "cancel", NUMBER - 1, ("a",))
    assert saboteur.contents() == before


async def test_call_with_a_higher_number_is_a_new_call(stage: Stage) -> None:
    await stage.enqueue("a")
    assert [(await call(stage, "enqueue", NUMBER + n, ENQUEUE))[1][0] for n in range(2)] == [1, 4]


async def test_call_numbers_are_separate_per_client_and_verb(stage: Stage, other: Stage) -> None:
    await stage.enqueue("a")
    await call(stage, "enqueue", NUMBER, ENQUEUE)
    assert (await call(other, "enqueue", NUMBER, ENQUEUE))[1][0] == 4
    assert await call(stage, "cancel", NUMBER, ("b",)) == b"c"
    assert (await call(stage, "sweep", 1, (5, "")))[2] == 0


async def test_repeated_settle_does_not_return_lost(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    args = ("w1", *settlement_args(Fail("a", fence(job), b"error", 60_000)))
    assert [await call(stage, "settle", NUMBER, args) for _ in range(3)] == [[0, b"1"]] * 3
    assert (await stage.stats()).totals[EventKind.FAILED] == 1


async def test_a_claim_that_is_repeated_gives_the_same_jobs_under_the_same_fences(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id)
    first = await call(stage, "claim", NUMBER, (2, "w1", 10_000))
    assert first[4][::2] == [b"a", b"b"]
    assert await call(stage, "claim", NUMBER, (2, "w1", 10_000)) == first
    assert (await stage.stats()).running == 2


async def test_a_claim_that_is_repeated_gives_nothing_that_has_moved_on_meanwhile(stage: Stage, other: Stage) -> None:
    for id in "abcd":
        await stage.enqueue(id)
    jobs = (await call(stage, "claim", NUMBER, (4, "w1", 10_000)))[4]
    assert jobs[::2] == [b"a", b"b", b"c", b"d"]
    await other.sweep(worker="w1")
    taken = await other.claim(2, worker="w2")
    assert [job.id for job in taken] == ["a", "b"]
    await other.complete(taken[1], worker="w2", ttl=0)
    assert (await call(stage, "claim", NUMBER, (4, "w1", 10_000)))[4:6] == [[], b""]


async def test_repeated_enqueue_returns_the_cached_outcome_again(stage: Stage) -> None:
    await stage.enqueue("b")
    await stage.complete(await stage.claim_one(), b"result")
    replies = [await call(stage, "enqueue", NUMBER, ENQUEUE) for _ in range(2)]
    assert replies[0] == replies[1]
    ((at, outcome, *_),) = replies[1][2]
    assert at == 1
    assert outcome.endswith(b"result")


@pytest.mark.parametrize("size", [10, 10_000])
async def test_repeated_enqueue_returns_a_small_outcome_that_is_gone(stage: Stage, size: int) -> None:
    await stage.enqueue("b")
    await stage.complete(await stage.claim_one(), bytes(size), ttl=60)
    first = await call(stage, "enqueue", NUMBER, ENQUEUE)
    await stage.storage.purge("q", [State.COMPLETED], 10)
    again = await call(stage, "enqueue", NUMBER, ENQUEUE)
    assert (again == first) == (size == 10)
    assert (again[2][0][1] == b"") == (size == 10_000)


async def test_last_call_of_a_client_is_kept_for_ten_minutes(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    _, keys = saboteur.command("SCAN", 0, "MATCH", f"{saboteur.key}:call:*", "COUNT", 100_000)
    assert len(keys) == 1
    assert 590_000 < saboteur.command("PTTL", keys[0]) <= 600_000


# Together


async def test_coalesced_callers_each_get_their_own_part_of_the_reply(stage: Stage) -> None:
    storage = stage.storage
    for n in range(0, 40, 2):
        await stage.enqueue(f"{n}")
    await stage.enqueue("done", priority=9)
    done = await stage.claim_one()
    await stage.complete(done)
    sizes = [1, 3, 2, 5, 4]
    parts = [[f"{n}" for n in range(sum(sizes[:at]), sum(sizes[: at + 1]))] for at in range(len(sizes))]

    def request(id: str) -> Request:
        return Request(id, Work(b"x"), custom_id=True)

    batches = [[*map(request, part), request("done")] for part in parts]
    replies = await asyncio.gather(*(storage.enqueue("q", batch) for batch in batches))
    for part, reply in zip(parts, replies, strict=True):
        assert [enqueued.id for enqueued in reply] == [*part, "done"]
        placed = [Placed.DUPLICATE if int(id) % 2 == 0 else Placed.NEW for id in part]
        assert [enqueued.placed for enqueued in reply] == [*placed, Placed.COMPLETED]
        assert [enqueued.outcome is not None for enqueued in reply] == [False] * len(part) + [True]
    kept = await asyncio.gather(*(storage.keep("q", [*part, "none", "done"], 60_000) for part in parts))
    assert kept == [[*[KeepResult.LIVE] * len(part), KeepResult.MISSING, KeepResult.KEPT] for part in parts]

    jobs = {job.id: job for job in await stage.claim(100)}
    leases = [[LeaseRef(id, fence(jobs[id]) + int(id) % 2) for id in part] for part in parts]
    told = await asyncio.gather(*(storage.extend("q", part, worker="w1", lease_ms=10_000) for part in leases))
    assert [extended.lost for extended in told] == [[lease for lease in part if int(lease.id) % 2] for part in leases]

    settled = await asyncio.gather(
        *(storage.settle("q", [Complete(lease.id, lease.fence) for lease in part], worker="w1") for part in leases)
    )
    assert settled == [
        [SettleResult.LOST if int(lease.id) % 2 else SettleResult.OK for lease in part] for part in leases
    ]
    cancelled = await asyncio.gather(*(storage.cancel("q", part) for part in parts))
    assert cancelled == [
        [CancelResult.ASKED if int(id) % 2 else CancelResult.FINISHED for id in part] for part in parts
    ]


async def test_calls_that_travel_together_count_extensions_towards_the_limit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(stage.storage, RedisStorage)
    calls, sizes = stage.storage._calls, list[int]()
    send = calls.send

    def counted(verb: str, key: str, number: int, args: Sequence[Argument], deliver: Deliver) -> None:
        sizes.append(sum(len(arg) for arg in args if not isinstance(arg, int)))
        send(verb, key, number, args, deliver)

    monkeypatch.setattr(calls, "send", counted)
    work = Work(b"x", extension=((200, bytes(65_000)),))
    await asyncio.gather(*(stage.storage.enqueue("q", [Request(f"{n}", work)]) for n in range(40)))
    assert len(sizes) > 2
    assert max(sizes) <= MAX_CALL_BYTES


async def test_callers_with_different_options_are_not_coalesced(stage: Stage) -> None:
    storage = stage.storage
    ids = [f"{n}" for n in range(6)]
    for id in ids:
        await stage.enqueue(id)
    await asyncio.gather(*(stage.keep(id, 60 + int(id)) for id in ids))
    assert [(await stage.the(id)).keep_ms for id in ids] == [1000 * (60 + n) for n in range(6)]
    jobs = await stage.claim(3, worker="w1") + await stage.claim(3, worker="w2")
    leases = [LeaseRef(job.id, fence(job)) for job in jobs]
    told = await asyncio.gather(
        *(
            storage.extend("q", [lease], worker="w1" if at < 3 else "w2", lease_ms=10_000 + at)
            for at, lease in enumerate(leases)
        )
    )
    assert [extended.lost for extended in told] == [[]] * 6
    runs = [(await stage.the(id)).run for id in ids]
    assert [run.lease_ms for run in runs if run is not None] == [10_000 + at for at in range(6)]
    settled = await asyncio.gather(
        *(
            storage.settle("q", [Complete(lease.id, lease.fence)], worker="w1" if at % 2 else "w2")
            for at, lease in enumerate(leases)
        )
    )
    assert [reply for (reply,) in settled] == [
        SettleResult.OK if (at < 3) == at % 2 else SettleResult.LOST for at in range(6)
    ]


async def test_calls_are_made_in_the_order_in_which_they_were_asked_across_verbs(stage: Stage) -> None:
    """Each of these would do something else if it overtook the one before. Not at a client's first enqueue, which puts
    the queue on the list before."""
    await stage.enqueue("z")
    first, second, gone, third = await asyncio.gather(
        stage.enqueue("a"), stage.enqueue("a"), stage.cancel("a"), stage.enqueue("a", update=None)
    )
    assert (first.placed, second.placed, gone, third.placed) == (
        *(Placed.NEW, Placed.DUPLICATE, CancelResult.CANCELLED),
        Placed.NEW,
    )


async def test_jobs_that_are_enqueued_one_by_one_at_once_are_claimed_in_that_order(stage: Stage) -> None:
    ids = [f"{n}" for n in range(150)]
    await asyncio.gather(*(stage.enqueue(id) for id in ids))
    assert [job.id for job in await stage.claim(200)] == ids


# The list of queues


async def drop(stage: Stage, queue: str = "q") -> None:
    while await stage.storage.drop(queue):
        pass


async def test_queue_dropped_by_another_client_is_listed_when_recreated(stage: Stage, other: Stage) -> None:
    async def names() -> list[str]:
        return [stats.queue for stats in (await other.storage.snapshot()).queues]

    for id in "ab":
        await stage.enqueue(id)
        job = await stage.claim_one()
        await stage.fail(job, follow_up=Work(b"failed"))
        assert await names() == ["q", "q/failed"]
        for queue in ("q", "q/failed"):
            await drop(other, queue)
        assert await names() == []
    await stage.storage.pause("q", paused=True)
    assert await names() == ["q"]
    await drop(other)
    await stage.storage.pause("q", paused=False)
    assert await names() == ["q"]


# Servers


async def test_servers_load_the_library_as_functions(stage: Stage, saboteur: RedisSaboteur) -> None:
    saboteur.command("FUNCTION", "FLUSH")
    await stage.enqueue("a")
    assert len(saboteur.command("FUNCTION", "LIST")) == 1


async def test_flushed_script_is_loaded_again(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    for kind in ("SCRIPT", "FUNCTION"):
        saboteur.command(kind, "FLUSH")
    assert (await stage.enqueue("b")).placed is Placed.NEW
    for kind in ("SCRIPT", "FUNCTION"):
        saboteur.command(kind, "FLUSH")
    ids = await asyncio.gather(stage.the("a"), stage.the("b"), stage.claim(1), stage.claim(1))
    assert [job.id for job in (*ids[:2], *ids[2], *ids[3])] == ["a", "b", "a", "b"]


@contextmanager
def full(saboteur: RedisSaboteur) -> Iterator[None]:
    saboteur.command("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        saboteur.command("CONFIG", "SET", "maxmemory", 0)


async def test_full_server_refuses_jobs_and_accepts_all_other_calls(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in "abcd":
        await stage.enqueue(id)
    with full(saboteur):
        with pytest.raises(StorageFull):
            await stage.enqueue("e")
        a, b = await stage.claim(2)
        await stage.extend(a)
        assert await stage.complete(a) is SettleResult.OK
        assert await stage.fail(b) is SettleResult.OK
        assert await stage.cancel("c") is CancelResult.CANCELLED
        assert (await stage.the("a")).state is State.COMPLETED
        await stage.sweep()
        assert await stage.storage.purge("q", [State.WAITING], 10) == 1
        assert await stage.get("e") is None
    assert (await stage.enqueue("e")).placed is Placed.NEW


async def test_server_time_is_used_without_an_injected_clock(harness: Harness, saboteur: RedisSaboteur) -> None:
    """A storage without a clock of its own: whatever the machine of a client believes."""
    seconds, micros = saboteur.command("TIME")
    async with connect(saboteur._server.url, namespace=saboteur._namespace) as storage:
        (reply,) = await storage.enqueue("real", [Request("a", Work(b"x"), custom_id=True)])
        assert 0 <= reply.generation - (int(seconds) * 1_000_000 + int(micros)) < 60_000_000
        await storage.purge("real", list(State), 10)
        assert await storage.drop("real") == 0


async def test_wrong_clock_of_a_client_takes_no_lease_away(
    saboteur: RedisSaboteur, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(saboteur._server.url, namespace=saboteur._namespace) as storage:
        await storage.enqueue("real", [Request("a", Work(b"x"), custom_id=True)])
        assert len((await storage.claim("real", 1, worker="w1", lease_ms=60_000)).jobs) == 1
        monkeypatch.setattr("time.time", lambda: 9e9)
        monkeypatch.setattr("time.time_ns", lambda: 9_000_000_000_000_000_000)
        swept = await storage.sweep("real", 10)
        assert (swept.overdue, swept.stalled) == ([], [])
        assert (await storage.claim("real", 1, worker="w2", lease_ms=60_000)).jobs == []


# The wake token, and notices


async def test_enqueue_and_a_claim_that_leaves_jobs_each_store_one_wake_token(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    wake = f"{saboteur.key}:wake"
    for id in "abc":
        await stage.enqueue(id)
    assert saboteur.command("LRANGE", wake, 0, -1) == [b"1"]
    saboteur.command("DEL", wake)
    await stage.claim(2)
    assert saboteur.command("LLEN", wake) == 1
    saboteur.command("DEL", wake)
    job = await stage.claim_one()
    assert saboteur.command("LLEN", wake) == 0
    await stage.release(job)
    assert saboteur.command("LLEN", wake) == 1


async def test_a_waiting_worker_is_woken_by_the_token(stage: Stage, other: Stage) -> None:
    async with stage.storage.subscribe(Topic("q", only="wake")) as events:
        await other.enqueue("a")
        async with asyncio.timeout(10):
            assert (await anext(events)).queue == "q"


@pytest.mark.parametrize("id", ["a:b", "to:*", "{x}:events", "\0", "é:"])
async def test_waiters_of_an_id_with_colons_and_braces_are_answered(stage: Stage, other: Stage, id: str) -> None:
    async with (
        stage.storage.subscribe(Topic("q", "ends", id)) as ends,
        stage.storage.subscribe(Topic("q")) as events,
    ):
        await stage.enqueue(id, keep=60)
        job = await other.claim_one()
        await other.complete(job)
        assert await heard(ends, 1) == [(EventKind.COMPLETED, id)]
        assert await heard(events, 3) == [(EventKind.ENQUEUED, id), (EventKind.CLAIMED, id), (EventKind.COMPLETED, id)]


async def test_listener_that_leaves_does_not_stop_events_of_others(stage: Stage, other: Stage) -> None:
    for topic in (Topic("q"), Topic("q", "ends", "a"), Topic("q", only="wake")):
        async with stage.storage.subscribe(topic) as stays:
            async with stage.storage.subscribe(topic):
                pass
            await other.enqueue("a", priority=9)
            if topic.id is not None:
                await stage.keep("a", 60, at_least=True)
            job = await other.claim_one()
            await other.complete(job, ttl=0)
            async with asyncio.timeout(10):
                assert (await anext(stays)).queue == "q"
        await other.storage.purge("q", list(State), 10)


async def test_every_one_of_many_waiting_clients_is_answered(stage: Stage, harness: Harness) -> None:
    """A few by name, more of them all together."""
    assert isinstance(stage.storage, RedisStorage)
    server = RedisSaboteur(stage.storage, harness.name)._server
    await stage.enqueue("a")
    async with AsyncExitStack() as stack:
        ears = []
        for _ in range(6):
            storage = connect(server.url, namespace=stage.storage.namespace, clock=stage.clock)
            await stack.enter_async_context(storage)
            ears.append(await stack.enter_async_context(storage.subscribe(Topic("q", "ends", "a"))))
            await storage.keep("q", ["a"], 60_000, at_least=True)
        await stage.complete(await stage.claim_one())
        for events in ears:
            assert await heard(events, 1) == [(EventKind.COMPLETED, "a")]
