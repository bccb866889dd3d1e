"""Jobs that are not worth running any more: `expires`; ids whose failure is remembered: `remember_failures`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import DuplicateJob, EventKind, Failure, Holdfast, JobFailed, Placed, RunEvent
from tests.app.conftest import until

App = Holdfast[Any]


async def passed(seconds: float) -> None:
    """Let real time pass, and no worker run."""
    over = datetime.now(UTC) + timedelta(seconds=seconds)
    await until(lambda: datetime.now(UTC) > over)


async def test_job_that_waited_too_long_fails_without_a_run(app: App) -> None:
    runs: list[str] = []
    told: list[Failure] = []
    events: list[RunEvent] = []
    app.on_event(events.append)

    @app.task(name="t", expires=0.05)
    async def task(name: str) -> str:
        runs.append(name)
        return name

    @task.on_failure
    async def report(failure: Failure) -> None:
        told.append(failure)

    late = await task.enqueue("late")
    patient = await task.using(expires=timedelta(hours=1)).enqueue("patient")
    over = await task.using(expires=datetime.now(UTC) - timedelta(seconds=5)).enqueue("over")
    queued = await app.queue("t").enqueue({"name": "queued"}, expires=0.05)
    await passed(0.1)
    async with app.worker():
        assert await patient.result() == "patient"
        for handle in (late, over, queued):
            with pytest.raises(JobFailed, match="after the time of the job was over") as raised:
                await handle.result()
            assert (raised.value.kind, raised.value.attempts) == ("expired", 0)
        await until(lambda: len(told) == 3)
    assert runs == ["patient"]
    assert {failure.error.kind for failure in told} == {"expired"}
    failures = [event.error for event in events if event.kind is EventKind.FAILED and event.queue == "t"]
    assert [error.kind for error in failures if error] == ["expired"] * 3
    assert (await app.queue("t").stats()).totals["failed"] == 3


@pytest.mark.storages("memory")
async def test_expiry_counts_from_the_time_when_the_job_is_due(app: App) -> None:
    @app.task(name="t", expires=5)
    async def task() -> str:
        return "ran"

    async with app.worker():
        delayed = await task.using(delay=0.5, expires=0.4).enqueue()
        at = await task.using(run_at=datetime.now(UTC) + timedelta(seconds=0.2)).enqueue()
        assert [await handle.result() for handle in (delayed, at)] == ["ran", "ran"]


@pytest.mark.storages("memory")
async def test_retry_of_an_expired_job_gives_it_its_time_again(app: App) -> None:
    @app.task(name="t", expires=1)
    async def task() -> str:
        return "ran"

    handle = await task.enqueue()
    await passed(1.1)
    async with app.worker():
        with pytest.raises(JobFailed):
            await handle.result()
        assert await (await app.queue("t").retry(handle.id)).result() == "ran"


async def test_pulled_queue_fails_an_expired_job(app: App) -> None:
    queue = app.queue("pulled")
    handle = await queue.enqueue(1, expires=0.001)
    await passed(0.01)
    assert await queue.lease(wait=0) is None
    with pytest.raises(JobFailed) as raised:
        await handle.result(wait=5)
    assert raised.value.kind == "expired"


async def test_failed_id_does_not_run_again_while_its_failure_is_remembered(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", unique="{number}", max_retries=0, remember_failures=True)
    async def fails(number: int) -> None:
        runs.append(number)
        raise ValueError("no such number")

    async with app.worker():
        first = await fails.enqueue(7)
        with pytest.raises(JobFailed):
            await first.result()
        again = await fails.enqueue(7)
        assert (again.placed, again.generation) == (Placed.FAILED, first.generation)
        for failing in (again.result(wait=0), fails.call(7)):
            with pytest.raises(JobFailed, match="no such number") as raised:
                await failing
            assert raised.value.attempts == 1
        with pytest.raises(DuplicateJob):
            await fails.using(on_conflict="raise").enqueue(7)
        assert runs == [7]
        with pytest.raises(JobFailed):
            await (await app.queue("t").retry(first.id)).result()
    assert runs == [7, 7]


@pytest.mark.storages("memory")
async def test_without_the_option_a_failed_id_runs_again(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", unique="{number}", max_retries=0)
    async def fails(number: int) -> None:
        runs.append(number)
        raise ValueError

    async with app.worker():
        for _ in range(2):
            with pytest.raises(JobFailed):
                await fails.call(7)
    assert runs == [7, 7]
