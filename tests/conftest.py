"""Options of the whole test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--storage",
        action="append",
        default=[],
        metavar="NAME|MODULE:HARNESS",
        help="run the storage suite only on this storage: memory, sqlite, or your own (see tests/storage/harness.py)",
    )
