"""`holdfast worker`, as a user types it: its options, and what it says to those who get something wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from tests.servers import Server, free_port
from tests.worker.conftest import ROOT, Scene, WorkerProcess, until

PACKAGE = str(Path(holdfast.__file__).parent)
PROGRAM = (sys.executable, "-m", "holdfast")


class Said(NamedTuple):
    status: int | None
    out: str
    err: str


async def say(*words: str, cwd: Path, url: str = "sqlite:///jobs.db", program: tuple[str, ...] = PROGRAM) -> Said:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        *(*program, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOLDFAST_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=cwd,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 15)
    except TimeoutError:
        process.send_signal(signal.SIGTERM)
        out, err = await process.communicate()
        pytest.fail(f"holdfast {' '.join(words)} did not end: {(out + err).decode()}")
    return Said(process.returncode, out.decode(), err.decode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project: modules that are fine, and modules that are not."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


FINE = """\
from holdfast import Holdfast
app = Holdfast()
number = 5

@app.task(name="reports.day")
async def day() -> int:
    return 1

@app.task(name="mail")
def mail() -> int:
    return 2
"""
MODULES = {
    "fine": FINE,
    "empty": "from holdfast import Holdfast\napp = Holdfast()\n",
    "raising": "def connect():\n    raise KeyError('no luck')\n\nconnect()\n",
    "needy": "import there_is_no_such_thing\n",
    "wrong": "def broken(:\n",
    "leaving": "import sys\nsys.exit('goodbye')\n",
    "refused": "from holdfast import Holdfast\napp = Holdfast()\napp.task(tiemout=1)\n",
    "dying": "import os\nos._exit(3)\n",
}


# Help


async def test_help_names_every_option_and_both_ways_to_call_it_work(folder: Path) -> None:
    script = (str(Path(sys.executable).with_name("holdfast")),)
    shown, same = await asyncio.gather(
        say("worker", "--help", cwd=folder), say("worker", "--help", cwd=folder, program=script)
    )
    assert shown == same
    assert (shown.status, shown.err) == (0, "")
    options = "queues processes inline concurrency name lease grace max-jobs max-memory burst max-burst-jobs reload"
    options += " url namespace log-format log-level"
    assert [option for option in options.split() if f"--{option}" not in shown.out] == []
    assert "Exit status:" in shown.out


# Wrong uses


WRONG_OPTIONS = [
    "",
    "fine:app --wrong",
    "fine:app --processes 0",
    "fine:app --processes many",
    "fine:app --concurrency 0",
    "fine:app --lease 0.1",
    "fine:app --lease 3601",
    "fine:app --lease nan",
    "fine:app --grace -1",
    "fine:app --grace nan",
    "fine:app --max-jobs 0",
    "fine:app --max-memory much",
    f"fine:app --max-memory {400 * '9'}T",
    "fine:app --log-format xml",
    "fine:app --log-level loud",
    f"fine:app --name {201 * 'n'}",
    "fine:app --inline --processes 2",
    "fine:app --inline --max-jobs 2",
    "fine:app --inline --max-memory 1G",
    "fine:app --max-burst-jobs 3",
    "fine:app --burst --max-burst-jobs 0",
    "fine.py",
    "fine/tasks:app",
]


async def test_a_wrong_use_of_the_command_line_is_answered_with_one_sentence(folder: Path) -> None:
    all_said = await asyncio.gather(*(say("worker", *words.split(), cwd=folder) for words in WRONG_OPTIONS))
    for words, said in zip(WRONG_OPTIONS, all_said, strict=True):
        assert (said.status, said.out) == (2, ""), f"{words}: {said}"
        assert "Traceback" not in said.err, words
        (sentence,) = [line for line in said.err.splitlines() if line and not line.startswith(("Usage:", "Try "))]
        assert sentence.startswith(("Error: ", "holdfast: ")), words


CANNOT_LOAD = {
    "nowhere:app": "there is no module 'nowhere'",
    "fine.deeper:app": "there is no module 'fine.deeper'",
    "fine:nothing": "has no 'nothing'; it has fine:app",
    "fine:number": "is 5, not a Holdfast app; it has fine:app",
    "empty:app": "this app has no tasks",
    "fine:app --queues reports.* --queues post": "no task matches 'post': the app has reports.day, mail",
}


@pytest.mark.parametrize("inline", [False, True])
async def test_target_that_cannot_be_served_is_named_in_one_sentence(folder: Path, inline: bool) -> None:
    more = ("--log-level", "warning", *(("--inline",) if inline else ()))
    all_said = await asyncio.gather(*(say("worker", *words.split(), *more, cwd=folder) for words in CANNOT_LOAD))
    for (words, expected), said in zip(CANNOT_LOAD.items(), all_said, strict=True):
        assert (said.status, said.out) == (2, ""), f"{words}: {said}"
        (sentence,) = said.err.splitlines()
        assert sentence.startswith("holdfast: ")
        assert expected in sentence


RAISING = {
    "raising:app": "KeyError: 'no luck'",
    "needy:app": "ModuleNotFoundError: No module named 'there_is_no_such_thing'",
    "wrong:app": "SyntaxError",
    "leaving:app": "SystemExit: goodbye",
    "refused:app": "did you mean 'timeout'?",
}


async def test_import_error_of_a_module_shows_only_frames_of_the_user(folder: Path) -> None:
    all_said = await asyncio.gather(*(say("worker", words, cwd=folder) for words in RAISING))
    for (words, expected), said in zip(RAISING.items(), all_said, strict=True):
        assert (said.status, said.out) == (2, ""), f"{words}: {said}"
        assert expected in said.err, words
        assert f"{words.removesuffix(':app')}.py" in said.err, words
        assert PACKAGE not in said.err, words
        assert "importlib" not in said.err, words


async def test_a_module_that_ends_its_process_is_named(folder: Path) -> None:
    said = await say("worker", "dying:app", cwd=folder)
    assert said.status == 1
    assert "could not load dying:app" in said.err
    assert "Traceback" not in said.err


async def test_unusable_storage_is_named_without_its_password(folder: Path) -> None:
    quiet = ("--log-level", "debug")
    port = free_port()
    wrong = {
        f"redis://ada:s3cret@127.0.0.1:{port}/0?timeout=0.5": (3, f"127.0.0.1:{port}"),
        "sqlite:////nowhere/jobs.db": (3, "/nowhere/jobs.db"),
        "memory://": (2, "child processes cannot share memory://"),
        "redis://ada:s3cret@127.0.0.1:port": (2, "HOLDFAST_URL"),
        "carrier-pigeon://ada:s3cret@home": (2, "HOLDFAST_URL"),
    }
    all_said = await asyncio.gather(*(say("worker", "fine:app", *quiet, cwd=folder, url=url) for url in wrong))
    for (url, (status, expected)), said in zip(wrong.items(), all_said, strict=True):
        assert said.status == status, f"{url}: {said}"
        assert expected in said.err.splitlines()[-1], url
        assert "s3cret" not in said.out + said.err, url


async def test_password_of_a_storage_is_never_shown_through_outages_and_refusals(folder: Path) -> None:
    with Server("valkey") as server:
        server.command("ACL", "SETUSER", "ada", "on", ">s3cret", "~*", "&*", "+@all")
        address = f"127.0.0.1:{server.port}?timeout=0.5"
        options = ("worker", "fine:app", "--processes", "1", "--lease", "0.5", "--log-level", "debug")
        refused = await say(*options, cwd=folder, url=f"redis://ada:wr0ng@{address}")
        process = await asyncio.create_subprocess_exec(
            *(*PROGRAM, *options),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "HOLDFAST_URL": f"redis://ada:s3cret@{address}", "PYTHONPATH": str(ROOT)},
            cwd=folder,
        )
        assert process.stderr is not None
        said = b""
        while b" serves " not in said:
            said += await asyncio.wait_for(process.stderr.read(10_000), 20)
        server.kill()
        while b"could not send its heartbeat" not in said:
            said += await asyncio.wait_for(process.stderr.read(10_000), 20)
        process.send_signal(signal.SIGTERM)
        said += await asyncio.wait_for(process.stderr.read(), 20)
        assert await process.wait() == 0
    assert refused.status != 0
    assert "Traceback" not in refused.err
    assert "wr0ng" not in refused.err
    assert b"s3cret" not in said


# Options


@pytest.mark.storages("sqlite")
async def test_worker_process_imports_no_user_code(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "2", children=2)
    await scene.ask("quick", {"number": 1})
    assert {note["pid"] for note in scene.notes("imported")} == set(worker.children())


@pytest.mark.storages("sqlite")
async def test_options_set_queues_name_and_processes(scene: Scene) -> None:
    options = ("--queues", "relay*", "--queues", "quick", "--name", "ada", "--processes", "3", "--lease", "0.5")
    worker = await scene.worker("held:app", *options, children=3)
    await scene.app.queue("eat").enqueue({"mib": 1}, id="left")
    assert len(worker.children()) == 3
    await until(lambda: announces(scene, "ada", capacity=300, pid=worker.pid, executor="processes"))
    await until(lambda: announces(scene, "ada", queues=["quick", "relay", "relay-sync"]))
    await scene.ask("quick", {"number": 1})
    left = await scene.app.queue("eat").get("left")
    assert left is not None
    assert left.attempts == 0


async def announces(scene: Scene, name: str, **facts: object) -> bool:
    """Has a worker said this of itself?"""
    (shown,) = [worker.facts for worker in (await scene.app.stats()).workers if worker.worker == name]
    return all(shown[fact] == value for fact, value in facts.items())


@pytest.mark.storages("sqlite")
async def test_concurrency_limits_all_children_together(scene: Scene) -> None:
    worker = await scene.worker("simple:app", "--processes", "2", "--concurrency", "3", children=2)
    handles = [await scene.app.queue("nap").enqueue({"seconds": 0.1}) for _ in range(12)]
    for handle in handles:
        await handle.result(wait=10)
    going, most = 0, 0
    for note in sorted(scene.notes(), key=lambda note: note["at"]):
        going += 1 if note["what"] == "nap" else -1
        most = max(most, going)
    assert most == 3
    assert {note["pid"] for note in scene.notes("nap")} == set(worker.children())


@pytest.mark.storages("sqlite")
async def test_inline_runs_jobs_in_the_worker_itself(scene: Scene) -> None:
    worker = scene.start("held:app", "--inline")
    assert await scene.ask("quick", {"number": 1}) == [1, worker.pid]
    assert worker.children() == []


@pytest.mark.storages("sqlite")
async def test_child_is_replaced_after_max_jobs_without_effect_on_jobs(scene: Scene) -> None:
    await scene.worker("held:app", "--processes", "1", "--max-jobs", "5")
    used: list[int] = []
    async with asyncio.timeout(20):
        while len(set(used)) < 3:
            used.append((await scene.ask("quick", {"number": 1}))[1])
    changes = sum(pid != before for before, pid in itertools.pairwise(used))
    assert changes == 2  # One that was replaced gets nothing more.
    assert min(used.count(pid) for pid in set(used[:-1])) >= 5
    totals = (await scene.app.queue("quick").stats()).totals
    assert totals["completed"] == len(used)


@pytest.mark.storages("sqlite")
async def test_child_above_max_memory_is_replaced_without_effect_on_jobs(scene: Scene) -> None:
    worker = await scene.worker("held:app", "--processes", "1", "--max-memory", "200M")
    held = await scene.app.queue("hold").enqueue({"gate": "go"})
    await scene.noted("began")
    (old,) = worker.children()
    assert await scene.ask("eat", {"mib": 1}) == old
    assert await scene.ask("eat", {"mib": 250}) == old
    await until(lambda: "MiB in memory" in worker.text() and worker.text().count(" is ready") == 2)
    assert await scene.ask("eat", {"mib": 1}) != old
    (scene.folder / "go").touch()
    assert await held.result(wait=10) == [1, 0, 0, 0]
    await until(lambda: len(worker.children()) == 1 and old not in worker.children())


async def test_burst_runs_ready_jobs_and_ends(scene: Scene) -> None:
    handles = [await scene.app.queue("quick").enqueue({"number": number}) for number in range(300)]
    later = await scene.app.queue("quick").enqueue({"number": 300}, delay=3600)
    worker = scene.start("held:app", "--burst", "--processes", "2")
    assert await worker.exited(20) == 0
    assert [(await handle.result(wait=0))[0] for handle in handles] == list(range(300))
    assert await later.state() == "waiting"


@pytest.mark.storages("sqlite")
async def test_burst_ends_after_the_number_of_runs_of_the_option(scene: Scene) -> None:
    for number in range(40):
        await scene.app.queue("quick").enqueue({"number": number})
    worker = scene.start("held:app", "--burst", "--processes", "2", "--max-burst-jobs", "25")
    assert await worker.exited(20) == 0
    stats = await scene.app.queue("quick").stats()
    assert (stats.totals["completed"], stats.ready, stats.running) == (25, 15, 0)


@pytest.mark.storages("sqlite")
async def test_log_lines_are_json_if_requested(scene: Scene) -> None:
    await scene.app.queue("quick").enqueue({"number": 7}, id="seven")
    await scene.app.queue("raise").enqueue({"message": "no luck"}, id="luckless")
    bursts = [
        scene.start("held:app", "--burst", "--log-format", "json", "--processes", "1"),
        scene.start("simple:app", "--burst", "--log-format", "json", "--processes", "1", "--queues", "raise"),
    ]
    lines: list[dict[str, Any]] = []
    for worker in bursts:
        assert await worker.exited(20) == 0
        lines += [json.loads(line) for line in worker.text().splitlines()]
    assert all({"at", "level", "logger", "message"} <= line.keys() for line in lines)
    events = {line["id"]: line for line in lines if "event" in line and not line["queue"].endswith("/failed")}
    assert (events["seven"]["event"], events["seven"]["level"]) == ("completed", "info")
    assert (events["luckless"]["event"], events["luckless"]["error"]) == ("failed", "ValueError")


@pytest.mark.storages("sqlite")
async def test_log_level_omits_lower_messages(scene: Scene) -> None:
    await scene.app.queue("add").enqueue({"a": 1, "b": 1})
    await scene.app.queue("raise").enqueue({"message": "no luck"})
    started: dict[str, WorkerProcess] = {
        level: scene.start("simple:app", "--burst", "--processes", "1", "--queues", queue, "--log-level", level)
        for level, queue in (("warning", "raise"), ("error", "add"))
    }
    for worker in started.values():
        assert await worker.exited(20) == 0
    assert "INFO" not in started["warning"].text()
    assert "no luck" in started["warning"].text()
    assert started["error"].text() == ""
