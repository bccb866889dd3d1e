"""Capacity of one worker: the hosts in which its runs go on, how much of it each queue uses, and what to claim.

A host is a child process, or the worker's own event loop. `Capacity` is mutable bookkeeping with one owner, the claimer
of the worker: executors report to it which hosts there are and where runs start and finish. `ClaimPlanner` decides from
it which queues to claim from. Both are used on the worker's event loop only, do no I/O and read no clock: `now` is
passed in (monotonic seconds).

A worker never claims more than it can start now. Queues share it by their priority, those of one priority equally. Two
rules keep every queue from starving: of 16 plans, one begins with the lower queue that was served longest ago; and when
a queue was skipped 16 times because its next job did not fit, a host is kept free for it until that job fits. The only
host of a worker is kept from queues of a higher priority after 256 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_CLAIM = 250
"""Most jobs of one claim."""
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
NEVER = float("inf")


class Host(msgspec.Struct):
    capacity: int
    spare: bool = False
    """For one run at a time, which must be isolated."""
    used: int = 0
    runs: int = 0
    running: dict[str, int] = {}
    """Runs of each queue."""
    reserved: int = 0
    """Units for the jobs that claims on their way may bring."""
    stuck: dict[str, int] = {}
    """Runs of each queue that were given up, and may never end."""
    open: bool = True
    unresponsive: bool = False
    """It does not answer at the moment, and gets no new runs."""

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved

    @property
    def takes(self) -> bool:
        return self.open and not (self.spare or self.unresponsive)


class QueueLoad(msgspec.Struct):
    """One queue that the worker serves: its settings, what it uses, and what is known of its work."""

    queue: str
    size: int = 10
    """Units that each of its runs uses."""
    concurrency: int | None = None
    priority: int = 100
    running: int = 0
    unplaced: int = 0
    """Jobs that were claimed and wait for a host."""
    suspects: int = 0
    """Those of the unplaced jobs that wait for a spare host."""
    claiming: int = 0
    """Jobs that a claim on its way asks for. A queue has one claim at a time."""
    reservations: dict[int, int] = {}
    """Units that are reserved for the claim on its way, by host."""
    reserved_units_per_job: int = 0
    planned: int = 0
    """Number of the last plan in which it had an order."""
    skipped: int = 0
    """Plans since then in which other queues had orders, and its next job did not fit."""
    kept_from: float = 0.0
    """When a host may be kept free for it again."""
    woken: bool = False
    """A hint came after the last claim was sent, and that claim may not have seen the hint's job."""
    rests_until: float = 0.0
    """Nothing is claimed before this time, whatever hints come."""
    claim_at: float = 0.0
    """When to claim next: in the past if it may have work now, `NEVER` if no work is known."""


class Capacity:
    """The hosts of one worker, and the queues that use them."""

    def __init__(self, host_capacity: int, max_runs: int | None = None) -> None:
        """`host_capacity` is that of one host, in units; `max_runs` limits the runs of all hosts, whatever their
        size."""
        self.host_capacity = host_capacity
        self.runs = 0
        self.served: dict[str, QueueLoad] = {}
        self.hosts: dict[int, Host] = {}
        self._leaving: dict[str, QueueLoad] = {}
        """Queues that are not served any more, and whose last runs have not ended."""
        self._max_runs = max_runs
        self._unplaced = 0

    # Queues

    def serve(self, load: QueueLoad) -> None:
        """Begin to serve a queue, or serve it with other settings from now on."""
        load.size = min(load.size, self.host_capacity)  # A job that is larger than a host has one to itself.
        known = self.served.get(load.queue) or self._leaving.pop(load.queue, None)
        if known is None:
            self.served[load.queue] = load
            return
        for host in self.hosts.values():
            host.used += (load.size - known.size) * host.running.get(load.queue, 0)
        known.size, known.concurrency, known.priority = load.size, load.concurrency, load.priority
        self.served[load.queue] = known

    def leave(self, queue: str) -> None:
        """Claim nothing more from a queue. It is remembered until its last run has ended."""
        load = self.served.pop(queue, None)
        if load is not None:
            self._leaving[queue] = load
            self._forget_queue_if_over(load)

    def _find_load(self, queue: str) -> QueueLoad:
        return self.served.get(queue) or self._leaving[queue]

    def _all_loads(self) -> list[QueueLoad]:
        return [*self.served.values(), *self._leaving.values()]

    def _forget_queue_if_over(self, load: QueueLoad) -> None:
        if not (load.running or load.claiming or load.unplaced):
            self._leaving.pop(load.queue, None)

    # Hosts

    @property
    def units(self) -> int:
        """Capacity of all hosts together, without the spare ones."""
        return sum(host.capacity for host in self.hosts.values() if host.open and not host.spare)

    @property
    def used(self) -> int:
        return sum(host.used for host in self.hosts.values())

    def open_host(self, number: int, *, spare: bool = False) -> None:
        self.hosts[number] = Host(self.host_capacity, spare)

    def close_host(self, number: int) -> None:
        """Give a host no more runs. It is forgotten when all of its runs have been reported as finished."""
        if number in self.hosts:
            self.hosts[number].open = False
            self._forget_host_if_over(number)

    def find_host(self, queue: str, *, isolated: bool = False) -> int | None:
        """The host for the next run of a queue: the emptiest. An isolated run gets a spare one in which nothing
        runs."""
        if isolated:
            spares = ((number, host) for number, host in self.hosts.items() if host.spare and host.open)
            return next((number for number, host in spares if not (host.unresponsive or host.runs)), None)
        load = self._find_load(queue)
        size = load.size
        while load.reservations:  # What one claim brings goes to few hosts, and travels to each in one message.
            number = max(load.reservations, key=load.reservations.__getitem__)  # Few jobs are spread over hosts.
            load.reservations[number] -= load.reserved_units_per_job
            if load.reservations[number] <= 0:
                del load.reservations[number]
            host = self.hosts.get(number)
            if host is not None:
                host.reserved -= load.reserved_units_per_job
                if host.takes and host.free >= size:
                    return number
        fits = [(host.free, -number) for number, host in self.hosts.items() if host.takes and host.free >= size]
        return -max(fits)[1] if fits else None

    def _forget_host_if_over(self, number: int) -> None:
        host = self.hosts[number]
        if not (host.open or host.runs):
            del self.hosts[number]

    # Runs

    def started(self, queue: str, number: int = 0) -> None:
        load, host = self._find_load(queue), self.hosts[number]
        load.running += 1
        host.used += load.size
        host.runs += 1
        host.running[queue] = host.running.get(queue, 0) + 1
        self.runs += 1

    def gave_up(self, queue: str, number: int = 0) -> None:
        """A run on this host does not stop. It keeps its units, and no job is made to wait for them."""
        stuck = self.hosts[number].stuck
        stuck[queue] = stuck.get(queue, 0) + 1

    def finished(self, queue: str, number: int = 0, *, given_up: bool = False) -> None:
        load, host = self._find_load(queue), self.hosts[number]
        load.running -= 1
        host.used -= load.size
        host.runs -= 1
        host.running[queue] -= 1
        self.runs -= 1
        if given_up:
            host.stuck[queue] -= 1
        self._forget_host_if_over(number)
        self._forget_queue_if_over(load)

    def count_unplaced(self, queue: str, change: int, *, isolated: bool = False) -> None:
        """One more job was claimed and waits for a host, or one less, because it has a host now or was given back."""
        load = self._find_load(queue)
        load.unplaced += change
        load.suspects += change if isolated else 0
        self._unplaced += change
        self._forget_queue_if_over(load)

    # What is free

    def _free_units(self) -> dict[int, int]:
        """Units that are free on each host that takes runs, less those for jobs that wait for a host."""
        free = {number: host.free for number, host in self.hosts.items() if host.takes}
        if self._unplaced:
            for load in self._all_loads():
                _take(free, load.size, load.unplaced - load.suspects)
        return free

    def _slots(self, load: QueueLoad) -> int:
        """How many more runs of a queue its concurrency and `max_runs` allow, at most those of one claim."""
        slots = MAX_CLAIM
        if self._max_runs is not None:
            claiming = sum(load.claiming for load in self._all_loads())
            slots = min(slots, self._max_runs - self.runs - self._unplaced - claiming)
        return slots if load.concurrency is None else min(slots, load.concurrency - load.running - load.unplaced)

    def _fitting(self, load: QueueLoad, free: dict[int, int]) -> int:
        """How many more jobs of a queue fit into these free units."""
        return min(sum(units // load.size for units in free.values() if units > 0), self._slots(load))

    def _is_blocked(self, load: QueueLoad, free: dict[int, int]) -> bool:
        """Does the next job of a queue not fit now, and would it fit if enough other runs ended?"""
        return (
            max(free.values(), default=0) < load.size
            and any(self._can_ever_fit(load, number) for number, host in self.hosts.items() if host.takes)
            and self._slots(load) > 0
        )

    def _can_ever_fit(self, load: QueueLoad, number: int) -> bool:
        """Would a job of this queue fit on this host, if all runs there ended that have not been given up?"""
        host = self.hosts[number]
        stuck = sum(count * self._find_load(queue).size for queue, count in host.stuck.items() if count)
        return load.size <= host.capacity - stuck


def _take(free: dict[int, int], size: int, count: int) -> dict[int, int]:
    """Use up units for some jobs, each on the host where most is free: how many jobs on which host."""
    if len(free) == 1:
        (number,) = free
        free[number] -= size * count
        return {number: count}
    taken: dict[int, int] = {}
    for _ in range(count if free else 0):
        number = max(free, key=free.__getitem__)
        free[number] -= size
        taken[number] = taken.get(number, 0) + 1
    return taken


class ClaimOrder(msgspec.Struct, frozen=True):
    """Claim up to `limit` jobs of a queue."""

    queue: str
    limit: int


class ClaimPlanner(Capacity):
    """Plans the claims of one worker from its capacity."""

    _plans = 0
    """Plans so far that had orders."""
    _kept: tuple[int, str, float] | None = None
    """The host that is kept free, the queue that it is kept for, and until when."""

    # What is known of queues

    def wake(self, queue: str) -> None:
        """A queue may have work."""
        load = self.served.get(queue)
        if load is not None:
            load.woken = True
            load.claim_at = 0.0

    def sleep(self, queue: str) -> None:
        """A queue has no work after all."""
        load = self.served.get(queue)
        if load is not None:
            load.claim_at, load.skipped = NEVER, 0

    def rest(self, queue: str, until: float) -> None:
        """Claim nothing from a queue before this time: its jobs were given back, and would be again."""
        load = self.served.get(queue)
        if load is not None:
            load.rests_until = until

    @property
    def idle(self) -> bool:
        """No queue is known to have work, now or later, and no claim is on its way."""
        has_work = any(load.claim_at != NEVER for load in self.served.values())
        return not has_work and not any(load.claiming for load in self._all_loads())

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. A queue that is due by now and was not planned waits for the
        end of a run."""
        times = [max(load.claim_at, load.rests_until) for load in self.served.values()]
        return min((at for at in times if at > now), default=NEVER)

    def full_queues(self) -> list[str]:
        """Queues of which no further job fits."""
        free = self._free_units()
        return [load.queue for load in self.served.values() if self._fitting(load, free) <= 0]

    def idle_queues(self, now: float) -> list[str]:
        """Queues of which a job would fit, and that are not known to have work."""
        full = set(self.full_queues())
        return [load.queue for load in self.served.values() if load.claim_at > now and load.queue not in full]

    def blocked_queues(self, now: float) -> list[str]:
        """Queues that should have work, and whose next job does not fit."""
        free = self._free_units()
        loads = [load for load in self.served.values() if load.claim_at <= now and not load.claiming]
        return [load.queue for load in loads if self._is_blocked(load, free)]

    # Plans

    def plan(self, now: float) -> list[ClaimOrder]:
        """What to claim. No two orders are for one queue, and together they fit."""
        due = [
            load
            for load in self.served.values()
            if load.claim_at <= now and load.rests_until <= now and not load.claiming and load.suspects < MAX_SUSPECTS
        ]
        if not due:
            return []
        free = self._free_units()
        if len(due) == 1 and self._kept is None and (fitting := self._fitting(due[0], free)) > 0:
            self._plans += 1
            return [self._order(due[0], free, min(fitting, max(fitting // 2, LARGE_CLAIM)))]
        orders = self._use_kept_host(due, free, now)
        if self._kept is None and not orders:
            self._keep_a_host(due, free, now)
        above = self._withhold_kept_host(free)
        ready = [load for load in due if not load.claiming and load.priority > above and self._fitting(load, free) > 0]
        if not (ready or orders):
            return []
        for load in due:
            counts = self._kept is None or self._kept[1] == load.queue
            if counts and not load.claiming and self._is_blocked(load, free):
                load.skipped += 1
        self._plans += 1
        return orders + self._share_out(ready, free)

    def claimed(self, queue: str, limit: int, count: int, claim_at: float) -> None:
        """A claim of up to `limit` jobs has brought `count`. A full one may have left work; `claim_at` is when else
        there may be some."""
        load = self._find_load(queue)
        for number, units in load.reservations.items():
            if number in self.hosts:
                self.hosts[number].reserved -= units
        load.reservations.clear()
        load.claiming = 0
        may_have_more = count >= limit or load.woken
        load.claim_at = 0.0 if may_have_more else claim_at
        self._forget_queue_if_over(load)

    def _order(self, load: QueueLoad, free: dict[int, int], limit: int) -> ClaimOrder:
        """Order a claim, and reserve units for the jobs that it may bring: they are taken from `free`."""
        load.claiming, load.planned, load.woken, load.skipped = limit, self._plans, False, 0
        load.reserved_units_per_job = load.size
        for number, jobs in _take(free, load.size, limit).items():
            load.reservations[number] = jobs * load.size
            self.hosts[number].reserved += jobs * load.size
        return ClaimOrder(load.queue, limit)

    # A host for a job that does not fit

    def _keep_a_host(self, due: Sequence[QueueLoad], free: dict[int, int], now: float) -> None:
        """If a queue was skipped 16 times, keep the emptiest host that can take its job: no other queue gets that host
        until the job fits. One host is kept at a time, for the queue that was served longest ago."""
        skipped = [load for load in due if load.skipped >= MAX_SKIPPED and load.kept_from <= now]
        starving = [load for load in skipped if self._is_blocked(load, free)]
        if starving:
            first = min(starving, key=lambda load: load.planned)
            host = max((n for n in free if self._can_ever_fit(first, n)), key=free.__getitem__)
            self._kept = (host, first.queue, now + MAX_KEPT_S)

    def _use_kept_host(self, due: Sequence[QueueLoad], free: dict[int, int], now: float) -> list[ClaimOrder]:
        """The order of the queue that a host is kept for, if enough is free there now."""
        if self._kept is None:
            return []
        host, queue, until = self._kept
        load = self.served.get(queue)
        if load is None or load not in due or host not in free:
            self._kept = None  # The job fitted elsewhere, or there is none; or the host has gone.
            return []
        if now > until:
            load.kept_from = now + MAX_KEPT_S
        elif free[host] < load.size or self._slots(load) <= 0:
            return []
        self._kept = None
        for other in self.served.values():  # Others get their turn first, before another host is kept.
            other.skipped = 0
        if load.kept_from > now:
            return []
        only = {host: free[host]}
        order = self._order(load, only, 1)
        free.update(only)
        return [order]

    def _withhold_kept_host(self, free: dict[int, int]) -> int:
        """Take the kept host out of `free`. If it is the only one, queues of a higher priority use it until its queue
        was skipped 256 times. Returns the priority above which queues are served."""
        if self._kept is None:
            return -1
        host, queue, _ = self._kept
        load = self.served[queue]
        if len(free) == 1 and load.skipped < MAX_SKIPPED**2:
            return load.priority
        del free[host]
        return -1

    # Sharing

    def _share_out(self, ready: list[QueueLoad], free: dict[int, int]) -> list[ClaimOrder]:
        """The orders of several queues: higher priorities first, and once in 16 plans a lower queue before them.

        Queues of one priority get equal parts, the one with the fewest runs first; what one leaves goes to those after
        it."""
        orders: list[ClaimOrder] = []
        tiers = sorted({load.priority for load in ready}, reverse=True)
        if self._plans % LOWER_FIRST_EVERY == 0 and len(tiers) > 1:
            lower = [load for load in ready if load.priority < tiers[0]]
            first = min(lower, key=lambda load: (load.planned, load.priority))
            orders.append(self._order(first, free, 1))
            ready.remove(first)
        for tier in tiers:
            left = [load for load in ready if load.priority == tier]
            left.sort(key=lambda load: (load.running * load.size, load.planned))
            while left and (units := sum(units for units in free.values() if units > 0)) > 0:
                load = left.pop(0)
                share = max(1, units // (len(left) + 1) // load.size)
                limit = min(self._fitting(load, free), share)
                if limit > 0:
                    orders.append(self._order(load, free, limit))
        return orders
