"""Enqueue of an id that runs: the `next` of a running job, restarts, and batches."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import msgspec
import pytest

from holdfast._core.jobs import Outcome, Request, State, Update, Work
from holdfast._core.replies import Enqueued, Placed, SettleResult
from holdfast.storage.conformance.updates import (
    ASKED,
    ASKED_WORK,
    EARLIER,
    ENDED,
    ENDS,
    LATER,
    LIVE,
    RESETS_COUNTS,
    RETURNS,
    RULES,
    STORED_WORK,
    TAKES_RUN_AT,
    UPDATES,
    Arrange,
    End,
    RunAt,
    complete,
    counts,
    custom_id,
    fail,
    failed,
    ready,
    release,
    rules_of,
    running,
)
from holdfast.storage.conformance.verbs import Stage

# update, while the job runs


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_an_update_of_a_running_job_is_deferred_and_leaves_the_run_alone(stage: Stage, update: Update) -> None:
    before = await running(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", b"asked", update=update, **ASKED)
    assert reply == Enqueued("a", Placed.DEFERRED, stage.wall(), State.RUNNING)
    job = await stage.the("a")
    assert job.deferred
    assert (job.work, job.generation, job.fence, counts(job)) == (
        before.work,
        before.generation,
        before.fence,
        (1, 1, 1),
    )


@pytest.mark.parametrize("end", ENDS, ids=custom_id)
@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_a_promoted_next_is_its_own_full_request_whatever_its_rules(
    stage: Stage, update: Update, end: End
) -> None:
    run = await running(stage)
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    run_at = stage.wall(60)
    stage.clock.advance(1)
    assert await end(stage, run) is SettleResult.OK
    job = await stage.the("a")
    assert (job.state, job.work, job.generation, job.run_at) == (State.WAITING, ASKED_WORK, reply.generation, run_at)
    assert (job.attempts, *counts(job), job.error) == (0, 0, 0, 0, None)


@pytest.mark.parametrize("end", ENDS, ids=custom_id)
async def test_a_promotion_keeps_the_ended_outcome_as_previous(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"asked", update=Update())
    stage.clock.advance(1)
    await end(stage, run)
    previous = (await stage.the("a")).previous
    state, result, error = {"complete": (State.COMPLETED, b"result", None), "fail": (State.FAILED, None, b"error")}[
        end.__name__
    ]
    assert previous is not None
    assert (previous.generation, previous.state, previous.ended_at) == (run.generation, state, stage.wall())
    assert (previous.result, previous.error) == (result, error)


async def test_a_promoted_next_does_not_start_before_its_time(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(), delay=60)
    await stage.complete(run)
    stage.clock.advance(59.999999)
    assert await stage.claim() == []
    stage.clock.advance(0.000001)
    assert (await stage.claim_one()).attempts == 1


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("end", RETURNS, ids=custom_id)
@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
async def test_a_merge_applies_the_settlement_then_the_rules_and_resets_counts_last(
    stage: Stage, update: Update, end: End, when: str
) -> None:
    run = await running(stage)
    stage.clock.advance(1)
    asked_at = stage.wall(LATER if when == "later" else EARLIER)
    reply = await stage.enqueue("a", b"asked", update=update, run_at=asked_at, **ASKED)
    assert await end(stage, run) is SettleResult.OK
    settled_run_at = {"retry": stage.wall(50), "release": run.run_at, "stall": stage.wall(10)}[end.__name__]
    settled_counts = {"retry": (2, 1, 1), "release": (1, 1, 1), "stall": (1, 2, 1)}[end.__name__]
    job = await stage.the("a")
    assert job.work == (ASKED_WORK if update.payload else STORED_WORK)
    assert job.run_at == (asked_at if TAKES_RUN_AT[update.run_at, when] else settled_run_at)
    assert counts(job) == ((0, 0, 0) if RESETS_COUNTS[update.payload, update.reset_counts] else settled_counts)
    assert (job.state, job.generation, job.attempts) == (State.WAITING, reply.generation, 4)
    assert job.previous is None


@pytest.mark.parametrize("end", RETURNS, ids=custom_id)
async def test_a_merge_lasts_as_long_as_one_run_and_is_not_deferred_any_more(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"asked", update=Update())
    assert (await stage.stats()).deferred == 1
    await end(stage, run)
    assert (await stage.stats()).deferred == 0
    assert not (await stage.claim_one()).deferred


@pytest.mark.parametrize("rule", [True, "if_earlier"])
async def test_an_update_without_a_time_means_its_own_now_also_on_a_merge(
    stage: Stage, rule: Literal[True, "if_earlier"]
) -> None:
    run = await running(stage)
    stage.clock.advance(1)
    asked_at = stage.wall()
    await stage.enqueue("a", update=Update(run_at=rule))
    stage.clock.advance(1)
    await stage.retry(run, delay=50)
    assert (await stage.the("a")).run_at == asked_at
    assert (await stage.claim_one()).id == "a"


async def test_update_without_a_time_does_not_shorten_a_backoff_under_if_later(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(run_at="if_later"))
    await stage.retry(run, delay=50)
    assert (await stage.the("a")).run_at == stage.wall(50)


SECOND_RUN_AT: dict[tuple[RunAt, str], Literal["first", "second"]] = {
    pair: "second" if takes else "first" for pair, takes in TAKES_RUN_AT.items()
}
"""Whose time a `next` has after a second update, by the second's rule and whether its time is later."""
RULE_OF_BOTH: dict[tuple[RunAt, RunAt], RunAt] = {
    (first, second): True if first is True else second for first, second in product(RULES, RULES)
}
"""Once taken stays taken; of the others the newer rule replaces the older."""
FIRST_S, BACKOFF_S = 100, 130
SECOND_S = {"later": 200, "earlier": 50}


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", RULES)
async def test_two_updates_of_run_at_promoted_by_completion(
    stage: Stage, first: RunAt, second: RunAt, when: str
) -> None:
    run = await running(stage)
    times = {"first": stage.wall(FIRST_S), "second": stage.wall(SECOND_S[when])}
    await stage.enqueue("a", update=Update(run_at=first), run_at=times["first"])
    await stage.enqueue("a", update=Update(run_at=second), run_at=times["second"])
    await stage.complete(run)
    assert (await stage.the("a")).run_at == times[SECOND_RUN_AT[second, when]]


@pytest.mark.parametrize("when", ["later", "earlier"])
@pytest.mark.parametrize("second", RULES)
@pytest.mark.parametrize("first", RULES)
async def test_two_updates_of_run_at_merged_into_a_retry(stage: Stage, first: RunAt, second: RunAt, when: str) -> None:
    run = await running(stage)
    times = {"first": FIRST_S, "second": SECOND_S[when]}
    await stage.enqueue("a", update=Update(run_at=first), delay=times["first"])
    await stage.enqueue("a", update=Update(run_at=second), delay=times["second"])
    await stage.retry(run, delay=BACKOFF_S)
    asked = times[SECOND_RUN_AT[second, when]]
    taken = TAKES_RUN_AT[RULE_OF_BOTH[first, second], "later" if asked > BACKOFF_S else "earlier"]
    assert (await stage.the("a")).run_at == stage.wall(asked if taken else BACKOFF_S)


@pytest.mark.parametrize(
    ("first", "second", "merged", "promoted"),
    [
        (True, True, b"second", b"second"),
        (True, False, b"first", b"first"),
        (False, True, b"second", b"second"),
        (False, False, b"stored", b"first"),
    ],
)
@pytest.mark.parametrize("end", [release, complete], ids=custom_id)
async def test_payload_taken_by_the_first_of_two_updates_stays(
    stage: Stage, end: End, first: bool, second: bool, merged: bytes, promoted: bytes
) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"first", update=Update(payload=first))
    await stage.enqueue("a", b"second", update=Update(payload=second))
    await end(stage, run)
    assert (await stage.the("a")).payload == (merged if end is release else promoted)


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_of_two_updates_either_may_reset_the_counts(stage: Stage, first: bool, second: bool) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update(reset_counts=first))
    await stage.enqueue("a", update=Update(reset_counts=second))
    await stage.release(run)
    assert counts(await stage.the("a")) == ((0, 0, 0) if first or second else (1, 1, 1))


async def test_a_second_update_is_deferred_too_and_gives_next_its_generation(stage: Stage) -> None:
    run = await running(stage)
    first = await stage.enqueue("a", b"first", update=Update())
    second = await stage.enqueue("a", b"second", update=Update(payload=False, run_at=False))
    assert (second.placed, second.state) == (Placed.DEFERRED, State.RUNNING)
    assert second.generation > first.generation > run.generation
    await stage.complete(run)
    assert (await stage.the("a")).generation == second.generation


async def test_three_updates_of_one_run_make_one_more_run(stage: Stage) -> None:
    run = await running(stage)
    for payload in (b"first", b"second", b"third"):
        await stage.enqueue("a", payload, update=Update())
    await stage.complete(run)
    again = await stage.claim_one()
    assert again.payload == b"third"
    await stage.complete(again)
    assert await stage.claim() == []


# cancel and next


@pytest.mark.parametrize("end", [fail, *RETURNS], ids=custom_id)
async def test_a_cancel_drops_next_and_the_run_ends_cancelled(stage: Stage, end: End) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    assert not (await stage.the("a")).deferred
    await end(stage, run)
    job = await stage.the("a")
    assert (job.state, job.generation) == (State.CANCELLED, run.generation)


async def test_a_cancel_that_loses_the_race_leaves_the_job_completed(stage: Stage) -> None:
    run = await running(stage)
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.complete(run)
    assert (await stage.the("a")).state is State.COMPLETED


@pytest.mark.parametrize("update", UPDATES, ids=rules_of)
@pytest.mark.parametrize("end", [*ENDS, *RETURNS], ids=custom_id)
async def test_a_next_set_after_the_cancel_is_promoted_and_never_merged(stage: Stage, end: End, update: Update) -> None:
    run = await running(stage)
    await stage.enqueue("a", b"dropped", update=Update())
    await stage.cancel("a")
    reply = await stage.enqueue("a", b"asked", update=update, delay=60, **ASKED)
    run_at = stage.wall(60)
    assert (reply.placed, reply.state) == (Placed.DEFERRED, State.RUNNING)
    await end(stage, run)
    job = await stage.the("a")
    assert (job.state, job.work, job.generation, job.run_at) == (State.WAITING, ASKED_WORK, reply.generation, run_at)
    assert (job.attempts, *counts(job)) == (0, 0, 0, 0)
    assert job.previous is not None
    assert (job.previous.generation, job.previous.state) == (
        run.generation,
        State.COMPLETED if end is complete else State.CANCELLED,
    )


async def test_a_second_cancel_drops_the_next_that_was_set_after_the_first(stage: Stage) -> None:
    run = await running(stage)
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())
    await stage.cancel("a")
    await stage.release(run)
    assert (await stage.the("a")).state is State.CANCELLED


# previous


async def test_a_merge_keeps_the_previous_outcome_of_an_earlier_generation(stage: Stage) -> None:
    before = await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.release(run)
    assert (await stage.the("a")).previous == before.outcome


async def test_a_new_outcome_takes_the_place_of_the_previous_one(stage: Stage) -> None:
    await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete(run)
    previous: Outcome | None = (await stage.the("a")).previous
    assert previous is not None
    assert (previous.generation, previous.state) == (run.generation, State.COMPLETED)


async def test_a_promotion_whose_outcome_is_not_remembered_keeps_the_previous_one(stage: Stage) -> None:
    before = await failed(stage)
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete(run, ttl=0)
    assert (await stage.the("a")).previous == before.outcome


# the operator's retry


RETRY = {"payload": None, "update": Update(payload=False)}


@pytest.mark.parametrize("arrange", ENDED, ids=custom_id)
async def test_operator_retry_restarts_a_failed_or_cancelled_job_with_its_payload(
    stage: Stage, arrange: Arrange
) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", Placed.NEW, stage.wall(), before.state)
    job = await stage.claim_one()
    assert (job.work, job.attempts, *counts(job)) == (STORED_WORK, 1, 0, 0, 0)
    assert job.previous == before.outcome


@pytest.mark.parametrize("arrange", LIVE, ids=custom_id)
async def test_operator_retry_of_a_live_job_is_a_duplicate_and_changes_nothing(stage: Stage, arrange: Arrange) -> None:
    before = await arrange(stage)
    stage.clock.advance(1)
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", Placed.DUPLICATE, before.generation, before.state)
    assert await stage.the("a") == before


async def test_operator_retry_of_a_missing_job_places_nothing(stage: Stage) -> None:
    assert await stage.enqueue("a", **RETRY) == Enqueued("a", None)  # type: ignore[arg-type]
    assert await stage.get("a") is None


@pytest.mark.parametrize("age", [0, 10], ids=["fresh", "past dedup_ttl"])
async def test_operator_retry_of_a_completed_job_places_nothing(stage: Stage, age: float) -> None:
    await ready(stage)
    await stage.complete(await stage.claim_one(), ttl=100, dedup=10)
    stage.clock.advance(age)
    before = await stage.the("a")
    reply = await stage.enqueue("a", **RETRY)  # type: ignore[arg-type]
    assert reply == Enqueued("a", None, state=State.COMPLETED)
    assert await stage.the("a") == before


async def test_operator_retry_of_a_forgotten_failure_places_nothing(stage: Stage) -> None:
    await failed(stage)
    stage.clock.advance(86_400)
    assert await stage.enqueue("a", **RETRY) == Enqueued("a", None)  # type: ignore[arg-type]
    assert await stage.get("a") is None


# batches


def request(payload: bytes | None = b"payload", update: Update | None = None, id: str = "a") -> Request:
    return Request(id, Work(payload), update=update, custom_id=True)


def placed(replies: list[Enqueued]) -> list[Placed | None]:
    return [reply.placed for reply in replies]


async def test_one_id_several_times_in_a_batch_is_applied_in_order(stage: Stage) -> None:
    replies = await stage.storage.enqueue(
        "q", [request(b"1"), request(b"2"), request(b"3", Update()), request(b"4", Update(payload=False))]
    )
    assert placed(replies) == [Placed.NEW, Placed.DUPLICATE, Placed.UPDATED, Placed.UPDATED]
    new, duplicate, third, fourth = (reply.generation for reply in replies)
    assert new == duplicate < third < fourth
    job = await stage.the("a")
    assert (job.payload, job.generation) == (b"3", fourth)


async def test_one_running_id_several_times_in_a_batch_is_applied_in_order(stage: Stage) -> None:
    run = await running(stage)
    replies = await stage.storage.enqueue(
        "q", [request(b"1", Update()), request(b"2"), request(b"3", Update(payload=False)), request(b"4", Update())]
    )
    assert placed(replies) == [Placed.DEFERRED, Placed.DUPLICATE, Placed.DEFERRED, Placed.DEFERRED]
    await stage.complete(run)
    job = await stage.the("a")
    assert (job.payload, job.generation) == (b"4", replies[-1].generation)


async def test_a_finished_id_several_times_in_a_batch_restarts_once(stage: Stage) -> None:
    await failed(stage)
    retry_by_hand = request(None, Update(payload=False))
    replies = await stage.storage.enqueue("q", [retry_by_hand, retry_by_hand, request(b"2", Update())])
    assert placed(replies) == [Placed.NEW, Placed.DUPLICATE, Placed.UPDATED]
    assert [reply.state for reply in replies] == [State.FAILED, State.WAITING, State.WAITING]


async def test_item_that_places_nothing_does_not_affect_its_batch(stage: Stage) -> None:
    replies = await stage.storage.enqueue(
        "q", [request(id="b"), request(None, Update(payload=False)), request(b"1"), request(id="c")]
    )
    assert placed(replies) == [Placed.NEW, None, Placed.NEW, Placed.NEW]
    assert [job.id for job in await stage.claim(5)] == ["b", "a", "c"]


async def test_every_request_of_a_batch_has_its_own_generation(stage: Stage) -> None:
    replies = await stage.storage.enqueue("q", [request(id=f"{n}") for n in range(50)])
    generations = [reply.generation for reply in replies]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("known", ["0", "49", "50", "119"])
async def test_batch_of_new_ids_may_contain_an_existing_id(stage: Stage, known: str) -> None:
    (before,) = await stage.storage.enqueue("q", [Request(known, Work(b"payload"))])
    replies = await stage.storage.enqueue("q", [Request(f"{n}", Work(b"payload")) for n in range(120)])
    assert {reply.id for reply in replies if reply.placed is not Placed.NEW} == {known}
    assert replies[int(known)] == Enqueued(known, Placed.DUPLICATE, before.generation, State.WAITING)
    stats = await stage.stats()
    assert (stats.ready, stats.totals["enqueued"]) == (120, 120)


async def test_batch_of_new_ids_may_contain_an_id_twice(stage: Stage) -> None:
    names = [f"{n}" for n in range(100)] + ["7"]
    replies = await stage.storage.enqueue("q", [Request(name, Work(b"payload")) for name in names])
    assert [reply.placed for reply in replies] == [Placed.NEW] * 100 + [Placed.DUPLICATE]
    assert replies[100].generation == replies[7].generation
    assert (await stage.stats()).totals["enqueued"] == 100


@pytest.mark.parametrize("asked", [{}, {"delay": 5}, {"run_at": True}, {"keep": 30}, {"update": Update()}], ids=str)
async def test_a_new_job_is_the_same_whether_or_not_its_id_was_chosen(stage: Stage, asked: dict[str, Any]) -> None:
    if "run_at" in asked:
        asked = {"run_at": stage.wall(5)}
    chosen = await stage.enqueue("chosen", b"asked", **ASKED, **asked)
    given = await stage.enqueue("given", b"asked", custom_id=False, **ASKED, **asked)
    assert (given.placed, given.generation) == (Placed.NEW, chosen.generation + 1)
    job = await stage.the("given")
    assert job.arrival == job.generation == given.generation
    first = {"id": "chosen", "custom_id": True, "generation": chosen.generation, "arrival": chosen.generation}
    assert msgspec.structs.replace(job, **first) == await stage.the("chosen")
