"""A user's mistakes. Each line with the mark, and no other, must be an error to the type checkers. It is never run."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from holdfast import CurrentJob, Failure, Holdfast, Retry, RunEvent, Update, current_job
from holdfast.testing import rehearse


@dataclass
class Report:
    user_id: int


@dataclass
class Resources:
    greeting: str


@asynccontextmanager
async def resources() -> AsyncGenerator[Resources]:
    yield Resources("hello")


app = Holdfast("memory://", lifespan=resources)
queue = app.queue("emails")


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task(timeout=30)
async def make_report(user_id: int, *, region: str = "eu") -> Report:
    return Report(user_id)


@app.task
def shout(text: str) -> str:
    return text.upper()


async def arguments() -> None:
    await add.enqueue("1")  # error
    await add.enqueue()  # error
    await add.enqueue(1, 2, 3)  # error
    await add.enqueue(1, c=3)  # error
    await add.enqueue(1, a=1)  # error
    await add.call(None)  # error
    await make_report.enqueue(1, "us")  # error
    await make_report.call(1, region=5)  # error
    await make_report.using(wait=5).call(user="ada")  # error
    await make_report("ada")  # error
    shout(1)  # error
    add.bind("1")  # error
    add.bind()  # error
    add.using(priority=1).bind(1, c=1)  # error
    add.sync.call("1")  # error
    add.sync.enqueue(1, 2, 3)  # error
    await app.enqueue_many([add.bind(1), 2])  # error
    await app.enqueue_many(add.bind(1))  # error


async def many_ids() -> None:
    await queue.cancel_many([1])  # error
    await queue.keep_many(["a"])  # error
    want_text(await queue.get_many(["a"]))  # error


@app.around  # error
def no_context(job: CurrentJob) -> None: ...


def hooks_of_types() -> None:
    app.codec_hooks(Report, encode=lambda report: report.user)  # error
    app.codec_hooks(encode=str)  # error


async def names_of_other_queues() -> None:
    add.delay(1)  # error
    add.using(wait=5).send(1)  # error
    add.sync.apply_async(1)  # error
    app.periodic_task(60)  # error
    queue.put({"to": "ada"})  # error
    (await queue.enqueue(1)).get()  # error


def want_int(value: int) -> None: ...
def want_text(value: str) -> None: ...
def want_report(value: Report) -> None: ...


async def results() -> None:
    want_text(await add.call(1))  # error
    want_int(await make_report.call(1))  # error
    want_text(await make_report.using(wait=5).call(1))  # error
    handle = await make_report.enqueue(1)
    want_int(await handle.result())  # error
    want_report(handle.result())  # error
    want_text((await handle.result()).user_id)  # error
    print((await handle.result()).nothing)  # error
    want_text(add.sync.call(1))  # error
    want_int(await add.sync.call(1))  # error
    want_int(add.sync.enqueue(1))  # error
    want_int(add.sync.enqueue(1).result)  # error
    want_int(shout("a"))  # error
    want_int(add(1))  # error
    add.enqueue(1)  # error
    want_report(await queue.result("a", type=int))  # error
    want_report(queue.sync.result("a", type=int))  # error
    want_text((await app.enqueue_many([add.bind(1)]))[0])  # error
    if handle.placed == 3:  # error
        pass
    for _ in queue.jobs():  # error
        pass


async def leases() -> None:
    lease = await queue.lease()
    await lease.complete()  # error
    if lease is not None:
        await lease.complete(1, 2)  # error
        await lease.retry(5)  # error
        await lease.retry(delay="5")  # error
        await lease.fail(5)  # error
        want_text(lease.fence)  # error
        lease.release()  # error
    async with queue.leased() as held:
        print(held.id)  # error
    job = await queue.get("a")
    print(job.state)  # error


async def options() -> None:
    await add.using(on_conflict="replace").enqueue(1)  # error
    await add.using(on_conflict=Update(run_at="later")).enqueue(1)  # error
    await add.using(delay="5").enqueue(1)  # error
    await add.using(backoff="5").enqueue(1)  # error
    current_job().extend_timeout("5")  # error
    await add.using(expires="5").enqueue(1)  # error
    await add.using(headers={"trace": 1}).enqueue(1)  # error
    await add.using(remember_failures=True).enqueue(1)  # error
    await add.using(backoff=lambda retry, error: 5).enqueue(1)  # error
    await add.using(run_at=5).enqueue(1)  # error
    await add.using(run_at="2027-01-01").enqueue(1)  # error
    await add.using(priority="high").enqueue(1)  # error
    await add.using(retries=3).enqueue(1)  # error
    await add.using(5).enqueue(1)  # error
    await add.using(id=5).enqueue(1)  # error
    await add.using(wait="5").call(1)  # error
    await add.enqueue(1, delay=5)  # error
    add.sync.using(dealy=5)  # error
    queue.sync.enqueue({}, wait=5)  # error
    queue.sync.pause("by hand")  # error
    queue.sync.lease(30)  # error
    queue.sync.jobs(5)  # error
    handle = await add.enqueue(1)
    await handle.result(5)  # error
    await handle.result(wait="5")  # error
    await queue.enqueue({}, wait=5)  # error
    await queue.enqueue({}, unique="a")  # error
    await queue.enqueue({}, timeout="5")  # error
    await queue.enqueue()  # error
    await queue.lease(30)  # error
    await queue.lease(seconds="30")  # error
    await queue.keep("a")  # error
    await queue.purge(5)  # error
    app.queue(5)  # error
    app.queue("emails", timeout=5)  # error
    app.worker(concurrency="2")  # error
    app.worker(leases=5)  # error
    Holdfast(5)  # error
    Holdfast("memory://", name_space="a")  # error
    Holdfast("memory://", lifespan=resources())  # error
    Retry(delay="5")  # error
    Retry(at=5)  # error


@app.task(timeout="30")  # error
def timeout_as_text() -> None: ...


@app.task(max_retry=3)  # error
def unknown_option() -> None: ...


@app.task(delivery="exactly_once")  # error
def wrong_choice() -> None: ...


@app.task(unique=5)  # error
def wrong_template() -> None: ...


@app.task("name")  # error
def positional_option() -> None: ...


@app.task(delay=5)  # error
def a_requests_option() -> None: ...


@app.stub()  # error
def nameless(doc: str) -> bytes:
    raise NotImplementedError


@app.stub(name="elsewhere", timeout=5)  # error
def too_much(doc: str) -> bytes:
    raise NotImplementedError


@add.on_failure  # error
def takes_an_int(failure: int) -> None: ...


@add.on_failure  # error
async def takes_two(failure: Failure, more: int) -> None: ...


@add.on_failure(singleton="a")  # error
async def too_special(failure: Failure) -> None: ...


@add.on_failure(max_retries=3)
async def looks_inside(failure: Failure) -> None:
    print(failure.reason)  # error
    failure.error.kind = "permanent"  # error
    if failure.error.kind == "fatal":  # error
        pass


@app.middleware  # error
async def takes_only_a_job(job: CurrentJob) -> None: ...


@app.on_event  # error
def takes_text(event: str) -> None: ...


@app.on_error  # error
def takes_no_place(error: BaseException) -> None: ...


@app.on_event
def looks_at_it(event: RunEvent) -> None:
    print(event.name)  # error


@app.task
async def uses_resources() -> None:
    print(app.resources.farewell)  # error
    want_int(app.resources.greeting)  # error


async def worker() -> None:
    with app.worker():  # error
        pass
    with app:  # error
        pass
    with rehearse(add):  # error
        pass
    with rehearse(app) as jobs:
        jobs.advance(days=1)  # error
        jobs.sync.advance(days="1")  # error
        jobs.assert_enqueued(app)  # error
        await jobs.advance(days="1")  # error
        want_text(datetime.now(UTC) - jobs.now)  # error
