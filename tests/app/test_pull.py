"""The pull API: a lease is held by one at a time, and settled by one, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import CancelResult, Holdfast, JobFailed, JobInfo, Lease, OptionError, PayloadRejected, Queue, State
from tests.app.conftest import until

AppMaker = Callable[..., Holdfast[Any]]


async def leased(queue: Queue, **options: Any) -> Lease:
    lease = await queue.lease(**options)
    assert lease is not None
    return lease


async def info_of(queue: Queue, id: str) -> JobInfo:
    info = await queue.get(id)
    assert info is not None
    return info


# A lease


async def test_lease_has_the_fields_of_its_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue({"to": "ada"}, id="a")
    began = datetime.now(UTC)
    lease = await leased(queue, seconds=40)
    assert (lease.queue, lease.id, lease.payload, lease.attempt) == ("q", "a", {"to": "ada"}, 1)
    assert timedelta(seconds=35) < lease.deadline - began < timedelta(seconds=50)
    assert (lease.settled, lease.cancel_asked) == (False, False)
    assert "'a' in q" in repr(lease)
    info = await info_of(queue, "a")
    assert (info.state, info.attempts) == (State.RUNNING, 1)
    assert await lease.release()
    again = await leased(queue)
    assert again.fence > lease.fence
    assert again.attempt == 2


async def test_a_lease_may_be_short_or_long(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    lengths: list[float | timedelta] = [0.1, 86_400, timedelta(minutes=1)]
    for n, seconds in enumerate(lengths):
        await queue.enqueue(n)
        assert await queue.lease(seconds=seconds) is not None
    for seconds in (0, 0.09, 86_401, -1):
        with pytest.raises(OptionError, match=r"seconds must be from 0\.1 to 86,400 seconds, not"):
            await queue.lease(seconds=seconds)


async def test_jobs_come_by_priority_then_by_time_then_by_arrival(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    past = datetime.now(UTC) - timedelta(hours=1)
    await queue.enqueue(1, id="first")
    await queue.enqueue(1, id="second")
    await queue.enqueue(1, id="old", run_at=past)
    await queue.enqueue(1, id="urgent", priority=9)
    await queue.enqueue(1, id="idle", priority=0, run_at=past)
    await queue.enqueue(1, id="later", delay=60, priority=9)
    order = [(await leased(queue)).id for _ in range(5)]
    assert order == ["urgent", "old", "first", "second", "idle"]
    assert await queue.lease(wait=0) is None


async def test_many_pullers_get_each_job_once(make_app: AppMaker) -> None:
    apps = [make_app() for _ in range(4)]
    for app in apps:
        await app.__aenter__()
    try:
        await apps[0].enqueue_many(apps[0].queue("q").bind(n) for n in range(120))
        got: list[int] = []

        async def pull(queue: Queue) -> None:
            while (lease := await queue.lease(seconds=60, wait=0)) is not None:
                got.append(lease.payload)
                await asyncio.sleep(0)
                assert await lease.complete()

        await asyncio.gather(*(pull(app.queue("q")) for app in apps for _ in range(3)))
        assert sorted(got) == list(range(120))
        assert (await apps[0].queue("q").stats()).totals["claimed"] == 120
    finally:
        for app in apps:
            await app.__aexit__()


# Waiting


async def test_wait_of_zero_reads_once(app: Holdfast[Any]) -> None:
    began = time.monotonic()
    assert await app.queue("q").lease(wait=0) is None
    assert time.monotonic() - began < 2


async def test_lease_wait_without_a_job_ends_after_its_time(app: Holdfast[Any]) -> None:
    began = time.monotonic()
    assert await app.queue("q").lease(wait=0.3) is None
    assert 0.29 <= time.monotonic() - began < 2


async def test_a_waiting_puller_is_woken_by_another_programs_enqueue(make_app: AppMaker) -> None:
    pulling, producing = make_app(), make_app()
    async with pulling, producing:
        took: list[float] = []
        for n in range(5):
            waiting = asyncio.create_task(pulling.queue("q").lease(wait=20))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await producing.queue("q").enqueue(n)
            lease = await waiting
            took.append(time.monotonic() - began)
            assert lease is not None
            assert lease.payload == n
        assert sorted(took)[2] < 0.4, took  # Without a wake it would be up to a second, half of one on average.


async def test_a_job_that_becomes_due_during_the_wait_is_taken_at_its_time(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a", delay=0.4)
    assert await queue.lease(wait=0) is None
    lease = await leased(queue, wait=20)
    info = await info_of(queue, "a")
    assert lease.id == "a"
    assert datetime.now(UTC) >= info.run_at
    assert datetime.now(UTC) - info.run_at < timedelta(seconds=0.5)


async def test_a_delayed_job_that_arrives_during_the_wait_is_taken_at_its_time(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    waiting = asyncio.create_task(queue.lease(wait=20))
    await asyncio.sleep(0.1)
    await queue.enqueue(1, id="a", delay=0.3)
    lease = await waiting
    assert lease is not None
    info = await info_of(queue, "a")
    assert datetime.now(UTC) >= info.run_at
    assert datetime.now(UTC) - info.run_at < timedelta(seconds=1.2)


async def test_endless_wait_continues_until_there_is_a_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    waiting = asyncio.create_task(queue.lease(wait=None))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await queue.enqueue(1)
    assert (await asyncio.wait_for(waiting, 10)) is not None


async def test_endless_wait_can_be_cancelled(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    waiting = asyncio.create_task(queue.lease(wait=None))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await queue.enqueue(1)
    assert await queue.lease(wait=0) is not None


async def test_a_lease_that_expires_during_the_wait_of_another_passes_on(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    first = await leased(queue, seconds=0.2)
    second = await leased(queue, wait=20)
    assert (second.id, second.attempt) == ("a", 2)
    assert second.fence > first.fence
    assert (await info_of(queue, "a")).stalls == 1
    assert not await first.extend()
    assert not await first.complete("late")
    assert await second.complete("in time")
    assert await queue.result("a") == "in time"


# Completing


async def test_exactly_one_of_many_concurrent_completions_returns_true(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    for n in range(5):
        await queue.enqueue(n, id=f"{n}")
        lease = await leased(queue)
        answers = await asyncio.gather(*(lease.complete(who) for who in range(20)))
        assert sorted(answers) == [False] * 19 + [True]
        assert await queue.result(f"{n}") == answers.index(True)
    assert (await queue.stats()).totals["completed"] == 5


async def test_lease_is_settled_only_once(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    ways: list[Callable[[Lease], Any]] = [
        lambda lease: lease.complete(),
        lambda lease: lease.retry(delay=60),
        lambda lease: lease.fail(),
        lambda lease: lease.release(),
    ]
    for n, way in enumerate(ways):
        await queue.enqueue(n, id=f"{n}", priority=9 - n)
        lease = await leased(queue)
        assert lease.id == f"{n}"
        assert await way(lease)
        assert lease.settled
        for late in ways:
            assert not await late(lease)
        assert not await lease.extend()


async def test_late_completion_counts_while_the_job_has_no_new_lease(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue, seconds=0.1)
    await asyncio.sleep(0.2)
    assert lease.deadline < datetime.now(UTC)
    assert await lease.complete("late, but alone")
    assert await queue.result("a") == "late, but alone"


async def test_completion_after_the_lease_moved_changes_nothing(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    first = await leased(queue, seconds=0.1)
    await until(lambda: _taken_back(queue, "a"))
    second = await leased(queue, seconds=60)
    answers = await asyncio.gather(
        *(first.complete(f"first {n}") for n in range(10)), *(second.complete(f"second {n}") for n in range(10))
    )
    assert answers[:10] == [False] * 10
    assert sorted(answers[10:]) == [False] * 9 + [True]
    assert (await queue.result("a")).startswith("second")


async def _taken_back(queue: Queue, id: str) -> bool:
    await queue.sweep()
    return (await info_of(queue, id)).state is State.WAITING


async def test_completing_before_the_work_runs_a_job_at_most_once(make_app: AppMaker) -> None:
    apps = [make_app(), make_app()]
    async with apps[0], apps[1]:
        done: list[int] = []
        await apps[0].enqueue_many(apps[0].queue("q").bind(n, id=f"{n}") for n in range(20))

        async def work(queue: Queue) -> None:
            while (lease := await queue.lease(wait=0)) is not None:
                if await lease.complete():
                    done.append(lease.payload)

        await asyncio.gather(*(work(app.queue("q")) for app in apps for _ in range(3)))
        assert sorted(done) == list(range(20))


async def test_result_that_cannot_be_encoded_leaves_the_lease_unchanged(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue)
    with pytest.raises(PayloadRejected, match="the result of job 'a' cannot be sent as json"):
        await lease.complete(object())
    assert not lease.settled
    assert await lease.complete("good")


async def test_job_with_a_generated_id_can_be_awaited_after_completion(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    nameless = await queue.enqueue(1)
    assert await (await leased(queue)).complete()
    assert await nameless.result() is None
    with_result = await queue.enqueue(1)
    assert await (await leased(queue)).complete(0)
    assert await with_result.result() == 0


# Extending


async def test_an_extension_moves_the_deadline(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue, seconds=10)
    first = lease.deadline
    assert await lease.extend(600)
    assert lease.deadline - first > timedelta(seconds=500)
    assert await lease.extend(timedelta(seconds=5))
    assert lease.deadline < first
    assert await lease.extend()  # As long as the last time.
    assert lease.deadline < first
    with pytest.raises(OptionError, match="seconds must be from"):
        await lease.extend(0.01)


async def test_a_lease_that_is_extended_is_never_taken_back(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue, seconds=0.4)
    until_then = time.monotonic() + 0.9
    while time.monotonic() < until_then:
        assert await lease.extend(0.4)
        assert await queue.lease(wait=0) is None
        await asyncio.sleep(0.05)
    assert await lease.complete()
    assert (await queue.stats()).totals.get("stalled", 0) == 0


async def test_progress_is_visible_to_other_clients(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue)
    assert await lease.extend(progress={"percent": 40})
    assert (await info_of(queue, "a")).progress == {"percent": 40}
    assert await lease.extend(progress="nearly")
    assert (await info_of(queue, "a")).progress == "nearly"
    with pytest.raises(PayloadRejected, match="progress of job 'a'"):
        await lease.extend(progress=object())


async def test_extend_reports_a_cancel_request(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue)
    assert await lease.extend()
    assert not lease.cancel_asked
    assert await queue.cancel("a") is CancelResult.ASKED
    assert await lease.extend()
    assert lease.cancel_asked
    assert await lease.fail("stopped")
    assert (await info_of(queue, "a")).state is State.CANCELLED


# Retry, fail, release


async def test_retry_is_due_at_once_without_a_delay(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    assert await (await leased(queue)).retry()
    lease = await leased(queue, wait=5)
    assert (lease.id, lease.attempt) == ("a", 2)
    assert (await info_of(queue, "a")).retries == 1
    before = datetime.now(UTC)
    assert await lease.retry(delay=60)
    info = await info_of(queue, "a")
    assert timedelta(seconds=50) < info.run_at - before < timedelta(seconds=70)
    assert info.error is not None
    assert info.error.message == "asked to run again"


async def test_a_retry_may_name_a_point_in_time(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    at = datetime.now(UTC) + timedelta(hours=1)
    assert await (await leased(queue)).retry(at=at, error="not before then")
    info = await info_of(queue, "a")
    assert info.run_at == at
    assert info.error is not None
    assert info.error.message == "not before then"


async def test_retry_refuses_two_times_and_naive_times(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    lease = await leased(queue)
    with pytest.raises(OptionError, match="delay and at are mutually exclusive"):
        await lease.retry(delay=1, at=datetime.now(UTC))
    with pytest.raises(OptionError, match="has no timezone"):
        await lease.retry(at=datetime(2027, 1, 1))
    assert not lease.settled
    assert await lease.complete()


async def test_a_failed_job_is_listed_with_its_cause(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    handle = await queue.enqueue(1, id="a")
    assert await (await leased(queue)).fail(ValueError("bad address"))
    with pytest.raises(JobFailed, match="ValueError: bad address") as raised:
        await handle.result()
    assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)
    assert [job.id async for job in queue.jobs("failed")] == ["a"]


async def test_a_released_job_keeps_its_place_and_is_not_counted(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b")
    lease = await leased(queue)
    assert await lease.release()
    info = await info_of(queue, "a")
    assert (info.state, info.retries, info.stalls) == (State.WAITING, 0, 0)
    assert (await leased(queue)).id == "a"


# Limits


async def test_a_pull_queue_has_no_limits(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    for _ in range(15):
        assert await (await leased(queue, wait=5)).retry()
    info = await info_of(queue, "a")
    assert (info.state, info.retries) == (State.WAITING, 15)


async def test_a_limit_of_two_retries_allows_two(app: Holdfast[Any]) -> None:
    queue = app.queue("q", max_retries=2)
    handle = await queue.enqueue(1, id="a")
    for _ in range(2):
        assert await (await leased(queue, wait=5)).retry(error="again")
        assert await handle.state() is State.WAITING
    assert await (await leased(queue, wait=5)).retry(error="once too often")
    with pytest.raises(JobFailed, match="once too often") as raised:
        await handle.result()
    assert (raised.value.kind, raised.value.attempts) == ("retriable", 3)


async def test_limit_of_a_job_overrides_the_limit_of_the_queue(app: Holdfast[Any]) -> None:
    queue = app.queue("q", max_retries=50)
    await queue.enqueue(1, id="a", max_retries=0)
    assert await (await leased(queue)).retry()
    assert (await info_of(queue, "a")).state is State.FAILED
    limitless = app.queue("other")
    await limitless.enqueue(1, id="a", max_retries=1)
    assert await (await leased(limitless)).retry()
    assert await (await leased(limitless, wait=5)).retry()
    assert (await info_of(limitless, "a")).state is State.FAILED


async def test_a_job_that_stalled_too_often_fails_instead_of_being_given_out(app: Holdfast[Any]) -> None:
    queue = app.queue("q", max_stalls=0)
    handle = await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b", delay=0.05)
    assert (await leased(queue, seconds=0.1)).id == "a"
    await until(lambda: _taken_back(queue, "a"))
    assert (await leased(queue, wait=5)).id == "b"
    with pytest.raises(JobFailed) as raised:
        await handle.result()
    assert raised.value.kind == "stall"


async def test_the_backoff_of_a_pull_queue_is_used_when_given(app: Holdfast[Any]) -> None:
    queue = app.queue("q", min_backoff=100, max_backoff=100)
    await queue.enqueue(1, id="a")
    before = datetime.now(UTC)
    assert await (await leased(queue)).retry()
    assert timedelta(seconds=90) < (await info_of(queue, "a")).run_at - before < timedelta(seconds=130)


async def test_the_ttls_of_a_pull_queue_are_used_when_given(app: Holdfast[Any]) -> None:
    queue = app.queue("q", result_ttl=0.05, failure_ttl=0.05)
    await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b")
    assert await (await leased(queue)).complete("result")
    assert await (await leased(queue)).fail()
    await until(lambda: _both_gone(queue))


async def _both_gone(queue: Queue) -> bool:
    return await queue.get("a") is None and await queue.get("b") is None


# Blocks


async def test_a_block_completes_its_job_at_its_end(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue({"n": 1}, id="a")
    async with queue.leased() as lease:
        assert lease is not None
        assert lease.payload == {"n": 1}
        assert (await info_of(queue, "a")).state is State.RUNNING
    assert (await info_of(queue, "a")).state is State.COMPLETED


async def test_a_block_without_a_job_gets_none(app: Holdfast[Any]) -> None:
    async with app.queue("q").leased(wait=0) as lease:
        assert lease is None


async def test_block_that_raises_retries_its_job_and_reraises(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a", max_retries=1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with queue.leased(wait=5):
                _ = 1 / 0
    info = await info_of(queue, "a")
    assert info.error is not None
    assert (info.state, info.retries, info.error.type) == (State.FAILED, 1, "ZeroDivisionError")


async def test_a_block_that_is_cancelled_releases_its_job(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    inside = asyncio.Event()

    async def work() -> None:
        async with queue.leased():
            inside.set()
            await asyncio.sleep(60)

    working = asyncio.create_task(work())
    await inside.wait()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    info = await info_of(queue, "a")
    assert (info.state, info.retries, info.stalls) == (State.WAITING, 0, 0)


async def test_block_does_not_settle_a_lease_settled_inside(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    await queue.enqueue(1, id="b")
    async with queue.leased() as lease:
        assert lease is not None
        assert await lease.complete("by hand")
    assert await queue.result("a") == "by hand"

    async def give_up() -> None:
        async with queue.leased() as lease:
            assert lease is not None
            assert await lease.fail("given up")
            raise ValueError("after")

    with pytest.raises(ValueError, match="after"):
        await give_up()
    info = await info_of(queue, "b")
    assert info.error is not None
    assert (info.state, info.error.message) == (State.FAILED, "given up")


async def test_a_block_is_extended_for_as_long_as_it_lasts(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    async with queue.leased(seconds=0.5) as lease:
        assert lease is not None
        first = lease.deadline
        assert await queue.lease(wait=1.1) is None
        assert lease.deadline > first + timedelta(seconds=0.5)
    info = await info_of(queue, "a")
    assert (info.state, info.stalls, info.attempts) == (State.COMPLETED, 0, 1)


async def test_a_block_that_is_not_extended_loses_its_lease(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    await queue.enqueue(1, id="a")
    async with queue.leased(seconds=0.2, extend=False) as lease:
        assert lease is not None
        second = await leased(queue, wait=10)
        assert second.id == "a"
    assert (await info_of(queue, "a")).state is State.RUNNING
    assert await second.complete("the other one")
    assert await queue.result("a") == "the other one"
