"""Brief outcomes on every storage of ours, and how many of them a queue keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Complete, Request, Settlement, State, Work
from holdfast.storage import audit
from holdfast.storage.conformance.brief import *  # noqa: F403
from holdfast.storage.conformance.verbs import Stage, fence
from tests.storage.harness import Harness
from tests.storage.limits import lower_brief_limit

LIMIT = 5


@pytest.fixture
async def limited(
    harness: Harness, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    """A storage that keeps five brief outcomes."""
    lower_brief_limit(monkeypatch, LIMIT)
    async with harness.open(clock, tmp_path) as storage:
        yield Stage(storage, clock)
        assert (await audit(storage, "q")).problems == []


async def end(stage: Stage, *ids: str, ttl: float = 300) -> None:
    await stage.storage.enqueue("q", [Request(id, Work(b"1")) for id in ids])
    jobs = await stage.claim(len(ids))
    batch: list[Settlement] = [
        Complete(job.id, fence(job), result_ttl_ms=round(ttl * 1000), brief=True) for job in jobs
    ]
    await stage.storage.settle("q", batch, worker="w1")
    stage.clock.advance(0.001)


async def kept(stage: Stage) -> list[str]:
    return [job.id for job in (await stage.storage.scan("q", state=State.COMPLETED)).jobs]


async def test_settle_over_the_limit_forgets_the_oldest_brief_outcomes(limited: Stage) -> None:
    for id in "abcde":
        await end(limited, id)
    assert await kept(limited) == list("abcde")
    await end(limited, "f")
    assert await kept(limited) == list("bcdef")
    await end(limited, "g", "h", "i")
    assert await kept(limited) == list("efghi")
    assert (await limited.stats()).totals["forgotten"] == 4


async def test_limit_spares_outcomes_that_an_option_or_a_waiter_keeps(limited: Stage) -> None:
    await end(limited, "kept", "waited for")
    await limited.keep("kept", 10)
    await limited.keep("waited for", 10, at_least=True)
    await limited.enqueue("result")
    await limited.complete(await limited.claim_one(), ttl=10)
    for id in "abcdefgh":
        await end(limited, id)
    assert set(await kept(limited)) == {"kept", "waited for", "result", *"defgh"}


async def test_expired_and_surplus_brief_outcomes_are_each_forgotten_once(limited: Stage) -> None:
    await end(limited, *"abc", ttl=1)
    await end(limited, *"de", ttl=100)
    limited.clock.advance(1)
    await end(limited, *"fghi", ttl=100)
    assert await kept(limited) == list("efghi")
    assert (await limited.stats()).totals["forgotten"] == 4
