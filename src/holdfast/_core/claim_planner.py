"""Which queues a worker claims from, and how many jobs: decided from its `Capacity`, without I/O; `now` is passed in
(monotonic seconds).

A worker never claims more than it can start now. Queues share it by their priority, those of one priority equally. Two
rules keep every queue from starving: of 16 plans, one begins with the lower queue that was served longest ago; and when
a queue was skipped 16 times because its next job did not fit, a host is kept free for it until that job fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast._core.capacity import NEVER, Capacity, QueueLoad

LOWER_FIRST_EVERY = 16
"""Of this many plans, one begins with the lower queue that was served longest ago."""
MAX_SKIPPED = 16
"""After this many plans in which other queues got orders and a queue's next job did not fit, a host is kept for it."""
LARGE_CLAIM = 50
"""A queue for which more jobs fit claims half of them: the first half is run while the storage finds the second."""
MAX_SUSPECTS = 10
"""A queue with this many jobs that wait for a spare host claims no more."""
MAX_KEPT_S = 60.0
"""How long a host is kept free for a queue at most, and how long it is not kept for that queue again after that."""


class ClaimOrder(msgspec.Struct, frozen=True):
    """Claim up to `limit` jobs of a queue."""

    queue: str
    limit: int


class KeptHost(msgspec.Struct, frozen=True):
    """A host that is kept free for one queue until its next job fits."""

    host: int
    queue: str
    until: float


class ClaimPlanner:
    """Plans the claims of one worker. Used on the worker's event loop only, as its capacity is."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._plans = 0
        self._claims = 0
        self._kept: KeptHost | None = None

    # What is known of queues

    def wake(self, queue: str) -> None:
        """A queue may have work."""
        load = self.capacity.served.get(queue)
        if load is not None:
            load.woken = True
            load.claim_at = 0.0

    def sleep(self, queue: str) -> None:
        """A queue has no work after all."""
        load = self.capacity.served.get(queue)
        if load is not None:
            load.claim_at, load.skipped = NEVER, 0

    def rest(self, queue: str, until: float) -> None:
        """Claim nothing from a queue before this time: its jobs were given back, and would be again."""
        load = self.capacity.served.get(queue)
        if load is not None:
            load.rests_until = until

    @property
    def claiming(self) -> bool:
        """Is a claim on its way?"""
        return self._claims > 0

    @property
    def idle(self) -> bool:
        """No queue is known to have work, now or later."""
        return all(load.claim_at == NEVER for load in self.capacity.served.values())

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. A queue that is due by now and was not planned waits for the
        end of a run."""
        times = [max(load.claim_at, load.rests_until) for load in self.capacity.served.values()]
        return min((at for at in times if at > now), default=NEVER)

    def full_queues(self) -> list[str]:
        """Queues of which no further job fits."""
        capacity, free = self.capacity, self.capacity.free_units()
        return [load.queue for load in capacity.served.values() if capacity.fitting(load, free) <= 0]

    def idle_queues(self, now: float) -> list[str]:
        """Queues of which a job would fit, and that are not known to have work."""
        capacity, free = self.capacity, self.capacity.free_units()
        loads = [load for load in capacity.served.values() if load.claim_at > now]
        return [load.queue for load in loads if capacity.fitting(load, free) > 0]

    def blocked_queues(self, now: float) -> list[str]:
        """Queues that should have work, and whose next job does not fit."""
        capacity, free = self.capacity, self.capacity.free_units()
        loads = [load for load in capacity.served.values() if load.claim_at <= now and not load.claiming]
        return [load.queue for load in loads if capacity.is_blocked(load, free)]

    # Plans

    def plan(self, now: float) -> list[ClaimOrder]:
        """What to claim. No two orders are for one queue, and together they fit."""
        due = [
            load
            for load in self.capacity.served.values()
            if load.claim_at <= now and load.rests_until <= now and not load.claiming and load.suspects < MAX_SUSPECTS
        ]
        if not due:
            return []
        free = self.capacity.free_units()
        if len(due) == 1 and self._kept is None and (fitting := self.capacity.fitting(due[0], free)) > 0:
            self._plans += 1
            limit = min(fitting, max(fitting // 2, LARGE_CLAIM))
            self.capacity.reserve(due[0], free, limit)
            return self._ordered([ClaimOrder(due[0].queue, limit)])
        orders = self._use_kept_host(due, free, now)
        if self._kept is None and not orders:
            self._keep_a_host(due, free, now)
        ready = [load for load in due if not load.reservations and self.capacity.fitting(load, free) > 0]
        if not (ready or orders):
            return []
        self._count_skipped(due, free)
        self._plans += 1
        return self._ordered(orders + self._share_out(ready, free, len(orders)))

    def claimed(self, queue: str, limit: int, count: int, claim_at: float) -> None:
        """A claim of up to `limit` jobs has brought `count`. A full one may have left work; `claim_at` is when else
        there may be some."""
        load = self.capacity.find_load(queue)
        self.capacity.release_reservations(load)
        if load.claiming:
            self._claims -= 1
            load.claiming = 0
        may_have_more = count >= limit or load.woken
        load.claim_at = 0.0 if may_have_more else claim_at
        self.capacity.forget_if_over(load)

    def _ordered(self, orders: list[ClaimOrder]) -> list[ClaimOrder]:
        """Note that these claims are on their way."""
        for order in orders:
            load = self.capacity.served[order.queue]
            load.claiming, load.planned, load.woken, load.skipped = order.limit, self._plans, False, 0
            self._claims += 1
        return orders

    # A host for a job that does not fit

    def _count_skipped(self, due: Sequence[QueueLoad], free: dict[int, int]) -> None:
        """Other queues get orders: count those whose next job does not fit."""
        if self._kept is None:
            for load in due:
                if not load.reservations and self.capacity.is_blocked(load, free):
                    load.skipped += 1

    def _keep_a_host(self, due: Sequence[QueueLoad], free: dict[int, int], now: float) -> None:
        """If a queue was skipped 16 times, keep the emptiest host that can take its job: no other queue gets that host
        until the job fits. One host is kept at a time, for the queue that was served longest ago."""
        starving = [
            load
            for load in due
            if load.skipped >= MAX_SKIPPED and load.kept_from <= now and self.capacity.is_blocked(load, free)
        ]
        if starving:
            first = min(starving, key=lambda load: load.planned)
            host = max((n for n in free if self.capacity.can_ever_fit(first, n)), key=free.__getitem__)
            self._kept = KeptHost(host, first.queue, now + MAX_KEPT_S)
            del free[host]

    def _use_kept_host(self, due: Sequence[QueueLoad], free: dict[int, int], now: float) -> list[ClaimOrder]:
        """The order of the queue that a host is kept for, if enough is free there now. Until then that host is not
        in `free` for others."""
        kept = self._kept
        if kept is None:
            return []
        load = self.capacity.served.get(kept.queue)
        if load is None or load not in due or kept.host not in free:
            self._kept = None  # The job fitted elsewhere, or there is none; or the host has gone.
        elif now > kept.until:
            load.kept_from = now + MAX_KEPT_S
            self._release_kept_host()
        elif free[kept.host] >= load.size and self.capacity.has_slot(load):
            only = {kept.host: free[kept.host]}
            self.capacity.reserve(load, only, 1)
            free[kept.host] = only[kept.host]
            self._release_kept_host()
            return [ClaimOrder(load.queue, 1)]
        else:
            del free[kept.host]
        return []

    def _release_kept_host(self) -> None:
        """Every queue has to be skipped 16 times again before another host is kept: others get their turn first."""
        self._kept = None
        for load in self.capacity.served.values():
            load.skipped = 0

    # Sharing

    def _share_out(self, ready: list[QueueLoad], free: dict[int, int], ordered: int) -> list[ClaimOrder]:
        """The orders of several queues: higher priorities first, and once in 16 plans a lower queue before them."""
        orders: list[ClaimOrder] = []
        runs_left = self.capacity.runs_left() - ordered
        tiers = sorted({load.priority for load in ready}, reverse=True)
        if self._plans % LOWER_FIRST_EVERY == 0 and len(tiers) > 1:
            lower = [load for load in ready if load.priority < tiers[0]]
            first = min(lower, key=lambda load: (load.planned, load.priority))
            orders.append(ClaimOrder(first.queue, 1))
            self.capacity.reserve(first, free, 1)
            runs_left -= 1
            ready.remove(first)
        for tier in tiers:
            shares = self._share([load for load in ready if load.priority == tier], free, runs_left)
            runs_left -= sum(order.limit for order in shares)
            orders += shares
        return orders

    def _share(self, tier: Sequence[QueueLoad], free: dict[int, int], runs_left: int) -> list[ClaimOrder]:
        """Equal parts for the queues of one priority; what one leaves goes to those after it. The queue with the
        fewest runs is served first."""
        orders: list[ClaimOrder] = []
        left = sorted(tier, key=lambda load: (load.running * load.size, load.planned))
        while left and runs_left > 0 and (units := sum(units for units in free.values() if units > 0)) > 0:
            load = left.pop(0)
            share = max(1, units // (len(left) + 1) // load.size)
            limit = min(self.capacity.fitting(load, free), share, runs_left)
            if limit > 0:
                orders.append(ClaimOrder(load.queue, limit))
                self.capacity.reserve(load, free, limit)
                runs_left -= limit
        return orders
