"""A storage that is opened when it is first used: most handlers never enqueue, and need no connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Self

from holdfast._core.events import Events, Topic
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
    StorageInfo,
    Swept,
    WorkerCommands,
    WorkerFacts,
)
from holdfast.storage import Storage


class DeferredStorage:
    """Passes every verb on to a storage, which it opens first."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._opened = False
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return repr(self._storage)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        async with self._lock:
            if self._opened:
                self._opened = False
                await self._storage.__aexit__(*exc)

    async def _open(self) -> Storage:
        if not self._opened:
            async with self._lock:
                if not self._opened:
                    await self._storage.__aenter__()
                    self._opened = True
        return self._storage

    def clone(self) -> Storage:
        return self._storage.clone()

    async def enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        return await (await self._open()).enqueue(queue, jobs)

    def enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        return self._storage.enqueue_in(transaction, queue, jobs)

    async def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> Claim:
        return await (await self._open()).claim(queue, limit, worker=worker, lease_ms=lease_ms)

    async def ready(self, queues: Sequence[str]) -> list[str]:
        return await (await self._open()).ready(queues)

    async def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[SettleResult]:
        return await (await self._open()).settle(queue, batch, worker=worker)

    async def extend(self, queue: str, leases: Sequence[LeaseRef], *, worker: str, lease_ms: int) -> Extended:
        return await (await self._open()).extend(queue, leases, worker=worker, lease_ms=lease_ms)

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        return await (await self._open()).cancel(queue, ids)

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await (await self._open()).get(queue, ids)

    async def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool = False) -> list[KeepResult]:
        return await (await self._open()).keep(queue, ids, ttl_ms, at_least=at_least)

    @asynccontextmanager
    async def subscribe(self, *topics: Topic) -> AsyncGenerator[Events]:
        async with (await self._open()).subscribe(*topics) as events:
            yield events

    async def scan(self, queue: str, *, state: State | None = None, after: str | None = None, limit: int = 100) -> Page:
        return await (await self._open()).scan(queue, state=state, after=after, limit=limit)

    async def snapshot(self) -> Snapshot:
        return await (await self._open()).snapshot()

    async def pause(self, queue: str, paused: bool, *, reason: str = "") -> None:
        await (await self._open()).pause(queue, paused, reason=reason)

    async def sweep(self, queue: str, limit: int = 100, *, worker: str | None = None) -> Swept:
        return await (await self._open()).sweep(queue, limit, worker=worker)

    async def purge(self, queue: str, states: Collection[State], limit: int = 100, *, drop: bool = False) -> int:
        return await (await self._open()).purge(queue, states, limit, drop=drop)

    async def announce(self, worker: str, facts: WorkerFacts, *, ttl_ms: int) -> WorkerCommands:
        return await (await self._open()).announce(worker, facts, ttl_ms=ttl_ms)

    async def evict(self, worker: str) -> bool:
        return await (await self._open()).evict(worker)

    async def about(self) -> StorageInfo:
        return await (await self._open()).about()

    async def repair(self, queue: str, *, dry_run: bool, cursor: str | None = None) -> Repaired:
        return await (await self._open()).repair(queue, dry_run=dry_run, cursor=cursor)
