"""Messages between a worker and its child processes: msgpack frames over a socket pair. Nothing is pickled.

A frame is its length in four bytes and a list of messages. Bytes that do not decode, or a frame that is too long, end
the channel: a handler can write to any file descriptor of its process.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from holdfast._core.jobs import Job
from holdfast._core.retry_policy import Ended, QueueConfig, StopReason
from holdfast._worker.logs import Logs
from holdfast._worker.telemetry import RunEvent

READ_BYTES = 65_536
"""Size of the read buffer of a channel."""
MAX_FRAME_BYTES = 1 << 26
"""Largest frame, 64 MiB, unless the storage allows payloads that need more: see `frame_limit`."""
_LENGTH = struct.Struct("!I")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# To a child


class Begin(Message, frozen=True):
    """The first message: which app to load. The child imports none of the user's code before it."""

    version: str
    worker: str
    target: str
    path: list[str]
    """Where modules are found: `sys.path`."""
    logs: Logs | None


class Start(Message, frozen=True):
    """Run a job. `number` identifies this run in later messages."""

    number: int
    queue: str
    job: Job
    id: bytes | None
    """The job's id, if it is not text; the id of `job` is empty then. See `without_odd_id`."""


class Stop(Message, frozen=True):
    number: int
    why: StopReason


class ShowStack(Message, frozen=True):
    number: int


class Ping(Message, frozen=True):
    """Asks the child's event loop for a Pong."""


class Happened(Message, frozen=True):
    event: RunEvent
    id: bytes | None


class HookError(Message, frozen=True):
    error: str
    """Name of the error's class."""
    message: str
    where: str


class Leave(Message, frozen=True):
    """Close the app, and exit."""


# From a child


class Hello(Message, frozen=True):
    """The app is loaded: the queues that it runs, and the storage of its jobs."""

    configs: list[QueueConfig]
    url: str | None
    """URL of the storage; None if the app was given an open storage instead."""
    on_default: bool
    """Nothing chose the URL."""
    namespace: str
    max_payload: int | None
    hooks: bool
    error_hooks: bool
    source: str
    """Where the app is from: see `Application`."""
    folders: list[str]
    """Folders of the source files of the app: see `source_folders`."""


class Broken(Message, frozen=True):
    message: str
    mistake: bool
    """The user's code or options are wrong, not Holdfast."""


class Finished(Message, frozen=True):
    number: int
    ended: Ended


class Refused(Message, frozen=True):
    """The child has no such queue: its code is older or newer than the worker's."""

    number: int


class Stack(Message, frozen=True):
    """The stack of a run: its time is over, or the worker asked with `ShowStack`."""

    number: int
    stack: str


class Waits(Message, frozen=True):
    """A run begins or ends to wait for jobs of a queue."""

    number: int
    queue: str
    begins: bool


class ExtendTimeout(Message, frozen=True):
    """A run asks for this much time from now on."""

    number: int
    limit_ms: int


class Progress(Message, frozen=True):
    number: int
    progress: bytes


class Pong(Message, frozen=True):
    memory: int
    """Bytes that the child has in memory."""


ToChild = Start | Stop | ShowStack | Ping | Happened | HookError | Leave
FromChild = Hello | Broken | Finished | Refused | Stack | Waits | ExtendTimeout | Progress | Pong

M = TypeVar("M")
V = TypeVar("V", Job, RunEvent)

_encoder = msgspec.msgpack.Encoder()


def without_odd_id(value: V) -> tuple[V, bytes | None]:
    """Take an id that is not text out of a job or event, as bytes: msgpack cannot carry it as text."""
    if value.id.isascii():
        return value, None
    return replace(value, id=""), value.id.encode("utf-8", "surrogateescape")


def frame_limit(max_payload: int | None) -> int:
    """Largest frame for this payload limit: a record may have a payload, a next payload and an earlier result."""
    return max(MAX_FRAME_BYTES, 4 * (max_payload or 0))


def encode(messages: list[Any], limit: int = MAX_FRAME_BYTES) -> bytes:
    """Encode messages as one frame. Raises OverflowError if it is longer than `limit`."""
    data = _encoder.encode(messages)
    if len(data) > limit:
        raise OverflowError(f"{len(data)} bytes do not fit into a frame of {limit}")
    return _LENGTH.pack(len(data)) + data


class ChannelOwner(Protocol[M]):
    """The object that a channel reports to."""

    def received(self, messages: list[M], /) -> None:
        """Messages have come, in order."""

    def channel_ended(self, misbehaved: str = "", /) -> None:
        """The connection has ended, or the other end has `misbehaved`: it has sent bytes that are not a frame."""

    def unsendable(self, message: Any, error: Exception, /) -> None:
        """A message cannot be encoded, or is too long."""


class ChildChannel(asyncio.BufferedProtocol, Generic[M]):
    """One end of a socket pair, on an event loop. Messages sent within one turn of the loop share a frame.

    All reads use one buffer: without it, asyncio allocates 256 KiB per read, which costs up to 20 µs a frame.
    """

    def __init__(self, reads: Any, owner: ChannelOwner[M]) -> None:
        """`reads` is the union of the messages that come from the other end."""
        self.limit = MAX_FRAME_BYTES
        self._owner = owner
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(list[reads])
        self._transport: asyncio.Transport | None = None
        self._view = memoryview(bytearray(READ_BYTES))
        self._buffer = bytearray()
        """Bytes that were read, from the beginning of a frame."""
        self._out: list[Any] = []
        self.part_since: float | None = None
        """When the last bytes of an incomplete frame came."""

    async def connect(self, end: socket.socket) -> None:
        end.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by its class.

    def send(self, message: Any) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self.flush)
        self._out.append(message)

    def flush(self) -> None:
        """Send the waiting messages now."""
        out, self._out = self._out, []
        if out and self._transport is not None and not self._transport.is_closing():
            self._write(self._transport, out)

    def _write(self, transport: asyncio.Transport, messages: list[Any]) -> None:
        """Write messages as one frame, or in halves if that is not possible: one bad message must not cost others."""
        try:
            transport.write(encode(messages, self.limit))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            if len(messages) == 1:
                self._owner.unsendable(messages[0], error)
                return
            middle = len(messages) // 2
            self._write(transport, messages[:middle])
            self._write(transport, messages[middle:])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        self._buffer += self._view[:nbytes]
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > self.limit:
                self._fail(f"it announced a frame of {size} bytes")
                return
            end = at + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                messages = self._decoder.decode(self._buffer[at + _LENGTH.size : end])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._fail(f"it sent bytes that are not a frame ({error})")
                return
            at = end
            self._owner.received(messages)
        del self._buffer[:at]
        self.part_since = asyncio.get_running_loop().time() if self._buffer else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.channel_ended()

    def _fail(self, why: str) -> None:
        self._buffer.clear()
        self.part_since = None
        self._owner.channel_ended(why)
        self.close()


def receive(end: socket.socket, reads: Any) -> Any:
    """Receive the first message, before there is an event loop. Its sender must wait for a reply: bytes after it may be
    lost. Raises EOFError if the sender is gone."""
    try:
        with end.makefile("rb") as file:
            (size,) = _LENGTH.unpack(file.read(_LENGTH.size))
            (message,) = msgspec.msgpack.decode(file.read(size), type=list[reads])
    except (struct.error, msgspec.DecodeError) as error:
        raise EOFError from error
    return message
