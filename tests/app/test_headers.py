"""Headers of a request, and the hook before it is sent."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import BoundRequest, CurrentJob, Execution, Failure, Holdfast, OptionError, State, current_job
from holdfast._core.extension import EXPIRES_IN, HEADERS, headers_in, pack_numbers
from holdfast._core.jobs import Request, Work
from tests.app.conftest import until

App = Holdfast[Any]

TRACE = {"trace": "ünï-1", "": "empty key"}
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


async def test_all_that_surrounds_a_run_sees_its_headers(app: App) -> None:
    seen: dict[str, Mapping[str, str]] = {}

    @app.before_enqueue
    def sent(request: BoundRequest[Any]) -> None:
        seen["before_enqueue"] = request.headers

    @app.middleware
    async def middleware(job: CurrentJob, proceed: Any) -> Any:
        seen["middleware"] = job.headers
        return await proceed()

    @app.around
    @contextmanager
    def around(job: CurrentJob) -> Iterator[None]:
        seen["around"] = job.headers
        yield

    @app.after_execution
    def after(execution: Execution) -> None:
        seen["after_execution"] = execution.headers

    @app.task(name="t")
    def work() -> None:
        seen["handler"] = current_job().headers

    async with app.worker():
        handle = await work.using(headers=TRACE, id="a").enqueue()
        await handle.result(wait=10)
    assert seen == dict.fromkeys(("before_enqueue", "middleware", "around", "after_execution", "handler"), TRACE)
    info = await handle.info()
    assert info is not None
    assert (info.state, info.headers) == (State.COMPLETED, TRACE)


async def test_headers_survive_retries_and_go_to_the_fail_handler(app: App) -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    @app.task(name="t", min_backoff=0, max_retries=1)
    async def work() -> None:
        seen.append(("run", current_job().headers))
        raise ValueError("no luck")

    @work.on_failure
    async def failed(failure: Failure) -> None:
        seen.append((failure.error.type, current_job().headers))

    async with app.worker():
        await work.using(headers=TRACE, expires=60, backoff=0).enqueue()
        await until(lambda: len(seen) == 3)
    assert seen == [("run", TRACE), ("run", TRACE), ("ValueError", TRACE)]
    (follow_up,) = [job async for job in app.queue("t/failed").jobs()]
    assert follow_up.headers == TRACE
    (record,) = await app.storage.get("t/failed", [follow_up.id])
    assert record is not None
    assert [tag for tag, _ in record.work.extension] == [HEADERS]


async def test_retry_of_a_failed_job_and_a_lease_have_its_headers(app: App) -> None:
    queue = app.queue("t")
    await queue.enqueue({"n": 1}, id="a", headers=TRACE)
    lease = await queue.lease(wait=0)
    assert lease is not None
    assert lease.headers == TRACE
    await lease.fail("no luck")
    await queue.retry("a")
    again = await queue.get("a")
    assert again is not None
    assert (again.state, again.headers) == (State.WAITING, TRACE)


async def test_request_without_headers_stores_no_extension(app: App) -> None:
    await app.queue("t").enqueue(1, id="a")
    await app.queue("t").enqueue(1, id="b", headers={})
    for job in await app.storage.get("t", ["a", "b"]):
        assert job is not None
        assert job.work.extension == ()


@pytest.mark.storages("memory")
async def test_added_headers_that_are_empty_store_no_extension(app: App) -> None:
    bound = app.queue("t").bind(1, expires=60)
    before = bound.request.work.extension
    bound.add_headers({})
    assert bound.request.work.extension == before
    assert [tag for tag, _ in before] == [EXPIRES_IN]


class Text(str):
    """Text that reads differently when it is formatted, as a member of an enum does."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"<{super().__str__()}>"


@pytest.mark.storages("memory")
async def test_headers_of_a_subclass_of_str_are_text(app: App) -> None:
    bound = app.queue("t").bind(1, headers={Text("a"): Text("b")})
    bound.add_headers({"c": Text("d")})
    assert bound.headers == {"a": "b", "c": "d"}


async def test_headers_that_another_client_garbled_read_as_none(app: App) -> None:
    entries = ((EXPIRES_IN, pack_numbers(60_000)), (HEADERS, b'{"trace": 1}'))
    await app.storage.enqueue("t", [Request("a", Work(b"1", extension=entries), custom_id=True)])
    info = await app.queue("t").get("a")
    assert info is not None
    assert info.headers == {}


@pytest.mark.storages("memory")
@pytest.mark.parametrize(
    "headers",
    [
        {f"{number}": "" for number in range(17)},
        {"long": "x" * 4_096},
        {"lone": "\ud800"},
        {"number": 1},
        {1: "number"},
        [("a", "b")],
        "text",
    ],
    ids=lambda value: str(value)[:12],
)
async def test_headers_out_of_bounds_are_refused_where_they_are_written(app: App, headers: Any) -> None:
    with pytest.raises(OptionError, match="headers "):
        app.queue("t").bind(1, headers=headers)
    bound = app.queue("t").bind(1, headers={"a": "b"})
    added: Any = headers if isinstance(headers, dict) else {"a": [headers]}
    with pytest.raises(OptionError, match="headers "):
        bound.add_headers(added)
    assert bound.headers == {"a": "b"}


async def test_a_hook_adds_headers_to_every_kind_of_request(app: App) -> None:
    @app.before_enqueue
    def stamp(request: BoundRequest[Any]) -> None:
        request.add_headers({"tenant": tenant.get(), "to": f"{request.queue}/{request.id}"})

    @app.task(name="t")
    async def work(n: int) -> dict[str, str]:
        return current_job().headers

    tenant.set("ada")
    async with app.worker():
        one = await work.using(id="one", headers={"tenant": "old", "own": "1"}).enqueue(1)
        assert await one.result(wait=10) == {"tenant": "ada", "own": "1", "to": "t/one"}
        assert await work.using(id="called", wait=10).call(1) == {"tenant": "ada", "to": "t/called"}
        (many,) = await app.enqueue_many([work.using(id="many", expires=60, priority=7).bind(1)])
        assert await many.result(wait=10) == {"tenant": "ada", "to": "t/many"}
    (record,) = await app.storage.get("t", ["many"])
    assert record is not None
    assert ([tag for tag, _ in record.work.extension], record.work.priority) == ([EXPIRES_IN, HEADERS], 7)


def test_a_hook_of_a_blocking_call_sees_the_context_of_its_caller(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    seen: list[tuple[str, str]] = []

    @app.before_enqueue
    def note(request: BoundRequest[Any]) -> None:
        seen.append((request.id, tenant.get()))

    tenant.set("bob")
    queue = app.queue("t")
    queue.sync.enqueue(1, id="one")
    app.sync.enqueue_many([queue.bind(1, id="many")])
    app.sync.close()
    assert seen == [("one", "bob"), ("many", "bob")]


async def test_a_hook_that_raises_refuses_all_requests_of_a_call(app: App) -> None:
    queue = app.queue("t")
    await queue.enqueue(1, id="before")

    @app.before_enqueue
    def refuse(request: BoundRequest[Any]) -> None:
        if request.id == "no":
            raise PermissionError("not today")

    with pytest.raises(PermissionError, match="not today"):
        await queue.enqueue(1, id="no")
    with pytest.raises(PermissionError, match="not today"):
        await app.enqueue_many([queue.bind(1, id="yes"), queue.bind(1, id="no")])
    with pytest.raises(PermissionError, match="not today"):
        await queue.call(1, id="no", wait=0)
    assert [job.id async for job in queue.jobs()] == ["before"]


@pytest.mark.storages("memory")
async def test_a_hook_that_is_async_is_refused(app: App) -> None:
    async def hook(request: BoundRequest[Any]) -> None: ...

    with pytest.raises(OptionError, match=r"make hook a def"):
        app.before_enqueue(hook)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_headers_in_ignores_other_tags() -> None:
    assert headers_in(((EXPIRES_IN, b"{}"), (HEADERS, b'{"a":"b"}'), (200, b"?"))) == {"a": "b"}
    assert headers_in(((HEADERS, b"\xff"),)) == {}
