"""Sets the scene, lets the nemesis loose, waits until all is quiet, and writes down what is left."""

from __future__ import annotations

import asyncio
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

from chaos import history, places, recorded, wreck
from chaos.nemesis import Nemesis, Player
from chaos.places import ServerPlace
from chaos.setting import CLOCK, HISTORY, LEASE_S, NAMESPACE, QUEUES, RATE, SERVED_INLINE, ending
from holdfast import Holdfast, HoldfastError
from holdfast._core.events import EventKind, Topic
from tests.processes import MARK, marked, send

ROOT = Path(__file__).parents[1]
PERIODICS = 5
DRAIN_S = 60.0
WORKER = ("-m", "chaos.launch", "worker", "chaos.tasks:app", "--lease", str(LEASE_S), "--grace", "2")
FLEET = (*WORKER, "--processes", "2", "--max-memory", "200M", "--log-level", "warning")
INLINE = (*WORKER, "--inline", "--log-level", "warning")
CAST = ("fleet", "fleet", "fleet", "inline", "pull", "produce", "produce", "call")
"""Who takes part. Whoever is killed is replaced."""
RATE_JOBS = 200


@dataclass
class Plan:
    storage: str
    seconds: float | None
    jobs: int | None
    seed: int
    folder: Path
    """Where the history and everything else of the run is."""


@dataclass
class Director:
    plan: Plan
    show: Callable[[str], None]
    players: list[Player] = field(default_factory=list)

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
            MARK: self.mark,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        os.environ.update(self.environment)
        self.place = places.make(self.plan.storage, self.plan.folder, self.clock)
        self.server = self.place.about
        self.asked = 0
        self.ended = 0
        self.number = 0
        self.log = (self.plan.folder / "output.log").open("wb")

    # The play

    async def run(self) -> None:
        """The whole run. The history is complete at its end."""
        recorded.install()
        self.app: Holdfast[Any] = Holdfast(self.place.url, namespace=NAMESPACE)
        try:
            async with self.app:
                await self._plan_periodic()
                for role in CAST:
                    await self._enter(role)
                self.nemesis = Nemesis(self.plan.seed, self.place, self.players)
                await asyncio.sleep(3)  # Until they are there.
                background = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
                await self._chaos()
                began = time.monotonic()
                drained = await self._drain()
                exits = await self._leave()
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await self._close(time.monotonic() - began if drained is None else drained, drained is not None, exits)
        finally:
            for pid in self._others():
                send(pid)
            for player in self.players:
                player.process.wait(10)
            self.place.close()
            self.log.close()

    async def _plan_periodic(self) -> None:
        for key in range(PERIODICS):
            payload = {"key": key, "number": 0, "token": f"{0:012x}"}
            await self.app.queue("periodic").enqueue(payload, id=f"p{key}", on_conflict="update", result_ttl=86_400)

    async def _enter(self, role: str) -> None:
        self.number += 1
        gate: wreck.Gate | None = None
        url = self.place.url
        if isinstance(self.place, ServerPlace):
            gate = wreck.Gate(self.place.server.port)
            await gate.open()
            url = self.place.url_by(gate.port)
        name = ("--name", f"{role}-{self.number}")
        queues = [word for queue in SERVED_INLINE for word in ("--queues", queue)]
        args: tuple[str, ...] = ("-m", "chaos.actors", role, f"{self.plan.seed} {self.number}")
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
        self.players.append(Player(role, process, gate, time.monotonic()))

    async def _chaos(self) -> None:
        """Until the run is long enough."""
        striking = asyncio.create_task(self.nemesis.strike())
        replacing = asyncio.create_task(self._replace())
        until = time.monotonic() + (self.plan.seconds or 1e9)
        try:
            while time.monotonic() < until and (self.plan.jobs is None or self.asked < self.plan.jobs):
                await asyncio.sleep(0.1)
                for task in (striking, replacing):
                    if task.done():
                        task.result()
        finally:
            self.nemesis.rest()
            await striking  # Whoever is frozen is thawed, and what was hurt is mended.
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)

    async def _replace(self) -> None:
        """Whoever is gone is replaced at once."""
        while True:
            for player in list(self.players):
                if player.process.poll() is not None:
                    await self._exit(player)
                    await self._enter(player.role)
            await asyncio.sleep(0.05)

    async def _exit(self, player: Player) -> None:
        self.players.remove(player)
        if player.gate is not None:
            await player.gate.close()

    # Looking on

    async def _watch(self) -> None:
        """Progress, for whoever looks on."""
        began = time.monotonic()
        while True:
            with suppress(HoldfastError):
                stats = await self.app.stats()
                totals = [queue.totals for queue in stats.queues if not queue.queue.endswith("/failed")]
                self.asked = sum(total.get("enqueued", 0) + total.get("promoted", 0) for total in totals)
                self.ended = sum(total.get(end, 0) for total in totals for end in ("completed", "failed", "cancelled"))
                live = sum(queue.ready + queue.running for queue in stats.queues)
                faults = ", ".join(f"{kind} {count}" for kind, count in self.nemesis.faults.items())
                self.show(f"{time.monotonic() - began:5.0f} s  {self.asked} jobs, {live} live  {faults}")
            await asyncio.sleep(2)

    async def _listen(self) -> None:
        """Write down when jobs are taken back from those who are gone."""
        names = [*QUEUES, *(f"{queue}/failed" for queue in QUEUES)]
        while True:
            with suppress(HoldfastError):
                async with self.app.storage.subscribe(*(Topic(name, "all") for name in names)) as events:
                    async for event in events:
                        if event.kind is EventKind.STALLED:
                            history.pen().write(history.Stalled(queue=event.queue, id=event.id))
            await asyncio.sleep(0.2)

    # The end

    async def _drain(self) -> float | None:
        """Ask for nothing more, and wait until all is done: how long that took, None if it did not end."""
        self.nemesis.set_clock(0)
        ending().touch()
        began = time.monotonic()
        while time.monotonic() < began + DRAIN_S:
            with suppress(HoldfastError):
                stats = await self.app.stats()
                if not any(queue.ready + queue.scheduled + queue.running for queue in stats.queues):
                    return time.monotonic() - began
            for player in list(self.players):
                if player.process.poll() is not None and player.role in ("fleet", "inline", "pull"):
                    await self._exit(player)
                    await self._enter(player.role)  # A handler may have taken it along.
            await asyncio.sleep(0.1)
        return None

    async def _leave(self) -> list[str]:
        """Everybody is asked to go. Who did not go in time, or was in trouble."""
        wrong: list[str] = []
        for player in self.players:
            if player.process.poll() is None and player.role in ("fleet", "inline", "pull"):
                player.process.terminate()
        until = time.monotonic() + 20
        for player in self.players:
            while player.process.poll() is None and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if player.process.poll() is None:
                wrong.append(f"{player.role} {player.pid} did not go")
            elif player.process.returncode not in (0, -signal.SIGTERM if player.role == "pull" else 0):
                wrong.append(f"{player.role} {player.pid} ended with {player.process.returncode}")
            if player.gate is not None:
                await player.gate.close()
        return wrong

    async def _close(self, drained_s: float, drained: bool, wrong: list[str]) -> None:
        """Write down what the storage has in the end, and what is left when that is gone."""
        until = time.monotonic() + 5
        while (left := self._others()) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        leftovers = [f"a process {pid}: {_command_of(pid)}" for pid in left]
        problems: list[str] = []
        stats = await self.app.stats()
        totals = {queue.queue: queue.totals for queue in stats.queues}
        for queue in stats.queues:
            await self._keep(queue.queue)
            audit = await self.app.queue(queue.queue).repair(dry_run=True)
            problems += [f"{queue.queue}: {problem}" for problem in audit.problems]
        for queue in stats.queues:
            await self.app.queue(queue.queue).delete(wait=60)
        async with Holdfast(self.place.url, namespace=NAMESPACE) as last, last.storage.subscribe(Topic("work")):
            pass  # Whoever listens next clears away what the dead have left beside a file.
        await self.app.__aexit__(None, None, None)
        leftovers += self.place.leftovers()
        await self.app.__aenter__()
        history.pen().write(
            history.Closing(
                drained_s=drained_s,
                drained=drained,
                totals=totals,
                problems=problems,
                leftovers=leftovers,
                exits=wrong,
            )
        )

    def _others(self) -> list[int]:
        """All processes of this run but our own."""
        return [pid for pid in marked(self.mark) if pid != os.getpid()]

    async def _keep(self, queue: str) -> None:
        after: str | None = None
        while True:
            page = await self.app.storage.scan(queue, after=after, limit=200)
            for job in page.jobs:
                previous = 0 if job.previous is None else job.previous.generation
                kept = history.Kept(
                    queue=queue, id=job.id, generation=job.generation, state=job.state, previous=previous
                )
                history.pen().write(kept)
            after = page.after
            if after is None:
                return


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
    except OSError:
        return "?"
