"""Workers in any language, or in a shell: `lease`, then `complete`, `extend`, `release` or `fail` by its token."""

from __future__ import annotations

import click

from holdfast.app import Holdfast
from holdfast.cli.common import NO, TIME_IS_UP, end, plain, read_payload, say, say_json, with_app
from holdfast.lease import Lease

LOST = "the lease is lost: it expired, or was settled already. Another may be at the job"


@click.command()
@click.argument("queue")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 86_400), default=30.0, show_default=True, help="How long to hold it."
)
@click.option("--wait", type=click.FloatRange(0), default=30.0, show_default=True, help="How long to wait for a job.")
@with_app
async def lease(app: Holdfast[None], queue: str, *, seconds: float, wait: float) -> None:
    """Take the next job of a queue for some time, and print it as JSON: token, id, attempt, deadline, payload.

    \b
    Example, a worker in a shell:
      while job=$(holdfast lease emails --seconds 60); do
        token=$(echo "$job" | jq -r .token)
        echo "$job" | jq .payload | send-mail && holdfast complete "$token" || holdfast fail "$token" --retry
      done

    Exit status 4 if there was none within --wait.
    """
    held = await app.queue(queue).lease(seconds=seconds, wait=wait)
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
@click.option("--raw", is_flag=True, help="The result is bytes, as they are.")
@with_app
async def complete(app: Holdfast[None], token: str, result: str | None, *, text: bool, raw: bool) -> None:
    """The work is done. RESULT is JSON, or - for stdin; none unless given.

    Of several who complete one lease exactly one succeeds. Exit status 1 if the lease is lost.
    """
    value = None if result is None else read_payload(result, text=text, raw=raw)
    _settled(await (await _held(app, token)).complete(value), "completed")


@click.command()
@click.argument("token")
@click.option("--seconds", type=click.FloatRange(0.1, 86_400), help="Hold it so long from now.  [default: as before]")
@click.option("--progress", help="How far it is: a JSON value that `holdfast show` shows.")
@with_app
async def extend(app: Holdfast[None], token: str, *, seconds: float | None, progress: str | None) -> None:
    """Hold a lease for longer. Exit status 1 if it is lost.

    Prints the new deadline; and `cancel asked`, if somebody wants the job stopped.
    """
    held = await _held(app, token)
    told = None if progress is None else read_payload(progress, text=False, raw=False)
    if not await held.extend(seconds, progress=told):
        end(NO, LOST)
    say(f"until {held.deadline:%Y-%m-%d %H:%M:%S} UTC" + (", cancel asked" if held.cancel_asked else ""))


@click.command()
@click.argument("token")
@with_app
async def release(app: Holdfast[None], token: str) -> None:
    """Give a job back: it keeps its place, and nothing is counted. Exit status 1 if the lease is lost."""
    _settled(await (await _held(app, token)).release(), "released")


@click.command()
@click.argument("token")
@click.argument("message", default="failed")
@click.option("--retry", is_flag=True, help="It shall run again.")
@click.option("--delay", type=click.FloatRange(0), metavar="SECONDS", help="With --retry: after so long.")
@with_app
async def fail(app: Holdfast[None], token: str, message: str, *, retry: bool, delay: float | None) -> None:
    """The work has failed, for good or to be tried again. Exit status 1 if the lease is lost."""
    if delay is not None and not retry:
        raise click.UsageError("--delay is for --retry")
    held = await _held(app, token)
    if retry:
        _settled(await held.retry(delay=delay, error=message), "to be tried again")
    else:
        _settled(await held.fail(message), "failed")


async def _held(app: Holdfast[None], token: str) -> Lease:
    held = await app.lease(token)
    if held is None:
        end(NO, LOST)
    return held


def _settled(ok: bool, what: str) -> None:
    if not ok:
        end(NO, LOST)
    say(what)
