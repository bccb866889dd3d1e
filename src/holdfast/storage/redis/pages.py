"""Pages of indexes: entries with the records that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.jobs import State
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.records import arrival_of
from holdfast.storage.table import Key


class Entry(NamedTuple):
    """An entry of an index, and what is stored of its job."""

    where: str
    """The index: how its key ends."""
    member: bytes
    score: int
    raw: bytes | None
    run: bytes | None

    @property
    def waits(self) -> bool:
        return self.where.startswith(":w")

    @property
    def id(self) -> bytes:
        return self.member[8:] if self.waits else self.member

    @property
    def state(self) -> State:
        return State.WAITING if self.waits else State(self.where[1:])

    @property
    def key(self) -> Key:
        """Where it stands, in the words of `table.index_of`."""
        return (-int(self.where[2:]), self.score, arrival_of(self.member)) if self.waits else (self.score,)


class EntryPage(NamedTuple):
    now: int
    skew: int
    last_stamp: int
    entries: list[Entry]


async def read_page(
    calls: Calls, key: str, indexes: Sequence[str], start: tuple[int, bytes] | None, limit: int
) -> EntryPage:
    """Up to so many entries of these indexes, one after the other, behind a score and member of the first."""
    score, member = ("", b"") if start is None else (str(start[0]), start[1])
    now, skew, last_stamp, flat = await calls.read(key, "page", limit, score, member, *indexes)
    entries = [
        Entry(index.decode(), member, int(float(score)), raw, run)
        for index, member, score, raw, run in zip(*(flat[at::5] for at in range(5)), strict=True)
    ]
    return EntryPage(now, skew, last_stamp, entries)
