"""One connection to one server: requests go out in order, replies come back in order, many at a time.

A request survives its connection. When that breaks, or the server answers that it is not ready, everything without a
reply is sent again in its first order, on a new connection, until its deadline. That is safe because whatever changes
something has a number (calls.lua, `once`). A caller that is cancelled leaves its reply to be read and dropped here:
no connection is ever out of step.

redis-py opens the connection; from then on bytes go straight from the transport through hiredis to whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import hiredis
from redis.exceptions import AuthenticationError, AuthorizationError, RedisError

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis.script import Library

log = logging.getLogger("holdfast.redis")

Argument = bytes | str | int
Reply = Any
"""What a server says: bytes, int, None, or a list of these."""
Deliver = Callable[[Reply], None]
"""Takes a reply, or an exception in its place."""

REPLY_S = 5.0
"""A server that has not answered for so long is taken for gone: the connection may be half open."""
LEAST_REPLY_S = 0.5
"""However little time a call has: no connection is given up sooner."""
WATCH_S = 0.25
"""How often deadlines are looked at, while somebody waits."""
BACKOFF_S = (0.01, 1.0)
"""The first and the longest pause between two attempts to connect."""
NOT_READY = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "NOREPLICAS", "MISCONF", "UNBLOCKED")
)
"""Answers of a server that will be able to, or whose place another will take: all is sent again."""
NOT_LOADED = "ERR Function not found"
MAX_LOADS = 5
"""How often a library is sent for one call, on a server where somebody keeps deleting it."""
REFUSED = (AuthenticationError, AuthorizationError)
NOTHING = object()
"""What hiredis gives while a reply is not complete."""


class ServerError(Exception):
    """What a server answered instead of a reply. `code` is its first word."""

    @property
    def code(self) -> str:
        return str(self).split(" ", 1)[0]


class RawConnection(Protocol):
    """A redis-py connection, as `servers` makes it: what redis-py sets up, and we read and write."""

    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    def write(self, *args: Argument) -> None: ...
    async def read(self) -> Reply: ...
    def attach(self, protocol: asyncio.Protocol) -> asyncio.WriteTransport: ...


def new_reader() -> hiredis.Reader:
    return hiredis.Reader(replyError=ServerError, notEnoughData=NOTHING)


def packed(args: tuple[Argument, ...]) -> bytes:
    pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
    return pack(args)


class ReplyParser(asyncio.Protocol):
    """Takes over a connection: replies go to `take` as they arrive."""

    def __init__(self, take: Deliver, lost: Callable[[str], None]) -> None:
        self._take = take
        self._lost = lost
        self._reader = new_reader()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not NOTHING:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._lost(f"what came was no reply: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost("the connection was closed" if exc is None else f"{type(exc).__name__}: {exc}")


class PendingCommand:
    """A command on its way."""

    __slots__ = ("args", "deadline", "deliver", "library", "sent_at", "tries", "unloadable")

    def __init__(self, args: tuple[Argument, ...], deadline: float, deliver: Deliver, library: Library | None) -> None:
        self.args = args
        self.deadline = deadline
        self.deliver: Deliver | None = deliver
        """None once it was answered, or given up."""
        self.library = library
        self.tries = 0
        """How often the library was sent for it."""
        self.unloadable = ""
        """Why the server did not take that."""
        self.sent_at = 0.0

    def note_load(self, reply: Reply) -> None:
        """What the server said to the library. Another client may have been quicker: that is as good."""
        if isinstance(reply, Exception) and "already exists" not in str(reply):
            self.unloadable = str(reply)

    def answer(self, reply: Reply) -> None:
        deliver, self.deliver = self.deliver, None
        if deliver is not None:
            deliver(reply)


class ServerConnection:
    """A connection that mends itself. `connect` gives a fresh link; it is asked again after every break, so it may
    look up where the server is now."""

    def __init__(self, name: str, connect: Callable[[], Awaitable[RawConnection]]) -> None:
        self.name = name
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._link: RawConnection | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._pending: deque[PendingCommand] = deque()
        """Without a reply, in the order in which they go out. If there is a transport, all of them have been sent."""
        self._connecting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._pause = BACKOFF_S[0]
        self._trouble = "not connected yet"
        self._closed = False

    def send(
        self, args: tuple[Argument, ...], deadline: float, deliver: Deliver, library: Library | None = None
    ) -> None:
        """Send a command now, or as soon as there is a connection. `deliver` gets its reply, or an error."""
        if self._closed:
            self._loop.call_soon(deliver, StorageUnavailable(f"the connection to {self.name} is closed"))
            return
        request = PendingCommand(args, deadline, deliver, library)
        self._pending.append(request)
        if self._transport is not None:
            self._write(self._transport, request)
        else:
            self._reconnect()
        if self._watch is None:
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def call(
        self, args: tuple[Argument, ...], deadline: float, library: Library | None = None
    ) -> asyncio.Future[Reply]:
        """Send a command; the future has its reply."""
        future: asyncio.Future[Reply] = self._loop.create_future()

        def deliver(reply: Reply) -> None:
            if not future.done():
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)

        self.send(args, deadline, deliver, library)
        return future

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        self._drop()
        self._fail_all(StorageUnavailable(f"the connection to {self.name} was closed"))

    def _write(self, transport: asyncio.WriteTransport, request: PendingCommand) -> None:
        request.sent_at = self._loop.time()
        transport.write(packed(request.args))

    def _reconnect(self) -> None:
        """Connect, unless somebody was quicker: a second link would answer what was asked on the first."""
        if self._link is None and self._connecting is None and not self._closed:
            self._connecting = self._loop.create_task(self._open(), name=f"holdfast wire {self.name}")

    async def _open(self) -> None:
        """Connect, for as long as somebody waits, and send what waits."""
        try:
            while self._pending:
                try:
                    link = await self._connect()
                except REFUSED as error:
                    self._fail_all(StorageUnavailable(f"{self.name} refused the connection: {error}"))
                    return
                except HoldfastError as error:
                    self._fail_all(error)
                    return
                except (RedisError, OSError, TimeoutError, ServerError) as error:
                    self._trouble = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(self._next_pause())
                    continue
                self._begin(link)
                return
        finally:
            self._connecting = None

    def _begin(self, link: RawConnection) -> None:
        feed = ReplyParser(lambda reply: self._take(link, reply), lambda trouble: self._lost(link, trouble))
        self._link, self._transport = link, link.attach(feed)
        self._pending = deque(request for request in self._pending if request.deliver is not None)
        for request in self._pending:
            self._write(self._transport, request)

    def _take(self, link: RawConnection, reply: Reply) -> None:
        """The reply to the oldest request."""
        if link is not self._link:
            return  # What still arrives on a link that was given up.
        if not self._pending:
            self._lost(link, "a reply came that nobody asked for")
            return
        if isinstance(reply, ServerError):
            if reply.code in NOT_READY:
                self._lost(link, f"not ready: {reply}")
                return
            if str(reply).startswith(NOT_LOADED) and self._pending[0].tries < MAX_LOADS:
                self._load(self._pending.popleft())
                return
        self._pause = BACKOFF_S[0]
        self._pending.popleft().answer(reply)

    def _load(self, request: PendingCommand) -> None:
        """The server does not know the library (any more): send its text, and the request again. A server that does
        not take it (it is full, or this user may not) gets the whole of it as a script, with every call."""
        assert self._transport is not None
        assert request.library is not None
        request.tries += 1
        if request.unloadable:
            name = str(request.args[1])
            request.args = ("EVAL", request.library.script(name), *request.args[2:])
        else:
            load = ("FUNCTION", "LOAD", request.library.text)
            self._put(self._transport, PendingCommand(load, request.deadline, request.note_load, None))
        self._put(self._transport, request)

    def _put(self, transport: asyncio.WriteTransport, request: PendingCommand) -> None:
        self._pending.append(request)
        self._write(transport, request)

    def _lost(self, link: RawConnection, trouble: str) -> None:
        """A link is of no use any more. What has no reply is sent again on the next, after a pause."""
        if link is not self._link:
            return
        log.info("the connection to %s broke: %s", self.name, trouble)
        self._trouble = trouble
        self._drop()
        if self._pending:
            self._loop.call_later(self._next_pause(), self._reconnect)

    def _next_pause(self) -> float:
        """How long to wait before the next try: ever longer, but whoever waits gets several."""
        pause, self._pause = self._pause, min(2 * self._pause, BACKOFF_S[1])
        left = min((request.deadline for request in self._pending), default=self._loop.time()) - self._loop.time()
        return min(pause, max(left / 4, BACKOFF_S[0])) * random.uniform(0.5, 1)

    def _drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._link = self._transport = None

    def _look(self) -> None:
        """Give up requests whose time is up, and a link on which nothing comes back."""
        self._watch = None
        now = self._loop.time()
        for request in list(self._pending):  # Whoever is answered may ask again at once.
            if request.deadline <= now:
                request.answer(
                    StorageUnavailable(f"{self.name} did not answer in time ({self._trouble}): is it up and reachable?")
                )
        if self._link is None:
            self._pending = deque(request for request in self._pending if request.deliver is not None)
        elif self._pending and self._is_late(self._pending[0], now):
            self._lost(self._link, f"no answer for {now - self._pending[0].sent_at:.1f} s")
        if self._pending:
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def _is_late(self, request: PendingCommand, now: float) -> bool:
        """Has it waited too long for an answer? Half of the time that it has is left for another connection."""
        patience_s = max((request.deadline - request.sent_at) / 2, LEAST_REPLY_S)
        return now - request.sent_at > min(REPLY_S, patience_s)

    def _fail_all(self, error: HoldfastError) -> None:
        pending, self._pending = self._pending, deque()
        for request in pending:
            request.answer(error)
