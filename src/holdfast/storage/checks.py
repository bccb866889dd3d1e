"""What every storage refuses, before anything is sent or changed. One place, so that all refuse alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from holdfast.errors import OptionError, PayloadRejected
from holdfast.jobs import PRIORITIES, Complete, Fail, Lease, Request, Retry, Settlement, State, Work

MAX_ITEMS = 250
"""Items in one call: a longer list is the caller's to cut."""
MAX_CALL_BYTES = 1_048_576
"""Payload bytes that one call or reply carries, unless a single item is larger."""
MAX_PAYLOAD_BYTES = 1_048_576
"""The default limit of a payload, a result or an error record."""
MAX_PAGE = 200
MAX_SWEEP = 100
MAX_ID_BYTES = 512
FOLLOW_UP_ID_BYTES = 32
"""A follow-up's id is its job's and this much more."""
MAX_LENGTH_MS = 10 * 365 * 24 * 3_600_000
"""No delay and no time to live is longer than ten years."""
MAX_RUN_AT = 4_102_444_800_000_000
"""No run_at lies beyond the year 2100: a time in milliseconds or nanoseconds is caught here."""
MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000
FAILED_SUFFIX = "/failed"

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,120}(/failed)?", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,40}", re.ASCII)


def check_queue(queue: str) -> str:
    if not isinstance(queue, str) or not _QUEUE_NAME.fullmatch(queue):
        raise OptionError(
            f"queue name {queue!r:.80} is not valid: use 1 to 120 letters, digits, '_', '-' or '.'"
            f" (and only a fail handler's queue ends in '{FAILED_SUFFIX}')"
        )
    return queue


def check_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise OptionError(f"namespace {namespace!r:.80} is not valid: use 1 to 40 letters, digits, '_', '-' or '.'")
    return namespace


def clean_id(id: str | bytes) -> str:
    """The one text form of an id. Bytes that are not UTF-8 become surrogate escapes, so that any bytes are an id."""
    if isinstance(id, bytes):
        return id.decode("utf-8", "surrogateescape")
    return id


def id_bytes(id: str) -> bytes:
    """An id as storages keep it."""
    return id.encode("utf-8", "surrogateescape")


def check_id(id: str, extra: int = 0) -> str:
    if not isinstance(id, str):
        raise OptionError(f"a job id must be text or bytes, not {type(id).__name__}")
    try:
        size = len(id) if id.isascii() else len(id_bytes(id))
    except UnicodeEncodeError:
        raise OptionError(f"job id {id!r:.80} has a lone surrogate, which no text has: pass bytes instead") from None
    if not 1 <= size <= MAX_ID_BYTES + extra:
        raise OptionError(f"a job id must have 1 to {MAX_ID_BYTES} bytes, this one has {size}: {id!r:.80}")
    return id


def check_ids(queue: str, ids: Sequence[str]) -> None:
    check_queue(queue)
    check_items(ids)
    extra = _extra(queue)
    for id in ids:
        check_id(id, extra)


def check_items(items: Sequence[object], limit: int = MAX_ITEMS) -> None:
    if len(items) > limit:
        raise OptionError(f"{len(items)} items in one call, at most {limit}: cut the list and call again")


def check_limit(limit: int, most: int) -> None:
    if not _is_int(limit) or not 1 <= limit <= most:
        raise OptionError(f"limit must be a whole number from 1 to {most}, not {limit!r:.40}")


def check_length(name: str, value: int | None, least: int = 0, most: int = MAX_LENGTH_MS) -> None:
    if value is not None and (not _is_int(value) or not least <= value <= most):
        raise OptionError(f"{name} must be a whole number of milliseconds from {least} to {most}, not {value!r:.40}")


def check_lease(worker: str, lease_ms: int) -> None:
    check_worker(worker)
    check_length("lease_ms", lease_ms, MIN_LEASE_MS, MAX_LEASE_MS)


def check_worker(worker: str) -> None:
    if not isinstance(worker, str) or not 1 <= len(worker) <= 200 or not worker.isprintable():
        raise OptionError(f"a worker's name must be 1 to 200 printable characters, not {worker!r:.80}")


def check_states(states: Collection[State]) -> None:
    for state in states:
        if state not in State.__members__.values():
            raise OptionError(f"{state!r:.40} is not a state: use one of {', '.join(State)}")


def check_requests(queue: str, requests: Sequence[Request], max_bytes: int) -> None:
    check_queue(queue)
    check_items(requests)
    extra = _extra(queue)
    total = 0
    for request in requests:
        check_id(request.id, extra)
        work = request.work
        if work.payload is not None:
            total += _check_bytes("payload", work.payload, max_bytes, request.id)
        elif request.update is None or request.update.payload:
            raise OptionError(f"job {request.id!r:.80} has no payload: only Update(payload=False) may do without")
        if request.run_at is not None and (
            request.delay_ms is not None or not _is_int(request.run_at) or not 0 < request.run_at <= MAX_RUN_AT
        ):
            raise OptionError("give either delay_ms or run_at, and run_at in microseconds since 1970, before 2100")
        check_length("delay_ms", request.delay_ms)
        check_length("keep_ms", request.keep_ms)
        if request.update is not None and request.update.run_at not in (True, False, "if_later", "if_earlier"):
            raise OptionError(
                f"Update(run_at=…) is True, False, 'if_later' or 'if_earlier', not {request.update.run_at!r}"
            )
        _check_work(work)
    _check_total(total, len(requests))


def check_settlements(queue: str, batch: Sequence[Settlement], max_bytes: int) -> None:
    check_queue(queue)
    check_items(batch)
    total = 0
    for item in batch:
        match item:
            case Complete():
                total += _check_bytes("result", item.result or b"", max_bytes, item.id)
                check_length("result_ttl_ms", item.result_ttl_ms)
                check_length("dedup_ttl_ms", item.dedup_ttl_ms)
            case Fail():
                total += _check_bytes("error", item.error, max_bytes, item.id)
                check_length("failure_ttl_ms", item.failure_ttl_ms)
                if item.follow_up is not None:
                    total += _check_follow_up(queue, item.id, item.follow_up, max_bytes)
            case Retry():
                total += _check_bytes("error", item.error or b"", max_bytes, item.id)
                check_length("delay_ms", item.delay_ms)
                if item.run_at is not None and (not _is_int(item.run_at) or not 0 < item.run_at <= MAX_RUN_AT):
                    raise OptionError("run_at must be in microseconds since 1970, before 2100")
                if item.counts not in ("retries", "stalls", "timeouts"):
                    raise OptionError(f"counts is 'retries', 'stalls' or 'timeouts', not {item.counts!r:.40}")
            case _:
                pass
    _check_total(total, len(batch))


def check_leases(queue: str, leases: Sequence[Lease], max_bytes: int) -> None:
    check_queue(queue)
    check_items(leases)
    total = sum(_check_bytes("progress", lease.progress or b"", max_bytes, lease.id) for lease in leases)
    _check_total(total, len(leases))


def encode_cursor(key: tuple[int, ...], id: bytes) -> str:
    """A place in an index, as text that callers hand back."""
    return ".".join((*map(str, key), id.hex()))


def decode_cursor(cursor: str) -> tuple[tuple[int, ...], bytes]:
    try:
        *key, id = cursor.split(".")
        return tuple(map(int, key)), bytes.fromhex(id)
    except ValueError:
        raise OptionError(f"{cursor!r:.80} is not a cursor that scan or repair gave out") from None


def _check_follow_up(queue: str, id: str, work: Work, max_bytes: int) -> int:
    if queue.endswith(FAILED_SUFFIX):
        raise OptionError(f"{queue} is a fail handler's queue: its own failures have no follow-up, they stay listed")
    if work.payload is None:
        raise OptionError(f"the follow-up of {id!r:.80} has no payload")
    _check_work(work)
    return _check_bytes("follow-up payload", work.payload, max_bytes, id)


def _check_work(work: Work) -> None:
    if not _is_int(work.priority) or work.priority not in PRIORITIES:
        raise OptionError(f"priority is a whole number from 0 to 9, higher first, not {work.priority!r:.40}")
    check_length("timeout_ms", work.timeout_ms, 1)
    check_length("result_ttl_ms", work.result_ttl_ms)
    check_length("dedup_ttl_ms", work.dedup_ttl_ms)
    for name in ("max_retries", "max_stalls", "max_timeouts"):
        value = getattr(work, name)
        if value is not None and (not _is_int(value) or not 0 <= value <= 1_000_000):
            raise OptionError(f"{name} must be a whole number from 0 to 1000000, not {value!r:.40}")


def _check_bytes(what: str, value: bytes, max_bytes: int, id: str) -> int:
    if not isinstance(value, bytes):
        raise PayloadRejected(
            f"the {what} of job {id!r:.80} must be bytes, not {type(value).__name__}: encode it first"
        )
    if len(value) > max_bytes:
        raise PayloadRejected(
            f"the {what} of job {id!r:.80} has {len(value)} bytes, at most {max_bytes} are taken:"
            " store it elsewhere and pass a reference, or raise max_payload"
        )
    return len(value)


def _check_total(total: int, items: int) -> None:
    if total > MAX_CALL_BYTES and items > 1:
        raise OptionError(
            f"{total} bytes in one call, at most {MAX_CALL_BYTES} or one item: cut the list and call again"
        )


def _extra(queue: str) -> int:
    return FOLLOW_UP_ID_BYTES if queue.endswith(FAILED_SUFFIX) else 0


def _is_int(value: object) -> bool:
    return type(value) is int
