"""The verbs with the defaults that tests want: one queue, one item at a time, seconds instead of milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from holdfast._core.clock import ManualClock
from holdfast._core.events import Event, EventKind
from holdfast._core.jobs import (
    Complete,
    Fail,
    Job,
    LeaseRef,
    Release,
    Request,
    RetrySettlement,
    Settlement,
    Update,
    Work,
)
from holdfast._core.replies import (
    CancelResult,
    Enqueued,
    Extended,
    KeepResult,
    Problem,
    QueueStats,
    SettleResult,
    Swept,
)
from holdfast.storage import Storage, audit

HOUR_MS = 3_600_000


class StorageHarness(Protocol):
    """Opens the storage under test."""

    def open(self, clock: ManualClock, folder: Path) -> Storage:
        """A storage on this clock. It is empty, or has what an earlier one on the same folder left."""
        ...


class Stage:
    """A storage, its clock and a queue."""

    def __init__(self, storage: Storage, clock: ManualClock, queue: str = "q") -> None:
        self.storage = storage
        self.clock = clock
        self.queue = queue

    def wall(self, seconds: float = 0) -> int:
        """The storage's wall clock, this many seconds from now, in microseconds."""
        return self.clock.now_us() + round(seconds * 1_000_000)

    async def enqueue(
        self,
        id: str = "a",
        payload: bytes | None = b"payload",
        *,
        update: Update | None = None,
        delay: float | None = None,
        run_at: int | None = None,
        custom_id: bool = True,
        keep: float = 0,
        **work: Any,
    ) -> Enqueued:
        """`update=None` keeps what is there; `work` are the other fields of Work, such as priority."""
        delay_ms = None if delay is None else round(delay * 1000)
        request = Request(
            id,
            Work(payload, **work),
            run_at,
            delay_ms,
            update,
            custom_id,
            round(keep * 1000),
        )
        (reply,) = await self.storage.enqueue(self.queue, [request])
        return reply

    async def claim(self, limit: int = 1, *, worker: str = "w1", lease: float = 10) -> list[Job]:
        return (await self.storage.claim(self.queue, limit, worker=worker, lease_ms=round(lease * 1000))).jobs

    async def claim_one(self, *, worker: str = "w1", lease: float = 10) -> Job:
        """The job that is next, which must be there."""
        jobs = await self.claim(1, worker=worker, lease=lease)
        assert len(jobs) == 1, "nothing was due"
        return jobs[0]

    async def settle(self, settlement: Settlement, *, worker: str = "w1") -> SettleResult:
        (reply,) = await self.storage.settle(self.queue, [settlement], worker=worker)
        return reply

    async def complete(
        self,
        job: Job,
        result: bytes | None = b"result",
        *,
        ttl: float = 3600,
        dedup: float | None = None,
        worker: str = "w1",
    ) -> SettleResult:
        dedup_ms = round((ttl if dedup is None else dedup) * 1000)
        return await self.settle(
            Complete(job.id, fence(job), result, result_ttl_ms=round(ttl * 1000), dedup_ttl_ms=dedup_ms), worker=worker
        )

    async def complete_briefly(self, job: Job, *, ttl: float = 300) -> SettleResult:
        """Complete a job as a worker does that has no result and no option to keep the outcome."""
        return await self.settle(Complete(job.id, fence(job), result_ttl_ms=round(ttl * 1000), brief=True))

    async def fail(
        self,
        job: Job,
        error: bytes = b"error",
        *,
        ttl: float = 86400,
        follow_up: Work | None = None,
        remember: bool = False,
        worker: str = "w1",
    ) -> SettleResult:
        ttl_ms = round(ttl * 1000)
        failure = Fail(job.id, fence(job), error, ttl_ms, follow_up, dedup_ttl_ms=ttl_ms if remember else 0)
        return await self.settle(failure, worker=worker)

    async def retry(
        self, job: Job, *, delay: float = 0, run_at: int | None = None, counts: str = "retries", worker: str = "w1"
    ) -> SettleResult:
        retry = RetrySettlement(job.id, fence(job), b"error", round(delay * 1000), run_at, counts)  # type: ignore[arg-type]
        return await self.settle(retry, worker=worker)

    async def release(self, job: Job, *, worker: str = "w1") -> SettleResult:
        return await self.settle(Release(job.id, fence(job)), worker=worker)

    async def extend(
        self, job: Job, *, lease: float = 10, worker: str = "w1", progress: bytes | None = None
    ) -> Extended:
        leases = [LeaseRef(job.id, fence(job), progress)]
        return await self.storage.extend(self.queue, leases, worker=worker, lease_ms=round(lease * 1000))

    async def cancel(self, id: str = "a") -> CancelResult:
        (reply,) = await self.storage.cancel(self.queue, [id])
        return reply

    async def keep(self, id: str, ttl: float, *, at_least: bool = False) -> KeepResult:
        (reply,) = await self.storage.keep(self.queue, [id], round(ttl * 1000), at_least=at_least)
        return reply

    async def prioritize(self, id: str, priority: int) -> bool:
        (reply,) = await self.storage.prioritize(self.queue, [id], priority)
        return reply

    async def get(self, id: str = "a") -> Job | None:
        (job,) = await self.storage.get(self.queue, [id])
        return job

    async def the(self, id: str = "a") -> Job:
        """A job that must be there."""
        job = await self.get(id)
        assert job is not None, f"there is no job {id!r}"
        return job

    async def sweep(self, limit: int = 100, *, worker: str | None = None) -> Swept:
        return await self.storage.sweep(self.queue, limit, worker=worker)

    async def expire(self, lease: float = 10) -> Swept:
        """Let all leases of this length expire and be taken back: past the deadline, and half a lease more."""
        self.clock.advance(lease)
        await self.sweep()
        self.clock.advance(lease / 2)
        return await self.sweep()

    async def stats(self) -> QueueStats:
        snapshot = await self.storage.snapshot()
        (found,) = [stats for stats in snapshot.queues if stats.queue == self.queue]
        return found

    async def problems(self) -> list[Problem]:
        """Of all queues, not only this one."""
        snapshot = await self.storage.snapshot()
        return [p for stats in snapshot.queues for p in (await audit(self.storage, stats.queue)).problems]


def fence(job: Job) -> int:
    assert job.run is not None
    return job.run.fence


async def heard(events: AsyncIterator[Event], number: int) -> list[tuple[EventKind, str]]:
    """The next events, as kind and id."""
    async with asyncio.timeout(10):
        return [(event.kind, event.id) for event in [await anext(events) for _ in range(number)]]
