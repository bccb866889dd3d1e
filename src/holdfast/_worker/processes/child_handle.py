"""The life of one child process, as its parent sees it: started, greeted, given runs, drained, killed, buried.

One with a run that does not stop is doomed: it drains until its healthy runs are over, or it does not answer, or
`drain_grace` has passed. Then it is killed, and only when it is certainly dead is it said what became of its runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from holdfast._core.retry_policy import Crashed, Ended, Raised, Stopped, TimedOut
from holdfast._worker.executor import Run, StopReason
from holdfast._worker.handler import timed_out
from holdfast._worker.processes.messages import (
    Begin,
    Broken,
    ChildChannel,
    Done,
    FromChild,
    Hello,
    Leave,
    Ping,
    Pong,
    Progress,
    Refused,
    Start,
    Stop,
    frame_limit,
    without_odd_id,
)
from holdfast._worker.processes.os_process import Process
from holdfast.errors import HoldfastError, JobError, OptionError

START_S = 60.0
"""How long a child may take to import the app."""
IDLE_PINGS = 4
"""A child in which nothing runs is asked at every so many looks."""
DEAF_S = 1.0
"""A child that has not answered for so long is deaf: it gets nothing new, and if it is doomed it is killed."""
LOST_S = 5.0
"""A child that has not answered for so long, and has begun nothing, is of no use."""
PART_S = 10.0
"""The rest of a frame is waited for this long."""
LEAVE_S = 5.0
"""How long a child may take to close what the app has opened."""
EXIT_S = 0.1
"""A child whose connection ended is about to exit, or a handler has closed it: this long we look which."""

log = logging.getLogger("holdfast.worker")


class CannotStart(HoldfastError):
    """A child process could not load the app."""


class ChildState(Enum):
    """Where a child is in its life."""

    STARTING = auto()
    OPEN = auto()
    """It takes runs."""
    DRAINING = auto()
    """It takes no more, and goes when those it has are over."""
    OVER = auto()
    """It has ended, or is about to be killed."""


class Parent(NamedTuple):
    """Who is told what goes on in a child."""

    moved: Callable[[ChildHandle], None]
    """It is in another phase."""
    run_over: Callable[[ChildHandle, Run, Ended], None]
    refused: Callable[[Run], None]
    """It does not know the queue of a run."""
    progressed: Callable[[], None]
    answered: Callable[[ChildHandle, int], None]
    """It hears us, and has so much in memory."""


class ChildHandle:
    """One child process."""

    def __init__(self, number: int, begin: Begin, to: Parent, *, spare: bool, drain_grace_s: float) -> None:
        self.number = number
        self.spare = spare
        self.phase = ChildState.STARTING
        self.hello: Hello | None = None
        self.failure: HoldfastError | None = None
        """Why it could not start."""
        self.runs: dict[int, Run] = {}
        self.taken = 0
        """Runs that it was given."""
        self.worn = False
        """It shall be replaced, and goes on until it is."""
        self.killed = False
        """We ended it, and it is not its fault."""
        self.idle_since = 0.0
        self._begin = begin
        self._to = to
        self._drain_grace_s = drain_grace_s
        self._answer: Hello | Broken | None = None
        self._doomed_at: float | None = None
        """Since when it has had a run that does not stop."""
        self._leaving_at: float | None = None
        self._pinged_at: float | None = None
        """When it was asked something that it has not answered."""
        self._step = (0, 0)
        """What its loop was at when we last looked."""
        self._cause = ""
        self._misbehaved = False
        self._turned = asyncio.Event()
        self.process = Process("holdfast._worker.processes.child_main", begin.worker)
        self._link: ChildChannel[FromChild] = ChildChannel(
            FromChild, self._received, self._misbehave, self.end, self._unsendable
        )

    @property
    def open(self) -> bool:
        return self.phase is ChildState.OPEN

    @property
    def crashed(self) -> bool:
        """It ended, and neither we nor it wanted that."""
        return not self.killed and self._leaving_at is None

    def is_deaf(self, now: float) -> bool:
        return self._pinged_at is not None and now >= self._pinged_at + DEAF_S

    # From start to end

    async def live(self) -> None:
        """All of its life: from its start to its certain death."""
        try:
            self.process.watch(self.end)
            await self._link.connect(self.process.end)
            self._link.send(self._begin)
            self.hello = await self._greeting()
            self._link.limit = frame_limit(self.hello.max_payload)
            self.idle_since = _now()
            log.info("child %d is ready%s", self.process.pid, ", for suspects" if self.spare else "")
            self._move(ChildState.OPEN)
            await self._until(lambda: self.phase is ChildState.OVER)
        except HoldfastError as error:
            self.failure, self.killed = error, True
        except BaseException:  # The pool is cancelled: nothing may be left of it, and there may be no time to wait.
            self.kill()
            self.process.kill()
            raise
        finally:
            how = await self.process.bury(0.0 if self.killed else EXIT_S)
            self.end()
            self._account_for_runs(self._cause if self._misbehaved else how or self._cause)
            self._link.close()
            self.process.close()

    async def _greeting(self) -> Hello:
        """What it says of the app, once it has loaded it."""
        try:
            async with asyncio.timeout(START_S):
                await self._until(lambda: self._answer is not None or self.phase is ChildState.OVER)
        except TimeoutError:
            self.end(f"it was not ready within {START_S:g} s")
        if isinstance(self._answer, Broken):
            raise (OptionError if self._answer.mistake else CannotStart)(self._answer.message)
        if self._answer is None or self.phase is ChildState.OVER:
            why = await self.process.bury(EXIT_S) or self._cause
            raise CannotStart(f"a child process could not load {self._begin.target}: {why}")
        return self._answer

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._turned.clear()
            await self._turned.wait()

    def _move(self, phase: ChildState) -> None:
        self.phase = phase
        self._turned.set()
        self._to.moved(self)

    def end(self, cause: str = "") -> None:
        """It is over. The first cause counts."""
        if self.phase is not ChildState.OVER:
            self._cause = cause
            self._move(ChildState.OVER)

    def _misbehave(self, cause: str) -> None:
        """It is over because of what it did, however it ends now."""
        self._misbehaved = self._misbehaved or self.phase is not ChildState.OVER
        self.end(cause)

    def kill(self) -> None:
        """End it. Its runs are told when it is dead."""
        self.killed = True
        self.end()

    def _account_for_runs(self, why: str) -> None:
        """It is certainly dead: what became of its runs."""
        if self.crashed or (self.runs and not self.killed):
            log.error("child %d has died with %d runs: %s", self.process.pid, len(self.runs), why)
        error = JobError(type="Crashed", kind="stall", message=f"its process died: {why}")
        steps = self.process.steps
        blamed = self.runs.get(self._step[0]) if self._step == steps.read() else None
        for number, run in list(self.runs.items()):
            self._run_over(
                number, _what_became_of(run, error, blamed, begun=steps.has_begun(number), killed=self.killed)
            )

    # Going

    def drain(self) -> None:
        """It takes no more, and goes when its runs are over."""
        if self.phase in (ChildState.STARTING, ChildState.OPEN):
            self._move(ChildState.DRAINING)
        self.see_to(_now())

    def doom(self) -> None:
        """One of its runs does not stop: it is killed when that costs least."""
        if self._doomed_at is None:
            self._doomed_at = _now()
            log.warning("child %d has a run that does not stop: it is replaced", self.process.pid)
        self.drain()

    def leave(self) -> None:
        """Have it close what it has opened, and exit."""
        if self.hello is None:
            self.kill()
        elif self._leaving_at is None and self.phase is not ChildState.OVER:
            self._leaving_at = _now()
            self._link.send(Leave())
            if self.phase is ChildState.OPEN:
                self._move(ChildState.DRAINING)

    def see_to(self, now: float) -> None:
        """It drains: is it time to go?"""
        if self.phase is not ChildState.DRAINING:
            return
        if not self.runs:
            self.leave()
        elif self._doomed_at is not None:
            overdue = sum(run.overdue for run in self.runs.values())
            late = now >= self._doomed_at + self._drain_grace_s
            if overdue == 0:
                self._doomed_at = None  # It ended after all.
            elif overdue == len(self.runs) or late or self.is_deaf(now):
                self.kill()
        if self._leaving_at is not None and now >= self._leaving_at + LEAVE_S:
            log.warning("child %d does not leave: it is killed", self.process.pid)
            self.kill()

    def look(self, number: int, now: float) -> None:
        """From time to time: is it there, and at what?"""
        if self.hello is None or self.phase is ChildState.OVER:
            return
        self._step = self.process.steps.read()
        if self._link.part_since is not None and now >= self._link.part_since + PART_S:
            self._misbehave("it sent half a frame, and no more")
        elif self._pinged_at is None and (self.runs or not self.open or number % IDLE_PINGS == 0):
            self._pinged_at = now
            self._link.send(Ping())
        elif self._pinged_at is not None and now >= self._pinged_at + LOST_S and not self._has_begun_something():
            log.warning("child %d does not answer, and has nothing to do: it is replaced", self.process.pid)
            self.kill()
        self.see_to(now)

    def _has_begun_something(self) -> bool:
        return any(self.process.steps.has_begun(number) for number in self.runs)

    # Runs

    def give(self, run: Run) -> None:
        """Have it run a job."""
        self.taken += 1
        self.runs[self.taken] = run
        job, id = without_odd_id(run.job)
        self._link.send(Start(self.taken, run.queue, job, id))

    def stop(self, run: Run, why: StopReason) -> None:
        """Tell it to stop a run."""
        number = next(number for number, its in self.runs.items() if its is run)
        self._link.send(Stop(number, why))

    def tell(self, message: object) -> None:
        self._link.send(message)

    def _received(self, messages: list[FromChild]) -> None:
        for message in messages:
            match message:
                case Done(number, ended):
                    self._run_over(number, ended)
                case Refused(number):
                    if number in self.runs:
                        self._to.refused(self.runs[number])
                    self._run_over(number, Stopped("not_started"))
                case Progress(number, progress):
                    if number in self.runs:
                        self.runs[number].progress = progress
                        self._to.progressed()
                case Pong(memory):
                    self._pinged_at = None
                    self._to.answered(self, memory)
                case Hello() | Broken():
                    self._answer = self._answer or message
                    self._turned.set()
        now = _now()
        if not self.runs:
            self.idle_since = now
        self.see_to(now)

    def _run_over(self, number: int, ended: Ended) -> None:
        run = self.runs.pop(number, None)
        if run is not None:  # Else it is no run of ours: a process in which a handler ran may say anything.
            self._to.run_over(self, run, ended)

    def _unsendable(self, message: object, error: Exception) -> None:
        """A job does not fit through: it would not do so a second time."""
        if isinstance(message, Start):
            refused = JobError(type="PayloadRejected", kind="permanent", message=f"it cannot reach a child: {error}")
            self._run_over(message.number, Raised(refused))


def _what_became_of(run: Run, error: JobError, blamed: Run | None, *, begun: bool, killed: bool) -> Ended:
    """What a run ended in whose process is dead: it had not begun, or was told to stop, or a neighbour was why, or
    nobody knows. In a process whose loop was blocked by one run, none of the others could end in time."""
    if not begun and run.stopping in (None, "timeout") and not run.config.policy.at_most_once:
        return Stopped("not_started")
    if run.stopping == "timeout":
        innocent = blamed is not None and blamed.overdue and blamed is not run
        return Stopped("neighbour") if innocent else TimedOut(timed_out())
    if run.stopping is not None:
        return Stopped(run.stopping)
    return Stopped("neighbour") if killed else Crashed(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
