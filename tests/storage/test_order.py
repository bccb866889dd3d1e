"""The order of jobs, reads and queues, on every storage of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.replies import SettleResult
from holdfast.storage import connect
from holdfast.storage.conformance.order import *  # noqa: F403
from holdfast.storage.conformance.order import MIB, ids
from holdfast.storage.conformance.queues import *  # noqa: F403
from holdfast.storage.conformance.queues import announce
from holdfast.storage.conformance.reads import *  # noqa: F403
from holdfast.storage.conformance.verbs import Stage


@pytest.mark.parametrize("scheme", ["memory://", "sqlite:///{}/large.db"])
async def test_a_job_larger_than_a_mebibyte_is_claimed_alone(clock: ManualClock, tmp_path: Path, scheme: str) -> None:
    async with connect(scheme.format(tmp_path), clock=clock, max_payload=3 * MIB) as storage:
        stage = Stage(storage, clock)
        await stage.enqueue("large", bytes(2 * MIB))
        await stage.enqueue("small", b"1")
        assert ids(await stage.claim(10)) == ["large"]
        assert ids(await stage.claim(10)) == ["small"]
        assert await stage.problems() == []


@pytest.mark.parametrize("scheme", ["memory://{}", "sqlite:///{}/jobs.db"])
async def test_namespaces_in_one_place_are_independent(clock: ManualClock, tmp_path: Path, scheme: str) -> None:
    url = scheme.format(tmp_path)
    async with (
        connect(url, clock=clock, namespace="one") as one_storage,
        connect(url, clock=clock, namespace="two") as two_storage,
    ):
        one, two = Stage(one_storage, clock), Stage(two_storage, clock)
        await one.enqueue("a", b"one")
        assert await two.get("a") is None
        assert await two.claim() == []
        await two.enqueue("a", b"two")
        await two.storage.pause("q", True)
        await announce(one, "w1", "q")
        await two.storage.evict("w1")
        job = await one.claim_one()
        assert job.payload == b"one"
        assert await two.complete(job) is SettleResult.LOST
        assert (await one.stats()).workers == ["w1"]
        assert (await two.stats()).workers == []
        assert await two.storage.drop("q") == 0
        assert await one.complete(job) is SettleResult.OK
        assert (await one.stats()).completed == 1
        assert (await two.storage.snapshot()).queues == []
        assert not await announce(one, "w1")
