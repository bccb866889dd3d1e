"""What an operator does with the files of a database: check them, and copy them."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from contextlib import closing
from pathlib import Path

from holdfast.errors import OptionError

LEAST_FREE_BYTES = 100_000_000
"""A warning is given if there is less space on the disk."""
BUSY_S = 10.0
"""How long a check or a copy waits for other processes."""


def size(path: Path) -> int:
    """Return the bytes of a database and its log."""
    return sum(part.stat().st_size for part in (path, *path.parent.glob(f"{path.name}-*")))


def free_bytes(path: Path) -> int:
    disk = os.statvfs(path.parent)
    return disk.f_bavail * disk.f_frsize


def warnings(path: Path) -> list[str]:
    """Return what an operator should do about a database."""
    found: list[str] = []
    if (problem := _check(path)) is not None:
        found.append(f"the file is damaged: {problem}. Restore it from a backup")
    if (free := free_bytes(path)) < LEAST_FREE_BYTES:
        found.append(
            f"only {free / 1e6:.1f} MB are free on the disk of {path}: without space no job is enqueued, claimed or"
            " settled"
        )
    mode = path.stat().st_mode
    if mode & stat.S_IRWXO:
        found.append(f"all users of this host may use {path} ({stat.filemode(mode)}): run chmod o= {path}*")
    return found + [
        f"this user may not write to {place}: SQLite writes to the file and makes its log beside it"
        for place in (path, path.parent)
        if not os.access(place, os.W_OK)
    ]


def _check(path: Path) -> str | None:
    """Return the damage that SQLite finds in a database; None if it is sound."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as db:
        try:
            (result,) = db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error as error:
            return str(error)
    return None if result == "ok" else str(result)


def back_up(path: Path, target: Path) -> None:
    """Copy a database to a new file, as it is at one moment. Others may write meanwhile."""
    if target.exists():
        raise OptionError(f"{target} exists: name a new file")
    part: str | None = None
    try:
        number, part = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}-part-")  # Only its owner may read it.
        os.close(number)
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as source, closing(sqlite3.connect(part)) as copy:
            source.backup(copy)  # In one step: a step for each page would begin again after each commit of others.
            with copy:
                copy.execute("DELETE FROM holdfast_listeners")
        os.link(part, target)
    except OSError as error:
        raise OptionError(
            f"cannot write {target} ({error}): name a new file in a folder that you may write to"
        ) from None
    finally:
        if part is not None:
            os.unlink(part)
