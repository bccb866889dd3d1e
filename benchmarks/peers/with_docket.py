"""docket: asyncio, Redis streams."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from common import AT_ONCE, URL, Numbers, job, mark, role, serve
from docket import Docket, Worker

PLACE = f"{URL}?max_connections=1000"
"""A hundred jobs at a time need more connections than redis-py allows by itself."""
CHECK = timedelta(milliseconds=5)
WAIT = timedelta(seconds=60)


async def nothing(n: int, pad: str) -> None:
    mark(n)


async def work() -> None:
    async with Docket("bench", PLACE) as docket:
        docket.register(nothing)
        async with Worker(docket, concurrency=AT_ONCE, minimum_check_interval=CHECK) as worker:
            await worker.run_forever()


class Client:
    async def open(self) -> None:
        self.docket = await Docket("bench", PLACE).__aenter__()
        self.docket.register(nothing)

    async def enqueue(self, n: int) -> Any:
        return await self.docket.add(nothing)(**job(n))

    async def bulk(self, numbers: Numbers) -> None:
        await self.docket.add_many([self.docket.call(nothing)(**job(n)) for n in numbers])

    async def call(self, n: int) -> None:
        await (await self.enqueue(n)).get_result(timeout=WAIT)


if __name__ == "__main__":
    if role() == "worker":
        asyncio.run(work())
    else:
        serve(Client(), "pydocket", "redis", "hiredis")
