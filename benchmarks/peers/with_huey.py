"""Huey with threads: on Redis, where a result is pushed to its waiter, or on a SQLite file, where it is polled."""

from __future__ import annotations

from typing import Any

from common import FOLDER, POLL_S, URL, VARIANT, job, mark, role, serve
from huey import RedisHuey, SqliteHuey

THREADS = 4

if VARIANT == "sqlite":
    huey = SqliteHuey("bench", filename=f"{FOLDER}/jobs.db", store_none=True)
else:
    huey = RedisHuey("bench", url=URL, store_none=True, notify_result=True)


@huey.task(name="nothing")
def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    def enqueue(self, n: int) -> Any:
        return nothing(**job(n))

    def result(self, result: Any) -> None:
        result.get(blocking=True, timeout=60, backoff=1, max_delay=POLL_S)


if __name__ == "__main__":
    if role() == "worker":
        huey.create_consumer(workers=THREADS, worker_type="thread", initial_delay=POLL_S, backoff=1.15).run()
    else:
        serve(Client(), "huey", "redis", "hiredis")
