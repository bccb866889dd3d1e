"""The audit of a queue on Redis or Valkey, in pages: every entry of every index must fit its record, every record must
be in an index, and the counts must be those of the records.

A page is read in one step. Counts span pages, so they are compared only if nothing has happened since the first page:
the cursor has them, with the version of the queue at the start.
"""

from __future__ import annotations

import msgspec

from holdfast._core.clock import QueueTime
from holdfast._core.jobs import State
from holdfast._core.replies import Problem, Repaired
from holdfast.errors import OptionError
from holdfast.storage.local.audit import compare_counts, examine, unreadable_meta
from holdfast.storage.local.table import VIEWS, Found, view_of
from holdfast.storage.redis import codec
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.codec import KINDS
from holdfast.storage.redis.raw import Argument
from holdfast.storage.redis.reads import Entry, job_or_none, read_page, read_stats
from holdfast.storage.validation import clean_id

PAGE = 200
MAX_PASSES = 2
"""How often a repair starts again after it has changed something."""
INDEXES = (
    *(f":w{priority}" for priority in range(9, -1, -1)),
    ":running",
    ":completed",
    ":failed",
    ":cancelled",
    ":brief",
)


class _Cursor(msgspec.Struct, array_like=True):
    """How far an audit has come, and what it has counted."""

    index: str = INDEXES[0]
    score: str = ""
    member: bytes = b""
    scanned: str = ""
    """The cursor of the scan of all records, which follows the indexes; empty before."""
    counts: dict[str, int] = {}
    entries: int = 0
    version: int = -1
    """The version of the queue when the counting began. The counts mean nothing if it has changed."""
    found: int = 0
    passes: int = 0
    """How often the counting has started again after a repair of records."""


class Audit:
    """The audit of one queue. `step` checks one page, and repairs it unless this is a dry run."""

    def __init__(self, calls: Calls, queue: str, key: str) -> None:
        self._calls = calls
        self._queue = queue
        self._key = key

    async def step(self, dry_run: bool, cursor: str | None) -> Repaired:
        at = _Cursor() if cursor is None else _read(cursor)
        problems: list[Problem] = []
        mends: list[Argument] = []
        if cursor is None and await self._calls.read(self._key, "rebuild", int(dry_run)):
            problems.append(unreadable_meta(self._queue))
            if dry_run:
                return Repaired(problems, 0, None)
        stats = await read_stats(self._calls, self._key)
        if stats is None:
            return Repaired([], 0, None)
        if at.version < 0:
            at.version = stats.version
        if not at.scanned:
            checked, at_end = await self._entries(at, problems, mends)
            running = stats.sizes[codec.INDEXES.index(State.RUNNING)]
            scans = at_end and (stats.records != at.entries or stats.leases != running)
            at.scanned = "0" if scans else ""
        else:
            checked, at_end = await self._unindexed(at, problems, mends), at.scanned == "0"
            scans = not at_end
        if mends and not dry_run:
            await self._calls.call(self._key, "repair", tuple(mends))
        at.found += len(problems)
        if at.passes:
            checked = 0  # The first pass has counted these records.
        if scans or not at_end:
            return Repaired(problems, checked, msgspec.json.encode(at).hex())
        if at.found and not dry_run and at.passes < MAX_PASSES:
            return Repaired(problems, checked, msgspec.json.encode(_Cursor(passes=at.passes + 1)).hex())
        problems += await self._recount(at, dry_run)
        return Repaired(problems, checked, None)

    async def _entries(self, at: _Cursor, problems: list[Problem], mends: list[Argument]) -> tuple[int, bool]:
        """Check a page of entries. Returns the number of entries, and whether they were the last."""
        indexes = INDEXES[INDEXES.index(at.index) :]
        start = (at.score, at.member) if at.score else None
        time, entries = await read_page(self._calls, self._key, indexes, start, PAGE)
        for entry in entries:
            at.index, at.score, at.member = entry.where, entry.score, entry.member
            at.entries += 1
            problem = self._entry(entry, at.counts, time)
            if problem is not None:
                problems.append(problem)
                if problem.kind in ("index", "misplaced"):
                    mends += ("entry", entry.member, entry.where, "")
                elif problem.kind == "garbled":
                    mends += ("garbled", entry.member, entry.where, (entry.raw or b"") + (entry.run or b""))
                else:
                    mends += ("record", entry.id, "", "")
        return len(entries), len(entries) < PAGE

    def _entry(self, entry: Entry, counts: dict[str, int], time: QueueTime) -> Problem | None:
        id = clean_id(entry.id)
        if entry.raw is None:
            return Problem("index", self._queue, id, f"the index {entry.where} has an entry without a record")
        job = job_or_none(entry.id, entry.raw, entry.run)
        if job is not None:
            for name in (job.state, view_of(job)):
                if name is not None:
                    counts[name] = counts.get(name, 0) + 1
        problem, _ = examine(self._queue, Found(id, job, None, entry.index_name, entry.key), time)
        return problem

    async def _unindexed(self, at: _Cursor, problems: list[Problem], mends: list[Argument]) -> int:
        """Find the records and leases that are in no index: there are more of them than entries. Returns how many."""
        scanned, found = await self._calls.read(self._key, "unindexed", at.scanned)
        for id in found:
            problems.append(Problem("unindexed", self._queue, clean_id(id), "the record is not in its index"))
            mends += ("record", id, "", "")
        at.scanned = scanned.decode()
        return len(found)

    async def _recount(self, at: _Cursor, dry_run: bool) -> list[Problem]:
        """Compare the counts with the records, which are right, and check that the totals add up."""
        stats = await read_stats(self._calls, self._key)
        if stats is None or stats.version != at.version:
            return []
        problems, missing = compare_counts(
            self._queue,
            {"retrying": stats.retrying, "deferred": stats.deferred},
            at.counts,
            dict(zip(KINDS, stats.totals, strict=True)),
        )
        if problems and not dry_run:
            views = [at.counts.get(name, 0) for name in VIEWS]
            await self._calls.call(self._key, "recount", (at.version, *views, missing))
        return problems


def _read(cursor: str) -> _Cursor:
    try:
        return msgspec.json.decode(bytes.fromhex(cursor), type=_Cursor)
    except (ValueError, TypeError, AttributeError, msgspec.DecodeError):
        kind = type(cursor).__name__
        raise OptionError(f"{cursor!r:.80} ({kind}) is not a cursor of an audit: pass that of the last page") from None
