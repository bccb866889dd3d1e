"""The worker's heartbeat, on its own thread and connection: a handler that blocks the event loop does not cost the
worker its leases.

Every quarter of a lease it extends the leases that are held, announces the worker, and sweeps some of its queues: a
claim sweeps too, but a worker that is full or idle claims nothing. It passes what it learns to the worker's loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from holdfast._core.applications import compare_applications
from holdfast._core.events import EventKind
from holdfast._core.jobs import LeaseRef
from holdfast._core.replies import WorkerFacts
from holdfast._worker.executor import Run, wait_at_most
from holdfast._worker.notes import ANSWER_MS, TASK_MS, TASK_NOTE, question_for, read_question
from holdfast._worker.telemetry import RunEvent, worker_facts
from holdfast.errors import OptionError, PayloadRejected, StorageUnavailable
from holdfast.storage.base import QueueDamaged, Storage
from holdfast.storage.validation import MAX_ITEMS, MAX_NOTE_BYTES, batches

if TYPE_CHECKING:
    from holdfast._worker.worker import WorkerContext

SOONEST_S = 0.5
"""Shortest time between two beats. Progress makes the next beat come early."""
GOODBYE_S = 1.0
"""How long the last announcement of a worker that stops may take."""
LEAVING_MS = 100
"""How long a worker that stops is still listed: the shortest time that a storage accepts."""
ANNOUNCED_BEATS = 8
"""A worker is listed for this number of beats after its last announcement."""

log = logging.getLogger("holdfast.worker")


class Heartbeat:
    """Keeps the leases of one worker alive.

    `start`, `stop` and the methods under "On the worker's loop" run on the worker's loop; the others on this thread,
    which reads the settings, the runs that are held, and the newest snapshot of the worker.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._worker = context.settings.name
        self._lease_ms = context.settings.lease_ms
        self._every_s = context.settings.lease_ms / 4000
        self._enabled = context.settings.heartbeat
        self._beaten_at = float("-inf")
        self._failing = False
        self._stopping = False
        self._snapshot: tuple[WorkerFacts, list[str]]
        """The record of the worker, and the served queues. Written by the worker's loop twice per beat, unless that is
        blocked; read by this thread."""
        self._swept = 0
        """Number of the served queue that the next sweep begins with: a beat looks at some of many queues."""
        self._next_snapshot: asyncio.TimerHandle
        self._described: object = None
        """The tasks with notes: the `configs` of the worker at that time."""
        self._unwritten: list[dict[str, bytes]] = []
        """Notes of tasks that are not written yet, in parts for one call each."""
        self._compared: object = None
        """The tasks that were compared with those of other workers."""
        self._question = question_for(self._worker)
        """Name of the note with the question of a command."""
        self._answered: bytes | None = None
        """The last question of a command that this worker has begun to answer."""
        self._answers: dict[str, bytes] = {}
        """Answers to write with the next beat, by the name of the note."""
        self._nudged = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[None]
        """Fails with the error of this thread."""
        self._home: asyncio.AbstractEventLoop
        """The worker's loop."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of this thread, once it runs."""
        self._thread = threading.Thread(target=self._run, name="holdfast-beat", daemon=True)

    # From any thread

    @property
    def is_heard(self) -> bool:
        """Whether a beat has succeeded within the length of a lease. Otherwise the worker claims nothing, because it
        could not keep its leases."""
        return not self._enabled or time.monotonic() < self._beaten_at + self._lease_ms / 1000

    def nudge(self) -> None:
        """There is progress to send, or a lease to extend: beat soon."""
        _call_on(self._loop, self._nudged.set)

    # On the worker's loop

    def start(self) -> None:
        """Begin to beat, unless the settings of the worker turn the heartbeat off."""
        self._home = asyncio.get_running_loop()
        self._broken = self._home.create_future()
        if self._enabled:
            self._make_snapshot()
            self._thread.start()

    async def stop(self) -> None:
        """End at once, even during a beat, and announce that the worker leaves if the storage answers quickly."""
        if self._enabled:
            self._stopping = True
            self._next_snapshot.cancel()
            _call_on(self._loop, lambda: self._work and self._work.cancel())
            await asyncio.to_thread(self._thread.join)

    async def watch(self) -> None:
        """Wait, and raise if the heartbeat's thread has failed: without it the worker must not go on."""
        await self._broken

    def _make_snapshot(self) -> None:
        capacity = self._context.claimer.capacity
        executor = self._context.executor
        facts = worker_facts(executor.name, capacity, executor.application, self._context.configs)
        self._snapshot = (facts, list(capacity.served))
        if not self._stopping:
            self._next_snapshot = self._home.call_later(self._every_s / 2, self._make_snapshot)

    def _lost(self, run: Run) -> None:
        """A lease is lost: stop its run, and discard the result."""
        if run.done or self._context.held.pop(run.key, None) is None:
            return
        log.warning("worker %s lost its lease of job %r in %s: stopping the run", self._worker, run.job.id, run.queue)
        run.held = False
        kill_at = None
        if run.config.policy.exclusive:  # Another run of the job may have begun.
            grace_s = 0.0 if run.overdue else run.config.policy.cancel_grace_ms / 1000
            kill_at = self._home.time() + grace_s
        self._context.executor.stop(run, "lease_lost", kill_at=kill_at)

    def _evicted(self) -> None:
        """The storage has the command that this worker should stop."""
        if not self._context.stopping.is_set():
            log.warning("worker %s was evicted: stopping", self._worker)
            self._context.evicted = True
            self._context.stop()

    # On the heartbeat's thread

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except asyncio.CancelledError:
            pass  # `stop` has cancelled it.
        except BaseException as error:
            _call_on(self._home, self._broken.set_exception, error)

    async def _beat_until_stopped(self) -> None:
        """Beat. After a failure begin again at once with a new connection: leases must be extended before half a lease
        has passed since the storage came back."""
        self._loop, self._work = asyncio.get_running_loop(), asyncio.current_task()
        while not self._stopping:
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._every_s):
                        storage = await stack.enter_async_context(self._context.storage.clone())
                    await self._beat_until_broken(storage)
            except TimeoutError:
                self._failed(StorageUnavailable(f"no answer to a heartbeat within {self._every_s:g} s"))
            except Exception as error:
                self._failed(error)
            await asyncio.sleep(self._every_s / 10)

    def _failed(self, error: BaseException) -> None:
        """A beat, or part of it, has failed. Report that once, until a beat succeeds."""
        if not self._failing:
            self._failing = True
            self._report_error(error, "could not send its heartbeat")
        self._kill_unsure_runs()

    def _report_error(self, error: BaseException, what: str) -> None:
        _call_on(self._home, self._context.hooks.report_error, error, f"worker {self._worker} {what}")

    async def _beat_until_broken(self, storage: Storage) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                async with asyncio.timeout(self._every_s):
                    await self._beat(storage)
                news = self._failing or not self.is_heard
                self._failing, self._beaten_at = False, time.monotonic()
                if news:  # The claimer may claim again.
                    _call_on(self._home, self._context.claimer.changed.set)
                await asyncio.sleep(min(SOONEST_S, self._every_s))
                await wait_at_most(began + self._every_s - loop.time(), self._nudged)
                self._nudged.clear()
        except asyncio.CancelledError:
            with suppress(StorageUnavailable, TimeoutError):  # Then the worker is forgotten a little later.
                async with asyncio.timeout(GOODBYE_S):
                    await storage.announce(self._worker, self._snapshot[0], ttl_ms=LEAVING_MS)
            raise

    async def _beat(self, storage: Storage) -> None:
        """Do everything concurrently: a slow queue must not cost the leases of another."""
        by_queue: dict[str, list[tuple[Run, bytes | None]]] = defaultdict(list)
        for run in list(self._context.held.values()):
            if self._extends(run):
                by_queue[run.queue].append((run, run.lease.progress))
        extends = [self._extend(storage, queue, runs) for queue, runs in by_queue.items()]
        others = [self._announce(storage), self._sweep(storage), self._answer(storage), self._describe(storage)]
        if self._context.hooks.ended_in:
            others.append(self._find_drained(storage))
        ended = await asyncio.gather(*extends, *others, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, BaseException)]
        if len(errors) == len(ended):
            raise errors[0]  # Nothing succeeded: the connection is broken.
        for error in errors:
            self._failed(error)

    async def _extend(self, storage: Storage, queue: str, runs: list[tuple[Run, bytes | None]]) -> None:
        extend = partial(storage.extend, queue, worker=self._worker, lease_ms=self._lease_ms)
        for beaten in batches(runs, lambda beaten: len(beaten[1] or b"")):
            sent_at, stored = asyncio.get_running_loop().time(), True
            try:
                reply = await extend([LeaseRef(*run.key[1:], progress) for run, progress in beaten])
            except (PayloadRejected, OptionError) as error:  # A heartbeat never depends on what a handler reports.
                self._report_error(error, f"could not send the progress of jobs in {queue}")
                reply, stored = await extend([LeaseRef(*run.key[1:]) for run, _ in beaten]), False
            lost = {(lease.id, lease.fence) for lease in reply.lost}
            for run, progress in beaten:
                run.lease.extended_at = sent_at
                if run.lease.progress is progress:  # Else there is newer progress, which has not been sent.
                    run.lease.progress = None
                if progress is not None and stored and run.key[1:] not in lost:
                    self._publish(EventKind.PROGRESS, queue, run.job.id, run.job.attempts, progress)
            by_lease = {run.key[1:]: run for run, _ in beaten}
            for lease in reply.lost:
                _call_on(self._home, self._lost, by_lease[lease.id, lease.fence])
            for lease in reply.cancel_asked:
                _call_on(self._home, self._context.executor.stop, by_lease[lease.id, lease.fence], "cancel")

    async def _find_drained(self, storage: Storage) -> None:
        """Publish which queues have no waiting and no running job, of those in which a run of this worker has ended."""
        ended = self._context.hooks.ended_in
        queues = [ended.popitem()[0] for _ in range(min(len(ended), MAX_ITEMS))]
        try:
            snapshot = await storage.snapshot(queues)
        except BaseException:
            ended.update(dict.fromkeys(queues))  # The next beat looks again.
            raise
        for stats in snapshot.queues:
            if not (stats.ready or stats.scheduled or stats.running or stats.problem):
                self._publish(EventKind.DRAINED, stats.queue)

    def _publish(self, kind: EventKind, queue: str, id: str = "", attempt: int = 0, progress: bytes = b"null") -> None:
        if self._context.hooks.on_event:
            event = RunEvent(kind=kind, queue=queue, id=id, attempt=attempt, progress_json=progress)
            _call_on(self._home, self._context.hooks.publish, event)

    async def _announce(self, storage: Storage) -> None:
        ttl_ms = round(1000 * self._every_s * ANNOUNCED_BEATS)
        commands = await storage.announce(self._worker, self._snapshot[0], ttl_ms=ttl_ms)
        if commands.evict:
            _call_on(self._home, self._evicted)

    async def _describe(self, storage: Storage) -> None:
        """Write the notes of the tasks when they have changed, for at most a quarter of the time between two beats; the
        next beat writes the others. With the beat after that, when other workers that have started at the same time are
        listed as well, compare the applications."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._every_s / 4
        configs = self._context.configs
        if configs is not self._described:
            known = {config.queue: config.note.encode() for config in configs.values() if config.note}
            notes = {TASK_NOTE + queue: note for queue, note in known.items() if len(note) <= MAX_NOTE_BYTES}
            self._unwritten = [dict(part) for part in batches(notes.items(), lambda note: len(note[1]))]
            self._described = configs
        elif not self._unwritten and configs is not self._compared:
            workers = (await storage.snapshot([])).workers  # Reading all queues may take longer than a beat.
            here = set(self._context.claimer.capacity.served)
            found = compare_applications([worker.facts for worker in workers], here)
            for warning in found.warnings:
                log.warning("worker %s: %s", self._worker, warning)
            for version in found.versions:
                log.info("worker %s: %s", self._worker, version)
            self._compared = configs
        while self._unwritten:
            await storage.write_notes(self._unwritten[-1], ttl_ms=TASK_MS)
            self._unwritten.pop()
            if loop.time() >= ends_at:
                return

    async def _answer(self, storage: Storage) -> None:
        """Write answers that are ready, and begin to answer a new question."""
        answers, self._answers = self._answers, {}
        await storage.write_notes(answers, ttl_ms=ANSWER_MS)
        (note,) = await storage.read_notes([self._question])
        if note is None or note == self._answered:
            return
        self._answered = note
        question = read_question(note)
        if question is not None:
            runs = (run for run in list(self._context.held.values()) if run.queue == question.queue)
            run = next((run for run in runs if run.key[2] == question.fence), None)
            deliver = partial(self._deliver, question.answer_to)
            if run is None:
                deliver("")
            else:
                self._context.executor.show_stack(run, deliver)

    def _deliver(self, answer_to: str, answer: str) -> None:
        """Called on any thread."""
        self._answers[answer_to] = answer.encode("utf-8", "replace")[:MAX_NOTE_BYTES]
        self.nudge()

    async def _sweep(self, storage: Storage) -> None:
        """Take back expired leases and delete forgotten records, for at most a quarter of the time between two beats.
        The next beat goes on with the next queue."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._every_s / 4
        served = self._snapshot[1]
        if self._swept >= len(served):
            self._swept = 0
        looked_at = served[self._swept : self._swept + MAX_ITEMS]
        ready = set(await storage.ready(looked_at, forgotten=True))  # Also those with jobs that are due.
        for queue in looked_at:
            self._swept += 1
            if queue in ready:
                await self._sweep_queue(storage, queue, ends_at)
                if loop.time() >= ends_at:
                    return

    async def _sweep_queue(self, storage: Storage, queue: str, ends_at: float) -> None:
        """Sweep a queue once, and again until nothing is left or it is `ends_at`."""
        with suppress(QueueDamaged):  # The claimer reports it. The other queues must be swept.
            while (await storage.sweep(queue)).more and asyncio.get_running_loop().time() < ends_at:
                pass

    def _extends(self, run: Run) -> bool:
        """Whether to extend the lease of a run. A run that is long past its timeout loses it, even if the loop is
        blocked and cannot stop the run; an exclusive run keeps it until it ends."""
        policy = run.config.policy
        if policy.exclusive or run.done:
            return True
        ends_at = run.times_out_at + (policy.cancel_grace_ms + self._lease_ms) / 1000
        return asyncio.get_running_loop().time() < ends_at + self._context.executor.kill_allowance_s

    def _kill_unsure_runs(self) -> None:
        """The storage does not answer. Kill the runs that must end before another worker can have their lease, if the
        next beat would be too late for them."""
        now = asyncio.get_running_loop().time()
        for run in list(self._context.held.values()):
            ends_at = run.lease.extended_at + self._lease_ms / 1000
            next_chance_at = now + self._every_s + min(SOONEST_S, self._every_s)
            if run.config.policy.dies_with_storage and next_chance_at >= ends_at:
                kill_at = max(now, ends_at - self._lease_ms / 20_000)
                _call_on(self._home, partial(self._context.executor.stop, run, "lease_lost", kill_at=kill_at))


def _call_on(loop: asyncio.AbstractEventLoop | None, function: Callable[..., object], *args: object) -> None:
    """Call a function on the loop of another thread, if that loop runs."""
    if loop is not None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function, *args)
