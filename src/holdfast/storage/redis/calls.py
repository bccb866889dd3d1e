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
from functools import partial
from typing import Any, NamedTuple

import msgspec

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
SETTLED = ord("1")
"""The character of a settlement that was applied, in the reply of `settle`."""
MAX_IDLE_QUEUES = 1000
"""How many queues without calls are kept before those are dropped."""
CLOSED = "the storage was closed"
KEYS = (
    *(":meta", ":jobs", ":runs", ":running", ":completed", ":failed", ":cancelled", ":brief"),
    *(":wake", ":floor"),
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


class PendingCall(msgspec.Struct, eq=False):
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


class SentCall(msgspec.Struct, frozen=True, eq=False):
    """A call as it was sent."""

    number: int
    args: tuple[Argument, ...]

    @property
    def settlements(self) -> list[tuple[Argument, ...]]:
        """The items of a settle: worker, id, head, body, extra."""
        worker, *items = self.args
        return [(worker, *items[at : at + 4]) for at in range(0, len(items), 4)]


class CallQueue:
    """The calls to one queue, in the order in which they were made."""

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._waiting: deque[PendingCall] = deque()
        self._in_flight: set[str] = set()
        """Verbs that have a call without a reply."""
        self._unanswered: dict[str, SentCall] = {}
        """The last call of a verb, if it failed without an answer: the server may still apply it."""
        self._settled: set[tuple[Argument, ...]] = set()
        """Settlements of a call whose answer arrived after its callers had given up. Each is reported once."""

    @property
    def is_idle(self) -> bool:
        """Nothing is lost if this object is replaced by a new one."""
        return not (self._waiting or self._in_flight or self._unanswered or self._settled)

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
        items = batch[0].items if len(batch) == 1 else [item for call in batch for item in call.items]
        args = (*batch[0].options, *items)
        before = self._unanswered.pop(verb, None)
        # A claim is repeated if the worker is the same, for any number of jobs.
        if before is not None and (before.args[1:] == args[1:] if verb == "claim" else before.args == args):
            # Under the same number: the server applies it once, and its answer arrives now.
            sent, deliver = before, partial(self._on_reply, batch, True, before)
        elif before is not None and verb == "settle":  # In another batch, a settlement would not be known as done.
            sent, deliver = before, partial(self._on_late_settle, batch, before)
        else:
            sent = SentCall(self._calls.next_number(), args)
            deliver = partial(self._on_reply, batch, False, sent)
        self._calls.send(verb, self._key, sent.number, sent.args, deliver)

    def _on_reply(self, batch: list[PendingCall], late: bool, sent: SentCall, reply: Reply) -> None:
        verb, start, failed = batch[0].verb, 0, isinstance(reply, Exception)
        self._in_flight.discard(verb)
        if failed:
            self._note_unanswered(verb, sent, reply)
        elif self._settled and verb == "settle":
            reply = self._with_settled(sent, reply)
        for call in batch:
            resolve(call.future, self._calls.error_of(reply) if failed else CallReply(reply, start, late))
            start += call.count
        self._send_ready()

    def _note_unanswered(self, verb: str, sent: SentCall, reply: Reply) -> None:
        if isinstance(reply, StorageUnavailable) and verb in REPEATED and not isinstance(reply.__cause__, ServerError):
            self._unanswered[verb] = sent

    def _on_late_settle(self, batch: list[PendingCall], sent: SentCall, reply: Reply) -> None:
        """Take the reply to an earlier call, and then make the call of this batch."""
        if isinstance(reply, StorageUnavailable):
            self._on_reply(batch, False, sent, reply)
            return
        self._in_flight.discard("settle")
        if not isinstance(reply, Exception):
            self._settled = {item for item, code in zip(sent.settlements, reply[1], strict=True) if code == SETTLED}
        self._waiting.extendleft(reversed(batch))
        self._send_ready()

    def _with_settled(self, sent: SentCall, reply: Reply) -> Reply:
        """Return a reply in which the settlements of an earlier call count as done."""
        opened, codes = reply
        codes = bytearray(codes)
        for at, item in enumerate(sent.settlements):
            if item in self._settled:
                self._settled.remove(item)
                codes[at] = SETTLED
        return [opened, bytes(codes)]

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
        database = servers.options.database
        self._suffix = f"@{database}" if database else ""
        """Follows the name of the client in a call: the library publishes on channels of the database."""
        self._clock = clock
        self._timeout_s = timeout_s
        self._library = Library(SOURCES, clock is not None)
        self._number = 0
        self._queues: dict[str, CallQueue] = {}
        self._max_queues = MAX_IDLE_QUEUES
        self._tasks: set[asyncio.Task[Reply]] = set()

    def call(
        self, key: str, verb: str, options: tuple[Argument, ...] = (), items: Sequence[Argument] = (), count: int = 0
    ) -> asyncio.Future[CallReply]:
        """Make a call that changes something. A call with a count of items may be joined with others of its verb."""
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= self._max_queues:
                self._queues = {key: queue for key, queue in self._queues.items() if not queue.is_idle}
                self._max_queues = 2 * len(self._queues) + MAX_IDLE_QUEUES
            queue = self._queues[key] = CallQueue(self, key)
        call = PendingCall(verb, options, items, count, asyncio.get_running_loop().create_future())
        queue.add(call)
        return call.future

    def next_number(self) -> int:
        """Return a number above those of all earlier calls, also of calls to a queue that was used before."""
        self._number += 1
        return self._number

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
        return (
            "FCALL",
            name,
            len(keys),
            *keys,
            verb,
            self._client + self._suffix,
            number or "",
            *args,
            *self._injected_time(),
        )

    def _injected_time(self) -> tuple[int, ...]:
        return () if self._clock is None else (self._clock.now_us(),)

    def _keys(self, key: str, verb: str) -> tuple[str, ...]:
        """Return all keys that a call may use, so that a cluster refuses the whole call while their slot moves."""
        bases = (key, key + FAILED_SUFFIX) if verb == "settle" else (key,)
        return (*(base + kind for base in bases for kind in KEYS), f"{key}:call:{self._client}:{verb}")

    def enqueue_in_multi(self, key: str, shared: str, queue: str, items: Sequence[Argument]) -> tuple[Argument, ...]:
        """Return an enqueue as a command for a caller's pipeline. It has no number: a second copy enqueues again."""
        keys = (f"{key}:meta", f"{shared}:queues")
        words = (queue, "enqueue", self._client + self._suffix, "", *items, *self._injected_time())
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
