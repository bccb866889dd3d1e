"""Behind a real sentinel: the master is found, and found again after a failover."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from redis.asyncio.sentinel import Sentinel

from holdfast._core.jobs import Request, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import Complete, audit, connect
from holdfast.storage.redis import of_client
from tests.servers import SentinelServer, Server, wait_until

SERVICE = "holdfast-test"


class Watched:
    """A master, a replica, and a sentinel that watches them."""

    def __init__(self) -> None:
        self.master = Server("valkey")
        self.replica = Server("valkey", "--replicaof", f"127.0.0.1 {self.master.port}")
        self.sentinel = SentinelServer(SERVICE, self.master)
        wait_until(self._knows_the_replica, 20, lambda: "the sentinel never saw the replica")

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{SERVICE}/0"

    def _knows_the_replica(self) -> bool:
        synced = self.replica.info("replication").get("master_link_status") == "up"
        return synced and self.sentinel.command("SENTINEL", "REPLICAS", SERVICE) != []

    def stop(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.stop()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.stop()


async def test_the_master_is_found_and_found_again_after_a_failover(watched: Watched) -> None:
    namespace = uuid.uuid4().hex
    async with connect(f"{watched.url}?timeout=30", namespace=namespace) as storage:
        (before,) = await storage.enqueue("q", [Request("a", Work(b"1"))])
        (job,) = (await storage.claim("q", 1, worker="w", lease_ms=60_000)).jobs
        wait_until(lambda: _offset(watched.replica) == _offset(watched.master), 10, lambda: "the replica lags behind")
        watched.master.kill()
        async with asyncio.timeout(40):
            (after,) = await storage.enqueue("q", [Request("b", Work(b"2"))])
            assert after.placed is Placed.NEW
            assert after.generation > before.generation
            assert job.run is not None
            settled = await storage.settle("q", [Complete(job.id, job.run.fence)], worker="w")
            assert settled == [SettleResult.OK]
        assert watched.replica.info("replication")["role"] == "master"
        assert (await audit(storage, "q")).problems == []


async def test_sentinel_client_of_redis_py_is_accepted(watched: Watched) -> None:
    sentinel = Sentinel([("127.0.0.1", watched.sentinel.port)])
    client = sentinel.master_for(SERVICE)
    async with of_client(client, namespace=uuid.uuid4().hex) as storage:
        assert (await storage.enqueue("q", [Request("a", Work(b""))]))[0].placed is Placed.NEW
    for mine in (client, *sentinel.sentinels):
        await mine.aclose()


async def test_unknown_sentinel_service_is_named(watched: Watched) -> None:
    url = watched.url.replace(SERVICE, "nobody")
    with pytest.raises(StorageUnavailable, match="nobody"):
        async with connect(f"{url}?timeout=1"):
            pass


def test_sentinel_url_without_a_service_is_refused() -> None:
    with pytest.raises(OptionError, match="SERVICE"):
        connect("redis+sentinel://localhost:26379")


def _offset(server: Server) -> str:
    fields = server.info("replication")
    return fields.get("slave_repl_offset" if fields["role"] == "slave" else "master_repl_offset", "")
