"""Reports of a worker about itself and its runs: events for hooks, log lines, and its record in the storage."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from holdfast._core.applications import MAX_SIGNED, Application
from holdfast._core.capacity import Capacity
from holdfast._core.events import OF_WORKERS, EventKind
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Complete, Fail, Job, Release, RetrySettlement, Settlement
from holdfast._core.lifecycle import RETRY_KINDS
from holdfast._core.replies import WorkerFacts
from holdfast._core.retry_policy import QueueConfig
from holdfast._core.tasks import SIGNATURE_CHARS
from holdfast._core.text import escape_control
from holdfast.errors import HoldfastError, JobError
from holdfast.version import VERSION

T = TypeVar("T")

log = logging.getLogger("holdfast.worker")
jobs_log = logging.getLogger("holdfast.jobs")
"""Logger with one line for each event of a job."""

MAX_HOOK_CALLS = 10_000
"""Most events and errors that wait for hooks. When more come, the oldest are dropped: hooks get hints."""
NAMED_QUEUES = 10
"""Most queues in each list of a worker's record that says how its capacity is used."""
DROPPED_LOG_S = 5.0
"""Shortest time between two log lines about dropped events and errors."""
KINDS: dict[Any, EventKind] = {
    Complete: EventKind.COMPLETED,
    Fail: EventKind.FAILED,
    Release: EventKind.RELEASED,
    **RETRY_KINDS,
}
"""Kind of event by the class of the settlement, or by the counter that a retry raises."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a job at this worker, published once it is stored: `claimed` when a run starts, then `completed`,
    `failed`, `retried`, `timed_out`, `stalled` (its process died) or `released`. A heartbeat adds `progress`, and
    `drained` for a queue without waiting and running jobs."""

    kind: EventKind
    queue: str
    id: str
    """Empty for `drained`."""
    attempt: int
    seconds: float = 0.0
    """How long the run took."""
    error: JobError | None = None
    progress_json: bytes = b"null"

    @property
    def progress(self) -> Any:
        """What the run has reported last, with the kind `progress`; else None."""
        return msgspec.json.decode(self.progress_json)


NO_ENDS = OF_WORKERS | {EventKind.CLAIMED}
"""Events that end no run."""
OnEvent = Callable[[RunEvent], Any]
ErrorReporter = Callable[[BaseException, str], Awaitable[None]]
"""Takes an error that is not the failure of a job, and the place where it happened."""


class HookBacklog(Generic[T]):
    """Events and errors that wait for hooks, at most `MAX_HOOK_CALLS`."""

    def __init__(self) -> None:
        self.waiting: deque[T] = deque(maxlen=MAX_HOOK_CALLS)
        self._dropped = 0
        """Number of dropped items that are not in the log yet."""
        self._logged_at = float("-inf")

    def add(self, item: T) -> None:
        """Add an item, and drop the oldest one if there are too many."""
        if len(self.waiting) == self.waiting.maxlen:
            self._dropped += 1
            if time.monotonic() >= self._logged_at + DROPPED_LOG_S:
                self.log_dropped()
        self.waiting.append(item)

    def log_dropped(self) -> None:
        """Log how many items were dropped since the last log line."""
        if self._dropped:
            log.warning("dropped %d of the events and errors for hooks: the hooks are too slow", self._dropped)
            self._dropped, self._logged_at = 0, time.monotonic()


class HookDispatcher:
    """Calls hooks with events and errors, in order and in its own task, so that a slow hook delays no job."""

    def __init__(self, on_event: Sequence[OnEvent], report_error: ErrorReporter, *, on_threads: bool = False) -> None:
        """With `on_threads`, hooks that are not async are called on a thread, so that they do not block the loop."""
        self.on_event = list(on_event)
        self.ended_in: dict[str, None] = {}
        """Queues in which a run has ended since a heartbeat has taken them from here, on another thread."""
        self._on_threads = on_threads
        self._report_error = report_error
        self._backlog: HookBacklog[RunEvent | tuple[BaseException, str]] = HookBacklog()
        self._added = asyncio.Event()
        self._ending = False

    def publish(self, event: RunEvent) -> None:
        if self.on_event:
            self._backlog.add(event)
            self._added.set()
            if event.kind not in NO_ENDS:
                self.ended_in[event.queue] = None

    def report_error(self, error: BaseException, where: str) -> None:
        """Report an error that is not the failure of a job."""
        self._backlog.add((error, where))
        self._added.set()

    async def run(self) -> None:
        """Call hooks until `end`."""
        while not self._ending or self._backlog.waiting:
            if not self._backlog.waiting:
                self._added.clear()
                await self._added.wait()
                continue
            item = self._backlog.waiting.popleft()
            if isinstance(item, tuple):
                await self._report_error(*item)
            else:
                await self.call(item)

    async def call(self, event: RunEvent) -> None:
        """Call the hooks with an event now, and report what they raise."""
        for hook in self.on_event:
            try:
                on_thread = self._on_threads and not inspect.iscoroutinefunction(hook)
                await awaited(await asyncio.to_thread(hook, event) if on_thread else hook(event))
            except (Exception, SystemExit) as error:
                await self._report_error(error, f"on_event, for {event.kind} of job {event.id!r:.80}")

    async def end(self, running: asyncio.Task[None], within_s: float) -> None:
        """Let `running`, the task of `run`, call hooks with all that waits; cancel it if that takes too long."""
        self._ending = True
        self._added.set()
        self._backlog.log_dropped()
        await asyncio.wait([running], timeout=within_s)
        if not running.done():
            log.error("a hook did not finish within %g s at shutdown: cancelled", within_s)
            running.cancel()


async def awaited(value: Any) -> Any:
    """The value of a call, whether the function is async or not."""
    return await value if inspect.isawaitable(value) else value


def log_error(error: BaseException, where: str) -> None:
    """Log an error that is not the failure of a job, with a traceback unless it is an error of Holdfast."""
    log.error("%s: %s", where, error, exc_info=None if isinstance(error, HoldfastError) else error)


def event_of(queue: str, job: Job, settlement: Settlement, seconds: float) -> RunEvent:
    error = settlement.error if isinstance(settlement, Fail | RetrySettlement) else None
    return RunEvent(
        kind=KINDS[settlement.counts if isinstance(settlement, RetrySettlement) else type(settlement)],
        queue=queue,
        id=job.id,
        attempt=job.attempts,
        seconds=seconds,
        error=None if error is None else decode_error(error),
    )


def log_event(event: RunEvent, worker: str) -> None:
    facts: dict[str, Any] = {
        "event": event.kind,
        "queue": event.queue,
        "id": event.id,
        "attempt": event.attempt,
        "seconds": round(event.seconds, 6),
        "worker": worker,
    }
    error = ""
    if event.error is not None:
        facts |= {"error": event.error.type, "kind": event.error.kind}
        error = f": {escape_control(str(event.error))[:300]}"
        if event.error.kind == "timeout":  # No exception was logged with its traceback.
            facts["traceback"] = event.error.traceback
    jobs_log.log(
        logging.WARNING if event.kind in (EventKind.FAILED, EventKind.STALLED, EventKind.TIMED_OUT) else logging.INFO,
        "%s %s of %s, attempt %d, %.3f s%s",
        *(event.kind, escape_control(event.id), event.queue, event.attempt, event.seconds, error),
        extra={"facts": facts},
    )


def default_worker_name() -> str:
    """A unique name for a worker: host, process and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def worker_facts(
    executor: str, capacity: Capacity, application: Application, configs: Mapping[str, QueueConfig]
) -> WorkerFacts:
    """The record of a worker in this process, with the signatures of its first `MAX_SIGNED` queues.
    `busiest` has queues and the units that their runs use, `waits` queues and those for whose jobs their runs wait."""
    signatures = [configs[name].signature if name in configs else "" for name in list(capacity.served)[:MAX_SIGNED]]
    busiest = sorted(capacity.usage().items(), key=lambda used: -used[1])
    return {
        "queues": list(capacity.served),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": VERSION,
        "app": application.target,
        "source": application.source,
        "signatures": "".join(signature.ljust(SIGNATURE_CHARS) for signature in signatures),
        "executor": executor,
        "capacity": capacity.units,
        "used": capacity.used,
        "running": capacity.runs,
        "lent": capacity.lent,
        "busiest": [f"{queue} {units}" for queue, units in busiest[:NAMED_QUEUES]],
        "waits": [f"{queue} {target}" for queue, target in list(capacity.waits)[:NAMED_QUEUES]],
    }
