"""The extension of a record: optional fields, stored as tagged entries behind one flag.

An entry is a tag and its bytes. Tags below `FIRST_WORK_TAG` describe the record and last as long as its generation;
higher tags describe the work, and an update that replaces the payload replaces them. A reader keeps entries whose tag
it does not know. A record without entries stores nothing.

Stored form of an entry: tag (1 byte), length (4 bytes, little-endian), value. Tags ascend.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

import msgspec

Tag = Annotated[int, msgspec.Meta(ge=1, le=255)]
Extension = tuple[tuple[Tag, bytes], ...]

FIRST_WORK_TAG, LAST_TAG = 128, 255
MAX_EXTENSION_BYTES = 65_536

BACKOFF = 128
"""Tag of a work: the delays before its retries, 8 bytes each, in milliseconds."""
EXPIRES_IN, EXPIRES_AT = 129, 130
"""Tags of a work: the time after which it does not start any more, in 8 bytes. It is in milliseconds after the request,
or a wall time in microseconds."""
HEADERS = 131
"""Tag of a work: its headers, as a JSON object of text."""
MAX_HEADERS, MAX_HEADERS_BYTES = 16, 4_096
"""Maximum number of headers of a work, and maximum size of their JSON."""

_HEAD = struct.Struct("<BI")
_read_headers = msgspec.json.Decoder(dict[str, str]).decode


def pack_numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def numbers_in(entries: Extension, tag: int) -> tuple[int, ...]:
    """Return the numbers of an entry, of 8 bytes each; none if there is no such entry. Other bytes at its end, which
    another client has written, do not count."""
    for found, value in entries:
        if found == tag:
            return struct.unpack(f"<{len(value) // 8}Q", value[: len(value) // 8 * 8])
    return ()


def headers_in(entries: Extension) -> dict[str, str]:
    """Return the headers of a work; none if another client has written something else there."""
    for tag, value in entries:
        if tag == HEADERS:
            try:
                return _read_headers(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return {}
    return {}


def only_headers(entries: Extension) -> Extension:
    return tuple(entry for entry in entries if entry[0] == HEADERS) if entries else ()


def extension_size(entries: Extension) -> int:
    return sum(_HEAD.size + len(value) for _, value in entries)


def ascends(entries: Extension, first: int, last: int) -> bool:
    before = first - 1
    for tag, _ in entries:
        if not before < tag <= last:
            return False
        before = tag
    return True


def split_extension(entries: Iterable[tuple[int, bytes]]) -> tuple[Extension, Extension]:
    """Sort entries by tag; return those of the record and those of the work. The first of two with one tag is kept."""
    unique: dict[int, bytes] = {}
    for tag, value in entries:
        unique.setdefault(tag, value)
    ordered = sorted(unique.items())
    return (
        tuple(entry for entry in ordered if entry[0] < FIRST_WORK_TAG),
        tuple(entry for entry in ordered if entry[0] >= FIRST_WORK_TAG),
    )


def pack_extension(entries: Extension) -> bytes:
    return b"".join(part for tag, value in entries for part in (_HEAD.pack(tag, len(value)), value))


def unpack_extension(data: bytes) -> Extension:
    """Decode the stored form. Raises ValueError for other bytes."""
    entries: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        begin = at + _HEAD.size
        tag, length = _HEAD.unpack_from(data, at) if begin <= len(data) else (0, 0)
        at = begin + length
        if at > len(data):
            raise ValueError("an entry of the extension is cut off")
        if tag <= (entries[-1][0] if entries else 0):
            raise ValueError("the tags of an extension do not ascend")
        entries.append((tag, data[begin:at]))
    return tuple(entries)
