"""The project file: development dependencies are pinned, and published extras are for users."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PIN = re.compile(r'([a-z0-9-]+)==[\w.]+(; python_version == "3\.\d+"( or python_version == "3\.\d+")*)?')


def project_file() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned() -> set[str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    found = [PIN.fullmatch(line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    return {match[1] for match in found if match is not None}


def test_every_requirement_has_an_exact_version_in_the_constraints() -> None:
    project = project_file()
    groups = (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values())
    required = {
        re.split(r"[\[<>=~!]", requirement)[0]
        for requirement in (*project["project"]["dependencies"], *(item for group in groups for item in group), "pip")
    }
    assert required - pinned() == {"holdfast"}


def test_published_extras_are_for_users() -> None:
    assert set(project_file()["project"]["optional-dependencies"]) == {"redis", "web", "all"}
