"""One child process as its parent sees it: started, given runs, retired, killed.

A child with a run that does not stop takes no more runs. It is killed when its other runs have ended, or it does not
answer, or `drain_grace` has passed. Its runs are reported as finished only when the process is certainly dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from holdfast._core.retry_policy import Crashed, Ended, Raised, Stopped, StopReason
from holdfast._worker import handler
from holdfast._worker.endings import timed_out
from holdfast._worker.executor import Run, wait_until
from holdfast._worker.processes import messages
from holdfast._worker.processes.messages import Begin, ChildChannel, FromChild, Hello, frame_limit, without_odd_id
from holdfast._worker.processes.os_process import Process
from holdfast._worker.stacks import cut_stack, stacks_in_dump
from holdfast.errors import HoldfastError, JobError, OptionError

if TYPE_CHECKING:
    from holdfast._worker.processes.pool import Pool

START_S = 60.0
"""How long a child may take to import the app."""
IDLE_PINGS = 4
"""A child without runs is pinged at every fourth check."""
UNRESPONSIVE_S = 1.0
"""A child that has not answered for this long gets no new runs, and is killed if that is pending."""
LOST_S = 5.0
"""A child that has not answered for this long, and has begun none of its runs, is ended."""
PART_S = 10.0
"""How long to wait for the rest of a frame."""
LEAVE_S = 5.0
"""How long a child may take to close the app and exit."""
ANSWER_S = 0.5
"""How long a child may take to send a stack before it must dump its stacks."""
STACKS_S = 0.2
"""How long a child that does not answer may take to dump its stacks."""
EXIT_S = 0.1
"""How long to wait for the exit of a child whose connection has ended: a handler may have closed it instead."""

log = logging.getLogger("holdfast.worker")


class ChildStartError(HoldfastError):
    """A child process could not load the app."""


class ChildState(Enum):
    STARTING = auto()
    OPEN = auto()
    """The child takes runs."""
    RETIRING = auto()
    """The child takes no more runs, and exits when those it has are over."""
    OVER = auto()
    """The child has ended, or is about to be killed."""


class ChildHandle:
    def __init__(self, number: int, pool: Pool, begin: Begin, *, spare: bool) -> None:
        self.number = number
        self.spare = spare
        """The child is for isolated runs, one at a time."""
        self.state = ChildState.STARTING
        self.hello: Hello | None = None
        self.failure: HoldfastError | None = None
        """Why the child could not start."""
        self.process: Process
        self.runs: dict[int, Run] = {}
        self.taken = 0
        """Number of runs that the child was given."""
        self.to_be_replaced = False
        """The child takes runs until its successor is ready, and retires then."""
        self.killed = False
        """The worker ended the child: it did not crash."""
        self.idle_since = 0.0
        self._begin = begin
        self._pool = pool
        self._kill_pending_at: float | None = None
        """When a run of this child first failed to stop."""
        self._stack_for: dict[int, Callable[[str], None]] = {}
        """Takes the stack of a run that a command asked for, by the number of the run."""
        self._stacks_until = 0.0
        """Until when the child, which is to be killed, may dump its stacks."""
        self._leaving = False
        self._pinged_at: float | None = None
        """When the child was sent the ping that it has not answered."""
        self._executing = (0, 0)
        """The run that the child's loop executed at the last check, and the number of its step."""
        self._cause = ""
        """Why the child is over, if it is known before the process has ended."""
        self._changed = asyncio.Event()
        self._channel: ChildChannel[FromChild] = ChildChannel(FromChild, self)
        self.send = self._channel.send

    @property
    def open(self) -> bool:
        return self.state is ChildState.OPEN

    @property
    def crashed(self) -> bool:
        """The child ended although it was neither killed nor asked to leave."""
        return not self.killed and not self._leaving

    def is_unresponsive(self, now: float) -> bool:
        return self._pinged_at is not None and now >= self._pinged_at + UNRESPONSIVE_S

    # From start to end

    async def live(self) -> None:
        """Start the process, and return when it is gone and its runs are reported."""
        try:
            self.process = Process("holdfast._worker.processes.child_main", self._begin.worker)
        except (OptionError, OSError) as error:
            text = f"a child process could not be started: {error}"
            self.failure = error if isinstance(error, OptionError) else ChildStartError(text)
            return
        try:
            self.process.watch(self.end)
            await self._channel.connect(self.process.end)
            self.send(self._begin)
            try:
                async with asyncio.timeout(START_S):
                    await wait_until(self._changed, lambda: self.state is not ChildState.STARTING or bool(self.failure))
            except TimeoutError:
                self.end(f"it was not ready within {START_S:g} s")
            await wait_until(self._changed, lambda: self.state is ChildState.OVER or bool(self.failure))
        except BaseException:  # The pool is cancelled. There may be no time to wait for the end of the process.
            self.kill()
            self.process.kill()
            raise
        finally:
            how = await self.process.kill_and_wait(0.0 if self.killed else EXIT_S)
            self.end()
            why = self._cause or how or "it closed its connection"
            if self.hello is None and self.failure is None:
                self.failure = ChildStartError(f"a child process could not load {self._begin.target}: {why}")
            self._report_runs(why)
            self._channel.close()
            self.process.close()

    def _move(self, state: ChildState) -> None:
        self.state = state
        self._changed.set()
        self._pool.child_moved(self)

    def end(self, cause: str = "") -> None:
        """The child is over. The first cause counts."""
        if self.state is not ChildState.OVER:
            self._cause = cause
            self._move(ChildState.OVER)

    channel_ended = end

    def kill(self) -> None:
        """Kill the child. Its runs are reported when it is dead."""
        self.killed = True
        self.end()

    def _report_runs(self, why: str) -> None:
        """The process is certainly dead: report how each of its runs ended."""
        if self.failure is None and (self.crashed or (self.runs and not self.killed)):
            log.error("child %d died with %d runs: %s", self.process.pid, len(self.runs), why)
        error = JobError(type="Crashed", kind="stall", message=f"its process died: {why}")
        probe = self.process.probe
        blamed = self.runs.get(self._executing[0]) if self._executing == probe.read() else None
        for number, run in list(self.runs.items()):
            begun = probe.has_begun(number)
            if run.stopping == "timeout" and not run.stack and self._stacks_until:
                run.stack = stacks_in_dump(self.process.stacks(), handler.__file__)
            self._finished(number, _ended_with_process(run, error, blamed, begun=begun, killed=self.killed))

    # Leaving

    def retire(self) -> None:
        """Give the child no more runs, and have it exit when those it has are over."""
        if self.open:
            self._move(ChildState.RETIRING)
        self._check_retired(_now())

    def kill_soon(self) -> None:
        """Kill the child, which has a run that does not stop, as soon as that harms no other run."""
        if self._kill_pending_at is None:
            self._kill_pending_at = _now()
            log.warning("child %d has a run that does not stop: ending the child", self.process.pid)
            if any(run.overdue and run.stopping == "timeout" and not run.stack for run in self.runs.values()):
                self._stacks_until = _now() + STACKS_S
                self.process.ask_for_stacks()
                asyncio.get_running_loop().call_at(self._stacks_until, lambda: self._check_retired(_now()))
        self.retire()

    def leave(self) -> None:
        """Have the child close the app and exit; kill it if it does not within `LEAVE_S`."""
        if self.hello is None:
            self.kill()
        elif not self._leaving and self.state is not ChildState.OVER:
            self._leaving = True
            self.send(messages.Leave())
            asyncio.get_running_loop().call_later(LEAVE_S, self._kill_if_late)
            if self.open:
                self._move(ChildState.RETIRING)

    def _kill_if_late(self) -> None:
        if self.state is not ChildState.OVER:
            log.warning("child %d did not exit within %g s: killing it", self.process.pid, LEAVE_S)
            self.kill()

    def _check_retired(self, now: float) -> None:
        """Have a retiring child leave, or kill it, if it is time."""
        if self.state is not ChildState.RETIRING:
            return
        if not self.runs:
            self.leave()
        elif self._kill_pending_at is not None:
            overdue = sum(run.overdue for run in self.runs.values())
            late = now >= self._kill_pending_at + self._pool.settings.drain_grace_s
            if now < self._stacks_until:
                return
            if overdue == 0:
                self._kill_pending_at = None  # The run has ended after all.
            elif overdue == len(self.runs) or late or self.is_unresponsive(now):
                self.kill()

    def check(self, number: int, now: float) -> None:
        """Every quarter of a second: see whether the child answers, and which run it executes."""
        if self.hello is None or self.state is ChildState.OVER:
            return
        self._executing, has_begun = self.process.probe.read(), self.process.probe.has_begun
        if self._channel.part_since is not None and now >= self._channel.part_since + PART_S:
            self.end("it sent an incomplete frame")
        elif self._pinged_at is None and (self.runs or not self.open or number % IDLE_PINGS == 0):
            self._pinged_at = now
            self.send(messages.Ping())
        elif self._pinged_at is not None and now >= self._pinged_at + LOST_S and not any(map(has_begun, self.runs)):
            log.warning("child %d does not answer, and has begun no run: ending it", self.process.pid)
            self.kill()
        self._check_retired(now)

    # Runs

    def give(self, run: Run) -> None:
        self.taken += 1
        self.runs[self.taken] = run
        job, id = without_odd_id(run.job)
        self.send(messages.Start(self.taken, run.queue, job, id))

    def stop(self, run: Run, why: StopReason) -> None:
        self.send(messages.Stop(self._number_of(run), why))

    def _number_of(self, run: Run) -> int:
        return next(number for number, given in self.runs.items() if given is run)

    def show_stack(self, run: Run, deliver: Callable[[str], None]) -> None:
        """Deliver the stack of a run. A child that does not answer dumps the stacks of all of its runs."""
        number = self._number_of(run)
        self._stack_for[number] = deliver
        self.send(messages.ShowStack(number))
        asyncio.get_running_loop().call_later(ANSWER_S, self._dump_for, number)

    def _dump_for(self, number: int) -> None:
        if number in self._stack_for:
            self.process.ask_for_stacks()
            asyncio.get_running_loop().call_later(STACKS_S, self._deliver_dump, number)

    def _deliver_dump(self, number: int) -> None:
        if number in self._stack_for:
            dump = stacks_in_dump(self.process.stacks(), handler.__file__)
            self._stack_for.pop(number)(f"(its event loop is blocked: all runs of its process)\n{dump}" if dump else "")

    def received(self, batch: list[FromChild]) -> None:
        for message in batch:
            match message:
                case messages.Finished(number, ended):
                    self._finished(number, ended)
                case messages.Refused(number):
                    if number in self.runs:
                        self._pool.refused(self.runs[number])
                    self._finished(number, Stopped("not_started"))
                case messages.Stack(number, stack):
                    if number in self.runs:
                        if self.runs[number].stopping == "timeout":
                            self.runs[number].stack = cut_stack(stack)
                        self._stack_for.pop(number, _ignore)(cut_stack(stack))
                case messages.Progress(number, progress):
                    if number in self.runs:
                        self._pool.progressed(self.runs[number], progress)
                case messages.ExtendTimeout(number, limit_ms):
                    if number in self.runs:
                        self._pool.extended(self.runs[number], limit_ms)
                case messages.Waits(number, queue, begins):
                    if number in self.runs:
                        self._pool.waits(self.runs[number], queue, begins)
                case messages.Pong(memory):
                    self._pinged_at = None
                    self._pool.child_answered(self, memory)
                case Hello() if self.state is ChildState.STARTING:
                    self.hello = message
                    self._channel.limit = frame_limit(message.max_payload)
                    log.info("child %d is ready%s", self.process.pid, ", for isolated runs" if self.spare else "")
                    self._move(ChildState.OPEN)
                case messages.Broken(text, mistake) if self.hello is None:
                    self.failure = (OptionError if mistake else ChildStartError)(text)
                    self._changed.set()  # It counts as starting until it is gone: no other child starts meanwhile.
                case _:
                    pass  # Sent by a handler: it can write to any file descriptor of its process.
        now = _now()
        if not self.runs:
            self.idle_since = now
        self._check_retired(now)

    def _finished(self, number: int, ended: Ended) -> None:
        self._stack_for.pop(number, _ignore)("")
        run = self.runs.pop(number, None)
        if run is not None:  # A process in which a handler ran may send any number.
            self._pool.finished(run, ended)

    def unsendable(self, message: Any, error: Exception) -> None:
        """A message cannot be sent. A job fails then: it would fail again in any other child."""
        if isinstance(message, messages.Start):
            text = f"the job cannot be sent to a child process: {error}"
            self._finished(message.number, Raised(JobError(type="PayloadRejected", kind="permanent", message=text)))


def _ended_with_process(run: Run, error: JobError, blamed: Run | None, *, begun: bool, killed: bool) -> Ended:
    """How a run ended whose process is dead. `blamed` is the run that blocked the loop: no other run of that process
    could end in time, so none of them is charged with a timeout."""
    if not begun and run.stopping in (None, "timeout") and not run.config.policy.at_most_once:
        return Stopped("not_started")
    if run.stopping == "timeout":
        innocent = blamed is not None and blamed.overdue and blamed is not run
        return Stopped("neighbour") if innocent else timed_out(run.limit_ms, run.stack)
    if run.stopping is not None:
        return Stopped(run.stopping)
    return Stopped("neighbour") if killed else Crashed(error)


def _ignore(stack: str) -> None:
    """This stack was not asked for."""


def _now() -> float:
    return asyncio.get_running_loop().time()
