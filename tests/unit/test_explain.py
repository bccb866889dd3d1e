"""Why a job is not running: every reason, from a record, its queue and the time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast._core.extension import EXPIRES_IN, pack_numbers
from holdfast._core.failure import encode_error
from holdfast._core.jobs import Job, Next, Outcome, State, StoredLease, Work
from holdfast._core.replies import QueueStats, WorkerInfo
from holdfast.cli.reasons import explain, reasons
from holdfast.errors import JobError

NOW = 1_800_000_000_000_000
SECOND = 1_000_000
WORK = Work(b"{}")


def job(**fields: Any) -> Job:
    return Job("one", WORK, NOW - SECOND, **{"run_at": NOW, "arrival": NOW, **fields})


def queue(*workers: str, **fields: Any) -> QueueStats:
    counts = dict.fromkeys(
        ["ready", "scheduled", "running", "retrying", "deferred", "completed", "failed", "cancelled"], 0
    )
    rest = {"oldest_ready_ms": 0, "paused": False, "reason": "", "workers": list(workers), "totals": {}}
    return QueueStats(queue="emails", **{**counts, **rest, **fields})


def told(
    record: Job, stats: QueueStats | None = None, ahead: int = 0, alive: dict[str, str] | None = None
) -> list[str]:
    return reasons(record, NOW, stats or queue("postman"), (ahead, True), hosts=alive or {"postman": ""})


def error(kind: Any = "retriable") -> bytes:
    return encode_error(JobError(type="ValueError", message="no such user", kind=kind))


def test_job_without_obstacles_is_ready() -> None:
    assert told(job()) == ["it is ready: the next worker with free capacity claims it"]


def postman(**facts: Any) -> WorkerInfo:
    return WorkerInfo("postman", {"capacity": 100, "lent": 0, **facts}, NOW, NOW + SECOND, False)


READY = "it is ready: the next worker with free capacity claims it"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"used": 100, "busiest": ["pipe.pipeline 100"], "waits": ["pipe.pipeline pipe.step"]},
            "no worker has room: 100 of 100 units used by pipe.pipeline, which waits for pipe.step",
        ),
        (
            {"used": 400, "lent": 300, "busiest": ["pipe.pipeline 400"], "waits": ["pipe.pipeline emails"]},
            "no worker has room: 400 of 400 units used by pipe.pipeline, which waits for emails",
        ),
        (
            {"used": 100, "busiest": ["reports 90", "emails 10"], "waits": []},
            "no worker has room: 90 of 100 units used by reports",
        ),
        ({"used": 100, "lent": 100, "busiest": ["pipe.pipeline 100"], "waits": ["pipe.pipeline emails"]}, READY),
        ({"used": 99, "busiest": ["reports 99"]}, READY),
    ],
)
def test_job_without_room_shows_which_queue_uses_it(facts: dict[str, Any], reason: str) -> None:
    shown = reasons(job(), NOW, queue("postman"), (0, True), hosts={"postman": ""}, serving=[postman(**facts)])
    assert shown == [reason]


def test_job_has_room_if_one_worker_has_some() -> None:
    workers = [postman(used=100, busiest=["reports 100"]), postman(used=0)]
    assert reasons(job(), NOW, queue("postman"), (0, True), hosts={"postman": ""}, serving=workers) == [READY]


def test_a_job_that_is_due_at_this_instant_is_not_scheduled() -> None:
    assert told(job(run_at=NOW)) == told(job(run_at=NOW - SECOND))
    assert told(job(run_at=NOW + 1)) != told(job(run_at=NOW))


def test_scheduled_job_shows_its_time_in_utc_and_the_remaining_time() -> None:
    assert told(job(run_at=NOW + 90 * SECOND)) == ["it is scheduled for 2027-01-15 08:01:30 UTC (in 90 s)"]


def test_job_that_expires_shows_until_when_it_may_start() -> None:
    work = Work(b"{}", extension=((EXPIRES_IN, pack_numbers(61_000)),))
    until = "it fails unless it starts before 2027-01-15 08:01:00 UTC (in 60 s)"
    assert until in told(replace(job(), work=work))


def test_expired_job_shows_that_it_did_not_run() -> None:
    outcome = Outcome(NOW - SECOND, State.FAILED, NOW, NOW + 60 * SECOND, error=error("expired"), started_at=NOW)
    assert told(job(outcome=outcome, attempts=1)) == [
        "it has expired: no such user",
        "`holdfast retry` enqueues it again, with all its retries",
        "it is remembered until 2027-01-15 08:01:00 UTC (in 60 s)",
    ]


@pytest.mark.parametrize(
    ("count", "what"), [("retries", "retried once"), ("timeouts", "timed out once"), ("stalls", "stalled once")]
)
def test_backoff_shows_its_error(count: str, what: str) -> None:
    record = job(run_at=NOW + 90 * SECOND, error=error("timeout"), **{count: 1})
    until = "it waits for its backoff until 2027-01-15 08:01:30 UTC (in 90 s)"
    assert told(record) == [f"{until}, after ValueError: no such user (timeout)", f"it has been {what}"]


def test_error_that_is_not_json_is_shown() -> None:
    record = job(run_at=NOW + SECOND, error=b"\xff no JSON", retries=1)
    assert told(record)[0].endswith("after Error: \ufffd no JSON (retriable)")


def test_a_job_with_an_error_but_no_count_is_only_scheduled() -> None:
    """Its counts were reset, because somebody asked for it anew."""
    assert told(job(run_at=NOW + SECOND, error=error()))[0].startswith("it is scheduled for")


def test_counts_are_written_in_words() -> None:
    happened = told(job(retries=2, timeouts=1, stalls=3))[-1]
    assert happened == "it has been retried 2 times, timed out once, stalled 3 times"


def test_last_error_of_a_job_that_is_due_again_is_shown() -> None:
    happened = told(job(retries=2, error=error()))[-1]
    assert happened == "it has been retried 2 times, the last time with ValueError: no such user (retriable)"


def test_a_paused_queue_says_why_if_that_is_known() -> None:
    assert told(job(), queue("postman", paused=True)) == ["the queue is paused"]
    assert told(job(), queue("postman", paused=True, reason="no stamps")) == ["the queue is paused: no stamps"]


def test_queue_without_a_worker_is_reported_even_if_unknown() -> None:
    assert told(job(), queue()) == ["no live worker serves this queue"]
    assert reasons(job(), NOW, None, (0, True), hosts={}) == ["no live worker serves this queue"]


@pytest.mark.parametrize(
    ("ahead", "sentence"),
    [
        ((1, True), "1 job in front of it"),
        ((2, True), "2 jobs in front of it"),
        ((700, False), "at least 700 jobs in front of it"),
        ((0, False), "at least 0 jobs in front of it"),
    ],
)
def test_jobs_in_front_are_counted(ahead: tuple[int, bool], sentence: str) -> None:
    assert reasons(job(), NOW, queue("postman"), ahead, hosts={}) == [sentence]


async def test_bounded_count_is_shown_as_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many jobs before it are not due, and do not count, but have to be looked at."""
    monkeypatch.setattr("holdfast.cli.reasons.MOST_AHEAD", 100)
    async with Holdfast("memory://") as app:
        queue = app.queue("emails")
        await queue.enqueue(None, priority=9)
        await app.enqueue_many(queue.bind(None, priority=9, delay=60) for _ in range(150))
        await queue.enqueue(None, id="last")
        assert "at least 1 job in front of it" in (await explain(app.storage, "emails", "last")).reasons


def test_every_reason_that_delays_a_job_is_shown() -> None:
    record = job(run_at=NOW + SECOND, error=error(), retries=1)
    sentences = told(record, queue(paused=True, reason="no stamps"), ahead=3)
    beginnings = [
        "it waits for its backoff",
        "the queue is paused: no stamps",
        "no live worker",
        "3 jobs",
        "it has been",
    ]
    assert [bool(said.startswith(begins)) for said, begins in zip(sentences, beginnings, strict=True)] == [True] * 5


def running(until_s: float = 10, worker: str = "postman", **fields: Any) -> Job:
    return job(attempts=2, run=StoredLease(worker, NOW - 5 * SECOND, 10_000, NOW + round(until_s * SECOND), **fields))


def test_running_job_shows_its_worker() -> None:
    since = "since 2027-01-15 07:59:55 UTC (5.0 s ago), attempt 2"
    assert told(running()) == [f"it runs on worker postman {since}"]
    assert told(running(), alive={"postman": "office"}) == [f"it runs on worker postman on host office {since}"]


def test_lease_of_an_unannounced_worker_is_shown() -> None:
    lease = "its lease lasts until 2027-01-15 08:00:10 UTC (in 10 s)"
    assert told(running(worker="pull-1"))[1:] == [lease]


@pytest.mark.parametrize("record", [running(-5), running(-5, overdue=True)])
def test_an_expired_lease_is_taken_back_soon(record: Job) -> None:
    by = "its lease must be extended by 2027-01-15 07:59:55 UTC (5.0 s ago), or a sweep takes it back"
    assert told(record)[1:] == [by]
    unheard = told(record, alive={"another": ""})[1:]
    assert unheard == [f"{by}; its worker sends no heartbeats"]


def test_run_with_cancel_request_and_next_shows_both() -> None:
    record = running(cancel_asked=True, next=Next(NOW, WORK, NOW, NOW))
    asked, deferred = told(record)[1:]
    assert asked == "it was asked to stop, and has not stopped yet"
    assert deferred.startswith("a newer request is deferred")


@pytest.mark.parametrize(
    ("state", "attempts", "first"),
    [
        (State.COMPLETED, 1, "it has completed, after 1 run"),
        (State.FAILED, 3, "it has failed, after 3 runs, with ValueError: no such user (permanent)"),
        (State.CANCELLED, 0, "it was cancelled, after 0 runs"),
    ],
)
def test_finished_job_shows_its_outcome_and_its_expiry(state: State, attempts: int, first: str) -> None:
    failed = state is State.FAILED
    outcome = Outcome(NOW, state, NOW - SECOND, NOW + 60 * SECOND, error=error("permanent") if failed else None)
    retry = ["`holdfast retry` enqueues it again, with all its retries"] if failed else []
    remembered = "it is remembered until 2027-01-15 08:01:00 UTC (in 60 s)"
    assert told(job(attempts=attempts, outcome=outcome)) == [first, *retry, remembered]


def test_finished_job_shows_its_last_run() -> None:
    outcome = Outcome(NOW, State.COMPLETED, NOW, NOW + SECOND, started_at=NOW - 300 * SECOND, worker="postman")
    ran = "its last run took 5 min on worker postman, from 2027-01-15 07:55:00 UTC (5 min ago)"
    assert told(job(attempts=1, outcome=outcome))[-1] == ran
