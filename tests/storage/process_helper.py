"""What tests run in other processes: `python process_helper.py ROLE FILE-OR-URL …`.

A role says on its output what it does, a line at a time, and ends when its input does, or when it is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

from holdfast._core.events import Topic
from holdfast._core.jobs import Complete, Release, Request, RetrySettlement, Work
from holdfast._core.replies import SettleResult
from holdfast.storage import Storage, connect
from holdfast.storage.local.sqlite import SqliteStorage

LEASE_MS = 300
HOUR_MS = 3_600_000
LIFE_S = 60.0
"""No process outlives a test by more than this, in any case."""


def say(*words: object) -> None:
    print(*words, flush=True)


async def next_words() -> list[str]:
    """The next line of input, in words; none at its end."""
    return (await asyncio.to_thread(sys.stdin.readline)).split()


async def storm(storage: Storage, history: str, name: str, seed: str) -> None:
    """Enqueue, claim and settle at random. What was acknowledged is written down, in a file outside of the database."""
    rng = random.Random(seed)
    log = os.open(history, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(log, (" ".join(map(str, words)) + "\n").encode())

    async with storage.subscribe(Topic("q")):
        if isinstance(storage, SqliteStorage):
            note("listening", storage._receiver.address)  # type: ignore[union-attr]
        for round in range(1_000_000):
            ids = [f"{name}-{round}-{n}" for n in range(rng.randrange(5))]
            for reply in await storage.enqueue("q", [Request(id, Work(b"payload"), custom_id=True) for id in ids]):
                note("enqueued", reply.id)
            jobs = (await storage.claim("q", rng.randint(1, 6), worker=name, lease_ms=LEASE_MS)).jobs
            for job in jobs:
                assert job.run is not None
                if rng.random() < 0.1:
                    await storage.settle("q", [Release(job.id, job.run.fence)], worker=name)
                elif rng.random() < 0.1:
                    await storage.settle("q", [RetrySettlement(job.id, job.run.fence, delay_ms=20)], worker=name)
                else:
                    if rng.random() < 0.01:
                        await asyncio.sleep(2 * LEASE_MS / 1000)  # Too late: another process may have the lease now.
                    done = Complete(job.id, job.run.fence, b"done", result_ttl_ms=HOUR_MS, dedup_ttl_ms=HOUR_MS)
                    for _ in range(rng.randint(1, 2)):
                        if await storage.settle("q", [done], worker=name) == [SettleResult.OK]:
                            note("completed", job.id, job.run.fence)


async def listen(storage: Storage) -> None:
    """Say what is heard, and when."""
    async with storage.subscribe(Topic("q", "ready"), Topic("q", "ends")) as events:
        say("listening", storage._receiver.address)  # type: ignore[attr-defined]
        async for event in events:
            say(event.kind, event.id, time.monotonic_ns())


async def enqueue(storage: Storage) -> None:
    """Enqueue the ids of each line of input."""
    say("open")
    while ids := await next_words():
        await storage.enqueue("q", [Request(id, Work(b"payload"), custom_id=True) for id in ids])
        say("enqueued", *ids)


async def open_often() -> None:
    """Open each file when its line of input arrives, and leave a job there."""
    say("open")
    while words := await next_words():
        path, id, at = words
        while time.monotonic_ns() < int(at):
            pass
        try:
            async with connect(f"sqlite:///{path}") as storage:
                await storage.enqueue("q", [Request(id, Work(b"payload"))])
            say("ok")
        except Exception as error:
            say(f"{error!r}")


async def main(role: str, path: str, *arguments: str) -> None:
    async with asyncio.timeout(LIFE_S):
        if role == "open":
            await open_often()
            return
        async with connect(path if "://" in path else f"sqlite:///{path}") as storage:
            roles: dict[str, Any] = {"storm": storm, "listen": listen, "enqueue": enqueue}
            await roles[role](storage, *arguments)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
