"""The machine by itself: what is easier to see on a record than through a storage."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.jobs import Job, Next, Outcome, Request, RetrySettlement, State, StoredLease, Work
from holdfast._core.lifecycle import Answer
from holdfast._core.replies import Placed
from tools.transitions import TRANSITIONS, Act, Phase, phase_of

NOW = 1_800_000_000_000_000
DAY_US = 86_400_000_000
WAITING = Job("a", Work(b"1"), NOW, NOW, NOW)
LEASE = StoredLease("w", NOW, 10_000, NOW + 10_000_000)
RUNNING = replace(WAITING, run=LEASE)
NEXT = Next(NOW + 5, Work(b"2"), NOW, NOW + 5)


def ended(state: State, *, forget_at: int = NOW + DAY_US, dedup_at: int = 0, generation: int = NOW) -> Outcome:
    return Outcome(generation, state, NOW, forget_at, dedup_at)


def test_the_table_has_a_row_for_every_phase_and_uses_every_act() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert {act for acts in TRANSITIONS.values() for act in acts} == set(Act)


@pytest.mark.parametrize(
    ("job", "phase"),
    [
        (None, Phase.NONE),
        (WAITING, Phase.WAITING),
        (RUNNING, Phase.RUNNING),
        (replace(WAITING, run=replace(LEASE, next=NEXT)), Phase.DEFERRED),
        (replace(WAITING, run=replace(LEASE, cancel_asked=True)), Phase.CANCELLING),
        (replace(WAITING, run=replace(LEASE, cancel_asked=True, next=NEXT)), Phase.CANCELLING_DEFERRED),
        (replace(WAITING, outcome=ended(State.COMPLETED, dedup_at=NOW + 1)), Phase.COMPLETED),
        (replace(WAITING, outcome=ended(State.COMPLETED, dedup_at=NOW)), Phase.STALE),
        (replace(WAITING, outcome=ended(State.COMPLETED, dedup_at=NOW - 1)), Phase.STALE),
        (replace(WAITING, outcome=ended(State.COMPLETED, forget_at=NOW, dedup_at=NOW)), Phase.NONE),
        (replace(WAITING, outcome=ended(State.FAILED)), Phase.FAILED),
        (replace(WAITING, outcome=ended(State.FAILED, dedup_at=NOW + 1)), Phase.REMEMBERED),
        (replace(WAITING, outcome=ended(State.FAILED, dedup_at=NOW)), Phase.FAILED),
        (replace(WAITING, outcome=ended(State.CANCELLED)), Phase.CANCELLED),
        (replace(WAITING, outcome=ended(State.FAILED, forget_at=NOW - 1)), Phase.NONE),
    ],
)
def test_a_record_is_in_the_phase_that_its_parts_name(job: Job | None, phase: Phase) -> None:
    assert phase_of(job, NOW) is phase


@pytest.mark.parametrize(("late_us", "there"), [(-1, True), (0, False), (1, False), (DAY_US, False)])
def test_write_drops_a_previous_outcome_from_its_forget_time_on(late_us: int, there: bool) -> None:
    job = replace(WAITING, previous=ended(State.COMPLETED, forget_at=NOW))
    assert (lifecycle.tidy(job, NOW + late_us).previous is not None) is there


@pytest.mark.parametrize("counts", ["retries", "stalls", "timeouts"])
def test_every_retry_adds_one_to_the_count_that_it_names(counts: Literal["retries", "stalls", "timeouts"]) -> None:
    job = replace(RUNNING, retries=1, stalls=3, timeouts=5)
    again = lifecycle.settle(job, RetrySettlement("a", NOW, counts=counts), QueueTime(last_at=NOW, last_stamp=NOW)).job
    assert again is not None
    added = {name: getattr(again, name) - getattr(job, name) for name in ("retries", "stalls", "timeouts")}
    assert added == {name: int(name == counts) for name in added}


@pytest.mark.parametrize(
    ("late_us", "placed"), [(-1, Placed.COMPLETED), (0, Placed.NEW), (1, Placed.NEW), (1_000_000, Placed.NEW)]
)
def test_keep_is_answered_from_the_cache_until_dedup_ttl_and_never_after(late_us: int, placed: Placed) -> None:
    job = replace(WAITING, outcome=ended(State.COMPLETED, dedup_at=NOW))
    _, reply = lifecycle.enqueue(job, Request("a", Work(b"2")), QueueTime(last_at=NOW + late_us))
    assert reply.placed is placed


def test_damaged_record_is_listed_as_a_failure_for_a_week() -> None:
    job = lifecycle.damaged("a", b"left", NOW)
    assert (job.state, job.payload) == (State.FAILED, b"left")
    assert job.outcome == Outcome(NOW, State.FAILED, NOW, NOW + 7 * DAY_US, error=lifecycle.DAMAGED)


def test_cancelled_job_is_kept_an_hour_by_default_and_at_least_a_minute() -> None:
    for ttl_ms, remembered_us in ((None, 3_600_000_000), (0, 60_000_000), (120_000, 120_000_000)):
        step, _ = lifecycle.cancel(replace(WAITING, work=Work(b"1", result_ttl_ms=ttl_ms)), NOW)
        assert step.job is not None
        assert step.job.outcome is not None
        assert step.job.outcome.forget_at == NOW + remembered_us


@pytest.mark.parametrize(
    ("job", "generation", "told"),
    [
        (None, NOW, Answer.FORGOTTEN),
        (WAITING, NOW, Answer.PENDING),
        (WAITING, NOW + 1, Answer.DROPPED),
        (replace(WAITING, run=replace(LEASE, next=NEXT)), NOW + 5, Answer.PENDING),
        (replace(WAITING, run=replace(LEASE, next=NEXT)), NOW + 6, Answer.DROPPED),
        (replace(WAITING, outcome=ended(State.FAILED)), NOW, ended(State.FAILED)),
        (replace(WAITING, outcome=ended(State.FAILED)), NOW + 1, Answer.DROPPED),
    ],
)
def test_waiter_gets_the_oldest_outcome_not_older_than_its_request(
    job: Job | None, generation: int, told: Outcome | Answer
) -> None:
    assert lifecycle.answer(job, generation) == told


def test_older_of_two_outcomes_answers_requests_up_to_its_generation() -> None:
    earlier, later = ended(State.COMPLETED, generation=NOW - 10), ended(State.FAILED)
    job = replace(WAITING, previous=earlier, outcome=later)
    assert lifecycle.answer(job, NOW - 20) == earlier
    assert lifecycle.answer(job, NOW - 10) == earlier
    assert lifecycle.answer(job, NOW - 9) == later
