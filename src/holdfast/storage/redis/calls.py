"""Calls of the Lua library: numbered, in order, and joined where several callers make the same call.

A call is sent at once if no call of its verb is in flight. Calls that arrive meanwhile wait, and are sent as one batch
when the reply has arrived. The order of calls to a queue is kept, across verbs too, unless the server refuses a call
and accepts the next. One call per queue and verb is in flight, so the library remembers only the last number of each. A
call that was not sent is removed if its caller is cancelled. A call that was sent takes effect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from holdfast._core.clock import Clock
from holdfast.errors import StorageFull, StorageUnavailable
from holdfast.storage.base import QueueDamaged
from holdfast.storage.redis.connection import ServerConnection, resolve
from holdfast.storage.redis.raw import Argument, Deliver, NodeAddress, Reply, ServerError
from holdfast.storage.redis.script import SOURCES, Library, layout_error
from holdfast.storage.redis.topology import NodeLeft, Servers, address_in
from holdfast.storage.validation import FAILED_SUFFIX, MAX_CALL_BYTES, MAX_ITEMS

TRY_AGAIN_S = 0.05
"""How long to wait while a slot moves between two nodes."""
REPEATED = frozenset({"claim", "settle"})
"""Verbs whose unanswered call is repeated under the same number. Not enqueue: the next one may be another request. Not
extend: the answer to an earlier call says nothing about the lease now."""
CLOSED = "the storage was closed"
KEYS = (
    *(":meta", ":jobs", ":runs", ":running", ":completed", ":failed", ":cancelled", ":wake", ":floor"),
    *(f":w{priority}" for priority in range(10)),
    *(":workers", ":beats", ":notes", ":noted", ":queues", ":layout"),
)
"""Suffixes of the keys of a queue and of a namespace. lua/keyspace.lua describes the keys."""


class CallReply(NamedTuple):
    """The reply to a call, for one of its callers."""

    reply: Reply
    start: int
    """The position of the caller's items in the reply."""
    late: bool
    """The reply answers an earlier call that got no answer, and that this call repeats."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """The part of one caller in a call: items for a verb with its options."""

    verb: str
    options: tuple[Argument, ...]
    items: Sequence[Argument]
    count: int
    future: asyncio.Future[CallReply]

    @property
    def size(self) -> int:
        """Bytes in the items."""
        return sum(len(item) for item in self.items if not isinstance(item, int))


class CallQueue:
    """The calls to one queue, in the order in which they were made."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._waiting: deque[PendingCall] = deque()
        self._in_flight: set[str] = set()
        """Verbs that have a call without a reply."""
        self._numbers: dict[str, int] = {}
        self._unanswered: dict[str, tuple[Argument, ...]] = {}
        """Arguments of the last call of a verb, if it failed without an answer: the server may still apply it."""

    def add(self, call: PendingCall) -> None:
        self._waiting.append(call)
        self._send_ready()

    def _send_ready(self) -> None:
        """Send waiting calls in order, joined where they fit, up to one whose verb has a call in flight."""
        while (first := self._first()) is not None and first.verb not in self._in_flight:
            batch = [self._waiting.popleft()]
            count, size = first.count, 0
            while (call := self._first()) is not None and first.count and call.count:
                size += call.size if size else first.size + call.size
                count += call.count
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
        args = (*batch[0].options, *(item for call in batch for item in call.items))
        before = self._unanswered.pop(verb, None)
        late = False
        # A claim is repeated if the worker is the same, for any number of jobs.
        if before is not None and (before[1:] == args[1:] if verb == "claim" else before == args):
            args, late = before, True  # Under the same number: the server applies it once, and its answer arrives now.
        else:
            self._numbers[verb] = self._numbers.get(verb, 0) + 1
        deliver = partial(self._on_reply, batch, late, args)
        self._calls.send(verb, self._key, self._numbers[verb], args, deliver)

    def _on_reply(self, batch: list[PendingCall], late: bool, args: tuple[Argument, ...], reply: Reply) -> None:
        verb, start = batch[0].verb, 0
        self._in_flight.discard(verb)
        if isinstance(reply, StorageUnavailable) and verb in REPEATED and not isinstance(reply.__cause__, ServerError):
            self._unanswered[verb] = args
        for call in batch:
            failed = isinstance(reply, Exception)
            resolve(call.future, self._calls.error_of(reply) if failed else CallReply(reply, start, late))
            start += call.count
        self._send_ready()

    def fail_waiting(self) -> None:
        """Fail the calls that were not sent, because the storage closes."""
        while (call := self._first()) is not None:
            self._waiting.popleft()
            call.future.set_exception(StorageUnavailable(CLOSED))


class Calls:
    """All calls of one storage object: the name of the client, the library, and one CallQueue per queue."""

    def __init__(self, servers: Servers, client: str, clock: Clock | None, timeout_s: float) -> None:
        self._servers = servers
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._library = Library(SOURCES, clock is not None)
        self._queues: dict[str, CallQueue] = {}
        self._tasks: set[asyncio.Task[Reply]] = set()

    def call(
        self, key: str, verb: str, options: tuple[Argument, ...] = (), items: Sequence[Argument] = (), count: int = 0
    ) -> asyncio.Future[CallReply]:
        """Make a call that changes something. A call with a count of items may be joined with others of its verb."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = CallQueue(self, key)
        call = PendingCall(verb, options, items, count, asyncio.get_running_loop().create_future())
        queue.add(call)
        return call.future

    async def read(self, key: str, verb: str, *args: Argument) -> Reply:
        """Make a call that only reads."""
        return await self._routed(key, self._command(verb, key, 0, args), self._library)

    async def command(self, key: str, *args: Argument) -> Reply:
        """Send a plain command to the server that has the key."""
        return await self._routed(key, args, None)

    def send(self, verb: str, key: str, number: int, args: Sequence[Argument], deliver: Deliver) -> None:
        """Send a numbered call. On a single server the connection delivers the reply. A cluster needs a task."""
        command = self._command(verb, key, number, args)
        if not self._servers.clustered:
            self._servers.connection(key).send(command, self._deadline(), deliver, self._library)
            return

        def on_done(task: asyncio.Task[Reply]) -> None:
            self._tasks.discard(task)
            deliver(StorageUnavailable(CLOSED) if task.cancelled() else task.exception() or task.result())

        task = asyncio.get_running_loop().create_task(self._routed(key, command, self._library))
        self._tasks.add(task)
        task.add_done_callback(on_done)

    def _command(self, verb: str, key: str, number: int, args: Sequence[Argument]) -> tuple[Argument, ...]:
        name = self._library.enqueue if verb == "enqueue" else self._library.name
        keys = self._keys(key, verb) if self._servers.clustered else (key + ":meta",)
        return ("FCALL", name, len(keys), *keys, verb, self._client, number or "", *args, *self._injected_time())

    def _injected_time(self) -> tuple[int, ...]:
        return () if self._clock is None else (self._clock.now_us(),)

    def _keys(self, key: str, verb: str) -> tuple[str, ...]:
        """Return all keys that a call may use, so that a cluster refuses the whole call while their slot moves."""
        bases = (key, key + FAILED_SUFFIX) if verb == "settle" else (key,)
        return (*(base + kind for base in bases for kind in KEYS), f"{key}:call:{self._client}:{verb}")

    def enqueue_in_multi(self, key: str, shared: str, queue: str, items: Sequence[Argument]) -> tuple[Argument, ...]:
        """Return an enqueue as a command for a caller's pipeline. It has no number: a second copy enqueues again."""
        keys = (f"{key}:meta", f"{shared}:queues")
        words = (queue, "enqueue", self._client, "", *items, *self._injected_time())
        return ("EVAL", self._library.enqueue_in_multi, len(keys), *keys, *words)

    async def _routed(self, key: str, args: tuple[Argument, ...], library: Library | None) -> Reply:
        """Send a command to the node that has the key, even if the key moves meanwhile."""
        deadline = self._deadline()
        importing: NodeAddress | None = None
        """The node that imports the slot of the key, if this command goes there."""
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
        """Wait before another attempt. Raise StorageUnavailable at the deadline."""
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
        """Return a new error for each caller. For an error of the server it says what to do."""
        if not isinstance(error, ServerError):
            return type(error)(*error.args)
        name, detail = self._servers.name, str(error)
        match error.code:
            case "OOM":
                return StorageFull(f"{name} is full, nothing was added: drain it, purge jobs, or raise its maxmemory")
            case "HOLDFAST_LAYOUT":
                return layout_error(f"a queue of {name}", detail.split()[1])
            case "HOLDFAST_METADATA":
                return QueueDamaged(detail.split()[1].partition("/")[2].replace("}", "", 1))
            case "HOLDFAST_SUPERSEDED":
                problem = f"a later call of this client reached {name} first: do not share a storage between processes"
            case "MOVED" | "ASK":
                problem = f"{name} is part of a cluster: use redis+cluster://"
            case "NOAUTH" | "NOPERM" | "WRONGPASS":
                problem = f"{name} denies this user a command, grant it: {detail:.300}"
            case _:
                problem = f"{name} refused a call: {detail:.300}"
        return StorageUnavailable(problem)

    async def close(self) -> None:
        """Fail all calls and close all connections. Nothing is sent any more."""
        for queue in self._queues.values():
            queue.fail_waiting()
        for task in self._tasks:
            task.cancel()
        await self._servers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _call_importing(
    connection: ServerConnection, args: tuple[Argument, ...], deadline: float, library: Library | None
) -> Reply:
    """Send a command to the node that imports a slot."""
    if library is not None:
        await asyncio.gather(connection.call(("FUNCTION", "LOAD", library.text), deadline), return_exceptions=True)
    asking = connection.call(("ASKING",), deadline)
    reply = await connection.call(args, deadline)
    await asking
    return reply
