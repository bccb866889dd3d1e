"""Argument checks that every storage makes before it sends or changes anything.

Most limits are in the types of the values (_core/jobs.py): a batch is packed and decoded against them, which costs less
than a check of each field and misses no field. So a value that was stored can always be read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_type_hints

import msgspec

from holdfast._core import jobs
from holdfast._core.events import Topic
from holdfast._core.extension import FIRST_WORK_TAG, LAST_TAG, MAX_EXTENSION_BYTES, Extension, ascends, extension_size
from holdfast._core.replies import WorkerFacts
from holdfast.errors import OptionError, PayloadRejected

MAX_ITEMS = 250
"""The most items in one call: the caller splits a longer list."""
MAX_CALL_BYTES = 1_048_576
"""The most payload bytes in one call or reply, unless a single item is larger."""
MAX_PAYLOAD_BYTES = 1_048_576
"""The default limit of a payload, a result or an error record."""
MOST_PAYLOAD_BYTES = 536_870_912
MAX_FACTS_BYTES = 2_097_152
"""The most bytes of the facts of a worker: enough for the names of 10,000 queues."""
PACKED_BYTES = 4_096
"""Longer facts are stored compressed: those of a worker of thousands of queues are mostly names that begin alike."""
MOST_UNPACKED_BYTES = 16 * 1_048_576
"""Most bytes of facts after decompression."""
MAX_NOTE_BYTES = 16_384
MAX_PAGE = 200
MAX_SWEEP = 100
MAX_ID_BYTES = 512
FOLLOW_UP_ID_BYTES = 32
"""The id of a follow-up is the id of its job and at most this number of bytes."""
MIN_LEASE_MS, MAX_LEASE_MS = 100, 86_400_000
MAX_REASON = 500
FAILED_SUFFIX = "/failed"

_ZLIB = b"\x78"
"""First byte of compressed data. The msgpack of a map or a list does not begin with it."""
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,120}(/failed)?", re.ASCII)
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,40}", re.ASCII)

Item = TypeVar("Item")
BatchItem = TypeVar("BatchItem", bound=jobs.Request | jobs.Settlement | jobs.LeaseRef)

_encode = msgspec.msgpack.Encoder().encode
_KINDS = {"request": jobs.Request, "settlement": jobs.Settlement, "lease": jobs.LeaseRef, "topic": Topic}
_READERS = {what: msgspec.msgpack.Decoder(list[kind]).decode for what, kind in _KINDS.items()}  # type: ignore[valid-type]
_WRONG = (msgspec.DecodeError, UnicodeError, TypeError, OverflowError, RecursionError)
"""Errors of packing and decoding a value that is not valid."""


def batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Split a list into parts that fit into one call each, in order."""
    part: list[Item] = []
    total = 0
    for item in items:
        more = size(item)
        if part and (len(part) == MAX_ITEMS or total + more > MAX_CALL_BYTES):
            yield part
            part, total = [], 0
        part.append(item)
        total += more
    if part:
        yield part


def work_size(work: jobs.Work) -> int:
    """Return the bytes of a job's work that count towards the size of a call."""
    return len(work.payload or b"") + extension_size(work.extension)


def check_queue(queue: str) -> str:
    if not isinstance(queue, str) or not _QUEUE_NAME.fullmatch(queue):
        raise OptionError(
            f"queue name {queue!r:.80} is not valid: use 1 to 120 letters, digits, '_', '-' or '.'"
            f" (and only a fail handler's queue ends in '{FAILED_SUFFIX}')"
        )
    return queue


def check_queues(queues: Sequence[str]) -> None:
    _check_list(queues, "queues")
    for queue in queues:
        check_queue(queue)


def check_namespace(namespace: str) -> str:
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise OptionError(f"namespace {namespace!r:.80} is not valid: use 1 to 40 letters, digits, '_', '-' or '.'")
    return namespace


def check_number(name: str, value: int, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{name} must be a whole number from {least} to {most}, not {value!r:.40}")
    return value


def clean_id(id: str | bytes) -> str:
    """Return the text form of an id. Bytes that are not UTF-8 become surrogate escapes, so any bytes can be an id."""
    return id.decode("utf-8", "surrogateescape") if isinstance(id, bytes) else id


def id_bytes(id: str) -> bytes:
    """Return the bytes of an id, as storages keep it."""
    return id.encode("utf-8", "surrogateescape")


def check_id(id: str, extra: int = 0) -> str:
    if not isinstance(id, str):
        raise OptionError(f"a job id must be text, not {type(id).__name__} ({id!r:.80}): pass bytes through clean_id")
    size = len(id) if id.isascii() else _size(id)
    if not 1 <= size <= MAX_ID_BYTES + extra:
        raise OptionError(f"a job id must have 1 to {MAX_ID_BYTES} bytes, this one has {size}: {id!r:.80}")
    return id


def _size(id: str) -> int:
    try:
        raw = id_bytes(id)
    except UnicodeEncodeError:
        raw = b""
    if not raw or clean_id(raw) != id:
        raise OptionError(f"job id {id!r:.80} has a lone surrogate and is not valid text: pass bytes through clean_id")
    return len(raw)


def check_ids(queue: str, ids: Sequence[str]) -> None:
    check_queue(queue)
    _check_list(ids, "ids")
    extra = _extra(queue)
    for id in ids:
        check_id(id, extra)


def check_lease(worker: str, lease_ms: int) -> None:
    check_worker(worker)
    check_number("lease_ms", lease_ms, MIN_LEASE_MS, MAX_LEASE_MS)


def check_worker(worker: str) -> None:
    if not isinstance(worker, str) or not 1 <= len(worker) <= 200 or not worker.isprintable():
        raise OptionError(f"a worker name must have 1 to 200 printable characters, not {worker!r:.80}")


def check_facts(facts: WorkerFacts) -> None:
    try:
        packed = _encode(facts)
        msgspec.msgpack.decode(packed, type=WorkerFacts)
    except _WRONG as error:
        raise OptionError(f"worker facts must map text to text, numbers or lists of text: {error}") from None
    if len(packed) > MAX_FACTS_BYTES:
        raise OptionError(f"worker facts have {len(packed)} bytes, at most {MAX_FACTS_BYTES} are allowed: shorten them")


def pack_facts(data: bytes) -> bytes:
    """Compress encoded facts if they are long."""
    return data if len(data) <= PACKED_BYTES else zlib.compress(data, 1)


def unpack_facts(data: bytes) -> bytes:
    """Undo `pack_facts`. Raises ValueError for data that cannot be decompressed."""
    if data[:1] != _ZLIB:
        return data
    try:
        return zlib.decompressobj().decompress(data, MOST_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def check_notes(notes: Mapping[str, bytes]) -> None:
    check_note_names(list(notes))
    for name, value in notes.items():
        if not isinstance(value, bytes) or len(value) > MAX_NOTE_BYTES:
            raise OptionError(f"note {name!r:.80} must be at most {MAX_NOTE_BYTES} bytes, not {value!r:.40}")


def check_note_names(names: Sequence[str]) -> None:
    _check_list(names, "notes")
    for name in names:
        if not isinstance(name, str) or not name.isascii() or not name.isprintable() or not 1 <= len(name) <= 250:
            raise OptionError(f"the name of a note must have 1 to 250 printable ASCII characters, not {name!r:.80}")


def check_pause(paused: bool, reason: str) -> None:
    if not isinstance(paused, bool):
        raise OptionError(f"paused must be True or False, not {paused!r:.40}")
    if not isinstance(reason, str) or len(reason) > MAX_REASON or not reason.isprintable():
        raise OptionError(f"reason must have at most {MAX_REASON} printable characters, not {reason!r:.80}")


def to_states(states: Collection[jobs.State | str]) -> set[jobs.State]:
    if isinstance(states, str):
        raise OptionError(f"states must be a list of states, not {states!r:.40}")
    return {to_state(state) for state in states}


def to_state(state: jobs.State | str) -> jobs.State:
    try:
        return jobs.State(state)
    except ValueError:
        raise OptionError(f"{state!r:.40} is not a state: use one of {', '.join(jobs.State)}") from None


def check_topics(topics: Sequence[Topic]) -> None:
    _check_values("topic", topics)
    for topic in topics:
        check_queue(topic.queue)
        if topic.id is not None:
            check_id(topic.id, _extra(topic.queue))


def _check_batch(
    what: str, check: Callable[[str, BatchItem, int], int], queue: str, items: Sequence[BatchItem], max_bytes: int
) -> None:
    """Check the items of one call, and that they fit into it. `check` returns the size of an item in bytes."""
    check_queue(queue)
    _check_values(what, items)
    extra = _extra(queue)
    total = 0
    for item in items:
        check_id(item.id, extra)
        total += check(queue, item, max_bytes)
    if total > MAX_CALL_BYTES and len(items) > 1:
        raise OptionError(f"{total} bytes in one call, at most {MAX_CALL_BYTES} are allowed: split the list")


def _check_request(queue: str, request: jobs.Request, max_bytes: int) -> int:
    work = request.work
    if request.run_at is not None and request.delay_ms is not None:
        raise OptionError(f"job {request.id!r:.80} has both delay_ms and run_at: pass only one")
    if work.payload is None and (request.update is None or request.update.payload):
        raise OptionError(f"job {request.id!r:.80} has no payload: pass one, or Update(payload=False)")
    return _check_work("payload", request.id, work, max_bytes)


def _check_lease_ref(queue: str, lease: jobs.LeaseRef, max_bytes: int) -> int:
    return _check_size("progress", lease.progress, max_bytes, lease.id)


def _check_settlement(queue: str, item: jobs.Settlement, max_bytes: int) -> int:
    match item:
        case jobs.Complete():
            return _check_size("result", item.result, max_bytes, item.id)
        case jobs.Fail():
            size = _check_size("error", item.error, max_bytes, item.id)
            return (
                size if item.follow_up is None else size + _check_follow_up(queue, item.id, item.follow_up, max_bytes)
            )
        case jobs.RetrySettlement():
            if item.run_at is not None and item.delay_ms:
                raise OptionError(f"the retry of job {item.id!r:.80} has both delay_ms and run_at: pass only one")
            return _check_size("error", item.error, max_bytes, item.id)
        case jobs.Release():
            return 0


check_requests = partial(_check_batch, "request", _check_request)
check_settlements = partial(_check_batch, "settlement", _check_settlement)
check_leases = partial(_check_batch, "lease", _check_lease_ref)


def encode_cursor(key: tuple[int, ...], id: bytes) -> str:
    """Return a place in an index as text, which a caller passes back for the next page."""
    return ".".join((*map(str, key), id.hex()))


def decode_cursor(cursor: str, places: int) -> tuple[tuple[int, ...], bytes]:
    """Return the place that a cursor names, in an index whose keys have `places` numbers."""
    try:
        *key, id = cursor.split(".")
        place = tuple(map(int, key)), bytes.fromhex(id)
    except (ValueError, AttributeError, TypeError):
        place = (), b""
    if len(place[0]) != places or not place[1] or any(abs(n) >= 2**63 for n in place[0]):
        kind = type(cursor).__name__
        raise OptionError(f"{cursor!r:.80} ({kind}) is not a cursor of this list: pass one that it returned")
    return place


def _check_values(what: str, values: Sequence[jobs.Value]) -> None:
    _check_list(values, f"{what}s")
    try:
        _READERS[what](_encode(values))
    except _WRONG:
        for value in values:
            _check_value(what, value, _KINDS[what])


def _check_value(what: str, value: object, kind: Any) -> None:
    """Raise an error that names the wrong field. `check_id` checks ids, because surrogates cannot be packed."""
    if not isinstance(value, kind):
        raise OptionError(f"{value!r:.80} is not a {what}, it is a {type(value).__name__}")
    for name, hint in get_type_hints(value.__class__, include_extras=True).items():
        field = getattr(value, name)
        if name == "id" and field is not None:
            check_id(field, FOLLOW_UP_ID_BYTES)
        elif isinstance(field, jobs.Value):
            _check_value(f"{what}'s {name}", field, hint)
        else:
            _check_field(what, name, field, hint)


def _check_field(what: str, name: str, field: object, hint: Any) -> None:
    try:
        msgspec.msgpack.decode(_encode(field), type=hint)
    except _WRONG as error:
        refusal = PayloadRejected if hint in (bytes, bytes | None) else OptionError
        kind = type(field).__name__
        raise refusal(f"{name}={field!r:.80} ({kind}) of a {what} is not valid: {error}") from None


def _check_follow_up(queue: str, id: str, work: jobs.Work, max_bytes: int) -> int:
    if queue.endswith(FAILED_SUFFIX):
        raise OptionError(f"{queue} is the queue of a fail handler, whose failures have no follow-up: omit it")
    if work.payload is None:
        raise OptionError(f"the follow-up of job {id!r:.80} has no payload: pass one")
    return _check_work("follow-up payload", id, work, max_bytes)


def _check_work(what: str, id: str, work: jobs.Work, max_bytes: int) -> int:
    payload = work.payload
    if type(payload) is bytes and len(payload) <= max_bytes:  # Most jobs: this saves a call.
        size = len(payload)
    else:
        size = _check_size(what, payload, max_bytes, id)
    return size + _check_extension(work.extension, id) if work.extension else size


def _check_extension(entries: Extension, id: str) -> int:
    """Return the packed size. A caller may set only tags of the work: the other tags belong to the record."""
    if not ascends(entries, FIRST_WORK_TAG, LAST_TAG):
        tags = ", ".join(str(tag) for tag, _ in entries[:10])
        raise OptionError(
            f"the extension of job {id!r:.80} has the tags {tags}:"
            f" use each tag from {FIRST_WORK_TAG} to {LAST_TAG} at most once, in ascending order"
        )
    size = extension_size(entries)
    if size > MAX_EXTENSION_BYTES:
        raise OptionError(
            f"the extension of job {id!r:.80} has {size} bytes, at most {MAX_EXTENSION_BYTES} are allowed:"
            " put large values into the payload"
        )
    return size


def _check_size(what: str, value: bytes | None, max_bytes: int, id: str) -> int:
    if value is None:
        return 0
    if not isinstance(value, bytes):
        raise PayloadRejected(f"the {what} of job {id!r:.80} must be bytes, not {type(value).__name__}")
    size = len(value)
    if size > max_bytes:
        raise PayloadRejected(
            f"the {what} of job {id!r:.80} has {size} bytes, at most {max_bytes} are allowed:"
            " store it elsewhere and pass a reference, or raise max_payload"
        )
    return size


def _check_list(items: Sequence[object], what: str) -> None:
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        raise OptionError(f"{what} must be a list, not {items!r:.80}")
    if len(items) > MAX_ITEMS:
        raise OptionError(f"{len(items)} items in one call, at most {MAX_ITEMS} are allowed: split the list")


def _extra(queue: str) -> int:
    return FOLLOW_UP_ID_BYTES if queue.endswith(FAILED_SUFFIX) else 0
