"""`holdfast doctor`: checks the storage and its settings, and whether all queues are served."""

from __future__ import annotations

import statistics
import time

import click

from holdfast._client.app import Holdfast
from holdfast._client.settings import find_settings
from holdfast._client.stats import AppStats
from holdfast._core.applications import Comparison, compare_applications
from holdfast._core.clock import SystemClock
from holdfast._core.replies import StorageInfo
from holdfast._worker.app_loader import app_parts, import_app
from holdfast.cli.common import look_here, with_present_app
from holdfast.cli.output import NO, as_json, end, format_count, say, say_json

SKEW_WARN_S = 1.0
LATENCY_WARN_MS = 50.0
READS = 20


@click.command()
@click.argument("target", required=False, metavar="[MODULE:APP]")
@as_json
@with_present_app
async def doctor(app: Holdfast[None], target: str | None, *, as_json: bool) -> None:
    """Check the storage, and whether all queues are served.

    Prints the version of the storage, what it keeps after a crash, eviction, clock, latency and layout. With MODULE:APP
    (or `app` in [tool.holdfast]) it also lists queues that have no task in that app. Exit status 1 if there is a
    warning.
    """
    about = await app.storage.about()
    latency_ms = await _latency_ms(app)
    skew_s = (about.now - SystemClock().now_us()) / 1e6
    snapshot = await app.stats()
    tasks = _tasks(target or find_settings().app)
    compared = compare_applications(worker.facts for worker in snapshot.workers)
    warnings = [
        *about.warnings,
        *_slow_or_skewed(latency_ms, skew_s),
        *(queue.problem for queue in snapshot.queues if queue.problem),
        *_unserved(snapshot, tasks),
        *compared.warnings,
    ]
    if as_json:
        facts = {"storage": about.name, "keeps": about.keeps, "facts": about.facts, "latency_ms": latency_ms}
        found = {"queues": len(snapshot.queues), "versions": compared.versions, "warnings": warnings}
        say_json({**facts, "skew_s": skew_s, **found})
    else:
        _show(about, latency_ms, skew_s, snapshot, Comparison(warnings, compared.versions))
    if warnings:
        end(NO)


def _show(about: StorageInfo, latency_ms: float, skew_s: float, snapshot: AppStats, found: Comparison) -> None:
    say(about.name)
    say(f"  keeps      {about.keeps}")
    for name, value in about.facts.items():
        say(f"  {name:<10} {value}")
    say(f"  latency    {latency_ms:.2f} ms for a read, median of {READS}")
    say(f"  clock      {skew_s:+.3f} s from this host's")
    say(f"  has        {format_count(len(snapshot.queues), 'queue')}, {format_count(len(snapshot.workers), 'worker')}")
    for version in found.versions:
        say(f"  {version}")
    for warning in found.warnings:
        click.secho("! ", fg="yellow", nl=False)
        say(warning)
    if not found.warnings:
        say("no problems found")


async def _latency_ms(app: Holdfast[None]) -> float:
    times: list[float] = []
    for _ in range(READS):
        began = time.perf_counter()
        await app.storage.ready(["holdfast-doctor"])
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def _tasks(target: str | None) -> set[str] | None:
    if target is None:
        return None
    look_here()
    return {handler.queue for handler in app_parts(import_app(target, Holdfast)).handlers}


def _slow_or_skewed(latency_ms: float, skew_s: float) -> list[str]:
    """Warnings about the latency and the clock of the storage."""
    warnings: list[str] = []
    if abs(skew_s) > SKEW_WARN_S:
        warnings.append(f"the storage's clock differs from this host's by {skew_s:+.1f} s: synchronize both")
    if latency_ms > LATENCY_WARN_MS:
        warnings.append(f"a read takes {latency_ms:.0f} ms: check the distance and the load of the storage")
    return warnings


def _unserved(snapshot: AppStats, tasks: set[str] | None) -> list[str]:
    """Warnings about queues that no worker serves."""
    warnings: list[str] = []
    for stats in snapshot.queues:
        if tasks is not None and stats.queue not in tasks and not stats.workers:
            warnings.append(f"queue {stats.queue} has no task in this app, and no worker serves it")
        elif stats.ready and not stats.workers and not stats.paused:
            warnings.append(
                f"queue {stats.queue} has {format_count(stats.ready, 'ready job')}, and no worker serves it"
            )
    return warnings
