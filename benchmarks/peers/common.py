"""What the Python adapters share: marks, and the loops that are the same for all. Standard library only, since it runs
in the virtual environment of whichever system is measured.

An adapter is a program with one argument, its role. As `worker` it becomes the system's worker, until it is killed; its
handler does nothing but `mark(n)`. As `client` it reads requests from stdin and answers on stdout, one line of JSON
each: `serve` does that, given an object with the system's own verbs. `common.mjs` is the same for Node.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import mmap
import os
import random
import resource
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

URL = os.environ.get("BENCH_URL", "")
FOLDER = os.environ.get("BENCH_FOLDER", ".")
VARIANT = os.environ.get("BENCH_VARIANT", "")

ROOMS = 1 << 21
"""How many marks a process can make: the file is sparse, so what is not used costs nothing."""
AT_ONCE = 100
BULK = 1_000
POLL_S = 0.005
"""How often a client looks for its result where the system has nothing better than looking."""
PAUSE_S = (0.02, 0.06)
"""Between two jobs for an idle worker: it has to be idle again, and not in step with anything that polls."""
MARK = struct.Struct("qq")
"""Native, so that each number is written in one piece: a reader never sees half a time."""
PAD = "x" * 64

Numbers = Iterable[int]


def job(n: int) -> dict[str, Any]:
    """The payload of every job of every system."""
    return {"n": n, "pad": PAD}


def _marks() -> Callable[[int], None]:
    """Each process writes into its own file: number and time of each job that has begun. Memory that is mapped,
    rather than a write for each: the cost of a mark must not be a part of what is measured."""
    descriptor = os.open(os.path.join(FOLDER, f"marks-{os.getpid()}"), os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, ROOMS * MARK.size)
    room = mmap.mmap(descriptor, ROOMS * MARK.size)
    os.close(descriptor)
    places = itertools.count(0, MARK.size)  # its next is one step, for threads as well
    write, clock = MARK.pack_into, time.monotonic_ns

    def made(n: int) -> None:
        write(room, next(places), n, clock())

    return made


_made: Callable[[int], None] | None = None
_lock = threading.Lock()


def mark(n: int) -> None:
    """Job n runs now."""
    global _made
    if _made is None:
        with _lock:
            _made = _made or _marks()
    _made(n)


def _forget_marks() -> None:
    """In a child that was forked, perhaps while a thread of its parent held the lock."""
    global _made, _lock
    _made, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_marks)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of Python, and of those packages that are there: some are used only if they are."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def chunks(numbers: range, size: int) -> Iterator[range]:
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]


def role() -> str:
    return sys.argv[1]


async def at_once(step: Callable[[int], Awaitable[object]], numbers: Numbers) -> None:
    """The step for every number, by a hundred at a time."""
    left = iter(numbers)

    async def one_of_many() -> None:
        for n in left:
            await step(n)

    await asyncio.gather(*(one_of_many() for _ in range(AT_ONCE)))


def serve(client: Any, *packages: str) -> None:
    """Answer requests with the client's verbs until stdin ends; and first of all, which packages these are.

    A client has `enqueue(n)`, and may have `bulk(numbers)`, a thousand at a time, and `call(n)`, all three async; or,
    if it is a blocking one, `enqueue(n)`, `bulk(numbers)`, and `result(handle)` for what `enqueue` returned.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of a library is not an answer
    asyncio.run(_serve(client, answers, versions(packages)))


async def _serve(client: Any, answers: Any, known: dict[str, str]) -> None:
    if hasattr(client, "open"):
        await client.open()
    is_async = inspect.iscoroutinefunction(client.enqueue)
    verbs = {
        "enqueue": _enqueue if is_async else _enqueue_blocking,
        "bulk": _bulk if is_async else _bulk_blocking,
        "call": _call if is_async else _call_blocking,
        "calls": _calls if is_async else _calls_blocking,
        "pickup": _pickup if is_async else _pickup_blocking,
    }
    can = {
        "enqueue": True,
        "bulk": "in bulk" if hasattr(client, "bulk") else f"{AT_ONCE} at once" if is_async else "one at a time",
        "call": hasattr(client, "call") or hasattr(client, "result"),
    }
    print(json.dumps({"versions": known, "can": can}), file=answers)
    while line := await asyncio.to_thread(sys.stdin.readline):
        ask = json.loads(line)
        numbers = range(ask["first"], ask["first"] + ask["count"])
        began, cpu = time.perf_counter(), cpu_s()
        done = verbs[ask["do"]](client, numbers)
        extra = await done if inspect.isawaitable(done) else done
        spent = {"seconds": time.perf_counter() - began, "cpu_s": cpu_s() - cpu}
        print(json.dumps(spent | (extra or {})), file=answers)


async def _enqueue(client: Any, numbers: range) -> None:
    for n in numbers:
        await client.enqueue(n)


def _enqueue_blocking(client: Any, numbers: range) -> None:
    for n in numbers:
        client.enqueue(n)


async def _bulk(client: Any, numbers: range) -> None:
    if not hasattr(client, "bulk"):
        return await at_once(client.enqueue, numbers)
    for part in chunks(numbers, BULK):
        await client.bulk(part)
    return None


def _bulk_blocking(client: Any, numbers: range) -> None:
    if not hasattr(client, "bulk"):
        return _enqueue_blocking(client, numbers)
    for part in chunks(numbers, BULK):
        client.bulk(part)
    return None


async def _call(client: Any, numbers: range) -> dict[str, list[float]]:
    times = []
    for n in numbers:
        began = time.perf_counter()
        await client.call(n)
        times.append(time.perf_counter() - began)
    return {"times": times}


def _call_blocking(client: Any, numbers: range) -> dict[str, list[float]]:
    times = []
    for n in numbers:
        began = time.perf_counter()
        client.result(client.enqueue(n))
        times.append(time.perf_counter() - began)
    return {"times": times}


async def _calls(client: Any, numbers: range) -> None:
    await at_once(client.call, numbers)


def _calls_blocking(client: Any, numbers: range) -> None:
    """A hundred are under way at any time; the oldest is waited for."""
    under_way: list[Any] = []
    for n in numbers:
        under_way.append(client.enqueue(n))
        if len(under_way) == AT_ONCE:
            client.result(under_way.pop(0))
    for handle in under_way:
        client.result(handle)


async def _pickup(client: Any, numbers: range) -> dict[str, list[int]]:
    asked = []
    for n in numbers:
        await asyncio.sleep(random.uniform(*PAUSE_S))
        asked.append(time.monotonic_ns())
        await client.enqueue(n)
    return {"asked": asked}


def _pickup_blocking(client: Any, numbers: range) -> dict[str, list[int]]:
    asked = []
    for n in numbers:
        time.sleep(random.uniform(*PAUSE_S))
        asked.append(time.monotonic_ns())
        client.enqueue(n)
    return {"asked": asked}
