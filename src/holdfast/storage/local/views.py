"""How records look to their readers: in wall time, without what is over, in lists without large bytes, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast._core import lifecycle
from holdfast._core.clock import QueueTime
from holdfast._core.extension import Extension
from holdfast._core.jobs import Job, State, Work
from holdfast._core.replies import WorkerInfo
from holdfast.errors import OptionError
from holdfast.storage.local.table import Place
from holdfast.storage.validation import decode_cursor, encode_cursor

MAX_LISTED_BYTES = 4096
"""An error, a progress or an entry of an extension that is longer is left out of a list; `get` has it."""


def as_read(job: Job, time: QueueTime) -> Job:
    """A record as its readers know it: `run_at` in wall time, and no previous outcome past its forget time."""
    job = lifecycle.tidy(job, time.last_at)
    if not time.skew:
        return job
    return replace(job, run_at=job.wall_at or job.run_at - time.skew)


def listed(jobs: Sequence[Job], time: QueueTime) -> list[Job]:
    """Records as `scan` gives them: none that is forgotten, and without the bytes that could make a page large."""
    return [_without_bytes(as_read(job, time)) for job in jobs if not lifecycle.forgotten(job, time.last_at)]


def _without_bytes(job: Job) -> Job:
    outcome, run = job.outcome, job.run
    if outcome is not None:
        outcome = replace(outcome, result=None, error=_if_small(outcome.error))
    if run is not None:
        following = run.next and replace(run.next, work=_without_payload(run.next.work))
        run = replace(run, next=following, progress=_if_small(run.progress))
    return replace(
        job,
        work=_without_payload(job.work),
        run=run,
        outcome=outcome,
        previous=None,
        error=_if_small(job.error),
        extension=_small_entries(job.extension),
    )


def _without_payload(work: Work) -> Work:
    return replace(work, payload=None, extension=_small_entries(work.extension))


def _small_entries(entries: Extension) -> Extension:
    return tuple(entry for entry in entries if len(entry[1]) <= MAX_LISTED_BYTES)


def _if_small(value: bytes | None) -> bytes | None:
    return None if value is None or len(value) > MAX_LISTED_BYTES else value


def read_cursor(state: State | None, after: str | None) -> tuple[list[State], Place | None]:
    """The states whose indexes are to be listed, and behind which place of the first. All states are listed one after
    the other, and the cursor names the one that it is in."""
    states = list(State) if state is None else [state]
    if after is None:
        return states, None
    if state is None:
        name, _, place = after.partition(":") if isinstance(after, str) else ("", "", "")
        if name not in State.__members__.values():
            kind = type(after).__name__
            raise OptionError(f"{after!r:.80} ({kind}) is not a cursor that was given out for a list of all states")
        states, after = states[states.index(State(name)) :], place
        if not after:
            return states, None
    return states, decode_cursor(after, 3 if states[0] is State.WAITING else 1)


def write_cursor(state: State | None, at: State, end: Place | None) -> str:
    """A cursor behind a place in the index of a state; without one, at its beginning."""
    place = "" if end is None else encode_cursor(*end)
    return place if state is not None else f"{at}:{place}"


def served_by(worker: WorkerInfo) -> list[str]:
    """The queues that a worker says it serves."""
    queues = worker.facts.get("queues", [])
    return queues if isinstance(queues, list) else []
