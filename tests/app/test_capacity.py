"""How many runs at a time, and of which queues: sizes, caps, priorities, fair shares, patterns, pauses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from holdfast import Failure, Holdfast, OptionError
from tests.app.conftest import until

App = Holdfast[Any]


class Gauge:
    """Counts runs at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.ended = 0

    async def run(self, seconds: float = 0.02) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.now -= 1
            self.ended += 1


@pytest.mark.storages("memory")
async def test_task_concurrency_is_reached_and_not_exceeded(app: App) -> None:
    gauge = Gauge()

    @app.task(name="t", concurrency=3)
    async def work() -> None:
        await gauge.run()

    async with app.worker():
        await app.enqueue_many(work.bind() for _ in range(15))
        await until(lambda: gauge.ended == 15)
    assert gauge.most == 3


@pytest.mark.storages("memory")
async def test_task_concurrency_limits_sync_runs(app: App) -> None:
    lock = threading.Lock()
    running: list[int] = [0, 0, 0]

    @app.task(name="t", concurrency=2)
    def work() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running[1], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
            running[2] += 1

    async with app.worker():
        await app.enqueue_many(work.bind() for _ in range(10))
        await until(lambda: running[2] == 10)
    assert running[1] == 2


@pytest.mark.storages("memory")
async def test_a_workers_concurrency_limits_all_its_queues_together(app: App) -> None:
    gauge = Gauge()

    @app.task(name="a")
    async def one() -> None:
        await gauge.run()

    @app.task(name="b")
    async def other() -> None:
        await gauge.run()

    async with app.worker(concurrency=4):
        await app.enqueue_many(task.bind() for task in (one, other) for _ in range(12))
        await until(lambda: gauge.ended == 24)
    assert gauge.most == 4


@pytest.mark.storages("memory")
@pytest.mark.parametrize("size", [1, 10])
async def test_concurrency_of_a_worker_can_change_while_it_runs(app: App, size: int) -> None:
    ended: list[int] = []
    gate = asyncio.Semaphore(0)

    @app.task(name="t", size=size)
    async def work(number: int) -> None:
        await gate.acquire()
        ended.append(number)

    def release(count: int) -> None:
        for _ in range(count):
            gate.release()

    async with app.worker(concurrency=2) as worker:
        await app.enqueue_many(work.bind(n) for n in range(30))
        await until(lambda: worker.running == 2)
        worker.set_concurrency(5)
        await until(lambda: worker.running == 5)
        worker.set_concurrency(None)
        await until(lambda: worker.running == 30)
        worker.set_concurrency(3)
        await app.enqueue_many(work.bind(n) for n in range(30, 40))
        release(28)
        await until(lambda: len(ended) == 28 and worker.running == 3)
        assert max(ended) < 30
        release(12)
        await until(lambda: len(ended) == 40)
        with pytest.raises(OptionError, match="concurrency must be a whole number from 1"):
            worker.set_concurrency(0)


@pytest.mark.storages("memory")
async def test_runs_use_capacity_of_the_worker_by_their_size(app: App) -> None:
    gauge = Gauge()

    @app.task(name="t", size=300)
    async def large() -> None:
        await gauge.run()

    async with app.worker():
        await app.enqueue_many(large.bind() for _ in range(10))
        await until(lambda: gauge.ended == 10)
    assert gauge.most == 3


@pytest.mark.storages("memory")
async def test_a_run_larger_than_the_worker_runs_alone(app: App) -> None:
    gauge = Gauge()

    @app.task(name="t", size=5_000)
    async def huge() -> None:
        await gauge.run()

    async with app.worker():
        await app.enqueue_many(huge.bind() for _ in range(4))
        await until(lambda: gauge.ended == 4)
    assert gauge.most == 1


async def test_a_worker_holds_no_more_than_it_runs(app: App) -> None:
    gauge = Gauge()
    go_on = asyncio.Event()

    @app.task(name="t", concurrency=2)
    async def work() -> None:
        gauge.now += 1
        await go_on.wait()

    async with app.worker():
        await app.enqueue_many(work.bind() for _ in range(10))
        await until(lambda: gauge.now == 2)
        await asyncio.sleep(0.1)
        stats = await app.queue("t").stats()
        go_on.set()
    assert (stats.running, stats.ready) == (2, 8)


async def test_the_queue_of_higher_priority_goes_first(app: App) -> None:
    order: list[str] = []

    @app.task(name="a", queue_priority=10)
    async def low() -> None:
        order.append("low")

    @app.task(name="b", queue_priority=200)
    async def high() -> None:
        order.append("high")

    await app.enqueue_many(low.bind() for _ in range(5))
    await app.enqueue_many(high.bind() for _ in range(5))
    async with app.worker(concurrency=1):
        await until(lambda: len(order) == 10)
    assert order == ["high"] * 5 + ["low"] * 5


async def test_lowest_queue_is_served_while_a_higher_one_is_never_empty(app: App) -> None:
    order: list[str] = []

    @app.task(name="a", queue_priority=10)
    async def low() -> None:
        order.append("low")

    @app.task(name="b", queue_priority=200)
    async def high() -> None:
        order.append("high")
        if "low" not in order:
            await high.enqueue()

    await low.enqueue()
    await app.enqueue_many(high.bind() for _ in range(5))
    async with app.worker(concurrency=1):
        await until(lambda: "low" in order)
    assert order.index("low") <= 64


async def test_queues_of_one_priority_share_a_worker_with_concurrency_one(app: App) -> None:
    counts: Counter[str] = Counter()
    stop = False

    @app.task(name="a")
    async def one() -> None:
        counts["a"] += 1
        if not stop:
            await one.enqueue()

    @app.task(name="b")
    async def other() -> None:
        counts["b"] += 1
        if not stop:
            await other.enqueue()

    await app.enqueue_many(task.bind() for task in (one, other) for _ in range(3))
    async with app.worker(concurrency=1):
        await until(lambda: counts["a"] + counts["b"] >= 200, 20)
        stop = True
    assert min(counts["a"], counts["b"]) >= 40


async def test_every_queue_of_the_lowest_priority_is_served(app: App) -> None:
    counts: Counter[str] = Counter()
    stop = False

    @app.task(name="h", queue_priority=200)
    async def high() -> None:
        counts["h"] += 1
        if not stop:
            await high.enqueue()

    @app.task(name="a", queue_priority=10)
    async def one() -> None:
        counts["a"] += 1
        if not stop:
            await one.enqueue()

    @app.task(name="b", queue_priority=10)
    async def other() -> None:
        counts["b"] += 1
        if not stop:
            await other.enqueue()

    await app.enqueue_many(task.bind() for task in (one, other, high) for _ in range(2))
    async with app.worker(concurrency=1):
        await until(lambda: counts["a"] + counts["b"] >= 8, 20)
        stop = True
    assert counts["a"] > 0
    assert counts["b"] > 0


async def test_slow_queue_does_not_block_another(app: App) -> None:
    slow_runs = Gauge()
    quick: list[int] = []

    @app.task(name="a", concurrency=5)
    async def slow() -> None:
        await slow_runs.run(20)

    @app.task(name="b")
    async def fast(number: int) -> None:
        quick.append(number)

    async with app.worker(grace=0):
        await app.enqueue_many(slow.bind() for _ in range(50))
        await until(lambda: slow_runs.now == 5)
        await app.enqueue_many(fast.bind(n) for n in range(100))
        await until(lambda: len(quick) == 100)
        assert slow_runs.now == 5


async def test_freed_capacity_is_used_at_once(app: App) -> None:
    gauge = Gauge()

    @app.task(name="t", concurrency=1)
    async def work() -> None:
        await gauge.run(0)

    async with app.worker():
        begin = time.monotonic()
        await app.enqueue_many(work.bind() for _ in range(30))
        await until(lambda: gauge.ended == 30, 20)
    assert time.monotonic() - begin < 10  # At one look a second it would be half a minute.


@pytest.mark.storages("memory")
async def test_a_worker_serves_the_queues_that_match(app: App) -> None:
    ran: list[str] = []

    def task(name: str) -> Any:
        async def note() -> None:
            ran.append(name)

        return app.task(name=name)(note)

    tasks = {name: task(name) for name in ("reports.daily", "reports.weekly", "mail.send", "mail.sort")}

    @tasks["mail.send"].on_failure
    async def failed(failure: Any) -> None: ...

    worker = app.worker(["reports.*", "mail.send"])
    assert sorted(worker.queues) == ["mail.send", "mail.send/failed", "reports.daily", "reports.weekly"]
    async with worker:
        for each in tasks.values():
            await each.enqueue()
        await until(lambda: len(ran) == 3)
    assert sorted(ran) == ["mail.send", "reports.daily", "reports.weekly"]
    assert (await app.queue("mail.sort").stats()).ready == 1
    async with app.worker("mail.sort"):
        await until(lambda: len(ran) == 4)


async def test_a_worker_may_serve_fail_handlers_alone(app: App) -> None:
    failed: list[str] = []

    def task(name: str) -> Any:
        @app.task(name=name, max_retries=0)
        async def fail() -> None:
            raise ValueError(name)

        return fail

    tasks = [task(name) for name in ("mail.send", "mail.sort", "report")]
    for each in tasks:

        @each.on_failure
        async def mourn(failure: Failure) -> None:
            failed.append(failure.job.queue)

    for each in tasks:
        await each.enqueue()
    worker = app.worker("mail.*/failed", burst=True)
    assert worker.queues == ["mail.send/failed", "mail.sort/failed"]
    await worker.run()
    assert failed == []
    assert (await app.queue("mail.send").stats()).ready == 1
    await app.worker(["mail.send", "report"], burst=True).run()
    assert sorted(failed) == ["mail.send", "report"]
    assert app.worker("*/failed").queues == ["mail.send/failed", "mail.sort/failed", "report/failed"]
    assert app.worker(["report/failed", "report"]).queues == ["report", "report/failed"]
    async with app.worker("*/failed") as worker:
        await worker.stop_serving("report/failed")
        assert worker.queues == ["mail.send/failed", "mail.sort/failed"]


@pytest.mark.storages("memory")
async def test_a_pattern_without_a_fail_handler_is_refused(app: App) -> None:
    @app.task(name="mail.send")
    async def send() -> None: ...

    with pytest.raises(OptionError, match=r"no fail handler matches 'mail.*/failed': the app has none"):
        app.worker("mail.*/failed")

    @send.on_failure
    async def mourn(failure: Failure) -> None: ...

    with pytest.raises(OptionError, match=r"no fail handler matches 'report/failed': the app has mail.send/failed"):
        app.worker("report/failed")


@pytest.mark.storages("memory")
async def test_the_queues_of_a_worker_may_come_from_a_generator(app: App) -> None:
    for name in ("reports.daily", "mail.send", "mail.sort"):

        @app.task(name=name)
        async def note() -> None: ...

    assert app.worker(name for name in ("reports.*", "mail.send")).queues == ["reports.daily", "mail.send"]


@pytest.mark.storages("memory")
async def test_a_pattern_that_matches_nothing_is_refused(app: App) -> None:
    @app.task(name="reports.daily")
    async def report() -> None: ...

    with pytest.raises(OptionError, match=r"report\.\*"):
        app.worker(["reports.*", "report.*"])


async def test_a_paused_queue_keeps_its_jobs_and_runs_go_on(app: App) -> None:
    started: list[int] = []
    go_on = asyncio.Event()

    @app.task(name="t")
    async def work(number: int) -> int:
        started.append(number)
        await go_on.wait()
        return number

    async with app.worker():
        first = await work.enqueue(1)
        await until(lambda: started)
        await app.queue("t").pause(reason="release")
        second = await work.enqueue(2)
        go_on.set()
        assert await first.result(wait=10) == 1
        await asyncio.sleep(0.1)
        stats = await app.queue("t").stats()
        assert (stats.paused, stats.reason, stats.ready, started) == (True, "release", 1, [1])
        await app.queue("t").resume()
        assert await second.result(wait=10) == 2


async def test_paused_queue_does_not_slow_other_queues(app: App) -> None:
    done: list[int] = []

    @app.task(name="a")
    async def paused() -> None: ...

    @app.task(name="b")
    async def work(number: int) -> None:
        done.append(number)

    await app.queue("a").pause()
    async with app.worker(concurrency=1):
        await app.enqueue_many(paused.bind() for _ in range(20))
        await app.enqueue_many(work.bind(n) for n in range(20))
        await until(lambda: len(done) == 20)
    assert (await app.queue("a").stats()).ready == 20


async def test_a_worker_with_many_queues_serves_them_all(app: App) -> None:
    done: set[str] = set()

    def task(name: str) -> Any:
        async def note() -> None:
            done.add(name)

        return app.task(name=name)(note)

    tasks = [task(f"q{n}") for n in range(60)]
    async with app.worker():
        await app.enqueue_many(task.bind() for task in tasks)
        await until(lambda: len(done) == 60, 20)


@pytest.mark.parametrize("burst", [False, True])
async def test_waiting_worker_does_not_busy_loop(app: App, burst: bool) -> None:
    @app.task(name="t")
    async def work() -> None:
        await asyncio.sleep(1.8)

    await work.enqueue()
    async with app.worker(burst=burst):
        await until(lambda: _runs(app, 1))
        cpu = time.process_time()
        await asyncio.sleep(1.5)
        assert time.process_time() - cpu < 0.5


async def _runs(app: App, count: int) -> bool:
    return (await app.queue("t").stats()).running == count
