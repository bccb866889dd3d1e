"""Child processes: how they start, what runs in them, and how one is replaced without a gap."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import Any

import pytest

from holdfast import JobFailed
from tests.worker.conftest import Scene, WorkerProcess, settled, until
from tests.worker.test_capacity import open_gate, put


def ready(worker: WorkerProcess) -> list[int]:
    """The children that have become ready, in this order."""
    return [int(pid) for pid in re.findall(r"child (\d+) is ready", worker.text())]


async def uncounted(scene: Scene, queue: str, completed: int) -> None:
    """All jobs of a queue have completed in their first run."""
    totals = (await scene.app.queue(queue).stats()).totals
    happened = {kind: count for kind, count in totals.items() if count}
    assert happened == {"enqueued": completed, "claimed": completed, "completed": completed}


@pytest.mark.storages("sqlite")
async def test_child_has_its_own_process_group_and_empty_stdin(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "2", children=2)
    replies = await asyncio.gather(*(scene.ask("where") for _ in range(8)))
    assert {child["pid"] for child in replies} == set(worker.children())
    for child in replies:
        assert child == {
            "pid": child["pid"],
            "parent": worker.pid,
            "group": child["pid"],
            "stdin": "/dev/null",
            "thread": True,
        }


@pytest.mark.storages("sqlite")
async def test_child_uses_the_codec_hooks_of_its_app(scene: Scene) -> None:
    await scene.worker("simple:app", "--processes", "1")
    assert await scene.app.queue("parent").call({"path": "/srv/jobs.db"}, wait=20) == "/srv"


@pytest.mark.storages("sqlite")
async def test_only_children_import_the_users_code(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "2", children=2)
    imported = await scene.noted("imported", 2)
    assert {note["pid"] for note in imported} == set(worker.children())
    assert {note["parent"] for note in imported} == {worker.pid}


# Replacing


@pytest.mark.storages("sqlite")
async def test_a_child_is_replaced_after_its_jobs_and_no_job_is_lost_or_counted(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1", "--max-jobs", "5")
    used: list[int] = []
    for generation in range(1, 4):
        pids = {await scene.ask("ten") for _ in range(5)}
        assert len(pids) == 1
        used += pids
        await until(lambda generation=generation: len(ready(worker)) > generation)
    assert used == ready(worker)[:3]
    assert len(set(used)) == 3
    await until(lambda: worker.children() == ready(worker)[-1:])
    await uncounted(scene, "ten", 15)


@pytest.mark.storages("sqlite")
async def test_there_is_no_gap_while_children_are_replaced_under_load(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "2", "--max-jobs", "10", children=2)
    jobs, fewest = 0, 2

    async def were_replaced() -> bool:
        nonlocal jobs, fewest
        there = set(worker.children())  # First: who becomes ready after this is not in it, and harms nothing.
        fewest = min(fewest, len(there & set(ready(worker))))
        if (await scene.app.queue("ten").stats()).ready < 20:
            await put(scene, "ten", 20, seconds=0.1)
            jobs += 20
        return len(ready(worker)) >= 8

    await until(were_replaced, 30)
    await settled(scene.app, "ten", jobs)
    assert fewest == 2
    await uncounted(scene, "ten", jobs)


@pytest.mark.storages("sqlite")
async def test_replaced_child_finishes_its_runs(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1", "--max-jobs", "2")
    (first,) = worker.children()
    await put(scene, "ten", 2, until="gate")
    await scene.noted("began", 2)
    await until(lambda: len(ready(worker)) == 2)
    assert await scene.ask("ten") == ready(worker)[1]
    await asyncio.sleep(0.3)
    assert first in worker.children()
    open_gate(scene)
    await until(lambda: first not in worker.children(), 5)
    assert [note["pid"] for note in scene.notes("ended")].count(first) == 2
    await uncounted(scene, "ten", 3)


@pytest.mark.storages("sqlite")
async def test_child_above_max_memory_is_replaced_even_if_idle(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1", "--max-memory", "250M")
    first = await scene.ask("leak", {"mib": 50})
    await asyncio.sleep(0.6)  # Long enough to be looked at twice.
    assert worker.children() == [first]
    assert await scene.ask("leak", {"mib": 250, "later": 0.3}) == first
    await until(lambda: len(ready(worker)) == 2, 10)
    await until(lambda: first not in worker.children(), 5)
    assert re.search(rf"replacing child {first}: it has \d+ MiB in memory", worker.text())
    assert await scene.ask("leak", {"mib": 1}) == ready(worker)[1]


@pytest.mark.storages("sqlite")
async def test_log_of_a_worker_that_stops_promises_no_new_child(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1", "--max-memory", "250M")
    await put(scene, "ten", 1, until="gate")
    await scene.noted("began")
    child = await scene.ask("leak", {"mib": 250, "later": 1.5})
    worker.signal(signal.SIGTERM)
    await until(lambda: "MiB in memory" in worker.text(), 10)
    assert re.search(rf"ending child {child}: it has \d+ MiB in memory", worker.text())
    assert "replacing" not in worker.text()
    open_gate(scene)


@pytest.mark.storages("sqlite")
async def test_job_that_stalled_twice_gets_a_new_child_if_none_is_empty(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1")
    crashing = await scene.app.queue("crash").enqueue({"times": 2})
    await scene.noted("crashes", 2)
    await until(lambda: len(ready(worker)) == 3)
    await put(scene, "ten", 1, until="gate")
    (held,) = await scene.noted("began")
    alone = await crashing.result(wait=15)
    assert alone != held["pid"]
    assert f"child {alone} is ready, for isolated runs" in worker.text()
    open_gate(scene)
    await settled(scene.app, "ten", 1)
    await uncounted(scene, "ten", 1)


# What runs in a child


@pytest.mark.storages("sqlite")
async def test_unresponsive_child_gets_no_jobs_while_others_do(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "2", children=2)
    blocking = await scene.app.queue("block").enqueue({"until": "gate"})
    (blocked,) = await scene.noted("blocks")
    await asyncio.sleep(2.0)  # Within a second and a half it is known not to answer. Nothing tells when.
    replies = await asyncio.gather(*(scene.ask("where", wait=5) for _ in range(30)))  # More than fit into one.
    assert blocked["pid"] not in {child["pid"] for child in replies}
    open_gate(scene)
    assert await blocking.result(wait=5) == blocked["pid"]

    async def is_back() -> bool:
        return bool((await scene.ask("where"))["pid"] == blocked["pid"])

    await until(is_back, 5)


@pytest.mark.storages("sqlite")
async def test_sync_handlers_run_concurrently_on_threads(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    assert await asyncio.gather(*(scene.ask("meet", {"others": 10}) for _ in range(10))) == ["met"] * 10


@pytest.mark.storages("sqlite")
async def test_handler_has_its_current_job_and_its_own_context(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1", "--name", "wanda")
    asked = [(queue, sync) for queue in ("who", "who.sync") for sync in (True, False)] * 3
    replies = await asyncio.gather(
        *(scene.ask(queue, {"sync": sync}, id=f"job-{n}") for n, (queue, sync) in enumerate(asked))
    )
    for n, (queue, _) in enumerate(asked):
        assert replies[n] == {"id": f"job-{n}", "queue": queue, "attempt": 1, "worker": "wanda", "before": "nobody's"}


async def test_job_whose_id_is_not_text_runs_in_a_child(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    assert (await scene.ask("where", id=b"\xff\x00\xfe"))["stdin"] == "/dev/null"


async def test_progress_of_a_child_is_visible_to_clients(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    expected: dict[str, Any] = {"report": {"done": 2, "of": 3}, "report.sync": "half way"}
    for queue in expected:
        await scene.app.queue(queue).enqueue({"until": "gate"}, id="a")
    for queue, progress in expected.items():
        await until(lambda: _progress_is(scene, queue, progress), 5)  # noqa: B023
    open_gate(scene)
    for queue in expected:
        await settled(scene.app, queue, 1)


async def _progress_is(scene: Scene, queue: str, progress: Any) -> bool:
    job = await scene.app.queue(queue).get("a")
    return job is not None and job.progress == progress


async def test_large_results_arrive_and_too_large_ones_fail_at_once(scene: Scene) -> None:
    scene.app = scene.place.app(max_payload=4 << 20)
    async with scene.app:
        await scene.worker("hosts:app", "--processes", "1")
        for size in (1 << 20, (4 << 20) - 100):
            assert len(await scene.ask("give", {"size": size})) == size
        with pytest.raises(JobFailed, match="bytes") as raised:
            await scene.ask("give", {"size": 4 << 20})
        assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
        with pytest.raises(JobFailed, match="bytes") as raised:
            await scene.ask("give", {"size": 80 << 20})  # Too long even for a frame.
        assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
        assert await scene.ask("give", {"size": 1}) == "x"


@pytest.mark.storages("sqlite")
async def test_result_that_cannot_be_encoded_fails_at_once(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    with pytest.raises(JobFailed, match="object") as raised:
        await scene.ask("give.object")
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
    assert len(scene.notes("began")) == 1


@pytest.mark.storages("sqlite")
async def test_too_large_error_details_are_dropped_and_the_error_is_kept(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    with pytest.raises(JobFailed, match="Detailed: many") as raised:
        await scene.ask("raise.details", wait=10)
    assert (raised.value.kind, raised.value.attempts) == ("retriable", 2)


# What an app puts around it


@pytest.mark.storages("sqlite")
async def test_lifespan_is_entered_once_per_child_and_left_at_stop(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "2", children=2)
    children = set(worker.children())
    made_by = await asyncio.gather(*(scene.ask("resources") for _ in range(10)))
    assert set(made_by) == children
    assert sorted(note["pid"] for note in scene.notes("entered")) == sorted(children)
    assert scene.notes("left") == []
    began = time.monotonic()
    assert await worker.stop() == 0
    assert time.monotonic() - began < 5
    assert sorted(note["pid"] for note in scene.notes("left")) == sorted(children)


@pytest.mark.storages("sqlite")
async def test_middleware_and_after_execution_run_in_the_child(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "1")
    assert await scene.ask("double", {"number": 21}) == 42
    around = [note for note in scene.notes() if note["what"] in ("before", "after", "executed")]
    assert [note["what"] for note in around] == ["before", "after", "executed"]
    assert {note["pid"] for note in around} == set(worker.children())
