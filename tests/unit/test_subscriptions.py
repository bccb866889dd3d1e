"""What a listener hears: one after the other, within a time, or told as it comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from holdfast._core.events import Event, EventKind, Topic
from holdfast.storage.subscriptions import EventBus, Subscription


def happened(id: str) -> Event:
    return Event(EventKind.ENQUEUED, "q", id, 1)


async def test_a_wait_for_an_event_ends_with_it_or_with_its_time() -> None:
    bus = EventBus()
    async with Subscription(bus, [Topic("q")]) as events:
        assert await events.within(0.01) is None
        bus.publish([happened("a"), happened("b")])
        assert await events.within(0) == happened("a")
        assert await anext(aiter(events)) == happened("b")
        asyncio.get_running_loop().call_later(0.01, bus.publish, [happened("c")])
        async with asyncio.timeout(5):
            assert await events.within(60) == happened("c")


async def test_cancelled_wait_loses_no_event() -> None:
    bus = EventBus()
    async with Subscription(bus, [Topic("q")]) as events:
        waiting = asyncio.create_task(events.within(60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        bus.publish([happened("a")])
        assert await events.within(0) == happened("a")


async def test_callback_gets_earlier_events_and_then_each_event_at_once() -> None:
    bus, heard = EventBus(), list[Event]()
    async with Subscription(bus, [Topic("q")]) as events:
        bus.publish([happened("a")])
        events.on_event(heard.append)
        bus.publish([happened("b"), Event(EventKind.ENQUEUED, "other", "c", 1)])
        assert heard == [happened("a"), happened("b")]
        assert await events.within(0) is None


async def test_event_that_no_topic_covers_does_not_wake_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, loop, woken = EventBus(), asyncio.get_running_loop(), list[object]()
    wake = loop.call_soon_threadsafe

    def noted(callback: Callable[..., object], *args: object) -> asyncio.Handle:
        woken.append(callback)
        return wake(callback, *args)

    def publish_in_a_thread(event: Event) -> None:
        thread = threading.Thread(target=bus.publish, args=([event],))
        thread.start()
        thread.join()

    async with Subscription(bus, [Topic("q", "ready")]) as events:
        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        publish_in_a_thread(Event(EventKind.CLAIMED, "q", "a", 1))
        assert woken == []
        publish_in_a_thread(happened("a"))
        assert await events.within(5) == happened("a")
        assert len(woken) == 1
