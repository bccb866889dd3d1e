"""A SQLite connection, the thread that owns it, and group commit.

The thread takes all calls that were queued while it was busy and runs them as one transaction, in order, so a burst of
calls costs one commit. A single small call runs on its caller's thread: a commit that does not wait for the disk takes
less time than the way to another thread and back (docs/development/decisions/0003).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast.errors import OptionError, StorageFull, StorageUnavailable
from holdfast.storage.local.engine import Engine
from holdfast.storage.local.sqlite import open_files
from holdfast.storage.local.sqlite.table import SqliteTable

MAX_GROUP = 100
"""The most calls that share one transaction."""
MAX_INLINE_ITEMS = 16
"""A call with more items than this is never run on its caller's thread."""
CHECKPOINT_EVERY = 1000
"""The log is moved into the file when it has grown by about this number of pages."""
PAGES_A_COMMIT, EVENTS_A_PAGE, PAGE_BYTES = 4, 8, 4096
"""How the growth of the log is estimated: pages a commit, events that share a page, bytes of payload a page."""
BUSY_S = 10.0
"""How long a call waits for other processes to finish their transactions."""
FILE_CHECK_S = 1.0
"""How often a connection checks that the file is still the one that it has opened."""
SUSPEND_S = BUSY_S + 5.0
"""How long a fork waits for the end of a transaction."""

T = TypeVar("T")
log = logging.getLogger("holdfast.sqlite")


class _Call(Generic[T]):
    """A verb that is queued for the thread, and the future that its caller awaits."""

    __slots__ = ("error", "future", "loop", "result", "verb", "writes")

    def __init__(self, verb: Callable[[Engine], T], writes: bool) -> None:
        self.verb = verb
        self.writes = writes
        self.result: T
        self.error: Exception | None = None
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()


class ConnectionThread:
    """Runs verbs on its connection, one transaction at a time. `connect` opens the table on this thread; `on_commit` is
    called after each write. With `waits_for_disk`, every call goes to the thread.

    The connection may be closed between two calls, for a fork or because the file is lost (open_files.py)."""

    def __init__(
        self,
        path: Path,
        connect: Callable[[], tuple[sqlite3.Connection, SqliteTable, Engine]],
        on_commit: Callable[[SqliteTable], None] | None = None,
        *,
        waits_for_disk: bool = True,
    ) -> None:
        self.path = path
        self.files: open_files.Identities = (None, None, None)
        """The files that are open."""
        self._is_open = False
        self._check_at = 0.0
        self._connect = connect
        self._on_commit = on_commit
        self._waits_for_disk = waits_for_disk
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._pending = 0
        """The number of queued and running calls. A call may run on its caller's thread only if there are none."""
        self._connection_lock = threading.Lock()
        self._since_checkpoint = 0
        self._opened = threading.Event()
        self._error: Exception | None = None
        self._closing = False
        self._close_after: ConnectionThread | None = None
        self._thread = threading.Thread(target=self._work, name="holdfast-sqlite", daemon=True)
        open_files.add(self)
        self._thread.start()

    async def open(self) -> None:
        await asyncio.to_thread(self._opened.wait)
        if self._error is not None:
            raise self._error

    async def call(self, verb: Callable[[Engine], T], *, writes: bool, items: int = MAX_GROUP) -> T:
        call = _Call(verb, writes)
        with self._gate:
            idle = self._pending == 0
            self._pending += 1
        inline = idle and items <= MAX_INLINE_ITEMS and self._since_checkpoint < CHECKPOINT_EVERY
        if not inline or self._waits_for_disk or not self._run_inline(call):
            self._calls.put(call)
            return await call.future
        try:
            await asyncio.sleep(0)  # Other calls of this turn of the loop are queued as a group.
        finally:
            self._done(1)
        if call.error is not None:
            raise call.error
        return call.result

    def end(self, after: ConnectionThread | None = None) -> None:
        """Let the thread end after the queued calls, and close its connection after that of another thread. SQLite
        moves the log into the file when the last connection closes, but not if two close at the same moment."""
        self._close_after = after
        self._calls.put(None)

    async def close(self) -> None:
        """Wait for the end of the thread."""
        await asyncio.to_thread(self._thread.join)

    def _run_inline(self, call: _Call[Any]) -> bool:
        """Run a call on its caller's thread. Return False if it had to wait: only the connection thread waits."""
        if not self._connection_lock.acquire(blocking=False):
            return False
        try:
            if not self._is_open or self._is_lost_now():
                return False
            self._transaction([call], patient=False)
        except Exception as error:
            if is_busy(error):
                return False
            call.error = translate_sqlite_error(error, self.path)
        finally:
            self._connection_lock.release()
        return True

    def _done(self, calls: int) -> None:
        with self._gate:
            self._pending -= calls

    def _work(self) -> None:
        try:
            with self._connection_lock:
                self._reopen()
        except Exception as error:
            self._error = error
            return
        finally:
            self._opened.set()
        while not self._closing:
            queued = self._next_group()
            group = [call for call in queued if not call.future.cancelled()]
            if group:
                self._run_group(group)
                _deliver(group)
            self._done(len(queued))
            if self._since_checkpoint >= CHECKPOINT_EVERY:
                self._checkpoint()
        if self._close_after is not None:
            self._close_after._thread.join()
        with self._connection_lock:
            self._close()

    def _run_group(self, group: list[_Call[Any]]) -> None:
        with self._connection_lock:
            if not self._is_lost_now():
                self._run(group)
                return
        open_files.close_lost(self)
        with self._connection_lock:
            self._run(group)

    def _reopen(self) -> None:
        self._db, self.table, self._engine = self._connect()
        self.files = open_files.identities(self.path)
        self._check_at = time.monotonic() + FILE_CHECK_S
        self._is_open = True

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._db.close()

    def _is_lost_now(self) -> bool:
        """Check the file once a second."""
        now = time.monotonic()
        if now < self._check_at:
            return False
        if self.is_lost():
            return True
        self._check_at = now + FILE_CHECK_S
        return False

    def is_lost(self) -> bool:
        return self._is_open and self.files != open_files.identities(self.path)

    def suspend(self) -> bool:
        if not self._connection_lock.acquire(timeout=SUSPEND_S):
            return False
        self._close()
        return True

    def resume(self) -> None:
        self._connection_lock.release()

    def _checkpoint(self) -> None:
        """Move what was written from the log into the file. This waits for the disk, so no call should wait for it."""
        with self._connection_lock:
            try:
                if self._is_open:  # Closing it has moved the log.
                    self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.Error as error:
                log.warning("checkpoint of %s failed (%s): trying again later", self.path, error)
        self._since_checkpoint = 0  # Only now: until here, every call is queued instead of waiting for the lock.

    def _next_group(self) -> list[_Call[Any]]:
        group: list[_Call[Any]] = []
        call = self._calls.get()
        while call is not None:
            group.append(call)
            if len(group) == MAX_GROUP or self._calls.empty():
                return group
            call = self._calls.get()
        self._closing = True
        return group

    def _run(self, group: list[_Call[Any]]) -> None:
        """Run a group as one transaction. If it fails, it has changed nothing, and each call gets its own."""
        try:
            self._transaction(group, patient=True)
        except Exception as error:
            if len(group) > 1 and not is_busy(error):
                for call in group:
                    self._run([call])
                return
            for call in group:
                call.error = translate_sqlite_error(error, self.path)

    def _transaction(self, group: list[_Call[Any]], *, patient: bool) -> None:
        if not self._is_open:
            self._reopen()
        writes = any(call.writes for call in group)
        statement = "BEGIN IMMEDIATE" if writes else "BEGIN"
        wait_while_busy(
            lambda: self._begin(statement),
            lambda: patient and not all(call.future.cancelled() for call in group),
        )
        try:
            for call in group:
                call.result = call.verb(self._engine)
            if writes:
                self.table.flush()
            self._db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        if writes:
            payload_pages = self.table.payload_bytes // PAGE_BYTES
            self._since_checkpoint += PAGES_A_COMMIT + len(self.table.events) // EVENTS_A_PAGE + payload_pages
            try:
                if self._on_commit is not None:
                    self._on_commit(self.table)
            except Exception:  # The commit stands.
                log.exception("publishing the events of a commit to %s failed", self.path)

    def _roll_back(self) -> None:
        self.table.forget_cache()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _begin(self, statement: str) -> None:
        try:
            self._db.execute(statement)
            self.table.begin()
        except sqlite3.OperationalError:
            self._roll_back()
            raise


def _deliver(group: list[_Call[Any]]) -> None:
    """Send the results to the loops of their callers, with one wake-up per loop."""
    for loop in {call.loop for call in group}:
        try:
            loop.call_soon_threadsafe(_resolve, [call for call in group if call.loop is loop])
        except RuntimeError:
            continue  # The callers' loop has closed; the effects of their calls stand.


def _resolve(calls: list[_Call[Any]]) -> None:
    for call in calls:
        if call.future.done():
            continue  # Cancelled on the way; the effect stands.
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.result)


def wait_while_busy(attempt: Callable[[], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
    """Repeat `attempt` while another process locks the file, for at most `BUSY_S` and while the result is wanted. The
    naps in between are short and random, because those of SQLite grow to 100 ms. A transaction that only reads may be
    refused as well, while another process recovers the log."""
    deadline = time.monotonic() + BUSY_S
    nap_s = 0.0002
    while True:
        try:
            return attempt()
        except sqlite3.Error as error:
            if not is_busy(error) or not is_wanted() or time.monotonic() > deadline:
                raise
        time.sleep(nap_s * (0.5 + random.random()))
        nap_s = min(nap_s * 1.5, 0.005)


def is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; 0 for an error of the Python module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def translate_sqlite_error(error: Exception, path: Path) -> Exception:
    """Return the error to raise for an error of SQLite. Any other error is returned unchanged."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        mapped: Exception = StorageFull(f"no room left for {path} ({error}), nothing was changed: free some disk space")
    elif code == sqlite3.SQLITE_BUSY:
        mapped = StorageUnavailable(
            f"{path} was locked by another process for {BUSY_S:.0f} s, nothing was changed: try again,"
            " and check whether a process that uses the file is frozen"
        )
    elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        mapped = StorageUnavailable(
            f"cannot open or write {path} ({error}): check that its folder exists and that you may write there"
        )
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        mapped = StorageUnavailable(f"{path} is not a valid SQLite database ({error}): restore it, or use another file")
    else:
        mapped = StorageUnavailable(f"{path}: {error}")
    mapped.__cause__ = error
    return mapped


# A step inside a transaction of the caller, on the caller's connection


@contextmanager
def in_caller_transaction(transaction: object, path: Path) -> Generator[sqlite3.Connection, None, None]:
    """Yield the caller's connection, inside its transaction. A step that fails is rolled back; nothing else of the
    caller is committed, rolled back or left changed."""
    db = _connection(transaction)
    row_factory, text_factory = db.row_factory, db.text_factory
    db.row_factory, db.text_factory = None, str
    try:
        _check_file(db, path)
        with _transaction(db):
            yield db
    except sqlite3.Error as error:
        if is_busy(error):
            raise StorageUnavailable(
                f"{path} is locked by another transaction, or was written to since yours began to read."
                " The call changed nothing: roll back and try again, from BEGIN IMMEDIATE"
            ) from error
        raise translate_sqlite_error(error, path) from error
    finally:
        db.row_factory, db.text_factory = row_factory, text_factory


def _connection(transaction: object) -> sqlite3.Connection:
    if not isinstance(transaction, sqlite3.Connection):
        kind = type(transaction)
        raise OptionError(
            f"{kind.__module__}.{kind.__qualname__} is not a transaction of this storage:"
            " pass the sqlite3.Connection that has begun one"
        )
    try:
        transaction.cursor().close()
    except sqlite3.ProgrammingError as error:
        raise OptionError(f"the connection cannot be used ({error}): pass an open one of this thread") from error
    return transaction


def _check_file(db: sqlite3.Connection, path: Path) -> None:
    files = {name: file for _, name, file in db.execute("PRAGMA database_list")}
    try:
        same = os.path.samefile(files["main"], path)
    except OSError:
        same = False
    if not same:
        raise OptionError(
            f"the connection is to {files['main'] or 'a database in memory'}, the jobs are in {path}:"
            " pass a connection to the same file"
        )


@contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None, None, None]:
    """Begin the caller's transaction, if Python would begin one for the caller's next statement; otherwise set a
    savepoint in it. A step that fails goes back to that point."""
    begun_here = not db.in_transaction
    if begun_here and not _begins_by_itself(db):
        raise OptionError("the connection has no transaction and would commit the job at once: begin one first")
    db.execute("BEGIN IMMEDIATE" if begun_here else "SAVEPOINT holdfast")
    try:
        yield
        if not begun_here:
            db.execute("RELEASE holdfast")
    except BaseException:
        if db.in_transaction:  # SQLite ends it when the disk is full, and after some other errors.
            for statement in ("ROLLBACK",) if begun_here else ("ROLLBACK TO holdfast", "RELEASE holdfast"):
                db.execute(statement)
        raise


def _begins_by_itself(db: sqlite3.Connection) -> bool:
    """Return whether Python's module begins transactions on this connection, for the caller to commit."""
    legacy = getattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", None)  # Since Python 3.12 there are three modes.
    return getattr(db, "autocommit", legacy) == legacy and db.isolation_level is not None
