"""The storage protocol over an `Engine`: check the arguments, run the verb as one step, hand out the events.

What differs between memory and SQLite is only how a step is made atomic: `_step`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self, TypeVar

from holdfast.errors import StorageUnavailable
from holdfast.events import Event, Topic
from holdfast.jobs import (
    Cancelled,
    Claim,
    Enqueued,
    Extended,
    Facts,
    Job,
    Kept,
    Lease,
    Orders,
    Page,
    Repaired,
    Request,
    Settled,
    Settlement,
    Snapshot,
    State,
    Swept,
)
from holdfast.storage import checks
from holdfast.storage.engine import Engine
from holdfast.storage.hub import Hub, Subscription

T = TypeVar("T")


class LocalStorage(ABC):
    """What memory and SQLite share. See `holdfast.storage.Storage` for what the verbs promise."""

    def __init__(self, max_payload: int = checks.MAX_PAYLOAD_BYTES) -> None:
        self._max_payload = checks.check_max_payload(max_payload)
        self._hub = Hub()
        self._pid: int | None = None

    @abstractmethod
    async def _step(self, verb: Callable[[Engine], T], *, writes: bool = True, items: int = 1) -> T:
        """Run a verb, on so many items, as one atomic step."""

    async def _look(self, verb: Callable[[Engine], T]) -> T:
        """Run a verb that only reads, and may read much."""
        return await self._step(verb, writes=False)

    async def __aenter__(self) -> Self:
        self._pid = os.getpid()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._pid = None

    def _check_open(self) -> None:
        if self._pid is None:
            raise StorageUnavailable(f"{self!r} is not open: use it inside 'async with'")
        if self._pid != os.getpid():
            raise StorageUnavailable(f"{self!r} was opened by another process: open one of your own after a fork")

    async def enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        checks.check_requests(queue, jobs, self._max_payload)
        return await self._step(lambda engine: engine.enqueue(queue, jobs), items=len(jobs)) if jobs else []

    async def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> Claim:
        checks.check_queue(queue)
        checks.check_limit(limit, checks.MAX_ITEMS)
        checks.check_lease(worker, lease_ms)
        return await self._step(
            lambda engine: engine.claim(queue, limit, worker=worker, lease_ms=lease_ms), items=limit
        )

    async def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[Settled]:
        checks.check_settlements(queue, batch, self._max_payload)
        checks.check_worker(worker)
        if not batch:
            return []
        return await self._step(lambda engine: engine.settle(queue, batch, worker=worker), items=len(batch))

    async def extend(self, queue: str, leases: Sequence[Lease], *, worker: str, lease_ms: int) -> Extended:
        checks.check_leases(queue, leases, self._max_payload)
        checks.check_lease(worker, lease_ms)
        if not leases:
            return Extended([], [])
        return await self._step(
            lambda engine: engine.extend(queue, leases, worker=worker, lease_ms=lease_ms), items=len(leases)
        )

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[Cancelled]:
        checks.check_ids(queue, ids)
        return await self._step(lambda engine: engine.cancel(queue, ids), items=len(ids)) if ids else []

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        checks.check_ids(queue, ids)
        return await self._step(lambda engine: engine.get(queue, ids), writes=False, items=len(ids)) if ids else []

    async def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool = False) -> list[Kept]:
        checks.check_ids(queue, ids)
        checks.check_length("ttl_ms", ttl_ms)
        if not ids:
            return []
        return await self._step(lambda engine: engine.keep(queue, ids, ttl_ms, at_least=at_least), items=len(ids))

    def subscribe(self, *topics: Topic) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        checks.check_topics(topics)
        self._check_open()
        return Subscription(self._hub, topics)

    async def scan(self, queue: str, *, state: State | None = None, after: str | None = None, limit: int = 100) -> Page:
        checks.check_queue(queue)
        checks.check_limit(limit, checks.MAX_PAGE)
        if state is not None:
            checks.check_states([state])
            state = State(state)
        return await self._look(lambda engine: engine.scan(queue, state=state, after=after, limit=limit))

    async def snapshot(self) -> Snapshot:
        return await self._look(lambda engine: engine.snapshot())

    async def pause(self, queue: str, paused: bool, *, reason: str = "") -> None:
        checks.check_queue(queue)
        checks.check_pause(paused, reason)
        await self._step(lambda engine: engine.pause(queue, paused, reason=reason))

    async def sweep(self, queue: str, limit: int = checks.MAX_SWEEP, *, worker: str | None = None) -> Swept:
        checks.check_queue(queue)
        checks.check_limit(limit, checks.MAX_SWEEP)
        if worker is not None:
            checks.check_worker(worker)
        return await self._step(lambda engine: engine.sweep(queue, limit, worker=worker), items=limit)

    async def purge(self, queue: str, states: Collection[State], limit: int = 100, *, drop: bool = False) -> int:
        checks.check_queue(queue)
        checks.check_limit(limit, checks.MAX_PAGE)
        checks.check_states(states)
        states = {State(state) for state in states}
        return await self._step(lambda engine: engine.purge(queue, states, limit, drop=drop), items=limit)

    async def announce(self, worker: str, facts: Facts, *, ttl_ms: int) -> Orders:
        checks.check_lease(worker, ttl_ms)
        checks.check_facts(facts)
        return await self._step(lambda engine: engine.announce(worker, facts, ttl_ms=ttl_ms))

    async def evict(self, worker: str) -> bool:
        checks.check_worker(worker)
        return await self._step(lambda engine: engine.evict(worker))

    async def repair(self, queue: str, *, dry_run: bool, cursor: str | None = None) -> Repaired:
        checks.check_queue(queue)
        if dry_run:
            return await self._look(lambda engine: engine.repair(queue, dry_run=True, cursor=cursor))
        return await self._step(
            lambda engine: engine.repair(queue, dry_run=False, cursor=cursor), items=checks.MAX_ITEMS
        )
