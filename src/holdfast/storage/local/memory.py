"""Jobs in the memory of one process: for the tests of users, and the reference that other storages are compared with.

Indexes are sorted lists. All users of `memory://name` in a process share one storage.
"""

from __future__ import annotations

import bisect
import copy
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

from msgspec.structs import replace

from holdfast._core.clock import Clock, SystemClock
from holdfast._core.events import Event
from holdfast._core.jobs import PRIORITIES, Job, Request, State
from holdfast._core.replies import Enqueued, StorageInfo, WorkerInfo
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.local.engine import Engine, LocalStorage
from holdfast.storage.local.table import BRIEF, Change, Found, Place, QueueMeta, count, index_name, index_of, view_of
from holdfast.storage.urls import redact
from holdfast.storage.validation import id_bytes

T = TypeVar("T")


class MemoryQueue:
    def __init__(self) -> None:
        self.meta = QueueMeta()
        self.records: dict[bytes, Job] = {}
        self.indexes: dict[str, list[Place]] = {index: [] for index in (*State, BRIEF)}

    def place(self, key: bytes, job: Job) -> None:
        index, at = index_of(job)
        bisect.insort(self.indexes[index], (at, key))

    def add(self, key: bytes, job: Job) -> None:
        self.records[key] = job
        self.place(key, job)
        count(self.meta, index_name(job), view_of(job), 1)

    def find(self, key: bytes, job: Job) -> int | None:
        """Return the position of a record in its index; None if it is not there."""
        index, at = index_of(job)
        entries = self.indexes[index]
        position = bisect.bisect_left(entries, (at, key))
        return position if entries[position : position + 1] == [(at, key)] else None

    def displace(self, key: bytes, job: Job) -> None:
        position = self.find(key, job)
        if position is not None:
            del self.indexes[index_name(job)][position]

    def read(self, index: str, start: int, end: int) -> list[Job]:
        """Return the records of a part of an index. An entry whose record is in another index, or none, is skipped."""
        jobs = (self.records.get(key) for _, key in self.indexes[index][start:end])
        return [job for job in jobs if job is not None and index_name(job) == index]


class MemoryTable:
    """A `Table` of plain dicts and lists."""

    def __init__(self) -> None:
        self._queues: dict[str, MemoryQueue] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._notes: dict[str, tuple[bytes, int]] = {}
        self._floor = 0
        """The highest stamp of the dropped queues: new queues begin above it, so no stamp is used twice."""
        self.events: list[Event] = []
        self.home: int | None = None
        """Id of the process that opened the storage first. A forked process has a copy of its own."""

    def _queue(self, queue: str) -> MemoryQueue:
        """Return a queue to read from: one that does not exist is empty."""
        return self._queues.get(queue) or MemoryQueue()

    def meta(self, queue: str) -> QueueMeta | None:
        return self._queue(queue).meta if queue in self._queues else None

    def open(self, queue: str) -> QueueMeta:
        if queue not in self._queues:
            self._queues[queue] = MemoryQueue()
            self._queues[queue].meta.time.last_stamp = self._floor
        return self._queues[queue].meta

    def rebuild_meta(self, queue: str, dry_run: bool) -> bool:
        return False

    def queues(self) -> list[str]:
        return list(self._queues)

    def load(self, queue: str, ids: Sequence[str]) -> dict[str, Job]:
        records = self._queue(queue).records
        return {id: job for id in ids if (job := records.get(id_bytes(id))) is not None}

    def add(self, queue: str, jobs: Sequence[Job]) -> bool:
        into = self._queues[queue]
        new = {id_bytes(job.id): job for job in jobs}
        if len(new) < len(jobs) or not into.records.keys().isdisjoint(new):
            return False
        for key, job in new.items():
            into.add(key, job)
        return True

    def write(self, queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None:
        into = self._queues[queue]
        for change in changes:
            key = id_bytes(change.id)
            if change.before is not None:
                into.displace(key, change.before)
                count(into.meta, index_name(change.before), view_of(change.before), -1)
            if change.after is not None:
                into.add(key, change.after)
            else:
                del into.records[key]
        self.events.extend(events)

    def write_meta(self, queue: str) -> None:
        pass

    def drop(self, queue: str) -> None:
        self._floor = max(self._floor, self._queues.pop(queue).meta.time.last_stamp)

    def due(self, queue: str, now: int, limit: int, each: int = validation.MAX_ITEMS) -> list[Job]:
        found: list[Job] = []
        for low, high in self._spans(queue, now):
            if low < high:
                found += self._queue(queue).read(State.WAITING, low, min(high, low + min(each, limit - len(found))))
        return found

    def next_run_at(self, queue: str) -> int | None:
        entries = self._queue(queue).indexes[State.WAITING]
        firsts = (bisect.bisect_left(entries, ((-priority,), b"")) for priority in PRIORITIES)
        return min((entries[first][0][1] for first in firsts if first < len(entries)), default=None)

    def scheduled(self, queue: str, now: int) -> int:
        due = sum(high - low for low, high in self._spans(queue, now))
        return len(self._queue(queue).indexes[State.WAITING]) - due

    def _spans(self, queue: str, now: int) -> list[tuple[int, int]]:
        """Return the part of the waiting index that is due for each priority, the highest priority first."""
        entries = self._queue(queue).indexes[State.WAITING]
        return [
            (bisect.bisect_left(entries, ((-priority,), b"")), bisect.bisect_left(entries, ((-priority, now + 1), b"")))
            for priority in reversed(PRIORITIES)
        ]

    def upto(self, queue: str, index: str, now: int, limit: int) -> list[Job]:
        return self._queue(queue).read(index, 0, min(self.past(queue, index, now), limit))

    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]:
        running = self._queue(queue).read(State.RUNNING, 0, len(self._queue(queue).indexes[State.RUNNING]))
        return [job for job in running if job.worker == worker][:limit]

    def past(self, queue: str, index: str, now: int) -> int:
        return bisect.bisect_left(self._queue(queue).indexes[index], ((now + 1,), b""))

    def next_until(self, queue: str, index: str, after: int = 0) -> int | None:
        entries = self._queue(queue).indexes[index]
        first = bisect.bisect_left(entries, ((after + 1,), b""))
        return entries[first][0][0] if first < len(entries) else None

    def page(self, queue: str, index: str, after: Place | None, limit: int) -> tuple[list[Job], Place | None]:
        source = self._queue(queue)
        entries = source.indexes[index]
        start = 0 if after is None else bisect.bisect_right(entries, after)
        chosen = entries[start : start + limit]
        more = start + limit < len(entries)
        return source.read(index, start, start + limit), chosen[-1] if more else None

    def workers(self) -> list[WorkerInfo]:
        return list(self._workers.values())

    def write_worker(self, worker: str, stats: WorkerInfo | None) -> None:
        if stats is None:
            del self._workers[worker]
        else:
            self._workers[worker] = stats

    def note(self, name: str, now: int) -> bytes | None:
        value, forget_at = self._notes.get(name, (None, 0))
        return value if forget_at > now else None

    def write_note(self, name: str, value: bytes, forget_at: int) -> None:
        self._notes[name] = (value, forget_at)

    def forget_notes(self, now: int) -> None:
        self._notes = {name: note for name, note in self._notes.items() if note[1] > now}

    def inspect(self, queue: str, after: Place | None, limit: int) -> list[Found]:
        source = self._queue(queue)
        keys = sorted(key for key in source.records if after is None or key > after[1])[:limit]
        found: list[Found] = []
        for key in keys:
            job = source.records[key]
            index, at = index_of(job)
            is_indexed = source.find(key, job) is not None
            found.append(Found(validation.clean_id(key), job, job.payload, index if is_indexed else None, at))
        return found

    def tally(self, queue: str) -> dict[str, int]:
        counted = QueueMeta()
        for job in self._queue(queue).records.values():
            count(counted, index_name(job), view_of(job), 1)
        return counted.counts

    def check_indexes(self, queue: str) -> list[str]:
        source = self._queue(queue)
        strays: list[str] = []
        for index, entries in source.indexes.items():
            for at, key in entries:
                job = source.records.get(key)
                if job is None:
                    strays.append(f"{index} names {key!r:.80}, which has no record")
                elif index_of(job) != (index, at):
                    strays.append(f"{index} names {key!r:.80}, which belongs in {index_of(job)[0]}")
        return strays

    def rebuild_indexes(self, queue: str) -> None:
        source = self._queue(queue)
        source.indexes = {index: [] for index in (*State, BRIEF)}
        for key, job in source.records.items():
            source.place(key, job)


class MemoryStorage(LocalStorage):
    """Jobs in the memory of this process, lost when it ends. Thread-safe: a step holds the lock, and its events are
    sent to the loops of the listeners."""

    def __init__(
        self,
        name: str = "",
        *,
        namespace: str = "hf",
        clock: Clock | None = None,
        max_payload: int = validation.MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__(max_payload)
        self.namespace = validation.check_namespace(namespace)
        self.name = name
        self.table = MemoryTable()
        self._clock = clock or SystemClock()
        self._engine = Engine(self.table, self._clock)
        self._lock = threading.Lock()
        self._opened = 0

    def __repr__(self) -> str:
        return f"<MemoryStorage {redact(f'memory://{self.name}')}>"

    async def _open(self) -> None:
        with self._lock:
            home = self.table.home = self.table.home or os.getpid()
            if home != os.getpid():
                raise StorageUnavailable(
                    f"{self!r} is in the memory of process {home}, and this process has only a copy:"
                    " use a SQLite file to share jobs between processes"
                )
            self._opened += 1
            self._pid = home

    async def _close(self) -> None:
        with self._lock:
            self._opened -= 1
            if not self._opened:
                self._pid = None

    async def _about(self) -> StorageInfo:
        keeps = "nothing survives the end of this process"
        return StorageInfo(f"memory://{self.name}", self._clock.now_us(), keeps, {}, [])

    def next_due_us(self, queues: Iterable[str]) -> int | None:
        """Return the wall time at which the next waiting job of these queues becomes due: for a clock that tests move.
        A queue that has a due job now, because it is paused, does not count."""
        times: list[int] = []
        with self._lock:
            for queue in queues:
                meta, run_at = self.table.meta(queue), self.table.next_run_at(queue)
                if meta is None or run_at is None:
                    continue
                time = replace(meta.time)
                if run_at > time.tick(self._clock.now_us()):
                    times.append(run_at - time.skew)
        return min(times, default=None)

    def clone(self) -> Self:
        """Return a storage that shares everything with this one, except whether it is open."""
        clone = copy.copy(self)
        clone.lazy, clone._opening = False, None
        clone._opened, clone._pid = 0, None
        return clone

    def _enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        raise OptionError(f"{self!r} has no transactions: call enqueue, or use a SQLite file, Redis or Valkey")

    async def _step(self, verb: Callable[[Engine], T], *, writes: bool = True, items: int | None = 1) -> T:
        with self._lock:
            result = verb(self._engine)
            events, self.table.events = self.table.events, []
        self._bus.publish(events)
        return result
