"""One run of an id at a time: singletons, unique jobs, and periodic jobs that ask for their own next run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Failure, Holdfast, JobFailed, Placed, State, Update, current_job
from tests.app.conftest import until

App = Holdfast[Any]
MakeApp = Callable[..., App]

PERIOD_S = 0.05


class Watch:
    """Sees runs, and whether two of one id overlap."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most = 0
        self.ran: list[Any] = []

    async def run(self, what: Any, seconds: float = 0.005) -> None:
        id = current_job().id
        self.running[id] += 1
        self.most = max(self.most, self.running[id])
        try:
            await asyncio.sleep(seconds)
            self.ran.append(what)
        finally:
            self.running[id] -= 1


# Singletons


async def test_a_singleton_never_overlaps_and_the_newest_request_runs(app: App, make_app: MakeApp) -> None:
    watch = Watch()

    async def sync(user: str, version: int) -> int:
        await watch.run((user, version))
        return version

    options: dict[str, Any] = {"name": "t", "singleton": "sync:{user}"}
    task = app.task(**options)(sync)
    async with make_app() as other:
        other_task = other.task(**options)(sync)
        async with app.worker(), other.worker():
            handles: list[Any] = []
            for version in range(0, 100, 4):
                requests = [
                    (task if (version + n) % 2 else other_task).enqueue(user, version + n)
                    for n in range(4)
                    for user in ("ada", "bob")
                ]
                handles += await asyncio.gather(*requests)
            newest: dict[str, Any] = {}
            for handle in handles:
                if handle.id not in newest or handle.generation >= newest[handle.id].generation:
                    newest[handle.id] = handle
            ends = [await handle.result(wait=20) for handle in handles]
            for user in ("ada", "bob"):
                last = [version for name, version in watch.ran if name == user][-1]
                assert await newest[f"sync:{user}"].result(wait=5) == last
    assert watch.most == 1
    assert len(ends) == 200
    assert len(watch.ran) < 200  # Requests that came during a run were one.


async def test_a_request_during_a_run_runs_after_it_with_its_own_arguments(app: App) -> None:
    watch = Watch()
    started = asyncio.Event()
    go_on = asyncio.Event()

    @app.task(name="t", singleton="only")
    async def work(number: int) -> int:
        started.set()
        await go_on.wait()
        await watch.run(number)
        return number

    async with app.worker():
        first = await work.enqueue(1)
        await started.wait()
        second = await work.enqueue(2)
        third = await work.enqueue(3)
        assert [handle.placed for handle in (first, second, third)] == [Placed.NEW, Placed.DEFERRED, Placed.DEFERRED]
        go_on.set()
        assert await first.result(wait=10) == 1
        assert await second.result(wait=10) == 3
        assert await third.result(wait=10) == 3
    assert (watch.ran, watch.most) == ([1, 3], 1)


async def test_a_request_during_a_run_that_fails_is_not_lost(app: App) -> None:
    started = asyncio.Event()
    go_on = asyncio.Event()
    ran: list[int] = []

    @app.task(name="t", singleton="only", max_retries=0)
    async def work(number: int) -> int:
        ran.append(number)
        started.set()
        await go_on.wait()
        if number == 1:
            raise ValueError("the first")
        return number

    async with app.worker():
        first = await work.enqueue(1)
        await started.wait()
        second = await work.enqueue(2)
        go_on.set()
        assert await second.result(wait=10) == 2
        with pytest.raises(JobFailed, match="the first"):
            await first.result(wait=10)
    assert ran == [1, 2]


async def test_a_request_during_a_run_takes_the_place_of_its_retry(app: App) -> None:
    started = asyncio.Event()
    go_on = asyncio.Event()
    ran: list[tuple[int, int]] = []

    @app.task(name="t", singleton="only", min_backoff=60)
    async def work(number: int) -> int:
        ran.append((number, current_job().retries))
        started.set()
        await go_on.wait()
        if number == 1:
            raise ValueError("the first")
        return number

    async with app.worker():
        await work.enqueue(1)
        await started.wait()
        second = await work.enqueue(2)
        go_on.set()
        assert await second.result(wait=10) == 2
    assert ran == [(1, 0), (2, 0)]


async def test_singletons_of_different_arguments_run_side_by_side(app: App) -> None:
    both = asyncio.Barrier(2)

    @app.task(name="t", singleton="{user}")
    async def work(user: str) -> str:
        await both.wait()
        return user

    async with app.worker():
        calls = [work.using(wait=10).call(user) for user in ("ada", "bob")]
        assert await asyncio.gather(*calls) == ["ada", "bob"]


async def test_a_unique_job_runs_once_and_later_callers_get_its_result(app: App) -> None:
    runs: list[str] = []

    @app.task(name="t", unique="report:{day}")
    async def report(day: str, style: str = "plain") -> str:
        runs.append(day)
        await asyncio.sleep(0.05)
        return f"{day} {style}"

    async with app.worker():
        calls = [report.using(wait=10).call("monday", style) for style in ("plain", "bold", "plain")]
        assert len(set(await asyncio.gather(*calls))) == 1
        assert await report.using(wait=10).call("tuesday") == "tuesday plain"
        handle = await report.enqueue("monday", "late")
        assert handle.placed is Placed.COMPLETED
    assert runs == ["monday", "tuesday"]


# Periodic jobs


async def test_periodic_job_repeats_and_never_duplicates(app: App, make_app: MakeApp) -> None:
    watch = Watch()
    times: list[float] = []

    async def tick() -> None:
        times.append(time.time())
        await current.using(delay=PERIOD_S).enqueue()
        await watch.run(current_job().attempt)

    current = app.task(name="t", singleton="tick")(tick)
    async with make_app() as other:
        other.task(name="t", singleton="tick")(tick)
        async with app.worker(), other.worker():
            for _ in range(3):  # Every program asks for it when it starts.
                await current.enqueue()
            await until(lambda: len(watch.ran) >= 8, 20)
            stats = await app.queue("t").stats()
            assert stats.ready + stats.scheduled + stats.running == 1
    assert watch.most == 1
    gaps = [after - before for before, after in itertools.pairwise(times[3:])]
    assert min(gaps) >= PERIOD_S - 0.001
    assert await _live(app) == 1
    await app.queue("t").purge()


async def test_a_periodic_job_survives_its_failures(app: App) -> None:
    watch = Watch()
    failures: list[int] = []

    @app.task(name="t", singleton="tick", max_retries=0)
    async def tick() -> None:
        await tick.using(delay=0.02).enqueue()
        if len(failures) < 5:
            failures.append(1)
            raise ValueError("a bad day")
        await watch.run("good")

    async with app.worker():
        await tick.enqueue()
        await until(lambda: len(watch.ran) >= 3)
    assert len(failures) == 5
    assert await _live(app) == 1
    await app.queue("t").purge()


async def test_periodic_job_survives_exhausted_retries_and_its_fail_handler_runs(app: App) -> None:
    told: list[int] = []
    retries: list[int] = []

    @app.task(name="t", singleton="tick", max_retries=2, min_backoff=0)
    async def tick() -> None:
        await tick.using(delay=0.02, on_conflict=Update(reset_counts=False)).enqueue()
        retries.append(current_job().retries)
        if len(retries) <= 7:
            raise ValueError("a bad day")

    @tick.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure.job.attempts)

    async with app.worker():
        await tick.enqueue()
        await until(lambda: len(retries) >= 10 and len(told) >= 2)
    assert retries[:10] == [0, 1, 2, 0, 1, 2, 0, 1, 0, 0]
    assert told == [3, 3]
    assert await _live(app) == 1
    await app.queue("t").purge()


async def test_a_periodic_job_survives_restarts_of_its_worker(app: App) -> None:
    watch = Watch()

    @app.task(name="t", singleton="tick")
    async def tick() -> None:
        await tick.using(delay=0.02).enqueue()
        await watch.run("tick", 0.02)

    await tick.enqueue()
    for _ in range(4):
        seen = len(watch.ran) + sum(watch.running.values())
        async with app.worker(grace=0):
            await until(lambda seen=seen: len(watch.ran) + sum(watch.running.values()) > seen)
        assert await _live(app) == 1
    assert watch.most == 1
    async with app.worker():
        seen = len(watch.ran)
        await until(lambda: len(watch.ran) >= seen + 2)
    await app.queue("t").purge()


async def test_periodic_job_survives_the_death_of_its_worker(app: App) -> None:
    watch = Watch()

    @app.task(name="t", singleton="tick")
    async def tick() -> None:
        await tick.using(delay=0.02).enqueue()
        await watch.run(current_job().stalls)

    await tick.enqueue()
    (job,) = (await app.storage.claim("t", 1, worker="dead", lease_ms=500)).jobs
    assert job.id == "tick"
    # Its first act was done, then it died: the next request waits behind a lease that nobody extends.
    await tick.using(delay=0.02).enqueue()
    async with app.worker(lease=0.5):
        await until(lambda: len(watch.ran) >= 3)
    assert watch.most == 1
    assert await _live(app) == 1
    await app.queue("t").purge()


async def test_a_periodic_job_that_is_cancelled_before_its_next_run_ends(app: App) -> None:
    watch = Watch()

    @app.task(name="t", singleton="tick")
    async def tick() -> None:
        await tick.using(delay=60).enqueue()
        await watch.run(1)

    async def scheduled() -> bool:
        job = await app.queue("t").get("tick")
        return bool(watch.ran) and job is not None and job.state is State.WAITING

    async with app.worker():
        await tick.enqueue()
        await until(scheduled)
        assert await app.queue("t").cancel("tick")
    assert await _live(app) == 0


async def _live(app: App) -> int:
    stats = await app.queue("t").stats()
    return stats.ready + stats.scheduled + stats.running
