"""Injects faults into the processes and the storage of a run. Each kind has its own times and random numbers."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos import history
from chaos.backends import ServerBackend, SqliteBackend
from chaos.faulty_proxy import KINDS, ConnectionFault, FaultyProxy
from chaos.settings import LEASE_S, profile
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
"""Mean time between two faults of a kind."""
CLOCK_STEP_S = 3600.0
OLD_ENOUGH_S = 2.0
"""Only processes of at least this age get faults."""
AFTER_S = 2.0
"""A fault that waits for bytes is applied to an idle connection after this time."""


@dataclass(eq=False)
class Member:
    """A process of the run."""

    role: str
    process: subprocess.Popen[bytes]
    proxy: FaultyProxy | None
    began: float
    frozen: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        return [pid for pid, parent in parents().items() if parent == self.pid]


class FaultInjector:
    """Injects faults until it is stopped, and records them in the history."""

    def __init__(self, seed: int, backend: SqliteBackend | ServerBackend, members: list[Member]) -> None:
        self._seed = seed
        self._backend = backend
        self._members = members
        self._offset_s = 0.0
        self._backend_lock = asyncio.Lock()
        """The storage has one fault at a time."""
        self._stopped = False
        self.faults: Counter[str] = Counter()
        self._actions: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {
            "worker kill": self._kill_worker,
            "child kill": self._kill_child,
            "worker freeze": self._freeze,
            "tree freeze": self._freeze,
            "child freeze": self._freeze,
            "clock jump": self._jump,
            **dict.fromkeys(backend.faults, self._disturb_backend),
            **(dict.fromkeys(KINDS, self._fault_connection) if isinstance(backend, ServerBackend) else {}),
        }

    async def run(self) -> None:
        """Inject faults until `stop`."""
        wanted = profile().faults
        await asyncio.gather(*(self._repeat(kind) for kind in self._actions if wanted is None or kind in wanted))

    def stop(self) -> None:
        self._stopped = True

    async def _repeat(self, kind: str) -> None:
        rng = random.Random(f"{self._seed} {kind}")
        every_s = (profile().faults or EVERY_S)[kind]
        next_at = time.monotonic() + rng.uniform(0, every_s)
        while not self._stopped:
            await asyncio.sleep(min(max(next_at - time.monotonic(), 0), 0.2))
            if not self._stopped and time.monotonic() >= next_at:
                next_at = max(next_at + rng.uniform(0.5, 1.5) * every_s, time.monotonic())
                await self._actions[kind](kind, rng)

    def _record(self, kind: str, at: float, until: float, target: int = 0, detail: str = "") -> None:
        self.faults[kind] += 1
        history.writer().write(history.Fault(kind=kind, at=at, until=until, target=target, detail=detail))

    def _candidates(self, *roles: str) -> list[Member]:
        """Processes that are old enough and not frozen."""
        since = time.monotonic() - OLD_ENOUGH_S
        found = [member for member in self._members if member.began < since and not member.frozen]
        return [member for member in found if member.role in roles or not roles]

    async def _kill_worker(self, kind: str, rng: random.Random) -> None:
        candidates = self._candidates()
        if candidates:
            chosen = rng.choices(candidates, [3 if member.role == "fleet" else 1 for member in candidates])[0]
            at = time.monotonic()
            chosen.process.kill()
            self._record(kind, at, at, chosen.pid, chosen.role)

    async def _kill_child(self, kind: str, rng: random.Random) -> None:
        children = [pid for member in self._candidates("fleet") for pid in member.children()]
        if children:
            chosen = rng.choice(children)
            at = time.monotonic()
            if send(chosen):
                self._record(kind, at, at, chosen)

    async def _freeze(self, kind: str, rng: random.Random) -> None:
        """Stop a worker, one of its children, or both for longer than a lease."""
        candidates = (
            self._candidates("fleet", "inline", "pull") if kind == "worker freeze" else self._candidates("fleet")
        )
        if not candidates:
            return
        chosen = rng.choice(candidates)
        children = chosen.children()
        match kind:
            case "worker freeze":
                pids = [chosen.pid]
            case "tree freeze":
                pids = [chosen.pid, *children]
            case _:
                pids = [rng.choice(children)] if children else []
        if not pids:
            return
        chosen.frozen = kind != "child freeze"
        at = time.monotonic()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * rng.uniform(1.1, 2.2))
        for pid in reversed(pids):
            send(pid, signal.SIGCONT)
        chosen.frozen = False
        for pid in pids:
            self._record(kind, at, time.monotonic(), pid, chosen.role)
        self.faults[kind] -= len(pids) - 1

    async def _jump(self, kind: str, rng: random.Random) -> None:
        choices = [step for step in (-CLOCK_STEP_S, CLOCK_STEP_S) if abs(self._offset_s + step) <= CLOCK_STEP_S]
        async with self._backend_lock:
            self.set_clock(self._offset_s + rng.choice(choices))

    def set_clock(self, offset_s: float) -> None:
        at = time.monotonic()
        self._offset_s = offset_s
        self._backend.set_clock(offset_s)
        self._record("clock jump", at, at, detail=f"{offset_s:+.0f} s")

    async def _disturb_backend(self, kind: str, rng: random.Random) -> None:
        seconds = rng.choice((0.3, 1, LEASE_S, 1.7 * LEASE_S)) if kind in ("server pause", "file locked") else 0.5
        async with self._backend_lock:
            at = time.monotonic()
            until = await self._backend.apply(kind, seconds * rng.uniform(0.7, 1.3))
            self._record(kind, at, until)

    async def _fault_connection(self, kind: str, rng: random.Random) -> None:
        found = [
            (member, connection)
            for member in self._members
            if member.proxy
            for connection in member.proxy.connections
            if connection.fault is None and not connection.silent
        ]
        if not found:
            return
        member, connection = rng.choice(found)

        def on_done(until: float) -> None:
            now = time.monotonic()
            self._record(kind, now, now + (until - asyncio.get_running_loop().time()), member.pid, member.role)

        seconds = rng.uniform(0.05, 1.5) if kind == "delay" else rng.uniform(1, 2 * LEASE_S)
        connection.fault = ConnectionFault(
            kind=kind,  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
            to_server=rng.random() < 0.5,
            bytes_left=rng.choice((0, rng.randrange(200), rng.randrange(5_000))),
            seconds=seconds,
            on_done=on_done,
        )
        asyncio.get_running_loop().call_later(AFTER_S, connection.apply_when_idle, connection.fault)
