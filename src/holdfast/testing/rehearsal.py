"""An app whose jobs are in memory, and a worker that runs the ready jobs when the test asks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from holdfast._client.app import MAX_LEASE_MS, Holdfast
from holdfast._client.request import Using
from holdfast._client.sync import Blocking, blocking, run
from holdfast._client.task import Task
from holdfast._core.arguments import SignatureMismatch
from holdfast._core.clock import ManualClock
from holdfast._core.events import EventKind
from holdfast._core.options import from_at, to_at
from holdfast._worker.handler import Handler
from holdfast._worker.telemetry import RunEvent, default_worker_name
from holdfast._worker.worker import WorkerSettings
from holdfast.errors import HoldfastError, OptionError
from holdfast.testing.requests import Expectation, RehearsalStorage, RehearsedRequest, SeenRequest, describe, show

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
        self._storage: RehearsalStorage
        self._runs: list[RunEvent] = []

    def __enter__(self) -> Self:
        return self._begin(RehearsalStorage(self.clock))

    def _begin(
        self, storage: RehearsalStorage, run_blocking: Callable[[Callable[[], Awaitable[Any]]], Any] | None = None
    ) -> Self:
        self._session.rehearse(storage, run_blocking)
        self._storage, self._runs = storage, []
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.rehearse(None)

    @property
    def sync(self) -> SyncRehearsal:
        """The blocking version of this rehearsal, for tests that are not async."""
        return SyncRehearsal(self._session, self)

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
            raise endless(max_runs)
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

    # What was enqueued

    def enqueued(self, task: Using[..., Any] | str | None = None) -> list[RehearsedRequest]:
        """The requests so far, in order, of one task or of all. Each had a job run, or has it run later: duplicates are
        left out."""
        wanted = None if task is None else Expectation(task, {})
        return [
            describe(seen, self._arguments_of(seen))
            for seen in self._storage.seen
            if wanted is None or wanted.matches(seen, None)
        ]

    def assert_enqueued(self, task: Using[..., Any] | str, /, **arguments: object) -> None:
        """Raise `AssertionError` unless the task was enqueued with these arguments, by name, among others. The request
        may have ended. Options of `using` must be those of the request:
        `jobs.assert_enqueued(remind.using(delay=60), who="ada")`."""
        wanted = Expectation(task, arguments)
        if not self._find(wanted):
            others = [describe(seen, self._arguments_of(seen)) for seen in self._storage.seen]
            instead = f"; these were:{show(others)}" if others else ": nothing was"
            raise AssertionError(f"{wanted} was not enqueued{instead}")

    def assert_not_enqueued(self, task: Using[..., Any] | str, /, **arguments: object) -> None:
        """Raise `AssertionError` if the task was enqueued with these arguments, and with the options of `using`."""
        wanted = Expectation(task, arguments)
        if found := self._find(wanted):
            raise AssertionError(f"{wanted} was enqueued:{show(found)}")

    def _find(self, wanted: Expectation) -> list[RehearsedRequest]:
        pairs = ((seen, self._arguments_of(seen)) for seen in self._storage.seen if seen.queue == wanted.queue)
        return [describe(seen, arguments) for seen, arguments in pairs if wanted.matches(seen, arguments)]

    def _arguments_of(self, seen: SeenRequest) -> Any:
        """The arguments of a request by name; the payload if the queue has no task, or another signature."""
        work, codecs = seen.request.work, self._session.codecs
        definition = self._app._tasks.get(seen.queue)  # pyright: ignore[reportPrivateUsage]
        if work.payload is None:  # A retry keeps the payload of the record.
            return {}
        if definition is not None:
            with suppress(HoldfastError, SignatureMismatch):
                arguments = definition.arguments
                return arguments.named(arguments.decode(codecs.get(work.codec), work.payload))
        return codecs.decode_or_leave(work.payload, work.codec)

    def _handlers(self) -> list[Handler]:
        return self._app._served(None)  # pyright: ignore[reportPrivateUsage]


def endless(max_runs: int) -> HoldfastError:
    return HoldfastError(f"drain started more than {max_runs} runs: does a job enqueue itself without a delay?")


class SyncRehearsal(Blocking[Rehearsal], mirrors=Rehearsal):
    """A rehearsal, blocking, for tests that are not async. See `Rehearsal`."""

    def drain(self, *, max_runs: int | None = None) -> list[RunEvent]:
        return run(self._session, lambda: self._source.drain(max_runs=max_runs))

    advance = blocking(Rehearsal.advance)


rehearse = Rehearsal
"""`with rehearse(app) as jobs: …` uses an app in memory, with a clock that the test moves."""
