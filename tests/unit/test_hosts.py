"""Capacity of several hosts: what fits where, what must be isolated, and what becomes of a host that shuts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._core.capacity import MAX_SUSPECTS, NEVER, QueueLoad
from holdfast._core.claim_planner import MAX_SKIPPED, ClaimOrder, ClaimPlanner
from tests.unit.planners import make_planner

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.


def planner(*served: QueueLoad, hosts: int = 2, max_runs: int | None = None) -> ClaimPlanner:
    return make_planner(100, served, max_runs=max_runs, hosts=range(1, hosts + 1))


def start(planner: ClaimPlanner, queue: str, *, isolated: bool = False) -> int:
    """A run goes where the planner says."""
    host = planner.find_host(queue, isolated=isolated)
    assert host is not None, f"there is no host for a run of {queue}"
    planner.started(queue, host)
    return host


def limits(orders: Iterable[ClaimOrder]) -> dict[str, int]:
    return {order.queue: order.limit for order in orders}


# Which host


def test_runs_spread_over_hosts_evenly() -> None:
    one = planner(QueueLoad("q"), hosts=3)
    assert [start(one, "q") for _ in range(6)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("brought", [2, 6, 30])
def test_claimed_jobs_spread_over_the_planned_hosts(brought: int) -> None:
    one = planner(QueueLoad("q"), hosts=3)
    (order,) = one.plan(0.0)
    assert order.limit == 30
    hosts = [start(one, "q") for _ in range(brought)]
    one.claimed("q", order.limit, brought, NEVER)
    assert max(map(hosts.count, (1, 2, 3))) - min(map(hosts.count, (1, 2, 3))) <= 1
    assert one.used == 10 * brought
    assert [one.find_host("q") is None, one.plan(0.0)] == [brought == 30, []]


def test_a_run_whose_host_has_shut_since_it_was_planned_goes_to_another() -> None:
    one = planner(QueueLoad("q"))
    one.plan(0.0)
    one.close_host(1)
    assert {start(one, "q") for _ in range(10)} == {2}
    assert one.find_host("q") is None


def test_a_run_goes_into_the_host_that_has_most_free() -> None:
    one = planner(QueueLoad("large", size=50), QueueLoad("small", size=20))
    assert [start(one, "large"), start(one, "small"), start(one, "small")] == [1, 2, 2]
    assert start(one, "small") == 2  # 50 and 60 are free.
    assert start(one, "small") == 1  # 50 and 40.


def test_run_larger_than_every_free_capacity_gets_no_host() -> None:
    one = planner(QueueLoad("large", size=60), QueueLoad("small", size=30))
    for _ in range(4):
        start(one, "small")
    assert one.units - one.used == 80
    assert one.find_host("large") is None
    one.finished("small", 2)
    assert one.find_host("large") == 2


def test_run_larger_than_a_host_needs_an_empty_one() -> None:
    one = planner(QueueLoad("huge", size=5_000), QueueLoad("small", size=1), hosts=1)
    start(one, "small")
    assert one.find_host("huge") is None
    one.finished("small", 1)
    start(one, "huge")
    assert one.find_host("small") is None


def test_queue_gets_jobs_that_fit_into_one_host_and_not_into_their_sum() -> None:
    assert limits(planner(QueueLoad("q", size=60), hosts=3).plan(0.0)) == {"q": 3}
    assert limits(planner(QueueLoad("q", size=30), hosts=3).plan(0.0)) == {"q": 9}


def test_concurrency_holds_over_all_hosts() -> None:
    assert limits(planner(QueueLoad("q", concurrency=3), hosts=4).plan(0.0)) == {"q": 3}
    assert sum(limits(planner(QueueLoad("a"), QueueLoad("b"), hosts=4, max_runs=4).plan(0.0)).values()) == 4


@pytest.mark.parametrize("sizes", [(60, 30), (70, 40), (90, 20, 10)])
def test_planned_jobs_find_a_host_in_any_order(sizes: tuple[int, ...]) -> None:
    """Claims are sent side by side, and nobody knows which comes back first."""
    asked = limits(planner(*(QueueLoad(str(size), size=size) for size in sizes)).plan(0.0))
    for order in permutations(asked):
        one = planner(*(QueueLoad(str(size), size=size) for size in sizes))
        assert limits(one.plan(0.0)) == asked
        for queue in order:
            one.claimed(queue, asked[queue], asked[queue], NEVER)
            for _ in range(asked[queue]):
                start(one, queue)


@patient
@given(st.data())
def test_a_worker_never_gives_a_host_more_than_it_has(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    hosts = data.draw(st.integers(1, 4))
    one = planner(*(QueueLoad(str(n), size=size) for n, size in enumerate(sizes)), hosts=hosts)
    used = dict.fromkeys(range(1, hosts + 1), 0)
    running: list[tuple[str, int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if len(running) > 0 and data.draw(st.booleans()):
            queue, host = running.pop(data.draw(st.integers(0, len(running) - 1)))
            one.finished(queue, host)
            used[host] -= min(100, sizes[int(queue)])
            continue
        queue = str(data.draw(st.integers(0, len(sizes) - 1)))
        size = min(100, sizes[int(queue)])
        found = one.find_host(queue)
        assert (found is None) == all(100 - taken < size for taken in used.values())
        if found is not None:
            assert used[found] == min(used.values())
            one.started(queue, found)
            running.append((queue, found))
            used[found] += size
    assert (one.used, one.runs) == (sum(used.values()), len(running))


# Hosts come and go


def test_a_new_host_adds_its_capacity() -> None:
    one = planner(QueueLoad("q"), hosts=0)
    assert (one.units, one.plan(0.0), one.find_host("q")) == (0, [], None)
    one.open_host(7)
    assert (one.units, limits(one.plan(0.0)), one.find_host("q")) == (100, {"q": 10}, 7)


def test_closing_host_takes_no_new_runs_and_keeps_its_current_ones() -> None:
    one = planner(QueueLoad("q"))
    assert [start(one, "q"), start(one, "q")] == [1, 2]
    one.close_host(1)
    assert (one.units, one.used, one.runs) == (100, 20, 2)
    assert limits(one.plan(0.0)) == {"q": 9}
    assert one.find_host("q") == 2


@pytest.mark.parametrize("dropped_first", [True, False])
def test_a_host_is_gone_when_it_is_dropped_and_its_last_run_has_finished(dropped_first: bool) -> None:
    one = planner(QueueLoad("q"), hosts=1)
    start(one, "q")
    one.close_host(1)
    if dropped_first:
        one.close_host(1)
        assert (one.used, one.runs) == (10, 1)
        one.finished("q", 1)
    else:
        one.finished("q", 1)
        one.close_host(1)
    assert (one.units, one.used, one.runs) == (0, 0, 0)
    one.close_host(1)  # Nothing is left to drop.


def test_a_host_that_is_unresponsive_gets_nothing_until_it_answers_again() -> None:
    one = planner(QueueLoad("q"))
    one.hosts[1].unresponsive = True
    assert limits(one.plan(0.0)) == {"q": 10}
    assert {start(one, "q") for _ in range(3)} == {2}
    one.claimed("q", 10, 3, NEVER)
    assert one.find_host("q", isolated=True) is None
    one.hosts[1].unresponsive = False
    assert one.find_host("q") == 1


def test_a_worker_whose_hosts_are_all_unresponsive_claims_nothing() -> None:
    one = planner(QueueLoad("q"))
    one.hosts[1].unresponsive = True
    one.hosts[2].unresponsive = True
    assert one.plan(0.0) == []
    assert one.full_queues() == ["q"]


# Alone


def test_isolated_run_gets_a_spare_host_without_other_runs() -> None:
    one = planner(QueueLoad("q"), hosts=1)
    assert one.find_host("q", isolated=True) is None  # Others must not have to wait for it.
    one.open_host(2, spare=True)
    assert one.units == 100
    assert limits(one.plan(0.0)) == {"q": 10}
    assert start(one, "q", isolated=True) == 2
    assert one.find_host("q", isolated=True) is None
    assert {start(one, "q") for _ in range(10)} == {1}
    assert one.find_host("q") is None
    one.finished("q", 2)
    assert one.find_host("q", isolated=True) == 2


def test_unplaced_isolated_jobs_reserve_no_units_and_are_limited() -> None:
    one = planner(QueueLoad("q"), QueueLoad("other"), hosts=1)
    for _ in range(MAX_SUSPECTS):
        assert "q" in limits(one.plan(0.0))
        for order in ("q", "other"):
            one.claimed(order, 1, 1, 0.0)
        one.count_unplaced("q", 1, isolated=True)
    assert limits(one.plan(0.0)) == {"other": 10}
    one.claimed("other", 10, 0, 0.0)
    one.count_unplaced("q", -1, isolated=True)
    assert limits(one.plan(0.0)) == {"q": 5, "other": 5}


def test_closing_host_takes_no_isolated_job() -> None:
    one = planner(QueueLoad("q"), hosts=1)
    one.close_host(1)
    assert one.find_host("q", isolated=True) is None


# Unplaced


def test_an_unplaced_job_keeps_units_for_itself() -> None:
    one = planner(QueueLoad("q"), hosts=1)
    for _ in range(3):
        one.count_unplaced("q", 1)
    assert limits(one.plan(0.0)) == {"q": 7}
    for _ in range(3):
        one.count_unplaced("q", -1)
    one.claimed("q", 7, 0, 0.0)
    assert limits(one.plan(0.0)) == {"q": 10}


@pytest.mark.parametrize(("concurrency", "max_runs"), [(3, None), (None, 3)])
def test_an_unplaced_job_counts_as_a_run(concurrency: int | None, max_runs: int | None) -> None:
    one = planner(QueueLoad("q", concurrency=concurrency), max_runs=max_runs)
    start(one, "q")
    one.count_unplaced("q", 1)
    assert limits(one.plan(0.0)) == {"q": 1}


# Queues come and go


def test_a_queue_that_is_left_is_claimed_from_no_more_and_its_runs_end_as_usual() -> None:
    one = planner(QueueLoad("q"), QueueLoad("other"))
    host = start(one, "q")
    one.count_unplaced("q", 1)
    one.leave("q")
    one.wake("q")
    assert (list(one.served), "q" in one.served, limits(one.plan(0.0))) == (
        ["other"],
        False,
        {"other": 18},
    )
    one.finished("q", host)
    assert one.find_host("q") is not None  # One is still unplaced.
    one.count_unplaced("q", -1)
    assert (one.used, one.runs) == (0, 0)
    one.leave("q")
    one.leave("never served")


def test_queue_left_during_a_claim_is_forgotten_when_the_claim_returns() -> None:
    one = planner(QueueLoad("q"))
    (order,) = one.plan(0.0)
    one.leave("q")
    assert not one.idle
    one.claimed("q", order.limit, 0, 0.0)
    assert (one.plan(0.0), one.idle) == ([], True)
    one.serve(QueueLoad("q", size=50))
    assert limits(one.plan(0.0)) == {"q": 4}


def test_an_unplaced_job_of_a_queue_that_was_left_keeps_its_units() -> None:
    one = planner(QueueLoad("q"), QueueLoad("other"), hosts=1)
    for _ in range(4):
        one.count_unplaced("q", 1)
    one.leave("q")
    assert limits(one.plan(0.0)) == {"other": 6}


def test_queue_served_again_counts_its_old_runs() -> None:
    one = planner(QueueLoad("q", concurrency=3))
    start(one, "q")
    one.leave("q")
    one.serve(QueueLoad("q", concurrency=3))
    one.wake("q")
    assert limits(one.plan(0.0)) == {"q": 2}


@pytest.mark.parametrize(("size", "used", "more"), [(10, 20, 18), (5, 10, 38), (50, 100, 2), (500, 200, 0)])
def test_changed_size_applies_to_current_runs(size: int, used: int, more: int) -> None:
    one = planner(QueueLoad("q"))
    hosts = [start(one, "q"), start(one, "q")]
    one.serve(QueueLoad("q", size=size))
    assert one.used == used
    assert limits(one.plan(0.0)).get("q", 0) == more
    for host in hosts:
        one.finished("q", host)
    assert (one.used, one.runs) == (0, 0)


def test_overfull_host_after_a_size_change_keeps_no_other_host_empty() -> None:
    one = planner(QueueLoad("grown"), QueueLoad("q"), hosts=1)
    for _ in range(10):
        start(one, "grown")
    one.claimed("grown", 1, 0, NEVER)
    one.open_host(2)
    one.serve(QueueLoad("grown", size=50))
    assert limits(one.plan(0.0)) == {"q": 10}


def test_a_size_that_changes_holds_for_a_run_that_was_given_up() -> None:
    one = planner(QueueLoad("stuck", size=40), QueueLoad("large", size=100), QueueLoad("q"), hosts=1)
    start(one, "stuck")
    one.gave_up("stuck", 1)
    one.serve(QueueLoad("stuck", size=10))
    one.finished("stuck", 1, given_up=True)
    start(one, "q")
    assert one.blocked_queues(0.0) == ["large"]  # Nothing is stuck any more: it is worth waiting for.


def test_a_worker_without_queues_has_nothing_to_do() -> None:
    one = planner()
    assert (one.plan(0.0), list(one.served), one.idle, one.full_queues(), one.next_claim_at(0.0)) == (
        [],
        [],
        True,
        [],
        NEVER,
    )


# Runs that wait lend their units


def test_lent_units_are_only_for_queues_for_which_a_run_waits() -> None:
    one = planner(QueueLoad("pipeline", size=50), QueueLoad("step"), QueueLoad("other"), hosts=1)
    one.claimed("pipeline", 2, 0, NEVER)
    for _ in range(2):
        one.started("pipeline", 1)
    assert one.plan(0.0) == []
    one.lend("pipeline", 1, 1)
    one.begin_wait("pipeline", "step")
    assert limits(one.plan(0.0)) == {"step": 5}
    one.claimed("step", 5, 1, NEVER)
    assert one.find_host("other") is None
    assert one.find_host("step") == 1


def test_a_size_that_changes_holds_for_lent_units() -> None:
    one = planner(QueueLoad("pipeline", size=50), QueueLoad("step"))
    one.started("pipeline", 1)
    one.lend("pipeline", 1, 1)
    one.serve(QueueLoad("pipeline", size=80))
    assert one.lent == 80
    one.lend("pipeline", 1, -1)
    assert one.lent == 0


def test_no_host_is_kept_from_jobs_for_which_runs_wait() -> None:
    loads = [QueueLoad("pipeline", size=50), QueueLoad("step"), QueueLoad("large", size=100), QueueLoad("quick")]
    one = planner(*loads, hosts=1)
    one.claimed("pipeline", 1, 0, NEVER)
    one.started("pipeline", 1)
    one.claimed("step", 1, 0, NEVER)
    for _ in range(3 * MAX_SKIPPED):  # A host is kept for the large job.
        one.wake("quick")
        for order in one.plan(0.0):
            one.claimed(order.queue, order.limit, 0, NEVER)
    one.wake("quick")
    one.wake("step")
    assert one.plan(0.0) == []
    one.lend("pipeline", 1, 1)
    one.begin_wait("pipeline", "step")
    assert limits(one.plan(0.0)) == {"step": 10}


@patient
@given(st.data())
def test_lending_is_bounded_and_leaves_no_trace(data: st.DataObject) -> None:
    """Runs begin, wait for each other, and end in any order."""
    sizes = data.draw(st.lists(st.integers(1, 120), min_size=1, max_size=4))
    max_runs = data.draw(st.none() | st.integers(1, 10))

    def fresh() -> ClaimPlanner:
        loads = (QueueLoad(str(n), size=size) for n, size in enumerate(sizes))
        return planner(*loads, hosts=2, max_runs=max_runs)

    one = fresh()
    running: list[tuple[str, int, set[str]]] = []

    def stop_waiting(queue: str, host: int, targets: set[str]) -> None:
        for target in targets:
            one.end_wait(queue, target)
        if targets:
            one.lend(queue, host, -1)
        targets.clear()

    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["claim", "claim", "wait", "resume", "end"])):
            case "claim":
                awaited = {target for _, _, targets in running for target in targets}
                before = {n: host.used for n, host in one.hosts.items()}
                for order in one.plan(0.0):
                    for _ in range(order.limit):
                        found = start(one, order.queue)
                        running.append((order.queue, found, set()))
                        assert order.queue in awaited or one.hosts[found].used <= 100 + one.hosts[found].lent
                    one.claimed(order.queue, order.limit, order.limit, 0.0)
                assert all(host.used <= max(400, before[n]) for n, host in one.hosts.items())
                assert max_runs is None or one.runs <= 4 * max_runs
            case "wait" if running:
                queue, host, targets = data.draw(st.sampled_from(running))
                target = str(data.draw(st.integers(0, len(sizes))))  # The last one is not served here.
                if not targets:
                    one.lend(queue, host, 1)
                if target not in targets:
                    targets.add(target)
                    one.begin_wait(queue, target)
            case "resume" if running:
                stop_waiting(*data.draw(st.sampled_from(running)))
            case "end" if running:
                queue, host, targets = running.pop(data.draw(st.integers(0, len(running) - 1)))
                stop_waiting(queue, host, targets)
                one.finished(queue, host)
            case _:
                pass
    for queue, host, targets in running:
        stop_waiting(queue, host, targets)
        one.finished(queue, host)
    assert (one.used, one.runs, one.lent, one.waits, one.usage()) == (0, 0, 0, {}, {})
    assert [host.free for host in one.hosts.values()] == [100, 100]
    assert sum(limits(one.plan(0.0)).values()) > 0
