"""The connection itself: how often it is made, and whose a reply is."""

from __future__ import annotations

import asyncio

from holdfast.storage.redis.connection import ServerConnection
from holdfast.storage.redis.raw import RawConnection
from holdfast.storage.redis.urls import servers_from_url
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
