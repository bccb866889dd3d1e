"""Random histories of programs in one process: producers, callers and consumers of `./dev chaos`, and workers that
start, stop and crash. The checker of `./dev chaos` judges what happened.

A seed fixes the random numbers, not the interleaving. `HOLDFAST_HISTORIES=100` runs the seeds 0 to 99 on every
storage, `HOLDFAST_HISTORIES=57-57` repeats one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos import history, recorder
from chaos.checker import Checker
from chaos.clients import Caller, Client, Producer, Puller
from chaos.runner import final_state
from chaos.settings import MILD, Profile, Program
from chaos.tasks import define
from holdfast import Holdfast
from holdfast._worker.executor import Inline
from holdfast._worker.worker import Worker
from tests.app.conftest import until

SECONDS = 2.0
DRAIN_S = 60
PROGRAM = Program(lease_s=0.5)
IN_PROCESS = {"slow": 3, "sleep": 1, "stubborn": 1, "block": 2}
PROFILE = Profile(
    kinds=MILD | IN_PROCESS,
    other_kinds=MILD | {"slow": 3},
    backlog=60,
    block_every_s=float("inf"),
    max_delay_s=0.5,
)
STALL_S = PROGRAM.lease_s / 4
"""A pause of the event loop that delays a heartbeat by its whole interval may cost a lease."""
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


class Workers:
    """Workers, each with its own app and its own number in the history, and what happens to them."""

    def __init__(self, make_app: Callable[..., Holdfast[Any]]) -> None:
        self._make_app = make_app
        self._numbers = itertools.count(1)
        self._workers: list[tuple[int, Worker]] = []

    async def start(self) -> None:
        number = next(self._numbers)
        app = self._make_app()
        define(app)
        worker = app.worker(name=f"w{number}", lease=PROGRAM.lease_s, grace=3)
        history.numbers[worker.name] = number
        await worker.__aenter__()
        self._workers.append((number, worker))

    async def stop(self, *, quick: bool = False) -> None:
        number, worker = self._workers.pop(0)
        began = time.monotonic()
        worker.stop(quick=quick)
        await worker.__aexit__(None, None, None)
        record("worker stop", began, number)

    async def stop_all(self) -> None:
        while self._workers:
            await self.stop()

    async def crash(self) -> None:
        """Cancel the tasks and runs of a worker where they are, so that nothing is settled."""
        number, worker = self._workers.pop(0)
        began = time.monotonic()
        main, executor = worker._main, worker._context.executor
        assert main is not None
        assert isinstance(executor, Inline)
        main.cancel()
        for _ in range(4):  # The settler must end before the runs do.
            await asyncio.sleep(0)
        for going in list(executor.runner._going.values()):
            going.task.cancel()
        await asyncio.wait([main])
        for going in list(executor.runner._going.values()):  # Runs that began while the worker was cancelled.
            going.task.cancel()
        await worker._stack.aclose()
        record("worker crash", began, number)

    async def abandon(self, queue: str, storage: Any) -> None:
        """Claim jobs of a queue as a worker that dies at once."""
        number = next(self._numbers)
        name, lease_ms = f"dead{number}", round(1000 * PROGRAM.lease_s)
        history.numbers[name] = number
        for _ in range(100):
            claim = await storage.claim(queue, 2, worker=name, lease_ms=lease_ms)
            if claim.jobs:
                break
            await asyncio.sleep(0.001)
        record("worker kill", time.monotonic(), number)


def record(kind: str, began: float, target: int = 0) -> None:
    history.writer().write(history.Fault(kind=kind, at=began, until=time.monotonic(), target=target))


async def disturb(workers: Workers, app: Holdfast[Any], rng: random.Random) -> None:
    deck = ["stop", "quick", "crash", "crash", "abandon", "abandon", "pause", "pause"] * 2
    rng.shuffle(deck)
    paused: list[str] = []
    for action in deck:
        await asyncio.sleep(rng.uniform(0.02, 0.15))
        queue = rng.choice(["work", "plain", "thread", "question", "single", "unique", "once"])
        match action:
            case "stop" | "quick":
                await asyncio.gather(workers.stop(quick=action == "quick"), workers.start())
            case "crash":
                await workers.crash()
                await workers.start()
            case "abandon":
                await workers.abandon(queue, app.storage)
            case "pause" if paused:
                await app.queue(paused.pop()).resume()
            case "pause":
                await app.queue(queue).pause()
                paused.append(queue)
    for queue in paused:
        await app.queue(queue).resume()


@asynccontextmanager
async def stalls_recorded() -> AsyncIterator[None]:
    """Record when the event loop did not run for a while: a busy machine may cost a worker its leases."""

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            if time.monotonic() - before > STALL_S:
                record("host stall", before)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


@pytest.mark.parametrize("seed", seeds())
async def test_every_random_history_keeps_all_guarantees(
    app: Holdfast[Any], make_app: Callable[..., Holdfast[Any]], seed: int, tmp_path: Path
) -> None:
    folder = tmp_path / "history"
    folder.mkdir()
    rng = random.Random(seed)
    with recorder.recording(folder):
        await run(app, make_app, rng)
    verdict = Checker(history.read_each(folder), PROGRAM).verdict
    wrong = [f"{rule}: {case}" for rule, cases in verdict.wrong.items() for case in cases]
    assert not wrong, "\n".join([f"seed {seed}: {len(wrong)} violations", *wrong[:20]])
    assert verdict.counts["runs"] > 50


async def run(app: Holdfast[Any], make_app: Callable[..., Holdfast[Any]], rng: random.Random) -> None:
    workers = Workers(make_app)

    def make(kind: type[Client], app: Holdfast[Any], tasks: dict[str, Any]) -> Any:
        return kind(app, tasks, random.Random(rng.random()), PROFILE)

    async with make_app() as second, stalls_recorded():
        both = [(one, define(one)) for one in (app, second)]
        clients = [make(kind, *one) for one in both for kind in (Producer, Caller, Caller)]
        pullers = [make(Puller, *one) for one in (*both, both[0])]
        for puller in pullers:
            puller.lease_s = PROGRAM.lease_s
        for _ in range(rng.randrange(2, 4)):
            await workers.start()
        ends_at = time.monotonic() + SECONDS
        is_drained = False
        async with asyncio.TaskGroup() as pulling:
            for puller in pullers:
                pulling.create_task(puller.run(lambda: is_drained))
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(client.run(lambda: time.monotonic() > ends_at))
                group.create_task(disturb(workers, app, rng))
            for puller in pullers:
                puller.careful = True
            began = time.monotonic()

            async def drained() -> bool:
                return not any(q.ready + q.scheduled + q.running for q in (await app.stats()).queues)

            await until(drained, DRAIN_S)
            is_drained = True
        closing = await final_state(app)
        closing.drained_s = time.monotonic() - began
        history.writer().write(closing)
        await workers.stop_all()
