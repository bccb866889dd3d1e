"""Handlers and their runs, inside the process that executes them: a worker, or a child process."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from holdfast._core import failure
from holdfast._core.arguments import Arguments, SignatureMismatch, is_async
from holdfast._core.codec import Codecs
from holdfast._core.failure import FollowUp, visible_traceback
from holdfast._core.jobs import Complete, Fail, Job
from holdfast._core.options import Seconds, to_ms
from holdfast._core.retry_policy import (
    Ended,
    QueueConfig,
    Raised,
    RetryRules,
    Returned,
    StopReason,
    TimedOut,
    timeout_ms,
    verdict,
)
from holdfast._core.text import escape_control
from holdfast._worker.current_job import CurrentJob, running
from holdfast._worker.endings import cancelled, raised, timed_out
from holdfast._worker.stacks import stack_of_run
from holdfast._worker.telemetry import awaited, jobs_log, log_error
from holdfast.errors import HoldfastError, JobError, OptionError, PayloadRejected, Retry

log = logging.getLogger("holdfast")
failure.hide_frames_of(__file__)

LEFT_IN_RECORD = object()
"""Stands for a payload that was too large for the fail handler's job, and is in the failed record."""


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
    """The argument of a fail handler."""

    payload: Any
    """The arguments by name, with the types of the task: `failure.payload.user_id`. Bytes if they cannot be decoded;
    None if they were large and the failed record is gone."""
    job: FailedJob
    error: JobError


@dataclass(slots=True, kw_only=True)
class Execution:
    """The argument of `after_execution` hooks: a job has completed or failed for good, and that is not stored yet. A
    hook may change `result`, `error` and `ttl`."""

    queue: str
    id: str
    attempt: int
    payload: Any
    """The arguments of the handler; None if they could not be decoded."""
    result: Any = None
    error: JobError | None = None
    """None if the job completed."""
    ttl: Seconds | None = None
    """How long to keep the outcome; None is the time that the task sets."""
    seconds: float = 0.0
    """How long the run took."""
    worker: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Proceed = Callable[[], Awaitable[Any]]
Middleware = Callable[[CurrentJob, Proceed], Awaitable[Any]]
Around = Callable[[CurrentJob], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
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
        """Codec of results."""
        self.is_async = is_async(arguments.function)
        self.make_id: Callable[[dict[str, Any]], str] | None = None
        """Makes the id of a job from its arguments, if the task has `unique` or `singleton`."""
        self.rules = RetryRules()
        self.fails_for: Arguments | None = None
        """The arguments of the task, if this is its fail handler."""

    def id_of(self, codec: str, payload: bytes) -> str | None:
        """The id of a job with this payload, if the task has `unique` or `singleton`."""
        if self.make_id is None:
            return None
        return self.make_id(self.arguments.named(self.arguments.decode(self.codecs.get(codec), payload)))

    def read(self, job: Job) -> Any:
        payload = job.work.payload or b""
        if self.fails_for is not None:
            return self._read_failure(job, payload)
        return self.arguments.decode(self.codecs.get(job.work.codec), payload)

    def read_failed(self, codec: str, payload: bytes) -> Any:
        """The arguments of the failed job; the bytes if they cannot be decoded, which may be why it failed."""
        assert self.fails_for is not None
        try:
            return self.fails_for.decode(self.codecs.get(codec), payload)
        except (HoldfastError, SignatureMismatch):
            return payload

    def _read_failure(self, job: Job, payload: bytes) -> Failure:
        assert self.fails_for is not None
        follow_up = self.codecs.decode("the failure", payload, "json", FollowUp)
        given: Any = LEFT_IN_RECORD
        if follow_up.form != "left":
            is_json, raw = follow_up.form == "json", follow_up.payload
            given = self.read_failed(follow_up.codec, bytes(raw) if is_json else msgspec.json.decode(raw, type=bytes))
        id, _, generation = job.id.rpartition("@")
        history = {name: getattr(follow_up, name) for name in failure.HISTORY}
        failed = FailedJob(queue=self.fails_for.name, id=id, generation=int(generation), **history)
        return Failure(payload=given, job=failed, error=follow_up.error)


class AppHooks:
    """The hooks of an app: middleware, `around`, `after_execution`, `on_error`."""

    def __init__(self, *, find: Callable[[str, str], Awaitable[Job | None]] | None = None) -> None:
        self.middleware: list[Middleware] = []
        self.around: list[Around] = []
        self.after: list[AfterExecution] = []
        self.errors: list[OnError] = []
        self.find = find
        """Reads the record of a queue and an id."""

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


async def perform(job: Job, current: CurrentJob, handler: Handler, hooks: AppHooks, threads: Executor) -> Ended:
    """Run one job: decode, middleware, handler, `after_execution`. Raises only KeyboardInterrupt and GeneratorExit."""
    running.set(current)
    started = asyncio.get_running_loop().time()
    arguments: Any = None
    value: Any = None
    started_call = False
    try:
        arguments = handler.read(job)
        if isinstance(arguments, Failure) and arguments.payload is LEFT_IN_RECORD:
            arguments = await _with_payload(arguments, handler, hooks)
        started_call = True
        value = await _call(handler, arguments, current, hooks, threads)
        ended: Ended = _returned(handler, value)
    except asyncio.CancelledError:
        ended = cancelled(current)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit, too: a handler does not end its worker.
        ended = raised(error, current, job, handler.rules)
        _log_exception(error, ended, job, handler, called=started_call)
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
            headers=current.headers,
        )
        ended = await _after(job, ended, handler, hooks, execution)
    return ended


async def _with_payload(failed: Failure, handler: Handler, hooks: AppHooks) -> Failure:
    """Add a payload that was too large for the fail handler's job, from the failed record. It is None if that record
    has run again or is gone."""
    job = None if hooks.find is None else await hooks.find(failed.job.queue, failed.job.id)
    payload: Any = None
    if job is not None and job.generation == failed.job.generation:
        payload = handler.read_failed(job.work.codec, job.work.payload or b"")
    return replace(failed, payload=payload)


async def _call(handler: Handler, arguments: Any, current: CurrentJob, hooks: AppHooks, threads: Executor) -> Any:
    args, kwargs = handler.arguments.call(arguments) if handler.fails_for is None else ((arguments,), {})
    function = handler.arguments.function
    if handler.is_async and not hooks.middleware and not hooks.around:
        return await function(*args, **kwargs)
    proceed: Proceed = partial(function, *args, **kwargs)
    if hooks.around:
        proceed = partial(_enclosed_async if handler.is_async else _enclosed, hooks.around, current, proceed)
    proceed = partial(_call_async, proceed) if handler.is_async else partial(_call_on_thread, proceed, current, threads)
    for layer in reversed(hooks.middleware):
        proceed = partial(_call_layer, layer, current, proceed)
    return await proceed()


async def _enclosed_async(around: Sequence[Around], current: CurrentJob, function: Proceed) -> Any:
    """Call an async handler inside the context managers, on the event loop."""
    async with AsyncExitStack() as stack:
        for enter in around:
            context = enter(current)
            if isinstance(context, AbstractAsyncContextManager):
                await stack.enter_async_context(context)
            else:
                stack.enter_context(context)
        return await function()


def _enclosed(around: Sequence[Around], current: CurrentJob, function: Callable[[], Any]) -> Any:
    """Call a handler that is not async inside the context managers, on its thread."""
    with ExitStack() as stack:
        for enter in around:
            context = enter(current)
            if not isinstance(context, AbstractContextManager):
                raise OptionError(
                    f"app.around gave {context!r:.80} for {current.queue}, whose handler is not async: return a"
                    " context manager that is not async, for example contextlib.nullcontext()"
                )
            stack.enter_context(context)
        return function()


async def _call_layer(layer: Middleware, current: CurrentJob, proceed: Proceed) -> Any:
    return await awaited(layer(current, proceed))


async def _call_async(function: Proceed) -> Any:
    """Call an async handler behind middleware. `is_wrong_call` looks for this frame below those of the middleware."""
    return await function()


async def _call_on_thread(function: Callable[[], Any], current: CurrentJob, threads: Executor) -> Any:
    context = contextvars.copy_context()
    current.on_loop = False
    try:
        value = await asyncio.get_running_loop().run_in_executor(threads, _in_thread, current, context, function)
    finally:
        current.on_loop = True
    if inspect.iscoroutine(value) and current.stopping is not None:
        value.close()
        raise asyncio.CancelledError
    return await awaited(value)


def _in_thread(current: CurrentJob, context: contextvars.Context, function: Callable[[], Any]) -> Any:
    current.thread = threading.get_ident()
    try:
        return context.run(function)
    except StopIteration as error:  # A future cannot carry it: its waiter would hang.
        raise RuntimeError("the handler raised StopIteration") from error
    finally:
        current.thread = None


def _returned(handler: Handler, value: Any) -> Ended:
    if value is None:
        return Returned(None, handler.codec.name)
    try:
        data = handler.codecs.encode(f"the result of {handler.queue}", value, handler.codec)
    except PayloadRejected as error:
        return Raised(JobError(type="PayloadRejected", kind="permanent", message=str(error)))
    return Returned(data, handler.codec.name)


def _log_exception(error: BaseException, ended: Ended, job: Job, handler: Handler, *, called: bool) -> None:
    """Log an exception of a run where it was raised: a warning if the job runs again, else an error. A `Retry` is not
    logged, because the handler asked for it. If the handler was not `called`, no traceback says more than the error."""
    if not isinstance(ended, Raised) or isinstance(error, Retry):
        return
    fails = isinstance(verdict(job, ended, handler.config.policy, random.Random(0)), Fail)
    jobs_log.log(
        logging.ERROR if fails else logging.WARNING,
        "%s of %s %s, attempt %d: %s",
        *(escape_control(job.id), handler.queue, "raised" if called else "cannot be run", job.attempts),
        f"{'the job fails' if fails else 'it runs again'}{'' if called else f' ({escape_control(str(error))})'}",
        exc_info=(type(error), error, visible_traceback(error)) if called else None,
        extra={"facts": {"queue": handler.queue, "id": job.id, "attempt": job.attempts}},
    )


async def _after(
    job: Job, ended: Returned | Raised | TimedOut, handler: Handler, hooks: AppHooks, execution: Execution
) -> Ended:
    """Let hooks change what is stored, if this is the end of the job. If a hook raises, nothing is changed."""
    settlement = verdict(job, ended, handler.config.policy, random.Random(0))
    if not isinstance(settlement, Complete | Fail):
        return ended
    try:
        for hook in hooks.after:
            await awaited(hook(execution))
        return _changed(ended, execution, handler)
    except asyncio.CancelledError:
        return ended  # The run was stopped during a hook, but its handler has ended.
    except (Exception, SystemExit) as wrong:
        await hooks.report_error(wrong, f"after_execution of job {job.id!r:.80} in {handler.queue}")
        return ended


def _changed(ended: Returned | Raised | TimedOut, execution: Execution, handler: Handler) -> Ended:
    ttl_ms = None if execution.ttl is None else to_ms("ttl", execution.ttl)
    if isinstance(ended, Returned):
        again = _returned(handler, execution.result)
        return replace(again, result_ttl_ms=ttl_ms) if isinstance(again, Returned) else again
    if not isinstance(execution.error, JobError):
        raise TypeError(f"execution.error is {execution.error!r:.60}: it must be a JobError")
    error = failure.truncate_error(execution.error)
    failure.encode_error(error)  # Raises if it cannot be stored: that is an error of the hook, not of the job.
    return replace(ended, error=error, failure_ttl_ms=ttl_ms)


K = TypeVar("K")
K_contra = TypeVar("K_contra", contravariant=True)


class _Going(msgspec.Struct):
    """A run that has begun."""

    task: asyncio.Task[Ended]
    job: Job
    current: CurrentJob
    run: Coroutine[Any, Any, Ended]
    extended: bool = False
    """Whether the run has asked for more time than its timeout."""
    waits: dict[str, int] | None = None
    """Number of waits for jobs of each queue, if the run has waited."""


class RunReports(Protocol[K_contra]):
    """What takes the reports of a `Runner`. Each names the key that its run was started with."""

    def finished(self, key: K_contra, ended: Ended, /) -> None: ...
    def progressed(self, key: K_contra, progress: bytes, /) -> None:
        """Called on any thread."""

    def waits(self, key: K_contra, queue: str, begins: bool, /) -> None:
        """A run begins or ends to wait for jobs of a queue."""

    def extended(self, key: K_contra, limit_ms: int, /) -> None:
        """A run asks for this much time from now on."""


class Runner(Generic[K]):
    """Calls handlers, and reports what becomes of their runs."""

    def __init__(
        self,
        handlers: Iterable[Handler],
        hooks: AppHooks,
        threads: int,
        reports: RunReports[K],
        wrap: Callable[[K, Coroutine[Any, Any, Ended]], Coroutine[Any, Any, Ended]] | None = None,
    ) -> None:
        """`wrap` returns the coroutine to execute instead of that of a run."""
        self.resources: object = None
        """The value of the app's lifespan."""
        self.handlers = {handler.queue: handler for handler in handlers}
        self._hooks = hooks
        self._reports = reports
        self._wrap = wrap
        self._threads = ThreadPoolExecutor(threads, "holdfast-run")
        self._going: dict[K, _Going] = {}
        self._loop_thread = 0

    def check(self) -> None:
        """Check the annotations of all handlers, so that a worker that could not decode its jobs does not start."""
        for handler in self.handlers.values():
            if handler.fails_for is None and not handler.arguments.raw:
                handler.arguments.check(handler.codec)

    def start(self, key: K, queue: str, job: Job) -> None:
        handler = self.handlers[queue]
        current = CurrentJob(queue, job, key, self, self.resources)
        run = perform(job, current, handler, self._hooks, self._threads)
        task = asyncio.get_running_loop().create_task(run if self._wrap is None else self._wrap(key, run))
        self._loop_thread = self._loop_thread or threading.get_ident()
        self._going[key] = _Going(task, job, current, run)
        task.add_done_callback(partial(self._finished, key))

    def stop(self, key: K, why: StopReason) -> str:
        """Ask a run to stop. Returns its stack if its time is over."""
        if key not in self._going:
            return ""
        going = self._going[key]
        current, stack = going.current, ""
        if why == "timeout":
            stack = self.stack(key)
            policy = self.handlers[current.queue].config.policy
            current.timed_out = timed_out(None if going.extended else timeout_ms(going.job, policy), stack)
        current.stopping = why
        if current.on_loop:
            going.task.cancel()
        return stack

    def stack(self, key: K) -> str:
        """The stack of a run, on any thread; empty if it is not known. Frames of this module are omitted."""
        if key not in self._going:
            return ""
        going = self._going[key]
        try:
            return stack_of_run(going.run, self._loop_thread, going.current.thread, __file__)
        except Exception:  # Another thread has changed the frames meanwhile, or a source file is odd.
            log.debug("the stack of a run could not be read", exc_info=True)
            return ""

    def close(self) -> None:
        """End the threads that are idle now, and the others when their runs end."""
        self._threads.shutdown(wait=False)

    # Reports of runs, on any thread

    def report_progress(self, key: K, progress: bytes) -> None:
        self._reports.progressed(key, progress)

    def report_wait(self, key: K, queue: str, change: int) -> None:
        self._call_on_loop(self._count_wait, key, queue, change)

    def report_timeout(self, key: K, limit_ms: int) -> None:
        self._call_on_loop(self._extend_timeout, key, limit_ms)

    def _call_on_loop(self, function: Callable[..., None], key: K, *args: Any) -> None:
        going = self._going.get(key)  # One step: the loop removes the run when it ends.
        if going is not None:
            with suppress(RuntimeError):  # The loop has closed.
                going.task.get_loop().call_soon_threadsafe(function, key, *args)

    def _extend_timeout(self, key: K, limit_ms: int) -> None:
        going = self._going.get(key)
        if going is not None:
            going.extended = True
            self._reports.extended(key, limit_ms)

    def _count_wait(self, key: K, queue: str, change: int) -> None:
        """A run begins (1) or ends (-1) a wait for a job of a queue."""
        going = self._going.get(key)
        if going is None:
            return  # The run has ended: what waits is a task that it has left behind.
        waits = going.waits = {} if going.waits is None else going.waits
        before = waits.get(queue, 0)
        waits[queue] = before + change
        if before == 0 or waits[queue] == 0:
            self._reports.waits(key, queue, before == 0)

    def _finished(self, key: K, task: asyncio.Task[Ended]) -> None:
        going = self._going.pop(key)
        if task.cancelled():  # The run had not begun.
            ended = cancelled(going.current)
        else:
            error = task.exception()
            ended = task.result() if error is None else raised(error, going.current, going.job, RetryRules())
        self._reports.finished(key, ended)
