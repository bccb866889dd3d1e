"""What a Redis or Valkey server reports about itself: version, eviction of keys, and what survives a crash."""

from __future__ import annotations

import logging

from holdfast._core.replies import StorageInfo
from holdfast.errors import StorageUnavailable
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.script import LAYOUT

log = logging.getLogger("holdfast.redis")

OLDEST = {"redis": (7, 0), "valkey": (8, 0)}
"""The oldest version of each server that Holdfast works with."""


async def _read_info(calls: Calls, key: str, *sections: str) -> dict[str, str]:
    """Return sections of INFO as a dict, with the `kind` and the `version` of the server."""
    reply: bytes = await calls.command(key, "INFO", *sections)
    lines = reply.decode(errors="replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    kind = "valkey" if "valkey_version" in info else "redis"
    return {"maxmemory_policy": "noeviction", **info, "kind": kind, "version": info.get(f"{kind}_version", "0")}


async def describe(calls: Calls, key: str, name: str) -> StorageInfo:
    """Describe the server that has the key."""
    info = await _read_info(calls, key, "server", "memory", "persistence", "replication")
    seconds, micros = await calls.command(key, "TIME")
    fsync = await _setting(calls, key, "appendfsync") if info.get("aof_enabled") == "1" else ""
    keeps, warnings = durability(info, fsync)
    memory = f"{info.get('used_memory_human', '?')} of {info.get('maxmemory_human', '?')}"
    facts = {
        "release": f"{info['kind']} {info['version']}",
        "layout": str(LAYOUT),
        "eviction": info["maxmemory_policy"],
        "memory": memory.replace("of 0B", "(no limit)"),
        "replicas": info.get("connected_slaves", "0"),
    }
    if info["maxmemory_policy"] != "noeviction":
        warnings.append(f"maxmemory-policy is {info['maxmemory_policy']}: jobs are deleted when memory is short")
    if info.get("role") == "slave":
        warnings.append("this is a replica: it takes no jobs")
    return StorageInfo(name, int(seconds) * 1_000_000 + int(micros), keeps, facts, warnings)


async def _setting(calls: Calls, key: str, name: str) -> str:
    """Return a setting of the server, or an empty text if the server does not show it."""
    try:
        reply: list[bytes] = await calls.command(key, "CONFIG", "GET", name)
    except StorageUnavailable:
        return ""
    return reply[1].decode() if len(reply) == 2 else ""


async def check(calls: Calls, key: str, name: str, allow_eviction: bool) -> str:
    """Refuse a server that is too old or that may delete jobs. Returns its kind and version."""
    try:
        info = await _read_info(calls, key, "server", "memory")
    except StorageUnavailable as error:
        if "NOPERM" not in str(error):
            raise
        log.warning("cannot check the version and the maxmemory-policy of %s: %s", name, error)
        return "of an unknown version"
    kind, version, eviction = info["kind"], info["version"], info["maxmemory_policy"]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise StorageUnavailable(f"{name} is {kind} {version}: Holdfast needs {oldest} or newer")
    if eviction != "noeviction" and not allow_eviction:
        raise StorageUnavailable(
            f"{name} has maxmemory-policy {eviction}, which deletes jobs when memory is short:"
            " set it to noeviction, or add ?eviction=allow to the URL if you can lose them"
        )
    return f"{kind} {version}"


def durability(info: dict[str, str], fsync: str) -> tuple[str, list[str]]:
    """Return a sentence on what survives a crash of the server, and advice."""
    if info.get("aof_enabled") != "1":
        advice = "the server keeps snapshots at most, so a kill loses minutes of jobs or all: set `appendonly yes`"
        return "a kill of the server loses what came after its last snapshot, or all", [advice]
    if fsync == "always":
        return "everything acknowledged survives a kill, and a power cut if the disk keeps its word", []
    if fsync == "everysec":
        return "everything acknowledged survives a kill; a power cut costs a second or two", []
    return f"everything acknowledged survives a kill; appendfsync is {fsync or 'unknown'}", []
