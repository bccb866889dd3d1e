"""Runs on the worker's own event loop, and on threads for handlers that are not async.

Fast and simple, with one limit that Python sets: a run that does not end when it is cancelled cannot be killed. It
keeps its place in the capacity until it ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.execution import CurrentJob, Handler, Surroundings, Why, interrupted, perform
from holdfast.jobs import Job
from holdfast.policy import Ended, fence_of, timeout_ms

CAPACITY = 1_000


class Run:
    """A job that this worker has leased and started."""

    __slots__ = (
        *("current", "done", "extended_at", "given_up", "handler", "held"),
        *("job", "progress", "started_at", "task", "timers"),
    )

    def __init__(self, handler: Handler, job: Job, extended_at: float) -> None:
        self.handler = handler
        self.job = job
        self.current: CurrentJob
        self.started_at = 0.0
        self.extended_at = extended_at
        """When the last claim or extend that succeeded was sent: from then on the lease lasted its length."""
        self.held = True
        """The lease is ours, and nothing was decided about it yet."""
        self.done = False
        self.given_up = False
        """It was told to stop, and does not."""
        self.progress: bytes | None = None
        self.task: asyncio.Task[Ended] | None = None
        self.timers: list[asyncio.TimerHandle] = []

    @property
    def key(self) -> tuple[str, str, int]:
        return self.handler.queue, self.job.id, fence_of(self.job)


class Inline:
    """Starts and stops runs; says when one has ended, and when one that was stopped does not end."""

    capacity = CAPACITY

    def __init__(
        self,
        around: Surroundings,
        *,
        ended: Callable[[Run, Ended], None],
        stuck: Callable[[Run], None],
        reported: Callable[[], None],
    ) -> None:
        self.resources: Any = None
        self._around = around
        self._ended = ended
        self._stuck = stuck
        self._reported = reported
        self._threads = ThreadPoolExecutor(CAPACITY, "holdfast-run")
        self._runs: dict[asyncio.Task[Ended], Run] = {}

    @property
    def runs(self) -> list[Run]:
        """What has been started and has not ended, whoever has its lease by now."""
        return list(self._runs.values())

    def start(self, run: Run) -> None:
        loop = asyncio.get_running_loop()
        run.started_at = loop.time()

        def report(progress: bytes) -> None:
            run.progress = progress
            self._reported()

        run.current = CurrentJob(run.handler.queue, run.job, report, self.resources)
        run.task = loop.create_task(perform(run.job, run.current, run.handler, self._around, self._threads))
        self._runs[run.task] = run
        run.task.add_done_callback(self._done)
        limit_ms = timeout_ms(run.job, run.handler.policy)
        if limit_ms is not None:
            run.timers.append(loop.call_later(limit_ms / 1000, self.stop, run, "timeout"))

    def stop(self, run: Run, why: Why) -> None:
        """Ask a run to end. The first reason counts."""
        if run.done or run.current.stopping is not None:
            return
        run.current.stopping = why
        if run.current.on_loop and run.task is not None:
            run.task.cancel()
        grace_s = run.handler.policy.cancel_grace_ms / 1000
        run.timers.append(asyncio.get_running_loop().call_later(grace_s, self._overdue, run))

    def close(self) -> None:
        """Threads that are idle end now, the others with their runs."""
        self._threads.shutdown(wait=False)

    def _done(self, task: asyncio.Task[Ended]) -> None:
        run = self._runs.pop(task)
        run.done = True
        for timer in run.timers:
            timer.cancel()
        error = None if task.cancelled() else task.exception()
        ended = interrupted(error, run.current) if task.cancelled() or error else task.result()
        self._ended(run, ended)

    def _overdue(self, run: Run) -> None:
        if not run.done:
            self._stuck(run)
