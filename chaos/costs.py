"""The effects of faults, and how long the recovery took."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable

from chaos import history
from chaos.causes import AWAY, FREEZES, SILENT
from chaos.index import HistoryIndex, Lease
from chaos.settings import Program

RECOVERY_S = {"child kill": 1.0, "worker kill": Program().swept_s + 1, "server kill": 5.0}
"""Limits at the 99th percentile, for recoveries during which the storage had no fault."""
DISTURBING = AWAY | {"clock jump"}
CUT_OFF = FREEZES | SILENT | {"cut", "truncate"}
CLEAN_S = 1.0
"""Recoveries that begin within this time after a fault of the storage are counted apart."""
STARTED_S = 2.0
"""Time after which a killed worker is replaced."""
ALWAYS_HIT = frozenset({"cut", "delay", "truncate", "silence", "script flush"})


class Costs:
    def __init__(self, index: HistoryIndex) -> None:
        self._index = index
        self.faults: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        """Faults with an effect: on a leased job, or on bytes on their way."""
        self.kinds = Counter(lease.started.kind for lease in index.leases.values() if lease.started is not None)
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.excesses: list[str] = []
        self._workers = {lease.pid for lease in index.leases.values()}
        self._over = {lease: self._over_at(lease) for lease in index.leases.values()}
        self._overs = sorted(self._over.values())
        claims_at = sorted(lease.at for lease in index.leases.values())
        seen: set[tuple[str, float]] = set()
        for fault in index.faults:
            self._recovery(fault, claims_at)
            if fault.kind in FREEZES and (fault.kind, fault.at) in seen:
                continue  # The same for another process of the same tree.
            seen.add((fault.kind, fault.at))
            self.faults[fault.kind] += 1
            self.hits[fault.kind] += fault.kind in ALWAYS_HIT or self._hits(fault, claims_at)

    def _over_at(self, lease: Lease) -> float:
        """The end of a lease: it was settled, or the job was claimed again."""
        settled = lease.settled
        if settled is not None:
            return settled.answered_at or settled.at
        latter = self._index.next_of(lease)
        if latter is not None:
            return latter.at
        return max((one.at for one in lease.sent), default=float("inf"))

    def _hits(self, fault: history.Fault, claims_at: list[float]) -> bool:
        if not fault.target:
            return bisect.bisect(claims_at, fault.until) > bisect.bisect_left(self._overs, fault.at)
        held: Iterable[Lease] = (*self._index.held_by[fault.target], *self._index.runs_of[fault.target])
        return any(lease.at <= fault.until and self._over[lease] >= fault.at for lease in held)

    def _recovery(self, fault: history.Fault, claims_at: list[float]) -> None:
        """How long the jobs of a killed process could not be claimed, and how long nothing was claimed after the server
        answered again."""
        index = self._index
        if fault.kind == "server kill":
            at = bisect.bisect(claims_at, fault.until)
            if at < len(claims_at):
                self._record(fault, claims_at[at] - fault.until, since=fault.until)
        elif fault.kind == "worker kill":
            for lease in index.held_by[fault.target]:
                if lease.at <= fault.at <= self._over[lease] and not any(one.reply for one in lease.sent):
                    self._record(fault, self._back_at(lease) - fault.at)
        elif fault.kind == "child kill":
            for lease in index.runs_of[fault.target]:
                settled = lease.settled
                if lease.ended is None and settled is not None and (settled.answered_at or 0) >= fault.at:
                    self._record(fault, (settled.answered_at or 0) - fault.at, holder=lease.pid)

    def _back_at(self, lease: Lease) -> float:
        """When a job could be claimed again: at the event that it was taken back, or at its next claim."""
        latter = self._index.next_of(lease)
        if latter is None:
            return float("-inf")  # It was settled, and the reply did not arrive.
        stalls = [at for at in self._index.stalls[lease.queue, lease.id] if lease.at < at <= latter.at]
        return min(stalls, default=latter.at)

    def _record(self, fault: history.Fault, seconds: float, since: float = 0.0, holder: int = 0) -> None:
        """A recovery is disturbed if the storage was away, or the process that reports it could not reach it."""
        if seconds < 0:
            return
        since = since or fault.at
        until = since + seconds
        disturbed = any(
            (other.kind in DISTURBING or (holder and other.target == holder and other.kind in CUT_OFF))
            and other is not fault
            and other.at <= until
            and other.until + CLEAN_S >= since
            for other in (*self._index.by_target[0], *self._index.by_target[holder])
        )
        disturbed = disturbed or (fault.kind == "worker kill" and self._no_worker_left(fault, until))
        self.recoveries[f"{fault.kind}, disturbed" if disturbed else fault.kind].append(seconds)
        if not disturbed and seconds > RECOVERY_S[fault.kind]:
            around = [
                f"{other.kind} {other.target or ''}".strip()
                for other in self._index.faults
                if other is not fault and other.at <= until and other.until >= since
            ]
            self.excesses.append(f"{fault.kind}: {seconds:.2f} s, beside {', '.join(around[:8]) or 'nothing'}")

    def _no_worker_left(self, fault: history.Fault, until: float) -> bool:
        """Were the two other fleets killed or frozen, so that none could take over at once?"""
        disturbed = {
            other.target
            for other in self._index.faults
            if other.detail == "fleet" and other.kind in ("worker kill", "worker freeze", "tree freeze")
            if other.at <= until and other.until + STARTED_S >= fault.at and other.target in self._workers
        }
        return len(disturbed - {fault.target}) >= 2
