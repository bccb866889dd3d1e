"""Every test that takes a `stage` runs once per storage, on its own clock, and ends with a clean audit. A module
with `STORAGES` is only for the storages that it names."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast.storage.conformance import clock, stage
from tests import suites
from tests.storage.harness import HARNESSES, Harness
from tests.storage.stage import Stage

__all__ = ["clock", "stage"]

SUITES = {"valkey": "usual", "redis": "slow"}
"""Memory and SQLite are in the fast suite. Redis runs the same functions as Valkey, in a second server."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" in metafunc.fixturenames:
        wanted: list[str] = metafunc.config.getoption("--storage")
        harnesses = [_load(name) for name in wanted] or HARNESSES
        only: tuple[str, ...] | None = getattr(metafunc.module, "STORAGES", None)
        harnesses = [harness for harness in harnesses if only is None or harness.name in only]
        cases = suites.storage_cases(metafunc.config, harnesses, lambda harness: SUITES.get(harness.name, "fast"))
        metafunc.parametrize("harness", cases)


def _load(name: str) -> Harness:
    """A storage of this project by its name, or another by its import path."""
    for harness in HARNESSES:
        if harness.name == name:
            return harness
    module, _, attribute = name.partition(":")
    found: Harness = getattr(importlib.import_module(module), attribute)()
    return found


@pytest.fixture(autouse=True)
def nothing_without_an_owner() -> Iterator[None]:
    """Made before all storages, so the last to look when they are closed."""
    yield
    assert [text for harness in HARNESSES for text in harness.clear()] == []


@pytest.fixture
async def other(stage: Stage, harness: Harness, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Stage]:
    """The same queue through another storage object, as another process has it."""
    async with harness.open(clock, tmp_path) as storage:
        yield Stage(storage, clock)
