"""The Lua files as a server gets them: a library whose name is made from its content, the same as a script, or the part
that an enqueue in a caller's transaction needs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

from holdfast.errors import HoldfastError, LayoutTooNew, StorageUnavailable
from holdfast.storage.redis.codec import ENQUEUED, PLACED

LAYOUT = 3
"""The layout of keys and records that this version reads and writes. It refuses all others."""
SHARED = "keyspace"
"""The file whose locals are visible in all others. Every other file is joined as a block."""
ENQUEUE_FILES = (
    SHARED,
    "clock",
    "record",
    "arguments",
    "lifecycle",
    "metadata",
    "transaction",
    "fast",
    "enqueue",
    "calls",
)
"""The files that an enqueue needs."""
FILES = (*ENQUEUE_FILES[:-1], "leases", "verbs", "reads", "audit", "workers", "calls")
"""All files in the order in which they are joined: a file uses only the files before it."""
SOURCES: Mapping[str, str] = {
    name: resources.files("holdfast.storage.redis").joinpath("lua", f"{name}.lua").read_text() for name in FILES
}
"""The text of each file."""
CLOCK = "local time = call('TIME')\n  return time[1] * 1000000 + time[2]"
"""The place in clock.lua where the library reads the clock of the server. It is the only one."""
INJECTED_CLOCK = "return tonumber(table.remove(ARGS))"
"""Replaces `CLOCK` in a storage that was opened with a clock, as tests do."""
FAST = "local FAST = true"
"""The switch of the optimised paths, in fast.lua."""
REGISTER = """
redis.register_function {function_name = NAME .. '_enqueue', callback = calls.run}
redis.register_function {function_name = NAME, callback = calls.run, flags = {'allow-oom'}}
"""
"""The end of the library: two functions with one body. A full server refuses the first and runs the second, because
otherwise workers could not drain it."""
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
"""The end of an enqueue in a caller's MULTI. It lists the queue in the same step. Every client can read the reply,
including one that decodes everything as text."""

_COMMENT = re.compile(r"""('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|--\[\[.*?\]\]|--[^\n]*""", re.DOTALL)
"""Matches strings and comments. A string may contain text that looks like a comment."""


class Library:
    """Two functions, one of which a full server refuses. Two releases can share a server: their names differ.

    `fast=False` turns the optimised paths off, for tests that compare both.
    """

    def __init__(self, sources: Mapping[str, str], injected_clock: bool, *, fast: bool = True) -> None:
        if injected_clock:
            sources = _replaced(sources, "clock", CLOCK, INJECTED_CLOCK)
        if not fast:
            sources = _replaced(sources, "fast", FAST, FAST.replace("true", "false"))
        self._sources = sources
        self._scripts: dict[str, str] = {}
        self._body = join(sources, FILES)
        self.name = f"holdfast_{hashlib.sha1(self._body.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.enqueue = f"{self.name}_enqueue"
        self.text = f"#!lua name={self.name}\n{self._body}local NAME = '{self.name}'{REGISTER}"

    def script(self, name: str) -> str:
        """Return one of the two functions as a script, for a server that refuses the library."""
        if name not in self._scripts:
            head = "#!lua" if name == self.enqueue else "#!lua flags=allow-oom"
            self._scripts[name] = f"{head}\n{self._body}return calls.run(KEYS, ARGV)"
        return self._scripts[name]

    @property
    def enqueue_in_multi(self) -> str:
        """The files that an enqueue needs, as a script without comments and indentation. Every call sends all of it:
        inside MULTI a client cannot check whether the server has the script, and a failed call does not stop the
        others."""
        return f"#!lua\n{_bare(join(self._sources, ENQUEUE_FILES))}{MULTI_TAIL}"


def join(sources: Mapping[str, str], names: Sequence[str]) -> str:
    """Join files to one text. Each file begins on a new line, so that a line of the text is a line of a file."""
    return "".join(sources[name] if name == SHARED else f"do {sources[name]}end\n" for name in names)


def layout_error(place: str, found: str) -> HoldfastError:
    """Return the error for data of another layout, which is neither read nor written."""
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
def hash_of(script: str) -> str:
    """Return the name by which a server knows a script that it has run."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


@cache
def _bare(text: str) -> str:
    """Return the text without comments and indentation."""
    lines = _COMMENT.sub(lambda found: found[1] or "", text).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())
