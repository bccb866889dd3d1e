"""Runs as their worker sees them, and the executors that execute them.

A run that has to end is asked to stop first; after `cancel_grace` it is overdue: it is given up, or its process killed.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from holdfast._core.applications import Application
from holdfast._core.capacity import LENT_TIMES, NEVER
from holdfast._core.claim_planner import ClaimPlanner
from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, QueueConfig, Stopped, StopReason, fence_of, is_suspect, timeout_ms
from holdfast._worker.endings import timed_out
from holdfast._worker.handler import AppHooks, Handler, Runner

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

INLINE_CAPACITY = 1_000
"""Units of a worker without child processes."""
MAX_THREADS = (1 + LENT_TIMES) * INLINE_CAPACITY
"""Most threads of a worker without child processes: one for each run that it can have."""
MAX_TARGETS = 1_000
"""Most queues for whose jobs one run may wait. For more it lends nothing."""
QUICK_S = 1.0
"""How long runs may take to end when the stop is quick."""

log = logging.getLogger("holdfast.worker")


async def wait_until(changed: asyncio.Event, is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. `changed` is set whenever it may have become true."""
    while not is_so():
        changed.clear()
        await changed.wait()


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait until an event is set, for at most this time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class LeaseClock:
    """The fields of a run that two threads write: the worker's event loop and the heartbeat.

    Each assignment is atomic, and no decision depends on both fields.
    """

    __slots__ = ("extended_at", "progress")

    def __init__(self, extended_at: float) -> None:
        self.extended_at = extended_at
        """When the last successful claim or extend was sent: the lease begins then at the earliest. The loop sets it
        for the claim; afterwards only the heartbeat writes and reads it."""
        self.progress: bytes | None = None
        """The newest progress that has not been sent. The loop or a handler's thread writes it; the heartbeat sends it
        and sets None, unless there is newer progress by then."""


class Run:
    """A job that this worker has leased. Only the worker's event loop writes these fields; the heartbeat reads some."""

    __slots__ = (
        *("config", "done", "given_up", "held", "host", "isolated", "job", "key", "lease", "limit_ms", "overdue"),
        *("queue", "stack", "started_at", "stopping", "timers", "times_out_at", "waits_for"),
    )

    def __init__(self, config: QueueConfig, job: Job, claimed_at: float) -> None:
        self.config = config
        self.job = job
        self.queue = config.queue
        self.key = (config.queue, job.id, fence_of(job))
        self.lease = LeaseClock(claimed_at)
        self.host: int | None = None
        """Number of the host of the run; None while it waits for one."""
        self.started_at: float | None = None
        self.isolated = is_suspect(job, config.policy)
        """Whether it must be the only run of its process."""
        self.held = True
        """Whether the worker has the lease, and has not decided yet how to settle it."""
        self.done = False
        self.stopping: StopReason | None = None
        self.stack = ""
        """The stack of the run when its time was over, once it is known."""
        self.overdue = False
        """Whether it was asked to stop and did not within `cancel_grace`."""
        self.given_up = False
        """Whether it does not stop and cannot be killed."""
        self.times_out_at = NEVER
        self.limit_ms: int | None = None
        """The timeout for the error of the run; None if it has none, or has extended it."""
        self.waits_for: set[str] | None = None
        """Queues for whose jobs the run waits; None if it has never waited."""
        self.timers: tuple[asyncio.TimerHandle, ...] = ()


class Executor(ABC):
    """Starts and stops runs, and reports when one is finished."""

    name: ClassVar[str]
    host_capacity: ClassVar[int]
    """Units of one host."""
    kill_allowance_s: float = 0.0
    """How much longer than its `cancel_grace` a run may take to end."""
    can_reload: ClassVar[bool] = False
    """Whether `reload` loads the code of the app again."""

    def __init__(self) -> None:
        self.application = Application()
        """The app that is executed, once it is loaded."""
        self._context: WorkerContext
        self._capacity: ClaimPlanner
        self._runs: set[Run] = set()
        self._next_timeout: asyncio.TimerHandle | None = None
        """One timer for all runs, for the first timeout."""
        self._one_finished = asyncio.Event()
        self._quick = False

    async def open(self, context: WorkerContext) -> None:
        self._context = context
        self._capacity = context.claimer.capacity

    async def watch(self) -> None:
        """Wait, and raise if the executor fails."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End everything that the executor has started."""
        if self._next_timeout is not None:  # Until its time the loop would keep the worker and its storage in memory.
            self._next_timeout.cancel()

    async def reload(self) -> bool:
        """Load the code of the app again. Returns False if that is not possible, or the new code does not load."""
        return False

    @property
    @abstractmethod
    def configs(self) -> Iterable[QueueConfig]:
        """The queues that the executor can run."""

    @property
    def runs(self) -> list[Run]:
        """Runs that have not finished, with or without their lease."""
        return list(self._runs)

    @abstractmethod
    def start(self, run: Run) -> None:
        """Start a run, or have it wait for a host."""

    @abstractmethod
    def show_stack(self, run: Run, deliver: Callable[[str], None]) -> None:
        """Deliver the stack of a run, on any thread; empty if it has none. Called on the heartbeat's thread."""

    @abstractmethod
    def _ask_to_stop(self, run: Run, why: StopReason) -> None:
        """Ask a run to stop."""

    @abstractmethod
    def _grace_over(self, run: Run) -> None:
        """A run was asked to stop, and has not ended within its `cancel_grace`."""
        run.overdue = True

    def _kill(self, run: Run) -> None:  # noqa: B027 -- Python cannot kill a coroutine or a thread.
        """Kill a run, if that is possible, with its process."""

    def stop(self, run: Run, why: StopReason, *, kill_at: float | None = None) -> None:
        """Stop a run. The first reason counts. The run has its `cancel_grace`; at `kill_at` it is killed."""
        if run.done:
            return
        loop = asyncio.get_running_loop()
        if kill_at is not None:
            run.timers += (loop.call_at(kill_at, self._kill, run),)
        if run.stopping is not None:
            return
        run.stopping = why
        run.timers += (loop.call_later(run.config.policy.cancel_grace_ms / 1000, self._grace_over, run),)
        self._ask_to_stop(run, why)

    def _started(self, run: Run, host: int) -> None:
        loop = asyncio.get_running_loop()
        run.host, run.started_at = host, loop.time()
        self._runs.add(run)
        self._capacity.started(run.queue, host)
        run.limit_ms = timeout_ms(run.job, run.config.policy)
        if run.limit_ms is not None:
            run.times_out_at = run.started_at + run.limit_ms / 1000
            if self._next_timeout is None or run.times_out_at < self._next_timeout.when():
                self._check_timeouts_at(run.times_out_at)

    def _check_timeouts_at(self, at: float) -> None:
        if self._next_timeout is not None:
            self._next_timeout.cancel()
        self._next_timeout = asyncio.get_running_loop().call_at(at, self._stop_timed_out, at)

    def _stop_timed_out(self, now: float) -> None:
        self._next_timeout = None
        for run in self.runs:
            if run.times_out_at <= now:
                self.stop(run, "timeout")
        next_at = min((run.times_out_at for run in self._runs if run.times_out_at > now), default=NEVER)
        if next_at < NEVER:
            self._check_timeouts_at(next_at)

    def progressed(self, run: Run, progress: bytes) -> None:
        """A run has new progress, for the next heartbeat. Called on any thread."""
        run.lease.progress = progress
        self._context.heartbeat.nudge()

    def extended(self, run: Run, limit_ms: int) -> None:
        """A run asks for this much time from now on. The timer of its former end finds that it may go on."""
        if run.times_out_at < NEVER:
            run.times_out_at = max(run.times_out_at, asyncio.get_running_loop().time() + limit_ms / 1000)
            run.limit_ms = None

    def waits(self, run: Run, queue: str, begins: bool) -> None:
        """A run begins or ends to wait for jobs of a queue. It lends its capacity to them meanwhile."""
        targets = run.waits_for = set() if run.waits_for is None else run.waits_for
        if run.host is None or begins == (queue in targets) or (begins and len(targets) == MAX_TARGETS):
            return
        if begins:
            if not targets:
                self._capacity.lend(run.queue, run.host, 1)
            targets.add(queue)
            self._capacity.begin_wait(run.queue, queue)
        else:
            targets.remove(queue)
            self._capacity.end_wait(run.queue, queue)
            if not targets:
                self._capacity.lend(run.queue, run.host, -1)
        self._context.claimer.changed.set()

    def finished(self, run: Run, ended: Ended) -> None:
        """A run has ended: free its capacity, and have it settled unless its lease is lost."""
        run.done = True
        self._runs.discard(run)
        for timer in run.timers:
            timer.cancel()
        if run.waits_for:
            for queue in list(run.waits_for):
                self.waits(run, queue, False)
        if run.host is not None:
            self._capacity.finished(run.queue, run.host, given_up=run.given_up)
        self._one_finished.set()
        self._context.claimer.changed.set()
        if run.held:
            self._context.settler.decide(run, ended)

    # Runs that have to end

    def hurry(self) -> None:
        """Make the stop quick: runs that have to end get `QUICK_S` more."""
        self._quick = True
        self._one_finished.set()

    async def end_runs(self, runs: Sequence[Run], grace_s: float) -> None:
        """Give runs `grace_s` to end, then stop the others. Runs that have not started are stopped at once."""
        for run in runs:
            if run.started_at is None:
                self.stop(run, "shutdown")
        await self._until_finished(runs, grace_s)
        for run in runs:
            self.stop(run, "shutdown")
        longest_s = max((run.config.policy.cancel_grace_ms / 1000 for run in runs if not run.done), default=0.0)
        await self._until_finished(runs, longest_s + self.kill_allowance_s + 0.1)
        if self._quick:
            kill_at = asyncio.get_running_loop().time() + QUICK_S
            for run in runs:
                self.stop(run, "shutdown", kill_at=kill_at)
            await self._until_finished(runs, 3 * QUICK_S, even_if_quick=True)
        for run in runs:
            if run.done or not run.held:
                continue
            if run.config.policy.exclusive:
                log.error("job %r in %s is still running at shutdown: its lease will expire", run.job.id, run.queue)
            else:
                self._context.settler.decide(run, Stopped("shutdown"))

    async def _until_finished(self, runs: Sequence[Run], seconds: float, *, even_if_quick: bool = False) -> None:
        """Wait until these runs have ended, or the time is over, or the stop is quick."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await wait_until(
                    self._one_finished,
                    lambda: all(run.done for run in runs) or (self._quick and not even_if_quick),
                )


class Inline(Executor):
    """Executes runs on the worker's own loop, its only host, with the number 0. Python cannot kill a coroutine or a
    thread: a run that ignores its cancellation keeps its capacity until it ends by itself."""

    name = "inline"
    host_capacity = INLINE_CAPACITY

    def __init__(
        self, handlers: Iterable[Handler], hooks: AppHooks, application: Callable[[], Application] = Application
    ) -> None:
        super().__init__()
        self._find_application = application
        self.runner: Runner[Run] = Runner(handlers, hooks, MAX_THREADS, self)

    @property
    def configs(self) -> list[QueueConfig]:
        return [handler.config for handler in self.runner.handlers.values()]

    async def open(self, context: WorkerContext) -> None:
        await super().open(context)
        self.runner.check()
        self.application = self._find_application()
        self._capacity.open_host(0)

    async def close(self) -> None:
        await super().close()
        self.runner.close()

    def start(self, run: Run) -> None:
        self._started(run, 0)
        self.runner.start(run, run.queue, run.job)

    def show_stack(self, run: Run, deliver: Callable[[str], None]) -> None:
        deliver(self.runner.stack(run))

    def _ask_to_stop(self, run: Run, why: StopReason) -> None:
        run.stack = self.runner.stop(run, why)

    def _grace_over(self, run: Run) -> None:
        """A run that ignores its cancellation is given up, and its job may run elsewhere. If that is not allowed, the
        run keeps its lease until it ends."""
        super()._grace_over(run)
        run.given_up = True
        self._capacity.gave_up(run.queue)
        keeps = run.config.policy.exclusive or run.stopping in ("cancel", "lease_lost")
        log.warning(
            "job %r in %s ignored cancellation (%s): %s",
            *(run.job.id, run.queue, run.stopping),
            "it keeps its lease until it ends" if keeps else "abandoned, it may overlap with its next run",
        )
        if run.held and not keeps:
            ended = timed_out(run.limit_ms, run.stack) if run.stopping == "timeout" else Stopped("shutdown")
            self._context.settler.decide(run, ended)
