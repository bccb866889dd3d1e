"""The counts of queues and the live workers, as users read them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from holdfast._core.options import from_at
from holdfast._core.replies import QueueStats, Snapshot, WorkerFacts, WorkerInfo


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one queue."""

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
    """Records past their time that are not deleted yet: the only count that has them."""
    oldest_ready_seconds: float = 0.0
    paused: bool = False
    reason: str = ""
    workers: list[str] = []
    totals: dict[str, int] = {}
    """How often each event has happened since the queue was created."""
    problem: str = ""
    """Why the queue has no numbers here: its metadata cannot be read. Empty otherwise."""


class LiveWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that has sent a heartbeat lately."""

    worker: str
    facts: WorkerFacts
    beat_at: datetime
    """Time of its last heartbeat."""
    expires_at: datetime
    """When it counts as gone, unless it sends another heartbeat."""
    evict_asked: bool


class AppStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of all queues, and the live workers."""

    now: datetime
    """Time of the storage."""
    queues: list[Stats]
    workers: list[LiveWorker]


def stats_of(found: QueueStats) -> Stats:
    fields: dict[str, Any] = {name: getattr(found, name, None) for name in Stats.__struct_fields__}
    fields["totals"] = {str(kind): count for kind, count in found.totals.items()}
    fields["oldest_ready_seconds"] = found.oldest_ready_ms / 1000
    return Stats(**fields)


def app_stats(snapshot: Snapshot) -> AppStats:
    return AppStats(
        now=from_at(snapshot.now),
        queues=[stats_of(found) for found in snapshot.queues],
        workers=[_live_worker(found) for found in snapshot.workers],
    )


def _live_worker(found: WorkerInfo) -> LiveWorker:
    return LiveWorker(
        worker=found.worker,
        facts=found.facts,
        beat_at=from_at(found.beat_at),
        expires_at=from_at(found.expires_at),
        evict_asked=found.evict_asked,
    )
