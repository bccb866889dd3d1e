"""What becomes of a run, as tables: may it begin, how is it settled, when does it run again, what is remembered."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast._core.extension import BACKOFF, EXPIRES_AT, EXPIRES_IN, pack_numbers
from holdfast._core.failure import (
    MAX_FOLLOW_UP_BYTES,
    MAX_MESSAGE,
    MAX_TRACEBACK,
    FollowUp,
    decode_error,
    encode_error,
    follow_up,
    truncate_error,
)
from holdfast._core.jobs import MAX_MS, Complete, Fail, Job, Release, RetrySettlement, Settlement, StoredLease, Work
from holdfast._core.retry_policy import (
    Crashed,
    Ended,
    Policy,
    Raised,
    RetryRules,
    Returned,
    Stopped,
    TimedOut,
    admit,
    backoff_ms,
    fence_of,
    shrink_settlement,
    timeout_ms,
    verdict,
)
from holdfast.errors import JobError, PermanentError, Retry
from tests.policies import FAIL_HANDLER, PULL, TASK

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.

NOW = 1_800_000_000_000_000
FENCE = NOW + 7
Count = Literal["retries", "stalls", "timeouts"]
COUNTS: list[Count] = ["retries", "stalls", "timeouts"]
LIMITS = {"retries": "max_retries", "stalls": "max_stalls", "timeouts": "max_timeouts"}
KINDS = {"retries": "retriable", "stalls": "stall", "timeouts": "timeout"}

ERROR = JobError(type="ValueError", message="no")
PERMANENT = replace(ERROR, kind="permanent")
TOO_LONG = JobError(type="TimeoutError", message="too long", kind="timeout")
NONE = Policy(max_retries=0, max_stalls=0, max_timeouts=0)
ONCE = replace(NONE, at_most_once=True)


def final(error: JobError) -> JobError:
    """An error as it stands in the record of a job that was given up: it says how often it ran."""
    return replace(error, attempts=job().attempts)


def job(work: Work | None = None, **fields: Any) -> Job:
    made = Job(
        "a", work or Work(b'{"n":1}'), NOW, NOW, NOW, run=StoredLease("w", FENCE, 10_000, NOW + 10_000_000), attempts=1
    )
    return replace(made, **fields)


def rng() -> random.Random:
    return random.Random(1)


# May it run?


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("whose", ["policy's", "job's"])
def test_a_job_may_run_until_it_is_over_a_limit(count: Count, limit: int, whose: str) -> None:
    own = limit if whose == "job's" else None
    policy = replace(PULL, **{LIMITS[count]: limit if own is None else 1_000 * (limit == 0)})
    limits: Any = {LIMITS[count]: own}
    work = Work(b"1", **limits)
    for number in range(limit + 1):
        assert admit(job(work, **{count: number}), policy) is None
    refused = admit(job(work, **{count: limit + 1}), policy)
    assert isinstance(refused, Fail)
    assert (refused.id, refused.fence) == ("a", FENCE)
    assert decode_error(refused.error).kind == KINDS[count]


@pytest.mark.parametrize("count", COUNTS)
def test_without_a_limit_a_job_may_always_run(count: Count) -> None:
    counts: Any = {count: 1_000_000}
    assert admit(job(**counts), PULL) is None


@pytest.mark.parametrize(
    ("policy", "retries", "stalls", "timeouts"), [(TASK, 10, 3, 3), (FAIL_HANDLER, 100, 3, 3), (NONE, 0, 0, 0)]
)
def test_default_limits_are_applied(policy: Policy, retries: int, stalls: int, timeouts: int) -> None:
    assert admit(job(retries=retries, stalls=stalls, timeouts=timeouts), policy) is None
    over: Any = ({"retries": retries + 1}, {"stalls": stalls + 1}, {"timeouts": timeouts + 1})
    for more in over:
        assert admit(job(**more), policy) is not None


def test_default_policy_has_the_documented_values() -> None:
    day = 86_400_000
    assert (
        Policy(
            timeout_ms=60_000,
            max_retries=10,
            max_stalls=3,
            max_timeouts=3,
            min_backoff_ms=2_000,
            max_backoff_ms=300_000,
            result_ttl_ms=None,
            dedup_ttl_ms=None,
            failure_ttl_ms=7 * day,
            cancel_grace_ms=1_000,
            at_most_once=False,
            exclusive=False,
            dies_with_storage=False,
            follows_up=False,
        )
        == TASK
    )
    assert replace(TASK, max_retries=100, min_backoff_ms=10_000, max_backoff_ms=900_000) == FAIL_HANDLER
    assert (PULL.timeout_ms, PULL.max_retries, PULL.max_stalls, PULL.max_timeouts) == (None, None, None, None)


def test_refusal_contains_the_last_error_and_the_lost_worker() -> None:
    stalled = admit(job(stalls=2, error=encode_error(ERROR)), NONE)
    once = admit(job(stalls=1), NONE)
    retried = admit(job(retries=1, error=encode_error(ERROR)), NONE)
    silent = admit(job(timeouts=1), NONE)
    assert stalled is not None
    assert once is not None
    assert retried is not None
    assert silent is not None
    assert "lost 2 times" in decode_error(stalled.error).message
    assert "lost once" in decode_error(once.error).message
    assert decode_error(retried.error) == final(ERROR)
    assert decode_error(silent.error).kind == "timeout"


def test_a_refused_job_is_followed_up_and_remembered_like_any_failed_one() -> None:
    refused = admit(job(stalls=1), replace(NONE, follows_up=True, failure_ttl_ms=77))
    assert refused is not None
    assert refused.failure_ttl_ms == 77
    assert refused.follow_up is not None


def late(tag: int, value: int, late_us: int, **fields: Any) -> Job:
    """A job that was claimed `late_us` after its time was over."""
    lease = StoredLease("w", NOW + 5_000_000 + late_us, 10_000, NOW + 20_000_000)
    return job(Work(b"1", extension=((tag, pack_numbers(value)),)), run=lease, **fields)


@pytest.mark.parametrize(("tag", "value"), [(EXPIRES_IN, 5_000), (EXPIRES_AT, NOW + 5_000_000 - 77)])
def test_a_job_that_is_claimed_after_its_time_fails_without_a_run(tag: int, value: int) -> None:
    assert admit(late(tag, value, -1, skew=77), TASK) is None
    refused = admit(late(tag, value, 0, skew=77, attempts=1), replace(TASK, follows_up=True))
    assert isinstance(refused, Fail)
    error = decode_error(refused.error)
    assert (error.kind, error.type, error.attempts) == ("expired", "Expired", 0)
    assert refused.follow_up is not None


def test_error_of_an_expired_job_says_how_its_last_run_ended() -> None:
    refused = admit(late(EXPIRES_IN, 5_000, 2_000_000, attempts=3, retries=2, error=encode_error(ERROR)), TASK)
    assert isinstance(refused, Fail)
    error = decode_error(refused.error)
    assert "2 s after" in error.message
    assert str(ERROR) in error.message
    assert error.attempts == 2


def test_failure_is_remembered_if_the_task_says_so_and_the_job_was_run() -> None:
    policy = replace(NONE, remember_failures=True, failure_ttl_ms=77)
    for ended in (Raised(ERROR), TimedOut(TOO_LONG), Crashed(ERROR)):
        failed = verdict(job(), ended, policy, rng())
        assert isinstance(failed, Fail)
        assert failed.dedup_ttl_ms == 77
    expired = admit(late(EXPIRES_IN, 5_000, 0), policy)
    assert expired is not None
    assert expired.dedup_ttl_ms == 0


# How is it settled?


@pytest.mark.parametrize(
    ("ended", "count", "errors"),
    [(Raised(ERROR), "retries", ERROR), (TimedOut(TOO_LONG), "timeouts", TOO_LONG)],
)
@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("whose", ["policy's", "job's"])
def test_a_limit_of_n_allows_n_more_runs(ended: Ended, count: Count, errors: JobError, limit: int, whose: str) -> None:
    own = limit if whose == "job's" else None
    policy = replace(PULL, **{LIMITS[count]: limit if own is None else 1_000 * (limit == 0)})
    limits: Any = {LIMITS[count]: own}
    work = Work(b"1", **limits)
    for number in range(limit):
        again = verdict(job(work, **{count: number}), ended, policy, rng())
        assert again == RetrySettlement("a", FENCE, encode_error(errors), 0, None, count)
    assert verdict(job(work, **{count: limit}), ended, policy, rng()) == Fail(
        "a",
        FENCE,
        encode_error(final(errors)),
        policy.failure_ttl_ms,
        None,
        "timeouts" if count == "timeouts" else None,
    )


@pytest.mark.parametrize("ended", [Raised(ERROR), TimedOut(TOO_LONG)])
def test_one_count_does_not_use_up_the_limit_of_another(ended: Ended) -> None:
    others: Any = {"stalls": 3, "timeouts": 3} if isinstance(ended, Raised) else {"stalls": 3, "retries": 10}
    assert isinstance(verdict(job(**others), ended, TASK, rng()), RetrySettlement)


@pytest.mark.parametrize(
    ("raised", "delay_ms", "run_at"),
    [
        (Raised(ERROR, delay_ms=5), 5, None),
        (Raised(ERROR, delay_ms=0), 0, None),
        (Raised(ERROR, delay_ms=86_400_000), 86_400_000, None),
        (Raised(ERROR, run_at=NOW + 5), 0, NOW + 5),
        (Raised(ERROR, run_at=1), 0, 1),
    ],
)
def test_run_that_sets_its_retry_time_is_retried_at_that_time(
    raised: Raised, delay_ms: int, run_at: int | None
) -> None:
    assert verdict(job(), raised, TASK, rng()) == RetrySettlement("a", FENCE, encode_error(ERROR), delay_ms, run_at)


@pytest.mark.parametrize("raised", [Raised(ERROR, delay_ms=5), Raised(ERROR, run_at=NOW)])
def test_a_run_that_says_when_to_run_again_is_limited_like_any_other(raised: Raised) -> None:
    assert isinstance(verdict(job(retries=10), raised, TASK, rng()), Fail)


@pytest.mark.parametrize("raised", [Raised(PERMANENT), Raised(PERMANENT, delay_ms=5), Raised(PERMANENT, run_at=NOW)])
@pytest.mark.parametrize("policy", [TASK, PULL])
def test_a_permanent_error_fails_at_once(raised: Raised, policy: Policy) -> None:
    assert verdict(job(), raised, policy, rng()) == Fail(
        "a", FENCE, encode_error(final(PERMANENT)), policy.failure_ttl_ms
    )


@pytest.mark.parametrize("ended", [Raised(PERMANENT, failure_ttl_ms=5), TimedOut(TOO_LONG, failure_ttl_ms=5)])
def test_error_may_set_its_own_failure_ttl(ended: Ended) -> None:
    failed = verdict(job(timeouts=3), ended, TASK, rng())
    assert isinstance(failed, Fail)
    assert failed.failure_ttl_ms == 5


@pytest.mark.parametrize("reason", ["cancel", "shutdown", "lease_lost"])
def test_a_run_that_was_stopped_goes_back_uncounted(reason: Literal["cancel", "shutdown", "lease_lost"]) -> None:
    assert verdict(job(retries=10, stalls=3), Stopped(reason), TASK, rng()) == Release("a", FENCE)


@pytest.mark.parametrize("ended", [Stopped("shutdown"), Stopped("lease_lost"), Raised(ERROR), TimedOut(TOO_LONG)])
def test_at_most_once_run_fails_instead_of_a_retry_or_release(ended: Ended) -> None:
    failed = verdict(job(), ended, replace(ONCE, follows_up=True), rng())
    assert isinstance(failed, Fail)
    assert failed.follow_up is not None
    if isinstance(ended, Stopped):
        assert decode_error(failed.error).kind == "stall"
        assert ended.reason in decode_error(failed.error).message


def test_at_most_once_run_can_be_cancelled() -> None:
    assert verdict(job(), Stopped("cancel"), ONCE, rng()) == Release("a", FENCE)


@pytest.mark.parametrize("ended", [Raised(ERROR), Raised(ERROR, delay_ms=5), TimedOut(TOO_LONG)])
def test_no_limit_of_a_job_makes_an_at_most_once_task_run_twice(ended: Ended) -> None:
    generous = Work(b"1", max_retries=5, max_stalls=5, max_timeouts=5)
    assert isinstance(verdict(job(generous), ended, ONCE, rng()), Fail)
    for count in COUNTS:
        assert isinstance(admit(job(generous, **{count: 1}), ONCE), Fail)


@pytest.mark.parametrize(("own", "policys", "expected"), [(None, 60, 60), (5, 60, 5), (5, None, 5), (None, None, None)])
def test_a_jobs_own_timeout_goes_before_the_policys(own: int | None, policys: int | None, expected: int | None) -> None:
    assert timeout_ms(job(Work(b"1", timeout_ms=own)), Policy(timeout_ms=policys)) == expected


# What is remembered?

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("custom_id", "result", "work", "policy", "hooks", "result_ttl", "dedup_ttl"),
    [
        pytest.param(False, None, {"result_ttl_ms": 9}, {}, None, 9, 9, id="no result, as long as the job says"),
        pytest.param(False, None, {}, {"result_ttl_ms": 7}, None, 7, 7, id="no result, as long as the task says"),
        pytest.param(False, None, {}, {"result_ttl_ms": 0}, None, 0, 0, id="no result, not at all"),
        pytest.param(False, None, {}, {}, 3, 3, 3, id="no result, a hook has the last word"),
        pytest.param(True, None, {}, {}, None, HOUR, HOUR, id="a name"),
        pytest.param(False, b"1", {}, {}, None, HOUR, HOUR, id="a result"),
        pytest.param(False, b"", {}, {}, None, HOUR, HOUR, id="an empty result is one"),
        pytest.param(True, b"1", {}, {"result_ttl_ms": 7}, None, 7, 7, id="as long as the task says"),
        pytest.param(True, b"1", {"result_ttl_ms": 9}, {"result_ttl_ms": 7}, None, 9, 9, id="as long as the job says"),
        pytest.param(True, b"1", {"result_ttl_ms": 0}, {}, None, 0, 0, id="not at all"),
        pytest.param(True, b"1", {"result_ttl_ms": 9}, {}, 3, 3, 3, id="a hook has the last word"),
        pytest.param(True, b"1", {}, {}, 0, 0, 0, id="also to forget"),
        pytest.param(True, b"1", {}, {"dedup_ttl_ms": 5}, None, HOUR, 5, id="the task's dedup_ttl"),
        pytest.param(True, b"1", {"dedup_ttl_ms": 6}, {"dedup_ttl_ms": 5}, None, HOUR, 6, id="the job's dedup_ttl"),
        pytest.param(True, b"1", {"dedup_ttl_ms": 0}, {"dedup_ttl_ms": 5}, None, HOUR, 0, id="no dedup"),
        pytest.param(True, b"1", {"result_ttl_ms": 9, "dedup_ttl_ms": 6}, {}, 3, 3, 6, id="a hook leaves dedup_ttl"),
        pytest.param(
            *(True, b"1", {"result_ttl_ms": 9}, {"dedup_ttl_ms": 500}, None, 9, 500),
            id="a caller's result_ttl does not shorten the task's dedup_ttl",
        ),
    ],
)
def test_outcome_ttl_follows_the_policy(
    custom_id: bool,
    result: bytes | None,
    work: dict[str, Any],
    policy: dict[str, Any],
    hooks: int | None,
    result_ttl: int,
    dedup_ttl: int,
) -> None:
    returned = Returned(result, "msgpack", hooks)
    complete = verdict(job(Work(b"1", **work), custom_id=custom_id), returned, Policy(**policy), rng())
    assert complete == Complete("a", FENCE, result, "msgpack", result_ttl, dedup_ttl)


@pytest.mark.parametrize("dedup_ttl_ms", [None, 0, 86_400_000])
def test_outcome_that_no_option_asks_for_is_kept_briefly(dedup_ttl_ms: int | None) -> None:
    complete = verdict(job(Work(b"1", dedup_ttl_ms=dedup_ttl_ms)), Returned(None), TASK, rng())
    assert complete == Complete("a", FENCE, None, "json", 300_000, 0, brief=True)


# What if the storage refuses it?

LONG = JobError(type="E" * 100, message="m" * 4_000, kind="timeout", traceback="t" * 16_000, details={"a": "d" * 9_000})
BIG = Work(b'"' + b"x" * 100_000 + b'"')


def size(settlement: Settlement) -> int:
    return len(msgspec.msgpack.encode(settlement))


@pytest.mark.parametrize("follows_up", [True, False])
@pytest.mark.parametrize(
    "refused",
    [
        Complete("a", FENCE, b"x" * 2_000_000),
        RetrySettlement("a", FENCE, encode_error(LONG), 5, None, "timeouts"),
        RetrySettlement("a", FENCE, encode_error(LONG), 0, NOW),
        Fail("a", FENCE, encode_error(LONG), 77, Work(b"x" * 200_000)),
    ],
)
def test_too_large_settlement_shrinks_step_by_step(refused: Settlement, follows_up: bool) -> None:
    policy = replace(TASK, follows_up=follows_up)
    tries = shrink_settlement(job(BIG), refused, policy, "it is too large")
    sizes = [size(settlement) for settlement in (refused, *tries)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 60
    assert {(settlement.id, settlement.fence) for settlement in tries} == {("a", FENCE)}
    if isinstance(refused, RetrySettlement):
        assert {(s.delay_ms, s.run_at, s.counts) for s in tries if isinstance(s, RetrySettlement)} == {
            (refused.delay_ms, refused.run_at, refused.counts)
        }
    else:
        assert all(isinstance(settlement, Fail) for settlement in tries)
    told = [decode_error(settlement.error) for settlement in tries if not isinstance(settlement, Complete | Release)]
    assert told[0].kind == ("permanent" if isinstance(refused, Complete) else "timeout")
    assert told[0].message


def test_a_result_that_is_too_large_fails_its_job_for_good_and_says_so() -> None:
    first = shrink_settlement(job(), Complete("a", FENCE, b"x"), replace(TASK, follows_up=True), "it has 2 MiB")[0]
    assert isinstance(first, Fail)
    assert first.failure_ttl_ms == TASK.failure_ttl_ms
    assert first.follow_up is not None
    refusal = JobError(type="PayloadRejected", kind="permanent", message="it has 2 MiB")
    assert decode_error(first.error) == final(refusal)


def test_too_large_follow_up_is_tried_with_and_then_without_the_payload() -> None:
    tries = shrink_settlement(job(BIG), Fail("a", FENCE, encode_error(LONG), 77), replace(TASK, follows_up=True), "")
    followed = [settlement.follow_up for settlement in tries if isinstance(settlement, Fail)]
    forms = [work and msgspec.json.decode(work.payload or b"", type=FollowUp).form for work in followed]
    assert list(dict.fromkeys(forms)) == ["json", "left", None]
    assert forms == sorted(forms, key=lambda form: ("json", "left", None).index(form))
    assert {settlement.failure_ttl_ms for settlement in tries if isinstance(settlement, Fail)} == {77}


def test_release_cannot_be_shrunk() -> None:
    assert shrink_settlement(job(), Release("a", FENCE), TASK, "") == []


# When does it run again?


@patient
@given(st.integers(0, 10_000), st.integers(0, 10**7), st.integers(0, 10**7), st.randoms(use_true_random=False))
def test_a_backoff_stays_within_its_bounds(count: int, least: int, more: int, rng: random.Random) -> None:
    policy = Policy(min_backoff_ms=least, max_backoff_ms=least + more)
    assert least <= backoff_ms(count, policy, rng) <= least + more


@patient
@given(st.integers(0, 60), st.integers(1, 10**5), st.integers(1, 1_000), st.integers())
def test_a_backoff_doubles_with_jitter_until_it_reaches_the_most(count: int, least: int, times: int, seed: int) -> None:
    policy = Policy(min_backoff_ms=least, max_backoff_ms=least * times)
    wanted = min(least * times, least * 2**count)
    assert 0.8 * wanted - 1 <= backoff_ms(count, policy, random.Random(seed)) <= 1.25 * wanted + 1


@pytest.mark.parametrize("count", [0, 3, 30])
def test_backoffs_of_jobs_that_failed_together_differ(count: int) -> None:
    dice = random.Random(0)
    assert len({backoff_ms(count, TASK, dice) for _ in range(200)}) > 50


def test_backoff_uses_the_given_random_generator() -> None:
    delays = [backoff_ms(n, TASK, random.Random(5)) for n in range(5)]
    assert delays == [backoff_ms(n, TASK, random.Random(5)) for n in range(5)]


@pytest.mark.parametrize("count", [0, 1, 50])
def test_without_a_backoff_a_retry_is_due_at_once(count: int) -> None:
    assert backoff_ms(count, PULL, rng()) == 0


@pytest.mark.parametrize(("retries", "timeouts", "ended"), [(3, 0, Raised(ERROR)), (0, 3, TimedOut(TOO_LONG))])
def test_each_count_has_its_own_backoff(retries: int, timeouts: int, ended: Ended) -> None:
    policy = replace(TASK, max_timeouts=10)
    again = verdict(job(retries=retries, timeouts=timeouts), ended, policy, random.Random(4))
    assert isinstance(again, RetrySettlement)
    assert again.delay_ms == backoff_ms(3, policy, random.Random(4))
    assert 16_000 <= again.delay_ms <= 20_000


DELAYS = replace(TASK, delays_ms=(1_000, 10_000, 60_000), max_retries=10, max_timeouts=10, max_stalls=20)


@pytest.mark.parametrize(("number", "delay_ms"), [(0, 1_000), (1, 10_000), (2, 60_000), (3, 60_000), (9, 60_000)])
def test_a_list_of_delays_is_used_in_order_and_its_last_again(number: int, delay_ms: int) -> None:
    cases: list[tuple[Ended, dict[str, Any]]] = [
        (Raised(ERROR), {"retries": number}),
        (TimedOut(TOO_LONG), {"timeouts": number}),
        (Crashed(ERROR), {"stalls": number + 1}),
    ]
    for ended, counts in cases:
        again = verdict(job(**counts), ended, DELAYS, rng())
        assert isinstance(again, RetrySettlement)
        assert again.delay_ms == delay_ms


def test_delays_of_a_request_override_those_of_the_task() -> None:
    own = Work(b"1", extension=((BACKOFF, pack_numbers(7, 8)),))
    for policy in (TASK, DELAYS):
        again = [verdict(job(own, retries=n), Raised(ERROR), policy, rng()) for n in (0, 1, 2)]
        assert [s.delay_ms for s in again if isinstance(s, RetrySettlement)] == [7, 8, 8]


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, b"\xff" * 20])
def test_delays_that_another_client_wrote_wrong_give_a_valid_retry(data: bytes) -> None:
    again = verdict(job(Work(b"1", extension=((BACKOFF, data),))), Raised(ERROR), TASK, rng())
    assert isinstance(again, RetrySettlement)
    assert again.delay_ms <= MAX_MS


# Which exceptions are retried?


@pytest.mark.parametrize(
    ("rules", "permanent"),
    [
        (RetryRules(), []),
        (RetryRules(no_retry_on=(LookupError,)), [KeyError]),
        (RetryRules(retry_on=(OSError, LookupError)), [ValueError]),
        (RetryRules(retry_on=(LookupError, ValueError), no_retry_on=(KeyError,)), [KeyError, OSError]),
    ],
)
def test_rules_say_which_exceptions_are_permanent(rules: RetryRules, permanent: list[type[Exception]]) -> None:
    kinds: list[type[Exception]] = [KeyError, ValueError, OSError]
    assert [kind for kind in kinds if rules.is_permanent(kind())] == permanent
    assert not rules.is_permanent(Retry())
    assert rules.is_permanent(PermanentError())


def test_backoff_function_gets_the_number_of_the_retry_and_the_error() -> None:
    calls: list[tuple[int, Exception]] = []

    def backoff(retry: int, error: Exception) -> float | None:
        calls.append((retry, error))
        return 2 * retry if retry < 3 else None

    error, rules = OSError("gone"), RetryRules(backoff=backoff)
    assert [rules.delay_ms(job(retries=n), error) for n in range(3)] == [2_000, 4_000, None]
    assert calls == [(1, error), (2, error), (3, error)]
    own = Work(b"1", extension=((BACKOFF, pack_numbers(7)),))
    assert rules.delay_ms(job(own), error) is None


# What a fail handler is told


@pytest.mark.parametrize(
    ("work", "form", "payload"),
    [
        (Work(b'{"n":1}'), "json", b'{"n":1}'),
        (Work(b' [1, "\xc3\xa4"]\n'), "json", b'[1, "\xc3\xa4"]'),
        (Work(b"not json"), "base64", b"not json"),
        (Work(b""), "base64", b""),
        (Work(None), "base64", b""),
        (Work(b'"\xff"'), "base64", b'"\xff"'),
        (Work(b'{"n":1}{"n":2}'), "base64", b'{"n":1}{"n":2}'),
        (Work(b"\x00\xff", "raw"), "base64", b"\x00\xff"),
        (Work(b"1", "raw"), "base64", b"1"),
        (Work(b"\x81\xa1n\x01", "msgpack"), "base64", b"\x81\xa1n\x01"),
        (Work(b"[" * 100_000), "base64", b"[" * 100_000),
        (Work(b"x" * MAX_FOLLOW_UP_BYTES, "raw"), "base64", b"x" * MAX_FOLLOW_UP_BYTES),
        (Work(b"x" * (MAX_FOLLOW_UP_BYTES + 1), "raw"), "left", b""),
        (Work(b'"' + b"x" * MAX_FOLLOW_UP_BYTES + b'"'), "left", b""),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_payload_reaches_the_fail_handler_unchanged(work: Work, form: str, payload: bytes) -> None:
    told = msgspec.json.decode(follow_up(job(work), ERROR).payload or b"", type=FollowUp)
    assert told.form == form
    assert told.codec == work.codec
    assert (bytes(told.payload).strip() if form == "json" else msgspec.json.decode(told.payload, type=bytes)) == payload


def test_follow_up_has_all_fields_of_the_job_and_its_priority() -> None:
    failed = job(Work(b"1", priority=8, max_retries=3, timeout_ms=5), attempts=7, retries=3, stalls=2, timeouts=1)
    work = follow_up(failed, ERROR)
    told = msgspec.json.decode(work.payload or b"", type=FollowUp)
    assert work == Work(work.payload, "json", 8)
    assert (told.attempts, told.retries, told.stalls, told.timeouts, told.run_at) == (7, 3, 2, 1, NOW)
    assert told.error == ERROR


@pytest.mark.parametrize("follows_up", [True, False])
def test_only_tasks_with_a_fail_handler_have_a_follow_up(follows_up: bool) -> None:
    failed = verdict(job(), Raised(PERMANENT), replace(TASK, follows_up=follows_up), rng())
    assert isinstance(failed, Fail)
    assert (failed.follow_up is not None) is follows_up


# Errors as data


@pytest.mark.parametrize("error", [ERROR, TOO_LONG, JobError(type="E", message="m", traceback="t", details={"a": [1]})])
def test_error_survives_encoding_and_decoding(error: JobError) -> None:
    assert decode_error(encode_error(error)) == error


@pytest.mark.parametrize(
    ("data", "message"), [(None, ""), (b"", ""), (b"\xffboom", "\ufffdboom"), (b'{"a":1}', '{"a":1}'), (b"3", "3")]
)
def test_error_that_is_not_json_is_shown_as_text(data: bytes | None, message: str) -> None:
    assert decode_error(data) == JobError(type="Error", message=message)


def test_an_error_is_cut_to_the_head_of_its_message_and_the_tail_of_its_traceback() -> None:
    long = JobError(type="E", message="m" * MAX_MESSAGE + "!", kind="stall", traceback="!" + "t" * MAX_TRACEBACK)
    assert truncate_error(long) == JobError(
        type="E", message="m" * (MAX_MESSAGE - 1) + "…", kind="stall", traceback="t" * MAX_TRACEBACK
    )
    assert truncate_error(replace(long, message="m")) == JobError(
        type="E", message="m", kind="stall", traceback="t" * MAX_TRACEBACK
    )
    assert truncate_error(replace(long, traceback="t")).message == "m" * (MAX_MESSAGE - 1) + "…"
    whole = "m" * MAX_MESSAGE
    assert truncate_error(replace(long, message=whole)).message == whole
    short = JobError(type="E", message="m" * MAX_MESSAGE, traceback="t" * MAX_TRACEBACK)
    assert truncate_error(short) is short


def test_only_a_job_that_runs_has_a_fence() -> None:
    assert fence_of(job()) == FENCE
    with pytest.raises(AssertionError):
        fence_of(job(run=None))
