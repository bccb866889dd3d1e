"""Which server has which keys: one server, a master that sentinels know, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from typing import Any, Protocol, Self, cast

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis.connection import ServerConnection
from holdfast.storage.redis.raw import (
    Argument,
    ConnectOptions,
    LoginRefused,
    NodeAddress,
    RawConnection,
    Reply,
    ServerError,
    open_connection,
)
from holdfast.storage.redis.script import Library

SENTINEL_S = 1.0
"""How long one sentinel may take to answer, before the next one is asked."""
REFRESH_S = 0.05
"""A cluster's map is not asked for again within this time."""
SLOTS = 16_384


class NodeLeft(HoldfastError):
    """A node has left the cluster while a command waited for it."""


class Servers(Protocol):
    """Which server has which keys."""

    name: str
    clustered: bool
    database: int

    def clone(self) -> Self:
        """The same servers for another event loop. The two share no connection."""
        ...

    def connection(self, key: str) -> ServerConnection:
        """The connection for commands to the server that has this key."""
        ...

    async def open(self, key: str) -> RawConnection:
        """A new connection to the server that has this key."""
        ...

    def node_of(self, key: str) -> object:
        """Identifies the server that has this key."""
        ...

    async def on_moved(self, error: Exception) -> None:
        """Find out where keys are, after an error said that one has moved."""
        ...

    async def close(self) -> None: ...


async def ask_once(options: ConnectOptions, *args: Argument) -> Reply:
    """The reply to one command, on a connection that is closed afterwards."""
    raw = await open_connection(options)
    try:
        raw.write(args)
        async with asyncio.timeout(options.connect_timeout_s):
            reply = await raw.read()
    finally:
        raw.abort()
    if isinstance(reply, ServerError):
        raise reply
    return reply


class Sentinels:
    """Servers that know which server is the master of a service."""

    def __init__(self, service: str, nodes: list[ConnectOptions]) -> None:
        self.service = service
        self.nodes = nodes

    async def find_master(self) -> NodeAddress:
        """Ask one sentinel after the other. The one that answers is asked first the next time."""
        trouble = "no sentinel is known"
        for options in list(self.nodes):
            try:
                async with asyncio.timeout(SENTINEL_S):
                    reply = await ask_once(options, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            except (OSError, ServerError, LoginRefused) as error:
                trouble = f"{options.place}: {type(error).__name__} {error}".rstrip()
                continue
            if reply is not None:
                self.nodes = [options, *(other for other in self.nodes if other is not options)]
                return reply[0].decode(), int(reply[1])
            trouble = f"{options.place} does not know it"
        raise ConnectionError(f"no sentinel named the master of {self.service!r} ({trouble})")


class OneServer:
    """A server, or the master that sentinels name: they are asked whenever a connection is opened."""

    clustered = False

    def __init__(self, name: str, options: ConnectOptions, sentinels: Sentinels | None = None) -> None:
        self.name = name
        self.database = options.database
        self._options = options
        self._sentinels = sentinels
        self._connection: ServerConnection | None = None

    def clone(self) -> OneServer:
        known = self._sentinels
        return OneServer(self.name, self._options, known and Sentinels(known.service, known.nodes))

    def connection(self, key: str) -> ServerConnection:
        if self._connection is None:
            self._connection = ServerConnection(self.name, lambda: self.open(key))
        return self._connection

    async def open(self, key: str) -> RawConnection:
        options = self._options
        if self._sentinels is not None:
            options = options.at(await self._sentinels.find_master())
        return await open_connection(options)

    def node_of(self, key: str) -> object:
        return None

    async def on_moved(self, error: Exception) -> None:
        raise StorageUnavailable(f"{self.name} is part of a cluster ({error}): use redis+cluster://")

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None  # Only now: calls that fail by this send the next, which must fail as well.


class ClusterServers:
    """The nodes of a cluster, one connection each, and which node has which slots."""

    clustered = True
    database = 0

    def __init__(self, name: str, options: ConnectOptions, seeds: list[NodeAddress]) -> None:
        self.name = name
        self._options = options
        self._seeds = seeds
        self._slots: list[tuple[int, int, NodeAddress]] = []
        self._connections: dict[NodeAddress, ServerConnection] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = 0.0

    def clone(self) -> ClusterServers:
        return ClusterServers(self.name, self._options, self._seeds)

    def connection(self, key: str) -> ServerConnection:
        return self._connection_to(self._address(key))

    async def open(self, key: str) -> RawConnection:
        if not self._slots:
            await self._refresh()
        return await open_connection(self._options.at(self._address(key)))

    def node_of(self, key: str) -> object:
        return self._address(key)

    async def call_importing(
        self, address: NodeAddress, args: tuple[Argument, ...], deadline: float, library: Library | None
    ) -> Reply:
        """Send a command to the node that a slot is being moved to."""
        connection = self._connection_to(address)
        if library is not None:
            await asyncio.gather(connection.call(("FUNCTION", "LOAD", library.text), deadline), return_exceptions=True)
        asking = connection.call(("ASKING",), deadline)
        reply = await connection.call(args, deadline)
        await asking
        return reply

    async def on_moved(self, error: Exception) -> None:
        """Ask for the map once, however many callers find out at the same time."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._refreshed_at < REFRESH_S:
            await asyncio.sleep(REFRESH_S)
        if self._refreshing is None:
            self._refreshing = loop.create_task(self._refresh(), name=f"holdfast slots {self.name}")
            self._refreshing.add_done_callback(self._on_refreshed)
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        connections, self._connections = self._connections, {}
        ending = [self._refreshing, *(connection.end() for connection in connections.values())]
        if self._refreshing is not None:
            self._refreshing.cancel()
        await asyncio.gather(*(task for task in ending if task is not None), return_exceptions=True)

    def _address(self, key: str) -> NodeAddress:
        slot = slot_of(key)
        for first, last, address in self._slots:
            if first <= slot <= last:
                return address
        return self._seeds[0]

    def _connection_to(self, address: NodeAddress) -> ServerConnection:
        if address not in self._connections:
            self._connections[address] = ServerConnection(
                f"{address[0]}:{address[1]}", lambda: self._open_or_find_out(address)
            )
        return self._connections[address]

    async def _open_or_find_out(self, address: NodeAddress) -> RawConnection:
        """Connect to a node. If that fails, see whether another node has replaced it."""
        try:
            return await open_connection(self._options.at(address))
        except (OSError, ServerError):
            await self._refresh()
            if address not in {known for *_, known in self._slots}:
                raise NodeLeft(f"{address[0]}:{address[1]} is not a node of the cluster any more") from None
            raise

    async def _refresh(self) -> None:
        """Ask known nodes and then the seeds for the map, until one answers."""
        trouble = "no node is known"
        for address in dict.fromkeys([*(address for *_, address in self._slots), *self._seeds]):
            try:
                reply = await ask_once(self._options.at(address), "CLUSTER", "SLOTS")
            except (OSError, ServerError, LoginRefused) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if isinstance(reply, list) and reply:
                self._slots = _read_slots(cast("Any", reply), address)
                self._refreshed_at = asyncio.get_running_loop().time()
                return
            trouble = f"{address[0]}:{address[1]} answered {reply!r:.100}"
        raise ConnectionError(f"no node of {self.name} answered where the slots are ({trouble})")

    def _on_refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()  # Callers that wait get it; if all were cancelled, it is not reported as lost.


def slot_of(key: str) -> int:
    """The slot of a key, or of its part between the first braces, if that is not empty."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return crc_hqx((tag if brace and end and tag else key).encode(), 0) % SLOTS


def _read_slots(reply: list[Any], asked: NodeAddress) -> list[tuple[int, int, NodeAddress]]:
    """The ranges of CLUSTER SLOTS and their masters. A master without a name is the node that was asked."""
    slots: list[tuple[int, int, NodeAddress]] = []
    for first, last, master, *_ in reply:
        host = master[0].decode() if master[0] else ""
        slots.append((first, last, (host or asked[0], master[1])))
    return slots


def address_in(error: ServerError) -> NodeAddress:
    """The node that an ASK or MOVED names."""
    host, _, port = str(error).rsplit(" ", 1)[-1].rpartition(":")
    return host, int(port)
