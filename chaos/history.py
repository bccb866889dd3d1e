"""The history of a run: one line for each thing that happened, in files outside the storage, one file per process.

A line is written with one system call before its process continues, so a killed process leaves all lines but perhaps
half of its last. Times are of the monotonic clock, which all processes of a host share. Fences, generations and
`run_at` are stamps of the storage. A call has two lines: one before it is sent, one when its reply has arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from chaos.settings import HISTORY


class Line(msgspec.Struct, tag_field="what", omit_defaults=True, kw_only=True):
    at: float = 0.0
    pid: int = 0
    """Process id, or the number of a worker that shares its process with others (`numbers`)."""


class Beginning(Line):
    call: int


class Ending(Line):
    """The end of the call with the same number, in the same process."""

    call: int


class Asking(Beginning, tag="asking"):
    """An enqueue is sent."""

    queue: str
    ids: list[str]
    tokens: list[str]
    """Token in each payload, which the run must see."""
    keeps_payload: bool = False
    """The requests are updates that keep the stored payload and priority, if there are any."""
    delays_ms: list[int] = []
    run_ats: list[int] = []
    """Requested wall times; 0 for none."""
    priorities: list[int] = []


class Asked(Ending, tag="asked"):
    """The reply to an enqueue: what was done, and the generation."""

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
    """Token of the payload that the handler got."""
    overlaps: bool = False
    """Another run holds the lock of this id."""
    worker: str = ""


class Ended(Line, tag="ended"):
    """A handler ends: `ok`, or the name of the exception."""

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
    """A caller begins to wait for a result."""

    queue: str
    id: str
    seconds: float
    expected: str
    """The expected answer. Empty if the answer may come from another request of the same id."""


class Waited(Ending, tag="waited"):
    how: str
    """`answer`, or the name of the exception."""
    answer: str = ""
    message: str = ""


class FailureReported(Line, tag="failure reported"):
    """A fail handler got a failure."""

    queue: str
    id: str
    generation: int
    kind: str


class Fault(Line, tag="fault"):
    """A fault was injected into a process (`target`) or into everything (0)."""

    kind: str
    target: int = 0
    until: float = 0.0
    detail: str = ""


class Stalled(Line, tag="stalled"):
    """The storage published that a job was taken back. Some of these events are missed."""

    queue: str
    id: str


class Sample(Line, tag="sample"):
    """Ready jobs and number of claims of each queue at one moment."""

    queues: dict[str, tuple[int, int]]


class Kept(Line, tag="kept"):
    """The record of an id at the end of the run."""

    queue: str
    id: str
    generation: int
    state: str


class Closing(Line, tag="closing"):
    """The end of a run: how long it took until no job was left, and what was found then."""

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
    | FailureReported
    | Fault
    | Stalled
    | Sample
    | Kept
    | Closing
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode
numbers: dict[str, int] = {}
"""Numbers of the workers that share this process, by name. Claims and runs have them instead of the process id."""


class Writer:
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
        """A number for a call, which its two lines share."""
        self._calls += 1
        return self._calls


_writers: dict[int, Writer] = {}


def writer() -> Writer:
    """The writer of this process; a forked child has its own. If threads make the first call at the same moment, all of
    them get the writer that was stored first."""
    pid = os.getpid()
    if pid not in _writers:
        _writers.setdefault(pid, Writer(Path(os.environ[HISTORY])))
    return _writers[pid]


def forget_writer() -> None:
    """Open a new file at the next line: the folder of the history has changed."""
    _writers.pop(os.getpid(), None)


def read(folder: Path) -> Iterator[Any]:
    """All lines; the lines of one process are in order."""
    for lines in read_each(folder):
        yield from lines


def read_each(folder: Path) -> Iterator[Iterator[Any]]:
    """The lines of each process: call numbers and process ids may repeat in another. A last line that was cut off is
    left out."""
    for file in sorted(folder.glob("*.jsonl")):
        *lines, _ = file.read_bytes().split(b"\n")
        yield map(_decode, lines)
