"""Every test that takes an `app` runs once per storage, on real time, and ends with a clean audit of all its queues.

A test marked with `storages` runs only on those: one that does not depend on the storage runs on memory alone.
`make_app()` gives another app at the same place, as another program has it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from tests import servers, suites
from tests.storage import keyspace

STORAGES = ["memory", "sqlite", "valkey"]


class Place:
    """Where the jobs of one test are."""

    def __init__(self, storage: str, folder: Path) -> None:
        self.storage = storage
        self.namespace = f"test-{uuid.uuid4().hex[:12]}"
        if storage == "memory":
            self.url = f"memory://{uuid.uuid4().hex}"
        elif storage == "sqlite":
            self.url = f"sqlite:///{folder}/jobs.db"
        else:
            server = servers.shared("valkey")
            assert server is not None
            self.url = server.url

    def app(self, **options: Any) -> Holdfast[Any]:
        return Holdfast(self.url, namespace=self.namespace, **options)

    def clear(self) -> list[str]:
        server = servers.shared("valkey") if self.storage == "valkey" else None
        return [] if server is None else keyspace.clear(server, self.namespace)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    give_places(metafunc, STORAGES)


def give_places(metafunc: pytest.Metafunc, storages: list[str]) -> None:
    """A test that takes a `place` runs once on each of these storages, of those that it is for."""
    if "place" in metafunc.fixturenames:
        wanted: list[str] = metafunc.config.getoption("--storage") or storages
        marker = metafunc.definition.get_closest_marker("storages")
        only: tuple[str, ...] = marker.args if marker else tuple(storages)
        names = [name for name in storages if name in wanted and name in only]
        cases = suites.storage_cases(metafunc.config, names, lambda name: "fast" if name == "memory" else "usual")
        metafunc.parametrize("place", cases, indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path)
    yield place
    assert place.clear() == []


@pytest.fixture
def make_app(place: Place) -> Callable[..., Holdfast[Any]]:
    return place.app


@pytest.fixture
async def app(make_app: Callable[..., Holdfast[Any]]) -> AsyncIterator[Holdfast[Any]]:
    """An app that is open. At the end nothing may be wrong in any of its queues."""
    async with make_app() as app:
        yield app
        for queue in (await app.stats()).queues:
            assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []


async def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something is so, and fail if it does not become so. `true` may be async."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        result = true()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert asyncio.get_running_loop().time() < deadline, f"it did not happen within {seconds} s"
        await asyncio.sleep(0.01)
