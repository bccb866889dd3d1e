"""The command line as its users have it: every command is a real process, on SQLite and on Valkey.

`run("status", "--json")` is `holdfast status --json` in an empty folder; HOLDFAST_URL and HOLDFAST_NAMESPACE say where
the jobs of the test are. `app` is the same place in Python: to arrange, and to see what a command has done.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import Holdfast
from tests.app.conftest import Place, give_places, place, until

__all__ = ["Program", "Result", "Run", "harmless", "place", "until"]

STORAGES = ["sqlite", "valkey"]
PROGRAM = (sys.executable, "-m", "holdfast")
AT_ONCE = 4
PATIENCE_S = 30.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    give_places(metafunc, STORAGES)


@pytest.fixture
async def app(place: Place) -> AsyncIterator[Holdfast[Any]]:
    """An app at the same place. At the end nothing may be wrong in any of its queues."""
    async with place.app() as app:
        yield app
        for queue in (await app.stats()).queues:
            assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []


class Result(NamedTuple):
    """What a command has left."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its only line, which is JSON."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    def says_no(self, status: int, part: str = "") -> bool:
        """It ended with this status and one line, which has this part, and printed nothing else."""
        one_line = self.err.count("\n") == 1 and self.err.startswith("holdfast: ")
        assert (self.status, self.out, one_line, part in self.err) == (status, "", True, True), self
        return True


class Program:
    """A command that is running: what it prints is read as it comes."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], cwd: Path, **options: Any) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([*PROGRAM, *words], env=environment, cwd=cwd, **(pipes | options))

    async def line(self, seconds: float = 20.0) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        async with asyncio.timeout(seconds):
            return (await asyncio.to_thread(self.process.stdout.readline)).decode()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    async def end(self, seconds: float = 20.0) -> Result:
        """What it has left, once it has ended by itself. What was read as lines is not in it."""
        out, err = await asyncio.to_thread(self.process.communicate, timeout=seconds)
        return Result(self.process.returncode, _text(out), _text(err))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Run:
    """Runs commands, at the place of the test."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.programs: list[Program] = []

    def __call__(
        self,
        *words: str | bytes,
        stdin: str | bytes | None = None,
        url: str | None = None,
        env: dict[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> Result:
        """Run a command to its end. A variable that is None in `env` is not set."""
        given = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run(
            [*PROGRAM, *words],
            input=b"" if given is None else given,
            capture_output=True,
            env=self.environment(url, env),
            cwd=cwd or self.folder,
            timeout=PATIENCE_S,
        )
        return Result(done.returncode, _text(done.stdout), _text(done.stderr))

    def each(self, *commands: Sequence[str | bytes], **options: Any) -> list[Result]:
        """Run commands that do not depend on each other, some at a time."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda words: self(*words, **options), commands))

    def start(self, *words: str, env: dict[str, str | None] | None = None, **options: Any) -> Program:
        """Start a command that goes on. It is killed at the end of the test."""
        program = Program(words, self.environment(None, env), self.folder, **options)
        self.programs.append(program)
        return program

    def environment(self, url: str | None = None, env: dict[str, str | None] | None = None) -> dict[str, str]:
        here: dict[str, str | None] = {
            "HOLDFAST_URL": url or self.place.url,
            "HOLDFAST_NAMESPACE": self.place.namespace,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        return {name: value for name, value in {**inherited, **here, **(env or {})}.items() if value is not None}


@pytest.fixture
def run(place: Place, tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "empty"
    folder.mkdir()
    run = Run(place, folder)
    yield run
    for program in run.programs:
        program.kill()


def harmless(text: str) -> bool:
    """Nothing in it that a terminal obeys, or that turns a line around."""
    raw = [character for character in text if not character.isprintable() and character != "\n"]
    assert raw == [], text
    return True


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
