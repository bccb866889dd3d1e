"""The stored form of a record's extension."""

from __future__ import annotations

import pytest

from holdfast._core.extension import extension_size, pack_extension, unpack_extension
from holdfast._core.jobs import Fail, Job, Work
from holdfast._worker.settler import PendingSettlement, _size


def test_empty_extension_stores_nothing() -> None:
    assert pack_extension(()) == b""
    assert unpack_extension(b"") == ()


def test_extension_survives_packing() -> None:
    entries = ((1, b""), (7, b"seven"), (128, b"\x00" * 300), (255, b"last"))
    assert unpack_extension(pack_extension(entries)) == entries


def test_entry_is_tag_length_and_value() -> None:
    assert pack_extension(((7, b"ab"),)) == b"\x07\x02\x00\x00\x00ab"


@pytest.mark.parametrize(
    "data",
    [
        b"\x07",
        b"\x07\x02\x00\x00\x00a",
        pack_extension(((7, b"a"),)) * 2,
        pack_extension(((7, b"a"), (6, b"b"))),
        b"\x00\x00\x00\x00\x00",
    ],
)
def test_malformed_extension_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="extension"):
        unpack_extension(data)


def test_the_size_of_a_settlement_includes_the_extension_of_its_follow_up() -> None:
    job = Job("a", Work(b""), 1, 1, 1)
    follow_up = Work(b"12", extension=((200, b"345"),))
    fail = Fail("a", 1, b"6", 1000, follow_up)
    assert _size(PendingSettlement(job, fail)) == len(b"123456") + extension_size(((200, b""),))
