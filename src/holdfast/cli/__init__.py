"""The command line: `holdfast COMMAND`. A user's mistake is answered with a sentence, not with a traceback."""

from __future__ import annotations

import sys

import click

from holdfast.cli.worker import worker
from holdfast.errors import HoldfastError, OptionError, StorageUnavailable
from holdfast.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="holdfast")
def commands() -> None:
    """A reliable job queue, on Redis or Valkey or on one SQLite file."""


commands.add_command(worker)


def main() -> None:
    """The program. Exit status 0: done, or stopped as asked; 1: it failed, and says why; 2: the user's mistake; 3: the
    storage cannot be reached."""
    try:
        commands(prog_name="holdfast")
    except HoldfastError as error:
        click.secho(f"holdfast: {error}", fg="red", err=True)
        sys.exit(2 if isinstance(error, OptionError) else 3 if isinstance(error, StorageUnavailable) else 1)
