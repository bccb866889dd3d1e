"""Clocks, and the time of a queue.

A storage reads one wall clock inside each atomic step; tests inject theirs. A wall clock may step back,
the time of a queue never does: see `QueueTime`. Points in time are integer microseconds.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

STEP_BACK_US = 1_000_000
"""A clock that falls back by more than this has stepped; by less, it is waited out."""
MAX_STEPS = 8
"""Steps back that a queue remembers, for absolute times that were due before them."""


class Clock(Protocol):
    def now_us(self) -> int:
        """Microseconds since the epoch. May step back."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000


class ManualClock:
    """A clock that moves only when `advance` is called: tests inject it instead of sleeping.

    >>> clock = ManualClock(at=5.0)
    >>> clock.advance(1.5)
    >>> clock.now_us()
    6500000
    """

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self._us = round(at * 1_000_000)

    def now_us(self) -> int:
        return self._us

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`; a negative number is a clock that steps back."""
        self._us += round(seconds * 1_000_000)


class QueueTime(msgspec.Struct):
    """The time of one queue: it follows the storage's clock and never goes back.

    When the clock steps back by S, `skew` grows by S. Every length counted in queue time (a lease, a backoff,
    a forget time) so lasts exactly as long as it should, and what was due stays due, with nothing rewritten.
    Only an absolute `run_at`, the caller's word in wall time, must be moved along: `place`.
    """

    last_at: int = 0
    """The newest reading: queue time never falls below it."""
    last_stamp: int = 0
    """The newest stamp: the next one is higher."""
    skew: int = 0
    """Queue time minus wall time. 0 until the clock first steps back."""
    steps: list[tuple[int, int]] = []
    """Steps back: the newest stamp by then, and the highest that the wall clock had read. Only those that were higher
    than all later ones, the newest `MAX_STEPS`."""

    def tick(self, wall: int) -> int:
        """Begin a step: take the clock's reading, notice a step back, return the queue's now."""
        if wall + self.skew < self.last_at - STEP_BACK_US:
            peak = self.last_at - self.skew
            higher = [step for step in self.steps if step[1] > peak]
            self.steps = [*higher, (self.last_stamp, peak)][-MAX_STEPS:]
            self.skew = self.last_at - wall
        self.last_at = max(wall + self.skew, self.last_at)
        return self.last_at

    def stamp(self) -> int:
        """A number that no other request or lease of this queue has or had: now, or one more than the last."""
        self.last_stamp = max(self.last_at, self.last_stamp + 1)
        return self.last_stamp

    def place(self, run_at: int, wall_at: int, set_at: int) -> int:
        """Where a time that was set at the stamp `set_at` stands now. An absolute one (`wall_at` is not 0) moves with
        every step back, so that it follows the wall, unless the wall had shown it before the step: then it was due."""
        if wall_at == 0 or any(set_at <= stamp and wall_at <= peak for stamp, peak in self.steps):
            return run_at
        return wall_at + self.skew
