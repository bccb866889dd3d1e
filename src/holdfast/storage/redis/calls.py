"""Calls of the Lua library: numbered, in order, and together where several callers ask for the same.

Nothing in flight: a call is sent at once. What is asked meanwhile waits, and goes as one batch per verb when the reply
is there, in the order in which it was asked, per queue and across verbs (unless the server turns down one call and
takes the next). One call per queue and verb is in flight, so the library needs to remember only the last number of
each. A cancelled caller leaves if its call was not sent; if it was, its effect stands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from redis.exceptions import RedisError

from holdfast._core.clock import Clock
from holdfast.errors import HoldfastError, StorageFull, StorageUnavailable
from holdfast.storage.redis.connection import Argument, Deliver, Reply, ServerError
from holdfast.storage.redis.script import SOURCES, Library, layout_error
from holdfast.storage.redis.topology import ClusterServers, NodeLeft, Servers, address_in
from holdfast.storage.validation import FAILED_SUFFIX, MAX_CALL_BYTES, MAX_ITEMS

TRY_AGAIN_S = 0.05
"""How long to wait while a slot is on its way between two nodes."""
REPEATED = frozenset({"claim", "settle"})
"""Who makes such a call and gets no answer asks for the same again. Of an enqueue nobody knows whether it is meant
anew, and the answer to an earlier `extend` says nothing of now."""
KEYS = (
    *(":meta", ":jobs", ":runs", ":running", ":completed", ":failed", ":cancelled", ":wake", ":floor"),
    *(f":w{priority}" for priority in range(10)),
    *(":workers", ":beats", ":queues", ":layout"),
)
"""What the keys of a queue, or of what a namespace shares, end in. lua/keyspace.lua describes them."""


class Ask:
    """A caller's part of a call: some items, for a verb with certain options."""

    __slots__ = ("count", "future", "items", "options", "repeats", "size", "verb")

    def __init__(
        self, verb: str, options: tuple[Argument, ...], items: Sequence[Argument], count: int, size: int
    ) -> None:
        self.verb = verb
        self.options = options
        self.items = items
        self.count = count
        self.size = size
        self.repeats = False
        """It was sent as the repetition of one that nobody waits for any more."""
        self.future: asyncio.Future[tuple[Reply, int]] = asyncio.get_running_loop().create_future()


class CallQueue:
    """The calls to one queue, in their order."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._asks: deque[Ask] = deque()
        self._busy: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._unanswered: dict[str, tuple[Argument, ...]] = {}
        """Arguments of a verb's last call, if it was given up without an answer: it may be done, or be done yet."""

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
        self._busy.add(verb)
        items = batch[0].items if len(batch) == 1 else [item for ask in batch for item in ask.items]
        args = (*batch[0].options, *items)
        before = self._unanswered.pop(verb, None)
        if before is not None and _same(verb, before, args):
            args = before  # The same number again: it is done once, and now its answer is heard.
            batch[0].repeats = True
        else:
            self._numbers[verb] = self._numbers.get(verb, 0) + 1
        number = self._numbers[verb]
        self._calls.send(verb, self._key, number, args, lambda reply: self._done(verb, batch, args, reply))

    def _done(self, verb: str, batch: list[Ask], args: tuple[Argument, ...], reply: Reply) -> None:
        self._busy.discard(verb)
        refused = isinstance(reply, Exception) and isinstance(reply.__cause__, ServerError)
        if isinstance(reply, StorageUnavailable) and verb in REPEATED and not refused:
            self._unanswered[verb] = args
        start = 0
        for ask in batch:
            if not ask.future.done():
                if isinstance(reply, Exception):
                    ask.future.set_exception(type(reply)(*reply.args))  # To each its own.
                else:
                    ask.future.set_result((reply, start))
            start += ask.count
        self.pump()


def _same(verb: str, before: tuple[Argument, ...], now: tuple[Argument, ...]) -> bool:
    """Does a call ask for what another asked for? A claim does if it is the same worker's, for any number of jobs."""
    return before[1:] == now[1:] if verb == "claim" else before == now


class Calls:
    """All calls of one storage object: its name as a client, its library, its lines."""

    def __init__(self, servers: Servers, client: str, clock: Clock | None, timeout_s: float) -> None:
        self._servers = servers
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._library = Library(SOURCES, clock is not None)
        self._lines: dict[str, CallQueue] = {}
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
        return await self._answer(key, Ask(verb, options, items, count, size))

    async def claim(self, key: str, options: tuple[Argument, ...]) -> tuple[Reply, bool]:
        """Make a claim. Its reply, and whether that is an earlier one's: of one that got no answer at the time."""
        ask = Ask("claim", options, (), 0, 0)
        reply, _ = await self._answer(key, ask)
        return reply, ask.repeats

    async def _answer(self, key: str, ask: Ask) -> tuple[Reply, int]:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = CallQueue(self, key)
        line.ask(ask)
        try:
            return await ask.future
        except ServerError as error:
            raise as_holdfast_error(error, self._servers.name) from error

    async def read(self, key: str, verb: str, *args: Argument) -> Reply:
        """Make a call that only reads."""
        return await self._routed(key, self._command(verb, key, 0, args), self._library)

    async def command(self, key: str, *args: Argument) -> Reply:
        """Send a plain command to whoever has the key."""
        return await self._routed(key, args, None)

    def send(self, verb: str, key: str, number: int, args: Sequence[Argument], deliver: Deliver) -> None:
        """Send a numbered call. A single server needs no task for that: the reply comes straight from the wire."""
        command = self._command(verb, key, number, args)
        if not self._servers.clustered:
            self._servers.wire(key).send(command, self._deadline(), deliver, self._library)
            return
        task = asyncio.get_running_loop().create_task(self._routed(key, command, self._library))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: deliver(_outcome_of(task)))

    def _command(self, verb: str, key: str, number: int, args: Sequence[Argument]) -> tuple[Argument, ...]:
        name = self._library.enqueue if verb == "enqueue" else self._library.name
        keys = self._keys(key, verb) if self._servers.clustered else (key + ":meta",)
        clock = () if self._clock is None else (self._clock.now_us(),)
        return ("FCALL", name, len(keys), *keys, verb, self._client, number or "", *args, *clock)

    def _keys(self, key: str, verb: str) -> tuple[str, ...]:
        """All that a call may touch. While a slot moves from node to node, a cluster then refuses the whole call."""
        bases = (key, key + FAILED_SUFFIX) if verb == "settle" else (key,)
        return (*(base + kind for base in bases for kind in KEYS), f"{key}:call:{self._client}:{verb}")

    def enqueue_in_multi(self, key: str, shared: str, queue: str, items: Sequence[Argument]) -> tuple[Argument, ...]:
        """An enqueue as a command for somebody else to send. It has no number: whoever repeats it does it again."""
        keys = (f"{key}:meta", f"{shared}:queues")
        words = (queue, "enqueue", self._client, "")
        clock = () if self._clock is None else (self._clock.now_us(),)
        return ("EVAL", self._library.enqueue_in_multi, len(keys), *keys, *words, *items, *clock)

    async def _routed(self, key: str, args: tuple[Argument, ...], library: Library | None) -> Reply:
        """Send a command to the node that has the key, wherever it moves meanwhile."""
        deadline = self._deadline()
        while True:
            try:
                return await self._servers.wire(key).call(args, deadline, library)
            except NodeLeft as error:
                await self._in_time(self._servers.moved(error), error, deadline)
            except ServerError as error:
                if error.code == "TRYAGAIN":
                    await self._in_time(asyncio.sleep(TRY_AGAIN_S), error, deadline)
                    continue
                if error.code == "ASK" and isinstance(self._servers, ClusterServers):
                    try:
                        return await self._servers.ask(address_in(error), args, deadline, library=library)
                    except ServerError as refusal:
                        if refusal.code not in ("MOVED", "ASK", "TRYAGAIN"):
                            raise as_holdfast_error(refusal, self._servers.name) from refusal
                elif error.code != "MOVED":
                    raise as_holdfast_error(error, self._servers.name) from error
                await self._in_time(self._servers.moved(error), error, deadline)

    async def _in_time(self, pause: Coroutine[Any, Any, None], error: Exception, deadline: float) -> None:
        """Wait before another attempt, or give up if it is too late for one."""
        try:
            async with asyncio.timeout_at(deadline):
                try:
                    await pause
                except (RedisError, OSError):  # No node could tell where the key is: one may yet.
                    await asyncio.sleep(TRY_AGAIN_S)
        except TimeoutError:
            raise StorageUnavailable(f"{self._servers.name} was not ready in time: {error}") from error

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _outcome_of(task: asyncio.Task[Reply]) -> Reply:
    if task.cancelled():
        return StorageUnavailable("the storage was closed")
    return task.exception() or task.result()


def as_holdfast_error(error: ServerError, name: str) -> HoldfastError:
    """What a server's error means to a caller."""
    match error.code:
        case "OOM":
            return StorageFull(
                f"{name} is full: nothing was added. Let workers drain it, purge, or raise its maxmemory"
            )
        case "HOLDFAST_LAYOUT":
            return layout_error(f"a queue of {name}", str(error).split()[1])
        case "HOLDFAST_SUPERSEDED":
            return StorageUnavailable(
                f"a later call of this client reached {name} first: is it shared between processes?"
            )
        case "MOVED" | "ASK":
            return StorageUnavailable(f"{name} is part of a cluster: use redis+cluster://")
        case "NOAUTH" | "NOPERM" | "WRONGPASS":
            return StorageUnavailable(f"{name} does not let this user do that: {error!s:.300}")
        case _:
            return StorageUnavailable(f"{name} refused a call: {error!s:.300}")
