"""One side of a round: a fresh driver process of one revision, with a storage that no other process uses."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import msgspec

from benchmarks.ab.revisions import CACHE, Problem
from benchmarks.ab.rows import Row
from tests.servers import Server

DRIVER = Path(__file__).with_name("driver.py")
SHARED_MEMORY = Path("/dev/shm")
SLICE_S = 120.0
"""A driver that needs longer for a slice is killed."""
END_S = 30.0


class Side:
    """A driver process. It runs a slice when `slice` asks for one, and is gone at the end of the `with` block."""

    def __init__(self, name: str, python: Path, row: Row, hash_seed: int) -> None:
        """Start the process; it gets ready in the background. Both sides of a round have the same hash seed."""
        self._what = f"{row.name} on {name}"
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=fast_folder(), prefix="holdfast-ab-")))
            shutil.copy(DRIVER, folder / "ab_driver.py")
            self._errors = stack.enter_context((folder / "errors").open("w+"))
            server = stack.enter_context(Server("valkey")) if row.storage == "valkey" else None
            if server:
                stack.callback(server.kill)  # Sooner than `stop`, which lets it end by itself.
            self._process = subprocess.Popen(
                [str(python), "ab_driver.py", row.scenario, str(row.jobs), str(server.pid if server else 0)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=folder,
                env={
                    "PATH": os.environ.get("PATH", ""),
                    "PYTHONHASHSEED": str(hash_seed),
                    "HOLDFAST_AB_URL": server.url if server else f"sqlite:///{folder}/jobs.db",
                },
            )
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def slice(self) -> list[int]:
        """CPU nanoseconds of one slice: of the client, and of the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = threading.Timer(SLICE_S, self._process.kill)
        deadline.start()
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            deadline.cancel()
        if not reply:
            raise Problem(f"{self._what} failed: {self._last_error()}")
        return msgspec.json.decode(reply, type=list[int])

    def _last_error(self) -> str:
        self._process.wait(END_S)
        self._errors.seek(0)
        return (self._errors.read().strip() or f"exit code {self._process.returncode}").splitlines()[-1]

    def _end(self) -> None:
        """The end of its input ends the driver."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.stdin.close()
            self._process.wait(END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass  # It has ended already, or hangs: it is killed below.
        finally:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def fast_folder() -> Path:
    """A folder in memory where there is one: a disk adds noise, and its time is not the revision's."""
    if os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE
