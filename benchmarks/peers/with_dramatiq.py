"""Dramatiq: threads. Results are switched on, as they are stored by others without asking."""

from __future__ import annotations

import time
from typing import Any

import dramatiq
from common import URL, job, mark, role, serve
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

THREADS = 8
"""Its default."""

broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL)))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    def enqueue(self, n: int) -> Any:
        return nothing.send(**job(n))

    def result(self, message: Any) -> None:
        message.get_result(block=True, timeout=60_000)


if __name__ == "__main__":
    if role() == "worker":
        dramatiq.Worker(broker, worker_threads=THREADS).start()
        while True:
            time.sleep(1)
    serve(Client(), "dramatiq", "redis", "hiredis")
