"""Failpoints at every await of the package, without a trace of them in the package itself.

`install` puts an importer in front of Python's. It rewrites each module as it is loaded, so that every `await`, and
every one that hides in `async with` and `async for`, is announced before it begins and after it ended. A point is named
for its place: `drain.Drain._send#2` is the second in that function, and `.enter`, `.exit` and `.next` are the hidden
ones. So none can be forgotten, and a new one is covered by itself. Modules that are not on a job's path are `OFF_PATH`.

What happens at a point is a `Plan`. Nothing of the package is imported here.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

PACKAGE = "holdfast"

OFF_PATH = {
    "cli": "commands are programs around the same calls",
    "_worker.processes.child_main": "runs in child processes, which are expected to die: tests/worker",
    "cli.reasons": "looks at a job, changes nothing",
    "storage.redis.audit": "an operator's look, apart from any job's way",
    "_client.sync": "runs the same coroutines on a loop in the background",
    "storage.conformance": "tests of storages",
    "testing": "runs on memory, in tests of users",
}
"""Modules, or folders of them, whose awaits no job depends on."""

Side = Literal["before", "during", "after"]
Action = Literal["crash", "cancel", "late", "stop", "cut"]


@dataclass(frozen=True)
class Plan:
    """A fault, its point, and at which visit of the point it happens."""

    point: str
    side: Side
    action: Action
    hit: int = 1


class Points:
    """What was reached in this process, and what is to happen there."""

    def __init__(self) -> None:
        self.reached: Counter[tuple[str, Side]] = Counter()
        self.plan: Plan | None = None
        self.fired = False
        self.fire: Callable[[Plan], None] = do
        """Who carries a plan out."""

    def announce(self, point: str, side: Side) -> bool:
        """A point is reached. Is it the one that was planned for?"""
        self.reached[point, side] += 1
        plan = self.plan
        if plan is None or self.fired or (plan.point, plan.side) != (point, side):
            return False
        if self.reached[point, side] != plan.hit:
            return False
        self.fired = True
        if side != "during":
            self.fire(plan)
        return True


def do(plan: Plan) -> None:
    """The plainest way: the process is gone, or the task at the point is cancelled. A stage knows others."""
    if plan.action == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


points = Points()
"""Of this process. A fork begins with what its parent had."""


# What a rewritten module calls


def before(point: str) -> None:
    points.announce(point, "before")


def during(point: str, awaitable: Any) -> Any:
    """A future's answer and a cancel may come in the same turn of the loop. The cancel wins, and the answer is lost:
    ours is called before the one that wakes the task that awaits it, so that is just what happens."""
    if asyncio.isfuture(awaitable) and points.announce(point, "during"):
        task = asyncio.current_task()
        assert task is not None
        awaitable.add_done_callback(lambda _: task.cancel())
    return awaitable


def after(point: str, value: Any) -> Any:
    points.announce(point, "after")
    return value


class Entered:
    """An `async with`, with points around both of its awaits."""

    def __init__(self, name: str, block: Any) -> None:
        self._name = name
        self._block = block

    async def __aenter__(self) -> Any:
        before(f"{self._name}.enter")
        return after(f"{self._name}.enter", await self._block.__aenter__())

    async def __aexit__(self, *exc: Any) -> Any:
        before(f"{self._name}.exit")
        return after(f"{self._name}.exit", await self._block.__aexit__(*exc))


class Followed:
    """An `async for`, with points around each of its awaits."""

    def __init__(self, name: str, items: Any) -> None:
        self._name = name
        self._items = items

    def __aiter__(self) -> Followed:
        self._items = aiter(self._items)
        return self

    async def __anext__(self) -> Any:
        before(f"{self._name}.next")
        return after(f"{self._name}.next", await anext(self._items))


CALLED = {
    "__before_point__": before,
    "__during_point__": during,
    "__after_point__": after,
    "__entered_point__": Entered,
    "__followed_point__": Followed,
}


# The rewriting


class Rewriter(ast.NodeTransformer):
    """Names the points of a module, and puts the calls around them."""

    def __init__(self, module: str) -> None:
        self._where = [module]
        self._counts: Counter[str] = Counter()
        self.names: list[str] = []

    def _name(self, *suffixes: str) -> str:
        where = ".".join(self._where)
        self._counts[where] += 1
        name = f"{where}#{self._counts[where]}"
        self.names += [name + suffix for suffix in suffixes or ("",)]
        return name

    def _inside(self, node: Any) -> ast.AST:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()
        return node

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _inside  # noqa: N815 -- ast's names.

    def visit_Await(self, node: ast.Await) -> ast.AST:
        name = ast.Constant(self._name())
        self.generic_visit(node)
        awaited = ast.Await(_call("__during_point__", name, node.value))
        steps = [_call("__before_point__", name), _call("__after_point__", name, awaited)]
        return ast.Subscript(ast.Tuple([*steps], ast.Load()), ast.Constant(1), ast.Load())

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        for item in node.items:
            name = ast.Constant(self._name(".enter", ".exit"))
            item.context_expr = _call("__entered_point__", name, item.context_expr)
        self.generic_visit(node)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        node.iter = _call("__followed_point__", ast.Constant(self._name(".next")), node.iter)
        self.generic_visit(node)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if node.is_async:
            node.iter = _call("__followed_point__", ast.Constant(self._name(".next")), node.iter)
        self.generic_visit(node)
        return node


def _call(function: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), [*args], [])


def rewrite(module: str, source: bytes, path: str) -> tuple[CodeType, list[str]]:
    """A module with its points, and their names."""
    rewriter = Rewriter(module)
    tree = ast.fix_missing_locations(rewriter.visit(ast.parse(source, path)))
    return compile(tree, path, "exec", dont_inherit=True), rewriter.names


# Which modules


def short(module: str) -> str:
    return module.removeprefix(f"{PACKAGE}.")


def off_path(module: str) -> bool:
    return any(short(module) == name or short(module).startswith(f"{name}.") for name in OFF_PATH)


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the package that are on a job's path, by their short names."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and not off_path(name):
            found[name] = path
    return found


@functools.cache
def names() -> list[str]:
    """All points, in the order of modules and lines."""
    return [name for module, path in modules().items() for name in rewrite(module, path.read_bytes(), str(path))[1]]


# The importer

constants: dict[str, dict[str, Any]] = {}
"""Values that replace those of a module as soon as it is loaded, before other modules import them."""


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its points in it. Never from a cache, and never into one."""

    def get_code(self, fullname: str) -> CodeType:
        return rewrite(short(fullname), Path(self.path).read_bytes(), self.path)[0]

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(CALLED)
        super().exec_module(module)
        others = constants.get(short(module.__name__), {})
        assert others.keys() <= module.__dict__.keys(), f"{module.__name__} has no {others.keys()} any more"
        module.__dict__.update(others)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}.") or off_path(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(fullname, spec.loader.path)
        return spec


def install(others: dict[str, dict[str, Any]]) -> None:
    """Load the package with its points and with other constants from now on. Call it only in a separate process."""
    constants.update(others)
    assert PACKAGE not in sys.modules, f"{PACKAGE} is loaded already, without its points"
    sys.meta_path.insert(0, Finder())


# Cutting


def cut_sockets(port: int) -> None:
    """Break every connection of this process to a server. What was sent arrives there, and its reply never here."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as end:
                if end.family == socket.AF_INET and end.getpeername()[1] == port:
                    end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # No socket, or none that is connected.
