"""Hearing from a server: what happens in queues (sharded pub/sub), answers for those who wait, and the wake token.

All of it is hints. After a break everything is subscribed again and every listener is told to look.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from redis.exceptions import ConnectionError as LinkError
from redis.exceptions import RedisError

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis.connection import (
    BACKOFF_S,
    REPLY_S,
    Argument,
    RawConnection,
    Reply,
    ReplyParser,
    ServerError,
    packed,
)
from holdfast.storage.redis.topology import Servers

log = logging.getLogger("holdfast.redis")

QUIET_S = 15.0
"""A connection on which nothing was heard for so long is asked whether it is there."""
BLOCK_S = 1.0
"""How long a wait for the wake token lasts: a lost token costs no more."""
REST_S = 0.01
"""After a token came, so long there is no wait for others: mostly, what it told of is taken by then, and one wait does
for all."""

_TROUBLE = (RedisError, OSError, TimeoutError, HoldfastError, ServerError)


class PubSubListener:
    """One connection that only listens to channels of one server."""

    def __init__(self, servers: Servers, hear: Callable[[str, bytes], None], lost: Callable[[], None]) -> None:
        self._servers = servers
        self._hear = hear
        self._lost = lost
        self._channels: Counter[str] = Counter()
        self._confirmed: dict[str, asyncio.Event] = {}
        self._leaving: Counter[str] = Counter()
        self._transport: asyncio.WriteTransport | None = None
        self._link: RawConnection | None = None
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

    def end(self) -> asyncio.Task[None] | None:
        """Hear no more. What is returned ends soon."""
        if self._task is not None:
            self._task.cancel()
        return self._task

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

    def _begin(self, link: RawConnection, ended: asyncio.Future[Exception]) -> None:
        """Take a connection over, and subscribe to everything on it."""
        self._transport = link.attach(_feed(self._take, ended))
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


class WakeTokenListener:
    """The wake token: at most one a queue, taken by one waiting worker at a time. Blocks on a connection of its own,
    which never moves a job: a lost token costs one look.

    Who was rung for knows of work, and needs no other token until it has claimed less than it wanted (`arm`): that one
    is for somebody else.
    """

    def __init__(self, servers: Servers, ring: Callable[[str], None]) -> None:
        self._servers = servers
        self._ring = ring
        self._keys: Counter[str] = Counter()
        self._rung: dict[str, float] = {}
        """Keys that are not waited for, because there is work; each with the time when it was told. After a while they
        are, all the same."""
        self._waits_for: Sequence[str] = ()
        """The keys that the server was asked for; none if it was not."""
        self._resting: asyncio.TimerHandle | None = None
        self._client = 0
        """The number by which the server knows the connection that blocks."""
        self._transport: asyncio.WriteTransport | None = None
        self._asked_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def add(self, key: str) -> None:
        self._keys[key] += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="holdfast bell")
        elif self._keys[key] == 1:
            self._renew()

    def remove(self, key: str) -> None:
        self._keys[key] -= 1
        if self._keys[key] <= 0:
            del self._keys[key]
            self.arm(key)
            if key in self._waits_for:
                self._renew()

    def arm(self, key: str) -> None:
        """Ring again for this key: what its last token told of is taken."""
        if self._rung.pop(key, None) is not None:
            self._renew()

    def end(self) -> asyncio.Task[None] | None:
        """Ring no more. What is returned ends soon."""
        if self._resting is not None:
            self._resting.cancel()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def _send(self, key: str, *args: Argument) -> None:
        """Say something to the server on another connection, and do not wait for what it answers."""
        deadline = asyncio.get_running_loop().time() + BLOCK_S
        self._servers.wire(key).send(args, deadline, lambda reply: None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause = BACKOFF_S[0]
        while True:
            began = loop.time()
            try:
                await self._wait_on(await self._servers.link(next(iter(self._keys), "x")))
            except _TROUBLE as error:
                log.info("waiting for work at %s broke: %s", self._servers.name, error)
            finally:
                self._end()
            pause = BACKOFF_S[0] if loop.time() - began > BLOCK_S else min(2 * pause, BACKOFF_S[1])
            await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _wait_on(self, link: RawConnection) -> None:
        """Take tokens on this connection, until it is of no more use."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Exception] = loop.create_future()
        self._transport = link.attach(_feed(self._take, ended))
        self._asked_at = loop.time()
        self._transport.write(packed(("CLIENT", "ID")))
        while not ended.done():
            await asyncio.wait([ended], timeout=BLOCK_S)
            if self._asked_at and loop.time() - self._asked_at > BLOCK_S + REPLY_S:
                raise LinkError(f"no answer for {BLOCK_S + REPLY_S:.0f} s")
            for key in [key for key, at in self._rung.items() if loop.time() - at > BLOCK_S]:
                self.arm(key)
        raise ended.result()

    def _end(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._transport, self._waits_for, self._client = None, (), 0

    def _renew(self) -> None:
        """Other keys are to be waited for than before."""
        if self._waits_for:
            self._send(self._waits_for[0], "CLIENT", "UNBLOCK", self._client)
        else:
            self._wait()

    def _wait(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self._transport is not None and self._client and not self._waits_for:
            self._waits_for = [key for key in self._keys if key not in self._rung]
            if self._waits_for:
                self._asked_at = asyncio.get_running_loop().time()
                self._transport.write(packed(("BLPOP", *self._waits_for, str(BLOCK_S))))

    def _take(self, reply: Reply) -> None:
        """What the server said: the number of the connection, a token, or that there was none."""
        if isinstance(reply, ServerError):
            raise reply
        self._asked_at = 0.0
        if not self._client:
            self._client = reply
        self._waits_for = ()
        if isinstance(reply, list):
            key, _ = cast("list[bytes]", reply)
            self._take_token(key.decode())
        if self._resting is None:
            self._wait()

    def _take_token(self, key: str) -> None:
        """If nobody here wants it any more, it is another's."""
        if key not in self._keys:
            self._send(key, "LPUSH", key, "1")
            return
        loop = asyncio.get_running_loop()
        self._ring(key)
        self._rung[key] = loop.time()
        if len(self._keys) > len(self._rung):
            self._resting = loop.call_later(REST_S, self._wait)


def _feed(take: Callable[[Reply], None], ended: asyncio.Future[Exception]) -> ReplyParser:
    """Takes a connection over. `ended` says when and why it is of no more use."""

    def end(error: Exception) -> None:
        if not ended.done():
            ended.set_result(error)

    def taking(message: Reply) -> None:
        try:
            take(message)
        except _TROUBLE as error:
            end(error)

    return ReplyParser(taking, lambda trouble: end(LinkError(trouble)))
