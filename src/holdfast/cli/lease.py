"""Workers in a shell or any language: `lease` a job, then `complete`, `extend`, `release` or `fail` it by its token."""

from __future__ import annotations

from typing import Any

import click

from holdfast._client.app import Holdfast
from holdfast._client.lease import Lease
from holdfast._core.jobs import State
from holdfast.cli.common import read_payload, with_app
from holdfast.cli.options import given, option_from_table, options_from_table
from holdfast.cli.output import NO, TIME_IS_UP, end, plain, say, say_json

LOST = "the lease is lost: it expired or was settled before. Another worker may run the job"


@click.command()
@click.argument("queue")
@options_from_table("max_retries", "max_stalls", "seconds", "wait")
@with_app
async def lease(app: Holdfast[None], queue: str, *, seconds: float, wait: float, **limits: Any) -> None:
    """Lease the next job of a queue for --seconds, and print it as JSON.

    The output has the token of the lease, the id, attempt, fence, deadline and payload of the job.

    \b
    Example: a shell script that processes one job (jq reads JSON):
      job=$(holdfast lease emails --seconds 60) || exit
      token=$(echo "$job" | jq -r .token)
      if echo "$job" | jq .payload | send-mail
      then holdfast complete "$token"
      else holdfast fail "$token" --retry --delay 10 --max-retries 5
      fi

    Such a queue has no limits unless you give them: a job that was retried more than --max-retries times, or whose
    holder was lost more than --max-stalls times, fails instead of being leased. Exit status 4 if no job was due within
    --wait.
    """
    held = await app.queue(queue, **given(limits)).lease(seconds=seconds, wait=wait)
    if held is None:
        end(TIME_IS_UP)
    say_json(
        {
            "token": held.token,
            "queue": queue,
            "id": held.id,
            "attempt": held.attempt,
            "fence": held.fence,
            "deadline": held.deadline,
            "payload": plain(held.payload),
        }
    )


@click.command()
@click.argument("token")
@click.argument("result", required=False)
@click.option("--text", is_flag=True, help="The result is text, not JSON.")
@click.option("--raw", is_flag=True, help="The result is bytes, stored unchanged.")
@with_app
async def complete(app: Holdfast[None], token: str, result: str | None, *, text: bool, raw: bool) -> None:
    """Complete a leased job. RESULT is JSON, or - for stdin; without it the job has no result.

    A lease can be completed only once. Exit status 1 if the lease is lost.
    """
    value = None if result is None else read_payload(result, text=text, raw=raw)
    _settled(await (await _held(app, token)).complete(value), "completed")


@click.command()
@click.argument("token")
@option_from_table("seconds", help="New length of the lease, from now.  [default: as before]")
@click.option("--progress", help="Progress of the job: a JSON value, shown by `holdfast show`.")
@with_app
async def extend(app: Holdfast[None], token: str, *, seconds: float | None, progress: str | None) -> None:
    """Extend a lease. Exit status 1 if it is lost.

    Prints the new deadline, and `cancel asked` if the job was cancelled.
    """
    held = await _held(app, token)
    value = None if progress is None else read_payload(progress, text=False, raw=False)
    if not await held.extend(seconds, progress=value):
        end(NO, LOST)
    say(f"until {held.deadline:%Y-%m-%d %H:%M:%S} UTC" + (", cancel asked" if held.cancel_asked else ""))


@click.command()
@click.argument("token")
@with_app
async def release(app: Holdfast[None], token: str) -> None:
    """Return a leased job to its place in the queue; no retry is counted. Exit status 1 if the lease is lost."""
    _settled(await (await _held(app, token)).release(), "released")


@click.command()
@click.argument("token")
@click.argument("message", default="failed")
@click.option("--retry", is_flag=True, help="Run the job again.")
@option_from_table("delay", help="With --retry: time until the job is due.")
@option_from_table("max_retries", help="With --retry: fail a job that was retried more often than this.")
@with_app
async def fail(
    app: Holdfast[None], token: str, message: str, *, retry: bool, delay: float | None, max_retries: int | None
) -> None:
    """Fail a leased job for good or, with --retry, run it again later. Exit status 1 if the lease is lost."""
    if not retry and (delay is not None or max_retries is not None):
        raise click.UsageError("--delay and --max-retries need --retry")
    held = await _held(app, token, max_retries=max_retries)
    if retry:
        ok = await held.retry(delay=delay, error=message)
        job = await app.queue(held.queue).get(held.id)
        over = job is not None and job.state is State.FAILED
        _settled(ok, "failed: no retries left" if over else "to be retried")
    else:
        _settled(await held.fail(message), "failed")


async def _held(app: Holdfast[None], token: str, **limits: Any) -> Lease:
    held = await app.lease(token, **given(limits))
    if held is None:
        end(NO, LOST)
    return held


def _settled(ok: bool, what: str) -> None:
    if not ok:
        end(NO, LOST)
    say(what)
