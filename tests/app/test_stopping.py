"""Runs that are stopped, and workers that stop: cancel, grace, quick stop, eviction, bursts, restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import CancelResult, Holdfast, JobCancelled, OptionError, State, WorkerStopped, current_job
from holdfast._worker.claimer import Claimer
from tests.app.conftest import until

App = Holdfast[Any]
MakeApp = Callable[..., App]


# Cancel


async def test_cancelled_async_run_is_cancelled_with_a_reason(app: App) -> None:
    seen: list[str | None] = []
    started = asyncio.Event()

    @app.task(name="t", min_backoff=0)
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(current_job().stopping)
            raise

    async with app.worker(lease=0.5):
        handle = await slow.enqueue()
        await started.wait()
        assert await handle.cancel() is CancelResult.ASKED
        with pytest.raises(JobCancelled):
            await handle.result(wait=10)
        await until(lambda: _is(handle.state, State.CANCELLED))
    assert seen == ["cancel"]


async def test_a_cancelled_sync_run_sees_it_and_ends(app: App) -> None:
    seen: list[str | None] = []
    started = threading.Event()

    @app.task(name="t", min_backoff=0)
    def slow() -> None:
        started.set()
        while current_job().stopping is None:
            time.sleep(0.01)
        seen.append(current_job().stopping)
        raise InterruptedError

    async with app.worker(lease=0.5):
        handle = await slow.enqueue()
        await until(started.is_set)
        assert await handle.cancel() is CancelResult.ASKED
        await until(lambda: _is(handle.state, State.CANCELLED))
    assert seen == ["cancel"]


async def test_run_that_returns_despite_a_cancel_is_completed(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="t")
    async def stubborn() -> str:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            pass
        return "done"

    async with app.worker(lease=0.5):
        handle = await stubborn.using(id="j").enqueue()
        await started.wait()
        assert await handle.cancel() is CancelResult.ASKED
        await until(lambda: _is(handle.state, State.COMPLETED))
        job = await app.queue("t").get("j")
    assert job is not None
    assert job.result == "done"


async def test_a_cancelled_run_that_fails_is_cancelled_without_a_fail_handler(app: App) -> None:
    told: list[Any] = []
    started = asyncio.Event()

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            raise ValueError("while it was cancelled")

    @fails.on_failure
    async def note(failure: Any) -> None:
        told.append(failure)

    async with app.worker(lease=0.5):
        handle = await fails.enqueue()
        await started.wait()
        await handle.cancel()
        await until(lambda: _is(handle.state, State.CANCELLED))
        stats = await app.queue("t/failed").stats()
    assert (told, stats.totals.get("enqueued", 0)) == ([], 0)


async def test_a_job_cancelled_before_its_start_never_runs(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t")
    async def note(number: int) -> None:
        runs.append(number)

    first, _ = [await note.enqueue(n) for n in (1, 2)]
    assert await first.cancel() is CancelResult.CANCELLED
    async with app.worker():
        await until(lambda: runs)
    assert runs == [2]


async def test_cancelled_job_stops_and_other_runs_continue(app: App) -> None:
    started: list[int] = []
    go_on = asyncio.Event()

    @app.task(name="t")
    async def slow(number: int) -> int:
        started.append(number)
        await go_on.wait()
        return number

    async with app.worker(lease=0.5):
        handles = [await slow.enqueue(n) for n in range(5)]
        await until(lambda: len(started) == 5)
        await handles[2].cancel()
        await until(lambda: _is(handles[2].state, State.CANCELLED))
        go_on.set()
        rest = [handle for handle in handles if handle is not handles[2]]
        assert [await handle.result(wait=10) for handle in rest] == [0, 1, 3, 4]


# Shutdown


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_runs_finish_within_the_grace(app: App, kind: str) -> None:
    started = threading.Event()
    seen: list[str | None] = []

    if kind == "async":

        @app.task(name="t")
        async def slow() -> str:
            started.set()
            await asyncio.sleep(0.2)
            seen.append(current_job().stopping)
            return "done"

    else:

        @app.task(name="t")
        def slow() -> str:
            started.set()
            time.sleep(0.2)
            seen.append(current_job().stopping)
            return "done"

    async with app.worker(grace=20):
        handle = await slow.using(id="j").enqueue()
        await until(started.is_set)
    assert await handle.state() is State.COMPLETED
    assert seen == [None]


async def test_a_worker_that_stops_claims_nothing_more(app: App) -> None:
    runs: list[int] = []
    go_on = asyncio.Event()

    @app.task(name="t", concurrency=1)
    async def slow(number: int) -> None:
        runs.append(number)
        await go_on.wait()

    async with app.worker() as worker:
        await app.enqueue_many(slow.bind(n) for n in range(3))
        await until(lambda: runs)
        worker.stop()
        await app.enqueue_many(slow.bind(n) for n in range(3, 6))
        go_on.set()
    assert runs == [0]
    stats = await app.queue("t").stats()
    assert (stats.ready, stats.running) == (5, 0)


async def test_after_the_grace_async_runs_are_cancelled_and_go_back_uncounted(app: App) -> None:
    seen: list[str | None] = []
    started: list[int] = []

    @app.task(name="t")
    async def slow(number: int) -> None:
        started.append(number)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(current_job().stopping)
            raise

    begin = time.monotonic()
    async with app.worker(grace=0.1):
        handles = [await slow.using(id=f"j{n}").enqueue(n) for n in range(3)]
        await until(lambda: len(started) == 3)
    assert time.monotonic() - begin < 5
    assert seen == ["shutdown"] * 3
    for handle in handles:
        job = await app.queue("t").get(handle.id)
        assert job is not None
        assert (job.state, job.retries, job.stalls, job.timeouts) == (State.WAITING, 0, 0, 0)
        assert job.worker is None


async def test_jobs_that_a_shutdown_released_keep_their_place_and_run_at_the_next_worker(app: App) -> None:
    order: list[tuple[int, int]] = []
    slow_down = True

    @app.task(name="t")
    async def note(number: int) -> int:
        order.append((number, current_job().attempt))
        if slow_down:
            await asyncio.sleep(30)
        return number

    async with app.worker(grace=0, concurrency=1):
        handles = [await note.enqueue(n) for n in range(3)]
        await until(lambda: order)
    slow_down = False
    async with app.worker(concurrency=1):
        assert [await handle.result(wait=10) for handle in handles] == [0, 1, 2]
    assert order == [(0, 1), (0, 2), (1, 1), (2, 1)]


async def test_a_sync_run_sees_the_shutdown(app: App) -> None:
    started = threading.Event()
    seen: list[str | None] = []

    @app.task(name="t")
    def slow() -> str:
        started.set()
        while current_job().stopping is None:
            time.sleep(0.01)
        seen.append(current_job().stopping)
        return "in time"

    async with app.worker(grace=0):
        handle = await slow.using(id="j").enqueue()
        await until(started.is_set)
    assert seen == ["shutdown"]
    assert await handle.state() is State.COMPLETED


async def test_sync_run_that_ignores_the_shutdown_is_abandoned_and_its_result_refused(app: App) -> None:
    release = threading.Event()
    started = threading.Event()
    ended = threading.Event()

    @app.task(name="t", cancel_grace=0.05)
    def stubborn() -> str:
        attempt = current_job().attempt
        if attempt == 1:
            started.set()
            release.wait(20)
            ended.set()
        return f"from {attempt}"

    begin = time.monotonic()
    try:
        async with app.worker(grace=0):
            handle = await stubborn.using(id="j").enqueue()
            await until(started.is_set)
        assert time.monotonic() - begin < 5
        assert await handle.state() is State.WAITING
        async with app.worker():
            assert await handle.result(wait=10) == "from 2"
    finally:
        release.set()
    await until(ended.is_set)
    job = await app.queue("t").get("j")
    assert job is not None
    assert job.result == "from 2"


async def test_a_quick_stop_gives_runs_no_more_time(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="t")
    async def slow() -> None:
        started.set()
        await asyncio.sleep(30)

    begin = time.monotonic()
    async with app.worker(grace=60) as worker:
        handle = await slow.enqueue()
        await started.wait()
        worker.stop()
        await asyncio.sleep(0.05)
        assert worker.running == 1
        worker.stop(quick=True)
    assert time.monotonic() - begin < 10
    assert await handle.state() is State.WAITING


async def test_a_worker_that_idles_stops_promptly(app: App) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    async with app.worker() as worker:
        await nothing.using(wait=10).call()
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        worker.stop()
    assert time.monotonic() - begin < 2


async def test_run_serves_until_it_is_stopped(app: App) -> None:
    @app.task(name="t")
    async def answer() -> int:
        return 42

    worker = app.worker()
    running = asyncio.create_task(worker.run())
    assert await answer.using(wait=10).call() == 42
    assert not running.done()
    worker.stop()
    await asyncio.wait_for(running, 10)


async def test_worker_can_be_stopped_before_it_starts(app: App) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    worker = app.worker()
    worker.stop()
    await asyncio.wait_for(worker.run(), 10)


async def test_a_worker_runs_once_and_another_takes_its_place(app: App) -> None:
    @app.task(name="t")
    async def answer() -> int:
        return 42

    worker = app.worker(name="w")
    async with worker:
        assert await answer.using(wait=10).call() == 42
    with pytest.raises(OptionError, match="was started already"):
        async with worker:
            pass
    async with app.worker(name="w"):
        assert await answer.using(wait=10).call() == 42


async def test_an_error_in_the_block_stops_the_worker_and_is_not_hidden(app: App) -> None:
    @app.task(name="t")
    async def answer() -> int:
        return 42

    async def block() -> None:
        async with app.worker():
            assert await answer.using(wait=10).call() == 42
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()


async def test_worker_stops_only_after_the_run_of_a_lost_lease_ended(app: App) -> None:
    started = asyncio.Event()
    stopping = asyncio.Event()
    cleaned_up: list[str | None] = []

    @app.task(name="t")
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            stopping.set()
            await asyncio.sleep(0.3)
            cleaned_up.append(current_job().stopping)

    async with app.worker(name="w", lease=0.5):
        await slow.enqueue()
        await started.wait()
        await app.queue("t").pause()
        await app.queue("t").sweep(worker="w")
        await stopping.wait()
    assert cleaned_up == ["lease_lost"]
    await app.queue("t").purge()


# Eviction


async def test_an_evicted_worker_stops_by_itself_and_gives_its_jobs_back(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="t")
    async def slow() -> None:
        started.set()
        await asyncio.sleep(30)

    worker = app.worker(name="w", lease=0.5, grace=0)
    running = asyncio.create_task(worker.run())
    handle = await slow.enqueue()
    await started.wait()
    await until(lambda: app.evict("w"))
    await asyncio.wait_for(running, 10)
    assert await handle.state() is State.WAITING
    assert await app.evict("nobody") is False


async def test_program_learns_that_its_worker_was_evicted(app: App) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    async with app.worker(name="w", lease=0.5) as worker:
        await until(lambda: app.evict("w"))
        with pytest.raises(WorkerStopped, match="worker w was evicted"):
            await asyncio.wait_for(worker.wait(), 10)


@pytest.mark.storages("memory")
async def test_program_learns_that_its_worker_has_failed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    async def fail(self: Claimer) -> None:
        raise ZeroDivisionError

    with pytest.raises(WorkerStopped, match="worker w has failed"):  # noqa: PT012 -- The block raises at its end, too.
        async with app.worker(name="w") as worker:
            monkeypatch.setattr(Claimer, "_claim_until_stopped", fail)
            await asyncio.wait_for(worker.wait(), 10)


async def test_wait_returns_when_the_program_stops_its_worker(app: App) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    worker = app.worker()
    with pytest.raises(OptionError, match="was not started"):
        await worker.wait()
    async with worker:
        waiting = asyncio.create_task(worker.wait())
        worker.stop()
        await asyncio.wait_for(waiting, 10)


async def test_worker_is_listed_only_while_it_runs(app: App) -> None:
    @app.task(name="t")
    async def nothing() -> None: ...

    async def names() -> list[str]:
        return [worker.worker for worker in (await app.stats()).workers]

    async def listed() -> bool:
        return "w" in await names()

    async def gone() -> bool:
        return "w" not in await names()

    async with app.worker(name="w"):
        await until(listed)
        (worker,) = (await app.stats()).workers
        assert worker.facts["queues"] == ["t"]
    await until(gone, 2)


# Bursts


async def test_a_burst_runs_everything_that_is_ready_and_ends(app: App) -> None:
    done: list[int] = []

    @app.task(name="t")
    async def work(number: int) -> None:
        done.append(number)
        if number >= 50:
            await work.enqueue(number - 50)

    await app.enqueue_many(work.bind(n) for n in range(100))
    await work.using(delay=60).enqueue(1000)
    await asyncio.wait_for(app.worker(burst=True).run(), 20)
    assert sorted(done) == sorted([*range(100), *range(50)])
    assert (await app.queue("t").stats()).scheduled == 1


@pytest.mark.parametrize("limit", [1, 7, 300])
async def test_a_burst_ends_after_its_number_of_runs(app: App, limit: int) -> None:
    done: list[str] = []

    @app.task(name="a")
    async def one(number: int) -> None:
        done.append("a")

    @app.task(name="b", max_retries=1, min_backoff=0, max_backoff=0)
    def other(number: int) -> None:
        done.append("b")
        raise ValueError("counts twice")

    await app.enqueue_many(task.bind(n) for n in range(300) for task in (one, other))
    await asyncio.wait_for(app.worker(burst=True, max_burst_jobs=limit).run(), 20)
    assert len(done) == limit
    stats = (await app.stats()).queues
    assert sum(queue.running for queue in stats) == 0
    assert sum(queue.ready for queue in stats) >= 600 - limit
    await asyncio.wait_for(app.worker(burst=True, max_burst_jobs=2_000).run(), 20)
    assert len(done) == 900


@pytest.mark.storages("memory")
async def test_a_limit_of_runs_is_for_bursts_only(app: App) -> None:
    @app.task(name="t")
    async def work() -> None: ...

    with pytest.raises(OptionError, match="max_burst_jobs limits a burst: pass burst=True, too"):
        app.worker(max_burst_jobs=3)
    with pytest.raises(OptionError, match="max_burst_jobs must be a whole number from 1"):
        app.worker(burst=True, max_burst_jobs=0)


async def test_a_burst_runs_the_fail_handlers_too(app: App) -> None:
    told: list[Any] = []

    @app.task(name="t", max_retries=1, min_backoff=0)
    async def fails() -> None:
        raise ValueError

    @fails.on_failure
    def note(failure: Any) -> None:
        told.append(failure)

    await fails.enqueue()
    await asyncio.wait_for(app.worker(burst=True).run(), 20)
    assert len(told) == 1


async def test_a_burst_with_nothing_to_do_or_paused_ends(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t")
    async def work() -> None:
        runs.append(1)

    await asyncio.wait_for(app.worker(burst=True).run(), 5)
    await app.queue("t").pause()
    await work.enqueue()
    await asyncio.wait_for(app.worker(burst=True).run(), 5)
    assert runs == []
    await app.queue("t").resume()
    await asyncio.wait_for(app.worker(burst=True).run(), 5)
    assert runs == [1]


async def test_burst_with_concurrency_one_runs_all_jobs(app: App) -> None:
    done: list[int] = []

    @app.task(name="a")
    async def first(number: int) -> None:
        done.append(number)
        await second.enqueue(number)

    @app.task(name="b")
    def second(number: int) -> None:
        done.append(number)

    await app.enqueue_many(first.bind(n) for n in range(20))
    await asyncio.wait_for(app.worker(burst=True, concurrency=1).run(), 20)
    assert sorted(done) == sorted([*range(20), *range(20)])


async def _is(ask: Callable[[], Any], value: object) -> bool:
    return bool(await ask() is value)
