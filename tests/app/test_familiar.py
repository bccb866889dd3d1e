"""Names of other job queues raise an error that gives the name in Holdfast."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from holdfast import Handle, Holdfast, Queue, Task
from holdfast._client import familiar

pytestmark = pytest.mark.storages("memory")


@pytest.fixture
async def objects(app: Holdfast[Any]) -> dict[str, Any]:
    @app.task(name="t")
    async def task() -> None: ...

    queue = app.queue("q")
    handle = await queue.enqueue(1)
    blocking = {"sync task": task.sync, "sync queue": queue.sync, "sync app": app.sync}
    return {"task": task, "using": task.using(), "app": app, "queue": queue, "handle": handle, **blocking}


@pytest.mark.parametrize(
    ("what", "name", "ours"),
    [
        ("task", "delay", r"a task has no attribute 'delay': use enqueue\(…\)"),
        ("task", "send", r"use enqueue\(…\)"),
        ("using", "submit", r"use enqueue\(…\)"),
        ("task", "apply_async", r"using\(delay=…, …\)\.enqueue"),
        ("app", "periodic_task", r"an app has no attribute 'periodic_task': there are no schedules: .*periodic\.py"),
        ("app", "send_task", r"task\.enqueue\(…\) or app\.queue\(name\)\.enqueue"),
        ("queue", "put", r"use enqueue\(payload\)"),
        ("handle", "get", r"use result\(wait=…\)"),
        ("sync task", "delay", r"use enqueue\(…\)"),
        ("sync queue", "pop", r"use lease\(wait=…\)"),
        ("sync app", "cron", r"there are no schedules"),
    ],
)
async def test_name_of_another_queue_is_answered_with_ours(
    objects: dict[str, Any], what: str, name: str, ours: str
) -> None:
    assert not hasattr(objects[what], name)
    with pytest.raises(AttributeError, match=ours):
        getattr(objects[what], name)


async def test_other_missing_name_raises_a_plain_attribute_error(objects: dict[str, Any]) -> None:
    for each in objects.values():
        with pytest.raises(AttributeError, match=r"has no attribute 'zebra'$") as raised:
            _ = each.zebra
        assert (raised.value.name, raised.value.obj) == ("zebra", each)


def test_no_answered_name_is_a_name_of_ours() -> None:
    for kind, words in (
        *((Task, familiar.OF_A_TASK), (Holdfast, familiar.OF_AN_APP)),
        *((Queue, familiar.OF_A_QUEUE), (Handle, familiar.OF_A_HANDLE)),
    ):
        assert words.keys() & {name for name, _ in inspect.getmembers(kind)} == set()
