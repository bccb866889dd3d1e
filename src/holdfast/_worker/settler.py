"""The drain: settlements go to the storage in batches, and again until it has answered. What ended must not run again.

Whoever has an outcome hands it over with `put`; `settled` is told what became of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from holdfast._core.jobs import Complete, Fail, Job, Release, RetrySettlement, Settlement
from holdfast._core.replies import SettleResult
from holdfast._core.retry_policy import Policy, smaller
from holdfast._worker.executor import Run
from holdfast.errors import OptionError, PayloadRejected, StorageFull, StorageUnavailable
from holdfast.storage import Storage
from holdfast.storage.validation import batches

TRY_AGAIN_S = (0.1, 5.0)
"""After trouble with the storage: the first pause and the longest."""
GIVE_UP_S = 5.0
"""How long a drain that ends tries to settle what is left. What is left then runs again."""

log = logging.getLogger("holdfast.worker")


class PendingSettlement(msgspec.Struct, frozen=True):
    """A job, how it is to be settled, and the run that gave it; None if it was not even started."""

    job: Job
    settlement: Settlement
    run: Run | None = None


class Settler:
    """Settles outcomes for one worker. `settled` gets a queue's outcomes with their replies; no replies means that
    nobody knows: the leases expire."""

    def __init__(
        self,
        storage: Storage,
        worker: str,
        policies: Mapping[str, Policy],
        report_error: Callable[[Exception, str], None],
        settled: Callable[[str, Sequence[tuple[PendingSettlement, SettleResult | None]]], None],
        idle: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._policies = policies
        self._report_error = report_error
        self._settled = settled
        self._idle = idle
        self._waiting: dict[str, list[PendingSettlement]] = {}
        self._settling: set[str] = set()
        """Queues that are being seen to: one call at a time each, and none waits for another."""
        self._tasks: asyncio.TaskGroup | None = None
        self._one_settled = asyncio.Event()
        self._ending = asyncio.Event()
        self._give_up_at: float | None = None

    @property
    def busy(self) -> bool:
        """Something waits, or is on its way."""
        return bool(self._waiting or self._settling)

    async def settled(self, queues: Collection[str]) -> None:
        """Until nothing of these queues waits, or is on its way; or the drain has ended."""
        while self._tasks is not None and any(queue in self._waiting or queue in self._settling for queue in queues):
            self._one_settled.clear()
            await self._one_settled.wait()

    def put(self, queue: str, outcome: PendingSettlement) -> None:
        self._waiting.setdefault(queue, []).append(outcome)
        self._start(queue)

    def end(self) -> None:
        """Nothing more will come: `run` ends when all is settled."""
        self._give_up_at = asyncio.get_running_loop().time() + GIVE_UP_S
        self._ending.set()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for queue in list(self._waiting):
                    self._start(queue)
                try:
                    await self._ending.wait()
                except asyncio.CancelledError:
                    self._tasks = None  # The group takes no more. What is not settled runs again.
                    raise
        finally:
            self._tasks = None

    def _start(self, queue: str) -> None:
        if self._tasks is not None and queue not in self._settling:
            self._settling.add(queue)
            self._tasks.create_task(self._settle_queue(queue))

    async def _settle_queue(self, queue: str) -> None:
        while outcomes := self._waiting.pop(queue, None):
            await self._settle(queue, outcomes)
        self._settling.discard(queue)
        self._one_settled.set()
        self._idle()

    async def _settle(self, queue: str, outcomes: list[PendingSettlement]) -> None:
        for batch in batches(outcomes, _size):
            try:
                replies = await self._send(queue, [outcome.settlement for outcome in batch])
            except (PayloadRejected, OptionError):
                for outcome in batch:
                    await self._settle_alone(queue, outcome)
            except Exception as error:
                self._let_go(queue, batch, error)
            else:
                self._settled(queue, list(zip(batch, replies, strict=True)))

    async def _settle_alone(self, queue: str, outcome: PendingSettlement) -> None:
        """Something in a batch was refused: a result that is too large, most likely. That job fails, it would not do
        better a second time; an error that is too large is cut."""
        attempts = [outcome.settlement]
        for at in itertools.count():
            if at == len(attempts):
                self._settled(queue, [(outcome, None)])
                return
            try:
                (reply,) = await self._send(queue, [attempts[at]])
            except (PayloadRejected, OptionError) as error:
                self._report_error(error, f"what became of job {outcome.job.id!r:.80} in {queue} was refused")
                if at == 0:
                    attempts += smaller(outcome.job, outcome.settlement, self._policies[queue], str(error))
            except Exception as error:
                self._let_go(queue, [outcome], error)
                return
            else:
                self._settled(queue, [(msgspec.structs.replace(outcome, settlement=attempts[at]), reply)])
                return

    def _let_go(self, queue: str, outcomes: Sequence[PendingSettlement], error: Exception) -> None:
        self._settled(queue, [(outcome, None) for outcome in outcomes])
        self._report_error(error, f"worker {self._worker} could not settle jobs of {queue}: they run again")

    async def _send(self, queue: str, batch: Sequence[Settlement]) -> list[SettleResult]:
        """Settle, and try again for as long as the storage cannot be reached; not for ever once the end has come."""
        pause = TRY_AGAIN_S[0]
        while True:
            try:
                async with asyncio.timeout_at(self._give_up_at):
                    return await self._storage.settle(queue, batch, worker=self._worker)
            except TimeoutError:
                raise StorageUnavailable("it could not be reached in time") from None
            except (StorageUnavailable, StorageFull) as error:
                self._report_error(error, f"worker {self._worker} could not settle jobs of {queue}")
            try:
                async with asyncio.timeout(pause):
                    await self._ending.wait()
                await asyncio.sleep(TRY_AGAIN_S[0])
            except TimeoutError:
                pause = min(2 * pause, TRY_AGAIN_S[1])


def _size(outcome: PendingSettlement) -> int:
    """Bytes that a settlement carries."""
    match outcome.settlement:
        case Complete(result=result):
            return len(result or b"")
        case Fail(error=error, follow_up=follow_up):
            return len(error) + len((follow_up.payload if follow_up else None) or b"")
        case RetrySettlement(error=error):
            return len(error or b"")
        case Release():
            return 0
