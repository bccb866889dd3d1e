"""Holdfast: a reliable job queue for Python, on Redis or Valkey or on one SQLite file."""

from holdfast.app import Holdfast
from holdfast.arguments import content_id
from holdfast.connection import Bound
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
from holdfast.events import Event, Kind
from holdfast.execution import CurrentJob, Execution, Failure, current_job
from holdfast.jobs import Cancelled, Kept, Placed, State, Update
from holdfast.lease import Lease
from holdfast.queue import JobInfo, Queue, Stats
from holdfast.runs import RunEvent
from holdfast.task import Handle, Task
from holdfast.worker import Worker

__all__ = [
    "Bound",
    "Cancelled",
    "CurrentJob",
    "DuplicateJob",
    "Event",
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
    "Kept",
    "Kind",
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
