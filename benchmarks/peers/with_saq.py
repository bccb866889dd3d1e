"""SAQ: asyncio, one Redis command after the other."""

from __future__ import annotations

import asyncio
from typing import Any

from common import AT_ONCE, POLL_S, URL, job, mark, role, serve
from saq import Queue, Worker


async def nothing(context: Any, *, n: int, pad: str) -> None:
    mark(n)


async def work() -> None:
    await Worker(Queue.from_url(URL), [nothing], concurrency=AT_ONCE).start()


class Client:
    async def open(self) -> None:
        self.queue = Queue.from_url(URL)
        await self.queue.connect()

    async def enqueue(self, n: int) -> None:
        await self.queue.enqueue("nothing", **job(n))

    async def call(self, n: int) -> None:
        await self.queue.apply("nothing", poll_interval=POLL_S, **job(n))


if __name__ == "__main__":
    if role() == "worker":
        asyncio.run(work())
    else:
        serve(Client(), "saq", "redis", "hiredis")
