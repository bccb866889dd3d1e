"""Revisions to compare: each is built as a wheel and installed into a virtual environment under `.bench/ab/`.

An environment is cached by the hash of the source tree and of the pinned dependencies, so that a second run starts at
once. Both sides get the dependency versions of the current environment.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".bench" / "ab"
WORKING_TREE = "working tree"
INSTALL_S = 300


class Problem(Exception):
    """The comparison is not possible. The message is one line for the user."""


class Revision(msgspec.Struct, frozen=True):
    """One side of the comparison."""

    name: str
    """As the user wrote it, with the short commit hash."""
    tree: str
    """Hash of the git tree, which the wheel is built from."""


def find(name: str) -> Revision:
    """The revision that git knows under this name."""
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", check=False)
    if not commit:
        raise Problem(f"unknown revision {name!r}: pass a commit, branch or tag of this repository")
    short = _git("rev-parse", "--short", commit)
    label = short if commit.startswith(name) else f"{name} ({short})"
    return Revision(label, _git("rev-parse", f"{commit}^{{tree}}"))


def working_tree() -> Revision:
    """The files of the checkout, with uncommitted changes and new files, without those that git ignores."""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        shutil.copy(_git("rev-parse", "--path-format=absolute", "--git-path", "index"), index)
        _git("add", "--all", index=index)
        tree = _git("write-tree", index=index)
    if tree == _git("rev-parse", "HEAD^{tree}"):
        return find("HEAD")
    return Revision(WORKING_TREE, tree)


def install(revision: Revision) -> Path:
    """The Python of an environment with this revision. Builds it when it is not in the cache."""
    pins = _pins()
    key = hashlib.sha256(f"{sys.version}\n{revision.tree}\n{pins}".encode()).hexdigest()[:16]
    folder = CACHE / key
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    print(f"  building {revision.name} …", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="build-") as build:
        source, wheels, constraints = Path(build, "source"), Path(build, "wheels"), Path(build, "constraints.txt")
        source.mkdir()
        constraints.write_text(pins)
        archive = Path(build, "source.tar")
        _git("archive", "--output", str(archive), revision.tree)
        shutil.unpack_archive(archive, source, filter="data")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run(revision, *pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source))
        (wheel,) = wheels.glob("*.whl")
        _run(revision, sys.executable, "-m", "venv", "--without-pip", str(folder))
        where = ["--python", str(python)]
        _run(revision, *pip, *where, "install", "--constraint", str(constraints), f"{wheel}[redis]")
    (folder / "ready").write_text(f"{revision.name}\n")
    return python


def _pins() -> str:
    """Versions of all packages of the current environment, as constraints for pip."""
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return "".join(f"{name}=={found[name]}\n" for name in sorted(found) if name != "holdfast")


def _run(revision: Revision, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Problem(f"{revision.name} cannot be built: {last}")


def _git(*arguments: str, index: Path | None = None, check: bool = True) -> str:
    env = os.environ if index is None else {**os.environ, "GIT_INDEX_FILE": str(index)}
    done = subprocess.run(["git", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise Problem(f"git {arguments[0]} failed: {done.stderr.strip() or 'no message'}")
    return done.stdout.strip()
