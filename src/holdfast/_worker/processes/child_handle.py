"""The life of one child process, as its parent sees it: started, greeted, given runs, retired, killed.

A child with a run that does not stop is to be killed: it takes no more runs, and is killed when its healthy runs are
over, or it does not answer, or `drain_grace` has passed. Its runs are reported as finished when it is certainly dead.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from holdfast._core.retry_policy import Crashed, Ended, Raised, Stopped, StopReason
from holdfast._worker.executor import Run, wait_until
from holdfast._worker.handler import timed_out
from holdfast._worker.processes import messages
from holdfast._worker.processes.messages import Begin, ChildChannel, FromChild, Hello, frame_limit, without_odd_id
from holdfast._worker.processes.os_process import Process
from holdfast.errors import HoldfastError, JobError, OptionError

if TYPE_CHECKING:
    from holdfast._worker.processes.pool import Pool

START_S = 60.0
"""How long a child may take to import the app."""
IDLE_PINGS = 4
"""A child in which nothing runs is pinged at every fourth check."""
UNRESPONSIVE_S = 1.0
"""A child that has not answered for this long gets no new runs, and is killed if that is pending."""
LOST_S = 5.0
"""A child that has not answered for this long, and has begun no run, is replaced."""
PART_S = 10.0
"""The rest of a frame is waited for this long."""
LEAVE_S = 5.0
"""How long a child may take to close what the app has opened."""
EXIT_S = 0.1
"""A child whose connection ended is about to exit, or a handler has closed it: this long we look which."""

log = logging.getLogger("holdfast.worker")


class ChildStartError(HoldfastError):
    """A child process could not load the app."""


class ChildState(Enum):
    STARTING = auto()
    OPEN = auto()
    """It takes runs."""
    RETIRING = auto()
    """It takes no more runs, and exits when those it has are over."""
    OVER = auto()
    """It has ended, or is about to be killed."""


class ChildHandle:
    def __init__(self, number: int, pool: Pool, begin: Begin, *, spare: bool) -> None:
        self.number = number
        self.spare = spare
        """It is for isolated runs, one at a time."""
        self.state = ChildState.STARTING
        self.hello: Hello | None = None
        self.failure: HoldfastError | None = None
        """Why it could not start."""
        self.runs: dict[int, Run] = {}
        self.taken = 0
        """Runs that it was given."""
        self.to_be_replaced = False
        """It takes runs until its successor is ready, and retires then."""
        self.killed = False
        """We ended it, and it did not crash."""
        self.idle_since = 0.0
        self._begin = begin
        self._pool = pool
        self._answer: Hello | messages.Broken | None = None
        self._kill_pending_at: float | None = None
        """Since when it has had a run that does not stop."""
        self._leaving_at: float | None = None
        self._pinged_at: float | None = None
        """When it was asked something that it has not answered."""
        self._executing = (0, 0)
        """The run that its loop executed at the last check, and which turn of it."""
        self._cause = ""
        self._misbehaved = False
        self._changed = asyncio.Event()
        self.process = Process("holdfast._worker.processes.child_main", begin.worker)
        self._channel: ChildChannel[FromChild] = ChildChannel(FromChild, self)
        self.send = self._channel.send

    @property
    def open(self) -> bool:
        return self.state is ChildState.OPEN

    @property
    def crashed(self) -> bool:
        """It ended, and neither we nor it wanted that."""
        return not self.killed and self._leaving_at is None

    def is_unresponsive(self, now: float) -> bool:
        return self._pinged_at is not None and now >= self._pinged_at + UNRESPONSIVE_S

    # From start to end

    async def live(self) -> None:
        try:
            self.process.watch(self.end)
            await self._channel.connect(self.process.end)
            self.send(self._begin)
            self.hello = await self._greeting()
            self._channel.limit = frame_limit(self.hello.max_payload)
            self.idle_since = _now()
            log.info("child %d is ready%s", self.process.pid, ", for suspects" if self.spare else "")
            self._move(ChildState.OPEN)
            await wait_until(self._changed, lambda: self.state is ChildState.OVER)
        except HoldfastError as error:
            self.failure, self.killed = error, True
        except BaseException:  # The pool is cancelled: nothing may be left of it, and there may be no time to wait.
            self.kill()
            self.process.kill()
            raise
        finally:
            how = await self.process.kill_and_wait(0.0 if self.killed else EXIT_S)
            self.end()
            self._account_for_runs(self._cause if self._misbehaved else how or self._cause)
            self._channel.close()
            self.process.close()

    async def _greeting(self) -> Hello:
        """What it says of the app, once it has loaded it."""
        try:
            async with asyncio.timeout(START_S):
                await wait_until(self._changed, lambda: self._answer is not None or self.state is ChildState.OVER)
        except TimeoutError:
            self.end(f"it was not ready within {START_S:g} s")
        if isinstance(self._answer, messages.Broken):
            raise (OptionError if self._answer.mistake else ChildStartError)(self._answer.message)
        if self._answer is None or self.state is ChildState.OVER:
            why = await self.process.kill_and_wait(EXIT_S) or self._cause
            raise ChildStartError(f"a child process could not load {self._begin.target}: {why}")
        return self._answer

    def _move(self, state: ChildState) -> None:
        self.state = state
        self._changed.set()
        self._pool.child_moved(self)

    def end(self, cause: str = "") -> None:
        """It is over. The first cause counts."""
        if self.state is not ChildState.OVER:
            self._cause = cause
            self._move(ChildState.OVER)

    def channel_ended(self, why: str, *, misbehaved: bool) -> None:
        """It has exited, or a handler has closed its connection; or it has misbehaved, and that is why it is over,
        however it ends now."""
        self._misbehaved = self._misbehaved or (misbehaved and self.state is not ChildState.OVER)
        self.end(why)

    def kill(self) -> None:
        """End it. Its runs are reported when it is dead."""
        self.killed = True
        self.end()

    def _account_for_runs(self, why: str) -> None:
        """It is certainly dead: report how each of its runs ended."""
        if self.crashed or (self.runs and not self.killed):
            log.error("child %d has died with %d runs: %s", self.process.pid, len(self.runs), why)
        error = JobError(type="Crashed", kind="stall", message=f"its process died: {why}")
        probe = self.process.probe
        blamed = self.runs.get(self._executing[0]) if self._executing == probe.read() else None
        for number, run in list(self.runs.items()):
            begun = probe.has_begun(number)
            self._finished(number, _ended_with_process(run, error, blamed, begun=begun, killed=self.killed))

    # Going

    def retire(self) -> None:
        """Give it no more runs, and have it exit when those it has are over."""
        if self.state in (ChildState.STARTING, ChildState.OPEN):
            self._move(ChildState.RETIRING)
        self._check_retired(_now())

    def kill_soon(self) -> None:
        """Kill it when that costs least: one of its runs does not stop."""
        if self._kill_pending_at is None:
            self._kill_pending_at = _now()
            log.warning("child %d has a run that does not stop: it is replaced", self.process.pid)
        self.retire()

    def leave(self) -> None:
        """Have it close what it has opened, and exit."""
        if self.hello is None:
            self.kill()
        elif self._leaving_at is None and self.state is not ChildState.OVER:
            self._leaving_at = _now()
            self.send(messages.Leave())
            if self.state is ChildState.OPEN:
                self._move(ChildState.RETIRING)

    def _check_retired(self, now: float) -> None:
        """If it retires: is it time to exit, or to be killed?"""
        if self.state is not ChildState.RETIRING:
            return
        if not self.runs:
            self.leave()
        elif self._kill_pending_at is not None:
            overdue = sum(run.overdue for run in self.runs.values())
            late = now >= self._kill_pending_at + self._pool.settings.drain_grace_s
            if overdue == 0:
                self._kill_pending_at = None  # It ended after all.
            elif overdue == len(self.runs) or late or self.is_unresponsive(now):
                self.kill()
        if self._leaving_at is not None and now >= self._leaving_at + LEAVE_S:
            log.warning("child %d does not leave: it is killed", self.process.pid)
            self.kill()

    def check(self, number: int, now: float) -> None:
        """Every quarter of a second: does it answer, and which run does it execute?"""
        if self.hello is None or self.state is ChildState.OVER:
            return
        self._executing, has_begun = self.process.probe.read(), self.process.probe.has_begun
        if self._channel.part_since is not None and now >= self._channel.part_since + PART_S:
            self.channel_ended("it sent half a frame, and no more", misbehaved=True)
        elif self._pinged_at is None and (self.runs or not self.open or number % IDLE_PINGS == 0):
            self._pinged_at = now
            self.send(messages.Ping())
        elif self._pinged_at is not None and now >= self._pinged_at + LOST_S and not any(map(has_begun, self.runs)):
            log.warning("child %d does not answer, and has nothing to do: it is replaced", self.process.pid)
            self.kill()
        self._check_retired(now)

    # Runs

    def give(self, run: Run) -> None:
        self.taken += 1
        self.runs[self.taken] = run
        job, id = without_odd_id(run.job)
        self.send(messages.Start(self.taken, run.queue, job, id))

    def stop(self, run: Run, why: StopReason) -> None:
        number = next(number for number, given in self.runs.items() if given is run)
        self.send(messages.Stop(number, why))

    def received(self, batch: list[FromChild]) -> None:
        for message in batch:
            match message:
                case messages.Finished(number, ended):
                    self._finished(number, ended)
                case messages.Refused(number):
                    if number in self.runs:
                        self._pool.refused(self.runs[number])
                    self._finished(number, Stopped("not_started"))
                case messages.Progress(number, progress):
                    if number in self.runs:
                        self._pool.progressed(self.runs[number], progress)
                case messages.Pong(memory):
                    self._pinged_at = None
                    self._pool.child_answered(self, memory)
                case Hello() | messages.Broken():
                    self._answer = self._answer or message
                    self._changed.set()
        now = _now()
        if not self.runs:
            self.idle_since = now
        self._check_retired(now)

    def _finished(self, number: int, ended: Ended) -> None:
        run = self.runs.pop(number, None)
        if run is not None:  # Else it is not one of its runs: a process in which a handler ran may send anything.
            self._pool.finished(run, ended)

    def unsendable(self, message: Any, error: Exception) -> None:
        """A job cannot be sent: it would not be possible a second time."""
        if isinstance(message, messages.Start):
            refused = JobError(type="PayloadRejected", kind="permanent", message=f"it cannot reach a child: {error}")
            self._finished(message.number, Raised(refused))


def _ended_with_process(run: Run, error: JobError, blamed: Run | None, *, begun: bool, killed: bool) -> Ended:
    """How a run ended whose process is dead: it had not begun, or was stopped, or a neighbour was the reason, or it is
    not known. In a process whose loop was blocked by one run, none of the others could end in time."""
    if not begun and run.stopping in (None, "timeout") and not run.config.policy.at_most_once:
        return Stopped("not_started")
    if run.stopping == "timeout":
        innocent = blamed is not None and blamed.overdue and blamed is not run
        return Stopped("neighbour") if innocent else timed_out()
    if run.stopping is not None:
        return Stopped(run.stopping)
    return Stopped("neighbour") if killed else Crashed(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
