"""What is published: a wheel and an sdist that have everything, and an empty environment in which they work."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAX_CORE_MB = 10
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
(build_wheel if sys.argv[1] == "wheel" else build_sdist)(sys.argv[2])
"""
HELLO = """\
import asyncio

from holdfast import Holdfast

app = Holdfast("sqlite:///jobs.db")


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


async def main() -> None:
    async with app, app.worker():
        print(await greet.call("world"))


asyncio.run(main())
"""
pytestmark = pytest.mark.suite("slow")

NEEDED = {
    "holdfast/storage/redis/lua/keyspace.lua",
    "holdfast/storage/local/sqlite/schema.sql",
    "holdfast/py.typed",
    "holdfast/cli/demo_tasks.py",
    "holdfast/pytest_plugin.py",
}


class Built(NamedTuple):
    wheel: Path
    sdist: Path
    from_sdist: Path
    """The wheel that the sdist makes."""


def quietly(*words: str | Path, cwd: Path) -> str:
    """Run a program, which must end well: what it says. Nothing of the code under test is on its path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTHONPATH"))}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")

    def build(what: str, source: Path, name: str) -> Path:
        quietly(sys.executable, "-c", BUILD, what, folder / name, cwd=source)
        (made,) = (folder / name).iterdir()
        return made

    sdist = build("sdist", ROOT, "sdist")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(build("wheel", ROOT, "wheel"), sdist, build("wheel", unpacked, "again"))


@pytest.fixture(scope="module")
def empty(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it asks for. It has no pip of its own."""
    folder = tmp_path_factory.mktemp("empty")
    quietly(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    pip = ("-m", "pip", "--python", programs / "python", "install", "--quiet")
    quietly(sys.executable, *pip, built.wheel, cwd=folder)
    return programs


def test_wheel_and_sdist_have_all_files_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel, zipfile.ZipFile(built.from_sdist) as again:
        names = set(wheel.namelist())
        assert {name: wheel.read(name) for name in names} == {name: again.read(name) for name in again.namelist()}
        (info,) = {name.split("/")[0] for name in names} - {"holdfast"}
        points = wheel.read(f"{info}/entry_points.txt").decode()
        metadata = wheel.read(f"{info}/METADATA").decode()
    code = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/holdfast").rglob("*.py")}
    there = {name for name in names if name.startswith("holdfast/")}
    assert there >= code | NEEDED
    assert {Path(name).suffix for name in there} == {".py", ".lua", ".sql", ".typed"}
    assert "holdfast = holdfast.cli:main" in points
    assert "[pytest11]\nholdfast = holdfast.pytest_plugin" in points
    extras = {line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras == {"redis", "web", "all"}
    assert "Project-URL: Homepage, " in metadata
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(line.split(": ")[1].split(">")[0] for line in needs) == ["click", "msgspec"]
    with tarfile.open(built.sdist) as packed:
        parts = {name.split("/", 1)[1] for name in packed.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "src/holdfast/storage/redis/lua/keyspace.lua",
    } <= parts
    unwanted = (".venv", ".git/", ".ruff_cache", ".mypy_cache", ".hypothesis", "dist/", "holdfast.db")
    assert [part for part in parts if part.startswith(unwanted) or "__pycache__" in part] == []


def test_wheel_works_in_an_empty_environment_and_names_the_redis_extra(empty: Path, tmp_path: Path) -> None:
    listed = "from importlib.metadata import distributions as d; print(*sorted(one.name.lower() for one in d()))"
    assert quietly(empty / "python", "-c", listed, cwd=tmp_path).split() == ["click", "holdfast", "msgspec"]
    assert "holdfast demo" in quietly(empty / "holdfast", "demo", "--help", cwd=tmp_path)
    assert "enqueue" in quietly(empty / "holdfast", "--help", cwd=tmp_path)
    (tmp_path / "hello.py").write_text(HELLO)
    assert quietly(empty / "python", "hello.py", cwd=tmp_path) == "hello world\n"
    status = [str(empty / "holdfast"), "status", "--url", "redis://ada:s3cret@localhost:1"]
    refused = subprocess.run(status, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    (sentence,) = refused.stderr.splitlines()
    assert "pip install 'holdfast[redis]'" in sentence
    assert "s3cret" not in sentence


def test_installed_core_is_small(built: Built, empty: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in (built.wheel, built.sdist)}
    (packages,) = (empty.parent / "lib").glob("python*/site-packages")
    for package in ("holdfast", "msgspec", "click"):
        files = [path for path in (packages / package).rglob("*") if "__pycache__" not in path.parts]
        sizes[package] = sum(path.stat().st_size for path in files if path.is_file())
    print(", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in sizes.items()))
    assert sizes["holdfast"] + sizes["msgspec"] + sizes["click"] < MAX_CORE_MB * 1e6
