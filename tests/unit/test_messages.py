"""What goes over a link arrives once and in order, however it is cut into pieces; what is no frame ends it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._core.retry_policy import Raised, Returned
from holdfast._worker.processes.messages import (
    MAX_FRAME_BYTES,
    Begin,
    ChildChannel,
    Finished,
    FromChild,
    Leave,
    Pong,
    Progress,
    encode,
    frame_limit,
    receive,
)
from holdfast.errors import JobError
from tests.app.conftest import until

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.

UNSENDABLE = Finished(7, Raised(JobError(type="E", message="m", details=2**70)))


class Receiver:
    """A link, and what it has told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.broken: list[str] = []
        self.lost: list[str] = []
        self.unsent: list[tuple[Any, Exception]] = []
        self.instead: Any = None
        """Sent in place of a message that cannot be sent."""
        self.link: ChildChannel[FromChild] = ChildChannel(FromChild, self)

    def received(self, messages: list[FromChild]) -> None:
        self.heard.extend(messages)

    def channel_ended(self, misbehaved: str = "") -> None:
        (self.broken if misbehaved else self.lost).append(misbehaved)

    def unsendable(self, message: Any, error: Exception) -> None:
        self.unsent.append((message, error))
        if self.instead is not None:
            self.link.send(self.instead)


def read(link: ChildChannel[FromChild], data: bytes) -> None:
    """Have a link read some bytes, as an event loop does it. They fit into the buffer."""
    link.get_buffer(-1)[: len(data)] = data
    link.buffer_updated(len(data))


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Receiver, socket.socket]]:
    """A link, and a bare socket at its other end."""
    receiver = Receiver()
    here, there = socket.socketpair()
    await receiver.link.connect(here)
    yield receiver, there
    receiver.link.close()
    there.close()
    await asyncio.sleep(0)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Receiver, Receiver]]:
    """Two links that are connected."""
    one, other = Receiver(), Receiver()
    for receiver, end in zip((one, other), socket.socketpair(), strict=True):
        await receiver.link.connect(end)
    yield one, other
    one.link.close()
    other.link.close()
    await asyncio.sleep(0)


def frame(*messages: Any) -> bytes:
    return encode(list(messages))


async def test_a_frame_may_come_byte_by_byte(ends: tuple[Receiver, socket.socket]) -> None:
    receiver, there = ends
    data = frame(Pong(1), Progress(2, b"half"))
    for at in range(len(data)):
        assert receiver.heard == []
        there.sendall(data[at : at + 1])
        await asyncio.sleep(0.001)
    await until(lambda: receiver.heard == [Pong(1), Progress(2, b"half")])
    assert receiver.broken == []


async def test_frames_may_be_split_anywhere(ends: tuple[Receiver, socket.socket]) -> None:
    receiver, there = ends
    data = frame(Pong(1)) + frame(Pong(2), Pong(3)) + frame(Pong(4))
    for at in range(1, len(data)):
        receiver.heard.clear()
        there.sendall(data[:at])
        await until(lambda: bool(receiver.heard) or receiver.link.part_since is not None)
        there.sendall(data[at:])
        await until(lambda: len(receiver.heard) == 4)
        assert receiver.heard == [Pong(1), Pong(2), Pong(3), Pong(4)]
        assert receiver.link.part_since is None
    assert receiver.broken == []


async def test_link_records_when_a_partial_frame_began(ends: tuple[Receiver, socket.socket]) -> None:
    receiver, there = ends
    assert receiver.link.part_since is None
    began = asyncio.get_running_loop().time()
    there.sendall(frame(Pong(1))[:3])
    await until(lambda: receiver.link.part_since is not None)
    first = receiver.link.part_since
    assert first is not None
    assert first >= began
    there.sendall(frame(Pong(1))[3:5])
    await asyncio.sleep(0.05)
    assert receiver.link.part_since > first  # It is the last byte that counts: a large frame may take its time.
    there.sendall(frame(Pong(1))[5:] + frame(Pong(2))[:3])
    await until(lambda: receiver.heard == [Pong(1)])
    assert receiver.link.part_since > first  # This is the half of another one.


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("!I", MAX_FRAME_BYTES + 1), f"it announced a frame of {MAX_FRAME_BYTES + 1} bytes"),
        (b"\xff" * 100, "it announced a frame of 4294967295 bytes"),
        (struct.pack("!I", 0), "it sent bytes that are not a frame"),
        (struct.pack("!I", 5) + b"hello", "it sent bytes that are not a frame"),
        (struct.pack("!I", 1) + b"\xc1", "it sent bytes that are not a frame"),
        (struct.pack("!I", 200_000) + b"\x91" * 200_000, "it sent bytes that are not a frame"),
        (frame(Begin("1", "w", "t", [], None)), "it sent bytes that are not a frame"),
        (frame(Leave()), "it sent bytes that are not a frame"),
        (frame(["Pong", "many"]), "it sent bytes that are not a frame"),
        (frame(["Done", 1, {"type": "none of ours"}]), "it sent bytes that are not a frame"),
        (frame(["Progress", 1, "\ud800".encode("utf-8", "surrogatepass")]) + b"\x00\x00\x00\x00", "not a frame"),
    ],
    ids=["too long", "ones", "empty", "text", "reserved", "deep", "begin", "leave", "type", "union", "then empty"],
)
async def test_invalid_frame_ends_the_link(ends: tuple[Receiver, socket.socket], data: bytes, says: str) -> None:
    receiver, there = ends
    there.sendall(data)
    await until(lambda: bool(receiver.broken))
    assert says in receiver.broken[0]
    there.settimeout(5)
    assert there.recv(1) == b""


async def test_messages_before_garbage_arrive_and_later_ones_do_not(
    ends: tuple[Receiver, socket.socket],
) -> None:
    receiver, there = ends
    there.sendall(frame(Pong(1)) + struct.pack("!I", 1) + b"\xc1" + frame(Pong(2)))
    await until(lambda: bool(receiver.broken))
    await asyncio.sleep(0.02)
    assert receiver.heard == [Pong(1)]


@pytest.mark.parametrize("sent", [0, 2, 6])
async def test_partial_frame_at_the_end_ends_the_link(ends: tuple[Receiver, socket.socket], sent: int) -> None:
    receiver, there = ends
    there.sendall(frame(Pong(1))[:sent])
    there.close()
    await until(lambda: bool(receiver.lost))
    assert (receiver.lost, receiver.broken, receiver.heard) == ([""], [], [])


async def test_messages_of_one_loop_iteration_share_one_frame(ends: tuple[Receiver, socket.socket]) -> None:
    receiver, there = ends
    for number in range(100):
        receiver.link.send(Pong(number))
    await asyncio.sleep(0)
    (size,) = struct.unpack("!I", there.recv(4))
    assert msgspec.msgpack.decode(there.recv(size), type=list[FromChild]) == [Pong(number) for number in range(100)]


async def test_unsendable_message_is_reported_and_the_others_arrive_in_order(pair: tuple[Receiver, Receiver]) -> None:
    one, other = pair
    for message in (Pong(1), UNSENDABLE, Pong(2), UNSENDABLE, Pong(3)):
        one.link.send(message)
    await until(lambda: len(other.heard) == 3)
    assert other.heard == [Pong(1), Pong(2), Pong(3)]
    assert [message for message, _ in one.unsent] == [UNSENDABLE, UNSENDABLE]
    assert one.broken == other.broken == []


async def test_replacement_of_an_unsendable_message_arrives(pair: tuple[Receiver, Receiver]) -> None:
    one, other = pair
    link: ChildChannel[FromChild] = one.link
    one.instead = Progress(7, b"instead")
    for message in (UNSENDABLE, Pong(2)):
        link.send(message)
    await until(lambda: len(other.heard) == 2)
    link.send(UNSENDABLE)
    await until(lambda: len(other.heard) == 3)
    assert other.heard == [Pong(2), Progress(7, b"instead"), Progress(7, b"instead")]


async def test_messages_too_large_for_one_frame_use_several(pair: tuple[Receiver, Receiver]) -> None:
    one, other = pair
    one.link.limit = other.link.limit = 1_000
    said = [Progress(number, bytes(number * 10)) for number in range(90)]
    for message in said:
        one.link.send(message)
    await until(lambda: len(other.heard) == len(said))
    assert other.heard == said
    assert other.broken == []


async def test_too_long_message_does_not_affect_others(pair: tuple[Receiver, Receiver]) -> None:
    one, other = pair
    one.link.limit = other.link.limit = 1_000
    said = [Pong(1), Progress(2, bytes(2_000)), Pong(3)]
    for message in said:
        one.link.send(message)
    await until(lambda: len(other.heard) == 2)
    assert other.heard == [Pong(1), Pong(3)]
    ((message, error),) = one.unsent
    assert message == said[1]
    assert isinstance(error, OverflowError)


async def test_megabytes_arrive_whole(pair: tuple[Receiver, Receiver]) -> None:
    one, other = pair
    said = [Finished(number, Returned(bytes([number]) * 3_000_000)) for number in range(5)]
    for message in said:
        one.link.send(message)
    await until(lambda: len(other.heard) == 5)
    assert other.heard == said


async def test_message_to_an_ended_link_is_dropped_silently(ends: tuple[Receiver, socket.socket]) -> None:
    receiver, there = ends
    there.close()
    await until(lambda: bool(receiver.lost))
    receiver.link.send(Pong(1))
    await asyncio.sleep(0.01)
    assert receiver.unsent == []


def test_frame_that_is_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(OverflowError, match="do not fit into a frame of 1000"):
        encode([Pong(1), Progress(1, bytes(1_000))], 1_000)


@pytest.mark.parametrize(("max_payload", "limit"), [(None, 1 << 26), (1 << 20, 1 << 26), (1 << 28, 1 << 30)])
def test_a_frame_holds_the_largest_record(max_payload: int | None, limit: int) -> None:
    assert frame_limit(max_payload) == limit


@patient
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_random_bytes_only_end_the_link(pieces: list[bytes]) -> None:
    async def feed() -> None:
        receiver = Receiver()
        for piece in pieces:
            if not receiver.broken:
                read(receiver.link, piece)

    asyncio.run(feed())


@patient
@given(st.data())
def test_messages_arrive_for_any_split_of_their_bytes(data: st.DataObject) -> None:
    said = data.draw(st.lists(st.builds(Progress, st.integers(0, 9), st.binary(max_size=30)), max_size=10))
    stream = b"".join(frame(message) for message in said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))

    async def feed() -> None:
        receiver = Receiver()
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            read(receiver.link, stream[start:end])
        assert (receiver.heard, receiver.broken, receiver.link.part_since) == (said, [], None)

    asyncio.run(feed())


# The first message, before there is a loop


def blocking(send: Callable[[socket.socket], None]) -> Any:
    """What is received from a sender on another thread."""
    here, there = socket.socketpair()
    here.settimeout(10)
    with here, there:
        sender = threading.Thread(target=send, args=(there,))
        sender.start()
        try:
            return receive(here, Begin)
        finally:
            sender.join()


def test_the_first_message_is_received_without_a_loop() -> None:
    begin = Begin("1", "w", "tasks:app", ["/x" * 100] * 5_000, None)
    assert blocking(lambda end: end.sendall(frame(begin))) == begin


@pytest.mark.parametrize("sent", [0, 2, 9])
def test_truncated_first_message_ends_the_link(sent: int) -> None:
    def send(end: socket.socket) -> None:
        end.sendall(frame(Begin("1", "w", "tasks:app", [], None))[:sent])
        end.close()

    with pytest.raises(EOFError):
        blocking(send)


def test_link_works_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    receiver = Receiver()
    here, there = socket.socketpair()

    async def talk() -> None:
        await receiver.link.connect(here)
        there.sendall(encode([Pong(1)]))
        await until(lambda: receiver.heard == [Pong(1)])
        receiver.link.send(Leave())
        await asyncio.sleep(0.01)
        receiver.link.close()

    with there, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())
        there.settimeout(2)
        assert receive(there, Leave) == Leave()
