"""Hints between the processes of one SQLite file: each process that listens has a datagram socket beside the file.

The process that commits sends the events to the sockets registered for them. A datagram may be lost (a full buffer, a
killed process): it is a hint. A process that cannot open a socket gets no hints, and polls once a second.
"""

from __future__ import annotations

import glob
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast._core.events import Event, EventKind
from holdfast.storage.validation import clean_id, id_bytes

MAX_ADDRESS_BYTES = 100
"""The longest path of a Unix socket that all known systems allow."""
EVENTS_PER_DATAGRAM = 100

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, list[tuple[EventKind, str, bytes, int, int]]]).decode


class NotifyReceiver:
    """The socket of this process, and the thread that reads it."""

    def __init__(self, beside: Path, on_events: Callable[[str, Sequence[Event]], None]) -> None:
        _clear_away(beside)
        self._on_events = on_events
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = self._bind(beside)
        os.chmod(self.address, 0o600)
        self._thread = threading.Thread(target=self._listen, name="holdfast-notify", daemon=True)
        self._thread.start()

    def _bind(self, beside: Path) -> str:
        """Bind the socket beside the file, or in the temporary folder if that path is too long or refused."""
        name = f"{beside.name}-notify-{secrets.token_hex(4)}"
        near, elsewhere = beside.with_name(name), Path(tempfile.gettempdir()) / name[-40:]
        if len(os.fsencode(near)) <= MAX_ADDRESS_BYTES:
            with suppress(OSError):
                self._socket.bind(str(near))
                return str(near)
        self._socket.bind(str(elsewhere))
        return str(elsewhere)

    def _listen(self) -> None:
        while True:
            data = self._socket.recv(262_144)
            if self._closing:
                return
            try:
                namespace, events = _decode(data)
                self._on_events(namespace, [Event(k, queue, clean_id(id), g, at) for k, queue, id, g, at in events])
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # Sent by a newer release, or not by Holdfast. It was only a hint.

    def close(self) -> None:
        self._closing = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.address)
        self._thread.join()
        self._socket.close()
        Path(self.address).unlink(missing_ok=True)


class NotifySender:
    """The socket through which a process sends hints."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def send(self, address: str, namespace: str, events: Sequence[Event]) -> bool:
        """Send hints without waiting. Return False if no process has that address any more."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        packed = [(e.kind, e.queue, id_bytes(e.id), e.generation, e.run_at) for e in events]
        for start in range(0, len(packed), EVENTS_PER_DATAGRAM):
            try:
                self._socket.sendto(_encode((namespace, packed[start : start + EVENTS_PER_DATAGRAM])), address)
            except (ConnectionRefusedError, FileNotFoundError):
                Path(address).unlink(missing_ok=True)  # A killed process leaves its socket behind.
                return False
            except OSError:
                break  # The buffer of the listener is full: these hints are lost.
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _clear_away(beside: Path) -> None:
    """Remove the sockets of processes that were killed before they had registered their address."""
    for left in beside.parent.glob(f"{glob.escape(beside.name)}-notify-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(str(left))
            except ConnectionRefusedError:
                left.unlink(missing_ok=True)
            except OSError:
                continue  # Already removed, or the socket of another user.
