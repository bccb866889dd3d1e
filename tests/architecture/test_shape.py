"""The shape of the package: sizes, parameters and names that stay within their limits."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))
CODE = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".py", ".lua", ".sql"))

MOST_LINES = 500
MOST_TOP_LEVEL_MODULES = 10
MOST_PARAMETERS = 8

BUDGETS = {
    "_core": 3_515,
    "_client": 2_545,
    "_worker": 4_445,
    "storage": 9_350,
    "storage/conformance": 3_430,
    "cli": 2_495,
    "testing": 630,
    "": 260,
}
"""Lines of Python, Lua and SQL per package. Raise a budget only with the reason in the commit message."""
APART = ("cli", "storage/conformance")
"""Packages that the sum leaves out: the command line, and tests for authors of storages, which no program imports."""
WITHOUT_CLI = 20_730

PUBLIC_OPTIONS = {"_client/app.py:worker"}
"""Public signatures that list options, which may have more parameters."""


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def package_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    if parts[:2] == ("storage", "conformance"):
        return "storage/conformance"
    return parts[0] if len(parts) > 1 else ""


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_module_has_at_most_500_lines(path: Path) -> None:
    assert lines_of(path) <= MOST_LINES


@pytest.mark.parametrize("package", BUDGETS)
def test_package_stays_within_its_budget(package: str) -> None:
    assert sum(lines_of(path) for path in CODE if package_of(path) == package) <= BUDGETS[package]


def test_every_package_has_a_budget() -> None:
    assert {package_of(path) for path in CODE} == set(BUDGETS)


def test_package_without_cli_stays_within_its_lines() -> None:
    assert sum(lines_of(path) for path in CODE if package_of(path) not in APART) <= WITHOUT_CLI


def test_few_modules_lie_at_the_top() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_TOP_LEVEL_MODULES


def test_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Click passes every option of a command as a parameter."""
    return any(
        "click." in ast.unparse(decorator) or "command" in ast.unparse(decorator)
        for decorator in function.decorator_list
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_function_has_at_most_eight_parameters(path: Path) -> None:
    long = []
    for function in functions(path):
        arguments = function.args
        count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
        if (
            count > MOST_PARAMETERS
            and not is_command(function)
            and f"{name_of(path)}:{function.name}" not in PUBLIC_OPTIONS
        ):
            long.append(f"{function.name}: {count}")
    assert long == []
