"""The audit: which invariants are checked, and how a repair restores them. Indexes are made from records, and counts
from both. Redis and Valkey read their pages in another way and share `examine` and `compare_counts`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.events import ENDS, STARTS, EventKind
from holdfast._core.extension import FIRST_WORK_TAG, LAST_TAG, ascends, split_extension
from holdfast._core.jobs import Job, State
from holdfast._core.replies import Problem, Repaired
from holdfast.storage.local.table import BRIEF, VIEWS, Found, QueueMeta, QueueTransaction, Table, index_of, newest_stamp
from holdfast.storage.validation import decode_cursor, encode_cursor, id_bytes

REPAIR_PAGE = 200


def examine(queue: str, found: Found, time: QueueTime) -> tuple[Problem | None, Job]:
    """Return the problem of a record, if there is one, and the record to write. A stamp that the queue has not issued
    is added to its time."""
    job = found.job
    if job is None:
        repaired = lifecycle.damaged(found.id, found.payload, time.last_at)
        return Problem("garbled", queue, found.id, "the record cannot be read"), repaired
    if job.run is not None and job.outcome is not None:
        repaired = replace(job, run=None)
        return Problem("both", queue, found.id, "the record has a lease and an outcome"), repaired
    sorted_job = _with_sorted_extension(job)
    if sorted_job is not job:
        return Problem("extension", queue, found.id, "an entry of the extension is in the wrong place"), sorted_job
    index, key = index_of(job)
    if found.index is None:
        return Problem("unindexed", queue, found.id, f"the record is {index} but in no index"), job
    if (found.index, found.key) != (index, key):
        detail = f"the record belongs at {index} {key} and is at {found.index} {found.key}"
        return Problem("misplaced", queue, found.id, detail), job
    newest = newest_stamp(job)
    if newest > time.last_stamp:
        detail = f"the record has stamp {newest}, the last stamp of the queue is {time.last_stamp}"
        time.last_stamp = newest
        return Problem("stamp", queue, found.id, detail), job
    return None, job


def unreadable_meta(queue: str) -> Problem:
    """Return the problem of a queue whose metadata `repair` must make from the records before any other check."""
    return Problem("meta", queue, "", "the metadata cannot be read: totals, pause and skew are lost")


def _with_sorted_extension(job: Job) -> Job:
    """Return the job with each extension entry in the record or in the work, by its tag, in ascending order; the same
    object if nothing changes. `next` is not a generation yet, so an entry of the record is dropped there."""
    run, following = job.run, None if job.run is None else job.run.next
    if run is not None and following is not None and not ascends(following.work.extension, FIRST_WORK_TAG, LAST_TAG):
        work = replace(following.work, extension=split_extension(following.work.extension)[1])
        job = replace(job, run=replace(run, next=replace(following, work=work)))
    if ascends(job.extension, 1, FIRST_WORK_TAG - 1) and ascends(job.work.extension, FIRST_WORK_TAG, LAST_TAG):
        return job
    of_job, of_work = split_extension((*job.extension, *job.work.extension))
    return replace(job, work=replace(job.work, extension=of_work), extension=of_job)


def repair_page(transaction: QueueTransaction, dry_run: bool, cursor: str | None) -> Repaired:
    """Check one page of records in the order of their ids, and the counts after the last page; repair what is wrong."""
    table, queue, meta = transaction.table, transaction.queue, transaction.meta
    start = None if cursor is None else decode_cursor(cursor, 0)
    strays = table.check_indexes(queue) if start is None else []
    if strays and not dry_run:
        table.rebuild_indexes(queue)
    found = table.inspect(queue, start, REPAIR_PAGE)
    at_end = len(found) < REPAIR_PAGE
    problems: list[Problem] = []
    for record in found:
        problem, repaired = examine(queue, record, transaction.time)
        if problem is not None:
            problems.append(problem)
            if not dry_run:
                transaction.rewrite(repaired, repaired)
    if not dry_run:
        transaction.close()
    problems += [Problem("index", queue, "", stray) for stray in strays]
    if at_end:
        problems += _recount(table, queue, meta, dry_run)
    if problems and not dry_run:
        meta.time, meta.forget_at = transaction.time, 0  # A record that is in its index again may be due.
        table.write_meta(queue)
    return Repaired(problems, len(found), None if at_end else encode_cursor((), id_bytes(found[-1].id)))


def _recount(table: Table, queue: str, meta: QueueMeta, dry_run: bool) -> list[Problem]:
    actual = table.tally(queue)
    counted = {name: meta.counts.get(name, 0) for name in (*State, BRIEF, *VIEWS)}
    problems, missing = compare_counts(queue, counted, actual, meta.totals)
    if not dry_run:
        meta.counts = actual
        meta.totals[EventKind.ENQUEUED] = meta.totals.get(EventKind.ENQUEUED, 0) + missing
    return problems


def compare_counts(
    queue: str, counted: Mapping[str, int], actual: Mapping[str, int], totals: Mapping[str, int]
) -> tuple[list[Problem], int]:
    """Compare the counts of a queue with its records, which are right where the two differ, and check that the totals
    add up. Return the problems, and the number by which the total of enqueued jobs is too low."""
    problems: list[Problem] = []
    for name, number in counted.items():
        found = actual.get(name, 0)
        if number != found:
            problems.append(Problem("count", queue, "", f"{name} is counted as {number}, there are {found}"))
    started = sum(totals.get(kind, 0) for kind in STARTS)
    ended = sum(totals.get(kind, 0) for kind in ENDS)
    live = actual.get(State.WAITING, 0) + actual.get(State.RUNNING, 0)
    if started != ended + live:
        problems.append(Problem("total", queue, "", f"{started} jobs started, {ended} ended and {live} are live"))
    return problems, ended + live - started
