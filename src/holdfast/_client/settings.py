"""Find the storage of an app or a command: an argument, a variable, `[tool.holdfast]` in pyproject.toml, the default.

Apps, workers, their children and commands call `find_settings`, so they agree. Nothing is put into the environment.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

import msgspec

from holdfast.errors import OptionError
from holdfast.storage.urls import DEFAULT_URL

URL_VARIABLE, NAMESPACE_VARIABLE = "HOLDFAST_URL", "HOLDFAST_NAMESPACE"
DEFAULT_NAMESPACE = "hf"
SQLITE = "sqlite:///"

log = logging.getLogger("holdfast")


class Settings(msgspec.Struct, frozen=True):
    """Storage and app of a program."""

    url: str
    source: str
    """The variable or file that has the URL, for error messages. Empty for an argument and for the default."""
    is_default: bool
    """Whether nothing chose the URL."""
    namespace: str
    app: str | None

    def missing_file(self) -> Path | None:
        """The path of the SQLite file if the storage is one and the file does not exist; else None."""
        file = sqlite_file(self.url)
        return None if file is None or file.exists() else file


class Project(msgspec.Struct, frozen=True):
    """The values of `[tool.holdfast]`; None for those that are not given."""

    file: Path | None = None
    url: str | None = None
    namespace: str | None = None
    app: str | None = None


def find_settings(url: str | None = None, namespace: str | None = None) -> Settings:
    """Return the settings for these arguments: what is None comes from the environment, else from pyproject.toml, else
    it is the default. An empty variable counts as not set."""
    project = find_project()
    sources = {"": url, URL_VARIABLE: os.environ.get(URL_VARIABLE), f"{project.file}": project.url}
    source, chosen = next(((name, value) for name, value in sources.items() if value), ("", None))
    if namespace is None:
        namespace = os.environ.get(NAMESPACE_VARIABLE) or project.namespace or DEFAULT_NAMESPACE
    return Settings(chosen or DEFAULT_URL, source, chosen is None, namespace, project.app)


def warn_of_default(url: str) -> None:
    """Log that nothing chose the storage: a program in another folder would use another file."""
    log.warning(
        "no storage is chosen, so the jobs are in %s: pass Holdfast(url), or set %s", sqlite_file(url), URL_VARIABLE
    )


def sqlite_file(url: str) -> Path | None:
    """The absolute path of the file that a `sqlite:///` URL names."""
    return Path(unquote(urlsplit(url).path[1:])).absolute() if url.startswith(SQLITE) else None


def find_project() -> Project:
    """Read the pyproject.toml of the current folder or of its nearest parent that has one."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return Project()  # The current folder was deleted.
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        try:
            if file.is_file():
                return _read_trusted(file)
        except PermissionError as error:
            log.warning("ignored %s: this user may not read it (%s)", file, error.strerror)
            return Project()
    return Project()


def _read_trusted(file: Path) -> Project:
    """Read a file, unless another user could have written it: its URL decides where jobs and their payloads go."""
    facts = file.stat()
    if facts.st_uid not in (0, os.geteuid()):
        danger = "another user owns it"
    elif facts.st_mode & stat.S_IWOTH:
        danger = "every user may write to it"
    else:
        return _read(file)
    try:
        ignored = _read(file)
    except (OptionError, OSError):
        return Project()
    if ignored.url or ignored.namespace or ignored.app:
        log.warning("ignored [tool.holdfast] in %s: %s", file, danger)
    return Project()


def _read(file: Path) -> Project:
    try:
        found = _parse(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} cannot be read: {error}") from None
    values = _table(_table(found, "tool", file), "holdfast", file)
    unknown = set(values) - {"url", "namespace", "app"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise OptionError(f"{file}: unknown names in [tool.holdfast]: {names}. Use url, namespace or app")
    for name, value in values.items():
        if not isinstance(value, str):
            raise OptionError(f"{file}: [tool.holdfast] {name} must be text, not {type(value).__name__}")
    if "url" in values:
        values = {**values, "url": _anchored(values["url"], file.parent)}
    return Project(file, **values)


@functools.lru_cache(maxsize=4)
def _parse(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _table(found: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise OptionError(f"{file}: {name} must be a table: [tool.holdfast] has url, namespace and app")
    return cast("dict[str, Any]", value)


def _anchored(url: str, folder: Path) -> str:
    """Make a relative path of a SQLite URL relative to a folder, so that it names one file from every subfolder."""
    path = url.removeprefix(SQLITE)
    if path == url or path[:1] in ("", "/", ":", "?", "#"):
        return url
    return f"{SQLITE}{quote(str(folder))}/{path}"
