"""What a job costs on Redis and Valkey: client and server CPU, calls and bytes, beside the limit.

The limit is `bare`: the same functions of the same library, over a blocking socket with hiredis and nothing else: no
checks, no coalescing, no retries, replies hardly looked at. Servers are private, on loopback, without persistence.
Server CPU is what INFO says. Rounds and medians as in storage.py; how to read the tables: README.md, beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import redis.asyncio

from benchmarks.bare import LEASE_MS, QUEUE, WORKER, Functions
from holdfast._core.jobs import Complete, Job, Request, Work, new_id
from holdfast.storage import Storage, connect
from tests.servers import Name, Server, redis_binary

PAYLOAD = b"x" * 100
ROUNDS, FEW, MANY, FLAT_JOBS = 5, 10_000, 1_000_000, 10_000
SLOW_US = 10_000
"""Longer than this, a call is slow: SLOWLOG must stay empty."""


class Cost(msgspec.Struct):
    """Per job."""

    rate: float
    client_us: float
    server_us: float
    calls: float
    bytes: float


class Meter:
    """What happens on one server between two looks."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def look(self) -> tuple[float, float, float, float, float]:
        cpu, stats, commands = (self._server.info(section) for section in ("cpu", "stats", "commandstats"))
        called = sum(calls(commands.get(name, "")) for name in ("cmdstat_fcall", "cmdstat_evalsha"))
        return (
            time.perf_counter(),
            time.process_time(),
            float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
            called,
            float(stats["total_net_input_bytes"]) + float(stats["total_net_output_bytes"]),
        )

    def cost(self, before: tuple[float, ...], after: tuple[float, ...], jobs: int) -> Cost:
        wall, client, server, calls, traffic = (b - a for a, b in zip(before, after, strict=True))
        return Cost(jobs / wall, 1e6 * client / jobs, 1e6 * server / jobs, calls / jobs, traffic / jobs)


def calls(line: str) -> float:
    return float(line.split("calls=")[1].split(",")[0]) if line else 0.0


class Stored:
    """Holdfast, through its protocol."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def enqueue(self, jobs: Sequence[Request]) -> None:
        await self._storage.enqueue(QUEUE, jobs)

    async def together(self, jobs: Sequence[Request], callers: int) -> None:
        async def caller(mine: Sequence[Request]) -> None:
            for job in mine:
                await self._storage.enqueue(QUEUE, [job])

        await asyncio.gather(*(caller(jobs[start::callers]) for start in range(callers)))

    async def claim_and_settle(self, limit: int) -> None:
        claim = await self._storage.claim(QUEUE, limit, worker=WORKER, lease_ms=LEASE_MS)
        await self._storage.settle(QUEUE, [_complete(job) for job in claim.jobs], worker=WORKER)


def _complete(job: Job) -> Complete:
    assert job.run is not None
    return Complete(job.id, job.run.fence)


class Bare:
    """The limit: the same functions over a blocking socket."""

    def __init__(self, server: Server) -> None:
        self._functions = Functions(server.port)

    def close(self) -> None:
        self._functions.close()

    async def enqueue(self, jobs: Sequence[Request]) -> None:
        self._functions.enqueue(jobs)

    async def together(self, jobs: Sequence[Request], callers: int) -> None:
        for start in range(0, len(jobs), callers):
            self._functions.enqueue(jobs[start : start + callers])

    async def claim_and_settle(self, limit: int) -> None:
        self._functions.settle(self._functions.claim(limit))


Contender = Stored | Bare
Loop = Callable[[Contender, int], Awaitable[None]]


async def _enqueue(contender: Contender, jobs: list[Request], batch: int) -> None:
    for start in range(0, len(jobs), batch):
        await contender.enqueue(jobs[start : start + batch])


async def _drain(contender: Contender, count: int, batch: int) -> None:
    for _ in range(0, count, batch):
        await contender.claim_and_settle(batch)


def make(count: int) -> list[Request]:
    return [Request(new_id(), Work(PAYLOAD)) for _ in range(count)]


async def measure(
    meter: Meter, contenders: dict[str, Contender], count: int, batch: int, rounds: int, callers: int = 0
) -> dict[str, tuple[Cost, Cost]]:
    """The cost of enqueue, and of claim and settle, of each contender: medians of rounds in which they take turns."""
    taken: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            jobs = make(count)
            gc.collect()
            start = meter.look()
            await (contender.together(jobs, callers) if callers else _enqueue(contender, jobs, batch))
            middle = meter.look()
            await _drain(contender, count, batch if not callers else 100)
            end = meter.look()
            taken[name].append((meter.cost(start, middle, count), meter.cost(middle, end, count)))
    return {
        name: (_median([first for first, _ in costs]), _median([second for _, second in costs]))
        for name, costs in taken.items()
    }


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(getattr(cost, name) for cost in costs) for name in Cost.__struct_fields__))


async def plain_evalsha(server: Server, count: int, rounds: int) -> Cost:
    """A script that only SETs, awaited one at a time through redis-py: what one round trip costs there."""
    client = redis.asyncio.Redis(port=server.port)
    sha = await client.script_load("return redis.call('SET', KEYS[1], ARGV[1])")
    meter, costs = Meter(server), []
    for _ in range(rounds):
        start = meter.look()
        for n in range(count):
            await client.evalsha(sha, 1, f"plain{n}", PAYLOAD)
        costs.append(meter.cost(start, meter.look(), count))
    await client.delete(*(f"plain{n}" for n in range(count)))
    await client.aclose()
    return _median(costs)


async def memory(server: Server, contender: Contender, count: int) -> float:
    """Bytes that a queued job takes, by the server's own account."""
    before = int(server.info("memory")["used_memory"])
    await _enqueue(contender, make(count), 250)
    return (int(server.info("memory")["used_memory"]) - before) / count


@asynccontextmanager
async def opened(kind: Name) -> AsyncIterator[tuple[Server, dict[str, Contender]]]:
    with Server(kind, "--slowlog-log-slower-than", str(SLOW_US)) as server:
        async with connect(server.url) as storage:
            bare = Bare(server)
            yield server, {"holdfast": Stored(storage), "bare": bare}
            bare.close()


def show(name: str, costs: dict[str, Cost]) -> None:
    for who, cost in costs.items():
        costs_cpu = f"client {cost.client_us:6.1f} µs  server {cost.server_us:6.1f} µs"
        print(
            f"  {name:34} {who:9} {cost.rate:>9,.0f}/s  {costs_cpu}  {cost.calls:5.2f} calls  {cost.bytes:6.0f} bytes"
        )
        name = ""


def target(name: str, measured: float, wanted: float, *, at_most: bool) -> None:
    met = measured <= wanted if at_most else measured >= wanted
    sign = "≤" if at_most else "≥"
    print(f"  {'met   ' if met else 'MISSED'} {name}: {measured:,.2f} ({sign} {wanted:,.2f})")


async def main(kind: Name, quick: bool, million: bool) -> None:
    rounds, count = (1, 2_000) if quick else (ROUNDS, 20_000)
    async with opened(kind) as (server, contenders):
        meter = Meter(server)
        print(f"\n{kind} {server.version}: a job of {len(PAYLOAD)} bytes")
        await measure(meter, contenders, 2_000, 100, 1)
        hundred = await measure(meter, contenders, count, 100, rounds)
        one = await measure(meter, contenders, count // 10, 1, rounds)
        together = await measure(meter, contenders, count, 1, rounds, callers=100)
        plain = await plain_evalsha(server, count // 10, rounds)
        show("enqueue 1", {who: costs[0] for who, costs in one.items()})
        show("  a plain EVALSHA, one at a time", {"redis-py": plain})
        show("enqueue 1, by 100 callers at once", {who: costs[0] for who, costs in together.items()})
        show("enqueue 100", {who: costs[0] for who, costs in hundred.items()})
        show("claim + settle 1", {who: costs[1] for who, costs in one.items()})
        show("claim + settle 100", {who: costs[1] for who, costs in hundred.items()})
        per_job = await memory(server, contenders["holdfast"], count)
        print(f"  a queued job takes {per_job:.0f} bytes")
        await _drain(contenders["holdfast"], count, 100)
        target("bytes per queued job", per_job, 340 if kind == "valkey" else 420, at_most=True)
        target("server µs, enqueue 100", hundred["holdfast"][0].server_us, 8, at_most=True)
        target("server µs, claim + settle 100", hundred["holdfast"][1].server_us, 14, at_most=True)
        target("enqueues/s of 100 callers at once", together["holdfast"][0].rate, 40_000, at_most=False)
        target("enqueue 1 ÷ plain EVALSHA, by rate", one["holdfast"][0].rate / plain.rate, 1, at_most=False)
        if million:
            await flatness(kind, server, contenders["holdfast"], meter)


async def flatness(kind: Name, server: Server, contender: Contender, meter: Meter) -> None:
    """The cost of a job with few and with a million others queued. SLOWLOG must have nothing to say about it."""
    queued, costs = 0, {}
    for size in (FEW, MANY):
        while queued < size:
            await _enqueue(contender, make(min(50_000, size - queued)), 250)
            queued = min(queued + 50_000, size)
        server.command("SLOWLOG", "RESET")
        costs[size] = (await measure(meter, {"holdfast": contender}, FLAT_JOBS, 100, ROUNDS))["holdfast"]
    for name, at in (("enqueue 100", 0), ("claim + settle 100", 1)):
        few, many = costs[FEW][at], costs[MANY][at]
        show(f"{name}, {FEW:,} queued", {"holdfast": few})
        show(f"{name}, {MANY:,} queued", {"holdfast": many})
        ratio = (many.server_us + many.client_us) / (few.server_us + few.client_us)
        target(f"{name}: CPU at {MANY:,} ÷ at {FEW:,} queued", ratio, 1.15, at_most=True)
    slow = server.command("SLOWLOG", "GET", 10)
    assert isinstance(slow, list)
    target(f"calls slower than {SLOW_US / 1000:.0f} ms at {MANY:,} queued", len(slow), 0, at_most=True)


def run(quick: bool = False, million: bool = True) -> None:
    kinds: tuple[Name, ...] = ("valkey", "redis")
    for kind in kinds:
        if kind == "redis" and redis_binary() is None:
            print("\nredis: no redis-server ≥ 7.0 on this machine")
            continue
        asyncio.run(main(kind, quick, million))
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./dev bench redis_storage", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, only to see that it runs")
    parser.add_argument("--no-million", action="store_true", help="leave out the flatness")
    options = parser.parse_args()
    run(options.quick, million=not options.no_million)
