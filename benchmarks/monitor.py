"""What clients send to a server, as MONITOR shows it: without the commands that run inside of scripts, which the
server's own counts have as well."""

from __future__ import annotations

import re
import socket
from typing import Self

from tests.servers import HOST, Server

_SENT = re.compile(rb"\+[\d.]+ \[\d+ (?!lua\])\S+\] (.*)\r\n")


class Monitor:
    """Watches until the end of its `with`; what was sent is known then. It slows a busy server down."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.sent: list[str] = []
        """Commands with their arguments, each in quotes."""

    def __enter__(self) -> Self:
        self._socket = socket.create_connection((HOST, self._server.port), timeout=10)
        self._socket.sendall(b"MONITOR\r\n")
        self._socket.recv(len(b"+OK\r\n"), socket.MSG_WAITALL)
        return self

    def __exit__(self, *_: object) -> None:
        """An ECHO marks the end: all commands before it have been shown."""
        end = b"the end of %d" % self._socket.getsockname()[1]
        self._server.command("ECHO", end)
        with self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                if end in line:
                    return
                if found := _SENT.fullmatch(line):
                    self.sent.append(found[1].decode(errors="replace"))
