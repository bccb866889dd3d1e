"""A proxy that wrecks connections at any byte: everybody who takes part has a gate of its own to the server.

Nothing is known here of what the bytes mean. A wreck waits until so many bytes have passed in one direction, and then
cuts the connection, holds it up, lets only a part of what has come through and closes, or falls silent: the
connection stays open, and nothing passes any more.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

HOST = "127.0.0.1"
CHUNK = 1 << 16
Kind = Literal["cut", "delay", "truncate", "silence"]
KINDS: tuple[Kind, ...] = ("cut", "delay", "truncate", "silence")


@dataclass
class Wreck:
    """What is to happen to a connection, and what it tells once that has."""

    kind: Kind
    to_server: bool
    bytes_left: int
    seconds: float
    """How long a delay lasts, or a silence, before the connection is closed at last."""
    done: Callable[[float], None]
    """Called with the time until which the connection is of no use."""


@dataclass(eq=False)
class Passage:
    """One connection of a client, and its own to the server."""

    number: int
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter
    wreck: Wreck | None = None
    silent: bool = False
    held_until: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: bool) -> None:
        try:
            while data := await reader.read(CHUNK):
                wreck = self.wreck
                if wreck is not None and wreck.to_server == to_server:
                    if wreck.bytes_left >= len(data):
                        wreck.bytes_left -= len(data)
                    else:
                        data = self._happen(wreck, data)
                if self.silent:
                    continue
                await asyncio.sleep(max(self.held_until - asyncio.get_running_loop().time(), 0))
                writer.write(data)
                await writer.drain()
        except (ConnectionError, OSError):
            pass
        finally:
            if not self.silent:
                self.close()

    def _happen(self, wreck: Wreck, data: bytes) -> bytes:
        """Now. What of the data still passes."""
        self.wreck = None
        now = asyncio.get_running_loop().time()
        passing = data[: wreck.bytes_left]
        match wreck.kind:
            case "cut":
                self.abort(reset=True)
                wreck.done(now)
                return b""
            case "truncate":
                (self.to_server if wreck.to_server else self.to_client).write(passing)
                self.close()
                wreck.done(now)
                return b""
            case "silence":
                self.silent = True
                asyncio.get_running_loop().call_later(wreck.seconds, self.abort)
                wreck.done(now + wreck.seconds)
                return b""
            case "delay":
                self.held_until = now + wreck.seconds
                wreck.done(self.held_until)
                return data

    def give_up_waiting(self, wreck: Wreck) -> None:
        """Nothing has passed for long: then let it happen to a connection that is idle."""
        if self.wreck is wreck:
            self._happen(wreck, b"")

    def close(self) -> None:
        for writer in (self.to_client, self.to_server):
            if not writer.is_closing():
                writer.close()

    def abort(self, reset: bool = False) -> None:
        """Close both sides at once; with `reset` the others learn of it by an error, not by an end."""
        self.silent = True
        for writer in (self.to_client, self.to_server):
            connection = writer.get_extra_info("socket")
            if connection.fileno() >= 0:  # One that is closed cannot be aborted.
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()


class Gate:
    """Where one process finds the server."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._numbers = itertools.count()
        self.passages: set[Passage] = set()
        self.port = 0

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._listener.close()
        for passage in list(self.passages):
            passage.abort()
        await asyncio.gather(*(task for passage in list(self.passages) for task in passage.tasks))

    async def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(HOST, self._server_port)
        except OSError:
            to_client.transport.abort()
            return
        passage = Passage(next(self._numbers), to_client, to_server)
        self.passages.add(passage)
        passage.tasks = [
            asyncio.create_task(passage.carry(from_client, to_server, True)),
            asyncio.create_task(passage.carry(from_server, to_client, False)),
        ]
        await asyncio.gather(*passage.tasks)
        self.passages.discard(passage)
