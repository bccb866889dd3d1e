"""Which exceptions of a task are retried, and after which delay: `retry_on`, `no_retry_on`, `backoff`, wrong calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import CurrentJob, Failure, Holdfast, JobFailed, JobInfo, State
from tests.app.conftest import until

App = Holdfast[Any]
RULES: list[dict[str, Any]] = [{"retry_on": OSError}, {"no_retry_on": (KeyError, TypeError)}]


async def runs_of(app: App, function: Callable[[], None], **options: Any) -> tuple[int, str]:
    """Return how often a failing function runs, and the kind of its last error."""
    runs: list[None] = []

    @app.task(name="t", max_retries=2, backoff=0, **options)
    async def fails() -> None:
        runs.append(None)
        function()

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await fails.using(wait=10).call()
    return len(runs), raised.value.kind


@pytest.mark.parametrize("rules", RULES, ids=["retry_on", "no_retry_on"])
@pytest.mark.storages("memory")
async def test_exception_that_is_not_to_be_retried_fails_its_job_at_once(app: App, rules: dict[str, Any]) -> None:
    def function() -> None:
        raise KeyError("no such page")

    assert await runs_of(app, function, **rules) == (1, "permanent")


@pytest.mark.parametrize("rules", RULES, ids=["retry_on", "no_retry_on"])
@pytest.mark.storages("memory")
async def test_exception_that_is_to_be_retried_is_retried(app: App, rules: dict[str, Any]) -> None:
    def function() -> None:
        raise ConnectionError("the server hung up")

    assert await runs_of(app, function, **rules) == (3, "retriable")


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that looks like its function and does not take its arguments."""

    @functools.wraps(function)
    def wrapper() -> Any:
        return function(1)

    return wrapper


@pytest.mark.parametrize("layered", [False, True], ids=["plain", "middleware"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.storages("memory")
async def test_call_with_wrong_arguments_is_not_retried(app: App, is_async: bool, layered: bool) -> None:
    def sync(number: int) -> None:
        raise AssertionError("it was called")

    async def coroutine(number: int) -> None:
        raise AssertionError("it was called")

    async def layer(job: CurrentJob, proceed: Any) -> Any:
        return await proceed()

    if layered:
        app.middleware(layer)
    odd: Any = functools.wraps(coroutine)(no_parameters) if is_async else renamed(sync)
    task = app.task(name="t", backoff=0)(odd)
    async with app.worker():
        with pytest.raises(JobFailed, match="argument") as raised:
            await task.using(wait=10).call(1)
    assert (raised.value.kind, raised.value.attempts, raised.value.error.type) == ("permanent", 1, "TypeError")


async def no_parameters() -> None:
    """The function behind an async task whose shown signature is wrong."""


@pytest.mark.storages("memory")
async def test_type_error_inside_the_handler_is_retried(app: App) -> None:
    def function() -> None:
        misread: Any = is_in
        misread()

    assert await runs_of(app, function) == (3, "retriable")


@pytest.mark.storages("memory")
async def test_type_error_inside_a_middleware_is_retried(app: App) -> None:
    @app.middleware
    async def layer(job: CurrentJob, proceed: Any) -> Any:
        return await proceed(1)

    @app.task(name="t", max_retries=1, backoff=0)
    async def task() -> None: ...

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await task.using(wait=10).call()
    assert (raised.value.kind, raised.value.attempts) == ("retriable", 2)


async def waiting(app: App, id: str) -> JobInfo:
    """Return a job once it waits for its retry."""
    found: list[JobInfo] = []

    async def waits() -> bool:
        job = await app.queue("t").get(id)
        if job is not None and job.state is State.WAITING and job.retries:
            found.append(job)
        return bool(found)

    await until(waits)
    return found[0]


def is_in(seconds: float, at: datetime) -> bool:
    return abs(at - datetime.now(UTC) - timedelta(seconds=seconds)) < timedelta(seconds=20)


async def test_delays_of_a_request_are_stored_with_it(app: App) -> None:
    @app.task(name="t", backoff=[1_000])
    async def fails(number: int) -> None:
        raise ValueError

    async with app.worker():
        theirs = await fails.enqueue(1)
        own = await fails.using(backoff=[3_000, 5]).enqueue(2)
        queued = await app.queue("t").enqueue({"number": 3}, backoff=timedelta(hours=1))
        assert is_in(1_000, (await waiting(app, theirs.id)).run_at)
        assert is_in(3_000, (await waiting(app, own.id)).run_at)
        assert is_in(3_600, (await waiting(app, queued.id)).run_at)


@pytest.mark.storages("memory")
async def test_backoff_function_decides_by_the_error(app: App) -> None:
    def backoff(retry: int, error: Exception) -> float | None:
        if str(error) == "odd":
            raise ZeroDivisionError("in the function")
        return 500 * retry if str(error) == "busy" else None

    @app.task(name="t", backoff=backoff, min_backoff=100, max_backoff=100)
    async def fails(why: str) -> None:
        raise ValueError(why)

    async with app.worker():
        busy, other, odd = [await fails.enqueue(why) for why in ("busy", "other", "odd")]
        assert is_in(500, (await waiting(app, busy.id)).run_at)
        assert is_in(100, (await waiting(app, other.id)).run_at)
        job = await waiting(app, odd.id)
    assert is_in(100, job.run_at)
    assert job.error is not None
    assert job.error.message == "odd (and in the function)"


@pytest.mark.storages("memory")
async def test_fail_handler_has_rules_of_its_own(app: App) -> None:
    runs: list[str] = []

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise ValueError

    @fails.on_failure(no_retry_on=OSError, backoff=0)
    async def handle(failure: Failure) -> None:
        runs.append(failure.job.id)
        raise OSError

    async with app.worker():
        handle_of = await fails.enqueue()
        await until(lambda: bool(runs))

        async def failed() -> bool:
            return (await app.queue("t/failed").stats()).failed == 1

        await until(failed)
    assert runs == [handle_of.id]
