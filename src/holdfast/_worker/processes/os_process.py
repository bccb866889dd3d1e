"""Child processes that can be killed for certain, and that never outlive their parent.

Each is the head of a process group of its own, so that what a handler has started dies with it. On Linux the kernel
itself kills the group when the parent is gone, whatever the child is doing; elsewhere the child sees that its
connection ended. `LoopProbe` shows the parent which run the event loop of a child executes.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from holdfast.errors import OptionError

F_SEAL_FUTURE_WRITE = 0x10
GROUP_POLLS, GROUP_POLL_S = 100, 0.01
"""How often to check whether the last process of a killed group is gone, and the pause between two checks."""

_in_child = False


def lifeline(group: int, *, read_first: bool) -> Callable[[], None]:
    """Have the kernel kill a process group when this process is gone, however it goes: how to call that off.

    A pipe of which we hold both ends signals the group when its write end is closed and its read end is not: that is,
    when the kernel closes our files, in an order of its own. So there are two, one for either order. Nothing of it is
    in the child, where a handler could close it; and no code has to run there, so it also ends what is stuck in C.
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
        pass  # It has ended already.
    except BaseException:
        os.close(read)
        os.close(write)
        raise

    def call_off() -> None:
        os.close(read)  # First: the other way round it would signal.
        os.close(write)

    return call_off


class Process:
    def __init__(self, module: str, name: str) -> None:
        """Start `python -m module`. `name` is shown by ps. The child gets two file descriptors, its end of the
        socket pair and the memory of its probe, and its parent's process id."""
        if _in_child:
            raise OptionError(
                "a child process starts no children: put what starts the worker under `if __name__ == '__main__':`"
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
            given = (end.fileno(), page)
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

    def watch(self, exited: Callable[[], None]) -> None:
        def end() -> None:
            self._exited.set()
            exited()

        loop = asyncio.get_running_loop()
        if self._pidfd is not None:
            pidfd = self._pidfd

            def ready() -> None:
                loop.remove_reader(pidfd)
                end()

            loop.add_reader(pidfd, ready)
            return

        def wait() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # The loop has closed.
                loop.call_soon_threadsafe(end)

        threading.Thread(target=wait, name=f"holdfast-child-{self.pid}", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and all of its group, whatever they are doing."""
        if self._process.returncode is None:  # Until it is reaped, no other process can have its number.
            with suppress(ProcessLookupError, PermissionError):
                # It may have left its group. On macOS one of which only a zombie is left may not be signalled.
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()

    async def kill_and_wait(self, patience_s: float = 0.0) -> str | None:
        """Kill it, unless it ends by itself in time, and return when it is certainly gone: how it ended, if that was by
        itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._exited.wait()
        by_itself = self._exited.is_set()
        self.kill()
        await self._exited.wait()
        self._process.wait()
        await self._until_group_is_gone()
        return exit_reason(self._process.returncode) if by_itself else None

    def close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._ours.close()

    async def _until_group_is_gone(self) -> None:
        """Those in the group are not our children: we cannot wait for them, only look."""
        for _ in range(GROUP_POLLS):
            if not _group_lives(self.pid):
                return
            await asyncio.sleep(GROUP_POLL_S)


def _group_lives(number: int) -> bool:
    """Is a process left in a group? Zombies do not count: in a container they may never be reaped."""
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
                continue  # It has just ended.
            if int(group) == number and state not in (b"Z", b"X"):
                return True
    return False


def _pidfd(pid: int) -> int | None:
    """What becomes readable when the process ends; None where there is no such thing."""
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
    """Shows which run an event loop executes, and which it has begun, in memory that parent and child share: the parent
    can read it when the loop is blocked, and when the process is dead.

    The memory is sealed: a handler that writes to every file descriptor, or truncates it, must not change what it
    shows. Where there are no seals (Linux has them) there is no page, and nothing is known.
    """

    SIZE = 24

    def __init__(self, page: mmap.mmap | None) -> None:
        self._page = page
        self._now = None if page is None else memoryview(page).cast("Q")

    def begin(self, number: int) -> None:
        """The loop begins to execute run `number`. Runs have rising numbers, and begin in that order."""
        now = self._now
        if now is not None:
            now[1] += 1
            now[0] = number
            if number > now[2]:
                now[2] = number

    def end(self) -> None:
        if self._now is not None:
            self._now[0] = 0

    def read(self) -> tuple[int, int]:
        """The run whose step is going on, 0 if none is; and which step that is."""
        return (0, 0) if self._now is None else (self._now[0], self._now[1])

    def has_begun(self, number: int) -> bool:
        """Has this run begun? True where that is not known."""
        return self._now is None or number <= self._now[2]

    def close(self) -> None:
        if self._now is not None and self._page is not None:
            self._now.release()
            self._page.close()
            self._now = self._page = None


def create_probe() -> tuple[int, LoopProbe]:
    """In the parent: memory to share with a child, as a file descriptor to give it (-1 if there can be none) and as
    what is read from it."""
    if sys.platform != "linux":
        return -1, LoopProbe(None)
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
    """In the child: the page to write to, which from now on is written to in no other way."""
    if page < 0 or sys.platform != "linux":
        return LoopProbe(None)
    import fcntl

    probe = LoopProbe(mmap.mmap(page, LoopProbe.SIZE))
    try:
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # An old kernel. What could be overwritten is not to be relied on.
        probe.begin(2**63)  # From now on every run counts as begun.
        probe.end()
        probe.close()
    os.close(page)
    return probe


# In the child


def is_child_of(parent: int) -> None:
    """Note that this process is a child. It ends here if its parent is gone already."""
    global _in_child
    _in_child = True
    if os.getppid() != parent:
        os._exit(1)


def memory() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
