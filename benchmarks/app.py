"""What a job costs through the app: an inline worker drains a backlog of no-op jobs, and answers calls while idle.

Memory, SQLite and Valkey take turns within a round; numbers are medians of the rounds. How to read them: README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import pages
from benchmarks.pages import number
from holdfast import Holdfast
from tests import servers

JOBS, CALLS, ROUNDS = 100_000, 2_000, 3
QUICK_JOBS, QUICK_CALLS = 2_000, 100


class Contender:
    """A storage URL, and the CPU seconds that its server has used."""

    def __init__(self, name: str, url: str, server: servers.Server | None = None) -> None:
        self.name = name
        self.url = url
        self._server = server

    def server_cpu(self) -> float:
        if self._server is None:
            return 0.0
        info = self._server.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


@contextmanager
def contenders() -> Iterator[list[Contender]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-"))
        valkey = stack.enter_context(servers.Server("valkey"))
        yield [
            Contender("memory", "memory://bench"),
            Contender("sqlite", f"sqlite:///{Path(folder).resolve()}/jobs.db"),
            Contender(f"valkey {valkey.version}", valkey.url, valkey),
        ]


async def drain(contender: Contender, jobs: int, is_async: bool) -> dict[str, float]:
    """Enqueue a backlog, then time a worker that empties it."""
    app = Holdfast(contender.url, namespace="bench-drain")

    async def nothing(number: int) -> None:
        pass

    def nothing_sync(number: int) -> None:
        pass

    task = app.task(name="nothing")(nothing) if is_async else app.task(name="nothing")(nothing_sync)
    async with app:
        began, cpu = time.perf_counter(), time.process_time()
        for start in range(0, jobs, 10_000):
            await app.enqueue_many(task.bind(number) for number in range(start, min(start + 10_000, jobs)))
        enqueued_s, enqueued_cpu = time.perf_counter() - began, time.process_time() - cpu
        served = contender.server_cpu()
        began, cpu = time.perf_counter(), time.process_time()
        await app.worker(burst=True).run()
        drained_s, drained_cpu = time.perf_counter() - began, time.process_time() - cpu
        assert (await app.queue("nothing").stats()).totals["completed"] >= jobs
        return {
            "enqueue jobs/s": jobs / enqueued_s,
            "enqueue µs": 1e6 * enqueued_cpu / jobs,
            "drain jobs/s": jobs / drained_s,
            "worker µs": 1e6 * drained_cpu / jobs,
            "server µs": 1e6 * (contender.server_cpu() - served) / jobs,
        }


async def call(contender: Contender, calls: int) -> dict[str, float]:
    """One call after the other, to a worker on the same loop that has nothing else to do."""
    app = Holdfast(contender.url, namespace="bench-call")

    @app.task(name="echo")
    async def echo(number: int) -> int:
        return number

    async with app, app.worker():
        await echo.call(0)
        times: list[float] = []
        for number in range(calls):
            began = time.perf_counter()
            await echo.call(number)
            times.append(time.perf_counter() - began)
    times.sort()
    return {"p50 µs": 1e6 * times[calls // 2], "p99 µs": 1e6 * times[calls * 99 // 100]}


def table(title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Medians of the rounds."""
    columns = list(next(iter(rows.values()))[0])
    lines = [
        [name, *(number(statistics.median(taken[column] for taken in rounds)) for column in columns)]
        for name, rounds in rows.items()
    ]
    print(f"\n{title}\n\n{pages.table(['', *columns], lines)}", end="")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench app", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds: only to see that everything runs")
    arguments = parser.parse_args()
    jobs, calls, rounds = (QUICK_JOBS, QUICK_CALLS, 1) if arguments.quick else (JOBS, CALLS, ROUNDS)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, medians of {rounds} rounds")
    measures: dict[str, Callable[[Contender], dict[str, float]]] = {
        f"{jobs:,} no-op jobs, async handler": lambda place: asyncio.run(drain(place, jobs, True)),
        f"{jobs // 5:,} no-op jobs, sync handler on threads": lambda place: asyncio.run(drain(place, jobs // 5, False)),
        "one call after the other, idle worker": lambda place: asyncio.run(call(place, calls)),
    }
    with contenders() as places:
        for title, measure in measures.items():
            rows: dict[str, list[dict[str, float]]] = {place.name: [] for place in places}
            for turn in range(rounds):
                for place in places:
                    print(f"  {title}: round {turn + 1}, {place.name} …", file=sys.stderr)
                    rows[place.name].append(measure(place))
            table(title, rows)


if __name__ == "__main__":
    main()
