"""An index of a history: leases with their runs and settlements, requests, waits and faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chaos import history

Key = tuple[str, str]
"""A queue and an id."""


KILL_RECORDED_S = 0.05
"""The time of a kill in the history is at most this long before the kill."""


class Sent(NamedTuple):
    """One attempt to settle a lease."""

    how: str
    at: float
    answered_at: float | None
    reply: str | None
    """None if no reply arrived: the storage may have carried it out."""


class Asked(NamedTuple):
    """A request and its reply."""

    at: float
    answered_at: float
    """0 if no reply arrived."""
    token: str
    keeps_payload: bool
    priority: int
    delay_ms: int
    run_at: int
    placed: str
    """Empty if no reply arrived."""
    generation: int


class Cancel(NamedTuple):
    at: float
    answered_at: float
    reply: str


@dataclass(eq=False)
class Lease:
    """A claimed job: its claim, run and settlements."""

    queue: str
    claim: history.Claim
    pid: int
    """Process of the worker that claimed it."""
    asked_at: float
    at: float
    started: history.Started | None = None
    ended: history.Ended | None = None
    sent: list[Sent] = field(default_factory=list[Sent])

    @property
    def id(self) -> str:
        return self.claim.id

    @property
    def fence(self) -> int:
        return self.claim.fence

    @property
    def generation(self) -> int:
        return self.claim.generation

    @property
    def run_pid(self) -> int:
        """Process of the run, or of the worker if it never started."""
        return self.pid if self.started is None else self.started.pid

    @property
    def settled(self) -> Sent | None:
        """The settlement that was confirmed, if there is one."""
        return next((one for one in self.sent if one.reply == "ok"), None)

    @property
    def possible(self) -> set[str]:
        """Ways in which it may have been settled: all attempts that were not refused."""
        return {one.how for one in self.sent if one.reply != "lost"}

    def __str__(self) -> str:
        claim = self.claim
        ran = f", {self.started.kind} in {self.started.pid}" if self.started else ", never started"
        how = f", ended {self.ended.how}" if self.ended else ""
        settled = "".join(f", {one.how}: {one.reply or 'no reply'}" for one in self.sent)
        return (
            f"{self.queue} {claim.id} generation {claim.generation} fence {claim.fence} attempt {claim.attempts}"
            f" (worker {self.pid} at {self.at:.3f}{ran}{how}{settled})"
        )


class HistoryIndex:
    """Reads the lines of each process. A call whose process was killed before the reply is included."""

    def __init__(self, processes: Iterable[Iterable[Any]]) -> None:
        self.asked: dict[Key, list[Asked]] = defaultdict(list)
        self.leases: dict[tuple[str, str, int], Lease] = {}
        self.of_id: dict[Key, list[Lease]] = defaultdict(list)
        """Leases of each id, in the order of their fences."""
        self.unanswered: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
        """Claims without a reply: when each was sent, when its error arrived (or the same time), and its process."""
        self.cancels: dict[Key, list[Cancel]] = defaultdict(list)
        self.waits: list[tuple[history.Waiting, history.Waited | None]] = []
        self.failures: Counter[tuple[str, str, int]] = Counter()
        """How often a fail handler got the failure of a queue, id and generation."""
        self.stalls: dict[Key, list[float]] = defaultdict(list)
        self.faults: list[history.Fault] = []
        self.samples: list[history.Sample] = []
        self.kept: dict[Key, history.Kept] = {}
        self.closing: history.Closing | None = None
        self.impossible: list[str] = []
        """Things that must not occur: a run without a claim, a lease that ran twice, a fence used twice."""
        self._starts: list[history.Started] = []
        self._ends: list[history.Ended] = []
        self._settled: list[tuple[history.Settling, history.Settled | None]] = []
        for lines in processes:
            self._read(lines)
        self._connect()

    def _read(self, lines: Iterable[Any]) -> None:
        begun: dict[int, Any] = {}
        for line in lines:
            match line:
                case history.Beginning():
                    begun[line.call] = line
                case history.Ending():
                    self._take(begun.pop(line.call), line)
                case history.Started():
                    self._starts.append(line)
                case history.Ended():
                    self._ends.append(line)
                case history.FailureReported():
                    self.failures[line.queue, line.id, line.generation] += 1
                case history.Fault():
                    self.faults.append(line)
                case history.Sample():
                    self.samples.append(line)
                case history.Stalled():
                    self.stalls[line.queue, line.id].append(line.at)
                case history.Kept():
                    self.kept[line.queue, line.id] = line
                case history.Closing():
                    self.closing = line
                case _:
                    raise AssertionError(line)
        for first in begun.values():
            self._take(first, None)

    def _take(self, first: Any, last: Any) -> None:
        """Add a call, with its reply if there is one."""
        error = str(getattr(last, "error", ""))
        reply: Any = None if error else last
        match first:
            case history.Asking():
                self._ask(first, reply)
            case history.Claiming():
                if not reply:
                    self.unanswered[first.queue].append((first.at, first.at if last is None else last.at, first.pid))
                for claim in reply.claims if reply else ():
                    lease = Lease(first.queue, claim, first.pid, first.at, reply.at)
                    if (first.queue, claim.id, claim.fence) in self.leases:
                        self.impossible.append(f"claimed twice: {lease}")
                    self.leases[first.queue, claim.id, claim.fence] = lease
                    self.of_id[first.queue, claim.id].append(lease)
            case history.Settling():
                self._settled.append((first, reply))
            case history.Cancelling():
                for at, id in enumerate(first.ids):
                    cancel = Cancel(first.at, last.at if last else first.at, reply.replies[at] if reply else "")
                    self.cancels[first.queue, id].append(cancel)
            case history.Waiting():
                self.waits.append((first, last))
            case _:
                raise AssertionError(first)

    def _ask(self, first: history.Asking, last: history.Asked | None) -> None:
        for at, id in enumerate(first.ids):
            self.asked[first.queue, id].append(
                Asked(
                    first.at,
                    last.at if last else 0.0,
                    first.tokens[at],
                    first.keeps_payload,
                    first.priorities[at],
                    first.delays_ms[at],
                    first.run_ats[at],
                    last.placed[at] if last else "",
                    last.generations[at] if last else 0,
                )
            )

    def _connect(self) -> None:
        for started in self._starts:
            lease = self.leases.get((started.queue, started.id, started.fence))
            if lease is None:
                self.impossible.append(f"a run without a claim: {started}")
            elif lease.started is not None:
                self.impossible.append(f"a lease that ran twice: {started}")
            else:
                lease.started = started
        for ended in self._ends:
            if lease := self.leases.get((ended.queue, ended.id, ended.fence)):
                lease.ended = ended
        for settling, settled in self._settled:
            for at, one in enumerate(settling.batch):
                reply = settled.replies[at] if settled else None
                if lease := self.leases.get((settling.queue, one.id, one.fence)):
                    lease.sent.append(Sent(one.how, settling.at, settled.at if settled else None, reply))
                elif reply == "ok":
                    self.impossible.append(f"settled without a claim: {settling.queue} {one}")
        for leases in self.of_id.values():
            leases.sort(key=lambda lease: lease.fence)
        for asked in self.asked.values():
            asked.sort(key=lambda one: one.at)
        self.samples.sort(key=lambda sample: sample.at)
        self.faults.sort(key=lambda fault: fault.at)
        self.by_target: dict[int, list[history.Fault]] = defaultdict(list)
        for fault in self.faults:
            self.by_target[fault.target].append(fault)
        self.runs_of: dict[int, list[Lease]] = defaultdict(list)
        self.held_by: dict[int, list[Lease]] = defaultdict(list)
        for lease in self.leases.values():
            self.held_by[lease.pid].append(lease)
            if lease.started is not None:
                self.runs_of[lease.started.pid].append(lease)

    def next_of(self, lease: Lease) -> Lease | None:
        """The next lease of the same id."""
        leases = self.of_id[lease.queue, lease.id]
        at = leases.index(lease) + 1
        return leases[at] if at < len(leases) else None

    def possible(self, queue: str, id: str, since: int, before: int) -> set[str]:
        """Ways in which generations from `since` to before `before` may have been settled."""
        leases = self.of_id.get((queue, id), [])
        return {how for lease in leases if since <= lease.generation < before for how in lease.possible}

    def killed_at(self, pid: int, since: float) -> float | None:
        kills = (
            fault.at
            for fault in self.by_target[pid]
            if fault.kind == "worker kill" and fault.at >= since - KILL_RECORDED_S
        )
        return next(kills, None)

    def describe(self, queue: str, id: str) -> str:
        return "; ".join(map(str, self.of_id.get((queue, id), []))) or "never claimed"
