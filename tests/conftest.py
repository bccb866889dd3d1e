"""Options of the whole test run."""

from __future__ import annotations

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(servers.described())
