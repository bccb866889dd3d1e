"""What holds one queue, hook or caller up must not hold up another.

The storages here are real, with a fault put before (or behind) one verb of one queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, cast

import pytest

from holdfast import Holdfast, PayloadRejected, RunEvent, StorageFull, StorageUnavailable
from holdfast._core.events import Event, Topic
from holdfast._worker import worker
from holdfast.storage import Storage, connect
from tests.app.conftest import Place, until

App = Holdfast[Any]
Fault = Callable[[], Awaitable[None]]

VERBS = {"announce", "claim", "enqueue", "extend", "ready", "settle"}


class Faults:
    """What goes wrong with which verb of which queue (of any, if that is None), until `heal`. And what went well."""

    def __init__(self) -> None:
        self.before: dict[tuple[str, str | None], Fault] = {}
        self.after: dict[tuple[str, str | None], Fault] = {}
        """The verb took effect, its reply is held up or lost."""
        self.met: Counter[tuple[str, str]] = Counter()
        self.done: Counter[tuple[str, str]] = Counter()
        self.opened = self.closed = 0
        self.healed = False

    def heal(self) -> None:
        self.before.clear()
        self.after.clear()
        self.healed = True

    async def hangs(self) -> None:
        """For longer than anybody should wait; not for ever, so that a test which fails comes to its end."""
        until = time.monotonic() + 12
        while not self.healed and time.monotonic() < until:  # noqa: ASYNC110 - an Event belongs to one loop, and this may be on any.
            await asyncio.sleep(0.01)

    async def meet(self, faults: dict[tuple[str, str | None], Fault], verb: str, queue: str) -> None:
        fault = faults.get((verb, queue)) or faults.get((verb, None))
        if fault is not None:
            self.met[verb, queue] += 1
            await fault()


def raises(*errors: Exception) -> Fault:
    """Each of these in turn, then it is over."""
    left = list(errors)

    async def fault() -> None:
        if left:
            raise left.pop(0)

    return fault


async def fails() -> None:
    raise StorageUnavailable("its shard is down")


class Faulty:
    """A real storage with faults. Its twin has the same."""

    def __init__(self, inner: Storage, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    async def __aenter__(self) -> Self:
        await self._faults.meet(self._faults.before, "open", "")
        await self._inner.__aenter__()
        self._faults.opened += 1
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._faults.meet(self._faults.before, "close", "")
        await self._inner.__aexit__(None, None, None)
        self._faults.closed += 1

    def clone(self) -> Faulty:
        return Faulty(self._inner.clone(), self._faults)

    @asynccontextmanager
    async def subscribe(self, *topics: Topic) -> AsyncIterator[AsyncIterator[Event]]:
        await self._faults.meet(self._faults.before, "subscribe", topics[0].queue)
        async with self._inner.subscribe(*topics) as events:
            yield events

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)
        if name not in VERBS:
            return verb

        async def faulty(queue: Any, *args: Any, **options: Any) -> Any:
            key = queue if isinstance(queue, str) else ""
            await self._faults.meet(self._faults.before, name, key)
            reply = await verb(queue, *args, **options)
            self._faults.done[name, key] += 1
            await self._faults.meet(self._faults.after, name, key)
            return reply

        return faulty


def faulty_app(place: Place, faults: Faults, **options: Any) -> App:
    inner = connect(place.url, namespace=place.namespace, **options)
    return Holdfast(storage=cast(Storage, Faulty(inner, faults)))


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def shaky(app: App, place: Place, faults: Faults) -> AsyncIterator[App]:
    """An app that is open, whose storage has these faults. What it leaves is audited by the other app."""
    async with faulty_app(place, faults) as shaky:
        yield shaky
        faults.heal()


# Queues


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_failing_extend_of_one_queue_does_not_lose_leases_of_another(
    shaky: App, faults: Faults, how: str
) -> None:
    over = asyncio.Event()

    @shaky.task(name="a")
    async def down() -> None:
        await over.wait()

    @shaky.task(name="b")
    async def up() -> None:
        await over.wait()

    faults.before["extend", "a"] = fails if how == "fails" else faults.hangs
    await down.enqueue()
    await until(lambda: faults.done["enqueue", "a"])
    async with shaky.worker(lease=0.5, grace=0):
        await until(lambda: faults.met["extend", "a"])
        await up.enqueue()
        await until(lambda: faults.done["extend", "b"] >= 4)
        assert faults.done["extend", "a"] == 0
        over.set()


async def test_failing_settle_of_one_queue_does_not_delay_results_of_another(shaky: App, faults: Faults) -> None:
    @shaky.task(name="a")
    async def down() -> int:
        return 1

    @shaky.task(name="b")
    async def up() -> int:
        return 2

    faults.before["settle", "a"] = fails
    async with shaky.worker():
        stored = await down.enqueue()
        await until(lambda: faults.met["settle", "a"])
        assert await up.using(wait=10).call() == 2
        assert faults.done["settle", "a"] == 0
        faults.heal()
        assert await stored.result(wait=20) == 1


async def test_hanging_claim_of_one_queue_does_not_delay_claims_of_another(shaky: App, faults: Faults) -> None:
    @shaky.task(name="a")
    async def down() -> int:
        return 1

    @shaky.task(name="b")
    async def up() -> int:
        return 2

    faults.before["claim", "a"] = faults.hangs
    async with shaky.worker():
        late = await down.enqueue()
        await until(lambda: faults.met["claim", "a"])
        assert [await up.using(wait=10).call() for _ in range(3)] == [2, 2, 2]
        assert faults.done["claim", "a"] == 0
        faults.heal()
        assert await late.result(wait=10) == 1


@pytest.mark.parametrize("then", [StorageFull("disk is full"), StorageUnavailable("gone"), RuntimeError("a bug")])
async def test_refused_outcome_followed_by_another_error_does_not_end_the_worker(
    shaky: App, faults: Faults, then: Exception
) -> None:
    @shaky.task(name="a")
    async def refused() -> int:
        return 1

    @shaky.task(name="b")
    async def fine() -> int:
        return 2

    faults.before["settle", "a"] = raises(PayloadRejected("too large"), then)
    async with shaky.worker(lease=0.5):
        handle = await refused.enqueue()
        await until(lambda: faults.met["settle", "a"] >= 2)
        assert await fine.using(wait=10).call() == 2
        assert await handle.result(wait=10) == 1


async def test_outcome_is_stored_when_a_full_storage_accepts_writes_again(shaky: App, faults: Faults) -> None:
    ran: list[int] = []

    @shaky.task(name="t")
    async def work() -> int:
        ran.append(1)
        return len(ran)

    faults.before["settle", "t"] = raises(StorageFull("disk is full"), StorageFull("disk is full"))
    async with shaky.worker(lease=5):
        assert await work.using(wait=20).call() == 1
    assert faults.met["settle", "t"] >= 3
    assert ran == [1]


# Hints


async def test_worker_that_cannot_subscribe_still_runs_jobs(shaky: App, faults: Faults) -> None:
    @shaky.task(name="t")
    async def work() -> int:
        return 1

    async def fault() -> None:
        raise OSError("too many open files")

    faults.before["subscribe", "t"] = fault
    async with shaky.worker():
        await until(lambda: faults.met["subscribe", "t"] >= 2)
        handle = await work.enqueue()
        await until(lambda: faults.done["settle", "t"])
    faults.heal()
    assert await handle.state() in ("completed", None)


# Hooks


@pytest.mark.storages("memory")
async def test_an_event_hook_that_hangs_does_not_keep_the_worker_from_stopping(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GIVE_UP_S", 0.2)
    told: list[str] = []

    @app.on_event
    async def hang(event: RunEvent) -> None:
        told.append(event.id)
        await asyncio.Event().wait()

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with asyncio.timeout(20), app.worker():
        assert [await work.using(wait=10).call() for _ in range(3)] == [1, 1, 1]
    assert len(told) == 1


@pytest.mark.parametrize("verb", ["claim", "settle"])
async def test_hanging_error_hook_delays_no_queue(shaky: App, faults: Faults, verb: str) -> None:
    over = asyncio.Event()
    told: list[str] = []

    @shaky.on_error
    async def hang(error: BaseException, where: str) -> None:
        told.append(where)
        await over.wait()

    @shaky.task(name="a")
    async def down() -> None: ...

    @shaky.task(name="b")
    async def up() -> int:
        return 2

    faults.before[verb, "a"] = fails
    async with shaky.worker():
        await down.enqueue()
        await until(lambda: told)
        assert [await up.using(wait=10).call() for _ in range(2)] == [2, 2]
        assert len(told) == 1
        assert not over.is_set()
        faults.heal()
        over.set()


# Opening and closing


async def test_two_concurrent_opens_of_an_app_open_its_storage_once(place: Place, app: App, faults: Faults) -> None:
    shaky = faulty_app(place, faults)
    faults.before["open", None] = lambda: asyncio.sleep(0.02)

    async def use() -> None:
        async with shaky:
            await shaky.queue("q").enqueue(1)

    await asyncio.gather(use(), use(), use())
    assert faults.done["enqueue", "q"] == 3
    assert (faults.opened, faults.closed) == (1, 1)


async def test_app_opened_while_another_task_closes_it_is_usable(place: Place, app: App, faults: Faults) -> None:
    shaky = faulty_app(place, faults)
    faults.before["close", None] = lambda: asyncio.sleep(0.05)
    await shaky.__aenter__()
    closing = asyncio.create_task(shaky.__aexit__(None, None, None))
    await until(lambda: faults.met["close", ""])
    async with shaky:
        await closing
        await shaky.queue("q").enqueue(1)
    assert (faults.opened, faults.closed) == (2, 2)


async def test_two_workers_of_one_app_can_start_together(place: Place, app: App, faults: Faults) -> None:
    shaky = faulty_app(place, faults)
    ran: list[str] = []

    @shaky.task(name="a")
    async def one() -> None:
        ran.append("a")

    @shaky.task(name="b")
    async def other() -> None:
        ran.append("b")

    for queue in "ab":
        await app.queue(queue).enqueue({})
    before = _own_threads()
    faults.before["open", None] = lambda: asyncio.sleep(0.02)
    await asyncio.gather(*(shaky.worker(queue, burst=True).run() for queue in "ab"))
    assert sorted(ran) == ["a", "b"]
    assert faults.opened == faults.closed
    assert _own_threads() == before


def _own_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast"))


# Blocking calls


@pytest.mark.parametrize("was_open", [True, False])
async def test_app_that_cannot_be_opened_does_not_delay_blocking_calls_of_another(
    place: Place, app: App, faults: Faults, was_open: bool
) -> None:
    down = faulty_app(place, faults)
    up = place.app()
    faults.before["open", None] = faults.hangs
    if was_open:
        await asyncio.to_thread(up.queue("up").sync.enqueue, 0)
    waiting = asyncio.create_task(asyncio.to_thread(down.queue("down").sync.enqueue, 1))
    try:
        await until(lambda: faults.met["open", ""])
        calling = asyncio.create_task(asyncio.to_thread(up.queue("up").sync.enqueue, 1))
        await asyncio.wait([calling], timeout=5)
        assert calling.done()
        assert not waiting.done()
    finally:
        faults.heal()
        await waiting
        await asyncio.to_thread(up.sync.close)
        await asyncio.to_thread(down.sync.close)
