"""One run, inside the process that does it: decode, middleware, handler, `after_execution`. The result is a value."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Threads
from typing import Any

import msgspec

from holdfast._core.arguments import UnknownParameter
from holdfast._core.failure import (
    MAX_MESSAGE,
    encode_error,
    error_from_exception,
    hide_frames_of,
    retry_time,
    safe_getattr,
    truncate_error,
)
from holdfast._core.jobs import Complete, Fail, Job
from holdfast._core.options import to_ms
from holdfast._core.retry_policy import Crashed, Ended, Raised, Returned, Stopped, TimedOut, verdict
from holdfast._worker.handler import (
    LEFT_IN_RECORD,
    AppHooks,
    CurrentJob,
    Execution,
    Failure,
    Handler,
    Middleware,
    Proceed,
    running,
)
from holdfast._worker.telemetry import awaited
from holdfast.errors import HoldfastError, JobError, OptionError, PayloadRejected, PermanentError, Retry

hide_frames_of(__file__)


def interrupted(error: BaseException | None, current: CurrentJob) -> Ended:
    """What a run ended in that `perform` could not see to its end: cancelled before it began, or worse."""
    return _cancelled(current) if error is None else _raised(error, current)


async def perform(
    job: Job,
    current: CurrentJob,
    handler: Handler,
    hooks: AppHooks,
    threads: Threads,
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
    if hooks.after and not isinstance(ended, Stopped | Crashed):
        seconds = asyncio.get_running_loop().time() - started
        ended = await _after(job, ended, handler, hooks, arguments, value, seconds)
    return ended


async def _with_payload(failure: Failure, handler: Handler, hooks: AppHooks) -> Failure:
    """The payload was too large to travel along. It is in the failed record, unless that has run again or is gone."""
    assert handler.fails_for is not None
    job = None if hooks.find is None else await hooks.find(failure.job.queue, failure.job.id)
    payload: Any = None
    if job is not None and job.generation == failure.job.generation:
        payload = job.work.payload
        try:
            payload = handler.fails_for.decode(handler.codecs.get(job.work.codec), payload or b"")
        except (HoldfastError, UnknownParameter):
            pass  # The handler gets the bytes.
    return msgspec.structs.replace(failure, payload=payload)


async def _call(
    handler: Handler, arguments: Any, current: CurrentJob, middleware: Sequence[Middleware], threads: Threads
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
        proceed = _layered(layer, current, proceed)
    return await proceed()


def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # A future cannot carry it: its waiter would hang.
        raise RuntimeError("the handler raised StopIteration") from error


def _layered(layer: Middleware, current: CurrentJob, proceed: Proceed) -> Proceed:
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
        return Stopped(current.stopping)  # It was stopped, and failed on its way out.
    stored = error_from_exception(error, "permanent" if permanent else "retriable")
    try:
        delay_ms, run_at = retry_time(error)
    except OptionError as wrong:
        return Raised(msgspec.structs.replace(stored, message=f"{stored.message} (and {wrong})"[:MAX_MESSAGE]))
    return Raised(stored, delay_ms, run_at)


async def _after(
    job: Job,
    ended: Returned | Raised | TimedOut,
    handler: Handler,
    hooks: AppHooks,
    arguments: Any,
    value: Any,
    seconds: float,
) -> Ended:
    """Let the hooks change what is about to be stored, if this is the end of the job. A hook that fails changes
    nothing."""
    settlement = verdict(job, ended, handler.config.policy, random.Random(0))
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
        return msgspec.structs.replace(again, result_ttl_ms=ttl_ms) if isinstance(again, Returned) else again
    if not isinstance(execution.error, JobError):
        raise TypeError(f"the error of an execution is a JobError, not {execution.error!r:.60}")
    error = truncate_error(execution.error)
    encode_error(error)  # What cannot be stored is the hook's mistake, not the job's.
    return msgspec.structs.replace(ended, error=error, failure_ttl_ms=ttl_ms)
