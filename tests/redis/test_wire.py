"""The connection itself: how often it is made, and whose a reply is."""

from __future__ import annotations

import asyncio

from holdfast.storage.redis.connection import RawConnection, ServerConnection
from holdfast.storage.redis.topology import find
from tests.servers import Server


async def test_a_call_that_mends_a_broken_connection_is_not_overtaken_by_the_one_that_was_to_mend_it(
    server: Server,
) -> None:
    """A break plans a connection for a little later; who asks meanwhile connects at once. On two connections each
    caller would get another's reply."""
    servers, _ = find(server.url, server.url)
    links = 0

    async def connect() -> RawConnection:
        nonlocal links
        links += 1
        return await servers.link("key")

    wire = ServerConnection("test", connect)
    deadline = asyncio.get_running_loop().time() + 10
    own = await wire.call(("CLIENT", "ID"), deadline)
    blocked = wire.call(("BLPOP", "nothing is here", "0.3"), deadline)
    server.command("CLIENT", "KILL", "ID", own)
    while wire._link is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    answers = [wire.call(("ECHO", f"{number}"), deadline) for number in range(3)]
    await asyncio.sleep(0.1)  # By now the planned connection would have been made, with everything unanswered.
    answers.append(wire.call(("ECHO", "3"), deadline))
    assert await blocked is None
    assert await asyncio.gather(*answers) == [b"0", b"1", b"2", b"3"]
    await wire.close()
    assert links == 2
