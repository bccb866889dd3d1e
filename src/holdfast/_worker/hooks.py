"""How hooks get to hear what a worker did: in order, apart from the work, so that a slow hook holds nothing up."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence

from holdfast._worker.executor import OnEvent, RunEvent
from holdfast._worker.handler import awaited

log = logging.getLogger("holdfast.worker")

ErrorReporter = Callable[[BaseException, str], Awaitable[None]]


class HookDispatcher:
    """Calls hooks, one after the other."""

    def __init__(self, hooks: Sequence[OnEvent], report_error: ErrorReporter, *, on_threads: bool = False) -> None:
        """`on_threads`: hooks that are not async are called on a thread, so that they do not hold up what else the loop
        does."""
        self._on_threads = on_threads
        self.hooks = list(hooks)
        self._report_error = report_error
        self._lines: asyncio.Queue[RunEvent | tuple[BaseException, str] | None] = asyncio.Queue()

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        if self.hooks:
            self._lines.put_nowait(event)

    def report_error(self, error: BaseException, where: str) -> None:
        """Something went wrong that is no job's own failure."""
        self._lines.put_nowait((error, where))

    async def run(self) -> None:
        """Until `end`."""
        while (line := await self._lines.get()) is not None:
            if isinstance(line, tuple):
                await self._report_error(*line)
                continue
            for hook in self.hooks:
                try:
                    if self._on_threads and not inspect.iscoroutinefunction(hook):
                        await awaited(await asyncio.to_thread(hook, line))
                    else:
                        await awaited(hook(line))
                except (Exception, SystemExit) as error:
                    await self._report_error(error, f"on_event, for {line.kind} of job {line.id!r:.80}")

    async def end(self, running: asyncio.Task[None], within_s: float) -> None:
        """Tell what is left, and end `running`, which is `run`; a hook that does not end is given up."""
        self._lines.put_nowait(None)
        await asyncio.wait([running], timeout=within_s)
        if not running.done():
            log.error("a hook does not end: it is given up")
            running.cancel()
