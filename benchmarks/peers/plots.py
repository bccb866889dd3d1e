"""Bars, drawn in SVG by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

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
    number,
    spread,
)
from benchmarks.peers.systems import HOLDFAST, System

PLOTS = {
    "worker-cpu": (WORKER_CPU, "Worker CPU per job, µs"),
    "server-cpu": (SERVER_CPU, "Server CPU per job, enqueue in bulk and drain, µs"),
    "drain": (DRAIN, "Drain by one worker, jobs/s"),
    "bulk": (BULK, "Enqueue in bulk or 100 at once, jobs/s"),
    "call": (CALL, "Call through an idle worker, p50, ms"),
    "calls": (CALLS, "Round trips with 100 waiters, per second"),
}

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 860, 170, 130, 44, 18, 6
OURS, THEIRS, INK, FAINT = "#0b7285", "#adb5bd", "#212529", "#495057"


def svg(run: Run, systems: Sequence[System], metric: Metric, title: str) -> str:
    """A bar for each system that has the figure, the best first, with a line from the least to the most."""
    found = [(system.name, spread(run, system.name, metric.name)) for system in systems]
    bars = [(name, what) for name, what in found if what is not None and what.median > 0]
    bars.sort(key=lambda bar: bar[1].median, reverse=metric.better == "more")
    length = Scale([what for _, what in bars])
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
