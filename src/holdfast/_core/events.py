"""Events of jobs: their kinds, and the topics that select them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from holdfast._core.jobs import Outcome, Value


class EventKind(StrEnum):
    """What can happen to a job. The totals of a queue count these, but for those in `OF_WORKERS`."""

    ENQUEUED = "enqueued"
    UPDATED = "updated"
    DEFERRED = "deferred"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CANCEL_ASKED = "cancel_asked"
    RETRIED = "retried"
    TIMED_OUT = "timed_out"
    STALLED = "stalled"
    RELEASED = "released"
    PROMOTED = "promoted"
    FORGOTTEN = "forgotten"
    PURGED = "purged"
    PROGRESS = "progress"
    DRAINED = "drained"


OF_WORKERS = frozenset({EventKind.PROGRESS, EventKind.DRAINED})
"""Events that a worker finds out and gives to `on_event` hooks. No storage counts or publishes them."""

POLL_INTERVAL_S = 1.0
"""Listeners also poll at this interval, so a lost notification delays them by at most this much."""

STARTS = frozenset({EventKind.ENQUEUED, EventKind.PROMOTED})
ENDS = frozenset({EventKind.COMPLETED, EventKind.FAILED, EventKind.CANCELLED, EventKind.PURGED})
"""Ends of a job. When no job of a queue is live, it had as many ends as starts: `audit` compares the totals."""
ENDS_A_WAIT = ENDS | {EventKind.CANCEL_ASKED, EventKind.FORGOTTEN}
RETURNS = frozenset({EventKind.RETRIED, EventKind.TIMED_OUT, EventKind.STALLED, EventKind.RELEASED})
MAKES_READY = STARTS | RETURNS | {EventKind.UPDATED}


class Event(Value, frozen=True):
    """A notification that something happened. It may be lost, repeated or late; only the record is certain."""

    kind: EventKind
    queue: str
    id: str
    generation: int
    run_at: int = 0
    """When the job is due, if the event left it waiting; else 0."""
    outcome: Outcome | None = None
    """Outcome of the generation, if the storage sends it to waiters and it is small."""

    @property
    def happened(self) -> bool:
        """Whether this describes a change. If not, it only asks the listener to read the record."""
        return self.generation != 0 or self.kind not in (EventKind.UPDATED, EventKind.CANCELLED)


class Topic(Value, frozen=True):
    """The events that a listener receives: of jobs that became ready, of jobs that ended, or all; of one id if given.

    `ends` with an id is for waiters. `wake` is for workers: like `ready`, but a storage may notify only one of all
    listeners, and may omit the job.
    """

    queue: str
    only: Literal["ready", "ends", "all", "wake"] = "all"
    id: str | None = None

    def covers(self, event: Event) -> bool:
        if event.queue != self.queue or (self.id is not None and event.id != self.id):
            return False
        if self.only in ("ready", "wake"):
            return event.kind in MAKES_READY
        return self.only == "all" or event.kind in ENDS_A_WAIT
