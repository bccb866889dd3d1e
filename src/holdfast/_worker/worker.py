"""The worker: claimer (plan, claim, hand over), heartbeat (extend, sweep), settler (settle outcomes in batches).

capacity.py decides what to claim, retry_policy.py what becomes of a run. Runs go on in an executor: inline.py, or the
processes of pool.py. This module connects them.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Self

from holdfast._core.capacity import Capacity, QueueLoad
from holdfast._core.events import POLL_INTERVAL_S, EventKind
from holdfast._core.failure import error_from_exception
from holdfast._core.jobs import Complete, Job, Release
from holdfast._core.replies import SettleResult, WorkerFacts
from holdfast._core.retry_policy import Ended, Policy, QueueConfig, Raised, Stopped, TimedOut, admit, fence_of, verdict
from holdfast._worker.claimer import Claimer
from holdfast._worker.executor import Executor, Listener, OnEvent, Run, RunEvent
from holdfast._worker.handler import timed_out
from holdfast._worker.heartbeat import Heartbeat
from holdfast._worker.hooks import ErrorReporter, HookDispatcher
from holdfast._worker.reports import event_of, facts_of, jobs_log, log_event
from holdfast._worker.settler import GIVE_UP_S, PendingSettlement, Settler
from holdfast.errors import OptionError
from holdfast.storage import Storage
from holdfast.storage.validation import FAILED_SUFFIX

log = logging.getLogger("holdfast.worker")

QUICK_S = 1.0
"""The most that a run gets to end when a stop is to be quick."""


class Worker:
    """Serves queues until it is stopped: `async with app.worker(): …`, or `await app.worker().run()`.

    Leaving the block stops it: nothing more is claimed, runs may finish within `grace`, the rest is stopped and goes
    back to its place in the queue, uncounted.
    """

    def __init__(
        self,
        executor: Executor,
        storage: Callable[[], AbstractAsyncContextManager[Storage]],
        *,
        queues: Sequence[str] | None,
        report_error: ErrorReporter,
        on_event: Sequence[OnEvent] = (),
        name: str,
        lease_ms: int = 10_000,
        grace_s: float = 25.0,
        concurrency: int | None = None,
        burst: bool = False,
        beats: bool = True,
    ) -> None:
        self.name = name
        self._executor = executor
        self._open_storage = storage
        self._patterns = queues
        self._lease_ms = lease_ms
        self._grace_s = grace_s
        self._burst = burst
        self._beats = beats
        self._teller = HookDispatcher(on_event, report_error)
        self._rng = random.Random()
        self._configs: dict[str, QueueConfig] = {}
        """What can be served, by queue."""
        self._policies: dict[str, Policy] = {}
        self._fleet = Capacity(executor.room_capacity, most=concurrency, rooms=())
        self._feed: Claimer | None = None
        self._runs: dict[tuple[str, str, int], Run] = {}
        """What we hold: claimed, and not yet settled."""
        self._ended_one = asyncio.Event()
        self._broken: asyncio.Future[None]
        self._stop_asked = asyncio.Event()
        self._quick = asyncio.Event()
        self._beat: Heartbeat | None = None
        self._stack = AsyncExitStack()
        self._main: asyncio.Task[None] | None = None
        self._entered = False
        if executor.config:
            self.reload_tasks()

    @property
    def started(self) -> bool:
        """It has begun to serve, and may have ended since."""
        return self._main is not None

    @property
    def queues(self) -> list[str]:
        """What it serves."""
        return self._fleet.queues

    @property
    def running(self) -> int:
        """Runs that are going on."""
        return self._fleet.runs

    # From start to end

    async def __aenter__(self) -> Self:
        if self._entered:
            raise OptionError(f"worker {self.name} was started already: make another with app.worker()")
        self._entered = True
        try:
            to = Listener(self._ended, self._stuck, self._beat_soon, self._changed)
            await self._executor.open(self._fleet, to)
            self._stack.push_async_callback(self._executor.close)
            self._storage = await self._stack.enter_async_context(self._open_storage())
            feed = self._connect()
        except BaseException:
            await self._stack.aclose()
            raise
        self._main = asyncio.create_task(self._serve(feed), name=f"holdfast worker {self.name}")
        return self

    def _connect(self) -> Claimer:
        """Put the parts together, now that it is known what can be run."""
        self._teller.hooks += self._executor.hooks
        self._feed = feed = Claimer(
            self._storage,
            self._fleet,
            worker=self.name,
            lease_ms=self._lease_ms,
            burst=self._burst,
            begin=self._begin,
            busy=lambda: bool(self._runs or self._drain.busy or self._executor.runs),
            is_heard=lambda: self._beat is None or self._beat.is_heard,
            report_error=self._teller.report_error,
        )
        self._drain = Settler(
            self._storage, self.name, self._policies, self._teller.report_error, self._settled, self._drained
        )
        self.reload_tasks()
        return feed

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
        """Stop serving. `quick` gives runs hardly any more time."""
        self._stop_asked.set()
        if quick:
            self._quick.set()
            self._ended_one.set()
        if self._feed is not None:
            self._feed.stop()

    async def _serve(self, feed: Claimer) -> None:
        """Everything that goes on in this worker. Feed and drain end by themselves, so that nothing that was claimed or
        has ended is left lying."""
        log.info("worker %s serves %s", self.name, ", ".join(self.queues))
        self._broken = asyncio.get_running_loop().create_future()
        beat = self._make_beat() if self._beats else None
        if beat is not None:
            beat.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                drain = tasks.create_task(self._drain.run())
                telling = tasks.create_task(self._teller.run())
                watching = tasks.create_task(self._watch())
                if self._stop_asked.is_set():
                    feed.stop()
                await feed.run()
                self._stop_asked.set()
                self._executor.wind_down()
                await self._let_runs_end(self._executor.runs, self._grace_s)
                self._drain.end()
                await drain
                await self._teller.end(telling, GIVE_UP_S)
                watching.cancel()
        except Exception:
            log.exception("worker %s has broken down: this is a bug in Holdfast", self.name)
            raise
        finally:
            if beat is not None:
                await beat.stop()
            log.info("worker %s has stopped", self.name)

    # Queues

    def reload_tasks(self) -> None:
        """Serve what the executor runs now, on its terms: at the start, and after code was loaded anew. What it cannot
        run any more is left, even if nothing remains."""
        before, self._configs = self._configs, {config.queue: config for config in self._executor.config}
        for queue in set(self.queues) - set(self._configs):
            self._fleet.leave(queue)
        chosen = choose(self._configs, self._patterns)
        for queue in set(before) & set(self.queues) - set(chosen):
            self._fleet.leave(queue)
        self._serve_these(queue for queue in chosen if queue not in before or self._fleet.serves(queue))

    def serve(self, queues: str | Iterable[str]) -> list[str]:
        """Begin to serve these queues as well, by name or pattern. What is served then."""
        self._serve_these(choose(self._configs, queues))
        return self.queues

    async def stop_serving(self, queues: str | Iterable[str], *, grace: float | None = None) -> None:
        """Claim nothing more from these queues. Their runs may finish within `grace` seconds, the worker's own unless
        given; the rest is stopped and goes back uncounted. Returns when they are over."""
        names = set(choose(self._configs, queues))
        for queue in names:
            self._fleet.leave(queue)
        runs = [run for run in self._executor.runs if run.queue in names]
        await self._let_runs_end(runs, self._grace_s if grace is None else grace)
        await self._drain.settled(names)

    def _serve_these(self, queues: Iterable[str]) -> None:
        for queue in queues:
            config = self._configs[queue]
            self._policies[queue] = config.policy
            self._fleet.serve(QueueLoad(queue, config.size, config.concurrency, config.queue_priority))
            self._fleet.wake(queue)
        if self._feed is not None:
            self._feed.hear(self._fleet.queues)

    # Runs

    def _begin(self, queue: str, jobs: Sequence[Job], sent_at: float) -> None:
        """Jobs were claimed, by a call that was sent then. As far as we know, their leases are as old as that."""
        config = self._configs.get(queue)
        age_s = asyncio.get_running_loop().time() - sent_at
        is_over = age_s >= self._lease_ms / 1000  # The answer was so long on its way that another may have the jobs.
        if config is None or is_over or self._stop_asked.is_set() or not self._fleet.serves(queue):
            for job in jobs:
                self._drain.put(queue, PendingSettlement(job, Release(job.id, fence_of(job))))
            return
        for job in jobs:
            self._start(config, job, sent_at)
        if age_s > self._lease_ms / 4000:
            self._beat_soon()

    def _start(self, config: QueueConfig, job: Job, sent_at: float) -> None:
        if config.policy.exclusive and self._still_runs(config.queue, job):
            self._fleet.rest(config.queue, asyncio.get_running_loop().time() + POLL_INTERVAL_S)
            self._drain.put(config.queue, PendingSettlement(job, Release(job.id, fence_of(job))))
            return
        refused = admit(job, config.policy)
        if refused is not None:
            self._drain.put(config.queue, PendingSettlement(job, refused))
            return
        run = Run(config, job, sent_at)
        self._runs[run.key] = run
        self._executor.start(run)
        if self._teller.hooks:
            self._teller.event(RunEvent(kind=EventKind.CLAIMED, queue=config.queue, id=job.id, attempt=job.attempts))

    def _still_runs(self, queue: str, job: Job) -> bool:
        """Does an earlier run of the same job go on here, whose lease was lost? It must not overlap with the next."""
        return any(run.queue == queue and run.job.id == job.id for run in self._executor.runs)

    def _ended(self, run: Run, ended: Ended) -> None:
        self._ended_one.set()
        self._changed()
        if run.held:
            self._judge(run, ended)

    def _stuck(self, run: Run) -> None:
        """A run that was stopped does not end, and cannot be killed here. Its job goes on elsewhere, unless it must not
        overlap with itself: then it is held for as long as it lasts."""
        why = run.stopping
        held = run.config.policy.exclusive or why in ("cancel", "lease_lost")
        log.warning(
            "job %r of %s does not stop (%s): %s",
            *(run.job.id, run.queue, why),
            "it keeps its lease until it ends" if held else "it is given up, and may overlap with its next run",
        )
        if run.held and not held:
            self._judge(run, TimedOut(timed_out()) if why == "timeout" else Stopped("shutdown"))

    def _judge(self, run: Run, ended: Ended) -> None:
        run.held = False
        policy = run.config.policy
        try:
            settlement = verdict(run.job, ended, policy, self._rng)
        except Exception as error:
            settlement = verdict(run.job, Raised(error_from_exception(error, "permanent")), policy, self._rng)
        self._drain.put(run.queue, PendingSettlement(run.job, settlement, run))

    def _beat_soon(self) -> None:
        if self._beat is not None:
            self._beat.nudge()

    async def _let_runs_end(self, runs: Sequence[Run], grace_s: float) -> None:
        """Give runs their grace, then stop them, then give them the time that each has to stop. Those that have not
        begun need none."""
        for run in runs:
            if run.started_at is None:
                self._executor.stop(run, "shutdown")
        await self._over_within(runs, grace_s)
        for run in runs:
            self._executor.stop(run, "shutdown")
        longest_s = max((run.config.policy.cancel_grace_ms / 1000 for run in runs if not run.done), default=0.0)
        await self._over_within(runs, longest_s + self._executor.kill_allowance_s + 0.1)
        if self._quick.is_set():
            kill_at = asyncio.get_running_loop().time() + QUICK_S
            for run in runs:
                self._executor.stop(run, "shutdown", kill_at=kill_at)
            await self._over_within(runs, 3 * QUICK_S, even_if_quick=True)
        for run in runs:
            if run.done or not run.held:
                continue
            if run.config.policy.exclusive:
                log.error("job %r of %s still runs: its lease will expire", run.job.id, run.queue)
            else:
                self._judge(run, Stopped("shutdown"))

    async def _over_within(self, runs: Sequence[Run], seconds: float, *, even_if_quick: bool = False) -> None:
        """Until these runs are over, or their time is, or no more time is to be lost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while not all(run.done for run in runs) and (even_if_quick or not self._quick.is_set()):
                    self._ended_one.clear()
                    await self._ended_one.wait()
        except TimeoutError:
            pass  # That was their time.

    # Beat

    def _make_beat(self) -> Heartbeat:
        self._beat = Heartbeat(
            self._storage.clone,
            worker=self.name,
            lease_ms=self._lease_ms,
            kill_allowance_s=self._executor.kill_allowance_s,
            held=lambda: list(self._runs.values()),
            facts=self._facts,
            full=self._fleet.full,
            lost=self._lost,
            cancel=lambda run: self._executor.stop(run, "cancel"),
            kill=lambda run, by: self._executor.stop(run, "lease_lost", kill_at=by),
            evict=self._evicted,
            report_error=self._beat_trouble,
            died=self._beat_died,
            beaten=self._changed,
        )
        return self._beat

    def _lost(self, run: Run) -> None:
        """The lease is not ours any more: the run is stopped, and whatever it gives is of no use."""
        if run.done or run.key not in self._runs:
            return
        log.warning("worker %s lost its lease of job %r in %s", self.name, run.job.id, run.queue)
        run.held = False
        del self._runs[run.key]
        kill_at = None
        if run.config.policy.exclusive:  # Another may run already: every moment counts, whatever it was stopped for.
            grace_s = 0.0 if run.overdue else run.config.policy.cancel_grace_ms / 1000
            kill_at = asyncio.get_running_loop().time() + grace_s
        self._executor.stop(run, "lease_lost", kill_at=kill_at)

    def _facts(self) -> WorkerFacts:
        return facts_of(self._executor.name, self._fleet)

    def _evicted(self) -> None:
        if not self._stop_asked.is_set():
            log.warning("worker %s was evicted: it stops", self.name)
            self.stop()

    def _beat_trouble(self, error: BaseException) -> None:
        self._teller.report_error(error, f"worker {self.name} could not say that it is alive")

    def _beat_died(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(RuntimeError(f"the heartbeat of worker {self.name} has ended: {error!r}"))

    async def _watch(self) -> None:
        """Wait, and raise if something that all depends on has broken down."""
        executor = asyncio.ensure_future(self._executor.watch())
        try:
            await asyncio.wait([executor, self._broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            executor.cancel()
        for broken in (executor, self._broken):
            if broken.done() and not broken.cancelled():
                broken.result()

    # What became of it

    def _settled(self, queue: str, outcomes: Sequence[tuple[PendingSettlement, SettleResult | None]]) -> None:
        """Let the leases go."""
        now = asyncio.get_running_loop().time()
        told = bool(self._teller.hooks) or jobs_log.isEnabledFor(logging.INFO)
        usual = (Complete, Release)
        for outcome, reply in outcomes:
            run = outcome.run
            if run is not None:
                self._runs.pop(run.key, None)
            if reply is SettleResult.LOST:
                log.warning("job %r of %s is another's: what this run gave is refused", outcome.job.id, queue)
            elif reply is SettleResult.OK and (told or not isinstance(outcome.settlement, usual)):
                started_at = None if run is None else run.started_at
                event = event_of(queue, outcome, 0.0 if started_at is None else now - started_at)
                self._teller.event(event)
                log_event(event, self.name)

    def _drained(self) -> None:
        if self._burst:  # What was left behind may be ready, and hints may come late.
            for queue in self.queues:
                self._fleet.wake(queue)
        self._changed()

    def _changed(self) -> None:
        if self._feed is not None:
            self._feed.changed()


def choose(known: Iterable[str], queues: str | Iterable[str] | None) -> list[str]:
    """The queues that are meant by names or patterns; a task's fail handler goes with it."""
    names = list(known)
    tasks = [name for name in names if not name.endswith(FAILED_SUFFIX)]
    if not tasks:
        raise OptionError("this app has no tasks: import the modules that define them before the worker starts")
    patterns = ["*"] if queues is None else [queues] if isinstance(queues, str) else list(queues)
    for pattern in patterns:
        if not fnmatch.filter(tasks, pattern):
            raise OptionError(f"no task is named like {pattern!r:.80}: there are {', '.join(tasks)}")
    chosen = {name for name in tasks if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    return [name for name in names if name.removesuffix(FAILED_SUFFIX) in chosen]
