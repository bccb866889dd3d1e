"""What commands print: columns, lengths of time, values as JSON, and text that moves no cursor."""

from __future__ import annotations

import io
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast._core.jobs import State
from holdfast._core.text import escape_control
from holdfast.cli.output import BulkProgress, format_duration, format_moment, plain, say, say_json, table
from holdfast.errors import JobError

HOSTILE = "a\x1b[2J\x07\x9b31m\u202e\r\x7f\u2028\ufeff\U000e0041\udcff"


# table


def test_a_table_has_numbers_to_the_right_and_text_to_the_left(capsys: pytest.CaptureFixture[str]) -> None:
    table(["queue", "ready", "rate", ""], [["emails", 7, "-1.5", ""], ["b", 1234, "+20.0", "paused"]])
    assert capsys.readouterr().out.splitlines() == [
        "queue   ready   rate",
        "emails      7   -1.5",
        "b        1234  +20.0  paused",
    ]


def test_one_cell_of_text_puts_its_column_to_the_left(capsys: pytest.CaptureFixture[str]) -> None:
    table(["id"], [["12"], ["abc"], [""]])
    assert capsys.readouterr().out == "id\n12\nabc\n\n"


def test_a_table_without_rows_is_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    table(["id", "state"], [])
    assert capsys.readouterr().out == "id  state\n"


def test_a_cell_is_one_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    table(["id", "n"], [["two\nlines", 1], [HOSTILE, 2]])
    head, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("two\\nlines ")
    assert second.isprintable()
    assert len(head) == len(first) == len(second)


# length


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.04, "0.0 s"),
        (3.14, "3.1 s"),
        (10, "10 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_799, "48 h"),
        (172_800, "2 d"),
        (864_000, "10 d"),
    ],
)
def test_a_length_of_time_is_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(90, "in 90 s"), (0, "in 0.0 s"), (-3600, "60 min ago")])
def test_timestamp_shows_its_distance_from_now(seconds: int, text: str) -> None:
    now = datetime(2027, 1, 31, 8, tzinfo=UTC)
    at = now + timedelta(seconds=seconds)
    assert format_moment(at, (at - now).total_seconds()) == f"{at:%Y-%m-%d %H:%M:%S} UTC ({text})"


# printable, say


@pytest.mark.parametrize("text", ["", "plain", "żółć 日本 🙂", "a  b"])
def test_printable_text_is_unchanged(text: str) -> None:
    assert escape_control(text) == text


def test_control_characters_are_escaped() -> None:
    spelled = "a\\x1b[2J\\x07\\x9b31m\\u202e\\r\\x7f\\u2028\\ufeff\\U000e0041\\udcff"
    assert escape_control(HOSTILE) == spelled
    assert escape_control("a\nb\tc\x00") == "a\\nb\\tc\\x00"


def test_text_of_several_lines_keeps_only_its_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\ntwo\rthree\x85\x1b[31m")
    assert capsys.readouterr().out == "one\ntwo\\rthree\\x85\\x1b[31m\n"


# plain, say_json


@pytest.mark.parametrize(
    ("value", "as_json"),
    [
        (b"text", "text"),
        ("ż".encode(), "ż"),
        (b"\xff\x00", {"base64": "/wA="}),
        ("id-\udcff", {"base64": "aWQt/w=="}),
        ({"a": [b"x", (1, None)], 7: {b"\xff"}}, {"a": ["x", [1, None]], "7": [{"base64": "/w=="}]}),
        (State.FAILED, "failed"),
        (datetime(2027, 1, 31, 8, tzinfo=UTC), "2027-01-31T08:00:00Z"),
        (1.5, 1.5),
    ],
)
def test_a_value_is_printed_as_json_has_it(value: Any, as_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say_json(value)
    assert json.loads(capsys.readouterr().out) == as_json


@pytest.mark.parametrize("levels", [100, 700, 50_000])
def test_deep_value_is_printed_down_to_a_level(levels: int, capsys: pytest.CaptureFixture[str]) -> None:
    value: Any = "core"
    for _ in range(levels // 2):
        value = {"a": [value]}
    say_json(value)
    said = capsys.readouterr().out
    assert said.count("[") == min(levels // 2, 100)
    assert ("core" if levels == 100 else "…") in said


def test_a_struct_is_its_fields_with_the_defaults() -> None:
    told = plain({"error": JobError(type="ValueError", message="no")})
    assert told == {
        "error": {
            "type": "ValueError",
            "message": "no",
            "kind": "retriable",
            "attempts": 0,
            "traceback": "",
            "details": None,
        }
    }


def test_json_is_one_line_that_moves_no_cursor_and_means_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = HOSTILE.removesuffix("\udcff") + "\n"
    say_json({hostile: [hostile]})
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out[:-1].isprintable()
    assert json.loads(out) == {hostile: [hostile]}


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "silent_s", "shown"),
    [
        (io.StringIO(), 4.9, "1,250 jobs deleted …\n"),
        (Terminal(), 0.1, "\r\x1b[K1,250 jobs deleted …\r\x1b[K"),
    ],
    ids=["file", "terminal"],
)
def test_long_work_shows_its_progress_but_short_work_does_not(
    stderr: io.StringIO, silent_s: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with BulkProgress("deleted") as progress:
        now += silent_s
        progress.add(250)
        assert stderr.getvalue() == ""
        now += 0.2
        progress.add(1_000)
        progress.add(10)
    assert (stderr.getvalue(), progress.count) == (shown, 1_260)
