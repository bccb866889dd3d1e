"""One cheap look at many queues: which have something for a worker?"""

from __future__ import annotations

import pytest

from holdfast._core.jobs import Complete, Request, Work
from holdfast.errors import OptionError
from holdfast.storage.conformance.verbs import Stage

WORKER = "w"


async def ready(stage: Stage, *queues: str) -> list[str]:
    return await stage.storage.ready(queues)


async def test_only_queues_with_a_due_job_are_ready(stage: Stage) -> None:
    await stage.storage.enqueue("now", [Request("a", Work(b"1"))])
    await stage.storage.enqueue("later", [Request("a", Work(b"1"), delay_ms=5_000)])
    assert await ready(stage, "none", "now", "later") == ["now"]
    stage.clock.advance(5)
    assert await ready(stage, "later", "none", "now") == ["later", "now"]


async def test_a_job_of_any_priority_counts(stage: Stage) -> None:
    for priority in (0, 9):
        queue = f"p{priority}"
        await stage.storage.enqueue(queue, [Request("a", Work(b"1", priority=priority))])
        assert await ready(stage, queue) == [queue]


async def test_a_leased_job_is_not_ready_until_its_lease_has_expired(stage: Stage) -> None:
    await stage.storage.enqueue("q", [Request("a", Work(b"1"))])
    await stage.storage.claim("q", 1, worker=WORKER, lease_ms=1_000)
    assert await ready(stage, "q") == []
    stage.clock.advance(1)
    assert await ready(stage, "q") == ["q"]


async def test_paused_queue_is_ready_only_for_expired_leases(stage: Stage) -> None:
    await stage.storage.enqueue("q", [Request("a", Work(b"1")), Request("b", Work(b"1"))])
    await stage.storage.claim("q", 1, worker=WORKER, lease_ms=1_000)
    await stage.storage.pause("q", True)
    assert await ready(stage, "q") == []
    stage.clock.advance(1)
    assert await ready(stage, "q") == ["q"]
    await stage.storage.pause("q", False)


async def test_ready_changes_nothing_and_omits_a_finished_queue(stage: Stage) -> None:
    await stage.storage.enqueue("q", [Request("a", Work(b"1"), custom_id=True)])
    (job,) = (await stage.storage.claim("q", 1, worker=WORKER, lease_ms=1_000)).jobs
    assert job.fence is not None
    await stage.storage.settle("q", [Complete("a", job.fence, result_ttl_ms=60_000)], worker=WORKER)
    before = await stage.storage.get("q", ["a"])
    stage.clock.advance(10)
    assert await ready(stage, "q") == []
    assert await stage.storage.get("q", ["a"]) == before


async def test_wrong_queues_are_refused(stage: Stage) -> None:
    assert await ready(stage) == []
    for wrong in ("q", ["a b"], [1], [f"q{number}" for number in range(251)]):
        with pytest.raises(OptionError):
            await stage.storage.ready(wrong)  # type: ignore[arg-type]
