"""Options and order of the whole test run. `suites.py` says which tests it has."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests import servers, suites

LONGEST = ("test_agreement.py", "test_histories.py", "test_fuzz.py", "test_crash_points.py", "test_outages.py")
"""Files that take a minute or more."""
LONG = ("worker", "cli", "redis", "chaos")
"""Folders whose tests wait for processes."""

_seconds: defaultdict[str, float] = defaultdict(float)
"""Time of the tests by folder, from all processes of the run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--storage",
        action="append",
        default=[],
        metavar="NAME|MODULE:HARNESS",
        help="run the storage suite only on this one: memory, sqlite, valkey, redis, or yours (see harness.py)",
    )
    parser.addoption(
        "--suite",
        choices=list(suites.SELECTIONS),
        help="fast, usual (with fast), slow (alone) or all; the default is fast, or all if the command names tests",
    )
    parser.addoption(
        "--check-minutes",
        action="store_true",
        help="fail if a folder takes longer than tests/minutes.toml allows",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.option.suite = suites.chosen(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As in the background of a shell. Programs inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The fast suite runs in three processes, as half of it waits; tests that the command names run in this one."""
    return 3 if suites.chosen(config) == "fast" else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A fast run does not import the folders that it leaves out."""
    is_folder = collection_path.parent == suites.TESTS and collection_path.is_dir()
    if is_folder and config.option.suite == "fast" and collection_path.name not in suites.FAST_FOLDERS:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files first: a file runs in one process, and the others should not wait for it."""
    left_out = [item for item in items if not suites.is_wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if suites.is_wanted(item)]
    items.sort(key=lambda item: (item.path.name not in LONGEST, suites.folder_of(item.path) not in LONG))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[suites.folder_of(suites.TESTS.parent / report.nodeid.partition("::")[0])] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes of xdist report their servers to the first process, which checks the minutes."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["servers"] = servers.started()
    elif session.config.option.check_minutes and suites.over_budget(session.config.option.suite, _seconds):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    servers.started_elsewhere(getattr(node, "workeroutput", {}).get("servers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(servers.described())
    minutes = ", ".join(f"{folder} {seconds / 60:.1f}" for folder, seconds in sorted(_seconds.items()))
    terminalreporter.write_line(f"minutes by folder: {minutes}")
    if config.option.check_minutes:
        for line in suites.over_budget(config.option.suite, _seconds):
            terminalreporter.write_line(line, red=True)
