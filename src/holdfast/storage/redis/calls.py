"""Calls of queue.lua: numbered, in order, and together where several callers ask for the same.

Nothing in flight: a call is sent at once. What is asked meanwhile waits, and goes as one batch per verb when the reply
is there, in the order in which it was asked, per queue and across verbs. One call per queue and verb is in flight, so
the script needs to remember only the last number of each. A cancelled caller leaves if its call was not sent; if it
was, its effect stands.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from importlib import resources

from redis.exceptions import AskError, MovedError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import ConnectionError as LinkError

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, LayoutTooNew, StorageFull, StorageUnavailable
from holdfast.storage.checks import MAX_CALL_BYTES, MAX_ITEMS
from holdfast.storage.redis.servers import ClusterServers, Gone, Servers
from holdfast.storage.redis.wire import Argument, Reply

LAYOUT = 1
"""The layout of keys and records that this version writes, and the newest that it reads."""
BODY = resources.files("holdfast.storage.redis").joinpath("queue.lua").read_text()
CLOCK = "local time = call('TIME')\n  return time[1] * 1000000 + time[2]"
"""Where the script reads the server's clock: the only place where it learns the time."""
INJECTED_CLOCK = "return tonumber(table.remove(ARGV))"
"""What stands there instead when a storage is opened with a clock of its own, as tests do."""


class Library:
    """queue.lua as a server gets it: a library of two functions, under a name made from its content."""

    def __init__(self, body: str, injected_clock: bool) -> None:
        if injected_clock:
            assert CLOCK in body
            body = body.replace(CLOCK, INJECTED_CLOCK)
        self.name = f"holdfast_{hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.text = f"#!lua name={self.name}\nlocal NAME = '{self.name}'\n{body}"


class Ask:
    """A caller's part of a call: some items, for a verb with certain options."""

    __slots__ = ("count", "future", "items", "options", "size", "verb")

    def __init__(
        self, verb: str, options: tuple[Argument, ...], items: Sequence[Argument], count: int, size: int
    ) -> None:
        self.verb = verb
        self.options = options
        self.items = items
        self.count = count
        self.size = size
        self.future: asyncio.Future[tuple[Reply, int]] = asyncio.get_running_loop().create_future()


class Line:
    """The calls to one queue, in their order."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._asks: deque[Ask] = deque()
        self._busy: set[str] = set()
        self._numbers: dict[str, int] = {}

    def ask(self, ask: Ask) -> None:
        self._asks.append(ask)
        self.pump()

    def pump(self) -> None:
        """Send what may go: the first ask in line, with those behind it that fit, if nothing of its verb is out."""
        while (first := self._first()) is not None and first.verb not in self._busy:
            self._send(first.verb, self._take(first))

    def _first(self) -> Ask | None:
        while self._asks and self._asks[0].future.cancelled():
            self._asks.popleft()
        return self._asks[0] if self._asks else None

    def _take(self, first: Ask) -> list[Ask]:
        """The longest batch at the head of the line."""
        batch = [self._asks.popleft()]
        count, size = first.count, first.size
        while (ask := self._first()) is not None and first.count and ask.count:
            count += ask.count
            size += ask.size
            fits = count <= MAX_ITEMS and size <= MAX_CALL_BYTES
            if not fits or ask.verb != first.verb or ask.options != first.options:
                break
            batch.append(self._asks.popleft())
        return batch

    def _send(self, verb: str, batch: list[Ask]) -> None:
        number = self._numbers[verb] = self._numbers.get(verb, 0) + 1
        self._busy.add(verb)
        items = batch[0].items if len(batch) == 1 else [item for ask in batch for item in ask.items]
        reply = self._calls.start(verb, self._key, number, (*batch[0].options, *items))
        reply.add_done_callback(lambda reply: self._done(verb, batch, reply))

    def _done(self, verb: str, batch: list[Ask], reply: asyncio.Future[Reply]) -> None:
        self._busy.discard(verb)
        error = StorageUnavailable("the storage was closed") if reply.cancelled() else reply.exception()
        start = 0
        for ask in batch:
            if not ask.future.done():
                if error is None:
                    ask.future.set_result((reply.result(), start))
                else:
                    ask.future.set_exception(error)
            start += ask.count
        self.pump()


class Calls:
    """All calls of one storage object: its name as a client, its scripts, its lines."""

    def __init__(
        self, servers: Servers, client: str, clock: Clock | None, timeout_s: float, body: str | None = None
    ) -> None:
        self._servers = servers
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._library = Library(body or BODY, clock is not None)
        self._lines: dict[str, Line] = {}
        self._tasks: set[asyncio.Task[Reply]] = set()

    async def ask(
        self,
        key: str,
        verb: str,
        options: tuple[Argument, ...] = (),
        items: Sequence[Argument] = (),
        count: int = 0,
        size: int = 0,
    ) -> tuple[Reply, int]:
        """Make a call that changes something. Its reply, and where in it this caller's items begin. With a count of
        items it may travel with others of its kind."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(self, key)
        ask = Ask(verb, options, items, count, size)
        line.ask(ask)
        try:
            return await ask.future
        except RedisError as error:
            raise as_holdfast_error(error, self._servers.name) from error

    async def read(self, key: str, verb: str, *args: Argument) -> Reply:
        """Make a call that only reads."""
        try:
            return await self.start(verb, key, 0, args)
        except RedisError as error:
            raise as_holdfast_error(error, self._servers.name) from error

    async def command(self, key: str, *args: Argument) -> Reply:
        """Send a plain command to whoever has the key."""
        try:
            return await self._routed(key, args, None)
        except RedisError as error:
            raise as_holdfast_error(error, self._servers.name) from error

    def start(self, verb: str, key: str, number: int, args: Sequence[Argument]) -> asyncio.Future[Reply]:
        """Send a call. In the plain case no task is needed: the reply comes from the wire itself."""
        name = f"{self._library.name}_enqueue" if verb == "enqueue" else self._library.name
        numbered: tuple[Argument, ...] = (
            (1, key, verb, self._client, "")
            if number == 0
            else (2, key, f"{key}:call:{self._client}:{verb}", verb, self._client, number)
        )
        command = ("FCALL", name, *numbered, *args)
        if self._clock is not None:
            command = (*command, self._clock.now_us())
        if not self._servers.clustered:
            return self._servers.wire(key).send(command, self._deadline(), self._library.text)
        task = asyncio.get_running_loop().create_task(self._routed(key, command, self._library.text))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _routed(self, key: str, command: Sequence[Argument], library: str | None) -> Reply:
        """Send a command to the node that has the key, wherever it moves meanwhile."""
        deadline = self._deadline()
        args = tuple(command)
        while True:
            try:
                return await self._servers.wire(key).send(args, deadline, library)
            except (MovedError, Gone) as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise StorageUnavailable(f"{self._servers.name} moves a key about: {error}") from error
                await self._servers.moved(error)
            except AskError as error:
                assert isinstance(self._servers, ClusterServers)
                try:
                    return await self._servers.ask((str(error.host), error.port), args, deadline, library)  # pyright: ignore
                except (MovedError, AskError):
                    await self._servers.moved(error)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def as_holdfast_error(error: RedisError, name: str) -> HoldfastError:
    """What a server's error means to a caller."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM "):
        return StorageFull(f"{name} is full: nothing was added. Let workers drain it, purge, or raise its maxmemory")
    if text.startswith("HOLDFAST_LAYOUT"):
        found = text.split()[1]
        return LayoutTooNew(
            f"{name} has a queue with layout {found}, this Holdfast reads up to {LAYOUT}:"
            " upgrade it here, or use another namespace"
        )
    if text.startswith("HOLDFAST_SUPERSEDED"):
        return StorageUnavailable(f"a later call of this client reached {name} first: is it shared between processes?")
    if isinstance(error, LinkError) or not isinstance(error, ResponseError):
        return StorageUnavailable(f"{name} could not be reached: {error}")
    return StorageUnavailable(f"{name} refused a call: {text:.300}")
