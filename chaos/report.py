"""The report of a run, as JSON for `merge` and as Markdown for people."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from chaos.checker import Checker
from chaos.costs import RECOVERY_S, Costs
from chaos.settings import DRAWN, PROFILES
from chaos.verdict import RULES

FAULTS = {
    "sqlite": (
        "worker kill",
        "child kill",
        "worker freeze",
        "tree freeze",
        "child freeze",
        "clock jump",
        "file locked",
    ),
    "server": (
        *("worker kill", "child kill", "worker freeze", "tree freeze", "child freeze", "clock jump"),
        *("server kill", "server pause", "cut", "delay", "truncate", "silence", "script flush", "full memory"),
    ),
}
SHOWN = 20
"""Largest number of cases that are shown for each broken rule."""


class Shard(msgspec.Struct, kw_only=True):
    """The parameters of one run."""

    storage: str
    server: str
    seed: int
    seconds: float
    commit: str
    python: str
    profile: str = "all"


class Report(msgspec.Struct, kw_only=True):
    shards: list[Shard]
    counts: dict[str, int]
    checks: dict[str, int]
    wrong: dict[str, list[str]]
    wrong_counts: dict[str, int]
    faults: dict[str, int]
    hits: dict[str, int]
    kinds: dict[str, int]
    duplicates: dict[str, int]
    recoveries: dict[str, list[float]]
    excesses: list[str]
    waits: list[float]

    @property
    def never_hit(self) -> list[str]:
        """Kinds of faults and handlers that the profile has, and that had no effect."""
        faults: set[str] = set()
        kinds: set[str] = set()
        for shard in self.shards:
            profile = PROFILES[shard.profile]
            possible = set(FAULTS["sqlite" if shard.storage == "sqlite" else "server"])
            faults |= possible if profile.faults is None else possible & profile.faults.keys()
            kinds |= (DRAWN.keys() if "drawn" in profile.kinds else profile.kinds.keys()) - {"again"}
        missing = [fault for fault in sorted(faults) if not self.hits.get(fault)]
        return missing + [f"handler: {kind}" for kind in sorted(kinds) if not self.kinds.get(kind)]

    @property
    def unchecked(self) -> list[str]:
        """Rules that were not checked."""
        return [rule for rule in RULES if not self.checks.get(rule)]

    @property
    def green(self) -> bool:
        return not any(self.wrong_counts.values()) and not self.never_hit and not self.unchecked

    @property
    def verdict(self) -> str:
        """The last line of the output."""
        jobs = f"{self.counts.get('jobs', 0):,} jobs, {self.counts.get('runs', 0):,} runs"
        if self.green:
            return f"GREEN: {jobs}, {sum(self.faults.values()):,} faults, no rule broken"
        broken = [f"{rule} {count}" for rule, count in self.wrong_counts.items() if count]
        missed = [f"without an effect: {', '.join(self.never_hit)}"] if self.never_hit else []
        unseen = [f"not checked: {', '.join(self.unchecked)}"] if self.unchecked else []
        return f"RED: {jobs}: {'; '.join([*broken, *missed, *unseen])}"


def of(checker: Checker, shard: Shard) -> Report:
    verdict, costs = checker.verdict, Costs(checker.index)
    return Report(
        shards=[shard],
        counts=dict(verdict.counts),
        checks={rule: verdict.checks[rule] for rule in RULES},
        wrong={rule: cases[:SHOWN] for rule, cases in verdict.wrong.items()},
        wrong_counts={rule: len(cases) for rule, cases in verdict.wrong.items()},
        faults=dict(costs.faults),
        hits=dict(costs.hits),
        kinds=dict(costs.kinds),
        duplicates=dict(verdict.duplicates),
        recoveries={kind: sorted(round(s, 3) for s in seconds) for kind, seconds in costs.recoveries.items()},
        excesses=costs.excesses,
        waits=sorted(round(late, 3) for late in verdict.late),
    )


def merged(reports: list[Report]) -> Report:
    def sums(field: str) -> dict[str, int]:
        total: Counter[str] = Counter()
        for report in reports:
            total.update(getattr(report, field))
        return dict(total)

    wrong: dict[str, list[str]] = {}
    recoveries: dict[str, list[float]] = {}
    for report in reports:
        for rule, cases in report.wrong.items():
            wrong.setdefault(rule, []).extend(cases)
        for kind, seconds in report.recoveries.items():
            recoveries[kind] = sorted([*recoveries.get(kind, []), *seconds])
    return Report(
        shards=[shard for report in reports for shard in report.shards],
        counts=sums("counts"),
        checks=sums("checks"),
        wrong=wrong,
        wrong_counts=sums("wrong_counts"),
        faults=sums("faults"),
        hits=sums("hits"),
        kinds=sums("kinds"),
        duplicates=sums("duplicates"),
        recoveries=recoveries,
        excesses=[excess for report in reports for excess in report.excesses],
        waits=sorted(late for report in reports for late in report.waits),
    )


def at(seconds: list[float], share: float) -> float:
    """A percentile of a sorted list."""
    return seconds[min(math.ceil(share * len(seconds)), len(seconds)) - 1] if seconds else 0.0


def markdown(report: Report) -> str:
    lines = [
        "# Chaos",
        "",
        report.verdict,
        "",
        "| storage | seed | seconds | server | commit |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {s.storage} | {s.seed} | {s.seconds:.0f} | {s.server} | {s.commit} |" for s in report.shards]
    counts = ("jobs", "requests", "leases", "runs", "waits", "duplicates", "overlaps of others")
    lines += ["", ", ".join(f"{report.counts.get(name, 0):,} {name}" for name in counts), ""]
    lines += ["| rule | checks | broken |", "|---|---|---|"]
    lines += [f"| {name} | {count:,} | {report.wrong_counts.get(name, 0)} |" for name, count in report.checks.items()]
    lines += ["", "| fault | times | with an effect |", "|---|---|---|"]
    lines += [f"| {kind} | {report.faults[kind]:,} | {report.hits.get(kind, 0):,} |" for kind in sorted(report.faults)]
    lines += ["", "Handlers: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(report.kinds.items()))]
    lines += ["", "| repeated runs, by the fault that cost the first | |", "|---|---|"]
    lines += [f"| {cause} | {count:,} |" for cause, count in sorted(report.duplicates.items())]
    lines += [
        "",
        "| recovery in seconds | of | p50 | p99 | longest | limit at p99 |",
        "|---|---|---|---|---|---|",
    ]
    for kind, seconds in sorted(report.recoveries.items()):
        limit = RECOVERY_S.get(kind, "")
        figures = " | ".join(f"{figure:.2f}" for figure in (at(seconds, 0.5), at(seconds, 0.99), seconds[-1]))
        lines.append(f"| {kind} | {len(seconds):,} | {figures} | {limit} |")
    late = report.waits
    if late:
        lines.append(
            f"| late after a timeout | {len(late):,} | {at(late, 0.5):.2f} | {at(late, 0.99):.2f} | {late[-1]:.2f} | |"
        )
    if report.excesses:
        lines += ["", f"{len(report.excesses)} took longer:", ""]
        lines += [f"- {excess}" for excess in report.excesses[:SHOWN]]
    for rule, cases in report.wrong.items():
        lines += ["", f"## {rule}: broken {report.wrong_counts[rule]} times", ""]
        lines += [f"- {case}" for case in cases[:SHOWN]]
    return "\n".join(lines) + "\n"
