"""Workers as real processes, on SQLite and on Valkey. Every test ends with a clean audit and no process left over.

A task module is a file beside the tests that begins with `from tests.worker.scene import make_app, note`; only workers
import it. A test enqueues jobs through `app.queue(name)`, as a program without the code does, and reads the notes of
handlers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from tests.app.conftest import Place, give_places, place, until
from tests.processes import MARK, marked, parents, send
from tests.worker.scene import NAMESPACE, NOTES

__all__ = ["Scene", "WorkerProcess", "place", "until"]

STORAGES = ["sqlite", "valkey"]
ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    give_places(metafunc, STORAGES)


class WorkerProcess:
    """`holdfast worker …`, running."""

    def __init__(
        self,
        scene: Scene,
        target: str,
        *options: str,
        url: str | None = None,
        cwd: Path | None = None,
        command: Sequence[str] = ("holdfast", "worker"),
    ) -> None:
        self.log = scene.folder / f"worker-{len(scene.workers)}.log"
        self._out = self.log.open("wb")
        environment = {**os.environ, **scene.environment, **({"HOLDFAST_URL": url} if url else {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, target, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            env=environment,
            cwd=cwd or ROOT,
        )
        self.pid = self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ready(self, children: int = 1, seconds: float = 20.0) -> None:
        """Wait until it serves, with at least `children` children."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.text()
            text = self.text()
            return " serves " in text and text.count(" is ready") >= children

        await until(is_ready, seconds)

    async def exited(self, seconds: float = 15.0) -> int:
        """Its exit status, once it has one."""
        await until(lambda: self.process.poll() is not None, seconds)
        status = self.process.returncode
        assert status is not None
        return status

    async def stop(self, seconds: float = 15.0) -> int:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return await self.exited(seconds)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Its child processes without zombies."""
        return [pid for pid, parent in parents().items() if parent == self.pid]

    def close(self) -> None:
        self._out.close()


class Scene:
    """Where one test takes place: a storage, an app without code, workers, and what handlers noted."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.notes_file = folder / "notes.jsonl"
        self.workers: list[WorkerProcess] = []
        self.environment = {
            "HOLDFAST_URL": place.url,
            NAMESPACE: place.namespace,
            NOTES: str(self.notes_file),
            MARK: self.mark,
            "PYTHONPATH": str(ROOT),
        }
        self.app: Holdfast[Any] = place.app()

    def start(self, target: str, *options: str, **more: Any) -> WorkerProcess:
        """Start `holdfast worker TARGET OPTIONS`; `stuck:app` is the app in tests/worker/stuck.py."""
        worker = WorkerProcess(self, f"tests.worker.{target}", *options, **more)
        self.workers.append(worker)
        return worker

    async def worker(self, target: str, *options: str, children: int = 1, **more: Any) -> WorkerProcess:
        """The same, ready to work."""
        worker = self.start(target, *options, **more)
        await worker.ready(children)
        return worker

    async def spawn(self, *command: str, cwd: Path = ROOT) -> asyncio.subprocess.Process:
        """Start Python with a program of the test."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment},
            cwd=cwd,
        )

    async def ask(self, queue: str, payload: object = None, *, wait: float = 20, **options: Any) -> Any:
        """Enqueue a job for a task, and wait for its result. `payload` has its arguments by name."""
        handle = await self.app.queue(queue).enqueue({} if payload is None else payload, **options)
        return await handle.result(wait=wait)

    def notes(self, what: str | None = None) -> list[dict[str, Any]]:
        """What handlers noted, oldest first."""
        if not self.notes_file.exists():
            return []
        lines = [json.loads(line) for line in self.notes_file.read_text().splitlines()]
        return [line for line in lines if what is None or line["what"] == what]

    async def noted(self, what: str, count: int = 1, seconds: float = 15.0) -> list[dict[str, Any]]:
        """Wait until there are `count` notes of a kind."""
        await until(lambda: len(self.notes(what)) >= count, seconds)
        return self.notes(what)

    def processes(self) -> list[int]:
        """Everything that this test has started and that still runs."""
        return marked(self.mark)


@pytest.fixture
async def scene(place: Place, tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(place, tmp_path)
    async with scene.app as app:
        try:
            yield scene
            for worker in scene.workers:
                if worker.process.poll() is None:
                    worker.signal(signal.SIGCONT)
                    assert await worker.stop(40) == 0, worker.text()
            await until(lambda: not scene.processes(), 3)
            for queue in (await app.stats()).queues:
                assert (await app.queue(queue.queue).repair(dry_run=True)).problems == []
        finally:
            for pid in scene.processes():
                send(pid)
            for worker in scene.workers:
                worker.process.wait(10)
                worker.close()
                sys.stdout.write(f"--- {worker.log.name}\n{worker.text()}")


async def timed(step: Callable[[], Any]) -> float:
    """How long something takes, in seconds."""
    began = time.monotonic()
    await step()
    return time.monotonic() - began


async def settled(app: Holdfast[Any], queue: str, count: int, seconds: float = 20.0) -> None:
    """Wait until `count` jobs of a queue have completed or failed."""

    async def are_settled() -> bool:
        totals = (await app.queue(queue).stats()).totals
        return totals.get("completed", 0) + totals.get("failed", 0) >= count

    await until(are_settled, seconds)
    await asyncio.sleep(0)
