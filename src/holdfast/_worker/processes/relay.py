"""Events for an app's hooks, where the app's code is: in a child process.

One child tells all of them, so that hooks hear things in order; another one only when it is gone. While it does not
answer, it is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from holdfast._worker.executor import RunEvent
from holdfast._worker.processes.child_handle import ChildHandle
from holdfast._worker.processes.messages import Happened, HookError, without_odd_id
from holdfast.errors import HoldfastError

MAX_WAITING = 10_000
"""Events that wait for a child that can take them; the oldest are dropped."""

log = logging.getLogger("holdfast.worker")


class HookForwarder:
    """Passes events on to a child."""

    def __init__(self, children: Callable[[], Iterable[ChildHandle]]) -> None:
        self._children = children
        self._waiting: deque[Happened | HookError] = deque(maxlen=MAX_WAITING)
        self._through: ChildHandle | None = None

    def event(self, event: RunEvent) -> None:
        self._waiting.append(Happened(*without_odd_id(event)))
        self.flush()

    def report_error(self, error: BaseException, where: str) -> None:
        self._waiting.append(HookError(type(error).__name__, str(error), where))
        self.flush()

    def flush(self) -> None:
        """Pass on what can be."""
        if self._through is None or not self._through.open:
            self._through = next((child for child in self._children() if child.open and not child.spare), None)
        if self._through is not None and not self._through.is_deaf(asyncio.get_running_loop().time()):
            while self._waiting:
                self._through.tell(self._waiting.popleft())


def log_trouble(error: BaseException, where: str) -> None:
    """For want of a hook."""
    log.error("%s: %s", where, error, exc_info=None if isinstance(error, HoldfastError) else error)
