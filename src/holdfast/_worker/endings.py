"""How a run ended, as a value: its exception, its cancellation or its timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast._core import failure
from holdfast._core.arguments import SignatureMismatch
from holdfast._core.failure import error_from_exception
from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, Raised, RetryRules, Stopped, TimedOut
from holdfast.errors import JobError, Retry

if TYPE_CHECKING:
    from holdfast._worker.current_job import CurrentJob


def cancelled(current: CurrentJob) -> Ended:
    """How a run ended that was cancelled, by the worker or by the handler itself."""
    if current.stopping is None:
        return Raised(JobError(type="CancelledError", message="the handler cancelled itself"))
    if current.timed_out is not None:
        return current.timed_out
    assert current.stopping != "timeout"
    return Stopped(current.stopping)


def timed_out(limit_ms: int | None, stack: str) -> TimedOut:
    """How a run ends whose time is over. `stack` is what it did then, if that is known."""
    limit = "its timeout" if limit_ms is None else f"its timeout of {limit_ms / 1000:g} s"
    shown = f"Stack of the run when its time was over (most recent call last):\n{stack}" if stack else ""
    message = f"the run took longer than {limit}"
    return TimedOut(JobError(type="TimeoutError", kind="timeout", message=message, traceback=shown))


def raised(error: BaseException, current: CurrentJob, job: Job, rules: RetryRules) -> Ended:
    """How a run ended that raised an exception."""
    if current.stopping == "timeout":
        return TimedOut(error_from_exception(error, "timeout"))
    if isinstance(error, SignatureMismatch):
        return Raised(error_from_exception(error, "retriable"))
    permanent = rules.is_permanent(error)
    if current.stopping is not None and not permanent and not isinstance(error, Retry):
        return Stopped(current.stopping)  # The run was stopped, and raised while it ended.
    stored = error_from_exception(error, "permanent" if permanent else "retriable")
    try:
        delay_ms, run_at = failure.retry_time(error)
        if not permanent and delay_ms is None and run_at is None:
            delay_ms = rules.delay_ms(job, error)
    except Exception as wrong:  # A wrong time, or the backoff function raised.
        return Raised(replace(stored, message=f"{stored.message} (and {wrong})"[: failure.MAX_MESSAGE]))
    return Raised(stored, delay_ms, run_at)
