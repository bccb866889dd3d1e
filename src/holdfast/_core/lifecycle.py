"""The life of a job, as pure functions over its record. No I/O, no clock, no randomness: all are passed in.

A function takes a record (None if there is none) and returns a `Step`. tools/transitions.py has all transitions as a
table, with which tests compare every function. Memory and SQLite run these functions; lifecycle.lua mirrors them.

`Work.extension` follows the same rules as the payload, but a completed record keeps it. `Job.extension` lasts as long
as the generation: a restart, a promotion, an update and a merge clear it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

from msgspec.structs import replace

from holdfast._core import jobs
from holdfast._core.clock import QueueTime
from holdfast._core.events import EventKind
from holdfast._core.jobs import Job, Next, Outcome, Request, Settlement, State, Work
from holdfast._core.replies import CancelResult, Enqueued, KeepResult, Placed

RESULT_TTL_MS = 3_600_000
"""Default time for which an outcome with a result or a chosen id is remembered."""
CANCELLED_TTL_MS = 60_000
"""Minimum time for which a cancelled record is remembered."""
WAITED_MS = 10_000
"""Minimum time an outcome with a waiter is kept after the job ended."""
MAX_BRIEF = 100_000
"""The most brief outcomes that a queue keeps: a settle forgets as many of the oldest as it may add."""
FAILURE_TTL_MS = 7 * 24 * 3_600_000
"""How long a damaged record is listed as failed and can be retried."""
MAX_STALL_DELAY_MS = 300_000
"""Maximum delay of a job that stalls repeatedly."""
DAMAGED = b'{"type":"RecordDamaged","message":"the stored record could not be read","kind":"permanent"}'
"""Error of a record that cannot be decoded. It reads as failed; an operator may retry it if its payload is left."""


class Step(jobs.Value, frozen=True):
    """The record after a transition (None if it is deleted), and the kinds of events."""

    job: Job | None
    kinds: tuple[EventKind, ...] = ()


Enqueueing = tuple[Step, Enqueued]
_Due = tuple[int, int, int]
"""When a request is due: `run_at`, `arrival` and `wall_at` as in `Job`."""


def forgotten(job: Job, now: int) -> bool:
    """Return whether a record is past its forget time. No verb sees it then, even before a sweep deletes it."""
    return job.outcome is not None and job.outcome.forget_at <= now


def tidy(job: Job, now: int) -> Job:
    """Drop a previous outcome that is past its forget time. Every write does this first."""
    if job.previous is not None and job.previous.forget_at <= now:
        return replace(job, previous=None)
    return job


# Requests


def enqueue(job: Job | None, request: Request, time: QueueTime) -> Enqueueing:
    now = time.last_at
    stamp = time.stamp()
    if job is not None and forgotten(job, now):
        job = None
    if job is None:
        if request.work.payload is None:
            return Step(None), Enqueued(request.id, None)
        return _start(None, request, request.work, time, stamp)
    update = request.update
    if job.outcome is not None:
        return _enqueue_on_finished(job, job.outcome, request, time, stamp)
    if update is None or request.work.payload is None:
        waited_for = _waited_for(job, request, now)
        return Step(waited_for), Enqueued(job.id, Placed.DUPLICATE, job.generation, job.state)
    if job.run is None:
        return _update_waiting(job, request, update, time, stamp)
    return _update_running(job, job.run, request, update, time, stamp)


def _enqueue_on_finished(job: Job, outcome: Outcome, request: Request, time: QueueTime, stamp: int) -> Enqueueing:
    if request.update is None and time.last_at < outcome.dedup_at:
        placed = Placed.FAILED if outcome.state is State.FAILED else Placed.COMPLETED
        return Step(job), Enqueued(job.id, placed, outcome.generation, outcome.state, outcome)
    takes_stored = request.update is not None and not request.update.payload and job.work.payload is not None
    work = job.work if takes_stored else request.work
    if work.payload is None:
        return Step(job), Enqueued(job.id, None, state=outcome.state)
    return _start(job, request, work, time, stamp)


def _start(job: Job | None, request: Request, work: Work, time: QueueTime, stamp: int) -> Enqueueing:
    started = new_generation(job, request, work, time, stamp)
    reply = Enqueued(started.id, Placed.NEW, stamp, None if job is None else job.state)
    return Step(started, (EventKind.ENQUEUED,)), reply


def new_generation(job: Job | None, request: Request, work: Work, time: QueueTime, stamp: int) -> Job:
    """Return the record of a new generation, for a new id (`job` is None) or a finished job."""
    run_at, arrival, wall_at = _due(request, time, stamp)
    started = Job(request.id, work, stamp, run_at, arrival, wall_at, request.custom_id)
    if job is not None:
        started = replace(started, previous=job.outcome, keep_until_at=job.keep_until_at)
    return _waited_for(started, request, time.last_at) if request.keep_ms else started


def _update_waiting(job: Job, request: Request, update: jobs.Update, time: QueueTime, stamp: int) -> Enqueueing:
    due = _choose(update.run_at, _due_of(job), _due(request, time, stamp), time)
    work = request.work if update.payload else job.work
    job = _regenerate(_waited_for(job, request, time.last_at), stamp, work, due, update.resets_counts)
    return Step(job, (EventKind.UPDATED,)), Enqueued(job.id, Placed.UPDATED, stamp, State.WAITING)


def _update_running(
    job: Job, run: jobs.StoredLease, request: Request, update: jobs.Update, time: QueueTime, stamp: int
) -> Enqueueing:
    """Set or update `next`. It has a full request; its fields `takes_…` and `resets_counts` are rules for a merge."""
    due, old = _due(request, time, stamp), run.next
    if old is not None:
        due = _choose(update.run_at, _due_of(old), due, time)
    run_at, arrival, wall_at = due
    following = Next(
        generation=stamp,
        work=request.work if old is None or update.payload else old.work,
        run_at=run_at,
        arrival=arrival,
        wall_at=wall_at,
        takes_payload=update.payload or (old is not None and old.takes_payload),
        takes_run_at=True if old is not None and old.takes_run_at is True else update.run_at,
        resets_counts=update.resets_counts or (old is not None and old.resets_counts),
    )
    job = replace(_waited_for(job, request, time.last_at), run=replace(run, next=following))
    return Step(job, (EventKind.DEFERRED,)), Enqueued(job.id, Placed.DEFERRED, stamp, State.RUNNING)


def _due(request: Request, time: QueueTime, stamp: int) -> _Due:
    if request.run_at is not None:
        return request.run_at + time.skew, stamp, request.run_at
    return time.last_at + 1000 * (request.delay_ms or 0), stamp, 0


def _due_of(job: Job | Next) -> _Due:
    return job.run_at, job.arrival, job.wall_at


def _choose(rule: bool | Literal["if_later", "if_earlier"], old: _Due, new: _Due, time: QueueTime) -> _Due:
    """Choose one of two times by a rule, after both were moved to the corrected clock."""
    (old_at, *_), (new_at, *_) = old, new = _as_placed(old, time), _as_placed(new, time)
    takes_new = new_at > old_at if rule == "if_later" else new_at < old_at if rule == "if_earlier" else rule
    return new if takes_new else old


def _as_placed(due: _Due, time: QueueTime) -> _Due:
    run_at, arrival, wall_at = due
    return time.place(run_at, wall_at, arrival), arrival, wall_at


def _waited_for(job: Job, request: Request, now: int) -> Job:
    until = now + 1000 * request.keep_ms
    return replace(job, keep_until_at=until) if request.keep_ms and until > job.keep_until_at else job


def _regenerate(job: Job, generation: int, work: Work, due: _Due, resets_counts: bool) -> Job:
    """Give a waiting job the generation of another request. The extension of the record ends with its generation."""
    if resets_counts:
        job = replace(job, retries=0, stalls=0, timeouts=0, error=None)
    run_at, arrival, wall_at = due
    job = replace(job, work=work, generation=generation, extension=())
    return replace(job, run_at=run_at, arrival=arrival, wall_at=wall_at)


def cancel(job: Job | None, now: int) -> tuple[Step, CancelResult]:
    """Cancel a waiting job, or ask the worker of a running one to stop it. Drops the request in `next`."""
    if job is None or forgotten(job, now):
        return Step(job), CancelResult.MISSING
    if job.outcome is not None:
        return Step(job), CancelResult.FINISHED
    if job.run is None:
        return _end(job, _cancelled(job, now), EventKind.CANCELLED, now), CancelResult.CANCELLED
    if job.run.cancel_asked and job.run.next is None:
        return Step(job), CancelResult.ASKED
    asked = replace(job, run=replace(job.run, cancel_asked=True, next=None))
    return Step(asked, (EventKind.CANCEL_ASKED,)), CancelResult.ASKED


def keep(job: Job | None, ttl_ms: int, at_least: bool, now: int) -> tuple[Step, KeepResult]:
    """Change how long an outcome is remembered. `at_least` is for waiters: it never shortens the time."""
    if job is None or forgotten(job, now):
        return Step(job), KeepResult.MISSING
    until = now + 1000 * ttl_ms
    if job.outcome is None:
        waited = replace(job, keep_until_at=max(job.keep_until_at, until))
        return Step(waited if at_least else replace(job, keep_ms=ttl_ms)), KeepResult.LIVE
    if at_least:
        outcome = replace(job.outcome, forget_at=max(job.outcome.forget_at, until), brief=False)
    else:
        dedup_at = until if job.outcome.state is State.COMPLETED or job.outcome.dedup_at else 0
        outcome = replace(job.outcome, forget_at=max(until, job.keep_until_at), dedup_at=dedup_at, brief=False)
    return Step(replace(job, outcome=outcome)), KeepResult.KEPT


def prioritize(job: Job | None, priority: int) -> tuple[Step, bool]:
    """Change the priority of a live job, and of the request in `next`. A running job has it when it waits again."""
    if job is None or job.outcome is not None:
        return Step(job), False
    run = job.run
    if run is not None and run.next is not None:
        following = replace(run.next, work=replace(run.next.work, priority=priority))
        job = replace(job, run=replace(run, next=following))
    return Step(replace(job, work=replace(job.work, priority=priority))), True


# Runs


def claim(job: Job, worker: str, lease_ms: int, time: QueueTime) -> Step:
    """Start a run of a waiting job that is due: a lease with a new fence."""
    run = jobs.StoredLease(worker, time.stamp(), lease_ms, time.last_at + 1000 * lease_ms)
    return Step(replace(job, run=run, attempts=job.attempts + 1), (EventKind.CLAIMED,))


def follow_clock(job: Job, time: QueueTime) -> Job:
    """Move the absolute `run_at` of a job to the corrected clock. Usually this changes nothing."""
    run_at = time.place(job.run_at, job.wall_at, job.arrival)
    return job if run_at == job.run_at else replace(job, run_at=run_at)


def holds(job: Job | None, worker: str, fence: int) -> bool:
    """Return whether this is the current lease of the job. Only the fence decides, also past the deadline."""
    return job is not None and job.run is not None and job.run.fence == fence and job.run.worker == worker


def extend(job: Job, lease: jobs.LeaseRef, lease_ms: int, now: int) -> Job:
    """Extend a lease. Call this only if the worker `holds` the lease."""
    assert job.run is not None
    progress = job.run.progress if lease.progress is None else lease.progress
    until = now + 1000 * lease_ms
    return replace(job, run=replace(job.run, lease_ms=lease_ms, until_at=until, overdue=False, progress=progress))


def settle(job: Job, settlement: Settlement, time: QueueTime) -> Step:
    """End a lease. Call this only if the worker `holds` the lease."""
    run = job.run
    assert run is not None
    now = time.last_at
    if run.cancel_asked and not isinstance(settlement, jobs.Complete):
        return _end(job, _cancelled(job, now), EventKind.CANCELLED, now)
    match settlement:
        case jobs.Complete():
            return _end(job, _completed(job, run, settlement, now), EventKind.COMPLETED, now)
        case jobs.Fail():
            outcome = _failed(job, settlement, now)
            counts = settlement.counts
            counted = job if counts is None else replace(job, **{counts: getattr(job, counts) + 1})
            return _end(counted, outcome, EventKind.FAILED, now)
        case jobs.RetrySettlement():
            return _again(job, run, _counted(job, settlement, time), RETRY_KINDS[settlement.counts], time)
        case jobs.Release():
            return _again(job, run, job, EventKind.RELEASED, time)


RETRY_KINDS = {"retries": EventKind.RETRIED, "stalls": EventKind.STALLED, "timeouts": EventKind.TIMED_OUT}
"""Kind of event by the counter that a retry raises."""


def expire(job: Job, time: QueueTime) -> Step:
    """Mark a lease past its deadline as overdue; take the job back if it was marked before. After an outage all leases
    look expired, so a live worker gets another half of its lease to extend it."""
    run = job.run
    assert run is not None
    if not run.overdue:
        return Step(replace(job, run=replace(run, overdue=True, until_at=time.last_at + 500 * run.lease_ms)))
    return take_back(job, time)


def take_back(job: Job, time: QueueTime) -> Step:
    """End a run as stalled. The job keeps its place in front, but from its second stall on it is delayed: a sweep knows
    no policy, and a job that kills its workers must not kill all of them in a row."""
    run = job.run
    assert run is not None
    if run.cancel_asked:
        return _end(job, _cancelled(job, time.last_at), EventKind.CANCELLED, time.last_at)
    back = replace(job, stalls=job.stalls + 1)
    if back.stalls >= 2:
        delay_ms = min(run.lease_ms * 2 ** min(back.stalls - 2, 30), MAX_STALL_DELAY_MS)
        back = replace(back, run_at=time.last_at + 1000 * delay_ms, arrival=time.stamp(), wall_at=0)
    return _again(job, run, back, EventKind.STALLED, time)


def _counted(job: Job, retry: jobs.RetrySettlement, time: QueueTime) -> Job:
    """Apply the counts and the delay of a retry. A stall without a delay keeps the job's place in front."""
    counted = replace(job, error=retry.error, **{retry.counts: getattr(job, retry.counts) + 1})
    if retry.counts == "stalls" and retry.run_at is None and retry.delay_ms == 0:
        return counted
    counted = replace(counted, arrival=time.stamp())
    if retry.run_at is not None:
        return replace(counted, run_at=retry.run_at + time.skew, wall_at=retry.run_at)
    return replace(counted, run_at=time.last_at + 1000 * retry.delay_ms, wall_at=0)


def _again(job: Job, run: jobs.StoredLease, back: Job, kind: EventKind, time: QueueTime) -> Step:
    """Make a job wait again, with the settlement applied. Merges the request in `next` by its rules."""
    back = replace(back, run=None)
    following = run.next
    if following is None:
        return Step(back, (kind,))
    due = _choose(following.takes_run_at, _due_of(back), _due_of(following), time)
    work = following.work if following.takes_payload else job.work
    return Step(_regenerate(back, following.generation, work, due, following.resets_counts), (kind,))


def _end(job: Job, outcome: Outcome, kind: EventKind, now: int) -> Step:
    """End the generation. Promote the request in `next`; without one, remember the outcome until `forget_at`."""
    following = None if job.run is None else job.run.next
    remembered = outcome.forget_at > now
    if following is not None:
        promoted = Job(
            id=job.id,
            work=following.work,
            generation=following.generation,
            run_at=following.run_at,
            arrival=following.arrival,
            wall_at=following.wall_at,
            custom_id=job.custom_id,
            previous=outcome if remembered else job.previous,
            keep_until_at=job.keep_until_at,
        )
        return Step(promoted, (kind, EventKind.PROMOTED))
    if not remembered:
        return Step(None, (kind,))
    work = replace(job.work, payload=None) if outcome.state is State.COMPLETED else job.work
    return Step(replace(job, work=work, run=None, outcome=outcome, error=None, keep_ms=None), (kind,))


def _completed(job: Job, run: jobs.StoredLease, settlement: jobs.Complete, now: int) -> Outcome:
    dedup_at = now + 1000 * (settlement.dedup_ttl_ms if job.keep_ms is None else job.keep_ms)
    return Outcome(
        job.generation,
        State.COMPLETED,
        now,
        max(_forget_at(job, settlement.result_ttl_ms, now), dedup_at),
        dedup_at,
        settlement.result,
        settlement.codec,
        started_at=run.fence,
        worker=run.worker,
        brief=settlement.brief and job.keep_ms is None and not job.keep_until_at,
    )


def _failed(job: Job, settlement: jobs.Fail, now: int) -> Outcome:
    forget_at, dedup_at = _forget_at(job, settlement.failure_ttl_ms, now), 0
    if settlement.dedup_ttl_ms:
        dedup_at = now + 1000 * (settlement.dedup_ttl_ms if job.keep_ms is None else job.keep_ms)
    return _outcome_of(job, State.FAILED, now, max(forget_at, dedup_at), dedup_at=dedup_at, error=settlement.error)


def _cancelled(job: Job, now: int) -> Outcome:
    ttl_ms = RESULT_TTL_MS if job.work.result_ttl_ms is None else job.work.result_ttl_ms
    return _outcome_of(job, State.CANCELLED, now, _forget_at(job, max(ttl_ms, CANCELLED_TTL_MS), now))


def _outcome_of(job: Job, state: State, now: int, forget_at: int, **fields: Any) -> Outcome:
    run = job.run
    started_at, worker = (0, "") if run is None else (run.fence, run.worker)
    return Outcome(job.generation, state, now, forget_at, **fields, started_at=started_at, worker=worker)


def _forget_at(job: Job, ttl_ms: int, now: int) -> int:
    """Return the forget time. With a waiter it is at least `WAITED_MS` from now, also if the clock has jumped ahead."""
    until = now + 1000 * (ttl_ms if job.keep_ms is None else job.keep_ms)
    return max(until, job.keep_until_at, now + 1000 * WAITED_MS) if job.keep_until_at else until


def damaged(id: str, payload: bytes | None, now: int) -> Job:
    """Return the record to use for one that cannot be decoded: failed, with its payload if that is left."""
    outcome = Outcome(now, State.FAILED, now, now + 1000 * FAILURE_TTL_MS, error=DAMAGED)
    return Job(id, Work(payload), now, now, now, outcome=outcome)


# Waiting


class Answer(Enum):
    """The answer of a record to a waiter if it is not an outcome."""

    PENDING = "a live request will answer"
    DROPPED = "a cancel dropped the request"
    FORGOTTEN = "there is no record"


def answer(job: Job | None, generation: int) -> Outcome | Answer:
    """Return the answer of a record to a waiter for `generation`: the oldest outcome of this generation or a later one;
    else PENDING while a live request can still answer."""
    if job is None:
        return Answer.FORGOTTEN
    for outcome in (job.previous, job.outcome):
        if outcome is not None and outcome.generation >= generation:
            return outcome
    return Answer.PENDING if job.outcome is None and newest_generation(job) >= generation else Answer.DROPPED


def newest_generation(job: Job) -> int:
    """Return the generation of the newest request: the one in `next`, or that of the record."""
    return job.generation if job.run is None or job.run.next is None else job.run.next.generation
