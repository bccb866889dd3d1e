"""Holds a history against the promises.

Fences and generations are stamps of one queue: they rise in the order in which the storage did things, so most of this
needs no clock at all. Where a job ran more than once without having failed, the fault that cost it the first run is
found by who had the lease, and when; if none is found, the run is red.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from chaos import history
from chaos.blame import AWAY, ENDED, SILENT, SWEPT_S, Blame
from chaos.setting import LEASE_S, QUEUES, SINGLETONS
from chaos.story import Key, Lease, Story

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
EVER = 1 << 62


@dataclass
class Verdict:
    checks: Counter[str] = field(default_factory=Counter[str])
    wrong: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    duplicates: Counter[str] = field(default_factory=Counter[str])
    """Runs that were done again, by what cost the first."""
    late: list[float] = field(default_factory=list[float])
    """How late those came back who had waited in vain."""
    counts: Counter[str] = field(default_factory=Counter[str])

    def that(self, promise: str, holds: bool, otherwise: object) -> None:
        self.checks[promise] += 1
        if not holds:
            self.wrong[promise].append(str(otherwise))


class Checker:
    def __init__(self, processes: Iterable[Iterable[Any]]) -> None:
        self.story = story = Story(processes)
        self.verdict = Verdict()
        self._blame = Blame(story)
        self._that = self.verdict.that
        self._count()
        for text in story.strange:
            self._that("fenced", False, text)
        for key in story.asked.keys() | story.of_id.keys() | story.kept.keys():
            self._no_loss(key)
            self._own_request(key)
            self._cancelled_for_good(key)
        for key, leases in story.of_id.items():
            for at, lease in enumerate(leases):
                self._one_settlement(lease, leases[at + 1 :])
                self._work_was_done(lease)
            self._one_end(key, leases)
            runs = [lease for lease in leases if lease.started is not None]
            for at, run in enumerate(runs):
                self._no_overlap(runs[at - 1] if at else None, run)
            for former, latter in itertools.pairwise(leases):
                self._counted(former, latter)
                self._lost(former, latter)
            self._stalls_explained(leases)
        self._totals()
        self._fences_rise()
        for queue in QUEUES:
            if queue not in SINGLETONS:
                self._order(queue)
        self._fail_handlers()
        for waiting, waited in story.waits:
            self._waiter(waiting, waited)
        self._closed()

    def _count(self) -> None:
        story, counts = self.story, self.verdict.counts
        totals = {} if story.closing is None else story.closing.totals
        counts["jobs"] = sum(
            numbers.get("enqueued", 0) + numbers.get("promoted", 0)
            for queue, numbers in totals.items()
            if not queue.endswith("/failed")
        )
        counts["requests"] = sum(len(asked) for asked in story.asked.values())
        counts["leases"] = len(story.leases)
        counts["runs"] = sum(lease.started is not None for lease in story.leases.values())
        counts["waits"] = len(story.waits)

    # Nothing is lost, nothing comes from nowhere

    def _no_loss(self, key: Key) -> None:
        """Whatever was acknowledged, or claimed, has come to an end that is there to be seen, unless nobody wanted to
        keep it; and that end is one that somebody has brought about."""
        story, asked = self.story, self.story.asked.get(key, [])
        known = [one.generation for one in asked if one.placed] + [lease.generation for lease in story.of_id[key]]
        kept = story.kept.get(key)
        asked_to_stop = [cancel.at for cancel in story.cancels[key] if cancel.reply in ("cancelled", "asked", "")]
        cancelled_at = max(asked_to_stop, default=0.0)
        called_off = bool(asked) and cancelled_at > asked[-1].at
        """With the request that waited for the end of its run."""
        newest = max(known, default=0)
        if kept is not None:
            ended = kept.state in ("completed", "failed", "cancelled") and (kept.generation >= newest or called_off)
            self._that("no loss", ended, f"{key}: known as {newest}, in the end {kept}; {story.tell(*key)}")
            how = story.possible(*key, kept.generation, kept.generation + 1)
            brought_about = {"completed": "complete" in how, "failed": "fail" in how, "cancelled": cancelled_at > 0}
            self._that("no loss", brought_about.get(kept.state, True), f"nobody did that: {kept}; {story.tell(*key)}")
        elif newest:
            self._that("no loss", self._is_forgotten(key, newest), f"{key} is not there; {story.tell(*key)}")
        placed = [one for one in asked if one.placed in ("new", "updated", "deferred")]
        for former, latter in itertools.pairwise(sorted(placed, key=lambda one: one.generation)):
            if latter.placed == "new" and latter.generation > former.generation and not cancelled_at:
                ends = story.possible(*key, former.generation, latter.generation) & {"complete", "fail"}
                self._that("no loss", bool(ends), f"{key}: {former.generation} had no end; {story.tell(*key)}")

    def _is_forgotten(self, key: Key, generation: int) -> bool:
        """Nobody wanted its end to be kept, and the last who had it may have brought it to one."""
        leases = self.story.of_id[key]
        if key[0] != "question" and not key[0].endswith("/failed"):
            return False
        return bool(leases) and leases[-1].generation >= generation and "complete" in leases[-1].possible

    def _own_request(self, key: Key) -> None:
        """Whatever ran was asked for, and saw what was sent, with its own priority, and not before its time."""
        queue, asked = key[0], self.story.asked.get(key, [])
        by_generation = {one.generation: one for one in asked if one.placed in ("new", "updated", "deferred")}
        jumped_at = min((fault.at for fault in self.story.faults if fault.kind == "clock jump"), default=float("inf"))
        for lease in self.story.of_id.get(key, []):
            claim = lease.claim
            early = claim.run_at - claim.fence
            self._that("never early", early <= 0, f"{early} µs early: {lease}")
            if queue.endswith("/failed"):
                continue
            tokens = {one.token for one in asked if one.at <= lease.at}
            mine = by_generation.get(claim.generation)
            if mine is not None:
                tokens &= {mine.token}
                self._that("order", claim.priority == mine.priority, f"another priority: {lease}")
                early = claim.generation - STEP_US + 1000 * mine.delay_ms - claim.fence
                if mine.delay_ms and mine.placed == "new":
                    self._that("never early", early <= 0, f"{early} µs before its delay was over: {lease}")
                if mine.run_at and len(asked) == 1 and lease.at < jumped_at:
                    self._that("never early", claim.fence >= mine.run_at, f"before {mine.run_at}: {lease}")
            if lease.started is not None:
                self._that("no phantom", lease.started.token in tokens, f"{lease} ran with {lease.started.token}")

    def _cancelled_for_good(self, key: Key) -> None:
        """What was taken out before anybody had it is not given to anybody; a later request of its id is."""
        for cancel in self.story.cancels.get(key, ()):
            if cancel.reply == "cancelled":
                before = {one.generation for one in self.story.asked.get(key, []) if 0 < one.answered_at < cancel.at}
                later = [lease for lease in self.story.of_id[key] if lease.asked_at > cancel.answered_at]
                runs = next((lease for lease in later if lease.generation in before), None)
                self._that("one end", runs is None, f"it went on after it was cancelled at {cancel.at:.3f}: {runs}")

    # One end

    def _one_settlement(self, lease: Lease, later: list[Lease]) -> None:
        """A lease is settled once, and only for as long as there is no later one."""
        ok = [one for one in lease.sent if one.reply == "ok"]
        self._that("one end", len(ok) <= 1, f"settled {len(ok)} times: {lease}")
        for settled in ok:
            # One that got no answer is sent again, and answered as it was carried out the first time.
            sent_at = min(one.at for one in lease.sent if one.how == settled.how)
            passed = next((other for other in later if other.at < sent_at), None)
            self._that("fenced", passed is None, f"{lease} was settled, though there was {passed}")

    def _one_end(self, key: Key, leases: list[Lease]) -> None:
        """A generation ends once, and nothing runs after that."""
        ends: Counter[int] = Counter()
        completed: Counter[int] = Counter()
        for at, lease in enumerate(leases):
            settled = lease.settled
            if settled is None or settled.how not in ("complete", "fail"):
                continue
            ends[lease.generation] += 1
            completed[lease.generation] += settled.how == "complete"
            again = [str(other) for other in leases[at + 1 :] if other.generation == lease.generation]
            self._that("one end", not again, f"it went on after its end: {lease}, then {', '.join(again)}")
        for generation, count in ends.items():
            self._that("one end", count == 1, f"{key} {generation} ended {count} times")
            twice = completed[generation] > 1
            self._that("no double completion", not twice, f"{key} {generation} completed {completed[generation]} times")

    def _work_was_done(self, lease: Lease) -> None:
        """What is said to be done was done, by a run that ended so; what failed did not return."""
        how = None if lease.ended is None else lease.ended.how
        pulled = lease.queue == "pulled"  # There a lease is settled by the run itself.
        for one in lease.sent:
            if one.how == "complete":
                done = lease.started is not None and (how == "ok" or pulled)
                self._that("one end", done, f"completed, though it was not done: {lease}")
            elif one.how in ("retries", "fail") and not pulled:
                self._that("one end", how != "ok", f"it was done, and counts as failed: {lease}")

    def _totals(self) -> None:
        """What the storage has counted is what was seen; of what nobody has heard, any part."""
        story = self.story
        least: dict[str, Counter[str]] = defaultdict(Counter)
        more: dict[str, Counter[str]] = defaultdict(Counter)
        for (queue, _), asked in story.asked.items():
            least[queue]["enqueued"] += sum(one.placed == "new" for one in asked)
            more[queue]["enqueued"] += sum(not one.placed for one in asked)
        for lease in story.leases.values():
            for how, end in (("complete", "completed"), ("fail", "failed")):
                replies = {one.reply for one in lease.sent if one.how == how}
                unsure = "ok" not in replies and None in replies
                unsure = unsure or (how == "fail" and "ok" in replies and bool(story.cancels[lease.queue, lease.id]))
                least[lease.queue][end] += "ok" in replies and not unsure
                more[lease.queue][end] += unsure
        if story.closing is None:
            return
        for queue in story.closing.totals.keys() | least.keys():
            totals = story.closing.totals.get(queue, {})
            starts = totals.get("enqueued", 0) + totals.get("promoted", 0)
            ends = sum(totals.get(end, 0) for end in ("completed", "failed", "cancelled", "purged"))
            self._that("one end", starts == ends, f"{queue}: {starts} starts, {ends} ends")
            for name, count in least[queue].items():
                if not (queue.endswith("/failed") and name == "enqueued"):
                    holds = count <= totals.get(name, 0) <= count + more[queue][name]
                    said = f"{queue}: {totals.get(name, 0)} {name}, {count} heard of, {more[queue][name]} unsure"
                    self._that("one end", holds, said)

    def _fences_rise(self) -> None:
        """Of two claims, one answered before the other was sent, the later has the higher fence. No two have one."""
        by_queue: dict[str, list[Lease]] = defaultdict(list)
        for lease in self.story.leases.values():
            by_queue[lease.queue].append(lease)
        for queue, leases in by_queue.items():
            for fence, count in Counter(lease.fence for lease in leases).items():
                self._that("fenced", count == 1, f"{queue}: {count} leases have the fence {fence}")
            answered = sorted(leases, key=lambda lease: lease.at)
            newest: Lease | None = None
            at = 0
            for lease in sorted(leases, key=lambda lease: lease.asked_at):
                while answered[at].at < lease.asked_at:
                    newest = max(newest or answered[at], answered[at], key=lambda lease: lease.fence)
                    at += 1
                rises = newest is None or lease.fence > newest.fence
                self._that("fenced", rises, f"a fence went back: {lease} after {newest}")

    # One at a time, in order

    def _no_overlap(self, former: Lease | None, latter: Lease) -> None:
        """Two runs of a singleton are never at one time, unless who had the first was frozen for longer than that."""
        assert latter.started is not None
        beside = latter.started.overlaps
        if former is not None and former.ended is not None:
            beside = beside or former.ended.at > latter.started.at
        if latter.queue in SINGLETONS:
            # An earlier one may go on after a thaw; and the later may begin after one, beside whoever has it by then.
            frozen = self._blame.frozen(latter.pid, latter.at, latter.started.at) or any(
                self._blame.frozen(earlier.pid, earlier.at, latter.at)
                for earlier in self.story.of_id[latter.queue, latter.id]
                if earlier.fence < latter.fence and earlier.started is not None
                if earlier.ended is None or earlier.ended.at >= latter.started.at or earlier is former
            )
            self._that("no overlap", not beside or frozen, f"{former or 'nobody known'} beside {latter}")
        elif beside:
            self.verdict.counts["overlaps of others"] += 1  # Their first lease is lost: that must be attributed.

    def _order(self, queue: str) -> None:
        """A claim takes the highest priority, then the earliest run_at, then the first that came: go through the
        claims, and have at hand what waits at each. Where a job stood is known of those that nobody has changed."""
        story = self.story
        claims = sorted(
            (lease.claim for (of, _), leases in story.of_id.items() if of == queue for lease in leases),
            key=lambda claim: claim.fence,
        )
        jumped = any(fault.kind == "clock jump" for fault in story.faults)
        delays = {
            id: 1000 * asked[0].delay_ms
            for (of, id), asked in story.asked.items()
            if of == queue and len(asked) == 1 and not story.cancels.get((of, id))
            if not asked[0].run_at  # That one follows the wall, wherever it goes.
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
            self._that("order", passed is None, f"{queue}: {claim} was claimed while {passed} waited")

    # Whoever must be told is told

    def _fail_handlers(self) -> None:
        story = self.story
        for lease in story.leases.values():
            settled = lease.settled
            if settled is None or settled.how != "fail" or lease.queue.endswith("/failed") or lease.queue == "pulled":
                continue
            key = (lease.queue, lease.id)
            called_off = any(cancel.at < settled.at and cancel.reply in ("asked", "") for cancel in story.cancels[key])
            if not called_off:
                told = (*key, lease.generation) in story.told
                self._that("fail handler", told, f"it was not told of {lease}")
        for (queue, id), kept in story.kept.items():
            if queue.endswith("/failed"):
                self._that("fail handler", kept.state == "completed", f"a fail handler has {kept.state}: {id}")
            elif kept.state == "failed" and queue != "pulled":
                told = (queue, id, kept.generation) in story.told
                self._that("fail handler", told, f"it was not told of {queue} {id}")
        for (queue, id, generation), times in story.told.items():
            failed = "fail" in story.possible(queue, id, generation, generation + 1)
            self._that("fail handler", failed, f"it was told of {queue} {id} {generation}, which has not failed")
            follow_up = story.of_id.get((f"{queue}/failed", f"{id}@{generation}"), [])
            runs = sum(lease.started is not None for lease in follow_up)
            said = f"it was told {times} times of {queue} {id} {generation}, and ran {runs} times"
            self._that("fail handler", times <= runs, said)

    def _waiter(self, waiting: history.Waiting, waited: history.Waited | None) -> None:
        """Nobody waits longer than they said, and nobody gets another's answer, or none without a reason."""
        story = self.story
        if waited is None:
            killed = story.killed_at(waiting.pid, waiting.at) is not None
            self._that("waiters", killed, f"it never came back: {waiting}")
            return
        around = sorted((*story.by_target[0], *story.by_target[waiting.pid]), key=lambda fault: fault.at)
        deadline = waiting.at + waiting.seconds
        limit = deadline + WAIT_SLACK_S
        disturbed = False
        for fault in around:
            if fault.kind in AWAY | SILENT and fault.at <= limit and fault.until + SWEPT_S >= deadline:
                disturbed = True
                limit = max(limit, fault.until + SWEPT_S)  # So long may a call to the storage take to give up.
        self._that("waiters", waited.at <= limit, f"{waiting.id} came back {waited.at - deadline:.1f} s late: {waited}")
        match waited.how:
            case "answer":
                holds = waited.answer == waiting.expected
            case "WaitTimeout":
                holds = waited.at > deadline - 0.05 and (disturbed or not self._had_ended(waiting, deadline))
                if not disturbed:
                    self.verdict.late.append(waited.at - deadline)
            case "JobFailed":
                holds = "fail" in story.possible(waiting.queue, waiting.id, 0, EVER)
            case "StorageUnavailable" | "StorageFull":
                kinds = {"full memory"} if waited.how == "StorageFull" else AWAY | SILENT | {"cut", "truncate"}
                holds = any(
                    fault.kind in kinds and fault.at <= waited.at and fault.until + SWEPT_S >= waiting.at
                    for fault in around
                )
            case "JobForgotten":  # What was kept for it for a while was kept for too long, as the clock has it.
                holds = any(waiting.at <= at <= waited.at for at in self._blame.steps_forward)
            case _:
                holds = False
        self._that("waiters", holds, f"{waiting.id} expected {waiting.expected}, and got {waited}")

    def _had_ended(self, waiting: history.Waiting, deadline: float) -> bool:
        """So early that whoever waited must have heard of it."""
        for lease in self.story.of_id.get((waiting.queue, waiting.id), []):
            settled = lease.settled
            if settled is not None and settled.how in ("complete", "fail") and settled.answered_at is not None:
                return settled.answered_at + WAIT_SLACK_S < deadline
        return False

    # What a fault cost

    def _counted(self, former: Lease, latter: Lease) -> None:
        """Counts rise by what was settled, and by nothing else."""
        if former.generation != latter.generation:
            return
        risen = latter.claim.attempts - former.claim.attempts
        self._that("one end", risen > 0, f"attempts rose by {risen}: {former}, then {latter}")
        if risen != 1:
            return
        for count in ("retries", "timeouts"):
            risen = getattr(latter.claim, count) - getattr(former.claim, count)
            replies = [one.reply for one in former.sent if one.how == count and one.reply != "lost"]
            holds = risen == 1 if "ok" in replies else risen in (0, 1) if replies else risen == 0
            self._that("one end", holds, f"{count} rose by {risen}: {former}, then {latter}")

    def _lost(self, former: Lease, latter: Lease) -> None:
        """Whoever lost a lease without having failed, or could not end it, was hurt."""
        if self._was_ended(former, latter):
            return
        settled = former.settled
        if former.started is None and any(one.how == "release" for one in former.sent):
            # Given back before it was begun. If that was refused, it had been another's when it was heard of.
            late = former.at - former.asked_at >= LEASE_S
            holds = "release" in former.possible or late or self._blame.cause(former, latter) is not None
            self._that("attributed", holds, f"{former}, then {latter}")
            return
        cause = self._blame.cause(former, latter)
        if cause is None and former.started is None and settled is not None:
            cause = self._blame.child_unknown(former, settled)
        if former.started is not None and latter.started is not None and former.generation == latter.generation:
            self.verdict.counts["duplicates"] += 1
            self.verdict.duplicates[cause or "nobody knows"] += 1
        self._that("attributed", cause is not None, f"{former}, then {latter}")

    def _was_ended(self, former: Lease, latter: Lease) -> bool:
        """By its holder, as done or as failed. Where nobody has heard so, what came next tells."""
        if former.settled is not None:
            return former.settled.how in ENDED
        ends = former.possible & ENDED
        if former.generation != latter.generation:
            return bool(ends)
        return any(getattr(latter.claim, how, 0) > getattr(former.claim, how, 0) for how in ends)

    def _stalls_explained(self, leases: list[Lease]) -> None:
        """A stall is a lease that somebody had and did not settle. If nobody is known to have had it, then a claim must
        have been carried out whose answer nobody has heard."""
        before: Lease | None = None
        for lease in leases:
            claim, known, base = lease.claim, 0, 0
            if before is not None and before.generation == lease.generation:
                base = before.claim.stalls
                known = int(before.settled is None or before.settled.how == "stalls")
                if not before.possible:
                    counted = claim.stalls > base
                    self._that("stalls explained", counted, f"not counted: {before}, then {lease}")
            elif claim.attempts > 1 and before is not None:
                base = claim.stalls  # What became of a generation that nobody claimed is not known.
            missing = claim.stalls - base - known
            since = before.asked_at if before is not None else self._first_asked(lease)
            unheard = self._blame.unheard(lease, since) if missing > 0 else 0
            self._that(
                "stalls explained", missing <= unheard, f"{missing} stalls of {lease} are nobody's, after {before}"
            )
            before = lease

    def _first_asked(self, lease: Lease) -> float:
        return min((one.at for one in self.story.asked.get((lease.queue, lease.id), [])), default=0.0)

    def _closed(self) -> None:
        closing = self.story.closing
        self._that("drained", closing is not None and closing.drained, f"it is not over: {closing}")
        if closing is not None:
            self._that("audit", not closing.problems, "; ".join(closing.problems[:10]))
            left = [*closing.leftovers, *closing.exits]
            self._that("nothing left over", not left, "; ".join(left[:10]))
            self.verdict.counts["drained ms"] = round(1000 * closing.drained_s)
