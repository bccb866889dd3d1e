"""A user's module: every way to use Holdfast that has a type. It must please the type checkers, and it runs."""

from __future__ import annotations

import asyncio
import unittest
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, assert_type

from holdfast import (
    BoundRequest,
    CancelResult,
    CurrentJob,
    DuplicateJob,
    Event,
    EventKind,
    Execution,
    Failure,
    Handle,
    Holdfast,
    JobError,
    JobFailed,
    JobInfo,
    KeepResult,
    Lease,
    PermanentError,
    Placed,
    Queue,
    Retry,
    RunEvent,
    State,
    Stats,
    Task,
    Update,
    Worker,
    content_id,
    current_job,
)
from holdfast._client.sync import SyncHandle, SyncLease
from holdfast.storage import Storage, connect
from holdfast.testing import EagerRehearsal, Rehearsal, RehearsalMixin, RehearsedRequest, SyncRehearsal, eager, rehearse


@dataclass
class Report:
    user_id: int
    region: str
    made_at: datetime | None = None


@dataclass
class Resources:
    greeting: str


@asynccontextmanager
async def resources() -> AsyncGenerator[Resources]:
    yield Resources("hello")


plain = Holdfast("memory://")
assert_type(plain, Holdfast[None])
app = Holdfast("memory://typing", lifespan=resources, namespace="typing", codec="json", max_payload=100_000)
assert_type(app, Holdfast[Resources])
seen: list[str] = []


# Tasks: bare and configured, async and not


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task
def shout(text: str, *, times: int = 1) -> str:
    return text.upper() * times


@app.task(
    name="reports.make",
    timeout=timedelta(seconds=30),
    max_retries=5,
    max_stalls=2,
    max_timeouts=0,
    retry_on=(OSError, ValueError),
    no_retry_on=KeyError,
    expires=timedelta(hours=1),
    remember_failures=True,
    backoff=[1, 10.5, timedelta(minutes=1)],
    min_backoff=0.01,
    max_backoff=1,
    size=10,
    concurrency=4,
    priority=6,
    queue_priority=50,
    singleton="report:{user_id}",
    result_ttl=3600,
    dedup_ttl=timedelta(minutes=1),
    failure_ttl=86_400,
    cancel_grace=0.5,
    delivery="at_least_once",
    on_storage_loss="hold",
    codec="json",
)
async def make_report(user_id: int, *, region: str = "eu") -> Report:
    return Report(user_id, region)


@app.task(unique=content_id, delivery="at_most_once", on_storage_loss="kill", codec="msgpack")
def digest(texts: list[str]) -> dict[str, int]:
    return {text: len(text) for text in texts}


def id_of_code(code: int) -> str:
    return f"code-{code}"


@app.task(unique=id_of_code, max_retries=0, backoff=lambda retry, error: 5 * retry if str(error) else None)
async def explode(code: int) -> None:
    if code == 0:
        raise Retry(delay=1)
    if code == 1:
        raise Retry("not yet", at=datetime.now(UTC) + timedelta(hours=1))
    raise PermanentError(f"code {code}")


@app.task()
async def greet(name: str) -> str:
    assert_type(app.resources, Resources)
    job = current_job()
    assert_type(job, CurrentJob)
    job.progress({"half": "done"})
    assert_type((job.id, job.attempt, job.fence), tuple[str, int, int])
    if job.stopping == "cancel":
        return ""
    return f"{app.resources.greeting}, {name}"


@app.task
def echo(payload: bytes, /) -> bytes:
    return payload


@app.stub(name="elsewhere.render", priority=3, unique="{doc}", delivery="at_least_once", codec="json")
def render(doc: str, *, pages: int | None = None) -> bytes:
    raise NotImplementedError


coroutine: Callable[[int], Coroutine[Any, Any, int]] = add
assert_type(shout("a"), str)
assert_type(add.name, str)


# What to do with failures


@explode.on_failure
async def tell(failure: Failure) -> None:
    assert_type(failure.error, JobError)
    assert_type(failure.job.id, str)
    assert_type(failure.job.attempts, int)
    seen.append(f"{failure.payload.code} {failure.error.kind}")


@make_report.on_failure(max_retries=3, timeout=5, min_backoff=1, max_backoff=timedelta(minutes=1))
def tell_too(failure: Failure) -> None:
    seen.append(failure.error.message)


def tell_directly(failure: Failure) -> None:
    tell_too(failure)
    function: Callable[[Failure], None] = tell_too
    function(failure)


# Hooks


@app.middleware
async def logged(job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
    seen.append(f"{job.queue} began")
    return await proceed()


@app.after_execution
async def after(execution: Execution) -> None:
    if execution.error is None:
        execution.ttl = 60


@app.after_execution
def after_too(execution: Execution) -> None:
    assert_type(execution.error, JobError | None)
    assert_type(execution.seconds, float)


@app.on_event
def event_seen(event: RunEvent) -> None:
    assert_type(event.kind, EventKind)
    assert_type(event.error, JobError | None)


@app.on_event
async def event_seen_too(event: RunEvent) -> None:
    seen.append(f"{event.queue} {event.kind}")


@app.on_error
def trouble(error: BaseException, where: str) -> None:
    seen.append(where)


@app.on_error
async def trouble_too(error: BaseException, where: str) -> None:
    seen.append(where)


# Asking


async def ask() -> None:
    handle = await add.enqueue(1, b=2)
    assert_type(handle, Handle[int])
    assert_type(handle.placed, Placed | None)
    assert_type(handle.generation, int)
    assert_type(await handle.result(), int)
    assert_type(await handle.result(wait=None), int)
    assert_type(await handle.result(wait=timedelta(seconds=5)), int)
    assert_type(await handle.state(), State | None)
    assert_type(await handle.info(), JobInfo | None)
    assert_type(await handle.cancel(), CancelResult)

    assert_type(await add(1), int)
    assert_type(await add.call(1), int)
    assert_type(await add.using(wait=5).call(1, 2), int)
    assert_type(await add.using(wait=None).using(priority=9).call(a=1, b=2), int)
    assert_type(await shout.call("a", times=2), str)
    assert_type(await make_report.call(42, region="us"), Report)
    assert_type(await digest.call(["a"]), dict[str, int])
    assert_type(await greet.call("ada"), str)
    assert_type(await echo.call(b"\x00"), bytes)

    await make_report.using(
        id="mine",
        on_conflict="keep",
        delay=0.01,
        priority=0,
        result_ttl=60,
        dedup_ttl=timedelta(hours=1),
        timeout=3,
        max_retries=1,
        max_stalls=1,
        max_timeouts=1,
        backoff=(1, 10),
        expires=datetime.now(UTC) + timedelta(hours=1),
        headers={"trace": "1"},
        wait=0,
    ).enqueue(1)
    later = await make_report.using(
        id=b"bytes", run_at=datetime.now(UTC) + timedelta(hours=1), on_conflict="update"
    ).enqueue(1)
    assert_type(later, Handle[Report])
    await make_report.using(on_conflict=Update(payload=True, run_at="if_later", reset_counts=False)).enqueue(1)
    try:
        await make_report.using(id=b"bytes", on_conflict="raise").enqueue(1)
    except DuplicateJob:
        seen.append("duplicate")
    try:
        await explode.call(2)
    except JobFailed as failed:
        assert_type(failed.error, JobError)
        assert_type(failed.attempts, int)


async def ask_for_many() -> None:
    bound = add.bind(1, b=2)
    assert_type(bound, BoundRequest[int])
    assert_type(bound.id, str)
    handles = await app.enqueue_many(add.bind(i) for i in range(3))
    assert_type(handles, list[Handle[int]])
    for handle in await app.enqueue_many([add.using(priority=1).bind(1), add.bind(2)]):
        assert_type(await handle.result(), int)
    mixed: list[BoundRequest[Any]] = [add.bind(1), shout.bind("a"), app.queue("any").bind({"a": 1})]
    assert_type(await app.enqueue_many(mixed), list[Handle[Any]])


async def ask_for_different_ones() -> None:
    await app.enqueue_many([add.bind(1), shout.bind("a")])


def ask_in(transaction: object) -> None:
    assert_type(app.enqueue_in(transaction, add.bind(1), add.bind(2)), list[Handle[int]])


def either(task: Task[[int], int, Any]) -> None:
    assert_type(task.bind(1), BoundRequest[int])


async def ask_elsewhere() -> None:
    handle = await render.using(delay=3600).enqueue("doc", pages=3)
    assert_type(handle, Handle[bytes])
    assert_type(await handle.cancel(), CancelResult)


# Blocking


def block() -> None:
    assert_type(add.sync.call(1, b=2), int)
    handle = add.sync.enqueue(1)
    assert_type(handle, SyncHandle[int])
    assert_type(handle.result(wait=5), int)
    assert_type(handle.state(), State | None)
    assert_type(handle.cancel(), CancelResult)
    assert_type(shout.sync.using(wait=5).call("a"), str)
    assert_type(make_report.using(priority=9).sync.call(7), Report)
    assert_type(add.sync.bind(1), BoundRequest[int])
    assert_type(app.sync.enqueue_many([add.bind(1)]), list[SyncHandle[int]])
    queue = app.sync.queue("blocking")
    assert_type(queue.enqueue({"to": "ada"}, id="welcome", priority=3), SyncHandle[Any])
    assert_type(queue.get("welcome"), JobInfo | None)
    lease = queue.lease(seconds=5, wait=5)
    assert_type(lease, SyncLease | None)
    if lease is not None:
        assert_type(lease.deadline, datetime)
        assert_type(lease.complete({"user_id": 1, "region": "eu"}), bool)
    assert_type(queue.result("welcome", type=Report), Report)
    with queue.leased(wait=0) as none:
        assert_type(none, SyncLease | None)
    for job in queue.jobs(State.COMPLETED):
        assert_type(job, JobInfo)
    assert_type(queue.stats(), Stats)
    app.sync.close()


# A queue by its name


async def pull() -> None:
    queue = app.queue("emails", max_retries=3, max_stalls=2, min_backoff=0, max_backoff=60, failure_ttl=60)
    assert_type(queue, Queue)
    handle = await queue.enqueue({"to": "ada"}, id="welcome", on_conflict="keep", delay=0, priority=5)
    assert_type(handle, Handle[Any])
    lease = await queue.lease(seconds=30, wait=5)
    assert_type(lease, Lease | None)
    if lease is None:
        return
    assert_type((lease.queue, lease.id, lease.attempt, lease.fence), tuple[str, str, int, int])
    assert_type(lease.deadline, datetime)
    assert_type(await lease.extend(timedelta(seconds=10), progress={"n": 1}), bool)
    if await lease.complete(Report(1, "eu")):
        seen.append("complete")
    assert_type(await queue.result("welcome", type=Report), Report)
    assert_type(await queue.result("welcome", type=Report, wait=5), Report)
    assert_type(await queue.result("welcome"), Any)
    job = await queue.get("welcome")
    assert_type(job, JobInfo | None)
    if job is not None:
        assert_type(job.run_at, datetime)
        assert_type(job.error, JobError | None)
        assert_type(job.state, State)
    assert_type(await queue.keep("welcome", ttl=timedelta(days=1)), KeepResult)
    assert_type(await queue.cancel(b"welcome"), CancelResult)
    await queue.enqueue(b"raw")
    async with queue.leased(seconds=10, wait=timedelta(seconds=1), extend=False) as held:
        assert_type(held, Lease | None)
        if held is not None:
            assert_type(await held.retry(delay=3600, error=ValueError("x")), bool)


async def read_as() -> None:
    queue = app.queue("emails")
    assert_type(await queue.result("a", type=list[Report]), list[Report])
    maybe: Report | None = await queue.result("a", type=Report | None, wait=0)
    also: Report | None = queue.sync.result("a", type=Report | None)
    print(maybe, also)


async def look_after() -> None:
    queue = app.queue("emails")
    assert_type((await queue.stats()).oldest_ready_seconds, float)
    async for job in queue.jobs("waiting"):
        assert_type(job, JobInfo)
    await queue.pause(reason="a look")
    await queue.resume()
    assert_type((await queue.sweep()).stalled, list[str])
    assert (await queue.repair(dry_run=True)).problems == []
    assert_type(await queue.purge([State.WAITING, "failed"]), int)
    assert_type(await queue.purge(), int)
    assert_type(await queue.get_many(["a", b"b"]), list[JobInfo | None])
    assert_type(await queue.cancel_many(["a"]), list[CancelResult])
    assert_type(await queue.keep_many(["a"], 60), list[KeepResult])
    assert_type(await queue.retry_many(["a"]), list[Handle[Any] | None])
    assert_type(await queue.delete(wait=5), bool)
    assert_type([each.queue for each in (await app.stats()).queues], list[str])
    assert_type(await app.evict("nobody"), bool)


async def listen(handle: Handle[int]) -> None:
    async for event in handle.events():
        assert_type(event, Event)
        break
    async for event in app.queue("emails").events():
        assert_type(event.kind, EventKind)
        break


class Money:
    def __init__(self, cents: int) -> None:
        self.cents = cents


def add_hooks_of_types() -> None:
    other = Holdfast("memory://")

    @other.around
    @contextmanager
    def session(job: CurrentJob) -> Generator[None]:
        yield

    @other.around
    @asynccontextmanager
    async def scope(job: CurrentJob) -> AsyncGenerator[None]:
        yield

    other.codec_hooks(Path, encode=str, decode=Path)
    other.codec_hooks(Money, encode=lambda money: money.cents, decode=Money)


# Workers, storages, rehearsals


async def main() -> None:
    add_hooks_of_types()
    async with app:
        worker = app.worker(["*"], concurrency=10, name="one", lease=timedelta(seconds=5), grace=1)
        assert_type(worker, Worker)
        async with worker:
            assert_type(worker.queues, list[str])
            assert_type(worker.running, int)
            await ask()
            await ask_for_many()
            await ask_for_different_ones()
            await ask_elsewhere()
            await asyncio.to_thread(block)
            await pull()
            await look_after()


async def serve() -> None:
    worker = app.worker("reports.*", burst=True)
    await worker.run()
    worker.stop(quick=True)


def on_a_storage() -> Holdfast[None]:
    storage: Storage = connect("memory://")
    return Holdfast(storage=storage)


async def practise() -> None:
    with rehearse(app, now=datetime(2027, 1, 1, tzinfo=UTC)) as jobs:
        assert_type(jobs, Rehearsal)
        assert_type(jobs.now, datetime)
        await add.using(delay=86_400).enqueue(1)
        assert_type(await jobs.drain(), list[RunEvent])
        assert_type(await jobs.advance(days=1), list[RunEvent])
        assert_type(jobs.ran(add), list[RunEvent])
        assert jobs.ran("reports.make") == []
        jobs.assert_enqueued(add, a=1)
        jobs.assert_not_enqueued(add.using(priority=3), b=2)
        assert_type(jobs.enqueued(add), list[RehearsedRequest])


def practise_without_a_loop() -> None:
    with rehearse(app) as jobs:
        assert_type(jobs.sync, SyncRehearsal)
        assert_type(jobs.sync.drain(max_runs=3), list[RunEvent])
        assert_type(jobs.sync.advance(days=1), list[RunEvent])


def practise_in_place() -> None:
    with eager(app, raises=False) as jobs:
        assert_type(jobs, EagerRehearsal)
        assert_type(add.sync.call(1, 2), int)
        assert_type(jobs.sync.drain(), list[RunEvent])


class AddTest(RehearsalMixin, unittest.TestCase):
    app = app

    def test_add(self) -> None:
        assert_type(self.jobs, Rehearsal)
