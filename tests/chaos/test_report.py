"""What a run has shown, and the history that it is taken from."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import msgspec
import pytest

from chaos import history, report
from chaos.checker import PROMISES
from chaos.setting import HISTORY
from tests.chaos.forged import Tale, good

# The report


def shard(storage: str = "valkey", seed: int = 1) -> report.Shard:
    return report.Shard(storage=storage, server="8.1", seed=seed, seconds=60, commit="abc", python="3.12")


def whole(tale: Tale | None = None, storage: str = "valkey", seed: int = 1) -> report.Report:
    """As if every fault had met something, and every handler had run."""
    made = report.of((tale or good()).checked(), shard(storage, seed))
    faults = report.FAULTS["sqlite" if storage == "sqlite" else "server"]
    made.faults = dict.fromkeys(faults, 2)
    made.hits = dict.fromkeys(faults, 1)
    made.kinds |= dict.fromkeys(report.HANDLERS, 1)
    return made


def broken() -> Tale:
    tale = good()
    tale.kept["done"].state = "waiting"
    return tale


def test_a_report_is_green_if_nothing_is_wrong_and_everything_was_met() -> None:
    made = whole()
    assert made.green
    assert made.never_hit == []
    assert made.verdict.startswith("GREEN: 8 jobs, 11 runs, 28 faults")


def test_a_report_is_red_if_a_promise_was_broken_or_not_checked_or_a_fault_met_nothing() -> None:
    made = whole(broken())
    assert not made.green
    assert made.verdict == "RED: 8 jobs, 11 runs: no loss 1"
    made = whole()
    made.hits["silence"] = 0
    del made.kinds["poison"]
    assert made.never_hit == ["silence", "handler: poison"]
    assert not made.green
    assert made.verdict.endswith("never hit: silence, handler: poison")
    made = whole()
    made.checks["order"] = 0
    assert not made.green
    assert made.verdict.endswith("never checked: order")


def test_only_what_can_happen_to_a_storage_must_have_happened() -> None:
    made = whole(storage="sqlite")
    assert made.green
    del made.hits["file locked"]
    assert made.never_hit == ["file locked"]
    made.shards = [shard("redis")]
    assert "server kill" in made.never_hit
    assert "file locked" not in made.never_hit


def test_reports_add_up_and_one_that_is_red_makes_the_sum_red() -> None:
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


def test_a_report_tells_people_all_that_it_knows() -> None:
    tale = broken()
    tale.wait("question", 4.0, 3, 7.25, "WaitTimeout")
    made = whole(tale)
    made.excesses = ["worker kill: 9.00 s, beside nothing"]
    text = report.markdown(made)
    lines = text.splitlines()
    assert made.verdict in lines
    assert "| valkey | 1 | 60 | 8.1 | abc |" in lines
    assert all(any(line.startswith(f"| {promise} | ") for line in lines) for promise in PROMISES)
    assert f"| no loss | {made.checks['no loss']} | 1 |" in lines
    assert "| silence | 2 | 1 |" in lines
    assert "| worker kill | 1 |" in lines
    assert any(line.startswith("| worker kill | 1 | 4.70 | 4.70 | 4.70 | ") for line in lines)
    assert any(line.startswith("| late back from a wait | 1 | 0.25 | ") for line in lines)
    assert "- worker kill: 9.00 s, beside nothing" in lines
    assert "## no loss: broken 1 times" in lines
    assert "state='waiting'" in text


def test_percentiles_are_of_what_was_measured() -> None:
    seconds = [float(second) for second in range(1, 201)]
    assert [report.at(seconds, share) for share in (0.5, 0.99, 1)] == [100, 198, 200]
    assert [report.at([7.0], share) for share in (0.5, 0.99, 1)] == [7, 7, 7]
    assert report.at([], 0.5) == 0


# The history


@pytest.fixture
def pen(tmp_path: Path) -> history.Pen:
    return history.Pen(tmp_path)


def test_what_is_written_is_read_as_it_was(pen: history.Pen, tmp_path: Path) -> None:
    lines = good().lines()
    for line in lines:
        pen.write(line)
    assert list(history.read(tmp_path)) == lines


def test_a_line_has_its_time_and_its_process(pen: history.Pen, tmp_path: Path) -> None:
    before = time.monotonic()
    pen.write(history.Stalled(queue="work", id="a"))
    (line,) = history.read(tmp_path)
    assert before <= line.at <= time.monotonic()
    assert line.pid == os.getpid()
    assert (pen.number(), pen.number()) == (1, 2)


def test_a_line_that_was_cut_off_by_a_kill_is_left_out(pen: history.Pen, tmp_path: Path) -> None:
    for name in "ab":
        pen.write(history.Stalled(queue="work", id=name))
    (file,) = tmp_path.glob("*.jsonl")
    text = file.read_bytes()
    second = text.index(b"\n") + 1
    for length in range(second, len(text)):
        file.write_bytes(text[:length])
        assert [line.id for line in history.read(tmp_path)] == ["a"], length
    file.write_bytes(text)
    assert [line.id for line in history.read(tmp_path)] == ["a", "b"]


def test_a_line_that_is_damaged_in_the_middle_is_not_left_out(pen: history.Pen, tmp_path: Path) -> None:
    pen.write(history.Stalled(queue="work", id="a"))
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(b'{"what":"stal\n' + file.read_bytes())
    with pytest.raises(msgspec.DecodeError):
        list(history.read(tmp_path))


def test_a_forked_child_has_a_pen_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HISTORY, str(tmp_path))
    monkeypatch.setattr(history, "_pens", {})
    history.pen().write(history.Stalled(queue="work", id="parent"))
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: history.pen().write(history.Stalled(queue="work", id="child")))
    child.start()
    child.join(10)
    assert {line.id: line.pid for line in history.read(tmp_path)} == {"parent": os.getpid(), "child": child.pid}
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
