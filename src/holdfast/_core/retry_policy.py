"""How a run is settled: limits, backoff, permanent errors, fail handlers. Pure: the random generator is an argument."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

import msgspec

from holdfast._core.extension import BACKOFF, EXPIRES_AT, EXPIRES_IN, numbers_in
from holdfast._core.failure import MAX_MESSAGE, decode_error, encode_error, follow_up, is_wrong_call, safe_getattr
from holdfast._core.jobs import MAX_MS, Complete, Fail, Job, Release, RetrySettlement, Settlement, Value
from holdfast._core.lifecycle import RESULT_TTL_MS
from holdfast._core.options import BackoffFunction, to_ms
from holdfast._core.text import format_times
from holdfast.errors import ErrorKind, JobError, PayloadRejected, PermanentError, Retry

BRIEF_TTL_MS = 300_000
"""How long the outcome of a job without a result and without a chosen id is kept by default."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one handler are run. The limits of a job override these; a limit of None is no limit."""

    timeout_ms: int | None = 60_000
    max_retries: int | None = 10
    max_stalls: int | None = 3
    max_timeouts: int | None = 3
    min_backoff_ms: int = 2_000
    max_backoff_ms: int = 300_000
    delays_ms: tuple[int, ...] = ()
    """Delays before the retries, instead of a backoff that doubles."""
    result_ttl_ms: int | None = None
    """None means `RESULT_TTL_MS`, or `BRIEF_TTL_MS` for a job without a result and a chosen id."""
    dedup_ttl_ms: int | None = None
    """None means the same as `result_ttl_ms`."""
    failure_ttl_ms: int = 7 * 86_400_000
    remember_failures: bool = False
    """A failed id is not run again until its record is forgotten."""
    cancel_grace_ms: int = 1_000
    at_most_once: bool = False
    exclusive: bool = False
    """The next run of an id starts only after its last run has certainly ended."""
    dies_with_storage: bool = False
    """A run is stopped before its lease can expire."""
    follows_up: bool = False
    """The task has a fail handler: a failure enqueues a job for it."""


class RetryRules(NamedTuple):
    """What a task says about its exceptions. It stays in the process of the handler, because it is code."""

    retry_on: tuple[type[Exception], ...] | None = None
    """None means all exceptions."""
    no_retry_on: tuple[type[Exception], ...] = ()
    backoff: BackoffFunction | None = None

    def is_permanent(self, error: BaseException) -> bool:
        """Return whether another run would not help after this exception."""
        if isinstance(error, PermanentError | PayloadRejected) or safe_getattr(error, "kind") == "permanent":
            return True
        if isinstance(error, Retry):
            return False
        if isinstance(error, self.no_retry_on):
            return True
        return is_wrong_call(error) if self.retry_on is None else not isinstance(error, self.retry_on)

    def delay_ms(self, job: Job, error: BaseException) -> int | None:
        """Return the delay of the retry by the function of the task; None if it has none, or the request has delays."""
        if self.backoff is None or not isinstance(error, Exception) or numbers_in(job.work.extension, BACKOFF):
            return None
        delay = self.backoff(job.retries + 1, error)
        return None if delay is None else to_ms("the delay from the backoff function", delay)


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of one queue are run. It is all that a worker knows of a handler in a child process."""

    queue: str
    policy: Policy
    size: int = 10
    concurrency: int | None = None
    queue_priority: int = 100
    signature: str = ""
    """Hash of the parameters of the task; empty for a fail handler."""
    note: str = ""
    """The `TaskNote` of the task as JSON; empty for a fail handler."""


StopReason = Literal["cancel", "timeout", "shutdown", "lease_lost"]


class Returned(Value, frozen=True, tag="returned"):
    """The handler returned."""

    result: bytes | None
    codec: str = "json"
    result_ttl_ms: int | None = None
    """Overrides the policy and the job."""


class Raised(Value, frozen=True, tag="raised"):
    """The handler raised, or its payload could not be decoded, or its result could not be encoded."""

    error: JobError
    delay_ms: int | None = None
    """The delay of the retry, if the error names one; otherwise `run_at`, or the backoff of the policy."""
    run_at: int | None = None
    failure_ttl_ms: int | None = None


class TimedOut(Value, frozen=True, tag="timed out"):
    """The run was stopped because it took too long."""

    error: JobError
    failure_ttl_ms: int | None = None


class Crashed(Value, frozen=True, tag="crashed"):
    """The child process of the run died. Any run in that process may be the cause."""

    error: JobError


class Stopped(Value, frozen=True, tag="stopped"):
    """The run was stopped from outside."""

    reason: Literal["cancel", "shutdown", "lease_lost", "neighbour", "not_started"]


Ended = Returned | Raised | TimedOut | Crashed | Stopped


def admit(job: Job, policy: Policy) -> Fail | None:
    """Return None if a claimed job may run. A job that stalled, timed out or was retried too often fails instead, and
    so does one that has expired."""
    if not (job.stalls or job.timeouts or job.retries or job.work.extension):
        return None
    expired = _expired(job)
    if expired is not None:
        error = expired
    elif _left(job, "stalls", policy) < 0:
        error = JobError(type="Stalled", kind="stall", message=f"its worker was lost {format_times(job.stalls)}")
    elif _left(job, "timeouts", policy) < 0:
        error = _last(job, "timeout", f"it timed out {format_times(job.timeouts)}")
    elif _left(job, "retries", policy) < 0:
        error = _last(job, "retriable", f"it was retried {format_times(job.retries)}")
    else:
        return None
    return _fail(job, error, policy)


def expires_at(job: Job) -> int | None:
    """Return the queue time after which a job does not start any more."""
    after_request = [job.generation + 1000 * ms for ms in numbers_in(job.work.extension, EXPIRES_IN)]
    at_wall_time = [at + job.skew for at in numbers_in(job.work.extension, EXPIRES_AT)]
    return min([*after_request, *at_wall_time], default=None)


def _expired(job: Job) -> JobError | None:
    """Return the error of a job that was claimed after its time was over. Its fence is the time of the claim."""
    until_at = expires_at(job)
    if until_at is None or fence_of(job) < until_at:
        return None
    late_us = fence_of(job) - until_at
    last = "" if job.error is None else f"; its last run ended with {decode_error(job.error)}"
    message = f"a worker was free {late_us / 1e6:,.3g} s after the time of the job was over{last}"
    return JobError(type="Expired", kind="expired", message=message[:MAX_MESSAGE])


def is_suspect(job: Job, policy: Policy) -> bool:
    """Return whether a job must run alone in its process: it stalled twice, or its next stall would fail it. It may be
    the cause of the crashes; and if it is not, another job must not make it fail."""
    return job.stalls >= 2 or (job.stalls == 1 and _left(job, "stalls", policy) <= 0)


def verdict(job: Job, ended: Ended, policy: Policy, rng: random.Random) -> Settlement:
    """Decide how to settle a run that ended. A limit of n allows n retries, stalls or timeouts."""
    match ended:
        case Returned():
            return _complete(job, ended, policy)
        case Raised():
            if ended.error.kind == "permanent" or _left(job, "retries", policy) <= 0:
                return _fail(job, ended.error, policy, ended.failure_ttl_ms)
            delay_ms = 0 if ended.run_at is not None else ended.delay_ms
            if delay_ms is None:
                delay_ms = _delay_ms(job, job.retries, policy, rng)
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, ended.run_at)
        case TimedOut():
            if _left(job, "timeouts", policy) <= 0:
                return _fail(job, ended.error, policy, ended.failure_ttl_ms, counts="timeouts")
            delay_ms = _delay_ms(job, job.timeouts, policy, rng)
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, counts="timeouts")
        case Crashed():
            if _left(job, "stalls", policy) <= 0:
                return _fail(job, ended.error, policy, counts="stalls")
            delay_ms = _delay_ms(job, job.stalls - 1, policy, rng) if job.stalls else 0
            return RetrySettlement(job.id, fence_of(job), encode_error(ended.error), delay_ms, counts="stalls")
        case Stopped():
            if policy.at_most_once and ended.reason not in ("cancel", "not_started"):
                error = JobError(type="Stopped", kind="stall", message=f"the run was stopped by {ended.reason}")
                return _fail(job, error, policy)
            return Release(job.id, fence_of(job))


def _delay_ms(job: Job, count: int, policy: Policy, rng: random.Random) -> int:
    """Return the time before the next run: the delay that the request or the task has for it, else the backoff."""
    delays = numbers_in(job.work.extension, BACKOFF) or policy.delays_ms
    return min(delays[min(count, len(delays) - 1)], MAX_MS) if delays else backoff_ms(count, policy, rng)


def backoff_ms(count: int, policy: Policy, rng: random.Random) -> int:
    """Return the time before the next run. It doubles with each retry, with jitter, within the bounds of the policy."""
    base = min(policy.max_backoff_ms, policy.min_backoff_ms * 2 ** min(count, 40))
    least = max(policy.min_backoff_ms, min(base, policy.max_backoff_ms * 4 // 5))
    most = min(policy.max_backoff_ms, base * 5 // 4)
    return rng.randint(min(least, most), max(least, most))


def shrink_settlement(job: Job, refused: Settlement, policy: Policy, why: str) -> list[Settlement]:
    """Return ever smaller settlements to replace one that the storage refused, usually because of its size. A result
    that does not fit fails its job; an error is shortened, and finally omitted."""
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
    bare = [msgspec.structs.replace(refused, error=data, follow_up=None) for data in (encode_error(brief), b"")]
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
    """Complete a job. A length that was given holds. Without one, an outcome with a result or a chosen id is kept for
    an hour, and any other briefly, so that its handle can be awaited."""
    given = ended.result_ttl_ms
    if given is None:
        given = policy.result_ttl_ms if job.work.result_ttl_ms is None else job.work.result_ttl_ms
    if given is None and ended.result is None and not job.custom_id:
        return Complete(job.id, fence_of(job), None, ended.codec, BRIEF_TTL_MS, 0, brief=True)
    result_ttl_ms = RESULT_TTL_MS if given is None else given
    dedup_ttl_ms = policy.dedup_ttl_ms if job.work.dedup_ttl_ms is None else job.work.dedup_ttl_ms
    if dedup_ttl_ms is None:
        dedup_ttl_ms = result_ttl_ms
    return Complete(job.id, fence_of(job), ended.result, ended.codec, result_ttl_ms, dedup_ttl_ms)


def _fail(
    job: Job,
    error: JobError,
    policy: Policy,
    failure_ttl_ms: int | None = None,
    *,
    counts: Literal["stalls", "timeouts"] | None = None,
) -> Fail:
    ttl_ms = policy.failure_ttl_ms if failure_ttl_ms is None else failure_ttl_ms
    attempts = job.attempts - (error.kind == "expired")  # It was claimed, and not run.
    error = msgspec.structs.replace(error, attempts=attempts)
    counted = job if counts is None else msgspec.structs.replace(job, **{counts: getattr(job, counts) + 1})
    work = follow_up(counted, error) if policy.follows_up else None
    dedup_ttl_ms = ttl_ms if policy.remember_failures and error.kind != "expired" else 0
    return Fail(job.id, fence_of(job), encode_error(error), ttl_ms, work, counts, dedup_ttl_ms)


def _left(job: Job, count: Literal["retries", "stalls", "timeouts"], policy: Policy) -> float:
    """Return how many more retries, stalls or timeouts a job may have; negative if it had too many. The limit of the
    job overrides that of the policy, and `at_most_once` overrides both."""
    of_job = getattr(job.work, f"max_{count}")
    limit = 0 if policy.at_most_once else getattr(policy, f"max_{count}") if of_job is None else of_job
    return math.inf if limit is None else limit - getattr(job, count)


def _last(job: Job, kind: ErrorKind, message: str) -> JobError:
    """Return the error of the last run, with this kind; a new error with this message if the job has none."""
    if job.error is None:
        return JobError(type="LimitReached", kind=kind, message=message)
    return msgspec.structs.replace(decode_error(job.error), kind=kind)
