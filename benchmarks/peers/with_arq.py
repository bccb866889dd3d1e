"""arq: asyncio; it looks for jobs every half second, or, tuned, every ten milliseconds."""

from __future__ import annotations

import asyncio
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
from common import AT_ONCE, POLL_S, URL, VARIANT, job, mark, role, serve

DELAY_S = 0.01 if VARIANT == "tuned" else 0.5


async def nothing(context: Any, n: int, pad: str) -> None:
    mark(n)


class Client:
    async def open(self) -> None:
        self.redis = await create_pool(RedisSettings.from_dsn(URL))

    async def enqueue(self, n: int) -> Any:
        return await self.redis.enqueue_job("nothing", **job(n))

    async def call(self, n: int) -> None:
        await (await self.enqueue(n)).result(timeout=60, poll_delay=POLL_S)


if __name__ == "__main__":
    if role() == "worker":
        asyncio.set_event_loop(asyncio.new_event_loop())
        settings = RedisSettings.from_dsn(URL)
        Worker([nothing], redis_settings=settings, max_jobs=AT_ONCE, poll_delay=DELAY_S).run()
    else:
        serve(Client(), "arq", "redis", "hiredis")
