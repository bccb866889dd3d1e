"""A handler and what surrounds it: the function that runs the jobs of a queue, the job that it runs (`current_job()`),
what a fail handler gets, and the hooks of an app. `run.py` runs it.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast._core.arguments import Arguments, UnknownParameter, is_async
from holdfast._core.codec import Codecs
from holdfast._core.failure import FollowUp, hide_frames_of
from holdfast._core.jobs import Job
from holdfast._core.options import Seconds
from holdfast._core.retry_policy import QueueConfig
from holdfast._worker.executor import StopReason
from holdfast._worker.telemetry import awaited, log_error
from holdfast.errors import HoldfastError, JobError, PayloadRejected

log = logging.getLogger("holdfast")
hide_frames_of(__file__)

LEFT_IN_RECORD = object()
"""In place of a payload that was too large to travel, and is in the failed record."""

MAX_PROGRESS_BYTES = 65_536

running: contextvars.ContextVar[CurrentJob] = contextvars.ContextVar("holdfast job")


class CurrentJob:
    """What a handler knows of its run. `(id, attempt, fence)` fence what it does elsewhere."""

    __slots__ = (
        *("attempt", "fence", "generation", "id", "on_loop", "queue", "resources", "retries", "run_at"),
        *("_report", "stalls", "stopping", "timeouts", "worker"),
    )

    def __init__(self, queue: str, job: Job, report: Callable[[bytes], None], resources: object = None) -> None:
        assert job.run is not None
        self.queue = queue
        self.id = job.id
        self.generation = job.generation
        self.attempt = job.attempts
        """1 for the first run."""
        self.fence = job.run.fence
        """A number that rises with every lease of this queue: a later run of this job has a higher one."""
        self.retries = job.retries
        self.stalls = job.stalls
        self.timeouts = job.timeouts
        self.run_at = job.run_at
        self.worker = job.run.worker
        self.stopping: StopReason | None = None
        """Why this run should end, once it should: cancel, timeout, shutdown or lease_lost. An async handler is
        cancelled as well; a sync one should look here now and then."""
        self.resources = resources
        self.on_loop = True
        """It can be cancelled now; not while it is on a thread."""
        self._report = report

    def progress(self, value: object) -> None:
        """Say how far the run is: any JSON value. Whoever looks at the job sees the newest, within about a second."""
        try:
            data = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise PayloadRejected(f"progress of job {self.id!r:.80} cannot be sent as JSON: {error}") from error
        if len(data) > MAX_PROGRESS_BYTES:
            raise PayloadRejected(
                f"progress of job {self.id!r:.80} has {len(data)} bytes, at most {MAX_PROGRESS_BYTES}"
            )
        self._report(data)

    def __repr__(self) -> str:
        return f"<job {self.id!r} of {self.queue}, attempt {self.attempt}>"


def current_job() -> CurrentJob:
    """The job that is being run here. Works in async and sync handlers and in whatever they call."""
    try:
        return running.get()
    except LookupError:
        raise HoldfastError("current_job() is for handlers: no job is being run here") from None


class FailedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The failed job, as its fail handler sees it."""

    queue: str
    id: str
    generation: int
    run_at: int
    attempts: int
    retries: int
    stalls: int
    timeouts: int


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a fail handler is given."""

    payload: Any
    """The arguments by name, typed as the task's are: `failure.payload.user_id`. Bytes where they cannot be read; None
    where they were large and the failed record is gone."""
    job: FailedJob
    error: JobError


@dataclass(slots=True, kw_only=True)
class Execution:
    """What `after_execution` is given, when a job has completed or failed for good and nothing is stored yet. It may
    change `result`, `error` and `ttl`."""

    queue: str
    id: str
    attempt: int
    payload: Any
    """The arguments, as the handler got them; None if they could not be read."""
    result: Any = None
    error: JobError | None = None
    """None if the job completed."""
    ttl: Seconds | None = None
    """How long to remember the end; None is what the task says."""
    seconds: float = 0.0
    """How long the run took."""
    worker: str = ""


Proceed = Callable[[], Awaitable[Any]]
Middleware = Callable[[CurrentJob, Proceed], Awaitable[Any]]
AfterExecution = Callable[[Execution], Awaitable[None] | None]
OnError = Callable[[BaseException, str], Awaitable[None] | None]


class Handler:
    """A function that runs the jobs of one queue."""

    def __init__(self, config: QueueConfig, arguments: Arguments, codecs: Codecs, codec: str) -> None:
        self.queue = config.queue
        self.config = config
        self.arguments = arguments
        self.codecs = codecs
        self.codec = codecs.get(codec)
        """Writes results."""
        self.is_async = is_async(arguments.function)
        self.fails_for: Arguments | None = None
        """The task's arguments, where this is its fail handler."""

    def check(self) -> None:
        """Look at the annotations, so that a worker that could not read its jobs does not start."""
        if self.fails_for is None and not self.arguments.raw:
            self.arguments.check(self.codec)

    def read(self, job: Job) -> Any:
        payload = job.work.payload or b""
        if self.fails_for is not None:
            return self._read_failure(job, payload)
        return self.arguments.decode(self.codecs.get(job.work.codec), payload)

    def call_with(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((given,), {}) if self.fails_for is not None else self.arguments.call(given)

    def _read_failure(self, job: Job, payload: bytes) -> Failure:
        assert self.fails_for is not None
        follow_up = self.codecs.decode("the failure", payload, "json", FollowUp)
        id, _, generation = job.id.rpartition("@")
        given: Any = bytes(follow_up.payload)
        try:
            if follow_up.form != "json":
                given = msgspec.json.decode(follow_up.payload, type=bytes)
            if follow_up.form == "left":
                given = LEFT_IN_RECORD
            else:
                given = self.fails_for.decode(self.codecs.get(follow_up.codec), given)
        except (HoldfastError, UnknownParameter):
            pass  # It may have failed because of this. The handler gets the bytes.
        failed = FailedJob(
            queue=self.fails_for.name,
            id=id,
            generation=int(generation),
            run_at=follow_up.run_at,
            attempts=follow_up.attempts,
            retries=follow_up.retries,
            stalls=follow_up.stalls,
            timeouts=follow_up.timeouts,
        )
        return Failure(payload=given, job=failed, error=follow_up.error)


class AppHooks:
    """The hooks of an app: middleware, after-execution hooks, error hooks."""

    def __init__(self, *, find: Callable[[str, str], Awaitable[Job | None]] | None = None) -> None:
        self.middleware: list[Middleware] = []
        self.after: list[AfterExecution] = []
        self.errors: list[OnError] = []
        self.find = find
        """Reads a record, given its queue and its id."""

    async def report_error(self, error: BaseException, where: str) -> None:
        """Report an error that is not a job's own failure to the error hooks, or to the log if there is none."""
        try:
            for hook in self.errors:
                await awaited(hook(error, where))
            if self.errors:
                return
        except (Exception, SystemExit) as wrong:
            log.exception("an on_error hook failed", exc_info=wrong)
        log_error(error, where)
