"""Child processes that can be killed for certain, and that never outlive their parent.

Each is the head of a process group of its own, so that what a handler has started dies with it. On Linux the kernel
itself kills the group when the parent is gone, whatever the child is doing; elsewhere the child sees that its
connection ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from holdfast.errors import OptionError

PR_SET_PDEATHSIG = 1
GROUP_LOOKS, LOOK_S = 100, 0.01
"""How often to look whether the last process of a killed group is gone, and after how long again."""


_in_child = False


class Process:
    """A child process, and our end of the way to it."""

    def __init__(self, module: str, name: str) -> None:
        """Start `python -m module`. `name` is shown by ps."""
        if _in_child:
            raise OptionError(
                "a child process starts no children: put what starts the worker under `if __name__ == '__main__':`"
            )
        self.end, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, str(theirs.fileno()), str(lifeline), str(os.getpid()), name],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                process_group=0,
            )
        except BaseException:
            self.end.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = self._process.pid
        self._exited = asyncio.Event()
        self._pidfd = -1

    def watch(self, exited: Callable[[], None]) -> None:
        """Have `exited` called when the process has ended."""

        def end() -> None:
            self._exited.set()
            exited()

        loop = asyncio.get_running_loop()
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)

            def ready() -> None:
                loop.remove_reader(self._pidfd)
                end()

            loop.add_reader(self._pidfd, ready)
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
        if self._pidfd >= 0:
            try:
                asyncio.get_running_loop().remove_reader(self._pidfd)
            except RuntimeError:
                pass  # No loop, nothing to take it out of.
            os.close(self._pidfd)
            self._pidfd = -1
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self.end.close()

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
    for folder in os.scandir("/proc"):
        if folder.name.isdigit():
            try:
                with open(f"/proc/{folder.name}/stat") as file:
                    state, _, group = file.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # It has just ended.
            if int(group) == number and state not in "ZX":
                return True
    return False


def said_of(returncode: int | None) -> str:
    """How a process ended, in words."""
    if returncode is None or returncode >= 0:
        return f"it exited with status {returncode}"
    try:
        return f"it was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"it was killed by signal {-returncode}"


# In the child


def die_with(parent: int, lifeline: int) -> None:
    """Have the kernel kill this process and its group when `parent`, which holds the other end of the lifeline, is
    gone. A signal is sent when the pipe hangs up, not by code of ours: it also ends a process that is stuck in C."""
    global _in_child
    _in_child = True
    if sys.platform == "linux":
        import ctypes
        import fcntl

        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        # A handler may close every file descriptor. This is for itself alone, and cannot be closed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # It died before we could ask.
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
