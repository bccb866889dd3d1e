"""`holdfast`, run as a user runs it: by its script, in a folder of its own, on SQLite or on Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast import Holdfast
from tests.app.conftest import Place, until
from tests.processes import marked
from tests.worker.conftest import Scene

ROOT = Path(__file__).parents[2]
SOURCE = Path(holdfast.__file__).parents[1]
SCRIPT = str(Path(sys.executable).with_name("holdfast"))
"""Unlike `python -m holdfast` it does not put the present folder on the path."""
STORAGES = ["sqlite", "valkey"]
on_both = pytest.mark.parametrize("storage", STORAGES)


class Said(NamedTuple):
    """What a command answered."""

    status: int | None
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def environment(**more: str) -> dict[str, str]:
    """The environment of a command: the code under test, and nothing of the storage of the user who runs the tests."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**own, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}", **more}


async def start(*words: str, cwd: Path, **more: str) -> asyncio.subprocess.Process:
    """`holdfast WORDS`, running. `more` is its environment."""
    return await asyncio.create_subprocess_exec(
        *(SCRIPT, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**more),
        cwd=cwd,
    )


async def ended(process: asyncio.subprocess.Process, given: str = "", seconds: float = 20) -> Said:
    """What it said, once it has ended. `given` is what it reads."""
    try:
        out, err = await asyncio.wait_for(process.communicate(given.encode()), seconds)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        pytest.fail(f"it did not end within {seconds} s: {(out + err).decode()}")
    return Said(process.returncode, out.decode(), err.decode())


async def run(*words: str, cwd: Path, given: str = "", **more: str) -> Said:
    """`holdfast WORDS`, to its end."""
    said = await ended(await start(*words, cwd=cwd, **more), given)
    assert "Traceback" not in said.out + said.err, said
    return said


class Edge(Scene):
    """A scene in which commands are run, too."""

    app: Holdfast[Any]

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(place, folder)
        self.environment |= {"HOLDFAST_NAMESPACE": place.namespace, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}

    async def run(self, *words: str, given: str = "") -> Said:
        """A command on the storage of this test, to its end."""
        return await run(*words, cwd=self.folder, given=given, **self.environment)

    async def command(self, *words: str) -> asyncio.subprocess.Process:
        """The same, running."""
        return await start(*words, cwd=self.folder, **self.environment)


@asynccontextmanager
async def edge_on(storage: str, folder: Path) -> AsyncIterator[Edge]:
    """At its end no process is left, nothing is wrong in any queue, and no key is without an owner."""
    place = Place(storage, folder)
    edge = Edge(place, folder)
    try:
        async with edge.app as app:
            yield edge
            await until(lambda: not edge.processes(), 5)
            for queue in (await app.stats()).queues:
                assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []
    finally:
        for pid in marked(edge.mark):
            os.kill(pid, signal.SIGKILL)
        for worker in edge.workers:
            worker.process.wait(10)
            worker.close()
            sys.stdout.write(f"--- {worker.log.name}\n{worker.text()}")
        wrong = place.clear()
    assert wrong == []
