"""Runs in child processes, which can be killed: a handler may hang, crash or eat memory, and costs no other job.

The pool decides how many children there are, which run goes to which, and how one is replaced: first its successor is
started, then it retires: it takes no more runs, and exits when those it has are over. The life of one child is in
child_handle.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast._core.retry_policy import Ended, QueueConfig, Stopped, StopReason
from holdfast._worker.executor import Executor, Run, wait_until
from holdfast._worker.processes.child_handle import ChildHandle, ChildStartError, ChildState
from holdfast._worker.processes.messages import Begin, Happened, Hello, HookError, without_odd_id
from holdfast._worker.telemetry import Logs, OnEvent, RunEvent, log_error
from holdfast.errors import HoldfastError
from holdfast.version import VERSION

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

CAPACITY = 100
"""Units of one child."""
CHECK_S = 0.25
"""Interval of the checks of all children."""
PATIENCE_S = 6.0
"""How long children may take to leave, when the pool closes."""
REFUSED_S = 1.0
"""Nothing is claimed for this long from a queue that a child does not know, because its code is older or newer."""
SPARE_IDLE_S = 10.0
"""A spare child is kept this long for the next isolated run."""
RESTART_S = (0.1, 5.0)
"""After a child that could not start: the first pause, and the longest."""
MAX_HOOK_CALLS = 10_000
"""Events for the app's hooks that wait for a child that can take them; the oldest are dropped."""

log = logging.getLogger("holdfast.worker")


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    target: str
    """Where children find the app: `module:name`."""
    path: Sequence[str]
    """Where modules are found: `sys.path`."""
    worker: str
    """The worker's name, shown by ps."""
    processes: int
    drain_grace_s: float = 10.0
    """How long the other runs of a child may go on when one of them does not stop."""
    max_jobs: int | None = None
    """A child is replaced after this many jobs."""
    max_memory: int | None = None
    """A child is replaced when it has more bytes in memory."""
    logs: Logs | None = None
    forwards_hooks: bool = False
    """The app's hooks are called in a child, because this process has none of its code."""


class Pool(Executor):
    name = "processes"
    host_capacity = CAPACITY

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__()
        self.settings = settings
        self._begin = Begin(VERSION, settings.worker, settings.target, list(settings.path), settings.logs)
        self.kill_allowance_s = settings.drain_grace_s + 2.0
        self._children: dict[int, ChildHandle] = {}
        self._hook_calls: deque[Happened | HookError] = deque(maxlen=MAX_HOOK_CALLS)
        self._hook_child: ChildHandle | None = None
        self._numbers = itertools.count(1)
        self._unplaced: deque[Run] = deque()
        """Runs that wait for a host."""
        self._hello: Hello | None = None
        self._pause_s = RESTART_S[0]
        self._restart_at = 0.0
        self._reloading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._winding_down = False
        self._closing = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup

    # From start to end

    async def open(self, context: WorkerContext) -> None:
        await super().open(context)
        started = asyncio.Event()
        self._main = asyncio.create_task(self._supervise(started), name="holdfast pool")
        try:
            await started.wait()
            first = self._spawn()
            await wait_until(self._changed, lambda: first.hello is not None or first.failure is not None)
            if first.failure is not None:
                raise first.failure
            self._hello = first.hello
            self._fill()
        except BaseException:
            await self.close()
            raise

    async def _supervise(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            started.set()
            watching = tasks.create_task(self._watch())
            try:
                await self._closing.wait()
            finally:
                self._closing.set()
                watching.cancel()
            for child in list(self._children.values()):
                child.leave()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await wait_until(self._changed, lambda: not self._children)
            except TimeoutError:
                for child in list(self._children.values()):
                    log.warning("child %d does not leave: it is killed", child.process.pid)
                    child.kill()

    async def watch(self) -> None:
        assert self._main is not None
        await asyncio.shield(self._main)

    def wind_down(self) -> None:
        self._winding_down = True

    async def close(self) -> None:
        self._closing.set()
        if self._main is not None:
            await asyncio.shield(self._main)

    @property
    def hello(self) -> Hello:
        """What the newest child reported about the app."""
        assert self._hello is not None
        return self._hello

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

    def _spawn(self, *, spare: bool = False) -> ChildHandle:
        try:
            child = ChildHandle(next(self._numbers), self, self._begin, spare=spare)
        except OSError as error:
            raise ChildStartError(f"a child process could not be started: {error}") from error
        keeping = self._keep(child)
        try:
            self._tasks.create_task(keeping, name=f"holdfast child {child.process.pid}")
        except RuntimeError:  # The group takes no more: we are about to end.
            keeping.close()
            child.process.kill()
            child.process.close()
            raise ChildStartError("the worker is about to end") from None
        self._children[child.number] = child
        return child

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
                self._wait_before_the_next()  # No handler ran in it: the next one may end likewise.
            self._changed.set()
            self._refresh()

    def child_moved(self, child: ChildHandle) -> None:
        self._changed.set()
        if child.hello is None:
            return  # It could not start: it is not known why before it is gone.
        if child.state is ChildState.OPEN:
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
        """Start the children that are missing. One that is to be replaced counts as gone: its successor comes
        first."""
        self._start(self.settings.processes - sum(not child.to_be_replaced for child in self._present(spare=False)))

    def _present(self, *, spare: bool) -> list[ChildHandle]:
        states = (ChildState.STARTING, ChildState.OPEN)
        return [child for child in self._children.values() if child.spare is spare and child.state in states]

    def _start(self, count: int, *, spare: bool = False) -> None:
        """Start children, unless the worker ends, or it was tried in vain a moment ago."""
        if self._closing.is_set() or self._winding_down or self._hello is None:
            return
        for _ in range(count):
            if asyncio.get_running_loop().time() < self._restart_at:
                return
            try:
                self._spawn(spare=spare)
            except HoldfastError as error:
                self._could_not_start(error, spare=spare)

    def _could_not_start(self, error: HoldfastError, *, spare: bool) -> None:
        if self._hello is None or self._closing.is_set():
            return
        log.error("a child process does not start, those that run go on: %s", error)
        self._wait_before_the_next()
        if self._reloading is not None and not spare:
            self._reloading.cancel()

    def _wait_before_the_next(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._restart_at:  # Several failures at one moment count once.
            self._restart_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RESTART_S[1])

    def _retire_one_too_many(self) -> None:
        """A successor is ready: a child that is to be replaced retires, the oldest if there is none."""
        present = [child for child in self._children.values() if child.open and not child.spare]
        if len(present) > self.settings.processes:
            min(present, key=lambda child: (not child.to_be_replaced, child.number)).retire()

    def _replace(self, child: ChildHandle, why: str) -> None:
        if child.open and not (child.to_be_replaced or child.spare):
            log.info("child %d is replaced: %s", child.process.pid, why)
            child.to_be_replaced = True
            self._fill()

    def child_answered(self, child: ChildHandle, memory: int) -> None:
        """A child has answered a ping, and has this many bytes in memory."""
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
            self._start_spares()

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
        self._start_spares()

    def _remove_unplaced(self, run: Run) -> None:
        self._unplaced.remove(run)
        self._capacity.count_unplaced(run.queue, -1, isolated=run.isolated)

    def _start_spares(self) -> None:
        """Start spare children for isolated runs, so that others do not wait for those. There are never more spare
        children than others."""
        spares = self._present(spare=True)
        coming = sum(child.state is ChildState.STARTING for child in spares)
        suspects = sum(run.isolated for run in self._unplaced)
        self._start(min(suspects - coming, self.settings.processes - len(spares)), spare=True)

    def finished(self, run: Run, ended: Ended) -> None:
        if run.host is not None and self._children[run.host].state is not ChildState.OVER:
            self._pause_s = RESTART_S[0]
        super().finished(run, ended)
        if run.host is not None and self._unplaced:
            self._place_waiting()

    def refused(self, run: Run) -> None:
        """A child does not know the queue of a run."""
        self._capacity.rest(run.queue, asyncio.get_running_loop().time() + REFUSED_S)

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

    @property
    def event_hooks(self) -> list[OnEvent]:
        return [self._publish] if self.settings.forwards_hooks and self.hello.hooks else []

    def _publish(self, event: RunEvent) -> None:
        self._call_hooks(Happened(*without_odd_id(event)))

    async def report_error(self, error: BaseException, where: str) -> None:
        """Report an error to the app's error hooks, or to the log if there is none."""
        if self.hello.error_hooks:
            self._call_hooks(HookError(type(error).__name__, str(error), where))
        else:
            log_error(error, where)

    def _call_hooks(self, *calls: Happened | HookError) -> None:
        """Send events and errors to the app's hooks, where the app's code is. One child gets all of them, so that hooks
        are called in order; another one only when that one is gone. While it does not answer, they wait."""
        self._hook_calls.extend(calls)
        if self._hook_child is None or not self._hook_child.open:
            open_children = (child for child in self._children.values() if child.open and not child.spare)
            self._hook_child = next(open_children, None)
        if self._hook_child is not None and not self._hook_child.is_unresponsive(asyncio.get_running_loop().time()):
            while self._hook_calls:
                self._hook_child.send(self._hook_calls.popleft())

    # New code

    async def reload(self) -> bool:
        """Replace every child by one that loads the code again, one after the other. False if that does not start: then
        those that run go on."""
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
            log.error("the new code does not load: %d of %d children go on with the old one", len(left), len(old))
        return ok

    async def _roll(self, old: Sequence[ChildHandle]) -> None:
        for child in old:
            await wait_until(self._changed, lambda: child.state is not ChildState.STARTING)  # noqa: B023 -- It may have read the old code.
            self._replace(child, "the code is loaded again")
            await wait_until(self._changed, lambda: not child.open)  # noqa: B023
        newest = [child.hello for child in self._children.values() if child.open and not child.spare]
        self._hello = newest[-1] if newest else self._hello
