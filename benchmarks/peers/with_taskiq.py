"""taskiq on Redis: a stream, whose jobs are acknowledged, or a list, whose jobs are lost with their worker."""

from __future__ import annotations

import os
import sys

from common import AT_ONCE, POLL_S, URL, VARIANT, job, mark, role, serve
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

# With the default consumer_id, "$", what was sent before a first worker was there would never run.
plain = ListQueueBroker(URL) if VARIANT == "list" else RedisStreamBroker(URL, consumer_id="0")
broker = plain.with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=600))


@broker.task(task_name="nothing")
async def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    async def open(self) -> None:
        await broker.startup()

    async def enqueue(self, n: int) -> None:
        await nothing.kiq(**job(n))

    async def call(self, n: int) -> None:
        await (await nothing.kiq(**job(n))).wait_result(check_interval=POLL_S, timeout=60)


if __name__ == "__main__":
    if role() == "worker":
        command = [sys.executable, "-m", "taskiq", "worker", "with_taskiq:broker", "--workers", "1"]
        command += ["--max-async-tasks", str(AT_ONCE), "--log-level", "WARNING"]
        os.execv(sys.executable, command)
    serve(Client(), "taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")
