"""Runs that fail or take too long: retries, backoff, limits, timeouts, fail handlers, and running at most once."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Failure, Holdfast, JobFailed, OptionError, PermanentError, Retry, State, current_job
from tests.app.conftest import until

App = Holdfast[Any]
MakeApp = Callable[..., App]


class Odd(Exception):
    """An error that says itself what it is."""

    def __init__(self, message: str = "odd", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


async def test_a_failed_run_is_retried_after_its_backoff(app: App) -> None:
    times: list[float] = []

    @app.task(name="t", min_backoff=0.2, max_backoff=10)
    async def fails_twice() -> int:
        times.append(time.monotonic())
        if len(times) < 3:
            raise ValueError("not yet")
        return len(times)

    async with app.worker():
        assert await fails_twice.using(wait=20).call() == 3
    first, second, third = times
    assert second - first >= 0.19
    assert third - second >= 0.38
    assert third - first < 6


async def test_job_waiting_for_its_retry_has_its_error(app: App) -> None:
    @app.task(name="t", min_backoff=60)
    async def fails() -> None:
        raise ValueError("the reason")

    async def retrying() -> bool:
        return (await app.queue("t").stats()).retrying == 1

    async with app.worker():
        handle = await fails.enqueue()
        await until(retrying)
        job = await app.queue("t").get(handle.id)
    assert job is not None
    assert (job.state, job.attempts, job.retries) == (State.WAITING, 1, 1)
    assert job.error is not None
    assert (job.error.type, job.error.message) == ("ValueError", "the reason")
    assert timedelta(seconds=50) < job.run_at - datetime.now(UTC) < timedelta(seconds=90)


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.storages("memory")
async def test_a_limit_of_n_allows_n_retries(app: App, limit: int) -> None:
    runs: list[int] = []

    @app.task(name="t", max_retries=limit, min_backoff=0)
    async def fails() -> None:
        runs.append(current_job().retries)
        raise ValueError("again")

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await fails.using(wait=10).call()
    assert runs == list(range(limit + 1))
    assert (raised.value.kind, raised.value.attempts) == ("retriable", limit + 1)


@pytest.mark.parametrize(("tasks", "own"), [(5, 1), (0, 2)], ids=["lower", "higher"])
@pytest.mark.storages("memory")
async def test_limit_of_a_job_overrides_the_limit_of_the_task(app: App, tasks: int, own: int) -> None:
    runs: list[int] = []

    @app.task(name="t", max_retries=tasks, min_backoff=0)
    async def fails() -> None:
        runs.append(1)
        raise ValueError

    async with app.worker():
        with pytest.raises(JobFailed):
            await fails.using(wait=10, max_retries=own).call()
    assert len(runs) == own + 1


async def test_lowered_limit_applies_to_waiting_jobs(app: App, make_app: MakeApp) -> None:
    async def fails() -> None:
        runs.append(1)
        raise ValueError("once more")

    runs: list[int] = []
    task = app.task(name="t", max_retries=10, min_backoff=0.3)(fails)
    async with app.worker():
        handle = await task.enqueue()
        await until(lambda: len(runs) == 2, 10)
    async with make_app() as newer:
        newer.task(name="t", max_retries=0, min_backoff=0)(fails)
        async with newer.worker():
            with pytest.raises(JobFailed, match="once more") as raised:
                await handle.result(wait=10)
    assert raised.value.kind == "retriable"
    assert len(runs) == 2


async def test_retry_exception_sets_the_time_of_the_next_run(app: App) -> None:
    times: list[float] = []

    @app.task(name="t", min_backoff=60)
    async def asks() -> int:
        times.append(time.time())
        if len(times) == 1:
            raise Retry(delay=0.2)
        if len(times) == 2:
            raise Retry("later", at=datetime.fromtimestamp(time.time() + 0.3, UTC))
        return current_job().retries

    async with app.worker():
        assert await asks.using(wait=20).call() == 2
    assert times[1] - times[0] >= 0.19
    assert times[2] - times[1] >= 0.29
    assert times[2] - times[0] < 10


@pytest.mark.storages("memory")
async def test_retry_exception_counts_toward_the_limit(app: App) -> None:
    @app.task(name="t", max_retries=2)
    async def asks() -> None:
        raise Retry("once more", delay=0)

    async with app.worker():
        with pytest.raises(JobFailed, match="once more") as raised:
            await asks.using(wait=10).call()
    assert raised.value.attempts == 3


@pytest.mark.storages("memory")
async def test_a_retry_without_a_time_takes_the_backoff(app: App) -> None:
    @app.task(name="t", min_backoff=0.01)
    async def asks() -> int:
        if current_job().retries == 0:
            raise Retry
        return 1

    async with app.worker():
        assert await asks.using(wait=10).call() == 1


@pytest.mark.storages("memory")
async def test_a_retry_at_a_time_without_a_timezone_takes_the_backoff(app: App) -> None:
    @app.task(name="t", min_backoff=0.01)
    async def asks() -> int:
        if current_job().retries == 0:
            raise Retry(at=datetime.now() + timedelta(hours=1))
        return 1

    async with app.worker():
        assert await asks.using(wait=10).call() == 1


async def test_retry_exception_refuses_two_times() -> None:
    with pytest.raises(OptionError):
        Retry(delay=1, at=datetime.now(UTC))


@pytest.mark.parametrize("error", [PermanentError("never"), Odd("never", kind="permanent")], ids=["class", "attribute"])
@pytest.mark.storages("memory")
async def test_a_permanent_error_fails_the_job_at_once(app: App, error: Exception) -> None:
    runs: list[int] = []

    @app.task(name="t", min_backoff=0)
    async def hopeless() -> None:
        runs.append(1)
        raise error

    async with app.worker():
        with pytest.raises(JobFailed, match="never") as raised:
            await hopeless.using(wait=10).call()
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
    assert runs == [1]


@pytest.mark.parametrize("form", ["datetime", "number"])
async def test_an_errors_retry_at_is_honoured(app: App, form: str) -> None:
    times: list[float] = []

    @app.task(name="t", min_backoff=60)
    async def limited() -> int:
        times.append(time.time())
        if len(times) == 1:
            at = time.time() + 0.3
            raise Odd("slow down", retry_at=at if form == "number" else datetime.fromtimestamp(at, UTC))
        return 1

    async with app.worker():
        assert await limited.using(wait=20).call() == 1
    assert 0.29 <= times[1] - times[0] < 10


@pytest.mark.storages("memory")
async def test_error_of_a_custom_class_is_retried(app: App) -> None:
    @app.task(name="t", min_backoff=0)
    async def odd() -> int:
        if current_job().retries == 0:
            raise Odd(kind=["no", "kind"], retry_at="tomorrow")
        return 1

    async with app.worker():
        assert await odd.using(wait=10).call() == 1


async def test_a_payload_with_an_unknown_parameter_waits_for_a_newer_worker(app: App, make_app: MakeApp) -> None:
    runs: list[str] = []

    @app.task(name="t", min_backoff=0.02)
    async def old(name: str) -> None:
        runs.append("old")

    async def retried() -> bool:
        job = await app.queue("t").get("j")
        return job is not None and job.retries >= 2

    handle = await app.queue("t").enqueue({"name": "ada", "region": "eu"}, id="j")
    async with app.worker():
        await until(retried)
    async with make_app() as newer:

        @newer.task(name="t", min_backoff=0)
        async def new(name: str, region: str) -> str:
            return f"{name} {region}"

        async with newer.worker():
            assert await handle.result(wait=10) == "ada eu"
    assert runs == []


async def test_a_payload_with_an_unknown_parameter_fails_when_its_retries_are_used_up(app: App) -> None:
    @app.task(name="t", min_backoff=0, max_retries=2)
    async def old(name: str) -> None: ...

    async with app.worker():
        handle = await app.queue("t").enqueue({"name": "ada", "region": "eu"})
        with pytest.raises(JobFailed, match="region") as raised:
            await handle.result(wait=10)
    assert (raised.value.kind, raised.value.attempts) == ("retriable", 3)


async def test_jobs_of_old_code_run_once_a_new_parameter_has_a_default(app: App, make_app: MakeApp) -> None:
    """A release added a required parameter by mistake: jobs that wait are retried until the next release."""

    @app.task(name="t", min_backoff=0.02)
    async def mistaken(name: str, region: str) -> None: ...

    async def retried() -> bool:
        job = await app.queue("t").get("j")
        return job is not None and job.retries >= 2

    handle = await app.queue("t").enqueue({"name": "ada"}, id="j")
    async with app.worker():
        await until(retried)
    job = await app.queue("t").get("j")
    assert job is not None
    assert str(job.error) == "SignatureMismatch: the payload of t has no 'region'"
    async with make_app() as mended:

        @mended.task(name="t", min_backoff=0)
        async def new(name: str, region: str = "eu") -> str:
            return f"{name} {region}"

        async with mended.worker():
            assert await handle.result(wait=10) == "ada eu"


async def old(name: str) -> None: ...


async def with_default(name: str, region: str = "eu") -> None: ...


async def with_required(name: str, region: str) -> None: ...


async def renamed(person: str) -> None: ...


@pytest.mark.storages("memory")
@pytest.mark.parametrize(
    ("producer", "worker", "runs"),
    [
        (old, with_default, True),
        (old, with_required, False),
        (with_required, old, False),
        (with_default, old, False),
        (old, renamed, False),
        (renamed, old, False),
        (with_required, with_default, True),
    ],
)
async def test_jobs_and_code_of_two_releases(
    app: App, make_app: MakeApp, producer: Callable[..., Any], worker: Callable[..., Any], runs: bool
) -> None:
    app.task(name="t", min_backoff=60)(worker)
    arguments = dict.fromkeys(inspect.signature(producer).parameters, "text")
    async with make_app() as release:
        handle = await release.task(name="t")(producer).using(id="j").enqueue(**arguments)
    async with app.worker():
        if runs:
            assert await app.queue("t").result("j", wait=10) is None
            return

        async def retried() -> bool:
            job = await app.queue("t").get(handle.id)
            return job is not None and job.retries == 1 and str(job.error).startswith("SignatureMismatch: ")

        await until(retried)


# Timeouts


async def test_an_async_run_that_takes_too_long_is_cancelled_and_counted(app: App) -> None:
    seen: list[str | None] = []

    @app.task(name="t", timeout=0.1, min_backoff=0, max_timeouts=2)
    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            seen.append(current_job().stopping)
            raise

    async with app.worker():
        handle = await slow.enqueue()
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=15)
        job = await app.queue("t").get(handle.id)
    assert (raised.value.kind, raised.value.attempts) == ("timeout", 3)
    assert seen == ["timeout"] * 3
    assert job is not None
    assert (job.retries, job.timeouts) == (0, 3)


@pytest.mark.storages("memory")
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.storages("memory")
async def test_run_extends_its_own_timeout(app: App, is_async: bool) -> None:
    async def patient() -> str:
        current_job().extend_timeout(20)
        await asyncio.sleep(0.5)
        return "done"

    def patient_sync() -> str:
        current_job().extend_timeout(timedelta(seconds=20))
        time.sleep(0.5)
        return "done"

    function: Any = patient if is_async else patient_sync
    task = app.task(name="t", timeout=0.2, max_timeouts=0)(function)
    async with app.worker():
        assert await task.using(wait=10).call() == "done"


@pytest.mark.storages("memory")
async def test_extended_timeout_ends_the_run_and_shortens_none(app: App) -> None:
    @app.task(name="t", timeout=0.3, max_timeouts=0)
    async def slow(first: bool) -> str:
        current_job().extend_timeout(0.4 if first else 0.01)
        await asyncio.sleep(30 if first else 0.1)
        return "done"

    started = time.monotonic()
    async with app.worker():
        assert await slow.using(wait=10).call(False) == "done"
        with pytest.raises(JobFailed, match=r"the run took longer than its timeout$") as raised:
            await slow.using(wait=10).call(True)
    assert raised.value.kind == "timeout"
    assert time.monotonic() - started < 10


@pytest.mark.storages("memory")
async def test_extension_that_is_not_a_length_is_refused(app: App) -> None:
    @app.task(name="t", max_retries=0)
    async def wrong() -> None:
        current_job().extend_timeout(-1)

    async with app.worker():
        with pytest.raises(JobFailed, match="seconds must be from"):
            await wrong.using(wait=10).call()


async def test_timeouts_and_retries_have_separate_limits(app: App) -> None:
    attempts: list[tuple[int, int]] = []

    @app.task(name="t", timeout=0.05, min_backoff=0, max_timeouts=1, max_retries=1)
    async def both() -> int:
        job = current_job()
        attempts.append((job.retries, job.timeouts))
        if job.attempt == 1:
            await asyncio.sleep(30)
        if job.attempt == 2:
            raise ValueError
        return 1

    async with app.worker():
        assert await both.using(wait=15).call() == 1
    assert attempts == [(0, 0), (0, 1), (1, 1)]


@pytest.mark.storages("memory")
async def test_timeout_and_limit_of_a_job_override_those_of_the_task(app: App) -> None:
    @app.task(name="t", timeout=60, min_backoff=0, max_timeouts=50)
    async def slow() -> None:
        await asyncio.sleep(30)

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await slow.using(wait=10, timeout=0.05, max_timeouts=0).call()
    assert (raised.value.kind, raised.value.attempts) == ("timeout", 1)


@pytest.mark.storages("memory")
async def test_a_late_success_within_the_grace_counts(app: App) -> None:
    @app.task(name="a", timeout=0.05, cancel_grace=10)
    async def late() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "late"
        return "never"

    @app.task(name="s", timeout=0.05, cancel_grace=10)
    def sync_late() -> str:
        while current_job().stopping is None:
            time.sleep(0.01)
        return f"late: {current_job().stopping}"

    async with app.worker():
        assert await late.using(wait=10).call() == "late"
        assert await sync_late.using(wait=10).call() == "late: timeout"


@pytest.mark.storages("memory")
async def test_an_error_after_the_timeout_counts_as_a_timeout(app: App) -> None:
    @app.task(name="t", timeout=0.05, max_timeouts=0)
    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            raise ValueError("in a hurry")

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await slow.using(wait=10).call()
    assert (raised.value.kind, raised.value.error.type) == ("timeout", "ValueError")


@pytest.mark.storages("memory")
async def test_plain_function_that_returned_a_coroutine_is_cancelled_at_its_timeout(app: App) -> None:
    cancelled: list[str | None] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(current_job().stopping)
            raise

    @app.task(name="t", timeout=0.05, max_timeouts=0, cancel_grace=0.1)
    @functools.wraps(inner)
    def outer() -> Any:
        return inner()

    async with app.worker(grace=0):
        with pytest.raises(JobFailed) as raised:
            await outer.using(wait=10).call()
        assert raised.value.kind == "timeout"
        await until(lambda: cancelled == ["timeout"], 2)


@pytest.mark.storages("memory")
async def test_timeout_error_raised_by_a_handler_counts_as_a_retry(app: App) -> None:
    @app.task(name="t", min_backoff=0)
    async def own() -> list[int]:
        if current_job().attempt == 1:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(30)
        return [current_job().retries, current_job().timeouts]

    async with app.worker():
        assert await own.using(wait=10).call() == [1, 0]


@pytest.mark.parametrize("kind", ["async", "sync", "in middleware", "sync that ignores it"])
@pytest.mark.storages("memory")
async def test_error_of_a_run_that_timed_out_has_its_stack(app: App, kind: str) -> None:
    release = threading.Event()

    def wait_on_a_thread() -> None:
        while current_job().stopping is None or kind == "sync that ignores it":
            if release.wait(0.01):
                return
        raise asyncio.CancelledError

    async def wait_on_the_loop() -> None:
        await asyncio.sleep(30)

    if kind == "in middleware":

        @app.middleware
        async def around(job: Any, proceed: Any) -> Any:
            return await proceed()

    options: Any = {"name": "t", "timeout": 0.25, "max_timeouts": 0, "cancel_grace": 0.25}
    if "sync" in kind.split():

        @app.task(**options)
        def waits() -> None:
            wait_on_a_thread()

    else:

        @app.task(**options)
        async def waits() -> None:
            await wait_on_the_loop()

    async with app.worker(grace=0):
        with pytest.raises(JobFailed) as raised:
            await waits.using(wait=10).call()
        release.set()
    error = raised.value.error
    assert error.message == "the run took longer than its timeout of 0.25 s"
    assert "in waits\n" in error.traceback
    where = "wait_on_a_thread" if "sync" in kind.split() else "wait_on_the_loop"
    assert f"in {where}\n" in error.traceback
    assert "handler.py" not in error.traceback


async def test_sync_run_that_ignores_its_timeout_is_abandoned_and_retried(app: App) -> None:
    release = threading.Event()

    @app.task(name="t", timeout=0.05, cancel_grace=0.05, min_backoff=0)
    def stubborn() -> str:
        attempt = current_job().attempt
        if attempt == 1:
            release.wait(20)
        return f"from {attempt}"

    async with app.worker() as worker:
        try:
            handle = await stubborn.using(timeout=0.05).enqueue()
            assert await handle.result(wait=10) == "from 2"
            assert worker.running == 1  # It cannot be killed, and takes its place for as long as it lasts.
        finally:
            release.set()
        await until(lambda: worker.running == 0)
        job = await app.queue("t").get(handle.id)
    assert job is not None
    assert (job.result, job.timeouts, job.attempts) == ("from 2", 1, 2)


async def test_a_sync_singleton_that_ignores_its_timeout_is_held_and_never_overlaps(app: App) -> None:
    release = threading.Event()
    running: list[int] = []
    most: list[int] = []

    @app.task(name="t", singleton="only", timeout=0.05, cancel_grace=0.05, min_backoff=0)
    def stubborn(number: int) -> int:
        running.append(1)
        most.append(len(running))
        release.wait(20)
        running.pop()
        return number

    async with app.worker(lease=0.5):
        try:
            first = await stubborn.enqueue(1)
            await until(lambda: running)
            second = await stubborn.enqueue(2)
            await asyncio.sleep(2.2 * 0.5)  # Time enough for a second run, if there could be one.
            assert most == [1]
            assert await first.state() is State.RUNNING
        finally:
            release.set()
        assert await second.result(wait=10) == 2
    assert set(most) == {1}


# Fail handlers


async def test_fail_handler_gets_the_job_its_arguments_and_the_error(app: App) -> None:
    told: list[Failure] = []

    @app.task(name="t", max_retries=1, min_backoff=0)
    async def fails(user_id: int, *, since: datetime, region: str = "eu") -> None:
        raise ValueError("no such user")

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    since = datetime(2026, 1, 2, tzinfo=UTC)
    async with app.worker():
        handle = await fails.using(id="j", priority=7).enqueue(42, since=since)
        await until(lambda: told)
    (failure,) = told
    assert (failure.payload.user_id, failure.payload.since, failure.payload.region) == (42, since, "eu")
    assert (failure.job.queue, failure.job.id, failure.job.generation) == ("t", "j", handle.generation)
    assert (failure.job.attempts, failure.job.retries, failure.job.stalls, failure.job.timeouts) == (2, 1, 0, 0)
    assert (failure.error.type, failure.error.message, failure.error.kind) == (
        *("ValueError", "no such user"),
        "retriable",
    )
    assert "in fails" in failure.error.traceback


async def test_a_fail_handler_runs_once_per_failure_and_not_on_success(app: App) -> None:
    told: list[int] = []

    @app.task(name="t", max_retries=0)
    async def some(number: int) -> None:
        if number % 2:
            raise ValueError

    @some.on_failure
    def note(failure: Failure) -> None:
        told.append(failure.payload.number)

    async with app.worker():
        await app.enqueue_many(some.bind(n) for n in range(10))
        await until(lambda: len(told) >= 5)
        await until(lambda: _idle(app, "t", "t/failed"))
    assert sorted(told) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("kind", ["permanent", "timeout"])
async def test_fail_handler_gets_the_kind_of_failure(app: App, kind: str) -> None:
    told: list[Failure] = []

    @app.task(name="t", timeout=0.05, max_timeouts=0)
    async def fails() -> None:
        if kind == "permanent":
            raise PermanentError
        await asyncio.sleep(30)

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await fails.enqueue()
        await until(lambda: told)
    assert told[0].error.kind == kind


async def test_fail_handler_has_separate_retries_and_stays_listed_when_they_end(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise ValueError("first")

    @fails.on_failure(max_retries=2, min_backoff=0)
    async def fails_too(failure: Failure) -> None:
        runs.append(current_job().retries)
        raise ValueError("second")

    async def failed() -> bool:
        return (await app.queue("t/failed").stats()).failed == 1

    async with app.worker():
        await fails.enqueue()
        await until(failed)
        await until(lambda: _idle(app, "t", "t/failed"))
    assert runs == [0, 1, 2]
    assert (await app.queue("t").stats()).failed == 1
    (listed,) = [job async for job in app.queue("t/failed").jobs("failed")]
    assert listed.error is not None
    assert listed.error.message == "second"


@pytest.mark.parametrize("size", [1_000, 400_000, 900_000], ids=["small", "large", "largest"])
async def test_a_fail_handler_gets_payloads_of_every_size(app: App, size: int) -> None:
    told: list[Failure] = []

    @app.task(name="t", max_retries=0)
    async def fails(text: str) -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await fails.enqueue("x" * size)
        await until(lambda: told)
    assert told[0].payload is not None
    assert len(told[0].payload.text) == size


async def test_fail_handler_runs_for_a_failure_larger_than_max_payload(place: Any) -> None:
    told: list[Failure] = []
    async with place.app(max_payload=2_000) as app:

        @app.task(name="t", max_retries=0)
        async def fails(text: str) -> None:
            raise ValueError("short")

        @fails.on_failure
        async def note(failure: Failure) -> None:
            told.append(failure)

        async with app.worker():
            await fails.enqueue("x" * 1_950)
            await until(lambda: told)
    assert told[0].payload.text == "x" * 1_950
    assert told[0].error.message == "short"


async def test_a_fail_handler_of_a_raw_payload_gets_its_bytes(app: App) -> None:
    told: list[Failure] = []

    @app.task(name="t", max_retries=0)
    async def fails(data: bytes, /) -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await fails.enqueue(b"\x00\xff")
        await until(lambda: told)
    assert told[0].payload == b"\x00\xff"


async def test_a_fail_handler_gets_the_bytes_of_a_payload_that_cannot_be_read(app: App) -> None:
    told: list[Failure] = []

    @app.task(name="t", max_retries=0, min_backoff=0)
    async def typed(number: int) -> None: ...

    @typed.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        await app.queue("t").enqueue({"number": "many"})
        await app.queue("t").enqueue(b"\xff not json")
        await app.queue("t").enqueue({"number": 1, "other": 2})
        await until(lambda: len(told) == 3)
    assert {failure.payload for failure in told} == {b'{"number":"many"}', b"\xff not json", b'{"number":1,"other":2}'}
    assert sorted(failure.error.kind for failure in told) == ["permanent", "permanent", "retriable"]


async def test_a_fail_handler_runs_after_a_restart_of_the_worker(app: App, make_app: MakeApp) -> None:
    told: list[Failure] = []

    @app.task(name="t", max_retries=0)
    async def fails() -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    await app.queue("t/failed").pause()
    async with app.worker():
        with pytest.raises(JobFailed):
            await fails.using(wait=10).call()
    assert told == []
    await app.queue("t/failed").resume()
    async with app.worker():
        await until(lambda: told)
    assert len(told) == 1


async def test_fail_handler_runs_for_each_failed_generation(app: App) -> None:
    told: list[int] = []

    @app.task(name="t", max_retries=0)
    async def fails(number: int) -> None:
        raise ValueError

    @fails.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure.payload.number)

    async with app.worker():
        for number in range(3):
            with pytest.raises(JobFailed):
                await fails.using(id="same", on_conflict="update", wait=10).call(number)
        await until(lambda: len(told) >= 3)
    assert sorted(told) == [0, 1, 2]


# At most once


async def test_an_at_most_once_job_is_not_retried(app: App) -> None:
    runs: list[int] = []
    told: list[Failure] = []

    @app.task(name="t", delivery="at_most_once", min_backoff=0)
    async def once() -> None:
        runs.append(1)
        raise ValueError("no second time")

    @once.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker():
        with pytest.raises(JobFailed, match="no second time"):
            await once.using(wait=10).call()
        with pytest.raises(OptionError, match="at most once"):
            await once.using(max_retries=5).call()
        handle = await app.queue("t").enqueue({})  # Nor one from afar, that knows nothing of this.
        with pytest.raises(JobFailed):
            await handle.result(wait=10)
        await until(lambda: len(told) == 2)
    assert runs == [1, 1]


async def test_an_at_most_once_job_that_times_out_is_not_run_again(app: App) -> None:
    runs: list[int] = []

    @app.task(name="t", delivery="at_most_once", timeout=0.05, min_backoff=0)
    async def once() -> None:
        runs.append(1)
        await asyncio.sleep(30)

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await once.using(wait=10).call()
    assert raised.value.kind == "timeout"
    assert runs == [1]


async def test_an_at_most_once_job_that_a_shutdown_stops_fails_and_is_not_run_again(app: App) -> None:
    runs: list[int] = []
    told: list[Failure] = []

    @app.task(name="t", delivery="at_most_once")
    async def once() -> None:
        runs.append(1)
        await asyncio.sleep(30)

    @once.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    async with app.worker(grace=0):
        handle = await once.enqueue()
        await until(lambda: runs)
    assert await handle.state() is State.FAILED
    async with app.worker():
        await until(lambda: told)
    assert (told[0].error.kind, told[0].job.attempts) == ("stall", 1)
    assert runs == [1]


async def _idle(app: App, *queues: str) -> bool:
    stats = [await app.queue(queue).stats() for queue in queues]
    return all(each.ready + each.running + each.scheduled == 0 for each in stats)
