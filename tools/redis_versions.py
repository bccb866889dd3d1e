"""Runs the Redis tests with the oldest and the newest redis-py and hiredis that pyproject.toml allows.

Both are installed into `.redis-py/oldest` and `.redis-py/newest`, without constraints.txt. These folders come before
`.venv` on the path of the tests; everything else is taken from `.venv`. `./dev redis-versions [oldest | newest]`.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".redis-py"
TESTS = (
    *("tests/redis", "tests/unit/test_redis_urls.py", "tests/storage/test_redis_calls.py"),
    *("tests/storage/test_enqueue_in.py", "tests/storage/test_clone.py", "tests/app/test_transactions.py"),
)
"""Tests that open connections in every way, or hand in objects of redis-py."""


def requirements(which: str) -> list[str]:
    """The requirements of the extra `redis`; for the oldest, with the lower bounds as exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed: list[str] = project["optional-dependencies"]["redis"]
    if which == "newest":
        return allowed
    found = [re.fullmatch(r"([\w-]+)>=([\d.]+),<\d+", requirement) for requirement in allowed]
    assert all(found), f"write lower and upper bounds such as redis>=6.0,<9 in pyproject.toml, not {allowed}"
    return [f"{match[1]}=={match[2]}" for match in found if match]


def install(which: str) -> Path:
    """Install the requirements unless they are there: the oldest once, the newest once a day."""
    folder = FOLDER / which
    wanted = requirements(which)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    stamp = " ".join([python, *wanted, *([str(datetime.date.today())] if which == "newest" else [])])
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), *wanted], check=True)
        ready.write_text(stamp)
    return folder


def run(which: str, arguments: list[str]) -> int:
    environment = {**os.environ, "PYTHONPATH": str(install(which))}
    shown = "import redis, hiredis; print('redis', redis.__version__, 'hiredis', hiredis.__version__, redis.__file__)"
    print(f"{which}: ", end="", flush=True)
    subprocess.run([sys.executable, "-c", shown], env=environment, check=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "2", "--dist", "loadfile", *TESTS]
    only = ["-k", "not sqlite and not memory", "--ignore", "tests/redis/test_processes.py", *arguments]
    return subprocess.run([*pytest, *only], env=environment, cwd=ROOT, check=False).returncode


def main() -> int:
    which = [name for name in sys.argv[1:] if name in ("oldest", "newest")] or ["oldest", "newest"]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("oldest", "newest")]
    return max(run(name, arguments) for name in which)


if __name__ == "__main__":
    sys.exit(main())
