"""The checker is held against histories that were made up: it finds nothing in a good one, and sees what is wrong in
others, each of which differs from the good one in one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from chaos import history
from chaos.causes import AWAY
from chaos.settings import LEASE_S
from chaos.verdict import RULES
from tests.chaos.forged import (
    CALLER,
    CHILD,
    OTHER,
    OTHERS_CHILD,
    PRODUCER,
    WORKER,
    Draft,
    before_its_delay,
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
    samples,
    stall,
    us,
    wait_ends,
)


def test_good_history_has_no_errors_and_every_rule_is_checked() -> None:
    verdict = good().verdict()
    assert dict(verdict.wrong) == {}
    assert [rule for rule in RULES if not verdict.checks[rule]] == []
    assert set(verdict.checks) == set(RULES)
    assert dict(verdict.duplicates) == {"worker kill": 1}
    assert (verdict.counts["jobs"], verdict.counts["runs"], verdict.counts["leases"]) == (8, 11, 11)


# What is wrong


def _older(draft: Draft) -> None:
    draft.kept["single"].generation = us(1.0)


def _lost_question(draft: Draft) -> None:
    """Nobody keeps an answer; but one without an end is lost."""
    draft.leases["question"].settlings.clear()


def _refused_question(draft: Draft) -> None:
    draft.leases["question"].settled.replies = ["lost"]


def _run_without_claim(draft: Draft) -> None:
    run = draft.leases["done"].run
    draft.others.append(msgspec.structs.replace(run, at=1.5, fence=us(1.5)))


def _asked_too_late(draft: Draft) -> None:
    draft.asks["done"][0].at = 1.2


def _ends_in_two_ways(draft: Draft) -> None:
    draft.leases["retried"].settlings[0][0].batch[0].how = "fail"


def _completes_twice(draft: Draft) -> None:
    lease = draft.leases["retried"]
    lease.run.kind, lease.end.how, lease.settlings[0][0].batch[0].how = "ok", "ok", "complete"
    draft.leases["retried again"].claim.retries = 0


def _goes_on(draft: Draft) -> None:
    draft.lease("done again", 30, of="done", attempts=2)


def _completes_late(draft: Draft) -> None:
    draft.settle("orphan", 9, "complete")


def _sent_before_as_another(draft: Draft) -> None:
    """What it sent in time was something else: that is no excuse."""
    draft.settle("orphan", 3.2, "release", None)
    _completes_late(draft)


def _lock_is_held(draft: Draft) -> None:
    draft.leases["next"].run.overlaps = True


def _retried_before_one_that_waited(draft: Draft) -> None:
    pair(draft, {"at": 30.0}, {"at": 30.2})
    claim = draft.leases["first"].claim
    claim.attempts, claim.retries, claim.run_at = 2, 1, us(30.4)


def _two_handlers_wait(draft: Draft) -> None:
    draft.kept["fail handler"].state = "waiting"


def _failed_unheard(draft: Draft) -> None:
    """The failure has no reply, and its fail handler was not called."""
    settling, _ = draft.leases["failed"].settlings[0]
    draft.leases["failed"].settlings[0] = settling, None
    draft.failures.clear()


def _killed_another(draft: Draft) -> None:
    draft.faults[0].target = 999


def _killed_before(draft: Draft) -> None:
    draft.faults[0].at = draft.faults[0].until = 2.9


def _killed_after(draft: Draft) -> None:
    draft.faults[0].at = draft.faults[0].until = 8.2


def _neighbour(draft: Draft, kind: str, child: int = OTHERS_CHILD) -> None:
    """Somebody ran in the same process, and cost it its life."""
    crashes = kind in ("crash", "poison")
    goes_back(draft, "stalls" if crashes else "release")
    how = "stalls" if crashes else "timeouts"
    draft.ask("neighbour", 2.9)
    draft.lease("neighbour", 3.15, worker=OTHER, child=child, kind=kind, how=None, settled=how)
    draft.lease("neighbour again", 3.5, of="neighbour", attempts=2, stalls=int(crashes), timeouts=int(not crashes))
    draft.keep("neighbour", "completed")
    draft.ended.totals["work"]["enqueued"] += 1
    draft.ended.totals["work"]["completed"] += 1


def _somebody_elses_neighbour(draft: Draft) -> None:
    _neighbour(draft, "crash", child=999)


def _unheard_elsewhere(draft: Draft) -> None:
    stall(draft, "done", 1)
    draft.unheard_claim("plain", 1.05)


def _unheard_later(draft: Draft) -> None:
    stall(draft, "done", 1)
    draft.unheard_claim("work", 1.2)


def _starved(draft: Draft, *, claims_at_first: int = 7) -> None:
    samples(draft, 29.0, 1, ready=1, claims=claims_at_first)
    samples(draft, 30.0, 33, ready=3, claims=7)


def _runs_twice_at_most_once(draft: Draft) -> None:
    draft.ask("once", 30.0, queue="once")
    draft.lease("once", 30.1, worker=OTHER, child=OTHERS_CHILD, how=None, settled=None)
    draft.lease("once again", 38.1, of="once", attempts=2, stalls=1)


def _run_outlives_its_lease(draft: Draft) -> None:
    lease = draft.leases["orphan"]
    lease.ended = history.Ended(at=9, pid=OTHERS_CHILD, queue="plain", id="orphan", fence=lease.claim.fence, how="ok")


def _shared_answer(draft: Draft, answer: str) -> None:
    """The caller waits for an id that other requests share."""
    waiting, waited = draft.waits["question"][0], draft.waited("question")
    waiting.expected, waited.answer = "", answer


FORGED: dict[str, tuple[str, str, Callable[[Draft], Any]]] = {
    "gone": ("no loss", "('work', 'done') is missing; work done generation", lambda t: t.kept.pop("done")),
    "still waiting": ("no loss", "state='waiting'", lambda t: setattr(t.kept["done"], "state", "waiting")),
    "still running": ("no loss", "state='running'", lambda t: setattr(t.kept["later"], "state", "running")),
    "the one before": ("no loss", "newest generation 1150000, at the end", _older),
    "no answer, no end": ("no loss", "('question', 'question') is missing", _lost_question),
    "no answer, refused": ("no loss", "complete: lost", _refused_question),
    "nobody asked": ("no phantom", "work done generation 1000000", lambda t: t.asks.pop("done")),
    "another's token": (
        "no phantom",
        "ran with token of later",
        lambda t: setattr(t.leases["done"].run, "token", "token of later"),
    ),
    "without a claim": ("fenced", "a run without a claim", _run_without_claim),
    "before it was asked for": ("no phantom", "ran with token of done", _asked_too_late),
    "settled twice": ("one end", "settled 2 times", lambda t: t.settle("done", 1.5, "complete")),
    "retried and completed": ("one end", "settled 2 times", lambda t: t.settle("retried", 1.55, "complete")),
    "goes on": ("one end", "claimed after its end: work done", _goes_on),
    "two ends": ("one end", "('work', 'retried') 1200000 ended 2 times", _ends_in_two_ways),
    "more starts": ("one end", "work: 5 starts, 4 ends", lambda t: t.ended.totals["work"].update(enqueued=5)),
    "more ends": ("one end", "single: 2 starts, 3 ends", lambda t: t.ended.totals["single"].update(cancelled=1)),
    "completed, and again": ("no double completion", "('work', 'retried') 1200000 completed 2 times", _completes_twice),
    "two leases complete": ("no double completion", "('plain', 'orphan') 3000000 completed 2 times", _completes_late),
    "completed by one who lost it": ("fenced", "was settled after plain orphan", _completes_late),
    "completed late, released in time": ("fenced", "was settled after plain orphan", _sent_before_as_another),
    "released by one who lost it": (
        "fenced",
        "was settled after plain orphan",
        lambda t: t.settle("orphan", 8.2, "release"),
    ),
    "settled by one whose job was promoted": (
        "fenced",
        "was settled after single single",
        lambda t: setattr(t.leases["single"].settlings[0][0], "at", 1.5),
    ),
    "beside": ("no overlap", "single single generation 1000000", overlap),
    "lock is held": ("no overlap", "overlaps with single single generation 1150000", _lock_is_held),
    "beside, another frozen": ("no overlap", "overlaps with", each(overlap, hurt("tree freeze", 999, -5, 6))),
    "beside, frozen before": ("no overlap", "overlaps with", each(overlap, hurt("tree freeze", WORKER, -5, 1))),
    "beside, frozen after": ("no overlap", "overlaps with", each(overlap, hurt("tree freeze", WORKER, 2, 7))),
    "beside, cut off": ("no overlap", "overlaps with", each(overlap, hurt("silence", WORKER, 1.0, 6.0))),
    "before run_at": (
        "never early",
        "50000 µs early: work done",
        lambda t: setattr(t.leases["done"].claim, "run_at", us(1.15)),
    ),
    "before its backoff": (
        "never early",
        "100000 µs early: work retried",
        lambda t: setattr(t.leases["retried again"].claim, "run_at", us(1.7)),
    ),
    "before its delay": ("never early", "µs before its delay was over: work later", before_its_delay),
    "short backoff": ("never early", "s of backoff: work retried", lambda t: move(t.leases["retried again"], 1.42)),
    "older generation": (
        "fenced",
        "an older generation: work retried",
        lambda t: setattr(t.leases["retried again"].claim, "generation", us(1.15)),
    ),
    "too many retries": (
        "limits",
        "it ran with (4, 0, 0)",
        lambda t: setattr(t.leases["done"].claim, "retries", 4),
    ),
    "retries left": ("limits", "it failed with (0, 0, 0)", lambda t: setattr(t.leases["failed"].end, "how", "OSError")),
    "permanent error retried": (
        "limits",
        "retried after a permanent error",
        lambda t: setattr(t.leases["retried"].end, "how", "PermanentError"),
    ),
    "at most once, twice": ("no double completion", "may run once, and ran 2 times", _runs_twice_at_most_once),
    "run outlives its lease": ("no overlap", "overlaps with plain orphan", _run_outlives_its_lease),
    "starved": ("progress", "work: 3 ready jobs, no claim for 31.0 s", _starved),
    "starved after a claim": (
        "progress",
        "work: 3 ready jobs, no claim for 31.0 s",
        lambda t: _starved(t, claims_at_first=6),
    ),
    "answer of no run": ("waiters", "answer='token of done'", lambda t: _shared_answer(t, "token of done")),
    "cancelled without a cancel": ("waiters", "how='JobCancelled'", lambda t: wait_ends(t, "JobCancelled", 5)),
    "lower priority": ("order", "id='second'", lambda t: pair(t, {"at": 30.0}, {"at": 30.2, "priority": 8})),
    "later run_at": ("order", "id='second'", lambda t: pair(t, {"at": 30.0, "delay_ms": 300}, {"at": 30.2})),
    "came later": ("order", "id='second'", lambda t: pair(t, {"at": 30.2}, {"at": 30.0})),
    "retried first": ("order", "id='second'", _retried_before_one_that_waited),
    "not reported": ("fail handler", "it was not called for work failed generation", lambda t: t.failures.clear()),
    "reported another": (
        "fail handler",
        "it was not called for work failed",
        lambda t: setattr(t.failures[0], "generation", us(1)),
    ),
    "failed unheard": ("fail handler", "it was not called for work failed", _failed_unheard),
    "fail handler waits": ("fail handler", "a fail handler is waiting: failed", _two_handlers_wait),
    "fail handler failed": (
        "fail handler",
        "a fail handler is failed: failed",
        lambda t: setattr(t.kept["fail handler"], "state", "failed"),
    ),
    "late": ("waiters", "question returned 2.5 s late", lambda t: wait_ends(t, "WaitTimeout", 9.5)),
    "wrong answer": ("waiters", "answer='another'", lambda t: setattr(t.waited("question"), "answer", "another")),
    "forgotten": ("waiters", "how='JobForgotten'", lambda t: wait_ends(t, "JobForgotten", 5)),
    "forgotten, jumped before": (
        "waiters",
        "how='JobForgotten'",
        each(lambda t: wait_ends(t, "JobForgotten", 5), hurt("clock jump", 0, 3.9, detail="+3600 s")),
    ),
    "strange": ("waiters", "how='AssertionError'", lambda t: wait_ends(t, "AssertionError", 5)),
    "no fault": ("attributed", "plain orphan generation 3000000", lambda t: t.faults.pop(0)),
    "another was killed": ("attributed", "plain orphan", _killed_another),
    "killed before": ("attributed", "plain orphan", _killed_before),
    "killed after": ("attributed", "plain orphan", _killed_after),
    "short silence": ("attributed", "plain orphan", lambda t: instead(t, "silence", OTHER, 3.2, 3.2 + LEASE_S / 3)),
    "short delay": ("attributed", "plain orphan", lambda t: instead(t, "delay", OTHER, 3.2, 3.3)),
    "cut": ("attributed", "plain orphan", lambda t: instead(t, "cut", OTHER, 3.2, 3.2)),
    "server away": ("attributed", "plain orphan", lambda t: instead(t, "server kill", 0, 3.2, 4)),
    "released": ("attributed", "plain orphan", lambda t: goes_back(t, "release")),
    "another's neighbour": ("attributed", "plain orphan", _somebody_elses_neighbour),
    "nobody's stall": ("stalls explained", "1 stalls of work done", lambda t: stall(t, "done", 1)),
    "one too many": ("stalls explained", "1 stalls of plain orphan", lambda t: stall(t, "orphan again", 2)),
    "settled and stalled": (
        "stalls explained",
        "1 stalls of work retried",
        lambda t: stall(t, "retried again", 1),
    ),
    "unheard elsewhere": ("stalls explained", "1 stalls of work done", _unheard_elsewhere),
    "unheard later": ("stalls explained", "1 stalls of work done", _unheard_later),
    "not drained": ("drained", "jobs are left", lambda t: setattr(t.ended, "drained", False)),
    "no end": ("drained", "jobs are left: None", lambda t: setattr(t, "closing", None)),
    "misplaced": ("audit", "work: misplaced", lambda t: t.ended.problems.append("work: misplaced")),
    "two problems": (
        "audit",
        "plain: count; work: stamp",
        lambda t: t.ended.problems.extend(["plain: count", "work: stamp"]),
    ),
    "a key": ("nothing left over", "a key", lambda t: t.ended.leftovers.append("a key {chaos/work}:jobs")),
    "did not go": ("nothing left over", "fleet 7 did not stop", lambda t: t.ended.exits.append("fleet 7 did not stop")),
}


@pytest.mark.parametrize(("rule", "said", "forge"), FORGED.values(), ids=FORGED)
def test_checker_finds_each_forged_error(rule: str, said: str, forge: Callable[[Draft], Any]) -> None:
    draft = good()
    forge(draft)
    wrong = draft.verdict().wrong
    assert any(said in case for case in wrong[rule]), dict(wrong)


def test_every_rule_has_at_least_two_forged_histories() -> None:
    forged = [rule for rule, _, _ in FORGED.values()]
    assert {rule for rule in RULES if forged.count(rule) < 2} == set()


# What looks wrong, and is not


def _sent_twice(draft: Draft) -> None:
    """The first reply was lost; the second is that of the first."""
    settling, _ = draft.leases["done"].settlings[0]
    draft.leases["done"].settlings[0] = settling, None
    draft.settle("done", 1.5, "complete")


def _sent_again_after_another(draft: Draft) -> None:
    """The first was carried out, and what followed is already there when it is answered."""
    lease = draft.leases["single"]
    lease.settlings[0] = lease.settlings[0][0], None
    draft.settle("single", 1.7, "complete")


def _answered_late(draft: Draft) -> None:
    """It was settled, another had it at once, and only then the reply came."""
    draft.leases["single"].settled.at = 1.6


def _retried_unheard(draft: Draft) -> None:
    settling, _ = draft.leases["retried"].settlings[0]
    draft.leases["retried"].settlings[0] = settling, None


def _stalled_unheard(draft: Draft, at: float = 8.1, killed_at: float = 8.15) -> None:
    """Another had claimed it, and was killed before it heard the reply."""
    again = draft.leases["orphan again"]
    move(again, 14)
    again.claim.attempts, again.claim.stalls = 3, 2
    draft.unheard_claim("plain", at, 999)
    draft.fault("worker kill", 999, killed_at)


def _frozen(draft: Draft, kind: str, *targets: int) -> None:
    """The next run began, with what was asked for meanwhile, before the first one had thawed."""
    first, following = draft.leases["single"], draft.leases["next"]
    for target in targets:
        draft.fault(kind, target, 1.12, 6)
    first.end.at = 6.05
    first.settlings.clear()
    draft.settle("single", 6.1, "complete", "lost")
    move(following, 5.7)
    following.claim.attempts = following.run.attempt = 2
    following.run.overlaps = True
    draft.ended.totals["single"] = {"enqueued": 1, "completed": 1}


def _timed_out(draft: Draft) -> None:
    """It came too late."""
    wait_ends(draft, "WaitTimeout", 7.1)
    move(draft.leases["question"], 7.2)


def _refused(draft: Draft) -> None:
    instead(draft, "worker freeze", OTHER, 3.15, 9)
    lease = draft.leases["orphan"]
    lease.ended = history.Ended(at=3.2, pid=OTHERS_CHILD, queue="plain", id="orphan", fence=lease.claim.fence, how="ok")
    draft.settle("orphan", 9, "complete", "lost")


def _wall_time(draft: Draft) -> None:
    """Where it stood follows the wall: the queue's own time says nothing of it."""
    pair(draft, {"at": 30.2}, {"at": 30.0, "run_at": us(30.3)})


def _cancelled_meanwhile(draft: Draft) -> None:
    pair(draft, {"at": 30.2}, {"at": 30.0})
    asking = history.Cancelling(at=30.1, pid=PRODUCER, call=draft.number(), queue="thread", ids=["second"])
    draft.others.append(asking)  # Nobody knows whether it came through.


def _killed_while_it_waited(draft: Draft) -> None:
    draft.waits["question"] = draft.waits["question"][0], None
    draft.fault("worker kill", CALLER, 4.2)


def _killed_as_it_began_to_wait(draft: Draft) -> None:
    waiting = draft.waits["question"][0]
    draft.waits["question"] = waiting, None
    draft.fault("worker kill", CALLER, waiting.at - 0.001)


def _answered_with_an_error(draft: Draft) -> None:
    """Then nobody knows either, and it was claimed."""
    draft.asks["done"] = draft.asks["done"][0], history.Asked(at=1.05, pid=PRODUCER, call=1, error="StorageUnavailable")


def _never_answered(draft: Draft) -> None:
    """Nobody has heard that it was asked for: it may be there, or not."""
    draft.ask("perhaps", 40, answered=False)


def _cancelled_and_asked_for_again(draft: Draft) -> None:
    """What was cancelled is not what runs."""
    draft.ask("again", 30.2, queue="thread")
    draft.ask("at first", 30.0, queue="thread", id="again")
    cancel(draft, "again", 30.1, "cancelled", "thread")
    draft.lease("again", 30.5)
    draft.keep("again", "completed", "thread")
    draft.ended.totals["thread"] = {"enqueued": 2, "completed": 1, "cancelled": 1}


def _claimed_as_it_was_cancelled(draft: Draft) -> None:
    """The claim was sent before the cancel."""
    cancel(draft, "done", 1.097, "asked")


def _failed_as_it_was_cancelled(draft: Draft) -> None:
    """A cancelled job has no fail handler."""
    cancel(draft, "failed", 2.15, "asked")
    for name in ("fail handler", "failed"):
        del draft.kept[name]
    draft.keep("failed", "cancelled")
    draft.failures.clear()
    del draft.leases["fail handler"], draft.ended.totals["work/failed"]
    draft.ended.totals["work"] = {"enqueued": 4, "completed": 3, "cancelled": 1}


def _cancelled_between_two_runs(draft: Draft) -> None:
    cancel(draft, "retried", 1.5, "cancelled")
    del draft.leases["retried again"]
    draft.kept["retried"].state = "cancelled"
    draft.ended.totals["work"] = {"enqueued": 4, "completed": 2, "failed": 1, "cancelled": 1}


def _unheard(name: str) -> Callable[[Draft], None]:
    """It was settled, and nobody has heard so."""

    def change(draft: Draft) -> None:
        lease = draft.leases[name]
        lease.settlings[0] = lease.settlings[0][0], None

    return change


def _given_back(draft: Draft) -> None:
    """It was never begun."""
    goes_back(draft, "release")
    draft.leases["orphan"].started = None


def _given_back_too_late(draft: Draft) -> None:
    """Its worker heard of it when it was another's."""
    draft.faults.pop(0)
    lease = draft.leases["orphan"]
    lease.started, lease.claimed.at = None, 8.3
    draft.settle("orphan", 8.4, "release", "lost")


def _crashes_elsewhere(draft: Draft) -> None:
    draft.ask("crash", 3.0, queue="thread")
    draft.lease("crash", 3.15, worker=OTHER, child=999, kind="crash", how=None, settled="stalls")
    draft.lease("crash again", 3.5, of="crash", attempts=2, stalls=1)
    draft.keep("crash", "completed", "thread")
    draft.ended.totals["thread"] = {"enqueued": 1, "completed": 1}


FINE: dict[str, Callable[[Draft], Any]] = {
    "beside, worker frozen": lambda t: _frozen(t, "worker freeze", WORKER),
    "beside, tree frozen": lambda t: _frozen(t, "tree freeze", WORKER, CHILD),
    "forgotten, clock jumped": each(
        lambda t: wait_ends(t, "JobForgotten", 5), hurt("clock jump", 0, 4.5, detail="+3600 s")
    ),
    "late, server away": each(lambda t: wait_ends(t, "WaitTimeout", 9.5), hurt("server pause", 0, 5, 8)),
    "late, cut off": each(lambda t: wait_ends(t, "StorageUnavailable", 9.5), hurt("silence", CALLER, 5, 9)),
    "timed out": _timed_out,
    "sent twice": _sent_twice,
    "sent again after another": _sent_again_after_another,
    "answered late": _answered_late,
    "retried unheard": _retried_unheard,
    "stalled unheard": _stalled_unheard,
    "stalled unheard, killed later": lambda t: _stalled_unheard(t, 1.0, 5.0),
    "stalled unheard, server away": each(lambda t: _stalled_unheard(t, 1.0, 1.1), hurt("server pause", 0, 0.9, 4)),
    "stalled unheard, delayed": each(lambda t: _stalled_unheard(t, 1.0, 1.1), hurt("silence", 999, 0.9, 4)),
    "wall time": _wall_time,
    "cancelled meanwhile": _cancelled_meanwhile,
    "cancelled, asked for again": _cancelled_and_asked_for_again,
    "claimed as it was cancelled": _claimed_as_it_was_cancelled,
    "failed as it was cancelled": _failed_as_it_was_cancelled,
    "cancelled between two runs": _cancelled_between_two_runs,
    "completed unheard": _unheard("done"),
    "completed unheard, followed": _unheard("single"),
    "given back": _given_back,
    "given back too late": _given_back_too_late,
    "never begun, a child killed": each(never_given, hurt("child kill", 999, 3.2)),
    "never begun, a child crashed": each(never_given, _crashes_elsewhere),
    "in order": lambda t: pair(t, {"at": 30.0}, {"at": 30.2}),
    "higher first": lambda t: pair(t, {"at": 30.2, "priority": 8}, {"at": 30.0}),
    "killed while it waited": _killed_while_it_waited,
    "killed as it began to wait": _killed_as_it_began_to_wait,
    "never answered": _never_answered,
    "answered with an error": _answered_with_an_error,
    "refused": _refused,
    "run outlives its lease, frozen": each(
        _run_outlives_its_lease, lambda t: instead(t, "worker freeze", OTHER, 3.15, 9)
    ),
    "shared answer": lambda t: _shared_answer(t, "token of question"),
    "cancelled while it waited": each(
        lambda t: wait_ends(t, "JobCancelled", 4.3), lambda t: cancel(t, "question", 4.2, "asked", "question")
    ),
    "ready during an outage": each(_starved, hurt("server pause", 0, 36, 37)),
}


@pytest.mark.parametrize("change", FINE.values(), ids=FINE)
def test_checker_accepts_correct_histories_that_look_wrong(change: Callable[[Draft], Any]) -> None:
    draft = good()
    change(draft)
    assert dict(draft.verdict().wrong) == {}


# Who it was


def _own(draft: Draft, kind: str) -> None:
    goes_back(draft, "stalls")
    draft.leases["orphan"].run.kind = kind


def _child_hurt(draft: Draft, kind: str, how: str) -> None:
    goes_back(draft, how)
    draft.fault(kind, OTHERS_CHILD, 3.2, 3.35)


def _abandoned(draft: Draft) -> None:
    """By a consumer, who runs it in its own process."""
    draft.faults.pop(0)
    lease = draft.leases["orphan"]
    lease.run.kind, lease.run.pid = "abandon", OTHER


def _away(kind: str) -> Callable[[Draft], None]:
    """A singleton is stopped, and goes back."""

    def change(draft: Draft) -> None:
        draft.faults.pop(0)
        for name in ("orphan", "orphan again"):
            del draft.leases[name]
        draft.ask("orphan", 3.0, queue="single")
        draft.lease("orphan", 3.1, until=3.3, how="CancelledError", settled="release")
        draft.lease("orphan again", 3.6, of="orphan", attempts=2)
        draft.keep("orphan", "completed", "single")
        draft.ended.totals["single"] = {"enqueued": 2, "promoted": 1, "completed": 3}
        del draft.ended.totals["plain"]
        draft.fault(kind, 0, 3.2, 3.25)

    return change


def _never_heard(draft: Draft) -> None:
    """It had said that it is done, and nobody has heard so."""
    lease = draft.leases["orphan"]
    lease.ended = history.Ended(at=3.2, pid=OTHERS_CHILD, queue="plain", id="orphan", fence=lease.claim.fence, how="ok")
    draft.settle("orphan", 3.25, "complete", None)


def _two_in_a_row(first: tuple[str, float, float], second: tuple[Any, ...]) -> Callable[[Draft], None]:
    """It looks expired at once, and its worker cannot say that it lives."""

    def change(draft: Draft) -> None:
        draft.faults.pop(0)
        kind, at, until = first
        draft.fault(kind, 0, at, until, "+3600 s" if kind == "clock jump" else "")
        draft.fault(*second)

    return change


CAUSES: dict[str, tuple[str, Callable[[Draft], Any]]] = {
    "worker kill": ("worker kill", lambda t: instead(t, "worker kill", OTHER, 3.2, 3.2)),
    "child kill": ("child kill", lambda t: _child_hurt(t, "child kill", "stalls")),
    "child freeze": ("child freeze", lambda t: _child_hurt(t, "child freeze", "release")),
    "worker freeze": ("worker freeze", lambda t: instead(t, "worker freeze", OTHER, 3.2, 8)),
    "tree freeze": ("tree freeze", lambda t: instead(t, "tree freeze", OTHERS_CHILD, 3.2, 8)),
    "silence": ("silence", lambda t: instead(t, "silence", OTHER, 3.2, 3.3 + LEASE_S / 2)),
    "delay": ("delay", lambda t: instead(t, "delay", OTHER, 3.2, 3.3 + LEASE_S / 2)),
    "the newest of two": ("worker kill", hurt("child freeze", OTHERS_CHILD, 3.15, 8)),
    "sent, never heard": ("worker kill", _never_heard),
    "clock jump, then server kill": (
        "clock jump, then server kill",
        _two_in_a_row(("clock jump", 5.0, 5.0), ("server kill", 0, 5.3, 6.8)),
    ),
    "clock jump, then delay": (
        "clock jump, then delay",
        _two_in_a_row(("clock jump", 5.0, 5.0), ("delay", OTHER, 5.1, 6.5)),
    ),
    "delayed across a clock jump": (
        "clock jump, then delay",
        _two_in_a_row(("clock jump", 5.0, 5.0), ("delay", OTHER, 4.9, 6.2)),
    ),
    "server pause, then clock jump": (
        "server pause, then clock jump",
        _two_in_a_row(("server pause", 3.3, 6.3), ("clock jump", 0, 6.4, 6.4, "+3600 s")),
    ),
    "server pause, then delay": (
        "server pause, then delay",
        _two_in_a_row(("server pause", 3.3, 6.3), ("delay", OTHER, 6.4, 7.8)),
    ),
    "killed after a clock jump": (
        "worker kill",
        each(
            lambda t: instead(t, "worker kill", OTHER, 5.3, 5.3),
            hurt("clock jump", 0, 5.0, detail="+3600 s"),
            lambda t: move(t.leases["orphan again"], 6.6),
        ),
    ),
    "abandon": ("handler: abandon", _abandoned),
    "crash": ("handler: crash", lambda t: _own(t, "crash")),
    "poison": ("handler: poison", lambda t: _own(t, "poison")),
    "beside hang": ("handler: hang", lambda t: _neighbour(t, "hang")),
    "beside spin": ("handler: spin", lambda t: _neighbour(t, "spin")),
    **{f"{kind}, released": (kind, _away(kind)) for kind in sorted(AWAY)},
}


@pytest.mark.parametrize(("cause", "change"), CAUSES.values(), ids=CAUSES)
def test_lost_run_is_attributed_to_its_fault(cause: str, change: Callable[[Draft], Any]) -> None:
    draft = good()
    change(draft)
    verdict = draft.verdict()
    assert dict(verdict.duplicates) == {cause: 1}
    assert dict(verdict.wrong) == {}


@pytest.mark.parametrize("kind", ["crash", "poison"])
def test_crash_of_one_run_is_attributed_to_all_runs_of_its_process(kind: str) -> None:
    draft = good()
    _neighbour(draft, kind)
    verdict = draft.verdict()
    assert dict(verdict.duplicates) == {f"handler: {kind}": 2}
    assert dict(verdict.wrong) == {}
