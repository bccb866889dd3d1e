"""A worker with child processes does what any worker does."""

from __future__ import annotations

import asyncio

import pytest

from holdfast import JobFailed
from tests.worker.conftest import Scene


async def test_jobs_run_in_child_processes_and_their_results_come_back(scene: Scene) -> None:
    worker = await scene.worker("simple:app", "--processes", "2", children=2)
    results = await asyncio.gather(*(scene.ask("add", {"a": n, "b": 1}) for n in range(50)))
    assert results == [n + 1 for n in range(50)]
    handles = [await scene.app.queue(queue).enqueue({"seconds": 0.1}) for queue in ("nap", "doze") for _ in range(10)]
    for handle in handles:
        assert await handle.result(wait=10) == "rested"
    used = {note["pid"] for note in scene.notes("nap")}
    assert used == set(worker.children())
    assert len(used) == 2


async def test_error_of_a_handler_reaches_its_caller_and_its_fail_handler(scene: Scene) -> None:
    await scene.worker("simple:app", "--processes", "1")
    with pytest.raises(JobFailed, match="ValueError: no luck") as raised:
        await scene.ask("raise", {"message": "no luck"})
    assert "simple.py" in raised.value.error.traceback
    (reported,) = await scene.noted("reported")
    assert (reported["message"], reported["by"]) == ("no luck", "raise/failed")


async def test_run_in_a_child_extends_its_own_timeout(scene: Scene) -> None:
    await scene.worker("simple:app", "--processes", "1")
    asked = [scene.ask(queue, {"seconds": 1}) for queue in ("stretch", "stretch-thread")]
    assert await asyncio.gather(*asked) == ["stretched", "stretched"]
