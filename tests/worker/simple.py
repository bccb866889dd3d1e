"""Tasks that do little."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from holdfast import Failure, current_job
from tests.worker.scene import make_app, note

app = make_app()
app.codec_hooks(Path, encode=str, decode=Path)


@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b


@app.task(name="parent")
async def parent(path: Path) -> Path:
    return path.parent


@app.task(name="nap")
async def nap(seconds: float) -> str:
    note("nap")
    await asyncio.sleep(seconds)
    note("woke")
    return "rested"


@app.task(name="doze")
def doze(seconds: float) -> str:
    """Not async: on a thread."""
    note("nap")
    time.sleep(seconds)
    note("woke")
    return "rested"


@app.task(name="stretch", timeout=0.3, max_timeouts=0)
async def stretch(seconds: float) -> str:
    current_job().extend_timeout(seconds + 20)
    await asyncio.sleep(seconds)
    return "stretched"


@app.task(name="stretch-thread", timeout=0.3, max_timeouts=0)
def stretch_thread(seconds: float) -> str:
    current_job().extend_timeout(seconds + 20)
    time.sleep(seconds)
    return "stretched"


@app.task(name="raise", max_retries=0)
def fail(message: str) -> None:
    raise ValueError(message)


@fail.on_failure
async def report(failure: Failure) -> None:
    note("reported", message=failure.error.message, failed=failure.job.id, by=current_job().queue)


@app.task(name="pipeline", size=50, timeout=20)
async def pipeline(depth: int) -> int:
    """Wait for a pipeline that is less deep."""
    return depth if depth == 0 else 1 + await pipeline.using(wait=15).call(depth - 1)


@app.task(name="thread-pipeline", size=50, timeout=20)
def thread_pipeline(depth: int) -> int:
    return depth if depth == 0 else 1 + thread_pipeline.sync.using(wait=15).call(depth - 1)
