"""The table of minutes has every folder of tests, and its sums stay within the time of each command."""

from __future__ import annotations

import pytest

from tests import suites

PROCESSES = 3
MOST_MINUTES = {"fast": 1.5, "usual": 10.0, "slow": 30.0}


def folders() -> set[str]:
    return {path.parent.name for path in suites.TESTS.glob("*/test_*.py")}


def test_every_folder_has_its_minutes() -> None:
    assert set(suites.budgets("usual")) == folders()
    assert set(suites.budgets("fast")) == set(suites.FAST_FOLDERS)
    assert set(suites.budgets("slow")) <= folders()


@pytest.mark.parametrize("suite", suites.SUITES)
def test_a_suite_stays_within_the_time_of_its_command(suite: str) -> None:
    assert sum(suites.budgets(suite).values()) / PROCESSES <= MOST_MINUTES[suite]


def test_a_folder_that_takes_longer_than_its_minutes_is_named() -> None:
    allowed = suites.budgets("usual")["unit"]
    assert suites.over_budget("usual", {"unit": 60 * allowed}) == []
    (line,) = suites.over_budget("usual", {"unit": 60 * allowed + 60})
    assert line == f"tests/unit took {allowed + 1:.1f} minutes, not {allowed:.1f}"
