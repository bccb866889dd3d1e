"""Request and response: a caller gets the result of the very run that it asked for, or an error that says why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import msgspec
import pytest

from holdfast import (
    CancelResult,
    DuplicateJob,
    EventKind,
    Holdfast,
    HoldfastError,
    JobCancelled,
    JobFailed,
    JobForgotten,
    OptionError,
    PayloadRejected,
    PermanentError,
    Placed,
    State,
    Update,
    WaitTimeout,
)
from tests.app.conftest import until

AppMaker = Callable[..., Holdfast[Any]]


@dataclass
class Point:
    x: int
    y: float


class Report(msgspec.Struct):
    name: str
    points: list[Point]
    made_at: datetime
    raw: bytes = b""


class Gate:
    """Holds runs up until it is opened, and counts them."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.started: list[Any] = []

    async def pass_through(self, what: Any = None) -> None:
        self.started.append(what)
        await self.opened.wait()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


# Results


async def test_call_returns_the_result_of_the_handler(app: Holdfast[Any]) -> None:
    @app.task(name="add")
    async def add(a: int, b: int = 3) -> int:
        return a + b

    async with app.worker():
        assert await add.call(1, 2) == 3
        assert await add.call(1) == 4
        assert await add.call(b=5, a=4) == 9


async def test_call_returns_the_result_of_a_sync_handler(app: Holdfast[Any]) -> None:
    @app.task(name="sync")
    def shout(word: str) -> str:
        return word.upper()

    async with app.worker():
        assert await shout.call("quietly") == "QUIETLY"
        assert shout("plainly") == "PLAINLY"


async def test_results_come_back_as_the_types_that_the_handler_declares(app: Holdfast[Any]) -> None:
    made_at = datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC)

    @app.task(name="typed")
    async def report(name: str, points: list[Point]) -> Report:
        assert all(type(point) is Point for point in points)
        return Report(name, points, made_at, b"\x00\xff")

    @app.task(name="dataclass")
    async def mirrored(point: Point) -> Point:
        return Point(-point.x, -point.y)

    async with app.worker():
        told = await report.call("all", [Point(1, 2.5), Point(3, 4.0)])
        assert told == Report("all", [Point(1, 2.5), Point(3, 4.0)], made_at, b"\x00\xff")
        assert type(told.points[0]) is Point
        assert await mirrored.call(Point(1, 2.5)) == Point(-1, -2.5)


@pytest.mark.parametrize("wait", [5, None, timedelta(seconds=5)])
async def test_call_of_a_handler_without_return_value_gives_none(app: Holdfast[Any], wait: Any) -> None:
    @app.task(name="nothing")
    async def nothing() -> None:
        return None

    async with app.worker():
        assert await nothing.using(wait=wait).call() is None
        handle = await nothing.using(delay=0.2).enqueue()
        assert await handle.result(wait=wait) is None


async def test_falsy_results_are_returned(app: Holdfast[Any]) -> None:
    @app.task(name="falsy")
    async def falsy(kind: str) -> Any:
        return {"zero": 0, "empty": "", "false": False, "list": [], "dict": {}}[kind]

    async with app.worker():
        assert [await falsy.call(kind) for kind in ("zero", "empty", "false", "list", "dict")] == [0, "", False, [], {}]


async def test_a_large_result_arrives_whole(app: Holdfast[Any]) -> None:
    text = "".join(f"{n:07d}" for n in range(60_000))

    @app.task(name="large")
    async def large(seed: str) -> str:
        return seed + text

    async with app.worker():
        assert await large.call("!") == "!" + text
        handle = await large.enqueue("?")
        assert await handle.result() == "?" + text


async def test_many_calls_at_once_each_get_their_own_result(app: Holdfast[Any]) -> None:
    @app.task(name="square", concurrency=20)
    async def square(n: int) -> int:
        await asyncio.sleep((n * 7919 % 10) / 1000)
        return n * n

    async with app.worker():
        results = await asyncio.gather(*(square.call(n) for n in range(150)))
    assert results == [n * n for n in range(150)]


async def test_handle_returns_its_result_repeatedly(app: Holdfast[Any]) -> None:
    @app.task(name="again")
    async def again() -> str:
        return "here"

    handle = await again.enqueue()
    async with app.worker():
        assert await asyncio.gather(*(handle.result() for _ in range(5))) == ["here"] * 5
    assert await handle.result(wait=0) == "here"


async def test_a_result_crosses_from_the_worker_to_a_producer_in_another_app(make_app: AppMaker) -> None:
    serving, asking = make_app(), make_app()

    @serving.task(name="far")
    async def far(point: Point) -> Point:
        return Point(point.x + 1, point.y)

    @asking.stub(name="far")
    def stub(point: Point) -> Point:
        raise NotImplementedError

    async with asking:
        handle = await stub.enqueue(Point(1, 0.5))
        async with serving.worker():
            assert await stub.call(Point(2, 0.5)) == Point(3, 0.5)
            assert await handle.result() == Point(2, 0.5)
            anything = await asking.queue("far").enqueue({"point": {"x": 9, "y": 1}})
            assert await anything.result() == {"x": 10, "y": 1.0}


async def test_job_enqueued_right_after_worker_start_does_not_wait_for_polling(
    app: Holdfast[Any],
) -> None:
    @app.task(name="prompt")
    async def prompt() -> int:
        return 1

    async with app.worker():
        began = time.monotonic()
        await prompt.call()
        assert time.monotonic() - began < 0.8


# One id, several callers


async def test_a_cached_result_comes_at_once_however_short_the_wait(app: Holdfast[Any]) -> None:
    ran: list[str] = []

    @app.task(name="daily", unique="report:{day}")
    async def daily(day: str) -> str:
        ran.append(day)
        return f"report of {day}"

    async with app.worker():
        assert await daily.call("monday") == "report of monday"
    # Nobody works any more: only a cache can answer.
    for wait in (0, 0.001, 0.05, 5, None):
        assert await daily.using(wait=wait).call("monday") == "report of monday"
    handle = await daily.enqueue("monday")
    assert handle.placed is Placed.COMPLETED
    assert await handle.result(wait=0) == "report of monday"
    assert ran == ["monday"]


async def test_all_callers_of_one_id_get_the_result_of_one_run(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="shared", unique="{day}")
    async def shared(day: str) -> int:
        await gate.pass_through(day)
        return len(gate.started)

    async with app.worker():
        calls = [asyncio.create_task(shared.call("monday")) for _ in range(12)]
        handle = await shared.enqueue("monday")
        await until(lambda: gate.started)
        late = asyncio.create_task(shared.call("monday"))
        gate.opened.set()
        assert await asyncio.gather(*calls, late, handle.result()) == [1] * 14
    assert gate.started == ["monday"]


async def test_with_keep_all_callers_get_the_result_of_the_first_payload(app: Holdfast[Any]) -> None:
    @app.task(name="kept")
    async def kept(value: str) -> str:
        return value

    first = await kept.using(id="x").enqueue("first")
    second = await kept.using(id="x", on_conflict="keep").enqueue("second")
    assert (first.placed, second.placed) == (Placed.NEW, Placed.DUPLICATE)
    assert first.generation == second.generation
    async with app.worker():
        assert [await first.result(), await second.result()] == ["first", "first"]


async def test_an_update_of_a_waiting_job_gives_every_caller_the_newest_result(app: Holdfast[Any]) -> None:
    @app.task(name="updated", singleton="{user}")
    async def sync(user: int, value: str) -> str:
        return value

    first = await sync.enqueue(1, "old")
    second = await sync.enqueue(1, "new")
    assert (first.placed, second.placed) == (Placed.NEW, Placed.UPDATED)
    async with app.worker():
        assert [await first.result(), await second.result()] == ["new", "new"]


async def test_each_caller_of_a_singleton_gets_the_result_of_its_own_generation(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="deferred", singleton="{user}")
    async def sync(user: int, value: str) -> str:
        await gate.pass_through(value)
        return value

    async with app.worker():
        first = asyncio.create_task(sync.call(1, "first"))
        await until(lambda: gate.started == ["first"])
        second = await sync.enqueue(1, "second")
        third = asyncio.create_task(sync.call(1, "third"))
        await until(lambda: _generation_after(app, "deferred", "1", second.generation))
        assert second.placed is Placed.DEFERRED
        gate.opened.set()
        assert await first == "first"
        assert await third == "third"
        assert await second.result() == "third"
    assert gate.started == ["first", "third"]


async def _generation_after(app: Holdfast[Any], queue: str, id: str, generation: int) -> bool:
    (job,) = await app.storage.get(queue, [id])
    assert job is not None
    assert job.run is not None
    return job.run.next is not None and job.run.next.generation > generation


async def test_new_run_does_not_hide_the_result_of_the_previous_generation(app: Holdfast[Any]) -> None:
    @app.task(name="rerun")
    async def rerun(value: str) -> str:
        return value

    again = rerun.using(id="x", on_conflict="update")
    first = await again.enqueue("one")
    async with app.worker():
        assert await first.result() == "one"
    second = await again.enqueue("two")
    assert second.placed is Placed.NEW
    assert second.generation > first.generation
    assert await first.result(wait=0) == "one"
    with pytest.raises(WaitTimeout):
        await second.result(wait=0)
    async with app.worker():
        assert await second.result() == "two"


async def test_past_its_dedup_ttl_a_completed_id_runs_again(app: Holdfast[Any]) -> None:
    ran: list[int] = []

    @app.task(name="stale", unique="{n}", dedup_ttl=0.05)
    async def stale(n: int) -> int:
        ran.append(n)
        return len(ran)

    async with app.worker():
        assert await stale.call(1) == 1
        await asyncio.sleep(0.1)
        assert await stale.call(1) == 2


# Failures


class Broken(Exception):
    details: ClassVar[dict[str, int]] = {"code": 7}


async def test_failure_has_the_error_and_the_number_of_attempts(app: Holdfast[Any]) -> None:
    @app.task(name="fails", max_retries=2, min_backoff=0.01, max_backoff=0.01)
    async def fails(what: str) -> None:
        raise Broken(what)

    async with app.worker():
        with pytest.raises(JobFailed, match="Broken: the pipe") as raised:
            await fails.call("the pipe")
    failed = raised.value
    assert (failed.kind, failed.attempts) == ("retriable", 3)
    assert (failed.error.type, failed.error.message, failed.error.details) == ("Broken", "the pipe", {"code": 7})
    assert "raise Broken(what)" in failed.error.traceback
    assert isinstance(failed, HoldfastError)


async def test_permanent_failure_is_raised_at_once_and_again_later(app: Holdfast[Any]) -> None:
    @app.task(name="never")
    async def never() -> None:
        raise PermanentError("no such user")

    handle = await never.using(id="x").enqueue()
    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await handle.result()
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
    for late in (handle.result(wait=0), handle.result(), app.queue("never").result("x", wait=0)):
        with pytest.raises(JobFailed, match="no such user") as again:
            await late
        assert (again.value.kind, again.value.attempts, again.value.error) == ("permanent", 1, raised.value.error)


async def test_a_run_that_takes_too_long_fails_as_a_timeout(app: Holdfast[Any]) -> None:
    @app.task(name="slow", timeout=0.05, max_timeouts=0)
    async def slow() -> None:
        await asyncio.sleep(60)

    async with app.worker():
        with pytest.raises(JobFailed) as raised:
            await slow.call()
    assert (raised.value.kind, raised.value.attempts) == ("timeout", 1)


async def test_a_failed_id_that_is_asked_for_again_runs_again(app: Holdfast[Any]) -> None:
    wrong = [True]

    @app.task(name="mended", unique="{n}")
    async def mended(n: int) -> str:
        if wrong:
            raise PermanentError("not yet")
        return "done"

    async with app.worker():
        with pytest.raises(JobFailed):
            await mended.call(1)
        wrong.clear()
        assert await mended.call(1) == "done"


async def test_failure_of_an_earlier_generation_reaches_its_own_caller(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="mixed", singleton="{user}")
    async def mixed(user: int, fails: bool) -> str:
        await gate.pass_through()
        if fails:
            raise PermanentError("the first one")
        return "the second one"

    async with app.worker():
        first = await mixed.enqueue(1, True)
        await until(lambda: gate.started)
        second = await mixed.enqueue(1, False)
        gate.opened.set()
        assert await second.result() == "the second one"
        with pytest.raises(JobFailed, match="the first one") as raised:
            await first.result()
        assert raised.value.kind == "permanent"


async def test_a_result_of_another_type_than_the_caller_expects_is_refused_clearly(make_app: AppMaker) -> None:
    serving, asking = make_app(), make_app()

    @serving.task(name="drifted")
    async def drifted() -> str:
        return "words"

    @asking.stub(name="drifted")
    def expected() -> int:
        raise NotImplementedError

    async with asking, serving.worker():
        with pytest.raises(PayloadRejected, match=r"the result of job .* in drifted .*int"):
            await expected.call()


async def test_a_result_that_cannot_be_sent_fails_the_job_at_once(app: Holdfast[Any]) -> None:
    @app.task(name="unsendable")
    async def unsendable() -> Any:
        return object()

    async with app.worker():
        with pytest.raises(JobFailed, match="the result of unsendable cannot be sent as json") as raised:
            await unsendable.call()
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)


async def test_a_result_that_is_too_large_fails_the_job_at_once(make_app: AppMaker) -> None:
    app = make_app(max_payload=1000)

    @app.task(name="toolarge")
    async def too_large() -> str:
        return "x" * 2000

    async with app, app.worker():
        with pytest.raises(JobFailed, match="2002 bytes, at most 1000") as raised:
            await too_large.call()
    assert raised.value.kind == "permanent"


# Cancelled, forgotten, too late


async def test_a_cancel_of_a_waiting_job_ends_all_waits_for_it(app: Holdfast[Any]) -> None:
    @app.task(name="waiting")
    async def waiting() -> None: ...

    handle = await waiting.enqueue()
    asking = asyncio.create_task(handle.result())
    await asyncio.sleep(0.05)
    answer = await handle.cancel()
    assert answer is CancelResult.CANCELLED
    assert answer
    with pytest.raises(JobCancelled, match=handle.id):
        await asking
    with pytest.raises(JobCancelled):
        await handle.result(wait=0)
    assert await handle.state() is State.CANCELLED
    assert await handle.info() == await app.queue(handle.queue).get(handle.id)
    assert await handle.cancel() is CancelResult.FINISHED


async def test_the_result_of_a_cancelled_job_is_never_none(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="x")
    await queue.cancel("x")
    with pytest.raises(JobCancelled):
        await queue.result("x")
    with pytest.raises(JobCancelled):
        await queue.result("x", wait=0)


async def test_a_cancel_of_a_running_job_stops_it_and_ends_the_wait(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="running")
    async def running() -> None:
        await gate.pass_through()

    async with app.worker(lease=0.5):
        calling = asyncio.create_task(running.using(id="x").call())
        await until(lambda: gate.started)
        answer = await app.queue("running").cancel("x")
        assert answer is CancelResult.ASKED
        assert not answer
        with pytest.raises(JobCancelled):
            await calling


async def test_request_dropped_by_cancel_ends_its_wait_while_the_run_continues(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="dropped", singleton="{user}")
    async def dropped(user: int, value: str) -> str:
        try:
            await gate.pass_through(value)
        except asyncio.CancelledError:
            await gate.opened.wait()
        return value

    async with app.worker():
        first = await dropped.enqueue(1, "first")
        await until(lambda: gate.started)
        second = await dropped.enqueue(1, "second")
        asking = asyncio.create_task(second.result())
        await asyncio.sleep(0.05)
        assert await first.cancel() is CancelResult.ASKED
        with pytest.raises(JobCancelled):
            await asking
        assert await first.state() is State.RUNNING
        gate.opened.set()
        assert await first.result() == "first"
    assert gate.started == ["first"]


async def test_result_of_a_missing_record_raises_job_forgotten(app: Holdfast[Any]) -> None:
    @app.task(name="gone", result_ttl=0.05)
    async def gone() -> int:
        return 1

    handle = await gone.enqueue()
    async with app.worker():
        await until(lambda: _is_gone(handle))
    with pytest.raises(JobForgotten, match=handle.id):
        await handle.result()
    with pytest.raises(JobForgotten):
        await handle.result(wait=0)


async def _is_gone(handle: Any) -> bool:
    return await handle.state() is None


async def test_a_purge_ends_a_wait(app: Holdfast[Any]) -> None:
    handle = await app.queue("q").enqueue(1)
    asking = asyncio.create_task(handle.result())
    await asyncio.sleep(0.05)
    await app.queue("q").purge()
    with pytest.raises(JobForgotten):
        await asking


async def test_a_wait_that_ends_leaves_the_job_alone(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="patience")
    async def patience() -> str:
        await gate.pass_through()
        return "at last"

    handle = await patience.enqueue()
    async with app.worker():
        await until(lambda: gate.started)
        began = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"within 0\.2 s and is not cancelled: 1 live worker serves") as raised:
            await handle.result(wait=0.2)
        assert 0.19 <= time.monotonic() - began < 2
        assert isinstance(raised.value, TimeoutError)
        with pytest.raises(WaitTimeout):
            await patience.using(wait=0.05).call()
        assert await handle.state() is State.RUNNING
        gate.opened.set()
        assert await handle.result() == "at last"
    assert len(gate.started) == 2


async def test_timeout_names_the_storage_that_no_worker_serves(app: Holdfast[Any]) -> None:
    handle = await app.queue("unserved").enqueue(1)
    with pytest.raises(WaitTimeout, match="no live worker serves the queue on ") as raised:
        await handle.result(wait=0.05)
    assert app.storage.place in str(raised.value)
    with pytest.raises(WaitTimeout, match=r"is not cancelled$"):
        await handle.result(wait=0)


async def test_handle_by_id_has_the_result_of_an_earlier_request(app: Holdfast[Any]) -> None:
    @app.task(name="page", unique="page:{url}")
    async def page(url: str, depth: int = 1) -> tuple[str, int]:
        return url, depth

    id = page.id_for("https://example.org/?q=1", depth=2)
    assert id == "page:https%3A%2F%2Fexample.org%2F%3Fq%3D1"
    with pytest.raises(JobForgotten, match="was never requested"):
        await page.handle(id).result(wait=0)
    async with app.worker():
        sent = await page.enqueue("https://example.org/?q=1")
        assert sent.id == id
        assert await page.handle(id).result(wait=10) == ("https://example.org/?q=1", 1)
    assert await page.handle(id.encode()).state() is State.COMPLETED
    assert page.sync.handle(page.sync.id_for("a")).id == "page:a"


@pytest.mark.storages("memory")
async def test_id_for_needs_a_template(app: Holdfast[Any]) -> None:
    @app.task(name="plain")
    async def plain(number: int) -> None: ...

    with pytest.raises(OptionError, match="plain makes no id from its arguments: pass unique=… or singleton=…"):
        plain.id_for(1)


@pytest.mark.storages("memory")
async def test_template_writes_values_as_text(app: Holdfast[Any]) -> None:
    """So a number and its text are one id: an annotation of the parameter tells them apart before that."""

    @app.task(name="seen", unique="seen:{value}")
    async def seen(value: object) -> None: ...

    assert seen.id_for(1) == seen.id_for("1") == "seen:1"
    assert seen.id_for(True) == seen.id_for("true") == "seen:true"
    assert seen.id_for(None) != seen.id_for("~")


async def test_wait_of_zero_reads_once(app: Holdfast[Any]) -> None:
    @app.task(name="once")
    async def once() -> int:
        return 5

    handle = await once.enqueue()
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        await handle.result(wait=0)
    with pytest.raises(WaitTimeout):
        await once.using(wait=0).call()
    assert time.monotonic() - began < 2
    async with app.worker():
        await until(lambda: _is_completed(handle))
    assert await handle.result(wait=0) == 5


async def _is_completed(handle: Any) -> bool:
    return await handle.state() is State.COMPLETED


async def test_a_wait_can_be_given_up_by_cancelling_it(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="abandoned")
    async def abandoned() -> str:
        await gate.pass_through()
        return "still"

    async with app.worker():
        calling = asyncio.create_task(abandoned.using(id="x", wait=None).call())
        await until(lambda: gate.started)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        gate.opened.set()
        assert await app.queue("abandoned").result("x", type=str) == "still"


async def test_result_with_a_ttl_of_zero_still_reaches_its_waiter(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="unkept", result_ttl=0)
    async def unkept() -> str:
        await gate.pass_through()
        return "caught"

    async with app.worker():
        calls = [asyncio.create_task(unkept.using(id="x").call()) for _ in range(3)]
        handle = await unkept.enqueue()
        asking = asyncio.create_task(handle.result())
        await until(lambda: len(gate.started) == 2)
        await asyncio.sleep(0.05)
        gate.opened.set()
        assert await asyncio.gather(*calls, asking) == ["caught"] * 4


async def test_result_with_a_ttl_of_zero_is_dropped_without_a_waiter(app: Holdfast[Any]) -> None:
    @app.task(name="fleeting", result_ttl=0)
    async def fleeting() -> str:
        return "unheard"

    handle = await fleeting.using(id="x").enqueue()
    async with app.worker():
        await until(lambda: _is_gone(handle))


async def test_every_job_without_a_result_can_be_awaited_after_its_end(app: Holdfast[Any]) -> None:
    @app.task(name="silent")
    async def silent() -> None: ...

    handles = await app.enqueue_many(silent.bind() for _ in range(200))
    await app.worker(burst=True).run()
    await asyncio.gather(*(handle.result(wait=5) for handle in handles))
    info = await app.queue("silent").get(handles[0].id)
    assert info is not None
    assert (info.state, info.result, info.attempts) == (State.COMPLETED, None, 1)
    stats = await app.queue("silent").stats()
    assert (stats.completed, stats.totals["completed"]) == (200, 200)
    assert {job.id async for job in app.queue("silent").jobs("completed")} == {handle.id for handle in handles}
    assert await app.queue("silent").purge(["completed"]) == 200


async def test_result_ttl_holds_for_a_job_without_a_result(app: Holdfast[Any]) -> None:
    @app.task(name="silent", result_ttl=0.2)
    async def silent() -> None: ...

    short, long = await silent.enqueue(), await silent.using(result_ttl=3600).enqueue()
    gone = await silent.using(result_ttl=0).enqueue()
    await app.worker(burst=True).run()
    assert await gone.state() is None
    await until(lambda: _is_gone(short))
    assert await long.state() is State.COMPLETED
    with pytest.raises(JobForgotten, match=r"deleted after result_ttl=0\.2 s.*pass a larger result_ttl"):
        await short.result()
    with pytest.raises(JobForgotten, match="with result_ttl=0 an outcome is kept only for a caller that waits"):
        await gone.result()
    purged = await app.queue("other").enqueue(1)
    await app.queue("other").purge()
    with pytest.raises(JobForgotten, match=r"by default 1 hour, or 5 minutes .* more than 100,000 .* it was purged"):
        await purged.result()


async def test_result_ttl_of_zero_still_answers_a_caller_that_waits(app: Holdfast[Any]) -> None:
    @app.task(name="silent", result_ttl=0)
    async def silent() -> None: ...

    async with app.worker():
        assert await silent.call() is None


async def test_completed_job_with_a_chosen_id_answers_a_duplicate(app: Holdfast[Any]) -> None:
    @app.task(name="silent")
    async def silent() -> None: ...

    custom_id = await silent.using(id="x").enqueue()
    async with app.worker():
        await until(lambda: _is_completed(custom_id))
    assert (await silent.using(id="x").enqueue()).placed is Placed.COMPLETED
    assert await silent.using(id="x", wait=0).call() is None


# Handles


async def test_handle_returns_the_current_state(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="states")
    async def states() -> int:
        await gate.pass_through()
        return 1

    handle = await states.enqueue()
    assert (handle.queue, handle.placed) == ("states", Placed.NEW)
    assert handle.id in repr(handle)
    assert await handle.state() is State.WAITING
    async with app.worker():
        await until(lambda: gate.started)
        assert await handle.state() is State.RUNNING
        gate.opened.set()
        await handle.result()
        assert await handle.state() is State.COMPLETED
        assert await handle.cancel() is CancelResult.FINISHED
    await app.queue("states").purge()
    assert await handle.state() is None
    assert await handle.cancel() is CancelResult.MISSING


async def test_handle_gets_only_the_events_of_its_own_job(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="heard", max_retries=1, min_backoff=0.01, max_backoff=0.01)
    async def heard() -> None:
        await gate.pass_through()
        if len(gate.started) < 4:
            raise ValueError

    handle = await heard.enqueue()
    await heard.enqueue()
    heard_of: list[EventKind] = []

    async def listen() -> None:
        async for event in handle.events():
            assert (event.queue, event.id) == ("heard", handle.id)
            heard_of.append(event.kind)
            if event.kind in (EventKind.COMPLETED, EventKind.FAILED):
                return

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    async with app.worker():
        await until(lambda: len(gate.started) == 2)
        gate.opened.set()
        await asyncio.wait_for(listening, 10)
    assert heard_of[:3] == [EventKind.CLAIMED, EventKind.RETRIED, EventKind.CLAIMED]


async def test_placed_says_what_each_request_did(app: Holdfast[Any], gate: Gate) -> None:
    @app.task(name="placed")
    async def placed(value: int) -> int:
        await gate.pass_through()
        return value

    keep, update = placed.using(id="x"), placed.using(id="x", on_conflict="update")
    assert [(await keep.enqueue(1)).placed, (await keep.enqueue(2)).placed] == [Placed.NEW, Placed.DUPLICATE]
    assert (await update.enqueue(3)).placed is Placed.UPDATED
    later = placed.using(id="x", on_conflict=Update(payload=False, run_at="if_later"))
    assert (await later.enqueue(4)).placed is Placed.UPDATED
    async with app.worker():
        await until(lambda: gate.started)
        deferred = await update.enqueue(5)
        assert deferred.placed is Placed.DEFERRED
        gate.opened.set()
        assert await deferred.result() == 5
    assert (await keep.enqueue(6)).placed is Placed.COMPLETED
    assert (await update.enqueue(7)).placed is Placed.NEW


async def test_raise_refuses_live_and_completed_ids_and_accepts_others(app: Holdfast[Any]) -> None:
    @app.task(name="raises")
    async def raises(fails: bool) -> int:
        if fails:
            raise PermanentError("on purpose")
        return 1

    strict = raises.using(id="x", on_conflict="raise")
    assert (await strict.enqueue(True)).placed is Placed.NEW
    with pytest.raises(DuplicateJob, match=r"'x' in raises .*waiting"):
        await strict.enqueue(False)
    with pytest.raises(DuplicateJob):
        await strict.call(False)
    async with app.worker():
        with pytest.raises(JobFailed):
            await app.queue("raises").result("x")
        assert await strict.call(False) == 1
        with pytest.raises(DuplicateJob, match="completed"):
            await strict.call(False)


async def test_id_may_be_bytes_that_are_not_text(app: Holdfast[Any]) -> None:
    @app.task(name="bytes")
    async def answer(n: int) -> int:
        return n

    queue = app.queue("bytes")
    for id in (b"\xff\x00\xfe", b"plain", "ünïcode ✓", " "):
        handle = await answer.using(id=id).enqueue(7)
        assert (await answer.using(id=id).enqueue(8)).placed is Placed.DUPLICATE
        info = await queue.get(id)
        assert info is not None
        assert info.id == handle.id
    assert (await queue.get("plain")) == (await queue.get(b"plain"))
    async with app.worker():
        for id in (b"\xff\x00\xfe", b"plain", "ünïcode ✓", " "):
            assert await queue.result(id) == 7
            assert await answer.using(id=id, wait=0).call(9) == 7


# Many at once


async def test_handles_come_in_the_order_of_the_requests_over_several_queues(app: Holdfast[Any]) -> None:
    @app.task(name="one")
    async def one(n: int) -> str:
        return f"one {n}"

    @app.task(name="two")
    async def two(n: int) -> str:
        return f"two {n}"

    handles = await app.enqueue_many((two if n % 3 else one).bind(n) for n in range(40))
    assert [handle.queue for handle in handles] == ["two" if n % 3 else "one" for n in range(40)]
    async with app.worker():
        results = [await handle.result() for handle in handles]
    assert results == [f"{'two' if n % 3 else 'one'} {n}" for n in range(40)]


async def test_batch_above_the_item_limit_of_a_call_is_sent_in_order(app: Holdfast[Any]) -> None:
    queue = app.queue("many")
    handles = await app.enqueue_many(queue.bind(n) for n in range(620))
    assert len({handle.id for handle in handles}) == 620
    assert (await queue.stats()).ready == 620
    generations = [handle.generation for handle in handles]
    assert generations == sorted(generations)
    for n in (0, 249, 250, 499, 500, 619):
        info = await queue.get(handles[n].id)
        assert info is not None
        assert info.payload == n


async def test_batch_above_the_byte_limit_of_a_call_is_sent(app: Holdfast[Any]) -> None:
    queue = app.queue("heavy")
    sizes = [400_000, 700_000, 1_048_576, 10, 999_999, 1, 300_000, 300_000, 300_000, 300_000]
    handles = await app.enqueue_many([queue.bind(bytes([n]) * size) for n, size in enumerate(sizes)])
    for n, (handle, size) in enumerate(zip(handles, sizes, strict=True)):
        info = await queue.get(handle.id)
        assert info is not None
        assert info.payload == bytes([n]) * size


async def test_extensions_count_towards_the_size_of_a_call(app: Holdfast[Any]) -> None:
    bounds = [app.queue("heavy").bind(n) for n in range(20)]
    for bound in bounds:
        work = msgspec.structs.replace(bound.request.work, extension=((200, bytes(65_000)),))
        bound.request = msgspec.structs.replace(bound.request, work=work)
    assert len(await app.enqueue_many(bounds)) == 20


async def test_the_same_id_twice_in_one_batch_is_applied_in_order(app: Holdfast[Any]) -> None:
    @app.task(name="twice", singleton="{user}")
    async def twice(user: int, value: str) -> str:
        return value

    handles = await app.enqueue_many([twice.bind(1, "a"), twice.bind(2, "b"), twice.bind(1, "c")])
    assert [handle.placed for handle in handles] == [Placed.NEW, Placed.NEW, Placed.UPDATED]
    async with app.worker():
        assert [await handle.result() for handle in handles] == ["c", "b", "c"]


async def test_options_travel_with_each_request_of_a_batch(app: Holdfast[Any]) -> None:
    @app.task(name="options")
    async def options(n: int) -> int:
        return n

    handles = await app.enqueue_many(
        [options.using(priority=9, id="x").bind(1), options.using(delay=60, id="y").bind(2), options.bind(3)]
    )
    urgent, later, plain = [await app.queue("options").get(handle.id) for handle in handles]
    assert urgent is not None
    assert later is not None
    assert plain is not None
    assert (urgent.priority, plain.priority) == (9, 5)
    assert (urgent.id, later.id) == ("x", "y")
    assert later.run_at - plain.run_at > timedelta(seconds=50)


async def test_empty_batch_returns_no_handles(app: Holdfast[Any]) -> None:
    assert await app.enqueue_many([]) == []
    assert (await app.stats()).queues == []


async def test_a_batch_says_which_request_was_a_duplicate_only_if_asked(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(0, id="x")
    handles = await app.enqueue_many([queue.bind(1, id="x"), queue.bind(2, id="y")])
    assert [handle.placed for handle in handles] == [Placed.DUPLICATE, Placed.NEW]
    with pytest.raises(DuplicateJob, match="'x'"):
        await app.enqueue_many([queue.bind(1, id="x", on_conflict="raise"), queue.bind(2, id="z")])


async def test_batch_accepts_only_bound_requests(app: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match=r"task\.bind"):
        await app.enqueue_many([{"not": "bound"}])  # type: ignore[arg-type]
    assert (await app.stats()).queues == []
