"""Options of the whole test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--storage",
        action="append",
        default=[],
        metavar="MODULE:HARNESS",
        help="run the storage suite on this storage instead of ours (see tests/storage/harness.py); may be repeated",
    )
