"""queue.lua as a server gets it: a library under a name made from its content, or the same as a script, or only what
an enqueue needs of it, for transactions that are not ours.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources

from holdfast.storage.redis.codec import ENQUEUED, PLACED

LAYOUT = 1
"""The layout of keys and records that this version writes, and the newest that it reads."""
BODY = resources.files("holdfast.storage.redis").joinpath("queue.lua").read_text()
CLOCK = "local time = call('TIME')\n  return time[1] * 1000000 + time[2]"
"""Where the library reads the server's clock: the only place where it learns the time."""
INJECTED_CLOCK = "return tonumber(table.remove(ARGS))"
"""What stands there instead when a storage is opened with a clock of its own, as tests do."""
REGISTERS = "redis.register_function"
"""Where the library registers its functions: the end of it."""
ALONE = f"""
local queue = table.remove(ARGV, 1)
local _, packed = unpack(run(KEYS, ARGV))
redis.call('SADD', KEYS[2], queue)
local placed, replies = {{[0] = false, {", ".join(f"'{placed}'" for placed in PLACED if placed)}}}, {{}}
for at = 1, #packed, {ENQUEUED.size} do
  local code, _, generation = struct.unpack('<BBI8', packed, at)
  replies[#replies + 1] = {{placed[code], generation}}
end
return replies"""
"""How an enqueue ends that stands alone. It lists the queue in the same step, and its reply is for anybody's client to
read: also for one that takes everything for text."""

_COMMENT = re.compile(r"""('(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|--\[\[.*?\]\]|--[^\n]*""", re.DOTALL)
"""Comments; strings are matched first, because they may hold what looks like one."""
_DEFINED = re.compile(r"(?:local function|function|local) ([\w.]+(?:, \w+)*)")
"""What a part at the top level begins with: the names that it defines."""


class Library:
    """Two functions, one of which a full server refuses. Two releases can share a server: their names differ."""

    def __init__(self, body: str, injected_clock: bool) -> None:
        if injected_clock:
            assert CLOCK in body
            body = body.replace(CLOCK, INJECTED_CLOCK)
        self.name = f"holdfast_{hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()[:16]}"
        self.enqueue = f"{self.name}_enqueue"
        self._body = body
        self._functions = f"local NAME = '{self.name}'\n{body}"
        self.text = f"#!lua name={self.name}\n{self._functions}"

    def script(self, name: str) -> str:
        """One of the two functions as a script, for a server that takes no library."""
        head = "#!lua" if name == self.enqueue else "#!lua flags=allow-oom"
        functions = self._functions.partition(REGISTERS)[0]
        return f"{head}\n{functions}return run(KEYS, ARGV)"

    @property
    def enqueue_alone(self) -> str:
        """All that an enqueue needs, as a script. It is sent whole with every call: inside MULTI nobody can ask whether
        the server knows it, and a call that fails there leaves the rest to happen. So it is made small."""
        return f"#!lua\n{_needed(self._body)}{ALONE}"


@cache
def _needed(body: str) -> str:
    """The parts of the source that `enqueue` needs, without comments and indentation. A part is needed if a needed one
    has its name in it, in whatever sense: that keeps a little too much, and never too little."""
    bare = _COMMENT.sub(lambda found: found[1] or "", body.partition(REGISTERS)[0])
    lines = [line for line in bare.splitlines() if line.strip()]
    parts = re.split(r"\n(?=local |function )", "\n".join(lines))
    owners = {name: at for at, part in enumerate(parts) for name in _names(part)}
    needed: set[int] = set()
    wanted = {"run", "VERBS.enqueue"}
    while wanted:
        at = owners.get(wanted.pop())
        if at is not None and at not in needed:
            needed.add(at)
            wanted |= {*re.findall(r"\w+", parts[at]), *re.findall(r"(?=\b(\w+\.\w+))", parts[at])}
    return "\n".join(line.strip() for at in sorted(needed) for line in parts[at].splitlines())


def _names(part: str) -> list[str]:
    found = _DEFINED.match(part)
    assert found is not None, part
    return found[1].split(", ")
