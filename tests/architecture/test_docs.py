"""The generated pages are what the code says, and every invariant that the audit knows has its row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_diagram_and_the_table_are_drawn_from_the_machine() -> None:
    command = [sys.executable, "tools/docs.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def test_every_kind_of_problem_is_explained() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/holdfast/storage").rglob("*.py"))
    kinds = set(re.findall(r'Problem\("(\w+)"', source))
    explained = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/development/invariants.md").read_text(), re.MULTILINE))
    assert kinds == explained


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_code_in_the_readme_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    for number, code in enumerate(programs):
        said = re.findall(r"print\(.*\)  # (.*)", code)
        assert said
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "jobs.py").write_text(code)
        done = subprocess.run([sys.executable, "jobs.py"], cwd=folder, check=False, capture_output=True, text=True)
        assert sorted(done.stdout.splitlines()) == sorted(said), done.stderr


def test_the_first_program_in_the_readme_is_short() -> None:
    hello, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in hello.splitlines() if line.strip()]) <= 15
