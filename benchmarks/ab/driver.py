"""CPU time of one scenario, inside the virtual environment of one revision.

The parent copies this file into an empty folder and starts it there, so that no other module can hide the installed
package. The driver runs one slice of the scenario for each line on its standard input, and replies with a line of
JSON: CPU time in nanoseconds of the client and of the server. Between slices it blocks, so that it costs nothing while
the other revision is measured. It uses only the public API that all compared revisions have.

Objects that exist at the start of a slice are frozen, so that the garbage collector does not visit them. It stays
switched on, because the garbage that a revision makes is part of its cost.

CPU time comes from the kernel's process clocks. They count nanoseconds for all threads of a process, also for threads
that have ended; /proc/PID/schedstat counts only the main thread.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast import Holdfast

URL = os.environ["HOLDFAST_AB_URL"]
MARKS = Path("marks")
"""One byte for each job of a slice, in a file that this process and its children map."""
POLL_S = 0.005
WAIT_S = 60.0
"""Longest wait for the jobs of a pool, and for the result of a call."""

FORGOTTEN: dict[str, Any] = {"result_ttl": 0}
"""Option of the tasks: no outcome is kept. Revisions whose default differs do the same work."""

app = Holdfast(URL, namespace="ab")
_marks: list[mmap.mmap] = []


@app.task(name="nothing", **FORGOTTEN)
async def nothing(number: int) -> None:
    pass


@app.task(name="marked", **FORGOTTEN)
async def marked(number: int) -> None:
    marks()[number] = 1


@app.task(name="kept")
async def kept(number: int) -> None:
    """Like `nothing`, but its outcome is kept for the default time."""


@app.task(name="marked-kept")
async def marked_kept(number: int) -> None:
    marks()[number] = 1


@app.task(name="echo", **FORGOTTEN)
async def echo(number: int) -> int:
    return number


def marks() -> mmap.mmap:
    """Shared memory of the pool, mapped when this process first needs it."""
    if not _marks:
        with MARKS.open("r+b") as file:
            _marks.append(mmap.mmap(file.fileno(), 0))
    return _marks[0]


class Clock:
    """CPU time of this process, of its child processes and of the server, from `start` to `stop`."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._children: list[int] = []
        self.client_ns = 0
        self.server_ns = 0

    def start(self) -> None:
        gc.collect()
        gc.freeze()
        self._children = children()
        self.server_ns = -self._read_server()
        self.client_ns = -self._read_client()

    def stop(self) -> None:
        self.client_ns += self._read_client()
        self.server_ns += self._read_server()
        if children() != self._children:
            raise RuntimeError("a child process has started or ended during the measurement")

    def _read_client(self) -> int:
        return time.process_time_ns() + sum(cpu_ns(pid) for pid in self._children)

    def _read_server(self) -> int:
        return cpu_ns(self._server) if self._server else 0


def cpu_ns(pid: int) -> int:
    """CPU time of another process. The clock id is the one that clock_getcpuclockid(3) makes."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def children() -> list[int]:
    """Process ids of the direct child processes."""
    found: list[int] = []
    for pids in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # The thread has ended.
            found += map(int, pids.read_text().split())
    return sorted(found)


async def enqueue(jobs: int, clock: Clock, _: Any) -> None:
    clock.start()
    for number in range(jobs):
        await nothing.enqueue(number)
    clock.stop()


async def bulk(jobs: int, clock: Clock, _: Any) -> None:
    clock.start()
    await app.enqueue_many(nothing.bind(number) for number in range(jobs))
    clock.stop()


async def drain(jobs: int, clock: Clock, _: Any, *, task: Any = nothing) -> None:
    await app.enqueue_many(task.bind(number) for number in range(jobs))
    clock.start()
    await app.worker([task.name], burst=True).run()
    clock.stop()


async def pool(jobs: int, clock: Clock, worker: Any, *, task: Any = marked) -> None:
    """The worker does not serve the queue until the backlog is complete, so that enqueueing is not counted."""
    memory = marks()
    memory[:] = bytes(jobs)
    await app.enqueue_many(task.bind(number) for number in range(jobs))
    clock.start()
    worker.serve([task.name])
    deadline, done = time.monotonic() + WAIT_S, 0
    while (done := memory.find(b"\0", done)) >= 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {done} of {jobs} has not run within {WAIT_S:g} s")
        await asyncio.sleep(POLL_S)
    await worker.stop_serving([task.name])  # Returns when the last settlement is stored.
    clock.stop()


async def call(jobs: int, clock: Clock, _: Any) -> None:
    task = echo.using(wait=WAIT_S)
    clock.start()
    for number in range(jobs):
        await task.call(number)
    clock.stop()


SCENARIOS: dict[str, Callable[[int, Clock, Any], Awaitable[None]]] = {
    "enqueue": enqueue,
    "bulk": bulk,
    "drain": drain,
    "drain-kept": partial(drain, task=kept),
    "pool": pool,
    "pool-kept": partial(pool, task=marked_kept),
    "call": call,
}
WORKERS: dict[str, Callable[[], Any]] = {
    "pool": lambda: app.worker(["nothing"], processes=2),
    "pool-kept": lambda: app.worker(["nothing"], processes=2),
    "call": lambda: app.worker(["echo"]),
}
"""Scenarios with a worker that lives during all slices. The queue `nothing` of the pool stays empty."""


async def main(scenario: str, jobs: int, server: int) -> None:
    """Run a slice of `jobs` jobs for each line of input. `server` is the process id of the server, or 0."""
    async with app:
        worker = WORKERS.get(scenario, nullcontext)()
        async with worker:
            while sys.stdin.readline():
                clock = Clock(server)
                await SCENARIOS[scenario](jobs, clock, worker)
                print(json.dumps([clock.client_ns, clock.server_ns]), flush=True)


if __name__ == "__main__":
    found = Path(holdfast.__file__)
    if not found.is_relative_to(sys.prefix):
        sys.exit(f"holdfast was imported from {found}, outside of the virtual environment {sys.prefix}")
    MARKS.write_bytes(bytes(int(sys.argv[2])))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
