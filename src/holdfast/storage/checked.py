"""The verbs as callers know them: arguments are checked here, before a storage sees them. One place, so that all
storages refuse alike; what a storage does with a good call is in its `_enqueue`, `_claim`, …
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
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
from holdfast.errors import StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.subscriptions import EventBus, Subscription


class CheckedStorage(ABC):
    """See `holdfast.storage.Storage` for what the verbs promise."""

    def __init__(self, max_payload: int = validation.MAX_PAYLOAD_BYTES) -> None:
        self._max_payload = validation.check_max_payload(max_payload)
        self._hub = EventBus()
        self._pid: int | None = None

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
        validation.check_requests(queue, jobs, self._max_payload)
        return await self._enqueue(queue, jobs) if jobs else []

    def enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        validation.check_requests(queue, jobs, self._max_payload)
        return self._enqueue_in(transaction, queue, jobs) if jobs else []

    async def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> Claim:
        validation.check_queue(queue)
        validation.check_limit(limit, validation.MAX_ITEMS)
        validation.check_lease(worker, lease_ms)
        return await self._claim(queue, limit, worker, lease_ms)

    async def ready(self, queues: Sequence[str]) -> list[str]:
        validation.check_queues(queues)
        return await self._ready(queues) if queues else []

    async def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[SettleResult]:
        validation.check_settlements(queue, batch, self._max_payload)
        validation.check_worker(worker)
        return await self._settle(queue, batch, worker) if batch else []

    async def extend(self, queue: str, leases: Sequence[LeaseRef], *, worker: str, lease_ms: int) -> Extended:
        validation.check_leases(queue, leases, self._max_payload)
        validation.check_lease(worker, lease_ms)
        return await self._extend(queue, leases, worker, lease_ms) if leases else Extended([], [])

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        validation.check_ids(queue, ids)
        return await self._cancel(queue, ids) if ids else []

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        validation.check_ids(queue, ids)
        return await self._get(queue, ids) if ids else []

    async def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool = False) -> list[KeepResult]:
        validation.check_ids(queue, ids)
        validation.check_length("ttl_ms", ttl_ms)
        return await self._keep(queue, ids, ttl_ms, at_least) if ids else []

    def subscribe(self, *topics: Topic) -> AbstractAsyncContextManager[Events]:
        validation.check_topics(topics)
        self._check_open()
        return self._subscribe(topics)

    async def scan(self, queue: str, *, state: State | None = None, after: str | None = None, limit: int = 100) -> Page:
        validation.check_queue(queue)
        validation.check_limit(limit, validation.MAX_PAGE)
        if state is not None:
            validation.check_states([state])
            state = State(state)
        return await self._scan(queue, state, after, limit)

    async def pause(self, queue: str, paused: bool, *, reason: str = "") -> None:
        validation.check_queue(queue)
        validation.check_pause(paused, reason)
        await self._pause(queue, paused, reason)

    async def sweep(self, queue: str, limit: int = validation.MAX_SWEEP, *, worker: str | None = None) -> Swept:
        validation.check_queue(queue)
        validation.check_limit(limit, validation.MAX_SWEEP)
        if worker is not None:
            validation.check_worker(worker)
        return await self._sweep(queue, limit, worker)

    async def purge(self, queue: str, states: Collection[State], limit: int = 100, *, drop: bool = False) -> int:
        validation.check_queue(queue)
        validation.check_limit(limit, validation.MAX_PAGE)
        validation.check_states(states)
        return await self._purge(queue, {State(state) for state in states}, limit, drop)

    async def announce(self, worker: str, facts: WorkerFacts, *, ttl_ms: int) -> WorkerCommands:
        validation.check_lease(worker, ttl_ms)
        validation.check_facts(facts)
        return await self._announce(worker, facts, ttl_ms)

    async def evict(self, worker: str) -> bool:
        validation.check_worker(worker)
        return await self._evict(worker)

    async def repair(self, queue: str, *, dry_run: bool, cursor: str | None = None) -> Repaired:
        validation.check_queue(queue)
        return await self._repair(queue, dry_run, cursor)

    def _subscribe(self, topics: Sequence[Topic]) -> AbstractAsyncContextManager[Events]:
        return Subscription(self._hub, topics)

    @abstractmethod
    def clone(self) -> CheckedStorage: ...
    @abstractmethod
    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]: ...
    @abstractmethod
    def _enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]: ...
    @abstractmethod
    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> Claim: ...
    @abstractmethod
    async def _ready(self, queues: Sequence[str]) -> list[str]: ...
    @abstractmethod
    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[SettleResult]: ...
    @abstractmethod
    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> Extended: ...
    @abstractmethod
    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]: ...
    @abstractmethod
    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]: ...
    @abstractmethod
    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[KeepResult]: ...
    @abstractmethod
    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> Page: ...
    @abstractmethod
    async def about(self) -> StorageInfo: ...
    @abstractmethod
    async def snapshot(self) -> Snapshot: ...
    @abstractmethod
    async def _pause(self, queue: str, paused: bool, reason: str) -> None: ...
    @abstractmethod
    async def _sweep(self, queue: str, limit: int, worker: str | None) -> Swept: ...
    @abstractmethod
    async def _purge(self, queue: str, states: Collection[State], limit: int, drop: bool) -> int: ...
    @abstractmethod
    async def _announce(self, worker: str, facts: WorkerFacts, ttl_ms: int) -> WorkerCommands: ...
    @abstractmethod
    async def _evict(self, worker: str) -> bool: ...
    @abstractmethod
    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> Repaired: ...
