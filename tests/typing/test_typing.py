"""What the type checkers say to users: nothing about correct use, and something about each mistake.

The two modules are checked from a folder of their own, against the installed package, with the checkers' strict modes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.typing import correct

HERE = Path(__file__).parent
FILES = ("correct.py", "misuses.py")
MARK = "  # error"
TIMEOUT_S = 110

Told = dict[str, dict[int, str]]
"""What a checker said, by file and line."""


def ask_mypy(folder: Path) -> Told:
    command = ["--config-file=", "--strict", "--output=json", f"--cache-dir={folder / 'cache'}"]
    command += [f"--python-executable={sys.executable}", *FILES]
    reply = run("mypy", command, folder)
    errors = [json.loads(line) for line in reply.splitlines() if line.startswith("{")]
    return told((error["file"], error["line"], error["message"]) for error in errors)


def ask_pyright(folder: Path) -> Told:
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "include": FILES}))
    reply = run("pyright", ["--outputjson", f"--pythonpath={sys.executable}", "--project", str(folder)], folder)
    errors = json.loads(reply)["generalDiagnostics"]
    return told((error["file"], error["range"]["start"]["line"] + 1, error["message"]) for error in errors)


def run(tool: str, arguments: list[str], folder: Path) -> str:
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1, f"{tool} did not look at the mistakes: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def told(errors: Iterable[tuple[str, int, str]]) -> Told:
    by_file: Told = {}
    for file, line, message in errors:
        by_file.setdefault(Path(file).name, {}).setdefault(line, message)
    return by_file


@pytest.mark.parametrize("ask", [ask_mypy, ask_pyright])
def test_type_checkers_accept_correct_code_and_report_each_mistake(ask: Callable[[Path], Told], tmp_path: Path) -> None:
    for file in FILES:
        shutil.copy(HERE / file, tmp_path)
    said = ask(tmp_path)
    lines = (HERE / "misuses.py").read_text().splitlines()
    marked = {number: line.strip() for number, line in enumerate(lines, 1) if line.endswith(MARK)}
    seen = said.get("misuses.py", {})
    assert said.get("correct.py", {}) == {}
    assert {number: line for number, line in marked.items() if number not in seen} == {}, "mistakes that are not seen"
    assert {number: text for number, text in seen.items() if number not in marked} == {}, "no mistakes, yet refused"
    assert len(marked) > 100


def test_code_accepted_by_type_checkers_runs() -> None:
    asyncio.run(correct.main())
    asyncio.run(correct.practise())
    correct.practise_without_a_loop()
    correct.practise_in_place()
    assert "complete" in correct.seen
    assert "duplicate" in correct.seen
    assert "2 permanent" in correct.seen
