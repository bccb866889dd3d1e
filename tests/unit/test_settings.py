"""Which storage a program uses when its code does not say: the environment, pyproject.toml, the default."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from holdfast import Holdfast, OptionError
from holdfast._client.app import WorkerOptions
from holdfast._client.settings import DEFAULT_NAMESPACE, Settings, find_settings


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, which is the current folder of a program without variables."""
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.delenv("HOLDFAST_NAMESPACE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")  # No file of a parent folder counts.
    return tmp_path


def write(project: Path, **values: str) -> Path:
    file = project / "pyproject.toml"
    lines = [f'{name} = "{value}"\n' for name, value in values.items()]
    file.write_text("[tool.holdfast]\n" + "".join(lines))
    return file


def chosen(settings: Settings) -> tuple[str, str, bool]:
    return settings.url, settings.namespace, settings.is_default


def test_argument_precedes_variable_and_variable_precedes_project(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(find_settings()) == ("sqlite:///holdfast.db", DEFAULT_NAMESPACE, True)
    write(project, url="redis://project", namespace="from-project")
    assert chosen(find_settings()) == ("redis://project", "from-project", False)
    monkeypatch.setenv("HOLDFAST_URL", "redis://variable")
    monkeypatch.setenv("HOLDFAST_NAMESPACE", "from-variable")
    assert chosen(find_settings()) == ("redis://variable", "from-variable", False)
    assert chosen(find_settings("redis://argument", "given")) == ("redis://argument", "given", False)
    monkeypatch.setenv("HOLDFAST_URL", "")
    assert chosen(find_settings()) == ("redis://project", "from-variable", False)


def test_app_uses_the_settings_of_the_project(project: Path) -> None:
    write(project, url="sqlite:///from-project.db", namespace="shop")
    (project / "web").mkdir()
    os.chdir(project / "web")
    app = Holdfast[None]()
    assert (app._session.url, app._session.namespace) == (f"sqlite:///{project}/from-project.db", "shop")
    assert "HOLDFAST_URL" not in os.environ


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("sqlite:///jobs.db?synchronous=full", "sqlite:///{folder}/jobs.db?synchronous=full"),
        ("sqlite:////srv/jobs.db", "sqlite:////srv/jobs.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("sqlite:///", "sqlite:///"),
        ("redis://host/0", "redis://host/0"),
    ],
)
def test_relative_file_is_beside_the_settings_file(project: Path, written: str, read: str) -> None:
    write(project, url=written)
    assert find_settings().url == read.format(folder=project)


def test_relative_file_in_a_folder_with_odd_characters(project: Path) -> None:
    folder = project / "50% of #1?"
    folder.mkdir()
    write(folder, url="sqlite:///jobs.db")
    os.chdir(folder)
    assert find_settings().missing_file() == folder / "jobs.db"


def test_file_that_every_user_may_write_is_ignored(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(project, url="redis://attacker")
    file.chmod(0o646)
    assert find_settings().is_default
    assert caplog.messages == [f"ignored [tool.holdfast] in {file}: every user may write to it"]


def test_file_of_another_user_is_ignored(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(project, url="redis://attacker")
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    if file.stat().st_uid == 0:
        assert not find_settings().is_default  # A file of root is trusted.
        os.chown(file, 12_345, -1)
    assert find_settings().is_default
    assert caplog.messages == [f"ignored [tool.holdfast] in {file}: another user owns it"]


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(54_321)
    yield
    os.seteuid(before)


@pytest.mark.parametrize("unreadable", ["pyproject.toml", "."])
def test_file_that_may_not_be_read_is_ignored(
    project: Path, unreadable: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(project, url="redis://project")
    (project / unreadable).chmod(0)
    request.addfinalizer(lambda: (project / unreadable).chmod(0o700))
    request.getfixturevalue("ordinary_user")
    assert find_settings("redis://argument").url == "redis://argument"
    assert caplog.messages == [f"ignored {file}: this user may not read it (Permission denied)"]


def test_ignored_file_without_settings_is_not_reported(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = project / "pyproject.toml"
    for text in ("[project]\n", "[tool.holdfast\n"):
        file.write_text(text)
        file.chmod(0o666)
        assert find_settings().is_default
    assert caplog.messages == []


def test_nearest_file_decides_also_without_settings(project: Path) -> None:
    write(project, url="redis://project")
    (project / "inner").mkdir()
    (project / "inner" / "pyproject.toml").write_text("[project]\n")
    os.chdir(project / "inner")
    assert find_settings().is_default


def test_invalid_url_of_the_project_names_its_file(project: Path) -> None:
    file = write(project, url="nosuch://user:hunter2@host")
    with pytest.raises(OptionError, match="has an unknown scheme") as raised:
        Holdfast()
    assert str(raised.value).startswith(f"{file}: ")
    assert "hunter2" not in str(raised.value)


async def test_default_file_is_named_in_one_warning(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    app = Holdfast[None]()
    for _ in range(2):
        async with app:
            pass
    async with Holdfast("sqlite:///chosen.db"):
        pass
    (message,) = caplog.messages
    assert message.startswith(f"no storage is chosen, so the jobs are in {project}/holdfast.db")


def test_run_worker_has_the_options_of_worker() -> None:
    parameters = inspect.signature(Holdfast.worker, eval_str=True).parameters.values()
    keywords = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert get_type_hints(WorkerOptions) == keywords
