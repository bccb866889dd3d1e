"""What a child's event loop is at, in memory that its parent shares: who blocked it, and what had not even begun."""

from __future__ import annotations

import mmap
import os
import sys

F_SEAL_FUTURE_WRITE = 0x10


class LoopProbe:
    """Which run an event loop is at, and which it has begun, in memory that parent and child share: it can be read when
    the loop is blocked, and when its process can do nothing more at all.

    The memory is sealed: a handler that writes to every file descriptor, or truncates it, must not change what is told
    of it. Where there are no seals (Linux has them) there is no page, and nothing is known.
    """

    SIZE = 24

    def __init__(self, page: mmap.mmap | None) -> None:
        self._page = page
        self._bytes = None if page is None else memoryview(page)
        self._now = None if self._bytes is None else self._bytes.cast("Q")

    def begin(self, number: int) -> None:
        """A step of run `number` begins. Runs have rising numbers, and begin in that order."""
        now = self._now
        if now is not None:
            now[1] += 1
            now[0] = number
            if number > now[2]:
                now[2] = number

    def end(self) -> None:
        if self._now is not None:
            self._now[0] = 0

    def read(self) -> tuple[int, int]:
        """The run whose step is going on, 0 if none is; and which step that is."""
        return (0, 0) if self._now is None else (self._now[0], self._now[1])

    def has_begun(self, number: int) -> bool:
        """Has this run begun? It has, if nobody knows."""
        return self._now is None or number <= self._now[2]

    def close(self) -> None:
        if self._now is not None and self._bytes is not None and self._page is not None:
            self._now.release()
            self._bytes.release()
            self._page.close()
            self._now = self._bytes = self._page = None


def share_page() -> tuple[int, LoopProbe]:
    """In the parent: memory to share with a child, as a file descriptor to give it (-1 if there can be none) and as
    what is read from it."""
    if sys.platform != "linux":
        return -1, LoopProbe(None)
    import fcntl

    page = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(page, LoopProbe.SIZE)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return page, LoopProbe(mmap.mmap(page, LoopProbe.SIZE, access=mmap.ACCESS_READ))
    except BaseException:
        os.close(page)
        raise


def map_page(page: int) -> LoopProbe:
    """In the child: the page to write to, which from now on is written to in no other way."""
    if page < 0 or sys.platform != "linux":
        return LoopProbe(None)
    import fcntl

    steps = LoopProbe(mmap.mmap(page, LoopProbe.SIZE))
    try:
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # An old kernel. What could be overwritten is not to be relied on.
        steps.begin(2**63)  # As far as anybody can tell, everything has begun.
        steps.end()
        steps.close()
    os.close(page)
    return steps
