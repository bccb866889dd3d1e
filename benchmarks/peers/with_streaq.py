"""streaQ: anyio over coredis, Redis streams."""

from __future__ import annotations

from common import AT_ONCE, URL, Numbers, job, mark, role, serve
from streaq import Worker

CONNECTIONS = 4 * AT_ONCE
"""A hundred waiters hold one each and ask for another: with the default, 64, they would wait for ever."""

worker = Worker(redis_url=URL, concurrency=AT_ONCE, redis_kwargs={"max_connections": CONNECTIONS})


@worker.task(name="nothing", silent=True)
async def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    async def open(self) -> None:
        await worker.__aenter__()

    async def enqueue(self, n: int) -> None:
        await nothing.enqueue(**job(n))

    async def bulk(self, numbers: Numbers) -> None:
        await worker.enqueue_many([nothing.enqueue(**job(n)) for n in numbers])

    async def call(self, n: int) -> None:
        await (await nothing.enqueue(**job(n))).result(timeout=60)


if __name__ == "__main__":
    if role() == "worker":
        worker.run_sync()
    else:
        serve(Client(), "streaq", "coredis")
