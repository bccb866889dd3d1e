"""The stored bytes of records, and the arguments of calls. Mirrors record.lua; keyspace.lua describes the formats."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from holdfast._core import jobs
from holdfast._core.events import OF_WORKERS, Event, EventKind
from holdfast._core.extension import Extension, pack_extension, split_extension, unpack_extension
from holdfast._core.jobs import LIVE, Job, Outcome, State, StoredLease, Value, Work
from holdfast._core.replies import Placed
from holdfast.storage.local.table import FINISHED_INDEXES
from holdfast.storage.validation import clean_id, id_bytes

STATES = (None, State.WAITING, State.RUNNING, State.COMPLETED, State.FAILED, State.CANCELLED, State.COMPLETED)
"""States by the number that Lua gives them. The last one is that of a brief outcome."""
BRIEF_STATE = 6
PLACED = (None, Placed.NEW, Placed.UPDATED, Placed.DEFERRED, Placed.DUPLICATE, Placed.COMPLETED, Placed.FAILED)
KINDS = tuple(kind for kind in EventKind if kind not in OF_WORKERS)
"""Lua numbers the members of this tuple, of STATES and of PLACED from 1."""
INDEXES = (State.RUNNING, *FINISHED_INDEXES)
"""The indexes of jobs that do not wait, in the order of the replies of `stats`."""
RULES: tuple[bool | Literal["if_later", "if_earlier"], ...] = (False, True, "if_later", "if_earlier")
COUNTS = ("retries", "stalls", "timeouts")
NOW, DELAY, WALL_TIME = range(3)

MARK, LONG, FLAG_CUSTOM_ID, PAYLOAD, FLAG_FINISHED, TERMS, EXTENDED = 160, 1, 2, 4, 8, 16, 64
OVERDUE, CANCEL_ASKED, NEXT, PROGRESS = 1, 2, 4, 8
PLAIN = MARK | FLAG_CUSTOM_ID | PAYLOAD
"""The flags of most records: a payload, a custom id (or not), and nothing else."""

_HEAD = struct.Struct(">BBQQ")
_LONG = struct.Struct("<QQIIIIQQIII")
_OUTCOME = struct.Struct("<BQQQQQHBII")
_RUN = struct.Struct("<BQIQH")
_NEXT = struct.Struct("<QQQQBBBBH")
_SIZE = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_TTL = struct.Struct("<Q")
_REQUEST = struct.Struct("<8BQQ")
_SETTLEMENT = struct.Struct("<BQQQBB")
_FOLLOW_UP = struct.Struct("<BH")
_EVENT = struct.Struct("<BQQII")
_ARRIVAL = struct.Struct(">Q")
ANNOUNCED = struct.Struct("<QQB")
"""The head of the record of a worker: beat_at, expires_at, evict_asked. The facts follow."""
ENQUEUED = struct.Struct("<BBQ")
FENCE = struct.Struct("<Q")


class _WorkOptions(Value, frozen=True):
    """The fields of `Work` that only clients read."""

    codec: jobs.CodecName
    timeout_ms: jobs.Ms | None
    max_retries: jobs.Limit | None
    max_stalls: jobs.Limit | None
    max_timeouts: jobs.Limit | None
    dedup_ttl_ms: jobs.Ms | None


_options_of = attrgetter(*_WorkOptions.__struct_fields__)
_NO_OPTIONS = _options_of(Work(None))

_encode_terms = msgspec.msgpack.Encoder().encode
_decode_terms = msgspec.msgpack.Decoder(_WorkOptions).decode

LAST = 2**53 - 1
"""The latest time: the largest integer that a double of Lua holds exactly."""

CUT_OFF = "the bytes end before a field does"
UNREADABLE = (struct.error, IndexError, ValueError, TypeError, msgspec.DecodeError)
"""The exceptions that decoding raises for bytes that are not a record."""


@lru_cache(maxsize=256)
def _terms(options: tuple[str | int | None, ...], result_ttl_ms: int | None) -> bytes:
    if result_ttl_ms is None and options == _NO_OPTIONS:
        return b""
    return _TTL.pack(0 if result_ttl_ms is None else result_ttl_ms + 1) + _encode_terms(options)


def terms_of(work: Work) -> bytes:
    """Return the options of a work as bytes of a record: empty if all are the defaults."""
    return _terms(_options_of(work), work.result_ttl_ms)


def _work_of(payload: bytes | None, priority: int, terms: bytes, extension: Extension = ()) -> Work:
    if not terms:
        return Work(payload, priority=priority, extension=extension)
    (ttl,) = _TTL.unpack_from(terms)
    options = msgspec.structs.asdict(_decode_terms(terms[_TTL.size :]))
    return Work(payload, priority=priority, result_ttl_ms=ttl - 1 if ttl else None, extension=extension, **options)


def _extension_at(raw: bytes, at: int) -> tuple[Extension, Extension, int]:
    """Return the entries of the job, those of the work, and where the extension of a record or a `next` ends."""
    packed, at = _sized(raw, at, _SIZE)
    return (*split_extension(unpack_extension(packed)), at)


def decode_job(id: bytes, raw: bytes, run: StoredLease | None) -> Job:
    """Return the job of a record, with its run. Raises one of `UNREADABLE` if the record cannot be read."""
    flags, priority, generation, run_at = _HEAD.unpack_from(raw)
    if flags & MARK != MARK or priority > 9:
        raise ValueError("the bytes do not begin as a record does")
    at = _HEAD.size
    if flags | FLAG_CUSTOM_ID == PLAIN and generation <= LAST and run_at <= LAST:
        work = Work(raw[at:], priority=priority)
        return Job(clean_id(id), work, generation, run_at, generation, 0, flags == PLAIN, int(run is not None), run=run)
    numbers = [generation, 0, 0, 0, 0, 0, 0, 0]
    error: bytes | None = None
    previous: Outcome | None = None
    if flags & LONG:
        *numbers, error_size, previous_size, waiters_size = _LONG.unpack_from(raw, at)
        error, at = _bytes(raw, at + _LONG.size, error_size)
        if previous_size:
            previous = decode_outcome(raw[at : at + previous_size])
        at += previous_size + waiters_size
    arrival, wall_at, attempts, retries, stalls, timeouts, keep, keep_until_at = numbers
    outcome: Outcome | None = None
    if flags & FLAG_FINISHED:
        packed, at = _sized(raw, at, _SIZE)
        outcome = decode_outcome(packed)
    terms = b""
    if flags & TERMS:
        terms, at = _sized(raw, at, _SHORT)
    of_job: Extension = ()
    of_work: Extension = ()
    if flags & EXTENDED:
        of_job, of_work, at = _extension_at(raw, at)
    if at > len(raw):
        raise ValueError(CUT_OFF)
    times = (generation, run_at, arrival, wall_at)
    _check_times(*times, keep, keep_until_at)
    work = _work_of(raw[at:] if flags & PAYLOAD else None, priority, terms, of_work)
    ran = run is not None or (outcome is not None and outcome.started_at > 0)
    counts = (attempts + ran, retries, stalls, timeouts)
    custom_id, kept = bool(flags & FLAG_CUSTOM_ID), (keep - 1 if keep else None, keep_until_at)
    return Job(clean_id(id), work, *times, custom_id, *counts, error, run, outcome, previous, *kept, of_job)


def _check_times(*times: int) -> None:
    if max(times) > LAST:
        raise ValueError("a time is later than any clock")


def _sized(raw: bytes, at: int, form: struct.Struct) -> tuple[bytes, int]:
    """Return the bytes behind their size, and where they end."""
    start = at + form.size
    end: int = start + form.unpack_from(raw, at)[0]
    if end > len(raw):
        raise ValueError(CUT_OFF)
    return raw[start:end], end


def _bytes(raw: bytes, at: int, size: int) -> tuple[bytes | None, int]:
    """Return bytes whose size is stored plus one, None for 0, and where they end."""
    return (raw[at : at + size - 1], at + size - 1) if size else (None, at)


def decode_outcome(packed: bytes) -> Outcome:
    numbers: tuple[int, ...] = _OUTCOME.unpack_from(packed)
    state, generation, started_at, ended_at, forget_at, dedup_at, worker_size, codec_size, *sizes = numbers
    codec_at = _OUTCOME.size + worker_size
    worker = packed[_OUTCOME.size : codec_at].decode()
    at = codec_at + codec_size
    codec = packed[codec_at:at].decode()
    result_size, error_size = sizes
    result, at = _bytes(packed, at, result_size)
    error, at = _bytes(packed, at, error_size)
    known = STATES[state]
    if at != len(packed) or known is None or known in LIVE:
        raise ValueError("the bytes are not an outcome")
    _check_times(generation, started_at, ended_at, forget_at, dedup_at)
    brief = state == BRIEF_STATE
    return Outcome(generation, known, ended_at, forget_at, dedup_at, result, codec, error, started_at, worker, brief)


def decode_run(packed: bytes) -> StoredLease:
    flags, fence, lease_ms, until_at, size = _RUN.unpack_from(packed)
    at = _RUN.size + size
    worker = packed[_RUN.size : at].decode()
    _check_times(fence, until_at)
    if at > len(packed):
        raise ValueError(CUT_OFF)
    progress: bytes | None = None
    if flags & PROGRESS:
        progress, at = _sized(packed, at, _SIZE)
    following = _decode_next(packed, at) if flags & NEXT else None
    return StoredLease(
        worker, fence, lease_ms, until_at, bool(flags & OVERDUE), bool(flags & CANCEL_ASKED), following, progress
    )


def _decode_next(packed: bytes, at: int) -> jobs.Next:
    numbers: tuple[int, ...] = _NEXT.unpack_from(packed, at)
    generation, run_at, arrival, wall_at, takes_payload, rule, resets, priority, size = numbers
    at += _NEXT.size
    _check_times(generation, run_at, arrival, wall_at)
    terms = packed[at : at + size]
    at += size
    if at > len(packed) or priority > 9:
        raise ValueError(CUT_OFF)
    extension: Extension = ()
    if takes_payload & EXTENDED:
        of_job, extension, at = _extension_at(packed, at)
        if of_job:
            raise ValueError("a request has an extension of a job")
    work = _work_of(packed[at:], priority, terms, extension)
    return jobs.Next(generation, work, run_at, arrival, wall_at, bool(takes_payload & 1), RULES[rule], bool(resets))


def request_args(request: jobs.Request) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the arguments of one request in `enqueue`: id, head, terms, payload."""
    work, update = request.work, request.update
    if request.run_at is not None:
        when, at = WALL_TIME, request.run_at
    elif request.delay_ms:
        when, at = DELAY, request.delay_ms
    else:
        when, at = NOW, 0
    updates, payload, rule, resets = 0, False, 0, False
    if update is not None:  # The first two rules are False and True, which equal 0 and 1.
        rule = int(update.run_at) if isinstance(update.run_at, bool) else RULES.index(update.run_at)
        updates, payload, resets = 1, update.payload, update.resets_counts
    has_payload, terms = int(work.payload is not None), terms_of(work)
    if work.extension:
        has_payload |= EXTENDED
        terms = _SHORT.pack(len(terms)) + terms + pack_extension(work.extension)
    head = _REQUEST.pack(
        *(work.priority, has_payload, request.custom_id, updates, payload, rule, resets, when),
        *(at, request.keep_ms),
    )
    return id_bytes(request.id), head, terms, work.payload or b""


def settlement_args(item: jobs.Settlement) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the arguments of one settlement in `settle`: id, head, body, and a codec or a follow-up."""
    body: bytes | None = None
    extra = b""
    match item:
        case jobs.Complete():
            body, extra = item.result, item.codec.encode()
            numbers = (1, item.fence, item.result_ttl_ms, item.dedup_ttl_ms, body is not None, int(item.brief))
        case jobs.Fail():
            body = item.error
            if item.follow_up is not None:
                extra = _follow_up(item.follow_up)
            counts = 0 if item.counts is None else 1 + COUNTS.index(item.counts)
            numbers = (2, item.fence, item.failure_ttl_ms, item.dedup_ttl_ms, True, counts)
        case jobs.RetrySettlement():
            body = item.error
            counts = 1 + COUNTS.index(item.counts)
            numbers = (3, item.fence, item.delay_ms, item.run_at or 0, body is not None, counts)
        case jobs.Release():
            numbers = (4, item.fence, 0, 0, False, 0)
    return id_bytes(item.id), _SETTLEMENT.pack(*numbers), body or b"", extra


def _follow_up(work: Work) -> bytes:
    terms, payload = terms_of(work), work.payload or b""
    if not work.extension:
        return _FOLLOW_UP.pack(work.priority, len(terms)) + terms + payload
    extension = pack_extension(work.extension)
    head = _FOLLOW_UP.pack(work.priority | EXTENDED, len(terms))
    return head + terms + _SIZE.pack(len(extension)) + extension + payload


def decode_events(queue: str, message: bytes) -> Iterator[Event]:
    """Read the events of one step, as `publish` in transaction.lua packs them."""
    at = 0
    while at < len(message):
        numbers: tuple[int, ...] = _EVENT.unpack_from(message, at)
        kind, generation, run_at, id_size, outcome_size = numbers
        at += _EVENT.size
        id = clean_id(message[at : at + id_size])
        at += id_size
        outcome = decode_outcome(message[at : at + outcome_size]) if outcome_size else None
        at += outcome_size
        yield Event(KINDS[kind - 1], queue, id, generation, run_at, outcome)


def waiting_member(arrival: int, id: bytes) -> bytes:
    """Return the member of a waiting index."""
    return _ARRIVAL.pack(arrival) + id


def arrival_of(member: bytes) -> int:
    """Return the arrival in a member of a waiting index."""
    arrival: int = _ARRIVAL.unpack_from(member)[0]
    return arrival


def id_of(member: bytes) -> bytes:
    """Return the id in a member of a waiting index."""
    return member[_ARRIVAL.size :]


class StatsReply(NamedTuple):
    """The reply of `stats`, by position: reads.lua returns the fields in this order."""

    now: int
    ready: int
    scheduled: int
    oldest: int
    sizes: list[int]
    """The sizes of `INDEXES`."""
    past: list[int]
    """How many of `sizes` have a score in the past: finished records that are forgotten and not yet swept."""
    retrying: int
    deferred: int
    paused: int
    reason: bytes
    totals: list[int]
    """The number of events of each of `KINDS`."""
    records: int
    leases: int
    last_stamp: int
    written_at: int
    """When the metadata was written, which every change does."""

    @property
    def version(self) -> int:
        """A number that rises with every change: requests and leases take stamps, events are counted, and for the other
        changes there is the time."""
        return self.last_stamp + self.written_at + sum(self.totals)
