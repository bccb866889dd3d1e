"""The examples of docs/reference/coming-from.md do what they say: each is run as it stands there, on the embedded
default, with what it calls `yours` put in."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holdfast
from holdfast import Holdfast, State
from tests.app.conftest import until

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "coming-from.md"
CODE = re.compile(r"^## (.+?)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """The one example of each system."""
    found: dict[str, str] = {}
    title = ""
    for heading, code in CODE.findall(PAGE.read_text(encoding="utf-8")):
        if heading:
            title = heading
        else:
            assert title not in found, f"{title} has a second example: run it here, too"
            found[title] = code
    return found


class Example:
    """An example that was loaded like a module."""

    def __init__(self, title: str, **yours: object) -> None:
        self.names: dict[str, Any] = {"__name__": "example", **yours}
        exec(compile(examples()[title], f"{PAGE.name}, {title}", "exec", dont_inherit=True), self.names)
        self.app: Holdfast[Any] = self.names["app"]

    @asynccontextmanager
    async def running(self, *args: object) -> AsyncIterator[asyncio.Task[None]]:
        """Its `main`, for as long as it is wanted; and the app is open."""
        main: Coroutine[Any, Any, None] = self.names["main"](*args)
        async with self.app:
            task = asyncio.create_task(main)
            try:
                yield task
            finally:
                task.cancel()
                (end,) = await asyncio.gather(task, return_exceptions=True)
            assert end is None or isinstance(end, asyncio.CancelledError), repr(end)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_URL", raising=False)


def test_every_system_has_an_example() -> None:
    assert list(examples()) == ["Queasy", "Platformatic job-queue", "Redis Work Queue", "Worqr"]


def test_every_name_in_the_tables_exists_in_the_package() -> None:
    """What the middle column calls on a queue, a lease, a handle or the app is really there."""
    owners = {"queue": holdfast.Queue, "handle": holdfast.Handle, "app": holdfast.Holdfast, "task": holdfast.Task}
    instance = {"id", "placed", "payload", "fence", "attempt", "deadline", "settled", "cancel_asked"}
    ours = " ".join(row.split(" | ")[1] for row in re.findall(r"^\| .+ \|$", PAGE.read_text(), re.MULTILINE))
    custom_id = re.findall(r"\b(queue|lease|handle|app|task)\.(\w+)", ours)
    assert len(custom_id) > 40
    missing = {
        f"{owner}.{name}"
        for owner, name in custom_id
        if name not in instance and not hasattr(owners.get(owner, holdfast.Lease), name)
    }
    assert missing == set()


async def test_queasys_periodic_singleton_goes_on_after_a_retry() -> None:
    answers = [SimpleNamespace(status=429, retry_after=0.01), SimpleNamespace(status=200)]

    async def fetch_prices() -> object:
        return answers.pop(0)

    example = Example("Queasy", fetch_prices=fetch_prices)
    async with example.running():
        await until(lambda: scheduled(example.app, "prices", 300))
    assert answers == []
    assert Path("holdfast.db").exists()


async def test_queasys_periodic_singleton_is_revived_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async def fetch_prices() -> object:
        return SimpleNamespace(status=410)

    example = Example("Queasy", fetch_prices=fetch_prices)
    async with example.running():
        await until(lambda: scheduled(example.app, "prices", 3600))
    assert "prices permanent this price list is no longer published" in capsys.readouterr().out


async def scheduled(app: Holdfast[Any], id: str, seconds: float) -> bool:
    job = await app.queue("prices").get(id)
    if job is None or job.state is not State.WAITING or job.attempts > 0:
        return False
    return abs(job.run_at - datetime.now(UTC) - timedelta(seconds=seconds)) < timedelta(seconds=30)


async def test_platformatics_request_and_response_is_shared_and_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    shrunk: list[str] = []

    async def shrink(url: str, width: int) -> object:
        shrunk.append(url)
        return SimpleNamespace(url=f"{url}@{width}", data=b"x" * 10)

    example = Example("Platformatic job-queue", shrink=shrink)
    async with example.running() as main:
        await main
        said = capsys.readouterr().out.splitlines()
        assert said == ["Thumbnail(url='https://example.com/a.jpg@200', size=10)"] * 2
        assert len(shrunk) == 1
        (job,) = [job async for job in example.app.queue("thumbnails").jobs()]
        assert job.state is State.COMPLETED


async def test_platformatics_failure_has_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    class Unreadable(Exception):
        kind = "permanent"

    async def shrink(url: str, width: int) -> object:
        raise Unreadable(url)

    async with Example("Platformatic job-queue", shrink=shrink).running() as main:
        await main
    assert capsys.readouterr().out.startswith("permanent 1 ")


async def test_work_queues_pull_loop_works_settles_and_joins_a_transaction() -> None:
    worked: list[str] = []
    go_on = asyncio.Event()

    async def work_on(url: str) -> str:
        await go_on.wait()
        worked.append(url)
        if "flaky" in url:
            raise ConnectionError(url)
        if "bad" in url:
            raise ValueError(url)
        return url.upper()

    example = Example("Redis Work Queue", work_on=work_on)
    add, add_with, content_id = (example.names[name] for name in ("add", "add_with", "content_id"))
    queue = example.app.queue("images")
    async with example.running():
        assert await add("good")
        assert not await add("good")
        db = sqlite3.connect("holdfast.db")
        try:
            db.execute("CREATE TABLE seen (url TEXT UNIQUE)")
            add_with(db, "joined")
            with pytest.raises(sqlite3.IntegrityError):
                add_with(db, "joined")
        finally:
            db.close()
        assert await add("flaky")
        assert await add("bad")
        go_on.set()
        await until(lambda: len(worked) == 4)
        assert await queue.result(content_id("good")) == "GOOD"
        assert await queue.result(content_id("joined")) == "JOINED"

        async def has_settled() -> bool:
            stats = await queue.stats()
            return (stats.ready, stats.running, stats.retrying, stats.failed) == (0, 0, 1, 1)

        await until(has_settled)
        assert await add("good")  # It is completed, so it may come again.


async def test_worqrs_peers_work_listen_and_own_a_feed_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    fences: list[int] = []
    let_go = asyncio.Event()

    async def shrink(path: str) -> str:
        return path

    async def follow(name: str, *, fence: int) -> None:
        fences.append(fence)
        await let_go.wait()

    one, two = (Example("Worqr", shrink=shrink, follow=follow) for _ in range(2))
    said: list[str] = []

    def has_said(words: str) -> bool:
        said.append(capsys.readouterr().out)
        return words in "".join(said)

    async with one.running("one"):
        await until(lambda: fences)
        await until(lambda: has_said("completed"))
        async with two.running("two"):
            task = two.names["content_id"]({"path": "a.png"})
            assert await two.app.queue("resize").get(task) is not None
            await until(lambda: has_workers(one.app, {"one", "two"}))
            assert len(fences) == 1
            let_go.set()
    assert len(fences) == 1


async def has_workers(app: Holdfast[Any], names: set[str]) -> bool:
    return {worker.worker for worker in (await app.stats()).workers} == names
