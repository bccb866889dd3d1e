"""Every command, option and public name is explained: in its help and in docs/reference (cli.md, api.md)."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click
import pytest

import holdfast
from holdfast import Handle, Holdfast, Lease, Queue, Task, Worker
from holdfast.cli import commands

DOCS = Path(__file__).parents[2] / "docs" / "reference"
SHARED = ["--url", "--namespace", "--json"]
"""Options that mean the same everywhere: the page may explain them once, before the commands."""
COMMANDS = sorted(commands.commands)
CLASSES = [Holdfast, Task, Queue, Handle, Lease, Worker]


def options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_and_its_options_have_help(name: str) -> None:
    command = commands.commands[name]
    assert command.help
    assert command.get_short_help_str(200)
    assert [option.name for option in options(command) if not option.help] == []


def test_every_command_is_on_the_list_that_help_shows() -> None:
    with click.Context(commands) as ctx:
        assert sorted(commands.list_commands(ctx)) == COMMANDS
        shown = commands.get_help(ctx)
    assert [name for name in COMMANDS if not re.search(rf"^  {name}\b", shown, re.MULTILINE)] == []


def test_every_command_and_option_is_in_the_docs() -> None:
    sections = by_heading((DOCS / "cli.md").read_text())
    assert [name for name in COMMANDS if name not in sections] == []
    for name in COMMANDS:
        text = sections[name]
        for option in options(commands.commands[name]):
            for spelled in option.opts:
                there = text if spelled not in SHARED else text + sections[""]
                assert re.search(rf"{spelled}\b", there), f"docs/reference/cli.md does not name {spelled} under {name}"


def test_every_command_and_option_in_the_docs_exists() -> None:
    known = {spelled for name in COMMANDS for option in options(commands.commands[name]) for spelled in option.opts}
    page = (DOCS / "cli.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) - known - {"--help", "--version"} == set()
    said = set(re.findall(r"(?:^|[`(] *|^ +|\| )holdfast ([a-z]+)\b", page, re.MULTILINE))
    assert said - set(COMMANDS) == set()


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    assert [name for name in holdfast.__all__ if not in_code(name, page)] == []
    missing = [
        f"{kind.__name__}.{name}" for kind in CLASSES for name in public(kind) if not in_code(name, page, member=True)
    ]
    assert missing == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_public_method_has_a_docstring(kind: type) -> None:
    silent = [name for name in public(kind) if not inspect.getdoc(inspect.getattr_static(kind, name))]
    assert silent == []


def by_heading(page: str) -> dict[str, str]:
    """The sections of commands, by command; what comes before the first of them is under "". A heading names one, or
    several: `### pause, resume`."""
    sections = {"": ""}
    names = [""]
    for line in page.splitlines():
        if line.startswith("#"):
            listed = [name for name in re.findall(r"[a-z]+", line) if name in COMMANDS]
            names = listed if listed and line.startswith("##") else [""]
        for name in names:
            sections[name] = sections.get(name, "") + line + "\n"
    return sections


def public(kind: type) -> list[str]:
    """The methods and properties that are for users: not those that say that they are for another module."""
    found: list[str] = []
    for name, value in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
            continue
        if not (inspect.getdoc(value) or "").startswith("For holdfast."):
            found.append(name)
    return found


def in_code(name: str, page: str, *, member: bool = False) -> bool:
    """Is a name in a piece of code on the page, and not only a word in a sentence?"""
    pieces = re.findall(r"```.*?```|`[^`\n]+`|^    .*$", page, re.DOTALL | re.MULTILINE)
    pattern = rf"(?:\.|`|\b(?:def|await) ){name}\b|\b{name}\(" if member else rf"\b{name}\b"
    return any(re.search(pattern, piece) for piece in pieces)
