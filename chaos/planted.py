"""Bugs that a run must find. Each is an edit of a copy of Holdfast, with the storage on which it does most harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from chaos.report import Report

ROOT = Path(__file__).parents[1]
LUA = "storage/redis/lua"


class Edit(NamedTuple):
    file: str
    old: str
    new: str


class Bug(NamedTuple):
    breaks: str
    storage: str
    edits: tuple[Edit, ...]


BUGS = {
    "unfenced settle": Bug(
        "a worker that lost its lease may settle",
        "valkey",
        (
            Edit(
                f"{LUA}/lifecycle.lua",
                "return job and job.run and job.run.fence == fence and job.run.worker == worker",
                "return job and job.run",
            ),
        ),
    ),
    "one-step sweep": Bug(
        "a lease that looks expired is taken back at once, which after an outage are all",
        "sqlite",
        (Edit("_core/lifecycle.py", "    if not run.overdue:\n", "    if False:\n"),),
    ),
    "claim reply not kept": Bug(
        "a claim whose reply was lost is carried out twice, and no worker has the first jobs",
        "valkey",
        (
            Edit(
                f"{LUA}/calls.lua",
                "  call('SET', key,",
                "  if verb == 'claim' then return reply end\n  call('SET', key,",
            ),
        ),
    ),
    "beat from the handler's loop": Bug(
        "a handler that blocks its event loop costs the worker its leases",
        "sqlite",
        (
            Edit(
                "_worker/heartbeat.py",
                "        self._thread.start()\n",
                "        self._here = asyncio.ensure_future(self._beat_until_stopped())\n",
            ),
            Edit("_worker/heartbeat.py", "asyncio.to_thread(self._thread.join)", "asyncio.wait([self._here])"),
        ),
    ),
    "forget without waiter check": Bug(
        "an outcome with a waiter is forgotten like any other",
        "sqlite",
        (
            Edit(
                "_core/lifecycle.py",
                "    return max(until, job.keep_until_at, now + 1000 * WAITED_MS) if job.keep_until_at else until\n",
                "    return until\n",
            ),
        ),
    ),
}


def is_found(name: str, seconds: float, say: Callable[[str], object]) -> bool:
    """Does a run with this bug break a rule?"""
    bug = BUGS[name]
    with tempfile.TemporaryDirectory(prefix="holdfast-planted-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in bug.edits:
            file = copy / "holdfast" / edit.file
            text = file.read_text()
            assert text.count(edit.old) == 1, f"{name}: {edit.file} does not contain {edit.old!r} exactly once"
            file.write_text(text.replace(edit.old, edit.new))
        say(f"{name}, on {bug.storage}: {bug.breaks}")
        out = Path(folder) / "out"
        options = ("--storage", bug.storage, "--seed", "1", "--seconds", str(seconds), "--out", str(out))
        subprocess.run(
            [sys.executable, "-m", "chaos", *options],
            env={**os.environ, "PYTHONPATH": str(copy)},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        reports = list(out.glob("*.json"))
        if not reports:
            say("  the run failed")
            return False
        report = msgspec.json.decode(reports[0].read_bytes(), type=Report)
        broken = {rule: count for rule, count in report.wrong_counts.items() if count}
        say(f"  {report.verdict}")
        return bool(broken)
