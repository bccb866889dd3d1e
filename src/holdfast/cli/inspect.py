"""Inspecting: `status`, `jobs`, `show`, `explain`, `events`. These commands change nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from datetime import datetime, timedelta

import click
import msgspec

from holdfast._client.app import Holdfast
from holdfast._client.info import JobInfo
from holdfast._client.queue import PULL_PREFIX
from holdfast._client.stats import AppStats, Stats
from holdfast._core.events import Event, Topic
from holdfast._core.jobs import State
from holdfast._core.text import escape_control
from holdfast._worker.notes import ask_for_stack
from holdfast.cli.common import (
    Length,
    Number,
    choose_queues,
    find_id,
    has_jobs,
    matches,
    names_one,
    with_present_app,
)
from holdfast.cli.output import (
    NO,
    TIME_IS_UP,
    as_json,
    end,
    format_count,
    format_duration,
    format_moment,
    plain,
    say,
    say_json,
    table,
    where,
)
from holdfast.cli.reasons import explain as find_reasons
from holdfast.storage.validation import clean_id

STATES = click.Choice([state.value for state in State])
STACK_WAIT_S = 10.0
RATES = ("enqueued", "completed", "failed", "retried")


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@click.option("--all", "everything", is_flag=True, help="Also show empty queues that no worker serves.")
@click.option("--watch", is_flag=True, help="Repeat, with rates, until interrupted.")
@click.option(
    "--every",
    type=Number(0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: time between two rounds.",
)
@click.option("--times", type=click.IntRange(1), metavar="N", help="With --watch: stop after N rounds.")
@as_json
@with_present_app
async def status(
    app: Holdfast[None],
    queues: tuple[str, ...],
    *,
    everything: bool,
    watch: bool,
    every: float,
    times: int | None,
    as_json: bool,
) -> None:
    """Show the number of jobs in each queue, and the workers. QUEUE is a name or a pattern.

    \b
    Examples:
      holdfast status
      holdfast status --watch
      holdfast status 'shop.tasks.*' --json
    """
    if times is not None and not watch:
        raise click.UsageError("--times needs --watch")
    before: AppStats | None = None
    rounds = itertools.count(1) if watch else [1]
    for number in rounds:
        snapshot = await app.stats()
        chosen = [stats for stats in snapshot.queues if not queues or matches(stats.queue, queues)]
        if queues and not chosen and not watch:
            end(NO, f"there is no queue {', '.join(queues)} on {where(app)}")
        if as_json:
            say_json({"now": snapshot.now, "queues": chosen, "workers": snapshot.workers})
        else:
            if watch:
                click.clear()  # Has no effect unless this is a terminal.
            shown = [stats for stats in chosen if queues or everything or not _is_idle(stats)]
            _show_status(snapshot, shown, before)
            if len(shown) < len(chosen):
                idle = format_count(len(chosen) - len(shown), "empty queue")
                say(f"\n{idle} without a worker not shown: pass --all, or delete them with `holdfast delete`")
            say(f"\non {where(app)}")
        before = snapshot
        if not watch or number == times:
            return
        await asyncio.sleep(every)


def _is_idle(stats: Stats) -> bool:
    """Whether a queue has no job, no worker and nothing else to look at."""
    return not (has_jobs(stats, None) or stats.workers or stats.paused or stats.problem)


def _show_status(snapshot: AppStats, queues: list[Stats], before: AppStats | None) -> None:
    if not queues:
        say("no queues")
    else:
        rates = [f"{kind}/s" for kind in RATES] if before is not None else []
        headers = ["queue", "ready", "scheduled", "running", "retrying", "failed", "oldest", "workers", *rates, ""]
        table(headers, (_row(stats, snapshot, before) for stats in queues))
    if snapshot.workers:
        say()
        rows = [
            (
                worker.worker,
                worker.facts.get("executor", ""),
                f"{worker.facts.get('used', 0)}/{worker.facts.get('capacity', 0)}",
                worker.facts.get("running", 0),
                format_duration((snapshot.now - worker.beat_at).total_seconds()),
                worker.facts.get("version", ""),
                "asked to stop" if worker.evict_asked else "",
            )
            for worker in snapshot.workers
        ]
        table(["worker", "executor", "used", "running", "heartbeat", "release", ""], rows)
    else:
        say("no workers")


def _row(stats: Stats, snapshot: AppStats, before: AppStats | None) -> list[object]:
    rates: list[object] = []
    if before is not None:
        none: dict[str, int] = {}
        earlier = next((other.totals for other in before.queues if other.queue == stats.queue), none)
        seconds = max((snapshot.now - before.now).total_seconds(), 0.001)
        rates = [f"{(stats.totals.get(kind, 0) - earlier.get(kind, 0)) / seconds:.1f}" for kind in RATES]
    return [
        stats.queue,
        *(stats.ready, stats.scheduled, stats.running, stats.retrying, stats.failed),
        format_duration(stats.oldest_ready_seconds) if stats.ready else "-",
        len(stats.workers),
        *rates,
        f"paused{f': {stats.reason}' if stats.reason else ''}" if stats.paused else stats.problem,
    ]


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@click.option("--state", type=STATES, help="List only jobs in this state.")
@click.option("--running", is_flag=True, help="List only running jobs: the same as --state running.")
@click.option("--older", type=Length(), help="List only running jobs that began this long ago: 90s, 5m, 2h.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of jobs to list.")
@as_json
@with_present_app
async def jobs(
    app: Holdfast[None],
    queues: tuple[str, ...],
    *,
    state: str | None,
    running: bool,
    older: timedelta | None,
    limit: int,
    as_json: bool,
) -> None:
    """List the jobs of these queues, or of all, without payloads. QUEUE is a name or a pattern.

    \b
    Examples:
      holdfast jobs shop.tasks.report --running --older 5m
      holdfast jobs --state failed --limit 20
    """
    state = state or ("running" if running or older is not None else None)
    if state != "running" and (running or older is not None):
        raise click.UsageError("--running and --older are for running jobs: remove --state")
    snapshot = await app.stats()
    now = snapshot.now
    wanted = None if state is None else State(state)
    busy = {stats.queue for stats in snapshot.queues if has_jobs(stats, wanted) or stats.problem}
    names = [queue.name for queue in await choose_queues(app, queues) if queue.name in busy]
    began_by = None if older is None else now - older
    found = [job async for job in _first(_listed(app, names, wanted), limit + 1, began_by)]
    if as_json:
        for job in found[:limit]:
            say_json({name: getattr(job, name) for name in job.__struct_fields__ if name not in ("payload", "result")})
        return
    if not found:
        say(f"no {f'{state} ' if state else ''}jobs in {', '.join(queues) or 'any queue'}")
        return
    several = not names_one(queues)
    rows = [
        (
            *([job.queue] if several else []),
            job.id,
            job.state,
            job.priority,
            format_moment(job.run_at, (job.run_at - now).total_seconds()),
            job.attempts,
            _took(job, now),
            str(job.error) if job.error and job.state != State.RUNNING else job.worker or "",
        )
        for job in found[:limit]
    ]
    headers = ["id", "state", "priority", "due", "attempts", "took", "worker or error"]
    table(["queue", *headers] if several else headers, rows)
    if len(found) > limit:
        hint = ", or name a queue (`holdfast status` has the counts)" if several else ""
        say(f"… more jobs exist: use --limit {2 * limit}{hint}")


async def _listed(app: Holdfast[None], queues: Iterable[str], state: State | None) -> AsyncIterator[JobInfo]:
    for queue in queues:
        async for job in app.queue(queue).jobs(state):
            yield job


def _took(job: JobInfo, now: datetime) -> str:
    """The length of the present run so far, or of the run that ended the job."""
    if job.started_at is not None and job.finished_at is None:
        return f"{format_duration(max(0.0, (now - job.started_at).total_seconds()))} so far"
    return "" if job.duration is None else format_duration(job.duration)


async def _first(jobs: AsyncIterator[JobInfo], count: int, began_by: datetime | None = None) -> AsyncIterator[JobInfo]:
    """Yield at most `count` jobs; with `began_by`, only those whose present run began until then."""
    number = 0
    async for job in jobs:
        if began_by is not None and (job.started_at is None or job.started_at > began_by):
            continue
        yield job
        number += 1
        if number >= count:
            return


@click.command()
@click.argument("queue")
@click.argument("id")
@click.option("--payload", is_flag=True, help="Also show the payload and the result.")
@as_json
@with_present_app
async def show(app: Holdfast[None], queue: str, id: str, *, payload: bool, as_json: bool) -> None:
    """Show one job. Exit status 1 if there is none."""
    job = await app.queue(queue).get(await find_id(app, queue, id))
    if job is None:
        end(
            NO,
            f"there is no job {id!r} in {queue}: it was never enqueued, or its record has expired."
            f" `holdfast jobs {queue}` lists the ids",
        )
    shown: dict[str, object] = {name: getattr(job, name) for name in job.__struct_fields__}
    if not payload:
        del shown["payload"], shown["result"]
    if job.state is State.RUNNING:
        workers = (await app.stats()).workers
        shown["host"] = next((other.facts.get("host") for other in workers if other.worker == job.worker), None)
    if as_json:
        say_json(shown)
        return
    for name, value in shown.items():
        if name == "error" and job.error is not None:
            value = f"{job.error} ({job.error.kind})"
        elif name in ("payload", "result", "progress", "headers") and value is not None:
            value = msgspec.json.encode(plain(value)).decode() if value or name != "headers" else None
        if value is not None:
            say(f"{name:<11} {escape_control(str(value))}")
    if job.error is not None and job.error.traceback:
        say(job.error.traceback.rstrip())


@click.command()
@click.argument("queue")
@click.argument("id")
@as_json
@with_present_app
async def explain(app: Holdfast[None], queue: str, id: str, *, as_json: bool) -> None:
    """Explain why a job is not running, or what it is doing. Exit status 1 if there is no such job."""
    explanation = await find_reasons(app.storage, queue, await find_id(app, queue, id))
    if as_json:
        say_json(explanation)
    else:
        say(f"{explanation.id} of {explanation.queue}: {explanation.state or 'not found'}")
        for reason in explanation.reasons:
            say(f"  - {reason}")
        say(f"on {where(app)}")
    if explanation.state is None:
        end(NO)


@click.command()
@click.argument("queue")
@click.argument("id")
@click.option(
    "--wait",
    type=Number(0),
    default=STACK_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the answer of the worker.",
)
@with_present_app
async def stack(app: Holdfast[None], queue: str, id: str, *, wait: float) -> None:
    """Print the stack of a running job: what its handler does now.

    The worker answers with its next heartbeat, usually within 3 s. Exit status 1 if the job does not run on a live
    worker, 4 if the worker does not answer within --wait.
    """
    id = await find_id(app, queue, id)
    (job,) = await app.storage.get(app.queue(queue).name, [clean_id(id)])
    if job is None:
        end(NO, f"there is no job {id!r} in {queue}: it was never enqueued, or its record has expired")
    if job.run is None:
        end(NO, f"job {id!r} in {queue} is {job.state}: only a running job has a stack")
    worker = job.run.worker
    if worker not in {other.worker for other in (await app.stats()).workers}:
        by_hand = worker.startswith(PULL_PREFIX)
        why = "it was leased by hand, not by a worker" if by_hand else f"its worker {worker} sends no heartbeats"
        end(NO, f"job {id!r} in {queue} has no stack to show: {why}")
    found = await ask_for_stack(app.storage, worker, queue, job.run.fence, wait_s=wait)
    if found is None:
        end(TIME_IS_UP, f"worker {worker} did not answer within {wait:g} s: try again, or see `holdfast status`")
    if not found:
        end(NO, f"worker {worker} does not execute job {id!r} in {queue}: the run has ended, or has not begun")
    say(f"{id} of {queue} on {worker}, most recent call last:\n{found.rstrip()}")


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE]...")
@click.option("--times", type=click.IntRange(1), metavar="N", help="Stop after N events.")
@as_json
@with_present_app
async def events(app: Holdfast[None], queues: tuple[str, ...], *, times: int | None, as_json: bool) -> None:
    """Print events of these queues, or of all queues that exist now, until interrupted. QUEUE is a name or a pattern.

    Events are notifications: some may be lost.
    """
    chosen = await choose_queues(app, queues)
    if not chosen:
        end(NO, "there are no queues yet: name the queues to listen to")
    seen = 0
    async with app.storage.subscribe(*(Topic(queue.name) for queue in chosen)) as stream:
        async for event in stream:
            if event.happened:
                _show_event(event, as_json=as_json)
                seen += 1
                if seen == times:
                    return


def _show_event(event: Event, *, as_json: bool) -> None:
    if as_json:
        say_json({"event": event.kind, "queue": event.queue, "id": event.id, "generation": event.generation})
    else:
        say(f"{event.kind:<12} {event.queue}  {event.id}")
