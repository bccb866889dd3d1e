"""Capacity of one worker: the hosts in which its runs go on, and how much of it each queue uses.

A host is a child process, or the worker's own event loop. `Capacity` is mutable bookkeeping with one owner, the claimer
of the worker, and is used on the worker's event loop only: executors report to it which hosts there are and where runs
start and finish; `claim_planner.py` decides from it what to claim. It does no I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MAX_CLAIM = 250
"""Most jobs of one claim."""
NEVER = float("inf")


class Host(msgspec.Struct):
    """Where runs go on."""

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
    """It takes more runs."""
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

    def __init__(
        self,
        host_capacity: int,
        served: Iterable[QueueLoad] = (),
        *,
        max_runs: int | None = None,
        hosts: Iterable[int] = (0,),
    ) -> None:
        """`host_capacity` is that of one host, in units; `max_runs` limits the runs of all hosts, whatever their
        size."""
        self.host_capacity = host_capacity
        self.runs = 0
        """Runs that are going on."""
        self.served: dict[str, QueueLoad] = {}
        self.hosts: dict[int, Host] = {}
        self._leaving: dict[str, QueueLoad] = {}
        """Queues that are not served any more, and whose last runs have not ended."""
        self._max_runs = max_runs
        self._unplaced = 0
        for number in hosts:
            self.open_host(number)
        for load in served:
            self.serve(load)

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
        """Stop serving a queue. It is remembered until its last run has ended."""
        load = self.served.pop(queue, None)
        if load is not None:
            self._leaving[queue] = load
            self.forget_if_over(load)

    def find_load(self, queue: str) -> QueueLoad:
        """The load of a queue that is served, or is being left."""
        return self.served[queue] if queue in self.served else self._leaving[queue]

    def forget_if_over(self, load: QueueLoad) -> None:
        """Forget a queue that is not served any more and has nothing here."""
        if not (load.running or load.claiming or load.unplaced):
            self._leaving.pop(load.queue, None)

    # Hosts

    @property
    def units(self) -> int:
        """Capacity of all hosts together, without the spare ones."""
        return sum(host.capacity for host in self.hosts.values() if host.open and not host.spare)

    @property
    def used(self) -> int:
        """Units that runs use, on all hosts."""
        return sum(host.used for host in self.hosts.values())

    def open_host(self, number: int, *, spare: bool = False) -> None:
        """Add a host."""
        self.hosts[number] = Host(self.host_capacity, spare)

    def close_host(self, number: int) -> None:
        """Give a host no more runs."""
        if number in self.hosts:
            self.hosts[number].open = False

    def drop_host(self, number: int) -> None:
        """Remove a host that has ended, once each of its runs has been reported as finished."""
        if number in self.hosts:
            self.hosts[number].open = False
            self._drop_if_over(number)

    def set_responsive(self, number: int, responsive: bool) -> None:
        """Note whether a host answers: one that does not gets no new runs."""
        self.hosts[number].unresponsive = not responsive

    def find_host(self, queue: str, *, isolated: bool = False) -> int | None:
        """The host for the next run of a queue: the emptiest. An isolated run gets a spare one in which nothing
        runs."""
        if isolated:
            spare = (
                n for n, host in self.hosts.items() if host.spare and host.open and not (host.unresponsive or host.runs)
            )
            return next(spare, None)
        load = self.find_load(queue)
        size = load.size
        while load.reservations:  # What one claim brings goes to few hosts, and travels to each in one message.
            number = self._take_reservation(load)
            host = self.hosts.get(number)
            if host is not None and host.takes and host.free >= size:
                return number
        fits = [(host.free, -number) for number, host in self.hosts.items() if host.takes and host.free >= size]
        return -max(fits)[1] if fits else None

    def _drop_if_over(self, number: int) -> None:
        host = self.hosts[number]
        if not (host.open or host.runs):
            del self.hosts[number]

    # Runs

    def started(self, queue: str, number: int = 0) -> None:
        """A run of this queue has started on this host."""
        load, host = self.find_load(queue), self.hosts[number]
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
        """A run of this queue on this host is over."""
        load, host = self.find_load(queue), self.hosts[number]
        load.running -= 1
        host.used -= load.size
        host.runs -= 1
        host.running[queue] -= 1
        self.runs -= 1
        if given_up:
            host.stuck[queue] -= 1
        self._drop_if_over(number)
        self.forget_if_over(load)

    def add_unplaced(self, queue: str, *, isolated: bool = False) -> None:
        """A job was claimed and no host can take it: it waits for one."""
        load = self.find_load(queue)
        load.unplaced += 1
        load.suspects += 1 if isolated else 0
        self._unplaced += 1

    def remove_unplaced(self, queue: str, *, isolated: bool = False) -> None:
        """A job that waited for a host has one now, or was given back."""
        load = self.find_load(queue)
        load.unplaced -= 1
        load.suspects -= 1 if isolated else 0
        self._unplaced -= 1
        self.forget_if_over(load)

    # What is free

    def free_units(self) -> dict[int, int]:
        """Units that are free on each host that takes runs, less those for jobs that wait for a host."""
        free = {number: host.free for number, host in self.hosts.items() if host.takes}
        if self._unplaced:
            for load in [*self.served.values(), *self._leaving.values()]:
                _take(free, load.size, load.unplaced - load.suspects)
        return free

    def runs_left(self) -> int:
        """How many more runs `max_runs` allows."""
        if self._max_runs is None:
            return MAX_CLAIM * len(self.served)
        claiming = sum(load.claiming for load in [*self.served.values(), *self._leaving.values()])
        return self._max_runs - self.runs - self._unplaced - claiming

    def fitting(self, load: QueueLoad, free: dict[int, int]) -> int:
        """How many more jobs of a queue fit into these free units."""
        count = min(sum(units // load.size for units in free.values() if units > 0), self.runs_left(), MAX_CLAIM)
        return count if load.concurrency is None else min(count, load.concurrency - load.running - load.unplaced)

    def has_slot(self, load: QueueLoad) -> bool:
        """Do `max_runs` and the queue's concurrency allow another run of it?"""
        return self.runs_left() > 0 and (load.concurrency is None or load.running + load.unplaced < load.concurrency)

    def is_blocked(self, load: QueueLoad, free: dict[int, int]) -> bool:
        """Does the next job of a queue not fit now, and would it fit if enough other runs ended?"""
        return (
            max(free.values(), default=0) < load.size
            and any(self.can_ever_fit(load, number) for number, host in self.hosts.items() if host.takes)
            and self.has_slot(load)
        )

    def can_ever_fit(self, load: QueueLoad, number: int) -> bool:
        """Would a job of this queue fit on this host, if all runs there ended that have not been given up?"""
        host = self.hosts[number]
        stuck = sum(count * self.find_load(queue).size for queue, count in host.stuck.items() if count)
        return load.size <= host.capacity - stuck

    # Units for a claim on its way

    def reserve(self, load: QueueLoad, free: dict[int, int], count: int) -> None:
        """Reserve units for the jobs that a claim may bring, and take them from `free`."""
        load.reserved_units_per_job = load.size
        for number, jobs in _take(free, load.size, count).items():
            load.reservations[number] = jobs * load.size
            self.hosts[number].reserved += jobs * load.size

    def release_reservations(self, load: QueueLoad) -> None:
        """The claim has been answered: free what its jobs have not used."""
        for number, units in load.reservations.items():
            if number in self.hosts:
                self.hosts[number].reserved -= units
        load.reservations.clear()

    def _take_reservation(self, load: QueueLoad) -> int:
        """The host in which most is reserved for a queue: so a claim that brings few jobs spreads them over hosts."""
        number = max(load.reservations, key=load.reservations.__getitem__)
        load.reservations[number] -= load.reserved_units_per_job
        if load.reservations[number] <= 0:
            del load.reservations[number]
        if number in self.hosts:
            self.hosts[number].reserved -= load.reserved_units_per_job
        return number


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
