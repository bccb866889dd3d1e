"""What signals do to a worker: it stops without losing a job, quickly at the second signal, and loads code again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import JobInfo
from tests.worker.conftest import Scene, WorkerProcess, settled, timed, until

NOISE_S = 2.0
"""What a busy machine may add to any bound."""


async def kept(scene: Scene, queue: str, id: str) -> JobInfo:
    """The job of this id, which must exist."""
    job = await scene.app.queue(queue).get(id)
    assert job is not None
    return job


async def test_a_worker_that_is_stopped_under_load_loses_and_counts_nothing(scene: Scene) -> None:
    await assert_load_survives(scene, lambda worker: [worker.pid])


@pytest.mark.storages("sqlite")
async def test_sigterm_to_the_whole_process_tree_loses_no_job(scene: Scene) -> None:
    await assert_load_survives(scene, lambda worker: [*worker.children(), worker.pid])


@pytest.mark.storages("sqlite")
async def test_sigterm_to_a_program_with_run_worker_loses_no_job(scene: Scene) -> None:
    await assert_load_survives(scene, lambda worker: [worker.pid], command=("tests.worker.managed",))


@pytest.mark.storages("sqlite")
async def test_signals_of_a_program_with_run_worker(scene: Scene) -> None:
    """SIGHUP loads the code again in children; a second SIGTERM ends the grace. Inline, SIGHUP stops the worker."""
    worker = await scene.worker("held:app", "--processes", "1", "--grace", "60", command=("tests.worker.managed",))
    assert len(await scene.noted("imported")) == 2  # The program and its child.
    worker.signal(signal.SIGHUP)
    await scene.noted("imported", 3)
    await until(lambda: "reloaded the code" in worker.text())
    await scene.app.queue("hold").enqueue({"gate": "never"}, id="hold")
    await scene.noted("began")
    for count in (1, 2):
        worker.signal(signal.SIGTERM)
        await until(lambda: worker.text().count("stopping the worker") == count)  # noqa: B023
    assert await timed(worker.exited) < 1 + NOISE_S
    assert worker.process.returncode == 0
    assert (await kept(scene, "hold", "hold")).state == "waiting"
    inline = await scene.worker("held:app", children=0, command=("tests.worker.managed",))
    inline.signal(signal.SIGHUP)
    assert await inline.exited() == 0


async def assert_load_survives(
    scene: Scene, stop: Callable[[WorkerProcess], list[int]], command: tuple[str, ...] = ("holdfast", "worker")
) -> None:
    """Two children with more than they can take: some of it ends in time, some never, some does not stop."""
    grace_s = 1.5
    options = ("--processes", "2", "--grace", f"{grace_s}")
    worker = await scene.worker("held:app", *options, children=2, command=command)
    jobs = [
        *(("hold", f"soon-{n}", {"gate": "soon"}) for n in range(10)),
        *(("hold", f"late-{n}", {"gate": "late"}) for n in range(10)),
        *(("watch", f"sync-{n}", {"gate": "late"}) for n in range(10)),
        *(("stubborn", f"stubborn-{n}", {}) for n in range(2)),
        *(("one", f"big-{n}", {"gate": "late"}) for n in range(10)),
    ]
    for queue, id, payload in jobs[:32]:
        await scene.app.queue(queue).enqueue(payload, id=id)
    await scene.noted("began", 32)
    for queue, id, payload in jobs[32:]:
        await scene.app.queue(queue).enqueue(payload, id=id)
    began = await scene.noted("began", 34)
    stopped_at = time.monotonic()
    for pid in stop(worker):
        os.kill(pid, signal.SIGTERM)
    await until(lambda: "stopping the worker" in worker.text())
    (scene.folder / "soon").touch()
    assert await worker.exited() == 0
    assert time.monotonic() - stopped_at < grace_s + 0.5 + NOISE_S
    await until(lambda: not scene.processes(), NOISE_S)

    found = {id: await kept(scene, queue, id) for queue, id, _ in jobs}
    assert {id for id, job in found.items() if job.state == "completed"} == {f"soon-{n}" for n in range(10)}
    assert {job.state for job in found.values()} == {"completed", "waiting"}
    assert {(job.retries, job.stalls, job.timeouts) for job in found.values()} == {(0, 0, 0)}
    assert {job.attempts for id, job in found.items() if id in {note["id"] for note in began}} == {1}

    (scene.folder / "late").touch()
    await scene.worker("held:app", "--processes", "2", children=2)
    for queue in {queue for queue, *_ in jobs}:
        await settled(scene.app, queue, sum(job[0] == queue for job in jobs))
    assert {job.state for job in [await kept(scene, queue, id) for queue, id, _ in jobs]} == {"completed"}
    assert {tuple(note["counts"]) for note in scene.notes("began")} == {(0, 0, 0)}


@pytest.mark.storages("sqlite")
async def test_sigint_stops_a_worker_as_sigterm_does(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "1", "--grace", "1")
    for gate in ("soon", "late"):
        await scene.app.queue("hold").enqueue({"gate": gate}, id=gate)
    await scene.noted("began", 2)
    worker.signal(signal.SIGINT)
    await until(lambda: "stopping the worker" in worker.text())
    (scene.folder / "soon").touch()
    assert await worker.exited() == 0
    found = [await kept(scene, "hold", id) for id in ("soon", "late")]
    assert [(job.state, job.attempts, job.stalls) for job in found] == [("completed", 1, 0), ("waiting", 1, 0)]


@pytest.mark.storages("sqlite")
@pytest.mark.parametrize("grace", ["60", "0.2"])
async def test_second_signal_stops_the_worker_quickly(scene: Scene, grace: str) -> None:
    """Whether runs still have their grace, or were stopped and have half a minute for that."""
    worker = await scene.worker("held:app", "--processes", "2", "--grace", grace, children=2)
    await scene.app.queue("grip").enqueue({"seconds": 3600}, id="grip")
    await scene.noted("began")  # It has a child to itself. The others share one.
    await scene.app.queue("hold").enqueue({"gate": "never"}, id="hold")
    await scene.app.queue("patient").enqueue({}, id="patient")
    await scene.noted("began", 3)
    worker.signal(signal.SIGTERM)
    await until(lambda: "stopping the worker" in worker.text())
    if grace != "60":
        await until(lambda: {note["queue"] for note in scene.notes("stopped")} == {"hold", "patient"})
    worker.signal(signal.SIGTERM)
    assert await timed(worker.exited) < 1 + NOISE_S
    assert worker.process.returncode == 0
    for queue in ("hold", "patient", "grip"):
        job = await scene.app.queue(queue).get(queue)
        assert job is not None
        assert (job.state, job.attempts) == ("waiting", 1)
        assert (job.retries, job.stalls, job.timeouts) == (0, 0, 0)


@pytest.mark.storages("sqlite")
async def test_a_worker_whose_code_is_still_loading_stops_at_once(scene: Scene) -> None:
    code = Code(scene)
    code.write("old", head="note('loading'); import time; time.sleep(30)")
    worker = code.start()
    await scene.noted("loading")
    worker.signal(signal.SIGTERM)
    assert await timed(worker.exited) < NOISE_S
    assert worker.process.returncode == 0


# New code


TASKS = """\
import os
from tests.worker.held import app, wait_at
from tests.worker.scene import note
{head}

@app.task(name="which", size=1)
async def which() -> list:
    note("which", code="{code}")
    return ["{code}", os.getpid()]

@app.task(name="slow", size=1)
async def slow(gate: str) -> list:
    note("slow", code="{code}")
    await wait_at(gate)
    return ["{code}", os.getpid()]

@app.task(name="{code}-only")
async def only_here() -> str:
    return "{code}"
"""


LOADS_UNTIL_LET = """\
import time
from tests.worker.held import is_open
note("loading")
while not is_open("load"):
    time.sleep(0.02)
"""


class Code:
    """A task module that changes."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._folder = scene.folder / "code"
        self._folder.mkdir()
        self._written = 0

    def write(self, code: str, *, head: str = "", text: str = TASKS) -> None:
        self._written += 1  # Python takes a file of the same size and second for the same.
        text = text.format(code=code, head=head) + "#" * self._written
        (self._folder / "changing.py").write_text(text)

    def start(self, *options: str) -> WorkerProcess:
        worker = WorkerProcess(self._scene, "changing:app", *options, cwd=self._folder)
        self._scene.workers.append(worker)
        return worker

    async def worker(self, *options: str, children: int = 1) -> WorkerProcess:
        worker = self.start(*options)
        await worker.ready(children)
        return worker


async def test_sighup_replaces_the_children_one_by_one_and_loses_no_job(scene: Scene) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "2", children=2)
    old = set(worker.children())
    in_flight = [await scene.app.queue("slow").enqueue({"gate": "go"}) for _ in range(10)]
    await scene.noted("slow", 10)
    code.write("new", head="note('loading'); import time; time.sleep(0.5); note('loaded')")
    worker.signal(signal.SIGHUP)
    asked = asyncio.create_task(ask_all_the_time(scene))
    await until(lambda: "reloaded the code" in worker.text())
    asked.cancel()
    results = await asked
    assert [note["code"] for note in scene.notes("slow")] == 10 * ["old"]
    assert old < set(worker.children())  # They have runs, and take no more.
    for _ in range(10):
        assert (await scene.ask("which"))[0] == "new"
    (scene.folder / "go").touch()
    for handle in in_flight:
        ran, pid = await handle.result(wait=10)
        assert (ran, pid in old) == ("old", True)
    await until(lambda: not old & set(worker.children()))
    assert len(worker.children()) == 2
    assert {ran for ran, _ in results} == {"old", "new"}
    for loading, loaded in zip(scene.notes("loading"), scene.notes("loaded"), strict=True):
        assert any(loading["at"] < note["at"] < loaded["at"] for note in scene.notes("which"))
    for queue in ("which", "slow"):
        totals = (await scene.app.queue(queue).stats()).totals
        assert {totals.get(name, 0) for name in ("retried", "stalled", "timed_out", "failed")} == {0}


async def ask_all_the_time(scene: Scene) -> list[Any]:
    """A job every few moments, until cancelled: their results."""
    handles = []
    try:
        while True:
            handles.append(await scene.app.queue("which").enqueue({}))
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return [await handle.result(wait=10) for handle in handles]


@pytest.mark.storages("sqlite")
async def test_reload_serves_new_tasks_and_leaves_removed_ones(scene: Scene) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "1", "--lease", "0.5")
    assert await scene.ask("old-only") == "old"
    early = await scene.app.queue("new-only").enqueue({})
    code.write("new", head=LOADS_UNTIL_LET)
    worker.signal(signal.SIGHUP)
    await scene.noted("loading")
    assert (await scene.ask("which"))[0] == "old"  # Its only child goes on until there is another.
    (scene.folder / "load").touch()
    assert await early.result(wait=10) == "new"
    await scene.app.queue("old-only").enqueue({}, id="left")
    assert (await scene.ask("which"))[0] == "new"
    await asyncio.sleep(1.2)  # It looks at its queues once a second.
    left = await scene.app.queue("old-only").get("left")
    assert left is not None
    assert (left.state, left.attempts) == ("waiting", 0)
    (announced,) = (await scene.app.stats()).workers
    queues = announced.facts["queues"]
    assert isinstance(queues, list)
    assert "new-only" in queues
    assert "old-only" not in queues


@pytest.mark.storages("sqlite")
async def test_reload_of_broken_code_keeps_the_old_children_and_logs_the_error(scene: Scene) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "2", children=2)
    old = set(worker.children())
    slow = await scene.app.queue("slow").enqueue({"gate": "go"})
    await scene.noted("slow")
    two = ((TASKS + "\nraise ValueError('no luck')", "ValueError: no luck"), ("this is no Python", "SyntaxError"))
    for broken, why in two:
        code.write("broken", text=broken)
        worker.signal(signal.SIGHUP)
        await until(lambda why=why: why in worker.text() and "the new code does not load" in worker.text())
        assert (await scene.ask("which"))[0] == "old"
        await until(lambda: set(worker.children()) == old)  # The child that tried the new code may still be ending.
    (scene.folder / "go").touch()
    assert (await slow.result(wait=10))[0] == "old"
    code.write("mended")
    worker.signal(signal.SIGHUP)
    await until(lambda: "reloaded the code" in worker.text())
    assert (await scene.ask("which"))[0] == "mended"


@pytest.mark.storages("sqlite")
@pytest.mark.parametrize("without", ["which", "any task"])
async def test_reload_of_code_without_tasks_can_be_fixed_by_another_reload(scene: Scene, without: str) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "1", "--queues", "whic?")
    assert (await scene.ask("which"))[0] == "old"
    empty = "from tests.worker.scene import make_app\napp = make_app()\n"
    code.write("bad", text=TASKS.replace('"which"', '"other"') if without == "which" else empty)
    worker.signal(signal.SIGHUP)
    await until(lambda: "no task" in worker.text())
    assert worker.process.poll() is None
    code.write("mended")
    worker.signal(signal.SIGHUP)
    await until(lambda: "reloaded the code" in worker.text())
    assert (await scene.ask("which"))[0] == "mended"


@pytest.mark.storages("sqlite")
async def test_changed_source_is_loaded_again_if_the_option_says_so(scene: Scene) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "2", "--reload", children=2)
    await until(lambda: "watching the Python files in" in worker.text())
    slow = await scene.app.queue("slow").enqueue({"gate": "go"})
    await scene.noted("slow")
    code.write("broken", text="this is no Python")
    await until(lambda: "the new code does not load" in worker.text())
    assert (await scene.ask("which"))[0] == "old"
    code.write("new")
    await until(lambda: "reloaded the code" in worker.text())
    assert (await scene.ask("which"))[0] == "new"
    assert worker.text().count("changing.py has changed: reloading the code") == 2
    (scene.folder / "go").touch()
    assert (await slow.result(wait=10))[0] == "old"
    await asyncio.sleep(1.2)  # Two looks at the files.
    assert worker.text().count("reloading the code") == 2
    assert worker.text().count("watching") == 1


@pytest.mark.storages("sqlite")
async def test_inline_worker_starts_again_with_changed_source(scene: Scene) -> None:
    code = Code(scene)
    code.write("broken", text="this is no Python")
    worker = code.start("--inline", "--reload")
    await until(lambda: "waiting for a change: " in worker.text() and "watching" in worker.text())
    code.write("old")
    await until(lambda: worker.text().count("watching") == 2, 20)
    slow = await scene.app.queue("slow").enqueue({"gate": "go"})
    await scene.noted("slow")
    code.write("new")
    await until(lambda: "changing.py has changed: stopping the worker" in worker.text())
    (scene.folder / "go").touch()
    assert (await slow.result(wait=10))[0] == "old"
    assert await scene.ask("which") == ["new", worker.pid]
    worker.signal(signal.SIGTERM)
    assert await worker.exited(20) == 0


@pytest.mark.storages("sqlite")
async def test_inline_worker_waits_for_code_that_loads_and_has_tasks(scene: Scene) -> None:
    package = scene.folder / "code" / "shop"
    package.mkdir(parents=True)
    tasks = package / "tasks.py"
    tasks.write_text("this is no Python")
    worker = WorkerProcess(scene, "shop.tasks:app", "--inline", "--reload", cwd=package.parent)
    scene.workers.append(worker)
    await until(lambda: "waiting for a change: module shop.tasks" in worker.text() and "watching" in worker.text())
    tasks.write_text(TASKS.format(code="old", head=""))
    await until(lambda: worker.text().count("watching") == 2, 20)
    tasks.write_text("from tests.worker.scene import make_app\napp = make_app()\n")
    await until(lambda: worker.text().count("watching") == 3, 20)
    assert "waiting for a change: this app has no tasks" in worker.text()
    tasks.write_text(TASKS.format(code="new", head=""))
    assert await scene.ask("which") == ["new", worker.pid]
    worker.signal(signal.SIGTERM)
    assert await worker.exited(20) == 0


@pytest.mark.storages("sqlite")
async def test_changed_source_is_not_noticed_without_the_option(scene: Scene) -> None:
    code = Code(scene)
    code.write("old")
    worker = await code.worker("--processes", "1")
    code.write("new")
    await asyncio.sleep(1.2)
    assert (await scene.ask("which"))[0] == "old"
    assert "reload" not in worker.text()


@pytest.mark.storages("sqlite")
async def test_sighup_to_the_children_alone_loses_no_job(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "1")
    handle = await scene.app.queue("hold").enqueue({"gate": "go"})
    await scene.noted("began")
    (child,) = worker.children()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
    await scene.ask("quick", {"number": 1})
    (scene.folder / "go").touch()
    assert await handle.result(wait=10) == [1, 0, 0, 0]
    assert worker.children() == [child]
