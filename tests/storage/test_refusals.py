"""What is refused: every bad input gets a typed error that names it, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.events import Topic
from holdfast._core.jobs import Complete, Fail, LeaseRef, Release, Request, RetrySettlement, State, Update, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import HoldfastError, LayoutTooNew, OptionError, PayloadRejected, StorageFull, StorageUnavailable
from holdfast.storage import Storage, audit, connect
from holdfast.storage.local.sqlite import LAYOUT, SqliteStorage
from holdfast.storage.validation import MAX_CALL_BYTES, MAX_ITEMS, MAX_PAYLOAD_BYTES, clean_id
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence

# URLs

BAD_URLS: list[tuple[object, str]] = [
    ("postgres://host/jobs", "postgres://host/jobs"),
    ("SQLITE3:///jobs.db", "SQLITE3:///jobs.db"),
    ("http://host", "sqlite, memory, redis"),
    ("jobs.db", "jobs.db"),
    ("/srv/jobs.db", "/srv/jobs.db"),
    ("", "scheme"),
    (None, "NoneType"),
    (5, "int"),
    (b"sqlite:///jobs.db", "bytes"),
    (Path("jobs.db"), "Path"),
    ("sqlite:", "sqlite:///jobs.db"),
    ("sqlite://", "sqlite:///jobs.db"),
    ("sqlite:///", "sqlite:///jobs.db"),
    ("sqlite://host/jobs.db", "host"),
    ("sqlite://jobs.db", "sqlite:///jobs.db"),
    ("sqlite:///:memory:", "memory://"),
    ("sqlite:///a%00b", "a%00b"),
    ("sqlite:///jobs.db?mode=ro", "synchronous"),
    ("sqlite:///jobs.db?Synchronous=full", "synchronous"),
    ("sqlite:///jobs.db?synchronous=full&x=", "synchronous"),
    ("sqlite:///jobs.db#part", "sqlite://***"),
    ("sqlite:///jobs.db?synchronous=maybe", "maybe"),
    ("sqlite:///jobs.db?synchronous=", "NORMAL"),
    ("sqlite:///jobs.db?synchronous=1", "'1'"),
    ("memory://name?size=5", "none"),
    ("memory://name#part", "none"),
    ("redis://[::1", "redis://***"),
]


@pytest.mark.parametrize(("url", "says"), BAD_URLS, ids=lambda value: repr(value)[:40])
def test_url_of_an_unknown_storage_is_refused(
    url: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as refused:
        connect(url)
    assert says in str(refused.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("missing", ["redis", "hiredis"])
@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys", "redis+sentinel", "redis+cluster"])
def test_redis_without_its_extra_says_what_to_install(
    scheme: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(OptionError, match=r"pip install 'holdfast\[redis\]'"):
        connect(f"{scheme}://localhost:6379/0")


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@localhost/0",
        "redis://:hunter2@localhost/0",
        "redis://user:x@hunter2@localhost/0",
        "redis://user:hunter2/x@localhost/0",
        "redis://localhost/0?password=hunter2",
        "redis://user:hunter2@[::1",
        "postgres://user:hunter2@localhost/0",
        "sqlite://user:hunter2@localhost/jobs.db",
        "sqlite://user:hunter2@localhost/jobs.db?mode=ro",
        "memory://user:hunter2@name?size=5",
        "//user:hunter2@localhost/0",
        "user:hunter2@localhost/0",
        ":hunter2@localhost/0",
    ],
)
def test_a_refused_url_does_not_show_its_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(OptionError) as refused:
        connect(url)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize("scheme", ["sqlite:///jobs.db", "memory://"])
@pytest.mark.parametrize("namespace", ["", "a b", "a/b", "{a}", "a:b", "x" * 41, "a\n", 5, None], ids=repr)
def test_a_bad_namespace_is_refused(scheme: str, namespace: Any) -> None:
    with pytest.raises(OptionError, match="namespace"):
        connect(scheme, namespace=namespace)


@pytest.mark.parametrize("scheme", ["sqlite:///jobs.db", "memory://"])
@pytest.mark.parametrize("max_payload", [0, -1, "1MB", 1.5, True], ids=repr)
def test_a_bad_payload_limit_is_refused(scheme: str, max_payload: Any) -> None:
    with pytest.raises(OptionError, match="max_payload"):
        connect(scheme, max_payload=max_payload)


# Files


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def refused_to_open(path: Path) -> str:
    with pytest.raises(StorageUnavailable) as refused:
        async with connect(f"sqlite:///{path}"):
            pass
    assert str(path) in str(refused.value)
    return str(refused.value)


async def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    assert "folder" in await refused_to_open(tmp_path / "missing" / "jobs.db")
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [b"hello", b"not a database " * 1000, b"SQLite format 3\0", os.urandom(8192)])
async def test_file_that_is_not_a_database_is_left_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(content)
    assert "not a valid SQLite database" in await refused_to_open(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("part", [0.01, 0.05, 0.25, 0.5, 0.75])
async def test_truncated_database_is_refused_and_left_unchanged(tmp_path: Path, part: float) -> None:
    path = tmp_path / "jobs.db"
    async with connect(f"sqlite:///{path}") as storage:
        for n in range(30):
            await storage.enqueue("q", [Request(f"{n}", Work(b"x" * 500))])
    content = path.read_bytes()
    path.write_bytes(content[: round(len(content) * part)])
    before = path.read_bytes()
    await refused_to_open(path)
    assert path.read_bytes() == before


async def test_directory_as_a_database_is_refused(tmp_path: Path) -> None:
    await refused_to_open(tmp_path)


async def test_newer_layout_is_refused_and_left_unchanged(tmp_path: Path, clock: ManualClock) -> None:
    path = tmp_path / "jobs.db"
    async with connect(f"sqlite:///{path}", clock=clock) as storage:
        await storage.enqueue("q", [Request("a", Work(b"payload"))])
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE holdfast_meta SET value = ? WHERE key = 'layout'", (LAYOUT + 1,))
    before = path.read_bytes()
    with pytest.raises(LayoutTooNew, match=rf"layout {LAYOUT + 1}.* up to {LAYOUT}.*upgrade"):
        async with connect(f"sqlite:///{path}", clock=clock):
            pass
    assert path.read_bytes() == before


async def test_older_layout_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TABLE holdfast_meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        db.execute("INSERT INTO holdfast_meta VALUES ('layout', ?)", (LAYOUT - 1,))
    before = path.read_bytes()
    refusal = rf"layout {LAYOUT - 1}, which this Holdfast no longer reads \(it reads layout {LAYOUT}\): finish the jobs"
    with pytest.raises(StorageUnavailable, match=refusal):
        async with connect(f"sqlite:///{path}"):
            pass
    assert path.read_bytes() == before


async def test_layout_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with connect(f"sqlite:///{path}"):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE holdfast_meta SET value = 'newest'")
    with pytest.raises(HoldfastError, match="newest"):
        async with connect(f"sqlite:///{path}"):
            pass


def run_python(script: str, *arguments: object) -> str:
    """The output of a script in a process of its own, which must end by itself."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


READ_ONLY = """
    import asyncio, os, sys
    from holdfast.errors import StorageUnavailable
    from holdfast.storage import connect

    async def main():
        try:
            async with connect(f"sqlite:///{sys.argv[1]}"):
                print("opened")
        except StorageUnavailable as error:
            print(error)

    asyncio.run(main())
    if os.getuid() == 0:
        os.setuid(65534)
    sys.argv.pop(1)
    asyncio.run(main())
"""
"""Opens its first argument with all rights, which also loads what Python loads late, then its second without."""


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="there is no way to be somebody else")
def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    """In a process without rights: root is never refused."""
    with tempfile.TemporaryDirectory(prefix="hf") as name:
        folder = Path(name)
        folder.chmod(0o555)
        says = run_python(READ_ONLY, tmp_path / "jobs.db", folder / "jobs.db")
        folder.chmod(0o755)
        assert says.startswith("opened\n")
        assert str(folder / "jobs.db") in says
        assert "that you may write there" in says
        assert names(folder) == []


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="there is no way to be somebody else")
async def test_a_file_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hf") as name:
        path = Path(name) / "jobs.db"
        async with connect(f"sqlite:///{path}") as storage:
            await storage.enqueue("q", [Request("a", Work(b"payload"))])
        path.chmod(0o444)
        path.parent.chmod(0o555)
        before = path.read_bytes()
        says = run_python(READ_ONLY, tmp_path / "jobs.db", path)
        path.parent.chmod(0o755)
        assert says.startswith("opened\n")
        assert str(path) in says
        assert "that you may write there" in says
        assert path.read_bytes() == before


# A full disk


def allow_no_growth(storage: SqliteStorage) -> None:
    """As if the disk were full: the file may not get a page more than it has."""
    db = storage._writer._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")


async def fill(storage: Storage) -> int:
    """Enqueue until there is no room: how many jobs went in."""
    for n in range(1000):
        try:
            await storage.enqueue("q", [Request(f"{n}", Work(b"x" * 3000), custom_id=True)])
        except StorageFull:
            return n
    pytest.fail("the storage never was full")


async def test_a_full_disk_refuses_an_enqueue_and_changes_nothing(tmp_path: Path, clock: ManualClock) -> None:
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        for n in range(10):
            await storage.enqueue("q", [Request(f"old {n}", Work(b"x" * 3000))])
        allow_no_growth(storage)
        count = await fill(storage)
        before = await contents(storage)
        requests = [Request(f"more {size}", Work(b"x" * size)) for size in (1, 10, 9000)]
        with pytest.raises(StorageFull, match=r"jobs\.db.*free some disk space"):
            await storage.enqueue("q", requests)
        assert await contents(storage) == before
        (stats,) = (await storage.snapshot()).queues
        assert stats.ready == count + 10
        assert (await audit(storage, "q")).problems == []


async def test_a_full_disk_can_be_drained_and_then_takes_jobs_again(tmp_path: Path, clock: ManualClock) -> None:
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        for n in range(10):
            await storage.enqueue("q", [Request(f"old {n}", Work(b"x" * 3000))])
        allow_no_growth(storage)
        await fill(storage)
        for _ in range(10):
            claim = await storage.claim("q", 1, worker="w1", lease_ms=1000)
            done = Complete(claim.jobs[0].id, fence(claim.jobs[0]))
            assert await storage.settle("q", [done], worker="w1") == [SettleResult.OK]
        (reply,) = await storage.enqueue("q", [Request("more", Work(b"x" * 3000))])
        assert reply.placed is Placed.NEW
        assert (await audit(storage, "q")).problems == []


# A storage that is not open

VERBS: dict[str, Callable[[Storage], Awaitable[object]]] = {
    "enqueue": lambda s: s.enqueue("q", [Request("a", Work(b""))]),
    "claim": lambda s: s.claim("q", 1, worker="w1", lease_ms=1000),
    "settle": lambda s: s.settle("q", [Release("a", 1)], worker="w1"),
    "extend": lambda s: s.extend("q", [LeaseRef("a", 1)], worker="w1", lease_ms=1000),
    "cancel": lambda s: s.cancel("q", ["a"]),
    "get": lambda s: s.get("q", ["a"]),
    "keep": lambda s: s.keep("q", ["a"], 1000),
    "prioritize": lambda s: s.prioritize("q", ["a"], 1),
    "scan": lambda s: s.scan("q"),
    "snapshot": lambda s: s.snapshot(),
    "pause": lambda s: s.pause("q", True),
    "sweep": lambda s: s.sweep("q"),
    "purge": lambda s: s.purge("q", [State.FAILED]),
    "drop": lambda s: s.drop("q"),
    "announce": lambda s: s.announce("w1", {}, ttl_ms=1000),
    "evict": lambda s: s.evict("w1"),
    "write_notes": lambda s: s.write_notes({"a": b""}, ttl_ms=1000),
    "read_notes": lambda s: s.read_notes(["a"]),
    "repair": lambda s: s.repair("q", dry_run=True),
    "subscribe": lambda s: s.subscribe(Topic("q")).__aenter__(),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_storage_that_is_not_open_says_so(
    harness: Harness, clock: ManualClock, tmp_path: Path, verb: str
) -> None:
    with pytest.raises(StorageUnavailable, match=r"not open.*async with"):
        await VERBS[verb](harness.open(clock, tmp_path))
    assert names(tmp_path) == []


async def test_a_subscription_is_refused_if_its_storage_was_closed_before_it_began(
    harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    async with harness.open(clock, tmp_path) as storage:
        subscription = storage.subscribe(Topic("q"))
    async with asyncio.timeout(5):
        with pytest.raises(StorageUnavailable, match="not open"):
            await subscription.__aenter__()


@pytest.mark.parametrize("verb", VERBS)
async def test_a_storage_that_was_closed_says_so(
    harness: Harness, clock: ManualClock, tmp_path: Path, verb: str
) -> None:
    async with harness.open(clock, tmp_path) as storage:
        await storage.enqueue("q", [Request("a", Work(b""))])
    with pytest.raises(StorageUnavailable, match="not open"):
        await VERBS[verb](storage)


async def test_a_storage_that_was_closed_can_be_opened_again(
    harness: Harness, clock: ManualClock, tmp_path: Path
) -> None:
    storage = harness.open(clock, tmp_path)
    async with storage:
        await storage.enqueue("q", [Request("a", Work(b"payload"))])
    async with storage:
        (job,) = await storage.get("q", ["a"])
        assert job is not None


FORKED = """
    import asyncio, os, sys
    from holdfast.errors import StorageUnavailable
    from holdfast._core.events import Topic
    from holdfast._core.jobs import Request, Work
    from holdfast.storage import connect

    def refused(verb):
        try:
            coroutine = verb()
            coroutine.send(None)
        except StorageUnavailable as error:
            return "another process" in str(error)
        return False

    async def main():
        async with connect(sys.argv[1]) as storage:
            await storage.enqueue("q", [Request("a", Work(b"payload"))])
            child = os.fork()
            if child == 0:
                verbs = [
                    lambda: storage.get("q", ["a"]),
                    lambda: storage.enqueue("q", [Request("b", Work(b"payload"))]),
                    lambda: storage.snapshot(),
                    lambda: storage.subscribe(Topic("q")).__aenter__(),
                ]
                os._exit(0 if all([refused(verb) for verb in verbs]) else 1)
            _, status = os.waitpid(child, 0)
            (job,) = await storage.get("q", ["a"])
            print(os.waitstatus_to_exitcode(status), job.id)

    asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("scheme", ["sqlite", "memory"])
def test_forked_child_is_refused_at_once_and_its_parent_continues(scheme: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db" if scheme == "sqlite" else "memory://"
    assert run_python(FORKED, url) == "0 a"


# Calls


async def contents(storage: Storage) -> object:
    """All that the storage shows, to compare."""
    snapshot = await storage.snapshot()
    ids = [job.id for stats in snapshot.queues for job in (await storage.scan(stats.queue)).jobs]
    return snapshot, [await storage.get(stats.queue, ids) for stats in snapshot.queues]


class Cast:
    """A queue with one job in each state, named after it, for bad calls to hurt."""

    def __init__(self, storage: Storage, fence: int) -> None:
        self.storage = storage
        self.fence = fence


@pytest.fixture
async def cast(stage: Stage) -> Cast:
    await stage.enqueue("completed")
    await stage.complete(await stage.claim_one())
    await stage.enqueue("failed")
    await stage.fail(await stage.claim_one())
    await stage.enqueue("cancelled")
    await stage.cancel("cancelled")
    await stage.enqueue("running")
    running = await stage.claim_one()
    await stage.enqueue("waiting")
    return Cast(stage.storage, fence(running))


Call = Callable[[Cast], Awaitable[object]]


def request(id: Any = "a", payload: Any = b"payload", **fields: Any) -> Call:
    """An enqueue with one field that is not as it should be."""
    work = {name: fields.pop(name) for name in list(fields) if name in Work.__struct_fields__}
    return lambda cast: cast.storage.enqueue("q", [Request(id, Work(payload, **work), **fields)])


def update(**fields: Any) -> Call:
    return request("running", update=Update(**fields))


def settle(settlement: Callable[[int], Any], queue: str = "q", worker: Any = "w1") -> Call:
    return lambda cast: cast.storage.settle(queue, [settlement(cast.fence)], worker=worker)


def complete(**fields: Any) -> Call:
    return settle(lambda fence: Complete("running", fence, **fields))


def fail(error: Any = b"error", failure_ttl_ms: Any = 1000, follow_up: Any = None) -> Call:
    return settle(lambda fence: Fail("running", fence, error, failure_ttl_ms, follow_up))


def retry(**fields: Any) -> Call:
    return settle(lambda fence: RetrySettlement("running", fence, **fields))


def extend(lease_ms: Any = 1000, worker: Any = "w1", id: Any = "running", progress: Any = None) -> Call:
    return lambda cast: cast.storage.extend("q", [LeaseRef(id, cast.fence, progress)], worker=worker, lease_ms=lease_ms)


def claim(limit: Any = 1, worker: Any = "w1", lease_ms: Any = 1000) -> Call:
    return lambda cast: cast.storage.claim("q", limit, worker=worker, lease_ms=lease_ms)


def scan(**fields: Any) -> Call:
    return lambda cast: cast.storage.scan("q", **fields)


def write_note(name: Any = "a", value: Any = b"", ttl_ms: Any = 1000) -> Call:
    return lambda cast: cast.storage.write_notes({name: value}, ttl_ms=ttl_ms)


def announce(worker: Any = "w1", facts: Any = None, ttl_ms: Any = 1000) -> Call:
    return lambda cast: cast.storage.announce(worker, {} if facts is None else facts, ttl_ms=ttl_ms)


BAD_QUEUES: list[Any] = [
    "",
    "a b",
    "a\n",
    "{a}",
    "a:b",
    "a/b",
    "/failed",
    "a/failed/failed",
    "a/FAILED",
    "é",
    "x" * 121,
    5,
    None,
    b"q",
]
WITH_A_QUEUE: dict[str, Callable[[Storage, Any], Awaitable[object]]] = {
    "enqueue": lambda s, q: s.enqueue(q, [Request("a", Work(b""))]),
    "enqueue nothing": lambda s, q: s.enqueue(q, []),
    "claim": lambda s, q: s.claim(q, 1, worker="w1", lease_ms=1000),
    "settle": lambda s, q: s.settle(q, [], worker="w1"),
    "extend": lambda s, q: s.extend(q, [], worker="w1", lease_ms=1000),
    "cancel": lambda s, q: s.cancel(q, ["a"]),
    "get": lambda s, q: s.get(q, ["a"]),
    "keep": lambda s, q: s.keep(q, ["a"], 1000),
    "prioritize": lambda s, q: s.prioritize(q, ["a"], 1),
    "scan": lambda s, q: s.scan(q),
    "pause": lambda s, q: s.pause(q, True),
    "sweep": lambda s, q: s.sweep(q),
    "purge": lambda s, q: s.purge(q, [State.FAILED]),
    "drop": lambda s, q: s.drop(q),
    "repair": lambda s, q: s.repair(q, dry_run=False),
    "subscribe": lambda s, q: s.subscribe(Topic(q)).__aenter__(),
}


@pytest.mark.parametrize("verb", WITH_A_QUEUE)
async def test_a_bad_queue_name_is_refused_by_every_verb(cast: Cast, verb: str) -> None:
    before = await contents(cast.storage)
    for queue in BAD_QUEUES:
        with pytest.raises(OptionError) as refused:
            await WITH_A_QUEUE[verb](cast.storage, queue)
        assert repr(queue)[:70] in str(refused.value)
    assert await contents(cast.storage) == before


@pytest.mark.parametrize("queue", ["x" * 120, "x" * 120 + "/failed", "A-Z_0.9", "-"])
async def test_queue_name_of_the_maximum_length_is_accepted(stage: Stage, queue: str) -> None:
    assert (await stage.storage.enqueue(queue, [Request("a", Work(b""))]))[0].placed is Placed.NEW
    assert [stats.queue for stats in (await stage.storage.snapshot()).queues] == [queue]


BAD_IDS: list[tuple[Any, str]] = [
    ("", "1 to 512 bytes"),
    ("x" * 513, "513"),
    ("é" * 257, "514"),
    ("\ud800", "surrogate"),
    ("a\udfff", "surrogate"),
    ("\udcc3\udca9", "udcc3"),
    (5, "int"),
    (None, "NoneType"),
    (b"a", "bytes"),
    (True, "bool"),
]
WITH_AN_ID: dict[str, Callable[[Storage, Any], Awaitable[object]]] = {
    "enqueue": lambda s, bad: s.enqueue("q", [Request("good", Work(b"")), Request(bad, Work(b""))]),
    "cancel": lambda s, bad: s.cancel("q", ["waiting", bad]),
    "get": lambda s, bad: s.get("q", ["waiting", bad]),
    "keep": lambda s, bad: s.keep("q", ["failed", bad], 1),
    "prioritize": lambda s, bad: s.prioritize("q", ["waiting", bad], 9),
    "complete": lambda s, bad: s.settle("q", [Complete(bad, 1)], worker="w1"),
    "release": lambda s, bad: s.settle("q", [Release(bad, 1)], worker="w1"),
    "extend": lambda s, bad: s.extend("q", [LeaseRef(bad, 1)], worker="w1", lease_ms=1000),
}


@pytest.mark.parametrize("verb", WITH_AN_ID)
@pytest.mark.parametrize(("id", "says"), BAD_IDS, ids=lambda value: repr(value)[:20])
async def test_bad_id_refuses_the_whole_call_in_every_verb(cast: Cast, verb: str, id: Any, says: str) -> None:
    """`\\udcc3\\udca9` are the escaped bytes of an é: an id has one text form, and this is not it."""
    before = await contents(cast.storage)
    with pytest.raises(OptionError) as refused:
        await WITH_AN_ID[verb](cast.storage, id)
    assert says in str(refused.value)
    assert await contents(cast.storage) == before


GOOD_IDS: list[str] = [
    ":",
    "{}",
    "{q}:a",
    "'",
    '"',
    "`; DROP TABLE holdfast_jobs; --",
    "%s ? :1 $1",
    "\x00",
    "a\x00b",
    "\n",
    "a\r\n",
    " ",
    "é",
    "日本",
    "🦀",
    "\u202e",
    clean_id(b"\xff\xfe\x00"),
    clean_id(b"a\xc3"),
    clean_id("é".encode()),
    "x" * 512,
    "é" * 256,
    "a@1@2",
    "../../etc",
]


@pytest.mark.parametrize("id", GOOD_IDS, ids=lambda good: ascii(good)[:30])
async def test_any_text_or_bytes_are_an_id(stage: Stage, id: str) -> None:
    await stage.enqueue("other", delay=60)
    assert (await stage.enqueue(id, b"1")).placed is Placed.NEW
    assert (await stage.enqueue(id, b"2")).placed is Placed.DUPLICATE
    job = await stage.claim_one()
    assert (job.id, (await stage.the(id)).id) == (id, id)
    assert (await stage.extend(job)).lost == []
    assert await stage.fail(job, follow_up=Work(b"why")) is SettleResult.OK
    assert id in [listed.id for listed in (await stage.storage.scan("q", state=State.FAILED)).jobs]
    (follow_up,) = (await stage.storage.claim("q/failed", 1, worker="w1", lease_ms=1000)).jobs
    assert follow_up.id == f"{id}@{job.generation}"
    assert (await stage.the("other")).state is State.WAITING


async def test_ids_that_differ_in_one_byte_are_two_jobs(stage: Stage) -> None:
    ids = ["a", "a\x00", "A", "a ", "á", "a\u0301", clean_id(b"a\xff"), clean_id(b"a\xfe")]
    for id in ids:
        assert (await stage.enqueue(id)).placed is Placed.NEW
    assert {job.id for job in await stage.claim(20)} == set(ids)


SECONDS, MILLISECONDS, NANOSECONDS = 1_800_000_000, 1_800_000_000_000, 1_800_000_000_000_000_000
BIG = b"x" * (MAX_PAYLOAD_BYTES + 1)
HALF = b"x" * (MAX_CALL_BYTES // 2 + 1)

BAD_CALLS: dict[str, tuple[Call, type[HoldfastError], str]] = {
    # Requests
    "too many requests": (
        lambda c: c.storage.enqueue("q", [Request(f"{n}", Work(b"")) for n in range(MAX_ITEMS + 1)]),
        OptionError,
        "251 items",
    ),
    "too many bytes": (
        lambda c: c.storage.enqueue("q", [Request(id, Work(HALF)) for id in "ab"]),
        OptionError,
        f"{2 * len(HALF)} bytes",
    ),
    "something else than requests": (lambda c: c.storage.enqueue("q", ["a"]), OptionError, "str"),  # type: ignore[list-item]
    "something else than work": (
        lambda c: c.storage.enqueue("q", [Request("a", b"payload")]),  # type: ignore[arg-type]
        OptionError,
        "bytes",
    ),
    "payload too large": (request(payload=BIG), PayloadRejected, f"{len(BIG)} bytes"),
    "payload as text": (request(payload="text"), PayloadRejected, "str"),
    "payload as a bytearray": (request(payload=bytearray(b"x")), PayloadRejected, "bytearray"),
    "payload as a memoryview": (request(payload=memoryview(b"x")), PayloadRejected, "memoryview"),
    "payload as a number": (request(payload=5), PayloadRejected, "int"),
    "no payload with keep": (request(payload=None), OptionError, "'a'"),
    "no payload with update": (request(payload=None, update=Update()), OptionError, "'a'"),
    "delay and run_at": (request(delay_ms=5, run_at=NANOSECONDS // 1000), OptionError, "delay_ms"),
    "run_at in nanoseconds": (request(run_at=NANOSECONDS), OptionError, f"{NANOSECONDS}"),
    "run_at 0": (request(run_at=0), OptionError, "0"),
    "run_at negative": (request(run_at=-5), OptionError, "-5"),
    "run_at as a float": (request(run_at=1.8e15), OptionError, "1800000000000000.0"),
    "run_at as text": (request(run_at="tomorrow"), OptionError, "tomorrow"),
    "delay negative": (request(delay_ms=-1), OptionError, "-1"),
    "delay of a century": (request(delay_ms=10**13), OptionError, f"{10**13}"),
    "delay as a float": (request(delay_ms=1.5), OptionError, "1.5"),
    "delay as text": (request(delay_ms="5"), OptionError, "'5'"),
    "delay as a boolean": (request(delay_ms=True), OptionError, "True"),
    "keep negative": (request(keep_ms=-1), OptionError, "-1"),
    "keep as a float": (request(keep_ms=0.5), OptionError, "0.5"),
    "priority 10": (request(priority=10), OptionError, "10"),
    "priority -1": (request(priority=-1), OptionError, "-1"),
    "priority True": (request(priority=True), OptionError, "True"),
    "priority 5.0": (request(priority=5.0), OptionError, "5.0"),
    "priority as text": (request(priority="high"), OptionError, "high"),
    "priority None": (request(priority=None), OptionError, "None"),
    "timeout 0": (request(timeout_ms=0), OptionError, "timeout_ms"),
    "timeout as a float": (request(timeout_ms=0.5), OptionError, "0.5"),
    "result_ttl negative": (request(result_ttl_ms=-1), OptionError, "result_ttl_ms"),
    "dedup_ttl negative": (request(dedup_ttl_ms=-1), OptionError, "dedup_ttl_ms"),
    "max_retries -1": (request(max_retries=-1), OptionError, "max_retries"),
    "max_retries 1.5": (request(max_retries=1.5), OptionError, "1.5"),
    "max_stalls True": (request(max_stalls=True), OptionError, "max_stalls"),
    "max_timeouts of a billion": (request(max_timeouts=10**9), OptionError, f"{10**9}"),
    "codec as a number": (request(codec=5), OptionError, "codec"),
    "codec None": (request(codec=None), OptionError, "codec"),
    "codec with a lone surrogate": (request(codec="\ud800"), OptionError, "codec"),
    "codec without an end": (request(codec="x" * 10_000), OptionError, "codec"),
    "named 1": (request(custom_id=1), OptionError, "custom_id"),
    "named None": (request(custom_id=None), OptionError, "custom_id"),
    "update as text": (request("running", update="update"), OptionError, "update"),
    "update True": (request("running", update=True), OptionError, "True"),
    "Update(run_at='later')": (update(run_at="later"), OptionError, "later"),
    "Update(run_at=None)": (update(run_at=None), OptionError, "None"),
    "Update(run_at=1)": (update(run_at=1), OptionError, "1"),
    "Update(run_at=0.0)": (update(run_at=0.0), OptionError, "0.0"),
    "Update(payload=1)": (update(payload=1), OptionError, "payload"),
    "Update(payload=None)": (update(payload=None), OptionError, "payload"),
    "Update(reset_counts=1)": (update(reset_counts=1), OptionError, "reset_counts"),
    "Update(reset_counts='yes')": (update(reset_counts="yes"), OptionError, "reset_counts"),
    # Claims and leases
    "claim 0": (claim(0), OptionError, "0"),
    "claim -1": (claim(-1), OptionError, "-1"),
    "claim 251": (claim(251), OptionError, "251"),
    "claim 1.0": (claim(1.0), OptionError, "1.0"),
    "claim True": (claim(True), OptionError, "True"),
    "claim None": (claim(None), OptionError, "None"),
    "lease of 99 ms": (claim(lease_ms=99), OptionError, "99"),
    "lease of two days": (claim(lease_ms=2 * 86_400_000), OptionError, f"{2 * 86_400_000}"),
    "lease None": (claim(lease_ms=None), OptionError, "None"),
    "lease as a float": (claim(lease_ms=1000.0), OptionError, "1000.0"),
    "worker empty": (claim(worker=""), OptionError, "''"),
    "worker too long": (claim(worker="w" * 201), OptionError, "www"),
    "worker with a newline": (claim(worker="a\nb"), OptionError, r"a\nb"),
    "worker as bytes": (claim(worker=b"w1"), OptionError, "w1"),
    "worker None": (claim(worker=None), OptionError, "None"),
    "worker with a lone surrogate": (claim(worker="\ud800"), OptionError, "ud800"),
    "extend too many": (
        lambda c: c.storage.extend("q", [LeaseRef("a", 1)] * 251, worker="w1", lease_ms=1000),
        OptionError,
        "251",
    ),
    "extend something else": (
        lambda c: c.storage.extend("q", ["a"], worker="w1", lease_ms=1000),  # type: ignore[list-item]
        OptionError,
        "str",
    ),
    "extend by 99 ms": (extend(lease_ms=99), OptionError, "99"),
    "extend by None": (extend(lease_ms=None), OptionError, "None"),
    "extend by nobody": (extend(worker=""), OptionError, "''"),
    "progress as text": (extend(progress="half"), PayloadRejected, "str"),
    "progress as empty text": (extend(progress=""), PayloadRejected, "str"),
    "progress 0": (extend(progress=0), PayloadRejected, "int"),
    "progress too large": (extend(progress=BIG), PayloadRejected, f"{len(BIG)}"),
    # Settlements
    "settle too many": (
        lambda c: c.storage.settle("q", [Release("a", 1)] * 251, worker="w1"),
        OptionError,
        "251",
    ),
    "settle something else": (
        lambda c: c.storage.settle("q", ["running"], worker="w1"),  # type: ignore[list-item]
        OptionError,
        "str",
    ),
    "settle by nobody": (settle(lambda fence: Release("running", fence), worker=""), OptionError, "''"),
    "settle by None": (settle(lambda fence: Release("running", fence), worker=None), OptionError, "None"),
    "fence as text": (settle(lambda fence: Release("running", str(fence))), OptionError, "fence"),  # type: ignore[arg-type]
    "fence None": (settle(lambda fence: Release("running", None)), OptionError, "fence"),  # type: ignore[arg-type]
    "result as text": (complete(result="text"), PayloadRejected, "str"),
    "result as empty text": (complete(result=""), PayloadRejected, "str"),
    "result 0": (complete(result=0), PayloadRejected, "int"),
    "result too large": (complete(result=BIG), PayloadRejected, f"{len(BIG)}"),
    "results too large together": (
        lambda c: c.storage.settle("q", [Complete(id, 1, HALF) for id in "ab"], worker="w1"),
        OptionError,
        f"{2 * len(HALF)}",
    ),
    "result codec as a number": (complete(codec=5), OptionError, "codec"),
    "complete result_ttl -1": (complete(result_ttl_ms=-1), OptionError, "-1"),
    "complete result_ttl None": (complete(result_ttl_ms=None), OptionError, "None"),
    "complete dedup_ttl 1.5": (complete(dedup_ttl_ms=1.5), OptionError, "1.5"),
    "complete dedup_ttl None": (complete(dedup_ttl_ms=None), OptionError, "None"),
    "error as text": (fail(error="text"), PayloadRejected, "str"),
    "error None": (fail(error=None), PayloadRejected, "NoneType"),
    "error too large": (fail(error=BIG), PayloadRejected, f"{len(BIG)}"),
    "failure_ttl -1": (fail(failure_ttl_ms=-1), OptionError, "-1"),
    "failure_ttl None": (fail(failure_ttl_ms=None), OptionError, "None"),
    "follow-up without a payload": (fail(follow_up=Work(None)), OptionError, "'running'"),
    "follow-up with a payload of text": (fail(follow_up=Work("text")), PayloadRejected, "str"),  # type: ignore[arg-type]
    "follow-up with a bad priority": (fail(follow_up=Work(b"", priority=10)), OptionError, "10"),
    "follow-up with a bad codec": (fail(follow_up=Work(b"", codec=5)), OptionError, "codec"),  # type: ignore[arg-type]
    "follow-up that is no work": (fail(follow_up=b"work"), OptionError, "bytes"),
    "follow-up of a fail handler's job": (
        settle(lambda _: Fail("a@1", 1, b"", 1, Work(b"")), queue="q/failed"),
        OptionError,
        "q/failed",
    ),
    "retry delay -1": (retry(delay_ms=-1), OptionError, "-1"),
    "retry delay None": (retry(delay_ms=None), OptionError, "None"),
    "retry delay as a float": (retry(delay_ms=0.5), OptionError, "0.5"),
    "retry error as text": (retry(error="text"), PayloadRejected, "str"),
    "retry error as empty text": (retry(error=""), PayloadRejected, "str"),
    "retry run_at in nanoseconds": (retry(run_at=NANOSECONDS), OptionError, f"{NANOSECONDS}"),
    "retry run_at as a float": (retry(run_at=1.8e15), OptionError, "1800000000000000.0"),
    "retry delay and run_at": (retry(delay_ms=5, run_at=NANOSECONDS // 1000), OptionError, "delay_ms"),
    "counts 'attempts'": (retry(counts="attempts"), OptionError, "attempts"),
    "counts None": (retry(counts=None), OptionError, "None"),
    "counts a list": (retry(counts=[]), OptionError, "[]"),
    # The rest
    "get too many": (lambda c: c.storage.get("q", ["a"] * 251), OptionError, "251"),
    "get text": (lambda c: c.storage.get("q", "waiting"), OptionError, "'waiting'"),
    "cancel too many": (lambda c: c.storage.cancel("q", ["waiting"] * 251), OptionError, "251"),
    "cancel text": (lambda c: c.storage.cancel("q", "waiting"), OptionError, "'waiting'"),
    "keep too many": (lambda c: c.storage.keep("q", ["failed"] * 251, 1), OptionError, "251"),
    "keep -1": (lambda c: c.storage.keep("q", ["failed"], -1), OptionError, "-1"),
    "keep None": (lambda c: c.storage.keep("q", ["failed"], None), OptionError, "None"),  # type: ignore[arg-type]
    "keep True": (lambda c: c.storage.keep("q", ["failed"], True), OptionError, "True"),
    "keep for a century": (lambda c: c.storage.keep("q", ["failed"], 10**13), OptionError, f"{10**13}"),
    "scan 0": (scan(limit=0), OptionError, "0"),
    "scan 201": (scan(limit=201), OptionError, "201"),
    "scan True": (scan(limit=True), OptionError, "True"),
    "scan of no state": (scan(state="asleep"), OptionError, "asleep"),
    "scan of a number": (scan(state=5), OptionError, "5"),
    "scan after noise": (scan(after="noise"), OptionError, "noise"),
    "scan after an odd number of digits": (scan(after="abc"), OptionError, "abc"),
    "scan after a number": (scan(after=5), OptionError, "5"),
    "scan after bytes": (scan(after=b"61"), OptionError, "61"),
    "scan after another index's place": (scan(state=State.WAITING, after="5.61"), OptionError, "5.61"),
    "scan after a waiting job's place": (scan(state=State.FAILED, after="-5.1.2.61"), OptionError, "-5.1.2.61"),
    "scan of all after a place": (scan(after="5.61"), OptionError, "5.61"),
    "scan after a number too large": (scan(state=State.FAILED, after=f"{2**70}.61"), OptionError, f"{2**70}"),
    "pause for a number": (lambda c: c.storage.pause("q", True, reason=5), OptionError, "reason"),  # type: ignore[arg-type]
    "pause without an end": (lambda c: c.storage.pause("q", True, reason="x" * 100_000), OptionError, "reason"),
    "pause with a lone surrogate": (lambda c: c.storage.pause("q", True, reason="\ud800"), OptionError, "reason"),
    "pause 1": (lambda c: c.storage.pause("q", 1), OptionError, "paused"),  # type: ignore[arg-type]
    "pause 'yes'": (lambda c: c.storage.pause("q", "yes"), OptionError, "paused"),  # type: ignore[arg-type]
    "sweep 0": (lambda c: c.storage.sweep("q", 0), OptionError, "0"),
    "sweep 101": (lambda c: c.storage.sweep("q", 101), OptionError, "101"),
    "sweep nobody": (lambda c: c.storage.sweep("q", worker=""), OptionError, "''"),
    "purge 0": (lambda c: c.storage.purge("q", [State.FAILED], 0), OptionError, "0"),
    "purge 201": (lambda c: c.storage.purge("q", [State.FAILED], 201), OptionError, "201"),
    "drop 0": (lambda c: c.storage.drop("q", 0), OptionError, "0"),
    "purge no state": (lambda c: c.storage.purge("q", ["asleep"]), OptionError, "asleep"),  # type: ignore[list-item]
    "purge text": (lambda c: c.storage.purge("q", "failed"), OptionError, "'f"),  # type: ignore[arg-type]
    "note of 16 KiB and a byte": (write_note(value=bytes(16_385)), OptionError, "'a'"),
    "note of text": (write_note(value="text"), OptionError, "'text'"),
    "note without a name": (write_note(""), OptionError, "''"),
    "name of a note with control characters": (lambda cast: cast.storage.read_notes(["a\n"]), OptionError, "a"),
    "note for 0 ms": (write_note(ttl_ms=0), OptionError, "0"),
    "251 notes": (lambda cast: cast.storage.read_notes(["a"] * 251), OptionError, "251"),
    "announce nobody": (announce(""), OptionError, "''"),
    "announce for 99 ms": (announce(ttl_ms=99), OptionError, "99"),
    "announce for None": (announce(ttl_ms=None), OptionError, "None"),
    "facts as a list": (announce(facts=["queues"]), OptionError, "facts"),
    "facts that cannot be stored": (announce(facts={"x": object()}), OptionError, "facts"),
    "facts with a number too large": (announce(facts={"x": 2**70}), OptionError, "facts"),
    "facts without an end": (announce(facts={"x": "x" * 3_000_000}), OptionError, "facts"),
    "evict nobody": (lambda c: c.storage.evict(""), OptionError, "''"),
    "repair from a number": (lambda c: c.storage.repair("q", dry_run=False, cursor=5), OptionError, "int"),  # type: ignore[arg-type]
    "repair from a lone surrogate": (
        lambda c: c.storage.repair("q", dry_run=False, cursor="\ud800"),
        OptionError,
        "ud800",
    ),
    "subscribe to text": (lambda c: c.storage.subscribe("q").__aenter__(), OptionError, "str"),  # type: ignore[arg-type]
    "subscribe to no such thing": (
        lambda c: c.storage.subscribe(Topic("q", "starts")).__aenter__(),  # type: ignore[arg-type]
        OptionError,
        "starts",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
async def test_bad_call_names_the_wrong_value_and_changes_nothing(cast: Cast, name: str) -> None:
    call, error, says = BAD_CALLS[name]
    before = await contents(cast.storage)
    with pytest.raises(error) as refused:
        await call(cast)
    assert says in str(refused.value)
    assert await contents(cast.storage) == before


async def test_one_bad_request_refuses_the_whole_call(cast: Cast) -> None:
    before = await contents(cast.storage)
    good, bad = Request("good", Work(b"")), Request("bad", Work(b"", priority=10))
    with pytest.raises(OptionError):
        await cast.storage.enqueue("q", [good, bad])
    with pytest.raises(OptionError):
        await cast.storage.settle(
            "q", [Release("running", cast.fence), RetrySettlement("x", 1, delay_ms=-1)], worker="w1"
        )
    assert await contents(cast.storage) == before


async def test_a_long_bad_value_is_cut_in_the_message(stage: Stage) -> None:
    with pytest.raises(OptionError) as refused:
        await stage.storage.enqueue("x" * 100_000, [])
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("state", State)
async def test_a_state_may_be_given_as_its_name(cast: Cast, state: State) -> None:
    page = await cast.storage.scan("q", state=state.value)  # type: ignore[arg-type]
    assert [job.id for job in page.jobs] == [state.value]
    assert page == await cast.storage.scan("q", state=state)


async def test_values_at_the_limits_are_accepted(stage: Stage) -> None:
    requests = [Request(f"{n}", Work(b"")) for n in range(MAX_ITEMS)]
    assert len(await stage.storage.enqueue("q", requests)) == MAX_ITEMS
    assert (await stage.enqueue("large", b"x" * MAX_PAYLOAD_BYTES, priority=9)).placed is Placed.NEW
    assert (await stage.enqueue("late", delay=10 * 365 * 24 * 3600)).placed is Placed.NEW
    assert len(await stage.claim(250, lease=0.1, worker="w" * 200)) >= 1


async def test_empty_batches_are_accepted(stage: Stage) -> None:
    storage = stage.storage
    assert await storage.enqueue("q", []) == []
    assert await storage.settle("q", [], worker="w1") == []
    assert await storage.cancel("q", []) == []
    assert await storage.get("q", []) == []
    assert await storage.keep("q", [], 1) == []
    assert await storage.purge("q", []) == 0
    assert (await storage.extend("q", [], worker="w1", lease_ms=1000)).lost == []
    assert (await storage.snapshot()).queues == []
