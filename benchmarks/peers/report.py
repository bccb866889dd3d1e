"""What a run says, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.pages import number, table, targets
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
    Spread,
    failures,
    less,
    ratio,
    reference,
    spread,
)
from benchmarks.peers.plots import drawn
from benchmarks.peers.systems import System
from benchmarks.peers.targets import judged


class Page(msgspec.Struct, frozen=True):
    """One of the reports that are made of a run."""

    name: str
    """Of its files."""
    title: str
    command: str


class Table(msgspec.Struct, frozen=True):
    title: str
    metrics: tuple[Metric, ...]
    foreword: str = ""


TABLES = (
    Table(
        "CPU per job, µs",
        (
            WORKER_CPU,
            SERVER_CPU,
            less("drain_server_us", "server, drain"),
            less("bulk_server_us", "server, bulk"),
            less("bulk_client_us", "client, bulk"),
            less("enqueue_server_us", "server, one at a time"),
            less("enqueue_client_us", "client, one at a time"),
        ),
        "Worker is the whole tree of the worker's processes. The steadier figures on a shared machine.",
    ),
    Table("Jobs per second", (DRAIN, BULK, ENQUEUE, CALLS)),
    Table(
        "Latency, ms",
        (CALL, CALL_P99, PICKUP, less("pickup_p99", "pickup p99")),
        "A call goes through an idle worker in another process and back; pickup is from the call of enqueue to the "
        "handler's start.",
    ),
    Table(
        "Commands and bytes",
        (
            BYTES,
            less("drain_commands", "commands per job, drain"),
            less("bulk_commands", "commands per job, bulk"),
            less("enqueue_commands", "commands per job, one at a time"),
            IDLE,
            less("idle_commands", "with those in scripts"),
            less("idle_cpu", "idle worker CPU, %"),
        ),
        "Commands are those that the server counts, including those inside scripts. For an idle worker the report also "
        "has what clients sent.",
    ),
)
LIMITED = (
    (WORKER_CPU, "worker CPU of a drain, µs"),
    (SERVER_CPU, "server CPU, bulk + drain, µs"),
    (DRAIN, "drain, jobs/s"),
    (BULK, "enqueue in bulk, jobs/s"),
    (ENQUEUE, "enqueue one at a time, jobs/s"),
    (PICKUP, "pickup p50, ms"),
    (BYTES, "bytes per queued job"),
)
LIMITS = (
    "What nothing on our schema can be much faster than: our own functions over a blocking socket, and bare statements "
    "on our own tables, claimed and settled by the hundred; nothing is checked, retried or answered. They are not "
    "peers, since no program could use them.\n"
)
RATIOS = (WORKER_CPU, SERVER_CPU, DRAIN, BULK, ENQUEUE, CALLS, CALL, CALL_P99, PICKUP, BYTES)


def _cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    if found.least == found.most:
        return number(found.median)
    return f"{number(found.median)} ({number(found.least)}..{number(found.most)})"


def markdown(run: Run, systems: Sequence[System], page: Page) -> str:
    peers = [system for system in systems if system.packages]
    contenders = [system for system in systems if not system.is_limit]
    limits = [system for system in systems if system.is_limit]
    parts = [
        f"# {page.title}\n",
        f"Written by `{page.command}`; how it is measured: [benchmarks](../README.md).\n",
        table(["", ""], [[name, what] for name, what in run.about.items()]),
        "Medians of the rounds (least..most). `-`: the system cannot, or the round ended before.\n",
        *(f"![{title}]({page.name}-{name}.svg)\n" for name, (_, title) in drawn(run, systems).items()),
    ]
    if contenders:
        parts += _contenders(run, contenders)
    if peers:
        parts += ["## How many times better Holdfast is\n", "Below 1, the other one is better.\n"]
        rows = [[system.name, *(_times(ratio(run, system, metric)) for metric in RATIOS)] for system in contenders]
        parts.append(table(["", *(metric.title for metric in RATIOS)], rows))
    if limits:
        parts += ["## The limits\n", LIMITS, _limits(run, systems, limits)]
    if run.bytes_queued:
        rows = [[server, number(size)] for server, size in run.bytes_queued.items()]
        parts += ["## A queued job of 100 bytes\n", table(["", "bytes in memory"], rows)]
    if contenders:
        # A run without peers leaves most targets open.
        known = [row for row in judged(run, systems) if peers or row.met is not None]
        parts += ["## Targets\n", targets(known)]
    parts += ["## The systems\n", table(["", "versions", "jobs", "bulk", "setting"], _described(run, systems))]
    parts += ["## What failed\n", _failed(run, systems)]
    return "\n".join(parts)


def _contenders(run: Run, systems: Sequence[System]) -> list[str]:
    parts: list[str] = []
    for part in TABLES:
        parts += [f"## {part.title}\n", *([part.foreword + "\n"] if part.foreword else [])]
        rows = [[system.name, *(_cell(spread(run, system.name, m.name)) for m in part.metrics)] for system in systems]
        parts.append(table(["", *(metric.title for metric in part.metrics)], rows))
    parts += ["Which commands, for each job of a drain, and in each second of an idle worker:\n"]
    return [*parts, table(["", "drain", "idle"], _commands(run, systems))]


def _limits(run: Run, systems: Sequence[System], limits: Sequence[System]) -> str:
    """Each limit, and beside it how near Holdfast comes, if it was measured as well."""
    heads, columns = [""], [[title for _, title in LIMITED]]
    for limit in limits:
        heads.append(limit.name)
        columns.append([_cell(spread(run, limit.name, metric.name)) for metric, _ in LIMITED])
        if any(system.name == reference(limit) for system in systems):
            heads += [reference(limit), "of the limit"]
            columns.append([_cell(spread(run, reference(limit), metric.name)) for metric, _ in LIMITED])
            columns.append([_times(ratio(run, limit, metric)) for metric, _ in LIMITED])
    return table(heads, zip(*columns, strict=True))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{number(value)} ×"


def _described(run: Run, systems: Sequence[System]) -> list[list[str]]:
    rows: list[list[str]] = []
    for system in systems:
        seen = [turn[system.name] for turn in run.rounds if system.name in turn and turn[system.name].versions]
        versions = ", ".join(f"{name} {version}" for name, version in seen[-1].versions.items()) if seen else "-"
        how = seen[-1].how if seen else {}
        rows.append([system.name, versions, f"{how.get('jobs', 0):,}", str(how.get("bulk", "-")), system.note])
    return rows


def _commands(run: Run, systems: Sequence[System]) -> list[list[str]]:
    """Of the last round that has the figure."""
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
