"""The limits alone: our own functions over a blocking socket, and bare statements on our own schema. And how many bytes
a queued job takes on each kind of server that is here."""

from __future__ import annotations

import asyncio

from benchmarks.peers.report import Page
from benchmarks.peers.run import folder, options, run
from benchmarks.peers.systems import SYSTEMS
from benchmarks.redis_storage import memory, opened
from tests.servers import Name, redis_binary

PAGE = Page("limits", "The limits", "./dev bench limits")
QUEUED = 60_000


async def bytes_queued(kind: Name, jobs: int) -> tuple[str, float]:
    """Of one job through the storage; and which server that is."""
    async with opened(kind) as (server, contenders):
        return f"{server.name} {server.version}", await memory(server, contenders["holdfast"], jobs)


def main() -> None:
    asked = options(PAGE, __doc__).parse_args()
    kinds: tuple[Name, ...] = ("valkey",) if redis_binary() is None else ("valkey", "redis")
    queued = dict(asyncio.run(bytes_queued(kind, asked.jobs or QUEUED)) for kind in kinds)
    run(PAGE, [system for system in SYSTEMS if system.is_limit], asked, folder(asked), queued)


if __name__ == "__main__":
    main()
