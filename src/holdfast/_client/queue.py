"""A queue by its name: produce any payload, pull jobs under a lease, operate the queue. Needs no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

import msgspec

from holdfast._client import request, waiters
from holdfast._client.lease import Lease, read_token
from holdfast._client.request import BoundRequest, Handle, RequestTemplate
from holdfast._client.session import Session
from holdfast._client.task import queue_config
from holdfast._client.waiters import to_wait_s, value_of
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Job, Release, Request, Settlement, State, Update, Work
from holdfast._core.options import (
    DEFAULT_WAIT_S,
    OPTIONS,
    EnqueueOptions,
    PullOptions,
    Seconds,
    check_names,
    from_at,
    to_ms,
)
from holdfast._core.replies import CancelResult, Claim, KeepResult, Repaired, Swept
from holdfast._core.retry_policy import admit, fence_of
from holdfast._worker.telemetry import default_worker_name
from holdfast.errors import HoldfastError, JobError, JobNotFound, OptionError, StorageUnavailable
from holdfast.storage import audit
from holdfast.storage.validation import check_queue, clean_id

if TYPE_CHECKING:
    from holdfast._client.sync import SyncQueue

R = TypeVar("R")

COPIED = ("id", "state", "generation", "priority", "attempts", "retries", "stalls", "timeouts", "worker", "deferred")
"""Fields of a record that users see unchanged."""


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is stored now."""

    queue: str
    id: str
    state: State
    generation: int
    payload: Any
    """Decoded; bytes if this app cannot decode it. None once the job has completed, and in lists."""
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
    """Counts of one queue."""

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
    """How often each event has happened since the queue was created."""


class Queue:
    """A queue by its name. See `Holdfast.queue`."""

    def __init__(self, session: Session, name: str, options: PullOptions) -> None:
        self._session = session
        self.name = check_queue(name)
        check_names(f"queue {name}", PullOptions, options)
        self._config = queue_config(name, PullOptions, options)
        self._template = RequestTemplate(name, {})
        self._worker = f"pull-{default_worker_name()}"

    def __repr__(self) -> str:
        return f"<queue {self.name}>"

    @property
    def sync(self) -> SyncQueue:
        """The same verbs, blocking: for code that has no event loop."""
        from holdfast._client.sync import SyncQueue

        return SyncQueue(self._session, self)

    # Producing

    def bind(self, payload: object, **options: Unpack[EnqueueOptions]) -> BoundRequest[Any]:
        """A request that is not sent yet: for `app.enqueue_many` and `app.enqueue_in`."""
        check_names("enqueue", EnqueueOptions, options)
        return self._bind(payload, options)

    async def enqueue(self, payload: object, **options: Unpack[EnqueueOptions]) -> Handle[Any]:
        """Request a job: any JSON value, or bytes. When this returns, the job is stored.

        Options: `id, on_conflict, delay, run_at, priority, result_ttl, dedup_ttl, timeout, max_retries, max_stalls,
        max_timeouts`.
        """
        return await request.enqueue(self._session, self.bind(payload, **options))

    async def call(
        self, payload: object, *, wait: Seconds | None = DEFAULT_WAIT_S, **options: Unpack[EnqueueOptions]
    ) -> Any:
        """Request a job and wait for its result; a cached result returns at once. Raises as `Handle.result` does."""
        check_names("call", EnqueueOptions, options)
        return await request.call(self._session, self._bind(payload, {**options, "wait": wait}))

    async def retry(self, id: str | bytes) -> Handle[Any]:
        """Run a failed or cancelled job once more, as it was. Raises `JobNotFound` if there is nothing to run."""
        again = Request(id=clean_id(id), work=Work(None), update=Update(payload=False), custom_id=True)
        return await request.enqueue(self._session, BoundRequest(self._template, again))

    def _bind(self, payload: object, options: Mapping[str, Any]) -> BoundRequest[Any]:
        template = RequestTemplate(self.name, options) if options else self._template
        data, codec = self._session.codecs.encode_any(f"the payload for {self.name}", payload)
        return request.bind(template, data, codec, template.id)

    # Pulling

    async def lease(self, *, seconds: Seconds = 30, wait: Seconds | None = DEFAULT_WAIT_S) -> Lease | None:
        """Take the next job for `seconds` (0.1 to 86,400). Waits up to `wait` seconds for a ready job (default 30;
        0 checks once; None waits without a limit). Returns None if there is none."""
        seconds_ms = OPTIONS["seconds"].convert(seconds)
        wait_s = to_wait_s(wait)
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        lease, poll_s = await self._take(seconds_ms)
        if lease is not None or wait_s == 0:
            return lease
        async with self._session.storage.subscribe(Topic(self.name, "wake")) as events:
            while True:
                lease, poll_s = await self._take(seconds_ms)
                left = None if deadline is None else deadline - asyncio.get_running_loop().time()
                if lease is not None or (left is not None and left <= 0):
                    return lease
                await events.within(min(poll_s, poll_s if left is None else left))

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
        except BaseException:  # Cancelled, or the program ends: not a failure of the job.
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
        queue, id, fence, worker, length_ms = read_token(token)
        if queue != self.name:
            raise OptionError(f"that is a lease of {queue}, not of {self.name}")
        (job,) = await self._session.storage.get(self.name, [clean_id(id)])
        if job is None or job.run is None or (job.run.fence, job.run.worker) != (fence, worker):
            return None
        return Lease(self._session, self._config, job, worker, length_ms, restored=True)

    async def _take(self, seconds_ms: int) -> tuple[Lease | None, float]:
        """The next job that may run; without one, None and the time until the next poll in seconds."""
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
            if loop.time() - sent_at >= seconds_ms / 1000:  # The answer took longer than the lease.
                refused = Release(job.id, fence_of(job))
            if refused is None:
                return Lease(self._session, self._config, job, self._worker, seconds_ms), 0.0
            await self._session.storage.settle(self.name, [refused], worker=self._worker)

    async def _claim(self, seconds_ms: int) -> Claim:
        """Claim one job. If the caller is cancelled meanwhile, release it."""
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

    def _info(self, job: Job) -> JobInfo:
        decode, outcome = self._session.codecs.decode_or_leave, job.outcome
        error = job.error if outcome is None else outcome.error
        return JobInfo(
            queue=self.name,
            payload=decode(job.work.payload, job.work.codec),
            run_at=from_at(job.run_at),
            created_at=from_at(job.created_at),
            progress=decode(None if job.run is None else job.run.progress, "json"),
            result=None if outcome is None else decode(outcome.result, outcome.codec),
            error=None if error is None else decode_error(error),
            **{name: getattr(job, name) for name in COPIED},
        )

    async def get(self, id: str | bytes) -> JobInfo | None:
        """A job as it is now; None if there is none, or it is forgotten."""
        (job,) = await self._session.storage.get(self.name, [clean_id(id)])
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
        (job,) = await self._session.storage.get(self.name, [name])
        if job is None:
            raise JobNotFound(f"there is no job {name!r:.80} in {self.name}: it was never requested, or is forgotten")
        outcome = job.outcome or await waiters.wait(
            self._session.storage, self.name, name, job.generation, wait_s=to_wait_s(wait)
        )
        return value_of(self._session, self.name, name, outcome, type)

    async def keep(self, id: str | bytes, ttl: Seconds) -> KeepResult:
        """Change how long the end of a job is remembered: `KEPT`, `LIVE` (it counts from its end) or `MISSING`."""
        (kept,) = await self._session.storage.keep(self.name, [clean_id(id)], to_ms("ttl", ttl))
        return kept

    async def cancel(self, id: str | bytes) -> CancelResult:
        """Stop a job: `CANCELLED` (and truthy) if it waited, `ASKED` if it runs, `FINISHED` or `MISSING`."""
        (reply,) = await self._session.storage.cancel(self.name, [clean_id(id)])
        return reply

    # The whole queue

    async def jobs(self, state: State | str | None = None) -> AsyncIterator[JobInfo]:
        """List jobs, without payloads and results: of one state in its order, or of all. A job that changes its state
        meanwhile may be missed or be seen twice."""
        after: str | None = None
        wanted = None if state is None else _state(state)
        while True:
            page = await self._session.storage.scan(self.name, state=wanted, after=after)
            for job in page.jobs:
                yield self._info(job)
            after = page.after
            if after is None:
                return

    async def stats(self) -> Stats:
        """Counts, the age of the oldest ready job, and who serves the queue."""
        snapshot = await self._session.storage.snapshot()
        for queue in snapshot.queues:
            if queue.queue == self.name:
                if queue.problem:
                    raise StorageUnavailable(queue.problem)
                counts = {name: getattr(queue, name) for name in Stats.__struct_fields__ if hasattr(queue, name)}
                return Stats(oldest_ready_seconds=queue.oldest_ready_ms / 1000, **counts)
        served = [(worker.worker, worker.facts.get("queues")) for worker in snapshot.workers]
        return Stats(workers=[name for name, queues in served if isinstance(queues, list) and self.name in queues])

    async def pause(self, *, reason: str = "") -> None:
        """Stop workers and callers of `lease` from taking jobs, until `resume`. Running jobs continue."""
        await self._session.storage.pause(self.name, True, reason=reason)

    async def resume(self) -> None:
        """Let workers take jobs again."""
        await self._session.storage.pause(self.name, False)

    async def sweep(self, *, worker: str | None = None) -> Swept:
        """Take back expired leases and forget what is due. Workers do this by themselves. With `worker`, take back all
        of its leases at once: for a worker that is known to be dead, else runs may overlap."""
        return await self._session.storage.sweep(self.name, worker=worker)

    async def repair(self, *, dry_run: bool = False) -> Repaired:
        """Check every record against the invariants and repair the wrong ones. `problems` lists what was found."""
        return await audit(self._session.storage, self.name, repair=not dry_run)

    PURGED = (State.WAITING, State.COMPLETED, State.FAILED, State.CANCELLED)

    async def purge(self, states: Collection[State | str] = PURGED) -> int:
        """Delete jobs of these states (`running` ones are asked to cancel): how many."""
        wanted = [_state(state) for state in states]
        deleted = 0
        while (step := await self._session.storage.purge(self.name, wanted)) > 0:
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
            page = await self._session.storage.scan(self.name, limit=1)
            if not page.jobs:
                await self._session.storage.purge(self.name, tuple(State), drop=True)
                return True
            swept = await self._session.storage.sweep(self.name)
            if swept.stalled:
                continue
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.1)

    async def events(self) -> AsyncIterator[Event]:
        """What happens in the queue from now on. Hints: some may be lost, so never wait for one alone."""
        async with self._session.storage.subscribe(Topic(self.name)) as events:
            async for event in events:
                if event.happened:
                    yield event


def _state(state: State | str) -> State:
    try:
        return State(state)
    except ValueError:
        raise OptionError(f"{state!r:.40} is not a state: use one of {', '.join(State)}") from None
