"""Every error that Holdfast raises.

Expected results are values (`Placed`, `CancelResult`, …); an error is for what a caller cannot plan for.
Each message says what is wrong and what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

__all__ = [
    "DuplicateJob",
    "HoldfastError",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobForgotten",
    "JobNotFound",
    "LayoutTooNew",
    "NotOpen",
    "OptionError",
    "PayloadRejected",
    "PermanentError",
    "Retry",
    "StorageFull",
    "StorageUnavailable",
    "WaitTimeout",
    "WorkerStopped",
]

ErrorKind = Literal["permanent", "retriable", "stall", "timeout", "expired"]


class JobError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of a run as data. It is stored with the job, and fail handlers receive it."""

    type: str
    """Name of the exception's class."""
    message: str
    kind: ErrorKind = "retriable"
    attempts: int = 0
    """Number of runs that were started before the job failed; 0 in the error of a job that has not failed."""
    traceback: str = ""
    details: Any = None
    """Attribute `details` of the exception, if it has one that can be encoded as JSON."""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class HoldfastError(Exception):
    """Base class of every error that Holdfast raises."""


class OptionError(HoldfastError, ValueError):
    """An option, a name, an id or a URL is not valid. Nothing was changed."""


class PayloadRejected(HoldfastError, ValueError):
    """A payload, a result or an error record is too large or of the wrong type. Nothing was changed."""


class DuplicateJob(HoldfastError):
    """The id of a request with `on_conflict="raise"` exists: its job is live, or completed and remembered."""

    def __init__(self, message: str, *, ids: Sequence[str] = (), handles: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.ids = list(ids)
        """The ids that were refused."""
        self.handles = list(handles)
        """A `Handle` for each other request of the same `enqueue_many` or `enqueue_in`, in order: these were stored."""

    def __reduce__(self) -> Any:
        return functools.partial(type(self), ids=self.ids), self.args


class JobNotFound(HoldfastError):
    """The job that the call names does not exist."""


class WaitTimeout(HoldfastError, TimeoutError):
    """The job did not end within the caller's `wait`. The job continues."""


class JobFailed(HoldfastError):
    """The awaited job failed and will not run again; `error` is the cause as data."""

    def __init__(self, message: str, *, error: JobError) -> None:
        super().__init__(message)
        self.error = error

    def __reduce__(self) -> Any:
        return functools.partial(type(self), error=self.error), self.args

    @property
    def attempts(self) -> int:
        """Number of runs that were started."""
        return self.error.attempts

    @property
    def kind(self) -> ErrorKind:
        """`permanent`, `retriable` (its retries are used up), `stall`, `timeout` or `expired`."""
        return self.error.kind


class JobCancelled(HoldfastError):
    """The awaited request was cancelled before it completed."""


class JobForgotten(HoldfastError):
    """The record of the awaited job does not exist any more, so its outcome is not known. The message says why that
    may be: mostly, its `result_ttl` is over."""


class StorageUnavailable(HoldfastError):
    """The storage could not be opened or reached, or did not answer in time."""


class NotOpen(HoldfastError):
    """The app was used outside `async with app`, on another event loop, or by a blocking call inside an event loop."""


class WorkerStopped(HoldfastError):
    """The worker was evicted or failed, so it serves no queues any more. Its program did not stop it."""


class StorageFull(HoldfastError):
    """The storage has no space for new jobs. On Redis and Valkey the other operations still work. On SQLite only reads
    do; workers continue when there is space."""


class LayoutTooNew(HoldfastError):
    """The data was written by a newer version of Holdfast, in a layout that this version cannot read."""


class Retry(Exception):
    """Raise this in a handler to run the job again after `delay` or at `at`. The run counts as a retry.

    >>> raise Retry(delay=30)
    """

    def __init__(
        self, message: str = "", *, delay: float | timedelta | None = None, at: datetime | None = None
    ) -> None:
        super().__init__(message or "asked to run again")
        if delay is not None and at is not None:
            raise OptionError("delay and at of Retry are mutually exclusive: pass only one")
        self.delay = delay
        self.at = at


class PermanentError(Exception):
    """Raise this in a handler when another run would not help: the job fails without a retry."""
