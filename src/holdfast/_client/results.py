"""Results of jobs: an outcome becomes a value, or the exception that says how the job ended."""

from __future__ import annotations

from typing import Any

from holdfast._client.session import Session
from holdfast._core.failure import decode_error
from holdfast._core.jobs import Outcome, State
from holdfast.errors import JobCancelled, JobFailed, JobForgotten


def value_of(session: Session, queue: str, id: str, outcome: Outcome, returns: Any) -> Any:
    """The result of a completed job, decoded as `returns`. Raises `JobFailed` or `JobCancelled` for any other."""
    if outcome.state is State.CANCELLED:
        raise JobCancelled(f"job {id!r} in {queue} was cancelled")
    if outcome.state is State.FAILED:
        error = decode_error(outcome.error)
        raise JobFailed(f"job {id!r} in {queue} failed: {error}", error=error)
    if outcome.result is None:
        return None
    return session.codecs.decode(f"the result of job {id!r} in {queue}", outcome.result, outcome.codec, returns)


async def newest_generation(session: Session, queue: str, id: str) -> int:
    """The newest generation of a job: for the handle of a request that was sent in a caller's transaction, and does not
    know its own generation."""
    (job,) = await session.storage.get(queue, [id])
    if job is None:
        raise JobForgotten(f"job {id!r} in {queue} has no record: was the transaction committed?")
    return job.generation if job.run is None or job.run.next is None else job.run.next.generation
