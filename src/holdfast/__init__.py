"""Holdfast: a reliable job queue for Python, on Redis or Valkey or on one SQLite file."""

# The first import: it refuses platforms on which Holdfast cannot work.
from holdfast._core import platform as _platform  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from holdfast._client.app import Holdfast
from holdfast._client.lease import Lease
from holdfast._client.queue import JobInfo, Queue, Stats
from holdfast._client.request import BoundRequest, Handle
from holdfast._client.task import Task
from holdfast._core.arguments import content_id
from holdfast._core.events import Event, EventKind
from holdfast._core.jobs import State, Update
from holdfast._core.replies import CancelResult, KeepResult, Placed
from holdfast._worker.handler import CurrentJob, Execution, Failure, current_job
from holdfast._worker.telemetry import RunEvent
from holdfast._worker.worker import Worker
from holdfast.errors import (
    DuplicateJob,
    HoldfastError,
    JobCancelled,
    JobError,
    JobFailed,
    JobForgotten,
    JobNotFound,
    LayoutTooNew,
    NotOpen,
    OptionError,
    PayloadRejected,
    PermanentError,
    Retry,
    StorageFull,
    StorageUnavailable,
    WaitTimeout,
)

__all__ = [
    "BoundRequest",
    "CancelResult",
    "CurrentJob",
    "DuplicateJob",
    "Event",
    "EventKind",
    "Execution",
    "Failure",
    "Handle",
    "Holdfast",
    "HoldfastError",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobForgotten",
    "JobInfo",
    "JobNotFound",
    "KeepResult",
    "LayoutTooNew",
    "Lease",
    "NotOpen",
    "OptionError",
    "PayloadRejected",
    "PermanentError",
    "Placed",
    "Queue",
    "Retry",
    "RunEvent",
    "State",
    "Stats",
    "StorageFull",
    "StorageUnavailable",
    "Task",
    "Update",
    "WaitTimeout",
    "Worker",
    "content_id",
    "current_job",
]
