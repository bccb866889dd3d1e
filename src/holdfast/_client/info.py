"""What a queue and its jobs look like to users: `JobInfo` and `Stats`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from holdfast._core.codec import Codecs
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Job, State
from holdfast._core.options import from_at
from holdfast._core.replies import QueueStats
from holdfast.errors import JobError


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is stored now."""

    queue: str
    id: str
    state: State
    generation: int
    payload: Any
    """Decoded; bytes if this app cannot decode it. None once the job has completed, and in lists."""
    priority: int
    run_at: datetime
    created_at: datetime
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    worker: str | None
    progress: Any
    result: Any
    error: JobError | None
    deferred: bool
    """Another request waits for the present run to end."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one queue."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    retrying: int = 0
    deferred: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    oldest_ready_seconds: float = 0.0
    paused: bool = False
    reason: str = ""
    workers: list[str] = []
    totals: dict[str, int] = {}
    """How often each event has happened since the queue was created."""


def job_info(queue: str, job: Job, codecs: Codecs) -> JobInfo:
    """A record as users see it."""
    decode = codecs.decode_or_leave
    outcome = job.outcome
    error = job.error if outcome is None else outcome.error
    return JobInfo(
        queue=queue,
        id=job.id,
        state=job.state,
        generation=job.generation,
        payload=decode(job.work.payload, job.work.codec),
        priority=job.priority,
        run_at=from_at(job.run_at),
        created_at=from_at(job.created_at),
        attempts=job.attempts,
        retries=job.retries,
        stalls=job.stalls,
        timeouts=job.timeouts,
        worker=job.worker,
        progress=decode(None if job.run is None else job.run.progress, "json"),
        result=None if outcome is None else decode(outcome.result, outcome.codec),
        error=None if error is None else decode_error(error),
        deferred=job.deferred,
    )


def queue_stats(stored: QueueStats) -> Stats:
    """The counts of a queue as users see them."""
    counts = {name: getattr(stored, name) for name in Stats.__struct_fields__ if hasattr(stored, name)}
    return Stats(oldest_ready_seconds=stored.oldest_ready_ms / 1000, **counts)
