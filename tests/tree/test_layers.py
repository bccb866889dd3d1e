"""What must stay true of the tree: arrows point one way, nothing is pickled, no hidden clock or dice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"
MODULES = sorted(SOURCE.rglob("*.py"))

LAYERS = [
    *(("version", "text", "errors"), ("clock",), ("jobs",), ("events",), ("machine",), ("options",), ("policy",)),
    *(("fleet",), ("storage",), ("waiters",), ("codec",), ("arguments", "exceptions"), ("runs",), ("execution",)),
    *(("hooks",), ("steps", "logs"), ("processes", "frames"), ("children",), ("relay",), ("inline", "pool")),
    *(
        ("beat", "drain"),
        ("feed", "reports"),
        ("worker",),
        ("targets",),
        ("connection",),
        ("lease",),
        ("task", "queue", "sync"),
    ),
    *(("app",), ("explain",), ("child", "testing"), ("pytest_plugin",), ("cli",), ("__main__",)),
]
"""From the values up: a module may import from its own layer and those before it."""
PURE = ["errors", "jobs", "events", "machine", "options", "policy", "fleet"]
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
    (place,) = [at for at, modules in enumerate(LAYERS) if own in modules]
    allowed = {module for modules in LAYERS[: place + 1] for module in modules}
    used = {layer(name) for name in imports(path) if name.startswith("holdfast.")}
    assert used <= allowed


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_can_be_unpickled(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & UNSAFE


@pytest.mark.parametrize("module", PURE)
def test_values_and_decisions_do_no_io(module: str) -> None:
    used = {name.split(".")[0] for name in imports(SOURCE / f"{module}.py")}
    values = {
        "__future__",
        "binascii",
        "collections",
        "datetime",
        "difflib",
        "enum",
        "holdfast",
        "math",
        "msgspec",
        "typing",
    }
    assert used <= values | {"jobs": {"os", "time"}, "policy": {"random"}, "errors": {"functools"}}.get(module, set())


def test_the_storage_knows_no_policy_and_no_app() -> None:
    above = {"holdfast.policy", "holdfast.fleet", "holdfast.options"}
    for path in (SOURCE / "storage").rglob("*.py"):
        assert not {name for name in imports(path) if name.startswith(tuple(above))}, path


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
    for path in SOURCE.glob("*.py"):
        used = {name.split(".")[2] for name in imports(path) if name.startswith("holdfast.storage.")}
        modules = {name for name in used if (SOURCE / "storage" / name).with_suffix(".py").exists() or name == "redis"}
        assert modules <= {"checks", "deferred"}, path


def test_every_command_in_the_readme_is_there() -> None:
    script = (ROOT / "dev").read_text()
    lines = (ROOT / "README.md").read_text().splitlines()
    words = [line.split()[1] for line in lines if line.strip().startswith("./dev ")]
    assert words
    for word in words:
        assert f"  {word})" in script
