"""Every verb of a queue that is known by its name alone."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    EventKind,
    Holdfast,
    JobCancelled,
    JobFailed,
    JobInfo,
    JobNotFound,
    KeepResult,
    OptionError,
    PayloadRejected,
    PermanentError,
    Placed,
    Queue,
    State,
    Update,
    WaitTimeout,
    current_job,
)
from holdfast._core.jobs import FINISHED
from tests.app.conftest import until

AppMaker = Callable[..., Holdfast[Any]]


@dataclass
class Letter:
    to: str
    pages: int = 1


async def payload_of(queue: Queue, id: str | bytes) -> Any:
    info = await queue.get(id)
    assert info is not None
    return info.payload


async def ids(queue: Queue, state: State | str | None = None) -> list[str]:
    return [job.id async for job in queue.jobs(state)]


async def complete_one(queue: Queue, result: object = None) -> None:
    lease = await queue.lease()
    assert lease is not None
    assert await lease.complete(result)


# Enqueue


@pytest.mark.parametrize(
    "payload",
    [None, True, 0, -1.5, "", "ünïcode ✓", [], {}, [1, [2, {"a": None}]], {"to": "ada", "n": 1}, b"", b"\x00\xff"],
)
async def test_json_values_and_bytes_are_returned_unchanged(app: Holdfast[Any], payload: Any) -> None:
    queue = app.queue("q")
    handle = await queue.enqueue(payload)
    stored = await payload_of(queue, handle.id)
    assert (stored, type(stored)) == (payload, type(payload))
    lease = await queue.lease()
    assert lease is not None
    assert (lease.payload, type(lease.payload)) == (payload, type(payload))


async def test_bytes_like_payloads_are_bytes(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    for id, payload in (("a", bytearray(b"\xff1")), ("b", memoryview(b"\xff2"))):
        await queue.enqueue(payload, id=id)
        assert await payload_of(queue, id) == bytes(payload)


async def test_dataclasses_and_times_are_sent_as_json(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue({"letter": Letter("ada", 2), "at": datetime(2026, 1, 2, tzinfo=UTC)}, id="a")
    assert await payload_of(queue, "a") == {"letter": {"to": "ada", "pages": 2}, "at": "2026-01-02T00:00:00Z"}


async def test_payload_that_cannot_be_decoded_is_returned_as_bytes(make_app: AppMaker) -> None:
    class Rot13:
        name = "rot13"

        def encode(self, value: object) -> bytes:
            return bytes(byte ^ 1 for byte in str(value).encode())

        def decode(self, data: bytes, type: Any) -> Any:
            return bytes(byte ^ 1 for byte in data).decode()

    knowing, ignorant = make_app(codec=Rot13()), make_app()
    async with knowing, ignorant:
        await knowing.queue("q").enqueue("secret", id="a")
        assert await payload_of(knowing.queue("q"), "a") == "secret"
        assert await payload_of(ignorant.queue("q"), "a") == Rot13().encode("secret")
        lease = await ignorant.queue("q").lease()
        assert lease is not None
        assert lease.payload == Rot13().encode("secret")
        ignorant.add_codec(Rot13())
        assert await payload_of(ignorant.queue("q"), "a") == "secret"


async def test_malformed_json_is_returned_as_bytes(app: Holdfast[Any]) -> None:
    from holdfast._core.jobs import Request, Work

    await app.storage.enqueue("q", [Request("a", Work(b'{"open": ', "json"), custom_id=True)])
    queue = app.queue("q")
    assert await payload_of(queue, "a") == b'{"open": '
    lease = await queue.lease()
    assert lease is not None
    assert lease.payload == b'{"open": '


async def test_msgpack_keeps_bytes_inside_a_payload(make_app: AppMaker) -> None:
    async with make_app(codec="msgpack") as app:
        await app.queue("q").enqueue({"raw": b"\xff", "n": 1}, id="a")
        assert await payload_of(app.queue("q"), "a") == {"raw": b"\xff", "n": 1}


async def test_bytes_inside_json_are_base64(app: Holdfast[Any]) -> None:
    await app.queue("q").enqueue({"raw": b"\xff"}, id="a")
    assert await payload_of(app.queue("q"), "a") == {"raw": base64.b64encode(b"\xff").decode()}


async def test_every_option_of_enqueue_is_stored(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    at = datetime.now(UTC) + timedelta(hours=2)
    options: dict[str, Any] = {"priority": 8, "result_ttl": 1.5, "dedup_ttl": timedelta(seconds=2), "timeout": 9}
    limits: dict[str, Any] = {"max_retries": 1, "max_stalls": 2, "max_timeouts": 3}
    handle = await queue.enqueue(1, id="a", run_at=at, **options, **limits)
    assert (handle.id, handle.queue, handle.placed) == ("a", "q", Placed.NEW)
    (job,) = await app.storage.get("q", ["a"])
    assert job is not None
    assert job.custom_id
    work = job.work
    assert (work.priority, work.timeout_ms, work.result_ttl_ms, work.dedup_ttl_ms) == (8, 9000, 1500, 2000)
    assert (work.max_retries, work.max_stalls, work.max_timeouts) == (1, 2, 3)
    info = await queue.get("a")
    assert info is not None
    assert info.run_at == at
    await queue.enqueue(1, id="b", delay=60)
    delayed = await queue.get("b")
    assert delayed is not None
    assert timedelta(seconds=59.9) < delayed.run_at - delayed.created_at < timedelta(seconds=60.1)


async def test_a_conflict_is_kept_updated_or_raised_as_asked(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    assert (await queue.enqueue(1, id="a")).placed is Placed.NEW
    assert (await queue.enqueue(2, id="a")).placed is Placed.DUPLICATE
    assert await payload_of(queue, "a") == 1
    assert (await queue.enqueue(3, id="a", on_conflict="update", delay=60)).placed is Placed.UPDATED
    assert await payload_of(queue, "a") == 3
    before = await queue.get("a")
    assert before is not None
    await queue.enqueue(4, id="a", on_conflict=Update(run_at=False))
    after = await queue.get("a")
    assert after is not None
    assert (after.payload, after.run_at) == (4, before.run_at)


async def test_job_of_a_queue_runs_the_task_of_the_same_name(app: Holdfast[Any]) -> None:
    @app.task(name="letters")
    async def send(to: str, pages: int = 1) -> Letter:
        return Letter(to, pages)

    async with app.worker():
        queue = app.queue("letters")
        handle = await queue.enqueue({"to": "ada", "pages": 3}, id="x")
        assert await handle.result() == {"to": "ada", "pages": 3}
        assert await queue.result("x", type=Letter) == Letter("ada", 3)


# Get


async def test_get_returns_all_fields_of_a_waiting_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    began = datetime.now(UTC)
    handle = await queue.enqueue({"n": 1}, id="a", priority=7, delay=30)
    info = await queue.get("a")
    assert info is not None
    assert (info.queue, info.id, info.state, info.generation) == ("q", "a", State.WAITING, handle.generation)
    assert (info.payload, info.priority) == ({"n": 1}, 7)
    assert (info.attempts, info.retries, info.stalls, info.timeouts) == (0, 0, 0, 0)
    assert (info.worker, info.progress, info.result, info.error, info.deferred) == (None, None, None, None, False)
    assert abs(info.created_at - began) < timedelta(seconds=10)
    assert info.run_at.utcoffset() == timedelta(0)
    assert await queue.get("other") is None


async def test_get_returns_worker_and_progress_of_a_running_job(app: Holdfast[Any]) -> None:
    go = asyncio.Event()
    started = asyncio.Event()

    @app.task(name="q", singleton="x")
    async def run() -> str:
        current_job().progress({"done": 3})
        started.set()
        await go.wait()
        return "end"

    queue = app.queue("q")
    async with app.worker(name="the-worker", lease=0.5):
        first = await run.enqueue()
        await started.wait()
        await until(lambda: _progress_is(queue, {"done": 3}))
        second = await run.enqueue()
        info = await queue.get("x")
        assert info is not None
        assert (info.state, info.worker, info.attempts, info.deferred) == (State.RUNNING, "the-worker", 1, True)
        assert info.generation == first.generation
        go.set()
        assert await second.result() == "end"
        done = await queue.get("x")
        assert done is not None
        assert (done.state, done.result, done.payload) == (State.COMPLETED, "end", None)
        assert (done.worker, done.progress, done.deferred) == ("the-worker", None, False)
        assert done.generation == second.generation


async def test_get_returns_when_a_run_started_and_ended(app: Holdfast[Any]) -> None:
    go = asyncio.Event()

    @app.task(name="q")
    async def run(fails: bool) -> int:
        await go.wait()
        await asyncio.sleep(0.1)
        if fails:
            raise PermanentError("broken")
        return 1

    queue = app.queue("q")
    for id, fails in (("a", False), ("b", True)):
        go.clear()
        began = datetime.now(UTC)
        await run.using(id=id).enqueue(fails)
        waiting = await _info(queue, id)
        assert (waiting.started_at, waiting.finished_at, waiting.duration) == (None, None, None)
        async with app.worker(name="the-worker"):
            await until(partial(_is_in, queue, id, {State.RUNNING}))
            running = await _info(queue, id)
            assert running.started_at is not None
            assert timedelta(0) <= running.started_at - began < timedelta(seconds=10)
            assert (running.finished_at, running.duration) == (None, None)
            go.set()
            await until(partial(_is_in, queue, id, FINISHED))
        ended = await _info(queue, id)
        assert ended.finished_at is not None
        assert ended.duration is not None
        assert (ended.started_at, ended.worker) == (running.started_at, "the-worker")
        assert ended.duration == pytest.approx((ended.finished_at - running.started_at).total_seconds())
        assert 0.1 <= ended.duration < 10


async def _info(queue: Queue, id: str) -> JobInfo:
    info = await queue.get(id)
    assert info is not None
    return info


async def _is_in(queue: Queue, id: str, states: Collection[State]) -> bool:
    return (await _info(queue, id)).state in states


async def _progress_is(queue: Queue, value: object) -> bool:
    info = await queue.get("x")
    return info is not None and info.progress == value


async def test_get_returns_the_error_of_a_retrying_and_of_a_failed_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await queue.lease()
    assert lease is not None
    await lease.retry(delay=60, error=ValueError("not now"))
    info = await queue.get("a")
    assert info is not None
    assert info.error is not None
    assert (info.state, info.attempts, info.retries) == (State.WAITING, 1, 1)
    assert (info.error.type, info.error.message, info.error.kind) == ("ValueError", "not now", "retriable")
    await queue.enqueue(1, id="a", on_conflict=Update(payload=False))
    lease = await queue.lease()
    assert lease is not None
    await lease.fail("no use")
    info = await queue.get("a")
    assert info is not None
    assert info.error is not None
    assert (info.state, info.payload, info.attempts) == (State.FAILED, 1, 2)
    assert (info.error.type, info.error.message, info.error.kind) == ("Failed", "no use", "permanent")


# Result


async def test_a_result_comes_as_the_type_that_is_asked_for(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    await complete_one(queue, {"to": "ada", "pages": 4})
    assert await queue.result("a") == {"to": "ada", "pages": 4}
    assert await queue.result("a", type=Letter) == Letter("ada", 4)
    assert await queue.result("a", type=dict[str, Any], wait=0) == {"to": "ada", "pages": 4}
    with pytest.raises(PayloadRejected, match=r"the result of job 'a' in q .*int"):
        await queue.result("a", type=int)


async def test_a_result_may_be_bytes(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    await complete_one(queue, b"\x00\xff")
    assert await queue.result("a") == b"\x00\xff"
    assert await queue.result("a", type=bytes) == b"\x00\xff"
    info = await queue.get("a")
    assert info is not None
    assert info.result == b"\x00\xff"


async def test_result_of_an_unknown_id_is_an_error(app: Holdfast[Any]) -> None:
    with pytest.raises(JobNotFound, match="'missing' in q: it was never requested, or is forgotten"):
        await app.queue("q").result("missing")


async def test_a_result_waits_for_a_job_that_has_not_ended(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    with pytest.raises(WaitTimeout):
        await queue.result("a", wait=0.05)
    asking = asyncio.create_task(queue.result("a"))
    await asyncio.sleep(0.05)
    await complete_one(queue, 9)
    assert await asking == 9


# Keep


async def test_keep_changes_how_long_an_outcome_is_kept(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    assert await queue.keep("a", 60) is KeepResult.MISSING
    await queue.enqueue(1, id="a")
    await complete_one(queue, "result")
    assert await queue.keep("a", timedelta(milliseconds=50)) is KeepResult.KEPT
    await until(lambda: _is_missing(queue, "a"))
    assert await queue.keep("a", 60) is KeepResult.MISSING


async def test_keep_of_a_live_job_counts_from_its_end(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b")
    assert await queue.keep("a", 0.2) is KeepResult.LIVE
    await complete_one(queue, "result")
    await complete_one(queue, "result")
    assert await queue.result("a", wait=0) == "result"
    await until(lambda: _is_missing(queue, "a"))
    assert await queue.result("b", wait=0) == "result"


async def _is_missing(queue: Queue, id: str) -> bool:
    return await queue.get(id) is None


# Cancel and retry


async def test_cancel_returns_what_it_did_to_the_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    assert await queue.cancel("a") is CancelResult.MISSING
    await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b", delay=60)
    lease = await queue.lease()
    assert lease is not None
    assert await queue.cancel("a") is CancelResult.ASKED
    assert not await queue.cancel("a")
    assert await queue.cancel("b") is CancelResult.CANCELLED
    assert await lease.retry()
    info = await queue.get("a")
    assert info is not None
    assert info.state is State.CANCELLED
    assert await queue.cancel("a") is CancelResult.FINISHED
    assert [bool(answer) for answer in CancelResult] == [True, False, False, False]
    with pytest.raises(JobCancelled):
        await queue.result("b")


async def test_completion_wins_against_a_late_cancel(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await queue.lease()
    assert lease is not None
    assert await queue.cancel("a") is CancelResult.ASKED
    assert await lease.complete("done")
    assert await queue.result("a") == "done"


async def test_operator_retry_runs_a_failed_job_unchanged(app: Holdfast[Any]) -> None:
    wrong = [True]
    ran: list[dict[str, Any]] = []

    @app.task(name="q")
    async def run(**values: Any) -> str:
        ran.append(values)
        if wrong:
            raise PermanentError("at first")
        return "mended"

    queue = app.queue("q")
    async with app.worker():
        first = await run.using(id="a", priority=8).enqueue(n=1)
        with pytest.raises(JobFailed):
            await first.result()
        wrong.clear()
        again = await queue.retry("a")
        assert (again.placed, again.id) == (Placed.NEW, "a")
        assert again.generation > first.generation
        assert await again.result() == "mended"
    assert ran == [{"n": 1}, {"n": 1}]


async def test_operator_retry_restarts_a_cancelled_job_and_resets_its_counts(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue({"n": 1}, id="a")
    lease = await queue.lease()
    assert lease is not None
    await lease.retry(delay=60)
    await queue.cancel("a")
    handle = await queue.retry("a")
    assert handle.placed is Placed.NEW
    info = await queue.get("a")
    assert info is not None
    assert (info.state, info.payload, info.attempts, info.retries) == (State.WAITING, {"n": 1}, 0, 0)


async def test_operator_retry_leaves_live_jobs_and_refuses_unknown_ids(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    with pytest.raises(JobNotFound, match="'a' in q"):
        await queue.retry("a")
    await queue.enqueue(1, id="a", delay=60)
    before = await queue.get("a")
    assert (await queue.retry("a")).placed is Placed.DUPLICATE
    assert await queue.get("a") == before
    await queue.enqueue(1, id="b")
    lease = await queue.lease()
    assert lease is not None
    assert (await queue.retry("b")).placed is Placed.DUPLICATE
    assert await lease.complete(1)
    with pytest.raises(JobNotFound):
        await queue.retry("b")


# Lists and numbers


async def test_jobs_are_listed_by_state_and_all_together(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    for id in ("done", "failed", "held"):
        await queue.enqueue({"id": id}, id=id)
    await complete_one(queue, "result")
    lease = await queue.lease()
    assert lease is not None
    await lease.fail("on purpose")
    assert await queue.lease() is not None
    await queue.enqueue(1, id="cancelled")
    await queue.cancel("cancelled")
    await queue.enqueue(1, id="later", delay=60)
    await queue.enqueue(1, id="low", priority=1)
    await queue.enqueue(1, id="high", priority=9)
    assert await ids(queue, State.COMPLETED) == ["done"]
    assert await ids(queue, "failed") == ["failed"]
    assert await ids(queue, "running") == ["held"]
    assert await ids(queue, "cancelled") == ["cancelled"]
    assert sorted(await ids(queue, "waiting")) == ["high", "later", "low"]
    assert sorted(await ids(queue)) == ["cancelled", "done", "failed", "held", "high", "later", "low"]
    async for job in queue.jobs():
        assert (job.payload, job.result) == (None, None)
    with pytest.raises(OptionError, match="'lost' is not a state: use one of waiting, running"):
        await ids(queue, "lost")


async def test_a_list_goes_on_past_one_page(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(n, id=f"{n:03d}") for n in range(230))
    assert await ids(queue, "waiting") == [f"{n:03d}" for n in range(230)]
    assert sorted(await ids(queue)) == [f"{n:03d}" for n in range(230)]


async def test_stats_of_a_missing_queue_are_zero(app: Holdfast[Any]) -> None:
    stats = await app.queue("nowhere").stats()
    counts = (stats.ready, stats.scheduled, stats.running, stats.retrying, stats.deferred)
    assert counts == (0, 0, 0, 0, 0)
    assert (stats.completed, stats.failed, stats.cancelled, stats.oldest_ready_seconds) == (0, 0, 0, 0.0)
    assert (stats.paused, stats.reason, stats.workers) == (False, "", [])
    assert (await app.stats()).queues == []


async def test_stats_of_a_queue_cost_the_same_beside_many_queues(app: Holdfast[Any]) -> None:
    mine = app.queue("mine")
    await mine.enqueue(1)

    async def cpu_of_20() -> float:
        started = time.process_time()
        for _ in range(20):
            assert (await mine.stats()).ready == 1
        return time.process_time() - started

    alone = max([await cpu_of_20() for _ in range(3)])
    for number in range(400):
        await app.queue(f"other{number}").enqueue(1)
    assert min([await cpu_of_20() for _ in range(3)]) < 5 * alone


async def test_every_stats_field_counts_its_state(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="done")
    await complete_one(queue)
    await queue.enqueue(1, id="failed")
    lease = await queue.lease()
    assert lease is not None
    await lease.fail()
    await queue.enqueue(1, id="retrying")
    lease = await queue.lease()
    assert lease is not None
    await lease.retry(delay=60)
    await queue.enqueue(1, id="running")
    assert await queue.lease() is not None
    await queue.enqueue(2, id="running", on_conflict="update")
    await queue.enqueue(1, id="cancelled", delay=60)
    await queue.cancel("cancelled")
    for n in range(2):
        await queue.enqueue(1, id=f"later{n}", delay=60)
    for n in range(3):
        await queue.enqueue(1, id=f"ready{n}")
    await asyncio.sleep(0.05)
    stats = await queue.stats()
    assert (stats.ready, stats.running, stats.deferred, stats.retrying) == (3, 1, 1, 1)
    assert stats.scheduled in (2, 3)  # The one that is retried is waiting for its time as well.
    assert (stats.completed, stats.failed, stats.cancelled) == (1, 1, 1)
    assert 0.04 < stats.oldest_ready_seconds < 30
    assert (stats.totals["enqueued"], stats.totals["completed"], stats.totals["retried"]) == (10, 1, 1)
    (seen,) = (await app.stats()).queues
    assert (seen.queue, seen.ready) == ("q", 3)


async def test_stats_name_the_workers_that_serve_the_queue(app: Holdfast[Any]) -> None:
    @app.task(name="served")
    async def served() -> None: ...

    @app.task(name="other")
    async def other() -> None: ...

    await app.queue("other").enqueue({})
    async with app.worker("served", name="first", lease=0.5), app.worker(name="second", lease=0.5):
        await until(lambda: _workers_are(app.queue("served"), ["first", "second"]))
        await until(lambda: _workers_are(app.queue("other"), ["second"]))
        assert sorted(worker.worker for worker in (await app.stats()).workers) == ["first", "second"]
        await served.call()
        await until(lambda: _workers_are(app.queue("served"), ["first", "second"]))


async def _workers_are(queue: Queue, names: list[str]) -> bool:
    return sorted((await queue.stats()).workers) == names


# Pause


async def test_a_paused_queue_gives_no_job_and_says_why(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="q")
    async def run(n: int) -> None:
        ran.append(n)

    queue = app.queue("q")
    async with app.worker():
        await queue.pause(reason="the mail server is down")
        handle = await run.enqueue(1)
        stats = await queue.stats()
        assert (stats.paused, stats.reason, stats.ready) == (True, "the mail server is down", 1)
        assert await queue.lease(wait=0) is None
        with pytest.raises(WaitTimeout):
            await handle.result(wait=0.3)
        assert ran == []
        await queue.resume()
        await handle.result()
    stats = await queue.stats()
    assert (stats.paused, stats.reason) == (False, "")


async def test_running_jobs_of_a_paused_queue_continue(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await queue.lease()
    assert lease is not None
    await queue.pause()
    assert await lease.extend()
    assert await lease.complete("done")
    assert await queue.result("a") == "done"


# Sweep and repair


async def test_sweep_takes_back_expired_leases_and_forgets_old_records(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="held")
    assert await queue.lease(seconds=0.1) is not None
    await queue.enqueue(1, id="done", result_ttl=0.05)
    lease = await queue.lease()
    assert lease is not None
    await lease.complete(1)
    overdue: list[str] = []
    stalled: list[str] = []
    forgotten = 0

    async def swept() -> bool:
        nonlocal forgotten
        told = await queue.sweep()
        overdue.extend(told.overdue)
        stalled.extend(told.stalled)
        forgotten += told.forgotten
        return bool(stalled) and forgotten > 0

    await until(swept)
    assert (overdue, stalled, forgotten) == (["held"], ["held"], 1)
    info = await queue.get("held")
    assert info is not None
    assert (info.state, info.stalls) == (State.WAITING, 1)


async def test_a_sweep_of_a_worker_takes_its_leases_back_at_once(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    assert await queue.lease(seconds=600) is not None
    info = await queue.get("a")
    assert info is not None
    assert info.worker is not None
    assert (await queue.sweep(worker="somebody else")).stalled == []
    assert (await queue.sweep(worker=info.worker)).stalled == ["a"]
    after = await queue.get("a")
    assert after is not None
    assert (after.state, after.stalls, after.worker) == (State.WAITING, 1, None)


async def test_repair_finds_nothing_in_a_healthy_queue(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await app.enqueue_many(queue.bind(n) for n in range(150))
    for _ in range(3):
        assert await queue.lease() is not None
    dry = await queue.repair(dry_run=True)
    assert (dry.problems, dry.checked) == ([], 150)
    assert (await queue.repair()).problems == []
    assert (await queue.stats()).ready == 147


# Purge and delete


async def test_purge_deletes_the_given_states_and_returns_the_count(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    for n in range(3):
        await queue.enqueue(1, id=f"done{n}")
        await complete_one(queue, 1)
    await app.enqueue_many(queue.bind(n) for n in range(130))
    assert await queue.purge(["completed"]) == 3
    assert (await queue.stats()).ready == 130
    assert await queue.purge([State.WAITING]) == 130
    assert await queue.purge() == 0
    assert await ids(queue) == []


async def test_purge_leaves_running_jobs_by_default(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="held")
    lease = await queue.lease()
    assert lease is not None
    await queue.enqueue(1, id="waiting")
    assert await queue.purge() == 1
    assert await lease.extend()
    assert not lease.cancel_asked
    await queue.purge(["running"])
    assert await lease.extend()
    assert lease.cancel_asked
    assert await lease.complete()


async def test_an_unknown_state_is_refused(app: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match="is not a state"):
        await app.queue("q").purge(["gone"])


async def test_deleted_queue_is_gone_with_all_its_jobs(app: Holdfast[Any]) -> None:
    queue, other = app.queue("q"), app.queue("other")
    await other.enqueue(1)
    await app.enqueue_many(queue.bind(n) for n in range(120))
    await complete_one(queue, 1)
    await queue.pause()
    assert await queue.delete()
    assert [seen.queue for seen in (await app.stats()).queues] == ["other"]
    assert not (await queue.stats()).paused
    handle = await queue.enqueue(1)
    assert handle.placed is Placed.NEW
    assert (await queue.stats()).totals["enqueued"] == 1


async def test_delete_cancels_running_jobs_and_waits_for_their_end(app: Holdfast[Any]) -> None:
    stopped: list[str | None] = []
    started = asyncio.Event()

    @app.task(name="q")
    async def run() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(current_job().stopping)

    async with app.worker(lease=0.5):
        handle = await run.enqueue()
        await started.wait()
        assert await app.queue("q").delete()
        assert stopped == ["cancel"]
        assert await handle.state() is None
        assert "q" not in [seen.queue for seen in (await app.stats()).queues]


async def test_stats_of_the_app_have_the_same_fields_and_types_everywhere(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1)
    await complete_one(queue, 2)
    app.task(name="t")(lambda: None)
    async with app.worker(name="w"):
        await until(lambda: _has_worker(app))
        stats = await app.stats()
    (found,) = [each for each in stats.queues if each.queue == "q"]
    assert found == await queue.stats()
    assert {type(kind) for kind in found.totals} == {str}
    assert (found.totals["enqueued"], found.totals["completed"]) == (1, 1)
    assert found.oldest_ready_seconds == 0
    (worker,) = stats.workers
    assert (worker.worker, worker.evict_asked) == ("w", False)
    assert worker.beat_at <= worker.expires_at
    for at in (stats.now, worker.beat_at, worker.expires_at):
        assert at.utcoffset() == timedelta(0)


async def _has_worker(app: Holdfast[Any]) -> bool:
    return bool((await app.stats()).workers)


async def test_delete_beside_a_producer_leaves_no_paused_queue(app: Holdfast[Any]) -> None:
    queue, producing = app.queue("q"), True

    async def produce() -> None:
        while producing:
            await queue.enqueue(1)

    producer = asyncio.create_task(produce())
    for _ in range(10):
        assert await queue.delete(wait=5)
        assert not (await queue.stats()).paused
    producing = False
    await producer


async def test_repeated_delete_without_wait_succeeds_though_a_lease_holder_is_dead(
    app: Holdfast[Any],
) -> None:
    queue = app.queue("q")
    await queue.enqueue(1)
    assert await queue.lease(seconds=0.1) is not None  # And it is never heard of again.

    async def is_deleted() -> bool:
        return await queue.delete(wait=0)

    await until(is_deleted, 5)


async def test_unfinished_delete_returns_false_and_leaves_the_queue_paused(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="held")
    lease = await queue.lease()
    assert lease is not None
    assert not await queue.delete(wait=0.2)
    stats = await queue.stats()
    assert (stats.paused, stats.reason, stats.running) == (True, "being deleted", 1)
    assert await lease.complete()
    assert await queue.delete(wait=5)
    assert [seen.queue for seen in (await app.stats()).queues] == []


async def test_deleting_a_missing_queue_is_not_an_error(app: Holdfast[Any]) -> None:
    assert await app.queue("nowhere").delete()
    assert (await app.stats()).queues == []


# Events


async def test_queue_events_list_what_happens_to_its_jobs(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    heard: list[tuple[EventKind, str]] = []

    async def listen() -> None:
        async for event in queue.events():
            assert event.queue == "q"
            heard.append((event.kind, event.id))

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    await app.queue("other").enqueue(1)
    await queue.enqueue(1, id="a")
    await queue.enqueue(2, id="a", on_conflict="update")
    lease = await queue.lease()
    assert lease is not None
    await lease.complete(1)
    await queue.enqueue(1, id="b", delay=60)
    await queue.cancel("b")
    expected = [
        *((EventKind.ENQUEUED, "a"), (EventKind.UPDATED, "a"), (EventKind.CLAIMED, "a"), (EventKind.COMPLETED, "a")),
        *((EventKind.ENQUEUED, "b"), (EventKind.CANCELLED, "b")),
    ]
    await until(lambda: heard == expected)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_event_iteration_can_be_stopped_at_any_time(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    events = queue.events()
    asking = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.2)
    await queue.enqueue(1, id="a")
    assert (await asyncio.wait_for(asking, 10)).id == "a"
    await events.aclose()  # type: ignore[attr-defined]
    await queue.enqueue(1, id="b")
