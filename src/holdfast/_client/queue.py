"""A queue by its name: produce any payload, pull jobs under a lease, look after it. No task's code is needed."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from types import UnionType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from holdfast._client.lease import MAX_SECONDS_MS, MIN_SECONDS_MS, Lease, read_token
from holdfast._client.session import BoundRequest, Session
from holdfast._client.task import Handle, backoff_of, bind
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.failure import decode_error
from holdfast._core.jobs import (
    CancelResult,
    Claim,
    Job,
    KeepResult,
    Release,
    Repaired,
    Request,
    Settlement,
    State,
    Swept,
    Update,
    Work,
    WorkerFacts,
)
from holdfast._core.options import (
    DEFAULT_WAIT_S,
    EnqueueOptions,
    Seconds,
    check_known,
    from_at,
    to_count,
    to_ms,
    to_wait_s,
)
from holdfast._core.retry_policy import PULL, Policy, admit, fence_of
from holdfast.errors import HoldfastError, JobError, JobNotFound, OptionError
from holdfast.storage import audit
from holdfast.storage.validation import check_queue, clean_id

if TYPE_CHECKING:
    from holdfast._client.sync import SyncQueue

R = TypeVar("R")


class PullOptions(TypedDict, total=False):
    """The limits of a queue that is pulled from: none, unless given."""

    max_retries: int
    max_stalls: int
    min_backoff: Seconds
    max_backoff: Seconds
    result_ttl: Seconds
    failure_ttl: Seconds


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is stored now."""

    queue: str
    id: str
    state: State
    generation: int
    payload: Any
    """Decoded; bytes if this app does not know how. None once the job has completed, and in lists."""
    priority: int
    run_at: datetime
    created_at: datetime
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    worker: str | None
    progress: Any
    result: Any
    error: JobError | None
    deferred: bool
    """Another request waits for the present run to end."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A queue in numbers."""

    ready: int = 0
    scheduled: int = 0
    running: int = 0
    retrying: int = 0
    deferred: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    oldest_ready_seconds: float = 0.0
    paused: bool = False
    reason: str = ""
    workers: list[str] = []
    totals: dict[str, int] = {}
    """How often each event has happened since the queue was made."""


class Queue:
    """A queue by its name. See `Holdfast.queue`."""

    def __init__(self, app: Session, name: str, options: PullOptions) -> None:
        self.app = app
        self.name = check_queue(name)
        check_known(f"queue {name}", options, PullOptions)
        self.policy = _policy(options)
        self._worker = f"pull-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    def __repr__(self) -> str:
        return f"<queue {self.name}>"

    @property
    def sync(self) -> SyncQueue:
        """The same verbs, blocking: for code that has no event loop."""
        from holdfast._client.sync import SyncQueue

        return SyncQueue(self)

    # Producing

    def bind(self, payload: object, **options: Unpack[EnqueueOptions]) -> BoundRequest[Any]:
        """A request that is not sent yet: for `app.enqueue_many` and `app.enqueue_in`."""
        check_known("enqueue", options, EnqueueOptions)
        data, codec = self.app.codecs.encode_any(f"the payload for {self.name}", payload)
        return bind(self.name, data, codec, lambda: Any, cast("Any", options))

    async def enqueue(self, payload: object, **options: Unpack[EnqueueOptions]) -> Handle[Any]:
        """Ask for a job: any JSON value, or bytes. When this returns, the job is stored.

        Options: `id, on_conflict, delay, run_at, priority, result_ttl, dedup_ttl, timeout, max_retries, max_stalls,
        max_timeouts`.
        """
        bound = self.bind(payload, **options)
        return Handle(self.app, bound, await self.app.enqueue(bound))

    async def call(
        self, payload: object, *, wait: Seconds | None = DEFAULT_WAIT_S, **options: Unpack[EnqueueOptions]
    ) -> Any:
        """Ask for a job and wait for its result; a cached one comes at once. Raises as `Handle.result` does."""
        bound = self.bind(payload, **options)
        bound.wait_s = to_wait_s(wait)
        return await self.app.call(bound)

    async def retry(self, id: str | bytes) -> Handle[Any]:
        """Run a failed or cancelled job once more, as it was. Raises `JobNotFound` if there is nothing to run."""
        request = Request(clean_id(id), Work(None), update=Update(payload=False), custom_id=True)
        bound: BoundRequest[Any] = BoundRequest(self.name, request, lambda: Any, raises=False, wait_s=DEFAULT_WAIT_S)
        return Handle(self.app, bound, await self.app.enqueue(bound))

    # Pulling

    async def lease(self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S) -> Lease | None:
        """Take the next job for `seconds` (0.1 to 86,400), waiting up to `wait` seconds for one to be ready (30; 0
        looks once, None waits for ever). None if there is none."""
        seconds_ms = to_ms("seconds", seconds, MIN_SECONDS_MS, MAX_SECONDS_MS)
        wait_s = to_wait_s(wait)
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        lease, look_s = await self._take(seconds_ms)
        if lease is not None or wait_s == 0:
            return lease
        async with self.app.storage.subscribe(Topic(self.name, "wake")) as events:
            while True:
                lease, look_s = await self._take(seconds_ms)
                left = None if deadline is None else deadline - asyncio.get_running_loop().time()
                if lease is not None or (left is not None and left <= 0):
                    return lease
                await events.within(min(look_s, look_s if left is None else left))

    @asynccontextmanager
    async def leased(
        self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S, extend: bool = True
    ) -> AsyncGenerator[Lease | None]:
        """A lease for a block: completed at its end unless you settled it, retried if the block raises, extended
        meanwhile. None if there is no job.

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
        except BaseException:  # Cancelled, or the program ends: that is no fault of the job's.
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
        """A lease of this queue that was taken before, here or elsewhere, by its `token`; None if it is lost."""
        told = read_token(token)
        if told.queue != self.name:
            raise OptionError(f"that is a lease of {told.queue}, not of {self.name}")
        (job,) = await self.app.storage.get(self.name, [clean_id(told.id)])
        if job is None or job.run is None or (job.run.fence, job.run.worker) != (told.fence, told.worker):
            return None
        return Lease(self.app, self.name, self.policy, job, told.worker, told.length_ms, restored=True)

    async def _take(self, seconds_ms: int) -> tuple[Lease | None, float]:
        """The next job that may be worked on, and how long to wait before looking again if there is none."""
        loop = asyncio.get_running_loop()
        while True:
            sent_at = loop.time()
            claim = await self._claim(seconds_ms)
            if not claim.jobs:
                soonest_s = POLL_INTERVAL_S if claim.next_poll_at is None else (claim.next_poll_at - claim.now) / 1e6
                return None, min(POLL_INTERVAL_S, max(soonest_s, 0.001))
            (job,) = claim.jobs
            refused: Settlement | None = admit(job, self.policy)
            if loop.time() - sent_at >= seconds_ms / 1000:  # The answer was so long on its way: it may be another's.
                refused = Release(job.id, fence_of(job))
            if refused is None:
                return Lease(self.app, self.name, self.policy, job, self._worker, seconds_ms), 0.0
            await self.app.storage.settle(self.name, [refused], worker=self._worker)

    async def _claim(self, seconds_ms: int) -> Claim:
        """Claim, and give back what was claimed if nobody waits for it any more."""
        storage = self.app.storage
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
        """A job as it is now; None if there is none, or it is forgotten."""
        (job,) = await self.app.storage.get(self.name, [clean_id(id)])
        return None if job is None else self._info(job)

    @overload
    async def result(self, id: str | bytes, *, type: type[R], wait: Seconds | None = DEFAULT_WAIT_S) -> R: ...
    @overload
    async def result(self, id: str | bytes, *, type: UnionType, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    @overload
    async def result(self, id: str | bytes, *, wait: Seconds | None = DEFAULT_WAIT_S) -> Any: ...
    async def result(self, id: str | bytes, *, type: Any = Any, wait: Seconds | None = DEFAULT_WAIT_S) -> Any:
        """What a job gave, as a `type`. Waits for one that has not ended. Raises as `Handle.result` does."""
        name = clean_id(id)
        (job,) = await self.app.storage.get(self.name, [name])
        if job is None:
            raise JobNotFound(f"there is no job {name!r:.80} in {self.name}: it was never asked for, or is forgotten")
        outcome = job.outcome or await self.app.wait_for(self.name, name, job.generation, to_wait_s(wait))
        return self.app.value_of(self.name, name, outcome, type)

    async def keep(self, id: str | bytes, ttl: Seconds) -> KeepResult:
        """Change how long the end of a job is remembered: `KEPT`, `LIVE` (it counts from its end) or `MISSING`."""
        (kept,) = await self.app.storage.keep(self.name, [clean_id(id)], to_ms("ttl", ttl))
        return kept

    async def cancel(self, id: str | bytes) -> CancelResult:
        """Stop a job: `CANCELLED` (and truthy) if it waited, `ASKED` if it runs, `FINISHED` or `MISSING`."""
        (reply,) = await self.app.storage.cancel(self.name, [clean_id(id)])
        return reply

    # The whole queue

    async def jobs(self, state: State | str | None = None) -> AsyncIterator[JobInfo]:
        """List jobs, without payloads and results: of one state in its order, or of all. A job that changes its state
        meanwhile may be missed or be seen twice."""
        after: str | None = None
        wanted = None if state is None else _state(state)
        while True:
            page = await self.app.storage.scan(self.name, state=wanted, after=after)
            for job in page.jobs:
                yield self._info(job)
            after = page.after
            if after is None:
                return

    async def stats(self) -> Stats:
        """Counts, the age of the oldest ready job, and who serves the queue."""
        snapshot = await self.app.storage.snapshot()
        for queue in snapshot.queues:
            if queue.queue == self.name:
                counts = {name: getattr(queue, name) for name in Stats.__struct_fields__ if hasattr(queue, name)}
                return Stats(oldest_ready_seconds=queue.oldest_ready_ms / 1000, **counts)
        workers = [worker.worker for worker in snapshot.workers if self._is_served_by(worker.facts)]
        return Stats(workers=workers)

    def _is_served_by(self, facts: WorkerFacts) -> bool:
        queues = facts.get("queues")
        return isinstance(queues, list) and self.name in queues

    async def pause(self, *, reason: str = "") -> None:
        """Let nobody take jobs, until `resume`. What runs goes on."""
        await self.app.storage.pause(self.name, True, reason=reason)

    async def resume(self) -> None:
        """Let workers take jobs again."""
        await self.app.storage.pause(self.name, False)

    async def sweep(self, *, worker: str | None = None) -> Swept:
        """Take back expired leases and forget what is due. Workers do this by themselves. With `worker`, take back all
        of its leases at once: for a worker that is known to be dead, else runs may overlap."""
        return await self.app.storage.sweep(self.name, worker=worker)

    async def repair(self, *, dry_run: bool = False) -> Repaired:
        """Check every record against the invariants and mend what is wrong. `problems` is empty when all is well."""
        return await audit(self.app.storage, self.name, repair=not dry_run)

    PURGED = (State.WAITING, State.COMPLETED, State.FAILED, State.CANCELLED)

    async def purge(self, states: Collection[State | str] = PURGED) -> int:
        """Delete jobs of these states (`running` ones are asked to cancel): how many."""
        wanted = [_state(state) for state in states]
        deleted = 0
        while (step := await self.app.storage.purge(self.name, wanted)) > 0:
            deleted += step
        return deleted

    async def delete(self, *, wait: Seconds | None = DEFAULT_WAIT_S) -> bool:
        """Delete the queue and all that is in it. Running jobs are asked to cancel, and waited for; False if some still
        run after `wait`: the queue stays paused then, so ask again."""
        wait_s = to_wait_s(wait)
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        await self.pause(reason="being deleted")
        while True:
            await self.purge(tuple(State))
            page = await self.app.storage.scan(self.name, limit=1)
            if not page.jobs:
                await self.app.storage.purge(self.name, tuple(State), drop=True)
                return True
            swept = await self.app.storage.sweep(self.name)
            if swept.stalled:
                continue
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.1)

    async def events(self) -> AsyncIterator[Event]:
        """What happens in the queue from now on. Hints: some may be lost, so never wait for one alone."""
        async with self.app.storage.subscribe(Topic(self.name)) as events:
            async for event in events:
                if event.happened:
                    yield event

    def _info(self, job: Job) -> JobInfo:
        decode = self.app.codecs.decode_or_leave
        outcome = job.outcome
        error = job.error if outcome is None else outcome.error
        result = None if outcome is None else decode(outcome.result, outcome.codec)
        progress = None if job.run is None else job.run.progress
        return JobInfo(
            queue=self.name,
            id=job.id,
            state=job.state,
            generation=job.generation,
            payload=decode(job.work.payload, job.work.codec),
            priority=job.priority,
            run_at=from_at(job.run_at),
            created_at=from_at(job.created_at),
            attempts=job.attempts,
            retries=job.retries,
            stalls=job.stalls,
            timeouts=job.timeouts,
            worker=job.worker,
            progress=decode(progress, "json"),
            result=result,
            error=None if error is None else decode_error(error),
            deferred=job.deferred,
        )


def _policy(options: PullOptions) -> Policy:
    asked: dict[str, Any] = dict(options)
    changes: dict[str, int] = {
        name: to_count(name, asked[name]) for name in ("max_retries", "max_stalls") if name in asked
    }
    for name in ("result_ttl", "failure_ttl"):
        if name in asked:
            changes[f"{name}_ms"] = to_ms(name, asked[name])
    return msgspec.structs.replace(PULL, **changes, **backoff_of(PULL, asked))


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise OptionError(f"{state!r:.40} is not a state: use one of {', '.join(State)}") from None
