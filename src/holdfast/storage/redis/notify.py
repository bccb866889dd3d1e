"""Connections on which a server speaks first: messages of queues (sharded pub/sub), and the wake token of workers.

A message or a token may be lost. After a break the connection subscribes again and notifies every subscription that it
may have missed an event.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from holdfast.errors import StorageUnavailable
from holdfast.storage.redis.connection import BACKOFF_S, REPLY_S, ReconnectingConnection
from holdfast.storage.redis.raw import Argument, RawConnection, Reply, ServerError
from holdfast.storage.redis.topology import Servers

QUIET_S = 15.0
"""After 15 s without a message the listener pings the server."""
BLOCK_S = 1.0
"""How long one BLPOP waits for the wake token. A lost token delays a worker by at most this time."""
REST_S = 0.01
"""Delay before the next BLPOP after a token. Usually the woken worker has claimed the work by then and waits for its
key again, so that one BLPOP covers all queues."""


class PubSubListener(ReconnectingConnection):
    """One connection that listens to channels of one server.

    `on_message` gets the channel and the message. `on_gap` is called after each reconnection: messages may be lost.
    """

    def __init__(self, servers: Servers, on_message: Callable[[str, bytes], None], on_gap: Callable[[], None]) -> None:
        super().__init__(servers.name, self._find_and_open)
        self._servers = servers
        self._on_message = on_message
        self._on_gap = on_gap
        self._channels: Counter[str] = Counter()
        self._confirmed: dict[str, asyncio.Event] = {}
        self._leaving: Counter[str] = Counter()
        """Number of SUNSUBSCRIBE commands without a reply, by channel."""
        self._was_connected = False
        self._moved: ServerError | None = None
        """The MOVED error of a channel; None once its node was looked up."""
        self._heard = self._pinged = False
        """Whether a message arrived, and whether a PING was sent, since the last check."""

    async def listen(self, channel: str, timeout_s: float) -> None:
        """Subscribe to a channel. Returns when the server has confirmed the subscription."""
        self._channels[channel] += 1
        confirmed = self._confirmed.get(channel)
        if confirmed is not None and confirmed.is_set() and not self._closed:
            return
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.Event()
            if self._raw is not None:
                self._raw.write(("SSUBSCRIBE", channel))
        self._ensure_open()
        try:
            async with asyncio.timeout(timeout_s):
                await confirmed.wait()
            if self._closed:
                raise StorageUnavailable(f"the connection to {self.name} was closed")
        except BaseException as error:
            self.leave(channel)
            if isinstance(error, TimeoutError):
                raise StorageUnavailable(f"{self.name} did not confirm a subscription: {self._trouble}") from None
            raise

    def end(self) -> asyncio.Task[None] | None:
        opening = super().end()
        for confirmed in self._confirmed.values():
            confirmed.set()
        return opening

    def leave(self, channel: str) -> None:
        self._channels[channel] -= 1
        if self._channels[channel] <= 0:
            del self._channels[channel]
            self._confirmed.pop(channel, None)
            if self._raw is not None:
                self._raw.write(("SUNSUBSCRIBE", channel))
                self._leaving[channel] += 1

    async def _find_and_open(self) -> RawConnection:
        if self._moved is not None:
            await self._servers.on_moved(self._moved)
            self._moved = None
        return await self._servers.open(next(iter(self._channels), ""))

    def _is_needed(self) -> bool:
        return bool(self._channels)

    def _on_connected(self, raw: RawConnection) -> None:
        for channel in self._channels:
            raw.write(("SSUBSCRIBE", channel))
        if self._was_connected:
            self._on_gap()
        self._was_connected = True
        self._heard = self._pinged = False
        self._check_after(QUIET_S)

    def _on_disconnected(self) -> None:
        self._leaving.clear()
        for event in self._confirmed.values():
            event.clear()

    def _check(self) -> None:
        """Ping the server if no message arrived: a half-open connection stays silent forever."""
        if self._raw is None:
            return
        if self._pinged and not self._heard:
            self._break(f"no answer for {REPLY_S:.0f} s")
            return
        self._pinged = not self._heard
        if self._pinged:
            self._raw.write(("PING",))
        self._heard = False
        self._check_after(REPLY_S if self._pinged else QUIET_S)

    def _on_reply(self, reply: Reply) -> None:
        self._heard = True
        if isinstance(reply, ServerError):
            if reply.code == "MOVED":
                self._moved = reply
            self._break(str(reply))
            return
        if not isinstance(reply, list):  # PONG.
            return
        kind, channel, *rest = cast("Any", reply)
        channel = (channel or b"").decode()
        if kind == b"smessage":
            self._on_message(channel, rest[0])
        elif kind == b"ssubscribe" and channel in self._confirmed:
            self._pause_s = BACKOFF_S[0]
            self._confirmed[channel].set()
        elif kind == b"sunsubscribe" and channel:
            self._leaving[channel] -= 1
            if self._leaving[channel] < 0 and channel in self._channels:
                self._break("the server ended a subscription")  # The slot of the channel moves to another node.


class WakeTokenListener(ReconnectingConnection):
    """Waits for wake tokens. A queue has at most one, and one waiting worker takes it. A lost token costs one poll.

    A woken worker needs no other token until it has claimed less than it wanted and calls `rearm`. Until then the next
    token is for another worker.
    """

    def __init__(self, servers: Servers, on_wake: Callable[[str], None]) -> None:
        super().__init__(servers.name, lambda: servers.open(next(iter(self._keys), "")))
        self._servers = servers
        self._on_wake = on_wake
        self._keys: Counter[str] = Counter()
        self._recently_woken: dict[str, float] = {}
        """Keys that BLPOP leaves out because a worker has taken their token, with the time of the token. BLPOP includes
        a key again after `BLOCK_S` in any case."""
        self._waits_for: Sequence[str] = ()
        """The keys of the BLPOP without a reply; empty if there is none."""
        self._resting: asyncio.TimerHandle | None = None
        self._client_id = 0
        """The id of this connection on the server; 0 until the server has sent it."""
        self._sent_at = 0.0
        """When the command without a reply was sent; 0 if there is none."""

    def add(self, key: str) -> None:
        self._keys[key] += 1
        self._ensure_open()
        if self._keys[key] == 1:
            self._renew_wait()

    def remove(self, key: str) -> None:
        self._keys[key] -= 1
        if self._keys[key] <= 0:
            del self._keys[key]
            self.rearm(key)
            if key in self._waits_for:
                self._renew_wait()

    def rearm(self, key: str) -> None:
        """Wait for this key again, after the work of its last token was claimed."""
        if self._recently_woken.pop(key, None) is not None:
            self._renew_wait()

    def _is_needed(self) -> bool:
        return bool(self._keys)

    def _on_connected(self, raw: RawConnection) -> None:
        self._sent_at = self._loop.time()
        raw.write(("CLIENT", "ID"))
        self._check_after(BLOCK_S)

    def _on_disconnected(self) -> None:
        self._stop_resting()
        self._waits_for, self._client_id, self._sent_at = (), 0, 0.0

    def _check(self) -> None:
        now = self._loop.time()
        if self._sent_at and now - self._sent_at > BLOCK_S + REPLY_S:
            self._break(f"no answer for {BLOCK_S + REPLY_S:.0f} s")
        if self._raw is not None:
            for key in [key for key, at in self._recently_woken.items() if now - at > BLOCK_S]:
                self.rearm(key)
            self._check_after(BLOCK_S)

    def _renew_wait(self) -> None:
        """Wait for other keys. The command connection ends a BLPOP that has begun."""
        if self._waits_for:
            self._send_elsewhere(self._waits_for[0], "CLIENT", "UNBLOCK", self._client_id)
        else:
            self._wait()

    def _send_elsewhere(self, key: str, *args: Argument) -> None:
        """Send a command on the command connection, and ignore its reply."""
        self._servers.connection(key).send(args, self._loop.time() + BLOCK_S, lambda reply: None)

    def _wait(self) -> None:
        self._stop_resting()
        if self._raw is not None and self._client_id and not self._waits_for:
            self._waits_for = [key for key in self._keys if key not in self._recently_woken]
            if self._waits_for:
                self._sent_at = self._loop.time()
                self._raw.write(("BLPOP", *self._waits_for, str(BLOCK_S)))

    def _stop_resting(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _on_reply(self, reply: Reply) -> None:
        """Take the id of the connection, a token, or the empty reply after `BLOCK_S`."""
        if isinstance(reply, ServerError):
            self._break(str(reply))
            return
        self._sent_at = 0.0
        if not self._client_id:
            self._client_id = reply
        else:
            self._pause_s = BACKOFF_S[0]
        self._waits_for = ()
        if isinstance(reply, list):
            key, _ = cast("list[bytes]", reply)
            self._on_token(key.decode())
        if self._resting is None:
            self._wait()

    def _on_token(self, key: str) -> None:
        """Wake a worker. If no worker of this process waits for the key, put the token back for another process."""
        if key not in self._keys:
            self._send_elsewhere(key, "LPUSH", key, "1")
            return
        self._on_wake(key)
        self._recently_woken[key] = self._loop.time()
        if len(self._keys) > len(self._recently_woken):
            self._resting = self._loop.call_later(REST_S, self._wait)
