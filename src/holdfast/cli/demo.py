"""`holdfast demo`: real workers with child processes, and how they handle failures. Each printed line is checked; if a
check fails, the demo says which one and the exit status is 1."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click

from holdfast._client.app import Holdfast
from holdfast._client.settings import URL_VARIABLE
from holdfast._core.jobs import State
from holdfast.cli.output import NO, end
from holdfast.errors import HoldfastError, JobFailed
from holdfast.storage.urls import redact

QUICK_JOBS = 500
DELAY_S = 3
NAPS = 12
LEASE_S = 2.0


class Failed(Exception):
    """A step of the demo did not do what it shows."""


@click.command()
@click.option("--url", metavar="URL", help="Run it on a server: redis://localhost:6379/0.  [default: a SQLite file]")
def demo(url: str | None) -> None:
    """Run a demonstration of 15 s: real workers, a hung job and a worker are killed, no job is lost."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        place = url or f"sqlite:///{Path(folder).resolve()}/jobs.db"
        try:
            asyncio.run(_show_everything(place, Path(folder)))
        except Failed as error:
            end(NO, f"the demo failed: {error}")


async def _show_everything(url: str, folder: Path) -> None:
    os.environ[URL_VARIABLE] = url
    from holdfast.cli import demo_tasks as tasks

    where = "one SQLite file, no server" if url.startswith("sqlite") else redact(url)
    async with tasks.app as app:
        if (await app.stats()).workers:
            raise Failed("another demo is running on this storage")
        await _clean_up(app)
        click.secho(f"Holdfast on {where}: two workers with two processes each", bold=True)
        screen = Screen()
        try:
            async with _worker("left", folder) as left, _worker("right", folder):
                await _steps(app, tasks, screen, left)
            totals = await _totals(app)
        finally:
            screen.wipe()
            await _clean_up(app)
    kinds = ("completed", "retried", "stalled", "failed")
    click.echo()
    click.secho(f"{sum(totals.values()):,} events: " + ", ".join(f"{totals.get(kind, 0):,} {kind}" for kind in kinds))
    click.secho(f"Nothing was lost and nothing completed twice, in {screen.seconds:.0f} s.", fg="green", bold=True)
    click.echo("Next: `holdfast --help`, and the quickstart in the docs, which begins with an app of fifteen lines.")


async def _steps(app: Holdfast[Any], tasks: Any, screen: Screen, left: subprocess.Popen[bytes]) -> None:
    await screen.step("both workers have started", lambda: _workers_are_there(app))
    await screen.step(f"{QUICK_JOBS} quick jobs", lambda: _quick_jobs(app, tasks, screen))
    await screen.step("call a task and get its result", lambda: _call(tasks))
    await screen.step("a job that fails twice is retried", lambda: _retried(tasks))
    await screen.step("a job that fails for good calls its fail handler", lambda: _failed(app, tasks))
    later = await tasks.later.using(delay=DELAY_S).enqueue()
    due_at = time.monotonic() + DELAY_S
    await screen.step("a singleton requested three times during its run runs once more", lambda: _singleton(tasks))
    await screen.step("a handler that never ends is killed with its process", lambda: _killed(app, tasks))
    await screen.step("a delayed job runs on time", lambda: _delayed(later, due_at))
    await screen.step("a leased job is completed exactly once", lambda: _leased(app))
    await screen.step("a worker is killed, and its jobs run on the other one", lambda: _worker_dies(app, tasks, left))
    await screen.step("every record is checked", lambda: _audit(app))


class Screen:
    """Prints a line after each step; on a terminal also the step in progress."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._live = sys.stdout.isatty()
        self._title = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    async def step(self, title: str, show: Callable[[], Awaitable[str]]) -> None:
        self._title = title
        self.progress("…")
        try:
            async with asyncio.timeout(30):
                result = await show()
        except (HoldfastError, TimeoutError, AssertionError, OSError) as error:
            raise Failed(f"{title} ({type(error).__name__}: {error})") from error
        self.wipe()
        click.echo(f"{self.seconds:5.1f} s  ", nl=False)
        click.secho("✓ ", fg="green", nl=False)
        click.echo(f"{title}: ", nl=False)
        click.secho(result, fg="cyan")

    def progress(self, text: str) -> None:
        """Show the step in progress, in a line that is overwritten."""
        if self._live:
            self.wipe()
            click.echo(f"{self.seconds:5.1f} s    {self._title} {text}", nl=False)

    def wipe(self) -> None:
        if self._live:
            click.echo("\r\x1b[K", nl=False)


@asynccontextmanager
async def _worker(name: str, folder: Path) -> AsyncGenerator[subprocess.Popen[bytes]]:
    """Run `holdfast worker` as a user would. At the end it is stopped; if it fails, its log is shown."""
    command = [sys.executable, "-m", "holdfast", "worker", "holdfast.cli.demo_tasks:app"]
    options = ["--processes", "2", "--name", name, "--lease", str(LEASE_S), "--log-level", "warning"]
    with (folder / f"{name}.log").open("wb") as log:
        worker = subprocess.Popen(  # noqa: ASYNC220, S603 -- short, and the command is ours
            [*command, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            yield worker
        finally:
            if worker.poll() is None:
                worker.terminate()
            status = await asyncio.to_thread(worker.wait, 30)
            # After Ctrl-C the worker gets two signals. The second one kills it if it is about to exit.
            if status not in (0, -signal.SIGKILL, -signal.SIGTERM):
                click.echo((folder / f"{name}.log").read_text(errors="replace"), err=True)


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    while not await true():  # noqa: ASYNC110 -- the condition depends on another process
        await asyncio.sleep(0.05)


async def _workers_are_there(app: Holdfast[Any]) -> str:
    async def two_workers() -> bool:
        return {worker.worker for worker in (await app.stats()).workers} == {"left", "right"}

    await _until(two_workers)
    facts = [worker.facts for worker in (await app.stats()).workers]
    return f"process ids {', '.join(str(worker['pid']) for worker in facts)}, release {facts[0]['version']}"


async def _quick_jobs(app: Holdfast[Any], tasks: Any, screen: Screen) -> str:
    began = time.monotonic()
    await app.enqueue_many(tasks.thumbnail.bind(number) for number in range(QUICK_JOBS))

    async def done() -> bool:
        completed = (await app.queue("thumbnail").stats()).totals.get("completed", 0)
        screen.progress(f"{completed} of {QUICK_JOBS}")
        return completed == QUICK_JOBS

    await _until(done)
    return f"done after {time.monotonic() - began:.1f} s"


async def _call(tasks: Any) -> str:
    times: list[float] = []
    for number in range(20):
        began = time.monotonic()
        assert await tasks.add.call(number, 2) == number + 2
        times.append(time.monotonic() - began)
    return f"19 + 2 = 21, in {1000 * sorted(times)[10]:.1f} ms (median of 20)"


async def _retried(tasks: Any) -> str:
    return str(await tasks.flaky.call())


async def _failed(app: Holdfast[Any], tasks: Any) -> str:
    handle = await tasks.hopeless.enqueue("invoice 7")
    try:
        await handle.result()
    except JobFailed:
        return str(await app.queue("hopeless/failed").result(f"{handle.id}@{handle.generation}"))
    raise AssertionError("the job did not fail")


async def _singleton(tasks: Any) -> str:
    first = await tasks.sync.enqueue(42, version=1)

    async def runs() -> bool:
        return await first.state() is State.RUNNING

    await _until(runs)
    others = [await tasks.sync.enqueue(42, version=version) for version in (2, 3, 4)]
    results = [await first.result(), *[await other.result() for other in others]]
    assert results == [1, 4, 4, 4], results
    return f"version 1, then only version 4 ({', '.join(str(other.placed) for other in others)})"


async def _killed(app: Holdfast[Any], tasks: Any) -> str:
    handle = await tasks.spin.enqueue()
    began = time.monotonic()
    pid = 0

    async def has_reported_its_process() -> bool:
        nonlocal pid
        job = await app.queue("spin").get(handle.id)
        pid = job.progress["pid"] if job is not None and job.progress else 0
        return pid > 0

    await _until(has_reported_its_process)
    kind = ""
    try:
        await handle.result()
    except JobFailed as error:
        kind = error.kind
    seconds = time.monotonic() - began
    assert kind == "timeout", kind
    assert not _runs(pid), f"process {pid} is alive"
    return f"its timeout was 1.5 s; process {pid} was dead after {seconds:.1f} s, and the job failed: {kind}"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _delayed(handle: Any, due_at: float) -> str:
    run_at, began_at = await handle.result()
    seen = f", seen {time.monotonic() - due_at:.1f} s later" if time.monotonic() - due_at > 0.5 else ""
    late_ms = max(0, began_at - run_at) / 1000  # Two clocks, if the storage is on another host.
    return f"{DELAY_S} s after it was enqueued, {late_ms:.0f} ms late{seen}"


async def _leased(app: Holdfast[Any]) -> str:
    emails = app.queue("emails")
    await emails.enqueue({"to": "ada"}, id="welcome-ada")
    twice = await emails.enqueue({"to": "ada"}, id="welcome-ada")
    lease = await emails.lease(seconds=30)
    assert lease is not None
    answers = [await lease.complete("sent"), await lease.complete("sent")]
    assert answers == [True, False], answers
    return f"second enqueue: {twice.placed}; first complete: {answers[0]}, second complete: {answers[1]}"


async def _worker_dies(app: Holdfast[Any], tasks: Any, left: subprocess.Popen[bytes]) -> str:
    handles = [await tasks.nap.enqueue(number) for number in range(NAPS)]

    async def at_work() -> dict[str, int]:
        held: dict[str, int] = {}
        async for job in app.queue("nap").jobs(State.RUNNING):
            held[str(job.worker)] = held.get(str(job.worker), 0) + 1
        return held

    async def both_at_work() -> bool:
        held = await at_work()
        return sum(held.values()) == NAPS and len(held) == 2

    await _until(both_at_work)
    lost = (await at_work())["left"]
    left.kill()
    killed_at = time.monotonic()
    ran_on = [await handle.result(wait=25) for handle in handles]
    totals = (await app.queue("nap").stats()).totals
    assert totals["completed"] == NAPS, totals
    assert totals.get("stalled", 0) == lost, totals
    others = sum(name == "right" for name in ran_on)
    seconds = time.monotonic() - killed_at
    return f"it held {lost} of {NAPS} jobs; {others} ran on the other worker, and all were done {seconds:.1f} s later"


async def _audit(app: Holdfast[Any]) -> str:
    checked = 0
    for stats in (await app.stats()).queues:
        report = await app.queue(stats.queue).repair(dry_run=True)
        assert report.problems == [], report.problems
        checked += report.checked
    return f"{checked} records, no problems"


async def _totals(app: Holdfast[Any]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for stats in (await app.stats()).queues:
        for kind, count in stats.totals.items():
            totals[kind] = totals.get(kind, 0) + count
    return totals


async def _clean_up(app: Holdfast[Any]) -> None:
    """Delete the queues of the demo, also those of an earlier demo that was interrupted."""
    for stats in (await app.stats()).queues:
        await app.queue(stats.queue).delete(wait=10)
