"""An app, as those see it who run it: imported by its target, `module:name`, and the parts that it offers.

`holdfast.Holdfast` is such an app. A child process knows no more of it than `AppParts`.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

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
    """The URL of its storage; None if the app was given an open storage instead."""
    namespace: str
    max_payload: int | None
    open_lazily: Callable[[], AbstractAsyncContextManager[object]]
    """Opens the app, and its storage only when it is first used."""


class RunnableApp(ABC):
    """An app that a worker can run."""

    @abstractmethod
    def _parts(self) -> AppParts: ...


def app_parts(app: RunnableApp) -> AppParts:
    return app._parts()  # pyright: ignore[reportPrivateUsage]


def import_app(target: str, kind: type[A]) -> A:
    """Import an app, which must be of this class. Raises OptionError, with the traceback of the user's code if that
    failed."""
    module, name = parse_target(target)
    imported = _import(module, target)
    if not name:
        return _the_only_app(imported, target, kind)
    found: Any = imported
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise OptionError(f"{target}: module {module} has no {name!r}{_apps_in(imported, kind)}") from None
    if not isinstance(found, kind):
        raise OptionError(f"{target} is not a Holdfast app, but {found!r:.80}{_apps_in(imported, kind)}")
    return found


def parse_target(target: str) -> tuple[str, str]:
    """The module of a target, and the name in it, which is empty if only a module is named."""
    module, _, name = target.partition(":")
    parts = [*module.split("."), *(name.split(".") if name else [])]
    if not all(part.isidentifier() for part in parts):
        raise OptionError(f"{target!r:.120} names no app: write module:name, like shop.tasks:app")
    return module, name


def locate_app(app: object) -> str:
    """The target by which another process imports this app. It must be at the top of a module."""
    for module_name, module in sorted(sys.modules.items(), key=lambda item: item[0] == "__main__"):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is app and name.isidentifier():
                return f"{_importable(module_name, module)}:{name}"
    raise OptionError(
        "child processes import the app, and no module has it: define it at the top of one, or leave processes out"
    )


def _import(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise OptionError(
                f"{target}: there is no module {error.name!r} here: is this the right folder? ({Path.cwd()})"
            ) from None
        raise OptionError(_failed(module, error)) from error
    except (Exception, SystemExit) as error:
        raise OptionError(_failed(module, error)) from error


def _failed(module: str, error: BaseException) -> str:
    """The user's frames, without those of the import machinery."""
    shown = traceback.TracebackException.from_exception(error)
    package = str(Path(__file__).parents[1])
    frames = [
        frame for frame in shown.stack if "importlib" not in frame.filename and not frame.filename.startswith(package)
    ]
    shown.stack = traceback.StackSummary.from_list(frames)
    return f"module {module} could not be imported:\n{''.join(shown.format()).rstrip()}"


def _the_only_app(module: ModuleType, target: str, kind: type[A]) -> A:
    apps = {id(value): value for value in vars(module).values() if isinstance(value, kind)}
    if len(apps) != 1:
        raise OptionError(f"{target}: which app? Write {module.__name__}:name{_apps_in(module, kind)}")
    return next(iter(apps.values()))


def _apps_in(module: ModuleType, kind: type) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, kind)]
    return f"; there is {', '.join(f'{module.__name__}:{name}' for name in apps)}" if apps else "; it has no app"


def _importable(name: str, module: ModuleType) -> str:
    """The name by which another process imports a module. A program's own file has one, too."""
    if name != "__main__":
        return name
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if file is None:
        raise OptionError("child processes import the app, and a session has no file: put the app into a module")
    if not Path(file).stem.isidentifier():
        raise OptionError(f"child processes import the app, and {Path(file).name} cannot be imported: rename it")
    return Path(file).stem
