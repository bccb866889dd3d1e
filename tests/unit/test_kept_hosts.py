"""Keeping a host free so that a large job fits: only while that helps, and for a minute at most."""

from __future__ import annotations

import pytest

from holdfast._core.capacity import NEVER, QueueLoad
from holdfast._core.claim_planner import MAX_KEPT_S, MAX_SKIPPED, ClaimPlanner
from tests.unit.planners import make_planner


def blocked(*, priority: int = 100) -> ClaimPlanner:
    """A worker in which one long run keeps a large job from running, beside a queue of quick ones."""
    planner = make_planner(
        1_000, [QueueLoad("long"), QueueLoad("large", size=1_000, priority=priority), QueueLoad("quick")]
    )
    planner.started("long")
    planner.claimed("long", 1, 0, NEVER)
    return planner


def quick_claims(planner: ClaimPlanner, plans: int, *, now: float = 0.0, step_s: float = 0.0) -> int:
    """In how many of these plans a quick job was asked for. Each one ends at once."""
    claims = 0
    for _ in range(plans):
        planner.wake("quick")
        for order in planner.plan(now):
            planner.claimed(order.queue, order.limit, 0, NEVER)
            claims += order.queue == "quick"
        now += step_s
    return claims


def test_a_large_job_holds_others_back_after_it_was_skipped_16_times() -> None:
    planner = blocked()
    assert quick_claims(planner, MAX_SKIPPED) == MAX_SKIPPED
    assert quick_claims(planner, 100) == 0
    planner.finished("long")
    assert next(order.queue for order in planner.plan(0.0)) == "large"


def test_others_are_not_held_back_for_a_run_that_was_given_up() -> None:
    planner = blocked()
    planner.gave_up("long")
    assert quick_claims(planner, 2_000) == 2_000


def test_a_run_that_was_given_up_and_has_ended_after_all_uses_no_units() -> None:
    planner = blocked()
    planner.gave_up("long")
    planner.finished("long", given_up=True)
    assert (planner.used, planner.runs) == (0, 0)
    planner.started("long")
    quick_claims(planner, MAX_SKIPPED)
    assert quick_claims(planner, 100) == 0  # Others are held back for this one, as for any.


def test_a_job_that_fits_beside_given_up_runs_has_its_host_kept() -> None:
    planner = make_planner(
        1_000, [QueueLoad("stuck", 300), QueueLoad("long", 100), QueueLoad("large", 700), QueueLoad("quick")]
    )
    for queue in ("stuck", "long"):
        planner.started(queue)
        planner.claimed(queue, 1, 0, NEVER)
    planner.gave_up("stuck")
    quick_claims(planner, MAX_SKIPPED)
    assert quick_claims(planner, 100) == 0
    planner.finished("long")
    assert "large" in [order.queue for order in planner.plan(0.0)]


@pytest.mark.parametrize("priority", [100, 1])
def test_others_are_held_back_for_a_minute_and_not_longer(priority: int) -> None:
    assert MAX_KEPT_S == 60.0
    planner = blocked(priority=priority)
    quick_claims(planner, MAX_SKIPPED**2)
    assert quick_claims(planner, 59, step_s=1.0) == 0
    assert quick_claims(planner, 10, now=61.0) == 10


def test_host_kept_for_a_minute_without_use_is_not_kept_for_another_minute() -> None:
    planner = blocked()
    quick_claims(planner, MAX_SKIPPED + 1)
    assert quick_claims(planner, 100, now=61.0) == 100
    assert quick_claims(planner, 100, now=120.0) == 100
    assert quick_claims(planner, 100, now=122.0) == 0
    assert quick_claims(planner, 10, now=183.0) == 10


def test_the_only_host_is_kept_from_higher_queues_after_256_skips() -> None:
    planner = blocked(priority=1)
    assert quick_claims(planner, MAX_SKIPPED**2) == MAX_SKIPPED**2 == 256
    assert quick_claims(planner, 100) == 0


def test_the_only_host_is_kept_from_equal_queues_while_higher_ones_use_it() -> None:
    planner = blocked(priority=100)
    planner.serve(QueueLoad("urgent", priority=200))
    planner.claimed("urgent", 1, 0, NEVER)
    quick_claims(planner, MAX_SKIPPED)
    planner.wake("urgent")
    assert quick_claims(planner, 1) == 0
    planner.wake("urgent")
    planner.wake("quick")
    assert [order.queue for order in planner.plan(0.0)] == ["urgent"]


def test_a_plan_without_orders_skips_no_queue() -> None:
    """A worker without free capacity claims nothing: no queue is served before another."""
    planner = make_planner(100, [QueueLoad("one"), QueueLoad("other")])
    for _ in range(10):
        planner.started("one")
    assert [planner.plan(0.0) for _ in range(100)] == [[]] * 100
    for _ in range(4):
        planner.finished("one")
    assert {order.queue: order.limit for order in planner.plan(0.0)} == {"one": 2, "other": 2}


def test_between_two_kept_hosts_other_queues_get_their_turn() -> None:
    loads = [QueueLoad("one", size=100), QueueLoad("other", size=100), QueueLoad("small")]
    planner = make_planner(100, loads)
    planner.started("small")
    claims: list[str] = []
    for _ in range(6 * (MAX_SKIPPED + 1)):
        orders = planner.plan(0.0)
        claims += [order.queue for order in orders]
        for order in orders:
            planner.claimed(order.queue, order.limit, order.limit, 0.0)
        if not orders:  # A host is kept: what runs there ends, and the large job is claimed.
            planner.finished("small")
            (order,) = planner.plan(0.0)
            claims.append(order.queue)
            planner.claimed(order.queue, 1, 1, 0.0)
            planner.started("small")
    assert [queue for queue in claims if queue != "small"] == ["one", "other"] * 3
    assert claims.count("small") == 6 * MAX_SKIPPED


def test_kept_host_is_one_without_abandoned_runs() -> None:
    planner = make_planner(100, [QueueLoad("large", 100), QueueLoad("stuck", 10), QueueLoad("quick")], hosts=(1, 2))
    planner.claimed("stuck", 1, 0, NEVER)
    planner.started("stuck", 1)
    planner.gave_up("stuck", 1)
    planner.started("quick", 2)
    planner.started("quick", 2)
    quick_claims(planner, MAX_SKIPPED)
    planner.wake("quick")
    assert [(order.queue, order.limit) for order in planner.plan(0.0)] == [("quick", 9)]  # On host 1: 2 is kept.


def test_a_queue_in_which_nothing_waits_any_more_holds_no_other_back() -> None:
    planner = blocked()
    quick_claims(planner, MAX_SKIPPED)
    assert quick_claims(planner, 1) == 0
    assert planner.blocked_queues(0.0) == ["large"]
    planner.sleep("large")
    assert planner.blocked_queues(0.0) == []
    assert quick_claims(planner, 100) == 100
    planner.wake("large")
    assert planner.blocked_queues(0.0) == ["large"]
    assert quick_claims(planner, 1) == 1  # It is skipped from the beginning again.


def test_a_larger_job_of_a_lower_queue_gets_a_host_kept_free() -> None:
    """However busy the higher queue keeps both hosts, ten units at a time."""
    low, high = QueueLoad("low", size=30, priority=1), QueueLoad("high")
    planner = make_planner(100, [low, high], hosts=(1, 2))
    hosts: list[int] = []
    for _ in range(20):
        host = planner.find_host("high")
        assert host is not None
        planner.started("high", host)
        hosts.append(host)
    for queue in ("low", "high"):
        planner.claimed(queue, 1, 1, 0.0)
    plans = 0
    while planner.find_host("low") is None or not low.claiming:
        planner.finished("high", hosts.pop(0))  # One ends, and another one comes.
        plans += 1
        assert plans < 3 * MAX_SKIPPED
        for order in planner.plan(0.0):
            if order.queue == "high":
                for _ in range(order.limit):
                    host = planner.find_host("high")
                    assert host is not None
                    planner.started("high", host)
                    hosts.append(host)
                planner.claimed("high", order.limit, order.limit, 0.0)
    assert low.claiming == 1


def test_a_host_is_not_kept_for_a_queue_that_has_no_work_after_all() -> None:
    low, high = QueueLoad("low", size=60, priority=1), QueueLoad("high", size=50)
    planner = make_planner(100, [low, high], hosts=(1, 2))
    for host in (1, 2):
        planner.started("high", host)
    for _ in range(2 * MAX_SKIPPED):
        for order in planner.plan(0.0):
            planner.claimed(order.queue, order.limit, 0, 0.0)
    assert [(order.queue, order.limit) for order in planner.plan(0.0)] == [("high", 1)]  # The other one is kept.
    planner.claimed("high", 1, 0, 0.0)
    planner.sleep("low")
    assert [(order.queue, order.limit) for order in planner.plan(0.0)] == [("high", 2)]
