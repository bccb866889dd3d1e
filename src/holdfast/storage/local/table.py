"""Between the verbs and a storage of records: what a `Table` must offer inside one atomic step, the transaction that
collects the changes of a step, and how records look to their readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.events import ENDS, Event, EventKind
from holdfast._core.extension import Extension
from holdfast._core.jobs import Job, State, Work
from holdfast._core.replies import WorkerInfo
from holdfast.errors import OptionError
from holdfast.storage.validation import MAX_ITEMS, decode_cursor, encode_cursor

MAX_LISTED_BYTES = 4096
"""An error, a progress or an entry of an extension that is longer is left out of a list; `get` has it."""
VIEWS = ("retrying", "deferred")
"""What records are counted under besides their state."""

SortKey = tuple[int, ...]
"""Where a record stands in its index; ties are broken by id."""
Place = tuple[SortKey, bytes]
"""A place in an index: a key and an id. Among all records, by id, the key is empty."""


class QueueMeta(msgspec.Struct):
    """The metadata of a queue: its time, the number of records by state, the number of events by kind, its pause."""

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
    key: SortKey


class Table(Protocol):
    """The records of a namespace, inside one atomic step. A record that cannot be read, or that is read from an index
    which its state does not name, is given as `damaged`; when it is written, having been live, `write` adds it to the
    failed ones in the totals. `meta` raises StorageUnavailable if the metadata cannot be read; `rebuild_meta` returns
    whether that is so, and then makes it from the records, unless this is a dry run. `add` writes new jobs unread:
    False if one of the ids has a record, or is there twice, and then nothing has happened. `due` returns at most `each`
    jobs of one priority."""

    def meta(self, queue: str) -> QueueMeta | None: ...
    def open(self, queue: str) -> QueueMeta: ...
    def rebuild_meta(self, queue: str, dry_run: bool) -> bool: ...
    def queues(self) -> list[str]: ...
    def load(self, queue: str, ids: Sequence[str]) -> dict[str, Job]: ...
    def add(self, queue: str, jobs: Sequence[Job]) -> bool: ...
    def write(self, queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None: ...
    def write_meta(self, queue: str) -> None: ...
    def drop(self, queue: str) -> None: ...
    def due(self, queue: str, now: int, limit: int, each: int = MAX_ITEMS) -> list[Job]: ...
    def next_run_at(self, queue: str) -> int | None: ...
    def scheduled(self, queue: str, now: int) -> int: ...
    def upto(self, queue: str, state: State, now: int, limit: int) -> list[Job]: ...
    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]: ...
    def past(self, queue: str, state: State, now: int) -> int: ...
    def next_sweep_at(self, queue: str) -> int | None: ...
    def page(self, queue: str, state: State, after: Place | None, limit: int) -> tuple[list[Job], Place | None]: ...
    def workers(self) -> list[WorkerInfo]: ...
    def write_worker(self, worker: str, stats: WorkerInfo | None) -> None: ...
    def inspect(self, queue: str, after: Place | None, limit: int) -> list[Found]: ...
    def tally(self, queue: str) -> dict[str, int]: ...
    def check_indexes(self, queue: str) -> list[str]: ...
    def rebuild_indexes(self, queue: str) -> None: ...


def index_of(job: Job) -> tuple[str, SortKey]:
    """The one index that a record is in, and its place there. The only place that says so in Python."""
    if job.outcome is not None:
        return job.outcome.state, (job.outcome.forget_at,)
    if job.run is not None:
        return State.RUNNING, (job.run.until_at,)
    return State.WAITING, (-job.work.priority, job.run_at, job.arrival)


def newest_stamp(job: Job) -> int:
    run = job.run
    outcomes = [outcome.generation for outcome in (job.outcome, job.previous) if outcome is not None]
    fences = [] if run is None else [run.fence]
    following = [] if run is None or run.next is None else [run.next.generation, run.next.arrival]
    return max(job.generation, job.arrival, *outcomes, *fences, *following)


def view_of(job: Job) -> str | None:
    if job.run is not None:
        return "deferred" if job.run.next is not None else None
    return "retrying" if job.retries > 0 and job.outcome is None else None


def count(meta: QueueMeta, state: str, view: str | None, by: int) -> None:
    """Count a record in (by=1) or out (by=-1)."""
    meta.counts[state] = meta.counts.get(state, 0) + by
    if view is not None:
        meta.counts[view] = meta.counts.get(view, 0) + by


_FINISHED = (State.COMPLETED, State.FAILED, State.CANCELLED)


class QueueTransaction:
    """The records of one queue during one step: read once, changed by the lifecycle, written once."""

    def __init__(self, table: Table, queue: str, meta: QueueMeta, wall: int) -> None:
        self.table = table
        self.queue = queue
        self.meta = meta
        self.time = replace(meta.time)
        self.now = self.time.tick(wall)
        self._changes: dict[str, Change] = {}
        self._events: list[Event] = []

    def load(self, ids: Sequence[str]) -> dict[str, Job | None]:
        """Return the records as this step has left them so far."""
        loaded = self.table.load(self.queue, ids)
        records: dict[str, Job | None] = {id: loaded.get(id) for id in ids}
        records.update({id: change.after for id, change in self._changes.items() if id in records})
        return records

    def record_change(self, id: str, before: Job | None, step: lifecycle.Step) -> Job | None:
        after = step.job
        if after is not before:
            if after is not None and after.previous is not None:
                after = lifecycle.tidy(after, self.now)
            change = self._changes.get(id)
            if change is None:
                self._changes[id] = Change(id, before, after)
            else:
                change.after = after
        for kind in step.kinds:
            ended = kind in ENDS and before is not None
            generation = before.generation if ended and before else after.generation if after else 0
            self.record_event(kind, id, generation, 0 if after is None else after.run_at)
        return after

    def add(self, jobs: Sequence[Job]) -> bool:
        """Write new jobs at once, without having read what there is. False if that would have made a difference."""
        if not self.table.add(self.queue, jobs):
            return False
        for job in jobs:
            self.record_event(EventKind.ENQUEUED, job.id, job.generation, job.run_at)
        return True

    def record_event(self, kind: EventKind, id: str, generation: int = 0, run_at: int = 0) -> None:
        totals = self.meta.totals
        totals[kind] = totals.get(kind, 0) + 1
        self._events.append(Event(kind, self.queue, id, generation, run_at))

    def sweep(self, limit: int, worker: str | None = None) -> tuple[list[str], list[str], bool]:
        """Mark or take back expired leases: those now overdue, those taken back, and whether there may be more."""
        overdue: list[str] = []
        stalled: list[str] = []
        if not self.meta.counts.get(State.RUNNING):
            return overdue, stalled, False
        if worker is None:
            jobs = self.table.upto(self.queue, State.RUNNING, self.now, limit)
        else:
            jobs = self.table.held_by(self.queue, worker, limit)
        for job in jobs:
            if job.run is None:
                self.rewrite(job, job)
                continue
            step = lifecycle.expire(job, self.time) if worker is None else lifecycle.take_back(job, self.time)
            self.record_change(job.id, job, step)
            (stalled if step.kinds else overdue).append(job.id)
        return overdue, stalled, len(jobs) == limit

    def sweep_forgotten(self, limit: int) -> int:
        jobs: list[Job] = []
        for state in _FINISHED:
            if self.meta.counts.get(state) and len(jobs) < limit:
                jobs += self.table.upto(self.queue, state, self.now, limit - len(jobs))
        for job in jobs:
            if lifecycle.forgotten(job, self.now):
                self.record_change(job.id, job, lifecycle.Step(None, (EventKind.FORGOTTEN,)))
            else:
                self.rewrite(job, job)
        return len(jobs)

    def rewrite(self, before: Job, after: Job) -> None:
        """Write a record without an event. A damaged record reads as failed: written as it is, it moves there."""
        self._changes[before.id] = Change(before.id, before, after)

    def close(self) -> None:
        """Write what has changed. A step that changed nothing leaves no trace, not even in the queue's time, unless
        it was the first to see the clock step back."""
        if self._changes or self._events:
            self.meta.time = self.time
            self.table.write(self.queue, list(self._changes.values()), self._events)
        elif self.time.skew != self.meta.time.skew:
            self.meta.time = self.time
            self.table.write_meta(self.queue)


# How records look to their readers


def as_read(job: Job, time: QueueTime) -> Job:
    """A record as its readers know it: `run_at` in wall time, and no previous outcome past its forget time."""
    job = lifecycle.tidy(job, time.last_at)
    if not time.skew:
        return job
    return replace(job, run_at=job.wall_at or job.run_at - time.skew)


def listed(jobs: Sequence[Job], time: QueueTime) -> list[Job]:
    """Records as `scan` gives them: none that is forgotten, and without the bytes that could make a page large."""
    return [_without_bytes(as_read(job, time)) for job in jobs if not lifecycle.forgotten(job, time.last_at)]


def _without_bytes(job: Job) -> Job:
    outcome, run = job.outcome, job.run
    if outcome is not None:
        outcome = replace(outcome, result=None, error=_if_small(outcome.error))
    if run is not None:
        following = run.next and replace(run.next, work=_without_payload(run.next.work))
        run = replace(run, next=following, progress=_if_small(run.progress))
    return replace(
        job,
        work=_without_payload(job.work),
        run=run,
        outcome=outcome,
        previous=None,
        error=_if_small(job.error),
        extension=_small_entries(job.extension),
    )


def _without_payload(work: Work) -> Work:
    return replace(work, payload=None, extension=_small_entries(work.extension))


def _small_entries(entries: Extension) -> Extension:
    return tuple(entry for entry in entries if len(entry[1]) <= MAX_LISTED_BYTES)


def _if_small(value: bytes | None) -> bytes | None:
    return None if value is None or len(value) > MAX_LISTED_BYTES else value


def read_cursor(state: State | None, after: str | None) -> tuple[list[State], Place | None]:
    """The states whose indexes are to be listed, and behind which place of the first. All states are listed one after
    the other, and the cursor names the one that it is in."""
    states = list(State) if state is None else [state]
    if after is None:
        return states, None
    if state is None:
        name, _, place = after.partition(":") if isinstance(after, str) else ("", "", "")
        if name not in State.__members__.values():
            kind = type(after).__name__
            raise OptionError(f"{after!r:.80} ({kind}) is not a cursor that was given out for a list of all states")
        states, after = states[states.index(State(name)) :], place
        if not after:
            return states, None
    return states, decode_cursor(after, 3 if states[0] is State.WAITING else 1)


def write_cursor(state: State | None, at: State, end: Place | None) -> str:
    """A cursor behind a place in the index of a state; without one, at its beginning."""
    place = "" if end is None else encode_cursor(*end)
    return place if state is not None else f"{at}:{place}"


def served_by(worker: WorkerInfo) -> list[str]:
    queues = worker.facts.get("queues", [])
    return queues if isinstance(queues, list) else []
