"""A clock that several processes share, and that a test can step while they run."""

from __future__ import annotations

import mmap
import os
import time

PATH = "HOLDFAST_TEST_CLOCK"
"""Names the file of the clock, in the environment of processes that are to read it."""


class SharedClock:
    """The system's clock plus an offset in a file of eight bytes: a step is seen at once by all who have the file open.

    On SQLite it is read inside each transaction. On Redis and Valkey every client sends its reading with the call, so
    one that was on its way during a step arrives with the time before it; a test that must avoid this stops all
    calls for a moment.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "a+b") as file:
            if os.fstat(file.fileno()).st_size < 8:
                file.truncate(8)
            self._offset_us = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def now_us(self) -> int:
        return time.time_ns() // 1000 + self._offset_us[0]

    def advance(self, seconds: float) -> None:
        """Step by `seconds`, back if that is negative. One process at a time may do this."""
        self._offset_us[0] += round(seconds * 1_000_000)

    def set(self, offset_s: float) -> None:
        """Set the offset."""
        self._offset_us[0] = round(offset_s * 1_000_000)


def clock_of_the_test() -> SharedClock | None:
    """The clock of the file in the environment variable, if it is set."""
    path = os.environ.get(PATH)
    return None if path is None else SharedClock(path)
