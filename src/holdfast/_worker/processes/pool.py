"""Runs in child processes, which can be killed: a handler that hangs or crashes harms no other job.

The pool decides how many children there are, which child gets a run, and when a child is replaced: its successor is
started first, then it retires. child_handle.py has the life of one child.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from holdfast._core.applications import Application
from holdfast._core.retry_policy import Ended, QueueConfig, Stopped, StopReason
from holdfast._worker.executor import Executor, Run, wait_until
from holdfast._worker.logs import Logs
from holdfast._worker.processes.child_handle import ChildHandle, ChildState
from holdfast._worker.processes.messages import Begin, Happened, Hello, HookError, without_odd_id
from holdfast._worker.telemetry import HookBacklog, RunEvent, log_error
from holdfast.errors import HoldfastError
from holdfast.version import VERSION

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

CAPACITY = 100
"""Units of one child."""
CHECK_S = 0.25
"""Interval of the checks of all children."""
REFUSED_S = 1.0
"""How long nothing is claimed from a queue that a child does not know, because its code is older or newer."""
SPARE_IDLE_S = 10.0
"""How long a spare child is kept for the next isolated run."""
RESTART_S = (0.1, 5.0)
"""The first and the longest pause after a child that could not start."""

log = logging.getLogger("holdfast.worker")


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    """The app as `module:name`."""
    path: Sequence[str]
    """The `sys.path` of the children."""
    worker: str
    """Name of the worker, shown by ps."""
    processes: int
    drain_grace_s: float = 10.0
    """How long the other runs of a child may go on when one of them does not stop."""
    max_jobs: int | None = None
    """A child is replaced after this number of jobs."""
    max_memory: int | None = None
    """A child is replaced when it has more bytes in memory."""
    logs: Logs | None = None
    forwards_hooks: bool = False
    """The app's hooks are called in a child, because this process does not load the app."""


class Pool(Executor):
    name = "processes"
    host_capacity = CAPACITY
    can_reload = True

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__()
        self.settings = settings
        self._begin = Begin(VERSION, settings.worker, settings.target, list(settings.path), settings.logs)
        self.kill_allowance_s = settings.drain_grace_s + 2.0
        self._children: dict[int, ChildHandle] = {}
        self._hook_calls: HookBacklog[Happened | HookError] = HookBacklog()
        self._hook_child: ChildHandle | None = None
        """The child that gets all of them, so that hooks are called in order."""
        self._numbers = itertools.count(1)
        self._unplaced: deque[Run] = deque()
        """Runs that wait for a host."""
        self._hello: Hello | None = None
        self._first_failure: HoldfastError | None = None
        """Why the first child could not start."""
        self._pause_s = RESTART_S[0]
        self._restart_at = 0.0
        self._reloading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup
        self._loop: asyncio.AbstractEventLoop

    # From start to end

    async def open(self, context: WorkerContext) -> None:
        await super().open(context)
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.create_task(self._supervise(), name="holdfast pool")
        try:
            await wait_until(self._changed, lambda: self._hello is not None or self._first_failure is not None)
            if self._first_failure is not None:
                raise self._first_failure
            self._fill()
        except BaseException:
            await self.close()
            raise
        if self.settings.forwards_hooks and self.hello.hooks:
            context.hooks.on_event.append(self._publish)

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            watching = tasks.create_task(self._watch())
            self._spawn()
            try:
                await self._closing.wait()
            finally:
                self._closing.set()
                watching.cancel()
            for child in list(self._children.values()):
                child.leave()

    async def watch(self) -> None:
        assert self._main is not None
        await asyncio.shield(self._main)

    async def close(self) -> None:
        await super().close()
        self._hook_calls.log_dropped()
        self._closing.set()
        if self._main is not None:
            await asyncio.shield(self._main)

    @property
    def hello(self) -> Hello:
        """What the newest child reported about the app."""
        assert self._hello is not None
        return self._hello

    @property
    def source_folders(self) -> list[str]:
        """Folders of the source files of the app, once it is loaded."""
        return [] if self._hello is None else self._hello.folders

    @property
    def configs(self) -> list[QueueConfig]:
        return [] if self._hello is None else self._hello.configs

    async def _watch(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(CHECK_S)
            now = asyncio.get_running_loop().time()
            for child in list(self._children.values()):
                child.check(number, now)
                if child.open:
                    self._capacity.hosts[child.number].unresponsive = child.is_unresponsive(now)
                    if child.spare and not child.runs and now >= child.idle_since + SPARE_IDLE_S:
                        child.retire()
            self._fill()
            self._place_waiting()

    # Children come and go

    def _spawn(self, *, spare: bool = False) -> None:
        child = ChildHandle(next(self._numbers), self, self._begin, spare=spare)
        self._tasks.create_task(self._keep(child), name=f"holdfast child {child.number}")
        self._children[child.number] = child

    async def _keep(self, child: ChildHandle) -> None:
        try:
            await child.live()
        except BaseException:
            self._closing.set()  # The pool is cancelled, or breaks down: no more children.
            raise
        finally:
            del self._children[child.number]
            if child.failure is not None:
                self._could_not_start(child.failure, spare=child.spare)
            elif child.crashed and not child.taken:
                self._delay_next_start()  # No handler ran in this child: the next one may crash as well.
            self._changed.set()
            self._refresh()

    def child_moved(self, child: ChildHandle) -> None:
        self._changed.set()
        if child.hello is None:
            return  # It could not start. The reason is known when the process is gone.
        if child.open:
            if not child.spare:
                self._hello = child.hello
                self.application = Application(self.settings.target, child.hello.source)
            self._capacity.open_host(child.number, spare=child.spare)
            self._retire_one_too_many()
            self._call_hooks()
        else:
            self._capacity.close_host(child.number)
        self._refresh()

    def _refresh(self) -> None:
        self._fill()
        self._place_waiting()
        self._context.claimer.changed.set()

    def _fill(self) -> None:
        """Start the children that are missing, and spare ones for isolated runs that wait. A child that is to be
        replaced counts as missing: its successor comes first. There are at most as many spare children as others."""
        processes, spares = self.settings.processes, self._present(spare=True)
        self._start(processes - sum(not child.to_be_replaced for child in self._present(spare=False)))
        starting = sum(child.state is ChildState.STARTING for child in spares)
        isolated = sum(run.isolated for run in self._unplaced)
        self._start(min(isolated - starting, processes - len(spares)), spare=True)

    def _present(self, *, spare: bool) -> list[ChildHandle]:
        states = (ChildState.STARTING, ChildState.OPEN)
        return [child for child in self._children.values() if child.spare is spare and child.state in states]

    def _start(self, count: int, *, spare: bool = False) -> None:
        """Start children, unless the worker stops or a child could not start a moment ago."""
        if self._closing.is_set() or self._context.stopping.is_set() or self._hello is None:
            return
        if asyncio.get_running_loop().time() >= self._restart_at:
            for _ in range(count):
                self._spawn(spare=spare)

    def _could_not_start(self, error: HoldfastError, *, spare: bool) -> None:
        if self._hello is None:
            self._first_failure = error
        elif not self._closing.is_set():
            log.error("a child process could not start, the others go on: %s", error)
            self._delay_next_start()
            if self._reloading is not None and not spare:
                self._reloading.cancel()

    def _delay_next_start(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._restart_at:  # Several failures at the same time count once.
            self._restart_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RESTART_S[1])

    def _retire_one_too_many(self) -> None:
        """If there is one child too many, retire one: one that is to be replaced, otherwise the oldest."""
        present = [child for child in self._children.values() if child.open and not child.spare]
        if len(present) > self.settings.processes:
            min(present, key=lambda child: (not child.to_be_replaced, child.number)).retire()

    def _replace(self, child: ChildHandle, why: str) -> None:
        if child.open and not (child.to_be_replaced or child.spare):
            doing = "ending" if self._context.stopping.is_set() else "replacing"
            log.info("%s child %d: %s", doing, child.process.pid, why)
            child.to_be_replaced = True
            self._fill()

    def child_answered(self, child: ChildHandle, memory: int) -> None:
        """A child has answered a ping. `memory` is the bytes that it has in memory."""
        max_memory = self.settings.max_memory
        self._call_hooks()
        if max_memory is not None and memory > max_memory and child.taken:
            self._replace(child, f"it has {memory >> 20} MiB in memory")

    # Runs

    @property
    def runs(self) -> list[Run]:
        return [*self._runs, *self._unplaced]

    def start(self, run: Run) -> None:
        if not self._place(run):
            self._unplaced.append(run)
            self._capacity.count_unplaced(run.queue, 1, isolated=run.isolated)
            self._fill()

    def _place(self, run: Run) -> bool:
        host = self._capacity.find_host(run.queue, isolated=run.isolated)
        if host is None:
            return False
        child = self._children[host]
        self._started(run, host)
        child.give(run)
        if self.settings.max_jobs is not None and child.taken >= self.settings.max_jobs:
            self._replace(child, f"it was given {child.taken} jobs")
        return True

    def _place_waiting(self) -> None:
        for run in list(self._unplaced):
            if self._place(run):
                self._remove_unplaced(run)

    def _remove_unplaced(self, run: Run) -> None:
        self._unplaced.remove(run)
        self._capacity.count_unplaced(run.queue, -1, isolated=run.isolated)

    def finished(self, run: Run, ended: Ended) -> None:
        if run.host is not None and self._children[run.host].state is not ChildState.OVER:
            self._pause_s = RESTART_S[0]
        super().finished(run, ended)
        if run.host is not None and self._unplaced:
            self._place_waiting()

    def refused(self, run: Run) -> None:
        """A child does not know the queue of a run."""
        self._capacity.rest(run.queue, asyncio.get_running_loop().time() + REFUSED_S)

    def show_stack(self, run: Run, deliver: Callable[[str], None]) -> None:
        with suppress(RuntimeError):  # The loop has closed.
            self._loop.call_soon_threadsafe(self._show_stack, run, deliver)

    def _show_stack(self, run: Run, deliver: Callable[[str], None]) -> None:
        if run.host is None or run.done:
            deliver("")
        else:
            self._children[run.host].show_stack(run, deliver)

    def _ask_to_stop(self, run: Run, why: StopReason) -> None:
        if run.host is None:
            self._remove_unplaced(run)
            self.finished(run, Stopped("not_started"))
        else:
            self._children[run.host].stop(run, why)

    def _grace_over(self, run: Run) -> None:
        super()._grace_over(run)
        assert run.host is not None
        self._children[run.host].kill_soon()

    def _kill(self, run: Run) -> None:
        if run.host is not None and not run.done:
            self._children[run.host].kill()

    # Hooks

    def _publish(self, event: RunEvent) -> None:
        self._call_hooks(Happened(*without_odd_id(event)))

    async def report_error(self, error: BaseException, where: str) -> None:
        """Report an error to the app's error hooks, or to the log if there is none."""
        if self.hello.error_hooks:
            self._call_hooks(HookError(type(error).__name__, str(error), where))
        else:
            log_error(error, where)

    def _call_hooks(self, *calls: Happened | HookError) -> None:
        """Send events and errors to the child that calls the app's hooks. They wait while that child does not answer;
        another child gets them only when it is gone."""
        for call in calls:
            self._hook_calls.add(call)
        if self._hook_child is None or not self._hook_child.open:
            open_children = (child for child in self._children.values() if child.open and not child.spare)
            self._hook_child = next(open_children, None)
        if self._hook_child is not None and not self._hook_child.is_unresponsive(asyncio.get_running_loop().time()):
            while waiting := self._hook_calls.waiting:
                self._hook_child.send(waiting.popleft())

    # New code

    async def reload(self) -> bool:
        """Replace every child by one that loads the code again, one after the other. Returns False if the new code does
        not load; the children that are left go on with the old code."""
        if self._reloading is not None:
            return False
        old = [child for child in self._children.values() if not child.spare and not child.to_be_replaced]
        self._reloading = self._tasks.create_task(self._roll(old))
        await asyncio.wait([self._reloading])
        ok = not self._reloading.cancelled()
        self._reloading = None
        if not ok:
            left = [child for child in old if child.open]
            for child in left:
                child.to_be_replaced = False
            log.error("the new code does not load: %d of %d children keep the old code", len(left), len(old))
        return ok

    async def _roll(self, old: Sequence[ChildHandle]) -> None:
        for child in old:
            await wait_until(self._changed, lambda: child.state is not ChildState.STARTING)  # noqa: B023 -- It may have read the old code.
            self._replace(child, "loading the code again")
            await wait_until(self._changed, lambda: not child.open)  # noqa: B023
