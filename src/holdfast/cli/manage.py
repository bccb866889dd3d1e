"""Managing jobs and queues, and maintaining what is stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from holdfast._client.app import Holdfast
from holdfast._client.queue import Queue
from holdfast._core.jobs import PRIORITIES, State
from holdfast._core.options import DEFAULT_WAIT_S
from holdfast._core.replies import CancelResult, KeepResult, Placed, Problem
from holdfast.cli.common import Length, Number, batches_of_ids, choose_queues, find_ids, with_app, with_present_app
from holdfast.cli.inspect import STATES
from holdfast.cli.options import option_from_table
from holdfast.cli.output import NO, TIME_IS_UP, BulkProgress, as_json, end, format_count, say, say_json


def _states_option(states: Sequence[State], what: str) -> Callable[[Any], Any]:
    choice = click.Choice([state.value for state in states])
    return click.option("--state", "states", type=choice, multiple=True, help=f"{what}. Repeatable.")


def _chosen_states(
    ids: Sequence[str], states: Sequence[str], everything: bool, all_states: Sequence[State]
) -> list[State]:
    """Return the states of the jobs to change; none if the user names the jobs."""
    chosen = [State(state) for state in states] or (list(all_states) if everything else [])
    if bool(ids) == bool(chosen) or (states and everything):
        raise click.UsageError("name the jobs, or pass --all or --state")
    return chosen


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="Cancel all waiting and running jobs.")
@_states_option([State.WAITING, State.RUNNING], "Cancel all jobs in this state")
@click.option("--yes", is_flag=True, help="With --all or --state: do not ask for confirmation.")
@with_present_app
async def cancel(
    app: Holdfast[None], queue: str, ids: tuple[str, ...], *, everything: bool, states: tuple[str, ...], yes: bool
) -> None:
    """Cancel jobs: a waiting job at once, a running job through its worker.

    \b
    Examples:
      holdfast cancel shop.tasks.report report:42 report:43
      holdfast cancel 'pages.*' --state waiting

    With IDs, prints cancelled, asked, finished or missing for each; exit status 1 if no job was cancelled or asked to
    stop. With --all or --state, QUEUE may be a pattern. Jobs that are enqueued meanwhile are not cancelled.
    """
    chosen = _chosen_states(ids, states, everything, [State.WAITING, State.RUNNING])
    if chosen:
        if not yes and not click.confirm(f"Cancel all {' and '.join(chosen)} jobs of {queue}?"):
            end(NO, "nothing was cancelled")
        await _cancel_all(app, queue, chosen)
        return
    replies = await app.queue(queue).cancel_many(await find_ids(app, queue, ids))
    for id, reply in zip(ids, replies, strict=True):
        say(f"{reply} {id}")
    if not any(reply in (CancelResult.CANCELLED, CancelResult.ASKED) for reply in replies):
        end(NO)


async def _cancel_all(app: Holdfast[None], queues: str, states: Sequence[State]) -> None:
    counts: Counter[CancelResult] = Counter()
    with BulkProgress("cancelled") as progress:
        async for queue, ids in _batches(app, queues, states):
            replies = await queue.cancel_many(ids)
            counts.update(replies)
            progress.add(len(replies))
    asked = f", {counts[CancelResult.ASKED]:,} asked to stop" if counts[CancelResult.ASKED] else ""
    say(f"{format_count(counts[CancelResult.CANCELLED], 'job')} cancelled{asked}")


async def _batches(app: Holdfast[None], queues: str, states: Sequence[State]) -> AsyncIterator[tuple[Queue, list[str]]]:
    """Yield the ids of the jobs in these states, with their queues, as many as one step takes."""
    now = (await app.stats()).now
    for queue in await choose_queues(app, [queues], to_change=True):
        for state in states:
            async for ids in batches_of_ids(queue, state, now):
                yield queue, ids


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "everything", is_flag=True, help="Retry all failed jobs.")
@_states_option([State.FAILED, State.CANCELLED], "Retry all jobs in this state")
@with_present_app
async def retry(
    app: Holdfast[None], queue: str, ids: tuple[str, ...], *, everything: bool, states: tuple[str, ...]
) -> None:
    """Enqueue failed or cancelled jobs again, with the same payload. Their retries are counted from 0 again.

    \b
    Examples:
      holdfast retry shop.tasks.report report:42 report:43
      holdfast retry 'shop.*' --all

    With --all or --state, QUEUE may be a pattern. A job that fails again meanwhile is not retried twice.
    """
    chosen = _chosen_states(ids, states, everything, [State.FAILED])
    done = 0
    if chosen:
        with BulkProgress("enqueued again") as progress:
            async for where, batch in _batches(app, queue, chosen):
                handles = await where.retry_many(batch)
                done += sum(handle is not None for handle in handles)
                progress.add(len(handles))
        say(f"{format_count(done, 'job')} enqueued again")
    else:
        for id, handle in zip(ids, await app.queue(queue).retry_many(await find_ids(app, queue, ids)), strict=True):
            if handle is None:
                click.secho(f"holdfast: there is no job {id!r} with a payload in {queue}", fg="red", err=True)
                continue
            done += 1
            say(f"{'enqueued again:' if handle.placed is Placed.NEW else handle.placed} {handle.id}")
    if done:
        say("each runs as often as a new job: its retries are counted from 0")
    elif ids:
        end(NO)


@click.command()
@click.argument("queue")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--ttl", type=Length(), required=True, help="How long from now, or from the end of a live job: 90s, 2h, 7d."
)
@with_present_app
async def keep(app: Holdfast[None], queue: str, ids: tuple[str, ...], *, ttl: timedelta) -> None:
    """Change how long the outcomes of jobs are remembered.

    Prints kept, live or missing for each. Exit status 1 if no job exists.
    """
    replies = await app.queue(queue).keep_many(await find_ids(app, queue, ids), ttl)
    for id, reply in zip(ids, replies, strict=True):
        say(f"{reply} {id}")
    if all(reply is KeepResult.MISSING for reply in replies):
        end(NO)


@click.command()
@click.argument("queue")
@click.argument("priority", type=click.IntRange(PRIORITIES[0], PRIORITIES[-1]))
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@with_present_app
async def prioritize(app: Holdfast[None], queue: str, priority: int, ids: tuple[str, ...]) -> None:
    """Change the priority of waiting or running jobs: 0 to 9, higher first. The retries of a running job have
    the new priority.

    Prints changed for each, or unchanged if it has ended or does not exist. Exit status 1 if no job was changed.
    """
    replies = await app.queue(queue).set_priority_many(await find_ids(app, queue, ids), priority)
    for id, changed in zip(ids, replies, strict=True):
        say(f"{'changed' if changed else 'unchanged'} {id}")
    if not any(replies):
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
        for queue in await choose_queues(app, queues, to_change=True):
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
    for queue in await choose_queues(app, queues, to_change=mend):
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
    named = app.queue(queue)
    wanted = [State(state) for state in states] or list(Queue.PURGED)
    if not yes and not click.confirm(f"Delete all {', '.join(wanted)} jobs of {queue}?"):
        end(NO, "nothing was deleted")
    with BulkProgress("deleted") as progress:
        while step := await app.storage.purge(named.name, wanted):
            progress.add(step)
    say(f"{format_count(progress.count, 'job')} deleted")


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
