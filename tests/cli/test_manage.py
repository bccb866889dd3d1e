"""Commands that act on what is stored, on SQLite and on Valkey."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from holdfast import CancelResult, Holdfast, State
from holdfast.cli.common import batches_of_ids
from tests import servers
from tests.cli.running import Edge, edge_on, ended, on_both, run
from tests.worker.conftest import until

AGAIN = "each runs as often as a new job: its retries are counted from 0"

MANY = 150
"""More than a storage sweeps in one step."""


async def failed(edge: Edge, *ids: str, queue: str = "q") -> None:
    """Jobs that have failed."""
    for id in ids:
        await edge.app.queue(queue).enqueue({"of": id}, id=id)
        lease = await edge.app.queue(queue).lease(wait=0)
        assert lease is not None
        assert await lease.fail("no luck")


async def states(edge: Edge, queue: str = "q") -> dict[str, str]:
    """The jobs of a queue, and how they are."""
    return {job.id: job.state.value async for job in edge.app.queue(queue).jobs()}


# Cancel and retry


@on_both
async def test_cancel_prints_the_outcome_per_job_and_exits_with_1_if_none_stopped(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "over")
        await queue.enqueue(None, id="runs")
        lease = await queue.lease(wait=0)
        await queue.enqueue(None, id="waits")
        said = await edge.run("cancel", "q", "waits", "runs", "over", "nobody")
        assert said == (0, "cancelled waits\nasked runs\nfinished over\nmissing nobody\n", "")
        assert await states(edge) == {"over": "failed", "runs": "running", "waits": "cancelled"}
        assert lease is not None
        assert await lease.extend()
        assert lease.cancel_asked
        assert await queue.cancel("runs") is CancelResult.ASKED
        assert await edge.run("cancel", "q", "over", "nobody") == (1, "finished over\nmissing nobody\n", "")
        await lease.release()


@on_both
async def test_retry_restarts_the_given_jobs_or_with_all_every_failed_one(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "a", "b", "c")
        await queue.enqueue(None, id="stopped")
        await queue.cancel("stopped")
        some, none = await asyncio.gather(
            edge.run("retry", "q", "a", "nobody"), edge.run("retry", "q", "nobody", "no\x1b[31m")
        )
        assert (some.status, some.out) == (0, f"enqueued again: a\n{AGAIN}\n")
        assert "'nobody'" in some.err
        assert (none.status, none.out) == (1, "")
        assert len(none.err.splitlines()) == 2
        assert "\x1b" not in none.err
        assert await edge.run("retry", "q", "--all") == (0, f"2 jobs enqueued again\n{AGAIN}\n", "")
        assert await states(edge) == {"a": "waiting", "b": "waiting", "c": "waiting", "stopped": "cancelled"}
        again = await queue.get("a")
        assert again is not None
        assert (again.payload, again.retries) == ({"of": "a"}, 0)
        assert (await edge.run("retry", "q", "stopped")).lines == ["enqueued again: stopped", AGAIN]


@on_both
async def test_cancel_by_state_and_pattern_stops_more_jobs_than_one_step(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        pages, other = edge.app.queue("pages.a"), edge.app.queue("other")
        await edge.app.enqueue_many(pages.bind(None) for _ in range(2 * MANY))
        await edge.app.queue("pages.b").enqueue(None)
        await other.enqueue(None)
        lease = await pages.lease(wait=0)
        assert lease is not None
        no, unclear = await asyncio.gather(
            edge.run("cancel", "pages.*", "--all", given="n\n"), edge.run("cancel", "nothing.*", "--all", "--yes")
        )
        assert (no.status, no.out) == (1, "Cancel all waiting and running jobs of pages.*? [y/N]: ")
        assert (unclear.status, unclear.err.startswith("holdfast: no queue matches 'nothing.*'")) == (1, True)
        waiting = await edge.run("cancel", "pages.*", "--state", "waiting", "--yes")
        assert waiting == (0, f"{2 * MANY} jobs cancelled\n", "")
        assert await lease.extend()
        assert not lease.cancel_asked
        everything = await edge.run("cancel", "pages.*", "--all", given="y\n")
        assert everything.out.endswith("0 jobs cancelled, 1 asked to stop\n")
        assert await lease.extend()
        assert lease.cancel_asked
        assert (await other.stats()).ready == 1
        await lease.release()
        again = await edge.run("retry", "pages.*", "--state", "cancelled")
        assert again == (0, f"{2 * MANY + 1} jobs enqueued again\n{AGAIN}\n", "")


@on_both
async def test_pattern_changes_fail_queues_only_if_it_ends_in_failed(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        for name in ("pages.a", "pages.a/failed"):
            await edge.app.queue(name).enqueue(None, id="a")
        listed = await edge.run("jobs", "pages.*")
        assert [line.split()[0] for line in listed.lines[1:]] == ["pages.a", "pages.a/failed"]
        assert await edge.run("cancel", "pages.*", "--all", "--yes") == (0, "1 job cancelled\n", "")
        assert await states(edge, "pages.a/failed") == {"a": "waiting"}
        none = await edge.run("cancel", "*/*", "--all", "--yes")
        assert (none.status, none.err.startswith("holdfast: no queue matches '*/*'")) == (1, True)
        assert await edge.run("cancel", "pages.*/failed", "--all", "--yes") == (0, "1 job cancelled\n", "")


@on_both
async def test_retry_all_takes_each_failure_once_while_jobs_fail_again(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "a", "b")
        until_at = (await edge.app.stats()).now
        taken: list[str] = []
        async for ids in batches_of_ids(queue, State.FAILED, until_at):
            taken += ids
            await queue.retry_many(ids)
            lease = await queue.lease(wait=0)
            assert lease is not None
            assert await lease.fail("again")
        async for ids in batches_of_ids(queue, State.FAILED, until_at):
            taken += ids
        assert taken == ["a", "b"]


@on_both
async def test_prioritize_changes_live_jobs_only_and_says_which(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "over")
        for id in ("first", "last"):
            await queue.enqueue(None, id=id)
        some, none, wrong = await asyncio.gather(
            edge.run("prioritize", "q", "9", "last", "over"),
            edge.run("prioritize", "q", "9", "over", "nobody"),
            edge.run("prioritize", "q", "10", "last"),
        )
        assert some == (0, "changed last\nunchanged over\n", "")
        assert none == (1, "unchanged over\nunchanged nobody\n", "")
        assert (wrong.status, wrong.out) == (2, "")
        lease = await queue.lease(wait=0)
        assert lease is not None
        assert lease.id == "last"
        await lease.release()


@on_both
async def test_keep_prints_the_answer_for_each_id_and_takes_ids_without_escapes(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "page:a%2Fb")
        await queue.enqueue(None, id="waits")
        kept, none = await asyncio.gather(
            edge.run("keep", "q", "page:a/b", "waits", "nobody", "--ttl", "30d"),
            edge.run("keep", "q", "nobody", "--ttl", "1h"),
        )
        assert kept == (0, "kept page:a/b\nlive waits\nmissing nobody\n", "")
        assert none == (1, "missing nobody\n", "")
        (job,) = await edge.app.storage.get("q", ["page:a%2Fb"])
        assert job is not None
        assert job.outcome is not None
        assert job.outcome.forget_at - job.outcome.ended_at > 29 * 86_400 * 1_000_000


async def test_wrong_uses_exit_with_2_and_change_nothing(tmp_path: Path) -> None:
    uses = [
        "retry q",
        "retry q a --all",
        "cancel q",
        "cancel q a --all",
        "cancel q --all --state waiting",
        "cancel q --state failed",
        "cancel q.* a",
        "keep q a",
        "keep q --ttl 1h",
        "pause",
        "evict",
        "purge q --state lost",
        "sweep --every 0",
        "sweep --every 1 --times 0",
        "sweep --times 2",
        "jobs q --older 999999d",
        "keep q a --ttl 3651d",
        "pause no/such",
        "audit no/such",
        "purge no/such --yes",
    ]
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Holdfast(url):
        pass
    for use, said in zip(
        uses, await asyncio.gather(*(run(*use.split(), cwd=tmp_path, HOLDFAST_URL=url) for use in uses)), strict=True
    ):
        assert (said.status, said.out) == (2, ""), (use, said)
        (sentence,) = [line for line in said.err.splitlines() if line and not line.startswith(("Usage:", "Try "))]
        assert sentence.startswith(("Error: ", "holdfast: ")), (use, said)


# Pause and resume


@on_both
async def test_a_paused_queue_gives_out_nothing_until_it_is_resumed(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        assert await edge.run("pause", "q", "--reason", "the mill is on fire") == (0, "paused q\n", "")
        await queue.enqueue(None, id="a")
        assert await queue.lease(wait=0) is None
        assert (await queue.stats()).reason == "the mill is on fire"
        assert await edge.run("resume", "q") == (0, "resumed q\n", "")
        lease = await queue.lease(wait=0)
        assert lease is not None
        assert await lease.complete()
        stats = await queue.stats()
        assert (stats.paused, stats.reason) == (False, "")


# Evict


@on_both
async def test_an_evicted_worker_finishes_its_job_and_exits_with_0(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("hold")
        held = await queue.enqueue({"gate": "go"})
        options = ("--processes", "1", "--name", "ada", "--lease", "1")
        worker = edge.start("held:app", *options)
        (first, missing), _ = await asyncio.gather(evict_none(edge), edge.noted("began"))
        assert first == missing == (1, "", "holdfast: there is no worker 'bob': see `holdfast status`\n")
        assert await edge.run("evict", "ada") == (0, "ada was asked to stop\n", "")
        await until(lambda: " was evicted" in worker.text())
        later = await queue.enqueue({"gate": "go"})
        (edge.folder / "go").touch()
        assert await held.result(wait=10) == [1, 0, 0, 0]
        assert await worker.exited() == 0
        assert await later.state() is State.WAITING


async def evict_none(edge: Edge) -> list[tuple[int | None, str, str]]:
    """Evict a worker that is not there, and one that is not there at once."""
    told = await asyncio.gather(edge.run("evict", "bob"), edge.run("evict", "bob", "--now"))
    return [(said.status, "", said.err) for said in told]


@on_both
async def test_evict_now_takes_back_jobs_of_a_dead_worker_before_their_leases_end(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        await edge.app.queue("hold").enqueue({"gate": "never"}, id="a")
        worker = edge.start("held:app", "--processes", "1", "--name", "ada", "--lease", "600")
        await edge.noted("began")
        worker.signal(signal.SIGKILL)
        await worker.exited()
        await until(lambda: not edge.processes())
        said = await edge.run("evict", "ada", "--now")
        assert said.status == 0
        assert said.lines[0].startswith("1 job")
        assert said.lines[-1] == "ada was asked to stop"
        job = await edge.app.queue("hold").get("a")
        assert job is not None
        assert (job.state, job.stalls) == (State.WAITING, 1)


async def test_evict_now_takes_back_more_jobs_than_one_step_does(tmp_path: Path) -> None:
    async with edge_on("sqlite", tmp_path) as edge:
        queue = edge.app.queue("q")
        await edge.app.enqueue_many(queue.bind(None) for _ in range(MANY))
        for _ in range(2):
            await edge.app.storage.claim("q", MANY // 2, worker="ada", lease_ms=600_000)
        assert (await queue.stats()).running == MANY
        said = await edge.run("evict", "ada", "--now")
        assert said.status == 0
        assert said.out.startswith(f"{MANY} jobs taken back")
        assert (await queue.stats()).running == 0


# Sweep


@on_both
async def test_repeated_sweep_command_takes_back_leases_and_forgets_records(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await queue.enqueue(None, id="lost")
        await queue.lease(seconds=0.3, wait=0)
        await queue.enqueue(None, id="old", result_ttl=0.1)
        old = await queue.lease(wait=0)
        assert old is not None
        assert await old.complete()
        cleaner = await edge.command("sweep", "--every", "0.2", "--times", "8")

        async def taken_back() -> bool:
            return await states(edge) == {"lost": "waiting"}

        await until(taken_back)
        said = await ended(cleaner)
        assert (said.status, said.err) == (0, "")
        counts = [line.removeprefix("q: ").split() for line in said.lines]
        assert sum(int(words[0]) for words in counts) == 1
        assert sum(int(words[3]) for words in counts) == 1
        job = await queue.get("lost")
        assert job is not None
        assert job.stalls == 1


async def test_a_sweep_goes_on_until_nothing_is_due(tmp_path: Path) -> None:
    async with edge_on("sqlite", tmp_path) as edge:
        queue = edge.app.queue("q")
        await edge.app.enqueue_many(queue.bind(None) for _ in range(MANY))
        for _ in range(2):
            await edge.app.storage.claim("q", MANY // 2, worker="ada", lease_ms=100)
        await asyncio.sleep(0.1)  # No synchronisation: so long the leases last.
        assert await edge.run("sweep", "q") == (0, "", "")  # It marks them.
        assert await edge.run("sweep", "q") == (0, f"q: {MANY} taken back, 0 forgotten\n", "")
        assert (await queue.stats()).ready == MANY


async def test_repeated_sweep_command_runs_until_interrupted_without_a_traceback(tmp_path: Path) -> None:
    async with edge_on("sqlite", tmp_path) as edge:
        queue = edge.app.queue("q")
        await queue.enqueue(None, id="a")
        cleaners = [await edge.command("sweep", "--every", "0.1") for _ in range(2)]
        for stalls in (1, 2):
            assert await queue.lease(seconds=0.1, wait=0) is not None

            async def taken_back(stalls: int = stalls) -> bool:
                job = await queue.get("a")
                return job is not None and job.stalls == stalls

            await until(taken_back)
        for cleaner, number in zip(cleaners, (signal.SIGINT, signal.SIGTERM), strict=True):
            cleaner.send_signal(number)
        interrupted, terminated = [await ended(cleaner) for cleaner in cleaners]
        assert "Traceback" not in interrupted.err + terminated.err
        assert interrupted.status == 130, interrupted
        assert terminated.status in (0, -signal.SIGTERM), terminated


# Audit and repair


def damage(edge: Edge, queue: str, id: str) -> None:
    """Cut a record short, behind the storage's back."""
    if edge.place.storage == "sqlite":
        with closing(sqlite3.connect(edge.folder / "jobs.db")) as db, db:
            cut = "UPDATE holdfast_jobs SET rest = substr(rest, 1, 7) WHERE id = ?"
            assert db.execute(cut, (id.encode(),)).rowcount == 1
        return
    server = servers.shared("valkey")
    assert server is not None
    key = f"{{{edge.place.namespace}/{queue}}}:jobs"
    record = server.command("HGET", key, id)
    assert isinstance(record, bytes)
    assert server.command("HSET", key, id, record[:7]) == 0


@on_both
async def test_audit_finds_damage_and_repair_fixes_it_without_losing_a_job(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        for name in ("q", "sound"):
            for id in ("a", "b"):
                await edge.app.queue(name).enqueue({"of": id}, id=f"{name}-{id}")
        damage(edge, "q", "q-a")
        all_said, as_json, sound = await asyncio.gather(
            edge.run("audit"), edge.run("audit", "q", "--json"), edge.run("audit", "sound")
        )
        assert (all_said.status, all_said.err) == (1, "")
        assert any(line.startswith("garbled q q-a: ") for line in all_said.lines)
        assert all_said.lines[-1].startswith("4 records checked, ")
        problems = [json.loads(line) for line in as_json.lines]
        assert as_json.status == 1
        assert {"kind": "garbled", "queue": "q", "id": "q-a"}.items() <= problems[0].items()
        assert len(all_said.lines) == len(problems) + 1
        assert sound == (0, "2 records checked, 0 problems\n", "")
        mended = await edge.run("repair")
        assert (mended.status, mended.err) == (0, "")
        assert mended.lines[0] == all_said.lines[0]
        assert mended.lines[-1].endswith(", repaired")
        clean, again = await asyncio.gather(edge.run("audit"), edge.run("repair", "--json"))
        assert clean == (0, "4 records checked, 0 problems\n", "")
        assert again == (0, "", "")
        assert await states(edge) == {"q-a": "failed", "q-b": "waiting"}


# Purge


@on_both
async def test_purge_asks_first_and_deletes_only_what_was_named(storage: str, tmp_path: Path) -> None:
    async with edge_on(storage, tmp_path) as edge:
        queue = edge.app.queue("q")
        await failed(edge, "f1", "f2")
        await queue.enqueue(None, id="runs")
        lease = await queue.lease(wait=0)
        assert lease is not None
        await queue.enqueue(None, id="waits")
        before = await states(edge)
        no, nothing = await asyncio.gather(edge.run("purge", "q", given="n\n"), edge.run("purge", "q"))
        assert no.status == 1
        assert nothing.status in (1, 130)
        for said in (no, nothing):
            assert said.out.startswith("Delete all waiting, completed, failed, cancelled jobs of q? [y/N]: ")
            assert "deleted" not in said.out
        assert await states(edge) == before
        custom_id = await edge.run("purge", "q", "--state", "failed", "--state", "completed", "--yes")
        assert custom_id == (0, "2 jobs deleted\n", "")
        assert await states(edge) == {"runs": "running", "waits": "waiting"}
        yes = await edge.run("purge", "q", given="y\n")
        assert yes.status == 0
        assert yes.out.endswith("1 jobs deleted\n") or yes.out.endswith("1 job deleted\n")
        assert await states(edge) == {"runs": "running"}
        assert (await edge.run("purge", "q", "--state", "running", "--yes")).status == 0
        assert await lease.extend()
        assert lease.cancel_asked
        await lease.release()
        assert await states(edge) in ({}, {"runs": "cancelled"})


async def test_delete_asks_first_and_waits_for_running_jobs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Holdfast(url) as app:
        queue = app.queue("q")
        await app.enqueue_many(queue.bind(number) for number in range(3))
        lease = await queue.lease()
        assert lease is not None
        no = await run("delete", "q", cwd=tmp_path, given="n\n", HOLDFAST_URL=url)
        assert (no.status, "nothing was deleted" in no.err) == (1, True)
        late = await run("delete", "q", "--yes", "--wait", "0", cwd=tmp_path, HOLDFAST_URL=url)
        assert (late.status, "q still has jobs and is paused" in late.err) == (4, True)
        await lease.release()
        yes = await run("delete", "q", "--yes", cwd=tmp_path, HOLDFAST_URL=url)
        assert (yes.status, yes.out) == (0, "deleted q\n")
        gone = await run("delete", "q", "--yes", cwd=tmp_path, HOLDFAST_URL=url)
        assert (gone.status, "there is no queue q" in gone.err) == (1, True)
        assert (await app.stats()).queues == []


# Backup


async def test_backup_under_load_is_complete_and_its_jobs_run(tmp_path: Path) -> None:
    """Jobs are enqueued one after the other: a copy of one moment has the first ones, without a gap."""
    target = tmp_path / "copies" / "jobs.db"
    target.parent.mkdir()
    acknowledged = 0
    async with edge_on("sqlite", tmp_path) as edge:

        async def produce() -> None:
            nonlocal acknowledged
            while True:
                await edge.app.queue("q").enqueue(acknowledged, id=f"{acknowledged}")
                acknowledged += 1

        async with asyncio.TaskGroup() as group:
            producer = group.create_task(produce())
            await until(lambda: acknowledged > 100)
            before = acknowledged
            said = await edge.run("backup", str(target))
            after = acknowledged
            producer.cancel()
    assert said == (0, f"wrote {target}\n", "")
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(target.parent.iterdir()) == [target]

    async with Holdfast(f"sqlite:///{target}", namespace=edge.place.namespace) as copy:
        ran: list[int] = []
        while (lease := await copy.queue("q").lease(wait=0)) is not None:
            ran.append(lease.payload)
            assert await lease.complete()
        assert ran == list(range(len(ran)))
        assert before <= len(ran) <= after
        assert (await copy.queue("q").repair(dry_run=True)).problems == []


async def test_backup_refuses_to_overwrite_and_a_storage_on_a_server(tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    there.write_text("precious")
    async with edge_on("sqlite", tmp_path) as edge:
        await edge.app.queue("q").enqueue(1)
        said = await edge.run("backup", str(there))
        lost = await edge.run("backup", str(tmp_path / "no-folder" / "jobs.db"))
    assert (said.status, said.out, said.err) == (2, "", f"holdfast: {there} exists: name a new file\n")
    assert there.read_text() == "precious"
    assert lost.status == 2
    assert "name a new file in a folder that you may write to" in lost.err
    async with edge_on("valkey", tmp_path) as edge:
        said = await edge.run("backup", str(tmp_path / "valkey.db"))
    assert (said.status, said.out) == (2, "")
    assert "use the backup of the server" in said.err
    assert not (tmp_path / "valkey.db").exists()
