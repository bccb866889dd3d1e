"""The pages that one reads first are true: their programs and shell lines run, and nothing public is left out.

A block that begins with ```python is a whole program, ```py a fragment. A program's first line may name its file: then
it is only written, for a shell line to run. In a shell block, lines that begin with `$ holdfast` or `$ python` are run
in one folder, in order; one that ends in `&` goes on until the page ends. Each `# prints:` says a part of a line that
the command or program before it has to print.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import holdfast
from holdfast._core import options
from holdfast._core.lifecycle import RESULT_TTL_MS
from holdfast._core.options import PullOptions
from holdfast._core.retry_policy import BRIEF_TTL_MS
from tests import servers
from tests.app.conftest import until
from tests.policies import FAIL_HANDLER, TASK

ROOT = Path(__file__).parents[2]
CONFORMANCE = ROOT / "src" / "holdfast" / "storage" / "conformance"
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTS = re.compile(r"^# prints: (.+)$", re.MULTILINE)
COMMAND = re.compile(r"^\$ (holdfast|python)\b")


class Reader:
    """Somebody who follows a page word for word, in an empty folder."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("HOLDFAST_URL", None)
        if url is not None:
            self.environment["HOLDFAST_URL"] = url
        self.behind: list[tuple[subprocess.Popen[bytes], Path]] = []

    def run(self, args: list[str], expected: list[str]) -> None:
        done = subprocess.run(
            args, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{args}\n{done.stdout}{done.stderr}"
        for part in expected:
            assert any(part in line for line in done.stdout.splitlines()), f"{part!r} is not in\n{done.stdout}"

    def program(self, code: str, number: int) -> None:
        """A program. One that a shell line runs later is only written."""
        named = re.match(r"# (\w+\.py)\n", code)
        name = named[1] if named else f"program_{number}.py"
        (self.folder / name).write_text(code)
        if not named:
            self.run([sys.executable, name], PRINTS.findall(code))

    async def shell(self, code: str) -> None:
        lines = code.splitlines()
        assert lines[0].startswith("$ ")
        for at, line in enumerate(lines):
            if not COMMAND.match(line):
                continue
            following = lines[at + 1 :]
            end = next((n for n, other in enumerate(following) if other.startswith("$ ")), len(following))
            command, *args = shlex.split(line[2:])
            program = [sys.executable, *(["-m", "holdfast"] if command == "holdfast" else [])]
            if args[-1:] == ["&"]:
                log = self._begin([*program, *args[:-1]])
                await until(lambda log=log: " serves " in log.read_text(), 20)
            else:
                self.run([*program, *args], PRINTS.findall("\n".join(following[:end])))

    def _begin(self, args: list[str]) -> Path:
        log = self.folder / f"behind-{len(self.behind)}.log"
        with log.open("wb") as out:
            started = subprocess.Popen(args, cwd=self.folder, env=self.environment, stdout=out, stderr=out)
        self.behind.append((started, log))
        return log

    def leave(self) -> None:
        """End what goes on, as Ctrl-C does."""
        for started, log in self.behind:
            started.send_signal(signal.SIGINT)
            status = started.wait(30)
            assert status == 0, log.read_text()

    def kill(self) -> None:
        for started, _ in self.behind:
            if started.poll() is None:
                started.kill()
                started.wait(10)


@pytest.fixture(params=["sqlite", "valkey"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reader]:
    if request.param == "sqlite":
        reader = Reader(tmp_path, None)
        yield reader
    else:
        with servers.Server("valkey") as server:
            reader = Reader(tmp_path, server.url)
            yield reader
            reader.kill()
    reader.kill()


@pytest.mark.parametrize("page", ["quickstart.md", "operating.md"])
async def test_commands_of_a_page_work_as_written(reader: Reader, page: str) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert len([kind for kind, _ in blocks if kind == "sh"]) >= 2
    for number, (kind, code) in enumerate(blocks):
        if kind == "python":
            reader.program(code, number)
        else:
            await reader.shell(code)
    reader.leave()
    if page == "quickstart.md":
        assert "please check order 7 ValueError: order 7 has no total" in reader.behind[0][1].read_text()


PAGES = ["tasks.md", "results.md", "errors.md", "workers.md", "queues-and-leases.md", "testing.md", "frameworks.md"]


@pytest.mark.parametrize(
    "page", [*PAGES, "reference/guarantees.md", "reference/api.md", "reference/coming-from-python.md"]
)
def test_programs_of_a_page_print_the_shown_output(page: str, tmp_path: Path) -> None:
    programs = [code for kind, code in BLOCK.findall((DOCS / page).read_text()) if kind == "python"]
    assert programs
    for number, code in enumerate(programs):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert PRINTS.findall(code), "a program on a page says what it prints"
        Reader(folder, None).program(code, number)


# Nothing is left out


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    missing = [name for name in holdfast.__all__ if not re.search(rf"`{name}\b", page)]
    assert missing == []


PUBLIC = {
    holdfast.Holdfast: {"parts", "defer", "rehearse", "rehearsal"},  # for the rest of the package, as they say
    holdfast.Task: set[str](),
    holdfast.Handle: set[str](),
    holdfast.Queue: {"PURGED"},
    holdfast.Lease: set[str](),
    holdfast.Worker: set[str](),
    holdfast.CurrentJob: {"on_loop", "thread", "timed_out", "waiting_for"},  # for the worker
    holdfast.Stats: set[str](),
    holdfast.JobInfo: set[str](),
    holdfast.RunEvent: set[str](),
    holdfast.Execution: set[str](),
    holdfast.Failure: set[str](),
    holdfast.JobError: set[str](),
    holdfast.Update: {"resets_counts"},
}


def members(kind: type[Any]) -> set[str]:
    own = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
    fields = set(getattr(kind, "__struct_fields__", ())) | set(getattr(kind, "__dataclass_fields__", ()))
    return own | fields | {name for name in getattr(kind, "__slots__", ()) if not name.startswith("_")}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_method_and_field_is_in_the_api_reference(kind: type[Any]) -> None:
    """In the section of its class, in code."""
    page = re.sub(r"^```.*?^```$", "", (DOCS / "reference" / "api.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    section = re.search(rf"^#+ [^\n]*`{kind.__name__}`.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    code = " ".join(re.findall(r"`([^`]+)`", section[0]))
    missing = [name for name in members(kind) - PUBLIC[kind] if not re.search(rf"\b{name}\b", code)]
    assert missing == []


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("Options of a task", options.TaskOptions),
        ("Options of a request", options.UsingOptions),
        ("Options of a pulled queue", PullOptions),
    ],
)
def test_option_tables_have_exactly_the_options_of_the_code(title: str, kind: type[Any]) -> None:
    rows = options_in(title)
    assert set(rows) == set(get_type_hints(kind))


def options_in(title: str) -> dict[str, list[str]]:
    """The rows of a section's table: cells by option."""
    page = (DOCS / "reference" / "api.md").read_text()
    section = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section is not None, title
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section[1], re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows}


def test_option_table_defaults_equal_the_defaults_of_the_code() -> None:
    rows = options_in("Options of a task")
    for name in ("max_retries", "max_stalls", "max_timeouts"):
        assert rows[name][0] == str(getattr(TASK, name)), name
    for name in ("timeout", "min_backoff", "max_backoff", "failure_ttl", "cancel_grace"):
        assert rows[name][0] == f"{getattr(TASK, f'{name}_ms') // 1000:,} s", name
    result_ttl = f"{RESULT_TTL_MS // 1000:,} s; {BRIEF_TTL_MS // 1000} s if there is no result and no chosen id"
    assert rows["result_ttl"][0] == result_ttl
    changed = (FAIL_HANDLER.max_retries, FAIL_HANDLER.min_backoff_ms // 1000, FAIL_HANDLER.max_backoff_ms // 1000)
    assert "{} retries, {} s to {} s apart".format(*changed) in (DOCS / "reference" / "api.md").read_text()


def test_the_command_reference_has_every_command_and_option() -> None:
    done = subprocess.run(
        [sys.executable, "tools/cli_docs.py", "--check"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["reference/guarantees.md", "development/reliability.md"])
def test_every_test_named_by_a_page_exists(page: str) -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", (DOCS / page).read_text())
    assert len(named) > 10
    for file, test in named:
        text = (ROOT / file).read_text()
        for module in re.findall(r"from holdfast\.storage\.conformance\.(\w+) import \*", text):
            text += (CONFORMANCE / f"{module}.py").read_text()
        assert f"def {test}(" in text, f"{file}::{test}"
