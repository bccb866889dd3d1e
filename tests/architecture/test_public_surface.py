"""Four modules are public, docs/reference/api.md documents all of their names, and every documented import exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.test_cli_docs import in_code

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
PUBLIC = ["holdfast", "holdfast.errors", "holdfast.storage", "holdfast.testing"]
DOCUMENTED_EDGES = {
    "holdfast.storage.redis": {"of_client"},
    "holdfast.storage.conformance": {"MODULES", "Stage", "StorageHarness", "clock", "stage"},
}
"""Public functions of modules that are otherwise private."""
TOP_LEVEL = {"__init__", "__main__", "errors", "pytest_plugin", "version"}
"""Modules that may lie directly in the package."""
PACKAGES = {"_client", "_core", "_worker", "cli", "storage", "testing"}
IMPORT = re.compile(r"from (holdfast[\w.]*) import (\([^)]*\)|[^\n#;]+)")


def public_names(module: str) -> set[str]:
    return set(importlib.import_module(module).__all__)


def documented_imports() -> list[tuple[str, str, str]]:
    """Page, module and name of every import in the README, the user pages and the examples."""
    patterns = ["README.md", "docs/*.md", "docs/reference/*.md", "examples/*.py"]
    pages = [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]
    internal = {"wire.md"}
    found: list[tuple[str, str, str]] = []
    for page in pages:
        if page.name not in internal:
            for module, names in IMPORT.findall(page.read_text()):
                found += [(page.name, module, name) for name in re.findall(r"\w+", re.sub(r" as \w+", "", names))]
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_all_names_of_a_public_module_exist(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert sorted(loaded.__all__) == sorted(set(loaded.__all__))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_api_reference(module: str) -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    assert [name for name in sorted(public_names(module)) if not in_code(name, page)] == []


def test_every_documented_import_is_public() -> None:
    imports = documented_imports()
    assert len(imports) > 20
    known = {**{module: public_names(module) for module in PUBLIC}, **DOCUMENTED_EDGES}
    assert [found for found in imports if found[2] not in known.get(found[1], set())] == []


def test_documented_functions_of_private_modules_exist() -> None:
    for module, names in DOCUMENTED_EDGES.items():
        assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def test_every_class_and_function_that_the_reference_heads_is_public() -> None:
    headings = re.findall(r"^#+ .*`(\w+)`$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE)
    known = set().union(*map(public_names, PUBLIC))
    assert len(headings) > 10
    assert set(headings) - known - {"sync"} == set()


def test_errors_are_the_same_in_both_public_modules() -> None:
    errors, package = importlib.import_module("holdfast.errors"), importlib.import_module("holdfast")
    assert [name for name in errors.__all__ if getattr(package, name, None) is not getattr(errors, name)] == []


def test_every_other_module_lies_in_a_known_package() -> None:
    modules = {path.stem for path in SOURCE.glob("*.py")}
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert (modules - TOP_LEVEL, packages - PACKAGES) == (set(), set())


def test_the_pytest_plugin_imports_the_package_only_in_its_fixture() -> None:
    """Python itself imports holdfast/__init__.py before the plugin; the plugin adds nothing to that."""
    program = (
        "import sys, holdfast; before = set(sys.modules); import holdfast.pytest_plugin;"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('holdfast')))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['holdfast.pytest_plugin']"
