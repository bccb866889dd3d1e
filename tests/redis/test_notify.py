"""What a server tells unasked: answers for those who wait, events, and the wake token of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from holdfast._client import waiters
from holdfast._client.waiters import wait
from holdfast._core.events import Event, EventKind, Topic
from holdfast._core.jobs import Outcome, Request, State, Update, Work
from holdfast.errors import JobCancelled
from holdfast.storage import connect
from holdfast.storage.redis import notify
from tests.proxy import Proxy
from tests.redis.conftest import key, namespace_of, opened, until, words_of
from tests.servers import Server
from tests.storage.stage import Stage, heard

LARGE = bytes(5000)
"""More than a notice carries."""


@pytest.fixture
async def other(server: Server, stage: Stage) -> AsyncIterator[Stage]:
    """The same queue, past the proxy: whoever does the work."""
    async with opened(server.url, like=stage) as other:
        yield other


@pytest.fixture
def only_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the record without a hint: what was not told is not learnt in time."""
    monkeypatch.setattr(waiters, "POLL_INTERVAL_S", 60.0)


@pytest.fixture
def patient_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for the token stand in one line, in which nobody steps back to the end by himself."""
    monkeypatch.setattr(notify, "BLOCK_S", 30.0)


def looks(proxy: Proxy) -> int:
    """How often a record was read through the proxy."""
    return sum(words_of(exchange)[:1] == [b"get"] and exchange.reply != b"" for exchange in proxy.log)


async def waiting(proxy: Proxy, stage: Stage, id: str = "a", generation: int = 0) -> asyncio.Task[Outcome]:
    """A waiter that listens, has looked, and found that the job has not ended."""
    generation = generation or (await stage.the(id)).generation
    before = looks(proxy)
    task = asyncio.create_task(wait(stage.storage, "q", id, generation, wait_s=20))
    await until(lambda: looks(proxy) > before)
    return task


async def answer_of(task: asyncio.Task[Outcome]) -> Outcome:
    async with asyncio.timeout(5):
        return await task


# Databases


async def test_databases_of_a_server_do_not_share_events(server: Server, clone: Stage) -> None:
    async with opened(f"{server.url}/1", like=clone) as one, opened(f"{server.url}/1", like=clone) as same:
        async with one.storage.subscribe(Topic("q")) as events, clone.storage.subscribe(Topic("q")) as others:
            await clone.enqueue("zero")
            await same.enqueue("one")
            assert await heard(events, 1) == [(EventKind.ENQUEUED, "one")]
            assert await heard(others, 1) == [(EventKind.ENQUEUED, "zero")]
        assert await one.storage.drop("q") == 0


@pytest.mark.usefixtures("only_notices")
async def test_notification_answers_a_waiter_in_another_database(proxy: Proxy, server: Server) -> None:
    async with opened(f"{proxy.url}/1") as stage, opened(f"{server.url}/1", like=stage) as other:
        await stage.enqueue("a", keep=60)
        task = await waiting(proxy, stage)
        await other.complete(await other.claim_one(), b"result")
        assert (await answer_of(task)).result == b"result"


# Answers


@pytest.mark.usefixtures("only_notices")
async def test_notification_alone_answers_a_waiter(proxy: Proxy, stage: Stage, other: Stage) -> None:
    await other.enqueue("a")
    waiter = await waiting(proxy, stage)
    job, before = await other.claim_one(), looks(proxy)
    await other.complete(job, b"result")
    outcome = await answer_of(waiter)
    assert looks(proxy) == before
    assert (outcome.state, outcome.result) == (State.COMPLETED, b"result")
    assert outcome == (await other.the("a")).outcome


@pytest.mark.usefixtures("only_notices")
async def test_notification_answers_waiters_of_failed_and_cancelled_jobs(
    proxy: Proxy, stage: Stage, other: Stage
) -> None:
    await other.enqueue("a")
    await other.enqueue("b")
    failing, cancelling = await waiting(proxy, stage, "a"), await waiting(proxy, stage, "b")
    before = looks(proxy)
    await other.fail(await other.claim_one(), b"why")
    assert (await answer_of(failing)).error == b"why"
    await other.cancel("b")
    with pytest.raises(JobCancelled):
        await answer_of(cancelling)
    assert looks(proxy) == before


@pytest.mark.usefixtures("only_notices")
async def test_a_waiter_is_not_answered_with_another_generation(proxy: Proxy, stage: Stage, other: Stage) -> None:
    await other.enqueue("a", b"1")
    job = await other.claim_one()
    following = await other.enqueue("a", b"2", update=Update())
    first, second = await waiting(proxy, stage), await waiting(proxy, stage, "a", following.generation)
    await other.complete(job, b"of the first")
    assert (await answer_of(first)).result == b"of the first"
    assert not second.done()
    await other.complete(await other.claim_one(), b"of the second")
    outcome = await answer_of(second)
    assert (outcome.generation, outcome.result) == (following.generation, b"of the second")


@pytest.mark.usefixtures("only_notices")
async def test_large_result_is_fetched_after_the_notification(proxy: Proxy, stage: Stage, other: Stage) -> None:
    await other.enqueue("a")
    waiter = await waiting(proxy, stage)
    job, before = await other.claim_one(), looks(proxy)
    await other.complete(job, LARGE)
    assert (await answer_of(waiter)).result == LARGE
    assert looks(proxy) == before + 1


@pytest.mark.usefixtures("only_notices")
@pytest.mark.parametrize("result", [b"small", LARGE], ids=["small", "large"])
@pytest.mark.parametrize("clients", [4, 5, 7])
async def test_all_waiting_clients_get_the_result(
    proxy: Proxy, server: Server, other: Stage, clients: int, result: bytes
) -> None:
    await other.enqueue("a")
    async with AsyncExitStack() as stages:
        tasks = [
            await waiting(proxy, await stages.enter_async_context(opened(proxy.url, like=other)))
            for _ in range(clients)
        ]
        await other.complete(await other.claim_one(), result)
        assert [(await answer_of(task)).result for task in tasks] == [result] * clients


@pytest.mark.usefixtures("only_notices")
async def test_waiter_that_leaves_does_not_stop_notifications_of_another(
    proxy: Proxy, stage: Stage, other: Stage
) -> None:
    await other.enqueue("a")
    async with opened(proxy.url, like=stage) as third:
        waiters = [await waiting(proxy, each) for each in (stage, stage, third, third)]
        for leaving in (waiters[0], waiters[2]):
            leaving.cancel()
        await asyncio.wait([waiters[0], waiters[2]])
        await other.complete(await other.claim_one(), b"result")
        assert [(await answer_of(waiter)).result for waiter in (waiters[1], waiters[3])] == [b"result"] * 2


@pytest.mark.usefixtures("only_notices")
async def test_storage_that_stops_waiting_does_not_stop_notifications_of_another(
    proxy: Proxy, stage: Stage, other: Stage
) -> None:
    await other.enqueue("a")
    waiter = await waiting(proxy, stage)
    async with opened(proxy.url, like=stage) as third:
        leaving = await waiting(proxy, third)
        leaving.cancel()
        await asyncio.wait([leaving])
    await other.complete(await other.claim_one(), b"result")
    assert (await answer_of(waiter)).result == b"result"


# A listener that is cut off


async def test_waiter_is_answered_though_its_subscription_was_cut(proxy: Proxy, stage: Stage, other: Stage) -> None:
    for id in "abc":
        await other.enqueue(id)
        waiter = await waiting(proxy, stage, id)
        proxy.cut_all()
        await other.complete(await other.claim_one(), id.encode())
        assert (await answer_of(waiter)).result == id.encode()


async def heard_of(events: AsyncIterator[Event], id: str) -> Event:
    while (event := await anext(events)).id != id:
        pass
    return event


async def test_cut_subscription_reconnects_and_asks_for_a_reread(
    proxy: Proxy, server: Server, stage: Stage, other: Stage
) -> None:
    channel = key(stage, "events")

    def listeners() -> object:
        return server.command("PUBSUB", "SHARDNUMSUB", channel)

    async with stage.storage.subscribe(Topic("q")) as events, asyncio.timeout(10):
        await other.enqueue("before")
        await heard_of(events, "before")
        proxy.refuse = True
        proxy.cut_all()
        await until(lambda: listeners() == [channel.encode(), 0])
        await other.enqueue("missed")
        proxy.refuse = False
        await until(lambda: listeners() == [channel.encode(), 1])
        assert (await heard_of(events, "")).queue == "q"  # Something may have happened: look.
        await other.enqueue("after")
        assert (await heard_of(events, "after")).kind is EventKind.ENQUEUED


async def test_listener_that_resubscribes_at_once_keeps_its_connection(
    server: Server, clone: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "holdfast")
    async with clone.storage.subscribe(Topic("q2")):
        for n in range(3):
            async with clone.storage.subscribe(Topic("q")) as events, asyncio.timeout(5):
                await clone.enqueue(f"{n}")
                assert (await anext(events)).id == f"{n}"
    assert "broke" not in caplog.text


@pytest.mark.usefixtures("only_notices")
async def test_waiter_reads_the_record_as_soon_as_its_subscription_is_back(
    proxy: Proxy, stage: Stage, other: Stage
) -> None:
    await other.enqueue("a")
    waiter = await waiting(proxy, stage)
    proxy.refuse = True
    proxy.cut_all()
    await other.complete(await other.claim_one(), b"missed")
    proxy.refuse = False
    assert (await answer_of(waiter)).result == b"missed"


# The wake token


async def next_wake(events: AsyncIterator[Event]) -> None:
    async with asyncio.timeout(5):
        await anext(events)


async def listening(server: Server, number: int) -> None:
    """Until so many clients wait for a token. Nobody else blocks on the shared server."""
    await until(lambda: server.info("clients")["blocked_clients"] == f"{number}")


async def test_queue_has_at_most_one_wake_token(server: Server, clone: Stage) -> None:
    for n in range(5):
        await clone.enqueue(f"{n}")
        assert server.command("LLEN", key(clone, "wake")) == 1
    job = await clone.claim_one()
    await clone.retry(job)
    await clone.claim(2)
    assert server.command("LLEN", key(clone, "wake")) == 1


@pytest.mark.usefixtures("patient_listener")
async def test_enqueue_wakes_one_of_two_and_a_claim_that_leaves_jobs_wakes_the_other(
    server: Server, clone: Stage
) -> None:
    async with opened(server.url, like=clone) as second, opened(server.url, like=clone) as producer:
        topic = Topic("q", "wake")
        async with clone.storage.subscribe(topic) as events, second.storage.subscribe(topic) as other_events:
            await listening(server, 2)
            await producer.storage.enqueue("q", [Request("a", Work(b"")), Request("b", Work(b""))])
            calls = [asyncio.create_task(next_wake(each)) for each in (events, other_events)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await listening(server, 1)  # Whoever was woken knows of work: other tokens are not for it.
            assert [call.done() for call in calls].count(True) == 1
            assert server.command("LLEN", key(clone, "wake")) == 0
            woken = clone if calls[0].done() else second
            await woken.claim_one()
            await asyncio.gather(*calls)
            await listening(server, 0)
            assert len(await woken.claim(1)) == 1
            assert server.command("LLEN", key(clone, "wake")) == 0  # Nothing is left: nobody is woken.
            assert await woken.claim(1) == []
            await listening(server, 1)  # Whoever has found nothing stands in line again.


async def test_stored_wake_token_wakes_the_next_listener(server: Server, clone: Stage) -> None:
    await clone.enqueue("a")
    async with clone.storage.subscribe(Topic("q", "wake")) as events:
        await next_wake(events)
    assert server.command("LLEN", key(clone, "wake")) == 0


async def test_cut_wake_listener_is_woken_again(proxy: Proxy, stage: Stage, other: Stage) -> None:
    async with stage.storage.subscribe(Topic("q", "wake")) as events:
        for n in range(3):
            await other.enqueue(f"{n}")
            await next_wake(events)
            proxy.cut_all()


@pytest.mark.usefixtures("patient_listener")
async def test_listener_that_left_takes_no_wake_token_from_another(server: Server, clone: Stage) -> None:
    topic = Topic("q", "wake")
    async with opened(server.url, like=clone) as leaving, opened(server.url, like=clone) as producer:
        first, second = leaving.storage.subscribe(topic), clone.storage.subscribe(topic)
        await first.__aenter__()
        await listening(server, 1)
        async with second as events:
            await listening(server, 2)
            await first.__aexit__(None, None, None)
            await producer.enqueue("a")
            async with asyncio.timeout(1):
                await anext(events)


async def test_listener_of_a_second_queue_is_woken(server: Server, clone: Stage) -> None:
    async with opened(server.url, like=clone) as producer:
        async with clone.storage.subscribe(Topic("q", "wake")) as events:
            await listening(server, 1)
            async with clone.storage.subscribe(Topic("q2", "wake")) as events2:
                await producer.storage.enqueue("q2", [Request("a", Work(b""))])
                await next_wake(events2)
                await producer.enqueue("a")
                await next_wake(events)
            await producer.enqueue("b")
            await next_wake(events)


async def test_a_storage_that_is_opened_again_is_woken_again(server: Server, clone: Stage) -> None:
    storage = connect(server.url, clock=clone.clock, namespace=namespace_of(clone))
    for id in "ab":
        async with storage, storage.subscribe(Topic("q", "wake")) as events:
            await clone.enqueue(id)
            await next_wake(events)
            await clone.claim(1)
