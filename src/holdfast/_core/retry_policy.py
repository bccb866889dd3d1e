"""How a run is settled: limits, backoff, permanent or not, fail handler or not. Pure: no I/O, no clock, and the random
generator is an argument. The storage obeys what is decided here.

`admit` judges a job that was claimed, `verdict` a run that ended.
"""

from __future__ import annotations

import math
import random
from typing import Literal

import msgspec

from holdfast._core.failure import MAX_MESSAGE, decode_error, encode_error, follow_up
from holdfast._core.jobs import Complete, Fail, Job, Release, RetrySettlement, Settlement, Value
from holdfast._core.text import format_times
from holdfast.errors import ErrorKind, JobError


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one handler are run. A job's own limits go before these; None is no limit."""

    timeout_ms: int | None = 60_000
    max_retries: int | None = 10
    max_stalls: int | None = 3
    max_timeouts: int | None = 3
    min_backoff_ms: int = 2_000
    max_backoff_ms: int = 300_000
    result_ttl_ms: int = 3_600_000
    dedup_ttl_ms: int | None = None
    """None is as long as the result."""
    failure_ttl_ms: int = 7 * 86_400_000
    cancel_grace_ms: int = 1_000
    at_most_once: bool = False
    exclusive: bool = False
    """No second run of an id may begin before the first has certainly ended."""
    dies_with_storage: bool = False
    """A run ends before its lease can have passed on."""
    follows_up: bool = False
    """There is a fail handler."""


TASK = Policy()
FAIL_HANDLER = Policy(max_retries=100, min_backoff_ms=10_000, max_backoff_ms=900_000)
PULL = Policy(timeout_ms=None, max_retries=None, max_stalls=None, max_timeouts=None, min_backoff_ms=0)
"""A pull queue has no limits unless it is given some."""


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one queue are run: what a worker must know of a handler, and all that it knows of one in another
    process."""

    queue: str
    policy: Policy
    size: int = 10
    concurrency: int | None = None
    queue_priority: int = 100


StopReason = Literal["cancel", "timeout", "shutdown", "lease_lost"]


class Returned(Value, frozen=True, tag="returned"):
    result: bytes | None
    codec: str = "json"
    result_ttl_ms: int | None = None
    """Instead of the policy's."""


class Raised(Value, frozen=True, tag="raised"):
    """The handler raised, or its payload or its result was of no use."""

    error: JobError
    delay_ms: int | None = None
    """It said itself when to run again: this, or `run_at`."""
    run_at: int | None = None
    failure_ttl_ms: int | None = None


class TimedOut(Value, frozen=True, tag="timed out"):
    """The run was stopped because it took too long."""

    error: JobError
    failure_ttl_ms: int | None = None


class Crashed(Value, frozen=True, tag="crashed"):
    """The process of the run died. It is not known which of its runs was the cause."""

    error: JobError


class Stopped(Value, frozen=True, tag="stopped"):
    """The run was stopped for a reason that is not its own."""

    reason: Literal["cancel", "shutdown", "lease_lost", "neighbour", "not_started"]


Ended = Returned | Raised | TimedOut | Crashed | Stopped


def admit(job: Job, policy: Policy) -> Fail | None:
    """May a claimed job run? If it has stalled, timed out or been retried too often by now, it fails instead."""
    if not (job.stalls or job.timeouts or job.retries):
        return None
    if _left(job.stalls, job.work.max_stalls, policy.max_stalls, policy) < 0:
        error = JobError(type="Stalled", kind="stall", message=f"its worker was lost {format_times(job.stalls)}")
        return _fail(job, error, policy)
    if _left(job.timeouts, job.work.max_timeouts, policy.max_timeouts, policy) < 0:
        return _fail(job, _last(job, "timeout", f"it timed out {format_times(job.timeouts)}"), policy)
    if _left(job.retries, job.work.max_retries, policy.max_retries, policy) < 0:
        return _fail(job, _last(job, "retriable", f"it was retried {format_times(job.retries)}"), policy)
    return None


def is_suspect(job: Job, policy: Policy) -> bool:
    """Must it run alone? It has stalled twice, or may not stall again: perhaps it is what kills its processes, and
    otherwise its neighbours must not be what fails it."""
    if not job.stalls:
        return False
    return job.stalls >= 2 or _left(job.stalls, job.work.max_stalls, policy.max_stalls, policy) <= 0


def verdict(job: Job, ended: Ended, policy: Policy, rng: random.Random) -> Settlement:
    """How to settle a run that ended. A limit of n allows n."""
    match ended:
        case Returned():
            return _complete(job, ended, policy)
        case Raised():
            left = _left(job.retries, job.work.max_retries, policy.max_retries, policy)
            if ended.error.kind == "permanent" or left <= 0:
                return _fail(job, ended.error, policy, ended.failure_ttl_ms)
            delay_ms = 0 if ended.run_at is not None else ended.delay_ms
            if delay_ms is None:
                delay_ms = backoff_ms(job.retries, policy, rng)
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, ended.run_at)
        case TimedOut():
            if _left(job.timeouts, job.work.max_timeouts, policy.max_timeouts, policy) <= 0:
                return _fail(job, ended.error, policy, ended.failure_ttl_ms)
            delay_ms = backoff_ms(job.timeouts, policy, rng)
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, counts="timeouts")
        case Crashed():
            if _left(job.stalls, job.work.max_stalls, policy.max_stalls, policy) <= 0:
                return _fail(job, ended.error, policy)
            delay_ms = backoff_ms(job.stalls - 1, policy, rng) if job.stalls else 0
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, counts="stalls")
        case Stopped():
            if policy.at_most_once and ended.reason not in ("cancel", "not_started"):
                error = JobError(type="Stopped", kind="stall", message=f"it was started, and stopped by {ended.reason}")
                return _fail(job, error, policy)
            return Release(job.id, fence_of(job))


def backoff_ms(count: int, policy: Policy, rng: random.Random) -> int:
    """How long to wait before the next run: doubling, with jitter, never less than the policy's least."""
    base = min(policy.max_backoff_ms, policy.min_backoff_ms * 2 ** min(count, 40))
    least = max(policy.min_backoff_ms, min(base, policy.max_backoff_ms * 4 // 5))
    most = min(policy.max_backoff_ms, base * 5 // 4)
    return rng.randint(min(least, most), max(least, most))


def shrink_settlement(job: Job, refused: Settlement, policy: Policy, why: str) -> list[Settlement]:
    """Ever smaller settlements in place of one that the storage refused, most likely as too large. A result that does
    not fit fails its job; an error is cut, and at last left out."""
    if isinstance(refused, Release):
        return []
    if isinstance(refused, Complete):
        error = JobError(type="PayloadRejected", kind="permanent", message=why[:MAX_MESSAGE])
        return [_fail(job, error, policy), *shrink_settlement(job, _fail(job, error, policy), policy, why)]
    error = decode_error(refused.error)
    brief = msgspec.structs.replace(error, message=error.message[:200], traceback="", details=None)
    least = JobError(type=error.type[:40], message="", kind=error.kind, attempts=error.attempts)
    if isinstance(refused, RetrySettlement):
        errors = (encode_error(brief), encode_error(least), None)
        return [msgspec.structs.replace(refused, error=data) for data in errors]
    bare = [Fail(refused.id, refused.fence, data, refused.failure_ttl_ms) for data in (encode_error(brief), b"")]
    if not policy.follows_up:
        return [*bare]
    follows = [follow_up(job, brief), follow_up(job, brief, carry=False), follow_up(job, least, carry=False)]
    return [*(msgspec.structs.replace(bare[0], follow_up=work) for work in follows), *bare]


def timeout_ms(job: Job, policy: Policy) -> int | None:
    return policy.timeout_ms if job.work.timeout_ms is None else job.work.timeout_ms


def fence_of(job: Job) -> int:
    assert job.run is not None
    return job.run.fence


def _complete(job: Job, ended: Returned, policy: Policy) -> Complete:
    """Remembered only if there is something to remember: a name, a result, or (the storage knows) who waits for it."""
    worth_it = job.custom_id or ended.result is not None or ended.result_ttl_ms is not None
    given = ended.result_ttl_ms if ended.result_ttl_ms is not None else job.work.result_ttl_ms
    result_ttl_ms = policy.result_ttl_ms if given is None else given
    dedup_ttl_ms = policy.dedup_ttl_ms if job.work.dedup_ttl_ms is None else job.work.dedup_ttl_ms
    if dedup_ttl_ms is None:
        dedup_ttl_ms = result_ttl_ms
    if not worth_it:
        result_ttl_ms = dedup_ttl_ms = 0
    return Complete(job.id, fence_of(job), ended.result, ended.codec, result_ttl_ms, dedup_ttl_ms)


def _fail(job: Job, error: JobError, policy: Policy, failure_ttl_ms: int | None = None) -> Fail:
    ttl_ms = policy.failure_ttl_ms if failure_ttl_ms is None else failure_ttl_ms
    error = msgspec.structs.replace(error, attempts=job.attempts)
    work = follow_up(job, error) if policy.follows_up else None
    return Fail(job.id, fence_of(job), encode_error(error), ttl_ms, work)


def _left(count: int, of_job: int | None, of_policy: int | None, policy: Policy) -> float:
    """How many more of what was counted are allowed; less than 0 if there were too many. A job's own limit goes before
    the policy's, and a promise to run once before both."""
    limit = 0 if policy.at_most_once else of_policy if of_job is None else of_job
    return math.inf if limit is None else limit - count


def _last(job: Job, kind: ErrorKind, message: str) -> JobError:
    """The error of the last run, where there is one."""
    if job.error is None:
        return JobError(type="LimitReached", kind=kind, message=message)
    return msgspec.structs.replace(decode_error(job.error), kind=kind)
