"""Where the servers are: one of them, a master that sentinels know, or the nodes of a cluster. URLs end here.

redis-py does what it does well: it reads URLs, opens sockets, speaks TLS, authenticates, asks sentinels. Its own
retries are off: a call may be repeated only by someone who numbers it.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any, Protocol, Self, cast
from urllib.parse import SplitResult, unquote, urlsplit

import hiredis
from redis.asyncio import Connection, Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as LinkError
from redis.exceptions import RedisError

from holdfast.errors import HoldfastError, OptionError, StorageUnavailable
from holdfast.storage.redis.connection import (
    NOTHING,
    Argument,
    RawConnection,
    Reply,
    ServerConnection,
    ServerError,
    new_reader,
    packed,
)
from holdfast.storage.redis.script import Library

CONNECT_S = 5.0
"""How long one attempt to connect may take, name look-up and handshake included."""
SENTINEL_PORT = 26379
REFRESH_S = 0.05
"""A cluster's map is not asked for again within this time."""
OURS = ("timeout", "eviction")
"""Options of a URL that are Holdfast's own; all others are redis-py's."""


class _TakeoverMixin:
    """What a redis-py connection lacks for our use: to write without waiting, to read whatever comes next, and to be
    taken over once it is open."""

    _writer: asyncio.StreamWriter
    _reader: asyncio.StreamReader
    _taken: asyncio.StreamWriter
    _replies: hiredis.Reader | None = None

    def write(self, *args: Argument) -> None:
        self._writer.write(packed(args))

    async def read(self) -> Reply:
        if self._replies is None:
            self._replies = new_reader()
        while (reply := self._replies.gets()) is NOTHING:
            data = await self._reader.read(65536)
            if not data:
                raise LinkError("the connection was closed")
            self._replies.feed(data)
        return reply

    def attach(self, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        self._taken = self._writer  # To keep it: it closes its transport when nobody does.
        self._writer = self._reader = None  # type: ignore[assignment] # pyright: ignore
        transport = self._taken.transport
        transport.set_protocol(protocol)
        return transport


def _link(kind: type[AbstractConnection], options: dict[str, Any]) -> RawConnection:
    """A connection of redis-py, not open yet: replies undecoded, no retries, no read time-outs of its own."""
    ours: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_S,
        "socket_keepalive": True,
        "health_check_interval": 0,
        "decode_responses": False,
        "protocol": 2,
    }
    if not issubclass(kind, Connection):
        del ours["socket_keepalive"]
    line = type("Line", (_TakeoverMixin, kind), {})
    return cast(RawConnection, line(**{**options, **ours}))


async def _opened(link: RawConnection) -> RawConnection:
    try:
        async with asyncio.timeout(CONNECT_S):
            await link.connect()
    except BaseException:
        await link.disconnect(nowait=True)
        raise
    return link


class NodeLeft(HoldfastError):
    """A node of a cluster has left the map while something waited for it."""


class Servers(Protocol):
    """Which server has which keys."""

    name: str
    clustered: bool
    database: int

    def clone(self) -> Self:
        """The same servers for another event loop: nothing that belongs to a loop is shared."""
        ...

    def wire(self, key: str) -> ServerConnection:
        """The connection to whoever has this key."""
        ...

    async def link(self, key: str) -> RawConnection:
        """A new connection of its own to whoever has this key."""
        ...

    def place(self, key: str) -> object:
        """Which server that is: the same for all keys that it has."""
        ...

    async def moved(self, error: Exception) -> None:
        """A key is not where it was thought to be."""
        ...

    async def close(self) -> None: ...


class OneServer:
    """A server, or the master that sentinels name: looked up whenever a connection is made."""

    clustered = False

    def __init__(self, name: str, kind: type[AbstractConnection], options: dict[str, Any], keeper: object = None):
        self.name = name
        self.database = int(options.get("db") or 0)
        self._kind = kind
        self._options = options
        self._keeper = keeper
        """What must live for as long as we do: a sentinel's pool, which its connections know only weakly."""
        self.owned: list[Redis] = []
        """Clients that were made on the way, to be closed with us."""
        self._wire: ServerConnection | None = None

    def clone(self) -> OneServer:
        if isinstance(self._keeper, Redis) and isinstance(self._keeper.connection_pool, SentinelConnectionPool):
            return _of_sentinels(self._keeper.connection_pool, self.name)
        return OneServer(self.name, self._kind, self._options)

    def wire(self, key: str) -> ServerConnection:
        if self._wire is None:
            self._wire = ServerConnection(self.name, lambda: self.link(key))
        return self._wire

    async def link(self, key: str) -> RawConnection:
        return await _opened(_link(self._kind, self._options))

    def place(self, key: str) -> object:
        return None

    async def moved(self, error: Exception) -> None:
        raise StorageUnavailable(f"{self.name} is part of a cluster ({error}): use redis+cluster://")

    async def close(self) -> None:
        if self._wire is not None:
            await self._wire.close()
            self._wire = None
        for client in self.owned:
            await client.aclose()


NodeAddress = tuple[str, int]


class ClusterServers:
    """The nodes of a cluster, one connection each, and which has which slots."""

    clustered = True
    database = 0

    def __init__(self, name: str, kind: type[AbstractConnection], options: dict[str, Any], seeds: list[NodeAddress]):
        self.name = name
        self._kind = kind
        self._options = options
        self._seeds = seeds
        self._slots: list[tuple[int, int, NodeAddress]] = []
        self._wires: dict[NodeAddress, ServerConnection] = {}
        self._refreshing: asyncio.Future[None] | None = None
        self._refreshed_at = 0.0

    def clone(self) -> ClusterServers:
        return ClusterServers(self.name, self._kind, self._options, self._seeds)

    def wire(self, key: str) -> ServerConnection:
        return self._wire_to(self._address(key))

    async def link(self, key: str) -> RawConnection:
        if not self._slots:
            await self._refresh()
        return await self._link_to(self._address(key))

    def place(self, key: str) -> object:
        return self._address(key)

    async def ask(
        self, address: NodeAddress, args: tuple[Argument, ...], deadline: float, library: Library | None
    ) -> Reply:
        """Send a command to the node that a slot is being moved to."""
        wire = self._wire_to(address)
        if library is not None:
            await asyncio.gather(wire.call(("FUNCTION", "LOAD", library.text), deadline), return_exceptions=True)
        asking = wire.call(("ASKING",), deadline)
        reply = await wire.call(args, deadline)
        await asking
        return reply

    async def moved(self, error: Exception) -> None:
        """Ask for the map again, however many callers find out at once."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._refreshed_at < REFRESH_S:
            await asyncio.sleep(REFRESH_S)
        if self._refreshing is None:
            self._refreshing = asyncio.ensure_future(self._refresh())
            self._refreshing.add_done_callback(lambda _: setattr(self, "_refreshing", None))
        await asyncio.shield(self._refreshing)

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            await wire.close()

    def _address(self, key: str) -> NodeAddress:
        slot = key_slot(key.encode())
        for first, last, address in self._slots:
            if first <= slot <= last:
                return address
        return self._seeds[0]

    def _wire_to(self, address: NodeAddress) -> ServerConnection:
        if address not in self._wires:
            self._wires[address] = ServerConnection(f"{address[0]}:{address[1]}", lambda: self._link_or_gone(address))
        return self._wires[address]

    async def _link_or_gone(self, address: NodeAddress) -> RawConnection:
        """A link to a node; if there is none to be had, see whether another has taken its place."""
        try:
            return await self._link_to(address)
        except (RedisError, OSError, TimeoutError):
            await self._refresh()
            if address not in {known for *_, known in self._slots}:
                raise NodeLeft(f"{address[0]}:{address[1]} is no node of the cluster any more") from None
            raise

    async def _link_to(self, address: NodeAddress) -> RawConnection:
        return await _opened(_link(self._kind, {**self._options, "host": address[0], "port": address[1]}))

    async def _refresh(self) -> None:
        """Ask any node that answers, those we know and those we were told of, for the map."""
        trouble = "no node is known"
        for address in dict.fromkeys([*(address for *_, address in self._slots), *self._seeds]):
            try:
                link = await self._link_to(address)
                try:
                    link.write("CLUSTER", "SLOTS")
                    async with asyncio.timeout(CONNECT_S):
                        reply: Any = await link.read()
                finally:
                    await link.disconnect(nowait=True)
            except (RedisError, OSError, TimeoutError) as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if isinstance(reply, list) and reply:
                self._slots = _slots(cast("Any", reply), address)
                self._refreshed_at = asyncio.get_running_loop().time()
                return
            trouble = f"{address[0]}:{address[1]} answered {reply!r:.100}"
        raise LinkError(f"no node of {self.name} told where the slots are ({trouble})")


def _slots(reply: list[Any], asked: NodeAddress) -> list[tuple[int, int, NodeAddress]]:
    """The ranges of CLUSTER SLOTS and their masters. A node that does not know its own name is the one asked."""
    slots: list[tuple[int, int, NodeAddress]] = []
    for first, last, master, *_ in reply:
        host = master[0].decode() if master[0] else asked[0]
        slots.append((first, last, (host or asked[0], master[1])))
    return slots


def address_in(error: ServerError) -> NodeAddress:
    """The node that an ASK or MOVED names."""
    host, _, port = str(error).rsplit(" ", 1)[-1].rpartition(":")
    return host, int(port)


def find(url: str, shown: str) -> tuple[Servers, dict[str, str]]:
    """The servers that a URL names, and what it says to Holdfast itself. `shown` is the URL as errors may show it."""
    try:
        parts = urlsplit(url)
        return _find(parts, shown)
    except OptionError:
        raise
    except TypeError as error:
        raise OptionError(f"{shown!r:.120} has an option that redis-py does not know: {error}") from None
    except (ValueError, RedisError) as error:
        raise OptionError(f"{shown!r:.120} is not a URL of a server: {error}") from None


def _find(parts: SplitResult, shown: str) -> tuple[Servers, dict[str, str]]:
    scheme, netloc, path = parts.scheme, parts.netloc, parts.path
    credentials, at, hosts = netloc.rpartition("@")
    several = scheme in ("redis+sentinel", "redis+cluster")
    if "," in hosts and not several:
        raise OptionError(f"{shown!r:.120} names several hosts: use redis+sentinel:// or redis+cluster://")
    addresses = [_address(host, SENTINEL_PORT if scheme == "redis+sentinel" else 6379) for host in hosts.split(",")]
    service = ""
    if scheme == "redis+sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise OptionError(f"{shown!r:.120} names no master: write redis+sentinel://host:26379/SERVICE/0")
    database = path.strip("/")
    if database and not database.isdigit():
        raise OptionError(f"{shown!r:.120} has a database that is no number: {database!r:.40}")
    plain = "rediss" if scheme in ("rediss", "valkeys") else "redis"
    options: dict[str, Any] = dict(parse_url(f"{plain}://{credentials}{at}host/{database}?{parts.query}"))
    options["host"], options["port"] = addresses[0]
    ours = {name: str(options.pop(name)) for name in OURS if name in options}
    kind = cast("type[AbstractConnection]", options.pop("connection_class", Connection))
    if options.pop("ssl", "") in ("1", "true", "True"):
        kind = SSLConnection
    known = {name: value for name, value in options.items() if not (service and name.startswith("sentinel_"))}
    _link(kind, known)  # Raises for an option that redis-py does not know.
    if scheme == "redis+cluster":
        if options.pop("db", 0):
            raise OptionError(f"{shown!r:.120}: a cluster has only database 0")
        return ClusterServers(shown, kind, options, addresses), ours
    if service:
        return _behind_sentinels(shown, service, addresses, kind, options), ours
    return OneServer(shown, kind, options), ours


def _address(text: str, port: int) -> NodeAddress:
    parts = urlsplit(f"//{text}")
    return unquote(parts.hostname or "localhost"), parts.port or port


def _behind_sentinels(
    shown: str, service: str, addresses: list[NodeAddress], kind: type[AbstractConnection], options: dict[str, Any]
) -> OneServer:
    asking = {"socket_connect_timeout": CONNECT_S, "socket_timeout": CONNECT_S}
    credentials = {name: options[name] for name in ("sentinel_username", "sentinel_password") if name in options}
    for name in ("host", "port", *credentials):
        options.pop(name, None)
    asking |= {name.removeprefix("sentinel_"): value for name, value in credentials.items()}
    sentinel = Sentinel(addresses, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, ssl=issubclass(kind, SSLConnection), **options)  # pyright: ignore
    server = of_client(client, shown)
    server.owned = [*sentinel.sentinels, client]
    return server


def _of_sentinels(pool: Any, shown: str) -> OneServer:
    """The master that a `SentinelConnectionPool` is for, with clients of our own for it and for its sentinels."""
    manager: Any = copy.copy(pool.sentinel_manager)
    addresses = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
    manager.sentinels = [Redis(host=at["host"], port=at["port"], **manager.sentinel_kwargs) for at in addresses]
    settings = _settings(pool.connection_kwargs)
    del settings["connection_pool"]
    client: Redis = manager.master_for(pool.service_name, connection_class=pool.connection_class, **settings)
    server = of_client(client, shown)
    server.owned = [*manager.sentinels, client]
    return server


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a client's connections, without what ties them to that client and its loop. All of that is for
    the newer protocol, which is not spoken here."""
    return {name: v for name, v in options.items() if name != "himport_registry" and "maint_notifications" not in name}


def of_client(client: object, shown: str = "") -> OneServer:
    """The server of a redis-py client that somebody has already: connections like its own, but ours."""
    if not isinstance(client, Redis):
        raise OptionError(f"a client is a redis.asyncio.Redis or RedisCluster, not {type(client).__module__}")
    pool = client.connection_pool
    options = _settings(pool.connection_kwargs)
    if not shown:
        shown = f"{options.get('host', options.get('path', 'redis'))}:{options.get('port', '')}"
    return OneServer(shown, pool.connection_class, options, keeper=client)


def of_cluster(client: object) -> ClusterServers:
    """The cluster of a redis-py client that somebody has already."""
    assert isinstance(client, RedisCluster)
    nodes = list(client.nodes_manager.startup_nodes.values())
    options = _settings(nodes[0].connection_kwargs)
    seeds = [(str(node.host), int(node.port)) for node in nodes]
    return ClusterServers(f"{seeds[0][0]}:{seeds[0][1]}", nodes[0].connection_class, options, seeds)
