"""What the suites of the Platformatic job-queue assert, and what went wrong in it, through our tasks and workers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    EventKind,
    Execution,
    Holdfast,
    JobCancelled,
    JobError,
    JobFailed,
    JobForgotten,
    JobNotFound,
    KeepResult,
    OptionError,
    Placed,
    Queue,
    RunEvent,
    State,
    WaitTimeout,
    current_job,
)
from tests.app.conftest import until

App = Holdfast[Any]


async def state_of(queue: Queue, id: str) -> State | None:
    job = await queue.get(id)
    return None if job is None else job.state


async def is_forgotten(queue: Queue, id: str) -> bool:
    return await state_of(queue, id) is None


# The queue suite: life, processing


async def test_queue_continues_while_workers_start_and_stop(app: App) -> None:
    @app.task(name="echo")
    async def echo(n: int) -> int:
        return n

    worker = app.worker()
    async with worker:
        assert await echo.call(1) == 1
    worker.stop()  # Once more is no error.
    between = await echo.enqueue(2)
    assert await between.state() is State.WAITING
    with pytest.raises(OptionError, match="make another"):
        await worker.run()
    async with app, app.worker(), app.worker():  # Nor is opening twice, nor two at a time.
        assert await between.result() == 2
        assert await echo.call(3) == 3
    assert (await echo.enqueue(4)).placed is Placed.NEW  # The app is still open.


async def test_reopened_app_continues(make_app: Callable[..., App], app: App) -> None:
    again = make_app()

    @again.task(name="echo")
    async def echo(n: int) -> int:
        return n

    for n in range(3):
        async with again, again.worker():
            assert await echo.call(n) == n
    async with again:
        kept = await echo.enqueue(9)
    async with again, again.worker():
        assert await kept.result() == 9


async def test_handler_gets_its_job_and_its_outcome_is_published_and_stored(app: App) -> None:
    told: list[RunEvent] = []
    heard: list[EventKind] = []
    app.on_event(told.append)

    @app.task(name="greet")
    async def greet(name: str) -> str:
        job = current_job()
        return f"hello {name}, {job.id} {job.attempt}"

    async def listen() -> None:
        async for event in app.queue("greet").events():
            heard.append(event.kind)  # noqa: PERF401

    listening = asyncio.create_task(listen())
    try:
        async with app.worker():
            await until(lambda: knocked(app, heard))
            handle = await greet.using(id="g1").enqueue("ada")
            assert handle.placed is Placed.NEW
            assert await handle.result() == "hello ada, g1 1"
            await until(lambda: {EventKind.CLAIMED, EventKind.COMPLETED} <= set(heard))
            await until(lambda: [(event.kind, event.id) for event in told if event.id == "g1"][1:])
    finally:
        listening.cancel()
    kinds = [(event.kind, event.queue, event.attempt) for event in told if event.id == "g1"]
    assert kinds == [(EventKind.CLAIMED, "greet", 1), (EventKind.COMPLETED, "greet", 1)]
    job = await app.queue("greet").get("g1")
    assert job is not None
    assert (job.state, job.result, job.attempts) == (State.COMPLETED, "hello ada, g1 1", 1)


async def knocked(app: App, heard: list[EventKind]) -> bool:
    """Somebody listens by now: what was just cancelled was heard."""
    await (await app.queue("greet").enqueue({"name": "nobody"}, delay=60)).cancel()
    return EventKind.CANCELLED in heard


async def test_two_failures_and_a_success_are_three_attempts(app: App) -> None:
    attempts: list[int] = []

    @app.task(name="shaky", max_retries=2, min_backoff=0.01, max_backoff=0.02)
    async def shaky() -> int:
        attempts.append(current_job().attempt)
        if len(attempts) < 3:
            raise ConnectionError("not yet")
        return len(attempts)

    handle = await shaky.enqueue()
    async with app.worker():
        assert await handle.result() == 3
    assert attempts == [1, 2, 3]
    job = await app.queue("shaky").get(handle.id)
    assert job is not None
    assert (job.attempts, job.retries) == (3, 2)


async def test_retries_used_up_fail_the_job_with_its_last_error(app: App) -> None:
    told: list[RunEvent] = []
    app.on_event(told.append)

    @app.task(name="broken", max_retries=1, min_backoff=0.01, max_backoff=0.02)
    async def broken() -> None:
        raise ConnectionError(f"attempt {current_job().attempt}")

    async with app.worker():
        with pytest.raises(JobFailed, match="attempt 2") as failed:
            await broken.using(id="b").call()
        await until(lambda: told and told[-1].kind is EventKind.FAILED)
    assert (failed.value.kind, failed.value.attempts, failed.value.error.type) == ("retriable", 2, "ConnectionError")
    assert [event.kind for event in told] == [EventKind.CLAIMED, EventKind.RETRIED, EventKind.CLAIMED, EventKind.FAILED]
    assert [job.id async for job in app.queue("broken").jobs(state="failed")] == ["b"]


async def test_details_of_a_custom_exception_are_returned(app: App) -> None:
    class PaymentError(Exception):
        details = {"code": "card_declined", "tries": [1, 2]}  # noqa: RUF012

    @app.task(name="pay", max_retries=0)
    async def pay() -> None:
        raise PaymentError("declined")

    async with app.worker():
        with pytest.raises(JobFailed) as failed:
            await pay.using(id="p").call()
    assert failed.value.error.details == {"code": "card_declined", "tries": [1, 2]}
    job = await app.queue("pay").get("p")
    assert job is not None
    assert job.state is State.FAILED
    assert job.error == failed.value.error


async def test_cancelled_job_never_runs_and_its_wait_ends(app: App) -> None:
    ran: list[int] = []

    @app.task(name="mail")
    async def mail(n: int) -> int:
        ran.append(n)
        return n

    first = await mail.using(id="job-1").enqueue(1)
    second = await mail.using(id="job-2").enqueue(2)
    waiting = asyncio.create_task(first.result())
    assert await app.queue("mail").cancel("job-1") is CancelResult.CANCELLED
    assert await app.queue("mail").cancel("job-9") is CancelResult.MISSING
    with pytest.raises(JobCancelled):
        await waiting
    async with app.worker():
        assert await second.result() == 2
        assert await second.cancel() is CancelResult.FINISHED
    assert ran == [2]


async def test_a_cancel_reaches_the_run_and_the_job_does_not_come_back(app: App) -> None:
    stopping: list[str | None] = []
    started = asyncio.Event()

    @app.task(name="long")
    async def long() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopping.append(current_job().stopping)

    async with app.worker(lease=0.5):
        handle = await long.enqueue()
        await until(started.is_set)
        reply = await handle.cancel()
        assert (reply, bool(reply)) == (CancelResult.ASKED, False)
        with pytest.raises(JobCancelled):
            await handle.result()
    assert stopping == ["cancel"]
    assert await handle.state() is State.CANCELLED
    assert (await app.queue("long").stats()).ready == 0


async def test_the_state_of_a_job_can_be_read_from_its_request_to_its_end(app: App) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task(name="steps")
    async def step() -> str:
        started.set()
        await go_on.wait()
        return "done"

    queue = app.queue("steps")
    assert await queue.get("s") is None
    before = datetime.now(UTC)
    await step.using(id="s").enqueue()
    waiting = await queue.get("s")
    assert waiting is not None
    assert (waiting.state, waiting.attempts, waiting.result, waiting.error) == (State.WAITING, 0, None, None)
    assert abs((waiting.created_at - before).total_seconds()) < 60
    async with app.worker(name="w"):
        await until(started.is_set)
        running = await queue.get("s")
        assert running is not None
        assert (running.state, running.attempts, running.worker) == (State.RUNNING, 1, "w")
        go_on.set()
        assert await queue.result("s") == "done"
    ended = await queue.get("s")
    assert ended is not None
    assert (ended.state, ended.attempts, ended.result) == (State.COMPLETED, 1, "done")


# How long ends are remembered


async def test_ttl_of_the_request_overrides_the_ttl_of_the_task(app: App) -> None:
    @app.task(name="brief", result_ttl=0.05)
    async def brief(n: int) -> int:
        return n

    @app.task(name="lasting", result_ttl=3600)
    async def lasting(n: int) -> int:
        return n

    await brief.using(id="long", result_ttl=3600).enqueue(1)
    await brief.using(id="short").enqueue(2)
    await lasting.using(id="long").enqueue(3)
    await lasting.using(id="short", result_ttl=0.05).enqueue(4)
    duplicate = await lasting.using(id="short", result_ttl=3600).enqueue(5)
    assert duplicate.placed is Placed.DUPLICATE  # So what it says does not count.
    await app.worker(burst=True).run()
    for queue in (app.queue("brief"), app.queue("lasting")):
        await until(lambda queue=queue: is_forgotten(queue, "short"))
        assert await state_of(queue, "long") is State.COMPLETED
        with pytest.raises(JobNotFound):
            await queue.result("short")
    with pytest.raises(JobForgotten):
        await duplicate.result()


async def test_ttl_of_an_outcome_can_be_changed_afterwards(app: App) -> None:
    @app.task(name="ends", max_retries=0)
    async def end(how: str) -> str:
        if how == "badly":
            raise ValueError(how)
        return how

    queue = app.queue("ends")
    assert await queue.keep("well", 60) is KeepResult.MISSING
    await end.using(id="well", result_ttl=0.3).enqueue("well")
    assert await queue.keep("well", 3600) is KeepResult.LIVE
    await end.using(id="badly").enqueue("badly")
    await end.using(id="too late", result_ttl=0).enqueue("well")
    await app.worker(burst=True).run()
    assert await queue.keep("badly", 0.02) is KeepResult.KEPT
    assert await queue.keep("well", 3600) is KeepResult.KEPT
    assert await queue.keep("too late", 3600) is KeepResult.MISSING
    await until(lambda: is_forgotten(queue, "badly"))
    with pytest.raises(OptionError):
        await queue.keep("well", -1)
    assert await queue.result("well") == "well"
    assert await queue.keep("well", 0.02) is KeepResult.KEPT
    await until(lambda: is_forgotten(queue, "well"))


async def test_result_with_a_ttl_of_zero_reaches_its_waiter(app: App) -> None:
    @app.task(name="fleeting", result_ttl=0)
    async def fleeting(n: int) -> int:
        return n

    async with app.worker():
        assert [await fleeting.call(n) for n in range(5)] == list(range(5))
        unheard = await fleeting.enqueue(9)
        with pytest.raises(OptionError):
            await fleeting.using(result_ttl=-1).enqueue(1)
        await until(lambda: is_forgotten(app.queue("fleeting"), unheard.id))


# Hooks


async def test_after_execution_hook_may_change_result_and_ttl(app: App) -> None:
    seen: list[Execution] = []

    @app.after_execution
    async def after(execution: Execution) -> None:
        seen.append(execution)
        if execution.error is None:
            execution.result = 2 * execution.result
        else:
            execution.error = JobError(type="Hidden", message="ask the operator", kind=execution.error.kind)
        execution.ttl = 0.02 if execution.id.startswith("brief") else 3600

    @app.task(name="runs", max_retries=1, min_backoff=0.01, max_backoff=0.01)
    async def run(n: int) -> int:
        if n < 0:
            raise ValueError("secret")
        return n

    queue = app.queue("runs")
    async with app.worker(name="w"):
        assert await run.using(id="good").call(7) == 14
        with pytest.raises(JobFailed, match="ask the operator"):
            await run.using(id="bad").call(-1)
        await run.using(id="brief").enqueue(1)
        await run.using(id="brief-bad").enqueue(-1)
        await until(lambda: len(seen) == 4)
        await until(lambda: is_forgotten(queue, "brief"))
        await until(lambda: is_forgotten(queue, "brief-bad"))
    good, bad = seen[:2]
    assert (good.queue, good.id, good.attempt, good.payload.n, good.worker) == ("runs", "good", 1, 7, "w")
    assert 0 <= good.seconds < 10
    assert (bad.attempt, bad.payload.n) == (2, -1)  # Once, at the end, not after each attempt.
    assert await state_of(queue, "good") is State.COMPLETED
    assert await state_of(queue, "bad") is State.FAILED


async def test_hook_that_raises_is_logged_without_other_effect(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.after_execution
    def after(execution: Execution) -> None:
        execution.result = "changed"
        raise RuntimeError("the hook is broken")

    @app.task(name="runs")
    async def run(n: int) -> int:
        return n

    with caplog.at_level(logging.ERROR, "holdfast"):
        async with app.worker():
            assert await run.call(1) == 1
        (record,) = [record for record in caplog.records if "the hook is broken" in record.getMessage()]
        assert record.name.startswith("holdfast")
        told: list[tuple[str, str]] = []
        app.on_error(lambda error, where: told.append((str(error), where)))
        async with app.worker():
            assert await run.call(2) == 2
        ((error, where),) = told
        assert error == "the hook is broken"
        assert "after_execution" in where
        assert len([r for r in caplog.records if "the hook is broken" in r.getMessage()]) == 1


async def test_worker_logs_to_the_logger_that_the_user_chose(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(name="quiet")
    async def quiet() -> None: ...

    with caplog.at_level(logging.INFO, "holdfast"):
        async with app.worker(name="scribe"):
            pass
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast.worker"]
    assert any("scribe" in line and "quiet" in line for line in said)
    assert "holdfast" in logging.Logger.manager.loggerDict
    assert logging.getLogger("holdfast").handlers == []  # Where it goes is the program's to say.


# Side by side


async def test_jobs_start_concurrently(app: App) -> None:
    together = asyncio.Barrier(3)  # None of them ends before all three have started.

    @app.task(name="meet")
    async def meet(n: int) -> int:
        await together.wait()
        return n

    async with app.worker(concurrency=3):
        handles = await app.enqueue_many(meet.bind(n) for n in range(3))
        assert [await handle.result() for handle in handles] == [0, 1, 2]


@pytest.mark.parametrize("whose", ["the task's", "the worker's"])
async def test_ten_jobs_run_at_most_three_at_a_time(app: App, whose: str) -> None:
    now, peak = 0, 0

    async def work(n: int) -> int:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        await asyncio.sleep(0.01)
        now -= 1
        return n

    task = app.task(name="work", concurrency=3)(work) if whose == "the task's" else app.task(name="work")(work)
    async with app.worker(concurrency=3 if whose == "the worker's" else None):
        handles = await app.enqueue_many(task.bind(n) for n in range(10))
        assert [await handle.result() for handle in handles] == list(range(10))
    assert peak == 3


# Deduplication


async def test_enqueue_of_an_existing_id_is_a_duplicate_with_any_options(app: App) -> None:
    ran: list[int] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task(name="once", unique="the one")
    async def once(n: int) -> int:
        ran.append(n)
        started.set()
        await go_on.wait()
        return n

    first = await once.enqueue(1)
    waiting = [await once.enqueue(n) for n in (1, 2)]
    assert [handle.placed for handle in waiting] == [Placed.DUPLICATE] * 2
    assert await waiting[0].state() is State.WAITING
    async with app.worker():
        await until(started.is_set)
        running = await once.enqueue(3)
        assert (running.placed, await running.state()) == (Placed.DUPLICATE, State.RUNNING)
        go_on.set()
        assert [await handle.result() for handle in (first, *waiting, running)] == [1] * 4
        for n in (1, 4):
            completed = await once.enqueue(n)
            assert (completed.placed, await completed.result(wait=0)) == (Placed.COMPLETED, 1)
            assert await once.using(wait=0).call(n) == 1
    assert ran == [1]


async def test_a_failed_or_cancelled_id_runs_again_when_it_is_asked_for(app: App) -> None:
    ran: list[str] = []

    @app.task(name="again", unique="id", max_retries=0)
    async def again(how: str) -> str:
        ran.append(how)
        if how == "badly":
            raise ValueError(how)
        return how

    async with app.worker():
        with pytest.raises(JobFailed):
            await again.call("badly")
        await app.queue("again").pause()
        second = await again.enqueue("never")
        assert second.placed is Placed.NEW
        assert await second.cancel()
        third = await again.enqueue("well")
        assert third.placed is Placed.NEW
        await app.queue("again").resume()
        assert await third.result() == "well"
    assert ran == ["badly", "well"]


async def test_one_of_many_concurrent_enqueues_of_an_id_is_new(app: App, make_app: Callable[..., App]) -> None:
    other = make_app()
    async with other:
        asked = [(app, other)[n % 2].queue("rush").enqueue(n, id="one") for n in range(20)]
        placed = Counter(handle.placed for handle in await asyncio.gather(*asked))
    assert placed == {Placed.NEW: 1, Placed.DUPLICATE: 19}
    assert (await app.queue("rush").stats()).ready == 1


async def test_id_is_blocked_for_its_ttl_and_runs_again_after_it(app: App) -> None:
    ran: list[str] = []

    @app.task(name="timed", unique="{name}", max_retries=0)
    async def timed(name: str) -> str:
        ran.append(name)
        if name == "bad":
            raise ValueError(name)
        return name

    queue = app.queue("timed")
    await timed.enqueue("good")
    await timed.enqueue("bad")
    await app.worker(burst=True).run()
    assert (await timed.enqueue("good")).placed is Placed.COMPLETED
    for name in ("good", "bad"):
        assert await queue.keep(name, 0.02) is KeepResult.KEPT
        await until(lambda name=name: is_forgotten(queue, name))
        assert (await timed.enqueue(name)).placed is Placed.NEW
    await app.worker(burst=True).run()
    assert Counter(ran) == {"good": 2, "bad": 2}


# Request and response


async def test_callers_get_the_results_of_their_own_jobs_including_large_ones(app: App) -> None:
    @app.task(name="answers")
    async def answer(n: int, size: int) -> dict[str, Any]:
        return {"n": n, "data": "x" * size}

    async with app.worker():
        answers = await asyncio.gather(*(answer.call(n, 10) for n in range(3)), answer.call(3, 100_000))
    assert [(reply["n"], len(reply["data"])) for reply in answers] == [(0, 10), (1, 10), (2, 10), (3, 100_000)]


async def test_caller_whose_wait_ends_gets_a_timeout_and_others_get_results(app: App) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow(n: int) -> int:
        if n == 0:
            started.set()
            await go_on.wait()
        return n

    async with app.worker():
        with pytest.raises(WaitTimeout) as late:
            await slow.using(id="s", wait=0.1).call(0)
        assert isinstance(late.value, TimeoutError)
        await until(started.is_set)
        assert await slow.call(1) == 1
        assert await app.queue("slow").get("s") is not None
        go_on.set()
        assert await app.queue("slow").result("s") == 0
        assert await slow.using(id="s", wait=0.05).call(0) == 0  # Cached, so no wait is too short.


async def test_second_caller_joins_the_current_run_with_the_first_payload(
    app: App, make_app: Callable[..., App]
) -> None:
    ran: list[int] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.task(name="shared", unique="id")
    async def shared(n: int) -> int:
        ran.append(n)
        started.set()
        await go_on.wait()
        return n

    elsewhere = make_app()
    stub = elsewhere.stub(name="shared", unique="id")(shared.__wrapped__)
    async with elsewhere:
        before = await shared.enqueue(1)
        callers = [asyncio.create_task(stub.call(2))]
        async with app.worker():
            await until(started.is_set)
            callers.append(asyncio.create_task(shared.call(3)))
            callers.append(asyncio.create_task(stub.call(4)))
            quitter = asyncio.create_task(stub.call(5))
            await asyncio.sleep(0.05)
            quitter.cancel()
            go_on.set()
            assert [await before.result(), *await asyncio.gather(*callers)] == [1] * 4
    assert ran == [1]


async def test_old_failure_is_raised_at_once_with_its_cause(app: App) -> None:
    @app.task(name="broken", max_retries=0, failure_ttl=0.3)
    async def broken() -> None:
        raise ValueError("no good")

    handle = await broken.using(id="b").enqueue()
    await app.worker(burst=True).run()
    assert await app.queue("broken").keep("b", 60) is KeepResult.KEPT
    for wait in (0, 30):
        with pytest.raises(JobFailed, match="ValueError: no good") as failed:
            await handle.result(wait=wait)
        assert (failed.value.kind, failed.value.attempts) == ("retriable", 1)
    with pytest.raises(JobFailed):
        await app.queue("broken").result("b", wait=0)


async def test_a_handler_that_returns_nothing_has_completed(app: App) -> None:
    runs: list[int] = []

    @app.task(name="void")
    async def void(n: int) -> None:
        runs.append(n)

    async with app.worker():
        assert await void.call(1) is None
        assert await void.using(id="v").call(2) is None
        again = await void.using(id="v").enqueue(3)
        assert again.placed is Placed.COMPLETED
        assert await again.result() is None
    assert runs == [1, 2]


# What dead workers leave


async def test_a_stalled_job_goes_to_another_worker(app: App) -> None:
    ran: list[int] = []

    @app.task(name="fragile")
    async def fragile() -> str:
        ran.append(current_job().stalls)
        return "saved"

    queue = app.queue("fragile")
    handle = await fragile.using(id="f").enqueue()
    assert await queue.lease(seconds=0.1, wait=0) is not None  # By a worker that is never heard of again.
    async with app.worker(lease=0.5):
        assert await handle.result() == "saved"
    assert ran == [1]
    job = await queue.get("f")
    assert job is not None
    assert (job.attempts, job.stalls, job.retries) == (2, 1, 0)


async def test_jobs_of_dead_workers_are_taken_over_by_a_later_worker(app: App, make_app: Callable[..., App]) -> None:
    ran: list[int] = []

    @app.task(name="left")
    async def left(n: int) -> int:
        ran.append(n)
        return n

    handles = await app.enqueue_many(left.bind(n) for n in range(6))
    for _ in range(3):
        async with make_app() as dead:
            for _ in range(2):
                lease = await dead.queue("left").lease(seconds=0.1, wait=0)
                assert lease is not None, [await handle.info() for handle in handles]
    async with app.worker():
        assert [await handle.result() for handle in handles] == list(range(6))
    assert sorted(ran) == list(range(6))


async def test_a_run_longer_than_its_lease_is_kept_alive_and_not_taken_back(app: App) -> None:
    runs: list[int] = []

    @app.task(name="long")
    async def long() -> int:
        runs.append(current_job().attempt)
        await asyncio.sleep(1.2)  # Far past half a lease more than its lease.
        return len(runs)

    async with app.worker(lease=0.5), app.worker(lease=0.5):
        assert await long.call() == 1
    assert runs == [1]
    assert "stalled" not in {kind for kind, n in (await app.queue("long").stats()).totals.items() if n}


async def test_error_of_an_event_hook_is_logged(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.on_event
    def broken(event: RunEvent) -> None:
        raise RuntimeError(f"cannot note {event.kind}")

    @app.task(name="plain")
    async def plain() -> int:
        return 1

    with caplog.at_level(logging.ERROR, "holdfast"):
        async with app.worker():
            assert await plain.call() == 1
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len([line for line in said if "cannot note" in line]) == 2


# Several queues


async def test_queues_have_separate_ids_results_and_states(app: App) -> None:
    @app.task(name="a")
    async def a(n: int) -> str:
        return f"a{n}"

    @app.task(name="b")
    async def b(n: int) -> str:
        return f"b{n}"

    first = [await task.using(id="same").enqueue(1) for task in (a, b)]
    assert [handle.placed for handle in first] == [Placed.NEW] * 2
    again = [await task.using(id="same").enqueue(2) for task in (a, b)]
    assert [handle.placed for handle in again] == [Placed.DUPLICATE] * 2
    await app.worker("a", burst=True).run()
    assert await first[0].result() == "a1"
    assert (await first[0].state(), await first[1].state()) == (State.COMPLETED, State.WAITING)
    assert await app.queue("a").result("same") == "a1"
    for _ in range(2):  # Workers for one queue come and go.
        await app.worker("b", burst=True).run()
    assert await app.queue("b").result("same") == "b1"


async def test_a_task_without_a_name_has_a_queue_by_its_module_and_function(app: App) -> None:
    @app.task
    async def unnamed(n: int) -> int:
        return n

    assert unnamed.name == "tests.app.test_seeds_platformatic.unnamed"
    async with app.worker():
        assert await unnamed.call(3) == 3
        assert await app.queue(unnamed.name).enqueue({"n": 4}) is not None


# End to end


async def test_two_workers_of_other_apps_share_ten_jobs_and_run_each_once(
    app: App, make_app: Callable[..., App]
) -> None:
    ran: list[tuple[str, int]] = []
    both = asyncio.Barrier(2)

    def serve(other: App) -> None:
        @other.task(name="shared", concurrency=1)
        async def work(n: int) -> int:
            ran.append((current_job().worker, n))
            if n < 2:
                await both.wait()  # So that neither worker can take everything.
            return 10 * n

    one, two = make_app(), make_app()
    serve(one)
    serve(two)
    async with one, two, one.worker(name="one"), two.worker(name="two"):
        handles = [await app.queue("shared").enqueue({"n": n}) for n in range(10)]
        assert [await handle.result() for handle in handles] == [10 * n for n in range(10)]
    assert sorted(n for _, n in ran) == list(range(10))
    assert {worker for worker, _ in ran} == {"one", "two"}


async def test_stop_waits_for_running_jobs_and_claims_nothing_more(app: App) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    ended: list[int] = []

    @app.task(name="long", concurrency=1)
    async def long(n: int) -> int:
        started.set()
        await go_on.wait()
        ended.append(n)
        return n

    handles = await app.enqueue_many(long.bind(n) for n in range(2))
    worker = app.worker(grace=20)
    serving = asyncio.create_task(worker.run())
    await until(started.is_set)
    worker.stop()
    await asyncio.sleep(0.1)
    assert not serving.done()
    assert ended == []
    go_on.set()
    await serving
    assert ended == [0]
    assert await handles[0].result(wait=0) == 0
    assert await handles[1].state() is State.WAITING


async def test_a_graceful_stop_loses_nothing_however_often_it_happens(app: App) -> None:
    done: Counter[int] = Counter()

    @app.task(name="steady", concurrency=4)
    async def steady(n: int) -> None:
        await asyncio.sleep(0.005)
        done[n] += 1

    await app.enqueue_many(steady.bind(n) for n in range(60))
    stops = 0
    while len(done) < 60:
        stops += 1
        async with app.worker(grace=0 if stops % 2 else 5):
            await asyncio.sleep(0.03)
        assert stops < 300
    assert set(done.values()) == {1}
    stats = await app.queue("steady").stats()
    assert (stats.ready, stats.running, stats.failed) == (0, 0, 0)
    assert stats.totals.get("stalled", 0) == 0
