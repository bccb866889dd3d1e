"""Producers, workers, their children and commands find the same storage, and leave the environment as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.conftest import ROOT

HOLDFAST = ("-m", "holdfast")
TASKS = """\
import os
from holdfast import Holdfast

app = Holdfast({argument})

@app.task(name="where")
def where() -> list:
    return [os.environ.get("HOLDFAST_URL"), app._session.url]
"""
ASK = """\
import sys
sys.path.insert(0, "..")
import tasks
print(tasks.where.sync.using(id="asked").enqueue().placed)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project whose producer runs in a subfolder."""
    (tmp_path / "web").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "tasks.py").write_text(TASKS.format(argument=""))
    (tmp_path / "web" / "ask.py").write_text(ASK)
    return tmp_path


def python(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, without variables for the storage but those in `more`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=60
    )


def worker(*words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return python(*HOLDFAST, "worker", "tasks:app", "--burst", *words, cwd=cwd, **more)


@pytest.mark.parametrize("kind", [("--processes", "1"), ("--inline",)], ids=["processes", "inline"])
def test_producer_worker_and_commands_use_the_storage_of_the_project(folder: Path, kind: tuple[str, ...]) -> None:
    (folder / "pyproject.toml").write_text('[tool.holdfast]\nurl = "sqlite:///project.db"\nnamespace = "shop"\n')
    asked = python("ask.py", cwd=folder / "web")
    assert (asked.stdout, asked.stderr) == ("new\n", "")
    ran = worker(*kind, cwd=folder)
    assert (ran.returncode, "WARNING" in ran.stderr) == (0, False), ran.stderr
    said = python(*HOLDFAST, "result", "where", "asked", "--wait", "0", cwd=folder / "web")
    assert said.stdout == f'[null,"sqlite:///{folder}/project.db"]\n', said.stderr


@pytest.mark.parametrize("kind", [("--processes", "2"), ("--inline",)], ids=["processes", "inline"])
def test_worker_warns_of_the_default_once_and_gives_it_to_nobody(folder: Path, kind: tuple[str, ...]) -> None:
    asked = python("web/ask.py", cwd=folder, PYTHONPATH=f"{ROOT}:{folder}")
    ran = worker(*kind, cwd=folder)
    said = python(*HOLDFAST, "result", "where", "asked", "--wait", "0", cwd=folder)
    assert said.stdout == '[null,"sqlite:///holdfast.db"]\n', said.stderr
    for each in (asked, ran, said):
        assert each.stderr.count(f"no storage is chosen, so the jobs are in {folder}/holdfast.db") == 1, each.stderr


@pytest.mark.parametrize("kind", [("--processes", "1"), ("--inline",)], ids=["processes", "inline"])
def test_url_of_the_worker_command_is_that_of_an_app_without_one(folder: Path, kind: tuple[str, ...]) -> None:
    url = f"sqlite:///{folder}/line.db"
    assert python(*HOLDFAST, "enqueue", "where", "{}", "--url", url, "--id", "asked", cwd=folder).returncode == 0
    ran = worker(*kind, "--url", url, cwd=folder, HOLDFAST_URL="sqlite:///other.db")
    assert ran.returncode == 0, ran.stderr
    said = python(*HOLDFAST, "result", "where", "asked", "--wait", "0", "--url", url, cwd=folder)
    assert said.stdout == f'["{url}","{url}"]\n', said.stderr


@pytest.mark.parametrize("kind", [("--processes", "1"), ("--inline",)], ids=["processes", "inline"])
def test_storage_that_the_app_does_not_follow_is_refused(folder: Path, kind: tuple[str, ...]) -> None:
    (folder / "tasks.py").write_text(TASKS.format(argument='"sqlite:///own.db", namespace="own"'))
    for option, value in (("url", "sqlite:///line.db"), ("namespace", "line")):
        ran = worker(*kind, f"--{option}", value, cwd=folder)
        assert ran.returncode == 2
        assert f"the code of the app passes another {option}: remove --{option}" in ran.stderr
    assert worker(*kind, "--url", "", cwd=folder).returncode == 2
    assert [file.name for file in folder.glob("*.db")] == []
