"""Holds a history against the promises, and says what each fault cost.

Fences and generations are stamps of one queue: they rise in the order in which the storage did things, so most of this
needs no clock at all. Where one job ran more than once without having failed, the fault that cost it the first run is
found by who had the lease, and when; if none is found, the run is red.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos import history
from tests.chaos.setting import DEADLY, LEASE_S, QUEUES, SINGLETONS

PROMISES = (
    "no loss",
    "no phantom",
    "one end",
    "no double completion",
    "fenced",
    "no overlap",
    "never early",
    "order",
    "fail handler",
    "waiters",
    "attributed",
    "stalls explained",
    "drained",
    "audit",
    "nothing left over",
)
STEP_US = 1_000
"""The stamps of one step may be ahead of its clock by one microsecond each."""
WAIT_SLACK_S = 2.0
"""So much later than it said may a waiter come back on a machine that has no time for it."""
SWEPT_S = 1.5 * LEASE_S
CLEAN_S = 1.0
"""So long after the storage was away, times are not counted."""
FREEZES = frozenset({"worker freeze", "tree freeze", "child freeze"})
AWAY = frozenset({"server kill", "server pause", "file locked"})
DISTURBING = AWAY | {"clock jump"}
SILENT = frozenset({"silence", "delay"})


Key = tuple[str, str]
"""A queue and an id."""


@dataclass(eq=False)
class Lease:
    """A claim, and all that became of it."""

    queue: str
    claim: history.Claim
    worker_pid: int
    at: float
    asked_at: float
    started: history.Started | None = None
    ended: history.Ended | None = None
    settlements: list[tuple[history.Settlement, float, float | None, str | None]] = field(default_factory=list)
    """What it was to be settled with, when that was sent, when it was answered, and how; None if nobody heard."""

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def fence(self) -> int:
        return self.claim.fence

    @property
    def settled(self) -> tuple[history.Settlement, float, float] | None:
        """How it ended, if its holder knows."""
        for settlement, sent, answered, reply in self.settlements:
            if reply == "ok" and answered is not None:
                return settlement, sent, answered
        return None

    def __str__(self) -> str:
        claim = self.claim
        ran = f", {self.started.kind} in {self.started.pid}" if self.started else ", never begun"
        how = f", ended {self.ended.how}" if self.ended else ""
        settled = "".join(f", {one.how}: {reply or 'no answer'}" for one, _, _, reply in self.settlements)
        return (
            f"{self.queue} {claim.id} generation {claim.generation} fence {claim.fence} attempt {claim.attempts}"
            f" (worker {self.worker_pid} at {self.at:.3f}{ran}{how}{settled})"
        )


@dataclass
class Verdict:
    storage: str
    checks: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    faults: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    excesses: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def that(self, promise: str, holds: bool, otherwise: object) -> None:
        self.checks[promise] += 1
        if not holds:
            self.wrong[promise].append(str(otherwise))


class Checker:
    def __init__(self, storage: str, lines: Iterable[Any]) -> None:
        self.verdict = Verdict(storage)
        self._asks: dict[Key, list[tuple[history.Asking, int, history.Asked | None]]] = defaultdict(list)
        self._leases: dict[tuple[str, str, int], Lease] = {}
        self._claims: dict[Key, list[Lease]] = defaultdict(list)
        self._unheard_claims: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._strays: list[history.Started] = []
        self._faults: list[history.Fault] = []
        self._told: set[tuple[str, str, int]] = set()
        self._stalls: dict[Key, list[float]] = defaultdict(list)
        self._kept: dict[Key, history.Kept] = {}
        self._cancelled: set[Key] = set()
        self._waits: list[tuple[history.Waiting, history.Waited | None]] = []
        self._closing: history.Closing | None = None
        self._read(lines)
        self._by_target: dict[int, list[history.Fault]] = defaultdict(list)
        for fault in self._faults:
            self._by_target[fault.target].append(fault)
        self._runs_of: dict[int, list[Lease]] = defaultdict(list)
        for lease in self._leases.values():
            if lease.started is not None:
                self._runs_of[lease.started.pid].append(lease)
        self._check()

    # Reading

    def _read(self, lines: Iterable[Any]) -> None:
        starts: list[history.Started] = []
        ends: list[history.Ended] = []
        settlements: list[tuple[history.Settling, history.Settled | None]] = []
        begun: dict[tuple[int, int], Any] = {}
        for line in lines:
            match line:
                case history.Beginning():
                    begun[line.pid, line.call] = line
                case history.Ending():
                    self._take(begun.pop((line.pid, line.call)), line, settlements)
                case history.Started():
                    starts.append(line)
                case history.Ended():
                    ends.append(line)
                case history.Told():
                    self._told.add((line.queue, line.id, line.generation))
                case history.Fault():
                    self._faults.append(line)
                case history.Stalled():
                    self._stalls[line.queue, line.id].append(line.at)
                case history.Kept():
                    self._kept[line.queue, line.id] = line
                case history.Closing():
                    self._closing = line
        for first in begun.values():
            self._take(first, None, settlements)
        for started in starts:
            lease = self._leases.get((started.queue, started.id, started.fence))
            if lease is None:
                self._strays.append(started)
            else:
                lease.started = started
        for ended in ends:
            lease = self._leases.get((ended.queue, ended.id, ended.fence))
            if lease is not None:
                lease.ended = ended
        for settling, settled in settlements:
            replies = settled.replies if settled is not None and settled.replies else [None] * len(settling.batch)
            answered = None if settled is None else settled.at
            for settlement, reply in zip(settling.batch, replies, strict=True):
                lease = self._leases.get((settling.queue, settlement.id, settlement.fence))
                if lease is not None:
                    lease.settlements.append((settlement, settling.at, answered, reply))
        for leases in self._claims.values():
            leases.sort(key=lambda lease: lease.fence)

    def _take(self, first: Any, last: Any, settlements: list[Any]) -> None:
        """Something that has a beginning, and perhaps an end."""
        match first:
            case history.Asking():
                for number, id in enumerate(first.ids):
                    self._asks[first.queue, id].append((first, number, last))
            case history.Claiming():
                if last is None or last.error:
                    # It may have been carried out, and was heard by nobody: until then at the latest.
                    until = first.at + 30 if last is None else last.at + 10
                    self._unheard_claims[first.queue].append((first.at, until))
                for claim in [] if last is None else last.claims:
                    lease = Lease(first.queue, claim, first.pid, last.at, first.at)
                    self._leases[first.queue, claim.id, claim.fence] = lease
                    self._claims[first.queue, claim.id].append(lease)
            case history.Settling():
                settlements.append((first, last))
            case history.Cancelling():
                self._cancelled.update((first.queue, id) for id in first.ids)
            case history.Waiting():
                self._waits.append((first, last))
            case _:
                raise AssertionError(first)

    # Checking

    def _check(self) -> None:
        counts = self.verdict.counts
        counts["jobs"] = sum(
            1 for asks in self._asks.values() for _, at, asked in asks if asked and asked.placed and _is_new(asked, at)
        )
        counts["jobs"] += sum(totals.get("promoted", 0) for totals in self._totals().values())
        counts["requests"] = sum(len(asks) for asks in self._asks.values())
        counts["runs"] = sum(lease.started is not None for lease in self._leases.values()) + len(self._strays)
        counts["leases"] = len(self._leases)
        counts["waits"] = len(self._waits)
        self._no_loss()
        self._no_phantom()
        self._ends()
        self._overlaps()
        self._never_early()
        for queue in QUEUES:
            if queue not in SINGLETONS:
                self._order(queue)
        self._fail_handlers()
        self._waiters()
        self._duplicates()
        self._stalls_explained()
        self._recovery()
        self._count_faults()
        self._closed()

    def _totals(self) -> dict[str, dict[str, int]]:
        return {} if self._closing is None else self._closing.totals

    def _no_loss(self) -> None:
        """Whatever was acknowledged has come to an end, and is there to be seen, unless nobody wanted to keep it."""
        for (queue, id), asks in self._asks.items():
            acknowledged = [
                asked.generations[at] for _, at, asked in asks if asked is not None and asked.placed and not asked.error
            ]
            if not acknowledged:
                continue
            newest = max(acknowledged)
            kept = self._kept.get((queue, id))
            if kept is not None:
                ended = kept.state in ("completed", "failed", "cancelled") and kept.generation >= newest
                self.verdict.that("no loss", ended, f"{queue} {id}: asked for as {newest}, in the end {kept}")
            else:
                self.verdict.that(
                    "no loss",
                    self._may_be_forgotten(queue, id, newest),
                    f"{queue} {id}: asked for as {newest}, and is not there; {self._story(queue, id)}",
                )

    def _may_be_forgotten(self, queue: str, id: str, generation: int) -> bool:
        """Nobody wanted its end to be kept, and it has (probably) come to one."""
        if queue != "question" and not queue.endswith("/failed"):
            return False
        for lease in self._claims[queue, id]:
            if lease.claim.generation >= generation:
                for settlement, _, _, reply in lease.settlements:
                    if settlement.how in ("complete", "fail") and reply != "lost":
                        return True
        return False

    def _no_phantom(self) -> None:
        """Whatever ran was asked for, and saw what was sent."""
        for lease in self._leases.values():
            if lease.started is None or lease.queue.endswith("/failed"):
                continue
            asks = self._asks.get((lease.queue, lease.id), [])
            tokens = {asking.tokens[at] for asking, at, _ in asks if asking.at <= lease.started.at}
            self.verdict.that("no phantom", lease.started.token in tokens, f"{lease} ran with {lease.started.token}")
        for started in self._strays:
            # Nobody has heard of that claim, and yet it runs.
            self.verdict.that("no phantom", False, f"a run without a claim: {started}")

    def _ends(self) -> None:
        """One settlement a lease, one end a generation, and only of whoever has the newest lease."""
        completed: Counter[tuple[str, str, int]] = Counter()
        ended: Counter[tuple[str, str, int]] = Counter()
        for (queue, id), leases in self._claims.items():
            for at, lease in enumerate(leases):
                ok = [(one, sent, answered) for one, sent, answered, reply in lease.settlements if reply == "ok"]
                self.verdict.that("one end", len(ok) <= 1, f"settled {len(ok)} times: {lease}")
                for settlement, _, _ in ok:
                    # One that got no answer is sent again, and answered as it was carried out the first time.
                    sent = min(sent for one, sent, _, _ in lease.settlements if one.how == settlement.how)
                    key = (queue, id, lease.claim.generation)
                    completed[key] += settlement.how == "complete"
                    ended[key] += settlement.how in ("complete", "fail")
                    later = next((other for other in leases[at + 1 :] if other.at < sent), None)
                    self.verdict.that("fenced", later is None, f"{lease} was settled, though there was {later}")
                    if settlement.how in ("complete", "fail"):
                        again = [
                            other for other in leases[at + 1 :] if other.claim.generation == lease.claim.generation
                        ]
                        self.verdict.that(
                            "one end",
                            not again,
                            f"it went on after its end: {lease}, then {', '.join(map(str, again))}",
                        )
        for key, count in ended.items():
            self.verdict.that("one end", count <= 1, f"{key} ended {count} times")
            self.verdict.that("no double completion", completed[key] <= 1, f"{key} completed {completed[key]} times")
        for queue, totals in self._totals().items():
            starts = totals.get("enqueued", 0) + totals.get("promoted", 0)
            ends = sum(totals.get(end, 0) for end in ("completed", "failed", "cancelled", "purged"))
            self.verdict.that("one end", starts == ends, f"{queue}: {starts} starts, {ends} ends")

    def _overlaps(self) -> None:
        """Two runs of one id are never at one time, unless who had the first was frozen for longer than a lease."""
        for (queue, _), leases in self._claims.items():
            runs = [lease for lease in leases if lease.started is not None]
            for former, latter in itertools.pairwise(runs):
                assert former.started is not None
                assert latter.started is not None
                beside = former.ended is not None and former.ended.at > latter.started.at
                beside = beside or (queue in SINGLETONS and latter.started.overlaps)
                if queue in SINGLETONS:
                    frozen = self._frozen(former, latter.started.at)
                    self.verdict.that("no overlap", not beside or frozen, f"{former} beside {latter}")
                elif beside:
                    self.verdict.counts["overlaps of others"] += 1

    def _frozen(self, lease: Lease, until: float) -> bool:
        pids = {lease.worker_pid, lease.started.pid if lease.started else 0}
        return any(
            fault.kind in FREEZES and fault.until >= lease.at and fault.at <= until
            for pid in pids
            for fault in self._by_target[pid]
        )

    def _never_early(self) -> None:
        for (queue, id), leases in self._claims.items():
            delays = {
                asked.generations[at]: asking.delays_ms[at]
                for asking, at, asked in self._asks.get((queue, id), [])
                if asked is not None and asked.generations and not asking.updates
            }
            for lease in leases:
                claim = lease.claim
                early = claim.run_at - claim.fence
                self.verdict.that("never early", early <= 0, f"{early} µs early: {lease}")
                delay_ms = delays.get(claim.generation)
                if delay_ms:
                    early = claim.generation + 1000 * delay_ms - claim.fence
                    self.verdict.that("never early", early <= 0, f"{early} µs before its delay was over: {lease}")

    def _order(self, queue: str) -> None:
        """A claim takes the highest priority, then the earliest run_at, then the first that came: go through the
        claims, and have at hand what waits at each. Where a job stood is known of those that nobody has changed."""
        claims = sorted(
            (lease.claim for (of, _), leases in self._claims.items() if of == queue for lease in leases),
            key=lambda claim: claim.fence,
        )
        jumped = any(fault.kind == "clock jump" for fault in self._faults)
        delays = {
            id: 1000 * asks[0][0].delays_ms[asks[0][1]]
            for (of, id), asks in self._asks.items()
            if of == queue and len(asks) == 1 and (of, id) not in self._cancelled
            if not asks[0][0].run_ats[asks[0][1]]  # That one follows the wall, wherever it goes.
        }
        first = [claim for claim in claims if claim.attempts == 1 and claim.id in delays]
        coming = sorted((claim.generation + delays[claim.id] + STEP_US, claim.fence) for claim in first)
        by_fence = {claim.fence: claim for claim in first}
        waiting: list[tuple[tuple[int, int], int]] = []
        at = 0
        for claim in claims:
            while at < len(coming) and coming[at][0] < claim.fence:
                due, fence = coming[at]
                heapq.heappush(waiting, ((-by_fence[fence].priority, due), fence))
                at += 1
            while waiting and waiting[0][1] <= claim.fence:
                heapq.heappop(waiting)
            if claim.fence in by_fence:
                due = claim.generation + delays[claim.id]
            elif not jumped:
                due = claim.run_at  # As the wall has it: the same as the queue's time, for as long as no clock jumps.
            else:
                continue
            passed = by_fence[waiting[0][1]] if waiting and waiting[0][0] < (-claim.priority, due) else None
            self.verdict.that("order", passed is None, f"{queue}: {claim} was claimed while {passed} waited")

    def _fail_handlers(self) -> None:
        for (queue, id), leases in self._claims.items():
            if queue.endswith("/failed") or queue == "pulled":
                continue
            for lease in leases:
                settled = lease.settled
                if settled is not None and settled[0].how == "fail":
                    key = (queue, id, lease.claim.generation)
                    self.verdict.that("fail handler", key in self._told, f"it was not told of {lease}")
        for (queue, id), kept in self._kept.items():
            if kept.state == "failed" and not queue.endswith("/failed") and queue != "pulled":
                self.verdict.that(
                    "fail handler", (queue, id, kept.generation) in self._told, f"it was not told of {queue} {id}"
                )
            if queue.endswith("/failed"):
                self.verdict.that("fail handler", kept.state == "completed", f"a fail handler has {kept.state}: {id}")

    def _waiters(self) -> None:
        for waiting, waited in self._waits:
            if waited is None:
                continue  # Whoever waited was killed.
            late = waited.at - waiting.at - waiting.seconds
            slow = self._was_slow(waiting.pid, waiting.at, waited.at)
            self.verdict.that(
                "waiters", late <= WAIT_SLACK_S or slow, f"{waiting.id} came back {late:.1f} s late: {waited}"
            )
            if not slow and waited.how == "WaitTimeout":
                self.verdict.waits.append(late)
            match waited.how:
                case "answer":
                    holds = waited.answer == waiting.expected
                case "WaitTimeout" | "JobFailed" | "StorageUnavailable" | "StorageFull":
                    holds = True
                case "JobForgotten":
                    holds = self._jumped(waiting.at, waited.at)  # What was kept for it for a while was kept too long.
                case _:
                    holds = False
            self.verdict.that("waiters", holds, f"{waiting.id} expected {waiting.expected}, and got {waited}")

    def _jumped(self, since: float, until: float) -> bool:
        return any(fault.kind == "clock jump" and since <= fault.at <= until for fault in self._by_target[0])

    def _was_slow(self, pid: int, since: float, until: float) -> bool:
        """The caller itself could not hear anything in time: a call to the storage may take so long to give up."""
        faults = (*self._by_target[0], *self._by_target[pid])
        return any(
            fault.kind in (AWAY | SILENT) and fault.at <= until and fault.until + SWEPT_S >= since for fault in faults
        )

    def _duplicates(self) -> None:
        """Whoever ran again without having failed had lost a run to a fault."""
        for leases in self._claims.values():
            for former, latter in itertools.pairwise(leases):
                if former.started is None or former.claim.generation != latter.claim.generation:
                    continue
                settled = former.settled
                if settled is not None and settled[0].how in ("retries", "timeouts"):
                    continue  # It has failed, and was to run again.
                if latter.claim.retries > former.claim.retries or latter.claim.timeouts > former.claim.timeouts:
                    continue  # The same; only nobody has heard the reply.
                cause = self._cause(former, latter)
                self.verdict.counts["duplicates"] += 1
                self.verdict.duplicates[cause or "nobody knows"] += 1
                self.verdict.that("attributed", cause is not None, f"{former}, then {latter}")

    def _cause(self, lease: Lease, latter: Lease) -> str | None:
        """The fault that cost a lease: by who had it, and when."""
        settled = lease.settled
        until = latter.at if settled is None else settled[2]
        assert lease.started is not None
        child, worker = lease.started.pid, lease.worker_pid
        found: list[tuple[float, str]] = []
        for pid in {child, worker}:
            for fault in self._by_target[pid]:
                lasts = fault.until - fault.at
                deadly = "kill" in fault.kind or fault.kind in FREEZES
                deadly = deadly or (fault.kind in SILENT and lasts >= LEASE_S / 2)
                if deadly and fault.at <= until and fault.until >= lease.asked_at - 0.1:
                    found.append((fault.at, fault.kind))
        for neighbour in self._runs_of[child]:
            started = neighbour.started
            assert started is not None
            over = neighbour.ended.at if neighbour.ended is not None else float("inf")
            if started.kind in DEADLY and child != worker and started.at <= until and over >= lease.asked_at:
                found.append((started.at, f"handler: {started.kind}"))
        if lease.started.kind == "abandon":
            found.append((lease.started.at, "handler: abandon"))
        if settled is not None and settled[0].how == "release" and not found:
            # It was stopped because the storage could not be reached.
            found += [
                (fault.at, fault.kind)
                for fault in self._by_target[0]
                if fault.kind in AWAY and fault.at <= until and fault.until + SWEPT_S >= lease.at
            ]
        return max(found)[1] if found else None

    def _stalls_explained(self) -> None:
        """A stall is a lease that somebody had and did not settle. If nobody is known to have had it, then a claim must
        have been carried out whose answer nobody has heard."""
        for (queue, _), leases in self._claims.items():
            before: Lease | None = None
            for lease in leases:
                if before is None or before.claim.generation != lease.claim.generation:
                    known = 0
                    base = 0 if lease.claim.attempts == 1 or before is None else None
                    since = lease.claim.generation
                else:
                    settled = before.settled
                    known = int(settled is None or settled[0].how == "stalls")
                    base = before.claim.stalls
                    since = before.fence
                if base is not None and lease.claim.stalls - base > known:
                    missing = lease.claim.stalls - base - known
                    heard_of = before.at if before is not None and since == before.fence else self._asked_at(lease)
                    unheard = sum(
                        began <= lease.at and until >= heard_of for began, until in self._unheard_claims[queue]
                    )
                    self.verdict.that(
                        "stalls explained",
                        unheard >= missing,
                        f"{missing} of the stalls of {lease} are nobody's, after {before}",
                    )
                else:
                    self.verdict.that("stalls explained", True, "")
                before = lease

    def _asked_at(self, lease: Lease) -> float:
        asks = self._asks.get((lease.queue, lease.id), [])
        return min((asking.at for asking, _, _ in asks), default=0.0)

    # What faults cost

    def _recovery(self) -> None:
        """How long jobs of whoever was killed could not be claimed by others; how long nothing was claimed after the
        server had answered again."""
        held: dict[int, list[Lease]] = defaultdict(list)
        for lease in self._leases.values():
            held[lease.worker_pid].append(lease)
        claims_at = sorted(lease.at for lease in self._leases.values())
        for fault in self._faults:
            if fault.kind == "server kill":
                at = bisect.bisect(claims_at, fault.until)
                if at < len(claims_at):
                    self._recovered("server kill", fault, claims_at[at] - fault.until)
            elif fault.kind == "worker kill":
                for lease in held[fault.target]:
                    if not any(one[3] for one in lease.settlements) and lease.at <= fault.at:
                        self._recovered("worker kill", fault, self._back_at(lease) - fault.at)
            elif fault.kind == "child kill":
                for lease in self._runs_of[fault.target]:
                    if lease.ended is None and lease.settled is not None and lease.settled[2] >= fault.at:
                        self._recovered("child kill", fault, lease.settled[2] - fault.at)

    def _back_at(self, lease: Lease) -> float:
        """When a job could be claimed again: when it was taken back, as somebody heard, or when it was claimed."""
        latter = next((one for one in self._claims[lease.queue, lease.id] if one.fence > lease.fence), None)
        claimed_at = float("-inf") if latter is None else latter.at
        stalls = [at for at in self._stalls[lease.queue, lease.id] if lease.at < at <= claimed_at]
        return min(stalls, default=claimed_at)

    def _recovered(self, kind: str, fault: history.Fault, seconds: float) -> None:
        if seconds < 0:
            return  # It had been settled and nobody has heard the reply, or it was lost before.
        limit = RECOVERY_S[kind]
        disturbed = kind != "server kill" and any(
            other.kind in (AWAY | {"clock jump"})
            and other.at <= fault.at + seconds
            and other.until + CLEAN_S >= fault.at
            for other in self._by_target[0]
        )
        self.verdict.recoveries[f"{kind}, disturbed" if disturbed else kind].append(seconds)
        if not disturbed and seconds > limit:
            around = [
                f"{other.kind} {other.target or ''}".strip()
                for other in self._faults
                if other is not fault and other.at <= fault.at + seconds and other.until >= fault.at
            ]
            self.verdict.excesses.append(f"{kind}: {seconds:.2f} s, beside {', '.join(around[:8]) or 'nothing'}")

    def _count_faults(self) -> None:
        leases = list(self._leases.values())
        by_worker: dict[int, list[Lease]] = defaultdict(list)
        for lease in leases:
            by_worker[lease.worker_pid].append(lease)
        seen: set[tuple[str, float]] = set()
        for fault in self._faults:
            if (fault.kind, fault.at) in seen and fault.kind in FREEZES:
                continue  # The same for another process of the same tree.
            seen.add((fault.kind, fault.at))
            self.verdict.faults[fault.kind] += 1
            open_then = [*by_worker[fault.target], *self._runs_of[fault.target]] if fault.target else leases
            hit = fault.kind in ("cut", "delay", "truncate", "silence", "script flush") or any(
                lease.at <= fault.until and (lease.settled is None or lease.settled[2] >= fault.at)
                for lease in open_then
            )
            self.verdict.hits[fault.kind] += hit
        for lease in leases:
            if lease.started is not None:
                self.verdict.kinds[lease.started.kind] += 1

    def _closed(self) -> None:
        closing = self._closing
        self.verdict.that("drained", closing is not None and closing.drained, f"it is not over: {closing}")
        if closing is not None:
            self.verdict.that("audit", not closing.problems, "; ".join(closing.problems[:10]))
            left = [*closing.leftovers, *closing.exits]
            self.verdict.that("nothing left over", not left, "; ".join(left[:10]))
            self.verdict.counts["drained ms"] = round(1000 * closing.drained_s)

    def _story(self, queue: str, id: str) -> str:
        return "; ".join(map(str, self._claims.get((queue, id), []))) or "never claimed"


RECOVERY_S = {"child kill": 1.0, "worker kill": SWEPT_S + 1, "server kill": 5.0}
"""At the 99th percentile, where the storage was not hurt meanwhile."""


def _is_new(asked: history.Asked, at: int) -> bool:
    return asked.placed[at] == "new"
