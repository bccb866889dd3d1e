"""The reading verbs: jobs, pages of indexes with their records, counts and workers. See lua/reads.lua."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.jobs import Job, State
from holdfast._core.replies import Page, QueueStats, WorkerFacts, WorkerInfo
from holdfast.errors import OptionError
from holdfast.storage.local.table import (
    BRIEF,
    FINISHED_INDEXES,
    Place,
    SortKey,
    as_read,
    listed,
    read_cursor,
    write_cursor,
)
from holdfast.storage.redis import codec
from holdfast.storage.redis.calls import Calls
from holdfast.storage.validation import clean_id, id_bytes, unpack_facts

MAX_SCORE = 2**62
"""Stands for every higher score, also an infinite one, in cursors. The times of jobs are lower."""

_decode_facts = msgspec.msgpack.Decoder(WorkerFacts).decode


class Entry(NamedTuple):
    """An entry of an index, with the stored bytes of its job."""

    where: str
    """The index, as the suffix of its key."""
    member: bytes
    score: str
    """The number as the server writes it; damage can make it infinite."""
    raw: bytes | None
    run: bytes | None

    @property
    def waits(self) -> bool:
        return self.where.startswith(":w")

    @property
    def id(self) -> bytes:
        return codec.id_of(self.member) if self.waits else self.member

    @property
    def index_name(self) -> str:
        """The index as `table.index_name` gives it."""
        return State.WAITING if self.waits else self.where[1:]

    @property
    def key(self) -> SortKey:
        """The place of the entry in its index, as `table.index_of` gives it."""
        score = math.ceil(max(-MAX_SCORE, min(float(self.score), MAX_SCORE)))
        return (-int(self.where[2:]), score, codec.arrival_of(self.member)) if self.waits else (score,)


async def read_page(
    calls: Calls, key: str, indexes: Sequence[str], start: tuple[str, bytes] | None, limit: int
) -> tuple[QueueTime, list[Entry]]:
    """Return the time of the queue and at most `limit` entries of these indexes, one index after the other. `start` is
    a score and a member of the first index: the entries begin behind it."""
    score, member = start or ("", b"")
    now, skew, last_stamp, flat = await calls.read(key, "page", limit, score, member, *indexes)
    entries = [
        Entry(index.decode(), member, score.decode(), raw, run)
        for index, member, score, raw, run in zip(*(flat[at::5] for at in range(5)), strict=True)
    ]
    return QueueTime(now, last_stamp, skew), entries


def job_or_damaged(id: bytes, raw: bytes | None, run: bytes | None, now: int) -> Job | None:
    return None if raw is None else job_or_none(id, raw, run) or lifecycle.damaged(clean_id(id), None, now)


def job_or_none(id: bytes, raw: bytes, run: bytes | None) -> Job | None:
    """Return the job in a record, None if the record cannot be read."""
    try:
        return codec.decode_job(id, raw, None if run is None else codec.decode_run(run))
    except codec.UNREADABLE:
        return None


def indexes_of(names: Sequence[str], start: Place | None) -> list[str]:
    """Return the keys of these indexes in order. Those of waiting jobs begin with the priority of the place."""
    indexes: list[str] = []
    for at, name in enumerate(names):
        if name == State.WAITING:
            first = 9 if at or start is None else -start[0][0]
            if not 0 <= first <= 9 or (start is not None and not 0 <= start[0][2] < 2**63):
                raise OptionError(f"{start!r:.80} is not a place among waiting jobs: pass the cursor of the last page")
            indexes += [f":w{priority}" for priority in range(first, -1, -1)]
        else:
            indexes.append(f":{name}")
    return indexes


def score_and_member(place: Place | None) -> tuple[str, bytes] | None:
    if place is None:
        return None
    key, id = place
    score, member = (key[1], codec.waiting_member(key[2], id)) if len(key) == 3 else (key[0], id)
    return str(math.copysign(math.inf, score) if abs(score) >= MAX_SCORE else score), member


async def read_jobs(calls: Calls, key: str, ids: Sequence[str]) -> list[Job | None]:
    keys = [id_bytes(id) for id in ids]
    now, skew, raws, runs = await calls.read(key, "get", *keys)
    time = QueueTime(now, skew=skew)
    jobs = [job_or_damaged(id, raw, run, now) for id, raw, run in zip(keys, raws, runs, strict=True)]
    return [None if job is None or lifecycle.forgotten(job, now) else as_read(job, time) for job in jobs]


async def scan(calls: Calls, key: str, state: State | None, after: str | None, limit: int) -> Page:
    names, start = read_cursor(state, after)
    indexes = indexes_of(names, start)
    time, entries = await read_page(calls, key, indexes, score_and_member(start), limit + 1)
    jobs = [job_or_damaged(entry.id, entry.raw, entry.run, time.last_at) for entry in entries]
    end: str | None = None
    if len(jobs) > limit:
        last, following = entries[limit - 1 : limit + 1]
        place = (last.key, last.id) if last.index_name == following.index_name else None
        end = write_cursor(state, following.index_name, place)
    return Page(listed([job for job in jobs[:limit] if job is not None], time), end)


async def read_stats(calls: Calls, key: str) -> codec.StatsReply | None:
    """Return the metadata of a queue and the sizes of its indexes, None if there is no such queue."""
    reply = await calls.read(key, "stats")
    return codec.StatsReply(*reply) if reply else None


async def read_workers(calls: Calls, key: str) -> tuple[int, list[WorkerInfo]]:
    """Return the time of the server, and the live workers of a namespace by name."""
    now, flat = await calls.read(key, "workers")
    workers: list[WorkerInfo] = []
    for name, packed in zip(flat[::2], flat[1::2], strict=True):
        try:
            beat_at, expires_at, evict_asked = codec.ANNOUNCED.unpack_from(packed)
            facts = _decode_facts(unpack_facts(packed[codec.ANNOUNCED.size :]))
        except codec.UNREADABLE:
            continue
        if expires_at > now:
            workers.append(WorkerInfo(name.decode(), facts, beat_at, expires_at, evict_asked == 1))
    return now, sorted(workers, key=lambda worker: worker.worker)


def queue_stats(queue: str, reply: codec.StatsReply, serving: Mapping[str, list[str]]) -> QueueStats:
    sizes = dict(zip(codec.INDEXES, reply.sizes, strict=True))
    expired = dict(zip(codec.INDEXES, reply.past, strict=True))
    kept = {index: sizes[index] - expired[index] for index in FINISHED_INDEXES}
    return QueueStats(
        queue,
        ready=reply.ready,
        scheduled=reply.scheduled,
        running=sizes[State.RUNNING],
        retrying=reply.retrying,
        deferred=reply.deferred,
        completed=kept[State.COMPLETED] + kept[BRIEF],
        failed=kept[State.FAILED],
        cancelled=kept[State.CANCELLED],
        expired=sum(expired[index] for index in FINISHED_INDEXES),
        oldest_ready_ms=max(0, reply.now - reply.oldest) // 1000,
        paused=bool(reply.paused),
        reason=reply.reason.decode(errors="replace"),
        workers=serving.get(queue, []),
        totals={kind: n for kind, n in zip(codec.KINDS, reply.totals, strict=True) if n},
    )
