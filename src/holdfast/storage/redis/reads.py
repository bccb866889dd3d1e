"""The reading verbs: jobs, pages of indexes with their records, counts and workers. See lua/reads.lua."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.jobs import Job, State
from holdfast._core.replies import Page, QueueStats, WorkerFacts, WorkerInfo
from holdfast.errors import OptionError
from holdfast.storage.local.table import Place, SortKey, as_read, listed, read_cursor, served_by, write_cursor
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.codec import (
    ANNOUNCED,
    KINDS,
    UNREADABLE,
    StatsReply,
    arrival_of,
    decode_job,
    decode_run,
    id_of,
    waiting_member,
)
from holdfast.storage.validation import clean_id, id_bytes

_decode_facts = msgspec.msgpack.Decoder(WorkerFacts).decode


class Entry(NamedTuple):
    """An entry of an index, and what is stored of its job."""

    where: str
    """The index: how its key ends."""
    member: bytes
    score: int
    raw: bytes | None
    run: bytes | None

    @property
    def waits(self) -> bool:
        return self.where.startswith(":w")

    @property
    def id(self) -> bytes:
        return id_of(self.member) if self.waits else self.member

    @property
    def state(self) -> State:
        return State.WAITING if self.waits else State(self.where[1:])

    @property
    def key(self) -> SortKey:
        """Where it stands, in the words of `table.index_of`."""
        return (-int(self.where[2:]), self.score, arrival_of(self.member)) if self.waits else (self.score,)


class EntryPage(NamedTuple):
    now: int
    skew: int
    last_stamp: int
    entries: list[Entry]


async def read_page(
    calls: Calls, key: str, indexes: Sequence[str], start: tuple[int, bytes] | None, limit: int
) -> EntryPage:
    """At most `limit` entries of these indexes, one index after the other, behind a score and member of the first."""
    score, member = ("", b"") if start is None else (str(start[0]), start[1])
    now, skew, last_stamp, flat = await calls.read(key, "page", limit, score, member, *indexes)
    entries = [
        Entry(index.decode(), member, int(float(score)), raw, run)
        for index, member, score, raw, run in zip(*(flat[at::5] for at in range(5)), strict=True)
    ]
    return EntryPage(now, skew, last_stamp, entries)


def job_or_damaged(id: bytes, raw: bytes | None, run: bytes | None, now: int) -> Job | None:
    return None if raw is None else job_or_none(id, raw, run) or lifecycle.damaged(clean_id(id), None, now)


def job_or_none(id: bytes, raw: bytes, run: bytes | None) -> Job | None:
    """The job in a record; None if the record cannot be read."""
    try:
        return decode_job(id, raw, None if run is None else decode_run(run))
    except UNREADABLE:
        return None


def indexes_of(states: Sequence[State], start: Place | None) -> list[str]:
    """The indexes of these states, in order; of waiting ones from the priority on that a place is in."""
    indexes: list[str] = []
    for at, state in enumerate(states):
        if state is State.WAITING:
            first = 9 if at or start is None else -start[0][0]
            if not 0 <= first <= 9 or (start is not None and not 0 <= start[0][2] < 2**63):
                raise OptionError(f"a cursor of waiting jobs has no place {start!r:.80}")
            indexes += [f":w{priority}" for priority in range(first, -1, -1)]
        else:
            indexes.append(f":{state}")
    return indexes


def score_and_member(place: Place | None) -> tuple[int, bytes] | None:
    if place is None:
        return None
    key, id = place
    return (key[1], waiting_member(key[2], id)) if len(key) == 3 else (key[0], id)


async def read_jobs(calls: Calls, key: str, ids: Sequence[str]) -> list[Job | None]:
    keys = [id_bytes(id) for id in ids]
    now, skew, raws, runs = await calls.read(key, "get", *keys)
    time = QueueTime(now, skew=skew)
    jobs = [job_or_damaged(id, raw, run, now) for id, raw, run in zip(keys, raws, runs, strict=True)]
    return [None if job is None or lifecycle.forgotten(job, now) else as_read(job, time) for job in jobs]


async def scan(calls: Calls, key: str, state: State | None, after: str | None, limit: int) -> Page:
    states, start = read_cursor(state, after)
    indexes = indexes_of(states, start)
    page = await read_page(calls, key, indexes, score_and_member(start), limit + 1)
    time = QueueTime(page.now, skew=page.skew)
    jobs = [job_or_damaged(entry.id, entry.raw, entry.run, page.now) for entry in page.entries]
    end: str | None = None
    if len(jobs) > limit:
        last, following = page.entries[limit - 1 : limit + 1]
        place = (last.key, last.id) if last.state is following.state else None
        end = write_cursor(state, following.state, place)
    return Page(listed([job for job in jobs[:limit] if job is not None], time), end)


async def read_stats(calls: Calls, key: str) -> StatsReply | None:
    """The metadata of a queue and the sizes of its indexes, None if there is no such queue."""
    reply = await calls.read(key, "stats")
    return StatsReply(*reply) if reply else None


async def read_workers(calls: Calls, key: str) -> tuple[int, list[WorkerInfo]]:
    """The time of the server, and the live workers of a namespace by name."""
    now, flat = await calls.read(key, "workers")
    workers: list[WorkerInfo] = []
    for name, packed in zip(flat[::2], flat[1::2], strict=True):
        try:
            beat_at, expires_at, evict_asked = ANNOUNCED.unpack_from(packed)
            facts = _decode_facts(packed[ANNOUNCED.size :])
        except UNREADABLE:
            continue
        if expires_at > now:
            workers.append(WorkerInfo(name.decode(), facts, beat_at, expires_at, evict_asked == 1))
    return now, sorted(workers, key=lambda worker: worker.worker)


def queue_stats(queue: str, reply: StatsReply, workers: Sequence[WorkerInfo]) -> QueueStats:
    return QueueStats(
        queue,
        ready=reply.ready,
        scheduled=reply.scheduled,
        running=reply.size_of(State.RUNNING),
        retrying=reply.retrying,
        deferred=reply.deferred,
        completed=reply.remembered(State.COMPLETED),
        failed=reply.remembered(State.FAILED),
        cancelled=reply.remembered(State.CANCELLED),
        oldest_ready_ms=max(0, reply.now - reply.oldest) // 1000,
        paused=bool(reply.paused),
        reason=reply.reason.decode(),
        workers=[worker.worker for worker in workers if queue in served_by(worker)],
        totals={kind: n for kind, n in zip(KINDS, reply.totals, strict=True) if n},
    )
