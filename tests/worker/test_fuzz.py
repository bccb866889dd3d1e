"""Six promises under chaos: handlers that raise, hang, spin and crash, and a nemesis that kills whole workers.

Real workers serve five queues whose handlers draw by lot what they do (fuzz_tasks.py) while a producer keeps them
busy. Then the nemesis rests, everything must come to its end, and what was noted and stored is judged:

- exclusion: two runs of one id never overlap. A run holds a lock that only its end or its process's death lets go of.
- once: what has completed does not run again. `completed` is noted when it is stored; a run that returned is repeated
  only if its process died before that. The storage's own totals say that each start had one end.
- not early: no run begins before the time that its request named, nor before its backoff is over.
- order: a claim takes the highest priority, then the earliest run_at, then the first that came. Fences are stamps of
  the same clock as run_at and generation, and rise in the order of claims, so this is judged exactly, whoever claimed:
  between a job's generation (or its run_at, if that is later) and the fence of its first attempt it waited, and no
  fence in between may be of a job that comes after it. Only jobs that were never updated count as having waited, for
  nobody else's times are known; every claim is judged.
- failures: every job that is exhausted reaches its fail handler, and no other does.
- progress: no queue that has ready jobs is without a claim for long, the lowest included; all that was asked for ends.

`HOLDFAST_FUZZ=120` is the chaos's length in seconds on each storage; with `-s` the counts are printed. Without it there
are 8 seconds on each.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Holdfast, Placed, Update
from tests.worker.conftest import Scene, WorkerProcess

SECONDS = float(os.environ.get("HOLDFAST_FUZZ", "8"))
WORKERS = 2 if SECONDS < 30 else 3
KILL_EVERY_S = min(10.0, SECONDS / 3)
QUEUES = ["urgent", "usual", "threaded", "single", "idle"]
KEYS = 3
BACKLOG = 25
"""Jobs that the producer keeps ready: more than there is room for, and few enough to be over soon."""
PROGRESS_S = 12.0
"""So long may a queue with ready jobs be without a claim. A worker lives longer than that in a long run: it must not
take a new one to get things going."""
DRAIN_S = 60.0
STEP_US = 1_000
"""The stamps of one step may be ahead of its clock by one microsecond each: a claim that gives out a fence may not
yet have seen a job that is due so shortly before."""
INVARIANTS = ("exclusion", "once", "not early", "order", "failures", "progress")


@dataclass(kw_only=True)
class Ran:
    """A run, by its own account."""

    queue: str
    id: str
    generation: int
    fence: int
    attempt: int = 1
    run_at: int = 0
    retries: int = 0
    kind: str = "ok"
    pid: int = 0
    at: float = 0.0
    wall_us: int = 0
    backoff_us: int = 0
    overlaps: bool = False
    """Another held the lock of the id."""
    former: int = 0
    """The fence of the run that had the lock before."""
    former_alive: bool = False
    """Its process was still there."""
    ended: str | None = None
    """None: nobody knows. The process died."""
    until: float | None = None
    until_us: int = 0

    def __str__(self) -> str:
        return (
            f"{self.queue} {self.id!r} generation {self.generation} attempt {self.attempt} fence {self.fence}"
            f" ({self.kind}, pid {self.pid}, {self.at:.3f}..{self.until or 0:.3f} {self.ended})"
        )


@dataclass(kw_only=True)
class Asked:
    """A request that was acknowledged."""

    queue: str
    id: str
    generation: int
    priority: int = 5
    not_before_us: int = 0
    custom_id: bool = True


@dataclass(kw_only=True)
class Told:
    """A failure of which the fail handler was told."""

    queue: str
    id: str
    generation: int
    kind: str
    count: int
    limit: int


@dataclass(kw_only=True)
class Kept:
    """What the storage says of an id in the end."""

    state: str
    generation: int


@dataclass
class History:
    runs: list[Ran] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    completed: list[tuple[str, str, int]] = field(default_factory=list)
    """Queue, id and attempt of completions that are stored."""
    samples: list[tuple[float, dict[str, tuple[int, int]]]] = field(default_factory=list)
    """At which time a queue had how many ready jobs, and had seen how many claims."""
    kept: dict[tuple[str, str], Kept | None] = field(default_factory=dict)
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    kills: int = 0


class Judge:
    """Holds a history against the six promises."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.checked: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_wait = (0.0, "no queue with ready jobs was without a claim")
        self._by_id: dict[tuple[str, str], list[Ran]] = defaultdict(list)
        for ran in sorted(history.runs, key=lambda ran: ran.fence):
            self._by_id[ran.queue, ran.id].append(ran)
        for runs in self._by_id.values():
            for before, after in itertools.pairwise(runs):
                self._exclusion(before, after)
                self._not_again(before, after)
                self._backoff(before, after)
        self._once()
        self._not_early()
        for queue in {ran.queue for ran in history.runs}:
            self._order(queue)
        self._failures()
        self._progress()
        self._all_ended()

    def _that(self, invariant: str, holds: bool, otherwise: str) -> None:
        self.checked[invariant] += 1
        if not holds:
            self.wrong.append(f"{invariant}: {otherwise}")

    def _exclusion(self, before: Ran, after: Ran) -> None:
        def that(holds: bool, what: str) -> None:
            self._that("exclusion", holds, f"{what}: {before}, {after}")

        that(not after.overlaps, "the lock was held")
        that(before.at <= after.at, "the run with the higher fence began first")
        if before.until is not None:
            that(before.until <= after.at, "one began before the other had ended")
        else:
            # There may have been a run in between that got the lock and no further.
            that(after.former >= before.fence, "nobody can tell that the former run was over")
            that(not after.former_alive, "the former run's process was alive")

    def _not_again(self, before: Ran, after: Ran) -> None:
        if before.generation == after.generation:
            self._that(
                "once",
                before.ended != "ok" or not after.former_alive,
                f"a run had returned, its process lives, and it was repeated: {before}, {after}",
            )

    def _once(self) -> None:
        for queue, id, attempt in self.history.completed:
            if queue != "single":
                later = [ran for ran in self._by_id[queue, id] if ran.attempt > attempt]
                self._that(
                    "once", not later, f"it ran after attempt {attempt} had completed: {', '.join(map(str, later))}"
                )
        for queue, totals in self.history.totals.items():
            starts, ends = totals["enqueued"] + totals["promoted"], totals["completed"] + totals["failed"]
            self._that("once", starts == ends, f"{queue}: {starts} starts, {ends} ends")

    def _not_early(self) -> None:
        asked = {(asked.queue, asked.id, asked.generation): asked.not_before_us for asked in self.history.asked}
        for ran in self.history.runs:
            due = max(ran.run_at, asked.get((ran.queue, ran.id, ran.generation), 0))
            early_us = max(due - ran.wall_us, ran.run_at - ran.fence)
            self._that("not early", early_us <= 0, f"it began {early_us} µs early: {ran}")

    def _backoff(self, before: Ran, after: Ran) -> None:
        """A `single` may have been asked for anew meanwhile, and is due at once then."""
        same = before.queue != "single" and before.generation == after.generation
        if same and before.ended == "ValueError" and after.retries == before.retries + 1:
            early_us = before.until_us + before.backoff_us - after.run_at
            self._that("not early", early_us <= 0, f"it was {early_us} µs short of its backoff: {after}")

    def _order(self, queue: str) -> None:
        """Go through the claims, and have at hand what waits at each."""
        asked = {(asked.id, asked.generation): asked.priority for asked in self.history.asked if asked.queue == queue}
        claims = sorted((ran for ran in self.history.runs if ran.queue == queue), key=lambda ran: ran.fence)
        first = [ran for ran in claims if queue in QUEUES and queue != "single" and ran.attempt == 1]
        coming = [(max(ran.generation, ran.run_at + STEP_US), ran.fence, ran) for ran in first]
        heapq.heapify(coming)
        waiting: list[tuple[tuple[int, int, int], int, Ran]] = []
        for claim in claims:
            if queue not in QUEUES:
                continue
            while coming and coming[0][0] < claim.fence:
                ran = heapq.heappop(coming)[2]
                place = (-asked.get((ran.id, ran.generation), 5), ran.run_at, ran.generation)
                heapq.heappush(waiting, (place, ran.fence, ran))
            while waiting and waiting[0][1] <= claim.fence:
                heapq.heappop(waiting)
            # When a later attempt arrived at its place is not known: it is judged as the first of its time.
            arrival = claim.generation if claim.attempt == 1 and queue != "single" else 0
            place = (-asked.get((claim.id, claim.generation), 5), claim.run_at, arrival)
            passed = waiting[0][2] if waiting and waiting[0][0] < place else None
            self._that("order", passed is None, f"{claim} was claimed while {passed} waited")

    def _failures(self) -> None:
        told = {(told.queue, told.id, told.generation) for told in self.history.told}
        for one in self.history.told:
            kept = self.history.kept.get((one.queue, one.id))
            if one.queue != "single":
                failed = kept is not None and kept.state == "failed"
                self._that("failures", failed, f"the fail handler was told of what is {kept}: {one}")
            self._that("failures", one.count >= one.limit, f"it was not exhausted: {one}")
        for (queue, id), kept in self.history.kept.items():
            if kept is not None and kept.state == "failed":
                heard = (queue, id, kept.generation) in told
                self._that("failures", heard, f"the fail handler was not told of {queue} {id!r}")
        for queue, totals in self.history.totals.items():
            if queue in QUEUES:
                heard_of = sum(one[0] == queue for one in told)
                failed_of = totals["failed"]
                what = f"{queue}: {failed_of} jobs failed, the fail handler was told of {heard_of}"
                self._that("failures", failed_of == heard_of, what)

    def _progress(self) -> None:
        since: dict[str, tuple[float, int, int]] = {}
        """When a queue was last seen without ready jobs, or to have made progress; its claims by then, and those of
        all queues."""
        for at, queues in self.history.samples:
            total = sum(claims for _, claims in queues.values())
            for queue, (ready, claims) in queues.items():
                began, before, total_before = since.get(queue, (at, claims, total))
                if ready == 0 or claims != before:
                    since[queue] = (at, claims, total)
                    continue
                since[queue] = (began, before, total_before)
                said = f"{queue} had ready jobs and no claim for {at - began:.1f} s, others {total - total_before}"
                self.longest_wait = max(self.longest_wait, (at - began, said))
                self._that("progress", at - began <= PROGRESS_S, said)

    def _all_ended(self) -> None:
        for asked in self.history.asked:
            kept = self.history.kept.get((asked.queue, asked.id))
            runs = [r for r in self._by_id[asked.queue, asked.id] if r.generation >= asked.generation]
            if kept is None:
                ended = not asked.custom_id and any(ran.ended == "ok" for ran in runs)
            else:
                ended = kept.state in ("completed", "failed") and kept.generation >= asked.generation
            self._that("progress", ended, f"{asked} came to no end: {kept}")


# The chaos


class Producer:
    """Keeps every queue busy, and looks how they do."""

    def __init__(self, app: Holdfast[Any], history: History) -> None:
        self._app = app
        self._history = history
        self._rng = random.Random()
        self._numbers = itertools.count(1)

    async def produce(self, until: float) -> None:
        while time.monotonic() < until:
            await self.look()
            _, queues = self._history.samples[-1]
            if sum(ready for ready, _ in queues.values()) < BACKLOG:
                for queue in self._rng.choices(QUEUES, [5, 5, 2, 4, 1], k=4):
                    await self._ask(queue)
            await asyncio.sleep(0.05)

    async def look(self) -> bool:
        """Take a sample. Is there nothing left to do?"""
        stats = await self._app.stats()
        sample = {queue.queue: (queue.ready, queue.totals.get("claimed", 0)) for queue in stats.queues}
        self._history.samples.append((time.monotonic(), sample))
        return not any(queue.ready + queue.scheduled + queue.running for queue in stats.queues)

    async def _ask(self, queue: str) -> None:
        """A few requests in one step."""
        rng = self._rng
        options: list[dict[str, Any]] = []
        not_before: list[int] = []
        now_us = time.time_ns() // 1000
        for _ in range(1 if queue == "single" else rng.randrange(1, 5)):
            option: dict[str, Any] = {}
            due_us = 0
            match rng.randrange(5):
                case 0:
                    option["delay"] = rng.randrange(1_000) / 1000
                    due_us = now_us + round(1e6 * option["delay"])
                case 1 | 2:  # Also in the past: that goes before what is due now.
                    due_us = now_us + rng.randrange(-2_000_000, 1_000_000)
                    option["run_at"] = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=due_us)
            if queue == "single":
                option["id"] = f"s:{rng.randrange(KEYS)}"
                run_at: Any = rng.choice([True, True, "if_later", "if_earlier", False])
                option["on_conflict"] = Update(payload=rng.random() < 0.8, run_at=run_at)
                due_us = due_us if run_at in (True, "if_later") else 0
            else:
                option["priority"] = rng.choice([3, 5, 5, 5, 8])
                if rng.random() < 0.5:
                    option["id"] = f"n:{next(self._numbers)}"
            options.append(option)
            not_before.append(due_us)
        payloads = [{"key": int(option["id"][2:])} if queue == "single" else {} for option in options]
        bounds = [self._app.queue(queue).bind(p, **option) for p, option in zip(payloads, options, strict=True)]
        for handle, option, due_us in zip(await self._app.enqueue_many(bounds), options, not_before, strict=True):
            assert handle.placed in (Placed.NEW, Placed.UPDATED, Placed.DEFERRED)
            asked = Asked(
                queue=queue,
                id=handle.id,
                generation=handle.generation,
                priority=option.get("priority", 5),
                not_before_us=due_us,
                custom_id="id" in option,
            )
            self._history.asked.append(asked)


class Nemesis:
    """Kills one worker after the other, and starts another in its place."""

    def __init__(self, scene: Scene, history: History) -> None:
        self._scene = scene
        self._history = history
        self._workers: list[WorkerProcess] = []

    def start(self) -> None:
        options = ("--processes", "2", "--lease", "1", "--grace", "5", "--log-level", "warning")
        self._workers.append(self._scene.start("fuzz_tasks:app", *options))

    async def kill_now_and_then(self, until: float) -> None:
        while time.monotonic() + KILL_EVERY_S < until:
            await asyncio.sleep(KILL_EVERY_S)
            worker = self._workers.pop(0)
            assert worker.process.poll() is None, worker.text()
            worker.signal(signal.SIGKILL)
            self._history.kills += 1
            self.start()

    async def stop(self) -> None:
        for worker in self._workers:
            assert await worker.stop(30) == 0, worker.text()


def read(scene: Scene, history: History) -> None:
    """Take up what was noted."""
    runs: dict[tuple[str, str, int], Ran] = {}
    names = set(Ran.__dataclass_fields__)
    for noted in scene.notes():
        match noted["what"]:
            case "start":
                ran = Ran(**{name: value for name, value in noted.items() if name in names})
                runs[ran.queue, ran.id, ran.fence] = ran
                history.runs.append(ran)
            case "end":
                ran = runs[noted["queue"], noted["id"], noted["fence"]]
                ran.ended, ran.until, ran.until_us = noted["ended"], noted["at"], noted["wall_us"]
            case "told":
                said = {name: noted[name] for name in ("generation", "kind", "count", "limit")}
                history.told.append(Told(queue=noted["of_queue"], id=noted["of"], **said))
            case "completed":
                history.completed.append((noted["queue"], noted["id"], noted["attempt"]))


async def read_storage(app: Holdfast[Any], history: History) -> None:
    for stats in (await app.stats()).queues:
        history.totals[stats.queue] = Counter(stats.totals)
    for queue in QUEUES:
        ids = sorted({asked.id for asked in history.asked if asked.queue == queue})
        for start in range(0, len(ids), 100):
            some = ids[start : start + 100]
            for id, job in zip(some, await app.storage.get(queue, some), strict=True):
                kept = None if job is None else Kept(state=str(job.state), generation=job.generation)
                history.kept[queue, id] = kept


def summary(storage: str, history: History, judge: Judge, drained_s: float) -> str:
    tasks = [ran for ran in history.runs if ran.queue in QUEUES]
    kinds = Counter(ran.kind for ran in tasks)
    ids = {(asked.queue, asked.id) for asked in history.asked}
    outcomes = {kind: sum(totals[kind] for totals in history.totals.values()) for kind in ("completed", "failed")}
    returns = ("retried", "timed_out", "stalled", "released", "promoted")
    outcomes |= {kind: sum(totals[kind] for totals in history.totals.values()) for kind in returns}
    return "\n".join(
        [
            f"\n{storage}: {SECONDS:g} s of chaos, {drained_s:.1f} s until all was quiet",
            f"  {len(history.asked)} requests for {len(ids)} ids, {len(tasks)} runs,"
            f" {len(history.runs) - len(tasks)} of fail handlers, {history.kills} workers killed",
            "  runs: " + ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()),
            "  stored: " + ", ".join(f"{kind} {count}" for kind, count in outcomes.items()),
            "  checks: " + ", ".join(f"{name} {judge.checked[name]}" for name in INVARIANTS),
            f"  longest wait: {judge.longest_wait[1]}",
        ]
    )


@pytest.mark.suite("slow")
@pytest.mark.timeout(SECONDS + 240)
async def test_six_guarantees_hold_for_random_handlers_and_worker_kills(scene: Scene) -> None:
    history = History()
    producer, nemesis = Producer(scene.app, history), Nemesis(scene, history)
    for _ in range(WORKERS):
        nemesis.start()
    until = time.monotonic() + SECONDS
    async with asyncio.TaskGroup() as chaos:
        chaos.create_task(producer.produce(until))
        chaos.create_task(nemesis.kill_now_and_then(until))
    rested = time.monotonic()
    while not await producer.look():
        if time.monotonic() > rested + DRAIN_S:
            break  # What has not ended is told by the judge.
        await asyncio.sleep(0.1)
    drained_s = time.monotonic() - rested
    await nemesis.stop()
    read(scene, history)
    await read_storage(scene.app, history)
    judge = Judge(history)
    print(summary(scene.place.storage, history, judge, drained_s))
    assert not judge.wrong, "\n".join([f"{len(judge.wrong)} violations", *judge.wrong[:50]])
    assert all(judge.checked[name] > 0 for name in INVARIANTS)
    assert history.kills > 0
    for worker in scene.workers:  # All is well: nobody wants to read all that.
        os.truncate(worker.log, 0)


# The judge


def good() -> History:
    """A history in which all is well: one job that was retried, one that failed, one that was killed and came back."""
    at = [
        Ran(queue="usual", id="a", generation=10, fence=100, run_at=10, ended="ValueError", until=1.1, until_us=1_100),
        Ran(queue="usual", id="b", generation=20, fence=200, run_at=20, ended="PermanentError", until=1.3),
        Ran(queue="usual", id="a", generation=10, fence=5_000, run_at=2_000, attempt=2, ended="ok", until=3.0),
        Ran(queue="single", id="s", generation=30, fence=300, run_at=30, kind="crash"),
        Ran(queue="single", id="s", generation=30, fence=6_000, run_at=30, attempt=2, ended="ok", until=4.0),
    ]
    times = [(1.0, 1_000), (1.2, 1_200), (2.0, 5_100), (1.0, 1_000), (3.5, 6_100)]
    runs = [replace(ran, at=at, wall_us=wall_us) for ran, (at, wall_us) in zip(at, times, strict=True)]
    runs[2].retries, runs[0].backoff_us = 1, 900
    runs[2].former, runs[4].former = 100, 300
    return History(
        runs=runs,
        asked=[
            Asked(queue="usual", id="a", generation=10),
            Asked(queue="usual", id="b", generation=20),
            Asked(queue="single", id="s", generation=30),
        ],
        told=[Told(queue="usual", id="b", generation=20, kind="permanent", count=0, limit=0)],
        completed=[("usual", "a", 2)],
        samples=[(float(second), {"usual": (1, second // 2), "single": (0, 0)}) for second in range(20)],
        kept={
            ("usual", "a"): Kept(state="completed", generation=10),
            ("usual", "b"): Kept(state="failed", generation=20),
            ("single", "s"): Kept(state="completed", generation=30),
        },
        totals={
            "usual": Counter(enqueued=2, completed=1, failed=1),
            "single": Counter(enqueued=1, completed=1),
            "usual/failed": Counter(enqueued=1, completed=1),
        },
    )


def test_judge_finds_nothing_in_a_good_history() -> None:
    judge = Judge(good())
    assert judge.wrong == []
    assert all(judge.checked[name] > 0 for name in INVARIANTS)


def _an_earlier_job_waits(history: History) -> None:
    history.runs.append(replace(history.runs[1], id="c", generation=5, fence=8_000, run_at=5))


def _a_higher_priority_waits(history: History) -> None:
    history.runs.append(replace(history.runs[1], id="c", generation=40, fence=8_000, run_at=40))
    history.asked.append(Asked(queue="usual", id="c", generation=40, priority=8))


def _one_that_came_first_waits(history: History) -> None:
    """Both are due at the same instant."""
    history.runs[0] = replace(history.runs[1], id="c", generation=4_000, fence=4_500, run_at=20)
    history.runs[1] = replace(history.runs[1], id="d", generation=3_000, fence=4_600, run_at=20)


FORGED: dict[str, tuple[str, str, Callable[[History], Any]]] = {
    "lock": ("exclusion", "the lock was held", lambda h: setattr(h.runs[4], "overlaps", True)),
    "ends late": ("exclusion", "before the other had ended", lambda h: setattr(h.runs[0], "until", 2.5)),
    "lives on": ("exclusion", "process was alive", lambda h: setattr(h.runs[4], "former_alive", True)),
    "unproven": ("exclusion", "nobody can tell", lambda h: setattr(h.runs[4], "former", 0)),
    "late start": ("exclusion", "began first", lambda h: setattr(h.runs[3], "at", 9.0)),
    "repeated": (
        "once",
        "its process lives",
        lambda h: (setattr(h.runs[0], "ended", "ok"), setattr(h.runs[2], "former_alive", True)),
    ),
    "completed before": ("once", "had completed", lambda h: h.completed.append(("usual", "a", 1))),
    "two ends": ("once", "3 ends", lambda h: h.totals["usual"].update(completed=1)),
    "before its time": ("not early", "100 µs early", lambda h: setattr(h.asked[0], "not_before_us", 1_100)),
    "claimed early": ("not early", "µs early", lambda h: setattr(h.runs[1], "run_at", 900)),
    "backoff": ("not early", "short of its backoff", lambda h: setattr(h.runs[2], "run_at", 1_999)),
    "run_at": ("order", "was claimed while", _an_earlier_job_waits),
    "priority": ("order", "was claimed while", _a_higher_priority_waits),
    "arrival": ("order", "was claimed while", _one_that_came_first_waits),
    "nobody told": ("failures", "was not told of usual 'b'", lambda h: h.told.clear()),
    "told of a success": ("failures", "was told of what is", lambda h: setattr(h.told[0], "id", "a")),
    "tries left": ("failures", "was not exhausted", lambda h: setattr(h.told[0], "limit", 1)),
    "failures not told": (
        "failures",
        "2 jobs failed, the fail handler was told of 1",
        lambda h: h.totals["usual"].update(failed=1, enqueued=1),
    ),
    "starved": (
        "progress",
        "no claim for 13.0 s",
        lambda h: h.samples.extend((20.0 + s, {"usual": (3, 10)}) for s in range(15)),
    ),
    "never ended": ("progress", "came to no end", lambda h: setattr(h.kept["single", "s"], "state", "waiting")),
    "vanished": ("progress", "came to no end", lambda h: h.kept.update({("usual", "a"): None})),
    "dropped": ("progress", "came to no end", lambda h: setattr(h.asked[2], "generation", 31)),
}


@pytest.mark.parametrize(("invariant", "said", "forge"), FORGED.values(), ids=FORGED)
def test_judge_finds_each_forged_error(invariant: str, said: str, forge: Callable[[History], Any]) -> None:
    history = good()
    forge(history)
    wrong = Judge(history).wrong
    assert any(line.startswith(f"{invariant}: ") and said in line for line in wrong), wrong
