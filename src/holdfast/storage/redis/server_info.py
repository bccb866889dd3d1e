"""What a Redis or Valkey server says of itself: is it new enough, does it keep jobs, what survives a crash?"""

from __future__ import annotations

import logging

from holdfast._core.replies import StorageInfo
from holdfast.errors import StorageUnavailable
from holdfast.storage.redis.calls import Calls
from holdfast.storage.redis.script import LAYOUT

log = logging.getLogger("holdfast.redis")

OLDEST = {"redis": (7, 0), "valkey": (8, 0)}
"""The oldest version of each server that Holdfast works with."""


async def describe(calls: Calls, key: str, name: str) -> StorageInfo:
    """Describe the server that has the key."""
    info = _info(await calls.command(key, "INFO", "server", "memory", "persistence", "replication"))
    seconds, micros = await calls.command(key, "TIME")
    kind = "valkey" if "valkey_version" in info else "redis"
    fsync = await _setting(calls, key, "appendfsync") if info.get("aof_enabled") == "1" else ""
    keeps, warnings = durability(info, fsync)
    facts = {
        "release": f"{kind} {info.get(f'{kind}_version', '?')}",
        "layout": str(LAYOUT),
        "eviction": info.get("maxmemory_policy", "?"),
        "memory": f"{info.get('used_memory_human', '?')} of {info.get('maxmemory_human', '?')}".replace(
            "of 0B", "(no limit)"
        ),
        "replicas": info.get("connected_slaves", "0"),
    }
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        warnings.append(f"maxmemory-policy is {info['maxmemory_policy']}: jobs are deleted when memory is short")
    if info.get("role") == "slave":
        warnings.append("this is a replica: it takes no jobs")
    return StorageInfo(name, int(seconds) * 1_000_000 + int(micros), keeps, facts, warnings)


async def _setting(calls: Calls, key: str, name: str) -> str:
    """A setting of the server, empty if the server does not show it."""
    try:
        reply: list[bytes] = await calls.command(key, "CONFIG", "GET", name)
    except StorageUnavailable:
        return ""
    return reply[1].decode() if len(reply) == 2 else ""


async def check(calls: Calls, key: str, name: str, allow_eviction: bool, log_level: int) -> None:
    """Refuse a server that is too old or that may delete jobs."""
    try:
        reply: bytes = await calls.command(key, "INFO", "server", "memory")
    except StorageUnavailable as error:
        if "NOPERM" not in str(error):
            raise
        log.warning("%s does not let us see its version and its maxmemory-policy: %s", name, error)
        return
    info = _info(reply)
    kind = "valkey" if "valkey_version" in info else "redis"
    version = info.get(f"{kind}_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise StorageUnavailable(f"{name} is {kind} {version}: Holdfast needs {oldest} or newer")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and not allow_eviction:
        raise StorageUnavailable(
            f"{name} has maxmemory-policy {policy}, which deletes jobs when memory is short:"
            " set it to noeviction, or add ?eviction=allow to the URL if you can lose them"
        )
    log.log(log_level, "jobs are in %s, %s %s", name, kind, version)


def _info(reply: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in reply.decode(errors="replace").splitlines() if ":" in line)


def durability(info: dict[str, str], fsync: str) -> tuple[str, list[str]]:
    """What survives a crash of the server, and advice."""
    if info.get("aof_enabled") != "1":
        advice = "the server keeps snapshots at most: set `appendonly yes`, or a kill of it loses minutes, or all"
        return "a kill of the server loses what came after its last snapshot, or all", [advice]
    if fsync == "always":
        return "everything acknowledged survives a kill, and a power cut if the disk keeps its word", []
    if fsync == "everysec":
        return "everything acknowledged survives a kill; a power cut costs a second or two", []
    return f"everything acknowledged survives a kill; appendfsync is {fsync or 'unknown'}", []
