"""RQ: one job at a time, each in a process that is forked for it; or all in the worker's own process."""

from __future__ import annotations

from typing import Any

from common import URL, VARIANT, Numbers, job, mark, role, serve
from redis import Redis
from rq import Queue, SimpleWorker, Worker


def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    def __init__(self) -> None:
        self.queue = Queue("bench", connection=Redis.from_url(URL))

    def enqueue(self, n: int) -> Any:
        return self.queue.enqueue("with_rq.nothing", kwargs=job(n))

    def bulk(self, numbers: Numbers) -> None:
        prepare = Queue.prepare_data
        self.queue.enqueue_many([prepare("with_rq.nothing", kwargs=job(n)) for n in numbers])

    def result(self, enqueued: Any) -> None:
        enqueued.latest_result(timeout=60)


if __name__ == "__main__":
    if role() == "worker":
        kind = SimpleWorker if VARIANT == "simple" else Worker
        kind(["bench"], connection=Redis.from_url(URL)).work(logging_level="WARNING")
    else:
        serve(Client(), "rq", "redis", "hiredis")
