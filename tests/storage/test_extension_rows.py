"""The extension of a record where it is stored: bytes of rows, and what the audit says of wrong entries."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from holdfast._core.clock import ManualClock
from holdfast._core.extension import Extension, pack_extension
from holdfast._core.jobs import State, Update
from holdfast.storage import audit
from holdfast.storage.local.engine import Engine, LocalStorage
from holdfast.storage.local.sqlite import SqliteStorage
from holdfast.storage.local.table import Change
from tests.storage.harness import MemoryHarness, SqliteHarness
from tests.storage.stage import Stage

STORAGES = ("memory", "sqlite")

PLAIN = bytes.fromhex("dc0014cf000665172898800000c300000000c0c0c0c0c000a46a736f6ec0c0c0c0c0c0")
"""The packed column of a plain record, as the release before extensions wrote it."""


@pytest.fixture
async def sqlite(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Stage]:
    async with SqliteHarness().open(clock, tmp_path) as storage:
        stage = Stage(storage, clock)
        yield stage
        assert await stage.problems() == []


def packed(stage: Stage) -> bytes:
    assert isinstance(stage.storage, SqliteStorage)
    with closing(sqlite3.connect(stage.storage.path)) as db:
        ((value,),) = db.execute("SELECT rest FROM holdfast_jobs").fetchall()
    assert isinstance(value, bytes)
    return value


def write(stage: Stage, value: bytes) -> None:
    assert isinstance(stage.storage, SqliteStorage)
    with closing(sqlite3.connect(stage.storage.path)) as db, db:
        db.execute("UPDATE holdfast_jobs SET rest = ?", (value,))


async def test_plain_record_keeps_its_bytes(sqlite: Stage) -> None:
    await sqlite.enqueue("a")
    assert packed(sqlite) == PLAIN


async def test_extension_is_one_packed_section_behind_the_fields(sqlite: Stage) -> None:
    await sqlite.enqueue("a", extension=((200, b"work"),))
    await SqliteHarness().tag_record(sqlite.storage, "q", "a", ((7, b"record"),))
    *fields, section = msgspec.msgpack.decode(packed(sqlite))
    assert fields == msgspec.msgpack.decode(PLAIN)
    assert section == pack_extension(((7, b"record"), (200, b"work")))


async def test_unknown_tags_in_a_row_are_preserved(sqlite: Stage) -> None:
    await sqlite.enqueue("a")
    section = pack_extension(((3, b"three"), (126, b""), (130, b"x"), (254, b"y")))
    write(sqlite, msgspec.msgpack.encode((*msgspec.msgpack.decode(PLAIN), section)))
    job = await sqlite.claim_one()
    await sqlite.extend(job, progress=b"half")
    await sqlite.retry(job)
    await sqlite.keep("a", 60)
    await sqlite.fail(await sqlite.claim_one())
    assert msgspec.msgpack.decode(packed(sqlite))[-1] == section


@pytest.mark.parametrize("section", [b"\x07", pack_extension(((9, b""), (8, b""))), "text", b"\x00\x00\x00\x00\x00"])
async def test_record_with_a_malformed_extension_is_garbled(sqlite: Stage, section: object) -> None:
    await sqlite.enqueue("a")
    write(sqlite, msgspec.msgpack.encode((*msgspec.msgpack.decode(PLAIN), section)))
    assert [problem.kind for problem in (await audit(sqlite.storage, "q")).problems] == ["garbled"]
    await audit(sqlite.storage, "q", repair=True)
    job = await sqlite.the()
    assert (job.state, job.payload) == (State.FAILED, b"payload")


async def rewrite(stage: Stage, change: Change) -> None:
    """Write a record as no verb does."""

    def write(engine: Engine) -> None:
        engine.table.write("q", [change], [])

    assert isinstance(stage.storage, LocalStorage)
    await stage.storage._step(write)


async def kinds_then_repair(stage: Stage) -> list[str]:
    found = [problem.kind for problem in (await audit(stage.storage, "q")).problems]
    await audit(stage.storage, "q", repair=True)
    return found


async def test_job_tag_in_the_next_request_is_reported_and_dropped(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    await stage.enqueue("a", b"2", update=Update(), extension=((128, b"work"),))
    job = await stage.the()
    assert job.run is not None
    assert job.run.next is not None
    wrong = replace(job.run.next, work=replace(job.run.next.work, extension=((5, b"record"), (128, b"work"))))
    await rewrite(stage, Change("a", job, replace(job, run=replace(job.run, next=wrong))))
    assert await kinds_then_repair(stage) == ["extension"]
    assert await stage.the() == job


WRONG: dict[str, tuple[Extension, Extension]] = {
    "a work tag in the record": (((1, b"a"), (128, b"b")), ()),
    "a record tag in the work": ((), ((1, b"a"), (128, b"b"))),
    "descending": (((1, b"a"),), ((200, b""), (128, b"b"))),
    "twice": (((1, b"a"), (1, b"c")), ((128, b"b"),)),
}


@pytest.mark.parametrize(("of_job", "of_work"), WRONG.values(), ids=WRONG)
async def test_misplaced_entries_are_reported_and_sorted(
    clock: ManualClock, tmp_path: Path, of_job: Extension, of_work: Extension
) -> None:
    """In memory: a row has one section, which is split by tag when it is read."""
    async with MemoryHarness().open(clock, tmp_path) as storage:
        stage = Stage(storage, clock)
        await stage.enqueue("a")
        job = await stage.the()
        wrong = replace(job, work=replace(job.work, extension=of_work), extension=of_job)
        await rewrite(stage, Change("a", job, wrong))
        assert await kinds_then_repair(stage) == ["extension"]
        job = await stage.the()
        assert job.extension == ((1, b"a"),)
        assert job.work.extension[0] == (128, b"b")
        assert await stage.problems() == []
