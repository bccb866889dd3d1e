"""From a URL, or a client of redis-py, to the servers that it names.

Only public names of redis-py are used, and only of objects that a caller hands in. It is imported when one is: that
takes 0.3 s, which a process that has only a URL does not spend.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from holdfast.errors import OptionError
from holdfast.storage.redis.raw import CONNECT_S, ConnectOptions, NodeAddress, TlsOptions
from holdfast.storage.redis.topology import ClusterServers, OneServer, Sentinels, Servers

SENTINEL_PORT = 26379
PORT = 6379
HOLDFAST_OPTIONS = ("timeout", "eviction")
"""Options of a URL that the storage reads itself. All others have redis-py's names and meanings."""
VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def _bool(text: str) -> bool:
    return text.upper() not in ("0", "F", "FALSE", "N", "NO", "")


def _verify_mode(value: Any) -> ssl.VerifyMode:
    """`required` and so on as redis-py has them: a word, a constant of `ssl`, or None."""
    if value is None:
        return ssl.CERT_NONE
    if isinstance(value, str):
        if value not in VERIFY_MODES:
            raise ValueError("ssl_cert_reqs is none, optional or required")
        return VERIFY_MODES[value]
    return ssl.VerifyMode(value)


def _verify_flags(text: str) -> tuple[ssl.VerifyFlags, ...]:
    """Flags from text such as `VERIFY_X509_STRICT,VERIFY_CRL_CHECK_LEAF`; brackets around it are allowed."""
    names = [name.strip() for name in text.strip("[] ").split(",")]
    unknown = [name for name in names if name not in ssl.VerifyFlags.__members__]
    if unknown:
        raise ValueError(f"{unknown[0]!r:.40} is not one of ssl.VerifyFlags")
    return tuple(ssl.VerifyFlags[name] for name in names)


USED_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "db": int,
    "username": str,
    "password": str,
    "client_name": str,
    "socket_connect_timeout": float,
    "ssl_keyfile": str,
    "ssl_certfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": str,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_ca_data": str,
    "ssl_check_hostname": _bool,
    "ssl_min_version": int,
    "ssl_ciphers": str,
    "ssl_include_verify_flags": _verify_flags,
    "ssl_exclude_verify_flags": _verify_flags,
}
"""Options of a URL that change a connection, and how their text is read."""
UNUSED_OPTIONS = frozenset(
    (
        *("decode_responses", "encoding", "encoding_errors", "health_check_interval", "legacy_responses", "lib_name"),
        *("lib_version", "protocol", "retry_on_error", "retry_on_timeout", "socket_keepalive", "socket_read_size"),
        *("socket_timeout", "socket_type"),
    )
)
"""Options of a URL that redis-py has and that change nothing here: Holdfast has its own retries and timeouts."""


def servers_from_url(url: str, shown: str) -> tuple[Servers, dict[str, str]]:
    """The servers that a URL names, and its options for the storage. `shown` is the URL as errors may show it."""
    try:
        return _servers_from_url(urlsplit(url), shown)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{shown!r:.120} is not a URL of a server: {error}") from None


def _servers_from_url(parts: SplitResult, shown: str) -> tuple[Servers, dict[str, str]]:
    scheme, path = parts.scheme, parts.path
    credentials, _, hosts = parts.netloc.rpartition("@")
    if "," in hosts and scheme not in ("redis+sentinel", "redis+cluster"):
        raise OptionError(f"{shown!r:.120} names several hosts: use redis+sentinel:// or redis+cluster://")
    addresses = [_address(host, SENTINEL_PORT if scheme == "redis+sentinel" else PORT) for host in hosts.split(",")]
    service = ""
    if scheme == "redis+sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise OptionError(f"{shown!r:.120} does not name a master: write redis+sentinel://host:26379/SERVICE/0")
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    storage_options = {name: query.pop(name) for name in HOLDFAST_OPTIONS if name in query}
    logins = {name: query.pop(name) for name in ("sentinel_username", "sentinel_password") if service and name in query}
    tls = scheme in ("rediss", "valkeys") or query.pop("ssl", "") in ("1", "true", "True")
    settings = {**_login(credentials), "db": _database(path, shown), **_read_query(query, shown)}
    options = connect_options(settings, tls).at(addresses[0])
    if scheme == "redis+cluster":
        if options.database:
            raise OptionError(f"{shown!r:.120}: a cluster has only database 0")
        return ClusterServers(shown, options, addresses), storage_options
    if not service:
        return OneServer(shown, options), storage_options
    asking = ConnectOptions(username=logins.get("sentinel_username", ""), password=logins.get("sentinel_password", ""))
    return OneServer(shown, options, Sentinels(service, [asking.at(address) for address in addresses])), storage_options


def _address(text: str, port: int) -> NodeAddress:
    parts = urlsplit(f"//{text}")
    return unquote(parts.hostname or "localhost"), parts.port or port


def _login(credentials: str) -> dict[str, str]:
    username, _, password = credentials.partition(":")
    return {"username": unquote(username), "password": unquote(password)}


def _database(path: str, shown: str) -> int:
    database = path.strip("/")
    if database and not database.isdigit():
        raise OptionError(f"{shown!r:.120} has a database that is not a number: {database!r:.40}")
    return int(database or 0)


def _read_query(query: Mapping[str, str], shown: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, text in query.items():
        if name in USED_OPTIONS:
            try:
                settings[name] = USED_OPTIONS[name](text)
            except ValueError as error:
                raise OptionError(f"{shown!r:.120} has a wrong value for {name}: {error!s:.100}") from None
        elif name not in UNUSED_OPTIONS:
            raise OptionError(f"{shown!r:.120} has an option that is not known: {name!r:.40}")
    return settings


def connect_options(settings: Mapping[str, Any], tls: bool) -> ConnectOptions:
    """The options of a connection, from settings with redis-py's names."""
    keepalive = settings.get("socket_keepalive_options")
    return ConnectOptions(
        host=str(settings.get("host") or "localhost"),
        port=int(settings.get("port") or PORT),
        path=str(settings.get("path") or ""),
        username=settings.get("username") or "",
        password=settings.get("password") or "",
        credential_provider=settings.get("credential_provider"),
        database=int(settings.get("db") or 0),
        client_name=str(settings.get("client_name") or ""),
        tls=_tls_options(settings) if tls else None,
        connect_timeout_s=float(settings.get("socket_connect_timeout") or CONNECT_S),
        keepalive=cast("dict[int, int]", keepalive) if isinstance(keepalive, dict) else None,
    )


def _tls_options(settings: Mapping[str, Any]) -> TlsOptions:
    min_version = settings.get("ssl_min_version")
    return TlsOptions(
        verify_mode=_verify_mode(settings.get("ssl_cert_reqs", "required")),
        check_hostname=bool(settings.get("ssl_check_hostname", True)),
        ca_file=settings.get("ssl_ca_certs"),
        ca_path=settings.get("ssl_ca_path"),
        ca_data=settings.get("ssl_ca_data"),
        certificate=settings.get("ssl_certfile"),
        key=settings.get("ssl_keyfile"),
        key_password=settings.get("ssl_password"),
        min_version=None if min_version is None else ssl.TLSVersion(min_version),
        ciphers=settings.get("ssl_ciphers"),
        set_flags=tuple(settings.get("ssl_include_verify_flags") or ()),
        clear_flags=tuple(settings.get("ssl_exclude_verify_flags") or ()),
    )


def servers_from_client(client: object) -> Servers:
    """The servers of a redis-py client that a caller has already. Its settings are copied; it stays the caller's."""
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.sentinel import SentinelConnectionPool

    if isinstance(client, RedisCluster):
        return _servers_from_cluster(client)
    if not isinstance(client, Redis):
        raise OptionError(f"a client is a redis.asyncio.Redis or RedisCluster, not {type(client).__module__}")
    pool: Any = client.connection_pool
    options = _options_of_pool(pool)
    if not isinstance(client.connection_pool, SentinelConnectionPool):
        return OneServer(options.place, options)
    nodes = [_options_of_pool(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels]
    return OneServer(pool.service_name, options, Sentinels(pool.service_name, nodes))


def _options_of_pool(pool: Any) -> ConnectOptions:
    from redis.asyncio.connection import SSLConnection

    settings: Mapping[str, Any] = pool.connection_kwargs
    if settings.get("redis_connect_func") is not None:
        raise OptionError("a client with a redis_connect_func cannot be used: give it a credential_provider instead")
    return connect_options(settings, issubclass(pool.connection_class, SSLConnection))


def _servers_from_cluster(client: Any) -> ClusterServers:
    from redis.asyncio.connection import SSLConnection

    settings: Mapping[str, Any] = client.get_connection_kwargs()
    nodes: Iterable[Any] = client.get_nodes() or client.nodes_manager.startup_nodes.values()
    seeds = [(str(node.host), int(node.port)) for node in nodes]
    options = connect_options(settings, settings.get("connection_class") is SSLConnection)
    return ClusterServers(f"{seeds[0][0]}:{seeds[0][1]}", options, seeds)
