"""Subscriptions within a process: hints go from the step that caused them to whoever listens. Thread-safe.

A hint may be dropped here when a listener does not keep up; every listener looks at the record once a second anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from holdfast._core.events import Event, EventKind, Events, Topic

MAX_PENDING = 10_000
"""Hints that one listener may have before it; the oldest are dropped first."""

TopicKey = TypeVar("TopicKey")

Route = Callable[[Topic], bool]
"""Which topics a message is for: where several ways lead to a listener, it should hear nothing twice."""


def everyone(topic: Topic) -> bool:
    return True


class Subscription:
    """One listener. Iterate it for events, or have them told; it never ends by itself."""

    def __init__(self, hub: EventBus, topics: Sequence[Topic]) -> None:
        self.topics = topics
        self._hub = hub
        self._pending: deque[Event] = deque(maxlen=MAX_PENDING)
        self._arrival: asyncio.Future[None] | None = None
        """Of whoever waits for the next event."""
        self._tell: Callable[[Event], None] | None = None
        self.loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Events:
        self._hub.add(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._hub.remove(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            await self._next_arrival()
        return self._pending.popleft()

    async def within(self, seconds: float) -> Event | None:
        """The next event; None if there is none for so long."""
        if not self._pending:
            arrival = self._next_arrival()
            timer = self.loop.call_later(seconds, _release, arrival)
            try:
                await arrival
            finally:
                timer.cancel()
        return self._pending.popleft() if self._pending else None

    def tell(self, hear: Callable[[Event], None]) -> None:
        """Call `hear` with each event as it comes, in place of keeping it."""
        self._tell = hear
        while self._pending:
            hear(self._pending.popleft())

    def _next_arrival(self) -> asyncio.Future[None]:
        if self._arrival is None or self._arrival.done():
            self._arrival = self.loop.create_future()
        return self._arrival

    def receive(self, events: Iterable[Event], route: Route) -> None:
        """Take what those topics cover that are on this route. Called on the subscription's own loop."""
        topics = [topic for topic in self.topics if route(topic)]
        for event in events:
            if any(topic.covers(event) for topic in topics):
                if self._tell is not None:
                    self._tell(event)
                else:
                    self._pending.append(event)
        if self._pending and self._arrival is not None:
            _release(self._arrival)


def _release(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


class EventBus:
    """All the listeners of one storage in this process, by what they listen to: many wait, each for one job."""

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

    def publish(self, events: Sequence[Event], route: Route = everyone) -> None:
        """Hand events to the loops of those who listen to their queues. Callable from any thread."""
        if not (self._to_queues or self._to_jobs):
            return
        wanted: dict[Subscription, list[Event]] = {}
        with self._lock:
            for event in events:
                for listeners in (self._to_queues.get(event.queue), self._to_jobs.get((event.queue, event.id))):
                    for subscription in listeners or ():
                        heard = wanted.setdefault(subscription, [])
                        if not heard or heard[-1] is not event:
                            heard.append(event)
        for subscription, heard in wanted.items():
            _call(subscription, heard, route)

    def poke(self) -> None:
        """Something may have happened, nobody knows what: every listener should look. One event for those who wait for
        work, and one for those who wait for an end."""
        with self._lock:
            everywhere = (*self._to_queues.values(), *self._to_jobs.values())
            listeners = {subscription for those in everywhere for subscription in those}
        for subscription in listeners:
            kinds = (EventKind.UPDATED, EventKind.CANCELLED)
            events = [Event(kind, t.queue, t.id or "", 0) for t in subscription.topics for kind in kinds]
            _call(subscription, events, everyone)


def _leave(listeners: dict[TopicKey, dict[Subscription, None]], key: TopicKey, subscription: Subscription) -> None:
    those = listeners.get(key, {})
    those.pop(subscription, None)
    if not those:
        listeners.pop(key, None)


def _call(subscription: Subscription, events: list[Event], route: Route) -> None:
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


class RemoteSubscription:
    """A subscription that other processes or a server feed as well.

    `listen` asks them to. It may return a function that ends this; without one, what was asked for once is sent until
    the storage is closed.
    """

    def __init__(
        self,
        inner: AbstractAsyncContextManager[Events],
        listen: Callable[[], Awaitable[Callable[[], None] | None]],
    ) -> None:
        self._inner = inner
        self._listen = listen
        self._leave: Callable[[], None] | None = None

    async def __aenter__(self) -> Events:
        events = await self._inner.__aenter__()
        try:
            self._leave = await self._listen()
        except BaseException:
            await self._inner.__aexit__(None, None, None)
            raise
        return events

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(None, None, None)
        if self._leave is not None:
            self._leave()
