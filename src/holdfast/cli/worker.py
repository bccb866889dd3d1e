"""`holdfast worker`: a worker as a program, with child processes or inline."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import NoReturn

import click

from holdfast._client.app import MAX_LEASE_MS, MAX_PROCESSES, MIN_LEASE_MS, Holdfast
from holdfast._client.session import check_shared
from holdfast._client.settings import NAMESPACE_VARIABLE, URL_VARIABLE, warn_of_default
from holdfast._worker.app_loader import app_parts, import_app, parse_target
from holdfast._worker.logs import FORMATS, Logs, set_up_logging
from holdfast._worker.processes.pool import Pool, PoolSettings
from holdfast._worker.signals import serve_until_signal
from holdfast._worker.source_watch import next_change, source_folders
from holdfast._worker.telemetry import HookDispatcher, default_worker_name
from holdfast._worker.worker import Worker, WorkerSettings
from holdfast.cli.common import Number, look_here
from holdfast.errors import OptionError
from holdfast.storage import Storage, connect
from holdfast.storage.validation import check_worker

log = logging.getLogger("holdfast.worker")

MAX_GRACE_S = 86_400.0


class Size(click.ParamType[int]):
    """A number of bytes: 200M, 1.5G."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)([KMGT]?)(?:i?B)?", str(value).strip(), re.IGNORECASE)
        if match is None:
            self.fail(f"{value!r} is not a size: write 200M or 1.5G", param, ctx)
        size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
        if size < 1:
            self.fail(f"{value!r} is less than 1 byte", param, ctx)
        return size


@click.command()
@click.argument("target", metavar="MODULE[:APP]")
@click.option(
    "--queues",
    multiple=True,
    metavar="PATTERN",
    help="Serve only these queues: a name or 'reports.*', or '*/failed' for fail handlers alone. Repeatable.",
)
@click.option(
    "--processes", type=click.IntRange(1, MAX_PROCESSES), help="Number of child processes.  [default: one per CPU]"
)
@click.option("--inline", is_flag=True, help="Run jobs in this process: less memory, but a hung job cannot be killed.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Maximum number of concurrent jobs in total.  [default: by the sizes of tasks, usually 10 per child]",
)
@click.option("--name", help="Name of the worker.  [default: host, process id and a random part]")
@click.option(
    "--lease",
    type=Number(MIN_LEASE_MS / 1000, MAX_LEASE_MS / 1000),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Length of a lease: jobs of a dead worker run elsewhere within 1.5 leases and 1 s.",
)
@click.option(
    "--grace",
    type=Number(0, MAX_GRACE_S),
    default=25.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for running jobs to finish when the worker stops.",
)
@click.option("--max-jobs", type=click.IntRange(1), help="Replace a child after this number of jobs.")
@click.option("--max-memory", type=Size(), help="Replace a child that uses more memory than this, for example 500M.")
@click.option("--burst", is_flag=True, help="Exit when no job is due.")
@click.option("--max-burst-jobs", type=click.IntRange(1), help="Exit a burst after this number of runs.")
@click.option(
    "--reload", is_flag=True, help="For development: load the code again when a source file of the app changes."
)
@click.option("--url", metavar="URL", help="URL of the storage, for an app that is created without one.")
@click.option("--namespace", metavar="NAME", help="Namespace, for an app that is created without one.")
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="Log format.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    default="info",
    show_default=True,
    help="Log level; info has a line for every job.",
)
def worker(
    target: str,
    *,
    queues: tuple[str, ...],
    processes: int | None,
    inline: bool,
    concurrency: int | None,
    name: str | None,
    lease: float,
    grace: float,
    max_jobs: int | None,
    max_memory: int | None,
    burst: bool,
    max_burst_jobs: int | None,
    reload: bool,
    url: str | None,
    namespace: str | None,
    log_format: str,
    log_level: str,
) -> None:
    """Run the jobs of an app, in child processes.

    MODULE:APP names the app: shop.tasks:app is `app` in shop/tasks.py. MODULE is enough if it has only one app. The
    storage is that of the app: Holdfast(url), else --url, HOLDFAST_URL, [tool.holdfast] in pyproject.toml, or the
    default.

    \b
    Examples:
      holdfast worker shop.tasks:app
      holdfast worker shop.tasks:app --queues 'reports.*' --processes 4
      holdfast worker shop.tasks:app --inline --burst
      holdfast worker shop.tasks:app --reload --processes 1

    \b
    Signals:
      TERM, INT   stop: jobs may finish within --grace, the others are
                  released to their queue, and no retry is counted.
                  A second signal ends the grace after a second or two.
      HUP         reload the code, one child after the other
                  (with --inline: stop).

    \b
    Exit status:
      0  stopped by a signal, evicted, or the burst has ended
      1  internal failure, or a child process could not be started
      2  invalid command line, or the app cannot be loaded
      3  storage unavailable
    """
    if inline and any(option is not None for option in (processes, max_jobs, max_memory)):
        raise click.UsageError("--inline has no child processes: remove --processes, --max-jobs and --max-memory")
    if max_burst_jobs is not None and not burst:
        raise click.UsageError("--max-burst-jobs limits a burst: add --burst")
    parse_target(target)
    name = default_worker_name() if name is None else name
    check_worker(name)
    logs = Logs(log_format, log_level)
    set_up_logging(logs)
    look_here()
    chosen = {URL_VARIABLE: url, NAMESPACE_VARIABLE: namespace}
    _give_to_app(chosen)
    patterns = list(queues) or None
    if inline:

        def make() -> Worker:
            app = import_app(target, Holdfast)
            parts = app_parts(app)
            _check_app_uses(chosen, parts.url, parts.namespace)
            return app.worker(
                patterns,
                concurrency=concurrency,
                name=name,
                lease=lease,
                grace=grace,
                burst=burst,
                max_burst_jobs=max_burst_jobs,
            )

        inline_worker = _make_or_wait(make, target) if reload else make()
        if asyncio.run(serve_until_signal(inline_worker, source_folders if reload else None)):
            _start_again()
        return
    pool = Pool(
        PoolSettings(
            target=target,
            path=sys.path,
            worker=name,
            processes=processes or os.cpu_count() or 1,
            max_jobs=max_jobs,
            max_memory=max_memory,
            logs=logs,
            forwards_hooks=True,
        )
    )
    worker_settings = WorkerSettings(
        name=name,
        queues=patterns,
        lease_ms=round(1000 * lease),
        grace_s=grace,
        concurrency=concurrency,
        burst=burst,
        max_burst_jobs=max_burst_jobs,
    )

    async def main() -> None:
        hooks = HookDispatcher((), pool.report_error)
        made = Worker(pool, lambda: _storage_of(pool, chosen), worker_settings, hooks)
        await serve_until_signal(made, (lambda: pool.source_folders) if reload else None)

    asyncio.run(main())


def _make_or_wait(make: Callable[[], Worker], target: str) -> Worker:
    """Make the worker. If the code does not load or is refused, report why, and start this program again when a source
    file changes."""
    try:
        return make()
    except OptionError as error:
        log.error("waiting for a change: %s", error)
        module, _ = parse_target(target)
        folders = {*accumulate([os.getcwd(), *module.split(".")], os.path.join), *source_folders(error)}
        asyncio.run(next_change(lambda: folders, {}))
        return _start_again()


def _start_again() -> NoReturn:
    """Start this program again in this process, with the code as it is now."""
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 -- The words are those of this program.


def _give_to_app(chosen: Mapping[str, str | None]) -> None:
    """Put what the command line chose, and nothing else, into the environment, which an app without a URL reads."""
    if chosen[URL_VARIABLE] == "":
        raise OptionError("--url is empty: check whether the shell variable is set")
    os.environ.update({name: value for name, value in chosen.items() if value is not None})


def _check_app_uses(chosen: Mapping[str, str | None], url: str | None, namespace: str) -> None:
    """Refuse an option that the app does not follow, because its code names another storage."""
    uses = {URL_VARIABLE: url, NAMESPACE_VARIABLE: namespace}
    for name, value in chosen.items():
        if value is not None and value != uses[name]:
            option = name.removeprefix("HOLDFAST_").lower()
            raise OptionError(f"the code of the app passes another {option}: remove --{option}, or remove it there")


@asynccontextmanager
async def _storage_of(pool: Pool, chosen: Mapping[str, str | None]) -> AsyncGenerator[Storage]:
    """Open the storage that the app reports. This process imports no user code."""
    hello = pool.hello
    _check_app_uses(chosen, hello.url, hello.namespace)
    check_shared(hello.url)
    assert hello.url is not None
    async with connect(hello.url, namespace=hello.namespace, max_payload=hello.max_payload) as storage:
        if hello.on_default:
            warn_of_default(hello.url)
        yield storage
