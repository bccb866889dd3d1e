"""queue.lua as a server gets it: a library under a name made from its content, or the same as a script."""

from __future__ import annotations

import hashlib
from importlib import resources

LAYOUT = 1
"""The layout of keys and records that this version writes, and the newest that it reads."""
BODY = resources.files("holdfast.storage.redis").joinpath("queue.lua").read_text()
CLOCK = "local time = call('TIME')\n  return time[1] * 1000000 + time[2]"
"""Where the library reads the server's clock: the only place where it learns the time."""
INJECTED_CLOCK = "return tonumber(table.remove(ARGS))"
"""What stands there instead when a storage is opened with a clock of its own, as tests do."""
REGISTERS = "redis.register_function"
"""Where the library registers its functions: the end of it."""


class Library:
    """Two functions, one of which a full server refuses. Two releases can share a server: their names differ."""

    def __init__(self, body: str, injected_clock: bool) -> None:
        if injected_clock:
            assert CLOCK in body
            body = body.replace(CLOCK, INJECTED_CLOCK)
        self.name = f"holdfast_{hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.enqueue = f"{self.name}_enqueue"
        self._functions = f"local NAME = '{self.name}'\n{body}"
        self.text = f"#!lua name={self.name}\n{self._functions}"

    def script(self, name: str) -> str:
        """One of the two functions as a script, for a server that takes no library."""
        head = "#!lua" if name == self.enqueue else "#!lua flags=allow-oom"
        functions = self._functions.partition(REGISTERS)[0]
        return f"{head}\n{functions}return run(KEYS, ARGV)"
