"""The worker's heartbeat, on a thread and a connection of its own: a handler that blocks the event loop does not cost
the worker its leases.

Every quarter of a lease: extend the leases that are held, announce the worker, and sweep queues that it has no capacity
to claim from (claims sweep, too). What it learns is passed to the worker's loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from holdfast._core.jobs import LeaseRef
from holdfast._core.replies import WorkerFacts
from holdfast._core.retry_policy import timeout_ms
from holdfast._worker.executor import Run, wait_at_most
from holdfast._worker.telemetry import worker_facts
from holdfast.errors import OptionError, PayloadRejected, StorageUnavailable
from holdfast.storage import Storage
from holdfast.storage.validation import MAX_ITEMS, batches

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

SOONEST_S = 0.5
"""Progress makes the next beat come early, but not sooner after the last than this."""
GOODBYE_S = 1.0
"""How long the last announcement of a worker that stops may take."""
LEAVING_MS = 100
"""A worker that stops is listed for this much longer: the least that a storage takes."""
ANNOUNCED_BEATS = 8
"""A worker is listed for this many beats after its last announcement."""
SNAPSHOT_S = 0.1
"""How long a beat waits for a snapshot of the worker, at most a quarter of its interval. A loop that is blocked makes
none, and the beat uses the one before."""

log = logging.getLogger("holdfast.worker")

_Beaten = tuple[Run, bytes | None]
"""A run, and the progress that goes with its lease."""
WorkerSnapshot = tuple[WorkerFacts, list[str]]
"""The state of a worker, made on its event loop for the heartbeat's thread: its record, and the queues of which no
further job fits, which no claim sweeps."""


class Heartbeat:
    """Keeps the leases of one worker alive.

    `start`, `stop` and the methods under "On the worker's loop" run on the worker's loop; the others on this thread.
    Of the worker, this thread reads settings, the runs that are held, and the newest snapshot.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._worker = context.settings.name
        self._lease_ms = context.settings.lease_ms
        self._every_s = context.settings.lease_ms / 4000
        self._enabled = context.settings.heartbeat
        self._beaten_at = float("-inf")
        self._failing = False
        self._stopping = False
        self._snapshot: WorkerSnapshot
        """Written by the worker's loop, read by this thread."""
        self._snapshot_made = asyncio.Event()
        self._nudged = asyncio.Event()
        self._work: asyncio.Task[None]
        self._error: BaseException | None = None
        """Why this thread has ended by itself."""
        self._broken = asyncio.Event()
        self._home: asyncio.AbstractEventLoop
        """The worker's loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of this thread, once it runs."""
        self._thread = threading.Thread(target=self._run, name="holdfast-beat", daemon=True)

    # From any thread

    @property
    def is_heard(self) -> bool:
        """Has a beat succeeded within the length of a lease? Otherwise the worker claims nothing: it could not keep
        its leases. From any thread."""
        return not self._enabled or time.monotonic() < self._beaten_at + self._lease_ms / 1000

    def nudge(self) -> None:
        """There is progress to send, or a lease to extend: beat soon. From any thread."""
        _call_on(self._loop, self._nudged.set)

    # On the worker's loop

    def start(self) -> None:
        """Begin to beat, unless the worker's settings say that it has no heartbeat."""
        if self._enabled:
            self._home = asyncio.get_running_loop()
            self._make_snapshot()
            self._thread.start()

    async def stop(self) -> None:
        """End at once, even in the middle of a beat; the worker is announced as leaving if that takes no time."""
        if self._enabled:
            self._stopping = True
            _call_on(self._loop, lambda: self._work.cancel())
            await asyncio.to_thread(self._thread.join)

    async def watch(self) -> None:
        """Wait, and raise if the heartbeat's thread has ended: without it the worker must not go on."""
        await self._broken.wait()
        raise RuntimeError(f"the heartbeat of worker {self._worker} has ended: {self._error!r}")

    def _make_snapshot(self) -> None:
        capacity = self._context.claimer.capacity
        self._snapshot = (worker_facts(self._context.executor.name, capacity), capacity.full_queues())
        _call_on(self._loop, self._snapshot_made.set)

    def _lost(self, run: Run) -> None:
        """A lease is not ours any more: the run is stopped, and its result discarded."""
        if run.done or self._context.held.pop(run.key, None) is None:
            return
        log.warning("worker %s lost its lease of job %r in %s", self._worker, run.job.id, run.queue)
        run.held = False
        kill_at = None
        if run.config.policy.exclusive:  # Another run may have begun: it is killed soon, whatever it was stopped for.
            grace_s = 0.0 if run.overdue else run.config.policy.cancel_grace_ms / 1000
            kill_at = self._home.time() + grace_s
        self._context.executor.stop(run, "lease_lost", kill_at=kill_at)

    def _evicted(self) -> None:
        """The storage has a command for this worker to stop."""
        if not self._context.stopping.is_set():
            log.warning("worker %s was evicted: it stops", self._worker)
            self._context.stop()

    # On the heartbeat's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
            _call_on(self._home, self._broken.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._beat_for_ever())
        if self._stopping:
            self._work.cancel()
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.result()  # It has failed: it never ends by itself.

    async def _beat_for_ever(self) -> None:
        """When a beat fails, begin again at once with a new connection: leases must be extended before half a lease has
        passed since the storage came back."""
        while not self._stopping:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._every_s):
                        storage = await stack.enter_async_context(self._context.storage.clone())
                    await self._beat_until_broken(storage)
            except TimeoutError:
                self._failed(StorageUnavailable(f"no answer to a heartbeat within {self._every_s:g} s"))
            except Exception as error:
                self._failed(error)
            await asyncio.sleep(self._every_s / 10)

    def _failed(self, error: BaseException) -> None:
        """A beat, or part of it, has failed. That is reported once, until a beat succeeds."""
        if not self._failing:
            self._failing = True
            where = f"worker {self._worker} could not say that it is alive"
            _call_on(self._home, self._context.hooks.report_error, error, where)
        self._kill_the_unsure()

    async def _beat_until_broken(self, storage: Storage) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                async with asyncio.timeout(self._every_s):
                    await self._beat(storage)
                news = self._failing or not self.is_heard
                self._failing, self._beaten_at = False, time.monotonic()
                if news:  # The claimer may claim again.
                    _call_on(self._home, self._context.claimer.changed.set)
                await asyncio.sleep(min(SOONEST_S, self._every_s))
                await wait_at_most(began + self._every_s - loop.time(), self._nudged)
                self._nudged.clear()
        except asyncio.CancelledError:
            await self._say_goodbye(storage)
            raise

    async def _say_goodbye(self, storage: Storage) -> None:
        with suppress(StorageUnavailable, TimeoutError):  # Then it is forgotten a little later.
            async with asyncio.timeout(GOODBYE_S):
                await storage.announce(self._worker, self._snapshot[0], ttl_ms=LEAVING_MS)

    async def _beat(self, storage: Storage) -> None:
        """Everything side by side: one slow queue must not cost the leases of another."""
        by_queue: dict[str, list[_Beaten]] = defaultdict(list)
        for run in list(self._context.held.values()):
            if self._extends(run):
                by_queue[run.queue].append((run, run.lease.progress))
        extends = [self._extend(storage, queue, runs) for queue, runs in by_queue.items()]
        snapshot = asyncio.ensure_future(self._fresh_snapshot())
        ended = await asyncio.gather(
            *extends, self._announce(storage, snapshot), self._sweep(storage, snapshot), return_exceptions=True
        )
        errors = [error for error in ended if isinstance(error, BaseException)]
        if len(errors) == len(ended):
            raise errors[0]  # Nothing succeeded: the connection is of no use.
        for error in errors:
            self._failed(error)

    async def _fresh_snapshot(self) -> WorkerSnapshot:
        """A new snapshot from the worker's loop; the one before, if the loop is blocked."""
        self._snapshot_made.clear()
        _call_on(self._home, self._make_snapshot)
        await wait_at_most(min(SNAPSHOT_S, self._every_s / 4), self._snapshot_made)
        return self._snapshot

    async def _extend(self, storage: Storage, queue: str, runs: list[_Beaten]) -> None:
        extend = partial(storage.extend, queue, worker=self._worker, lease_ms=self._lease_ms)
        for beaten in batches(runs, lambda beaten: len(beaten[1] or b"")):
            sent_at = asyncio.get_running_loop().time()
            try:
                reply = await extend([LeaseRef(*run.key[1:], progress) for run, progress in beaten])
            except (PayloadRejected, OptionError) as error:  # A heartbeat never depends on what a handler reports.
                where = f"worker {self._worker} could not send the progress of jobs in {queue}"
                _call_on(self._home, self._context.hooks.report_error, error, where)
                reply = await extend([LeaseRef(*run.key[1:]) for run, _ in beaten])
            for run, progress in beaten:
                run.lease.extended_at = sent_at
                if run.lease.progress is progress:
                    run.lease.progress = None  # Sent; a newer one may have come meanwhile.
            by_lease = {run.key[1:]: run for run, _ in beaten}
            for lease in reply.lost:
                _call_on(self._home, self._lost, by_lease[lease.id, lease.fence])
            for lease in reply.cancel_asked:
                _call_on(self._home, self._context.executor.stop, by_lease[lease.id, lease.fence], "cancel")

    async def _announce(self, storage: Storage, snapshot: asyncio.Future[WorkerSnapshot]) -> None:
        facts, _ = await snapshot
        ttl_ms = round(1000 * self._every_s * ANNOUNCED_BEATS)
        commands = await storage.announce(self._worker, facts, ttl_ms=ttl_ms)
        if commands.evict:
            _call_on(self._home, self._evicted)

    async def _sweep(self, storage: Storage, snapshot: asyncio.Future[WorkerSnapshot]) -> None:
        _, full_queues = await snapshot
        for queue in await storage.ready(full_queues[:MAX_ITEMS]):
            await storage.sweep(queue)

    def _extends(self, run: Run) -> bool:
        """Is the lease of this run to be extended? Not when the run is long past its timeout, even if the loop is
        blocked and cannot stop it; an exclusive one keeps its lease until it ends."""
        policy = run.config.policy
        limit_ms = timeout_ms(run.job, policy)
        if limit_ms is None or policy.exclusive or run.done or run.started_at is None:
            return True
        longest_s = (limit_ms + policy.cancel_grace_ms + self._lease_ms) / 1000
        return asyncio.get_running_loop().time() < (
            run.started_at + longest_s + self._context.executor.kill_allowance_s
        )

    def _kill_the_unsure(self) -> None:
        """The storage does not answer. Runs that must end before another worker can have their lease are killed now, if
        another failed beat would be too late."""
        now = asyncio.get_running_loop().time()
        for run in list(self._context.held.values()):
            ends_at = run.lease.extended_at + self._lease_ms / 1000
            next_chance_at = now + self._every_s + min(SOONEST_S, self._every_s)
            if run.config.policy.dies_with_storage and next_chance_at >= ends_at:
                kill_at = max(now, ends_at - self._lease_ms / 20_000)
                _call_on(self._home, partial(self._context.executor.stop, run, "lease_lost", kill_at=kill_at))


def _call_on(loop: asyncio.AbstractEventLoop | None, function: Callable[..., object], *args: object) -> None:
    """Call a function on the loop of another thread, unless that has not begun or has ended."""
    if loop is not None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *args)
