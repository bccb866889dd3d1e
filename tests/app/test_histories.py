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

from holdfast import Cancelled, Failure, Holdfast, JobCancelled, JobFailed, PermanentError, Placed, Retry, WaitTimeout
from holdfast import JobForgotten as Forgotten
from holdfast import current_job
from holdfast.queue import Lease, Queue
from holdfast.task import Handle
from holdfast.worker import Worker
from tests.app.conftest import until

LEASE_S = 0.5
STEPS = 45
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
    "single": ("return", "slow", "slow", "flaky", "permanent", "again", "block"),
    "once": ("return", "return", "raise", "slow"),
    "failing": ("raise", "permanent", "flaky", "return", "slow"),
    "short": ("hang", "hang", "return"),
    "later": ("return", "retry", "again"),
}
"""What a handler is asked to do."""


def seeds() -> list[int]:
    asked = os.environ.get("HOLDFAST_HISTORIES", "2")
    first, dash, last = asked.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else list(range(int(first)))


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
    at: float
    wall_us: int
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
class Asked2Stop:
    """A cancel, and its reply."""

    queue: str
    id: str
    reply: Cancelled
    at: float
    until: float

    def __str__(self) -> str:
        return f"{self.at:.4f}..{self.until:.4f} cancel: {self.reply}"


@dataclass
class History:
    runs: list[Ran] = field(default_factory=list)
    requests: list[Asked] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    cancels: list[Asked2Stop] = field(default_factory=list)
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
            job.queue,
            job.id,
            job.generation,
            job.fence,
            job.attempt,
            counts,
            job.run_at,
            nonce,
            job.worker,
            time.monotonic(),
            wall_us(),
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
        about: list[tuple[float, str]] = []
        for item in [*self.runs, *self.requests, *self.calls, *self.cancels]:
            if item.queue == queue and item.id == id:
                about.append((item.at, str(item)))
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
            elif does == "block":
                time.sleep(0.03)
            await asyncio.sleep(0.2 if does == "slow" else 0.002)
            return result_of(ran)

    def _maybe_raise(self, does: str) -> None:
        if does == "raise" or (does == "flaky" and current_job().attempt == 1):
            raise ValueError("as asked")
        if does == "permanent":
            raise PermanentError("as asked")
        if does == "retry" and current_job().retries < 2:
            raise Retry(delay=0.03)

    # What producers do

    async def enqueue(self, queue: str, does: str, key: int, options: dict[str, Any]) -> Handle[Any]:
        nonce = next(self.history.nonces)
        at, now_us = time.monotonic(), wall_us()
        handle = await self._using(queue, options, now_us).enqueue(*self._arguments(queue, nonce, does, key))
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
        called_at = time.monotonic()
        handle = await self.enqueue(queue, does, key, {})
        nonce = self.history.requests[-1].nonce if handle.placed is None else -1
        nonce = next(r.nonce for r in reversed(self.history.requests) if r.id == handle.id) or nonce
        called = Called(queue, handle.id, handle.generation, nonce, does, called_at)
        await self._told(called, handle.result(wait=wait))

    async def cancel(self, handle: Handle[Any]) -> None:
        at = time.monotonic()
        reply = await self.app.queue(handle.queue).cancel(handle.id)
        self.history.cancels.append(Asked2Stop(handle.queue, handle.id, reply, at, time.monotonic()))

    async def retry_failed(self, queue: str) -> None:
        failed = [job.id async for job in self.app.queue(queue).jobs("failed")]
        for id in failed[:3]:
            at = time.monotonic()
            try:
                handle = await self.app.queue(queue).retry(id)
            except Exception as error:
                assert type(error).__name__ == "JobNotFound"  # noqa: PT017  It has completed meanwhile.
                continue
            self._acknowledged(handle, None, 0, at)

    async def _told(self, called: Called, waiting: Any) -> None:
        try:
            called.result = await waiting
        except (WaitTimeout, JobFailed, JobCancelled, Forgotten) as error:
            called.error = error
        called.until = time.monotonic()
        self.history.calls.append(called)

    def _arguments(self, queue: str, nonce: int, does: str, key: int) -> tuple[Any, ...]:
        return (nonce, does, key) if queue in ("unique", "single") else (nonce, does)

    def _using(self, queue: str, options: dict[str, Any], now_us: int) -> Any:
        if "run_in" in options:
            run_at = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=_due_us(options, now_us))
            return self.tasks[queue].using(run_at=run_at)
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
        main, runs = worker._main, worker._executor.runs
        assert main is not None
        main.cancel()
        for _ in range(4):  # First those who would settle, then those who have something to be settled.
            await asyncio.sleep(0)
        for run in runs:
            assert run.task is not None
            run.task.cancel()
        await asyncio.wait([main])
        await worker._stack.aclose()

    async def haunt(self, queue: str, storage: Any) -> None:
        """Somebody takes jobs and is never heard of again."""
        claim = await storage.claim(queue, 2, worker=f"ghost{next(self._names)}", lease_ms=round(1000 * LEASE_S))
        self._history.note(f"a ghost took {[job.id for job in claim.jobs]} of {queue}")


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
            "pulled",
            lease.id,
            job.generation,
            lease.fence,
            lease.attempt,
            counts,
            job.run_at,
            lease.payload["nonce"],
            "puller",
            time.monotonic(),
            wall_us(),
        )
        self._history.runs.append(ran)
        how = "complete" if self.careful else self._rng.choice(("complete", "late", "drop", "retry", "release", "fail"))
        true = False
        match how:
            case "complete":
                true = await lease.extend() and await lease.complete({"nonce": ran.nonce})
            case "late":
                await asyncio.sleep(0.4)
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
        queue = rng.choice(list(DOES))
        does, key = rng.choice(DOES[queue]), rng.randrange(2)
        verb = rng.choice(("enqueue",) * 8 + ("many", "call", "call", "wait", "cancel", "cancel", "keep", "pull", "pull"))
        match verb:
            case "enqueue":
                delays = [{"delay": rng.uniform(0.05, 0.4)}, {"run_in": rng.uniform(0.05, 0.4)}]
                seldom = queue == "later" or rng.random() < 0.1
                steps.append((rng.uniform(0, 0.05), verb, (queue, does, key, rng.choice(delays) if seldom else {})))
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
    steps: list[Step] = []
    while sum(pause for pause, _, _ in steps) < STEPS * 0.022:
        verb = rng.choice(("stop", "quick", "crash", "haunt", "haunt", "pause", "retry", "retry"))
        steps.append((rng.uniform(0.02, 0.25), verb, (rng.choice(list(DOES)),)))
    return steps


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
    paused: set[str] = set()
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
            case "pause":
                other = paused.pop() if paused else queue
                (program.history.note(f"pause or resume {other}"),)
                await (program.app.queue(other).resume() if other is not queue else program.app.queue(other).pause())
                if other is queue:
                    paused.add(queue)
            case "retry":
                await program.retry_failed(queue)
    for queue in DOES:
        await program.app.queue(queue).resume()
