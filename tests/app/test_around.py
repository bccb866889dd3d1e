"""`app.around`: context managers where the handler runs, on its thread or on the event loop."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest

from holdfast import CurrentJob, Holdfast, JobFailed

pytestmark = pytest.mark.storages("memory")

App = Holdfast[Any]


async def test_sync_handler_runs_inside_on_its_thread(app: App) -> None:
    local = threading.local()
    threads: list[int] = []

    @app.around
    @contextmanager
    def session(job: CurrentJob) -> Iterator[None]:
        local.session = f"session of {job.id}"
        threads.append(threading.get_ident())
        yield
        threads.append(threading.get_ident())

    @app.task(name="t")
    def work() -> str:
        threads.append(threading.get_ident())
        return str(local.session)

    async with app.worker():
        assert await work.using(id="j", wait=10).call() == "session of j"
    assert len(threads) == 3
    assert set(threads) == {threads[0]} != {threading.get_ident()}


async def test_async_handler_runs_inside_sync_and_async_ones_in_order(app: App) -> None:
    log: list[str] = []

    @app.around
    @asynccontextmanager
    async def outer(job: CurrentJob) -> AsyncIterator[None]:
        log.append("outer")
        yield
        log.append("outer end")

    @app.around
    @contextmanager
    def inner(job: CurrentJob) -> Iterator[None]:
        log.append("inner")
        yield
        log.append("inner end")

    @app.middleware
    async def layer(job: CurrentJob, proceed: Any) -> Any:
        log.append("middleware")
        return await proceed()

    @app.task(name="t")
    async def work() -> int:
        log.append("run")
        return 1

    async with app.worker():
        assert await work.using(wait=10).call() == 1
    assert log == ["middleware", "outer", "inner", "run", "inner end", "outer end"]


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_it_sees_the_exception_of_the_handler(app: App, kind: str) -> None:
    seen: list[str] = []

    @app.around
    @contextmanager
    def scope(job: CurrentJob) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            seen.append(str(error))
            raise

    if kind == "async":

        @app.task(name="t", max_retries=0)
        async def fails() -> None:
            raise ValueError("from the handler")
    else:

        @app.task(name="t", max_retries=0)
        def fails() -> None:
            raise ValueError("from the handler")

    async with app.worker():
        with pytest.raises(JobFailed, match="from the handler"):
            await fails.using(wait=10).call()
    assert seen == ["from the handler"]


async def test_an_async_one_around_a_sync_handler_fails_the_run(app: App) -> None:
    @app.around
    @asynccontextmanager
    async def only_async(job: CurrentJob) -> AsyncIterator[None]:
        yield

    @app.task(name="t", max_retries=0)
    def work() -> None: ...

    async with app.worker():
        with pytest.raises(JobFailed, match="for t, whose handler is not async"):
            await work.using(wait=10).call()


async def test_it_may_choose_by_job_and_do_nothing_for_others(app: App) -> None:
    entered: list[str] = []

    @contextmanager
    def scope(id: str) -> Iterator[None]:
        entered.append(id)
        yield

    @app.around
    def some(job: CurrentJob) -> AbstractContextManager[None]:
        return scope(job.id) if job.id == "a" else nullcontext()

    @app.task(name="t")
    def work() -> None: ...

    async with app.worker():
        await work.using(id="a", wait=10).call()
        await work.using(id="b", wait=10).call()
    assert entered == ["a"]
