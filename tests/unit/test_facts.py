"""How storages keep the facts of workers."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from holdfast._core.replies import WorkerInfo, workers_by_queue
from holdfast.storage.validation import MOST_UNPACKED_BYTES, PACKED_BYTES, pack_facts, unpack_facts


@pytest.mark.parametrize("count", [0, 1, 10_000])
def test_facts_are_kept_whole_and_long_ones_in_few_bytes(count: int) -> None:
    facts = msgspec.msgpack.encode({"queues": [f"shop.tasks.reports.daily_{n}" for n in range(count)]})
    assert unpack_facts(pack_facts(facts)) == facts
    assert len(pack_facts(facts)) <= max(PACKED_BYTES, len(facts) / 4)


@pytest.mark.parametrize("data", [b"x", b"x\x01nothing", pack_facts(b"y" * 10_000)[:9] + b"!!!!"])
def test_damaged_facts_raise_or_end_early(data: bytes) -> None:
    try:
        assert len(unpack_facts(data)) < 10_000
    except ValueError:
        pass


def test_facts_that_would_fill_the_memory_are_cut() -> None:
    assert len(unpack_facts(zlib.compress(bytes(2 * MOST_UNPACKED_BYTES), 1))) == MOST_UNPACKED_BYTES


def test_workers_are_found_by_queue() -> None:
    workers = [
        WorkerInfo("one", {"queues": ["a", "b"]}, 0, 0, False),
        WorkerInfo("two", {"queues": ["b"]}, 0, 0, False),
    ]
    odd = [WorkerInfo("odd", {"queues": 5}, 0, 0, False), WorkerInfo("none", {}, 0, 0, False)]
    assert workers_by_queue([*workers, *odd]) == {"a": ["one"], "b": ["one", "two"]}
