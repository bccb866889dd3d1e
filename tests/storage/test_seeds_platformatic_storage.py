"""The Platformatic job-queue's promises of recovery, events and storages, and their flaws, in our verbs.

What it promises to producers is in test_seeds_platformatic.py; docs/development/seeds.md has the list.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Request, State, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import PayloadRejected
from holdfast.storage import connect
from tests.storage.harness import Harness
from tests.storage.stage import Stage, heard

ODD_IDS = [
    "a:b",
    "x:exp",
    "../../etc/passwd",
    "a/b",
    "*",
    "[a-z]?",
    "%s {0} $1",
    "a\x00b",
    "ü\N{SNOWMAN}",
    " ",
    "\udcff",
]


# Bytes, ids and names


async def test_payloads_results_and_errors_of_any_bytes_are_returned_unchanged(stage: Stage) -> None:
    every_byte = bytes(range(256))
    await stage.enqueue("a", every_byte)
    await stage.retry(await stage.claim_one())
    job = await stage.claim_one()
    assert job.payload == every_byte
    await stage.complete(job, every_byte[::-1])
    outcome = (await stage.the("a")).outcome
    assert outcome is not None
    assert outcome.result == every_byte[::-1]


@pytest.mark.parametrize("id", ODD_IDS, ids=ascii)
async def test_unusual_id_works(stage: Stage, id: str) -> None:
    await stage.enqueue("x")
    await stage.enqueue(id, b"odd", run_at=1)
    job = await stage.claim_one(worker="host:1:2")
    assert (job.id, job.payload) == (id, b"odd")
    await stage.expire()
    again = await stage.claim_one(worker="host:3")
    assert (again.id, again.stalls) == (id, 1)
    assert await stage.complete(again, worker="host:3") is SettleResult.OK
    assert (await stage.enqueue(id)).placed is Placed.COMPLETED
    assert (await stage.the("x")).state is State.WAITING


async def test_namespaces_in_one_file_are_separate(clock: ManualClock, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with connect(url, namespace="one", clock=clock) as one, connect(url, namespace="two", clock=clock) as two:
        await one.announce("w", {"queues": ["q"]}, ttl_ms=1000)
        first, second = Stage(one, clock), Stage(two, clock)
        await first.enqueue("a")
        assert (await two.snapshot()).queues == []
        assert (await two.snapshot()).workers == []
        assert await second.claim(10) == []
        assert (await second.enqueue("a")).placed is Placed.NEW
        await first.complete(await first.claim_one())
        assert (await second.the("a")).state is State.WAITING


# What claim, settle and sweep do to the line


async def test_jobs_are_claimed_first_in_first_out_with_the_bytes_they_were_given(stage: Stage) -> None:
    for n in (2, 0, 1):
        await stage.enqueue(f"{n}", b"%d" % n)
    assert [(await stage.claim_one()).payload for _ in range(3)] == [b"2", b"0", b"1"]


async def test_claim_of_an_empty_queue_returns_at_once(stage: Stage, other: Stage) -> None:
    async with asyncio.timeout(10):
        claims = await asyncio.gather(*(client.claim(1) for client in (stage, other, stage)))
        assert claims == [[], [], []]
        await stage.enqueue("a")
        claims = await asyncio.gather(*(client.claim(1) for client in (stage, other, stage)))
    assert [job.id for jobs in claims for job in jobs] == ["a"]


async def test_workers_share_the_jobs_and_each_is_run_once(stage: Stage, other: Stage) -> None:
    for n in range(10):
        await stage.enqueue(f"{n}")
    seen: Counter[str] = Counter()

    async def work(client: Stage, worker: str) -> None:
        while jobs := await client.claim(1, worker=worker):
            seen[jobs[0].id] += 1
            await asyncio.sleep(0)
            await client.complete(jobs[0], worker=worker)

    await asyncio.gather(work(stage, "w1"), work(other, "w2"), work(stage, "w3"))
    assert seen == {f"{n}": 1 for n in range(10)}


async def test_a_retry_leaves_one_record_and_touches_no_other(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id, b"\xff" + id.encode())
    _, second, _ = jobs = await stage.claim(3)
    await stage.retry(second)
    assert [(await stage.the(job.id)) for job in (jobs[0], jobs[2])] == [jobs[0], jobs[2]]
    stats = await stage.stats()
    assert (stats.ready, stats.running, stats.retrying) == (1, 2, 1)
    (back,) = await stage.claim(10)
    assert (back.id, back.payload) == ("b", b"\xffb")


async def test_a_job_that_fails_twice_and_then_succeeds_has_had_three_attempts(stage: Stage) -> None:
    await stage.enqueue("a")
    for _ in range(2):
        await stage.retry(await stage.claim_one())
    await stage.complete(await stage.claim_one())
    done = await stage.the("a")
    assert (done.state, done.attempts, done.retries) == (State.COMPLETED, 3, 2)


async def test_delayed_retry_does_not_delay_the_next_job(stage: Stage) -> None:
    await stage.enqueue("first")
    await stage.enqueue("second")
    await stage.retry(await stage.claim_one(), delay=2)
    assert [job.id for job in await stage.claim(10)] == ["second"]


async def test_failed_job_has_its_error_and_payload(stage: Stage) -> None:
    await stage.enqueue("a", b"data")
    await stage.fail(await stage.claim_one(), b'{"code": "E_BOOM"}')
    failed = await stage.the("a")
    assert failed.outcome is not None
    assert (failed.state, failed.outcome.error, failed.payload) == (State.FAILED, b'{"code": "E_BOOM"}', b"data")


async def test_a_batch_is_applied_in_order_with_a_reply_for_each(stage: Stage) -> None:
    requests = [Request(id, Work(payload)) for id, payload in (("a", b"1"), ("a", b"2"), ("b", b"3"))]
    replies = await stage.storage.enqueue("q", requests)
    assert [reply.placed for reply in replies] == [Placed.NEW, Placed.DUPLICATE, Placed.NEW]
    assert await stage.storage.get("q", ["b", "nobody", "a"]) == [await stage.the("b"), None, await stage.the("a")]
    assert (await stage.the("a")).payload == b"1"


async def test_a_batch_with_a_bad_item_changes_nothing_at_all(stage: Stage) -> None:
    bad: Any = "text"
    with pytest.raises(PayloadRejected):
        await stage.storage.enqueue("q", [Request("a", Work(b"1")), Request("b", Work(bad))])
    assert (await stage.storage.snapshot()).queues == []
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_purge_empties_a_queue_and_its_ids_are_new_again(stage: Stage) -> None:
    for id in "abcd":
        await stage.enqueue(id)
    await stage.complete(await stage.claim_one())
    await stage.fail(await stage.claim_one())
    await stage.cancel("c")
    while await stage.storage.drop("q"):
        pass
    assert (await stage.storage.snapshot()).queues == []
    assert [(await stage.enqueue(id)).placed for id in "abcd"] == [Placed.NEW] * 4


# Recovery


async def test_a_stalled_job_is_completed_by_another_worker(stage: Stage) -> None:
    await stage.enqueue("a", b"data")
    await stage.claim_one(worker="dead")
    await stage.expire()
    second = await stage.claim_one(worker="alive")
    assert (second.payload, second.attempts, second.stalls) == (b"data", 2, 1)
    assert await stage.complete(second, worker="alive") is SettleResult.OK


@pytest.mark.parametrize("end", ["complete", "fail"])
async def test_a_job_that_ended_in_time_is_never_taken_back(stage: Stage, end: str) -> None:
    await stage.enqueue("a")
    await getattr(stage, end)(await stage.claim_one(lease=10))
    ended = await stage.the("a")
    assert (await stage.expire(lease=10)).stalled == []
    assert (await stage.the("a"), await stage.claim(10)) == (ended, [])


async def test_jobs_of_dead_workers_are_taken_back_by_a_new_storage(
    harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    async with harness.open(clock, tmp_path) as storage:
        before = Stage(storage, clock)
        for id in "abc":
            await before.enqueue(id, id.encode())
        for worker in ("w1", "w2"):  # Neither ever announced itself.
            await before.claim_one(worker=worker, lease=10)
    async with harness.open(clock, tmp_path) as storage:
        after = Stage(storage, clock)
        assert (await after.stats()).running == 2
        await after.expire(lease=10)
        assert [job.payload for job in await after.claim(10)] == [b"a", b"b", b"c"]
        assert await after.problems() == []


async def test_enqueued_jobs_survive_closing_and_reopening(
    harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    for n in range(3):
        async with harness.open(clock, tmp_path) as storage:
            stage = Stage(storage, clock)
            await stage.enqueue(f"{n}")
            await stage.complete(await stage.claim_one(), b"%d" % n)
    async with harness.open(clock, tmp_path) as storage:
        jobs = await storage.get("q", ["0", "1", "2"])
        assert [job.outcome.result for job in jobs if job and job.outcome] == [b"0", b"1", b"2"]


async def test_sweepers_at_the_same_time_take_each_lease_back_once(stage: Stage, other: Stage) -> None:
    for n in range(20):
        await stage.enqueue(f"{n}")
    await stage.claim(20, lease=10)
    stage.clock.advance(10)
    await asyncio.gather(*(client.sweep() for client in (stage, other) * 3))
    stage.clock.advance(5)
    swept = await asyncio.gather(*(client.sweep(7) for client in (stage, other) * 3))
    assert Counter(id for s in swept for id in s.stalled) == {f"{n}": 1 for n in range(20)}
    assert {(await stage.the(f"{n}")).stalls for n in range(20)} == {1}


async def test_every_stall_of_a_poison_job_is_counted(stage: Stage) -> None:
    await stage.enqueue("poison")
    seen: list[tuple[int, int]] = []
    for _ in range(4):
        job = await stage.claim_one(lease=1)
        seen.append((job.attempts, job.stalls))
        await stage.expire(lease=1)
        stage.clock.advance(300)
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3)]


async def test_workers_are_listed_until_their_announcement_expires(stage: Stage) -> None:
    await stage.enqueue("a")
    for worker, ttl_ms in (("short", 1000), ("long", 60_000), ("beating", 1000)):
        await stage.storage.announce(worker, {"queues": ["q"]}, ttl_ms=ttl_ms)
    stage.clock.advance(0.9)
    await stage.storage.announce("beating", {"queues": ["q"]}, ttl_ms=1000)
    stage.clock.advance(0.5)
    assert (await stage.stats()).workers == ["beating", "long"]


# Events


async def test_every_listener_gets_all_events_of_a_job_in_order(stage: Stage, other: Stage) -> None:
    async with stage.storage.subscribe(Topic("q")) as here, other.storage.subscribe(Topic("q")) as there:
        await stage.enqueue("a")
        await stage.retry(await stage.claim_one())
        await stage.claim_one()
        await stage.expire()
        await stage.complete(await stage.claim_one())
        await stage.enqueue("b")
        await stage.cancel("b")
        await stage.enqueue("c")
        await stage.fail(await stage.claim_one())
        on_a = ["enqueued", "claimed", "retried", "claimed", "stalled", "claimed", "completed"]
        expected = [(kind, "a") for kind in on_a] + [("enqueued", "b"), ("cancelled", "b")]
        expected += [("enqueued", "c"), ("claimed", "c"), ("failed", "c")]
        assert await heard(here, len(expected)) == expected
        assert await heard(there, len(expected)) == expected


async def test_a_sleeping_worker_is_woken_by_another_clients_enqueue(stage: Stage, other: Stage) -> None:
    async with stage.storage.subscribe(Topic("q", "ready")) as events:
        assert await stage.claim(1) == []
        sleeper = asyncio.create_task(heard(events, 1))
        await other.enqueue("a")
        assert await sleeper == [(EventKind.ENQUEUED, "a")]
        assert [job.id for job in await stage.claim(1)] == ["a"]


async def test_a_closed_storage_leaves_no_thread_behind(harness: Harness, clock: ManualClock, tmp_path: Path) -> None:
    before = {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
    async with harness.open(clock, tmp_path) as storage, storage.subscribe(Topic("q")):
        await Stage(storage, clock).enqueue("a")
    after = {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio")}
    assert after == before
