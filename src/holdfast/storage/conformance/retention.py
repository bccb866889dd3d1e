"""Records past their forget time are deleted in bounded steps, by producers alone and by workers alone."""

from __future__ import annotations

from holdfast._core.jobs import Complete, Job, Request, Settlement, State, Work
from holdfast.storage.conformance.verbs import Stage, fence

TTL_MS = 10_000
CALL = 50


async def enqueue(stage: Stage, prefix: str, count: int = CALL) -> None:
    await stage.storage.enqueue("q", [Request(f"{prefix}{at}", Work(b"1"), custom_id=True) for at in range(count)])


async def settle(stage: Stage, jobs: list[Job]) -> None:
    batch: list[Settlement] = [
        Complete(job.id, fence(job), b"1", result_ttl_ms=TTL_MS, dedup_ttl_ms=TTL_MS) for job in jobs
    ]
    await stage.storage.settle("q", batch, worker="w1")


async def remember(stage: Stage, prefix: str, count: int = CALL) -> None:
    """Complete this number of jobs, whose records are kept for `TTL_MS`."""
    await enqueue(stage, prefix, count)
    await settle(stage, await stage.claim(count))


async def test_queue_under_bulk_load_has_few_expired_records(stage: Stage) -> None:
    for round in range(6):
        await remember(stage, f"{round}-")
        stage.clock.advance(TTL_MS / 1000)
        stats = await stage.stats()
        assert (stats.completed, stats.expired) == (0, CALL)


async def test_enqueue_deletes_twice_as_many_records_as_it_adds(stage: Stage) -> None:
    await remember(stage, "old")
    stage.clock.advance(TTL_MS / 1000)
    await enqueue(stage, "new", 10)
    assert (await stage.stats()).expired == CALL - 20
    await enqueue(stage, "newer", 20)
    assert (await stage.stats()).expired == 0
    assert (await stage.stats()).ready == 30


async def test_settle_deletes_twice_as_many_records_as_it_adds(stage: Stage) -> None:
    await enqueue(stage, "late", 10)
    late = await stage.claim(10, lease=1000)
    await remember(stage, "old")
    stage.clock.advance(TTL_MS / 1000)
    await settle(stage, late)
    stats = await stage.stats()
    assert (stats.completed, stats.expired) == (10, CALL - 20)


async def test_expired_counts_records_of_every_finished_state(stage: Stage) -> None:
    await remember(stage, "old", 2)
    await stage.enqueue("failed")
    await stage.fail(await stage.claim_one(), ttl=10)
    await stage.enqueue("cancelled")
    await stage.cancel("cancelled")
    assert (await stage.stats()).expired == 0
    stage.clock.advance(3600)
    stats = await stage.stats()
    assert (stats.expired, stats.completed, stats.failed, stats.cancelled) == (4, 0, 0, 0)
    assert (await stage.sweep()).forgotten == 4
    assert (await stage.stats()).expired == 0


async def test_ready_names_queues_with_expired_records_if_asked(stage: Stage) -> None:
    await remember(stage, "a", 3)
    await stage.enqueue("b")
    await stage.cancel("b")
    assert await stage.storage.ready(["q", "none"], forgotten=True) == []
    stage.clock.advance(TTL_MS / 1000)
    assert await stage.storage.ready(["q", "none"], forgotten=True) == ["q"]
    assert await stage.storage.ready(["q"]) == []
    await stage.sweep(2)
    assert await stage.storage.ready(["q"], forgotten=True) == ["q"]
    await stage.sweep(2)
    assert await stage.storage.ready(["q"], forgotten=True) == []
    stage.clock.advance(3600)
    assert await stage.storage.ready(["q"], forgotten=True) == ["q"]
    assert (await stage.stats()).expired == 1
    await stage.sweep()
    assert (await stage.stats()).totals["forgotten"] == 4


async def test_expired_record_that_is_requested_again_is_not_deleted(stage: Stage) -> None:
    await remember(stage, "a", 3)
    stage.clock.advance(TTL_MS / 1000)
    await enqueue(stage, "a", 3)
    assert {(await stage.the(f"a{at}")).state for at in range(3)} == {State.WAITING}
    assert (await stage.stats()).expired == 0


async def test_record_kept_for_less_time_is_deleted_at_its_new_time(stage: Stage) -> None:
    await remember(stage, "old", 3)
    await enqueue(stage, "new", 1)
    await stage.storage.keep("q", ["old1"], TTL_MS // 2)
    stage.clock.advance(TTL_MS / 2000)
    await enqueue(stage, "newer", 1)
    stats = await stage.stats()
    assert (stats.completed, stats.expired) == (2, 0)
