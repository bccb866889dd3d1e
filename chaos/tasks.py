"""The app under chaos. What a job does is said by whoever asks for it: mostly its work, now and then something that no
handler should do. Every run writes down its start and its end; a singleton's holds a lock on its id meanwhile, which
the kernel takes away when its process dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chaos import history, recorded
from chaos.history import pen
from chaos.setting import BLOCK_S, DAY_S, HISTORY, NAMESPACE, ending
from holdfast import Failure, Holdfast, PermanentError, current_job

LEAK_BYTES = 40_000_000
recorded.install()

app = Holdfast(namespace=NAMESPACE)

QUICK: Any = {"timeout": 2, "cancel_grace": 0.3, "min_backoff": 0.05, "max_backoff": 0.5, "failure_ttl": DAY_S}
LIMITS: Any = {"max_retries": 3, "max_stalls": 4, "max_timeouts": 2}


@contextmanager
def noted(kind: str, token: str, alone: bool = False) -> Iterator[None]:
    """One run, as the checker will see it."""
    job = current_job()
    lock = os.open(Path(os.environ[HISTORY]) / f"{job.id}.lock", os.O_RDWR | os.O_CREAT) if alone else None
    try:
        overlaps = lock is not None and not _taken(lock)
        pen().write(
            history.Started(
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
            pen().write(history.Ended(queue=job.queue, id=job.id, fence=job.fence, how=how))
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A fork of this process may have it, too.
            os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


leaked: list[bytearray] = []


def misbehave(kind: str) -> None:
    """What is the same on a loop and on a thread."""
    match kind:
        case "throw":
            raise ValueError("as asked")
        case "permanent":
            raise PermanentError("as asked")
        case "crash" if current_job().attempt < 3:
            sys.stdout.flush()
            (os.abort if os.getpid() % 3 else lambda: ctypes.string_at(0))()
        case "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin" if current_job().attempt < 3:
            while True:
                pass
        case "leak":
            leaked.append(bytearray(os.urandom(4096) * (LEAK_BYTES // 4096)))
        case "fork":
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)


async def act(kind: str, token: str, ms: float, alone: bool = False) -> str:
    with noted(kind, token, alone):
        await asyncio.sleep(ms / 1000)
        misbehave(kind)
        while kind == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass  # That is what makes it hang.
        return token


@app.task(name="work", result_ttl=DAY_S, **QUICK, **LIMITS)
async def work(kind: str, token: str, ms: float = 0) -> str:
    return await act(kind, token, ms)


@app.task(name="plain", queue_priority=200, result_ttl=DAY_S, **QUICK, **LIMITS)
async def plain(kind: str, token: str, ms: float = 0) -> str:
    """Nobody asks for trouble here: all trouble is the nemesis's."""
    return await act(kind, token, ms)


@app.task(name="thread", size=20, result_ttl=DAY_S, **QUICK, **LIMITS)
def thread(kind: str, token: str, ms: float = 0) -> str:
    with noted(kind, token):
        time.sleep(ms / 1000)
        misbehave(kind)
        if kind == "hang":
            time.sleep(60)
        return token


@app.task(name="question", queue_priority=150, **QUICK, **LIMITS)
async def question(kind: str, token: str, ms: float = 0) -> str:
    """Somebody waits for the answer, and nobody keeps it."""
    return await act(kind, token, ms)


@app.task(name="single", singleton="s{key}", result_ttl=DAY_S, **QUICK, **LIMITS)
async def single(key: int, kind: str, token: str, ms: float = 0) -> str:
    return await act(kind, token, ms, alone=True)


@app.task(name="block", concurrency=1, size=100, timeout=15, max_stalls=5, result_ttl=DAY_S, failure_ttl=DAY_S)
async def block(kind: str, token: str, ms: float = 0) -> str:
    """Blocks the event loop that it is on for longer than a lease."""
    with noted(kind, token):
        time.sleep(BLOCK_S)  # noqa: ASYNC251 (that is the point)
        return token


@app.task(name="periodic", singleton="p{key}", result_ttl=DAY_S, **QUICK, **LIMITS)
async def periodic(key: int, number: int, token: str) -> None:
    """Asks for its own next run, until it is told not to."""
    with noted("ok", token, alone=True):
        if not ending().exists():
            await periodic.using(delay=0.5).enqueue(key, number + 1, f"{number + 1:012x}")
        await asyncio.sleep(0.005)


async def told(failure: Failure) -> None:
    of = failure.job
    with noted("ok", ""):
        pen().write(history.Told(queue=of.queue, id=of.id, generation=of.generation, kind=failure.error.kind))


TASKS = (work, plain, thread, question, single, block, periodic)
for task in TASKS:
    task.on_failure(max_retries=100, max_stalls=100, max_timeouts=100, min_backoff=0.05, max_backoff=0.5)(told)
