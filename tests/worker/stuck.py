"""Tasks that do not end when they are stopped, in every way that a handler can be stuck. The first run of a job is
stuck, the next one returns, and says whether the process of the first is gone."""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import current_job
from tests.worker.scene import NOTES, make_app, note

app = make_app()

QUICK: Any = {"cancel_grace": 0.2, "min_backoff": 0.05, "max_backoff": 0.1}


async def swallow() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


async def spin() -> None:
    while True:
        pass


async def sleep_on_the_loop() -> None:
    time.sleep(3600)  # noqa: ASYNC251


async def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def spin_on_a_thread() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(3600)


def read_what_nobody_writes() -> None:
    end, _ = os.pipe()
    os.read(end, 1)


def start_processes() -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    fork = os.fork()
    if fork == 0:
        time.sleep(3600)
        os._exit(0)
    note("started", pids=[program.pid, fork])
    program.wait()


def start_threads() -> None:
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(3600,), daemon=daemon).start()
    threading.Event().wait()


def change_group() -> None:
    """Out of its process group, into that of its parent."""
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(3600)


ASYNC = {"swallow": swallow, "spin": spin, "sleep_on_the_loop": sleep_on_the_loop, "freeze": freeze}
SYNC: dict[str, Callable[[], None]] = {
    "spin_on_a_thread": spin_on_a_thread,
    "hold_the_gil": hold_the_gil,
    "read_what_nobody_writes": read_what_nobody_writes,
    "start_processes": start_processes,
    "start_threads": start_threads,
    "change_group": change_group,
}


def _is_first() -> bool:
    if current_job().attempt == 1:
        note("stuck")
        return True
    lines = [json.loads(line) for line in Path(os.environ[NOTES]).read_text().splitlines()]
    (first,) = [line for line in lines if line["what"] == "stuck" and line["id"] == current_job().id]
    note("again", first_is_there=Path(f"/proc/{first['pid']}").exists())
    return False


async def _stuck(kind: str) -> str:
    if _is_first():
        await ASYNC[kind]()
    return "done"


def _stuck_on_a_thread(kind: str) -> str:
    if _is_first():
        SYNC[kind]()
    return "done"


# As large as a child, so that each run has its own child, and small enough for one more run beside it.
for _size, _name in ((100, "stuck"), (40, "stuck.small")):
    app.task(name=_name, size=_size, timeout=0.5, **QUICK)(_stuck)
    app.task(name=f"{_name}.thread", size=_size, timeout=0.5, **QUICK)(_stuck_on_a_thread)


async def _until_let_go(who: str) -> None:
    gate = Path(os.environ[NOTES]).with_name(f"{who} may go")
    while not gate.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


@app.task(name="neighbour", size=60)
async def neighbour() -> str:
    """Healthy, and ends when the test lets it."""
    note("nap")
    await _until_let_go("neighbour")
    note("woke")
    return "rested"


@app.task(name="late", timeout=0.3, cancel_grace=0.2)
async def late() -> str:
    """Does not end in time, and then it does, while a neighbour keeps its process alive."""
    note("late")
    end = asyncio.ensure_future(_until_let_go("late"))
    while not end.done():
        try:
            await asyncio.shield(end)
        except asyncio.CancelledError:
            note("asked", stopping=current_job().stopping)
    return "better late than never"


@app.task(name="late.thread", timeout=0.3, cancel_grace=5)
def late_on_a_thread() -> str:
    while current_job().stopping is None:
        time.sleep(0.01)
    note("asked", stopping=current_job().stopping)
    return "better late than never"


@app.task(name="unheeding", size=10, cancel_grace=0.2)
async def unheeding() -> None:
    note("stuck")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        note("asked", stopping=current_job().stopping)
    await swallow()


@app.task(name="patient", timeout=0.3, cancel_grace=1.5, max_timeouts=0)
async def patient() -> None:
    note("stuck")
    await swallow()


@app.task(name="impatient", timeout=0.3, cancel_grace=0.1, max_timeouts=0)
async def impatient() -> None:
    note("stuck")
    await swallow()


@app.task(name="forks", timeout=5, max_timeouts=0)
def forks() -> list[int | None]:
    """How forked processes end that are terminated, some of them before they have begun."""
    codes: list[int | None] = []
    for _ in range(10):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        process.start()
        process.terminate()
        process.join()
        codes.append(process.exitcode)
    return codes


@app.task(name="leaves")
async def leaves() -> None:
    """Leaves something behind that blocks the loop later."""

    def block() -> None:
        note("blocked")
        time.sleep(3600)

    asyncio.get_running_loop().call_later(0.05, block)


@app.task(name="quick", max_timeouts=0)
async def quick() -> str:
    return "done"
