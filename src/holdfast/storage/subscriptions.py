"""Subscriptions within a process: the event bus sends the hints of a step to its listeners. Thread-safe.

A hint is dropped when a listener does not keep up; every listener polls the record once a second anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from holdfast._core.events import Event, EventKind, Topic

MAX_PENDING = 10_000
"""The most hints that wait for one listener; the oldest are dropped first."""

Route = Callable[[Topic], bool]
"""Whether a message applies to a topic: an event that arrives on several channels must not be delivered twice."""


class Subscription:
    """One listener: iterate over its events in order of arrival, which never end, or set a callback."""

    def __init__(self, bus: EventBus, topics: Sequence[Topic]) -> None:
        self.topics = topics
        self._by_queue: dict[str, list[Topic]] = {}
        for topic in topics:
            self._by_queue.setdefault(topic.queue, []).append(topic)
        self._bus = bus
        self._pending: deque[Event] = deque(maxlen=MAX_PENDING)
        self._arrival: asyncio.Future[None] | None = None
        """The future that the next event resolves; None while no caller waits for one."""
        self._callback: Callable[[Event], None] | None = None
        self.loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        self._bus.add(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._bus.remove(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            await self._next_arrival()
        return self._pending.popleft()

    async def within(self, seconds: float) -> Event | None:
        """Return the next event; None if none arrives within `seconds`."""
        if not self._pending:
            arrival = self._next_arrival()
            timer = self.loop.call_later(seconds, _release, arrival)
            try:
                await arrival
            finally:
                timer.cancel()
        return self._pending.popleft() if self._pending else None

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Call `callback` with each event when it arrives, instead of keeping it for the iterator."""
        self._callback = callback
        while self._pending:
            callback(self._pending.popleft())

    def _next_arrival(self) -> asyncio.Future[None]:
        if self._arrival is None or self._arrival.done():
            self._arrival = self.loop.create_future()
        return self._arrival

    def covered(self, events: Sequence[Event], route: Route | None) -> list[Event]:
        """Return the events that a topic of this route covers."""
        covered: list[Event] = []
        for event in events:
            for topic in self._by_queue.get(event.queue, ()):
                if topic.covers(event) and (route is None or route(topic)):
                    covered.append(event)
                    break
        return covered

    def receive(self, events: Iterable[Event]) -> None:
        """Take events. Called on the loop of the subscription."""
        for event in events:
            if self._callback is not None:
                self._callback(event)
            else:
                self._pending.append(event)
        if self._pending and self._arrival is not None:
            _release(self._arrival)


def _release(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


class EventBus:
    """The listeners of one storage in this process, by topic, because many of them wait for one job each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[tuple[str, str | None], dict[Subscription, None]] = {}
        """Subscriptions by queue and job id; the id is None for those to the whole queue."""

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                self._listeners.setdefault((topic.queue, topic.id), {})[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                listeners = self._listeners.get((topic.queue, topic.id), {})
                listeners.pop(subscription, None)
                if not listeners:
                    self._listeners.pop((topic.queue, topic.id), None)

    def publish(self, events: Sequence[Event], route: Route | None = None) -> None:
        """Send events to the loops of the listeners. Callable from any thread."""
        if not self._listeners:
            return
        wanted: dict[Subscription, list[Event]] = {}
        with self._lock:
            for event in events:
                for id in (None, event.id):
                    for subscription in self._listeners.get((event.queue, id), ()):
                        chosen = wanted.setdefault(subscription, [])
                        if not chosen or chosen[-1] is not event:
                            chosen.append(event)
        for subscription, chosen in wanted.items():
            if covered := subscription.covered(chosen, route):
                _call(subscription, covered)

    def notify_all(self) -> None:
        """Make every listener poll, because events may have been missed: one event for each thing it may wait for."""
        with self._lock:
            listeners = {subscription for those in self._listeners.values() for subscription in those}
        for subscription in listeners:
            kinds = (EventKind.UPDATED, EventKind.CANCELLED)
            events = [Event(kind, t.queue, t.id or "", 0) for t in subscription.topics for kind in kinds]
            _call(subscription, events)


def _call(subscription: Subscription, events: list[Event]) -> None:
    try:
        if asyncio.get_running_loop() is subscription.loop:
            subscription.receive(events)
            return
    except RuntimeError:
        pass  # A thread without a loop.
    try:
        subscription.loop.call_soon_threadsafe(subscription.receive, events)
    except RuntimeError:
        pass  # The loop of the listener has closed.
