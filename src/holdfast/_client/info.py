"""The stored state of a job, as callers see it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from holdfast._client.session import Session
from holdfast._core.extension import headers_in
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Job, State
from holdfast._core.options import from_at
from holdfast.errors import JobError

COPIED = ("id", "state", "generation", "attempts", "retries", "stalls", "timeouts", "worker", "deferred")
"""Fields of a record that `JobInfo` has unchanged."""


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of a job."""

    queue: str
    id: str
    state: State
    generation: int
    payload: Any
    """The decoded payload; bytes if this app cannot decode it. None if the job has completed, and in lists."""
    priority: int
    run_at: datetime
    created_at: datetime
    started_at: datetime | None
    """Start of the present run, or of the run that ended the job. None before a first run and between two runs."""
    finished_at: datetime | None
    duration: float | None
    """Length of the run that ended the job, in seconds. None while the job is live, and if no run ended it."""
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    worker: str | None
    """The worker of the run that `started_at` belongs to. A default name begins with its host."""
    progress: Any
    result: Any
    error: JobError | None
    headers: dict[str, str]
    deferred: bool
    """Whether another request waits for the present run to end."""


def info_of(session: Session, queue: str, job: Job) -> JobInfo:
    decode, outcome = session.codecs.decode_or_leave, job.outcome
    error = job.error if outcome is None else outcome.error
    started_at, ended_at = job.started_at, None if outcome is None else outcome.ended_at
    return JobInfo(
        queue=queue,
        payload=decode(job.work.payload, job.work.codec),
        priority=job.work.priority,
        run_at=from_at(job.run_at),
        created_at=from_at(job.created_at),
        started_at=None if started_at is None else from_at(started_at),
        finished_at=None if ended_at is None else from_at(ended_at),
        duration=None if started_at is None or ended_at is None else max(0, ended_at - started_at) / 1e6,
        progress=decode(None if job.run is None else job.run.progress, "json"),
        result=None if outcome is None else decode(outcome.result, outcome.codec),
        error=None if error is None else decode_error(error),
        headers=headers_in(job.work.extension),
        **{name: getattr(job, name) for name in COPIED},
    )
