"""The connection itself: how often it is made, and whose a reply is."""

from __future__ import annotations

import asyncio

import pytest

import holdfast.storage.redis
from holdfast._core.jobs import Request, Work
from holdfast._core.replies import Placed
from holdfast.storage.redis import RedisStorage, calls
from holdfast.storage.redis.connection import ServerConnection
from holdfast.storage.redis.raw import RawConnection
from holdfast.storage.redis.urls import servers_from_url
from tests.redis.conftest import opened
from tests.servers import Server


async def test_a_call_that_reconnects_uses_up_the_planned_reconnection(server: Server) -> None:
    """A break plans a connection for a little later; a call that comes meanwhile connects at once. On two connections
    each caller would get the reply of another."""
    servers, _ = servers_from_url(server.url, server.url)
    opened = 0

    async def connect() -> RawConnection:
        nonlocal opened
        opened += 1
        return await servers.open("key")

    connection = ServerConnection("test", connect)
    deadline = asyncio.get_running_loop().time() + 10
    client_id = await connection.call(("CLIENT", "ID"), deadline)
    blocked = connection.call(("BLPOP", "nothing is here", "0.3"), deadline)
    server.command("CLIENT", "KILL", "ID", client_id)
    while connection._raw is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    answers = [connection.call(("ECHO", f"{number}"), deadline) for number in range(3)]
    await asyncio.sleep(0.1)  # By now the planned connection would have been made, with everything unanswered.
    answers.append(connection.call(("ECHO", "3"), deadline))
    assert await blocked is None
    assert await asyncio.gather(*answers) == [b"0", b"1", b"2", b"3"]
    connection.end()
    assert opened == 2


async def test_storage_remembers_a_bounded_number_of_queues(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that it has dropped is used again with a higher number, which the server accepts."""
    monkeypatch.setattr(calls, "MAX_IDLE_QUEUES", 5)
    monkeypatch.setattr(holdfast.storage.redis, "MAX_NAMES", 5)
    async with opened(server.url) as stage:
        storage = stage.storage
        assert isinstance(storage, RedisStorage)
        for n in range(40):
            await storage.enqueue(f"q{n}", [Request("a", Work(b"x"))])
            (reply,) = await storage.enqueue("q0", [Request(f"{n}", Work(b"x"))])
            assert reply.placed is Placed.NEW
        assert max(len(storage._calls._queues), len(storage._keys), len(storage._listed)) <= 10
