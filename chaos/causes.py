"""Finds the fault that cost a lease: by the process that had it, and the time."""

from __future__ import annotations

import itertools

from chaos import history
from chaos.index import HistoryIndex, Lease, Sent
from chaos.settings import DEADLY, Program

CALL_S = 0.5
"""A call that was on its way when its process died is carried out within this time, or never."""
FREEZES = frozenset({"worker freeze", "tree freeze", "child freeze"})
AWAY = frozenset({"server kill", "server pause", "file locked", "host stall"})
"""Faults during which no call to the storage is answered."""
SILENT = frozenset({"silence", "delay"})
SURVIVED_BY_RUNS = FREEZES | AWAY | SILENT | {"clock jump", "worker crash", "worker stop"}
"""Faults that cost a lease while its run goes on."""
OWN_FAULTS = frozenset({"abandon", "late"})
"""Kinds of consumers that lose their lease without another fault."""
ENDED = frozenset({"complete", "fail", "retries", "timeouts"})


class Causes:
    def __init__(self, index: HistoryIndex, program: Program) -> None:
        self._index = index
        self._program = program
        jumps = (fault for fault in index.faults if fault.kind == "clock jump")
        offsets = [(fault.at, float(fault.detail.split()[0])) for fault in jumps]
        """A jump has the offset of the clock from then on."""
        self.steps_forward = [
            at for (_, before), (at, now) in itertools.pairwise([(0.0, 0.0), *offsets]) if now > before
        ]
        """Times at which the clock jumped forward."""

    def frozen(self, pid: int, since: float, until: float) -> bool:
        """Was a process frozen long enough to lose a lease?"""
        return any(
            fault.kind in ("worker freeze", "tree freeze", "host stall")
            and fault.until >= since
            and fault.at + self._program.grace_s <= until
            for fault in (*self._index.by_target[pid], *self._index.by_target[0])
        )

    def outlived(self, lease: Lease, until: float) -> bool:
        """Could a run go on after its lease was lost?"""
        if lease.started is not None and lease.started.kind in OWN_FAULTS:
            return True
        faults = (fault for pid in {lease.pid, lease.run_pid, 0} for fault in self._index.by_target[pid])
        return any(
            fault.kind in SURVIVED_BY_RUNS and fault.at <= until and fault.until >= lease.asked_at - 0.1
            for fault in faults
        )

    def cause(self, lease: Lease, latter: Lease) -> str | None:
        """The fault that cost a lease, if there was one."""
        settled = lease.settled
        taken_back = not lease.possible - ENDED
        until = latter.at if settled is None else settled.answered_at or settled.at
        """The latest time of the fault."""
        if taken_back and not any(lease.asked_at <= at <= until for at in self.steps_forward):
            until -= self._program.grace_s  # A lease is overdue for half its length, unless the clock jumped.
        found = [
            (fault.at, fault.kind)
            for pid in {lease.pid, lease.run_pid, 0}
            for fault in self._index.by_target[pid]
            if self._can_cost(fault, lease) and fault.at <= until and fault.until >= lease.asked_at - 0.1
        ]
        for neighbour in self._index.runs_of[lease.run_pid] if lease.run_pid != lease.pid else ():
            started = neighbour.started
            assert started is not None
            if started.kind in DEADLY and neighbour.ended is None and started.at <= until:
                found.append((started.at, f"handler: {started.kind}"))
        if lease.started is not None and lease.started.kind in OWN_FAULTS:
            found.append((lease.started.at, f"handler: {lease.started.kind}"))
        if settled is not None and settled.how == "release" and not found:
            found += self._reasons_to_release(lease, until)
        if taken_back and not found:
            return self._two_faults(lease, latter)
        return max(found)[1] if found else None

    def _reasons_to_release(self, lease: Lease, until: float) -> list[tuple[float, str]]:
        """A consumer may release any job. A worker releases a singleton, which must not run while the storage cannot be
        reached."""
        if lease.started is not None and lease.started.kind == "release":
            return [(lease.started.at, "handler: release")]
        if lease.queue not in self._program.singletons:
            return []
        return [
            (fault.at, fault.kind)
            for fault in (*self._index.by_target[0], *self._index.by_target[lease.pid])
            if fault.kind in AWAY | SILENT | {"cut", "truncate"}
            and fault.at <= until
            and fault.until + self._program.lease_s >= lease.at
        ]

    def child_unknown(self, lease: Lease, settled: Sent) -> str | None:
        """The death of a child, which may have had a run that never started: the history does not say which child."""
        until = settled.answered_at or settled.at
        since = lease.at - self._program.lease_s
        deaths = [fault for fault in self._index.faults if fault.kind in ("child kill", "child freeze")]
        if any(since <= fault.at <= until for fault in deaths):
            return "child kill"
        crashes = [run.started for runs in self._index.runs_of.values() for run in runs if run.ended is None]
        near = [one for one in crashes if one and one.kind in DEADLY and since <= one.at <= until]
        return f"handler: {near[0].kind}" if near else None

    def _can_cost(self, fault: history.Fault, lease: Lease) -> bool:
        if fault.target == 0:
            return fault.kind == "host stall"
        if fault.kind == "worker stop":  # It releases what does not end in time.
            return "release" in lease.possible
        if fault.kind in SILENT:  # A connection that is silent for a moment must not cost a lease.
            return fault.until - fault.at >= self._program.grace_s
        return "kill" in fault.kind or fault.kind in FREEZES | {"worker crash"}

    def _two_faults(self, lease: Lease, latter: Lease) -> str | None:
        """A clock jump or a long outage makes every lease look expired, and a worker that does not extend its lease
        within the next half lease loses it. One such fault is survived, a second one in that time is not."""
        shocks = [(at, at, "clock jump") for at in self.steps_forward]
        shocks += [(fault.at, fault.until, fault.kind) for fault in self._index.by_target[0] if fault.kind in AWAY]
        seconds = (*self._index.by_target[0], *self._index.by_target[lease.pid])
        grace_s = self._program.grace_s
        for at, until, kind in sorted(shocks):
            if lease.asked_at <= until and at <= latter.at and (kind == "clock jump" or until - at >= grace_s):
                for fault in seconds:
                    falls = at < fault.at <= min(until + grace_s, latter.at) or fault.at <= until <= fault.until
                    lasts = fault.kind in AWAY | SILENT and fault.until >= until + grace_s / 2
                    if falls and (lasts or fault.kind == "clock jump") and (fault.at, fault.kind) != (at, kind):
                        return f"{kind}, then {fault.kind}"
        return None

    def unanswered(self, lease: Lease, since: float) -> int:
        """Number of claims in that time that the storage may have carried out and whose reply never arrived."""
        found = 0
        for began, failed_at, pid in self._index.unanswered[lease.queue]:
            over = self._index.killed_at(pid, began) if failed_at == began else failed_at
            over = began if over is None else over
            for fault in self._index.by_target[0]:
                if fault.kind in AWAY and fault.at <= over <= fault.until:
                    over = fault.until
            for fault in self._index.by_target[pid]:
                if fault.kind in SILENT and fault.at <= over + CALL_S and fault.until >= over:
                    over = fault.until  # Bytes on their way may arrive as late as that.
            found += began <= lease.at - self._program.grace_s and over + CALL_S >= since
        return found
