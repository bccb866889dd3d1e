"""What the checker found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

RULES = (
    "no loss",
    "no phantom",
    "one end",
    "no double completion",
    "limits",
    "fenced",
    "no overlap",
    "never early",
    "order",
    "progress",
    "fail handler",
    "waiters",
    "attributed",
    "stalls explained",
    "drained",
    "audit",
    "nothing left over",
)
Check = Callable[[str, bool, object], None]
"""Counts a check of a rule; if it does not hold, records the message."""


@dataclass
class Verdict:
    checks: Counter[str] = field(default_factory=Counter[str])
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    duplicates: Counter[str] = field(default_factory=Counter[str])
    """Repeated runs, by the fault that cost the first."""
    late: list[float] = field(default_factory=list[float])
    """How late callers returned whose wait timed out."""
    counts: Counter[str] = field(default_factory=Counter[str])

    def check(self, rule: str, holds: bool, otherwise: object) -> None:
        self.checks[rule] += 1
        if not holds:
            self.wrong[rule].append(str(otherwise))
