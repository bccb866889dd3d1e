"""Options of the whole test run."""

from __future__ import annotations

from typing import Any

import pytest

from tests import servers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--storage",
        action="append",
        default=[],
        metavar="NAME|MODULE:HARNESS",
        help="run the storage suite only on this one: memory, sqlite, valkey, redis, or yours (see harness.py)",
    )


LONGEST = ("test_agreement.py", "test_histories.py", "test_fuzz.py", "test_crash_points.py", "test_outages.py")
"""Files that take a minute or more."""
LONG = ("worker", "edges", "redis", "chaos")
"""Folders whose tests wait for processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: a file is run by one of two processes, and the other should not wait for it."""
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path.parent.name not in LONG))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes tells the first which servers it used."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["servers"] = servers.started()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    servers.started_elsewhere(getattr(node, "workeroutput", {}).get("servers", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(servers.described())
