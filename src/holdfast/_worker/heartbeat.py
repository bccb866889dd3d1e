"""The worker's heartbeat, on a thread and a connection of its own: a handler that blocks the event loop does not cost
the worker its leases.

Every quarter of a lease: extend what is held, say that the worker is there, sweep queues that it has no room to claim
from (claims sweep, too). What it learns is told to the worker's loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack

from holdfast._core.jobs import LeaseRef
from holdfast._core.replies import Extended, WorkerFacts
from holdfast._core.retry_policy import fence_of, timeout_ms
from holdfast._worker.executor import Run
from holdfast.errors import OptionError, PayloadRejected, StorageUnavailable
from holdfast.storage import Storage
from holdfast.storage.validation import MAX_ITEMS, batches

SOONEST_S = 0.5
"""Progress makes the next beat come early, but not sooner after the last than this."""
GOODBYE_S = 1.0
LEAVING_MS = 100
"""A worker that says goodbye is listed for this much longer: the least that a storage takes."""
ANNOUNCED_BEATS = 8
"""A worker is listed for so many beats after it was last heard of."""


_Beaten = tuple[Run, bytes | None]
"""A run, and the progress that goes with its lease."""


class Heartbeat:
    """Keeps leases alive. `held`, `facts` and `full` are asked on this thread, the others told on the worker's."""

    def __init__(
        self,
        clone: Callable[[], Storage],
        *,
        worker: str,
        lease_ms: int,
        kill_allowance_s: float,
        held: Callable[[], list[Run]],
        facts: Callable[[], WorkerFacts],
        full: Callable[[], list[str]],
        lost: Callable[[Run], None],
        cancel: Callable[[Run], None],
        kill: Callable[[Run, float], None],
        evict: Callable[[], None],
        report_error: Callable[[BaseException], None],
        died: Callable[[BaseException], None],
        beaten: Callable[[], None],
    ) -> None:
        self._twin = clone
        self._worker = worker
        self._lease_ms = lease_ms
        self._every_s = lease_ms / 4000
        self._kill_allowance_s = kill_allowance_s
        """How much longer than its grace a run may take to be gone."""
        self._held = held
        self._facts = facts
        self._full = full
        self._lost, self._cancel, self._kill = lost, cancel, kill
        self._evict = evict
        self._report_error = report_error
        self._died = died
        self._beaten = beaten
        self._beaten_at = float("-inf")
        self._failing = False
        self._home = asyncio.get_running_loop()
        self._stopping = False
        self._nudged = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_heard(self) -> bool:
        """Has a beat got through, within a lease? Else nobody should rely on what we claim. From any thread."""
        return time.monotonic() < self._beaten_at + self._lease_ms / 1000

    def nudge(self) -> None:
        """There is progress to tell: beat soon. From any thread."""
        self._call(self._nudged.set)

    async def stop(self) -> None:
        """End at once, whatever the beat is at; a last word is said if that takes no time."""
        self._stopping = True
        self._call(self._cancel_work)
        await asyncio.to_thread(self._thread.join)

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:
                pass  # It has just ended.

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except BaseException as error:  # Without a heartbeat the worker must not go on.
            self._tell(self._died, error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._beat_for_ever())
        if self._stopping:
            self._work.cancel()
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.result()  # It has failed: it never ends by itself.

    def _cancel_work(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _beat_for_ever(self) -> None:
        """When a beat does not get through, begin anew at once, with a new connection: the living must be heard of
        before half a lease has passed since the storage came back."""
        while not self._stopping:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._every_s):
                        storage = await stack.enter_async_context(self._twin())
                    await self._beat_until_broken(storage)
            except TimeoutError:
                self._broke(StorageUnavailable(f"no answer to a heartbeat within {self._every_s:g} s"))
            except Exception as error:
                self._broke(error)
            await asyncio.sleep(self._every_s / 10)

    def _broke(self, error: BaseException) -> None:
        """A beat, or part of it, did not get through. That is told once, until one does."""
        if not self._failing:
            self._failing = True
            self._tell(self._report_error, error)
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
                if news:  # Whoever is told looks at once.
                    self._tell(self._beaten)
                await asyncio.sleep(min(SOONEST_S, self._every_s))
                await self._until_nudged(began + self._every_s - loop.time())
        except asyncio.CancelledError:
            await self._say_goodbye(storage)
            raise

    async def _until_nudged(self, seconds: float) -> None:
        """Until it is time, or there is something to tell."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._nudged.wait()
        except TimeoutError:
            pass  # The usual rhythm.
        self._nudged.clear()

    async def _say_goodbye(self, storage: Storage) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await storage.announce(self._worker, self._facts(), ttl_ms=LEAVING_MS)
        except (StorageUnavailable, TimeoutError):
            pass  # It is forgotten a little later.

    async def _beat(self, storage: Storage) -> None:
        """Everything side by side: what holds one queue up must not cost the leases of another."""
        by_queue: dict[str, list[_Beaten]] = defaultdict(list)
        for run in self._held():
            if self._extends(run):
                by_queue[run.queue].append((run, run.progress))
        steps = [self._extend(storage, queue, runs) for queue, runs in by_queue.items()]
        ended = await asyncio.gather(*steps, self._announce(storage), self._sweep(storage), return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        if len(errors) == len(ended):
            raise errors[0]  # Nothing got through: the connection is of no use.
        for error in errors:
            self._broke(error)

    async def _extend(self, storage: Storage, queue: str, runs: list[_Beaten]) -> None:
        for beaten in batches(runs, lambda beaten: len(beaten[1] or b"")):
            sent_at = asyncio.get_running_loop().time()
            try:
                told = await self._send(storage, queue, [_lease(run, progress) for run, progress in beaten])
            except (PayloadRejected, OptionError) as error:  # A heartbeat never depends on what a handler says.
                self._tell(self._report_error, error)
                told = await self._send(storage, queue, [_lease(run, None) for run, _ in beaten])
            for run, progress in beaten:
                run.extended_at = sent_at
                if run.progress is progress:
                    run.progress = None  # Said; a newer one may have come meanwhile.
            by_lease = {run.key[1:]: run for run, _ in beaten}
            for lease in told.lost:
                self._tell(self._lost, by_lease[lease.id, lease.fence])
            for lease in told.cancel_asked:
                self._tell(self._cancel, by_lease[lease.id, lease.fence])

    async def _send(self, storage: Storage, queue: str, leases: list[LeaseRef]) -> Extended:
        return await storage.extend(queue, leases, worker=self._worker, lease_ms=self._lease_ms)

    async def _announce(self, storage: Storage) -> None:
        ttl_ms = round(1000 * self._every_s * ANNOUNCED_BEATS)
        orders = await storage.announce(self._worker, self._facts(), ttl_ms=ttl_ms)
        if orders.evict:
            self._tell(self._evict)

    async def _sweep(self, storage: Storage) -> None:
        for queue in await storage.ready(self._full()[:MAX_ITEMS]):
            await storage.sweep(queue)

    def _extends(self, run: Run) -> bool:
        """A run that is long past its timeout is let go, even if the loop is blocked and cannot say so itself; one
        that must not be overlapped is held for as long as it lasts."""
        policy = run.config.policy
        limit_ms = timeout_ms(run.job, policy)
        if limit_ms is None or policy.exclusive or run.done or run.started_at is None:
            return True
        longest_s = (limit_ms + policy.cancel_grace_ms + self._lease_ms) / 1000 + self._kill_allowance_s
        return asyncio.get_running_loop().time() < run.started_at + longest_s

    def _kill_the_unsure(self) -> None:
        """The storage does not answer. Runs that must end before their lease can have passed on end now, if another
        failed beat would be too late."""
        now = asyncio.get_running_loop().time()
        for run in self._held():
            ends_at = run.extended_at + self._lease_ms / 1000
            next_chance_at = now + self._every_s + min(SOONEST_S, self._every_s)
            if run.config.policy.dies_with_storage and next_chance_at >= ends_at:
                self._tell(self._kill, run, max(now, ends_at - self._lease_ms / 20_000))

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._home.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # The worker's loop has closed. Nobody is left to be told.


def _lease(run: Run, progress: bytes | None) -> LeaseRef:
    return LeaseRef(run.job.id, fence_of(run.job), progress)
