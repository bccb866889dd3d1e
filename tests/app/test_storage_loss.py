"""The storage goes away and comes back: a worker heals by itself, and loses nothing that ended meanwhile."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, State, StorageUnavailable, WaitTimeout, current_job
from tests.app.conftest import until
from tests.servers import Server

App = Holdfast[Any]

pytestmark = pytest.mark.suite("usual")

LEASE_S = 0.5


@pytest.fixture(scope="module")
def the_server() -> Iterator[Server]:
    with Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def server(the_server: Server) -> Iterator[Server]:
    yield the_server
    if not the_server.running:
        the_server.start()
    the_server.resume()


@pytest.fixture
async def app(server: Server) -> AsyncIterator[App]:
    async with Holdfast(f"{server.url}?timeout=0.5", namespace=f"test-{uuid.uuid4().hex[:12]}") as app:
        yield app
        for queue in (await app.stats()).queues:
            assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []


class Outage:
    """A server that is killed, or frozen, and comes back."""

    def __init__(self, server: Server, kind: str) -> None:
        self._server = server
        self._kind = kind

    def begin(self) -> None:
        if self._kind == "killed":
            self._server.kill()
        else:
            self._server.pause()

    def end(self) -> None:
        if self._kind == "killed":
            self._server.start()
        else:
            self._server.resume()


@pytest.fixture(params=["killed", "frozen"])
def outage(server: Server, request: pytest.FixtureRequest) -> Outage:
    return Outage(server, request.param)


async def test_worker_reconnects_to_its_server_and_continues(app: App, outage: Outage) -> None:
    done: list[int] = []

    @app.task(name="t")
    async def work(number: int) -> None:
        done.append(number)

    async with app.worker(lease=LEASE_S):
        await app.enqueue_many(work.bind(n) for n in range(50))
        await until(lambda: len(done) == 50)
        outage.begin()
        await asyncio.sleep(0.5)
        outage.end()
        await until(lambda: _reachable(app))
        await app.enqueue_many(work.bind(n) for n in range(50, 100))
        await until(lambda: len(done) >= 100)
    assert sorted(done) == list(range(100))


async def test_jobs_waiting_during_an_outage_run_after_it(app: App, server: Server) -> None:
    done: list[int] = []

    @app.task(name="t", concurrency=5)
    async def work(number: int) -> None:
        await asyncio.sleep(0.01)
        done.append(number)

    await app.enqueue_many(work.bind(n) for n in range(200))
    async with app.worker(lease=LEASE_S):
        await until(lambda: len(done) >= 50)
        server.kill()
        await asyncio.sleep(0.5)
        server.start()
        await until(lambda: len(done) >= 200, 20)
        await until(lambda: _idle(app))
    assert sorted(set(done)) == list(range(200))
    assert len(done) == 200  # What ended during the outage was settled after it, and so did not run again.


async def test_run_that_ended_during_an_outage_is_settled_after_it(app: App, outage: Outage) -> None:
    runs: list[int] = []
    go_on = asyncio.Event()

    @app.task(name="t", max_retries=0)
    async def work(number: int) -> int:
        runs.append(number)
        await go_on.wait()
        if number == 2:
            raise ValueError("failed during the outage")
        return number

    async with app.worker(lease=LEASE_S) as worker:
        handles = [await work.using(id=f"j{n}").enqueue(n) for n in range(3)]
        await until(lambda: len(runs) == 3)
        outage.begin()
        go_on.set()
        await until(lambda: worker.running == 0)
        await asyncio.sleep(0.7)
        outage.end()
        await until(lambda: _idle(app), 20)
    assert sorted(runs) == [0, 1, 2]
    assert [await handle.state() for handle in handles] == [State.COMPLETED, State.COMPLETED, State.FAILED]


async def test_held_runs_continue_during_an_outage_of_several_leases(app: App, outage: Outage) -> None:
    lease_s = 1.0  # The holder has half of it to be heard of again, on a busy machine too.
    started = asyncio.Event()
    go_on = asyncio.Event()

    @app.task(name="t")
    async def work() -> list[Any]:
        started.set()
        await go_on.wait()
        job = current_job()
        return [job.attempt, job.stopping]

    async with app.worker(lease=lease_s):
        handle = await work.using(id="j").enqueue()
        await started.wait()
        outage.begin()
        await asyncio.sleep(2.5 * lease_s)
        outage.end()
        await asyncio.sleep(1.5 * lease_s)  # Whoever looks now sees an old lease. It must have been extended by now.
        go_on.set()
        assert await handle.result(wait=15) == [1, None]
        job = await app.queue("t").get("j")
    assert job is not None
    assert (job.attempts, job.stalls) == (1, 0)


async def test_singleton_run_ends_before_its_lease_can_move_and_is_not_counted(app: App, outage: Outage) -> None:
    lease_s = 1.0
    stopped: list[tuple[float, str | None]] = []
    counts: list[tuple[int, int, int, int]] = []
    started = asyncio.Event()

    @app.task(name="t", singleton="only")
    async def work() -> str:
        job = current_job()
        counts.append((job.attempt, job.retries, job.stalls, job.timeouts))
        if job.attempt == 1:
            started.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                stopped.append((time.monotonic(), job.stopping))
                raise
        return f"from {job.attempt}"

    async with app.worker(name="w", lease=lease_s):
        await until(lambda: _serves(app, "w"))
        handle = await work.enqueue()
        await started.wait()
        began = time.monotonic()
        outage.begin()
        await until(lambda: stopped, 5)
        ((at, why),) = stopped
        outage.end()
        await until(lambda: _reachable(app))
        assert await handle.result(wait=20) == "from 2"
    assert why == "lease_lost"
    assert 0.2 < at - began < 1.5 * lease_s
    assert counts == [(1, 0, 0, 0), (2, 0, 0, 0)]


async def test_task_may_choose_to_stop_or_to_hold_during_an_outage(app: App, server: Server) -> None:
    started: list[str] = []
    stopped: list[str] = []
    go_on = asyncio.Event()

    @app.task(name="a", on_storage_loss="kill")
    async def dies() -> None:
        if current_job().attempt > 1:
            return
        started.append("dies")
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            stopped.append("dies")
            raise

    @app.task(name="b", singleton="only", on_storage_loss="hold")
    async def holds() -> str:
        started.append("holds")
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            stopped.append("holds")
            raise
        return "held"

    async with app.worker(lease=LEASE_S):
        await dies.enqueue()
        held = await holds.enqueue()
        await until(lambda: len(started) == 2)
        server.kill()
        await until(lambda: stopped)
        await asyncio.sleep(LEASE_S)
        server.start()
        go_on.set()
        await until(lambda: _reachable(app))
        assert await held.result(wait=15) == "held"
        await until(lambda: _idle(app), 15)
    assert stopped == ["dies"]


async def test_connections_that_are_cut_again_and_again_lose_and_repeat_nothing(app: App, server: Server) -> None:
    done: list[int] = []

    @app.task(name="t", concurrency=10)
    async def work(number: int) -> None:
        done.append(number)
        await asyncio.sleep(0.01)

    async with app.worker(lease=LEASE_S):
        await app.enqueue_many(work.bind(n) for n in range(300))
        for _ in range(8):
            server.command("CLIENT", "KILL", "TYPE", "normal")
            server.command("CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.sleep(0.05)
        await until(lambda: len(done) >= 300, 20)
        await until(lambda: _idle(app))
    assert sorted(done) == list(range(300))
    assert (await app.queue("t").stats()).totals["completed"] == 300


async def test_worker_can_be_stopped_while_its_server_is_down(app: App, server: Server) -> None:
    started = asyncio.Event()

    @app.task(name="t")
    async def slow() -> None:
        started.set()
        if current_job().attempt == 1:
            await asyncio.sleep(30)

    async with app.worker(lease=LEASE_S, grace=0):
        await slow.using(id="j").enqueue()
        await started.wait()
        server.kill()
        begin = time.monotonic()
    assert time.monotonic() - begin < 15
    server.start()
    async with app.worker(lease=LEASE_S):
        await until(lambda: _idle(app), 15)


async def test_burst_does_not_end_during_an_outage(app: App, server: Server) -> None:
    done: list[int] = []

    @app.task(name="t")
    async def work() -> None:
        done.append(1)

    await work.enqueue()
    server.kill()
    burst = asyncio.create_task(app.worker(burst=True, lease=LEASE_S).run())
    await asyncio.sleep(1.5)
    server.start()
    await asyncio.wait_for(burst, 20)
    assert done == [1]


async def test_storage_errors_are_reported_only_while_they_last(app: App, server: Server) -> None:
    told: list[str] = []

    @app.on_error
    def note(error: BaseException, where: str) -> None:
        told.append(f"{where}: {error}")

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with app.worker(name="w", lease=LEASE_S):
        assert await work.using(wait=10).call() == 1
        assert told == []
        server.kill()
        await until(lambda: told)
        server.start()
        await until(lambda: _answers(work), 15)
        before = len(told)
        assert await work.using(wait=10).call() == 1
        assert len(told) == before
    assert "w" in told[0]


# SQLite


async def test_locked_sqlite_file_delays_a_worker_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    runs: list[tuple[int, int]] = []
    go_on = asyncio.Event()

    async with Holdfast(f"sqlite:///{path}") as app:

        @app.task(name="t")
        async def work(number: int) -> int:
            job = current_job()
            runs.append((number, job.attempt))
            await go_on.wait()
            return number

        async with app.worker(lease=LEASE_S):
            handles = [await work.using(id=f"j{n}").enqueue(n) for n in range(5)]
            await until(lambda: len(runs) == 5)
            locked = threading.Event()
            with_lock = asyncio.create_task(asyncio.to_thread(_lock_for, path, 2.5 * LEASE_S, locked))
            await until(locked.is_set)
            go_on.set()
            late = asyncio.create_task(work.using(id="late").enqueue(9))
            await with_lock
            handles.append(await late)
            assert [await handle.result(wait=15) for handle in handles] == [0, 1, 2, 3, 4, 9]
        assert sorted(runs) == [*((n, 1) for n in range(5)), (9, 1)]
        assert (await app.queue("t").repair(dry_run=True)).problems == []


async def test_singleton_on_a_locked_sqlite_file_ends_before_its_lease_can_move(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    stopped: list[str | None] = []
    started = asyncio.Event()

    async with Holdfast(f"sqlite:///{path}") as app:

        @app.task(name="t", singleton="only")
        async def work() -> int:
            job = current_job()
            if job.attempt == 1:
                started.set()
                try:
                    await asyncio.sleep(30)
                finally:
                    stopped.append(job.stopping)
            return job.stalls

        async with app.worker(lease=LEASE_S):
            handle = await work.enqueue()
            await started.wait()
            await asyncio.to_thread(_lock_for, path, 3 * LEASE_S, threading.Event())
            assert await handle.result(wait=15) == 0
    assert stopped == ["lease_lost"]


def _lock_for(path: Path, seconds: float, locked: threading.Event) -> None:
    """Another program writes, and takes its time."""
    other = sqlite3.connect(path, timeout=10, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        locked.set()
        time.sleep(seconds)
        other.execute("ROLLBACK")
    finally:
        other.close()


async def _reachable(app: App) -> bool:
    try:
        await app.stats()
    except StorageUnavailable:
        return False
    return True


async def _serves(app: App, name: str) -> bool:
    return name in [worker.worker for worker in (await app.stats()).workers]


async def _idle(app: App) -> bool:
    try:
        queues = (await app.stats()).queues
    except StorageUnavailable:
        return False
    return all(queue.ready + queue.running + queue.scheduled == 0 for queue in queues)


async def _answers(task: Any) -> bool:
    try:
        return bool(await task.using(wait=1).call() == 1)
    except (StorageUnavailable, WaitTimeout):
        return False
