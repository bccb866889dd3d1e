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
