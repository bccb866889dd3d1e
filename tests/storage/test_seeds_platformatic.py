"""The Platformatic job-queue's promises to producers, in our verbs: deduplication, results, waiting, cancel, queues.

What it promises of recovery, events and storages is in test_seeds_platformatic_storage.py;
docs/development/seeds.md has the list.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from holdfast._client import waiters
from holdfast._client.waiters import wait
from holdfast._core.jobs import Complete, Outcome, State, Update
from holdfast._core.replies import CancelResult, Enqueued, KeepResult, Placed, SettleResult
from holdfast.errors import JobForgotten, OptionError, WaitTimeout
from tests.storage.stage import Stage, fence


async def waiting(stage: Stage, reply: Enqueued, seconds: float = 10) -> Outcome:
    return await wait(stage.storage, stage.queue, reply.id, reply.generation, wait_s=seconds)


async def awaited(stage: Stage, *ids: str) -> None:
    """Let the waiters get as far as having asked for the outcomes of these jobs."""
    async with asyncio.timeout(10):
        while not all([(await stage.the(id)).keep_until_at for id in ids]):  # noqa: ASYNC110, the record is all we have
            await asyncio.sleep(0)


# The same id again


async def test_enqueue_of_a_waiting_id_keeps_the_first_request(stage: Stage) -> None:
    assert (await stage.enqueue("a", b"first", delay=9)).placed is Placed.NEW
    before = await stage.the("a")
    for payload in (b"first", b"second"):
        reply = await stage.enqueue("a", payload)
        assert (reply.placed, reply.state) == (Placed.DUPLICATE, State.WAITING)
    assert await stage.the("a") == before


async def test_enqueue_of_a_running_id_leaves_the_run_unchanged(stage: Stage) -> None:
    await stage.enqueue("a", b"first")
    running = await stage.claim_one()
    reply = await stage.enqueue("a", b"second")
    assert (reply.placed, reply.state) == (Placed.DUPLICATE, State.RUNNING)
    assert await stage.the("a") == running


@pytest.mark.parametrize("payload", [b"first", b"second"])
@pytest.mark.parametrize("result", [b'{"n": 1}', b"", None])
async def test_completed_id_answers_from_its_cache_for_any_payload_and_result(
    stage: Stage, payload: bytes, result: bytes | None
) -> None:
    first = await stage.enqueue("a", b"first")
    await stage.complete(await stage.claim_one(), result)
    reply = await stage.enqueue("a", payload)
    assert (reply.placed, reply.generation) == (Placed.COMPLETED, first.generation)
    assert reply.outcome is not None
    assert reply.outcome.result == result
    assert await stage.claim(10) == []


async def test_a_failed_id_may_be_enqueued_again_at_once(stage: Stage) -> None:
    await stage.enqueue("a", b"1")
    await stage.fail(await stage.claim_one())
    reply = await stage.enqueue("a", b"2")
    assert (reply.placed, reply.state) == (Placed.NEW, State.FAILED)
    assert (await stage.claim_one()).payload == b"2"


async def test_a_cancelled_id_that_is_enqueued_again_runs_once_with_its_new_payload(stage: Stage) -> None:
    await stage.enqueue("a", b"old")
    await stage.cancel("a")
    assert (await stage.enqueue("a", b"new")).placed is Placed.NEW
    (job,) = await stage.claim(10)
    assert job.payload == b"new"
    await stage.complete(job)
    assert await stage.claim(10) == []


async def test_exactly_one_of_many_concurrent_enqueues_of_an_id_is_new(stage: Stage, other: Stage) -> None:
    clients = [stage, other] * 10
    replies = await asyncio.gather(*(client.enqueue("a") for client in clients))
    assert Counter(reply.placed for reply in replies) == {Placed.NEW: 1, Placed.DUPLICATE: 19}
    assert len({reply.generation for reply in replies}) == 1


async def test_an_id_in_two_queues_is_two_jobs(stage: Stage) -> None:
    one, two = (Stage(stage.storage, stage.clock, name) for name in ("one", "two"))
    assert [(await queue.enqueue("a", b"1")).placed for queue in (one, two, one)] == ["new", "new", "duplicate"]
    await one.complete(await one.claim_one(worker="w"), b"r1", worker="w")
    assert await one.claim(10) == []
    assert ((await one.the("a")).state, (await two.the("a")).state) == (State.COMPLETED, State.WAITING)
    await two.complete(await two.claim_one(worker="w"), b"r2", worker="w")
    assert [job.outcome.result for job in (await one.the("a"), await two.the("a")) if job.outcome] == [b"r1", b"r2"]


async def test_a_lease_of_one_queue_settles_nothing_in_another(stage: Stage) -> None:
    one, two = (Stage(stage.storage, stage.clock, name) for name in ("one", "two"))
    for queue in (one, two):
        await queue.enqueue("a")
    job = await one.claim_one(worker="w1")
    running = await two.claim_one(worker="w2")
    assert await two.complete(job, worker="w1") is SettleResult.LOST
    assert await one.complete(job, worker="w1") is SettleResult.OK
    assert await two.the("a") == running


# How long an end is remembered


@pytest.mark.parametrize("end", ["complete", "fail"])
async def test_outcome_is_kept_for_its_ttl_and_then_the_id_is_new(stage: Stage, end: str) -> None:
    await stage.enqueue("a")
    await getattr(stage, end)(await stage.claim_one(), ttl=20)
    stage.clock.advance(19.999)
    assert (await stage.the("a")).outcome is not None
    stage.clock.advance(0.001)
    assert await stage.get("a") is None
    reply = await stage.enqueue("a", b"again")
    assert (reply.placed, reply.state) == (Placed.NEW, None)
    assert (await stage.claim_one()).payload == b"again"


async def test_expired_job_is_missing_for_every_verb_before_any_sweep(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=1)
    stage.clock.advance(1)
    assert await stage.get("a") is None
    assert await stage.cancel("a") is CancelResult.MISSING
    assert await stage.keep("a", 99) is KeepResult.MISSING
    assert await stage.keep("a", 99, at_least=True) is KeepResult.MISSING
    assert (await stage.storage.scan("q")).jobs == []
    retry = Update(payload=False)
    assert (await stage.enqueue("a", None, update=retry)).placed is None


async def test_expired_job_is_not_counted_before_any_sweep(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=1)
    stage.clock.advance(1)
    assert (await stage.stats()).completed == 0


async def test_expired_record_is_removed_without_being_accessed(stage: Stage) -> None:
    for n in range(150):
        await stage.enqueue(f"{n}")
    for job in await stage.claim(150):
        await stage.complete(job, ttl=0.05)
    stage.clock.advance(1)
    swept = [await stage.sweep() for _ in range(2)]
    assert [(s.forgotten, s.more) for s in swept] == [(100, True), (50, False)]
    assert (await stage.stats()).completed == 0


async def test_queue_with_only_enqueues_forgets_old_records(stage: Stage) -> None:
    for n in range(10):
        await stage.enqueue(f"old-{n}")
        await stage.cancel(f"old-{n}")
    stage.clock.advance(7200)
    for n in range(10):
        await stage.enqueue(f"new-{n}")
    assert (await stage.stats()).cancelled == 0


async def test_short_ttl_of_one_job_does_not_shorten_another(stage: Stage) -> None:
    for id in ("short", "long"):
        await stage.enqueue(id)
    for job in await stage.claim(2):
        await stage.complete(job, job.id.encode(), ttl=0.2 if job.id == "short" else 3600)
    stage.clock.advance(1)
    await stage.sweep()
    assert await stage.get("short") is None
    assert (await stage.enqueue("long")).placed is Placed.COMPLETED


async def test_ttl_comes_from_the_accepted_request_and_not_from_a_duplicate(stage: Stage) -> None:
    await stage.enqueue("a", result_ttl_ms=20)
    await stage.enqueue("a", result_ttl_ms=99_000)
    assert (await stage.claim_one()).work.result_ttl_ms == 20


@pytest.mark.parametrize("ttl", [-1, 0.5, "20", True])
async def test_invalid_duration_is_refused_by_every_verb(stage: Stage, ttl: int) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    with pytest.raises(OptionError):
        await stage.enqueue("b", result_ttl_ms=ttl)
    with pytest.raises(OptionError):
        await stage.storage.keep("q", ["a"], ttl)
    with pytest.raises(OptionError):
        await stage.settle(Complete("a", fence(job), result_ttl_ms=ttl))
    assert await stage.the("a") == job


async def test_result_with_a_ttl_of_zero_is_dropped_but_reaches_its_waiter(stage: Stage) -> None:
    for id, seconds in (("alone", 0), ("awaited", 30)):
        await stage.enqueue(id, keep=seconds)
        await stage.complete(await stage.claim_one(), ttl=0)
    assert await stage.get("alone") is None
    assert (await stage.the("awaited")).outcome is not None


@pytest.mark.parametrize("end", ["complete", "fail"])
async def test_keep_moves_the_expiry_of_an_outcome_and_of_its_id(stage: Stage, end: str) -> None:
    await stage.enqueue("a")
    await getattr(stage, end)(await stage.claim_one(), ttl=10)
    assert await stage.keep("a", 100) is KeepResult.KEPT
    stage.clock.advance(99)
    assert (await stage.enqueue("a")).placed is (Placed.COMPLETED if end == "complete" else Placed.NEW)


async def test_keep_of_a_live_job_starts_at_its_end(stage: Stage) -> None:
    await stage.enqueue("a")
    assert await stage.keep("a", 100) is KeepResult.LIVE
    stage.clock.advance(500)
    await stage.complete(await stage.claim_one(), ttl=1)
    stage.clock.advance(99)
    assert (await stage.the("a")).state is State.COMPLETED
    stage.clock.advance(1)
    assert await stage.get("a") is None


async def test_keep_of_an_unknown_or_forgotten_job_is_missing(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=1)
    stage.clock.advance(1)
    assert await stage.storage.keep("q", ["nobody", "a"], 1000) == [KeepResult.MISSING] * 2


# Waiting for an end


async def test_each_waiter_gets_the_result_of_its_own_job(stage: Stage) -> None:
    replies = [await stage.enqueue(id) for id in "abc"]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waiting(stage, reply)) for reply in replies]
        await awaited(stage, "a", "b", "c")
        for job in reversed(await stage.claim(3)):
            await stage.complete(job, job.id.encode() * 100_000)
    assert [task.result().result for task in tasks] == [b"a" * 100_000, b"b" * 100_000, b"c" * 100_000]


async def test_second_waiter_joins_the_current_run_with_the_first_payload(stage: Stage, other: Stage) -> None:
    replies = [await stage.enqueue("a", b"first"), await other.enqueue("a", b"second")]
    job = await stage.claim_one()
    replies.append(await other.enqueue("a", b"third"))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(waiting(client, reply)) for client in (stage, other) for reply in replies]
        await awaited(stage, "a")
        await stage.complete(job, job.payload)
    assert [task.result().result for task in tasks] == [b"first"] * 6
    assert (await stage.the("a")).attempts == 1


async def test_wait_that_times_out_does_not_affect_the_job_or_other_waiters(stage: Stage) -> None:
    reply = await stage.enqueue("a")
    job = await stage.claim_one()
    with pytest.raises(WaitTimeout):
        await waiting(stage, reply, 0.01)
    second = await stage.enqueue("b")
    await stage.complete(await stage.claim_one(), b"b")
    assert (await waiting(stage, second, 0)).result == b"b"
    assert await stage.complete(job, b"a") is SettleResult.OK
    assert (await waiting(stage, reply, 0)).result == b"a"


@pytest.mark.parametrize("result", [b"done", None])
async def test_wait_for_a_finished_job_reads_once(stage: Stage, result: bytes | None) -> None:
    await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), result)
    again = await stage.enqueue("a")
    assert (await waiting(stage, again, 0)).result == result


async def test_failure_reaches_its_waiter_and_a_later_one(stage: Stage) -> None:
    reply = await stage.enqueue("a")
    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait(stage.storage, "q", "a", reply.generation))
        await awaited(stage, "a")
        await stage.fail(await stage.claim_one(), b"boom")
    for outcome in (task.result(), await waiting(stage, reply, 0)):
        assert (outcome.state, outcome.error) == (State.FAILED, b"boom")


async def test_wait_for_a_forgotten_outcome_raises_job_forgotten(stage: Stage) -> None:
    reply = await stage.enqueue("a")
    await stage.complete(await stage.claim_one(), ttl=5)
    stage.clock.advance(5)
    with pytest.raises(JobForgotten):
        await waiting(stage, reply, 0)


async def test_waiter_that_leaves_does_not_stop_other_waiters(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 60.0)  # So that only a hint can wake them in time.
    reply = await stage.enqueue("a")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        task = group.create_task(waiting(stage, reply, 50))
        await awaited(stage, "a")
        with pytest.raises(WaitTimeout):
            await waiting(stage, reply, 0)
        with pytest.raises(WaitTimeout):
            await waiting(stage, reply, 0.01)
        await stage.complete(await stage.claim_one(), b"heard")
    assert task.result().result == b"heard"


# Cancel


async def test_cancel_returns_the_state_and_deletes_nothing(stage: Stage) -> None:
    for id in ("failed", "completed", "running"):
        await stage.enqueue(id)
    jobs = {job.id: job for job in await stage.claim(3)}
    await stage.fail(jobs["failed"])
    await stage.complete(jobs["completed"])
    before = [await stage.the(id) for id in ("failed", "completed")]
    replies = [await stage.cancel(id) for id in ("failed", "completed", "running", "nobody")]
    assert replies == [CancelResult.FINISHED, CancelResult.FINISHED, CancelResult.ASKED, CancelResult.MISSING]
    assert not any(replies)
    assert [await stage.the(id) for id in ("failed", "completed")] == before


async def test_cancel_that_returns_cancelled_excludes_a_claim_of_the_job(stage: Stage, other: Stage) -> None:
    for n in range(20):
        await stage.enqueue(f"{n}")
    claims = [stage.claim(1, worker=f"w{n}") for n in range(20)]
    cancels = [other.cancel(f"{n}") for n in reversed(range(20))]
    mixed: list[Any] = await asyncio.gather(*(call for pair in zip(claims, cancels, strict=True) for call in pair))
    claimed = {job.id for jobs in mixed[::2] for job in jobs}
    cancelled = {f"{19 - n}" for n, reply in enumerate(mixed[1::2]) if reply}
    assert claimed.isdisjoint(cancelled)
    assert len(claimed) + len(cancelled) == 20


async def test_job_with_a_cancel_request_does_not_run_again(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id)
    retried, released, dropped = await stage.claim(3)
    for id in "abc":
        await stage.cancel(id)
    await stage.retry(retried)
    await stage.release(released)
    await stage.expire()
    assert [(await stage.the(job.id)).state for job in (retried, released, dropped)] == [State.CANCELLED] * 3
    assert await stage.claim(10) == []
