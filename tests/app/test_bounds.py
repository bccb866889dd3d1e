"""What a worker keeps and does at most: memory, events for hooks, claims in flight."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from holdfast import Holdfast, OptionError, RunEvent
from holdfast._core.replies import Swept
from holdfast._worker import telemetry
from holdfast._worker.worker import WorkerContext
from holdfast.storage.local.memory import MemoryStorage
from holdfast.testing import rehearse
from tests.app.conftest import until

pytestmark = pytest.mark.suite("usual")

App = Holdfast[Any]
MakeApp = Callable[..., App]

# Memory


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
    """Jobs per second of CPU time of a worker that serves these queues: the best of two rounds. The jobs come one per
    queue, so that each claim is for one job, however many queues there are."""
    seen = serve_many(app, queues)
    wave = min(queues, 4_000)
    best, total = 0.0, 0
    async with app.worker():
        for number in range(3):
            began = time.process_time()
            for _ in range(4_000 // wave):
                await app.enqueue_many(app.queue(f"q{n}").bind({}) for n in range(wave))
                total += wave
                await until(lambda: seen["completed"] == total, 60)  # noqa: B023
            if number > 0:  # The first round starts the worker.
                best = max(best, 4_000 / (time.process_time() - began))
    return best


@pytest.mark.suite("slow")
@pytest.mark.storages("memory")
async def test_worker_of_10000_queues_has_half_the_rate_of_100(app: App, make_app: MakeApp) -> None:
    few = await rate(app, 100)
    async with make_app() as other:
        assert await rate(other, 10_000) > few / 2


@pytest.mark.suite("slow")
@pytest.mark.storages("sqlite")
async def test_short_leases_of_many_ready_queues_do_not_expire(app: App) -> None:
    """Two workers with 2,000 ready queues: a claim whose reply comes after its lease only releases its jobs."""
    seen = serve_many(app, 2_000, size=1)
    await app.enqueue_many(app.queue(f"q{n % 2_000}").bind({}) for n in range(6_000))
    async with app.worker(lease=1), app.worker(lease=1):
        await until(lambda: seen["completed"] == 6_000, 60)
    assert seen["released"] < 300


class SlowStorage(MemoryStorage):
    """A storage in which sweeps and notes take time."""

    def __init__(self, *, sweep_s: float = 0.0, note_s: float = 0.0) -> None:
        super().__init__()
        self.sweep_s, self.note_s = sweep_s, note_s
        self.swept: list[str] = []

    async def _sweep(self, queue: str, limit: int, worker: str | None) -> Swept:
        self.swept.append(queue)
        await asyncio.sleep(self.sweep_s)
        return await super()._sweep(queue, limit, worker)

    async def _write_notes(self, notes: Mapping[str, bytes], ttl_ms: int) -> None:
        await asyncio.sleep(self.note_s if notes else 0)
        await super()._write_notes(notes, ttl_ms)


async def test_slow_notes_of_many_tasks_cost_no_heartbeat() -> None:
    async with Holdfast[Any](storage=SlowStorage(note_s=0.2)) as app:
        serve_many(app, 1_000)
        async with app.worker(lease=2):
            await app.queue("q0").call({})


async def test_beats_sweep_many_ready_queues_in_turn_and_in_time(caplog: pytest.LogCaptureFixture) -> None:
    storage = SlowStorage(sweep_s=0.1)
    async with Holdfast[Any](storage=storage) as app:
        serve_many(app, 300)
        started, may_end = asyncio.Event(), asyncio.Event()

        @app.task(name="long")
        async def long() -> None:
            started.set()
            await may_end.wait()

        async with app.worker(lease=2, concurrency=1):
            await long.enqueue()
            await started.wait()
            await app.enqueue_many(app.queue(f"q{n}").bind({}) for n in range(300))  # They stay ready.
            await until(lambda: len(storage.swept) >= 6)
            may_end.set()
    assert len(set(storage.swept[:6])) == 6
    assert "heartbeat" not in caplog.text


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
