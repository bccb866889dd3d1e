"""Programs that fork: `python -m tests.worker.forking SCENE`. They note what was acknowledged and what they leased.

A process that has nothing to do with them opens and closes the storage in between, as an operator's command does.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any

from holdfast import StorageUnavailable
from tests.worker.scene import make_app, note

JOBS = 20
forked = multiprocessing.get_context("fork")
app = make_app()


def enqueue(name: str) -> None:
    for number in range(JOBS):
        note("acknowledged", job=app.sync.queue("q").enqueue({}, id=f"{name}-{number}").id)


async def enqueue_async(name: str) -> None:
    async with app:
        for number in range(JOBS):
            note("acknowledged", job=(await app.queue("q").enqueue({}, id=f"{name}-{number}")).id)


def enqueue_around_a_visit(name: str, go: Event) -> None:
    """Enqueue, wait until the parent has closed its app, let another process open and close the storage, enqueue."""
    enqueue(f"{name}-early")
    go.wait(20)
    visit()
    asyncio.run(enqueue_async(f"{name}-late"))


def visit() -> None:
    subprocess.run([sys.executable, "-m", "holdfast", "status"], check=True, stdout=subprocess.DEVNULL)


def lease_all(name: str) -> None:
    async def main() -> None:
        async with app:
            while (lease := await app.queue("q").lease(seconds=60, wait=0)) is not None:
                note("leased", job=lease.id)
                await lease.complete()

    asyncio.run(main())


def start(run: Callable[..., None], *arguments: Any, processes: int = 3) -> list[Any]:
    children = [forked.Process(target=run, args=(f"{run.__name__}-{n}", *arguments)) for n in range(processes)]
    for child in children:
        child.start()
    return children


def end(children: list[Any]) -> None:
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * len(children)


def run_async(name: str) -> None:
    asyncio.run(enqueue_async(name))


def made() -> None:
    """The app is made, and not opened, before the fork."""
    end(start(run_async) + start(enqueue))


def opened_blocking() -> None:
    """The parent uses blocking calls, forks, and closes the app while its children use it."""
    enqueue("parent")
    go = forked.Event()
    children = start(enqueue_around_a_visit, go)
    enqueue("parent-meanwhile")
    app.sync.close()
    go.set()
    end(children)


def opened_async() -> None:
    """The parent forks inside `async with app`, and leaves the block while its children use the app."""
    go = forked.Event()

    async def main() -> list[Any]:
        async with app:
            await app.queue("q").enqueue({}, id="parent")
            note("acknowledged", job="parent")
            children = start(enqueue_around_a_visit, go)
            await app.queue("q").enqueue({}, id="parent-meanwhile")
            note("acknowledged", job="parent-meanwhile")
        return children

    children = asyncio.run(main())
    go.set()
    end(children)


def daemon() -> None:
    """The program becomes a daemon after its first blocking call: it forks, and the parent ends."""
    enqueue("parent")
    parent = os.getpid()
    if os.fork():
        sys.exit()
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.01)
    visit()
    enqueue("daemon")
    visit()
    enqueue("daemon-late")
    note("ended")


def consumers() -> None:
    """Forked consumers of one app, which the parent has used."""
    enqueue("parent")
    enqueue("more")
    end(start(lease_all))


def own_connection() -> None:
    """The program has a connection of its own to the SQLite file when it forks."""
    enqueue("parent")
    theirs = sqlite3.connect(os.environ["HOLDFAST_URL"].removeprefix("sqlite:///"))
    theirs.execute("SELECT count(*) FROM holdfast_jobs").fetchone()

    def refused(name: str) -> None:
        try:
            enqueue("child")
        except StorageUnavailable as error:
            note("refused", error=str(error))
        theirs.close()
        enqueue("child-later")

    end(start(refused, processes=1))
    enqueue("parent-later")


@app.task(name="stay")
async def stay() -> None:
    note("stays")
    await asyncio.sleep(60)


async def embed(fork: Callable[[], None]) -> None:
    async with app, app.worker(processes=1):
        await stay.enqueue()
        while not (await app.queue("stay").stats()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        fork()
        note("forked")
        await asyncio.sleep(60)


def embedding() -> None:
    """A program with a worker forks, and waits to be killed."""

    def fork() -> None:
        forked.Process(target=time.sleep, args=(60,)).start()

    asyncio.run(embed(fork))


def embedding_c() -> None:
    """The same with a fork by a C library, which calls no hook of Python."""

    def fork() -> None:
        libc = ctypes.PyDLL(None)
        if libc.fork() == 0:
            libc.sleep(60)
            os._exit(0)

    asyncio.run(embed(fork))


SCENES = (made, opened_blocking, opened_async, daemon, consumers, own_connection, embedding, embedding_c)

if __name__ == "__main__":
    {scene.__name__: scene for scene in SCENES}[sys.argv[1]]()
