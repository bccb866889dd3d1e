"""A tour in one program: tasks, results, retries, a fail handler, a singleton, a pulled queue. On one SQLite file.

Run it with `./dev demo`. Give a URL to run it elsewhere: `./dev demo redis://localhost:6379/0`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast import Failure, Holdfast, JobFailed, current_job


@dataclass
class Report:
    user: int
    pages: int


FOLDER = tempfile.TemporaryDirectory(prefix="holdfast-demo-")
URL = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(FOLDER.name).resolve()}/jobs.db"

app = Holdfast(URL, namespace="demo")
began = time.monotonic()
alerts: asyncio.Queue[str] = asyncio.Queue()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:6.2f} s  {text}")


@app.task(timeout=5)
async def report(user: int, *, pages: int = 1) -> Report:
    await asyncio.sleep(0.1)
    return Report(user, pages)


@app.task(max_retries=3, min_backoff=0.1)
async def flaky() -> str:
    if current_job().attempt < 3:
        raise ConnectionError("the other side hung up")
    return f"worked on attempt {current_job().attempt}"


@app.task(max_retries=1, min_backoff=0.1)
def hopeless(invoice: str) -> None:  # not async: it runs on a thread
    raise ValueError(f"{invoice} has no total")


@hopeless.on_failure
async def alert(failure: Failure) -> None:
    await alerts.put(f"{failure.payload.invoice}, after {failure.job.attempts} runs: {failure.error}")


@app.task(singleton="sync:{user}")
async def sync(user: int, version: int) -> int:
    await asyncio.sleep(0.2)
    return version


async def main() -> None:
    async with app, app.worker():
        say(f"an app with {len(app.tasks)} tasks and a worker on {'SQLite' if 'sqlite' in URL else 'a server'}")

        handle = await report.enqueue(42, pages=3)
        say(f"enqueued a report: {handle.placed}")
        say(f"its result: {await handle.result()}")
        say(f"three calls at once: {[r.user for r in await asyncio.gather(*(report.call(n) for n in (1, 2, 3)))]}")

        say(f"retried until it works: {await flaky.call()}")
        try:
            await hopeless.call("invoice 7")
        except JobFailed as error:
            say(f"failed for good, {error.kind}: {error.error.message}")
        say(f"its fail handler, a job of its own: {await alerts.get()}")

        first = await sync.enqueue(42, version=1)
        await asyncio.sleep(0.1)
        second, third = await sync.enqueue(42, version=2), await sync.enqueue(42, version=3)
        say(f"a singleton asked for while it runs: {second.placed}, {third.placed}")
        say(f"so version {await first.result()} ran, and then only the newest: {await third.result()}")

        emails = app.queue("emails")
        await emails.enqueue({"to": "ada"}, id="welcome-ada")
        say(f"asked for twice under one id: {(await emails.enqueue({'to': 'ada'}, id='welcome-ada')).placed}")
        lease = await emails.lease(seconds=30)
        assert lease is not None
        say(f"pulled by hand: {lease.payload}")
        say(f"completed: {await lease.complete('sent')}, and once more: {await lease.complete('sent')}")
        say(f"and remembered: {await emails.result('welcome-ada')!r}")

        problems = [p for stats in (await app.stats()).queues for p in (await app.queue(stats.queue).repair()).problems]
        say(f"audit of every queue: {len(problems)} problems")


with FOLDER:
    asyncio.run(main())
