"""Real processes on one server, killed at random, and the server with them: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.storage import connect
from tests.servers import Server
from tests.storage.test_processes import Processes, check_history, drain, kill_at_random


@pytest.fixture
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.close()


async def test_random_kills_of_clients_and_server_lose_nothing_and_complete_nothing_twice(
    processes: Processes, tmp_path: Path
) -> None:
    history = tmp_path / "history"
    with Server("valkey", "--appendonly", "yes", "--appendfsync", "always") as server:

        async def kill_the_server() -> None:
            for _ in range(3):
                await asyncio.sleep(1.2)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)

        kills, _ = await asyncio.gather(
            kill_at_random(processes, f"{server.url}?timeout=30", history), kill_the_server()
        )
        assert kills > 5
        async with connect(server.url) as storage:
            drained = await drain(storage)
            await check_history(storage, [line.split() for line in history.read_text().splitlines()], drained)
