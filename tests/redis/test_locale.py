"""A server whose locale orders strings otherwise than by their bytes, as a shell or systemd on most hosts starts it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast._core.jobs import Request, State, Work
from holdfast.storage import audit
from tests import servers
from tests.redis.conftest import opened
from tests.storage.stage import Stage

pytestmark = pytest.mark.skipif(servers.locale_folder() is None, reason="the system has no localedef and en_US")

IDS = [f"{letter}{n:02}" for letter in ("a", "B", "c", "D", "é", "Z", "-", "_") for n in range(40)]
"""Their order by bytes differs from that of the locale."""


@pytest.fixture(scope="module")
def collating() -> Iterator[servers.Server]:
    with servers.Server("valkey", locales=servers.locale_folder()) as server:
        yield server


@pytest.fixture
async def queue(collating: servers.Server) -> AsyncIterator[Stage]:
    """One call has stored all jobs, so that their scores are equal and their ids order them."""
    async with opened(collating.url) as stage:
        for at in range(0, len(IDS), 160):
            await stage.storage.enqueue("q", [Request(id, Work(b"x"), custom_id=True) for id in IDS[at : at + 160]])
        yield stage


def test_lua_of_this_server_compares_strings_by_the_locale(collating: servers.Server) -> None:
    assert collating.command("EVAL", "return 'a' > 'B' and 1 or 0", 0) == 0


@pytest.mark.parametrize("state", [State.WAITING, State.CANCELLED])
async def test_list_on_a_collating_server_names_every_job_once(queue: Stage, state: State) -> None:
    if state is State.CANCELLED:
        for at in range(0, len(IDS), 160):
            await queue.storage.cancel("q", IDS[at : at + 160])
    ids: list[str] = []
    after: str | None = None
    for _ in range(len(IDS)):
        page = await queue.storage.scan("q", state=state, after=after, limit=7)
        ids += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert sorted(ids) == sorted(IDS)


async def test_repair_on_a_collating_server_changes_nothing_of_a_sound_queue(queue: Stage) -> None:
    before = await queue.storage.snapshot()
    assert (await audit(queue.storage, "q", repair=True)).problems == []
    assert await queue.storage.snapshot() == before
