"""A lazy storage: `async with` opens nothing, the first verb does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.events import Topic
from holdfast._core.jobs import Request, State, Work
from holdfast.errors import StorageUnavailable
from holdfast.storage import Storage
from tests.storage.harness import Harness

Verb = Callable[[Storage], Awaitable[Any]]

JOB = Request("a", Work(b"1"))
VERBS: dict[str, Verb] = {
    "enqueue": lambda storage: storage.enqueue("q", [JOB]),
    "claim": lambda storage: storage.claim("q", 1, worker="w", lease_ms=1000),
    "ready": lambda storage: storage.ready(["q"]),
    "cancel": lambda storage: storage.cancel("q", ["a"]),
    "get": lambda storage: storage.get("q", ["a"]),
    "keep": lambda storage: storage.keep("q", ["a"], 1),
    "prioritize": lambda storage: storage.prioritize("q", ["a"], 1),
    "scan": lambda storage: storage.scan("q"),
    "snapshot": lambda storage: storage.snapshot(),
    "pause": lambda storage: storage.pause("q", False),
    "sweep": lambda storage: storage.sweep("q"),
    "purge": lambda storage: storage.purge("q", [State.FAILED]),
    "drop": lambda storage: storage.drop("q"),
    "announce": lambda storage: storage.announce("w", {}, ttl_ms=1000),
    "evict": lambda storage: storage.evict("w"),
    "write_notes": lambda storage: storage.write_notes({"a": b""}, ttl_ms=1000),
    "read_notes": lambda storage: storage.read_notes(["a"]),
    "about": lambda storage: storage.about(),
    "repair": lambda storage: storage.repair("q", dry_run=True),
}


class Openings:
    """Counts how often a storage was opened and closed."""

    def __init__(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = 0
        open_storage, close_storage = storage._open, storage._close

        async def count_open() -> None:
            self.opened += 1
            await asyncio.sleep(0)
            await open_storage()

        async def count_close() -> None:
            self.closed += 1
            await close_storage()

        monkeypatch.setattr(storage, "_open", count_open)
        monkeypatch.setattr(storage, "_close", count_close)


@pytest.fixture
def lazy(harness: Harness, clock: ManualClock, tmp_path: Path) -> Storage:
    storage = harness.open(clock, tmp_path)
    storage.lazy = True
    return storage


@pytest.fixture
def openings(lazy: Storage, monkeypatch: pytest.MonkeyPatch) -> Openings:
    return Openings(lazy, monkeypatch)


async def test_lazy_storage_that_is_not_used_is_never_opened(lazy: Storage, openings: Openings) -> None:
    async with lazy:
        assert await lazy.enqueue("q", []) == []
    assert (openings.opened, openings.closed) == (0, 0)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
async def test_first_verb_opens_a_lazy_storage_once(lazy: Storage, openings: Openings, verb: Verb) -> None:
    async with lazy:
        await verb(lazy)
        await lazy.get("q", ["a"])
        assert (openings.opened, openings.closed) == (1, 0)
    assert (openings.opened, openings.closed) == (1, 1)


async def test_concurrent_first_verbs_open_a_lazy_storage_once(lazy: Storage, openings: Openings) -> None:
    async with lazy:
        await asyncio.gather(*(lazy.get("q", ["a"]) for _ in range(5)))
    assert (openings.opened, openings.closed) == (1, 1)


async def test_subscription_opens_a_lazy_storage(lazy: Storage, openings: Openings) -> None:
    async with lazy:
        async with lazy.subscribe(Topic("q")) as events:
            await lazy.enqueue("q", [JOB])
            event = await events.within(5)
        assert event is not None
        assert openings.opened == 1


async def test_lazy_storage_is_refused_outside_async_with(lazy: Storage, openings: Openings) -> None:
    with pytest.raises(StorageUnavailable, match="is not open"):
        await lazy.get("q", ["a"])
    async with lazy:
        await lazy.get("q", ["a"])
    with pytest.raises(StorageUnavailable, match="is not open"):
        await lazy.get("q", ["a"])
    assert openings.opened == 1


async def test_lazy_storage_that_cannot_open_tries_again(
    lazy: Storage, openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise StorageUnavailable("not now")

    async with lazy:
        with monkeypatch.context() as patch:
            patch.setattr(lazy, "_open", fail)
            with pytest.raises(StorageUnavailable, match="not now"):
                await lazy.get("q", ["a"])
        await lazy.get("q", ["a"])
    assert (openings.opened, openings.closed) == (1, 1)
