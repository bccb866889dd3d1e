"""The limits: what a job costs when nothing is done but what the storage itself has to do.

`Functions` are those of Holdfast's own library, called over a blocking socket with hiredis; `Statements` are those that
a queue on Holdfast's own SQLite schema must run. Nothing is checked or retried, no event is
published, and of a reply only ids and fences are read. It is the lower limit with which Holdfast is compared.
"""

from __future__ import annotations

import itertools
import socket
import sqlite3
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import hiredis

from holdfast._core.jobs import Complete, Request, new_id
from holdfast.storage.redis.codec import FENCE, request_args, settlement_args
from holdfast.storage.redis.script import SOURCES, Library

QUEUE, WORKER, LEASE_MS = "bench", "bench-worker", 60_000
LIBRARY = Library(SOURCES, injected_clock=False)


class Functions:
    """Our functions on a server on this machine."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader(notEnoughData=...)
        self._numbers = itertools.count(1)
        self._client = new_id()[-12:]
        """Another one for each: the functions keep the last number of every client, and answer it alike."""
        self._ask("FUNCTION", "LOAD", "REPLACE", LIBRARY.text)

    def close(self) -> None:
        self._socket.close()

    def enqueue(self, jobs: Iterable[Request]) -> None:
        self._call(f"{LIBRARY.name}_enqueue", "enqueue", *(arg for job in jobs for arg in request_args(job)))

    def claim(self, limit: int) -> list[tuple[bytes, int]]:
        """Ids and fences."""
        reply = self._call(LIBRARY.name, "claim", limit, WORKER, LEASE_MS)
        return [(id, fence) for id, (fence,) in zip(reply[4][::2], FENCE.iter_unpack(reply[5]), strict=True)]

    def settle(self, leases: Iterable[tuple[bytes, int]]) -> None:
        done = (settlement_args(Complete(id.decode(), fence)) for id, fence in leases)
        self._call(LIBRARY.name, "settle", WORKER, *itertools.chain.from_iterable(done))

    def wait(self, seconds: float) -> None:
        """Until there may be work."""
        self._ask("BLPOP", f"{{hf/{QUEUE}}}:wake", seconds)

    def _call(self, function: str, verb: str, *args: Any) -> Any:
        meta = f"{{hf/{QUEUE}}}:meta"
        return self._ask("FCALL", function, 1, meta, verb, self._client, next(self._numbers), *args)

    def _ask(self, *command: Any) -> Any:
        self._socket.sendall(hiredis.pack_command(command))
        while (reply := self._reader.gets()) is ...:
            self._reader.feed(self._socket.recv(1 << 20))
        if isinstance(reply, Exception):
            raise reply
        return reply


COLUMNS = "id, state, view, priority, run_at, arrival, payload, rest"
INSERT = (
    "INSERT INTO holdfast_jobs (queue, id, state, view, priority, run_at, arrival, until_at, worker, payload, rest)"
    " VALUES (1, ?, 'waiting', NULL, 5, ?, ?, NULL, NULL, ?, ?)"
)
DUE = (
    f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = 1 AND until_at IS NULL AND priority = 5 AND run_at <= ?"
    " ORDER BY run_at, arrival LIMIT ?"
)
LEASE = "UPDATE holdfast_jobs SET state = 'running', until_at = ?, worker = ?, rest = ? WHERE queue = 1 AND id = ?"
EXTEND = "UPDATE holdfast_jobs SET until_at = ?, rest = ? WHERE queue = 1 AND id = ?"
CANCEL = "UPDATE holdfast_jobs SET state = 'cancelled', until_at = ?, rest = ? WHERE queue = 1 AND id = ?"
DELETE = "DELETE FROM holdfast_jobs WHERE queue = 1 AND id = ?"
EXPIRED = "SELECT id FROM holdfast_jobs WHERE queue = 1 AND state = 'running' AND until_at <= ? LIMIT 100"
REST, REST_OF_RUN = bytes(35), bytes(73)
"""As long as what a storage keeps of such jobs besides the columns."""

Rows = Sequence[Sequence[Any]]
"""A job's values for INSERT; or, where it is known already, its id alone."""


class Statements:
    """The bare statements on our schema, with WAL and synchronous=NORMAL. Several at once are one transaction."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -65536")
        self._db.executescript(resources.files("holdfast.storage.local.sqlite").joinpath("schema.sql").read_text())
        self._arrivals = itertools.count(_now())

    def close(self) -> None:
        self._db.close()

    def row(self, id: bytes, payload: bytes) -> tuple[Any, ...]:
        return (id, _now(), next(self._arrivals), payload, REST)

    def enqueue(self, rows: Rows) -> None:
        self._write(INSERT, rows)

    def claim(self, limit: int) -> list[tuple[bytes]]:
        now = _now()
        until_at = now + 1000 * LEASE_MS
        self._db.execute("BEGIN IMMEDIATE")
        rows = self._db.execute(DUE, (now, limit)).fetchall()
        self._db.executemany(LEASE, [(until_at, WORKER, REST_OF_RUN, row[0]) for row in rows])
        self._db.execute("COMMIT")
        return [(row[0],) for row in rows]

    def extend(self, leases: Rows) -> None:
        until_at = _now() + 1000 * LEASE_MS
        self._write(EXTEND, [(until_at, REST_OF_RUN, id) for (id,) in leases])

    def settle(self, leases: Rows) -> None:
        self._write(DELETE, leases)

    def get(self, jobs: Rows) -> list[Any]:
        marks = ",".join("?" * len(jobs))
        statement = f"SELECT {COLUMNS} FROM holdfast_jobs WHERE queue = 1 AND id IN ({marks})"
        return self._db.execute(statement, [job[0] for job in jobs]).fetchall()

    def cancel(self, jobs: Rows) -> None:
        until_at = _now() + 3_600_000_000
        self._write(CANCEL, [(until_at, REST_OF_RUN, job[0]) for job in jobs])

    def sweep(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute(EXPIRED, (_now(),)).fetchall()
        self._db.execute("COMMIT")

    def forget(self) -> None:
        self._db.execute("DELETE FROM holdfast_jobs WHERE state = 'cancelled'")

    def _write(self, statement: str, rows: Rows) -> None:
        if len(rows) == 1:
            self._db.execute(statement, rows[0])
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(statement, rows)
        self._db.execute("COMMIT")


def _now() -> int:
    return time.time_ns() // 1000
