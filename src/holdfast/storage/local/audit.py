"""What the audit looks at, and how a repair mends it. Records are believed first, then indexes, then counts."""

from __future__ import annotations

import msgspec

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.events import ENDS, STARTS, EventKind
from holdfast._core.jobs import Job, State
from holdfast._core.replies import Problem
from holdfast.storage.local.table import VIEWS, Found, QueueMeta, Table, index_of, newest_stamp


def examine(queue: str, found: Found, time: QueueTime) -> tuple[Problem | None, Job]:
    """What is wrong with a record, and the record as it should be written. A stamp that the queue has not given out
    is taken into its time."""
    job = found.job
    if job is None:
        mended = lifecycle.damaged(found.id, found.payload, time.last_at)
        return Problem("garbled", queue, found.id, "the record cannot be read"), mended
    if job.run is not None and job.outcome is not None:
        mended = msgspec.structs.replace(job, run=None)
        return Problem("both", queue, found.id, "the record has a lease and an outcome"), mended
    index, key = index_of(job)
    if found.index is None:
        return Problem("unindexed", queue, found.id, f"the record is {index} but in no index"), job
    if (found.index, found.key) != (index, key):
        detail = f"the record belongs at {index} {key} and is at {found.index} {found.key}"
        return Problem("misplaced", queue, found.id, detail), job
    newest = newest_stamp(job)
    if newest > time.last_stamp:
        detail = f"the record has stamp {newest}, the queue has only given out {time.last_stamp}"
        time.last_stamp = newest
        return Problem("stamp", queue, found.id, detail), job
    return None, job


def recount(table: Table, queue: str, ledger: QueueMeta, dry_run: bool) -> list[Problem]:
    """Do the counts match the records, and do the totals add up? Where not, the records are right."""
    problems: list[Problem] = []
    if ledger.rebuilt:
        problems.append(Problem("ledger", queue, "", "it could not be read: totals, pause and skew are lost"))
    actual = table.tally(queue)
    for name in (*State, *VIEWS):
        counted, there = ledger.counts.get(name, 0), actual.get(name, 0)
        if counted != there:
            problems.append(Problem("count", queue, "", f"{name} is counted as {counted}, there are {there}"))
    started = sum(ledger.totals.get(kind, 0) for kind in STARTS)
    ended = sum(ledger.totals.get(kind, 0) for kind in ENDS)
    live = actual.get(State.WAITING, 0) + actual.get(State.RUNNING, 0)
    if started != ended + live:
        problems.append(Problem("total", queue, "", f"{started} were started, {ended} ended and {live} are live"))
    if not dry_run:
        ledger.rebuilt = False
        ledger.counts = actual
        ledger.totals[EventKind.ENQUEUED] = ledger.totals.get(EventKind.ENQUEUED, 0) + ended + live - started
    return problems
