"""A child process can be killed for certain, with all that it started, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from holdfast._worker.processes.os_process import Process, exit_reason, memory
from tests.app.conftest import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

BEGIN = """
import os, signal, socket, subprocess, sys, time
from holdfast._worker.processes.os_process import is_child_of
*numbers, parent, name = sys.argv[1:]
end = socket.socket(fileno=int(numbers[0]))
"""
WAIT = "end.sendall(b'here')\ntime.sleep(60)\n"
STUBBORN = (
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
    "grandchild = subprocess.Popen(['sleep', '60'])\n"
    "end.sendall(str(grandchild.pid).encode())\n"
    "time.sleep(60)\n"
)

Begin = Callable[[str], Process]


@pytest.fixture
async def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Begin]:
    """Start a program as a child process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    started: list[Process] = []

    def begin(program: str) -> Process:
        (tmp_path / "program.py").write_text(BEGIN + program)
        started.append(Process("program", "a name"))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process._process.wait()
        process.close()


async def said(process: Process) -> str:
    """What the program says first."""
    process.end.setblocking(False)
    async with asyncio.timeout(20):
        return (await asyncio.get_running_loop().sock_recv(process.end, 1_000)).decode()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def something_to_read() -> Iterator[None]:
    """Our own stdin is a pipe."""
    kept = os.dup(0)
    read, write = os.pipe()
    os.dup2(read, 0)
    yield
    os.dup2(kept, 0)
    for number in (kept, read, write):
        os.close(number)


@pytest.mark.usefixtures("something_to_read")
async def test_a_process_is_head_of_its_group_reads_nothing_and_shows_its_name(begin: Begin) -> None:
    program = "end.sendall(f'{os.getpgrp()} {os.readlink(\"/proc/self/fd/0\")} {os.getppid()}'.encode())\n"
    process = begin(program + "time.sleep(60)\n")
    process.watch(lambda: None)
    assert await said(process) == f"{process.pid} /dev/null {os.getpid()}"
    words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
    assert words[1:3] == ["-m", "program"]
    assert "a name" in words
    await process.kill_and_wait()


async def test_killed_process_and_its_children_are_dead_after_the_wait(begin: Begin) -> None:
    process = begin(STUBBORN)
    process.watch(lambda: None)
    grandchild = int(await said(process))
    assert runs(grandchild)
    assert await process.kill_and_wait() is None
    assert not runs(grandchild)
    assert not Path(f"/proc/{process.pid}").exists()


async def test_children_of_a_process_that_exited_are_killed(begin: Begin) -> None:
    process = begin(STUBBORN.replace("time.sleep(60)\n", "os._exit(0)\n"))
    exited = asyncio.Event()
    process.watch(exited.set)
    grandchild = int(await said(process))
    await exited.wait()
    assert await process.kill_and_wait() == "it exited with status 0"
    assert not runs(grandchild)


async def test_a_kill_reaches_the_whole_group(begin: Begin) -> None:
    process = begin(STUBBORN)
    exited = asyncio.Event()
    process.watch(exited.set)
    grandchild = int(await said(process))
    process.kill()
    process.kill()
    await asyncio.wait_for(exited.wait(), 5)
    await until(lambda: not runs(grandchild), 5)


async def test_stopped_process_can_be_killed(begin: Begin) -> None:
    process = begin(WAIT)
    process.watch(lambda: None)
    await said(process)
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.wait_for(process.kill_and_wait(), 5)
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("sys.exit(3)", "it exited with status 3"),
        ("os._exit(0)", "it exited with status 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was killed by SIGKILL"),
    ],
)
async def test_exit_of_a_process_is_reported(begin: Begin, end: str, how: str) -> None:
    process = begin(end + "\n")
    assert await _watched(process).kill_and_wait(20) == how


def _watched(process: Process) -> Process:
    process.watch(lambda: None)
    return process


async def test_a_process_that_does_not_end_within_its_time_is_killed_then(begin: Begin) -> None:
    process = _watched(begin(WAIT))
    await said(process)
    began = asyncio.get_running_loop().time()
    assert await process.kill_and_wait(0.2) is None
    assert 0.2 <= asyncio.get_running_loop().time() - began < 5


async def test_end_of_a_process_is_reported_once(begin: Begin) -> None:
    told: list[int] = []
    process = begin("pass\n")
    process.watch(lambda: told.append(1))
    await until(lambda: bool(told))
    await process.kill_and_wait()
    await asyncio.sleep(0.02)
    assert told == [1]


async def test_no_file_descriptor_is_left_of_a_process(begin: Begin) -> None:
    async def one(program: str) -> None:
        process = _watched(begin(program))
        await process.kill_and_wait(0.0 if program == WAIT else 20)
        process.close()
        process.close()

    await one("pass\n")
    before = fds()
    for program in (WAIT, "pass\n", "sys.exit(1)\n"):
        await one(program)
    assert fds() == before


async def test_a_process_that_cannot_be_started_leaves_no_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = fds()
    with pytest.raises(OSError):
        Process("program", "a name")
    assert fds() == before


async def test_a_process_and_its_group_die_with_their_parent(tmp_path: Path) -> None:
    """Also one that closed every file descriptor and is stuck in C, and a grandchild, which knows nothing of it."""
    program = "is_child_of(int(parent))\n" + STUBBORN.replace(
        "time.sleep(60)\n", "os.closerange(3, 1000)\nimport ctypes\nctypes.PyDLL(None).sleep(60)\n"
    )
    (tmp_path / "program.py").write_text(BEGIN + program)
    (tmp_path / "parent.py").write_text(
        "import asyncio, sys, threading, time\n"
        "from holdfast._worker.processes.os_process import Process\n"
        "async def main():\n"
        "    process = Process('program', 'a name')\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "    print(process.pid, process.end.recv(100).decode(), flush=True)\n"
        "    time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "parent"), stdout=asyncio.subprocess.PIPE, env=environment, cwd=tmp_path
    )
    assert parent.stdout is not None
    child, grandchild = map(int, (await parent.stdout.readline()).split())
    try:
        assert runs(child)
        assert runs(grandchild)
        parent.kill()
        await until(lambda: not runs(child), 5)
        await until(lambda: not runs(grandchild), 5)
    finally:
        for pid in (child, grandchild):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await parent.communicate()  # Its pipe is closed only when the last of them is gone.


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "it exited with status 0"),
        (137, "it exited with status 137"),
        (-9, "it was killed by SIGKILL"),
        (-11, "it was killed by SIGSEGV"),
        (-63, "it was killed by signal 63"),
    ],
)
def test_exit_status_is_described_in_words(status: int, words: str) -> None:
    assert exit_reason(status) == words


def test_process_reports_its_memory() -> None:
    before = memory()
    more = bytearray(b"x") * (64 << 20)
    assert memory() - before > 50 << 20
    del more
