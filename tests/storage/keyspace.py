"""What a test leaves on a Redis or Valkey server: every key is of a kind that lua/keyspace.lua names, and has an owner
or expires."""

from __future__ import annotations

import re
from typing import Any

from holdfast.storage.validation import FAILED_SUFFIX
from tests.servers import Server

READ_AND_DELETE = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '{' .. ARGV[1] .. '[/}]*')) do
  found[#found + 1] = {key, redis.call('TYPE', key).ok, redis.call('PTTL', key)}
end
local shared = '{' .. ARGV[1] .. '}'
local reply = {found, redis.call('SMEMBERS', shared .. ':queues'), redis.call('HKEYS', shared .. ':workers'),
  redis.call('ZRANGE', shared .. ':beats', 0, -1)}
for _, entry in ipairs(found) do redis.call('UNLINK', entry[1]) end
return reply
"""
"""One round trip, after each of thousands of tests. The server is otherwise empty, so that KEYS is fast."""

OF_QUEUES = {
    "meta": "string",
    "jobs": "hash",
    "runs": "hash",
    r"w\d": "zset",
    "running": "zset",
    "completed": "zset",
    "failed": "zset",
    "cancelled": "zset",
    "brief": "zset",
    "wake": "list",
}
OF_NAMESPACES = {
    "queues": "set",
    "workers": "hash",
    "beats": "zset",
    "notes": "hash",
    "noted": "zset",
    "layout": "string",
}
EXPIRING = {"floor": "string", r"call:[\w-]{12}:[a-z_]+": "string"}
"""Kinds of keys, and their types."""


def clear(server: Server, namespace: str) -> list[str]:
    """Delete a namespace. What was wrong with it."""
    reply: Any = server.command("EVAL", READ_AND_DELETE, 0, namespace)
    found, queues, workers, beats = reply
    wrong: list[str] = []
    owned: set[str] = set()
    keys: dict[str, str] = {}
    for raw, type, ttl in found:
        key = raw.decode(errors="backslashreplace")
        queue, kind = _parts(key, namespace)
        known = {**EXPIRING, **(OF_NAMESPACES if queue is None else OF_QUEUES)}
        form = next((form for form in known if re.fullmatch(form, kind)), None)
        if form is None:
            wrong.append(f"{key} is of no kind that keyspace.lua names")
        elif known[form] != type.decode():
            wrong.append(f"{key} is a {type.decode()}")
        elif (form in EXPIRING) != (ttl >= 0):
            wrong.append(f"{key} expires" if ttl >= 0 else f"{key} does not expire")
        elif queue is not None and kind == "meta":
            owned.add(queue)
        elif queue is not None and form not in EXPIRING:
            keys[key] = queue
    wrong += [f"{key} is of a queue that has no metadata" for key, queue in keys.items() if queue not in owned]
    listed = {name.decode() for name in queues}
    wrong += [f"queue {queue} is not on the list" for queue in owned - listed]
    wrong += [f"worker {worker!r} has no beat, or no record" for worker in set(workers) ^ set(beats)]
    return wrong


def _parts(key: str, namespace: str) -> tuple[str | None, str]:
    """The queue that a key belongs to, None if to the whole namespace, and its kind."""
    tag, _, rest = key.removeprefix("{").partition("}")
    name, _, queue = tag.partition("/")
    assert name == namespace
    before, _, kind = rest.partition(":")
    return (f"{queue}{before}" if before in ("", FAILED_SUFFIX) else key) if queue else None, kind
