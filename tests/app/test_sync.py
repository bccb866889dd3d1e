"""Blocking calls: the same verbs with the same signatures, from scripts, threads, forked children and sync handlers."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    EventKind,
    Handle,
    Holdfast,
    JobFailed,
    JobInfo,
    KeepResult,
    Lease,
    NotOpen,
    OptionError,
    PermanentError,
    Placed,
    Queue,
    State,
    WaitTimeout,
)
from holdfast._client.request import Using
from holdfast._client.sync import SyncApp, SyncHandle, SyncLease, SyncQueue, SyncUsing
from tests.app.conftest import Place

AppMaker = Callable[..., Holdfast[Any]]

PAIRS = [(Handle, SyncHandle), (Using, SyncUsing), (Lease, SyncLease), (Queue, SyncQueue)]
NOT_MIRRORED = {"sync", "policy", "encode", "payload_of", "PURGED", "app"}
"""Of no use to who blocks, or no verbs."""


def verbs(kind: type) -> dict[str, Any]:
    return {
        name: getattr(kind, name)
        for name in dir(kind)
        if not name.startswith("_") and name not in NOT_MIRRORED and not inspect.isdatadescriptor(getattr(kind, name))
    }


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# The same verbs


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_every_verb_has_a_blocking_form_with_equal_signature_and_docstring(pair: tuple[type, type]) -> None:
    source, facade = map(verbs, pair)
    assert source.keys() == facade.keys()
    assert len(source) >= 4
    for name, verb in source.items():
        assert parameters(verb) == parameters(facade[name]), name
        assert verb.__doc__ == facade[name].__doc__, name
        assert not inspect.iscoroutinefunction(facade[name]), name


def test_verbs_of_the_app_have_blocking_forms() -> None:
    made_of = {"enqueue_many", "queue", "stats", "evict"}
    assert made_of <= verbs(SyncApp).keys()
    for name in verbs(SyncApp).keys() - {"close"}:
        assert parameters(getattr(SyncApp, name)) == parameters(getattr(Holdfast, name)), name
        assert getattr(SyncApp, name).__doc__, name


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
async def test_blocking_objects_have_the_properties_of_the_async_ones(pair: tuple[type, type], tmp_path: Path) -> None:
    async with Holdfast(f"sqlite:///{tmp_path}/jobs.db") as app:

        @app.task(name="t")
        async def task() -> None: ...

        handle = await app.queue("q").enqueue(1)
        lease = await app.queue("q").lease(wait=0)
        assert lease is not None
        session = app._session
        twins: dict[type, tuple[Any, Any]] = {
            Handle: (handle, SyncHandle(session, handle)),
            Lease: (lease, SyncLease(session, lease)),
            Queue: (app.queue("q"), app.queue("q").sync),
            Using: (task.using(wait=1), task.using(wait=1).sync),
        }
        source, facade = twins[pair[0]]
        fields = {
            name
            for name in dir(source)
            if not name.startswith("_") and name not in NOT_MIRRORED and not callable(getattr(source, name))
        }
        for name in fields:
            assert getattr(facade, name) == getattr(source, name), name


# Threads of a program


@pytest.fixture
def serving(place: Place) -> Iterator[Holdfast[Any]]:
    """An app whose worker is on a loop in another thread. The app itself is used by blocking calls only."""
    app = place.app()
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    @app.task(name="add")
    async def add(a: int, b: int = 1) -> int:
        return a + b

    @app.task(name="never")
    async def never() -> None:
        raise PermanentError("on purpose")

    @app.task(name="indirect")
    def indirect(n: int) -> int:
        return add.sync.call(n, n)

    async def serve() -> None:
        ended = asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        loop = asyncio.get_running_loop()
        async with app.worker(lease=0.5):
            ready.set()
            await ended.wait()

    app.add = add  # type: ignore[attr-defined]
    app.never = never  # type: ignore[attr-defined]
    app.indirect = indirect  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield app
    finally:
        stop[0]()
        thread.join(30)
        app.sync.close()
        assert not thread.is_alive()


def test_calls_and_handles_block_until_there_is_a_result(serving: Any) -> None:
    assert serving.add.sync.call(1, b=2) == 3
    handle = serving.add.sync.using(id="x", priority=9).enqueue(4)
    assert isinstance(handle, SyncHandle)
    assert (handle.queue, handle.id, handle.placed) == ("add", "x", Placed.NEW)
    assert handle.result(wait=20) == 5
    assert handle.state() is State.COMPLETED
    assert handle.cancel() is CancelResult.FINISHED
    assert serving.add.using(id="x", wait=0).sync.call(9) == 5
    handles = serving.sync.enqueue_many(serving.add.sync.bind(n) for n in range(5))
    assert [handle.result() for handle in handles] == [1, 2, 3, 4, 5]
    assert "add" in [queue.queue for queue in serving.sync.stats().queues]
    assert not serving.sync.evict("nobody")


def test_errors_are_those_of_the_async_verbs(serving: Any) -> None:
    with pytest.raises(JobFailed, match="on purpose") as raised:
        serving.never.sync.call()
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
    with pytest.raises(WaitTimeout):
        serving.add.sync.using(delay=60, wait=0.05).call(1)
    with pytest.raises(OptionError, match="priority"):
        serving.add.sync.using(priority=11).enqueue(1)
    with pytest.raises(TypeError, match="add: missing"):
        serving.add.sync.enqueue()


def test_blocking_calls_work_from_many_threads_at_once(serving: Any) -> None:
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(serving.add.sync.call, range(60))) == list(range(1, 61))


def test_a_sync_handler_may_block_on_another_task(serving: Any) -> None:
    assert serving.indirect.sync.call(21) == 42
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(serving.indirect.sync.call, range(12))) == [2 * n for n in range(12)]


def test_blocking_call_reopens_a_closed_app(serving: Any) -> None:
    assert serving.add.sync.call(1) == 2
    serving.sync.close()
    serving.sync.close()
    assert serving.add.sync.call(2) == 3


def test_blocking_calls_work_before_and_while_the_app_is_open(serving: Any) -> None:
    async def both() -> tuple[int, int]:
        async with serving_again:
            blocking = asyncio.to_thread(serving.add.sync.call, 1)
            return await blocking, await serving_again.queue("add").result("x", type=int)

    serving.add.sync.using(id="x").enqueue(5)
    serving_again = Holdfast(**_place_of(serving))
    assert asyncio.run(both()) == (2, 6)


def _place_of(app: Holdfast[Any]) -> dict[str, Any]:
    return {"url": app._session.url, "namespace": app._session.namespace}


# Queues


@pytest.fixture
def queue(place: Place) -> Iterator[SyncQueue]:
    app = place.app()
    yield app.sync.queue("q")
    problems = app.sync.queue("q").repair(dry_run=True).problems
    app.sync.close()
    assert problems == []


def test_every_verb_of_a_queue_blocks(queue: SyncQueue) -> None:
    handle = queue.enqueue({"n": 1}, id="a", priority=9)
    assert handle.placed is Placed.NEW
    info = queue.get("a")
    assert info is not None
    assert (info.payload, info.priority) == ({"n": 1}, 9)
    assert queue.keep("a", 60) is KeepResult.LIVE
    lease = queue.lease(seconds=10, wait=0)
    assert isinstance(lease, SyncLease)
    assert (lease.queue, lease.id, lease.payload, lease.attempt) == ("q", "a", {"n": 1}, 1)
    before = lease.deadline
    assert lease.extend(100, progress=3)
    assert lease.deadline > before
    assert queue.cancel("a") is CancelResult.ASKED
    assert lease.extend()
    assert lease.cancel_asked
    assert lease.complete({"done": True})
    assert lease.settled
    assert not lease.complete()
    assert queue.result("a", type=dict[str, bool]) == {"done": True}
    assert queue.lease(wait=0) is None
    queue.pause(reason="tea")
    assert (queue.stats().paused, queue.stats().reason) == (True, "tea")
    queue.resume()
    queue.enqueue(1, id="b")
    failing = queue.lease()
    assert failing is not None
    assert failing.fail("no")
    assert queue.retry("b").placed is Placed.NEW
    again = queue.lease()
    assert again is not None
    assert again.retry(delay=60, error="later")
    assert queue.sweep().stalled == []
    assert queue.purge(["waiting"]) == 1
    assert queue.delete(wait=5)
    assert [info.id for info in queue.jobs()] == []


def test_a_blocking_lease_waits_for_a_job(queue: SyncQueue) -> None:
    began = time.monotonic()
    assert queue.lease(wait=0.2) is None
    assert 0.19 <= time.monotonic() - began < 5
    timer = threading.Timer(0.2, lambda: queue.enqueue("late", id="a"))
    timer.start()
    lease = queue.lease(wait=20)
    timer.join()
    assert lease is not None
    assert lease.payload == "late"
    assert lease.release()


def test_a_blocking_block_completes_retries_and_extends(queue: SyncQueue) -> None:
    queue.enqueue(1, id="a")
    with queue.leased(seconds=0.5) as lease:
        assert lease is not None
        assert queue.lease(wait=1.1) is None
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.stalls) == (State.COMPLETED, 0)
    queue.enqueue(1, id="b")
    with pytest.raises(ZeroDivisionError):
        with queue.leased():
            _ = 1 / 0
    failed = queue.get("b")
    assert failed is not None
    assert failed.error is not None
    assert (failed.state, failed.retries, failed.error.type) == (State.WAITING, 1, "ZeroDivisionError")
    with queue.leased() as lease:
        assert lease is not None
        assert lease.complete("by hand")
    assert queue.result("b") == "by hand"
    with queue.leased(wait=0) as lease:
        assert lease is None


def test_an_interrupt_in_a_block_gives_the_job_back_and_later_calls_work(queue: SyncQueue) -> None:
    queue.enqueue(1, id="a")
    with pytest.raises(KeyboardInterrupt):
        with queue.leased():
            raise KeyboardInterrupt
    info = queue.get("a")
    assert info is not None
    assert info.state is State.WAITING
    assert queue.lease(wait=5) is not None


def test_job_iteration_crosses_pages_and_may_stop_early(queue: SyncQueue, place: Place) -> None:
    app = place.app()
    app.sync.enqueue_many(app.queue("q").bind(n, id=f"{n:03d}") for n in range(120))
    app.sync.close()
    assert [info.id for info in queue.jobs("waiting")] == [f"{n:03d}" for n in range(120)]
    first = next(iter(queue.jobs("waiting")))
    assert isinstance(first, JobInfo)
    for info in queue.jobs():
        assert info.state is State.WAITING
        break


def test_events_are_iterated_as_they_arrive(queue: SyncQueue) -> None:
    heard: list[EventKind] = []
    listening = threading.Event()

    def listen() -> None:
        events = queue.events()
        listening.set()
        for event in events:
            heard.append(event.kind)
            if event.kind is EventKind.COMPLETED:
                return

    thread = threading.Thread(target=listen)
    thread.start()
    listening.wait()
    time.sleep(0.3)
    queue.enqueue(1, id="a")
    with queue.leased():
        pass
    thread.join(20)
    assert heard == [EventKind.ENQUEUED, EventKind.CLAIMED, EventKind.COMPLETED]


# In a loop


async def test_a_blocking_call_in_a_running_loop_is_refused(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task() -> int:
        return 1

    for blocking in (
        lambda: task.sync.call(),
        lambda: task.sync.enqueue(),
        lambda: app.sync.stats(),
        lambda: app.queue("q").sync.get("a"),
        lambda: next(iter(app.queue("q").sync.jobs())),
        lambda: app.queue("q").sync.leased().__enter__(),
    ):
        with pytest.raises(NotOpen, match="would stop the loop: await the async version"):
            blocking()
    async with app.worker():
        assert await asyncio.to_thread(task.sync.call) == 1
    await asyncio.to_thread(app.sync.close)


# Whole programs


SCRIPT = """
import os, sys, threading
from holdfast import Holdfast

app = Holdfast(sys.argv[1], namespace=sys.argv[2])
queue = app.sync.queue("q")
"""


def run_script(place: Place, body: str, *, flags: tuple[str, ...] = (), timeout: float = 60) -> str:
    """What a program prints. It must end by itself, well, and without a word of complaint."""
    command = [sys.executable, *flags, "-c", SCRIPT + textwrap.dedent(body), place.url, place.namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("flags", [(), ("-X", "dev", "-W", "error")], ids=["plain", "strict"])
def test_a_plain_script_works_and_ends_cleanly(place: Place, flags: tuple[str, ...]) -> None:
    told = run_script(
        place,
        """
        queue.enqueue({"n": 1}, id="a")
        with queue.leased(wait=5) as lease:
            print(lease.payload)
            lease.complete("done")
        print(queue.result("a"), queue.stats().completed)
        for event in queue.jobs():
            print(event.id)
            break
        """,
        flags=flags,
    )
    assert told == "{'n': 1}\ndone 1\na\n"


def test_a_script_that_leaves_things_open_ends_cleanly(place: Place) -> None:
    told = run_script(
        place,
        """
        queue.enqueue(1, id="a", delay=60)
        threading.Thread(target=lambda: queue.lease(wait=None), daemon=True).start()
        threading.Thread(target=lambda: next(queue.events()), daemon=True).start()
        kept = queue.jobs()
        print(next(kept).id, flush=True)
        """,
        flags=("-X", "dev"),
    )
    assert told == "a\n"


def test_blocking_call_works_in_an_exit_handler_that_was_registered_first(place: Place) -> None:
    first = 'import atexit\natexit.register(lambda: print(queue.enqueue(2, id="b").id))\n'
    command = [sys.executable, "-c", first + SCRIPT + 'queue.enqueue(1, id="a")', place.url, place.namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b\n", "")


def test_a_script_that_exits_in_a_block_ends_with_its_own_code(place: Place) -> None:
    body = SCRIPT + 'queue.enqueue(1, id="a")\nwith queue.leased():\n    sys.exit(7)\n'
    command = [sys.executable, "-c", body, place.url, place.namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.storages("sqlite", "valkey")
def test_forked_child_has_a_separate_connection(place: Place) -> None:
    told = run_script(
        place,
        """
        queue.enqueue("parent", id="a", delay=600)
        children = []
        for n in range(3):
            pid = os.fork()
            if pid == 0:
                assert queue.get("a").payload == "parent"
                queue.enqueue(f"child {n}", id=f"{n}")
                with queue.leased(wait=5) as lease:
                    assert lease is not None
                os._exit(0)
            children.append(pid)
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
        queue.enqueue("after", id="z")
        print(queue.stats().completed, sorted(info.id for info in queue.jobs()))
        """,
        flags=("-W", "ignore::DeprecationWarning"),
    )
    assert told == "[0, 0, 0]\n3 ['0', '1', '2', 'a', 'z']\n"


@pytest.mark.storages("sqlite", "valkey")
def test_forked_child_may_exit_normally(place: Place) -> None:
    told = run_script(
        place,
        """
        queue.enqueue("parent", id="a")
        pid = os.fork()
        if pid == 0:
            queue.enqueue("child", id="b")
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), queue.get("b").payload)
        """,
        flags=("-W", "ignore::DeprecationWarning"),
    )
    assert told == "0 child\n"


def test_interrupt_ends_a_wait_and_later_calls_work(place: Place) -> None:
    told = run_script(
        place,
        """
        import signal, time
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            queue.lease(wait=60)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - began < 30)
        queue.enqueue("after", id="a")
        print(queue.lease(wait=5).payload)
        """,
    )
    assert told == "interrupted True\nafter\n"
