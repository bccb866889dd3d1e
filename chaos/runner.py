"""Starts the processes of a run, injects faults, waits until no job is left, and records the final state."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import backends, history, recorder
from chaos.backends import ServerBackend
from chaos.faults import FaultInjector, Member
from chaos.faulty_proxy import FaultyProxy
from chaos.settings import (
    CLOCK,
    DAY_S,
    HISTORY,
    INLINE_QUEUES,
    LEASE_S,
    NAMESPACE,
    PERIODICS,
    PROFILE,
    RATE,
    Program,
    ending,
    profile,
)
from holdfast import Holdfast, HoldfastError, Stats
from holdfast._core.events import EventKind, Topic
from tests.processes import MARK, marked, send

ROOT = Path(__file__).parents[1]
DRAIN_S = 60.0
WORKER = ("-m", "chaos.launch", "worker", "chaos.tasks:app", "--lease", str(LEASE_S), "--grace", "2")
FLEET = (*WORKER, "--processes", "2", "--max-memory", "200M", "--log-level", "warning")
INLINE = (*WORKER, "--inline", "--log-level", "warning")
RATE_JOBS = 200
SAMPLES_PER_LINE = 4
"""Samples of the queues between two lines of progress."""


@dataclass
class Plan:
    storage: str
    seconds: float | None
    jobs: int | None
    seed: int
    folder: Path
    """Folder of the history and of all other files of the run."""
    profile: str = "all"


@dataclass
class Runner:
    plan: Plan
    show: Callable[[str], None]
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = self.plan.folder / "history"
        self.folder.mkdir(parents=True)
        self.clock = self.plan.folder / "clock"
        self.clock.write_bytes(bytes(8))
        self.environment = {
            HISTORY: str(self.folder),
            CLOCK: str(self.clock),
            RATE: str(RATE_JOBS),
            PROFILE: self.plan.profile,
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        os.environ.update(self.environment)
        self.backend = backends.make(self.plan.storage, self.plan.folder, self.clock)
        self.server = self.backend.about
        self.asked = 0
        self.number = 0
        self.log = (self.plan.folder / "output.log").open("wb")

    async def run(self) -> None:
        """Do the whole run. The history is complete afterwards."""
        recorder.install()
        self.app: Holdfast[Any] = Holdfast(self.backend.url, namespace=NAMESPACE)
        try:
            async with self.app:
                await self._start_periodic()
                for role in profile().members:
                    await self._start(role)
                self.injector = FaultInjector(self.plan.seed, self.backend, self.members)
                await asyncio.sleep(3)  # The processes start.
                background = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
                await self._chaos()
                began = time.monotonic()
                drained = await self._drain()
                exits = await self._stop_all()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await self._close(time.monotonic() - began if drained is None else drained, drained is not None, exits)
        finally:
            for pid in self._others():
                send(pid)
            for member in self.members:
                member.process.wait(10)
            self.backend.close()
            self.log.close()

    async def _start_periodic(self) -> None:
        for key in range(PERIODICS):
            payload = {"key": key, "number": 0, "token": f"{0:012x}"}
            await self.app.queue("periodic").enqueue(payload, id=f"p{key}", on_conflict="update", result_ttl=DAY_S)

    async def _start(self, role: str) -> None:
        self.number += 1
        proxy: FaultyProxy | None = None
        url = self.backend.url
        if isinstance(self.backend, ServerBackend):
            proxy = FaultyProxy(self.backend.server.port)
            await proxy.open()
            url = self.backend.url_by(proxy.port)
        name = ("--name", f"{role}-{self.number}")
        queues = [word for queue in INLINE_QUEUES for word in ("--queues", queue)]
        args: tuple[str, ...] = ("-m", "chaos.clients", role, f"{self.plan.seed} {self.number}")
        if role == "fleet":
            args = (*FLEET, *name)
        elif role == "inline":
            args = (*INLINE, *name, *queues)
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, *args],
            env={**os.environ, **self.environment, "HOLDFAST_URL": url},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
        )
        self.members.append(Member(role, process, proxy, time.monotonic()))

    async def _chaos(self) -> None:
        """Inject faults until the run is long enough."""
        injecting = asyncio.create_task(self.injector.run())
        replacing = asyncio.create_task(self._replace())
        until = time.monotonic() + (self.plan.seconds or 1e9)
        try:
            while time.monotonic() < until and (self.plan.jobs is None or self.asked < self.plan.jobs):
                await asyncio.sleep(0.1)
                for task in (injecting, replacing):
                    if task.done():
                        task.result()
        finally:
            self.injector.stop()
            await injecting  # All freezes and outages end.
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)

    async def _replace(self) -> None:
        """Replace processes that have ended."""
        while True:
            for member in list(self.members):
                if member.process.poll() is not None:
                    await self._remove(member)
                    await self._start(member.role)
            await asyncio.sleep(0.05)

    async def _remove(self, member: Member) -> None:
        self.members.remove(member)
        if member.proxy is not None:
            await member.proxy.close()

    async def _watch(self) -> None:
        """Record samples of the queues, and show progress."""
        began = time.monotonic()
        for number in itertools.count():
            with suppress(HoldfastError):
                sample = await record_sample(self.app)
                totals = [queue.totals for queue in sample if not queue.queue.endswith("/failed")]
                self.asked = sum(total.get("enqueued", 0) + total.get("promoted", 0) for total in totals)
                if number % SAMPLES_PER_LINE == 0:
                    live = sum(queue.ready + queue.running for queue in sample)
                    faults = ", ".join(f"{kind} {count}" for kind, count in self.injector.faults.items())
                    self.show(f"{time.monotonic() - began:5.0f} s  {self.asked} jobs, {live} live  {faults}")
            await asyncio.sleep(0.5)

    async def _listen(self) -> None:
        """Record when jobs are taken back."""
        queues = Program().queues
        names = [*queues, *(f"{queue}/failed" for queue in queues)]
        while True:
            with suppress(HoldfastError):
                async with self.app.storage.subscribe(*(Topic(name, "all") for name in names)) as events:
                    async for event in events:
                        if event.kind is EventKind.STALLED:
                            history.writer().write(history.Stalled(queue=event.queue, id=event.id))
            await asyncio.sleep(0.2)

    async def _drain(self) -> float | None:
        """Stop the producers and wait until no job is left. Returns how long that took, or None if it did not end."""
        self.injector.set_clock(0)
        ending().touch()
        began = time.monotonic()
        while time.monotonic() < began + DRAIN_S:
            with suppress(HoldfastError):
                stats = await self.app.stats()
                if not any(queue.ready + queue.scheduled + queue.running for queue in stats.queues):
                    return time.monotonic() - began
            for member in list(self.members):
                if member.process.poll() is not None and member.role in ("fleet", "inline", "pull"):
                    await self._remove(member)
                    await self._start(member.role)  # A handler may have killed it.
            await asyncio.sleep(0.1)
        return None

    async def _stop_all(self) -> list[str]:
        """Stop all processes. Returns those that did not stop in time or failed."""
        wrong: list[str] = []
        for member in self.members:
            if member.process.poll() is None and member.role in ("fleet", "inline", "pull"):
                member.process.terminate()
        until = time.monotonic() + 20
        for member in self.members:
            while member.process.poll() is None and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if member.process.poll() is None:
                wrong.append(f"{member.role} {member.pid} did not stop")
            elif member.process.returncode not in (0, -signal.SIGTERM if member.role == "pull" else 0):
                wrong.append(f"{member.role} {member.pid} ended with {member.process.returncode}")
            if member.proxy is not None:
                await member.proxy.close()
        return wrong

    async def _close(self, drained_s: float, drained: bool, exits: list[str]) -> None:
        """Record the final state of the storage, and what is left after its queues are deleted."""
        until = time.monotonic() + 5
        while (left := self._others()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        leftovers = [f"a process {pid}: {_command_of(pid)}" for pid in left]
        closing = await final_state(self.app)
        for queue in closing.totals:
            await self.app.queue(queue).delete(wait=60)
        async with Holdfast(self.backend.url, namespace=NAMESPACE) as last, last.storage.subscribe(Topic("work")):
            pass  # The next subscriber clears the files of killed processes.
        await self.app.__aexit__(None, None, None)
        leftovers += self.backend.leftovers()
        await self.app.__aenter__()
        closing.drained_s, closing.drained, closing.leftovers, closing.exits = drained_s, drained, leftovers, exits
        history.writer().write(closing)

    def _others(self) -> list[int]:
        """All processes of this run but this one."""
        return [pid for pid in marked(self.mark) if pid != os.getpid()]


async def record_sample(app: Holdfast[Any]) -> list[Stats]:
    stats = (await app.stats()).queues
    queues = {queue.queue: (queue.ready, queue.totals.get("claimed", 0)) for queue in stats}
    history.writer().write(history.Sample(queues=queues))
    return list(stats)


async def final_state(app: Holdfast[Any]) -> history.Closing:
    """Record all records of all queues. Returns the totals and the problems of an audit."""
    problems: list[str] = []
    stats = (await app.stats()).queues
    for queue in stats:
        after: str | None = None
        while True:
            page = await app.storage.scan(queue.queue, after=after, limit=200)
            for job in page.jobs:
                kept = history.Kept(queue=queue.queue, id=job.id, generation=job.generation, state=job.state)
                history.writer().write(kept)
            after = page.after
            if after is None:
                break
        audit = await app.queue(queue.queue).repair(dry_run=True)
        problems += [f"{queue.queue}: {problem}" for problem in audit.problems]
    totals = {queue.queue: queue.totals for queue in stats}
    return history.Closing(drained_s=0, drained=True, totals=totals, problems=problems, leftovers=[])


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except OSError:
        return "?"
