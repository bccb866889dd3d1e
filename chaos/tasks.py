"""The tasks of a run. A request names the kind of its handler: mostly `ok`, sometimes a kind that fails.

`define` adds the tasks to an app; `app` is the app that worker processes load.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import time
from typing import Any

from chaos import history
from chaos.history import writer
from chaos.recorder import install, recorded_run
from chaos.settings import (
    BLOCK_S,
    CLOCK,
    DAY_S,
    DRAWN,
    MIN_BACKOFF_S,
    NAMESPACE,
    UNIQUE_TTL_S,
    Limits,
    Program,
    ending,
    profile,
)
from holdfast import Failure, Holdfast, PermanentError, Retry, current_job

LEAK_BYTES = 40_000_000
SLOW_S = 0.2
leaked: list[bytearray] = []


def misbehave(kind: str) -> None:
    """The kinds that are the same on an event loop and on a thread."""
    attempt = current_job().attempt
    match kind:
        case "throw":
            raise ValueError("as requested")
        case "flaky" if attempt == 1:
            raise ValueError("as requested")
        case "permanent":
            raise PermanentError("as requested")
        case "retry" if current_job().retries < 2:
            raise Retry(delay=0.03)
        case "crash" if attempt < 3:
            sys.stdout.flush()
            (os.abort if os.getpid() % 3 else lambda: ctypes.string_at(0))()
        case "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin" if attempt < 3:
            while True:
                pass
        case "block":
            time.sleep(0.03)
        case "leak":
            leaked.append(bytearray(os.urandom(4096) * (LEAK_BYTES // 4096)))
        case "fork":
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)


async def misbehave_on_the_loop(kind: str) -> None:
    misbehave(kind)
    match kind:
        case "slow":
            await asyncio.sleep(SLOW_S)
        case "sleep":
            await asyncio.sleep(60)
        case "stubborn":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(SLOW_S)
                raise
    while kind == "hang":
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass  # The run must not end when it is stopped.


def chosen(kind: str) -> str:
    """The kind of this run: `drawn` is another one at each run."""
    return random.choices(list(DRAWN), list(DRAWN.values()))[0] if kind == "drawn" else kind


def answer(kind: str, token: str) -> str | None:
    return None if kind == "nothing" else token


async def act(kind: str, token: str, ms: float, *, lock: bool = False) -> str | None:
    kind = chosen(kind)
    with recorded_run(kind, token, lock=lock):
        await asyncio.sleep(ms / 1000)
        await misbehave_on_the_loop(kind)
        return answer(kind, token)


def define(app: Holdfast[Any]) -> dict[str, Any]:
    """Add all tasks to an app, and return them by name."""
    limits = Program().limits
    backoff: Any = {"min_backoff": MIN_BACKOFF_S, "max_backoff": 0.5}

    def options(name: str, limit: Limits | None = None, **more: Any) -> Any:
        retries, stalls, timeouts = limit or limits[name]
        counts = {"max_retries": retries, "max_stalls": stalls, "max_timeouts": timeouts}
        times = {"timeout": profile().timeout_s, "cancel_grace": 0.3, "failure_ttl": DAY_S, "result_ttl": DAY_S}
        return {"name": name, **backoff, **counts, **times, **more}

    @app.task(**options("work"))
    async def work(kind: str, token: str, ms: float = 0) -> str | None:
        return await act(kind, token, ms)

    @app.task(**options("plain", queue_priority=200))
    async def plain(kind: str, token: str, ms: float = 0) -> str | None:
        return await act(kind, token, ms)

    @app.task(**options("thread", size=20))
    def thread(kind: str, token: str, ms: float = 0) -> str | None:
        kind = chosen(kind)
        with recorded_run(kind, token):
            time.sleep(ms / 1000)
            misbehave(kind)
            if kind == "hang":
                time.sleep(60)
            return answer(kind, token)

    @app.task(**options("question", queue_priority=150, result_ttl=3_600))
    async def question(kind: str, token: str, ms: float = 0) -> str | None:
        """A caller waits for the answer; the outcome may be forgotten at once."""
        return await act(kind, token, ms)

    @app.task(**options("single"), singleton="s{key}")
    async def single(key: int, kind: str, token: str, ms: float = 0) -> str | None:
        if kind == "again":
            await single.using(delay=0.05).enqueue(key, "ok", f"{random.getrandbits(48):012x}")
        return await act(kind, token, ms, lock=True)

    @app.task(**options("unique", result_ttl=UNIQUE_TTL_S), unique="u{key}")
    async def unique(key: int, kind: str, token: str, ms: float = 0) -> str | None:
        return await act(kind, token, ms)

    @app.task(name="once", delivery="at_most_once", timeout=profile().timeout_s, failure_ttl=DAY_S, result_ttl=DAY_S)
    async def once(kind: str, token: str, ms: float = 0) -> str | None:
        return await act(kind, token, ms)

    @app.task(**options("block", Limits(3, 5, 2), concurrency=1, size=100, timeout=15))
    async def block(kind: str, token: str, ms: float = 0) -> str | None:
        """Blocks the event loop for longer than a lease."""
        with recorded_run(kind, token):
            time.sleep(BLOCK_S)  # noqa: ASYNC251  The worker must survive this.
            return token

    @app.task(**options("periodic", Limits(3, 4, 2)), singleton="p{key}")
    async def periodic(key: int, number: int, token: str) -> None:
        """Enqueues its own next run until the run of the program ends."""
        with recorded_run("ok", token, lock=True):
            if not ending().exists():
                await periodic.using(delay=0.5).enqueue(key, number + 1, f"{number + 1:012x}")
            await asyncio.sleep(0.005)

    async def report(failure: Failure) -> None:
        job = failure.job
        with recorded_run("ok", ""):
            reported = history.FailureReported(
                queue=job.queue, id=job.id, generation=job.generation, kind=failure.error.kind
            )
            writer().write(reported)

    tasks: tuple[Any, ...] = (work, plain, thread, question, single, unique, once, block, periodic)
    for task in tasks:
        task.on_failure(max_retries=100, max_stalls=100, max_timeouts=100, **backoff)(report)
    return {task.name: task for task in tasks}


if CLOCK in os.environ:  # In a process of ./dev chaos, not in a test.
    install()
    app = Holdfast(namespace=NAMESPACE)
    tasks = define(app)
