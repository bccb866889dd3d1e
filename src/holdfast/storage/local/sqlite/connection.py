"""A SQLite connection, the thread that owns it, and group commit.

Calls line up; the thread takes all that queued up while it was busy and runs them as one transaction, in order.
A burst of callers so costs one commit. A single small call is run on its caller's thread: a commit that does not wait
for the disk takes less time than the way to another thread and back (docs/development/decisions/0003).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast.errors import StorageFull, StorageUnavailable
from holdfast.storage.local.engine import Engine
from holdfast.storage.local.sqlite.table import SqliteTable

MAX_GROUP = 100
"""Calls that share one transaction."""
MAX_INLINE_ITEMS = 16
"""A call with more items than this is never run on its caller's thread."""
CHECKPOINT_EVERY = 1000
"""Pages, roughly, that the log may grow by before they are moved into the file."""
PAGES_A_COMMIT, EVENTS_A_PAGE, PAGE_BYTES = 4, 8, 4096
"""How the growth of the log is reckoned."""
BUSY_S = 10.0
"""How long a call waits for other processes to finish their transactions."""

T = TypeVar("T")
log = logging.getLogger("holdfast.sqlite")


class _Call(Generic[T]):
    """A verb on its way to the thread, and the future that its caller awaits."""

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
    called after each write. With `waits_for_disk`, every call goes to the thread."""

    def __init__(
        self,
        path: Path,
        connect: Callable[[], tuple[sqlite3.Connection, SqliteTable, Engine]],
        on_commit: Callable[[SqliteTable], None] | None = None,
        *,
        waits_for_disk: bool = True,
    ) -> None:
        self._path = path
        self._connect = connect
        self._on_commit = on_commit
        self._waits_for_disk = waits_for_disk
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._pending = 0
        """Calls that are lined up or running: a call may only go ahead of the line if there is none."""
        self._connection_lock = threading.Lock()
        self._since_checkpoint = 0
        self._opened = threading.Event()
        self._error: Exception | None = None
        self._closing = False
        self._close_after: ConnectionThread | None = None
        self._thread = threading.Thread(target=self._work, name="holdfast-sqlite", daemon=True)
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
            await asyncio.sleep(0)  # The loop gets its turn, and other calls made in this turn line up as a group.
        finally:
            self._done(1)
        if call.error is not None:
            raise call.error
        return call.result

    def end(self, after: ConnectionThread | None = None) -> None:
        """Let the thread end when it has done what is lined up, and close its connection after that of another thread.
        SQLite moves the log into the file when the last connection closes, but not if two close at the same moment."""
        self._close_after = after
        self._calls.put(None)

    async def close(self) -> None:
        """Wait for the end of the thread."""
        await asyncio.to_thread(self._thread.join)

    def _run_inline(self, call: _Call[Any]) -> bool:
        """Run a call on its caller's thread. False if that would mean to wait, for another process or for
        a checkpoint: waiting is for the connection thread."""
        if not self._connection_lock.acquire(blocking=False):
            return False
        try:
            self._transaction([call], patient=False)
        except Exception as error:
            if is_busy(error):
                return False
            call.error = translate_sqlite_error(error, self._path)
        finally:
            self._connection_lock.release()
        return True

    def _done(self, calls: int) -> None:
        with self._gate:
            self._pending -= calls

    def _work(self) -> None:
        try:
            self._db, self.table, self._engine = self._connect()
        except Exception as error:
            self._error = error
            return
        finally:
            self._opened.set()
        while not self._closing:
            lined_up = self._next_group()
            group = [call for call in lined_up if not call.future.cancelled()]
            if group:
                with self._connection_lock:
                    self._run(group)
                _deliver(group)
            self._done(len(lined_up))
            if self._since_checkpoint >= CHECKPOINT_EVERY:
                self._checkpoint()
        if self._close_after is not None:
            self._close_after._thread.join()
        self._db.close()

    def _checkpoint(self) -> None:
        """Move what was written from the log into the file. It waits for the disk, so no call should wait for it."""
        with self._connection_lock:
            try:
                self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.Error as error:
                log.warning("could not checkpoint %s (%s): trying again later", self._path, error)
        self._since_checkpoint = 0  # Only now: until here, every call lines up instead of waiting for the lock.

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
        """Run a group as one transaction. If that fails, nothing has happened: then each call gets its own."""
        try:
            self._transaction(group, patient=True)
        except Exception as error:
            if len(group) > 1 and not is_busy(error):
                for call in group:
                    self._run([call])
                return
            for call in group:
                call.error = translate_sqlite_error(error, self._path)

    def _transaction(self, group: list[_Call[Any]], *, patient: bool) -> None:
        writes = any(call.writes for call in group)
        self._begin("BEGIN IMMEDIATE" if writes else "BEGIN", group if patient else None)
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
            self._notify()

    def _notify(self) -> None:
        """Call `on_commit`. The commit stands, also if that fails."""
        try:
            if self._on_commit is not None:
                self._on_commit(self.table)
        except Exception:
            log.exception("could not publish the events of a commit to %s", self._path)

    def _roll_back(self) -> None:
        self.table.forget_cache()
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _begin(self, statement: str, waiting: list[_Call[Any]] | None) -> None:
        """Begin. While a call of `waiting` is not cancelled, wait for other processes in short random naps: those of
        SQLite grow to 100 ms. A step that only reads may also find the file busy at its first look, while another
        process recovers the log."""
        deadline = time.monotonic() + BUSY_S
        nap_s = 0.0002
        while True:
            try:
                self._db.execute(statement)
                self.table.begin()
                return
            except sqlite3.OperationalError as error:
                self._roll_back()
                patient = waiting is not None and not all(call.future.cancelled() for call in waiting)
                if not patient or not is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(nap_s * (0.5 + random.random()))
            nap_s = min(nap_s * 1.5, 0.005)


def _deliver(group: list[_Call[Any]]) -> None:
    """Hand the results to their loops: one wake-up per loop."""
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


def is_busy(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_BUSY


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for what the module itself objects to."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def translate_sqlite_error(error: Exception, path: Path) -> Exception:
    """Return the error that a caller gets when SQLite refuses. An error that is not SQLite's is returned unchanged."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = _code(error)
    if code == sqlite3.SQLITE_FULL:
        mapped: Exception = StorageFull(f"no room left for {path} ({error}): free some disk space; nothing was changed")
    elif code == sqlite3.SQLITE_BUSY:
        mapped = StorageUnavailable(f"{path} was locked by another process for {BUSY_S:.0f} s; nothing was changed")
    elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        mapped = StorageUnavailable(
            f"cannot open or write {path} ({error}): does its folder exist, may you write there?"
        )
    elif code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        mapped = StorageUnavailable(f"{path} is not a sound SQLite database ({error}): restore it, or use another file")
    else:
        mapped = StorageUnavailable(f"{path}: {error}")
    mapped.__cause__ = error
    return mapped
