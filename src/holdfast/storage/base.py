"""The class `Storage`: the verbs that every storage offers.

A public verb is documented here, checks its arguments and opens a lazy storage. Then it calls the method of the same
name with an underscore, which a storage implements. A storage stores what a worker decided, and knows no retry policy.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from holdfast._core import replies
from holdfast._core.events import Topic
from holdfast._core.jobs import MAX_MS, PRIORITIES, Job, LeaseRef, Request, Settlement, State
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.subscriptions import EventBus, Subscription


class QueueDamaged(StorageUnavailable):
    """The metadata of a queue cannot be read. `repair` makes it from the records; other verbs refuse the queue."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"the metadata of queue {queue!r} cannot be read: run `holdfast repair {queue}`")
        self.queue = queue


class Storage(ABC):
    """A store of jobs. Every verb is one atomic step on the clock of the storage. A batch is applied in order, and each
    item gets its own reply. One call takes at most 250 items and 1 MiB. Open the storage with `async with`."""

    def __init__(self, max_payload: int = validation.MAX_PAYLOAD_BYTES, *, lazy: bool = False) -> None:
        self.lazy = lazy
        """Whether the first verb opens the storage instead of `async with`: most child processes need no connection."""
        self._max_payload = validation.check_number("max_payload", max_payload, 1, validation.MOST_PAYLOAD_BYTES)
        self._bus = EventBus()
        self._pid: int | None = None
        """Id of the process that opened the storage; None while it is closed."""
        self._opening: asyncio.Lock | None = None
        """Lock for opening the storage on the first verb; None outside of the `async with` of a lazy storage."""

    @property
    def place(self) -> str:
        """The file or server of the storage, without secrets: the part of its repr after the name of the class."""
        return repr(self).strip("<>").partition(" ")[2]

    async def __aenter__(self) -> Self:
        if self.lazy:
            self.open_lazily()
        else:
            await self._open()
        return self

    def open_lazily(self) -> None:
        """Let the first verb open the storage. A storage of a test that is opened like this is never closed."""
        self._opening = asyncio.Lock()

    async def __aexit__(self, *exc: object) -> None:
        if self._pid not in (None, os.getpid()):
            return  # In a fork. The parent closes it.
        opening, self._opening = self._opening, None
        if opening is None:
            await self._close()
            return
        async with opening:
            if self._pid is not None:
                await self._close()

    async def _ensure_open(self) -> None:
        """Open a lazy storage if this is its first verb. Raise StorageUnavailable if the storage is not open. The verbs
        of every job test the first condition themselves, which saves a coroutine."""
        if self._pid == os.getpid():
            return
        opening = self._opening
        if opening is not None and self._pid is None:
            async with opening:
                if self._opening is opening and self._pid is None:
                    await self._open()
        if self._pid is None:
            raise StorageUnavailable(f"{self!r} is not open: use it inside 'async with'")
        if self._pid != os.getpid():
            raise StorageUnavailable(f"{self!r} was opened by another process: open a new one after a fork")

    # Changing

    async def enqueue(self, queue: str, jobs: Sequence[Request]) -> list[replies.Enqueued]:
        """Request jobs to run. A full server refuses this verb and no other. A full disk refuses
        SQLite every verb that writes."""
        validation.check_requests(queue, jobs, self._max_payload)
        if not jobs:
            return []
        if self._pid != os.getpid():
            await self._ensure_open()
        return await self._enqueue(queue, jobs)

    def enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[replies.Enqueued | None]:
        """Request jobs inside a transaction of the caller: they exist only if it commits. Works on a closed storage.

        SQLite: a `sqlite3.Connection` to the same file, on the caller's thread. The replies hold if it commits. That
        commit wakes no worker: waiting workers find the job at their next poll, within a second.
        Redis, Valkey: a redis-py pipeline, which gets one more command; nothing is sent. The reply of its `execute` has
        a list of [placed, generation] for that command, one for each job; each reply here is None. The pipeline must
        be of the same server, which cannot be checked. A server that refuses the command (it is full, it is a replica)
        refuses the whole pipeline. But a queue of a newer release is noticed too late: the other commands are applied
        without the job, because MULTI does not roll back.
        Memory: has no transactions, the call is refused.
        """
        validation.check_requests(queue, jobs, self._max_payload)
        return self._enqueue_in(transaction, queue, jobs) if jobs else []

    async def claim(self, queue: str, limit: int, *, worker: str, lease_ms: int) -> replies.Claim:
        """Lease up to `limit` jobs that are due: by priority, then run_at, then arrival. Sweeps a few records first."""
        validation.check_queue(queue)
        validation.check_number("limit", limit, 1, validation.MAX_ITEMS)
        validation.check_lease(worker, lease_ms)
        if self._pid != os.getpid():
            await self._ensure_open()
        return await self._claim(queue, limit, worker, lease_ms)

    async def settle(self, queue: str, batch: Sequence[Settlement], *, worker: str) -> list[replies.SettleResult]:
        """End leases. Only the current fence of this worker settles; any other is LOST and changes nothing."""
        validation.check_settlements(queue, batch, self._max_payload)
        validation.check_worker(worker)
        if not batch:
            return []
        if self._pid != os.getpid():
            await self._ensure_open()
        return await self._settle(queue, batch, worker)

    async def extend(self, queue: str, leases: Sequence[LeaseRef], *, worker: str, lease_ms: int) -> replies.Extended:
        """Extend leases, because their holder is alive: each lasts `lease_ms` from now."""
        validation.check_leases(queue, leases, self._max_payload)
        validation.check_lease(worker, lease_ms)
        if not leases:
            return replies.Extended([], [])
        await self._ensure_open()
        return await self._extend(queue, leases, worker, lease_ms)

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]:
        """Stop jobs: a waiting job at once, a running one by asking its worker."""
        validation.check_ids(queue, ids)
        if not ids:
            return []
        await self._ensure_open()
        return await self._cancel(queue, ids)

    async def keep(
        self, queue: str, ids: Sequence[str], ttl_ms: int, *, at_least: bool = False
    ) -> list[replies.KeepResult]:
        """Change how long outcomes are remembered; for a live job, from its end. `at_least` never shortens the time."""
        validation.check_ids(queue, ids)
        validation.check_number("ttl_ms", ttl_ms, 0, MAX_MS)
        if not ids:
            return []
        await self._ensure_open()
        return await self._keep(queue, ids, ttl_ms, at_least)

    async def prioritize(self, queue: str, ids: Sequence[str], priority: int) -> list[bool]:
        """Change the priority of live jobs, and nothing else. False for a job that has ended or does not exist."""
        validation.check_ids(queue, ids)
        validation.check_number("priority", priority, PRIORITIES[0], PRIORITIES[-1])
        if not ids:
            return []
        await self._ensure_open()
        return await self._prioritize(queue, ids, priority)

    async def pause(self, queue: str, paused: bool, *, reason: str = "") -> None:
        """Stop claims of a queue, or resume them. All other verbs still work."""
        validation.check_queue(queue)
        validation.check_pause(paused, reason)
        await self._ensure_open()
        await self._pause(queue, paused, reason)

    async def sweep(self, queue: str, limit: int = validation.MAX_SWEEP, *, worker: str | None = None) -> replies.Swept:
        """Take back expired leases, in two steps, and forget records past their forget time. With `worker`: take back
        all leases of this worker at once, because it is known to be dead."""
        validation.check_queue(queue)
        validation.check_number("limit", limit, 1, validation.MAX_SWEEP)
        if worker is not None:
            validation.check_worker(worker)
        await self._ensure_open()
        return await self._sweep(queue, limit, worker)

    async def purge(self, queue: str, states: Collection[State], limit: int = 100) -> int:
        """Delete waiting and finished records, ask running jobs to cancel, and return the number of both. Call until
        the reply is 0."""
        validation.check_queue(queue)
        validation.check_number("limit", limit, 1, validation.MAX_PAGE)
        wanted = validation.to_states(states)
        await self._ensure_open()
        return await self._purge(queue, wanted, limit)

    async def drop(self, queue: str, limit: int = 100) -> int:
        """Do what `purge` does for all states, and return how many records are left. If none is left, forget the queue
        in the same step, with its counters and its pause. Call until the reply is 0."""
        validation.check_queue(queue)
        validation.check_number("limit", limit, 1, validation.MAX_PAGE)
        await self._ensure_open()
        return await self._drop(queue, limit)

    async def announce(self, worker: str, facts: replies.WorkerFacts, *, ttl_ms: int) -> replies.WorkerCommands:
        """Register a worker for `ttl_ms`; `facts["queues"]` lists the queues that it serves. Returns its commands."""
        validation.check_lease(worker, ttl_ms)
        validation.check_facts(facts)
        await self._ensure_open()
        return await self._announce(worker, facts, ttl_ms)

    async def evict(self, worker: str) -> bool:
        """Ask a worker to stop. False if no worker of this name is registered."""
        validation.check_worker(worker)
        await self._ensure_open()
        return await self._evict(worker)

    async def write_notes(self, notes: Mapping[str, bytes], *, ttl_ms: int) -> None:
        """Store notes: small values of the namespace by name, each forgotten after `ttl_ms`. Workers and commands leave
        them for each other. At most 250 notes, of 16 KiB each."""
        validation.check_notes(notes)
        validation.check_number("ttl_ms", ttl_ms, 1, MAX_MS)
        if not notes:
            return
        await self._ensure_open()
        await self._write_notes(notes, ttl_ms)

    async def repair(self, queue: str, *, dry_run: bool, cursor: str | None = None) -> replies.Repaired:
        """Check one page of records and repair them; with `dry_run` only check. `cursor` continues after a page."""
        validation.check_queue(queue)
        await self._ensure_open()
        return await self._repair(queue, dry_run, cursor)

    # Reading

    async def ready(self, queues: Sequence[str], *, forgotten: bool = False) -> list[str]:
        """Return the queues that have a job that is due, or a lease to take back; with `forgotten`, also those with
        records to delete. Changes no record, and costs one call for any number of queues (in a cluster, one for
        each)."""
        validation.check_queues(queues)
        if not queues:
            return []
        await self._ensure_open()
        return await self._ready(queues, forgotten)

    async def read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        """Read notes by their names: see `write_notes`. None for one that does not exist, or is forgotten."""
        validation.check_note_names(names)
        if not names:
            return []
        await self._ensure_open()
        return await self._read_notes(names)

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        """Read records."""
        validation.check_ids(queue, ids)
        if not ids:
            return []
        await self._ensure_open()
        return await self._get(queue, ids)

    async def scan(
        self, queue: str, *, state: State | None = None, after: str | None = None, limit: int = 100
    ) -> replies.Page:
        """List records without payloads and results: of one state in its order, or of one state after the other."""
        validation.check_queue(queue)
        validation.check_number("limit", limit, 1, validation.MAX_PAGE)
        wanted = None if state is None else validation.to_state(state)
        await self._ensure_open()
        return await self._scan(queue, wanted, after, limit)

    async def snapshot(self, queues: Sequence[str] | None = None) -> replies.Snapshot:
        """Return the workers, and of each queue counts, totals, the age of its oldest ready job and its pause: of all
        queues, or of those of these names that exist. A queue whose metadata cannot be read is listed with its problem
        and without numbers."""
        if queues is not None:
            validation.check_queues(queues)
        await self._ensure_open()
        return await self._snapshot(queues)

    async def about(self) -> replies.StorageInfo:
        """Return what the storage is and what it keeps, for operators."""
        await self._ensure_open()
        return await self._about()

    async def back_up(self, target: Path) -> None:
        """Copy all data, as it is at one moment, to a new file that only this user may read. SQLite only."""
        await self._ensure_open()
        await self._back_up(target)

    @asynccontextmanager
    async def subscribe(self, *topics: Topic) -> AsyncGenerator[Subscription]:
        """Receive hints of events. A hint may be lost: poll the record once a second as well."""
        validation.check_topics(topics)
        await self._ensure_open()
        async with Subscription(self._bus, topics) as events:
            stop_listening = await self._listen(topics)
            try:
                yield events
            finally:
                if stop_listening is not None:
                    stop_listening()

    # What a storage implements

    async def _open(self) -> None:
        """Connect. An attempt that fails raises StorageUnavailable and leaves nothing open."""
        self._pid = os.getpid()

    async def _close(self) -> None:
        self._pid = None

    async def _listen(self, topics: Sequence[Topic]) -> Callable[[], None] | None:
        """Ask other processes, or the server, for hints of these topics. Return a function that ends this; without one,
        it ends when the storage is closed."""
        return None

    async def _back_up(self, target: Path) -> None:
        raise OptionError(f"{self!r} has no file to copy: use the backup of the server (docs/operating.md)")

    @abstractmethod
    def clone(self) -> Storage:
        """Return another storage object for the same jobs with the same settings, not open and not lazy: for another
        thread with its own event loop. Each of the two is opened and closed separately."""

    @abstractmethod
    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[replies.Enqueued]: ...
    @abstractmethod
    def _enqueue_in(
        self, transaction: object, queue: str, jobs: Sequence[Request]
    ) -> list[replies.Enqueued | None]: ...
    @abstractmethod
    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> replies.Claim: ...
    @abstractmethod
    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[replies.SettleResult]: ...
    @abstractmethod
    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> replies.Extended: ...
    @abstractmethod
    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]: ...
    @abstractmethod
    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[replies.KeepResult]: ...
    @abstractmethod
    async def _prioritize(self, queue: str, ids: Sequence[str], priority: int) -> list[bool]: ...
    @abstractmethod
    async def _pause(self, queue: str, paused: bool, reason: str) -> None: ...
    @abstractmethod
    async def _sweep(self, queue: str, limit: int, worker: str | None) -> replies.Swept: ...
    @abstractmethod
    async def _purge(self, queue: str, states: Collection[State], limit: int) -> int: ...
    @abstractmethod
    async def _drop(self, queue: str, limit: int) -> int: ...
    @abstractmethod
    async def _announce(self, worker: str, facts: replies.WorkerFacts, ttl_ms: int) -> replies.WorkerCommands: ...
    @abstractmethod
    async def _evict(self, worker: str) -> bool: ...
    @abstractmethod
    async def _write_notes(self, notes: Mapping[str, bytes], ttl_ms: int) -> None: ...
    @abstractmethod
    async def _read_notes(self, names: Sequence[str]) -> list[bytes | None]: ...
    @abstractmethod
    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> replies.Repaired: ...
    @abstractmethod
    async def _ready(self, queues: Sequence[str], forgotten: bool) -> list[str]: ...
    @abstractmethod
    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]: ...
    @abstractmethod
    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> replies.Page: ...
    @abstractmethod
    async def _snapshot(self, queues: Sequence[str] | None) -> replies.Snapshot: ...
    @abstractmethod
    async def _about(self) -> replies.StorageInfo: ...


async def audit(storage: Storage, queue: str, *, repair: bool = False) -> replies.Repaired:
    """Check all records of a queue, one page after the other; with `repair`, repair them.

    >>> (await audit(storage, "emails")).problems
    []
    """
    page = await storage.repair(queue, dry_run=not repair)
    problems, checked = list(page.problems), page.checked
    while page.cursor is not None:
        page = await storage.repair(queue, dry_run=not repair, cursor=page.cursor)
        problems += page.problems
        checked += page.checked
    return replies.Repaired(problems, checked, None)
