"""A proxy in front of an echo server: each fault does what its name says, in both directions, at its byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from chaos.faulty_proxy import HOST, KINDS, Connection, ConnectionFault, FaultyProxy, Kind

SOON_S = 5.0
"""Whatever is to come has come by then, however busy the machine is."""
HELD_S = 0.15

both_ways = pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "to the client"])


@dataclass
class Echo:
    """Sends all bytes back, and remembers them."""

    heard: bytearray = field(default_factory=bytearray)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                self.heard += data
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            self.over.set()
            writer.close()


@dataclass
class Scene:
    echo: Echo
    proxy: FaultyProxy
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    done: list[float] = field(default_factory=list[float])

    @property
    def connection(self) -> Connection:
        (connection,) = self.proxy.connections
        return connection

    def plan(self, kind: Kind, to_server: bool, at_byte: int, seconds: float = HELD_S) -> ConnectionFault:
        fault = ConnectionFault(
            kind=kind, to_server=to_server, bytes_left=at_byte, seconds=seconds, on_done=self.done.append
        )
        self.connection.fault = fault
        return fault

    async def say(self, words: bytes) -> bytes:
        self.writer.write(words)
        async with asyncio.timeout(SOON_S):
            return await self.reader.readexactly(len(words))

    async def rest(self) -> bytes:
        """All that comes until the connection is over, one way or the other."""
        heard = bytearray()
        async with asyncio.timeout(SOON_S):
            with suppress(ConnectionError):
                while data := await self.reader.read(100):
                    heard += data
        return bytes(heard)


@asynccontextmanager
async def opened() -> AsyncGenerator[Scene]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, HOST, 0)
    proxy = FaultyProxy(server.sockets[0].getsockname()[1])
    await proxy.open()
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    scene = Scene(echo, proxy, reader, writer)
    try:
        assert await scene.say(b"hello") == b"hello"
        yield scene
    finally:
        writer.close()
        async with asyncio.timeout(SOON_S):
            await proxy.close()
        server.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_connection_without_a_fault_passes_everything() -> None:
    async with opened() as scene:
        words = bytes(range(256)) * 2_000
        assert await scene.say(words) == words
        assert bytes(scene.echo.heard) == b"hello" + words
        assert scene.done == []


@both_ways
@pytest.mark.parametrize("kind", KINDS)
async def test_fault_happens_only_after_its_byte_count(kind: Kind, to_server: bool) -> None:
    async with opened() as scene:
        scene.plan(kind, to_server, at_byte=8)
        connection = scene.connection
        assert await scene.say(b"1234") == b"1234"
        assert await scene.say(b"5678") == b"5678"
        assert scene.done == []
        scene.writer.write(b"9")
        await until(lambda: scene.done != [])
        assert connection.fault is None


@both_ways
async def test_cut_stops_all_bytes_and_both_ends_see_it(to_server: bool) -> None:
    async with opened() as scene:
        scene.plan("cut", to_server, at_byte=3)
        scene.writer.write(b"lost and gone")
        assert await scene.rest() == b""
        async with asyncio.timeout(SOON_S):
            await scene.echo.over.wait()
        assert bytes(scene.echo.heard) == (b"hello" if to_server else b"hellolost and gone")
        assert len(scene.done) == 1
        await until(lambda: not scene.proxy.connections)


@both_ways
@pytest.mark.parametrize("at_byte", [0, 1, 7])
async def test_truncation_passes_its_byte_count_and_closes(to_server: bool, at_byte: int) -> None:
    async with opened() as scene:
        scene.plan("truncate", to_server, at_byte)
        scene.writer.write(b"lost and gone")
        passed = b"lost and gone"[:at_byte]
        heard = await scene.rest()
        async with asyncio.timeout(SOON_S):
            await scene.echo.over.wait()
        assert bytes(scene.echo.heard) == b"hello" + (passed if to_server else b"lost and gone")
        assert heard == (b"" if to_server else passed)
        assert len(scene.done) == 1
        await until(lambda: not scene.proxy.connections)


@both_ways
async def test_delay_passes_all_bytes_later_and_in_order(to_server: bool) -> None:
    async with opened() as scene:
        now = asyncio.get_running_loop().time
        scene.plan("delay", to_server, at_byte=2)
        began = now()
        assert await scene.say(b"late, ") == b"late, "
        assert now() - began >= HELD_S
        assert scene.done == [pytest.approx(began + HELD_S, abs=0.1)]
        assert now() >= scene.done[0]
        began = now()
        assert await scene.say(b"and then no more") == b"and then no more"
        assert bytes(scene.echo.heard) == b"hellolate, and then no more"
        assert now() - began < HELD_S


@both_ways
async def test_silence_passes_nothing_and_keeps_the_connection_open(to_server: bool) -> None:
    async with opened() as scene:
        now = asyncio.get_running_loop().time
        scene.plan("silence", to_server, at_byte=2)
        began = now()
        scene.writer.write(b"unheard")
        await until(lambda: scene.done != [])
        assert scene.done == [pytest.approx(began + HELD_S, abs=0.1)]
        scene.writer.write(b"unheard, too")
        for writer in (scene.connection.to_client, scene.connection.to_server):
            assert not writer.is_closing()
        assert await scene.rest() == b""
        assert now() - began >= HELD_S
        assert bytes(scene.echo.heard) == (b"hello" if to_server else b"hellounheard")
        await until(lambda: not scene.proxy.connections)


@both_ways
@pytest.mark.parametrize("kind", KINDS)
async def test_fault_waiting_for_bytes_is_applied_to_an_idle_connection(kind: Kind, to_server: bool) -> None:
    async with opened() as scene:
        fault = scene.plan(kind, to_server, at_byte=1_000)
        scene.connection.apply_when_idle(fault)
        assert len(scene.done) == 1
        if kind == "delay":
            assert await scene.say(b"late") == b"late"
        else:
            assert await scene.rest() == b""


async def test_fault_that_has_happened_is_not_applied_again() -> None:
    async with opened() as scene:
        fault = scene.plan("delay", True, at_byte=0, seconds=0)
        assert await scene.say(b"now") == b"now"
        scene.connection.apply_when_idle(fault)
        assert len(scene.done) == 1


async def test_gate_refuses_connections_while_its_server_is_down_and_continues() -> None:
    server = await asyncio.start_server(Echo().serve, HOST, 0)
    proxy = FaultyProxy(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    await proxy.open()
    for _ in range(2):
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        async with asyncio.timeout(SOON_S):
            with suppress(ConnectionError):
                assert await reader.read(1) == b""
        writer.close()
    assert proxy.connections == set()
    await proxy.close()
