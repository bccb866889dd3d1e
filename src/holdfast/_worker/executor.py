"""Runs as their worker sees them: a job that it has leased, where it runs, and when it must end.

`Executor` is where runs go on: `inline.Inline` on the worker's own loop, `pool.Pool` in child processes. A run that is
to end is asked first; `cancel_grace` later it is overdue, and its executor does what it can.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from holdfast._core.capacity import NEVER, Capacity
from holdfast._core.events import EventKind
from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, QueueConfig, fence_of, is_suspect, timeout_ms
from holdfast.errors import JobError

StopReason = Literal["cancel", "timeout", "shutdown", "lease_lost"]


class Run:
    """A job that this worker has leased."""

    __slots__ = (
        *("alone", "done", "extended_at", "given_up", "held", "job", "key", "overdue", "progress", "queue", "room"),
        *("started_at", "stopping", "config", "timers", "times_out_at"),
    )

    def __init__(self, config: QueueConfig, job: Job, extended_at: float) -> None:
        self.config = config
        self.job = job
        self.queue = config.queue
        self.key = (config.queue, job.id, fence_of(job))
        self.room: int | None = None
        """Where it runs; None while it waits for a room."""
        self.started_at: float | None = None
        self.extended_at = extended_at
        """When the last claim or extend that succeeded was sent: from then on the lease lasted its length."""
        self.alone = is_suspect(job, config.policy)
        """It must have no neighbours."""
        self.held = True
        """The lease is ours, and nothing was decided about it yet."""
        self.done = False
        self.stopping: StopReason | None = None
        """Why it was asked to end."""
        self.overdue = False
        """It was asked to end, and did not in time."""
        self.given_up = False
        """It does not end, and cannot be killed."""
        self.progress: bytes | None = None
        self.times_out_at = NEVER
        self.timers: list[asyncio.TimerHandle] = []
        """Of a run that is asked to end."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a job at this worker, once it is stored: `claimed` when a run starts, then `completed`,
    `failed`, `retried`, `timed_out`, `stalled` (its process died) or `released`."""

    kind: EventKind
    queue: str
    id: str
    attempt: int
    seconds: float = 0.0
    """How long the run took."""
    error: JobError | None = None


OnEvent = Callable[[RunEvent], Any]


class Listener(NamedTuple):
    """Who is told what goes on in an executor."""

    ended: Callable[[Run, Ended], None]
    """A run is over."""
    stuck: Callable[[Run], None]
    """A run does not end, and cannot be killed."""
    reported: Callable[[], None]
    """There is progress to tell."""
    changed: Callable[[], None]
    """There may be room."""


class Executor(ABC):
    """Starts and stops runs, and says what became of them."""

    name: ClassVar[str]
    room_capacity: ClassVar[int]
    kill_allowance_s: float = 0.0
    """How much longer than its `cancel_grace` a run may take to be gone."""

    def __init__(self) -> None:
        self._fleet: Capacity
        self._to: Listener
        self._runs: set[Run] = set()
        self._next_timeout: asyncio.TimerHandle | None = None
        """One timer for all runs: it rings when the first of them may have to be stopped."""

    async def open(self, fleet: Capacity, to: Listener) -> None:
        """Get ready to work for a worker."""
        self._fleet, self._to = fleet, to

    @abstractmethod
    async def watch(self) -> None:
        """Wait, and raise if it breaks down."""

    def wind_down(self) -> None:  # noqa: B027 -- most have nothing to do.
        """The worker stops: begin nothing that is not needed for what runs."""

    @abstractmethod
    async def close(self) -> None:
        """Let everything go."""

    @property
    def hooks(self) -> list[OnEvent]:
        """Who else wants to hear of events."""
        return []

    @property
    @abstractmethod
    def config(self) -> Iterable[QueueConfig]:
        """What can be run here."""

    @property
    def runs(self) -> list[Run]:
        """What has begun and has not ended, whoever has its lease by now."""
        return list(self._runs)

    @abstractmethod
    def start(self, run: Run) -> None: ...

    @abstractmethod
    def _ask(self, run: Run, why: StopReason) -> None:
        """Tell a run to end."""

    @abstractmethod
    def _past_its_grace(self, run: Run) -> None:
        """A run was told to end, and has not."""

    @abstractmethod
    def _kill(self, run: Run) -> None:
        """A run must be gone now, whatever that costs."""

    def stop(self, run: Run, why: StopReason, *, kill_at: float | None = None) -> None:
        """Have a run end. The first reason counts. It has its `cancel_grace`; at `kill_at` it is killed."""
        if run.done:
            return
        loop = asyncio.get_running_loop()
        if kill_at is not None:
            run.timers.append(loop.call_at(kill_at, self._kill, run))
        if run.stopping is not None:
            return
        run.stopping = why
        run.timers.append(loop.call_later(run.config.policy.cancel_grace_ms / 1000, self._is_late, run))
        self._ask(run, why)

    def _is_late(self, run: Run) -> None:
        if not run.done:
            run.overdue = True
            self._past_its_grace(run)

    def _began(self, run: Run, room: int) -> None:
        loop = asyncio.get_running_loop()
        run.room, run.started_at = room, loop.time()
        self._runs.add(run)
        self._fleet.started(run.queue, room)
        limit_ms = timeout_ms(run.job, run.config.policy)
        if limit_ms is not None:
            run.times_out_at = run.started_at + limit_ms / 1000
            if self._next_timeout is None or run.times_out_at < self._next_timeout.when():
                self._look_for_timeouts_at(run.times_out_at)

    def _look_for_timeouts_at(self, at: float) -> None:
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
            self._look_for_timeouts_at(next_at)

    def _finish(self, run: Run, ended: Ended) -> None:
        """A run is over, and nothing of it is left."""
        run.done = True
        self._runs.discard(run)
        for timer in run.timers:
            timer.cancel()
        if run.room is not None:
            self._fleet.ended(run.queue, run.room, given_up=run.given_up)
        self._to.ended(run, ended)
