"""What a job costs in a storage, verb by verb, beside the bare SQLite statements that a queue on this schema must run.

A contender (`Stored`, `Raw`) knows how to do one call; the timed loops around the calls are the same for all.
Contenders take turns within a round, and a ratio only compares neighbours of one round: the machine is shared and its
speed drifts. CPU time is that of all threads of this process. How to read the tables: README.md, beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks import redis_storage
from benchmarks.bare import LEASE_MS, QUEUE, WORKER, Statements
from benchmarks.pages import Judged, table, targets
from holdfast._core.jobs import Complete, LeaseRef, Request, State, Work, new_id
from holdfast.storage import Storage, connect

PAYLOAD, LARGE = b"x" * 100, b"x" * 1_048_576
ROUNDS, FLAT_ROUNDS = 5, 9
FEW, MANY = 10_000, 1_000_000
FLAT_JOBS = 5_000
"""Jobs of one flatness sample. They join the queue and as many leave it, so it stays about as long as is said."""

Items = Sequence[Any]
"""A contender's own jobs or leases: no other code reads them."""


class Contender(Protocol):
    def make(self, count: int, payload: bytes = PAYLOAD) -> Items:
        """Jobs, ready to be enqueued."""
        ...

    async def enqueue(self, jobs: Items) -> object: ...
    async def enqueue_together(self, jobs: Items) -> object: ...
    async def claim(self, limit: int) -> Items: ...
    async def extend(self, leases: Items) -> object: ...
    async def settle(self, leases: Items) -> object: ...
    async def get(self, jobs: Items) -> object: ...
    async def cancel(self, jobs: Items) -> object: ...
    async def sweep(self) -> object: ...
    async def forget(self) -> object:
        """Delete what was cancelled."""
        ...


class Stored:
    """A storage of Holdfast, through its protocol."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def make(self, count: int, payload: bytes = PAYLOAD) -> Items:
        return [Request(new_id(), Work(payload)) for _ in range(count)]

    async def enqueue(self, jobs: Items) -> object:
        return await self._storage.enqueue(QUEUE, jobs)

    async def enqueue_together(self, jobs: Items) -> object:
        return await asyncio.gather(*(self._storage.enqueue(QUEUE, [job]) for job in jobs))

    async def claim(self, limit: int) -> Items:
        claim = await self._storage.claim(QUEUE, limit, worker=WORKER, lease_ms=LEASE_MS)
        return [LeaseRef(job.id, job.run.fence) for job in claim.jobs if job.run is not None]

    async def extend(self, leases: Items) -> object:
        return await self._storage.extend(QUEUE, leases, worker=WORKER, lease_ms=LEASE_MS)

    async def settle(self, leases: Items) -> object:
        return await self._storage.settle(QUEUE, [Complete(lease.id, lease.fence) for lease in leases], worker=WORKER)

    async def get(self, jobs: Items) -> object:
        return await self._storage.get(QUEUE, [job.id for job in jobs])

    async def cancel(self, jobs: Items) -> object:
        return await self._storage.cancel(QUEUE, [job.id for job in jobs])

    async def sweep(self) -> object:
        return await self._storage.sweep(QUEUE)

    async def forget(self) -> object:
        while await self._storage.purge(QUEUE, [State.CANCELLED]):
            pass
        return None


class Raw:
    """The bare statements on the same schema: no checks, counts, fences, replies or events."""

    def __init__(self, path: Path) -> None:
        self._statements = Statements(path)

    async def aclose(self) -> None:
        self._statements.close()

    def make(self, count: int, payload: bytes = PAYLOAD) -> Items:
        return [self._statements.row(new_id().encode(), payload) for _ in range(count)]

    async def enqueue(self, jobs: Items) -> None:
        self._statements.enqueue(jobs)

    async def enqueue_together(self, jobs: Items) -> None:
        self._statements.enqueue(jobs)

    async def claim(self, limit: int) -> Items:
        return self._statements.claim(limit)

    async def extend(self, leases: Items) -> None:
        self._statements.extend(leases)

    async def settle(self, leases: Items) -> None:
        self._statements.settle(leases)

    async def get(self, jobs: Items) -> object:
        return self._statements.get(jobs)

    async def cancel(self, jobs: Items) -> None:
        self._statements.cancel(jobs)

    async def sweep(self) -> None:
        self._statements.sweep()

    async def forget(self) -> None:
        self._statements.forget()


class Sample(msgspec.Struct):
    """One run of a timed loop."""

    jobs: int
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.jobs / self.wall_s

    @property
    def cpu_us(self) -> float:
        return 1_000_000 * self.cpu_s / self.jobs


@contextmanager
def timed(jobs: int) -> Generator[Sample, None, None]:
    sample = Sample(jobs)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    yield sample
    sample.wall_s, sample.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


async def fill(contender: Contender, count: int, batch: int) -> Sample:
    jobs = contender.make(count)
    batches = [jobs[start : start + batch] for start in range(0, count, batch)]
    with timed(count) as sample:
        for some in batches:
            await contender.enqueue(some)
    return sample


async def drain(contender: Contender, count: int, batch: int) -> Sample:
    with timed(count) as sample:
        for _ in range(0, count, batch):
            leases = await contender.claim(batch)
            assert len(leases) == batch
            await contender.settle(leases)
    return sample


async def enqueue(contender: Contender, count: int, batch: int) -> Sample:
    sample = await fill(contender, count, batch)
    await drain(contender, count, 100)
    return sample


async def enqueue_together(contender: Contender, count: int) -> Sample:
    crowds = [contender.make(100) for _ in range(0, count, 100)]
    with timed(count) as sample:
        for crowd in crowds:
            await contender.enqueue_together(crowd)
    await drain(contender, count, 100)
    return sample


async def claim_and_settle(contender: Contender, count: int, batch: int) -> Sample:
    await fill(contender, count, 100)
    return await drain(contender, count, batch)


async def extend(contender: Contender, count: int) -> Sample:
    await fill(contender, 100, 100)
    leases = await contender.claim(100)
    with timed(count) as sample:
        for _ in range(0, count, 100):
            await contender.extend(leases)
    await contender.settle(leases)
    return sample


async def get(contender: Contender, count: int, batch: int) -> Sample:
    jobs = contender.make(100)
    await contender.enqueue(jobs)
    some = jobs[:batch]
    with timed(count) as sample:
        for _ in range(0, count, batch):
            await contender.get(some)
    await drain(contender, 100, 100)
    return sample


async def cancel(contender: Contender, count: int) -> Sample:
    batches = [contender.make(100) for _ in range(0, count, 100)]
    for jobs in batches:
        await contender.enqueue(jobs)
    with timed(count) as sample:
        for jobs in batches:
            await contender.cancel(jobs)
    await contender.forget()
    return sample


async def sweep(contender: Contender, count: int) -> Sample:
    """Look for expired leases among 100 that are not. One sweep counts as one job."""
    await fill(contender, 100, 100)
    leases = await contender.claim(100)
    with timed(count) as sample:
        for _ in range(count):
            await contender.sweep()
    await contender.settle(leases)
    return sample


async def large(contender: Contender, count: int) -> Sample:
    jobs = contender.make(count, LARGE)
    with timed(count) as sample:
        for job in jobs:
            await contender.enqueue([job])
            leases = await contender.claim(1)
            await contender.extend(leases)
            await contender.settle(leases)
    return sample


Loop = Callable[[Contender, int], Awaitable[Sample]]
SINGLE, HUNDRED, MOST, DRAIN = "enqueue 1", "enqueue 100", "enqueue 250", "claim + settle 100"
"""The rows that have a target."""
ROWS: dict[str, tuple[int, Loop]] = {
    SINGLE: (5_000, partial(enqueue, batch=1)),
    "enqueue 10": (10_000, partial(enqueue, batch=10)),
    HUNDRED: (20_000, partial(enqueue, batch=100)),
    MOST: (20_000, partial(enqueue, batch=250)),
    "enqueue 1, by 100 callers at once": (10_000, enqueue_together),
    "claim + settle 1": (2_000, partial(claim_and_settle, batch=1)),
    "claim + settle 10": (5_000, partial(claim_and_settle, batch=10)),
    DRAIN: (10_000, partial(claim_and_settle, batch=100)),
    "claim + settle 250": (10_000, partial(claim_and_settle, batch=250)),
    "extend 100": (10_000, extend),
    "get 1": (5_000, partial(get, batch=1)),
    "get 100": (20_000, partial(get, batch=100)),
    "cancel 100": (10_000, cancel),
    "sweep, nothing due": (2_000, sweep),
    "1 MiB: enqueue, claim, extend, settle": (50, large),
}
"""What is measured: on how many jobs, and by which loop."""


class Cost(msgspec.Struct):
    """Medians of the rounds. A ratio is the median of the rounds' ratios: above 1, this costs more than the base."""

    jobs_per_s: float
    cpu_us: float
    wall_ratio: float
    cpu_ratio: float


Rows = dict[str, dict[str, Cost]]
"""Row, contender: the base is raw."""
Flatness = dict[str, dict[str, tuple[Cost, Cost]]]
"""Verb, contender: with few jobs queued and with many; the base is few."""


class Report(msgspec.Struct):
    """All that a run found out: what `--json` writes."""

    python: str
    sqlite: str
    machine: str
    rows: Rows
    flatness: Flatness
    targets: list[Judged]


def compare(samples: Sequence[Sample], bases: Sequence[Sample]) -> Cost:
    pairs = list(zip(samples, bases, strict=True))
    return Cost(
        statistics.median(sample.rate for sample in samples),
        statistics.median(sample.cpu_us for sample in samples),
        statistics.median(base.rate / sample.rate for sample, base in pairs),
        statistics.median(sample.cpu_us / base.cpu_us for sample, base in pairs),
    )


async def measure_rows(folder: Path, quick: bool) -> Rows:
    rows: Rows = {}
    async with AsyncExitStack() as stack:
        contenders: dict[str, Contender] = {
            "sqlite": await _sqlite(stack, folder / "rows.db"),
            "raw": _raw(stack, folder / "rows-raw.db"),
            "memory": Stored(await stack.enter_async_context(connect("memory://"))),
        }
        for name, (count, loop) in ROWS.items():
            _say(name)
            jobs, rounds = (count // 10, 1) if quick else (count, ROUNDS)
            for contender in contenders.values():
                await loop(contender, count // 10)  # Statements get compiled, caches get warm.
            samples = await _rounds(rounds, {who: [partial(loop, c, jobs)] for who, c in contenders.items()})
            rows[name] = {who: compare(taken, samples["raw"][0]) for who, (taken,) in samples.items()}
    return rows


async def measure_flatness(folder: Path) -> Flatness:
    """The cost of a job with few and with many jobs in the queue: files that differ in nothing else."""
    flatness: Flatness = {HUNDRED: {}, DRAIN: {}}
    async with AsyncExitStack() as stack:
        for who in ("sqlite", "raw"):
            contenders: dict[int, Contender] = {}
            for size in (FEW, MANY):
                _say(f"flatness: queueing {size:,} in {who}")
                path = folder / f"{who}-{size}.db"
                contenders[size] = await _sqlite(stack, path) if who == "sqlite" else _raw(stack, path)
                for _ in range(0, size, FEW):
                    await fill(contenders[size], FEW, 250)
            _say(f"flatness: {who}")
            loops = {
                str(size): [partial(fill, c, FLAT_JOBS, 100), partial(drain, c, FLAT_JOBS, 100)]
                for size, c in contenders.items()
            }
            samples = await _rounds(FLAT_ROUNDS, loops)
            for verb, few, many in zip((HUNDRED, DRAIN), samples[str(FEW)], samples[str(MANY)], strict=True):
                flatness[verb][who] = (compare(few, few), compare(many, few))
    return flatness


async def _rounds(
    rounds: int, loops: Mapping[str, Sequence[Callable[[], Awaitable[Sample]]]]
) -> dict[str, list[list[Sample]]]:
    """Run the loops of all contenders in turn, in reverse order in every second round."""
    samples: dict[str, list[list[Sample]]] = {name: [[] for _ in own] for name, own in loops.items()}
    turns = list(loops.items())
    for _ in range(rounds):
        for name, own in turns:
            for taken, loop in zip(samples[name], own, strict=True):
                taken.append(await loop())
        turns.reverse()
    return samples


async def _sqlite(stack: AsyncExitStack, path: Path) -> Stored:
    return Stored(await stack.enter_async_context(connect(f"sqlite:///{path}")))


def _raw(stack: AsyncExitStack, path: Path) -> Raw:
    raw = Raw(path)
    stack.push_async_callback(raw.aclose)
    return raw


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def judge(rows: Rows, flatness: Flatness) -> list[Judged]:
    bulk = max(rows[HUNDRED]["sqlite"].jobs_per_s, rows[MOST]["sqlite"].jobs_per_s)
    drained = rows[DRAIN]["sqlite"].jobs_per_s
    single = rows[SINGLE]["sqlite"]
    part = f"{100 / single.cpu_ratio:.0f} % by CPU, {100 / single.wall_ratio:.0f} % by wall"
    judged = [
        Judged("enqueue 100 or 250", "≥ 70,000/s", f"{bulk:,.0f}/s", bulk >= 70_000),
        Judged(DRAIN, "≥ 25,000/s", f"{drained:,.0f}/s", drained >= 25_000),
        Judged("enqueue 1, of the raw rate", "≥ 50 %", part, single.cpu_ratio <= 2),
    ]
    for verb, costs in flatness.items():
        _, many = costs["sqlite"]
        ratio = f"{many.cpu_ratio:.2f} by CPU, {many.wall_ratio:.2f} by wall"
        judged.append(Judged(f"{verb}, {MANY:,} ÷ {FEW:,} queued", "≤ 1.15", ratio, many.cpu_ratio <= 1.15))
    return judged


def render(report: Report) -> str:
    intro = f"Python {report.python}, SQLite {report.sqlite}, {report.machine}. Medians; µs are CPU time per job.\n"
    heads = ["row", "sqlite jobs/s", "µs", "raw jobs/s", "µs", "CPU ÷ raw", "wall ÷ raw", "memory jobs/s", "µs"]
    parts = [intro, table(heads, [_line(name, costs) for name, costs in report.rows.items()], of_numbers=True)]
    if report.flatness:
        heads = ["flatness", f"{FEW:,}: jobs/s", "µs", f"{MANY:,}: jobs/s", "µs", "CPU ratio", "wall ratio"]
        pairs = [(f"{verb}, {who}", *both) for verb, costs in report.flatness.items() for who, both in costs.items()]
        rows = [[name, *_cells(few), *_cells(many), *_ratios(many)] for name, few, many in pairs]
        parts.append(table(heads, rows, of_numbers=True))
    return "\n".join([*parts, targets(report.targets)])


def _line(name: str, costs: dict[str, Cost]) -> list[str]:
    ours = costs["sqlite"]
    return [name, *_cells(ours), *_cells(costs["raw"]), *_ratios(ours), *_cells(costs["memory"])]


def _cells(cost: Cost) -> list[str]:
    return [f"{cost.jobs_per_s:,.0f}", f"{cost.cpu_us:,.1f}"]


def _ratios(cost: Cost) -> list[str]:
    return [f"{cost.cpu_ratio:.2f}", f"{cost.wall_ratio:.2f}"]


async def main() -> tuple[bool, bool]:
    parser = argparse.ArgumentParser(prog="./dev bench storage", description="What a job costs, verb by verb.")
    parser.add_argument("--quick", action="store_true", help="small counts, one round, no million: a few seconds")
    parser.add_argument("--million", action=argparse.BooleanOptionalAction, help="flatness, with a million queued")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    asked = parser.parse_args()
    million = not asked.quick if asked.million is None else asked.million
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        rows = await measure_rows(Path(folder), asked.quick)
        flatness = await measure_flatness(Path(folder)) if million else {}
    judged = judge(rows, flatness)
    report = Report(platform.python_version(), sqlite3.sqlite_version, machine, rows, flatness, judged)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(render(report))
    return asked.quick, million


if __name__ == "__main__":
    redis_storage.run(*asyncio.run(main()))
