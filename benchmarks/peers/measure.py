"""One system, once through: a client fills the queue, a worker empties it, stays idle, and answers.

Every figure has a name that `figures.py` knows. What the system cannot do is left out; a failure ends the
round of the system and is reported. Every step has a time limit, and all started processes are killed at the end.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.monitor import Monitor
from benchmarks.peers.common import AT_ONCE, MARK
from benchmarks.peers.systems import System
from tests.servers import LAUNCH, Server

STEP_S = 90.0
"""No step may take longer."""
STALL_S = 20.0
"""A worker that begins no job for this time is stuck."""
SETTLE_S = 0.5
"""After the last job has begun: until what is sent in batches is sent."""
WARM = 20
LOOKS = ('"INFO" "cpu"', '"INFO" "commandstats"')
"""What we ask ourselves while others are watched."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Sizes(msgspec.Struct, frozen=True):
    """How much is done in a round."""

    enqueued: int = 2_000
    jobs: int = 1_000_000
    calls: int = 1_000_000
    waited: int = 10_000
    picked: int = 60
    idle_s: float = 4.0


class Failed(Exception):
    """A step did not end as it should."""


class Measured(msgspec.Struct):
    """What one round says of one system."""

    figures: dict[str, float] = {}
    versions: dict[str, str] = {}
    how: dict[str, Any] = {}
    commands: dict[str, dict[str, float]] = {}
    """Which, and how many for each job, by step; while idle, in each second."""
    failure: str = ""


def measure(system: System, server: Server | None, sizes: Sizes) -> Measured:
    """The server is emptied before. What is on SQLite needs none."""
    measured = Measured()
    if server is not None:
        server.command("FLUSHALL", "SYNC")
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as folder:
        try:
            _Round(system, server, sizes, Path(folder), measured).run()
        except (Failed, OSError, KeyError, ValueError) as error:
            measured.failure = f"{type(error).__name__}: {error}" if not isinstance(error, Failed) else str(error)
    return measured


class _Round:
    def __init__(self, system: System, server: Server | None, sizes: Sizes, folder: Path, measured: Measured) -> None:
        self.system = system
        self.server = server if system.on == "valkey" else None
        self.sizes = sizes
        self.folder = folder
        self.figures = measured.figures
        self.measured = measured
        self.marks = Marks(folder)
        self.next = 1
        self.jobs = min(system.jobs, sizes.jobs)

    def run(self) -> None:
        with self.started("client") as client:
            hello = client.answer()
            self.measured.versions, self.measured.how = hello["versions"], {**hello["can"], "jobs": self.jobs}
            self.ask(client, "enqueue", WARM)
            self.enqueue(client)
            self.bulk(client)
            with self.started("worker") as worker:
                self.drain(worker)
                with client.frozen():  # what it would send is not the worker's
                    self.idle(worker)
                if hello["can"]["call"]:
                    self.call(client)
                self.pickup(client)

    def enqueue(self, client: Process) -> None:
        count = min(self.sizes.enqueued, self.jobs)
        before = self.look()
        answer = self.ask(client, "enqueue", count)
        self.keep("enqueue", count, answer, before)

    def bulk(self, client: Process) -> None:
        self.ask(client, "bulk", AT_ONCE)  # opens its connections, which take room as well
        size, before = self.stored(), self.look()
        answer = self.ask(client, "bulk", self.jobs)
        self.keep("bulk", self.jobs, answer, before)
        self.figures["bytes"] = (self.stored() - size) / self.jobs

    def drain(self, worker: Process) -> None:
        """The cost is counted from the moment when a tenth has begun: it does not include the start of the worker."""
        total = self.next - 1
        self.wait_for_marks(worker, max(1, total // 10), 0.002)
        cpu, begun, before = worker.cpu_s(), self.marks.read(), self.look()
        self.wait_for_marks(worker, total, 0.05)
        time.sleep(SETTLE_S)
        self.marks.read()
        after, left = self.look(), total - begun
        times = self.marks.begun.values()
        self.figures["drain_rate"] = (total - 1) / (max(times) - min(times)) * 1e9
        if self.marks.again:
            self.figures["drain_again"] = self.marks.again
        if left > total // 2:
            self.figures["drain_worker_us"] = 1e6 * (worker.cpu_s() - cpu) / left
            self.keep_server("drain", left, before, after)

    def idle(self, worker: Process) -> None:
        monitor = Monitor(self.server) if self.server is not None else None
        with monitor or nullcontext():
            before, cpu, began = self.look(), worker.cpu_s(), time.monotonic()
            time.sleep(self.sizes.idle_s)
            seconds, calls = time.monotonic() - began, self.look().calls - before.calls
            self.figures["idle_cpu"] = 100 * (worker.cpu_s() - cpu) / seconds
        if monitor is not None:
            sent = [command for command in monitor.sent if command not in LOOKS]
            self.figures["idle_sent"] = len(sent) / seconds
            self.figures["idle_commands"] = calls.total() / seconds
            self.measured.commands["idle"] = per(calls, seconds)

    def call(self, client: Process) -> None:
        self.ask(client, "call", 3)
        times = sorted(self.ask(client, "call", min(self.system.calls, self.sizes.calls))["times"])
        self.figures["call_p50"] = 1e3 * statistics.median(times)
        self.figures["call_p99"] = 1e3 * times[(len(times) - 1) * 99 // 100]
        self.ask(client, "calls", AT_ONCE)  # opens its connections
        count = max(AT_ONCE, min(self.jobs // 2, self.sizes.waited))
        self.figures["calls_rate"] = count / self.ask(client, "calls", count)["seconds"]

    def pickup(self, client: Process) -> None:
        first = self.next
        asked = self.ask(client, "pickup", self.sizes.picked)["asked"]
        deadline = time.monotonic() + STALL_S
        while True:
            self.marks.read()
            begun = [self.marks.begun.get(n) for n in range(first, self.next)]
            waits = sorted((at - asked_at) / 1e6 for at, asked_at in zip(begun, asked, strict=True) if at is not None)
            if len(waits) == len(asked):
                break
            if time.monotonic() > deadline:
                raise Failed(f"pickup: {len(asked) - len(waits)} of {len(asked)} jobs were not picked up")
            time.sleep(0.01)
        self.figures["pickup_p50"] = statistics.median(waits)
        self.figures["pickup_p99"] = waits[(len(waits) - 1) * 99 // 100]

    def ask(self, client: Process, do: str, count: int) -> dict[str, Any]:
        """Send a request with the next `count` numbers."""
        client.say({"do": do, "first": self.next, "count": count})
        self.next += count
        return client.answer(do)

    def keep(self, step: str, count: int, answer: dict[str, Any], before: Look) -> None:
        self.figures[f"{step}_rate"] = count / answer["seconds"]
        self.figures[f"{step}_client_us"] = 1e6 * answer["cpu_s"] / count
        self.keep_server(step, count, before, self.look())

    def keep_server(self, step: str, count: int, before: Look, after: Look) -> None:
        if self.server is not None:
            self.figures[f"{step}_server_us"] = 1e6 * (after.cpu_s - before.cpu_s) / count
            calls = after.calls - before.calls
            self.figures[f"{step}_commands"] = calls.total() / count
            self.measured.commands[step] = per(calls, count)

    def wait_for_marks(self, worker: Process, count: int, pause_s: float) -> int:
        """Wait until `count` jobs have begun. Returns how many have."""
        last, moved, deadline = -1, time.monotonic(), time.monotonic() + STEP_S
        while (seen := self.marks.read()) < count:
            now = time.monotonic()
            if seen > last:
                last, moved = seen, now
            if worker.ended:
                raise Failed(f"drain: the worker ended after {seen} of {count} jobs: {worker.last_words()}")
            if now > min(deadline, moved + STALL_S):
                raise Failed(f"drain: {seen} of {count} jobs, and no more: {worker.last_words()}")
            time.sleep(pause_s)
        return seen

    def look(self) -> Look:
        if self.server is None:
            return Look()
        cpu, commands = self.server.info("cpu"), self.server.info("commandstats")
        calls = {
            name.removeprefix("cmdstat_"): int(entry.partition("calls=")[2].partition(",")[0])
            for name, entry in commands.items()
            if name != "cmdstat_info"  # which is ours
        }
        return Look(float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]), Counter(calls))

    def stored(self) -> int:
        """Bytes that jobs take, without what clients take."""
        if self.server is not None:
            clients = self.server.command("CLIENT", "LIST")
            assert isinstance(clients, bytes)
            of_clients = sum(int(found) for found in re.findall(rb"tot-mem=(\d+)", clients))
            return int(self.server.info("memory")["used_memory"]) - of_clients
        with closing(sqlite3.connect(self.folder / "jobs.db")) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return sum(file.stat().st_size for file in self.folder.glob("jobs.db*") if not file.name.endswith("-shm"))

    @contextmanager
    def started(self, role: str) -> Generator[Process]:
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
            "PYTHONPATH": self.system.python_path,
            "BENCH_URL": "" if self.server is None else self.server.url,
            "BENCH_FOLDER": str(self.folder),
            "BENCH_VARIANT": self.system.variant,
        }
        cwd = self.system.folder if self.system.packages else self.folder
        process = Process(role, [*self.system.command, role], environment, self.folder, cwd)
        try:
            yield process
        finally:
            process.kill()


def per(calls: Counter[str], count: float) -> dict[str, float]:
    """The most frequent first."""
    return {name: round(times / count, 3) for name, times in calls.most_common()}


class Look(msgspec.Struct, frozen=True):
    """The commands and CPU seconds of the server until now."""

    cpu_s: float = 0.0
    calls: Counter[str] = Counter()
    """By command; those inside of scripts as well."""


class Process:
    """An adapter in one of its roles, in its own session. It ends with this process."""

    def __init__(self, role: str, command: list[str], environment: dict[str, str], folder: Path, cwd: Path) -> None:
        self.role = role
        self._log = folder / f"{role}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.PIPE if role == "client" else subprocess.DEVNULL,
                stdout=subprocess.PIPE if role == "client" else log,
                stderr=log,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        self._read = b""

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def say(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"{request['do']}: the client had ended: {self.last_words()}") from None

    def answer(self, step: str = "start") -> dict[str, Any]:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + STEP_S
        while b"\n" not in self._read:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Failed(f"{step}: no answer within {STEP_S:.0f} s: {self.last_words()}")
            chunk = os.read(pipe, 1 << 20)
            if not chunk:
                raise Failed(f"{step}: the client ended: {self.last_words()}")
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @contextmanager
    def frozen(self) -> Generator[None]:
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU time of the process, of all that descend from it, and of those of them that are gone."""
        return sum(spent for _, spent in self._tree())

    def kill(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        while alive := [pid for pid, _ in self._tree()]:
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # It was quicker.
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()

    def last_words(self) -> str:
        """What it said of an error last, or what it said last."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()[:300]

    def _tree(self) -> list[tuple[int, float]]:
        """Process ids with CPU seconds, of all processes of this session and their descendants."""
        found: dict[int, tuple[int, int, float]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    text = Path(f"/proc/{entry}/stat").read_text()
                except OSError:
                    continue  # It has just ended.
                fields = text.rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found[int(entry)] = (int(fields[1]), int(fields[3]), sum(map(int, fields[11:15])) * TICK_S)
        ours = {pid for pid, (_, session, _) in found.items() if session == self._process.pid}
        more = ours
        while more:
            more = {pid for pid, (parent, _, _) in found.items() if parent in more} - ours
            ours |= more
        return [(pid, found[pid][2]) for pid in ours]


class Marks:
    """Which jobs have begun, and when: what the workers' processes have written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.begun: dict[int, int] = {}
        """When, in nanoseconds, by the job's number."""
        self.again = 0
        """How often a job has begun that had done so before."""

    def read(self) -> int:
        """How many have begun by now."""
        for path in self._folder.glob("marks-*"):
            with path.open("rb") as file:
                self._read_from(path, file)
        return len(self.begun)

    def _read_from(self, path: Path, file: Any) -> None:
        place = self._read.get(path, 0)
        while True:
            file.seek(place)
            chunk = file.read(1 << 16)
            whole = chunk[: len(chunk) - len(chunk) % MARK.size]
            new = 0
            for n, at in MARK.iter_unpack(whole):
                if at == 0:  # No thread has written it yet.
                    break
                self.again += n in self.begun
                self.begun.setdefault(n, at)
                new += MARK.size
            place += new
            self._read[path] = place
            if new < 1 << 16:
                return
