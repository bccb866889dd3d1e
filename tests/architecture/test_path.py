"""One job on SQLite with an inline worker: docs/development/internals.md names every module that it crosses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
MOST_MODULES = 30

PROGRAM = """
import asyncio, sys, threading
from pathlib import Path
from holdfast import Holdfast

source, seen = sys.argv[1], set()

def trace(frame, event, arg):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(source) and frame.f_code.co_name != "<module>":
        seen.add(file)

async def main():
    app = Holdfast("sqlite:///path.db")

    @app.task
    async def greet(name: str) -> str:
        return f"hello, {name}"

    async with app, app.worker():
        await (await greet.enqueue("first")).result()
        sys.setprofile(trace)
        threading.setprofile_all_threads(trace) if hasattr(threading, "setprofile_all_threads") else None
        assert await (await greet.enqueue("Ada")).result() == "hello, Ada"
        sys.setprofile(None)

threading.setprofile(trace)
asyncio.run(main())
for file in sorted(seen):
    print(Path(file).relative_to(source).as_posix())
"""


def modules_on_path(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SOURCE)], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


def test_one_job_crosses_at_most_thirty_modules(tmp_path: Path) -> None:
    crossed = modules_on_path(tmp_path)
    assert "_client/request.py" in crossed
    assert len(crossed) <= MOST_MODULES, crossed


def test_internals_page_names_every_module_on_the_path(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "development" / "internals.md").read_text()
    assert [module for module in modules_on_path(tmp_path) if module not in page] == []
