"""Tasks that last until a test lets them end: by making a file beside the notes, a gate.

Only the first run of a job is slow or stubborn. A later one ends at once, so that every test can be finished.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast import current_job
from tests.worker.scene import NOTES, make_app, note

app = make_app()
note("imported")


def is_open(gate: str) -> bool:
    return Path(os.environ[NOTES]).with_name(gate).exists()


def began() -> bool:
    """Note that a run began, with its counts. Is it the first of this job?"""
    job = current_job()
    note("began", worker=job.worker, counts=[job.retries, job.stalls, job.timeouts])
    return job.attempt == 1


def counts() -> list[int]:
    job = current_job()
    return [job.attempt, job.retries, job.stalls, job.timeouts]


async def wait_at(gate: str) -> None:
    """Wait, and note why this had to end before the gate opened."""
    try:
        while not is_open(gate):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        note("stopped", why=current_job().stopping)
        raise


@app.task(name="hold", size=1, timeout=120, cancel_grace=0.5)
async def hold(gate: str) -> list[int]:
    """As long as the gate is shut, in the first run."""
    if began():
        await wait_at(gate)
    note("ended")
    return counts()


@app.task(name="always", size=1, timeout=120, cancel_grace=0.5)
async def always(gate: str) -> None:
    """As long as the gate is shut, in every run."""
    began()
    await wait_at(gate)
    note("ended")


@app.task(name="one", size=50, timeout=120)
async def one(gate: str) -> None:
    """Two fill a child."""
    began()
    await wait_at(gate)
    note("ended")


@app.task(name="watch", size=1, timeout=120, cancel_grace=0.5)
def watch(gate: str) -> None:
    """Not async: it looks itself whether it should end."""
    if began():
        while not is_open(gate):
            if current_job().stopping is not None:
                note("stopped", why=current_job().stopping)
                raise RuntimeError("it was asked to stop")
            time.sleep(0.02)
    note("ended")


@app.task(name="stubborn", size=1, timeout=120, cancel_grace=0.5)
async def stubborn() -> None:
    """Ignores every request to stop."""
    await never_end()


@app.task(name="patient", size=1, timeout=120, cancel_grace=30)
async def patient() -> None:
    """The same, and it has half a minute for that."""
    await never_end()


@app.task(name="dies", size=1, timeout=120, cancel_grace=0.2, on_storage_loss="kill")
async def dies(stubborn: bool) -> None:
    await live(stubborn)


@app.task(name="only", size=1, timeout=120, cancel_grace=0.2, singleton="only:{stubborn}")
async def only(stubborn: bool) -> None:
    await live(stubborn)


async def never_end() -> None:
    if not began():
        return
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            note("stopped", why=current_job().stopping)


async def live(stubborn: bool) -> None:
    """Note all the time that this still goes on."""
    first = began()
    while first:
        note("alive")
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            note("stopped", why=current_job().stopping)
            if not stubborn:
                raise


@app.task(name="grip", size=100, timeout=120)
async def grip(seconds: int) -> list[int]:
    """Hold the interpreter lock: nothing of Python goes on in this process."""
    if began():
        ctypes.PyDLL(None).sleep(seconds)
    return counts()


@app.task(name="burn", size=100, timeout=120)
def burn(seconds: float) -> list[int]:
    """Not async, and never waits."""
    if began():
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
    return counts()


@app.task(name="nest", size=100, timeout=120)
def nest() -> None:
    """A program that this handler has started, and one that that one has."""
    began()
    code = "import subprocess; subprocess.run(['sleep', '3600'])"
    process = subprocess.Popen([sys.executable, "-c", code])
    note("nested", nested=process.pid)
    process.wait()


@app.task(name="bare", size=100, timeout=120)
async def bare(gate: str) -> None:
    """Lose every file descriptor, and hang."""
    began()
    await wait_at(gate)
    os.closerange(3, 4096)
    time.sleep(3600)  # noqa: ASYNC251


@app.task(name="quick", size=1)
async def quick(number: int) -> list[int]:
    note("ran", number=number)
    return [number, os.getpid()]


@app.task(name="relay")
async def relay(number: int) -> list[int]:
    """Enqueue, and wait for nothing."""
    handle = await quick.using(id=f"async-{number}").enqueue(number)
    return [os.getpid(), handle.generation]


@app.task(name="relay-sync")
def relay_sync(number: int) -> list[int]:
    handle = quick.sync.using(id=f"sync-{number}").enqueue(number)
    return [os.getpid(), handle.generation]


@app.task(name="eat")
def eat(mib: int) -> int:
    """Keep memory for good."""
    kept.append(b"x" * (mib << 20))
    return os.getpid()


kept: list[bytes] = []
