"""What can be seen of a worker: its log, its hooks, its record. Ids and durations, and never what a job is about."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest

from holdfast import JobFailed
from holdfast.version import VERSION
from tests.worker.conftest import Scene, settled, until
from tests.worker.test_capacity import open_gate

SECRET = "open-sesame"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG  |INFO   |WARNING|ERROR  ) .")


async def work(scene: Scene) -> None:
    """Jobs of all kinds that are about a secret: one completes, one is retried, two fail."""
    assert await scene.ask("secret", {"word": SECRET}, id="plain") == SECRET
    assert await scene.ask("secret", {"word": SECRET, "hold": 0.2, "fails": True}, id="again") == SECRET
    for queue, payload in (("number", {"number": SECRET}), ("unspeakable", {"word": SECRET})):
        with pytest.raises(JobFailed):
            await scene.ask(queue, payload, id=f"bad {queue}")


@pytest.mark.storages("sqlite")
async def test_json_log_has_one_object_per_line_and_one_line_per_job_event(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "1", "--log-format", "json", "--name", "olga")
    await work(scene)
    assert await worker.stop() == 0
    lines = [json.loads(line) for line in worker.text().splitlines()]
    for line in lines:
        assert {"at", "level", "logger", "message"} <= set(line)
    events = [line for line in lines if "event" in line]
    assert [(line["event"], line["queue"], line["id"], line["attempt"]) for line in events] == [
        ("completed", "secret", "plain", 1),
        ("retried", "secret", "again", 1),
        ("completed", "secret", "again", 2),
        ("failed", "number", "bad number", 1),
        ("failed", "unspeakable", "bad unspeakable", 1),
    ]
    assert {line["worker"] for line in events} == {"olga"}
    assert all(0 <= line["seconds"] < 5 for line in events)
    assert [line["seconds"] >= 0.2 for line in events] == [False, True, True, False, False]
    assert [line.get("error") for line in events][:4] == [None, "ValueError", None, "PayloadRejected"]
    own = [line for line in lines if line["logger"] == "shop"]
    assert [line["message"] for line in own].count("plain is at work") == 1
    assert {line["level"] for line in own} == {"info", "warning"}
    assert any("two\nlines" in line["message"] for line in own)
    assert {(line["queue"], line["id"]) for line in own} == {("secret", "plain"), ("secret", "again")}
    raised = [line for line in lines if "traceback" in line]
    assert [(line["id"], line["attempt"], line["level"]) for line in raised] == [("again", 1, "warning")]
    assert "in secret\n" in raised[0]["traceback"]
    assert SECRET not in worker.text()


@pytest.mark.storages("sqlite")
async def test_text_log_has_one_line_per_job_event(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "1", "--name", "olga")
    await work(scene)
    await scene.ask("secret", {"word": SECRET}, id="two\nlines")
    assert await worker.stop() == 0
    text = worker.text()
    for id, queue, attempt, kind in (
        ("plain", "secret", 1, "completed"),
        ("again", "secret", 1, "retried"),
        ("again", "secret", 2, "completed"),
        ("bad number", "number", 1, "failed"),
        ("bad unspeakable", "unspeakable", 1, "failed"),
    ):
        assert len(re.findall(rf"\b{kind} '?{id}'? of {queue}, attempt {attempt}, \d+\.\d+ s", text)) == 1, (id, kind)
    assert text.count("plain is at work") == 1
    handlers_own = ("lines, and", "lines is at work")  # It may say what it wants, in as many lines.
    before, shown, after = text.partition("Traceback (most recent call last):\n")
    assert re.search(r"WARNING again of secret raised, attempt 1: it runs again\n$", before)
    shown, end, after = after.partition("ValueError: no luck\nat all\n")
    assert end
    assert "in secret\n" in shown
    ours = [line for line in (before + after).splitlines() if not line.startswith(handlers_own)]
    assert [line for line in ours if not LINE.match(line)] == []
    assert SECRET not in text


@pytest.mark.storages("sqlite")
async def test_id_that_is_not_text_does_not_break_the_log(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "1", "--log-format", "json")
    await scene.app.queue("secret").enqueue({"word": "x"}, id=b"\xff\xfe")
    await settled(scene.app, "secret", 1)
    assert await worker.stop() == 0
    lines = [json.loads(line) for line in worker.text().splitlines()]
    assert [line["queue"] for line in lines if "event" in line] == ["secret"]


@pytest.mark.storages("sqlite")
async def test_hooks_are_called_in_a_child_in_order_and_once_for_each_event(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "2", children=2)
    children = set(worker.children())
    results = await asyncio.gather(*(scene.ask("double", {"number": n}) for n in range(30)))
    assert results == [2 * n for n in range(30)]
    events = await scene.noted("event", 60)
    by_job: dict[str, list[str]] = {}
    for event in events:
        assert (event["of"], event["run"]) == ("double", 1)
        by_job.setdefault(event["job"], []).append(event["kind"])
    assert list(by_job.values()) == [["claimed", "completed"]] * 30
    assert {event["pid"] for event in events} <= children
    troubles = await scene.noted("trouble", 30)  # This hook fails at each `completed`.
    assert {(report_error["error"], report_error["where"].split(" of job")[0]) for report_error in troubles} == {
        ("RuntimeError", "on_event, for completed")
    }
    assert await worker.stop() == 0
    assert (len(scene.notes("event")), len(scene.notes("trouble"))) == (60, 30)


@pytest.mark.storages("sqlite")
async def test_hooks_in_a_child_get_progress_and_drained_queues(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "1", "--lease", "1")
    await scene.app.queue("reporting").enqueue({})
    (drained,) = await scene.noted("drained", 1)
    (progress,) = scene.notes("progress")
    assert (progress["of"], progress["progress"]) == ("reporting", {"pages": 3})
    assert (drained["of"], drained["progress"]) == ("reporting", None)
    assert await worker.stop() == 0


@pytest.mark.storages("sqlite")
async def test_hooks_get_events_in_order_while_a_child_is_unresponsive(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "2", children=2)
    for _ in range(2):
        await scene.app.queue("spin").enqueue({"seconds": 0.7})
        for _ in range(60):
            await scene.app.queue("resources").enqueue({})
            await asyncio.sleep(0.01)
    await settled(scene.app, "spin", 2)
    await settled(scene.app, "resources", 120)
    events = await scene.noted("event", 244)
    by_job: dict[str, list[str]] = {}
    for event in events:
        by_job.setdefault(event["job"], []).append(event["kind"])
    assert {tuple(kinds) for kinds in by_job.values()} == {("claimed", "completed")}
    assert await worker.stop() == 0
    assert len(scene.notes("event")) == 244


@pytest.mark.storages("sqlite")
async def test_last_events_are_delivered_before_a_worker_exits(scene: Scene) -> None:
    worker = await scene.worker("hosts:observed", "--processes", "2", "--grace", "0", children=2)
    await scene.app.queue("hold").enqueue({"until": "never"})
    await scene.noted("began")
    assert await worker.stop() == 0
    assert [note["kind"] for note in scene.notes("event")] == ["claimed", "released"]


async def record(scene: Scene) -> dict[str, Any]:
    """What the storage knows of the only worker."""
    (found,) = (await scene.app.stats()).workers
    return {"name": found.worker, "beat_at": found.beat_at, **found.facts}


async def test_worker_is_listed_while_it_runs(scene: Scene) -> None:
    worker = await scene.worker(
        *("hosts:observed", "--processes", "2", "--name", "olga", "--lease", "2", "--queues", "hold"), children=2
    )

    async def is_on_record() -> bool:
        return bool((await scene.app.stats()).workers) and (await record(scene))["capacity"] == 200

    await until(is_on_record)
    first = await record(scene)
    expected = {"name": "olga", "host": socket.gethostname(), "pid": worker.pid, "version": VERSION}
    assert {key: first[key] for key in expected} == expected
    assert (first["queues"], first["executor"]) == (["hold"], "processes")
    assert (first["capacity"], first["used"], first["running"]) == (200, 0, 0)
    for _ in range(3):
        await scene.app.queue("hold").enqueue({"until": "gate"})

    async def is_at_work() -> bool:
        now = await record(scene)
        return (now["used"], now["running"]) == (30, 3)

    await until(is_at_work, 5)
    assert (await record(scene))["beat_at"] > first["beat_at"]
    assert (await scene.app.queue("hold").stats()).workers == ["olga"]
    open_gate(scene)
    await settled(scene.app, "hold", 3)
    assert await worker.stop() == 0

    async def is_gone() -> bool:
        return (await scene.app.stats()).workers == []

    await until(is_gone, 1.5)  # It said goodbye: else it would be listed for two leases.


@pytest.mark.storages("sqlite")
async def test_worker_of_very_many_queues_is_listed(scene: Scene) -> None:
    app = scene.place.app()
    for number in range(1_000):
        app.task(name=f"{'q' * 100}.{number:04}")(_nothing)

    async def is_on_record() -> bool:
        return [found.worker for found in (await scene.app.stats()).workers] == ["wide"]

    async with app, app.worker(name="wide", lease=2):
        await until(is_on_record, 5)
        assert await scene.app.evict("wide")


async def _nothing() -> None: ...
