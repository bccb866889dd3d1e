"""Test an app: its jobs are in memory, the test moves the clock, and a worker runs the ready jobs on demand.

>>> async def test_a_reminder_is_sent_after_a_day():
...     with rehearse(app) as jobs:
...         await remind.using(delay=86_400).enqueue("ada")
...         assert await jobs.drain() == []
...         await jobs.advance(days=1)
...         assert [run.id for run in jobs.ran(remind)] == [...]

With pytest, the fixture `rehearse` does the same without the `with`: `jobs = rehearse(app)`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Self

from holdfast._client.app import MAX_LEASE_MS, Holdfast
from holdfast._client.task import Task
from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind
from holdfast._core.options import from_at, to_at
from holdfast._worker.handler import Handler
from holdfast._worker.telemetry import RunEvent, default_worker_name
from holdfast._worker.worker import WorkerSettings
from holdfast.errors import HoldfastError, OptionError
from holdfast.storage.local.memory import MemoryStorage

__all__ = ["Rehearsal", "rehearse"]

MAX_MORE_RUNS = 10_000
"""How many more jobs a drain runs than were ready when it began: still more mean that it would never end."""
START = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
"""Time at the start of a rehearsal, unless given."""


class Rehearsal:
    """An app whose jobs are in memory, with a clock that the test moves: `with rehearse(app) as jobs: …`. The app's
    own storage is not used, and the jobs are gone after the block."""

    def __init__(self, app: Holdfast[Any], *, now: datetime = START) -> None:
        self._app = app
        self._session = app._session  # pyright: ignore[reportPrivateUsage]
        self.clock = ManualClock(to_at("now", now) / 1e6)
        self._storage: MemoryStorage
        self._runs: list[RunEvent] = []

    def __enter__(self) -> Self:
        self._storage = MemoryStorage(clock=self.clock)
        self._session.rehearse(self._storage)
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.rehearse(None)

    @property
    def now(self) -> datetime:
        """Present time of the clock that the test moves."""
        return from_at(self.clock.now_us())

    async def drain(self, *, max_runs: int | None = None) -> list[RunEvent]:
        """Run ready jobs, and the jobs that these make ready, until no job is ready. Returns the runs in order.

        A job that is due later, as after a retry, waits for `advance`. Raises after more than `max_runs` runs: by
        default 10,000 more than jobs are ready now.
        """
        before = len(self._runs)
        if max_runs is None:
            ready = sum(stats.ready for stats in (await self._app.storage.snapshot()).queues)
            max_runs = ready + MAX_MORE_RUNS

        def note(event: RunEvent) -> None:
            self._runs.append(event)
            if len(self._runs) - before > 2 * max_runs:  # A run has two events: its start and its end.
                worker.stop()

        settings = WorkerSettings(name=default_worker_name(), burst=True, heartbeat=False, lease_ms=MAX_LEASE_MS)
        worker = self._app._inline_worker(self._handlers(), settings, note)  # pyright: ignore[reportPrivateUsage]
        await worker.run()
        if len(self._runs) - before > 2 * max_runs:
            raise HoldfastError(f"drain started more than {max_runs} runs: does a job enqueue itself without a delay?")
        return [event for event in self._runs[before:] if event.kind is not EventKind.CLAIMED]

    async def advance(
        self,
        seconds: float = 0,
        *,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
        max_runs: int | None = None,
    ) -> list[RunEvent]:
        """Move the clock forward, and run each job at the time when it is due. Returns the runs in order. `max_runs`
        limits the runs at one time, as in `drain`."""
        length = timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days)
        if length < timedelta(0):
            raise OptionError(f"advance moves the clock forward, not by {length.total_seconds():g} seconds")
        target = self.clock.now_us() + round(length / timedelta(microseconds=1))
        happened = await self.drain(max_runs=max_runs)
        queues = [handler.queue for handler in self._handlers()]
        while (due := self._storage.next_due_us(queues)) is not None and due <= target:
            self.clock.advance((due - self.clock.now_us()) / 1e6)
            happened += await self.drain(max_runs=max_runs)
        self.clock.advance((target - self.clock.now_us()) / 1e6)
        return happened

    def ran(self, task: Task[..., Any, Any] | str | None = None) -> list[RunEvent]:
        """The runs that have ended, of one task or of all tasks: one event for each run."""
        name = task if isinstance(task, str) or task is None else task.name
        return [run for run in self._runs if run.kind is not EventKind.CLAIMED and name in (None, run.queue)]

    def _handlers(self) -> list[Handler]:
        return self._app._served(None)  # pyright: ignore[reportPrivateUsage]


rehearse = Rehearsal
"""`with rehearse(app) as jobs: …` uses an app in memory, with a clock that the test moves."""
