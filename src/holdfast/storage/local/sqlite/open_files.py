"""The database files that this process has open. SQLite does not notice two things, and loses commits after them:

- A fork. The child has a copy of SQLite's table of locks, so a connection of the child takes no lock on a file that the
  parent had open. Connections are therefore closed before a fork, and open again at their next call.
- A file or a log that was deleted or replaced. Commits go on into files that nobody else can see. A log is also deleted
  if the process has copied the file: the end of the copy drops the locks, and the next process to close the file then
  takes itself for the last one (https://sqlite.org/howtocorrupt.html).
"""

from __future__ import annotations

import logging
import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from holdfast.errors import StorageUnavailable

SHARED_BYTES = (0x4000_0002, 510)
"""Where SQLite locks the file for as long as a connection is open: start and length."""

Identity = tuple[int, int]
"""Device and inode of a file."""
Identities = tuple[Identity | None, Identity | None, Identity | None]
"""Of a database, of its log, and of the memory in which processes share the index and the locks of the log."""

log = logging.getLogger("holdfast.sqlite")


class OpenFile(Protocol):
    """A connection to a file."""

    path: Path
    files: Identities

    def is_lost(self) -> bool:
        """Return whether the file or its log is not the one that was opened."""
        ...

    def suspend(self) -> bool:
        """Close the connection until `resume`. Return False if it is in use for too long."""
        ...

    def resume(self) -> None: ...


_lock = threading.RLock()
"""Held while connections are suspended."""
_connections: WeakSet[OpenFile] = WeakSet()
_suspended: list[OpenFile] = []
_unlocked: set[Identity] = set()
"""Files on which SQLite takes no locks in this process while a connection to them is left that could not be closed."""


def add(connection: OpenFile) -> None:
    with _lock:
        _connections.add(connection)


def identities(path: Path) -> Identities:
    return _identity(path), _identity(_beside(path, "-wal")), _identity(_beside(path, "-shm"))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _identity(path: Path) -> Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _descriptors() -> set[Identity]:
    """Return all files that this process has open; none where the system does not list them."""
    found: set[Identity] = set()
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):  # It was that of the list.
            status = os.fstat(int(name))
            found.add((status.st_dev, status.st_ino))
    return found


def connect(path: Path) -> sqlite3.Connection:
    """Open a database in autocommit mode. A new one is for its owner alone; SQLite gives its log the same mode."""
    refuse_unlocked(path)
    is_new = not path.exists()
    db = sqlite3.connect(path, timeout=1.0, isolation_level=None, cached_statements=256, check_same_thread=False)
    if is_new:
        with suppress(OSError):  # Another user has made it in this moment.
            path.chmod(0o600)
    return db


def use_log(db: sqlite3.Connection, path: Path) -> None:
    """Have all writers use a write-ahead log. SQLite has none on a network file system."""
    (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StorageUnavailable(
            f"SQLite cannot use a write-ahead log for {path} (its journal mode is {mode!r}):"
            " use a file on a local disk, not on a network file system, or a Redis or Valkey server"
        )


def refuse_unlocked(path: Path) -> None:
    """Raise StorageUnavailable if SQLite would take no lock on a file."""
    if _unlocked and (file := _identity(path)) in _unlocked:
        if file not in _descriptors():
            _unlocked.remove(file)  # That connection was closed, and SQLite has forgotten its locks.
            return
        raise StorageUnavailable(
            f"{path} cannot be used in this process: it has a connection from before a fork, or from before the log"
            " was deleted, so SQLite takes no lock. Close that connection before the fork, or restart the process"
        )


def close_lost(lost: OpenFile) -> None:
    """Close all connections of this process to a file that is lost; each opens the present file at its next call."""
    with _lock:
        if not lost.is_lost():
            return  # Another connection has noticed as well.
        file, present = lost.files[0], _identity(lost.path)
        with _no_checkpoint(lost.path if file == present else None):
            _suspend([connection for connection in _connections if connection.files[0] == file])
        if file != present and lost.files[1] == _identity(_beside(lost.path, "-wal")):
            for suffix in ("-wal", "-shm"):  # SQLite would apply the log of the old file to the new one.
                _beside(lost.path, suffix).unlink(missing_ok=True)
        if file is not None and file in _descriptors():
            _unlocked.add(file)
        _resume()
    what = (
        "its -wal or -shm was deleted"
        if file == present
        else "it was deleted"
        if present is None
        else "it was replaced"
    )
    log.error(
        "%s is not the file that was opened, %s: jobs that were acknowledged since may be lost. Opening %s",
        *(lost.path, what, "it again" if present else "a new file"),
    )


def _suspend(connections: list[OpenFile]) -> None:
    _suspended.extend(connection for connection in connections if connection.suspend())


def _resume() -> None:
    while _suspended:
        _suspended.pop().resume()


@contextmanager
def _no_checkpoint(path: Path | None) -> Generator[None]:
    """Keep SQLite from moving a deleted log into a file: another process may have written to the file since. A lock of
    another kind than SQLite's makes every connection of this process believe that it is not the last one."""
    if path is None or sys.platform != "linux":
        yield
        return
    import fcntl

    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, *SHARED_BYTES, 0))
        yield
    finally:
        os.close(file)


def _before_fork() -> None:
    _lock.acquire()
    _suspend(list(_connections))


def _after_fork() -> None:
    _resume()
    _lock.release()


def _after_fork_in_child() -> None:
    _unlocked.update(_descriptors())
    _after_fork()
    _connections.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
