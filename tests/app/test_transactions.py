"""Jobs in a transaction of the caller's own: they exist exactly if it commits, and then they run."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis
import redis.asyncio

from holdfast import (
    DuplicateJob,
    Holdfast,
    HoldfastError,
    JobFailed,
    JobForgotten,
    OptionError,
    PayloadRejected,
    PermanentError,
    Placed,
    State,
    WaitTimeout,
)
from holdfast.testing import rehearse
from tests import servers
from tests.app.conftest import Place, until

AppMaker = Callable[..., Holdfast[Any]]

pytestmark = [pytest.mark.storages("sqlite", "valkey"), pytest.mark.suite("usual")]


class Caller(Protocol):
    """Whoever has a transaction, with writes of their own in it."""

    @property
    def transaction(self) -> Any: ...
    async def write(self, note: str) -> None: ...
    async def commit(self) -> None: ...
    async def roll_back(self) -> None: ...
    async def notes(self) -> list[str]: ...
    async def close(self) -> None: ...


class SqliteCaller:
    """A connection whose transactions Python's module begins, or its caller explicitly."""

    def __init__(self, path: Path, *, explicit: bool) -> None:
        self.db = sqlite3.connect(path, isolation_level=None if explicit else "DEFERRED")
        self.db.execute("CREATE TABLE IF NOT EXISTS notes (note TEXT)")
        self.db.commit()
        self.explicit = explicit

    @property
    def transaction(self) -> sqlite3.Connection:
        if self.explicit and not self.db.in_transaction:
            self.db.execute("BEGIN IMMEDIATE")
        return self.db

    async def write(self, note: str) -> None:
        self.transaction.execute("INSERT INTO notes VALUES (?)", (note,))

    async def commit(self) -> None:
        self.db.commit()

    async def roll_back(self) -> None:
        self.db.rollback()

    async def notes(self) -> list[str]:
        return [note for (note,) in self.db.execute("SELECT note FROM notes ORDER BY rowid")]

    async def close(self) -> None:
        self.db.close()


class PipelineCaller:
    """A pipeline of redis.Redis, which blocks."""

    def __init__(self, port: int) -> None:
        self.client = redis.Redis(port=port)
        self.key = f"notes-{uuid.uuid4().hex}"
        self.transaction = self.client.pipeline()

    async def write(self, note: str) -> None:
        self.transaction.rpush(self.key, note)

    async def commit(self) -> None:
        self.transaction.execute()

    async def roll_back(self) -> None:
        self.transaction.reset()

    async def notes(self) -> list[str]:
        found: Any = self.client.lrange(self.key, 0, -1)
        return [note.decode() for note in found]

    async def close(self) -> None:
        self.client.delete(self.key)
        self.client.close()


class AsyncPipelineCaller:
    """A pipeline of redis.asyncio.Redis."""

    def __init__(self, port: int) -> None:
        self.client = redis.asyncio.Redis(port=port)
        self.key = f"notes-{uuid.uuid4().hex}"
        self.transaction = self.client.pipeline()

    async def write(self, note: str) -> None:
        self.transaction.rpush(self.key, note)

    async def commit(self) -> None:
        await self.transaction.execute()

    async def roll_back(self) -> None:
        await self.transaction.reset()

    async def notes(self) -> list[str]:
        found: Any = await self.client.lrange(self.key, 0, -1)
        return [note.decode() for note in found]

    async def close(self) -> None:
        await self.client.delete(self.key)
        await self.client.aclose()


@pytest.fixture(params=["usual", "other"])
async def caller(
    request: pytest.FixtureRequest, place: Place, app: Holdfast[Any], tmp_path: Path
) -> AsyncIterator[Caller]:
    found: Caller
    if place.storage == "sqlite":
        found = SqliteCaller(tmp_path / "jobs.db", explicit=request.param == "other")
    else:
        server = servers.shared("valkey")
        assert server is not None
        found = PipelineCaller(server.port) if request.param == "usual" else AsyncPipelineCaller(server.port)
    yield found
    await found.close()


# Exactly if it commits


async def test_worker_runs_exactly_the_committed_jobs(app: Holdfast[Any], caller: Caller) -> None:
    ran: list[str] = []

    @app.task(name="welcome")
    async def welcome(name: str) -> None:
        ran.append(name)

    async with app.worker():
        for name, keep in (("ada", True), ("eve", False), ("bob", True), ("mallory", False)):
            await caller.write(name)
            app.enqueue_in(caller.transaction, welcome.bind(name))
            await (caller.commit() if keep else caller.roll_back())
        await until(lambda: sorted(ran) == ["ada", "bob"])
        await until(lambda: _is_idle(app, "welcome"))
    assert sorted(ran) == ["ada", "bob"]
    assert await caller.notes() == ["ada", "bob"]


async def _is_idle(app: Holdfast[Any], queue: str) -> bool:
    stats = await app.queue(queue).stats()
    return (stats.ready, stats.running) == (0, 0)


async def test_job_is_invisible_before_the_commit(app: Holdfast[Any], caller: Caller) -> None:
    @app.task(name="t")
    async def task(n: int) -> int:
        return n

    (handle,) = app.enqueue_in(caller.transaction, task.using(id="a").bind(1))
    assert await app.queue("t").get("a") is None
    assert (await app.stats()).queues == []
    await caller.commit()
    assert await handle.state() is State.WAITING


async def test_rolled_back_job_never_existed(app: Holdfast[Any], caller: Caller) -> None:
    @app.task(name="t")
    async def task(n: int) -> int:
        return n

    (handle,) = app.enqueue_in(caller.transaction, task.using(id="a").bind(1))
    await caller.roll_back()
    assert await handle.state() is None
    with pytest.raises(JobForgotten):
        await handle.result(wait=0)
    assert (await app.stats()).queues == []


async def test_the_handle_gives_the_result_after_the_commit(app: Holdfast[Any], caller: Caller) -> None:
    @app.task(name="t")
    async def task(n: int) -> int:
        if n < 0:
            raise PermanentError("negative")
        return n * 2

    good, bad, later = app.enqueue_in(caller.transaction, task.bind(1), task.bind(-1), task.using(delay=60).bind(3))
    await caller.commit()
    async with app.worker():
        assert await good.result() == 2
        with pytest.raises(JobFailed, match="negative"):
            await bad.result()
        with pytest.raises(WaitTimeout):
            await later.result(wait=0)
        assert await good.state() is State.COMPLETED
        assert await later.cancel()


async def test_jobs_of_several_tasks_and_queues_are_one_transaction(app: Holdfast[Any], caller: Caller) -> None:
    ran: list[str] = []

    @app.task(name="one")
    async def one() -> None:
        ran.append("one")

    @app.task(name="two")
    async def two(what: str) -> None:
        ran.append(what)

    await caller.write("before")
    app.enqueue_in(caller.transaction, one.bind(), two.bind("two"))
    await caller.write("between")
    handles = app.enqueue_in(caller.transaction, app.queue("two").bind({"what": "three"}, id="x"))
    assert [(handle.queue, handle.id) for handle in handles] == [("two", "x")]
    await caller.commit()
    async with app.worker(burst=True) as worker:
        await until(lambda: len(ran) == 3)
        worker.stop()
    assert sorted(ran) == ["one", "three", "two"]
    assert await caller.notes() == ["before", "between"]


async def test_a_waiting_worker_finds_a_committed_job_soon(app: Holdfast[Any], caller: Caller) -> None:
    @app.task(name="t")
    async def task() -> str:
        return "found"

    async with app.worker():
        await asyncio.sleep(0.2)
        (handle,) = app.enqueue_in(caller.transaction, task.bind())
        await caller.commit()
        assert await handle.result(wait=5) == "found"


async def test_ids_conflicts_and_options_work_in_a_transaction(app: Holdfast[Any], caller: Caller) -> None:
    @app.task(name="t", unique="{n}")
    async def task(n: int, value: str = "") -> str:
        return value

    await task.enqueue(1, "first")
    app.enqueue_in(caller.transaction, task.bind(1, "second"), task.using(priority=9).bind(2, "other"))
    app.enqueue_in(caller.transaction, task.using(id="3", on_conflict="update").bind(3, "third"))
    await caller.commit()
    queue = app.queue("t")
    info = await queue.get("2")
    assert info is not None
    assert info.priority == 9
    assert (await queue.stats()).ready == 3
    async with app.worker():
        assert [await queue.result(id) for id in ("1", "2", "3")] == ["first", "other", "third"]


async def test_many_jobs_fit_into_one_transaction(app: Holdfast[Any], caller: Caller) -> None:
    queue = app.queue("q")
    handles = app.enqueue_in(caller.transaction, *(queue.bind(n) for n in range(300)))
    assert len(handles) == 300
    await caller.commit()
    assert (await queue.stats()).ready == 300
    first, last = await queue.get(handles[0].id), await queue.get(handles[-1].id)
    assert first is not None
    assert last is not None
    assert (first.payload, last.payload) == (0, 299)


async def test_an_app_that_is_not_open_may_enqueue_in_a_transaction(
    app: Holdfast[Any], make_app: AppMaker, caller: Caller
) -> None:
    closed = make_app()

    @closed.stub(name="t")
    def task(n: int) -> None:
        raise NotImplementedError

    closed.enqueue_in(caller.transaction, task.using(id="a").bind(7))
    await caller.commit()
    info = await app.queue("t").get("a")
    assert info is not None
    assert info.payload == {"n": 7}


async def test_refused_payload_leaves_the_transaction_usable(app: Holdfast[Any], caller: Caller) -> None:
    queue = app.queue("q")
    await caller.write("mine")
    with pytest.raises(PayloadRejected, match="at most 1048576"):
        app.enqueue_in(caller.transaction, queue.bind(b"x" * 2_000_000))
    app.enqueue_in(caller.transaction, queue.bind("good", id="a"))
    await caller.commit()
    assert await caller.notes() == ["mine"]
    info = await queue.get("a")
    assert info is not None
    assert info.payload == "good"


async def test_unbound_request_is_refused(app: Holdfast[Any], caller: Caller) -> None:
    with pytest.raises(OptionError, match="bind"):
        app.enqueue_in(caller.transaction, {"not": "bound"})  # type: ignore[arg-type]


async def test_object_that_is_not_a_transaction_is_refused(app: Holdfast[Any], tmp_path: Path) -> None:
    bound = app.queue("q").bind(1)
    elsewhere = sqlite3.connect(tmp_path / "elsewhere.db")
    try:
        for wrong in (None, object(), "BEGIN", elsewhere):
            with pytest.raises(OptionError):
                app.enqueue_in(wrong, bound)
    finally:
        elsewhere.close()
    assert (await app.stats()).queues == []


# SQLite


@pytest.fixture
async def on_file(tmp_path: Path) -> AsyncIterator[Holdfast[Any]]:
    async with Holdfast(f"sqlite:///{tmp_path}/jobs.db") as app:
        yield app


async def test_a_sqlite_handle_knows_what_was_placed_if_it_commits(on_file: Holdfast[Any], tmp_path: Path) -> None:
    await on_file.queue("q").enqueue("there", id="a")
    with sqlite3.connect(tmp_path / "jobs.db") as db:
        old, new = on_file.enqueue_in(db, on_file.queue("q").bind(1, id="a"), on_file.queue("q").bind(2, id="b"))
    db.close()
    assert (old.placed, new.placed) == (Placed.DUPLICATE, Placed.NEW)
    lease = await on_file.queue("q").lease(wait=0)
    assert lease is not None
    await lease.complete("done")
    assert await old.result(wait=0) == "done"


async def test_a_duplicate_in_a_transaction_is_raised_if_asked_for(on_file: Holdfast[Any], tmp_path: Path) -> None:
    await on_file.queue("q").enqueue("there", id="a")
    db = sqlite3.connect(tmp_path / "jobs.db")
    try:
        with pytest.raises(DuplicateJob, match="'a' in q"):
            on_file.enqueue_in(db, on_file.queue("q").bind(1, id="a", on_conflict="raise"))
    finally:
        db.rollback()
        db.close()


async def test_error_in_the_block_of_the_caller_rolls_the_job_back(on_file: Holdfast[Any], tmp_path: Path) -> None:
    def block() -> None:
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as db, db:
            on_file.enqueue_in(db, on_file.queue("q").bind(1, id="a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert await on_file.queue("q").get("a") is None


# Pipelines


@pytest.fixture
async def on_server() -> AsyncIterator[Holdfast[Any]]:
    server = servers.shared("valkey")
    assert server is not None
    async with Holdfast(server.url, namespace=f"test-{uuid.uuid4().hex[:12]}") as app:
        yield app
        await app.queue("q").delete()


async def test_a_pipeline_handle_waits_for_the_run_that_the_commit_asked_for(on_server: Holdfast[Any]) -> None:
    server = servers.shared("valkey")
    assert server is not None
    queue = on_server.queue("q")
    await queue.enqueue("first", id="a")
    lease = await queue.lease(wait=0)
    assert lease is not None
    assert await lease.complete("old result")
    client = redis.asyncio.Redis(port=server.port)
    async with client.pipeline() as pipeline:
        (handle,) = on_server.enqueue_in(pipeline, queue.bind("second", id="a", on_conflict="update"))
        assert handle.placed is None
        await pipeline.execute()
    await client.aclose()
    with pytest.raises(WaitTimeout):
        await handle.result(wait=0)
    lease = await queue.lease(wait=5)
    assert lease is not None
    assert lease.payload == "second"
    assert await lease.complete("new result")
    assert await handle.result(wait=5) == "new result"


# Memory


async def test_memory_has_no_transactions_and_names_storages_that_have() -> None:
    async with Holdfast("memory://") as app:
        db = sqlite3.connect(":memory:")
        try:
            with pytest.raises(OptionError, match="use a SQLite file, Redis or Valkey"):
                app.enqueue_in(db, app.queue("q").bind(1))
        finally:
            db.close()
        assert (await app.stats()).queues == []


async def test_a_rehearsal_of_code_with_a_transaction_is_refused_clearly(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    db = sqlite3.connect(tmp_path / "mine.db")
    try:
        with rehearse(app):
            with pytest.raises(HoldfastError, match="transactions"):
                app.enqueue_in(db, app.queue("q").bind(1))
    finally:
        db.close()
