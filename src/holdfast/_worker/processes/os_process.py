"""Child processes that can be killed for certain, and that never outlive their parent.

Each is the head of a process group of its own, so that what a handler has started dies with it. On Linux the kernel
itself kills the group when the parent is gone, whatever the child is doing; elsewhere the child sees that its
connection ended.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

from holdfast._worker.processes.steps import share_page
from holdfast.errors import OptionError

GROUP_LOOKS, LOOK_S = 100, 0.01
"""How often to look whether the last process of a killed group is gone, and after how long again."""


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
    """A child process, and our end of the way to it."""

    def __init__(self, module: str, name: str) -> None:
        """Start `python -m module`. `name` is shown by ps. The child is told two file descriptors, its end of the
        socket pair and a page of memory that both see, and who its parent is."""
        if _in_child:
            raise OptionError(
                "a child process starts no children: put what starts the worker under `if __name__ == '__main__':`"
            )
        self._exited = asyncio.Event()
        with ExitStack() as ours, ExitStack() as theirs:
            self.end, end = socket.socketpair()
            ours.callback(self.end.close)
            theirs.callback(end.close)
            page, self.steps = share_page()
            ours.callback(self.steps.close)
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
        """Have `exited` called when the process has ended."""

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
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:
                pass  # The loop has closed. Nobody is left to be told.

        threading.Thread(target=wait, name=f"holdfast-child-{self.pid}", daemon=True).start()

    def kill(self) -> None:
        """Kill the process and all of its group, whatever they are doing."""
        if self._process.returncode is None:  # Until it is reaped, nobody else can have its number.
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # It may have left its group. On macOS one of which only a zombie is left may not be signalled.
            self._process.kill()

    async def bury(self, patience_s: float = 0.0) -> str | None:
        """Kill it, unless it ends by itself in time, and return when it is certainly gone: how it ended, if that was by
        itself."""
        try:
            async with asyncio.timeout(patience_s):
                await self._exited.wait()
        except TimeoutError:
            pass  # It gets no more time.
        by_itself = self._exited.is_set()
        self.kill()
        await self._exited.wait()
        self._process.wait()
        await self._until_the_group_is_gone()
        return said_of(self._process.returncode) if by_itself else None

    def close(self) -> None:
        """Let go of what is left of it here."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._ours.close()

    async def _until_the_group_is_gone(self) -> None:
        """Those in the group are not our children: we cannot wait for them, only look."""
        for _ in range(GROUP_LOOKS):
            if not _group_lives(self.pid):
                return
            await asyncio.sleep(LOOK_S)


def _group_lives(number: int) -> bool:
    """Is anybody left in a process group? Zombies do not count: in a container they may never be reaped."""
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


def said_of(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None or returncode >= 0:
        return f"it exited with status {returncode}"
    try:
        return f"it was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"it was killed by signal {-returncode}"


# In the child


def is_child_of(parent: int) -> None:
    """Note that this process is a child. It ends here if its parent is gone already."""
    global _in_child
    _in_child = True
    if os.getppid() != parent:
        os._exit(1)


def memory() -> int:
    """Bytes that this process has in memory."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
