"""Writes constraints.txt: the newest versions that pyproject.toml allows, of every package that development needs.

`./dev constraints` gives it the interpreters of this machine. pip resolves the dependencies for each of them; a version
that only some of them can have gets a marker.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "constraints.txt"
HEAD = """\
# Exact versions for development and CI, written by ./dev constraints. ./dev setup installs these.
# Users get the ranges of pyproject.toml.
"""
WANTED = ("pip", "--group", "dev", "--group", "mutation", ".[all]")


def resolve(python: str) -> dict[str, str]:
    """Name and version of each package that pip would install for this interpreter."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    report = subprocess.run(
        [*pip, "--dry-run", "--ignore-installed", "--report", "-", *WANTED],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found = [item["metadata"] for item in json.loads(report)["install"]]
    versions = {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in found}
    del versions["holdfast"]
    return versions


def merge(resolved: dict[str, dict[str, str]]) -> list[str]:
    """The lines of the file, from the versions of each Python. A package that has the same version for all of them
    needs no marker."""
    lines: list[str] = []
    for name in sorted({name for versions in resolved.values() for name in versions}):
        pythons: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if name in versions:
                pythons.setdefault(versions[name], []).append(python)
        if len(pythons) == 1:
            lines += [f"{name}=={version}" for version in pythons]
        else:
            lines += [
                f"{name}=={version}; " + " or ".join(f'python_version == "{python}"' for python in users)
                for version, users in pythons.items()
            ]
    return lines


def main() -> None:
    resolved: dict[str, dict[str, str]] = {}
    for python in sys.argv[1:] or [sys.executable]:
        shown = "import sys; print('%d.%d' % sys.version_info[:2])"
        version = subprocess.run([python, "-c", shown], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        resolved[version] = resolve(python)
    FILE.write_text(HEAD + "\n".join(merge(resolved)) + "\n")
    print(f"{FILE.name}: {len(FILE.read_text().splitlines()) - 2} versions, for Python {', '.join(resolved)}")


if __name__ == "__main__":
    main()
