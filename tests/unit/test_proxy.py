"""The proxy that other tests lose commands and replies with."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import hiredis
import pytest
import redis.asyncio as redis_asyncio

from tests.proxy import HOST, Exchange, Hook, Proxy, frame, parts
from tests.servers import Server, shared


class Client:
    """A client that neither retries nor sends anything unasked."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.replies = hiredis.Reader(notEnoughData=...)

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(HOST, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass  # it was cut, as the test wanted

    def send(self, *commands: Sequence[str | bytes]) -> None:
        self.writer.write(b"".join(packed(*command) for command in commands))

    async def receive(self) -> object:
        while (reply := self.replies.gets()) is ...:
            chunk = await self.reader.read(1 << 16)
            if not chunk:
                raise ConnectionResetError("closed")
            self.replies.feed(chunk)
        return reply

    async def ask(self, *command: str | bytes) -> object:
        self.send(list(command))
        return await self.receive()


@pytest.fixture
def server() -> Server:
    found = shared("valkey")
    assert found is not None
    found.command("FLUSHALL")
    return found


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as proxy:
        yield proxy


def on(name: str, verdict: str) -> Hook:
    """A hook that decides so about this command, and lets all others pass."""
    return lambda exchange: verdict if exchange.name == name else "pass"


async def test_a_pipeline_is_seen_command_by_command(proxy: Proxy) -> None:
    async with Client(proxy.port) as client:
        client.send(*(["RPUSH", "list", str(n)] for n in range(5000)))
        assert [await client.receive() for _ in range(5000)] == list(range(1, 5001))
    assert [exchange.number for exchange in proxy.log] == list(range(5000))
    assert proxy.log[41] == Exchange([b"RPUSH", b"list", b"41"], 41, 0, b":42\r\n")


async def test_large_values_pass_unchanged(proxy: Proxy) -> None:
    big = os.urandom(8_000_000) + b"\r\n"
    async with Client(proxy.port) as client:
        client.send(["SET", "big", big], ["GET", "big"])
        assert await client.receive() == b"OK"
        assert await client.receive() == big
    assert proxy.log[0].command == [b"SET", b"big", big]


async def test_a_command_that_arrives_byte_by_byte_is_one_command(proxy: Proxy) -> None:
    async with Client(proxy.port) as client:
        for byte in packed("SET", "key", "value"):
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.001)
        assert await client.receive() == b"OK"
    assert [exchange.command for exchange in proxy.log] == [[b"SET", b"key", b"value"]]


@pytest.mark.parametrize("protocol", [2, 3])
async def test_redis_py_works_through_the_proxy(proxy: Proxy, protocol: int) -> None:
    client = redis_asyncio.Redis.from_url(proxy.url, protocol=protocol)
    try:
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.hset("hash", mapping={"a": "1", "b": "2"})
            pipeline.hgetall("hash")
            pipeline.zadd("z", {"m": 1.5})
            assert await pipeline.execute() == [2, {b"a": b"1", b"b": b"2"}, 1]
        assert await client.hgetall("hash") == {b"a": b"1", b"b": b"2"}
        async with client.pubsub() as listener:
            await listener.subscribe("news")
            assert await listener.get_message(timeout=1)
            await client.publish("news", "hello")
            message = await listener.get_message(timeout=1)
            assert message is not None
            assert message["data"] == b"hello"
            await listener.unsubscribe("news")
    finally:
        await client.aclose()


async def test_pushes_are_passed_on_and_are_not_taken_for_replies(proxy: Proxy, server: Server) -> None:
    async with Client(proxy.port) as client:
        await client.ask("HELLO", "3")
        await client.ask("CLIENT", "TRACKING", "ON")
        await client.ask("GET", "key")
        server.command("SET", "key", "new")
        assert await client.receive() == [b"invalidate", [b"key"]]
        assert await client.ask("GET", "key") == b"new"
    assert proxy.log[-1].reply == b"$3\r\nnew\r\n"


async def test_a_subscriber_is_passed_through_after_its_other_replies(proxy: Proxy, server: Server) -> None:
    async with Client(proxy.port) as client:
        client.send(["PING"], ["SUBSCRIBE", "a", "b"], ["UNSUBSCRIBE", "b"])
        assert await client.receive() == b"PONG"
        assert await client.receive() == [b"subscribe", b"a", 1]
        assert await client.receive() == [b"subscribe", b"b", 2]
        assert await client.receive() == [b"unsubscribe", b"b", 1]
        server.command("PUBLISH", "a", "hello")
        assert await client.receive() == [b"message", b"a", b"hello"]
        proxy.cut_all()
        with pytest.raises(ConnectionError):
            await client.receive()


async def test_command_of_a_cut_reply_was_applied(proxy: Proxy, server: Server) -> None:
    proxy.rule = on("INCR", "cut")
    async with Client(proxy.port) as client:
        assert await client.ask("SET", "n", "1") == b"OK"
        with pytest.raises(ConnectionError):
            await client.ask("INCR", "n")
    assert server.command("GET", "n") == b"2"
    assert proxy.log[-1].reply == b":2\r\n"


async def test_replies_before_the_cut_one_arrive_and_commands_after_it_are_applied(
    proxy: Proxy, server: Server
) -> None:
    proxy.before = on("ECHO", "error:ERR no")
    proxy.rule = on("INCR", "cut")
    async with Client(proxy.port) as client:
        client.send(["SET", "n", "1"], ["INCR", "n"], ["ECHO", "hello"], ["SET", "later", "yes"])
        assert await client.receive() == b"OK"
        with pytest.raises(ConnectionError):
            await client.receive()
    await until(lambda: bool(proxy.log[3].reply))
    assert [exchange.reply for exchange in proxy.log] == [b"+OK\r\n", b":2\r\n", b"-ERR no\r\n", b"+OK\r\n"]
    assert server.command("GET", "later") == b"yes"


async def test_half_a_reply_is_half_its_bytes(proxy: Proxy) -> None:
    proxy.rule = on("ECHO", "half")
    async with Client(proxy.port) as client:
        client.send(["ECHO", "0123456789"])
        assert await client.reader.read() == b"$10\r\n012"


async def test_a_cut_command_was_never_applied_but_those_before_it_were(proxy: Proxy, server: Server) -> None:
    proxy.before = on("INCR", "cut")
    async with Client(proxy.port) as client:
        client.send(["SET", "n", "1"], ["INCR", "n"], ["SET", "later", "yes"])
        with pytest.raises(ConnectionError):
            await client.receive()
    await until(lambda: bool(proxy.log[0].reply))
    assert server.command("MGET", "n", "later") == [b"1", None]
    assert len(proxy.log) == 2


async def test_a_held_command_is_applied_when_it_is_released(proxy: Proxy, server: Server) -> None:
    holds = iter(["hold", "hold"])
    proxy.before = lambda exchange: next(holds, "pass") if exchange.name == "APPEND" else "pass"
    for text in ("first", "second"):
        async with Client(proxy.port) as client:
            await client.ask("SELECT", "3")
            with pytest.raises(ConnectionError):
                await client.ask("APPEND", "key", text)
    async with Client(proxy.port) as client:
        await client.ask("SELECT", "3")
        assert await client.ask("APPEND", "key", "retry") == 5
        proxy.cut_all()
    assert await proxy.release() == [b":10\r\n", b":16\r\n"]
    assert await proxy.release() == []
    async with Client(proxy.port) as client:
        await client.ask("SELECT", "3")
        assert await client.ask("GET", "key") == b"retryfirstsecond"


async def test_an_error_of_the_proxy_comes_in_order(proxy: Proxy, server: Server) -> None:
    proxy.before = on("SET", "error:OOM not now")
    async with Client(proxy.port) as client:
        client.send(["INCR", "n"], ["SET", "n", "7"], ["INCR", "n"], ["SET", "n", "8"])
        one, error, two, last = [await client.receive() for _ in range(4)]
        assert (one, two) == (1, 2)
        assert isinstance(error, hiredis.ReplyError)
        assert str(error) == str(last) == "OOM not now"


async def test_a_stalled_connection_stays_open_and_silent(proxy: Proxy, server: Server) -> None:
    proxy.before = on("INCR", "stall")
    async with Client(proxy.port) as client, Client(proxy.port) as other:
        client.send(["INCR", "n"], ["SET", "n", "7"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.ask("PING"), 0.1)
        assert not client.reader.at_eof()
        assert await other.ask("GET", "n") is None


async def test_cut_all_closes_connections_and_refuse_rejects_new_ones(proxy: Proxy) -> None:
    async with Client(proxy.port) as first, Client(proxy.port) as second:
        assert await first.ask("PING") == await second.ask("PING") == b"PONG"
        proxy.cut_all()
        for client in (first, second):
            with pytest.raises(ConnectionError):
                await client.receive()
    proxy.refuse = True
    async with Client(proxy.port) as client:
        with pytest.raises(ConnectionError):
            await client.ask("PING")
    proxy.refuse = False
    async with Client(proxy.port) as client:
        assert await client.ask("PING") == b"PONG"
    assert [exchange.connection for exchange in proxy.log] == [0, 1, 3]


async def test_a_client_that_is_cut_off_while_it_waits_is_forgotten_by_the_server(proxy: Proxy, server: Server) -> None:
    async with Client(proxy.port) as client:
        client.send(["BLPOP", "list", "0"])
        await until(lambda: server.info("clients")["blocked_clients"] == "1")
        proxy.cut_all()
        await until(lambda: server.info("clients")["blocked_clients"] == "0")


async def test_a_server_that_dies_ends_its_connections() -> None:
    with Server("valkey") as server:
        async with Proxy(server.port) as proxy:
            proxy.before = on("INCR", "hold")
            async with Client(proxy.port) as client, Client(proxy.port) as holder:
                assert await client.ask("PING") == b"PONG"
                with pytest.raises(ConnectionError):
                    await holder.ask("INCR", "n")
                server.kill()
                with pytest.raises(ConnectionError):
                    await client.ask("PING")
            async with Client(proxy.port) as client:
                with pytest.raises(ConnectionError):
                    await client.ask("PING")
            with pytest.raises(ConnectionError):
                await proxy.release()


async def test_proxy_closes_with_commands_still_pending(server: Server) -> None:
    async with AsyncExitStack() as clients:
        async with Proxy(server.port) as proxy:
            proxy.before = lambda exchange: {"INCR": "hold", "DECR": "stall"}.get(exchange.name, "pass")
            held, stalled, blocked, deaf, _ = [await clients.enter_async_context(Client(proxy.port)) for _ in range(5)]
            held.send(["INCR", "n"])
            stalled.send(["DECR", "n"])
            blocked.send(["BLPOP", "list", "0"])
            deaf.send(["SET", "big", bytes(8_000_000)], *[["GET", "big"]] * 5)  # and reads none of it
            await until(lambda: len(proxy.log) == 9)
    with pytest.raises(ConnectionRefusedError):
        await Client(proxy.port).__aenter__()


async def test_proxy_closes_after_a_closed_connection_sent_its_last_bytes(server: Server) -> None:
    server.command("SET", "big", bytes(8_000_000))
    async with AsyncExitStack() as clients:
        async with Proxy(server.port) as proxy:
            client = await clients.enter_async_context(Client(proxy.port))
            proxy.rule = on("GET", "half")
            client.send(["GET", "big"])
            assert len(await client.reader.read()) > 4_000_000


@pytest.mark.parametrize("hook", ["before", "rule"])
async def test_an_error_in_a_hook_cuts_the_connection_and_is_raised_at_the_end(server: Server, hook: str) -> None:
    proxy = await Proxy(server.port).__aenter__()
    setattr(proxy, hook, lambda exchange: "nonsense")
    async with Client(proxy.port) as client:
        with pytest.raises(ConnectionError):
            await client.ask("PING")
    with pytest.raises(ValueError, match="nonsense"):
        await proxy.__aexit__()


@pytest.mark.parametrize(
    "value",
    [
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":-1\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"$6\r\n+a\r\n+b\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n:1\r\n$1\r\nx\r\n",
        b"_\r\n",
        b"#t\r\n",
        b",1.5\r\n",
        b"(123\r\n",
        b"!3\r\nERR\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
        b"~1\r\n+a\r\n",
        b">2\r\n+invalidate\r\n*1\r\n+a\r\n",
        b"|1\r\n+ttl\r\n:3\r\n$1\r\nx\r\n",
    ],
)
def test_end_of_a_value_is_found(value: bytes) -> None:
    assert frame(value + b"+next\r\n") == len(value)
    assert [frame(value[:length]) for length in range(len(value))] == [None] * len(value)


def test_invalid_value_is_an_error() -> None:
    with pytest.raises(ValueError, match="GET / HTTP"):
        frame(b"GET / HTTP/1.1\r\n")


def test_command_is_parsed_with_any_bytes_in_its_words() -> None:
    assert parts(packed("SET", b"$3\r\n", b"")) == [b"SET", b"$3\r\n", b""]


async def until(true: Callable[[], bool]) -> None:
    """Wait for what the other side does in its own time."""
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def packed(*command: str | bytes) -> bytes:
    return bytes(hiredis.pack_command(command))  # type: ignore[arg-type]
