"""Calls of the Lua library: numbered, in order, and joined where several callers make the same call.

With nothing in flight, a call is sent at once. Calls that come meanwhile wait, and go as one batch per verb when the
reply has arrived. Their order is kept, per queue and across verbs (unless the server refuses one call and takes the
next). One call per queue and verb is in flight, so the library needs to remember only the last number of each. A
cancelled caller leaves if its call was not sent; if it was, its effect stands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast._core.clock import Clock
from holdfast.errors import StorageFull, StorageUnavailable
from holdfast.storage.base import QueueDamaged
from holdfast.storage.redis.connection import ServerConnection
from holdfast.storage.redis.raw import Argument, Deliver, NodeAddress, Reply, ServerError
from holdfast.storage.redis.script import SOURCES, Library, layout_error
from holdfast.storage.redis.topology import NodeLeft, Servers, address_in
from holdfast.storage.validation import FAILED_SUFFIX, MAX_CALL_BYTES, MAX_ITEMS

TRY_AGAIN_S = 0.05
"""How long to wait while a slot is on its way between two nodes."""
REPEATED = frozenset({"claim", "settle"})
"""Verbs whose callers repeat a call that got no answer. A second enqueue may be meant as another one, and the answer to
an earlier `extend` says nothing about now."""
KEYS = (
    *(":meta", ":jobs", ":runs", ":running", ":completed", ":failed", ":cancelled", ":wake", ":floor"),
    *(f":w{priority}" for priority in range(10)),
    *(":workers", ":beats", ":queues", ":layout"),
)
"""What the keys of a queue, or of what a namespace shares, end in. lua/keyspace.lua describes them."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """One caller's part of a call: items for a verb with its options."""

    verb: str
    options: tuple[Argument, ...]
    items: Sequence[Argument]
    count: int
    size: int
    future: asyncio.Future[tuple[Reply, int]]


class CallQueue:
    """The calls to one queue, in their order."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._waiting: deque[PendingCall] = deque()
        self._in_flight: set[str] = set()
        """Verbs of which a call has no reply yet."""
        self._numbers: dict[str, int] = {}
        self._unanswered: dict[str, tuple[Argument, ...]] = {}
        """Arguments of a verb's last call, if it was given up without an answer: it may be done, or be done yet."""

    def add(self, call: PendingCall) -> None:
        self._waiting.append(call)
        self._send_ready()

    def _send_ready(self) -> None:
        """Send the first call, with those behind it that fit, unless a call of its verb is in flight; then the next."""
        while (first := self._first()) is not None and first.verb not in self._in_flight:
            batch = [self._waiting.popleft()]
            count, size = first.count, first.size
            while (call := self._first()) is not None and first.count and call.count:
                count += call.count
                size += call.size
                fits = count <= MAX_ITEMS and size <= MAX_CALL_BYTES
                if not fits or call.verb != first.verb or call.options != first.options:
                    break
                batch.append(self._waiting.popleft())
            self._send(first.verb, batch)

    def _first(self) -> PendingCall | None:
        while self._waiting and self._waiting[0].future.cancelled():
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def _send(self, verb: str, batch: list[PendingCall]) -> None:
        self._in_flight.add(verb)
        items = batch[0].items if len(batch) == 1 else [item for call in batch for item in call.items]
        args = (*batch[0].options, *items)
        before = self._unanswered.pop(verb, None)
        start = 0
        # A claim is repeated if the worker is the same, for any number of jobs.
        if before is not None and (before[1:] == args[1:] if verb == "claim" else before == args):
            args = before  # Under the same number: it is done once, and now its answer arrives.
            start = int(verb == "claim")
        else:
            self._numbers[verb] = self._numbers.get(verb, 0) + 1
        self._calls.send(
            verb, self._key, self._numbers[verb], args, lambda reply: self._on_reply(batch, start, args, reply)
        )

    def _on_reply(self, batch: list[PendingCall], start: int, args: tuple[Argument, ...], reply: Reply) -> None:
        verb = batch[0].verb
        self._in_flight.discard(verb)
        if isinstance(reply, StorageUnavailable) and verb in REPEATED and not isinstance(reply.__cause__, ServerError):
            self._unanswered[verb] = args
        for call in batch:
            if not call.future.done():
                if isinstance(reply, Exception):
                    call.future.set_exception(self._calls.error_of(reply))
                else:
                    call.future.set_result((reply, start))
            start += call.count
        self._send_ready()


class Calls:
    """All calls of one storage object: its name as a client, its library, and one CallQueue per queue."""

    def __init__(self, servers: Servers, client: str, clock: Clock | None, timeout_s: float) -> None:
        self._servers = servers
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._library = Library(SOURCES, clock is not None)
        self._queues: dict[str, CallQueue] = {}
        self._tasks: set[asyncio.Task[Reply]] = set()

    def call(
        self,
        key: str,
        verb: str,
        options: tuple[Argument, ...] = (),
        items: Sequence[Argument] = (),
        count: int = 0,
        size: int = 0,
    ) -> asyncio.Future[tuple[Reply, int]]:
        """Make a call that changes something. The future has its reply, and where in it this caller's items begin. A
        call with a count of items may be joined with others of its verb. A claim has no items: instead of their place
        the future has 1 if the reply is that of an earlier claim that got no answer."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = CallQueue(self, key)
        call = PendingCall(verb, options, items, count, size, asyncio.get_running_loop().create_future())
        queue.add(call)
        return call.future

    async def read(self, key: str, verb: str, *args: Argument) -> Reply:
        """Make a call that only reads."""
        return await self._routed(key, self._command(verb, key, 0, args), self._library)

    async def command(self, key: str, *args: Argument) -> Reply:
        """Send a plain command to the server that has the key."""
        return await self._routed(key, args, None)

    def send(self, verb: str, key: str, number: int, args: Sequence[Argument], deliver: Deliver) -> None:
        """Send a numbered call. With a single server the connection delivers the reply; a cluster needs a task."""
        command = self._command(verb, key, number, args)
        if not self._servers.clustered:
            self._servers.connection(key).send(command, self._deadline(), deliver, self._library)
            return
        task = asyncio.get_running_loop().create_task(self._routed(key, command, self._library))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        closed = StorageUnavailable("the storage was closed")
        task.add_done_callback(lambda task: deliver(closed if task.cancelled() else task.exception() or task.result()))

    def _command(self, verb: str, key: str, number: int, args: Sequence[Argument]) -> tuple[Argument, ...]:
        name = self._library.enqueue if verb == "enqueue" else self._library.name
        keys = self._keys(key, verb) if self._servers.clustered else (key + ":meta",)
        clock = () if self._clock is None else (self._clock.now_us(),)
        return ("FCALL", name, len(keys), *keys, verb, self._client, number or "", *args, *clock)

    def _keys(self, key: str, verb: str) -> tuple[str, ...]:
        """All keys that a call may use. While a slot moves from node to node, a cluster then refuses the whole call."""
        bases = (key, key + FAILED_SUFFIX) if verb == "settle" else (key,)
        return (*(base + kind for base in bases for kind in KEYS), f"{key}:call:{self._client}:{verb}")

    def enqueue_in_multi(self, key: str, shared: str, queue: str, items: Sequence[Argument]) -> tuple[Argument, ...]:
        """An enqueue as a command for a caller's pipeline. It has no number: sent twice, it is done twice."""
        keys = (f"{key}:meta", f"{shared}:queues")
        clock = () if self._clock is None else (self._clock.now_us(),)
        words = (queue, "enqueue", self._client, "", *items, *clock)
        return ("EVAL", self._library.enqueue_in_multi, len(keys), *keys, *words)

    async def _routed(self, key: str, args: tuple[Argument, ...], library: Library | None) -> Reply:
        """Send a command to the node that has the key, also if the key moves meanwhile."""
        deadline = self._deadline()
        importing: NodeAddress | None = None
        """The node that the slot of the key is being moved to, if this command goes there."""
        while True:
            try:
                if importing is None:
                    return await self._servers.connection(key).call(args, deadline, library)
                return await _call_importing(self._servers.connection_to(importing), args, deadline, library)
            except (NodeLeft, ServerError) as error:
                if error.code not in ("MOVED", "ASK", "TRYAGAIN"):
                    raise self.error_of(error) from error
                if error.code == "ASK" and importing is None and self._servers.clustered:
                    importing = address_in(error)
                    continue
                importing = None
                pause = asyncio.sleep(TRY_AGAIN_S) if error.code == "TRYAGAIN" else self._servers.on_moved(error)
                await self._wait_to_retry(pause, error, deadline)

    async def _wait_to_retry(self, pause: Coroutine[Any, Any, None], error: Exception, deadline: float) -> None:
        """Wait before another attempt, or give up if the deadline comes first."""
        try:
            async with asyncio.timeout_at(deadline):
                try:
                    await pause
                except (OSError, ServerError):  # No node answered where the key is: one may do so later.
                    await asyncio.sleep(TRY_AGAIN_S)
        except TimeoutError:
            raise StorageUnavailable(f"{self._servers.name} was not ready in time: {error}") from error

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout_s

    def error_of(self, error: Exception) -> Exception:
        """A new error for each caller; for an error of the server, one that says what to do."""
        if not isinstance(error, ServerError):
            return type(error)(*error.args)
        name = self._servers.name
        match error.code:
            case "OOM":
                return StorageFull(
                    f"{name} is full: nothing was added. Let workers drain it, purge, or raise its maxmemory"
                )
            case "HOLDFAST_LAYOUT":
                return layout_error(f"a queue of {name}", str(error).split()[1])
            case "HOLDFAST_METADATA":
                queue = str(error).split()[1].partition("/")[2].replace("}", "", 1)
                return QueueDamaged(queue)
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

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _call_importing(
    connection: ServerConnection, args: tuple[Argument, ...], deadline: float, library: Library | None
) -> Reply:
    """Send a command to the node that a slot is being moved to."""
    if library is not None:
        await asyncio.gather(connection.call(("FUNCTION", "LOAD", library.text), deadline), return_exceptions=True)
    asking = connection.call(("ASKING",), deadline)
    reply = await connection.call(args, deadline)
    await asking
    return reply
