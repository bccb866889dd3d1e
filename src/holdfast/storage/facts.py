"""The facts that workers announce: how a storage keeps them, and which workers serve a queue."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping

from holdfast._core.replies import WorkerInfo

PACKED_BYTES = 4_096
"""Longer facts are compressed: those of a worker of thousands of queues are mostly names that begin alike."""
MOST_BYTES = 16 * 1_048_576
"""Most bytes of facts after decompression."""
_ZLIB = b"\x78"
"""First byte of compressed data. It does not begin the msgpack of a map or a list."""


def pack(data: bytes) -> bytes:
    """Compress encoded facts if they are long."""
    return data if len(data) <= PACKED_BYTES else zlib.compress(data, 1)


def unpack(data: bytes) -> bytes:
    """Undo `pack`. Raises ValueError for data that cannot be decompressed."""
    if data[:1] != _ZLIB:
        return data
    try:
        return zlib.decompressobj().decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error


def workers_by_queue(workers: Iterable[WorkerInfo]) -> Mapping[str, list[str]]:
    """The names of the workers that serve each queue."""
    serving: dict[str, list[str]] = defaultdict(list)
    for worker in workers:
        queues = worker.facts.get("queues")
        for queue in queues if isinstance(queues, list) else ():
            serving[queue].append(worker.worker)
    return serving
