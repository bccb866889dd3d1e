"""Writes the usage and the options of every command into docs/reference/cli.md; --check compares only.

Each command has one place on the page: `<!-- generated: NAME -->` to `<!-- end -->`. The text around it is written by
hand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from holdfast.cli import commands

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
EVERYWHERE = ("url", "namespace")
"""Options of nearly every command, explained once at the top of the page."""
PLACE = re.compile(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> int:
    old = PAGE.read_text()
    problems = missing(old)
    new = filled(old) if not problems else old
    if new != old:
        if "--check" in sys.argv:
            problems.append("docs/reference/cli.md is not up to date: run ./dev docs")
        else:
            PAGE.write_text(new)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def missing(text: str) -> list[str]:
    """Problems: commands that do not have exactly one place, and places without a command."""
    places = [found[1] for found in PLACE.finditer(text)]
    counts = {name: places.count(name) for name in {*commands.commands, *places}}
    wrong = sorted(name for name in counts if name not in commands.commands or counts[name] != 1)
    return [f"{PAGE.name}: `{name}` has {counts[name]} places: a command needs one" for name in wrong]


def filled(text: str) -> str:
    def part(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n{described(found[1])}\n<!-- end -->"

    return PLACE.sub(part, text)


def described(name: str) -> str:
    """The usage of a command and a table of its options."""
    command = commands.commands[name]
    context = click.Context(command, info_name=f"holdfast {name}")
    usage = " ".join(["holdfast", name, *command.collect_usage_pieces(context)])
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    listed = [option for option in options if name == "demo" or option.name not in EVERYWHERE]
    lines = [f"    {usage}"]
    if listed:
        lines += ["", "| option | |", "|---|---|", *map(row, listed)]
    return "\n".join(lines)


def row(option: click.Option) -> str:
    """The table row of an option: names, value, meaning, limits and default."""
    takes = "" if option.is_flag else f" {option.metavar or _takes(option.type)}"
    parts = re.fullmatch(r"(.*?)(?:\s*\[(?:default: )?([^\]]*)\])?", option.help or "", re.DOTALL)
    assert parts is not None
    default = parts[2] or (f"{option.default:g}" if isinstance(option.default, float) else option.default)
    notes = [parts[1].strip(), _limits(option.type)]
    if parts[2] or option.show_default:
        notes.append(f"Default: {default}.")
    return f"| `{_cell(', '.join(option.opts) + takes)}` | {_cell(' '.join(note for note in notes if note))} |"


def _takes(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    return {"integer range": "N", "float range": "SECONDS"}.get(kind.name, kind.name.upper())


def _limits(kind: click.ParamType) -> str:
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if most is not None:
        return f"{least:g} to {most:,.10g}."
    return f"At least {least:g}." if least else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
