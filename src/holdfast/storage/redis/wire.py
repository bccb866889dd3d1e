"""One connection to one server: requests go out in order, replies come back in order, many at a time.

A request survives its connection. When that breaks, or the server answers that it is not ready, everything without a
reply is sent again in its first order, on a new connection, until its deadline. That is safe because whatever changes
something has a number (queue.lua, `once`). A caller that is cancelled leaves its reply to be read and dropped here:
no connection is ever out of step.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as LinkError

from holdfast.errors import HoldfastError, StorageUnavailable

log = logging.getLogger("holdfast.redis")

Argument = bytes | str | int
Reply = Any
"""What a server says: bytes, int, None, or a list of these."""

REPLY_S = 5.0
"""A server that has not answered for so long is taken for gone: the connection may be half open."""
WATCH_S = 0.25
"""How often deadlines are looked at, while somebody waits."""
BACKOFF_S = (0.01, 1.0)
"""The first and the longest pause between two attempts to connect."""

NOT_READY = (ReadOnlyError, ClusterDownError, TryAgainError)
"""Answers of a server that will be able to, or whose place another takes: also LOADING, which is a ConnectionError."""
NOT_READY_CODES = ("MASTERDOWN", "BUSY", "NOREPLICAS", "UNBLOCKED", "MISCONF")
NOT_LOADED = "Function not found"
REFUSED = (AuthenticationError, AuthorizationError)


class Link(Protocol):
    """A redis-py connection, as `servers.link` makes it: what redis-py sets up, and we read and write."""

    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = False) -> None: ...
    def pack_command(self, *args: Argument) -> list[bytes]: ...
    def write(self, data: Sequence[bytes]) -> None: ...
    async def read(self) -> Reply: ...


class Request:
    """A command on its way. `library` is the source of its function, for a server that has not seen it."""

    __slots__ = ("args", "deadline", "future", "library", "sent_at")

    def __init__(self, args: tuple[Argument, ...], library: str | None, future: asyncio.Future[Reply], deadline: float):
        self.args = args
        self.library = library
        self.future = future
        self.deadline = deadline
        self.sent_at = 0.0


class Wire:
    """A connection that mends itself. `connect` gives a fresh link; it is asked again after every break, so it may
    look up where the server is now."""

    def __init__(self, name: str, connect: Callable[[], Awaitable[Link]]) -> None:
        self.name = name
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._pending: deque[Request] = deque()
        """Without a reply, in the order in which they go out. If there is a link, all of them have been sent."""
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._trouble = "not connected yet"
        self._load_error = "nothing was said"
        self._closed = False
        self.reconnects = 0

    def send(self, args: tuple[Argument, ...], deadline: float, library: str | None = None) -> asyncio.Future[Reply]:
        """Send a command now, or as soon as there is a connection. The future has its reply, or a server's error."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        if self._closed:
            future.set_exception(StorageUnavailable(f"the connection to {self.name} is closed"))
            return future
        request = Request(args, library, future, deadline)
        self._pending.append(request)
        if self._link is not None:
            self._write(self._link, request)
        elif self._task is None:
            self._task = self._loop.create_task(self._run(), name=f"holdfast wire {self.name}")
        if self._watch is None:
            self._watch = self._loop.call_later(WATCH_S, self._look)
        return future

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all(StorageUnavailable(f"the connection to {self.name} was closed"))

    def _write(self, link: Link, request: Request) -> None:
        request.sent_at = self._loop.time()
        link.write(link.pack_command(*request.args))

    async def _run(self) -> None:
        """Connect, send what waits, read replies; and again after a break, for as long as somebody waits."""
        pause, longest = BACKOFF_S
        try:
            while self._pending:
                try:
                    link = await self._connect()
                except REFUSED as error:
                    self._fail_all(StorageUnavailable(f"{self.name} refused the connection: {error}"))
                    return
                except (RedisError, OSError, TimeoutError) as error:
                    self._trouble = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause * random.uniform(0.5, 1))
                    pause = min(2 * pause, longest)
                    continue
                except HoldfastError as error:
                    self._fail_all(error)
                    return
                pause = await self._serve(link, pause)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _serve(self, link: Link, pause: float) -> float:
        """Use a link until it breaks. The pause before the next attempt: a short one if this was of use."""
        try:
            self._forget_answered()
            for request in self._pending:
                self._write(link, request)
            self._link = link
            while True:
                reply = await link.read()
                self._take(reply)
                pause = BACKOFF_S[0]
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._trouble = f"{type(error).__name__}: {error}"
            log.info("the connection to %s broke: %s", self.name, self._trouble)
            self.reconnects += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            return min(2 * pause, BACKOFF_S[1])
        finally:
            if self._link is link:
                self._link = None
            await _drop(link)

    def _take(self, reply: Reply) -> None:
        """The reply to the oldest request."""
        if isinstance(reply, ResponseError):
            if isinstance(reply, NOT_READY) or str(reply).startswith(NOT_READY_CODES):
                raise reply
            if str(reply).startswith(NOT_LOADED):
                if self._pending[0].library is not None:
                    self._load(self._pending.popleft())
                    return
                reply = ResponseError(f"{reply}: the library could not be loaded ({self._load_error})")
        if not self._pending:
            raise LinkError("a reply that nobody asked for")
        future = self._pending.popleft().future
        if future.done():
            return
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _load(self, request: Request) -> None:
        """The server does not know the library (any more): send its text, and the request again. Another client may
        have been quicker; then the first of the two fails, and it does not matter."""
        assert self._link is not None
        assert request.library is not None
        loads: asyncio.Future[Reply] = self._loop.create_future()
        loads.add_done_callback(self._note_load_error)
        load = Request(("FUNCTION", "LOAD", request.library), None, loads, request.deadline)
        request.library = None
        for sent in (load, request):
            self._pending.append(sent)
            self._write(self._link, sent)

    def _note_load_error(self, load: asyncio.Future[Reply]) -> None:
        if not load.cancelled() and load.exception() is not None:
            self._load_error = str(load.exception())

    def _look(self) -> None:
        """Let go of requests whose time is up, and of a link on which nothing comes back."""
        self._watch = None
        now = self._loop.time()
        for request in self._pending:
            if request.deadline <= now and not request.future.done():
                request.future.set_exception(
                    StorageUnavailable(f"{self.name} did not answer in time ({self._trouble}): is it up and reachable?")
                )
        if self._link is None:
            self._forget_answered()
        elif self._pending and now - self._pending[0].sent_at > REPLY_S:
            self._trouble = f"no answer for {REPLY_S:.0f} s"
            self.cut()
        if self._pending:
            self._watch = self._loop.call_later(WATCH_S, self._look)

    def cut(self) -> None:
        """Give up the present link; what has no reply is sent again on the next."""
        self._link = None
        if self._task is not None:
            self._task.cancel()
            self._task = self._loop.create_task(self._run(), name=f"holdfast wire {self.name}")

    def _forget_answered(self) -> None:
        """Between two links: what nobody waits for any more is not sent again."""
        self._pending = deque(request for request in self._pending if not request.future.done())

    def _fail_all(self, error: HoldfastError) -> None:
        pending, self._pending = self._pending, deque()
        for request in pending:
            if not request.future.done():
                request.future.set_exception(error)


async def _drop(link: Link) -> None:
    try:
        await link.disconnect(nowait=True)
    except (RedisError, OSError, TimeoutError, RuntimeError):
        pass  # It is gone either way.
