"""A SQLite file that is deleted, replaced or copied while it is open: reported within a second, never a silent loss."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast._core.jobs import Request, Work
from holdfast.storage import Storage, audit, connect
from holdfast.storage.local.sqlite import SqliteStorage, connection

pytestmark = pytest.mark.suite("usual")

TIME_TO_NOTICE_S = connection.FILE_CHECK_S + 0.05


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
async def storage(file: Path) -> AsyncIterator[Storage]:
    async with connect(f"sqlite:///{file}") as storage:
        await enqueue(storage, "early")
        yield storage


async def enqueue(storage: Storage, *ids: str) -> None:
    await storage.enqueue("q", [Request(id, Work(b"payload"), custom_id=True) for id in ids])


async def stored(file: Path) -> set[str]:
    """The jobs that another process sees. It closes the file, and believes to be the last one if it sees no lock."""
    code = f"""
import asyncio
from holdfast.storage import connect

async def main():
    async with connect("sqlite:///{file}") as storage:
        print(*[job.id for job in (await storage.scan("q")).jobs])

asyncio.run(main())
"""
    run = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return set(run.stdout.decode().split())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


async def check_sound(storage: Storage) -> None:
    assert (await audit(storage, "q")).problems == []
    assert (await storage.about()).warnings == []


async def test_a_deleted_file_is_reported_and_made_again(
    storage: Storage, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in file.parent.iterdir():
        path.unlink()
    await asyncio.sleep(TIME_TO_NOTICE_S)
    await enqueue(storage, "late")
    (error,) = errors(caplog)
    assert "it was deleted: jobs that were acknowledged since may be lost" in error
    assert await stored(file) == {"late"}
    await check_sound(storage)


async def test_a_replaced_file_is_reported_and_used(
    storage: Storage, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = file.with_name("other.db")
    async with connect(f"sqlite:///{other}") as old:
        await enqueue(old, "restored")
    os.replace(other, file)
    await asyncio.sleep(TIME_TO_NOTICE_S)
    assert {job.id for job in (await storage.scan("q")).jobs} == {"restored"}
    await enqueue(storage, "late")
    (error,) = errors(caplog)
    assert "it was replaced" in error
    assert await stored(file) == {"restored", "late"}
    await check_sound(storage)


async def test_a_log_lost_after_a_copy_is_reported_and_later_jobs_are_stored(
    storage: Storage, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(file, file.with_name("copy.db"))  # Closing the copied file drops the locks of this process.
    assert await stored(file) == {"early"}  # That process takes itself for the last one, and deletes the log.
    async with connect(f"sqlite:///{file}") as second:  # Another one that SQLite gives no lock.
        await asyncio.sleep(TIME_TO_NOTICE_S)
        await enqueue(storage, *(f"late-{number}" for number in range(50)))
        (error,) = errors(caplog)
        assert "its -wal or -shm was deleted" in error
        await enqueue(second, "second")
        assert await stored(file) == {"early", "second", *(f"late-{number}" for number in range(50))}
        await enqueue(storage, "last")
    await check_sound(storage)
    assert {"early", "second", "last"} <= await stored(file)
    assert len(errors(caplog)) == 1


ENQUEUE = """
import asyncio, sys
from holdfast.storage import connect
from tests.storage.test_lost_files import enqueue

async def main():
    async with connect(sys.argv[1]) as storage:
        await enqueue(storage, *map(str, range(90)))

asyncio.run(main())
"""


async def test_deleted_shared_memory_of_the_log_is_reported_and_no_job_is_lost(
    storage: Storage, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.with_name(f"{file.name}-shm").unlink()
    await asyncio.sleep(TIME_TO_NOTICE_S)
    await enqueue(storage, "late")
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ENQUEUE, f"sqlite:///{file}"], check=True)
    await enqueue(storage, "last")
    assert await stored(file) == {"early", "late", "last", *map(str, range(90))}
    (error,) = errors(caplog)
    assert "its -wal or -shm was deleted" in error
    await check_sound(storage)


async def test_a_lost_log_is_not_applied_over_the_jobs_of_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FILE_CHECK_S", 3600.0)
    async with connect(f"sqlite:///{file}") as storage:
        assert isinstance(storage, SqliteStorage)
        await enqueue(storage, "early")
        shutil.copy(file, file.with_name("copy.db"))
        await stored(file)
        await enqueue(storage, "lost")
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", ENQUEUE, f"sqlite:///{file}"], check=True)
        storage._writer._check_at = 0.0
        await enqueue(storage, "late")
        assert await stored(file) == {"early", "late", *map(str, range(90))}
        await check_sound(storage)
