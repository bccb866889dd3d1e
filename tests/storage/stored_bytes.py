"""The bytes that a Redis storage has stored of a queue: for tests that compare two storages key by key."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from holdfast._core.clock import ManualClock
from holdfast._core.extension import Extension
from holdfast.storage import Storage, connect
from holdfast.storage.redis import RedisStorage, calls
from holdfast.storage.redis.calls import KEYS
from holdfast.storage.redis.script import Library
from tests import servers
from tests.storage.behind import RedisSaboteur

CLIENT = "same-client0"
"""The name of both clients: it is part of waiters and of the keys of kept replies."""
VERBS = (
    *(
        "enqueue",
        "claim",
        "settle",
        "extend",
        "cancel",
        "keep",
        "prioritize",
        "pause",
        "sweep",
        "purge",
        "repair",
        "recount",
    ),
    *("announce", "drop", "evict", "write_notes"),
)
OF_NAMESPACE = (":workers", ":beats", ":notes", ":noted", ":queues", ":layout")
OF_QUEUE = tuple(suffix for suffix in KEYS if suffix not in OF_NAMESPACE)

READ = """
local found = {}
for at, key in ipairs(KEYS) do
  local kind, value = redis.call('TYPE', key).ok, nil
  if kind == 'string' then value = redis.call('GET', key)
  elseif kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1) end
  if value then found[#found + 1] = {at, kind, value, redis.call('PTTL', key) >= 0 and 1 or 0} end
end
return found
"""


class SameClientHarness:
    """Makes storages on Valkey whose client has a fixed name, with the optimised paths on or off."""

    def __init__(self, fast: bool) -> None:
        self.name = "valkey" if fast else "valkey without fast paths"
        self._fast = fast

    def open(self, clock: ManualClock, folder: Path) -> Storage:
        server = servers.shared("valkey")
        assert server is not None
        storage = connect(server.url, clock=clock, namespace=uuid.uuid4().hex)
        assert isinstance(storage, RedisStorage)
        make = storage._new_client

        def new_client() -> None:
            make()
            storage._client = storage._calls._client = CLIENT
            storage._calls._library = Library(vars(calls)["SOURCES"], injected_clock=True, fast=self._fast)

        storage._new_client = new_client  # type: ignore[method-assign]  # A storage calls it when it opens.
        return storage

    async def tag_record(self, storage: Storage, queue: str, id: str, entries: Extension) -> None:
        assert isinstance(storage, RedisStorage)
        RedisSaboteur(storage, "valkey", queue).tag(id, entries)

    def clear(self) -> list[str]:
        return []


def stored(storage: Storage, queue: str) -> dict[str, object]:
    """Every key of a queue, of its companion and of what the namespace shares, with its value and whether it expires.
    Kept replies are among them."""
    server = servers.shared("valkey")
    assert server is not None
    assert isinstance(storage, RedisStorage)
    bases = {
        "": f"{{{storage.namespace}}}",
        queue: f"{{{storage.namespace}/{queue}}}",
        f"{queue}/failed": f"{{{storage.namespace}/{queue}}}/failed",
    }
    names = {
        f"{name}{suffix}": f"{base}{suffix}"
        for name, base in bases.items()
        for suffix in (*(OF_QUEUE if name else OF_NAMESPACE), *(f":call:{CLIENT}:{verb}" for verb in VERBS))
    }
    reply: Any = server.command("EVAL", READ, len(names), *names.values())
    keys = list(names)
    return {keys[at - 1]: (kind, _unordered(kind, value), bool(expires)) for at, kind, value, expires in reply}


def _unordered(kind: bytes, value: Any) -> object:
    """The value without the order of a hash or a set, which depends on the order of the writes within one step."""
    match kind:
        case b"hash":
            return dict(zip(value[::2], value[1::2], strict=True))
        case b"set":
            return set(value)
        case _:
            return value
