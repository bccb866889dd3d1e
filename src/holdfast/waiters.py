"""Waiting for a job's end: subscribe, make sure the outcome will be kept, look, and look again on every hint.

A hint that is lost costs at most one `LOOK_EVERY_S`; the record is the truth.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from holdfast.errors import JobCancelled, JobForgotten, OptionError, WaitTimeout
from holdfast.events import Event, Topic
from holdfast.jobs import Kept, Outcome, State
from holdfast.machine import Answer, answer
from holdfast.storage import Storage

LOOK_EVERY_S = 1.0
MAX_WAIT_S = 30 * 86_400
"""A month: who waits longer says None."""
KEEP_MARGIN_MS = 10_000
"""An outcome is kept for this much longer than its waiter waits."""
KEEP_FOREVER_MS = 60_000
"""A waiter without a limit asks for this much, again and again."""
ASK_AGAIN_S = 30.0


async def wait(storage: Storage, queue: str, id: str, generation: int, *, wait_s: float | None = 30.0) -> Outcome:
    """How a generation of a job ended: completed or failed.

    Raises `JobCancelled`, `JobForgotten`, or `WaitTimeout` after `wait_s` seconds; 0 looks once, None waits for ever.
    """
    if wait_s is not None and not 0 <= wait_s <= MAX_WAIT_S:
        raise OptionError(f"wait is a number of seconds from 0 to {MAX_WAIT_S}, or None for ever, not {wait_s!r:.40}")
    async with storage.subscribe(Topic(queue, "ends", id)) as events:
        deadline = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        asked_at = await _ask_to_keep(storage, queue, id, wait_s)
        hint: Event | None = None
        while True:
            told: Outcome | Answer | None = _told(hint, generation)
            if told is None:
                (job,) = await storage.get(queue, [id])
                told = answer(job, generation)
            if isinstance(told, Outcome):
                if told.state is State.CANCELLED:
                    raise JobCancelled(f"job {id!r} in {queue} was cancelled")
                return told
            if told is Answer.DROPPED:
                raise JobCancelled(f"the request for job {id!r} in {queue} was cancelled while an earlier run went on")
            if told is Answer.FORGOTTEN:
                raise JobForgotten(f"job {id!r} in {queue} has no record any more: its outcome was not kept")
            now = asyncio.get_running_loop().time()
            if deadline is not None and now >= deadline:
                raise WaitTimeout(f"job {id!r} in {queue} did not end within {wait_s} s; it goes on")
            if wait_s is None and now >= asked_at + ASK_AGAIN_S:
                asked_at = await _ask_to_keep(storage, queue, id, wait_s)
            hint = await _hint(events, LOOK_EVERY_S if deadline is None else min(LOOK_EVERY_S, deadline - now))


def _told(hint: Event | None, generation: int) -> Outcome | None:
    """The outcome that a hint brought along, if it is just that of the generation waited for. Any other could be
    younger than one that the record still has."""
    return hint.outcome if hint is not None and hint.outcome and hint.outcome.generation == generation else None


async def _ask_to_keep(storage: Storage, queue: str, id: str, wait_s: float | None) -> float:
    ttl_ms = KEEP_FOREVER_MS if wait_s is None else round(1000 * wait_s) + KEEP_MARGIN_MS
    (kept,) = await storage.keep(queue, [id], ttl_ms, at_least=True)
    if kept is Kept.MISSING:
        raise JobForgotten(f"job {id!r} in {queue} has no record (any more)")
    return asyncio.get_running_loop().time()


async def _hint(events: AsyncIterator[Event], seconds: float) -> Event | None:
    """The next hint, or None when it is time to look anyway."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(events)
    except TimeoutError:
        return None
    except StopAsyncIteration:
        await asyncio.sleep(seconds)  # Whoever gave the hints has no more: look as if they were lost.
        return None
