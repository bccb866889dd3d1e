"""Signals of a program that is a worker: SIGTERM and SIGINT stop it, a second one quickly; SIGHUP loads new code."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable

from holdfast._worker.source_watch import next_change
from holdfast._worker.worker import Worker
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast.worker")


async def serve_until_signal(worker: Worker, folders: Callable[[], Iterable[str]] | None = None) -> bool:
    """Run a worker until it ends or a signal stops it, on the main thread. A worker that cannot load code again stops
    at SIGHUP, too. With `folders`, changes of Python files in these folders act like SIGHUP. Returns whether a change
    has stopped the worker."""
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(worker.run())
    signals = 0
    changed = False

    def stop(number: signal.Signals) -> None:
        nonlocal signals
        signals += 1
        log.info("%s: stopping the worker%s", number.name, "" if signals == 1 else " at once")
        worker.stop(quick=signals > 1)
        if not worker.started:
            running.cancel()

    def on_change(file: str) -> None:
        nonlocal changed
        if worker.can_reload:
            _ask(reload_asked, f"{file} has changed")
        else:
            changed = True
            log.info("%s has changed: stopping the worker", file)
            worker.stop()

    reload_asked = asyncio.Event()
    tasks = [asyncio.create_task(_reload_when_asked(worker, reload_asked))]
    if folders is not None:
        tasks.append(asyncio.create_task(_watch(folders, on_change)))
    handled = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for number in handled:
        loop.add_signal_handler(number, stop, number)
    if worker.can_reload:
        loop.add_signal_handler(signal.SIGHUP, _ask, reload_asked, "SIGHUP")
    try:
        await running
    except asyncio.CancelledError:
        if worker.started:
            raise
    finally:
        for task in tasks:
            task.cancel()
        for number in handled:
            loop.remove_signal_handler(number)
    return changed and not signals


def _ask(asked: asyncio.Event, why: str) -> None:
    log.info("%s: reloading the code", why)
    asked.set()


async def _watch(folders: Callable[[], Iterable[str]], on_change: Callable[[str], None]) -> None:
    seen: dict[str, dict[str, int]] = {}
    while True:
        on_change(await next_change(folders, seen))


async def _reload_when_asked(worker: Worker, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            if await worker.reload():
                log.info("reloaded the code: the worker serves %s", ", ".join(worker.queues) or "nothing")
        except HoldfastError as error:
            log.error("the new code has no queues for this worker: %s", error)
