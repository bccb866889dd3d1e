"""Sets the scene, lets the nemesis loose, waits until all is quiet, and writes down what is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import Holdfast, HoldfastError
from holdfast.events import Kind, Topic
from tests.chaos import history, places, recorded, wreck
from tests.chaos.places import ServerPlace
from tests.chaos.setting import CLOCK, HISTORY, LEASE_S, NAMESPACE, QUEUES, RATE, SERVED_INLINE, ending
from tests.processes import MARK, marked, parents, send

ROOT = Path(__file__).parents[2]
PERIODICS = 5
DRAIN_S = 60.0
WORKER = ("-m", "tests.chaos.launch", "worker", "tests.chaos.tasks:app", "--lease", str(LEASE_S), "--grace", "2")
FLEET = (*WORKER, "--processes", "2", "--max-memory", "200M", "--log-level", "warning")
INLINE = (*WORKER, "--inline", "--log-level", "warning")
CAST = ("fleet", "fleet", "fleet", "inline", "pull", "produce", "produce", "call")
"""Who takes part. Whoever is killed is replaced."""
EVERY_S = {
    "worker kill": 2.3,
    "child kill": 2.3,
    "worker freeze": 13,
    "tree freeze": 20,
    "child freeze": 20,
    "clock jump": 17,
    "cut": 0.9,
    "delay": 1.2,
    "truncate": 1.2,
    "silence": 2.5,
    "server kill": 15,
    "server pause": 19,
    "script flush": 11,
    "full memory": 14,
    "file locked": 9,
}
"""How often the nemesis strikes, on the average."""
CLOCK_STEP_S = 3600.0
RATE_JOBS = 200


@dataclass(eq=False)
class Player:
    """Somebody who takes part."""

    role: str
    process: subprocess.Popen[bytes]
    gate: wreck.Gate | None
    began: float
    frozen: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def age(self) -> float:
        return time.monotonic() - self.began

    def children(self) -> list[int]:
        return [pid for pid, parent in parents().items() if parent == self.pid]


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
    faults: Counter[str] = field(default_factory=Counter)
    players: list[Player] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.plan.seed)
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
        self.offset_s = 0.0
        self.number = 0
        self.resting = False
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
        args: tuple[str, ...] = ("-m", "tests.chaos.actors", role, f"{self.plan.seed} {self.number}")
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
        """Every kind of fault strikes by itself, at its own times, until the run is long enough."""
        kinds = ["worker kill", "child kill", "worker freeze", "tree freeze", "child freeze", "clock jump"]
        kinds += self.place.faults
        if isinstance(self.place, ServerPlace):
            kinds += wreck.KINDS
        storage_busy = asyncio.Lock()
        loops = [asyncio.create_task(self._strike_again_and_again(kind, storage_busy)) for kind in kinds]
        loops.append(asyncio.create_task(self._replace()))
        until = time.monotonic() + (self.plan.seconds or 1e9)
        try:
            while time.monotonic() < until and (self.plan.jobs is None or self.asked < self.plan.jobs):
                await asyncio.sleep(0.1)
                for loop in loops:
                    if loop.done():
                        loop.result()
        finally:
            self.resting = True
            *strikes, replacing = loops
            await asyncio.gather(*strikes)
            replacing.cancel()
            await asyncio.gather(replacing, return_exceptions=True)

    async def _strike_again_and_again(self, kind: str, storage_busy: asyncio.Lock) -> None:
        rng = random.Random(f"{self.plan.seed} {kind}")
        every_s = EVERY_S[kind]
        next_at = time.monotonic() + rng.uniform(0, every_s)
        while not self.resting:
            await asyncio.sleep(min(max(next_at - time.monotonic(), 0), 0.2))
            if self.resting or time.monotonic() < next_at:
                continue
            next_at = max(next_at + rng.uniform(0.5, 1.5) * every_s, time.monotonic())
            if kind in (*self.place.faults, "clock jump"):
                async with storage_busy:
                    await self._strike(kind, rng)
            else:
                await self._strike(kind, rng)

    async def _strike(self, kind: str, rng: random.Random) -> None:
        strike = self._strikes.get(kind)
        if strike is not None:
            await strike(self, kind, rng)
        elif kind in wreck.KINDS:
            await self._wreck(kind, rng)
        else:
            await self._hurt(kind, rng)

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

    # What the nemesis does

    def _note(self, kind: str, at: float, until: float, target: int = 0, detail: str = "") -> None:
        self.faults[kind] += 1
        history.pen().write(history.Fault(kind=kind, at=at, until=until, target=target, detail=detail))

    def _victims(self, *roles: str) -> list[Player]:
        """Those who have been there for a while, and are not frozen already."""
        return [
            player
            for player in self.players
            if (player.role in roles or not roles) and player.age > 2 and not player.frozen
        ]

    async def _kill_worker(self, kind: str, rng: random.Random) -> None:
        victims = self._victims()
        if victims:
            victim = rng.choices(victims, [3 if player.role == "fleet" else 1 for player in victims])[0]
            at = time.monotonic()
            victim.process.kill()
            self._note(kind, at, at, victim.pid, victim.role)

    async def _kill_child(self, kind: str, rng: random.Random) -> None:
        children = [pid for player in self._victims("fleet") for pid in player.children()]
        if children:
            victim = rng.choice(children)
            at = time.monotonic()
            if send(victim):
                self._note(kind, at, at, victim)

    async def _freeze(self, kind: str, rng: random.Random) -> None:
        """Stop a worker, one of its children, or all of it for longer than a lease."""
        victims = self._victims("fleet", "inline", "pull") if kind == "worker freeze" else self._victims("fleet")
        if not victims:
            return
        victim = rng.choice(victims)
        children = victim.children()
        match kind:
            case "worker freeze":
                pids = [victim.pid]
            case "tree freeze":
                pids = [victim.pid, *children]
            case _:
                pids = [rng.choice(children)] if children else []
        if not pids:
            return
        victim.frozen = kind != "child freeze"
        at = time.monotonic()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * rng.uniform(1.1, 2.2))
        for pid in reversed(pids):
            send(pid, signal.SIGCONT)
        victim.frozen = False
        for pid in pids:
            self._note(kind, at, time.monotonic(), pid, victim.role)
        self.faults[kind] -= len(pids) - 1

    async def _jump(self, kind: str, rng: random.Random) -> None:
        choices = [step for step in (-CLOCK_STEP_S, CLOCK_STEP_S) if abs(self.offset_s + step) <= CLOCK_STEP_S]
        self.offset_s += rng.choice(choices)
        at = time.monotonic()
        self.place.set_clock(self.offset_s)
        self._note(kind, at, at, detail=f"{self.offset_s:+.0f} s")

    async def _hurt(self, kind: str, rng: random.Random) -> None:
        seconds = rng.choice((0.3, 1, LEASE_S, 1.7 * LEASE_S)) if kind in ("server pause", "file locked") else 0.5
        at = time.monotonic()
        until = await self.place.hurt(kind, seconds * rng.uniform(0.7, 1.3))
        self._note(kind, at, until)

    async def _wreck(self, kind: str, rng: random.Random) -> None:
        found = [(player, passage) for player in self.players if player.gate for passage in player.gate.passages]
        found = [(player, passage) for player, passage in found if passage.wreck is None and not passage.silent]
        if not found:
            return
        player, passage = rng.choice(found)

        def done(until: float) -> None:
            now = time.monotonic()
            self._note(kind, now, now + (until - asyncio.get_running_loop().time()), player.pid, player.role)

        seconds = rng.uniform(0.05, 1.5) if kind == "delay" else rng.uniform(1, 2 * LEASE_S)
        passage.wreck = wreck.Wreck(
            kind=kind,  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
            to_server=rng.random() < 0.5,
            bytes_left=rng.choice((0, rng.randrange(200), rng.randrange(5_000))),
            seconds=seconds,
            done=done,
        )
        asyncio.get_running_loop().call_later(2, passage.give_up_waiting, passage.wreck)

    _strikes: dict[str, Callable[[Director, str, random.Random], Coroutine[Any, Any, None]]] = field(
        default_factory=lambda: {
            "worker kill": Director._kill_worker,
            "child kill": Director._kill_child,
            "worker freeze": Director._freeze,
            "tree freeze": Director._freeze,
            "child freeze": Director._freeze,
            "clock jump": Director._jump,
        }
    )

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
                faults = ", ".join(f"{kind} {count}" for kind, count in self.faults.items())
                self.show(f"{time.monotonic() - began:5.0f} s  {self.asked} jobs, {live} live  {faults}")
            await asyncio.sleep(2)

    async def _listen(self) -> None:
        """Write down when jobs are taken back from those who are gone."""
        names = [*QUEUES, *(f"{queue}/failed" for queue in QUEUES)]
        while True:
            with suppress(HoldfastError):
                async with self.app.storage.subscribe(*(Topic(name, "all") for name in names)) as events:
                    async for event in events:
                        if event.kind is Kind.STALLED:
                            history.pen().write(history.Stalled(queue=event.queue, id=event.id))
            await asyncio.sleep(0.2)

    # The end

    async def _drain(self) -> float | None:
        """Ask for nothing more, and wait until all is done: how long that took, None if it did not end."""
        self.place.set_clock(0)
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
