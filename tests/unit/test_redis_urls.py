"""URLs and clients of redis-py: which servers they name, with which options."""

from __future__ import annotations

import ssl
import traceback
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.sentinel import Sentinel
from redis.crc import key_slot

from holdfast.errors import OptionError
from holdfast.storage import connect
from holdfast.storage.redis.raw import ConnectOptions, tls_context
from holdfast.storage.redis.topology import slot_of
from holdfast.storage.redis.urls import servers_from_client, servers_from_url


def options_of(url: str) -> ConnectOptions:
    servers: Any = servers_from_url(url, url)[0]
    options: ConnectOptions = servers.options
    return options


@pytest.mark.parametrize(
    "key", ["plain", "{tag}", "a{tag}b", "{}x", "a{}b", "{open", "}{x}", "{a}{b}", "{{a}}", "ä{ö}"]
)
def test_a_slot_is_computed_as_redis_py_does(key: str) -> None:
    assert slot_of(key) == key_slot(key.encode())


def test_url_gives_address_and_login() -> None:
    options = options_of("redis://ada:a%2Fb%40c@[::1]:6400/5?client_name=shop&socket_connect_timeout=2")
    assert (options.host, options.port, options.database) == ("::1", 6400, 5)
    assert (options.username, options.password) == ("ada", "a/b@c")
    assert (options.client_name, options.connect_timeout_s, options.tls) == ("shop", 2.0, None)
    assert "a/b@c" not in repr(options)
    assert options_of("valkey://host?db=3&password=p&username=u&protocol=3&socket_timeout=1").database == 3


@pytest.mark.parametrize("scheme", ["redis", "valkey", "redis+cluster"])
@pytest.mark.parametrize("query", ["ssl_ca_certs=/ca.pem", "ssl_cert_reqs=none", "ssl=0&ssl_check_hostname=1"])
def test_tls_options_without_tls_are_refused(scheme: str, query: str) -> None:
    with pytest.raises(OptionError, match="use rediss://"):
        connect(f"{scheme}://:hunter2@host?{query}")


@pytest.mark.parametrize(
    "url",
    ["rediss://host", "valkeys://host", "rediss://host?ssl=1", "redis+cluster://host?ssl=1", "redis://h?ssl=true"],
)
def test_tls_checks_certificates_unless_it_is_switched_off(url: str) -> None:
    tls = options_of(url).tls
    assert tls is not None
    context = tls_context(tls)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_tls_options_of_a_url_reach_the_context() -> None:
    tls = options_of(
        "rediss://host?ssl_cert_reqs=none&ssl_min_version=772&ssl_ciphers=ECDHE-RSA-AES128-GCM-SHA256"
        "&ssl_include_verify_flags=VERIFY_CRL_CHECK_LEAF&ssl_exclude_verify_flags=[VERIFY_X509_TRUSTED_FIRST]"
    ).tls
    assert tls is not None
    context = tls_context(tls)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_NONE, False)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    assert not context.verify_flags & ssl.VerifyFlags.VERIFY_X509_TRUSTED_FIRST
    assert "ECDHE-RSA-AES128-GCM-SHA256" in [cipher["name"] for cipher in context.get_ciphers()]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("db=x", "db"),
        ("ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("ssl_min_version=1", "ssl_min_version"),
        ("ssl_include_verify_flags=NONSENSE", "NONSENSE"),
        ("max_connections=5", "max_connections"),
        ("credential_provider=x", "credential_provider"),
        ("host=x", "host"),
        ("socket_timeout=abc", "socket_timeout"),
        ("socket_read_size=abc", "socket_read_size"),
        ("ssl=yes", "ssl"),
        ("sentinel_password=x", "sentinel_password"),
    ],
)
def test_a_wrong_option_is_named(query: str, name: str) -> None:
    with pytest.raises(OptionError, match=name):
        servers_from_url(f"rediss://host?{query}", f"rediss://host?{query}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2/x@localhost/0",
        "redis://user:1/hunter2@localhost/0",
        "redis://user:1?hunter2=x@localhost/0",
        "redis://user:1?db=hunter2@localhost/0",
        "redis+sentinel://user:1/s/hunter2@localhost/service/0",
        "rediss://host?ssl_password=hunter2&db=x",
    ],
)
def test_no_part_of_a_password_is_in_an_error(url: str) -> None:
    with pytest.raises(OptionError) as refused:
        connect(url)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value))


def test_nodes_login_and_tls_of_a_cluster_client_are_used() -> None:
    nodes = [redis.asyncio.cluster.ClusterNode(f"host{n}", 7000 + n) for n in range(2)]
    client = redis.asyncio.RedisCluster(startup_nodes=nodes, password="p", ssl=True, ssl_cert_reqs="none")
    servers: Any = servers_from_client(client)
    assert servers.seeds == [("host0", 7000), ("host1", 7001)]
    assert servers.options.password == "p"
    assert servers.options.tls["ssl_cert_reqs"] is ssl.CERT_NONE
    plain: Any = servers_from_client(redis.asyncio.RedisCluster(host="host0", port=7000))
    assert plain.options.tls is None


def test_both_logins_of_a_sentinel_client_are_used() -> None:
    sentinel = Sentinel([("s0", 1), ("s1", 2)], sentinel_kwargs={"password": "s"})
    servers: Any = servers_from_client(sentinel.master_for("shop", password="p", db=3, ssl=True))
    assert (servers.name, servers.options.database) == ("shop", 3)
    assert (servers.options.password, servers.options.tls is not None) == ("p", True)
    assert [(node.place, node.password, node.tls) for node in servers.sentinels] == [
        ("s0:1", "s", None),
        ("s1:2", "s", None),
    ]
