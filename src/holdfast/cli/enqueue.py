"""Enqueueing jobs and reading results: `enqueue`, `call` and `result`."""

from __future__ import annotations

from typing import Any

import click

from holdfast._client.app import Holdfast
from holdfast._core.options import DEFAULT_WAIT_S
from holdfast.cli.common import find_id, read_payload, with_app, with_present_app
from holdfast.cli.options import given, option_from_table, options_from_table
from holdfast.cli.output import NO, TIME_IS_UP, as_json, end, say, say_json
from holdfast.cli.templates import identify, template_options
from holdfast.errors import DuplicateJob, JobCancelled, JobFailed, JobForgotten, JobNotFound, WaitTimeout

START_S = 10.0
"""How long `call` waits for a worker that serves the queue for the first time."""
REQUEST_OPTIONS = ("id", "on_conflict", "delay", "run_at", "expires", "timeout", "backoff", "priority")


def _payload_forms(command: Any) -> Any:
    text = click.option("--text", is_flag=True, help="The payload is text, not JSON.")
    raw = click.option("--raw", is_flag=True, help="The payload is bytes, stored unchanged.")
    return text(raw(command))


async def _with_task(
    app: Holdfast[None],
    queue: str,
    payload: object,
    *,
    target: str | None,
    no_template: bool,
    patience_s: float,
    **options: Any,
) -> Any:
    """The options of a request: those of the command line, and for the rest those of the task."""
    chosen = given(options)
    if "id" in chosen or no_template:
        return chosen
    return {**await identify(app, queue, payload, target, patience_s=patience_s), **chosen}


@click.command()
@click.argument("queue")
@click.argument("payload")
@_payload_forms
@options_from_table(*REQUEST_OPTIONS)
@template_options
@as_json
@with_app
async def enqueue(
    app: Holdfast[None], queue: str, payload: str, *, text: bool, raw: bool, as_json: bool, **options: Any
) -> None:
    """Enqueue a job. PAYLOAD is JSON, or - for stdin; for a task it is an object of its arguments by name.

    Write -- before a payload that begins with a dash.

    \b
    Examples:
      holdfast enqueue shop.tasks.report '{"user": 42}'
      holdfast enqueue emails '{"to": "ada"}' --id welcome-ada --delay 60
      cat picture.png | holdfast enqueue pictures - --raw

    The id is that of a `unique` or `singleton` task, which its workers or --app tell.

    Prints how the request was placed (new, updated, deferred, duplicate, completed, failed) and the id. Exit status 1
    if the id exists and --on-conflict is raise.
    """
    value = read_payload(payload, text=text, raw=raw)
    chosen = await _with_task(app, queue, value, **options, patience_s=0)
    try:
        handle = await app.queue(queue).enqueue(value, **chosen)
    except DuplicateJob as error:
        end(NO, str(error))
    if as_json:
        say_json({"placed": handle.placed, "id": handle.id, "queue": queue, "generation": handle.generation})
    else:
        say(f"{handle.placed} {handle.id}")


@click.command()
@click.argument("queue")
@click.argument("payload")
@_payload_forms
@options_from_table(*REQUEST_OPTIONS, "wait")
@template_options
@with_app
async def call(
    app: Holdfast[None], queue: str, payload: str, *, text: bool, raw: bool, wait: float, **options: Any
) -> None:
    """Enqueue a job, wait for it, and print its result as JSON.

    \b
    Examples:
      holdfast call shop.tasks.add '{"a": 1, "b": 2}'
      holdfast call shop.tasks.report '{"user": 42}' --wait 5 | jq .total

    Exit status 1 if the job failed or was cancelled, 4 if it did not end within --wait; the job continues then.
    """
    value = read_payload(payload, text=text, raw=raw)
    chosen = await _with_task(app, queue, value, **options, patience_s=min(wait, START_S))
    try:
        say_json(await app.queue(queue).call(value, wait=wait, **chosen))
    except WaitTimeout as error:
        end(TIME_IS_UP, str(error))
    except (DuplicateJob, JobFailed, JobCancelled, JobForgotten) as error:
        end(NO, str(error))


@click.command()
@click.argument("queue")
@click.argument("id")
@option_from_table("wait", default=DEFAULT_WAIT_S)
@with_present_app
async def result(app: Holdfast[None], queue: str, id: str, *, wait: float) -> None:
    """Wait for a job that was enqueued before, and print its result as JSON.

    Exit status 1 if it failed, was cancelled or does not exist, 4 if it did not end within --wait.
    """
    try:
        say_json(await app.queue(queue).result(await find_id(app, queue, id), wait=wait))
    except WaitTimeout as error:
        end(TIME_IS_UP, str(error))
    except (JobFailed, JobCancelled, JobForgotten, JobNotFound) as error:
        end(NO, str(error))
