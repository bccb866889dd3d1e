"""The worker: feed (plan, claim, hand over), beat (extend, sweep), drain (outcomes become settlements, in batches).

What to claim is decided in fleet.py, what becomes of a run in policy.py; runs go on in inline.py, the beat has a
thread of its own in beat.py. Here is what connects them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Self

import msgspec

from holdfast.beat import Beat
from holdfast.drain import GIVE_UP_S, TRY_AGAIN_S, Drain, Outcome
from holdfast.errors import JobError, OptionError
from holdfast.events import LOOK_EVERY_S, Kind, Topic
from holdfast.exceptions import as_data
from holdfast.execution import Handler, Surroundings, awaited, timed_out
from holdfast.fleet import NEVER, Fleet, Order, Served
from holdfast.inline import Inline, Run
from holdfast.jobs import Claim, Complete, Facts, Fail, Job, Release, Retry, Settled
from holdfast.policy import Ended, Raised, Stopped, TimedOut, admit, decode_error, fence_of, verdict
from holdfast.storage import Storage
from holdfast.storage.checks import batches

log = logging.getLogger("holdfast.worker")


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a job at this worker, once it is stored: `claimed` when a run starts, then `completed`,
    `failed`, `retried`, `timed_out` or `released`."""

    kind: Kind
    queue: str
    id: str
    attempt: int
    seconds: float = 0.0
    """How long the run took."""
    error: JobError | None = None


OnEvent = Callable[[RunEvent], Any]


class Worker:
    """Serves queues until it is stopped: `async with app.worker(): …`, or `await app.worker().run()`.

    Leaving the block stops it: nothing more is claimed, runs may finish within `grace`, the rest is cancelled and goes
    back to its place in the queue, uncounted.
    """

    def __init__(
        self,
        storage: Callable[[], Storage],
        handlers: Iterable[Handler],
        around: Surroundings,
        *,
        opened: AbstractAsyncContextManager[Any],
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        on_event: Sequence[OnEvent] = (),
        name: str | None = None,
        lease_ms: int = 10_000,
        grace_s: float = 25.0,
        concurrency: int | None = None,
        burst: bool = False,
        beats: bool = True,
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._find_storage = storage
        self._handlers = {handler.queue: handler for handler in handlers}
        self._around = around
        self._opened = opened
        self._lifespan = lifespan
        self._on_event = on_event
        self._lease_ms = lease_ms
        self._grace_s = grace_s
        self._burst = burst
        self._beats = beats
        served = [
            Served(handler.queue, handler.size, handler.concurrency, handler.queue_priority)
            for handler in self._handlers.values()
        ]
        self._fleet = Fleet(Inline.capacity, served, most=concurrency)
        self._rng = random.Random()
        self._runs: dict[tuple[str, str, int], Run] = {}
        """What we hold: started, and not yet settled."""
        self._changed = asyncio.Event()
        """Something happened that the feed may want to know."""
        self._stop_asked = asyncio.Event()
        self._quick = asyncio.Event()
        self._looking = False
        self._events: asyncio.Queue[RunEvent | tuple[Exception, str] | None] = asyncio.Queue()
        """For hooks, in order: what happened, and what went wrong."""
        self._beat: Beat | None = None
        self._stack = AsyncExitStack()
        self._main: asyncio.Task[None] | None = None

    @property
    def queues(self) -> list[str]:
        """What it serves."""
        return self._fleet.queues

    @property
    def running(self) -> int:
        """Runs that are going on."""
        return self._fleet.runs

    async def __aenter__(self) -> Self:
        if self._main is not None:
            raise OptionError(f"worker {self.name} has run already: make another with app.worker()")
        for handler in self._handlers.values():
            handler.check()
        try:
            await self._stack.enter_async_context(self._opened)
            self._storage = self._find_storage()
            policies = {queue: handler.policy for queue, handler in self._handlers.items()}
            self._drain = Drain(self._storage, self.name, policies, self._trouble, self._settled, self._drained)
            self._executor = Inline(self._around, ended=self._ended, stuck=self._stuck, reported=self._reported)
            self._stack.callback(self._executor.close)
            if self._lifespan is not None:
                self._executor.resources = await self._stack.enter_async_context(self._lifespan())
        except BaseException:
            await self._stack.aclose()
            raise
        self._main = asyncio.create_task(self._serve(), name=f"holdfast worker {self.name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._main is not None
        self.stop()
        try:
            await asyncio.shield(self._main)
        except asyncio.CancelledError:
            self.stop(quick=True)
            await self._main
            raise
        finally:
            await self._stack.aclose()

    async def run(self) -> None:
        """Serve until `stop()`; in a burst, until nothing is ready any more."""
        async with self:
            assert self._main is not None
            await asyncio.wait([self._main])

    def stop(self, *, quick: bool = False) -> None:
        """Stop serving. `quick` gives runs no more time."""
        self._stop_asked.set()
        self._changed.set()
        if quick:
            self._quick.set()

    async def _serve(self) -> None:
        """Everything that goes on in this worker. Feed and drain end by themselves, so that nothing that was claimed or
        has ended is left lying."""
        log.info("worker %s serves %s", self.name, ", ".join(self.queues))
        beat = self._make_beat() if self._beats else None
        if beat is not None:
            beat.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                listening = [tasks.create_task(self._listen(topics)) for topics in self._topics()]
                drain = tasks.create_task(self._drain.run())
                telling = tasks.create_task(self._tell())
                await self._feed(tasks)
                for task in listening:
                    task.cancel()
                await self._let_runs_end()
                self._drain.end()
                await drain
                self._events.put_nowait(None)
                await asyncio.wait([telling], timeout=GIVE_UP_S)
                if not telling.done():
                    log.error("worker %s gives up on a hook that does not end", self.name)
                    telling.cancel()
        except Exception:
            log.exception("worker %s has broken down: this is a bug in Holdfast", self.name)
            raise
        finally:
            if beat is not None:
                await beat.stop()
            log.info("worker %s has stopped", self.name)

    # Feed

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        """Plan and claim, until stopped. Claims go on side by side: a queue that is slow holds up no other."""
        loop = asyncio.get_running_loop()
        look_at = NEVER if self._burst else loop.time() + LOOK_EVERY_S
        claims: list[asyncio.Task[None]] = []
        while not self._stop_asked.is_set():
            self._changed.clear()
            if loop.time() >= look_at:
                look_at = loop.time() + LOOK_EVERY_S
                if not self._looking:
                    self._looking = True
                    tasks.create_task(self._look_around())
            now = loop.time()
            new = [tasks.create_task(self._claim(order)) for order in self._fleet.plan(now)]
            claims = [claim for claim in claims if not claim.done()] + new
            if self._burst and self._is_idle(now):
                return
            await self._until_changed(min(look_at, self._fleet.next_claim_at(now)) - loop.time())
        if claims:  # What a claim brings now is given back. One that has no answer by then never began, or expires.
            await asyncio.wait(claims, timeout=GIVE_UP_S)
        for claim in claims:
            claim.cancel()

    async def _look_around(self) -> None:
        """Once a second, one look at the queues of which nothing was heard, because a hint may be lost; and at those
        that others are held back for, because their work may be gone."""
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
            self._trouble(error, f"worker {self.name} could not look for work")
        self._looking = False
        self._changed.set()

    async def _claim(self, order: Order) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            claim = await self._storage.claim(order.queue, order.limit, worker=self.name, lease_ms=self._lease_ms)
        except Exception as error:
            pause = self._rng.uniform(0.5, 1) * LOOK_EVERY_S
            self._fleet.claimed(order.queue, order.limit, 0, loop.time() + pause)
            self._trouble(error, f"worker {self.name} could not claim from {order.queue}")
        else:
            self._fleet.claimed(order.queue, order.limit, len(claim.jobs), self._claim_at(claim))
            for job in claim.jobs:
                self._begin(self._handlers[order.queue], job, sent_at)
        self._changed.set()

    def _claim_at(self, claim: Claim) -> float:
        """When there will be work again, as far as is known, or a lease to take back: on this process's clock."""
        now = asyncio.get_running_loop().time()
        at = NEVER if claim.look_at is None else now + (claim.look_at - claim.now) / 1e6
        return NEVER if self._burst and at > now else at

    def _begin(self, handler: Handler, job: Job, sent_at: float) -> None:
        refused = Release(job.id, fence_of(job)) if self._stop_asked.is_set() else admit(job, handler.policy)
        if refused is not None:
            self._drain.put(handler.queue, Outcome(job, refused))
            return
        run = Run(handler, job, sent_at)
        self._runs[run.key] = run
        self._fleet.started(handler.queue)
        self._executor.start(run)
        if self._on_event:
            started = RunEvent(kind=Kind.CLAIMED, queue=handler.queue, id=job.id, attempt=job.attempts)
            self._events.put_nowait(started)

    def _is_idle(self, now: float) -> bool:
        """Nothing runs, nothing is to be settled, and every queue said that it has nothing."""
        if self._fleet.next_claim_at(now) != NEVER:
            return False
        return not (self._runs or self._drain.busy or self._fleet.runs or self._fleet.claiming)

    async def _until_changed(self, seconds: float) -> None:
        """Until something happens: a hint, a run that ended, a stop."""
        try:
            async with asyncio.timeout(min(max(seconds, 0.0), LOOK_EVERY_S)):
                await self._changed.wait()
        except TimeoutError:
            pass  # Time to look.

    def _topics(self) -> Iterator[list[Topic]]:
        return batches([Topic(queue, "wake") for queue in self.queues], lambda topic: 0)

    async def _listen(self, topics: list[Topic]) -> None:
        pause = TRY_AGAIN_S[0]
        while True:
            try:
                async with self._storage.subscribe(*topics) as events:
                    pause = TRY_AGAIN_S[0]
                    for topic in topics:  # What came before we listened was heard by nobody.
                        self._fleet.wake(topic.queue)
                    self._changed.set()
                    async for event in events:
                        self._fleet.wake(event.queue)
                        self._changed.set()
            except Exception as error:
                log.info("worker %s does not hear of new jobs (%s), it looks once a second", self.name, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, TRY_AGAIN_S[1])

    # Runs

    def _ended(self, run: Run, ended: Ended) -> None:
        self._fleet.ended(run.handler.queue, given_up=run.given_up)
        self._changed.set()
        if run.held:
            self._judge(run, ended)

    def _stuck(self, run: Run) -> None:
        """A run that was stopped does not end, and cannot be killed here. Its job goes on elsewhere, unless it must not
        overlap with itself: then it is held for as long as it lasts."""
        why = run.current.stopping
        held = run.handler.policy.exclusive or why in ("cancel", "lease_lost")
        log.warning(
            "job %r of %s does not stop (%s): %s",
            *(run.job.id, run.handler.queue, why),
            "it keeps its lease until it ends" if held else "it is given up, and may overlap with its next run",
        )
        run.given_up = True
        self._fleet.gave_up(run.handler.queue)
        if run.held and not held:
            self._judge(run, TimedOut(timed_out()) if why == "timeout" else Stopped("shutdown"))

    def _judge(self, run: Run, ended: Ended) -> None:
        run.held = False
        try:
            settlement = verdict(run.job, ended, run.handler.policy, self._rng)
        except Exception as error:
            settlement = verdict(run.job, Raised(as_data(error, "permanent")), run.handler.policy, self._rng)
        self._drain.put(run.handler.queue, Outcome(run.job, settlement, run))

    def _reported(self) -> None:
        if self._beat is not None:
            self._beat.nudge()

    async def _let_runs_end(self) -> None:
        """Give runs their grace, then stop them, then give them the time that each has to stop."""
        await self._runs_end_within(self._grace_s, unless=self._quick)
        left = self._executor.runs
        for run in left:
            self._executor.stop(run, "shutdown")
        longest_s = max((run.handler.policy.cancel_grace_ms / 1000 for run in left), default=0.0)
        await self._runs_end_within(longest_s + 0.1)
        for run in self._executor.runs:
            if run.held and not run.handler.policy.exclusive:
                self._judge(run, Stopped("shutdown"))
            elif run.held:
                log.error("job %r of %s still runs: its lease will expire", run.job.id, run.handler.queue)

    async def _runs_end_within(self, seconds: float, unless: asyncio.Event | None = None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._executor.runs and loop.time() < deadline and not (unless and unless.is_set()):
            self._changed.clear()
            await self._until_changed(deadline - loop.time())

    # Beat

    def _make_beat(self) -> Beat:
        self._beat = Beat(
            self._storage.twin,
            worker=self.name,
            lease_ms=self._lease_ms,
            held=lambda: list(self._runs.values()),
            facts=self._facts,
            full=self._fleet.full,
            lost=self._lost,
            cancel=lambda run: self._executor.stop(run, "cancel"),
            kill=lambda run: self._executor.stop(run, "lease_lost"),
            evict=self._evicted,
            trouble=self._beat_trouble,
        )
        return self._beat

    def _lost(self, run: Run) -> None:
        """The lease is not ours any more: the run is stopped, and whatever it gives is of no use."""
        if run.done or run.key not in self._runs:
            return
        log.warning("worker %s lost its lease of job %r in %s", self.name, run.job.id, run.handler.queue)
        run.held = False
        del self._runs[run.key]
        self._executor.stop(run, "lease_lost")

    def _facts(self) -> Facts:
        return {
            "queues": self.queues[:1000],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "executor": "inline",
            "capacity": self._fleet.capacity,
            "used": self._fleet.used,
            "running": self._fleet.runs,
        }

    def _evicted(self) -> None:
        if not self._stop_asked.is_set():
            log.warning("worker %s was evicted: it stops", self.name)
            self.stop()

    def _beat_trouble(self, error: BaseException) -> None:
        log.warning("worker %s could not say that it is alive: %s", self.name, error)

    # What became of it

    def _settled(self, queue: str, outcomes: Sequence[tuple[Outcome, Settled | None]]) -> None:
        """Let the leases go."""
        now = asyncio.get_running_loop().time()
        for outcome, reply in outcomes:
            run = outcome.run
            if run is not None:
                self._runs.pop(run.key, None)
            if reply is Settled.LOST:
                log.warning("job %r of %s is another's: what this run gave is refused", outcome.job.id, queue)
            elif reply is Settled.OK and self._on_event:
                self._events.put_nowait(_event_of(queue, outcome, now - run.started_at if run else 0.0))

    def _drained(self) -> None:
        if self._burst:  # What was left behind may be ready, and hints may come late.
            for queue in self.queues:
                self._fleet.wake(queue)
            self._changed.set()

    def _trouble(self, error: Exception, where: str) -> None:
        self._events.put_nowait((error, where))

    async def _tell(self) -> None:
        """Events to their hooks, in order, apart from feed and drain: a slow hook holds nothing up."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, tuple):
                await self._around.trouble(*event)
                continue
            for hook in self._on_event:
                try:
                    await awaited(hook(event))
                except (Exception, SystemExit) as error:
                    await self._around.trouble(error, f"on_event, for {event.kind} of job {event.id!r:.80}")


def _event_of(queue: str, outcome: Outcome, seconds: float) -> RunEvent:
    kind = Kind.RELEASED
    error: bytes | None = None
    match outcome.settlement:
        case Complete():
            kind = Kind.COMPLETED
        case Fail(error=error):
            kind = Kind.FAILED
        case Retry(error=error, counts=counts):
            kind = Kind.TIMED_OUT if counts == "timeouts" else Kind.RETRIED
        case Release():
            pass
    return RunEvent(
        kind=kind,
        queue=queue,
        id=outcome.job.id,
        attempt=outcome.job.attempts,
        seconds=seconds,
        error=None if error is None else decode_error(error),
    )
