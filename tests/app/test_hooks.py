"""What an app puts around its runs: shared resources, middleware, `after_execution`, `on_event`, `on_error`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from holdfast import (
    CurrentJob,
    EventKind,
    Execution,
    Failure,
    Holdfast,
    JobError,
    JobFailed,
    PermanentError,
    RunEvent,
    State,
    StorageUnavailable,
    current_job,
)
from holdfast._core.jobs import LeaseRef
from holdfast._core.replies import Extended, Snapshot
from holdfast._worker.handler import Proceed
from holdfast.storage.local.memory import MemoryStorage
from tests.app.conftest import until

pytestmark = pytest.mark.storages("memory")  # a test that depends on the storage names all of them

App = Holdfast[Any]
MakeApp = Callable[..., App]


# Resources


async def test_resources_are_opened_once_per_worker_and_closed_after_its_runs(make_app: MakeApp) -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[dict[str, str]]:
        log.append("enter")
        yield {"pool": "of connections"}
        log.append("leave")

    async with make_app(lifespan=lifespan) as app:

        @app.task(name="a")
        async def use(number: int) -> str:
            pool: str = app.resources["pool"]
            await asyncio.sleep(0.05)
            log.append("run")
            return pool

        @app.task(name="s")
        def sync_use() -> str:
            resources: Any = current_job().resources
            return str(resources["pool"])

        async with app.worker():
            handles = [await use.using(id=f"j{n}").enqueue(n) for n in range(3)]
            assert await sync_use.using(wait=10).call() == "of connections"
            await until(lambda: _all_started(app, "a"))
        assert [await handle.result(wait=0) for handle in handles] == ["of connections"] * 3
        assert log == ["enter", "run", "run", "run", "leave"]
        async with app.worker():
            assert await use.using(wait=10).call(9) == "of connections"
        assert log[5:] == ["enter", "run", "leave"]


async def test_resources_are_closed_after_runs_cancelled_by_a_shutdown(make_app: MakeApp) -> None:
    log: list[str] = []
    started = asyncio.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        log.append("leave")

    async with make_app(lifespan=lifespan) as app:

        @app.task(name="t")
        async def slow() -> None:
            started.set()
            try:
                await asyncio.sleep(30)
            finally:
                await asyncio.sleep(0.1)
                log.append("cleaned up")

        async with app.worker(grace=0):
            await slow.enqueue()
            await started.wait()
        assert log == ["cleaned up", "leave"]


async def test_worker_does_not_start_when_its_resources_fail(make_app: MakeApp) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        raise ConnectionError("no database")
        yield

    async with make_app(lifespan=lifespan) as app:

        @app.task(name="t")
        async def work() -> None: ...

        handle = await work.enqueue()
        with pytest.raises(ConnectionError, match="no database"):
            await app.worker().run()
        assert await handle.state() is State.WAITING


# Middleware


async def test_middleware_wraps_runs_in_the_order_it_was_added(app: App) -> None:
    log: list[str] = []

    @app.middleware
    async def outer(job: CurrentJob, proceed: Any) -> Any:
        log.append(f"outer {job.id}")
        result = await proceed()
        log.append("outer end")
        return f"<{result}>"

    @app.middleware
    async def inner(job: CurrentJob, proceed: Any) -> Any:
        log.append(f"inner {current_job().id}")
        result = await proceed()
        log.append("inner end")
        return f"[{result}]"

    @app.task(name="a")
    async def work() -> str:
        log.append("run")
        return "result"

    @app.task(name="s")
    def sync_work() -> str:
        log.append("run")
        return "result"

    expected = ["outer j", "inner j", "run", "inner end", "outer end"]
    async with app.worker():
        for task in (work, sync_work):
            log.clear()
            assert await task.using(id="j", wait=10).call() == "<[result]>"
            assert log == expected


async def test_middleware_sees_errors_may_swallow_them_and_may_raise(app: App) -> None:
    seen: list[str] = []

    @app.middleware
    async def around(job: CurrentJob, proceed: Any) -> Any:
        if job.id == "refused":
            raise PermanentError("not today")
        try:
            return await proceed()
        except ValueError as error:
            seen.append(str(error))
            return "swallowed"

    @app.task(name="t")
    async def fails() -> str:
        raise ValueError("from the handler")

    async with app.worker():
        assert await fails.using(id="j", wait=10).call() == "swallowed"
        with pytest.raises(JobFailed, match="not today"):
            await fails.using(id="refused", wait=10).call()
    assert seen == ["from the handler"]


async def test_handler_sees_context_values_set_by_middleware(app: App) -> None:
    import contextvars

    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")

    @app.middleware
    async def around(job: CurrentJob, proceed: Any) -> Any:
        tenant.set(f"tenant of {job.id}")
        return await proceed()

    @app.task(name="a")
    async def work() -> str:
        return tenant.get()

    @app.task(name="s")
    def sync_work() -> str:
        return tenant.get()

    async with app.worker():
        assert await work.using(id="j", wait=10).call() == "tenant of j"
        assert await sync_work.using(id="k", wait=10).call() == "tenant of k"


async def test_middleware_wraps_fail_handlers(app: App) -> None:
    queues: list[str] = []
    told: list[Failure] = []

    @app.middleware
    async def around(job: CurrentJob, proceed: Any) -> Any:
        queues.append(job.queue)
        return await proceed()

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await fails.enqueue()
        await until(lambda: told)
    assert queues == ["t", "t/failed"]


# after_execution


async def test_after_execution_hook_gets_the_execution_of_a_job(app: App) -> None:
    told: list[Execution] = []

    @app.after_execution
    def note(execution: Execution) -> None:
        told.append(execution)

    @app.task(name="t", min_backoff=0)
    async def fails_once(number: int) -> int:
        if current_job().attempt == 1:
            raise ValueError
        await asyncio.sleep(0.02)
        return number * 2

    async with app.worker(name="w"):
        assert await fails_once.using(id="j", wait=10).call(4) == 8
    (execution,) = told  # A run that is retried is no end.
    assert (execution.queue, execution.id, execution.attempt, execution.worker) == ("t", "j", 2, "w")
    assert (execution.payload.number, execution.result, execution.error) == (4, 8, None)
    assert 0.01 < execution.seconds < 10


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_after_execution_may_change_the_result_and_how_long_it_is_kept(app: App, kind: str) -> None:
    changed: list[Any] = []
    if kind == "async":

        @app.after_execution
        async def change(execution: Execution) -> None:
            await asyncio.sleep(0)
            execution.result = {"changed": execution.result}
            execution.ttl = 0.4
            changed.append(execution.result)
    else:

        @app.after_execution
        def change(execution: Execution) -> None:
            execution.result = {"changed": execution.result}
            execution.ttl = timedelta(seconds=0.4)
            changed.append(execution.result)

    @app.task(name="t", result_ttl=3600)
    async def work() -> Any:
        return 1

    async with app.worker():
        handle = await work.using(id="j").enqueue()
        await until(lambda: _is(handle.state, State.COMPLETED))
        await until(lambda: _is(handle.state, None))
    assert changed == [{"changed": 1}]


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_caller_gets_the_result_set_by_after_execution(app: App) -> None:
    @app.after_execution
    def change(execution: Execution) -> None:
        execution.result *= 2

    @app.task(name="t")
    async def work() -> int:
        return 21

    async with app.worker():
        assert await work.using(wait=10).call() == 42


async def test_after_execution_may_change_the_error(app: App) -> None:
    @app.after_execution
    async def change(execution: Execution) -> None:
        assert execution.error is not None
        execution.error = JobError(type="Masked", message="no secrets", kind=execution.error.kind)

    told: list[Failure] = []

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise ValueError("password=hunter2")

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        handle = await fails.enqueue()
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=10)
        await until(lambda: told)
    assert (raised.value.error.type, raised.value.error.message, raised.value.kind) == (
        *("Masked", "no secrets"),
        "retriable",
    )
    assert told[0].error.message == "no secrets"
    assert "hunter2" not in repr(told[0])


@pytest.mark.parametrize("report_error", ["raises", "raises later", "negative ttl", "no ttl", "no error"])
async def test_after_execution_hook_that_raises_changes_nothing(app: App, report_error: str) -> None:
    errors: list[tuple[BaseException, str]] = []

    @app.on_error
    def note(error: BaseException, where: str) -> None:
        errors.append((error, where))

    @app.after_execution
    async def wrong(execution: Execution) -> None:
        if execution.error is not None:
            if report_error == "no error":
                execution.error = "just text"  # type: ignore[assignment]
            return
        execution.result = "changed"
        if report_error == "raises":
            raise LookupError("in the hook")
        if report_error == "negative ttl":
            execution.ttl = -1
        if report_error == "no ttl":
            execution.ttl = "soon"  # type: ignore[assignment]

    if report_error == "raises later":

        @app.after_execution
        def second(execution: Execution) -> None:
            raise LookupError("in the second hook")

    @app.task(name="t", max_retries=0)
    async def work(good: bool) -> str:
        if not good:
            raise ValueError("its own")
        return "as it was"

    async with app.worker():
        if report_error == "no error":
            with pytest.raises(JobFailed, match="its own"):
                await work.using(id="j", wait=10).call(False)
        else:
            assert await work.using(id="j", wait=10).call(True) == "as it was"
    assert len(errors) == 1
    assert "after_execution" in errors[0][1]
    assert "'j'" in errors[0][1]


# on_event


async def test_events_list_the_steps_of_a_run_in_order(app: App) -> None:
    events: list[RunEvent] = []

    @app.on_event
    async def note(event: RunEvent) -> None:
        events.append(event)

    @app.task(name="t", min_backoff=0, timeout=0.05, max_timeouts=1, max_retries=1)
    async def lively() -> None:
        attempt = current_job().attempt
        if attempt == 1:
            raise ValueError("once")
        if attempt == 2:
            await asyncio.sleep(30)
        if attempt == 3:
            raise PermanentError("enough")

    async with app.worker():
        with pytest.raises(JobFailed):
            await lively.using(id="j", wait=10).call()
    assert [(event.kind, event.attempt) for event in events] == [
        (EventKind.CLAIMED, 1),
        (EventKind.RETRIED, 1),
        (EventKind.CLAIMED, 2),
        (EventKind.TIMED_OUT, 2),
        (EventKind.CLAIMED, 3),
        (EventKind.FAILED, 3),
    ]
    assert {(event.queue, event.id) for event in events} == {("t", "j")}
    errors = [event.error and event.error.type for event in events]
    assert errors == [None, "ValueError", None, "TimeoutError", None, "PermanentError"]
    assert events[3].seconds >= 0.04


async def test_reported_progress_is_an_event_of_its_run(app: App) -> None:
    events: list[RunEvent] = []

    @app.on_event
    def note(event: RunEvent) -> None:
        events.append(event)

    @app.task(name="t")
    async def work() -> None:
        current_job().progress({"done": [1, 2**70]})
        await until(lambda: events and events[-1].kind is EventKind.PROGRESS)

    async with app.worker(lease=0.5):
        await work.using(id="j", wait=10).call()
    (seen,) = [event for event in events if event.kind is EventKind.PROGRESS]
    assert (seen.queue, seen.id, seen.attempt, seen.progress) == ("t", "j", 1, {"done": [1, 2**70]})
    assert [event.progress for event in events if event is not seen] == [None] * (len(events) - 1)


async def test_a_queue_without_waiting_and_running_jobs_is_an_event(app: App) -> None:
    events: list[tuple[EventKind, str, str]] = []

    @app.on_event
    def note(event: RunEvent) -> None:
        events.append((event.kind, event.queue, event.id))

    @app.task(name="later")
    async def later() -> None: ...

    @app.task(name="t", concurrency=1)
    async def work() -> None:
        await asyncio.sleep(0.2)  # Longer than a heartbeat takes.

    await later.using(delay=60).enqueue()
    await app.enqueue_many([later.bind(), *(work.bind() for _ in range(3))])
    async with app.worker(lease=0.5):
        await until(lambda: (EventKind.DRAINED, "t", "") in events)
    ends = [kind for kind, queue, _ in events if queue == "t" and kind is not EventKind.CLAIMED]
    assert ends == [*[EventKind.COMPLETED] * 3, EventKind.DRAINED]
    assert (EventKind.DRAINED, "later", "") not in events


async def test_completed_and_released_runs_have_events(app: App) -> None:
    events: list[tuple[str, EventKind]] = []
    started = asyncio.Event()

    @app.on_event
    def note(event: RunEvent) -> None:
        events.append((event.id, event.kind))

    @app.task(name="t")
    async def work(slow: bool) -> None:
        if slow:
            started.set()
            await asyncio.sleep(30)

    async with app.worker(grace=0):
        await work.using(id="quick", wait=10).call(False)
        await work.using(id="slow").enqueue(True)
        await started.wait()
    assert events == [
        *(("quick", EventKind.CLAIMED), ("quick", EventKind.COMPLETED)),
        *(("slow", EventKind.CLAIMED), ("slow", EventKind.RELEASED)),
    ]


async def test_failing_or_slow_event_hook_does_not_delay_the_worker(app: App) -> None:
    errors: list[str] = []
    seen: dict[str, list[str]] = defaultdict(list)
    go_on = asyncio.Event()

    @app.on_error
    async def report_error(error: BaseException, where: str) -> None:
        errors.append(f"{where}: {error}")

    @app.on_event
    async def slow_and_broken(event: RunEvent) -> None:
        await go_on.wait()
        raise LookupError("broken hook")

    @app.on_event
    def other(event: RunEvent) -> None:
        seen[event.id].append(event.kind)

    @app.task(name="t", concurrency=1)
    async def work(number: int) -> int:
        return number

    async with app.worker():
        handles = await app.enqueue_many(work.bind(n) for n in range(8))
        assert [await handle.result(wait=10) for handle in handles] == list(range(8))
        assert seen == {}
        go_on.set()
    assert all(kinds == ["claimed", "completed"] for kinds in seen.values())
    assert len(seen) == 8
    assert len(errors) == 16
    assert "broken hook" in errors[0]


# on_error


async def test_failing_error_hook_does_not_affect_the_worker(app: App) -> None:
    told: list[str] = []

    @app.on_error
    def broken(error: BaseException, where: str) -> None:
        told.append(where)
        raise RuntimeError("the hook for errors has one")

    @app.after_execution
    def wrong(execution: Execution) -> None:
        raise LookupError

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with app.worker():
        assert await work.using(wait=10).call() == 1
        assert await work.using(wait=10).call() == 1
    assert len(told) == 2


async def test_worker_errors_are_logged_without_an_error_hook(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.after_execution
    def wrong(execution: Execution) -> None:
        raise LookupError("nobody listens")

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with app.worker():
        assert await work.using(wait=10).call() == 1
    assert "nobody listens" in caplog.text


async def test_failure_of_a_job_does_not_call_the_error_hook(app: App) -> None:
    told: list[str] = []

    @app.on_error
    def note(error: BaseException, where: str) -> None:
        told.append(where)

    @app.task(name="t", max_retries=1, min_backoff=0)
    def fails() -> None:
        raise ValueError

    async with app.worker():
        with pytest.raises(JobFailed):
            await fails.using(wait=10).call()
    assert told == []


async def test_a_hook_that_raises_system_exit_does_not_hang_its_job(app: App) -> None:
    @app.after_execution
    def wrong(execution: Execution) -> None:
        raise SystemExit

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with app.worker(grace=0.1):
        assert await work.using(wait=3).call() == 1


async def test_sync_hooks_run_on_the_workers_loop(app: App) -> None:
    threads: set[str] = set()

    @app.after_execution
    def after(execution: Execution) -> None:
        threads.add(threading.current_thread().name)

    @app.on_event
    def event(event: RunEvent) -> None:
        threads.add(threading.current_thread().name)

    @app.task(name="t")
    def work() -> int:
        return 1

    async with app.worker():
        assert await work.using(wait=10).call() == 1
    assert threads == {threading.current_thread().name}


async def _all_started(app: App, queue: str) -> bool:
    return (await app.queue(queue).stats()).ready == 0


async def _is(ask: Callable[[], Any], value: object) -> bool:
    return bool(await ask() is value)


async def test_middleware_may_answer_in_place_of_the_handler_without_being_async(app: App) -> None:
    @app.middleware
    def cached(job: CurrentJob, proceed: Proceed) -> Any:
        return 7 if job.id == "known" else proceed()

    @app.task(name="t")
    async def work() -> int:
        return 1

    async with app.worker():
        assert await work.using(id="known").call() == 7
        assert await work.using(id="new").call() == 1


class Unsteady(MemoryStorage):
    """A storage whose first snapshot fails, and whose first extend finds that all leases are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    async def _snapshot(self, queues: Sequence[str] | None) -> Snapshot:
        self.calls["snapshot"] += 1
        if self.calls["snapshot"] == 1:
            raise StorageUnavailable("not now")
        return await super()._snapshot(queues)

    async def _extend(self, queue: str, leases: Sequence[LeaseRef], worker: str, lease_ms: int) -> Extended:
        self.calls["extend"] += 1
        if self.calls["extend"] == 1:
            return Extended(lost=list(leases), cancel_asked=[])
        return await super()._extend(queue, leases, worker, lease_ms)


async def test_only_stored_progress_is_an_event_and_a_drained_queue_is_looked_for_again() -> None:
    events: list[EventKind] = []
    async with Holdfast[Any](storage=Unsteady()) as app:

        @app.on_event
        def note(event: RunEvent) -> None:
            events.append(event.kind)

        @app.task(name="t")
        async def work() -> None:
            current_job().progress(1)
            await asyncio.sleep(0.3)

        async with app.worker(lease=0.5):
            await work.enqueue()
            await until(lambda: EventKind.DRAINED in events)
    assert events.count(EventKind.PROGRESS) == 1  # That of the second run: the lease of the first one was lost.
