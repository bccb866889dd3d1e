"""Targets of Holdfast compared with other systems. A missed target stays in the report."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.pages import Judged, number
from benchmarks.peers.figures import (
    BULK,
    BYTES,
    CALL,
    CALL_P99,
    CALLS,
    DRAIN,
    ENQUEUE,
    IDLE,
    PICKUP,
    SERVER_CPU,
    WORKER_CPU,
    Metric,
    Run,
    ratio,
    spread,
)
from benchmarks.peers.systems import HOLDFAST, HOLDFAST_SQLITE, LIMIT, System


class Target(msgspec.Struct, frozen=True):
    """A limit of a figure: at most a number, or a number of times better than another system."""

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
    Target("drain, inline, against the limit", HOLDFAST, DRAIN, 0.5, LIMIT),
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
    Target("idle commands/s, one queue", HOLDFAST, IDLE, 3),
    Target("bytes per queued job, Valkey", HOLDFAST, BYTES, 340),
    Target("SQLite: drain, against Huey", HOLDFAST_SQLITE, DRAIN, 5, "huey, SQLite"),
    Target("SQLite: bulk, against litequeue", HOLDFAST_SQLITE, BULK, 0.9, "litequeue"),
    Target("SQLite: call p50 across processes, ms", HOLDFAST_SQLITE, CALL, 5),
)


def judged(run: Run, systems: Sequence[System]) -> list[Judged]:
    """The result of each target, also of those that could not be measured."""
    return [_judged(run, systems, target) for target in TARGETS]


def _judged(run: Run, systems: Sequence[System], target: Target) -> Judged:
    ours = spread(run, target.ours, target.metric.name)
    if not target.rival:
        wanted = f"≤ {number(target.bound)}"
        if ours is None:
            return Judged(target.what, wanted)
        return Judged(target.what, wanted, number(ours.median), ours.median <= target.bound)
    rival = _rival(run, systems, target)
    wanted = f"≥ {number(target.bound)} × {target.rival if rival is None else rival.name}"
    theirs = None if rival is None else spread(run, rival.name, target.metric.name)
    times = None if rival is None else ratio(run, rival, target.metric, target.ours)
    if ours is None or theirs is None or times is None:
        return Judged(target.what, wanted)
    both = f"{number(ours.median)} against {number(theirs.median)}"
    return Judged(target.what, wanted, f"{number(times)} × ({both})", times >= target.bound)


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
