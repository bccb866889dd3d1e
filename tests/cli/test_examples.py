"""The examples, as a user tries them: copied into an empty folder, run as they say, and asked what they printed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast
from tests.app.conftest import until
from tests.cli.running import ROOT, SCRIPT, environment
from tests.servers import Server

EXAMPLES = ROOT / "examples"


class Folder:
    """An empty folder, with one example in it and what was started there."""

    def __init__(self, path: Path, example: str) -> None:
        self.path = path
        self.example = example
        self.url = f"sqlite:///{path}/holdfast.db"
        self._processes: list[subprocess.Popen[str]] = []
        shutil.copy(EXAMPLES / example, path)

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """A command whose output goes to a file of its own: see `said`."""
        with self._log(len(self._processes)).open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.path,
                env=environment(**{"PYTHONUNBUFFERED": "1", "HOLDFAST_URL": self.url, **more}),
            )
        self._processes.append(process)
        return process

    def run(self, *command: str, status: int = 0, **more: str) -> list[str]:
        """The lines that a command prints, complaints and all, when it ends as it should."""
        process = self.start(*command, **more)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end: {self.said(process)}")
        assert process.returncode == status, self.said(process)
        return self.said(process).splitlines()

    def said(self, process: subprocess.Popen[str]) -> str:
        return self._log(self._processes.index(process)).read_text()

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            sys.stdout.write(f"--- {process.args!r}: {process.returncode}\n{self.said(process)}")

    def _log(self, number: int) -> Path:
        return self.path.parent / f"{self.path.name}-{number}.log"


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Folder]:
    path = tmp_path / "empty"
    path.mkdir()
    folder = Folder(path, request.param)
    yield folder
    folder.end()


def in_folder(example: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("folder", [example], indirect=True, ids=[""])


def test_every_example_has_a_row_in_the_table() -> None:
    rows = re.findall(r"^\| \[(\S+)\]\((\S+)\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert there == {name for name, _ in rows} == {link for _, link in rows}


# Hello


def test_hello_world_has_at_most_fifteen_lines() -> None:
    assert sum(bool(line) for line in (EXAMPLES / "hello.py").read_text().splitlines()) <= 15


@in_folder("hello.py")
def test_hello_world_runs_without_a_server_and_with_one(folder: Folder) -> None:
    assert folder.run(sys.executable, "hello.py") == ["Hello, world!"]
    assert (folder.path / "holdfast.db").exists()
    with Server("valkey") as server:
        assert folder.run(sys.executable, "hello.py", HOLDFAST_URL=server.url) == ["Hello, world!"]
        assert int(server.command("DBSIZE")) > 0


@in_folder("hello.py")
async def test_hello_tasks_can_run_in_a_separate_worker(folder: Folder) -> None:
    worker = folder.start(SCRIPT, "worker", "hello:app", "--processes", "1")
    assert folder.run(SCRIPT, "call", "hello.greet", '{"name": "Ada"}') == ['"Hello, Ada!"']
    worker.terminate()
    await until(lambda: worker.poll() is not None, 15)
    assert worker.returncode == 0
    assert "completed" in folder.said(worker)


# Thumbnails


@in_folder("thumbnails.py")
def test_thumbnails_are_made_and_their_progress_is_seen(folder: Folder) -> None:
    lines = folder.run(sys.executable, "thumbnails.py")
    names = ["dawn", "noon", "dusk"]
    assert lines[-4:] == [
        "   ".join(f"{name} completed" for name in names),
        *(f"pictures/{name}-small.ppm: 180015 bytes" for name in names),
    ]
    seen = {int(percent) for line in lines for percent in re.findall(r"(\d+) %", line)}
    assert any(0 < percent < 100 for percent in seen), lines
    for name in names:
        (head, pixels), (small_head, small) = (
            (folder.path / f"pictures/{name}{kind}.ppm").read_bytes().split(b"\n", 1) for kind in ("", "-small")
        )
        assert (head, small_head) == (b"P6 2400 1600 255", b"P6 300 200 255")
        assert len(small) == 3 * 300 * 200
        assert all(abs(small[at] - pixels[8 * (at - at % 3) + at % 3]) <= 2 for at in range(900))


# Periodic


def runs(text: str) -> list[datetime]:
    return [datetime.strptime(due, "%H:%M:%S") for due in re.findall(r"^(\S+) backup by", text, re.MULTILINE)]


@in_folder("periodic.py")
async def test_periodic_example_continues_after_a_kill_and_runs_once_per_time(folder: Folder) -> None:
    def start() -> subprocess.Popen[str]:
        return folder.start(sys.executable, "periodic.py", EVERY="1")

    async def waits_a_while() -> bool:
        job = await app.queue("periodic.backup").get("backup")
        soon = datetime.now(UTC) + timedelta(seconds=0.3)
        return job is not None and job.state == "waiting" and job.run_at > soon

    async with Holdfast(folder.url) as app:
        first = start()
        await until(lambda: len(runs(folder.said(first))) >= 2, 20)
        await until(waits_a_while)
        first.kill()
        first.wait(10)
        others = [start(), start()]
        await until(lambda: sum(len(runs(folder.said(other))) for other in others) >= 3, 20)
        await until(waits_a_while)
        for other in others:
            other.send_signal(signal.SIGINT)
        for other in others:
            await until(lambda other=other: other.poll() is not None, 15)
            assert other.returncode == 0
            assert folder.said(other).startswith("planned: duplicate\n")
            assert "Traceback" not in folder.said(other)
        assert folder.said(first).startswith("planned: new\n")
        every = sorted(due for process in (first, *others) for due in runs(folder.said(process)))
        assert len(every) == len(set(every)) >= 5
        assert folder.run(SCRIPT, "cancel", "periodic.backup", "backup") == ["cancelled backup"]
        assert (await app.queue("periodic.backup").stats()).scheduled == 0
        again = start()  # What was cancelled is planned anew.
        await until(lambda: folder.said(again).startswith("planned: new\n"), 20)


# A worker in bash


def tools(folder: Path, names: list[str]) -> str:
    """A PATH on which there are these programs, and no others."""
    folder.mkdir()
    for name in names:
        found = {"holdfast": SCRIPT, "python3": sys.executable}.get(name) or shutil.which(name)
        assert found is not None, f"there is no {name}"
        (folder / name).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n')
        (folder / name).chmod(0o755)
    return str(folder)


@in_folder("shell_worker.sh")
@pytest.mark.parametrize("reader", ["python3", *(["jq"] if shutil.which("jq") else [])])
async def test_shell_script_can_be_a_worker(folder: Folder, reader: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    path = tools(tmp_path / "bin", ["holdfast", "cat", "wc", reader])
    (folder.path / "notes.txt").write_text("three short words\n")
    async with Holdfast(folder.url) as app:
        words = app.queue("words")
        await words.enqueue({"file": "notes.txt"}, id="notes", priority=9)
        await words.enqueue({"file": "gone.txt"}, id="gone", priority=8)
        await words.enqueue({"text": "no file"}, id="odd", max_retries=0)
        lines = folder.run(bash, "shell_worker.sh", PATH=path, WAIT="1", BACKOFF="0.1")
        assert lines[0] == "notes, attempt 1: completed"
        assert lines[-1] == "nothing more to do"
        assert [line for line in lines if line.startswith("gone")] == [
            "gone, attempt 1: to be retried",
            "gone, attempt 2: to be retried",
            "gone, attempt 3: failed: no retries left",
        ]
        assert await words.result("notes", wait=0) == {"words": 3}
        gone, odd = await words.get("gone"), await words.get("odd")
        assert gone is not None
        assert odd is not None
        assert (gone.state, gone.attempts, odd.state, odd.attempts) == ("failed", 3, "failed", 1)
        assert "gone.txt: No such file" in str(gone.error)
        assert "the payload names no file" in str(odd.error)


@in_folder("shell_worker.sh")
def test_shell_worker_without_its_storage_does_not_report_success(folder: Folder) -> None:
    (said,) = folder.run(
        *("bash", "shell_worker.sh"),
        status=3,
        PATH=tools(folder.path / "bin", ["holdfast", "bash", "python3"]),
        HOLDFAST_URL="redis://127.0.0.1:1?timeout=0.1",
    )
    assert said.startswith("holdfast: redis://127.0.0.1:1")


# A web app


def ask(url: str, method: str = "GET", body: object = None) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def served(folder: Folder) -> tuple[subprocess.Popen[str], str]:
    """The web app, on a port of its own, and where that is."""
    process = folder.start(sys.executable, "-m", "uvicorn", "web:app", "--port", "0")
    where: list[str] = []

    def is_up() -> bool:
        assert process.poll() is None, folder.said(process)
        where[:] = re.findall(r"running on (http://[\d.:]+)", folder.said(process))
        return bool(where)

    await until(is_up, 20)
    return process, where[0]


@in_folder("web.py")
async def test_web_app_enqueues_jobs_and_returns_their_results(folder: Folder) -> None:
    for module in ("starlette", "uvicorn"):
        assert importlib.util.find_spec(module), f"{module} is missing: install 'holdfast[web]'"
    process, site = await served(folder)
    status, placed = await asyncio.to_thread(ask, f"{site}/reports", "POST", {"city": "Oslo"})
    assert (status, placed["url"]) == (202, f"/reports/{placed['id']}")
    status, early = await asyncio.to_thread(ask, site + placed["url"])
    assert (status, early) in [
        (202, {"id": placed["id"], "state": "not ready"}),
        (200, {"city": "Oslo", "letters": 4}),  # On a machine that was busy with something else.
    ]
    assert await asyncio.to_thread(ask, f"{site}{placed['url']}?wait") == (200, {"city": "Oslo", "letters": 4})
    assert await asyncio.to_thread(ask, f"{site}/shout?text=hello") == (200, {"text": "HELLO!"})
    assert (await asyncio.to_thread(ask, f"{site}/reports/none"))[0] == 404
    assert (await asyncio.to_thread(ask, f"{site}/reports", "POST", ["Oslo"]))[0] == 400
    _, placed = await asyncio.to_thread(ask, f"{site}/reports", "POST", {"city": ""})
    assert await asyncio.to_thread(ask, f"{site}{placed['url']}?wait") == (
        500,
        {"error": "a report is about a city", "attempts": 1},
    )
    _, placed = await asyncio.to_thread(ask, f"{site}/reports", "POST", {"city": "Rome"})
    process.terminate()  # A job that was accepted outlives the app.
    await until(lambda: process.poll() is not None, 20)
    assert folder.said(process).count("Traceback") == 1, "only the report without a city raises"
    again, site = await served(folder)
    assert await asyncio.to_thread(ask, f"{site}{placed['url']}?wait") == (200, {"city": "Rome", "letters": 4})
    again.terminate()
    await until(lambda: again.poll() is not None, 20)
