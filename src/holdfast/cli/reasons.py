"""The reasons why a job is not running, or what it is doing, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast._core.failure import decode_error
from holdfast._core.jobs import Job, State
from holdfast._core.options import from_at
from holdfast._core.replies import QueueStats, WorkerInfo
from holdfast._core.retry_policy import expires_at
from holdfast._core.text import format_times
from holdfast.cli.output import format_count, format_duration, format_moment
from holdfast.storage import Storage

AGAIN = "`holdfast retry` enqueues it again, with all its retries"
MOST_AHEAD = 10_000
"""Maximum number of waiting jobs that are read to count those in front of a job."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job, and the reasons for it."""

    queue: str
    id: str
    state: State | None
    """None if the job does not exist."""
    reasons: list[str]


async def explain(storage: Storage, queue: str, id: str) -> Explanation:
    """Read a job, its queue and its workers, and explain the state of the job."""
    (job,) = await storage.get(queue, [id])
    if job is None:
        missing = "the job does not exist: it was never requested, or it has ended and is forgotten"
        return Explanation(queue=queue, id=id, state=None, reasons=[missing])
    snapshot = await storage.snapshot([queue])
    stats = next(iter(snapshot.queues), None)
    waits = job.state is State.WAITING and job.run_at <= snapshot.now
    ahead = await _ahead(storage, queue, job, snapshot.now) if waits else (0, True)
    hosts = {worker.worker: str(worker.facts.get("host", "")) for worker in snapshot.workers}
    serving = [worker for worker in snapshot.workers if stats is not None and worker.worker in stats.workers]
    sentences = reasons(job, snapshot.now, stats, ahead, hosts=hosts, serving=serving)
    return Explanation(queue=queue, id=id, state=job.state, reasons=sentences)


def reasons(
    job: Job,
    now: int,
    stats: QueueStats | None,
    ahead: tuple[int, bool],
    *,
    hosts: Mapping[str, str],
    serving: Sequence[WorkerInfo] = (),
) -> list[str]:
    """Return the reasons. `ahead` is the number of jobs in front, and whether all of them were counted. `hosts` has the
    host of each live worker; `serving` are the live workers of the queue. Pure."""
    match job.state:
        case State.WAITING:
            return _of_waiting(job, now, stats, ahead, serving)
        case State.RUNNING:
            return _of_running(job, now, hosts)
        case _:
            return _of_finished(job, now)


def _of_waiting(
    job: Job, now: int, stats: QueueStats | None, ahead: tuple[int, bool], serving: Sequence[WorkerInfo]
) -> list[str]:
    sentences: list[str] = []
    if job.run_at > now:
        if job.error is not None and (job.retries or job.timeouts or job.stalls):
            sentences.append(f"it waits for its backoff until {_at(job.run_at, now)}, after {_error(job.error)}")
        else:
            sentences.append(f"it is scheduled for {_at(job.run_at, now)}")
    until_at = expires_at(job)
    if until_at is not None:
        sentences.append(f"it fails unless it starts before {_at(until_at - job.skew, now)}")
    if stats is not None and stats.paused:
        sentences.append(f"the queue is paused{f': {stats.reason}' if stats.reason else ''}")
    if stats is None or not stats.workers:
        sentences.append("no live worker serves this queue")
    elif job.run_at <= now and not stats.paused:
        sentences += _no_room(stats.queue, serving)
    jobs, all_counted = ahead
    if jobs or not all_counted:
        sentences.append(f"{'' if all_counted else 'at least '}{format_count(jobs, 'job')} in front of it")
    if not sentences:
        sentences.append("it is ready: the next worker with free capacity claims it")
    counts = {"retried": job.retries, "timed out": job.timeouts, "stalled": job.stalls}
    happened = [f"{what} {format_times(count)}" for what, count in counts.items() if count]
    if happened:
        last = "" if job.error is None or job.run_at > now else f", the last time with {_error(job.error)}"
        sentences.append(f"it has been {', '.join(happened)}{last}")
    return sentences


def _no_room(queue: str, serving: Sequence[WorkerInfo]) -> list[str]:
    """The reason if all units of all workers of a queue are used, with the queue that uses the most units of one."""
    if any(_number(worker, "used") < _units(worker, queue) for worker in serving):
        return []
    for worker in serving:
        for busiest in _texts(worker, "busiest")[:1]:
            user, _, units = busiest.rpartition(" ")
            pairs = [pair.partition(" ") for pair in _texts(worker, "waits")]
            targets = " and ".join(target for waiting, _, target in pairs if waiting == user)
            room = f"{units} of {_units(worker, queue)} units used by {user}"
            return [f"no worker has room: {room}{f', which waits for {targets}' if targets else ''}"]
    return []


def _units(worker: WorkerInfo, queue: str) -> int:
    """The units of a worker that jobs of a queue may use."""
    is_awaited = any(pair.partition(" ")[2] == queue for pair in _texts(worker, "waits"))
    return _number(worker, "capacity") + (_number(worker, "lent") if is_awaited else 0)


def _number(worker: WorkerInfo, fact: str) -> int:
    value = worker.facts.get(fact)
    return value if isinstance(value, int) else 0


def _texts(worker: WorkerInfo, fact: str) -> list[str]:
    value = worker.facts.get(fact)
    return value if isinstance(value, list) else []


def _of_running(job: Job, now: int, hosts: Mapping[str, str]) -> list[str]:
    assert job.run is not None
    run = job.run
    host = f" on host {hosts[run.worker]}" if hosts.get(run.worker) else ""
    sentences = [f"it runs on worker {run.worker}{host} since {_at(run.fence, now)}, attempt {job.attempts}"]
    if run.until_at < now or run.overdue:
        gone = "" if run.worker in hosts else "; its worker sends no heartbeats"
        sentences.append(f"its lease must be extended by {_at(run.until_at, now)}, or a sweep takes it back{gone}")
    elif run.worker not in hosts:
        sentences.append(f"its lease lasts until {_at(run.until_at, now)}")
    if run.cancel_asked:
        sentences.append("it was asked to stop, and has not stopped yet")
    if run.next is not None:
        sentences.append("a newer request is deferred until this run ends")
    return sentences


def _of_finished(job: Job, now: int) -> list[str]:
    assert job.outcome is not None
    outcome = job.outcome
    remembered = f"it is remembered until {_at(outcome.forget_at, now)}"
    if outcome.state is State.FAILED and decode_error(outcome.error).kind == "expired":
        return [f"it has expired: {decode_error(outcome.error).message}", AGAIN, remembered]
    ended = "was cancelled" if outcome.state is State.CANCELLED else f"has {outcome.state}"
    sentences = [f"it {ended}, after {format_count(job.attempts, 'run')}"]
    if outcome.state is State.FAILED:
        sentences[0] += f", with {_error(outcome.error)}"
        sentences.append(AGAIN)
    sentences.append(remembered)
    if outcome.started_at:
        took = format_duration(max(0, outcome.ended_at - outcome.started_at) / 1e6)
        sentences.append(f"its last run took {took} on worker {outcome.worker}, from {_at(outcome.started_at, now)}")
    return sentences


async def _ahead(storage: Storage, queue: str, job: Job, now: int) -> tuple[int, bool]:
    """Return the number of due jobs in front of this one, and whether all of them were counted."""
    ahead, after = 0, None
    for _ in range(MOST_AHEAD // 100):
        page = await storage.scan(queue, state=State.WAITING, after=after, limit=100)
        for other in page.jobs:
            if other.id == job.id:
                return ahead, True
            ahead += other.run_at <= now
        after = page.after
        if after is None:
            return ahead, True
    return ahead, False


def _error(data: bytes | None) -> str:
    error = decode_error(data)
    return f"{error} ({error.kind})"


def _at(at: int, now: int) -> str:
    return format_moment(from_at(at), (at - now) / 1e6)
