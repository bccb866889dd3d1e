"""What a worker tells of itself and of its runs: its record, events, a line in the log for each."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
from collections.abc import Sequence

from holdfast._core.capacity import Capacity
from holdfast._core.events import EventKind
from holdfast._core.jobs import Complete, Fail, Release, RetrySettlement
from holdfast._core.replies import WorkerFacts
from holdfast._core.retry_policy import decode_error
from holdfast._core.text import printable
from holdfast._worker.executor import RunEvent
from holdfast._worker.settler import PendingSettlement
from holdfast.version import VERSION

jobs_log = logging.getLogger("holdfast.jobs")
"""One line for each thing that happens to a job."""
MAX_NAMED_BYTES = 48_000
"""Of the queues that a worker serves, so much is in its record."""


def default_worker_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def facts_of(executor: str, fleet: Capacity) -> WorkerFacts:
    """The record of a worker in this process."""
    return {
        "queues": _as_many_as_fit(fleet.queues),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": VERSION,
        "executor": executor,
        "capacity": fleet.capacity,
        "used": fleet.used,
        "running": fleet.runs,
    }


def _as_many_as_fit(names: Sequence[str]) -> list[str]:
    """The names that a worker's record has room for."""
    sizes = itertools.accumulate(len(name) + 4 for name in names)
    return [name for name, size in zip(names, sizes, strict=True) if size <= MAX_NAMED_BYTES]


def log_event(event: RunEvent, worker: str) -> None:
    """One line, without the payload."""
    said = "" if event.error is None else f": {printable(str(event.error))[:300]}"
    jobs_log.log(
        logging.WARNING if event.kind in (EventKind.FAILED, EventKind.STALLED, EventKind.TIMED_OUT) else logging.INFO,
        "%s %s of %s, attempt %d, %.3f s%s",
        *(event.kind, printable(event.id), event.queue, event.attempt, event.seconds, said),
        extra={
            "facts": {
                "event": event.kind,
                "queue": event.queue,
                "id": event.id,
                "attempt": event.attempt,
                "seconds": round(event.seconds, 6),
                "worker": worker,
                **({} if event.error is None else {"error": event.error.type, "kind": event.error.kind}),
            }
        },
    )


def event_of(queue: str, outcome: PendingSettlement, seconds: float) -> RunEvent:
    kind = EventKind.RELEASED
    error: bytes | None = None
    match outcome.settlement:
        case Complete():
            kind = EventKind.COMPLETED
        case Fail(error=error):
            kind = EventKind.FAILED
        case RetrySettlement(error=error, counts=counts):
            kind = {"retries": EventKind.RETRIED, "stalls": EventKind.STALLED, "timeouts": EventKind.TIMED_OUT}[counts]
        case Release():
            pass
    return RunEvent(
        kind=kind,
        queue=queue,
        id=outcome.job.id,
        attempt=outcome.job.attempts,
        seconds=seconds,
        error=None if error is None else decode_error(error),
    )
