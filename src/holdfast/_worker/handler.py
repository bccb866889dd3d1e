"""A handler, what surrounds it, and one run of it, inside the process that does it.

`Handler` is the function that runs the jobs of a queue; `current_job()` the job that it runs; `Failure` what a fail
handler gets; `AppHooks` the hooks of an app. `perform` is one run: decode, middleware, handler, `after_execution`; its
result is a value. `Runner` starts and stops runs, for a worker or inside a child process.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast._core import failure
from holdfast._core.arguments import Arguments, UnknownParameter, is_async
from holdfast._core.codec import Codecs
from holdfast._core.failure import FollowUp, error_from_exception, safe_getattr
from holdfast._core.jobs import Complete, Fail, Job
from holdfast._core.options import Seconds, to_ms
from holdfast._core.retry_policy import Ended, QueueConfig, Raised, Returned, Stopped, StopReason, TimedOut, verdict
from holdfast._worker.telemetry import awaited, log_error
from holdfast.errors import HoldfastError, JobError, OptionError, PayloadRejected, PermanentError, Retry

log = logging.getLogger("holdfast")
failure.hide_frames_of(__file__)

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

    def read_failed(self, codec: str, payload: bytes) -> Any:
        """The arguments of the failed job. It may have failed because they cannot be read: then these are the bytes."""
        assert self.fails_for is not None
        try:
            return self.fails_for.decode(self.codecs.get(codec), payload)
        except (HoldfastError, UnknownParameter):
            return payload

    def _read_failure(self, job: Job, payload: bytes) -> Failure:
        assert self.fails_for is not None
        follow_up = self.codecs.decode("the failure", payload, "json", FollowUp)
        id, _, generation = job.id.rpartition("@")
        given: Any = LEFT_IN_RECORD
        if follow_up.form == "json":
            given = self.read_failed(follow_up.codec, bytes(follow_up.payload))
        elif follow_up.form == "base64":
            given = self.read_failed(follow_up.codec, msgspec.json.decode(follow_up.payload, type=bytes))
        failed = FailedJob(
            queue=self.fails_for.name,
            id=id,
            generation=int(generation),
            **{name: getattr(follow_up, name) for name in failure.HISTORY},
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


# One run


async def perform(
    job: Job, current: CurrentJob, handler: Handler, hooks: AppHooks, threads: ThreadPoolExecutor
) -> Ended:
    """Run one job, whatever its handler does. Never raises, but for what ends the whole program."""
    running.set(current)
    started = asyncio.get_running_loop().time()
    arguments: Any = None
    value: Any = None
    try:
        arguments = handler.read(job)
        if isinstance(arguments, Failure) and arguments.payload is LEFT_IN_RECORD:
            arguments = await _with_payload(arguments, handler, hooks)
        value = await _call(handler, arguments, current, hooks.middleware, threads)
        ended: Ended = _returned(handler, value)
    except asyncio.CancelledError:
        ended = _cancelled(current)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, too: a handler does not end its worker.
        ended = _raised(error, current)
    if hooks.after and isinstance(ended, Returned | Raised | TimedOut):
        stored = None if isinstance(ended, Returned) else ended.error
        execution = Execution(
            queue=handler.queue,
            id=job.id,
            attempt=job.attempts,
            payload=arguments,
            result=None if stored else value,
            error=stored,
            seconds=asyncio.get_running_loop().time() - started,
            worker=job.worker or "",
        )
        ended = await _after(job, ended, handler, hooks, execution)
    return ended


async def _with_payload(failed: Failure, handler: Handler, hooks: AppHooks) -> Failure:
    """The payload was too large to travel along. It is in the failed record, unless that has run again or is gone."""
    job = None if hooks.find is None else await hooks.find(failed.job.queue, failed.job.id)
    payload: Any = None
    if job is not None and job.generation == failed.job.generation:
        payload = handler.read_failed(job.work.codec, job.work.payload or b"")
    return replace(failed, payload=payload)


async def _call(
    handler: Handler, arguments: Any, current: CurrentJob, middleware: Sequence[Middleware], threads: ThreadPoolExecutor
) -> Any:
    args, kwargs = handler.call_with(arguments)
    function = handler.arguments.function
    if handler.is_async and not middleware:
        return await function(*args, **kwargs)

    async def innermost() -> Any:
        if handler.is_async:
            return await function(*args, **kwargs)
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        current.on_loop = False
        try:
            value = await loop.run_in_executor(threads, lambda: context.run(_in_thread, function, args, kwargs))
        finally:
            current.on_loop = True
        if inspect.iscoroutine(value) and current.stopping is not None:
            value.close()
            raise asyncio.CancelledError
        return await awaited(value)

    proceed: Proceed = innermost
    for layer in reversed(middleware):
        proceed = partial(_layered, layer, current, proceed)
    return await proceed()


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # A future cannot carry it: its waiter would hang.
        raise RuntimeError("the handler raised StopIteration") from error


async def _layered(layer: Middleware, current: CurrentJob, proceed: Proceed) -> Any:
    return await awaited(layer(current, proceed))


def _returned(handler: Handler, value: Any) -> Ended:
    if value is None:
        return Returned(None, handler.codec.name)
    try:
        data = handler.codecs.encode(f"the result of {handler.queue}", value, handler.codec)
    except PayloadRejected as error:
        return Raised(JobError(type="PayloadRejected", kind="permanent", message=str(error)))
    return Returned(data, handler.codec.name)


def _cancelled(current: CurrentJob) -> Ended:
    """The run was cancelled: by us, for a reason, or by the handler itself."""
    if current.stopping is None:
        return Raised(JobError(type="CancelledError", message="the handler cancelled itself"))
    if current.stopping == "timeout":
        return timed_out()
    return Stopped(current.stopping)


def timed_out() -> TimedOut:
    return TimedOut(JobError(type="TimeoutError", kind="timeout", message="the run took longer than its timeout"))


def _raised(error: BaseException, current: CurrentJob) -> Ended:
    if current.stopping == "timeout":
        return TimedOut(error_from_exception(error, "timeout"))
    if isinstance(error, UnknownParameter):
        return Raised(error_from_exception(error, "retriable"))
    permanent = isinstance(error, PermanentError | PayloadRejected) or safe_getattr(error, "kind") == "permanent"
    if current.stopping is not None and not permanent and not isinstance(error, Retry):
        return Stopped(current.stopping)  # It was stopped, and failed on its way out.
    stored = error_from_exception(error, "permanent" if permanent else "retriable")
    try:
        delay_ms, run_at = failure.retry_time(error)
    except OptionError as wrong:
        return Raised(replace(stored, message=f"{stored.message} (and {wrong})"[: failure.MAX_MESSAGE]))
    return Raised(stored, delay_ms, run_at)


async def _after(
    job: Job, ended: Returned | Raised | TimedOut, handler: Handler, hooks: AppHooks, execution: Execution
) -> Ended:
    """Let the hooks change what is about to be stored, if this is the end of the job. A hook that fails changes
    nothing."""
    settlement = verdict(job, ended, handler.config.policy, random.Random(0))
    if not isinstance(settlement, Complete | Fail):
        return ended
    try:
        for hook in hooks.after:
            await awaited(hook(execution))
        return _changed(ended, execution, handler)
    except asyncio.CancelledError:
        return ended  # The run was stopped during the hook. It has ended already.
    except (Exception, SystemExit) as wrong:
        await hooks.report_error(wrong, f"after_execution of job {job.id!r:.80} in {handler.queue}")
        return ended


def _changed(ended: Returned | Raised | TimedOut, execution: Execution, handler: Handler) -> Ended:
    ttl_ms = None if execution.ttl is None else to_ms("ttl", execution.ttl)
    if isinstance(ended, Returned):
        again = _returned(handler, execution.result)
        return replace(again, result_ttl_ms=ttl_ms) if isinstance(again, Returned) else again
    if not isinstance(execution.error, JobError):
        raise TypeError(f"the error of an execution is a JobError, not {execution.error!r:.60}")
    error = failure.truncate_error(execution.error)
    failure.encode_error(error)  # What cannot be stored is the hook's mistake, not the job's.
    return replace(ended, error=error, failure_ttl_ms=ttl_ms)


K = TypeVar("K")


class Runner(Generic[K]):
    """Calls handlers. It reports the end and the progress of a run by the key that the run was started with; progress
    comes from any thread."""

    def __init__(
        self,
        hooks: AppHooks,
        threads: int,
        finished: Callable[[K, Ended], None],
        progressed: Callable[[K, bytes], None],
        wrap: Callable[[K, Coroutine[Any, Any, Ended]], Coroutine[Any, Any, Ended]] | None = None,
    ) -> None:
        """`wrap` gives the coroutine that is run in place of a run's own."""
        self.resources: object = None
        """The value of the app's lifespan."""
        self._hooks = hooks
        self._report_end = finished
        self._report_progress = progressed
        self._wrap = wrap
        self._threads = ThreadPoolExecutor(threads, "holdfast-run")
        self._going: dict[K, tuple[asyncio.Task[Ended], CurrentJob]] = {}

    def start(self, key: K, handler: Handler, job: Job) -> None:
        current = CurrentJob(handler.queue, job, partial(self._report_progress, key), self.resources)
        run = perform(job, current, handler, self._hooks, self._threads)
        task = asyncio.get_running_loop().create_task(run if self._wrap is None else self._wrap(key, run))
        self._going[key] = (task, current)
        task.add_done_callback(partial(self._finished, key))

    def stop(self, key: K, why: StopReason) -> None:
        if key in self._going:
            task, current = self._going[key]
            current.stopping = why
            if current.on_loop:
                task.cancel()

    def close(self) -> None:
        """End the threads: those that are idle now, the others when their runs end."""
        self._threads.shutdown(wait=False)

    def _finished(self, key: K, task: asyncio.Task[Ended]) -> None:
        _, current = self._going.pop(key)
        if task.cancelled():  # It had not begun.
            ended = _cancelled(current)
        else:
            error = task.exception()
            ended = task.result() if error is None else _raised(error, current)
        self._report_end(key, ended)
