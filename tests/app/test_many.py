"""Many ids in one call: get, cancel, retry, keep, set the priority; and the refusals of `enqueue_many`."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from holdfast import CancelResult, DuplicateJob, Holdfast, KeepResult, OptionError, State

pytestmark = pytest.mark.storages("memory", "sqlite", "valkey")

App = Holdfast[Any]
MANY = 251
"""One id more than a storage takes in one step."""


async def test_many_jobs_are_read_and_cancelled_in_the_order_of_the_ids(app: App) -> None:
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(n, id=f"j{n}") for n in range(MANY))
    ids = [f"j{n}" for n in reversed(range(MANY))]
    found = await queue.get_many([*ids, "missing"])
    assert [job and job.payload for job in found] == [*reversed(range(MANY)), None]
    cancelled = await queue.cancel_many([*ids, "missing"])
    assert cancelled == [CancelResult.CANCELLED] * MANY + [CancelResult.MISSING]
    assert await queue.get_many([]) == []


async def test_many_jobs_are_retried_and_kept(app: App) -> None:
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(n, id=f"j{n}") for n in range(MANY))
    ids = [f"j{n}" for n in range(MANY)]
    await queue.cancel_many(ids)
    assert await queue.keep_many(["j0", "missing"], 3600) == [KeepResult.KEPT, KeepResult.MISSING]
    handles = await queue.retry_many(["missing", *ids])
    assert [handle and handle.id for handle in handles] == [None, *ids]
    again = await queue.get_many(ids)
    assert [job and (job.state, job.payload) for job in again] == [(State.WAITING, n) for n in range(MANY)]


async def test_priorities_of_many_jobs_and_of_a_handle_decide_who_is_next(app: App) -> None:
    queue = app.queue("q")
    handles = await app.enqueue_many(queue.bind(n, id=f"j{n}") for n in range(MANY))
    assert await queue.set_priority_many(["missing", *(handle.id for handle in handles)], 3) == [False, *[True] * MANY]
    assert await queue.set_priority("j7", 4)
    assert await handles[-1].set_priority(9)
    taken = [await queue.lease(wait=0) for _ in range(3)]
    assert [lease and lease.id for lease in taken] == [f"j{MANY - 1}", "j7", "j0"]
    assert taken[0] is not None
    await taken[0].complete()
    assert not await handles[-1].set_priority(9)
    for wrong in (10, -1, True, "5"):
        with pytest.raises(OptionError, match="priority must be a whole number from 0 to 9"):
            await queue.set_priority("j1", wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_refused_ids_are_named_and_the_other_handles_returned(app: App) -> None:
    queue = app.queue("q")
    await queue.enqueue(0, id="b")
    await queue.enqueue(0, id="d")
    with pytest.raises(DuplicateJob, match=r"job 'b' in q already exists \(waiting\); 1 more were refused") as raised:
        await app.enqueue_many(queue.bind(1, id=id, on_conflict="raise") for id in "abcd")
    assert raised.value.ids == ["b", "d"]
    assert [handle.id for handle in raised.value.handles] == ["a", "c"]
    assert [job and job.payload for job in await queue.get_many(["a", "b", "c", "d"])] == [1, 0, 1, 0]
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.ids, str(again)) == (["b", "d"], str(raised.value))


@pytest.mark.storages("memory")
async def test_one_id_instead_of_a_list_is_refused(app: App) -> None:
    with pytest.raises(OptionError, match=r"ids must be a list of ids, not 'abc': pass \[id\]"):
        await app.queue("q").cancel_many("abc")


async def test_one_refused_request_is_named_too(app: App) -> None:
    queue = app.queue("q")
    await queue.enqueue(0, id="b")
    with pytest.raises(DuplicateJob) as raised:
        await queue.enqueue(1, id="b", on_conflict="raise")
    assert (raised.value.ids, raised.value.handles) == (["b"], [])


@pytest.mark.storages("sqlite")
async def test_blocking_forms_return_blocking_handles(app: App) -> None:
    queue = app.queue("q")

    def block() -> None:
        blocking = queue.sync
        blocking.enqueue(0, id="b")
        with pytest.raises(DuplicateJob) as raised:
            app.sync.enqueue_many([queue.bind(1, id=id, on_conflict="raise") for id in "ab"])
        (handle,) = raised.value.handles
        assert (handle.id, handle.state()) == ("a", State.WAITING)
        assert blocking.cancel_many(["a"]) == [CancelResult.CANCELLED]
        (again,) = blocking.retry_many(["a"])
        assert again is not None
        assert again.state() == State.WAITING
        assert [job and job.id for job in blocking.get_many(["a", "x"])] == ["a", None]

    await asyncio.to_thread(block)
