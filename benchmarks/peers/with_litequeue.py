"""litequeue: a table in SQLite and no worker, so this is the simplest loop. No results, and no worker is woken: an idle
worker looks again after a millisecond."""

from __future__ import annotations

import json
import time

from common import FOLDER, Numbers, job, mark, role, serve
from litequeue import LiteQueue

LOOK_S = 0.001


class Client:
    def __init__(self) -> None:
        self.queue = LiteQueue(f"{FOLDER}/jobs.db", timeout=30)

    def enqueue(self, n: int) -> None:
        self.queue.put(json.dumps(job(n)))

    def bulk(self, numbers: Numbers) -> None:
        with self.queue.transaction():
            for n in numbers:
                self.enqueue(n)

    def work(self) -> None:
        while True:
            message = self.queue.pop()
            if message is None:
                time.sleep(LOOK_S)
                continue
            mark(json.loads(message.data)["n"])
            self.queue.done(message.message_id)


if __name__ == "__main__":
    if role() == "worker":
        Client().work()
    else:
        serve(Client(), "litequeue")
