"""Makes planners for tests: the capacity of a worker, its hosts and its queues."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast._core.capacity import QueueLoad
from holdfast._core.claim_planner import ClaimPlanner


def make_planner(
    host_capacity: int, served: Iterable[QueueLoad], *, max_runs: int | None = None, hosts: Iterable[int] = (0,)
) -> ClaimPlanner:
    planner = ClaimPlanner(host_capacity, max_runs)
    for number in hosts:
        planner.open_host(number)
    for load in served:
        planner.serve(load)
    return planner
