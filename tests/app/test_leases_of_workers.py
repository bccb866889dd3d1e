"""Leases: kept while a worker lives, however busy it is; taken back when it dies; and of no use once they are lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import Failure, Holdfast, JobFailed, State, current_job
from tests.app.conftest import until

pytestmark = pytest.mark.suite("usual")

App = Holdfast[Any]
MakeApp = Callable[..., App]

LEASE_S = 0.5


@contextmanager
def elsewhere(work: Callable[[threading.Event], Any]) -> Iterator[None]:
    """Something async on another thread and loop, as another program does it, until the end of the block."""
    over = threading.Event()
    errors: list[BaseException] = []

    def main() -> None:
        try:
            asyncio.run(work(over))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert errors == []


async def dies_with(app: App, queue: str, *, name: str = "dead") -> float:
    """A worker takes a job and is never heard of again. When it took it."""
    at = time.monotonic()
    (_,) = (await app.storage.claim(queue, 1, worker=name, lease_ms=round(1000 * LEASE_S))).jobs
    return at


# Workers that die


async def test_a_dead_workers_job_runs_again_soon_and_not_before_its_lease_ends(app: App) -> None:
    started: list[tuple[float, int, int]] = []

    @app.task(name="t")
    async def work() -> None:
        job = current_job()
        started.append((time.monotonic(), job.attempt, job.stalls))

    await work.enqueue()
    died_at = await dies_with(app, "t")
    async with app.worker(lease=60):  # However seldom it beats itself.
        await until(lambda: started)
    ((at, attempt, stalls),) = started
    assert LEASE_S <= at - died_at < 1.5 * LEASE_S + 1 + 1
    assert (attempt, stalls) == (2, 1)


def first_claim_is_answered_late(app: App, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The storage does what it was asked, and the answer is long on its way."""
    claim, late = app.storage.claim, [True]

    async def answered_late(*args: Any, **options: Any) -> Any:
        answer = await claim(*args, **options)
        if answer.jobs and late:
            late.clear()
            await asyncio.sleep(seconds)
        return answer

    monkeypatch.setattr(app.storage, "claim", answered_late)


async def test_job_whose_claim_reply_arrives_after_its_lease_is_not_started(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another may have the job by then."""
    attempts: list[int] = []

    @app.task(name="t")
    async def work() -> None:
        attempts.append(current_job().attempt)

    first_claim_is_answered_late(app, monkeypatch, 1.2 * LEASE_S)
    await work.enqueue()
    async with app.worker(lease=LEASE_S):
        await until(lambda: attempts)
    assert attempts == [2]


async def test_lease_call_does_not_return_a_lease_that_expired_before_the_reply(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_claim_is_answered_late(app, monkeypatch, 1.2 * LEASE_S)
    await app.queue("q").enqueue(1)
    lease = await app.queue("q").lease(seconds=LEASE_S, wait=5)
    assert lease is not None
    assert lease.attempt == 2
    assert await lease.complete()


async def test_full_worker_takes_back_jobs_of_dead_workers(app: App) -> None:
    go_on = asyncio.Event()
    started = asyncio.Event()

    @app.task(name="t", concurrency=1)
    async def work(wait: bool) -> None:
        if wait:
            started.set()
            await go_on.wait()

    async def taken_back() -> bool:
        jobs = [await app.queue("t").get(id) for id in ("before", "after")]
        return all(job is not None and job.state is State.WAITING and job.stalls == 1 for job in jobs)

    await work.using(id="before").enqueue(False)
    await dies_with(app, "t")
    async with app.worker(lease=LEASE_S, grace=0):
        await work.enqueue(True)
        await started.wait()
        await work.using(id="after").enqueue(False)
        await dies_with(app, "t")
        await until(taken_back, 1.5 * LEASE_S + 1 + 1.5)
        go_on.set()
        await until(lambda: _done(app))


async def test_job_that_stalls_too_often_fails_and_its_fail_handler_runs(app: App) -> None:
    runs: list[int] = []
    told: list[Failure] = []

    @app.task(name="t", max_stalls=1)
    async def work(name: str) -> None:
        runs.append(current_job().stalls)

    @work.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    handle = await work.using(id="j").enqueue("poison")
    for stalls in (1, 2):
        await dies_with(app, "t")
        assert (await app.queue("t").sweep(worker="dead")).stalled == ["j"]
        job = await app.queue("t").get("j")
        assert job is not None
        assert job.stalls == stalls
    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=10)
        await until(lambda: told)
    assert raised.value.kind == "stall"
    assert (told[0].error.kind, told[0].job.stalls, told[0].payload.name) == ("stall", 2, "poison")
    assert runs == []


async def test_a_limit_of_n_allows_n_stalls(app: App) -> None:
    @app.task(name="t", max_stalls=0)
    async def work() -> int:
        return current_job().stalls

    handle = await work.using(max_stalls=1).enqueue()
    await dies_with(app, "t")
    await app.queue("t").sweep(worker="dead")
    async with app.worker():
        assert await handle.result(wait=10) == 1


async def test_an_at_most_once_job_whose_worker_died_fails_and_is_never_run(app: App) -> None:
    runs: list[int] = []
    told: list[Failure] = []

    @app.task(name="t", delivery="at_most_once")
    async def once() -> None:
        runs.append(1)

    @once.on_failure
    async def note(failure: Failure) -> None:
        told.append(failure)

    handle = await once.enqueue()
    await dies_with(app, "t")
    async with app.worker(lease=LEASE_S):
        with pytest.raises(JobFailed) as raised:
            await handle.result(wait=10)
        await until(lambda: told)
    assert (raised.value.kind, raised.value.attempts) == ("stall", 2)
    assert told[0].error.kind == "stall"
    assert runs == []


# Workers that live


async def test_runs_longer_than_their_lease_keep_it_while_others_sweep(app: App, make_app: MakeApp) -> None:
    attempts: list[int] = []

    @app.task(name="t", size=1)
    async def slow() -> None:
        await asyncio.sleep(2.2 * LEASE_S)
        attempts.append(current_job().attempt)

    async def sweep(over: threading.Event) -> None:
        async with make_app() as other:
            while not over.is_set():
                await other.queue("t").sweep()
                await asyncio.sleep(0.02)

    async with app.worker(lease=LEASE_S):
        with elsewhere(sweep):
            await app.enqueue_many(slow.bind() for _ in range(300))
            await until(lambda: len(attempts) == 300, 20)
    stats = await app.queue("t").stats()
    assert attempts == [1] * 300
    assert stats.totals.get("stalled", 0) == 0


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(app: App, make_app: MakeApp) -> None:
    @app.task(name="t")
    async def rude() -> list[int]:
        time.sleep(2.5 * LEASE_S)  # noqa: ASYNC251
        return [current_job().attempt, current_job().stalls]

    async def sweep(over: threading.Event) -> None:
        async with make_app() as other:
            while not over.is_set():
                await other.queue("t").sweep()
                await asyncio.sleep(0.02)

    async with app.worker(lease=LEASE_S):
        with elsewhere(sweep):
            assert await rude.using(wait=20).call() == [1, 0]
    assert (await app.queue("t").stats()).totals.get("stalled", 0) == 0


async def test_run_that_blocks_the_loop_past_its_timeout_is_retried_by_another_worker(
    app: App, make_app: MakeApp
) -> None:
    blocked = threading.Event()
    done_elsewhere = threading.Event()
    seen: list[bool] = []

    async def rude() -> str:
        if current_job().attempt > 1:
            return "elsewhere"
        blocked.set()
        seen.append(done_elsewhere.wait(20))
        return "here"

    async def serve(over: threading.Event) -> None:
        async with make_app() as other:
            other.task(name="t")(rude)

            @other.on_event
            def note(event: Any) -> None:
                if event.kind == "completed":
                    done_elsewhere.set()

            await until(blocked.is_set)
            async with other.worker(lease=LEASE_S):
                await until(over.is_set, 40)

    task = app.task(name="t", timeout=0.1, cancel_grace=0.1, min_backoff=0)(rude)
    with elsewhere(serve):
        async with app.worker(lease=LEASE_S):
            handle = await task.using(id="j").enqueue()
            assert await handle.result(wait=20) == "elsewhere"
    assert seen == [True]


async def test_a_singleton_that_blocks_the_loop_past_its_timeout_does_not_overlap(app: App, make_app: MakeApp) -> None:
    blocked = threading.Event()
    running = 0
    most = 0
    results: list[int] = []

    async def rude(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if number == 1:
            blocked.set()
            time.sleep(3 * LEASE_S)  # noqa: ASYNC251
        running -= 1
        return number

    async def serve(over: threading.Event) -> None:
        async with make_app() as other:
            other_task = other.task(name="t", singleton="only")(rude)
            await until(blocked.is_set)
            async with other.worker(lease=LEASE_S):
                results.append(await other_task.using(wait=20).call(2))

    task = app.task(name="t", singleton="only", timeout=0.1, cancel_grace=0.1, min_backoff=0)(rude)
    with elsewhere(serve):
        async with app.worker(lease=LEASE_S):
            await task.enqueue(1)
            await until(lambda: results, 20)
    assert (results, most) == ([2], 1)


# Leases that are lost


async def test_an_async_run_whose_lease_is_lost_is_cancelled_and_its_result_refused(app: App) -> None:
    seen: list[str | None] = []
    started = asyncio.Event()

    @app.task(name="t")
    async def work() -> str:
        attempt = current_job().attempt
        if attempt == 1:
            started.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                seen.append(current_job().stopping)
        return f"from {attempt}"

    async with app.worker(name="w", lease=LEASE_S):
        handle = await work.using(id="j").enqueue()
        await started.wait()
        await app.queue("t").pause()
        assert (await app.queue("t").sweep(worker="w")).stalled == ["j"]
        await until(lambda: seen)
        job = await app.queue("t").get("j")
        assert job is not None
        assert (job.state, job.stalls, job.result) == (State.WAITING, 1, None)
        await app.queue("t").resume()
        assert await handle.result(wait=10) == "from 2"
    assert seen == ["lease_lost"]


async def test_sync_run_can_see_that_its_lease_is_lost(app: App) -> None:
    seen: list[str | None] = []
    started = threading.Event()

    @app.task(name="t")
    def work() -> str:
        attempt = current_job().attempt
        if attempt == 1:
            started.set()
            while current_job().stopping is None:
                time.sleep(0.01)
            seen.append(current_job().stopping)
        return f"from {attempt}"

    async with app.worker(name="w", lease=LEASE_S) as worker:
        handle = await work.using(id="j").enqueue()
        await until(started.is_set)
        await app.queue("t").pause()
        await app.queue("t").sweep(worker="w")
        await until(lambda: seen)
        await until(lambda: worker.running == 0)
        assert await handle.state() is State.WAITING
        await app.queue("t").purge()
    assert seen == ["lease_lost"]


async def test_completion_after_an_unnoticed_lost_lease_is_refused(app: App) -> None:
    started = asyncio.Event()
    go_on = asyncio.Event()

    @app.task(name="t")
    async def work() -> str:
        attempt = current_job().attempt
        started.set()
        await go_on.wait()
        return f"from {attempt}"

    events: list[tuple[str, int]] = []

    @app.on_event
    def note(event: Any) -> None:
        events.append((event.kind, event.attempt))

    async with app.worker(name="w", lease=60) as worker:
        handle = await work.using(id="j").enqueue()
        await started.wait()
        await app.queue("t").pause()
        await app.queue("t").sweep(worker="w")
        go_on.set()
        await until(lambda: worker.running == 0)
        await asyncio.sleep(0.1)
        assert await handle.state() is State.WAITING
        await app.queue("t").purge()
    assert events == [("claimed", 1)]


async def _done(app: App) -> bool:
    stats = await app.queue("t").stats()
    return stats.ready + stats.running + stats.scheduled == 0


# Beats


@pytest.mark.suite("slow")
@pytest.mark.storages("sqlite")
async def test_beat_of_a_worker_does_not_read_the_queues_of_others(app: App) -> None:
    @app.task(name="t")
    async def work(n: int) -> int:
        return n

    for page in range(20):
        await asyncio.gather(*(app.queue(f"other-{page}-{n}").enqueue(n) for n in range(100)))
    async with app.worker(lease=LEASE_S) as worker:
        await work.call(0)
        await asyncio.sleep(3 * LEASE_S)  # The beats after the first compare the applications of all workers.
        await until(lambda: worker._context.heartbeat.is_heard, 5)
        assert await work.using(wait=10).call(1) == 1
