"""The job that runs here: what its handler sees of it, and what it reports while it runs."""

from __future__ import annotations

import contextvars
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import msgspec

from holdfast._core import failure
from holdfast._core.extension import headers_in
from holdfast._core.jobs import Job
from holdfast._core.options import Seconds, to_ms
from holdfast._core.retry_policy import StopReason, TimedOut
from holdfast._core.type_hooks import WITHOUT_HOOKS
from holdfast.errors import HoldfastError, PayloadRejected

failure.hide_frames_of(__file__)

MAX_PROGRESS_BYTES = 65_536

running: contextvars.ContextVar[CurrentJob] = contextvars.ContextVar("holdfast job")


class RunReporter(Protocol):
    """What takes the reports of runs, on any thread. Each names the key of its run."""

    def report_progress(self, key: Any, progress: bytes, /) -> None: ...
    def report_wait(self, key: Any, queue: str, change: int, /) -> None:
        """The run begins (1) or ends (-1) a wait for a job of a queue."""

    def report_timeout(self, key: Any, limit_ms: int, /) -> None:
        """The run asks for this much time from now on."""


class CurrentJob:
    """The run of a handler. `fence` and `attempt` protect what the run writes elsewhere against late writes."""

    __slots__ = (
        *("attempt", "fence", "generation", "headers", "id", "on_loop", "queue", "resources", "retries", "run_at"),
        *("_key", "_reporter", "stalls", "stopping", "thread", "timed_out", "timeouts", "worker"),
    )

    def __init__(self, queue: str, job: Job, key: object, reporter: RunReporter, resources: object) -> None:
        assert job.run is not None
        self.queue = queue
        self.id = job.id
        self.generation = job.generation
        self.attempt = job.attempts
        """Number of this run, 1 for the first."""
        self.fence = job.run.fence
        """Number of the lease. It rises with every lease of the queue: a later run of the job has a higher one."""
        self.retries = job.retries
        self.stalls = job.stalls
        self.timeouts = job.timeouts
        self.run_at = job.run_at
        self.worker = job.run.worker
        self.headers: dict[str, str] = headers_in(job.work.extension) if job.work.extension else {}
        """The headers of the request."""
        self.stopping: StopReason | None = None
        """Why this run should end (cancel, timeout, shutdown or lease_lost), or None. An async handler is cancelled as
        well; a sync one should check this regularly."""
        self.resources = resources
        self.on_loop = True
        """Whether the run can be cancelled now. It cannot while it is on a thread."""
        self.thread: int | None = None
        """The thread on which a function that is not async runs now."""
        self.timed_out: TimedOut | None = None
        """How the run ends if its time is over, with the stack that it had then."""
        self._key = key
        self._reporter = reporter

    def progress(self, value: object) -> None:
        """Report how far the run is, as any JSON value. It is visible in the job within about a second."""
        try:
            data = msgspec.json.encode(value, enc_hook=WITHOUT_HOOKS.encode)
        except (TypeError, ValueError, RecursionError) as error:
            raise PayloadRejected(f"progress of job {self.id!r:.80} is not a JSON value: {error}") from error
        if len(data) > MAX_PROGRESS_BYTES:
            what = f"progress of job {self.id!r:.80}"
            raise PayloadRejected(f"{what} has {len(data)} bytes: at most {MAX_PROGRESS_BYTES} are allowed")
        self._reporter.report_progress(self._key, data)

    def extend_timeout(self, seconds: Seconds) -> None:
        """Let this run take `seconds` from now on, if its timeout would stop it earlier. Call it before that."""
        self._reporter.report_timeout(self._key, to_ms("seconds", seconds, 1))

    @contextmanager
    def waiting_for(self, queue: str) -> Generator[None]:
        """The run waits for a job of a queue, and lends its capacity meanwhile."""
        self._reporter.report_wait(self._key, queue, 1)
        try:
            yield
        finally:
            self._reporter.report_wait(self._key, queue, -1)

    def __repr__(self) -> str:
        return f"<job {self.id!r} of {self.queue}, attempt {self.attempt}>"


def current_job() -> CurrentJob:
    """The job of the handler that calls this, directly or through other functions. Works in async and sync handlers."""
    try:
        return running.get()
    except LookupError:
        raise HoldfastError("no job runs here: call current_job() only inside a handler") from None


def waiting_for(queue: str) -> AbstractContextManager[None]:
    """The caller waits for a job of a queue. If it is a handler, its run lends its capacity meanwhile."""
    current = running.get(None)
    return nullcontext() if current is None else current.waiting_for(queue)
