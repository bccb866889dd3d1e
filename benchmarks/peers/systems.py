"""The systems that are measured, and where they come from: each has its own folder under `.bench/`, with a virtual
environment or node_modules that is installed from the registries when first needed. Nothing of them is kept here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".bench"
INSTALL_S = 900


class System(msgspec.Struct, frozen=True):
    name: str
    adapter: str
    """A file beside this one."""
    packages: tuple[str, ...]
    """As pip or npm understand them; none for what runs from this tree: Holdfast, and its limits."""
    jobs: int
    """How many are drained in a round: what takes it a few seconds."""
    variant: str = ""
    on: Literal["valkey", "sqlite"] = "valkey"
    calls: int = 300
    """How many calls are made, one after the other."""
    note: str = ""

    @property
    def folder(self) -> Path:
        """Shared by the variants of one system."""
        return CACHE / self.adapter.removeprefix("with_").rpartition(".")[0]

    @property
    def command(self) -> list[str]:
        """The adapter as a program, without its role."""
        if self.adapter.endswith(".mjs"):
            node = self.folder / "node_modules" / "node" / "bin" / "node"
            return [str(node), str(self.folder / self.adapter)]
        python = self.folder / "bin" / "python" if self.packages else Path(sys.executable)
        return [str(python), str(HERE / self.adapter)]

    @property
    def python_path(self) -> str:
        """Where the adapter and what it shares with others are found; and this tree, if it is ours."""
        return str(HERE) if self.packages else f"{HERE}:{ROOT}:{ROOT / 'src'}"

    @property
    def is_limit(self) -> bool:
        """No queue, but what one on our schema can reach at best."""
        return self.adapter == LIMIT_ADAPTER


HOLDFAST, HOLDFAST_SQLITE = "holdfast", "holdfast, SQLite"
LIMIT, LIMIT_SQLITE, LIMIT_ADAPTER = "limit", "limit, SQLite", "with_limit.py"

_SAQ = ("saq[redis,hiredis]>=0.26,<1", "typing_extensions")
_HUEY = ("huey>=3.5,<4", "redis>=5", "hiredis")
_CELERY = ("celery[redis]>=5.5,<6", "hiredis")
_TASKIQ = ("taskiq>=0.12,<1", "taskiq-redis>=1.1,<2", "hiredis", "uvloop")
_ARQ = ("arq>=0.26,<1", "hiredis")
_RQ = ("rq>=2.3,<3", "hiredis")
_NODE = "node@22"
"""Node itself comes from npm, too: platformatic asks for 22, and systems often have an older one."""

SYSTEMS = (
    System(HOLDFAST, "with_holdfast.py", (), 60_000, note="inline: `holdfast worker --inline`, 100 runs at a time"),
    System(
        "holdfast, processes",
        "with_holdfast.py",
        (),
        40_000,
        variant="processes",
        note="`holdfast worker --processes 2`, ten runs at a time in each",
    ),
    System("saq", "with_saq.py", _SAQ, 6_000, note="concurrency 100; results polled for every 5 ms (default 0.5 s)"),
    System(
        "dramatiq",
        "with_dramatiq.py",
        ("dramatiq[redis]>=2,<3", "hiredis"),
        6_000,
        note="8 threads, results switched on",
    ),
    System(
        "huey",
        "with_huey.py",
        _HUEY,
        6_000,
        note="4 threads, results by BLPOP; a job that was taken is lost with its worker",
    ),
    System("celery, prefork", "with_celery.py", _CELERY, 2_000, note="2 processes"),
    System("celery, threads", "with_celery.py", _CELERY, 2_000, variant="threads", note="8 threads"),
    System(
        "streaq",
        "with_streaq.py",
        ("streaq>=6,<8",),
        2_500,
        calls=60,
        note="concurrency 100",
    ),
    System(
        "taskiq, stream",
        "with_taskiq.py",
        _TASKIQ,
        4_000,
        note="100 tasks at a time, uvloop; results polled for every 5 ms (default 0.2 s)",
    ),
    System(
        "taskiq, list",
        "with_taskiq.py",
        _TASKIQ,
        4_000,
        variant="list",
        note="as above; a job that was taken is lost with its worker",
    ),
    System("arq", "with_arq.py", _ARQ, 3_000, calls=10, note="100 jobs at a time; looks for jobs every 0.5 s"),
    System(
        "arq, tuned",
        "with_arq.py",
        _ARQ,
        3_000,
        variant="tuned",
        note="looks for jobs every 10 ms; results polled for every 5 ms (default 0.5 s)",
    ),
    System("rq", "with_rq.py", _RQ, 100, calls=60, note="one job at a time, a fork for each"),
    System("rq, simple", "with_rq.py", _RQ, 600, variant="simple", note="one job at a time, in the worker itself"),
    System(
        "redis-work-queue",
        "with_redis_work_queue.py",
        ("redis-work-queue>=0.1.5,<1", "hiredis"),
        4_000,
        note="one job at a time; has no results",
    ),
    System(
        "docket",
        "with_docket.py",
        ("pydocket>=0.20,<1", "hiredis"),
        1_500,
        note="100 at a time; looks for jobs again after 5 ms when it is full (default 250 ms)",
    ),
    System(
        "bullmq for Python",
        "with_bullmq_python.py",
        ("bullmq>=3,<4", "hiredis"),
        4_000,
        note="concurrency 100; waits for a job by its events, in a few lines of this benchmark",
    ),
    System("bullmq", "with_bullmq.mjs", ("bullmq@6", "ioredis@6", _NODE), 25_000, note="Node; concurrency 100"),
    System(
        "platformatic",
        "with_platformatic.mjs",
        ("@platformatic/job-queue@0.5", _NODE),
        25_000,
        note="Node; concurrency 100",
    ),
    System(
        HOLDFAST_SQLITE,
        "with_holdfast.py",
        (),
        40_000,
        variant="sqlite",
        on="sqlite",
        note="inline, 100 runs at a time; synchronous=NORMAL",
    ),
    System(
        "huey, SQLite",
        "with_huey.py",
        _HUEY,
        5_000,
        variant="sqlite",
        on="sqlite",
        note="4 threads; jobs and results polled for every 5 ms at first (default 100 ms)",
    ),
    System(
        "litequeue",
        "with_litequeue.py",
        ("litequeue>=0.9,<1",),
        4_000,
        on="sqlite",
        note="one job at a time; has no results; a pop takes as long as the queue; looks for jobs every 1 ms",
    ),
    System(
        LIMIT,
        LIMIT_ADAPTER,
        (),
        60_000,
        note="our own functions over a blocking socket, claim and settle 100; nothing is checked or answered",
    ),
    System(
        LIMIT_SQLITE,
        LIMIT_ADAPTER,
        (),
        40_000,
        variant="sqlite",
        on="sqlite",
        note="the bare statements on our own schema, 100 in a transaction; synchronous=NORMAL; looks every 1 ms",
    ),
)


class NotInstalled(Exception):
    """A system is not here and could not be fetched."""


def install(system: System) -> None:
    """Fetch a system from its registry, unless it is there already in this very form."""
    if not system.packages:
        return
    wanted = "\n".join(system.packages)
    stamp = system.folder / "ready"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"  installing {system.name} …", file=sys.stderr)
        (_install_node if system.adapter.endswith(".mjs") else _install_python)(system)
        stamp.write_text(wanted)
    if system.adapter.endswith(".mjs"):
        # Node looks for packages beside the file that asks for them.
        for name in (system.adapter, "common.mjs"):
            shutil.copyfile(HERE / name, system.folder / name)


def _install_python(system: System) -> None:
    if not (system.folder / "bin" / "python").exists():
        _run(sys.executable, "-m", "venv", str(system.folder))
    python = str(system.folder / "bin" / "python")
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *system.packages)


def _install_node(system: System) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotInstalled("npm is not installed")
    system.folder.mkdir(parents=True, exist_ok=True)
    (system.folder / "package.json").write_text('{"private": true, "type": "module"}')
    _run(npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(system.folder), *system.packages)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False, cwd=CACHE.parent)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{Path(command[0]).name} took longer than {INSTALL_S} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise NotInstalled(words[0])
