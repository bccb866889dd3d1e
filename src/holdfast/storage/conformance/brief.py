"""Brief outcomes: those that no option asks for are kept for their handles, and of these only the newest of a queue."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast._core.jobs import Complete, Job, Outcome, Request, Settlement, State, Update, Work
from holdfast._core.replies import KeepResult, Placed, SettleResult
from holdfast.storage.conformance.verbs import Stage, fence


async def ended(stage: Stage, id: str = "a", *, ttl: float = 300, custom_id: bool = False, keep: float = 0) -> Job:
    await stage.enqueue(id, custom_id=custom_id, keep=keep)
    await stage.complete_briefly(await stage.claim_one(), ttl=ttl)
    return await stage.the(id)


def is_brief(job: Job) -> bool:
    assert job.outcome is not None
    return job.outcome.brief


async def test_brief_outcome_is_kept_for_its_time_and_counts_as_completed(stage: Stage) -> None:
    job = await ended(stage)
    assert is_brief(job)
    assert (job.state, job.attempts, job.payload, job.worker) == (State.COMPLETED, 1, None, "w1")
    stage.clock.advance(299)
    assert (await stage.the()).state is State.COMPLETED
    assert ((await stage.stats()).completed, (await stage.stats()).expired) == (1, 0)
    stage.clock.advance(1)
    assert await stage.get() is None
    assert ((await stage.stats()).completed, (await stage.stats()).expired) == (0, 1)
    assert (await stage.sweep()).forgotten == 1
    assert (await stage.stats()).expired == 0


async def test_brief_outcomes_of_one_call_are_those_of_their_runs(stage: Stage) -> None:
    works = {"a": Work(b"1"), "b": Work(b"2", priority=9), "c": Work(b"3", timeout_ms=1000), "d": Work(b"4")}
    for id, work in works.items():
        await stage.storage.enqueue("q", [Request(id, work, custom_id=id == "d")])
        stage.clock.advance(0.1)
    runs = await stage.claim(4)
    ttls = {job.id: 7_000 if job.id == "b" else 300_000 for job in runs}
    batch: list[Settlement] = [Complete(job.id, fence(job), result_ttl_ms=ttls[job.id], brief=True) for job in runs]
    assert (
        await stage.storage.settle("q", [*batch, *batch], worker="w1")
        == [SettleResult.OK] * 4 + [SettleResult.LOST] * 4
    )
    now = stage.clock.now_us()
    for run in runs:
        job = await stage.the(run.id)
        expected = Outcome(
            run.generation,
            State.COMPLETED,
            now,
            now + 1000 * ttls[run.id],
            now,
            started_at=fence(run),
            worker="w1",
            brief=True,
        )
        assert job == replace(
            run, run=None, outcome=expected, work=replace(works[run.id], payload=None), custom_id=run.id == "d"
        )
    assert ((await stage.stats()).completed, (await stage.stats()).running) == (4, 0)


async def test_attempts_count_every_run_of_a_brief_outcome(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.retry(await stage.claim_one())
    await stage.release(await stage.claim_one())
    await stage.complete_briefly(await stage.claim_one())
    assert ((await stage.the()).attempts, (await stage.the()).retries) == (3, 1)


@pytest.mark.parametrize("at_least", [True, False])
@pytest.mark.parametrize("before_the_end", [True, False])
async def test_outcome_that_somebody_keeps_is_not_brief(stage: Stage, at_least: bool, before_the_end: bool) -> None:
    await stage.enqueue("a")
    run = await stage.claim_one()
    if before_the_end:
        await stage.keep("a", 20, at_least=at_least)
    await stage.complete_briefly(run, ttl=10)
    if not before_the_end:
        assert await stage.keep("a", 20, at_least=at_least) is KeepResult.KEPT
    assert not is_brief(await stage.the())
    assert (await stage.stats()).completed == 1
    stage.clock.advance(20)
    assert await stage.get() is None


async def test_outcome_with_a_waiter_is_not_brief(stage: Stage) -> None:
    assert not is_brief(await ended(stage, keep=30))


async def test_brief_outcome_never_answers_a_duplicate(stage: Stage) -> None:
    await ended(stage, custom_id=True)
    assert (await stage.enqueue("a")).placed is Placed.NEW


async def test_brief_outcome_becomes_the_previous_one_of_the_next_request(stage: Stage) -> None:
    await stage.enqueue("a")
    run = await stage.claim_one()
    await stage.enqueue("a", update=Update())
    await stage.complete_briefly(run)
    job = await stage.the()
    assert (job.state, job.previous is not None and job.previous.state) == (State.WAITING, State.COMPLETED)


@pytest.mark.parametrize("state", [State.COMPLETED, None])
@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_pages_of_completed_jobs_have_brief_ones_too(stage: Stage, state: State | None, limit: int) -> None:
    for id in ("a", "b", "c"):
        await ended(stage, id)
        await stage.enqueue(f"kept {id}")
        await stage.complete(await stage.claim_one())
    found: list[str] = []
    after: str | None = None
    while True:
        page = await stage.storage.scan("q", state=state, after=after, limit=limit)
        found += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert found == ["kept a", "kept b", "kept c", "a", "b", "c"]


async def test_purge_of_completed_jobs_deletes_brief_ones_too(stage: Stage) -> None:
    await ended(stage, "a")
    await stage.enqueue("b")
    await stage.complete(await stage.claim_one())
    assert await stage.storage.purge("q", [State.FAILED]) == 0
    assert await stage.storage.purge("q", [State.COMPLETED]) == 2
    assert await stage.storage.drop("q") == 0


async def test_queue_with_a_brief_outcome_is_not_empty(stage: Stage) -> None:
    await ended(stage)
    await stage.storage.enqueue("q", [Request("b", Work(b"1"))])
    assert (await stage.stats()).completed == 1
    assert await stage.storage.purge("q", list(State)) == 2
