"""Command-line options, made from the table of options: names, bounds, defaults and help."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import click

from holdfast._core.options import OPTIONS, Backoff, Expires, HandlerOptions, OnConflict, Option
from holdfast.cli.common import Length, Number


class Time(click.ParamType[datetime]):
    """A point in time with a time zone: 2027-01-31T08:00:00+01:00."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            time = datetime.fromisoformat(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a time: write it as 2027-01-31T08:00:00+01:00", param, ctx)
        if time.tzinfo is None:
            self.fail(f"{value!r} has no time zone: add +01:00, or Z for UTC", param, ctx)
        return time


class Lengths(click.ParamType[list[timedelta]]):
    """Lengths of time, separated by commas: 5s,1m,10m."""

    name = "TIME,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[timedelta]:
        return [Length().convert(part, param, ctx) for part in str(value).split(",")]


def options_from_table(*names: str) -> Callable[[Any], Any]:
    """Add these options of the table to a command. An omitted option is None if its default depends on the task;
    otherwise it has the default of the table."""

    def decorate(command: Any) -> Any:
        for name in reversed(names):
            default = None if name in HandlerOptions.__annotations__ else OPTIONS[name].default
            command = option_from_table(name, default=default)(command)
        return command

    return decorate


def option_from_table(name: str, *, default: Any = None, help: str = "") -> Callable[[Any], Any]:
    """Add one option of the table to a command, with its name, its bounds and, unless given here, its help."""
    option = OPTIONS[name]
    return click.option(
        f"--{name.replace('_', '-')}",
        type=_click_type(option),
        default=default,
        show_default=default is not None,
        metavar="SECONDS" if option.is_length or option.type is Expires else None,
        help=help or option.help,
    )


def given(options: dict[str, Any]) -> Any:
    """The options that the user gave, for a function that has them as keywords."""
    return {name: value for name, value in options.items() if value is not None}


def _click_type(option: Option) -> click.ParamType[Any]:
    least, most = option.bounds
    if option.is_length or option.type is Expires:
        return Number(least, most)
    if option.type is int:
        return click.IntRange(int(least), int(most))
    if option.type is datetime:
        return Time()
    if option.type is Backoff:
        return Lengths()
    if option.type is OnConflict:
        return click.Choice(["keep", "update", "raise"])
    return click.STRING
