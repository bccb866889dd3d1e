"""Shared by commands: how they open an app, and how they read their input."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import math
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import wraps
from typing import Any
from urllib.parse import quote, unquote

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.queue import Queue
from holdfast._client.settings import find_settings
from holdfast._client.stats import Stats
from holdfast._core.jobs import MAX_MS, State
from holdfast.cli.output import NO, end, where
from holdfast.errors import OptionError
from holdfast.storage.validation import FAILED_SUFFIX, MAX_ITEMS

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
        length = timedelta(seconds=float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}[match[2]])
        if length > timedelta(milliseconds=MAX_MS):
            self.fail(f"{value!r} is longer than ten years", param, ctx)
        return length


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
    """Return the id of the job that the user means: see `find_ids`."""
    return (await find_ids(app, queue, [id]))[0]


async def find_ids(app: Holdfast[None], queue: str, ids: Sequence[str]) -> list[str]:
    """Return the ids of the jobs that the user means. Templates of tasks percent-encode values: if there is no job with
    an id, the only job whose id reads like it without its escapes is meant. Searches `MOST_SEARCHED` jobs."""
    unsure = [id for id in ids if quote(id, safe="@+", errors="surrogateescape") != id]
    if not unsure:
        return list(ids)
    present = await app.queue(queue).get_many(unsure)
    similar: dict[str, list[str]] = {id: [] for id, job in zip(unsure, present, strict=True) if job is None}
    searched = 0
    async for job in app.queue(queue).jobs():
        searched += 1
        plain = unquote(job.id)
        if plain in similar and plain != job.id:
            similar[plain].append(job.id)
        if searched == MOST_SEARCHED or all(len(found) > 1 for found in similar.values()):
            break
    meant = {id: found[0] for id, found in similar.items() if len(found) == 1}
    return [meant.get(id, id) for id in ids]


def matches(queue: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(queue, pattern) for pattern in patterns)


def names_one(queues: Sequence[str]) -> bool:
    """Return whether these arguments name exactly one queue: there is one, and it is not a pattern."""
    return len(queues) == 1 and not set("*?[") & set(queues[0])


async def choose_queues(app: Holdfast[None], queues: Sequence[str], *, to_change: bool = False) -> list[Queue]:
    """Return the queues of these names and patterns, or all queues if there is none. Ends the command if a pattern
    matches no queue. If the command changes the queues, only a pattern that ends in `/failed` matches queues of fail
    handlers."""
    plain = [name for name in queues if names_one([name])]
    if queues and len(plain) == len(queues):
        return [app.queue(name) for name in queues]
    known = [stats.queue for stats in (await app.stats()).queues]
    matching: set[str] = set()
    for pattern in set(queues) - set(plain):
        found = fnmatch.filter(known, pattern)
        if to_change and not pattern.endswith(FAILED_SUFFIX):
            found = [name for name in found if not name.endswith(FAILED_SUFFIX)]
        if not found:
            end(NO, f"no queue matches {pattern!r} on {where(app)}")
        matching.update(found)
    chosen = [name for name in known if not queues or name in matching]
    return [app.queue(name) for name in dict.fromkeys([*plain, *chosen])]


def has_jobs(stats: Stats, state: State | None) -> bool:
    """Return whether a queue has jobs in a state, or any jobs, by its counts."""
    counts = {
        State.WAITING: stats.ready + stats.scheduled,
        State.RUNNING: stats.running,
        State.COMPLETED: stats.completed,
        State.FAILED: stats.failed,
        State.CANCELLED: stats.cancelled,
    }
    return any(counts.values()) if state is None else counts[state] > 0


async def batches_of_ids(queue: Queue, state: State, until: datetime) -> AsyncIterator[list[str]]:
    """Yield the ids of the jobs in a state, as many as one step takes. The caller may change these jobs. Jobs that were
    requested after `until` are left out, so that the work ends while others enqueue."""
    batch: list[str] = []
    async for job in queue.jobs(state):
        if job.created_at <= until:
            batch.append(job.id)
        if len(batch) == MAX_ITEMS:
            yield batch
            batch = []
    if batch:
        yield batch


def look_here() -> None:
    """Put the current folder on the import path, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
