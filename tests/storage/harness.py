"""How the suite gets at a storage. To run it on one of your own, give `--storage your.module:harness`,
where `harness` makes an object like these."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Literal, Protocol

from msgspec.structs import replace

from holdfast._core.clock import ManualClock
from holdfast._core.extension import Extension
from holdfast.storage import Storage, connect
from holdfast.storage.conformance import StorageHarness
from holdfast.storage.local.engine import Engine, LocalStorage
from holdfast.storage.local.table import Change
from holdfast.storage.redis import RedisStorage
from tests import servers
from tests.storage import keyspace
from tests.storage.behind import RedisSaboteur


class Harness(StorageHarness, Protocol):
    """Makes storages for tests, on the test's clock."""

    name: str

    async def tag_record(self, storage: Storage, queue: str, id: str, entries: Extension) -> None:
        """Set the extension of a record, which no verb does yet. Does nothing if there is no record."""
        ...

    def clear(self) -> list[str]:
        """After a test, when all is closed: what was left behind that has no owner. Then everything is gone."""
        ...


async def _tag_local_record(storage: Storage, queue: str, id: str, entries: Extension) -> None:
    def tag(engine: Engine) -> None:
        if engine.table.meta(queue) is None:
            return
        job = engine.table.load(queue, [id]).get(id)
        if job is not None:
            engine.table.write(queue, [Change(id, job, replace(job, extension=entries))], [])

    assert isinstance(storage, LocalStorage)
    await storage._step(tag)


class MemoryHarness:
    name = "memory"

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}

    def open(self, clock: ManualClock, folder: Path) -> Storage:
        name = self._names.setdefault(folder, uuid.uuid4().hex)
        return connect(f"memory://{name}", clock=clock)

    async def tag_record(self, storage: Storage, queue: str, id: str, entries: Extension) -> None:
        await _tag_local_record(storage, queue, id, entries)

    def clear(self) -> list[str]:
        return []


class SqliteHarness:
    name = "sqlite"

    def open(self, clock: ManualClock, folder: Path) -> Storage:
        return connect(f"sqlite:///{folder}/jobs.db", clock=clock)

    async def tag_record(self, storage: Storage, queue: str, id: str, entries: Extension) -> None:
        await _tag_local_record(storage, queue, id, entries)

    def clear(self) -> list[str]:
        return []


class RedisHarness:
    """A server that all tests share; each folder is another namespace."""

    def __init__(self, server: Literal["valkey", "redis"]) -> None:
        self.name: str = server
        self._server = server
        self._namespaces: dict[Path, str] = {}

    def open(self, clock: ManualClock, folder: Path) -> Storage:
        server = servers.shared(self._server)
        assert server is not None
        namespace = self._namespaces.setdefault(folder, uuid.uuid4().hex)
        return connect(server.url, clock=clock, namespace=namespace)

    async def tag_record(self, storage: Storage, queue: str, id: str, entries: Extension) -> None:
        assert isinstance(storage, RedisStorage)
        RedisSaboteur(storage, self._server, queue).tag(id, entries)

    def clear(self) -> list[str]:
        namespaces, self._namespaces = list(self._namespaces.values()), {}
        server = servers.shared(self._server) if namespaces else None
        return [text for namespace in namespaces for text in keyspace.clear(server, namespace)] if server else []


HARNESSES: list[Harness] = [MemoryHarness(), SqliteHarness(), RedisHarness("valkey")]
if servers.redis_binary() is not None:
    HARNESSES.append(RedisHarness("redis"))
