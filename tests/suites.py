"""Which suite a test is in, and how many minutes each folder may take.

There are three suites. `pytest` without arguments runs `fast`, `./dev test` runs `fast` and `usual`, and
`./dev test --all` runs `slow`: what the first two leave out. A folder is in one suite, and the marker `suite` moves a
module, a test or one parameter to a slower one. A run that names tests, by path or with `-k`, has them all.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SUITES = ("fast", "usual", "slow")
SELECTIONS = {"fast": SUITES[:1], "usual": SUITES[:2], "slow": SUITES[2:], "all": SUITES}
"""What `--suite` runs."""
FAST_FOLDERS = ("app", "architecture", "storage", "unit")
"""Folders whose tests are `fast` unless a marker says otherwise. All other folders are `usual`."""
MINUTES = TESTS / "minutes.toml"


def chosen(config: pytest.Config) -> str:
    """The suite that `--suite` names, or else `fast` for a run that names no tests."""
    if config.option.suite is not None:
        return str(config.option.suite)
    names_tests = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    return "all" if names_tests or config.option.keyword or config.option.markexpr else "fast"


def folder_of(path: Path) -> str:
    """The folder below tests/ that a file is in."""
    return path.relative_to(TESTS).parts[0]


def suite_of(item: pytest.Item) -> str:
    """The slowest suite that the folder or a marker of a test names."""
    names = ["fast" if folder_of(item.path) in FAST_FOLDERS else "usual"]
    names += [marker.args[0] for marker in item.iter_markers("suite")]
    return max(names, key=SUITES.index)


def is_wanted(item: pytest.Item) -> bool:
    return suite_of(item) in SELECTIONS[item.config.option.suite]


def storage_cases(config: pytest.Config, storages: Iterable[Any], suite: Callable[[Any], str]) -> list[Any]:
    """The parameters for these storages, each in its suite. A fast run collects only its own, if there are any."""
    named = [(storage, suite(storage)) for storage in storages]
    if config.option.suite == "fast":
        named = [(storage, name) for storage, name in named if name == "fast"] or named
    return [
        pytest.param(storage, id=getattr(storage, "name", storage), marks=pytest.mark.suite(name))
        for storage, name in named
    ]


def budgets(suite: str) -> dict[str, float]:
    """Minutes that the tests of each folder may take, one after the other, in a run of this suite."""
    minutes: dict[str, dict[str, float]] = tomllib.loads(MINUTES.read_text())
    if suite != "all":
        return minutes[suite]
    return dict(Counter(minutes["usual"]) + Counter(minutes["slow"]))


def over_budget(suite: str, seconds: Mapping[str, float]) -> list[str]:
    """A line for each folder that took longer than its minutes."""
    allowed = budgets(suite)
    return [
        f"tests/{folder} took {taken / 60:.1f} minutes, not {allowed.get(folder, 0):.1f}"
        for folder, taken in seconds.items()
        if taken / 60 > allowed.get(folder, 0)
    ]
