"""Eager rehearsals: jobs run before their enqueue returns, on the thread and in the context of the caller."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    CurrentJob,
    EventKind,
    Failure,
    Holdfast,
    HoldfastError,
    JobFailed,
    NotOpen,
    PermanentError,
    Placed,
    Retry,
    RunEvent,
    State,
    WaitTimeout,
    current_job,
)
from holdfast.testing import eager, rehearse


@pytest.fixture
def app(tmp_path: Path) -> Holdfast[Any]:
    """Not open, on a file that must never be made."""
    return Holdfast(f"sqlite:///{tmp_path}/real.db")


# In place


def test_a_job_runs_on_the_thread_of_the_caller_before_enqueue_returns(app: Holdfast[Any], tmp_path: Path) -> None:
    threads: list[int] = []

    @app.task(name="double")
    def double(n: int) -> int:
        threads.append(threading.get_ident())
        assert current_job().queue == "double"
        return 2 * n

    @app.task(name="triple")
    async def triple(n: int) -> int:
        threads.append(threading.get_ident())
        await asyncio.sleep(0)
        return 3 * n

    with eager(app) as jobs:
        handle = double.sync.enqueue(4)
        assert len(threads) == 1
        assert (handle.state(), handle.result()) == (State.COMPLETED, 8)
        assert (double.sync.call(1), triple.sync.call(1)) == (2, 3)
        assert [(run.queue, run.kind) for run in jobs.ran()] == [
            ("double", EventKind.COMPLETED),
            ("double", EventKind.COMPLETED),
            ("triple", EventKind.COMPLETED),
        ]
        jobs.assert_enqueued(double, n=4)
    assert set(threads) == {threading.get_ident()}
    assert list(tmp_path.iterdir()) == []


async def test_async_callers_run_handlers_of_both_kinds_in_their_task(app: Holdfast[Any]) -> None:
    seen: list[Any] = []
    variable = contextvars.ContextVar("variable", default="outside")

    @app.task(name="sync")
    def blocking() -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append((threading.get_ident(), variable.get()))
        return "a"

    @app.task(name="async")
    async def awaiting() -> str:
        seen.append((asyncio.current_task(), variable.get()))
        return "b"

    with eager(app):
        variable.set("of the test")
        assert await blocking.call() == "a"
        assert await (await awaiting.enqueue()).result() == "b"
        with pytest.raises(NotOpen):
            blocking.sync.enqueue()
        asyncio.get_running_loop()
    assert seen == [(threading.get_ident(), "of the test"), (asyncio.current_task(), "of the test")]


async def test_a_blocking_handler_sees_no_task_and_may_run_loops(app: Holdfast[Any]) -> None:
    caller, loop = asyncio.current_task(), asyncio.get_running_loop()

    @app.task(name="inner")
    async def inner(n: int) -> int:
        return n

    @app.task(name="outer")
    def outer() -> int:
        assert asyncio.current_task(loop) is None
        return asyncio.run(inner.call(1)) + inner.sync.call(2)

    with eager(app):
        async with asyncio.timeout(20):
            assert await outer.call() == 3
        assert asyncio.current_task() is caller


def test_a_handler_sees_the_transaction_of_the_caller(app: Holdfast[Any]) -> None:
    db = sqlite3.connect(":memory:")  # sqlite3 refuses every other thread.
    db.execute("CREATE TABLE users (name TEXT)")
    db.commit()

    @app.task(name="welcome")
    def welcome(name: str) -> int:
        count: int = db.execute("SELECT count(*) FROM users WHERE name = ?", (name,)).fetchone()[0]
        return count

    with eager(app):
        db.execute("INSERT INTO users VALUES ('ada')")
        assert welcome.sync.call("ada") == 1
        db.rollback()
        assert welcome.sync.call("ada") == 0
    db.close()


@pytest.mark.parametrize("blocks", [True, False])
def test_jobs_of_handlers_run_in_place_too(app: Holdfast[Any], blocks: bool) -> None:
    order: list[str] = []

    @app.task(name="step")
    async def step(n: int) -> int:
        order.append(f"step {n}")
        return n if n == 0 else await step.call(n - 1) + n

    @app.task(name="plan")
    def plan() -> int:
        order.append("plan")
        total = step.sync.call(3) + step.sync.call(1)
        order.append("end")
        return total

    with eager(app):
        assert (plan.sync.call() if blocks else asyncio.run(plan.call())) == 7
    assert order == ["plan", "step 3", "step 2", "step 1", "step 0", "step 1", "step 0", "end"]


def test_each_thread_runs_its_jobs_itself(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def where() -> int:
        return threading.get_ident()

    seen: dict[int, int] = {}

    def work() -> None:
        for _ in range(20):
            seen[threading.get_ident()] = where.sync.call()

    with eager(app):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(seen) >= 1
    assert all(caller == runner for caller, runner in seen.items())


def test_every_way_to_enqueue_runs_the_jobs(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="t", max_retries=0)
    def note(n: int) -> None:
        ran.append(n)

    with eager(app):
        note.sync.enqueue(1)
        app.sync.enqueue_many([note.bind(2), note.bind(3)])
        app.sync.queue("t").enqueue({"n": 4})
        assert app.sync.queue("t").call({"n": 5}) is None
        handle = app.sync.queue("other").enqueue({"n": 6})
        assert handle.state() is State.WAITING
        with app.sync.queue("other").leased() as lease:
            assert lease is not None
            assert lease.payload == {"n": 6}
    assert ran == [1, 2, 3, 4, 5]


# Exceptions


@pytest.mark.parametrize("verb", ["enqueue", "call"])
def test_an_exception_is_raised_where_the_job_was_enqueued(app: Holdfast[Any], verb: str) -> None:
    @app.task(name="fail")
    def fail() -> None:
        raise KeyError("of the handler")

    @app.task(name="outer", max_retries=0)
    async def outer() -> None:
        await fail.enqueue()

    with eager(app) as jobs:
        for task in (fail, outer):
            with pytest.raises(KeyError, match="of the handler"):
                getattr(task.sync, verb)()
        assert [(run.queue, run.kind) for run in jobs.ran()] == [
            ("fail", EventKind.RETRIED),
            ("fail", EventKind.RETRIED),
            ("outer", EventKind.FAILED),
        ]


async def test_exceptions_are_stored_if_they_are_not_to_be_raised(app: Holdfast[Any]) -> None:
    failures: list[str] = []

    @app.task(name="fail", min_backoff=10, max_backoff=10, max_retries=1)
    async def fail() -> None:
        raise ValueError("of the handler")

    @fail.on_failure
    def mourn(failure: Failure) -> None:
        failures.append(failure.error.message)

    @app.task(name="permanent")
    def permanent() -> None:
        raise PermanentError("at once")

    with eager(app, raises=False) as jobs:
        handle = await fail.enqueue()
        with pytest.raises(WaitTimeout):
            await handle.result()
        assert failures == []
        assert [run.kind for run in await jobs.advance(10)] == [EventKind.FAILED, EventKind.COMPLETED]
        assert failures == ["of the handler"]
        with pytest.raises(JobFailed, match="of the handler"):
            await handle.result()
        with pytest.raises(JobFailed, match="at once"):
            await permanent.call()


def test_the_fail_handler_has_run_when_the_exception_is_raised(app: Holdfast[Any]) -> None:
    failed: list[Any] = []

    @app.task(name="fail", max_retries=0)
    def fail(n: int) -> None:
        raise ValueError(n)

    @fail.on_failure
    def mourn(failure: Failure) -> None:
        failed.append(failure.payload.n)

    with eager(app):
        with pytest.raises(ValueError, match="7"):
            fail.sync.enqueue(7)
        assert failed == [7]


def test_a_retry_that_the_handler_asks_for_waits_and_is_no_error(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def work() -> int:
        if current_job().attempt == 1:
            raise Retry(delay=60)
        return current_job().attempt

    with eager(app) as jobs:
        handle = work.sync.enqueue()
        assert handle.state() is State.WAITING
        jobs.sync.advance(60)
        assert handle.result() == 2


def test_errors_outside_of_the_function_are_raised_too(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def work(n: int) -> Any:
        return object()

    with eager(app):
        with pytest.raises(JobFailed, match="PayloadRejected"):
            work.sync.enqueue(1)
        with pytest.raises(JobFailed, match="does not fit"):
            app.sync.queue("t").enqueue({"n": "text"})


def test_an_interrupt_passes_through(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def work() -> None:
        raise KeyboardInterrupt

    with eager(app), pytest.raises(KeyboardInterrupt):
        work.sync.enqueue()


@pytest.mark.parametrize("raises", [True, False])
async def test_the_caller_can_be_cancelled_in_a_handler(app: Holdfast[Any], raises: bool) -> None:
    @app.task(name="t")
    async def work() -> None:
        await asyncio.sleep(3600)

    with eager(app, raises=raises):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work.call(), 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await work.enqueue()


@pytest.mark.parametrize("raises", [True, False])
async def test_a_cancelled_caller_leaves_the_other_jobs_ready(app: Holdfast[Any], raises: bool) -> None:
    ran: list[int] = []

    @app.task(name="t", max_retries=0)
    async def work(n: int) -> None:
        ran.append(n)
        if n == 0:
            raise ValueError("before the cancellation")
        if n == 1:
            await asyncio.sleep(3600)

    with eager(app, raises=raises) as jobs:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await app.enqueue_many(work.bind(n) for n in range(4))
        assert ran == [0, 1]
        await jobs.drain()
        assert ran == [0, 1, 2, 3]


async def test_a_cancellation_keeps_its_message(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def work() -> None:
        await asyncio.sleep(3600)

    with eager(app, raises=False):
        caller = asyncio.create_task(work.call())
        await asyncio.sleep(0.02)
        caller.cancel("by a scope")
        with pytest.raises(asyncio.CancelledError, match="by a scope"):
            await caller


async def test_a_handler_that_ignores_the_cancellation_does_not_hide_it(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def work() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    with eager(app):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await work.enqueue()


async def test_an_earlier_cancellation_of_the_caller_raises_no_stored_error(app: Holdfast[Any]) -> None:
    @app.task(name="t", max_retries=0)
    async def work() -> None:
        raise ValueError("stored")

    async def caller() -> State | None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return await (await work.enqueue()).state()

    with eager(app, raises=False):
        task = asyncio.create_task(caller())
        await asyncio.sleep(0)
        task.cancel()
        assert await task is State.FAILED


# Time, ids and hooks


def test_delayed_jobs_wait_for_the_clock_and_run_on_the_thread_of_the_caller(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def where() -> int:
        return threading.get_ident()

    with eager(app) as jobs:
        handle = where.sync.using(delay=60).enqueue()
        began = time.monotonic()
        for wait in (handle.result, where.sync.using(delay=60).call):
            with pytest.raises(WaitTimeout):
                wait()
        assert time.monotonic() - began < 10
        assert jobs.ran() == []
        assert len(jobs.sync.advance(minutes=1)) == 2
        assert handle.result() == threading.get_ident()
        app.sync.queue("t").pause()
        paused = where.sync.enqueue()
        app.sync.queue("t").resume()
        assert len(jobs.sync.drain()) == 1
        assert paused.result() == threading.get_ident()


async def test_ids_mean_what_they_mean_in_life(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="once", unique="{n}")
    def once(n: int) -> int:
        ran.append(n)
        return n

    @app.task(name="newest", singleton="the one")
    async def newest(n: int) -> None:
        ran.append(n)
        if n < 12:
            assert (await newest.enqueue(n + 1)).placed is Placed.DEFERRED

    with eager(app):
        await once.enqueue(1)
        assert (await once.enqueue(1)).placed is Placed.COMPLETED
        assert await once.call(1) == 1
        await newest.enqueue(10)
    assert ran == [1, 10, 11, 12]


async def test_a_result_that_is_not_kept_is_returned_by_call(app: Holdfast[Any]) -> None:
    @app.task(name="t", result_ttl=0)
    def work() -> int:
        return 5

    with eager(app):
        assert await work.call() == 5


async def test_hooks_and_resources_are_those_of_the_app(tmp_path: Path) -> None:
    heard: list[Any] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[str]:
        heard.append("open")
        yield "resources"
        heard.append("close")

    app = Holdfast(f"sqlite:///{tmp_path}/real.db", lifespan=lifespan)

    @app.middleware
    async def layer(job: CurrentJob, proceed: Any) -> Any:
        heard.append("middleware")
        return await proceed()

    @app.around
    @contextmanager
    def session(job: CurrentJob) -> Iterator[None]:
        heard.append("around")
        yield

    @app.after_execution
    def after(execution: Any) -> None:
        execution.result = "changed"

    @app.on_event
    def note(event: RunEvent) -> None:
        heard.append(event.kind)

    @app.task(name="t")
    def work() -> str:
        heard.append(app.resources)
        return "result"

    with eager(app):
        assert await work.call() == "changed"
    assert heard == [EventKind.CLAIMED, "open", "middleware", "around", "resources", "close", EventKind.COMPLETED]


async def test_errors_of_event_hooks_are_reported_as_by_a_worker(app: Holdfast[Any]) -> None:
    reported: list[tuple[str, str]] = []

    @app.on_event
    async def fail(event: RunEvent) -> None:
        raise LookupError(event.kind)

    @app.on_error
    def note(error: BaseException, where: str) -> None:
        reported.append((str(error), where))

    @app.task(name="t")
    async def work() -> int:
        return 1

    with eager(app):
        assert await work.using(id="a").call() == 1
    assert reported == [(kind, f"on_event, for {kind} of job 'a'") for kind in ("claimed", "completed")]


async def test_a_job_is_ready_again_if_the_lifespan_raises(tmp_path: Path) -> None:
    starts: list[int] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        starts.append(1)
        if len(starts) == 1:
            raise LookupError("no database")
        yield

    app = Holdfast(f"sqlite:///{tmp_path}/real.db", lifespan=lifespan)

    @app.task(name="t")
    async def work() -> None: ...

    with eager(app, raises=False) as jobs:
        with pytest.raises(LookupError, match="no database"):
            await work.using(id="a").enqueue()
        info = await app.queue("t").get("a")
        assert info is not None
        assert info.state is State.WAITING
        assert [(run.id, run.kind) for run in await jobs.drain()] == [("a", EventKind.COMPLETED)]


def test_an_eager_rehearsal_can_be_used_for_two_blocks(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def work() -> int:
        return 1

    rehearsal = eager(app)
    for _ in range(2):
        with rehearsal as jobs:
            assert work.sync.call() == 1
            assert len(jobs.ran()) == 1


def test_a_block_can_end_while_another_thread_is_in_a_call(app: Holdfast[Any]) -> None:
    started, ended = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @app.task(name="t")
    async def work() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        ended.wait(20)

    caller = threading.Thread(target=work.sync.enqueue)
    with eager(app):
        caller.start()
        assert started.wait(20)
    ended.set()
    caller.join(20)
    assert [loop.is_closed() for loop in loops] == [True]


async def test_the_app_is_itself_again_after_an_eager_block(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def work() -> None:
        current_job()

    with pytest.raises(LookupError), eager(app):
        raise LookupError
    assert app._session.rehearsal is None
    assert not app._session.eager
    with eager(app):
        await work.enqueue()
        with pytest.raises(HoldfastError, match="no job runs here"):
            current_job()


def test_drain_of_an_endless_job_is_stopped(app: Holdfast[Any]) -> None:
    @app.task(name="again", max_retries=1_000_000)
    def again() -> None:
        raise Retry(delay=0)

    with eager(app) as jobs:
        app.sync.queue("again").pause()
        again.sync.enqueue()
        app.sync.queue("again").resume()
        assert jobs.ran() == []
        with pytest.raises(HoldfastError, match="drain started more than 50 runs"):
            jobs.sync.drain(max_runs=50)


async def test_an_ordinary_rehearsal_runs_nothing_by_itself(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    def work() -> None: ...

    with rehearse(app) as jobs:
        await work.enqueue()
        assert jobs.ran() == []
