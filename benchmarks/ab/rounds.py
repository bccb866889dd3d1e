"""Rounds: both revisions take turns, slice by slice, and each round gives one ratio for each figure.

A round of a row starts one fresh process for each revision. Both warm up, then they alternate slices of about 0.1 s,
in a random order that is balanced: each side goes first in half of the slices. So a slow moment of the machine hits
both sides. A round visits all rows before the next round starts, so that a slow minute does not hit one row alone.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.ab.intervals import ERROR, Interval, Verdict, interval, looks, verdict
from benchmarks.ab.rows import Row
from benchmarks.ab.side import Side

WARM_UP = 2
"""Slices of each side that are not counted."""
SLICES = 8
QUICK_SLICES = 2
STEP = 10
"""Rounds that undecided rows get before they are judged again."""


class Plan(msgspec.Struct, frozen=True):
    """Size of a run, and the limit of its verdicts."""

    rounds: int
    max_rounds: int
    slices: int
    limit: float
    """Increase that is accepted: 0.03 for 3%."""

    @property
    def error(self) -> float:
        """Error of one interval. All looks at a row together have the error `ERROR`, by Bonferroni's rule."""
        return ERROR / looks(self.rounds, self.max_rounds, STEP)


class Figure(msgspec.Struct):
    """CPU time per job of both sides, round by round."""

    row: Row
    name: str
    a_us: list[float] = []
    b_us: list[float] = []

    def interval(self, error: float) -> Interval:
        """Interval of the ratio B / A."""
        return interval([b / a for a, b in zip(self.a_us, self.b_us, strict=True)], error)

    def verdict(self, plan: Plan) -> Verdict:
        return verdict(self.interval(plan.error), plan.limit)

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.a_us), statistics.median(self.b_us)


Start = Callable[[int, Row, int], Side]
"""Start side 0 or 1 for a row, with a hash seed."""


def starter(names: Sequence[str], pythons: Sequence[Path]) -> Start:
    """Start sides with these names from these environments."""
    return lambda side, row, hash_seed: Side(f"{'AB'[side]}, {names[side]}", pythons[side], row, hash_seed)


def orders(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Order of the two sides for each slice: random, and balanced within each two slices."""
    found: list[tuple[int, int]] = []
    while len(found) < count:
        block = [(0, 1), (1, 0)]
        rng.shuffle(block)
        found += block
    return found[:count]


def run_round(row: Row, slices: int, start: Start, rng: random.Random) -> list[list[float]]:
    """CPU microseconds per job of side A and side B, by figure."""
    hash_seed = rng.randrange(1 << 32)
    spent = [[0] * len(row.figures) for _ in "AB"]
    first, second = orders(1, rng)[0]
    with start(first, row, hash_seed) as one, start(second, row, hash_seed) as other:
        sides = {first: one, second: other}
        for turn, order in enumerate(orders(WARM_UP + slices, rng)):
            for side in order:
                costs = sides[side].slice()
                if turn >= WARM_UP:
                    spent[side] = [total + cost for total, cost in zip(spent[side], costs, strict=False)]
    return [[total / 1e3 / (slices * row.jobs) for total in totals] for totals in spent]


class Progress:
    """Says which round and row is measured, and how long the planned rounds will take."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.monotonic()
        self._done = 0

    def next(self, row: Row, turn: int, last: int, left: int) -> None:
        """Announce one round of a row. `left` such rounds are planned, with this one."""
        if self._done:
            minutes = (time.monotonic() - self._began) / self._done * left / 60
            self._say(f"round {turn} of {last}, {row.name}: about {minutes:.1f} min left")
        else:
            self._say(f"round {turn} of {last}, {row.name}")
        self._done += 1


def run(figures: list[Figure], plan: Plan, start: Start, rng: random.Random, progress: Progress) -> None:
    """Measure all rows, then those that are undecided, until all are decided or have had `max_rounds`."""
    rows = list(dict.fromkeys(figure.row for figure in figures))
    done, until = 0, plan.rounds
    while rows:
        for turn in range(done, until):
            for index, row in enumerate(rows):
                left = (until - turn) * len(rows) - index
                progress.next(row, turn + 1, until, left)
                a, b = run_round(row, plan.slices, start, rng)
                for figure in (figure for figure in figures if figure.row == row):
                    place = row.figures.index(figure.name)
                    figure.a_us.append(a[place])
                    figure.b_us.append(b[place])
        if until >= plan.max_rounds:
            return
        open_rows = {figure.row for figure in figures if figure.verdict(plan) is Verdict.UNDECIDED}
        rows = [row for row in rows if row in open_rows]
        done, until = until, min(until + STEP, plan.max_rounds)
