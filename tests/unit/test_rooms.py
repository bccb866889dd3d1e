"""A fleet of several rooms: what fits where, what must be alone, and what becomes of a room that shuts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._core.capacity import MAX_SUSPECTS, NEVER, Capacity, ClaimOrder, QueueLoad

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.


def fleet(*served: QueueLoad, rooms: int = 2, most: int | None = None) -> Capacity:
    return Capacity(100, served, most=most, rooms=range(1, rooms + 1))


def start(fleet: Capacity, queue: str, *, alone: bool = False) -> int:
    """A run goes where the fleet says."""
    room = fleet.find_room(queue, alone=alone)
    assert room is not None, f"there is no room for a run of {queue}"
    fleet.started(queue, room)
    return room


def limits(orders: Iterable[ClaimOrder]) -> dict[str, int]:
    return {order.queue: order.limit for order in orders}


# Which room


def test_runs_spread_over_rooms_evenly() -> None:
    one = fleet(QueueLoad("q"), rooms=3)
    assert [start(one, "q") for _ in range(6)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("brought", [2, 6, 30])
def test_what_a_claim_brings_spreads_over_the_rooms_it_was_planned_for(brought: int) -> None:
    one = fleet(QueueLoad("q"), rooms=3)
    (order,) = one.plan(0.0)
    assert order.limit == 30
    rooms = [start(one, "q") for _ in range(brought)]
    one.claimed("q", order.limit, brought, NEVER)
    assert max(map(rooms.count, (1, 2, 3))) - min(map(rooms.count, (1, 2, 3))) <= 1
    assert one.used == 10 * brought
    assert [one.find_room("q") is None, one.plan(0.0)] == [brought == 30, []]


def test_a_run_whose_room_has_shut_since_it_was_planned_goes_to_another() -> None:
    one = fleet(QueueLoad("q"))
    one.plan(0.0)
    one.shut(1)
    assert {start(one, "q") for _ in range(10)} == {2}
    assert one.find_room("q") is None


def test_a_run_goes_into_the_room_that_has_most_free() -> None:
    one = fleet(QueueLoad("large", size=50), QueueLoad("small", size=20))
    assert [start(one, "large"), start(one, "small"), start(one, "small")] == [1, 2, 2]
    assert start(one, "small") == 2  # 50 and 60 are free.
    assert start(one, "small") == 1  # 50 and 40.


def test_a_run_finds_no_room_where_less_is_free_than_it_takes() -> None:
    one = fleet(QueueLoad("large", size=60), QueueLoad("small", size=30))
    for _ in range(4):
        start(one, "small")
    assert one.capacity - one.used == 80
    assert one.find_room("large") is None
    one.ended("small", 2)
    assert one.find_room("large") == 2


def test_what_is_larger_than_a_room_needs_an_empty_one() -> None:
    one = fleet(QueueLoad("huge", size=5_000), QueueLoad("small", size=1), rooms=1)
    start(one, "small")
    assert one.find_room("huge") is None
    one.ended("small", 1)
    start(one, "huge")
    assert one.find_room("small") is None


def test_a_queue_gets_what_fits_into_each_room_and_not_into_their_sum() -> None:
    assert limits(fleet(QueueLoad("q", size=60), rooms=3).plan(0.0)) == {"q": 3}
    assert limits(fleet(QueueLoad("q", size=30), rooms=3).plan(0.0)) == {"q": 9}


def test_concurrency_holds_over_all_rooms() -> None:
    assert limits(fleet(QueueLoad("q", concurrency=3), rooms=4).plan(0.0)) == {"q": 3}
    assert sum(limits(fleet(QueueLoad("a"), QueueLoad("b"), rooms=4, most=4).plan(0.0)).values()) == 4


@pytest.mark.parametrize("sizes", [(60, 30), (70, 40), (90, 20, 10)])
def test_what_a_plan_asks_for_finds_room_in_whatever_order_it_comes(sizes: tuple[int, ...]) -> None:
    """Claims are sent side by side, and nobody knows which comes back first."""
    asked = limits(fleet(*(QueueLoad(str(size), size=size) for size in sizes)).plan(0.0))
    for order in permutations(asked):
        one = fleet(*(QueueLoad(str(size), size=size) for size in sizes))
        assert limits(one.plan(0.0)) == asked
        for queue in order:
            one.claimed(queue, asked[queue], asked[queue], NEVER)
            for _ in range(asked[queue]):
                start(one, queue)


@patient
@given(st.data())
def test_a_fleet_never_gives_a_room_more_than_it_has(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    rooms = data.draw(st.integers(1, 4))
    one = fleet(*(QueueLoad(str(n), size=size) for n, size in enumerate(sizes)), rooms=rooms)
    used = dict.fromkeys(range(1, rooms + 1), 0)
    running: list[tuple[str, int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if running and data.draw(st.booleans()):
            queue, room = running.pop(data.draw(st.integers(0, len(running) - 1)))
            one.ended(queue, room)
            used[room] -= min(100, sizes[int(queue)])
            continue
        queue = str(data.draw(st.integers(0, len(sizes) - 1)))
        size = min(100, sizes[int(queue)])
        found = one.find_room(queue)
        assert (found is None) == all(100 - taken < size for taken in used.values())
        if found is not None:
            assert used[found] == min(used.values())
            one.started(queue, found)
            running.append((queue, found))
            used[found] += size
    assert (one.used, one.runs) == (sum(used.values()), len(running))


# Rooms come and go


def test_a_new_room_adds_its_capacity() -> None:
    one = fleet(QueueLoad("q"), rooms=0)
    assert (one.capacity, one.plan(0.0), one.find_room("q")) == (0, [], None)
    one.open(7)
    assert (one.capacity, limits(one.plan(0.0)), one.find_room("q")) == (100, {"q": 10}, 7)


def test_a_room_that_shuts_takes_no_more_and_keeps_what_it_has() -> None:
    one = fleet(QueueLoad("q"))
    assert [start(one, "q"), start(one, "q")] == [1, 2]
    one.shut(1)
    assert (one.capacity, one.used, one.runs) == (100, 20, 2)
    assert limits(one.plan(0.0)) == {"q": 9}
    assert one.find_room("q") == 2


@pytest.mark.parametrize("dropped_first", [True, False])
def test_a_room_is_gone_when_it_is_dropped_and_its_last_run_was_told(dropped_first: bool) -> None:
    one = fleet(QueueLoad("q"), rooms=1)
    start(one, "q")
    one.shut(1)
    if dropped_first:
        one.drop(1)
        assert (one.used, one.runs) == (10, 1)
        one.ended("q", 1)
    else:
        one.ended("q", 1)
        one.drop(1)
    assert (one.capacity, one.used, one.runs) == (0, 0, 0)
    one.drop(1)  # Nothing is left to drop.


def test_a_room_that_is_deaf_gets_nothing_until_it_hears_again() -> None:
    one = fleet(QueueLoad("q"))
    one.hears(1, False)
    assert limits(one.plan(0.0)) == {"q": 10}
    assert {start(one, "q") for _ in range(3)} == {2}
    one.claimed("q", 10, 3, NEVER)
    assert one.find_room("q", alone=True) is None
    one.hears(1, True)
    assert one.find_room("q") == 1


def test_a_fleet_whose_rooms_are_all_deaf_claims_nothing() -> None:
    one = fleet(QueueLoad("q"))
    one.hears(1, False)
    one.hears(2, False)
    assert one.plan(0.0) == []
    assert one.full() == ["q"]


# Alone


def test_a_run_that_must_be_alone_gets_a_spare_room_and_no_neighbours() -> None:
    one = fleet(QueueLoad("q"), rooms=1)
    assert one.find_room("q", alone=True) is None  # Others must not have to wait for it.
    one.open(2, spare=True)
    assert one.capacity == 100
    assert limits(one.plan(0.0)) == {"q": 10}
    assert start(one, "q", alone=True) == 2
    assert one.find_room("q", alone=True) is None
    assert {start(one, "q") for _ in range(10)} == {1}
    assert one.find_room("q") is None
    one.ended("q", 2)
    assert one.find_room("q", alone=True) == 2


def test_suspects_in_hand_keep_no_room_from_others_and_are_claimed_only_so_many() -> None:
    one = fleet(QueueLoad("q"), QueueLoad("other"), rooms=1)
    for _ in range(MAX_SUSPECTS):
        assert "q" in limits(one.plan(0.0))
        for order in ("q", "other"):
            one.claimed(order, 1, 1, 0.0)
        one.take_in_hand("q", alone=True)
    assert limits(one.plan(0.0)) == {"other": 10}
    one.claimed("other", 10, 0, 0.0)
    one.out_of_hand("q", alone=True)
    assert limits(one.plan(0.0)) == {"q": 5, "other": 5}


def test_a_room_that_shuts_takes_nobody_who_must_be_alone() -> None:
    one = fleet(QueueLoad("q"), rooms=1)
    one.shut(1)
    assert one.find_room("q", alone=True) is None


# In hand


def test_a_job_in_hand_keeps_room_for_itself() -> None:
    one = fleet(QueueLoad("q"), rooms=1)
    for _ in range(3):
        one.take_in_hand("q")
    assert limits(one.plan(0.0)) == {"q": 7}
    for _ in range(3):
        one.out_of_hand("q")
    one.claimed("q", 7, 0, 0.0)
    assert limits(one.plan(0.0)) == {"q": 10}


@pytest.mark.parametrize(("concurrency", "most"), [(3, None), (None, 3)])
def test_a_job_in_hand_counts_as_a_run(concurrency: int | None, most: int | None) -> None:
    one = fleet(QueueLoad("q", concurrency=concurrency), most=most)
    start(one, "q")
    one.take_in_hand("q")
    assert limits(one.plan(0.0)) == {"q": 1}


# Queues come and go


def test_a_queue_that_is_left_is_claimed_from_no_more_and_its_runs_end_as_usual() -> None:
    one = fleet(QueueLoad("q"), QueueLoad("other"))
    room = start(one, "q")
    one.take_in_hand("q")
    one.leave("q")
    one.wake("q")
    assert (one.queues, one.serves("q"), limits(one.plan(0.0))) == (["other"], False, {"other": 18})
    one.ended("q", room)
    assert one.find_room("q") is not None  # One is still in hand.
    one.out_of_hand("q")
    assert (one.used, one.runs) == (0, 0)
    one.leave("q")
    one.leave("never served")


def test_a_queue_that_is_left_during_a_claim_is_forgotten_when_that_comes_back() -> None:
    one = fleet(QueueLoad("q"))
    (order,) = one.plan(0.0)
    one.leave("q")
    one.claimed("q", order.limit, 0, 0.0)
    assert (one.plan(0.0), one.claiming) == ([], False)
    one.serve(QueueLoad("q", size=50))
    assert limits(one.plan(0.0)) == {"q": 4}


def test_a_job_in_hand_of_a_queue_that_was_left_keeps_its_room() -> None:
    one = fleet(QueueLoad("q"), QueueLoad("other"), rooms=1)
    for _ in range(4):
        one.take_in_hand("q")
    one.leave("q")
    assert limits(one.plan(0.0)) == {"other": 6}


def test_a_queue_that_is_served_again_knows_what_still_runs() -> None:
    one = fleet(QueueLoad("q", concurrency=3))
    start(one, "q")
    one.leave("q")
    one.serve(QueueLoad("q", concurrency=3))
    one.wake("q")
    assert limits(one.plan(0.0)) == {"q": 2}


@pytest.mark.parametrize(("size", "used", "more"), [(10, 20, 18), (5, 10, 38), (50, 100, 2), (500, 200, 0)])
def test_a_size_that_changes_holds_for_what_runs_already(size: int, used: int, more: int) -> None:
    one = fleet(QueueLoad("q"))
    rooms = [start(one, "q"), start(one, "q")]
    one.serve(QueueLoad("q", size=size))
    assert one.used == used
    assert limits(one.plan(0.0)).get("q", 0) == more
    for room in rooms:
        one.ended("q", room)
    assert (one.used, one.runs) == (0, 0)


def test_a_room_that_is_overfull_since_a_size_changed_keeps_no_other_room_empty() -> None:
    one = fleet(QueueLoad("grown"), QueueLoad("q"), rooms=1)
    for _ in range(10):
        start(one, "grown")
    one.claimed("grown", 1, 0, NEVER)
    one.open(2)
    one.serve(QueueLoad("grown", size=50))
    assert limits(one.plan(0.0)) == {"q": 10}


def test_a_size_that_changes_holds_for_a_run_that_was_given_up() -> None:
    one = fleet(QueueLoad("stuck", size=40), QueueLoad("large", size=100), QueueLoad("q"), rooms=1)
    start(one, "stuck")
    one.gave_up("stuck", 1)
    one.serve(QueueLoad("stuck", size=10))
    one.ended("stuck", 1, given_up=True)
    start(one, "q")
    assert one.crowded(0.0) == ["large"]  # Nothing is stuck any more: it is worth waiting for.


def test_a_fleet_without_queues_has_nothing_to_do() -> None:
    one = fleet()
    assert (one.plan(0.0), one.queues, one.idle, one.full(), one.next_claim_at(0.0)) == ([], [], True, [], NEVER)
