"""What runs at the same time: sizes, limits, priorities, and fairness over many queues."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.worker.conftest import Scene, settled, until


def open_gate(scene: Scene, name: str = "gate") -> None:
    scene.notes_file.with_name(f"gate-{name}").touch()


async def put(scene: Scene, queue: str, count: int, **payload: Any) -> None:
    """Enqueue `count` equal jobs."""
    target = scene.app.queue(queue)
    await scene.app.enqueue_many([target.bind(payload) for _ in range(count)])


def most(notes: Iterable[dict[str, Any]], what: str, each: str | None = None) -> int:
    """The most of `what` ("size", or "runs") that went on at one time, in one process if `each` is "pid"."""
    now: Counter[Any] = Counter()
    highest = 0
    turns = [note for note in notes if note["what"] in ("began", "ended")]
    for note in sorted(turns, key=lambda note: note["at"]):
        amount = note["size"] if what == "size" else 1
        now[each and note[each]] += amount if note["what"] == "began" else -amount
        highest = max(highest, *now.values())
    return highest


async def running(scene: Scene, queue: str) -> int:
    return (await scene.app.queue(queue).stats()).running


async def test_a_child_runs_ten_jobs_of_the_usual_size_and_the_worker_claims_no_more(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1", "--queues", "ten")
    await put(scene, "ten", 25, until="gate")
    await scene.noted("began", 10)
    await asyncio.sleep(0.3)  # Nothing tells that no more will come.
    assert (len(scene.notes("began")), await running(scene, "ten")) == (10, 10)
    second = await scene.worker("hosts:app", "--processes", "1", "--queues", "ten")
    await scene.noted("began", 20)  # What the first has no room for is there for others.
    assert {note["pid"] for note in scene.notes("began")[10:]} == set(second.children())
    open_gate(scene)
    await settled(scene.app, "ten", 25)
    assert most(scene.notes(), "size", "pid") == 100


@pytest.mark.storages("sqlite")
async def test_a_job_goes_only_where_its_size_is_free(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "2", children=2)
    await put(scene, "sixty", 3, until="gate")
    await scene.noted("began", 2)
    await put(scene, "ten", 20, until="gate")
    await scene.noted("began", 10)
    await asyncio.sleep(0.3)  # Nothing tells that no more will come.
    by_child = Counter[int]()
    for note in scene.notes("began"):
        by_child[note["pid"]] += note["size"]
    assert list(by_child.values()) == [100, 100]
    assert (await running(scene, "sixty"), await running(scene, "ten")) == (2, 8)
    open_gate(scene)
    await settled(scene.app, "sixty", 3)
    await settled(scene.app, "ten", 20)
    assert most(scene.notes(), "size", "pid") == 100


@pytest.mark.storages("sqlite")
async def test_claimed_jobs_are_started_though_sizes_differ(scene: Scene) -> None:
    """Nothing waits under a lease for a room that others have taken."""
    for queue in ("sixty", "thirty"):
        await put(scene, queue, 10, until="gate")
    await scene.worker("hosts:app", "--processes", "2", "--queues", "sixty", "--queues", "thirty", children=2)
    await scene.noted("began", 4)
    await asyncio.sleep(0.5)  # Time for everything that can begin.
    leased = await running(scene, "sixty") + await running(scene, "thirty")
    assert leased == len(scene.notes("began"))
    open_gate(scene)
    await settled(scene.app, "sixty", 10)
    await settled(scene.app, "thirty", 10)


@pytest.mark.storages("sqlite")
async def test_job_larger_than_a_child_runs_alone_and_is_not_starved(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1", "--queues", "ten", "--queues", "huge", "--queues", "sixty")
    ten = scene.app.queue("ten")  # No two end together, so that never enough is free by chance.
    await scene.app.enqueue_many([ten.bind({"seconds": 0.02 + 0.007 * (n % 10)}) for n in range(300)])
    await scene.noted("began", 20)
    await put(scene, "huge", 1)
    await put(scene, "sixty", 1)
    await settled(scene.app, "ten", 300)
    assert most(scene.notes(), "size", "pid") == 100
    order = [note["queue"] for note in scene.notes("began")]
    assert max(order.index("huge"), order.index("sixty")) < 200


@pytest.mark.storages("sqlite")
async def test_a_tasks_concurrency_holds_over_all_children(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "2", "--queues", "pair", children=2)
    await put(scene, "pair", 12, seconds=0.05)
    await settled(scene.app, "pair", 12)
    assert most(scene.notes(), "runs") == 2
    assert len({note["pid"] for note in scene.notes("began")}) == 2


@pytest.mark.storages("sqlite")
async def test_a_workers_concurrency_holds_over_all_queues(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "2", "--concurrency", "3", children=2)
    for queue in ("ten", "high", "low"):
        await put(scene, queue, 6, seconds=0.05)
    for queue in ("ten", "high", "low"):
        await settled(scene.app, queue, 6)
    assert most(scene.notes(), "runs") == 3
    await worker.stop()


async def test_higher_queues_go_first_and_one_of_sixteen_claims_goes_to_the_lowest(scene: Scene) -> None:
    await put(scene, "low", 10)
    await put(scene, "high", 60)
    await scene.worker("hosts:app", "--processes", "1", "--concurrency", "1", "--queues", "low", "--queues", "high")
    order = [note["queue"] for note in await scene.noted("began", 48)]
    for start in range(32):
        assert 1 <= order[start : start + 17].count("low") <= 2
    await settled(scene.app, "low", 10)
    await settled(scene.app, "high", 60)


@pytest.mark.storages("sqlite")
async def test_runs_spread_evenly_over_the_children(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "2", children=2)
    for count in (2, 5, 10):
        await put(scene, "ten", count - len(scene.notes("began")), until="gate")
        by_child = Counter(note["pid"] for note in await scene.noted("began", count))
        assert sorted(by_child.values()) == [count // 2, count - count // 2]
        assert set(by_child) == set(worker.children())
    open_gate(scene)
    await settled(scene.app, "ten", 10)


async def test_two_hundred_queues_are_served_by_one_worker(scene: Scene) -> None:
    await scene.worker("hosts:many", "--processes", "2", children=2)
    queues = [scene.app.queue(f"many.{number:03}") for number in range(200)]
    for _ in range(2):  # At first nothing is known of any queue; then all have been silent.
        began = time.monotonic()
        handles = await scene.app.enqueue_many([queue.bind({}) for queue in queues])
        assert await asyncio.gather(*(handle.result(wait=20) for handle in handles)) == list(range(200))
        assert time.monotonic() - began < 6


async def test_a_paused_queue_is_left_alone_until_it_is_resumed(scene: Scene) -> None:
    await scene.worker("hosts:app", "--processes", "1")
    await put(scene, "ten", 1)
    await settled(scene.app, "ten", 1)
    await scene.app.queue("ten").pause(reason="lunch")
    await put(scene, "ten", 5)
    for _ in range(10):
        await scene.ask("high")  # Others go on.
    await asyncio.sleep(1.2)  # Once a second a worker looks anyway.
    assert [note["queue"] for note in scene.notes("began")].count("ten") == 1
    await scene.app.queue("ten").resume()
    await settled(scene.app, "ten", 6, seconds=3)


async def test_evicted_worker_ends_like_a_stopped_one(scene: Scene) -> None:
    worker = await scene.worker("hosts:app", "--processes", "1", "--name", "unwanted", "--lease", "0.5")
    await put(scene, "ten", 1, until="gate")
    await put(scene, "sixty", 1, until="never", seconds=0)
    await scene.noted("began", 2)
    assert await scene.app.evict("unwanted")
    assert not await scene.app.evict("unknown")
    await until(lambda: "was evicted" in worker.text())
    await scene.app.queue("sixty").cancel((await anext(scene.app.queue("sixty").jobs("running"))).id)
    await put(scene, "ten", 1, until="gate")
    open_gate(scene)
    assert await worker.exited() == 0
    stats = await scene.app.queue("ten").stats()
    assert (stats.totals["completed"], stats.ready) == (1, 1)  # The run ended, and nothing new was begun.
    assert stats.totals.get("released", 0) == 0


@pytest.mark.parametrize("queue", ["pipeline", "thread-pipeline"])
async def test_runs_of_children_that_wait_lend_their_capacity(scene: Scene, queue: str) -> None:
    await scene.worker("simple:app", "--processes", "1")
    target = scene.app.queue(queue)
    handles = [await target.enqueue({"depth": depth}) for depth in (3, 2)]
    assert [await handle.result(wait=20) for handle in handles] == [3, 2]

    async def nothing_is_used() -> bool:
        return [worker.facts["used"] for worker in (await scene.app.stats()).workers] == [0]

    await until(nothing_is_used)
