"""Constants that all processes of a run share, and what the checker must know about the program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

NAMESPACE = "chaos"
HISTORY = "CHAOS_HISTORY"
"""Environment variable with the folder of the history."""
CLOCK = "CHAOS_CLOCK"
"""Environment variable with the file of the shared clock, for SQLite."""
CLOCK_KEY = "chaos:clock"
"""Key of the clock offset on a server, in microseconds: the changed library adds it to the server's time."""
RATE = "CHAOS_RATE"
"""Environment variable with the jobs per second that a producer process asks for."""
PROFILE = "CHAOS_PROFILE"
"""Environment variable with the name of the profile."""

LEASE_S = 3.0
DAY_S = 86_400
BLOCK_S = 5.5
"""How long a handler of the queue `block` blocks its event loop: longer than one and a half leases."""
PERIODICS = 5
UNIQUE_TTL_S = 1
"""How long a completed job of the queue `unique` is remembered: its id runs again after that."""
MIN_BACKOFF_S = 0.05
INLINE_QUEUES = ("plain", "question", "block", "periodic")
"""Queues of inline workers, which cannot kill a run."""
DEADLY = frozenset({"hang", "spin", "crash", "poison"})
"""Kinds of handlers that end their process, and with it the other runs of that process."""
MILD = {"ok": 90, "throw": 3, "permanent": 1, "flaky": 2, "retry": 2, "nothing": 1, "again": 1}
"""Kinds of handlers and their weights, where a run cannot be killed."""
DRAWN = {"ok": 65, "throw": 15, "permanent": 5, "hang": 10, "spin": 3, "crash": 2}
"""Kinds from which a run of the kind `drawn` chooses, each time it runs."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What goes wrong in a run."""

    kinds: Mapping[str, float]
    """Kinds of handlers and their weights, in the queues `work` and `thread`."""
    other_kinds: Mapping[str, float] = field(default_factory=lambda: MILD)
    """The same in the other queues."""
    faults: Mapping[str, float] | None = None
    """Kinds of injected faults, and the mean seconds between two. None stands for all kinds that the storage allows."""
    backlog: int = 300
    """Producers stop while more jobs than this are ready."""
    block_every_s: float = 40
    timeout_s: float = 2
    max_delay_s: float = 3
    """Largest delay of a request."""
    members: tuple[str, ...] = ("fleet", "fleet", "fleet", "inline", "pull", "produce", "produce", "call")
    """Roles of the processes. A process that is killed is replaced."""


PROFILES = {
    "all": Profile(kinds=MILD | {"fork": 0.1, "leak": 0.1, "hang": 0.06, "spin": 0.06, "crash": 0.08, "poison": 0.05}),
    "handlers": Profile(
        kinds={"drawn": 1},
        other_kinds={"drawn": 1},
        faults={"worker kill": 6},
        backlog=25,
        block_every_s=float("inf"),
        timeout_s=0.5,
        members=("fleet", "fleet", "fleet", "pull", "produce", "call"),
    ),
}


def profile() -> Profile:
    return PROFILES[os.environ.get(PROFILE, "all")]


class Limits(NamedTuple):
    """How often a job may fail in each way before it fails for good."""

    retries: int
    stalls: int
    timeouts: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the checker must know about the queues."""

    lease_s: float = LEASE_S
    queues: tuple[str, ...] = (
        *("work", "plain", "thread", "question", "single", "block", "periodic", "unique", "once", "pulled"),
    )
    singletons: frozenset[str] = frozenset({"single", "periodic"})
    at_most_once: frozenset[str] = frozenset({"once"})
    forgetting: frozenset[str] = frozenset({"question", "unique"})
    """Queues whose outcomes may be gone at the end of the run."""
    one_at_a_time: frozenset[str] = frozenset({"block"})
    """Queues with concurrency 1, in which a ready job may wait for long."""
    limits: Mapping[str, Limits] = field(
        default_factory=lambda: {
            **dict.fromkeys(("work", "plain", "thread", "question", "single", "periodic", "unique"), Limits(3, 4, 2)),
            "once": Limits(0, 0, 0),
        }
    )

    @property
    def grace_s(self) -> float:
        """An expired lease is taken back this long after a sweep first sees it."""
        return self.lease_s / 2

    @property
    def swept_s(self) -> float:
        """How long after its worker died a job is taken back at the latest."""
        return 1.5 * self.lease_s

    @property
    def starved_s(self) -> float:
        """A queue with ready jobs must have a claim within this time. Busy machines start workers slowly."""
        return 10 * self.lease_s


def ending() -> Path:
    """The file whose existence ends the producers and callers."""
    return Path(os.environ[CLOCK] + ".ending")
