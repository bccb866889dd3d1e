"""A queue whose metadata cannot be read stands still until `repair`. It holds up no other queue."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from holdfast import Failure, Holdfast
from tests import servers
from tests.app.conftest import Place, until

App = Holdfast[Any]

pytestmark = pytest.mark.storages("sqlite", "valkey")


def damage(place: Place, queue: str) -> None:
    """Overwrite the metadata of a queue with bytes that are not metadata."""
    if place.storage == "sqlite":
        with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"), timeout=5)) as db:
            changed = db.execute(
                "UPDATE holdfast_queues SET meta = x'c1' WHERE namespace = ? AND name = ?", (place.namespace, queue)
            )
            db.commit()
            assert changed.rowcount == 1
        return
    server = servers.shared("valkey")
    assert server is not None
    name, slash, suffix = queue.partition("/")
    key = f"{{{place.namespace}/{name}}}{slash}{suffix}:meta"
    assert server.command("EXISTS", key)
    server.command("SET", key, "garbage")


async def test_damaged_queue_of_a_fail_handler_holds_up_only_jobs_that_fail(app: App, place: Place) -> None:
    runs: Counter[int] = Counter()
    failures: list[str] = []

    @app.task(name="q", max_retries=0)
    async def work(number: int) -> None:
        runs[number] += 1
        if number == 3:
            raise ValueError("number 3 fails")

    @work.on_failure
    async def failed(failure: Failure) -> None:
        failures.append(failure.error.type)

    await work.enqueue(3)
    async with app.worker():
        await until(lambda: failures == ["ValueError"])
    damage(place, "q/failed")
    await app.enqueue_many(work.bind(n) for n in range(12))
    async with app.worker(lease=0.5, grace=0.1):
        await until(lambda: len(runs) == 12 and runs[3] >= 3)
        await work.enqueue(12)
        await until(lambda: runs[12] == 1)
    assert {number for number, count in runs.items() if count > 1} == {3}
    await app.queue("q/failed").repair()
    async with app.worker(lease=0.5):
        await until(lambda: len(failures) == 2)


async def test_damaged_queue_does_not_keep_a_full_worker_from_sweeping_others(app: App, place: Place) -> None:
    busy = asyncio.Event()

    @app.task(name="a")
    async def block() -> None:
        busy.set()
        await asyncio.sleep(30)

    @app.task(name="b")
    async def damaged() -> None: ...

    @app.task(name="c")
    async def healthy() -> None: ...

    await damaged.enqueue()
    handle = await healthy.enqueue()
    await app.storage.claim("c", 1, worker="dead", lease_ms=100)
    await app.storage.claim("b", 1, worker="dead", lease_ms=100)
    await block.enqueue()
    damage(place, "b")

    async def is_swept() -> bool:
        info = await app.queue("c").get(handle.id)
        return info is not None and info.stalls == 1

    async with app.worker(lease=0.5, concurrency=1, grace=0):
        await busy.wait()
        await until(is_swept)
    await app.queue("b").repair()


async def test_stats_of_a_healthy_queue_work_beside_a_damaged_one(app: App, place: Place) -> None:
    for name in ("bad", "good"):
        await app.queue(name).enqueue({})
    damage(place, "bad")
    assert (await app.queue("good").stats()).ready == 1
    problems = {queue.queue: queue.problem for queue in (await app.stats()).queues}
    assert problems["good"] == ""
    assert "holdfast repair bad" in problems["bad"]
    assert await app.queue("bad").repair()
    assert (await app.queue("bad").stats()).ready == 1
