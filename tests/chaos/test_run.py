"""A few seconds of chaos, so that the harness itself stays whole. `./dev chaos` is the real thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from chaos.report import Report

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(150)
def test_short_run_breaks_no_rule_and_writes_its_report(tmp_path: Path) -> None:
    options = ("--storage", "valkey", "--seconds", "6", "--seed", "1", "--out", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "chaos", *options], cwd=ROOT, capture_output=True, text=True)
    report = msgspec.json.decode((tmp_path / "valkey-1.json").read_bytes(), type=Report)
    assert report.wrong_counts == {}, done.stdout
    assert report.counts["jobs"] > 300
    assert sum(report.hits.values()) > 10
    *_, verdict = done.stdout.splitlines()
    assert verdict == report.verdict
    assert done.returncode == (0 if verdict.startswith("GREEN") else 1)
    assert (tmp_path / "valkey-1.md").read_text().startswith("# Chaos")
    merged = subprocess.run(
        [sys.executable, "-m", "chaos", "merge", *[str(tmp_path / "valkey-1.json")] * 2, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert merged.returncode == done.returncode
    both = msgspec.json.decode((tmp_path / "merged.json").read_bytes(), type=Report)
    assert both.counts["jobs"] == 2 * report.counts["jobs"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seconds", "5", "--jobs", "5"), "pass only one"),
        (("--storage", "mysql"), "'mysql' is not one of"),
        (("merge", "pyproject.toml"), "not a report of a run"),
        (("check", "docs"), "not the folder of a finished run"),
        (("plant", "nothing"), "unknown bugs: nothing"),
    ],
)
def test_command_line_mistake_is_reported_without_a_traceback(options: tuple[str, ...], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "chaos", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
