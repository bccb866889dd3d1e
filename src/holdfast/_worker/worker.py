"""The worker that users hold: it starts its parts, chooses the queues that it serves, and stops in good order.

The claimer starts a run, the executor reports that it has finished, the settler decides and settles.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

import msgspec

from holdfast._core.options import to_count
from holdfast._core.retry_policy import QueueConfig
from holdfast._worker.claimer import Claimer
from holdfast._worker.executor import Executor, Run
from holdfast._worker.heartbeat import Heartbeat
from holdfast._worker.settler import GIVE_UP_S, Settler
from holdfast._worker.telemetry import HookDispatcher
from holdfast.errors import OptionError, WorkerStopped
from holdfast.storage import Storage
from holdfast.storage.validation import FAILED_SUFFIX

MAX_QUEUES = 10_000
"""Most queues that a worker serves. Each announcement of the worker names all of them."""

log = logging.getLogger("holdfast.worker")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    queues: str | Sequence[str] | None = None
    """Names or patterns of the queues to serve; None for all."""
    lease_ms: int = 10_000
    grace_s: float = 25.0
    """How long runs may continue when the worker stops."""
    concurrency: int | None = None
    """Most runs at the same time; None for no limit but the capacity."""
    burst: bool = False
    """End when no job is ready any more."""
    max_burst_jobs: int | None = None
    """A burst ends after this number of runs; None for no limit."""
    heartbeat: bool = True
    """Extend the leases of runs. False only in tests in which the clock of the storage does not move."""


class WorkerContext:
    """The objects that the parts of one worker share, on its event loop. The heartbeat's thread reads `settings` and
    copies `held`, which is one atomic step of the interpreter."""

    def __init__(self, settings: WorkerSettings, executor: Executor, hooks: HookDispatcher) -> None:
        self.settings = settings
        self.executor = executor
        self.hooks = hooks
        self.storage: Storage
        """The storage of the jobs, once the worker has opened it."""
        self.configs: dict[str, QueueConfig] = {}
        """Queues that can be served, by name."""
        self.held: dict[tuple[str, str, int], Run] = {}
        """Runs whose jobs are claimed and not yet settled, and whose leases are not lost."""
        self.stopping = asyncio.Event()
        self.evicted = False
        """Whether the storage had the command that the worker should stop."""
        self.claimer = Claimer(self)
        self.settler = Settler(self)
        self.heartbeat = Heartbeat(self)

    def stop(self) -> None:
        self.stopping.set()
        self.claimer.changed.set()


class Worker:
    """Serves queues until it is stopped: `async with app.worker(): …`, or `await app.worker().run()`.

    Leaving the block stops it: it claims no more, runs may finish within `grace`, and the others are stopped and go
    back to their place in the queue, uncounted.
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
            self._serve_configured()

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self._context.settings.name

    @property
    def started(self) -> bool:
        """Whether the worker has begun to serve. It may have ended since."""
        return self._main is not None

    @property
    def queues(self) -> list[str]:
        """Names of the queues that the worker serves."""
        return list(self._context.claimer.capacity.served)

    @property
    def running(self) -> int:
        """Number of runs at the moment."""
        return self._context.claimer.capacity.runs

    def set_concurrency(self, concurrency: int | None) -> None:
        """Change the maximum number of concurrent runs, also while the worker runs; None for no limit but the capacity.
        Runs that exceed the new maximum may finish. Call this on the event loop of the worker."""
        claimer = self._context.claimer
        claimer.capacity.max_runs = None if concurrency is None else to_count("concurrency", concurrency, 1)
        claimer.changed.set()

    # From start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise OptionError(f"worker {self.name} was started already: make another with app.worker()")
        self._entered = True
        context = self._context
        try:
            await context.executor.open(context)
            self._stack.push_async_callback(context.executor.close)
            context.storage = await self._stack.enter_async_context(self._open_storage())
            self._serve_configured()
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
        except Exception:
            if not isinstance(exc[1], WorkerStopped):  # That error has this one as its cause.
                raise
        except asyncio.CancelledError:
            self.stop(quick=True)
            await self._main
            raise
        finally:
            await self._stack.aclose()

    async def wait(self) -> None:
        """Wait until the worker has stopped: after `stop()`, or at the end of a burst. Raises `WorkerStopped` if it was
        evicted or has failed: nothing serves its queues in this program any more."""
        if self._main is None:
            raise OptionError(f"worker {self.name} was not started: wait inside 'async with app.worker() as worker:'")
        await asyncio.wait([self._main])
        if not self._main.cancelled() and (error := self._main.exception()) is not None:
            raise WorkerStopped(f"worker {self.name} has failed: {error}") from error
        if self._context.evicted:
            raise WorkerStopped(f"worker {self.name} was evicted")

    async def run(self) -> None:
        """Serve until `stop()`; in a burst, until no job is ready any more."""
        async with self:
            assert self._main is not None
            await asyncio.wait([self._main])

    def stop(self, *, quick: bool = False) -> None:
        """Stop serving. `quick` gives runs about one more second."""
        if quick:
            self._context.executor.hurry()
        self._context.stop()

    async def _serve(self) -> None:
        """Run all parts. Claimer and settler end by themselves: no claimed job and no finished run is left."""
        context, executor = self._context, self._context.executor
        log.info("worker %s serves %s", self.name, ", ".join(self.queues))
        context.heartbeat.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                settling = tasks.create_task(context.settler.run())
                dispatching = tasks.create_task(context.hooks.run())
                watching = [tasks.create_task(part.watch()) for part in (executor, context.heartbeat)]
                await tasks.create_task(context.claimer.run())
                await executor.end_runs(executor.runs, context.settings.grace_s)
                context.settler.end()
                await settling
                await context.hooks.end(dispatching, GIVE_UP_S)
                for task in watching:
                    task.cancel()
        except Exception:
            log.exception("worker %s failed: this is a bug in Holdfast", self.name)
            raise
        finally:
            await context.heartbeat.stop()
            log.info("worker %s has stopped", self.name)

    # Queues

    @property
    def can_reload(self) -> bool:
        """Whether `reload` loads the code again: only child processes can."""
        return self._context.executor.can_reload

    async def reload(self) -> bool:
        """Replace the child processes one by one, so that they load the code again, and serve the tasks of the new
        code. Returns False, and keeps the old code, if the new code does not load or there are no child processes."""
        if not await self._context.executor.reload():
            return False
        self._serve_configured()
        return True

    def _serve_configured(self) -> None:
        """Serve the queues that the executor runs now, with their present settings: at the start, and after the code
        was loaded again. Queues that it does not run any more are left, even if none remains."""
        context, capacity, before = self._context, self._context.claimer.capacity, self._context.configs
        context.configs = {config.queue: config for config in context.executor.configs}
        for queue in set(self.queues) - set(context.configs):
            capacity.leave(queue)
        chosen = choose(context.configs, context.settings.queues)
        for queue in set(self.queues) - set(chosen):
            capacity.leave(queue)
        still = [queue for queue in chosen if queue not in before or queue in capacity.served]
        self._serve_queues(still)

    def serve(self, queues: str | Iterable[str]) -> list[str]:
        """Begin to serve these queues as well, by name or pattern. Returns all queues that the worker serves now."""
        self._serve_queues(choose(self._context.configs, queues))
        return self.queues

    def _serve_queues(self, queues: list[str]) -> None:
        context = self._context
        if len(context.claimer.capacity.served.keys() | queues) > MAX_QUEUES:
            raise OptionError(f"a worker serves at most {MAX_QUEUES} queues: choose some of them with queues=…")
        context.claimer.serve(context.configs[queue] for queue in queues)

    async def stop_serving(self, queues: str | Iterable[str], *, grace: float | None = None) -> None:
        """Claim no more from these queues. Their runs may finish within `grace` seconds, by default the grace of the
        worker; the others are stopped and go back uncounted. Returns when all of them have ended."""
        names = set(choose(self._context.configs, queues))
        for queue in names:
            self._context.claimer.capacity.leave(queue)
        runs = [run for run in self._context.executor.runs if run.queue in names]
        await self._context.executor.end_runs(runs, self._context.settings.grace_s if grace is None else grace)
        await self._context.settler.until_settled(names)


def choose(known: Iterable[str], queues: str | Iterable[str] | None) -> list[str]:
    """The queues that match names or patterns, each task with the queue of its fail handler. A pattern that ends in
    `/failed` chooses fail handlers alone."""
    names = list(known)
    if not names:
        raise OptionError("this app has no tasks: import the modules that define them before the worker starts")
    patterns = ["*"] if queues is None else [queues] if isinstance(queues, str) else list(queues)
    chosen: set[str] = set()
    for pattern in patterns:
        only_failed = pattern.endswith(FAILED_SUFFIX)
        candidates = [name for name in names if name.endswith(FAILED_SUFFIX) is only_failed]
        matching = fnmatch.filter(candidates, pattern)
        if not matching:
            what = "fail handler" if only_failed else "task"
            raise OptionError(f"no {what} matches {pattern!r:.80}: the app has {', '.join(candidates) or 'none'}")
        chosen.update(matching)
    return [name for name in names if name in chosen or name.removesuffix(FAILED_SUFFIX) in chosen]
