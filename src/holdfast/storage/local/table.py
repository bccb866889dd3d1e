"""What the verbs need of a storage of records: the `Table` protocol, the transaction that collects the changes of one
step, and the form in which readers get records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import NOTE_AFTER_US, QueueTime
from holdfast._core.events import ENDS, Event, EventKind
from holdfast._core.extension import Extension
from holdfast._core.jobs import Job, Outcome, State, Work
from holdfast._core.replies import WorkerInfo
from holdfast.errors import OptionError
from holdfast.storage.validation import MAX_ITEMS, decode_cursor, encode_cursor

MAX_LISTED_BYTES = 4096
"""A longer error, progress or extension entry is left out of a list; `get` returns it."""
VIEWS = ("retrying", "deferred")
"""Names under which records are counted in addition to their state."""

BRIEF = "brief"
"""The index of completed records whose outcome is brief. All other indexes have the names of states."""

SortKey = tuple[int, ...]
"""The key of a record in its index; the id breaks ties."""
Place = tuple[SortKey, bytes]
"""A place in an index: key and id. In the order of all records by id, the key is empty."""

NEVER = 2**53 - 1
"""The highest point in time."""


class QueueMeta(msgspec.Struct):
    """The metadata of a queue: its time, the number of records by state, the number of events by kind, its pause."""

    time: QueueTime = msgspec.field(default_factory=QueueTime)
    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    totals: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    paused: bool = False
    reason: str = ""
    forget_at: int = 0
    """The earliest forget time of a record. It may be too early, never too late; 0 before a sweep has looked."""


class Change(msgspec.Struct, gc=False):
    """A record before and after a step; None where there is none."""

    id: str
    before: Job | None
    after: Job | None


class Found(msgspec.Struct):
    """A record as the audit finds it. `job` is None if it cannot be read, `index` if it is in no index."""

    id: str
    job: Job | None
    payload: bytes | None
    index: str | None
    key: SortKey


class Table(Protocol):
    """The records of a namespace, inside one atomic step.

    A step calls `meta` or `open` of a queue first. To all reading methods, a queue that does not exist is empty.
    A record that cannot be read, or that is in the index of another state, is returned as `lifecycle.damaged`. When
    such a record was live and is written, `write` counts it as failed in the totals.
    `next_until` returns the first time later than `after` in an index, which is not that of waiting records.
    `meta` raises QueueDamaged if the metadata cannot be read. `rebuild_meta` returns whether that is the case, and then
    makes the metadata from the records, unless this is a dry run. `add` writes new jobs without reading: it returns
    False and changes nothing if an id has a record or is listed twice. `due` returns at most `each` jobs of a priority.
    """

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
    def upto(self, queue: str, index: str, now: int, limit: int) -> list[Job]: ...
    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]: ...
    def past(self, queue: str, index: str, now: int) -> int: ...
    def next_until(self, queue: str, index: str, after: int = 0) -> int | None: ...
    def page(self, queue: str, index: str, after: Place | None, limit: int) -> tuple[list[Job], Place | None]: ...
    def workers(self) -> list[WorkerInfo]: ...
    def write_worker(self, worker: str, stats: WorkerInfo | None) -> None: ...
    def note(self, name: str, now: int) -> bytes | None: ...
    def write_note(self, name: str, value: bytes, forget_at: int) -> None: ...
    def forget_notes(self, now: int) -> None: ...
    def inspect(self, queue: str, after: Place | None, limit: int) -> list[Found]: ...
    def tally(self, queue: str) -> dict[str, int]: ...
    def check_indexes(self, queue: str) -> list[str]: ...
    def rebuild_indexes(self, queue: str) -> None: ...


def index_of(job: Job) -> tuple[str, SortKey]:
    """Return the one index that a record is in, and its key there. No other Python code decides this."""
    if job.outcome is not None:
        return index_name(job), (job.outcome.forget_at,)
    if job.run is not None:
        return State.RUNNING, (job.run.until_at,)
    return State.WAITING, (-job.work.priority, job.run_at, job.arrival)


def index_name(job: Job) -> str:
    """Return the name of the index that a record is in, by which records are counted too."""
    outcome = job.outcome
    if outcome is not None:
        return BRIEF if outcome.brief else outcome.state
    return State.WAITING if job.run is None else State.RUNNING


def indexes_of(state: State) -> list[str]:
    """Return the indexes with the records of a state, in the order in which they are listed."""
    return [state, BRIEF] if state is State.COMPLETED else [state]


def newest_stamp(job: Job) -> int:
    run = job.run
    ended = [outcome for outcome in (job.outcome, job.previous) if outcome is not None]
    outcomes = [stamp for outcome in ended for stamp in (outcome.generation, outcome.started_at)]
    fences = [] if run is None else [run.fence]
    following = [] if run is None or run.next is None else [run.next.generation, run.next.arrival]
    return max(job.generation, job.arrival, *outcomes, *fences, *following)


def view_of(job: Job) -> str | None:
    if job.run is not None:
        return "deferred" if job.run.next is not None else None
    return "retrying" if job.retries > 0 and job.outcome is None else None


def count(meta: QueueMeta, state: str, view: str | None, by: int) -> None:
    """Add `by` records to the counts: 1 for a new record, -1 for one that is gone."""
    meta.counts[state] = meta.counts.get(state, 0) + by
    if view is not None:
        meta.counts[view] = meta.counts.get(view, 0) + by


FINISHED_INDEXES = (State.COMPLETED, State.FAILED, State.CANCELLED, BRIEF)


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
            self._events.append(Event(kind, self.queue, id, generation, 0 if after is None else after.run_at))
        return after

    def add(self, jobs: Sequence[Job]) -> bool:
        """Write new jobs without reading first. Return False, and change nothing, if a record of an id exists."""
        if not self.table.add(self.queue, jobs):
            return False
        self._events += [Event(EventKind.ENQUEUED, self.queue, job.id, job.generation, job.run_at) for job in jobs]
        return True

    def sweep(self, limit: int, worker: str | None = None) -> tuple[list[str], list[str], bool]:
        """Mark or take back expired leases. Return the ids now overdue, the ids taken back, and whether to repeat."""
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

    def to_forget(self, limit: int, surplus: int = 0) -> list[Job]:
        """Return records past their forget time, at most `limit`, and the oldest `surplus` brief ones."""
        jobs: list[Job] = []
        if self.now < self.meta.forget_at and surplus <= 0:
            return jobs
        for index in FINISHED_INDEXES:
            found: list[Job] = []
            if self.meta.counts.get(index) and len(jobs) < limit:
                found = self.table.upto(self.queue, index, self.now, limit - len(jobs))
            if index == BRIEF and len(found) < surplus:
                found, _ = self.table.page(self.queue, index, None, surplus)
            jobs += found
        return jobs

    def sweep_forgotten(self, limit: int, adding: int = 0) -> int:
        """Delete records past their forget time, at most `limit`, and the oldest brief ones if the queue would have
        more than `MAX_BRIEF` with those that a step is `adding`. Return how many were met."""
        surplus = self.meta.counts.get(BRIEF, 0) + adding - lifecycle.MAX_BRIEF if adding else 0
        jobs = self.to_forget(limit, surplus)
        for job in jobs:
            if lifecycle.forgotten(job, self.now) or index_name(job) == BRIEF:
                self.record_change(job.id, job, lifecycle.Step(None, (EventKind.FORGOTTEN,)))
            else:
                self.rewrite(job, job)
        if self.meta.forget_at <= self.now and len(jobs) < limit:
            counted = [index for index in FINISHED_INDEXES if self.meta.counts.get(index)]
            times = (self.table.next_until(self.queue, index, self.now) for index in counted)
            self.meta.forget_at = min((at for at in times if at is not None), default=NEVER)
        return len(jobs)

    def rewrite(self, before: Job, after: Job) -> None:
        """Write a record without an event. A damaged record is read as failed, so writing it moves it to the failed."""
        self._changes[before.id] = Change(before.id, before, after)

    def close(self) -> None:
        """Write all changes. A step without changes writes nothing but the time of the queue, if that `needs_note`."""
        if self._changes or self._events:
            self.meta.time = self.time
            totals = self.meta.totals
            for event in self._events:
                totals[event.kind] = totals.get(event.kind, 0) + 1
            for change in self._changes.values():
                if change.after is not None and (outcome := change.after.outcome) is not None:
                    self.meta.forget_at = min(self.meta.forget_at, outcome.forget_at)
            self.table.write(self.queue, list(self._changes.values()), self._events)
        elif self.needs_note:
            self.meta.time = self.time
            self.table.write_meta(self.queue)

    @property
    def needs_note(self) -> bool:
        """Whether the clock has stepped back since the queue's time was noted, or that time is a minute old."""
        noted = self.meta.time
        return self.time.skew != noted.skew or 0 < noted.last_at <= self.now - NOTE_AFTER_US


# How records look to their readers


def as_read(job: Job, time: QueueTime) -> Job:
    """Return a record for a reader: its times in wall time, and no previous outcome past its forget time. Stamps
    (generation, arrival, fence) stay as they are, because they identify."""
    job = lifecycle.tidy(job, time.last_at)
    if not time.skew:
        return job
    run, skew = job.run, time.skew
    if run is not None:
        following = run.next and replace(run.next, run_at=run.next.wall_at or run.next.run_at - skew)
        run = replace(run, until_at=run.until_at - skew, next=following)
    return replace(
        job,
        run_at=job.wall_at or job.run_at - skew,
        run=run,
        outcome=job.outcome and _outcome_as_read(job.outcome, skew),
        previous=job.previous and _outcome_as_read(job.previous, skew),
        keep_until_at=max(job.keep_until_at - skew, 0),
        skew=skew,
    )


def _outcome_as_read(outcome: Outcome, skew: int) -> Outcome:
    """Return an outcome with its times in wall time; 0 stays the value for none."""
    return replace(
        outcome,
        ended_at=outcome.ended_at - skew,
        forget_at=outcome.forget_at - skew,
        dedup_at=max(outcome.dedup_at - skew, 0),
        started_at=max(outcome.started_at - skew, 0),
    )


def listed(jobs: Sequence[Job], time: QueueTime) -> list[Job]:
    """Return records for `scan`: none past its forget time, and without the bytes that could make a page large."""
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


def read_cursor(state: State | None, after: str | None) -> tuple[list[str], Place | None]:
    """Return the indexes to list, one after the other, and the place in the first of them after which to begin. A
    cursor of a list of several indexes names its index."""
    indexes = _listed_indexes(state)
    if after is None:
        return indexes, None
    if len(indexes) > 1:
        name, _, place = after.partition(":") if isinstance(after, str) else ("", "", "")
        if name not in indexes:
            kind = type(after).__name__
            raise OptionError(
                f"{after!r:.80} ({kind}) is not a cursor of a list of {state or 'all states'}:"
                " pass one that it returned"
            )
        indexes, after = indexes[indexes.index(name) :], place
        if not after:
            return indexes, None
    return indexes, decode_cursor(after, 3 if indexes[0] == State.WAITING else 1)


def _listed_indexes(state: State | None) -> list[str]:
    return [index for one in (State if state is None else [state]) for index in indexes_of(one)]


def write_cursor(state: State | None, index: str, end: Place | None) -> str:
    """Return a cursor after a place in an index; without a place, at its beginning."""
    place = "" if end is None else encode_cursor(*end)
    return f"{index}:{place}" if len(_listed_indexes(state)) > 1 else place
