"""A program that has its workers inside: `python embedded.py SCENE`, or with `-m`. It prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import holdfast._worker.processes.pool
from holdfast import Holdfast, OptionError, RunEvent, current_job
from tests.worker.scene import make_app, note

app = make_app()
events: list[tuple[str, str, int]] = []


@app.task
async def square(number: int) -> int:
    note("squares")
    return number * number


@app.task(name="serve.a")
async def serve_a() -> str:
    return "a"


@app.task(name="serve.b")
async def serve_b(seconds: float) -> str:
    note("began", seconds=seconds)
    await asyncio.sleep(seconds)
    return "b"


@app.task(name="crash", min_backoff=1.0, max_backoff=1.0)
async def crash() -> int:
    if current_job().stalls < 2:
        os._exit(1)
    return os.getpid()


@app.on_event
def heard(event: RunEvent) -> None:
    events.append((event.kind, event.queue, os.getpid()))


@app.on_error
def troubled(error: BaseException, where: str) -> None:
    note("trouble", error=str(error), where=where)


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # It has just ended.
            if int(parent) == os.getpid() and state != "X":
                found.append(int(folder.name))
    return found


async def until(true: Any, seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def works() -> dict[str, Any]:
    async with app, app.worker(processes=2) as worker:
        handles = [await square.enqueue(number) for number in range(20)]
        results = [await handle.result(wait=20) for handle in handles]
        queues = worker.queues
    return {"results": results, "queues": queues, "events": events, "pid": os.getpid()}


async def serves() -> dict[str, Any]:
    """Begin to serve a queue, and stop: once with time enough for its run, once without."""
    facts: dict[str, Any] = {}
    async with app, app.worker("serve.a", processes=1) as worker:
        early = await serve_b.enqueue(0.0)
        facts["a"] = [await serve_a.call() for _ in range(5)]
        facts["early"] = (await app.queue("serve.b").get(early.id)).state  # type: ignore[union-attr]
        facts["served"] = worker.serve("serve.*")
        facts["late"] = await early.result(wait=10)
        short = await serve_b.enqueue(0.3)
        await until(lambda: worker.running == 1)
        await worker.stop_serving("serve.b", grace=10)
        facts["short"] = (await app.queue("serve.b").get(short.id)).state  # type: ignore[union-attr]
        facts["left"] = worker.queues
        worker.serve("serve.b")
        long = await serve_b.enqueue(30.0)
        await until(lambda: worker.running == 1)
        began = asyncio.get_running_loop().time()
        await worker.stop_serving("serve.b", grace=0.2)
        facts["seconds"] = asyncio.get_running_loop().time() - began
        job = await app.queue("serve.b").get(long.id)
        assert job is not None
        facts["long"] = [job.state, job.retries, job.stalls, job.timeouts]
        facts["a again"] = await serve_a.call()
        try:
            worker.serve("serve.c")
        except OptionError as error:
            facts["wrong"] = str(error)
    return facts


async def rounds() -> dict[str, Any]:
    """What is left after each of several workers."""
    left = []
    async with app:
        for _ in range(4):
            async with app.worker(processes=2):
                await square.call(2)
            left.append((fds(), len(children())))
    return {"left": left}


async def cancelled() -> dict[str, Any]:
    """The program is cancelled while the first child starts."""
    facts: dict[str, Any] = {}
    async with app:
        before = fds()
        for seconds in (0.0, 0.02, 0.1):
            try:
                async with asyncio.timeout(seconds):
                    async with app.worker(processes=1):
                        await asyncio.sleep(30)
            except BaseException as error:
                facts[str(seconds)] = type(error).__name__
        facts["left"] = len(children())
        facts["more files"] = fds() - before
    return facts


async def spare() -> dict[str, Any]:
    """A child for suspects goes when nothing suspicious has come for a while."""
    holdfast._worker.processes.pool.SPARE_IDLE_S = 0.5
    async with app, app.worker(processes=1, lease=1):
        suspect = await crash.enqueue()
        await until(lambda: [kind for kind, queue, _ in events if queue == "crash"].count("stalled") == 2)
        held = await serve_b.enqueue(4.0)
        await until(lambda: ("claimed", "serve.b", os.getpid()) in events)
        alone = await suspect.result(wait=15)
        there = alone in children()
        await until(lambda: alone not in children(), 3)
        facts = {"there": there, "left": len(children())}
        await held.result(wait=15)
    return facts


async def refused() -> dict[str, Any]:
    """Apps that children cannot have."""
    facts: dict[str, Any] = {}
    hidden = make_app()
    local: Holdfast[Any] = Holdfast("memory://here")
    for name, wrong in (("hidden", hidden), ("local", local)):
        wrong.task(name="t")(lambda: None)
        try:
            async with wrong, wrong.worker(processes=1):
                pass
        except OptionError as error:
            facts[name] = str(error)
    facts["children"] = len(children())
    return facts


SCENES = {scene.__name__: scene for scene in (works, serves, rounds, cancelled, spare, refused)}

if __name__ == "__main__":
    print(json.dumps(asyncio.run(SCENES[sys.argv[1]]())))
