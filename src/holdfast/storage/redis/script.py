"""The Lua of this storage as a server gets it: a library under a name made from its content, the same as a script, or
the part that an enqueue needs, for the transaction of a caller.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

from holdfast.errors import HoldfastError, LayoutTooNew, StorageUnavailable
from holdfast.storage.redis.codec import ENQUEUED, PLACED

LAYOUT = 2
"""The layout of keys and records that this version reads and writes. It refuses all others."""
SHARED = "keyspace"
"""The file whose locals are visible in all others. Every other file is joined as a block."""
ENQUEUE_FILES = (SHARED, "clock", "record", "lifecycle", "metadata", "transaction", "fast", "enqueue", "calls")
"""The files that an enqueue needs."""
FILES = (*ENQUEUE_FILES[:-1], "leases", "verbs", "reads", "audit", "workers", "calls")
"""All files in the order in which they are joined: a file uses only the files before it."""
SOURCES: Mapping[str, str] = {
    name: resources.files("holdfast.storage.redis").joinpath("lua", f"{name}.lua").read_text() for name in FILES
}
"""The text of each file."""
CLOCK = "local time = call('TIME')\n  return time[1] * 1000000 + time[2]"
"""Where the library reads the server's clock, in clock.lua. It learns the time nowhere else."""
INJECTED_CLOCK = "return tonumber(table.remove(ARGS))"
"""The replacement of `CLOCK` for a storage that was opened with a clock, as tests do."""
FAST = "local FAST = true"
"""The switch of the optimised paths, in fast.lua."""
REGISTER = """
redis.register_function {function_name = NAME .. '_enqueue', callback = calls.run}
redis.register_function {function_name = NAME, callback = calls.run, flags = {'allow-oom'}}
"""
"""The end of the library. One body, two functions: a full server refuses to enqueue and runs everything else, because
otherwise it could not be drained."""
MULTI_TAIL = f"""
local queue = table.remove(ARGV, 1)
local _, packed = unpack(calls.run(KEYS, ARGV))
redis.call('SADD', KEYS[2], queue)
local placed, replies = {{[0] = false, {", ".join(f"'{placed}'" for placed in PLACED if placed)}}}, {{}}
for at = 1, #packed, {ENQUEUED.size} do
  local code, _, generation = struct.unpack('<BBI8', packed, at)
  replies[#replies + 1] = {{placed[code], generation}}
end
return replies"""
"""The end of an enqueue in a caller's MULTI. It lists the queue in the same step. Every client can read its reply, also
one that decodes everything as text."""

_COMMENT = re.compile(r"""('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|--\[\[.*?\]\]|--[^\n]*""", re.DOTALL)
"""Comments; strings are matched first, because they may contain what looks like a comment."""


class Library:
    """Two functions, one of which a full server refuses. Two releases can share a server: their names differ.

    `fast=False` switches the optimised paths off: for tests that compare both ways.
    """

    def __init__(self, sources: Mapping[str, str], injected_clock: bool, *, fast: bool = True) -> None:
        if injected_clock:
            sources = _replaced(sources, "clock", CLOCK, INJECTED_CLOCK)
        if not fast:
            sources = _replaced(sources, "fast", FAST, FAST.replace("true", "false"))
        self._sources = sources
        self._body = join(sources, FILES)
        self.name = f"holdfast_{hashlib.sha1(self._body.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.enqueue = f"{self.name}_enqueue"
        self.text = f"#!lua name={self.name}\n{self._body}local NAME = '{self.name}'{REGISTER}"

    def script(self, name: str) -> str:
        """One of the two functions as a script, for a server that refuses the library."""
        head = "#!lua" if name == self.enqueue else "#!lua flags=allow-oom"
        return f"{head}\n{self._body}return calls.run(KEYS, ARGV)"

    @property
    def enqueue_in_multi(self) -> str:
        """The files that an enqueue needs, as a script. Every call sends it whole: a client cannot ask inside MULTI
        whether the server knows it, and a call that fails there does not stop the others. So comments and indentation
        are left out."""
        return f"#!lua\n{_bare(join(self._sources, ENQUEUE_FILES))}{MULTI_TAIL}"


def join(sources: Mapping[str, str], names: Sequence[str]) -> str:
    """One text of these files. A file begins on a new line, so that a line of the text is a line of a file."""
    return "".join(sources[name] if name == SHARED else f"do {sources[name]}end\n" for name in names)


def layout_error(place: str, found: str) -> HoldfastError:
    """The error for data of another layout, which is neither read nor written."""
    if found.isdigit() and int(found) < LAYOUT:
        return StorageUnavailable(
            f"{place} has layout {found}, which this Holdfast no longer reads (it reads layout {LAYOUT}):"
            " finish the jobs with the release that wrote them, or use another namespace"
        )
    return LayoutTooNew(
        f"{place} has layout {found!r:.20}, this Holdfast reads layout {LAYOUT}:"
        " upgrade it here, or use another namespace"
    )


def _replaced(sources: Mapping[str, str], name: str, old: str, new: str) -> Mapping[str, str]:
    if sources[name].count(old) != 1:
        raise ValueError(f"{name}.lua contains {old!r} {sources[name].count(old)} times, not once")
    return {**sources, name: sources[name].replace(old, new)}


@cache
def _bare(text: str) -> str:
    """The text without comments and indentation."""
    lines = _COMMENT.sub(lambda found: found[1] or "", text).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())
