"""docs/development/seeds.md is complete: every item has a row, every row an answer, and every named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "development" / "seeds.md"

ASSERTIONS = {
    "4.1": 19,
    "4.2": 18,
    "4.3": 45,
    "4.4": 37,
    "4.5": 13,
    "4.6": 12,
    "4.7": 29,
    "4.8": 8,
    "4.9": 25,
    "4.10": 12,
    "4.11": 18,
    "4.12": 38,
}
"""How much each suite of the four systems asserts."""
FLAWS = {"F-Q": 21, "F-P": 28, "F-M": 15, "F-W": 13}

ROW = re.compile(r"^\| ((?:4|F-)\S+) \| (.+?) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ANSWER = re.compile(TEST.pattern + r"|the design: “[^”]+”|`later: (?:app|worker|cli)`")


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(TABLE.read_text(encoding="utf-8"))


def named_tests() -> set[tuple[str, str]]:
    return set(TEST.findall(TABLE.read_text(encoding="utf-8")))


def defined_in(path: Path) -> set[str]:
    """The tests of a file, with those that it imports from the conformance suite."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            found |= defined_in(ROOT / "src" / f"{node.module.replace('.', '/')}.py")
    return found


def test_the_table_has_every_item_once_and_in_order() -> None:
    expected = [f"{suite}.{n}" for suite, count in ASSERTIONS.items() for n in range(1, count + 1)]
    expected += [f"{system}{n}" for system, count in FLAWS.items() for n in range(1, count + 1)]
    assert [item for item, _, _ in rows()] == expected


def test_every_row_ends_in_a_test_or_a_reason() -> None:
    assert [item for item, _, answer in rows() if not ANSWER.search(answer)] == []


def test_every_test_that_the_table_names_exists() -> None:
    missing = [
        f"{path}::{test}"
        for path, test in sorted(named_tests())
        if not (ROOT / path).is_file() or test not in defined_in(ROOT / path)
    ]
    assert missing == []


SUITES = sorted([*(ROOT / "tests/storage").glob("test_seeds*.py"), *(ROOT / "tests/app").glob("test_seeds*.py")])


@pytest.mark.parametrize("path", SUITES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_test_of_the_seeds_is_named_in_the_table(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    assert sorted(defined_in(path) - {test for where, test in named_tests() if where == name}) == []
