"""What the rounds say together: medians, spreads and ratios, and the names of all that is measured.

A ratio says how many times better Holdfast is, whichever direction is better, and is the median of the rounds' own
ratios, so that a slow minute hits both sides. Systems on SQLite are compared with Holdfast on SQLite.
"""

from __future__ import annotations

import statistics
from typing import Literal

import msgspec

from benchmarks.peers.measure import Measured
from benchmarks.peers.systems import HOLDFAST, HOLDFAST_SQLITE, System


class Metric(msgspec.Struct, frozen=True):
    name: str
    title: str
    better: Literal["less", "more"]


def less(name: str, title: str) -> Metric:
    return Metric(name, title, "less")


def more(name: str, title: str) -> Metric:
    return Metric(name, title, "more")


WORKER_CPU = less("drain_worker_us", "worker, drain")
SERVER_CPU = less("server_us", "server, bulk + drain")
DRAIN = more("drain_rate", "drain, one worker")
BULK = more("bulk_rate", "enqueue, bulk or 100 at once")
ENQUEUE = more("enqueue_rate", "enqueue, one at a time")
CALLS = more("calls_rate", "round trips, 100 waiters")
CALL = less("call_p50", "call p50")
CALL_P99 = less("call_p99", "call p99")
PICKUP = less("pickup_p50", "pickup p50")
IDLE = less("idle_sent", "idle commands/s, sent")
BYTES = less("bytes", "bytes per queued job")


class Run(msgspec.Struct):
    """A whole run. `rounds` has one entry for each round: what was measured, by the system's name."""

    about: dict[str, str]
    rounds: list[dict[str, Measured]]
    bytes_queued: dict[str, float] = {}
    """Of one job through our own storage, by server, where that was measured."""


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
