"""Who is to blame for a lease that was lost: the fault of the process that had it, at that time."""

from __future__ import annotations

import itertools

from chaos import history
from chaos.setting import DEADLY, LEASE_S, SINGLETONS
from chaos.story import Lease, Sent, Story

SWEPT_S = 1.5 * LEASE_S
GRACE_S = LEASE_S / 2
"""A lease that looks expired is taken back no sooner than so long after."""
HEARD_S = 0.5
"""A call that was on its way when its process died was carried out within so long, or never."""
FREEZES = frozenset({"worker freeze", "tree freeze", "child freeze"})
AWAY = frozenset({"server kill", "server pause", "file locked"})
SILENT = frozenset({"silence", "delay"})
ENDED = frozenset({"complete", "fail", "retries", "timeouts"})


class Blame:
    def __init__(self, story: Story) -> None:
        self._story = story
        jumps = (fault for fault in story.faults if fault.kind == "clock jump")
        offsets = [(fault.at, float(fault.detail.split()[0])) for fault in jumps]
        """A jump tells by how much the clock is off from then on."""
        self.steps_forward = [
            at for (_, before), (at, now) in itertools.pairwise([(0.0, 0.0), *offsets]) if now > before
        ]
        """When the clock stepped on."""

    def frozen(self, pid: int, since: float, until: float) -> bool:
        return any(
            fault.kind in ("worker freeze", "tree freeze") and fault.until >= since and fault.at + GRACE_S <= until
            for fault in self._story.by_target[pid]
        )

    def cause(self, lease: Lease, latter: Lease) -> str | None:
        """The fault that cost a lease: by who had it, and when."""
        settled = lease.settled
        taken_back = not lease.possible - ENDED
        until = latter.at if settled is None else settled.answered_at or settled.at
        """When it must have struck by."""
        if taken_back and not any(lease.asked_at <= at <= until for at in self.steps_forward):
            until -= GRACE_S  # What is taken back was overdue for half a lease, unless the clock made it look so.
        found = [
            (fault.at, fault.kind)
            for pid in {lease.pid, lease.run_pid}
            for fault in self._story.by_target[pid]
            if self._can_cost(fault) and fault.at <= until and fault.until >= lease.asked_at - 0.1
        ]
        for neighbour in self._story.runs_of[lease.run_pid] if lease.run_pid != lease.pid else ():
            started = neighbour.started
            assert started is not None
            if started.kind in DEADLY and neighbour.ended is None and started.at <= until:
                found.append((started.at, f"handler: {started.kind}"))
        if lease.started is not None and lease.started.kind == "abandon":
            found.append((lease.started.at, "handler: abandon"))
        if settled is not None and settled.how == "release" and lease.queue in SINGLETONS and not found:
            # It must not go on while the storage cannot be reached.
            found += [
                (fault.at, fault.kind)
                for fault in (*self._story.by_target[0], *self._story.by_target[lease.pid])
                if fault.kind in AWAY | SILENT | {"cut", "truncate"}
                and fault.at <= until
                and fault.until + LEASE_S >= lease.at
            ]
        if taken_back and not found:
            return self._two_in_a_row(lease, latter)
        return max(found)[1] if found else None

    def child_unknown(self, lease: Lease, settled: Sent) -> str | None:
        """It was given to a child that died as it was to begin, and nobody has written down which that was."""
        until = settled.answered_at or settled.at
        deaths = [fault for fault in self._story.faults if fault.kind in ("child kill", "child freeze")]
        if any(lease.at - LEASE_S <= fault.at <= until for fault in deaths):
            return "child kill"
        crashes = [run.started for runs in self._story.runs_of.values() for run in runs if run.ended is None]
        near = [one for one in crashes if one and one.kind in DEADLY and lease.at - LEASE_S <= one.at <= until]
        return f"handler: {near[0].kind}" if near else None

    def _can_cost(self, fault: history.Fault) -> bool:
        """A connection that is silent for a moment must not cost a lease."""
        return "kill" in fault.kind or fault.kind in FREEZES or (
            fault.kind in SILENT and fault.until - fault.at >= LEASE_S / 2
        )  # fmt: skip

    def _two_in_a_row(self, lease: Lease, latter: Lease) -> str | None:
        """A clock that steps on, or a long outage, makes every lease look expired; who is not heard of within half a
        lease after that has lost it. One such shock is survived, not a second that falls into that time."""
        shocks = [(at, at, "clock jump") for at in self.steps_forward]
        shocks += [(fault.at, fault.until, fault.kind) for fault in self._story.by_target[0] if fault.kind in AWAY]
        seconds = (*self._story.by_target[0], *self._story.by_target[lease.pid])
        for at, until, kind in sorted(shocks):
            if lease.asked_at <= until and at <= latter.at and (kind == "clock jump" or until - at >= LEASE_S / 2):
                for fault in seconds:
                    falls = at < fault.at <= min(until + GRACE_S, latter.at) or fault.at <= until <= fault.until
                    lasts = fault.kind in AWAY | SILENT and fault.until >= until + GRACE_S / 2
                    if falls and (lasts or fault.kind == "clock jump") and (fault.at, fault.kind) != (at, kind):
                        return f"{kind}, then {fault.kind}"
        return None

    def unheard(self, lease: Lease, since: float) -> int:
        """How many claims there were in that time that may have been carried out, and that nobody has heard of."""
        found = 0
        for began, heard_at, pid in self._story.unheard[lease.queue]:
            over = self._story.killed_at(pid, began) if heard_at == began else heard_at
            over = began if over is None else over
            for fault in self._story.by_target[0]:
                if fault.kind in AWAY and fault.at <= over <= fault.until:
                    over = fault.until
            for fault in self._story.by_target[pid]:
                if fault.kind in SILENT and fault.at <= over + HEARD_S and fault.until >= over:
                    over = fault.until  # Bytes on their way may arrive as late as that.
            found += began <= lease.at - GRACE_S and over + HEARD_S >= since
        return found
