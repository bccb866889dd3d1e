"""Random runs: the same calls on every storage give the same replies and leave the same records, with a clean audit
after every step. Two of them are on Valkey, with the optimised paths of fast.lua on and off: all their keys have the
same bytes after every call. The table at the end shows how often each cell of the machine was hit; an empty one fails
the test.

`./dev soak` runs 2,000 examples of 50 steps; the default run is shorter and always the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stages
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast._core.clock import ManualClock
from holdfast._core.extension import Extension
from holdfast._core.jobs import (
    Complete,
    Fail,
    Job,
    LeaseRef,
    Release,
    Request,
    RetrySettlement,
    Settlement,
    State,
    Update,
    Work,
)
from holdfast._core.replies import SettleResult
from holdfast.storage import Storage, audit
from tests.storage.harness import HARNESSES, Harness
from tests.storage.limits import lower_brief_limit
from tests.storage.stored_bytes import SameClientHarness, stored
from tools.transitions import TRANSITIONS, Act, Phase, phase_of

IDS = ["a", "b", "c", "d:{\0é"]
WORKERS = ["w1", "w2"]
COUNTS: tuple[Literal["retries", "stalls", "timeouts"], ...] = ("retries", "stalls", "timeouts")
START_US, EPOCH_US = 1_800_000_000_000_000, 3 * 86_400_000_000
"""Each run begins at an instant of its own, later than anything in the runs before it."""
SOAK = int(os.environ.get("HOLDFAST_SOAK", "0"))

ids = st.sampled_from(IDS)
workers = st.sampled_from(WORKERS)
lengths = st.sampled_from([0, 1, 500, 5_000, 60_000])
RULES: tuple[bool | Literal["if_later", "if_earlier"], ...] = (True, False, "if_later", "if_earlier")
UPDATES = [Update(p, r, c) for p in (True, False) for r in RULES for c in (None, True, False)]
WORKS = [
    Work(b"1"),
    Work(b"2", codec="raw"),
    Work(b"3", priority=9),
    Work(b"", priority=0, result_ttl_ms=0),
    Work(b"4", timeout_ms=1000, max_retries=0, max_stalls=0, max_timeouts=0),
    Work(b"5", max_retries=3, result_ttl_ms=60_000, dedup_ttl_ms=500),
    Work(b"6", extension=((128, b"first"), (200, b""), (255, b"last"))),
    Work(b"7", priority=9, result_ttl_ms=60_000, extension=((129, b"other"),)),
]
FAILED_WORKS = [Work(b"failed"), Work(b"failed", extension=((128, b"of the follow-up"),))]
EXTENSIONS: list[Extension] = [(), ((1, b"one"),), ((7, b""), (127, b"\0" * 5))]
"""What a record is tagged with behind the back of the storages: no verb sets these tags yet."""
updates, works = st.sampled_from(UPDATES), st.sampled_from(WORKS)
"""Few and small draws: the more of a run's randomness goes into its steps, the longer it gets."""


MAX_VISITS, CELLS_A_VISIT, MAX_DRAINS = 3, 6, 4
CELLS = [(phase, act) for phase, acts in TRANSITIONS.items() for act in acts]
_RUN = (Act.KEEP, Act.CLAIM)
ROUTES: dict[Phase, tuple[Act | str, ...]] = {
    Phase.NONE: (),
    Phase.WAITING: (Act.KEEP,),
    Phase.RUNNING: _RUN,
    Phase.DEFERRED: (*_RUN, Act.UPDATE),
    Phase.CANCELLING: (*_RUN, Act.CANCEL),
    Phase.CANCELLING_DEFERRED: (*_RUN, Act.CANCEL, Act.UPDATE),
    Phase.COMPLETED: (*_RUN, Act.COMPLETE),
    Phase.STALE: (*_RUN, "go stale"),
    Phase.FAILED: (*_RUN, Act.FAIL),
    Phase.REMEMBERED: (*_RUN, "remember a failure"),
    Phase.CANCELLED: (Act.KEEP, Act.CANCEL),
}
"""How to bring an id into each phase."""


class World:
    """The storages under comparison, opened once; each example has queues of its own."""

    def __init__(self, harnesses: list[Harness], folder: Path) -> None:
        self.clock = ManualClock()
        self.harnesses = harnesses
        self.names = [harness.name for harness in harnesses]
        self.hits: Counter[tuple[Phase, Act]] = Counter()
        self.examples = 0
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self.storages = self.run(self._open(harnesses, folder))
        self.fast, self.slow = (
            storage
            for harness, storage in zip(harnesses, self.storages, strict=True)
            if isinstance(harness, SameClientHarness)
        )

    async def _open(self, harnesses: list[Harness], folder: Path) -> list[Storage]:
        return [await self._stack.enter_async_context(harness.open(self.clock, folder)) for harness in harnesses]

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self._stack.aclose())
        self._runner.close()

    def table(self) -> str:
        lines = [f"{'':26}" + " ".join(f"{act.split()[-1]:>8}" for act in Act)]
        for phase in Phase:
            cells = [f"{self.hits[phase, act]:8}" if act in TRANSITIONS[phase] else f"{'·':>8}" for act in Act]
            lines.append(f"{phase:26}" + " ".join(cells))
        return "\n".join(lines)

    def empty_cells(self) -> list[tuple[Phase, Act]]:
        return [(phase, act) for phase in Phase for act in TRANSITIONS[phase] if not self.hits[phase, act]]


world: World


class Agreement(RuleBasedStateMachine):
    """One example: a queue, four ids, two workers and every verb."""

    @initialize()
    def begin(self) -> None:
        world.examples += 1
        world.clock.advance((START_US + world.examples * EPOCH_US - world.clock.now_us()) / 1_000_000)
        self.queue = f"q{world.examples}"
        self.ids = list(IDS)
        self.calls = self.visits = self.drains = 0
        self.leases: list[tuple[str, int, str]] = []
        self.last: Callable[[], object] = lambda: None

    def call(self, verb: Callable[[Storage], Awaitable[Any]]) -> Any:
        """Make one call on every storage; the replies must agree."""

        async def on_all() -> list[Any]:
            return [await verb(storage) for storage in world.storages]

        self.calls += 1
        first, *others = world.run(on_all())
        for name, other in zip(world.names[1:], others, strict=True):
            assert other == first, f"{name} replied\n{other}\n{world.names[0]} replied\n{first}"
        return first

    def phases(self) -> dict[str, Phase]:
        jobs = self.call(lambda storage: storage.get(self.queue, self.ids))
        now = self.now_us()
        return {id: phase_of(job, now) for id, job in zip(self.ids, jobs, strict=True)}

    def now_us(self) -> int:
        """The queue's time, which may be ahead of a clock that stepped back."""
        now = world.clock.now_us()
        meta = world.storages[0].table.meta(self.queue)
        return now if meta is None else max(now + meta.time.skew, meta.time.last_at)

    def hit(self, phase: Phase, act: Act) -> None:
        world.hits[phase, act] += 1

    @rule(
        items=st.lists(
            st.tuples(
                ids, works, st.one_of(st.none(), updates), st.sampled_from(["now", "now", "delay", "at"]), lengths
            ),
            min_size=1,
            max_size=3,
        ),
        keep_ms=st.sampled_from([0, 0, 2000]),
        bare=st.booleans(),
    )
    def enqueue(self, items: list[tuple[str, Work, Update | None, str, int]], keep_ms: int, bare: bool) -> None:
        phases = self.phases()
        requests: list[Request] = []
        for id, work, update, when, length in items:
            if bare and update is not None and not update.payload:
                work = Work(None)
            requests.append(
                Request(
                    id,
                    work,
                    run_at=world.clock.now_us() + 1000 * (length - 400) if when == "at" else None,
                    delay_ms=length if when == "delay" else None,
                    update=update,
                    custom_id=length % 2 == 0,
                    keep_ms=keep_ms,
                )
            )
        replies = self.again(lambda storage: storage.enqueue(self.queue, requests))
        for request, reply in zip(requests, replies, strict=True):
            phase = phases.pop(request.id, None)
            if phase is not None and reply.placed is not None:
                self.hit(phase, Act.KEEP if request.update is None else Act.UPDATE)

    def again(self, verb: Callable[[Storage], Awaitable[Any]]) -> Any:
        """Make a call, and remember it for `repeat`."""
        self.last = lambda: self.call(verb)
        reply = self.call(verb)
        self.compare_bytes()
        return reply

    def compare_bytes(self) -> None:
        """The optimised paths of fast.lua store the same bytes as the general path."""
        fast, slow = stored(world.fast, self.queue), stored(world.slow, self.queue)
        assert fast == slow

    @rule()
    def repeat(self) -> None:
        """The last call once more, as a client does whose reply was lost."""
        reply = self.last()
        if reply is not None and hasattr(reply, "jobs"):
            self.note(reply.jobs)

    @precondition(lambda self: self.visits < MAX_VISITS)
    @rule(seed=st.integers(0, 2**32))
    def visit(self, seed: int) -> None:
        """Take new ids straight to cells of the table, in the midst of whatever else is going on. What they are comes
        from a seed and all that went before: Hypothesis likes to draw the same again, and each cell should be met."""
        self.visits += 1
        rng = random.Random(f"{seed} {self.calls} {len(self.ids)}")
        self.pause(False)
        for phase, act in rng.sample(CELLS, CELLS_A_VISIT):
            id = f"visit {len(self.ids)}"
            self.ids.append(id)
            for step in ROUTES[phase]:
                self.go(rng, id, step)
            self.go(rng, id, act)

    def go(self, rng: random.Random, id: str, step: Act | str) -> None:
        match step:
            case Act.KEEP:
                self.enqueue([(id, rng.choice(WORKS), None, "now", 0)], 0, False)
            case Act.UPDATE:
                self.enqueue([(id, rng.choice(WORKS), rng.choice(UPDATES), "now", 0)], 0, False)
            case Act.CLAIM:
                self.claim(100, "w1", 10_000)
            case Act.CANCEL:
                self.cancel([id])
            case Act.EXPIRE:
                self.let_pass(10, 5)
            case Act.FORGET:
                self.let_pass(61)
            case _:
                fence = next((fence for held, fence, _ in reversed(self.leases) if held == id), 0)
                self.settle_some([rng.choice(list(fitting(step, settlements(id, fence))))], "w1")
                world.clock.advance(0.01)

    def let_pass(self, *seconds: float) -> None:
        for length in seconds:
            world.clock.advance(length)
            self.sweep(100, None)

    @rule(limit=st.integers(1, 3), worker=workers, lease_ms=st.sampled_from([100, 10_000]))
    def claim_some(self, limit: int, worker: str, lease_ms: int) -> None:
        self.claim(limit, worker, lease_ms)

    def claim(self, limit: int, worker: str, lease_ms: int) -> list[str]:
        phases = self.phases()
        claim = self.again(lambda storage: storage.claim(self.queue, limit, worker=worker, lease_ms=lease_ms))
        for job in claim.jobs:
            if phases[job.id] is Phase.WAITING:
                self.hit(Phase.WAITING, Act.CLAIM)
            else:
                self.hit(phases[job.id], Act.EXPIRE)
        self.note(claim.jobs)
        return [job.id for job in claim.jobs]

    def note(self, jobs: list[Job]) -> None:
        for job in jobs:
            assert job.run is not None
            self.leases.append((job.id, job.run.fence, job.run.worker))

    @rule(data=st.data(), worker=workers)
    def settle(self, data: st.DataObject, worker: str) -> None:
        """Current, stale and forged leases, settled in every way."""
        batch: list[Settlement] = []
        for _ in range(data.draw(st.integers(1, 3))):
            id, fence, holder = data.draw(self.some_lease())
            worker = holder if data.draw(st.integers(0, 9)) else worker
            batch.append(data.draw(st.sampled_from(settlements(id, fence))))
        self.settle_some(batch, worker)

    @precondition(lambda self: self.drains < MAX_DRAINS)
    @rule(
        some=st.lists(works, min_size=2, max_size=4),
        ttls=st.lists(st.sampled_from([0, 500, 300_000, 300_000]), min_size=4),
    )
    def drain(self, some: list[Work], ttls: list[int]) -> None:
        """New jobs that are claimed together and completed together, as a worker does with most jobs."""
        self.drains += 1
        self.pause(False)
        ids = [f"drain {self.drains} {number}" for number in range(len(some))]
        self.ids += ids
        self.enqueue([(id, work, None, "now", 0) for id, work in zip(ids, some, strict=True)], 0, False)
        self.claim(100, "w1", 10_000)
        fences = {id: fence for id, fence, _ in self.leases}
        batch = [
            Complete(id, fences.get(id, 0), result_ttl_ms=ttl, brief=True) for id, ttl in zip(ids, ttls, strict=False)
        ]
        self.settle_some(list[Settlement](batch), "w1")

    def settle_some(self, batch: list[Settlement], worker: str) -> None:
        phases = self.phases()
        replies = self.again(lambda storage: storage.settle(self.queue, batch, worker=worker))
        for item, reply in zip(batch, replies, strict=True):
            if reply is SettleResult.OK and item.id in phases:
                self.hit(phases.pop(item.id), Act[str(type(item).__struct_config__.tag).upper()])

    def some_lease(self) -> st.SearchStrategy[tuple[str, int, str]]:
        forged = st.tuples(ids, st.integers(0, 2**50), workers)
        if not self.leases:
            return forged
        newest = st.sampled_from(self.leases[-3:])
        return st.one_of(newest, newest, newest, st.sampled_from(self.leases), forged)

    @rule(data=st.data(), lease_ms=st.sampled_from([100, 10_000]), progress=st.sampled_from([None, b"half"]))
    def extend(self, data: st.DataObject, lease_ms: int, progress: bytes | None) -> None:
        id, fence, worker = data.draw(self.some_lease())
        leases = [LeaseRef(id, fence, progress)]
        self.again(lambda storage: storage.extend(self.queue, leases, worker=worker, lease_ms=lease_ms))

    @rule(some=st.lists(ids, min_size=1, max_size=2))
    def cancel(self, some: list[str]) -> None:
        phases = self.phases()
        self.again(lambda storage: storage.cancel(self.queue, some))
        for id in dict.fromkeys(some):
            if phases[id] is not Phase.NONE:
                self.hit(phases[id], Act.CANCEL)

    def keep(self, some: list[str], ttl_ms: int, at_least: bool) -> None:
        self.again(lambda storage: storage.keep(self.queue, some, ttl_ms, at_least=at_least))

    def prioritize(self, some: list[str], priority: int) -> None:
        self.again(lambda storage: storage.prioritize(self.queue, some, priority))

    @rule(limit=st.sampled_from([1, 2, 100]), worker=st.one_of(st.none(), st.none(), workers))
    def sweep(self, limit: int, worker: str | None) -> None:
        phases = self.phases()
        gone = self.forgettable()
        swept = self.again(lambda storage: storage.sweep(self.queue, limit, worker=worker))
        for id in swept.stalled:
            self.hit(phases[id], Act.EXPIRE)
        for id in gone.keys() - self.forgettable().keys():
            self.hit(gone[id], Act.FORGET)

    def forgettable(self) -> dict[str, Phase]:
        """Records that are past their forget time and still there, by the phase they would be in."""
        now = self.now_us()
        jobs = world.storages[0].table.load(self.queue, self.ids)
        due = {id: job.outcome for id, job in jobs.items() if job.outcome and job.outcome.forget_at <= now}
        return {id: phase_of(jobs[id], outcome.forget_at - 1) for id, outcome in due.items()}

    def purge(self, states: set[State], limit: int) -> None:
        self.again(lambda storage: storage.purge(self.queue, states, limit))

    def pause(self, paused: bool) -> None:
        self.again(lambda storage: storage.pause(self.queue, paused, reason="because"))

    @rule(
        data=st.data(),
        verb=st.sampled_from(["keep", "keep", "prioritize", "purge", "pause", "announce", "notes", "scan"]),
    )
    def aside(self, data: st.DataObject, verb: str) -> None:
        """The verbs that move no job by themselves, so that the others get more turns."""
        match verb:
            case "keep":
                some = data.draw(st.lists(ids, min_size=1, max_size=2))
                self.keep(some, data.draw(lengths), data.draw(st.booleans()))
            case "prioritize":
                some = data.draw(st.lists(ids, min_size=1, max_size=2))
                self.prioritize(some, data.draw(st.integers(0, 9)))
            case "purge":
                states = data.draw(st.sets(st.sampled_from(list(State)), min_size=1))
                self.purge(states, data.draw(st.sampled_from([1, 100])))
            case "pause":
                self.pause(data.draw(st.sampled_from([True, False, False])))
            case "announce":
                self.announce(data.draw(workers), data.draw(st.sampled_from([100, 60_000])), data.draw(st.booleans()))
            case "notes":
                self.notes(data.draw(ids), data.draw(st.binary(max_size=3)), data.draw(st.sampled_from([1, 60_000])))
            case _:
                self.scan(data.draw(st.one_of(st.none(), st.sampled_from(list(State)))), data.draw(st.integers(1, 3)))

    @rule(id=ids, entries=st.sampled_from(EXTENSIONS))
    def tag_record(self, id: str, entries: Extension) -> None:
        async def tag() -> None:
            for harness, storage in zip(world.harnesses, world.storages, strict=True):
                await harness.tag_record(storage, self.queue, id, entries)

        world.run(tag())

    @rule(seconds=st.sampled_from([0.000001, 0.1, 0.5, 1.0, 5.0, 15.0, 61.0, 3600.0]))
    def time_passes(self, seconds: float) -> None:
        world.clock.advance(seconds)

    @rule(seconds=st.sampled_from([0.5, 2.0, 3600.0]))
    def clock_steps_back(self, seconds: float) -> None:
        world.clock.advance(-seconds)

    def announce(self, worker: str, ttl_ms: int, evict: bool) -> None:
        facts: dict[str, str | int | list[str]] = {"host": "h", "queues": [self.queue]}
        if evict:  # Many queues: a storage compresses the names.
            facts["queues"] = [self.queue, *(f"queue-{number}" for number in range(1000))]
        self.again(lambda storage: storage.announce(worker, facts, ttl_ms=ttl_ms))
        if evict:
            self.again(lambda storage: storage.evict(worker))

    def notes(self, name: str, value: bytes, ttl_ms: int) -> None:
        self.again(lambda storage: storage.write_notes({ascii(name): value}, ttl_ms=ttl_ms))
        self.call(lambda storage: storage.read_notes([ascii(id) for id in IDS]))

    def scan(self, state: State | None, limit: int) -> None:
        after: str | None = None
        for _ in range(len(self.ids) + 1):
            page = self.call(
                lambda storage, after=after: storage.scan(self.queue, state=state, after=after, limit=limit)
            )
            after = page.after
            if after is None:
                return
        raise AssertionError("the pages have no end")

    @invariant()
    def records_and_counts_agree_and_the_audit_is_clean(self) -> None:
        if not hasattr(self, "queue"):
            return
        for queue in (self.queue, f"{self.queue}/failed"):
            assert self.call(lambda storage, queue=queue: audit(storage, queue)).problems == []
        self.call(lambda storage: storage.get(self.queue, self.ids))
        self.call(lambda storage: storage.scan(f"{self.queue}/failed", limit=100))
        self.call(lambda storage: storage.snapshot())

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for queue in (self.queue, f"{self.queue}/failed"):
            self.call(lambda storage, queue=queue: storage.sweep(queue, 100, worker="w1"))
            self.call(lambda storage, queue=queue: storage.sweep(queue, 100, worker="w2"))
            lefts = [self.call(lambda storage, queue=queue: storage.drop(queue)) for _ in range(20)]
            assert lefts[-1] == 0, lefts
        assert self.queue not in {stats.queue for stats in self.call(lambda storage: storage.snapshot()).queues}


def fitting(step: str, choices: list[Settlement]) -> Iterator[Settlement]:
    """The settlements that take a run where a route wants it: completed and fresh, completed and stale, failed, …"""
    for choice in choices:
        if isinstance(choice, Complete):
            if (
                not choice.brief
                and (step, choice.dedup_ttl_ms) in (("complete", 60_000), ("go stale", 1))
                and choice.result_ttl_ms
            ):
                yield choice
        elif isinstance(choice, Fail):
            if choice.failure_ttl_ms and step == ("remember a failure" if choice.dedup_ttl_ms else "fail"):
                yield choice
        elif type(choice).__struct_config__.tag == step:
            yield choice


def settlements(id: str, fence: int) -> list[Settlement]:
    """Every way to settle a lease, as many of each kind as it has meanings."""
    later = world.clock.now_us() + 700_000
    follow_ups = FAILED_WORKS
    return [
        *(
            Complete(id, fence, result, codec, result_ttl_ms, dedup_ttl_ms)
            for result, codec in ((None, "json"), (b"result", "raw"))
            for result_ttl_ms in (0, 5_000, 60_000)
            for dedup_ttl_ms in (0, 1, 60_000)
        ),
        *(Complete(id, fence, result_ttl_ms=ttl, brief=True) for ttl in (500, 60_000, 60_000, 300_000)),
        *(Fail(id, fence, b"error", ttl, then) for ttl in (0, 60_000) for then in (None, *follow_ups)),
        *(Fail(id, fence, b"error", 60_000, None, counts) for counts in ("stalls", "timeouts")),
        *(Fail(id, fence, b"error", ttl, None, None, 60_000) for ttl in (5_000, 60_000)),
        *(
            RetrySettlement(id, fence, error, delay_ms, run_at, counts)
            for counts in COUNTS
            for error, delay_ms, run_at in ((None, 0, None), (b"error", 500, None), (b"", 0, later))
        ),
        Release(id, fence),
        Release(id, fence),
    ]


BRIEF_LIMIT = 3
"""Brief outcomes that a queue keeps in these runs."""
USUAL_RUNS = 50
SLOW_RUNS = 300
RUNS = [
    pytest.param(USUAL_RUNS, id="some", marks=pytest.mark.suite("usual")),
    pytest.param(SLOW_RUNS, id="many", marks=pytest.mark.suite("slow")),
]


@pytest.mark.timeout(7200 if SOAK else 600)
@pytest.mark.parametrize("runs", [SOAK] if SOAK else RUNS)
def test_every_storage_does_the_same_as_memory(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    global world
    lower_brief_limit(monkeypatch, BRIEF_LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        others = [harness for harness in HARNESSES if harness.name != "valkey"]
        world = World([*others, SameClientHarness(True), SameClientHarness(False)], Path(folder))
        try:
            run_state_machine_as_test(
                Agreement,
                settings=settings(
                    max_examples=runs,
                    stateful_step_count=50,
                    derandomize=not SOAK,
                    deadline=None,
                    print_blob=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Stages.explicit, Stages.generate, Stages.shrink],
                ),
            )
        finally:
            world.close()
    print(f"\n{' = '.join(world.names)}: {world.examples} runs\n{world.table()}")
    if runs > USUAL_RUNS:
        assert len(world.empty_cells()) <= 1  # A rare one may be met by none of these runs.
