"""Jobs on Redis or Valkey: the Lua files in lua/ decide and store; this package writes calls and reads replies.

script.py joins the Lua files, calls.py numbers and batches calls, connection.py sends them and reconnects, raw.py opens
sockets, topology.py finds the server of a key, urls.py reads URLs and clients, notify.py receives messages and wake
tokens, codec.py knows the stored bytes, reads.py has the reading verbs, audit.py checks, server_info.py describes the
server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

import msgspec

from holdfast._core.clock import Clock, QueueTime
from holdfast._core.events import Event, EventKind, Events, Topic
from holdfast._core.jobs import Fail, Job, LeaseRef, Release, Request, Settlement, State, StoredLease
from holdfast._core.replies import (
    CancelResult,
    Claim,
    Enqueued,
    Extended,
    KeepResult,
    Page,
    Repaired,
    SettleResult,
    Snapshot,
    StorageInfo,
    Swept,
    WorkerCommands,
    WorkerFacts,
)
from holdfast.errors import OptionError, StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.base import Storage
from holdfast.storage.local.table import as_read
from holdfast.storage.redis import reads, server_info
from holdfast.storage.redis.audit import Audit
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.codec import (
    ENQUEUED,
    FENCE,
    PLACED,
    STATES,
    UNREADABLE,
    decode_events,
    decode_job,
    decode_outcome,
    request_args,
    settlement_args,
)
from holdfast.storage.redis.notify import PubSubListener, WakeTokenListener
from holdfast.storage.redis.raw import Argument, Reply
from holdfast.storage.redis.script import LAYOUT, layout_error, pipeline_for
from holdfast.storage.redis.topology import Servers
from holdfast.storage.redis.urls import servers_from_client, servers_from_url
from holdfast.storage.subscriptions import remote_subscription
from holdfast.storage.validation import FAILED_SUFFIX, clean_id, id_bytes

log = logging.getLogger("holdfast.redis")

TIMEOUT_S = 10.0
"""How long a call tries to reach the server before it gives up."""
MAX_TIMEOUT_S = 300.0
"""A reply is kept for ten minutes: who repeated a call for longer could repeat what it did."""
CLIENT_BYTES = 9
"""Random bytes in a client's name, which has 12 characters: transaction.lua cuts lists of waiters there."""


_CANCELLED = dict(
    zip(b"cafm", (CancelResult.CANCELLED, CancelResult.ASKED, CancelResult.FINISHED, CancelResult.MISSING), strict=True)
)
_KEPT = dict(zip(b"klm", (KeepResult.KEPT, KeepResult.LIVE, KeepResult.MISSING), strict=True))
_SETTLED = dict(zip(b"10", (SettleResult.OK, SettleResult.LOST), strict=True))
_LOST, _CANCEL_ASKED = b"lc"
_READY = ord("1")
"""One character per item in a reply."""

_encode = msgspec.msgpack.Encoder().encode


class RedisStorage(Storage):
    """Jobs in a Redis or Valkey server, behind sentinels, or in a cluster."""

    def __init__(
        self,
        servers: Servers,
        *,
        namespace: str = "hf",
        clock: Clock | None = None,
        max_payload: int = validation.MAX_PAYLOAD_BYTES,
        timeout_s: float = TIMEOUT_S,
        allow_eviction: bool = False,
    ) -> None:
        super().__init__(max_payload)
        self.namespace = validation.check_namespace(namespace)
        self._servers = servers
        self._clock = clock
        self._timeout_s = timeout_s
        self._allow_eviction = allow_eviction
        self._client = secrets.token_urlsafe(CLIENT_BYTES)
        self._calls = Calls(servers, self._client, clock, timeout_s)
        self._wake_listener = WakeTokenListener(servers, self._on_wake)
        self._listeners: dict[object, PubSubListener] = {}
        self._keys: dict[str, str] = {}
        self._listed: set[str] = set()
        """Queues that this client has put on the namespace's list."""
        self._log_level = logging.INFO

    def __repr__(self) -> str:
        return f"<RedisStorage {self._servers.name}>"

    async def _about(self) -> StorageInfo:
        self._check_open()
        return await server_info.describe(self._calls, self._name(), self._servers.name)

    def clone(self) -> RedisStorage:
        clone = RedisStorage(
            self._servers.clone(),
            namespace=self.namespace,
            clock=self._clock,
            max_payload=self._max_payload,
            timeout_s=self._timeout_s,
            allow_eviction=self._allow_eviction,
        )
        clone._log_level = logging.DEBUG  # The first storage has logged it.
        return clone

    async def _open(self) -> None:
        if self._pid is not None:
            raise StorageUnavailable(f"{self!r} is open already: connect once more for a second one")
        try:
            await server_info.check(
                self._calls, self._name(), self._servers.name, self._allow_eviction, self._log_level
            )
            await self._check_layout()
        except BaseException:
            await self._close()
            raise
        await super()._open()

    async def _close(self) -> None:
        await super()._close()
        listeners, self._listeners = self._listeners, {}
        ending = [self._wake_listener.end(), *(listener.end() for listener in listeners.values())]
        await asyncio.gather(*(task for task in ending if task is not None), return_exceptions=True)
        await self._calls.close()
        await self._servers.close()

    async def _check_layout(self) -> None:
        found: bytes = await self._calls.read(self._name(), "layout", LAYOUT)
        if found != str(LAYOUT).encode():
            raise layout_error(f"namespace {self.namespace} of {self._servers.name}", found.decode(errors="replace"))

    def _name(self) -> str:
        """The key of what the whole namespace shares."""
        return f"{{{self.namespace}}}"

    def _key(self, queue: str) -> str:
        """What the names of a queue's keys begin with. A companion shares the hash tag of its queue."""
        key = self._keys.get(queue)
        if key is None:
            suffix = FAILED_SUFFIX if queue.endswith(FAILED_SUFFIX) else ""
            key = self._keys[queue] = f"{{{self.namespace}/{queue.removesuffix(FAILED_SUFFIX)}}}{suffix}"
        return key

    def _queue(self, key: str) -> str:
        return key.removeprefix(f"{{{self.namespace}/").replace("}", "", 1)

    async def _list(self, queue: str, opened: bool = False) -> None:
        """In a cluster the list is on another node: put a queue on it before it is made, and again if it was made anew,
        as it may have been dropped, and struck off, meanwhile."""
        if opened or queue not in self._listed:
            if self._servers.clustered:
                await self._calls.read(self._name(), "list", queue)
            self._listed.add(queue)

    # Changing

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        self._check_open()
        listed_now = queue not in self._listed
        if listed_now:
            await self._list(queue)
        items: list[Argument] = []
        size = 0
        for request in jobs:
            items += request_args(request)
            size += len(request.work.payload or b"")
        try:
            answer, start = await self._calls.call(self._key(queue), "enqueue", (), items, len(jobs), size)
            opened, packed, cached = answer
            if opened and not listed_now:
                await self._list(queue, opened=True)
        except BaseException:
            self._listed.discard(queue)  # It may have been made anew, and nobody has seen the reply that says so.
            raise
        mine = packed[start * ENQUEUED.size : (start + len(jobs)) * ENQUEUED.size]
        replies: list[Enqueued] = [
            Enqueued(request.id, PLACED[placed], generation, STATES[state])
            for request, (placed, state, generation) in zip(jobs, _each(ENQUEUED, mine), strict=True)
        ]
        for at, outcome, *_ in cached:
            index: int = at - 1 - start
            if 0 <= index < len(replies) and outcome:
                replies[index] = msgspec.structs.replace(replies[index], outcome=decode_outcome(outcome))
        return replies

    def _enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        pipeline = pipeline_for(transaction, self._servers)
        items = [arg for request in jobs for arg in request_args(request)]
        pipeline.execute_command(*self._calls.enqueue_in_multi(self._key(queue), self._name(), queue, items))
        return [None] * len(jobs)

    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> Claim:
        self._check_open()
        key = self._key(queue)
        reply, late = await self._calls.claim(key, (limit, worker, lease_ms))
        claim = await self._read_claim(queue, reply, worker, lease_ms)
        if len(claim.jobs) < limit:
            self._wake_listener.rearm(f"{key}:wake")
        if not late:
            return claim
        if claim.jobs:  # They were claimed for somebody who has given up: who knows how much is left of their leases.
            released = [Release(job.id, job.run.fence) for job in claim.jobs if job.run is not None]
            await self._settle(queue, released, worker)
        return await self._claim(queue, limit, worker, lease_ms)

    async def _read_claim(self, queue: str, reply: Reply, worker: str, lease_ms: int) -> Claim:
        now, next_run_at, next_sweep_at, paused, flat, fences, skew = reply
        time = QueueTime(now, skew=skew)
        jobs: list[Job] = []
        garbled: list[Argument] = []
        for id, raw, (fence,) in zip(flat[::2], flat[1::2], _each(FENCE, fences), strict=True):
            run = StoredLease(worker, fence, lease_ms, now + 1000 * lease_ms)
            try:
                jobs.append(as_read(decode_job(id, raw, run), time))
            except UNREADABLE:
                garbled += ("garbled", id, ":running", raw)
        if garbled:  # What only a client can judge: codecs and limits.
            await self._calls.call(self._key(queue), "repair", tuple(garbled))
        return Claim(jobs, now, _time(next_run_at), _time(next_sweep_at), bool(paused))

    async def _ready(self, queues: Sequence[str]) -> list[str]:
        self._check_open()
        keys = [self._key(queue) for queue in queues]
        if self._servers.clustered:
            replies = await asyncio.gather(*(self._calls.read(key, "ready", key) for key in keys))
            told = b"".join(replies)
        else:
            told = await self._calls.read(keys[0], "ready", *keys)
        return [queue for queue, code in zip(queues, told, strict=True) if code == _READY]

    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[SettleResult]:
        self._check_open()
        companion = queue + FAILED_SUFFIX
        follows = companion not in self._listed and any(isinstance(i, Fail) and i.follow_up for i in batch)
        if follows:
            await self._list(companion)
        items: list[Argument] = []
        size = 0
        for item in batch:
            args = settlement_args(item)
            items += args
            size += len(args[2]) + len(args[3])
        try:
            reply, start = await self._calls.call(self._key(queue), "settle", (worker,), items, len(batch), size)
            opened, replies = reply
            if opened and not follows:
                await self._list(companion, opened=True)
        except BaseException:
            self._listed.discard(companion)
            raise
        return [_SETTLED[code] for code in replies[start : start + len(batch)]]

    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> Extended:
        self._check_open()
        items: list[Argument] = []
        size = 0
        for lease in leases:
            progress = b"" if lease.progress is None else b"+" + lease.progress
            items += (id_bytes(lease.id), lease.fence, progress)
            size += len(progress)
        reply, start = await self._calls.call(self._key(queue), "extend", (worker, lease_ms), items, len(leases), size)
        told = list(zip(leases, reply[start : start + len(leases)], strict=True))
        return Extended(
            [lease for lease, code in told if code == _LOST], [lease for lease, code in told if code == _CANCEL_ASKED]
        )

    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        self._check_open()
        items = [id_bytes(id) for id in ids]
        reply, start = await self._calls.call(self._key(queue), "cancel", (), items, len(ids))
        return [_CANCELLED[code] for code in reply[start : start + len(ids)]]

    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[KeepResult]:
        self._check_open()
        items = [id_bytes(id) for id in ids]
        options = (ttl_ms, int(at_least))
        reply, start = await self._calls.call(self._key(queue), "keep", options, items, len(ids))
        return [_KEPT[code] for code in reply[start : start + len(ids)]]

    async def _pause(self, queue: str, paused: bool, reason: str) -> None:
        self._check_open()
        await self._list(queue)
        try:
            opened, _ = await self._calls.call(self._key(queue), "pause", (int(paused), reason if paused else ""))
            if opened:
                await self._list(queue, opened=True)
        except BaseException:
            self._listed.discard(queue)
            raise

    async def _sweep(self, queue: str, limit: int, worker: str | None) -> Swept:
        self._check_open()
        reply, _ = await self._calls.call(self._key(queue), "sweep", (limit, worker or ""))
        overdue, stalled, gone, more, next_sweep_at = reply
        return Swept(
            [clean_id(id) for id in overdue], [clean_id(id) for id in stalled], gone, bool(more), _time(next_sweep_at)
        )

    async def _purge(self, queue: str, states: Collection[State], limit: int, drop: bool) -> int:
        self._check_open()
        wanted = "".join(str(STATES.index(state)) for state in states)
        reply, _ = await self._calls.call(self._key(queue), "purge", (limit, int(drop), wanted))
        done, dropped = reply
        if dropped:
            self._listed.discard(queue)
        if dropped and self._servers.clustered:
            key = f"{self._name()}:queues"
            await self._calls.command(key, "SREM", key, queue)
            if await self._calls.read(self._key(queue), "stats"):  # Somebody has made it anew meanwhile.
                await self._list(queue, opened=True)
        return int(done)

    async def _announce(self, worker: str, facts: WorkerFacts, ttl_ms: int) -> WorkerCommands:
        self._check_open()
        evict, _ = await self._calls.call(self._name(), "announce", (worker, _encode(facts), ttl_ms))
        return WorkerCommands(bool(evict))

    async def _evict(self, worker: str) -> bool:
        self._check_open()
        asked, _ = await self._calls.call(self._name(), "evict", (worker,))
        return bool(asked)

    # Reading

    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        self._check_open()
        return await reads.read_jobs(self._calls, self._key(queue), ids)

    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> Page:
        self._check_open()
        return await reads.scan(self._calls, self._key(queue), state, after, limit)

    async def _snapshot(self) -> Snapshot:
        self._check_open()
        key = f"{self._name()}:queues"
        names: list[bytes] = await self._calls.command(key, "SMEMBERS", key)
        queues = sorted(name.decode() for name in names)
        now, workers = await reads.read_workers(self._calls, self._name())
        replies = await asyncio.gather(*(reads.read_stats(self._calls, self._key(queue)) for queue in queues))
        found = [(queue, reply) for queue, reply in zip(queues, replies, strict=True) if reply is not None]
        return Snapshot(now, [reads.queue_stats(queue, reply, workers) for queue, reply in found], workers)

    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> Repaired:
        self._check_open()
        return await Audit(self._calls, queue, self._key(queue)).step(dry_run, cursor)

    # Hearing

    def _subscribe(self, topics: Sequence[Topic]) -> AbstractAsyncContextManager[Events]:
        return remote_subscription(super()._subscribe(topics), lambda: self._listen_to(topics))

    async def _listen_to(self, topics: Sequence[Topic]) -> Callable[[], None]:
        """Ask the server for events of these topics. Returns a function that ends this."""
        leaves = ExitStack()
        with leaves:
            for topic in topics:
                leaves.callback(await self._listen(topic))
            return leaves.pop_all().close

    async def _listen(self, topic: Topic) -> Callable[[], None]:
        key = self._key(topic.queue)
        if self._is_wake(topic):
            self._wake_listener.add(f"{key}:wake")
            return lambda: self._wake_listener.remove(f"{key}:wake")
        if _is_answer(topic):
            for channel in (f"{key}:to:{self._client}", f"{key}:to:*"):
                await self._listener(channel).listen(channel, self._timeout_s)
            return lambda: None  # Who waited once will wait again.
        channel = f"{key}:events"
        listener = self._listener(channel)
        await listener.listen(channel, self._timeout_s)
        return lambda: listener.leave(channel)

    def _listener(self, channel: str) -> PubSubListener:
        node = self._servers.node_of(channel)
        if node not in self._listeners:
            self._listeners[node] = PubSubListener(self._servers, self._on_message, self._bus.notify_all)
        return self._listeners[node]

    def _is_wake(self, topic: Topic) -> bool:
        """Is this topic served by the token? A blocking wait cannot name queues of several nodes."""
        return topic.only == "wake" and not self._servers.clustered

    def _on_message(self, channel: str, message: bytes) -> None:
        key, _, rest = channel.rpartition(":")
        to_waiters = rest != "events"
        queue = self._queue(key.removesuffix(":to") if to_waiters else key)
        try:
            events = list(decode_events(queue, message))
        except UNREADABLE:
            log.warning("a message of %d bytes on %s could not be read", len(message), channel)
            return
        if to_waiters:
            self._bus.publish(events, _is_answer)
        else:
            self._bus.publish(events, lambda topic: not _is_answer(topic) and not self._is_wake(topic))

    def _on_wake(self, key: str) -> None:
        queue = self._queue(key.removesuffix(":wake"))
        self._bus.publish([Event(EventKind.UPDATED, queue, "", 0)], self._is_wake)


def _is_answer(topic: Topic) -> bool:
    """Is this the topic of someone who waits for one job? It is told by name, with the outcome if that is small."""
    return topic.only == "ends" and topic.id is not None


def _each(form: struct.Struct, packed: bytes) -> Iterator[tuple[int, ...]]:
    return form.iter_unpack(packed)


def _time(at: int) -> int | None:
    return None if at < 0 else at


def open_url(url: str, shown: str, **options: Any) -> RedisStorage:
    """The storage that a URL names. `shown` is the URL without its password."""
    servers, ours = servers_from_url(url, shown)
    if ours.get("eviction", "refuse") not in ("refuse", "allow"):
        raise OptionError(f"{shown!r:.120}: eviction is 'refuse' or 'allow'")
    try:
        timeout_s = float(ours.get("timeout", TIMEOUT_S))
    except ValueError:
        timeout_s = 0.0
    if not 0.1 <= timeout_s <= MAX_TIMEOUT_S:
        raise OptionError(f"{shown!r:.120}: timeout is a number of seconds from 0.1 to {MAX_TIMEOUT_S:.0f}")
    return RedisStorage(servers, timeout_s=timeout_s, allow_eviction=ours.get("eviction") == "allow", **options)


def of_client(client: object, **options: Any) -> RedisStorage:
    """A storage on the server of a redis-py client: `redis.asyncio.Redis` or `RedisCluster`. It makes connections of
    its own, with the client's settings; the client stays yours to use and to close."""
    return RedisStorage(servers_from_client(client), **options)
