"""Audit and repair: what was broken behind the storage's back is reported, then mended, and no job is lost over it.

Each breakage is first seen by a dry run, which changes no byte, then mended, and a second audit is clean.
"""

from __future__ import annotations

import bisect
import copy
import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from msgspec.structs import replace

from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind
from holdfast._core.jobs import Job, Next, Outcome, Request, State, Update, Work
from holdfast._core.lifecycle import DAMAGED, FAILURE_TTL_MS
from holdfast._core.replies import Placed, Problem, SettleResult
from holdfast.errors import StorageUnavailable
from holdfast.storage import audit
from holdfast.storage.local.audit import REPAIR_PAGE
from holdfast.storage.local.memory import MemoryStorage
from holdfast.storage.local.sqlite import SqliteStorage
from holdfast.storage.local.table import VIEWS
from holdfast.storage.redis import RedisStorage
from tests.storage.behind import RedisSaboteur
from tests.storage.harness import Harness, RedisHarness, SqliteHarness
from tests.storage.stage import Stage, fence

YEAR_US = 365 * 24 * 3_600_000_000


class Saboteur(Protocol):
    """Breaks a storage without its knowledge."""

    @property
    def counts(self) -> frozenset[str]:
        """Which counts the storage keeps as numbers: only those can be wrong."""
        ...

    def contents(self) -> object:
        """All that is stored, to compare."""
        ...

    def lose(self, id: str) -> None:
        """Take a record out of its index."""
        ...

    def double(self, id: str) -> None:
        """Leave a waiting record where it is and list it as running as well, or the other way round."""
        ...

    def strand(self, id: str) -> None:
        """Delete a record and leave its index entry."""
        ...

    def misplace(self, id: str) -> None:
        """Move a record into an index that its state does not name."""
        ...

    def metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change what the queue knows of itself."""
        ...

    def restamp(self, id: str, field: str, stamp: int) -> None:
        """Give a record a stamp in its generation, arrival, fence, next or the start of its last run."""
        ...

    def end_while_running(self, id: str) -> None:
        """Give a running record an outcome as well."""
        ...


COUNTS = frozenset({*State, *VIEWS})


class MemorySaboteur:
    counts = COUNTS

    def __init__(self, storage: MemoryStorage) -> None:
        self._table = storage.table

    @property
    def _queue(self) -> Any:
        return self._table._queues["q"]

    def contents(self) -> object:
        return {
            name: (dict(queue.records), copy.deepcopy(queue.indexes), copy.deepcopy(queue.meta))
            for name, queue in self._table._queues.items()
        }

    def lose(self, id: str) -> None:
        self._queue.displace(id.encode(), self._queue.records[id.encode()])

    def double(self, id: str) -> None:
        job = self._queue.records[id.encode()]
        if job.state is State.WAITING:
            bisect.insort(self._queue.indexes[State.RUNNING], ((job.run_at,), id.encode()))
        else:
            bisect.insort(
                self._queue.indexes[State.WAITING], ((-job.work.priority, job.run_at, job.arrival), id.encode())
            )

    def strand(self, id: str) -> None:
        del self._queue.records[id.encode()]

    def misplace(self, id: str) -> None:
        self.lose(id)
        self.double(id)

    def metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        meta = self._queue.meta
        fields = {"counts": meta.counts, "totals": meta.totals}
        change(fields)
        meta.counts, meta.totals = fields["counts"], fields["totals"]

    def restamp(self, id: str, field: str, stamp: int) -> None:
        def changed(job: Job) -> Job:
            if field in ("generation", "arrival"):
                return replace(job, **{field: stamp})
            if field == "start of the last run":
                assert job.outcome is not None
                return replace(job, outcome=replace(job.outcome, started_at=stamp))
            assert job.run is not None
            if field == "fence":
                return replace(job, run=replace(job.run, fence=stamp))
            assert job.run.next is not None
            return replace(job, run=replace(job.run, next=replace(job.run.next, generation=stamp)))

        self._change(id, changed)

    def end_while_running(self, id: str) -> None:
        self._change(id, lambda job: replace(job, outcome=Outcome(1, State.FAILED, 1, 2**52, error=b"e")))

    def _change(self, id: str, changed: Callable[[Job], Job]) -> None:
        job = self._queue.records[id.encode()]
        self._queue.displace(id.encode(), job)
        self._queue.records[id.encode()] = changed(job)
        self._queue.place(id.encode(), changed(job))


class SqliteSaboteur:
    counts = COUNTS

    def __init__(self, path: Path) -> None:
        self._path = path

    def contents(self) -> object:
        """Every byte of the file and of its log, and every row (not read through an index: that may be broken)."""
        files = [self._path.with_name(self._path.name + end) for end in ("", "-wal")]
        tables = ("meta", "queues", "jobs", "workers", "listeners")
        with aside(self._path) as db:
            rows = [db.execute(f"SELECT * FROM holdfast_{table} NOT INDEXED").fetchall() for table in tables]
        return rows, [file.read_bytes() for file in files]

    def lose(self, id: str) -> None:
        """Written while the index is not there: the row is missing from it."""
        columns = "job, queue, id, state, view, priority, run_at, arrival, until_at, worker, payload, rest"
        with aside(self._path) as db:
            row = db.execute(f"SELECT {columns} FROM holdfast_jobs WHERE id = ?", (id.encode(),)).fetchone()
            db.execute("DELETE FROM holdfast_jobs WHERE id = ?", (id.encode(),))
        with index_away(self._path, index_of_row(row)), aside(self._path) as db:
            db.execute(f"INSERT INTO holdfast_jobs ({columns}) VALUES ({','.join('?' * len(row))})", row)

    def double(self, id: str) -> None:
        """The entry of a copy stays behind in the other index."""
        with aside(self._path) as db:
            row = db.execute("SELECT * FROM holdfast_jobs WHERE id = ?", (id.encode(),)).fetchone()
            until_at = row[8]
            other = None if until_at is not None else row[6]
            db.execute("UPDATE holdfast_jobs SET until_at = ? WHERE id = ?", (other, id.encode()))
        stays = "holdfast_until" if until_at is None else "holdfast_waiting"
        with index_away(self._path, stays), aside(self._path) as db:
            db.execute("UPDATE holdfast_jobs SET until_at = ? WHERE id = ?", (until_at, id.encode()))

    def strand(self, id: str) -> None:
        with aside(self._path) as db:
            row = db.execute("SELECT * FROM holdfast_jobs WHERE id = ?", (id.encode(),)).fetchone()
        with index_away(self._path, index_of_row(row)), aside(self._path) as db:
            db.execute("DELETE FROM holdfast_jobs WHERE id = ?", (id.encode(),))

    def misplace(self, id: str) -> None:
        flip = "CASE state WHEN 'waiting' THEN 'running' ELSE 'waiting' END"
        until_at = "CASE WHEN until_at IS NULL THEN run_at ELSE NULL END"
        self.sql(f"UPDATE holdfast_jobs SET state = {flip}, until_at = {until_at} WHERE id = ?", id.encode())

    def metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        with aside(self._path) as db:
            (packed,) = db.execute("SELECT meta FROM holdfast_queues WHERE name = 'q'").fetchone()
            fields = msgspec.msgpack.decode(packed)
            change(fields)
            db.execute("UPDATE holdfast_queues SET meta = ? WHERE name = 'q'", (msgspec.msgpack.encode(fields),))

    def restamp(self, id: str, field: str, stamp: int) -> None:
        if field == "arrival":
            self.sql("UPDATE holdfast_jobs SET arrival = ? WHERE id = ?", stamp, id.encode())
            return

        def changed(rest: list[Any]) -> None:
            if field == "generation":
                rest[0] = stamp
            elif field == "fence":
                rest[8][1] = stamp
            elif field == "start of the last run":
                rest[9][8] = stamp
            else:
                rest[8][6][0] = stamp

        self.rest(id, changed)

    def end_while_running(self, id: str) -> None:
        def changed(rest: list[Any]) -> None:
            rest[9] = msgspec.to_builtins(Outcome(1, State.FAILED, 1, 2**52), builtin_types=(bytes,))

        self.rest(id, changed)
        self.sql("UPDATE holdfast_jobs SET state = 'failed', until_at = ? WHERE id = ?", 2**52, id.encode())

    def rest(self, id: str, change: Callable[[list[Any]], None]) -> None:
        with aside(self._path) as db:
            (packed,) = db.execute("SELECT rest FROM holdfast_jobs WHERE id = ?", (id.encode(),)).fetchone()
            fields = msgspec.msgpack.decode(packed)
            change(fields)
            packed = msgspec.msgpack.encode(fields)
            db.execute("UPDATE holdfast_jobs SET rest = ? WHERE id = ?", (packed, id.encode()))

    def sql(self, statement: str, *values: object) -> None:
        with aside(self._path) as db:
            assert db.execute(statement, values).rowcount > 0, "the saboteur missed"


@contextmanager
def aside(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that the storage knows nothing of."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        yield db


def index_of_row(row: tuple[Any, ...]) -> str:
    return "holdfast_waiting" if row[8] is None else "holdfast_until"


@contextmanager
def index_away(path: Path, name: str) -> Iterator[None]:
    """Take an index out of the schema and put it back as it was: what is written meanwhile is not in it.

    The index of the UNIQUE constraint can only be away if the constraint is, too.
    """
    unique = ",\n  UNIQUE (queue, id)"
    with aside(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        row = db.execute("SELECT * FROM sqlite_master WHERE name = ?", (name,)).fetchone()
        table = "UPDATE sqlite_master SET sql = ? WHERE name = 'holdfast_jobs'"
        (schema,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'holdfast_jobs'").fetchone()
        db.execute("DELETE FROM sqlite_master WHERE name = ?", (name,))
        if name.startswith("sqlite_"):
            db.execute(table, (schema.replace(unique, ""),))
    yield
    with aside(path) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
        db.execute(table, (schema,))


@pytest.fixture
def saboteur(stage: Stage, harness: Harness) -> Saboteur:
    if isinstance(stage.storage, MemoryStorage):
        return MemorySaboteur(stage.storage)
    if isinstance(stage.storage, SqliteStorage):
        return SqliteSaboteur(stage.storage.path)
    if isinstance(stage.storage, RedisStorage) and isinstance(harness, RedisHarness):
        return RedisSaboteur(stage.storage, harness.name)
    pytest.skip("there is no way behind this storage's back")


@pytest.fixture
async def sqlite(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Stage]:
    """A stage for what only rows can suffer."""
    async with SqliteHarness().open(clock, tmp_path) as storage:
        stage = Stage(storage, clock)
        yield stage
        assert await stage.problems() == []


@pytest.fixture
def rows(sqlite: Stage) -> SqliteSaboteur:
    assert isinstance(sqlite.storage, SqliteStorage)
    return SqliteSaboteur(sqlite.storage.path)


async def mend(stage: Stage, saboteur: Saboteur, *, readable: bool = True) -> list[Problem]:
    """Audit twice, which must change nothing, then repair, after which there must be nothing left to report.

    Where the index itself is not `readable`, other verbs may be refused until then.
    """
    before = saboteur.contents(), await stage.storage.snapshot() if readable else None
    found = (await audit(stage.storage, "q")).problems
    assert found, "the audit saw nothing"
    assert (await audit(stage.storage, "q")).problems == found
    assert (saboteur.contents(), await stage.storage.snapshot() if readable else None) == before
    await audit(stage.storage, "q", repair=True)
    assert (await audit(stage.storage, "q")).problems == []
    return found


async def repair(stage: Stage) -> None:
    await audit(stage.storage, "q", repair=True)


async def claim_like_a_worker(stage: Stage, limit: int = 1) -> list[Job]:
    """Claim like a worker: an empty answer that says there is more is asked again at once."""
    jobs: list[Job] = []
    for _ in range(20):
        claim = await stage.storage.claim("q", limit - len(jobs), worker="w1", lease_ms=10_000)
        jobs += claim.jobs
        if len(jobs) == limit or claim.next_run_at is None or claim.next_run_at > claim.now:
            break
    return jobs


async def runs_to_its_end(stage: Stage, *ids: str) -> None:
    """These jobs, and no others, can be claimed, and complete."""
    jobs = await claim_like_a_worker(stage, len(ids) + 1)
    assert sorted(job.id for job in jobs) == sorted(ids)
    assert [await stage.complete(job) for job in jobs] == [SettleResult.OK] * len(ids)


CONSEQUENCES = {"count", "total"}
"""Where live jobs are counted by their entries in the indexes, an entry too few or too many shows here as well."""


def kinds(problems: list[Problem]) -> set[str]:
    return {problem.kind for problem in problems}


# Indexes


async def test_a_sound_queue_has_no_problems_and_repairing_it_changes_nothing(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b", delay=60)
    await stage.claim_one()
    before = saboteur.contents()
    assert (await audit(stage.storage, "q", repair=True)).problems == []
    assert (await audit(stage.storage, "q")).checked == 2
    assert saboteur.contents() == before


async def test_audit_of_a_missing_queue_is_clean(stage: Stage) -> None:
    found = await audit(stage.storage, "never", repair=True)
    assert (found.problems, found.checked) == ([], 0)


async def test_a_waiting_job_that_is_lost_from_its_index_is_found_again(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    saboteur.lose("a")
    assert kinds(await mend(stage, saboteur)) - CONSEQUENCES <= {"unindexed", "index"}
    await runs_to_its_end(stage, "a", "b")


async def test_a_running_job_that_is_lost_from_its_index_is_swept_again(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=10)
    saboteur.lose("a")
    await mend(stage, saboteur)
    assert (await stage.expire(lease=10)).stalled == ["a"]
    await runs_to_its_end(stage, "a")


async def test_a_finished_job_that_is_lost_from_its_index_is_forgotten_again(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one(), ttl=60)
    saboteur.lose("a")
    await mend(stage, saboteur)
    stage.clock.advance(60)
    assert (await stage.sweep()).forgotten == 1
    assert (await stage.stats()).failed == 0


async def test_a_waiting_job_that_is_listed_as_running_too_is_only_waiting(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    saboteur.double("a")
    assert kinds(await mend(stage, saboteur)) - CONSEQUENCES in ({"index"}, {"misplaced"})
    assert (await stage.sweep()).stalled == []
    await runs_to_its_end(stage, "a")


async def test_a_running_job_that_is_listed_as_waiting_too_is_not_claimed_again(
    stage: Stage, saboteur: Saboteur
) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    saboteur.double("a")
    assert kinds(await mend(stage, saboteur)) - CONSEQUENCES in ({"index"}, {"misplaced"})
    assert await stage.claim(10, worker="w2") == []
    assert await stage.complete(job) is SettleResult.OK


async def test_waiting_entry_without_a_record_is_removed(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    saboteur.strand("a")
    assert "index" in kinds(await mend(stage, saboteur, readable=False))
    assert await stage.get("a") is None
    await runs_to_its_end(stage, "b")
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_running_entry_without_a_record_is_removed(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    gone = await stage.claim_one(lease=10)
    saboteur.strand("a")
    await mend(stage, saboteur, readable=False)
    assert await stage.complete(gone) is SettleResult.LOST
    assert (await stage.expire(lease=10)).stalled == []
    assert (await stage.stats()).running == 0
    await runs_to_its_end(stage, "b")


async def test_waiting_job_in_the_running_index_returns_to_its_place(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    before = await stage.the("a")
    saboteur.misplace("a")
    await mend(stage, saboteur)
    assert await stage.the("a") == before
    assert [job.id for job in await claim_like_a_worker(stage, 2)] == ["a", "b"]


async def test_running_job_in_the_waiting_index_returns_and_keeps_its_lease(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    saboteur.misplace("a")
    await mend(stage, saboteur)
    assert await stage.claim(10, worker="w2") == []
    assert await stage.complete(job) is SettleResult.OK


async def test_running_job_in_the_waiting_index_is_not_leased_twice(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    saboteur.misplace("a")
    assert await claim_like_a_worker(stage) == []
    if isinstance(saboteur, SqliteSaboteur):  # The index is made of columns, and these are garbled.
        assert_damaged(await stage.the("a"))
        assert await stage.complete(job) is SettleResult.LOST
    else:
        assert await stage.complete(job) is SettleResult.OK
    await repair(stage)


async def test_job_lost_from_its_index_stays_lost_until_repair(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    saboteur.lose("a")
    await runs_to_its_end(stage, "b")
    await stage.sweep()
    assert await claim_like_a_worker(stage) == []
    await repair(stage)
    await runs_to_its_end(stage, "a")


async def test_waiting_job_in_the_running_index_is_not_swept_and_waits_for_repair(
    stage: Stage, saboteur: Saboteur
) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    saboteur.misplace("a")
    swept = await stage.sweep()
    assert (swept.overdue, swept.stalled) == ([], [])
    await runs_to_its_end(stage, "b")
    await repair(stage)
    await runs_to_its_end(stage, "a")


async def test_a_record_with_a_lease_and_an_outcome_keeps_the_outcome(stage: Stage, saboteur: Saboteur) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    saboteur.end_while_running("a")
    assert "both" in kinds(await mend(stage, saboteur))
    job = await stage.the("a")
    assert (job.state, job.run) == (State.FAILED, None)
    assert (await stage.enqueue("a")).placed is Placed.NEW
    await runs_to_its_end(stage, "a")


@pytest.mark.parametrize("index", ["holdfast_waiting", "holdfast_until", "sqlite_autoindex_holdfast_jobs_1"])
async def test_rows_missing_from_an_index_of_the_file_are_all_found_again(
    sqlite: Stage, rows: SqliteSaboteur, index: str
) -> None:
    for n in range(20):
        await sqlite.enqueue(f"{n}")
    jobs = await sqlite.claim(10)
    assert isinstance(sqlite.storage, SqliteStorage)
    with aside(sqlite.storage.path) as db:
        copies = db.execute("SELECT * FROM holdfast_jobs WHERE job % 2 ORDER BY job").fetchall()
        db.execute("DELETE FROM holdfast_jobs WHERE job % 2")
    with index_away(sqlite.storage.path, index), aside(sqlite.storage.path) as db:
        db.executemany(f"INSERT INTO holdfast_jobs VALUES ({','.join('?' * 12)})", copies)
    assert "index" in kinds(await mend(sqlite, rows))
    assert [await sqlite.complete(job) for job in jobs] == [SettleResult.OK] * 10
    await runs_to_its_end(sqlite, *(f"{n}" for n in range(10, 20)))


@pytest.mark.parametrize("others", [1, REPAIR_PAGE + 50], ids=["on one page", "on an earlier page"])
async def test_broken_index_with_a_garbled_record_is_repaired(sqlite: Stage, rows: SqliteSaboteur, others: int) -> None:
    """A row that is missing from an index cannot even be rewritten: SQLite refuses to."""
    ids = await enqueue_many(sqlite, others)
    await sqlite.enqueue("!", b"precious")
    rows.sql("UPDATE holdfast_jobs SET rest = x'00' WHERE id = ?", b"!")
    rows.lose("!")
    assert {"garbled", "index"} <= kinds(await mend(sqlite, rows))
    assert_damaged(await sqlite.the("!"), b"precious")
    claimed = [job.id for _ in range(2) for job in await claim_like_a_worker(sqlite, 250)]
    assert claimed == ids


# Counts, totals, stamps, ledgers


@pytest.mark.parametrize("name", ["waiting", "running", "failed", "retrying", "deferred"])
@pytest.mark.parametrize("by", [-1, 1, 1000])
async def test_wrong_count_is_recounted(stage: Stage, saboteur: Saboteur, name: str, by: int) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    await stage.claim_one()

    def miscount(metadata: dict[str, Any]) -> None:
        metadata["counts"][name] = metadata["counts"].get(name, 0) + by

    before = await stage.stats()
    if name not in saboteur.counts:  # It is the size of an index: there is no number that could be wrong.
        with pytest.raises(AssertionError, match="no such count"):
            saboteur.metadata(miscount)
        return
    saboteur.metadata(miscount)
    assert kinds(await mend(stage, saboteur)) == {"count"}
    assert await stage.stats() == before


@pytest.mark.parametrize("kind", [EventKind.ENQUEUED, EventKind.COMPLETED, EventKind.PROMOTED])
async def test_inconsistent_totals_are_corrected(stage: Stage, saboteur: Saboteur, kind: EventKind) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    await stage.complete(await stage.claim_one())

    def mistotal(metadata: dict[str, Any]) -> None:
        metadata["totals"][kind] = metadata["totals"].get(kind, 0) + 3

    saboteur.metadata(mistotal)
    assert kinds(await mend(stage, saboteur)) == {"total"}
    await runs_to_its_end(stage, "b")


@pytest.mark.parametrize("field", ["generation", "arrival", "fence", "next", "start of the last run"])
async def test_a_stamp_from_the_future_is_never_given_out_again(stage: Stage, saboteur: Saboteur, field: str) -> None:
    await stage.enqueue("a")
    if field in ("fence", "next"):
        await stage.claim_one()
    if field == "next":
        await stage.enqueue("a", b"newer", update=Update())
    if field == "start of the last run":
        await stage.complete(await stage.claim_one())
    future = stage.wall(3600)
    saboteur.restamp("a", field, future)
    assert kinds(await mend(stage, saboteur)) == {"stamp"}
    assert (await stage.enqueue("b")).generation > future
    jobs = await claim_like_a_worker(stage)
    assert fence(jobs[0]) > future
    assert await stage.complete(jobs[0]) is SettleResult.OK


@pytest.mark.parametrize("stamp", [2**62, 2**63 - 1, 2**64 - 1], ids=["62 bits", "63 bits", "64 bits"])
async def test_stamp_above_every_clock_does_not_stop_the_queue(sqlite: Stage, rows: SqliteSaboteur, stamp: int) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    rows.restamp("a", "generation", stamp)
    await mend(sqlite, rows)
    for _ in range(3):
        await sqlite.enqueue("c", update=Update())
    jobs = await claim_like_a_worker(sqlite, 3)
    assert {"b", "c"} <= {job.id for job in jobs}
    assert [await sqlite.complete(job) for job in jobs] == [SettleResult.OK] * len(jobs)


UNREADABLE = [b"", b"\x00", b"noise", b"\x85\xa4time", "text", 5]


@pytest.mark.parametrize("metadata", UNREADABLE, ids=repr)
async def test_unreadable_metadata_is_reported_and_rebuilt(
    sqlite: Stage, rows: SqliteSaboteur, metadata: object
) -> None:
    for id in "abcd":
        await sqlite.enqueue(id)
    job = await sqlite.claim_one()
    await sqlite.retry(await sqlite.claim_one(), delay=60)
    before = await sqlite.stats()
    rows.sql("UPDATE holdfast_queues SET meta = ?", metadata)
    assert kinds(await mend(sqlite, rows, readable=False)) == {"meta"}
    assert replace(await sqlite.stats(), totals={}) == replace(before, totals={})
    assert await sqlite.complete(job) is SettleResult.OK
    await runs_to_its_end(sqlite, "c", "d")


async def test_verbs_are_refused_while_the_metadata_cannot_be_read(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a")
    rows.sql("UPDATE holdfast_queues SET meta = x'c1'")
    before = rows.contents()
    refusal = "the metadata of queue 'q' cannot be read: run `holdfast repair q`"
    for verb in (sqlite.enqueue("b"), sqlite.claim(1), sqlite.sweep(), sqlite.the("a")):
        with pytest.raises(StorageUnavailable, match=refusal):
            await verb
    assert rows.contents() == before
    await sqlite.storage.enqueue("other", [Request("c", Work(b"payload"))])
    queues = (await sqlite.storage.snapshot()).queues
    assert [(stats.queue, stats.ready, stats.problem) for stats in queues] == [("other", 1, ""), ("q", 0, refusal)]
    assert await sqlite.storage.ready(["q", "other", "none"]) == ["q", "other"]
    await repair(sqlite)
    await runs_to_its_end(sqlite, "a")


async def test_rebuilt_metadata_never_reuses_a_fence(sqlite: Stage, rows: SqliteSaboteur) -> None:
    for id in "abc":
        await sqlite.enqueue(id)
    late = (await sqlite.claim(3))[2]
    rows.sql("UPDATE holdfast_queues SET meta = x'c1'")
    await repair(sqlite)
    await sqlite.sweep(worker="w1")
    again = await sqlite.claim(3)
    assert min(fence(job) for job in again) > fence(late)
    assert await sqlite.complete(late) is SettleResult.LOST


async def test_a_worker_record_that_cannot_be_read_hides_no_other_worker(sqlite: Stage, rows: SqliteSaboteur) -> None:
    for worker in ("w1", "w2"):
        await sqlite.storage.announce(worker, {"queues": ["q"]}, ttl_ms=10_000)
    rows.sql("UPDATE holdfast_workers SET stats = x'93' WHERE worker = 'w1'")
    assert [worker.worker for worker in (await sqlite.storage.snapshot()).workers] == ["w2"]
    assert await sqlite.storage.evict("w2")
    await sqlite.storage.announce("w1", {"queues": ["q"]}, ttl_ms=10_000)
    assert [worker.worker for worker in (await sqlite.storage.snapshot()).workers] == ["w1", "w2"]


# Pages


async def enqueue_many(stage: Stage, count: int) -> list[str]:
    ids = [f"{n:04}" for n in range(count)]
    for start in range(0, count, 200):
        requests = [Request(id, Work(b"payload"), custom_id=True) for id in ids[start : start + 200]]
        await stage.storage.enqueue("q", requests)
    return ids


async def test_problems_on_several_pages_are_all_found_and_repaired(stage: Stage, saboteur: Saboteur) -> None:
    ids = await enqueue_many(stage, 2 * REPAIR_PAGE + 50)
    broken = [ids[0], ids[REPAIR_PAGE - 1], ids[REPAIR_PAGE], ids[-1]]
    for id in broken:
        saboteur.misplace(id)
    found = await mend(stage, saboteur)
    assert {problem.id for problem in found if problem.id} == set(broken)
    claimed = [job.id for _ in range(3) for job in await stage.claim(250)]
    assert claimed == ids


async def test_repair_goes_page_by_page_and_lets_other_calls_run_between(stage: Stage, saboteur: Saboteur) -> None:
    ids = await enqueue_many(stage, 2 * REPAIR_PAGE + 50)
    for id in ids[::REPAIR_PAGE]:
        saboteur.misplace(id)
    step = await stage.storage.repair("q", dry_run=False)
    checked = [step.checked]
    while step.cursor is not None:
        assert len(checked) < 20
        await stage.enqueue(f"new {len(checked)}")
        assert len(await stage.claim(1)) == 1
        step = await stage.storage.repair("q", dry_run=False, cursor=step.cursor)
        checked.append(step.checked)
    if not isinstance(stage.storage, RedisStorage):  # There, a claim removes stray entries.
        assert checked == [REPAIR_PAGE, REPAIR_PAGE, 50 + 2]
    assert (await audit(stage.storage, "q")).problems == []


async def test_jobs_that_move_during_a_repair_are_not_counted_twice(stage: Stage) -> None:
    ids = await enqueue_many(stage, 2 * REPAIR_PAGE + 50)
    while jobs := await stage.claim(100):
        for job in jobs:
            await stage.retry(job, delay=60)
    before = await stage.stats()
    step = await stage.storage.repair("q", dry_run=False)
    stage.clock.advance(0.001)
    assert all(await stage.storage.prioritize("q", ids[:10], 1))  # From the page that was counted to the last one.
    problems = list(step.problems)
    while step.cursor is not None:
        step = await stage.storage.repair("q", dry_run=False, cursor=step.cursor)
        problems += step.problems
    after = await stage.stats()
    assert (problems, after.retrying, after.totals) == ([], before.retrying, before.totals)
    assert (await audit(stage.storage, "q")).problems == []


async def test_a_queue_of_exactly_one_page_is_audited_to_its_end(stage: Stage, saboteur: Saboteur) -> None:
    await enqueue_many(stage, REPAIR_PAGE)

    def miscount(metadata: dict[str, Any]) -> None:
        metadata["counts"]["retrying"] = 7

    saboteur.metadata(miscount)
    assert kinds(await mend(stage, saboteur)) == {"count"}
    assert (await stage.stats()).ready == REPAIR_PAGE


async def test_garbled_records_on_several_pages_are_all_found_and_repaired(sqlite: Stage, rows: SqliteSaboteur) -> None:
    ids = await enqueue_many(sqlite, 2 * REPAIR_PAGE + 50)
    broken = ids[::50]
    rows.sql("UPDATE holdfast_jobs SET rest = substr(rest, 1, 9) WHERE id % 50 = 0")
    found = await mend(sqlite, rows)
    assert [(problem.kind, problem.id) for problem in found] == [("garbled", id) for id in broken]
    stats = await sqlite.stats()
    assert (stats.failed, stats.ready) == (len(broken), len(ids) - len(broken))


# Garbled records


def assert_damaged(job: Job, payload: bytes | None = b"payload") -> None:
    """It reads as failed, for a reason that says so, with what is left of it."""
    assert job.outcome is not None
    assert (job.state, job.outcome.error, job.payload) == (State.FAILED, DAMAGED, payload)
    assert b"RecordDamaged" in DAMAGED


async def in_state(stage: Stage, id: str, state: State) -> None:
    await stage.enqueue(id, b"payload", priority=9)
    if state is State.WAITING:
        return
    if state is State.CANCELLED:
        await stage.cancel(id)
        return
    job = await stage.claim_one()
    assert job.id == id
    if state is State.COMPLETED:
        await stage.complete(job)
    elif state is State.FAILED:
        await stage.fail(job)


@pytest.mark.parametrize("state", State)
async def test_truncated_record_reads_as_failed_and_is_repaired(
    sqlite: Stage, rows: SqliteSaboteur, state: State
) -> None:
    await in_state(sqlite, "sample", state)
    assert isinstance(sqlite.storage, SqliteStorage)
    with aside(sqlite.storage.path) as db:
        ((size,),) = db.execute("SELECT length(rest) FROM holdfast_jobs").fetchall()
    for length in range(size):
        await in_state(sqlite, f"{length:03}", state)
        rows.sql("UPDATE holdfast_jobs SET rest = substr(rest, 1, ?) WHERE id = ?", length, f"{length:03}".encode())
    sqlite.clock.advance(1)
    found = await mend(sqlite, rows)
    assert [problem.id for problem in found if problem.kind == "garbled"] == [f"{n:03}" for n in range(size)]
    payload = None if state is State.COMPLETED else b"payload"
    for length in range(size):
        assert_damaged(await sqlite.the(f"{length:03}"), payload)
    assert (await sqlite.the("sample")).state is state


async def test_random_bytes_instead_of_a_record_read_as_failed_and_are_repaired(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    noise = random.Random(7)
    ids = await enqueue_many(sqlite, 150)
    for id in ids:
        rows.sql("UPDATE holdfast_jobs SET rest = ? WHERE id = ?", noise.randbytes(noise.randrange(80)), id.encode())
    assert [problem.id for problem in await mend(sqlite, rows)] == ids
    for id in ids:
        assert_damaged(await sqlite.the(id))


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING, State.COMPLETED])
async def test_record_with_one_changed_byte_blocks_no_verb(sqlite: Stage, rows: SqliteSaboteur, state: State) -> None:
    """Some changes cannot be noticed. But none may raise, and the healthy job behind must always get its turn."""
    await in_state(sqlite, "a", state)
    await sqlite.enqueue("b", priority=0)
    wedged: list[str] = []
    assert isinstance(sqlite.storage, SqliteStorage)
    with aside(sqlite.storage.path) as db:
        records = db.execute("SELECT * FROM holdfast_jobs").fetchall()
        (rest,) = db.execute("SELECT rest FROM holdfast_jobs WHERE id = ?", (b"a",)).fetchone()
        (metadata,) = db.execute("SELECT meta FROM holdfast_queues").fetchone()
        for at, flip in [(at, flip) for at in range(len(rest)) for flip in (0x01, 0x80, 0xFF)]:
            changed = rest[:at] + bytes([rest[at] ^ flip]) + rest[at + 1 :]
            db.execute("UPDATE holdfast_jobs SET rest = ? WHERE id = ?", (changed, b"a"))
            try:
                await use_every_verb(sqlite)
            except Exception as error:
                wedged.append(f"byte {at} of {len(rest)} ^ {flip:#x}: {error!r:.80}")
            db.execute("DELETE FROM holdfast_jobs")
            db.executemany(f"INSERT INTO holdfast_jobs VALUES ({','.join('?' * 12)})", records)
            db.execute("UPDATE holdfast_queues SET meta = ?", (metadata,))
    assert wedged == []


async def use_every_verb(stage: Stage) -> None:
    await stage.get("a")
    await stage.storage.scan("q")
    await stage.storage.snapshot()
    await stage.sweep()
    job = next(job for job in await claim_like_a_worker(stage, 2) if job.id == "b")
    await stage.extend(job)
    await repair(stage)
    assert (await audit(stage.storage, "q")).problems == []
    assert await stage.release(job) is SettleResult.OK
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())


WRONG_COLUMNS: list[tuple[str, object]] = [
    ("rest", "text"),
    ("rest", 5),
    ("rest", 5.5),
    ("payload", "text"),
    ("payload", 5),
    ("priority", "high"),
    ("priority", 5.5),
    ("priority", 42),
    ("priority", -1),
    ("priority", b"\x05"),
    ("run_at", "soon"),
    ("run_at", 1.5),
    ("run_at", b"\x00"),
    ("arrival", "late"),
    ("arrival", b"\x00"),
    ("until_at", "never"),
    ("until_at", 5),
    ("until_at", b"\x00"),
    ("state", "asleep"),
    ("state", b"waiting"),
    ("state", "completed"),
    ("view", "retrying"),
    ("view", "deferred"),
    ("view", "seen"),
    ("worker", "w1"),
    ("id", "a"),
    ("id", 5),
]


@pytest.mark.parametrize(("column", "value"), WRONG_COLUMNS, ids=lambda value: repr(value)[:20])
async def test_column_with_a_wrong_value_is_reported_and_repaired(
    sqlite: Stage, rows: SqliteSaboteur, column: str, value: object
) -> None:
    await sqlite.enqueue("a", priority=9)
    await sqlite.enqueue("b", priority=0)
    try:
        rows.sql(f"UPDATE holdfast_jobs SET {column} = ? WHERE id = ?", value, b"a")
    except sqlite3.IntegrityError:
        return  # The schema does not take it: that is as good.
    sqlite.clock.advance(1)
    await mend(sqlite, rows)
    (jobs, failed) = await claim_like_a_worker(sqlite, 3), (await sqlite.stats()).failed
    assert [job.id for job in jobs][-1] == "b"
    assert len(jobs) + failed == 2, "the broken job can neither be claimed nor is it listed as failed"
    assert [await sqlite.complete(job) for job in jobs] == [SettleResult.OK] * len(jobs)


@pytest.mark.parametrize("worker", [None, "w2", b"w1"], ids=repr)
async def test_lease_under_a_wrong_worker_name_is_repaired(sqlite: Stage, rows: SqliteSaboteur, worker: object) -> None:
    await sqlite.enqueue("a")
    await sqlite.claim_one(worker="w1")
    rows.sql("UPDATE holdfast_jobs SET worker = ? WHERE id = ?", worker, b"a")
    await mend(sqlite, rows)
    assert (await sqlite.sweep(worker="w1")).stalled == ["a"]


async def test_record_garbled_in_every_column_is_repaired_and_counted(
    sqlite: Stage, rows: SqliteSaboteur, tmp_path: Path
) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b", priority=0)
    rows.sql(
        "UPDATE holdfast_jobs SET state = x'ff', view = 5, run_at = 'x', rest = x'00', payload = 5 WHERE id = ?", b"a"
    )
    await mend(sqlite, rows)
    assert_damaged(await sqlite.the("a"), None)
    await runs_to_its_end(sqlite, "b")
    async with SqliteHarness().open(sqlite.clock, tmp_path) as other:  # Which reads the metadata afresh.
        assert (await other.snapshot()).queues == [await sqlite.stats()]
        assert (await audit(other, "q")).problems == []


async def test_payload_column_of_the_wrong_type_is_dropped_and_the_job_reads_as_failed(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    await sqlite.enqueue("a")
    rows.sql("UPDATE holdfast_jobs SET payload = 'text' WHERE id = ?", b"a")
    assert_damaged(await sqlite.the("a"), None)
    await mend(sqlite, rows)
    assert_damaged(await sqlite.the("a"), None)


def garble(rows: SqliteSaboteur, id: str) -> None:
    rows.sql("UPDATE holdfast_jobs SET rest = substr(rest, 1, 7) WHERE id = ?", id.encode())


async def test_claim_skips_a_garbled_record_and_returns_the_next_job(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    garble(rows, "a")
    sqlite.clock.advance(1)
    assert [job.id for job in await claim_like_a_worker(sqlite)] == ["b"]
    assert_damaged(await sqlite.the("a"))
    assert (await sqlite.stats()).failed == 1


async def test_claim_of_one_returns_the_job_behind_a_garbled_record_at_once(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    garble(rows, "a")
    claim = await sqlite.storage.claim("q", 1, worker="w1", lease_ms=10_000)
    assert [job.id for job in claim.jobs] == ["b"] or (claim.next_run_at or claim.now + 1) <= claim.now
    await repair(sqlite)


async def test_many_garbled_records_at_the_head_do_not_block_the_queue(sqlite: Stage, rows: SqliteSaboteur) -> None:
    for n in range(30):
        await sqlite.enqueue(f"{n}")
    await sqlite.enqueue("last")
    rows.sql("UPDATE holdfast_jobs SET rest = x'00' WHERE id <> ?", b"last")
    sqlite.clock.advance(1)
    assert [job.id for job in await claim_like_a_worker(sqlite, 10)] == ["last"]
    assert (await sqlite.stats()).failed == 30


async def test_get_and_scan_show_a_garbled_record_as_failed_with_its_payload(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    await sqlite.enqueue("a", b"precious")
    garble(rows, "a")
    assert_damaged(await sqlite.the("a"), b"precious")
    assert [job.state for job in (await sqlite.storage.scan("q")).jobs] == [State.FAILED]
    await repair(sqlite)


async def test_sweep_skips_a_garbled_running_record(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    await sqlite.claim(2, lease=10)
    garble(rows, "a")
    assert (await sqlite.expire(lease=10)).stalled == ["b"]
    assert_damaged(await sqlite.the("a"))
    assert (await sqlite.stats()).running == 0


async def test_sweeping_a_dead_worker_skips_its_garbled_record(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    await sqlite.claim(2, worker="w1")
    garble(rows, "a")
    sqlite.clock.advance(1)
    assert (await sqlite.sweep(worker="w1")).stalled == ["b"]
    assert_damaged(await sqlite.the("a"))


async def test_the_holder_of_a_garbled_record_has_lost_its_lease(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a")
    job = await sqlite.claim_one()
    garble(rows, "a")
    assert len((await sqlite.extend(job)).lost) == 1
    assert await sqlite.complete(job) is SettleResult.LOST
    await repair(sqlite)


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING, State.COMPLETED])
async def test_an_enqueue_restarts_a_garbled_record(sqlite: Stage, rows: SqliteSaboteur, state: State) -> None:
    await in_state(sqlite, "a", state)
    garble(rows, "a")
    sqlite.clock.advance(1)
    assert (await sqlite.enqueue("a", b"again")).placed is Placed.NEW
    job = await sqlite.claim_one()
    assert (job.id, job.payload) == ("a", b"again")
    assert await sqlite.complete(job) is SettleResult.OK
    assert await sqlite.problems() == []


async def test_operator_retry_of_a_garbled_record_uses_the_readable_payload(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    await sqlite.enqueue("a", b"precious")
    garble(rows, "a")
    await repair(sqlite)
    reply = await sqlite.enqueue("a", None, update=Update(payload=False))
    assert (reply.placed, reply.state) == (Placed.NEW, State.FAILED)
    job = await sqlite.claim_one()
    assert (job.id, job.payload) == ("a", b"precious")
    assert await sqlite.complete(job) is SettleResult.OK


async def test_operator_retry_of_a_garbled_record_works_before_the_repair(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a", b"precious")
    garble(rows, "a")
    assert (await sqlite.enqueue("a", None, update=Update(payload=False))).placed is Placed.NEW
    assert (await sqlite.claim_one()).payload == b"precious"
    await repair(sqlite)


@pytest.mark.parametrize("verb", ["cancel", "keep", "keep at least"])
async def test_a_verb_that_meets_a_garbled_record_leaves_the_totals_right(
    sqlite: Stage, rows: SqliteSaboteur, verb: str
) -> None:
    await sqlite.enqueue("a")
    await sqlite.enqueue("b")
    garble(rows, "a")
    if verb == "cancel":
        await sqlite.cancel("a")
    else:
        await sqlite.keep("a", 60, at_least=verb == "keep at least")
    assert kinds((await audit(sqlite.storage, "q")).problems) <= {"garbled"}
    await repair(sqlite)


async def test_a_purge_is_not_stopped_by_garbled_records(sqlite: Stage, rows: SqliteSaboteur) -> None:
    for n in range(5):
        await sqlite.enqueue(f"{n}")
    rows.sql("UPDATE holdfast_jobs SET rest = x'00' WHERE id IN (?, ?)", b"0", b"1")
    for _ in range(10):
        if not await sqlite.storage.drop("q", 2):
            break
    assert (await sqlite.storage.snapshot()).queues == []


async def test_garbled_finished_record_is_listed_as_failed_and_forgotten_later(
    sqlite: Stage, rows: SqliteSaboteur
) -> None:
    await sqlite.enqueue("a")
    await sqlite.complete(await sqlite.claim_one(), ttl=60)
    garble(rows, "a")
    sqlite.clock.advance(60)
    await sqlite.sweep()
    assert_damaged(await sqlite.the("a"), None)
    sqlite.clock.advance(FAILURE_TTL_MS / 1000)
    assert (await sqlite.sweep()).forgotten == 1
    assert await sqlite.get("a") is None


async def test_garbled_next_affects_no_other_record(sqlite: Stage, rows: SqliteSaboteur) -> None:
    await sqlite.enqueue("a", b"first")
    await sqlite.enqueue("b")
    await sqlite.claim_one()
    await sqlite.enqueue("a", b"second", update=Update())

    def changed(rest: list[Any]) -> None:
        assert len(rest[8][6]) == len(Next.__struct_fields__)
        rest[8][6][7] = "perhaps"

    rows.rest("a", changed)
    assert "garbled" in kinds(await mend(sqlite, rows))
    assert_damaged(await sqlite.the("a"), b"first")
    await runs_to_its_end(sqlite, "b")
