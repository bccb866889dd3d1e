"""Asking for jobs: `enqueue` and `call`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from holdfast._client.app import Holdfast
from holdfast.cli.common import (
    NO,
    TIME_IS_UP,
    Number,
    as_json,
    end,
    read_payload,
    say,
    say_json,
    with_app,
    with_present_app,
)
from holdfast.errors import DuplicateJob, JobCancelled, JobFailed, JobForgotten, JobNotFound, WaitTimeout

_payload_options = [
    click.option("--text", is_flag=True, help="The payload is text, not JSON."),
    click.option("--raw", is_flag=True, help="The payload is bytes, as they are."),
    click.option("--id", help="The job's id. A second request with it is a duplicate, unless --on-conflict says more."),
    click.option(
        "--on-conflict",
        type=click.Choice(["keep", "update", "raise"]),
        help="If the id is there: keep what is there (default), update it, or fail.",
    ),
    click.option("--delay", type=Number(0), metavar="SECONDS", help="Run it after so long."),
    click.option("--run-at", metavar="TIME", help="Run it then: 2027-01-31T08:00:00+01:00."),
    click.option("--priority", type=click.IntRange(0, 9), help="9 goes first.  [default: 5]"),
    click.option("--timeout", type=Number(0.001), metavar="SECONDS", help="Limit its runs."),
]


def _asks(command: Any) -> Any:
    for option in reversed(_payload_options):
        command = option(command)
    return command


def _options(run_at: str | None, **given: Any) -> dict[str, Any]:
    """What was given, for `queue.enqueue`."""
    options = {name: value for name, value in given.items() if value is not None}
    if run_at is not None:
        try:
            options["run_at"] = datetime.fromisoformat(run_at)
        except ValueError:
            raise click.BadParameter("write it as 2027-01-31T08:00:00+01:00", param_hint="--run-at") from None
        if options["run_at"].tzinfo is None:
            raise click.BadParameter("it has no time zone: add +01:00, or Z for UTC", param_hint="--run-at")
    return options


@click.command()
@click.argument("queue")
@click.argument("payload")
@_asks
@as_json
@with_app
async def enqueue(
    app: Holdfast[None], queue: str, payload: str, *, text: bool, raw: bool, as_json: bool, **given: Any
) -> None:
    """Ask for a job. PAYLOAD is JSON, or - for stdin; for a task, its arguments by name. (One that begins with a dash
    goes behind --.)

    \b
    Examples:
      holdfast enqueue shop.tasks.report '{"user": 42}'
      holdfast enqueue emails '{"to": "ada"}' --id welcome-ada --delay 60
      cat picture.png | holdfast enqueue pictures - --raw

    Prints what was placed (new, updated, deferred, duplicate, completed) and the id. Exit status 1 if --on-conflict
    raise met a duplicate.
    """
    try:
        handle = await app.queue(queue).enqueue(read_payload(payload, text=text, raw=raw), **_options(**given))
    except DuplicateJob as error:
        end(NO, str(error))
    if as_json:
        say_json({"placed": handle.placed, "id": handle.id, "queue": queue, "generation": handle.generation})
    else:
        say(f"{handle.placed} {handle.id}")


@click.command()
@click.argument("queue")
@click.argument("payload")
@_asks
@click.option(
    "--wait",
    type=Number(0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait.",
)
@with_app
async def call(
    app: Holdfast[None], queue: str, payload: str, *, text: bool, raw: bool, wait: float, **given: Any
) -> None:
    """Ask for a job and print its result, as JSON.

    \b
    Examples:
      holdfast call shop.tasks.add '{"a": 1, "b": 2}'
      holdfast call shop.tasks.report '{"user": 42}' --wait 5 | jq .total

    Exit status 1 if the job failed or was cancelled, 4 if it did not end within --wait (it goes on).
    """
    try:
        asked = read_payload(payload, text=text, raw=raw)
        say_json(await app.queue(queue).call(asked, wait=wait, **_options(**given)))
    except WaitTimeout as error:
        served = (await app.queue(queue).stats()).workers
        end(TIME_IS_UP, str(error) if served else f"{error}, once a worker serves {queue}: none does")
    except (DuplicateJob, JobFailed, JobCancelled, JobForgotten) as error:
        end(NO, str(error))


@click.command()
@click.argument("queue")
@click.argument("id")
@click.option("--wait", type=Number(0), default=30.0, show_default=True, metavar="SECONDS", help="How long to wait.")
@with_present_app
async def result(app: Holdfast[None], queue: str, id: str, *, wait: float) -> None:
    """Wait for a job that was asked for, and print its result, as JSON.

    Exit status 1 if it failed, was cancelled or is not there, 4 if it did not end within --wait.
    """
    try:
        say_json(await app.queue(queue).result(id, wait=wait))
    except WaitTimeout as error:
        end(TIME_IS_UP, str(error))
    except (JobFailed, JobCancelled, JobForgotten, JobNotFound) as error:
        end(NO, str(error))
