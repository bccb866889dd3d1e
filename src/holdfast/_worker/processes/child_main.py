"""The program of a child process: load the app, run jobs, report when a run is finished. `pool.py` starts it.

There is no connection to the storage until a handler uses one. The parent limits and settles the runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Coroutine, Generator
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import coroutine
from typing import Any, NoReturn

from msgspec.structs import replace

from holdfast import errors
from holdfast._core.capacity import LENT_TIMES
from holdfast._core.retry_policy import Ended, Raised, TimedOut
from holdfast._worker.app_loader import RunnableApp, app_parts, import_app, source_of
from holdfast._worker.handler import Runner
from holdfast._worker.logs import set_up_logging
from holdfast._worker.processes import messages
from holdfast._worker.processes.messages import Begin, ChildChannel, Finished, ToChild
from holdfast._worker.processes.os_process import LoopProbe, attach_probe, dump_stacks_to, is_child_of, memory
from holdfast._worker.source_watch import source_folders
from holdfast._worker.telemetry import HookDispatcher
from holdfast.errors import HoldfastError, JobError, OptionError
from holdfast.version import VERSION

MAX_THREADS = (1 + LENT_TIMES) * 100
"""Most threads of a child: one for each run that it can have."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOOKS_S = 4.0
"""How long hooks may take for the last events, when the child leaves."""

log = logging.getLogger("holdfast")


@coroutine
def _probed_steps(probe: LoopProbe, number: int, run: Coroutine[Any, Any, Ended]) -> Generator[Any, None, Ended]:
    error: BaseException | None = None
    while True:
        probe.begin(number)
        try:
            wish = run.send(None) if error is None else run.throw(error)
        except StopIteration as returned:
            ended: Ended = returned.value
            return ended
        finally:
            probe.end()
        try:
            yield wish
            error = None
        except GeneratorExit:
            run.close()
            raise
        except BaseException as thrown:
            error = thrown


async def _probed(probe: LoopProbe, number: int, run: Coroutine[Any, Any, Ended]) -> Ended:
    """Await a run, and note in a probe when the loop executes it: the parent sees which run blocks the loop."""
    return await _probed_steps(probe, number, run)


class ChildRuntime:
    def __init__(self, app: RunnableApp, probe: LoopProbe, source: str) -> None:
        self._source = source
        self._parts = parts = app_parts(app)
        self._leaving = asyncio.Event()
        self._channel: ChildChannel[ToChild] = ChildChannel(ToChild, self)
        self._runner = Runner(parts.handlers, parts.hooks, MAX_THREADS, self, partial(_probed, probe))
        self._runner.check()
        self._hooks = HookDispatcher(parts.on_event, parts.hooks.report_error, on_threads=True)

    async def serve(self, end: socket.socket) -> None:
        """Run jobs until the parent sends `Leave`."""
        self._loop = asyncio.get_running_loop()
        await self._channel.connect(end)
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._parts.open_lazily())
                if self._parts.lifespan is not None:
                    self._runner.resources = await stack.enter_async_context(self._parts.lifespan())
            except Exception:
                message = f"the app's lifespan failed:\n{traceback.format_exc().rstrip()}"
                self._channel.send(messages.Broken(message, mistake=True))
                self._channel.flush()
                return
            dispatching = asyncio.create_task(self._hooks.run())
            parts = self._parts
            self._channel.limit = messages.frame_limit(parts.max_payload)
            hello = messages.Hello(
                configs=[handler.config for handler in parts.handlers],
                url=parts.url,
                on_default=parts.on_default,
                namespace=parts.namespace,
                max_payload=parts.max_payload,
                hooks=bool(parts.on_event),
                error_hooks=bool(parts.hooks.errors),
                source=self._source,
                folders=source_folders(),
            )
            self._channel.send(hello)
            try:
                await self._leaving.wait()
            except asyncio.CancelledError:
                _crash()  # A handler has cancelled every task, those of other runs as well.
            await self._hooks.end(dispatching, HOOKS_S)
            self._runner.close()

    def received(self, batch: list[ToChild]) -> None:
        for message in batch:
            match message:
                case messages.Start(number, queue, job, id):
                    job = job if id is None else replace(job, id=id.decode("utf-8", "surrogateescape"))
                    if queue in self._runner.handlers:
                        self._runner.start(number, queue, job)
                    else:
                        self._channel.send(messages.Refused(number))
                case messages.Stop(number, why):
                    stack = self._runner.stop(number, why)
                    if stack:
                        self._channel.send(messages.Stack(number, stack))
                case messages.ShowStack(number):
                    self._channel.send(messages.Stack(number, self._runner.stack(number)))
                case messages.Ping():
                    self._channel.send(messages.Pong(memory()))
                case messages.Happened(event, id):
                    event = event if id is None else replace(event, id=id.decode("utf-8", "surrogateescape"))
                    self._hooks.publish(event)
                case messages.HookError(error, text, where):
                    self._hooks.report_error(_rebuilt(error, text), where)
                case messages.Leave():
                    self._leaving.set()

    def finished(self, number: int, ended: Ended) -> None:
        self._channel.send(Finished(number, ended))

    def waits(self, number: int, queue: str, begins: bool) -> None:
        """A run begins or ends to wait for jobs of a queue."""
        self._channel.send(messages.Waits(number, queue, begins))

    def extended(self, number: int, limit_ms: int) -> None:
        """A run asks for this much time from now on."""
        self._channel.send(messages.ExtendTimeout(number, limit_ms))

    def progressed(self, number: int, progress: bytes) -> None:
        """A run has new progress. Called on any thread."""
        self._loop.call_soon_threadsafe(self._channel.send, messages.Progress(number, progress))

    def unsendable(self, message: Any, error: Exception) -> None:
        """A result or an error cannot be sent. Most likely msgpack cannot carry the details of the error."""
        if not isinstance(message, Finished):
            return
        ended = message.ended
        if isinstance(ended, Raised | TimedOut) and ended.error.details is not None:
            ended = replace(ended, error=replace(ended.error, details=None))
        else:
            text = f"the result cannot be sent to the worker: {error}"
            ended = Raised(JobError(type="PayloadRejected", kind="permanent", message=text))
        self.finished(message.number, ended)

    def channel_ended(self, misbehaved: str = "") -> None:
        """The parent is gone, or a handler has closed the connection or written to it. This process ends, with the
        processes that handlers have started."""
        with suppress(ProcessLookupError):  # A handler has moved this process to another group, which must live on.
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _rebuilt(name: str, message: str) -> Exception:
    """Make an error of the parent again, with the same class if it is an error of Holdfast."""
    kind: type[Exception] = getattr(errors, name, HoldfastError)
    try:
        return kind(message)
    except TypeError:  # The class takes more than a message.
        return HoldfastError(message)


def _ignore(number: int, frame: object) -> None:
    """Ignore a signal. A terminal or a service manager signals the whole tree; the parent gets it too, and ends us."""


def _crash() -> NoReturn:
    """Exit at once, before other runs report an end that this run has caused."""
    traceback.print_exc()
    os._exit(1)


def _take_signals() -> None:
    """Ignore signals in this process, but not in processes that a handler forks: signals that come during a fork are
    held back until the new process has its default handlers."""
    for number in SIGNALS:  # Not SIG_IGN: programs that handlers start would inherit that.
        signal.signal(number, _ignore)
    mask = threading.local()

    def block() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def restore_defaults() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore_defaults)


def main() -> None:
    end_number, page, dump, parent = (int(word) for word in sys.argv[1:5])
    _take_signals()
    is_child_of(parent)
    end = socket.socket(fileno=end_number)
    end.set_inheritable(False)
    probe = attach_probe(page)
    dump_stacks_to(dump)
    try:
        begin = messages.receive(end, Begin)
    except EOFError:
        return
    try:
        if begin.version != VERSION:
            raise HoldfastError(f"the worker has version {begin.version}, its child has {VERSION}: restart the worker")
        if begin.logs is not None:
            set_up_logging(begin.logs)
        sys.path[:] = begin.path
        app = import_app(begin.target, RunnableApp)  # type: ignore[type-abstract]
        child = ChildRuntime(app, probe, source_of(begin.target))
    except HoldfastError as error:
        end.sendall(messages.encode([messages.Broken(str(error), isinstance(error, OptionError))]))
        sys.exit(1)
    with asyncio.Runner() as runner:
        try:
            runner.run(child.serve(end))
        except BaseException:  # A handler has broken the loop. A regular end would cancel the other runs.
            _crash()


if __name__ == "__main__":
    main()
