"""The replies of the verbs of a storage. The values in them are in jobs.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    FAILED = "failed"
    """The id has failed, and its task has `remember_failures`."""


class Enqueued(Value, frozen=True):
    """The reply to one request. `generation` is the one that a waiter waits for."""

    id: str
    placed: Placed | None
    """None if neither the request nor the record has a payload. Nothing was changed then."""
    generation: int = 0
    state: State | None = None
    """State of the record before the request; None if there was no record."""
    outcome: Outcome | None = None
    """The remembered outcome, with `Placed.COMPLETED` and `Placed.FAILED`."""


class Claim(Value, frozen=True):
    """Jobs to run now, each with its lease, and the time of the next claim. All times are queue time."""

    jobs: list[Job]
    now: int
    next_run_at: int | None
    """When the earliest waiting job is due. It is not in the future if more jobs can be claimed now."""
    next_sweep_at: int | None
    """When the next lease may have to be taken back by a sweep."""
    paused: bool = False


class SettleResult(StrEnum):
    """What a settlement did."""

    OK = "ok"
    LOST = "lost"
    """The caller did not hold the lease any more. Nothing was changed."""


class Extended(Value, frozen=True):
    """The named leases that are lost, and those whose job was asked to stop."""

    lost: list[LeaseRef]
    cancel_asked: list[LeaseRef]


class CancelResult(StrEnum):
    """What a cancel did. Truthy only if the job will certainly not run (again)."""

    CANCELLED = "cancelled"
    ASKED = "asked"
    """The job runs. Its worker receives the cancel request with its next heartbeat."""
    FINISHED = "finished"
    MISSING = "missing"

    def __bool__(self) -> bool:
        return self is CancelResult.CANCELLED


class KeepResult(StrEnum):
    """What a keep did."""

    KEPT = "kept"
    LIVE = "live"
    """The job has not ended. The time counts from its end, or with `at_least` from now."""
    MISSING = "missing"


class Page(Value, frozen=True):
    """Some jobs, without payloads and results, and without errors, progress and extension entries of more than 4 KiB.
    `after` continues the scan; None at the end."""

    jobs: list[Job]
    after: str | None


class Swept(Value, frozen=True):
    overdue: list[str]
    """Ids of jobs whose lease is past its deadline. Their workers have another half of the lease to extend it."""
    stalled: list[str]
    forgotten: int
    more: bool
    """The limit of one sweep was reached: call it again."""
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
    expired: int = 0
    """Finished records past their forget time that no sweep has deleted yet. No other count has them."""
    oldest_ready_ms: int = 0
    paused: bool = False
    reason: str = ""
    workers: list[str] = msgspec.field(default_factory=list[str])
    """Names of the live workers that serve this queue."""
    totals: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """How often each event has happened since the queue was created. A rate is the difference of two readings."""
    problem: str = ""
    """Why the queue has no numbers here: its metadata cannot be read. Empty otherwise."""


WorkerFacts = dict[str, str | int | list[str]]


class WorkerInfo(Value, frozen=True):
    worker: str
    facts: WorkerFacts
    beat_at: int
    expires_at: int
    evict_asked: bool


def workers_by_queue(workers: Iterable[WorkerInfo]) -> Mapping[str, list[str]]:
    """Return the names of the workers that serve each queue."""
    serving: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        queues = worker.facts.get("queues")
        for queue in queues if isinstance(queues, list) else ():
            serving[queue].append(worker.worker)
    return serving


class Snapshot(Value, frozen=True):
    now: int
    queues: list[QueueStats]
    workers: list[WorkerInfo]

    def workers_of(self, queue: str) -> list[str]:
        """Names of the live workers that serve a queue, which need not exist yet."""
        for stats in self.queues:
            if stats.queue == queue:
                return stats.workers
        served = ((worker.worker, worker.facts.get("queues")) for worker in self.workers)
        return [name for name, queues in served if isinstance(queues, list) and queue in queues]


class StorageInfo(Value, frozen=True):
    """Description of a storage for operators."""

    name: str
    """Kind and place of the storage, without secrets."""
    now: int
    keeps: str
    """What survives a kill of the process or the server, and a power cut."""
    facts: dict[str, str]
    warnings: list[str]
    """Settings that an operator should change."""


class WorkerCommands(Value, frozen=True):
    """Commands for a worker: the reply to its announcement."""

    evict: bool


class Problem(Value, frozen=True):
    """A broken invariant. docs/development/invariants.md lists the kinds."""

    kind: str
    queue: str
    id: str
    detail: str


class Repaired(Value, frozen=True):
    """One step of an audit or a repair; `cursor` continues, None at the end."""

    problems: list[Problem]
    checked: int
    cursor: str | None
