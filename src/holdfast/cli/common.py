"""What commands share: where the storage is, how answers are printed, and what a user's mistake looks like."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import sys
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import unquote, urlsplit

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.session import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE, URL_VARIABLE
from holdfast._core.text import escape_control, format_moment
from holdfast.errors import OptionError
from holdfast.storage.urls import DEFAULT_URL

NO, MISTAKE, UNREACHABLE, TIME_IS_UP = 1, 2, 3, 4
"""Exit status: the answer is no (nothing there, lost, failed, problems found); the user's mistake; the storage cannot
be reached; nothing happened within the wait."""


class Settings(msgspec.Struct, frozen=True):
    """Where to work, from the command line, the environment or `[tool.holdfast]` in pyproject.toml, in this order."""

    url: str
    source: str
    """Where the URL comes from: an option, a variable or a file."""
    namespace: str
    app: str | None

    def open(self) -> Holdfast[None]:
        if self.url.startswith("memory:"):
            raise OptionError("memory:// ends with this command: use sqlite:///… or a server")
        try:
            return Holdfast(self.url, namespace=self.namespace)
        except OptionError as error:
            raise OptionError(f"{self.source}: {error}") from None

    def missing_file(self) -> Path | None:
        """The SQLite file, if that is what it is and there is none."""
        if not self.url.startswith("sqlite:///"):
            return None
        file = Path(unquote(urlsplit(self.url).path[1:])).absolute()
        return None if file.exists() else file


def settings(url: str | None, namespace: str | None) -> Settings:
    if url == "":
        raise OptionError("--url is empty: is a variable of your shell not set?")
    file, project = _project()
    unknown = set(project) - {"url", "namespace", "app"}
    if unknown:
        raise OptionError(f"{file}: [tool.holdfast] has url, namespace and app, not {', '.join(sorted(unknown))}")
    for name, value in project.items():
        if not isinstance(value, str):
            raise OptionError(f"{file}: [tool.holdfast] {name} is text, not {type(value).__name__}")
    sources = {"--url": url, URL_VARIABLE: os.environ.get(URL_VARIABLE), f"{file}": project.get("url")}
    source, chosen = next(((name, value) for name, value in sources.items() if value), ("", DEFAULT_URL))
    return Settings(
        chosen,
        source,
        namespace or os.environ.get(NAMESPACE_VARIABLE) or project.get("namespace") or DEFAULT_NAMESPACE,
        project.get("app"),
    )


def _project() -> tuple[Path | None, dict[str, Any]]:
    """`[tool.holdfast]` of the pyproject.toml here, or in a folder above."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None, {}  # The folder was deleted under us.
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
        raise OptionError(f"{file}: {name} is a table: [tool.holdfast] has url, namespace and app")
    return cast("dict[str, Any]", value)


def with_app(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A command that works on an open app, its first argument: takes `--url` and `--namespace`."""
    return _on_an_app(command, creates=True)


def with_present_app(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same for a command that only makes sense where there is something: it makes no empty file."""
    return _on_an_app(command, creates=False)


def _on_an_app(command: Callable[..., Awaitable[None]], *, creates: bool) -> Callable[..., None]:
    @click.option("--url", metavar="URL", help="Where the jobs are, instead of HOLDFAST_URL or [tool.holdfast].")
    @click.option("--namespace", metavar="NAME", help="Which part of the storage.  [default: hf]")
    @wraps(command)
    def run(*args: Any, url: str | None, namespace: str | None, **kwargs: Any) -> None:
        chosen = settings(url, namespace)
        app = chosen.open()
        if not creates and (missing := chosen.missing_file()) is not None:
            end(NO, f"there is no {missing}: nothing was ever enqueued there. Is this the right folder, or --url?")

        async def main() -> None:
            async with app:
                await command(app, *args, **kwargs)

        try:
            asyncio.run(main())
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return run


def look_here() -> None:
    """Have modules of the present folder found, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")


# What is printed


def say(text: str = "") -> None:
    """A line. What control characters could do to a terminal, they do not."""
    click.echo("\n".join(escape_control(line) for line in text.split("\n")))


def say_json(value: object) -> None:
    """A line of JSON, in which nothing can move a cursor either."""
    text = msgspec.json.encode(plain(value)).decode()
    click.echo(text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns, numbers to the right."""
    lines = [[escape_control(str(cell)) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(headers, *lines, strict=True)]
    numeric = [bool(lines) and all(_is_number(line[at]) for line in lines) for at in range(len(headers))]
    click.secho(_line(headers, widths, numeric), bold=True)
    for line in lines:
        click.echo(_line(line, widths, numeric))


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    sized = zip(cells, widths, numeric, strict=True)
    return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in sized).rstrip()


def _is_number(cell: str) -> bool:
    return cell in ("", "-") or cell[0].isdigit() or (cell[0] in "+-" and cell[1:2].isdigit())


def plain(value: object) -> object:
    """A value as JSON has it. Bytes that are text become text, others say that they are base64, as ids may."""
    if isinstance(value, str):
        return value if value.isascii() else plain(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value)
        return {str(key): plain(item) for key, item in pairs.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = cast("Iterable[object]", value)
        return [plain(item) for item in items]
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


class Number(click.FloatRange):
    """A number that is not NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def where(app: Holdfast[Any]) -> str:
    """The full name of the storage, so that a wrong one is noticed."""
    return repr(app.storage).strip("<>").partition(" ")[2]


def when(at: datetime, now: datetime) -> str:
    """A point in time, and how far it is by the storage's clock."""
    return format_moment(at, (at - now).total_seconds())


# What is given


def read_payload(given: str, *, text: bool, raw: bool) -> object:
    """A payload from the command line, or from stdin for `-`: JSON, unless an option says otherwise."""
    if text and raw:
        raise click.UsageError("--text and --raw are mutually exclusive: pass only one")
    data = sys.stdin.buffer.read() if given == "-" else given.encode("utf-8", "surrogateescape")
    if raw:
        return data
    if text:
        try:
            return data.decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise OptionError(f"the payload is not text ({error}): use --raw for bytes") from None
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(
            f"the payload is not JSON ({error}): quote it for the shell, or use --text for text, --raw for bytes"
        ) from None


def end(status: int, why: str = "") -> NoReturn:
    """Exit with a status and print the reason to stderr."""
    if why:
        lines = (escape_control(line) for line in f"holdfast: {why}".split("\n"))
        click.secho("\n".join(lines), fg="red", err=True)
    sys.exit(status)
