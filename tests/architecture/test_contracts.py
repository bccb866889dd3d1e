"""What must stay true of the tree: arrows point one way, nothing is pickled, no hidden clock or dice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

LAYERS = {
    "_core": 0,
    "errors": 0,
    "version": 0,
    "storage": 1,
    "_worker": 2,
    "_client": 3,
    "testing": 4,
    "cli": 5,
    "pytest_plugin": 5,
    "__main__": 6,
}
"""Import direction between packages: a module imports from its own layer and the layers below it."""
PUBLIC_NAMES = 4
"""The layer of names that are imported from `holdfast` itself."""
PURE = sorted(path.stem for path in (SOURCE / "_core").glob("*.py"))
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "multiprocessing"}


def imports(path: Path) -> set[str]:
    """What a module imports, by full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layer(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def name_of(path: Path) -> str:
    parts = ("holdfast", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_imports_only_from_lower_layers(path: Path) -> None:
    own = layer(name_of(path))
    if not own:
        return
    used = {layer(name) for name in imports(path) if name.startswith("holdfast.")}
    assert {name for name in used if LAYERS.get(name, PUBLIC_NAMES) > LAYERS[own]} == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_can_be_unpickled(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & UNSAFE


IMPURE = {"asyncio", "os", "pathlib", "random", "socket", "sqlite3", "subprocess", "threading", "time"}
EXCEPTIONS = {
    "clock": {"time"},
    "jobs": {"os", "time"},
    "retry_policy": {"random"},
    "failure": {"asyncio", "pathlib"},
    "options": {"time"},
}
"""Reads of the clock and of random bytes that make an id or a stamp; `random` for the type of an argument."""


@pytest.mark.parametrize("module", PURE)
def test_values_and_decisions_do_no_io(module: str) -> None:
    used = {name.split(".")[0] for name in imports(SOURCE / "_core" / f"{module}.py")}
    assert used & IMPURE <= EXCEPTIONS.get(module, set())


def test_storages_import_no_policy() -> None:
    above = ("holdfast._core.retry_policy", "holdfast._core.capacity", "holdfast._core.options")
    for path in (SOURCE / "storage").rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith(above)}, path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_storages_read_their_own_clock_only(path: Path) -> None:
    """Monotonic time is for waiting; wall time comes from the injected clock, or makes an id."""
    if path.name in ("clock.py", "jobs.py"):
        return
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not calls & {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_client_and_worker_import_no_concrete_storage() -> None:
    for package in ("_client", "_worker"):
        for path in (SOURCE / package).rglob("*.py"):
            used = {name.split(".")[2] for name in imports(path) if name.startswith("holdfast.storage.")}
            assert not used & {"local", "redis", "postgres"}, path


def test_every_command_in_the_readme_exists() -> None:
    script = (ROOT / "dev").read_text()
    lines = (ROOT / "README.md").read_text().splitlines()
    words = [line.split()[1] for line in lines if line.strip().startswith("./dev ")]
    assert words
    for word in words:
        assert f"  {word})" in script
