"""What must stay true of the tree: arrows point one way, nothing is pickled, no hidden clock or dice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

LAYERS = ["errors", "clock", "jobs", "events", "machine", "storage", "waiters"]
"""From the values up: a module may import from its own layer and those before it."""
PURE = ["errors", "jobs", "events", "machine"]
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
def test_a_module_imports_only_from_the_layers_below_it(path: Path) -> None:
    own = layer(name_of(path))
    if not own:
        return
    assert own in LAYERS, f"{path} is in no layer: add it to LAYERS"
    allowed = LAYERS[: LAYERS.index(own) + 1]
    used = {layer(name) for name in imports(path) if name.startswith("holdfast.")}
    assert used <= set(allowed)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_can_be_unpickled(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & UNSAFE


@pytest.mark.parametrize("module", PURE)
def test_values_and_decisions_do_no_io(module: str) -> None:
    used = {name.split(".")[0] for name in imports(SOURCE / f"{module}.py")}
    assert used <= {"__future__", "base64", "enum", "holdfast", "msgspec", "os", "time", "typing"}
    if module == "machine":
        assert not used & {"os", "time"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_storages_read_their_own_clock_only(path: Path) -> None:
    """Monotonic time is for waiting; wall time comes from the injected clock, or makes an id."""
    if path.name in ("clock.py", "jobs.py"):
        return
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    assert not calls & {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_app_side_knows_no_storage_by_name() -> None:
    concrete = {"holdfast.storage.memory", "holdfast.storage.sqlite", "holdfast.storage.lane"}
    for path in MODULES:
        if path.parent.name != "storage":
            assert not imports(path) & concrete, path


def test_every_command_in_the_readme_is_there() -> None:
    script = (ROOT / "dev").read_text()
    lines = (ROOT / "README.md").read_text().splitlines()
    words = [line.split()[1] for line in lines if line.strip().startswith("./dev ")]
    assert words
    for word in words:
        assert f"  {word})" in script
