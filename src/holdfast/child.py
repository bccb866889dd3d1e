"""Inside a child process: load the app, run what comes, say what became of it. `python -m holdfast.child`, by pool.py.

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
import traceback
from contextlib import AsyncExitStack
from typing import Any

from holdfast import errors
from holdfast.app import Holdfast
from holdfast.errors import HoldfastError, JobError, OptionError
from holdfast.execution import Handler
from holdfast.frames import (
    Begin,
    Broken,
    Done,
    Happened,
    Hello,
    Leave,
    Link,
    Ping,
    Pong,
    Progress,
    Refused,
    Start,
    Stop,
    ToChild,
    Trouble,
    encode,
    frame_limit,
    receive,
)
from holdfast.hooks import Teller
from holdfast.inline import Runner
from holdfast.logs import set_up
from holdfast.policy import Ended, Raised
from holdfast.processes import die_with, memory
from holdfast.targets import load
from holdfast.version import VERSION

THREADS = 100
"""As many as a child can have runs."""
HOOKS_S = 4.0
"""How long hooks may take to hear the rest, when the child leaves."""

log = logging.getLogger("holdfast")


class Child:
    """One child, with its app."""

    def __init__(self, app: Holdfast[Any]) -> None:
        self._inside = app.inside()
        self._app = app
        self._handlers: dict[str, Handler] = {handler.queue: handler for handler in self._inside.handlers}
        for handler in self._inside.handlers:
            handler.check()
        self._left = asyncio.Event()
        self._link: Link[ToChild] = Link(ToChild, self._received, self._orphaned, self._orphaned, self._unsendable)
        self._runner: Runner[int] = Runner(self._inside.around, THREADS, ended=self._ended, reported=self._progressed)
        self._teller = Teller(self._inside.on_event, self._inside.around.trouble)

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
            await self._left.wait()
            await self._teller.end(telling, HOOKS_S)
            self._runner.close()

    async def _get_ready(self, stack: AsyncExitStack) -> None:
        self._app.defer()
        await stack.enter_async_context(self._app)
        if self._inside.lifespan is not None:
            self._runner.resources = await stack.enter_async_context(self._inside.lifespan())

    def _hello(self) -> Hello:
        address = self._inside.address
        self._link.limit = frame_limit(address.max_payload)
        return Hello(
            [handler.terms for handler in self._handlers.values()],
            address.url,
            address.namespace,
            address.max_payload,
            bool(self._inside.on_event),
            bool(self._inside.around.errors),
        )

    def _received(self, messages: list[ToChild]) -> None:
        for message in messages:
            match message:
                case Start(number, queue, job):
                    if queue in self._handlers:
                        self._runner.start(number, self._handlers[queue], job)
                    else:
                        self._link.send(Refused(number))
                case Stop(number, why):
                    self._runner.stop(number, why)
                case Ping():
                    self._link.send(Pong(memory()))
                case Happened(event):
                    self._teller.event(event)
                case Trouble(error, told, where):
                    kind = getattr(errors, error, HoldfastError)
                    self._teller.trouble(kind(told), where)
                case Leave():
                    self._left.set()
                case Begin():
                    pass  # That was the first one, and is done.

    def _ended(self, number: int, ended: Ended) -> None:
        self._link.send(Done(number, ended))

    def _progressed(self, number: int, progress: bytes) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._link.send, Progress(number, progress))

    def _unsendable(self, message: object, error: Exception) -> None:
        """A result or an error that does not fit through."""
        if isinstance(message, Done):
            refused = JobError(
                type="PayloadRejected", kind="permanent", message=f"what it gave cannot be sent: {error}"
            )
            self._link.send(Done(message.number, Raised(refused)))

    def _orphaned(self, why: str) -> None:
        """The parent is gone, or a handler has closed our connection: either way nobody hears us. What handlers have
        started ends, too."""
        os.killpg(0, signal.SIGKILL)


def _let_it_pass(number: int, frame: object) -> None:
    """A terminal, or a service manager, tells the whole tree. Our parent is told, too, and sees to us."""


def main() -> None:
    end_number, lifeline, parent = (int(word) for word in sys.argv[1:4])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Not SIG_IGN: programs that handlers start would inherit that.
        signal.signal(number, _let_it_pass)
    die_with(parent, lifeline)
    end = socket.socket(fileno=end_number)
    end.set_inheritable(False)
    os.set_inheritable(lifeline, False)
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
        child = Child(load(begin.target, Holdfast))
    except HoldfastError as error:
        end.sendall(encode([Broken(str(error), isinstance(error, OptionError))])[0])
        sys.exit(1)
    with asyncio.Runner() as runner:
        try:
            runner.run(child.serve(end))
        except BaseException:
            # A handler has broken the loop. To end it in good order would cancel its neighbours, and say that they
            # cancelled themselves: they have crashed.
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
