"""Runs in this process: on its event loop, and on threads for handlers that are not async.

`Runner` calls handlers, for a worker or inside a child process. `Inline` is the executor of a worker that has no
children: fast and simple, with one limit that Python sets: a run that does not end when it is cancelled cannot be
killed. It keeps its capacity until it ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, QueueConfig
from holdfast._worker.executor import Executor, Run, StopReason
from holdfast._worker.handler import AppHooks, CurrentJob, Handler
from holdfast._worker.run import interrupted, perform

if TYPE_CHECKING:
    from holdfast._worker.context import WorkerContext

CAPACITY = 1_000
"""Units of a worker without child processes."""

K = TypeVar("K", bound=Hashable)
K_contra = TypeVar("K_contra", bound=Hashable, contravariant=True)


class RunObserver(Protocol[K_contra]):
    """Gets what a `Runner` reports, by the key that a run was started with."""

    def finished(self, run: K_contra, ended: Ended, /) -> None:
        """A run is over."""

    def progressed(self, run: K_contra, progress: bytes, /) -> None:
        """A run has new progress. From any thread."""


class Runner(Generic[K]):
    """Calls handlers, and reports to its observer."""

    def __init__(self, hooks: AppHooks, threads: int, observer: RunObserver[K]) -> None:
        self.resources: object = None
        """The value of the app's lifespan."""
        self._hooks = hooks
        self._observer = observer
        self._threads = ThreadPoolExecutor(threads, "holdfast-run")
        self._going: dict[K, tuple[asyncio.Task[Ended], CurrentJob]] = {}

    def start(self, key: K, handler: Handler, job: Job) -> None:
        """Start a run of this job."""
        current = CurrentJob(handler.queue, job, partial(self._observer.progressed, key), self.resources)
        run = self._wrap(key, perform(job, current, handler, self._hooks, self._threads))
        task = asyncio.get_running_loop().create_task(run)
        self._going[key] = (task, current)
        task.add_done_callback(partial(self._finished, key))

    def stop(self, key: K, why: StopReason) -> None:
        """Ask a run to end."""
        if key in self._going:
            task, current = self._going[key]
            current.stopping = why
            if current.on_loop:
                task.cancel()

    def close(self) -> None:
        """End the threads: those that are idle now, the others when their runs end."""
        self._threads.shutdown(wait=False)

    def _wrap(self, key: K, run: Coroutine[Any, Any, Ended]) -> Coroutine[Any, Any, Ended]:
        """The coroutine that is run in place of `run`: for subclasses."""
        return run

    def _finished(self, key: K, task: asyncio.Task[Ended]) -> None:
        _, current = self._going.pop(key)
        error = None if task.cancelled() else task.exception()
        self._observer.finished(key, interrupted(error, current) if task.cancelled() or error else task.result())


class Inline(Executor):
    """Runs on the worker's own loop. Its only host has the number 0."""

    name = "inline"
    host_capacity = CAPACITY

    def __init__(self, handlers: Iterable[Handler], hooks: AppHooks) -> None:
        super().__init__()
        self._handlers = {handler.queue: handler for handler in handlers}
        self.runner: Runner[Run] = Runner(hooks, CAPACITY, self)

    @property
    def configs(self) -> list[QueueConfig]:
        return [handler.config for handler in self._handlers.values()]

    async def open(self, context: WorkerContext) -> None:
        await super().open(context)
        for handler in self._handlers.values():
            handler.check()
        self._capacity.open_host(0)

    async def watch(self) -> None:
        await asyncio.Event().wait()  # It cannot break down.

    async def close(self) -> None:
        self.runner.close()

    def start(self, run: Run) -> None:
        self._started(run, 0)
        self.runner.start(run, self._handlers[run.queue], run.job)

    def _ask_to_stop(self, run: Run, why: StopReason) -> None:
        self.runner.stop(run, why)

    def _grace_over(self, run: Run) -> None:
        run.given_up = True
        self._capacity.gave_up(run.queue)
        self._context.stuck(run)

    def _kill(self, run: Run) -> None:
        pass  # It cannot be killed.
