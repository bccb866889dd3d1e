"""Changed source files are noticed: --reload of a worker."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from holdfast._worker import source_watch
from holdfast._worker.source_watch import next_change, source_folders


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_watch, "POLL_S", 0.01)


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, file: Path | None) -> None:
    module = ModuleType(name)
    module.__file__ = None if file is None else str(file)
    monkeypatch.setitem(sys.modules, name, module)


def test_source_folders_are_those_of_modules_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "shop"
    project.mkdir()
    monkeypatch.chdir(project)
    loaded(monkeypatch, "w_app", project / "app.py")
    loaded(monkeypatch, "w_tasks", project / "tasks" / "__init__.py")
    loaded(monkeypatch, "w_installed", project / ".venv" / "lib" / "site-packages" / "lib.py")
    loaded(monkeypatch, "w_beside", tmp_path / "shop-old" / "app.py")
    loaded(monkeypatch, "w_built_in", None)
    assert source_folders() == [str(project), str(project / "tasks")]


def test_failed_import_adds_the_folders_that_it_went_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = tmp_path / "w_outer" / "__init__.py", tmp_path / "w_inner" / "part.py"
    for file, text in ((outer, "import w_inner.part"), (inner, "this is no Python")):
        file.parent.mkdir()
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SyntaxError) as caught:
        importlib.import_module("w_outer")
    caught.value.__cause__ = caught.value
    assert {str(outer.parent), str(inner.parent)} <= set(source_folders(caught.value))


def touch(file: Path) -> None:
    file.touch()
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("change", ["edit", "add", "delete"])
async def test_changes_of_python_files_are_noticed_once(tmp_path: Path, change: str) -> None:
    app, other = tmp_path / "app.py", tmp_path / "other.py"
    app.touch()
    changes: dict[str, tuple[Path, Callable[[], None]]] = {
        "edit": (app, lambda: touch(app)),
        "add": (other, other.touch),
        "delete": (app, app.unlink),
    }
    other_file = tmp_path / "keep.py"
    other_file.touch()
    seen: dict[str, dict[str, int]] = {}
    noticing = asyncio.create_task(next_change(lambda: [str(tmp_path)], seen))
    while not seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".#app.py").symlink_to("nowhere")
    await asyncio.sleep(0.05)
    assert not noticing.done()
    file, make = changes[change]
    make()
    assert await asyncio.wait_for(noticing, 5) == str(file)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(next_change(lambda: [str(tmp_path)], seen), 0.1)


async def test_a_folder_that_is_new_is_not_a_change(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "app.py").touch()
    folders = [str(tmp_path / "one")]
    seen: dict[str, dict[str, int]] = {}
    noticing = asyncio.create_task(next_change(lambda: folders, seen))
    while not seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    folders.append(str(tmp_path / "two"))
    while len(seen) < 2 and not noticing.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not noticing.done()
    touch(tmp_path / "two" / "app.py")
    assert await asyncio.wait_for(noticing, 5) == str(tmp_path / "two" / "app.py")


async def test_only_file_of_a_folder_may_be_absent_at_one_look(tmp_path: Path) -> None:
    app, folder = tmp_path / "app.py", str(tmp_path)
    app.touch()
    seen: dict[str, dict[str, int]] = {}
    noticing = asyncio.create_task(next_change(lambda: [folder], seen))
    while not seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    app.unlink()
    assert await asyncio.wait_for(noticing, 5) == str(app)
    assert seen == {folder: {}}
    noticing = asyncio.create_task(next_change(lambda: [folder], seen))
    await asyncio.sleep(0.05)
    app.touch()
    assert await asyncio.wait_for(noticing, 5) == str(app)


async def test_file_in_a_folder_that_was_missing_is_a_change(tmp_path: Path) -> None:
    file = tmp_path / "shop" / "tasks.py"
    seen: dict[str, dict[str, int]] = {}
    noticing = asyncio.create_task(next_change(lambda: [str(file.parent)], seen))
    while not seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    file.parent.mkdir()
    file.touch()
    assert await asyncio.wait_for(noticing, 5) == str(file)
