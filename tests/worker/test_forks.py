"""An app that is made or opened before a fork: nothing acknowledged is missing, and nothing is leased twice."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.conftest import Place
from tests.processes import send
from tests.servers import free_port
from tests.worker.conftest import Scene, until

JOBS = 20
"""How many jobs a process of tests/worker/forking.py enqueues at a time."""
REQUESTS = 60


@pytest.fixture
async def forking(place: Place, tmp_path: Path) -> AsyncIterator[Scene]:
    """A scene whose app this process does not open: its connection would hide what happens to those of the program."""
    scene = Scene(place, tmp_path)
    try:
        yield scene
    finally:
        for pid in scene.processes():
            send(pid)


async def run(scene: Scene, *command: str, seconds: float = 40) -> None:
    """Run a program that succeeds and logs nothing."""
    process = await scene.spawn(*command)
    async with asyncio.timeout(seconds):
        out, err = await process.communicate()
    assert (out.decode(), err.decode(), process.returncode) == ("", "", 0)


async def check_stored(scene: Scene, count: int) -> None:
    """All jobs that were acknowledged are stored, and nothing else; the queue is consistent."""
    acknowledged = {note["job"] for note in scene.notes("acknowledged")}
    async with scene.app as app:
        stored = {job.id async for job in app.queue("q").jobs()}
        assert acknowledged - stored == set()
        assert len(stored) == len(acknowledged) == count
        assert (await app.queue("q").repair(dry_run=True)).problems == []


async def test_an_app_made_before_a_fork_works_in_every_child(forking: Scene) -> None:
    await run(forking, "-m", "tests.worker.forking", "made")
    await check_stored(forking, 6 * JOBS)


@pytest.mark.parametrize(("program", "before"), [("opened_blocking", 2 * JOBS), ("opened_async", 2)])
async def test_an_app_opened_before_a_fork_works_after_the_parent_closed_it(
    forking: Scene, program: str, before: int
) -> None:
    await run(forking, "-m", "tests.worker.forking", program)
    await check_stored(forking, before + 3 * 2 * JOBS)


async def test_a_program_that_becomes_a_daemon_keeps_its_jobs(forking: Scene) -> None:
    await run(forking, "-m", "tests.worker.forking", "daemon")
    await forking.noted("ended")
    await check_stored(forking, 3 * JOBS)


async def test_forked_consumers_share_no_lease(forking: Scene) -> None:
    await run(forking, "-m", "tests.worker.forking", "consumers")
    leased = Counter(note["job"] for note in forking.notes("leased"))
    assert leased == dict.fromkeys((note["job"] for note in forking.notes("acknowledged")), 1)
    assert len(leased) == 2 * JOBS


@pytest.mark.storages("sqlite")
async def test_a_fork_that_inherits_a_foreign_connection_is_refused(forking: Scene) -> None:
    await run(forking, "-m", "tests.worker.forking", "own_connection")
    (refused,) = forking.notes("refused")
    assert "it has a connection from before a fork" in refused["error"]
    await check_stored(forking, 3 * JOBS)


async def test_gunicorn_preloads_an_app_and_each_worker_stores_its_jobs(forking: Scene) -> None:
    port = free_port()
    options = ("--preload", "--workers", "3", "--bind", f"127.0.0.1:{port}", "--no-control-socket")
    process = await forking.spawn("-m", "gunicorn", *options, "tests.worker.forking_site:site")

    def ask(id: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", f"/{id}")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"new")
        connection.close()

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    await until(answers, 20)
    ids = [f"job-{number}" for number in range(REQUESTS)]
    await asyncio.gather(*(asyncio.to_thread(ask, id) for id in ids))
    process.terminate()
    await process.communicate()
    with forking.notes_file.open("a") as notes:
        notes.writelines(json.dumps({"what": "acknowledged", "job": id}) + "\n" for id in ids)
    await check_stored(forking, REQUESTS + 1)


@pytest.mark.storages("sqlite")
@pytest.mark.parametrize("program", ["embedding", "embedding_c"])
async def test_children_of_a_killed_program_die_although_its_fork_lives(forking: Scene, program: str) -> None:
    process = await forking.spawn("-m", "tests.worker.forking", program)
    await forking.noted("forked")
    (run,) = await forking.noted("stays")
    process.kill()  # Its fork keeps the pipes open, so the program counts as running for asyncio.
    await until(lambda: len(forking.processes()) == 1, 5)
    assert run["pid"] not in forking.processes()
    send(*forking.processes())
    await process.communicate()
