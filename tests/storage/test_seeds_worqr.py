"""Worqr's promises and its flaws, in our verbs: peers without a server, work that returns, cancel that reaches running
work, push notification; docs/development/seeds.md has the list.

What becomes of a dead worker's leases is proved in test_leases.py and not again here.
"""

from __future__ import annotations

import asyncio

import pytest

from holdfast._client import waiters
from holdfast._core.events import EventKind, Topic
from holdfast._core.jobs import State
from holdfast._core.replies import CancelResult, Placed, SettleResult, Swept
from holdfast.storage.subscriptions import EventBus
from tests.storage.stage import Stage, heard

# Queues


async def test_verbs_on_a_missing_queue_are_not_errors_and_do_not_create_it(stage: Stage) -> None:
    assert await stage.storage.purge("q", list(State)) == 0
    assert await stage.storage.drop("q") == 0
    assert await stage.sweep() == await stage.sweep(worker="w1") == Swept([], [], 0, False, None)
    assert await stage.claim(10) == []
    assert await stage.cancel("a") is CancelResult.MISSING
    assert (await stage.storage.snapshot()).queues == []


async def test_queue_exists_from_its_first_job(stage: Stage) -> None:
    for name in ("q2", "q1", "q3"):
        await Stage(stage.storage, stage.clock, name).enqueue("task")
    queues = (await stage.storage.snapshot()).queues
    assert [(stats.queue, stats.ready) for stats in queues] == [("q1", 1), ("q2", 1), ("q3", 1)]


@pytest.mark.parametrize("name", ["error", "a_b", "_work", "a.b-c", "q_cancel", "constructor"])
async def test_queue_of_any_allowed_name_is_listed_and_has_events(stage: Stage, name: str) -> None:
    queue = Stage(stage.storage, stage.clock, name)
    async with stage.storage.subscribe(Topic(name)) as events:
        await queue.enqueue("a")
        assert await heard(events, 1) == [(EventKind.ENQUEUED, "a")]
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == [name]


async def test_deleting_a_queue_stops_its_running_jobs_and_the_next_job_recreates_it(stage: Stage) -> None:
    for id in "abc":
        await stage.enqueue(id)
    running = await stage.claim_one()
    async with stage.storage.subscribe(Topic("q")) as events:
        await stage.storage.pause("q", True, reason="deleted")
        assert [await stage.storage.drop("q") for _ in range(2)] == [1, 1]
        assert set(await heard(events, 3)) == {
            (EventKind.PURGED, "b"),
            (EventKind.PURGED, "c"),
            (EventKind.CANCEL_ASKED, "a"),
        }
    assert [lease.id for lease in (await stage.extend(running)).cancel_asked] == ["a"]
    await stage.release(running)
    while await stage.storage.drop("q"):
        pass
    assert (await stage.storage.snapshot()).queues == []
    assert (await stage.enqueue("a")).placed is Placed.NEW
    assert [job.id for job in await stage.claim(10)] == ["a"]


# The line


async def test_scan_shows_the_next_jobs_and_claims_nothing(stage: Stage) -> None:
    assert (await stage.storage.scan("q", state=State.WAITING)).jobs == []
    for id in ("task2", "task1", "task3"):
        await stage.enqueue(id)
    peek = await stage.storage.scan("q", state=State.WAITING, limit=1)
    rest = await stage.storage.scan("q", state=State.WAITING, after=peek.after)
    assert [job.id for job in peek.jobs + rest.jobs] == ["task2", "task1", "task3"]
    assert (await stage.stats()).ready == 3


async def test_the_count_follows_jobs_that_are_claimed_completed_and_given_back(stage: Stage) -> None:
    for id in ("task1", "task2", "task3"):
        await stage.enqueue(id)
    first = await stage.claim_one()
    await stage.complete(first)
    second = await stage.claim_one()
    assert (first.id, second.id) == ("task1", "task2")
    assert ((await stage.stats()).ready, (await stage.stats()).running) == (1, 1)
    await stage.release(second)
    assert ((await stage.stats()).ready, (await stage.stats()).running) == (2, 0)


async def test_refused_duplicate_does_not_affect_later_requests(stage: Stage) -> None:
    await stage.enqueue("unique")
    assert (await stage.enqueue("unique")).placed is Placed.DUPLICATE
    replies = await asyncio.gather(*(stage.enqueue(f"plain-{n}") for n in range(3)))
    assert [reply.placed for reply in replies] == [Placed.NEW] * 3
    assert len(await stage.claim(10)) == 4


async def test_the_same_payload_under_another_id_is_another_job(stage: Stage) -> None:
    await stage.enqueue("unique", b"same")
    await stage.enqueue("plain", b"same", run_at=1)
    assert (await stage.stats()).ready == 2
    plain = await stage.claim_one()
    await stage.complete(plain, ttl=0)
    assert (plain.id, (await stage.enqueue("unique", b"same")).placed) == ("plain", Placed.DUPLICATE)
    await stage.complete(await stage.claim_one(), ttl=0)
    assert (await stage.claim(10), (await stage.stats()).ready) == ([], 0)


# Workers


async def test_a_worker_is_listed_once_however_often_it_announces_itself(stage: Stage) -> None:
    await stage.enqueue("a")
    for _ in range(3):
        await stage.storage.announce("me", {"queues": ["q"]}, ttl_ms=3000)
    assert [worker.worker for worker in (await stage.storage.snapshot()).workers] == ["me"]


async def test_sweep_of_a_worker_without_leases_is_not_an_error(stage: Stage) -> None:
    await stage.enqueue("a")
    held = await stage.claim_one(worker="w1")
    assert (await stage.sweep(worker="w2")).stalled == []
    assert await stage.the("a") == held


async def test_claim_that_races_with_a_sweep_of_its_worker_loses_no_job(stage: Stage, other: Stage) -> None:
    for n in range(20):
        await stage.enqueue(f"{n}")
    calls = [call for _ in range(20) for call in (stage.claim(1, worker="w1"), other.sweep(worker="w1"))]
    await asyncio.gather(*calls)
    await stage.sweep(worker="w1")
    stage.clock.advance(3600)
    assert {job.id for job in await stage.claim(100, worker="w2")} == {f"{n}" for n in range(20)}


async def test_late_complete_publishes_no_event(stage: Stage) -> None:
    await stage.enqueue("a")
    late = await stage.claim_one(worker="zombie")
    await stage.expire()
    async with stage.storage.subscribe(Topic("q")) as events:
        assert await stage.complete(late, worker="zombie") is SettleResult.LOST
        await stage.enqueue("marker")
        assert await heard(events, 1) == [(EventKind.ENQUEUED, "marker")]


# Notification


async def test_returned_job_wakes_a_waiting_worker(stage: Stage, other: Stage) -> None:
    for id in "abcd":
        await stage.enqueue(id)
    released, retried = await stage.claim(2, worker="w1")
    await stage.claim(1, worker="dead", lease=100)
    await stage.claim(1, worker="silent", lease=1)
    async with other.storage.subscribe(Topic("q", "ready")) as events:
        await stage.release(released)
        await stage.retry(retried)
        await stage.sweep(worker="dead")
        await stage.expire(lease=1)
        expected = [
            (EventKind.RELEASED, "a"),
            (EventKind.RETRIED, "b"),
            (EventKind.STALLED, "c"),
            (EventKind.STALLED, "d"),
        ]
        assert await heard(events, 4) == expected


async def test_cancel_of_a_waiting_or_running_job_publishes_an_event(stage: Stage) -> None:
    for id in "ab":
        await stage.enqueue(id)
    await stage.claim_one()
    async with stage.storage.subscribe(Topic("q")) as events:
        assert [await stage.cancel(id) for id in "ab"] == [CancelResult.ASKED, CancelResult.CANCELLED]
        assert await heard(events, 2) == [(EventKind.CANCEL_ASKED, "a"), (EventKind.CANCELLED, "b")]


async def test_waiter_without_hints_still_gets_the_outcome(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventBus, "publish", lambda bus, events: None)
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 0.01)
    reply = await stage.enqueue("a")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        task = group.create_task(waiters.wait(stage.storage, "q", "a", reply.generation, wait_s=None))
        while not (await stage.the("a")).keep_until_at:  # noqa: ASYNC110, until the waiter has asked for the outcome
            await asyncio.sleep(0)
        await stage.complete(await stage.claim_one(), b"found")
    assert task.result().result == b"found"


async def test_worker_without_hints_still_gets_jobs(
    stage: Stage, other: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventBus, "publish", lambda bus, events: None)
    await stage.enqueue("a", delay=1)
    claim = await other.storage.claim("q", 1, worker="w1", lease_ms=1000)
    assert (claim.jobs, claim.next_run_at) == ([], stage.wall(1))
    stage.clock.advance(1)
    assert [job.id for job in await other.claim(1)] == ["a"]
