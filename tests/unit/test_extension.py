"""The stored form of a record's extension."""

from __future__ import annotations

import pytest

from holdfast._core.extension import pack_extension, unpack_extension


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
