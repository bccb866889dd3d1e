"""docs/development/limits.md names every queue in memory and every cache without a limit, and no limit that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
PAGE = (ROOT / "docs" / "development" / "limits.md").read_text()
MODULES = sorted(path for path in SOURCE.rglob("*.py") if "conformance" not in path.parts)

BOUND_BY = {
    "deque": "maxlen",
    "Queue": "maxsize",
    "LifoQueue": "maxsize",
    "PriorityQueue": "maxsize",
    "SimpleQueue": "",
    "cache": "",
    "lru_cache": "maxsize",
    "ThreadPoolExecutor": "max_workers",
}
"""What may grow, and the argument that limits it; empty if nothing can."""


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def called(node: ast.expr) -> str:
    """The last part of the name of a function or class."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_unlimited(node: ast.expr) -> bool:
    """Whether an expression makes something that may grow without a limit."""
    if not isinstance(node, ast.Call):
        return called(node) in ("cache", "lru_cache")
    if called(node.func) not in BOUND_BY:
        return False
    name = BOUND_BY[called(node.func)]
    given = [keyword.value for keyword in node.keywords if keyword.arg == name] + node.args[name == "maxlen" :]
    return not given or (isinstance(given[0], ast.Constant) and not given[0].value)


def unlimited(tree: ast.AST) -> Iterator[str]:
    """The names of attributes, variables and cached functions without a limit."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                if is_unlimited(value):
                    yield called(target)
            case ast.FunctionDef(name=name, decorator_list=decorators):
                if any(is_unlimited(decorator) for decorator in decorators):
                    yield name


def rows_of(path: Path) -> str:
    return "\n".join(line for line in PAGE.splitlines() if f"`{name_of(path)}`" in line)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_page_names_queues_and_caches_without_a_limit(path: Path) -> None:
    rows = rows_of(path)
    assert [name for name in unlimited(ast.parse(path.read_text())) if f"`{name}`" not in rows] == []


def test_page_names_nothing_that_is_gone() -> None:
    for line in PAGE.splitlines():
        modules = [SOURCE / module for module in re.findall(r"`([a-z_/]+\.(?:py|lua))`", line)]
        text = "\n".join(path.read_text() for path in modules if path.exists())
        assert all(path.exists() for path in modules if "test_" not in path.name), line
        assert [name for name in re.findall(r"`([A-Z][A-Z_]+)`", line) if modules and name not in text] == []


@pytest.mark.parametrize(
    "code",
    [
        *("self.a = deque()", "self.a: deque[int] = deque()", "a = asyncio.Queue()", "self.a = queue.SimpleQueue()"),
        *(
            "a = Queue(0)",
            "@cache\ndef a(): ...",
            "@functools.lru_cache(None)\ndef a(): ...",
            "a = ThreadPoolExecutor()",
        ),
    ],
)
def test_containers_without_a_limit_are_found(code: str) -> None:
    assert list(unlimited(ast.parse(code))) == ["a"]


@pytest.mark.parametrize("code", ["a = deque(maxlen=5)", "a = deque([], 5)", "a = Queue(5)", "a = Queue(maxsize=5)"])
def test_containers_with_a_limit_are_not_found(code: str) -> None:
    assert list(unlimited(ast.parse(code))) == []
