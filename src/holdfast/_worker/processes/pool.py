"""Runs in child processes, which can be killed: a handler may hang, crash or eat memory, and costs nobody else a job.

Here is the set of them: how many there are, which run goes where, and how one is replaced: first its successor comes,
then it takes no more runs, and goes when those it has are over. The life of one is in child_handle.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from holdfast._core.capacity import Capacity
from holdfast._core.retry_policy import Ended, QueueConfig, Stopped
from holdfast._worker.executor import Executor, Listener, OnEvent, Run, StopReason
from holdfast._worker.logs import Logs
from holdfast._worker.processes.child_handle import CannotStart, ChildHandle, ChildState, Parent
from holdfast._worker.processes.messages import Begin, Hello
from holdfast._worker.processes.relay import HookForwarder, log_trouble
from holdfast.errors import HoldfastError
from holdfast.version import VERSION

CAPACITY = 100
"""Units of one child."""
LOOK_S = 0.25
"""How often children are looked at."""
PATIENCE_S = 6.0
"""How long children may take to leave, when the pool closes."""
REFUSED_S = 1.0
"""A queue that a child does not know, because its code is another, is left alone for so long."""
SPARE_IDLE_S = 10.0
"""A spare child is kept this long for the next run that must be alone."""
RESTART_S = (0.1, 5.0)
"""After a child that could not start: the first pause, and the longest."""

log = logging.getLogger("holdfast.worker")


class Pool(Executor):
    """Child processes, started, fed, watched and replaced."""

    name = "processes"
    room_capacity = CAPACITY

    def __init__(
        self,
        target: str,
        path: Sequence[str],
        *,
        processes: int,
        worker: str,
        drain_grace_s: float = 10.0,
        max_jobs: int | None = None,
        max_memory: int | None = None,
        logs: Logs | None = None,
        relays: bool = False,
    ) -> None:
        """`relays`: the app's hooks are called in a child, because this process knows none of its code."""
        super().__init__()
        self._begin = Begin(VERSION, worker, target, list(path), logs)
        self._processes = processes
        self._drain_grace_s = drain_grace_s
        self.kill_allowance_s = drain_grace_s + 2.0
        self._max_jobs = max_jobs
        self._max_memory = max_memory
        self._relays = relays
        self._relay = HookForwarder(lambda: self._children.values())
        self._children: dict[int, ChildHandle] = {}
        self._numbers = itertools.count(1)
        self._in_hand: deque[Run] = deque()
        """Runs that wait for a room."""
        self._hello: Hello | None = None
        self._pause_s = RESTART_S[0]
        self._restart_at = 0.0
        self._reloading: asyncio.Task[None] | None = None
        self._turned = asyncio.Event()
        """Something has changed with a child."""
        self._winding_down = False
        self._closing = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup

    # From start to end

    async def open(self, fleet: Capacity, to: Listener) -> None:
        """Start the first child, and have it load the app."""
        await super().open(fleet, to)
        started = asyncio.Event()
        self._main = asyncio.create_task(self._supervise(started), name="holdfast pool")
        try:
            await started.wait()
            first = self._spawn()
            await self._until(lambda: first.hello is not None or first.failure is not None)
            if first.failure is not None:
                raise first.failure
            self._hello = first.hello
            self._fill()
        except BaseException:
            await self.close()
            raise

    async def _supervise(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            started.set()
            watching = self._tasks.create_task(self._watch())
            try:
                await self._closing.wait()
            finally:
                self._closing.set()
                watching.cancel()
            for child in list(self._children.values()):
                child.leave()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._until(lambda: not self._children)
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
        """Have every child leave, and kill those that do not."""
        self._closing.set()
        if self._main is not None:
            await asyncio.shield(self._main)

    @property
    def hello(self) -> Hello:
        """What the newest child has said of the app."""
        assert self._hello is not None
        return self._hello

    @property
    def config(self) -> list[QueueConfig]:
        return [] if self._hello is None else self._hello.config

    async def _until(self, true: Callable[[], bool]) -> None:
        """Until something is so of the children."""
        while not true():
            self._turned.clear()
            await self._turned.wait()

    async def _watch(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(LOOK_S)
            now = asyncio.get_running_loop().time()
            for child in list(self._children.values()):
                child.look(number, now)
                if child.open:
                    self._fleet.hears(child.number, not child.is_deaf(now))
                    if child.spare and not child.runs and now >= child.idle_since + SPARE_IDLE_S:
                        child.drain()
            self._fill()
            self._place_those_in_hand()

    # Children come and go

    def _spawn(self, *, spare: bool = False) -> ChildHandle:
        parent = Parent(self._moved, self._run_over, self._refused, self._to.reported, self._answered)
        try:
            child = ChildHandle(
                next(self._numbers), self._begin, parent, spare=spare, drain_grace_s=self._drain_grace_s
            )
        except OSError as error:
            raise CannotStart(f"a child process could not be started: {error}") from error
        keeping = self._keep(child)
        try:
            self._tasks.create_task(keeping, name=f"holdfast child {child.process.pid}")
        except RuntimeError:  # The group takes no more: we are about to end.
            keeping.close()
            child.process.kill()
            child.process.close()
            raise CannotStart("the worker is about to end") from None
        self._children[child.number] = child
        return child

    async def _keep(self, child: ChildHandle) -> None:
        try:
            await child.live()
        except BaseException:
            self._closing.set()  # The pool is cancelled, or breaks down: no more children.
            raise
        finally:
            self._gone(child)

    def _gone(self, child: ChildHandle) -> None:
        del self._children[child.number]
        if child.hello is not None:
            self._fleet.drop(child.number)
        if child.failure is not None:
            self._could_not_start(child.failure, spare=child.spare)
        elif child.crashed and not child.taken:
            self._wait_before_the_next()  # It was no handler's doing: the next one may end likewise.
        self._turned.set()
        self._see_to_everything()

    def _moved(self, child: ChildHandle) -> None:
        """A child is in another phase."""
        self._turned.set()
        if child.hello is None:
            return  # It could not start: it is not known why before it is gone.
        if child.phase is ChildState.OPEN:
            self._fleet.open(child.number, spare=child.spare)
            self._retire_one_too_many()
            self._relay.flush()
        else:
            self._fleet.shut(child.number)
        self._see_to_everything()

    def _see_to_everything(self) -> None:
        self._fill()
        self._place_those_in_hand()
        self._to.changed()

    def _fill(self) -> None:
        """Have as many children as there shall be. One that is worn counts as gone: its successor comes first."""
        there = [
            c for c in self._children.values() if not c.spare and c.phase in (ChildState.STARTING, ChildState.OPEN)
        ]
        self._start(self._processes - sum(not child.worn for child in there))

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
        if now >= self._restart_at:  # Several at one moment are one trouble.
            self._restart_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RESTART_S[1])

    def _retire_one_too_many(self) -> None:
        """A successor has come: one that is worn goes, the oldest if none is."""
        there = [child for child in self._children.values() if child.open and not child.spare]
        if len(there) > self._processes:
            min(there, key=lambda child: (not child.worn, child.number)).drain()

    def _wear_out(self, child: ChildHandle, why: str) -> None:
        if child.open and not (child.worn or child.spare):
            log.info("child %d is replaced: %s", child.process.pid, why)
            child.worn = True
            self._fill()

    def _answered(self, child: ChildHandle, memory: int) -> None:
        self._relay.flush()
        if self._max_memory is not None and memory > self._max_memory and child.taken:
            self._wear_out(child, f"it has {memory >> 20} MiB in memory")

    # Runs

    @property
    def runs(self) -> list[Run]:
        return [*self._runs, *self._in_hand]

    def start(self, run: Run) -> None:
        if not self._place(run):
            self._in_hand.append(run)
            self._fleet.take_in_hand(run.queue, alone=run.alone)
            self._start_spares()

    def _place(self, run: Run) -> bool:
        room = self._fleet.find_room(run.queue, alone=run.alone)
        if room is None:
            return False
        child = self._children[room]
        self._began(run, room)
        child.give(run)
        if self._max_jobs is not None and child.taken >= self._max_jobs:
            self._wear_out(child, f"it was given {child.taken} jobs")
        return True

    def _place_those_in_hand(self) -> None:
        for run in list(self._in_hand):
            if self._place(run):
                self._let_go(run)
        self._start_spares()

    def _let_go(self, run: Run) -> None:
        self._in_hand.remove(run)
        self._fleet.out_of_hand(run.queue, alone=run.alone)

    def _start_spares(self) -> None:
        """A run that must be alone gets a spare child, so that others do not wait for it. There are never more of those
        than of others."""
        spares = [c for c in self._children.values() if c.spare and c.phase in (ChildState.STARTING, ChildState.OPEN)]
        coming = sum(child.phase is ChildState.STARTING for child in spares)
        suspects = sum(run.alone for run in self._in_hand)
        self._start(min(suspects - coming, self._processes - len(spares)), spare=True)

    def _run_over(self, child: ChildHandle, run: Run, ended: Ended) -> None:
        if child.phase is not ChildState.OVER:
            self._pause_s = RESTART_S[0]
        self._finish(run, ended)
        if self._in_hand:
            self._place_those_in_hand()

    def _refused(self, run: Run) -> None:
        self._fleet.rest(run.queue, asyncio.get_running_loop().time() + REFUSED_S)

    def _ask(self, run: Run, why: StopReason) -> None:
        if run.room is None:
            self._let_go(run)
            self._finish(run, Stopped("not_started"))
        else:
            self._children[run.room].stop(run, why)

    def _past_its_grace(self, run: Run) -> None:
        self._child_of(run).doom()

    def _kill(self, run: Run) -> None:
        if not run.done:
            self._child_of(run).kill()

    def _child_of(self, run: Run) -> ChildHandle:
        assert run.room is not None
        return self._children[run.room]

    # Hooks

    @property
    def hooks(self) -> list[OnEvent]:
        return [self._relay.event] if self._relays and self.hello.hooks else []

    async def report_error(self, error: BaseException, where: str) -> None:
        """Trouble for the app's own hooks, or for the log."""
        if self.hello.error_hooks:
            self._relay.report_error(error, where)
        else:
            log_trouble(error, where)

    # New code

    async def reload(self) -> bool:
        """Replace every child by one that loads the code anew, one after the other. False if that does not start: then
        those that run go on."""
        if self._reloading is not None:
            return False
        old = [child for child in self._children.values() if not child.spare and not child.worn]
        self._reloading = self._tasks.create_task(self._roll(old))
        await asyncio.wait([self._reloading])
        ok = not self._reloading.cancelled()
        self._reloading = None
        if not ok:
            left = [child for child in old if child.open]
            for child in left:
                child.worn = False
            log.error("the new code does not load: %d of %d children go on with the old one", len(left), len(old))
        return ok

    async def _roll(self, old: Sequence[ChildHandle]) -> None:
        for child in old:
            await self._until(lambda: child.phase is not ChildState.STARTING)  # noqa: B023 -- It may have read the old code.
            self._wear_out(child, "the code is loaded anew")
            await self._until(lambda: not child.open)  # noqa: B023
        newest = [child.hello for child in self._children.values() if child.open and not child.spare]
        self._hello = newest[-1] if newest else self._hello
