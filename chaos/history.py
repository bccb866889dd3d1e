"""What happened, as those who were there wrote it down: outside of the storage, each process in a file of its own.

A line is written in one go before its process goes on, so a process that is killed leaves all that it has seen. All
times are of the host's monotonic clock, which its processes share; fences, generations and `run_at` are stamps of the
storage. Something that may not come to an end is written twice: as it begins, and as it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaos.setting import HISTORY


class Line(msgspec.Struct, tag_field="what", omit_defaults=True, kw_only=True):
    at: float = 0.0
    pid: int = 0


class Beginning(Line):
    call: int


class Ending(Line):
    """What became of the beginning with the same number, in the same process."""

    call: int


class Asking(Beginning, tag="asking"):
    """An enqueue is sent."""

    queue: str
    ids: list[str]
    tokens: list[str]
    """One of each payload: what its run must get to see."""
    delays_ms: list[int] = []
    run_ats: list[int] = []
    """Wall times that were asked for; 0 where there was none."""
    priorities: list[int] = []
    updates: bool = False
    waits: bool = False


class Asked(Ending, tag="asked"):
    """An enqueue was answered: what was done, and which generation it is."""

    placed: list[str] = []
    generations: list[int] = []
    error: str = ""


class Claiming(Beginning, tag="claiming"):
    queue: str
    worker: str


class Claim(msgspec.Struct, array_like=True):
    id: str
    generation: int
    fence: int
    run_at: int
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    priority: int


class Claimed(Ending, tag="claimed"):
    claims: list[Claim] = []
    error: str = ""


class Started(Line, tag="started"):
    """A handler begins."""

    queue: str
    id: str
    generation: int
    fence: int
    attempt: int
    kind: str
    token: str = ""
    """Of the payload that it got."""
    overlaps: bool = False
    """Another run of this id is going on: it holds the lock of the id."""
    worker: str = ""


class Ended(Line, tag="ended"):
    queue: str
    id: str
    fence: int
    how: str


class Settlement(msgspec.Struct, array_like=True):
    id: str
    fence: int
    how: str
    """complete, fail, release, or what is counted: retries, stalls, timeouts."""


class Settling(Beginning, tag="settling"):
    queue: str
    worker: str
    batch: list[Settlement]


class Settled(Ending, tag="settled"):
    replies: list[str] = []
    error: str = ""


class Cancelling(Beginning, tag="cancelling"):
    queue: str
    ids: list[str]


class Cancelled(Ending, tag="cancelled"):
    replies: list[str] = []
    error: str = ""


class Waiting(Beginning, tag="waiting"):
    """Somebody begins to wait for a result."""

    queue: str
    id: str
    seconds: float
    expected: str


class Waited(Ending, tag="waited"):
    how: str
    """The name of the error, or `answer`."""
    answer: str = ""
    said: str = ""


class Told(Line, tag="told"):
    """A fail handler was told of a failure."""

    queue: str
    id: str
    generation: int
    kind: str


class Fault(Line, tag="fault"):
    """The nemesis did something to somebody: to a process (`target`), or to all (0)."""

    kind: str
    target: int = 0
    until: float = 0.0
    hit: bool = True
    """It met something: a running job, bytes on their way."""
    detail: str = ""


class Stalled(Line, tag="stalled"):
    """A job was taken back from a worker that was not heard of, or whose child had died. A hint: some are missed."""

    queue: str
    id: str


class Kept(Line, tag="kept"):
    """What the storage has of an id in the end."""

    queue: str
    id: str
    generation: int
    state: str
    previous: int = 0


class Closing(Line, tag="closing"):
    """The end of a run: how long it took until all was quiet, and what was left over."""

    drained_s: float
    drained: bool
    totals: dict[str, dict[str, int]]
    problems: list[str]
    leftovers: list[str]
    exits: list[str] = []


AnyLine = (
    Asking
    | Asked
    | Claiming
    | Claimed
    | Started
    | Ended
    | Settling
    | Settled
    | Cancelling
    | Cancelled
    | Waiting
    | Waited
    | Told
    | Fault
    | Stalled
    | Kept
    | Closing
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode


class Pen:
    """Writes the lines of one process."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._calls = 0
        name = folder / f"{time.monotonic_ns()}-{self._pid}.jsonl"
        self._file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line) -> None:
        line.at = line.at or time.monotonic()
        line.pid = line.pid or self._pid
        os.write(self._file, _encode(line) + b"\n")

    def number(self) -> int:
        """A number for something that has a beginning and an end."""
        self._calls += 1
        return self._calls


_pens: dict[int, Pen] = {}


def pen() -> Pen:
    """The pen of this process; a forked child has another than its parent. Threads may call this for the first time at
    the same moment: all of them get the pen that was stored first."""
    pid = os.getpid()
    if pid not in _pens:
        _pens.setdefault(pid, Pen(Path(os.environ[HISTORY])))
    return _pens[pid]


def read(folder: Path) -> Iterator[Any]:
    """All lines, those of each process in their order."""
    for lines in read_each(folder):
        yield from lines


def read_each(folder: Path) -> Iterator[Iterator[Any]]:
    """The same, process by process: a number of a process may come again. The last line of one that was killed may be
    cut off."""
    for file in sorted(folder.glob("*.jsonl")):
        *lines, _ = file.read_bytes().split(b"\n")
        yield map(_decode, lines)
