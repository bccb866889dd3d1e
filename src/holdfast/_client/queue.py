"""A queue by its name: enqueue any payload, lease jobs, operate the queue. It needs no task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from holdfast._client import familiar, request, waiters
from holdfast._client.info import JobInfo, info_of
from holdfast._client.lease import Lease, read_token, to_lease_ms
from holdfast._client.request import BoundRequest, Handle, RequestTemplate
from holdfast._client.session import Session
from holdfast._client.stats import Stats, stats_of
from holdfast._client.task import queue_config
from holdfast._client.waiters import to_wait_s, value_of
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.jobs import Release, Request, Settlement, State, Update, Work
from holdfast._core.options import DEFAULT_WAIT_S, OPTIONS, EnqueueOptions, PullOptions, Seconds, check_names, to_ms
from holdfast._core.replies import CancelResult, Claim, KeepResult, Repaired, Swept
from holdfast._core.retry_policy import admit, fence_of
from holdfast._worker.telemetry import default_worker_name
from holdfast.errors import HoldfastError, JobNotFound, OptionError, StorageUnavailable
from holdfast.storage import audit
from holdfast.storage.validation import MAX_ITEMS, check_queue, clean_id, to_state

if TYPE_CHECKING:
    from holdfast._client.sync import SyncQueue

R = TypeVar("R")
V = TypeVar("V")

LEAST_PURGE_S = 1.0
"""How long `delete` purges a backlog, also with a shorter `wait`."""
PULL_PREFIX = "pull-"
"""Begins the worker name of leases that no worker holds."""


class Queue:
    """A queue by its name: enqueue any payload, lease jobs, operate the queue. Made by `app.queue(name)`."""

    if not TYPE_CHECKING:
        __getattr__ = familiar.answer("a queue", familiar.OF_A_QUEUE)

    def __init__(self, session: Session, name: str, options: PullOptions) -> None:
        self._session = session
        self.name = check_queue(name)
        check_names(f"queue {name}", PullOptions, options)
        self._config = queue_config(name, PullOptions, options)
        self._template = RequestTemplate(name, {})
        self._worker = f"{PULL_PREFIX}{default_worker_name()}"

    def __repr__(self) -> str:
        return f"<queue {self.name}>"

    @property
    def sync(self) -> SyncQueue:
        """The blocking version of this queue, for code without an event loop."""
        from holdfast._client.sync import SyncQueue

        return SyncQueue(self._session, self)

    # Producing

    def bind(self, payload: object, **options: Unpack[EnqueueOptions]) -> BoundRequest[Any]:
        """Return a request that is not sent yet, for `app.enqueue_many` and `app.enqueue_in`."""
        check_names("enqueue", EnqueueOptions, options)
        return self._bind(payload, options)

    async def enqueue(self, payload: object, **options: Unpack[EnqueueOptions]) -> Handle[Any]:
        """Enqueue a job with any JSON value, or bytes. It is stored when this returns."""
        return await request.enqueue(self._session, self.bind(payload, **options))

    async def call(
        self, payload: object, *, wait: Seconds | None = DEFAULT_WAIT_S, **options: Unpack[EnqueueOptions]
    ) -> Any:
        """Enqueue a job and wait for its result. A remembered result returns at once. Raises like `Handle.result`."""
        check_names("call", EnqueueOptions, options)
        return await request.call(self._session, self._bind(payload, {**options, "wait": wait}))

    async def retry(self, id: str | bytes) -> Handle[Any]:
        """Run a failed or cancelled job again with its old payload. Raises `JobNotFound` if it has none."""
        return await request.send(self._session, self._again(id))

    def _again(self, id: str | bytes) -> BoundRequest[Any]:
        """Return a request that runs a job again with its old payload."""
        again = Request(id=clean_id(id), work=Work(None), update=Update(payload=False), custom_id=True)
        return BoundRequest(self._template, again)

    def _bind(self, payload: object, options: Mapping[str, Any]) -> BoundRequest[Any]:
        template = RequestTemplate(self.name, options) if options else self._template
        data, codec = self._session.codecs.encode_any(f"the payload for {self.name}", payload)
        return request.bind(template, data, codec, template.id)

    # Pulling

    async def lease(self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S) -> Lease | None:
        """Lease the next job for `seconds` (0.1 to 86,400). Waits up to `wait` seconds for a ready job: None waits
        without a limit, 0 checks once. Returns None if no job is ready."""
        seconds_ms = to_lease_ms(seconds)
        wait_s = to_wait_s(wait)
        deadline = _deadline(wait_s)
        lease, poll_s = await self._take(seconds_ms)
        if lease is not None or wait_s == 0:
            return lease
        async with self._session.storage.subscribe(Topic(self.name, "wake")) as events:
            while True:
                lease, poll_s = await self._take(seconds_ms)
                left_s = deadline - asyncio.get_running_loop().time()
                if lease is not None or left_s <= 0:
                    return lease
                await events.within(min(poll_s, left_s))

    @asynccontextmanager
    async def leased(
        self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S, extend: bool = True
    ) -> AsyncGenerator[Lease | None]:
        """Lease a job for a block, and extend the lease meanwhile. The end of the block completes the job unless you
        settled it; an exception retries it. Yields None if no job is ready.

        >>> async with queue.leased(wait=5) as lease:
        ...     if lease: work(lease.payload)
        """
        lease = await self.lease(seconds=seconds, wait=wait)
        if lease is None:
            yield None
            return
        keep = lease._keep_extending  # pyright: ignore[reportPrivateUsage]
        keeping = asyncio.create_task(keep()) if extend else None
        try:
            yield lease
        except Exception as error:
            if not lease.settled:
                await lease.retry(error=error)
            raise
        except BaseException:  # The task is cancelled or the program ends: the job did not fail.
            if not lease.settled:
                await lease.release()
            raise
        else:
            if not lease.settled:
                await lease.complete()
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def lease_from_token(self, token: str) -> Lease | None:
        """Return a lease of this queue by its `token`, in any process; None if it is lost."""
        queue, id, fence, worker, length_ms = read_token(token)
        if queue != self.name:
            raise OptionError(f"the token is of a lease of {queue}, not of {self.name}: pass it to app.lease")
        (job,) = await self._session.storage.get(self.name, [clean_id(id)])
        if job is None or job.run is None or (job.run.fence, job.run.worker) != (fence, worker):
            return None
        return Lease(self._session, self._config, job, worker, length_ms, restored=True)

    async def _take(self, seconds_ms: int) -> tuple[Lease | None, float]:
        """Lease the next job that may run; without one, return None and the time until the next poll in seconds."""
        loop = asyncio.get_running_loop()
        while True:
            sent_at = loop.time()
            claim = await self._claim(seconds_ms)
            if not claim.jobs:
                known = (at for at in (claim.next_run_at, claim.next_sweep_at) if at is not None)
                soonest_s = (min(known, default=claim.now + POLL_INTERVAL_S * 1e6) - claim.now) / 1e6
                return None, min(POLL_INTERVAL_S, max(soonest_s, 0.001))
            (job,) = claim.jobs
            refused: Settlement | None = admit(job, self._config.policy)
            if loop.time() - sent_at >= seconds_ms / 1000:  # The reply took longer than the lease.
                refused = Release(job.id, fence_of(job))
            if refused is None:
                return Lease(self._session, self._config, job, self._worker, seconds_ms), 0.0
            await self._session.storage.settle(self.name, [refused], worker=self._worker)

    async def _claim(self, seconds_ms: int) -> Claim:
        """Claim one job. Release it if the caller is cancelled meanwhile."""
        storage = self._session.storage
        claiming = asyncio.ensure_future(storage.claim(self.name, 1, worker=self._worker, lease_ms=seconds_ms))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with suppress(HoldfastError):
                released = [Release(job.id, fence_of(job)) for job in (await claiming).jobs]
                await storage.settle(self.name, released, worker=self._worker)
            raise

    # One job

    async def get(self, id: str | bytes) -> JobInfo | None:
        """Return the present state of a job; None if it does not exist, or is forgotten."""
        (job,) = await self._session.storage.get(self.name, [clean_id(id)])
        return None if job is None else info_of(self._session, self.name, job)

    async def get_many(self, ids: Iterable[str | bytes]) -> list[JobInfo | None]:
        """Return the present states of many jobs, in the order of the ids; None for a job that does not exist. At most
        250 are read in one step."""
        found = await self._in_batches(ids, partial(self._session.storage.get, self.name))
        return [None if job is None else info_of(self._session, self.name, job) for job in found]

    @overload
    async def result(self, id: str | bytes, *, type: type[R], wait: Seconds | None = DEFAULT_WAIT_S) -> R: ...
    @overload
    async def result(self, id: str | bytes, *, type: UnionType, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    @overload
    async def result(self, id: str | bytes, *, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    async def result(self, id: str | bytes, *, type: Any = Any, wait: Seconds | None = DEFAULT_WAIT_S) -> Any:
        """Return the result of a job, decoded as `type`. Waits for its end. Raises like `Handle.result`."""
        name = clean_id(id)
        (job,) = await self._session.storage.get(self.name, [name])
        if job is None:
            raise JobNotFound(f"there is no job {name!r:.80} in {self.name}: it was never requested, or is forgotten")
        outcome = job.outcome or await waiters.wait(
            self._session.storage, self.name, name, job.generation, wait_s=to_wait_s(wait)
        )
        return value_of(self._session, self.name, name, outcome, type)

    async def keep(self, id: str | bytes, ttl: Seconds) -> KeepResult:
        """Change how long the outcome of a job is remembered: `KEPT`, `LIVE` (from its end on) or `MISSING`."""
        (kept,) = await self._session.storage.keep(self.name, [clean_id(id)], to_ms("ttl", ttl))
        return kept

    async def cancel(self, id: str | bytes) -> CancelResult:
        """Cancel a job: `CANCELLED` (truthy) if it waited, `ASKED` if it runs, `FINISHED` or `MISSING`."""
        (reply,) = await self._session.storage.cancel(self.name, [clean_id(id)])
        return reply

    async def set_priority(self, id: str | bytes, priority: int) -> bool:
        """Change the priority of a waiting or running job, and nothing else. Returns False if the job has ended or does
        not exist. The retries of a running job have the new priority."""
        (changed,) = await self.set_priority_many([id], priority)
        return changed

    async def set_priority_many(self, ids: Iterable[str | bytes], priority: int) -> list[bool]:
        """Change the priority of many jobs; returns what `set_priority` returns, in the order of the ids. At most 250
        are changed in one step."""
        number = OPTIONS["priority"].convert(priority)
        return await self._in_batches(ids, lambda batch: self._session.storage.prioritize(self.name, batch, number))

    async def keep_many(self, ids: Iterable[str | bytes], ttl: Seconds) -> list[KeepResult]:
        """Change how long the outcomes of many jobs are remembered; returns what `keep` returns, in the order of the
        ids. At most 250 are changed in one step."""
        keep, ttl_ms = self._session.storage.keep, to_ms("ttl", ttl)
        return await self._in_batches(ids, lambda batch: keep(self.name, batch, ttl_ms))

    async def cancel_many(self, ids: Iterable[str | bytes]) -> list[CancelResult]:
        """Cancel many jobs; returns what `cancel` returns, in the order of the ids. At most 250 in one step."""
        return await self._in_batches(ids, partial(self._session.storage.cancel, self.name))

    async def retry_many(self, ids: Iterable[str | bytes]) -> list[Handle[Any] | None]:
        """Run failed or cancelled jobs again with their old payloads; returns handles in the order of the ids, and None
        for a job without a payload. At most 250 are enqueued in one step."""
        bounds = [self._again(id) for id in _clean_ids(ids)]
        handles: list[Handle[Any] | None] = []
        for start in range(0, len(bounds), MAX_ITEMS):
            batch = bounds[start : start + MAX_ITEMS]
            replies = await self._session.storage.enqueue(self.name, [bound.request for bound in batch])
            handles += [
                None if reply.placed is None else Handle(self._session, bound, reply)
                for bound, reply in zip(batch, replies, strict=True)
            ]
        return handles

    async def _in_batches(self, ids: Iterable[str | bytes], call: Callable[[list[str]], Awaitable[list[V]]]) -> list[V]:
        """Call a verb of the storage with at most 250 ids at once, and return all of its replies."""
        names = _clean_ids(ids)
        replies: list[V] = []
        for start in range(0, len(names), MAX_ITEMS):
            replies += await call(names[start : start + MAX_ITEMS])
        return replies

    # The whole queue

    async def jobs(self, state: State | str | None = None) -> AsyncIterator[JobInfo]:
        """Yield the jobs of one state, or of all, without payloads and results. A job that changes its state meanwhile
        may be missed or appear twice."""
        wanted = None if state is None else to_state(state)
        after: str | None = None
        while True:
            page = await self._session.storage.scan(self.name, state=wanted, after=after)
            for job in page.jobs:
                yield info_of(self._session, self.name, job)
            after = page.after
            if after is None:
                return

    async def stats(self) -> Stats:
        """Return the counts of this queue, the age of its oldest ready job, and its workers."""
        snapshot = await self._session.storage.snapshot([self.name])
        for queue in snapshot.queues:
            if queue.queue == self.name:
                if queue.problem:
                    raise StorageUnavailable(queue.problem)
                return stats_of(queue)
        return Stats(queue=self.name, workers=snapshot.workers_of(self.name))

    async def pause(self, *, reason: str = "") -> None:
        """Let no worker and no `lease` take jobs of this queue, until `resume`. Running jobs continue."""
        await self._session.storage.pause(self.name, True, reason=reason)

    async def resume(self) -> None:
        """Let workers take jobs of this queue again."""
        await self._session.storage.pause(self.name, False)

    async def sweep(self, *, worker: str | None = None) -> Swept:
        """Take back expired leases and delete forgotten records, at most 100 of each. Workers do this too, also idle
        ones. With `worker`, take back all of its leases now: only for a worker that is known to be dead, or runs may
        overlap."""
        return await self._session.storage.sweep(self.name, worker=worker)

    async def repair(self, *, dry_run: bool = False) -> Repaired:
        """Check the invariants of every record and repair those that break one. `problems` lists them."""
        return await audit(self._session.storage, self.name, repair=not dry_run)

    PURGED = (State.WAITING, State.COMPLETED, State.FAILED, State.CANCELLED)

    async def purge(self, states: Collection[State | str] = PURGED) -> int:
        """Delete the jobs of these states, and ask `running` ones to stop. Returns the number of deleted jobs."""
        wanted = [to_state(state) for state in states]
        deleted = 0
        while (step := await self._session.storage.purge(self.name, wanted)) > 0:
            deleted += step
        return deleted

    async def delete(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> bool:
        """Delete the queue and its jobs. Asks running jobs to stop and waits for them. Returns False if the queue has
        jobs after `wait` seconds, because some still run or are enqueued all the time: the queue stays paused then, so
        call this again. True means that it was deleted: a job that is enqueued later makes a new queue."""
        storage, time = self._session.storage, asyncio.get_running_loop().time
        deadline, before = _deadline(to_wait_s(wait)), math.inf
        purge_until = max(deadline, time() + LEAST_PURGE_S)
        await self.pause(reason="being deleted")
        while left := await storage.drop(self.name):
            shrinks, before = left < before and time() < purge_until, left
            if shrinks or (await storage.sweep(self.name)).stalled:
                continue
            if time() >= deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    async def events(self) -> AsyncIterator[Event]:
        """Yield the events of this queue from now on. Some may be lost, so do not wait for a certain one."""
        async with self._session.storage.subscribe(Topic(self.name)) as events:
            async for event in events:
                if event.happened:
                    yield event


def _clean_ids(ids: Iterable[str | bytes]) -> list[str]:
    if isinstance(ids, str | bytes):
        raise OptionError(f"ids must be a list of ids, not {ids!r:.60}: pass [id], or use the method for one id")
    return [clean_id(id) for id in ids]


def _deadline(wait_s: float | None) -> float:
    return math.inf if wait_s is None else asyncio.get_running_loop().time() + wait_s
