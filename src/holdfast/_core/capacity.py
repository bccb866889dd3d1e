"""Capacity of one worker: the hosts in which its jobs run, the part of them that each queue uses, and what to claim.

A host is a child process, or the worker's own event loop. `Capacity` is mutable bookkeeping with one owner, the claimer
of the worker; executors report hosts and runs to it. `ClaimPlanner` decides from it which queues to claim from. Both
are used on the worker's event loop only, do no I/O and read no clock: `now` is passed in (monotonic seconds).

A worker never claims more than it can start now. Higher priorities are served first, queues of one priority share
equally. Two rules prevent starvation: see `LOWER_FIRST_EVERY` and `MAX_SKIPPED`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MAX_CLAIM = 250
"""Most jobs of one claim."""
LOWER_FIRST_EVERY = 16
"""Every 16th plan begins with the lower queue that was served longest ago."""
MAX_SKIPPED = 16
"""A host is kept for a queue after 16 plans in which other queues had orders and its next job did not fit."""
LARGE_CLAIM = 50
"""A queue for which more than 50 jobs fit claims half of them: those run while the storage finds the other half."""
MAX_SUSPECTS = 10
"""A queue with 10 jobs that wait for a spare host claims no more."""
MAX_KEPT_S = 60.0
"""Longest time that a host is kept free for a queue, and the pause before a host is kept for that queue again."""
NEVER = float("inf")


class Host(msgspec.Struct):
    capacity: int
    spare: bool = False
    """The host is for isolated runs, one at a time."""
    used: int = 0
    runs: int = 0
    running: dict[str, int] = {}
    """Number of runs by queue."""
    reserved: int = 0
    """Units that are reserved for the jobs of claims in flight."""
    stuck: dict[str, int] = {}
    """Number of runs by queue that were given up and may never end."""
    open: bool = True
    unresponsive: bool = False
    """The host does not answer at the moment, and gets no new runs."""

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved

    @property
    def takes(self) -> bool:
        return self.open and not (self.spare or self.unresponsive)


class QueueLoad(msgspec.Struct):
    """One queue that the worker serves: its settings, the capacity it uses, and when it may have work."""

    queue: str
    size: int = 10
    """Units that each run of the queue uses."""
    concurrency: int | None = None
    priority: int = 100
    running: int = 0
    unplaced: int = 0
    """Number of claimed jobs that wait for a host."""
    suspects: int = 0
    """Number of unplaced jobs that wait for a spare host."""
    claiming: int = 0
    """Limit of the claim in flight, 0 if there is none. A queue has one claim at a time."""
    reservations: dict[int, int] = {}
    """Number of jobs of the claim in flight for which units are reserved, by host."""
    planned: int = 0
    """Number of the last plan in which the queue had an order."""
    skipped: int = 0
    """Number of plans since then in which other queues had orders and its next job did not fit."""
    kept_from: float = 0.0
    """When a host may be kept free for the queue again."""
    woken: bool = False
    """A hint came after the last claim was sent: that claim may not have seen the job."""
    rests_until: float = 0.0
    """Nothing is claimed before this time, whatever hints come."""
    claim_at: float = 0.0
    """When to claim next: in the past if the queue may have work now, `NEVER` if it is not known to have work."""


class Capacity:
    """The hosts of one worker, and the queues that use them."""

    def __init__(self, host_capacity: int, max_runs: int | None = None) -> None:
        """`host_capacity` is in units; `max_runs` limits the number of runs on all hosts."""
        self.host_capacity = host_capacity
        self.runs = 0
        self.served: dict[str, QueueLoad] = {}
        self.hosts: dict[int, Host] = {}
        self._loads: dict[str, QueueLoad] = {}
        """All queues that were ever served: runs of a queue may outlast its service."""
        self._max_runs = max_runs
        self._unplaced = 0

    # Queues

    def serve(self, load: QueueLoad) -> None:
        """Begin to serve a queue, or serve it with other settings from now on."""
        load.size = min(load.size, self.host_capacity)  # A job that is larger than a host has one to itself.
        known = self._loads.setdefault(load.queue, load)
        for number, host in self.hosts.items():
            host.used += (load.size - known.size) * host.running.get(load.queue, 0)
            host.reserved += (load.size - known.size) * known.reservations.get(number, 0)
        known.size, known.concurrency, known.priority = load.size, load.concurrency, load.priority
        self.served[load.queue] = known

    def leave(self, queue: str) -> None:
        """Claim nothing more from a queue."""
        self.served.pop(queue, None)

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
        """The host for the next run of a queue, with most free units. An isolated run gets an empty spare host."""
        if isolated:
            spares = ((number, host) for number, host in self.hosts.items() if host.spare and host.open)
            return next((number for number, host in spares if not (host.unresponsive or host.runs)), None)
        load = self._loads[queue]
        size = load.size
        while load.reservations:  # The jobs of a claim go to few hosts: each host gets its jobs in one message.
            number = max(load.reservations, key=load.reservations.__getitem__)
            load.reservations[number] -= 1
            if not load.reservations[number]:
                del load.reservations[number]
            host = self.hosts.get(number)
            if host is not None:
                host.reserved -= size
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
        load, host = self._loads[queue], self.hosts[number]
        load.running += 1
        host.used += load.size
        host.runs += 1
        host.running[queue] = host.running.get(queue, 0) + 1
        self.runs += 1

    def gave_up(self, queue: str, number: int = 0) -> None:
        """A run on this host does not stop. It keeps its units, and no job waits for them."""
        stuck = self.hosts[number].stuck
        stuck[queue] = stuck.get(queue, 0) + 1

    def finished(self, queue: str, number: int = 0, *, given_up: bool = False) -> None:
        load, host = self._loads[queue], self.hosts[number]
        load.running -= 1
        host.used -= load.size
        host.runs -= 1
        host.running[queue] -= 1
        self.runs -= 1
        if given_up:
            host.stuck[queue] -= 1
        self._forget_host_if_over(number)

    def count_unplaced(self, queue: str, change: int, *, isolated: bool = False) -> None:
        """A claimed job waits for a host (`change` is 1), or does not wait any more (-1)."""
        load = self._loads[queue]
        load.unplaced += change
        load.suspects += change if isolated else 0
        self._unplaced += change

    # What is free

    def _free_units(self) -> dict[int, int]:
        """Free units of each host that takes runs, without those that waiting jobs need."""
        free = {number: host.free for number, host in self.hosts.items() if host.takes}
        if self._unplaced:
            for load in self._loads.values():
                _take(free, load.size, load.unplaced - load.suspects)
        return free

    def _slots(self, load: QueueLoad) -> int:
        """How many more runs of a queue its concurrency and `max_runs` allow, at most `MAX_CLAIM`."""
        slots = MAX_CLAIM
        if self._max_runs is not None:
            claiming = sum(load.claiming for load in self._loads.values())
            slots = min(slots, self._max_runs - self.runs - self._unplaced - claiming)
        return slots if load.concurrency is None else min(slots, load.concurrency - load.running - load.unplaced)

    def _fitting(self, load: QueueLoad, free: dict[int, int]) -> int:
        """How many more jobs of a queue fit into these free units."""
        return min(sum(units // load.size for units in free.values() if units > 0), self._slots(load))

    def _is_blocked(self, load: QueueLoad, free: dict[int, int]) -> bool:
        """Whether the next job of a queue does not fit now, but would fit if enough other runs ended."""
        return (
            max(free.values(), default=0) < load.size
            and any(self._can_ever_fit(load, number) for number, host in self.hosts.items() if host.takes)
            and self._slots(load) > 0
        )

    def _can_ever_fit(self, load: QueueLoad, number: int) -> bool:
        """Whether a job of a queue would fit on a host if all of its runs ended, except those that were given up."""
        host = self.hosts[number]
        stuck = sum(count * self._loads[queue].size for queue, count in host.stuck.items() if count)
        return load.size <= host.capacity - stuck


def _take(free: dict[int, int], size: int, count: int) -> dict[int, int]:
    """Take units for some jobs, each on the host with most free units. Returns the number of jobs by host."""
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
    """Number of plans so far that had orders."""
    _kept: tuple[int, str, float] | None = None
    """The host that is kept free, the queue that it is kept for, and until when."""

    # Work of queues

    def wake(self, queue: str) -> None:
        """A queue may have work."""
        load = self._loads.get(queue)
        if load is not None:
            load.woken = True
            load.claim_at = 0.0

    def sleep(self, queue: str) -> None:
        """A queue has no work after all."""
        load = self._loads[queue]
        load.claim_at, load.skipped = NEVER, 0

    def rest(self, queue: str, until: float) -> None:
        """Claim nothing from a queue before this time: its jobs were released, and would be released again."""
        self._loads[queue].rests_until = until

    @property
    def idle(self) -> bool:
        """No queue is known to have work, now or later, and no claim is in flight."""
        has_work = any(load.claim_at != NEVER for load in self.served.values())
        return not has_work and not any(load.claiming for load in self._loads.values())

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. Not counted are queues that are due now: those that have no
        order wait for the end of a run."""
        times = [max(load.claim_at, load.rests_until) for load in self.served.values()]
        return min((at for at in times if at > now), default=NEVER)

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
        free = self._free_units()
        loads = [load for load in self.served.values() if load.claim_at <= now and not load.claiming]
        return [load.queue for load in loads if self._is_blocked(load, free)]

    # Plans

    def plan(self, now: float) -> list[ClaimOrder]:
        """Decide what to claim. The orders are for different queues, and all of their jobs fit together."""
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
        left = [load for load in due if not load.claiming]
        ready = [load for load in self._not_withheld(left, free) if self._fitting(load, free) > 0]
        if not (ready or orders):
            return []
        for load in left:  # While a host is kept, only its own queue is counted as skipped.
            if (self._kept is None or self._kept[1] == load.queue) and self._is_blocked(load, free):
                load.skipped += 1
        self._plans += 1
        return orders + self._share_out(ready, free)

    def claimed(self, queue: str, limit: int, count: int, claim_at: float) -> None:
        """A claim of at most `limit` jobs got `count`. If it was full there may be work now, else at `claim_at`."""
        load = self._loads[queue]
        for number, jobs in load.reservations.items():
            if number in self.hosts:
                self.hosts[number].reserved -= jobs * load.size
        load.reservations.clear()
        load.claiming = 0
        may_have_more = count >= limit or load.woken
        load.claim_at = 0.0 if may_have_more else claim_at

    def _order(self, load: QueueLoad, free: dict[int, int], limit: int) -> ClaimOrder:
        """Order a claim, and reserve units for its jobs: they are taken from `free`."""
        load.claiming, load.planned, load.woken, load.skipped = limit, self._plans, False, 0
        load.reservations = _take(free, load.size, limit)
        for number, jobs in load.reservations.items():
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
            self._kept = None  # The job fitted elsewhere or is gone, or the host is gone.
            return []
        if now > until:
            load.kept_from = now + MAX_KEPT_S
        elif free[host] < load.size or self._slots(load) <= 0:
            return []
        self._kept = None
        for other in self.served.values():  # Other queues are served again before another host is kept.
            other.skipped = 0
        if load.kept_from > now:
            return []
        only = {host: free[host]}
        order = self._order(load, only, 1)
        free.update(only)
        return [order]

    def _not_withheld(self, loads: list[QueueLoad], free: dict[int, int]) -> list[QueueLoad]:
        """The queues that may be served while a host is kept: all of them, on the other hosts. The only host is kept
        from queues of a higher priority only after its queue was skipped 256 times."""
        if self._kept is None:
            return loads
        host, queue, _ = self._kept
        kept_for = self.served[queue]
        if len(free) == 1 and kept_for.skipped < MAX_SKIPPED**2:
            return [load for load in loads if load.priority > kept_for.priority]
        del free[host]
        return loads

    # Sharing

    def _share_out(self, ready: list[QueueLoad], free: dict[int, int]) -> list[ClaimOrder]:
        """The orders of several queues: higher priorities first, and in every 16th plan a lower queue before them.

        Queues of one priority get equal shares, the one with the fewest runs first. The next queues get what it leaves.
        """
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
