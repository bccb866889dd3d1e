"""The command line: `holdfast COMMAND`. A user's mistake is answered with a sentence, not with a traceback."""

from __future__ import annotations

import sys

import click

from holdfast.cli.worker import worker
from holdfast.errors import HoldfastError
from holdfast.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="holdfast")
def commands() -> None:
    """A reliable job queue, on Redis or Valkey or on one SQLite file."""


commands.add_command(worker)


def main() -> None:
    """The program. Exit status 0: done, or stopped as asked; 1: it could not, and said why; 2: wrong use."""
    try:
        commands(prog_name="holdfast")
    except HoldfastError as error:
        click.secho(f"holdfast: {error}", fg="red", err=True)
        sys.exit(1)
