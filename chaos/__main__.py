"""The command `./dev chaos`, with `merge`, `check` and `plant`."""

from __future__ import annotations

import asyncio
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import msgspec

from chaos import history, report
from chaos.checker import Checker
from chaos.runner import ROOT, Plan, Runner
from chaos.settings import PROFILES
from tests.servers import redis_binary

SECONDS = 120.0
MAX_SECONDS = 600.0
SHARD = "shard.json"
"""File in the folder of a run, with its parameters."""


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--storage", type=click.Choice(["sqlite", "valkey", "redis"]), default="sqlite", show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(5, MAX_SECONDS), help=f"How long faults go on.  [default: {SECONDS:g}]"
)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="all", show_default=True, help="What goes wrong.")
@click.option("--jobs", type=click.IntRange(1), help="End after this number of jobs, instead of --seconds.")
@click.option("--seed", type=int, help="Of all random numbers.  [default: from the clock]")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path(".chaos"), show_default=True,
    help="Folder of the reports.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the history of a green run, too.")
@click.pass_context
def main(
    context: click.Context,
    storage: str,
    seconds: float | None,
    jobs: int | None,
    seed: int | None,
    out: Path,
    keep: bool,
    profile: str,
) -> None:
    """Run workers, producers, callers and consumers, inject the faults of production, and check with a history outside
    the storage that no job was lost, repeated without a cause, early, or out of order.

    \b
    Examples:
      ./dev chaos                                    two minutes on SQLite
      ./dev chaos --storage valkey --seconds 600     a shard of ten minutes
      ./dev chaos merge .chaos/*.json                add up reports

    Exit status: 0 if no rule was broken and every kind of fault had an effect, 1 if not.
    """
    if context.invoked_subcommand is not None:
        return
    if seconds is not None and jobs is not None:
        raise click.UsageError("--seconds and --jobs are mutually exclusive: pass only one")
    if storage == "redis" and redis_binary() is None:
        raise click.UsageError("there is no redis-server on this machine: use --storage valkey")
    seed = int(time.time()) % 1_000_000 if seed is None else seed
    seconds = seconds or (None if jobs else SECONDS)
    name = f"{storage}-{seed}"
    folder = Path(tempfile.mkdtemp(prefix=f"holdfast-chaos-{name}-"))
    click.echo(f"chaos on {storage}, seed {seed}: history in {folder}", err=True)
    runner = Runner(Plan(storage, seconds, jobs, seed, folder, profile), _show)
    began = time.monotonic()
    asyncio.run(runner.run())
    shard = report.Shard(
        storage=storage,
        server=runner.server,
        seed=seed,
        seconds=time.monotonic() - began,
        commit=_commit(),
        python=platform.python_version(),
        profile=profile,
    )
    (folder / SHARD).write_bytes(msgspec.json.encode(shard))
    result = _checked(folder)
    _write(result, out, name)
    if result.green and not keep:
        shutil.rmtree(folder)
    else:
        again = f"./dev chaos --storage {storage} --profile {profile} --seed {seed}"
        click.echo(f"history, output and report are in {folder}; again: {again}")
    _end(result)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(".chaos"), show_default=True)
def check(folder: Path, out: Path) -> None:
    """Check a kept history again."""
    if not (folder / SHARD).exists():
        raise click.UsageError(f"{folder} has no {SHARD}: it is not the folder of a finished run")
    result = _checked(folder)
    _write(result, out, f"{result.shards[0].storage}-{result.shards[0].seed}")
    _end(result)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(".chaos"), show_default=True)
def merge(files: tuple[Path, ...], out: Path) -> None:
    """Add up the reports of several runs."""
    try:
        reports = [msgspec.json.decode(file.read_bytes(), type=report.Report) for file in files]
    except msgspec.DecodeError as error:
        raise click.UsageError(f"not a report of a run: {error}") from None
    result = report.merged(reports)
    _write(result, out, "merged")
    _end(result)


@main.command()
@click.argument("bugs", nargs=-1)
@click.option("--seconds", type=click.FloatRange(5, MAX_SECONDS), default=SECONDS, show_default=True)
def plant(bugs: tuple[str, ...], seconds: float) -> None:
    """Plant bugs in a copy of Holdfast, one by one, and check that a run finds each."""
    from chaos import planted

    unknown = set(bugs) - planted.BUGS.keys()
    if unknown:
        raise click.UsageError(f"unknown bugs: {', '.join(sorted(unknown))}: use {', '.join(planted.BUGS)}")
    survived = [name for name in bugs or planted.BUGS if not planted.is_found(name, seconds, click.echo)]
    click.echo(f"RED for all: {len(bugs or planted.BUGS)}" if not survived else f"not found: {', '.join(survived)}")
    sys.exit(bool(survived))


def _checked(folder: Path) -> report.Report:
    files = folder / "history"
    _show(f"checking {sum(file.stat().st_size for file in files.iterdir()) / 1e6:.0f} MB of history")
    shard = msgspec.json.decode((folder / SHARD).read_bytes(), type=report.Shard)
    return report.of(Checker(history.read_each(files)), shard)


def _write(result: report.Report, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_bytes(msgspec.json.encode(result))
    text = report.markdown(result)
    (out / f"{name}.md").write_text(text)
    click.echo(text)
    click.echo(f"report: {out / name}.md and .json")


def _end(result: report.Report) -> None:
    click.echo(result.verdict)
    sys.exit(not result.green)


def _show(text: str) -> None:
    """Show progress: one line that is overwritten on a terminal, new lines elsewhere."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", nl=False, err=True)
    else:
        click.echo(text, err=True)


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "?"


if __name__ == "__main__":
    main(prog_name="./dev chaos")
