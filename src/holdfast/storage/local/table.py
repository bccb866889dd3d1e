"""The seam between the verbs and a storage of records: what a `Table` must offer inside one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast._core.clock import QueueTime
from holdfast._core.events import Event
from holdfast._core.jobs import Job, State
from holdfast._core.replies import WorkerInfo

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
    False if one of the ids has a record, or is there twice, and then nothing has happened."""

    def meta(self, queue: str) -> QueueMeta | None: ...
    def open(self, queue: str) -> QueueMeta: ...
    def rebuild_meta(self, queue: str, dry_run: bool) -> bool: ...
    def queues(self) -> list[str]: ...
    def load(self, queue: str, ids: Sequence[str]) -> dict[str, Job]: ...
    def add(self, queue: str, jobs: Sequence[Job]) -> bool: ...
    def write(self, queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None: ...
    def write_meta(self, queue: str) -> None: ...
    def drop(self, queue: str) -> None: ...
    def due(self, queue: str, now: int, limit: int) -> list[Job]: ...
    def heads(self, queue: str, now: int) -> list[Job]: ...
    def next_run_at(self, queue: str) -> int | None: ...
    def scheduled(self, queue: str, now: int) -> int: ...
    def expired(self, queue: str, now: int, limit: int) -> list[Job]: ...
    def held_by(self, queue: str, worker: str, limit: int) -> list[Job]: ...
    def past(self, queue: str, state: State, now: int) -> int: ...
    def next_sweep_at(self, queue: str) -> int | None: ...
    def forgettable(self, queue: str, now: int, limit: int) -> list[Job]: ...
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
    """The highest of the queue's stamps that a record has."""
    run = job.run
    outcomes = [outcome.generation for outcome in (job.outcome, job.previous) if outcome is not None]
    fences = [] if run is None else [run.fence]
    following = [] if run is None or run.next is None else [run.next.generation, run.next.arrival]
    return max(job.generation, job.arrival, *outcomes, *fences, *following)


def view_of(job: Job) -> str | None:
    """The view that a record is counted under besides its state."""
    if job.run is not None:
        return "deferred" if job.run.next is not None else None
    return "retrying" if job.retries > 0 and job.outcome is None else None


def count(meta: QueueMeta, state: str, view: str | None, by: int) -> None:
    """Count a record in (by=1) or out (by=-1)."""
    meta.counts[state] = meta.counts.get(state, 0) + by
    if view is not None:
        meta.counts[view] = meta.counts.get(view, 0) + by
