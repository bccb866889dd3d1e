"""Queues are paused, purged and served by workers; queues are independent; a failure has a follow-up."""

from __future__ import annotations

import pytest

from holdfast._core.jobs import Fail, Job, Request, State, Update, Work
from holdfast._core.replies import SettleResult
from holdfast.errors import OptionError
from holdfast.storage.conformance.order import MICROSECOND, add, ask, ids
from holdfast.storage.conformance.reads import populate, scanned
from holdfast.storage.conformance.verbs import Stage, fence

# pause


async def test_a_paused_queue_gives_out_no_jobs_and_says_why(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.pause("q", True, reason="a release")
    claim = await ask(stage)
    assert (claim.jobs, claim.paused, claim.next_run_at) == ([], True, None)
    stats = await stage.stats()
    assert (stats.paused, stats.reason, stats.ready) == (True, "a release", 1)


async def test_a_resumed_queue_gives_out_its_jobs_in_order(stage: Stage) -> None:
    await stage.storage.pause("q", True, reason="a release")
    await add(stage, "a", "b")
    await stage.storage.pause("q", False, reason="ignored")
    claim = await ask(stage, 2)
    assert (ids(claim.jobs), claim.paused) == (["a", "b"], False)
    stats = await stage.stats()
    assert (stats.paused, stats.reason) == (False, "")


async def test_pause_stops_nothing_but_claims(stage: Stage) -> None:
    await add(stage, *"abcd")
    a, b, c = await stage.claim(3)
    await stage.storage.pause("q", True)
    assert (await stage.extend(a)).lost == []
    assert await stage.complete(a) is SettleResult.OK
    assert await stage.retry(b) is SettleResult.OK
    assert await stage.fail(c) is SettleResult.OK
    assert await stage.cancel("d")
    assert (await stage.enqueue("e")).generation
    assert (await stage.the("b")).state is State.WAITING
    assert await stage.claim(5) == []


async def test_a_paused_queue_is_still_swept_by_claims(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.claim_one(lease=10)
    await stage.storage.pause("q", True)
    for seconds in (10, 5):
        stage.clock.advance(seconds)
        await stage.claim()
    assert (await stage.the("a")).stalls == 1


async def test_a_queue_may_be_paused_before_it_has_a_job(stage: Stage) -> None:
    await stage.storage.pause("q", True, reason="not yet")
    await stage.enqueue("a")
    assert await stage.claim() == []


# purge


async def test_purge_deletes_only_the_states_it_is_given(stage: Stage) -> None:
    await populate(stage)
    assert await stage.storage.purge("q", [State.FAILED, State.WAITING]) == 14
    assert await scanned(stage, State.FAILED) == await scanned(stage, State.WAITING) == []
    stats = await stage.stats()
    assert (stats.running, stats.completed, stats.cancelled) == (7, 7, 7)


async def test_purge_is_bounded_and_called_until_it_is_done(stage: Stage) -> None:
    await add(stage, *"abcde")
    for job in await stage.claim(2):
        await stage.complete(job)
    done = [await stage.storage.purge("q", [State.WAITING, State.COMPLETED], 2) for _ in range(4)]
    assert done == [2, 2, 1, 0]
    assert await scanned(stage, None) == []


async def test_a_purged_job_is_gone_and_its_id_is_free(stage: Stage) -> None:
    first = await stage.enqueue("a")
    await stage.storage.purge("q", [State.WAITING])
    assert await stage.get("a") is None
    again = await stage.enqueue("a")
    assert (again.state, again.generation > first.generation) == (None, True)


async def test_purge_requests_one_cancel_of_running_jobs_and_drops_their_next(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    a, *_ = await stage.claim(3)
    await stage.enqueue("a", update=Update())
    assert [await stage.storage.purge("q", [State.RUNNING], 2) for _ in range(3)] == [2, 1, 0]
    assert len((await stage.extend(a)).cancel_asked) == 1
    await stage.release(a)
    assert (await stage.the("a")).state is State.CANCELLED


async def test_purge_with_running_jobs_stays_within_its_limit(stage: Stage) -> None:
    await add(stage, *"abcd")
    await stage.claim(2)
    assert [await stage.storage.purge("q", list(State), 3) for _ in range(3)] == [3, 1, 0]


async def test_an_empty_queue_is_dropped_only_when_asked_for(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.purge("q", list(State))
    await stage.storage.purge("q", list(State))
    assert (await stage.stats()).totals["purged"] == 1
    assert await stage.storage.drop("q") == 0
    assert (await stage.storage.snapshot()).queues == []
    assert await stage.storage.drop("q") == 0
    assert (await stage.storage.snapshot()).queues == []


async def test_a_queue_with_a_record_left_is_not_dropped(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.storage.pause("q", True)
    await add(stage, *"bcd")
    assert [await stage.storage.drop("q", 2) for _ in range(3)] == [2, 1, 1]
    assert [lease.id for lease in (await stage.extend(job)).cancel_asked] == ["a"]
    assert (await stage.stats()).paused
    assert await stage.complete(job) is SettleResult.OK
    assert await stage.storage.drop("q") == 0
    assert (await stage.storage.snapshot()).queues == []


async def test_a_dropped_queue_is_new_when_it_is_used_again(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.storage.pause("q", True)
    while await stage.storage.drop("q"):
        pass
    await stage.enqueue("b")
    stats = await stage.stats()
    assert (stats.paused, stats.totals) == (False, {"enqueued": 1})
    assert ids(await stage.claim(5)) == ["b"]


async def test_stamps_of_a_dropped_queue_are_not_reused(stage: Stage) -> None:
    generations = {reply.generation for reply in await add(stage, *"abc")}
    stale = await stage.claim_one()
    await stage.complete(stale, ttl=0)
    while await stage.storage.drop("q"):
        pass
    again = await add(stage, *"abc")
    claimed = await stage.claim(3)
    stamps = {reply.generation for reply in again} | {fence(job) for job in claimed}
    assert not stamps & (generations | {fence(stale)})
    assert await stage.complete(stale) is SettleResult.LOST


# notes


async def test_note_is_read_until_its_time_is_over(stage: Stage) -> None:
    storage = stage.storage
    await storage.write_notes({"a": b"one", "b": b"\0\xff"}, ttl_ms=2000)
    assert await storage.read_notes(["b", "none", "a"]) == [b"\0\xff", None, b"one"]
    stage.clock.advance(1)
    await storage.write_notes({"a": b"", "c": b"three"}, ttl_ms=5000)
    assert await storage.read_notes(["a", "b", "c"]) == [b"", b"\0\xff", b"three"]
    stage.clock.advance(1)
    assert await storage.read_notes(["a", "b", "c"]) == [b"", None, b"three"]
    await storage.write_notes({"d": b"four"}, ttl_ms=1)  # It also removes what is past its time.
    assert await storage.read_notes(["a", "b", "c", "d"]) == [b"", None, b"three", b"four"]


async def test_notes_belong_to_no_queue(stage: Stage) -> None:
    await stage.storage.write_notes({"a": b"one"}, ttl_ms=2000)
    assert (await stage.storage.snapshot()).queues == []


async def test_calls_without_notes_do_nothing(stage: Stage) -> None:
    await stage.storage.write_notes({}, ttl_ms=2000)
    assert await stage.storage.read_notes([]) == []


# workers


async def announce(stage: Stage, worker: str, *queues: str, ttl: float = 10) -> bool:
    """Returns whether the worker must stop."""
    return (await stage.storage.announce(worker, {"queues": list(queues), "pid": 1}, ttl_ms=round(ttl * 1000))).evict


async def workers(stage: Stage) -> list[str]:
    return [stats.worker for stats in (await stage.storage.snapshot()).workers]


async def test_a_worker_is_listed_under_the_queues_that_it_serves(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    await stage.enqueue("a")
    await other.enqueue("a")
    await announce(stage, "w2", "q")
    await announce(stage, "w1", "q", "other")
    assert await workers(stage) == ["w1", "w2"]
    assert ((await stage.stats()).workers, (await other.stats()).workers) == (["w1", "w2"], ["w1"])


async def test_worker_of_the_most_queues_is_listed_under_each(stage: Stage) -> None:
    names = [f"shop.tasks.reports.daily_{number}" for number in range(10_000)]
    await stage.storage.announce("w1", {"queues": names}, ttl_ms=60_000)
    snapshot = await stage.storage.snapshot([])
    assert snapshot.workers_of(names[0]) == snapshot.workers_of(names[-1]) == ["w1"]


async def test_the_last_announcement_counts(stage: Stage) -> None:
    await announce(stage, "w1", "q")
    stage.clock.advance(1)
    await stage.storage.announce("w1", {"pid": 2, "queues": []}, ttl_ms=5000)
    (stats,) = (await stage.storage.snapshot()).workers
    assert stats.facts == {"pid": 2, "queues": []}
    assert (stats.beat_at, stats.expires_at) == (stage.wall(), stage.wall(5))


async def test_worker_is_unlisted_when_its_announcement_expires(stage: Stage) -> None:
    await stage.enqueue("a")
    await announce(stage, "w1", "q", ttl=10)
    stage.clock.advance(10 - MICROSECOND)
    assert await workers(stage) == ["w1"]
    stage.clock.advance(MICROSECOND)
    assert await workers(stage) == []
    assert (await stage.stats()).workers == []


async def test_a_worker_that_announces_itself_again_stays(stage: Stage) -> None:
    for _ in range(5):
        await announce(stage, "w1", "q", ttl=10)
        stage.clock.advance(9)
    assert await workers(stage) == ["w1"]


async def test_one_workers_announcement_does_not_remove_another_that_lives(stage: Stage) -> None:
    await announce(stage, "w1", ttl=10)
    await announce(stage, "w2", ttl=20)
    stage.clock.advance(10)
    await announce(stage, "w3")
    assert await workers(stage) == ["w2", "w3"]


async def test_every_announcement_of_only_the_evicted_worker_returns_the_eviction(stage: Stage) -> None:
    assert not await announce(stage, "w1")
    await announce(stage, "w2")
    assert await stage.storage.evict("w1") is True
    (w1, w2) = (await stage.storage.snapshot()).workers
    assert (w1.evict_asked, w2.evict_asked) == (True, False)
    assert await announce(stage, "w1")
    assert await announce(stage, "w1")
    assert not await announce(stage, "w2")


async def test_a_worker_that_is_not_there_cannot_be_evicted(stage: Stage) -> None:
    assert await stage.storage.evict("w1") is False
    await announce(stage, "w1", ttl=10)
    stage.clock.advance(10)
    assert await stage.storage.evict("w1") is False


async def test_an_eviction_ends_with_the_worker_that_it_was_meant_for(stage: Stage) -> None:
    await announce(stage, "w1", ttl=10)
    await stage.storage.evict("w1")
    stage.clock.advance(10)
    assert not await announce(stage, "w1")


# queues and namespaces


async def test_queues_are_independent(stage: Stage) -> None:
    other = Stage(stage.storage, stage.clock, "other")
    await stage.enqueue("a", b"here")
    await other.enqueue("a", b"there")
    job = await stage.claim_one()
    await stage.storage.pause("q", True)
    assert await other.complete(job) is SettleResult.LOST
    assert (await other.claim_one()).payload == b"there"
    await stage.complete(job)
    await stage.storage.purge("q", list(State))
    assert (await other.the("a")).state is State.RUNNING
    stats = await other.stats()
    assert (stats.paused, stats.totals) == (False, {"enqueued": 1, "claimed": 1})


# follow-ups


FOLLOW_UP = Work(b"follow up", codec="raw", priority=8, max_retries=3)


async def follow_ups(stage: Stage) -> list[Job]:
    return (await stage.storage.claim("q/failed", 10, worker="w2", lease_ms=10_000)).jobs


async def test_a_failure_enqueues_its_follow_up_in_the_same_step(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    (found,) = await stage.storage.get("q/failed", [f"a@{job.generation}"])
    assert found is not None
    assert (found.state, found.work, found.run_at) == (State.WAITING, FOLLOW_UP, stage.wall())
    assert (await stage.the("a")).state is State.FAILED


async def test_a_failure_without_a_follow_up_makes_no_companion_queue(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one())
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == ["q"]


async def test_failure_without_ttl_has_a_follow_up(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one(), ttl=0, follow_up=FOLLOW_UP)
    assert len(await follow_ups(stage)) == 1


async def test_failure_with_next_has_a_follow_up_under_the_failed_generation(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.fail(job, follow_up=FOLLOW_UP)
    assert ids(await follow_ups(stage)) == [f"a@{job.generation}"]
    assert (await stage.the("a")).generation > job.generation


async def test_every_failed_generation_has_its_own_follow_up(stage: Stage) -> None:
    wanted = []
    for _ in range(3):
        await stage.enqueue("a")
        job = await stage.claim_one()
        await stage.fail(job, follow_up=FOLLOW_UP)
        wanted.append(f"a@{job.generation}")
    assert ids(await follow_ups(stage)) == wanted


async def test_a_batch_of_failures_has_one_follow_up_each_in_order(stage: Stage) -> None:
    await add(stage, "a", "b", "c")
    jobs = await stage.claim(3)
    batch = [Fail(job.id, fence(job), b"error", 1000, FOLLOW_UP) for job in (*jobs, jobs[0])]
    replies = await stage.storage.settle("q", batch, worker="w1")
    assert replies == [SettleResult.OK] * 3 + [SettleResult.LOST]
    assert ids(await follow_ups(stage)) == [f"{job.id}@{job.generation}" for job in jobs]


async def test_a_cancelled_run_has_no_follow_up(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.cancel("a")
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    assert (await stage.the("a")).state is State.CANCELLED
    assert await follow_ups(stage) == []


async def test_a_cancelled_run_has_no_follow_up_when_its_next_is_promoted_either(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.cancel("a")
    await stage.enqueue("a", update=Update())
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.OK
    assert (await stage.the("a")).state is State.WAITING
    assert await follow_ups(stage) == []


async def test_a_lost_failure_has_no_follow_up(stage: Stage) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await stage.expire()
    assert await stage.fail(job, follow_up=FOLLOW_UP) is SettleResult.LOST
    assert await follow_ups(stage) == []


async def test_job_with_the_longest_id_can_have_a_follow_up(stage: Stage) -> None:
    id = "x" * 512
    await stage.enqueue(id)
    job = await stage.claim_one()
    await stage.fail(job, follow_up=FOLLOW_UP)
    (found,) = await follow_ups(stage)
    assert found.id == f"{id}@{job.generation}"
    companion = Stage(stage.storage, stage.clock, "q/failed")
    assert await companion.complete(found, worker="w2") is SettleResult.OK


async def test_snapshot_of_named_queues_has_only_those_that_exist(stage: Stage) -> None:
    for queue in ("c", "a", "b"):
        await stage.storage.enqueue(queue, [Request("j", Work(b"x"))])
    snapshot = await stage.storage.snapshot(["c", "a", "none", "a"])
    assert [(stats.queue, stats.ready) for stats in snapshot.queues] == [("a", 1), ("c", 1)]
    everything = {stats.queue: stats for stats in (await stage.storage.snapshot()).queues}
    assert sorted(everything) == ["a", "b", "c"]
    assert snapshot.queues == [everything["a"], everything["c"]]
    assert (await stage.storage.snapshot([])).queues == []


async def test_snapshot_refuses_a_name_that_is_not_valid(stage: Stage) -> None:
    with pytest.raises(OptionError, match="queue name"):
        await stage.storage.snapshot(["not valid"])
