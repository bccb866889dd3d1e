"""One run, inside the process that does it: decode, middleware, handler, `after_execution`. What comes out is a value.

`current_job()` is what a handler knows of its run.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast._core import retry_policy as decisions
from holdfast._core.arguments import Arguments, UnknownParameter, is_async
from holdfast._core.codec import Codecs
from holdfast._core.failure import error_from_exception, retry_time, safe_getattr
from holdfast._core.jobs import Complete, Fail, Job
from holdfast._core.options import Seconds, to_ms
from holdfast._core.retry_policy import Crashed, Ended, FollowUp, QueueConfig, Raised, Returned, Stopped, TimedOut
from holdfast._worker.executor import StopReason
from holdfast.errors import HoldfastError, JobError, OptionError, PayloadRejected, PermanentError, Retry

log = logging.getLogger("holdfast")

LEFT = object()
"""In place of a payload that has to be looked up."""

MAX_PROGRESS_BYTES = 65_536

_current: contextvars.ContextVar[CurrentJob] = contextvars.ContextVar("holdfast job")


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
            told = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise PayloadRejected(f"progress of job {self.id!r:.80} cannot be sent as JSON: {error}") from error
        if len(told) > MAX_PROGRESS_BYTES:
            raise PayloadRejected(
                f"progress of job {self.id!r:.80} has {len(told)} bytes, at most {MAX_PROGRESS_BYTES}"
            )
        self._report(told)

    def __repr__(self) -> str:
        return f"<job {self.id!r} of {self.queue}, attempt {self.attempt}>"


def current_job() -> CurrentJob:
    """The job that is being run here. Works in async and sync handlers and in whatever they call."""
    try:
        return _current.get()
    except LookupError:
        raise HoldfastError("current_job() is for handlers: no job is being run here") from None


class FailedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that a fail handler is told of."""

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
        told = self.codecs.decode("the failure", payload, "json", FollowUp)
        id, _, generation = job.id.rpartition("@")
        given: Any = bytes(told.payload)
        try:
            if told.form != "json":
                given = msgspec.json.decode(told.payload, type=bytes)
            given = LEFT if told.form == "left" else self.fails_for.decode(self.codecs.get(told.codec), given)
        except (HoldfastError, UnknownParameter):
            pass  # It may have failed because of this. The handler gets the bytes.
        failed = FailedJob(
            queue=self.fails_for.name,
            id=id,
            generation=int(generation),
            run_at=told.run_at,
            attempts=told.attempts,
            retries=told.retries,
            stalls=told.stalls,
            timeouts=told.timeouts,
        )
        return Failure(payload=given, job=failed, error=told.error)


class AppHooks:
    """What an app puts around its handlers."""

    def __init__(self, *, find: Callable[[str, str], Awaitable[Job | None]] | None = None) -> None:
        self.middleware: list[Middleware] = []
        self.after: list[AfterExecution] = []
        self.errors: list[OnError] = []
        self.find = find
        """Reads a record, given its queue and its id."""

    async def report_error(self, error: BaseException, where: str) -> None:
        """Something failed that is no job's own failure: tell the error hooks, or the log if there is none."""
        try:
            for hook in self.errors:
                await awaited(hook(error, where))
            if self.errors:
                return
        except (Exception, SystemExit) as wrong:
            log.exception("an on_error hook failed", exc_info=wrong)
        log.error("%s: %s", where, error, exc_info=None if isinstance(error, HoldfastError) else error)


async def awaited(value: Any) -> Any:
    """What a hook gave, whether it is async or not."""
    return await value if inspect.isawaitable(value) else value


def interrupted(error: BaseException | None, current: CurrentJob) -> Ended:
    """What a run ended in that `perform` could not see to its end: cancelled before it began, or worse."""
    return _cancelled(current) if error is None else _raised(error, current)


async def perform(
    job: Job,
    current: CurrentJob,
    handler: Handler,
    around: AppHooks,
    threads: Executor,
) -> Ended:
    """Run one job, whatever its handler does. Never raises, but for what ends the whole program."""
    _current.set(current)
    started = asyncio.get_running_loop().time()
    arguments: Any = None
    value: Any = None
    try:
        arguments = handler.read(job)
        if isinstance(arguments, Failure) and arguments.payload is LEFT:
            arguments = await _with_payload(arguments, handler, around)
        value = await _call(handler, arguments, current, around.middleware, threads)
        ended: Ended = _returned(handler, value)
    except asyncio.CancelledError:
        ended = _cancelled(current)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, too: a handler does not end its worker.
        ended = _raised(error, current)
    if around.after and not isinstance(ended, Stopped | Crashed):
        seconds = asyncio.get_running_loop().time() - started
        ended = await _after(job, ended, handler, around, arguments, value, seconds)
    return ended


class Probed:
    """Awaits a coroutine, and says when each of its steps begins and ends."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, Ended], begins: Callable[[], None], ends: Callable[[], None]
    ) -> None:
        self._coroutine = coroutine
        self._begins, self._ends = begins, ends

    def __await__(self) -> Generator[Any, None, Ended]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            self._begins()
            try:
                wish = next(steps) if error is None else steps.throw(error)
            except StopIteration as returned:
                ended: Ended = returned.value
                return ended
            finally:
                self._ends()
            try:
                yield wish
                error = None
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown


async def _with_payload(failure: Failure, handler: Handler, around: AppHooks) -> Failure:
    """The payload was too large to travel along. It is in the failed record, unless that has run again or is gone."""
    assert handler.fails_for is not None
    job = None if around.find is None else await around.find(failure.job.queue, failure.job.id)
    payload: Any = None
    if job is not None and job.generation == failure.job.generation:
        payload = job.work.payload
        try:
            payload = handler.fails_for.decode(handler.codecs.get(job.work.codec), payload or b"")
        except (HoldfastError, UnknownParameter):
            pass  # The handler gets the bytes.
    return msgspec.structs.replace(failure, payload=payload)


async def _call(
    handler: Handler, arguments: Any, current: CurrentJob, middleware: Sequence[Middleware], threads: Executor
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
        proceed = _around(layer, current, proceed)
    return await proceed()


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # A future cannot carry it: its waiter would hang.
        raise RuntimeError("the handler raised StopIteration") from error


def _around(layer: Middleware, current: CurrentJob, proceed: Proceed) -> Proceed:
    async def layered() -> Any:
        return await awaited(layer(current, proceed))

    return layered


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
        return TimedOut(timed_out())
    return Stopped(current.stopping)


def timed_out() -> JobError:
    return JobError(type="TimeoutError", kind="timeout", message="the run took longer than its timeout")


def _raised(error: BaseException, current: CurrentJob) -> Ended:
    if current.stopping == "timeout":
        return TimedOut(error_from_exception(error, "timeout"))
    if isinstance(error, UnknownParameter):
        return Raised(error_from_exception(error, "retriable"))
    permanent = isinstance(error, PermanentError | PayloadRejected) or safe_getattr(error, "kind") == "permanent"
    if current.stopping is not None and not permanent and not isinstance(error, Retry):
        return Stopped(current.stopping)  # It was told to stop, and stumbled on the way out.
    told = error_from_exception(error, "permanent" if permanent else "retriable")
    try:
        delay_ms, run_at = retry_time(error)
    except OptionError as wrong:
        return Raised(msgspec.structs.replace(told, message=f"{told.message} (and {wrong})"[: decisions.MAX_MESSAGE]))
    return Raised(told, delay_ms, run_at)


async def _after(
    job: Job,
    ended: Returned | Raised | TimedOut,
    handler: Handler,
    around: AppHooks,
    arguments: Any,
    value: Any,
    seconds: float,
) -> Ended:
    """Let the hooks change what is about to be stored, if this is the end of the job. A hook that fails changes
    nothing."""
    settlement = decisions.verdict(job, ended, handler.config.policy, random.Random(0))
    if not isinstance(settlement, Complete | Fail):
        return ended
    error = None if isinstance(ended, Returned) else ended.error
    execution = Execution(
        queue=handler.queue,
        id=job.id,
        attempt=job.attempts,
        payload=arguments,
        result=None if error else value,
        error=error,
        seconds=seconds,
        worker=job.worker or "",
    )
    try:
        for hook in around.after:
            await awaited(hook(execution))
        return _changed(ended, execution, handler)
    except asyncio.CancelledError:
        return ended  # The run was stopped during the hook. It has ended already.
    except (Exception, SystemExit) as wrong:
        await around.report_error(wrong, f"after_execution of job {job.id!r:.80} in {handler.queue}")
        return ended


def _changed(ended: Returned | Raised | TimedOut, execution: Execution, handler: Handler) -> Ended:
    ttl_ms = None if execution.ttl is None else to_ms("ttl", execution.ttl)
    if isinstance(ended, Returned):
        again = _returned(handler, execution.result)
        return msgspec.structs.replace(again, result_ttl_ms=ttl_ms) if isinstance(again, Returned) else again
    if not isinstance(execution.error, JobError):
        raise TypeError(f"the error of an execution is a JobError, not {execution.error!r:.60}")
    error = decisions.cut(execution.error)
    decisions.encode_error(error)  # What cannot be stored is the hook's mistake, not the job's.
    return msgspec.structs.replace(ended, error=error, failure_ttl_ms=ttl_ms)
