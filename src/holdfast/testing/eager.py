"""Eager rehearsals: a job runs before its `enqueue` returns, on the thread and in the context of the caller."""

from __future__ import annotations

import asyncio
import random
import threading
from asyncio import events, tasks
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from typing import Any, Self, TypeVar

from holdfast._client.app import MAX_LEASE_MS, Holdfast
from holdfast._core.clock import Clock
from holdfast._core.events import EventKind
from holdfast._core.jobs import Job, Release, Request, Settlement
from holdfast._core.replies import Enqueued
from holdfast._core.retry_policy import Raised, admit, fence_of, verdict
from holdfast._worker.current_job import CurrentJob, running
from holdfast._worker.handler import AppHooks, Handler, Proceed, perform
from holdfast._worker.telemetry import HookDispatcher, RunEvent, default_worker_name, event_of, log_event
from holdfast.errors import JobFailed, Retry
from holdfast.storage.validation import FAILED_SUFFIX
from holdfast.testing.rehearsal import MAX_MORE_RUNS, START, Rehearsal, endless
from holdfast.testing.requests import RehearsalStorage

T = TypeVar("T")


class EagerRehearsal(Rehearsal):
    """A rehearsal in which ready jobs run before `enqueue` and `call` return, on the thread of the caller, so that they
    see its transactions: `with eager(app) as jobs: …`. Jobs that are due later wait for `jobs.advance(…)`.

    An exception of a handler is raised where the job was enqueued. With `raises=False` it is not: the job is retried by
    `jobs.advance(…)`, or has failed, and `result` and `call` raise `JobFailed`.
    """

    def __init__(self, app: Holdfast[Any], *, now: datetime = START, raises: bool = True) -> None:
        super().__init__(app, now=now)
        self._raises = raises
        self._loops: _CallerLoops
        self._here = _CallerThread()
        self._worker = default_worker_name()
        self._rng = random.Random()

    def __enter__(self) -> Self:
        loops = _CallerLoops()
        self._begin(_EagerStorage(self.clock, self._run_enqueued), loops.run)
        self._loops = loops
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._loops.close()

    async def drain(self, *, max_runs: int | None = None) -> list[RunEvent]:
        before = len(self._runs)
        await self._run_ready(self._handlers(), MAX_MORE_RUNS if max_runs is None else max_runs)
        return [event for event in self._runs[before:] if event.kind is not EventKind.CLAIMED]

    async def _run_enqueued(self, queue: str) -> None:
        """Run the ready jobs of a queue and of its fail handler. Nothing runs if the queue has no task."""
        handlers = self._handlers() if queue.removesuffix(FAILED_SUFFIX) in self._app.tasks else []
        await self._run_ready(handler for handler in handlers if handler.queue in (queue, queue + FAILED_SUFFIX))

    async def _run_ready(self, handlers: Iterable[Handler], max_runs: int = MAX_MORE_RUNS) -> None:
        """Run jobs one after the other until none is ready, then raise the first exception of a handler. When the
        caller is cancelled, the other jobs stay ready, and the cancellation is raised."""
        served, errors, runs, idle = list(handlers), list[BaseException](), 0, False
        caller = asyncio.current_task()
        before = 0 if caller is None else caller.cancelling()
        while not idle:
            idle = True
            for handler in served:
                if not await self._run_next(handler, errors):
                    continue
                if caller is not None and caller.cancelling() > before:
                    last = errors[-1] if errors else None
                    raise last if isinstance(last, asyncio.CancelledError) else asyncio.CancelledError
                idle, runs = False, runs + 1
            if runs > max_runs:
                raise endless(max_runs)
        if errors and self._raises:
            raise errors[0]

    async def _run_next(self, handler: Handler, errors: list[BaseException]) -> bool:
        """Run the next ready job of a handler. Returns False if there is none."""
        queue, loop = handler.queue, asyncio.get_running_loop()
        claim = await self._storage.claim(queue, 1, worker=self._worker, lease_ms=MAX_LEASE_MS)
        if not claim.jobs:
            return False
        (job,) = claim.jobs
        began = loop.time()
        try:
            settlement: Settlement | None = admit(job, handler.config.policy)
            if settlement is None:
                await self._publish(RunEvent(kind=EventKind.CLAIMED, queue=queue, id=job.id, attempt=job.attempts))
                settlement = await self._run(handler, job, errors)
            await self._storage.settle(queue, [settlement], worker=self._worker)
        except BaseException:  # The lifespan raised, a hook was cancelled, or this is an interrupt.
            await self._storage.settle(queue, [Release(job.id, fence_of(job))], worker=self._worker)
            raise
        event = event_of(queue, job, settlement, loop.time() - began)
        log_event(event, self._worker)
        await self._publish(event)
        return True

    async def _run(self, handler: Handler, job: Job, errors: list[BaseException]) -> Settlement:
        """Run a job in the context of the caller, and decide how it is settled."""
        raised: list[BaseException] = []

        async def note_error(current: CurrentJob, proceed: Proceed) -> Any:
            try:
                return await proceed()
            except BaseException as error:
                raised.append(error)
                raise

        app_hooks, lifespan = self._app._around, self._app._lifespan  # pyright: ignore[reportPrivateUsage]
        hooks = AppHooks(find=app_hooks.find)
        hooks.middleware = [note_error, *app_hooks.middleware]
        hooks.around, hooks.after, hooks.errors = app_hooks.around, app_hooks.after, app_hooks.errors
        async with AsyncExitStack() as stack:
            resources = None if lifespan is None else await stack.enter_async_context(lifespan())
            current = CurrentJob(handler.queue, job, None, _NoReports(), resources)
            token = running.set(current)
            try:
                ended = await perform(job, current, handler, hooks, self._here)
            finally:
                running.reset(token)
        if isinstance(ended, Raised):
            stored = JobFailed(f"job {job.id!r} in {handler.queue} failed: {ended.error}", error=ended.error)
            error = raised[0] if raised else stored
            errors += [] if isinstance(error, Retry) else [error]
        return verdict(job, ended, handler.config.policy, self._rng)

    async def _publish(self, event: RunEvent) -> None:
        self._runs.append(event)
        hooks, report_error = self._app._on_event, self._app._around.report_error  # pyright: ignore[reportPrivateUsage]
        await HookDispatcher(hooks, report_error).call(event)


class _NoReports:
    """Takes the reports of a run in place: it has no timeout, its progress is not stored, and no other job waits."""

    def report_progress(self, key: object, progress: bytes) -> None: ...
    def report_wait(self, key: object, queue: str, change: int) -> None: ...
    def report_timeout(self, key: object, limit_ms: int) -> None: ...


class _EagerStorage(RehearsalStorage):
    """Jobs in memory. What is enqueued runs before the verb returns."""

    def __init__(self, clock: Clock, run: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(clock)
        self._run = run

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        replies = await super()._enqueue(queue, jobs)
        await self._run(queue)
        return replies


class _CallerLoops:
    """Event loops for blocking calls on the threads of their callers. A handler may make blocking calls in its turn, so
    each level of calls has a loop."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._all: list[asyncio.AbstractEventLoop] = []
        self._closed = False

    def run(self, make: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            return await make()

        idle: list[asyncio.AbstractEventLoop] = self._of_thread.__dict__.setdefault("idle", [])
        if idle:
            loop = idle.pop()
        else:
            loop = asyncio.new_event_loop()
            self._all.append(loop)
        try:
            return loop.run_until_complete(main())
        finally:
            idle.append(loop)
            if self._closed:
                loop.close()

    def close(self) -> None:
        """Close the loops. One that runs, on another thread, is closed after its blocking call."""
        self._closed = True
        for loop in self._all:
            if not loop.is_running():
                loop.close()


class _CallerThread(Executor):
    """Calls a function at once, on the thread that submits it. As on a thread of a worker, no loop runs there, so the
    function may make blocking calls."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            with _outside_of_the_loop():
                future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@contextmanager
def _outside_of_the_loop() -> Generator[None]:
    """Let asyncio see no running loop and no current task on this thread."""
    # The asyncio docs, "Extending", name `_enter_task` and `_leave_task` for those who implement tasks. Python 3.14
    # refuses to run a task on any loop of a thread that has a current task.
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        tasks._leave_task(loop, task)
    events._set_running_loop(None)  # pyright: ignore[reportPrivateUsage] -- meant for event loops, which this is about.
    try:
        yield
    finally:
        events._set_running_loop(loop)  # pyright: ignore[reportPrivateUsage]
        if task is not None:
            tasks._enter_task(loop, task)


eager = EagerRehearsal
"""`with eager(app) as jobs: …` runs each job of an app before its `enqueue` returns, on the thread of the caller."""
