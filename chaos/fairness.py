"""The rules of claims: the order in which waiting jobs are claimed, and that no queue starves."""

from __future__ import annotations

import heapq

from chaos.causes import AWAY
from chaos.history import Claim
from chaos.index import Asked, HistoryIndex
from chaos.settings import Program
from chaos.verdict import Check

STEP_US = 1_000
"""The stamps of one step may be ahead of its clock by one microsecond each."""


def check_order(index: HistoryIndex, program: Program, check: Check) -> None:
    """A claim takes the highest priority, then the earliest `run_at`, then the oldest request."""
    for queue in program.queues:
        if queue not in program.singletons:
            _Order(index, queue, check).check()


class _Order:
    """Goes through the claims of a queue in the order of their fences, with the jobs that waited at each.

    Only jobs with one request and no cancel count as waiting: the place of others is not known. After a clock jump a
    wall time says nothing about the queue's time, so delays are compared and wall times are left out.
    """

    def __init__(self, index: HistoryIndex, queue: str, check: Check) -> None:
        self._queue = queue
        self._check = check
        self._jumped = any(fault.kind == "clock jump" for fault in index.faults)
        self._claims = sorted(
            (lease.claim for (of, _), leases in index.of_id.items() if of == queue for lease in leases),
            key=lambda claim: claim.fence,
        )
        requests = {
            id: asked[0]
            for (of, id), asked in index.asked.items()
            if of == queue and len(asked) == 1 and not index.cancels.get((of, id))
        }
        self._first = {
            claim.fence: self._due(claim, requests[claim.id])
            for claim in self._claims
            if claim.attempts == 1 and claim.id in requests and not (self._jumped and requests[claim.id].run_at)
        }

    def _due(self, claim: Claim, request: Asked) -> int:
        return claim.generation + 1000 * request.delay_ms if self._jumped else claim.run_at

    def check(self) -> None:
        by_fence = {claim.fence: claim for claim in self._claims if claim.fence in self._first}
        coming = sorted(
            (max(claim.generation, self._first[fence]) + STEP_US, fence) for fence, claim in by_fence.items()
        )
        waiting: list[tuple[tuple[int, int, int], int]] = []
        at = 0
        for claim in self._claims:
            while at < len(coming) and coming[at][0] < claim.fence:
                fence = coming[at][1]
                heapq.heappush(waiting, (self._place(by_fence[fence]), fence))
                at += 1
            while waiting and waiting[0][1] <= claim.fence:
                heapq.heappop(waiting)
            if claim.fence in self._first or not self._jumped:
                passed = by_fence[waiting[0][1]] if waiting and waiting[0][0] < self._place(claim) else None
                self._check("order", passed is None, f"{self._queue}: {claim} was claimed while {passed} waited")

    def _place(self, claim: Claim) -> tuple[int, int, int]:
        """The place of a claim in the queue. It is the first of its `run_at` if its age is not known."""
        if claim.fence in self._first:
            return -claim.priority, self._first[claim.fence], claim.generation
        return -claim.priority, claim.run_at, 0


def check_progress(index: HistoryIndex, program: Program, check: Check) -> None:
    """A queue with ready jobs is claimed from, once workers have started and unless the storage is away."""
    since: dict[str, tuple[float, int]] = {}
    """When each queue was last seen empty or with new claims, and its number of claims then."""
    disturbed = [fault for fault in index.faults if fault.kind in AWAY | {"clock jump"}]
    before = 0.0
    for sample in index.samples:
        started = any(claims for _, claims in sample.queues.values())
        if not started or any(fault.at <= sample.at and fault.until + program.swept_s >= before for fault in disturbed):
            since.clear()
        before = sample.at
        for queue, (ready, claims) in sample.queues.items():
            began, claims_before = since.get(queue, (sample.at, claims))
            if ready == 0 or claims != claims_before or queue in program.one_at_a_time:
                began = sample.at
            since[queue] = began, claims
            waited_s = sample.at - began
            check(
                "progress", waited_s <= program.starved_s, f"{queue}: {ready} ready jobs, no claim for {waited_s:.1f} s"
            )
