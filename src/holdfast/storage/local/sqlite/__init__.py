"""Jobs in one SQLite file, for any number of processes on one host: the embedded default.

Writes and short reads share one connection thread; reads that may be long have another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from holdfast._core.clock import Clock, SystemClock
from holdfast._core.events import Event, Topic
from holdfast._core.jobs import Request
from holdfast._core.replies import Enqueued, StorageInfo
from holdfast.errors import HoldfastError, LayoutTooNew, OptionError, StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.local.engine import Engine, LocalStorage
from holdfast.storage.local.sqlite import connection, files, notify, open_files
from holdfast.storage.local.sqlite.connection import ConnectionThread
from holdfast.storage.local.sqlite.table import SqliteTable

LAYOUT = 3
"""The version of schema.sql. A file with another one is refused."""
CACHE_KIB = 65_536
SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
KEEPS = {
    "OFF": "everything acknowledged survives a kill; a power cut may damage the file",
    "NORMAL": "everything acknowledged survives a kill; a power cut may cost the last commits",
    "FULL": "everything acknowledged survives a kill, and a power cut if the disk keeps its word",
}
KEEPS["EXTRA"] = KEEPS["FULL"]

T = TypeVar("T")
log = logging.getLogger("holdfast.sqlite")


class SqliteStorage(LocalStorage):
    """Jobs in one SQLite file. With `synchronous` NORMAL it survives any kill, with FULL a power cut too."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "hf",
        synchronous: str = "NORMAL",
        clock: Clock | None = None,
        max_payload: int = validation.MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__(max_payload)
        self.path = Path(path).absolute()
        self.namespace = validation.check_namespace(namespace)
        self._clock = clock or SystemClock()
        self._synchronous = synchronous.upper()
        if self._synchronous not in SYNCHRONOUS:
            raise OptionError(f"synchronous must be one of {', '.join(SYNCHRONOUS)}, not {synchronous!r:.40}")
        self._open_log_level = logging.INFO
        self._receiver: notify.NotifyReceiver | None = None
        self._sender = notify.NotifySender(self.path)
        self._topics: set[tuple[str, str]] = set()
        """The registered topics, as namespace/queue and kind: other processes send their events here."""

    def __repr__(self) -> str:
        return f"<SqliteStorage {self.path}>"

    async def _about(self) -> StorageInfo:
        keeps = KEEPS[self._synchronous]
        facts = {
            "release": sqlite3.sqlite_version,
            "layout": str(LAYOUT),
            "journal": "WAL",
            "commits": f"synchronous={self._synchronous.lower()}",
            "size": f"{files.size(self.path) / 1e6:.1f} MB",
            "free": f"{files.free_bytes(self.path) / 1e6:.1f} MB",
        }
        warnings = await asyncio.to_thread(files.warnings, self.path)
        return StorageInfo(f"SQLite file {self.path}", self._clock.now_us(), keeps, facts, warnings)

    async def _back_up(self, target: Path) -> None:
        try:
            await asyncio.to_thread(files.back_up, self.path, target)
        except sqlite3.Error as error:
            raise connection.translate_sqlite_error(error, target) from error

    def clone(self) -> SqliteStorage:
        clone = SqliteStorage(
            self.path,
            namespace=self.namespace,
            synchronous=self._synchronous,
            clock=self._clock,
            max_payload=self._max_payload,
        )
        clone._open_log_level = logging.DEBUG  # The first storage object has logged the file.
        return clone

    async def _open(self) -> None:
        if self._pid is not None:
            raise StorageUnavailable(f"{self!r} is open already: connect again for a second one")
        waits_for_disk = self._synchronous in ("FULL", "EXTRA")
        threads: list[ConnectionThread] = []
        try:
            for on_commit, waits in ((self._publish, waits_for_disk), (None, True)):
                threads.append(ConnectionThread(self.path, self._connect, on_commit, waits_for_disk=waits))
                await threads[-1].open()
        except BaseException:  # Also if cancelled: no thread may be left running.
            for thread in threads:
                thread.end()
                await asyncio.shield(thread.close())
            raise
        self._writer, self._reader = threads
        log.log(self._open_log_level, "jobs are in %s", self.path)
        await super()._open()

    async def _close(self) -> None:
        await super()._close()
        await asyncio.shield(self._close_file())

    async def _close_file(self) -> None:
        """Close everything. Runs shielded, so that a cancelled caller leaves no thread running."""
        receiver, self._receiver = self._receiver, None
        self._topics.clear()
        try:
            if receiver is not None:
                address = receiver.address
                await self._writer.call(lambda _: self._writer.table.remove_listener(address), writes=True)
        except HoldfastError as error:  # The disk is full. The next process that sends a hint there removes it.
            log.info("could not remove a listener from %s: %s", self.path, error)
        finally:
            if receiver is not None:
                receiver.close()
            self._reader.end()
            self._writer.end(after=self._reader)
            await self._reader.close()
            await self._writer.close()
            self._sender.close()

    async def _step(self, verb: Callable[[Engine], T], *, writes: bool = True, items: int | None = 1) -> T:
        if items is None:
            return await self._reader.call(verb, writes=writes)
        return await self._writer.call(verb, writes=writes, items=items)

    def _enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        open_files.refuse_unlocked(self.path)
        with connection.in_caller_transaction(transaction, self.path) as db:
            _refuse_other_layout(db, self.path)
            _make_layout(db)
            table = SqliteTable(db, self.namespace, self._clock)
            table.begin()
            replies = Engine(table, self._clock).enqueue(queue, jobs)
            table.flush()
        return [*replies]

    async def _listen(self, topics: Sequence[Topic]) -> None:
        """Register for hints from other processes. A topic stays registered until the storage is closed."""
        wanted = {(f"{self.namespace}/{topic.queue}", topic.only) for topic in topics} - self._topics
        try:
            self._receiver = self._receiver or notify.NotifyReceiver(self.path, self._on_events)
        except OSError as error:
            log.warning("cannot open a socket for %s (%s): polling once a second instead", self.path, error)
        if self._receiver is not None and wanted:
            rows = [(self._receiver.address, queue, only) for queue, only in wanted]
            await self._writer.call(lambda _: self._writer.table.add_listeners(rows), writes=True)
        self._topics |= wanted

    def _on_events(self, namespace: str, events: Sequence[Event]) -> None:
        """Publish the events of another process. Called on the receiver's thread."""
        if namespace == self.namespace:
            self._bus.publish(events)

    def _publish(self, table: SqliteTable) -> None:
        """Publish the events of a commit here and in other processes. Called on the thread that committed."""
        self._bus.publish(table.events)
        own_address = None if self._receiver is None else self._receiver.address
        for address, queue, only in table.listeners:
            if address == own_address or address in table.dead_listeners:
                continue
            namespace, _, name = queue.partition("/")
            topic = Topic(name, only)
            wanted = [event for event in table.events if namespace == self.namespace and topic.covers(event)]
            if wanted and not self._sender.send(address, namespace, wanted):
                table.dead_listeners.add(address)

    def _connect(self) -> tuple[sqlite3.Connection, SqliteTable, Engine]:
        """Open the file and make or check its layout. Called on the thread that will own the connection."""
        try:
            db = connection.wait_while_busy(self._open_file)
        except sqlite3.Error as error:
            raise connection.translate_sqlite_error(error, self.path) from error
        table = SqliteTable(db, self.namespace, self._clock)
        return db, table, Engine(table, self._clock)

    def _open_file(self) -> sqlite3.Connection:
        db = open_files.connect(self.path)
        try:
            _refuse_other_layout(db, self.path)
            open_files.use_log(db, self.path)
            db.execute(f"PRAGMA synchronous = {self._synchronous}")
            db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            if _layout(db) is None:
                db.execute("BEGIN IMMEDIATE")
                _make_layout(db)
                db.execute("COMMIT")
            db.execute("PRAGMA secure_delete = FAST")  # Otherwise the pages of a large payload are written twice more.
            db.execute("PRAGMA wal_autocheckpoint = 0")  # The connection thread does it between two groups of calls.
            db.execute("PRAGMA busy_timeout = 0")
        except BaseException:
            db.close()
            raise
        return db


def _refuse_other_layout(db: sqlite3.Connection, path: Path) -> None:
    layout = _layout(db)
    if layout is None or layout == LAYOUT:
        return
    if isinstance(layout, int) and layout < LAYOUT:
        raise StorageUnavailable(
            f"{path} has layout {layout}, which this Holdfast no longer reads (it reads layout {LAYOUT}):"
            " finish the jobs with the release that wrote them, or use another file"
        )
    raise LayoutTooNew(
        f"{path} has layout {layout}, this Holdfast reads up to {LAYOUT}: upgrade it here, or use another file"
    )


def _make_layout(db: sqlite3.Connection) -> None:
    """Make the tables in the present transaction, one statement at a time: `executescript` would commit it."""
    if _layout(db) is None:
        schema = resources.files("holdfast.storage.local.sqlite").joinpath("schema.sql").read_text()
        for statement in re.sub(r"--[^\n]*", "", schema).split(";"):
            db.execute(statement)
        db.execute("INSERT OR IGNORE INTO holdfast_meta VALUES ('layout', ?)", (LAYOUT,))


def _layout(db: sqlite3.Connection) -> object:
    """Return the layout of the file; None if it has no tables of Holdfast yet."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'holdfast_meta'").fetchone():
        return None
    row = db.execute("SELECT value FROM holdfast_meta WHERE key = 'layout'").fetchone()
    return None if row is None else row[0]
