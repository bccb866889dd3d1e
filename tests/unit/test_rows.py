"""A record as a row of SQLite: every field comes back, each at its own place."""

from __future__ import annotations

import msgspec

from holdfast._core.jobs import Job, Outcome, State, StoredLease, Work
from holdfast.storage.local.sqlite.rows import COLUMNS, job_of, new_row, rest_of

WORK = Work(
    payload=b"payload",
    codec="raw",
    priority=7,
    timeout_ms=11,
    max_retries=12,
    max_stalls=13,
    max_timeouts=14,
    result_ttl_ms=15,
    dedup_ttl_ms=16,
    extension=((128, b"of the work"),),
)
JOB = Job(
    id="a\udc80",
    work=WORK,
    generation=21,
    run_at=22,
    arrival=23,
    wall_at=24,
    custom_id=True,
    attempts=25,
    retries=26,
    stalls=27,
    timeouts=28,
    error=b"error",
    run=StoredLease("w", 31, 32, 33),
    outcome=Outcome(41, State.FAILED, 42, 43, started_at=51, worker="w1"),
    previous=Outcome(44, State.COMPLETED, 45, 46, 47, started_at=52, worker="w2"),
    keep_ms=48,
    keep_until_at=49,
    extension=((1, b"of the record"),),
)
"""No field has its default, and no two numbers are the same: a field at the place of another is seen."""


def test_no_field_of_the_example_has_its_default() -> None:
    for value in (JOB, WORK):
        fields = msgspec.structs.fields(value)
        unset = [field.name for field in fields if getattr(value, field.name) == field.default]
        assert unset in ([], ["skew"])  # Readers add the skew to a record: rows have none.


def test_every_field_of_a_record_comes_back_from_its_row() -> None:
    id, priority, run_at, arrival, payload, rest = new_row(JOB)
    assert COLUMNS == "id, state, view, priority, run_at, arrival, payload, rest"
    assert job_of((bytes(id), "failed", None, priority, run_at, arrival, bytes(payload), bytes(rest))) == JOB
    assert bytes(rest) == rest_of(JOB)
