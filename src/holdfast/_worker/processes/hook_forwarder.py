"""Events for an app's hooks, sent to where the app's code is: a child process.

One child gets all of them, so that hooks are called in order; another one only when that one is gone. While it does not
answer, events wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping

from holdfast._worker.processes.child_handle import ChildHandle
from holdfast._worker.processes.messages import Happened, HookError, without_odd_id
from holdfast._worker.telemetry import RunEvent

MAX_WAITING = 10_000
"""Events that wait for a child that can take them; the oldest are dropped."""


class HookForwarder:
    """Sends events and errors to the hooks in a child."""

    def __init__(self, children: Mapping[int, ChildHandle]) -> None:
        """`children` are those of the pool, at any time."""
        self._children = children
        self._waiting: deque[Happened | HookError] = deque(maxlen=MAX_WAITING)
        self._child: ChildHandle | None = None

    def publish(self, event: RunEvent) -> None:
        """Have the event hooks called with this event."""
        self._waiting.append(Happened(*without_odd_id(event)))
        self.flush()

    def report_error(self, error: BaseException, where: str) -> None:
        """Have the error hooks called with this error."""
        self._waiting.append(HookError(type(error).__name__, str(error), where))
        self.flush()

    def flush(self) -> None:
        """Send what waits, if there is a child that can take it."""
        if self._child is None or not self._child.open:
            self._child = next((child for child in self._children.values() if child.open and not child.spare), None)
        if self._child is not None and not self._child.is_unresponsive(asyncio.get_running_loop().time()):
            while self._waiting:
                self._child.send(self._waiting.popleft())
