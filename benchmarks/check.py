"""Does a job cost more than before? Script calls and bytes per job must not rise, CPU only within a tolerance.

    ./dev bench check            compare with benchmarks/baseline.json; fail if something is worse
    ./dev bench check --update   save the results as the baseline

Calls and bytes do not depend on the machine and are compared exactly. CPU is divided by the cost of the same functions
over a bare socket in the same seconds. Each figure is the lowest of several rounds, because other work on the machine
can only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.monitor import Monitor
from benchmarks.redis_storage import Cost, Meter, measure, opened
from holdfast import Holdfast
from tests.servers import Server

BASELINE = Path(__file__).with_name("baseline.json")
ROUNDS = 5
ENQUEUE, REST = 0, 1
SINGLE, MANY = 1_500, 10_000
"""Jobs of a round, one at a time or in batches: about as long."""
MORE_CPU = 1.6
"""Times what it was. Up to 1.2 times was seen, idle and beside four busy loops."""
MORE_BYTES = 0.5
"""What looking at the server adds, which is a part of what is counted."""
BY_TIME = frozenset({"announce", "extend", "layout", "read_notes", "ready", "sweep", "workers", "write_notes"})
"""Verbs that a worker calls at intervals or once, independent of the number of jobs."""
VERB = re.compile(r'"FCALL" "\w+" "\d+" "[^"]*" "(\w+)"')


class Row(msgspec.Struct):
    """Of one job."""

    calls: float
    bytes: float
    client: float
    """CPU, as a multiple of what bare functions cost."""
    server: float


async def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    async with opened("valkey") as (server, contenders):
        meter = Meter(server)
        await measure(meter, contenders, 1_000, 100, 1)
        for name, batch, callers in (("1", 1, 0), ("1, by 100 callers", 1, 100), ("100", 100, 0)):
            jobs = SINGLE if name == "1" else MANY
            costs = [await measure(meter, contenders, jobs, batch, 1, callers) for _ in range(ROUNDS)]
            ours, bare = (
                [least([cost[who][verb] for cost in costs]) for verb in (ENQUEUE, REST)] for who in ("holdfast", "bare")
            )
            found[f"enqueue {name}"] = row(ours[ENQUEUE], bare[ENQUEUE])
            if not callers:
                found[f"claim + settle {name}"] = row(ours[REST], bare[REST])
    with Server("valkey") as server:
        found["drain by an inline worker"] = row(await drain(server), bare[REST])
    return found


def least(costs: Sequence[Cost]) -> Cost:
    return Cost(*(min(getattr(cost, name) for cost in costs) for name in Cost.__struct_fields__))


def row(cost: Cost, bare: Cost) -> Row:
    return Row(
        round(cost.calls, 4),
        round(cost.bytes, 1),
        round(cost.client_us / bare.client_us, 2),
        round(cost.server_us / bare.server_us, 2),
    )


async def drain(server: Server) -> Cost:
    """What a worker costs for a job of a backlog. Its calls are counted apart: watching them is dear, and those that
    it makes by time would be more on a slow machine."""
    app = Holdfast(server.url)

    @app.task(name="nothing")
    async def nothing(number: int) -> None:
        pass

    meter, costs = Meter(server), []
    async with app:
        for _ in range(ROUNDS):
            await app.enqueue_many(nothing.bind(number) for number in range(MANY))
            before = meter.look()
            await app.worker(burst=True).run()
            costs.append(meter.cost(before, meter.look(), MANY))
        await app.enqueue_many(nothing.bind(number) for number in range(MANY))
        with Monitor(server) as monitor:
            await app.worker(burst=True).run()
    verbs = [found[1] for command in monitor.sent if (found := VERB.match(command))]
    return msgspec.structs.replace(least(costs), calls=sum(verb not in BY_TIME for verb in verbs) / MANY)


def compare(now: dict[str, Row], before: dict[str, Row]) -> list[str]:
    """Descriptions of what costs more."""
    worse = [f"{name}: this row is missing" for name in before.keys() - now.keys()]
    for name, new in now.items():
        old = before.get(name)
        if old is None:
            worse.append(f"{name}: the baseline lacks this row")
            continue
        if new.calls > old.calls:
            worse.append(f"{name}: {new.calls} calls a job, not {old.calls}")
        if new.bytes > old.bytes + MORE_BYTES:
            worse.append(f"{name}: {new.bytes} bytes a job, not {old.bytes}")
        for what in ("client", "server"):
            ratio, was = getattr(new, what), getattr(old, what)
            if ratio > was * MORE_CPU:
                worse.append(f"{name}: {what} CPU is {ratio} times that of bare functions, not {was}")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="./dev bench check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="save the results as the baseline")
    update: bool = parser.parse_args().update
    now = asyncio.run(rows())
    for name, new in now.items():
        cpu = f"CPU x {new.client:.2f}, server x {new.server:.2f}"
        print(f"  {name:28} {new.calls:7.4f} calls  {new.bytes:6.1f} bytes  {cpu}")
    if update:
        BASELINE.write_bytes(msgspec.json.format(msgspec.json.encode(now)) + b"\n")
        return
    worse = compare(now, msgspec.json.decode(BASELINE.read_bytes(), type=dict[str, Row]))
    print("\n".join(worse) or "no job costs more than before")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
