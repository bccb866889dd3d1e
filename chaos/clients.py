"""The clients of a run: producers, callers and consumers, as coroutines over an app with the tasks of `tasks.define`.

`python -m chaos.clients produce|call|pull SEED` runs some of them in a process, until the ending file exists or the
process is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from chaos import history
from chaos.history import writer
from chaos.settings import DAY_S, LEASE_S, MIN_BACKOFF_S, RATE, Profile, ending, profile
from holdfast import Holdfast, HoldfastError, Update
from holdfast._client.lease import Lease
from holdfast._client.request import BoundRequest

KEYS = 12
"""Ids of the queues `single` and `unique`."""
PRODUCERS, CALLERS, PULLERS = 3, 6, 3
"""Clients in one process."""
ERRORS = (HoldfastError, OSError)
"""Errors that a fault may cause. The history has them."""


class Client:
    def __init__(self, app: Holdfast[Any], tasks: dict[str, Any], rng: random.Random, profile: Profile) -> None:
        self.app = app
        self.tasks = tasks
        self.rng = rng
        self.profile = profile

    def token(self) -> str:
        return f"{self.rng.getrandbits(48):012x}"

    def payload(self, queue: str) -> dict[str, Any]:
        kinds = self.profile.kinds if queue in ("work", "thread") else self.profile.other_kinds
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "again" and queue != "single":
            kind = "ok"
        payload = {"kind": kind, "token": self.token(), "ms": self.rng.choice((0, 0, 0, 1, 5, 40, 300))}
        return {"key": self.rng.randrange(KEYS), **payload} if queue in ("single", "unique") else payload


class Producer(Client):
    """Enqueues jobs of all queues, some later or twice; updates, cancels, keeps and retries some of them."""

    rate = 200.0
    """Jobs per second."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._recent: deque[tuple[str, str]] = deque(maxlen=200)
        self._has_backlog = False
        self._block_at = time.monotonic() + self.rng.uniform(0, 1) * self.profile.block_every_s

    async def run(self, is_over: Callable[[], bool]) -> None:
        watching = asyncio.create_task(self._watch_backlog())
        try:
            while not is_over():
                began = time.monotonic()
                count = 0
                if not self._has_backlog:
                    try:
                        count = await self.step()
                    except ERRORS:
                        pass  # The history has the error.
                await asyncio.sleep(max(count / self.rate - (time.monotonic() - began), 0.002))
        finally:
            watching.cancel()

    async def _watch_backlog(self) -> None:
        while True:
            try:
                stats = await self.app.stats()
                self._has_backlog = sum(queue.ready for queue in stats.queues) > self.profile.backlog
            except ERRORS:
                pass
            await asyncio.sleep(0.25)

    async def step(self) -> int:
        """Do one random thing. Returns how many jobs it asked for."""
        chance = self.rng.random()
        if time.monotonic() > self._block_at:
            self._block_at = time.monotonic() + self.profile.block_every_s
            await self.app.queue("block").enqueue({"kind": "ok", "token": self.token()}, result_ttl=DAY_S)
        elif chance < 0.06 and self._recent:
            queue, id = self.rng.choice(self._recent)
            await self.app.queue(queue).cancel(id)
        elif chance < 0.12 and self._recent:
            queue, id = self.rng.choice(self._recent)
            run_at: Any = self.rng.choice((True, "if_later", "if_earlier", False))
            update = Update(run_at=run_at, payload=self.rng.random() < 0.8)
            options: Any = {"id": id, "on_conflict": update, "result_ttl": DAY_S, **self._time()}
            await self.app.queue(queue).enqueue(self.payload(queue), **options)
        elif chance < 0.2:
            payload = self.payload("single")
            options = {"id": f"s{payload['key']}", "on_conflict": "update", "result_ttl": DAY_S, **self._time()}
            await self.app.queue("single").enqueue(payload, **options)
        elif chance < 0.24:
            await self.tasks["unique"].enqueue(**self.payload("unique"))
        elif chance < 0.26:
            await self.app.queue("unique").keep(f"u{self.rng.randrange(KEYS)}", 0)
        elif chance < 0.3:
            await self.tasks["once"].enqueue(**self.payload("once"))
        elif chance < 0.32:
            return await self._retry_failed()
        else:
            bounds = [self._bound() for _ in range(self.rng.choice((1, 5, 40)))]
            await self.app.enqueue_many(bounds)
            return len(bounds)
        return 1

    async def _retry_failed(self) -> int:
        queue = self.rng.choice(("work", "plain", "thread"))
        async for job in self.app.queue(queue).jobs("failed"):
            await self.app.queue(queue).retry(job.id)
            return 1
        return 0

    def _time(self) -> dict[str, Any]:
        if self.rng.random() < 0.15:
            return {"delay": self.rng.uniform(0, self.profile.max_delay_s)}
        if self.rng.random() < 0.05:  # A time in the past goes before what is due now.
            return {"run_at": datetime.now(UTC) + timedelta(seconds=self.rng.uniform(-1, self.profile.max_delay_s))}
        return {}

    def _bound(self) -> BoundRequest[Any]:
        queue = self.rng.choices(("work", "plain", "thread", "pulled"), (45, 45, 6, 4))[0]
        payload = self.payload(queue)
        options: dict[str, Any] = {"result_ttl": DAY_S, "priority": self.rng.choice((5, 5, 5, 5, 2, 8))}
        options |= self._time()
        if payload["kind"] in ("sleep", "stubborn"):
            options["timeout"] = 0.15
        if self.rng.random() < 0.1:
            options["id"] = f"n{self.token()}"
            self._recent.append((queue, options["id"]))
        return self.app.queue(queue).bind(payload, **options)


class Caller(Client):
    """Calls tasks and waits for the answers, for a limited time."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await self.step()
            await asyncio.sleep(self.rng.uniform(0, 0.1))

    async def step(self) -> None:
        queue = self.rng.choices(("question", "single", "unique", "once"), (85, 5, 5, 5))[0]
        payload, seconds = self.payload(queue), self.rng.choice((0.2, 1, 3, 6))
        id = {"single": "s", "unique": "u"}.get(queue)
        id = f"q{payload['token']}" if id is None else f"{id}{payload['key']}"
        options: dict[str, Any] = {"id": id}
        if queue == "question" and self.rng.random() < 0.5:
            options["result_ttl"] = 0
        cancels = queue == "question" and self.rng.random() < 0.05
        expected = "None" if payload["kind"] == "nothing" else payload["token"]
        call = writer().number()
        writer().write(
            history.Waiting(
                call=call, queue=queue, id=id, seconds=seconds, expected="" if "key" in payload else expected
            )
        )
        how, answer, message = "answer", "", ""
        try:
            async with asyncio.TaskGroup() as group:
                if cancels:
                    group.create_task(self._cancel(id, self.rng.uniform(0, 0.3)))
                calling = self.tasks[queue].using(wait=seconds, **options).call(**payload)
                answer = str(await calling)
        except* ERRORS as errors:
            error = errors.exceptions[0]
            how, message = type(error).__name__, f"{error}"[:200]
        writer().write(history.Waited(call=call, how=how, answer=answer, message=message))

    async def _cancel(self, id: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            await self.app.queue("question").cancel(id)
        except ERRORS:
            pass


class Puller(Client):
    """Leases jobs of a queue without a task, and does not always settle them in time."""

    lease_s = LEASE_S
    careful = False
    """Settle every lease. Set when the run ends."""

    async def run(self, is_over: Callable[[], bool]) -> None:
        limits: Any = {"max_stalls": 5, "max_retries": 5, "min_backoff": MIN_BACKOFF_S, "max_backoff": 0.5}
        pulled = self.app.queue("pulled", **limits, failure_ttl=DAY_S)
        while not is_over():
            try:
                lease = await pulled.lease(seconds=self.lease_s, wait=0.5)
                if lease is not None:
                    await self._work(lease)
            except (*ERRORS, ValueError):
                await asyncio.sleep(0.05)

    async def _work(self, lease: Lease) -> None:
        kind = lease.payload["kind"]
        if not self.careful and self.rng.random() < 0.1:
            kind = self.rng.choice(("abandon", "late", "release", "delayed retry", "extend"))
        writer().write(
            history.Started(
                queue="pulled",
                id=lease.id,
                generation=lease._job.generation,
                fence=lease.fence,
                attempt=lease.attempt,
                kind=kind,
                token=lease.payload["token"],
            )
        )
        how = "ok"
        try:
            await asyncio.sleep(min(lease.payload["ms"] / 1000, self.lease_s / 2))
            await self._settle(lease, kind)
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            writer().write(history.Ended(queue="pulled", id=lease.id, fence=lease.fence, how=how))

    async def _settle(self, lease: Lease, kind: str) -> None:
        match kind:
            case "abandon":
                return
            case "permanent":
                await lease.fail()
            case "release":
                await lease.release()
            case "throw" | "delayed retry":
                await lease.retry(delay=0.02 if kind == "delayed retry" else None)
            case _:
                if kind == "late":
                    await asyncio.sleep(2 * self.lease_s)
                elif kind == "extend":
                    for _ in range(2):
                        await asyncio.sleep(0.6 * self.lease_s)
                        await lease.extend()
                await lease.complete(lease.payload["token"])


ROLES: dict[str, tuple[type[Producer | Caller | Puller], int]] = {
    "produce": (Producer, PRODUCERS),
    "call": (Caller, CALLERS),
    "pull": (Puller, PULLERS),
}


async def main(role: str, seed: str) -> None:
    from chaos import tasks

    make, count = ROLES[role]
    Producer.rate = float(os.environ[RATE]) / PRODUCERS
    rngs = [random.Random(f"{seed} {number} {os.getpid()}") for number in range(count)]

    def is_over() -> bool:
        return role != "pull" and ending().exists()

    while not is_over():
        try:
            async with tasks.app:
                clients = [make(tasks.app, tasks.tasks, rng, profile()) for rng in rngs]
                await asyncio.gather(*(client.run(is_over) for client in clients))
        except ERRORS:
            await asyncio.sleep(0.1)  # The storage could not be opened.


if __name__ == "__main__":
    asyncio.run(main(*itertools.islice(sys.argv, 1, 3)))
