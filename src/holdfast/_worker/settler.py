"""The settler of a worker: decides how a run is settled, and repeats the call until the storage has answered."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast._core.failure import error_from_exception
from holdfast._core.jobs import Complete, Fail, Job, Release, RetrySettlement, Settlement
from holdfast._core.replies import SettleResult
from holdfast._core.retry_policy import Ended, Policy, Raised, shrink_settlement, verdict
from holdfast._worker.executor import Run, wait_at_most, wait_until
from holdfast._worker.telemetry import event_of, jobs_log, log_event
from holdfast.errors import OptionError, PayloadRejected, StorageFull, StorageUnavailable
from holdfast.storage.base import QueueDamaged
from holdfast.storage.validation import batches, work_size

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

log = logging.getLogger("holdfast.worker")

TRY_AGAIN_S = (0.1, 5.0)
"""The first and the longest pause after the storage could not be reached."""
GIVE_UP_S = 5.0
"""How long a worker that stops tries to settle its last jobs. Jobs that are not settled by then run again."""


class PendingSettlement(msgspec.Struct, frozen=True):
    """A settlement that is not stored yet. `policy` is None for a release, `run` if the job was not started."""

    job: Job
    settlement: Settlement
    policy: Policy | None = None
    run: Run | None = None


class Settler:
    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._name = context.settings.name
        self._rng = random.Random()
        self._waiting: dict[str, list[PendingSettlement]] = {}
        self._settling: set[str] = set()
        """Queues with a call in flight: one at a time for each queue, and no queue waits for another."""
        self._tasks: asyncio.TaskGroup | None = None
        self._one_settled = asyncio.Event()
        self._ending = asyncio.Event()
        self._give_up_at: float | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._settling)

    async def until_settled(self, queues: Collection[str]) -> None:
        """Wait until all settlements of these queues are stored, or the settler has ended."""

        def is_settled() -> bool:
            return self._tasks is None or not any(queue in self._waiting or queue in self._settling for queue in queues)

        await wait_until(self._one_settled, is_settled)

    def settle(self, queue: str, pending: PendingSettlement) -> None:
        """Send a settlement to the storage, together with others of its queue."""
        self._waiting.setdefault(queue, []).append(pending)
        self._start(queue)

    def decide(self, run: Run, ended: Ended) -> None:
        """Decide how the job of a run is settled, and settle it."""
        run.held = False
        policy = run.config.policy
        try:
            settlement = verdict(run.job, ended, policy, self._rng)
        except Exception as error:
            settlement = verdict(run.job, Raised(error_from_exception(error, "permanent")), policy, self._rng)
        self.settle(run.queue, PendingSettlement(run.job, settlement, policy, run))

    def end(self) -> None:
        """No more settlements will come: `run` ends when all are stored."""
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
                    self._tasks = None  # The group takes no more tasks. Jobs that are not settled run again.
                    raise
        finally:
            self._tasks = None

    def _start(self, queue: str) -> None:
        if self._tasks is not None and queue not in self._settling:
            self._settling.add(queue)
            self._tasks.create_task(self._settle_queue(queue))

    async def _settle_queue(self, queue: str) -> None:
        while waiting := self._waiting.pop(queue, None):
            await self._settle(queue, waiting)
        self._settling.discard(queue)
        self._one_settled.set()
        self._context.claimer.settled(queue)

    async def _settle(self, queue: str, waiting: list[PendingSettlement]) -> None:
        for batch in batches(waiting, _size):
            try:
                replies = await self._send(queue, [pending.settlement for pending in batch])
            except (PayloadRejected, OptionError, QueueDamaged):
                for pending in batch:
                    await self._settle_one(queue, pending)
            else:
                self._settled(queue, batch, replies)

    async def _settle_one(self, queue: str, pending: PendingSettlement) -> None:
        """Settle one job of a batch that the storage has refused. A result that is too large fails its job, because it
        would be refused again; an error that is too large is shortened. A job whose fail handler has a damaged queue
        runs again after its lease."""
        attempts = [pending.settlement]
        while attempts:
            settlement = attempts.pop(0)
            try:
                replies = await self._send(queue, [settlement])
            except (PayloadRejected, OptionError, QueueDamaged) as error:
                what = f"the storage refused the settlement of job {pending.job.id!r:.80} in {queue}"
                self._context.hooks.report_error(error, what)
                shrinks = settlement is pending.settlement and not isinstance(error, QueueDamaged)
                if shrinks and pending.policy is not None:
                    attempts = shrink_settlement(pending.job, settlement, pending.policy, str(error))
            else:
                self._settled(queue, [msgspec.structs.replace(pending, settlement=settlement)], replies)
                return
        self._settled(queue, [pending], [None])

    def _settled(self, queue: str, batch: Sequence[PendingSettlement], replies: Sequence[SettleResult | None]) -> None:
        """Forget these runs, and publish their events. A reply is None if it is not known whether the settlement was
        stored; the lease expires then."""
        hooks = self._context.hooks
        now = asyncio.get_running_loop().time()
        every = bool(hooks.on_event) or jobs_log.isEnabledFor(logging.INFO)
        for pending, reply in zip(batch, replies, strict=True):
            run = pending.run
            if run is not None:
                self._context.held.pop(run.key, None)
            if reply is SettleResult.LOST:
                log.warning("lost the lease of job %r in %s before settling: result discarded", pending.job.id, queue)
            elif reply is SettleResult.OK and (every or not isinstance(pending.settlement, Complete | Release)):
                seconds = 0.0 if run is None or run.started_at is None else now - run.started_at
                event = event_of(queue, pending.job, pending.settlement, seconds)
                hooks.publish(event)
                log_event(event, self._name)

    async def _send(self, queue: str, batch: Sequence[Settlement]) -> Sequence[SettleResult | None]:
        """Settle, and try again while the storage cannot be reached; while the worker stops, for `GIVE_UP_S`. Replies
        are None if that is given up. Raises PayloadRejected, OptionError, or QueueDamaged for the queue of the fail
        handler, if the storage refuses a settlement."""
        pause = TRY_AGAIN_S[0]
        what = f"worker {self._name} could not settle jobs of {queue}"
        while True:
            try:
                async with asyncio.timeout_at(self._give_up_at):
                    return await self._context.storage.settle(queue, batch, worker=self._name)
            except (PayloadRejected, OptionError):
                raise
            except (StorageUnavailable, StorageFull) as error:
                if isinstance(error, QueueDamaged) and error.queue != queue:
                    raise
                self._context.hooks.report_error(error, what)
            except Exception as error:
                late = isinstance(error, TimeoutError)
                shown = StorageUnavailable("the storage could not be reached in time") if late else error
                self._context.hooks.report_error(shown, f"{what}: they run again")
                return [None] * len(batch)
            await wait_at_most(pause, self._ending)
            pause = min(2 * pause, TRY_AGAIN_S[1])
            if self._ending.is_set():
                await asyncio.sleep(TRY_AGAIN_S[0])


def _size(pending: PendingSettlement) -> int:
    match pending.settlement:
        case Complete(result=result):
            return len(result or b"")
        case Fail(error=error, follow_up=follow_up):
            return len(error) + (0 if follow_up is None else work_size(follow_up))
        case RetrySettlement(error=error):
            return len(error or b"")
        case Release():
            return 0
