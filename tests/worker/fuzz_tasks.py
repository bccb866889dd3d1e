"""Tasks whose every run draws by lot what it does: mostly its work, now and then something that no handler should do.

A run notes its start and its end. Meanwhile it holds a lock on a file of its id. The kernel takes the lock away when
the process dies, so whoever gets it knows that the run before is over, however that ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast import Failure, PermanentError, RunEvent, current_job
from holdfast._worker.handler import CurrentJob
from tests.worker.scene import NOTES, make_app, note

WEIGHTS = {"ok": 65, "throw": 15, "permanent": 5, "hang": 10, "spin": 3, "crash": 2}
FAIL_HANDLERS_WEIGHTS = {"ok": 80, "throw": 15, "hang": 3, "crash": 2}
LIMITS = {"retriable": 2, "stall": 3, "timeout": 1, "permanent": 0}
BACKOFF_S = 0.05
QUICK: Any = {"timeout": 0.5, "cancel_grace": 0.2, "min_backoff": BACKOFF_S, "max_backoff": 4 * BACKOFF_S}
LIMITED: Any = {"max_retries": LIMITS["retriable"], "max_stalls": LIMITS["stall"], "max_timeouts": LIMITS["timeout"]}
LOCKS = Path(os.environ[NOTES] + ".locks")

app = make_app()


def wall_us() -> int:
    return time.time_ns() // 1000


@contextmanager
def noted(kind: str) -> Iterator[None]:
    """One run, as the checker will see it."""
    job = current_job()
    with locked(job) as former:
        counts = {"retries": job.retries, "stalls": job.stalls, "timeouts": job.timeouts}
        told = {"generation": job.generation, "run_at": job.run_at, "worker": job.worker, **counts, **former}
        note("start", kind=kind, wall_us=wall_us(), backoff_us=round(1e6 * BACKOFF_S), **told)
        ended = "ok"
        try:
            yield
        except BaseException as error:
            ended = type(error).__name__
            raise
        finally:
            note("end", ended=ended, wall_us=wall_us())


@contextmanager
def locked(job: CurrentJob) -> Iterator[dict[str, Any]]:
    """Hold the lock of this id, and say what is known of the run that held it before."""
    LOCKS.mkdir(exist_ok=True)
    name = hashlib.sha1(f"{job.queue} {job.id}".encode()).hexdigest()
    lock = os.open(LOCKS / name, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            overlaps = False
        except BlockingIOError:
            overlaps = True
        before = json.loads(os.read(lock, 200) or "{}")
        if not overlaps:
            mine = {"fence": job.fence, "pid": os.getpid(), "born": born(os.getpid())}
            os.pwrite(lock, json.dumps(mine).ljust(200).encode(), 0)  # In one go: the process may die at any time.
        alive = bool(before) and born(before["pid"]) == before["born"]
        yield {"overlaps": overlaps, "former": before.get("fence", 0), "former_alive": alive}
    finally:
        os.close(lock)


def born(pid: int) -> int:
    """When a process began, in ticks; 0 if it has ended. A number that is used again has another time."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state in "ZX" else int(rest[18])


def drawn(weights: dict[str, int] = WEIGHTS) -> str:
    return random.choices(list(weights), list(weights.values()))[0]


def raised(kind: str) -> None:
    """What is the same on a loop and on a thread."""
    match kind:
        case "throw":
            raise ValueError("as drawn")
        case "permanent":
            raise PermanentError("as drawn")
        case "crash":
            sys.stdout.flush()
            random.choice([lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL), segfault])()
        case "spin":
            while True:
                pass


def segfault() -> None:
    ctypes.string_at(0)


async def act(kind: str, seconds: float = 0.05) -> None:
    with noted(kind):
        await asyncio.sleep(random.uniform(0, seconds))
        raised(kind)
        while kind == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass  # That is what makes it hang.


def act_on_a_thread(kind: str) -> None:
    with noted(kind):
        time.sleep(random.uniform(0, 0.05))
        raised(kind)
        if kind == "hang":
            time.sleep(60)


@app.task(name="urgent", queue_priority=200, **QUICK, **LIMITED)
async def urgent() -> None:
    await act(drawn())


@app.task(name="usual", **QUICK | {"timeout": 1.5}, **LIMITED)
async def usual() -> None:
    await act(drawn())


@app.task(name="threaded", size=20, **QUICK, **LIMITED)
def threaded() -> None:
    act_on_a_thread(drawn())


@app.task(name="single", singleton="s:{key}", **QUICK, **LIMITED)
async def single(key: int) -> None:
    await act(drawn(), 0.3)


@app.task(name="idle", queue_priority=1, size=30, **QUICK, **LIMITED)
async def idle() -> None:
    await act(drawn())


async def told(failure: Failure) -> None:
    await act(drawn(FAIL_HANDLERS_WEIGHTS))
    of, error = failure.job, failure.error
    count = {"retriable": of.retries, "stall": of.stalls, "timeout": of.timeouts, "permanent": 0}[error.kind]
    said = {"of_queue": of.queue, "of": of.id, "generation": of.generation, "kind": error.kind}
    note("told", **said, count=count, limit=LIMITS[error.kind])


for task in (urgent, usual, threaded, single, idle):
    task.on_failure(max_stalls=20, max_timeouts=20, **QUICK)(told)


@app.on_event
def stored(event: RunEvent) -> None:
    """A completion is noted once it is stored. What a run says of itself may be lost with its process."""
    if event.kind == "completed":
        note("completed", queue=event.queue, id=event.id, attempt=event.attempt)
