"""The command line: `holdfast COMMAND`. A user error is reported in one sentence, without a traceback."""

from __future__ import annotations

import io
import sys

import click
from click.shell_completion import get_completion_class

from holdfast.cli.demo import demo
from holdfast.cli.doctor import doctor
from holdfast.cli.enqueue import call, enqueue, result
from holdfast.cli.inspect import events, explain, jobs, show, stack, status
from holdfast.cli.lease import complete, extend, fail, lease, release
from holdfast.cli.manage import (
    audit,
    backup,
    cancel,
    delete,
    evict,
    keep,
    pause,
    prioritize,
    purge,
    repair,
    resume,
    retry,
    sweep,
)
from holdfast.cli.output import MISTAKE, NO, UNREACHABLE, end
from holdfast.cli.worker import worker
from holdfast.errors import HoldfastError, OptionError, PayloadRejected, StorageUnavailable
from holdfast.version import VERSION

SECTIONS = {
    "Start": [demo, worker],
    "Enqueue": [enqueue, call, result],
    "From a shell": [lease, complete, extend, release, fail],
    "Inspect": [status, jobs, show, explain, stack, events, doctor],
    "Manage jobs": [cancel, retry, keep, prioritize, pause, resume, evict, purge, delete],
    "Maintain": [sweep, audit, repair, backup],
}


class Commands(click.Group):
    """The commands, listed by section."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(str(command.name) for section in SECTIONS.values() for command in section), "completion"]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(str(command.name), command.get_short_help_str(90)) for command in section])
        with formatter.section("Other"):
            formatter.write_dl([("completion", "Print the completion script for a shell.")])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="holdfast")
def commands() -> None:
    """A reliable job queue, on Redis or Valkey or on one SQLite file.

    The storage is given by --url, else by HOLDFAST_URL, else by `url` under [tool.holdfast] in pyproject.toml. The
    default is sqlite:///holdfast.db.

    \b
    Exit status: 0 success; 1 not found, failed or lost; 2 invalid command or
    input; 3 storage unavailable; 4 nothing happened within --wait.
    """


@commands.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell: eval "$(holdfast completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(commands, {}, "holdfast", "_HOLDFAST_COMPLETE").source())


for _section in SECTIONS.values():
    for _command in _section:
        commands.add_command(_command)


INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT, as in shells."""


def main() -> None:
    """Run the command line and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # Characters that the terminal cannot show are escaped.
    try:
        status = commands(prog_name="holdfast", standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except HoldfastError as error:
        mistake = isinstance(error, OptionError | PayloadRejected)
        end(MISTAKE if mistake else UNREACHABLE if isinstance(error, StorageUnavailable) else NO, str(error))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
