"""Records as rows of holdfast_jobs: columns that indexes and counts need, and all other fields in one blob."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast._core.extension import pack_extension, split_extension, unpack_extension
from holdfast._core.jobs import At, Count, Job, Limit, Ms, Outcome, State, StoredLease, Work
from holdfast.storage.local.table import index_of, view_of
from holdfast.storage.validation import clean_id

Row = tuple[Any, ...]

COLUMNS = "id, state, view, priority, run_at, arrival, payload, rest"
"""The columns that `job_of` reads, in its order."""


class _Rest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of a `Job` that have no column, in the order in which they are stored. Add fields only at the end."""

    generation: At
    wall_at: At
    custom_id: bool
    attempts: Count
    retries: Count
    stalls: Count
    timeouts: Count
    error: bytes | None
    run: StoredLease | None
    outcome: Outcome | None
    previous: Outcome | None
    keep_ms: Ms | None
    keep_until_at: At
    codec: str
    timeout_ms: Ms | None
    max_retries: Limit | None
    max_stalls: Limit | None
    max_timeouts: Limit | None
    result_ttl_ms: Ms | None
    dedup_ttl_ms: Ms | None
    extension: bytes = b""
    """The entries of `Job.extension` and `Work.extension`, packed together; not stored if there are none."""


_encode = msgspec.msgpack.Encoder().encode
_decode_rest = msgspec.msgpack.Decoder(_Rest).decode

UNREADABLE = (msgspec.DecodeError, ValueError, TypeError)


def rest_of(job: Job) -> bytes:
    work = job.work
    rest = (
        job.generation,
        job.wall_at,
        job.custom_id,
        job.attempts,
        job.retries,
        job.stalls,
        job.timeouts,
        job.error,
        job.run,
        job.outcome,
        job.previous,
        job.keep_ms,
        job.keep_until_at,
        work.codec,
        work.timeout_ms,
        work.max_retries,
        work.max_stalls,
        work.max_timeouts,
        work.result_ttl_ms,
        work.dedup_ttl_ms,
    )
    if job.extension or work.extension:
        return _encode((*rest, pack_extension((*job.extension, *work.extension))))
    return _encode(rest)


def job_of(row: Row) -> Job:
    """Return the job in a row. Raise one of `UNREADABLE` if the row cannot be read."""
    id, _, _, priority, run_at, arrival, payload, packed = row[:8]
    if not isinstance(packed, bytes) or not (payload is None or isinstance(payload, bytes)):
        raise msgspec.ValidationError("a payload and the rest of a record are blobs")
    if not (type(priority) is type(run_at) is type(arrival) is int and 0 <= priority <= 9):
        raise msgspec.ValidationError("a priority is a number from 0 to 9, times are numbers")
    rest = _decode_rest(packed)
    work = Work(
        payload,
        rest.codec,
        priority,
        rest.timeout_ms,
        rest.max_retries,
        rest.max_stalls,
        rest.max_timeouts,
        rest.result_ttl_ms,
        rest.dedup_ttl_ms,
    )
    job = Job(
        clean_id(id),
        work,
        rest.generation,
        run_at,
        arrival,
        rest.wall_at,
        rest.custom_id,
        rest.attempts,
        rest.retries,
        rest.stalls,
        rest.timeouts,
        rest.error,
        rest.run,
        rest.outcome,
        rest.previous,
        rest.keep_ms,
        rest.keep_until_at,
    )
    if not rest.extension:
        return job
    of_job, of_work = split_extension(unpack_extension(rest.extension))
    return replace(job, work=replace(work, extension=of_work), extension=of_job)


def place_of(job: Job) -> Row:
    """Return the columns that place a record: state, view, priority, run_at, arrival, until_at, worker."""
    index, key = index_of(job)
    until_at = None if index == State.WAITING else key[0]
    holder = None if job.run is None else job.run.worker
    return (str(index), view_of(job), job.work.priority, job.run_at, job.arrival, until_at, holder)


# Values bound to a statement. Python's module binds text, numbers and bytearrays directly, but looks for an adapter for
# every bytes and None, which takes longer than all other work. So these functions use few of them.


def blob_of(id: str) -> bytearray:
    return bytearray(id, "utf-8", "surrogateescape")


def new_row(job: Job) -> Row:
    """Return the values of a new record, which waits: id, priority, run_at, arrival, payload, rest."""
    work = job.work
    payload = None if work.payload is None else bytearray(work.payload)
    return blob_of(job.id), work.priority, job.run_at, job.arrival, payload, bytearray(rest_of(job))


def changed_row(job: Job) -> Row:
    """Return the values of `place_of`, with empty text for no view and no worker, and the rest."""
    state, view, priority, run_at, arrival, until_at, worker = place_of(job)
    return state, view or "", priority, run_at, arrival, until_at, worker or "", bytearray(rest_of(job))


def keeps_place(before: Job, after: Job) -> bool:
    """Return whether a change leaves the place among waiting records unchanged, as a claim and most ends do."""
    return (
        after.arrival == before.arrival
        and after.run_at == before.run_at
        and after.work.priority == before.work.priority
    )
