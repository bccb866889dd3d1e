"""Hearing from a server: what happens in queues (sharded pub/sub), answers for those who wait, and the wake token.

All of it is hints. After a break everything is subscribed again and every listener is told to look.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from redis.exceptions import ConnectionError as LinkError
from redis.exceptions import RedisError

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis.servers import Servers
from holdfast.storage.redis.wire import BACKOFF_S, REPLY_S, Argument, Feed, Link, Reply, ServerError, packed

log = logging.getLogger("holdfast.redis")

QUIET_S = 15.0
"""A connection on which nothing was heard for so long is asked whether it is there."""
BLOCK_S = 1.0
"""How long a wait for the wake token lasts: a lost token costs no more."""

_TROUBLE = (RedisError, OSError, TimeoutError, HoldfastError, ServerError)


class Ear:
    """One connection that only listens to channels of one server."""

    def __init__(self, servers: Servers, hear: Callable[[str, bytes], None], lost: Callable[[], None]) -> None:
        self._servers = servers
        self._hear = hear
        self._lost = lost
        self._channels: Counter[str] = Counter()
        self._confirmed: dict[str, asyncio.Event] = {}
        self._leaving: Counter[str] = Counter()
        self._transport: asyncio.WriteTransport | None = None
        self._link: Link | None = None
        """Kept, because it closes its transport when nobody keeps it."""
        self._heard_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def listen(self, channel: str, timeout_s: float) -> None:
        """Hear a channel from now on: returns when the server has said so."""
        self._channels[channel] += 1
        if channel in self._confirmed and self._confirmed[channel].is_set():
            return
        if channel not in self._confirmed:
            self._confirmed[channel] = asyncio.Event()
            self._write("SSUBSCRIBE", channel)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast ear")
        try:
            async with asyncio.timeout(timeout_s):
                await self._confirmed[channel].wait()
        except TimeoutError:
            self.leave(channel)
            raise StorageUnavailable(f"{self._servers.name} could not be listened to: is it up?") from None
        except BaseException:
            self.leave(channel)
            raise

    def leave(self, channel: str) -> None:
        self._channels[channel] -= 1
        if self._channels[channel] <= 0:
            del self._channels[channel]
            self._confirmed.pop(channel, None)
            if self._write("SUNSUBSCRIBE", channel):
                self._leaving[channel] += 1

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _write(self, *args: Argument) -> bool:
        """Say something, if there is a connection; else it is said when there is one."""
        if self._transport is not None:
            self._transport.write(packed(args))
        return self._transport is not None

    async def _run(self) -> None:
        pause = BACKOFF_S[0]
        first = True
        while True:
            try:
                link = await self._servers.link(next(iter(self._channels), "x"))
                ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
                self._begin(link, ended)
                if not first:
                    self._lost()
                first, pause = False, BACKOFF_S[0]
                await self._watch(ended)
            except _TROUBLE as error:
                if isinstance(error, ServerError) and error.code == "MOVED":
                    await self._find_again(error)
                log.info("listening to %s broke: %s", self._servers.name, error)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, BACKOFF_S[1])
            finally:
                self._end()

    def _begin(self, link: Link, ended: asyncio.Future[Exception]) -> None:
        """Take a connection over, and subscribe to everything on it. `ended` says when and why it is of no more use."""

        def end(error: Exception) -> None:
            if not ended.done():
                ended.set_result(error)

        def take(message: Reply) -> None:
            try:
                self._take(message)
            except _TROUBLE as error:
                end(error)

        self._transport = link.attach(Feed(take, lambda trouble: end(LinkError(trouble))))
        self._link = link
        for channel in self._channels:
            self._write("SSUBSCRIBE", channel)

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._transport = None
        self._leaving.clear()
        for event in self._confirmed.values():
            event.clear()

    async def _watch(self, ended: asyncio.Future[Exception]) -> None:
        """Wait for the end. After a quiet while, ask: a half-open connection says nothing for ever."""
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            done, _ = await asyncio.wait([ended], timeout=QUIET_S)
            if not done and self._heard_at < asked_at:
                self._write("PING")
                done, _ = await asyncio.wait([ended], timeout=REPLY_S)
                if not done and self._heard_at < asked_at:
                    raise LinkError(f"no answer for {REPLY_S:.0f} s")
            if done:
                raise ended.result()

    async def _find_again(self, error: ServerError) -> None:
        try:
            await self._servers.moved(error)
        except _TROUBLE:
            await asyncio.sleep(BACKOFF_S[1])

    def _take(self, message: Reply) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if isinstance(message, ServerError):
            raise message
        kind, channel, *rest = cast("list[Any]", message)
        if kind == b"smessage":
            self._hear(channel.decode(), rest[0])
        elif kind == b"ssubscribe" and channel.decode() in self._confirmed:
            self._confirmed[channel.decode()].set()
        elif kind == b"sunsubscribe" and channel:
            name = channel.decode()
            self._leaving[name] -= 1
            if self._leaving[name] < 0 and name in self._channels:
                raise LinkError("the server took a channel away")  # Its slot moves to another node.


class Bell:
    """The wake token: at most one a queue, taken by one waiting worker at a time. Blocks on a connection of its own,
    which never moves a job: a lost token costs one look."""

    def __init__(self, servers: Servers, ring: Callable[[str], None]) -> None:
        self._servers = servers
        self._ring = ring
        self._keys: Counter[str] = Counter()
        self._client = 0
        """The number by which the server knows the connection that blocks."""
        self._task: asyncio.Task[None] | None = None

    def add(self, key: str) -> None:
        self._keys[key] += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast bell")
        elif self._keys[key] == 1:
            self._send(key, "CLIENT", "UNBLOCK", self._client)  # It waits for the keys that there were.

    def remove(self, key: str) -> None:
        self._keys[key] -= 1
        if self._keys[key] <= 0:
            del self._keys[key]
            self._send(key, "CLIENT", "UNBLOCK", self._client)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, key: str, *args: Argument) -> None:
        """Say something to the server, and do not wait for what it answers."""
        deadline = asyncio.get_running_loop().time() + BLOCK_S
        self._servers.wire(key).send(args, deadline, lambda reply: None)

    async def _run(self) -> None:
        pause = BACKOFF_S[0]
        while self._keys:
            link: Link | None = None
            try:
                link = await self._servers.link(next(iter(self._keys)))
                self._client = await self._ask(link, "CLIENT", "ID")
                while self._keys:
                    token = await self._ask(link, "BLPOP", *self._keys, str(BLOCK_S))
                    if token is not None:
                        self._take(token[0].decode())
                    pause = BACKOFF_S[0]
            except _TROUBLE as error:
                log.info("waiting for work at %s broke: %s", self._servers.name, error)
                await asyncio.sleep(pause * random.uniform(0.5, 1))
                pause = min(2 * pause, BACKOFF_S[1])
            finally:
                if link is not None:
                    await link.disconnect(nowait=True)
        self._task = None

    async def _ask(self, link: Link, *args: Argument) -> Reply:
        link.write(*args)
        async with asyncio.timeout(BLOCK_S + REPLY_S):
            reply = await link.read()
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def _take(self, key: str) -> None:
        """A token came. If nobody here wants it any more, it is another's."""
        if key in self._keys:
            self._ring(key)
        else:
            self._send(key, "LPUSH", key, "1")
