"""Which server has which keys: one server, a master that sentinels know, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis import raw
from holdfast.storage.redis.connection import ServerConnection
from holdfast.storage.redis.raw import ConnectOptions, NodeAddress, RawConnection

SENTINEL_S = 1.0
"""How long one sentinel may take to answer before the next one is asked."""
REFRESH_S = 0.05
"""Minimum time between two requests for the map of a cluster."""
Node = NodeAddress | None
"""A server; None if there is only one."""
SlotRange = tuple[int, int, NodeAddress]
"""The first slot, the last slot, and the node that has them."""


class NodeLeft(HoldfastError):
    """A node has left the cluster while a command waited for it."""

    code = "MOVED"
    """The caller looks for the key on another node, as after a MOVED error of a server."""


async def ask_first(
    servers: Iterable[ConnectOptions], timeout_s: float, *command: raw.Argument
) -> tuple[ConnectOptions, raw.Reply]:
    """Ask one server after the other, each on its own connection, until one knows the answer. Returns that server and
    its reply. Raises ConnectionError with the last problem if no server knows."""
    trouble = "no server is known"
    for options in servers:
        reply: raw.Reply
        try:
            async with asyncio.timeout(timeout_s):
                connection = await raw.open_connection(options)
                try:
                    (reply,) = await connection.ask(command)
                finally:
                    connection.abort()
        except Exception as error:
            reply = error
        if reply and not isinstance(reply, Exception):
            return options, reply
        trouble = f"{options.place}: {reply!r:.200}"
    raise ConnectionError(trouble)


async def all_ended(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Wait for the end of tasks that were cancelled."""
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


@dataclass(eq=False, repr=False)
class Servers:
    """One server, which has all keys. The subclasses find the server of a key."""

    name: str
    options: ConnectOptions
    _connections: dict[Node, ServerConnection] = field(default_factory=dict[Node, ServerConnection], init=False)
    _closed: bool = field(default=False, init=False)
    clustered = False

    def clone(self) -> Self:
        """Return the same servers for another event loop. The two share no connection."""
        return replace(self)

    def node_of(self, key: str) -> Node:
        """Return the server that has this key."""
        return None

    def connection(self, key: str) -> ServerConnection:
        """Return the connection for commands to the server that has this key."""
        return self.connection_to(self.node_of(key))

    def connection_to(self, node: Node) -> ServerConnection:
        connection = self._connections.get(node)
        if connection is None:
            name = self.name if node is None else f"{node[0]}:{node[1]}"
            connection = self._connections[node] = ServerConnection(name, partial(self._connect, node))
            if self._closed:
                connection.end()
        return connection

    async def open(self, key: str) -> RawConnection:
        """Open another connection to the server that has this key."""
        return await self._connect(self.node_of(key))

    async def _connect(self, node: Node) -> RawConnection:
        return await raw.open_connection(self.options)

    async def on_moved(self, error: Exception) -> None:
        """Find out where keys are, after an error said that one has moved."""
        raise StorageUnavailable(f"{self.name} is part of a cluster ({error}): use redis+cluster://")

    def start(self) -> None:
        """Allow connections on the running event loop, also after `close`."""
        self._connections.clear()
        self._closed = False

    async def close(self) -> None:
        """Close all connections. Every command fails from now on, until `start`."""
        self._closed = True
        await all_ended([connection.end() for connection in self._connections.values()])


@dataclass(eq=False, repr=False)
class SentinelServers(Servers):
    """The master that sentinels name. They are asked whenever a connection is opened."""

    service: str
    sentinels: list[ConnectOptions]

    async def _connect(self, node: Node) -> RawConnection:
        return await raw.open_connection(self.options.at(await self.find_master()))

    async def find_master(self) -> NodeAddress:
        """Ask one sentinel after the other. The one that answers is asked first the next time."""
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        try:
            known_by, (host, port) = await ask_first(self.sentinels, SENTINEL_S, *command)
        except ConnectionError as error:
            raise ConnectionError(f"no sentinel names the master of {self.service!r}: {error}") from error
        self.sentinels = [known_by, *(other for other in self.sentinels if other is not known_by)]
        return host.decode(), int(port)


@dataclass(eq=False, repr=False)
class ClusterServers(Servers):
    """The nodes of a cluster, one connection each, and which node has which slots."""

    seeds: list[NodeAddress]
    _slots: list[SlotRange] = field(default_factory=list[SlotRange], init=False)
    _refreshing: asyncio.Lock = field(init=False)
    _refreshed_at: float = field(default=0.0, init=False)
    clustered = True

    def start(self) -> None:
        super().start()
        self._refreshing = asyncio.Lock()  # It belongs to one event loop.

    def node_of(self, key: str) -> NodeAddress:
        slot = slot_of(key)
        for first, last, address in self._slots:
            if first <= slot <= last:
                return address
        return self.seeds[0]

    async def open(self, key: str) -> RawConnection:
        if not self._slots:
            await self._refresh()
        return await super().open(key)

    async def _connect(self, node: Node) -> RawConnection:
        """Connect to a node. If that fails, find out whether another node has replaced it."""
        assert node is not None
        try:
            return await raw.open_connection(self.options.at(node))
        except (OSError, raw.ServerError):
            await self._refresh()
            if node not in {known for *_, known in self._slots}:
                raise NodeLeft(f"{node[0]}:{node[1]} has left the cluster") from None
            raise

    async def on_moved(self, error: Exception) -> None:
        """Ask for the map once, even if many callers need it at the same time."""
        loop = asyncio.get_running_loop()
        found_at = loop.time()
        if found_at - self._refreshed_at < REFRESH_S:
            await asyncio.sleep(REFRESH_S)
        async with self._refreshing:
            if self._refreshed_at < found_at:
                await self._refresh()

    async def _refresh(self) -> None:
        """Ask known nodes and then the seeds for the map, until one answers."""
        addresses = dict.fromkeys([*(address for *_, address in self._slots), *self.seeds])
        nodes = (self.options.at(address) for address in addresses)
        try:
            asked, reply = await ask_first(nodes, 2 * self.options.connect_timeout_s, "CLUSTER", "SLOTS")
        except ConnectionError as error:
            raise ConnectionError(f"no node of {self.name} says which node has which slots: {error}") from error
        self._slots = [  # A master without a name is the node that was asked.
            (first, last, (master[0].decode() if master[0] else asked.host, master[1]))
            for first, last, master, *_ in reply
        ]
        self._refreshed_at = asyncio.get_running_loop().time()


def slot_of(key: str) -> int:
    """Return the slot of a key, or of its part between the first braces, if that is not empty."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return crc_hqx((tag if brace and end and tag else key).encode(), 0) % 16_384


def address_in(error: Exception) -> NodeAddress:
    """Return the node that an ASK or MOVED error names."""
    host, _, port = str(error).rsplit(" ", 1)[-1].rpartition(":")
    return host, int(port)
