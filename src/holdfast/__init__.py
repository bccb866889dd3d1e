"""Holdfast: a reliable job queue for Python, on Redis or Valkey or on one SQLite file."""

# The first import: it refuses platforms on which Holdfast cannot work.
from holdfast._core import platform as _platform  # noqa: F401 # pyright: ignore[reportUnusedImport]

# isort: split
from holdfast import errors
from holdfast._client.app import Holdfast
from holdfast._client.info import JobInfo
from holdfast._client.lease import Lease
from holdfast._client.queue import Queue
from holdfast._client.request import BoundRequest, Handle
from holdfast._client.stats import AppStats, LiveWorker, Stats
from holdfast._client.task import Task
from holdfast._core.arguments import content_id
from holdfast._core.events import Event, EventKind
from holdfast._core.jobs import State, Update
from holdfast._core.replies import CancelResult, KeepResult, Placed
from holdfast._worker.current_job import CurrentJob, current_job
from holdfast._worker.handler import Execution, Failure
from holdfast._worker.logs import job_log_filter
from holdfast._worker.telemetry import RunEvent
from holdfast._worker.worker import Worker
from holdfast.errors import *  # noqa: F403 -- exactly its `__all__`

__all__ = [
    "AppStats",
    "BoundRequest",
    "CancelResult",
    "CurrentJob",
    "Event",
    "EventKind",
    "Execution",
    "Failure",
    "Handle",
    "Holdfast",
    "JobInfo",
    "KeepResult",
    "Lease",
    "LiveWorker",
    "Placed",
    "Queue",
    "RunEvent",
    "State",
    "Stats",
    "Task",
    "Update",
    "Worker",
    "content_id",
    "current_job",
    "job_log_filter",
]
__all__ += errors.__all__
