"""The storage protocol over an `Engine`: each verb as one step, in this process.

What differs between memory and SQLite is only how a step is made atomic: `_step`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from holdfast._core.jobs import (
    CancelResult,
    Claim,
    Enqueued,
    Extended,
    Job,
    KeepResult,
    LeaseRef,
    Page,
    Repaired,
    Request,
    Settlement,
    SettleResult,
    Snapshot,
    State,
    Swept,
    WorkerCommands,
    WorkerFacts,
)
from holdfast.storage.checked import CheckedStorage
from holdfast.storage.local.engine import Engine
from holdfast.storage.validation import MAX_ITEMS

T = TypeVar("T")


class LocalStorage(CheckedStorage):
    """What memory and SQLite share."""

    @abstractmethod
    async def _step(self, verb: Callable[[Engine], T], *, writes: bool = True, items: int = 1) -> T:
        """Run a verb, on so many items, as one atomic step."""

    async def _look(self, verb: Callable[[Engine], T]) -> T:
        """Run a verb that only reads, and may read much."""
        return await self._step(verb, writes=False)

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        return await self._step(lambda engine: engine.enqueue(queue, jobs), items=len(jobs))

    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> Claim:
        return await self._step(
            lambda engine: engine.claim(queue, limit, worker=worker, lease_ms=lease_ms), items=limit
        )

    async def _ready(self, queues: Sequence[str]) -> list[str]:
        return await self._step(lambda engine: engine.ready(queues), writes=False, items=len(queues))

    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[SettleResult]:
        return await self._step(lambda engine: engine.settle(queue, batch, worker=worker), items=len(batch))

    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> Extended:
        return await self._step(
            lambda engine: engine.extend(queue, leases, worker=worker, lease_ms=lease_ms), items=len(leases)
        )

    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        return await self._step(lambda engine: engine.cancel(queue, ids), items=len(ids))

    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await self._step(lambda engine: engine.get(queue, ids), writes=False, items=len(ids))

    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[KeepResult]:
        return await self._step(lambda engine: engine.keep(queue, ids, ttl_ms, at_least=at_least), items=len(ids))

    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> Page:
        return await self._look(lambda engine: engine.scan(queue, state=state, after=after, limit=limit))

    async def snapshot(self) -> Snapshot:
        return await self._look(lambda engine: engine.snapshot())

    async def _pause(self, queue: str, paused: bool, reason: str) -> None:
        await self._step(lambda engine: engine.pause(queue, paused, reason=reason))

    async def _sweep(self, queue: str, limit: int, worker: str | None) -> Swept:
        return await self._step(lambda engine: engine.sweep(queue, limit, worker=worker), items=limit)

    async def _purge(self, queue: str, states: Collection[State], limit: int, drop: bool) -> int:
        return await self._step(lambda engine: engine.purge(queue, states, limit, drop=drop), items=limit)

    async def _announce(self, worker: str, facts: WorkerFacts, ttl_ms: int) -> WorkerCommands:
        return await self._step(lambda engine: engine.announce(worker, facts, ttl_ms=ttl_ms))

    async def _evict(self, worker: str) -> bool:
        return await self._step(lambda engine: engine.evict(worker))

    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> Repaired:
        if dry_run:
            return await self._look(lambda engine: engine.repair(queue, dry_run=True, cursor=cursor))
        return await self._step(lambda engine: engine.repair(queue, dry_run=False, cursor=cursor), items=MAX_ITEMS)
