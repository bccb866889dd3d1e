"""Managing jobs and queues: cancel, retry, pause, resume, evict, purge, delete, sweep, audit, repair, backup."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from holdfast._client.app import Holdfast
from holdfast._client.queue import Queue
from holdfast._core.jobs import State
from holdfast._core.options import DEFAULT_WAIT_S
from holdfast._core.replies import CancelResult, Placed, Problem
from holdfast.cli.common import Number, find_id, with_app, with_present_app
from holdfast.cli.inspect import STATES
from holdfast.cli.options import option_from_table
from holdfast.cli.output import NO, TIME_IS_UP, as_json, end, format_count, say, say_json
from holdfast.errors import JobNotFound


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all", "everything", is_flag=True, hidden=True)
@with_present_app
async def cancel(app: Holdfast[None], queue: str, ids: tuple[str, ...], *, everything: bool) -> None:
    """Cancel jobs: a waiting job at once, a running job through its worker.

    Prints cancelled, asked, finished or missing for each. Exit status 1 if no job was cancelled or asked to stop.
    """
    if everything:
        raise click.UsageError(f"to cancel all waiting jobs, delete them: holdfast purge {queue} --state waiting")
    if not ids:
        raise click.UsageError("name the jobs: holdfast cancel QUEUE ID...")
    replies = [await app.queue(queue).cancel(await find_id(app, queue, id)) for id in ids]
    for id, reply in zip(ids, replies, strict=True):
        say(f"{reply} {id}")
    if not any(reply in (CancelResult.CANCELLED, CancelResult.ASKED) for reply in replies):
        end(NO)


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="Retry every failed job of the queue.")
@with_present_app
async def retry(app: Holdfast[None], queue: str, ids: tuple[str, ...], *, everything: bool) -> None:
    """Enqueue failed or cancelled jobs again, with the same payload. Their retries are counted from 0 again.

    \b
    Examples:
      holdfast retry shop.tasks.report report:42
      holdfast retry shop.tasks.report --all
    """
    if everything == bool(ids):
        raise click.UsageError("name the jobs, or pass --all")
    where = app.queue(queue)
    chosen = [job.id async for job in where.jobs(State.FAILED)] if everything else list(ids)
    missing = 0
    for id in chosen:
        try:
            handle = await where.retry(id if everything else await find_id(app, queue, id))
            if not everything:
                say(f"{'enqueued again:' if handle.placed is Placed.NEW else handle.placed} {handle.id}")
        except JobNotFound as error:
            missing += 1
            click.secho(f"holdfast: {error}", fg="red", err=True)
    if everything:
        say(f"{format_count(len(chosen) - missing, 'job')} enqueued again")
    if missing < len(chosen):
        say("each runs as often as a new job: its retries are counted from 0")
    if missing and missing == len(chosen):
        end(NO)


@click.command()
@click.argument("queue")
@click.option("--reason", default="", help="Shown by `status` and `explain`.")
@with_app
async def pause(app: Holdfast[None], queue: str, *, reason: str) -> None:
    """Stop workers from taking jobs of a queue. Running jobs continue, and jobs can be enqueued."""
    await app.queue(queue).pause(reason=reason)
    say(f"paused {queue}")


@click.command()
@click.argument("queue")
@with_present_app
async def resume(app: Holdfast[None], queue: str) -> None:
    """Let workers take jobs of a queue again."""
    await app.queue(queue).resume()
    say(f"resumed {queue}")


@click.command()
@click.argument("worker")
@click.option(
    "--now", is_flag=True, help="Take its jobs back at once. Runs that have not ended may overlap with the next ones."
)
@with_present_app
async def evict(app: Holdfast[None], worker: str, *, now: bool) -> None:
    """Ask a worker to stop.

    The worker finishes running jobs within its grace, releases the rest, and exits. Exit status 1 if there is no worker
    with this name.
    """
    exists = await app.evict(worker)
    taken = 0
    if now:
        for stats in (await app.stats()).queues:
            queue, more = app.queue(stats.queue), True
            while more:
                swept = await queue.sweep(worker=worker)
                taken, more = taken + len(swept.stalled), swept.more
        say(f"{format_count(taken, 'job')} taken back: a run that has not ended may overlap with the next one")
    if not exists and not taken:
        end(NO, f"there is no worker {worker!r}: see `holdfast status`")
    if exists:
        say(f"{worker} was asked to stop")


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@click.option("--every", type=Number(0.1), metavar="SECONDS", help="Repeat at this interval, until interrupted.")
@click.option("--times", type=click.IntRange(1), metavar="N", help="Stop after N sweeps (with --every).")
@with_present_app
async def sweep(app: Holdfast[None], queues: tuple[str, ...], *, every: float | None, times: int | None) -> None:
    """Take back expired leases and delete expired records, in these queues or in all.

    Workers do this themselves, also idle ones; enqueue and `lease` do a part. A separate sweep is for unused queues:
    holdfast sweep --every 10
    """
    if times is not None and every is None:
        raise click.UsageError("--times needs --every")
    number = 0
    while True:
        number += 1
        for queue in await _chosen(app, queues):
            await _sweep(queue)
        if every is None or number == times:
            return
        await asyncio.sleep(every)


async def _sweep(queue: Queue) -> None:
    more, stalled, forgotten = True, 0, 0
    while more:
        swept = await queue.sweep()
        stalled, forgotten, more = stalled + len(swept.stalled), forgotten + swept.forgotten, swept.more
    if stalled or forgotten:
        say(f"{queue.name}: {stalled} taken back, {forgotten} forgotten")


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@as_json
@with_present_app
async def audit(app: Holdfast[None], queues: tuple[str, ...], *, as_json: bool) -> None:
    """Check every record of these queues, or of all, against the invariants. Changes nothing.

    Exit status 1 if there are problems.
    """
    await _check(app, queues, mend=False, as_json=as_json)


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@as_json
@with_present_app
async def repair(app: Holdfast[None], queues: tuple[str, ...], *, as_json: bool) -> None:
    """Check as `audit` does, and repair what is wrong. No readable job is lost."""
    await _check(app, queues, mend=True, as_json=as_json)


async def _check(app: Holdfast[None], queues: Sequence[str], *, mend: bool, as_json: bool) -> None:
    problems: list[Problem] = []
    checked = 0
    for queue in await _chosen(app, queues):
        result = await queue.repair(dry_run=not mend)
        checked += result.checked
        problems += result.problems
        for problem in result.problems:
            if as_json:
                say_json(problem)
            else:
                say(f"{problem.kind} {problem.queue} {problem.id}: {problem.detail}")
    if not as_json:
        repaired = ", repaired" if mend and problems else ""
        say(f"{format_count(checked, 'record')} checked, {format_count(len(problems), 'problem')}{repaired}")
    if problems and not mend:
        end(NO)


@click.command()
@click.argument("queue")
@click.option(
    "--state",
    "states",
    type=STATES,
    multiple=True,
    help="Delete only jobs in this state. Repeatable.  [default: all states but running]",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_present_app
async def purge(app: Holdfast[None], queue: str, *, states: tuple[str, ...], yes: bool) -> None:
    """Delete the jobs of a queue. With --state running, running jobs are asked to cancel."""
    chosen = app.queue(queue)
    wanted = states or tuple(state.value for state in Queue.PURGED)
    if not yes and not click.confirm(f"Delete all {', '.join(wanted)} jobs of {queue}?"):
        end(NO, "nothing was deleted")
    say(f"{format_count(await chosen.purge(wanted), 'job')} deleted")


@click.command()
@click.argument("queue")
@option_from_table("wait", default=DEFAULT_WAIT_S, help="Time for running jobs to stop.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_present_app
async def delete(app: Holdfast[None], queue: str, *, wait: float, yes: bool) -> None:
    """Delete a queue with all its jobs and counters. Running jobs are asked to cancel.

    Exit status 4 if the queue still has jobs after --wait: it stays paused then, so run the command again.
    """
    if all(stats.queue != queue for stats in (await app.stats()).queues):
        end(NO, f"there is no queue {queue}: see `holdfast status --all`")
    if not yes and not click.confirm(f"Delete {queue} and all its jobs?"):
        end(NO, "nothing was deleted")
    if not await app.queue(queue).delete(wait=wait):
        end(TIME_IS_UP, f"{queue} still has jobs and is paused: run the command again, or `holdfast resume {queue}`")
    say(f"deleted {queue}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@with_present_app
async def backup(app: Holdfast[None], *, file: Path) -> None:
    """Copy a SQLite storage to a new file, as it is at one moment. Producers and workers may go on meanwhile.

    Only this user may read the copy. To restore it, stop all processes, and use it in place of the old file and its
    -wal and -shm. For Redis and Valkey use the backup of the server.
    """
    await app.storage.back_up(file)
    say(f"wrote {file}")


async def _chosen(app: Holdfast[None], queues: Sequence[str]) -> list[Queue]:
    names = queues or [stats.queue for stats in (await app.stats()).queues]
    return [app.queue(name) for name in names]
