"""The tasks of `holdfast demo`. Their storage comes from the environment, as in any app without a URL."""

from __future__ import annotations

import asyncio
import os

from holdfast._client.app import Holdfast
from holdfast._core.clock import SystemClock
from holdfast._worker.current_job import current_job
from holdfast._worker.handler import Failure

app = Holdfast(namespace="holdfast-demo")


@app.task(name="thumbnail", size=2)
async def thumbnail(picture: int) -> None:
    await asyncio.sleep(0.02)


@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b


@app.task(name="flaky", max_retries=5, min_backoff=0.2, max_backoff=0.2)
async def flaky() -> str:
    if current_job().attempt < 3:
        raise ConnectionError("connection reset")
    return f"worked on attempt {current_job().attempt}"


@app.task(name="hopeless", max_retries=1, min_backoff=0.1, max_backoff=0.1)
def hopeless(invoice: str) -> None:
    raise ValueError(f"{invoice} has no total")


@hopeless.on_failure
async def alert(failure: Failure) -> str:
    return f"{failure.payload.invoice} failed after {failure.job.attempts} runs: {failure.error}"


@app.task(name="spin", timeout=1.5, max_timeouts=0, size=100)
def spin() -> None:
    """Never returns, and ignores cancellation."""
    current_job().progress({"pid": os.getpid()})
    while True:
        pass


@app.task(name="later")
async def later() -> tuple[int, int]:
    return current_job().run_at, SystemClock().now_us()


@app.task(name="sync", singleton="sync:{user}")
async def sync(user: int, version: int) -> int:
    await asyncio.sleep(0.8)
    return version


@app.task(name="nap", size=25)
async def nap(number: int) -> str:
    await asyncio.sleep(2)
    return current_job().worker
