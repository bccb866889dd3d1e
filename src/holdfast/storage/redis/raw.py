"""One socket to one server: open it, log in, write commands, and hand over each reply. Without retries.

The protocol is RESP2, parsed by hiredis. redis-py is not used: see decision 6.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import hiredis

from holdfast.version import VERSION

Argument = bytes | str | int
Reply = Any
"""The answer of a server: bytes, int, None, a ServerError, or a list of these."""
Deliver = Callable[[Reply], None]
"""A function that takes a reply, or an exception instead of it."""
NodeAddress = tuple[str, int]

KEEPALIVE: Mapping[int, int | bytes] = {
    getattr(socket, name): value
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items()
    if hasattr(socket, name)
}
"""After 30 s of silence TCP probes the other side three times, 5 s apart, on systems with these options."""
INCOMPLETE = object()
"""The value that hiredis returns while a reply is incomplete."""


class ServerError(Exception):
    """An error that a server sent instead of a reply. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).split(" ", 1)[0]


class LoginRefused(Exception):
    """The server does not accept the credentials, or the user lacks a permission that every connection needs."""


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """The address of a server and how to log in. `path` names a unix socket, and replaces host and port."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    credential_provider: Any = field(default=None, repr=False)
    """A CredentialProvider of redis-py: its `get_credentials_async` is called for every connection."""
    client_name: str = ""
    database: int = 0
    tls: Mapping[str, Any] | None = field(default=None, repr=False)
    """The settings for `tls_context`; None for a connection without TLS."""
    connect_timeout_s: float = 5.0
    """How long one attempt to connect may take, including name look-up and login."""
    keepalive: Mapping[int, int | bytes] = field(default_factory=lambda: KEEPALIVE)

    def at(self, address: NodeAddress) -> ConnectOptions:
        """Return the same login on another server."""
        return replace(self, host=address[0], port=address[1])

    @property
    def place(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    async def credentials(self) -> tuple[str, ...]:
        """Return the arguments of AUTH, or none if no login is needed."""
        if self.credential_provider is not None:
            try:
                given: Any = await self.credential_provider.get_credentials_async()
            except Exception as error:
                raise ConnectionError(f"the credential provider raised {type(error).__name__}: {error}") from error
            if isinstance(given, str | None) or not all(isinstance(word, str | bytes) for word in given):
                raise ConnectionError("the credential provider must return (password,) or (username, password)")
            return tuple(given)
        if self.username:
            return (self.username, self.password)
        return (self.password,) if self.password else ()


def tls_context(settings: Mapping[str, Any]) -> ssl.SSLContext:
    """Make a context from settings with redis-py's names. Files are read for each connection, so that a renewed
    certificate is used."""
    context = ssl.create_default_context()
    verify_mode: ssl.VerifyMode = settings["ssl_cert_reqs"]
    context.check_hostname = bool(settings.get("ssl_check_hostname", True)) and verify_mode != ssl.CERT_NONE
    context.verify_mode = verify_mode
    for flag in settings.get("ssl_include_verify_flags") or ():
        context.verify_flags |= flag
    for flag in settings.get("ssl_exclude_verify_flags") or ():
        context.verify_flags &= ~flag
    if certificate := settings.get("ssl_certfile"):
        context.load_cert_chain(certificate, settings.get("ssl_keyfile"), settings.get("ssl_password"))
    authorities = [settings.get(name) for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data")]
    if any(authorities):
        context.load_verify_locations(*authorities)
    if (min_version := settings.get("ssl_min_version")) is not None:
        context.minimum_version = min_version
    if (ciphers := settings.get("ssl_ciphers")) is not None:
        context.set_ciphers(ciphers)
    return context


READ_BYTES = 65_536
"""Size of the read buffer of a connection."""
packed: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
"""The bytes of a command."""


class RawConnection(asyncio.BufferedProtocol):
    """An open socket that parses replies. Nothing is read before `start`.

    All reads use one buffer: without it, asyncio allocates 256 KiB per read, which costs up to 20 µs a reply.
    """

    def __init__(self) -> None:
        self._parser = hiredis.Reader(replyError=ServerError, notEnoughData=INCOMPLETE)
        self._transport: asyncio.Transport
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        """The buffer for asyncio, which slices it for TLS: a slice of a bytearray would be a copy."""
        self._trouble = ""
        """Why the connection ended; empty while it is open."""
        self._on_reply: Deliver = _ignore
        self._on_lost: Callable[[str], None] = _ignore
        self.received = 0
        """Number of bytes that have arrived."""
        self.written = 0
        """Number of bytes that were given to `write`."""

    def write(self, args: tuple[Argument, ...]) -> None:
        """Send a command."""
        data = packed(args)
        self.written += len(data)
        self._transport.write(data)

    @property
    def sent(self) -> int:
        """Number of bytes that the other side has confirmed. Inexact with TLS, which adds bytes."""
        sock: socket.socket = self._transport.get_extra_info("socket")
        return self.written - self._transport.get_write_buffer_size() - _unconfirmed(sock)

    async def ask(self, *commands: tuple[Argument, ...]) -> list[Reply]:
        """Send commands at once and return their replies. If the connection ends, the last reply is the error."""
        replies: list[Reply] = []
        complete = asyncio.get_running_loop().create_future()

        def on_reply(reply: Reply) -> None:
            replies.append(reply)
            if not complete.done() and (len(replies) == len(commands) or isinstance(reply, ConnectionError)):
                complete.set_result(None)

        self.start(on_reply, lambda trouble: on_reply(ConnectionError(trouble)))
        self._transport.write(b"".join(map(packed, commands)))
        await complete
        return replies

    def start(self, on_reply: Deliver, on_lost: Callable[[str], None]) -> None:
        """Hand each reply to `on_reply` from now on, and the reason for the end of the connection to `on_lost`."""
        self._on_reply, self._on_lost = on_reply, on_lost
        self._transport.resume_reading()
        if self._trouble:  # It ended between the login and now.
            asyncio.get_running_loop().call_soon(lambda: self._on_lost(self._trouble))

    def abort(self) -> None:
        """Close at once. No reply is delivered any more, not even one that was parsed."""
        self._on_reply = self._on_lost = _ignore
        self._transport.abort()

    def keep_alive(self, options: Mapping[int, int | bytes]) -> None:
        sock: socket.socket = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        parser, buffer = self._parser, cast("bytes", self._buffer)  # hiredis takes any buffer; its type hints do not.
        try:
            parser.feed(buffer, 0, nbytes)
            while (reply := parser.gets()) is not INCOMPLETE:
                self._on_reply(reply)
        except hiredis.ProtocolError as error:
            self._end(f"the server sent bytes that are not a reply: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the server closed the connection" if exc is None else f"{type(exc).__name__}: {exc}")

    def _end(self, trouble: str) -> None:
        self._trouble = trouble
        self._on_lost(trouble)


def _ignore(_: object) -> None:
    pass


def _unconfirmed(sock: socket.socket) -> int:
    """Return the number of bytes in the send buffer of the kernel; 0 on a system that does not tell."""
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


async def open_connection(options: ConnectOptions) -> RawConnection:
    """Connect to a server and log in."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            if options.path:
                _, raw = await loop.create_unix_connection(RawConnection, options.path)
            else:
                tls = None if options.tls is None else tls_context(options.tls)
                _, raw = await loop.create_connection(RawConnection, options.host, options.port, ssl=tls)
            try:
                if not options.path:
                    raw.keep_alive(options.keepalive)
                await _log_in(raw, options)
            except BaseException:
                raw.abort()
                raise
    except TimeoutError as error:
        raise TimeoutError(f"no connection to {options.place} in {options.connect_timeout_s:g} s") from error
    return raw


async def _log_in(raw: RawConnection, options: ConnectOptions) -> None:
    """Send all commands of the login at once. The last two are for operators, who see them in CLIENT LIST."""
    commands: list[tuple[Argument, ...]] = []
    if credentials := await options.credentials():
        commands.append(("AUTH", *credentials))
    if options.client_name:
        commands.append(("CLIENT", "SETNAME", options.client_name))
    if options.database:
        commands.append(("SELECT", options.database))
    commands += [("CLIENT", "SETINFO", "LIB-NAME", "holdfast"), ("CLIENT", "SETINFO", "LIB-VER", VERSION)]
    for command, error in zip(commands, await raw.ask(*commands), strict=False):
        if not isinstance(error, Exception):
            continue
        if not isinstance(error, ServerError) or "max number of clients" in str(error):
            raise error  # A full server refuses a new connection, and another attempt may succeed.
        if error.code != "NOAUTH" and command[1] == "SETINFO":
            continue  # A server before 7.2 does not have this command.
        if command[0] == "AUTH":
            detail = str(error).partition(", with args")[0]  # A server that does not know AUTH repeats its arguments.
            raise LoginRefused(error.code if str(command[-1]) in detail else detail)
        if command[0] == "SELECT" and error.code == "ERR":
            raise LoginRefused(f"it has no database {options.database}, use another number: {error}")
        if error.code in ("WRONGPASS", "NOAUTH", "NOPERM"):
            raise LoginRefused(str(error))
        raise error
