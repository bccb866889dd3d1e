"""How a worker runs one job: what its handler gets, where and in which order it runs, what is stored of its end."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Failure, Holdfast, HoldfastError, JobFailed, PayloadRejected, PermanentError, State, current_job
from tests.app.conftest import until

App = Holdfast[Any]
MakeApp = Callable[..., App]


@dataclass
class Order:
    customer: str
    amounts: list[int]


ODD = [SystemExit(3), asyncio.CancelledError(), StopIteration("end"), BaseException("odd")]
LOOP: list[Any] = []
LOOP.append(LOOP)


class Detailed(Exception):
    def __init__(self, message: str, details: Any) -> None:
        super().__init__(message)
        self.details = details


class Sulking(Exception):
    """Does not even answer what it is."""

    @property
    def details(self) -> Any:
        raise RuntimeError("no details today")

    def __str__(self) -> str:
        raise RuntimeError("no message today")


@pytest.mark.storages("memory")
async def test_an_async_handler_runs_on_the_workers_loop(app: App) -> None:
    @app.task(name="t")
    async def where() -> bool:
        return asyncio.get_running_loop() is home

    home = asyncio.get_running_loop()
    async with app.worker():
        assert await where.using(wait=10).call() is True


@pytest.mark.storages("memory")
async def test_sync_handlers_run_on_threads_at_the_same_time(app: App) -> None:
    both = threading.Barrier(2)

    @app.task(name="t")
    def where() -> str:
        both.wait(10)
        return threading.current_thread().name

    async with app.worker():
        names = await asyncio.gather(where.using(wait=10).call(), where.using(wait=10).call())
    assert len(set(names)) == 2
    assert threading.current_thread().name not in names


@pytest.mark.storages("memory")
async def test_current_job_is_known_to_async_handlers_and_what_they_call(app: App) -> None:
    def deep() -> str:
        return current_job().id

    async def aside() -> str:
        return current_job().id

    @app.task(name="t")
    async def seen() -> list[str]:
        task = asyncio.create_task(aside())
        return [deep(), await task, await asyncio.to_thread(deep)]

    async with app.worker():
        assert await seen.using(id="j", wait=10).call() == ["j", "j", "j"]


@pytest.mark.storages("memory")
async def test_current_job_is_known_to_sync_handlers_and_what_they_call(app: App) -> None:
    def deep() -> str:
        return current_job().id

    @app.task(name="t")
    def seen() -> list[str]:
        return [current_job().id, deep()]

    async with app.worker():
        assert await seen.using(id="j", wait=10).call() == ["j", "j"]


@pytest.mark.storages("memory")
async def test_concurrent_runs_do_not_see_each_others_job(app: App) -> None:
    @app.task(name="a")
    async def mine(number: int) -> str:
        await asyncio.sleep(0.02)
        return current_job().id

    @app.task(name="s")
    def sync_mine(number: int) -> str:
        time.sleep(0.02)
        return current_job().id

    async with app.worker():
        for task in (mine, sync_mine):
            calls = [task.using(id=f"j{n}", wait=10).call(n) for n in range(20)]
            assert await asyncio.gather(*calls) == [f"j{n}" for n in range(20)]
    with pytest.raises(HoldfastError):
        current_job()


async def test_current_job_has_queue_worker_attempt_and_a_rising_fence(app: App) -> None:
    seen: list[tuple[str, str, int, int, int]] = []

    @app.task(name="t", min_backoff=0)
    async def fenced() -> None:
        job = current_job()
        seen.append((job.queue, job.worker, job.attempt, job.retries, job.fence))
        if job.attempt == 1:
            raise ValueError

    async with app.worker(name="w1"):
        await fenced.using(wait=10).call()
    (first, second) = seen
    assert first[:4] == ("t", "w1", 1, 0)
    assert second[:4] == ("t", "w1", 2, 1)
    assert second[4] > first[4] > 0


@pytest.mark.storages("memory")
async def test_arguments_arrive_as_their_annotations_say(app: App) -> None:
    @app.task(name="t")
    async def bill(order: Order, /, at: datetime, *, factor: float = 1.0) -> Order:
        assert isinstance(order, Order)
        assert isinstance(at, datetime)
        return Order(order.customer, [round(amount * factor) for amount in order.amounts])

    async with app.worker():
        report = await bill.using(wait=10).call(Order("ada", [1, 2]), datetime.now(UTC), factor=2)
    assert report == Order("ada", [2, 4])


@pytest.mark.storages("memory")
async def test_a_lone_positional_only_parameter_gets_the_payload_untouched(app: App) -> None:
    got: list[bytes] = []

    @app.task(name="t")
    async def raw(data: bytes, /) -> None:
        got.append(data)

    async with app.worker():
        await raw.using(wait=10).call(b"\x00\xff{not json")
        await (await app.queue("t").enqueue(b"from afar")).result(wait=10)
    assert got == [b"\x00\xff{not json", b"from afar"]


@pytest.mark.storages("memory")
async def test_lone_typed_positional_only_parameter_gets_the_decoded_payload(app: App) -> None:
    @app.task(name="t")
    def total(order: Order, /) -> int:
        return sum(order.amounts)

    async with app.worker():
        assert await total.using(wait=10).call(Order("ada", [1, 2])) == 3
        by_name = await app.queue("t").enqueue({"customer": "bob", "amounts": [4]})
        assert await by_name.result(wait=10) == 4


@pytest.mark.storages("memory")
async def test_star_arguments_arrive(app: App) -> None:
    @app.task(name="a")
    async def many(first: int, *rest: int, last: int = 0, **custom_id: int) -> list[Any]:
        return [first, rest, last, custom_id]

    @app.task(name="s")
    def sync_many(*rest: int, **custom_id: int) -> list[Any]:
        return [rest, custom_id]

    async with app.worker():
        assert await many.using(wait=10).call(1, 2, 3, last=4, x=5) == [1, [2, 3], 4, {"x": 5}]
        assert await many.using(wait=10).call(1) == [1, [], 0, {}]
        assert await sync_many.using(wait=10).call(1, 2, y=3) == [[1, 2], {"y": 3}]


@pytest.mark.storages("memory")
async def test_defaults_come_from_the_code_of_the_worker(app: App, make_app: MakeApp) -> None:
    @app.task(name="t")
    async def greet(name: str, greeting: str = "new default") -> str:
        return f"{greeting} {name}"

    async with make_app() as producer, app.worker():

        @producer.task(name="t")
        async def old_greet(name: str, greeting: str = "old default") -> str:
            raise NotImplementedError

        assert await old_greet.using(wait=10).call("ada") == "new default ada"
        assert await old_greet.using(wait=10).call("ada", "old default") == "old default ada"


@pytest.mark.storages("memory")
async def test_coroutine_returned_by_a_plain_function_is_awaited(app: App) -> None:
    async def inner(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    @app.task(name="t")
    @functools.wraps(inner)
    def outer(number: int) -> Any:
        return inner(number)

    async with app.worker():
        assert await outer.using(wait=10).call(1) == 2


async def test_a_job_enqueued_by_name_runs(app: App) -> None:
    @app.task(name="emails")
    async def send(to: str, *, subject: str = "hi") -> str:
        return f"{subject} {to}"

    async with app.worker():
        handle = await app.queue("emails").enqueue({"to": "ada"}, id="welcome-ada")
        assert await handle.result(wait=10) == "hi ada"


async def test_result_that_cannot_be_encoded_fails_only_its_job_at_once(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", min_backoff=0)
    async def give(number: int) -> Any:
        runs.append(number)
        return object() if number == 3 else number

    handles = await app.enqueue_many(give.bind(n) for n in range(6))
    async with app.worker():
        ends = await asyncio.gather(*(handle.result(wait=10) for handle in handles), return_exceptions=True)
    failed = ends.pop(3)
    assert ends == [0, 1, 2, 4, 5]
    assert isinstance(failed, JobFailed)
    assert (failed.kind, failed.error.type, failed.attempts) == ("permanent", "PayloadRejected", 1)
    assert sorted(runs) == list(range(6))


async def test_result_that_is_too_large_fails_only_its_job_at_once(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", min_backoff=0)
    async def give(number: int) -> str:
        runs.append(number)
        return "x" * 1_100_000 if number == 3 else str(number)

    handles = await app.enqueue_many(give.bind(n) for n in range(6))
    async with app.worker():
        ends = await asyncio.gather(*(handle.result(wait=10) for handle in handles), return_exceptions=True)
    failed = ends.pop(3)
    assert ends == ["0", "1", "2", "4", "5"]
    assert isinstance(failed, JobFailed)
    assert (failed.kind, failed.attempts) == ("permanent", 1)
    assert sorted(runs) == list(range(6))


async def test_results_that_are_large_together_are_all_stored(app: App) -> None:
    @app.task(name="t")
    async def give(number: int) -> str:
        return str(number) * 300_000

    handles = await app.enqueue_many(give.bind(n) for n in range(8))
    async with app.worker():
        lengths = [len(await handle.result(wait=20)) for handle in handles]
    assert lengths == [300_000] * 8


async def test_fail_handler_runs_for_a_result_that_is_too_large(app: App) -> None:
    told: list[Failure] = []

    @app.task(name="t")
    async def give(number: int) -> str:
        return "x" * 1_100_000

    @give.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await give.enqueue(7)
        await until(lambda: told)
    assert told[0].payload.number == 7
    assert told[0].error.kind == "permanent"


async def test_an_error_is_stored_as_data(app: App) -> None:
    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise Detailed("it is broken", {"code": 7})

    async with app.worker():
        handle = await fails.enqueue()
        with pytest.raises(JobFailed, match="it is broken") as raised:
            await handle.result(wait=10)
        error = raised.value.error
        assert (error.type, error.message, error.kind, error.details) == (
            *("Detailed", "it is broken", "retriable"),
            {"code": 7},
        )
        job = await app.queue("t").get(handle.id)
        assert job is not None
        assert job.state is State.FAILED
        assert job.error == error


@pytest.mark.parametrize("middleware", [False, True], ids=["bare", "in middleware"])
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.storages("memory")
async def test_traceback_has_frames_of_the_handler_and_none_of_the_package(
    app: App, kind: str, middleware: bool
) -> None:
    def culprit() -> None:
        raise ValueError("here")

    if kind == "async":

        @app.task(name="t", max_retries=0)
        async def fails() -> None:
            culprit()

    else:

        @app.task(name="t", max_retries=0)
        def fails() -> None:
            culprit()

    if middleware:

        @app.middleware
        async def around(job: Any, proceed: Any) -> Any:
            return await proceed()

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await fails.using(wait=10).call()
    trace = raised.value.error.traceback
    assert "in fails" in trace
    assert "in culprit" in trace
    assert "ValueError: here" in trace
    assert "holdfast/_worker/handler.py" not in trace
    assert "concurrent/futures" not in trace


@pytest.mark.storages("memory")
async def test_stored_traceback_of_a_long_message_keeps_its_frames(app: App) -> None:
    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        try:
            raise KeyError("the cause " + "y" * 20_000)
        except KeyError as error:
            raise ValueError("INSERT " + "x" * 40_000) from error

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await fails.using(wait=10).call()
    trace = raised.value.error.traceback
    assert trace.count("in fails") == 2
    assert "KeyError: 'the cause yyy" in trace
    assert "ValueError: INSERT xxx" in trace


@pytest.mark.parametrize(
    "error",
    [
        Detailed("not JSON", object()),
        Detailed("contains itself", LOOP),
        Detailed("too long", "x" * 100_000),
        Detailed("a lone surrogate \ud800", "\ud800"),
        Sulking(),
        ExceptionGroup("several", [ValueError("one"), TypeError("two")]),
        StopAsyncIteration("nothing more"),
    ],
    ids=lambda error: str(error.args[0] if error.args else type(error).__name__).encode("ascii", "replace").decode(),
)
async def test_exception_that_is_hard_to_encode_is_stored(
    app: App, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "holdfast")  # The test runner cannot send a log with a surrogate.

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise error

    async with app.worker(grace=0.1):
        with pytest.raises(JobFailed) as raised:
            await fails.using(wait=5).call()
    assert raised.value.error.type == type(error).__qualname__


async def test_error_longer_than_max_payload_is_retried(place: Any) -> None:
    async with place.app(max_payload=300) as app:

        @app.task(name="t", min_backoff=0)
        async def fails_once() -> int:
            if current_job().attempt == 1:
                raise ValueError("x" * 5_000)
            return 1

        async with app.worker():
            assert await fails_once.using(wait=10).call() == 1


async def test_worker_survives_errors_larger_than_max_payload(place: Any) -> None:
    async with place.app(max_payload=20) as app:

        @app.task(name="t", max_retries=0)
        async def fails(good: bool) -> None:
            if not good:
                raise ValueError("x" * 5_000)

        async with app.worker():
            handle = await fails.enqueue(False)
            with pytest.raises(JobFailed):
                await handle.result(wait=5)
            await fails.using(wait=5).call(True)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
@pytest.mark.storages("memory")
async def test_no_error_of_a_handler_ends_its_worker(app: App, kind: str, error: BaseException) -> None:
    def misbehave() -> int:
        if current_job().attempt == 1:
            raise error
        return 1

    if kind == "async":

        @app.task(name="t", min_backoff=0)
        async def odd() -> int:
            return misbehave()

    else:

        @app.task(name="t", min_backoff=0)
        def odd() -> int:
            return misbehave()

    async with app.worker(grace=0.1):
        handle = await odd.using(result_ttl=60).enqueue()
        assert await handle.result(wait=5) == 1
        job = await app.queue("t").get(handle.id)
        assert job is not None
        assert (job.attempts, job.retries) == (2, 1)


async def test_a_payload_of_the_wrong_type_fails_at_once_and_the_next_job_runs(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", min_backoff=0)
    async def count(number: int) -> int:
        runs.append(number)
        return number

    async with app.worker():
        wrong = await app.queue("t").enqueue({"number": "many"})
        missing = await app.queue("t").enqueue({})
        no_object = await app.queue("t").enqueue([1])
        raw = await app.queue("t").enqueue(b"1")
        right = await count.enqueue(1)
        for handle in (wrong, missing, no_object, raw):
            with pytest.raises(JobFailed) as raised:
                await handle.result(wait=10)
            expected = ("retriable", 11) if handle is missing else ("permanent", 1)  # A newer producer may be right.
            assert (raised.value.kind, raised.value.attempts) == expected
        assert await right.result(wait=10) == 1
    assert runs == [1]


async def test_higher_priority_runs_first_then_the_earlier_run_at_then_arrival(app: App) -> None:
    order: list[str] = []

    @app.task(name="t")
    async def note(name: str) -> None:
        order.append(name)

    now = datetime.now(UTC)
    await note.enqueue("third")
    await note.using(run_at=now - timedelta(hours=1)).enqueue("second")
    await note.enqueue("fourth")
    await note.using(priority=0).enqueue("last")
    await note.using(priority=9).enqueue("first")
    async with app.worker(concurrency=1):
        await until(lambda: len(order) == 5)
    assert order == ["first", "second", "third", "fourth", "last"]


async def test_a_tasks_own_priority_is_its_jobs_default(app: App) -> None:
    @app.task(name="t", priority=8)
    async def urgent() -> None: ...

    handles = [await urgent.enqueue(), await urgent.using(priority=1).enqueue()]
    jobs = [await app.queue("t").get(handle.id) for handle in handles]
    assert [job and job.priority for job in jobs] == [8, 1]


async def test_delayed_job_starts_on_time_and_never_early(app: App) -> None:
    started: dict[str, float] = {}

    @app.task(name="t")
    async def note(name: str) -> None:
        started[name] = time.time()

    async with app.worker():
        begin = time.time()
        await note.using(delay=0.3).enqueue("delay")
        await note.using(run_at=datetime.fromtimestamp(begin + 0.4, UTC)).enqueue("run_at")
        await note.using(delay=60).enqueue("far")
        await until(lambda: len(started) == 2)
        assert begin + 0.299 <= started["delay"] < begin + 2.5
        assert begin + 0.399 <= started["run_at"] < begin + 2.5
        assert "far" not in started
        assert (await app.queue("t").stats()).scheduled == 1


async def test_a_job_that_is_enqueued_while_the_worker_idles_runs_promptly(app: App) -> None:
    @app.task(name="t")
    async def quick() -> None: ...

    async with app.worker():
        await quick.using(wait=10).call()
        await asyncio.sleep(0.1)
        took: list[float] = []
        for _ in range(5):
            begin = time.monotonic()
            await quick.using(wait=10).call()
            took.append(time.monotonic() - begin)
    assert min(took) < 0.3  # One look a second would take longer on most of them.


async def test_progress_is_seen_while_the_job_runs_and_the_newest_wins(app: App) -> None:
    go_on = asyncio.Event()

    @app.task(name="t")
    async def slow() -> None:
        job = current_job()
        for done in range(1, 11):
            job.progress({"done": done})
        await go_on.wait()
        job.progress("nearly")
        await asyncio.sleep(30)

    queue = app.queue("t")

    async def progress() -> Any:
        job = await queue.get("j")
        return job and job.progress

    async with app.worker(grace=0):
        await slow.using(id="j").enqueue()
        await until(lambda: _equals(progress, {"done": 10}))
        go_on.set()
        await until(lambda: _equals(progress, "nearly"))


async def test_progress_of_a_sync_handler_is_seen(app: App) -> None:
    go_on = threading.Event()

    @app.task(name="t")
    def slow() -> None:
        current_job().progress(0.5)
        go_on.wait(20)

    async def progress() -> Any:
        job = await app.queue("t").get("j")
        return job and job.progress

    async with app.worker():
        try:
            await slow.using(id="j").enqueue()
            await until(lambda: _equals(progress, 0.5))
        finally:
            go_on.set()


@pytest.mark.parametrize("value", [object(), "\ud800"], ids=["object", "surrogate"])
@pytest.mark.storages("memory")
async def test_progress_that_cannot_be_sent_is_the_handlers_error(app: App, value: object) -> None:
    @app.task(name="t")
    async def tells() -> str:
        try:
            current_job().progress(value)
        except PayloadRejected:
            return "rejected"
        return "taken"

    async with app.worker():
        assert await tells.using(wait=10).call() == "rejected"


async def test_completed_job_without_a_waiter_leaves_no_record(app: App) -> None:
    done: list[int] = []

    @app.task(name="t", result_ttl=0)
    async def forgettable(number: int) -> None:
        done.append(number)

    async with app.worker():
        handles = await app.enqueue_many(forgettable.bind(n) for n in range(300))
        await until(lambda: len(done) == 300)
    stats = await app.queue("t").stats()
    assert (stats.ready, stats.running, stats.completed, stats.totals["completed"]) == (0, 0, 0, 300)
    assert await handles[0].state() is None
    assert sorted(done) == list(range(300))


async def test_many_jobs_run_once_each_with_two_workers(app: App, make_app: MakeApp) -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(number)

    task = app.task(name="t")(work)
    async with make_app() as other:
        other.task(name="t")(work)
        async with app.worker(), other.worker():
            await app.enqueue_many(task.bind(n) for n in range(500))
            await until(lambda: len(done) >= 500, 20)
    assert sorted(done) == list(range(500))


async def test_permanent_error_of_one_job_does_not_affect_others(app: App) -> None:
    @app.task(name="t")
    async def some(number: int) -> int:
        if number % 2:
            raise PermanentError(f"{number} is odd")
        return number

    async with app.worker():
        handles = await app.enqueue_many(some.bind(n) for n in range(10))
        ends = await asyncio.gather(*(handle.result(wait=10) for handle in handles), return_exceptions=True)
    assert [end for end in ends if not isinstance(end, JobFailed)] == [0, 2, 4, 6, 8]
    assert (await app.queue("t").stats()).failed == 5


async def _equals(ask: Callable[[], Any], value: object) -> bool:
    return bool(await ask() == value)
