"""Has a job become dearer? Script calls and bytes per job must be what they were, CPU not much more than it was.

    ./dev bench check            compare with benchmarks/baseline.json; fails if something is worse
    ./dev bench check --update   what was measured is the baseline from now on

Calls and bytes do not depend on the machine, so they are compared exactly. CPU does: it is divided by what the same
functions cost over a bare socket in the same minute, and may rise to two and a half times of that.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from benchmarks.redis_storage import Cost, Meter, measure, opened
from holdfast import Holdfast
from tests.servers import Server

BASELINE = Path(__file__).with_name("baseline.json")
JOBS, ROUNDS, DRAINED = 4_000, 3, 5_000
MORE_CPU = 2.5
MORE_CALLS = 1.25
"""How many claims a worker makes depends a little on how its answers come in."""


class Row(msgspec.Struct):
    """Of one job."""

    calls: float
    bytes: float = 0.0
    client: float = 0.0
    """CPU, as a multiple of what bare functions cost."""
    server: float = 0.0


async def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    async with opened("valkey") as (server, contenders):
        meter = Meter(server)
        await measure(meter, contenders, 1_000, 100, 1)
        for name, batch, callers in (("1", 1, 0), ("100", 100, 0), ("1, by 100 callers", 1, 100)):
            costs = await measure(meter, contenders, JOBS, batch, ROUNDS, callers)
            for verb, at in (("enqueue", 0), ("claim + settle", 1)):
                if not (callers and at):
                    found[f"{verb} {name}"] = _row(costs["holdfast"][at], costs["bare"][at])
    with Server("valkey") as server:
        found["drain by an inline worker"] = await drain(server)
    return found


def _row(cost: Cost, bare: Cost) -> Row:
    return Row(
        round(cost.calls, 4),
        round(cost.bytes, 1),
        round(cost.client_us / bare.client_us, 2),
        round(cost.server_us / bare.server_us, 2),
    )


async def drain(server: Server) -> Row:
    """Calls that a worker makes for a job of a backlog."""
    app = Holdfast(server.url)

    @app.task(name="nothing")
    async def nothing(number: int) -> None:
        pass

    async with app:
        await app.enqueue_many(nothing.bind(number) for number in range(DRAINED))
        meter = Meter(server)
        before = meter.look()
        await app.worker(burst=True).run()
        cost = meter.cost(before, meter.look(), DRAINED)
    return Row(round(cost.calls, 4))


def compare(now: dict[str, Row], before: dict[str, Row]) -> list[str]:
    """What has become dearer, in words."""
    worse = [f"{name}: there is no such row any more" for name in before.keys() - now.keys()]
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            worse.append(f"{name}: the baseline has no such row")
            continue
        exact = old.bytes > 0
        if row.calls > (old.calls if exact else old.calls * MORE_CALLS):
            worse.append(f"{name}: {row.calls} calls a job, not {old.calls}")
        if row.bytes > old.bytes + 0.5:
            worse.append(f"{name}: {row.bytes} bytes a job, not {old.bytes}")
        for what in ("client", "server"):
            ratio, was = getattr(row, what), getattr(old, what)
            if ratio > was * MORE_CPU:
                worse.append(f"{name}: {what} CPU is {ratio} times that of bare functions, not {was}")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./dev bench check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="what was measured is the baseline from now on")
    update: bool = parser.parse_args().update
    now = asyncio.run(rows())
    for name, row in now.items():
        cpu = f"CPU x {row.client:.2f}, server x {row.server:.2f}"
        print(f"  {name:28} {row.calls:7.4f} calls  {row.bytes:6.1f} bytes  {cpu}")
    if update:
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(now)) + b"\n")
        return
    worse = compare(now, msgspec.json.decode(BASELINE.read_bytes(), type=dict[str, Row]))
    print("\n".join(worse) or "no job has become dearer")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
