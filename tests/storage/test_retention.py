"""Records past their forget time, on every storage of ours, and when SQLite looks for them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast._core.clock import ManualClock
from holdfast.storage.conformance.retention import *  # noqa: F403
from holdfast.storage.conformance.retention import TTL_MS, enqueue, remember
from holdfast.storage.local.sqlite import SqliteStorage
from tests.storage.stage import Stage


@pytest.fixture
async def on_sqlite(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Stage]:
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        yield Stage(storage, clock)


async def test_sqlite_looks_for_no_expired_record_before_its_time(on_sqlite: Stage) -> None:
    storage, clock = on_sqlite.storage, on_sqlite.clock
    assert isinstance(storage, SqliteStorage)
    await remember(on_sqlite, "old", 1)
    statements: list[str] = []
    storage._writer._db.set_trace_callback(statements.append)  # pyright: ignore[reportPrivateUsage]
    await enqueue(on_sqlite, "new", 1)
    await remember(on_sqlite, "newer", 1)
    assert [text for text in statements if "until_at <=" in text and "'running'" not in text] == []
    clock.advance(TTL_MS / 1000)
    await enqueue(on_sqlite, "newest", 1)
    assert [text for text in statements if "until_at <=" in text and "'completed'" in text] != []


async def test_sqlite_finds_expired_records_of_a_release_without_a_forget_time(on_sqlite: Stage) -> None:
    storage, clock = on_sqlite.storage, on_sqlite.clock
    assert isinstance(storage, SqliteStorage)
    await remember(on_sqlite, "old", 2)
    with closing(sqlite3.connect(storage.path)) as db, db:
        ((packed,),) = db.execute("SELECT meta FROM holdfast_queues")
        meta = msgspec.msgpack.decode(packed)
        del meta["forget_at"]
        db.execute("UPDATE holdfast_queues SET meta = ?", (msgspec.msgpack.encode(meta),))
    clock.advance(TTL_MS / 1000)
    await enqueue(on_sqlite, "new", 1)
    assert (await on_sqlite.stats()).expired == 0
