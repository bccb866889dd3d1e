"""Inside a child process: load the app, run what comes, say what became of it. `pool.py` starts it.

Handlers run as in any worker (`inline.Runner`). There is no connection to the storage until a handler wants one. The
child judges nothing: how long a run may take, and whether it counts, is decided by its parent.
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
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NoReturn

from msgspec.structs import replace

from holdfast import errors
from holdfast._client.app import Holdfast
from holdfast._core.retry_policy import Ended, Raised, TimedOut
from holdfast._worker.app_loader import load
from holdfast._worker.handler import Handler, Probed
from holdfast._worker.hooks import HookDispatcher
from holdfast._worker.inline import Runner
from holdfast._worker.logs import set_up
from holdfast._worker.processes.messages import (
    Begin,
    Broken,
    ChildChannel,
    Done,
    Happened,
    Hello,
    HookError,
    Leave,
    Ping,
    Pong,
    Progress,
    Refused,
    Start,
    Stop,
    ToChild,
    encode,
    frame_limit,
    receive,
)
from holdfast._worker.processes.os_process import is_child_of, memory
from holdfast._worker.processes.steps import LoopProbe, map_page
from holdfast.errors import HoldfastError, JobError, OptionError
from holdfast.version import VERSION

THREADS = 100
"""As many as a child can have runs."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOOKS_S = 4.0
"""How long hooks may take to hear the rest, when the child leaves."""

log = logging.getLogger("holdfast")


class ChildRuntime:
    """One child, with its app."""

    def __init__(self, app: Holdfast[Any], steps: LoopProbe) -> None:
        self._parts = app.parts()
        self._app = app
        self._handlers: dict[str, Handler] = {handler.queue: handler for handler in self._parts.handlers}
        for handler in self._parts.handlers:
            handler.check()
        self._left = asyncio.Event()
        self._link: ChildChannel[ToChild] = ChildChannel(
            ToChild, self._received, self._orphaned, self._orphaned, self._unsendable
        )
        self._steps = steps
        self._runner: Runner[int] = Runner(
            self._parts.around, THREADS, ended=self._ended, reported=self._progressed, steps=self._stepped
        )
        self._teller = HookDispatcher(self._parts.on_event, self._parts.around.report_error, on_threads=True)

    async def serve(self, end: socket.socket) -> None:
        """Until told to leave."""
        self._loop = asyncio.get_running_loop()
        await self._link.connect(end)
        async with AsyncExitStack() as stack:
            try:
                await self._get_ready(stack)
            except Exception:
                told = f"the app's lifespan could not be entered:\n{traceback.format_exc().rstrip()}"
                self._link.send(Broken(told, mistake=True))
                self._link.flush()
                return
            telling = asyncio.create_task(self._teller.run())
            self._link.send(self._hello())
            try:
                await self._left.wait()
            except asyncio.CancelledError:
                _crash()  # A handler has cancelled every task. Its neighbours have not.
            await self._teller.end(telling, HOOKS_S)
            self._runner.close()

    async def _get_ready(self, stack: AsyncExitStack) -> None:
        self._app.defer()
        await stack.enter_async_context(self._app)
        if self._parts.lifespan is not None:
            self._runner.resources = await stack.enter_async_context(self._parts.lifespan())

    def _hello(self) -> Hello:
        address = self._parts.address
        self._link.limit = frame_limit(address.max_payload)
        return Hello(
            [handler.config for handler in self._handlers.values()],
            address.url,
            address.namespace,
            address.max_payload,
            bool(self._parts.on_event),
            bool(self._parts.around.errors),
        )

    def _received(self, messages: list[ToChild]) -> None:
        for message in messages:
            match message:
                case Start(number, queue, job, id):
                    job = job if id is None else replace(job, id=id.decode("utf-8", "surrogateescape"))
                    if queue in self._handlers:
                        self._runner.start(number, self._handlers[queue], job)
                    else:
                        self._link.send(Refused(number))
                case Stop(number, why):
                    self._runner.stop(number, why)
                case Ping():
                    self._link.send(Pong(memory()))
                case Happened(event, id):
                    event = event if id is None else replace(event, id=id.decode("utf-8", "surrogateescape"))
                    self._teller.event(event)
                case HookError(error, told, where):
                    self._teller.report_error(_rebuilt(error, told), where)
                case Leave():
                    self._left.set()
                case Begin():
                    pass  # That was the first one, and is done.

    def _stepped(self, number: int, run: Coroutine[Any, Any, Ended]) -> Probed:
        """Should a run block the loop, the parent can see which it was."""
        return Probed(run, partial(self._steps.begin, number), self._steps.end)

    def _ended(self, number: int, ended: Ended) -> None:
        self._link.send(Done(number, ended))

    def _progressed(self, number: int, progress: bytes) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._link.send, Progress(number, progress))

    def _unsendable(self, message: object, error: Exception) -> None:
        """A result or an error that does not fit through. What msgpack cannot carry is most likely in its details."""
        if not isinstance(message, Done):
            return
        ended = message.ended
        if isinstance(ended, Raised | TimedOut) and ended.error.details is not None:
            self._link.send(Done(message.number, replace(ended, error=replace(ended.error, details=None))))
        else:
            refused = JobError(
                type="PayloadRejected", kind="permanent", message=f"what it gave cannot be sent: {error}"
            )
            self._link.send(Done(message.number, Raised(refused)))

    def _orphaned(self, why: str) -> None:
        """The parent is gone, or a handler has closed our connection: either way nobody hears us. What handlers have
        started ends, too."""
        try:
            os.killpg(os.getpid(), signal.SIGKILL)
        except ProcessLookupError:
            pass  # A handler has moved us to another group, which is none of our business.
        os.kill(os.getpid(), signal.SIGKILL)


def _rebuilt(name: str, told: str) -> Exception:
    """An error of the parent's, as one of the same kind if we have it."""
    kind = getattr(errors, name, HoldfastError)
    try:
        error: Exception = kind(told)
    except TypeError:  # It takes more than a message.
        return HoldfastError(told)
    return error


def _let_it_pass(number: int, frame: object) -> None:
    """A terminal, or a service manager, tells the whole tree. Our parent is told, too, and sees to us."""


def _crash() -> NoReturn:
    """End at once, before anything more is said: what other runs would say now is not of their own doing."""
    traceback.print_exc()
    os._exit(1)


def _take_signals() -> None:
    """Let signals pass us by; but what a handler forks is ended by them, as any process. One that comes while it is
    being forked is kept until it is seen to."""
    for number in SIGNALS:  # Not SIG_IGN: programs that handlers start would inherit that.
        signal.signal(number, _let_it_pass)
    mask = threading.local()

    def hold() -> None:
        mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask.before)

    def be_like_any() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        go_on()

    os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=be_like_any)


def main() -> None:
    end_number, page, parent = (int(word) for word in sys.argv[1:4])
    _take_signals()
    is_child_of(parent)
    end = socket.socket(fileno=end_number)
    end.set_inheritable(False)
    steps = map_page(page)
    try:
        begin = receive(end, Begin)
    except EOFError:
        return
    try:
        if begin.version != VERSION:
            raise HoldfastError(f"the worker is of release {begin.version}, this is {VERSION}: start the worker anew")
        if begin.logs is not None:
            set_up(begin.logs)
        sys.path[:] = begin.path
        child = ChildRuntime(load(begin.target, Holdfast), steps)
    except HoldfastError as error:
        end.sendall(encode([Broken(str(error), isinstance(error, OptionError))])[0])
        sys.exit(1)
    with asyncio.Runner() as runner:
        try:
            runner.run(child.serve(end))
        except BaseException:  # A handler has broken the loop. To end it in good order would cancel its neighbours.
            _crash()


if __name__ == "__main__":
    main()
