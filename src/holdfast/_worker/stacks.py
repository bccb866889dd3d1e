"""Stacks of runs, as text like the frames of a traceback: of a coroutine, of a thread, or from a dump of a process."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any

MAX_STACK = 8_192
"""Maximum number of characters of a stack; the outermost frames are cut off."""

_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def stack_of_run(run: Coroutine[Any, Any, Any], loop: int, thread: int | None, hidden: str) -> str:
    """Return the stack of a run, on any thread. `loop` is the thread that executes the coroutine, `thread` the one that
    executes its function, if that is not async. The frames of the file `hidden` are omitted, and those before them."""
    running = inspect.getcoroutinestate(run) == inspect.CORO_RUNNING
    frames = _thread_frames(loop, hidden) if running else list(_awaited_frames(run))
    if thread is not None:
        frames += _thread_frames(thread, hidden)
    shown = [(frame, line) for frame, line in frames if frame.f_code.co_filename != hidden]
    return cut_stack("".join(traceback.StackSummary.extract(shown).format()))


def stacks_in_dump(dump: str, hidden: str) -> str:
    """Return the stacks of all threads that execute a run, from a dump of `faulthandler`. It does not say which run."""
    stacks: list[str] = []
    for thread in dump.split("\n\n"):
        frames = [(file, int(line), name) for file, line, name in _DUMPED_FRAME.findall(thread)][::-1]
        files = [file for file, _, _ in frames]
        if hidden in files:
            shown = [frame for frame in frames[files.index(hidden) :] if frame[0] != hidden]
            stacks.append("".join(f'  File "{file}", line {line}, in {name}\n' for file, line, name in shown))
    return cut_stack("Another thread of its process:\n".join(stack for stack in stacks if stack))


def cut_stack(text: str) -> str:
    return text if len(text) <= MAX_STACK else f"  …\n{text[4 - MAX_STACK :]}"


def _awaited_frames(run: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frame of a suspended coroutine, and of what it awaits: coroutines and generators."""
    while run is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(run, f"{kind}_frame")), "")
        frame: FrameType | None = getattr(run, f"{kind}_frame", None)
        if frame is None:
            return
        yield frame, frame.f_lineno
        run = getattr(run, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _thread_frames(thread: int, hidden: str) -> list[tuple[FrameType, int]]:
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    frames = [] if frame is None else [(frame, line) for frame, line in traceback.walk_stack(frame)][::-1]
    files = [frame.f_code.co_filename for frame, _ in frames]
    return frames[files.index(hidden) :] if hidden in files else frames
