"""Histories in which all is well but for one thing that only somebody who adds things up will notice; and what their
faults cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from chaos import history
from chaos.checker import Checker
from chaos.costs import Costs
from tests.chaos.forged import (
    CALLER,
    CHILD,
    OTHER,
    OTHERS_CHILD,
    WORKER,
    Draft,
    cancel,
    each,
    goes_back,
    good,
    hurt,
    instead,
    move,
    never_given,
    overlap,
    pair,
    stall,
    us,
    wait_ends,
)

# What is harder to see: all is well but for one thing that only somebody who adds things up will notice


def _never_ran(draft: Draft) -> None:
    lease = draft.leases["done"]
    lease.started = lease.ended = None


def _returned(draft: Draft, name: str) -> None:
    """And yet it was settled as if it had raised."""
    lease = draft.leases[name]
    lease.run.kind, lease.end.how = "ok", "ok"


def _runs_twice(draft: Draft) -> None:
    """One lease, handed to two processes."""
    draft.others.append(msgspec.structs.replace(draft.leases["done"].run, at=1.12, pid=OTHERS_CHILD))


def _one_fence_for_two(draft: Draft) -> None:
    draft.claim("done elsewhere", 1.12, "work", msgspec.structs.replace(draft.leases["done"].claim), OTHER)


def _fence_goes_back(draft: Draft) -> None:
    """It was claimed last, and has the lowest fence."""
    lease = draft.leases["done"]
    move(lease, 50)
    fence = us(1.1)
    lease.claim.fence = lease.run.fence = lease.end.fence = lease.settlings[0][0].batch[0].fence = fence


def _settles_what_nobody_had(draft: Draft) -> None:
    call, batch = draft.number(), [history.Settlement("done", us(59), "complete")]
    draft.others.append(history.Settling(at=60, pid=WORKER, call=call, queue="work", worker="w100", batch=batch))
    draft.others.append(history.Settled(at=60.1, pid=WORKER, call=call, replies=["ok"]))


def _older_lost(draft: Draft) -> None:
    """The second was new, so the first had ended; and nobody ran it."""
    asked = draft.asks["next"][1]
    assert asked is not None
    asked.placed = ["new"]
    del draft.leases["single"]
    draft.ended.totals["single"] = {"enqueued": 2, "completed": 2}


def _claimed_and_lost(draft: Draft) -> None:
    """Nobody heard that it was enqueued; but it was, for it was claimed, and now it is gone."""
    draft.asks["orphan"] = draft.asks["orphan"][0], None
    del draft.leases["orphan again"], draft.kept["orphan"]


def _kept_as_cancelled(draft: Draft) -> None:
    del draft.leases["done"]
    draft.kept["done"].state = "cancelled"


def _not_reported_and_cancelled(draft: Draft, at: float, reply: str) -> None:
    """Too late, or in vain: that is no excuse."""
    draft.failures.clear()
    cancel(draft, "failed", at, reply)


def _question_lost_after_another(draft: Draft) -> None:
    """The answer that was heard was to the first."""
    draft.ask("question again", 6.0, queue="question", id="question")
    draft.ended.totals["question"] = {"enqueued": 2, "completed": 2}


def _pulled_and_never_begun(draft: Draft) -> None:
    draft.ask("pulled", 30, queue="pulled")
    draft.lease("pulled", 30.1, started=False)
    draft.keep("pulled", "completed", "pulled")
    draft.ended.totals["pulled"] = {"enqueued": 1, "completed": 1}


def _one_fence_for_two_jobs(draft: Draft) -> None:
    pair(draft, {"at": 30.0}, {"at": 30.2})
    move(draft.leases["second"], 30.5)


def _neighbour_afterwards(draft: Draft) -> None:
    goes_back(draft, "stalls")
    draft.ask("neighbour", 3.4, queue="thread")
    draft.lease("neighbour", 3.5, worker=OTHER, child=OTHERS_CHILD, kind="crash", how=None, settled="stalls")


def _released_long_after(draft: Draft) -> None:
    draft.ask("alone", 30, queue="single")
    draft.lease("alone", 30.1, how="CancelledError", settled="release")
    draft.lease("alone again", 30.6, of="alone", attempts=2)
    draft.fault("server pause", 0, 25, 26)


def _refused_at_once(draft: Draft) -> None:
    """It was given back before it was begun, and was another's by then, though nobody was hurt."""
    draft.faults.pop(0)
    draft.leases["orphan"].started = None
    draft.settle("orphan", 8.4, "release", "lost")


def _retried_unheard_twice(draft: Draft) -> None:
    lease = draft.leases["retried"]
    lease.settlings[0] = lease.settlings[0][0], None
    draft.leases["retried again"].claim.retries = 2


def _no_end_after_another_lease(draft: Draft) -> None:
    """Nobody heard whether it completed. It had not, for it was claimed again; and then it is gone."""
    lease = draft.leases["question"]
    lease.settlings[0] = lease.settlings[0][0], None
    draft.fault("worker kill", WORKER, 4.25)
    draft.lease("question again", 10, of="question", attempts=2, stalls=1, how=None, settled=None)


def _lost_under_a_newer_generation(draft: Draft) -> None:
    """Nobody was hurt, and its run was not settled."""
    lease = draft.leases["single"]
    lease.ended = None
    lease.settlings.clear()


def _never_began(draft: Draft) -> None:
    draft.faults.pop(0)
    draft.leases["orphan"].started = None


def _harmless_neighbour(draft: Draft) -> None:
    """What crashes does so twice, and then no more."""
    goes_back(draft, "stalls")
    draft.ask("neighbour", 2.9, queue="block")
    draft.lease("neighbour", 3.15, worker=OTHER, child=OTHERS_CHILD, kind="crash", attempts=3)
    draft.keep("neighbour", "completed", "block")
    draft.ended.totals["block"] = {"enqueued": 1, "completed": 1}


def _retry_nobody_asked_for(draft: Draft) -> None:
    draft.faults.pop(0)
    claim = draft.leases["orphan again"].claim
    claim.retries, claim.stalls = 1, 0


def _other_priority(draft: Draft) -> None:
    pair(draft, {"at": 30.0}, {"at": 30.2, "priority": 8})
    draft.leases["second"].claim.priority = 5


def _fail_handler_again(draft: Draft) -> None:
    """Nobody was hurt, and it runs again."""
    first = draft.leases["fail handler"]
    first.settlings.clear()
    claim = msgspec.structs.replace(first.claim, fence=us(9), attempts=2, stalls=1)
    again = draft.claim("fail handler again", 9, "work/failed", claim)
    again.started = msgspec.structs.replace(first.run, at=9.01, fence=us(9), attempt=2)
    again.ended = msgspec.structs.replace(first.end, at=9.03, fence=us(9))
    draft.report_failure("work", "failed", us(2.0), 9.02)
    draft.settle("fail handler again", 9.1, "complete")


def _both_too_many(draft: Draft) -> None:
    draft.ended.totals["plain"] = {"enqueued": 2, "completed": 2}


def _held_and_released(draft: Draft) -> None:
    """Only a singleton is stopped when the storage is away; and it was away before this one was claimed."""
    goes_back(draft, "release")
    draft.fault("server pause", 0, 0.1, 0.2)


def _runs_again_unheard(draft: Draft) -> None:
    """Nobody has heard whether it completed. It had not, though nobody was hurt, and it is done again."""
    lease = draft.leases["done"]
    lease.settlings[0] = lease.settlings[0][0], None
    draft.lease("done again", 30, of="done", attempts=2, stalls=1)


def _retried_again_unheard(draft: Draft) -> None:
    """It raised, nobody has heard whether that counts, and it does not: it is taken back, though nobody was hurt."""
    lease, again = draft.leases["retried"], draft.leases["retried again"]
    lease.settlings[0] = lease.settlings[0][0], None
    move(again, 30)
    again.claim.retries, again.claim.stalls = 0, 1


def _one_between(draft: Draft) -> None:
    """Between two runs, a lease that nobody began: they are beside one another all the same."""
    overlap(draft)
    asking = draft.asks["next"][0]
    claim = history.Claim("single", us(asking.at), us(1.3), us(asking.at), 1, 0, 0, 0, 5)
    draft.claim("between", 1.3, "single", claim)
    draft.settle("between", 1.35, "release")
    draft.leases["next"].claim.attempts = 2


def _jump(draft: Draft, at: float = 5.0, by: str = "+3600 s") -> None:
    """A living worker keeps its leases when the clock jumps."""
    draft.faults.pop(0)
    draft.fault("clock jump", 0, at, detail=by)


SUBTLE: dict[str, tuple[str, str, Callable[[Draft], Any]]] = {
    "completed, never claimed": (
        "no loss",
        "without a cause: Kept(queue='work', id='done'",
        lambda t: t.leases.pop("done"),
    ),
    "completed, never begun": ("one end", "completed, but its run did not return: work done", _never_ran),
    "raised, completed": (
        "one end",
        "completed, but its run did not return: work done",
        lambda t: setattr(t.leases["done"].end, "how", "ValueError"),
    ),
    "returned, failed": (
        "one end",
        "its run returned, but counts as failed: work failed",
        lambda t: _returned(t, "failed"),
    ),
    "returned, retried": (
        "one end",
        "its run returned, but counts as failed: work retried",
        lambda t: _returned(t, "retried"),
    ),
    "one lease runs twice": ("fenced", "a lease that ran twice: Started(queue='work', id='done'", _runs_twice),
    "one fence for two": ("fenced", "claimed twice: work done", _one_fence_for_two),
    "fence goes back": ("fenced", "the fence is lower: work done", _fence_goes_back),
    "settles what nobody had": (
        "fenced",
        "settled without a claim: work Settlement(id='done', fence=59000000",
        _settles_what_nobody_had,
    ),
    "older generation lost": ("no loss", "('single', 'single'): 1000000 had no end", _older_lost),
    "claimed and lost": ("no loss", "('plain', 'orphan') is missing", _claimed_and_lost),
    "cancelled by nobody": ("no loss", "without a cause: Kept(queue='work', id='done'", _kept_as_cancelled),
    "cancelled, runs": (
        "one end",
        "claimed after it was cancelled at 1.020: work done",
        lambda t: cancel(t, "done", 1.02, "cancelled"),
    ),
    "not reported, cancelled later": (
        "fail handler",
        "it was not called for work failed generation",
        lambda t: _not_reported_and_cancelled(t, 50, "asked"),
    ),
    "not reported, cancelled in vain": (
        "fail handler",
        "it was not called for work failed generation",
        lambda t: _not_reported_and_cancelled(t, 2.15, "finished"),
    ),
    "kept as failed": ("no loss", "without a cause: Kept(", lambda t: setattr(t.kept["done"], "state", "failed")),
    "question lost after another": ("no loss", "('question', 'question') is missing", _question_lost_after_another),
    "pulled, never begun": ("one end", "completed, but its run did not return: pulled pulled", _pulled_and_never_begun),
    "one fence for two jobs": ("fenced", "thread: 2 leases have the fence 30500000", _one_fence_for_two_jobs),
    "never begun, child killed long ago": (
        "attributed",
        "stalls: ok)",
        each(never_given, hurt("child kill", 999, 0.05)),
    ),
    "unheard, frozen just now": (
        "attributed",
        "complete: no reply), then plain orphan",
        each(
            lambda t: instead(t, "worker freeze", OTHER, 8.0, 13),
            lambda t: t.settle("orphan", 3.25, "complete", None),
        ),
    ),
    "crashed afterwards": ("attributed", "stalls: ok), then plain orphan", _neighbour_afterwards),
    "singleton released, outage long ago": ("attributed", "release: ok), then single alone", _released_long_after),
    "unheard, killed before": (
        "stalls explained",
        "1 stalls of plain orphan",
        each(
            lambda t: stall(t, "orphan again", 2),
            lambda t: t.unheard_claim("plain", 1.0, 999),
            hurt("worker kill", 999, 1.1),
        ),
    ),
    "refused at once": ("attributed", "release: lost), then plain orphan", _refused_at_once),
    "retry not counted": (
        "one end",
        "retries rose by 0: work retried",
        lambda t: setattr(t.leases["retried again"].claim, "retries", 0),
    ),
    "retry counted twice": ("one end", "retries rose by 2: work retried", _retried_unheard_twice),
    "very late, delayed at first": (
        "waiters",
        "question returned 97.0 s late",
        each(lambda t: wait_ends(t, "WaitTimeout", 104), hurt("delay", CALLER, 5, 5.05)),
    ),
    "timed out early, not done yet": (
        "waiters",
        "how='WaitTimeout'",
        each(lambda t: wait_ends(t, "WaitTimeout", 4.2), lambda t: move(t.leases["question"], 7.2)),
    ),
    "no end after another lease": ("no loss", "('question', 'question') is missing", _no_end_after_another_lease),
    "payload of the one before": (
        "no phantom",
        "ran with token of single",
        lambda t: setattr(t.leases["next"].run, "token", "token of single"),
    ),
    "lost under a newer generation": ("attributed", "single single generation 1000000", _lost_under_a_newer_generation),
    "never began": ("attributed", "never started), then plain orphan", _never_began),
    "passed on at once": (
        "attributed",
        "then plain orphan generation 3000000 fence 3500000",
        lambda t: move(t.leases["orphan again"], 3.5),
    ),
    "frozen just now": (
        "attributed",
        "plain orphan generation 3000000",
        lambda t: instead(t, "worker freeze", OTHER, 8.0, 13),
    ),
    "harmless neighbour": ("attributed", "stalls: ok), then plain orphan", _harmless_neighbour),
    "retry nobody asked for": ("one end", "retries rose by 1: plain orphan", _retry_nobody_asked_for),
    "stall not counted": ("stalls explained", "not counted: plain orphan", lambda t: stall(t, "orphan again", 0)),
    "unheard long ago": (
        "stalls explained",
        "1 stalls of plain orphan",
        each(lambda t: stall(t, "orphan again", 2), lambda t: t.unheard_claim("plain", -22)),
    ),
    "unheard just now": (
        "stalls explained",
        "1 stalls of plain orphan",
        each(lambda t: stall(t, "orphan again", 2), lambda t: t.unheard_claim("plain", 8.09)),
    ),
    "lock is held at first": (
        "no overlap",
        "an unknown run overlaps with single single generation 1000000",
        lambda t: setattr(t.leases["single"].run, "overlaps", True),
    ),
    "beside, child frozen": (
        "no overlap",
        "overlaps with single single generation 1150000",
        each(overlap, hurt("child freeze", CHILD, -1, 6)),
    ),
    "beside, frozen just now": (
        "no overlap",
        "overlaps with single single generation 1150000",
        each(overlap, hurt("worker freeze", WORKER, 1.39, 6)),
    ),
    "other priority": ("order", "another priority: thread second", _other_priority),
    "before its wall time": (
        "never early",
        "before 3600000000: work done",
        lambda t: setattr(t.asks["done"][0], "run_ats", [us(3600)]),
    ),
    "reported a success": (
        "fail handler",
        "it was called for work done 1000000, which did not fail",
        lambda t: t.report_failure("work", "done", us(1.0), 1.5),
    ),
    "reported again": (
        "fail handler",
        "2 reports for work failed 2000000 by 1 runs",
        lambda t: t.report_failure("work", "failed", us(2.0), 2.5),
    ),
    "fail handler again": ("attributed", "work/failed failed@2000000", _fail_handler_again),
    "waits for ever": (
        "waiters",
        "it never returned: Waiting(",
        lambda t: t.waits.update(question=(t.waits["question"][0], None)),
    ),
    "very late, hardly delayed": (
        "waiters",
        "question returned 97.0 s late",
        each(lambda t: wait_ends(t, "WaitTimeout", 104), hurt("delay", CALLER, 50, 50.05)),
    ),
    "timed out early": ("waiters", "how='WaitTimeout'", lambda t: wait_ends(t, "WaitTimeout", 4.2)),
    "timed out, completed": ("waiters", "how='WaitTimeout'", lambda t: wait_ends(t, "WaitTimeout", 7.05)),
    "failed, completed": ("waiters", "how='JobFailed'", lambda t: wait_ends(t, "JobFailed", 4.5)),
    "unavailable, all was well": (
        "waiters",
        "how='StorageUnavailable'",
        lambda t: wait_ends(t, "StorageUnavailable", 4.5),
    ),
    "full, nothing was": ("waiters", "how='StorageFull'", lambda t: wait_ends(t, "StorageFull", 4.5)),
    "forgotten, clock went back": (
        "waiters",
        "how='JobForgotten'",
        each(lambda t: wait_ends(t, "JobForgotten", 5), hurt("clock jump", 0, 4.5, detail="-3600 s")),
    ),
    "no totals": ("one end", "work: 0 enqueued, 4 confirmed, 0 without a reply", lambda t: t.ended.totals.clear()),
    "totals of others": ("one end", "plain: 2 enqueued, 1 confirmed, 0 without a reply", _both_too_many),
    "held and released": ("attributed", "release: ok), then plain orphan", _held_and_released),
    "unheard, then again": ("attributed", "complete: no reply), then work done", _runs_again_unheard),
    "retried unheard, then again": ("attributed", "retries: no reply), then work retried", _retried_again_unheard),
    "attempt not counted": (
        "one end",
        "attempts rose by 0: plain orphan",
        lambda t: setattr(t.leases["orphan again"].claim, "attempts", 1),
    ),
    "beside, with one between": (
        "no overlap",
        "overlaps with single single generation 1150000 fence 1400000",
        _one_between,
    ),
    "clock jump alone": ("attributed", "plain orphan", _jump),
    "clock jump, hardly delayed": ("attributed", "plain orphan", each(_jump, hurt("delay", OTHER, 5.1, 5.2))),
    "clock jump, another delayed": ("attributed", "plain orphan", each(_jump, hurt("delay", WORKER, 5.1, 6.5))),
    "clock jump, outage too late": ("attributed", "plain orphan", each(_jump, hurt("server kill", 0, 6.6, 8.1))),
    "clock jump afterwards": (
        "attributed",
        "plain orphan",
        each(lambda t: _jump(t, 8.5), hurt("delay", OTHER, 8.45, 9.7)),
    ),
    "clock jump, outage afterwards": (
        "attributed",
        "plain orphan",
        each(lambda t: _jump(t, 8.0), hurt("server kill", 0, 9.0, 10.5)),
    ),
    "clock jump before": (
        "attributed",
        "plain orphan",
        each(lambda t: _jump(t, 2.9), hurt("server kill", 0, 3.2, 4.5)),
    ),
    "clock jump back": (
        "attributed",
        "plain orphan",
        each(lambda t: _jump(t, 5.0, "-3600 s"), hurt("server kill", 0, 5.3, 6.8)),
    ),
    "two short outages": (
        "attributed",
        "plain orphan",
        each(lambda t: instead(t, "server kill", 0, 5.0, 6.0), hurt("server pause", 0, 6.2, 7.6)),
    ),
}


@pytest.mark.parametrize(("rule", "said", "forge"), SUBTLE.values(), ids=SUBTLE)
def test_checker_finds_each_subtle_forged_error(rule: str, said: str, forge: Callable[[Draft], Any]) -> None:
    draft = good()
    forge(draft)
    wrong = draft.verdict().wrong
    assert any(said in case for case in wrong[rule]), dict(wrong)


def test_two_processes_with_the_same_pid_are_distinguished() -> None:
    """The first was killed as it claimed; the second has its process id, and counts its calls from the start."""
    draft = good()
    stall(draft, "orphan again", 2)
    draft.fault("worker kill", 999, 4.05)
    first = [history.Claiming(at=4.0, pid=999, call=1, queue="plain", worker="w999")]
    second = [
        history.Claiming(at=9.0, pid=999, call=1, queue="plain", worker="w999"),
        history.Claimed(at=9.1, pid=999, call=1),
    ]
    assert dict(Checker([draft.lines(), first, second]).verdict.wrong) == {}
    assert "stalls explained" in Checker([draft.lines(), second]).verdict.wrong


# What faults cost


def test_fault_hits_and_recovery_times_are_measured() -> None:
    costs = Costs(good().checked().index)
    assert dict(costs.faults) == {"worker kill": 1, "cut": 1, "server pause": 1}
    assert costs.recoveries == {"worker kill": [pytest.approx(8.0 - 3.3)]}
    assert costs.kinds == {"ok": 9, "throw": 1, "permanent": 1}
    assert costs.excesses == []


def test_fault_without_effect_is_not_a_hit() -> None:
    draft = good()
    assert Costs(draft.checked().index).hits["server pause"] == 0
    draft.fault("server pause", 0, 6.1, 6.2)
    draft.fault("child kill", CHILD, 50)
    draft.fault("worker kill", WORKER, 5.5)
    hits = Costs(draft.checked().index).hits
    assert hits == {"worker kill": 1, "cut": 1, "server pause": 1, "child kill": 0}


def test_settlement_without_a_seen_reply_counts_as_ended() -> None:
    draft = good()
    lease = draft.leases["question"]
    lease.settlings[0] = lease.settlings[0][0], None
    assert Costs(draft.checked().index).hits["server pause"] == 0


def test_frozen_process_tree_counts_as_one_fault() -> None:
    draft = good()
    draft.fault("tree freeze", OTHER, 3.2, 9)
    draft.fault("tree freeze", OTHERS_CHILD, 3.2, 9)
    costs = Costs(draft.checked().index)
    assert (costs.faults["tree freeze"], costs.hits["tree freeze"]) == (1, 1)


def test_slow_recovery_is_reported_with_concurrent_faults() -> None:
    draft = good()
    draft.others.clear()
    move(draft.leases["orphan again"], 12.3)
    draft.fault("script flush", 0, 10)
    costs = Costs(draft.checked().index)
    assert costs.recoveries == {"worker kill": [pytest.approx(12.305 - 3.3)]}
    assert costs.excesses == ["worker kill: 9.01 s, beside cut 100, script flush"]


def test_slow_recovery_during_an_outage_is_counted_separately() -> None:
    draft = good()
    draft.others.clear()
    move(draft.leases["orphan again"], 12.3)
    draft.fault("server pause", 0, 7, 11)
    costs = Costs(draft.checked().index)
    assert costs.recoveries == {"worker kill, disturbed": [pytest.approx(12.305 - 3.3)]}
    assert costs.excesses == []


def test_child_kill_and_server_kill_have_separate_recovery_times() -> None:
    draft = good()
    goes_back(draft, "stalls")
    draft.fault("child kill", OTHERS_CHILD, 3.3)
    draft.fault("server kill", 0, 5.0, 5.5)
    costs = Costs(draft.checked().index)
    assert costs.recoveries == {
        "child kill": [pytest.approx(3.41 - 3.3)],
        "server kill": [pytest.approx(6.055 - 5.5)],
    }
