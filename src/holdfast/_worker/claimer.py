"""The claimer of a worker: claims jobs and starts them. `claim_planner.py` decides what to claim.

A hint or a known time wakes it; it also polls once a second, because a hint may be lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from holdfast._core.capacity import NEVER, QueueLoad
from holdfast._core.claim_planner import ClaimOrder, ClaimPlanner
from holdfast._core.events import POLL_INTERVAL_S, Event, EventKind, Topic
from holdfast._core.jobs import Job, Release
from holdfast._core.replies import Claim
from holdfast._core.retry_policy import QueueConfig, admit, fence_of
from holdfast._worker.executor import Run
from holdfast._worker.settler import GIVE_UP_S, TRY_AGAIN_S, PendingSettlement
from holdfast._worker.telemetry import RunEvent
from holdfast.storage.validation import batches

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

log = logging.getLogger("holdfast.worker")


class Claimer:
    """Claims jobs for one worker. It owns the worker's `capacity`, to which the executor reports hosts and runs."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._settings = context.settings
        self._name = context.settings.name
        self.capacity = ClaimPlanner(context.executor.host_capacity, context.settings.concurrency)
        self.capacity.runs_left = context.settings.max_burst_jobs
        self._rng = random.Random()
        self.changed = asyncio.Event()
        """Set when there may be new work or free capacity."""
        self._look_again = False
        """Whether a job was settled since a burst last claimed from all queues: another one may be ready because of it,
        and its hint may come late."""
        self._polling = False
        self._subscribed: set[str] = set()
        """Queues whose hints this worker receives."""
        self._tasks: asyncio.TaskGroup | None = None
        self._going: set[asyncio.Task[None]] = set()

    # Queues

    def serve(self, configs: Iterable[QueueConfig]) -> None:
        """Begin to serve these queues, or serve them with other settings from now on."""
        for config in configs:
            self.capacity.serve(QueueLoad(config.queue, config.size, config.concurrency, config.queue_priority))
            self.capacity.wake(config.queue)
        self._subscribe()

    def settled(self, queue: str) -> None:
        """Jobs of a queue were settled: a burst looks whether one of them is ready again, or whether it is over."""
        if self._settings.burst:
            self.capacity.wake(queue)
            self._look_again = True
            self.changed.set()

    # From start to end

    async def run(self) -> None:
        """Claim jobs until stopped; in a burst, until no job is ready any more."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._subscribe()
            try:
                await self._claim_until_stopped()
            finally:
                self._context.stopping.set()
            claims = {task for task in self._going if task.get_name() == "claim"}
            if claims:  # Their jobs are released. The leases of a claim that has no reply by then expire.
                await asyncio.wait(claims, timeout=GIVE_UP_S)
            for task in self._going:
                task.cancel()

    async def _claim_until_stopped(self) -> None:
        """Start claims, which run concurrently: a slow queue delays no other."""
        loop = asyncio.get_running_loop()
        next_poll_at = NEVER if self._settings.burst else loop.time() + POLL_INTERVAL_S
        while not self._context.stopping.is_set():
            self.changed.clear()
            if loop.time() >= next_poll_at:
                next_poll_at = loop.time() + POLL_INTERVAL_S
                if not self._polling:
                    self._polling = True
                    self._start(self._poll(), "poll")
            now = loop.time()
            self._claim_what_fits(now)
            spent = self.capacity.runs_left == 0
            if self._settings.burst and not self._is_busy() and (spent or self.capacity.idle):
                if spent or not self._look_again:
                    return
                self._look_again = False
                for queue in self.capacity.served:
                    self.capacity.wake(queue)
                continue
            wake_at = min(next_poll_at, self.capacity.next_claim_at(now), now + POLL_INTERVAL_S)
            timer = loop.call_at(wake_at, self.changed.set)  # It costs less than `asyncio.timeout`.
            await self.changed.wait()
            timer.cancel()

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        assert self._tasks is not None
        try:
            task = self._tasks.create_task(coroutine, name=name)
        except RuntimeError:  # The group is ending, and takes no more tasks.
            coroutine.close()
            return
        self._going.add(task)
        task.add_done_callback(self._going.discard)

    def _is_busy(self) -> bool:
        context = self._context
        return bool(context.held or context.settler.busy or context.executor.runs)

    # Claims

    def _claim_what_fits(self, now: float) -> bool:
        """Start claims, each of which sets `changed` at its end. Returns False if none was started."""
        orders = self.capacity.plan(now) if self._context.heartbeat.is_heard else []
        for order in orders:
            self._start(self._claim(order), "claim")
        return bool(orders)

    async def _claim(self, order: ClaimOrder) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            claim = await self._context.storage.claim(
                order.queue, order.limit, worker=self._name, lease_ms=self._settings.lease_ms
            )
        except Exception as error:
            pause = self._rng.uniform(0.5, 1) * POLL_INTERVAL_S
            self.capacity.claimed(order.queue, order.limit, 0, loop.time() + pause)
            self._context.hooks.report_error(error, f"worker {self._name} could not claim from {order.queue}")
        else:
            if claim.jobs:
                self._begin(order.queue, claim.jobs, sent_at)
            late = loop.time() - sent_at > self._settings.lease_ms / 4000
            self.capacity.claimed(order.queue, order.limit, len(claim.jobs), self._claim_at(claim), late=late)
        self.changed.set()

    def _claim_at(self, claim: Claim) -> float:
        """When the next job is due or the next lease expires, as far as is known, on this process's clock."""
        now = asyncio.get_running_loop().time()
        known = [at for at in (claim.next_run_at, claim.next_sweep_at) if at is not None]
        at = now + (min(known) - claim.now) / 1e6 if known else NEVER
        return NEVER if self._settings.burst and at > now else at

    # Runs

    def _begin(self, queue: str, jobs: Sequence[Job], sent_at: float) -> None:
        """Start the jobs of a claim that was sent at `sent_at`, which is when their leases began at the earliest."""
        context = self._context
        config = context.configs.get(queue)
        lease_s = self._settings.lease_ms / 1000
        age_s = asyncio.get_running_loop().time() - sent_at
        is_over = age_s >= lease_s  # The reply took longer than a lease: another worker may have claimed the jobs.
        if config is None or is_over or context.stopping.is_set() or queue not in self.capacity.served:
            for job in jobs:
                self._release(queue, job)
            return
        for job in jobs:
            self._start_run(config, job, sent_at)
        if age_s > lease_s / 4:
            context.heartbeat.nudge()

    def _start_run(self, config: QueueConfig, job: Job, sent_at: float) -> None:
        context, queue = self._context, config.queue
        # A run whose lease was lost may still go on here, and runs of an exclusive job must not overlap.
        if config.policy.exclusive and any((run.queue, run.job.id) == (queue, job.id) for run in context.executor.runs):
            self.capacity.rest(queue, asyncio.get_running_loop().time() + POLL_INTERVAL_S)
            self._release(queue, job)
            return
        refusal = admit(job, config.policy)
        if refusal is not None:
            context.settler.settle(queue, PendingSettlement(job, refusal, config.policy))
            return
        run = Run(config, job, sent_at)
        context.held[run.key] = run
        if self.capacity.runs_left is not None:
            self.capacity.runs_left -= 1
        context.executor.start(run)
        if context.hooks.on_event:
            context.hooks.publish(RunEvent(kind=EventKind.CLAIMED, queue=queue, id=job.id, attempt=job.attempts))

    def _release(self, queue: str, job: Job) -> None:
        self._context.settler.settle(queue, PendingSettlement(job, Release(job.id, fence_of(job))))

    # Hints

    async def _poll(self) -> None:
        """Ask the storage which queues have ready jobs: idle queues, because a hint may be lost, and blocked ones,
        because a host may be kept free for a job that is gone."""
        now = asyncio.get_running_loop().time()
        idle, blocked = self.capacity.idle_queues(now), self.capacity.blocked_queues(now)
        try:
            for queues in batches([*idle, *blocked], lambda queue: 0):
                ready = set(await self._context.storage.ready(queues))
                for queue in queues:
                    if queue in ready:
                        self.capacity.wake(queue)
                    elif queue in blocked:
                        self.capacity.sleep(queue)
        except Exception as error:
            self._context.hooks.report_error(error, f"worker {self._name} could not poll for jobs")
        self._polling = False
        self.changed.set()

    def _subscribe(self) -> None:
        if self._tasks is not None and not self._context.stopping.is_set():
            new = [Topic(queue, "wake") for queue in self.capacity.served if queue not in self._subscribed]
            self._subscribed |= {topic.queue for topic in new}
            for topics in batches(new, lambda topic: 0):
                self._start(self._listen(topics), "listen")
        self.changed.set()

    async def _listen(self, topics: Sequence[Topic]) -> None:
        pause = TRY_AGAIN_S[0]
        while True:
            try:
                async with self._context.storage.subscribe(*topics) as events:
                    pause = TRY_AGAIN_S[0]
                    for topic in topics:  # Hints before the subscription were not received.
                        self.capacity.wake(topic.queue)
                    self.changed.set()
                    events.on_event(self._on_hint)
                    await asyncio.Event().wait()
            except Exception as error:
                log.info("worker %s: subscription failed, polling once a second: %s", self._name, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, TRY_AGAIN_S[1])

    def _on_hint(self, event: Event) -> None:
        """A queue may have work: claim at once."""
        self.capacity.wake(event.queue)
        if not (self._context.stopping.is_set() or self._claim_what_fits(asyncio.get_running_loop().time())):
            self.changed.set()
