"""What the parts of one worker share, and the way of a run through them: begun, finished, decided, settled.

`WorkerContext` makes claimer, settler and heartbeat and holds the executor. Each of the four calls it directly. All of
it is used on the worker's event loop, except `held_runs`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

import msgspec

from holdfast._core.events import POLL_INTERVAL_S, EventKind
from holdfast._core.failure import error_from_exception
from holdfast._core.jobs import Complete, Job, Release
from holdfast._core.replies import SettleResult
from holdfast._core.retry_policy import Ended, QueueConfig, Raised, Stopped, TimedOut, admit, fence_of, verdict
from holdfast._worker.claimer import Claimer
from holdfast._worker.executor import Executor, Run
from holdfast._worker.heartbeat import Heartbeat, WorkerSnapshot
from holdfast._worker.run import timed_out
from holdfast._worker.settler import PendingSettlement, Settled, Settler
from holdfast._worker.telemetry import HookDispatcher, RunEvent, event_of, jobs_log, log_event, worker_facts
from holdfast.storage import Storage

QUICK_S = 1.0
"""How long a run has to end when a stop is to be quick."""

log = logging.getLogger("holdfast.worker")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker."""

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
    """One worker, as its parts see it."""

    def __init__(self, settings: WorkerSettings, executor: Executor, hooks: HookDispatcher) -> None:
        self.settings = settings
        self.executor = executor
        self.hooks = hooks
        self.storage: Storage
        """The storage of the jobs, once the worker has opened it."""
        self.configs: dict[str, QueueConfig] = {}
        """What can be served, by queue."""
        self.stopping = asyncio.Event()
        """Set when the worker is to stop."""
        self.broken = asyncio.Event()
        """Set when a part that the worker depends on has ended: see `why_broken`."""
        self.why_broken = ""
        self.claimer = Claimer(self)
        self.settler = Settler(self)
        self.heartbeat = Heartbeat(self)
        self._rng = random.Random()
        self._runs: dict[tuple[str, str, int], Run] = {}
        """Runs whose jobs are claimed and not yet settled."""
        self._one_finished = asyncio.Event()
        self._quick = asyncio.Event()

    # State

    def held_runs(self) -> list[Run]:
        """Runs whose leases are ours. From any thread: the copy is one atomic step of the interpreter."""
        return list(self._runs.values())

    @property
    def busy(self) -> bool:
        """Is a job held, run or being settled?"""
        return bool(self._runs or self.settler.busy or self.executor.runs)

    def snapshot(self) -> WorkerSnapshot:
        """The state that the heartbeat announces."""
        return WorkerSnapshot(worker_facts(self.executor.name, self.claimer.capacity), self.claimer.full_queues())

    def stop(self, *, quick: bool = False) -> None:
        """Have the worker stop. `quick` gives runs hardly any more time."""
        self.stopping.set()
        if quick:
            self._quick.set()
            self._one_finished.set()
        self.claimer.stop()

    def evict(self) -> None:
        """The storage has a command for this worker to stop."""
        if not self.stopping.is_set():
            log.warning("worker %s was evicted: it stops", self.settings.name)
            self.stop()

    def break_down(self, why: str) -> None:
        """The worker cannot go on."""
        self.why_broken = self.why_broken or why
        self.broken.set()

    # A run begins

    def begin(self, queue: str, jobs: Sequence[Job], sent_at: float) -> None:
        """Start jobs that were claimed by a call that was sent at `sent_at`: their leases are at most that old."""
        config = self.configs.get(queue)
        lease_s = self.settings.lease_ms / 1000
        age_s = asyncio.get_running_loop().time() - sent_at
        is_over = age_s >= lease_s  # The reply took longer than a lease: another worker may have the jobs.
        if config is None or is_over or self.stopping.is_set() or not self.claimer.serves(queue):
            for job in jobs:
                self._release(queue, job)
            return
        for job in jobs:
            self._start(config, job, sent_at)
        if age_s > lease_s / 4:
            self.heartbeat.nudge()

    def _start(self, config: QueueConfig, job: Job, sent_at: float) -> None:
        if config.policy.exclusive and self._still_runs(config.queue, job):
            self.claimer.rest(config.queue, POLL_INTERVAL_S)
            self._release(config.queue, job)
            return
        refusal = admit(job, config.policy)
        if refusal is not None:
            self.settler.settle(config.queue, PendingSettlement(job, refusal, config.policy))
            return
        run = Run(config, job, sent_at)
        self._runs[run.key] = run
        self.executor.start(run)
        if self.hooks.on_event:
            self.hooks.publish(RunEvent(kind=EventKind.CLAIMED, queue=config.queue, id=job.id, attempt=job.attempts))

    def _still_runs(self, queue: str, job: Job) -> bool:
        """Does an earlier run of this job go on here, whose lease was lost? Runs of an exclusive job must not
        overlap."""
        return any(run.queue == queue and run.job.id == job.id for run in self.executor.runs)

    def _release(self, queue: str, job: Job) -> None:
        self.settler.settle(queue, PendingSettlement(job, Release(job.id, fence_of(job))))

    # A run ends: finished, decided, settled

    def finished(self, run: Run, ended: Ended) -> None:
        """The executor says that a run is over."""
        self._one_finished.set()
        self.claimer.changed()
        if run.held:
            self._decide(run, ended)

    def stuck(self, run: Run) -> None:
        """The executor says that a run was stopped, does not end, and cannot be killed. Its job goes on elsewhere,
        unless it must not overlap with itself: then its lease is held until the run ends."""
        keeps = run.config.policy.exclusive or run.stopping in ("cancel", "lease_lost")
        log.warning(
            "job %r of %s does not stop (%s): %s",
            *(run.job.id, run.queue, run.stopping),
            "it keeps its lease until it ends" if keeps else "it is given up, and may overlap with its next run",
        )
        if run.held and not keeps:
            self._decide(run, TimedOut(timed_out()) if run.stopping == "timeout" else Stopped("shutdown"))

    def _decide(self, run: Run, ended: Ended) -> None:
        """Decide how the job of a run is settled, and have the settler do it."""
        run.held = False
        policy = run.config.policy
        try:
            settlement = verdict(run.job, ended, policy, self._rng)
        except Exception as error:
            settlement = verdict(run.job, Raised(error_from_exception(error, "permanent")), policy, self._rng)
        self.settler.settle(run.queue, PendingSettlement(run.job, settlement, policy, run))

    def settled(self, queue: str, settled: Sequence[Settled]) -> None:
        """The settler has replies: forget these runs, and publish their events."""
        now = asyncio.get_running_loop().time()
        every = bool(self.hooks.on_event) or jobs_log.isEnabledFor(logging.INFO)
        quiet = (Complete, Release)
        for pending, reply in settled:
            run = pending.run
            if run is not None:
                self._runs.pop(run.key, None)
            if reply is SettleResult.LOST:
                log.warning("job %r of %s is another's: what this run gave is refused", pending.job.id, queue)
            elif reply is SettleResult.OK and (every or not isinstance(pending.settlement, quiet)):
                started_at = None if run is None else run.started_at
                seconds = 0.0 if started_at is None else now - started_at
                event = event_of(queue, pending.job, pending.settlement, seconds)
                self.hooks.publish(event)
                log_event(event, self.settings.name)

    def settler_idle(self) -> None:
        """The settler has nothing left of a queue. In a burst, what it settled may be ready again, and hints may come
        late: every queue is asked once more."""
        if self.settings.burst:
            self.claimer.wake_all()
        self.claimer.changed()

    def lost(self, run: Run) -> None:
        """The heartbeat says that a lease is not ours any more: the run is stopped, and its result discarded."""
        if run.done or run.key not in self._runs:
            return
        log.warning("worker %s lost its lease of job %r in %s", self.settings.name, run.job.id, run.queue)
        run.held = False
        del self._runs[run.key]
        kill_at = None
        if run.config.policy.exclusive:  # Another run may have begun: it is killed soon, whatever it was stopped for.
            grace_s = 0.0 if run.overdue else run.config.policy.cancel_grace_ms / 1000
            kill_at = asyncio.get_running_loop().time() + grace_s
        self.executor.stop(run, "lease_lost", kill_at=kill_at)

    # Runs that have to end

    async def end_runs(self, runs: Sequence[Run], grace_s: float) -> None:
        """Give runs their grace, then stop them, then give them the time that each has to stop. Those that have not
        started need none."""
        for run in runs:
            if run.started_at is None:
                self.executor.stop(run, "shutdown")
        await self._until_finished(runs, grace_s)
        for run in runs:
            self.executor.stop(run, "shutdown")
        longest_s = max((run.config.policy.cancel_grace_ms / 1000 for run in runs if not run.done), default=0.0)
        await self._until_finished(runs, longest_s + self.executor.kill_allowance_s + 0.1)
        if self._quick.is_set():
            kill_at = asyncio.get_running_loop().time() + QUICK_S
            for run in runs:
                self.executor.stop(run, "shutdown", kill_at=kill_at)
            await self._until_finished(runs, 3 * QUICK_S, even_if_quick=True)
        for run in runs:
            if run.done or not run.held:
                continue
            if run.config.policy.exclusive:
                log.error("job %r of %s still runs: its lease will expire", run.job.id, run.queue)
            else:
                self._decide(run, Stopped("shutdown"))

    async def _until_finished(self, runs: Sequence[Run], seconds: float, *, even_if_quick: bool = False) -> None:
        """Wait until these runs are over, or this time is, or the stop is to be quick."""
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while not all(run.done for run in runs) and (even_if_quick or not self._quick.is_set()):
                    self._one_finished.clear()
                    await self._one_finished.wait()
        except TimeoutError:
            pass  # Their time is over.
