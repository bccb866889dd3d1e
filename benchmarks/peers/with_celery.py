"""Celery on Redis: processes that are forked beforehand, or a pool of threads."""

from __future__ import annotations

from typing import Any

from celery import Celery
from common import URL, VARIANT, job, mark, role, serve

app = Celery("bench", broker=URL, backend=URL)
app.conf.update(task_serializer="json", worker_hijack_root_logger=False)


@app.task(name="nothing")
def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    def enqueue(self, n: int) -> Any:
        return nothing.apply_async(kwargs=job(n))

    def result(self, result: Any) -> None:
        result.get(timeout=60)


if __name__ == "__main__":
    if role() == "worker":
        pool = ["--pool", "threads", "--concurrency", "8"] if VARIANT == "threads" else ["--concurrency", "2"]
        app.worker_main(["worker", "--loglevel", "WARNING", *pool])
    else:
        serve(Client(), "celery", "kombu", "redis", "hiredis")
