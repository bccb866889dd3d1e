"""Holdfast beside other job queues: the same work for all, on this machine, one after the other.

Each system is installed from its registry into .bench/, runs in processes of its own against a private Valkey without
persistence (or a SQLite file), and is measured in every round, in an order that changes. What comes of it is written to
benchmarks/results/. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.peers import plots, report
from benchmarks.peers.figures import Run
from benchmarks.peers.measure import Measured, Sizes, measure
from benchmarks.peers.systems import CACHE, HOLDFAST, HOLDFAST_SQLITE, ROOT, SYSTEMS, NotInstalled, System, install
from tests.servers import Server

RESULTS = ROOT / "benchmarks" / "results"
ASIDE = CACHE / "results"
"""Where a quick or a partial run is written, so that it does not take a whole one's place."""
QUICK = Sizes(enqueued=200, jobs=1_000, calls=20, waited=200, picked=10, idle_s=1.0)
SEED = 20


def main() -> None:
    arguments = parsed()
    if sys.platform != "linux":
        raise SystemExit("CPU time of process trees is read from /proc: this needs Linux")
    systems = chosen(arguments.only)
    rounds = 1 if arguments.quick else arguments.rounds
    sizes = QUICK if arguments.quick else Sizes()
    if arguments.jobs:
        sizes = msgspec.structs.replace(sizes, jobs=arguments.jobs, enqueued=min(sizes.enqueued, arguments.jobs))
    folder = arguments.results or (ASIDE if arguments.quick or arguments.only else RESULTS)
    missing = installed(systems)
    with Server(arguments.server) as server:
        run = Run(about(server, rounds, arguments.seed), [])
        order, stolen = random.Random(arguments.seed), Stolen()
        for turn in range(rounds):
            run.rounds.append({})
            for system in order.sample(systems, len(systems)):
                began = time.monotonic()
                measured = missing.get(system.name) or measure(system, server, sizes)
                run.rounds[-1][system.name] = measured
                said = measured.failure or f"{measured.figures.get('drain_rate', 0):,.0f} jobs/s"
                print(f"  round {turn + 1}, {system.name}: {said} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
            run.about["stolen by the host"] = stolen.share()
            write(run, systems, folder)
    print((folder / "peers.md").read_text())
    print(f"written: {folder / 'peers.md'}, peers.json and {len(plots.PLOTS)} plots", file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev bench peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of little: only to see that everything runs")
    parser.add_argument("--only", metavar="NAME,...", help="these systems, by how their names begin; and Holdfast")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, metavar="N", help="at most so many jobs in a backlog")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order of the systems")
    parser.add_argument("--server", choices=["valkey", "redis"], default="valkey", help="the system's own, if redis")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="default: benchmarks/results/, or .bench/results/ for a part"
    )
    return parser.parse_args()


def chosen(only: str | None) -> list[System]:
    """What to compare with is always among them."""
    if only is None:
        return list(SYSTEMS)
    names = only.split(",")
    wanted = [s for s in SYSTEMS if any(s.name == name or s.name.startswith(f"{name},") for name in names)]
    if not wanted:
        raise SystemExit(f"none of these is known; there are: {'; '.join(system.name for system in SYSTEMS)}")
    needed = {HOLDFAST_SQLITE if system.on == "sqlite" else HOLDFAST for system in wanted}
    return [system for system in SYSTEMS if system in wanted or system.name in needed]


def installed(systems: Sequence[System]) -> dict[str, Measured]:
    """Install what is needed; what could not be is told as such, in every round."""
    missing: dict[str, Measured] = {}
    for system in systems:
        try:
            install(system)
        except NotInstalled as error:
            missing[system.name] = Measured(failure=f"not installed: {error}")
    return missing


def about(server: Server, rounds: int, seed: int) -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip() or "unknown",
        "server": f"{server.name} {server.version}, on loopback, without persistence",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, {_processor()}",
        "load when it began": f"{os.getloadavg()[0]:.1f}",
        "rounds": f"{rounds}, order by seed {seed}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


class Stolen:
    """How much of the time in which this machine had work its host gave to others: what to blame for a wide spread."""

    def __init__(self) -> None:
        self._before = self._read()

    def share(self) -> str:
        spent = [after - before for after, before in zip(self._read(), self._before, strict=True)]
        busy = sum(spent) - sum(spent[3:5])  # without what was idle
        return f"{100 * spent[7] / busy:.1f} % of the time it was busy" if busy else "unknown"

    @staticmethod
    def _read() -> list[int]:
        """user, nice, system, idle, iowait, irq, softirq, steal."""
        try:
            return [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
        except OSError:
            return [0] * 8


def write(run: Run, systems: Sequence[System], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.json").write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    (folder / "peers.md").write_text(report.markdown(run, systems))
    for name, (metric, title) in plots.PLOTS.items():
        (folder / f"{name}.svg").write_text(plots.svg(run, systems, metric, title))


if __name__ == "__main__":
    main()
