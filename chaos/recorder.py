"""Records storage calls and handler runs in the history, and makes the clock of a storage movable.

`install` runs in each process of a run before a storage opens. `python -m chaos.launch worker …` is `holdfast worker …`
with it. A test that runs everything in one process uses `recording` instead.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from chaos import history
from chaos.clocks import SharedClock
from chaos.history import writer
from chaos.settings import CLOCK, CLOCK_KEY, HISTORY
from holdfast import current_job
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
    _record_verbs()


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Record the storage calls of this process into `folder`."""
    verbs = {name: getattr(Storage, name) for name in VERBS}
    os.environ[HISTORY] = str(folder)
    history.forget_writer()
    _record_verbs()
    try:
        yield
    finally:
        for name, verb in verbs.items():
            setattr(Storage, name, verb)
        history.forget_writer()
        history.numbers.clear()
        del os.environ[HISTORY]


def _record_verbs() -> None:
    for name, verb in VERBS.items():
        setattr(Storage, name, verb(getattr(Storage, name)))


# Runs


@contextmanager
def recorded_run(kind: str, token: str, *, lock: bool = False) -> Iterator[None]:
    """Record the start and the end of this run. With `lock`, hold a lock on the id: the kernel releases it when the
    process dies, so a run that does not get it overlaps with another."""
    job = current_job()
    file = os.open(Path(os.environ[HISTORY]) / f"{job.id}.lock", os.O_RDWR | os.O_CREAT) if lock else None
    try:
        overlaps = file is not None and not _locked(file)
        writer().write(
            history.Started(
                pid=history.numbers.get(job.worker, 0),
                queue=job.queue,
                id=job.id,
                generation=job.generation,
                fence=job.fence,
                attempt=job.attempt,
                kind=kind,
                token=token,
                overlaps=overlaps,
                worker=job.worker,
            )
        )
        how = "ok"
        try:
            yield
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            writer().write(history.Ended(queue=job.queue, id=job.id, fence=job.fence, how=how))
    finally:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # A fork of this process may have the file open, too.
            os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Storage calls


async def _recorded(coroutine: Awaitable[T], reply: Callable[[T], history.Line], call: int, kind: Any) -> T:
    """Wait for a reply or an error, and record it."""
    try:
        answer = await coroutine
    except BaseException as error:
        writer().write(kind(call=call, error=f"{type(error).__name__}: {error}"[:300]))
        raise
    writer().write(reply(answer))
    return answer


def _enqueue(verb: Any) -> Any:
    async def enqueue(self: Storage, queue: str, requests: Sequence[jobs.Request]) -> list[replies.Enqueued]:
        call = writer().number()
        writer().write(
            history.Asking(
                call=call,
                queue=queue,
                ids=[request.id for request in requests],
                tokens=[_token_of(request) for request in requests],
                keeps_payload=any(request.update is not None and not request.update.payload for request in requests),
                delays_ms=[request.delay_ms or 0 for request in requests],
                run_ats=[request.run_at or 0 for request in requests],
                priorities=[request.work.priority for request in requests],
            )
        )

        def reply(answer: list[replies.Enqueued]) -> history.Line:
            return history.Asked(
                call=call,
                placed=[str(one.placed or "") for one in answer],
                generations=[one.generation for one in answer],
            )

        return await _recorded(verb(self, queue, requests), reply, call, history.Asked)

    return enqueue


def _token_of(request: jobs.Request) -> str:
    found = TOKEN.search(request.work.payload or b"")
    return found[1].decode() if found else ""


def _claim(verb: Any) -> Any:
    async def claim(self: Storage, queue: str, limit: int, *, worker: str, lease_ms: int) -> replies.Claim:
        call = writer().number()
        writer().write(history.Claiming(call=call, pid=history.numbers.get(worker, 0), queue=queue, worker=worker))

        def reply(answer: replies.Claim) -> history.Line:
            return history.Claimed(call=call, claims=[_claim_of(job) for job in answer.jobs])

        coroutine = verb(self, queue, limit, worker=worker, lease_ms=lease_ms)
        return await _recorded(coroutine, reply, call, history.Claimed)

    return claim


def _claim_of(job: jobs.Job) -> history.Claim:
    counts = job.attempts, job.retries, job.stalls, job.timeouts
    return history.Claim(job.id, job.generation, job.fence or 0, job.run_at, *counts, job.work.priority)


def _settle(verb: Any) -> Any:
    async def settle(
        self: Storage, queue: str, batch: Sequence[jobs.Settlement], *, worker: str
    ) -> list[replies.SettleResult]:
        call = writer().number()
        settlements = [history.Settlement(one.id, one.fence, _how(one)) for one in batch]
        writer().write(history.Settling(call=call, queue=queue, worker=worker, batch=settlements))

        def reply(answer: list[replies.SettleResult]) -> history.Line:
            return history.Settled(call=call, replies=[str(one) for one in answer])

        return await _recorded(verb(self, queue, batch, worker=worker), reply, call, history.Settled)

    return settle


def _how(settlement: jobs.Settlement) -> str:
    return settlement.counts if isinstance(settlement, jobs.RetrySettlement) else type(settlement).__name__.lower()


def _cancel(verb: Any) -> Any:
    async def cancel(self: Storage, queue: str, ids: Sequence[str]) -> list[replies.CancelResult]:
        call = writer().number()
        writer().write(history.Cancelling(call=call, queue=queue, ids=list(ids)))

        def reply(answer: list[replies.CancelResult]) -> history.Line:
            return history.Cancelled(call=call, replies=[one.value for one in answer])

        return await _recorded(verb(self, queue, ids), reply, call, history.Cancelled)

    return cancel


VERBS = {"enqueue": _enqueue, "claim": _claim, "settle": _settle, "cancel": _cancel}
