"""Hints between the processes of one SQLite file: each process that listens has a datagram socket beside the file.

The process that commits sends the events to the sockets registered for them. A datagram may be lost (a full buffer, a
killed process): it is a hint. A process that cannot open a socket gets no hints, and polls once a second.

A user who may write to the file can register any address: only a listener's name in the right folder is used.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
import secrets
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import msgspec

from holdfast._core.events import Event, EventKind
from holdfast.storage.validation import clean_id, id_bytes

MAX_ADDRESS_BYTES = 100
"""The longest path of a Unix socket that all known systems allow."""
EVENTS_PER_DATAGRAM = 100
END_S = 1.0
"""How long to wait for the end of the receiver's thread. On Linux it ends at once."""

_NAME = re.compile(r"-notify-[0-9a-f]{8}\Z")
"""How the names of sockets end."""

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
        _receivers.add(self)

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
            try:
                data = self._socket.recv(262_144)
            except OSError:
                return
            if self._closing:
                return
            try:
                namespace, events = _decode(data)
                self._on_events(namespace, [Event(k, queue, clean_id(id), g, at) for k, queue, id, g, at in events])
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # Sent by a newer release, or not by Holdfast. It was only a hint.

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):  # Its file may be gone already.
            self._socket.shutdown(socket.SHUT_RD)
        self._thread.join(END_S)
        self.close_in_fork()
        _remove_socket(self.address)

    def close_in_fork(self) -> None:
        """Close the file of the socket and no more. As long as a fork has it, the parent seems to live."""
        _receivers.discard(self)
        self._socket.close()


_receivers: WeakSet[NotifyReceiver] = WeakSet()


def _close_in_fork() -> None:
    for receiver in list(_receivers):
        receiver.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)


class NotifySender:
    """The socket through which a process sends hints to the listeners of a file."""

    def __init__(self, beside: Path) -> None:
        self._folder = str(beside.parent)
        self._socket: socket.socket | None = None

    def send(self, address: str, namespace: str, events: Sequence[Event]) -> bool:
        """Send hints without waiting. Return False if no process has that address any more."""
        if not _is_of_listener(address, self._folder):
            return True
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        packed = [(e.kind, e.queue, id_bytes(e.id), e.generation, e.run_at) for e in events]
        parts = [packed[start : start + EVENTS_PER_DATAGRAM] for start in range(0, len(packed), EVENTS_PER_DATAGRAM)]
        while parts:
            part = parts.pop(0)
            try:
                self._socket.sendto(_encode((namespace, part)), address)
            except (ConnectionRefusedError, FileNotFoundError):
                _remove_socket(address)  # A killed process leaves its socket behind.
                return False
            except OSError as error:
                if error.errno != errno.EMSGSIZE or len(part) == 1:
                    break  # The buffer of the listener is full: these hints are lost.
                parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]  # On macOS a datagram has at most 2 KiB.
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
                _remove_socket(str(left))
            except OSError:
                continue  # Already removed, or the socket of another user.


@functools.lru_cache(maxsize=1024)
def _is_of_listener(address: str, folder: str) -> bool:
    """Return whether a listener of a file in this folder may have this address."""
    place, name = os.path.split(address)
    places = (folder, tempfile.gettempdir())
    return bool(_NAME.search(name)) and os.path.realpath(place) in map(os.path.realpath, places)


def _remove_socket(address: str) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):
            os.unlink(address)
