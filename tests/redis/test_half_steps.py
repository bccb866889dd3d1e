"""A step that fails has changed nothing, whatever it fails for: a command that the user lacks, or a companion queue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from holdfast._core.events import Topic
from holdfast._core.jobs import Complete, Request, State, Work
from holdfast._core.replies import SettleResult
from holdfast.errors import LayoutTooNew, StorageUnavailable
from holdfast.storage import audit, connect
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis.calls import KEYS
from tests.proxy import HOST
from tests.redis.conftest import contents, key, namespace_of, opened
from tests.servers import Server
from tests.storage.stage import Stage, fence

WRITES = ["SET", "HSET", "HDEL", "ZADD", "ZREM"]


@pytest.fixture
def own() -> Iterator[Server]:
    with Server("valkey") as server:
        yield server


@pytest.fixture
async def stage(own: Server) -> AsyncIterator[Stage]:
    """A storage of a user who may do everything."""
    async with opened(own.url) as stage:
        yield stage


@asynccontextmanager
async def user_without(own: Server, stage: Stage, *commands: str) -> AsyncIterator[RedisStorage]:
    """A storage of a user who lacks commands."""
    own.command("ACL", "SETUSER", "u", "reset", "on", ">secret", "~*", "&*", "+@all")
    storage = connect(f"redis://u:secret@{HOST}:{own.port}", clock=stage.clock, namespace=namespace_of(stage))
    assert isinstance(storage, RedisStorage)
    async with storage:
        own.command("ACL", "SETUSER", "u", *(f"-{command}" for command in commands))
        yield storage


def values(own: Server, stage: Stage) -> dict[str, object]:
    """The bytes of every key of the queue and its companion."""
    prefix = key(stage, "")[:-1]
    names = [prefix + suffix + kind for suffix in ("", "/failed") for kind in KEYS]
    return {name: own.command("DUMP", name) for name in names}


@pytest.mark.parametrize("command", WRITES)
async def test_user_without_a_command_that_writes_changes_nothing(own: Server, stage: Stage, command: str) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    job = await stage.claim_one()
    refused = pytest.raises(StorageUnavailable, match=f"grant it.*{command}")
    before = values(own, stage)
    async with user_without(own, stage, command) as storage:
        with refused:
            await storage.enqueue("q", [Request("c", Work(b"x"))])
        with refused:
            await storage.claim("q", 1, worker="w1", lease_ms=1000)
        with refused:
            await storage.settle("q", [Complete("a", fence(job), b"r", result_ttl_ms=1000)], worker="w1")
        with refused:
            await storage.cancel("q", ["b"])
    assert values(own, stage) == before
    assert await stage.problems() == []


async def test_settle_by_a_user_who_may_not_publish_succeeds_whole(own: Server, stage: Stage) -> None:
    await stage.storage.enqueue("q", [Request("a", Work(b"x"), keep_ms=60_000)])
    job = await stage.claim_one()
    hints = stage.storage.subscribe(Topic("q", id="a", only="ends"), Topic("q"))
    async with hints, user_without(own, stage, "SPUBLISH", "LLEN", "LPUSH") as storage:
        (reply,) = await storage.settle("q", [Complete("a", fence(job), b"r")], worker="w1")
        assert reply is SettleResult.OK
        await storage.enqueue("q", [Request("b", Work(b"x"))])
    assert (await stage.the("a")).state is State.COMPLETED
    assert await stage.problems() == []


@pytest.mark.parametrize("damage", ["layout", "metadata"])
async def test_failure_whose_companion_queue_is_refused_changes_nothing(own: Server, stage: Stage, damage: str) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one(), follow_up=Work(b"failed"))
    await stage.enqueue("b")
    job = await stage.claim_one()
    companion = key(stage, "meta").replace("}:", "}/failed:")
    sound = own.command("GET", companion)
    own.command("SET", companion, bytes([sound[0] + 1]) + sound[1:] if damage == "layout" else b"nonsense")
    before = values(own, stage)
    with pytest.raises(LayoutTooNew if damage == "layout" else StorageUnavailable):
        await stage.fail(job, follow_up=Work(b"failed"))
    assert values(own, stage) == before
    own.command("SET", companion, sound)
    assert await stage.fail(job, follow_up=Work(b"failed")) is SettleResult.OK
    assert (await audit(stage.storage, "q/failed")).problems == []


async def test_enqueue_that_is_refused_creates_no_queue(own: Server, stage: Stage) -> None:
    before = await contents(stage)
    async with user_without(own, stage, "PUBSUB") as storage:
        with pytest.raises(StorageUnavailable, match="permission"):
            await storage.enqueue("q", [Request("a", Work(b"x"))])
    assert await contents(stage) == before
