"""What faults met, and how long it took until things went on."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable

from chaos import history
from chaos.blame import AWAY, FREEZES, SILENT, SWEPT_S
from chaos.story import Lease, Story

RECOVERY_S = {"child kill": 1.0, "worker kill": SWEPT_S + 1, "server kill": 5.0}
"""At the 99th percentile, where the storage was not hurt meanwhile."""
DISTURBING = AWAY | {"clock jump"}
CUT_OFF = FREEZES | SILENT | {"cut", "truncate"}
CLEAN_S = 1.0
"""So long after the storage was hurt, times are not counted."""
STARTED_S = 2.0
"""So long takes a worker to be there in the place of one that was killed."""
ALWAYS_MEET = frozenset({"cut", "delay", "truncate", "silence", "script flush"})


class Costs:
    def __init__(self, story: Story) -> None:
        self._story = story
        self.faults: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        """Those that met something: a job that was held, bytes on their way."""
        self.kinds = Counter(lease.started.kind for lease in story.leases.values() if lease.started is not None)
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.excesses: list[str] = []
        self._workers = {lease.pid for lease in story.leases.values()}
        self._over = {lease: self._over_at(lease) for lease in story.leases.values()}
        self._overs = sorted(self._over.values())
        claims_at = sorted(lease.at for lease in story.leases.values())
        seen: set[tuple[str, float]] = set()
        for fault in story.faults:
            self._recovery(fault, claims_at)
            if fault.kind in FREEZES and (fault.kind, fault.at) in seen:
                continue  # The same for another process of the same tree.
            seen.add((fault.kind, fault.at))
            self.faults[fault.kind] += 1
            self.hits[fault.kind] += fault.kind in ALWAYS_MEET or self._meets(fault, claims_at)

    def _over_at(self, lease: Lease) -> float:
        """When a lease was over: settled, or given to another."""
        settled = lease.settled
        if settled is not None:
            return settled.answered_at or settled.at
        latter = self._story.next_of(lease)
        if latter is not None:
            return latter.at
        return max((one.at for one in lease.sent), default=float("inf"))

    def _meets(self, fault: history.Fault, claims_at: list[float]) -> bool:
        if not fault.target:
            return bisect.bisect(claims_at, fault.until) > bisect.bisect_left(self._overs, fault.at)
        held: Iterable[Lease] = (*self._story.held_by[fault.target], *self._story.runs_of[fault.target])
        return any(lease.at <= fault.until and self._over[lease] >= fault.at for lease in held)

    def _recovery(self, fault: history.Fault, claims_at: list[float]) -> None:
        """How long jobs of whoever was killed could not be claimed by others; how long nothing was claimed after the
        server had answered again."""
        story = self._story
        if fault.kind == "server kill":
            at = bisect.bisect(claims_at, fault.until)
            if at < len(claims_at):
                self._note(fault, claims_at[at] - fault.until, since=fault.until)
        elif fault.kind == "worker kill":
            for lease in story.held_by[fault.target]:
                if lease.at <= fault.at <= self._over[lease] and not any(one.reply for one in lease.sent):
                    self._note(fault, self._back_at(lease) - fault.at)
        elif fault.kind == "child kill":
            for lease in story.runs_of[fault.target]:
                settled = lease.settled
                if lease.ended is None and settled is not None and (settled.answered_at or 0) >= fault.at:
                    self._note(fault, (settled.answered_at or 0) - fault.at, holder=lease.pid)

    def _back_at(self, lease: Lease) -> float:
        """When a job could be claimed again: when it was taken back, as somebody heard, or when it was claimed."""
        latter = self._story.next_of(lease)
        if latter is None:
            return float("-inf")  # It had been settled, and nobody has heard the reply.
        stalls = [at for at in self._story.stalls[lease.queue, lease.id] if lease.at < at <= latter.at]
        return min(stalls, default=latter.at)

    def _note(self, fault: history.Fault, seconds: float, since: float = 0.0, holder: int = 0) -> None:
        """Disturbed is what could not have gone on: the storage was away, or the one who had to tell it could not."""
        if seconds < 0:
            return
        since = since or fault.at
        until = since + seconds
        disturbed = any(
            (other.kind in DISTURBING or (holder and other.target == holder and other.kind in CUT_OFF))
            and other is not fault
            and other.at <= until
            and other.until + CLEAN_S >= since
            for other in (*self._story.by_target[0], *self._story.by_target[holder])
        )
        disturbed = disturbed or (fault.kind == "worker kill" and self._nobody_left(fault, until))
        self.recoveries[f"{fault.kind}, disturbed" if disturbed else fault.kind].append(seconds)
        if not disturbed and seconds > RECOVERY_S[fault.kind]:
            around = [
                f"{other.kind} {other.target or ''}".strip()
                for other in self._story.faults
                if other is not fault and other.at <= until and other.until >= since
            ]
            self.excesses.append(f"{fault.kind}: {seconds:.2f} s, beside {', '.join(around[:8]) or 'nothing'}")

    def _nobody_left(self, fault: history.Fault, until: float) -> bool:
        """Of three fleets, the two others were killed or frozen meanwhile: nobody could take over at once."""
        hurt = {
            other.target
            for other in self._story.faults
            if other.detail == "fleet" and other.kind in ("worker kill", "worker freeze", "tree freeze")
            if other.at <= until and other.until + STARTED_S >= fault.at and other.target in self._workers
        }
        return len(hurt - {fault.target}) >= 2
