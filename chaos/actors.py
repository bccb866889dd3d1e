"""Those who ask for jobs, wait for them, change their mind about them, and fetch them by hand:
`python -m chaos.actors produce|call|pull SEED`. They go on until the file that ends the run is there, and are
killed like everybody else.
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
from chaos.history import pen
from chaos.setting import DAY_S, LEASE_S, MILD, RATE, WAYS, ending
from chaos.tasks import app
from holdfast import HoldfastError, Update
from holdfast._client.request import BoundRequest

BACKLOG = 300
"""Jobs that may be ready: with more than that, producers wait."""
SINGLES = 12
BLOCK_EVERY_S = 40
PRODUCERS, CALLERS, PULLERS = 3, 6, 3
"""In one process."""
TROUBLE = (HoldfastError, OSError)

pulled = app.queue("pulled", max_stalls=5, max_retries=5, min_backoff=0.05, max_backoff=0.5, failure_ttl=DAY_S)


class Actor:
    def __init__(self, seed: str) -> None:
        self.rng = random.Random(f"{seed} {os.getpid()}")

    def token(self) -> str:
        return f"{self.rng.getrandbits(48):012x}"

    def payload(self, queue: str) -> dict[str, Any]:
        ways = WAYS if queue in ("work", "thread") else MILD
        kind = self.rng.choices(list(ways), list(ways.values()))[0]
        return {"kind": kind, "token": self.token(), "ms": self.rng.choice((0, 0, 0, 1, 5, 40, 300))}


class Producer(Actor):
    """Asks for all kinds of jobs, some of them later, some twice, and now and then calls one off."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self._recent: deque[tuple[str, str]] = deque(maxlen=200)
        self._full = False
        self._block_at = time.monotonic() + self.rng.uniform(0, BLOCK_EVERY_S)

    async def run(self) -> None:
        rate = float(os.environ[RATE]) / PRODUCERS
        looking = asyncio.create_task(self._look())
        try:
            while not ending().exists():
                began = time.monotonic()
                asked = 0
                if not self._full:
                    try:
                        asked = await self._ask()
                    except TROUBLE:
                        pass  # It is in the history: answered or not.
                await asyncio.sleep(max(asked / rate - (time.monotonic() - began), 0.002))
        finally:
            looking.cancel()

    async def _look(self) -> None:
        while True:
            try:
                stats = await app.stats()
                self._full = sum(queue.ready for queue in stats.queues) > BACKLOG
            except TROUBLE:
                pass
            await asyncio.sleep(0.25)

    async def _ask(self) -> int:
        chance = self.rng.random()
        if time.monotonic() > self._block_at:
            self._block_at = time.monotonic() + BLOCK_EVERY_S
            await app.queue("block").enqueue({"kind": "ok", "token": self.token()}, result_ttl=DAY_S)
            return 1
        if chance < 0.06 and self._recent:
            queue, id = self.rng.choice(self._recent)
            await app.queue(queue).cancel(id)
            return 1
        if chance < 0.12 and self._recent:
            queue, id = self.rng.choice(self._recent)
            update = Update(run_at=self.rng.choice((True, "if_later", "if_earlier", False)))
            await app.queue(queue).enqueue(self.payload(queue), id=id, on_conflict=update, result_ttl=DAY_S)
            return 1
        if chance < 0.2:
            payload = {"key": self.rng.randrange(SINGLES), **self.payload("single")}
            options: Any = {"id": f"s{payload['key']}", "on_conflict": "update", "result_ttl": DAY_S}
            await app.queue("single").enqueue(payload, **options)
            return 1
        bounds = [self._bound() for _ in range(self.rng.choice((1, 5, 40)))]
        await app.enqueue_many(bounds)
        return len(bounds)

    def _bound(self) -> BoundRequest[Any]:
        queue = self.rng.choices(("work", "plain", "thread", "pulled"), (45, 45, 6, 4))[0]
        options: dict[str, Any] = {"result_ttl": DAY_S, "priority": self.rng.choice((5, 5, 5, 5, 2, 8))}
        if self.rng.random() < 0.15:
            options["delay"] = self.rng.uniform(0, 3)
        elif self.rng.random() < 0.05:
            options["run_at"] = datetime.now(UTC) + timedelta(seconds=self.rng.uniform(-1, 2))
        if self.rng.random() < 0.1:
            options["id"] = f"n{self.token()}"
            self._recent.append((queue, options["id"]))
        return app.queue(queue).bind(self.payload(queue), **options)


class Caller(Actor):
    """Asks, and waits for the answer: not for ever."""

    async def run(self) -> None:
        while not ending().exists():
            payload = self.payload("question")
            seconds = self.rng.choice((0.2, 1, 3, 6))
            options: dict[str, Any] = {"id": f"q{payload['token']}"}
            if self.rng.random() < 0.5:
                options["result_ttl"] = 0
            call = pen().number()
            pen().write(
                history.Waiting(
                    call=call, queue="question", id=options["id"], seconds=seconds, expected=payload["token"]
                )
            )
            how, answer, said = "answer", "", ""
            try:
                answer = str(await app.queue("question").call(payload, wait=seconds, **options))
            except TROUBLE as error:
                how, said = type(error).__name__, f"{error}"[:200]
            pen().write(history.Waited(call=call, how=how, answer=answer, said=said))
            await asyncio.sleep(self.rng.uniform(0, 0.1))


class Puller(Actor):
    """Fetches jobs by hand; now and then it forgets about one. Goes on until it is told to go."""

    async def run(self) -> None:
        while True:
            try:
                if self.rng.random() < 0.02:
                    lease = await pulled.lease(seconds=LEASE_S, wait=0.5)
                    if lease is not None:
                        self._note(lease, "abandon")
                    continue
                async with pulled.leased(seconds=LEASE_S, wait=0.5) as lease:
                    if lease is not None:
                        await self._work(lease)
            except (*TROUBLE, ValueError):
                await asyncio.sleep(0.05)

    async def _work(self, lease: Any) -> None:
        kind = lease.payload["kind"]
        self._note(lease, kind)
        how = "ok"
        try:
            await asyncio.sleep(lease.payload["ms"] / 1000)
            if kind == "permanent":
                await lease.fail()
            elif kind == "throw":
                raise ValueError("as asked")
            else:
                await lease.complete(lease.payload["token"])
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            pen().write(history.Ended(queue="pulled", id=lease.id, fence=lease.fence, how=how))

    def _note(self, lease: Any, kind: str) -> None:
        pen().write(
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


ROLES: dict[str, tuple[Callable[[str], Any], int]] = {
    "produce": (Producer, PRODUCERS),
    "call": (Caller, CALLERS),
    "pull": (Puller, PULLERS),
}


async def main(role: str, seed: str) -> None:
    make, count = ROLES[role]
    while role == "pull" or not ending().exists():
        try:
            async with app:
                await asyncio.gather(*(make(f"{seed} {number}").run() for number in range(count)))
        except TROUBLE:
            await asyncio.sleep(0.1)  # The storage was away as it was opened.


if __name__ == "__main__":
    asyncio.run(main(*itertools.islice(sys.argv, 1, 3)))
