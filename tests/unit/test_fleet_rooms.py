"""Holding others back so that a large job finds room: only while that helps, and never for ever."""

from __future__ import annotations

import pytest

from holdfast._core.capacity import LOWER_FIRST_EVERY, MAX_BLOCK_S, NEVER, Capacity, QueueLoad


def crowded(*, priority: int = 100) -> Capacity:
    """A fleet in which one long run keeps a large job from running, beside a queue of quick ones."""
    fleet = Capacity(1_000, [QueueLoad("long"), QueueLoad("large", size=1_000, priority=priority), QueueLoad("quick")])
    fleet.started("long")
    fleet.claimed("long", 1, 0, NEVER)
    return fleet


def quick_claims(fleet: Capacity, plans: int, *, now: float = 0.0, step_s: float = 0.0) -> int:
    """In how many of these plans a quick job was asked for. Each one ends at once."""
    claims = 0
    for _ in range(plans):
        fleet.wake("quick")
        for order in fleet.plan(now):
            fleet.claimed(order.queue, order.limit, 0, NEVER)
            claims += order.queue == "quick"
        now += step_s
    return claims


def test_a_large_job_holds_others_back_after_it_was_passed_over_often_enough() -> None:
    fleet = crowded()
    assert quick_claims(fleet, LOWER_FIRST_EVERY - 1) == LOWER_FIRST_EVERY - 1
    assert quick_claims(fleet, 100) == 0
    fleet.ended("long")
    assert next(order.queue for order in fleet.plan(0.0)) == "large"


def test_others_are_not_held_back_for_a_run_that_was_given_up() -> None:
    fleet = crowded()
    fleet.gave_up("long")
    assert quick_claims(fleet, 2_000) == 2_000


def test_a_run_that_was_given_up_and_has_ended_after_all_takes_no_room() -> None:
    fleet = crowded()
    fleet.gave_up("long")
    fleet.ended("long", given_up=True)
    assert (fleet.used, fleet.runs) == (0, 0)
    fleet.started("long")
    quick_claims(fleet, LOWER_FIRST_EVERY)
    assert quick_claims(fleet, 100) == 0  # Others are held back for this one, as for any.


def test_what_is_left_beside_runs_that_were_given_up_is_waited_for_by_what_fits_into_it() -> None:
    fleet = Capacity(
        1_000, [QueueLoad("stuck", 300), QueueLoad("long", 100), QueueLoad("large", 700), QueueLoad("quick")]
    )
    for queue in ("stuck", "long"):
        fleet.started(queue)
        fleet.claimed(queue, 1, 0, NEVER)
    fleet.gave_up("stuck")
    quick_claims(fleet, LOWER_FIRST_EVERY)
    assert quick_claims(fleet, 100) == 0
    fleet.ended("long")
    assert "large" in [order.queue for order in fleet.plan(0.0)]


@pytest.mark.parametrize("priority", [100, 1])
def test_others_are_held_back_for_a_minute_and_not_longer(priority: int) -> None:
    assert MAX_BLOCK_S == 60.0
    fleet = crowded(priority=priority)
    quick_claims(fleet, LOWER_FIRST_EVERY**2)
    assert quick_claims(fleet, 59, step_s=1.0) == 0
    assert quick_claims(fleet, 10, now=61.0) == 10


def test_after_a_minute_of_waiting_a_large_job_has_to_be_passed_over_again_before_it_holds_others_back() -> None:
    fleet = crowded()
    quick_claims(fleet, LOWER_FIRST_EVERY)
    assert quick_claims(fleet, LOWER_FIRST_EVERY, now=61.0) == LOWER_FIRST_EVERY
    assert quick_claims(fleet, 100, now=61.0) == 0
    assert quick_claims(fleet, 10, now=122.0) == 10


def test_a_queue_in_which_nothing_waits_any_more_holds_nobody_back() -> None:
    fleet = crowded()
    quick_claims(fleet, LOWER_FIRST_EVERY)
    assert quick_claims(fleet, 1) == 0
    assert fleet.crowded(0.0) == ["large"]
    fleet.sleep("large")
    assert fleet.crowded(0.0) == []
    assert quick_claims(fleet, 100) == 100
    fleet.wake("large")
    assert fleet.crowded(0.0) == ["large"]
    assert quick_claims(fleet, 1) == 1  # It begins to be passed over anew.


def test_a_larger_job_of_a_lower_queue_gets_a_room_of_its_own_kept_free() -> None:
    """However busy the higher queue keeps both rooms, ten units at a time."""
    low, high = QueueLoad("low", size=30, priority=1), QueueLoad("high")
    fleet = Capacity(100, [low, high], rooms=(1, 2))
    rooms: list[int] = []
    for _ in range(20):
        room = fleet.find_room("high")
        assert room is not None
        fleet.started("high", room)
        rooms.append(room)
    for queue in ("low", "high"):
        fleet.claimed(queue, 1, 1, 0.0)
    plans = 0
    while fleet.find_room("low") is None or not low.asked:
        fleet.ended("high", rooms.pop(0))  # One ends, and another one comes.
        plans += 1
        assert plans < 3 * LOWER_FIRST_EVERY
        for order in fleet.plan(0.0):
            if order.queue == "high":
                for _ in range(order.limit):
                    room = fleet.find_room("high")
                    assert room is not None
                    fleet.started("high", room)
                    rooms.append(room)
                fleet.claimed("high", order.limit, order.limit, 0.0)
    assert low.asked == 1


def test_a_room_is_not_kept_for_a_queue_that_has_no_work_after_all() -> None:
    low, high = QueueLoad("low", size=60, priority=1), QueueLoad("high", size=50)
    fleet = Capacity(100, [low, high], rooms=(1, 2))
    for room in (1, 2):
        fleet.started("high", room)
    for _ in range(2 * LOWER_FIRST_EVERY):
        for order in fleet.plan(0.0):
            fleet.claimed(order.queue, order.limit, 0, 0.0)
    assert [(order.queue, order.limit) for order in fleet.plan(0.0)] == [("high", 1)]  # The other one is kept.
    fleet.claimed("high", 1, 0, 0.0)
    fleet.sleep("low")
    assert [(order.queue, order.limit) for order in fleet.plan(0.0)] == [("high", 2)]
