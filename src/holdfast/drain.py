"""The drain: settlements go to the storage in batches, and again until it has answered. What ended must not run again.

Whoever has an outcome hands it over with `put`; `settled` is told what became of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.errors import OptionError, PayloadRejected, StorageUnavailable
from holdfast.execution import Surroundings
from holdfast.inline import Run
from holdfast.jobs import Complete, Fail, Job, Release, Retry, Settled, Settlement
from holdfast.policy import Policy, smaller
from holdfast.storage import Storage
from holdfast.storage.checks import batches

TRY_AGAIN_S = (0.1, 5.0)
"""After trouble with the storage: the first pause and the longest."""
GIVE_UP_S = 5.0
"""How long a drain that ends tries to settle what is left. What is left then runs again."""

log = logging.getLogger("holdfast.worker")


class Outcome(msgspec.Struct, frozen=True):
    """A job, how it is to be settled, and the run that gave it; None if it was not even started."""

    job: Job
    settlement: Settlement
    run: Run | None = None


class Drain:
    """Settles outcomes for one worker. `settled` gets a queue's outcomes with their replies; no replies means that
    nobody knows: the leases expire."""

    def __init__(
        self,
        storage: Storage,
        worker: str,
        policies: Mapping[str, Policy],
        around: Surroundings,
        settled: Callable[[str, Sequence[tuple[Outcome, Settled | None]]], None],
        idle: Callable[[], None],
    ) -> None:
        self._storage = storage
        self._worker = worker
        self._policies = policies
        self._around = around
        self._settled = settled
        self._idle = idle
        self._waiting: dict[str, list[Outcome]] = {}
        self._came = asyncio.Event()
        self._ending = False
        self.busy = False
        """Something waits, or is on its way."""

    def put(self, queue: str, outcome: Outcome) -> None:
        self._waiting.setdefault(queue, []).append(outcome)
        self.busy = True
        self._came.set()

    def end(self) -> None:
        """Nothing more will come: `run` ends when all is settled."""
        self._ending = True
        self._came.set()

    async def run(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                await asyncio.gather(*(self._settle(queue, outcomes) for queue, outcomes in waiting.items()))
            self.busy = False
            self._idle()
            if self._ending:
                return

    async def _settle(self, queue: str, outcomes: list[Outcome]) -> None:
        for batch in batches(outcomes, _size):
            try:
                replies = await self._send(queue, [outcome.settlement for outcome in batch])
            except (PayloadRejected, OptionError):
                for outcome in batch:
                    await self._settle_alone(queue, outcome)
            except Exception as error:
                self._settled(queue, [(outcome, None) for outcome in batch])
                await self._around.trouble(error, f"worker {self._worker} could not settle jobs of {queue}")
            else:
                self._settled(queue, list(zip(batch, replies, strict=True)))

    async def _settle_alone(self, queue: str, outcome: Outcome) -> None:
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
                await self._around.trouble(error, f"what became of job {outcome.job.id!r:.80} in {queue} was refused")
                if at == 0:
                    attempts += smaller(outcome.job, outcome.settlement, self._policies[queue], str(error))
            else:
                self._settled(queue, [(msgspec.structs.replace(outcome, settlement=attempts[at]), reply)])
                return

    async def _send(self, queue: str, batch: Sequence[Settlement]) -> list[Settled]:
        """Settle, and try again for as long as the storage cannot be reached."""
        pause = TRY_AGAIN_S[0]
        give_up_at: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._storage.settle(queue, batch, worker=self._worker)
            except StorageUnavailable as error:
                await self._around.trouble(
                    error, f"worker {self._worker} could not settle {len(batch)} jobs of {queue}"
                )
            if self._ending:
                give_up_at = give_up_at or loop.time() + GIVE_UP_S
                if loop.time() >= give_up_at:
                    raise StorageUnavailable(f"gave up on {len(batch)} jobs that have ended: they run again")
            await asyncio.sleep(pause)
            pause = min(2 * pause, TRY_AGAIN_S[1])


def _size(outcome: Outcome) -> int:
    """Bytes that a settlement carries."""
    match outcome.settlement:
        case Complete(result=result):
            return len(result or b"")
        case Fail(error=error, follow_up=follow_up):
            return len(error) + len((follow_up.payload if follow_up else None) or b"")
        case Retry(error=error):
            return len(error or b"")
        case Release():
            return 0
