"""Imports an app by its target, `module:name`, and defines the parts of an app that a child process uses."""

from __future__ import annotations

import importlib
import operator
import sys
import tomllib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

from holdfast._core.applications import Application
from holdfast._worker.handler import AppHooks, Handler
from holdfast._worker.telemetry import OnEvent
from holdfast.errors import OptionError

A = TypeVar("A")


class AppParts(NamedTuple):
    """The parts of an app."""

    handlers: list[Handler]
    hooks: AppHooks
    on_event: list[OnEvent]
    lifespan: Callable[[], AbstractAsyncContextManager[object]] | None
    url: str | None
    """URL of the storage; None if the app was given an open storage instead."""
    on_default: bool
    """Nothing chose the URL."""
    namespace: str
    max_payload: int | None
    open_lazily: Callable[[], AbstractAsyncContextManager[object]]
    """Opens the app. Its storage is opened at the first use."""


class RunnableApp(ABC):
    """An app that a worker can run."""

    @abstractmethod
    def _parts(self) -> AppParts: ...


def app_parts(app: RunnableApp) -> AppParts:
    return app._parts()  # pyright: ignore[reportPrivateUsage]


def import_app(target: str, kind: type[A]) -> A:
    """Import an instance of `kind`. Raises OptionError, with the traceback of the user's code if that raised."""
    module, name = parse_target(target)
    imported = _import(module, target)
    apps = {attribute: value for attribute, value in vars(imported).items() if isinstance(value, kind)}
    names = ", ".join(f"{module}:{attribute}" for attribute in apps)
    hint = f"; it has {names}" if names else "; it has no app"
    if not name:
        only = {id(app): app for app in apps.values()}
        if len(only) != 1:
            raise OptionError(f"{target} does not say which app: write {module}:name{hint}")
        return only.popitem()[1]
    try:
        found = operator.attrgetter(name)(imported)
    except AttributeError:
        raise OptionError(f"{target}: module {module} has no {name!r}{hint}") from None
    if not isinstance(found, kind):
        raise OptionError(f"{target} is {found!r:.80}, not a Holdfast app{hint}")
    return found


def parse_target(target: str) -> tuple[str, str]:
    """Split a target into the module and the name in it, which is empty if the target is only a module."""
    module, _, name = target.partition(":")
    parts = [*module.split("."), *(name.split(".") if name else [])]
    if not all(part.isidentifier() for part in parts):
        raise OptionError(f"{target!r:.120} is not the name of an app: write module:name, like shop.tasks:app")
    return module, name


def locate_app(app: object) -> str:
    """The target with which another process imports this app. The app must be at the top level of a module."""
    main = sys.modules.get("__main__")
    for module_name, module in sorted(sys.modules.items(), key=lambda item: item[1] is main):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is app and name.isidentifier():
                return f"{_importable(module_name, module)}:{name}"
    raise OptionError(
        "child processes cannot import the app: define it at the top level of a module, or omit processes"
    )


def application_of(app: object) -> Application:
    """Return the target and the source of an app; nothing if other processes cannot import it."""
    try:
        target = locate_app(app)
    except OptionError:
        return Application()
    return Application(target, source_of(target))


def source_of(target: str) -> str:
    """Return the name of the project of an app, from the pyproject.toml nearest to its module; else the file."""
    module = sys.modules.get(parse_target(target)[0]) or sys.modules.get("__main__")
    name = getattr(module, "__file__", None)
    if name is None:
        return ""
    file = Path(name).resolve()
    projects = (folder / "pyproject.toml" for folder in file.parents)
    project = next((project for project in projects if project.is_file()), file)
    with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"])
    return str(file)


def _import(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            what = f"{target}: there is no module {missing!r} here"
            raise OptionError(f"{what}: is this the right folder? ({Path.cwd()})") from None
        shown = traceback.TracebackException.from_exception(error)
        package = str(Path(__file__).parents[1])
        frames = [  # Those of the user's code alone.
            frame
            for frame in shown.stack
            if "importlib" not in frame.filename and not frame.filename.startswith(package)
        ]
        shown.stack = traceback.StackSummary.from_list(frames)
        raise OptionError(f"module {module} could not be imported:\n{''.join(shown.format()).rstrip()}") from error


def _importable(name: str, module: ModuleType) -> str:
    """The name with which another process imports a module, also if that is the program itself."""
    if module is not sys.modules.get("__main__"):  # With multiprocessing it is also `__mp_main__`.
        return name
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if file is None:
        raise OptionError("child processes cannot import an app of an interactive session: put it into a module")
    if not Path(file).stem.isidentifier():
        raise OptionError(f"child processes cannot import {Path(file).name}: rename it to a valid module name")
    return Path(file).stem
