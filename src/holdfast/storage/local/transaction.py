"""The unit of work of one atomic step on one queue."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast._core import lifecycle
from holdfast._core.events import ENDS, Event, EventKind
from holdfast._core.jobs import Job, State
from holdfast.storage.local.table import Change, QueueMeta, Table


class QueueTransaction:
    """The records of one queue during one step: read once, changed by the lifecycle, written once."""

    def __init__(self, table: Table, queue: str, meta: QueueMeta, wall: int) -> None:
        self.table = table
        self.queue = queue
        self.meta = meta
        self.time = msgspec.structs.replace(meta.time)
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
        """Record the change and the events of a lifecycle step, and return the new record."""
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
            jobs = self.table.expired(self.queue, self.now, limit)
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
        counts = self.meta.counts
        if not (counts.get(State.COMPLETED) or counts.get(State.FAILED) or counts.get(State.CANCELLED)):
            return 0
        jobs = self.table.forgettable(self.queue, self.now, limit)
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
