"""The user of docs/redis.md can do everything in its namespace, and nothing in another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, current_job
from holdfast.errors import StorageUnavailable
from tests.servers import HOST, Server

PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
SECRET = "of-the-shop"


@pytest.fixture(params=["redis", "valkey"])
def own(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as server:
        yield server


@pytest.fixture
def url(own: Server) -> str:
    """The URL of the user, whom the page makes."""
    found = re.search(r"```text\n(ACL SETUSER .*?)```", PAGE, re.DOTALL)
    assert found is not None
    own.command(*found[1].replace("PASSWORD", SECRET).split())
    own.command("ACL", "LOG", "RESET")
    return f"redis://shop:{SECRET}@{HOST}:{own.port}"


def refused(own: Server) -> set[str]:
    """What the server has refused, except the names that a client gives itself."""
    log: list[list[bytes]] = own.command("ACL", "LOG")
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
    objects = {entry[b"object"].decode() for entry in entries}
    return objects - {"client|setinfo", "client|setname"}


async def test_user_of_the_page_can_do_everything_in_its_namespace(own: Server, url: str) -> None:
    app: Holdfast[Any] = Holdfast(url, namespace="shop")

    @app.task(name="t", max_retries=1, min_backoff=0.01, max_backoff=0.01)
    async def double(number: int) -> int:
        current_job().progress(number)
        if number < 0:
            raise ValueError(number)
        return 2 * number

    @double.on_failure
    async def note(failure: Any) -> None: ...

    async with app, app.worker():
        assert await double.call(21) == 42
        failed, later = await double.enqueue(-1), await double.using(delay=60).enqueue(1)
        with pytest.raises(Exception, match="ValueError"):
            await failed.result(wait=10)
        assert await later.cancel()
        queue = app.queue("t")
        assert (await queue.retry(failed.id)).id == failed.id
        await queue.pause(reason="a test")
        await queue.resume()
        assert (await queue.stats()).problem == ""
        assert [job.id async for job in queue.jobs("cancelled")] == [later.id]
        await queue.sweep()
        await queue.repair()
        snapshot = await app.storage.snapshot()
        assert {stats.queue for stats in snapshot.queues} == {"t", "t/failed"}
        assert len(snapshot.workers) == 1
        await queue.purge()
        await app.queue("other").enqueue({})
        assert await app.queue("other").delete()
    assert refused(own) == set()


async def test_user_of_the_page_can_do_nothing_in_a_namespace_with_a_longer_name(own: Server, url: str) -> None:
    async with Holdfast(own.url, namespace="shop2") as theirs:
        await theirs.queue("q").enqueue({})
        with pytest.raises(StorageUnavailable, match="denies this user"):
            async with Holdfast(url, namespace="shop2") as mine:
                await mine.queue("q").enqueue({})
        assert len([job async for job in theirs.queue("q").jobs()]) == 1
