"""The transitions of a job as data: a docs page is generated from them, and tests compare the lifecycle with them."""

from __future__ import annotations

from enum import StrEnum

from holdfast._core.jobs import Job, State
from holdfast._core.lifecycle import forgotten


class Phase(StrEnum):
    """The state of a record together with the requests to its run and the age of its outcome."""

    NONE = "none"
    WAITING = "waiting"
    RUNNING = "running"
    DEFERRED = "deferred"
    CANCELLING = "cancelling"
    CANCELLING_DEFERRED = "cancelling and deferred"
    COMPLETED = "completed"
    STALE = "completed, past dedup_ttl"
    FAILED = "failed"
    REMEMBERED = "failed and remembered"
    CANCELLED = "cancelled"


class Act(StrEnum):
    """What can be done to a record."""

    KEEP = "enqueue keep"
    UPDATE = "enqueue update"
    CLAIM = "claim"
    COMPLETE = "complete"
    FAIL = "fail"
    RETRY = "retry"
    RELEASE = "release"
    EXPIRE = "lease expired"
    CANCEL = "cancel"
    FORGET = "forget"


def _transitions() -> dict[Phase, dict[Act, tuple[Phase, ...]]]:
    p, a = Phase, Act
    run_again = {a.RETRY: (p.WAITING,), a.RELEASE: (p.WAITING,), a.EXPIRE: (p.WAITING,)}
    stop = dict.fromkeys((a.FAIL, a.RETRY, a.RELEASE, a.EXPIRE), (p.CANCELLED,))
    promote = dict.fromkeys((a.COMPLETE, a.FAIL, a.RETRY, a.RELEASE, a.EXPIRE), (p.WAITING,))
    restart: dict[Act, tuple[Phase, ...]] = {a.KEEP: (p.WAITING,), a.UPDATE: (p.WAITING,)}
    return {
        p.NONE: restart,
        p.WAITING: {a.KEEP: (p.WAITING,), a.UPDATE: (p.WAITING,), a.CLAIM: (p.RUNNING,), a.CANCEL: (p.CANCELLED,)},
        p.RUNNING: {
            a.KEEP: (p.RUNNING,),
            a.UPDATE: (p.DEFERRED,),
            a.CANCEL: (p.CANCELLING,),
            a.COMPLETE: (p.COMPLETED, p.NONE),
            a.FAIL: (p.FAILED, p.REMEMBERED),
            **run_again,
        },
        p.DEFERRED: {a.KEEP: (p.DEFERRED,), a.UPDATE: (p.DEFERRED,), a.CANCEL: (p.CANCELLING,), **promote},
        p.CANCELLING: {
            a.KEEP: (p.CANCELLING,),
            a.UPDATE: (p.CANCELLING_DEFERRED,),
            a.CANCEL: (p.CANCELLING,),
            a.COMPLETE: (p.COMPLETED, p.NONE),
            **stop,
        },
        p.CANCELLING_DEFERRED: {
            a.KEEP: (p.CANCELLING_DEFERRED,),
            a.UPDATE: (p.CANCELLING_DEFERRED,),
            a.CANCEL: (p.CANCELLING,),
            **promote,
        },
        p.COMPLETED: {a.KEEP: (p.COMPLETED,), a.UPDATE: (p.WAITING,), a.CANCEL: (p.COMPLETED,), a.FORGET: (p.NONE,)},
        p.STALE: {**restart, a.CANCEL: (p.STALE,), a.FORGET: (p.NONE,)},
        p.FAILED: {**restart, a.CANCEL: (p.FAILED,), a.FORGET: (p.NONE,)},
        p.REMEMBERED: {a.KEEP: (p.REMEMBERED,), a.UPDATE: (p.WAITING,), a.CANCEL: (p.REMEMBERED,), a.FORGET: (p.NONE,)},
        p.CANCELLED: {**restart, a.CANCEL: (p.CANCELLED,), a.FORGET: (p.NONE,)},
    }


TRANSITIONS = _transitions()
"""phase → act → the phases it may lead to. An act that is not listed does not apply: a settlement is refused, a cancel
finds nothing, a claim or a sweep does not see the record."""


def phase_of(job: Job | None, now: int) -> Phase:
    """Where a record stands in the table."""
    if job is None or forgotten(job, now):
        return Phase.NONE
    if job.outcome is not None:
        if job.outcome.state is State.COMPLETED and job.outcome.dedup_at <= now:
            return Phase.STALE
        if job.outcome.state is State.FAILED and job.outcome.dedup_at > now:
            return Phase.REMEMBERED
        return Phase(job.outcome.state)
    if job.run is None:
        return Phase.WAITING
    if job.run.cancel_asked:
        return Phase.CANCELLING if job.run.next is None else Phase.CANCELLING_DEFERRED
    return Phase.RUNNING if job.run.next is None else Phase.DEFERRED
