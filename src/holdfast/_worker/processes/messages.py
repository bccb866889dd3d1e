"""Messages between a worker and its child processes: msgpack frames over a socket pair. Nothing is pickled.

A frame is its length in four bytes and a list of messages. Whatever does not decode, or is too long, breaks the link: a
handler can write to any file descriptor of its process.
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
from holdfast._worker.telemetry import Logs, RunEvent

MAX_FRAME_BYTES = 1 << 26
"""64 MiB, or what one payload of the largest size needs: `frame_limit`."""
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
    """Run a job. `number` stands for this run from now on."""

    number: int
    queue: str
    job: Job
    id: bytes | None
    """The job's id, if it is not text: then the job has none. See `without_odd_id`."""


class Stop(Message, frozen=True):
    number: int
    why: StopReason


class Ping(Message, frozen=True):
    """Asks the child's event loop for a Pong."""


class Happened(Message, frozen=True):
    event: RunEvent
    id: bytes | None


class HookError(Message, frozen=True):
    error: str
    """The name of its class."""
    message: str
    where: str


class Leave(Message, frozen=True):
    """Close what you have opened, and exit."""


# From a child


class Hello(Message, frozen=True):
    """The app is loaded: this is what it runs, and where its jobs are."""

    configs: list[QueueConfig]
    url: str | None
    """None if the app was given an open storage instead of a URL."""
    namespace: str
    max_payload: int | None
    hooks: bool
    error_hooks: bool


class Broken(Message, frozen=True):
    message: str
    mistake: bool
    """It is the user's, not ours."""


class Finished(Message, frozen=True):
    number: int
    ended: Ended


class Refused(Message, frozen=True):
    """This child knows no such queue: its code is older, or newer."""

    number: int


class Progress(Message, frozen=True):
    number: int
    progress: bytes


class Pong(Message, frozen=True):
    memory: int
    """Bytes that the child has in memory."""


ToChild = Start | Stop | Ping | Happened | HookError | Leave
FromChild = Hello | Broken | Finished | Refused | Progress | Pong

M = TypeVar("M")
V = TypeVar("V", Job, RunEvent)

_encoder = msgspec.msgpack.Encoder()


def without_odd_id(value: V) -> tuple[V, bytes | None]:
    """An id may be any bytes, and msgpack carries only text as text: such an id travels beside its job."""
    if value.id.isascii():
        return value, None
    return replace(value, id=""), value.id.encode("utf-8", "surrogateescape")


def frame_limit(max_payload: int | None) -> int:
    """A record may have a payload, a next one and an earlier result."""
    return max(MAX_FRAME_BYTES, 4 * (max_payload or 0))


def encode(messages: list[Any], limit: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Frames that carry these messages, as few as there can be. One message that is too long for a frame is an
    OverflowError."""
    data = _encoder.encode(messages)
    if len(data) <= limit:
        return [_LENGTH.pack(len(data)) + data]
    if len(messages) == 1:
        raise OverflowError(f"{len(data)} bytes do not fit into a frame of {limit}")
    middle = len(messages) // 2
    return encode(messages[:middle], limit) + encode(messages[middle:], limit)


class ChannelOwner(Protocol[M]):
    """Gets what happens on one end of a channel."""

    def received(self, messages: list[M], /) -> None:
        """Messages have come, in order."""

    def channel_ended(self, why: str, *, misbehaved: bool) -> None:
        """The connection has ended, or the other end has `misbehaved`: it has sent bytes that are not a frame."""

    def unsendable(self, message: Any, error: Exception, /) -> None:
        """A message cannot be encoded, or is too long."""


class ChildChannel(asyncio.Protocol, Generic[M]):
    """One end of a socket pair, on an event loop. Messages that are sent within one turn of the loop travel
    together."""

    def __init__(self, reads: Any, owner: ChannelOwner[M]) -> None:
        """`reads` is the union of the messages that come from the other end."""
        self.limit = MAX_FRAME_BYTES
        self._owner = owner
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(list[reads])
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._out: list[Any] = []
        self.part_since: float | None = None
        """Since when nothing has come of the rest of a frame."""

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
        """Send what waits. Messages that travel with one that cannot be sent are not lost."""
        out, self._out = self._out, []
        if not out or self._transport is None or self._transport.is_closing():
            return
        try:
            frames = encode(out, self.limit)
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            if len(out) == 1:
                self._owner.unsendable(out[0], error)
            for message in out if len(out) > 1 else ():
                self._out.append(message)
                self.flush()
        else:
            for frame in frames:
                self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
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
                self._fail(f"it sent what is no frame ({error})")
                return
            at = end
            self._owner.received(messages)
        del self._buffer[:at]
        self.part_since = asyncio.get_running_loop().time() if self._buffer else None

    def connection_lost(self, exc: Exception | None) -> None:
        why = "it closed its connection" if exc is None else f"its connection broke ({exc})"
        self._owner.channel_ended(why, misbehaved=False)

    def _fail(self, why: str) -> None:
        self._buffer.clear()
        self.part_since = None
        self._owner.channel_ended(why, misbehaved=True)
        self.close()


def receive(end: socket.socket, reads: Any) -> Any:
    """The first message, before there is an event loop."""
    (size,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    (message,) = msgspec.msgpack.decode(_exactly(end, size), type=list[reads])
    return message


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
