"""One socket to one server: open it, log in, write commands, hand over each reply as it arrives. Without retries.

The protocol is RESP2, parsed by hiredis. redis-py has no part in it: see decision 6.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import hiredis

from holdfast.version import VERSION

Argument = bytes | str | int
Reply = Any
"""What a server answers: bytes, int, None, a ServerError, or a list of these."""
Deliver = Callable[[Reply], None]
"""Takes a reply, or an exception in its place."""
NodeAddress = tuple[str, int]

CONNECT_S = 5.0
"""How long one attempt to connect may take, name look-up and login included, unless the options say otherwise."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP asks after 30 s of silence whether the other side is there, three times, 5 s apart, where the system has this."""
REFUSED_CODES = frozenset(("WRONGPASS", "NOAUTH", "NOPERM"))
"""Errors of a login that another attempt would meet again."""
TOO_MANY_CLIENTS = "max number of clients"
"""Part of the error with which a full server answers a new connection. Another attempt may succeed."""
INCOMPLETE = object()
"""What hiredis returns while a reply is not complete."""


class ServerError(Exception):
    """An error that a server sent in place of a reply. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).split(" ", 1)[0]


class LoginRefused(Exception):
    """The server does not accept the credentials, or the user lacks a permission that every connection needs."""


class Credentials(Protocol):
    """The part of redis-py's CredentialProvider that is used here."""

    async def get_credentials_async(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """How to check the server's certificate, and which certificate to show it."""

    verify_mode: ssl.VerifyMode = ssl.CERT_REQUIRED
    check_hostname: bool = True
    ca_file: str | None = None
    ca_path: str | None = None
    ca_data: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_password: str | None = field(default=None, repr=False)
    min_version: ssl.TLSVersion | None = None
    ciphers: str | None = None
    set_flags: tuple[ssl.VerifyFlags, ...] = ()
    clear_flags: tuple[ssl.VerifyFlags, ...] = ()

    def context(self) -> ssl.SSLContext:
        """A new context. Files are read for each connection, so that a renewed certificate is used."""
        context = ssl.create_default_context()
        context.check_hostname = self.check_hostname and self.verify_mode != ssl.CERT_NONE
        context.verify_mode = self.verify_mode
        for flag in self.set_flags:
            context.verify_flags |= flag
        for flag in self.clear_flags:
            context.verify_flags &= ~flag
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, self.key_password)
        if self.ca_file or self.ca_path or self.ca_data:
            context.load_verify_locations(self.ca_file, self.ca_path, self.ca_data)
        if self.min_version is not None:
            context.minimum_version = self.min_version
        if self.ciphers is not None:
            context.set_ciphers(self.ciphers)
        return context


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """Where a server is and how to log in. `path` names a unix socket, and replaces host and port."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    credential_provider: Credentials | None = field(default=None, repr=False)
    database: int = 0
    client_name: str = ""
    tls: TlsOptions | None = None
    connect_timeout_s: float = CONNECT_S
    keepalive: Mapping[int, int | bytes] | None = None
    """TCP options of a client that was handed in; None for `KEEPALIVE`."""

    def at(self, address: NodeAddress) -> ConnectOptions:
        """The same login on another server."""
        return replace(self, host=address[0], port=address[1])

    @property
    def place(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    async def credentials(self) -> tuple[str, ...]:
        """Arguments of AUTH; none if no login is wanted."""
        if self.credential_provider is not None:
            try:
                return tuple(await self.credential_provider.get_credentials_async())
            except Exception as error:
                raise ConnectionError(f"the credential provider raised {type(error).__name__}: {error}") from error
        if self.username:
            return (self.username, self.password)
        return (self.password,) if self.password else ()


packed: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
"""The bytes of a command."""


class RawConnection(asyncio.Protocol):
    """An open socket that parses replies. They are kept for `read`, until `start` names who takes them."""

    def __init__(self) -> None:
        self._parser = hiredis.Reader(replyError=ServerError, notEnoughData=INCOMPLETE)
        self._transport: asyncio.WriteTransport | None = None
        self._unread: deque[Reply] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._trouble = ""
        """Why the connection ended; empty while it lasts."""
        self._on_reply: Deliver = self._keep
        self._on_lost: Callable[[str], None] = self._wake_reader

    def write(self, args: tuple[Argument, ...]) -> None:
        """Send a command."""
        assert self._transport is not None
        self._transport.write(packed(args))

    def write_all(self, commands: list[tuple[Argument, ...]]) -> None:
        """Send commands in one piece."""
        assert self._transport is not None
        self._transport.write(b"".join(map(packed, commands)))

    async def read(self) -> Reply:
        """The next reply. Only before `start`."""
        while not self._unread:
            if self._trouble:
                raise ConnectionError(self._trouble)
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        return self._unread.popleft()

    def start(self, on_reply: Deliver, on_lost: Callable[[str], None]) -> None:
        """Hand replies to `on_reply` from now on, and the reason of the end to `on_lost`."""
        self._on_reply, self._on_lost = on_reply, on_lost
        if self._trouble:  # It ended between the login and now.
            asyncio.get_running_loop().call_soon(lambda: self._on_lost(self._trouble))

    def abort(self) -> None:
        """Close at once. Nothing is delivered any more, not even what is parsed already."""
        self._on_reply = self._on_lost = _ignore
        if self._transport is not None:
            self._transport.abort()

    def keep_alive(self, options: Mapping[int, int | bytes] | None) -> None:
        assert self._transport is not None
        if options is None:
            options = {getattr(socket, name): n for name, n in KEEPALIVE.items() if hasattr(socket, name)}
        sock: socket.socket = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        try:
            parser.feed(data)
            while (reply := parser.gets()) is not INCOMPLETE:
                self._on_reply(reply)
        except hiredis.ProtocolError as error:
            self._end(f"the server sent something that is not a reply: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was closed" if exc is None else f"{type(exc).__name__}: {exc}")

    def _end(self, trouble: str) -> None:
        self._trouble = trouble
        self._on_lost(trouble)

    def _keep(self, reply: Reply) -> None:
        self._unread.append(reply)
        self._wake_reader()

    def _wake_reader(self, trouble: str = "") -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _ignore(_: object) -> None:
    pass


async def open_connection(options: ConnectOptions) -> RawConnection:
    """Connect to a server and log in."""
    raw = RawConnection()
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            await _connect(raw, options)
            await _log_in(raw, options)
    except TimeoutError as error:
        raw.abort()
        raise TimeoutError(f"no connection to {options.place} in {options.connect_timeout_s:g} s") from error
    except BaseException:
        raw.abort()
        raise
    return raw


async def _connect(raw: RawConnection, options: ConnectOptions) -> None:
    loop = asyncio.get_running_loop()
    if options.path:
        await loop.create_unix_connection(lambda: raw, options.path)
        return
    tls = None if options.tls is None else options.tls.context()
    await loop.create_connection(lambda: raw, options.host, options.port, ssl=tls)
    raw.keep_alive(options.keepalive)


async def _log_in(raw: RawConnection, options: ConnectOptions) -> None:
    """Send all commands of the login at once. The last two only help operators: CLIENT LIST shows them."""
    commands: list[tuple[Argument, ...]] = []
    if credentials := await options.credentials():
        commands.append(("AUTH", *credentials))
    if options.client_name:
        commands.append(("CLIENT", "SETNAME", options.client_name))
    if options.database:
        commands.append(("SELECT", options.database))
    commands += [("CLIENT", "SETINFO", "LIB-NAME", "holdfast"), ("CLIENT", "SETINFO", "LIB-VER", VERSION)]
    raw.write_all(commands)
    for command in commands:
        reply = await raw.read()
        if isinstance(reply, ServerError):
            _check_login(command, reply)


def _check_login(command: tuple[Argument, ...], error: ServerError) -> None:
    """Raise for an error that counts. A server before 7.2 does not know CLIENT SETINFO."""
    if TOO_MANY_CLIENTS in str(error):
        raise error
    if error.code != "NOAUTH" and command[1] == "SETINFO":
        return
    if error.code in REFUSED_CODES or command[0] == "AUTH":
        raise LoginRefused(str(error))
    raise error
