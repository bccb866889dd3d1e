"""Queasy's promises and its flaws, in our verbs; docs/development/seeds.md says which test stands for which.

Fences, extends, sweeps and releases are proved in test_leases.py and not again here.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.events import Topic
from holdfast._core.jobs import Job, LeaseRef, State, Update, Work
from holdfast._core.replies import CancelResult, Placed, SettleResult
from holdfast.errors import LayoutTooNew, OptionError, StorageUnavailable
from holdfast.storage import connect
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence

RUN_AT_RULES = [True, False, "if_later", "if_earlier"]


def counts(job: Job) -> tuple[int, int, int]:
    return job.retries, job.stalls, job.timeouts


# Requests


async def test_a_new_job_waits_with_its_time_its_payload_and_no_counts(stage: Stage) -> None:
    reply = await stage.enqueue("my-id", b"data", run_at=stage.wall(30))
    assert (reply.id, reply.placed, reply.state) == ("my-id", Placed.NEW, None)
    job = await stage.the("my-id")
    assert (job.state, job.run_at, job.payload) == (State.WAITING, stage.wall(30), b"data")
    assert (job.attempts, *counts(job)) == (0, 0, 0, 0)


async def test_claimed_job_has_its_run_at_and_counts(stage: Stage) -> None:
    due_at = stage.wall(5)
    await stage.enqueue("a", run_at=due_at)
    stage.clock.advance(8)
    assert (await stage.claim_one()).run_at == due_at
    await stage.expire()
    again = await stage.claim_one()
    assert (again.run_at, again.attempts, counts(again)) == (due_at, 2, (0, 1, 0))


async def test_an_update_replaces_the_payload_of_a_waiting_job(stage: Stage) -> None:
    await stage.enqueue("a", b"old")
    assert (await stage.enqueue("a", b"new", update=Update())).placed is Placed.UPDATED
    assert [job.payload for job in await stage.claim(2)] == [b"new"]


async def test_an_update_without_payload_keeps_the_stored_one(stage: Stage) -> None:
    await stage.enqueue("a", b"old")
    await stage.enqueue("a", b"new", update=Update(payload=False))
    assert (await stage.the("a")).payload == b"old"


async def test_an_update_without_run_at_keeps_the_first_time(stage: Stage) -> None:
    first = stage.wall(10)
    await stage.enqueue("a", run_at=first)
    await stage.enqueue("a", run_at=stage.wall(99), update=Update(run_at=False))
    assert (await stage.the("a")).run_at == first


@pytest.mark.parametrize(("rule", "expected"), [("if_later", [10, 20]), ("if_earlier", [5, 10])])
async def test_the_rules_for_run_at_take_the_later_or_the_earlier_time(
    stage: Stage, rule: Any, expected: list[float]
) -> None:
    start = stage.wall()
    found: list[float] = []
    for offered in (5, 20):
        await stage.enqueue("a", run_at=start + 10_000_000, update=Update())
        await stage.enqueue("a", run_at=start + offered * 1_000_000, update=Update(run_at=rule))
        found.append(((await stage.the("a")).run_at - start) / 1_000_000)
    assert found == expected


@pytest.mark.parametrize(("reset", "expected"), [(True, (0, 0, 0)), (False, (5, 2, 1))])
async def test_update_resets_the_counts_only_if_requested(
    stage: Stage, reset: bool, expected: tuple[int, int, int]
) -> None:
    await stage.enqueue("a")
    for kind in ["retries"] * 5 + ["stalls"] * 2 + ["timeouts"]:
        await stage.retry(await stage.claim_one(), counts=kind)
    await stage.enqueue("a", update=Update(reset_counts=reset))
    assert counts(await stage.the("a")) == expected


@pytest.mark.parametrize("rule", ["ifLater", "ifEarlier", "true", "", None])
async def test_a_misspelt_rule_for_run_at_is_refused_and_changes_nothing(stage: Stage, rule: Any) -> None:
    await stage.enqueue("a", delay=10)
    before = await stage.the("a")
    with pytest.raises(OptionError):
        await stage.enqueue("a", b"new", update=Update(run_at=rule))
    assert await stage.the("a") == before


@pytest.mark.parametrize("flags", [{"payload": "false"}, {"reset_counts": "false"}, {"payload": 0}, {"run_at": 1}])
async def test_a_flag_that_is_not_a_boolean_is_refused_and_changes_nothing(stage: Stage, flags: Any) -> None:
    await stage.enqueue("a", b"old")
    await stage.claim_one()
    before = await stage.the("a")
    with pytest.raises(OptionError):
        await stage.enqueue("a", b"new", update=Update(**flags))
    assert await stage.the("a") == before


# A request for an id that runs


@pytest.mark.parametrize("when", [{}, {"delay": 0}, {"run_at": 1}, {"delay": 60}], ids=str)
async def test_request_for_a_running_id_never_overlaps_the_run(stage: Stage, when: Any) -> None:
    await stage.enqueue("a", b"1")
    running = await stage.claim_one(lease=3600)
    assert (await stage.enqueue("a", b"2", update=Update(), **when)).placed is Placed.DEFERRED
    stage.clock.advance(600)
    assert await stage.claim(10, worker="w2") == []
    still = await stage.the("a")
    assert (still.payload, still.fence, still.deferred) == (b"1", fence(running), True)


@pytest.mark.parametrize("rule", RUN_AT_RULES)
async def test_a_deferred_request_waits_at_its_own_time_once_the_run_completed(stage: Stage, rule: Any) -> None:
    await stage.enqueue("a", b"1")
    running = await stage.claim_one()
    due_at = stage.wall(60)
    await stage.enqueue("a", b"2", run_at=due_at, update=Update(run_at=rule))
    await stage.complete(running)
    promoted = await stage.the("a")
    assert (promoted.state, promoted.run_at, promoted.payload) == (State.WAITING, due_at, b"2")
    stage.clock.advance(60)
    assert (await stage.claim_one()).payload == b"2"


@pytest.mark.parametrize("rule", RUN_AT_RULES)
async def test_a_deferred_request_without_a_time_is_due_as_soon_as_the_run_failed(stage: Stage, rule: Any) -> None:
    await stage.enqueue("a", b"1")
    running = await stage.claim_one()
    await stage.enqueue("a", b"2", update=Update(run_at=rule))
    await stage.fail(running)
    follower = await stage.claim_one()
    assert (follower.payload, follower.attempts, counts(follower)) == (b"2", 1, (0, 0, 0))


async def test_false_flags_stay_false_when_the_deferred_request_is_merged(stage: Stage) -> None:
    await stage.enqueue("a", b"1")
    running = await stage.claim_one()
    off = Update(payload=False, run_at=False, reset_counts=False)
    await stage.enqueue("a", b"2", delay=600, update=off)
    await stage.retry(running, delay=30)
    merged = await stage.the("a")
    assert (merged.payload, merged.run_at, merged.retries) == (b"1", stage.wall(30), 1)


# Order and time


async def test_claim_takes_due_jobs_in_order_of_run_at(stage: Stage) -> None:
    for id, seconds in (("late", 3), ("early", 1), ("middle", 2)):
        await stage.enqueue(id, delay=seconds)
    stage.clock.advance(3)
    jobs = await stage.claim(2, worker="w1", lease=10)
    assert [(job.id, job.worker) for job in jobs] == [("early", "w1"), ("middle", "w1")]
    assert [job.run.until_at for job in jobs if job.run] == [stage.wall(10)] * 2


async def test_a_job_is_left_alone_until_the_instant_it_is_due(stage: Stage) -> None:
    await stage.enqueue("a", delay=5)
    stage.clock.advance(4.999999)
    assert await stage.claim(10) == []
    stage.clock.advance(0.000001)
    assert [job.id for job in await stage.claim(10)] == ["a"]


async def test_jobs_due_at_the_same_instant_leave_in_the_order_of_their_arrival(stage: Stage) -> None:
    same = stage.wall(1)
    for id in "cabd":
        await stage.enqueue(id, run_at=same)
    stage.clock.advance(1)
    assert "".join(job.id for job in await stage.claim(10)) == "cabd"


async def test_a_due_retry_is_not_starved_by_a_stream_of_new_jobs(stage: Stage) -> None:
    await stage.enqueue("retried")
    await stage.retry(await stage.claim_one(), delay=2)
    for n in range(5):
        stage.clock.advance(1)
        await stage.enqueue(f"new-{n}")
    assert [job.id for job in await stage.claim(3)] == ["new-0", "retried", "new-1"]


async def test_an_idle_claim_says_when_to_ask_again_and_changes_nothing(stage: Stage) -> None:
    await stage.enqueue("later", delay=40)
    before = await stage.stats()
    for _ in range(3):
        claim = await stage.storage.claim("q", 10, worker="w1", lease_ms=1000)
        assert (claim.jobs, claim.next_run_at, claim.next_sweep_at) == ([], stage.wall(40), None)
    assert await stage.stats() == before


async def test_one_wrong_clock_reading_takes_back_no_live_lease(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one(lease=10)
    for _ in range(3):
        stage.clock.advance(3600)
        assert (await stage.sweep()).stalled == []
        stage.clock.advance(-3600)
        assert (await stage.extend(job)).lost == []
    assert await stage.complete(job) is SettleResult.OK


# Ends


async def test_a_cancelled_job_never_runs_and_leaves_the_others_alone(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.enqueue("b")
    assert await stage.cancel("a") is CancelResult.CANCELLED
    assert [job.id for job in await stage.claim(10)] == ["b"]
    assert (await stage.the("a")).state is State.CANCELLED


async def test_a_cancel_of_an_unknown_id_finds_nothing(stage: Stage) -> None:
    await stage.enqueue("a")
    reply = await stage.cancel("nobody")
    assert reply is CancelResult.MISSING
    assert not reply


async def test_completed_job_has_no_lease(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.complete(job)
    done = await stage.the("a")
    assert (done.state, done.run, done.worker) == (State.COMPLETED, None, "w1")
    assert (await stage.stats()).running == 0


async def test_job_without_ttl_is_gone_from_every_index_once_completed(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id, custom_id=False)
    for job in await stage.claim(3):
        await stage.complete(job, None, ttl=0)
    assert await stage.storage.get("q", ["a", "b", "c"]) == [None] * 3
    stats = await stage.stats()
    assert ((await stage.storage.scan("q")).jobs, stats.running, stats.completed) == ([], 0, 0)


async def test_retry_waits_until_its_time_and_is_counted(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one(), delay=2)
    job = await stage.the("a")
    assert (job.state, job.run_at, counts(job), job.worker) == (State.WAITING, stage.wall(2), (1, 0, 0), None)


@pytest.mark.parametrize("seconds", [-5, 0.25, 7200])
async def test_a_retry_at_a_given_time_runs_at_that_time_and_no_other(stage: Stage, seconds: float) -> None:
    await stage.enqueue("a")
    stage.clock.advance(60)
    wanted = stage.wall(seconds)
    await stage.retry(await stage.claim_one(), run_at=wanted)
    assert (await stage.the("a")).run_at == wanted


async def test_storage_counts_past_limits_because_policy_enforces_them(stage: Stage) -> None:
    await stage.enqueue("a", max_retries=3, max_stalls=3)
    for kind in ["retries"] * 101 + ["stalls"] * 100:
        await stage.retry(await stage.claim_one(), counts=kind)
    await stage.claim_one()
    await stage.expire()
    assert counts(await stage.the("a")) == (101, 101, 0)


async def test_a_failure_enqueues_its_follow_up_and_ends_the_run(stage: Stage) -> None:
    reply = await stage.enqueue("a", b"data")
    await stage.fail(await stage.claim_one(), b"boom", follow_up=Work(b"[data, error]"))
    failed = await stage.the("a")
    assert (failed.state, failed.run, failed.payload) == (State.FAILED, None, b"data")
    (follow_up,) = await Stage(stage.storage, stage.clock, "q/failed").claim(10)
    assert (follow_up.id, follow_up.payload) == (f"a@{reply.generation}", b"[data, error]")


async def test_a_failure_without_a_follow_up_is_listed_and_not_lost(stage: Stage) -> None:
    await stage.enqueue("a", b"data")
    await stage.fail(await stage.claim_one(), b"boom")
    (listed,) = (await stage.storage.scan("q", state=State.FAILED)).jobs
    assert listed.id == "a"
    assert listed.outcome is not None
    assert listed.outcome.error == b"boom"


async def test_worker_that_claims_other_jobs_does_not_regain_its_lost_lease(stage: Stage) -> None:
    await stage.enqueue("a")
    lost = await stage.claim_one(worker="zombie")
    await stage.expire()
    await stage.claim_one(worker="w2")
    await stage.enqueue("b")
    other = await stage.claim_one(worker="zombie")
    leases = [LeaseRef("a", fence(lost)), LeaseRef("b", fence(other))]
    extended = await stage.storage.extend("q", leases, worker="zombie", lease_ms=10_000)
    assert extended.lost == leases[:1]


async def test_an_extend_of_a_lease_that_was_never_given_is_lost(stage: Stage) -> None:
    await stage.enqueue("a")
    strangers = [LeaseRef("a", 1), LeaseRef("nobody", 1)]
    assert (await stage.storage.extend("q", strangers, worker="w1", lease_ms=1000)).lost == strangers


# The storage itself


async def test_a_storage_that_is_not_open_refuses_every_verb(
    harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    storage = harness.open(clock, tmp_path)
    stage = Stage(storage, clock)
    for _ in ("before it was opened", "after it was closed"):
        for call in (stage.enqueue, stage.claim, stage.cancel, stage.get, stage.sweep, stage.stats):
            with pytest.raises(StorageUnavailable):
                await call()
        with pytest.raises(StorageUnavailable):
            async with storage.subscribe(Topic("q")):
                pass
        async with storage:
            await stage.enqueue("a")


async def test_unreadable_record_blocks_neither_claim_nor_sweep(clock: ManualClock, tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db", clock=clock) as storage:
        stage = Stage(storage, clock)
        await stage.enqueue("bad")
        await stage.claim_one(worker="dead")
        await stage.enqueue("good")
        _damage(tmp_path / "jobs.db", "UPDATE holdfast_jobs SET rest = x'00' WHERE id = x'626164'")
        await stage.expire()
        assert [job.id for job in await stage.claim(10)] == ["good"]
        assert (await stage.the("bad")).state is State.FAILED
        assert await stage.problems() == []


@pytest.mark.parametrize("facts", [{"queues": [1]}, {"load": 0.5}], ids=str)
async def test_worker_with_a_malformed_announcement_blocks_no_other(stage: Stage, facts: Any) -> None:
    with contextlib.suppress(OptionError):
        await stage.storage.announce("odd", facts, ttl_ms=1000)
    await stage.storage.announce("good", {"queues": ["q"]}, ttl_ms=1000)
    await stage.enqueue("a")
    assert (await stage.stats()).workers == ["good"]


async def test_a_file_of_a_newer_layout_is_refused_with_a_clear_error(clock: ManualClock, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with connect(url, clock=clock):
        pass
    _damage(tmp_path / "jobs.db", "UPDATE holdfast_meta SET value = value + 1 WHERE key = 'layout'")
    with pytest.raises(LayoutTooNew, match="layout"):
        async with connect(url, clock=clock):
            pass


def _damage(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)


# Whole histories


@pytest.mark.parametrize("seed", range(3))
async def test_random_histories_have_no_overlap_no_early_start_and_keep_the_order(stage: Stage, seed: int) -> None:
    rng = random.Random(seed)
    held: dict[str, Job] = {}
    completed: Counter[tuple[str, int]] = Counter()
    for _ in range(250):
        stage.clock.advance(rng.choice([0, 0, 0.5, 3]))
        for id in (await stage.sweep()).stalled:
            del held[id]
        await stage.enqueue(rng.choice("abcdef"), delay=rng.choice([None, 2, 9]), update=rng.choice([None, Update()]))
        claimed = await stage.claim(rng.randint(1, 3), lease=8)
        waiting = (await stage.storage.scan("q", state=State.WAITING)).jobs
        line = [(job.run_at, job.arrival) for job in claimed + [job for job in waiting if job.run_at <= stage.wall()]]
        assert line == sorted(line)
        for job in claimed:
            assert job.id not in held
            assert job.run_at <= stage.wall()
            assert not completed[job.id, job.generation]
            held[job.id] = job
        for job in rng.sample(list(held.values()), k=len(held) // 2):
            settle: Any = rng.choice([stage.complete, stage.complete, stage.fail, stage.retry, stage.release])
            assert await settle(held.pop(job.id)) is SettleResult.OK
            completed[job.id, job.generation] += settle == stage.complete
    assert completed
