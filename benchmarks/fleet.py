"""What a job costs through child processes: `holdfast worker` as a program drains a backlog of no-op jobs,
and answers calls while idle.

SQLite and Valkey take turns within a round, and so do tasks of the default size (10 units, ten runs at a time in a
child) and of size 1; numbers are medians of the rounds. How to read them: README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.app import CALLS, JOBS, QUICK_CALLS, QUICK_JOBS, ROUNDS, Contender, contenders, table
from holdfast import Holdfast

PROCESSES = 2
NAMESPACE = "bench-fleet"
SIZES = {"size 10": "", "size 1": ".small"}
"""How a queue's name ends."""
ROOT = Path(__file__).parents[1]
READY_S = 30.0

Costs = tuple[float, float, float, float]
"""Seconds, and CPU seconds of the worker, its children and the server."""

app = Holdfast(namespace=NAMESPACE)


@app.task(name="nothing")
async def nothing(number: int) -> None:
    pass


@app.task(name="nothing.small", size=1)
async def nothing_small(number: int) -> None:
    pass


@app.task(name="blocking")
def blocking(number: int) -> None:
    pass


@app.task(name="blocking.small", size=1)
def blocking_small(number: int) -> None:
    pass


@app.task(name="echo")
async def echo(number: int) -> int:
    return number


@app.task(name="echo.small", size=1)
async def echo_small(number: int) -> int:
    return number


@contextmanager
def worker(url: str, queue: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker of this very module."""
    command = [sys.executable, "-m", "holdfast", "worker", "benchmarks.fleet:app", "--queues", queue]
    command += ["--processes", str(PROCESSES), "--log-level", "warning", *options]
    process = subprocess.Popen(command, env={**os.environ, "HOLDFAST_URL": url}, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Spent:
    """CPU seconds of a worker without its children.

    What the kernel says when we have waited for it is one sum, of the worker and of the children that it has waited for
    itself. So its own part is read from /proc while it lives, up to one look before its end; the children's is the
    rest.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._stat = Path(f"/proc/{process.pid}/stat")
        self.parent_s = 0.0

    def look(self) -> None:
        try:
            fields = self._stat.read_text().rpartition(")")[2].split()
        except OSError:
            return  # It has just ended.
        if fields[0] not in "ZX":
            self.parent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drain(contender: Contender, jobs: int, queue: str) -> dict[str, float]:
    """Enqueue a backlog, then time a worker that empties it, from its start to its end, less what one takes that has
    nothing to do: the start of a worker is not part of the cost of a job."""
    async with Holdfast(contender.url, namespace=NAMESPACE) as client:
        idle = _idle[contender.name] = _idle.get(contender.name) or await _drained(client, contender, queue, 0)
        tasks = client.queue(queue)
        for start in range(0, jobs, 10_000):
            numbers = range(start, min(start + 10_000, jobs))
            await client.enqueue_many(tasks.bind({"number": number}) for number in numbers)
        busy = await _drained(client, contender, queue, jobs)
    seconds, parent, children, server = (after - before for after, before in zip(busy, idle, strict=True))
    return {
        "drain jobs/s": jobs / seconds,
        "parent µs": 1e6 * parent / jobs,
        "children µs": 1e6 * children / jobs,
        "server µs": 1e6 * server / jobs,
    }


async def _drained(client: Holdfast[None], contender: Contender, queue: str, jobs: int) -> Costs:
    """What one burst costs, from the worker's start to its end."""
    before = (await client.queue(queue).stats()).totals.get("completed", 0)
    waited, served, began = _waited_for(), contender.server_cpu(), time.perf_counter()
    with worker(contender.url, queue, "--burst") as process:
        spent = Spent(process)
        while process.poll() is None:
            spent.look()
            await asyncio.sleep(0.01)
        seconds = time.perf_counter() - began
        assert process.returncode == 0
    after = (await client.queue(queue).stats()).totals.get("completed", 0)
    assert after - before == jobs
    return seconds, spent.parent_s, _waited_for() - waited - spent.parent_s, contender.server_cpu() - served


_idle: dict[str, Costs] = {}
"""What a burst costs that finds nothing to do, by the contender's name."""


def _waited_for() -> float:
    """CPU seconds of all that we have waited for, and all that these have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def call(contender: Contender, calls: int, queue: str) -> dict[str, float]:
    """One call after the other, to a worker that has nothing else to do."""
    async with Holdfast(contender.url, namespace=NAMESPACE) as client:
        stub = client.stub(name=queue)(_like_echo)
        with worker(contender.url, queue):
            await stub.using(wait=READY_S).call(0)
            times: list[float] = []
            for number in range(calls):
                began = time.perf_counter()
                await stub.call(number)
                times.append(time.perf_counter() - began)
    times.sort()
    return {"p50 µs": 1e6 * times[calls // 2], "p99 µs": 1e6 * times[calls * 99 // 100]}


async def _like_echo(number: int) -> int:
    raise NotImplementedError


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds: only to see that everything runs")
    arguments = parser.parse_args()
    jobs, calls, rounds = (QUICK_JOBS, QUICK_CALLS, 1) if arguments.quick else (JOBS, CALLS, ROUNDS)
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {PROCESSES} children, medians of {rounds} rounds"
    )
    measures: dict[str, Callable[[Contender, str], dict[str, float]]] = {
        f"{jobs:,} no-op jobs, async handler": lambda place, end: asyncio.run(drain(place, jobs, "nothing" + end)),
        f"{jobs // 5:,} no-op jobs, sync handler on threads": lambda place, end: asyncio.run(
            drain(place, jobs // 5, "blocking" + end)
        ),
        "one call after the other, idle worker": lambda place, end: asyncio.run(call(place, calls, "echo" + end)),
    }
    with contenders() as places:
        shared = [place for place in places if place.name != "memory"]
        for title, measure in measures.items():
            rows: dict[str, list[dict[str, float]]] = {f"{p.name}, {size}": [] for p in shared for size in SIZES}
            for number in range(rounds):
                for place in shared:
                    for size, end in SIZES.items():
                        print(f"  {title}: round {number + 1}, {place.name}, {size} …", file=sys.stderr)
                        rows[f"{place.name}, {size}"].append(measure(place, end))
            table(title, rows)


if __name__ == "__main__":
    main()
