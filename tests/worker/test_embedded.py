"""`async with app.worker(processes=…)`: a program with workers inside, whose file is also what its children import."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import ROOT, Scene

AS_FILE = ("tests/worker/embedded.py",)
AS_MODULE = ("-m", "tests.worker.embedded")


async def run(scene: Scene, *command: str, cwd: Path = ROOT, seconds: float = 40) -> tuple[int | None, str, str]:
    """Run Python: its exit status (None if it does not end), what it printed, and what it complained about."""
    process = await scene.spawn(*command, cwd=cwd)
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
        return None, out.decode(), err.decode()


async def result_of(scene: Scene, *command: str, cwd: Path = ROOT) -> dict[str, Any]:
    """What a program prints that ends well and complains about nothing."""
    status, out, err = await run(scene, *command, cwd=cwd)
    assert (status, err) == (0, "")
    said: dict[str, Any] = json.loads(out)
    return said


@pytest.mark.parametrize(
    ("command", "module"), [(AS_FILE, "embedded"), (AS_MODULE, "tests.worker.embedded")], ids=["file", "module"]
)
@pytest.mark.storages("sqlite")
async def test_program_runs_its_jobs_in_children_and_gets_their_events(
    scene: Scene, command: tuple[str, ...], module: str
) -> None:
    said = await result_of(scene, *command, "works")
    assert said["results"] == [number * number for number in range(20)]
    assert f"{module}.square" in said["queues"]
    squares = scene.notes("squares")
    assert {note["queue"] for note in squares} == {f"{module}.square"}
    assert len(squares) == 20
    assert said["pid"] not in {note["pid"] for note in squares}
    kinds = [kind for kind, _, _ in said["events"]]
    assert (kinds.count("claimed"), kinds.count("completed"), len(kinds)) == (20, 20, 40)
    assert {pid for _, _, pid in said["events"]} == {said["pid"]}
    assert scene.notes("trouble") == []


PROGRAM = """
import asyncio, json
from tests.worker.scene import make_app
app = make_app()

@app.task
async def cube(number: int) -> int:
    return number ** 3

async def main() -> None:
    async with app, app.worker(processes=1, lease=1) as worker:
        handle = await cube.enqueue(3)
        print(json.dumps({"result": await handle.result(wait=10), "queues": worker.queues}))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.storages("sqlite")
async def test_package_run_as_a_module_finds_its_own_tasks(scene: Scene, tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(PROGRAM)
    said = await result_of(scene, "-m", "shop", cwd=tmp_path)
    assert said == {"result": 27, "queues": ["shop.cube"]}


@pytest.mark.storages("sqlite")
async def test_a_program_may_import_its_app_and_need_no_guard(scene: Scene, tmp_path: Path) -> None:
    """The children import the module that has the app, not the program."""
    (tmp_path / "tasks.py").write_text(PROGRAM)
    (tmp_path / "my-program.py").write_text("import asyncio\nfrom tasks import app, main\nasyncio.run(main())\n")
    said = await result_of(scene, "my-program.py", cwd=tmp_path)
    assert said == {"result": 27, "queues": ["tasks.cube"]}


async def test_a_queue_can_be_served_and_left_at_run_time(scene: Scene) -> None:
    said = await result_of(scene, *AS_MODULE, "serves")
    assert (said["a"], said["early"]) == (["a"] * 5, "waiting")
    assert set(said["served"]) == {"serve.a", "serve.b"}
    assert said["late"] == "b"
    assert (said["short"], said["left"]) == ("completed", ["serve.a"])
    assert said["long"] == ["waiting", 0, 0, 0]
    assert 0.2 <= said["seconds"] < 4
    assert said["a again"] == "a"
    assert "no task matches 'serve.c'" in said["wrong"]


async def test_worker_leaves_nothing_after_its_block(scene: Scene) -> None:
    left = (await result_of(scene, *AS_MODULE, "rounds"))["left"]
    assert {processes for _, processes in left} == {0}
    assert len({fds for fds, _ in left[1:]}) == 1  # The first round may open what stays open.


@pytest.mark.storages("sqlite")
async def test_a_worker_that_is_cancelled_while_it_starts_leaves_nothing(scene: Scene) -> None:
    said = await result_of(scene, *AS_MODULE, "cancelled")
    assert said.pop("more files") <= 3  # The open app's receiver, and two files that SQLite keeps for later.
    assert said == {"0.0": "TimeoutError", "0.02": "TimeoutError", "0.1": "TimeoutError", "left": 0}


@pytest.mark.storages("sqlite")
async def test_spare_child_for_isolated_jobs_ends_after_idling(scene: Scene) -> None:
    status, out, err = await run(scene, *AS_MODULE, "spare")
    assert (status, err.count(" died with ")) == (0, 2)
    assert json.loads(out) == {"there": True, "left": 1}


@pytest.mark.storages("sqlite")
async def test_apps_that_children_cannot_use_are_refused(scene: Scene) -> None:
    said = await result_of(scene, *AS_MODULE, "refused")
    assert "define it at the top level of a module" in said["hidden"]
    assert "child processes cannot share memory://" in said["local"]
    assert said["children"] == 0


UNGUARDED = """
import asyncio
from tests.worker.scene import make_app, note
app = make_app()
note("imported")

@app.task(name="idle")
async def idle() -> None: ...

async def main() -> None:
    async with app, app.worker(processes=1):
        pass

asyncio.run(main())
"""


@pytest.mark.storages("sqlite")
async def test_program_without_a_main_guard_gets_an_error_and_no_endless_workers(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    status, _, err = await run(scene, "unguarded.py", cwd=tmp_path, seconds=8)
    assert status == 1
    assert "start the worker under `if __name__ == '__main__':`" in err
    assert len(scene.notes("imported")) == 2
