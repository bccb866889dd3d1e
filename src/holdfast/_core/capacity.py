"""Capacity of one worker: the hosts in which its jobs run, and the part of them that each queue uses.

A host is a child process, or the worker's own event loop. `Capacity` is mutable bookkeeping with one owner, the claimer
of the worker; executors report hosts and runs to it. `ClaimPlanner` decides from it which queues to claim from. Both
are used on the worker's event loop only, do no I/O and read no clock: `now` is passed in (monotonic seconds).
"""

from __future__ import annotations

import msgspec

MAX_CLAIM = 250
"""Most jobs of one claim."""
LENT_TIMES = 3
"""Runs that wait lend at most three times the capacity of their host, so that four times of it is used at most."""
MAX_SUSPECTS = 10
"""A queue with 10 jobs that wait for a spare host claims no more."""
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
    waiting: dict[str, int] = {}
    """Number of runs by queue that wait for another job, and lend their units."""
    waiting_units: int = 0
    open: bool = True
    unresponsive: bool = False
    """The host does not answer at the moment, and gets no new runs."""

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved

    @property
    def lent(self) -> int:
        """Units that jobs may use for which a run waits. They are not `free`."""
        return min(self.waiting_units, LENT_TIMES * self.capacity)

    def free_for(self, load: QueueLoad) -> int:
        """Units that are free for jobs of a queue."""
        return self.free + self.lent if load.waited else self.free

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
    kept_from: float = 0.0
    """When a host may be kept free for the queue again."""
    waited: bool = False
    """A run of this worker waits for a job of the queue: its jobs may use units that such runs lend."""
    woken: bool = False
    """A hint came after the last claim was sent: that claim may not have seen the job."""
    rests_until: float = 0.0
    """Nothing is claimed before this time, whatever hints come."""
    claim_at: float = 0.0
    """When to claim next: 0 if the queue may have work now, `NEVER` if it is not known to have work."""

    @property
    def slots(self) -> int:
        """How many more runs the queue's concurrency allows, at most `MAX_CLAIM`."""
        return MAX_CLAIM if self.concurrency is None else self.concurrency - self.running - self.unplaced


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
        self.max_runs = max_runs
        self.runs_left: int | None = None
        """How many more runs the worker may start before it ends; None for no limit. The claimer counts them."""
        self._unplaced = 0
        self._with_unplaced: dict[str, QueueLoad] = {}
        """Queues with jobs that wait for a host."""
        self.waits: dict[tuple[str, str], int] = {}
        """Number of runs of one queue that wait for jobs of another one."""
        self._lending = 0
        """Number of runs that wait for jobs of any queue."""
        self._claiming = 0
        """Sum of the limits of all claims in flight."""

    # Queues

    def serve(self, load: QueueLoad) -> None:
        """Begin to serve a queue, or serve it with other settings from now on."""
        load.size = min(load.size, self.host_capacity)  # A job that is larger than a host has one to itself.
        known = self._loads.setdefault(load.queue, load)
        for number, host in self.hosts.items():
            host.used += (load.size - known.size) * host.running.get(load.queue, 0)
            host.waiting_units += (load.size - known.size) * host.waiting.get(load.queue, 0)
            host.reserved += (load.size - known.size) * known.reservations.get(number, 0)
        known.size, known.concurrency, known.priority = load.size, load.concurrency, load.priority
        known.waited = any(target == load.queue for _, target in self.waits)
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

    @property
    def lent(self) -> int:
        """Units that runs lend, of all hosts together."""
        return sum(host.lent for host in self.hosts.values() if host.open and not host.spare)

    def usage(self) -> dict[str, int]:
        """Units that the runs of each queue use."""
        units: dict[str, int] = {}
        for host in self.hosts.values():
            for queue, runs in host.running.items():
                if runs:
                    units[queue] = units.get(queue, 0) + runs * self._loads[queue].size
        return units

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
                # Other claims may have units that are lent.
                if host.takes and (host.free >= size or host.free + host.lent >= size):
                    return number
        hosts = ((host.free_for(load), -number) for number, host in self.hosts.items() if host.takes)
        fits = [place for place in hosts if place[0] >= size]
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
        if load.concurrency is not None:
            self._slots_changed(load)

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
        if load.concurrency is not None:
            self._slots_changed(load)

    def count_unplaced(self, queue: str, change: int, *, isolated: bool = False) -> None:
        """A claimed job waits for a host (`change` is 1), or does not wait any more (-1)."""
        load = self._loads[queue]
        load.unplaced += change
        load.suspects += change if isolated else 0
        self._unplaced += change
        if load.unplaced:
            self._with_unplaced[queue] = load
        else:
            del self._with_unplaced[queue]
        self._slots_changed(load)

    # Runs that wait for other jobs

    def begin_wait(self, queue: str, target: str) -> None:
        """A run of `queue` waits for a job of `target`."""
        self.waits[queue, target] = self.waits.get((queue, target), 0) + 1
        self._set_waited(target)

    def end_wait(self, queue: str, target: str) -> None:
        """A run of `queue` does not wait for jobs of `target` any more."""
        self.waits[queue, target] -= 1
        if not self.waits[queue, target]:
            del self.waits[queue, target]
        self._set_waited(target)

    def lend(self, queue: str, number: int, change: int) -> None:
        """A run begins (1) or ends (-1) to lend its units to the queues for which any run waits."""
        load, host = self._loads[queue], self.hosts[number]
        host.waiting[queue] = host.waiting.get(queue, 0) + change
        host.waiting_units += change * load.size
        self._lending += change
        if not host.waiting[queue]:
            del host.waiting[queue]

    def _set_waited(self, queue: str) -> None:
        load = self._loads.get(queue)
        if load is not None:
            load.waited = any(target == queue for _, target in self.waits)

    def _slots_changed(self, load: QueueLoad) -> None:
        """The number of runs that a queue may start now has changed."""

    # What is free

    def _free_units(self) -> dict[int, int]:
        """Free units of each host that takes runs, without those that waiting jobs need."""
        free = {number: host.free for number, host in self.hosts.items() if host.takes}
        for load in self._with_unplaced.values():
            take(free, load.size, load.unplaced - load.suspects)
        return free

    def _units(self, free: dict[int, int], waited: bool) -> dict[int, int]:
        """The free units of each host, with those that are lent if a run waits for the jobs."""
        return {number: units + self.hosts[number].lent for number, units in free.items()} if waited else free

    def _run_slots(self, waited: bool) -> int:
        """How many more runs `max_runs` and `runs_left` allow, at most `MAX_CLAIM`. A run that waits for another one
        lends its own."""
        most = MAX_CLAIM if self.runs_left is None else min(MAX_CLAIM, self.runs_left - self._claiming)
        if self.max_runs is None:
            return most
        lent = min(self._lending, LENT_TIMES * self.max_runs) if waited else 0
        return min(most, self.max_runs + lent - self.runs - self._unplaced - self._claiming)

    def _fitting(self, load: QueueLoad, free: dict[int, int]) -> int:
        """How many more jobs of a queue fit into these free units."""
        units = self._units(free, load.waited).values()
        fitting = sum(count // load.size for count in units if count > 0)
        return min(fitting, load.slots, self._run_slots(load.waited))

    def _is_blocked(self, size: int, free: dict[int, int]) -> bool:
        """Whether a job of this size does not fit now, but would fit if enough runs ended."""
        return max(free.values(), default=0) < size and any(
            self._can_ever_fit(size, number) for number, host in self.hosts.items() if host.takes
        )

    def _can_ever_fit(self, size: int, number: int) -> bool:
        """Whether a job would fit on a host if all of its runs ended, except those that were given up."""
        host = self.hosts[number]
        stuck = sum(count * self._loads[queue].size for queue, count in host.stuck.items() if count)
        return size <= host.capacity - stuck


def take(free: dict[int, int], size: int, count: int) -> dict[int, int]:
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
