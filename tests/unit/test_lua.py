"""What must stay true of the Lua files: their clock, their commands, and that their names are those of Python."""

from __future__ import annotations

import ast
import inspect
import re

import pytest

from holdfast._core import clock, lifecycle
from holdfast._core.clock import ManualClock
from holdfast._core.events import ENDS, ENDS_A_WAIT, MAKES_READY, OF_WORKERS, EventKind
from holdfast._core.jobs import State
from holdfast.storage import validation
from holdfast.storage.local import engine
from holdfast.storage.redis import codec
from holdfast.storage.redis import script as lua
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.script import (
    CLOCK,
    FAST,
    FILES,
    INJECTED_CLOCK,
    REGISTER,
    SOURCES,
    Library,
    join,
)
from holdfast.storage.redis.urls import servers_from_url

BODY = join(SOURCES, FILES)
COMMANDS = set(re.findall(r"call\('([A-Z]+)'", BODY))
WHOLE = {
    "KEYS",
    "LREM",
    "LRANGE",
    "SMEMBERS",
    "HGETALL",
    "HKEYS",
    "HVALS",
    "SCAN",
    "SORT",
    "ZUNION",
    "ZINTER",
    "FLUSHDB",
}
"""Commands that may take as long as a queue, or the server, is large."""


def constant(name: str) -> float:
    """A number that the library declares."""
    for names, values in re.findall(r"(?m)^local ([A-Z_, ]+) = ([\d, ]+)", BODY):
        declared = dict(zip(names.split(", "), values.split(", "), strict=False))
        if name in declared:
            return int(declared[name])
    raise LookupError(name)


def test_shipped_library_uses_only_the_server_clock() -> None:
    servers, _ = servers_from_url("redis://localhost", "redis://localhost")
    shipped = Calls(servers, "client", None, 1.0)._library
    assert BODY.count(CLOCK) == BODY.count("TIME'") == 1
    assert BODY in shipped.text
    assert INJECTED_CLOCK not in shipped.text
    assert not re.search(r"os\.(time|clock|date)|math\.random", BODY)


def test_only_a_storage_with_its_own_clock_injects_it() -> None:
    servers, _ = servers_from_url("redis://localhost", "redis://localhost")
    injected = Calls(servers, "client", ManualClock(), 1.0)._library
    assert INJECTED_CLOCK in injected.text
    assert CLOCK not in injected.text
    assert injected.name != Library(SOURCES, injected_clock=False).name


def test_another_release_has_another_name_on_the_server() -> None:
    assert Library(SOURCES, False).name != Library({**SOURCES, "calls": SOURCES["calls"] + "-- changed\n"}, False).name
    assert Library(SOURCES, False).name == Library(SOURCES, False).name


def test_no_command_reads_a_whole_queue_or_all_keys() -> None:
    assert {"ZRANGE", "HMGET", "ZADD"} <= COMMANDS
    assert {"HGETALL"} == COMMANDS & WHOLE
    assert re.findall(r"call\('HGETALL', (.*?)\)", BODY) == ["QUEUE .. ':workers'"]
    assert re.findall(r"call\('HSCAN', .*?'COUNT', (\d+)\)", BODY) == ["500", "100"]
    assert not re.search(r"call\([^)]*, -1[,)]", BODY)


def test_only_enqueue_is_refused_by_a_full_server() -> None:
    library = Library(SOURCES, False)
    assert re.findall(r"function_name = (.*?), callback = calls.run(.*?)}", REGISTER) == [
        ("NAME .. '_enqueue'", ""),
        ("NAME", ", flags = {'allow-oom'"),
    ]
    assert library.script(f"{library.name}_enqueue").startswith("#!lua\n")
    assert library.script(library.name).startswith("#!lua flags=allow-oom\n")


@pytest.mark.parametrize(
    "name",
    [
        *("RESULT_TTL_MS", "CANCELLED_TTL_MS", "FAILURE_TTL_MS", "WAITED_MS"),
        *("MAX_STALL_DELAY_MS", "STEP_BACK_US", "MAX_STEPS"),
    ],
)
def test_library_durations_equal_those_of_python(name: str) -> None:
    assert constant(name) == getattr(clock if name in ("STEP_BACK_US", "MAX_STEPS") else lifecycle, name)


def test_library_limits_and_enums_equal_those_of_python() -> None:
    assert lifecycle.DAMAGED.decode() in BODY
    assert constant("MAX_CALL_BYTES") == validation.MAX_CALL_BYTES
    assert constant("SWEEP_ON_CLAIM") == engine.SWEEP_ON_CLAIM
    assert constant("FORGET_PER_ITEM") == engine.FORGET_PER_ITEM
    assert constant("LAYOUT") == lua.LAYOUT
    assert constant("MAX_BRIEF") == lifecycle.MAX_BRIEF
    assert constant("BRIEF") == codec.BRIEF_STATE
    assert [constant(state.name) for state in State] == [codec.STATES.index(state) for state in State]
    kinds = {name: int(number) for name, number in re.findall(r"([A-Z_]+) = (\d+)", _table("KIND"))}
    assert kinds == {kind.name: 1 + codec.KINDS.index(kind) for kind in EventKind if kind not in OF_WORKERS}
    for name, wanted in (("ENDS", ENDS), ("ENDS_A_WAIT", ENDS_A_WAIT), ("MAKES_READY", MAKES_READY)):
        assert set(re.findall(r"KIND\.([A-Z_]+)", _table(name))) == {kind.name for kind in wanted}


def _table(name: str) -> str:
    (body,) = re.findall(rf"(?ms)^local {name} = \{{(.*?)\}}$", BODY)
    return str(body)


NOT_IN_LUA = {"answer", "newest_generation", "as_placed", "new_generation"}
"""Functions that only readers need, and parts of `choose` and `start`."""
OTHERWISE = {"due": "due_of", "end": "finish"}
"""`end` is a word of Lua's own."""


def test_every_python_lifecycle_function_has_a_lua_function() -> None:
    tree = ast.parse(inspect.getsource(lifecycle))
    names = {node.name.lstrip("_") for node in tree.body if isinstance(node, ast.FunctionDef)} - NOT_IN_LUA
    defined = set(re.findall(r"(?m)^(?:local )?function (?:lifecycle\.)?(\w+)\(", SOURCES["lifecycle"]))
    assert {OTHERWISE.get(name, name) for name in names} <= defined


def test_no_chunk_comes_near_luas_limit_of_local_variables() -> None:
    """Lua allows 200 in one function. The locals of keyspace.lua are visible in every file."""
    for name, source in SOURCES.items():
        source = re.sub(r"--\[\[.*?\]\]", "", source, flags=re.DOTALL)
        declared = re.findall(r"(?m)^local (?:function (\w+)|(\w+(?:, \w+)*))", source)
        count = sum(len((function or names).split(", ")) for function, names in declared)
        assert count <= (115 if name == "keyspace" else 50), f"{name}.lua has {count} locals"


def test_fast_paths_are_switched_off_in_one_line() -> None:
    assert BODY.count("FAST = ") == SOURCES["fast"].count(FAST) == 1
    slow = Library(SOURCES, False, fast=False)
    assert slow.name != Library(SOURCES, False).name
    assert "local FAST = false" in slow.text
