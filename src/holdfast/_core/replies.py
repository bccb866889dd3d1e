"""What the verbs of a storage reply.

Points in time are integer microseconds and end in `_at`; lengths are integer milliseconds and end in `_ms`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast._core.jobs import Job, LeaseRef, Outcome, State, Value


class Placed(StrEnum):
    """What an enqueue did."""

    NEW = "new"
    UPDATED = "updated"
    DEFERRED = "deferred"
    DUPLICATE = "duplicate"
    COMPLETED = "completed"


class Enqueued(Value, frozen=True):
    """The reply to one request. `generation` is the one that its caller waits for."""

    id: str
    placed: Placed | None
    """None: the request brought no payload and the record had none to lend. Nothing was changed."""
    generation: int = 0
    state: State | None = None
    """The state that the request met, where there was a record."""
    outcome: Outcome | None = None
    """The cached outcome, with `Placed.COMPLETED`."""


class Claim(Value, frozen=True):
    """Jobs to run now, each with its lease, and when it is worth asking again. All times are the queue's."""

    jobs: list[Job]
    now: int
    next_run_at: int | None
    """The earliest waiting job's time: in the past or present if there is more to claim at once."""
    next_sweep_at: int | None
    """When the next lease may have to be taken back."""
    paused: bool = False


class SettleResult(StrEnum):
    OK = "ok"
    LOST = "lost"
    """The lease was not this caller's any more. Nothing was changed."""


class Extended(Value, frozen=True):
    """The leases among those named that are lost, and those whose job should stop."""

    lost: list[LeaseRef]
    cancel_asked: list[LeaseRef]


class CancelResult(StrEnum):
    """What a cancel did. Truthy only where the job will certainly not run (again)."""

    CANCELLED = "cancelled"
    ASKED = "asked"
    """The job runs; its worker learns of the request with its next heartbeat."""
    FINISHED = "finished"
    MISSING = "missing"

    def __bool__(self) -> bool:
        return self is CancelResult.CANCELLED


class KeepResult(StrEnum):
    KEPT = "kept"
    LIVE = "live"
    """The job has not ended; the length counts from its end (or, with `at_least`, from now)."""
    MISSING = "missing"


class Page(Value, frozen=True):
    """Some jobs, without payloads and results, and without errors, progress and entries of an extension of more than
    4 KiB. `after` continues; None at the end."""

    jobs: list[Job]
    after: str | None


class Swept(Value, frozen=True):
    overdue: list[str]
    """Leases seen past their deadline; their holders have half a lease to show up."""
    stalled: list[str]
    forgotten: int
    more: bool
    """The limit was reached: sweep again."""
    next_sweep_at: int | None


class QueueStats(Value, frozen=True):
    queue: str
    ready: int = 0
    scheduled: int = 0
    running: int = 0
    retrying: int = 0
    deferred: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    oldest_ready_ms: int = 0
    paused: bool = False
    reason: str = ""
    workers: list[str] = msgspec.field(default_factory=list[str])
    """Live workers that say they serve this queue."""
    totals: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """How often each event has happened, since the queue was made; rates are differences of these."""
    problem: str = ""
    """Why the queue has no numbers here: its metadata cannot be read. Empty otherwise."""


WorkerFacts = dict[str, str | int | list[str]]


class WorkerInfo(Value, frozen=True):
    worker: str
    facts: WorkerFacts
    beat_at: int
    expires_at: int
    evict_asked: bool


class Snapshot(Value, frozen=True):
    now: int
    queues: list[QueueStats]
    workers: list[WorkerInfo]


class StorageInfo(Value, frozen=True):
    """What a storage is, and what it keeps."""

    name: str
    """What it is and where, without secrets."""
    now: int
    keeps: str
    """What survives a kill, and a power cut."""
    facts: dict[str, str]
    warnings: list[str]
    """What an operator should change."""


class WorkerCommands(Value, frozen=True):
    """The commands for a worker, sent when it announces itself."""

    evict: bool


class Problem(Value, frozen=True):
    """A broken invariant. `kind` is one of the audit's list in docs/invariants.md."""

    kind: str
    queue: str
    id: str
    detail: str


class Repaired(Value, frozen=True):
    """One step of an audit or a repair; `cursor` continues, None at the end."""

    problems: list[Problem]
    checked: int
    cursor: str | None
