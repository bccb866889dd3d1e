"""Every error that Holdfast raises.

Expected results are values (`Placed`, `SettleResult`, …); an error is for what a caller cannot plan for.
Each message says what was tried and what to do next.
"""

from __future__ import annotations

import functools
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
]

ErrorKind = Literal["permanent", "retriable", "stall", "timeout"]


class JobError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a run did not complete, as data: what is stored, shown, and handed to fail handlers."""

    type: str
    """The exception's class, by name."""
    message: str
    kind: ErrorKind = "retriable"
    attempts: int = 0
    """Runs that had been started when the job was given up; 0 while it is not."""
    traceback: str = ""
    details: Any = None
    """The exception's own `details`, if it has some that JSON can carry."""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


class HoldfastError(Exception):
    """The base of every error raised by Holdfast."""


class OptionError(HoldfastError, ValueError):
    """An option, a name, an id or a URL is not valid. Nothing was changed."""


class PayloadRejected(HoldfastError, ValueError):
    """A payload, a result or an error record is too large or of the wrong type. Nothing was changed."""


class DuplicateJob(HoldfastError):
    """`on_conflict="raise"` met a job that is live, or completed and remembered."""


class JobNotFound(HoldfastError):
    """The operation needs a job that is not there."""


class WaitTimeout(HoldfastError, TimeoutError):
    """The caller's `wait` ended before the job did. The job goes on."""


class JobFailed(HoldfastError):
    """The awaited job failed for good; `error` is its cause as data."""

    def __init__(self, message: str, *, error: JobError) -> None:
        super().__init__(message)
        self.error = error

    def __reduce__(self) -> Any:
        return functools.partial(type(self), error=self.error), self.args

    @property
    def attempts(self) -> int:
        """Runs that were started."""
        return self.error.attempts

    @property
    def kind(self) -> ErrorKind:
        """`permanent`, `retriable` (its retries were used up), `stall` or `timeout`."""
        return self.error.kind


class JobCancelled(HoldfastError):
    """The awaited request was cancelled before it completed."""


class JobForgotten(HoldfastError):
    """The awaited job's record is gone, and its outcome with it."""


class StorageUnavailable(HoldfastError):
    """The storage could not be opened or reached, or did not answer in time."""


class NotOpen(HoldfastError):
    """The app was used outside of `async with app`, on another event loop than its own, or blocking inside of one."""


class StorageFull(HoldfastError):
    """The storage has no room for new jobs. Everything but enqueue still works."""


class LayoutTooNew(HoldfastError):
    """The data was written by a newer Holdfast whose layout this one cannot read."""


class Retry(Exception):
    """Raise this in a handler to run again after `delay` or at `at`. It counts as a retry, and says nothing of failure.

    >>> raise Retry(delay=30)
    """

    def __init__(
        self, message: str = "", *, delay: float | timedelta | None = None, at: datetime | None = None
    ) -> None:
        super().__init__(message or "asked to run again")
        if delay is not None and at is not None:
            raise OptionError("Retry has both delay and at: give one of them")
        self.delay = delay
        self.at = at


class PermanentError(Exception):
    """Raise this in a handler when another run would not help: the job fails at once."""
