"""Line coverage of the Lua files: lists the statements that no test executes.

    python tools/lua_cover.py [PYTEST ARGUMENT...]

Lua inside a server has no debug hooks, so the tests run on a counting build: every statement in a function begins with
a call that sets one bit of a key on the server. Statements at the top level have no such call: they run when the script
is loaded. This file is the tool and, with `-p tools.lua_cover`, the pytest plugin that makes the build and writes the
bits to the file that HOLDFAST_LUA_COVER names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
TESTS = ("tests/storage", "tests/redis", "-k", "not agreement")
KEY = "holdfast-lua-cover"
COUNTER = (
    "local C do local seen = {} C = function(n) if not seen[n] then seen[n] = true "
    f"redis.pcall('SETBIT', '{KEY}', n, 1) end end end "
)
"""On one line, so that line numbers in errors stay right. A cluster node may refuse the key and a full server the bit:
then the statement counts as not executed there."""

TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<comment>--\[\[.*?\]\]|--[^\n]*)
      | (?P<string>'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|\[\[.*?\]\])
      | (?P<number>\d[\w.]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<sign>\.\.\.|\.\.|[=~<>]=|.)""",
    re.VERBOSE | re.DOTALL,
)
OPENS = {"function", "if", "do", "repeat"}
BEGINS = {"local", "if", "for", "while", "repeat", "return", "break", "do", "function"}
"""Keywords that begin a statement; so does a name."""
KEYWORDS = BEGINS | {"and", "or", "not", "then", "else", "elseif", "end", "until", "in", "nil", "true", "false"}
ENDS = {"end", "nil", "true", "false", ")", "]", "}", "...", "break"}
"""Keywords and signs after which a name begins a new statement."""
BREAKS = {"then", "else", "do", "repeat"}
"""Keywords that begin a block, and so a statement."""


class Token(NamedTuple):
    kind: str
    text: str
    at: int


class Point(NamedTuple):
    """The start of a statement."""

    at: int
    line: int
    leads: bool
    """Whether it is the first statement of its line."""


def tokens(source: str) -> Iterator[Token]:
    for match in TOKEN.finditer(source):
        kind = str(match.lastgroup)
        if kind not in ("space", "comment"):
            yield Token(kind, match.group(), match.start())


def points(source: str) -> list[Point]:
    """Every statement inside a function."""
    found: list[Point] = []
    stack: list[str] = []
    last: Token | None = None
    ends_parameters = False
    """The next `)` closes a list of parameters, and a body begins."""
    last_line = 0
    for token in tokens(source):
        line = source.count("\n", 0, token.at) + 1
        word = token.text if token.kind in ("name", "sign") else ""
        in_block = not stack or stack[-1] not in ("(", "[", "{")
        starts_block = last is not None and (last.text in BREAKS or last.text == ")body")
        after_statement = last is not None and (
            last.kind in ("string", "number")
            or last.text in ENDS
            or (last.kind == "name" and last.text not in KEYWORDS)
        )
        # After a statement, or where a block begins, a name or a keyword that can begin a statement does.
        begins = token.kind == "name" and (word in BEGINS or word not in KEYWORDS) and (starts_block or after_statement)
        if begins and in_block and "function" in stack and stack[-1] != "loop":
            found.append(Point(token.at, line, line != last_line))
        last_line = line
        last = token
        if word in ("for", "while"):
            stack.append("loop")
        elif word == "do" and stack and stack[-1] == "loop":
            stack[-1] = "do"
        elif word in OPENS or word in ("(", "[", "{"):
            stack.append(word)
            ends_parameters = ends_parameters or word == "function"
        elif word in (")", "]", "}", "end", "until"):
            stack.pop()
            if word == ")" and ends_parameters:
                ends_parameters = False
                last = Token("sign", ")body", token.at)
    assert stack == [], stack
    return found


class Statement(NamedTuple):
    """A statement of a file."""

    file: str
    point: Point


def statements(sources: Mapping[str, str], untouched: Mapping[str, str]) -> list[Statement]:
    """Every statement of every file, in the order of their numbers. The text `untouched` of a file is left out, because
    script.py replaces it."""
    found: list[Statement] = []
    for file, source in sources.items():
        start, end = -1, -1
        if file in untouched:
            start = source.index(untouched[file])
            end = start + len(untouched[file])
        found += [Statement(file, point) for point in points(source) if not start <= point.at < end]
    return found


def counting(sources: Mapping[str, str], untouched: Mapping[str, str]) -> dict[str, str]:
    """The counting build."""
    texts = dict(sources)
    for number, (file, point) in reversed(list(enumerate(statements(sources, untouched)))):
        text = texts[file]
        texts[file] = f"{text[: point.at]}C({number}) {text[point.at :]}"
    first = next(iter(texts))
    texts[first] = COUNTER + texts[first]
    return texts


# The plugin


def pytest_configure(config: Any) -> None:
    """Every storage of this test run gets the counting build."""
    from holdfast.storage.redis import calls, script
    from tests import servers

    into = Path(os.environ["HOLDFAST_LUA_COVER"])
    counted = counting(script.SOURCES, {"clock": script.CLOCK, "fast": script.FAST})
    calls.SOURCES = counted  # type: ignore[attr-defined]
    stop = servers.Server.kill

    def gather_and_kill(self: servers.Server) -> None:
        if self.running and not self._paused:
            try:
                bits = self.command("GET", KEY, timeout=2)
            except Exception:
                bits = None  # A server that does not answer contributes no bits.
            if isinstance(bits, bytes):
                with into.open("a") as file:
                    file.write(bits.hex() + "\n")
        stop(self)

    servers.Server.kill = gather_and_kill  # type: ignore[method-assign]


def pytest_unconfigure(config: Any) -> None:
    from tests import servers

    for server in list(servers._running.values()):
        server.kill()


# The tool


def hits(file: Path) -> set[int]:
    """Numbers of the statements that were executed on any server."""
    found: set[int] = set()
    for line in file.read_text().split():
        for at, byte in enumerate(bytes.fromhex(line)):
            found |= {8 * at + bit for bit in range(8) if byte & (128 >> bit)}
    return found


def main() -> int:
    arguments = sys.argv[1:] or TESTS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "hits"
        file.touch()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "HOLDFAST_LUA_COVER": str(file), "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.lua_cover", "-p", "no:cacheprovider"]
        subprocess.run([*command, "--storage", "valkey", *arguments], cwd=ROOT, env=env, check=False)
        hit = hits(file)
    return report(hit)


def report(hit: set[int]) -> int:
    from holdfast.storage.redis.script import CLOCK, FAST, SOURCES

    found = statements(SOURCES, {"clock": CLOCK, "fast": FAST})
    missed = [one for number, one in enumerate(found) if number not in hit]
    for file, point in missed:
        source = SOURCES[file]
        column = point.at - source.rfind("\n", 0, point.at)
        line = source.splitlines()[point.line - 1]
        print(f"{file}.lua:{point.line}:{column}: {line.strip() if point.leads else line[column - 1 :]}")
    lines = {(file, point.line) for file, point in found}
    missed_lines = {(file, point.line) for file, point in missed}
    print(
        f"{len(lines) - len(missed_lines)} of {len(lines)} lines,"
        f" {len(found) - len(missed)} of {len(found)} statements of the Lua files were executed"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
