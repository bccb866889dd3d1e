"""holdfast.testing: an app on memory, a clock that moves when told to, a worker that runs what is ready."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    EventKind,
    Failure,
    Holdfast,
    HoldfastError,
    JobFailed,
    NotOpen,
    OptionError,
    PermanentError,
    Placed,
    Retry,
    State,
    WaitTimeout,
    current_job,
)
from holdfast.storage.local.memory import MemoryStorage
from holdfast.testing import Rehearsal, rehearse
from holdfast.testing.rehearsal import MAX_MORE_RUNS, START


@pytest.fixture
def app(tmp_path: Path) -> Holdfast[Any]:
    """Not open, on a file that must never be made."""
    return Holdfast(f"sqlite:///{tmp_path}/real.db")


# Drain


async def test_drain_runs_ready_jobs_and_the_jobs_that_they_enqueue(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="down")
    async def down(n: int) -> None:
        ran.append(n)
        if n:
            await down.enqueue(n - 1)

    with rehearse(app) as jobs:
        await down.enqueue(3)
        events = await jobs.drain()
        assert ran == [3, 2, 1, 0]
        assert [event.kind for event in events] == [EventKind.COMPLETED] * 4
        assert await jobs.drain() == []


async def test_drain_runs_sync_handlers_too(app: Holdfast[Any]) -> None:
    @app.task(name="sync")
    def double(n: int) -> int:
        return 2 * n

    with rehearse(app) as jobs:
        handle = await double.enqueue(4)
        await jobs.drain()
        assert await handle.result(wait=0) == 8


async def test_drain_runs_jobs_of_all_tasks_and_says_how_each_ended(app: Holdfast[Any]) -> None:
    @app.task(name="good")
    async def good() -> int:
        return 1

    @app.task(name="bad")
    async def bad() -> None:
        raise PermanentError("on purpose")

    with rehearse(app) as jobs:
        await good.using(id="a").enqueue()
        await bad.using(id="b").enqueue()
        events = {event.id: event for event in await jobs.drain()}
        assert events.keys() == {"a", "b"}
        assert (events["a"].kind, events["a"].queue, events["a"].attempt) == (EventKind.COMPLETED, "good", 1)
        assert events["b"].kind is EventKind.FAILED
        assert events["b"].error is not None
        assert events["b"].error.message == "on purpose"


async def test_results_errors_and_cached_results_equal_those_of_a_worker(app: Holdfast[Any]) -> None:
    @app.task(name="add", unique="{a}")
    async def add(a: int) -> int:
        if a < 0:
            raise PermanentError("negative")
        return a + 1

    with rehearse(app) as jobs:
        handle, wrong = await add.enqueue(1), await add.enqueue(-1)
        with pytest.raises(WaitTimeout):
            await handle.result(wait=0)
        await jobs.drain()
        assert await handle.result(wait=0) == 2
        with pytest.raises(JobFailed, match="negative"):
            await wrong.result(wait=0)
        assert (await add.enqueue(1)).placed is Placed.COMPLETED


async def test_endless_drain_is_stopped_with_a_helpful_error(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="endless")
    async def endless() -> None:
        ran.append(1)
        await endless.enqueue()

    with rehearse(app) as jobs:
        await endless.enqueue()
        with pytest.raises(HoldfastError, match=r"more than 50 runs: does a job enqueue itself without a delay\?"):
            await asyncio.wait_for(jobs.drain(max_runs=50), 30)
        assert 50 <= len(ran) < 200


async def test_drain_of_a_job_that_always_reenqueues_itself_is_stopped(app: Holdfast[Any]) -> None:
    @app.task(name="again", min_backoff=0, max_backoff=0, max_retries=1_000_000)
    async def again() -> None:
        raise Retry(delay=0)

    with rehearse(app) as jobs:
        await again.enqueue()
        with pytest.raises(HoldfastError, match="more than 300 runs"):
            await asyncio.wait_for(jobs.drain(max_runs=300), 60)


async def test_drain_runs_more_ready_jobs_than_the_limit_of_further_ones(app: Holdfast[Any]) -> None:
    @app.task(name="many")
    async def many(number: int) -> None: ...

    with rehearse(app) as jobs:
        await app.enqueue_many(many.bind(number) for number in range(MAX_MORE_RUNS + 50))
        assert len(await jobs.drain()) == MAX_MORE_RUNS + 50


# Advance


async def test_advance_stops_a_job_that_enqueues_itself_after_its_limit(app: Holdfast[Any]) -> None:
    @app.task(name="endless")
    async def endless() -> None:
        await endless.enqueue()

    with rehearse(app) as jobs:
        await endless.using(delay=60).enqueue()
        with pytest.raises(HoldfastError, match="more than 20 runs"):
            await jobs.advance(minutes=2, max_runs=20)


async def test_advance_after_a_step_back_runs_jobs_at_their_time(app: Holdfast[Any]) -> None:
    ran: list[datetime] = []

    @app.task(name="later")
    async def later() -> None:
        ran.append(jobs.now)

    with rehearse(app) as jobs:
        start = jobs.now
        await later.using(delay=100).enqueue()
        await later.using(run_at=start + timedelta(seconds=200)).enqueue()
        jobs.clock.advance(-3600)
        await later.using(delay=50).enqueue()
        await jobs.advance(hours=2)
        back = start - timedelta(hours=1)
        assert ran == [back + timedelta(seconds=50), back + timedelta(seconds=100), start + timedelta(seconds=200)]


async def test_advance_lists_no_waiting_jobs(app: Holdfast[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost would grow with the square of the number of jobs."""

    @app.task(name="later")
    async def later() -> None: ...

    with rehearse(app) as jobs:
        await app.enqueue_many(later.using(delay=number).bind() for number in range(1, 6))
        monkeypatch.setattr(MemoryStorage, "scan", None)
        assert len(await jobs.advance(minutes=1)) == 5


async def test_delayed_job_runs_at_its_time(app: Holdfast[Any]) -> None:
    ran: list[datetime] = []

    @app.task(name="remind")
    async def remind() -> None:
        ran.append(jobs.now)

    with rehearse(app) as jobs:
        assert jobs.now == START
        await remind.using(delay=86_400).enqueue()
        assert await jobs.drain() == []
        assert await jobs.advance(hours=23) == []
        assert jobs.now == START + timedelta(hours=23)
        assert len(await jobs.advance(hours=2)) == 1
        assert jobs.now == START + timedelta(hours=25)
        assert [at - START for at in ran] == [timedelta(days=1)]


async def test_advancing_a_day_takes_no_real_time(app: Holdfast[Any]) -> None:
    @app.task(name="far")
    async def far() -> None: ...

    with rehearse(app) as jobs:
        await far.using(run_at=START + timedelta(days=300)).enqueue()
        began = time.monotonic()
        assert len(await jobs.advance(days=365)) == 1
        assert time.monotonic() - began < 20


async def test_everything_runs_in_the_order_of_its_own_time(app: Holdfast[Any]) -> None:
    ran: list[tuple[float, str]] = []

    def note(what: str) -> None:
        ran.append(((jobs.now - START).total_seconds(), what))

    @app.task(name="flaky", min_backoff=10, max_backoff=10, max_retries=2)
    async def flaky() -> None:
        note(f"flaky {current_job().attempt}")
        raise ValueError("again")

    @flaky.on_failure
    async def mourn(failure: Failure) -> None:
        note(f"mourned after {failure.job.attempts}")

    @app.task(name="hourly", singleton="the one")
    async def periodic() -> None:
        note("periodic")
        await periodic.using(delay=15).enqueue()

    @app.task(name="once")
    async def once(what: str) -> None:
        note(what)

    with rehearse(app) as jobs:
        await once.using(delay=35).enqueue("delayed")
        await once.using(run_at=START + timedelta(seconds=12)).enqueue("scheduled")
        await periodic.using(delay=5).enqueue()
        await flaky.enqueue()
        await jobs.advance(50)
    assert [at for at, _ in ran] == [0, 5, 10, 12, 20, 20, 20, 35, 35, 50]
    assert sorted(ran) == [
        *((0, "flaky 1"), (5, "periodic"), (10, "flaky 2"), (12, "scheduled")),
        *((20, "flaky 3"), (20, "mourned after 3"), (20, "periodic")),
        *((35, "delayed"), (35, "periodic"), (50, "periodic")),
    ]
    assert ran.index((20, "flaky 3")) < ran.index((20, "mourned after 3"))


async def test_backoffs_grow_on_the_clock_of_the_rehearsal(app: Holdfast[Any]) -> None:
    @app.task(name="flaky", min_backoff=60, max_backoff=3600, max_retries=3)
    async def flaky() -> None:
        raise ValueError("again")

    with rehearse(app) as jobs:
        handle = await flaky.enqueue()
        assert [event.kind for event in await jobs.drain()] == [EventKind.RETRIED]
        assert await jobs.advance(59) == []
        assert [event.kind for event in await jobs.advance(20)] == [EventKind.RETRIED]
        assert await jobs.advance(60) == []
        assert [event.kind for event in await jobs.advance(hours=2)] == [EventKind.RETRIED, EventKind.FAILED]
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=0)
        assert raised.value.attempts == 4


async def test_advance_also_runs_jobs_that_are_ready_now(app: Holdfast[Any]) -> None:
    @app.task(name="now")
    async def now() -> None: ...

    with rehearse(app) as jobs:
        await now.enqueue()
        assert [event.kind for event in await jobs.advance(0)] == [EventKind.COMPLETED]
        with pytest.raises(OptionError, match="advance moves the clock forward"):
            await jobs.advance(-1)


async def test_results_are_forgotten_on_the_clock_of_the_rehearsal(app: Holdfast[Any]) -> None:
    @app.task(name="kept", unique="x", result_ttl=3600)
    async def kept() -> int:
        return 1

    with rehearse(app) as jobs:
        handle = await kept.enqueue()
        await jobs.drain()
        await jobs.advance(minutes=59)
        assert await handle.state() is State.COMPLETED
        await jobs.advance(minutes=2)
        assert await handle.state() is None


async def test_rehearsal_starts_at_the_given_time(app: Holdfast[Any]) -> None:
    with rehearse(app, now=datetime(2030, 5, 6, tzinfo=UTC)) as jobs:
        assert jobs.now == datetime(2030, 5, 6, tzinfo=UTC)
        handle = await app.queue("q").enqueue(1)
        info = await app.queue("q").get(handle.id)
        assert info is not None
        assert abs(info.created_at - jobs.now) < timedelta(seconds=1)
    with pytest.raises(OptionError, match="has no timezone"):
        Rehearsal(app, now=datetime(2030, 5, 6))


# What ran


async def test_ran_lists_runs_of_one_task_or_of_all(app: Holdfast[Any]) -> None:
    @app.task(name="one")
    async def one() -> None: ...

    @app.task(name="two", min_backoff=10, max_backoff=10)
    async def two() -> None:
        if current_job().attempt == 1:
            raise ValueError("first")

    with rehearse(app) as jobs:
        assert jobs.ran() == []
        await one.using(id="a").enqueue()
        await two.using(id="b").enqueue()
        await jobs.advance(60)
        assert [(run.id, run.kind) for run in jobs.ran(one)] == [("a", EventKind.COMPLETED)]
        assert [(run.attempt, run.kind) for run in jobs.ran("two")] == [
            (1, EventKind.RETRIED),
            (2, EventKind.COMPLETED),
        ]
        assert len(jobs.ran()) == 3
        assert jobs.ran("three") == []


async def test_hooks_and_resources_are_used_in_a_rehearsal(tmp_path: Path) -> None:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan() -> Any:
        yield {"db": "open"}

    app: Holdfast[Any] = Holdfast(f"sqlite:///{tmp_path}/real.db", lifespan=lifespan)
    heard: list[EventKind] = []
    app.on_event(lambda event: heard.append(event.kind))

    @app.task(name="uses")
    async def uses() -> str:
        return app.resources["db"]

    with rehearse(app) as jobs:
        handle = await uses.enqueue()
        await jobs.drain()
        assert await handle.result(wait=0) == "open"
    assert heard == [EventKind.CLAIMED, EventKind.COMPLETED]


# The app's own storage


async def test_nothing_of_the_apps_own_storage_is_touched(app: Holdfast[Any], tmp_path: Path) -> None:
    @app.task(name="t")
    async def task() -> int:
        return 1

    with rehearse(app) as jobs:
        await task.enqueue()
        await jobs.drain()
        async with app:
            await task.enqueue()
            await jobs.drain()
        assert await asyncio.to_thread(task.sync.using(wait=0, id="x").enqueue)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotOpen):
        await task.enqueue()


async def test_rehearsal_starts_empty_and_leaves_nothing(app: Holdfast[Any]) -> None:
    async with app:
        await app.queue("q").enqueue("real", id="a")
    with rehearse(app):
        assert await app.queue("q").get("a") is None
        await app.queue("q").enqueue("rehearsed", id="a")
    with rehearse(app):
        assert await app.queue("q").get("a") is None
    async with app:
        info = await app.queue("q").get("a")
        assert info is not None
        assert info.payload == "real"


async def test_a_rehearsal_can_be_used_for_two_blocks(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    rehearsal = rehearse(app)
    for _ in range(2):
        with rehearsal as jobs:
            assert jobs.ran() == []
            await task.enqueue()
            await jobs.drain()
            with pytest.raises(OptionError, match="already in a rehearsal"), rehearsal:
                ...
            assert len(jobs.ran()) == len(jobs.enqueued()) == 1


async def test_an_app_that_is_open_stays_open_through_a_rehearsal(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task() -> int:
        return 1

    async with app:
        await app.queue("q").enqueue("real", id="a")
        with rehearse(app) as jobs:
            await task.enqueue()
            await jobs.drain()
            async with app:
                await task.enqueue()
                await jobs.drain()
            assert await app.queue("q").get("a") is None
        info = await app.queue("q").get("a")
        assert info is not None
        assert info.payload == "real"
        async with app.worker():
            assert await task.call() == 1


async def test_code_that_opens_and_serves_the_app_itself_can_be_rehearsed(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task() -> int:
        return 1

    async def program() -> int:
        async with app, app.worker():
            return await task.call()

    with rehearse(app):
        assert await asyncio.wait_for(program(), 20) == 1


async def test_two_apps_are_rehearsed_side_by_side(tmp_path: Path) -> None:
    first, second = (Holdfast(f"sqlite:///{tmp_path}/{name}.db") for name in ("first", "second"))

    @first.task(name="t")
    async def one() -> str:
        return "first"

    @second.task(name="t")
    async def two() -> str:
        return "second"

    with rehearse(first) as jobs, rehearse(second) as others:
        await one.enqueue()
        assert await others.drain() == []
        assert len(await jobs.drain()) == 1
        await two.enqueue()
        assert (len(await jobs.drain()), len(await others.drain())) == (0, 1)
    assert list(tmp_path.iterdir()) == []


# Without a loop


def test_a_sync_test_rehearses_with_the_blocking_verbs(app: Holdfast[Any], tmp_path: Path) -> None:
    ran: list[int] = []

    @app.task(name="t")
    async def task(n: int) -> int:
        ran.append(n)
        return n + 1

    with rehearse(app) as jobs:
        handle = task.sync.enqueue(1)
        later = task.sync.using(delay=60).enqueue(2)
        asyncio.run(jobs.drain())
        assert handle.result(wait=0) == 2
        assert later.state() is State.WAITING
        asyncio.run(jobs.advance(60))
        assert later.result(wait=0) == 3
        assert app.sync.queue("t").stats().completed == 2
    assert ran == [1, 2]
    assert list(tmp_path.iterdir()) == []


def test_app_without_tasks_says_that_it_has_no_tasks(app: Holdfast[Any]) -> None:
    with rehearse(app) as jobs, pytest.raises(OptionError, match="this app has no tasks"):
        asyncio.run(jobs.drain())


# The fixture


SHOP = """
from holdfast import Holdfast

app = Holdfast("redis://nowhere.invalid:1")

@app.task
async def remind(who: str) -> str:
    return f"dear {who}"
"""

TESTS = """
import asyncio
import shop

async def _rehearsed(jobs):
    handle = await shop.remind.using(delay=86_400).enqueue("ada")
    assert await jobs.drain() == []
    await jobs.advance(days=1)
    assert [run.id for run in jobs.ran(shop.remind)] == [handle.id]
    assert await handle.result(wait=0) == "dear ada"

def test_a_reminder(rehearse):
    asyncio.run(_rehearsed(rehearse(shop.app)))

def test_a_reminder_at_once(eager):
    jobs = eager(shop.app)
    assert shop.remind.sync.call("ada") == "dear ada"
    jobs.assert_enqueued(shop.remind, who="ada")

def test_nothing_is_left_of_the_other_test(rehearse):
    jobs = rehearse(shop.app)
    assert jobs.ran() == []
    assert shop.app.sync.stats().queues == []

def test_the_app_is_itself_again():
    assert "nowhere.invalid" in repr(shop.app)
    assert not shop.app._session.rehearsal
"""


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    (tmp_path / "shop.py").write_text(textwrap.dedent(SHOP))

    def run(tests: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_shop.py").write_text(textwrap.dedent(tests))
        plain = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error"]
        command = [sys.executable, "-m", "pytest", "-q", *plain, "test_shop.py"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.mark.suite("usual")
def test_the_fixtures_come_with_the_package(project: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = project(TESTS)
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.suite("usual")
def test_a_failing_test_still_puts_the_app_back(project: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = project("""
        import shop

        def test_fails(rehearse):
            rehearse(shop.app)
            assert shop.app._session.rehearsal
            assert False, "on purpose"

        def test_after():
            assert not shop.app._session.rehearsal
    """)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.suite("usual")
def test_package_works_without_pytest() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['pytest'] = None; import holdfast, holdfast.testing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
