"""The storage goes away, freezes, or steps its clock, under real workers with jobs. The same processes continue without
help, and no run that goes on is repeated.

Leases are short and the machine may be busy: results are checked exactly, times with generous limits.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import pytest

from chaos import clocks
from chaos.clocks import SharedClock
from holdfast import Holdfast, StorageUnavailable, WaitTimeout
from holdfast._core.options import from_at
from tests.app.conftest import Place
from tests.servers import Server
from tests.storage import keyspace
from tests.worker.conftest import Scene, WorkerProcess, scene, until

__all__ = ["scene"]

pytestmark = pytest.mark.suite("slow")

LEASE_S = 1.0
"""After an outage a living worker has half of it to extend its leases, also on a busy machine."""
NOISE_S = 4.0
"""What a busy machine, and a last look at the storage, may add to a bound."""
CLAIM_S = 5.0
"""The longest that a worker may take to claim again."""
WAIT_S = 0.5
PERIOD_S = 0.4
HOUR_S, DAY_S = 3600.0, 86_400.0
QUEUES = {"hold", "dies", "only", "meet", "later", "again", "tick"}


# Where it happens


class Away(Protocol):
    """A way for a storage to be away."""

    def begin(self) -> None: ...
    def end(self) -> None: ...


class Killed:
    """The server is killed, and started again on what it had written."""

    def __init__(self, server: Server) -> None:
        self.begin, self.end = server.kill, server.start


class Paused:
    """The server is there, and answers nothing."""

    def __init__(self, server: Server) -> None:
        self.begin, self.end = server.pause, server.resume


class Locked:
    """Another connection keeps the file for itself."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        self._holder = sqlite3.connect(self._path, isolation_level=None, timeout=10)
        self._holder.execute("BEGIN EXCLUSIVE")

    def end(self) -> None:
        self._holder.execute("ROLLBACK")
        self._holder.close()


class ShakyPlace(Place):
    """A storage that can be taken away, on a clock that can be stepped if there is one."""

    def __init__(self, kind: str, folder: Path, server: Server) -> None:
        super().__init__("sqlite", folder)
        self.storage, _, way = kind.partition("-")
        self.clock: SharedClock | None = None
        self.away: Away = Locked(folder / "jobs.db")
        if self.storage == "valkey":
            self.url = f"{server.url}?timeout=0.5"
            self.away = Killed(server) if way == "killed" else Paused(server)

    def app(self, **options: Any) -> Holdfast[Any]:
        return super().app(clock=self.clock, **options)


@pytest.fixture(scope="module")
def the_server() -> Iterator[Server]:
    with Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def server(the_server: Server) -> Iterator[Server]:
    yield the_server
    if not the_server.running:
        the_server.start()
    the_server.resume()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, server: Server) -> Iterator[ShakyPlace]:
    place = ShakyPlace(request.param, tmp_path, server)
    wanted: list[str] = request.config.getoption("--storage")
    if wanted and place.storage not in wanted:
        pytest.skip(f"not for {', '.join(wanted)}")
    yield place
    if place.storage == "valkey":
        assert keyspace.clear(server, place.namespace) == []


@pytest.fixture
def clock(place: ShakyPlace, tmp_path: Path) -> SharedClock:
    """The clock of this test's storage, for all processes. To be asked for before the scene."""
    place.clock = SharedClock(tmp_path / "clock")
    return place.clock


# The storage is away


@pytest.mark.parametrize("place", ["valkey-killed", "valkey-paused", "sqlite-locked"], indirect=True)
async def test_live_runs_finish_once_and_workers_continue_after_any_outage(scene: Scene, place: ShakyPlace) -> None:
    """Runs that hold go on and are not run again. Runs that must not go on without the storage are stopped while it is
    away, end by themselves, and are run again afterwards, uncounted: their process goes on, and so do others in it."""
    options = ("--lease", f"{LEASE_S}", "--grace", "3", "--name")
    workers = await start(scene, [("--processes", "2", *options, "pool"), ("--inline", *options, "inline")])
    before = family(workers)
    await scene.app.queue("tick").enqueue({"period": PERIOD_S}, id="tick")
    held = [await scene.app.queue("hold").enqueue({"gate": gate}) for gate in ("during", "after") * 5]
    mortal = {f"{queue}-{number}": queue for queue in ("dies", "only") for number in range(3)}
    for id, queue in mortal.items():
        await scene.app.queue(queue).enqueue({"gate": "after"}, id=id)
    await scene.noted("began", 16)
    patient = asyncio.create_task(held[1].result(wait=60))
    async with a_stream_of_jobs(scene):
        for leases in (3.0,) if isinstance(place.away, Killed) else (0.5, 1.0, 3.0):
            await be_away_for(scene, place.away, leases, held[1])
        await asyncio.sleep(1.5 * LEASE_S)  # A sweep now sees old leases. They must have been extended by now.
        open_gate(scene, "after")
        assert [await handle.result(wait=20) for handle in held] == [[1, 0, 0, 0]] * 10
        assert await patient == [1, 0, 0, 0]
    await scene.noted("ended", 16)
    assert_ran_again_for_a_reason(scene, set(mortal))
    await all_serve(scene, workers, before)
    assert short_periods(scene) == 0


async def be_away_for(scene: Scene, away: Away, leases: float, held: Any) -> None:
    """Take the storage away. Callers' waits end in time, and what came due meanwhile is claimed soon afterwards."""
    id = f"due-{leases:g}"
    await scene.app.queue("later").enqueue({}, id=id, delay=(0.75 + leases / 2) * LEASE_S)
    waits = [asyncio.create_task(ends_in_time(held.result(wait=WAIT_S)))]
    await asyncio.sleep(0.75 * LEASE_S)  # Every lease has been extended since the last outage.
    away.begin()
    try:
        waits.append(asyncio.create_task(ends_in_time(held.result(wait=WAIT_S))))
        waits.append(asyncio.create_task(ends_in_time(scene.app.queue("later").call({}, wait=WAIT_S))))
        await asyncio.sleep(leases * LEASE_S / 3)
        if leases >= 3:
            open_gate(scene, "during")
            await scene.noted("ended", 5)
        await asyncio.sleep(leases * LEASE_S * 2 / 3)
        assert leases < 3 or all(wait.done() for wait in waits)
    finally:
        away.end()
    back_at = time.monotonic()
    await until(lambda: ran(scene, id), CLAIM_S + NOISE_S)
    assert ran(scene, id)[0]["at"] - back_at <= CLAIM_S
    await asyncio.gather(*waits)
    if leases >= 3:
        assert all(note["at"] < back_at for note in scene.notes("stopped"))


@asynccontextmanager
async def a_stream_of_jobs(scene: Scene) -> AsyncIterator[None]:
    """A producer enqueues jobs all the time, so that an outage meets calls of every kind. Each that was taken runs, and
    none runs twice."""
    taken: list[str] = []
    over = asyncio.Event()

    async def ask() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            try:
                taken.append((await scene.app.queue("later").enqueue({}, id=f"stream-{number}")).id)
            except StorageUnavailable:
                pass  # It may be stored, or not.
            await asyncio.sleep(0.1)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        over.set()
        await asking
    await until(lambda: {note["id"] for note in scene.notes("ran")} >= set(taken))
    runs = Counter(note["id"] for note in scene.notes("ran"))
    assert {id: count for id, count in runs.items() if count > 1} == {}


def assert_ran_again_for_a_reason(scene: Scene, ids: set[str]) -> None:
    """These ran again and no others. Every later run has a reason: the earlier one had to end, and has ended. It counts
    as nothing else."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for note in scene.notes():
        if note["what"] in ("began", "stopped", "ended"):
            runs.setdefault(note["id"], []).append(note)
    for notes in runs.values():
        assert [note["what"] for note in notes] == ["began", "stopped"] * (len(notes) // 2 - 1) + ["began", "ended"]
        assert all(note["counts"][1:] == [0, 0, 0] for note in notes if note["what"] == "began")
        assert all(note["why"] == "lease_lost" for note in notes if note["what"] == "stopped")
    assert {id for id, notes in runs.items() if len(notes) > 2} == ids


# The clock


@pytest.mark.parametrize("place", ["valkey-killed", "sqlite-locked"], indirect=True)
async def test_clock_step_of_an_hour_loses_no_lease_and_runs_nothing_early(
    place: ShakyPlace, clock: SharedClock, scene: Scene
) -> None:
    """An hour on and an hour back under running jobs, waiting jobs and waiting callers; then an hour on while no worker
    can reach the storage. Workers are inline: a parent of child processes is given no clock."""
    scene.environment[clocks.PATH] = str(scene.folder / "clock")
    options = ("--inline", "--lease", f"{LEASE_S}", "--grace", "3", "--name")
    workers = await start(scene, [(*options, "one"), (*options, "other")])
    before = family(workers)
    await scene.app.queue("tick").enqueue({"period": PERIOD_S}, id="tick")
    held = [await scene.app.queue("hold").enqueue({"gate": "after"}) for _ in range(8)]
    await scene.app.queue("only").enqueue({"gate": "after"}, id="only")
    await scene.noted("began", 9)
    patient = asyncio.create_task(held[0].result(wait=100))
    later = Later(scene, clock)
    await later.ask("in 3 h", delay=3 * HOUR_S)
    await later.ask("at 1.5 h", at=1.5 * HOUR_S)

    await later.ask("in 0.5 h", delay=HOUR_S / 2)
    await later.ask("at 0.5 h", at=HOUR_S / 2)
    waits = [asyncio.create_task(ends_in_time(held[0].result(wait=WAIT_S)))]
    await asyncio.sleep(0.2)
    step(clock, HOUR_S, workers)
    await until(lambda: later.ran == {"in 0.5 h", "at 0.5 h"})
    await later.ask("in 0.3 s, after the step on", delay=0.3)
    await asyncio.sleep(1.5 * LEASE_S)  # Long enough for two sweeps to take back what they took for dead.
    assert later.ran == {"in 0.5 h", "at 0.5 h", "in 0.3 s, after the step on"}

    await later.ask("in 1.5 s, across the step back", delay=1.5)
    await later.ask("at 0.5 s, asked before the step back", at=0.5)
    waits.append(asyncio.create_task(ends_in_time(held[0].result(wait=WAIT_S))))
    call = asyncio.create_task(scene.app.queue("later").call({}, delay=0.5, wait=20))
    await asyncio.sleep(0.2)
    step(clock, -HOUR_S, workers)
    await later.ask("in 0.5 s, after the step back", delay=0.5)
    await later.ask("at 0.5 s, after the step back", at=0.5)
    await until(lambda: {"in 0.5 s, after the step back", "at 0.5 s, after the step back"} <= later.ran)
    await until(lambda: "in 1.5 s, across the step back" in later.ran)
    await asyncio.gather(call, *waits)
    assert "at 0.5 s, asked before the step back" not in later.ran

    place.away.begin()
    try:
        step(clock, HOUR_S, workers)
        await asyncio.sleep(1.5 * LEASE_S)
    finally:
        place.away.end()
    back_at = time.monotonic()
    await until(lambda: "at 0.5 s, asked before the step back" in later.ran, CLAIM_S + NOISE_S)
    assert ran(scene, "at 0.5 s, asked before the step back")[0]["at"] - back_at <= CLAIM_S
    await asyncio.sleep(1.5 * LEASE_S)

    open_gate(scene, "after")
    assert [await handle.result(wait=20) for handle in held] == [[1, 0, 0, 0]] * 8
    assert await patient == [1, 0, 0, 0]
    await scene.noted("ended", 9)
    assert_ran_again_for_a_reason(scene, {"only"})
    await all_serve(scene, workers, before)
    later.assert_nothing_was_early()
    assert later.asked.keys() - later.ran == {"in 3 h", "at 1.5 h"}
    assert short_periods(scene) <= 2  # One for each step on: what was due in a moment is due at once.


@pytest.mark.parametrize("place", ["valkey-paused", "sqlite-locked"], indirect=True)
async def test_call_returns_although_the_clock_jumps_an_hour_ahead(place: ShakyPlace, clock: SharedClock) -> None:
    done: list[bool] = []
    async with place.app() as app:

        @app.task(name="later")
        async def later() -> None:
            done.append(True)

        async with app.worker(lease=LEASE_S):
            call = asyncio.create_task(later.using(delay=0.5, wait=20).call())
            await asyncio.sleep(0.2)
            clock.advance(HOUR_S)
            await call
        assert done == [True]
        assert (await app.queue("later").repair(dry_run=True)).problems == []


class Later:
    """Jobs that are to run after a delay, or at a time, and what became of them."""

    def __init__(self, scene: Scene, clock: SharedClock) -> None:
        self._scene = scene
        self._clock = clock
        self.asked: dict[str, tuple[float, float | None, int | None]] = {}
        """When on the steady clock, after which delay, at which time of the storage."""

    async def ask(self, id: str, *, delay: float | None = None, at: float | None = None) -> None:
        asked_at = time.monotonic()
        run_at: datetime | None = None
        if at is not None:
            run_at = from_at(self._clock.now_us() + round(at * 1_000_000))
            self.asked[id] = (asked_at, None, round(run_at.timestamp() * 1_000_000))
            await self._scene.app.queue("later").enqueue({}, id=id, run_at=run_at)
        else:
            assert delay is not None
            self.asked[id] = (asked_at, delay, None)
            await self._scene.app.queue("later").enqueue({}, id=id, delay=delay)

    @property
    def ran(self) -> set[str]:
        return {note["id"] for note in self._scene.notes("ran")} & self.asked.keys()

    def assert_nothing_was_early(self) -> None:
        """A time is a time of the storage's clock. A delay lasts by the steady clock, unless the storage's went on."""
        for note in self._scene.notes("ran"):
            if note["id"] in self.asked:
                asked_at, delay, run_at = self.asked[note["id"]]
                assert note["fence"] >= note["run_at"]
                assert note["wall"] >= (run_at or 0)
                assert delay is None or delay > 60 or note["at"] - asked_at >= delay


def step(clock: SharedClock, seconds: float, workers: list[WorkerProcess]) -> None:
    """Step the clock, while no call is on its way: the time that Redis and Valkey get is what the clock
    showed when a call was made."""
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    time.sleep(0.05)
    clock.advance(seconds)
    for worker in workers:
        worker.signal(signal.SIGCONT)


# A worker's own clock


WRONG_BY = "HOLDFAST_TEST_WRONG_BY"
WRONG_CLOCK = f"""
import os, time

wrong_by = int(os.environ.get("{WRONG_BY}", 0))
right, right_ns = time.time, time.time_ns
time.time = lambda: right() + wrong_by
time.time_ns = lambda: right_ns() + wrong_by * 1_000_000_000
"""
"""A `sitecustomize` that puts the wall clock of a process, and of those it starts, wrong by a number of seconds."""


@pytest.mark.parametrize("place", ["valkey-paused"], indirect=True)
async def test_workers_with_clocks_a_day_off_run_on_time_and_keep_their_leases(
    scene: Scene,
) -> None:
    """The server's clock counts, and no other. On SQLite there is nothing to test: all processes are on one host and
    read one clock, which is the storage's; that it steps is tested above."""
    (scene.folder / "sitecustomize.py").write_text(WRONG_CLOCK)
    scene.environment["PYTHONPATH"] += os.pathsep + str(scene.folder)
    workers: list[WorkerProcess] = []
    for name, wrong_by in (("ahead", DAY_S), ("behind", -DAY_S)):
        scene.environment[WRONG_BY] = f"{wrong_by:.0f}"
        workers += launch(scene, [("--processes", "1", "--lease", f"{LEASE_S}", "--grace", "3", "--name", name)])
    for worker in workers:
        await worker.ready()
    before = family(workers)
    held = [await scene.app.queue("hold").enqueue({"gate": "after"}) for _ in range(10)]
    await scene.noted("began", 10)

    asked_at, now = time.monotonic(), time.time_ns() // 1000
    for number in range(6):
        await scene.app.queue("later").enqueue({}, id=f"in {number}", delay=1)
        await scene.app.queue("later").enqueue({}, id=f"at {number}", run_at=from_at(now + 1_000_000))
        await scene.app.queue("again").enqueue({"delay": 1, "id": f"again {number}"})
    await until(lambda: len(scene.notes("ran")) == 18)
    for note in scene.notes("ran"):
        assert abs(note["own"] - time.time()) > DAY_S / 2  # It is as wrong as it should be.
        assert 1 <= note["at"] - asked_at < 1 + NOISE_S
        assert note["fence"] >= note["run_at"]
    await asyncio.sleep(max(0.0, asked_at + 2.5 * LEASE_S - time.monotonic()))
    stats = await scene.app.stats()
    assert {worker.worker for worker in stats.workers} == {"ahead", "behind"}
    for info in stats.workers:
        assert abs((info.beat_at - stats.now).total_seconds()) < NOISE_S
    open_gate(scene, "after")
    assert [await handle.result(wait=20) for handle in held] == [[1, 0, 0, 0]] * 10
    await all_serve(scene, workers, before)
    assert len(scene.notes("began")) == len(scene.notes("ended"))


# What is the same everywhere


def launch(scene: Scene, commands: list[tuple[str, ...]]) -> list[WorkerProcess]:
    workers: list[WorkerProcess] = []
    for options in commands:
        workers.append(WorkerProcess(scene, "tests.chaos.outage_tasks:app", *options))
        scene.workers.append(workers[-1])
    return workers


async def start(scene: Scene, commands: list[tuple[str, ...]]) -> list[WorkerProcess]:
    """Workers, ready to work."""
    workers = launch(scene, commands)
    for worker, options in zip(workers, commands, strict=True):
        await worker.ready(0 if "--inline" in options else int(options[options.index("--processes") + 1]))
    return workers


def family(workers: list[WorkerProcess]) -> list[tuple[int, list[int]]]:
    """Processes of workers, and of their children."""
    return [(worker.pid, sorted(worker.children())) for worker in workers]


def open_gate(scene: Scene, gate: str) -> None:
    (scene.folder / gate).touch()


def ran(scene: Scene, id: str) -> list[dict[str, Any]]:
    return [note for note in scene.notes("ran") if note["id"] == id]


async def ends_in_time(wait: Coroutine[Any, Any, object]) -> None:
    """A wait of `WAIT_S` ends when it should, however it ends."""
    began = time.monotonic()
    try:
        await wait
    except (WaitTimeout, StorageUnavailable):
        pass  # It got the error that there is no answer.
    assert time.monotonic() - began < WAIT_S + NOISE_S


def short_periods(scene: Scene) -> int:
    """How often the periodic job ran too soon after itself."""
    times = sorted(note["began"] for note in scene.notes("ticked"))
    return sum(after - before < PERIOD_S for before, after in itertools.pairwise(times))


async def all_serve(scene: Scene, workers: list[WorkerProcess], before: list[tuple[int, list[int]]]) -> None:
    """They are the same processes as before, each is heard of and gets jobs, and every queue is served."""
    assert [worker.process.poll() for worker in workers] == [None] * len(workers)
    assert family(workers) == before
    ticks = len(scene.notes("ticked"))
    meeting = [await scene.app.queue("meet").enqueue({"gate": "all are there"}) for _ in workers]
    await until(lambda: len(met(scene)) == len(workers))
    open_gate(scene, "all are there")
    for handle in meeting:
        assert await handle.result(wait=20) == [1, 0, 0, 0]
    for queue in ("hold", "dies", "only"):
        assert await scene.ask(queue, {"gate": "all are there"}, id="a last one") == [1, 0, 0, 0]
    await scene.app.queue("again").call({"delay": 0, "id": "the very last one"}, wait=20)
    await until(lambda: ran(scene, "the very last one"))
    if ticks:
        await scene.noted("ticked", ticks + 2)
    there = {worker.facts["pid"]: worker.facts["queues"] for worker in (await scene.app.stats()).workers}
    assert there.keys() == {worker.pid for worker in workers}
    for queues in there.values():
        assert isinstance(queues, list)
        assert set(queues) == QUEUES


def met(scene: Scene) -> set[str]:
    """Workers that are at the meeting."""
    return {note["worker"] for note in scene.notes("began") if note["queue"] == "meet"}
