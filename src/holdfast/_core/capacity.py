"""Which queues to claim from, how much, and into which room: capacity as numbers. Pure: no I/O, and `now` is passed in
(monotonic seconds).

A room is where runs go on: a child process, or the worker's own loop. A worker never claims more than it can start
now. Queues share it by their priority, those of one priority equally; now and then a lower one goes first, and a large
job is waited for, so that none starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

LOWER_FIRST_EVERY = 16
"""Of so many plans, one begins with the lower queue that was served longest ago; and a job that did not fit so many
times is waited for."""
MAX_CLAIM = 250
LARGE_CLAIM = 50
"""What fits beyond this is claimed in halves: the first is run while the storage looks for the second."""
MAX_SUSPECTS = 10
"""With so many jobs of a queue in hand that wait for a spare room, no more of it are claimed."""
MAX_BLOCK_S = 60.0
"""For so long others are held back so that a large job finds room."""
NEVER = float("inf")


class Host(msgspec.Struct):
    """Where runs go on."""

    capacity: int
    spare: bool = False
    """For one run at a time, that must be alone."""
    used: int = 0
    runs: int = 0
    running: dict[str, int] = {}
    """Runs of each queue."""
    reserved: int = 0
    """What claims that are on their way may bring."""
    stuck: dict[str, int] = {}
    """Runs of each queue that were given up, and may never end."""
    open: bool = True
    """It takes more runs."""
    deaf: bool = False
    """It does not answer at the moment: better give it nothing."""

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved

    @property
    def takes(self) -> bool:
        return self.open and not (self.spare or self.deaf)


class QueueLoad(msgspec.Struct):
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
    in_hand: int = 0
    """Jobs that were claimed and wait for a room."""
    suspects: int = 0
    """Those of them that wait for a spare one."""
    asked: int = 0
    """Jobs of a claim that is on its way. There is one at a time."""
    places: dict[int, int] = {}
    """The rooms that it was planned for, and what is reserved there."""
    place_size: int = 0
    """For each of its jobs."""
    passed_over: int = 0
    """Plans in which it had work, and its next job did not fit."""
    blocks_since: float = NEVER
    """Since when others are held back for it."""
    rests_until: float = 0.0
    """Until when nothing is claimed, whatever is heard."""
    claim_at: float = 0.0
    """When to claim from it next; in the past if it may have work now, `NEVER` if nothing is known of any."""


class ClaimOrder(msgspec.Struct, frozen=True):
    """Claim up to `limit` jobs."""

    queue: str
    limit: int


class Capacity:
    """The rooms of one worker, and the queues that it serves. `capacity` is that of one room."""

    def __init__(
        self, capacity: int, served: Iterable[QueueLoad] = (), *, most: int | None = None, rooms: Iterable[int] = (0,)
    ) -> None:
        self.room_capacity = capacity
        self.runs = 0
        self._most = most
        """Runs at the same time, whatever their size."""
        self._rooms: dict[int, Host] = {}
        for number in rooms:
            self.open(number)
        self._served: dict[str, QueueLoad] = {}
        self._leaving: dict[str, QueueLoad] = {}
        """Queues that are not served any more, and whose last runs have not ended."""
        for queue in served:
            self.serve(queue)
        self._plans = 0
        self._hold_after = 0
        self._held: dict[int, str] = {}
        """Rooms that are kept for a queue whose jobs have not fitted anywhere for long, until one does."""
        self._claims = 0
        self._in_hand = 0

    # Queues

    @property
    def queues(self) -> list[str]:
        return list(self._served)

    def serves(self, queue: str) -> bool:
        return queue in self._served

    def serve(self, served: QueueLoad) -> None:
        """Begin to serve a queue, or serve it on other terms from now on."""
        served.size = min(served.size, self.room_capacity)  # One that is larger than everything runs alone.
        known = self._served.get(served.queue) or self._leaving.pop(served.queue, None)
        if known is None:
            self._served[served.queue] = served
            return
        for room in self._rooms.values():
            room.used += (served.size - known.size) * room.running.get(served.queue, 0)
        known.size, known.concurrency, known.priority = served.size, served.concurrency, served.priority
        self._served[served.queue] = known

    def leave(self, queue: str) -> None:
        """Claim nothing from this queue any more."""
        served = self._served.pop(queue, None)
        if served is not None:
            self._leaving[queue] = served
            self._forget_if_over(served)

    def wake(self, queue: str) -> None:
        """There may be work."""
        if queue in self._served:
            self._served[queue].woken = True
            self._served[queue].claim_at = 0.0

    def rest(self, queue: str, until: float) -> None:
        """Its jobs were given back at once: to claim them again at once would help nobody."""
        if queue in self._served:
            self._served[queue].rests_until = until

    def sleep(self, queue: str) -> None:
        """It has no work after all."""
        served = self._served.get(queue)
        if served is not None:
            served.claim_at, served.passed_over, served.blocks_since = NEVER, 0, NEVER

    def _find(self, queue: str) -> QueueLoad:
        return self._served[queue] if queue in self._served else self._leaving[queue]

    def _forget_if_over(self, served: QueueLoad) -> None:
        if not (served.running or served.asked or served.in_hand):
            self._leaving.pop(served.queue, None)

    # Rooms

    @property
    def capacity(self) -> int:
        """Of all rooms together."""
        return sum(room.capacity for room in list(self._rooms.values()) if room.open and not room.spare)

    @property
    def used(self) -> int:
        return sum(room.used for room in list(self._rooms.values()))

    def open(self, number: int, *, spare: bool = False) -> None:
        """There is a new room."""
        self._rooms[number] = Host(self.room_capacity, spare)

    def shut(self, number: int) -> None:
        """A room takes no more runs."""
        if number in self._rooms:
            self._rooms[number].open = False

    def drop(self, number: int) -> None:
        """A room is gone. Its runs are told one by one."""
        if number in self._rooms:
            self._rooms[number].open = False
            self._drop_if_over(number)

    def hears(self, number: int, hears: bool) -> None:
        self._rooms[number].deaf = not hears

    def find_room(self, queue: str, *, alone: bool = False) -> int | None:
        """A room for the next run of this queue, the emptiest; for one that must be alone, a spare one in which nothing
        runs."""
        if alone:
            spare = (n for n, room in self._rooms.items() if room.spare and room.open and not (room.deaf or room.runs))
            return next(spare, None)
        served = self._find(queue)
        size = served.size
        while served.places:  # Where it was planned for: what one claim brings goes to few rooms, and travels together.
            number = self._take_back_a_place(served)
            room = self._rooms.get(number)
            if room is not None and room.takes and room.free >= size:
                return number
        fits = [(room.free, -number) for number, room in self._rooms.items() if room.takes and room.free >= size]
        return -max(fits)[1] if fits else None

    def started(self, queue: str, room: int = 0) -> None:
        served, place = self._find(queue), self._rooms[room]
        served.running += 1
        place.used += served.size
        place.runs += 1
        place.running[queue] = place.running.get(queue, 0) + 1
        self.runs += 1

    def gave_up(self, queue: str, room: int = 0) -> None:
        """A run does not stop. It keeps its room, and nobody waits for that."""
        stuck = self._rooms[room].stuck
        stuck[queue] = stuck.get(queue, 0) + 1

    def ended(self, queue: str, room: int = 0, *, given_up: bool = False) -> None:
        served, place = self._find(queue), self._rooms[room]
        served.running -= 1
        place.used -= served.size
        place.runs -= 1
        place.running[queue] -= 1
        self.runs -= 1
        if given_up:
            place.stuck[queue] -= 1
        self._drop_if_over(room)
        self._forget_if_over(served)

    def take_in_hand(self, queue: str, *, alone: bool = False) -> None:
        """A job was claimed and finds no room: it waits for one."""
        served = self._find(queue)
        served.in_hand += 1
        served.suspects += alone
        self._in_hand += 1

    def out_of_hand(self, queue: str, *, alone: bool = False) -> None:
        """It has found one, or was given back."""
        served = self._find(queue)
        served.in_hand -= 1
        served.suspects -= alone
        self._in_hand -= 1
        self._forget_if_over(served)

    def _drop_if_over(self, number: int) -> None:
        room = self._rooms[number]
        if not (room.open or room.runs):
            del self._rooms[number]

    # Claims

    @property
    def claiming(self) -> bool:
        """Is a claim on its way?"""
        return self._claims > 0

    def plan(self, now: float) -> list[ClaimOrder]:
        """What to claim. No two orders are for one queue, and together they fit."""
        due = [
            queue
            for queue in self._served.values()
            if queue.claim_at <= now and queue.rests_until <= now and not queue.asked and queue.suspects < MAX_SUSPECTS
        ]
        if not due:
            return []
        frees = self._frees()
        if len(due) == 1 and not self._held and (fitting := self._fitting(due[0], frees)) > 0:
            self._plans += 1
            limit = _at_once(fitting)
            self._reserve(due[0], frees, limit)
            return self._ordered([ClaimOrder(due[0].queue, limit)])
        orders = self._fill_held_rooms(due, frees, now)
        ready = self._without_the_blocked([queue for queue in due if not queue.places], frees, now)
        if not (ready or orders):
            return []
        self._plans += 1
        return self._ordered(orders + self._shared_out(ready, frees, len(orders)))

    def _shared_out(self, ready: list[QueueLoad], frees: dict[int, int], ordered: int) -> list[ClaimOrder]:
        """What several queues get: the higher ones first, and now and then a lower one before them."""
        orders: list[ClaimOrder] = []
        runs_left = self._runs_left() - ordered
        tiers = sorted({queue.priority for queue in ready}, reverse=True)
        if self._plans % LOWER_FIRST_EVERY == 0 and len(tiers) > 1:
            below = [queue for queue in ready if queue.priority < tiers[0]]
            longest = min(below, key=lambda queue: (queue.planned, queue.priority))
            orders.append(ClaimOrder(longest.queue, 1))
            self._reserve(longest, frees, 1)
            runs_left -= 1
            ready.remove(longest)
        for tier in tiers:
            shares = self._share([queue for queue in ready if queue.priority == tier], frees, runs_left)
            runs_left -= sum(order.limit for order in shares)
            orders += shares
        return orders

    def _ordered(self, orders: list[ClaimOrder]) -> list[ClaimOrder]:
        """These claims are on their way."""
        for order in orders:
            served = self._served[order.queue]
            served.asked, served.planned, served.woken = order.limit, self._plans, False
            served.passed_over, served.blocks_since = 0, NEVER
            self._claims += 1
        return orders

    def claimed(self, queue: str, asked: int, got: int, claim_at: float) -> None:
        """A claim came back. A full one may have left work; `claim_at` is when else there may be some."""
        served = self._find(queue)
        for number, units in served.places.items():
            if number in self._rooms:
                self._rooms[number].reserved -= units
        served.places.clear()
        self._claims -= served.asked > 0
        served.asked = 0
        served.claim_at = 0.0 if got >= asked or served.woken else claim_at
        self._forget_if_over(served)

    def next_claim_at(self, now: float) -> float:
        """When the next claim is due, as far as is known. What is due by now and was not planned waits for a run's
        end."""
        times = [max(queue.claim_at, queue.rests_until) for queue in self._served.values()]
        return min((at for at in times if at > now), default=NEVER)

    @property
    def idle(self) -> bool:
        """No queue is known to have work, now or later."""
        return all(queue.claim_at == NEVER for queue in self._served.values())

    def full(self) -> list[str]:
        """Queues that have no room. From any thread."""
        frees = self._frees()
        return [queue.queue for queue in list(self._served.values()) if self._fitting(queue, frees) <= 0]

    def asleep(self, now: float) -> list[str]:
        """Queues that have room and are not known to have work."""
        frees = self._frees()
        return [q.queue for q in self._served.values() if q.claim_at > now and self._fitting(q, frees) > 0]

    def crowded(self, now: float) -> list[str]:
        """Queues that should have work, of which nothing fits."""
        frees = self._frees()
        return [q.queue for q in self._served.values() if q.claim_at <= now and not q.asked and self._crowded(q, frees)]

    def _frees(self) -> dict[int, int]:
        """What is free in each room, less what was claimed and has no room yet."""
        frees = {number: room.free for number, room in list(self._rooms.items()) if room.takes}
        if self._in_hand:
            for queue in [*self._served.values(), *self._leaving.values()]:
                _take(frees, queue.size, queue.in_hand - queue.suspects)
        return frees

    def _reserve(self, served: QueueLoad, frees: dict[int, int], count: int) -> None:
        """Hold room for what a claim may bring. There is one claim of a queue at a time."""
        served.place_size = served.size
        for number, jobs in _take(frees, served.size, count).items():
            served.places[number] = jobs * served.size
            self._rooms[number].reserved += jobs * served.size

    def _take_back_a_place(self, served: QueueLoad) -> int:
        """In the room in which most is reserved for it: a claim that brings few jobs brings them to different rooms."""
        number = max(served.places, key=served.places.__getitem__)
        served.places[number] -= served.place_size
        if served.places[number] <= 0:
            del served.places[number]
        if number in self._rooms:
            self._rooms[number].reserved -= served.place_size
        return number

    def _runs_left(self) -> int:
        if self._most is None:
            return MAX_CLAIM * len(self._served)
        asked = sum(queue.asked for queue in [*self._served.values(), *self._leaving.values()])
        return self._most - self.runs - self._in_hand - asked

    def _fitting(self, queue: QueueLoad, frees: dict[int, int]) -> int:
        """How many jobs of a queue fit."""
        room = min(sum(free // queue.size for free in frees.values() if free > 0), self._runs_left(), MAX_CLAIM)
        return room if queue.concurrency is None else min(room, queue.concurrency - queue.running - queue.in_hand)

    def _has_slot(self, queue: QueueLoad) -> bool:
        """May another of its jobs run, as far as numbers go?"""
        return self._runs_left() > 0 and (
            queue.concurrency is None or queue.running + queue.in_hand < queue.concurrency
        )

    def _crowded(self, queue: QueueLoad, frees: dict[int, int]) -> bool:
        """Would its next job fit, if only enough of what runs ended?"""
        rooms = [room for room in list(self._rooms.values()) if room.takes]
        most = max((room.capacity - self._units(room.stuck) for room in rooms), default=0)
        return max(frees.values(), default=0) < queue.size <= most and self._has_slot(queue)

    def _units(self, runs: dict[str, int]) -> int:
        return sum(count * self._find(queue).size for queue, count in runs.items() if count)

    def _without_the_blocked(self, due: list[QueueLoad], frees: dict[int, int], now: float) -> list[QueueLoad]:
        """Queues that have room. Where a large job has waited long enough for some, only higher queues go on until
        enough has ended, and at last not even those; but not for ever, it may be a long run that has to end."""
        ready = [queue for queue in due if self._fitting(queue, frees) > 0]
        blocked_by = -1
        for queue in due:
            if not self._crowded(queue, frees):
                continue
            queue.passed_over += 1
            if queue.passed_over >= LOWER_FIRST_EVERY and len(frees) > 1:
                self._hold_a_room(queue, frees, now)
            elif queue.passed_over >= LOWER_FIRST_EVERY:
                queue.blocks_since = min(queue.blocks_since, now)
                if now - queue.blocks_since > MAX_BLOCK_S:
                    queue.passed_over, queue.blocks_since = 0, NEVER
                    continue
                blocked_by = max(blocked_by, queue.priority)
            if queue.passed_over >= LOWER_FIRST_EVERY**2:
                return []
        return [queue for queue in ready if queue.priority > blocked_by]

    def _hold_a_room(self, queue: QueueLoad, frees: dict[int, int], now: float) -> None:
        """Give the emptiest room to nobody else, until a job of this queue fits into it. One room at a time, and then
        none for a while: it is a floor for low queues, no more."""
        if not self._held and self._plans >= self._hold_after:
            emptiest = max(frees, key=frees.__getitem__)
            self._held[emptiest] = queue.queue
            queue.blocks_since = now
            del frees[emptiest]

    def _fill_held_rooms(self, due: Sequence[QueueLoad], frees: dict[int, int], now: float) -> list[ClaimOrder]:
        """Orders for queues whose room has become free enough. What is held and is not, is not there for others."""
        orders: list[ClaimOrder] = []
        for number, name in list(self._held.items()):
            queue = self._served.get(name)
            if queue is None or queue not in due or number not in frees:
                del self._held[number]  # It found room elsewhere, or has no work; or the room is gone.
            elif now - queue.blocks_since > MAX_BLOCK_S:
                del self._held[number]
                self._hold_after = self._plans + LOWER_FIRST_EVERY
                queue.passed_over, queue.blocks_since = 0, NEVER
            elif frees[number] >= queue.size and self._has_slot(queue):
                del self._held[number]
                self._hold_after = self._plans + LOWER_FIRST_EVERY
                frees[number] -= queue.size
                queue.places[number] = queue.place_size = queue.size
                self._rooms[number].reserved += queue.size
                orders.append(ClaimOrder(name, 1))
            else:
                del frees[number]
        return orders

    def _share(self, tier: Sequence[QueueLoad], frees: dict[int, int], runs_left: int) -> list[ClaimOrder]:
        """Equal parts for the queues of one priority; what one leaves goes to those after it. The queue with the
        fewest runs is served first."""
        orders: list[ClaimOrder] = []
        left = sorted(tier, key=lambda queue: (queue.running * queue.size, queue.planned))
        while left and runs_left > 0 and (free := sum(free for free in frees.values() if free > 0)) > 0:
            queue = left.pop(0)
            share = max(1, free // (len(left) + 1) // queue.size)
            limit = min(self._fitting(queue, frees), share, runs_left)
            if limit > 0:
                orders.append(ClaimOrder(queue.queue, limit))
                self._reserve(queue, frees, limit)
                runs_left -= limit
        return orders


def _at_once(fitting: int) -> int:
    """How many of the jobs that fit are claimed now."""
    return min(fitting, max(fitting // 2, LARGE_CLAIM))


def _take(frees: dict[int, int], size: int, count: int) -> dict[int, int]:
    """Use up room for some jobs, each where most is free: how many in which room."""
    if len(frees) == 1:
        (number,) = frees
        frees[number] -= size * count
        return {number: count}
    taken: dict[int, int] = {}
    for _ in range(count if frees else 0):
        number = max(frees, key=frees.__getitem__)
        frees[number] -= size
        taken[number] = taken.get(number, 0) + 1
    return taken
