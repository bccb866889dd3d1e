"""Where an app is found, and what is said when there is none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast, OptionError
from holdfast._worker.app_loader import import_app, locate_app, parse_target

Write = Callable[[str, str], None]
APP = "from holdfast import Holdfast\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules that can be imported, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("tasks:app", ("tasks", "app")),
        ("shop.tasks:app", ("shop.tasks", "app")),
        ("shop.tasks:Shop.app", ("shop.tasks", "Shop.app")),
        ("shop.tasks", ("shop.tasks", "")),
        ("shop:", ("shop", "")),
    ],
)
def test_a_target_is_a_module_and_a_name_in_it(target: str, parts: tuple[str, str]) -> None:
    assert parse_target(target) == parts


@pytest.mark.parametrize(
    "target",
    ["", ":", ":app", "shop/tasks.py", "shop-tasks:app", "shop..tasks:app", ".tasks:app", "shop:app:more", "shop:a b"],
)
def test_invalid_app_target_is_refused_with_an_example(target: str) -> None:
    with pytest.raises(OptionError, match=r"write module:name, like shop\.tasks:app"):
        parse_target(target)


def test_an_app_is_loaded_by_its_name_or_as_the_only_one(write: Write) -> None:
    write("shop/__init__.py", "")
    write("shop/tasks.py", APP + "class Shop:\n    app = Holdfast('memory://a')\n")
    write("lone.py", APP + "the_app = alias = Holdfast('memory://b')\n")
    assert isinstance(import_app("shop.tasks:Shop.app", Holdfast), Holdfast)
    assert import_app("lone", Holdfast) is import_app("lone:the_app", Holdfast)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere:app", "there is no module 'nowhere' here: is this the right folder?"),
        ("two.nowhere:app", "there is no module 'two.nowhere' here"),
        ("two:wrong", "module two has no 'wrong'; it has two:first, two:second"),
        ("two:first.more", "module two has no 'first.more'"),
        ("two:number", "two:number is 7, not a Holdfast app; it has two:first, two:second"),
        ("two", "two does not say which app: write two:name; it has two:first, two:second"),
        ("empty", "empty does not say which app: write empty:name; it has no app"),
        ("empty:app", "module empty has no 'app'; it has no app"),
    ],
)
def test_missing_module_or_name_is_refused_with_the_existing_names(write: Write, target: str, says: str) -> None:
    write("two/__init__.py", APP + "first = Holdfast('memory://a')\nsecond = Holdfast('memory://b')\nnumber = 7\n")
    write("empty.py", "")
    with pytest.raises(OptionError) as raised:
        import_app(target, Holdfast)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import not_installed_here\n", "No module named 'not_installed_here'"),
        ("def f():\n    return 1 / 0\nf()\n", "ZeroDivisionError"),
        ("app = = 1\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("import broken\nbroken.more\n", "AttributeError"),
    ],
)
def test_failing_module_is_shown_with_the_lines_of_the_user(write: Write, text: str, says: str) -> None:
    write("broken.py", text)
    with pytest.raises(OptionError) as raised:
        import_app("broken:app", Holdfast)
    told = str(raised.value)
    assert told.startswith("module broken could not be imported:\n")
    assert says in told
    assert "broken.py" in told
    assert "importlib" not in told
    assert "app_loader.py" not in told


def test_an_app_is_found_in_the_module_that_has_it(write: Write) -> None:
    write("place.py", APP + "app = Holdfast('memory://a')\n")
    import place  # type: ignore[import-not-found]

    assert locate_app(place.app) == "place:app"
    assert import_app(locate_app(place.app), Holdfast) is place.app


def test_app_in_no_module_is_refused() -> None:
    hidden = Holdfast("memory://a")
    with pytest.raises(OptionError, match="define it at the top level of a module, or omit processes"):
        locate_app(hidden)


def test_a_module_is_preferred_to_the_program_that_imported_the_app(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that imports a program runs it once more; a module is made to be imported."""
    write("place.py", APP + "app = Holdfast('memory://a')\n")
    import place

    program = types.ModuleType("__main__")
    program.__file__ = "/somewhere/script.py"
    program.imported = place.app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert locate_app(place.app) == "place:app"


def test_an_app_of_a_program_is_found_by_the_name_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = "/somewhere/script.py"
    program.app = app = Holdfast("memory://a")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert locate_app(app) == "script:app"


def test_an_app_of_a_session_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = types.ModuleType("__main__")
    session.app = app = Holdfast("memory://a")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(OptionError, match="an interactive session: put it into a module"):
        locate_app(app)
