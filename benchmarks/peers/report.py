"""What the rounds say together: medians, spreads and ratios, as Markdown, and as bars drawn in SVG.

A ratio says how many times better Holdfast is, whichever direction is better, and is the median of the rounds' own
ratios, so that a slow minute hits both sides. Whatever is on SQLite is compared with Holdfast on SQLite.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

from benchmarks.peers.measure import Measured
from benchmarks.peers.systems import HOLDFAST, HOLDFAST_SQLITE, System


class Metric(msgspec.Struct, frozen=True):
    name: str
    title: str
    better: Literal["less", "more"]


class Table(msgspec.Struct, frozen=True):
    title: str
    metrics: tuple[Metric, ...]
    foreword: str = ""


def _less(name: str, title: str) -> Metric:
    return Metric(name, title, "less")


def _more(name: str, title: str) -> Metric:
    return Metric(name, title, "more")


WORKER_CPU = _less("drain_worker_us", "worker, drain")
SERVER_CPU = _less("server_us", "server, bulk + drain")
DRAIN = _more("drain_rate", "drain, one worker")
BULK = _more("bulk_rate", "enqueue, bulk or 100 at once")
ENQUEUE = _more("enqueue_rate", "enqueue, one at a time")
CALLS = _more("calls_rate", "round trips, 100 waiters")
CALL = _less("call_p50", "call p50")
CALL_P99 = _less("call_p99", "call p99")
PICKUP = _less("pickup_p50", "pickup p50")
IDLE = _less("idle_commands", "idle commands/s")
BYTES = _less("bytes", "bytes per queued job")

TABLES = (
    Table(
        "CPU per job, µs",
        (
            WORKER_CPU,
            SERVER_CPU,
            _less("drain_server_us", "server, drain"),
            _less("bulk_server_us", "server, bulk"),
            _less("bulk_client_us", "client, bulk"),
            _less("enqueue_server_us", "server, one at a time"),
            _less("enqueue_client_us", "client, one at a time"),
        ),
        "Worker is the whole tree of the worker's processes. The steadier figures on a shared machine.",
    ),
    Table("Jobs per second", (DRAIN, BULK, ENQUEUE, CALLS)),
    Table(
        "Latency, ms",
        (CALL, CALL_P99, PICKUP, _less("pickup_p99", "pickup p99")),
        "A call goes through an idle worker in another process and back; pickup is from the call of enqueue to the "
        "handler's start.",
    ),
    Table(
        "Commands and bytes",
        (
            BYTES,
            _less("drain_commands", "commands per job, drain"),
            _less("bulk_commands", "commands per job, bulk"),
            _less("enqueue_commands", "commands per job, one at a time"),
            IDLE,
            _less("idle_cpu", "idle worker CPU, %"),
        ),
        "Commands are those that the server counts, those inside of scripts as well.",
    ),
)
RATIOS = (WORKER_CPU, SERVER_CPU, DRAIN, BULK, ENQUEUE, CALLS, CALL, CALL_P99, PICKUP, BYTES)
PLOTS = {
    "worker-cpu": (WORKER_CPU, "Worker CPU per job, µs"),
    "server-cpu": (SERVER_CPU, "Server CPU per job, enqueue in bulk and drain, µs"),
    "drain": (DRAIN, "Drain by one worker, jobs/s"),
    "bulk": (BULK, "Enqueue in bulk or 100 at once, jobs/s"),
    "call": (CALL, "Call through an idle worker, p50, ms"),
    "calls": (CALLS, "Round trips with 100 waiters, per second"),
}


class Run(msgspec.Struct):
    """A whole run. `rounds` has one entry for each round: what was measured, by the system's name."""

    about: dict[str, str]
    rounds: list[dict[str, Measured]]


class Spread(msgspec.Struct, frozen=True):
    median: float
    least: float
    most: float


def figures(measured: Measured) -> dict[str, float]:
    """With what follows from others."""
    both = [measured.figures.get(name) for name in ("bulk_server_us", "drain_server_us")]
    known = [figure for figure in both if figure is not None]
    return measured.figures | ({"server_us": sum(known)} if len(known) == len(both) else {})


def spread(run: Run, system: str, metric: str) -> Spread | None:
    """None if no round has it."""
    known = [figures(turn[system])[metric] for turn in run.rounds if system in turn and metric in figures(turn[system])]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def reference(system: System) -> str:
    return HOLDFAST_SQLITE if system.on == "sqlite" else HOLDFAST


def ratio(run: Run, system: System, metric: Metric, of: str | None = None) -> float | None:
    """How many times better Holdfast is, or that form of it; None if no round has both."""
    ours_is = of or reference(system)
    ratios: list[float] = []
    for turn in run.rounds:
        if system.name in turn and ours_is in turn:
            theirs = figures(turn[system.name]).get(metric.name)
            ours = figures(turn[ours_is]).get(metric.name)
            if theirs and ours:
                ratios.append(ours / theirs if metric.better == "more" else theirs / ours)
    return statistics.median(ratios) if ratios else None


def failures(run: Run, system: str) -> list[str]:
    """Why rounds of it ended early, each reason once, with how often."""
    reasons = [turn[system].failure for turn in run.rounds if system in turn and turn[system].failure]
    return [f"{reason} ({reasons.count(reason)} of {len(run.rounds)} rounds)" for reason in dict.fromkeys(reasons)]


def number(value: float) -> str:
    """With three digits or so."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.1 else f"{value:.2f}"


def _cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    if found.least == found.most:
        return number(found.median)
    return f"{number(found.median)} ({number(found.least)}..{number(found.most)})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


def markdown(run: Run, systems: Sequence[System]) -> str:
    parts = [
        "# Side by side\n",
        "Written by `./dev bench peers`; how it is measured: [benchmarks](../README.md).\n",
        _table(["", ""], [[name, what] for name, what in run.about.items()]),
        "Medians of the rounds (least..most). `-`: the system cannot, or the round did not get so far.\n",
        *(f"![{title}]({name}.svg)\n" for name, (_, title) in PLOTS.items()),
    ]
    for table in TABLES:
        parts += [f"## {table.title}\n", *([table.foreword + "\n"] if table.foreword else [])]
        rows = [[system.name, *(_cell(spread(run, system.name, m.name)) for m in table.metrics)] for system in systems]
        parts.append(_table(["", *(metric.title for metric in table.metrics)], rows))
    parts += ["Which commands, for each job of a drain, and in each second of an idle worker:\n"]
    parts.append(_table(["", "drain", "idle"], _commands(run, systems)))
    parts += ["## How many times better Holdfast is\n", "Below 1, the other one is better.\n"]
    rows = [[system.name, *(_times(ratio(run, system, metric)) for metric in RATIOS)] for system in systems]
    parts.append(_table(["", *(metric.title for metric in RATIOS)], rows))
    parts += ["## Targets\n", _table(["", "target", "measured", ""], targets(run, systems))]
    parts += ["## The systems\n", _table(["", "versions", "jobs", "bulk", "setting"], _described(run, systems))]
    parts += ["## What failed\n", _failed(run, systems)]
    return "\n".join(parts)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{number(value)} ×"


class Target(msgspec.Struct, frozen=True):
    """What a figure of ours shall be: at most or at least a number, or so many times another's."""

    what: str
    ours: str
    metric: Metric
    bound: float
    rival: str = ""
    """A system; or several: "best", "best Python". None if the bound is a figure by itself."""


PROCESSES = "holdfast, processes"
TARGETS = (
    Target("drain, inline, against SAQ", HOLDFAST, DRAIN, 10, "saq"),
    Target("drain, inline, against BullMQ on Node", HOLDFAST, DRAIN, 2, "bullmq"),
    Target("drain, processes, against Celery prefork", PROCESSES, DRAIN, 10, "celery, prefork"),
    Target("drain, processes, against the best Python peer", PROCESSES, DRAIN, 3, "best Python"),
    Target("worker CPU per job, inline, µs", HOLDFAST, WORKER_CPU, 30),
    Target("worker CPU per job, processes, µs", PROCESSES, WORKER_CPU, 80),
    Target("server CPU per job, bulk + drain, µs", HOLDFAST, SERVER_CPU, 22),
    Target("enqueue in bulk or 100 at once", HOLDFAST, BULK, 1.3, "best"),
    Target("enqueue, one at a time", HOLDFAST, ENQUEUE, 1, "best"),
    Target("call p50", HOLDFAST, CALL, 1, "best"),
    Target("call p99", HOLDFAST, CALL_P99, 1, "best"),
    Target("round trips with 100 waiters", HOLDFAST, CALLS, 2, "best"),
    Target("pickup p50", HOLDFAST, PICKUP, 1, "best"),
    Target("idle commands/s", HOLDFAST, IDLE, 3),
    Target("bytes per queued job", HOLDFAST, BYTES, 340),
    Target("SQLite: drain, against Huey", HOLDFAST_SQLITE, DRAIN, 5, "huey, SQLite"),
    Target("SQLite: bulk, against litequeue", HOLDFAST_SQLITE, BULK, 0.9, "litequeue"),
    Target("SQLite: call p50 across processes, ms", HOLDFAST_SQLITE, CALL, 5),
)


def targets(run: Run, systems: Sequence[System]) -> list[list[str]]:
    """A row for each target; one that cannot be judged is told as such."""
    return [_judged(run, systems, target) for target in TARGETS]


def _judged(run: Run, systems: Sequence[System], target: Target) -> list[str]:
    sign = "≥" if target.metric.better == "more" or target.rival else "≤"
    ours = spread(run, target.ours, target.metric.name)
    if not target.rival:
        wanted = f"{sign} {number(target.bound)}"
        if ours is None:
            return [target.what, wanted, "-", "not measured"]
        return [target.what, wanted, number(ours.median), "met" if ours.median <= target.bound else "**missed**"]
    rival = _rival(run, systems, target)
    wanted = f"{sign} {number(target.bound)} × {target.rival if rival is None else rival.name}"
    times = None if rival is None else ratio(run, rival, target.metric, target.ours)
    if times is None:
        return [target.what, wanted, "-", "not measured"]
    return [target.what, wanted, f"{number(times)} ×", "met" if times >= target.bound else "**missed**"]


def _rival(run: Run, systems: Sequence[System], target: Target) -> System | None:
    """The system itself, or the best of those on a server that are not ours."""
    if not target.rival.startswith("best"):
        return next((system for system in systems if system.name == target.rival), None)
    peers = [system for system in systems if system.packages and system.on == "valkey"]
    if target.rival == "best Python":
        peers = [system for system in peers if system.adapter.endswith(".py")]
    known = [
        (found.median, place)
        for place, peer in enumerate(peers)
        if (found := spread(run, peer.name, target.metric.name))
    ]
    if not known:
        return None
    return peers[(max if target.metric.better == "more" else min)(known)[1]]


def _described(run: Run, systems: Sequence[System]) -> list[list[str]]:
    rows: list[list[str]] = []
    for system in systems:
        seen = [turn[system.name] for turn in run.rounds if system.name in turn and turn[system.name].versions]
        versions = ", ".join(f"{name} {version}" for name, version in seen[-1].versions.items()) if seen else "-"
        how = seen[-1].how if seen else {}
        rows.append([system.name, versions, f"{how.get('jobs', 0):,}", str(how.get("bulk", "-")), system.note])
    return rows


def _commands(run: Run, systems: Sequence[System]) -> list[list[str]]:
    """Of the last round that got so far."""
    rows: list[list[str]] = []
    for system in systems:
        seen = [turn[system.name].commands for turn in run.rounds if system.name in turn]
        if system.on == "valkey":
            latest: dict[str, dict[str, float]] = {step: calls for commands in seen for step, calls in commands.items()}
            rows.append([system.name, *(_calls(latest.get(step)) for step in ("drain", "idle"))])
    return rows


def _calls(calls: dict[str, float] | None) -> str:
    if calls is None:
        return "-"
    return " ".join(f"{name} {number(times)}" for name, times in calls.items() if times >= 0.01) or "none"


def _failed(run: Run, systems: Sequence[System]) -> str:
    lines = [f"- {system.name}: {reason}" for system in systems for reason in failures(run, system.name)]
    for system in systems:
        again = spread(run, system.name, "drain_again")
        if again is not None:
            lines.append(f"- {system.name}: up to {again.most:.0f} jobs ran more than once in a drain")
    return "\n".join(lines or ["Nothing."]) + "\n"


WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 860, 170, 130, 44, 18, 6
OURS, THEIRS, INK, FAINT = "#0b7285", "#adb5bd", "#212529", "#495057"


def svg(run: Run, systems: Sequence[System], metric: Metric, title: str) -> str:
    """A bar for each system that has the figure, the best first, with a line from the least to the most."""
    found = [(system.name, spread(run, system.name, metric.name)) for system in systems]
    bars = [(name, what) for name, what in found if what is not None and what.median > 0]
    bars.sort(key=lambda bar: bar[1].median, reverse=metric.better == "more")
    length = _scale([what for _, what in bars])
    height = TOP + len(bars) * (BAR + GAP) + 10
    best = "longer is better" if metric.better == "more" else "shorter is better"
    logarithmic = ", logarithmic" if _spans(bar for _, bar in bars) else ""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15" fill="{INK}">{escape(title)}</text>',
        f'<text x="{WIDTH - 10}" y="22" text-anchor="end" fill="{FAINT}">{best}{logarithmic}</text>',
    ]
    for place, (name, what) in enumerate(bars):
        y = TOP + place * (BAR + GAP)
        middle, end = y + BAR / 2, LEFT + length(what.median)
        colour = OURS if name.startswith(HOLDFAST) else THEIRS
        farthest = max(end, LEFT + length(what.most))
        lines += [
            f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end" fill="{INK}">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<line x1="{LEFT + length(what.least):.1f}" x2="{LEFT + length(what.most):.1f}" y1="{middle}" '
            f'y2="{middle}" stroke="{INK}"/>',
            f'<text x="{farthest + 6:.1f}" y="{middle + 4}" fill="{FAINT}">{number(what.median)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


class _scale:  # noqa: N801
    """How long a bar is. Logarithmic, from a power of ten, where the least would not be seen beside the most."""

    def __init__(self, bars: Sequence[Spread]) -> None:
        self._room = WIDTH - LEFT - RIGHT
        self._most = max((bar.most for bar in bars), default=1.0)
        self._origin = 0.0
        if _spans(bars):
            least = min(bar.least for bar in bars if bar.least > 0)
            self._origin = 10.0 ** (math.ceil(math.log10(least)) - 1)

    def __call__(self, value: float) -> float:
        if self._origin:
            share = math.log(max(value, self._origin) / self._origin) / math.log(self._most / self._origin)
        else:
            share = value / self._most
        return self._room * share


def _spans(bars: Iterable[Spread]) -> bool:
    medians = [bar.median for bar in bars]
    return bool(medians) and max(medians) > 30 * min(medians)
