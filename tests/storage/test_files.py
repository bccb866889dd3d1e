"""The files of a SQLite storage on the disk: who may read them, and what an operator is told about them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from holdfast._core.events import Topic
from holdfast._core.jobs import Complete, Request, State, Work
from holdfast._core.retry_policy import fence_of
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import audit, connect
from holdfast.storage.local.sqlite import files, open_files


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}


async def test_new_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Also the log, which has payloads too, and the sockets."""
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as storage, storage.subscribe(Topic("q")):
        await storage.enqueue("q", [Request("a", Work(b"secret"))])
        assert len(list(tmp_path.iterdir())) == 4
        assert modes(tmp_path) == {0o600}
        assert (await storage.about()).warnings == []


async def test_a_file_that_exists_keeps_its_mode_and_is_reported_if_all_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.touch()
    path.chmod(0o660)
    async with connect(f"sqlite:///{path}") as storage:
        assert modes(tmp_path) == {0o660}
        assert (await storage.about()).warnings == []
        path.chmod(0o664)
        (warning,) = (await storage.about()).warnings
        assert f"all users of this host may use {path} (-rw-rw-r--): run chmod o= {path}*" in warning


async def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as storage:
        free = files.free_bytes(tmp_path / "jobs.db")
        monkeypatch.setattr(files, "LEAST_FREE_BYTES", 2 * free)  # As if nearly nothing were free.
        about = await storage.about()
        (warning,) = about.warnings
        assert "MB are free on the disk of" in warning
        assert about.facts["free"].endswith(" MB")


READ_ONLY = """
import os, sys
from pathlib import Path
from holdfast.storage.local.sqlite import files
if os.getuid() == 0:
    os.setuid(65534)
print("\\n".join(files.warnings(Path(sys.argv[1]))))
"""


def test_a_folder_without_write_permission_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "srv"
    folder.mkdir()
    path = folder / "jobs.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (x)")
    path.chmod(0o666)
    folder.chmod(0o555)
    for parent in tmp_path.parents:  # Those of pytest are closed to other users.
        if parent.owner() == path.owner() and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    ran = subprocess.run([sys.executable, "-c", READ_ONLY, str(path)], capture_output=True, text=True, check=True)
    _, warning = ran.stdout.splitlines()  # The first is about the mode.
    assert warning.startswith(f"this user may not write to {folder}: ")


def test_a_database_without_a_write_ahead_log_is_refused() -> None:
    """A network file system has none; a database in memory has none either."""
    with closing(sqlite3.connect(":memory:")) as db:
        with pytest.raises(StorageUnavailable, match=r"its journal mode is 'memory'\).*not on a network file system"):
            open_files.use_log(db, Path("/mnt/jobs.db"))


async def test_a_backup_has_what_is_only_in_the_log(tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as storage:
        await storage.enqueue("q", [Request(f"{number}", Work(b"payload")) for number in range(20)])
        await storage.back_up(tmp_path / "copy.db")
        await storage.enqueue("q", [Request("late", Work(b"payload"))])
    async with connect(f"sqlite:///{tmp_path}/copy.db") as copy:
        assert len((await copy.scan("q")).jobs) == 20
        assert (await audit(copy, "q")).problems == []


async def test_a_backup_is_restored_by_the_steps_of_the_operating_page(tmp_path: Path) -> None:
    """Jobs that came after the backup are gone, jobs that ended after it are waiting. The files are those that a killed
    process has left."""
    path, left = tmp_path / "jobs.db", tmp_path / "left"
    left.mkdir()
    async with connect(f"sqlite:///{path}") as storage:
        await storage.enqueue("q", [Request(id, Work(b"payload")) for id in ("ended", "waits")])
        await storage.back_up(tmp_path / "copy.db")
        (job,) = (await storage.claim("q", 1, worker="w", lease_ms=1000)).jobs
        await storage.settle("q", [Complete(job.id, fence_of(job), None, "json", 1000, 1000)], worker="w")
        await storage.enqueue("q", [Request("late", Work(b"payload"))])
        for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
            shutil.copy(tmp_path / name, left / name)
    for name in ("jobs.db-wal", "jobs.db-shm"):
        (left / name).unlink()
    (tmp_path / "copy.db").replace(left / "jobs.db")
    async with connect(f"sqlite:///{left}/jobs.db") as restored:
        assert (await audit(restored, "q")).problems == []
        assert [(job.id, job.state) for job in (await restored.scan("q")).jobs] == [
            ("ended", State.WAITING),
            ("waits", State.WAITING),
        ]
        assert len((await restored.claim("q", 9, worker="w", lease_ms=1000)).jobs) == 2


async def test_only_a_storage_with_a_file_is_backed_up(tmp_path: Path) -> None:
    async with connect("memory://") as storage:
        with pytest.raises(OptionError, match="has no file to copy"):
            await storage.back_up(tmp_path / "copy.db")
    assert os.listdir(tmp_path) == []
