"""Mutation run over the lifecycle: makes each small change that cosmic-ray knows and checks that a test fails.

It works on copies of the tree, one per CPU, and prints the mutants that survive. Each needs a new test or, if it
changes no behaviour, a row with the reason in the page about mutations.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE = "src/holdfast/_core/lifecycle.py"
TESTS = "-m pytest -x -q -p no:cacheprovider --timeout 30 --storage memory tests/unit tests/storage"
LEFT_OUT = ("test_agreement", "test_processes", "test_coalescing", "test_refusals", "test_repair")
"""Test files that are slow, or that test something else."""
CONFIG = """
[cosmic-ray]
module-path = ["{module}"]
timeout = 120.0
excluded-modules = []
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
"""
ANNOTATIONS = "core/ReplaceBinaryOperator_BitOr_%"
"""The module has `|` only in annotations, where a change has no effect."""


def main() -> int:
    shards = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="holdfast-mutate-") as scratch, ThreadPoolExecutor(shards) as pool:
        folders = [Path(scratch) / str(n) for n in range(shards)]
        found = list(pool.map(lambda folder: run(folder, folders.index(folder), shards), folders))
    total, survivors = sum(n for n, _ in found), [text for _, texts in found for text in texts]
    for text in survivors:
        print(text)
    print(f"{total} mutants, {total - len(survivors)} killed, {len(survivors)} survived")
    return 0


def run(folder: Path, shard: int, shards: int) -> tuple[int, list[str]]:
    """Run the mutants of one shard. Returns their number and the diffs of the survivors."""
    ignored = shutil.ignore_patterns(".venv*", ".redis-py", ".git", "__pycache__", ".hypothesis", "*.db")
    shutil.copytree(ROOT, folder, ignore=ignored)
    left_out = "".join(f" --ignore tests/storage/{name}.py" for name in LEFT_OUT)
    command = f"{sys.executable} {TESTS}{left_out}"
    (folder / "mutate.toml").write_text(CONFIG.format(module=MODULE, command=command))
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    tool = str(Path(sys.executable).parent / "cosmic-ray")

    def cosmic_ray(*words: str) -> None:
        subprocess.run([tool, *words], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)

    subprocess.run([sys.executable, *command.split()[1:]], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    cosmic_ray("init", "mutate.toml", "mutants.sqlite")
    with sqlite3.connect(folder / "mutants.sqlite") as db:
        db.execute("DELETE FROM mutation_specs WHERE operator_name LIKE ?", (ANNOTATIONS,))
        db.execute("DELETE FROM mutation_specs WHERE rowid % ? != ?", (shards, shard))
        db.execute("DELETE FROM work_items WHERE job_id NOT IN (SELECT job_id FROM mutation_specs)")
    cosmic_ray("exec", "mutate.toml", "mutants.sqlite")
    with sqlite3.connect(folder / "mutants.sqlite") as db:
        (total,) = db.execute("SELECT count(*) FROM work_results").fetchone()
        rows = db.execute("SELECT diff FROM work_results WHERE test_outcome = 'SURVIVED'").fetchall()
    db.close()
    return total, [diff for (diff,) in rows]


if __name__ == "__main__":
    sys.exit(main())
