"""Random histories of whole programs: producers, workers that come, go and crash, pullers that drop leases, operators.
What happened is written down by the handlers themselves, and judged when all is quiet again.

A seed fixes what is done, not how it interleaves. `HOLDFAST_HISTORIES=100` runs the seeds 0 to 99 on every storage,
`HOLDFAST_HISTORIES=57-57` repeats one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import (
    CancelResult,
    Failure,
    Holdfast,
    JobCancelled,
    JobFailed,
    JobForgotten,
    JobNotFound,
    PermanentError,
    Placed,
    Retry,
    WaitTimeout,
    current_job,
)
from holdfast._client.lease import Lease
from holdfast._client.queue import Queue
from holdfast._client.request import Handle
from holdfast._worker.executor import Inline
from holdfast._worker.worker import Worker
from tests.app.conftest import until

LEASE_S = 0.5
STEPS = 70
"""Of each of the two producers."""
NEVER_STALLS = 20
"""A limit that no history reaches: its jobs run, whatever becomes of their workers."""
LIMITS = {  # max_retries, max_stalls, max_timeouts
    "plain": (3, NEVER_STALLS, 3),
    "threaded": (2, NEVER_STALLS, 3),
    "unique": (3, NEVER_STALLS, 3),
    "single": (3, NEVER_STALLS, 3),
    "once": (0, 0, 0),
    "failing": (1, 1, 1),
    "short": (2, NEVER_STALLS, 1),
    "later": (2, NEVER_STALLS, 3),
}
DOES = {
    "plain": ("return", "return", "flaky", "raise", "permanent", "retry", "slow", "block"),
    "threaded": ("return", "nothing", "flaky", "block", "raise"),
    "unique": ("return", "flaky", "slow"),
    "single": ("return", "slow", "slow", "long", "stubborn", "flaky", "permanent", "again", "block"),
    "once": ("return", "return", "raise", "slow", "long"),
    "failing": ("raise", "permanent", "flaky", "return", "slow"),
    "short": ("hang", "hang", "return"),
    "later": ("return", "retry", "again"),
}
"""What a handler is asked to do."""


USUAL_SEEDS = 1
SLOW_SEEDS = 6
"""Seeds on each storage with `./dev test --all`, which leaves out the usual ones."""


def seeds() -> list[Any]:
    asked = os.environ.get("HOLDFAST_HISTORIES", "")
    if not asked:
        suites = ["usual"] * USUAL_SEEDS + ["slow"] * (SLOW_SEEDS - USUAL_SEEDS)
        return [
            pytest.param(seed, id=f"seed{seed}", marks=pytest.mark.suite(suite)) for seed, suite in enumerate(suites)
        ]
    first, dash, last = asked.partition("-")
    chosen = range(int(first), int(last) + 1) if dash else range(int(first))
    return [pytest.param(seed, id=f"seed{seed}") for seed in chosen]


# What is written down. `at` is monotonic, `wall_us` is the time by which a run_at is meant.


def wall_us() -> int:
    return time.time_ns() // 1000


@dataclass
class Ran:
    """A run, by the handler's own account."""

    queue: str
    id: str
    generation: int
    fence: int
    attempt: int
    counts: tuple[int, int, int]
    due_us: int
    nonce: int
    worker: str
    at: float = field(default_factory=time.monotonic)
    wall_us: int = field(default_factory=wall_us)
    until: float = 0.0
    ended: str = ""

    def __str__(self) -> str:
        return (
            f"{self.at:.4f}..{self.until:.4f} run of generation {self.generation} nonce {self.nonce}"
            f" attempt {self.attempt} counts {self.counts} fence {self.fence} at {self.worker}: {self.ended or 'lasts'}"
        )


@dataclass
class Asked:
    """A request that was acknowledged, at `until`."""

    queue: str
    id: str
    generation: int
    placed: Placed | None
    nonce: int | None
    not_before_us: int
    at: float
    until: float

    def __str__(self) -> str:
        return f"{self.at:.4f}..{self.until:.4f} {self.placed}, generation {self.generation} nonce {self.nonce}"


@dataclass
class Called:
    """A caller that waited, and what it was told."""

    queue: str
    id: str | None
    """None where `call` made it."""
    generation: int
    nonce: int
    does: str
    at: float
    until: float = 0.0
    result: dict[str, int] | None = None
    error: BaseException | None = None

    def __str__(self) -> str:
        return (
            f"{self.at:.4f}..{self.until:.4f} call of nonce {self.nonce} ({self.does}), generation {self.generation}:"
            f" {self.result if self.error is None else repr(self.error)}"
        )


@dataclass
class Cancel:
    """A cancel, and its reply."""

    queue: str
    id: str
    reply: CancelResult
    at: float
    until: float
    told_us: int = field(default_factory=wall_us)

    def __str__(self) -> str:
        return f"{self.at:.4f}..{self.until:.4f} cancel: {self.reply}"


@dataclass
class History:
    runs: list[Ran] = field(default_factory=list)
    requests: list[Asked] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    told_of: list[tuple[str, int]] = field(default_factory=list)
    """Failed jobs, (id, generation), of which the fail handler was told and returned."""
    completed: list[tuple[str, int]] = field(default_factory=list)
    """Leases, (id, fence), whose complete() said True."""
    disturbances: list[str] = field(default_factory=list)
    nonces: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @contextmanager
    def run(self, nonce: int) -> Iterator[Ran]:
        job = current_job()
        counts = (job.retries, job.stalls, job.timeouts)
        ran = Ran(
            *(job.queue, job.id, job.generation, job.fence, job.attempt),
            *(counts, job.run_at, nonce, job.worker),
        )
        self.runs.append(ran)
        try:
            yield ran
            ran.ended = "returned"
        except asyncio.CancelledError:
            ran.ended = f"stopped by {job.stopping}"
            raise
        except BaseException as error:
            ran.ended = type(error).__name__
            raise
        finally:
            ran.until = time.monotonic()

    def note(self, what: str) -> None:
        self.disturbances.append(f"{time.monotonic():.4f} {what}")

    def excerpt(self, queue: str, id: str | None) -> str:
        every: list[Any] = [*self.runs, *self.requests, *self.calls, *self.cancels]
        about = [(item.at, str(item)) for item in every if item.queue == queue and item.id == id]
        return "".join(f"\n    {line}" for _, line in sorted(about))


# The program: the same tasks in every app.


class Program:
    def __init__(self, app: Holdfast[Any], history: History) -> None:
        self.app = app
        self.history = history
        quick: Any = {"min_backoff": 0.01, "max_backoff": 0.05, "cancel_grace": 0.1, "timeout": 20}

        def options(name: str) -> Any:
            retries, stalls, timeouts = LIMITS[name]
            return {"name": name, **quick, "max_retries": retries, "max_stalls": stalls, "max_timeouts": timeouts}

        @app.task(**options("plain"))
        async def plain(nonce: int, does: str) -> dict[str, int]:
            return await self._act(nonce, does)

        @app.task(**options("threaded"))
        def threaded(nonce: int, does: str) -> dict[str, int] | None:
            with history.run(nonce) as ran:
                self._maybe_raise(does)
                time.sleep(0.05 if does == "block" else 0.001)
                return None if does == "nothing" else result_of(ran)

        @app.task(**options("unique"), unique="u:{key}")
        async def unique(nonce: int, does: str, key: int) -> dict[str, int]:
            return await self._act(nonce, does)

        @app.task(**options("single"), singleton="s:{key}")
        async def single(nonce: int, does: str, key: int) -> dict[str, int]:
            return await self._act(nonce, does, key)

        @app.task(**options("once"), delivery="at_most_once")
        async def once(nonce: int, does: str) -> dict[str, int]:
            return await self._act(nonce, does)

        @app.task(**options("failing"))
        async def failing(nonce: int, does: str) -> dict[str, int]:
            return await self._act(nonce, does)

        @failing.on_failure(min_backoff=0.01, max_backoff=0.05, cancel_grace=0.1, max_stalls=NEVER_STALLS)
        async def failed(failure: Failure) -> None:
            if current_job().attempt == 1 and failure.payload.nonce % 2:
                raise ValueError("not yet")
            await asyncio.sleep(0.01)
            history.told_of.append((failure.job.id, failure.job.generation))

        @app.task(**{**options("short"), "timeout": 0.15})
        async def short(nonce: int, does: str) -> dict[str, int]:
            return await self._act(nonce, does)

        @app.task(**options("later"))
        async def later(nonce: int, does: str) -> dict[str, int]:
            return await self._act(nonce, does)

        self.tasks: dict[str, Any] = {
            task.name: task for task in (plain, threaded, unique, single, once, failing, short, later)
        }

    async def _act(self, nonce: int, does: str, *key: int) -> dict[str, int]:
        with self.history.run(nonce) as ran:
            self._maybe_raise(does)
            if does == "again":
                again = self.tasks[ran.queue].using(delay=0.05)
                await again.enqueue(next(self.history.nonces), "return", *key)
            elif does == "hang":
                await asyncio.sleep(60)
            elif does == "stubborn":
                await self._be_stubborn()
            elif does == "block":
                time.sleep(0.03)  # noqa: ASYNC251  A handler that does what it should not.
            await asyncio.sleep({"slow": 0.2, "long": 2 * LEASE_S}.get(does, 0.002))
            return result_of(ran)

    async def _be_stubborn(self) -> None:
        """Take longer to stop than there is time for, but less than a lease."""
        try:
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            await asyncio.sleep(0.25)
            raise

    def _maybe_raise(self, does: str) -> None:
        if does == "raise" or (does == "flaky" and current_job().attempt == 1):
            raise ValueError("as asked")
        if does == "permanent":
            raise PermanentError("as asked")
        if does == "retry" and current_job().retries < 2:
            raise Retry(delay=0.03)

    # What producers do

    async def enqueue(
        self, queue: str, does: str, key: int, options: dict[str, Any], nonce: int | None = None
    ) -> Handle[Any]:
        nonce = nonce or next(self.history.nonces)
        at, now_us = time.monotonic(), wall_us()
        handle: Handle[Any] = await self._using(queue, options, now_us).enqueue(
            *self._arguments(queue, nonce, does, key)
        )
        self._acknowledged(handle, nonce, _due_us(options, now_us), at)
        return handle

    async def enqueue_many(self, queue: str, does: str, count: int) -> None:
        nonces = [next(self.history.nonces) for _ in range(count)]
        at, now_us = time.monotonic(), wall_us()
        bounds = [self.tasks[queue].bind(*self._arguments(queue, nonce, does, nonce % 3)) for nonce in nonces]
        for nonce, handle in zip(nonces, await self.app.enqueue_many(bounds), strict=True):
            self._acknowledged(handle, nonce, now_us, at)

    async def call(self, queue: str, does: str, key: int, wait: float) -> None:
        nonce = next(self.history.nonces)
        called = Called(queue, _id_of(queue, key), 0, nonce, does, time.monotonic())
        await self._told(called, self.tasks[queue].using(wait=wait).call(*self._arguments(queue, nonce, does, key)))

    async def wait_for(self, queue: str, does: str, key: int, wait: float) -> None:
        at, nonce = time.monotonic(), next(self.history.nonces)
        handle = await self.enqueue(queue, does, key, {}, nonce)
        called = Called(queue, handle.id, handle.generation, nonce, does, at)
        await self._told(called, handle.result(wait=wait))

    async def cancel(self, handle: Handle[Any]) -> None:
        at = time.monotonic()
        reply = await self.app.queue(handle.queue).cancel(handle.id)
        self.history.cancels.append(Cancel(handle.queue, handle.id, reply, at, time.monotonic()))

    async def retry_failed(self, queue: str) -> None:
        failed = [job.id async for job in self.app.queue(queue).jobs("failed")]
        for id in failed[:3]:
            at = time.monotonic()
            with suppress(JobNotFound):  # It has completed meanwhile.
                self._acknowledged(await self.app.queue(queue).retry(id), None, 0, at)

    async def _told(self, called: Called, waiting: Any) -> None:
        try:
            called.result = await waiting
        except (WaitTimeout, JobFailed, JobCancelled, JobForgotten) as error:
            called.error = error
        called.until = time.monotonic()
        self.history.calls.append(called)

    def _arguments(self, queue: str, nonce: int, does: str, key: int) -> tuple[Any, ...]:
        return (nonce, does, key) if queue in ("unique", "single") else (nonce, does)

    def _using(self, queue: str, options: dict[str, Any], now_us: int) -> Any:
        if "run_in" in options:
            run_at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=_due_us(options, now_us))
            options = {**options, "run_at": run_at}
            del options["run_in"]
        return self.tasks[queue].using(**options)

    def _acknowledged(self, handle: Handle[Any], nonce: int | None, not_before_us: int, at: float) -> None:
        asked = Asked(
            handle.queue, handle.id, handle.generation, handle.placed, nonce, not_before_us, at, time.monotonic()
        )
        self.history.requests.append(asked)


def _due_us(options: dict[str, Any], now_us: int) -> int:
    return now_us + round(1e6 * (options.get("delay") or options.get("run_in") or 0))


def _id_of(queue: str, key: int) -> str | None:
    return {"unique": f"u:{key}", "single": f"s:{key}"}.get(queue)


def result_of(ran: Ran) -> dict[str, int]:
    return {"nonce": ran.nonce, "fence": ran.fence, "generation": ran.generation}


# Those who do things


class Stage:
    """Workers, each with an app of its own, and what is done to them."""

    def __init__(self, make_app: Callable[..., Holdfast[Any]], history: History) -> None:
        self._make_app = make_app
        self._history = history
        self._names = itertools.count(1)
        self.workers: list[Worker] = []

    async def start(self) -> None:
        program = Program(self._make_app(), self._history)
        worker = program.app.worker(name=f"w{next(self._names)}", lease=LEASE_S, grace=3)
        await worker.__aenter__()
        self.workers.append(worker)
        self._history.note(f"{worker.name} started")

    async def stop(self, *, quick: bool = False) -> None:
        worker = self.workers.pop(0)
        self._history.note(f"{worker.name} stops{' quickly' if quick else ''}")
        worker.stop(quick=quick)
        await worker.__aexit__(None, None, None)
        self._history.note(f"{worker.name} has stopped")

    async def crash(self) -> None:
        """As far as a process can do this to a part of itself: its tasks and runs end where they are, unsettled."""
        worker = self.workers.pop(0)
        self._history.note(f"{worker.name} crashes")
        main, executor = worker._main, worker._context.executor
        assert main is not None
        assert isinstance(executor, Inline)
        main.cancel()
        for _ in range(4):  # First those who would settle, then those who have something to be settled.
            await asyncio.sleep(0)
        for task, _ in list(executor.runner._going.values()):
            task.cancel()
        await asyncio.wait([main])
        for task, _ in list(executor.runner._going.values()):  # Runs that began while the worker was cancelled.
            task.cancel()
        await worker._stack.aclose()

    async def haunt(self, queue: str, storage: Any) -> None:
        """Somebody takes jobs and is never heard of again. It is as eager as the workers are, for a moment."""
        ghost = f"ghost{next(self._names)}"
        for _ in range(100):
            claim = await storage.claim(queue, 2, worker=ghost, lease_ms=round(1000 * LEASE_S))
            if claim.jobs:
                self._history.note(f"{ghost} took {[job.id for job in claim.jobs]} of {queue}")
                return
            await asyncio.sleep(0.001)


class Puller:
    """Takes leases of a queue that has no task, and is not always as good as its word."""

    def __init__(self, app: Holdfast[Any], history: History, rng: random.Random) -> None:
        self._queue: Queue = app.queue("pulled", max_retries=2)
        self._history = history
        self._rng = rng
        self.careful = False
        """Settles whatever it takes."""
        self.stopped = False

    async def pull(self) -> None:
        while not self.stopped:
            lease = await self._queue.lease(seconds=0.3, wait=0.2)
            if lease is not None:
                await self._work(lease)

    async def _work(self, lease: Lease) -> None:
        job = lease._job
        counts = (job.retries, job.stalls, job.timeouts)
        ran = Ran(
            *("pulled", lease.id, job.generation, lease.fence, lease.attempt),
            *(counts, job.run_at, lease.payload["nonce"], "a puller"),
        )
        self._history.runs.append(ran)
        ways = ("complete", "extend", "extend", "late", "drop", "retry", "release", "fail")
        how = "complete" if self.careful else self._rng.choice(ways)
        true = False
        match how:
            case "complete":
                true = await lease.complete({"nonce": ran.nonce})
            case "extend":
                for _ in range(2):
                    await asyncio.sleep(0.2)
                    await lease.extend()
                true = await lease.complete({"nonce": ran.nonce})
            case "late":
                await asyncio.sleep(0.6)
                true = await lease.complete({"nonce": ran.nonce})
            case "retry":
                await lease.retry(delay=0.02)
            case "release":
                await lease.release()
            case "fail":
                await lease.fail("as asked")
        if true:
            self._history.completed.append((lease.id, lease.fence))
        ran.until, ran.ended = time.monotonic(), f"{how} {true}"


# The plan


Step = tuple[float, str, tuple[Any, ...]]


def production(rng: random.Random) -> list[Step]:
    """What one producer does, and how long it rests before each."""
    steps: list[Step] = []
    for _ in range(STEPS):
        queue = rng.choice([*DOES, "single", "single", "once"])
        does, key = rng.choice(DOES[queue]), rng.randrange(2)
        verb = rng.choice(
            ("enqueue",) * 8 + ("many", "call", "call", "wait", "cancel", "cancel", "keep", "pull", "pull")
        )
        match verb:
            case "enqueue":
                options: dict[str, Any] = {"timeout": 0.15} if does == "stubborn" else {}
                if queue == "later" or rng.random() < 0.1:
                    options[rng.choice(("delay", "run_in"))] = rng.uniform(0.05, 0.4)
                steps.append((rng.uniform(0, 0.05), verb, (queue, does, key, options)))
            case "many":
                steps.append((0.0, verb, (queue, does, rng.randrange(2, 8))))
            case "call" | "wait":
                steps.append((rng.uniform(0, 0.05), verb, (queue, does, key, rng.choice((0.05, 0.5, 10)))))
            case "cancel" | "keep":
                steps.append((rng.uniform(0, 0.02), verb, (rng.random(),)))
            case "pull":
                steps.append((0.0, verb, (rng.choice((None, 0.1)),)))
    return steps


def disturbance(rng: random.Random) -> list[Step]:
    """What happens to workers and queues meanwhile."""
    deck = ["stop", "quick", "crash", "crash", "haunt", "haunt", "pause", "retry"] * 2
    rng.shuffle(deck)
    return [(rng.uniform(0.02, 0.15), verb, (rng.choice([*DOES, "single"]),)) for verb in deck]


async def produce(program: Program, steps: list[Step], waiting: asyncio.TaskGroup) -> None:
    handles: list[Handle[Any]] = []
    pulled = program.app.queue("pulled")
    for pause, verb, args in steps:
        await asyncio.sleep(pause)
        match verb:
            case "enqueue":
                handles.append(await program.enqueue(*args))
            case "many":
                await program.enqueue_many(*args)
            case "call":
                waiting.create_task(program.call(*args))
            case "wait":
                waiting.create_task(program.wait_for(*args))
            case "cancel" if handles:
                recent = handles[-6:]
                await program.cancel(recent[int(args[0] * len(recent))])
            case "keep" if handles:
                handle = handles[int(args[0] * len(handles))]
                await program.app.queue(handle.queue).keep(handle.id, 0 if handle.queue == "unique" else 60)
            case "pull":
                nonce, at, now_us = next(program.history.nonces), time.monotonic(), wall_us()
                options = {} if args[0] is None else {"delay": args[0]}
                handle = await pulled.enqueue({"nonce": nonce}, **options)
                program._acknowledged(handle, nonce, _due_us(options, now_us), at)


async def disturb(stage: Stage, program: Program, steps: list[Step]) -> None:
    paused: list[str] = []
    for pause, verb, (queue,) in steps:
        await asyncio.sleep(pause)
        match verb:
            case "stop" | "quick":
                await asyncio.gather(stage.stop(quick=verb == "quick"), stage.start())
            case "crash":
                await stage.crash()
                await stage.start()
            case "haunt":
                await stage.haunt(queue, program.app.storage)
            case "pause" if paused:
                await program.app.queue(paused.pop()).resume()
            case "pause":
                program.history.note(f"{queue} is paused")
                await program.app.queue(queue).pause()
                paused.append(queue)
            case "retry":
                await program.retry_failed(queue)
    for queue in DOES:
        await program.app.queue(queue).resume()


# The judge


async def violations(app: Holdfast[Any], history: History) -> list[str]:
    """What must not be, now that all is quiet."""
    wrong: list[str] = []

    def tell(claim: str, queue: str, id: str | None) -> None:
        wrong.append(f"{claim}: {queue} {id}{history.excerpt(queue, id)}")

    by_id: dict[tuple[str, str], list[Ran]] = defaultdict(list)
    for ran in sorted(history.runs, key=lambda ran: ran.at):
        by_id[ran.queue, ran.id].append(ran)
        if not ran.ended:
            tell("a run never ended", ran.queue, ran.id)
        if ran.wall_us < ran.due_us:
            tell(f"a run began {ran.due_us - ran.wall_us} µs before its time", ran.queue, ran.id)
        if any(count > most for count, most in zip(ran.counts, LIMITS.get(ran.queue, ran.counts), strict=True)):
            tell(f"a run beyond the limits {LIMITS[ran.queue]}", ran.queue, ran.id)
    for (queue, id), runs in by_id.items():
        _judge_runs(queue, id, runs, tell)
    await _judge_requests(app, history, by_id, tell)
    _judge_calls(history, by_id, tell)
    _judge_cancels(history, by_id, tell)
    for id, fence in history.completed:
        if any(ran.fence > fence for ran in by_id["pulled", id]):
            tell(f"the lease with fence {fence} was completed, and the job went on", "pulled", id)
        if sum(id == other for other, _ in history.completed) > 1:
            tell("two leases were completed", "pulled", id)
    failures = (await app.queue("failing").stats()).totals.get("failed", 0)
    if failures != len(set(history.told_of)):
        wrong.append(f"{failures} jobs failed, the fail handler was told of {sorted(set(history.told_of))}")
    return wrong


Tell = Callable[[str, str, str | None], None]


def _judge_runs(queue: str, id: str, runs: list[Ran], tell: Tell) -> None:
    """The runs of one id, in the order of their beginnings."""
    for before, after in itertools.pairwise(runs):
        if after.fence <= before.fence:
            tell("a later run has no higher fence", queue, id)
        if after.generation < before.generation:
            tell("a later run is of an older generation", queue, id)
        if after.generation == before.generation and after.attempt <= before.attempt:
            tell("a later run has no higher attempt", queue, id)
        if queue == "single" and after.at < before.until:
            tell("two runs overlap", queue, id)
    for generation in {ran.generation for ran in runs}:
        same = [ran for ran in runs if ran.generation == generation]
        if queue == "once" and len(same) > 1:
            tell("what may run once ran twice", queue, id)
        if sum(ran.ended == "returned" for ran in same) > 1 + max(ran.counts[1] for ran in same):
            tell("a run that returned was run again", queue, id)
        if queue in LIMITS:
            retries, _, timeouts = LIMITS[queue]
            stalls = max(ran.counts[1] for ran in same) + 1
            if sum(ran.ended in ("ValueError", "Retry") for ran in same) > retries + stalls:
                tell("too many runs that raised", queue, id)
            if sum(ran.ended == "stopped by timeout" for ran in same) > timeouts + stalls:
                tell("too many runs that timed out", queue, id)
            if sum(ran.ended == "PermanentError" for ran in same) > stalls:
                tell("a permanent error was not the end", queue, id)


async def _judge_requests(
    app: Holdfast[Any], history: History, by_id: dict[tuple[str, str], list[Ran]], tell: Tell
) -> None:
    for asked in history.requests:
        runs = by_id[asked.queue, asked.id]
        mine = [ran for ran in runs if ran.generation == asked.generation]
        if asked.placed in (Placed.NEW, Placed.UPDATED, Placed.DEFERRED):
            if any(ran.wall_us < asked.not_before_us for ran in mine):
                tell("a run began before what its request said", asked.queue, asked.id)
            if asked.nonce is not None and any(ran.nonce != asked.nonce for ran in mine):
                tell("a run has not the payload of its request", asked.queue, asked.id)
            if any(ran.at < asked.at for ran in mine):
                tell("a run began before it was asked for", asked.queue, asked.id)
        if await _is_done(app, history, asked, runs):
            continue
        tell(f"what was asked for (generation {asked.generation}) came to no end", asked.queue, asked.id)


async def _is_done(app: Holdfast[Any], history: History, asked: Asked, runs: list[Ran]) -> bool:
    """It ran to its end, or what is stored says what became of it, or it was cancelled."""
    ends = ("returned", "complete True", "extend True", "late True")
    ended = [ran for ran in runs if ran.generation >= asked.generation and ran.ended in ends]
    if asked.placed is Placed.COMPLETED:
        return any(ran.generation == asked.generation for ran in ended)
    if ended:
        return True
    job = await app.queue(asked.queue).get(asked.id)
    if job is not None and job.generation >= asked.generation:
        return job.state in ("failed", "cancelled")
    # A duplicate of what is being cancelled ends with it: the cancel may have come before the request.
    cancels = [c for c in history.cancels if (c.queue, c.id) == (asked.queue, asked.id)]
    cancels = [cancel for cancel in cancels if cancel.told_us >= asked.generation]
    return any(cancel.reply in (CancelResult.CANCELLED, CancelResult.ASKED) for cancel in cancels)


def _judge_calls(history: History, by_id: dict[tuple[str, str], list[Ran]], tell: Tell) -> None:
    by_nonce = {ran.nonce: ran for ran in history.runs}
    for called in history.calls:
        queue, id = called.queue, called.id
        if called.result is not None:
            fence = called.result["fence"]
            ran = next((ran for ran in history.runs if ran.queue == queue and ran.fence == fence), None)
            if ran is None or ran.ended != "returned" or ran.nonce != called.result["nonce"]:
                tell(f"a result that no run gave: {called}", queue, id)
            elif queue != "unique" and ran.at < called.at:
                tell(f"a result of a run that began before the call: {called}", queue, id)
            elif _id_of(queue, 0) is None and ran.nonce != called.nonce:
                tell(f"a result of another's run: {called}", queue, id)
            elif ran.generation < called.generation or (id is not None and ran.id != id):
                tell(f"a result of an older request: {called}", queue, id)
        elif called.error is None and called.does != "nothing":
            tell(f"no result: {called}", queue, id)
        elif isinstance(called.error, JobFailed) and queue != "single":
            kinds = {"return": ("stall",), "slow": ("stall",), "long": ("stall",), "hang": ("stall", "timeout")}.get(
                called.does
            )
            if kinds is not None and called.error.kind not in kinds:
                tell(f"a failure that nobody made: {called}", queue, id)
        elif isinstance(called.error, JobCancelled):
            if not any((c.queue, c.id) == (queue, id) and c.at < called.until for c in history.cancels):
                tell(f"cancelled by nobody: {called}", queue, id)
        elif isinstance(called.error, JobForgotten) and not _may_be_forgotten(called):
            tell(f"forgotten in front of its waiter: {called}", queue, id)
        runs_for_sure = _id_of(queue, 0) is None and LIMITS[queue][1] == NEVER_STALLS
        if runs_for_sure and called.nonce not in by_nonce and not isinstance(called.error, JobCancelled):
            tell(f"never ran: {called}", queue, id)


def _may_be_forgotten(called: Called) -> bool:
    """Who enqueues first and waits later may come too late for what is not kept; `call` asks for both in one step."""
    return called.generation != 0 and (called.queue == "unique" or called.does == "nothing")


def _judge_cancels(history: History, by_id: dict[tuple[str, str], list[Ran]], tell: Tell) -> None:
    for cancel in history.cancels:
        if cancel.reply is not CancelResult.CANCELLED:
            continue
        before = [r for r in history.requests if (r.queue, r.id) == (cancel.queue, cancel.id) and r.until < cancel.at]
        newest = max((request.generation for request in before), default=0)
        for ran in by_id[cancel.queue, cancel.id]:
            if ran.at > cancel.until and ran.generation <= newest:
                tell("it ran although it had been cancelled", cancel.queue, cancel.id)


@pytest.mark.parametrize("seed", seeds())
async def test_every_random_history_keeps_all_guarantees(
    app: Holdfast[Any], make_app: Callable[..., Holdfast[Any]], seed: int
) -> None:
    rng = random.Random(seed)
    history = History()
    stage = Stage(make_app, history)
    async with make_app() as second:
        producers = [Program(app, history), Program(second, history)]
        pullers = [Puller(one, history, random.Random(rng.random())) for one in (app, second, app)]
        plans = [production(rng) for _ in producers]
        for _ in range(rng.randrange(2, 4)):
            await stage.start()
        async with asyncio.TaskGroup() as pulling:
            for puller in pullers:
                pulling.create_task(puller.pull())
            async with asyncio.TaskGroup() as waiting:
                async with asyncio.TaskGroup() as busy:
                    for program, plan in zip(producers, plans, strict=True):
                        busy.create_task(produce(program, plan, waiting))
                    busy.create_task(disturb(stage, producers[0], disturbance(rng)))
                for puller in pullers:
                    puller.careful = True
            history.note("nothing is disturbed any more")

            async def quiet() -> bool:
                return not any(q.ready + q.scheduled + q.running for q in (await app.stats()).queues)

            await until(quiet, 60)
            for puller in pullers:
                puller.stopped = True
        while stage.workers:
            await stage.stop()
    wrong = await violations(app, history)
    told = "\n".join([f"seed {seed}: {len(wrong)} violations", *wrong, "", *history.disturbances])
    assert not wrong, told
    assert len(history.runs) > STEPS
