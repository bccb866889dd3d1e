"""Waiting for the end of a job: subscribe, ask the storage to keep the outcome, poll, and poll again on every event.

A lost event delays the waiter by at most one `POLL_INTERVAL_S`. The record decides, not the event.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from msgspec.structs import replace

from holdfast._client.session import Session
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Outcome, Request, State
from holdfast._core.lifecycle import MAX_BRIEF, Answer, answer
from holdfast._core.options import MAX_WAIT_S, Seconds, to_ms
from holdfast._core.replies import Enqueued, KeepResult, Placed
from holdfast._worker.current_job import waiting_for
from holdfast.errors import JobCancelled, JobFailed, JobForgotten, StorageUnavailable, WaitTimeout
from holdfast.storage import Storage
from holdfast.storage.subscriptions import Subscription

KEEP_MARGIN_MS = 10_000
"""An outcome is kept for this much longer than its waiter waits."""
KEEP_FOREVER_MS = 60_000
"""A waiter without a limit asks to keep the outcome for this time, and asks again every `ASK_AGAIN_S`."""
ASK_AGAIN_S = 30.0
LISTEN_S = 2.0
"""Maximum time to subscribe. After that the waiter only polls."""
LAST_POLL_S = 1.0
"""Minimum time for the reply to a poll, also past the end of the wait."""


async def wait(
    storage: Storage,
    queue: str,
    id: str,
    generation: int,
    *,
    wait_s: float | None = 30.0,
    result_ttl_ms: int | None = None,
) -> Outcome:
    """Wait for the end of a generation of a job, completed or failed: 0 polls once, None waits without a limit. Raises
    `JobCancelled`, `JobForgotten`, or `WaitTimeout`. `result_ttl_ms` is what the caller knows of it, for errors."""
    wait_s = to_wait_s(wait_s)
    async with _Waiter(storage, queue, id, wait_s, result_ttl_ms) as waiter:
        try:
            async with waiter.in_time():
                await waiter.ask_to_keep()
        except TimeoutError:
            raise WaitTimeout(f"{waiter}: the storage did not answer within {wait_s:g} s") from None
        return await waiter.wait(generation, poll_first=True)


async def ask(
    storage: Storage, queue: str, request: Request, *, wait_s: float | None, check: Callable[[Enqueued], None]
) -> tuple[Enqueued, Outcome]:
    """Enqueue a request and wait for its end. Subscribes before it enqueues, so that the usual answer needs no poll.
    `check` may raise for the reply. Raises like `wait`."""
    async with _Waiter(storage, queue, request.id, wait_s, request.work.result_ttl_ms) as waiter:
        try:
            async with waiter.in_time():
                (reply,) = await storage.enqueue(queue, [replace(request, keep_ms=waiter.keep_ms)])
        except TimeoutError:
            raise WaitTimeout(f"{waiter}: the storage did not answer within {wait_s:g} s; it may be stored") from None
        check(reply)
        if reply.outcome is not None:
            return reply, reply.outcome
        new = reply.placed is Placed.NEW and wait_s != 0
        return reply, await waiter.wait(reply.generation, poll_first=not new)


def to_wait_s(value: Seconds | None) -> float | None:
    """Check and convert a `wait` to seconds; None waits without a limit."""
    return None if value is None else to_ms("wait", value, 0, MAX_WAIT_S * 1000) / 1000


def value_of(session: Session, queue: str, id: str, outcome: Outcome, returns: Any) -> Any:
    """Return the result of a completed job, decoded as `returns`. Raises `JobFailed` or `JobCancelled`."""
    if outcome.state is State.CANCELLED:
        raise JobCancelled(f"job {id!r} in {queue} was cancelled")
    if outcome.state is State.FAILED:
        error = decode_error(outcome.error)
        raise JobFailed(f"job {id!r} in {queue} failed: {error}", error=error)
    if outcome.result is None:
        return None
    return session.codecs.decode(f"the result of job {id!r} in {queue}", outcome.result, outcome.codec, returns)


def why_forgotten(result_ttl_ms: int | None) -> str:
    """Return why a job may have no record, and what to do, as the end of a sentence."""
    if result_ttl_ms == 0:
        return (
            "with result_ttl=0 an outcome is kept only for a caller that waits when the job ends:"
            " pass a larger result_ttl, or use call"
        )
    kept = (
        "after its result_ttl (by default 1 hour, or 5 minutes without a result and a chosen id),"
        f" or as the oldest of more than {MAX_BRIEF:,} that no option asks for"
        if result_ttl_ms is None
        else f"after result_ttl={result_ttl_ms / 1000:g} s"
    )
    return (
        f"its outcome was deleted {kept}, it was purged, or it was never enqueued:"
        " pass a larger result_ttl to keep outcomes for longer"
    )


class _Waiter:
    """One wait for one job. Use it with `async with`."""

    def __init__(
        self, storage: Storage, queue: str, id: str, wait_s: float | None, result_ttl_ms: int | None = None
    ) -> None:
        self._storage = storage
        self._queue = queue
        self._id = id
        self._wait_s = wait_s
        self._result_ttl_ms = result_ttl_ms
        self._asked_at = asyncio.get_running_loop().time()
        self._deadline = None if wait_s is None else self._asked_at + wait_s
        self._storage_error: StorageUnavailable | None = None
        self._listening = AsyncExitStack()
        self._lends = False
        self._events: Subscription | None = None
        self.keep_ms = KEEP_FOREVER_MS if wait_s is None else round(1000 * wait_s) + KEEP_MARGIN_MS

    def __str__(self) -> str:
        return f"job {self._id!r} in {self._queue}"

    async def __aenter__(self) -> Self:
        """Subscribe to the end of the job, unless that takes too long, or the wait is a single poll."""
        if self._wait_s == 0:
            return self
        listening = self._storage.subscribe(Topic(self._queue, "ends", self._id))
        with suppress(StorageUnavailable, TimeoutError):
            async with asyncio.timeout(LISTEN_S if self._wait_s is None else min(LISTEN_S, self._wait_s / 2)):
                self._events = await self._listening.enter_async_context(listening)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._listening.aclose()

    def in_time(self) -> asyncio.Timeout:
        """Return the time limit of a call: the rest of the wait, but at least `LAST_POLL_S`."""
        now = asyncio.get_running_loop().time()
        return asyncio.timeout_at(None if self._deadline is None else max(self._deadline, now + LAST_POLL_S))

    async def ask_to_keep(self) -> None:
        (kept,) = await self._storage.keep(self._queue, [self._id], self.keep_ms, at_least=True)
        if kept is KeepResult.MISSING:
            raise JobForgotten(f"{self} has no record: {why_forgotten(self._result_ttl_ms)}")
        self._asked_at = asyncio.get_running_loop().time()

    async def wait(self, generation: int, *, poll_first: bool) -> Outcome:
        loop = asyncio.get_running_loop()
        hint: Event | None = None
        poll = poll_first
        while True:
            found: Outcome | Answer | None = None
            if hint is not None and hint.outcome is not None and hint.outcome.generation == generation:
                found = hint.outcome  # The record may have an older outcome than that of another generation.
            if found is None and poll:
                found = await self._poll(generation)
            if isinstance(found, Outcome):
                if found.state is State.CANCELLED:
                    raise JobCancelled(f"{self} was cancelled")
                return found
            if found is Answer.DROPPED:
                raise JobCancelled(f"the request for {self} was cancelled during an earlier run")
            if found is Answer.FORGOTTEN:
                raise JobForgotten(f"{self} has no record any more: {why_forgotten(self._result_ttl_ms)}")
            left = math.inf if self._deadline is None else self._deadline - loop.time()
            if left <= 0:
                why = await self._why_not()
                raise WaitTimeout(f"{self} did not end within {self._wait_s:g} s and is not cancelled{why}")
            if self._wait_s is None and loop.time() >= self._asked_at + ASK_AGAIN_S:
                try:
                    await self.ask_to_keep()
                except StorageUnavailable as error:
                    self._storage_error = error
            if not self._lends:  # The wait is longer than a poll: the run of a handler lends its capacity.
                self._lends = True
                self._listening.enter_context(waiting_for(self._queue))
            pause = min(POLL_INTERVAL_S, left)
            hint = await (asyncio.sleep(pause, None) if self._events is None else self._events.within(pause))
            poll = True

    async def _why_not(self) -> str:
        """Say whether a worker serves the queue, unless the wait was a single poll, which callers repeat."""
        if self._storage_error is not None:
            return f": the storage could not be reached ({self._storage_error})"
        if self._wait_s == 0:
            return ""
        try:
            async with self.in_time():
                workers = (await self._storage.snapshot([self._queue])).workers_of(self._queue)
        except (StorageUnavailable, TimeoutError):
            return ""
        if workers:
            return f": {len(workers)} live worker{'s serve' if len(workers) > 1 else ' serves'} the queue"
        where = self._storage.place
        return f": no live worker serves the queue on {where}. Start one, or check that it uses the same storage"

    async def _poll(self, generation: int) -> Outcome | Answer | None:
        """Read the answer of the record; None if the storage cannot be reached, which does not end the wait."""
        try:
            async with self.in_time():
                (job,) = await self._storage.get(self._queue, [self._id])
        except TimeoutError:
            return None
        except StorageUnavailable as error:
            self._storage_error = error
            return None
        self._storage_error = None
        return answer(job, generation)
