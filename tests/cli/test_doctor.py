"""`holdfast doctor`: what a storage is and keeps, and what is to be seen to, on files and servers of all kinds."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast import Holdfast
from tests.app.conftest import until
from tests.cli.running import run, start
from tests.servers import Server

APP = """\
from holdfast import Holdfast

app = Holdfast()


@app.task(name="reports.day")
async def day() -> int:
    return 1


@day.on_failure
async def told(failure: object) -> None: ...
"""
PROJECT = '[tool.holdfast]\nurl = "sqlite:///jobs.db"\napp = "shop:app"\n'
AOF = ("--appendonly", "yes", "--appendfsync")


async def doctor(url: str, folder: Path) -> tuple[int | None, dict[str, Any]]:
    """Its status, and what it says as JSON."""
    said = await run("doctor", "--json", cwd=folder, HOLDFAST_URL=url)
    assert said.err == ""
    return said.status, json.loads(said.out)


# SQLite


async def test_doctor_reports_a_file_and_the_durability_of_its_setting(tmp_path: Path) -> None:
    rows = {
        "": "everything acknowledged survives a kill; a power cut may cost the last commits",
        "?synchronous=full": "everything acknowledged survives a kill, and a power cut if the disk keeps its word",
        "?synchronous=off": "everything acknowledged survives a kill; a power cut may damage the file",
    }
    urls = [f"sqlite:///{tmp_path}/jobs.db{setting}" for setting in rows]
    async with Holdfast(urls[0]):
        pass
    told = await asyncio.gather(*(doctor(url, tmp_path) for url in urls))
    said, missing = await asyncio.gather(
        run("doctor", cwd=tmp_path, HOLDFAST_URL=urls[0]),
        run("doctor", cwd=tmp_path, HOLDFAST_URL=f"sqlite:///{tmp_path}/missing.db"),
    )
    for keeps, setting, (status, health) in zip(rows.values(), ("normal", "full", "off"), told, strict=True):
        assert (status, health["keeps"], health["warnings"]) == (0, keeps, []), health
        assert health["storage"] == f"SQLite file {tmp_path}/jobs.db"
        assert health["facts"]["commits"] == f"synchronous={setting}"
        assert {"release", "layout", "journal", "size"} <= health["facts"].keys()
        assert health["latency_ms"] >= 0
        assert abs(health["skew_s"]) < 1
        assert health["queues"] == 0
    assert (said.status, said.err) == (0, "")
    assert said.lines[0] == f"SQLite file {tmp_path}/jobs.db"
    assert said.lines[1] == f"  keeps      {rows['']}"
    assert [line.split()[0] for line in said.lines[2:-1]] == [
        *("release", "layout", "journal", "commits", "size", "free"),
        *("latency", "clock", "has"),
    ]
    assert said.lines[-1] == "no problems found"
    assert (missing.status, missing.out) == (1, "")
    assert f"there is no {tmp_path}/missing.db" in missing.err
    assert not (tmp_path / "missing.db").exists()


async def test_doctor_finds_a_damaged_file_and_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    async with Holdfast(f"sqlite:///{tmp_path}/torn.db") as app:
        queue = app.queue("q")
        await app.enqueue_many(queue.bind(200 * "x") for _ in range(500))
        await queue.pause()
    torn = bytearray((tmp_path / "torn.db").read_bytes())
    page = torn.rindex(200 * b"x") // 4096 * 4096  # One that only holds jobs.
    torn[page : page + 4096] = bytes(4096)
    (tmp_path / "torn.db").write_bytes(torn)
    (tmp_path / "cut.db").write_bytes(torn[: len(torn) // 2])
    (tmp_path / "other.db").write_bytes(b"\x1b[31mno database\n" + bytes(8192))
    (status, health), *others = await asyncio.gather(
        doctor(f"sqlite:///{tmp_path}/torn.db", tmp_path),
        run("doctor", cwd=tmp_path, HOLDFAST_URL=f"sqlite:///{tmp_path}/cut.db"),
        run("doctor", cwd=tmp_path, HOLDFAST_URL=f"sqlite:///{tmp_path}/other.db"),
        run("doctor", cwd=tmp_path, HOLDFAST_URL=f"sqlite:///{tmp_path}"),
    )
    assert status == 1
    assert any("the file is damaged: " in warning for warning in health["warnings"]), health
    assert others[0].status in (1, 3), others[0]
    assert "malformed" in others[0].out + others[0].err
    for said in others[1:]:
        assert (said.status, said.out) == (3, ""), said
        (sentence,) = said.err.splitlines()
        assert sentence.startswith("holdfast: ")
        assert str(tmp_path) in sentence


# Redis and Valkey


async def test_doctor_reports_a_server_and_the_durability_of_its_setting(tmp_path: Path) -> None:
    rows: dict[tuple[str, ...], str] = {
        (): "a kill of the server loses what came after its last snapshot, or all",
        (*AOF, "everysec"): "everything acknowledged survives a kill; a power cut costs a second or two",
        (*AOF, "always"): "everything acknowledged survives a kill, and a power cut if the disk keeps its word",
    }
    servers = [Server("valkey", *args) for args in rows]
    try:
        told = await asyncio.gather(*(doctor(server.url, tmp_path) for server in servers))
    finally:
        for server in servers:
            server.stop()
    for server, keeps, (status, health) in zip(servers, rows.values(), told, strict=True):
        assert health["keeps"] == keeps
        assert health["facts"]["release"] == f"valkey {server.version}"
        assert health["facts"]["eviction"] == "noeviction"
        assert health["facts"]["memory"].endswith("(no limit)")
        assert (status, len(health["warnings"])) == ((0, 0) if server.args else (1, 1)), health
    assert "appendonly yes" in told[0][1]["warnings"][0]


async def test_doctor_reports_eviction_and_missing_permissions_without_the_password(tmp_path: Path) -> None:
    with Server("valkey", *AOF, "always", "--maxmemory-policy", "allkeys-lru") as server:
        server.command("ACL", "SETUSER", "ada", "on", ">s3cret", "~*", "&*", "+@all", "-config")
        server.command("ACL", "SETUSER", "bob", "on", ">s3cret", "~*", "&*", "+@all", "-info")
        refused = await run("doctor", cwd=tmp_path, HOLDFAST_URL=server.url)
        address = f"s3cret@127.0.0.1:{server.port}"
        ada, bob = await asyncio.gather(
            run("doctor", cwd=tmp_path, HOLDFAST_URL=f"redis://ada:{address}?eviction=allow"),
            run("doctor", cwd=tmp_path, HOLDFAST_URL=f"redis://bob:{address}?eviction=allow"),
        )
    assert (refused.status, refused.out) == (3, "")
    assert "maxmemory-policy allkeys-lru" in refused.err
    assert "?eviction=allow" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert (ada.status, ada.err) == (1, ""), ada
    assert "  keeps      everything acknowledged survives a kill; appendfsync is unknown" in ada.lines
    assert "  eviction   allkeys-lru" in ada.lines
    assert _warnings(ada.out) == ["! maxmemory-policy is allkeys-lru: jobs are deleted when memory is short"]
    assert bob.status != 0
    assert "no permissions to run the 'info' command" in bob.out + bob.err
    assert "s3cret" not in ada.out + ada.err + bob.out + bob.err


# Queues that nobody serves


async def test_damaged_queue_is_named_and_one_repair_without_names_heals_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Holdfast(url) as app:
        for name in ("bad", "good"):
            await app.queue(name).enqueue({})
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
        db.execute("UPDATE holdfast_queues SET meta = x'c1' WHERE name = 'bad'")
        db.commit()
    status, said = await doctor(url, tmp_path)
    assert status == 1
    assert any("holdfast repair bad" in warning for warning in said["warnings"])
    for command, expected in (("status", 0), ("audit", 1), ("repair", 0), ("audit", 0)):
        ended = await run(command, cwd=tmp_path, HOLDFAST_URL=url)
        assert (command, ended.status, ended.err) == (command, expected, "")
    async with Holdfast(url) as app:
        assert [queue.ready for queue in (await app.stats()).queues] == [1, 1]


async def test_queues_without_a_task_or_a_worker_are_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "project" / "shop.py").write_text(APP)
    async with Holdfast(url) as app:
        for name in ("reports.day", "reports.day/failed", "letters", "paused"):
            await app.queue(name).enqueue({})
        await app.queue("paused").pause()
        await app.storage.announce("w", {"queues": ["reports.day/failed"]}, ttl_ms=60_000)
    async with Holdfast(f"sqlite:///{tmp_path}/project/jobs.db") as app:
        await app.queue("letters").pause()
    told, with_app, project, wrong, none = await asyncio.gather(
        run("doctor", cwd=tmp_path, HOLDFAST_URL=url),
        run("doctor", "shop:app", cwd=tmp_path, HOLDFAST_URL=url),
        run("doctor", "--json", cwd=tmp_path / "project"),
        run("doctor", "shop:nothing", cwd=tmp_path, HOLDFAST_URL=url),
        run("doctor", "shop/app", cwd=tmp_path, HOLDFAST_URL=url),
    )
    ready = "! queue {} has 1 ready jobs, and no worker serves it"
    no_task = "queue {} has no task in this app, and no worker serves it"
    assert told.status == with_app.status == project.status == 1
    assert sorted(_warnings(told.out)) == [ready.format("letters"), ready.format("reports.day")]
    assert sorted(_warnings(with_app.out)) == sorted(
        [f"! {no_task.format('letters')}", f"! {no_task.format('paused')}", ready.format("reports.day")]
    ), with_app
    assert json.loads(project.out)["warnings"] == [no_task.format("letters")]
    for said in (wrong, none):
        assert (said.status, said.out) == (2, ""), said
        assert said.err.startswith("holdfast: ")
        assert len(said.err.splitlines()) == 1
    assert "it has shop:app" in wrong.err


def _warnings(out: str) -> list[str]:
    return [line.replace("1 ready job,", "1 ready jobs,") for line in out.splitlines() if line.startswith("!")]


# Applications


async def test_queue_that_two_applications_serve_is_a_warning_of_worker_and_doctor(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    workers = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "shop.py").write_text(APP)
        options = ("--inline", "--name", name, "--lease", "1")
        workers.append(await start("worker", "shop:app", *options, cwd=folder, HOLDFAST_URL=url))
    try:
        async with Holdfast(url) as app:
            await until(lambda: _are_listed(app, 2), 20)
        status, health = await doctor(url, tmp_path)
        shared = (
            f"different applications serve queue reports.day and 1 more queue: shop:app ({tmp_path}/one/shop.py)"
            f" and shop:app ({tmp_path}/two/shop.py)"
        )
        assert status == 1
        assert [warning for warning in health["warnings"] if warning.startswith(shared)]
        await asyncio.sleep(1)  # A worker compares with its second heartbeat.
    finally:
        for worker in workers:
            worker.terminate()
    logs = [(await worker.communicate())[1].decode() for worker in workers]
    assert [log for log in logs if f"WARNING worker {'one' if log is logs[0] else 'two'}: {shared}" in log]


async def test_deploy_of_other_parameters_is_shown_as_information(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    workers = []
    async with Holdfast(url) as app:
        for count, code in enumerate((APP, APP.replace("day()", "day(number: int = 0)")), 1):
            (tmp_path / "shop.py").write_text(code)
            options = ("--inline", "--name", f"w{count}", "--lease", "1")
            workers.append(await start("worker", "shop:app", *options, cwd=tmp_path, HOLDFAST_URL=url))
            await until(lambda count=count: _are_listed(app, count), 20)
    try:
        status, health = await doctor(url, tmp_path)
    finally:
        for worker in workers:
            worker.terminate()
            await worker.communicate()
    assert (status, health["warnings"]) == (0, [])
    (version,) = health["versions"]
    assert "two versions of shop:app" in version
    assert "serve queue reports.day with different parameters" in version


async def _are_listed(app: Holdfast[Any], count: int) -> bool:
    return len((await app.stats()).workers) == count
