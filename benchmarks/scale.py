"""How the cost of a job changes with what is around it: one curve for each thing that may grow.

    ./dev bench scale [--quick]

On private Valkeys without persistence. Writes benchmarks/results/scale.json, scale.md and a plot for each curve.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import msgspec

from benchmarks.bare import LEASE_MS, QUEUE, WORKER
from benchmarks.monitor import Monitor
from benchmarks.pages import FAINT, RESULTS, Judged, number, plot, table, targets, text
from benchmarks.redis_storage import Meter, Stored, make, measure
from holdfast import Holdfast
from holdfast._core.jobs import Complete, Job, Request, Work, new_id
from holdfast.storage import Storage, connect
from holdfast.storage.validation import MAX_CALL_BYTES, MAX_ITEMS, MAX_PAYLOAD_BYTES
from tests.servers import Server

BATCH = 100
DAY_MS = 86_400_000
SETTLE_S = 1.5
"""Until a worker that has just started, or has just run a job, is idle."""
MAX_TIMES, TIMES_MORE, SLOWEST_MS, CLAIMS_A_JOB, IDLE_COMMANDS = 1.15, 2, 10, 1.2, 3
"""The targets: what may not be exceeded, however much there is."""
QUEUES_RATE = 0.5
"""The least rate of a worker of 4,000 queues, compared with 100 queues."""
PERCENTILES = (50, 90, 99, 99.9)


class Curve(msgspec.Struct):
    """One thing grows; what is measured at each point of it."""

    title: str
    grows: str
    unit: str
    points: list[tuple[float, float]]
    target: Judged | None = None


async def backlog(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """A job that is enqueued, claimed and settled, with ever more others queued."""

    async def queue(count: int) -> None:
        await storage.enqueue(QUEUE, make(count))

    points = await _beside(storage, server, quick, queue)
    return [Curve("A job beside a backlog", "jobs queued", CPU, points, _flat_enough("queued", points))]


async def kept(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """The same with ever more finished records that are kept."""

    async def finish(count: int) -> None:
        await storage.enqueue(QUEUE, [Request(new_id(), Work(b"x" * 100), custom_id=True) for _ in range(count)])
        claim = await storage.claim(QUEUE, count, worker=WORKER, lease_ms=LEASE_MS)
        done = [Complete(job.id, _fence(job), b"1", result_ttl_ms=DAY_MS) for job in claim.jobs]
        await storage.settle(QUEUE, done, worker=WORKER)

    points = await _beside(storage, server, quick, finish)
    return [Curve("A job beside finished records", "records kept", CPU, points, _flat_enough("kept", points))]


async def expiring(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """Records under bulk load whose results are kept for a second: their number and bytes reach a level and stay."""
    counts: list[tuple[float, float]] = []
    sizes: list[tuple[float, float]] = []
    done, began = 0, time.perf_counter()
    for at_s in (2, 4) if quick else (2, 10, 20, 40):
        while time.perf_counter() < began + at_s:
            await storage.enqueue(QUEUE, make(MAX_ITEMS))
            claim = await storage.claim(QUEUE, MAX_ITEMS, worker=WORKER, lease_ms=LEASE_MS)
            ended = [Complete(job.id, _fence(job), b"1", result_ttl_ms=1_000) for job in claim.jobs]
            await storage.settle(QUEUE, ended, worker=WORKER)
            done += len(ended)
            await asyncio.sleep(0.02)
        (stats,) = (await storage.snapshot()).queues
        counts.append((done, stats.completed + stats.expired))
        sizes.append((done, int(server.info("memory")["used_memory"]) / 1e6))
    (few, first), (many, last) = counts[0], counts[-1]
    name = f"records kept for one second, after {many:,.0f} jobs against {few:,.0f}"
    target = Judged(name, f"≤ {TIMES_MORE} ×", f"{last / first:.2f} ×", last / first <= TIMES_MORE)
    return [
        Curve("Records that expire under bulk load", "jobs run", "records", counts, target),
        Curve("Memory while records expire", "jobs run", "MB of the server", sizes),
    ]


CPU = "µs of CPU, client and server"


async def _beside(
    storage: Storage, server: Server, quick: bool, add: Callable[[int], Awaitable[None]]
) -> list[tuple[float, float]]:
    """What a job costs with ever more that `add` has put beside it."""
    points: list[tuple[float, float]] = []
    jobs, rounds = (2_000, 1) if quick else (10_000, 5)
    there = 0
    for size in (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        while there < size:
            count = min(MAX_ITEMS, size - there)
            await add(count)
            there += count
        enqueue, rest = (await measure(Meter(server), {"it": Stored(storage)}, jobs, BATCH, rounds))["it"]
        points.append((size, enqueue.client_us + enqueue.server_us + rest.client_us + rest.server_us))
    return points


def _flat_enough(what: str, points: list[tuple[float, float]]) -> Judged:
    """The cost at the largest size against ten thousand, or against the smallest size in a quick run."""
    (few, base), (many, cost) = points[-3 if len(points) > 2 else 0], points[-1]
    name = f"{many:,.0f} {what} against {few:,.0f}, cost per job"
    return Judged(name, f"≤ {MAX_TIMES} ×", f"{cost / base:.2f} ×", cost / base <= MAX_TIMES)


async def payloads(storage: Storage, _: Server, quick: bool) -> list[Curve]:
    """How much passes through a queue: enqueued, claimed and settled."""
    points: list[tuple[float, float]] = []
    for size in (100, 1_000, 10_000, 100_000, MAX_PAYLOAD_BYTES):
        count = max(4, (4_000_000 if quick else 50_000_000) // (size + 2_000))
        batch = max(1, min(BATCH, MAX_CALL_BYTES // 2 // size))
        jobs = [Request(new_id(), Work(b"x" * size)) for _ in range(count)]
        began = time.perf_counter()
        for start in range(0, count, batch):
            await storage.enqueue(QUEUE, jobs[start : start + batch])
        await _claim_and_settle(storage, count, batch)
        points.append((size, count * size / 1e6 / (time.perf_counter() - began)))
    return [Curve("Payloads", "bytes", "MB a second, in and out", points)]


async def due_at_once(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """Many delayed jobs become due at one instant: does any call take the server long?"""
    count, wait_s = (5_000, 3) if quick else (100_000, 20)
    run_at = time.time_ns() // 1000 + wait_s * 1_000_000
    for start in range(0, count, MAX_ITEMS):
        some = range(start, min(start + MAX_ITEMS, count))
        await storage.enqueue(QUEUE, [Request(new_id(), Work(b"x" * 100), run_at=run_at) for _ in some])
    early_s = run_at / 1e6 - time.time()
    assert early_s > 0, "some were due before all were queued"
    await asyncio.sleep(early_s)
    server.command("CONFIG", "RESETSTAT")
    await _claim_and_settle(storage, count, BATCH)
    points = _script_ms(server)
    slowest = points[-1][1]
    name = f"{count:,} due at one instant, a script call at p99.9, ms"
    target = Judged(name, f"≤ {SLOWEST_MS}", number(slowest), slowest <= SLOWEST_MS)
    title, unit = f"{count:,} jobs due at one instant", "ms a script call takes the server"
    return [Curve(title, "percentile", unit, points, target)]


def _script_ms(server: Server) -> list[tuple[float, float]]:
    """How long calls of functions took since the last RESETSTAT, by the server's own account."""
    said = server.info("latencystats")["latency_percentiles_usec_fcall"]
    times = dict(pair.split("=") for pair in said.split(","))
    return [(percent, float(times[f"p{percent}"]) / 1000) for percent in PERCENTILES]


async def _claim_and_settle(storage: Storage, count: int, batch: int) -> None:
    done = 0
    while done < count:
        claim = await storage.claim(QUEUE, batch, worker=WORKER, lease_ms=LEASE_MS)
        await storage.settle(QUEUE, [Complete(job.id, _fence(job)) for job in claim.jobs], worker=WORKER)
        done += len(claim.jobs)


def _fence(job: Job) -> int:
    assert job.run is not None
    return job.run.fence


async def idle_workers(server: Server, quick: bool) -> list[Curve]:
    """Jobs one at a time for several workers that have nothing else to do: how many of them ask for each?"""
    points: list[tuple[float, float]] = []
    jobs = 50 if quick else 200
    for count in (1, 2, 4) if quick else (1, 2, 4, 8, 16):
        async with AsyncExitStack() as stack:
            for _ in range(count):
                app = await stack.enter_async_context(_app(server, "idle", ["nothing"]))
                await stack.enter_async_context(app.worker())
            producer = await stack.enter_async_context(_app(server, "idle", ["nothing"]))
            await asyncio.sleep(SETTLE_S)
            with Monitor(server) as monitor:
                for n in range(jobs):
                    await producer.queue("nothing").call({"number": n})
                    await asyncio.sleep(0.005)
        claims = sum(command.startswith('"FCALL"') and '"claim"' in command for command in monitor.sent)
        points.append((count, claims / jobs))
    most = max(claims for _, claims in points)
    name = f"1 to {points[-1][0]:.0f} idle workers on one queue, claims per job"
    target = Judged(name, f"≤ {CLAIMS_A_JOB}", f"{most:.2f}", most <= CLAIMS_A_JOB)
    return [Curve("Workers that wait for one queue", "workers", "claims a job", points, target)]


async def many_queues(server: Server, quick: bool) -> list[Curve]:
    """What a worker that serves many queues asks the server while it is idle, and what a job costs it."""
    idle: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    seconds, jobs = (2, 500) if quick else (5, 4_000)
    for count in (1, 10) if quick else (1, 10, 50, 200):
        names = [f"q{n}" for n in range(count)]
        app = _app(server, f"queues-{count}", names)
        async with app, app.worker():
            await asyncio.sleep(SETTLE_S)
            with Monitor(server) as monitor:
                await asyncio.sleep(seconds)
            idle.append((count, len(monitor.sent) / seconds))
            began = time.process_time()
            await app.enqueue_many(app.queue(names[n % count]).bind({"number": n}) for n in range(jobs))
            while sum(queue.ready + queue.running for queue in (await app.stats()).queues):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            busy.append((count, 1e6 * (time.process_time() - began) / jobs))
    most = max(sent for _, sent in idle)
    name = f"idle commands/s, {idle[-1][0]} queues"
    target = Judged(name, f"≤ {IDLE_COMMANDS}", number(most), most <= IDLE_COMMANDS)
    return [
        Curve("A worker of many queues, idle", "queues", "commands a second that it sends", idle, target),
        Curve("A worker of many queues, busy", "queues", "µs of CPU a job, enqueue and look included", busy),
    ]


async def served_queues(quick: bool) -> list[Curve]:
    """Jobs spread over all queues of one worker, in memory: does planning grow with the queues?"""
    points: list[tuple[float, float]] = []
    jobs = 4_000 if quick else 40_000
    for count in (100, 1_000) if quick else (100, 1_000, 4_000, 10_000):
        app: Holdfast[Any] = Holdfast("memory://")
        for n in range(count):
            app.task(name=f"q{n}")(_nothing)
        async with app, app.worker():
            await asyncio.sleep(SETTLE_S)
            began = time.process_time()
            await app.enqueue_many(app.queue(f"q{n % count}").bind({"number": n}) for n in range(jobs))
            while sum(queue.ready + queue.running for queue in (await app.stats()).queues):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            points.append((count, jobs / (time.process_time() - began)))
    few, many = points[0][1], points[1 if quick else 2]
    name = f"{many[0]:,.0f} queues of one worker against {points[0][0]:,.0f}, jobs per second of CPU"
    target = Judged(name, f"≥ {QUEUES_RATE} ×", f"{many[1] / few:.2f} ×", many[1] / few >= QUEUES_RATE)
    return [Curve("Queues that one worker serves", "queues", "jobs per second of CPU, in memory", points, target)]


async def _nothing(number: int) -> None:
    pass


def _app(server: Server, namespace: str, queues: list[str]) -> Holdfast[Any]:
    app: Holdfast[Any] = Holdfast(server.url, namespace=namespace)
    for name in queues:
        app.task(name=name)(_nothing)
    return app


async def curves(quick: bool) -> list[Curve]:
    """Each on its own server."""
    found: list[Curve] = []
    percentiles = ("--latency-tracking-info-percentiles", " ".join(map(str, PERCENTILES)))
    for on_storage in (backlog, kept, expiring, payloads, due_at_once):
        print(f"  {on_storage.__name__} …", flush=True)
        with Server("valkey", *percentiles) as server:
            async with connect(server.url) as storage:
                found += await on_storage(storage, server, quick)
    for on_server in (idle_workers, many_queues):
        print(f"  {on_server.__name__} …", flush=True)
        with Server("valkey") as server:
            found += await on_server(server, quick)
    print(f"  {served_queues.__name__} …", flush=True)
    return found + await served_queues(quick)


def markdown(found: list[Curve]) -> str:
    day = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, Valkey on loopback.\n"
    parts = ["# Scale\n", "Written by `./dev bench scale`.\n", day]
    for curve in found:
        parts += [f"## {curve.title}\n", f"![{curve.title}]({_file(curve)})\n"]
        heads = [curve.grows, *(number(size) for size, _ in curve.points)]
        parts.append(table(heads, [[curve.unit, *(number(value) for _, value in curve.points)]], of_numbers=True))
    return "\n".join([*parts, "## Targets\n", targets(curve.target for curve in found if curve.target is not None)])


def _file(curve: Curve) -> str:
    return "scale-" + "".join(c if c.isalnum() else "-" for c in curve.title.lower()).strip("-") + ".svg"


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 260, 60, 30, 44, 50
LINE = "#0b7285"


def svg(curve: Curve) -> str:
    """A line over points that are equally far apart: they grow by factors."""
    most = max(value for _, value in curve.points) * 1.1 or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(len(curve.points) - 1, 1)
    ground = HEIGHT - BOTTOM
    places = [(LEFT + at * step, ground - (ground - TOP) * value / most) for at, (_, value) in enumerate(curve.points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    shapes = [
        f'<line x1="{LEFT}" y1="{ground}" x2="{WIDTH - 10}" y2="{ground}" stroke="{FAINT}"/>',
        f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>',
        text(WIDTH / 2, HEIGHT - 8, curve.grows, anchor="middle"),
    ]
    for (x, y), (size, value) in zip(places, curve.points, strict=True):
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{LINE}"/>',
            text(x, y - 8, number(value), anchor="middle"),
            text(x, ground + 18, number(size), anchor="middle"),
        ]
    return plot(WIDTH, HEIGHT, f"{curve.title}: {curve.unit}", shapes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only to see that everything runs; writes nothing")
    quick: bool = parser.parse_args().quick
    found = asyncio.run(curves(quick))
    print(markdown(found))
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scale.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        (RESULTS / "scale.md").write_text(markdown(found))
        for curve in found:
            (RESULTS / _file(curve)).write_text(svg(curve))


if __name__ == "__main__":
    main()
