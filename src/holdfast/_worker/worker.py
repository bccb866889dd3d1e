"""The worker that users hold: starts its parts, chooses the queues that it serves, and stops in good order.

The parts are claimer, settler, heartbeat and an executor (`Inline`, or the processes of pool.py); `WorkerContext` is
what they share. The claimer starts a run, the executor says that it has finished, the settler decides and settles.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

import msgspec

from holdfast._core.retry_policy import QueueConfig
from holdfast._worker.claimer import Claimer
from holdfast._worker.executor import Executor, Run
from holdfast._worker.heartbeat import Heartbeat
from holdfast._worker.settler import GIVE_UP_S, Settler
from holdfast._worker.telemetry import HookDispatcher
from holdfast.errors import OptionError
from holdfast.storage import Storage
from holdfast.storage.validation import FAILED_SUFFIX

log = logging.getLogger("holdfast.worker")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queues: str | Sequence[str] | None = None
    """Names or patterns of the queues to serve; None is all."""
    lease_ms: int = 10_000
    grace_s: float = 25.0
    """How long runs may go on when the worker stops."""
    concurrency: int | None = None
    """Most runs at the same time."""
    burst: bool = False
    """End when nothing is ready any more."""
    heartbeat: bool = True
    """Extend leases while runs go on. False only where the clock of the storage stands still."""


class WorkerContext:
    """What the parts of one worker share. It is used on the worker's event loop; the heartbeat's thread reads settings
    and copies `held`, which is one atomic step of the interpreter."""

    def __init__(self, settings: WorkerSettings, executor: Executor, hooks: HookDispatcher) -> None:
        self.settings = settings
        self.executor = executor
        self.hooks = hooks
        self.storage: Storage
        """The storage of the jobs, once the worker has opened it."""
        self.configs: dict[str, QueueConfig] = {}
        """What can be served, by queue."""
        self.held: dict[tuple[str, str, int], Run] = {}
        """Runs whose jobs are claimed and not yet settled, and whose leases are ours."""
        self.stopping = asyncio.Event()
        self.claimer = Claimer(self)
        self.settler = Settler(self)
        self.heartbeat = Heartbeat(self)

    def stop(self) -> None:
        self.stopping.set()
        self.claimer.stop()


class Worker:
    """Serves queues until it is stopped: `async with app.worker(): …`, or `await app.worker().run()`.

    Leaving the block stops it: nothing more is claimed, runs may finish within `grace`, the rest is stopped and goes
    back to its place in the queue, uncounted.
    """

    def __init__(
        self,
        executor: Executor,
        open_storage: Callable[[], AbstractAsyncContextManager[Storage]],
        settings: WorkerSettings,
        hooks: HookDispatcher,
    ) -> None:
        self._open_storage = open_storage
        self._context = WorkerContext(settings, executor, hooks)
        self._stack = AsyncExitStack()
        self._main: asyncio.Task[None] | None = None
        self._entered = False
        if executor.configs:
            self.reload_tasks()

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._context.settings.name

    @property
    def started(self) -> bool:
        """It has begun to serve, and may have ended since."""
        return self._main is not None

    @property
    def queues(self) -> list[str]:
        """The queues that it serves."""
        return list(self._context.claimer.capacity.served)

    @property
    def running(self) -> int:
        """How many runs are going on."""
        return self._context.claimer.capacity.runs

    # From start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise OptionError(f"worker {self.name} was started already: make another with app.worker()")
        self._entered = True
        try:
            await self._context.executor.open(self._context)
            self._stack.push_async_callback(self._context.executor.close)
            self._context.storage = await self._stack.enter_async_context(self._open_storage())
            self._context.hooks.on_event += self._context.executor.event_hooks
            self.reload_tasks()
        except BaseException:
            await self._stack.aclose()
            raise
        self._main = asyncio.create_task(self._serve(), name=f"holdfast worker {self.name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._main is not None
        self.stop()
        try:
            await asyncio.shield(self._main)
        except asyncio.CancelledError:
            self.stop(quick=True)
            await self._main
            raise
        finally:
            await self._stack.aclose()

    async def run(self) -> None:
        """Serve until `stop()`; in a burst, until nothing is ready any more."""
        async with self:
            assert self._main is not None
            await asyncio.wait([self._main])

    def stop(self, *, quick: bool = False) -> None:
        """Stop serving. `quick` gives runs hardly any more time."""
        if quick:
            self._context.executor.hurry()
        self._context.stop()

    async def _serve(self) -> None:
        """Run all parts. Claimer and settler end by themselves, so that each job that was claimed is started or given
        back, and each run that has finished is settled."""
        context = self._context
        log.info("worker %s serves %s", self.name, ", ".join(self.queues))
        context.heartbeat.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                settling = tasks.create_task(context.settler.run())
                dispatching = tasks.create_task(self._context.hooks.run())
                watching = [tasks.create_task(part.watch()) for part in (self._context.executor, context.heartbeat)]
                await tasks.create_task(context.claimer.run())
                context.stopping.set()
                self._context.executor.wind_down()
                await self._context.executor.end_runs(self._context.executor.runs, self._context.settings.grace_s)
                context.settler.end()
                await settling
                await self._context.hooks.end(dispatching, GIVE_UP_S)
                for task in watching:
                    task.cancel()
        except Exception:
            log.exception("worker %s has broken down: this is a bug in Holdfast", self.name)
            raise
        finally:
            await context.heartbeat.stop()
            log.info("worker %s has stopped", self.name)

    # Queues

    def reload_tasks(self) -> None:
        """Serve what the executor runs now, with its present settings: at the start, and after code was loaded again.
        Queues that it cannot run any more are left, even if none remains."""
        capacity, before = self._context.claimer.capacity, self._context.configs
        self._context.configs = configs = {config.queue: config for config in self._context.executor.configs}
        for queue in set(self.queues) - set(configs):
            capacity.leave(queue)
        chosen = choose(configs, self._context.settings.queues)
        for queue in set(before) & set(self.queues) - set(chosen):
            capacity.leave(queue)
        new = [queue for queue in chosen if queue not in before or queue in capacity.served]
        self._context.claimer.serve(configs[queue] for queue in new)

    def serve(self, queues: str | Iterable[str]) -> list[str]:
        """Begin to serve these queues as well, by name or pattern. Returns all queues that are served then."""
        configs = self._context.configs
        self._context.claimer.serve(configs[queue] for queue in choose(configs, queues))
        return self.queues

    async def stop_serving(self, queues: str | Iterable[str], *, grace: float | None = None) -> None:
        """Claim nothing more from these queues. Their runs may finish within `grace` seconds, the worker's own unless
        given; the rest is stopped and goes back uncounted. Returns when they are over."""
        names = set(choose(self._context.configs, queues))
        for queue in names:
            self._context.claimer.capacity.leave(queue)
        runs = [run for run in self._context.executor.runs if run.queue in names]
        await self._context.executor.end_runs(runs, self._context.settings.grace_s if grace is None else grace)
        await self._context.settler.until_settled(names)


def choose(known: Iterable[str], queues: str | Iterable[str] | None) -> list[str]:
    """The queues that are meant by names or patterns; a task's fail handler goes with it."""
    names = list(known)
    tasks = [name for name in names if not name.endswith(FAILED_SUFFIX)]
    if not tasks:
        raise OptionError("this app has no tasks: import the modules that define them before the worker starts")
    patterns = ["*"] if queues is None else [queues] if isinstance(queues, str) else list(queues)
    for pattern in patterns:
        if not fnmatch.filter(tasks, pattern):
            raise OptionError(f"no task is named like {pattern!r:.80}: there are {', '.join(tasks)}")
    chosen = {name for name in tasks if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    return [name for name in names if name.removesuffix(FAILED_SUFFIX) in chosen]
