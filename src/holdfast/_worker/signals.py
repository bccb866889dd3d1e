"""Signals of a program that is a worker: SIGTERM and SIGINT stop it, a second one quickly; SIGHUP loads new code."""

from __future__ import annotations

import asyncio
import logging
import signal

from holdfast._worker.worker import Worker
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast.worker")


async def serve_until_signal(worker: Worker) -> None:
    """Run a worker until it ends or a signal stops it, on the main thread. A worker that cannot load code again stops
    at SIGHUP, too."""
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(worker.run())
    signals = 0

    def stop(number: signal.Signals) -> None:
        nonlocal signals
        signals += 1
        log.info("%s: stopping the worker%s", number.name, "" if signals == 1 else " at once")
        worker.stop(quick=signals > 1)
        if not worker.started:
            running.cancel()

    reload_asked = asyncio.Event()
    reloading = asyncio.create_task(_reload_when_asked(worker, reload_asked))
    handled = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    for number in handled:
        loop.add_signal_handler(number, stop, number)
    if worker.can_reload:
        loop.add_signal_handler(signal.SIGHUP, reload_asked.set)
    try:
        await running
    except asyncio.CancelledError:
        if worker.started:
            raise
    finally:
        reloading.cancel()
        for number in handled:
            loop.remove_signal_handler(number)


async def _reload_when_asked(worker: Worker, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        log.info("SIGHUP: reloading the code")
        try:
            if await worker.reload():
                log.info("reloaded the code: the worker serves %s", ", ".join(worker.queues) or "nothing")
        except HoldfastError as error:
            log.error("the new code has no queues for this worker: %s", error)
