"""What a job costs in a storage, verb by verb, beside the bare SQLite statements that any queue on that schema needs.

A contender (`Stored`, `Raw`) has the timed loops; a `Row` says which loop is run on how many jobs. Contenders take turns
within a round and a ratio only ever compares neighbours of one round, because the machine is shared and its speed
drifts. CPU time counts all threads of this process. How to read the tables: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from holdfast.jobs import Complete, Job, Lease, Request, State, Work, new_id
from holdfast.storage import Storage, connect

QUEUE = "bench"
WORKER = "bench-worker"
LEASE_MS = 60_000
PAYLOAD = b"x" * 100
LARGE = b"x" * 1_048_576
ROUNDS = 5
FLAT_ROUNDS = 9
FLAT_JOBS = 5_000
"""Jobs of one flatness sample: they come on top of the queue and go again, so its size stays about what is named."""
FEW, MANY = 10_000, 1_000_000

T = TypeVar("T")


class Sample(msgspec.Struct):
    """One timed loop."""

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
def timed(jobs: int) -> Iterator[Sample]:
    sample = Sample(jobs)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    yield sample
    sample.wall_s, sample.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def cut(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class Contender(Protocol):
    """The timed loops. `fill` and `drain` change the queue's size, the others leave it as it was."""

    async def fill(self, count: int, batch: int) -> Sample:
        """Enqueue, a batch a call."""
        ...

    async def fill_together(self, count: int) -> Sample:
        """Enqueue by 100 callers at a time, each with one job."""
        ...

    async def drain(self, count: int, batch: int) -> Sample:
        """Claim and complete, with nothing to remember, a batch a call."""
        ...

    async def extend(self, times: int) -> Sample:
        """Extend 100 leases."""
        ...

    async def get(self, times: int, batch: int) -> Sample: ...

    async def cancel(self, count: int) -> Sample:
        """Cancel waiting jobs, 100 a call."""
        ...

    async def sweep(self, times: int) -> Sample:
        """Look for expired leases, among 100 that are not. A sweep is counted as one job."""
        ...

    async def large(self, count: int) -> Sample:
        """Enqueue, claim, extend and complete a job of 1 MiB, one after the other."""
        ...


class Stored:
    """A storage of Holdfast, through its protocol."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def fill(self, count: int, batch: int) -> Sample:
        batches = cut(_requests(count), batch)
        with timed(count) as sample:
            for jobs in batches:
                await self._storage.enqueue(QUEUE, jobs)
        return sample

    async def fill_together(self, count: int) -> Sample:
        crowds = cut([[request] for request in _requests(count)], 100)
        with timed(count) as sample:
            for crowd in crowds:
                await asyncio.gather(*(self._storage.enqueue(QUEUE, jobs) for jobs in crowd))
        return sample

    async def drain(self, count: int, batch: int) -> Sample:
        done = 0
        with timed(count) as sample:
            while done < count:
                jobs = await self._claim(min(batch, count - done))
                await self._complete(jobs)
                done += len(jobs)
        return sample

    async def extend(self, times: int) -> Sample:
        await self.fill(100, 100)
        jobs = await self._claim(100)
        leases = _leases(jobs)
        with timed(100 * times) as sample:
            for _ in range(times):
                await self._storage.extend(QUEUE, leases, worker=WORKER, lease_ms=LEASE_MS)
        await self._complete(jobs)
        return sample

    async def get(self, times: int, batch: int) -> Sample:
        requests = _requests(100)
        await self._storage.enqueue(QUEUE, requests)
        ids = [request.id for request in requests[:batch]]
        with timed(batch * times) as sample:
            for _ in range(times):
                await self._storage.get(QUEUE, ids)
        await self.drain(100, 100)
        return sample

    async def cancel(self, count: int) -> Sample:
        batches = cut(_requests(count), 100)
        for jobs in batches:
            await self._storage.enqueue(QUEUE, jobs)
        ids = [[request.id for request in jobs] for jobs in batches]
        with timed(count) as sample:
            for some in ids:
                await self._storage.cancel(QUEUE, some)
        while await self._storage.purge(QUEUE, [State.CANCELLED]):
            pass
        return sample

    async def sweep(self, times: int) -> Sample:
        await self.fill(100, 100)
        jobs = await self._claim(100)
        with timed(times) as sample:
            for _ in range(times):
                await self._storage.sweep(QUEUE)
        await self._complete(jobs)
        return sample

    async def large(self, count: int) -> Sample:
        requests = _requests(count, LARGE)
        with timed(count) as sample:
            for request in requests:
                await self._storage.enqueue(QUEUE, [request])
                jobs = await self._claim(1)
                await self._storage.extend(QUEUE, _leases(jobs), worker=WORKER, lease_ms=LEASE_MS)
                await self._complete(jobs)
        return sample

    async def _claim(self, limit: int) -> list[Job]:
        claim = await self._storage.claim(QUEUE, limit, worker=WORKER, lease_ms=LEASE_MS)
        assert len(claim.jobs) == limit
        return claim.jobs

    async def _complete(self, jobs: Sequence[Job]) -> None:
        batch = [Complete(lease.id, lease.fence) for lease in _leases(jobs)]
        await self._storage.settle(QUEUE, batch, worker=WORKER)


def _requests(count: int, payload: bytes = PAYLOAD) -> list[Request]:
    return [Request(new_id(), Work(payload)) for _ in range(count)]


def _leases(jobs: Sequence[Job]) -> list[Lease]:
    return [Lease(job.id, job.run.fence) for job in jobs if job.run is not None]


INSERT = (
    "INSERT INTO holdfast_jobs (queue, id, state, view, priority, run_at, arrival, until_at, worker, payload, rest)"
    " VALUES (1, ?, 'waiting', NULL, 5, ?, ?, NULL, NULL, ?, ?)"
)
DUE = (
    "SELECT id, state, view, priority, run_at, arrival, payload, rest FROM holdfast_jobs"
    " WHERE queue = 1 AND until_at IS NULL AND priority = 5 AND run_at <= ? ORDER BY run_at, arrival LIMIT ?"
)
LEASE = "UPDATE holdfast_jobs SET state = 'running', until_at = ?, worker = ?, rest = ? WHERE queue = 1 AND id = ?"
EXTEND = "UPDATE holdfast_jobs SET until_at = ?, rest = ? WHERE queue = 1 AND id = ?"
CANCEL = "UPDATE holdfast_jobs SET state = 'cancelled', until_at = ?, rest = ? WHERE queue = 1 AND id = ?"
DELETE = "DELETE FROM holdfast_jobs WHERE queue = 1 AND id = ?"
GET = "SELECT id, state, view, priority, run_at, arrival, payload, rest FROM holdfast_jobs WHERE queue = 1 AND id"
EXPIRED = (
    "SELECT id FROM holdfast_jobs WHERE queue = 1 AND state = 'running' AND until_at <= ? ORDER BY until_at LIMIT 100"
)
REST = bytes(36)
REST_OF_RUN = bytes(72)
"""As many bytes as a storage's msgpack has for such jobs."""

Row_ = tuple[object, ...]


class Raw:
    """The bare statements: no checks, no counts, no fences, no replies, no events. Nothing on this schema is faster."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -65536")
        self._db.executescript(resources.files("holdfast.storage").joinpath("schema.sql").read_text())
        self._arrivals = itertools.count(_now())

    async def aclose(self) -> None:
        self._db.close()

    async def fill(self, count: int, batch: int) -> Sample:
        batches = cut(self._rows(count), batch)
        with timed(count) as sample:
            for rows in batches:
                self._write(INSERT, rows)
        return sample

    async def fill_together(self, count: int) -> Sample:
        crowds = cut(self._rows(count), 100)
        with timed(count) as sample:
            for rows in crowds:
                self._db.execute("BEGIN IMMEDIATE")
                for row in rows:
                    self._db.execute(INSERT, row)
                self._db.execute("COMMIT")
        return sample

    async def drain(self, count: int, batch: int) -> Sample:
        done = 0
        with timed(count) as sample:
            while done < count:
                ids = self._claim(min(batch, count - done))
                self._write(DELETE, ids)
                done += len(ids)
        return sample

    async def extend(self, times: int) -> Sample:
        await self.fill(100, 100)
        ids = self._claim(100)
        with timed(100 * times) as sample:
            for _ in range(times):
                until_at = _now() + 1000 * LEASE_MS
                self._write(EXTEND, [(until_at, REST_OF_RUN, id) for (id,) in ids])
        self._write(DELETE, ids)
        return sample

    async def get(self, times: int, batch: int) -> Sample:
        rows = self._rows(100)
        self._write(INSERT, rows)
        ids = [row[0] for row in rows[:batch]]
        statement = f"{GET} IN ({','.join('?' * batch)})"
        with timed(batch * times) as sample:
            for _ in range(times):
                self._db.execute(statement, ids).fetchall()
        await self.drain(100, 100)
        return sample

    async def cancel(self, count: int) -> Sample:
        batches = cut(self._rows(count), 100)
        for rows in batches:
            self._write(INSERT, rows)
        with timed(count) as sample:
            for rows in batches:
                until_at = _now() + 3_600_000_000
                self._write(CANCEL, [(until_at, REST, row[0]) for row in rows])
        self._db.execute("DELETE FROM holdfast_jobs")
        return sample

    async def sweep(self, times: int) -> Sample:
        await self.fill(100, 100)
        ids = self._claim(100)
        with timed(times) as sample:
            for _ in range(times):
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute(EXPIRED, (_now(),)).fetchall()
                self._db.execute("COMMIT")
        self._write(DELETE, ids)
        return sample

    async def large(self, count: int) -> Sample:
        rows = self._rows(count, LARGE)
        with timed(count) as sample:
            for row in rows:
                self._write(INSERT, [row])
                [(id,)] = self._claim(1)
                self._write(EXTEND, [(_now() + 1000 * LEASE_MS, REST_OF_RUN, id)])
                self._write(DELETE, [(id,)])
        return sample

    def _rows(self, count: int, payload: bytes = PAYLOAD) -> list[Row_]:
        now = _now()
        return [(new_id().encode(), now, next(self._arrivals), payload, REST) for _ in range(count)]

    def _write(self, statement: str, rows: Sequence[Row_]) -> None:
        if len(rows) == 1:
            self._db.execute(statement, rows[0])
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(statement, rows)
        self._db.execute("COMMIT")

    def _claim(self, limit: int) -> list[Row_]:
        now = _now()
        until_at = now + 1000 * LEASE_MS
        self._db.execute("BEGIN IMMEDIATE")
        rows = self._db.execute(DUE, (now, limit)).fetchall()
        self._db.executemany(LEASE, [(until_at, WORKER, REST_OF_RUN, row[0]) for row in rows])
        self._db.execute("COMMIT")
        assert len(rows) == limit
        return [(row[0],) for row in rows]


def _now() -> int:
    return time.time_ns() // 1000


class Row(msgspec.Struct):
    """A line of the table: a timed loop and how many jobs, or calls, it is run on."""

    name: str
    count: int
    run: Callable[[Contender, int], Awaitable[Sample]]


def _filling(batch: int) -> Callable[[Contender, int], Awaitable[Sample]]:
    async def run(contender: Contender, count: int) -> Sample:
        sample = await contender.fill(count, batch)
        await contender.drain(count, 250)
        return sample

    return run


def _draining(batch: int) -> Callable[[Contender, int], Awaitable[Sample]]:
    async def run(contender: Contender, count: int) -> Sample:
        await contender.fill(count, 250)
        return await contender.drain(count, batch)

    return run


async def _filling_together(contender: Contender, count: int) -> Sample:
    sample = await contender.fill_together(count)
    await contender.drain(count, 250)
    return sample


SINGLE, HUNDRED, MOST, DRAIN = "enqueue 1", "enqueue 100", "enqueue 250", "claim + settle 100"
"""The rows that have a target."""

ROWS = [
    Row(SINGLE, 2_000, _filling(1)),
    Row("enqueue 10", 5_000, _filling(10)),
    Row(HUNDRED, 10_000, _filling(100)),
    Row(MOST, 10_000, _filling(250)),
    Row("enqueue 1, by 100 callers at once", 5_000, _filling_together),
    Row("claim + settle 1", 1_000, _draining(1)),
    Row("claim + settle 10", 3_000, _draining(10)),
    Row(DRAIN, 5_000, _draining(100)),
    Row("claim + settle 250", 5_000, _draining(250)),
    Row("extend 100", 50, lambda contender, times: contender.extend(times)),
    Row("get 1", 2_000, lambda contender, times: contender.get(times, 1)),
    Row("get 100", 100, lambda contender, times: contender.get(times, 100)),
    Row("cancel 100", 5_000, lambda contender, count: contender.cancel(count)),
    Row("sweep, nothing due", 1_000, lambda contender, times: contender.sweep(times)),
    Row("1 MiB: enqueue, claim, extend, settle", 20, lambda contender, count: contender.large(count)),
]


class Cost(msgspec.Struct):
    """Medians of the rounds; a ratio is the median of the rounds' own ratios."""

    rate: float
    cpu_us: float
    wall_ratio: float = 1.0
    """This cost ÷ what it is compared with, in wall time."""
    cpu_ratio: float = 1.0


def compare(samples: Sequence[Sample], base: Sequence[Sample]) -> Cost:
    return Cost(
        statistics.median(sample.rate for sample in samples),
        statistics.median(sample.cpu_us for sample in samples),
        statistics.median(other.rate / sample.rate for sample, other in zip(samples, base, strict=True)),
        statistics.median(sample.cpu_us / other.cpu_us for sample, other in zip(samples, base, strict=True)),
    )


class Target(msgspec.Struct):
    name: str
    wanted: str
    measured: str
    met: bool


class Report(msgspec.Struct):
    """All that a run found out; `--json` writes it."""

    python: str
    sqlite: str
    machine: str
    rows: dict[str, dict[str, Cost]]
    """row → contender → cost, compared with raw."""
    flatness: dict[str, dict[str, tuple[Cost, Cost]]]
    """verb → contender → cost with few jobs queued, and with many, compared with few."""
    targets: list[Target]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(row: Row, contenders: dict[str, Contender], count: int, rounds: int) -> dict[str, Cost]:
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    turns = list(contenders.items())
    for _, contender in turns:
        await row.run(contender, max(1, count // 20))  # Statements get compiled, caches warm.
    for _ in range(rounds):
        for name, contender in turns:
            samples[name].append(await row.run(contender, count))
        turns.reverse()
    return {name: compare(taken, samples["raw"]) for name, taken in samples.items()}


async def measure_flatness(few: Contender, many: Contender, rounds: int) -> dict[str, tuple[Cost, Cost]]:
    """The cost of a job at the end of a short and of a long queue."""
    filled: tuple[list[Sample], list[Sample]] = ([], [])
    drained: tuple[list[Sample], list[Sample]] = ([], [])
    turns = [(0, few), (1, many)]
    for _ in range(rounds):
        for which, contender in turns:
            filled[which].append(await contender.fill(FLAT_JOBS, 100))
            drained[which].append(await contender.drain(FLAT_JOBS, 100))
        turns.reverse()
    return {
        verb: (compare(few_samples, few_samples), compare(many_samples, few_samples))
        for verb, (few_samples, many_samples) in ((HUNDRED, filled), (DRAIN, drained))
    }


async def measure_rows(folder: Path, quick: bool) -> dict[str, dict[str, Cost]]:
    found: dict[str, dict[str, Cost]] = {}
    async with AsyncExitStack() as stack:
        contenders: dict[str, Contender] = {
            "sqlite": Stored(await stack.enter_async_context(connect(f"sqlite:///{folder}/rows.db"))),
            "raw": _raw(stack, folder / "rows-raw.db"),
            "memory": Stored(await stack.enter_async_context(connect("memory://"))),
        }
        for row in ROWS:
            say(row.name)
            count = max(1, row.count // 20) if quick else row.count
            found[row.name] = await measure(row, contenders, count, 1 if quick else ROUNDS)
    return found


async def measure_both_lengths(folder: Path) -> dict[str, dict[str, tuple[Cost, Cost]]]:
    found: dict[str, dict[str, tuple[Cost, Cost]]] = {HUNDRED: {}, DRAIN: {}}
    async with AsyncExitStack() as stack:
        few, many = (
            Stored(await stack.enter_async_context(connect(f"sqlite:///{folder}/flat-{size}.db")))
            for size in (FEW, MANY)
        )
        raw_few, raw_many = (_raw(stack, folder / f"flat-{size}-raw.db") for size in (FEW, MANY))
        pairs: dict[str, tuple[Contender, Contender]] = {"sqlite": (few, many), "raw": (raw_few, raw_many)}
        for name, (short, long) in pairs.items():
            for contender, size in ((short, FEW), (long, MANY)):
                say(f"flatness: queueing {size:,} in {name}")
                for _ in range(size // FEW):
                    await contender.fill(FEW, 250)
            say(f"flatness: {name}")
            for verb, costs in (await measure_flatness(short, long, FLAT_ROUNDS)).items():
                found[verb][name] = costs
    return found


def _raw(stack: AsyncExitStack, path: Path) -> Raw:
    raw = Raw(path)
    stack.push_async_callback(raw.aclose)
    return raw


def judge(rows: dict[str, dict[str, Cost]], flatness: dict[str, dict[str, tuple[Cost, Cost]]]) -> list[Target]:
    bulk = max(rows[HUNDRED]["sqlite"].rate, rows[MOST]["sqlite"].rate)
    drain = rows[DRAIN]["sqlite"].rate
    single = rows[SINGLE]["sqlite"]
    targets = [
        Target("enqueue 100 or 250", "≥ 70,000/s", f"{bulk:,.0f}/s", bulk >= 70_000),
        Target(DRAIN, "≥ 25,000/s", f"{drain:,.0f}/s", drain >= 25_000),
        Target(
            f"{SINGLE}, of raw SQLite's rate",
            "≥ 50 %",
            f"{100 / single.cpu_ratio:.0f} % by CPU, {100 / single.wall_ratio:.0f} % by wall",
            single.cpu_ratio <= 2,
        ),
    ]
    for verb, costs in flatness.items():
        many = costs["sqlite"][1]
        measured = f"{many.cpu_ratio:.2f} by CPU, {many.wall_ratio:.2f} by wall"
        targets.append(Target(f"{verb}, {MANY:,} queued ÷ {FEW:,}", "≤ 1.15", measured, many.cpu_ratio <= 1.15))
    return targets


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in heads[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *lines))


def render(report: Report) -> str:
    parts = [f"Python {report.python}, SQLite {report.sqlite}, {report.machine}. Medians; µs are CPU time per job."]
    lines = []
    for name, costs in report.rows.items():
        ours, raw, memory = costs["sqlite"], costs["raw"], costs["memory"]
        cells = [f"{cost.rate:,.0f} | {cost.cpu_us:,.1f}" for cost in (ours, raw)]
        ratios = [f"{ours.cpu_ratio:.2f}", f"{ours.wall_ratio:.2f}"]
        lines.append([name, *cells, *ratios, f"{memory.rate:,.0f}", f"{memory.cpu_us:,.1f}"])
    heads = ["", "sqlite jobs/s", "µs", "raw jobs/s", "µs", "CPU ÷ raw", "wall ÷ raw", "memory jobs/s", "µs"]
    parts.append(table(heads, lines))
    if report.flatness:
        lines = [
            [f"{verb}, {name}", f"{few.cpu_us:,.1f}", f"{many.cpu_us:,.1f}", f"{many.cpu_ratio:.2f}"]
            + [f"{few.rate:,.0f}", f"{many.rate:,.0f}", f"{many.wall_ratio:.2f}"]
            for verb, costs in report.flatness.items()
            for name, (few, many) in costs.items()
        ]
        heads = ["queued before:", f"{FEW:,}: µs", f"{MANY:,}: µs", "CPU ratio", f"{FEW:,}: jobs/s"]
        parts.append(table([*heads, f"{MANY:,}: jobs/s", "wall ratio"], lines))
    lines = [
        [target.name, target.wanted, target.measured, "met" if target.met else "not met"] for target in report.targets
    ]
    parts.append(table(["target", "wanted", "measured", ""], lines))
    return "\n\n".join(parts)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench storage", description="What a job costs, verb by verb.")
    parser.add_argument("--quick", action="store_true", help="small counts, one round, no million: a few seconds")
    parser.add_argument("--million", action=argparse.BooleanOptionalAction, help="the flatness rows (not with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    asked = parser.parse_args()
    million = not asked.quick if asked.million is None else asked.million
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        rows = await measure_rows(Path(name), asked.quick)
        flatness = await measure_both_lengths(Path(name)) if million else {}
    machine = f"{platform.system()} {platform.machine()}"
    targets = judge(rows, flatness)
    report = Report(platform.python_version(), sqlite3.sqlite_version, machine, rows, flatness, targets)
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(render(report))


if __name__ == "__main__":
    asyncio.run(main())
