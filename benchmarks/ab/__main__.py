"""Compare the CPU time per job of two revisions. Fails if the second one is worse.

    ./dev bench ab main                compare main with the working tree
    ./dev bench ab v0.1 main           compare v0.1 with main
    ./dev bench ab main --only drain   only the rows of one scenario

Exit code: 1 if a row is worse than the limit with confidence, 2 if the comparison is not possible, otherwise 0.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from benchmarks.ab import revisions
from benchmarks.ab.intervals import Verdict, rank_depth
from benchmarks.ab.revisions import CACHE, Problem
from benchmarks.ab.rounds import QUICK_SLICES, SLICES, Figure, Plan, Progress, run, starter
from benchmarks.ab.rows import STORAGES, choose
from benchmarks.pages import number

ROUNDS, MAX_ROUNDS, QUICK_ROUNDS = 20, 40, 6
LIMIT_PERCENT = 3.0
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
FIGURES = CACHE / "last.json"
HEADS = ("row", "A µs/job", "B µs/job", "B / A", "95% interval", "verdict")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line without the usage."""
        raise Problem(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="./dev bench ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="REVISION", help="the base of the comparison")
    parser.add_argument("b", metavar="REVISION2", nargs="?", help="the revision to judge; default: the working tree")
    parser.add_argument("--rounds", type=int, help=f"rounds of each row; default {ROUNDS}")
    parser.add_argument(
        "--max-rounds",
        type=int,
        help=f"rounds of a row that stays undecided; default {MAX_ROUNDS}, or --rounds if given",
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} short rounds: a rough look")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="scenario or row; may be repeated")
    parser.add_argument("--storage", choices=STORAGES, help="only the rows of this storage")
    parser.add_argument("--limit", type=float, default=LIMIT_PERCENT, metavar="PERCENT", help="default: %(default)g")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random order; default: %(default)s")
    return parser.parse_args(arguments)


def plan_of(given: argparse.Namespace) -> Plan:
    """Rounds and limit, checked."""
    rounds = given.rounds if given.rounds is not None else QUICK_ROUNDS if given.quick else ROUNDS
    usual = rounds if given.quick or given.rounds is not None else MAX_ROUNDS
    most = given.max_rounds if given.max_rounds is not None else usual
    if rounds < 1:
        raise Problem(f"--rounds {rounds} is too small: pass at least 1")
    if most < rounds:
        raise Problem(f"--max-rounds {most} is less than the {rounds} rounds of each row: pass at least {rounds}")
    if given.limit < 0:
        raise Problem(f"--limit {given.limit:g} is negative: pass a percentage of 0 or more")
    return Plan(rounds, most, QUICK_SLICES if given.quick else SLICES, given.limit / 100)


def table(figures: Sequence[Figure], plan: Plan) -> str:
    """Aligned columns, one line for each figure."""
    lines = [HEADS]
    for figure in figures:
        a, b = figure.medians
        found = figure.interval(plan.error)
        bounds = f"{found.low:.3f} to {found.high:.3f}"
        lines.append((figure.name, number(a), number(b), f"{found.ratio:.3f}", bounds, figure.verdict(plan).value))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def summary(figures: Sequence[Figure], plan: Plan) -> str:
    """Rows that are worse and rows that are undecided, in words."""
    limit = f"{100 * plan.limit:g}%"
    by_verdict = {verdict: [f.name for f in figures if f.verdict(plan) is verdict] for verdict in Verdict}
    lines: list[str] = []
    if worse := by_verdict[Verdict.WORSE]:
        lines.append(f"worse by more than {limit}: {'; '.join(worse)}")
    if undecided := by_verdict[Verdict.UNDECIDED]:
        lines.append(f"undecided, because the interval contains {1 + plan.limit:g}: {'; '.join(undecided)}")
        if rank_depth(plan.max_rounds, plan.error) == 0:
            lines.append(
                f"{plan.max_rounds} round(s) are too few for a 95% interval: pass --rounds {QUICK_ROUNDS} or more"
            )
        else:
            lines.append("pass a larger --max-rounds, or run again on an idle machine")
    return "\n".join(lines) or f"no row is worse by more than {limit}"


def say(line: str) -> None:
    """Show progress: on a terminal each line replaces the one before."""
    if sys.stderr.isatty():
        print(f"\r  {line:76}", end="", file=sys.stderr, flush=True)
    else:
        print(f"  {line}", file=sys.stderr, flush=True)


def compare(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    if sys.platform != "linux":
        raise Problem(f"CPU time is read from Linux process clocks, and this is {sys.platform}: run it on Linux")
    plan = plan_of(given)
    rows = choose([term for terms in given.only for term in terms.split(",")], given.storage)
    sides = [revisions.find(given.a), revisions.find(given.b) if given.b else revisions.working_tree()]
    pythons = [revisions.install(side) for side in sides]
    print(f"A: {sides[0].name}\nB: {sides[1].name}\nPython {platform.python_version()}, seed {given.seed}")
    if sides[0].tree == sides[1].tree:
        print("A and B have the same files: this run shows the noise of the machine")
    figures = [Figure(row, name) for row in rows for name in row.figures]
    start = starter([side.name for side in sides], pythons)
    interrupted = False
    try:
        run(figures, plan, start, random.Random(given.seed), Progress(say))
    except KeyboardInterrupt:
        interrupted = True
    figures = [figure for figure in figures if figure.a_us]
    FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    print(f"\n{table(figures, plan)}\n\n{summary(figures, plan)}")
    if interrupted:
        print("interrupted: the table covers only the finished rounds", file=sys.stderr)
        return INTERRUPTED
    return int(any(figure.verdict(plan) is Verdict.WORSE for figure in figures))


def main() -> None:
    try:
        sys.exit(compare(sys.argv[1:]))
    except Problem as problem:
        print(f"./dev bench ab: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
