"""Which queues to claim from, and how much: capacity as numbers. Pure: no I/O, and `now` is passed in (monotonic
seconds).

A worker never claims more than it can start now. Queues share it by their priority, those of one priority equally;
now and then a lower one goes first, and a large job is waited for, so that none starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

LOWER_FIRST_EVERY = 16
"""Of so many plans, one begins with the lower queue that was served longest ago; and a job that did not fit so many
times is waited for."""
MAX_CLAIM = 250
MAX_BLOCK_S = 60.0
"""For so long others are held back so that a large job finds room."""
NEVER = float("inf")


class Served(msgspec.Struct):
    """One queue that the worker serves."""

    queue: str
    size: int = 10
    concurrency: int | None = None
    priority: int = 100
    running: int = 0
    woken: bool = False
    """A hint came after the last claim was sent, which may not have seen what it is about."""
    planned: int = 0
    """In which plan it last had an order."""
    asked: int = 0
    """Jobs of a claim that is on its way. There is one at a time."""
    passed_over: int = 0
    """Plans in which it had work, and its next job did not fit."""
    blocks_since: float = NEVER
    """Since when others are held back for it."""
    claim_at: float = 0.0
    """When to claim from it next; in the past if it may have work now, `NEVER` if nothing is known of any."""


class Order(msgspec.Struct, frozen=True):
    """Claim up to `limit` jobs."""

    queue: str
    limit: int


class Fleet:
    """The capacity of one worker, and what it serves."""

    def __init__(self, capacity: int, served: Iterable[Served], *, most: int | None = None) -> None:
        self.capacity = capacity
        self.used = 0
        self.runs = 0
        self._most = most
        """Runs at the same time, whatever their size."""
        self._served = {queue.queue: queue for queue in served}
        for queue in self._served.values():
            queue.size = min(queue.size, capacity)  # One that is larger than everything runs alone.
        self._plans = 0
        self._asked_units = self._asked_runs = 0
        """What claims that are on their way may bring."""
        self._stuck_units = 0
        """What runs take up that were given up, and may never end."""

    @property
    def claiming(self) -> bool:
        """Is a claim on its way?"""
        return self._asked_runs > 0

    @property
    def queues(self) -> list[str]:
        return list(self._served)

    def wake(self, queue: str) -> None:
        """There may be work."""
        if queue in self._served:
            self._served[queue].woken = True
            self._served[queue].claim_at = 0.0

    def plan(self, now: float) -> list[Order]:
        """What to claim. No two orders are for one queue, and together they fit."""
        due = [queue for queue in self._served.values() if queue.claim_at <= now and not queue.asked]
        ready = self._without_the_blocked(due, now)
        if not ready:
            return []
        self._plans += 1
        free, runs_left = self._free(), self._runs_left()
        orders: list[Order] = []
        tiers = sorted({queue.priority for queue in ready}, reverse=True)
        if self._plans % LOWER_FIRST_EVERY == 0 and len(tiers) > 1:
            below = [queue for queue in ready if queue.priority < tiers[0]]
            longest = min(below, key=lambda queue: (queue.planned, queue.priority))
            orders.append(Order(longest.queue, 1))
            free, runs_left = free - longest.size, runs_left - 1
            ready.remove(longest)
        for tier in tiers:
            shares = self._share([queue for queue in ready if queue.priority == tier], free, runs_left)
            free -= sum(order.limit * self._served[order.queue].size for order in shares)
            runs_left -= sum(order.limit for order in shares)
            orders += shares
        for order in orders:
            served = self._served[order.queue]
            served.asked, served.planned, served.woken = order.limit, self._plans, False
            served.passed_over, served.blocks_since = 0, NEVER
            self._asked_units += order.limit * served.size
            self._asked_runs += order.limit
        return orders

    def _without_the_blocked(self, due: list[Served], now: float) -> list[Served]:
        """Queues that have room. Where a large job has waited long enough for some, only higher queues go on until
        enough has ended, and at last not even those; but not for ever, it may be a long run that has to end."""
        free = self._free()
        ready = [queue for queue in due if self._room(queue, free) > 0]
        blocked_by = -1
        for queue in due:
            if not self._crowded(queue, free):
                continue
            queue.passed_over += 1
            if queue.passed_over >= LOWER_FIRST_EVERY:
                queue.blocks_since = min(queue.blocks_since, now)
                if now - queue.blocks_since > MAX_BLOCK_S:
                    queue.passed_over, queue.blocks_since = 0, NEVER
                    continue
                blocked_by = max(blocked_by, queue.priority)
            if queue.passed_over >= LOWER_FIRST_EVERY**2:
                return []
        return [queue for queue in ready if queue.priority > blocked_by]

    def _crowded(self, queue: Served, free: int) -> bool:
        """Would its next job fit, if only enough of what runs ended?"""
        return free < queue.size <= self.capacity - self._stuck_units and self._has_slot(queue)

    def claimed(self, queue: str, asked: int, got: int, claim_at: float) -> None:
        """A claim came back. A full one may have left work; `claim_at` is when else there may be some."""
        served = self._served[queue]
        self._asked_units -= served.asked * served.size
        self._asked_runs -= served.asked
        served.asked = 0
        served.claim_at = 0.0 if got >= asked or served.woken else claim_at

    def started(self, queue: str) -> None:
        served = self._served[queue]
        served.running += 1
        self.used += served.size
        self.runs += 1

    def gave_up(self, queue: str) -> None:
        """A run does not stop. It keeps its room, and nobody waits for that."""
        self._stuck_units += self._served[queue].size

    def ended(self, queue: str, *, given_up: bool = False) -> None:
        served = self._served[queue]
        served.running -= 1
        self.used -= served.size
        self.runs -= 1
        if given_up:
            self._stuck_units -= served.size

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. What is due by now and was not planned waits for a run's
        end."""
        return min((queue.claim_at for queue in self._served.values() if queue.claim_at > now), default=NEVER)

    def full(self) -> list[str]:
        """Queues that have no room. From any thread."""
        free = self._free()
        return [queue.queue for queue in self._served.values() if self._room(queue, free) <= 0]

    def asleep(self, now: float) -> list[str]:
        """Queues that have room and are not known to have work."""
        free = self._free()
        return [queue.queue for queue in self._served.values() if queue.claim_at > now and self._room(queue, free) > 0]

    def crowded(self, now: float) -> list[str]:
        """Queues that should have work, of which nothing fits."""
        free = self._free()
        return [q.queue for q in self._served.values() if q.claim_at <= now and not q.asked and self._crowded(q, free)]

    def sleep(self, queue: str) -> None:
        """It has no work after all."""
        served = self._served[queue]
        served.claim_at, served.passed_over, served.blocks_since = NEVER, 0, NEVER

    def _free(self) -> int:
        return self.capacity - self.used - self._asked_units

    def _runs_left(self) -> int:
        return MAX_CLAIM * len(self._served) if self._most is None else self._most - self.runs - self._asked_runs

    def _room(self, queue: Served, free: int) -> int:
        """How many jobs of a queue fit."""
        room = min(free // queue.size, self._runs_left(), MAX_CLAIM)
        return room if queue.concurrency is None else min(room, queue.concurrency - queue.running)

    def _has_slot(self, queue: Served) -> bool:
        """May another of its jobs run, as far as numbers go?"""
        return self._runs_left() > 0 and (queue.concurrency is None or queue.running < queue.concurrency)

    def _share(self, tier: Sequence[Served], free: int, runs_left: int) -> list[Order]:
        """Equal parts for the queues of one priority; what one leaves goes to those after it. The queue with the
        fewest runs is served first."""
        orders: list[Order] = []
        left = sorted(tier, key=lambda queue: (queue.running * queue.size, queue.planned))
        while left and free > 0 and runs_left > 0:
            queue = left.pop(0)
            share = max(queue.size, free // (len(left) + 1))
            limit = min(self._room(queue, min(share, free)), runs_left)
            if limit > 0:
                orders.append(Order(queue.queue, limit))
                free -= limit * queue.size
                runs_left -= limit
        return orders
