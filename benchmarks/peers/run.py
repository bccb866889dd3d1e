"""A run: the systems take turns, in rounds, and what comes of it is written after each.

The same for the run beside the peers, for our own, and for that of the limits alone.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.pages import RESULTS
from benchmarks.peers import plots, report
from benchmarks.peers.figures import Run
from benchmarks.peers.measure import Measured, Sizes, measure
from benchmarks.peers.report import Page
from benchmarks.peers.systems import CACHE, ROOT, NotInstalled, System, install
from tests.servers import Server

ASIDE = CACHE / "results"
"""Where a quick or a partial run is written, so that it does not take a whole one's place."""
QUICK = Sizes(enqueued=200, jobs=1_000, calls=20, waited=200, picked=10, idle_s=1.0)
ROUNDS, SEED = 3, 20


def options(page: Page, words: str | None) -> argparse.ArgumentParser:
    """Options of every run."""
    parser = argparse.ArgumentParser(prog=page.command, description=words)
    parser.add_argument("--quick", action="store_true", help="one round of little: only to see that everything runs")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, metavar="N", help="maximum number of jobs in a backlog")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order of the systems")
    parser.add_argument("--server", choices=["valkey", "redis"], default="valkey", help="the system's own, if redis")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="default: benchmarks/results/, or .bench/results/ for a part"
    )
    return parser


def folder(asked: argparse.Namespace, *, partial: bool = False) -> Path:
    chosen: Path = asked.results or (ASIDE if asked.quick or partial else RESULTS)
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def run(
    page: Page,
    systems: Sequence[System],
    asked: argparse.Namespace,
    into: Path,
    bytes_queued: Mapping[str, float] | None = None,
) -> None:
    """All rounds, written as they are made, and what else is known."""
    if sys.platform != "linux":
        raise SystemExit("CPU time of process trees is read from /proc: this needs Linux")
    rounds = 1 if asked.quick else asked.rounds
    sizes = QUICK if asked.quick else Sizes()
    if asked.jobs:
        sizes = msgspec.structs.replace(sizes, jobs=asked.jobs, enqueued=min(sizes.enqueued, asked.jobs))
    missing = installed(systems)
    with Server(asked.server) as server:
        made = Run(about(server, rounds, asked.seed), [], dict(bytes_queued or {}))
        order, stolen = random.Random(asked.seed), Stolen()
        for turn in range(rounds):
            made.rounds.append({})
            for system in order.sample(systems, len(systems)):
                began = time.monotonic()
                measured = missing.get(system.name) or measure(system, server, sizes)
                made.rounds[-1][system.name] = measured
                said = measured.failure or f"{measured.figures.get('drain_rate', 0):,.0f} jobs/s"
                print(f"  round {turn + 1}, {system.name}: {said} ({time.monotonic() - began:.0f} s)", file=sys.stderr)
            made.about["stolen by the host"] = stolen.share()
            write(made, systems, page, into)
    print((into / f"{page.name}.md").read_text())
    print(f"written: {into / page.name}.md, its .json and plots", file=sys.stderr)


def installed(systems: Sequence[System]) -> dict[str, Measured]:
    """Install the systems. Returns those that could not be installed, which every round reports."""
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


def write(made: Run, systems: Sequence[System], page: Page, into: Path) -> None:
    (into / f"{page.name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    (into / f"{page.name}.md").write_text(report.markdown(made, systems, page))
    for name, (metric, title) in plots.drawn(made, systems).items():
        (into / f"{page.name}-{name}.svg").write_text(plots.svg(made, systems, metric, title))
