"""Processes that tests start: which run, their parents, and which were left behind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MARK = "HOLDFAST_TEST_MARK"
"""Environment variable of all processes that a test starts, with a different value for each test."""


def parents() -> dict[int, int]:
    """All processes and their parents, without zombies."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # It has just ended.
            if state not in "ZX":
                found[int(folder.name)] = int(parent)
    return found


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment, and still run."""
    found: list[int] = []
    for pid in parents():
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue  # It has just ended.
    return found


def send(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal. False if the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
