"""A process that dies costs each of its jobs one stall, and the jobs of other processes nothing. A job that kills its
processes ends after `max_stalls`, and takes no other with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast import JobFailed
from holdfast._worker.processes import child_handle
from holdfast._worker.processes.pool import Pool, PoolSettings
from holdfast._worker.telemetry import HookDispatcher
from holdfast._worker.worker import Worker, WorkerSettings
from holdfast.storage import connect
from tests.worker.conftest import ROOT, Scene, WorkerProcess, until

ON_THE_LOOP = [
    *("segfault", "exit_at_once", "abort", "interrupt", "exit_in_a_callback", "stop_the_loop"),
    *("cancel_everything", "close_everything", "write_everywhere"),
]
ON_A_THREAD = [f"{kind}_on_a_thread" for kind in ("interrupt", "close_everything")]


def let_go(scene: Scene, who: str) -> None:
    """Let those go on that wait for it."""
    scene.notes_file.with_name(f"{who} may go").touch()


async def counts(scene: Scene, queue: str, id: str) -> tuple[int, int, int, int]:
    """Stalls, retries, timeouts and attempts of a job."""
    job = await scene.app.queue(queue).get(id)
    assert job is not None
    return job.stalls, job.retries, job.timeouts, job.attempts


async def test_death_of_a_process_counts_one_stall_for_each_of_its_jobs_only(scene: Scene) -> None:
    kinds = ON_THE_LOOP + ON_A_THREAD
    processes = len(kinds) + 1
    worker = await scene.worker("crashes:app", "--processes", str(processes), children=processes)
    for number in range(processes):
        await scene.app.queue("neighbour").enqueue({}, id=str(number))
    naps = await scene.noted("nap", processes)
    queues = {kind: "crash" if kind in ON_THE_LOOP else "crash.thread" for kind in kinds}
    for kind, queue in queues.items():
        await scene.app.queue(queue).enqueue({"kind": kind}, id=kind)
    poised = {note["pid"]: note["id"] for note in await scene.noted("poised", len(kinds))}
    beside = {note["id"]: poised.get(note["pid"]) for note in naps}
    assert set(beside.values()) == {*kinds, None}
    let_go(scene, "crash")
    for kind, queue in queues.items():
        assert await scene.app.queue(queue).result(kind, wait=20) == "done", kind
    let_go(scene, "neighbour")
    for number in beside:
        assert await scene.app.queue("neighbour").result(number, wait=20) == "rested"
    said = {kind: await counts(scene, queue, kind) for kind, queue in queues.items()}
    assert said == dict.fromkeys(kinds, (1, 0, 0, 2))
    neighbours = {kind: await counts(scene, "neighbour", number) for number, kind in beside.items()}
    assert neighbours == dict.fromkeys(kinds, (1, 0, 0, 2)) | {None: (0, 0, 0, 1)}
    assert worker.process.poll() is None
    await until(lambda: len(worker.children()) == processes)


async def test_poison_job_fails_after_its_stalls_and_nine_other_jobs_complete(scene: Scene) -> None:
    worker = await scene.worker("crashes:app", "--processes", "1")
    for number in range(9):
        await scene.app.queue("innocent").enqueue({}, id=str(number))
    await scene.noted("innocent", 9)
    with pytest.raises(JobFailed, match="its process died: it was killed by SIGKILL") as raised:
        await scene.ask("poison", id="p", wait=30)
    assert (raised.value.kind, raised.value.attempts) == ("stall", 4)
    assert [note["stalls"] for note in scene.notes("poison")] == [0, 1, 2, 3]
    for number in range(9):
        assert await scene.app.queue("innocent").result(str(number), wait=20) == "alive"
        assert await counts(scene, "innocent", str(number)) == (2, 0, 0, 3)
    (reported,) = await scene.noted("reported")
    assert (reported["failed"], reported["kind"], reported["stalls"]) == ("p", "stall", 4)
    assert not neighbours_of_suspects(scene)
    assert worker.process.poll() is None


def neighbours_of_suspects(scene: Scene) -> list[tuple[str, str]]:
    """Runs that were in the process of one that must be alone, while it ran."""
    notes = [note for note in scene.notes() if "stalls" in note and note["what"] != "reported"]
    ends = {(note["id"], note["fence"]): note["at"] for note in notes if note["what"] == "over"}
    found: list[tuple[str, str]] = []
    for one in notes:
        if one["stalls"] >= 2 and one["what"] != "over":
            ended_at = ends.get((one["id"], one["fence"]), time.monotonic())
            others = [note for note in notes if note["pid"] == one["pid"] and note["id"] != one["id"]]
            found += [(one["id"], note["id"]) for note in others if one["at"] <= note["at"] <= ended_at]
    return found


@pytest.mark.storages("sqlite")
async def test_job_at_its_stall_limit_runs_alone_in_its_process(scene: Scene) -> None:
    await scene.worker("crashes:app", "--processes", "2", children=2)
    handle = await scene.app.queue("last").enqueue({}, id="l")
    (first,) = await scene.noted("last")
    os.kill(first["pid"], signal.SIGKILL)
    _, again = await scene.noted("last", 2)
    for number in range(11):  # One more than fit into the other process.
        await scene.app.queue("nap").enqueue({}, id=str(number))
    await scene.noted("nap", 10)
    let_go(scene, "last")
    assert await handle.result(wait=10) == "alive"
    (over,) = scene.notes("over")
    await scene.noted("nap", 11)
    let_go(scene, "neighbour")
    assert not [nap for nap in scene.notes("nap") if nap["pid"] == again["pid"] and nap["at"] < over["at"]]
    for number in range(11):
        assert await scene.app.queue("nap").result(str(number), wait=10) == "rested"


async def test_the_jobs_of_a_process_that_was_killed_run_again_within_a_second_in_another(scene: Scene) -> None:
    worker = await scene.worker("crashes:app", "--processes", "2", children=2)
    for number in range(10):
        await scene.app.queue("nap").enqueue({}, id=str(number))
    naps = await scene.noted("nap", 10)
    victim = naps[0]["pid"]
    os.kill(victim, signal.SIGKILL)  # As the kernel does when memory is short.
    killed_at = time.monotonic()
    died = {note["id"] for note in naps if note["pid"] == victim}
    again = (await scene.noted("nap", 10 + len(died)))[10:]
    assert {note["id"] for note in again} == died
    assert max(note["at"] for note in again) - killed_at < 1.5
    let_go(scene, "neighbour")
    for number in range(10):
        assert await scene.app.queue("nap").result(str(number), wait=10) == "rested"
        stalled = (1, 0, 0, 2) if str(number) in died else (0, 0, 0, 1)
        assert await counts(scene, "nap", str(number)) == stalled
    await until(lambda: len(worker.children()) == 2)


@pytest.mark.storages("sqlite")
async def test_at_most_once_job_fails_with_its_process_and_its_fail_handler_runs(scene: Scene) -> None:
    await scene.worker("crashes:app", "--processes", "1")
    beside = await scene.app.queue("once").enqueue({"dies": False}, id="beside")
    await scene.noted("once")
    dies = await scene.app.queue("once").enqueue({"dies": True}, id="dies")
    for handle in (beside, dies):
        with pytest.raises(JobFailed, match="its process died") as raised:
            await handle.result(wait=10)
        assert (raised.value.kind, raised.value.attempts) == ("stall", 1)
    reported = await scene.noted("reported", 2)
    assert {note["failed"]: note["kind"] for note in reported} == {"beside": "stall", "dies": "stall"}
    assert len(scene.notes("once")) == 2


@pytest.mark.storages("sqlite")
async def test_memory_error_and_sys_exit_are_ordinary_failures(scene: Scene) -> None:
    worker = await scene.worker("crashes:app", "--processes", "1")
    (pid,) = worker.children()
    napping = await scene.app.queue("nap").enqueue({}, id="n")
    await scene.noted("nap")
    for queue, error in (("greedy", "MemoryError"), ("exit", "SystemExit: 3"), ("exit.thread", "SystemExit: 3")):
        with pytest.raises(JobFailed, match=error) as raised:
            await scene.ask(queue)
        assert (raised.value.kind, raised.value.attempts) == ("retriable", 1)
    let_go(scene, "neighbour")
    assert await napping.result(wait=10) == "rested"
    assert await counts(scene, "nap", "n") == (0, 0, 0, 1)
    assert worker.children() == [pid]


@pytest.mark.storages("sqlite")
async def test_partial_frame_is_waited_for_only_until_its_timeout(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_handle, "PART_S", 1.0)
    async with embedded(scene, monkeypatch, "crashes:app"):
        napping = await scene.app.queue("nap").enqueue({}, id="n")
        await scene.noted("nap")
        began = time.monotonic()
        assert await scene.ask("half", id="h") == "done"
        assert 1.0 < time.monotonic() - began < 4.0
        let_go(scene, "neighbour")
        assert await napping.result(wait=10) == "rested"
        assert await counts(scene, "half", "h") == (1, 0, 0, 2)
        assert await counts(scene, "nap", "n") == (1, 0, 0, 2)


@asynccontextmanager
async def embedded(scene: Scene, monkeypatch: pytest.MonkeyPatch, target: str) -> AsyncIterator[None]:
    """A worker of the test's own."""
    for name, value in scene.environment.items():
        monkeypatch.setenv(name, value)
    place = scene.place
    settings = PoolSettings(target=f"tests.worker.{target}", path=[str(ROOT), *sys.path], processes=1, worker="w")
    pool = Pool(settings)
    hooks = HookDispatcher((), pool.report_error)
    made = Worker(pool, lambda: connect(place.url, namespace=place.namespace), WorkerSettings(name="w"), hooks)
    async with made:
        yield


@pytest.mark.storages("sqlite")
async def test_unread_output_blocks_only_the_run_that_writes_it(scene: Scene) -> None:
    worker = Unread(scene)
    scene.workers.append(worker)
    await worker.ready(2)
    napping = await scene.app.queue("nap").enqueue({}, id="n")
    await scene.noted("nap")
    flood = await scene.app.queue("flood").enqueue({}, id="f")
    await until(lambda: "a run that does not stop" in worker.text() or "timed_out f of flood" in worker.text())
    let_go(scene, "neighbour")
    assert await napping.result(wait=10) == "rested"
    assert await counts(scene, "nap", "n") == (0, 0, 0, 1)
    reading = asyncio.create_task(asyncio.to_thread(worker.read))
    assert await flood.result(wait=10) == "done"
    stalls, retries, timeouts, _ = await counts(scene, "flood", "f")
    assert (stalls, retries) == (0, 0)
    assert timeouts >= 1
    assert await worker.stop() == 0
    await reading


class Unread(WorkerProcess):
    """A worker whose output goes into a pipe; its log does not."""

    def __init__(self, scene: Scene) -> None:
        self.log = scene.folder / "worker-unread.log"
        self._out = self.log.open("wb")
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "worker", "tests.worker.crashes:app", "--processes", "2"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._out,
            env={**os.environ, **scene.environment},
            cwd=ROOT,
        )
        self.pid = self.process.pid

    def read(self) -> None:
        """All that it says, until its end."""
        assert self.process.stdout is not None
        with self.process.stdout as end:
            while end.read(65_536):
                pass
