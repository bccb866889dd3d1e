"""Shared by commands: how they open an app, and how they read their input."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import wraps
from typing import Any
from urllib.parse import quote, unquote

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.settings import find_settings
from holdfast.cli.output import NO, end
from holdfast.errors import OptionError

MOST_SEARCHED = 10_000
"""Jobs of a queue that are read to find an id without its escapes."""


def with_app(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a command that gets an open app as its first argument. Adds `--url` and `--namespace`."""
    return _on_an_app(command, creates=True)


def with_present_app(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Like `with_app`, for a command that needs existing data: it does not create a SQLite file."""
    return _on_an_app(command, creates=False)


def _on_an_app(command: Callable[..., Awaitable[None]], *, creates: bool) -> Callable[..., None]:
    @click.option("--url", metavar="URL", help="URL of the storage, instead of HOLDFAST_URL or [tool.holdfast].")
    @click.option("--namespace", metavar="NAME", help="Namespace within the storage.  [default: hf]")
    @wraps(command)
    def run(*args: Any, url: str | None, namespace: str | None, **kwargs: Any) -> None:
        logging.basicConfig(format="holdfast: %(message)s")
        if url == "":
            raise OptionError("--url is empty: check whether the shell variable is set")
        chosen = find_settings(url, namespace or None)
        if chosen.url.startswith("memory:"):
            raise OptionError("memory:// is lost when this command ends: use sqlite:///… or the URL of a server")
        app: Holdfast[None] = Holdfast(url, namespace=namespace or None)
        if not creates and (missing := chosen.missing_file()) is not None:
            end(NO, f"there is no {missing}: nothing was enqueued there yet. Check the folder, or pass --url")

        async def main() -> None:
            async with app:
                await command(app, *args, **kwargs)

        try:
            asyncio.run(main())
            sys.stdout.flush()
        except BrokenPipeError:  # The reader, such as `head`, has closed the pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return run


class Number(click.FloatRange):
    """A number that is not NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class Length(click.ParamType[timedelta]):
    """A length of time: 90s, 5m, 2h, 1d; a number alone is seconds."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([smhd]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a length of time: write 90s, 5m, 2h or 1d", param, ctx)
        return timedelta(seconds=float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]])


def read_payload(given: str, *, text: bool, raw: bool) -> object:
    """Read a payload from the command line, or from stdin for `-`. It is JSON unless an option says otherwise."""
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


async def find_id(app: Holdfast[None], queue: str, id: str) -> str:
    """Return the id of the job that the user means. Templates of tasks percent-encode values: if there is no job with
    this id, it is the only id that reads like this without its escapes. Searches `MOST_SEARCHED` jobs."""
    if quote(id, safe="@+") == id or await app.queue(queue).get(id) is not None:
        return id
    found: list[str] = []
    searched = 0
    async for job in app.queue(queue).jobs():
        searched += 1
        if job.id != id and unquote(job.id) == id:
            found.append(job.id)
        if len(found) > 1 or searched == MOST_SEARCHED:
            break
    return found[0] if len(found) == 1 else id


def look_here() -> None:
    """Put the current folder on the import path, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
