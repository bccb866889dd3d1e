"""What a run has shown, and the history that it is taken from."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import msgspec
import pytest

from chaos import history, report
from chaos.settings import HISTORY, PROFILES
from chaos.verdict import RULES
from tests.chaos.forged import Draft, good

# The report


def shard(storage: str = "valkey", seed: int = 1) -> report.Shard:
    return report.Shard(storage=storage, server="8.1", seed=seed, seconds=60, commit="abc", python="3.12")


def whole(draft: Draft | None = None, storage: str = "valkey", seed: int = 1) -> report.Report:
    """As if every fault had met something, and every handler had run."""
    made = report.of((draft or good()).checked(), shard(storage, seed))
    faults = report.FAULTS["sqlite" if storage == "sqlite" else "server"]
    made.faults = dict.fromkeys(faults, 2)
    made.hits = dict.fromkeys(faults, 1)
    made.kinds |= dict.fromkeys(PROFILES["all"].kinds, 1)
    return made


def broken() -> Draft:
    draft = good()
    draft.kept["done"].state = "waiting"
    return draft


def test_report_is_green_without_errors_and_with_every_fault_hit() -> None:
    made = whole()
    assert made.green
    assert made.never_hit == []
    assert made.verdict.startswith("GREEN: 8 jobs, 11 runs, 28 faults")


def test_report_is_red_for_a_broken_or_unchecked_rule_or_a_fault_without_hit() -> None:
    made = whole(broken())
    assert not made.green
    assert made.verdict == "RED: 8 jobs, 11 runs: no loss 1"
    made = whole()
    made.hits["silence"] = 0
    del made.kinds["poison"]
    assert made.never_hit == ["silence", "handler: poison"]
    assert not made.green
    assert made.verdict.endswith("without an effect: silence, handler: poison")
    made = whole()
    made.checks["order"] = 0
    assert not made.green
    assert made.verdict.endswith("not checked: order")


def test_only_faults_possible_for_a_storage_are_required() -> None:
    made = whole(storage="sqlite")
    assert made.green
    del made.hits["file locked"]
    assert made.never_hit == ["file locked"]
    made.shards = [shard("redis")]
    assert "server kill" in made.never_hit
    assert "file locked" not in made.never_hit


def test_sum_of_reports_is_red_if_one_is_red() -> None:
    first, second = whole(), whole(broken(), storage="sqlite", seed=2)
    both = report.merged([first, second])
    assert [each.seed for each in both.shards] == [1, 2]
    assert both.counts["jobs"] == 16
    assert both.checks["one end"] == first.checks["one end"] + second.checks["one end"]
    assert both.wrong == second.wrong
    assert both.wrong_counts["no loss"] == 1
    assert both.duplicates == {"worker kill": 2}
    assert len(both.recoveries["worker kill"]) == 2
    assert both.never_hit == []
    assert not both.green
    assert msgspec.json.decode(msgspec.json.encode(both), type=report.Report) == both


def test_report_text_contains_every_field() -> None:
    draft = broken()
    draft.wait("question", 4.0, 3, 7.25, "WaitTimeout")
    made = whole(draft)
    made.excesses = ["worker kill: 9.00 s, beside nothing"]
    text = report.markdown(made)
    lines = text.splitlines()
    assert made.verdict in lines
    assert "| valkey | 1 | 60 | 8.1 | abc |" in lines
    assert all(any(line.startswith(f"| {rule} | ") for line in lines) for rule in RULES)
    assert f"| no loss | {made.checks['no loss']} | 1 |" in lines
    assert "| silence | 2 | 1 |" in lines
    assert "| worker kill | 1 |" in lines
    assert any(line.startswith("| worker kill | 1 | 4.70 | 4.70 | 4.70 | ") for line in lines)
    assert any(line.startswith("| late after a timeout | 1 | 0.25 | ") for line in lines)
    assert "- worker kill: 9.00 s, beside nothing" in lines
    assert "## no loss: broken 1 times" in lines
    assert "state='waiting'" in text


def test_percentiles_are_taken_from_the_measured_values() -> None:
    seconds = [float(second) for second in range(1, 201)]
    assert [report.at(seconds, share) for share in (0.5, 0.99, 1)] == [100, 198, 200]
    assert [report.at([7.0], share) for share in (0.5, 0.99, 1)] == [7, 7, 7]
    assert report.at([], 0.5) == 0


# The history


@pytest.fixture
def writer(tmp_path: Path) -> history.Writer:
    return history.Writer(tmp_path)


def test_history_lines_are_read_as_written(writer: history.Writer, tmp_path: Path) -> None:
    lines = good().lines()
    for line in lines:
        writer.write(line)
    assert list(history.read(tmp_path)) == lines


def test_history_line_has_its_time_and_process(writer: history.Writer, tmp_path: Path) -> None:
    before = time.monotonic()
    writer.write(history.Stalled(queue="work", id="a"))
    (line,) = history.read(tmp_path)
    assert before <= line.at <= time.monotonic()
    assert line.pid == os.getpid()
    assert (writer.number(), writer.number()) == (1, 2)


def test_history_line_cut_off_by_a_kill_is_skipped(writer: history.Writer, tmp_path: Path) -> None:
    for name in "ab":
        writer.write(history.Stalled(queue="work", id=name))
    (file,) = tmp_path.glob("*.jsonl")
    text = file.read_bytes()
    second = text.index(b"\n") + 1
    for length in range(second, len(text)):
        file.write_bytes(text[:length])
        assert [line.id for line in history.read(tmp_path)] == ["a"], length
    file.write_bytes(text)
    assert [line.id for line in history.read(tmp_path)] == ["a", "b"]


def test_history_line_damaged_in_the_middle_is_an_error(writer: history.Writer, tmp_path: Path) -> None:
    writer.write(history.Stalled(queue="work", id="a"))
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(b'{"what":"stal\n' + file.read_bytes())
    with pytest.raises(msgspec.DecodeError):
        list(history.read(tmp_path))


def test_forked_child_writes_its_own_history_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HISTORY, str(tmp_path))
    monkeypatch.setattr(history, "_writers", {})
    history.writer().write(history.Stalled(queue="work", id="parent"))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: history.writer().write(history.Stalled(queue="work", id="child")))
    child.start()
    child.join(10)
    assert {line.id: line.pid for line in history.read(tmp_path)} == {"parent": os.getpid(), "child": child.pid}
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
