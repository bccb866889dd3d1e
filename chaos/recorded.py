"""Makes a process write down what it asks of the storage and what it is told, and lets its storage's clock be moved.

`install` is called by everybody who takes part, before anything is opened. `python -m chaos.launch worker …` is
`holdfast worker …`, recorded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from chaos import history
from chaos.clocks import SharedClock
from chaos.history import pen
from chaos.setting import CLOCK, CLOCK_KEY
from holdfast._core import clock, jobs, replies
from holdfast.storage import Storage
from holdfast.storage.redis import calls, script

TOKEN = re.compile(rb'"token":"(\w+)"')

T = TypeVar("T")


def sources_with_a_movable_clock(sources: Mapping[str, str]) -> Mapping[str, str]:
    clock_file = sources["clock"]
    assert script.CLOCK in clock_file
    moved = f"{script.CLOCK} + tonumber(call('GET', '{CLOCK_KEY}') or 0)"
    return {**sources, "clock": clock_file.replace(script.CLOCK, moved)}


_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    calls.SOURCES = sources_with_a_movable_clock(script.SOURCES)  # type: ignore[attr-defined]
    shared = SharedClock(os.environ[CLOCK])
    clock.SystemClock.now_us = lambda _: shared.now_us()  # type: ignore[method-assign, assignment]
    for name, verb in VERBS.items():
        setattr(Storage, name, verb(getattr(Storage, name)))


async def _noted(coroutine: Awaitable[T], reply: Callable[[T], history.Line], call: int, kind: Any) -> T:
    """Wait for an answer, and write it down, whatever it is."""
    try:
        answer = await coroutine
    except BaseException as error:
        pen().write(kind(call=call, error=f"{type(error).__name__}: {error}"[:300]))
        raise
    pen().write(reply(answer))
    return answer


def _enqueue(verb: Any) -> Any:
    async def enqueue(self: Storage, queue: str, requests: Sequence[jobs.Request]) -> list[replies.Enqueued]:
        call = pen().number()
        tokens = [TOKEN.search(request.work.payload or b"") for request in requests]
        pen().write(
            history.Asking(
                call=call,
                queue=queue,
                ids=[request.id for request in requests],
                tokens=[found[1].decode() if found else "" for found in tokens],
                delays_ms=[request.delay_ms or 0 for request in requests],
                run_ats=[request.run_at or 0 for request in requests],
                priorities=[request.work.priority for request in requests],
                updates=any(request.update is not None for request in requests),
                waits=any(request.keep_ms for request in requests),
            )
        )

        def reply(answer: list[replies.Enqueued]) -> history.Line:
            return history.Asked(
                call=call,
                placed=[str(one.placed) for one in answer],
                generations=[one.generation for one in answer],
            )

        return await _noted(verb(self, queue, requests), reply, call, history.Asked)

    return enqueue


def _claim(verb: Any) -> Any:
    async def claim(self: Storage, queue: str, limit: int, *, worker: str, lease_ms: int) -> replies.Claim:
        call = pen().number()
        pen().write(history.Claiming(call=call, queue=queue, worker=worker))

        def reply(answer: replies.Claim) -> history.Line:
            return history.Claimed(call=call, claims=[_claim_of(job) for job in answer.jobs])

        return await _noted(verb(self, queue, limit, worker=worker, lease_ms=lease_ms), reply, call, history.Claimed)

    return claim


def _claim_of(job: jobs.Job) -> history.Claim:
    counts = job.attempts, job.retries, job.stalls, job.timeouts
    return history.Claim(job.id, job.generation, job.fence or 0, job.run_at, *counts, job.work.priority)


def _settle(verb: Any) -> Any:
    async def settle(
        self: Storage, queue: str, batch: Sequence[jobs.Settlement], *, worker: str
    ) -> list[replies.SettleResult]:
        call = pen().number()
        settlements = [history.Settlement(one.id, one.fence, _how(one)) for one in batch]
        pen().write(history.Settling(call=call, queue=queue, worker=worker, batch=settlements))

        def reply(answer: list[replies.SettleResult]) -> history.Line:
            return history.Settled(call=call, replies=[str(one) for one in answer])

        return await _noted(verb(self, queue, batch, worker=worker), reply, call, history.Settled)

    return settle


def _how(settlement: jobs.Settlement) -> str:
    return settlement.counts if isinstance(settlement, jobs.RetrySettlement) else type(settlement).__name__.lower()


def _cancel(verb: Any) -> Any:
    async def cancel(self: Storage, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]:
        call = pen().number()
        pen().write(history.Cancelling(call=call, queue=queue, ids=list(ids)))

        def reply(answer: list[replies.CancelResult]) -> history.Line:
            return history.Cancelled(call=call, replies=[one.value for one in answer])

        return await _noted(verb(self, queue, ids), reply, call, history.Cancelled)

    return cancel


VERBS = {"enqueue": _enqueue, "claim": _claim, "settle": _settle, "cancel": _cancel}
