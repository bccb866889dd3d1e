"""Enqueueing inside a transaction of the caller's own: the job exists exactly if that commits, and is the very job
that a plain enqueue makes."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import pytest
import redis
import redis.asyncio

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Request, Update, Work
from holdfast._core.replies import Enqueued, Placed, SettleResult
from holdfast.errors import LayoutTooNew, OptionError, PayloadRejected, StorageFull, StorageUnavailable
from holdfast.storage import Storage, connect
from holdfast.storage.local.sqlite import SqliteStorage
from tests import servers
from tests.storage.harness import Harness
from tests.storage.stage import Stage

STORAGES = ("sqlite", "valkey", "redis")
WALL = ManualClock().now_us()
SECOND = 1_000_000


class Caller(Protocol):
    """Whoever has a transaction: writes notes in it, and ends it."""

    def transaction(self) -> object: ...
    async def write(self, note: str) -> None: ...
    async def commit(self) -> list[Any]:
        """What the transaction's commands were answered, where that comes only now."""
        ...

    async def roll_back(self) -> None: ...
    async def notes(self) -> list[str]:
        """What everybody sees of them."""
        ...

    async def close(self) -> None: ...


class SqliteCaller:
    """A connection whose transactions Python's module begins, or the caller explicitly."""

    def __init__(self, path: Path, explicit: bool) -> None:
        self.path = path
        self.explicit = explicit
        self.db = sqlite3.connect(path)
        self.db.execute("CREATE TABLE IF NOT EXISTS notes (note TEXT)")
        if explicit:
            self.db.isolation_level = None

    def transaction(self) -> sqlite3.Connection:
        if self.explicit and not self.db.in_transaction:
            self.db.execute("BEGIN")
        return self.db

    async def write(self, note: str) -> None:
        self.transaction().execute("INSERT INTO notes VALUES (?)", (note,))

    async def commit(self) -> list[Any]:
        self.db.commit()
        return []

    async def roll_back(self) -> None:
        self.db.rollback()

    async def notes(self) -> list[str]:
        with sqlite3.connect(self.path) as other:
            found = [note for (note,) in other.execute("SELECT note FROM notes")]
        other.close()
        return found

    async def close(self) -> None:
        self.db.close()


class BlockingCaller:
    """A pipeline of redis.Redis."""

    def __init__(self, port: int) -> None:
        self.client = redis.Redis(port=port)
        self.key = f"notes-{uuid.uuid4().hex}"
        self.pipeline = self.client.pipeline()

    def transaction(self) -> object:
        return self.pipeline

    async def write(self, note: str) -> None:
        self.pipeline.rpush(self.key, note)

    async def commit(self) -> list[Any]:
        return self.pipeline.execute()

    async def roll_back(self) -> None:
        self.pipeline.reset()

    async def notes(self) -> list[str]:
        return [note.decode() for note in cast("list[bytes]", self.client.lrange(self.key, 0, -1))]

    async def close(self) -> None:
        self.client.delete(self.key)
        self.client.close()


class AsyncioCaller:
    """A pipeline of redis.asyncio.Redis."""

    def __init__(self, port: int) -> None:
        self.client = redis.asyncio.Redis(port=port)
        self.key = f"notes-{uuid.uuid4().hex}"
        self.pipeline = self.client.pipeline()

    def transaction(self) -> object:
        return self.pipeline

    async def write(self, note: str) -> None:
        self.pipeline.rpush(self.key, note)

    async def commit(self) -> list[Any]:
        return await self.pipeline.execute()

    async def roll_back(self) -> None:
        await self.pipeline.aclose()

    async def notes(self) -> list[str]:
        return [note.decode() for note in cast("list[bytes]", await self.client.lrange(self.key, 0, -1))]

    async def close(self) -> None:
        await self.client.delete(self.key)
        await self.client.aclose()


@pytest.fixture(params=["usual", "other"])
async def caller(request: pytest.FixtureRequest, harness: Harness, stage: Stage) -> AsyncIterator[Caller]:
    found: Caller
    if isinstance(stage.storage, SqliteStorage):
        found = SqliteCaller(stage.storage.path, explicit=request.param == "other")
    else:
        server = servers.shared("valkey" if harness.name == "valkey" else "redis")
        assert server is not None
        found = BlockingCaller(server.port) if request.param == "usual" else AsyncioCaller(server.port)
    yield found
    await found.close()


@pytest.fixture
async def plain(stage: Stage, harness: Harness, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Stage]:
    """The same history somewhere else, on the same clock, with no transactions."""
    (tmp_path / "plain").mkdir()
    async with harness.open(clock, tmp_path / "plain") as storage:
        yield Stage(storage, clock)


def request(id: str = "a", payload: bytes | None = b"payload", **options: Any) -> Request:
    fields = {name: options.pop(name) for name in ("run_at", "delay_ms", "update", "keep_ms") if name in options}
    return Request(id, Work(payload, **options), custom_id=True, **fields)


async def contents(stage: Stage) -> object:
    """All that can be read of the queues."""
    snapshot = await stage.storage.snapshot()
    found: list[object] = []
    for stats in snapshot.queues:
        page = await stage.storage.scan(stats.queue, limit=200)
        found.append((stats, page.jobs, await stage.storage.get(stats.queue, [job.id for job in page.jobs])))
    return found


# Exactly if it commits


async def test_the_callers_write_and_the_job_appear_together(stage: Stage, caller: Caller) -> None:
    await caller.write("one")
    stage.storage.enqueue_in(caller.transaction(), "q", [request("a", b"with one")])
    await caller.write("two")
    assert (await stage.get("a"), await caller.notes()) == (None, [])
    await caller.commit()
    assert await caller.notes() == ["one", "two"]
    assert (await stage.claim_one()).payload == b"with one"


async def test_rolled_back_job_never_existed(stage: Stage, caller: Caller) -> None:
    await stage.enqueue("before", delay=60)
    before = await contents(stage)
    await caller.write("one")
    stage.storage.enqueue_in(caller.transaction(), "q", [request("a"), request("before", b"new", update=Update())])
    stage.storage.enqueue_in(caller.transaction(), "other", [request("b")])
    await caller.roll_back()
    assert await caller.notes() == []
    assert await contents(stage) == before
    assert await stage.claim() == []


async def test_transaction_with_only_enqueues_works(stage: Stage, caller: Caller) -> None:
    stage.storage.enqueue_in(caller.transaction(), "q", [request("a")])
    await caller.roll_back()
    stage.storage.enqueue_in(caller.transaction(), "q", [request("b")])
    await caller.commit()
    assert [job.id for job in await stage.claim(5)] == ["b"]


async def test_a_new_queue_is_on_the_list_with_its_first_job(stage: Stage, caller: Caller) -> None:
    stage.storage.enqueue_in(caller.transaction(), "q", [request("a")])
    stage.storage.enqueue_in(caller.transaction(), "q/failed", [request("b")])
    await caller.commit()
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == ["q", "q/failed"]


async def test_a_dropped_queue_is_on_the_list_again(stage: Stage, caller: Caller) -> None:
    await stage.enqueue("a")
    while await stage.storage.drop("q"):
        pass
    stage.storage.enqueue_in(caller.transaction(), "q", [request("a")])
    await caller.commit()
    assert (await stage.stats()).ready == 1


async def test_it_works_before_the_storage_is_opened(stage: Stage, caller: Caller) -> None:
    replies = stage.storage.clone().enqueue_in(caller.transaction(), "q", [request("a")])
    assert len(replies) == 1
    await caller.commit()
    assert (await stage.claim_one()).id == "a"


async def test_transactions_beside_a_busy_worker_lose_nothing(stage: Stage, caller: Caller) -> None:
    ran: list[str] = []
    for n in range(60):
        await caller.write(f"{n}")
        stage.storage.enqueue_in(caller.transaction(), "q", [request(f"j{n}")])
        await (caller.commit() if n % 3 else caller.roll_back())
        if n % 2:
            for job in await stage.claim(3):
                await stage.complete(job, ttl=0)
                ran.append(job.id)
    ran += [job.id for job in await stage.claim(100)]
    assert [id.removeprefix("j") for id in ran] == await caller.notes() == [str(n) for n in range(60) if n % 3]


# The very same job


class Case(NamedTuple):
    """A history, and calls that are made after it: all of them in one transaction, or plainly one after the other."""

    calls: list[list[Request]]
    before: Callable[[Stage], Awaitable[object]] | None = None


async def _running(stage: Stage) -> None:
    await stage.enqueue("a", b"old")
    await stage.claim_one()


async def _completed(stage: Stage, ttl: float = 60, dedup: float = 60) -> None:
    await _running(stage)
    await stage.complete(await stage.the("a"), ttl=ttl, dedup=dedup)
    stage.clock.advance(1)


async def _failed(stage: Stage) -> None:
    await _running(stage)
    await stage.fail(await stage.the("a"))


async def _retrying(stage: Stage) -> None:
    await _running(stage)
    await stage.retry(await stage.the("a"), delay=30)


async def _deferred(stage: Stage) -> None:
    await _running(stage)
    await stage.enqueue("a", b"next", update=Update(), delay=5)


async def _forgettable(stage: Stage) -> None:
    for id in "bcde":
        await stage.enqueue(id)
    for job in await stage.claim(4):
        await stage.complete(job, ttl=1)
    stage.clock.advance(5)


async def _clock_stepped_back(stage: Stage) -> None:
    await stage.enqueue("a", run_at=WALL + 60 * SECOND)
    stage.clock.advance(-30)


CASES = {
    "new": Case([[request()]]),
    "delay": Case([[request(delay_ms=5000)]]),
    "run_at": Case([[request(run_at=WALL + 90 * SECOND)]]),
    "run_at in the past": Case([[request(run_at=WALL - 90 * SECOND)]]),
    "priority": Case([[request(priority=9), request("b", priority=0), request("c")]]),
    "all options": Case([[request(codec="msgpack", timeout_ms=5, max_retries=2, result_ttl_ms=7, dedup_ttl_ms=9)]]),
    "an empty payload": Case([[request(payload=b"")]]),
    "bytes that are no text": Case([[request("\udcff\udcfe", b"\xff\x00")]]),
    "somebody will wait": Case([[request(keep_ms=5000)]]),
    "several": Case([[request(f"j{n}", bytes([n]), delay_ms=n % 3) for n in range(100)]]),
    "the same twice": Case([[request(payload=b"1"), request(payload=b"2"), request(payload=b"3", update=Update())]]),
    "several calls": Case([[request("a"), request("b")], [request("c")], [request("a", b"new", update=Update())]]),
    "a duplicate of a waiting one": Case([[request()]], lambda stage: stage.enqueue("a", b"old", delay=9)),
    "a duplicate of a running one": Case([[request(keep_ms=9)]], _running),
    "an update": Case([[request(update=Update())]], lambda stage: stage.enqueue("a", b"old", delay=9)),
    "a later time": Case([[request(update=Update(run_at="if_later"))]], lambda stage: stage.enqueue(delay=9)),
    "only a time": Case([[request(update=Update(payload=False))]], lambda stage: stage.enqueue(delay=9)),
    "an update with no payload": Case([[request(payload=None, update=Update(payload=False))]], _completed),
    "an update of nothing": Case([[request(payload=None, update=Update(payload=False))]]),
    "an update of a running one": Case([[request(delay_ms=3, update=Update())]], _running),
    "an update of a deferred one": Case([[request(update=Update(run_at="if_earlier"))]], _deferred),
    "an update of a retrying one": Case([[request(update=Update())]], _retrying),
    "a cached one": Case([[request()]], _completed),
    "an update of a completed one": Case([[request(update=Update())]], _completed),
    "a completed one again": Case([[request()]], lambda stage: _completed(stage, dedup=0)),
    "a failed one again": Case([[request()]], _failed),
    "records to forget in passing": Case([[request()], [request("b")]], _forgettable),
    "a paused queue": Case([[request()]], lambda stage: stage.storage.pause("q", True, reason="why")),
    "after the clock stepped back": Case([[request(update=Update(run_at="if_earlier"))]], _clock_stepped_back),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_job_is_the_same_as_without_a_transaction(
    stage: Stage, plain: Stage, caller: Caller, name: str
) -> None:
    case = CASES[name]
    if case.before is not None:
        await case.before(stage)
        stage.clock._us, at = WALL, stage.clock.now_us()
        await case.before(plain)
        assert stage.clock.now_us() == at
    await caller.write("note")
    replies = [stage.storage.enqueue_in(caller.transaction(), "q", call) for call in case.calls]
    told = (await caller.commit())[1:]
    expected = [await plain.storage.enqueue("q", call) for call in case.calls]
    if told:
        assert replies == [[None] * len(call) for call in case.calls]
        assert [_words(reply) for reply in told] == [[(e.placed, e.generation) for e in call] for call in expected]
    else:
        assert replies == expected
    assert await contents(stage) == await contents(plain)
    stage.clock.advance(100)
    assert [(job.id, job.payload) for job in await stage.claim(200)] == [
        (job.id, job.payload) for job in await plain.claim(200)
    ]


def _words(reply: list[Any]) -> list[tuple[str | None, int]]:
    return [(None if placed is None else placed.decode(), generation) for placed, generation in reply]


# Wrong uses, on every storage


@pytest.fixture(params=["memory", "sqlite", "redis"])
def closed(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/jobs.db", "redis": "redis://localhost:1"}
    return connect(urls[request.param], max_payload=10)


def test_requests_are_validated_first(closed: Storage) -> None:
    with pytest.raises(OptionError, match="queue name"):
        closed.enqueue_in(None, "no good", [request()])
    with pytest.raises(PayloadRejected, match="at most 10"):
        closed.enqueue_in(None, "q", [request(payload=b"x" * 11)])
    with pytest.raises(OptionError, match="at most 250"):
        closed.enqueue_in(None, "q", [request()] * 251)
    assert closed.enqueue_in(None, "q", []) == []


def test_object_that_is_not_a_transaction_is_named(closed: Storage) -> None:
    with pytest.raises(OptionError, match=r"no transactions|builtins\.dict is (no|not a) transaction"):
        closed.enqueue_in({}, "q", [request()])


def test_memory_has_no_transactions_and_names_storages_that_have() -> None:
    with (
        closing(sqlite3.connect(":memory:")) as db,
        pytest.raises(OptionError, match="use a SQLite file, Redis or Valkey"),
    ):
        connect("memory://").enqueue_in(db, "q", [request()])


# SQLite


@pytest.fixture
async def file(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Stage]:
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        stage = Stage(storage, clock)
        yield stage
        assert await stage.problems() == []


def path_of(stage: Stage) -> Path:
    return cast(SqliteStorage, stage.storage).path


@pytest.fixture
def db(file: Stage) -> Any:
    db = sqlite3.connect(path_of(file), timeout=0)
    db.execute("CREATE TABLE notes (note TEXT)")
    yield db
    db.close()


async def test_the_replies_of_sqlite_come_at_once(file: Stage, db: sqlite3.Connection) -> None:
    (reply,) = file.storage.enqueue_in(db, "q", [request()])
    assert isinstance(reply, Enqueued)
    assert (reply.id, reply.placed) == ("a", Placed.NEW)
    db.commit()
    assert (await file.the("a")).generation == reply.generation


async def test_autocommit_connection_must_have_begun_a_transaction(file: Stage, db: sqlite3.Connection) -> None:
    db.isolation_level = None
    with pytest.raises(OptionError, match="begin one first"):
        file.storage.enqueue_in(db, "q", [request()])
    db.execute("BEGIN")
    file.storage.enqueue_in(db, "q", [request()])
    assert await file.get("a") is None
    db.execute("COMMIT")
    assert await file.get("a") is not None


@pytest.mark.parametrize(("autocommit", "begun"), [(True, False), (True, True), (False, True), (-1, False)])
async def test_autocommit_modes_of_newer_pythons_are_supported(
    file: Stage, autocommit: int, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "LEGACY_TRANSACTION_CONTROL", -1, raising=False)
    connection = type("Connection", (sqlite3.Connection,), {"autocommit": autocommit})
    db: sqlite3.Connection = sqlite3.connect(path_of(file), factory=connection)
    if begun:
        db.execute("BEGIN")
    if autocommit is True and not begun:
        with pytest.raises(OptionError, match="begin one first"):
            file.storage.enqueue_in(db, "q", [request()])
    else:
        file.storage.enqueue_in(db, "q", [request()])
        db.execute("COMMIT")
        assert await file.get("a") is not None
    db.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_row_and_text_factories_of_the_caller_are_kept(file: Stage, db: sqlite3.Connection, fails: bool) -> None:
    def rows(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
        return {name[0]: value for name, value in zip(cursor.description, row, strict=True)}

    await file.enqueue("a", b"old")
    await file.storage.pause("q", True)
    db.row_factory, db.text_factory = rows, bytes
    if fails:
        with pytest.raises(OptionError, match="pass a connection to the same file"):
            SqliteStorage(path_of(file).with_name("other.db")).enqueue_in(db, "q", [request()])
    else:
        file.storage.enqueue_in(db, "q", [request("a", b"new", update=Update()), request("b")])
        db.commit()
        assert (await file.the("a")).payload == b"new"
    assert (db.row_factory, db.text_factory) == (rows, bytes)


async def test_connection_to_another_file_is_refused_with_both_names(
    file: Stage, db: sqlite3.Connection, tmp_path: Path
) -> None:
    other = SqliteStorage(tmp_path / "other.db")
    with pytest.raises(OptionError, match=f"{re.escape(str(path_of(file)))}.*{re.escape(str(other.path))}"):
        other.enqueue_in(db, "q", [request()])
    with closing(sqlite3.connect(":memory:")) as in_memory, pytest.raises(OptionError, match="a database in memory"):
        other.enqueue_in(in_memory, "q", [request()])
    assert not other.path.exists()


async def test_a_file_by_another_name_is_the_same_file(file: Stage, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path_of(file))
    link = SqliteStorage(tmp_path / "link.db", clock=file.clock)
    for n, (storage, path) in enumerate([(file.storage, link.path), (link, path_of(file))]):
        db = sqlite3.connect(path)
        storage.enqueue_in(db, "q", [request(f"{n}")])
        db.commit()
        db.close()
    assert [job.id for job in await file.claim(5)] == ["0", "1"]


async def test_a_connection_of_another_thread_or_a_closed_one_is_refused(file: Stage) -> None:
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(sqlite3.connect, path_of(file)).result()
        with pytest.raises(OptionError, match="same thread"):
            file.storage.enqueue_in(theirs, "q", [request()])
        other.submit(theirs.close).result()
    db = sqlite3.connect(path_of(file))
    db.close()
    with pytest.raises(OptionError, match="closed"):
        file.storage.enqueue_in(db, "q", [request()])


async def test_enqueue_in_a_new_file_creates_the_tables(tmp_path: Path, clock: ManualClock) -> None:
    storage = SqliteStorage(tmp_path / "new.db", clock=clock)
    db = sqlite3.connect(storage.path)
    for end in (db.rollback, db.commit):
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == []
        storage.enqueue_in(db, "q", [request()])
        assert db.in_transaction
        end()
    db.close()
    async with storage:
        stage = Stage(storage, clock)
        assert (await stage.claim_one()).id == "a"
        assert await stage.problems() == []


async def test_a_newer_layout_is_refused_and_the_transaction_goes_on(file: Stage, db: sqlite3.Connection) -> None:
    db.execute("UPDATE holdfast_meta SET value = 99 WHERE key = 'layout'")
    db.commit()
    db.execute("INSERT INTO notes VALUES ('mine')")
    with pytest.raises(LayoutTooNew, match="layout 99"):
        file.storage.enqueue_in(db, "q", [request()])
    db.commit()
    assert db.execute("SELECT note FROM notes").fetchall() == [("mine",)]


async def test_enqueue_in_that_fails_halfway_leaves_no_job(file: Stage, db: sqlite3.Connection) -> None:
    await file.enqueue("old", delay=60)
    db.execute(
        "CREATE TEMP TRIGGER halfway BEFORE UPDATE ON holdfast_queues BEGIN SELECT RAISE(ABORT, 'no further'); END"
    )
    db.execute("INSERT INTO notes VALUES ('mine')")
    with pytest.raises(StorageUnavailable, match="no further"):
        file.storage.enqueue_in(db, "q", [request("a"), request("b")])
    db.commit()
    assert db.execute("SELECT note FROM notes").fetchall() == [("mine",)]
    assert await file.storage.get("q", ["a", "b"]) == [None, None]
    with pytest.raises(StorageUnavailable, match="no further"):
        file.storage.enqueue_in(db, "q", [request("a"), request("b")])
    assert not db.in_transaction


async def test_enqueue_in_raises_when_sqlite_rolls_the_transaction_back(file: Stage, db: sqlite3.Connection) -> None:
    await file.enqueue("old", delay=60)
    db.execute("CREATE TEMP TRIGGER t BEFORE UPDATE ON holdfast_queues BEGIN SELECT RAISE(ROLLBACK, 'over'); END")
    db.execute("INSERT INTO notes VALUES ('mine')")
    with pytest.raises(StorageUnavailable, match="over"):
        file.storage.enqueue_in(db, "q", [request()])
    assert not db.in_transaction
    assert db.execute("SELECT note FROM notes").fetchall() == []


async def test_full_disk_raises_storage_full(file: Stage, db: sqlite3.Connection) -> None:
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageFull, match="no room left"):
        file.storage.enqueue_in(db, "q", [request(payload=b"x" * 100_000)])
    assert not db.in_transaction


async def test_a_locked_file_is_unavailable_and_nothing_is_begun(file: Stage, db: sqlite3.Connection) -> None:
    other = sqlite3.connect(path_of(file))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable, match="locked by another transaction"):
        file.storage.enqueue_in(db, "q", [request()])
    assert not db.in_transaction
    other.rollback()
    other.close()
    file.storage.enqueue_in(db, "q", [request()])
    db.commit()
    assert (await file.claim_one()).id == "a"


async def test_transaction_with_a_stale_read_is_refused_with_begin_immediate_as_advice(
    file: Stage, db: sqlite3.Connection
) -> None:
    db.execute("BEGIN")
    db.execute("SELECT * FROM notes").fetchall()
    await file.enqueue("b")
    with pytest.raises(StorageUnavailable, match="BEGIN IMMEDIATE"):
        file.storage.enqueue_in(db, "q", [request()])
    assert db.in_transaction
    db.rollback()
    assert [job.id for job in await file.claim(5)] == ["b"]


async def test_savepoints_of_the_callers_are_left_alone(file: Stage, db: sqlite3.Connection) -> None:
    db.isolation_level = None
    db.execute("BEGIN")
    db.execute("SAVEPOINT holdfast")
    file.storage.enqueue_in(db, "q", [request("a")])
    db.execute("ROLLBACK TO holdfast")
    file.storage.enqueue_in(db, "q", [request("b")])
    db.execute("RELEASE holdfast")
    db.execute("COMMIT")
    assert [job.id for job in await file.claim(5)] == ["b"]


async def test_callers_in_threads_and_a_worker_lose_nothing(file: Stage) -> None:
    def call(name: str) -> None:
        db = sqlite3.connect(path_of(file), timeout=20)
        for n in range(50):
            file.storage.enqueue_in(db, "q", [request(f"{name}{n}")])
            (db.commit if n % 5 else db.rollback)()
        db.close()

    callers = asyncio.gather(*(asyncio.to_thread(call, name) for name in ("a", "b")))
    ran: list[str] = []
    while not callers.done() or len(ran) < 80:
        for job in await file.claim(5):
            assert await file.complete(job, ttl=0) is SettleResult.OK
            ran.append(job.id)
        await asyncio.sleep(0.001)
    await callers
    assert sorted(ran) == sorted(f"{name}{n}" for name in ("a", "b") for n in range(50) if n % 5)
