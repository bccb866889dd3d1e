"""What is done to those who take part: each kind of fault strikes by itself, at its own times, by a lot of its own."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos import history, wreck
from chaos.places import ServerPlace, SqlitePlace
from chaos.setting import LEASE_S
from tests.processes import parents, send

EVERY_S = {
    "worker kill": 2.2,
    "child kill": 2.2,
    "worker freeze": 13,
    "tree freeze": 20,
    "child freeze": 20,
    "clock jump": 23,
    "cut": 0.8,
    "delay": 1.0,
    "truncate": 1.0,
    "silence": 2.5,
    "server kill": 13,
    "server pause": 19,
    "script flush": 11,
    "full memory": 14,
    "file locked": 14,
}
"""How often it strikes, on the average."""
CLOCK_STEP_S = 3600.0
OLD_ENOUGH_S = 2.0
"""Whoever has been there for so long may be struck."""
AFTER_S = 2.0
"""A wreck that waits for bytes happens to an idle connection after so long."""


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

    def children(self) -> list[int]:
        return [pid for pid, parent in parents().items() if parent == self.pid]


class Nemesis:
    """Strikes until it is told to rest. All that it does is in the history."""

    def __init__(self, seed: int, place: SqlitePlace | ServerPlace, players: list[Player]) -> None:
        self._seed = seed
        self._place = place
        self._players = players
        self._offset_s = 0.0
        self._storage = asyncio.Lock()
        """One thing at a time is done to the storage."""
        self._resting = False
        self.faults: Counter[str] = Counter()
        self._strikes: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {
            "worker kill": self._kill_worker,
            "child kill": self._kill_child,
            "worker freeze": self._freeze,
            "tree freeze": self._freeze,
            "child freeze": self._freeze,
            "clock jump": self._jump,
            **dict.fromkeys(place.faults, self._hurt),
            **(dict.fromkeys(wreck.KINDS, self._wreck) if isinstance(place, ServerPlace) else {}),
        }

    async def strike(self) -> None:
        """Until it rests."""
        await asyncio.gather(*map(self._strike_again_and_again, self._strikes))

    def rest(self) -> None:
        self._resting = True

    async def _strike_again_and_again(self, kind: str) -> None:
        rng = random.Random(f"{self._seed} {kind}")
        every_s = EVERY_S[kind]
        next_at = time.monotonic() + rng.uniform(0, every_s)
        while not self._resting:
            await asyncio.sleep(min(max(next_at - time.monotonic(), 0), 0.2))
            if not self._resting and time.monotonic() >= next_at:
                next_at = max(next_at + rng.uniform(0.5, 1.5) * every_s, time.monotonic())
                await self._strikes[kind](kind, rng)

    def _note(self, kind: str, at: float, until: float, target: int = 0, detail: str = "") -> None:
        self.faults[kind] += 1
        history.pen().write(history.Fault(kind=kind, at=at, until=until, target=target, detail=detail))

    def _victims(self, *roles: str) -> list[Player]:
        """Those who have been there for a while, and are not frozen already."""
        since = time.monotonic() - OLD_ENOUGH_S
        found = [player for player in self._players if player.began < since and not player.frozen]
        return [player for player in found if player.role in roles or not roles]

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
        choices = [step for step in (-CLOCK_STEP_S, CLOCK_STEP_S) if abs(self._offset_s + step) <= CLOCK_STEP_S]
        async with self._storage:
            self.set_clock(self._offset_s + rng.choice(choices))

    def set_clock(self, offset_s: float) -> None:
        at = time.monotonic()
        self._offset_s = offset_s
        self._place.set_clock(offset_s)
        self._note("clock jump", at, at, detail=f"{offset_s:+.0f} s")

    async def _hurt(self, kind: str, rng: random.Random) -> None:
        seconds = rng.choice((0.3, 1, LEASE_S, 1.7 * LEASE_S)) if kind in ("server pause", "file locked") else 0.5
        async with self._storage:
            at = time.monotonic()
            until = await self._place.hurt(kind, seconds * rng.uniform(0.7, 1.3))
            self._note(kind, at, until)

    async def _wreck(self, kind: str, rng: random.Random) -> None:
        found = [(player, passage) for player in self._players if player.gate for passage in player.gate.passages]
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
        asyncio.get_running_loop().call_later(AFTER_S, passage.give_up_waiting, passage.wreck)
