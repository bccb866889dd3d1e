"""The feed of a worker: plan, claim, hand over. What to claim is decided in capacity.py.

A hint or a known time wakes it; once a second it looks anyway, because a hint may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from holdfast._core.capacity import NEVER, Capacity, ClaimOrder
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.jobs import Job
from holdfast._core.replies import Claim
from holdfast._worker.settler import GIVE_UP_S, TRY_AGAIN_S
from holdfast.storage import Storage
from holdfast.storage.validation import batches

log = logging.getLogger("holdfast.worker")


class Claimer:
    """Claims jobs for one worker, as many as it has room for. `begin` gets them, with the time their claim was sent."""

    def __init__(
        self,
        storage: Storage,
        fleet: Capacity,
        *,
        worker: str,
        lease_ms: int,
        burst: bool,
        begin: Callable[[str, Sequence[Job], float], None],
        busy: Callable[[], bool],
        is_heard: Callable[[], bool],
        report_error: Callable[[Exception, str], None],
    ) -> None:
        self._storage = storage
        self._fleet = fleet
        self._worker = worker
        self._lease_ms = lease_ms
        self._burst = burst
        self._begin = begin
        self._busy = busy
        self._is_heard = is_heard
        self._report_error = report_error
        self._rng = random.Random()
        self._changed = asyncio.Event()
        """Something happened that we may want to know."""
        self._stopped = False
        self._looking = False
        self._heard: set[str] = set()
        """Queues that are listened to."""
        self._tasks: asyncio.TaskGroup | None = None
        self._going: set[asyncio.Task[None]] = set()

    def changed(self) -> None:
        """There may be work, or room."""
        self._changed.set()

    def stop(self) -> None:
        """Claim nothing more."""
        self._stopped = True
        self._changed.set()

    def hear(self, queues: Iterable[str]) -> None:
        """Listen to these queues, too."""
        if self._tasks is not None and not self._stopped:
            new = [Topic(queue, "wake") for queue in queues if queue not in self._heard]
            self._heard |= {topic.queue for topic in new}
            for topics in batches(new, lambda topic: 0):
                self._go(self._listen(topics), "listen")
        self._changed.set()

    async def run(self) -> None:
        """Plan and claim, until stopped; in a burst, until nothing is ready any more."""
        async with asyncio.TaskGroup() as self._tasks:
            self.hear(self._fleet.queues)
            try:
                await self._claim_until_stopped()
            finally:
                self._stopped = True
            claims = {task for task in self._going if task.get_name() == "claim"}
            if claims:  # What a claim brings now is given back. One that has no answer by then never began, or expires.
                await asyncio.wait(claims, timeout=GIVE_UP_S)
            for task in self._going:
                task.cancel()

    async def _claim_until_stopped(self) -> None:
        """Claims go on side by side: a queue that is slow holds up no other."""
        loop = asyncio.get_running_loop()
        next_poll_at = NEVER if self._burst else loop.time() + POLL_INTERVAL_S
        while not self._stopped:
            self._changed.clear()
            if loop.time() >= next_poll_at:
                next_poll_at = loop.time() + POLL_INTERVAL_S
                if not self._looking:
                    self._looking = True
                    self._go(self._look_around(), "look")
            now = loop.time()
            self._claim_what_fits(now)
            if self._burst and self._is_idle():
                return
            await self._until_changed(min(next_poll_at, self._fleet.next_claim_at(now)) - loop.time())

    def _claim_what_fits(self, now: float) -> None:
        for order in self._fleet.plan(now) if self._is_heard() else ():
            self._go(self._claim(order), "claim")

    def _go(self, steps: Coroutine[Any, Any, None], name: str) -> None:
        assert self._tasks is not None
        try:
            task = self._tasks.create_task(steps, name=name)
        except RuntimeError:  # The group is ending, and takes no more.
            steps.close()
            return
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    def _is_idle(self) -> bool:
        """Every queue said that it has nothing, and nothing goes on."""
        return self._fleet.idle and not (self._fleet.claiming or self._busy())

    async def _until_changed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), POLL_INTERVAL_S)):
                await self._changed.wait()
        except TimeoutError:
            pass  # Time to look.

    async def _look_around(self) -> None:
        """One look at the queues of which nothing was heard, because a hint may be lost; and at those that others are
        held back for, because their work may be gone."""
        now = asyncio.get_running_loop().time()
        asleep, crowded = self._fleet.asleep(now), self._fleet.crowded(now)
        try:
            for queues in batches([*asleep, *crowded], lambda queue: 0):
                ready = set(await self._storage.ready(queues))
                for queue in queues:
                    if queue in ready:
                        self._fleet.wake(queue)
                    elif queue in crowded:
                        self._fleet.sleep(queue)
        except Exception as error:
            self._report_error(error, f"worker {self._worker} could not look for work")
        self._looking = False
        self._changed.set()

    async def _claim(self, order: ClaimOrder) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            claim = await self._storage.claim(order.queue, order.limit, worker=self._worker, lease_ms=self._lease_ms)
        except Exception as error:
            pause = self._rng.uniform(0.5, 1) * POLL_INTERVAL_S
            self._fleet.claimed(order.queue, order.limit, 0, loop.time() + pause)
            self._report_error(error, f"worker {self._worker} could not claim from {order.queue}")
        else:
            if claim.jobs:
                self._begin(order.queue, claim.jobs, sent_at)
            self._fleet.claimed(order.queue, order.limit, len(claim.jobs), self._claim_at(claim))
        self._changed.set()

    def _claim_at(self, claim: Claim) -> float:
        """When there will be work again, as far as is known, or a lease to take back: on this process's clock."""
        now = asyncio.get_running_loop().time()
        at = NEVER if claim.next_poll_at is None else now + (claim.next_poll_at - claim.now) / 1e6
        return NEVER if self._burst and at > now else at

    def _hear(self, event: Event) -> None:
        """There may be work: ask for it at once, whatever else is to be done."""
        self._fleet.wake(event.queue)
        if not self._stopped:
            self._claim_what_fits(asyncio.get_running_loop().time())
        self._changed.set()

    async def _listen(self, topics: Sequence[Topic]) -> None:
        pause = TRY_AGAIN_S[0]
        while True:
            try:
                async with self._storage.subscribe(*topics) as events:
                    pause = TRY_AGAIN_S[0]
                    for topic in topics:  # What came before we listened was heard by nobody.
                        self._fleet.wake(topic.queue)
                    self._changed.set()
                    events.on_event(self._hear)
                    await asyncio.Event().wait()
            except Exception as error:
                log.info("worker %s does not hear of new jobs (%s), it looks once a second", self._worker, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, TRY_AGAIN_S[1])
