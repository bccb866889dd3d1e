"""Workers whose handlers fail in random ways, while whole workers are killed: `./dev chaos --profile handlers`.

Handlers raise, hang, spin and crash by chance at each run, in all queues. No other fault is injected, so the checker
accepts only the causes that the handlers and the kills explain. `HOLDFAST_FUZZ=120` is the length in seconds on each
storage; with `-s` the report is printed. The default is 8 seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from chaos.report import Report

SECONDS = float(os.environ.get("HOLDFAST_FUZZ", "8"))
ROOT = Path(__file__).parents[2]


@pytest.mark.suite("slow")
@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("storage", ["sqlite", "valkey"])
def test_every_rule_holds_for_random_handlers_and_worker_kills(storage: str, tmp_path: Path) -> None:
    options = ("--profile", "handlers", "--storage", storage, "--seconds", str(SECONDS), "--out", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "chaos", *options], cwd=ROOT, capture_output=True, text=True)
    (file,) = tmp_path.glob("*.json")
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    print(done.stdout)
    assert report.wrong_counts == {}, done.stdout
    assert report.unchecked == []
    assert report.faults["worker kill"] > 0
