"""Real processes on one SQLite file: kills, wake-ups, sockets left behind, and who waits for whom."""

from __future__ import annotations

import asyncio
import collections
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast._client import waiters
from holdfast._core.events import Event, EventKind, Topic
from holdfast._core.jobs import Complete, Request, State, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import LayoutTooNew, StorageUnavailable
from holdfast.storage import Storage, audit, connect
from holdfast.storage.local.sqlite import LAYOUT, connection, notify
from tests.app.conftest import until
from tests.storage.process_helper import HOUR_MS, LEASE_MS
from tests.storage.stage import fence

pytestmark = pytest.mark.suite("usual")

HELPER = Path(__file__).with_name("process_helper.py")
STORM_S = 5.0
SEED = 20_240_601
HEARD_WITHIN_S = 1.0
HEARD_AS_A_RULE_S = 0.05


class Process:
    """A helper in a process of its own."""

    def __init__(self, role: str, *arguments: object) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(HELPER), role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def hears(self, seconds: float = 10.0) -> list[str]:
        """The next line that it says, in words."""
        assert self._popen.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await asyncio.to_thread(self._popen.stdout.readline)
        except TimeoutError:
            self.kill()  # Which also ends the read.
            pytest.fail(f"a helper said nothing for {seconds} s")
        assert line, "a helper has ended"
        return line.split()

    def tell(self, *words: object) -> None:
        assert self._popen.stdin is not None
        print(*words, file=self._popen.stdin, flush=True)

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def still_runs(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


class Processes:
    """The helpers of one test, all of which are gone after it."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(self, role: str, *arguments: object) -> Process:
        self._started.append(Process(role, *arguments))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


@pytest.fixture
def path() -> Iterator[Path]:
    """A file with a short name, so that sockets fit beside it."""
    with tempfile.TemporaryDirectory(prefix="hf") as folder:
        yield Path(folder) / "jobs.db"


@pytest.fixture
async def storage(path: Path) -> AsyncIterator[Storage]:
    async with connect(f"sqlite:///{path}") as storage:
        yield storage


async def enqueue(storage: Storage, *ids: str) -> None:
    await storage.enqueue("q", [Request(id, Work(b"payload"), custom_id=True) for id in ids])


async def claim(storage: Storage, limit: int = 50) -> list[tuple[str, int]]:
    jobs = (await storage.claim("q", limit, worker="last", lease_ms=60_000)).jobs
    return [(job.id, fence(job)) for job in jobs]


async def complete(storage: Storage, leases: list[tuple[str, int]]) -> list[SettleResult]:
    batch = [Complete(*lease, b"done", result_ttl_ms=HOUR_MS, dedup_ttl_ms=HOUR_MS) for lease in leases]
    return await storage.settle("q", batch, worker="last")


def listeners(path: Path) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT address, queue, topic FROM holdfast_listeners").fetchall()


def sockets(path: Path) -> list[str]:
    return sorted(str(file) for file in path.parent.iterdir() if "-notify-" in file.name)


def exists(address: str) -> bool:
    return Path(address).exists()


# Kills


async def kill_at_random(processes: Processes, path: Path | str, history: Path) -> int:
    """Four processes at work, one of which is killed and replaced every moment, until enough was done. Returns how many
    were killed."""
    rng = random.Random(SEED)
    kills = 0
    running = [processes.start("storm", path, history, f"p{n}", n) for n in range(4)]
    began = time.monotonic()
    while time.monotonic() < began + STORM_S or not (kills > 5 and has_enough(history)):
        assert time.monotonic() < began + 10 * STORM_S, "the processes do too little"
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        n = rng.randrange(4)
        assert all(process.still_runs() for process in running), "a process has ended by itself"
        running[n].kill()
        kills += 1
        running[n] = processes.start("storm", path, history, f"p{4 + kills}", kills)
    for process in running:
        process.kill()
    return kills


def has_enough(history: Path) -> bool:
    """Whether the processes have enqueued and completed so many jobs that kills met all steps. On a busy machine many
    are killed before they have done anything."""
    words = (
        collections.Counter(line.split()[0] for line in history.read_text().splitlines()) if history.exists() else {}
    )
    return min(words.get("enqueued", 0), words.get("completed", 0)) > 100


async def drain(storage: Storage) -> set[tuple[str, int]]:
    """Complete what is left: the leases that did."""
    done: set[tuple[str, int]] = set()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        leases = await claim(storage)
        if leases:
            assert await complete(storage, leases) == [SettleResult.OK] * len(leases)
            done.update(leases)
            continue
        (stats,) = (await storage.snapshot()).queues
        if not stats.ready + stats.scheduled + stats.running:
            return done
        await asyncio.sleep(LEASE_MS / 4000)
    pytest.fail("the queue did not drain")


async def test_processes_killed_at_random_lose_nothing_and_complete_nothing_twice(
    processes: Processes, path: Path, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    await kill_at_random(processes, path, history)
    async with connect(f"sqlite:///{path}") as storage:
        drained = await drain(storage)
        await enqueue(
            storage, "last"
        )  # All that listened is dead: the first event finds out, the next write strikes off.
        await complete(storage, await claim(storage))

        said = [line.split() for line in history.read_text().splitlines()]
        await check_history(storage, said, drained)
        with closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert listeners(path) == []
        assert {words[1] for words in said if words[0] == "listening"} & set(sockets(path)) == set()


async def check_history(storage: Storage, said: list[list[str]], drained: set[tuple[str, int]]) -> None:
    """Nothing that was acknowledged is lost, no lease and no job was completed twice, and the audit is clean."""
    enqueued = [words[1] for words in said if words[0] == "enqueued"]
    completed = [(words[1], int(words[2])) for words in said if words[0] == "completed"]
    assert repeated(completed) == []
    assert repeated(fence for _, fence in completed) == []
    assert repeated(id for id, _ in [*completed, *drained]) == []
    for start in range(0, len(enqueued), 250):
        ids = enqueued[start : start + 250]
        jobs = await storage.get("q", ids)
        ended = [None if job is None else job.state for job in jobs]
        assert [pair for pair in zip(ids, ended, strict=True) if pair[1] is not State.COMPLETED] == []
    assert (await audit(storage, "q")).problems == []


def repeated(things: Iterator[object] | list[tuple[str, int]]) -> list[object]:
    return [thing for thing, times in collections.Counter(things).items() if times > 1]


# Wake-ups


async def test_subscriber_in_another_process_gets_events_within_milliseconds(
    processes: Processes, path: Path, storage: Storage
) -> None:
    """The bounds are generous: this is no benchmark."""
    subscriber = processes.start("listen", path)
    assert (await subscriber.hears())[0] == "listening"
    delays: dict[str, list[float]] = {"enqueued": [], "completed": []}

    async def heard(kind: str, id: str, since: int) -> None:
        words = await subscriber.hears(HEARD_WITHIN_S)
        assert words[:2] == [kind, id]
        delays[kind].append((int(words[2]) - since) / 1e9)

    for n in range(20):
        sent = time.monotonic_ns()
        await enqueue(storage, f"{n}")
        await heard("enqueued", f"{n}", sent)
        leases = await claim(storage)
        sent = time.monotonic_ns()
        await complete(storage, leases)
        await heard("completed", f"{n}", sent)
    for times in delays.values():
        assert max(times) < HEARD_WITHIN_S
        assert statistics.median(times) < HEARD_AS_A_RULE_S


async def test_killed_subscriber_is_removed_by_the_next_writer(
    processes: Processes, path: Path, storage: Storage
) -> None:
    subscriber = processes.start("listen", path)
    _, address = await subscriber.hears()
    assert sockets(path) == [address]
    assert {row[0] for row in listeners(path)} == {address}
    subscriber.kill()
    await enqueue(storage, "a")
    assert sockets(path) == []
    await enqueue(storage, "b")
    assert listeners(path) == []


async def test_killed_subscriber_is_removed_by_the_next_subscriber_without_any_event(
    processes: Processes, path: Path, storage: Storage
) -> None:
    subscriber = processes.start("listen", path)
    _, address = await subscriber.hears()
    subscriber.kill()
    async with storage.subscribe(Topic("another")):
        assert address not in {row[0] for row in listeners(path)}
        assert address not in sockets(path)


async def test_dead_subscriber_does_not_block_events_of_live_ones(
    processes: Processes, path: Path, storage: Storage
) -> None:
    dead, living = processes.start("listen", path), processes.start("listen", path)
    await dead.hears()
    await living.hears()
    dead.kill()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:  # And one that comes first in any order.
        db.execute("INSERT INTO holdfast_listeners VALUES (?, 'hf/q', 'ready')", (f"{path}-notify-!",))
    for id in "abc":
        await enqueue(storage, id)
        assert (await living.hears(HEARD_WITHIN_S))[:2] == ["enqueued", id]


async def test_frozen_subscriber_does_not_delay_a_writer(processes: Processes, path: Path, storage: Storage) -> None:
    frozen = processes.start("listen", path)
    await frozen.hears()
    frozen.signal(signal.SIGSTOP)
    async with asyncio.timeout(5):
        for n in range(1000):
            await enqueue(storage, f"{n}")
    assert len(listeners(path)) == 2
    frozen.signal(signal.SIGCONT)
    assert (await frozen.hears())[:2] == ["enqueued", "0"]


async def test_subscriber_that_leaves_removes_its_socket_and_rows(path: Path, storage: Storage) -> None:
    async with connect(f"sqlite:///{path}") as other, other.subscribe(Topic("q")):
        assert len(sockets(path)) == len(listeners(path)) == 1
    assert sockets(path) == []
    assert listeners(path) == []


async def test_unregistered_socket_is_removed_by_the_next_subscriber(path: Path, storage: Storage) -> None:
    """Its process was killed after it had made the socket and before it had told anyone."""
    orphan = path.with_name(f"{path.name}-notify-0badcafe")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lost:
        lost.bind(str(orphan))
    async with storage.subscribe(Topic("q")):
        assert str(orphan) not in sockets(path)


@pytest.mark.parametrize("name", ["precious.txt", "jobs.db-notify-0badcafe", "elsewhere/jobs.db-notify-0badcafe"])
async def test_no_file_but_an_abandoned_socket_is_deleted(path: Path, storage: Storage, name: str) -> None:
    """Who can write to the database can register any address."""
    precious = path.parent / name
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("INSERT INTO holdfast_listeners VALUES (?, 'hf/q', 'ready')", (str(precious),))
    await enqueue(storage, "a")
    await enqueue(storage, "b")
    async with connect(f"sqlite:///{path}") as other, other.subscribe(Topic("q")):
        assert precious.read_text() == "precious"


async def test_a_socket_that_is_not_of_a_listener_gets_no_hints(path: Path, storage: Storage) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(str(path.with_name("stranger")))
        stranger.setblocking(False)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("INSERT INTO holdfast_listeners VALUES (?, 'hf/q', 'ready')", (stranger.getsockname(),))
        await enqueue(storage, "a")
        with pytest.raises(BlockingIOError):
            stranger.recv(1)


async def test_a_storage_closes_without_a_trace_if_its_socket_file_is_gone(path: Path) -> None:
    before = set(threading.enumerate())  # Another test may have left the thread that all sync calls share.
    async with connect(f"sqlite:///{path}") as storage, storage.subscribe(Topic("q")):
        for address in sockets(path):
            Path(address).unlink()
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("holdfast")] == []
    assert listeners(path) == []


async def test_hints_too_large_for_one_datagram_are_sent_in_several(path: Path) -> None:
    """As on macOS, where a datagram has at most 2 KiB."""
    heard: list[str] = []
    receiver = notify.NotifyReceiver(path, lambda namespace, events: heard.extend(event.id for event in events))
    sender = notify.NotifySender(path)
    events = [Event(EventKind.ENQUEUED, "q", f"{number:0200d}", 1) for number in range(50)]
    assert sender.send(receiver.address, "hf", events[:1])
    assert sender._socket is not None
    sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # The least that the system allows.
    sender._socket.setblocking(True)
    assert sender.send(receiver.address, "hf", events[1:])
    await until(lambda: len(heard) == 50)
    assert heard == [event.id for event in events]
    sender.close()
    receiver.close()


FULL_DISK = """
import asyncio, os, resource, signal, sys, threading
from pathlib import Path
from holdfast._core.events import Topic
from holdfast.storage import connect

async def main(path):
    async with connect(f"sqlite:///{path}") as storage, storage.subscribe(Topic("q")):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = os.stat(path + "-wal").st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # As if the disk were full.
    print(*(thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")))
    print(*(left.name for left in Path(path).parent.glob("*-notify-*")))

asyncio.run(main(sys.argv[1]))
"""


async def test_a_storage_closes_on_a_full_disk(path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [], "")


async def next_event(events: AsyncIterator[Event], seconds: float) -> Event | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(events)
    except TimeoutError:
        return None


async def test_notifications_work_in_a_folder_that_refuses_sockets(
    processes: Processes, path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(socket.socket):
        def bind(self, address: str) -> None:  # type: ignore[override]
            if address.startswith(str(path)):
                raise PermissionError("no sockets in this folder")
            super().bind(address)

    writer = processes.start("enqueue", path)
    await writer.hears()
    monkeypatch.setattr(socket, "socket", Refused)
    async with storage.subscribe(Topic("q", "ready")) as events:
        monkeypatch.undo()
        assert sockets(path) == []
        writer.tell("a")
        assert await next_event(events, HEARD_WITHIN_S) is not None
        assert await writer.hears() == ["enqueued", "a"]


async def test_process_without_a_socket_finds_the_result_by_polling(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(notify.NotifyReceiver, "__init__", refuse)
    async with connect(f"sqlite:///{path}") as ours, connect(f"sqlite:///{path}") as theirs:
        await enqueue(ours, "a")
        claim = await theirs.claim("q", 1, worker="w", lease_ms=60_000)
        waiting = asyncio.create_task(waiters.wait(ours, "q", "a", claim.jobs[0].generation, wait_s=5))
        await asyncio.sleep(0.1)
        await theirs.settle("q", [Complete("a", fence(claim.jobs[0]), b"7")], worker="w")
        assert (await waiting).result == b"7"
    assert "polling once a second instead" in caplog.text


async def test_events_work_for_a_path_too_long_for_a_socket(processes: Processes, path: Path) -> None:
    deep = path.with_name("d" * 100) / "jobs.db"
    deep.parent.mkdir()
    async with connect(f"sqlite:///{deep}") as storage:
        subscriber = processes.start("listen", deep)
        _, address = await subscriber.hears()
        assert not address.startswith(str(deep.parent))
        await enqueue(storage, "a")
        assert (await subscriber.hears(HEARD_WITHIN_S))[:2] == ["enqueued", "a"]
        subscriber.kill()
        await enqueue(storage, "b")
        assert not exists(address)


# Opening


async def test_two_processes_may_open_a_new_file_at_the_same_moment(
    processes: Processes, path: Path, tmp_path: Path
) -> None:
    both = [processes.start("open", path) for _ in range(2)]
    for process in both:
        await process.hears()
    for n in range(20):
        new = tmp_path / f"{n}.db"
        at = time.monotonic_ns() + 5_000_000
        for id, process in enumerate(both):
            process.tell(new, id, at)
        assert [await process.hears() for process in both] == [["ok"], ["ok"]]
        async with connect(f"sqlite:///{new}") as storage:
            assert sorted(id for id, _ in await claim(storage)) == ["0", "1"]
            assert (await audit(storage, "q")).problems == []


# Another writer


async def test_calls_wait_for_another_writer_and_then_succeed(path: Path, storage: Storage) -> None:
    await enqueue(storage, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        enqueuing = asyncio.create_task(storage.enqueue("q", [Request("b", Work(b""))]))
        claiming = asyncio.create_task(storage.claim("q", 5, worker="w1", lease_ms=60_000))
        await asyncio.sleep(0.3)
        assert not enqueuing.done()
        assert not claiming.done()
        other.execute("COMMIT")
        async with asyncio.timeout(5):
            ((reply,), claimed) = await asyncio.gather(enqueuing, claiming)
    assert reply.placed is Placed.NEW
    assert [job.id for job in claimed.jobs] == ["a", "b"]
    assert (await audit(storage, "q")).problems == []


async def test_reads_do_not_wait_for_another_writer(path: Path, storage: Storage) -> None:
    await enqueue(storage, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(1):
            assert (await storage.get("q", ["a"]))[0] is not None
            assert len((await storage.scan("q")).jobs) == 1
            assert (await storage.snapshot()).queues[0].ready == 1
            assert (await audit(storage, "q")).problems == []
        async with asyncio.timeout(1), connect(f"sqlite:///{path}") as third:
            assert (await third.get("q", ["a"]))[0] is not None


async def test_a_writer_that_takes_too_long_makes_the_storage_unavailable_until_it_ends(
    path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enqueue(storage, "a")
    monkeypatch.setattr(connection, "BUSY_S", 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match=r"jobs\.db was locked by another process"):
                await enqueue(storage, "b")
        other.execute("ROLLBACK")
    assert (await storage.get("q", ["b"])) == [None]
    await enqueue(storage, "b")
    assert [id for id, _ in await claim(storage)] == ["a", "b"]
    assert (await audit(storage, "q")).problems == []


async def test_many_calls_behind_a_writer_that_takes_too_long_are_all_refused_in_time(
    path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits as long as one would: not one after the other."""
    monkeypatch.setattr(connection, "BUSY_S", 0.2)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        replies = await asyncio.gather(*(enqueue(storage, f"{n}") for n in range(20)), return_exceptions=True)
        waited = time.monotonic() - begun
        other.execute("ROLLBACK")
    assert {type(reply) for reply in replies} == {StorageUnavailable}
    assert waited < 1.0
    assert (await storage.snapshot()).queues == []


async def test_empty_datagram_does_not_stop_a_listener(tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as listening, connect(f"sqlite:///{tmp_path}/jobs.db") as other:
        async with listening.subscribe(Topic("q", "ready")) as events:
            (address,) = tmp_path.glob("*-notify-*")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.sendto(b"", str(address))
            await other.enqueue("q", [Request("a", Work(b"1"))])
            async with asyncio.timeout(5):
                assert (await anext(events)).id == "a"


async def test_a_storage_that_is_open_cannot_be_opened_again(tmp_path: Path) -> None:
    async with connect(f"sqlite:///{tmp_path}/jobs.db") as storage:
        with pytest.raises(StorageUnavailable, match="open already"):
            await storage.__aenter__()
        await storage.enqueue("q", [Request("a", Work(b"1"))])


async def test_file_of_a_newer_layout_is_refused_unchanged(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE holdfast_meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        db.execute("INSERT INTO holdfast_meta VALUES ('layout', ?)", (LAYOUT + 1,))
    before = (tmp_path / "jobs.db").read_bytes()
    with pytest.raises(LayoutTooNew, match=f"layout {LAYOUT + 1}"):
        await connect(f"sqlite:///{tmp_path}/jobs.db").__aenter__()
    assert (tmp_path / "jobs.db").read_bytes() == before
