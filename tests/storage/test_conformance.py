"""The conformance suite, as the author of another storage runs it: from an empty folder, with the installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.storage import conformance

CONFTEST = """
import pytest
from my_storage import MyStorage
from holdfast.storage.conformance import clock, stage

class MyHarness:
    def __init__(self):
        self.storages = {}

    def open(self, clock, folder):
        return self.storages.setdefault(folder, MyStorage(clock=clock))

@pytest.fixture
def harness():
    return MyHarness()
"""

CORRECT = """
from holdfast.storage.local.memory import MemoryStorage

class MyStorage(MemoryStorage):
    pass
"""

WRONG = """
from msgspec.structs import replace
from holdfast.storage.local.memory import MemoryStorage

class MyStorage(MemoryStorage):
    async def claim(self, queue, limit, **options):
        claim = await super().claim(queue, limit, **options)
        return replace(claim, jobs=claim.jobs[::-1])
"""


def run_suite(folder: Path, storage: str, modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "my_storage.py").write_text(storage)
    for module in modules:
        (folder / f"test_{module}.py").write_text(f"from holdfast.storage.conformance.{module} import *\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.suite("usual")
def test_correct_storage_of_another_author_passes_every_module(tmp_path: Path) -> None:
    done = run_suite(tmp_path, CORRECT, conformance.MODULES)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 900


@pytest.mark.suite("usual")
def test_storage_that_claims_in_the_wrong_order_fails(tmp_path: Path) -> None:
    done = run_suite(tmp_path, WRONG, ("order",))
    assert done.returncode == 1
    assert "FAILED test_order.py::test_jobs_of_one_batch_go_in_its_order" in done.stdout, done.stdout
    assert "At index 0 diff" in done.stdout, "the asserts of the suite are not rewritten"


def test_every_module_with_tests_is_listed() -> None:
    folder = Path(conformance.__file__).parent
    found = {path.stem for path in folder.glob("*.py") if "\nasync def test_" in path.read_text()}
    assert found == set(conformance.MODULES)


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_package_does_not_import_the_suite() -> None:
    done = run_python(
        "import sys, holdfast, holdfast.storage, holdfast.testing;"
        "print([name for name in sys.modules if 'conformance' in name or name == 'pytest'])"
    )
    assert done.stdout == "[]\n"


def test_without_pytest_the_suite_says_what_to_install() -> None:
    done = run_python("import sys; sys.modules['pytest'] = None; import holdfast.storage.conformance")
    assert done.stderr.endswith(
        "ImportError: holdfast.storage.conformance needs pytest: pip install pytest pytest-asyncio\n"
    )
