"""Runs in child processes, which can be killed: a handler may hang, crash or eat memory, and costs nobody else a job.

A child that is to end is replaced first; it takes no more runs, and goes when those it has are over. One with a run
that does not stop drains: until its healthy runs are over, or it does not answer, or `drain_grace` has passed. Then it
is killed, and only when it is certainly dead is it said what became of its runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from holdfast.errors import HoldfastError, JobError, OptionError
from holdfast.execution import timed_out
from holdfast.fleet import Fleet, Terms
from holdfast.frames import (
    Begin,
    Broken,
    Done,
    FromChild,
    Happened,
    Hello,
    Leave,
    Link,
    Logs,
    Ping,
    Pong,
    Progress,
    Refused,
    Start,
    Stop,
    Trouble,
    frame_limit,
    without_odd_id,
)
from holdfast.policy import Crashed, Ended, Raised, Stopped, TimedOut, is_suspect
from holdfast.processes import Process
from holdfast.runs import Executor, Listener, OnEvent, Run, RunEvent, Why
from holdfast.version import VERSION

CAPACITY = 100
"""Units of one child."""
START_S = 60.0
"""How long a child may take to import the app."""
PING_EVERY_S = 0.25
IDLE_PINGS = 4
"""A child in which nothing runs is asked every so many times."""
LOST_S = 5.0
"""A child that has not answered for so long, and had nothing to do when it was asked, is of no use."""
DEAF_S = 1.0
"""A child that has not answered for so long is deaf: it gets nothing new, and while it drains it is killed."""
PART_S = 10.0
"""Half a frame is waited for this long."""
LEAVE_S = 5.0
"""How long a child may take to close what the app has opened."""
REFUSED_S = 1.0
"""A queue that a child does not know, because its code is another, is left alone for so long."""
EXIT_S = 0.1
"""A child whose connection ended is about to exit, or a handler has closed it: this long we look which."""
SPARE_IDLE_S = 10.0
"""A spare child is kept this long for the next run that must be alone."""
RESTART_S = (0.1, 5.0)
"""After a child that could not start: the first pause, and the longest."""
MAX_TOLD = 10_000
"""Events that wait for a child that can take them; the oldest are dropped."""

log = logging.getLogger("holdfast.worker")


class CannotStart(HoldfastError):
    """A child process could not load the app."""


class Child:
    """One child process, as its parent sees it."""

    def __init__(self, number: int, process: Process, ended: Callable[[Child], None], *, spare: bool = False) -> None:
        self.number = number
        self.process = process
        self._ended = ended
        self.spare = spare
        self.link: Link[FromChild]
        self.hello: Hello | None = None
        self.answered: Hello | Broken | None = None
        self.runs: dict[int, Run] = {}
        self.taken = 0
        """Runs that it was given."""
        self.worn = False
        """It shall be replaced, and goes on until it is."""
        self.draining = False
        """It takes no more."""
        self.doomed_at: float | None = None
        """Since when it has had a run that does not stop."""
        self.leaving_at: float | None = None
        """When it was told to go."""
        self.idle_since = 0.0
        self.pinged_at: float | None = None
        """When it was asked something that it has not answered."""
        self.step: tuple[int, int] = (0, 0)
        """What its loop was at when we last looked."""
        self.killed = False
        """We ended it, and it is not its fault."""
        self.over = asyncio.Event()
        """It has ended, or has to."""
        self.cause = ""
        self.misbehaved = False

    @property
    def open(self) -> bool:
        return self.hello is not None and not self.draining and not self.over.is_set()

    def is_at_something(self) -> bool:
        """Has it begun any of its runs?"""
        return any(self.process.steps.has_begun(number) for number in self.runs)

    def misbehave(self, cause: str) -> None:
        """It is over because of what it did, however it ends now."""
        self.misbehaved = not self.over.is_set()
        self.end(cause)

    def end(self, cause: str = "") -> None:
        """It is over. The first cause counts."""
        if not self.over.is_set():
            self.cause = cause
            self.over.set()
            self._ended(self)


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
        tells: bool = False,
    ) -> None:
        """`tells`: the app's hooks are called in a child, because this process knows none of its code."""
        super().__init__()
        self._begin = Begin(VERSION, worker, target, list(path), logs)
        self._processes = processes
        self._drain_grace_s = drain_grace_s
        self.gone_s = drain_grace_s + 2.0
        self._tells = tells
        self._max_jobs = max_jobs
        self._max_memory = max_memory
        self._children: dict[int, Child] = {}
        self._numbers = itertools.count(1)
        self._by_run: dict[Run, tuple[Child, int]] = {}
        self._in_hand: deque[Run] = deque()
        """Runs that wait for a room."""
        self._told: deque[Happened | Trouble] = deque(maxlen=MAX_TOLD)
        self._teller: Child | None = None
        self._hello: Hello | None = None
        self._attached = False
        self._winding_down = False
        self._pause_s = RESTART_S[0]
        self._restart_at = 0.0
        self._reload: asyncio.Task[None] | None = None
        self._turned = asyncio.Event()
        """A child has opened, drains, or is gone."""
        self._closing = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup

    # From start to end

    async def open(self) -> None:
        """Start the first child, and have it load the app."""
        first: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._main = asyncio.create_task(self._supervise(first), name="holdfast pool")
        try:
            self._hello = await first
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Have every child leave, and kill those that do not."""
        self._closing.set()
        if self._main is not None:
            await asyncio.shield(self._main)
            self._main = None

    async def watch(self) -> None:
        assert self._main is not None
        await asyncio.shield(self._main)

    def wind_down(self) -> None:
        self._winding_down = True

    @property
    def hello(self) -> Hello:
        """What the newest child has said of the app."""
        assert self._hello is not None
        return self._hello

    @property
    def terms(self) -> list[Terms]:
        return [] if self._hello is None else self._hello.terms

    @property
    def pids(self) -> list[int]:
        """The children that take runs."""
        return [child.process.pid for child in self._children.values() if child.open]

    async def _supervise(self, first: asyncio.Future[Hello]) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._spawn(first=first)
            watching = self._tasks.create_task(self._watch())
            try:
                await self._closing.wait()
            finally:
                self._closing.set()
                watching.cancel()
            for child in list(self._children.values()):
                self._leave(child)
            patience = self._tasks.create_task(self._kill_those_who_stay())
            await self._until(lambda: not self._children)
            patience.cancel()

    async def _kill_those_who_stay(self) -> None:
        await asyncio.sleep(LEAVE_S)
        for child in list(self._children.values()):
            log.warning("child %d does not leave: it is killed", child.process.pid)
            self._end(child)

    def _spawn(self, *, spare: bool = False, first: asyncio.Future[Hello] | None = None) -> None:
        try:
            process = Process("holdfast.child", self._begin.worker)
        except OSError as error:
            self._could_not_start(CannotStart(f"a child process could not be started: {error}"), first, spare=spare)
            return
        except OptionError as error:
            self._could_not_start(error, first, spare=spare)
            return
        child = Child(next(self._numbers), process, self._is_over, spare=spare)
        child.link = Link(
            FromChild, partial(self._received, child), child.misbehave, child.end, partial(self._unsendable, child)
        )
        self._children[child.number] = child
        keeping = self._keep(child, first)
        try:
            self._tasks.create_task(keeping, name=f"holdfast child {process.pid}")
        except RuntimeError:  # The group takes no more: we are about to end.
            keeping.close()
            process.kill()
            process.close()
            del self._children[child.number]

    async def _keep(self, child: Child, first: asyncio.Future[Hello] | None) -> None:
        """The life of a child: from its start to its certain death."""
        try:
            child.process.watch(child.end)
            await child.link.connect(child.process.end)
            child.link.send(self._begin)
            hello = await self._greeted(child)
            self._opened(child, hello)
            if first is not None and not first.done():
                first.set_result(hello)
            await child.over.wait()
        except (CannotStart, OptionError) as error:
            child.killed = True
            self._could_not_start(error, first, spare=child.spare)
        except BaseException:  # The pool is cancelled: nothing may be left of it, and there may be no time to wait.
            self._closing.set()
            child.killed = True
            child.process.kill()
            raise
        finally:
            how = await child.process.bury(0.0 if child.killed else EXIT_S)
            self._buried(child, how)
            child.link.close()
            child.process.close()

    async def _greeted(self, child: Child) -> Hello:
        """What the child says of the app, once it has loaded it."""
        try:
            async with asyncio.timeout(START_S):
                await self._until(lambda: child.answered is not None or child.over.is_set())
        except TimeoutError:
            child.end(f"it was not ready within {START_S:g} s")
        if isinstance(child.answered, Broken):
            raise (OptionError if child.answered.mistake else CannotStart)(child.answered.message)
        if child.answered is None or child.over.is_set():
            why = await child.process.bury(EXIT_S) or child.cause
            raise CannotStart(f"a child process could not load {self._begin.target}: {why}")
        return child.answered

    def _could_not_start(self, error: HoldfastError, first: asyncio.Future[Hello] | None, *, spare: bool) -> None:
        if first is not None:
            if not first.done():
                first.set_exception(error)
        elif not self._closing.is_set():
            log.error("a child process does not start, those that run go on: %s", error)
            self._wait_before_the_next()
            if self._reload is not None and not spare:
                self._reload.cancel()

    def _wait_before_the_next(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._restart_at:  # Several at one moment are one trouble.
            self._restart_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, RESTART_S[1])

    def _opened(self, child: Child, hello: Hello) -> None:
        child.hello = hello
        self._turned.set()
        child.link.limit = frame_limit(hello.max_payload)
        child.idle_since = asyncio.get_running_loop().time()
        log.info("child %d is ready%s", child.process.pid, ", for suspects" if child.spare else "")
        if self._attached:
            self._take_in(child)
            if not child.spare:
                self._retire_one_too_many()
            self._flush_told()
            self._place_those_in_hand()
            self._to.changed()

    def _take_in(self, child: Child) -> None:
        self._fleet.open(child.number, spare=child.spare)

    def attach(self, fleet: Fleet, to: Listener) -> None:
        super().attach(fleet, to)
        self._attached = True
        for child in self._children.values():
            if child.open:
                self._take_in(child)
        self._fill()

    def _fill(self) -> None:
        """Have as many children as there shall be. One that is worn counts as gone: its successor comes first."""
        if self._closing.is_set() or self._winding_down or not self._attached:
            return
        there = sum(not (c.spare or c.worn or c.draining or c.over.is_set()) for c in self._children.values())
        if asyncio.get_running_loop().time() >= self._restart_at:
            for _ in range(self._processes - there):
                self._spawn()

    def _retire_one_too_many(self) -> None:
        """A successor has come: one that is worn goes, the oldest if none is."""
        there = [child for child in self._children.values() if child.open and not child.spare]
        if len(there) > self._processes:
            self._drain(min(there, key=lambda child: (not child.worn, child.number)))

    async def _until(self, true: Callable[[], bool]) -> None:
        """Until something is so of the children."""
        while not true():
            self._turned.clear()
            await self._turned.wait()

    # What happens to a child

    def _wear_out(self, child: Child, why: str) -> None:
        if child.open and not child.worn:
            log.info("child %d is replaced: %s", child.process.pid, why)
            child.worn = True
            self._fill()

    def _drain(self, child: Child) -> None:
        """It takes no more, and goes when its runs are over."""
        if not child.draining:
            child.draining = True
            self._turned.set()
            if self._attached and child.hello is not None:
                self._fleet.shut(child.number)
            self._fill()
        self._see_to(child)

    def _doom(self, child: Child) -> None:
        """One of its runs does not stop: it is replaced at once, and killed when that costs least."""
        if child.doomed_at is None:
            child.doomed_at = asyncio.get_running_loop().time()
            log.warning("child %d has a run that does not stop: it is replaced", child.process.pid)
        self._drain(child)

    def _is_over(self, child: Child) -> None:
        """It has ended, or is about to be killed: whatever it were given now would be lost."""
        self._turned.set()
        if self._attached and child.hello is not None and not child.draining:
            self._fleet.shut(child.number)

    def _see_to(self, child: Child) -> None:
        """A child that drains: is it time for it to go?"""
        if child.over.is_set() or not child.draining:
            return
        now = asyncio.get_running_loop().time()
        if not child.runs:
            self._leave(child)
        elif child.doomed_at is not None:
            overdue = sum(run.overdue for run in child.runs.values())
            if overdue == 0:
                child.doomed_at = None  # It ended after all.
            elif (
                overdue == len(child.runs) or self._is_deaf(child, now) or now >= child.doomed_at + self._drain_grace_s
            ):
                self._end(child)
        if child.leaving_at is not None and now >= child.leaving_at + LEAVE_S:
            log.warning("child %d does not leave: it is killed", child.process.pid)
            self._end(child)

    def _leave(self, child: Child) -> None:
        if child.leaving_at is None:
            child.draining = True
            child.leaving_at = asyncio.get_running_loop().time()
            if child.hello is None:
                self._end(child)
            else:
                child.link.send(Leave())

    def _end(self, child: Child) -> None:
        """Kill it. Its runs are told when it is dead."""
        child.killed = True
        child.end()

    def _buried(self, child: Child, how: str | None) -> None:
        """It is certainly dead. `how` it died by itself says more than what we heard of it."""
        why = child.cause if child.misbehaved else how or child.cause
        del self._children[child.number]
        self._turned.set()
        crashed = not child.killed and child.leaving_at is None
        if crashed or (child.runs and not child.killed):
            log.error("child %d has died with %d runs: %s", child.process.pid, len(child.runs), why)
        if crashed and not child.taken:
            self._wait_before_the_next()  # It was no handler's doing: the next one may end likewise.
        error = JobError(type="Crashed", kind="stall", message=f"its process died: {why}")
        blamed = child.runs.get(child.step[0]) if child.step == child.process.steps.read() else None
        for number, run in list(child.runs.items()):
            del self._by_run[run]
            unsure = child.process.steps.has_begun(number) or run.terms.policy.at_most_once
            if not unsure and run.stopping in (None, "timeout"):
                self._finish(run, Stopped("not_started"))
            else:
                self._finish(run, _what_became_of(run, error, blamed, killed=child.killed))
        if self._attached and child.hello is not None:
            self._fleet.drop(child.number)
            self._fill()
            self._place_those_in_hand()
            self._to.changed()

    def _is_deaf(self, child: Child, now: float) -> bool:
        return child.pinged_at is not None and now >= child.pinged_at + DEAF_S

    async def _watch(self) -> None:
        """Ask the children whether they are there, and see to those that shall go."""
        for number in itertools.count():
            await asyncio.sleep(PING_EVERY_S)
            now = asyncio.get_running_loop().time()
            for child in list(self._children.values()):
                if child.hello is None or child.over.is_set():
                    continue
                child.step = child.process.steps.read()
                if child.link.part_since is not None and now >= child.link.part_since + PART_S:
                    child.misbehave("it sent half a frame, and no more")
                    continue
                if child.open and self._attached:
                    self._fleet.hears(child.number, not self._is_deaf(child, now))
                if child.pinged_at is None and (child.runs or child.draining or number % IDLE_PINGS == 0):
                    child.pinged_at = now
                    child.link.send(Ping())
                self._see_to(child)
                if child.pinged_at is not None and now >= child.pinged_at + LOST_S and not child.is_at_something():
                    log.warning("child %d does not answer, and has nothing to do: it is replaced", child.process.pid)
                    self._drain(child)
                    self._end(child)
                if child.spare and not child.runs and now >= child.idle_since + SPARE_IDLE_S:
                    self._drain(child)
            self._fill()
            self._place_those_in_hand()

    # What a child says

    def _received(self, child: Child, messages: list[FromChild]) -> None:
        ended = False
        for message in messages:
            match message:
                case Done(number, outcome):
                    ended = self._over(child, number, outcome) or ended
                case Refused(number):
                    if number in child.runs:
                        self._fleet.rest(child.runs[number].queue, asyncio.get_running_loop().time() + REFUSED_S)
                    ended = self._over(child, number, Stopped("not_started")) or ended
                case Progress(number, progress):
                    run = child.runs.get(number)
                    if run is not None:
                        run.progress = progress
                        self._to.reported()
                case Pong(memory):
                    child.pinged_at = None
                    self._flush_told()
                    if self._max_memory is not None and memory > self._max_memory and child.taken:
                        self._wear_out(child, f"it has {memory >> 20} MiB in memory")
                case Hello() | Broken():
                    child.answered = child.answered or message
                    self._turned.set()
        if ended:
            if not child.runs:
                child.idle_since = asyncio.get_running_loop().time()
            self._see_to(child)
            self._place_those_in_hand()
            self._to.changed()

    def _over(self, child: Child, number: int, ended: Ended) -> bool:
        run = child.runs.pop(number, None)
        if run is None:  # It is no run of this child's: a process in which a handler ran may say anything.
            return False
        del self._by_run[run]
        self._pause_s = RESTART_S[0]
        self._finish(run, ended)
        return True

    def _unsendable(self, child: Child, message: object, error: Exception) -> None:
        """A job does not fit through: it would not do so a second time."""
        if isinstance(message, Start):
            refused = JobError(type="PayloadRejected", kind="permanent", message=f"it cannot reach a child: {error}")
            self._over(child, message.number, Raised(refused))

    # Runs

    @property
    def runs(self) -> list[Run]:
        return [*self._runs, *self._in_hand]

    def start(self, run: Run) -> None:
        if not self._place(run):
            self._in_hand.append(run)
            self._fleet.take_in_hand(run.queue, alone=is_suspect(run.job, run.terms.policy))
            self._start_spares()

    def _place(self, run: Run) -> bool:
        alone = is_suspect(run.job, run.terms.policy)
        room = self._fleet.find_room(run.queue, alone=alone)
        if room is None:
            return False
        child = self._children[room]
        child.taken += 1
        child.runs[child.taken] = run
        self._by_run[run] = (child, child.taken)
        self._began(run, room)
        job, id = without_odd_id(run.job)
        child.link.send(Start(child.taken, run.queue, job, id))
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
        self._fleet.out_of_hand(run.queue, alone=is_suspect(run.job, run.terms.policy))

    def _start_spares(self) -> None:
        """A run that must be alone gets a spare child, so that others do not wait for it. There are never more of those
        than of others."""
        suspects = sum(is_suspect(run.job, run.terms.policy) for run in self._in_hand)
        spares = [child for child in self._children.values() if child.spare and not child.draining]
        coming = sum(child.hello is None for child in spares)
        late = asyncio.get_running_loop().time() < self._restart_at
        if not (late or self._closing.is_set() or self._winding_down):
            for _ in range(min(suspects - coming, self._processes - len(spares))):
                self._spawn(spare=True)

    def _ask(self, run: Run, why: Why) -> None:
        if run in self._by_run:
            child, number = self._by_run[run]
            child.link.send(Stop(number, why))
        else:
            self._let_go(run)
            self._finish(run, Stopped("not_started"))

    def _past_its_grace(self, run: Run) -> None:
        child, _ = self._by_run[run]
        self._doom(child)

    def _kill(self, run: Run) -> None:
        if run in self._by_run:
            child, _ = self._by_run[run]
            self._drain(child)
            self._end(child)

    # What is told to the app

    @property
    def hooks(self) -> list[OnEvent]:
        return [self._tell] if self._tells and self.hello.hooks else []

    def _tell(self, event: RunEvent) -> None:
        """An event for the app's own hooks, which are where its code is."""
        self._told.append(Happened(*without_odd_id(event)))
        self._flush_told()

    async def trouble(self, error: BaseException, where: str) -> None:
        """Trouble for the app's own hooks, or for the log."""
        if self.hello.error_hooks:
            self._told.append(Trouble(type(error).__name__, str(error), where))
            self._flush_told()
        else:
            log.error("%s: %s", where, error, exc_info=None if isinstance(error, HoldfastError) else error)

    def _flush_told(self) -> None:
        """One child tells the hooks, so that they hear things in order; another one only when it is gone. While it does
        not answer, it is waited for."""
        if self._teller is None or not self._teller.open:
            open = (child for child in self._children.values() if child.open and not child.spare)
            self._teller = next(open, None)
        now = asyncio.get_running_loop().time()
        if self._teller is not None and not self._is_deaf(self._teller, now):
            while self._told:
                self._teller.link.send(self._told.popleft())

    # New code

    async def reload(self) -> bool:
        """Replace every child by one that loads the code anew, one after the other. False if that does not start: then
        those that run go on."""
        if self._reload is not None:
            return False
        old = [child for child in self._children.values() if not child.spare and not child.worn]
        self._reload = self._tasks.create_task(self._roll(old))
        await asyncio.wait([self._reload])
        ok = not self._reload.cancelled()
        self._reload = None
        if not ok:
            left = [child for child in old if child.open]
            for child in left:
                child.worn = False
            log.error("the new code does not load: %d of %d children go on with the old one", len(left), len(old))
        return ok

    async def _roll(self, old: list[Child]) -> None:
        for child in old:
            await self._until(partial(_has_begun, child))  # It may have read the old code.
            self._wear_out(child, "the code is loaded anew")
            await self._until(partial(_takes_no_more, child))
        newest = [child.hello for child in self._children.values() if child.open and not child.spare]
        if newest and newest[-1] is not None:
            self._hello = newest[-1]


def _has_begun(child: Child) -> bool:
    return child.hello is not None or child.over.is_set()


def _takes_no_more(child: Child) -> bool:
    return not child.open


def _what_became_of(run: Run, error: JobError, blamed: Run | None, *, killed: bool) -> Ended:
    """What a run ended in whose process is dead: it was told to stop, or a neighbour was why, or nobody knows. In a
    process whose loop was blocked by one run, none of the others could end in time."""
    if run.stopping == "timeout":
        innocent = blamed is not None and blamed.overdue and blamed is not run
        return Stopped("neighbour") if innocent else TimedOut(timed_out())
    if run.stopping is not None:
        return Stopped(run.stopping)
    return Stopped("neighbour") if killed else Crashed(error)
