"""What the audit looks at, and how a repair mends it. Records are believed first, then indexes, then counts."""

from __future__ import annotations

from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.events import ENDS, STARTS, EventKind
from holdfast._core.extension import FIRST_WORK_TAG, LAST_TAG, ascends, split_extension
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
        mended = replace(job, run=None)
        return Problem("both", queue, found.id, "the record has a lease and an outcome"), mended
    sorted_job = _with_sorted_extension(job)
    if sorted_job is not job:
        return Problem("extension", queue, found.id, "an entry of the extension is at the wrong place"), sorted_job
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


def _with_sorted_extension(job: Job) -> Job:
    """Return the job itself if the tags of its extensions ascend, and are those of the record or of the work; else with
    each entry at its place. An entry of the record has no place in `next`, which is not a generation yet."""
    run, following = job.run, None if job.run is None else job.run.next
    if run is not None and following is not None and not ascends(following.work.extension, FIRST_WORK_TAG, LAST_TAG):
        work = replace(following.work, extension=split_extension(following.work.extension)[1])
        job = replace(job, run=replace(run, next=replace(following, work=work)))
    if ascends(job.extension, 1, FIRST_WORK_TAG - 1) and ascends(job.work.extension, FIRST_WORK_TAG, LAST_TAG):
        return job
    of_job, of_work = split_extension((*job.extension, *job.work.extension))
    return replace(job, work=replace(job.work, extension=of_work), extension=of_job)


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
