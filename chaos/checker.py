"""Checks a history against the rules.

Fences and generations are stamps of one queue: they rise in the order of the storage's steps, so most rules need no
clock. If a job ran again without having failed, the checker looks for the fault that cost its first lease, by the
process that had the lease, and the time. Without such a fault the rule `attributed` is broken.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from chaos import history
from chaos.causes import AWAY, ENDED, SILENT, Causes
from chaos.fairness import check_order, check_progress
from chaos.index import HistoryIndex, Key, Lease
from chaos.settings import MIN_BACKOFF_S, Program
from chaos.verdict import Verdict

STEP_US = 1_000
"""The stamps of one step may be ahead of its clock by one microsecond each."""
WAIT_SLACK_S = 2.0
"""A caller on a busy machine may return this much later than its timeout."""
EVER = 1 << 62


class Checker:
    def __init__(self, processes: Iterable[Iterable[Any]], program: Program | None = None) -> None:
        self.program = program = program or Program()
        self.index = index = HistoryIndex(processes)
        self.verdict = Verdict()
        self._causes = Causes(index, program)
        self._check = self.verdict.check
        self._count()
        for text in index.impossible:
            self._check("fenced", False, text)
        for key in index.asked.keys() | index.of_id.keys() | index.kept.keys():
            self._no_loss(key)
            self._own_request(key)
            self._cancelled_for_good(key)
        for key, leases in index.of_id.items():
            for at, lease in enumerate(leases):
                self._one_settlement(lease, leases[at + 1 :])
                self._work_was_done(lease)
                self._limits(lease)
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
        check_order(index, program, self._check)
        check_progress(index, program, self._check)
        self._fail_handlers()
        for waiting, waited in index.waits:
            self._waiter(waiting, waited)
        self._closed()

    def _count(self) -> None:
        index, counts = self.index, self.verdict.counts
        totals = {} if index.closing is None else index.closing.totals
        counts["jobs"] = sum(
            numbers.get("enqueued", 0) + numbers.get("promoted", 0)
            for queue, numbers in totals.items()
            if not queue.endswith("/failed")
        )
        counts["requests"] = sum(len(asked) for asked in index.asked.values())
        counts["leases"] = len(index.leases)
        counts["runs"] = sum(lease.started is not None for lease in index.leases.values())
        counts["waits"] = len(index.waits)

    # Requests

    def _no_loss(self, key: Key) -> None:
        """An acknowledged or claimed job ends, its record shows the end, and a settlement or cancel caused it."""
        index, asked = self.index, self.index.asked.get(key, [])
        known = [one.generation for one in asked if one.placed] + [lease.generation for lease in index.of_id[key]]
        kept = index.kept.get(key)
        asked_to_stop = [cancel.at for cancel in index.cancels[key] if cancel.reply in ("cancelled", "asked", "")]
        cancelled_at = max(asked_to_stop, default=0.0)
        called_off = bool(asked) and cancelled_at > asked[-1].at
        """A cancel also drops the request that waits for the end of a run."""
        newest = max(known, default=0)
        if kept is not None:
            ended = kept.state in ("completed", "failed", "cancelled") and (kept.generation >= newest or called_off)
            self._check(
                "no loss", ended, f"{key}: newest generation {newest}, at the end {kept}; {index.describe(*key)}"
            )
            how = index.possible(*key, kept.generation, kept.generation + 1)
            caused = {"completed": "complete" in how, "failed": "fail" in how, "cancelled": cancelled_at > 0}
            self._check("no loss", caused.get(kept.state, True), f"without a cause: {kept}; {index.describe(*key)}")
        elif newest:
            forgotten = self._is_forgotten(key, newest, bool(cancelled_at))
            self._check("no loss", forgotten, f"{key} is missing; {index.describe(*key)}")
        placed = [one for one in asked if one.placed in ("new", "updated", "deferred")]
        for former, latter in itertools.pairwise(sorted(placed, key=lambda one: one.generation)):
            if latter.placed == "new" and latter.generation > former.generation and not cancelled_at:
                ends = index.possible(*key, former.generation, latter.generation) & {"complete", "fail"}
                self._check("no loss", bool(ends), f"{key}: {former.generation} had no end; {index.describe(*key)}")

    def _is_forgotten(self, key: Key, generation: int, cancelled: bool) -> bool:
        """The outcome need not be kept, and the last lease may have completed the job."""
        leases = self.index.of_id[key]
        started = leases[-1].started if leases else None
        returns_nothing = started is not None and started.kind == "nothing"  # There is no result to remember.
        if key[0] not in self.program.forgetting and not key[0].endswith("/failed") and not returns_nothing:
            return False
        if cancelled:
            return True
        return bool(leases) and leases[-1].generation >= generation and "complete" in leases[-1].possible

    def _own_request(self, key: Key) -> None:
        """A run belongs to a request: it has the payload and the priority of the request, and starts after its time."""
        queue, asked = key[0], self.index.asked.get(key, [])
        by_generation = {one.generation: one for one in asked if one.placed in ("new", "updated", "deferred")}
        jumped_at = min((fault.at for fault in self.index.faults if fault.kind == "clock jump"), default=float("inf"))
        for lease in self.index.of_id.get(key, []):
            claim = lease.claim
            early = claim.run_at - claim.fence
            self._check("never early", early <= 0, f"{early} µs early: {lease}")
            if queue.endswith("/failed"):
                continue
            tokens = {one.token for one in asked if one.at <= lease.at}
            mine = by_generation.get(claim.generation)
            if mine is not None:
                if not mine.keeps_payload:
                    tokens &= {mine.token}
                    self._check("order", claim.priority == mine.priority, f"another priority: {lease}")
                early = claim.generation - STEP_US + 1000 * mine.delay_ms - claim.fence
                if mine.delay_ms and mine.placed == "new":
                    self._check("never early", early <= 0, f"{early} µs before its delay was over: {lease}")
                if mine.run_at and len(asked) == 1 and lease.at < jumped_at:
                    self._check("never early", claim.fence >= mine.run_at, f"before {mine.run_at}: {lease}")
            if lease.started is not None:
                self._check("no phantom", lease.started.token in tokens, f"{lease} ran with {lease.started.token}")

    def _cancelled_for_good(self, key: Key) -> None:
        """A job that was cancelled while it waited is not claimed any more; a later request of its id may be."""
        for cancel in self.index.cancels.get(key, ()):
            if cancel.reply == "cancelled":
                before = {one.generation for one in self.index.asked.get(key, []) if 0 < one.answered_at < cancel.at}
                later = [lease for lease in self.index.of_id[key] if lease.asked_at > cancel.answered_at]
                runs = next((lease for lease in later if lease.generation in before), None)
                self._check("one end", runs is None, f"claimed after it was cancelled at {cancel.at:.3f}: {runs}")

    # Ends

    def _one_settlement(self, lease: Lease, later: list[Lease]) -> None:
        """A lease is settled once, and only while no later lease exists."""
        ok = [one for one in lease.sent if one.reply == "ok"]
        self._check("one end", len(ok) <= 1, f"settled {len(ok)} times: {lease}")
        for settled in ok:
            # A call without a reply is sent again, and gets the reply of the first.
            sent_at = min(one.at for one in lease.sent if one.how == settled.how)
            passed = next((other for other in later if other.at < sent_at), None)
            self._check("fenced", passed is None, f"{lease} was settled after {passed}")

    def _one_end(self, key: Key, leases: list[Lease]) -> None:
        """A generation ends once, and is not claimed after that. At most once means at most one run."""
        ends: Counter[int] = Counter()
        completed: Counter[int] = Counter()
        for at, lease in enumerate(leases):
            settled = lease.settled
            if settled is None or settled.how not in ("complete", "fail"):
                continue
            ends[lease.generation] += 1
            completed[lease.generation] += settled.how == "complete"
            again = [str(other) for other in leases[at + 1 :] if other.generation == lease.generation]
            self._check("one end", not again, f"claimed after its end: {lease}, then {', '.join(again)}")
        if key[0] in self.program.at_most_once:
            for generation, count in Counter(lease.generation for lease in leases if lease.started).items():
                self._check(
                    "no double completion", count == 1, f"{key} {generation} may run once, and ran {count} times"
                )
        for generation, count in ends.items():
            self._check("one end", count == 1, f"{key} {generation} ended {count} times")
            twice = completed[generation] > 1
            self._check(
                "no double completion", not twice, f"{key} {generation} completed {completed[generation]} times"
            )

    def _work_was_done(self, lease: Lease) -> None:
        """A completed run returned, a failed run did not, and a permanent error is not retried."""
        how = None if lease.ended is None else lease.ended.how
        pulled = lease.queue == "pulled"  # There the run itself settles its lease.
        for one in lease.sent:
            if one.how == "complete":
                done = lease.started is not None and (how == "ok" or pulled)
                self._check("one end", done, f"completed, but its run did not return: {lease}")
            elif one.how in ("retries", "fail") and not pulled:
                self._check("one end", how != "ok", f"its run returned, but counts as failed: {lease}")
                permanent = one.how == "retries" and how == "PermanentError"
                self._check("limits", not permanent, f"retried after a permanent error: {lease}")

    def _limits(self, lease: Lease) -> None:
        """A job runs only within its limits, and fails only at a limit or with a permanent error."""
        limits = self.program.limits.get(lease.queue)
        if limits is None:
            return
        claim = lease.claim
        counts = claim.retries, claim.stalls, claim.timeouts
        if lease.started is not None:
            within = all(count <= limit for count, limit in zip(counts, limits, strict=True))
            self._check("limits", within, f"it ran with {counts}, limits are {limits}: {lease}")
        if any(one.how == "fail" for one in lease.sent):
            permanent = lease.ended is not None and lease.ended.how == "PermanentError"
            exhausted = any(count >= limit for count, limit in zip(counts, limits, strict=True))
            self._check("limits", permanent or exhausted, f"it failed with {counts}, limits are {limits}: {lease}")

    def _totals(self) -> None:
        """The counts of the storage match the history. A call without a reply may or may not count."""
        index = self.index
        least: dict[str, Counter[str]] = defaultdict(Counter)
        more: dict[str, Counter[str]] = defaultdict(Counter)
        for (queue, _), asked in index.asked.items():
            least[queue]["enqueued"] += sum(one.placed == "new" for one in asked)
            more[queue]["enqueued"] += sum(not one.placed for one in asked)
        for lease in index.leases.values():
            for how, end in (("complete", "completed"), ("fail", "failed")):
                replies = {one.reply for one in lease.sent if one.how == how}
                unsure = "ok" not in replies and None in replies
                unsure = unsure or (how == "fail" and "ok" in replies and bool(index.cancels[lease.queue, lease.id]))
                least[lease.queue][end] += "ok" in replies and not unsure
                more[lease.queue][end] += unsure
        if index.closing is None:
            return
        for queue in index.closing.totals.keys() | least.keys():
            totals = index.closing.totals.get(queue, {})
            starts = totals.get("enqueued", 0) + totals.get("promoted", 0)
            ends = sum(totals.get(end, 0) for end in ("completed", "failed", "cancelled", "purged"))
            self._check("one end", starts == ends, f"{queue}: {starts} starts, {ends} ends")
            for name, count in least[queue].items():
                if not (queue.endswith("/failed") and name == "enqueued"):
                    holds = count <= totals.get(name, 0) <= count + more[queue][name]
                    said = (
                        f"{queue}: {totals.get(name, 0)} {name}, {count} confirmed, {more[queue][name]} without a reply"
                    )
                    self._check("one end", holds, said)

    def _fences_rise(self) -> None:
        """A claim that was sent after the reply to another has a higher fence. No fence is used twice."""
        by_queue: dict[str, list[Lease]] = defaultdict(list)
        for lease in self.index.leases.values():
            by_queue[lease.queue].append(lease)
        for queue, leases in by_queue.items():
            for fence, count in Counter(lease.fence for lease in leases).items():
                self._check("fenced", count == 1, f"{queue}: {count} leases have the fence {fence}")
            answered = sorted(leases, key=lambda lease: lease.at)
            newest: Lease | None = None
            at = 0
            for lease in sorted(leases, key=lambda lease: lease.asked_at):
                while answered[at].at < lease.asked_at:
                    newest = max(newest or answered[at], answered[at], key=lambda lease: lease.fence)
                    at += 1
                rises = newest is None or lease.fence > newest.fence
                self._check("fenced", rises, f"the fence is lower: {lease} after {newest}")

    def _no_overlap(self, former: Lease | None, latter: Lease) -> None:
        """Two runs of an id overlap only if the first lost its lease and went on: for a singleton, its process was
        frozen longer than its lease."""
        assert latter.started is not None
        beside = latter.started.overlaps
        if former is not None and former.ended is not None:
            beside = beside or former.ended.at > latter.started.at
        if latter.queue in self.program.singletons:
            # The earlier run may go on after a freeze, or the later may start after one.
            excused = self._causes.frozen(latter.pid, latter.at, latter.started.at) or any(
                self._causes.frozen(earlier.pid, earlier.at, latter.at)
                for earlier in self.index.of_id[latter.queue, latter.id]
                if earlier.fence < latter.fence and earlier.started is not None
                if earlier.ended is None or earlier.ended.at >= latter.started.at or earlier is former
            )
        else:
            self.verdict.counts["overlaps of others"] += beside
            excused = former is not None and self._causes.outlived(former, latter.started.at)
        self._check("no overlap", not beside or excused, f"{former or 'an unknown run'} overlaps with {latter}")

    # Fail handlers and callers

    def _fail_handlers(self) -> None:
        index = self.index
        for lease in index.leases.values():
            settled = lease.settled
            if settled is None or settled.how != "fail" or lease.queue.endswith("/failed") or lease.queue == "pulled":
                continue
            key = (lease.queue, lease.id)
            answered_at = settled.answered_at or math.inf  # A cancel that was sent later may come first.
            called_off = any(cancel.at < answered_at and cancel.reply in ("asked", "") for cancel in index.cancels[key])
            if not called_off:
                called = (*key, lease.generation) in index.failures
                self._check("fail handler", called, f"it was not called for {lease}")
        for (queue, id), kept in index.kept.items():
            if queue.endswith("/failed"):
                self._check("fail handler", kept.state == "completed", f"a fail handler is {kept.state}: {id}")
            elif kept.state == "failed" and queue != "pulled":
                called = (queue, id, kept.generation) in index.failures
                self._check("fail handler", called, f"it was not called for {queue} {id}")
        for (queue, id, generation), times in index.failures.items():
            failed = "fail" in index.possible(queue, id, generation, generation + 1)
            self._check("fail handler", failed, f"it was called for {queue} {id} {generation}, which did not fail")
            follow_up = index.of_id.get((f"{queue}/failed", f"{id}@{generation}"), [])
            runs = sum(lease.started is not None for lease in follow_up)
            said = f"{times} reports for {queue} {id} {generation} by {runs} runs"
            self._check("fail handler", times <= runs, said)

    def _waiter(self, waiting: history.Waiting, waited: history.Waited | None) -> None:
        """A caller returns in time, with its own answer or an error that has a reason."""
        index = self.index
        if waited is None:
            killed = index.killed_at(waiting.pid, waiting.at) is not None
            self._check("waiters", killed, f"it never returned: {waiting}")
            return
        around = sorted((*index.by_target[0], *index.by_target[waiting.pid]), key=lambda fault: fault.at)
        swept_s = self.program.swept_s
        deadline = waiting.at + waiting.seconds
        limit = deadline + WAIT_SLACK_S
        disturbed = False
        for fault in around:
            if fault.kind in AWAY | SILENT and fault.at <= limit and fault.until + swept_s >= deadline:
                disturbed = True
                limit = max(limit, fault.until + swept_s)  # A storage call gives up after that.
        self._check("waiters", waited.at <= limit, f"{waiting.id} returned {waited.at - deadline:.1f} s late: {waited}")
        key = (waiting.queue, waiting.id)
        match waited.how:
            case "answer":
                holds = waited.answer in ({waiting.expected} if waiting.expected else self._answers(*key))
            case "WaitTimeout":
                own = bool(waiting.expected)  # Another request of the same id may have ended.
                ended = own and not disturbed and self._had_ended(waiting, deadline)
                holds = waited.at > deadline - 0.05 and not ended
                if not disturbed:
                    self.verdict.late.append(waited.at - deadline)
            case "JobFailed":
                holds = "fail" in index.possible(*key, 0, EVER)
            case "JobCancelled":
                holds = any(
                    one.at <= waited.at and one.reply in ("cancelled", "asked", "") for one in index.cancels[key]
                )
            case "StorageUnavailable" | "StorageFull":
                kinds = {"full memory"} if waited.how == "StorageFull" else AWAY | SILENT | {"cut", "truncate"}
                holds = any(
                    fault.kind in kinds and fault.at <= waited.at and fault.until + swept_s >= waiting.at
                    for fault in around
                )
            case "JobForgotten":  # The outcome is kept for the caller, unless the clock jumps over that time.
                holds = any(waiting.at <= at <= waited.at for at in self._causes.steps_forward)
            case _:
                holds = False
        self._check("waiters", holds, f"{waiting.id} expected {waiting.expected}, and got {waited}")

    def _answers(self, queue: str, id: str) -> set[str]:
        """Answers of all runs of an id that returned."""
        return {
            "None" if lease.started.kind == "nothing" else lease.started.token
            for lease in self.index.of_id[queue, id]
            if lease.started is not None and lease.ended is not None and lease.ended.how == "ok"
        }

    def _had_ended(self, waiting: history.Waiting, deadline: float) -> bool:
        """Did the job end so early that the caller must have seen it?"""
        for lease in self.index.of_id.get((waiting.queue, waiting.id), []):
            settled = lease.settled
            if settled is not None and settled.how in ("complete", "fail") and settled.answered_at is not None:
                return settled.answered_at + WAIT_SLACK_S < deadline
        return False

    # Lost leases

    def _counted(self, former: Lease, latter: Lease) -> None:
        """Counts rise only by settlements, and a retry waits for its backoff."""
        self._check("fenced", former.generation <= latter.generation, f"an older generation: {former}, then {latter}")
        if former.generation != latter.generation:
            return
        risen = latter.claim.attempts - former.claim.attempts
        self._check("one end", risen > 0, f"attempts rose by {risen}: {former}, then {latter}")
        if risen != 1:
            return
        for count in ("retries", "timeouts"):
            risen = getattr(latter.claim, count) - getattr(former.claim, count)
            replies = [one.reply for one in former.sent if one.how == count and one.reply != "lost"]
            holds = risen == 1 if "ok" in replies else risen in (0, 1) if replies else risen == 0
            self._check("one end", holds, f"{count} rose by {risen}: {former}, then {latter}")
        if former.ended is not None and former.ended.how == "ValueError" and former.queue in self.program.limits:
            jumped = any(former.ended.at <= at <= latter.at for at in self._causes.steps_forward)
            waited_s = latter.at - former.ended.at
            holds = waited_s >= MIN_BACKOFF_S or jumped or latter.claim.retries == former.claim.retries
            self._check("never early", holds, f"only {waited_s:.3f} s of backoff: {former}, then {latter}")

    def _lost(self, former: Lease, latter: Lease) -> None:
        """A lease that was lost without a failure of its run has a fault as its cause."""
        if self._was_ended(former, latter):
            return
        settled = former.settled
        if former.started is None and any(one.how == "release" for one in former.sent):
            # Released before its run. If that was refused, the reply to the claim came after the lease had expired.
            late = former.at - former.asked_at >= self.program.lease_s
            holds = "release" in former.possible or late or self._causes.cause(former, latter) is not None
            self._check("attributed", holds, f"{former}, then {latter}")
            return
        cause = self._causes.cause(former, latter)
        if cause is None and former.started is None and settled is not None:
            cause = self._causes.child_unknown(former, settled)
        if former.started is not None and latter.started is not None and former.generation == latter.generation:
            self.verdict.counts["duplicates"] += 1
            self.verdict.duplicates[cause or "unknown"] += 1
        self._check("attributed", cause is not None, f"{former}, then {latter}")

    def _was_ended(self, former: Lease, latter: Lease) -> bool:
        """Was it completed, failed or retried? Without a reply, the counts of the next lease decide."""
        if former.settled is not None:
            return former.settled.how in ENDED
        ends = former.possible & ENDED
        if former.generation != latter.generation:
            return bool(ends)
        return any(getattr(latter.claim, how, 0) > getattr(former.claim, how, 0) for how in ends)

    def _stalls_explained(self, leases: list[Lease]) -> None:
        """A stall is a lease that was not settled. If no process had the lease, the reply to a claim was lost."""
        before: Lease | None = None
        for lease in leases:
            claim, known, base = lease.claim, 0, 0
            if before is not None and before.generation == lease.generation:
                base = before.claim.stalls
                known = int(before.settled is None or before.settled.how == "stalls")
                if not before.possible:
                    counted = claim.stalls > base
                    self._check("stalls explained", counted, f"not counted: {before}, then {lease}")
            elif claim.attempts > 1 and before is not None:
                base = claim.stalls  # The first claims of this generation are not known.
            missing = claim.stalls - base - known
            since = before.asked_at if before is not None else self._first_asked(lease)
            unanswered = self._causes.unanswered(lease, since) if missing > 0 else 0
            said = f"{missing} stalls of {lease} without a lease, after {before}"
            self._check("stalls explained", missing <= unanswered, said)
            before = lease

    def _first_asked(self, lease: Lease) -> float:
        return min((one.at for one in self.index.asked.get((lease.queue, lease.id), [])), default=0.0)

    def _closed(self) -> None:
        closing = self.index.closing
        self._check("drained", closing is not None and closing.drained, f"jobs are left: {closing}")
        if closing is not None:
            self._check("audit", not closing.problems, "; ".join(closing.problems[:10]))
            left = [*closing.leftovers, *closing.exits]
            self._check("nothing left over", not left, "; ".join(left[:10]))
            self.verdict.counts["drained ms"] = round(1000 * closing.drained_s)
