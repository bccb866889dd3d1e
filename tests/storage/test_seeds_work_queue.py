"""Redis Work Queue's promises and its flaws, in our verbs: leases, complete once, cleaning;
docs/development/seeds.md has the list.

Who may complete, and what an expired lease means, is proved in test_leases.py and not again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
from collections import Counter

import pytest

from holdfast._core.jobs import Job, State, new_id
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import OptionError
from holdfast.storage import audit
from holdfast.storage.local.memory import MemoryStorage
from holdfast.storage.local.sqlite import SqliteStorage
from holdfast.storage.redis import RedisStorage
from tests.storage.behind import RedisSaboteur
from tests.storage.harness import Harness
from tests.storage.stage import Stage

# Adding


async def test_two_producers_of_the_same_ids_leave_each_id_in_the_queue_once(stage: Stage, other: Stage) -> None:
    async def produce(client: Stage, ids: list[int]) -> Counter[Placed | None]:
        placed: Counter[Placed | None] = Counter()
        for n in ids:
            placed[(await client.enqueue(f"{n}")).placed] += 1
            await asyncio.sleep(0)
        return placed

    ids = list(range(200))
    one, two = await asyncio.gather(produce(stage, ids), produce(other, ids[::-1]))
    assert one + two == {Placed.NEW: 200, Placed.DUPLICATE: 200}
    assert one[Placed.NEW]
    assert two[Placed.NEW]
    assert Counter(job.id for job in await stage.claim(250)) == {f"{n}": 1 for n in ids}


async def test_one_producer_of_fresh_ids_is_never_refused(stage: Stage) -> None:
    placed = [(await stage.enqueue(f"{n}", bytes([n]))).placed for n in range(200)]
    assert placed == [Placed.NEW] * 200
    assert [job.payload for job in await stage.claim(250)] == [bytes([n]) for n in range(200)]


async def test_id_without_ttl_is_blocked_until_completion_and_then_free(
    stage: Stage,
) -> None:
    await stage.enqueue("a", b"1")
    assert (await stage.enqueue("a", b"2")).placed is Placed.DUPLICATE
    job = await stage.claim_one()
    assert (await stage.enqueue("a", b"3")).placed is Placed.DUPLICATE
    await stage.complete(job, ttl=0)
    assert (await stage.enqueue("a", b"4")).placed is Placed.NEW
    assert (await stage.claim_one()).payload == b"4"


async def test_an_empty_id_is_refused_and_leaves_nothing_behind(stage: Stage) -> None:
    with pytest.raises(OptionError):
        await stage.enqueue("")
    assert (await stage.storage.snapshot()).queues == []


@pytest.mark.parametrize("name", ["a*", "[ab]", "a?", "a:b", "a b", "{a}", "", "a/b", "é", "a\n"])
async def test_a_queue_name_that_a_pattern_or_a_key_could_misread_is_refused(stage: Stage, name: str) -> None:
    with pytest.raises(OptionError):
        await Stage(stage.storage, stage.clock, name).enqueue("a")


def test_generated_ids_are_unique_and_sort_by_creation_time() -> None:
    ids = [new_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {(len(id), id.isascii(), id.isprintable()) for id in ids} == {(22, True, True)}
    stamps = [id[:8] for id in ids]
    assert stamps == sorted(stamps)


# Leases


async def test_sweep_right_after_a_claim_takes_nothing_back(stage: Stage, other: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(lease=10)
    swept = await other.sweep()
    assert (swept.overdue, swept.stalled) == ([], [])
    assert await other.claim(10, worker="w2") == []
    assert await stage.the("a") == job


async def test_a_lease_may_last_a_tenth_of_a_second(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=0.1)
    stage.clock.advance(0.099)
    assert (await stage.sweep()).overdue == []
    assert (await stage.expire(lease=0.1)).stalled == ["a"]


@pytest.mark.parametrize("seconds", [0, -1, 0.099, 86_401])
async def test_a_lease_too_short_or_too_long_is_refused_and_nothing_is_claimed(stage: Stage, seconds: float) -> None:
    await stage.enqueue("a")
    with pytest.raises(OptionError):
        await stage.claim(lease=seconds)
    assert (await stage.the("a")).attempts == 0


async def test_late_complete_creates_no_duplicate_job(stage: Stage) -> None:
    await stage.enqueue("a", b"data")
    late = await stage.claim_one(worker="slow")
    await stage.expire()
    assert await stage.complete(late, worker="slow") is SettleResult.LOST
    assert (await stage.enqueue("a", b"again")).placed is Placed.DUPLICATE
    (job,) = await stage.claim(10, worker="w2")
    assert job.payload == b"data"
    assert await stage.complete(job, ttl=0, worker="w2") is SettleResult.OK
    assert (await stage.claim(10), (await stage.storage.scan("q")).jobs) == ([], [])


async def test_job_completed_before_the_work_is_never_claimed_again(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    assert await stage.complete(job, ttl=0) is SettleResult.OK
    await stage.expire()
    assert await stage.claim(10) == []


async def test_counts_are_from_one_instant_while_jobs_change_state(stage: Stage, other: Stage) -> None:
    for n in range(60):
        await stage.enqueue(f"{n}")

    async def work() -> None:
        while jobs := await stage.claim(3):
            for job in jobs:
                await asyncio.sleep(0)
                await stage.complete(job)

    async def look() -> list[int]:
        sums: list[int] = []
        for _ in range(60):
            stats = await other.stats()
            sums.append(stats.ready + stats.running + stats.completed)
            await asyncio.sleep(0)
        return sums

    _, sums = await asyncio.gather(work(), look())
    assert sums == [60] * 60


# Cleaning


async def test_repair_of_a_healthy_queue_changes_nothing(stage: Stage) -> None:
    for id in ("done", "failed", "running", "overdue", "waiting", "later"):
        await stage.enqueue(id, delay=60 if id == "later" else None)
    done, failed, *_ = await stage.claim(3, lease=100)
    await stage.complete(done)
    await stage.fail(failed)
    await stage.claim(1, lease=10)
    stage.clock.advance(11)
    await stage.sweep()
    before = (await stage.storage.scan("q")).jobs, await stage.stats()
    assert (await audit(stage.storage, "q", repair=True)).problems == []
    assert ((await stage.storage.scan("q")).jobs, await stage.stats()) == before


LOST_WAITING, LOST_RUNNING, IN_BOTH = "lost from the line", "lost from the leases", "in the line and leased"


@pytest.mark.parametrize("harm", [LOST_WAITING, LOST_RUNNING, IN_BOTH])
async def test_repair_puts_a_job_back_where_its_record_says(stage: Stage, harness: Harness, harm: str) -> None:
    await stage.enqueue("running", b"1")
    running = await stage.claim_one(lease=10)
    await stage.enqueue("waiting", b"2")
    _harm(stage, harness, harm)
    assert (await audit(stage.storage, "q")).problems != []
    await audit(stage.storage, "q", repair=True)
    assert await stage.problems() == []
    assert [job.id for job in await stage.claim(10, lease=100)] == ["waiting"]
    assert await stage.the("running") == running
    assert (await stage.expire(lease=10)).stalled == ["running"]
    assert [job.id for job in await stage.claim(10)] == ["running"]


def _harm(stage: Stage, harness: Harness, harm: str) -> None:
    """Break an index behind the storage's back, as a crash between two commands of Redis Work Queue would."""
    match stage.storage:
        case MemoryStorage() as storage:
            indexes = storage.table._queues["q"].indexes
            if harm == IN_BOTH:
                indexes[State.WAITING].insert(0, ((-5, 1, 1), b"running"))
            else:
                indexes[State.WAITING if harm == LOST_WAITING else State.RUNNING].clear()
        case SqliteStorage() as storage:
            change = {
                LOST_WAITING: "state = 'failed', until_at = 9e15 WHERE id = CAST('waiting' AS BLOB)",
                LOST_RUNNING: "state = 'failed', until_at = 9e15 WHERE id = CAST('running' AS BLOB)",
                IN_BOTH: "until_at = NULL WHERE id = CAST('running' AS BLOB)",
            }
            with contextlib.closing(sqlite3.connect(storage.path)) as db, db:
                assert db.execute(f"UPDATE holdfast_jobs SET {change[harm]}").rowcount == 1
        case RedisStorage() as storage:
            saboteur = RedisSaboteur(storage, harness.name)
            if harm == IN_BOTH:
                saboteur.double("running")
            else:
                saboteur.lose("waiting" if harm == LOST_WAITING else "running")
        case _:
            pytest.skip("nobody knows how to break this storage")


# The whole


async def test_package_prints_nothing(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    for id in "abc":
        await stage.enqueue(id)
    await stage.claim(2, lease=1)
    await stage.cancel("c")
    await stage.expire(lease=1)
    await audit(stage.storage, "q", repair=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(3))
async def test_every_job_and_its_spawned_jobs_complete_once_with_dropped_leases(
    stage: Stage, other: Stage, seed: int
) -> None:
    rng = random.Random(seed)
    spawned = {f"{root}.{n}" for root in range(30) for n in range(2)}
    completed: Counter[str] = Counter()
    dropped: list[tuple[Job, str]] = []

    async def finish(client: Stage, job: Job, worker: str) -> None:
        if await client.complete(job, None, ttl=0, worker=worker) is SettleResult.OK:
            completed[job.id] += 1
            for n in range(2 if "." not in job.id else 0):
                await client.enqueue(f"{job.id}.{n}")
        assert await client.complete(job, None, ttl=0, worker=worker) is SettleResult.LOST

    for root in range(30):
        await stage.enqueue(f"{root}")
    for turn in range(2000):
        if len(completed) == 90:
            break
        client, worker = rng.choice([stage, other]), f"w{turn % 5}"
        for job in await client.claim(rng.randint(1, 4), worker=worker, lease=2):
            if rng.random() < 0.3:
                dropped.append((job, worker))
            else:
                await finish(client, job, worker)
        if dropped and rng.random() < 0.3:  # The one who dropped it wakes up, before or after the lease moved on.
            await finish(client, *dropped.pop(rng.randrange(len(dropped))))
        stage.clock.advance(rng.choice([0, 1, 4]))
    assert completed == dict.fromkeys({f"{root}" for root in range(30)} | spawned, 1)
    stats = await stage.stats()
    assert (stats.ready, stats.scheduled, stats.running) == (0, 0, 0)
    assert (await stage.storage.scan("q")).jobs == []
