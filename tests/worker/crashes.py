"""Tasks that end their process, or spoil it, in every way that a handler can. Where nothing else is said, the first run
of a job does, and the next one returns."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import Failure, current_job
from tests.worker.scene import NOTES, make_app, note

app = make_app()

QUICK: Any = {"min_backoff": 0.05, "max_backoff": 0.1}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def exit_at_once() -> None:
    os._exit(0)


def abort() -> None:
    os.abort()


def interrupt() -> None:
    raise KeyboardInterrupt


def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit)


def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


def cancel_everything() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def close_everything() -> None:
    os.closerange(0, 4096)


def write_everywhere() -> None:
    for number in range(256):
        try:
            os.write(number, b"garbage\n" * 8)
        except OSError:
            pass  # There is none of that number, or it cannot be written.


ASYNC: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        *(segfault, exit_at_once, abort, interrupt, exit_in_a_callback, stop_the_loop),
        *(cancel_everything, close_everything, write_everywhere),
    )
}
SYNC: dict[str, Callable[[], None]] = {
    f"{function.__name__}_on_a_thread": function for function in (interrupt, close_everything)
}


def _may_go(who: str) -> bool:
    return Path(os.environ[NOTES]).with_name(f"{who} may go").exists()


# Sizes are such that a process has room for one of these and one neighbour.


@app.task(name="crash", size=40, **QUICK)
async def crash(kind: str) -> str:
    if current_job().attempt == 1:
        note("poised")
        while not _may_go("crash"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        ASYNC[kind]()
        await asyncio.sleep(3600)
    return "done"


@app.task(name="crash.thread", size=40, **QUICK)
def crash_on_a_thread(kind: str) -> str:
    if current_job().attempt == 1:
        note("poised")
        while not _may_go("crash"):
            time.sleep(0.02)
        SYNC[kind]()
        time.sleep(3600)
    return "done"


@app.task(name="neighbour", size=60, **QUICK)
async def neighbour() -> str:
    """Ends when the test lets it."""
    note("nap")
    while not _may_go("neighbour"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return "rested"


@app.task(name="nap", **QUICK)
async def nap() -> str:
    """The same, and small."""
    return await neighbour()


def _notes(what: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in Path(os.environ[NOTES]).read_text().splitlines()]
    return [line for line in lines if line["what"] == what and line["pid"] == os.getpid()]


@app.task(name="innocent", **QUICK)
async def innocent() -> str:
    """Dies twice with its neighbour, then it would end."""
    note("innocent", stalls=current_job().stalls)
    await asyncio.sleep(3600 if current_job().stalls < 2 else 0.1)
    note("over", stalls=current_job().stalls)
    return "alive"


@app.task(name="poison", max_stalls=3, **QUICK)
async def poison() -> None:
    """Kills its process whenever it runs, and all the innocents with it as long as there are any."""
    note("poison", stalls=current_job().stalls)
    while current_job().stalls < 2 and len(_notes("innocent")) < 9:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)
    kill()


@poison.on_failure
async def poison_failed(failure: Failure) -> None:
    note("reported", failed=failure.job.id, kind=failure.error.kind, stalls=failure.job.stalls)


@app.task(name="last", max_stalls=1, **QUICK)
async def last() -> str:
    """May not stall again after its first run."""
    note("last", stalls=current_job().stalls)
    while not _may_go("last"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    note("over", stalls=current_job().stalls)
    return "alive"


@app.task(name="once", delivery="at_most_once")
async def once(dies: bool) -> None:
    note("once")
    if dies:
        kill()
    await asyncio.sleep(3600)


@once.on_failure
async def once_failed(failure: Failure) -> None:
    note("reported", failed=failure.job.id, kind=failure.error.kind, stalls=failure.job.stalls)


@app.task(name="greedy", max_retries=0)
def greedy() -> None:
    """Wants more memory than it may have."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@app.task(name="exit", max_retries=0)
async def leave() -> None:
    sys.exit(3)


@app.task(name="exit.thread", max_retries=0)
def leave_on_a_thread() -> None:
    sys.exit(3)


@app.task(name="half", **QUICK)
async def half() -> str:
    """Announces a frame of some megabytes, and sends ten bytes of it."""
    if current_job().attempt == 1:
        note("half")
        os.write(int(sys.argv[1]), struct.pack("!I", 5 << 20) + bytes(10))
        await asyncio.sleep(3600)
    return "done"


@app.task(name="flood", timeout=0.5, cancel_grace=0.2, **QUICK)
def flood() -> str:
    for _ in range(100):
        print("flood " * 1000)
    sys.stdout.flush()
    return "done"
