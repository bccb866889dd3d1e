"""Leases of a worker with child processes: they last as long as the worker does, whatever handlers do, and a run that
has lost its own stops."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, StorageUnavailable
from tests.processes import parents
from tests.servers import Server
from tests.worker.conftest import Scene, WorkerProcess, settled, until

NOISE_S = 2.0
"""What a busy machine may add to any bound."""


async def test_jobs_of_a_killed_worker_finish_once_on_another_worker_in_time(scene: Scene) -> None:
    lease_s = 1.0
    killed = await scene.worker("held:app", "--processes", "2", "--lease", f"{lease_s}", "--name", "k", children=2)
    await enqueue(scene.app, "hold", 100, {"gate": "go"})
    first = await scene.noted("began", 100)
    assert len({note["pid"] for note in first}) == 2
    await scene.worker("held:app", "--processes", "2", "--lease", f"{lease_s}", "--name", "other", children=2)
    at = kill(killed)
    await settled(scene.app, "hold", 100)
    second = scene.notes("began")[100:]
    assert {note["id"] for note in second} == {note["id"] for note in first}
    assert {(note["worker"], *note["counts"]) for note in second} == {("other", 0, 1, 0)}
    assert max(note["at"] for note in second) - at <= 1.5 * lease_s + 1 + NOISE_S
    assert_all_ended_once(scene, 100)
    assert (await scene.app.queue("hold").stats()).totals["completed"] == 100


@pytest.mark.storages("sqlite")
async def test_children_and_their_descendants_die_with_their_worker(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "3", children=3)
    for queue, payload in (("grip", {"seconds": 3600}), ("nest", {}), ("bare", {"gate": "go"})):
        await scene.app.queue(queue).enqueue(payload, id=queue)
    began = await scene.noted("began", 3)
    assert len({note["pid"] for note in began}) == 3
    (nested,) = await scene.noted("nested")
    await until(lambda: nested["nested"] in parents().values())  # The program has started one of its own.
    worker.signal(signal.SIGSTOP)  # It cannot see that a child has closed the connection.
    (scene.folder / "go").touch()
    (bare,) = [note["pid"] for note in began if note["id"] == "bare"]
    await until(lambda: len(os.listdir(f"/proc/{bare}/fd")) <= 3)
    assert len(scene.processes()) == 6
    kill(worker)
    await until(lambda: not scene.processes(), 0.5 + NOISE_S)


@pytest.mark.storages("sqlite")
async def test_handlers_that_block_the_process_lose_no_lease(scene: Scene) -> None:
    options = ("--processes", "2", "--lease", "0.6")
    await scene.worker("held:app", *options, children=2)
    handles = [await scene.app.queue(queue).enqueue({"seconds": 2}) for queue in ("grip", "burn")]
    await scene.noted("began", 2)
    await scene.worker("held:app", *options, children=2)  # It would take them.
    for handle in handles:
        assert await handle.result(wait=15) == [1, 0, 0, 0]
    assert len(scene.notes("began")) == 2


async def test_run_that_lost_its_lease_is_cancelled_and_killed_if_it_does_not_end(scene: Scene) -> None:
    await scene.worker("held:app", "--processes", "1", "--lease", "1", "--name", "w")
    queues = ("hold", "watch", "stubborn")
    for queue in queues:
        await scene.app.queue(queue).enqueue({} if queue == "stubborn" else {"gate": "never"}, id=queue)
    (pid,) = {note["pid"] for note in await scene.noted("began", 3)}
    for queue in queues:
        swept = await scene.app.queue(queue).sweep(worker="w")
        assert swept.stalled == [queue]
    stopped = await scene.noted("stopped", 3)
    assert {(note["queue"], note["why"], note["attempt"]) for note in stopped} == {
        (queue, "lease_lost", 1) for queue in queues
    }
    await until(lambda: pid not in parents(), 0.5 + NOISE_S + 1)
    for queue in queues:
        await settled(scene.app, queue, 1)
        job = await scene.app.queue(queue).get(queue)
        assert job is not None
        assert (job.state, job.attempts, job.stalls) == ("completed", 2, 1)


async def test_a_worker_that_was_frozen_finds_its_runs_fenced_and_kills_the_late_ones(scene: Scene) -> None:
    """Its children go on meanwhile: half of their runs end, and say so to nobody."""
    worker = await scene.worker("held:app", "--processes", "1", "--lease", "0.5", "--name", "frozen")
    child = await hold_those_that_are_run_elsewhere_meanwhile(scene, worker, [worker.pid])
    assert [note["attempt"] for note in scene.notes("ended")].count(1) == 10
    await until(lambda: child not in parents(), 0.5 + NOISE_S + 1)
    await assert_nothing_came_of_the_late_runs(scene, worker)


@pytest.mark.storages("sqlite")
async def test_a_worker_that_was_frozen_with_its_children_kills_the_late_runs(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "1", "--lease", "0.5", "--name", "frozen")
    child = await hold_those_that_are_run_elsewhere_meanwhile(scene, worker, [worker.pid, *worker.children()])
    await until(lambda: child not in parents(), 0.5 + NOISE_S + 1)
    await assert_nothing_came_of_the_late_runs(scene, worker)


async def hold_those_that_are_run_elsewhere_meanwhile(scene: Scene, worker: WorkerProcess, frozen: list[int]) -> int:
    """Stop these processes while they have 21 jobs, until another worker has run them all, and let them go on. Which
    child had the jobs?"""
    await enqueue(scene.app, "hold", 10, {"gate": "go"})
    await enqueue(scene.app, "watch", 10, {"gate": "never"})
    await scene.app.queue("stubborn").enqueue({}, id="stubborn")
    (child,) = {note["pid"] for note in await scene.noted("began", 21)}
    await freeze(scene, frozen)
    await scene.worker("held:app", "--processes", "1", "--lease", "0.5", "--name", "other")
    again = (await scene.noted("began", 42))[21:]
    assert {note["worker"] for note in again} == {"other"}
    (scene.folder / "go").touch()
    await scene.noted("ended", 20 if child in frozen else 30)
    for pid in reversed(frozen):
        os.kill(pid, signal.SIGCONT)
    return child


async def freeze(scene: Scene, pids: list[int]) -> None:
    """Stop processes, but not in the middle of a transaction: that would stop everybody who shares their file."""
    while True:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if not is_locked(scene.folder / "jobs.db"):
            return
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.01)


def is_locked(file: Path) -> bool:
    """By who does not let it go soon. A file that is not there is not."""
    if not file.exists():
        return False
    with closing(sqlite3.connect(file, timeout=0.2, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
    return False


async def assert_nothing_came_of_the_late_runs(scene: Scene, worker: WorkerProcess) -> None:
    stopped = [note for note in scene.notes("stopped") if note["queue"] != "hold"]
    assert {(note["queue"], note["why"]) for note in stopped} == {
        ("watch", "lease_lost"),
        ("stubborn", "lease_lost"),
    }
    for queue, count in (("hold", 10), ("watch", 10), ("stubborn", 1)):
        totals = (await scene.app.queue(queue).stats()).totals
        assert (totals["completed"], totals.get("failed", 0)) == (count, 0)
    assert len(scene.notes("began")) == 42
    assert "lost its lease" in worker.text()
    assert "completed" not in worker.text()


async def test_a_child_has_no_connection_to_the_storage_until_a_handler_enqueues(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "1")
    (child,) = worker.children()
    await scene.ask("quick", {"number": 0})
    assert connections(scene, worker.pid) > 0
    assert connections(scene, child) == 0
    used, _ = await scene.ask("relay", {"number": 1})
    assert used == child
    assert await scene.app.queue("quick").result("async-1") == [1, child]
    assert connections(scene, child) > 0
    await scene.ask("relay-sync", {"number": 2})
    assert await scene.app.queue("quick").result("sync-2") == [2, child]


# The storage goes away


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
def url(server: Server) -> str:
    return f"{server.url}?timeout=0.5"


@pytest.fixture
async def app(scene: Scene, url: str) -> AsyncIterator[Holdfast[Any]]:
    """On a server of its own; the scene's storage stays empty."""
    async with Holdfast(url, namespace=scene.place.namespace) as app:
        yield app
        for queue in (await app.stats()).queues:
            assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []


@pytest.mark.storages("sqlite")
async def test_held_runs_continue_through_an_outage_of_three_leases_and_run_once(
    scene: Scene, app: Holdfast[Any], server: Server, url: str
) -> None:
    lease_s = 1.0
    options = ("--processes", "2", "--lease", f"{lease_s}")
    worker = await scene.worker("held:app", *options, "--name", "w", children=2, url=url)
    await enqueue(app, "hold", 10, {"gate": "during"})
    await enqueue(app, "always", 10, {"gate": "after"})
    await scene.noted("began", 20)
    other = await scene.worker("held:app", *options, "--name", "other", children=2, url=url)
    children = {*worker.children(), *other.children()}
    server.kill()
    await asyncio.sleep(lease_s)
    (scene.folder / "during").touch()
    await scene.noted("ended", 10)
    await asyncio.sleep(2 * lease_s)
    server.start()
    await until(lambda: is_reachable(app))
    await asyncio.sleep(1.5 * lease_s)  # A sweep now sees old leases. They must have been extended by now.
    (scene.folder / "after").touch()
    await settled(app, "hold", 10)
    await settled(app, "always", 10)
    assert len(scene.notes("began")) == 20
    assert {note["worker"] for note in scene.notes("began")} == {"w"}
    assert_all_ended_once(scene, 20)
    assert {*worker.children(), *other.children()} == children


@pytest.mark.storages("sqlite")
@pytest.mark.parametrize("outage", ["killed", "frozen"])
async def test_runs_stopped_by_an_outage_end_before_their_lease_moves_and_are_uncounted(
    scene: Scene, app: Holdfast[Any], server: Server, url: str, outage: str
) -> None:
    lease_s = 1.0
    await scene.worker("held:app", "--processes", "2", "--lease", f"{lease_s}", children=2, url=url)
    for stubborn in (False, True):
        await app.queue("dies").enqueue({"stubborn": stubborn}, id=f"dies:{stubborn}")
        await app.queue("only").enqueue({"stubborn": stubborn}, id=f"only:{stubborn}")
    await scene.noted("began", 4)
    began = begin(server, outage)
    await asyncio.sleep(2 * lease_s)
    last = max(note["at"] for note in scene.notes("alive"))
    assert last - began < 1.25 * lease_s
    assert {(note["id"], note["why"]) for note in scene.notes("stopped")} == {
        (f"{queue}:{stubborn}", "lease_lost") for queue in ("dies", "only") for stubborn in (False, True)
    }
    end(server, outage)
    await until(lambda: is_reachable(app))
    await settled(app, "dies", 2)
    await settled(app, "only", 2)
    again = scene.notes("began")[4:]
    assert [note["counts"] for note in again] == 4 * [[0, 0, 0]]


def begin(server: Server, outage: str) -> float:
    """The storage goes away. When?"""
    if outage == "killed":
        server.kill()
    else:
        server.pause()
    return time.monotonic()


def end(server: Server, outage: str) -> None:
    if outage == "killed":
        server.start()
    else:
        server.resume()


async def is_reachable(app: Holdfast[Any]) -> bool:
    try:
        await app.stats()
    except StorageUnavailable:
        return False
    return True


async def enqueue(app: Holdfast[Any], queue: str, count: int, payload: dict[str, Any]) -> None:
    await app.enqueue_many(app.queue(queue).bind(payload, id=f"{queue}-{number}") for number in range(count))


def kill(worker: WorkerProcess) -> float:
    """Kill a worker, all at once. When?"""
    at = time.monotonic()
    worker.signal(signal.SIGKILL)
    worker.process.wait(10)
    return at


def assert_all_ended_once(scene: Scene, count: int) -> None:
    ended = Counter((note["queue"], note["id"]) for note in scene.notes("ended"))
    assert len(ended) == count
    assert set(ended.values()) == {1}


def connections(scene: Scene, pid: int) -> int:
    """How many ways a process has to the storage: connections to the server, or descriptors of the file."""
    links: list[str] = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            continue  # It has just been closed.
    if scene.place.storage == "sqlite":
        return sum("jobs.db" in link for link in links)
    port = int(scene.place.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if int(row[2].rpartition(":")[2], 16) == port}
    return sum(link in sockets for link in links)
