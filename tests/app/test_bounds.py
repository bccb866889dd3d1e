"""What a worker keeps and does at most: memory, events for hooks, claims in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Holdfast, OptionError, RunEvent
from holdfast._worker import telemetry
from holdfast._worker.worker import WorkerContext
from holdfast.testing import rehearse
from tests.app.conftest import until

App = Holdfast[Any]
MakeApp = Callable[..., App]

# Memory


RATES = pytest.mark.skipif(
    "HOLDFAST_RATES" not in os.environ,
    reason="compares rates: set HOLDFAST_RATES=1 on a machine that does nothing else",
)


def workers_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, WorkerContext) for thing in gc.get_objects())


async def test_stopped_worker_is_not_kept_in_memory(app: App) -> None:
    @app.task(name="t", timeout=86_400)
    async def work() -> int:
        return 1

    before = workers_in_memory()
    for _ in range(3):
        async with app.worker(lease=3_600):
            assert await work.call() == 1
    await asyncio.sleep(0)
    assert workers_in_memory() == before


@pytest.mark.storages("memory")
async def test_drains_of_a_rehearsal_keep_no_worker_in_memory(app: App) -> None:
    @app.task(name="t", timeout=86_400)
    async def work() -> None:
        pass

    before = workers_in_memory()
    with rehearse(app) as jobs:
        for _ in range(10):
            await work.enqueue()
            assert len(await jobs.drain()) == 1
        await asyncio.sleep(0)
        assert workers_in_memory() == before


# Hooks


@pytest.mark.storages("memory")
async def test_events_for_a_slow_hook_are_dropped_and_counted(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "MAX_HOOK_CALLS", 10)
    caplog.set_level(logging.WARNING, "holdfast.worker")
    may_go_on = asyncio.Event()
    seen: list[RunEvent] = []
    done = 0

    @app.on_event
    async def slow(event: RunEvent) -> None:
        seen.append(event)
        await may_go_on.wait()

    @app.task(name="t")
    async def work() -> None:
        nonlocal done
        done += 1

    async with app.worker():
        await app.enqueue_many(work.bind() for _ in range(50))
        await until(lambda: done == 50)
        await asyncio.sleep(0.1)
        may_go_on.set()
    dropped = [int(message.split()[1]) for message in caplog.messages if message.startswith("dropped")]
    assert len(seen) == 11
    assert len(dropped) == 2  # At once, and the others when the worker stops.
    assert sum(dropped) == 100 - 11


# Many queues


def serve_many(app: App, count: int, *, size: int = 10, prefix: str = "q") -> Counter[str]:
    """Define many tasks. Returns their runs by event."""
    seen: Counter[str] = Counter()

    @app.on_event
    async def note(event: RunEvent) -> None:
        seen[event.kind] += 1

    async def work() -> None:
        pass

    for number in range(count):
        app.task(name=f"{prefix}{number}", size=size)(work)
    return seen


async def rate(app: App, queues: int) -> float:
    """Jobs per second of CPU time of a worker that serves these queues: the best of three rounds."""
    seen = serve_many(app, queues)
    best = 0.0
    async with app.worker():
        for number in range(4):
            began = time.process_time()
            await app.enqueue_many(app.queue(f"q{n % queues}").bind({}) for n in range(4_000))
            await until(lambda: seen["completed"] == 4_000 * (number + 1), 60)  # noqa: B023
            if number > 0:  # The first round starts the worker.
                best = max(best, 4_000 / (time.process_time() - began))
    return best


@RATES
@pytest.mark.suite("slow")
@pytest.mark.storages("memory")
async def test_worker_of_4000_queues_has_half_the_rate_of_100(app: App, make_app: MakeApp) -> None:
    few = await rate(app, 100)
    async with make_app() as other:
        assert await rate(other, 4_000) > few / 2


@RATES
@pytest.mark.suite("slow")
@pytest.mark.storages("sqlite")
async def test_short_leases_of_many_ready_queues_do_not_expire(app: App) -> None:
    """Two workers with 2,000 ready queues: a claim whose reply comes after its lease only releases its jobs."""
    seen = serve_many(app, 2_000, size=1)
    await app.enqueue_many(app.queue(f"q{n % 2_000}").bind({}) for n in range(6_000))
    async with app.worker(lease=1), app.worker(lease=1):
        await until(lambda: seen["completed"] == 6_000, 60)
    assert seen["released"] < 300


async def test_worker_of_many_queues_announces_all_of_them(app: App) -> None:
    serve_many(app, 2_000, prefix="a-queue-with-a-name-that-is-as-long-as-some-users-like-")
    last = app.queue(app.tasks[-1])

    async def workers() -> list[str]:
        return (await last.stats()).workers

    async with app.worker(name="wide"):
        await until(workers)
        assert await workers() == ["wide"]
        await last.call({})
        assert await workers() == ["wide"]


@pytest.mark.storages("memory")
def test_worker_of_more_than_10000_queues_is_refused(app: App) -> None:
    serve_many(app, 10_001)
    with pytest.raises(OptionError, match="a worker serves at most 10000 queues: choose some of them"):
        app.worker()
    assert len(app.worker("q1*").queues) == 1_112
