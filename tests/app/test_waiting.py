"""Runs that wait for other jobs lend their capacity to them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from holdfast import Holdfast, JobFailed, PermanentError, WaitTimeout
from holdfast._worker.worker import Worker
from tests.app.conftest import until

App = Holdfast[Any]

pytestmark = pytest.mark.storages("memory")


def used(worker: Worker) -> int:
    return worker._context.claimer.capacity.used


def lent(worker: Worker) -> int:
    return worker._context.claimer.capacity.hosts[0].waiting_units


async def test_runs_that_wait_for_other_jobs_do_not_block_them(app: App) -> None:
    @app.task(name="step", timeout=5)
    async def step(n: int) -> int:
        return 10 * n

    @app.task(name="pipeline", size=1_000, timeout=5)
    async def pipeline(n: int) -> int:
        return await step.using(wait=4).call(n) + 1

    async with app.worker() as worker:
        handles = await app.enqueue_many(pipeline.bind(n) for n in range(10))
        assert await asyncio.gather(*(handle.result(wait=10) for handle in handles)) == [10 * n + 1 for n in range(10)]
        await until(lambda: (used(worker), lent(worker)) == (0, 0))


async def test_runs_that_wait_in_threads_do_not_block_other_jobs(app: App) -> None:
    @app.task(name="step", timeout=8)
    def step(n: int) -> int:
        return 10 * n

    all_run = threading.Barrier(100, timeout=5)

    @app.task(name="pipeline", timeout=8)
    def pipeline(n: int) -> int:
        all_run.wait()
        return step.sync.using(wait=7).call(n)

    async with app.worker() as worker:
        handles = await app.enqueue_many(pipeline.bind(n) for n in range(100))
        assert await asyncio.gather(*(handle.result(wait=10) for handle in handles)) == [10 * n for n in range(100)]
        await until(lambda: (used(worker), lent(worker)) == (0, 0))


async def test_nested_waits_lend_at_each_level(app: App) -> None:
    @app.task(name="c", size=1_000, timeout=5)
    async def last(n: int) -> int:
        return n

    @app.task(name="b", size=1_000, timeout=5)
    async def middle(n: int) -> int:
        return await (await last.enqueue(n)).result(wait=4)

    @app.task(name="a", size=1_000, timeout=5)
    async def first(n: int) -> int:
        return await middle.using(wait=4).call(n)

    async with app.worker() as worker:
        handles = await app.enqueue_many(first.bind(n) for n in range(3))
        assert await asyncio.gather(*(handle.result(wait=10) for handle in handles)) == [0, 1, 2]
        await until(lambda: (used(worker), lent(worker)) == (0, 0))


async def test_lending_ends_when_the_awaited_job_fails_or_takes_too_long(app: App) -> None:
    @app.task(name="step", timeout=5)
    async def step(fails: bool) -> None:
        if fails:
            raise PermanentError
        await asyncio.sleep(1)

    @app.task(name="pipeline", size=1_000, timeout=5, max_retries=0)
    async def pipeline(fails: bool) -> str:
        try:
            await step.using(wait=0.3).call(fails)
        except (JobFailed, WaitTimeout) as error:
            assert lent(worker) == 1_000
            await until(lambda: lent(worker) == 0)
            return type(error).__name__
        return "nothing"

    async with app.worker() as worker:
        assert await pipeline.call(True) == "JobFailed"
        assert await pipeline.call(False) == "WaitTimeout"
        await until(lambda: (used(worker), lent(worker)) == (0, 0))


async def test_lent_capacity_is_only_for_awaited_queues(app: App) -> None:
    may_end = asyncio.Event()
    others: list[int] = []

    @app.task(name="chain", size=250, timeout=20, max_retries=0)
    async def chain(depth: int) -> int:
        if depth == 1:
            await may_end.wait()
            return 0
        return 1 + await chain.using(wait=15).call(depth - 1)

    @app.task(name="other")
    async def other(n: int) -> None:
        others.append(n)

    async with app.worker() as worker:
        chains = await app.enqueue_many([chain.bind(12), chain.bind(4)])
        await until(lambda: used(worker) == 4_000)
        await other.enqueue(1)
        await asyncio.sleep(0.2)
        assert (used(worker), others) == (4_000, [])
        may_end.set()
        assert [await handle.result(wait=10) for handle in chains] == [11, 3]
        await until(lambda: others == [1])
        await until(lambda: (used(worker), lent(worker)) == (0, 0))


async def test_worker_concurrency_is_lent_too(app: App) -> None:
    @app.task(name="step", timeout=5)
    async def step(n: int) -> int:
        return n

    @app.task(name="pipeline", timeout=5)
    async def pipeline(n: int) -> int:
        return await step.using(wait=4).call(n)

    async with app.worker(concurrency=2):
        handles = await app.enqueue_many(pipeline.bind(n) for n in range(6))
        assert await asyncio.gather(*(handle.result(wait=10) for handle in handles)) == list(range(6))
