"""The check of the cost per job against a baseline."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import check

BEFORE = check.Row(calls=0.02, bytes=160.0, client=8.0, server=1.1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"calls": 0.03}, "drain: 0.03 calls a job, not 0.02"),
        ({"calls": 0.0201}, "drain: 0.0201 calls a job, not 0.02"),
        ({"bytes": 161.0}, "drain: 161.0 bytes a job, not 160.0"),
        ({"client": 16.0}, "drain: client CPU is 16.0 times that of bare functions, not 8.0"),
        ({"server": 2.2}, "drain: server CPU is 2.2 times that of bare functions, not 1.1"),
    ],
)
def test_a_job_that_costs_more_is_reported(change: dict[str, float], words: str) -> None:
    now = {"drain": msgspec.structs.replace(BEFORE, **change)}
    assert check.compare(now, {"drain": BEFORE}) == [words]


def test_a_cheaper_job_and_small_noise_are_not_reported() -> None:
    now = check.Row(calls=0.01, bytes=160.1, client=10.0, server=1.4)
    assert check.compare({"drain": now}, {"drain": BEFORE}) == []


def test_a_row_that_only_one_side_has_is_reported() -> None:
    assert len(check.compare({"new": BEFORE}, {"old": BEFORE})) == 2


def test_the_baseline_has_a_row_for_what_is_checked() -> None:
    rows = msgspec.json.decode(check.BASELINE.read_bytes(), type=dict[str, check.Row])
    assert all(row.calls and row.bytes and row.client and row.server for row in rows.values())
