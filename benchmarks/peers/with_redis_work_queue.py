"""redis-work-queue: leases without a worker of their own, so here is the loop that its manual shows. No results."""

from __future__ import annotations

import json

from common import URL, Numbers, job, mark, role, serve
from redis import Redis
from redis_work_queue import Item, KeyPrefix, WorkQueue

LEASE_S = 60


class Client:
    def __init__(self) -> None:
        self.db = Redis.from_url(URL)
        self.queue = WorkQueue(KeyPrefix("bench"))

    def enqueue(self, n: int) -> None:
        self.queue.add_item(self.db, Item.from_json_data(job(n)))

    def bulk(self, numbers: Numbers) -> None:
        pipeline = self.db.pipeline()
        for n in numbers:
            self.queue.add_item_to_pipeline(pipeline, Item.from_json_data(job(n)))
        pipeline.execute()

    def work(self) -> None:
        while True:
            item = self.queue.lease(self.db, LEASE_S, block=True, timeout=1)
            if item is not None:
                mark(json.loads(item.data())["n"])
                self.queue.complete(self.db, item)


if __name__ == "__main__":
    if role() == "worker":
        Client().work()
    else:
        serve(Client(), "redis-work-queue", "redis", "hiredis")
