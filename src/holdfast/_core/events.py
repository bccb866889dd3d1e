"""What happens to jobs, in words: the kinds of events, and topics to hear of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Literal, Protocol

from holdfast._core.jobs import Outcome, Value


class EventKind(StrEnum):
    """What can happen to a job. A queue's totals count exactly these."""

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


POLL_INTERVAL_S = 1.0
"""Who listens looks once in so long as well: a lost hint costs no more."""

STARTS = frozenset({EventKind.ENQUEUED, EventKind.PROMOTED})
ENDS = frozenset({EventKind.COMPLETED, EventKind.FAILED, EventKind.CANCELLED, EventKind.PURGED})
"""Every start has one end, once nothing of the queue is live: `audit` checks that the totals say so."""
ENDS_A_WAIT = ENDS | {EventKind.CANCEL_ASKED, EventKind.FORGOTTEN}
RETURNS = frozenset({EventKind.RETRIED, EventKind.TIMED_OUT, EventKind.STALLED, EventKind.RELEASED})
MAKES_READY = STARTS | RETURNS | {EventKind.UPDATED}


class Event(Value, frozen=True):
    """A hint that something happened. Hints may be lost, repeated or late; the record is the truth."""

    kind: EventKind
    queue: str
    id: str
    generation: int
    run_at: int = 0
    """When the job is due, where the event left it waiting."""
    outcome: Outcome | None = None
    """What the generation ended in, where a storage tells that to whoever waits for it and it is small."""

    @property
    def happened(self) -> bool:
        """Something is known to have happened. Else it only means: look."""
        return self.generation != 0 or self.kind not in (EventKind.UPDATED, EventKind.CANCELLED)


class Topic(Value, frozen=True):
    """What to hear of: a queue's jobs that became ready, jobs that ended (or one of them), or everything.

    `ends` of one id is for those who wait for it, and who have asked for its outcome to be kept. `wake` is for workers:
    like `ready`, but of all who listen maybe only one is told, and maybe not of which job.
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


class Events(Protocol):
    """What a listener hears, one event after the other."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    async def within(self, seconds: float) -> Event | None:
        """The next event; None if there is none for so long."""
        ...

    def tell(self, hear: Callable[[Event], None]) -> None:
        """Call `hear` with each event as it comes, in place of waiting for them here."""
        ...
