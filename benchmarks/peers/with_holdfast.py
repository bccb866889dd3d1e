"""Holdfast itself: inline, or with child processes; on Valkey, or on a SQLite file."""

from __future__ import annotations

import os
import sys

from common import FOLDER, URL, VARIANT, Numbers, job, mark, role, serve

from holdfast import Holdfast

PROCESSES = 2

app = Holdfast(f"sqlite:///{FOLDER}/jobs.db" if VARIANT == "sqlite" else URL, namespace="bench")


@app.task(name="nothing")
async def nothing(n: int, pad: str) -> None:
    mark(n)


class Client:
    async def open(self) -> None:
        await app.__aenter__()

    async def enqueue(self, n: int) -> None:
        await nothing.enqueue(**job(n))

    async def bulk(self, numbers: Numbers) -> None:
        await app.enqueue_many(nothing.bind(**job(n)) for n in numbers)

    async def call(self, n: int) -> None:
        await nothing.call(**job(n))


if __name__ == "__main__":
    if role() == "worker":
        how = ["--processes", str(PROCESSES)] if VARIANT == "processes" else ["--inline"]
        command = [sys.executable, "-m", "holdfast", "worker", "with_holdfast:app", "--log-level", "warning", *how]
        os.execv(sys.executable, command)
    serve(Client(), "holdfast", "msgspec", "redis", "hiredis", "uvloop")
