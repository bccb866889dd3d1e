"""Tasks for workers whose storage goes away or whose clock steps. Those that take a gate last until the test makes a
file of that name beside the notes, in every run."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from chaos.clocks import clock_of_the_test
from holdfast import current_job
from holdfast._core.clock import SystemClock
from tests.worker.scene import NOTES, make_app, note

clock = clock_of_the_test()
app = make_app(clock=clock)


async def stay(gate: str) -> list[int]:
    """Until the gate is open. What this run counts as."""
    job = current_job()
    counts = [job.attempt, job.retries, job.stalls, job.timeouts]
    note("began", worker=job.worker, counts=counts, gate=gate)
    try:
        while not Path(os.environ[NOTES]).with_name(gate).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        note("stopped", why=job.stopping)
        raise
    note("ended")
    return counts


@app.task(name="hold", size=1, timeout=120)
async def hold(gate: str) -> list[int]:
    return await stay(gate)


@app.task(name="dies", size=1, timeout=120, on_storage_loss="kill")
async def dies(gate: str) -> list[int]:
    return await stay(gate)


@app.task(name="only", size=1, timeout=120, singleton="{gate}")
async def only(gate: str) -> list[int]:
    return await stay(gate)


@app.task(name="meet", size=1, timeout=120, concurrency=1)
async def meet(gate: str) -> list[int]:
    """One in each worker: as many as there are workers can only be at it together if all of them work."""
    return await stay(gate)


@app.task(name="later", size=1)
async def later() -> None:
    """Note when this ran: on the steady clock, by the storage's clock, and by what this process takes for the time."""
    wall = (clock or SystemClock()).now_us()
    note("ran", run_at=current_job().run_at, wall=wall, own=time.time())


@app.task(name="again", size=1)
async def again(delay: float, id: str) -> None:
    await later.using(id=id, delay=delay).enqueue()


@app.task(name="tick", size=1, singleton="tick", max_retries=100, min_backoff=0.1, max_backoff=0.2)
async def tick(period: float) -> None:
    """A periodic job. It is noted once it has seen to its next run, with the time when it began."""
    began = time.monotonic()
    await tick.using(delay=period).enqueue(period)
    note("ticked", began=began)
