"""The comparison of two revisions: its intervals, its verdicts, and the errors for bad arguments."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.ab import __main__ as ab
from benchmarks.ab.intervals import Interval, Verdict, interval, looks, rank_depth, verdict
from benchmarks.ab.rounds import Figure, Plan, Progress, orders, run
from benchmarks.ab.rows import ROWS, Row, choose
from benchmarks.ab.side import Side

ROW = Row("enqueue", "sqlite")


@pytest.mark.parametrize(("rounds", "depth"), [(5, 0), (6, 1), (8, 4), (10, 9), (20, 53)])
def test_rank_depth_matches_the_published_table_of_the_signed_rank_test(rounds: int, depth: int) -> None:
    assert rank_depth(rounds, 0.05) == depth


def test_interval_of_equal_ratios_is_that_ratio() -> None:
    found = interval([1.1] * 6)
    assert (found.ratio, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_unbounded_when_rounds_are_too_few() -> None:
    assert interval([1.5] * 5) == Interval(pytest.approx(1.5), 0.0, math.inf)  # type: ignore[arg-type]


def test_one_disturbed_round_hardly_moves_the_interval() -> None:
    calm = [0.99, 0.995, 1.0, 1.005, 1.01] * 4
    found, disturbed = interval(calm), interval([*calm[:-1], 5.0])
    assert disturbed.ratio == pytest.approx(found.ratio, abs=0.005)
    assert disturbed.high < 1.01


def test_interval_contains_the_true_ratio_in_about_95_of_100_runs() -> None:
    rng = random.Random(7)
    runs = [interval([1.1 * math.exp(rng.gauss(0, 0.05)) for _ in range(12)]) for _ in range(400)]
    assert 0.92 < sum(found.low <= 1.1 <= found.high for found in runs) / len(runs) < 0.99


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.031, 1.2, Verdict.WORSE),
        (1.029, 1.2, Verdict.UNDECIDED),
        (0.5, 1.031, Verdict.UNDECIDED),
        (1.01, 1.029, Verdict.WITHIN_LIMIT),
        (0.9, 1.0, Verdict.WITHIN_LIMIT),
        (0.9, 0.99, Verdict.BETTER),
    ],
)
def test_verdict_follows_from_both_bounds(low: float, high: float, expected: Verdict) -> None:
    assert verdict(Interval(1.0, low, high), 0.03) is expected


def test_each_further_check_of_a_row_makes_the_interval_stricter() -> None:
    assert [looks(20, most, 10) for most in (20, 21, 30, 40)] == [1, 2, 2, 3]
    assert Plan(20, 40, 8, 0.03).error == pytest.approx(0.05 / 3)


def test_each_side_goes_first_in_half_of_the_slices() -> None:
    found = orders(8, random.Random(1))
    assert sorted(found) == [(0, 1)] * 4 + [(1, 0)] * 4
    assert found == orders(8, random.Random(1))


class MadeUp(Side):
    """A side without a process, whose slices have a fixed cost."""

    def __init__(self, cost_ns: float) -> None:
        self._cost_ns = cost_ns

    def slice(self) -> list[int]:
        return [int(self._cost_ns), 0]

    def __exit__(self, *_: object) -> None:
        pass


def measured(noise: float, ratio: float, plan: Plan) -> Figure:
    """The figure of a run in which B costs `ratio` times as much as A."""
    rng, figure = random.Random(3), Figure(ROW, ROW.name)

    def start(side: int, row: Row, hash_seed: int) -> Side:
        return MadeUp(1e8 * (ratio if side else 1) * math.exp(rng.gauss(0, noise)))

    run([figure], plan, start, random.Random(1), Progress(lambda line: None))
    return figure


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, Verdict.WITHIN_LIMIT), (1.1, Verdict.WORSE)])
def test_a_run_finds_a_slowdown_and_only_a_slowdown(ratio: float, expected: Verdict) -> None:
    plan = Plan(20, 40, 2, 0.03)
    figure = measured(0.01, ratio, plan)
    assert figure.verdict(plan) is expected
    assert len(figure.a_us) == 20


def test_an_undecided_row_gets_more_rounds_up_to_the_maximum() -> None:
    plan = Plan(6, 20, 2, 0.03)
    figure = measured(0.3, 1.0, plan)
    assert figure.verdict(plan) is Verdict.UNDECIDED
    assert len(figure.a_us) == len(figure.b_us) == 20


def test_a_run_that_finds_a_worse_row_says_so_in_words() -> None:
    plan = Plan(6, 6, 2, 0.03)
    figures = [Figure(ROW, "slow", [1.0] * 6, [1.2] * 6), Figure(ROW, "wide", [1.0] * 6, [0.5, 1.5] * 3)]
    assert " ".join(ab.table(figures, plan).splitlines()[1].split()) == "slow 1 1.2 1.200 1.200 to 1.200 WORSE"
    assert ab.summary(figures, plan).splitlines()[:2] == [
        "worse by more than 3%: slow",
        "undecided, because the interval contains 1.03: wide",
    ]


def test_rows_are_chosen_by_scenario_name_and_storage() -> None:
    assert choose([], None) == list(ROWS)
    assert [row.name for row in choose(["drain", "call-sqlite"], None)] == [
        "drain-sqlite",
        "drain-valkey",
        "call-sqlite",
    ]
    assert [row.name for row in choose(["drain"], "valkey")] == ["drain-valkey"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "arguments are required: REVISION"),
        ("no-such-revision", "unknown revision 'no-such-revision'"),
        ("HEAD no-such-revision", "unknown revision 'no-such-revision'"),
        ("HEAD --only no-such-row", "unknown row 'no-such-row'"),
        ("HEAD --only drain-sqlite --storage valkey", "no row is left"),
        ("HEAD --storage postgres", "invalid choice: 'postgres'"),
        ("HEAD --rounds 0", "--rounds 0 is too small"),
        ("HEAD --rounds 9 --max-rounds 8", "--max-rounds 8 is less than the 9 rounds"),
        ("HEAD --limit -1", "--limit -1 is negative"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ab", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        ab.main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
