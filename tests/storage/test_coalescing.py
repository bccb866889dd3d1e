"""SQLite's lane: calls made at once share a transaction, and yet each is on its own."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.events import Event, EventKind
from holdfast._core.jobs import Complete, Job, Request, State, Update, Work
from holdfast._core.replies import CancelResult, Enqueued, Placed, SettleResult
from holdfast.errors import StorageFull
from holdfast.storage import audit, connect
from holdfast.storage.local.engine import Engine
from holdfast.storage.local.sqlite import SqliteStorage, connection, notify
from holdfast.storage.local.sqlite.connection import MAX_INLINE_ITEMS, ConnectionThread
from holdfast.storage.local.sqlite.table import SqliteTable
from holdfast.storage.local.table import Change, QueueMeta
from tests.storage.stage import fence


@pytest.fixture
async def storage(tmp_path: Path, clock: ManualClock) -> AsyncIterator[SqliteStorage]:
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        yield storage
        assert (await audit(storage, "q")).problems == []


@contextmanager
def commits(storage: SqliteStorage) -> Iterator[list[str]]:
    """The transactions that end meanwhile."""
    seen: list[str] = []
    db = storage._writer._db
    db.set_trace_callback(lambda statement: seen.append(statement) if statement in ("COMMIT", "ROLLBACK") else None)
    yield seen
    db.set_trace_callback(None)


async def enqueue(storage: SqliteStorage, id: str, **fields: Any) -> Enqueued:
    (reply,) = await storage.enqueue("q", [Request(id, Work(b"payload"), **fields)])
    return reply


async def get(storage: SqliteStorage, id: str) -> Job | None:
    (job,) = await storage.get("q", [id])
    return job


async def cancel(storage: SqliteStorage, id: str) -> CancelResult:
    (reply,) = await storage.cancel("q", [id])
    return reply


class Blocked:
    """The lane's thread, held up in a call until it is let go."""

    def __init__(self, storage: SqliteStorage) -> None:
        self._begun = threading.Event()
        self._go = threading.Event()
        self._task = asyncio.create_task(storage._writer.call(self._wait, writes=True))

    def _wait(self, engine: Engine) -> None:
        self._begun.set()
        assert self._go.wait(10), "nobody let go of the lane"

    async def __aenter__(self) -> Blocked:
        assert await asyncio.to_thread(self._begun.wait, 10)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._go.set()
        await self._task


async def line_up() -> None:
    """Let the tasks that were just made make their calls."""
    for _ in range(3):
        await asyncio.sleep(0)


async def is_idle(storage: SqliteStorage) -> bool:
    """Nothing is lined up, or will not be in a moment: results are handed out before the line is cleared."""
    for _ in range(100):
        if storage._writer._pending == 0:
            return True
        await asyncio.sleep(0.01)
    return False


# One transaction


async def test_a_hundred_calls_at_once_share_a_few_transactions(storage: SqliteStorage) -> None:
    with commits(storage) as seen:
        replies = await asyncio.gather(*(enqueue(storage, f"{n}") for n in range(100)))
    assert [reply.placed for reply in replies] == [Placed.NEW] * 100
    assert [reply.id for reply in replies] == [f"{n}" for n in range(100)]
    assert len(seen) <= 10


async def test_calls_of_all_kinds_that_line_up_share_one_transaction(storage: SqliteStorage) -> None:
    await enqueue(storage, "a")
    with commits(storage) as seen:
        async with Blocked(storage):
            calls = [
                asyncio.create_task(call)
                for call in (
                    enqueue(storage, "b"),
                    get(storage, "b"),
                    storage.claim("q", 1, worker="w1", lease_ms=1000),
                    cancel(storage, "b"),
                    storage.pause("q", True),
                    storage.sweep("q"),
                    storage.announce("w1", {}, ttl_ms=1000),
                )
            ]
            await line_up()
        await asyncio.gather(*calls)
    assert seen == ["COMMIT", "COMMIT"]  # The one that held it up, and the rest.


async def test_calls_for_different_queues_share_a_transaction_too(storage: SqliteStorage) -> None:
    with commits(storage) as seen:
        async with Blocked(storage):
            calls = [asyncio.create_task(storage.enqueue(f"q{n}", [Request("a", Work(b""))])) for n in range(50)]
            await line_up()
        await asyncio.gather(*calls)
    assert seen == ["COMMIT", "COMMIT"]
    assert len((await storage.snapshot()).queues) == 50


async def test_group_of_calls_has_a_limit(storage: SqliteStorage) -> None:
    with commits(storage) as seen:
        async with Blocked(storage):
            calls = [asyncio.create_task(enqueue(storage, f"{n}")) for n in range(2 * connection.MAX_GROUP + 1)]
            await line_up()
        await asyncio.gather(*calls)
    assert seen == ["COMMIT"] * (1 + 3)


# Each on its own


def break_for(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch, id: str, error: Exception) -> None:
    """Make a cancel of this id fail in the midst of a transaction, after it has written."""
    table = storage._writer.table
    write = table.write

    def broken(queue: str, changes: Sequence[Change], events: Sequence[Event]) -> None:
        write(queue, changes, events)
        if (id, EventKind.CANCELLED) in [(event.id, event.kind) for event in events]:
            raise error

    monkeypatch.setattr(table, "write", broken)


async def test_failing_call_does_not_affect_its_group(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(20):
        await enqueue(storage, f"{n}")
    error = RuntimeError("a bug")
    break_for(storage, monkeypatch, "7", error)
    async with Blocked(storage):
        calls = [asyncio.create_task(cancel(storage, f"{n}")) for n in range(20)]
        calls.append(asyncio.create_task(cancel(storage, "never")))
        await line_up()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    expected: list[object] = [*[CancelResult.CANCELLED] * 20, CancelResult.MISSING]
    expected[7] = error
    assert replies == expected
    assert [job.id for job in (await storage.claim("q", 20, worker="w1", lease_ms=1000)).jobs] == ["7"]


async def test_call_refused_by_a_full_disk_does_not_affect_its_group(storage: SqliteStorage) -> None:
    db = storage._writer._db
    async with Blocked(storage):
        large = storage.enqueue("q", [Request("large", Work(b"x" * 500_000))])
        calls = [asyncio.create_task(call) for call in (enqueue(storage, "a"), large, enqueue(storage, "b"))]
        await line_up()
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {pages + 10}")
    first, full, last = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(full, StorageFull)
    assert isinstance(first, Enqueued)
    assert isinstance(last, Enqueued)
    assert await get(storage, "large") is None
    assert last.generation > first.generation


async def test_failing_single_call_changes_nothing(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    await enqueue(storage, "a")
    break_for(storage, monkeypatch, "a", RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        await cancel(storage, "a")
    job = await get(storage, "a")
    assert job is not None
    assert job.state is State.WAITING
    assert (await enqueue(storage, "b")).placed is Placed.NEW


async def test_call_refused_by_validation_never_joins_a_group(storage: SqliteStorage) -> None:
    with commits(storage) as seen, pytest.raises(ValueError, match="priority"):
        await storage.enqueue("q", [Request("a", Work(b"", priority=99))])
    assert seen == []


def no_sockets_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def socket(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(notify, "socket", SimpleNamespace(AF_UNIX=0, SOCK_DGRAM=0, socket=socket))


def no_right_to_clear_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(missing_ok: bool) -> None:
        raise PermissionError("the socket of another user")

    monkeypatch.setattr(notify, "Path", lambda address: SimpleNamespace(unlink=unlink))


@pytest.mark.parametrize("trouble", [no_sockets_left, no_right_to_clear_away])
async def test_hint_that_cannot_be_sent_neither_fails_nor_repeats_the_commit(
    storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with closing(sqlite3.connect(storage.path, isolation_level=None)) as db:
        db.execute("INSERT INTO holdfast_listeners VALUES (?, 'hf/q', 'all')", (f"{storage.path}-notify-gone",))
    trouble(monkeypatch)
    assert (await enqueue(storage, "lone")).placed is Placed.NEW
    replies = await asyncio.gather(*(enqueue(storage, f"{n}") for n in range(10)))
    assert [reply.placed for reply in replies] == [Placed.NEW] * 10


class Disk:
    """A connection whose checkpoints go as the test wants."""

    def __init__(self, db: sqlite3.Connection, checkpoint: Callable[[], None]) -> None:
        self._db = db
        self._checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in statement:
            self._checkpoint()
        return self._db.execute(statement, *values)


@pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning")
async def test_failing_checkpoint_does_not_stop_the_writer(
    storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def fail() -> None:
        asked.set()
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(storage._writer, "_db", Disk(storage._writer._db, fail))
    monkeypatch.setattr(connection, "CHECKPOINT_EVERY", 1)
    async with asyncio.timeout(5):
        for n in range(5):
            assert (await enqueue(storage, f"{n}")).placed is Placed.NEW
    assert asked.is_set()
    monkeypatch.undo()


async def test_slow_checkpoint_does_not_block_the_loop(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, stood_still = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        if not go.wait(1):
            stood_still.set()

    monkeypatch.setattr(storage._writer, "_db", Disk(storage._writer._db, wait))
    monkeypatch.setattr(connection, "CHECKPOINT_EVERY", 1)
    await storage.enqueue("q", [Request(f"{n}", Work(b"")) for n in range(MAX_INLINE_ITEMS + 1)])
    assert await asyncio.to_thread(begun.wait, 10)
    call = asyncio.create_task(enqueue(storage, "a"))
    await line_up()
    go.set()
    assert (await call).placed is Placed.NEW
    assert not stood_still.is_set()
    monkeypatch.undo()


# In order


async def test_calls_are_applied_in_the_order_in_which_they_were_made_across_verbs(storage: SqliteStorage) -> None:
    async def life(id: str) -> list[object]:
        calls = (
            enqueue(storage, id),
            enqueue(storage, id),
            cancel(storage, id),
            get(storage, id),
            enqueue(storage, id),
            enqueue(storage, id, update=Update()),
            cancel(storage, id),
            cancel(storage, id),
        )
        return list(await asyncio.gather(*calls))

    lives = await asyncio.gather(*(life(f"{n}") for n in range(30)))
    for new, kept, cancelled, seen, again, updated, stopped, ended in lives:
        placed = [reply.placed for reply in (new, kept, again, updated) if isinstance(reply, Enqueued)]
        assert placed == [Placed.NEW, Placed.DUPLICATE, Placed.NEW, Placed.UPDATED]
        assert (cancelled, stopped, ended) == (CancelResult.CANCELLED, CancelResult.CANCELLED, CancelResult.FINISHED)
        assert isinstance(seen, Job)
        assert seen.state is State.CANCELLED


async def test_a_small_call_does_not_overtake_a_large_one(storage: SqliteStorage) -> None:
    requests = [Request(f"{n}", Work(b"")) for n in range(10 * MAX_INLINE_ITEMS)]
    large, small = await asyncio.gather(storage.enqueue("q", requests), get(storage, requests[-1].id))
    assert [reply.placed for reply in large] == [Placed.NEW] * len(requests)
    assert small is not None


async def test_generations_rise_in_the_order_of_the_calls(storage: SqliteStorage) -> None:
    replies = await asyncio.gather(*(enqueue(storage, f"{n}") for n in range(100)))
    generations = [reply.generation for reply in replies]
    assert generations == sorted(set(generations))


# Cancelled callers


async def test_a_cancelled_caller_that_was_not_yet_sent_has_no_effect(storage: SqliteStorage) -> None:
    async with Blocked(storage):
        leaves, stays = asyncio.create_task(enqueue(storage, "a")), asyncio.create_task(enqueue(storage, "b"))
        await line_up()
        leaves.cancel()
        await line_up()
    with pytest.raises(asyncio.CancelledError):
        await leaves
    assert (await stays).placed is Placed.NEW
    assert await get(storage, "a") is None


async def test_a_cancelled_caller_that_was_sent_keeps_its_effect(
    storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, go = threading.Event(), threading.Event()
    table = storage._writer.table
    plain = table.open

    def slow(queue: str) -> QueueMeta:
        sent.set()
        assert go.wait(10)
        return plain(queue)

    monkeypatch.setattr(table, "open", slow)
    requests = [Request(f"{n}", Work(b"")) for n in range(MAX_INLINE_ITEMS + 1)]
    call = asyncio.create_task(storage.enqueue("q", requests))
    assert await asyncio.to_thread(sent.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go.set()
    assert await get(storage, "0") is not None


async def test_single_caller_cancelled_at_once_keeps_its_effect_and_blocks_no_call(
    storage: SqliteStorage,
) -> None:
    call = asyncio.create_task(enqueue(storage, "a"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await get(storage, "a") is not None
    assert await is_idle(storage)


async def test_callers_cancelled_among_many_do_not_block_later_calls(storage: SqliteStorage) -> None:
    calls = [asyncio.create_task(enqueue(storage, f"{n}")) for n in range(200)]
    await line_up()
    for call in calls[::2]:
        call.cancel()
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert [reply.placed for reply in replies[1::2] if isinstance(reply, Enqueued)] == [Placed.NEW] * 100
    await enqueue(storage, "last")
    assert await is_idle(storage)


# Threads


def threads_of(lane: ConnectionThread, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that run transactions."""
    seen: list[str] = []
    run: Callable[..., None] = lane._transaction

    def noted(*arguments: Any, **options: Any) -> None:
        seen.append(threading.current_thread().name)
        run(*arguments, **options)

    monkeypatch.setattr(lane, "_transaction", noted)
    return seen


async def test_single_small_call_runs_on_the_calling_thread(
    storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threads_of(storage._writer, monkeypatch)
    await enqueue(storage, "a")
    (job,) = (await storage.claim("q", 1, worker="w1", lease_ms=1000)).jobs
    assert await storage.settle("q", [Complete(job.id, fence(job))], worker="w1") == [SettleResult.OK]
    assert await get(storage, "a") is None
    assert seen == ["MainThread"] * 4


async def test_large_call_does_not_block_the_loop(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_of(storage._writer, monkeypatch)
    await storage.enqueue("q", [Request(f"{n}", Work(b"")) for n in range(MAX_INLINE_ITEMS + 1)])
    await storage.claim("q", MAX_INLINE_ITEMS + 1, worker="w1", lease_ms=1000)
    assert seen == ["holdfast-sqlite"] * 2


async def test_call_with_large_payload_or_result_does_not_block_the_loop(
    storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = b"x" * 500_000
    await enqueue(storage, "a")
    (job,) = (await storage.claim("q", 1, worker="w1", lease_ms=1000)).jobs
    seen = threads_of(storage._writer, monkeypatch)
    await storage.enqueue("q", [Request("b", Work(large))])
    await storage.settle("q", [Complete(job.id, fence(job), large, result_ttl_ms=1000)], worker="w1")
    assert seen == ["holdfast-sqlite"] * 2


@pytest.mark.parametrize("synchronous", ["full", "extra"])
async def test_call_that_waits_for_the_disk_runs_on_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str
) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db?synchronous={synchronous}") as storage:
        assert isinstance(storage, SqliteStorage)
        seen = threads_of(storage._writer, monkeypatch)
        await enqueue(storage, "a")
        await get(storage, "a")
        assert seen == ["holdfast-sqlite"] * 2
        level = {"full": 2, "extra": 3}[synchronous]
        assert storage._writer._db.execute("PRAGMA synchronous").fetchone() == (level,)


async def test_long_read_does_not_delay_writers(storage: SqliteStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    plain = SqliteTable.queues

    def slow(table: SqliteTable) -> list[str]:
        begun.set()
        assert go.wait(10)
        return plain(table)

    monkeypatch.setattr(SqliteTable, "queues", slow)
    looking = asyncio.create_task(storage.snapshot())
    assert await asyncio.to_thread(begun.wait, 10)
    async with asyncio.timeout(5):
        assert (await enqueue(storage, "a")).placed is Placed.NEW
    go.set()
    await looking


async def test_loop_runs_other_tasks_during_a_long_series_of_calls(storage: SqliteStorage) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    for n in range(200):
        await enqueue(storage, f"{n}")
    task.cancel()
    assert turns >= 200


async def test_calls_of_several_loops_and_threads_do_not_interfere(storage: SqliteStorage) -> None:
    async def some(name: str) -> list[Enqueued]:
        return list(await asyncio.gather(*(enqueue(storage, f"{name}-{n}") for n in range(50))))

    def elsewhere(name: str) -> list[Enqueued]:
        return asyncio.run(some(name))

    async with asyncio.timeout(20):
        replies = await asyncio.gather(some("here"), *(asyncio.to_thread(elsewhere, f"t{n}") for n in range(3)))
    assert {reply.placed for some in replies for reply in some} == {Placed.NEW}
    generations = [reply.generation for some in replies for reply in some]
    assert len(set(generations)) == 200


async def test_closing_finishes_queued_calls(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "jobs.db") as storage:
        calls = [asyncio.create_task(enqueue(storage, f"{n}")) for n in range(50)]
        await line_up()
    assert [(await call).placed for call in calls] == [Placed.NEW] * 50
    begun = time.monotonic()
    async with SqliteStorage(tmp_path / "jobs.db") as again:
        assert (await again.snapshot()).queues[0].ready == 50
    assert time.monotonic() - begun < 5


async def test_reader_closes_before_writer_so_that_no_log_is_left(tmp_path: Path) -> None:
    closed: list[str] = []
    begun, go = threading.Event(), threading.Event()

    class Recorded:
        def __init__(self, name: str, db: sqlite3.Connection) -> None:
            self._name = name
            self._db = db

        def __getattr__(self, attribute: str) -> object:
            return getattr(self._db, attribute)

        def close(self) -> None:
            closed.append(self._name)
            self._db.close()

    def read(engine: Engine) -> None:
        begun.set()
        assert go.wait(10)

    async with SqliteStorage(tmp_path / "jobs.db") as storage:
        await enqueue(storage, "a")
        for name, thread in (("writer", storage._writer), ("reader", storage._reader)):
            watched: Any = thread
            watched._db = Recorded(name, thread._db)
        reading = asyncio.create_task(storage._reader.call(read, writes=False))
        assert await asyncio.to_thread(begun.wait, 10)
        asyncio.get_running_loop().call_later(0.2, go.set)
    await reading
    assert closed == ["reader", "writer"]
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.db"]


async def test_read_that_finds_the_file_busy_waits(tmp_path: Path) -> None:
    async with SqliteStorage(tmp_path / "jobs.db") as storage:
        await storage.enqueue("q", [Request("a", Work(b"1"))])
        for each in (storage._writer, storage._reader):
            begin, busy = each.table.begin, sqlite3.OperationalError("database is locked")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
            left: list[Exception] = [busy] * 3

            def recovering(begin: Callable[[], None] = begin, left: list[Exception] = left) -> None:
                if left:
                    raise left.pop()
                begin()

            each.table.begin = recovering  # type: ignore[method-assign]
        (job,) = await storage.get("q", ["a"])
        assert job is not None
        assert len((await storage.scan("q")).jobs) == 1
