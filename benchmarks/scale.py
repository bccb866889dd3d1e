"""How the cost of a job changes with what is around it: one curve for each thing that may grow.

    ./dev bench scale [--quick]

On a private Valkey without persistence. Writes benchmarks/results/scale.json, scale.md and a plot for each curve.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock
from xml.sax.saxutils import escape

import msgspec

from benchmarks.redis_storage import QUEUE, WORKER, Meter, Stored, calls, make, measure
from holdfast import Holdfast
from holdfast.jobs import Complete, Request, Work, new_id
from holdfast.storage import Storage, connect
from holdfast.storage.checked import CheckedStorage
from tests.servers import Server

RESULTS = Path(__file__).with_name("results")
BATCH = 100
SLOW_US = 10_000
DAY_MS = 86_400_000


class Curve(msgspec.Struct):
    """One thing grows; what is measured at each point of it."""

    title: str
    grows: str
    unit: str
    points: list[tuple[float, float]]
    target: str = ""
    met: bool | None = None


async def backlog(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """CPU of client and server for a job that is enqueued, claimed and settled, with ever more others queued."""
    points: list[tuple[float, float]] = []
    queued = 0
    contender = Stored(storage)
    for size in (1_000, 10_000, 100_000, 1_000_000)[: 2 if quick else 4]:
        while queued < size:
            await storage.enqueue(QUEUE, make(min(250, size - queued)))
            queued += min(250, size - queued)
        points.append((size, await _cpu(contender, server, quick)))
    ratio = points[-1][1] / points[1 if len(points) > 2 else 0][1]
    return [
        Curve("A job beside a backlog", "jobs queued", "µs of CPU, client and server", points,
              f"{points[-1][0]:,.0f} queued cost {ratio:.2f} times as much as 10,000 (at most 1.15)", ratio <= 1.15)
    ]  # fmt: skip


async def kept(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """The same with ever more finished records that are kept."""
    points: list[tuple[float, float]] = []
    finished = 0
    contender = Stored(storage)
    for size in (1_000, 10_000, 100_000, 1_000_000)[: 2 if quick else 4]:
        while finished < size:
            jobs = [Request(new_id(), Work(b"x" * 100), named=True) for _ in range(min(250, size - finished))]
            await storage.enqueue(QUEUE, jobs)
            claim = await storage.claim(QUEUE, 250, worker=WORKER, lease_ms=60_000)
            done = [Complete(job.id, job.fence or 0, b"1", result_ttl_ms=DAY_MS) for job in claim.jobs]
            await storage.settle(QUEUE, done, worker=WORKER)
            finished += len(done)
        points.append((size, await _cpu(contender, server, quick)))
    ratio = points[-1][1] / points[1 if len(points) > 2 else 0][1]
    return [
        Curve("A job beside finished records", "records kept", "µs of CPU, client and server", points,
              f"{points[-1][0]:,.0f} kept cost {ratio:.2f} times as much as 10,000 (at most 1.15)", ratio <= 1.15)
    ]  # fmt: skip


async def _cpu(contender: Stored, server: Server, quick: bool) -> float:
    costs = await measure(Meter(server), {"holdfast": contender}, 2_000 if quick else 10_000, BATCH, 1 if quick else 5)
    enqueue, rest = costs["holdfast"]
    return enqueue.client_us + enqueue.server_us + rest.client_us + rest.server_us


async def payloads(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """How much passes through a queue: enqueued, claimed and settled."""
    points: list[tuple[float, float]] = []
    for size in (100, 1_000, 10_000, 100_000, 1_000_000):
        count = max(4, (4_000_000 if quick else 50_000_000) // (size + 2_000))
        batch = max(1, min(BATCH, 500_000 // size))
        jobs = [Request(new_id(), Work(b"x" * size)) for _ in range(count)]
        began = time.perf_counter()
        for start in range(0, count, batch):
            await storage.enqueue(QUEUE, jobs[start : start + batch])
        done = 0
        while done < count:
            claim = await storage.claim(QUEUE, batch, worker=WORKER, lease_ms=60_000)
            await storage.settle(QUEUE, [Complete(job.id, job.fence or 0) for job in claim.jobs], worker=WORKER)
            done += len(claim.jobs)
        points.append((size, count * size / 1e6 / (time.perf_counter() - began)))
    return [Curve("Payloads", "bytes", "MB a second, in and out", points)]


async def due_at_once(storage: Storage, server: Server, quick: bool) -> list[Curve]:
    """Many delayed jobs become due at one instant: does any call take long?"""
    count = 5_000 if quick else 100_000
    run_at = time.time_ns() // 1000 + (3_000_000 if quick else 20_000_000)
    for start in range(0, count, 250):
        jobs = [Request(new_id(), Work(b"x" * 100), run_at=run_at) for _ in range(min(250, count - start))]
        await storage.enqueue(QUEUE, jobs)
    await asyncio.sleep(max(run_at / 1e6 - time.time(), 0))
    times: list[float] = []
    done = 0
    server.command("SLOWLOG", "RESET")
    while done < count:
        began = time.perf_counter()
        claim = await storage.claim(QUEUE, BATCH, worker=WORKER, lease_ms=60_000)
        times.append(1000 * (time.perf_counter() - began))
        await storage.settle(QUEUE, [Complete(job.id, job.fence or 0) for job in claim.jobs], worker=WORKER)
        done += len(claim.jobs)
    times.sort()
    shares = (0.5, 0.9, 0.99, 0.999)
    points = [(100 * share, times[min(int(share * len(times)), len(times) - 1)]) for share in shares]
    slow = server.command("SLOWLOG", "LEN")
    assert isinstance(slow, int)
    return [
        Curve(f"{count:,} jobs due at one instant", "percentile", "ms a claim of 100, as its caller sees it", points,
              f"{slow} of {2 * len(times)} calls took the server longer than 10 ms (at most 1 in 1,000)",
              slow <= len(times) / 500)
    ]  # fmt: skip


async def idle_workers(server: Server, quick: bool) -> list[Curve]:
    """Jobs one at a time for several workers that have nothing else to do: how many of them ask for it?"""
    points: list[tuple[float, float]] = []
    jobs = 50 if quick else 200
    for count in (1, 2, 4, 8, 16)[: 3 if quick else 5]:
        claims = 0
        claim = CheckedStorage.claim

        async def counted(self: CheckedStorage, *args: Any, **options: Any) -> Any:
            nonlocal claims
            claims += 1
            return await claim(self, *args, **options)  # noqa: B023

        async with AsyncExitStack() as stack:
            apps = [_app(server, "idle") for _ in range(count)]
            for app in apps:
                await stack.enter_async_context(app)
                await stack.enter_async_context(app.worker())
            producer = await stack.enter_async_context(_app(server, "idle"))
            await asyncio.sleep(1.5)
            with mock.patch.object(CheckedStorage, "claim", counted):
                for number in range(jobs):
                    await producer.queue("nothing").call({"number": number})
                    await asyncio.sleep(0.005)
                asked = claims
        points.append((count, asked / jobs))
    most = max(y for _, y in points)
    return [
        Curve("Workers that wait for one queue", "workers", "claims a job", points,
              f"at most {most:.2f} claims a job (at most 1.2)", most <= 1.2)
    ]  # fmt: skip


async def many_queues(server: Server, quick: bool) -> list[Curve]:
    """What a worker that serves many queues asks the server while it is idle, and what a job costs it."""
    idle: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for count in (1, 10, 50, 200)[: 2 if quick else 4]:
        app = Holdfast(server.url, namespace=f"queues-{count}")
        for number in range(count):
            app.task(name=f"q{number}")(_nothing)
        async with app, app.worker():
            await asyncio.sleep(1.5)
            before = _commands(server)
            await asyncio.sleep(2 if quick else 5)
            idle.append((count, (_commands(server) - before) / (2 if quick else 5)))
            jobs = 500 if quick else 4_000
            began = time.process_time()
            bounds = [app.queue(f"q{number % count}").bind({"number": number}) for number in range(jobs)]
            await app.enqueue_many(bounds)
            while sum(queue.ready + queue.running for queue in (await app.stats()).queues):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            busy.append((count, 1e6 * (time.process_time() - began) / jobs))
    most = max(y for _, y in idle)
    return [
        Curve("A worker of many queues, idle", "queues", "commands a second", idle,
              f"at most {most:.1f} commands a second (at most 3)", most <= 3),
        Curve("A worker of many queues, busy", "queues", "µs of CPU a job, enqueue and look included", busy),
    ]  # fmt: skip


def _commands(server: Server) -> float:
    """What clients have asked so far: calls of functions, and waits for a token."""
    stats = server.info("commandstats")
    return sum(
        calls(stats.get(f"cmdstat_{name}", "")) for name in ("fcall", "eval", "blpop", "ssubscribe", "client|id")
    )


async def _nothing(number: int) -> None:
    pass


def _app(server: Server, namespace: str) -> Holdfast[Any]:
    app: Holdfast[Any] = Holdfast(server.url, namespace=namespace)
    app.task(name="nothing")(_nothing)
    return app


ON_A_STORAGE: tuple[Callable[[Storage, Server, bool], Awaitable[list[Curve]]], ...] = (
    backlog,
    kept,
    payloads,
    due_at_once,
)
ON_A_SERVER: tuple[Callable[[Server, bool], Awaitable[list[Curve]]], ...] = (idle_workers, many_queues)


async def curves(quick: bool) -> list[Curve]:
    found: list[Curve] = []
    for bench in ON_A_STORAGE:
        print(f"  {bench.__name__} …", flush=True)
        with Server("valkey", "--slowlog-log-slower-than", str(SLOW_US)) as server:
            async with connect(server.url) as storage:
                found += await bench(storage, server, quick)
    for on_server in ON_A_SERVER:
        print(f"  {on_server.__name__} …", flush=True)
        with Server("valkey") as server:
            found += await on_server(server, quick)
    return found


def markdown(found: list[Curve]) -> str:
    lines = [
        "# Scale",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, Valkey on loopback.",
        "",
    ]
    for curve in found:
        lines += [f"## {curve.title}", "", f"![{curve.title}]({_file(curve)})", ""]
        lines += [f"| {curve.grows} | " + " | ".join(f"{x:,.4g}" for x, _ in curve.points) + " |"]
        lines += ["|---|" + "---|" * len(curve.points)]
        lines += [f"| {curve.unit} | " + " | ".join(f"{y:,.4g}" for _, y in curve.points) + " |", ""]
        if curve.target:
            lines += [f"{'Met' if curve.met else 'MISSED'}: {curve.target}.", ""]
    return "\n".join(lines)


def _file(curve: Curve) -> str:
    return "scale-" + "".join(c if c.isalnum() else "-" for c in curve.title.lower()).strip("-") + ".svg"


def svg(curve: Curve) -> str:
    """A line over points that are equally far apart: they grow by factors."""
    width, height, left, top, bottom = 560, 260, 60, 40, 50
    most = max(y for _, y in curve.points) * 1.1 or 1.0
    step = (width - left - 30) / max(len(curve.points) - 1, 1)
    places = [
        (left + at * step, height - bottom - (height - bottom - top) * y / most)
        for at, (_, y) in enumerate(curve.points)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(curve.title)}: {escape(curve.unit)}</text>',
        f'<line x1="{left}" y1="{height - bottom}" x2="{width - 10}" y2="{height - bottom}" stroke="#999"/>',
        f'<polyline points="{line}" fill="none" stroke="#2b6cb0" stroke-width="2"/>',
    ]
    for (x, y), (size, value) in zip(places, curve.points, strict=True):
        text += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2b6cb0"/>',
            f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{value:,.4g}</text>',
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#666">{size:,.4g}</text>',
        ]
    text.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle" fill="#666">{escape(curve.grows)}</text>')
    return "\n".join([*text, "</svg>"]) + "\n"


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
