"""Jobs on Redis or Valkey: the Lua files in lua/ decide and store; this package writes calls and reads replies.

docs/development/internals.md has the path of a job through the modules. The Lua files mirror Python modules by name.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from holdfast._core import replies
from holdfast._core.clock import Clock, QueueTime
from holdfast._core.events import Event, EventKind, Topic
from holdfast._core.jobs import Fail, Job, LeaseRef, Release, Request, Settlement, State, StoredLease
from holdfast._core.replies import CancelResult, Enqueued, KeepResult, SettleResult
from holdfast.errors import StorageUnavailable
from holdfast.storage import validation
from holdfast.storage.base import QueueDamaged, Storage
from holdfast.storage.local.table import as_read
from holdfast.storage.redis import codec, reads, server_info
from holdfast.storage.redis.audit import Audit
from holdfast.storage.redis.calls import CallReply, Calls
from holdfast.storage.redis.notify import PubSubListener, WakeTokenListener
from holdfast.storage.redis.raw import Argument, Reply
from holdfast.storage.redis.script import LAYOUT, layout_error
from holdfast.storage.redis.topology import Servers, all_ended
from holdfast.storage.redis.urls import pipeline_for, servers_from_client, servers_from_url
from holdfast.storage.validation import FAILED_SUFFIX, clean_id, id_bytes

log = logging.getLogger("holdfast.redis")

TIMEOUT_S = 10.0
"""How long a call tries to reach the server before it fails."""
MAX_NAMES = 10_000
"""The most names of queues that a storage remembers, so that an application with ever new queues stays small."""
CLIENT_BYTES = 9
"""Random bytes in the name of a client. The name has 12 characters: transaction.lua cuts lists of waiters there."""

_CANCELLED = dict(
    zip(b"cafm", (CancelResult.CANCELLED, CancelResult.ASKED, CancelResult.FINISHED, CancelResult.MISSING), strict=True)
)
_KEPT = dict(zip(b"klm", (KeepResult.KEPT, KeepResult.LIVE, KeepResult.MISSING), strict=True))
_SETTLED = dict(zip(b"10", (SettleResult.OK, SettleResult.LOST), strict=True))
_READY = ord("1")
"""The character of a queue that has work, in the reply of `ready`. The tables above read other replies of this form."""

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
        self._name = f"{{{namespace}}}"
        """Prefix of the keys that all queues of the namespace share."""
        self._servers = servers
        self._clock = clock
        self._timeout_s = timeout_s
        self._allow_eviction = allow_eviction
        self._open_log_level = logging.INFO
        database = servers.options.database
        self._suffix = f"@{database}" if database else ""
        """End of the names of channels: a server has the same channels for all its databases."""
        self._new_client()
        self._wake_listener = WakeTokenListener(servers, self._on_wake)
        self._listeners: dict[object, PubSubListener] = {}
        self._keys: dict[str, str] = {}
        self._listed: set[str] = set()
        """Queues that this client has put on the list of the namespace."""

    def __repr__(self) -> str:
        return f"<RedisStorage {self._servers.name}>"

    def _new_client(self) -> None:
        """Take a new name, and count calls from 1. The server does not apply a call whose name and number it knows, so
        two forks that open copies of this object must not have the same name."""
        self._client = secrets.token_urlsafe(CLIENT_BYTES)
        self._calls = Calls(self._servers, self._client, self._clock, self._timeout_s)

    async def _about(self) -> replies.StorageInfo:
        return await server_info.describe(self._calls, self._name, self._servers.name)

    def clone(self) -> RedisStorage:
        clone = RedisStorage(
            self._servers.clone(),
            namespace=self.namespace,
            clock=self._clock,
            max_payload=self._max_payload,
            timeout_s=self._timeout_s,
            allow_eviction=self._allow_eviction,
        )
        clone._open_log_level = logging.DEBUG  # The first storage object has logged its server.
        return clone

    async def _open(self) -> None:
        if self._pid is not None:
            raise StorageUnavailable(f"{self!r} is open already: connect again to get a second storage")
        self._servers.start()
        self._new_client()
        try:
            about = await server_info.check(self._calls, self._name, self._servers.name, self._allow_eviction)
            log.log(self._open_log_level, "jobs are in %s, %s", self._servers.name, about)
            found: bytes = await self._calls.read(self._name, "layout", LAYOUT)
            if found != str(LAYOUT).encode():
                place = f"namespace {self.namespace} of {self._servers.name}"
                raise layout_error(place, found.decode(errors="replace"))
        except BaseException:
            await self._close()
            raise
        await super()._open()

    async def _close(self) -> None:
        await super()._close()
        listeners, self._listeners = self._listeners, {}
        await all_ended([self._wake_listener.end(), *(listener.end() for listener in listeners.values())])
        await self._calls.close()

    def _key(self, queue: str) -> str:
        """Return the prefix of the keys of a queue. A companion has the hash tag of its queue."""
        key = self._keys.get(queue)
        if key is None:
            if len(self._keys) >= MAX_NAMES:
                self._keys.clear()
            suffix = FAILED_SUFFIX if queue.endswith(FAILED_SUFFIX) else ""
            key = self._keys[queue] = f"{{{self.namespace}/{queue.removesuffix(FAILED_SUFFIX)}}}{suffix}"
        return key

    def _queue(self, key: str) -> str:
        return key.removeprefix(f"{{{self.namespace}/").replace("}", "", 1)

    async def _list(self, queue: str) -> None:
        """Put a queue on the list of the namespace. A single server does so in the step that makes the queue. In a
        cluster the list is on another node, and needs a call."""
        if self._servers.clustered:
            await self._calls.read(self._name, "list", queue)
        if len(self._listed) >= MAX_NAMES:
            self._listed.clear()
        self._listed.add(queue)

    # Changing

    async def _call_and_list(
        self, created: str, key: str, verb: str, options: tuple[Argument, ...], items: Sequence[Argument], count: int
    ) -> CallReply:
        """Make a call that may create the queue `created`, and put that queue on the list of the namespace: before the
        first such call of this client, and after each call that has created it. The entry may be gone with an earlier
        queue of that name."""
        if created not in self._listed:
            await self._list(created)
        try:
            result = await self._calls.call(key, verb, options, items, count)
            has_created = result.reply if verb == "pause" else result.reply[0]
            if has_created:
                await self._list(created)
        except BaseException:
            self._listed.discard(created)  # The queue may have been created again: the reply that says so is lost.
            raise
        return result

    async def _enqueue(self, queue: str, jobs: Sequence[Request]) -> list[Enqueued]:
        items = [arg for request in jobs for arg in codec.request_args(request)]
        reply, start, _ = await self._call_and_list(queue, self._key(queue), "enqueue", (), items, len(jobs))
        _, packed, cached = reply
        packed = packed[start * codec.ENQUEUED.size : (start + len(jobs)) * codec.ENQUEUED.size]
        numbers: Iterator[tuple[int, int, int]] = codec.ENQUEUED.iter_unpack(packed)
        enqueued: list[Enqueued] = [
            Enqueued(request.id, codec.PLACED[placed], generation, codec.STATES[state])
            for request, (placed, state, generation) in zip(jobs, numbers, strict=True)
        ]
        for at, outcome, *_ in cached:
            index: int = at - 1 - start
            if 0 <= index < len(enqueued) and outcome:
                enqueued[index] = msgspec.structs.replace(enqueued[index], outcome=codec.decode_outcome(outcome))
        return enqueued

    def _enqueue_in(self, transaction: object, queue: str, jobs: Sequence[Request]) -> list[Enqueued | None]:
        pipeline = pipeline_for(transaction, self._servers)
        items = [arg for request in jobs for arg in codec.request_args(request)]
        pipeline.execute_command(*self._calls.enqueue_in_multi(self._key(queue), self._name, queue, items))
        return [None] * len(jobs)

    async def _claim(self, queue: str, limit: int, worker: str, lease_ms: int) -> replies.Claim:
        key = self._key(queue)
        reply, _, late = await self._calls.call(key, "claim", (limit, worker, lease_ms))
        claim = await self._read_claim(queue, reply, worker, lease_ms)
        if len(claim.jobs) < limit:
            self._wake_listener.rearm(f"{key}:wake")
        if not late:
            return claim
        if claim.jobs:  # The caller that claimed them has given up, and their leases may expire soon.
            released = [Release(job.id, job.run.fence) for job in claim.jobs if job.run is not None]
            await self._settle(queue, released, worker)
        return await self._claim(queue, limit, worker, lease_ms)

    async def _read_claim(self, queue: str, reply: Reply, worker: str, lease_ms: int) -> replies.Claim:
        now, next_run_at, next_sweep_at, paused, flat, fences, skew = reply
        time = QueueTime(now, skew=skew)
        jobs: list[Job] = []
        garbled: list[Argument] = []
        for id, raw, (fence,) in zip(flat[::2], flat[1::2], codec.FENCE.iter_unpack(fences), strict=True):
            run = StoredLease(worker, fence, lease_ms, now + 1000 * lease_ms)
            try:
                jobs.append(as_read(codec.decode_job(id, raw, run), time))
            except codec.UNREADABLE:
                garbled += ("garbled", id, ":running", raw)
        if garbled:  # Only a client can find this out: the server reads no options.
            await self._calls.call(self._key(queue), "repair", tuple(garbled))
        return replies.Claim(jobs, now, _time(next_run_at), _time(next_sweep_at), bool(paused))

    async def _ready(self, queues: Sequence[str], forgotten: bool) -> list[str]:
        keys = [self._key(queue) for queue in queues]
        if self._servers.clustered:
            codes = b"".join(
                await asyncio.gather(*(self._calls.read(key, "ready", int(forgotten), key) for key in keys))
            )
        else:
            codes = await self._calls.read(keys[0], "ready", int(forgotten), *keys)
        return [queue for queue, code in zip(queues, codes, strict=True) if code == _READY]

    async def _settle(self, queue: str, batch: Sequence[Settlement], worker: str) -> list[SettleResult]:
        items = [arg for item in batch for arg in codec.settlement_args(item)]
        call = (self._key(queue), "settle", (worker,), items, len(batch))
        if any(isinstance(item, Fail) and item.follow_up for item in batch):
            reply, start, _ = await self._call_and_list(queue + FAILED_SUFFIX, *call)
        else:
            reply, start, _ = await self._calls.call(*call)
        return [_SETTLED[code] for code in reply[1][start : start + len(batch)]]

    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> replies.Extended:
        items: list[Argument] = []
        for lease in leases:
            items += (id_bytes(lease.id), lease.fence, b"" if lease.progress is None else b"+" + lease.progress)
        codes = await self._codes(queue, "extend", (worker, lease_ms), items, len(leases))
        lost, asked = ([lease for lease, code in zip(leases, codes, strict=True) if code == wanted] for wanted in b"lc")
        return replies.Extended(lost, asked)

    async def _cancel(self, queue: str, ids: Sequence[str]) -> list[CancelResult]:
        codes = await self._codes(queue, "cancel", (), [id_bytes(id) for id in ids], len(ids))
        return [_CANCELLED[code] for code in codes]

    async def _keep(self, queue: str, ids: Sequence[str], ttl_ms: int, at_least: bool) -> list[KeepResult]:
        codes = await self._codes(queue, "keep", (ttl_ms, int(at_least)), [id_bytes(id) for id in ids], len(ids))
        return [_KEPT[code] for code in codes]

    async def _prioritize(self, queue: str, ids: Sequence[str], priority: int) -> list[bool]:
        codes = await self._codes(queue, "prioritize", (priority,), [id_bytes(id) for id in ids], len(ids))
        return [code == ord("y") for code in codes]

    async def _codes(
        self, queue: str, verb: str, options: tuple[Argument, ...], items: Sequence[Argument], count: int
    ) -> bytes:
        """Make a call whose reply has one character for each item, and return the characters of these items."""
        reply, start, _ = await self._calls.call(self._key(queue), verb, options, items, count)
        codes: bytes = reply[start : start + count]
        return codes

    async def _pause(self, queue: str, paused: bool, reason: str) -> None:
        options = (int(paused), reason if paused else "")
        await self._call_and_list(queue, self._key(queue), "pause", options, (), 0)

    async def _sweep(self, queue: str, limit: int, worker: str | None) -> replies.Swept:
        call = await self._calls.call(self._key(queue), "sweep", (limit, worker or ""))
        overdue, stalled, gone, more, next_sweep_at = call.reply
        return replies.Swept(
            [clean_id(id) for id in overdue], [clean_id(id) for id in stalled], gone, bool(more), _time(next_sweep_at)
        )

    async def _purge(self, queue: str, states: Collection[State], limit: int) -> int:
        wanted = "".join(str(codec.STATES.index(state)) for state in states)
        call = await self._calls.call(self._key(queue), "purge", (limit, wanted))
        return int(call.reply)

    async def _drop(self, queue: str, limit: int) -> int:
        call = await self._calls.call(self._key(queue), "drop", (limit,))
        if call.reply:
            return int(call.reply)
        self._listed.discard(queue)
        if self._servers.clustered:
            key = f"{self._name}:queues"
            await self._calls.command(key, "SREM", key, queue)
            if await self._calls.read(self._key(queue), "stats"):  # Another client has made it again meanwhile.
                await self._list(queue)
        return 0

    async def _announce(self, worker: str, facts: replies.WorkerFacts, ttl_ms: int) -> replies.WorkerCommands:
        call = await self._calls.call(self._name, "announce", (worker, validation.pack_facts(_encode(facts)), ttl_ms))
        return replies.WorkerCommands(bool(call.reply))

    async def _evict(self, worker: str) -> bool:
        call = await self._calls.call(self._name, "evict", (worker,))
        return bool(call.reply)

    async def _write_notes(self, notes: Mapping[str, bytes], ttl_ms: int) -> None:
        pairs = (part for name, value in notes.items() for part in (name, value))
        await self._calls.call(self._name, "write_notes", (ttl_ms, *pairs))

    # Reading

    async def _read_notes(self, names: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = await self._calls.read(self._name, "read_notes", *names)
        return found

    async def _get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await reads.read_jobs(self._calls, self._key(queue), ids)

    async def _scan(self, queue: str, state: State | None, after: str | None, limit: int) -> replies.Page:
        return await reads.scan(self._calls, self._key(queue), state, after, limit)

    async def _snapshot(self, queues: Sequence[str] | None) -> replies.Snapshot:
        if queues is None:
            key = f"{self._name}:queues"
            names: list[bytes] = await self._calls.command(key, "SMEMBERS", key)
            queues = [name.decode(errors="replace") for name in names]
        now, workers = await reads.read_workers(self._calls, self._name)
        serving = replies.workers_by_queue(workers)
        found = await asyncio.gather(*(self._stats(queue, serving) for queue in sorted(set(queues))))
        return replies.Snapshot(now, [stats for stats in found if stats is not None], workers)

    async def _stats(self, queue: str, serving: Mapping[str, list[str]]) -> replies.QueueStats | None:
        try:
            reply = await reads.read_stats(self._calls, self._key(queue))
        except QueueDamaged as error:
            return replies.QueueStats(queue, problem=str(error))
        return None if reply is None else reads.queue_stats(queue, reply, serving)

    async def _repair(self, queue: str, dry_run: bool, cursor: str | None) -> replies.Repaired:
        return await Audit(self._calls, queue, self._key(queue)).step(dry_run, cursor)

    # Listening

    async def _listen(self, topics: Sequence[Topic]) -> Callable[[], None]:
        with ExitStack() as leaves:
            for topic in topics:
                key = self._key(topic.queue)
                if self._is_wake(topic):
                    self._wake_listener.add(f"{key}:wake")
                    leaves.callback(self._wake_listener.remove, f"{key}:wake")
                elif _is_answer(topic):  # A caller that waited once will wait again: these subscriptions never end.
                    for name in (f"to:{self._client}", "to:*"):
                        channel = f"{key}:{name}{self._suffix}"
                        await self._listener(channel).listen(channel, self._timeout_s)
                else:
                    channel = f"{key}:events{self._suffix}"
                    listener = self._listener(channel)
                    await listener.listen(channel, self._timeout_s)
                    leaves.callback(listener.leave, channel)
            return leaves.pop_all().close

    def _listener(self, channel: str) -> PubSubListener:
        node = self._servers.node_of(channel)
        if node not in self._listeners:
            self._listeners[node] = PubSubListener(self._servers, self._on_message, self._bus.notify_all)
        return self._listeners[node]

    def _is_wake(self, topic: Topic) -> bool:
        """Tell whether the wake token serves this topic. A blocking wait cannot name queues of several nodes."""
        return topic.only == "wake" and not self._servers.clustered

    def _on_message(self, channel: str, message: bytes) -> None:
        key, _, _ = channel.rpartition(":")
        to_waiters = key.endswith(":to")
        queue = self._queue(key.removesuffix(":to"))
        try:
            events = list(codec.decode_events(queue, message))
        except codec.UNREADABLE:
            log.warning("ignored a message of %d bytes on %s that cannot be read", len(message), channel)
            return
        if to_waiters:
            self._bus.publish(events, _is_answer)
        else:
            self._bus.publish(events, lambda topic: not _is_answer(topic) and not self._is_wake(topic))

    def _on_wake(self, key: str) -> None:
        queue = self._queue(key.removesuffix(":wake"))
        self._bus.publish([Event(EventKind.UPDATED, queue, "", 0)], self._is_wake)


def _is_answer(topic: Topic) -> bool:
    """Tell whether a caller waits for one job with this topic. It gets its own message, with a small outcome in it."""
    return topic.only == "ends" and topic.id is not None


def _time(at: int) -> int | None:
    return None if at < 0 else at


def open_url(url: str, shown: str, **options: Any) -> RedisStorage:
    """Return the storage that a URL names. `shown` is the URL without its password."""
    servers, url_options = servers_from_url(url, shown)
    return RedisStorage(servers, **url_options, **options)


def of_client(client: object, **options: Any) -> RedisStorage:
    """Return a storage on the server of a redis-py client: `redis.asyncio.Redis` or `RedisCluster`. The storage copies
    the client's settings and opens its own connections: using and closing the client stays your task."""
    return RedisStorage(servers_from_client(client), **options)
