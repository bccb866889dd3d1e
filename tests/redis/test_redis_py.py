"""What the package uses of redis-py: public names, of objects that a caller hands in, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
READER = "storage/redis/urls.py"
"""The module that reads objects of redis-py."""


def uses_redis_py(tree: ast.Module) -> bool:
    return any(module.split(".")[0] == "redis" for module, _ in imported(tree))


def imported(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Each module that is imported by an absolute name, and the names that are taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, [alias.name for alias in node.names]


def private_uses(tree: ast.Module) -> list[str]:
    """Private parts of redis-py that a module could reach: private imports, subclasses, and private attributes of any
    object but `self`."""
    found: list[str] = []
    for module, names in imported(tree):
        if module.split(".")[0] == "redis":
            found += [word for word in (*module.split("."), *names) if word.startswith("_") or word == "*"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "delattr", "vars", "type") and len(node.args) != 1:
                found.append(node.func.id)
        elif isinstance(node, ast.ClassDef) and node.bases:
            found.append(f"class {node.name}")
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_redis_py_is_used_in_one_module_only() -> None:
    users = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if uses_redis_py(parsed(path))}
    assert users == {READER}


def test_no_private_name_of_redis_py_is_used() -> None:
    assert [name for name in private_uses(parsed(SOURCE / READER)) if not name.startswith("__")] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from redis._parsers import BaseParser", "_parsers"),
        ("from redis.asyncio.connection import _AsyncRESP3Parser", "_AsyncRESP3Parser"),
        ("from redis.asyncio import *", "*"),
        ("connection._reader = None", "_reader"),
        ("client.connection_pool._available_connections.clear()", "_available_connections"),
        ("getattr(connection, '_writer')", "getattr"),
        ("type('Line', (Mixin, kind), {})", "type"),
        ("class Line(Connection): pass", "class Line"),
    ],
)
def test_search_for_private_names_finds_one(text: str, found: str) -> None:
    assert found in private_uses(ast.parse(text))


def test_a_storage_of_a_url_does_not_import_redis_py() -> None:
    program = "import sys, holdfast.storage as s; s.connect('redis://localhost'); print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
