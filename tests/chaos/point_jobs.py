"""Small programs with a bit of everything, for the points of points.py, and what must be true of them in the end.

Each writes down outside of the storage what it asks for (`ask`, then `ack` when that was acknowledged) and what its
handlers do (`start`, `done`, or `left` if a run ended otherwise). A step of a client that fails, or is cancelled, is
left at that; the program goes on with the next, as programs do.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from holdfast import Failure, Holdfast, HoldfastError, current_job
from holdfast._core.clock import Clock
from holdfast.storage.validation import FAILED_SUFFIX

DAY_S = 86_400
LEASE_S = 1.0
"""Lease of the workers: a cancelled run is stopped within a quarter of a second."""
WAIT_S = 1.5
"""The most that a step waits for a job's end. What was broken may keep it from ending here."""
MAX_PAYLOAD = 20_000
PULLED = "pulled"

STATES = {
    "ok": {"completed"},
    "flaky": {"completed"},
    "bad": {"failed"},
    "fat": {"failed"},
    "threaded": {"completed"},
    "single": {"completed"},
    "tick": {"completed"},
    "endless": {"cancelled", "completed"},
    "patient": {"completed"},
    "breaking": {"completed"},
    "later": {"cancelled", "completed"},
    PULLED: {"completed", "failed"},
}
"""How the jobs of a queue may end."""
STARTS = {"flaky": 2, "bad": 2, "tick": 2, "endless": 2}
"""How often a job of a queue may be started if nothing goes wrong: once, unless said here. What `tick` asks for may be
refused, and that is its failure; `endless` is stopped with its worker if no caller could cancel it."""


class Notes:
    """A file that every process of a case adds lines to. A line that was written is not lost with its process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.healing = False
        """This process comes after the fault: what waited for something waits no more."""
        self.break_storage: Callable[[int], None] = lambda times: None
        """Break the connection, or let the next commits fail: the stage knows how."""

    def write(self, what: str, queue: str, id: str, **more: Any) -> None:
        line = json.dumps({"what": what, "queue": queue, "id": id, "pid": os.getpid(), **more}) + "\n"
        end = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(end, line.encode())
        os.close(end)

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    @contextmanager
    def run(self) -> Generator[None]:
        """Around a handler."""
        job = current_job()
        which = {"generation": job.generation, "attempt": job.attempt}
        self.write("start", job.queue, job.id, **which)
        try:
            yield
        except BaseException:
            self.write("left", job.queue, job.id, **which)
            raise
        self.write("done", job.queue, job.id, **which)


def define(app: Holdfast[Any], notes: Notes) -> dict[str, Any]:
    """The tasks, by their names."""
    at_once: dict[str, Any] = {"min_backoff": 0, "max_backoff": 0, "max_stalls": 5, "failure_ttl": DAY_S}
    usual: dict[str, Any] = {**at_once, "result_ttl": DAY_S}

    @app.task(name="ok", **usual)
    async def ok(n: int) -> int:
        with notes.run():
            await asyncio.sleep(0)
        return n

    @app.task(name="flaky", **usual)
    async def flaky() -> None:
        with notes.run():
            if current_job().retries == 0:
                raise ValueError("the first time it does not work")

    @app.task(name="bad", **usual, max_retries=1)
    async def bad() -> None:
        with notes.run():
            raise ValueError("it never works")

    @app.task(name="fat", **usual, max_retries=1)
    async def fat(text: str) -> str:
        with notes.run():
            return 2 * text

    async def failed(failure: Failure) -> None:
        with notes.run():
            await asyncio.sleep(0)

    bad.on_failure(**at_once)(failed)
    fat.on_failure(**at_once)(failed)

    @app.task(name="threaded", **usual)
    def threaded() -> None:
        with notes.run():
            time.sleep(0.001)

    @app.task(name="single", singleton="single:{key}", **usual)
    async def single(key: str, n: int) -> int:
        with notes.run():
            await asyncio.sleep(0.005)
        return n

    @app.task(name="tick", singleton="tick", **usual)
    async def tick(n: int) -> None:
        with notes.run():
            if n < 2:
                await tick.using(delay=5).enqueue(n + 1)

    @app.task(name="endless", **usual, timeout=60)
    async def endless() -> None:
        with notes.run():
            current_job().progress("x" * (MAX_PAYLOAD + 1))  # More than this storage takes: it is left out.
            if not notes.healing:
                await asyncio.Event().wait()

    @app.task(name="patient", **usual)
    async def patient() -> None:
        with notes.run():
            await asyncio.sleep(0 if notes.healing else 0.35)

    @app.task(name="breaking", **usual)
    async def breaking(times: int) -> None:
        with notes.run():
            notes.break_storage(times)

    @app.task(name="later", **usual)
    async def later() -> None:
        with notes.run():
            pass

    tasks = (ok, flaky, bad, fat, threaded, single, tick, endless, patient, breaking, later)
    return {task.name: task for task in tasks}


def surround(app: Holdfast[Any]) -> None:
    """Hooks that do nothing, but are awaited."""

    @app.middleware
    async def through(job: Any, proceed: Callable[[], Awaitable[Any]]) -> Any:
        return await proceed()

    @app.around
    def enclose(job: Any) -> nullcontext[None]:
        return nullcontext()  # It can be entered with and without await.

    @app.after_execution
    async def seen(execution: Any) -> None:
        await asyncio.sleep(0)
        if execution.queue == "threaded":
            raise ValueError("a hook that fails changes nothing")

    @app.on_event
    async def event(seen: Any) -> None:
        await asyncio.sleep(0)
        if seen.queue == "ok" and seen.kind == "completed":
            raise ValueError("a hook that fails holds nothing up")

    @app.on_error
    async def error(wrong: BaseException, where: str) -> None:
        await asyncio.sleep(0)


class Program:
    """One client and what it needs: the app, its tasks, a file for notes."""

    def __init__(self, app: Holdfast[Any], clock: Clock, notes: Notes) -> None:
        self.app = app
        self.clock = clock
        self.notes = notes
        self.tasks = define(app, notes)
        self.raised: list[str] = []
        """What came of steps that did not work."""

    @classmethod
    def at(cls, url: str, namespace: str, clock: Clock, notes: Notes) -> Program:
        @asynccontextmanager
        async def lifespan() -> AsyncGenerator[str]:
            await asyncio.sleep(0)
            if program.unready:
                raise HoldfastError("what the handlers need is not there")
            yield "what the handlers need"
            await asyncio.sleep(0)

        app = Holdfast(url, namespace=namespace, clock=clock, max_payload=MAX_PAYLOAD, lifespan=lifespan)
        program = cls(app, clock, notes)
        program.url = url
        return program

    url = ""
    unready = False
    """A worker that is started now does not get far."""

    async def step(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """One thing that a program does. None if it did not work; a cancel is over with it, as that of a timeout is."""
        try:
            return await make()
        except (HoldfastError, asyncio.CancelledError) as error:
            self.raised.append(type(error).__name__)
            task = asyncio.current_task()
            assert task is not None
            if isinstance(error, asyncio.CancelledError) and not self.stopping:
                task.uncancel()
            elif isinstance(error, asyncio.CancelledError):
                raise
            return None

    stopping = False
    """The whole program was asked to end."""
    patient = True
    """No wait was in vain yet. After one no other begins: here nothing gets done any more."""

    async def ask(self, queue: str, id: str, *args: Any, **options: Any) -> Any:
        """Enqueue a job, by its task, and write that down."""
        self.notes.write("ask", queue, id)
        task = self.tasks[queue].using(**options)
        if queue not in ("single", "tick"):
            task = task.using(id=id)
        return self.acknowledged(queue, id, await self.step(lambda: task.enqueue(*args)))

    def acknowledged(self, queue: str, id: str, handle: Any) -> Any:
        if handle is not None:
            self.notes.write("ack", queue, id)
        return handle

    async def see(self, handle: Any, wait: float = WAIT_S) -> None:
        """Wait for an end, within limits."""
        if handle is not None and self.patient:
            await self.step(lambda: handle.result(wait=wait))
            self.patient = "WaitTimeout" not in self.raised


# The programs


async def work(program: Program) -> None:
    """All kinds of jobs, an inline worker with hooks, and a caller that waits for them."""
    surround(program.app)
    async with program.app, program.app.worker(lease=LEASE_S, grace=1):
        ok = program.tasks["ok"]
        for id in ("ok-1", "ok-2"):
            program.notes.write("ask", "ok", id)
        bounds = [ok.using(id=id).bind(1) for id in ("ok-1", "ok-2")]
        several = await program.step(lambda: program.app.enqueue_many(bounds))
        handles = [program.acknowledged("ok", handle.id, handle) for handle in several or ()]
        handles += [
            await program.ask("flaky", "flaky-1"),
            await program.ask("bad", "bad-1"),
            await program.ask("fat", "fat-1", "x" * (MAX_PAYLOAD - 200)),
            await program.ask("threaded", "threaded-1"),
            await program.ask("single", "single:a", "a", 1),
            await program.ask("single", "single:a", "a", 2),
            await program.ask("tick", "tick", 1),
        ]
        for handle in handles:
            await program.see(handle)
        await program.step(lambda: program.app.stats())


async def call(program: Program) -> None:
    """A call and its answer, and other ways to wait."""
    ok = program.tasks["ok"]
    async with program.app, program.app.worker(lease=LEASE_S, grace=1):
        program.notes.write("ask", "ok", "call-1")
        if await program.step(lambda: ok.using(id="call-1", wait=WAIT_S).call(1)) is not None:
            program.notes.write("ack", "ok", "call-1")
        queue = program.app.queue("ok")
        program.notes.write("ask", "ok", "call-2")
        if await program.step(lambda: queue.call({"n": 2}, id="call-2", wait=WAIT_S)) is not None:
            program.notes.write("ack", "ok", "call-2")
        handle = await program.ask("patient", "patient-1", wait=None)
        await program.step(lambda: queue.result("call-1", wait=WAIT_S))
        await program.step(lambda: _result_of_a_transaction(program))
        await program.step(lambda: _for_ever(program))
        if handle is not None:
            await program.step(handle.state)
        await program.see(handle, 0)


async def _for_ever(program: Program) -> None:
    """A wait without its own limit."""
    try:
        async with asyncio.timeout(WAIT_S):
            await program.app.queue("patient").result("patient-1", wait=None)
    except TimeoutError:
        pass


async def _result_of_a_transaction(program: Program) -> None:
    """A job that a pipeline of the program's own brings along: its handle knows nothing yet."""
    if program.url.startswith("redis"):
        program.notes.write("ask", "ok", "piped")
        try:
            client: Any = Redis(host="127.0.0.1", port=int(program.url.rpartition(":")[2]))
            async with client as redis, redis.pipeline() as pipeline:
                (handle,) = program.app.enqueue_in(pipeline, program.tasks["ok"].using(id="piped").bind(1))
                await pipeline.execute()
        except RedisError:
            return  # It may be stored.
        program.notes.write("ack", "ok", "piped")
        await handle.result(wait=WAIT_S)


async def cancel(program: Program) -> None:
    """A run that lasts, is extended, says how far it is, and is cancelled; a job that waits is cancelled, too."""
    async with program.app, program.app.worker(lease=LEASE_S, grace=1):
        endless = await program.ask("endless", "endless-1")
        patient = await program.ask("patient", "patient-1")
        later = await program.ask("later", "later-1", delay=60)
        if later is not None:
            await program.step(later.cancel)
        await asyncio.sleep(0.02)
        if endless is not None:
            await program.step(endless.cancel)
        await program.see(patient)
        await program.see(endless)


async def stop(program: Program) -> None:
    """A worker that leaves one queue, and then ends, while runs go on."""
    async with program.app:
        worker = program.app.worker(lease=LEASE_S, grace=0.05)
        async with worker:
            await program.step(worker.reload)
            await program.ask("endless", "endless-1")
            await program.ask("patient", "patient-1")
            await program.ask("ok", "ok-1", 1)
            await asyncio.sleep(0.03)
            await program.step(lambda: worker.stop_serving("patient", grace=0.01))
            worker.stop()
            await program.step(worker.wait)
        program.unready = True
        await program.step(program.app.worker(lease=LEASE_S).run)
        program.unready = False
        await program.step(lambda: _stop_twice(program))


async def _stop_twice(program: Program) -> None:
    """A worker that is to stop, and then to stop quickly: who runs it is cancelled, and again while runs have grace."""
    worker = program.app.worker(lease=LEASE_S, grace=30)
    running = asyncio.create_task(worker.run())
    try:
        await _until_it_runs(worker)
        running.cancel()
        await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _until_it_runs(worker: Any) -> None:
    """Until a worker has begun a run, if it does so soon."""
    for _ in range(100):
        if worker.running:
            return
        await asyncio.sleep(0.005)


async def pull(program: Program) -> None:
    """Leases in their holder's hands."""
    queue = program.app.queue(PULLED, result_ttl=DAY_S, failure_ttl=DAY_S)

    async def put(id: str) -> None:
        program.notes.write("ask", PULLED, id)
        program.acknowledged(PULLED, id, await program.step(lambda: queue.enqueue({"n": 1}, id=id)))

    async with program.app:
        for id in ("pull-1", "pull-2", "pull-3", "pull-4"):
            await put(id)
        lease = await program.step(lambda: queue.lease(seconds=30, wait=0))
        if lease is not None:
            await program.step(lambda: lease.extend(progress=1))
            restored = await program.step(lambda: program.app.lease(lease.token))
            if restored is not None:
                await program.step(restored.extend)
            await program.step(lambda: lease.retry(error="again"))
        for settle in ("release", "fail"):
            lease = await program.step(lambda: queue.lease(seconds=30, wait=0.5))
            if lease is not None:
                await program.step(getattr(lease, settle))

        async def block(error: BaseException | None) -> None:
            async with queue.leased(seconds=0.1, wait=0.5) as lease:
                await asyncio.sleep(0.03)
                if error is not None and lease is not None:
                    raise error

        await program.step(lambda: block(None))
        await program.step(lambda: block(HoldfastError("the block raises")))
        await program.step(lambda: block(asyncio.CancelledError()))
        await program.step(lambda: _lease_and_leave(queue))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_take_all(program, queue))
            await asyncio.sleep(0.01)
            await put("pull-5")


async def _lease_and_leave(queue: Any) -> None:
    """Ask for a lease, and be gone before it comes."""
    asking = asyncio.create_task(queue.lease(seconds=30, wait=1))
    try:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _take_all(program: Program, queue: Any) -> None:
    """Complete what comes, until nothing has come for a moment."""
    while True:
        lease = await program.step(lambda: queue.lease(seconds=30, wait=0.2))
        if lease is None:
            return
        await program.step(lease.complete)


async def stalled(program: Program) -> None:
    """A job that has stalled too often is refused as it is claimed; another worker's are swept by one that is full."""
    async with program.app:
        once = program.app.queue(PULLED, max_stalls=0, result_ttl=DAY_S, failure_ttl=DAY_S)
        program.notes.write("ask", PULLED, "stalled-1")
        program.acknowledged(PULLED, "stalled-1", await program.step(lambda: once.enqueue(1, id="stalled-1")))
        if await program.step(lambda: once.lease(seconds=30, wait=0)) is not None:
            await program.step(lambda: once.sweep(worker=once._worker))  # pyright: ignore[reportPrivateUsage]
        await program.step(lambda: once.lease(seconds=30, wait=0))
        async with program.app.worker("patient", lease=LEASE_S, grace=1, concurrency=1) as worker:
            await program.ask("patient", "patient-1")
            second = await program.ask("patient", "patient-2")
            await program.step(lambda: _until_it_runs(worker))
            program.notes.break_storage(60)
            await asyncio.sleep(0.3)
            program.notes.break_storage(0)
            await program.see(second)


async def operate(program: Program) -> None:
    """What an operator does meanwhile."""
    queue = program.app.queue("later")
    async with program.app:
        await program.step(lambda: queue.pause(reason="a look"))
        later = await program.ask("later", "later-1")
        await program.ask("ok", "ok-1", 1)
        program.notes.break_storage(1)
        await program.see(later, 0.15)
        program.notes.break_storage(0)
        await program.step(queue.resume)
        await program.step(queue.stats)
        await program.step(lambda: queue.get("later-1"))
        await program.step(lambda: queue.get_many(["later-1"]))
        if later is not None:
            await program.step(later.info)
            await program.step(lambda: later.set_priority(8))
        await program.step(lambda: queue.keep("later-1", DAY_S))
        await program.step(lambda: queue.keep_many(["later-1"], DAY_S))
        await program.step(lambda: _listed(queue))
        await program.step(lambda: queue.cancel("later-1"))
        await program.step(lambda: queue.retry("later-1"))
        await program.step(lambda: queue.set_priority("later-1", 9))
        await program.step(lambda: queue.set_priority_many(["later-1"], 9))
        await program.step(lambda: queue.cancel_many(["later-1"]))
        await program.step(lambda: queue.retry_many(["later-1"]))
        await program.step(queue.repair)
        await program.step(lambda: queue.repair(dry_run=True))
        await program.step(lambda: program.app.evict("nobody"))
        await program.step(program.app.storage.about)
        await program.step(lambda: program.app.storage.back_up(program.notes.path.with_name("copy.db")))
        throwaway = program.app.queue("throwaway")
        await program.step(lambda: throwaway.enqueue(1, id="gone"))
        await program.step(lambda: _heard(throwaway))
        lease = await program.step(lambda: throwaway.lease(seconds=30, wait=0))
        await program.step(throwaway.purge)
        await program.step(lambda: throwaway.delete(wait=0.15))
        if lease is not None:
            await program.step(lease.complete)
        await program.step(lambda: throwaway.delete(wait=1))
        await program.step(lambda: _dropped_by_another(program, throwaway))


async def _dropped_by_another(program: Program, queue: Any) -> None:
    """A queue that this client knows, and that is created again because another client has dropped it."""
    await queue.enqueue(1, id="first")
    async with program.app.storage.clone() as other:
        assert await other.drop(queue.name) == 0
    await queue.enqueue(1, id="second")
    await queue.cancel("second")


async def troubled(program: Program) -> None:
    """The storage fails several times, and comes back: while a worker starts, while it settles, while it beats."""
    surround(program.app)
    broken = program.notes.break_storage
    async with program.app:
        broken(4)
        async with program.app.worker(lease=LEASE_S, grace=1):
            await asyncio.sleep(0.1)
            broken(0)
            handles = [await program.ask("breaking", f"breaking-{times}", times) for times in (1, 3)]
            handles.append(await program.ask("patient", "patient-1"))
            await asyncio.sleep(0.15)
            broken(8)
            await asyncio.sleep(0.2)
            broken(0)
            for handle in handles:
                await program.see(handle)
            await program.ask("breaking", "breaking-last", 5)
            await asyncio.sleep(0.02)


async def _listed(queue: Any) -> None:
    async for _ in queue.jobs():
        pass


async def _heard(queue: Any) -> None:
    """One event of a queue, and one of a job of it."""

    async def first(events: AsyncIterator[Any]) -> None:
        async for _ in events:
            return

    handle = await queue.enqueue(1, id="heard", delay=60)
    hearing = [asyncio.create_task(first(events)) for events in (queue.events(), handle.events())]
    try:
        await asyncio.sleep(0.03)
        await handle.cancel()
        await asyncio.wait(hearing, timeout=0.5)  # They are hints, and may be lost.
    finally:
        for task in hearing:
            task.cancel()
        await asyncio.gather(*hearing, return_exceptions=True)


async def fleet(program: Program) -> None:
    """A worker with a child process."""
    async with program.app, program.app.worker(processes=1, lease=5, grace=1, drain_grace=1):
        handles = [
            await program.ask("ok", "ok-1", 1),
            await program.ask("flaky", "flaky-1"),
            await program.ask("bad", "bad-1"),
            await program.ask("threaded", "threaded-1"),
        ]
        for handle in handles:
            await program.see(handle)


PROGRAMS: dict[str, Callable[[Program], Awaitable[None]]] = {
    "work": work,
    "call": call,
    "pull": pull,
    "cancel": cancel,
    "stop": stop,
    "stalled": stalled,
    "operate": operate,
    "troubled": troubled,
    "fleet": fleet,
}
"""The cheap ones first: a point is tried in the first that reaches it."""


# After the fault


async def heal(program: Program, advance: Callable[[float], None]) -> None:
    """Finish everything, as those who are still there do: workers and pullers, while time passes."""
    program.notes.healing = True
    app = program.app
    queue = app.queue(PULLED, result_ttl=DAY_S, failure_ttl=DAY_S)
    async with app:
        await app.queue("later").resume()
        for _ in range(8):
            advance(40.0)
            await app.worker(lease=LEASE_S, burst=True).run()
            while (lease := await queue.lease(seconds=30, wait=0)) is not None:
                await lease.complete()
            if not any(q.running or q.ready or q.scheduled for q in (await app.stats()).queues):
                return
            await app.queue("throwaway").sweep()
            await app.queue("throwaway").delete(wait=0)


async def judge(program: Program, extra: int, *, orderly: bool, crashed: bool) -> list[str]:
    """What is wrong in the end. `extra` is how often a run may have been started once more than it should. Who ended
    in an `orderly` way has given every job back: no lease had to be taken from a worker. Where a process `crashed`,
    only jobs whose lease had to be taken back were started once more."""
    app = program.app
    wrong: list[str] = []
    records: dict[tuple[str, str], Any] = {}
    async with app:
        for stats in (await app.stats()).queues:
            queue = app.queue(stats.queue)
            jobs = [job async for job in queue.jobs()]
            records.update({(stats.queue, job.id): job for job in jobs})
            wrong += [f"audit of {stats.queue}: {problem}" for problem in (await queue.repair(dry_run=True)).problems]
            live = (stats.ready, stats.scheduled, stats.running, stats.retrying, stats.deferred)
            if any(live):
                wrong.append(f"{stats.queue} is not done: ready, scheduled, running, retrying, deferred = {live}")
            if (
                stats.queue not in ("single", "tick", "throwaway")
                and stats.totals.get("completed", 0) != stats.completed
            ):
                wrong.append(f"{stats.queue} counts {stats.totals['completed']} completions of {stats.completed} jobs")
    if orderly:
        stalled = [key for key, job in records.items() if job.stalls and key[0] not in (PULLED, "throwaway")]
        wrong += [f"a worker that ended in order has kept its lease of {id} in {queue}" for queue, id in stalled]
    lines = program.notes.read()
    return wrong + _judge_records(lines, records) + _judge_runs(lines, records, extra, crashed)


def _judge_records(lines: list[dict[str, Any]], records: dict[tuple[str, str], Any]) -> list[str]:
    wrong: list[str] = []
    asked = {(line["queue"], line["id"]) for line in lines if line["what"] == "ask"}
    acknowledged = {(line["queue"], line["id"]) for line in lines if line["what"] == "ack"}
    wrong += [f"lost: {key} was acknowledged, and there is no record" for key in sorted(acknowledged - set(records))]
    for (queue, id), job in sorted(records.items()):
        if queue == "throwaway":
            continue
        if queue.endswith(FAILED_SUFFIX):
            if job.state != "completed":
                wrong.append(f"the fail handler's job {id} in {queue} is {job.state}: {job.error}")
            continue
        if (queue, id) not in asked:
            wrong.append(f"phantom: no request for {id} in {queue}")
        if str(job.state) not in STATES[queue]:
            wrong.append(f"{id} in {queue} is {job.state}, not {' or '.join(STATES[queue])}: {job.error}")
    for queue in ("bad", "fat"):
        failed = sum(name == queue for name, _ in records)
        followed = sum(name == queue + FAILED_SUFFIX for name, _ in records)
        if failed != followed:
            wrong.append(f"{failed} jobs of {queue} failed, and {followed} reached its fail handler")
    return wrong


def _judge_runs(
    lines: list[dict[str, Any]], records: dict[tuple[str, str], Any], extra: int, crashed: bool
) -> list[str]:
    wrong: list[str] = []
    started: Counter[tuple[str, str, int]] = Counter()
    done: Counter[tuple[str, str, int]] = Counter()
    seen: set[tuple[Any, ...]] = set()
    going: dict[str, int] = {}
    for line in lines:
        if line["what"] in ("ask", "ack"):
            continue
        queue, id, pid = line["queue"], line["id"], line["pid"]
        key = (queue, id, line["generation"])
        if (queue, id) not in records:
            wrong.append(f"phantom: {id} of {queue} ran, and there is no record")
        if line["what"] == "start":
            started[key] += 1
            run = (*key, line["attempt"])
            if run in seen:
                wrong.append(f"attempt {line['attempt']} of {id} in {queue} was started twice")
            seen.add(run)
            if queue == "single" and going.get(id) == pid:
                wrong.append(f"two runs of {id} overlap")
            going[id] = pid
        else:
            going.pop(id, None)
            done[key] += line["what"] == "done"
    for key, starts in started.items():
        most = STARTS.get(key[0], 1) + extra
        job = records.get(key[:2])
        if crashed and job is not None and job.generation == key[2]:
            most += min(job.stalls, 1) - 1
        if starts > most:
            wrong.append(f"{key[1]} in {key[0]} was started {starts} times, at most {most} are explained")
    for (queue, id), job in records.items():
        generations = [count for (name, other, _), count in done.items() if (name, other) == (queue, id)]
        if str(job.state) == "completed" and queue != PULLED and not sum(generations):
            wrong.append(f"{id} in {queue} is completed, and never ran to its end")
        if any(count > 1 + extra for count in generations):
            wrong.append(f"{id} in {queue} ran to its end {max(generations)} times")
    return wrong
