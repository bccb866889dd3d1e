"""Child processes that can always be killed, and that never outlive their parent.

Each child leads its own process group, so that processes started by a handler die with it. On Linux the kernel kills
the group when the parent is gone, whatever the child does; elsewhere the child notices that its connection has ended.
For that, no other process may have the files of the parent's side: a fork of the parent closes its copies.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from weakref import WeakSet

from holdfast._worker.executor import wait_at_most
from holdfast.errors import OptionError

F_SEAL_FUTURE_WRITE = 0x10
GROUP_POLLS, GROUP_POLL_S = 100, 0.01
"""How often to check whether the last process of a killed group is gone, and the pause between checks."""

MAX_DUMP_BYTES = 262_144
STACK_SIGNAL = getattr(signal, "SIGRTMAX", 1) - 1
"""Has a child dump its stacks: a signal that programs hardly use. Without memory for dumps it is not used."""
PR_SET_PDEATHSIG = 1

_in_child = False


def lifeline(group: int, *, read_first: bool) -> Callable[[], None]:
    """Have the kernel kill a process group when this process ends, however it ends. Returns how to cancel that.

    A pipe of which this process holds both ends signals the group if its write end is closed before its read end. The
    kernel chooses the order in which it closes the files of a process, so there are two pipes, one for each order. The
    child has no part in this: a handler cannot close the pipes, and a child that is stuck in C code dies as well.
    """
    if sys.platform != "linux":
        return lambda: None
    import fcntl

    read, write = os.pipe()
    try:
        if not read_first:
            read, other = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, write + 1), read
            os.close(other)
        fcntl.fcntl(read, fcntl.F_SETOWN, -group)
        fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
    except ProcessLookupError:
        pass  # The group has ended already.
    except BaseException:
        os.close(read)
        os.close(write)
        raise

    def cancel() -> None:
        os.close(read)  # In the other order the kernel would signal the group.
        os.close(write)

    return cancel


class Process:
    def __init__(self, module: str, name: str) -> None:
        """Start `python -m module`. The arguments of the child are three file descriptors, its end of the socket pair,
        the memory of its probe and the memory for dumps of its stacks, the process id of its parent, and `name`, for
        ps."""
        if _in_child:
            raise OptionError(
                "a child process cannot start children: start the worker under `if __name__ == '__main__':`"
            )
        self._exited = asyncio.Event()
        with ExitStack() as ours, ExitStack() as theirs:
            self.end, end = socket.socketpair()
            ours.callback(self.end.close)
            theirs.callback(end.close)
            page, self.probe = create_probe()
            ours.callback(self.probe.close)
            if page >= 0:
                theirs.callback(os.close, page)
            self._dump = _dump_memory()
            if self._dump >= 0:
                ours.callback(os.close, self._dump)
            given = (end.fileno(), page, self._dump)
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, *map(str, given), str(os.getpid()), name],
                stdin=subprocess.DEVNULL,
                pass_fds=[number for number in given if number >= 0],
                process_group=0,
            )
            self.pid = self._process.pid
            try:
                for read_first in (True, False):
                    ours.callback(lifeline(self.pid, read_first=read_first))
                self._pidfd = _pidfd(self.pid)
            except OSError:
                self.kill()
                self._process.wait()
                raise
            self._ours = ours.pop_all()
        _processes.add(self)

    def watch(self, exited: Callable[[], None]) -> None:
        """Call `exited` on this event loop when the process has ended."""
        loop, pidfd = asyncio.get_running_loop(), self._pidfd

        def end() -> None:
            if pidfd is not None:
                loop.remove_reader(pidfd)
            self._exited.set()
            exited()

        def wait() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # The loop has closed.
                loop.call_soon_threadsafe(end)

        if pidfd is not None:
            loop.add_reader(pidfd, end)
        else:
            threading.Thread(target=wait, name=f"holdfast-child-{self.pid}", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and all of its group, whatever they are doing."""
        if self._process.returncode is None:  # Until it is reaped, no other process can have its number.
            with suppress(ProcessLookupError, PermissionError):
                # It may have left its group. macOS does not let us signal a group of which only a zombie is left.
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()

    def ask_for_stacks(self) -> None:
        """Have the process dump the stacks of its threads, also if C code blocks its interpreter: see `stacks`."""
        if self._dump >= 0 and self._process.returncode is None:
            os.ftruncate(self._dump, 0)
            os.lseek(self._dump, 0, os.SEEK_SET)  # Both processes have the same offset.
            os.kill(self.pid, STACK_SIGNAL)

    def stacks(self) -> str:
        """The last dump of the process, which may be dead; empty if there is none."""
        return os.pread(self._dump, MAX_DUMP_BYTES, 0).decode("utf-8", "replace") if self._dump >= 0 else ""

    async def kill_and_wait(self, patience_s: float = 0.0) -> str | None:
        """Kill the process, unless it ends within `patience_s`, and wait until its whole group is gone. Returns how it
        ended, or None if it was killed here."""
        await wait_at_most(patience_s, self._exited)
        by_itself = self._exited.is_set()
        self.kill()
        await self._exited.wait()
        self._process.wait()
        for _ in range(GROUP_POLLS):  # The others of the group are not our children: we cannot wait for them.
            if not _group_lives(self.pid):
                break
            await asyncio.sleep(GROUP_POLL_S)
        return exit_reason(self._process.returncode) if by_itself else None

    def close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._ours.close()
        _processes.discard(self)

    def close_in_fork(self) -> None:
        """Close the files of this object in a fork of the parent. The event loop is the parent's."""
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._ours.close()


_processes: WeakSet[Process] = WeakSet()
"""The children of this process."""


def _close_in_fork() -> None:
    for process in list(_processes):
        process.close_in_fork()
    _processes.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def _group_lives(number: int) -> bool:
    """Whether a process is left in a group. Zombies do not count: in a container they may never be reaped."""
    try:
        os.killpg(number, 0)
    except OSError:
        return False
    if sys.platform != "linux":
        return True
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, _, group = file.read().rpartition(b")")[2].split()[:3]
            except OSError:
                continue  # The process has just ended.
            if int(group) == number and state not in (b"Z", b"X"):
                return True
    return False


def _pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None if the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None  # A sandbox.
        raise


def exit_reason(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"it exited with status {returncode}"
    try:
        return f"it was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"it was killed by signal {-returncode}"


# Which run a child executes


class LoopProbe:
    """Shows which run an event loop executes, and which runs have begun, in memory that parent and child share. The
    parent can read it while the loop is blocked, and after the process has died.

    The memory is sealed: a handler that writes to every file descriptor, or truncates it, cannot change it. Where there
    are no seals (only Linux has them), the memory is not shared, and every run counts as begun.
    """

    SIZE = 24

    def __init__(self, page: mmap.mmap | None) -> None:
        self._page = page
        self._now = memoryview(bytearray(self.SIZE) if page is None else page).cast("Q")
        """The run that is executed now, the number of steps so far, and the newest run that has begun."""

    def begin(self, number: int) -> None:
        """The loop begins a step of run `number`. Runs have rising numbers, and begin in that order."""
        now = self._now
        now[1] += 1
        now[0] = number
        if number > now[2]:
            now[2] = number

    def end(self) -> None:
        self._now[0] = 0

    def read(self) -> tuple[int, int]:
        """The run that is executed now, or 0, and the number of its step."""
        return self._now[0], self._now[1]

    def has_begun(self, number: int) -> bool:
        """Whether this run has begun. True where that is not known."""
        return number <= self._now[2]

    def count_all_as_begun(self) -> LoopProbe:
        self.begin(2**63)
        self.end()
        return self

    def close(self) -> None:
        self._now.release()
        if self._page is not None:
            self._page.close()


def create_probe() -> tuple[int, LoopProbe]:
    """Make the parent's probe, and the file descriptor of its memory for the child; -1 if it cannot be shared."""
    if sys.platform != "linux":
        return -1, LoopProbe(None).count_all_as_begun()
    import fcntl

    page = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(page, LoopProbe.SIZE)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return page, LoopProbe(mmap.mmap(page, LoopProbe.SIZE, access=mmap.ACCESS_READ))
    except BaseException:
        os.close(page)
        raise


def attach_probe(page: int) -> LoopProbe:
    """Make the child's probe. From now on its memory cannot be written to in any other way."""
    if page < 0 or sys.platform != "linux":
        return LoopProbe(None)
    import fcntl

    probe = LoopProbe(mmap.mmap(page, LoopProbe.SIZE))
    try:
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # The kernel is too old to seal it. Memory that handlers could change shows nothing.
        probe.count_all_as_begun().close()
        probe = LoopProbe(None)
    os.close(page)
    return probe


def _dump_memory() -> int:
    """Make the memory into which a child dumps its stacks; -1 if the system has none. Handlers could write to it."""
    return os.memfd_create("holdfast-stacks", os.MFD_CLOEXEC) if sys.platform == "linux" else -1


# In the child


def dump_stacks_to(dump: int) -> None:
    """At `STACK_SIGNAL`, dump the stacks of all threads, without the help of the interpreter."""
    if dump >= 0:
        os.set_inheritable(dump, False)
        faulthandler.register(STACK_SIGNAL, file=dump, all_threads=True)


def is_child_of(parent: int) -> None:
    """Remember that this process is a child, and end with the parent, even if something else keeps the parent's files
    open, as a fork by a C library does. Exit if the parent is gone already."""
    global _in_child
    _in_child = True
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # Some builds of Python have no ctypes.
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def memory() -> int:
    """Bytes that this process has in memory; where that is not known, the most it has had."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
