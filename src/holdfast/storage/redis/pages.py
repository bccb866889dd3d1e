"""Reading: records as jobs, and pages of indexes, entries with the records that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast._core import lifecycle
from holdfast._core.jobs import Job, State
from holdfast.errors import OptionError
from holdfast.storage.local.table import Place, SortKey
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.codec import UNREADABLE, arrival_of, decode_job, decode_run, waiting_member
from holdfast.storage.validation import clean_id


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
    def key(self) -> SortKey:
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


def job_or_damaged(id: bytes, raw: bytes | None, run: bytes | None, now: int) -> Job | None:
    """A record as a job; a record that cannot be read, as a damaged one."""
    if raw is None:
        return None
    try:
        return decode_job(id, raw, None if run is None else decode_run(run))
    except UNREADABLE:
        return lifecycle.damaged(clean_id(id), None, now)


def indexes_of(states: Sequence[State], start: Place | None) -> list[str]:
    """The indexes of these states, in order; of waiting ones from the priority on that a place is in."""
    indexes: list[str] = []
    for at, state in enumerate(states):
        if state is State.WAITING:
            first = 9 if at or start is None else -start[0][0]
            if not 0 <= first <= 9 or (start is not None and not 0 <= start[0][2] < 2**63):
                raise OptionError(f"a cursor of waiting jobs has no place {start!r:.80}")
            indexes += [f":w{priority}" for priority in range(first, -1, -1)]
        else:
            indexes.append(f":{state}")
    return indexes


def score_and_member(place: Place | None) -> tuple[int, bytes] | None:
    """The score and the member that a place has in its index."""
    if place is None:
        return None
    key, id = place
    return (key[1], waiting_member(key[2], id)) if len(key) == 3 else (key[0], id)
