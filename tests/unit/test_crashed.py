"""A run whose process died: how that is settled, and which jobs must run alone from then on."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast._core.failure import decode_error
from holdfast._core.jobs import Fail, Job, RetrySettlement, Settlement, StoredLease, Work
from holdfast._core.retry_policy import Crashed, Policy, admit, is_suspect, verdict
from holdfast.errors import JobError
from tests.policies import FAIL_HANDLER, PULL, TASK

NOW = 1_800_000_000_000_000
FENCE = NOW + 7
ERROR = JobError(type="Crashed", kind="stall", message="its process died: it was killed by SIGSEGV")
ONCE = replace(TASK, at_most_once=True)


def job(stalls: int = 0, **limits: Any) -> Job:
    run = StoredLease("w", FENCE, 10_000, NOW + 10_000_000)
    return Job("a", Work(b"{}", **limits), NOW, NOW, NOW, run=run, attempts=stalls + 1, stalls=stalls)


def settled(policy: Policy, stalls: int, **limits: Any) -> Settlement:
    return verdict(job(stalls, **limits), Crashed(ERROR), policy, random.Random(1))


@pytest.mark.parametrize("policy", [TASK, FAIL_HANDLER, PULL])
def test_a_first_crash_is_one_stall_and_the_job_runs_again_at_once(policy: Policy) -> None:
    settlement = settled(policy, 0)
    assert isinstance(settlement, RetrySettlement)
    assert (settlement.counts, settlement.delay_ms, settlement.fence) == ("stalls", 0, FENCE)
    assert decode_error(settlement.error) == ERROR


def test_each_later_crash_makes_the_job_wait_longer() -> None:
    policy = replace(TASK, max_stalls=None)
    delays = []
    for stalls in (1, 2, 3, 4):
        settlement = settled(policy, stalls)
        assert isinstance(settlement, RetrySettlement)
        delays.append(settlement.delay_ms)
    assert delays[0] >= policy.min_backoff_ms
    assert delays == sorted(set(delays))


@pytest.mark.parametrize(("stalls", "limit", "fails"), [(0, 0, True), (0, 1, False), (1, 1, True), (2, 3, False)])
@pytest.mark.parametrize("own", [True, False])
def test_a_limit_of_n_stalls_allows_n(stalls: int, limit: int, fails: bool, own: bool) -> None:
    settlement = settled(TASK, stalls, max_stalls=limit) if own else settled(replace(TASK, max_stalls=limit), stalls)
    assert isinstance(settlement, Fail if fails else RetrySettlement)


def test_job_that_crashed_too_often_fails_with_the_cause_and_a_follow_up() -> None:
    settlement = settled(replace(TASK, follows_up=True), 3)
    assert isinstance(settlement, Fail)
    assert decode_error(settlement.error) == replace(ERROR, attempts=4)
    assert settlement.follow_up is not None
    assert settlement.failure_ttl_ms == TASK.failure_ttl_ms


def test_a_job_that_may_run_only_once_fails_when_its_process_dies() -> None:
    settlement = settled(ONCE, 0, max_stalls=5)
    assert isinstance(settlement, Fail)
    assert decode_error(settlement.error).kind == "stall"


@pytest.mark.parametrize(
    ("stalls", "own", "usual", "alone"),
    [
        (0, None, 3, False),
        (1, None, 3, False),
        (2, None, 3, True),
        (3, None, 3, True),
        (2, None, None, True),
        (1, None, None, False),
        (1, None, 2, False),
        (1, None, 1, True),
        (0, None, 1, False),
        (0, None, 0, False),
        (1, 1, 3, True),
        (1, 5, 1, False),
        (2, 5, 1, True),
    ],
)
def test_a_job_runs_alone_if_it_stalled_twice_or_may_not_stall_again(
    stalls: int, own: int | None, usual: int | None, alone: bool
) -> None:
    limits = {} if own is None else {"max_stalls": own}
    assert is_suspect(job(stalls, **limits), replace(TASK, max_stalls=usual)) is alone


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_crash_never_fails_a_job_that_did_not_run_alone(limit: int) -> None:
    """Its neighbours may have killed every process it ever ran in."""
    policy = replace(TASK, max_stalls=limit)
    for stalls in range(limit + 1):
        assert admit(job(stalls), policy) is None
        if isinstance(settled(policy, stalls), Fail):
            assert is_suspect(job(stalls), policy)
