"""The worker's heartbeat, on a thread and a connection of its own: a handler that blocks the event loop does not cost
the worker its leases.

Every quarter of a lease: extend what is held, say that the worker is there, sweep queues that it has no room to claim
from (claims sweep, too). What it learns is told to the worker's loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from holdfast.errors import StorageUnavailable
from holdfast.inline import Run
from holdfast.jobs import Facts, Lease
from holdfast.policy import fence_of, timeout_ms
from holdfast.storage import Storage
from holdfast.storage.checks import MAX_ITEMS, batches

SOONEST_S = 0.5
"""Progress makes the next beat come early, but not sooner after the last than this."""
LEAVING_MS = 100
"""A worker that says goodbye is listed for this much longer: the least that a storage takes."""
ANNOUNCED_BEATS = 8
"""A worker is listed for so many beats after it was last heard of."""


_Beaten = tuple[Run, bytes | None]
"""A run, and the progress that goes with its lease."""


class Beat:
    """Keeps leases alive. `held`, `facts` and `full` are asked on this thread, the others told on the worker's."""

    def __init__(
        self,
        twin: Callable[[], Storage],
        *,
        worker: str,
        lease_ms: int,
        held: Callable[[], list[Run]],
        facts: Callable[[], Facts],
        full: Callable[[], list[str]],
        lost: Callable[[Run], None],
        cancel: Callable[[Run], None],
        kill: Callable[[Run], None],
        evict: Callable[[], None],
        trouble: Callable[[BaseException], None],
    ) -> None:
        self._twin = twin
        self._worker = worker
        self._lease_ms = lease_ms
        self._every_s = lease_ms / 4000
        self._held = held
        self._facts = facts
        self._full = full
        self._lost, self._cancel, self._kill = lost, cancel, kill
        self._evict = evict
        self._trouble = trouble
        self._home = asyncio.get_running_loop()
        self._stopping = False
        self._stopped = asyncio.Event()
        self._nudged = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="holdfast-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def nudge(self) -> None:
        """There is progress to tell: beat soon. From any thread."""
        self._call(self._nudged.set)

    async def stop(self) -> None:
        self._stopping = True
        self._call(self._stopped.set)
        self._call(self._nudged.set)
        await asyncio.to_thread(self._thread.join)

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function)
            except RuntimeError:
                pass  # It has just ended.

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
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
            else:
                continue
            await _until(self._stopped, self._every_s / 10)

    def _broke(self, error: Exception) -> None:
        """A beat did not get through. Begin anew at once, with a new connection: the living must be heard of before
        half a lease has passed since the storage came back."""
        self._tell(self._trouble, error)
        self._kill_the_unsure()

    async def _beat_until_broken(self, storage: Storage) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            began = loop.time()
            async with asyncio.timeout(self._every_s):
                await self._beat(storage)
            await _until(self._stopped, min(SOONEST_S, self._every_s))
            await self._sleep(began + self._every_s - loop.time())
        try:
            async with asyncio.timeout(self._every_s):
                await storage.announce(self._worker, self._facts(), ttl_ms=LEAVING_MS)
        except (StorageUnavailable, TimeoutError):
            pass  # It is forgotten a little later.

    async def _beat(self, storage: Storage) -> None:
        by_queue: dict[str, list[_Beaten]] = defaultdict(list)
        for run in self._held():
            if self._extends(run):
                by_queue[run.handler.queue].append((run, run.progress))
        for queue, runs in by_queue.items():
            for batch in batches(runs, lambda beaten: len(beaten[1] or b"")):
                await self._extend(storage, queue, batch)
        ttl_ms = round(1000 * self._every_s * ANNOUNCED_BEATS)
        orders = await storage.announce(self._worker, self._facts(), ttl_ms=ttl_ms)
        if orders.evict:
            self._tell(self._evict)
        for queue in await storage.ready(self._full()[:MAX_ITEMS]):
            await storage.sweep(queue)

    async def _extend(self, storage: Storage, queue: str, beaten: Sequence[_Beaten]) -> None:
        sent_at = asyncio.get_running_loop().time()
        by_lease = {run.key[1:]: run for run, _ in beaten}
        leases = [Lease(run.job.id, fence_of(run.job), progress) for run, progress in beaten]
        told = await storage.extend(queue, leases, worker=self._worker, lease_ms=self._lease_ms)
        for run, progress in beaten:
            run.extended_at = sent_at
            if run.progress is progress:
                run.progress = None  # Said; a newer one may have come meanwhile.
        for lease in told.lost:
            self._tell(self._lost, by_lease[lease.id, lease.fence])
        for lease in told.cancel_asked:
            self._tell(self._cancel, by_lease[lease.id, lease.fence])

    def _extends(self, run: Run) -> bool:
        """A run that is long past its timeout is let go, even if the loop is blocked and cannot say so itself; one
        that must not be overlapped is held for as long as it lasts."""
        policy = run.handler.policy
        limit_ms = timeout_ms(run.job, policy)
        if limit_ms is None or policy.exclusive or run.done:
            return True
        longest_s = (limit_ms + policy.cancel_grace_ms + self._lease_ms) / 1000
        return asyncio.get_running_loop().time() < run.started_at + longest_s

    def _kill_the_unsure(self) -> None:
        """The storage does not answer. Runs that must end before their lease can have passed on end now, if another
        failed beat would be too late."""
        now = asyncio.get_running_loop().time()
        for run in self._held():
            ends_at = run.extended_at + self._lease_ms / 1000
            next_chance_at = now + self._every_s + min(SOONEST_S, self._every_s)
            if run.handler.policy.dies_with_storage and next_chance_at >= ends_at:
                self._tell(self._kill, run)

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._home.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # The worker's loop has closed. Nobody is left to be told.

    async def _sleep(self, seconds: float) -> None:
        """Until it is time, or there is something to tell."""
        await _until(self._nudged, seconds)
        self._nudged.clear()


async def _until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass  # The usual rhythm.
