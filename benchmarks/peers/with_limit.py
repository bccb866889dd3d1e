"""The limit: our own functions over a blocking socket, or bare statements on our own schema. A loop claims a hundred,
marks each as run, and settles them; no caller gets an answer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlsplit

from common import FOLDER, URL, VARIANT, Numbers, job, mark, role, serve

from benchmarks.bare import Functions, Statements
from holdfast._core.jobs import Request, Work
from holdfast.storage.validation import MAX_ITEMS

BATCH = 100
LOOK_S = 0.001


def payload(n: int) -> bytes:
    return json.dumps(job(n)).encode()


def name(n: int) -> str:
    """As long as an id of Holdfast's own; what is marked is read from it, so that no payload has to be."""
    return f"{n:022}"


class OnServer:
    def __init__(self) -> None:
        self.functions = Functions(urlsplit(URL).port or 6379)

    def enqueue(self, n: int) -> None:
        self.functions.enqueue([Request(name(n), Work(payload(n)))])

    def bulk(self, numbers: Numbers) -> None:
        jobs = [Request(name(n), Work(payload(n))) for n in numbers]
        for start in range(0, len(jobs), MAX_ITEMS):
            self.functions.enqueue(jobs[start : start + MAX_ITEMS])

    def work(self) -> None:
        while True:
            leases = self.functions.claim(BATCH)
            for id, _ in leases:
                mark(int(id))
            if leases:
                self.functions.settle(leases)
            else:
                self.functions.wait(1)


class OnFile:
    def __init__(self) -> None:
        self.statements = Statements(Path(FOLDER) / "jobs.db")

    def enqueue(self, n: int) -> None:
        self.statements.enqueue([self.statements.row(name(n).encode(), payload(n))])

    def bulk(self, numbers: Numbers) -> None:
        self.statements.enqueue([self.statements.row(name(n).encode(), payload(n)) for n in numbers])

    def work(self) -> None:
        while True:
            leases = self.statements.claim(BATCH)
            for (id,) in leases:
                mark(int(id))
            if leases:
                self.statements.settle(leases)
            else:
                time.sleep(LOOK_S)


if __name__ == "__main__":
    limit = OnFile() if VARIANT == "sqlite" else OnServer()
    if role() == "worker":
        limit.work()
    else:
        serve(limit, "hiredis", "msgspec")
