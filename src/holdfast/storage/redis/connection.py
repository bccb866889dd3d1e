"""Connections that survive a break: commands are sent in order, replies arrive in order, many at a time.

If the connection breaks, or the server answers that it is not ready, every command without a reply is sent again in the
same order on a new connection, until its deadline. That is safe because each call that changes something has a number
(calls.lua, `once`). The reply of a cancelled caller is still read here, and dropped, so replies always match commands.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Any

import msgspec

from holdfast.errors import HoldfastError, StorageUnavailable
from holdfast.storage.redis.raw import Argument, Deliver, LoginRefused, RawConnection, Reply, ServerError
from holdfast.storage.redis.script import Library, hash_of

log = logging.getLogger("holdfast.redis")

REPLY_S = 5.0
"""A connection that is silent for 5 s while a command waits is broken: it may be half open."""
SLOW_REPLY_S = 240.0
"""How long a command may wait beyond its deadline while its bytes or those of its reply move: the link is slow. The
longest timeout and this time are less than the time for which a server keeps replies."""
LEAST_REPLY_S = 0.5
"""Minimum time to wait for a reply before the connection counts as broken, even if a call has less time."""
CHECK_S = 0.25
"""How often deadlines are checked while a command waits."""
BACKOFF_S = (0.01, 1.0)
"""The first and the longest pause between two attempts to connect."""
NOT_READY = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "BUSY", "NOREPLICAS", "MISCONF", "UNBLOCKED")
)
"""Errors of a server that will be ready later, or that another server will replace: all commands are sent again."""


def resolve(future: asyncio.Future[Any], reply: Reply) -> None:
    """Give a reply, or an error, to a caller that still waits."""
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


class ReconnectingConnection(ABC):
    """One connection to a server: opened when it is needed, and again after each break, with growing pauses.

    There is at most one socket. A reply that still arrives on an earlier one is dropped. `connect` opens a socket after
    every break, so it may look up where the server is now. A subclass decides whether a connection is needed, writes to
    a new one, and takes replies. A task exists only while a connection is being opened; `end` cancels it.
    """

    def __init__(self, name: str, connect: Callable[[], Awaitable[RawConnection]]) -> None:
        self.name = name
        self._connect = connect
        self._loop: asyncio.AbstractEventLoop
        """Set when a connection is needed for the first time."""
        self._raw: RawConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = BACKOFF_S[0]
        self._trouble = "not connected yet"
        """Why there is no connection, or why the last one ended."""
        self._closed = False

    @abstractmethod
    def _is_needed(self) -> bool: ...

    @abstractmethod
    def _on_connected(self, raw: RawConnection) -> None: ...

    @abstractmethod
    def _on_reply(self, reply: Reply) -> None: ...

    @abstractmethod
    def _check(self) -> None:
        """Break a connection that does not answer. Called once after `_check_after`."""

    def _on_disconnected(self) -> None:  # noqa: B027
        """Reset the state that belongs to the connection."""

    def _on_connect_error(self, error: Exception) -> None:  # noqa: B027
        """Take a failed attempt to connect. Another one follows if a connection is still needed afterwards."""

    def end(self) -> asyncio.Task[None] | None:
        """Close the connection for good. Returns the cancelled task that was opening it, if there was one."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
        self._drop()
        return opening

    def _ensure_open(self, pause_s: float = 0.0) -> None:
        """Open a connection after a pause, unless there is one or it is being opened."""
        if self._raw is None and self._opening is None:
            self._loop = asyncio.get_running_loop()
            self._opening = self._loop.create_task(self._open(pause_s), name=f"holdfast connect {self.name}")

    async def _open(self, pause_s: float) -> None:
        """Try to connect for as long as a connection is needed."""
        try:
            while self._is_needed():
                await asyncio.sleep(pause_s)
                try:
                    raw = await self._connect()
                except Exception as error:
                    trouble = f"{type(error).__name__}: {error}"
                    if trouble != self._trouble:
                        log.info("could not connect to %s: %s", self.name, trouble)
                    self._trouble = trouble
                    self._on_connect_error(error)
                    pause_s = self._next_pause_s()
                else:
                    self._raw = raw
                    raw.start(self._on_reply, self._break)
                    self._on_connected(raw)
                    return
        finally:
            if self._opening is asyncio.current_task():
                self._opening = None

    def _break(self, trouble: str) -> None:
        """Close the connection. If one is needed, open another after a pause."""
        if self._raw is None:
            return
        log.info("lost the connection to %s: %s", self.name, trouble)
        self._trouble = trouble
        self._drop()
        if self._is_needed():
            self._ensure_open(self._next_pause_s())

    def _drop(self) -> None:
        if self._raw is not None:
            self._raw.abort()
            self._raw = None
            self._on_disconnected()

    def _next_pause_s(self) -> float:
        """Return how long to wait before the next attempt: twice as long each time, until a command succeeds."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, BACKOFF_S[1])
        return pause_s * random.uniform(0.5, 1)

    def _check_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check)


class PendingCommand(msgspec.Struct, eq=False):
    """A command without a reply."""

    args: tuple[Argument, ...]
    deadline: float
    deliver: Deliver | None
    """Takes the reply or an error. None once it was called, and for FUNCTION LOAD, whose reply is ignored."""
    library: Library | None
    loaded: bool = False
    """The library was sent for this command."""
    script: str = ""
    """Text of the script that replaces the function."""
    sent_at: float = 0.0
    ends_at: int = 0
    """Number of bytes that the connection had written after this command."""

    def use_script(self, *, with_text: bool = False) -> None:
        """Call a script instead of a function: by its hash, which a server that has run it knows, or with its text."""
        if self.library is not None and self.args[0] == "FCALL":
            self.script = self.library.script(str(self.args[1]))
            self.args = ("EVALSHA", hash_of(self.script), *self.args[2:])
        if with_text:
            self.args = ("EVAL", self.script, *self.args[2:])

    def answer(self, reply: Reply) -> None:
        deliver, self.deliver = self.deliver, None
        if deliver is not None:
            deliver(reply)


class ServerConnection(ReconnectingConnection):
    """The connection for commands. After a break it sends the commands without a reply again, in order."""

    def __init__(self, name: str, connect: Callable[[], Awaitable[RawConnection]]) -> None:
        super().__init__(name, connect)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[PendingCommand] = deque()
        """Commands without a reply, in the order of sending. With a connection, all of them were sent."""
        self._moved = 0
        """Bytes of the oldest command and of replies that had moved at the last check."""
        self._moved_at = 0.0
        """When a check found that bytes had moved."""
        self._uses_scripts = False
        """This connection has no library and cannot load it: calls are sent as scripts."""

    def send(
        self, args: tuple[Argument, ...], deadline: float, deliver: Deliver, library: Library | None = None
    ) -> None:
        """Send a command now, or as soon as there is a connection. `deliver` gets its reply, or an error."""
        if self._closed:
            deliver(StorageUnavailable(f"the connection to {self.name} is closed"))
            return
        self._append(PendingCommand(args, deadline, deliver, library))
        if self._timer is None:
            self._check_after(CHECK_S)

    def _append(self, command: PendingCommand) -> None:
        self._pending.append(command)
        if self._raw is not None:
            self._write(command, self._raw)
        else:
            self._ensure_open()

    def _write(self, command: PendingCommand, raw: RawConnection) -> None:
        command.sent_at = self._loop.time()
        if self._uses_scripts and command.library is not None:
            command.use_script()
        raw.write(command.args)
        command.ends_at = raw.written

    def call(
        self, args: tuple[Argument, ...], deadline: float, library: Library | None = None
    ) -> asyncio.Future[Reply]:
        """Send a command and return a future of its reply."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.send(args, deadline, partial(resolve, future), library)
        return future

    def end(self) -> asyncio.Task[None] | None:
        opening = super().end()
        self._fail_all(StorageUnavailable(f"the connection to {self.name} was closed"))
        return opening

    def _is_needed(self) -> bool:
        return bool(self._pending)

    def _on_connect_error(self, error: Exception) -> None:
        """Fail all commands at once if another attempt would meet the same error."""
        if isinstance(error, LoginRefused):
            self._fail_all(StorageUnavailable(f"{self.name} refused the connection: {error}"))
        elif isinstance(error, HoldfastError):
            self._fail_all(error)

    def _on_connected(self, raw: RawConnection) -> None:
        self._drop_answered()
        self._moved, self._uses_scripts = 0, False
        for command in self._pending:
            self._write(command, raw)

    def _on_reply(self, reply: Reply) -> None:
        """Take the reply to the oldest command."""
        if not self._pending:
            self._break("the server sent a reply without a command")
            return
        if isinstance(reply, ServerError):
            if reply.code in NOT_READY:
                self._break(f"not ready: {reply}")
                return
            library = self._pending[0].library
            if library is not None and str(reply).startswith(("ERR Function not found", "NOSCRIPT")):
                self._load(library, self._pending.popleft())
                return
        self._pause_s = BACKOFF_S[0]
        self._pending.popleft().answer(reply)

    def _load(self, library: Library, command: PendingCommand) -> None:
        """Send the text of the library, and the command again. A server that has no library even then (it is full, the
        user lacks the permission, or another client has deleted the library) gets scripts on this connection."""
        if command.args[0] == "EVALSHA":
            command.use_script(with_text=True)
        elif command.loaded:
            self._uses_scripts = True
        else:
            command.loaded = True
            self._append(PendingCommand(("FUNCTION", "LOAD", library.text), command.deadline, None, None))
        self._append(command)

    def _next_pause_s(self) -> float:
        """Shorten the pause if needed, so that every command gets several attempts before its deadline."""
        now = self._loop.time()
        left_s = min((command.deadline for command in self._pending), default=now) - now
        return min(super()._next_pause_s(), max(left_s / 4, BACKOFF_S[0]))

    def _check(self) -> None:
        """Fail commands at their deadline, and break a connection that is silent."""
        self._timer = None
        now = self._loop.time()
        first = self._pending[0] if self._pending else None
        silent_s = self._silent_s(first, now)
        for command in list(self._pending):  # A caller that gets an answer may send its next command at once.
            late_s = now - command.deadline
            if late_s >= 0 and (command is not first or silent_s > LEAST_REPLY_S or late_s > SLOW_REPLY_S):
                command.answer(
                    StorageUnavailable(f"{self.name} did not answer in time ({self._trouble}): is it up and reachable?")
                )
        if self._raw is None:
            self._drop_answered()
        elif first is not None:
            patience_s = max((first.deadline - first.sent_at) / 2, LEAST_REPLY_S)  # The rest is for another connection.
            if silent_s > min(REPLY_S, patience_s):
                self._break(f"no answer for {silent_s:.1f} s")
        if self._pending:
            self._check_after(CHECK_S)

    def _silent_s(self, first: PendingCommand | None, now: float) -> float:
        """Return for how long nothing has arrived and nothing of the oldest command has left. Bytes of later commands
        are not a sign of life: the system of a frozen server takes them."""
        if first is None or self._raw is None:
            return inf
        moved = self._raw.received + min(self._raw.sent, first.ends_at)
        if moved > self._moved:
            self._moved, self._moved_at = moved, now
        return now - max(self._moved_at, first.sent_at)

    def _drop_answered(self) -> None:
        """Remove commands that have failed. Only without a connection: on one, their replies still arrive."""
        self._pending = deque(command for command in self._pending if command.deliver is not None)

    def _fail_all(self, error: HoldfastError) -> None:
        pending, self._pending = self._pending, deque()
        for command in pending:
            command.answer(error)
