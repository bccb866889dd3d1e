"""How a connection is opened: where it goes, how it logs in, and what a refusal means."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio
from redis.credentials import CredentialProvider

from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import Request, Work
from holdfast._core.replies import Placed
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import Storage, connect
from holdfast.storage.redis import of_client, raw
from holdfast.storage.redis.raw import ConnectOptions, LoginRefused, RawConnection, ServerError, open_connection
from holdfast.storage.redis.topology import SentinelServers
from tests.proxy import HOST
from tests.redis.test_sentinel import SERVICE
from tests.redis.test_tls import CERTIFICATE, tls_in_front_of
from tests.servers import SentinelServer, Server, free_port

SECRET = "s3cr3t-w0rd"


@pytest.fixture
def own() -> Iterator[Server]:
    """A server with a user `u`, and with a unix socket."""
    with Server("valkey", "--unixsocket", "unix.sock") as server:
        server.command("ACL", "SETUSER", "u", "on", f">{SECRET}", "~*", "&*", "+@all")
        yield server


def options(server: Server, **more: object) -> ConnectOptions:
    return ConnectOptions(host=HOST, port=server.port, **more)  # type: ignore[arg-type]


async def works(storage: Storage) -> None:
    async with storage:
        assert (await storage.enqueue("q", [Request("a", Work(b"1"))]))[0].placed is Placed.NEW


class Provider(CredentialProvider):
    """Gives the right password from the second call on."""

    def __init__(self, *credentials: tuple[str, ...]) -> None:
        self.credentials = list(credentials)
        self.calls = 0

    async def get_credentials_async(self) -> tuple[str, ...]:  # type: ignore[override]
        self.calls += 1
        if not self.credentials:
            raise ValueError("the vault is sealed")
        return self.credentials[0] if len(self.credentials) == 1 else self.credentials.pop(0)


async def test_unix_socket_path_of_a_client_is_used(own: Server) -> None:
    client = redis.asyncio.Redis(unix_socket_path=str(own.directory / "unix.sock"), db=2)
    await works(of_client(client, namespace=uuid.uuid4().hex))
    assert own.info("keyspace").keys() == {"db2"}
    await client.aclose()


async def test_a_credential_provider_is_asked_for_every_connection(own: Server) -> None:
    provider = Provider(("u", SECRET))
    client = redis.asyncio.Redis(host=HOST, port=own.port, credential_provider=provider)
    async with of_client(client) as storage:
        assert (await storage.enqueue("q", [Request("a", Work(b"1"))]))[0].placed is Placed.NEW
        assert provider.calls == 1
        own.command("CLIENT", "KILL", "USER", "u")
        assert (await storage.enqueue("q", [Request("b", Work(b"1"))]))[0].placed is Placed.NEW
        assert provider.calls == 2
    await client.aclose()


async def test_a_credential_provider_that_raises_is_called_again_until_the_timeout(own: Server) -> None:
    provider = Provider()
    client = redis.asyncio.Redis(host=HOST, port=own.port, credential_provider=provider)
    with pytest.raises(StorageUnavailable, match="the vault is sealed"):
        await of_client(client, timeout_s=0.3).__aenter__()
    assert provider.calls > 1
    await client.aclose()


@pytest.mark.parametrize("given", [("u", None), ("u", 1), None, "u"])
async def test_credentials_of_a_wrong_type_are_a_failed_attempt(own: Server, given: Any) -> None:
    provider = Provider(given, ("u", SECRET))
    client = redis.asyncio.Redis(host=HOST, port=own.port, credential_provider=provider)
    await works(of_client(client))
    assert provider.calls == 2
    await client.aclose()


async def test_listeners_return_after_any_exception_while_connecting(
    own: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    problems: list[Exception] = []

    async def open_or_raise(options: ConnectOptions) -> RawConnection:
        if problems:
            raise problems.pop()
        return await open_connection(options)

    monkeypatch.setattr(raw, "open_connection", open_or_raise)
    async with (
        connect(own.url) as storage,
        storage.subscribe(Topic("q")) as events,
        storage.subscribe(Topic("q", "wake")),
    ):
        problems += [ZeroDivisionError(str(number)) for number in range(6)]
        own.command("CLIENT", "KILL", "TYPE", "normal")
        own.command("CLIENT", "KILL", "TYPE", "pubsub")
        await storage.enqueue("q", [Request("a", Work(b"1"))])
        event = await events.within(10)
        assert event is not None
        assert event.kind is EventKind.UPDATED  # Listeners look again after a break.
    assert "ZeroDivisionError: 5" in caplog.text


@pytest.mark.parametrize("login", [f":{SECRET}", f"u:{SECRET}", ":AUTH"])
async def test_a_server_without_auth_does_not_reveal_the_password(login: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with Server("valkey", "--rename-command", "AUTH", "") as server:
        with pytest.raises(StorageUnavailable, match="ERR") as caught:
            await connect(f"redis://{login}@{HOST}:{server.port}").__aenter__()
    password = login.partition(":")[2]
    assert password not in "".join(traceback.format_exception(caught.value)) + caplog.text


async def test_client_with_a_connect_function_is_refused() -> None:
    client = redis.asyncio.Redis.from_pool(redis.asyncio.ConnectionPool(redis_connect_func=print))
    with pytest.raises(OptionError, match="redis_connect_func"):
        of_client(client)
    await client.aclose()


async def test_tls_certificates_of_a_client_are_used(own: Server) -> None:
    async with tls_in_front_of(own.port) as port:
        client = redis.asyncio.Redis(host="localhost", port=port, ssl=True, ssl_ca_certs=str(CERTIFICATE))
        await works(of_client(client, namespace=uuid.uuid4().hex))
        await client.aclose()


async def test_connections_have_a_name_a_library_and_a_database(own: Server) -> None:
    async with connect(f"redis://u:{SECRET}@{HOST}:{own.port}/4?client_name=shop"):
        (line,) = [line for line in str(own.command("CLIENT", "LIST")).split("\\n") if "name=shop" in line]
    for word in ("user=u", "db=4", "lib-name=holdfast", "resp=2"):
        assert word in line


async def test_a_connection_asks_tcp_to_notice_a_silent_server(own: Server) -> None:
    raw = await open_connection(options(own, keepalive={socket.TCP_KEEPIDLE: 77}))
    sock = raw._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
    raw.abort()


@pytest.mark.parametrize(
    ("login", "error"),
    [
        ({"username": "u", "password": "wrong"}, "WRONGPASS"),
        ({"username": "unknown", "password": SECRET}, "WRONGPASS"),
        ({"password": SECRET}, "without any password configured"),
    ],
)
async def test_a_login_that_cannot_succeed_is_refused(own: Server, login: dict[str, str], error: str) -> None:
    with pytest.raises(LoginRefused, match=error) as caught:
        await open_connection(options(own, **login))
    assert SECRET not in repr(caught.value)


async def test_server_at_its_client_limit_is_tried_again(own: Server) -> None:
    admin = await open_connection(options(own))
    assert await admin.ask(("CONFIG", "SET", "maxclients", "1")) == [b"OK"]
    with pytest.raises((ServerError, OSError)):  # It answers and closes: which comes first is a matter of luck.
        await open_connection(options(own))
    opening = asyncio.create_task(works(connect(f"{own.url}?timeout=20")))
    await asyncio.sleep(0.2)
    assert not opening.done()
    admin.write(("CONFIG", "SET", "maxclients", "100"))
    await opening
    admin.abort()


async def test_a_server_that_does_not_answer_a_login_is_named(own: Server) -> None:
    own.pause()
    with pytest.raises(TimeoutError, match=f"{HOST}:{own.port} in 0.1 s"):
        await open_connection(options(own, connect_timeout_s=0.1))
    own.resume()


async def test_sentinels_that_hang_or_refuse_are_skipped(own: Server) -> None:
    sentinels = [SentinelServer(SERVICE, own) for _ in range(2)]
    try:
        sentinels[0].pause()
        ports = (free_port(), sentinels[0].port, sentinels[1].port)
        nodes = [ConnectOptions(host=HOST, port=port) for port in ports]
        known = SentinelServers("test", ConnectOptions(), SERVICE, nodes)
        assert await known.find_master() == (HOST, own.port)
        assert known.sentinels[0].port == sentinels[1].port
    finally:
        for sentinel in sentinels:
            sentinel.stop()


async def test_sentinels_have_a_separate_login(own: Server) -> None:
    sentinel = SentinelServer(SERVICE, own)
    try:
        sentinel.command("ACL", "SETUSER", "watcher", "on", ">other", "+@all")
        sentinel.command("ACL", "SETUSER", "default", "resetpass", "-@all", "+info", "+acl")
        url = f"redis+sentinel://u:{SECRET}@{HOST}:{sentinel.port}/{SERVICE}/0?timeout=5&sentinel_password=other"
        await works(connect(f"{url}&sentinel_username=watcher"))
    finally:
        sentinel.stop()
