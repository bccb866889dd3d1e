"""The settings of a command: from the command line, the environment, or `[tool.holdfast]` in pyproject.toml."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.session import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE, URL_VARIABLE
from holdfast.errors import OptionError
from holdfast.storage.urls import DEFAULT_URL


class Settings(msgspec.Struct, frozen=True):
    """Storage and app of a command. The command line comes first, then the environment, then pyproject.toml."""

    url: str
    source: str
    """Source of the URL for error messages: an option, a variable or a file."""
    namespace: str
    app: str | None

    def open(self) -> Holdfast[None]:
        if self.url.startswith("memory:"):
            raise OptionError("memory:// is lost when this command ends: use sqlite:///… or the URL of a server")
        try:
            return Holdfast(self.url, namespace=self.namespace)
        except OptionError as error:
            raise OptionError(f"{self.source}: {error}") from None

    def missing_file(self) -> Path | None:
        """The path of the SQLite file if the storage is one and the file does not exist; else None."""
        if not self.url.startswith("sqlite:///"):
            return None
        file = Path(unquote(urlsplit(self.url).path[1:])).absolute()
        return None if file.exists() else file


def settings(url: str | None, namespace: str | None) -> Settings:
    if url == "":
        raise OptionError("--url is empty: check whether the shell variable is set")
    file, project = _project()
    unknown = set(project) - {"url", "namespace", "app"}
    if unknown:
        raise OptionError(
            f"{file}: unknown names in [tool.holdfast]: {', '.join(sorted(unknown))}. Use url, namespace or app"
        )
    for name, value in project.items():
        if not isinstance(value, str):
            raise OptionError(f"{file}: [tool.holdfast] {name} must be text, not {type(value).__name__}")
    sources = {"--url": url, URL_VARIABLE: os.environ.get(URL_VARIABLE), f"{file}": project.get("url")}
    source, chosen = next(((name, value) for name, value in sources.items() if value), ("", DEFAULT_URL))
    return Settings(
        chosen,
        source,
        namespace or os.environ.get(NAMESPACE_VARIABLE) or project.get("namespace") or DEFAULT_NAMESPACE,
        project.get("app"),
    )


def _project() -> tuple[Path | None, dict[str, Any]]:
    """Find `[tool.holdfast]` in the pyproject.toml of the current folder or its nearest parent."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None, {}  # The current folder was deleted.
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                found = tomllib.loads(file.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise OptionError(f"{file} cannot be read: {error}") from None
            return file, _table(_table(found, "tool", file), "holdfast", file)
    return None, {}


def _table(found: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise OptionError(f"{file}: {name} must be a table: [tool.holdfast] has url, namespace and app")
    return cast("dict[str, Any]", value)


def look_here() -> None:
    """Put the current folder on the import path, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
