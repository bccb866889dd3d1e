"""The verbs, for storages whose atomic step is a Python function: memory and SQLite.

Each method of `Engine` is one step: it reads records, lets the lifecycle decide, and writes what changed.
`LocalStorage` runs a verb by its `_step`, which takes a lock or begins a transaction. A storage of this kind provides
`_step` and a `Table`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from holdfast._core import lifecycle, replies
from holdfast._core.clock import Clock, QueueTime
from holdfast._core.events import EventKind
from holdfast._core.extension import extension_size
from holdfast._core.jobs import PRIORITIES, Complete, Fail, Job, LeaseRef, Request, Settlement, State
from holdfast.storage.base import QueueDamaged, Storage
from holdfast.storage.local import table as tables
from holdfast.storage.local.audit import repair_page, unreadable_meta
from holdfast.storage.local.table import BRIEF, FINISHED_INDEXES, QueueMeta, QueueTransaction, Table
from holdfast.storage.validation import FAILED_SUFFIX, MAX_CALL_BYTES, MAX_ITEMS, MAX_SWEEP

T = TypeVar("T")

SWEEP_ON_CLAIM = 10
"""The most leases, and the most finished records, that a claim sweeps."""
MAX_LOOKS = 10
"""How often a claim looks for due jobs while it meets some that are not due any more, because the clock has stepped."""
FORGET_PER_ITEM = 2
"""The most finished records that an enqueue or a settle call deletes for each of its items. More records are deleted
than added, so a queue stays bounded with producers alone, and with workers alone."""


class Engine:
    """The verbs of `Storage` as plain functions over a `Table`."""

    def __init__(self, table: Table, clock: Clock) -> None:
        self.table = table
        self.clock = clock

    def _begin(self, queue: str) -> QueueTransaction:
        """Begin a step on a queue. A queue that does not exist is empty, and stays so."""
        return QueueTransaction(self.table, queue, self.table.meta(queue) or QueueMeta(), self.clock.now_us())

    def _create(self, queue: str) -> QueueTransaction:
        """Begin a step on a queue, and create the queue if it does not exist."""
        return QueueTransaction(self.table, queue, self.table.open(queue), self.clock.now_us())

    def enqueue(self, queue: str, jobs: Sequence[Request]) -> list[replies.Enqueued]:
        transaction = self._create(queue)
        transaction.sweep_forgotten(FORGET_PER_ITEM * len(jobs))
        results = _start(transaction, jobs) or _enqueue(transaction, jobs)
        transaction.close()
        return results

    def claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> replies.Claim:
        transaction = self._begin(queue)
        transaction.sweep(SWEEP_ON_CLAIM)
        transaction.sweep_forgotten(SWEEP_ON_CLAIM)
        paused = transaction.meta.paused
        transaction.close()
        jobs = [] if paused else self._claim_due(queue, limit, worker, lease_ms)
        next_run_at = None if paused else self.table.next_run_at(queue)
        next_sweep_at = self.table.next_until(queue, State.RUNNING)
        return replies.Claim(
            [tables.as_read(job, transaction.time) for job in jobs],
            transaction.now,
            next_run_at,
            next_sweep_at,
            paused,
        )

    def ready(self, queues: Sequence[str], forgotten: bool) -> tuple[list[str], list[str]]:
        """Return the queues that are ready, and those whose time must be noted."""
        ready: list[str] = []
        unnoted: list[str] = []
        for queue in queues:
            try:
                transaction = self._begin(queue)
            except QueueDamaged:
                ready.append(queue)  # The claim of this queue says what is wrong, and no other queue is held up.
                continue
            if self._is_ready(transaction, forgotten):
                ready.append(queue)
            elif transaction.needs_note and any(map(transaction.meta.counts.get, State)):
                unnoted.append(queue)
        return ready, unnoted

    def _is_ready(self, transaction: QueueTransaction, forgotten: bool) -> bool:
        queue, paused = transaction.queue, transaction.meta.paused
        times = (self.table.next_until(queue, State.RUNNING), None if paused else self.table.next_run_at(queue))
        if any(at is not None and at <= transaction.now for at in times):
            return True
        return forgotten and bool(transaction.to_forget(1))

    def note_time(self, queues: Sequence[str]) -> None:
        """Note the time of queues in which nothing happens."""
        for queue in queues:
            self._begin(queue).close()

    def _claim_due(self, queue: str, limit: int, worker: str, lease_ms: int) -> list[Job]:
        """Lease jobs that are due. First a job that is not due by wall time, because the clock stepped back, moves to
        its place, and a damaged record to the failed ones. Then other jobs may be due in their places: look again."""
        for _ in range(MAX_LOOKS):
            transaction = self._begin(queue)
            due = self.table.due(queue, transaction.now, limit)
            passed_over = [job for job in due if not _fits(job, transaction.time)]
            if not passed_over:
                return _claim(transaction, due, worker, lease_ms)
            for job in passed_over:
                transaction.rewrite(job, lifecycle.follow_clock(job, transaction.time))
            transaction.close()
        transaction = self._begin(queue)
        due = [job for job in self.table.due(queue, transaction.now, limit) if _fits(job, transaction.time)]
        return _claim(transaction, due, worker, lease_ms)

    def settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[replies.SettleResult]:
        transaction = self._begin(queue)
        transaction.sweep_forgotten(FORGET_PER_ITEM * len(batch), len(batch))
        records = transaction.load([item.id for item in batch])
        results: list[replies.SettleResult] = []
        follow_ups: list[Request] = []
        for item in batch:
            job = records[item.id]
            if job is None or not lifecycle.holds(job, worker, item.fence):
                results.append(replies.SettleResult.LOST)
                continue
            step = lifecycle.settle(job, item, transaction.time)
            if isinstance(item, Fail) and item.follow_up is not None and EventKind.FAILED in step.kinds:
                follow_ups.append(Request(f"{item.id}@{job.generation}", item.follow_up, custom_id=True))
            records[item.id] = transaction.record_change(item.id, job, step)
            results.append(replies.SettleResult.OK)
        transaction.close()
        if follow_ups:
            companion = self._create(queue + FAILED_SUFFIX)
            _enqueue(companion, follow_ups)
            companion.close()
        return results

    def extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> replies.Extended:
        transaction = self._begin(queue)
        records = transaction.load([lease.id for lease in leases])
        lost: list[LeaseRef] = []
        cancel_asked: list[LeaseRef] = []
        for lease in leases:
            job = records[lease.id]
            if job is None or job.run is None or not lifecycle.holds(job, worker, lease.fence):
                lost.append(lease)
                continue
            if job.run.cancel_asked:
                cancel_asked.append(lease)
            step = lifecycle.Step(lifecycle.extend(job, lease, lease_ms, transaction.now))
            records[lease.id] = transaction.record_change(lease.id, job, step)
        transaction.close()
        return replies.Extended(lost, cancel_asked)

    def cancel(self, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]:
        return self._change_each(queue, ids, lifecycle.cancel)

    def keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[replies.KeepResult]:
        return self._change_each(queue, ids, lambda job, now: lifecycle.keep(job, ttl_ms, at_least, now))

    def prioritize(self, queue: str, ids: Sequence[str], priority: int) -> list[bool]:
        return self._change_each(queue, ids, lambda job, now: lifecycle.prioritize(job, priority))

    def _change_each(
        self, queue: str, ids: Sequence[str], decide: Callable[[Job | None, int], tuple[lifecycle.Step, T]]
    ) -> list[T]:
        transaction = self._begin(queue)
        records = transaction.load(ids)
        results: list[T] = []
        for id in ids:
            step, result = decide(records[id], transaction.now)
            records[id] = transaction.record_change(id, records[id], step)
            results.append(result)
        transaction.close()
        return results

    def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        transaction = self._begin(queue)
        loaded = transaction.load(ids)
        jobs = (loaded[id] for id in ids)
        return [
            None if job is None or lifecycle.forgotten(job, transaction.now) else tables.as_read(job, transaction.time)
            for job in jobs
        ]

    def scan(self, queue: str, state: State | None, after: str | None, limit: int) -> replies.Page:
        time = self._begin(queue).time
        indexes, start = tables.read_cursor(state, after)
        jobs: list[Job] = []
        end: str | None = None
        for at in indexes:
            page, place = self.table.page(queue, at, start, max(limit - len(jobs), 1))
            if page and len(jobs) == limit:
                end = tables.write_cursor(state, at, None)
                break
            jobs += page
            if place is not None:
                end = tables.write_cursor(state, at, place)
                break
            start = None
        return replies.Page(tables.listed(jobs, time), end)

    def snapshot(self, queues: Sequence[str] | None) -> replies.Snapshot:
        now = self.clock.now_us()
        workers = sorted((w for w in self.table.workers() if w.expires_at > now), key=lambda w: w.worker)
        serving = replies.workers_by_queue(workers)
        names = self.table.queues() if queues is None else queues
        found = [self._stats(queue, serving) for queue in sorted(set(names))]
        return replies.Snapshot(now, [stats for stats in found if stats is not None], workers)

    def _stats(self, queue: str, serving: Mapping[str, list[str]]) -> replies.QueueStats | None:
        try:
            if self.table.meta(queue) is None:
                return None
            transaction = self._begin(queue)
        except QueueDamaged as error:
            return replies.QueueStats(queue, problem=str(error))
        meta, now, counts = transaction.meta, transaction.now, transaction.meta.counts
        past = {index: self.table.past(queue, index, now) if counts.get(index) else 0 for index in FINISHED_INDEXES}
        kept = {index: counts.get(index, 0) - past[index] for index in FINISHED_INDEXES}
        scheduled = self.table.scheduled(queue, now) if counts.get(State.WAITING) else 0
        heads = self.table.due(queue, now, len(PRIORITIES), 1) if counts.get(State.WAITING, 0) > scheduled else []
        oldest = min((max(job.run_at, job.generation) for job in heads), default=now)
        return replies.QueueStats(
            queue,
            ready=counts.get(State.WAITING, 0) - scheduled,
            scheduled=scheduled,
            running=counts.get(State.RUNNING, 0),
            retrying=counts.get("retrying", 0),
            deferred=counts.get("deferred", 0),
            completed=kept[State.COMPLETED] + kept[BRIEF],
            failed=kept[State.FAILED],
            cancelled=kept[State.CANCELLED],
            expired=sum(past.values()),
            oldest_ready_ms=max(0, now - oldest) // 1000,
            paused=meta.paused,
            reason=meta.reason,
            workers=serving.get(queue, []),
            totals=dict(meta.totals),
        )

    def pause(self, queue: str, paused: bool, reason: str) -> None:
        meta = self.table.open(queue)
        meta.paused = paused
        meta.reason = reason if paused else ""
        self.table.write_meta(queue)

    def sweep(self, queue: str, limit: int, worker: str | None) -> replies.Swept:
        transaction = self._begin(queue)
        overdue, stalled, more = transaction.sweep(limit, worker)
        forgotten = transaction.sweep_forgotten(limit)
        transaction.close()
        next_sweep_at = self.table.next_until(queue, State.RUNNING)
        return replies.Swept(overdue, stalled, forgotten, more or forgotten == limit, next_sweep_at)

    def purge(self, queue: str, states: Collection[State], limit: int) -> int:
        return self._purge(self._begin(queue), states, limit)

    def drop(self, queue: str, limit: int) -> int:
        transaction = self._begin(queue)
        self._purge(transaction, tuple(State), limit)
        left = sum(transaction.meta.counts.get(index, 0) for index in (*State, BRIEF))
        if not left and self.table.meta(queue):
            self.table.drop(queue)
        return left

    def _purge(self, transaction: QueueTransaction, states: Collection[State], limit: int) -> int:
        done = 0
        wanted = [state for state in State if state in states and state is not State.RUNNING]
        for index in (index for state in wanted for index in tables.indexes_of(state)):
            if done == limit:
                break
            jobs, _ = self.table.page(transaction.queue, index, None, limit - done)
            for job in jobs:
                kind = EventKind.PURGED if job.state is State.WAITING else EventKind.FORGOTTEN
                transaction.record_change(job.id, job, lifecycle.Step(None, (kind,)))
            done += len(jobs)
        if State.RUNNING in states:
            done += self._ask_to_cancel(transaction, limit - done)
        transaction.close()
        return done

    def _ask_to_cancel(self, transaction: QueueTransaction, limit: int) -> int:
        asked, after = 0, None
        while asked < limit:
            jobs, after = self.table.page(transaction.queue, State.RUNNING, after, MAX_SWEEP)
            for job in jobs:
                if job.run is not None and not job.run.cancel_asked and asked < limit:
                    step, _ = lifecycle.cancel(job, transaction.now)
                    transaction.record_change(job.id, job, step)
                    asked += 1
            if after is None:
                break
        return asked

    def announce(self, worker: str, facts: replies.WorkerFacts, ttl_ms: int) -> replies.WorkerCommands:
        now = self.clock.now_us()
        known = {stats.worker: stats for stats in self.table.workers()}
        for stats in known.values():
            if stats.expires_at <= now:
                self.table.write_worker(stats.worker, None)
        before = known.get(worker)
        evict = before is not None and before.evict_asked and before.expires_at > now
        self.table.write_worker(worker, replies.WorkerInfo(worker, facts, now, now + 1000 * ttl_ms, evict))
        return replies.WorkerCommands(evict)

    def evict(self, worker: str) -> bool:
        now = self.clock.now_us()
        for stats in self.table.workers():
            if stats.worker == worker and stats.expires_at > now:
                self.table.write_worker(worker, replace(stats, evict_asked=True))
                return True
        return False

    def write_notes(self, notes: Mapping[str, bytes], ttl_ms: int) -> None:
        now = self.clock.now_us()
        self.table.forget_notes(now)
        for name, value in notes.items():
            self.table.write_note(name, value, now + 1000 * ttl_ms)

    def read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        now = self.clock.now_us()
        return [self.table.note(name, now) for name in names]

    def repair(self, queue: str, dry_run: bool, cursor: str | None) -> replies.Repaired:
        problems = [unreadable_meta(queue)] if self.table.rebuild_meta(queue, dry_run) else []
        if (problems and dry_run) or self.table.meta(queue) is None:
            return replies.Repaired(problems, 0, None)
        page = repair_page(self._begin(queue), dry_run, cursor)
        return replace(page, problems=problems + page.problems)


def _start(transaction: QueueTransaction, requests: Sequence[Request]) -> list[replies.Enqueued] | None:
    """Enqueue ids that Holdfast made: they are new, so no record is read first. Return None, and change nothing, if an
    id was chosen by the caller, has no payload or exists."""
    if any(request.custom_id or request.work.payload is None for request in requests):
        return None
    time = transaction.time
    newest = time.last_stamp
    jobs = [lifecycle.new_generation(None, request, request.work, time, time.stamp()) for request in requests]
    if transaction.add(jobs):
        return [replies.Enqueued(job.id, replies.Placed.NEW, job.generation) for job in jobs]
    time.last_stamp = newest
    return None


def _enqueue(transaction: QueueTransaction, requests: Sequence[Request]) -> list[replies.Enqueued]:
    records = transaction.load([request.id for request in requests])
    results: list[replies.Enqueued] = []
    for request in requests:
        before = records[request.id]
        step, reply = lifecycle.enqueue(before, request, transaction.time)
        records[request.id] = transaction.record_change(request.id, before, step)
        results.append(reply)
    return results


def _claim(transaction: QueueTransaction, due: Sequence[Job], worker: str, lease_ms: int) -> list[Job]:
    claimed: list[Job] = []
    size = 0
    for job in due:
        work = job.work
        size += len(work.payload or b"") + (extension_size(work.extension) if work.extension else 0)
        if claimed and size > MAX_CALL_BYTES:
            break
        running = transaction.record_change(job.id, job, lifecycle.claim(job, worker, lease_ms, transaction.time))
        assert running is not None
        claimed.append(running)
    transaction.close()
    return claimed


def _fits(job: Job, time: QueueTime) -> bool:
    """Return whether a claim can lease a record that its index lists as due."""
    return job.outcome is None and (job.wall_at == 0 or lifecycle.follow_clock(job, time) is job)


BYTES_AN_ITEM = 4096
"""As many bytes of payload or result take as long to write as a record."""


class LocalStorage(Storage):
    """A storage whose verbs are methods of `Engine`. Memory and SQLite differ in how `_step` makes one atomic."""

    @abstractmethod
    async def _step(self, verb: Callable[[Engine], T], *, writes: bool = True, items: int | None = 1) -> T:
        """Run a verb as one atomic step. `items` is the number of records it may touch, where large payloads count for
        several; None is any number, and the verb only reads."""

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[replies.Enqueued]:
        size = sum(len(job.work.payload or b"") for job in jobs)
        return await self._step(lambda engine: engine.enqueue(queue, jobs), items=len(jobs) + size // BYTES_AN_ITEM)

    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> replies.Claim:
        return await self._step(lambda engine: engine.claim(queue, limit, worker, lease_ms), items=limit)

    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[replies.SettleResult]:
        size = sum(len(item.result or b"") for item in batch if isinstance(item, Complete))
        items = len(batch) + size // BYTES_AN_ITEM
        return await self._step(lambda engine: engine.settle(queue, batch, worker), items=items)

    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> replies.Extended:
        return await self._step(lambda engine: engine.extend(queue, leases, worker, lease_ms), items=len(leases))

    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]:
        return await self._step(lambda engine: engine.cancel(queue, ids), items=len(ids))

    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[replies.KeepResult]:
        return await self._step(lambda engine: engine.keep(queue, ids, ttl_ms, at_least), items=len(ids))

    async def _prioritize(self, queue: str, ids: Sequence[str], priority: int) -> list[bool]:
        return await self._step(lambda engine: engine.prioritize(queue, ids, priority), items=len(ids))

    async def _pause(self, queue: str, paused: bool, reason: str) -> None:
        await self._step(lambda engine: engine.pause(queue, paused, reason))

    async def _sweep(self, queue: str, limit: int, worker: str | None) -> replies.Swept:
        return await self._step(lambda engine: engine.sweep(queue, limit, worker), items=limit)

    async def _purge(self, queue: str, states: Collection[State], limit: int) -> int:
        return await self._step(lambda engine: engine.purge(queue, states, limit), items=limit)

    async def _drop(self, queue: str, limit: int) -> int:
        return await self._step(lambda engine: engine.drop(queue, limit), items=limit)

    async def _announce(self, worker: str, facts: replies.WorkerFacts, ttl_ms: int) -> replies.WorkerCommands:
        return await self._step(lambda engine: engine.announce(worker, facts, ttl_ms))

    async def _evict(self, worker: str) -> bool:
        return await self._step(lambda engine: engine.evict(worker))

    async def _ready(self, queues: Sequence[str], forgotten: bool) -> list[str]:
        ready, unnoted = await self._step(
            lambda engine: engine.ready(queues, forgotten), writes=False, items=len(queues)
        )
        if unnoted:
            await self._step(lambda engine: engine.note_time(unnoted), items=len(unnoted))
        return ready

    async def _write_notes(self, notes: Mapping[str, bytes], ttl_ms: int) -> None:
        await self._step(lambda engine: engine.write_notes(notes, ttl_ms))

    async def _read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        return await self._step(lambda engine: engine.read_notes(names), writes=False, items=len(names))

    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await self._step(lambda engine: engine.get(queue, ids), writes=False, items=len(ids))

    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> replies.Page:
        return await self._step(lambda engine: engine.scan(queue, state, after, limit), writes=False, items=None)

    async def _snapshot(self, queues: Sequence[str] | None) -> replies.Snapshot:
        return await self._step(lambda engine: engine.snapshot(queues), writes=False, items=None)

    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> replies.Repaired:
        items = None if dry_run else MAX_ITEMS
        return await self._step(lambda engine: engine.repair(queue, dry_run, cursor), writes=not dry_run, items=items)
