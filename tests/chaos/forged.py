"""Histories that are made up, for the checker to be held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chaos import history
from chaos.checker import Checker
from chaos.verdict import Verdict

PRODUCER, CALLER, RUNNER = 1, 2, 3
WORKER, CHILD = 100, 101
OTHER, OTHERS_CHILD = 200, 201


def us(seconds: float) -> int:
    """A stamp of a queue, whose time is that of the host here."""
    return round(1_000_000 * seconds)


class Lease:
    """The lines of one lease."""

    def __init__(self, claiming: history.Claiming, claimed: history.Claimed) -> None:
        self.claiming = claiming
        self.claimed = claimed
        self.claim = claimed.claims[0]
        self.started: history.Started | None = None
        self.ended: history.Ended | None = None
        self.settlings: list[tuple[history.Settling, history.Settled | None]] = []

    @property
    def run(self) -> history.Started:
        assert self.started is not None
        return self.started

    @property
    def end(self) -> history.Ended:
        assert self.ended is not None
        return self.ended

    @property
    def settled(self) -> history.Settled:
        settled = self.settlings[-1][1]
        assert settled is not None
        return settled


class Draft:
    """A history in the making: every method writes what one of those who take part would have written."""

    def __init__(self) -> None:
        self._calls = 0
        self.asks: dict[str, tuple[history.Asking, history.Asked | None]] = {}
        self.leases: dict[str, Lease] = {}
        self.waits: dict[str, tuple[history.Waiting, history.Waited | None]] = {}
        self.kept: dict[str, history.Kept] = {}
        self.failures: list[history.FailureReported] = []
        self.faults: list[history.Fault] = []
        self.others: list[history.Line] = []
        self.closing: history.Closing | None = None

    def number(self) -> int:
        self._calls += 1
        return self._calls

    def ask(
        self,
        name: str,
        at: float,
        *,
        queue: str = "work",
        id: str = "",
        generation: int = 0,
        placed: str = "new",
        delay_ms: int = 0,
        run_at: int = 0,
        priority: int = 5,
        answered: bool = True,
    ) -> None:
        call = self.number()
        asking = history.Asking(
            at=at,
            pid=PRODUCER,
            call=call,
            queue=queue,
            ids=[id or name],
            tokens=[f"token of {name}"],
            delays_ms=[delay_ms],
            run_ats=[run_at],
            priorities=[priority],
        )
        asked = history.Asked(
            at=at + 0.001, pid=PRODUCER, call=call, placed=[placed], generations=[generation or us(at)]
        )
        self.asks[name] = asking, asked if answered else None

    def lease(
        self,
        name: str,
        at: float,
        *,
        of: str = "",
        generation: int = 0,
        run_at: int = 0,
        worker: int = WORKER,
        child: int = CHILD,
        kind: str = "ok",
        started: bool = True,
        until: float | None = None,
        how: str | None = "ok",
        settled: str | None = "complete",
        reply: str | None = "ok",
        attempts: int = 1,
        retries: int = 0,
        stalls: int = 0,
        timeouts: int = 0,
    ) -> Lease:
        """Claimed at `at`, begun at once, over 100 ms later, and settled then; each of them only if it is named."""
        asking, asked = self.asks[of or name]
        generation = generation or (asked.generations[0] if asked is not None else us(asking.at))
        run_at = run_at or asking.run_ats[0] or generation + 1000 * asking.delays_ms[0]
        queue, id, fence = asking.queue, asking.ids[0], us(at)
        claim = history.Claim(id, generation, fence, run_at, attempts, retries, stalls, timeouts, asking.priorities[0])
        lease = self.claim(name, at, queue, claim, worker)
        over = at + 0.1 if until is None else until
        if started:
            lease.started = history.Started(
                at=at + 0.01,
                pid=child,
                queue=queue,
                id=id,
                generation=generation,
                fence=fence,
                attempt=attempts,
                kind=kind,
                token=asking.tokens[0],
            )
        if started and how is not None:
            lease.ended = history.Ended(at=over, pid=child, queue=queue, id=id, fence=fence, how=how)
        if settled is not None:
            self.settle(name, over + 0.01, settled, reply)
        return lease

    def claim(self, name: str, at: float, queue: str, claim: history.Claim, worker: int = WORKER) -> Lease:
        call = self.number()
        claiming = history.Claiming(at=at - 0.005, pid=worker, call=call, queue=queue, worker=f"w{worker}")
        lease = Lease(claiming, history.Claimed(at=at + 0.005, pid=worker, call=call, claims=[claim]))
        self.leases[name] = lease
        return lease

    def settle(self, name: str, at: float, how: str, reply: str | None = "ok") -> None:
        lease, call = self.leases[name], self.number()
        pid = lease.claiming.pid
        batch = [history.Settlement(lease.claim.id, lease.claim.fence, how)]
        settling = history.Settling(
            at=at, pid=pid, call=call, queue=lease.claiming.queue, worker=lease.claiming.worker, batch=batch
        )
        settled = None if reply is None else history.Settled(at=at + 0.01, pid=pid, call=call, replies=[reply])
        lease.settlings.append((settling, settled))

    def wait(self, name: str, at: float, seconds: float, until: float, how: str = "answer") -> None:
        call, expected = self.number(), f"token of {name}"
        answer = expected if how == "answer" else ""
        waited = history.Waited(at=until, pid=CALLER, call=call, how=how, answer=answer)
        self.waits[name] = (
            history.Waiting(
                at=at, pid=CALLER, call=call, queue="question", id=name, seconds=seconds, expected=expected
            ),
            waited,
        )

    def keep(self, id: str, state: str, queue: str = "work", generation: int = 0) -> None:
        generation = generation or us(self.asks[id][0].at)
        self.kept[id] = history.Kept(at=90, pid=RUNNER, queue=queue, id=id, generation=generation, state=state)

    def report_failure(self, queue: str, id: str, generation: int, at: float) -> None:
        reported = history.FailureReported(
            at=at, pid=CHILD, queue=queue, id=id, generation=generation, kind="permanent"
        )
        self.failures.append(reported)

    def fault(self, kind: str, target: int, at: float, until: float | None = None, detail: str = "") -> None:
        until = at if until is None else until
        fault = history.Fault(at=at, pid=RUNNER, kind=kind, target=target, until=until, detail=detail)
        self.faults.append(fault)

    def close(self, totals: dict[str, dict[str, int]]) -> None:
        self.closing = history.Closing(
            at=99, pid=RUNNER, drained_s=1.5, drained=True, totals=totals, problems=[], leftovers=[]
        )

    def unheard_claim(self, queue: str, at: float, worker: int = WORKER) -> None:
        self.others.append(history.Claiming(at=at, pid=worker, call=self.number(), queue=queue, worker=f"w{worker}"))

    @property
    def ended(self) -> history.Closing:
        assert self.closing is not None
        return self.closing

    def waited(self, name: str) -> history.Waited:
        waited = self.waits[name][1]
        assert waited is not None
        return waited

    def lines(self) -> list[history.Line]:
        found: list[history.Line | None] = [
            *self.failures,
            *self.faults,
            *self.others,
            *self.kept.values(),
            self.closing,
        ]
        found += [line for pair in (*self.asks.values(), *self.waits.values()) for line in pair]
        for lease in self.leases.values():
            found += [lease.claiming, lease.claimed, lease.started, lease.ended]
            found += [line for pair in lease.settlings for line in pair]
        return [line for line in found if line is not None]

    def checked(self) -> Checker:
        return Checker([self.lines()])

    def verdict(self) -> Verdict:
        return self.checked().verdict


def good() -> Draft:
    """All is well: jobs that complete, are retried, fail, lose their worker, follow one another, are waited for, or are
    not due before a while."""
    draft = Draft()
    draft.ask("done", 1.0)
    draft.lease("done", 1.1)
    draft.keep("done", "completed")

    draft.ask("retried", 1.2)
    draft.lease("retried", 1.3, kind="throw", how="ValueError", settled="retries")
    draft.lease("retried again", 1.6, of="retried", run_at=us(1.5), attempts=2, retries=1)
    draft.keep("retried", "completed")

    draft.ask("failed", 2.0)
    draft.lease("failed", 2.1, kind="permanent", how="PermanentError", settled="fail")
    id, generation, fence = f"failed@{us(2.0)}", us(2.22), us(2.3)
    follow_up = history.Claim(id, generation, fence, generation, 1, 0, 0, 0, 5)
    handler = draft.claim("fail handler", 2.3, "work/failed", follow_up)
    at: Any = {"pid": CHILD, "queue": "work/failed", "id": id, "fence": fence}
    handler.started = history.Started(at=2.31, **at, generation=generation, attempt=1, kind="ok")
    draft.report_failure("work", "failed", us(2.0), 2.32)
    handler.ended = history.Ended(at=2.33, **at, how="ok")
    draft.settle("fail handler", 2.35, "complete")
    draft.keep("failed", "failed")
    draft.kept["fail handler"] = history.Kept(
        at=90, pid=RUNNER, queue="work/failed", id=id, generation=generation, state="completed"
    )

    draft.ask("orphan", 3.0, queue="plain")
    draft.lease("orphan", 3.1, worker=OTHER, child=OTHERS_CHILD, how=None, settled=None)
    draft.fault("worker kill", OTHER, 3.3)
    draft.others.append(history.Stalled(at=8.0, pid=RUNNER, queue="plain", id="orphan"))
    draft.lease("orphan again", 8.1, of="orphan", attempts=2, stalls=1)
    draft.keep("orphan", "completed", "plain")

    draft.ask("single", 1.0, queue="single")
    draft.lease("single", 1.1)
    draft.ask("next", 1.15, queue="single", id="single", placed="deferred")
    draft.lease("next", 1.4, worker=OTHER, child=OTHERS_CHILD)
    draft.keep("single", "completed", "single", us(1.15))

    draft.wait("question", 4.0, 3, 4.3)
    draft.ask("question", 4.01, queue="question")
    draft.lease("question", 4.1)

    draft.ask("later", 5.0, delay_ms=1000)
    draft.lease("later", 6.05)
    draft.keep("later", "completed")

    samples(draft, 1.0, 2, ready=1)
    draft.fault("cut", WORKER, 7.0)
    draft.fault("server pause", 0, 20, 21)
    draft.close(
        {
            "work": {"enqueued": 4, "completed": 3, "failed": 1},
            "work/failed": {"enqueued": 1, "completed": 1},
            "plain": {"enqueued": 1, "completed": 1},
            "single": {"enqueued": 1, "promoted": 1, "completed": 2},
            "question": {"enqueued": 1, "completed": 1},
        }
    )
    return draft


def samples(draft: Draft, at: float, count: int, *, ready: int, claims: int = 1) -> None:
    """One sample of the queue `work` per second."""
    queues = {"work": (ready, claims)}
    draft.others += [history.Sample(at=at + second, pid=RUNNER, queues=queues) for second in range(count)]


def move(lease: Lease, at: float) -> None:
    """The same lease at another time: its fence with it."""
    by, fence = at - lease.claim.fence / 1_000_000, us(at)
    lines = [
        lease.claiming,
        lease.claimed,
        lease.started,
        lease.ended,
        *(line for pair in lease.settlings for line in pair),
    ]
    for line in lines:
        if line is not None:
            line.at += by
    lease.claim.fence = fence
    for line in (lease.started, lease.ended):
        if line is not None:
            line.fence = fence
    for settling, _ in lease.settlings:
        settling.batch[0].fence = fence


def each(*changes: Callable[[Draft], Any]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        for one in changes:
            one(draft)

    return change


def hurt(kind: str, target: int, at: float, until: float | None = None, detail: str = "") -> Callable[[Draft], None]:
    return lambda draft: draft.fault(kind, target, at, until, detail)


def cancel(draft: Draft, id: str, at: float, reply: str, queue: str = "work") -> None:
    call = draft.number()
    draft.others.append(history.Cancelling(at=at, pid=PRODUCER, call=call, queue=queue, ids=[id]))
    draft.others.append(history.Cancelled(at=at + 0.01, pid=PRODUCER, call=call, replies=[reply]))


def pair(draft: Draft, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Two jobs, the first of which is claimed first."""
    draft.ask("first", queue="thread", **first)
    draft.ask("second", queue="thread", **second)
    draft.lease("first", 30.5)
    draft.lease("second", 30.6)
    draft.ended.totals["thread"] = {"enqueued": 2, "completed": 2}
    draft.keep("first", "completed", "thread")
    draft.keep("second", "completed", "thread")


def overlap(draft: Draft) -> None:
    draft.leases["single"].end.at = 1.5


def before_its_delay(draft: Draft) -> None:
    """The storage has lost the delay: to itself, it is not early."""
    lease = draft.leases["later"]
    lease.claim.fence = lease.run.fence = lease.end.fence = lease.settlings[0][0].batch[0].fence = us(5.9)
    lease.claim.run_at = us(5.0)


def wait_ends(draft: Draft, how: str, at: float) -> None:
    waited = draft.waited("question")
    waited.how, waited.at, waited.answer = how, at, ""


def instead(draft: Draft, kind: str, target: int, at: float, until: float) -> None:
    """Another fault than the one that explains what happened."""
    draft.faults.pop(0)
    draft.fault(kind, target, at, until)


def goes_back(draft: Draft, how: str) -> None:
    """Its worker lives, and has settled it at once."""
    draft.faults.pop(0)
    draft.settle("orphan", 3.4, how)
    move(draft.leases["orphan again"], 3.6)
    draft.leases["orphan again"].claim.stalls = int(how == "stalls")


def never_given(draft: Draft) -> None:
    """The child that was to run it died before it could begin."""
    goes_back(draft, "stalls")
    draft.leases["orphan"].started = None


def stall(draft: Draft, name: str, stalls: int) -> None:
    draft.leases[name].claim.stalls = stalls
