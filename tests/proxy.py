"""A proxy between a client and a server that speaks the Redis protocol, for tests of what gets lost on the way.

It knows where commands and replies begin and end, so a test decides about whole ones: let this reply pass, lose that
one after the server has done the work, deliver a command long after its client has gone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

HOST = "127.0.0.1"
CHUNK = 1 << 18
SLOW_CHUNK = 1 << 13
SUBSCRIBE = {"SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"}


@dataclass
class Exchange:
    """A command, and its reply once that has arrived.

    The number counts the commands of the whole proxy from 0, and the connection its client connections likewise.
    """

    command: list[bytes]
    number: int
    connection: int
    reply: bytes = b""

    @property
    def name(self) -> str:
        """The command's name in capitals, such as EVALSHA."""
        return self.command[0].decode().upper()


Hook = Callable[[Exchange], str]


class Proxy:
    """Listens on `port` for as long as its `async with` block, and forwards to the server's port.

    `before` is asked when a whole command has arrived and has not been forwarded yet. It answers

    * "pass";
    * "cut": close the connection, the server never sees the command;
    * "hold": close the client's side, and keep the command until `release` delivers it, as a delayed first copy;
    * "error:TEXT": the client gets the error TEXT, the server never sees the command;
    * "stall": from now on nothing passes on this connection either way, though it stays open.

    `rule` is asked when the reply has arrived and has not been passed on yet. It answers

    * "pass";
    * "cut": close the connection, so the server did it and the client never learns;
    * "half": send the first half of the reply, then close the connection.

    Bytes that were forwarded before a connection is closed still reach the server, and the log has its replies. What a
    client had sent behind the command that closed its connection is lost. A connection is passed through unseen once
    it has subscribed. An error in a hook closes the connection, and is raised at the end of the block.
    MONITOR and CLIENT REPLY are not understood.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.port = 0
        self.before: Hook | None = None
        self.rule: Hook | None = None
        self.refuse = False
        self.log: list[Exchange] = []
        self.numbers = itertools.count()
        self.held: list[tuple[_Connection, Exchange, bytes]] = []
        self._connections: list[_Connection] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def cut_all(self) -> None:
        """Close all connections that clients have now. Held commands are not affected: their clients are gone."""
        for connection in self._connections:
            connection.hang_up()

    async def release(self) -> list[bytes]:
        """Send all held commands, one after the other, and return their replies, which no client gets."""
        held, self.held = self.held, []
        return [await connection.deliver(exchange, data) for connection, exchange, data in held]

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse = True
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            await connection.abort()
        await self._listener.wait_closed()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                raise outcome

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, len(self._connections), reader, writer)
        self._connections.append(connection)
        if self.refuse:
            writer.close()
        else:
            self.spawn(connection.run())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))


@dataclass
class _Due:
    """A reply that is to come. One that a released command waits for goes to `waiter` and not to the client."""

    exchange: Exchange
    waiter: asyncio.Future[bytes] | None = None


class _Connection:
    """A client's connection, and the server's that belongs to it."""

    to_server: asyncio.StreamWriter | None = None
    mute = False  # nothing more is passed on, neither from the client nor to it
    stalled = False
    held = False
    subscribed = False
    ended = False  # the server will say no more

    def __init__(
        self, proxy: Proxy, number: int, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        self.proxy = proxy
        self.number = number
        self.from_client = from_client
        self.to_client = to_client
        self.due: deque[_Due] = deque()

    async def run(self) -> None:
        try:
            from_server, self.to_server = await asyncio.open_connection(HOST, self.proxy.server_port)
        except OSError:
            self.to_client.close()
            return
        if self.mute:  # cut while it was being opened
            self.to_server.close()
            return
        self.proxy.spawn(self._read_commands(self.to_server))
        self.proxy.spawn(self._read_replies(from_server, self.to_server))

    def hang_up(self) -> None:
        """Close both sides. What was forwarded already is done all the same: the server learns that its client is
        gone after it has read everything, and its replies are read to the end."""
        self.mute = True
        self.to_client.close()
        if self.to_server is not None and not self.held:
            with suppress(OSError):  # it was closed by the server
                self.to_server.write_eof()

    async def deliver(self, exchange: Exchange, data: bytes) -> bytes:
        """Send the held command after all, and wait for its reply."""
        if self.ended or self.to_server is None:
            raise ConnectionResetError("the server closed the connection of a held command")
        waiter: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.due.append(_Due(exchange, waiter))
        self.to_server.write(data)
        try:
            return await waiter
        finally:
            self.held = False
            self.hang_up()

    async def abort(self) -> None:
        for writer in (self.to_client, self.to_server):
            if writer is not None:
                # A transport that sent its last bytes after `close` has forgotten its loop, and fails to abort.
                if writer.get_extra_info("socket").fileno() >= 0:
                    writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()

    async def _read_commands(self, to_server: asyncio.StreamWriter) -> None:
        buffer = bytearray()
        try:
            while chunk := await self.from_client.read(CHUNK):
                buffer += chunk
                while not (self.mute or self.subscribed) and (length := frame(buffer)):
                    self._take_command(cut_off(buffer, length), to_server)
                if self.subscribed and not self.mute:
                    to_server.write(cut_off(buffer, len(buffer)))
                if self.mute:
                    buffer.clear()
                else:
                    with suppress(ConnectionError):  # then the server's silence ends the connection
                        await to_server.drain()
        except ConnectionError:
            pass  # the client went away without a word, which is the same as with one
        finally:
            self.hang_up()

    def _take_command(self, data: bytes, to_server: asyncio.StreamWriter) -> None:
        exchange = Exchange(parts(data), next(self.proxy.numbers), self.number)
        self.proxy.log.append(exchange)
        verdict = self.proxy.before(exchange) if self.proxy.before else "pass"
        if verdict == "pass":
            if exchange.name in SUBSCRIBE:
                self.subscribed = True
            else:
                self.due.append(_Due(exchange))
            to_server.write(data)
        elif verdict == "cut":
            self.hang_up()
        elif verdict == "hold":
            self.held = True
            self.hang_up()
            self.proxy.held.append((self, exchange, data))
        elif verdict == "stall":
            self.mute = self.stalled = True
        elif verdict.startswith("error:"):
            exchange.reply = b"-%b\r\n" % verdict.removeprefix("error:").encode()
            self.due.append(_Due(exchange))
            self._answer_what_is_ready()
        else:
            raise ValueError(f"before: {verdict!r}")

    async def _read_replies(self, from_server: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        buffer = bytearray()
        try:
            while chunk := await from_server.read(CHUNK):
                buffer += chunk
                while not self._passing_through and (length := frame(buffer)):
                    self._take_reply(cut_off(buffer, length))
                if self._passing_through:
                    self._answer(cut_off(buffer, len(buffer)))
                if not self.mute:
                    with suppress(ConnectionError):  # the other direction sees to a client that has gone
                        await self.to_client.drain()
        except ConnectionError:
            pass  # the server died, which ends the connection as its farewell does
        finally:
            self._end(to_server)

    def _take_reply(self, data: bytes) -> None:
        if data.startswith(b">") or not self.due:  # a push, or a refusal to serve this client: not a reply to a call
            self._answer(data)
            return
        due = self.due.popleft()
        exchange = due.exchange
        exchange.reply = data
        if due.waiter is not None:
            if not due.waiter.done():
                due.waiter.set_result(data)
            return
        verdict = "pass"
        if self.proxy.rule and not self.mute:
            verdict = self.proxy.rule(exchange)
        if verdict == "pass":
            self._answer(data)
        elif verdict == "cut":
            self.hang_up()
        elif verdict == "half":
            self._answer(data[: len(data) // 2])
            self.hang_up()
        else:
            raise ValueError(f"rule: {verdict!r}")
        self._answer_what_is_ready()

    def _answer_what_is_ready(self) -> None:
        """Errors of the proxy's own making wait here for the replies to the commands before them."""
        while self.due and self.due[0].exchange.reply:
            self._answer(self.due.popleft().exchange.reply)

    def _answer(self, data: bytes) -> None:
        if not self.mute and not self.to_client.is_closing():
            self.to_client.write(data)

    @property
    def _passing_through(self) -> bool:
        return self.subscribed and not self.due

    def _end(self, to_server: asyncio.StreamWriter) -> None:
        self.ended = True
        to_server.close()
        if not self.stalled:
            self.to_client.close()
        for due in self.due:
            if due.waiter is not None and not due.waiter.done():
                due.waiter.set_exception(ConnectionResetError("the server did not answer a held command"))


@asynccontextmanager
async def slow_link(server_port: int, bytes_per_s: int) -> AsyncGenerator[str]:
    """Limit the bytes per second to a server and back. Yields the URL of this side."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    def prepare(sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_CHUNK
        )  # Bytes wait at their sender, as on a slow link.

    async def relay(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := await loop.sock_recv(source, SLOW_CHUNK):
                await loop.sock_sendall(sink, chunk)
                await asyncio.sleep(len(chunk) / bytes_per_s)

    async def connect(client: socket.socket) -> None:
        with client, socket.create_connection((HOST, server_port)) as server:
            prepare(client)
            prepare(server)
            both = asyncio.create_task(relay(client, server)), asyncio.create_task(relay(server, client))
            tasks.extend(both)
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)

    async def accept(listener: socket.socket) -> None:
        while True:
            client, _ = await loop.sock_accept(listener)
            tasks.append(asyncio.create_task(connect(client)))

    with socket.create_server((HOST, 0)) as listener:
        prepare(listener)
        tasks.append(asyncio.create_task(accept(listener)))
        try:
            yield f"redis://{HOST}:{listener.getsockname()[1]}"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def frame(buffer: bytes | bytearray) -> int | None:
    """The length of the first value in the buffer, or None while its end has not arrived."""
    at, due = 0, 1
    while due:
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        kind, line = chr(buffer[at]), buffer[at + 1 : end]
        at = end + 2
        due -= 1
        if kind in "$!=":
            if (length := int(line)) >= 0:
                at += length + 2
        elif kind in "*~>":
            due += max(int(line), 0)
        elif kind == "%":
            due += 2 * int(line)
        elif kind == "|":  # attributes, and the value that they belong to
            due += 2 * int(line) + 1
        elif kind not in "+-:_,#(":
            raise ValueError(f"not the Redis protocol: {bytes(buffer[:80])!r}")
    return at if at <= len(buffer) else None


def parts(command: bytes) -> list[bytes]:
    """The words of a command, which is an array of strings."""
    found: list[bytes] = []
    at = command.index(b"\r\n") + 2
    while at < len(command):
        start = command.index(b"\r\n", at) + 2
        length = int(command[at + 1 : start - 2])
        found.append(command[start : start + length])
        at = start + length + 2
    return found


def cut_off(buffer: bytearray, length: int) -> bytes:
    """Take bytes from the start of the buffer."""
    data = bytes(memoryview(buffer)[:length])
    del buffer[:length]
    return data
