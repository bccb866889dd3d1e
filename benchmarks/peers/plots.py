"""Bars, drawn in SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.pages import INK, number, plot, text
from benchmarks.peers.figures import (
    BULK,
    CALL,
    CALLS,
    DRAIN,
    SERVER_CPU,
    WORKER_CPU,
    Metric,
    Run,
    Spread,
    spread,
)
from benchmarks.peers.systems import System

PLOTS = {
    "worker-cpu": (WORKER_CPU, "Worker CPU per job, µs"),
    "server-cpu": (SERVER_CPU, "Server CPU per job, enqueue in bulk and drain, µs"),
    "drain": (DRAIN, "Drain by one worker, jobs/s"),
    "bulk": (BULK, "Enqueue in bulk or 100 at once, jobs/s"),
    "call": (CALL, "Call through an idle worker, p50, ms"),
    "calls": (CALLS, "Round trips with 100 waiters, per second"),
}

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 860, 170, 130, 44, 18, 6
OURS, THEIRS, LIMITS = "#0b7285", "#adb5bd", "#e9c46a"


def drawn(run: Run, systems: Sequence[System]) -> dict[str, tuple[Metric, str]]:
    """The plots that have anything to show."""
    return {
        name: (metric, title)
        for name, (metric, title) in PLOTS.items()
        if any(spread(run, system.name, metric.name) for system in systems)
    }


def svg(run: Run, systems: Sequence[System], metric: Metric, title: str) -> str:
    """A bar for each system that has the figure, the best first, with a line from the least to the most."""
    found = [(system, spread(run, system.name, metric.name)) for system in systems]
    bars = [(system, what) for system, what in found if what is not None and what.median > 0]
    bars.sort(key=lambda bar: bar[1].median, reverse=metric.better == "more")
    length = Scale([what for _, what in bars])
    height = TOP + len(bars) * (BAR + GAP) + 10
    best = "longer is better" if metric.better == "more" else "shorter is better"
    logarithmic = ", logarithmic" if _spans(bar for _, bar in bars) else ""
    shapes = [text(WIDTH - 10, 22, best + logarithmic, anchor="end")]
    for place, (system, what) in enumerate(bars):
        y = TOP + place * (BAR + GAP)
        middle, end = y + BAR / 2, LEFT + length(what.median)
        farthest = max(end, LEFT + length(what.most))
        shapes += [
            text(LEFT - 8, middle + 4, system.name, INK, anchor="end"),
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" fill="{_colour(system)}"/>',
            f'<line x1="{LEFT + length(what.least):.1f}" x2="{LEFT + length(what.most):.1f}" y1="{middle}" '
            f'y2="{middle}" stroke="{INK}"/>',
            text(farthest + 6, middle + 4, number(what.median)),
        ]
    return plot(WIDTH, height, title, shapes)


def _colour(system: System) -> str:
    return LIMITS if system.is_limit else THEIRS if system.packages else OURS


class Scale:
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
