"""The values of Holdfast: records, requests, leases and settlements. What verbs reply is in replies.py.

Points in time are integer microseconds and end in `_at`; lengths are integer milliseconds and end in `_ms`.
Payloads, results and errors are bytes that no storage looks into.
"""

from __future__ import annotations

import binascii
import os
import time
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from holdfast._core.extension import Extension

MAX_MS = 10 * 365 * 24 * 3_600_000
"""No delay and no time to live is longer than ten years."""

At = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""A point in time or a stamp: as much as a double holds exactly."""
WallAt = Annotated[int, msgspec.Meta(ge=1, lt=4_102_444_800_000_000)]
"""A wall time that a caller gives, before the year 2100: one in nanoseconds is caught here."""
Ms = Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Limit = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=9)]
CodecName = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]

DEFAULT_PRIORITY = 5
PRIORITIES = range(10)
"""Higher first."""


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A frozen value. Array-like: it is stored by position, so fields are only ever added at the end."""


class State(StrEnum):
    """The five states that are stored. Everything else people say of a job is a view of these."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({State.WAITING, State.RUNNING})
FINISHED = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class Work(Value, frozen=True):
    """What a request asks to be done. These fields travel together: an update takes all of them or none."""

    payload: bytes | None
    """None only in an operator's retry and in a completed record, which drops its payload."""
    codec: CodecName = "json"
    priority: Priority = DEFAULT_PRIORITY
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_MS)] | None = None
    """This and the limits below: None means the handler's own, looked up when the job is claimed."""
    max_retries: Limit | None = None
    max_stalls: Limit | None = None
    max_timeouts: Limit | None = None
    result_ttl_ms: Ms | None = None
    dedup_ttl_ms: Ms | None = None
    extension: Extension = ()
    """Optional fields that travel with the payload: tags from `FIRST_WORK_TAG` on."""


class Next(Value, frozen=True):
    """The request that arrived while its job ran: it follows the run, or is merged into the run's retry."""

    generation: At
    work: Work
    run_at: At
    arrival: At
    wall_at: At = 0
    takes_payload: bool = True
    takes_run_at: bool | Literal["if_later", "if_earlier"] = True
    resets_counts: bool = True


class StoredLease(Value, frozen=True):
    """The lease of a running job, and what may only exist while it runs."""

    worker: str
    fence: At
    lease_ms: Ms
    until_at: At
    """The lease's deadline; once overdue, the time from which sweep takes the job back."""
    overdue: bool = False
    """A sweep has seen the deadline pass. The holder's next extend clears this."""
    cancel_asked: bool = False
    next: Next | None = None
    progress: bytes | None = None


class Outcome(Value, frozen=True):
    """What a generation ended in."""

    generation: At
    state: State
    ended_at: At
    forget_at: At
    """From here on the outcome does not exist to any verb."""
    dedup_at: At = 0
    """Until here a completed id answers `keep` from its cache."""
    result: bytes | None = None
    codec: CodecName = "json"
    error: bytes | None = None


class Job(Value, frozen=True):
    """One record: all that is known of an id in a queue. It is waiting, or it has a `run`, or it has an `outcome`."""

    id: str
    work: Work
    generation: At
    """The stamp of the request that the record stands for."""
    run_at: At
    arrival: At
    """The stamp at which `run_at` was last set: it orders jobs that are due at the same instant."""
    wall_at: At = 0
    """An absolute `run_at` as its caller gave it, in wall time; 0 where run_at is the queue's own reckoning."""
    custom_id: bool = False
    """The caller chose the id, so completing is worth remembering."""
    attempts: Count = 0
    """Runs started since the last promotion or restart. Limits nothing."""
    retries: Count = 0
    stalls: Count = 0
    timeouts: Count = 0
    error: bytes | None = None
    """Why the last run did not complete."""
    run: StoredLease | None = None
    outcome: Outcome | None = None
    previous: Outcome | None = None
    """How the generation before this one ended, until its own forget time."""
    keep_ms: Ms | None = None
    """How long to remember the end of this job, if `keep` was called while it was live."""
    keep_until_at: At = 0
    """Remember the end at least until here, for a waiter."""
    extension: Extension = ()
    """Optional fields of this generation: tags below `FIRST_WORK_TAG`."""

    @property
    def state(self) -> State:
        if self.outcome is not None:
            return self.outcome.state
        return State.WAITING if self.run is None else State.RUNNING

    @property
    def payload(self) -> bytes | None:
        return self.work.payload

    @property
    def priority(self) -> int:
        return self.work.priority

    @property
    def created_at(self) -> int:
        """When the request that this record stands for was made."""
        return self.generation

    @property
    def worker(self) -> str | None:
        return None if self.run is None else self.run.worker

    @property
    def fence(self) -> int | None:
        return None if self.run is None else self.run.fence

    @property
    def deferred(self) -> bool:
        """A request waits for the present run to end."""
        return self.run is not None and self.run.next is not None


_SORTED = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz~",
)
"""From base64's letters to those that sort as the bits do."""


def new_id() -> str:
    """Return a new unique id that sorts by the time it was made: 22 characters, 80 random bits."""
    bits = (time.time_ns() // 1_000_000).to_bytes(6) + os.urandom(10)
    return binascii.b2a_base64(bits, newline=False).translate(_SORTED)[:22].decode()


class Update(Value, frozen=True):
    """How a request changes an id that is there already.

    `run_at="if_later"` takes the later of the two times, `"if_earlier"` the earlier, False keeps the old one.
    `reset_counts` zeroes retries, stalls and timeouts; by default it follows `payload`.
    """

    payload: bool = True
    run_at: bool | Literal["if_later", "if_earlier"] = True
    reset_counts: bool | None = None

    @property
    def resets_counts(self) -> bool:
        return self.payload if self.reset_counts is None else self.reset_counts


class Request(Value, frozen=True):
    """One request for an id to run. Without `run_at` (wall time) or `delay_ms` it is due at once."""

    id: str
    work: Work
    run_at: WallAt | None = None
    delay_ms: Ms | None = None
    update: Update | None = None
    """None keeps what is there."""
    custom_id: bool = False
    keep_ms: Ms = 0
    """The caller will wait for the outcome: remember it for at least this long from now."""


class Complete(Value, frozen=True, tag="complete"):
    """The run did its work. With both lengths 0 and without a waiter, the record is dropped."""

    id: str
    fence: At
    result: bytes | None = None
    codec: CodecName = "json"
    result_ttl_ms: Ms = 0
    dedup_ttl_ms: Ms = 0


class Fail(Value, frozen=True, tag="fail"):
    """The job is given up. `follow_up` is enqueued into the queue's `/failed` companion in the same step."""

    id: str
    fence: At
    error: bytes
    failure_ttl_ms: Ms
    follow_up: Work | None = None


class RetrySettlement(Value, frozen=True, tag="retry"):
    """The job is to run again, after `delay_ms` or at `run_at` (wall time); `counts` names the count to raise. After a
    stall without a delay it keeps its place."""

    id: str
    fence: At
    error: bytes | None = None
    delay_ms: Ms = 0
    run_at: WallAt | None = None
    counts: Literal["retries", "stalls", "timeouts"] = "retries"


class Release(Value, frozen=True, tag="release"):
    """The job goes back to its place, uncounted, as if the run had not been."""

    id: str
    fence: At


Settlement = Complete | Fail | RetrySettlement | Release


class LeaseRef(Value, frozen=True):
    """The right of one worker to run a job, as `extend` names it."""

    id: str
    fence: At
    progress: bytes | None = None
