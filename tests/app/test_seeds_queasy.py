"""What Queasy's own suites assert, and what went wrong in it, shown through tasks, handles and a worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    Failure,
    Holdfast,
    JobFailed,
    OptionError,
    PermanentError,
    Placed,
    State,
    Update,
    current_job,
)
from tests import servers
from tests.app.conftest import until

App = Holdfast[Any]


async def stall(app: App, queue: str) -> None:
    """Take a job as a worker that then dies without a word, and wait until it was taken back."""
    lost = await app.queue(queue).lease(seconds=0.1, wait=5)
    assert lost is not None

    async def is_back() -> bool:
        await app.queue(queue).sweep()
        job = await app.queue(queue).get(lost.id)
        return job is not None and job.state is State.WAITING

    await until(is_back)


# The queue suite


async def test_dispatched_job_waits_with_its_id_data_and_time(app: App) -> None:
    @app.task(name="mail")
    async def mail(to: str) -> None: ...

    soon = datetime.now(UTC) + timedelta(minutes=5)
    unnamed = await mail.enqueue("ada")
    custom_id = await mail.using(id="to-bob", run_at=soon).enqueue("bob")
    assert isinstance(unnamed.id, str)
    assert unnamed.id != custom_id.id == "to-bob"
    assert unnamed.placed == custom_id.placed == Placed.NEW
    first, second = await app.queue("mail").get(unnamed.id), await app.queue("mail").get("to-bob")
    assert first is not None
    assert second is not None
    assert (first.state, first.payload, first.attempts) == (State.WAITING, {"to": "ada"}, 0)
    assert (second.state, second.payload, second.run_at) == (State.WAITING, {"to": "bob"}, soon)


async def test_a_second_dispatch_of_a_waiting_id_replaces_its_data_or_leaves_it(app: App) -> None:
    @app.task(name="sync", singleton="user:{user}")
    async def sync(user: int, region: str) -> None: ...

    await sync.enqueue(1, "eu")
    again = await sync.enqueue(1, "us")
    assert again.placed is Placed.UPDATED
    job = await app.queue("sync").get(again.id)
    assert job is not None
    assert job.payload["region"] == "us"
    left = await sync.using(on_conflict=Update(payload=False)).enqueue(1, "asia")
    assert left.placed is Placed.UPDATED
    job = await app.queue("sync").get(left.id)
    assert job is not None
    assert job.payload["region"] == "us"
    assert (await app.queue("sync").stats()).ready == 1


async def test_cancelled_job_does_not_run_and_another_does(app: App) -> None:
    ran: list[str] = []

    @app.task(name="mail")
    async def mail(to: str) -> None:
        ran.append(to)

    unwanted = await mail.enqueue("ada")
    wanted = await mail.using(id="to-bob").enqueue("bob")
    assert await unwanted.cancel()
    assert not await app.queue("mail").cancel("nobody")
    assert await app.queue("mail").cancel("nobody") is CancelResult.MISSING
    async with app.worker():
        await wanted.result()
    assert ran == ["bob"]
    assert await unwanted.state() is State.CANCELLED


async def test_processed_jobs_leave_no_record_and_a_future_job_stays(app: App) -> None:
    ran: list[int] = []

    @app.task(name="steps", result_ttl=0)
    async def step(n: int) -> None:
        ran.append(n)

    future = await step.using(delay=3600).enqueue(99)
    await app.enqueue_many(step.bind(n) for n in range(3))
    await app.worker(burst=True).run()
    assert ran == [0, 1, 2]
    stats = await app.queue("steps").stats()
    assert (stats.ready, stats.running, stats.completed, stats.failed, stats.scheduled) == (0, 0, 0, 0, 1)
    assert [job.id async for job in app.queue("steps").jobs()] == [future.id]
    job = await app.queue("steps").get(future.id)
    assert job is not None
    assert job.attempts == 0


async def test_one_id_in_two_queues_is_run_by_the_handler_of_each_queue(app: App) -> None:
    both_run = asyncio.Barrier(2)  # Each can only end while the other runs.

    @app.task(name="left")
    async def left(n: int) -> str:
        await both_run.wait()
        return f"left {n}"

    @app.task(name="right")
    async def right(n: int) -> str:
        await both_run.wait()
        return f"right {n}"

    async with app.worker():
        first = await left.using(id="same").enqueue(1)
        second = await right.using(id="same").enqueue(2)
        assert (await first.result(), await second.result()) == ("left 1", "right 2")


async def test_without_retries_left_the_fail_handler_gets_the_id_the_data_and_the_error(app: App) -> None:
    told: list[Failure] = []

    @app.task(name="charge", max_retries=0)
    async def charge(user: int, *, cents: int) -> None:
        raise ConnectionError(f"no bank for {user}")

    @charge.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    handle = await charge.using(id="charge-7").enqueue(7, cents=250)
    async with app.worker():
        with pytest.raises(JobFailed):
            await handle.result()
        await until(lambda: told)
    (failure,) = told
    assert (failure.job.id, failure.job.generation, failure.job.attempts) == ("charge-7", handle.generation, 1)
    assert (failure.payload.user, failure.payload.cents) == (7, 250)
    assert (failure.error.type, failure.error.message) == ("ConnectionError", "no bank for 7")
    assert failure.error.kind == "retriable"


async def test_each_job_that_used_up_its_retries_reaches_the_fail_handler_once(app: App) -> None:
    runs: list[int] = []
    told: list[int] = []

    @app.task(name="shaky", max_retries=2, min_backoff=0.01, max_backoff=0.02)
    async def shaky(n: int) -> None:
        runs.append(n)
        if n % 3 == 0:
            raise PermanentError("never")
        if n % 3 == 1:
            raise ValueError("not now")

    @shaky.on_failure
    def note(failure: Failure) -> None:
        told.append(failure.payload.n)

    await app.enqueue_many(shaky.bind(n) for n in range(30))
    async with app.worker():
        await until(lambda: len(told) == 20)
        await until(lambda: len(runs) == 10 + 30 + 10)
    assert sorted(told) == [n for n in range(30) if n % 3 != 2]
    assert sorted(runs) == sorted([n for n in range(30) for _ in range(3 if n % 3 == 1 else 1)])


async def test_first_retry_waits_the_minimum_backoff_plus_small_jitter(app: App) -> None:
    @app.task(name="slow", min_backoff=100)
    async def slow() -> None:
        raise ValueError("not now")

    before = datetime.now(UTC)
    handle = await slow.enqueue()
    await app.worker(burst=True).run()
    after = datetime.now(UTC)
    job = await app.queue("slow").get(handle.id)
    assert job is not None
    assert (job.state, job.retries) == (State.WAITING, 1)
    assert before + timedelta(seconds=99.9) <= job.run_at <= after + timedelta(seconds=126)


async def test_job_over_its_stall_limit_goes_to_the_fail_handler_without_another_run(app: App) -> None:
    ran: list[str] = []
    told: list[Failure] = []

    @app.task(name="poison", max_stalls=1)
    async def poison(name: str) -> None:
        ran.append(name)

    @poison.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    deadly = await poison.using(id="deadly").enqueue("deadly")
    await stall(app, "poison")
    await stall(app, "poison")
    once = await poison.using(id="once").enqueue("once")
    await stall(app, "poison")
    async with app.worker():
        with pytest.raises(JobFailed) as failed:
            await deadly.result()
        await once.result()
        await until(lambda: told)
    assert ran == ["once"]
    assert failed.value.kind == "stall"
    assert failed.value.error.type == "Stalled"
    (failure,) = told
    assert (failure.job.id, failure.error.kind, failure.job.stalls) == ("deadly", "stall", 2)
    assert "lost 2 times" in failure.error.message


async def test_job_over_its_stall_limit_without_a_fail_handler_can_be_retried(app: App) -> None:
    ran: list[str] = []

    @app.task(name="poison", max_stalls=0)
    async def poison(name: str) -> str:
        ran.append(name)
        return name

    handle = await poison.enqueue("deadly")
    await stall(app, "poison")
    async with app.worker():
        with pytest.raises(JobFailed):
            await handle.result()
        assert ran == []
        assert [job.id async for job in app.queue("poison").jobs(state="failed")] == [handle.id]
        again = await app.queue("poison").retry(handle.id)
        assert await again.result() == "deadly"


async def test_jobs_of_an_unknown_task_wait_for_a_worker_that_has_it(app: App, make_app: Callable[..., App]) -> None:
    @app.stub(name="reports.render")
    def render(n: int) -> int:
        raise NotImplementedError

    @app.task(name="other")
    async def other() -> None: ...

    handle = await render.enqueue(3)
    with pytest.raises(OptionError, match=r"no task matches 'reports\.\*'"):
        app.worker("reports.*")
    await app.worker(burst=True).run()
    job = await app.queue("reports.render").get(handle.id)
    assert job is not None
    assert (job.state, job.attempts) == (State.WAITING, 0)

    knows = make_app()

    @knows.task(name="reports.render")
    def really_render(n: int) -> int:
        return 2 * n

    async with knows, knows.worker():
        assert await handle.result() == 6


# The manager: room, turns, order


@pytest.mark.parametrize("size", [600, 100_000])
async def test_jobs_too_large_for_free_capacity_run_one_after_another(app: App, size: int) -> None:
    at_once: list[int] = []
    running: set[int] = set()

    @app.task(name="large", size=size)
    async def large(n: int) -> int:
        running.add(n)
        at_once.append(len(running))
        await asyncio.sleep(0.002)
        running.discard(n)
        return n

    @app.task(name="small")
    async def small(n: int) -> int:
        return n

    async with app.worker():
        handles = await app.enqueue_many([large.bind(n) for n in range(5)] + [small.bind(n) for n in range(20)])
        assert [await handle.result() for handle in handles] == [*range(5), *range(20)]
    assert at_once == [1] * 5


async def test_capacity_of_timed_out_runs_is_returned_once(app: App) -> None:
    @app.task(name="hangs", size=400, timeout=0.02, max_timeouts=1, min_backoff=0.01, max_backoff=0.01)
    async def hangs(n: int) -> None:
        await asyncio.sleep(3600)

    async def used() -> Any:
        (worker,) = (await app.stats()).workers
        return worker.facts["used"], worker.facts["running"]

    async with app.worker(lease=0.5) as worker:
        handles = await app.enqueue_many(hangs.bind(n) for n in range(4))
        for handle in handles:
            with pytest.raises(JobFailed) as failed:
                await handle.result()
            assert (failed.value.kind, failed.value.attempts) == ("timeout", 2)
        assert worker.running == 0

        async def is_free() -> bool:
            return await used() == (0, 0)

        await until(is_free)


async def test_the_queue_of_the_higher_priority_is_served_first(app: App) -> None:
    order: list[str] = []

    @app.task(name="low", queue_priority=50)
    async def low() -> None:
        order.append("low")

    @app.task(name="high", queue_priority=200)
    async def high() -> None:
        order.append("high")

    await app.enqueue_many([low.bind() for _ in range(5)] + [high.bind() for _ in range(5)])
    async with app.worker(concurrency=1):
        await until(lambda: len(order) == 10)
    assert order == ["high"] * 5 + ["low"] * 5


async def test_low_priority_queue_progresses_while_a_high_one_is_never_empty(app: App) -> None:
    order: list[str] = []

    @app.task(name="low", queue_priority=1)
    async def low() -> None:
        order.append("low")

    @app.task(name="high", queue_priority=1000)
    async def high() -> None:
        order.append("high")

    await app.enqueue_many([low.bind()] + [high.bind() for _ in range(60)])
    async with app.worker(concurrency=1):
        await until(lambda: len(order) == 61)
    assert 0 < order.index("low") <= 32


async def test_job_enqueued_while_a_worker_starts_runs_at_once(make_app: Callable[..., App]) -> None:
    """A worker that first looks and then listens would find it a second later, at its next look."""
    app = make_app()

    @app.task(name="echo")
    async def echo(n: int) -> int:
        return n

    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    for n in range(12):
        async with app, app.worker():
            began = loop.time()
            assert await echo.call(n) == n
            seconds.append(loop.time() - began)
    assert sorted(seconds)[-2] < 0.5, seconds  # One of them may have met a busy machine.


@pytest.mark.suite("usual")
async def test_idle_worker_of_many_queues_makes_few_calls_and_no_writes() -> None:
    """What the server has to do for workers without work does not grow with the number of their queues."""
    with servers.Server("valkey") as server:
        many = Holdfast[Any](server.url)
        for n in range(40):
            many.task(name=f"queue{n}")(nothing)

        def calls(*commands: str) -> int:
            lines = server.command("INFO", "commandstats").decode().splitlines()
            told = dict(line.split(":calls=", 1) for line in lines if ":calls=" in line)
            return sum(int(told.get(f"cmdstat_{name}", "0").split(",")[0]) for name in commands)

        async with many, many.worker(lease=60):
            await until(lambda: calls("fcall") > 0)
            await asyncio.sleep(1.5)  # The looks of the beginning.
            server.command("CONFIG", "RESETSTAT")
            await asyncio.sleep(2.5)
            assert calls("fcall", "evalsha") <= 20
            assert calls("set", "zadd", "hset", "setrange") <= 2


async def nothing() -> None: ...


# The pool: timeouts, crashes, closing


async def test_a_run_past_its_timeout_waits_again_and_counts_as_a_timeout(app: App) -> None:
    stopped: list[str | None] = []

    @app.task(name="hangs", timeout=0.05, min_backoff=60)
    async def hangs() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.append(current_job().stopping)

    handle = await hangs.enqueue()
    await app.worker(burst=True).run()
    assert stopped == ["timeout"]
    job = await app.queue("hangs").get(handle.id)
    assert job is not None
    assert (job.state, job.timeouts, job.retries, job.stalls) == (State.WAITING, 1, 0, 0)


async def test_closing_during_a_run_puts_the_job_back_in_front_uncounted(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="long", concurrency=1)
    async def long(n: int) -> None:
        started.set()
        await asyncio.sleep(3600)

    first = await long.enqueue(1)
    await long.enqueue(2)
    async with app.worker(grace=0):
        await until(started.is_set)
    job = await app.queue("long").get(first.id)
    assert job is not None
    assert (job.state, job.attempts, job.retries, job.stalls, job.timeouts) == (State.WAITING, 1, 0, 0, 0)
    lease = await app.queue("long").lease(wait=0)
    assert lease is not None
    assert lease.id == first.id
    assert await lease.release()


async def test_evicted_worker_stops_and_its_job_runs_on_another_worker(app: App) -> None:
    workers: list[str] = []

    @app.task(name="long")
    async def long() -> str:
        workers.append(current_job().worker)
        if len(workers) == 1:
            await asyncio.sleep(3600)
        return "done"

    handle = await long.enqueue()
    first = app.worker(name="first", lease=0.5, grace=0)
    running = asyncio.create_task(first.run())
    await until(lambda: workers)
    assert not await app.evict("nobody")

    async def is_asked() -> bool:  # It is only known from its first beat on.
        return await app.evict("first")

    await until(is_asked)
    await asyncio.wait_for(running, 10)
    job = await app.queue("long").get(handle.id)
    assert job is not None
    assert (job.state, job.stalls) == (State.WAITING, 0)
    async with app.worker(name="second"):
        assert await handle.result() == "done"
    assert workers == ["first", "second"]


async def test_worker_continues_after_a_refused_settlement(app: App) -> None:
    """Its job was given to another while it ran: the late result is refused, and nothing else happens to the worker."""
    go_on = asyncio.Event()
    ends: list[str] = []

    @app.task(name="long")
    async def long(n: int) -> int:
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            ends.append(current_job().stopping or "")
            raise
        return n

    async with app.worker(name="zombie", lease=0.5):
        handle = await long.using(id="x").enqueue(1)
        await until(lambda: running(app, "long", 1))
        await app.queue("long").pause()
        assert (await app.queue("long").sweep(worker="zombie")).stalled == ["x"]
        await until(lambda: ends)
        assert ends == ["lease_lost"]
        assert await handle.state() is State.WAITING
        go_on.set()
        await app.queue("long").resume()
        assert await handle.result() == 1
        assert await long.call(2) == 2
    job = await app.queue("long").get("x")
    assert job is not None
    assert (job.attempts, job.stalls) == (2, 1)


async def running(app: App, queue: str, n: int) -> bool:
    return (await app.queue(queue).stats()).running == n


async def test_closed_worker_leaves_no_thread_no_task_and_no_worker_record(
    app: App, make_app: Callable[..., App]
) -> None:
    other = make_app()

    @other.task(name="quick")
    async def quick(n: int) -> int:
        return n

    @other.task(name="plain")
    def plain(n: int) -> int:
        return n

    async def listed() -> list[str]:
        return [worker.worker for worker in (await app.stats()).workers]

    async def is_listed() -> bool:
        return await listed() == ["one"]

    async def is_gone() -> bool:
        return await listed() == []

    assert await listed() == []
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    async with other, other.worker(name="one"):
        assert [await quick.call(1), await plain.call(2)] == [1, 2]
        await until(is_listed)
    await until(is_gone, 3)  # Far sooner than a worker that died without a word.
    await until(lambda: {thread for thread in threading.enumerate() if "holdfast" in thread.name} <= threads)
    await until(lambda: asyncio.all_tasks() <= tasks)


# Guards, errors, options


async def test_an_app_without_tasks_enqueues_and_cannot_work(app: App) -> None:
    handle = await app.queue("elsewhere").enqueue({"n": 1})
    assert handle.placed is Placed.NEW
    with pytest.raises(OptionError, match="has no tasks"):
        app.worker()


async def test_a_permanent_error_ends_the_job_at_once_under_its_name_and_message(app: App) -> None:
    class Gone(Exception):
        kind = "permanent"

    @app.task(name="told")
    async def told(how: str) -> None:
        raise PermanentError("no such user") if how == "ours" else Gone("likewise")

    async with app.worker():
        for how, type, message in [("ours", "PermanentError", "no such user"), ("theirs", "Gone", "likewise")]:
            with pytest.raises(JobFailed, match=message) as failed:
                await told.call(how)
            assert (failed.value.kind, failed.value.attempts) == ("permanent", 1)
            assert failed.value.error.type.endswith(type)
            assert failed.value.error.message == message


async def test_error_with_retry_at_is_retried_at_that_time(app: App) -> None:
    when = datetime.now(UTC).replace(microsecond=123_000) + timedelta(hours=1)

    class Limited(Exception):
        retry_at = when

    @app.task(name="limited", min_backoff=2, max_backoff=2)
    async def limited() -> None:
        raise Limited

    handle = await limited.enqueue()
    await app.worker(burst=True).run()
    job = await app.queue("limited").get(handle.id)
    assert job is not None
    assert (job.state, job.retries, job.run_at) == (State.WAITING, 1, when)


async def test_misspelt_option_is_refused_and_nothing_is_stored(app: App) -> None:
    @app.task(name="strict")
    async def strict() -> None: ...

    with pytest.raises(OptionError, match="did you mean 'max_retries'"):
        app.task(max_retires=3)(print)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="did you mean 'run_at'"):
        strict.using(runAt=datetime.now(UTC))  # type: ignore[call-arg]
    with pytest.raises(OptionError):
        await strict.using(on_conflict="ifLater").enqueue()  # type: ignore[arg-type]
    assert (await app.queue("strict").stats()).ready == 0


# One run of an id at a time


async def test_dispatch_of_a_running_id_runs_after_it_with_the_newest_data(app: App) -> None:
    spans: list[tuple[int, str]] = []
    inside = 0
    go_on = asyncio.Event()

    @app.task(name="sync", singleton="user")
    async def sync(n: int) -> int:
        nonlocal inside
        inside += 1
        assert inside == 1
        spans.append((n, current_job().id))
        await go_on.wait()
        inside -= 1
        return n

    async with app.worker():
        first = await sync.enqueue(0)
        await until(lambda: spans)
        later = [await sync.enqueue(n) for n in range(1, 6)]
        assert {handle.placed for handle in later} == {Placed.DEFERRED}
        job = await app.queue("sync").get("user")
        assert job is not None
        assert job.state is State.RUNNING
        assert job.deferred
        go_on.set()
        assert await first.result() == 0
        assert [await handle.result() for handle in later] == [5] * 5
    assert spans == [(0, "user"), (5, "user")]


async def test_deferred_dispatch_runs_after_the_run_under_each_run_at_rule(app: App) -> None:
    ran: list[int] = []
    go_on = asyncio.Event()

    @app.task(name="sync", singleton="{rule}")
    async def sync(rule: str, n: int) -> None:
        ran.append(n)
        await go_on.wait()

    rules: dict[str, Any] = {"t": True, "f": False, "later": "if_later", "earlier": "if_earlier"}
    async with app.worker():
        for rule in rules:
            await sync.enqueue(rule, 0)
        await until(lambda: len(ran) == 4)
        followers = [
            await sync.using(on_conflict=Update(run_at=when), delay=0.01).enqueue(rule, 1)
            for rule, when in rules.items()
        ]
        go_on.set()
        for handle in followers:
            await handle.result()
    assert sorted(ran) == [0] * 4 + [1] * 4
