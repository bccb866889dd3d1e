"""The verbs, for storages whose atomic step is a Python function: memory and SQLite.

Each method is one step: read the records, let the machine decide, write what changed. The storage wraps a step in its
lock or transaction; nothing here knows which. `Table` is all that such a storage must provide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from holdfast import machine
from holdfast.clock import Clock, QueueTime
from holdfast.jobs import (
    ENDS,
    LIVE,
    STARTS,
    Cancelled,
    Claim,
    Enqueued,
    Event,
    Extended,
    Fail,
    Job,
    Kept,
    Kind,
    Lease,
    Orders,
    Page,
    Problem,
    QueueStats,
    Repaired,
    Request,
    Settled,
    Settlement,
    Snapshot,
    State,
    Swept,
    WorkerStats,
)
from holdfast.storage.checks import FAILED_SUFFIX, MAX_CALL_BYTES, MAX_SWEEP

SWEEP_ON_CLAIM = 10
"""How many leases, and how many finished records, a claim sweeps in passing."""
FORGET_ON_ENQUEUE = 2
"""How many finished records an enqueue call forgets in passing, so that a queue without workers stays bounded."""
REPAIR_PAGE = 200
VIEWS = ("retrying", "deferred")

Key = tuple[int, ...]
"""Where a record stands in its index; ties are broken by id."""


class Ledger(msgspec.Struct):
    """What a queue knows of itself: its time, how many records are in which state, what has happened so far."""

    time: QueueTime = msgspec.field(default_factory=QueueTime)
    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    totals: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    paused: bool = False
    reason: str = ""


class Change(msgspec.Struct, gc=False):
    """A record before and after a step; None where there is none."""

    id: str
    before: Job | None
    after: Job | None


class Found(msgspec.Struct):
    """A record as the audit meets it. `job` is None if it cannot be read, `key` if it is in no index."""

    id: str
    job: Job | None
    payload: bytes | None
    index: str | None
    key: Key


class Table(Protocol):
    """The records of a namespace, inside one atomic step. A record that cannot be read is given as `damaged`."""

    def ledger(self, queue: str) -> Ledger | None: ...
    def open(self, queue: str) -> Ledger: ...
    def queues(self) -> list[str]: ...
    def load(self, queue: str, ids: Sequence[str]) -> dict[str, Job]: ...
    def write(self, queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None: ...
    def write_ledger(self, queue: str) -> None: ...
    def drop(self, queue: str) -> None: ...
    def due(self, queue: str, now: int, limit: int) -> list[Job]: ...
    def heads(self, queue: str, now: int) -> list[Job]: ...
    def next_run_at(self, queue: str) -> int | None: ...
    def scheduled(self, queue: str, now: int) -> int: ...
    def expired(self, queue: str, now: int, limit: int) -> list[Job]: ...
    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]: ...
    def next_sweep_at(self, queue: str) -> int | None: ...
    def forgettable(self, queue: str, now: int, limit: int) -> list[Job]: ...
    def page(self, queue: str, state: State | None, after: str | None, limit: int) -> tuple[list[Job], str | None]: ...
    def workers(self) -> list[WorkerStats]: ...
    def write_worker(self, worker: str, stats: WorkerStats | None) -> None: ...
    def inspect(self, queue: str, after: str | None, limit: int) -> list[Found]: ...
    def tally(self, queue: str) -> dict[str, int]: ...
    def check_indexes(self, queue: str) -> list[str]: ...
    def rebuild_indexes(self, queue: str) -> None: ...


def index_of(job: Job) -> tuple[str, Key]:
    """The one index that a record is in, and its place there. The only place that says so in Python."""
    if job.outcome is not None:
        return job.outcome.state, (job.outcome.forget_at,)
    if job.run is not None:
        return State.RUNNING, (job.run.until_at,)
    return State.WAITING, (-job.work.priority, job.run_at, job.arrival)


def view_of(job: Job) -> str | None:
    """The view that a record is counted under besides its state."""
    if job.run is not None:
        return "deferred" if job.run.next is not None else None
    return "retrying" if job.retries > 0 and job.outcome is None else None


def count(ledger: Ledger, state: str, view: str | None, by: int) -> None:
    """Count a record in (by=1) or out (by=-1)."""
    ledger.counts[state] = ledger.counts.get(state, 0) + by
    if view is not None:
        ledger.counts[view] = ledger.counts.get(view, 0) + by


class _Books:
    """One queue's records during one step: read once, changed by the machine, written once."""

    def __init__(self, table: Table, queue: str, ledger: Ledger, wall: int) -> None:
        self.table = table
        self.queue = queue
        self.ledger = ledger
        self.time = msgspec.structs.replace(ledger.time)
        self.now = self.time.tick(wall)
        self._changes: dict[str, Change] = {}
        self._events: list[Event] = []

    def load(self, ids: Sequence[str]) -> dict[str, Job | None]:
        """The records as this step has left them so far."""
        loaded = self.table.load(self.queue, ids)
        records: dict[str, Job | None] = {id: loaded.get(id) for id in ids}
        records.update({id: change.after for id, change in self._changes.items() if id in records})
        return records

    def put(self, id: str, before: Job | None, step: machine.Step) -> Job | None:
        """Note what a step did to a record, and return the record."""
        after = step.job
        if after is not before:
            if after is not None and after.previous is not None:
                after = machine.tidy(after, self.now)
            change = self._changes.get(id)
            if change is None:
                self._changes[id] = Change(id, before, after)
            else:
                change.after = after
        for kind in step.kinds:
            ended = kind in ENDS and before is not None
            generation = before.generation if ended and before else after.generation if after else 0
            self.note(kind, id, generation, 0 if after is None else after.run_at)
        return after

    def note(self, kind: Kind, id: str, generation: int = 0, run_at: int = 0) -> None:
        totals = self.ledger.totals
        totals[kind] = totals.get(kind, 0) + 1
        self._events.append(Event(kind, self.queue, id, generation, run_at))

    def forget(self, jobs: Iterable[Job], kind: Kind = Kind.FORGOTTEN) -> int:
        count = 0
        for job in jobs:
            self.put(job.id, job, machine.Step(None, (kind,)))
            count += 1
        return count

    def sweep(self, limit: int, worker: str | None = None) -> tuple[list[str], list[str]]:
        """Mark or take back expired leases: the ids of those now overdue, and of those taken back."""
        overdue: list[str] = []
        stalled: list[str] = []
        if not self.ledger.counts.get(State.RUNNING):
            return overdue, stalled
        if worker is None:
            jobs = self.table.expired(self.queue, self.now, limit)
        else:
            jobs = self.table.held_by(self.queue, worker, limit)
        for job in jobs:
            if job.run is None:
                self.put_in_place(job)
                continue
            step = machine.expire(job, self.time) if worker is None else machine.take_back(job, self.time)
            self.put(job.id, job, step)
            (stalled if step.kinds else overdue).append(job.id)
        return overdue, stalled

    def sweep_forgotten(self, limit: int) -> int:
        counts = self.ledger.counts
        if not (counts.get(State.COMPLETED) or counts.get(State.FAILED) or counts.get(State.CANCELLED)):
            return 0
        return self.forget(self.table.forgettable(self.queue, self.now, limit))

    def put_in_place(self, job: Job) -> None:
        """A damaged record reads as failed: whoever meets it among the live moves it where it belongs."""
        self.mend(job, was_live=True)

    def mend(self, job: Job, *, was_live: bool) -> None:
        """Write a record anew, into the index that its state names."""
        self._changes[job.id] = Change(job.id, job, job)
        if was_live:
            self.note(Kind.FAILED, job.id, job.generation)

    def close(self) -> None:
        """Write what has changed. A step that changed nothing leaves no trace, not even in the queue's time, unless
        it was the first to see the clock step back."""
        if self._changes or self._events:
            self.ledger.time = self.time
            self.table.write(self.queue, list(self._changes.values()), self._events)
        elif self.time.skew != self.ledger.time.skew:
            self.ledger.time = self.time
            self.table.write_ledger(self.queue)


class Engine:
    """The storage protocol's verbs as plain functions over a `Table`."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self.table = table
        self.clock = clock

    def _books(self, queue: str) -> _Books | None:
        ledger = self.table.ledger(queue)
        return None if ledger is None else _Books(self.table, queue, ledger, self.clock.now_us())

    def _open(self, queue: str) -> _Books:
        return _Books(self.table, queue, self.table.open(queue), self.clock.now_us())

    def _time(self, queue: str) -> QueueTime:
        """The queue's time for a step that only reads."""
        ledger = self.table.ledger(queue)
        time = QueueTime() if ledger is None else msgspec.structs.replace(ledger.time)
        time.tick(self.clock.now_us())
        return time

    def enqueue(self, queue: str, requests: Sequence[Request]) -> list[Enqueued]:
        books = self._open(queue)
        books.sweep_forgotten(FORGET_ON_ENQUEUE)
        replies = _enqueue(books, requests)
        books.close()
        return replies

    def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> Claim:
        books = self._books(queue)
        if books is None:
            return Claim([], self.clock.now_us(), None, None)
        books.sweep(SWEEP_ON_CLAIM)
        books.sweep_forgotten(SWEEP_ON_CLAIM)
        paused = books.ledger.paused
        books.close()
        jobs = [] if paused else _claim(self._books(queue) or books, limit, worker, lease_ms)
        next_run_at = None if paused else self.table.next_run_at(queue)
        next_sweep_at = self.table.next_sweep_at(queue)
        return Claim([_as_read(job, books.time) for job in jobs], books.now, next_run_at, next_sweep_at, paused)

    def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[Settled]:
        books = self._books(queue)
        if books is None:
            return [Settled.LOST] * len(batch)
        records = books.load([item.id for item in batch])
        replies: list[Settled] = []
        follow_ups: list[Request] = []
        for item in batch:
            job = records[item.id]
            if job is None or not machine.holds(job, worker, item.fence):
                replies.append(Settled.LOST)
                continue
            step = machine.settle(job, item, books.time)
            if isinstance(item, Fail) and item.follow_up is not None and Kind.FAILED in step.kinds:
                follow_ups.append(Request(f"{item.id}@{job.generation}", item.follow_up, named=True))
            records[item.id] = books.put(item.id, job, step)
            replies.append(Settled.OK)
        books.close()
        if follow_ups:
            companion = self._open(queue + FAILED_SUFFIX)
            _enqueue(companion, follow_ups)
            companion.close()
        return replies

    def extend(self, queue: str, leases: Sequence[Lease], *, worker: str, lease_ms: int) -> Extended:
        books = self._books(queue)
        if books is None:
            return Extended(list(leases), [])
        records = books.load([lease.id for lease in leases])
        lost: list[Lease] = []
        cancel_asked: list[Lease] = []
        for lease in leases:
            job = records[lease.id]
            if job is None or job.run is None or not machine.holds(job, worker, lease.fence):
                lost.append(lease)
                continue
            if job.run.cancel_asked:
                cancel_asked.append(lease)
            step = machine.Step(machine.extend(job, lease, lease_ms, books.now))
            records[lease.id] = books.put(lease.id, job, step)
        books.close()
        return Extended(lost, cancel_asked)

    def cancel(self, queue: str, ids: Sequence[str]) -> list[Cancelled]:
        books = self._books(queue)
        if books is None:
            return [Cancelled.MISSING] * len(ids)
        records = books.load(ids)
        replies: list[Cancelled] = []
        for id in ids:
            step, reply = machine.cancel(records[id], books.now)
            records[id] = books.put(id, records[id], step)
            replies.append(reply)
        books.close()
        return replies

    def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool) -> list[Kept]:
        books = self._books(queue)
        if books is None:
            return [Kept.MISSING] * len(ids)
        records = books.load(ids)
        replies: list[Kept] = []
        for id in ids:
            job, reply = machine.keep(records[id], ttl_ms, at_least, books.now)
            records[id] = books.put(id, records[id], machine.Step(job))
            replies.append(reply)
        books.close()
        return replies

    def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        time = self._time(queue)
        loaded = self.table.load(queue, ids)
        found = [loaded.get(id) for id in ids]
        return [None if job is None or machine.forgotten(job, time.last_at) else _as_read(job, time) for job in found]

    def scan(self, queue: str, *, state: State | None, after: str | None, limit: int) -> Page:
        time = self._time(queue)
        jobs, cursor = self.table.page(queue, state, after, limit)
        return Page([_listed(_as_read(job, time)) for job in jobs if not machine.forgotten(job, time.last_at)], cursor)

    def snapshot(self) -> Snapshot:
        now = self.clock.now_us()
        workers = sorted((w for w in self.table.workers() if w.expires_at > now), key=lambda w: w.worker)
        return Snapshot(now, [self._stats(queue, workers) for queue in sorted(self.table.queues())], workers)

    def _stats(self, queue: str, workers: Sequence[WorkerStats]) -> QueueStats:
        ledger = self.table.ledger(queue) or Ledger()
        now = self._time(queue).last_at
        counts = ledger.counts
        scheduled = self.table.scheduled(queue, now) if counts.get(State.WAITING) else 0
        heads = self.table.heads(queue, now) if counts.get(State.WAITING, 0) > scheduled else []
        oldest = min((max(job.run_at, job.generation) for job in heads), default=now)
        return QueueStats(
            queue,
            ready=counts.get(State.WAITING, 0) - scheduled,
            scheduled=scheduled,
            running=counts.get(State.RUNNING, 0),
            retrying=counts.get("retrying", 0),
            deferred=counts.get("deferred", 0),
            completed=counts.get(State.COMPLETED, 0),
            failed=counts.get(State.FAILED, 0),
            cancelled=counts.get(State.CANCELLED, 0),
            oldest_ready_ms=max(0, now - oldest) // 1000,
            paused=ledger.paused,
            reason=ledger.reason,
            workers=[w.worker for w in workers if queue in _served(w)],
            totals=dict(ledger.totals),
        )

    def pause(self, queue: str, paused: bool, *, reason: str) -> None:
        ledger = self.table.open(queue)
        ledger.paused = paused
        ledger.reason = reason if paused else ""
        self.table.write_ledger(queue)

    def sweep(self, queue: str, limit: int, *, worker: str | None) -> Swept:
        books = self._books(queue)
        if books is None:
            return Swept([], [], 0, False, None)
        overdue, stalled = books.sweep(limit, worker)
        forgotten = books.sweep_forgotten(limit)
        books.close()
        more = max(len(overdue) + len(stalled), forgotten) == limit
        return Swept(overdue, stalled, forgotten, more, self.table.next_sweep_at(queue))

    def purge(self, queue: str, states: Collection[State], limit: int, *, drop: bool) -> int:
        books = self._books(queue)
        if books is None:
            return 0
        done = 0
        for state in (state for state in State if state in states and state is not State.RUNNING):
            if done == limit:
                break
            jobs, _ = self.table.page(queue, state, None, limit - done)
            kind = Kind.PURGED if state is State.WAITING else Kind.FORGOTTEN
            done += books.forget((job for job in jobs if job.state is state), kind)
        if State.RUNNING in states:
            done += self._ask_to_cancel(books, limit - done)
        books.close()
        if drop and not done and not any(books.ledger.counts.get(state) for state in State):
            self.table.drop(queue)
        return done

    def _ask_to_cancel(self, books: _Books, limit: int) -> int:
        asked, after = 0, None
        while asked < limit:
            jobs, after = self.table.page(books.queue, State.RUNNING, after, MAX_SWEEP)
            for job in jobs:
                if job.run is not None and not job.run.cancel_asked and asked < limit:
                    step, _ = machine.cancel(job, books.now)
                    books.put(job.id, job, step)
                    asked += 1
            if after is None:
                break
        return asked

    def announce(self, worker: str, facts: dict[str, str | int | list[str]], *, ttl_ms: int) -> Orders:
        now = self.clock.now_us()
        known = {stats.worker: stats for stats in self.table.workers()}
        for stats in known.values():
            if stats.expires_at <= now:
                self.table.write_worker(stats.worker, None)
        before = known.get(worker)
        evict = before is not None and before.evict_asked and before.expires_at > now
        self.table.write_worker(worker, WorkerStats(worker, facts, now, now + 1000 * ttl_ms, evict))
        return Orders(evict)

    def evict(self, worker: str) -> bool:
        now = self.clock.now_us()
        for stats in self.table.workers():
            if stats.worker == worker and stats.expires_at > now:
                self.table.write_worker(worker, msgspec.structs.replace(stats, evict_asked=True))
                return True
        return False

    def repair(self, queue: str, *, dry_run: bool, cursor: str | None) -> Repaired:
        ledger = self.table.ledger(queue)
        if ledger is None:
            return Repaired([], 0, None)
        books = _Books(self.table, queue, ledger, self.clock.now_us())
        found = self.table.inspect(queue, cursor, REPAIR_PAGE)
        problems: list[Problem] = []
        for record in found:
            problem, mended = _examine(queue, record, books)
            if problem is not None:
                problems.append(problem)
                books.mend(mended, was_live=problem.kind == "garbled" and record.index in LIVE)
        at_end = len(found) < REPAIR_PAGE
        if at_end:
            problems += [Problem("index", queue, "", detail) for detail in self.table.check_indexes(queue)]
        if not dry_run:
            books.close()
        if at_end and not dry_run and any(problem.kind in ("index", "unindexed", "misplaced") for problem in problems):
            self.table.rebuild_indexes(queue)
        if at_end:
            problems += _count(self.table, queue, books.ledger, dry_run)
        if problems and not dry_run:
            ledger.time = books.time
            self.table.write_ledger(queue)
        return Repaired(problems, len(found), None if at_end else found[-1].id)


def _enqueue(books: _Books, requests: Sequence[Request]) -> list[Enqueued]:
    records = books.load([request.id for request in requests])
    replies: list[Enqueued] = []
    for request in requests:
        before = records[request.id]
        step, reply = machine.enqueue(before, request, books.time)
        records[request.id] = books.put(request.id, before, step)
        replies.append(reply)
    return replies


def _claim(books: _Books, limit: int, worker: str, lease_ms: int) -> list[Job]:
    """Lease what is due, in order, up to the limits. What only a stepped clock made look due is put back."""
    claimed: list[Job] = []
    size = 0
    for job in books.table.due(books.queue, books.now, limit):
        if job.outcome is not None:
            books.put_in_place(job)
        elif machine.early(job, books.time):
            books.put(job.id, job, machine.Step(machine.follow_wall(job, books.time)))
        else:
            size += len(job.work.payload or b"")
            if claimed and size > MAX_CALL_BYTES:
                break
            running = books.put(job.id, job, machine.claim(job, worker, lease_ms, books.time))
            assert running is not None
            claimed.append(running)
    books.close()
    return claimed


def _as_read(job: Job, time: QueueTime) -> Job:
    """A record as its readers know it: `run_at` in wall time, and no previous outcome past its forget time."""
    job = machine.tidy(job, time.last_at)
    if not time.skew:
        return job
    return msgspec.structs.replace(job, run_at=job.wall_at or job.run_at - time.skew)


def _listed(job: Job) -> Job:
    """A record as `scan` gives it: without the bytes that could make a page large."""
    outcome = None if job.outcome is None else msgspec.structs.replace(job.outcome, result=None)
    work = msgspec.structs.replace(job.work, payload=None)
    return msgspec.structs.replace(job, work=work, outcome=outcome, previous=None)


def _served(worker: WorkerStats) -> list[str]:
    queues = worker.facts.get("queues", [])
    return queues if isinstance(queues, list) else []


def _examine(queue: str, found: Found, books: _Books) -> tuple[Problem | None, Job]:
    """What is wrong with a record, and the record as it should be written."""
    job = found.job
    if job is None:
        mended = machine.damaged(found.id, found.payload, books.now)
        return Problem("garbled", queue, found.id, "the record cannot be read"), mended
    if job.run is not None and job.outcome is not None:
        mended = msgspec.structs.replace(job, run=None)
        return Problem("both", queue, found.id, "the record has a lease and an outcome"), mended
    index, key = index_of(job)
    if found.index is None:
        return Problem("unindexed", queue, found.id, f"the record is {index} but in no index"), job
    if (found.index, found.key) != (index, key):
        detail = f"the record belongs at {index} {key} and is at {found.index} {found.key}"
        return Problem("misplaced", queue, found.id, detail), job
    newest = max(job.generation, job.arrival, 0 if job.run is None else job.run.fence)
    if newest > books.time.last_stamp:
        detail = f"the record has stamp {newest}, the queue has only given out {books.time.last_stamp}"
        books.time.last_stamp = newest
        return Problem("stamp", queue, found.id, detail), job
    return None, job


def _count(table: Table, queue: str, ledger: Ledger, dry_run: bool) -> list[Problem]:
    """Do the counts match the records, and do the totals add up? Where not, the records are right."""
    problems: list[Problem] = []
    actual = table.tally(queue)
    for name in (*State, *VIEWS):
        counted, there = ledger.counts.get(name, 0), actual.get(name, 0)
        if counted != there:
            problems.append(Problem("count", queue, "", f"{name} is counted as {counted}, there are {there}"))
    started = sum(ledger.totals.get(kind, 0) for kind in STARTS)
    ended = sum(ledger.totals.get(kind, 0) for kind in ENDS)
    live = actual.get(State.WAITING, 0) + actual.get(State.RUNNING, 0)
    if started != ended + live:
        problems.append(Problem("total", queue, "", f"{started} were started, {ended} ended and {live} are live"))
    if not dry_run:
        ledger.counts = actual
        ledger.totals[Kind.ENQUEUED] = ledger.totals.get(Kind.ENQUEUED, 0) + ended + live - started
    return problems
