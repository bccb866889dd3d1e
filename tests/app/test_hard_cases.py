"""Handlers, hooks and callers that do what nobody thought of: each run still ends, and ends once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from holdfast import (
    Execution,
    Holdfast,
    JobError,
    JobFailed,
    OptionError,
    PermanentError,
    State,
    StorageUnavailable,
    current_job,
)
from holdfast._core.events import Event, Topic
from holdfast.testing import rehearse
from tests.app.conftest import Place, until
from tests.app.test_side_by_side import Faults, faulty_app
from tests.proxy import Proxy
from tests.servers import shared

App = Holdfast[Any]


# Hooks


@pytest.mark.parametrize(
    "error", [JobError(type="X", message="m", details={1: object()}), JobError(type="X", message="\ud800")]
)
async def test_hook_error_that_cannot_be_stored_is_reported_and_the_job_keeps_its_error(
    app: App, error: JobError
) -> None:
    told: list[str] = []

    @app.on_error
    def note(wrong: BaseException, where: str) -> None:
        told.append(where)

    @app.after_execution
    def spoil(execution: Execution) -> None:
        execution.error = error

    @app.task(name="t", max_retries=0)
    async def work() -> None:
        raise ValueError("its own")

    async with app.worker() as worker:
        with pytest.raises(JobFailed) as raised:
            await work.using(wait=10).call()
        await until(lambda: worker.running == 0)
    assert raised.value.error is not None
    assert (raised.value.error.type, raised.value.error.message) == ("ValueError", "its own")
    assert len(told) == 1
    assert "after_execution" in told[0]


async def test_ttl_set_by_a_hook_keeps_a_job_without_chosen_id_and_without_result(
    app: App,
) -> None:
    @app.after_execution
    def keep(execution: Execution) -> None:
        execution.ttl = 3600

    @app.task(name="t")
    async def work() -> None: ...

    handle = await work.enqueue()
    await app.worker(burst=True).run()
    assert await handle.state() is State.COMPLETED


async def test_middleware_waiting_after_a_sync_handler_raised_is_cancelled_at_timeout(app: App) -> None:
    ended: list[str] = []

    @app.middleware
    async def wait(job: object, proceed: Any) -> Any:
        try:
            return await proceed()
        except ValueError:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

    @app.task(name="t", timeout=0.3, cancel_grace=5, max_timeouts=0)
    def work() -> None:
        raise ValueError("no")

    async with app.worker() as worker:
        with pytest.raises(JobFailed) as raised:
            await work.using(wait=20).call()
        assert ended == ["cancelled"]
        await until(lambda: worker.running == 0)
    assert raised.value.error is not None
    assert raised.value.error.kind == "timeout"


# Stopping


@pytest.mark.storages("memory")
async def test_a_quick_stop_does_not_wait_for_a_heartbeat_that_hangs(place: Place, app: App) -> None:
    faults = Faults()
    shaky = faulty_app(place, faults)
    faults.before["announce", None] = faults.hangs

    @shaky.task(name="t")
    async def work() -> None: ...

    async with shaky:
        worker = shaky.worker(lease=60, name="w")
        async with worker:
            await until(lambda: faults.met["announce", "w"])
            began = time.monotonic()
            worker.stop(quick=True)
        assert time.monotonic() - began < 8
        assert faults.done["announce", "w"] == 0


async def test_run_that_raises_when_cancelled_by_shutdown_is_not_counted(app: App) -> None:
    begun = asyncio.Event()

    @app.task(name="t", max_retries=0)
    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            raise RuntimeError("the connection is closed") from error

    handle = await work.enqueue()
    async with asyncio.timeout(20), app.worker(grace=0):
        await begun.wait()
    job = await app.queue("t").get(handle.id)
    assert job is not None
    assert (job.state, job.retries, job.stalls, job.error) == (State.WAITING, 0, 0, None)


async def test_permanent_error_raised_during_shutdown_fails_the_job(app: App) -> None:
    begun = asyncio.Event()

    @app.task(name="t")
    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError as error:
            raise PermanentError("there is no such user") from error

    handle = await work.enqueue()
    async with asyncio.timeout(20), app.worker(grace=0):
        await begun.wait()
    assert await handle.state() is State.FAILED


# Beats


async def test_progress_refused_by_the_storage_does_not_lose_the_lease(place: Place) -> None:
    faults = Faults()
    shaky = faulty_app(place, faults, max_payload=100)
    over = asyncio.Event()

    @shaky.task(name="a")
    async def talkative() -> None:
        current_job().progress("x" * 200)
        await over.wait()

    @shaky.task(name="b")
    async def quiet() -> None:
        await over.wait()

    async with shaky:
        handle = await talkative.enqueue()
        await quiet.enqueue()
        async with shaky.worker(lease=1, grace=0):
            await until(lambda: min(faults.done["extend", "a"], faults.done["extend", "b"]) >= 2)
            job = await shaky.queue("a").get(handle.id)
            assert job is not None
            assert (job.progress, job.stalls) == (None, 0)
            over.set()


async def test_small_progress_is_stored_after_too_large_progress(place: Place) -> None:
    faults = Faults()
    shaky = faulty_app(place, faults, max_payload=100)
    refused = asyncio.Event()
    over = asyncio.Event()

    @shaky.task(name="t")
    async def work() -> None:
        current_job().progress("x" * 200)
        await refused.wait()
        current_job().progress("half")
        await over.wait()

    async with shaky:
        handle = await work.enqueue()
        async with shaky.worker(lease=1, grace=0):
            await until(lambda: faults.done["extend", "t"] >= 1)
            refused.set()

            async def heard() -> bool:
                job = await shaky.queue("t").get(handle.id)
                return job is not None and job.progress == "half"

            await until(heard)
            over.set()


# Pulling


async def test_job_claimed_for_a_cancelled_lease_call_is_given_back(place: Place, app: App) -> None:
    faults = Faults()
    async with faulty_app(place, faults) as shaky:
        handle = await shaky.queue("q").enqueue(1)
        faults.after["claim", "q"] = faults.hangs
        leasing = asyncio.create_task(shaky.queue("q").lease(seconds=600))
        await until(lambda: faults.met["claim", "q"])
        assert await handle.state() is State.RUNNING
        leasing.cancel()
        await asyncio.sleep(0)
        faults.heal()
        with pytest.raises(asyncio.CancelledError):
            await leasing
        lease = await shaky.queue("q").lease(wait=5)
        assert lease is not None
        assert (lease.id, await lease.complete()) == (handle.id, True)
        assert (await app.queue("q").stats()).totals.get("stalled", 0) == 0


async def test_lease_call_cancelled_while_the_storage_fails_raises_only_cancelled_error(place: Place, app: App) -> None:
    faults = Faults()

    async def fails_late() -> None:
        await faults.hangs()
        raise StorageUnavailable("down")

    async with faulty_app(place, faults) as shaky:
        faults.before["claim", "q"] = fails_late
        leasing = asyncio.create_task(shaky.queue("q").lease())
        await until(lambda: faults.met["claim", "q"])
        leasing.cancel()
        await asyncio.sleep(0)
        faults.heal()
        await asyncio.wait([leasing])
        assert leasing.cancelled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
async def test_block_left_by_program_exit_gives_its_job_back_uncounted(app: App, error: type[BaseException]) -> None:
    queue = app.queue("q", max_retries=0)
    handle = await queue.enqueue(1)
    with pytest.raises(error):
        async with queue.leased(wait=5):
            raise error
    job = await queue.get(handle.id)
    assert job is not None
    assert (job.state, job.retries, job.error) == (State.WAITING, 0, None)


def test_a_blocking_block_that_is_interrupted_gives_its_job_back_uncounted(place: Place) -> None:
    app = place.app()
    queue = app.queue("q", max_retries=0).sync
    try:
        handle = queue.enqueue(1)
        with pytest.raises(KeyboardInterrupt), queue.leased(wait=5):
            raise KeyboardInterrupt
        job = queue.get(handle.id)
        assert job is not None
        assert (job.state, job.retries, job.error) == (State.WAITING, 0, None)
    finally:
        app.sync.close()


# Events


@pytest.mark.storages("valkey")
async def test_events_contain_nothing_false_after_a_cut_connection(place: Place) -> None:
    server = shared("valkey")
    assert server is not None
    async with (
        Proxy(server.port) as proxy,
        Holdfast(proxy.url, namespace=place.namespace) as app,
    ):

        async def cut() -> None:
            proxy.cut_all()

        await watch_while(app, cut)


async def watch_while(app: App, happens: Callable[[], Awaitable[None]]) -> None:
    """Those who wait for work are told to look, by events that never were: they have no generation. Those who watch
    hear nothing of that."""
    queue = app.queue("q")
    handle = await queue.enqueue(1, id="mine", delay=600)
    heard: dict[str, list[Event]] = {"queue": [], "job": [], "waiter": []}

    async def watch(name: str, events: AsyncIterator[Event]) -> None:
        async for event in events:
            heard[name].append(event)

    async def wait() -> None:
        async with app.storage.subscribe(Topic("q", "wake")) as events:
            await watch("waiter", events)

    async def all_listen() -> bool:
        """Those who hear of a job listen."""
        await queue.enqueue(1)
        await queue.enqueue(1, id="mine", on_conflict="update", delay=600)
        return all(heard.values())

    watching = [
        asyncio.create_task(watch("queue", queue.events())),
        asyncio.create_task(watch("job", handle.events())),
        asyncio.create_task(wait()),
    ]
    try:
        await until(all_listen)
        heard["waiter"].clear()
        await happens()
        await until(lambda: any(event.generation == 0 for event in heard["waiter"]))
        for events in heard.values():
            events[:] = [event for event in events if event.generation == 0]
        invented = heard["queue"] + heard["job"]
        heard["queue"].clear()
        heard["job"].clear()
        await until(all_listen)  # What came before has been heard by now.
        invented += [event for event in heard["queue"] + heard["job"] if event.generation == 0]
        assert invented == []
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


# Options


@pytest.mark.parametrize(
    ("options", "least_ms", "most_ms"),
    [
        ({"max_backoff": 1}, 1_000, 1_000),
        ({"min_backoff": 7_200}, 7_200_000, 7_200_000),
        ({"min_backoff": 1, "max_backoff": 5}, 1_000, 5_000),
    ],
)
def test_default_backoff_bound_adapts_to_the_given_bound(options: dict[str, Any], least_ms: int, most_ms: int) -> None:
    app = Holdfast("memory://")
    app.task(name="t", **options)(nothing)
    (handler,) = app._served("t")
    assert (handler.config.policy.min_backoff_ms, handler.config.policy.max_backoff_ms) == (least_ms, most_ms)


def nothing() -> None: ...


def test_backoff_of_a_queue_is_at_most_its_maximum() -> None:
    policy = Holdfast("memory://").queue("q", min_backoff=7_200)._config.policy
    assert (policy.min_backoff_ms, policy.max_backoff_ms) == (7_200_000, 7_200_000)


def test_max_backoff_below_min_backoff_is_refused_for_tasks_and_queues() -> None:
    app = Holdfast("memory://")
    with pytest.raises(OptionError, match="less than min_backoff"):
        app.task(name="t", min_backoff=10, max_backoff=5)(nothing)
    with pytest.raises(OptionError, match="less than min_backoff"):
        app.queue("q", min_backoff=10, max_backoff=5)


def test_option_of_none_means_the_default() -> None:
    app = Holdfast("memory://")

    @app.task(name="t", priority=7)
    def work() -> None: ...

    none = work.using(
        priority=None,  # type: ignore[arg-type]
        max_retries=None,  # type: ignore[arg-type]
        delay=None,  # type: ignore[arg-type]
    )
    assert none.bind().request.work == work.bind().request.work
    assert app.queue("q").bind(1, priority=None).request.work == app.queue("q").bind(1).request.work  # type: ignore[arg-type]


def test_job_of_an_at_most_once_task_cannot_ask_for_retries() -> None:
    app = Holdfast("memory://")

    @app.task(name="t", delivery="at_most_once")
    def work() -> None: ...

    with pytest.raises(OptionError, match="at most once"):
        work.using(max_retries=5).bind()
    assert work.using(max_retries=0).bind().request.work.max_retries == 0


@pytest.mark.storages("memory")
async def test_a_worker_refuses_to_start_with_a_parameter_whose_name_cannot_be_read(app: App) -> None:
    @app.task(name="t")
    async def work(number: int, __hidden: int = 1) -> None: ...

    with pytest.raises(OptionError, match="parameter"):
        async with app.worker():
            pass


# Rehearsals


async def test_nested_rehearsal_is_refused_and_the_outer_continues(app: App) -> None:
    ran: list[int] = []

    @app.task(name="t")
    async def work(number: int) -> None:
        ran.append(number)

    await work.enqueue(0)
    with rehearse(app) as jobs:
        with pytest.raises(OptionError, match="rehearsal"), rehearse(app):
            pass
        await work.enqueue(1)
        await jobs.drain()
    assert ran == [1]
    assert (await app.queue("t").stats()).ready == 1


# Room


@pytest.mark.storages("memory")
async def test_endless_run_and_job_of_full_size_do_not_stop_the_worker(app: App) -> None:
    over = threading.Event()

    @app.task(name="stuck", timeout=0.1, cancel_grace=0.1, max_timeouts=0)
    def stuck() -> None:
        over.wait()

    @app.task(name="big", size=1000)
    async def big() -> None: ...

    @app.task(name="quick")
    async def quick(number: int) -> int:
        return number

    try:
        async with app.worker(grace=0.1):
            with pytest.raises(JobFailed):
                await stuck.using(wait=10).call()
            waiting = await big.enqueue()
            assert [await quick.using(wait=10).call(n) for n in range(300)] == list(range(300))
            assert await waiting.state() is State.WAITING
            over.set()
            await waiting.result(wait=10)
    finally:
        over.set()
