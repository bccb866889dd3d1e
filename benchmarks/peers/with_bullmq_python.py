"""BullMQ for Python: asyncio, the scripts of BullMQ on Node. It has events, but no verb that waits for one job, so here
is the plainest one."""

from __future__ import annotations

import asyncio
from typing import Any

from bullmq import Queue, QueueEvents, Worker
from common import AT_ONCE, URL, Numbers, job, mark, role, serve

LISTENING_S = 0.5


async def nothing(received: Any, token: str) -> None:
    mark(received.data["n"])


async def work() -> None:
    Worker("bench", nothing, {"connection": URL, "concurrency": AT_ONCE})
    await asyncio.Event().wait()


class Client:
    async def open(self) -> None:
        self.queue = Queue("bench", {"connection": URL})
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.events: QueueEvents | None = None

    async def enqueue(self, n: int) -> None:
        await self.queue.add("nothing", job(n))

    async def bulk(self, numbers: Numbers) -> None:
        await self.queue.addBulk([{"name": "nothing", "data": job(n)} for n in numbers])

    async def call(self, n: int) -> None:
        if self.events is None:
            self.events = QueueEvents("bench", {"connection": URL})
            self.events.on("completed", self.completed)
            await asyncio.sleep(LISTENING_S)
        id = f"job-{n}"
        waiter = self.waiting[id] = asyncio.get_running_loop().create_future()
        await self.queue.add("nothing", job(n), {"jobId": id})
        await asyncio.wait_for(waiter, 60)

    def completed(self, event: dict[str, Any], *_: object) -> None:
        if waiter := self.waiting.pop(event["jobId"], None):
            waiter.set_result(None)


if __name__ == "__main__":
    if role() == "worker":
        asyncio.run(work())
    else:
        serve(Client(), "bullmq", "redis", "hiredis")
