"""Find the servers that a URL or a redis-py client names.

Only public names of redis-py are used. It is imported only if a caller passes one of its objects: the import takes
0.3 s, which a process with a URL saves.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.errors import OptionError
from holdfast.storage.redis.raw import KEEPALIVE, ConnectOptions, NodeAddress
from holdfast.storage.redis.topology import ClusterServers, SentinelServers, Servers

MAX_TIMEOUT_S = 300.0
"""Maximum timeout of a call. The server keeps replies for ten minutes; a later repetition could apply a call twice."""
VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


def _verify_mode(value: Any) -> ssl.VerifyMode:
    """Read the `ssl_cert_reqs` of redis-py: a word, a constant of `ssl`, or None."""
    return ssl.VerifyMode(VERIFY_MODES.get(value, value or ssl.CERT_NONE))


def _one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text not in values:
            raise ValueError(f"use one of {', '.join(values)}")
        return values[text]

    return read


def _verify_flags(text: str) -> list[ssl.VerifyFlags]:
    """Read text such as `VERIFY_X509_STRICT,VERIFY_CRL_CHECK_LEAF`, with or without brackets."""
    return [_one_of(ssl.VerifyFlags.__members__)(name.strip()) for name in text.strip("[] ").split(",")]


def _timeout(text: str) -> float:
    timeout_s = float(text)
    if not 0.1 <= timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(f"use a number of seconds from 0.1 to {MAX_TIMEOUT_S:.0f}")
    return timeout_s


OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "ssl": _one_of({"1": True, "true": True, "True": True, "0": False, "false": False, "False": False}),
    **dict.fromkeys(("username", "password", "client_name", "ssl_keyfile", "ssl_certfile", "ssl_password"), str),
    **dict.fromkeys(("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_ciphers"), str),
    **dict.fromkeys(("ssl_include_verify_flags", "ssl_exclude_verify_flags"), _verify_flags),
    "db": int,
    "socket_connect_timeout": float,
    "ssl_cert_reqs": _one_of(VERIFY_MODES),
    "ssl_check_hostname": lambda text: text.upper() not in ("0", "F", "FALSE", "N", "NO", ""),
    "ssl_min_version": lambda text: ssl.TLSVersion(int(text)),
    "timeout": _timeout,
    "eviction": _one_of({"refuse": False, "allow": True}),
    # These change nothing: Holdfast has its own retries and timeouts.
    **dict.fromkeys(("decode_responses", "encoding", "encoding_errors", "legacy_responses", "lib_name"), str),
    **dict.fromkeys(("lib_version", "retry_on_error", "retry_on_timeout", "socket_keepalive", "socket_type"), str),
    **dict.fromkeys(("health_check_interval", "socket_timeout"), float),
    **dict.fromkeys(("protocol", "socket_read_size"), int),
}
"""Options of a URL and how their text is read. `timeout` and `eviction` are for the storage; all others have the names
and meanings of redis-py."""


def servers_from_url(url: str, shown: str) -> tuple[Servers, dict[str, Any]]:
    """Return the servers that a URL names, and the URL's options for the storage. `shown` is the URL as errors may show
    it. Errors show no other part: in a malformed URL any part may belong to the password."""
    try:
        parts = urlsplit(url)
        scheme, path, service = parts.scheme, parts.path.strip("/"), ""
        credentials, _, hosts = parts.netloc.rpartition("@")
        addresses = [_address(host, 26379 if scheme == "redis+sentinel" else 6379) for host in hosts.split(",")]
    except ValueError:
        raise OptionError(f"{shown!r:.120} is not the URL of a server: check its hosts and ports") from None
    if len(addresses) > 1 and scheme not in ("redis+sentinel", "redis+cluster"):
        raise OptionError(f"{shown!r:.120} names several hosts: use redis+sentinel:// or redis+cluster://")
    if scheme == "redis+sentinel":
        service, _, path = path.partition("/")
        if not service:
            raise OptionError(f"{shown!r:.120} does not name a master: write redis+sentinel://host:26379/SERVICE/0")
    if path and not path.isdecimal():
        raise OptionError(f"{shown!r:.120} has a database that is not a number: write redis://host:6379/0")
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    login = {name: query.pop(f"sentinel_{name}", "") for name in ("username", "password") if service}
    username, _, password = credentials.partition(":")
    settings: dict[str, Any] = {"username": unquote(username), "password": unquote(password), "db": int(path or 0)}
    settings |= _read_query(query, shown)
    tls = settings.pop("ssl", False) or scheme in ("rediss", "valkeys")
    if not tls and any(name.startswith("ssl_") for name in settings):
        raise OptionError(f"{shown!r:.120} has TLS options but no TLS: use rediss://, or add ssl=1")
    names = {"timeout": "timeout_s", "eviction": "allow_eviction"}
    storage_options = {names[name]: value for name, value in settings.items() if name in names}
    options = connect_options(settings, tls).at(addresses[0])
    if service:
        sentinels = [connect_options(login, tls=False).at(address) for address in addresses]
        return SentinelServers(shown, options, service, sentinels), storage_options
    if scheme != "redis+cluster":
        return Servers(shown, options), storage_options
    if options.database:
        raise OptionError(f"{shown!r:.120}: a cluster has only database 0, leave the number out")
    return ClusterServers(shown, options, addresses), storage_options


def _address(text: str, port: int) -> NodeAddress:
    parts = urlsplit(f"//{text}")
    return unquote(parts.hostname or "localhost"), parts.port or port


def _read_query(query: Mapping[str, str], shown: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, text in query.items():
        if name not in OPTIONS:
            detail = f": {name!r:.40}" if name in shown else ""
            raise OptionError(f"{shown!r:.120} has an unknown option{detail}")
        try:
            settings[name] = OPTIONS[name](text)
        except ValueError as error:
            detail = f": {error!s:.100}" if text in shown else ""
            raise OptionError(f"{shown!r:.120} has an invalid value for {name}{detail}") from None
    return settings


def connect_options(settings: Mapping[str, Any], tls: bool) -> ConnectOptions:
    """Read the options of a connection from settings with redis-py's names."""
    options = {field.name: settings[field.name] for field in fields(ConnectOptions) if settings.get(field.name)}
    if settings.get("socket_connect_timeout"):
        options["connect_timeout_s"] = float(settings["socket_connect_timeout"])
    if tls:
        options["tls"] = {**settings, "ssl_cert_reqs": _verify_mode(settings.get("ssl_cert_reqs", "required"))}
    keepalive = settings.get("socket_keepalive_options")
    options["keepalive"] = keepalive if isinstance(keepalive, dict) else KEEPALIVE
    return ConnectOptions(**options, database=int(settings.get("db") or 0))


def servers_from_client(client: object) -> Servers:
    """Return the servers of a redis-py client. The settings are copied; the client stays the caller's."""
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.connection import SSLConnection
    from redis.asyncio.sentinel import SentinelConnectionPool

    def options_of(pool: Any) -> ConnectOptions:
        settings: Mapping[str, Any] = pool.connection_kwargs
        if settings.get("redis_connect_func") is not None:
            raise OptionError("a client with a redis_connect_func is not supported: use a credential_provider instead")
        return connect_options(settings, issubclass(pool.connection_class, SSLConnection))

    if isinstance(client, RedisCluster):
        settings: Mapping[str, Any] = client.get_connection_kwargs()
        nodes: Any = client.get_nodes() or client.nodes_manager.startup_nodes.values()
        seeds = [(str(node.host), int(node.port)) for node in nodes]
        options = connect_options(settings, settings.get("connection_class") is SSLConnection)
        return ClusterServers(f"{seeds[0][0]}:{seeds[0][1]}", options, seeds)
    if not isinstance(client, Redis):
        raise OptionError(f"a {type(client).__module__} is not a client: pass a redis.asyncio.Redis or RedisCluster")
    pool: Any = client.connection_pool
    options = options_of(pool)
    if not isinstance(client.connection_pool, SentinelConnectionPool):
        return Servers(options.place, options)
    sentinels = [options_of(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels]
    return SentinelServers(pool.service_name, options, pool.service_name, sentinels)


def pipeline_for(transaction: object, servers: Servers) -> Any:
    """Return the caller's redis-py pipeline. Raises OptionError if a job on these servers cannot be part of it."""
    from redis.asyncio.client import Pipeline
    from redis.client import Pipeline as BlockingPipeline

    if not isinstance(transaction, Pipeline | BlockingPipeline):
        kind = type(transaction)
        raise OptionError(
            f"{kind.__module__}.{kind.__qualname__} is not a transaction of {servers.name}:"
            " pass a pipeline of redis.Redis or redis.asyncio.Redis"
        )
    if servers.clustered:
        raise OptionError(
            f"{servers.name} is a cluster, where transactions cannot span slots: enqueue outside of yours"
        )
    database, expected = int(transaction.connection_pool.connection_kwargs.get("db") or 0), servers.options.database
    if database != expected:
        raise OptionError(f"the pipeline uses database {database}, the jobs are in database {expected}: use the same")
    if transaction.watching and not transaction.explicit_transaction:
        raise OptionError("the pipeline watches keys and would send the command at once: call its multi() first")
    return transaction
