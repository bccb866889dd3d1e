"""Runs in this process: on its event loop, and on threads for handlers that are not async.

`Runner` calls handlers, for a worker or inside a child process. `Inline` is the executor of a worker that has no
children: fast and simple, with one limit that Python sets: a run that does not end when it is cancelled cannot be
killed. It keeps its place in the capacity until it ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from holdfast._core.capacity import Capacity
from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, QueueConfig
from holdfast._worker.executor import Executor, Listener, Run, StopReason
from holdfast._worker.handler import AppHooks, CurrentJob, Handler, interrupted, perform

CAPACITY = 1_000

K = TypeVar("K", bound=Hashable)


class Runner(Generic[K]):
    """Calls handlers. `ended` is told what a call came to, `reported` how far it is; each by the key it was started
    with."""

    def __init__(
        self,
        around: AppHooks,
        threads: int,
        *,
        ended: Callable[[K, Ended], None],
        reported: Callable[[K, bytes], None],
        steps: Callable[[K, Coroutine[Any, Any, Ended]], Awaitable[Ended]] | None = None,
    ) -> None:
        """`steps` may put something around each run."""
        self._steps = steps
        self.resources: object = None
        """What the app's lifespan has made."""
        self._around = around
        self._ended = ended
        self._reported = reported
        self._threads = ThreadPoolExecutor(threads, "holdfast-run")
        self._going: dict[K, tuple[asyncio.Task[Ended], CurrentJob]] = {}

    def start(self, key: K, handler: Handler, job: Job) -> None:
        current = CurrentJob(handler.queue, job, partial(self._reported, key), self.resources)
        run = perform(job, current, handler, self._around, self._threads)
        if self._steps is not None:
            run = _awaited(self._steps(key, run))
        task = asyncio.get_running_loop().create_task(run)
        self._going[key] = (task, current)
        task.add_done_callback(partial(self._done, key))

    def stop(self, key: K, why: StopReason) -> None:
        """Ask a run to end."""
        if key in self._going:
            task, current = self._going[key]
            current.stopping = why
            if current.on_loop:
                task.cancel()

    def close(self) -> None:
        """Threads that are idle end now, the others with their runs."""
        self._threads.shutdown(wait=False)

    def _done(self, key: K, task: asyncio.Task[Ended]) -> None:
        _, current = self._going.pop(key)
        error = None if task.cancelled() else task.exception()
        self._ended(key, interrupted(error, current) if task.cancelled() or error else task.result())


async def _awaited(run: Awaitable[Ended]) -> Ended:
    return await run


class Inline(Executor):
    """Runs on the worker's own loop."""

    name = "inline"
    room_capacity = CAPACITY

    def __init__(self, handlers: Iterable[Handler], around: AppHooks) -> None:
        super().__init__()
        self._handlers = {handler.queue: handler for handler in handlers}
        self.runner: Runner[Run] = Runner(around, CAPACITY, ended=self._finish, reported=self._progressed)

    @property
    def config(self) -> list[QueueConfig]:
        return [handler.config for handler in self._handlers.values()]

    async def open(self, fleet: Capacity, to: Listener) -> None:
        await super().open(fleet, to)
        for handler in self._handlers.values():
            handler.check()
        fleet.open(0)

    async def watch(self) -> None:
        await asyncio.Event().wait()  # There is nothing that could.

    async def close(self) -> None:
        self.runner.close()

    def start(self, run: Run) -> None:
        self._began(run, 0)
        self.runner.start(run, self._handlers[run.queue], run.job)

    def _ask(self, run: Run, why: StopReason) -> None:
        self.runner.stop(run, why)

    def _past_its_grace(self, run: Run) -> None:
        run.given_up = True
        self._fleet.gave_up(run.queue)
        self._to.stuck(run)

    def _kill(self, run: Run) -> None:
        pass  # It cannot be.

    def _progressed(self, run: Run, progress: bytes) -> None:
        run.progress = progress
        self._to.reported()
