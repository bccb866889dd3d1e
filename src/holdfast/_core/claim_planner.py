"""Planning of claims: from which queues a worker claims next, and how many jobs.

A worker never claims more than it can start now. Higher priorities are served first, queues of one priority share
equally. Two rules prevent starvation: see `LOWER_FIRST_EVERY` and `MAX_SKIPPED`. The cost of a plan does not grow with
the number of queues: it looks at a few queues of each lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

import msgspec

from holdfast._core.capacity import MAX_SUSPECTS, NEVER, Capacity, QueueLoad, take

MAX_CLAIMS = 100
"""Most claims in flight. A claim whose reply comes late halves the limit, and each other claim raises it by one."""
LOWER_FIRST_EVERY = 16
"""Every 16th plan begins with the lower queue that waits longest."""
MAX_SKIPPED = 16
"""A host is kept for a lane after 16 plans in which other lanes had orders and its next job did not fit."""
LARGE_CLAIM = 50
"""A queue for which more than 50 jobs fit claims half of them: those run while the storage finds the other half."""
MAX_COMPARED = 32
"""Most queues of one lane that a plan looks at: those that have waited longest."""
MAX_KEPT_S = 60.0
"""Longest time that a host is kept free for a queue, and the pause before a host is kept for that queue again."""


class ClaimOrder(msgspec.Struct, frozen=True):
    """Claim up to `limit` jobs of a queue."""

    queue: str
    limit: int


class Lane(msgspec.Struct):
    """The queues of one priority and size that may be claimed from now. If a job of one fits, so does a job of each."""

    priority: int
    size: int
    waited: bool
    """Runs of this worker wait for jobs of these queues."""
    loads: dict[str, QueueLoad] = {}
    """By name, in the order in which they came."""
    skipped: int = 0
    """Number of plans since the last order in which other lanes had orders and the next job did not fit."""


class ClaimPlanner(Capacity):
    """Plans the claims of one worker from its capacity."""

    def __init__(self, host_capacity: int, max_runs: int | None = None) -> None:
        super().__init__(host_capacity, max_runs)
        self._lanes: dict[tuple[int, int, bool], Lane] = {}
        """Queues that are due, by priority, size, and whether runs wait for them. No lane is empty."""
        self._times: list[tuple[float, str]] = []
        """A heap: when queues that are not due will be. It may have entries that do not hold any more."""
        self._claims = 0
        """Number of claims in flight."""
        self._max_claims = MAX_CLAIMS
        self._plans = 0
        """Number of plans so far that had orders."""
        self._kept: tuple[int, str, float] | None = None
        """The host that is kept free, the queue that it is kept for, and until when."""

    # Queues

    def serve(self, load: QueueLoad) -> None:
        if load.queue in self._loads:
            self._delist(self._loads[load.queue])
        super().serve(load)
        self._list(self._loads[load.queue])

    def leave(self, queue: str) -> None:
        if queue in self.served:
            self._delist(self.served[queue])
        super().leave(queue)

    def _set_waited(self, queue: str) -> None:
        load = self.served.get(queue)
        if load is not None:
            self._delist(load)
        super()._set_waited(queue)
        if load is not None:
            self._list(load)

    def _slots_changed(self, load: QueueLoad) -> None:
        self._list(load)

    # Work of queues

    def wake(self, queue: str) -> None:
        """A queue may have work."""
        load = self._loads.get(queue)
        if load is not None:
            load.woken = True
            load.claim_at = 0.0
            self._list(load)

    def sleep(self, queue: str) -> None:
        """A queue has no work after all."""
        load = self._loads[queue]
        load.claim_at = NEVER
        self._delist(load)

    def rest(self, queue: str, until: float) -> None:
        """Claim nothing from a queue before this time: its jobs were released, and would be released again."""
        load = self._loads[queue]
        load.rests_until = until
        self._list(load)

    @property
    def idle(self) -> bool:
        """No queue is known to have work, now or later, and no claim is in flight."""
        return not self._claims and all(load.claim_at == NEVER for load in self.served.values())

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. Not counted are queues that are due now: those that have no
        order wait for the end of a run or a claim."""
        self._list_due(now)
        while self._times:
            at, queue = self._times[0]
            load = self.served.get(queue)
            if load is not None and not load.claiming and at == max(load.claim_at, load.rests_until):
                return at
            heappop(self._times)
        return NEVER

    def full_queues(self) -> list[str]:
        """Queues of which no further job fits."""
        free = self._free_units()
        return [load.queue for load in self.served.values() if self._fitting(load, free) <= 0]

    def idle_queues(self, now: float) -> list[str]:
        """Queues of which a job would fit, but that are not known to have work."""
        full = set(self.full_queues())
        return [load.queue for load in self.served.values() if load.claim_at > now and load.queue not in full]

    def blocked_queues(self, now: float) -> list[str]:
        """Queues that may have work, but whose next job does not fit."""
        self._list_due(now)
        free = self._free_units()
        blocked = [lane for lane in self._lanes.values() if self._is_lane_blocked(lane, free)]
        return [queue for lane in blocked for queue in lane.loads]

    # Lanes

    def _list(self, load: QueueLoad) -> None:
        """Put a queue into its lane if it is due and may be claimed from. If it is due later, note when."""
        at = max(load.claim_at, load.rests_until)
        may_claim = not load.claiming and load.suspects < MAX_SUSPECTS and load.slots > 0
        if at == 0.0 and may_claim and load.queue in self.served:
            key = _lane_of(load)
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = Lane(*key)
            lane.loads.setdefault(load.queue, load)
            return
        self._delist(load)
        if 0.0 < at < NEVER:
            heappush(self._times, (at, load.queue))
            if len(self._times) > 4 * len(self._loads) + MAX_CLAIMS:  # Most entries do not hold any more.
                times = ((max(load.claim_at, load.rests_until), load.queue) for load in self.served.values())
                self._times = [(at, queue) for at, queue in times if 0.0 < at < NEVER]
                heapify(self._times)

    def _delist(self, load: QueueLoad) -> None:
        key = _lane_of(load)
        lane = self._lanes.get(key)
        if lane is not None and lane.loads.pop(load.queue, None) is not None and not lane.loads:
            del self._lanes[key]

    def _is_lane_blocked(self, lane: Lane, free: dict[int, int]) -> bool:
        return self._is_blocked(lane.size, self._units(free, lane.waited))

    def _list_due(self, now: float) -> None:
        """Put queues into their lanes whose time has come."""
        while self._times and self._times[0][0] <= now:
            load = self._loads[heappop(self._times)[1]]
            load.claim_at = 0.0 if load.claim_at <= now else load.claim_at
            load.rests_until = 0.0 if load.rests_until <= now else load.rests_until
            if load.claim_at == load.rests_until == 0.0:
                self._list(load)

    # Plans

    def plan(self, now: float) -> list[ClaimOrder]:
        """Decide what to claim. The orders are for different queues, and all of their jobs fit together."""
        self._list_due(now)
        if not self._lanes or self._claims >= self._max_claims or self._run_slots(waited=True) <= 0:
            return []
        free = self._free_units()
        if len(self._lanes) == 1 and self._kept is None:
            (lane,) = self._lanes.values()
            if len(lane.loads) == 1:
                (load,) = lane.loads.values()
                fitting = self._fitting(load, free)
                if fitting > 0:
                    self._plans += 1
                    return [self._order(load, free, min(fitting, max(fitting // 2, LARGE_CLAIM)))]
        orders = self._use_kept_host(free, now)
        if self._kept is None and not orders:
            self._keep_a_host(free, now)
        lanes = [lane for lane in self._not_withheld(free) if self._fits(lane, free)]
        if not (lanes or orders):
            return []
        for lane in self._lanes.values():  # While a host is kept, only the lane of its queue is counted as skipped.
            if (self._kept is None or self._kept[1] in lane.loads) and self._is_lane_blocked(lane, free):
                lane.skipped += 1
        self._plans += 1
        return orders + self._share_out(lanes, free)

    def claimed(self, queue: str, limit: int, count: int, claim_at: float, *, late: bool = False) -> None:
        """A claim of at most `limit` jobs got `count`. If it was full there may be work now, else at `claim_at`. If the
        reply was `late`, compared with the length of a lease, there are too many claims in flight."""
        load = self._loads[queue]
        for number, jobs in load.reservations.items():
            if number in self.hosts:
                self.hosts[number].reserved -= jobs * load.size
        load.reservations.clear()
        if load.claiming:
            self._claims -= 1
            self._claiming -= load.claiming
            load.claiming = 0
        self._max_claims = max(1, self._max_claims // 2) if late else min(self._max_claims + 1, MAX_CLAIMS)
        may_have_more = count >= limit or load.woken
        load.claim_at = 0.0 if may_have_more else claim_at
        self._list(load)

    def _order(self, load: QueueLoad, free: dict[int, int], limit: int) -> ClaimOrder:
        """Order a claim, and reserve units for its jobs: they are taken from `free`."""
        self._lanes[_lane_of(load)].skipped = 0
        load.claiming, load.planned, load.woken = limit, self._plans, False
        self._delist(load)
        self._claims += 1
        self._claiming += limit
        load.reservations = take(self._units(free, load.waited), load.size, limit)
        for number, jobs in load.reservations.items():
            free[number] -= jobs * load.size if load.waited else 0
            self.hosts[number].reserved += jobs * load.size
        return ClaimOrder(load.queue, limit)

    # A host for a job that does not fit

    def _keep_a_host(self, free: dict[int, int], now: float) -> None:
        """If a lane was skipped 16 times, keep the emptiest host that can take one of its jobs: no other queue gets
        that host until the job fits. One host is kept at a time, for the queue that was served longest ago."""
        starving: list[QueueLoad] = []
        for lane in self._lanes.values():
            if lane.skipped >= MAX_SKIPPED and self._is_lane_blocked(lane, free):
                starving += islice((load for load in lane.loads.values() if load.kept_from <= now), 1)
        if starving:
            first = min(starving, key=lambda load: load.planned)
            host = max((n for n in free if self._can_ever_fit(first.size, n)), key=free.__getitem__)
            self._kept = (host, first.queue, now + MAX_KEPT_S)

    def _use_kept_host(self, free: dict[int, int], now: float) -> list[ClaimOrder]:
        """The order of the queue that a host is kept for, if enough is free there now."""
        if self._kept is None:
            return []
        host, queue, until = self._kept
        load = self.served.get(queue)
        if load is None or host not in free or queue not in self._loads_of(load):
            self._kept = None  # The job fitted elsewhere or is gone, or the host is gone.
            return []
        if now > until:
            load.kept_from = now + MAX_KEPT_S
        elif self._units(free, load.waited)[host] < load.size:
            return []
        self._kept = None
        for lane in self._lanes.values():  # Other queues are served again before another host is kept.
            lane.skipped = 0
        if load.kept_from > now:
            return []
        only = {host: free[host]}
        order = self._order(load, only, 1)
        free.update(only)
        return [order]

    def _loads_of(self, load: QueueLoad) -> dict[str, QueueLoad]:
        """The queues in the lane of a queue, if it has one now."""
        lane = self._lanes.get(_lane_of(load))
        return {} if lane is None else lane.loads

    def _not_withheld(self, free: dict[int, int]) -> Iterable[Lane]:
        """The lanes that may be served while a host is kept: all of them, on the other hosts. The only host is kept
        from lanes of a higher priority only after the lane of its queue was skipped 256 times. No host is kept from
        jobs for which runs wait: the runs of that host may end only after them."""
        lanes = list(self._lanes.values())
        if self._kept is None:
            return lanes
        host, queue, _ = self._kept
        kept_for = self.served[queue]
        if len(free) == 1 and self._lanes[_lane_of(kept_for)].skipped < MAX_SKIPPED**2:
            return [lane for lane in lanes if lane.waited or lane.priority > kept_for.priority]
        free[host] = min(free[host], 0)
        return lanes

    def _fits(self, lane: Lane, free: dict[int, int]) -> bool:
        units = self._units(free, lane.waited)
        return max(units.values(), default=0) >= lane.size and self._run_slots(lane.waited) > 0

    # Sharing

    def _share_out(self, lanes: Sequence[Lane], free: dict[int, int]) -> list[ClaimOrder]:
        """The orders of several queues: higher priorities first, and in every 16th plan a lower queue before them.

        Queues of one priority get equal shares, the one with the fewest runs first. The next queues get what it leaves.
        """
        orders: list[ClaimOrder] = []
        tiers = sorted({lane.priority for lane in lanes}, reverse=True)
        waiting = {
            tier: [
                load for lane in lanes if lane.priority == tier for load in islice(lane.loads.values(), MAX_COMPARED)
            ]
            for tier in tiers
        }
        if self._plans % LOWER_FIRST_EVERY == 0 and len(tiers) > 1:
            lower = [load for tier in tiers[1:] for load in waiting[tier]]
            first = min(lower, key=lambda load: (load.planned, load.priority))
            orders.append(self._order(first, free, 1))
            waiting[first.priority].remove(first)
        for tier in tiers:
            left = sorted(waiting[tier], key=lambda load: (load.running * load.size, load.planned))
            del left[self._max_claims - self._claims :]
            while left:
                load = left.pop(0)
                units = sum(units for units in self._units(free, load.waited).values() if units > 0)
                share = max(1, units // (len(left) + 1) // load.size)
                limit = min(self._fitting(load, free), share)
                if limit > 0:
                    orders.append(self._order(load, free, limit))
        return orders


def _lane_of(load: QueueLoad) -> tuple[int, int, bool]:
    return load.priority, load.size, load.waited
