"""`holdfast demo`, on a terminal and piped: it shows what it says, ends by itself, and leaves nothing behind.

A demo takes its time, so all of them run side by side, once.
"""

from __future__ import annotations

import fcntl
import os
import re
import selectors
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import SCRIPT, environment, marked
from tests.processes import MARK
from tests.servers import Server

SHOWN = [
    "both workers have started: process ids",
    "500 quick jobs: done after",
    "call a task and get its result: 19 + 2 = 21",
    "a job that fails twice is retried: worked on attempt 3",
    "a job that fails for good calls its fail handler: invoice 7 failed after 2 runs: ValueError: ",
    "a singleton requested three times during its run runs once more: version 1, then only version 4",
    "a handler that never ends is killed with its process: ",
    "a delayed job runs on time: 3 s after it was enqueued",
    "a leased job is completed exactly once: second enqueue: duplicate; first complete: True, second complete: False",
    "a worker is killed, and its jobs run on the other one: ",
    "every record is checked: ",
    "Nothing was lost and nothing completed twice, in ",
]
IN_THE_MIDDLE = "✓ a job that fails twice"
SECONDS = 90
ON_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Ctrl-C is for those whose terminal it is. A preexec_fn would do the same, but forks while there are threads."""
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Demo:
    """A demo that runs. Its home, its folder and its place for temporary files are its own."""

    def __init__(self, folder: Path, *words: str, terminal: bool, interrupt: bool = False) -> None:
        self.folder = folder
        self.interrupt = interrupt
        self.mark = uuid.uuid4().hex
        self.text = ""
        self.left: list[int] = []
        self._raw = b""
        for name in ("home", "here", "tmp"):
            (folder / name).mkdir(parents=True)
        ours, theirs = os.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        self.fd = ours
        self.process = subprocess.Popen(
            [*((sys.executable, "-c", ON_ITS_TERMINAL) if terminal else ()), SCRIPT, "demo", *words],
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            cwd=folder / "here",
            env=environment(
                **{MARK: self.mark, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "TERM": "xterm"}
            ),
            start_new_session=terminal,
        )
        os.close(theirs)

    def read(self) -> bool:
        """Take in what it says. False at its end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:  # So a terminal ends.
            data = b""
        self._raw += data
        self.text = self._raw.decode(errors="replace")
        if self.interrupt and IN_THE_MIDDLE in ESCAPE.sub("", self.text):
            self.interrupt = False
            os.write(self.fd, b"\x03")  # Ctrl-C: the terminal signals all that run on it.
        return bool(data)

    def end(self) -> None:
        try:
            self.process.wait(10)
        finally:
            deadline = time.monotonic() + 5
            while marked(self.mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.left = marked(self.mark)
            for pid in self.left:
                os.kill(pid, 9)
            os.close(self.fd)

    @property
    def files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.parent != self.folder]


class Demos:
    """All of them, over."""

    def __init__(self, folder: Path, server: Server, other: Server) -> None:
        self.server = server
        self.other = other
        self.terminal = Demo(folder / "terminal", terminal=True)
        self.piped = Demo(folder / "piped", "--url", server.url, terminal=False)
        self.interrupted = Demo(folder / "interrupted", "--url", other.url, terminal=True, interrupt=True)
        self._read(self.terminal, self.piped, self.interrupted)

    def _read(self, *demos: Demo) -> None:
        deadline = time.monotonic() + SECONDS
        try:
            with selectors.DefaultSelector() as ready:
                for demo in demos:
                    ready.register(demo.fd, selectors.EVENT_READ, demo)
                while ready.get_map():
                    assert time.monotonic() < deadline, [demo.text for demo in demos]
                    for key, _ in ready.select(1):
                        if not key.data.read():
                            ready.unregister(key.fd)
        finally:
            for demo in demos:
                demo.end()


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demos]:
    with Server("valkey") as server, Server("valkey") as other:
        yield Demos(tmp_path_factory.mktemp("demos"), server, other)


def test_demo_on_a_terminal_is_live_and_coloured_and_exits_with_0(demos: Demos) -> None:
    demo = demos.terminal
    assert demo.process.returncode == 0, demo.text
    seen = ESCAPE.sub("", demo.text)
    assert [claim for claim in SHOWN if claim not in seen] == []
    assert "one SQLite file, no server" in seen.splitlines()[0]
    assert "\x1b[32m" in demo.text  # A green tick.
    assert re.search(r"quick jobs \d+ of 500", seen), "no progress was shown"
    lines = [line.rpartition("\r\x1b[K")[2] for line in demo.text.replace("\r\n", "\n").split("\n")]
    ticks = [line for line in lines if "✓" in line]
    assert len(ticks) == len(SHOWN) - 1
    assert (demo.left, demo.files) == ([], [])


def test_piped_demo_prints_plain_lines_and_leaves_no_job_on_the_server(demos: Demos) -> None:
    demo = demos.piped
    assert demo.process.returncode == 0, demo.text
    assert [claim for claim in SHOWN if claim not in demo.text] == []
    assert "\x1b" not in demo.text
    assert "\r" not in demo.text
    assert demos.server.url in demo.text.splitlines()[0]
    assert len([line for line in demo.text.splitlines() if "✓" in line]) == len(SHOWN) - 1
    assert (demo.left, demo.files) == ([], [])
    assert staying(demos.server) == []


def test_interrupted_demo_leaves_no_process_no_file_and_no_job(demos: Demos) -> None:
    demo = demos.interrupted
    assert IN_THE_MIDDLE in ESCAPE.sub("", demo.text)
    assert demo.process.returncode == 130
    assert SHOWN[-1] not in demo.text
    assert "Traceback" not in demo.text
    assert (demo.left, demo.files) == ([], [])
    assert staying(demos.other) == []


def staying(server: Server) -> list[bytes]:
    """The keys of queues that are there for good. Replies that are kept, and the last stamps of queues, expire; what a
    namespace shares stays, once for all demos."""
    keys = server.command("KEYS", "*")
    assert isinstance(keys, list)
    assert len([key for key in keys if b"/" not in key and server.command("PTTL", key) == -1]) <= 5
    return [key for key in keys if b"/" in key and server.command("PTTL", key) == -1]
