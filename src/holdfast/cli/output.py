"""Output and exit status of commands."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NoReturn, Self, cast

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._core.text import escape_control

NO, MISTAKE, UNREACHABLE, TIME_IS_UP = 1, 2, 3, 4
"""Exit status: not found, lost, failed or problems found; invalid command or input; storage unavailable; nothing
happened within the wait."""

MOST_LEVELS = 200
"""Levels of a nested value that are printed. Other languages may store more than the interpreter can print."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")


def say(text: str = "") -> None:
    """Print text, with control characters escaped so that they cannot affect a terminal."""
    click.echo("\n".join(escape_control(line) for line in text.split("\n")))


def say_json(value: object) -> None:
    """Print a value as one line of JSON, with control characters escaped."""
    text = msgspec.json.encode(plain(value)).decode()
    click.echo(text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns. Columns of numbers are aligned to the right."""
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


def plain(value: object, depth: int = 0) -> object:
    """Convert a value for JSON. Bytes that are valid UTF-8 become text, other bytes an object with base64. A value
    inside of more than `MOST_LEVELS` others becomes an ellipsis."""
    if depth > MOST_LEVELS:
        return "…"
    if isinstance(value, str):
        return value if value.isascii() else plain(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value)
        return {str(key): plain(item, depth + 1) for key, item in pairs.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = cast("Iterable[object]", value)
        return [plain(item, depth + 1) for item in items]
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name), depth + 1) for name in value.__struct_fields__}
    return value


def where(app: Holdfast[Any]) -> str:
    """The full name of the storage, printed so that the user notices a wrong one."""
    return app.storage.place


def end(status: int, why: str = "") -> NoReturn:
    """Exit with a status and print the reason to stderr."""
    if why:
        lines = (escape_control(line) for line in f"holdfast: {why}".split("\n"))
        click.secho("\n".join(lines), fg="red", err=True)
    sys.exit(status)


def format_duration(seconds: float) -> str:
    """Format a duration: 3 s, 2 min, 5 h, 4 d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_moment(at: datetime, seconds: float) -> str:
    """Format a point in time and its distance from now in seconds, which is negative in the past."""
    distance = f"in {format_duration(seconds)}" if seconds >= 0 else f"{format_duration(-seconds)} ago"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({distance})"


def format_count(count: int, noun: str) -> str:
    """Format a count and its noun: 1 job, 2,000 jobs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class BulkProgress:
    """Shows on stderr how far long work is: on a terminal in one line that is overwritten, else a line every 5 s."""

    def __init__(self, what: str) -> None:
        """`what` is a past participle: deleted, enqueued again."""
        self.count = 0
        self._what = what
        self._is_live = sys.stderr.isatty()
        self._every_s = 0.2 if self._is_live else 5.0
        self._next_at = time.monotonic() + self._every_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_live:
            click.echo("\r\x1b[K", nl=False, err=True)

    def add(self, count: int) -> None:
        self.count += count
        if time.monotonic() >= self._next_at:
            begin = "\r\x1b[K" if self._is_live else ""
            click.echo(f"{begin}{format_count(self.count, 'job')} {self._what} …", nl=not self._is_live, err=True)
            self._next_at = time.monotonic() + self._every_s
