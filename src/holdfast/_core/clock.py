"""Clocks, and the time of a queue.

A storage reads its wall clock inside each atomic step; tests inject another clock. A wall clock may step back, the time
of a queue never does. Points in time are integer microseconds.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

STEP_BACK_US = 1_000_000
"""Queue time stands still while the clock is behind it by at most this much; more than that is a step back."""
NOTE_AFTER_US = 60_000_000
"""A step that changes nothing notes the time of its queue if the time noted last is a minute old. So a step back of the
clock stretches a delay by at most a minute, and an idle queue costs one write a minute."""
MAX_STEPS = 8
"""Number of steps back that a queue remembers, for absolute times that were due before them."""


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the epoch. May step back."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when `advance` is called. Tests use it instead of sleeping."""

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self._us = round(at * 1_000_000)

    def now_us(self) -> int:
        return self._us

    def advance(self, seconds: float) -> None:
        """Move the clock by `seconds`; a negative number is a step back."""
        self._us += round(seconds * 1_000_000)


class QueueTime(msgspec.Struct):
    """The time of one queue: it follows the storage's clock and never goes back.

    When the clock steps back by S, `skew` grows by S. So every length in queue time (a lease, a backoff, a forget time)
    keeps its length, and a due job stays due. Only an absolute `run_at`, which is wall time, has to move: see `place`.
    """

    last_at: int = 0
    """The latest queue time: it never decreases."""
    last_stamp: int = 0
    """The latest stamp: the next one is higher."""
    skew: int = 0
    """Queue time minus wall time. 0 until the clock first steps back."""
    steps: list[tuple[int, int]] = []
    """Steps back, at most `MAX_STEPS`: the latest stamp before the step, and the highest wall time before it. A later
    step from a higher wall time replaces earlier ones."""

    def tick(self, wall: int) -> int:
        """Take a reading of the wall clock, detect a step back, and return the present queue time."""
        if wall + self.skew < self.last_at - STEP_BACK_US:
            peak = self.last_at - self.skew
            higher = [step for step in self.steps if step[1] > peak]
            self.steps = [*higher, (self.last_stamp, peak)][-MAX_STEPS:]
            self.skew = self.last_at - wall
        self.last_at = max(wall + self.skew, self.last_at)
        return self.last_at

    def stamp(self) -> int:
        """Return a number that no other request or lease of this queue has had: now, or one above the last stamp."""
        self.last_stamp = max(self.last_at, self.last_stamp + 1)
        return self.last_stamp

    def place(self, run_at: int, wall_at: int, set_at: int) -> int:
        """Return the present queue time of a `run_at` that was set at the stamp `set_at`. An absolute one (`wall_at` is
        not 0) moves with every step back, unless the wall clock had reached it before the step: then it was due."""
        if wall_at == 0 or any(set_at <= stamp and wall_at <= peak for stamp, peak in self.steps):
            return run_at
        return wall_at + self.skew
