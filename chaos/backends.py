"""The storage of a run, a SQLite file or a server that the run starts, and the faults that it can have."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

from chaos.clocks import SharedClock
from chaos.settings import CLOCK_KEY, NAMESPACE
from tests.servers import Name, Server
from tests.storage import keyspace

DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-min-size", "4mb")
"""Acknowledged writes survive a kill. The file is rewritten often, so that a restart is fast."""
START_S = 60
TIMEOUT_S = 4
"""How long a call tries to reach the server. A connection is given up after half of it without a reply, which must be
less than a lease."""


class SqliteBackend:
    name = "sqlite"
    about = f"SQLite {sqlite3.sqlite_version}"
    faults = ("file locked",)
    """Faults of the storage itself."""

    def __init__(self, folder: Path, clock: Path) -> None:
        self.path = folder / "jobs.db"
        self.url = f"sqlite:///{self.path}"
        self._clock = SharedClock(clock)

    async def apply(self, fault: str, seconds: float) -> float:
        """Apply a fault for a time. Returns when the storage answered again."""
        return await asyncio.to_thread(self._lock, seconds)

    def _lock(self, seconds: float) -> float:
        connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
        finally:
            connection.close()
        return time.monotonic()

    def set_clock(self, offset_s: float) -> None:
        self._clock.set(offset_s)

    def leftovers(self) -> list[str]:
        """What is left after all queues were deleted and all processes have ended."""
        found: list[str] = []
        connection = sqlite3.connect(self.path)
        for table in ("holdfast_jobs", "holdfast_queues", "holdfast_listeners"):
            (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            if count:
                found.append(f"{count} rows in {table}")
        (sound,) = connection.execute("PRAGMA integrity_check").fetchone()
        connection.close()
        if sound != "ok":
            found.append(f"the file is damaged: {sound}")
        ours = {self.path.name, f"{self.path.name}-wal", f"{self.path.name}-shm"}
        return found + [f"a file {path.name}" for path in self.path.parent.glob("jobs.db*") if path.name not in ours]

    def close(self) -> None:
        pass


class ServerBackend:
    faults = ("server kill", "server pause", "script flush", "full memory")

    def __init__(self, name: Name) -> None:
        self.name = name
        self.server = Server(name, *DURABLE)
        self.url = self.server.url
        self.about = f"{name} {self.server.version}"

    def url_by(self, port: int) -> str:
        """The URL through a proxy."""
        return f"redis://127.0.0.1:{port}?timeout={TIMEOUT_S}"

    async def apply(self, fault: str, seconds: float) -> float:
        match fault:
            case "server kill":
                self.server.kill()
                await asyncio.sleep(seconds)
                await asyncio.to_thread(self.server.start, START_S)
            case "server pause":
                self.server.pause()
                await asyncio.sleep(seconds)
                self.server.resume()
            case "script flush":
                self._command("FUNCTION", "FLUSH")
            case "full memory":
                self._command("CONFIG", "SET", "maxmemory", 1)
                await asyncio.sleep(seconds)
                self._command("CONFIG", "SET", "maxmemory", 0)
        return time.monotonic()

    def set_clock(self, offset_s: float) -> None:
        self._command("SET", CLOCK_KEY, round(offset_s * 1_000_000))

    def leftovers(self) -> list[str]:
        keys: Any = self._command("KEYS", f"{{{NAMESPACE}*")
        known = {f"{{{NAMESPACE}}}:{kind}" for kind in keyspace.OF_NAMESPACES}
        lasting = [key.decode() for key in keys if self._command("PTTL", key) == -1]
        wrong = [f"a key {key}" for key in lasting if key not in known]
        return wrong + keyspace.clear(self.server, NAMESPACE)

    def close(self) -> None:
        self.server.stop()

    def _command(self, *args: str | bytes | float) -> object:
        return self.server.command(*args)


def make(name: str, folder: Path, clock: Path) -> SqliteBackend | ServerBackend:
    if name == "sqlite":
        return SqliteBackend(folder, clock)
    assert name in ("valkey", "redis")
    return ServerBackend("valkey" if name == "valkey" else "redis")
