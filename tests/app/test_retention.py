"""The records of a queue stay few: idle workers, and producers without workers, delete those past their time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast._core.jobs import Complete, Request, Settlement, Work
from tests.app.conftest import until

pytestmark = pytest.mark.suite("usual")

BATCH = 250


async def _leave_expired_records(app: Holdfast[Any], count: int) -> None:
    """Leave this number of results that nobody has deleted when they are past their time."""
    ttl_ms = max(2_000, count)
    for first in range(0, count, BATCH):
        await app.storage.enqueue("q", [Request(f"old-{first + at}", Work(b"{}")) for at in range(BATCH)])
        claim = await app.storage.claim("q", BATCH, worker="w", lease_ms=60_000)
        batch: list[Settlement] = [Complete(job.id, job.fence or 0, b"1", result_ttl_ms=ttl_ms) for job in claim.jobs]
        await app.storage.settle("q", batch, worker="w")
    await until(lambda: _expired_are(app, count), 60)


async def _expired_are(app: Holdfast[Any], count: int) -> bool:
    return (await app.queue("q").stats()).expired == count


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=pytest.mark.suite("slow"))])
async def test_idle_worker_deletes_expired_records(app: Holdfast[Any], count: int) -> None:
    @app.task(name="q")
    async def run() -> None: ...

    await _leave_expired_records(app, count)
    async with app.worker(lease=2):
        await until(lambda: _expired_are(app, 0))


async def test_producer_without_workers_deletes_expired_records(app: Holdfast[Any]) -> None:
    await _leave_expired_records(app, 1_000)
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(number) for number in range(250))
    for number in range(250):
        await queue.enqueue(number)
    assert (await queue.stats()).expired == 0


async def test_consumer_of_a_pull_queue_deletes_expired_records(app: Holdfast[Any]) -> None:
    await _leave_expired_records(app, 250)
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(number) for number in range(5))
    while (lease := await queue.lease(wait=0)) is not None:
        await lease.complete()
    assert (await queue.stats()).expired <= 250 - 2 * 5 - 10 * 5


async def test_bulk_load_with_an_inline_worker_leaves_few_expired_records(app: Holdfast[Any]) -> None:
    @app.task(name="q", result_ttl=0.1)
    async def run(number: int) -> int:
        return number

    most = 0
    async with app.worker(concurrency=200):
        for _ in range(15):
            handles = await app.enqueue_many(run.bind(number) for number in range(200))
            await asyncio.gather(*(handle.result() for handle in handles[-1:]))
            stats = await app.queue("q").stats()
            most = max(most, stats.expired)
    assert (await app.queue("q").stats()).totals["completed"] == 3_000
    assert most < 1_200
