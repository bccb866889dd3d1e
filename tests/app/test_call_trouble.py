"""Waiting for a result while something breaks: the right result or `WaitTimeout`, never a hang, never much later than
asked."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Handle, Holdfast, HoldfastError, JobFailed, PermanentError, State, StorageUnavailable, WaitTimeout
from tests import servers
from tests.app.conftest import Place, until
from tests.proxy import Proxy

AppMaker = Callable[..., Holdfast[Any]]

pytestmark = [pytest.mark.storages("sqlite", "valkey"), pytest.mark.suite("usual")]

SLACK_S = 3.0
"""How much later than asked a wait may end here: a second for its last look, and the rest for a busy machine."""


@pytest.fixture
def own_server() -> Iterator[servers.Server]:
    """A server that keeps what it acknowledged, for tests that kill it."""
    with servers.Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    server = servers.shared("valkey")
    assert server is not None
    async with Proxy(server.port) as proxy:
        yield proxy


async def timed_out_after(waiting: Any) -> float:
    """How long it took to be told that the wait is over."""
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        await waiting
    return time.monotonic() - began


# A notice that is lost


async def test_result_is_found_when_its_notification_was_lost(proxy: Proxy) -> None:
    server = servers.shared("valkey")
    assert server is not None
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    async with Holdfast(server.url, namespace=namespace) as near, Holdfast(proxy.url, namespace=namespace) as far:
        handle = await far.queue("q").enqueue(1, id="a")
        lease = await near.queue("q").lease(wait=5)
        assert lease is not None
        waiting = asyncio.create_task(far.queue("q").result("a", wait=20))
        await until(lambda: [connection for connection in proxy._connections if connection.subscribed])
        await asyncio.sleep(0.2)
        for connection in proxy._connections:
            connection.mute = connection.stalled = connection.subscribed  # What is told there gets lost from now on.
        began = time.monotonic()
        assert await lease.complete("there")
        assert await waiting == "there"
        assert time.monotonic() - began < SLACK_S
        assert await handle.result(wait=0) == "there"
        assert await near.queue("q").delete()


async def test_wait_continues_after_all_connections_are_lost(proxy: Proxy) -> None:
    server = servers.shared("valkey")
    assert server is not None
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    async with Holdfast(server.url, namespace=namespace) as near, Holdfast(proxy.url, namespace=namespace) as far:
        handle = await far.queue("q").enqueue(1, id="a")
        lease = await near.queue("q").lease(wait=5)
        assert lease is not None
        waiting = asyncio.create_task(handle.result(wait=20))
        await asyncio.sleep(0.2)
        proxy.cut_all()
        assert await lease.complete("there")
        assert await asyncio.wait_for(waiting, 10) == "there"
        assert await near.queue("q").delete()


async def test_wait_finds_the_result_while_subscribing_hangs(proxy: Proxy) -> None:
    server = servers.shared("valkey")
    assert server is not None
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    url = f"{proxy.url}?timeout=2"
    async with Holdfast(server.url, namespace=namespace) as near, Holdfast(url, namespace=namespace) as far:
        await far.queue("q").enqueue(1, id="a")
        lease = await near.queue("q").lease(wait=5)
        assert lease is not None
        proxy.before = lambda exchange: "stall" if exchange.name.endswith("SUBSCRIBE") else "pass"
        waiting = asyncio.create_task(far.queue("q").result("a", wait=30))
        await asyncio.sleep(0.3)
        assert await lease.complete("unheard")
        assert await asyncio.wait_for(waiting, 25) == "unheard"
        assert await near.queue("q").delete()


@pytest.mark.parametrize("wait", [0, 0.5])
async def test_short_wait_finds_a_stored_result_while_subscribing_hangs(proxy: Proxy, wait: float) -> None:
    server = servers.shared("valkey")
    assert server is not None
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    async with Holdfast(server.url, namespace=namespace) as near, Holdfast(proxy.url, namespace=namespace) as far:
        proxy.before = lambda exchange: "stall" if exchange.name.endswith("SUBSCRIBE") else "pass"
        handle = await far.queue("q").enqueue(1, id="a")
        lease = await near.queue("q").lease(wait=5)
        assert lease is not None
        assert await lease.complete("there")
        assert await handle.result(wait=wait) == "there"
        assert await near.queue("q").delete()


async def test_call_whose_enqueue_reply_was_lost_runs_the_job_once(proxy: Proxy) -> None:
    server = servers.shared("valkey")
    assert server is not None
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    ran: list[int] = []
    near, far = Holdfast(server.url, namespace=namespace), Holdfast(proxy.url, namespace=namespace)

    @near.task(name="once")
    async def once(n: int) -> int:
        ran.append(n)
        return n * 10

    @far.stub(name="once")
    def stub(n: int) -> int:
        raise NotImplementedError

    cuts = [2]

    def lose(exchange: Any) -> str:
        if exchange.name in ("EVALSHA", "EVAL", "FCALL") and cuts[0] > 0:
            cuts[0] -= 1
            return "cut"
        return "pass"

    async with near, far, near.worker():
        assert await stub.call(1) == 10
        proxy.rule = lose
        assert await stub.using(wait=30).call(2) == 20
        assert cuts == [0]
        proxy.rule = None
        assert ran == [1, 2]
    async with near:
        assert await near.queue("once").delete()


# A server that restarts


async def test_wait_continues_after_a_server_restart(own_server: servers.Server) -> None:
    app = Holdfast(own_server.url)
    release = asyncio.Event()
    started = asyncio.Event()

    @app.task(name="patient")
    async def patient() -> str:
        started.set()
        await release.wait()
        return "after the restart"

    async with app, app.worker(lease=5):
        calls = [asyncio.create_task(patient.using(id="x", wait=30).call()), asyncio.create_task(_result(patient))]
        await started.wait()
        await asyncio.sleep(0.1)
        own_server.kill()
        await asyncio.sleep(0.3)
        assert not any(call.done() for call in calls)
        own_server.start()
        release.set()
        assert await asyncio.gather(*calls) == ["after the restart"] * 2
        assert (await app.queue("patient").repair(dry_run=True)).problems == []


async def _result(task: Any) -> Any:
    handle: Handle[Any] = await task.using(id="x").enqueue()
    return await handle.result(wait=30)


async def test_result_of_a_run_that_ended_during_an_outage_arrives_later(own_server: servers.Server) -> None:
    app = Holdfast(f"{own_server.url}?timeout=0.3")  # The wait lasts longer than a single look may.
    release, started = asyncio.Event(), asyncio.Event()

    @app.task(name="during")
    async def during() -> str:
        started.set()
        await release.wait()
        return "kept in hand"

    async with app, app.worker(lease=5):
        handle = await during.enqueue()
        await started.wait()
        waiting = asyncio.create_task(handle.result(wait=30))
        await asyncio.sleep(0.1)
        own_server.kill()
        release.set()
        await asyncio.sleep(1.6)
        own_server.start()
        assert await waiting == "kept in hand"


async def test_failure_during_a_server_outage_is_reported_later(own_server: servers.Server) -> None:
    app = Holdfast(own_server.url)
    release, started = asyncio.Event(), asyncio.Event()

    @app.task(name="fails")
    async def fails() -> None:
        started.set()
        await release.wait()
        raise PermanentError("kept as well")

    async with app, app.worker(lease=5):
        calling = asyncio.create_task(fails.using(wait=30).call())
        await started.wait()
        await asyncio.sleep(0.1)
        own_server.kill()
        release.set()
        await asyncio.sleep(0.3)
        own_server.start()
        with pytest.raises(JobFailed, match="kept as well"):
            await calling


# A storage that is away for the whole wait


async def test_wait_times_out_on_time_when_the_server_goes_down(own_server: servers.Server) -> None:
    async with Holdfast(own_server.url) as app:
        handle = await app.queue("q").enqueue(1)
        running = asyncio.create_task(timed_out_after(handle.result(wait=1)))
        await asyncio.sleep(0.2)
        own_server.kill()
        assert 0.9 <= await running < 1 + SLACK_S
        own_server.start()
        assert await handle.state() is State.WAITING


async def test_wait_started_during_an_outage_times_out_on_time(own_server: servers.Server) -> None:
    async with Holdfast(own_server.url) as app:
        handle = await app.queue("q").enqueue(1)
        own_server.kill()
        assert await timed_out_after(handle.result(wait=0)) < SLACK_S
        assert await timed_out_after(handle.result(wait=0.2)) < 0.2 + SLACK_S
        own_server.start()


async def test_wait_started_during_an_outage_gets_a_result_that_arrives_in_time(
    own_server: servers.Server,
) -> None:
    async with Holdfast(own_server.url) as app:
        queue = app.queue("q")
        handle = await queue.enqueue(1, id="a")
        lease = await queue.lease()
        assert lease is not None
        own_server.kill()
        waiting = asyncio.create_task(handle.result(wait=30))
        await asyncio.sleep(0.5)
        own_server.start()
        assert await lease.complete("in time")
        assert await waiting == "in time"


async def test_wait_times_out_on_time_when_the_server_freezes(own_server: servers.Server) -> None:
    async with Holdfast(own_server.url) as app:
        handle = await app.queue("q").enqueue(1)
        during = asyncio.create_task(timed_out_after(handle.result(wait=1)))
        await asyncio.sleep(0.2)
        own_server.pause()
        try:
            assert 0.9 <= await during < 1 + SLACK_S
            assert await timed_out_after(handle.result(wait=0.2)) < 0.2 + SLACK_S
        finally:
            own_server.resume()
        assert await handle.state() is State.WAITING


async def test_call_to_a_frozen_server_ends_within_its_wait(own_server: servers.Server) -> None:
    app = Holdfast(own_server.url)

    @app.stub(name="frozen")
    def frozen() -> int:
        raise NotImplementedError

    async with app:
        await app.stats()
        own_server.pause()
        try:
            began = time.monotonic()
            with pytest.raises((WaitTimeout, StorageUnavailable)):
                await frozen.using(wait=0.5).call()
            assert time.monotonic() - began < 3 + SLACK_S  # To listen and to send it may take so long by themselves.
        finally:
            own_server.resume()


async def test_failure_is_reported_when_the_server_stops_right_after_it(own_server: servers.Server) -> None:
    async with Holdfast(own_server.url) as app:
        queue = app.queue("q")
        handle = await queue.enqueue(1)
        lease = await queue.lease()
        assert lease is not None
        waiting = asyncio.create_task(handle.result(wait=5))
        await asyncio.sleep(0.2)
        assert await lease.fail("for good")
        own_server.kill()
        with pytest.raises(HoldfastError) as raised:
            await waiting
        assert isinstance(raised.value, JobFailed | WaitTimeout)
        own_server.start()


async def test_wait_times_out_on_time_while_the_file_is_locked(tmp_path: Path) -> None:
    async with Holdfast(f"sqlite:///{tmp_path}/jobs.db") as app:
        handle = await app.queue("q").enqueue(1)
        db = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        try:
            assert await timed_out_after(handle.result(wait=0.2)) < 0.2 + SLACK_S
        finally:
            db.execute("ROLLBACK")
            db.close()
        assert await handle.state() is State.WAITING


# A worker that dies


WORKER = """
import asyncio, os, sys
from holdfast import Holdfast, current_job

app = Holdfast(sys.argv[1], namespace=sys.argv[2])

@app.task(name="mortal", max_stalls=5)
async def mortal(n: int) -> list[int]:
    open(sys.argv[3], "a").write(f"{os.getpid()}\\n")
    if sys.argv[4] == "hang":
        await asyncio.sleep(600)
    return [n, current_job().attempt]

async def main():
    async with app.worker(lease=0.5):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


class WorkerProcess:
    """A program of its own that serves `mortal`; it hangs in its jobs, or finishes them."""

    def __init__(self, place: Place, folder: Path, does: str) -> None:
        script = folder / "work.py"
        script.write_text(textwrap.dedent(WORKER))
        self.log = folder / f"{does}.log"
        self.log.touch()
        command = [sys.executable, str(script), place.url, place.namespace, str(self.log), does]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines())

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def workers(place: Place, tmp_path: Path) -> Iterator[Callable[[str], WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start(does: str) -> WorkerProcess:
        started.append(WorkerProcess(place, tmp_path, does))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


async def test_caller_gets_the_result_of_the_worker_that_replaced_a_dead_one(
    make_app: AppMaker, workers: Callable[[str], WorkerProcess]
) -> None:
    app = make_app()

    @app.stub(name="mortal")
    def mortal(n: int) -> list[int]:
        raise NotImplementedError

    async with app:
        hanging = workers("hang")
        calling = asyncio.create_task(mortal.using(wait=60, id="x").call(7))
        await until(lambda: hanging.runs == 1)
        hanging.kill()
        other = workers("finish")
        assert await calling == [7, 2]
        assert (hanging.runs, other.runs) == (1, 1)
        info = await app.queue("mortal").get("x")
        assert info is not None
        assert (info.state, info.stalls) == (State.COMPLETED, 1)


async def test_wait_times_out_on_time_when_the_only_worker_died(
    make_app: AppMaker, workers: Callable[[str], WorkerProcess]
) -> None:
    async with make_app() as app:
        hanging = workers("hang")
        handle = await app.queue("mortal").enqueue({"n": 1})
        await until(lambda: hanging.runs == 1)
        hanging.kill()
        assert 0.9 <= await timed_out_after(handle.result(wait=1)) < 1 + SLACK_S


# A storage that closes under a waiter


async def test_closing_the_app_ends_its_waits(make_app: AppMaker) -> None:
    app = make_app()
    async with app:
        handle = await app.queue("q").enqueue(1)
        waiting = asyncio.create_task(handle.result(wait=1))
        await asyncio.sleep(0.2)
    with pytest.raises(HoldfastError):
        await asyncio.wait_for(waiting, 1 + SLACK_S)
