"""A run that does not stop is killed, and what it costs is one timeout of its own: its neighbours finish, or go back
uncounted."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast import JobCancelled, JobFailed, State
from holdfast._worker.notes import ask_for_stack
from holdfast._worker.processes import child_handle
from holdfast._worker.processes.pool import Pool, PoolSettings
from holdfast._worker.telemetry import HookDispatcher
from holdfast._worker.worker import Worker, WorkerSettings
from holdfast.storage import connect
from tests.processes import parents
from tests.worker.conftest import ROOT, Scene, until

ON_THE_LOOP = ["swallow", "spin", "sleep_on_the_loop", "freeze"]
ON_A_THREAD = [
    *("spin_on_a_thread", "hold_the_gil", "read_what_nobody_writes", "start_processes", "start_threads"),
    "change_group",
]
TIMEOUT_S, CANCEL_GRACE_S, DRAIN_GRACE_S = 0.5, 0.2, 10.0


def let_go(scene: Scene, who: str = "neighbour") -> None:
    """Let those end that wait for it."""
    scene.notes_file.with_name(f"{who} may go").touch()


def queue_of(kind: str, name: str = "stuck") -> str:
    return name if kind in ON_THE_LOOP else f"{name}.thread"


async def test_stuck_run_is_killed_in_time_and_counted_once_before_it_runs_again(
    scene: Scene,
) -> None:
    kinds = ON_THE_LOOP + ON_A_THREAD
    worker = await scene.worker("stuck:app", "--processes", str(len(kinds)), children=len(kinds))
    handles = {kind: await scene.app.queue(queue_of(kind)).enqueue({"kind": kind}, id=kind) for kind in kinds}
    for kind, handle in handles.items():
        assert await handle.result(wait=30) == "done", kind
    for kind in kinds:
        (first,) = [note for note in scene.notes("stuck") if note["id"] == kind]
        (again,) = [note for note in scene.notes("again") if note["id"] == kind]
        assert not again["first_is_there"], kind
        assert again["at"] - first["at"] < TIMEOUT_S + CANCEL_GRACE_S + DRAIN_GRACE_S + 1, kind
        job = await scene.app.queue(queue_of(kind)).get(kind)
        assert job is not None
        assert (job.timeouts, job.retries, job.stalls, job.attempts) == (1, 0, 0, 2), kind
    (started,) = scene.notes("started")
    assert not set(started["pids"]) & set(parents())
    assert worker.process.poll() is None
    await until(lambda: len(worker.children()) == len(kinds))


WHERE = {
    "swallow": "in swallow",
    "spin": "in spin",
    "sleep_on_the_loop": "in sleep_on_the_loop",
    "spin_on_a_thread": "in spin_on_a_thread",
    "hold_the_gil": "in hold_the_gil",
    "start_threads": "in start_threads",
}
"""The frame in which each kind is stuck."""


@pytest.mark.storages("sqlite")
async def test_error_of_a_killed_run_has_the_stack_in_which_it_was_stuck(scene: Scene) -> None:
    await scene.worker("stuck:app", "--processes", str(len(WHERE)), children=len(WHERE))
    handles = {
        kind: await scene.app.queue(queue_of(kind)).enqueue({"kind": kind}, id=kind, max_timeouts=0) for kind in WHERE
    }
    for kind, handle in handles.items():
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=30)
        error = raised.value.error
        assert error.message == f"the run took longer than its timeout of {TIMEOUT_S:g} s"
        assert WHERE[kind] in error.traceback, (kind, error.traceback)
        others = [frame for other, frame in WHERE.items() if other != kind]
        assert not any(f"{frame}\n" in error.traceback for frame in others), (kind, error.traceback)
        assert "_worker/handler.py" not in error.traceback


@pytest.mark.storages("sqlite")
async def test_stack_of_a_run_that_blocks_its_process_is_shown_before_its_timeout(scene: Scene) -> None:
    await scene.worker("stuck:app", "--processes", "3", "--lease", "2", children=3)
    blocked = "its event loop is blocked"
    kinds = {"swallow": "", "sleep_on_the_loop": blocked, "hold_the_gil": blocked}
    for kind in kinds:
        await scene.app.queue(queue_of(kind)).enqueue({"kind": kind}, id=kind, timeout=60)
    await scene.noted("stuck", 3)
    storage, worker = scene.app.storage, ""
    for kind, why in kinds.items():
        (job,) = await storage.get(queue_of(kind), [kind])
        assert job is not None
        assert job.run is not None
        worker = job.run.worker
        stack = await ask_for_stack(storage, worker, queue_of(kind), job.run.fence, wait_s=10)
        assert stack is not None
        assert WHERE[kind] in stack
        assert why in stack
    assert await ask_for_stack(storage, worker, "stuck", 1, wait_s=10) == ""
    for kind in kinds:
        await scene.app.queue(queue_of(kind)).cancel(kind)


async def test_other_runs_beside_a_stuck_one_finish_or_are_released_uncounted(
    scene: Scene,
) -> None:
    deaf = {"spin", "hold_the_gil"}
    kinds = ["spin", "hold_the_gil", "swallow", "spin_on_a_thread"]
    worker = await scene.worker("stuck:app", "--processes", "4", children=4)
    for number in range(4):
        await scene.app.queue("neighbour").enqueue({}, id=str(number))
    naps = await scene.noted("nap", 4)
    for kind in kinds:
        await scene.app.queue(queue_of(kind, "stuck.small")).enqueue({"kind": kind}, id=kind)
    stuck = {note["pid"]: note["id"] for note in await scene.noted("stuck", 4)}
    beside = {note["id"]: stuck[note["pid"]] for note in naps}
    await until(lambda: worker.text().count("a run that does not stop") == 4)
    await scene.noted("nap", 6)
    assert {note["id"] for note in scene.notes("again")} <= deaf  # The others are not killed yet.
    let_go(scene)
    for number, kind in beside.items():
        assert await scene.app.queue("neighbour").result(number, wait=20) == "rested"
        job = await scene.app.queue("neighbour").get(number)
        assert job is not None
        assert (job.timeouts, job.retries, job.stalls) == (0, 0, 0), kind
        assert job.attempts == (2 if kind in deaf else 1), kind
    for kind in kinds:
        assert await scene.app.queue(queue_of(kind, "stuck.small")).result(kind, wait=20) == "done"


async def test_a_cancelled_run_that_does_not_stop_is_killed_and_its_job_ends_cancelled(scene: Scene) -> None:
    await scene.worker("stuck:app", "--processes", "1", "--lease", "0.5")
    queue = scene.app.queue("unheeding")
    handle = await queue.enqueue({}, id="a")
    (stuck,) = await scene.noted("stuck")
    assert await queue.cancel("a") == "asked"
    with pytest.raises(JobCancelled):
        await handle.result(wait=10)
    assert stuck["pid"] not in parents()
    (asked,) = scene.notes("asked")
    assert asked["stopping"] == "cancel"
    job = await queue.get("a")
    assert job is not None
    assert (job.state, job.attempts, job.timeouts) == (State.CANCELLED, 1, 0)


@pytest.mark.storages("sqlite")
async def test_late_success_before_the_kill_counts(scene: Scene) -> None:
    worker = await scene.worker("stuck:app", "--processes", "1")
    rested = await scene.app.queue("neighbour").enqueue({})
    (nap,) = await scene.noted("nap")
    late = await scene.app.queue("late").enqueue({}, id="late")
    thread = await scene.app.queue("late.thread").enqueue({}, id="late")
    assert await thread.result(wait=10) == "better late than never"  # Within its grace.
    await until(lambda: "a run that does not stop" in worker.text())
    let_go(scene, "late")
    assert await late.result(wait=10) == "better late than never"  # After it.
    let_go(scene)
    assert await rested.result(wait=10) == "rested"
    assert [note["stopping"] for note in scene.notes("asked")] == ["timeout", "timeout"]
    for queue in ("late", "late.thread"):
        job = await scene.app.queue(queue).get("late")
        assert job is not None
        assert (job.timeouts, job.attempts) == (0, 1)
    await until(lambda: nap["pid"] not in parents())
    assert len(worker.children()) == 1


@pytest.mark.storages("sqlite")
async def test_task_option_sets_how_long_its_runs_may_take_to_stop(scene: Scene) -> None:
    worker = await scene.worker("stuck:app", "--processes", "2", children=2)
    took: dict[str, float] = {}
    for queue in ("patient", "impatient"):
        with pytest.raises(JobFailed, match="TimeoutError") as raised:
            await scene.ask(queue)
        assert raised.value.kind == "timeout"
        said = re.compile(rf"of {queue}, attempt 1, ([\d.]+) s")
        await until(lambda said=said: said.search(worker.text()))
        took[queue] = float(said.findall(worker.text())[0])
    assert took["patient"] > 1.7
    assert 0.3 < took["impatient"] < 1.7


@pytest.mark.storages("sqlite")
async def test_process_with_several_stuck_runs_is_replaced_once_and_at_once(scene: Scene) -> None:
    worker = await scene.worker("stuck:app", "--processes", "1")
    rested = await scene.app.queue("neighbour").enqueue({}, id="n")
    (nap,) = await scene.noted("nap")
    queue = scene.app.queue("unheeding")
    stuck = [await queue.enqueue({}, timeout=0.3 + 0.5 * n, max_timeouts=0) for n in range(3)]
    await until(lambda: worker.text().count(" is ready") == 2)
    (new,) = set(worker.children()) - {nap["pid"]}
    await scene.noted("asked", 3)
    assert set(worker.children()) == {nap["pid"], new}
    let_go(scene)
    for handle in stuck:
        with pytest.raises(JobFailed, match="TimeoutError"):
            await handle.result(wait=10)
    assert await rested.result(wait=10) == "rested"
    job = await scene.app.queue("neighbour").get("n")
    assert job is not None
    assert job.attempts == 1
    assert worker.children() == [new]
    assert worker.text().count(" is ready") == 2


@asynccontextmanager
async def embedded(scene: Scene, monkeypatch: pytest.MonkeyPatch, target: str, **options: Any) -> AsyncIterator[Pool]:
    """A worker of the test's own, with options that the command line does not have."""
    for name, value in scene.environment.items():
        monkeypatch.setenv(name, value)
    place, path = scene.place, [str(ROOT), *sys.path]
    settings = PoolSettings(target=f"tests.worker.{target}", path=path, processes=1, worker="w", **options)
    pool = Pool(settings)
    hooks = HookDispatcher((), pool.report_error)
    made = Worker(pool, lambda: connect(place.url, namespace=place.namespace), WorkerSettings(name="w"), hooks)
    async with made:
        yield pool


@pytest.mark.storages("sqlite")
async def test_slow_runs_beside_a_stuck_one_are_released_uncounted_after_drain_grace(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded(scene, monkeypatch, "stuck:app", drain_grace_s=0.5):
        rested = await scene.app.queue("neighbour").enqueue({}, id="n")
        await scene.noted("nap")
        with pytest.raises(JobFailed, match="TimeoutError"):
            await scene.ask("impatient")
        first, again = await scene.noted("nap", 2)
        assert first["pid"] != again["pid"]
        let_go(scene)
        assert await rested.result(wait=10) == "rested"
        job = await scene.app.queue("neighbour").get("n")
        assert job is not None
        assert (job.timeouts, job.retries, job.stalls, job.attempts) == (0, 0, 0, 2)


@pytest.mark.storages("sqlite")
async def test_fork_of_a_handler_ends_when_the_handler_terminates_it(scene: Scene) -> None:
    await scene.worker("stuck:app", "--processes", "1")
    assert await scene.ask("forks") == [-signal.SIGTERM] * 10


@pytest.mark.storages("sqlite")
async def test_process_blocked_by_leftovers_of_a_run_is_replaced_without_losing_a_job(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_handle, "LOST_S", 1.0)
    async with embedded(scene, monkeypatch, "stuck:app"):
        await scene.app.queue("leaves").enqueue({})
        await scene.noted("blocked")
        assert await scene.ask("quick", id="q") == "done"
        job = await scene.app.queue("quick").get("q")
        assert job is not None
        assert (job.timeouts, job.retries, job.stalls) == (0, 0, 0)
