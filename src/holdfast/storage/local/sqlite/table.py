"""The `Table` of a SQLite connection: all statements on jobs. Rows are made in rows.py.

The owner of the connection begins and commits. The metadata of a queue and its small running records are cached from
one transaction to the next, until another connection has written to the file.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from holdfast._core import lifecycle
from holdfast._core.clock import Clock, QueueTime
from holdfast._core.events import Event, EventKind
from holdfast._core.jobs import LIVE, PRIORITIES, Job, State
from holdfast._core.replies import WorkerInfo
from holdfast.storage.base import QueueDamaged
from holdfast.storage.local.sqlite.rows import (
    COLUMNS,
    UNREADABLE,
    Row,
    blob_of,
    changed_row,
    job_of,
    keeps_place,
    new_row,
    place_of,
    rest_of,
)
from holdfast.storage.local.table import (
    Change,
    Found,
    Place,
    QueueMeta,
    count,
    index_name,
    index_of,
    newest_stamp,
    view_of,
)
from holdfast.storage.validation import MAX_ITEMS, clean_id, id_bytes, pack_facts, unpack_facts

T = TypeVar("T")

NO_QUEUE = 0
"""The number of a queue that does not exist: no row has it."""
MAX_CACHED_BYTES = 4096
"""A larger running record is not cached: a settle reads it again."""
ROWS_A_STATEMENT = 50
"""The most rows that one statement inserts or deletes: one statement for each row costs 50% more."""


@functools.cache
def _insert(rows: int) -> str:
    """Return the statement for new records. They always wait, so most columns need not be bound."""
    row = "(?, ?, 'waiting', NULL, ?, ?, ?, NULL, NULL, ?, ?)"
    return (
        "INSERT INTO holdfast_jobs (queue, id, state, view, priority, run_at, arrival, until_at, worker, payload, rest)"
        f" VALUES {', '.join([row] * rows)}"
    )


@functools.cache
def _delete(rows: int) -> str:
    return f"DELETE FROM holdfast_jobs WHERE queue = ? AND id IN ({', '.join('?' * rows)})"


_UPDATE = (
    "UPDATE holdfast_jobs SET state = ?, view = nullif(?, ''), priority = ?, run_at = ?, arrival = ?, until_at = ?,"
    " worker = nullif(?, ''), rest = ?{payload} WHERE queue = ? AND id = ?"
)
"""Empty text stands for no view and no worker: see `changed_row`."""
_UPDATE_ALL = _UPDATE.format(payload=", payload = ?")
_UPDATE_MOST = _UPDATE.format(payload="")
_UPDATE_LEASED = (
    "UPDATE holdfast_jobs SET state = 'running', view = NULL, until_at = ?, worker = ?, rest = ?"
    " WHERE queue = ? AND id = ?"
)
_UPDATE_ENDED = (
    "UPDATE holdfast_jobs SET state = ?, view = NULL, until_at = ?, worker = NULL, payload = NULL, rest = ?"
    " WHERE queue = ? AND id = ?"
)
"""The most common changes, which bind few values: a lease, and the end of a run that keeps no payload."""


def _of_each_priority(columns: str, which: str) -> str:
    """Return a read of the waiting jobs of each priority, the highest first: ten reads of the index. Values are named
    where one occurs several times: Python before 3.12.4 warns about numbered ones (`?1`)."""
    return " UNION ALL ".join(
        f"SELECT * FROM (SELECT {columns} FROM holdfast_jobs"
        f" WHERE queue = :queue AND until_at IS NULL AND priority = {priority} {which})"
        for priority in reversed(PRIORITIES)
    )


_DUE = _of_each_priority(COLUMNS, "AND run_at <= :now ORDER BY run_at, arrival LIMIT :each") + " LIMIT :limit"
_NEXT_RUN_AT = f"SELECT min(run_at) FROM ({_of_each_priority('run_at', 'ORDER BY run_at LIMIT 1')})"
_SCHEDULED = f"SELECT sum(n) FROM ({_of_each_priority('count(*) AS n', 'AND run_at > :now')})"
_PAST = "SELECT count(*) FROM holdfast_jobs WHERE queue = :queue AND state = :state AND until_at <= :now"
_NEXT_UNTIL = "SELECT min(until_at) FROM holdfast_jobs WHERE queue = :queue AND state = :state AND until_at > :after"
_PAGE_UNTIL = (
    f"SELECT {COLUMNS}, until_at FROM holdfast_jobs WHERE queue = ? AND state = ? AND until_at IS NOT NULL"
    " AND (until_at, id) > (?, ?) ORDER BY until_at, id LIMIT ?"
)
_PAGE_WAITING = (
    f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = ? AND until_at IS NULL"
    " AND priority = ? AND (run_at, arrival) > (?, ?) ORDER BY run_at, arrival LIMIT ?"
)

_encode = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(QueueMeta).decode
_decode_worker = msgspec.msgpack.Decoder(WorkerInfo).decode


class SqliteTable:
    """The jobs of one namespace in one file, through one connection."""

    def __init__(self, connection: sqlite3.Connection, namespace: str, clock: Clock) -> None:
        self._db = connection
        self._namespace = namespace
        self._clock = clock
        self._numbers: dict[str, int] = {}
        self._metas: dict[str, QueueMeta] = {}
        self._runs: dict[tuple[int, str], Job] = {}
        """Running records as this connection has written them, by queue and id, so that a settle need not read them."""
        self._dirty: set[str] = set()
        self._damaged: dict[tuple[int, bytes], tuple[str, str | None]] = {}
        self._data_version = -1
        self.events: list[Event] = []
        """The events of this transaction."""
        self.payload_bytes = 0
        """The number of payload bytes that this transaction has written."""
        self.listeners: list[tuple[str, str, Literal["ready", "ends", "all", "wake"]]] = []
        """The listeners in all processes: address, namespace/queue, topic."""
        self.dead_listeners: set[str] = set()
        """Addresses whose process has gone; the next write removes them."""

    def begin(self) -> None:
        """Call first in a transaction: drop cached data that other connections may have changed."""
        self._damaged.clear()
        self.events = []
        self.payload_bytes = 0
        (version,) = self._db.execute("PRAGMA data_version").fetchone()
        if version != self._data_version:
            self.forget_cache()
            self._data_version = version
            self.listeners = self._db.execute("SELECT address, queue, topic FROM holdfast_listeners").fetchall()

    def flush(self) -> None:
        """Call last in a transaction: write the changed metadata."""
        if self.dead_listeners and self._dirty:
            for address in self.dead_listeners:
                self.remove_listener(address)
            self.listeners = [listener for listener in self.listeners if listener[0] not in self.dead_listeners]
            self.dead_listeners.clear()
        for queue in self._dirty:
            row = (_encode(self._metas[queue]), self._numbers[queue])
            self._db.execute("UPDATE holdfast_queues SET meta = ? WHERE queue = ?", row)
        self._dirty.clear()

    def forget_cache(self) -> None:
        """Call after a rollback: cached data may have been changed by the transaction."""
        self._numbers.clear()
        self._metas.clear()
        self._runs.clear()
        self._dirty.clear()
        self._data_version = -1

    def meta(self, queue: str) -> QueueMeta | None:
        meta = self._metas.get(queue)
        if meta is None:
            row = self._db.execute(
                "SELECT queue, meta FROM holdfast_queues WHERE namespace = ? AND name = ?", (self._namespace, queue)
            ).fetchone()
            if row is None:
                self._numbers[queue] = NO_QUEUE
                return None
            self._numbers[queue] = row[0]
            try:
                meta = self._metas[queue] = _decode_meta(row[1])
            except UNREADABLE:
                raise QueueDamaged(queue) from None
        return meta

    def rebuild_meta(self, queue: str, dry_run: bool) -> bool:
        try:
            self.meta(queue)
            return False
        except QueueDamaged:
            if dry_run:
                return True
        number = self._numbers[queue]
        rows = self._db.execute(f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = ?", (number,))
        stamps = (newest_stamp(job) for job in self._read(queue, rows))
        newest = max(max(stamps, default=0), self._clock.now_us())
        counts = self.tally(queue)
        live = counts.get(State.WAITING, 0) + counts.get(State.RUNNING, 0)
        time = QueueTime(last_at=newest, last_stamp=newest)
        self._metas[queue] = QueueMeta(time, counts, {EventKind.ENQUEUED: live})
        self._dirty.add(queue)
        return True

    def open(self, queue: str) -> QueueMeta:
        meta = self.meta(queue)
        if meta is None:
            meta = self._metas[queue] = QueueMeta()
            meta.time.last_stamp = self._floor()
            cursor = self._db.execute(
                "INSERT INTO holdfast_queues (namespace, name, meta) VALUES (?, ?, ?)",
                (self._namespace, queue, _encode(meta)),
            )
            assert cursor.lastrowid is not None
            self._numbers[queue] = cursor.lastrowid
        return meta

    def _floor(self) -> int:
        """Return the highest stamp of the dropped queues: new queues begin above it, so no stamp is used twice."""
        row = self._db.execute("SELECT value FROM holdfast_meta WHERE key = 'floor'").fetchone()
        return 0 if row is None else int(row[0])

    def queues(self) -> list[str]:
        rows = self._db.execute("SELECT name FROM holdfast_queues WHERE namespace = ?", (self._namespace,))
        return [name for (name,) in rows]

    def drop(self, queue: str) -> None:
        floor = max(self._floor(), self._metas.pop(queue).time.last_stamp)
        self._db.execute("INSERT OR REPLACE INTO holdfast_meta VALUES ('floor', ?)", (floor,))
        self._db.execute("DELETE FROM holdfast_queues WHERE queue = ?", (self._numbers.pop(queue),))
        self._dirty.discard(queue)

    def write_meta(self, queue: str) -> None:
        self._dirty.add(queue)

    def load(self, queue: str, ids: Sequence[str]) -> dict[str, Job]:
        number, runs = self._numbers[queue], self._runs
        jobs = {id: job for id in ids if (job := runs.get((number, id))) is not None}
        if keys := [blob_of(id) for id in ids if id not in jobs]:
            marks = ",".join("?" * len(keys))
            rows = self._db.execute(
                f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = ? AND id IN ({marks})", (number, *keys)
            )
            jobs.update((job.id, job) for job in self._read(queue, rows))
        return jobs

    def _read(self, queue: str, rows: Iterable[Row], index: str | None = None) -> list[Job]:
        """Return the jobs of these rows. With `index`, a record of another one is damaged: its columns are wrong."""
        jobs: list[Job] = []
        for row in rows:
            try:
                job = job_of(row)
                if index is None or index_name(job) == index:
                    jobs.append(job)
                    continue
                counted = index_name(job), view_of(job)
            except UNREADABLE:
                counted = row[1], row[2]
            self._damaged[self._numbers[queue], row[0]] = counted
            payload = row[6] if isinstance(row[6], bytes) else None
            jobs.append(lifecycle.damaged(clean_id(row[0]), payload, self._clock.now_us()))
        return jobs

    def write(self, queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None:
        number, meta = self._numbers[queue], self._metas[queue]
        inserts: list[Job] = []
        updates: dict[str, list[Row]] = {}
        deletes: list[str] = []
        for change in changes:
            before, after = change.before, change.after
            if before is not None:
                self._count_out(queue, before)
                self._runs.pop((number, change.id), None)
            if after is None:
                deletes.append(change.id)
                continue
            if before is None:
                inserts.append(after)
                continue
            count(meta, index_name(after), view_of(after), 1)
            statement, values = self._update(before, after)
            updates.setdefault(statement, []).append((*values, number, blob_of(after.id)))
            if statement is _UPDATE_LEASED and len(values[-1]) + len(after.work.payload or b"") <= MAX_CACHED_BYTES:
                self._runs[number, change.id] = after
        self._delete(queue, deletes)
        for statement, rows in updates.items():
            self._db.executemany(statement, rows)
        if inserts:
            for part in _parts(inserts):
                self._insert(queue, part)
            self._count_new(queue, inserts)
        self._dirty.add(queue)
        self.events.extend(events)

    def _update(self, before: Job, after: Job) -> tuple[str, Row]:
        """Return the statement that changes a record, and its values. It writes a payload only if it must."""
        payload, run = after.work.payload, after.run
        if before is not after and keeps_place(before, after):
            if run is not None and run.next is None and before.work is after.work:
                return _UPDATE_LEASED, (run.until_at, run.worker, bytearray(rest_of(after)))
            if after.outcome is not None and payload is None and before.run is not None:
                index, (forget_at, *_) = index_of(after)
                return _UPDATE_ENDED, (str(index), forget_at, bytearray(rest_of(after)))
        if before.work is after.work and before is not after:
            return _UPDATE_MOST, changed_row(after)
        self.payload_bytes += len(payload or b"")
        return _UPDATE_ALL, (*changed_row(after), payload and bytearray(payload))

    def add(self, queue: str, jobs: Sequence[Job]) -> bool:
        added = 0
        try:
            for part in _parts(jobs):
                self._insert(queue, part)
                added += len(part)
        except sqlite3.IntegrityError:
            self._delete(queue, [job.id for job in jobs[:added]])
            return False
        self._count_new(queue, jobs)
        return True

    def _delete(self, queue: str, ids: Sequence[str]) -> None:
        for part in _parts(ids):
            self._db.execute(_delete(len(part)), (self._numbers[queue], *map(blob_of, part)))

    def _insert(self, queue: str, jobs: Sequence[Job]) -> None:
        number = self._numbers[queue]
        values: list[object] = []
        for job in jobs:
            values.append(number)
            values += new_row(job)
        self._db.execute(_insert(len(jobs)), values)

    def _count_new(self, queue: str, jobs: Sequence[Job]) -> None:
        count(self._metas[queue], State.WAITING, None, len(jobs))
        self.payload_bytes += sum(len(job.work.payload or b"") for job in jobs)

    def _count_out(self, queue: str, job: Job) -> None:
        """Remove a record from the counts. A live record that is damaged has failed now, and its generation becomes the
        last stamp of the queue if it is the highest."""
        meta = self._metas[queue]
        damaged = self._damaged.pop((self._numbers[queue], id_bytes(job.id)), None) if self._damaged else None
        index, view = damaged or (index_name(job), view_of(job))
        count(meta, index, view, -1)
        if damaged is not None:
            meta.time.last_stamp = max(meta.time.last_stamp, job.generation)
            if index in LIVE:
                meta.totals[EventKind.FAILED] = meta.totals.get(EventKind.FAILED, 0) + 1

    def due(self, queue: str, now: int, limit: int, each: int = MAX_ITEMS) -> list[Job]:
        values = {"queue": self._numbers[queue], "now": now, "each": min(each, limit), "limit": limit}
        rows = self._db.execute(_DUE, values)
        return self._read(queue, rows, State.WAITING)

    def next_run_at(self, queue: str) -> int | None:
        return self._number(_NEXT_RUN_AT, queue)

    def scheduled(self, queue: str, now: int) -> int:
        return self._number(_SCHEDULED, queue, now=now) or 0

    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = ? AND state = 'running' AND until_at IS NOT NULL"
            " AND worker = ? ORDER BY until_at, id LIMIT ?",
            (self._numbers[queue], worker, limit),
        )
        return self._read(queue, rows, State.RUNNING)

    def past(self, queue: str, index: str, now: int) -> int:
        return self._number(_PAST, queue, state=index, now=now) or 0

    def next_until(self, queue: str, index: str, after: int = 0) -> int | None:
        return self._number(_NEXT_UNTIL, queue, state=str(index), after=after)

    def _number(self, statement: str, queue: str, **values: object) -> int | None:
        found: int | None = self._db.execute(statement, {"queue": self._numbers[queue], **values}).fetchone()[0]
        return found

    def upto(self, queue: str, index: str, now: int, limit: int) -> list[Job]:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = ? AND state = ? AND until_at <= ?"
            " ORDER BY until_at, id LIMIT ?",
            (self._numbers[queue], index, now, limit),
        )
        return self._read(queue, rows, index)

    def page(self, queue: str, index: str, after: Place | None, limit: int) -> tuple[list[Job], Place | None]:
        number = self._numbers[queue]
        key, id = after or ((), b"")
        if index == State.WAITING:
            rows = self._page_waiting(number, key, limit + 1)
        else:
            rows = self._db.execute(_PAGE_UNTIL, (number, index, key[0] if key else -1, id, limit + 1)).fetchall()
        jobs = self._read(queue, rows[:limit], index)
        if len(rows) <= limit:
            return jobs, None
        last = rows[limit - 1]
        last_key = (-last[3], last[4], last[5]) if index == State.WAITING else (last[8],)
        return jobs, (last_key, last[0])

    def _page_waiting(self, number: int, key: tuple[int, ...], limit: int) -> list[Row]:
        rows: list[Row] = []
        first, run_at, arrival = (-key[0], key[1], key[2]) if key else (PRIORITIES[-1], -1, -1)
        for priority in range(first, -1, -1):
            if len(rows) < limit:
                wanted = (number, priority, run_at, arrival, limit - len(rows))
                rows += self._db.execute(_PAGE_WAITING, wanted).fetchall()
            run_at = arrival = -1
        return rows

    def workers(self) -> list[WorkerInfo]:
        rows = self._db.execute("SELECT worker, stats FROM holdfast_workers WHERE namespace = ?", (self._namespace,))
        return [_worker_of(worker, stats) for worker, stats in rows]

    def write_worker(self, worker: str, stats: WorkerInfo | None) -> None:
        if stats is None:
            self._db.execute(
                "DELETE FROM holdfast_workers WHERE namespace = ? AND worker = ?", (self._namespace, worker)
            )
        else:
            self._db.execute(
                "INSERT OR REPLACE INTO holdfast_workers VALUES (?, ?, ?)",
                (self._namespace, worker, pack_facts(_encode(stats))),
            )

    def note(self, name: str, now: int) -> bytes | None:
        row = self._db.execute(
            "SELECT value FROM holdfast_notes WHERE namespace = ? AND name = ? AND forget_at > ?",
            (self._namespace, name, now),
        ).fetchone()
        return None if row is None else bytes(row[0])

    def write_note(self, name: str, value: bytes, forget_at: int) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO holdfast_notes VALUES (?, ?, ?, ?)", (self._namespace, name, value, forget_at)
        )

    def forget_notes(self, now: int) -> None:
        self._db.execute("DELETE FROM holdfast_notes WHERE namespace = ? AND forget_at <= ?", (self._namespace, now))

    def inspect(self, queue: str, after: Place | None, limit: int) -> list[Found]:
        rows = self._db.execute(
            f"SELECT {COLUMNS}, until_at, worker FROM holdfast_jobs WHERE queue = ? AND id > ? ORDER BY id LIMIT ?",
            (self._numbers[queue], b"" if after is None else after[1], limit),
        )
        return [self._found(queue, row) for row in rows]

    def _found(self, queue: str, row: Row) -> Found:
        (job,) = self._read(queue, [row])
        if (self._numbers[queue], row[0]) in self._damaged:
            return Found(job.id, None, job.payload, row[1], ())
        place = (*row[1:6], *row[8:10])
        return Found(job.id, job, job.payload, row[1], index_of(job)[1] if place == place_of(job) else place)

    def tally(self, queue: str) -> dict[str, int]:
        counted = QueueMeta()
        for state, view, n in self._db.execute(
            "SELECT state, view, count(*) FROM holdfast_jobs WHERE queue = ? GROUP BY state, view",
            (self._numbers[queue],),
        ):
            count(counted, state, view, n)
        return counted.counts

    def check_indexes(self, queue: str) -> list[str]:
        rows = self._db.execute("PRAGMA integrity_check(holdfast_jobs)").fetchall()
        return [text for (text,) in rows if text != "ok"]

    def rebuild_indexes(self, queue: str) -> None:
        self._db.execute("REINDEX holdfast_jobs")

    def add_listeners(self, rows: Sequence[tuple[str, str, str]]) -> None:
        """Add listeners, and remove those of killed processes, which may not be noticed otherwise."""
        for address in {address for address, *_ in self.listeners if not os.path.exists(address)}:
            self.remove_listener(address)
        self._db.executemany("INSERT OR IGNORE INTO holdfast_listeners VALUES (?, ?, ?)", rows)

    def remove_listener(self, address: str) -> None:
        self._db.execute("DELETE FROM holdfast_listeners WHERE address = ?", (address,))


def _parts(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), ROWS_A_STATEMENT):
        yield rows[start : start + ROWS_A_STATEMENT]


def _worker_of(worker: str, stats: bytes) -> WorkerInfo:
    """Return what a worker announced; if that cannot be read, an entry that has expired."""
    try:
        return _decode_worker(unpack_facts(stats))
    except UNREADABLE:
        return WorkerInfo(worker, {}, 0, 0, False)
