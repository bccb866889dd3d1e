"""Tasks of all sizes, that go on until a gate opens; tasks that say where they run; an app with everything around it.

`app` is for capacity and children, `many` has two hundred queues, `observed` has hooks.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast import CurrentJob, Execution, RunEvent, current_job
from tests.worker.scene import NOTES, make_app, note

app = make_app(max_payload=4 << 20)
many = make_app()

note("imported", parent=os.getppid())


def gate(name: str) -> Path:
    """Where a test opens a gate."""
    return Path(os.environ[NOTES]).with_name(f"gate-{name}")


async def opened(name: str) -> None:
    while not gate(name).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def _sized(name: str, size: int, **options: Any) -> None:
    """A task that takes up room until the gate `until` opens, or for some seconds."""

    @app.task(name=name, size=size, **options)
    async def run(until: str | None = None, seconds: float = 0.0) -> int:
        note("began", size=min(size, 100))
        if until is not None:
            await opened(until)
        await asyncio.sleep(seconds)
        note("ended", size=min(size, 100))
        return os.getpid()


_sized("ten", 10)
_sized("sixty", 60)
_sized("thirty", 30)
_sized("huge", 250)
_sized("pair", 10, concurrency=2)
_sized("high", 10, queue_priority=200)
_sized("low", 10, queue_priority=1)


def _one_of_many(number: int) -> None:
    @many.task(name=f"many.{number:03}")
    async def run() -> int:
        return number


for number in range(200):
    _one_of_many(number)


@app.task(name="where")
def where() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "stdin": os.readlink("/proc/self/fd/0"),
        "thread": threading.current_thread() is not threading.main_thread(),
    }


@app.task(name="meet")
def meet(others: int) -> str:
    """Ends when `count` runs are here at the same time, each on its own thread."""
    barriers.setdefault(others, threading.Barrier(others)).wait(10)
    return "met"


barriers: dict[int, threading.Barrier] = {}


@app.task(name="block", timeout=60)
async def block(until: str) -> int:
    """Async, and never awaits anything: nothing else goes on in its process."""
    note("blocks")
    while not gate(until).exists():
        time.sleep(0.02)  # noqa: ASYNC251
    return os.getpid()


leaked: list[bytearray] = []


@app.task(name="leak")
async def leak(mib: int, later: float = 0.0) -> int:
    """Keeps memory for ever, now or some time after its end."""
    asyncio.get_running_loop().call_later(later, lambda: leaked.append(bytearray(b"x") * (mib << 20)))
    return os.getpid()


mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine", default="nobody's")


@app.task(name="who")
async def who(sync: bool) -> dict[str, Any]:
    return await asyncio.to_thread(_who, sync) if sync else _who(sync)


@app.task(name="who.sync")
def who_sync(sync: bool) -> dict[str, Any]:
    return _who(sync)


def _who(sync: bool) -> dict[str, Any]:
    job = current_job()
    before = mine.get()
    mine.set(job.id)
    return {"id": job.id, "queue": job.queue, "attempt": job.attempt, "worker": job.worker, "before": before}


@app.task(name="report")
async def report(until: str) -> None:
    current_job().progress({"done": 1})
    current_job().progress({"done": 2, "of": 3})
    await opened(until)


@app.task(name="report.sync")
def report_sync(until: str) -> None:
    current_job().progress("half way")
    while not gate(until).exists():
        time.sleep(0.02)


@app.task(name="give")
async def give(size: int) -> str:
    return "x" * size


@app.task(name="give.object")
async def give_object() -> Any:
    note("began")
    return object()


class Detailed(Exception):
    details = 2**70  # JSON can hold it, msgpack cannot.


@app.task(name="raise.details", max_retries=1, min_backoff=0, max_backoff=0)
async def raise_details() -> None:
    note("began")
    raise Detailed("many")


@app.task(name="crash", min_backoff=1.0, max_backoff=1.0, max_stalls=5)
async def crash(times: int) -> int:
    if current_job().stalls < times:
        note("crashes")
        os._exit(1)
    note("survived")
    return os.getpid()


# Everything around a handler


@asynccontextmanager
async def lifespan() -> AsyncIterator[dict[str, int]]:
    note("entered")
    yield {"made by": os.getpid()}
    note("left")


observed = make_app(lifespan=lifespan)
log = logging.getLogger("shop")


@observed.middleware
async def around(job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
    note("before")
    result = await proceed()
    note("after")
    return result


@observed.after_execution
def doubled(execution: Execution) -> None:
    note("executed")
    if execution.queue == "double":
        execution.result = 2 * execution.result


@observed.on_event
async def heard(event: RunEvent) -> None:
    if event.kind in ("progress", "drained"):
        note(event.kind, of=event.queue, progress=event.progress)
        return
    note("event", kind=event.kind, of=event.queue, job=event.id, run=event.attempt, seconds=event.seconds)
    if event.queue == "double" and event.kind == "completed":
        raise RuntimeError("a hook that fails")


@observed.on_error
async def troubled(error: BaseException, where: str) -> None:
    note("trouble", error=type(error).__name__, where=where)


@observed.task(name="double")
async def double(number: int) -> int:
    return number


@observed.task(name="reporting")
async def reporting() -> None:
    current_job().progress({"pages": 3})
    await asyncio.sleep(2)  # Longer than it takes until the heartbeat sends the progress.


@observed.task(name="resources")
async def resources() -> Any:
    return observed.resources["made by"]


@observed.task(name="secret", max_retries=1, min_backoff=0, max_backoff=0)
async def secret(word: str, hold: float = 0.0, fails: bool = False) -> str:
    log.info("%s is at work", current_job().id)
    log.warning("two\nlines, and %s", {"an": object})
    await asyncio.sleep(hold)
    if fails and current_job().attempt == 1:
        raise ValueError("no luck\nat all")
    return word


@observed.task(name="number", max_retries=0)
async def number_only(number: int) -> None: ...


@observed.task(name="unspeakable", max_retries=0)
async def unspeakable(word: str) -> Any:
    return {word: {word}, (word, 1): object()}


@observed.task(name="hold")
async def hold(until: str) -> None:
    note("began")
    await opened(until)


@observed.task(name="spin")
async def spin(seconds: float) -> None:
    """Keeps its process from hearing anything for a while."""
    time.sleep(seconds)  # noqa: ASYNC251
