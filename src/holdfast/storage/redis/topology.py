"""Which server has which keys: one server, a master that sentinels know, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, cast

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

SENTINEL_S = 1.0
"""How long one sentinel may take to answer, before the next one is asked."""
REFRESH_S = 0.05
"""A cluster's map is not asked for again within this time."""
Node = NodeAddress | None
"""A server; None if there is only one."""
SlotRange = tuple[int, int, NodeAddress]


class NodeLeft(HoldfastError):
    """A node has left the cluster while a command waited for it."""

    code = "MOVED"


async def ask_once(options: ConnectOptions, *args: Argument) -> Reply:
    """The reply to one command, on a connection that is closed afterwards."""
    raw = await open_connection(options)
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            (reply,) = await raw.ask(args)
    finally:
        raw.abort()
    if isinstance(reply, Exception):
        raise reply
    return reply


async def all_ended(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Wait for the end of tasks that were cancelled."""
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


@dataclass(eq=False, repr=False)
class Servers:
    """One server, which has all keys. The subclasses find the server of a key."""

    name: str
    options: ConnectOptions
    _connections: dict[Node, ServerConnection] = field(default_factory=dict[Node, ServerConnection], init=False)
    clustered = False

    def clone(self) -> Self:
        """The same servers for another event loop. The two share no connection."""
        return replace(self)

    def node_of(self, key: str) -> Node:
        """The server that has this key."""
        return None

    def connection(self, key: str) -> ServerConnection:
        """The connection for commands to the server that has this key."""
        return self.connection_to(self.node_of(key))

    def connection_to(self, node: Node) -> ServerConnection:
        connection = self._connections.get(node)
        if connection is None:
            name = self.name if node is None else f"{node[0]}:{node[1]}"
            connection = self._connections[node] = ServerConnection(name, partial(self._connect, node))
        return connection

    async def open(self, key: str) -> RawConnection:
        """A new connection to the server that has this key."""
        return await self._connect(self.node_of(key))

    async def _connect(self, node: Node) -> RawConnection:
        return await open_connection(self.options)

    async def on_moved(self, error: Exception) -> None:
        """Find out where keys are, after an error said that one has moved."""
        raise StorageUnavailable(f"{self.name} is part of a cluster ({error}): use redis+cluster://")

    async def close(self) -> None:
        await all_ended([connection.end() for connection in self._connections.values()])
        self._connections.clear()  # Only now: calls that fail by this send the next, which must fail as well.


@dataclass(eq=False, repr=False)
class SentinelServers(Servers):
    """The master that sentinels name: they are asked whenever a connection is opened."""

    service: str
    sentinels: list[ConnectOptions]

    async def _connect(self, node: Node) -> RawConnection:
        return await open_connection(self.options.at(await self.find_master()))

    async def find_master(self) -> NodeAddress:
        """Ask one sentinel after the other. The one that answers is asked first the next time."""
        trouble = "no sentinel is known"
        for options in self.sentinels:
            try:
                async with asyncio.timeout(SENTINEL_S):
                    reply = await ask_once(options, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            except (OSError, ServerError, LoginRefused) as error:
                trouble = f"{options.place}: {type(error).__name__} {error}".rstrip()
                continue
            if reply is not None:
                self.sentinels = [options, *(other for other in self.sentinels if other is not options)]
                return reply[0].decode(), int(reply[1])
            trouble = f"{options.place} does not know it"
        raise ConnectionError(f"no sentinel named the master of {self.service!r} ({trouble})")


@dataclass(eq=False, repr=False)
class ClusterServers(Servers):
    """The nodes of a cluster, one connection each, and which node has which slots."""

    seeds: list[NodeAddress]
    _slots: list[SlotRange] = field(default_factory=list[SlotRange], init=False)
    _refreshing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _refreshed_at: float = field(default=0.0, init=False)
    clustered = True

    def node_of(self, key: str) -> NodeAddress:
        slot = slot_of(key)
        for first, last, address in self._slots:
            if first <= slot <= last:
                return address
        return self.seeds[0]

    async def open(self, key: str) -> RawConnection:
        if not self._slots:
            await self._refresh()
        return await open_connection(self.options.at(self.node_of(key)))

    async def _connect(self, node: Node) -> RawConnection:
        """Connect to a node. If that fails, see whether another node has replaced it."""
        assert node is not None
        try:
            return await open_connection(self.options.at(node))
        except (OSError, ServerError):
            await self._refresh()
            if node not in {known for *_, known in self._slots}:
                raise NodeLeft(f"{node[0]}:{node[1]} is not a node of the cluster any more") from None
            raise

    async def on_moved(self, error: Exception) -> None:
        """Ask for the map once, however many callers find out at the same time."""
        loop = asyncio.get_running_loop()
        found_at = loop.time()
        if found_at - self._refreshed_at < REFRESH_S:
            await asyncio.sleep(REFRESH_S)
        async with self._refreshing:
            if self._refreshed_at < found_at:
                await self._refresh()

    async def _refresh(self) -> None:
        """Ask known nodes and then the seeds for the map, until one answers."""
        trouble = "no node is known"
        for address in dict.fromkeys([*(address for *_, address in self._slots), *self.seeds]):
            try:
                reply = await ask_once(self.options.at(address), "CLUSTER", "SLOTS")
            except (OSError, ServerError, LoginRefused) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if isinstance(reply, list) and reply:
                self._slots = [  # A master without a name is the node that was asked.
                    (first, last, (master[0].decode() if master[0] else address[0], master[1]))
                    for first, last, master, *_ in cast("Any", reply)
                ]
                self._refreshed_at = asyncio.get_running_loop().time()
                return
            trouble = f"{address[0]}:{address[1]} answered {reply!r:.100}"
        raise ConnectionError(f"no node of {self.name} answered where the slots are ({trouble})")


def slot_of(key: str) -> int:
    """The slot of a key, or of its part between the first braces, if that is not empty."""
    _, brace, rest = key.partition("{")
    tag, end, _ = rest.partition("}")
    return crc_hqx((tag if brace and end and tag else key).encode(), 0) % 16_384


def address_in(error: Exception) -> NodeAddress:
    """The node that an ASK or MOVED names."""
    host, _, port = str(error).rsplit(" ", 1)[-1].rpartition(":")
    return host, int(port)
