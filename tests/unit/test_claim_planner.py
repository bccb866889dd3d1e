"""Which queues to claim from, and how much: never more than fits, by priority, and each in its turn."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast._core.capacity import MAX_CLAIM, NEVER, QueueLoad
from holdfast._core.claim_planner import LOWER_FIRST_EVERY, MAX_CLAIMS, ClaimOrder, ClaimPlanner
from tests.unit.planners import make_planner

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.


def planner(*served: QueueLoad, capacity: int = 1_000, max_runs: int | None = None) -> ClaimPlanner:
    return make_planner(capacity, served, max_runs=max_runs)


def limits(orders: Iterable[ClaimOrder]) -> dict[str, int]:
    return {order.queue: order.limit for order in orders}


def run_all(planner: ClaimPlanner, orders: Iterable[ClaimOrder]) -> None:
    """Every order is filled, and its jobs start."""
    for order in orders:
        planner.claimed(order.queue, order.limit, order.limit, 0.0)
        for _ in range(order.limit):
            planner.started(order.queue)


# Never more than fits


@pytest.mark.parametrize(
    ("served", "capacity", "max_runs", "limit"),
    [
        (QueueLoad("q", size=10), 500, None, 50),
        (QueueLoad("q", size=10), 500, 40, 40),
        (QueueLoad("q", size=7), 100, None, 14),
        (QueueLoad("q", size=10, concurrency=3), 1_000, None, 3),
        (QueueLoad("q", size=10), 1_000, 5, 5),
        (QueueLoad("q", size=10, concurrency=3), 1_000, 5, 3),
        (QueueLoad("q", size=100), 100, None, 1),
        (QueueLoad("q", size=5_000), 100, None, 1),
    ],
)
def test_one_queue_gets_all_that_fits(served: QueueLoad, capacity: int, max_runs: int | None, limit: int) -> None:
    assert limits(planner(served, capacity=capacity, max_runs=max_runs).plan(0.0)) == {"q": limit}


@pytest.mark.parametrize(
    ("size", "claims"), [(10, [50, 50]), (9, [55, 50, 6]), (1, [125, 125, 125, 125, 125, 125, 125, 62, 50, 13])]
)
def test_a_queue_that_has_much_capacity_gets_it_in_halves(size: int, claims: list[int]) -> None:
    one = planner(QueueLoad("q", size=size), capacity=1_000)
    got: list[int] = []
    while orders := one.plan(0.0):
        got += [order.limit for order in orders]
        run_all(one, orders)
    assert got == claims


def test_run_takes_units_and_returns_them() -> None:
    one = planner(QueueLoad("q", size=40), capacity=100)
    one.started("q")
    orders = one.plan(0.0)
    assert limits(orders) == {"q": 1}
    run_all(one, orders)
    assert one.plan(0.0) == []
    assert (one.used, one.runs) == (80, 2)
    one.finished("q")
    one.finished("q")
    assert (one.used, one.runs) == (0, 0)
    assert limits(one.plan(0.0)) == {"q": 2}


def test_pending_claim_reserves_units_for_its_jobs() -> None:
    one = planner(QueueLoad("a", size=10, concurrency=6), QueueLoad("b", size=10), capacity=100)
    assert limits(one.plan(0.0)) == {"a": 5, "b": 5}
    assert (one.plan(0.0), one.idle) == ([], False)
    one.claimed("a", 5, 0, NEVER)
    assert one.plan(0.0) == []  # b has asked already.
    one.claimed("b", 5, 5, 0.0)
    for _ in range(5):
        one.started("b")
    assert limits(one.plan(0.0)) == {"b": 5}
    assert not one.idle
    one.claimed("b", 5, 0, NEVER)
    assert one.idle


@pytest.mark.parametrize(("concurrency", "max_runs"), [(2, None), (None, 2)])
def test_a_queue_at_its_concurrency_is_left_alone_until_a_run_ends(
    concurrency: int | None, max_runs: int | None
) -> None:
    one = planner(QueueLoad("q", concurrency=concurrency), max_runs=max_runs)
    one.started("q")
    one.started("q")
    assert one.plan(0.0) == []
    one.finished("q")
    assert limits(one.plan(0.0)) == {"q": 1}


def test_a_job_that_is_larger_than_everything_runs_alone() -> None:
    one = planner(QueueLoad("huge", size=5_000), QueueLoad("small", size=10), capacity=100)
    one.started("huge")
    assert one.used == 100
    assert one.plan(0.0) == []
    one.finished("huge")
    assert one.used == 0
    one.started("small")
    assert limits(one.plan(0.0)) == {"small": 9}


# By priority


def test_higher_priority_takes_its_capacity_and_a_lower_one_the_rest() -> None:
    one = planner(QueueLoad("low", priority=1), QueueLoad("high", priority=2, concurrency=4), capacity=100)
    assert [(order.queue, order.limit) for order in one.plan(0.0)] == [("high", 4), ("low", 6)]


def test_a_higher_priority_that_can_use_everything_gets_everything() -> None:
    one = planner(QueueLoad("low", priority=1), QueueLoad("high", priority=2), capacity=100)
    assert limits(one.plan(0.0)) == {"high": 10}


def test_higher_priority_without_jobs_takes_no_capacity() -> None:
    one = planner(QueueLoad("low", priority=1), QueueLoad("high", priority=2), capacity=100)
    one.claimed("high", 10, 0, 5.0)
    assert limits(one.plan(1.0)) == {"low": 10}
    one.claimed("low", 10, 0, 0.0)
    one.wake("high")
    assert limits(one.plan(1.0)) == {"high": 10}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_queues_of_one_priority_share_equally(count: int) -> None:
    one = planner(*(QueueLoad(f"q{n}") for n in range(count)), capacity=count * 100)
    assert limits(one.plan(0.0)) == {f"q{n}": 10 for n in range(count)}


def test_small_jobs_of_many_queues_fill_a_worker() -> None:
    one = planner(*(QueueLoad(f"q{n}", size=1) for n in range(5)))
    assert limits(one.plan(0.0)) == {f"q{n}": 200 for n in range(5)}


def test_queues_of_one_priority_share_units_and_not_jobs() -> None:
    one = planner(QueueLoad("small", size=10), QueueLoad("large", size=50), capacity=200)
    assert limits(one.plan(0.0)) == {"small": 10, "large": 2}


def test_queues_of_one_priority_share_the_most_runs_too() -> None:
    one = planner(QueueLoad("a", size=1), QueueLoad("b", size=1), max_runs=10)
    for _ in range(10):
        orders = one.plan(0.0)
        run_all(one, orders[:1])  # Only the first of them had work.
        for order in orders[1:]:
            one.claimed(order.queue, order.limit, 0, NEVER)
    assert one.runs == 10


def test_a_queue_with_few_runs_is_served_before_one_with_many() -> None:
    one = planner(QueueLoad("busy"), QueueLoad("idle"), capacity=100)
    for _ in range(9):
        one.started("busy")
    assert limits(one.plan(0.0)) == {"idle": 1}


def test_units_left_by_one_queue_go_to_the_next() -> None:
    one = planner(QueueLoad("a", concurrency=1), QueueLoad("b"), capacity=100)
    assert limits(one.plan(0.0)) == {"a": 1, "b": 9}


# Each in its turn


def served_in(planner: ClaimPlanner, plans: int) -> Counter[str]:
    """What is claimed in so many plans, by a worker whose queues all have work and whose runs end at once."""
    claims: Counter[str] = Counter()
    for _ in range(plans):
        for order in planner.plan(0.0):
            claims[order.queue] += order.limit
            planner.claimed(order.queue, order.limit, order.limit, 0.0)
    return claims


@pytest.mark.parametrize("max_runs", [None, 1, 3])
def test_the_lowest_queue_gets_its_turn_once_in_sixteen_plans(max_runs: int | None) -> None:
    assert LOWER_FIRST_EVERY == 16
    one = planner(QueueLoad("high", priority=200), QueueLoad("low", priority=1), capacity=100, max_runs=max_runs)
    for _ in range(5):
        claims = served_in(one, LOWER_FIRST_EVERY)
        assert claims["low"] == 1
        assert claims["high"] >= 15


def test_queues_of_the_lowest_priority_share_its_turn() -> None:
    one = planner(QueueLoad("high", priority=200), QueueLoad("b", priority=1), QueueLoad("c", priority=1), capacity=100)
    claims = served_in(one, 20 * LOWER_FIRST_EVERY)
    assert abs(claims["b"] - claims["c"]) <= 1
    assert claims["b"] > 0


@pytest.mark.parametrize(("size", "max_runs"), [(10, 1), (1_000, None)])
def test_two_queues_take_turns_where_there_is_space_for_one(size: int, max_runs: int | None) -> None:
    one = planner(QueueLoad("a", size=size), QueueLoad("b", size=size), max_runs=max_runs)
    assert served_in(one, 20) == {"a": 10, "b": 10}


@patient
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_no_queue_starves_whatever_the_priorities(priorities: list[int]) -> None:
    one = planner(
        *(QueueLoad(str(n), priority=priority) for n, priority in enumerate(priorities)), capacity=100, max_runs=1
    )
    claims = served_in(one, 2 * LOWER_FIRST_EVERY * len(priorities))
    assert sorted(claims) == sorted(one.served)


@pytest.mark.parametrize("priority", [200, 100, 1])
def test_large_jobs_run_under_a_steady_load_of_small_ones(priority: int) -> None:
    one = planner(
        QueueLoad("large", size=100, priority=priority), QueueLoad("small", size=10, priority=100), capacity=100
    )
    for _ in range(10):
        one.started("small")
    for _ in range(2_000):
        if one.runs:
            one.finished("small")
        orders = one.plan(0.0)
        if "large" in limits(orders):
            return
        run_all(one, orders)
    pytest.fail("no large job was claimed")


@pytest.mark.parametrize("priority", [200, 100])
def test_large_job_is_not_overtaken_for_long_by_equal_priorities(priority: int) -> None:
    one = planner(
        QueueLoad("large", size=100, priority=priority), QueueLoad("small", size=10, priority=100), capacity=100
    )
    for _ in range(10):
        one.started("small")
    for _ in range(2 * LOWER_FIRST_EVERY):
        one.finished("small")
        orders = one.plan(0.0)
        if "large" in limits(orders):
            return
        run_all(one, orders)
    pytest.fail("no large job was claimed")


def test_a_queue_at_its_concurrency_is_not_waited_for() -> None:
    one = planner(
        QueueLoad("large", size=60, concurrency=1, priority=200), QueueLoad("small", priority=100), capacity=100
    )
    one.started("large")
    for _ in range(3 * LOWER_FIRST_EVERY):
        assert limits(one.plan(0.0)) == {"small": 4}
        one.claimed("small", 4, 0, 0.0)


@pytest.mark.parametrize(("capacity", "max_runs", "high"), [(100, None, 9), (1_000, 3, 2)])
def test_a_turn_of_the_lowest_queue_takes_its_units_from_the_others(
    capacity: int, max_runs: int | None, high: int
) -> None:
    one = planner(QueueLoad("high", priority=2), QueueLoad("low", priority=1), capacity=capacity, max_runs=max_runs)
    served_in(one, LOWER_FIRST_EVERY - 1)
    assert [(order.queue, order.limit) for order in one.plan(0.0)] == [("low", 1), ("high", high)]


# When to look


def test_filled_claim_means_that_more_jobs_may_be_due() -> None:
    one = planner(QueueLoad("q"), capacity=100)
    one.claimed("q", 10, 10, 7.0)
    assert limits(one.plan(1.0)) == {"q": 10}


@pytest.mark.parametrize("got", [0, 9])
def test_unfilled_claim_means_no_due_job_until_its_next_time(got: int) -> None:
    one = planner(QueueLoad("q"), capacity=100)
    one.claimed("q", 10, got, 7.0)
    assert one.plan(6.9) == []
    assert one.next_claim_at(1.0) == 7.0
    assert limits(one.plan(7.0)) == {"q": 10}


def test_hint_makes_a_queue_claimable_at_once() -> None:
    one = planner(QueueLoad("q"), capacity=100)
    one.claimed("q", 10, 0, 7.0)
    one.wake("unknown")
    assert one.plan(1.0) == []
    one.wake("q")
    assert limits(one.plan(1.0)) == {"q": 10}


def test_hint_during_a_pending_claim_is_not_lost() -> None:
    one = planner(QueueLoad("q"), capacity=100)
    (order,) = one.plan(1.0)
    one.wake("q")
    one.claimed("q", order.limit, 0, 7.0)
    assert limits(one.plan(1.0)) == {"q": 10}
    one.claimed("q", order.limit, 0, 7.0)
    assert one.plan(1.0) == []


def test_the_next_claim_is_the_earliest_that_is_not_due_yet() -> None:
    one = planner(QueueLoad("a"), QueueLoad("b"), QueueLoad("c"), QueueLoad("due"), capacity=100)
    one.claimed("a", 1, 0, 4.0)
    one.claimed("b", 1, 0, 3.0)
    one.claimed("c", 1, 0, NEVER)
    assert one.next_claim_at(1.0) == 3.0
    assert one.next_claim_at(3.0) == 4.0
    assert one.next_claim_at(4.0) == NEVER


def test_idle_queues_have_capacity_and_no_due_claim() -> None:
    one = planner(
        QueueLoad("full", concurrency=1), QueueLoad("asleep"), QueueLoad("later"), QueueLoad("due"), capacity=100
    )
    one.started("full")
    for queue, claim_at in (("full", NEVER), ("asleep", NEVER), ("later", 5.0)):
        one.claimed(queue, 1, 0, claim_at)
    assert one.idle_queues(1.0) == ["asleep", "later"]
    assert one.idle_queues(5.0) == ["asleep"]
    one.finished("full")
    assert one.idle_queues(5.0) == ["full", "asleep"]
    one.wake("full")
    assert one.idle_queues(5.0) == ["asleep"]


def test_a_worker_knows_its_queues() -> None:
    assert list(planner(QueueLoad("b"), QueueLoad("a")).served) == ["b", "a"]


# Many queues


def planning_s(count: int, jobs: int) -> float:
    """CPU time to plan these jobs, of a full worker whose queues all have work."""
    one = planner(*(QueueLoad(f"q{n}") for n in range(count)))
    running: deque[str] = deque()
    began = time.process_time()
    for _ in range(jobs // 10):
        for order in one.plan(0.0):
            one.claimed(order.queue, order.limit, order.limit, 0.0)
            for _ in range(order.limit):
                one.started(order.queue)
                running.append(order.queue)
        for _ in range(10):
            one.finished(running.popleft())
    return time.process_time() - began


def test_planning_costs_the_same_for_4000_queues_as_for_100() -> None:
    few = min(planning_s(100, 5_000) for _ in range(3))
    assert min(planning_s(4_000, 5_000) for _ in range(3)) < 2 * few


def test_every_one_of_many_queues_gets_its_turn() -> None:
    one = planner(*(QueueLoad(f"q{n}") for n in range(1_000)), capacity=100)
    assert len(served_in(one, 200)) == 1_000


def test_a_queue_that_wakes_is_served_after_those_that_wait() -> None:
    one = planner(*(QueueLoad(f"q{n}", concurrency=1) for n in range(200)), capacity=100)
    one.claimed("q7", 1, 0, NEVER)
    served_in(one, 3)
    one.wake("q7")
    assert served_in(one, 20)["q7"] == 1


def test_times_of_queues_take_bounded_memory() -> None:
    """A queue has a job far ahead, and gets one job after the other meanwhile."""
    one = planner(QueueLoad("q"))
    for _ in range(10_000):
        one.wake("q")
        (order,) = one.plan(1.0)
        one.claimed("q", order.limit, 1, 86_400.0)
    assert len(one._times) < 200
    assert one.next_claim_at(1.0) == 86_400.0


# Claims in flight


def test_claims_in_flight_are_bounded() -> None:
    one = planner(*(QueueLoad(f"q{n}", size=1, concurrency=1) for n in range(2_000)))
    orders = [order for _ in range(100) for order in one.plan(0.0)]
    assert len(orders) == MAX_CLAIMS
    one.claimed(orders[0].queue, orders[0].limit, 0, NEVER)
    assert len(one.plan(0.0)) == 1


def test_late_replies_reduce_the_claims_in_flight_until_others_are_in_time() -> None:
    one = planner(*(QueueLoad(f"q{n}", size=1, concurrency=1) for n in range(2_000)))

    def in_flight(*, late: bool) -> int:
        orders = [order for _ in range(100) for order in one.plan(0.0)]
        for order in orders:
            one.claimed(order.queue, order.limit, 0, 0.0, late=late)
        return len(orders)

    assert in_flight(late=True) == MAX_CLAIMS
    assert in_flight(late=False) == 1
    assert in_flight(late=False) == 2
    while in_flight(late=False) < MAX_CLAIMS:
        pass


# A model: whatever happens, it fits


QUEUES = st.lists(
    st.builds(
        QueueLoad,
        queue=st.just(""),
        size=st.integers(1, 300),
        concurrency=st.none() | st.integers(1, 5),
        priority=st.integers(1, 3),
    ),
    min_size=1,
    max_size=5,
)


class Model(RuleBasedStateMachine):
    """A worker whose claims find anything from nothing to all that was asked for, and whose runs end at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.planner: ClaimPlanner | None = None
        self.running: list[str] = []
        self.now = 0.0

    @precondition(lambda self: self.planner is None)
    @rule(queues=QUEUES, capacity=st.integers(1, 500), max_runs=st.none() | st.integers(1, 20))
    def begin(self, queues: list[QueueLoad], capacity: int, max_runs: int | None) -> None:
        for number, queue in enumerate(queues):
            queue.queue = str(number)
        self.served = {queue.queue: (min(queue.size, capacity), queue.concurrency, queue.priority) for queue in queues}
        self.capacity, self.max_runs = capacity, max_runs
        self.planner = make_planner(capacity, queues, max_runs=max_runs)

    @precondition(lambda self: self.planner is not None)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        assert self.planner is not None
        orders = self.planner.plan(self.now)
        assert len({order.queue for order in orders}) == len(orders)
        assert all(1 <= order.limit <= MAX_CLAIM for order in orders)
        self.fits(self.running + [order.queue for order in orders for _ in range(order.limit)])
        for order in orders:
            got = data.draw(st.sampled_from([0, order.limit // 2, order.limit]))
            self.planner.claimed(order.queue, order.limit, got, self.now + 0.5)
            for _ in range(got):
                self.planner.started(order.queue)
                self.running.append(order.queue)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 50))
    def end(self, data: st.DataObject, count: int) -> None:
        assert self.planner is not None
        for _ in range(min(count, len(self.running))):
            self.planner.finished(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.planner is not None)
    @rule(number=st.integers(0, 5))
    def wake(self, number: int) -> None:
        assert self.planner is not None
        self.planner.wake(str(number))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_knows_what_runs(self) -> None:
        if self.planner is not None:
            assert self.planner.runs == len(self.running)
            assert self.planner.used == sum(self.served[queue][0] for queue in self.running)

    @invariant()
    def a_worker_with_capacity_and_work_does_something(self) -> None:
        """An idle worker with work in every queue plans for one of the highest priority, or for the one whose
        turn it is."""
        if self.planner is not None and not self.running:
            for queue in self.served:
                self.planner.wake(queue)
            orders = self.planner.plan(self.now)
            assert orders
            for order in orders:
                self.planner.claimed(order.queue, order.limit, 0, self.now)

    def fits(self, runs: list[str]) -> None:
        assert sum(self.served[queue][0] for queue in runs) <= self.capacity
        assert self.max_runs is None or len(runs) <= self.max_runs
        for queue, count in Counter(runs).items():
            concurrency = self.served[queue][1]
            assert concurrency is None or count <= concurrency


Model.TestCase.settings = settings(patient, max_examples=60, stateful_step_count=30)
test_what_is_planned_always_fits = Model.TestCase
