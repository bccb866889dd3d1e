"""The claimer of a worker: plans, claims, and hands jobs over. `claim_planner.py` decides what to claim.

A hint or a known time wakes it; once a second it polls anyway, because a hint may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast._core.capacity import NEVER, Capacity, QueueLoad
from holdfast._core.claim_planner import ClaimOrder, ClaimPlanner
from holdfast._core.events import POLL_INTERVAL_S, Event, Topic
from holdfast._core.replies import Claim
from holdfast._worker.settler import GIVE_UP_S, TRY_AGAIN_S
from holdfast.storage.validation import batches

if TYPE_CHECKING:
    from holdfast._worker.context import WorkerContext

log = logging.getLogger("holdfast.worker")


class Claimer:
    """Claims jobs for one worker, as many as fit. It owns the worker's `Capacity`: everything about queues goes
    through this object, and the executor reports hosts and runs to `capacity`."""

    def __init__(self, context: WorkerContext) -> None:
        settings = context.settings
        self._context = context
        self._worker = settings.name
        self._lease_ms = settings.lease_ms
        self._burst = settings.burst
        self.capacity = Capacity(context.executor.host_capacity, max_runs=settings.concurrency, hosts=())
        self._planner = ClaimPlanner(self.capacity)
        self._rng = random.Random()
        self._changed = asyncio.Event()
        """Set when there may be work or free capacity."""
        self._stopped = False
        self._polling = False
        self._subscribed: set[str] = set()
        """Queues whose hints are received."""
        self._tasks: asyncio.TaskGroup | None = None
        self._going: set[asyncio.Task[None]] = set()

    # Queues

    @property
    def queues(self) -> list[str]:
        """The queues that are served."""
        return list(self.capacity.served)

    def serves(self, queue: str) -> bool:
        """Is this queue served?"""
        return queue in self.capacity.served

    def serve(self, loads: Iterable[QueueLoad]) -> None:
        """Begin to serve these queues, or serve them with other settings from now on."""
        for load in loads:
            self.capacity.serve(load)
            self._planner.wake(load.queue)
        self._subscribe()

    def leave(self, queue: str) -> None:
        """Claim nothing more from a queue."""
        self.capacity.leave(queue)

    def rest(self, queue: str, seconds: float) -> None:
        """Claim nothing from a queue for this long: its jobs were given back, and would be again."""
        self._planner.rest(queue, asyncio.get_running_loop().time() + seconds)

    def wake_all(self) -> None:
        """Every queue may have work."""
        for queue in self.capacity.served:
            self._planner.wake(queue)

    def full_queues(self) -> list[str]:
        """Queues of which no further job fits."""
        return self._planner.full_queues()

    # From start to end

    def changed(self) -> None:
        """There may be work, or free capacity: plan again."""
        self._changed.set()

    def stop(self) -> None:
        """Claim nothing more."""
        self._stopped = True
        self._changed.set()

    async def run(self) -> None:
        """Plan and claim, until stopped; in a burst, until nothing is ready any more."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._subscribe()
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
        """Claims go on side by side: a queue that is slow delays no other."""
        loop = asyncio.get_running_loop()
        next_poll_at = NEVER if self._burst else loop.time() + POLL_INTERVAL_S
        while not self._stopped:
            self._changed.clear()
            if loop.time() >= next_poll_at:
                next_poll_at = loop.time() + POLL_INTERVAL_S
                if not self._polling:
                    self._polling = True
                    self._start(self._poll(), "poll")
            now = loop.time()
            self._claim_what_fits(now)
            if self._burst and self._is_idle():
                return
            await self._until_changed(min(next_poll_at, self._planner.next_claim_at(now)) - loop.time())

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        assert self._tasks is not None
        try:
            task = self._tasks.create_task(coroutine, name=name)
        except RuntimeError:  # The group is ending, and takes no more.
            coroutine.close()
            return
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    def _is_idle(self) -> bool:
        """Every queue answered that it has no work, and nothing goes on."""
        return self._planner.idle and not (self._planner.claiming or self._context.busy)

    async def _until_changed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), POLL_INTERVAL_S)):
                await self._changed.wait()
        except TimeoutError:
            pass  # Time to plan again.

    # Claims

    def _claim_what_fits(self, now: float) -> None:
        for order in self._planner.plan(now) if self._context.heartbeat.is_heard else ():
            self._start(self._claim(order), "claim")

    async def _claim(self, order: ClaimOrder) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            claim = await self._context.storage.claim(
                order.queue, order.limit, worker=self._worker, lease_ms=self._lease_ms
            )
        except Exception as error:
            pause = self._rng.uniform(0.5, 1) * POLL_INTERVAL_S
            self._planner.claimed(order.queue, order.limit, 0, loop.time() + pause)
            self._context.hooks.report_error(error, f"worker {self._worker} could not claim from {order.queue}")
        else:
            if claim.jobs:
                self._context.begin(order.queue, claim.jobs, sent_at)
            self._planner.claimed(order.queue, order.limit, len(claim.jobs), self._claim_at(claim))
        self._changed.set()

    def _claim_at(self, claim: Claim) -> float:
        """When there will be work again, as far as is known, or a lease to take back: on this process's clock."""
        now = asyncio.get_running_loop().time()
        known = [at for at in (claim.next_run_at, claim.next_sweep_at) if at is not None]
        at = now + (min(known) - claim.now) / 1e6 if known else NEVER
        return NEVER if self._burst and at > now else at

    # Hints

    async def _poll(self) -> None:
        """Ask the storage about idle queues, because a hint may be lost; and about blocked ones, because a host may be
        kept free for work that is gone."""
        now = asyncio.get_running_loop().time()
        idle, blocked = self._planner.idle_queues(now), self._planner.blocked_queues(now)
        try:
            for queues in batches([*idle, *blocked], lambda queue: 0):
                ready = set(await self._context.storage.ready(queues))
                for queue in queues:
                    if queue in ready:
                        self._planner.wake(queue)
                    elif queue in blocked:
                        self._planner.sleep(queue)
        except Exception as error:
            self._context.hooks.report_error(error, f"worker {self._worker} could not look for work")
        self._polling = False
        self._changed.set()

    def _subscribe(self) -> None:
        """Receive the hints of every queue that is served."""
        if self._tasks is not None and not self._stopped:
            new = [Topic(queue, "wake") for queue in self.capacity.served if queue not in self._subscribed]
            self._subscribed |= {topic.queue for topic in new}
            for topics in batches(new, lambda topic: 0):
                self._start(self._listen(topics), "listen")
        self._changed.set()

    async def _listen(self, topics: Sequence[Topic]) -> None:
        pause = TRY_AGAIN_S[0]
        while True:
            try:
                async with self._context.storage.subscribe(*topics) as events:
                    pause = TRY_AGAIN_S[0]
                    for topic in topics:  # Hints of earlier jobs were not received.
                        self._planner.wake(topic.queue)
                    self._changed.set()
                    events.on_event(self._on_hint)
                    await asyncio.Event().wait()
            except Exception as error:
                log.info("worker %s does not hear of new jobs (%s), it looks once a second", self._worker, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, TRY_AGAIN_S[1])

    def _on_hint(self, event: Event) -> None:
        """A queue may have work: claim at once, whatever else is to be done."""
        self._planner.wake(event.queue)
        if not self._stopped:
            self._claim_what_fits(asyncio.get_running_loop().time())
        self._changed.set()
