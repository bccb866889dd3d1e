"""What only records on Redis and Valkey can suffer: bytes that are no record, no lease or no metadata, entries that no
record answers for, each met by every verb. Together with the rest of the suite this runs every line of the Lua files.

A record is one run of bytes here, so of a garbled one nothing is left, not even its payload.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast._core.events import EventKind
from holdfast._core.jobs import Complete, Fail, Job, Outcome, Request, State, Update, Work
from holdfast._core.lifecycle import DAMAGED
from holdfast._core.replies import KeepResult, Placed, SettleResult
from holdfast.errors import LayoutTooNew, StorageUnavailable
from holdfast.storage import audit
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis.audit import PAGE
from holdfast.storage.redis.codec import waiting_member
from holdfast.storage.redis.script import LAYOUT
from tests.storage import keyspace
from tests.storage.behind import TOTALS, RedisSaboteur
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence

STORAGES = ("valkey", "redis")


@pytest.fixture
def saboteur(stage: Stage, harness: Harness) -> RedisSaboteur:
    assert isinstance(stage.storage, RedisStorage)
    return RedisSaboteur(stage.storage, harness.name)


async def repair(stage: Stage) -> None:
    """Until nothing is left to mend; nothing may be left after the second time."""
    for _ in range(2):
        await audit(stage.storage, "q", repair=True)
    assert (await audit(stage.storage, "q")).problems == []


async def claim_all(stage: Stage) -> list[str]:
    """Claim like a worker: an empty answer that says there is more is asked again at once."""
    ids: list[str] = []
    for _ in range(20):
        claim = await stage.storage.claim("q", 10, worker="w1", lease_ms=10_000)
        ids += [job.id for job in claim.jobs]
        if claim.next_run_at is None or claim.next_run_at > claim.now:
            break
    return ids


def members_of(saboteur: RedisSaboteur) -> list[bytes]:
    members: list[bytes] = saboteur.command("ZRANGE", saboteur.key + ":w5", 0, -1)
    return members


def assert_damaged(job: Job | None) -> None:
    assert job is not None
    assert job.outcome is not None
    assert (job.state, job.outcome.error, job.payload) == (State.FAILED, DAMAGED, None)


async def in_state(stage: Stage, id: str, state: State) -> None:
    """With as much in the record as that state can have."""
    await stage.enqueue(id, b"payload", priority=9, max_retries=3)
    if state is State.WAITING:
        return
    if state is State.CANCELLED:
        await stage.cancel(id)
        return
    await stage.retry(await stage.claim_one())
    job = await stage.claim_one()
    assert job.id == id
    if state is State.RUNNING:
        await stage.extend(job, progress=b"half")
        await stage.enqueue(id, b"newer", update=Update(payload=False))
    elif state is State.COMPLETED:
        await stage.complete(job)
    elif state is State.FAILED:
        await stage.fail(job)


# Records


@pytest.mark.parametrize("state", State)
async def test_truncated_record_reads_as_failed_or_lacks_some_payload(
    stage: Stage, saboteur: RedisSaboteur, state: State
) -> None:
    await in_state(stage, "sample", state)
    size = len(saboteur.raw("sample"))
    payload = 0 if state is State.COMPLETED else len(b"payload")
    broken = [f"{length:03}" for length in range(size - payload)]
    for id in broken:
        await in_state(stage, id, state)
        saboteur.overwrite(id, saboteur.raw(id)[: int(id)])
    stage.clock.advance(1)
    found = (await audit(stage.storage, "q")).problems
    assert sorted({problem.id for problem in found if problem.kind == "garbled"}) == broken
    await repair(stage)
    for id in broken:
        assert_damaged(await stage.get(id))
    assert (await stage.the("sample")).state is state
    assert (await stage.stats()).failed == len(broken) + (state is State.FAILED)


async def test_truncated_lease_reads_as_failed_and_is_repaired(stage: Stage, saboteur: RedisSaboteur) -> None:
    await in_state(stage, "sample", State.RUNNING)
    head = len(saboteur.raw("sample", ":runs")) - len(b"newer")
    ids = [f"{length:03}" for length in range(head)]
    for id in ids:
        await in_state(stage, id, State.RUNNING)
        saboteur.overwrite(id, saboteur.raw(id, ":runs")[: int(id)], ":runs")
    stage.clock.advance(1)
    await repair(stage)
    stage.clock.advance(1)
    for id in ids:
        job = await stage.the(id)
        assert job.state is State.FAILED or job.run is not None
    assert (await stage.the("sample")).state is State.RUNNING


async def test_random_bytes_instead_of_a_record_read_as_failed_and_are_repaired(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    noise = random.Random(7)
    ids = [f"{n:03}" for n in range(100)]
    for id in ids:
        await stage.enqueue(id)
        first = noise.choice([b"", b"\x00", b"\xff", b"\xa0\xff"])
        saboteur.overwrite(id, (first + noise.randbytes(noise.randrange(80)))[:80] if first else b"")
    assert {problem.id for problem in (await audit(stage.storage, "q")).problems if problem.id} == set(ids)
    await repair(stage)
    for id in ids:
        assert_damaged(await stage.get(id))


@pytest.mark.parametrize(
    ("state", "where"),
    [(State.WAITING, ":jobs"), (State.RUNNING, ":jobs"), (State.RUNNING, ":runs"), (State.COMPLETED, ":jobs")],
)
async def test_record_with_one_changed_byte_blocks_no_verb(
    stage: Stage, saboteur: RedisSaboteur, state: State, where: str
) -> None:
    """Some changes cannot be noticed. But none may raise, and the healthy job behind must always get its turn."""
    await in_state(stage, "sample", state)
    size = len(saboteur.raw("sample", where))
    await stage.storage.purge("q", [State.COMPLETED], 10)
    wedged: list[str] = []
    for at in range(size):
        flip = (0x01, 0x80, 0xFF)[at % 3]
        await stage.enqueue("b", priority=0)
        await in_state(stage, f"a{at}", state)
        raw = saboteur.raw(f"a{at}", where)
        saboteur.overwrite(f"a{at}", raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :], where)
        try:
            await use_every_verb(stage, f"a{at}")
        except Exception as error:
            wedged.append(f"byte {at} of {len(raw)} ^ {flip:#x}: {error!r:.200}")
        saboteur.command("DEL", *(saboteur.key + end for end in (":jobs", ":runs", ":meta", *keyspace_indexes())))
    assert wedged == [], "\n".join(wedged)


def keyspace_indexes() -> list[str]:
    return [*(f":w{n}" for n in range(10)), ":running", ":completed", ":failed", ":cancelled", ":brief", ":wake"]


async def use_every_verb(stage: Stage, id: str) -> None:
    await stage.get(id)
    await stage.storage.scan("q")
    await stage.storage.snapshot()
    await stage.sweep()
    assert "b" in await claim_all(stage)
    job = await stage.the("b")
    await stage.extend(job)
    await repair(stage)
    assert await stage.release(job) is SettleResult.OK
    await stage.cancel(id)
    await stage.enqueue(id, update=Update())
    await stage.keep(id, 60)


async def test_claim_skips_garbled_records_and_returns_the_next_job(stage: Stage, saboteur: RedisSaboteur) -> None:
    for n in range(30):
        await stage.enqueue(f"{n}")
        saboteur.garble(f"{n}")
    await stage.enqueue("last")
    stage.clock.advance(1)
    assert await claim_all(stage) == ["last"]
    assert_damaged(await stage.get("0"))
    assert (await stage.stats()).failed == 30


async def test_claim_skips_truncated_records(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("sample", max_retries=3)
    size = len(saboteur.raw("sample")) - len(b"payload")
    await stage.cancel("sample")
    for length in range(size):
        await stage.enqueue(f"{length}", max_retries=3)
        saboteur.overwrite(f"{length}", saboteur.raw(f"{length}")[:length])
        await stage.enqueue(f"good {length}")
        stage.clock.advance(1)
        assert await claim_all(stage) == [f"good {length}"], length
        assert await stage.complete(await stage.the(f"good {length}"), ttl=0) is SettleResult.OK
        assert_damaged(await stage.get(f"{length}"))


@pytest.mark.parametrize("ttl", [0, 60])
@pytest.mark.parametrize("retries", [0, 1])
async def test_only_the_lease_holder_completes_a_job_on_every_path(stage: Stage, ttl: float, retries: int) -> None:
    """One that runs for the first time, and of which nothing is remembered, has a path of its own through fast.lua."""

    async def claim() -> Job:
        for _ in range(retries):
            await stage.retry(await stage.claim_one())
        return await stage.claim_one()

    await stage.enqueue("a")
    first = await claim()
    assert await stage.complete(first, None, ttl=0) is SettleResult.OK
    assert await stage.complete(first, None, ttl=ttl) is SettleResult.LOST
    await stage.enqueue("a")
    assert await stage.complete(first, None, ttl=ttl) is SettleResult.LOST
    second = await claim()
    assert await stage.complete(first, None, ttl=ttl) is SettleResult.LOST
    for worker in ("w", "w2", "w11"):
        assert await stage.complete(second, None, ttl=ttl, worker=worker) is SettleResult.LOST
    await stage.enqueue("a", b"newer", update=Update())
    assert await stage.complete(second, None, ttl=ttl) is SettleResult.OK
    third = await claim()
    assert third.payload == b"newer"
    assert await stage.complete(third, None, ttl=ttl) is SettleResult.OK
    totals = (await stage.stats()).totals
    assert (totals[EventKind.ENQUEUED], totals[EventKind.PROMOTED], totals[EventKind.COMPLETED]) == (2, 1, 3)


async def test_lease_of_a_plain_job_has_the_normal_length(stage: Stage) -> None:
    await stage.enqueue("ran before")
    await stage.retry(await stage.claim_one())
    await stage.enqueue("plain")
    jobs = await stage.claim(2, lease=10)
    assert [job.id for job in jobs] == ["ran before", "plain"]
    for job in jobs:
        assert job.run is not None
        assert job.run.until_at == (await stage.storage.snapshot()).now + 10_000_000
        assert await stage.the(job.id) == job
    assert (await stage.sweep()).overdue == []
    stage.clock.advance(10)
    assert sorted((await stage.sweep()).overdue) == ["plain", "ran before"]


async def test_sweep_skips_a_garbled_running_record(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in "abc":
        await stage.enqueue(id)
    await stage.claim(3, lease=10)
    saboteur.garble("a")
    saboteur.overwrite("b", b"\x00", ":runs")
    assert (await stage.expire(lease=10)).stalled == ["c"]
    assert_damaged(await stage.get("a"))
    assert (await stage.stats()).running == 0


async def test_sweeping_a_dead_worker_skips_its_garbled_leases(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in "abc":
        await stage.enqueue(id)
    await stage.claim(3)
    saboteur.garble("a")
    saboteur.overwrite("b", b"\x00", ":runs")
    stage.clock.advance(1)
    assert (await stage.sweep(worker="w1")).stalled == ["c"]
    await repair(stage)
    assert_damaged(await stage.get("a"))
    assert_damaged(await stage.get("b"))


async def test_the_holder_of_a_garbled_record_has_lost_its_lease(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    saboteur.garble("a")
    assert len((await stage.extend(job)).lost) == 1
    assert await stage.complete(job) is SettleResult.LOST
    await repair(stage)


async def test_an_empty_lease_is_lost_and_does_not_stop_the_other_settlements(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    for id in "abc":
        await stage.enqueue(id)
    jobs = (await stage.storage.claim("q", 3, worker="w1", lease_ms=10_000)).jobs
    saboteur.overwrite("b", b"", ":runs")
    batch = [Complete(job.id, fence(job)) for job in jobs]
    assert await stage.storage.settle("q", batch, worker="w1") == [SettleResult.OK, SettleResult.LOST, SettleResult.OK]
    assert_damaged(await stage.get("b"))
    await repair(stage)


@pytest.mark.parametrize("score", ["inf", "-inf", "-5"])
async def test_a_score_that_is_no_time_stops_neither_scan_nor_audit(
    stage: Stage, saboteur: RedisSaboteur, score: str
) -> None:
    for n in range(3):
        await stage.enqueue(f"{n}")
    for member in members_of(saboteur)[:2]:
        saboteur.command("ZADD", saboteur.key + ":w5", score, member)
    found: list[str] = []
    page = await stage.storage.scan("q", limit=1)
    for _ in range(5):
        found += [job.id for job in page.jobs]
        if page.after is None:
            break
        page = await stage.storage.scan("q", after=page.after, limit=1)
    assert sorted(found) == ["0", "1", "2"]
    assert {problem.kind for problem in (await audit(stage.storage, "q")).problems} == {"misplaced"}
    await repair(stage)


async def test_an_audit_of_entries_with_low_scores_ends(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.storage.enqueue("q", [Request(f"{n}", Work(b"1")) for n in range(PAGE + 1)])
    for member in members_of(saboteur):
        saboteur.command("ZADD", saboteur.key + ":w5", "-5", member)
    pages = 1
    page = await stage.storage.repair("q", dry_run=True)
    while page.cursor is not None and pages < 5:
        page = await stage.storage.repair("q", dry_run=True, cursor=page.cursor)
        pages += 1
    assert pages == 2
    await repair(stage)


async def test_a_pause_reason_that_is_not_text_stops_no_snapshot(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.storage.pause("q", True, reason="why")
    saboteur.command("APPEND", saboteur.key + ":meta", b"\xff")
    assert (await stage.stats()).reason == "why\N{REPLACEMENT CHARACTER}"


async def test_a_repair_counts_each_record_once(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    (first, _) = members_of(saboteur)
    saboteur.command("ZADD", saboteur.key + ":w5", "1", first)
    assert (await audit(stage.storage, "q", repair=True)).checked == 2
    saboteur.command("ZREM", saboteur.key + ":w5", first)
    assert (await audit(stage.storage, "q", repair=True)).checked == 2


@pytest.mark.parametrize("state", State)
async def test_an_enqueue_restarts_a_garbled_record(stage: Stage, saboteur: RedisSaboteur, state: State) -> None:
    await in_state(stage, "a", state)
    saboteur.garble("a")
    stage.clock.advance(1)
    assert (await stage.enqueue("a", b"again")).placed is Placed.NEW
    job = await stage.claim_one()
    assert (job.id, job.payload) == ("a", b"again")
    assert await stage.complete(job) is SettleResult.OK
    await repair(
        stage
    )  # Nothing is left of a garbled lease that says whether it had a `next`: `deferred` may be wrong.


async def test_operator_retry_of_a_garbled_record_finds_no_payload(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    saboteur.garble("a")
    reply = await stage.enqueue("a", None, update=Update(payload=False))
    assert (reply.placed, reply.state) == (None, State.FAILED)
    await repair(stage)


@pytest.mark.parametrize("verb", ["cancel", "keep", "keep at least"])
@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING, State.FAILED])
async def test_a_verb_that_meets_a_garbled_record_leaves_the_totals_right(
    stage: Stage, saboteur: RedisSaboteur, verb: str, state: State
) -> None:
    await in_state(stage, "a", state)
    saboteur.garble("a")
    stage.clock.advance(1)
    if verb == "cancel":
        await stage.cancel("a")
    else:
        assert await stage.keep("a", 60, at_least=verb == "keep at least") is KeepResult.KEPT
    await repair(stage)
    assert_damaged(await stage.get("a"))
    totals = (await stage.stats()).totals
    assert totals[EventKind.ENQUEUED] == totals[EventKind.FAILED] == 1


async def test_a_purge_is_not_stopped_by_garbled_records(stage: Stage, saboteur: RedisSaboteur) -> None:
    for state in State:
        await in_state(stage, f"{state}", state)
        await in_state(stage, f"garbled {state}", state)
        saboteur.garble(f"garbled {state}")
    stage.clock.advance(1)
    await stage.sweep(worker="w1")
    for _ in range(20):
        if not await stage.storage.drop("q", 2):
            break
        await stage.sweep(worker="w1")
    await repair(stage)


async def test_garbled_finished_record_is_forgotten_at_its_time(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=60)
    saboteur.garble("a")
    stage.clock.advance(60)
    await stage.sweep()
    await repair(stage)
    stage.clock.advance(8 * 86_400)
    await stage.sweep()
    assert await stage.get("a") is None
    assert saboteur.command("HLEN", saboteur.key + ":jobs") == 0


async def test_stats_skip_a_garbled_record_at_the_head_of_the_queue(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a", priority=9)
    await stage.enqueue("b", priority=5)
    saboteur.garble("a")
    stage.clock.advance(7)
    assert (await stage.stats()).oldest_ready_ms in (6999, 7000)
    await repair(stage)


async def test_an_outcome_whose_sizes_do_not_add_up_is_garbled(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in "abc":
        await stage.enqueue(id)
        await stage.fail(await stage.claim_one())
    for id, size in (("a", 5), ("b", 7), ("c", 2**31)):
        raw = saboteur.raw(id)
        assert raw.count(struct.pack("<I", 6) + b"w1json") == 1
        saboteur.overwrite(id, raw.replace(struct.pack("<I", 6) + b"w1json", struct.pack("<I", size) + b"w1json"))
    for id in "abc":
        assert_damaged(await stage.get(id))
    assert await stage.keep("a", 60) is KeepResult.KEPT
    assert_damaged(await stage.get("a"))
    await repair(stage)
    for id in "abc":
        assert_damaged(await stage.get(id))


@pytest.mark.parametrize("field", ["generation", "arrival", "fence", "next", "next's size"])
async def test_record_with_a_stamp_above_every_clock_reads_as_failed(
    stage: Stage, saboteur: RedisSaboteur, field: str
) -> None:
    await stage.enqueue("a")
    if field in ("fence", "next", "next's size"):
        await stage.claim_one()
        await stage.enqueue("a", b"newer", update=Update(), max_retries=3)
    if field == "next's size":
        run = saboteur.raw("a", ":runs")
        saboteur.overwrite("a", run[: -len(b"newer") - 1], ":runs")
    else:
        saboteur.restamp("a", field, 2**62)
    stage.clock.advance(1)
    assert await stage.keep("a", 60) is KeepResult.KEPT
    assert_damaged(await stage.get("a"))
    await repair(stage)
    assert_damaged(await stage.get("a"))


@pytest.mark.parametrize(
    "stamp", [2**53, 2**62, 2**63 - 1, 2**64 - 1], ids=["54 bits", "62 bits", "63 bits", "64 bits"]
)
@pytest.mark.parametrize("field", ["generation", "arrival", "fence", "next"])
async def test_stamp_above_every_clock_does_not_stop_the_queue(
    stage: Stage, saboteur: RedisSaboteur, stamp: int, field: str
) -> None:
    await stage.enqueue("a", priority=9)
    await stage.enqueue("b")
    if field in ("fence", "next"):
        await stage.claim_one()
    if field == "next":
        await stage.enqueue("a", b"newer", update=Update())
    saboteur.restamp("a", field, stamp)
    await repair(stage)
    for _ in range(3):
        await stage.enqueue("c", update=Update())
    assert {"b", "c"} <= set(await claim_all(stage))
    for id in "bc":
        assert await stage.complete(await stage.the(id)) is SettleResult.OK


# Entries


@pytest.mark.parametrize("keep", [0, 60])
async def test_claim_removes_index_entries_without_a_record(stage: Stage, saboteur: RedisSaboteur, keep: float) -> None:
    for id in ("gone", "running", "done", "lower", "later", "good"):
        await stage.enqueue(id, priority={"running": 9, "done": 9, "lower": 1}.get(id, 5), keep=keep)
    running, done = await stage.claim(2)
    await stage.complete(done)
    saboteur.strand("gone")
    for id in ("running", "done", "lower"):
        saboteur.list_at(":w5", 5, waiting_member(1, id.encode()))
    saboteur.list_at(":w5", 6, waiting_member(3, b"later"))
    assert await claim_all(stage) == ["later", "good", "lower"]
    assert await stage.complete(running) is SettleResult.OK
    await repair(stage)


async def test_sweep_removes_running_entries_of_jobs_that_do_not_run(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in ("waiting", "done", "gone", "good"):
        await stage.enqueue(id, priority=9 if id == "done" else 5)
    await stage.complete(await stage.claim_one())
    gone = await stage.claim(3, lease=10)
    await stage.release(gone[0])
    saboteur.strand("gone")
    for id in ("waiting", "done", "never"):
        saboteur.list_at(":running", 7, id.encode())
    swept = await stage.sweep()
    assert (swept.overdue, swept.stalled) == ([], [])
    assert (await stage.stats()).running == 2
    stage.clock.advance(10)
    assert (await stage.sweep()).overdue == ["good"]
    stage.clock.advance(5)
    assert (await stage.sweep()).stalled == ["good"]
    assert (await stage.the("done")).state is State.COMPLETED
    assert await claim_all(stage) == ["waiting", "good"]
    await repair(stage)


async def test_sweeping_a_worker_skips_entries_without_a_lease(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    saboteur.list_at(":running", 7, b"never")
    assert (await stage.sweep(worker="w1")).stalled == ["a"]
    await repair(stage)


@pytest.mark.parametrize("index", [":completed", ":failed", ":cancelled", ":brief"])
async def test_live_record_in_the_expiry_index_is_not_forgotten(
    stage: Stage, saboteur: RedisSaboteur, index: str
) -> None:
    await stage.enqueue("done", priority=9)
    await stage.complete(await stage.claim_one(), ttl=10)
    await stage.enqueue("a")
    await stage.enqueue("b", priority=9)
    job = await stage.claim_one()
    for id in ("a", "b", "never"):
        saboteur.list_at(index, 7, id.encode())
    stage.clock.advance(10)
    await stage.sweep()
    assert await stage.get("done") is None
    assert await stage.complete(job) is SettleResult.OK
    assert await claim_all(stage) == ["a"]
    await repair(stage)


async def test_an_outcome_listed_too_early_is_not_forgotten_before_its_time(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=60)
    saboteur.lose("a")
    saboteur.list_at(":completed", 7, b"a")
    await stage.sweep()
    assert (await stage.the("a")).state is State.COMPLETED
    await repair(stage)


async def test_purge_removes_index_entries_without_a_record(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("running")
    running = await stage.claim_one()
    for id in ("gone", "good"):
        await stage.enqueue(id)
    saboteur.strand("gone")
    saboteur.list_at(":w5", 5, waiting_member(1, b"running"))
    await stage.storage.purge("q", [State.WAITING], 10)
    assert await stage.complete(running) is SettleResult.OK
    assert await stage.get("good") is None
    await repair(stage)


async def test_purge_of_running_jobs_skips_entries_that_do_not_run(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in ("waiting", "running"):
        await stage.enqueue(id, priority=9 if id == "running" else 5)
    await stage.claim_one()
    for id in ("waiting", "never"):
        saboteur.list_at(":running", 7, id.encode())
    await stage.storage.purge("q", [State.RUNNING], 10)
    assert (await stage.the("waiting")).state is State.WAITING
    job = await stage.the("running")
    assert job.run is not None
    assert job.run.cancel_asked
    await repair(stage)


async def test_a_lease_that_no_record_has_is_found_and_deleted(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    await stage.claim_one()
    saboteur.command("HSET", saboteur.key + ":runs", "ghost", saboteur.raw("a", ":runs"))
    assert {problem.id for problem in (await audit(stage.storage, "q")).problems if problem.id} == {"ghost"}
    await repair(stage)
    assert saboteur.command("HKEYS", saboteur.key + ":runs") == [b"a"]


async def test_a_lease_left_on_a_finished_record_is_gone_after_the_repair(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    lease = saboteur.raw("a", ":runs")
    await stage.complete(job)
    saboteur.command("HSET", saboteur.key + ":runs", "a", lease)
    assert await stage.complete(job) is SettleResult.LOST or (await stage.the("a")).state is State.COMPLETED
    await repair(stage)
    assert (await stage.the("a")).run is None
    assert saboteur.command("EXISTS", saboteur.key + ":runs") == 0


async def test_settle_and_extend_in_a_missing_queue_return_lost(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    gone = Stage(stage.storage, stage.clock, "never")
    assert await gone.complete(job) is SettleResult.LOST
    assert len((await gone.extend(job)).lost) == 1
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == ["q"]


# Metadata

MARKED = bytes([160 + LAYOUT])
UNREADABLE: list[bytes] = [
    b"",
    b"\x00",
    b"\x01",
    b"\x02",
    b"\xff",
    b"\x00" * 400,
    MARKED,
    MARKED + b"noise",
    MARKED * 100,
    MARKED + b"\x00" * (TOTALS.size - 1),
    MARKED + b"\x00" * (TOTALS.size - 1) + b"\xff" + b"step" * 40,
]
"""The first byte has a mark and the layout's number: a later one is left alone."""


@pytest.mark.parametrize("metadata", UNREADABLE, ids=lambda metadata: f"{metadata[:8]!r} of {len(metadata)}")
async def test_metadata_that_cannot_be_read_is_reported_and_rebuilt_by_repair(
    stage: Stage, saboteur: RedisSaboteur, metadata: bytes
) -> None:
    for id in "abcdef":
        await stage.enqueue(id, priority=9 if id == "a" else 5)
    job = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.retry(await stage.claim_one(), delay=60)
    await stage.complete(await stage.claim_one())
    saboteur.garble("f")
    before = await stage.stats()
    saboteur.command("SET", saboteur.key + ":meta", metadata)
    damaged = saboteur.contents()
    assert [problem.kind for problem in (await audit(stage.storage, "q")).problems] == ["meta"]
    assert saboteur.contents() == damaged
    await repair(stage)
    after = await stage.stats()
    assert (after.failed, after.ready) == (before.failed + 1, before.ready - 1)
    assert await stage.complete(job) is SettleResult.OK
    assert sorted(await claim_all(stage)) == ["a", "d", "e"]


async def test_verbs_are_refused_while_the_metadata_cannot_be_read(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    saboteur.command("SET", saboteur.key + ":meta", b"\x00")
    before = saboteur.contents()
    refusal = "the metadata of queue 'q' cannot be read: run `holdfast repair q`"
    for verb in (stage.enqueue("b"), stage.claim(1), stage.sweep(), stage.the("a")):
        with pytest.raises(StorageUnavailable, match=refusal):
            await verb
    assert saboteur.contents() == before
    await stage.storage.enqueue("other", [Request("c", Work(b"payload"))])
    queues = (await stage.storage.snapshot()).queues
    assert [(stats.queue, stats.ready, stats.problem) for stats in queues] == [("other", 1, ""), ("q", 0, refusal)]
    assert await stage.storage.ready(["q", "other", "none"]) == ["q", "other"]
    await repair(stage)
    assert await claim_all(stage) == ["a"]


async def test_settlement_changes_nothing_if_the_follow_up_has_no_queue(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.storage.enqueue("q/failed", [Request("b", Work(b"payload"))])
    saboteur.command("SET", saboteur.key + "/failed:meta", b"\x00")
    failed = Fail("a", job.run.fence, b"{}", 60_000, Work(b"payload")) if job.run else None
    with pytest.raises(StorageUnavailable, match="run `holdfast repair q/failed`"):
        await stage.storage.settle("q", [failed], worker="w1")  # type: ignore[list-item]
    assert (await stage.the("a")).state is State.RUNNING
    await audit(stage.storage, "q/failed", repair=True)
    assert await stage.complete(job) is SettleResult.OK


async def test_rebuilt_metadata_never_reuses_a_stamp(stage: Stage, saboteur: RedisSaboteur) -> None:
    for id in "abcde":
        await stage.enqueue(id)
    jobs = await stage.claim(3)
    await stage.fail(jobs[0])
    future = stage.wall(3600)
    saboteur.write("b", replace(saboteur.job("b"), run=replace(jobs[1].run, fence=future)))  # type: ignore[type-var]
    saboteur.command("SET", saboteur.key + ":meta", b"\x00")
    await repair(stage)
    assert (await stage.enqueue("new")).generation > future


@pytest.mark.parametrize("verb", ["enqueue", "claim", "get"])
@pytest.mark.parametrize(("change", "error"), [(1, LayoutTooNew), (-1, StorageUnavailable)])
async def test_queue_of_another_layout_is_refused_and_left_alone(
    stage: Stage, saboteur: RedisSaboteur, verb: str, change: int, error: type[Exception]
) -> None:
    await stage.enqueue("a")
    sound = saboteur.read_meta()
    saboteur.write_meta({**sound, "layout": sound["layout"] + change})
    before = saboteur.contents()
    calls: dict[str, Callable[[], object]] = {"enqueue": stage.enqueue, "claim": stage.claim, "get": stage.get}
    with pytest.raises(error, match=f"layout '?{LAYOUT + change}"):
        await calls[verb]()
    assert saboteur.contents() == before
    saboteur.write_meta(sound)


# Repairs that come too late


async def test_a_repair_of_a_queue_that_was_dropped_meanwhile_does_nothing(stage: Stage) -> None:
    assert isinstance(stage.storage, RedisStorage)
    calls, key = stage.storage._calls, stage.storage._key("never")
    assert (await calls.call(key, "repair", ("record", "a", "", ""))).reply == 0
    assert (await calls.call(key, "recount", (0, 0, 0, 0))).reply == 0


async def test_counts_are_not_corrected_if_something_has_happened_since(stage: Stage, saboteur: RedisSaboteur) -> None:
    assert isinstance(stage.storage, RedisStorage)
    await stage.enqueue("a")
    stamp = saboteur.read_meta()["last_stamp"]
    await stage.enqueue("b")
    before = saboteur.read_meta()
    reply, *_ = await stage.storage._calls.call(stage.storage._key("q"), "recount", (stamp, 7, 7, 7))
    assert reply == 0
    assert saboteur.read_meta() == before


async def test_repair_of_a_record_with_outcome_and_lease_keeps_the_outcome(
    stage: Stage, saboteur: RedisSaboteur
) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    job = saboteur.job("a")
    saboteur.write("a", replace(job, outcome=Outcome(job.generation, State.FAILED, 1, 2**52, error=b"e")))
    await repair(stage)
    assert (await stage.the("a")).state is State.FAILED
    assert saboteur.command("EXISTS", saboteur.key + ":runs") == 0


# Workers


async def test_a_worker_record_that_cannot_be_read_hides_no_other_worker(stage: Stage, saboteur: RedisSaboteur) -> None:
    assert isinstance(stage.storage, RedisStorage)
    for worker in ("w1", "w2"):
        await stage.storage.announce(worker, {"queues": ["q"]}, ttl_ms=10_000)
    key = f"{{{stage.storage.namespace}}}:workers"
    for garbled in (b"", b"short", saboteur.command("HGET", key, "w1")[:17] + b"\xc1"):
        saboteur.command("HSET", key, "w1", garbled)
        assert [worker.worker for worker in (await stage.storage.snapshot()).workers] == ["w2"]
        if len(garbled) < 17:
            assert not await stage.storage.evict("w1")
    assert await stage.storage.evict("w2")
    await stage.storage.announce("w1", {"queues": ["q"]}, ttl_ms=10_000)
    assert [worker.worker for worker in (await stage.storage.snapshot()).workers] == ["w1", "w2"]


# What the end of every test looks at


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("{%s/q}:stray", ("SET", "x")),
        ("{%s/q}:w10", ("SET", "x")),
        ("{%s/q}:wake", ("SET", "x")),
        ("{%s/q}:floor", ("SET", "1")),
        ("{%s/q}:call:123456789012:claim", ("SET", "x")),
        ("{%s/other}:jobs", ("HSET", "id", "x")),
        ("{%s/q}/failed:jobs", ("HSET", "id", "x")),
        ("{%s/other}:meta", ("SET", "x")),
        ("{%s}:beats", ("ZADD", "1", "w")),
        ("{%s}:workers", ("HSET", "w", "x")),
        ("{%s}:stray", ("SET", "x")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_key_without_an_owner_is_reported_and_deleted(
    stage: Stage, saboteur: RedisSaboteur, key: str, command: tuple[str, ...]
) -> None:
    assert isinstance(stage.storage, RedisStorage)
    await stage.enqueue("a")
    namespace = stage.storage.namespace
    saboteur.command("DEL", f"{saboteur.key}:wake")
    saboteur.command(command[0], key % namespace, *command[1:])
    assert len(keyspace.clear(saboteur._server, namespace)) == 1
    assert saboteur.contents() == {}
    stage.storage._listed.clear()


async def test_jobs_of_a_queue_without_metadata_are_reported(stage: Stage, saboteur: RedisSaboteur) -> None:
    assert isinstance(stage.storage, RedisStorage)
    await stage.enqueue("a")
    saboteur.command("DEL", f"{saboteur.key}:meta")
    wrong = keyspace.clear(saboteur._server, stage.storage.namespace)
    assert len(wrong) == 3, wrong


# Between the look and the repair


@pytest.mark.parametrize("by", ["repair", "claim"])
async def test_a_garbled_record_that_was_replaced_meanwhile_is_left_alone(
    stage: Stage, saboteur: RedisSaboteur, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """What was judged garbled is gone by the time it is to be mended: a sound job has its id."""
    assert isinstance(stage.storage, RedisStorage)
    await stage.enqueue("a", codec="json5")
    sound = saboteur.raw("a")
    saboteur.overwrite("a", sound.replace(b"json5", b"js\xffn5"))  # Only a client reads this.
    call = stage.storage._calls.call

    async def late(key: str, verb: str, *args: Any) -> Any:
        if verb == "repair":
            saboteur.overwrite("a", sound)
        return await call(key, verb, *args)

    monkeypatch.setattr(stage.storage._calls, "call", late)
    if by == "repair":
        assert [problem.kind for problem in (await audit(stage.storage, "q", repair=True)).problems] == ["garbled"]
        assert await claim_all(stage) == ["a"]
    else:
        assert await stage.claim(1) == []
        assert (await stage.the("a")).state is State.RUNNING
        assert (await stage.expire()).stalled == ["a"]
