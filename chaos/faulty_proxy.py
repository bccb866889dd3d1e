"""A proxy that disturbs connections at any byte. Each process reaches the server through its own proxy.

The proxy does not know the protocol. A fault waits until a number of bytes has passed in one direction, and then cuts
the connection, delays it, passes a part of a message and closes, or stays silent: the connection stays open, and no
byte passes.
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
class ConnectionFault:
    """A fault that a connection will have."""

    kind: Kind
    to_server: bool
    bytes_left: int
    seconds: float
    """How long a delay lasts, or a silence until the connection is closed."""
    on_done: Callable[[float], None]
    """Called with the time until which the connection is disturbed."""


@dataclass(eq=False)
class Connection:
    """A connection of a client, and the connection to the server that belongs to it."""

    number: int
    to_client: asyncio.StreamWriter
    to_server: asyncio.StreamWriter
    fault: ConnectionFault | None = None
    silent: bool = False
    held_until: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: bool) -> None:
        try:
            while data := await reader.read(CHUNK):
                fault = self.fault
                if fault is not None and fault.to_server == to_server:
                    if fault.bytes_left >= len(data):
                        fault.bytes_left -= len(data)
                    else:
                        data = self._apply(fault, data)
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

    def _apply(self, fault: ConnectionFault, data: bytes) -> bytes:
        """Apply the fault. Returns the data that still passes."""
        self.fault = None
        now = asyncio.get_running_loop().time()
        passing = data[: fault.bytes_left]
        match fault.kind:
            case "cut":
                self.abort(reset=True)
                fault.on_done(now)
                return b""
            case "truncate":
                (self.to_server if fault.to_server else self.to_client).write(passing)
                self.close()
                fault.on_done(now)
                return b""
            case "silence":
                self.silent = True
                asyncio.get_running_loop().call_later(fault.seconds, self.abort)
                fault.on_done(now + fault.seconds)
                return b""
            case "delay":
                self.held_until = now + fault.seconds
                fault.on_done(self.held_until)
                return data

    def apply_when_idle(self, fault: ConnectionFault) -> None:
        """Apply the fault to an idle connection, if it is still waiting for bytes."""
        if self.fault is fault:
            self._apply(fault, b"")

    def close(self) -> None:
        for writer in (self.to_client, self.to_server):
            if not writer.is_closing():
                writer.close()

    def abort(self, reset: bool = False) -> None:
        """Close both sides at once; with `reset` they get an error instead of an end of file."""
        self.silent = True
        for writer in (self.to_client, self.to_server):
            connection = writer.get_extra_info("socket")
            if connection.fileno() >= 0:  # One that is closed cannot be aborted.
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()


class FaultyProxy:
    """A listener in front of the server, for one process."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._numbers = itertools.count()
        self.connections: set[Connection] = set()
        self.port = 0

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._listener.close()
        for connection in list(self.connections):
            connection.abort()
        await asyncio.gather(*(task for connection in list(self.connections) for task in connection.tasks))

    async def _accept(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(HOST, self._server_port)
        except OSError:
            to_client.transport.abort()
            return
        connection = Connection(next(self._numbers), to_client, to_server)
        self.connections.add(connection)
        connection.tasks = [
            asyncio.create_task(connection.forward(from_client, to_server, True)),
            asyncio.create_task(connection.forward(from_server, to_client, False)),
        ]
        await asyncio.gather(*connection.tasks)
        self.connections.discard(connection)
