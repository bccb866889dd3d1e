"""No verb reads more of the SQLite file than it needs: every statement finds its rows through an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast._core.clock import ManualClock
from holdfast._core.jobs import Job, State, Update
from holdfast.storage.local.sqlite import SqliteStorage
from tests.storage.stage import Stage

ALL_AT_ONCE = ("GROUP BY state, view", "count(*)")
"""Counting reads all that it counts: the audit's recount, and a snapshot's scheduled and forgotten jobs."""


async def every_verb(stage: Stage) -> None:
    for n in range(20):
        await stage.enqueue(f"{n}", priority=n % 10)
    await stage.enqueue("0", update=Update(), delay=60)
    await stage.enqueue("later", run_at=stage.wall(3600))
    jobs = await stage.claim(8)
    settles: tuple[Callable[[Job], Awaitable[object]], ...] = (stage.complete, stage.fail, stage.retry, stage.release)
    for job, settle in zip(jobs, settles, strict=False):
        await stage.extend(job)
        await settle(job)
    await stage.cancel("1")
    await stage.keep("1", 60)
    await stage.get("1")
    await stage.expire()
    await stage.sweep(worker="w1")
    for state in (None, *State):
        page = await stage.storage.scan("q", state=state, limit=2)
        if page.after is not None:
            await stage.storage.scan("q", state=state, after=page.after, limit=2)
    await stage.stats()
    await stage.storage.announce("w1", {"queues": ["q"]}, ttl_ms=1000)
    await stage.storage.evict("w1")
    assert await stage.problems() == []
    await stage.storage.purge("q", list(State), 5)


@pytest.fixture
async def statements(tmp_path: Path, clock: ManualClock) -> list[str]:
    seen: set[str] = set()
    async with SqliteStorage(tmp_path / "jobs.db", clock=clock) as storage:
        for lane in (storage._writer, storage._reader):  # pyright: ignore[reportPrivateUsage]
            lane._db.set_trace_callback(seen.add)  # pyright: ignore[reportPrivateUsage]
        await every_verb(Stage(storage, clock))
    return sorted(statement for statement in seen if "holdfast_jobs" in statement)


async def test_every_statement_on_jobs_goes_through_an_index_and_sorts_nothing(
    statements: list[str], tmp_path: Path
) -> None:
    assert len(statements) > 20
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        for statement in statements:
            if statement.startswith(("SELECT", "UPDATE", "DELETE")) and not any(
                word in statement for word in ALL_AT_ONCE
            ):
                plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
                wrong = [step for step in plan if step.startswith("SCAN holdfast_jobs") or "TEMP B-TREE" in step]
                assert not wrong, f"{statement}\n{plan}"
