"""Every error that Holdfast raises.

Expected results are values (`Placed`, `Settled`, …); an error is for what a caller cannot plan for.
Each message says what was tried and what to do next.
"""

from __future__ import annotations


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

    def __init__(self, message: str, *, error: bytes | None = None, attempts: int = 0, kind: str = "retriable") -> None:
        super().__init__(message)
        self.error = error
        self.attempts = attempts
        self.kind = kind


class JobCancelled(HoldfastError):
    """The awaited request was cancelled before it completed."""


class JobForgotten(HoldfastError):
    """The awaited job's record is gone, and its outcome with it."""


class StorageUnavailable(HoldfastError):
    """The storage could not be opened or reached, or did not answer in time."""


class StorageFull(HoldfastError):
    """The storage has no room for new jobs. Everything but enqueue still works."""


class LayoutTooNew(HoldfastError):
    """The data was written by a newer Holdfast whose layout this one cannot read."""
