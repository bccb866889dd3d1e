"""Subscriptions within a process: the event bus hands the hints of a step to its listeners. Thread-safe.

A hint is dropped when a listener does not keep up; every listener polls the record once a second anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

from holdfast._core.events import Event, EventKind, Events, Topic

MAX_PENDING = 10_000
"""Hints that wait for one listener at most; the oldest are dropped first."""

TopicKey = TypeVar("TopicKey")

Route = Callable[[Topic], bool]
"""Which topics a message applies to; None is all. An event that arrives on several channels is delivered once."""


class Subscription:
    """One listener. Iterate it for events, or set a callback; it never ends by itself."""

    def __init__(self, bus: EventBus, topics: Sequence[Topic]) -> None:
        self.topics = topics
        self._bus = bus
        self._pending: deque[Event] = deque(maxlen=MAX_PENDING)
        self._arrival: asyncio.Future[None] | None = None
        """Resolved when the next event arrives, if a caller waits for it."""
        self._callback: Callable[[Event], None] | None = None
        self.loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Events:
        self._bus.add(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._bus.remove(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            await self._next_arrival()
        return self._pending.popleft()

    async def within(self, seconds: float) -> Event | None:
        if not self._pending:
            arrival = self._next_arrival()
            timer = self.loop.call_later(seconds, _release, arrival)
            try:
                await arrival
            finally:
                timer.cancel()
        return self._pending.popleft() if self._pending else None

    def on_event(self, callback: Callable[[Event], None]) -> None:
        self._callback = callback
        while self._pending:
            callback(self._pending.popleft())

    def _next_arrival(self) -> asyncio.Future[None]:
        if self._arrival is None or self._arrival.done():
            self._arrival = self.loop.create_future()
        return self._arrival

    def receive(self, events: Iterable[Event], route: Route | None) -> None:
        """Take the events that a topic on this route covers. Called on the loop of the subscription."""
        topics = [topic for topic in self.topics if route is None or route(topic)]
        for event in events:
            if any(topic.covers(event) for topic in topics):
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
    """The listeners of one storage in this process, by topic: many of them wait for one job each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_queues: dict[str, dict[Subscription, None]] = {}
        self._to_jobs: dict[tuple[str, str], dict[Subscription, None]] = {}

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                if topic.id is None:
                    self._to_queues.setdefault(topic.queue, {})[subscription] = None
                else:
                    self._to_jobs.setdefault((topic.queue, topic.id), {})[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                if topic.id is None:
                    _leave(self._to_queues, topic.queue, subscription)
                else:
                    _leave(self._to_jobs, (topic.queue, topic.id), subscription)

    def publish(self, events: Sequence[Event], route: Route | None = None) -> None:
        """Hand events to the loops of the listeners. Callable from any thread."""
        if not (self._to_queues or self._to_jobs):
            return
        wanted: dict[Subscription, list[Event]] = {}
        with self._lock:
            for event in events:
                for listeners in (self._to_queues.get(event.queue), self._to_jobs.get((event.queue, event.id))):
                    for subscription in listeners or ():
                        chosen = wanted.setdefault(subscription, [])
                        if not chosen or chosen[-1] is not event:
                            chosen.append(event)
        for subscription, chosen in wanted.items():
            _call(subscription, chosen, route)

    def notify_all(self) -> None:
        """Make every listener poll, because events may have been missed: one event for listeners that wait for work,
        one for those that wait for the end of a job."""
        with self._lock:
            everywhere = (*self._to_queues.values(), *self._to_jobs.values())
            listeners = {subscription for those in everywhere for subscription in those}
        for subscription in listeners:
            kinds = (EventKind.UPDATED, EventKind.CANCELLED)
            events = [Event(kind, t.queue, t.id or "", 0) for t in subscription.topics for kind in kinds]
            _call(subscription, events, None)


def _leave(listeners: dict[TopicKey, dict[Subscription, None]], key: TopicKey, subscription: Subscription) -> None:
    those = listeners.get(key, {})
    those.pop(subscription, None)
    if not those:
        listeners.pop(key, None)


def _call(subscription: Subscription, events: list[Event], route: Route | None) -> None:
    try:
        if asyncio.get_running_loop() is subscription.loop:
            subscription.receive(events, route)
            return
    except RuntimeError:
        pass  # A thread without a loop.
    try:
        subscription.loop.call_soon_threadsafe(subscription.receive, events, route)
    except RuntimeError:
        pass  # The listener's loop has closed; it will never ask again.
