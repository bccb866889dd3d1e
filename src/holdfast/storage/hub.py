"""Subscriptions within a process: hints go from the step that caused them to whoever listens. Thread-safe.

A hint may be dropped here when a listener does not keep up; every listener looks at the record once a second anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from holdfast.events import Event, Kind, Topic

MAX_PENDING = 10_000
"""Hints that one listener may have before it; the oldest are dropped first."""

Route = Callable[[Topic], bool]
"""Which topics a message is for: where several ways lead to a listener, it should hear nothing twice."""


def everyone(topic: Topic) -> bool:
    return True


class Subscription:
    """One listener. Iterate it for events; it never ends by itself."""

    def __init__(self, hub: Hub, topics: Sequence[Topic]) -> None:
        self.topics = topics
        self._hub = hub
        self._pending: deque[Event] = deque(maxlen=MAX_PENDING)
        self._arrived = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    async def __aenter__(self) -> AsyncIterator[Event]:
        self._hub.add(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._hub.remove(self)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        return self._pending.popleft()

    def receive(self, events: Iterable[Event], route: Route) -> None:
        """Take what those topics cover that are on this route. Called on the subscription's own loop."""
        topics = [topic for topic in self.topics if route(topic)]
        self._pending.extend(event for event in events if any(topic.covers(event) for topic in topics))
        if self._pending:
            self._arrived.set()


class Hub:
    """All the listeners of one storage in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)

    def publish(self, events: Sequence[Event], route: Route = everyone) -> None:
        """Hand events to the loops of those who listen to their queues. Callable from any thread."""
        if not events:
            return
        for subscription in self._subscriptions:
            queues = {topic.queue for topic in subscription.topics}
            wanted = [event for event in events if event.queue in queues]
            if wanted:
                _call(subscription, wanted, route)

    def poke(self) -> None:
        """Something may have happened, nobody knows what: every listener should look. One event for those who wait for
        work, and one for those who wait for an end."""
        for subscription in self._subscriptions:
            kinds = (Kind.UPDATED, Kind.CANCELLED)
            events = [Event(kind, t.queue, t.id or "", 0) for t in subscription.topics for kind in kinds]
            _call(subscription, events, everyone)


def _call(subscription: Subscription, events: list[Event], route: Route) -> None:
    try:
        subscription.loop.call_soon_threadsafe(subscription.receive, events, route)
    except RuntimeError:
        pass  # The listener's loop has closed; it will never ask again.
