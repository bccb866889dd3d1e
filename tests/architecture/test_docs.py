"""The generated pages are what the code says, and every invariant that the audit knows has its row."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_diagram_and_table_are_generated_from_the_transition_table() -> None:
    command = [sys.executable, "tools/docs.py", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def test_every_kind_of_problem_is_explained() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src/holdfast/storage").rglob("*.py"))
    kinds = set(re.findall(r'Problem\("(\w+)"', source))
    explained = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/development/invariants.md").read_text(), re.MULTILINE))
    assert kinds == explained


def test_every_link_between_pages_resolves() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md", ROOT / "benchmarks/README.md"]
    broken: list[str] = []
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", page.read_text()):
            there = page.parent / target if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{page.relative_to(ROOT)} links to {target}#{anchor}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    listed = [page for page in pages if page != "README.md" and "decisions/" not in page]
    assert [page for page in listed if f"({page})" not in index] == []


def test_readme_program_is_short_and_prints_the_shown_output(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert said
    (tmp_path / "jobs.py").write_text(code)
    done = subprocess.run([sys.executable, "jobs.py"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines() == said, done.stderr
