"""The tests that every storage must pass, for storages of other people. They need pytest and pytest-asyncio.

A storage is correct if these modules pass, and every test ends with an audit of all queues. A `conftest.py` has the
fixtures, and a fixture `harness` whose `open(clock, folder)` makes the storage:

    import pytest
    from holdfast.storage.conformance import clock, stage
    from my_storage import MyStorage

    class MyHarness:
        def open(self, clock, folder):
            return MyStorage(folder, clock=clock)

    @pytest.fixture
    def harness():
        return MyHarness()

A test module for each module of `MODULES` imports its tests, with `asyncio_mode = "auto"` in the pytest settings:

    from holdfast.storage.conformance.order import *
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

try:
    import pytest
except ImportError as error:
    raise ImportError("holdfast.storage.conformance needs pytest: pip install pytest pytest-asyncio") from error

MODULES = (
    *("brief", "clock_steps", "clock_times", "deferred", "leases", "order", "queues", "reads", "ready", "retention"),
    "updates",
)
"""Modules with tests. Each takes the fixtures `stage`, `clock` and `harness`."""

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("verbs", *MODULES)))

from holdfast._core.clock import ManualClock  # noqa: E402 -- asserts of modules imported before are not rewritten
from holdfast.storage.conformance.verbs import Stage, StorageHarness  # noqa: E402

__all__ = ["MODULES", "ManualClock", "Stage", "StorageHarness", "clock", "stage"]


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the test: it stands still until the test moves it."""
    return ManualClock()


@pytest.fixture
async def stage(harness: StorageHarness, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Stage]:
    """The storage under test, open. At the end no queue may have a problem."""
    async with harness.open(clock, tmp_path) as storage:
        stage = Stage(storage, clock)
        yield stage
        assert await stage.problems() == []
