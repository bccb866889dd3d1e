"""The values of Holdfast: records, requests, leases and settlements. The replies of verbs are in replies.py.

Points in time are integer microseconds and end in `_at`; lengths are integer milliseconds and end in `_ms`.
Payloads, results and errors are bytes that no storage decodes.
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
"""Maximum delay and time to live: ten years."""

At = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""A point in time or a stamp; a double represents it exactly."""
WallAt = Annotated[int, msgspec.Meta(ge=1, lt=4_102_444_800_000_000)]
"""A wall time from a caller, before the year 2100. This rejects a time in nanoseconds."""
Ms = Annotated[int, msgspec.Meta(ge=0, le=MAX_MS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Limit = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=9)]
CodecName = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]

DEFAULT_PRIORITY = 5
PRIORITIES = range(10)
"""All priorities. The job with the highest number is claimed first."""


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A frozen value. It is stored as an array, so a new field is always the last one."""


class State(StrEnum):
    """The five stored states of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({State.WAITING, State.RUNNING})
FINISHED = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class Work(Value, frozen=True):
    """The work that a request asks for. An update replaces all of these fields, or none."""

    payload: bytes | None
    """None in an operator's retry, and in a completed record, which drops its payload."""
    codec: CodecName = "json"
    priority: Priority = DEFAULT_PRIORITY
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_MS)] | None = None
    """Timeout of a run. None, here and in the fields below, means the value of the handler."""
    max_retries: Limit | None = None
    max_stalls: Limit | None = None
    max_timeouts: Limit | None = None
    result_ttl_ms: Ms | None = None
    dedup_ttl_ms: Ms | None = None
    extension: Extension = ()
    """Optional fields that belong to the payload: tags from `FIRST_WORK_TAG` on."""


class Next(Value, frozen=True):
    """The request that arrived while its job ran. It runs after this run, or is merged into the retry of this run."""

    generation: At
    work: Work
    run_at: At
    arrival: At
    wall_at: At = 0
    takes_payload: bool = True
    takes_run_at: bool | Literal["if_later", "if_earlier"] = True
    resets_counts: bool = True


class StoredLease(Value, frozen=True):
    """The lease of a running job, and the fields that exist only while it runs."""

    worker: str
    fence: At
    lease_ms: Ms
    until_at: At
    """Deadline of the lease; of an overdue one, the time from which a sweep takes the job back."""
    overdue: bool = False
    """A sweep found the lease past its deadline. The next extend clears this."""
    cancel_asked: bool = False
    next: Next | None = None
    progress: bytes | None = None


class Outcome(Value, frozen=True):
    """How a generation ended."""

    generation: At
    state: State
    ended_at: At
    forget_at: At
    """Time from which no verb sees the outcome."""
    dedup_at: At = 0
    """Time until which the id of a completed job, or of a failure that is remembered, answers a request with this
    outcome, unless the request updates it."""
    result: bytes | None = None
    codec: CodecName = "json"
    error: bytes | None = None
    started_at: At = 0
    """Start of the run that ended the generation: its fence. 0 if no run ended it, as for a cancelled waiting job."""
    worker: str = ""
    """The worker of that run."""
    brief: bool = False
    """The outcome is kept only for its handle: of all that are brief, a queue keeps the newest."""


class Job(Value, frozen=True):
    """One record: the stored state of an id in a queue. It has a `run`, or an `outcome`, or it waits."""

    id: str
    work: Work
    generation: At
    """Stamp of the request that the record stands for: the time when the request was made."""
    run_at: At
    arrival: At
    """Stamp at which `run_at` was last set. It orders jobs that are due at the same time."""
    wall_at: At = 0
    """The absolute `run_at` of the caller, in wall time; 0 if `run_at` was computed from a delay."""
    custom_id: bool = False
    """The caller chose the id, so the job is remembered when it has completed."""
    attempts: Count = 0
    """Number of runs started since the last restart or promotion. No limit applies to it."""
    retries: Count = 0
    stalls: Count = 0
    timeouts: Count = 0
    error: bytes | None = None
    """Error of the last run that did not complete."""
    run: StoredLease | None = None
    outcome: Outcome | None = None
    previous: Outcome | None = None
    """Outcome of the generation before this one, until its forget time."""
    keep_ms: Ms | None = None
    """How long to remember the outcome, if `keep` was called while the job was live."""
    keep_until_at: At = 0
    """Time until which the outcome is remembered at least, for a waiter."""
    extension: Extension = ()
    """Optional fields of this generation: tags below `FIRST_WORK_TAG`."""
    skew: int = 0
    """Queue time minus wall time, in a record that was read; 0 in storages. See `as_read` in storage/local/table.py."""

    @property
    def created_at(self) -> int:
        """Wall time of the request that the record stands for."""
        return self.generation - self.skew

    @property
    def state(self) -> State:
        if self.outcome is not None:
            return self.outcome.state
        return State.WAITING if self.run is None else State.RUNNING

    @property
    def payload(self) -> bytes | None:
        return self.work.payload

    @property
    def worker(self) -> str | None:
        """The worker of the present run, or of the run that ended the job."""
        return self.run.worker if self.run is not None else self.outcome.worker or None if self.outcome else None

    @property
    def started_at(self) -> int | None:
        """Start of the present run, or of the run that ended the job. The fence of a lease is the time of its claim."""
        return (
            self.run.fence - self.skew
            if self.run is not None
            else self.outcome.started_at or None
            if self.outcome
            else None
        )

    @property
    def fence(self) -> int | None:
        return None if self.run is None else self.run.fence

    @property
    def deferred(self) -> bool:
        """Whether another request waits for the present run to end."""
        return self.run is not None and self.run.next is not None


_SORTED = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz~",
)
"""Translation from the alphabet of base64 to one that sorts like the encoded bits."""


def new_id() -> str:
    """Return a new unique id that sorts by its time of creation: 22 characters, 80 random bits."""
    bits = (time.time_ns() // 1_000_000).to_bytes(6) + os.urandom(10)
    return binascii.b2a_base64(bits, newline=False).translate(_SORTED)[:22].decode()


class Update(Value, frozen=True):
    """How a request changes a job whose id exists.

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
    """How the request changes a job whose id exists; None keeps that job."""
    custom_id: bool = False
    keep_ms: Ms = 0
    """Minimum time from now for which the outcome is remembered, for a caller that waits; 0 if none waits."""


class Complete(Value, frozen=True, tag="complete"):
    """The run completed the job. The record is deleted if both lengths are 0 and no caller waits."""

    id: str
    fence: At
    result: bytes | None = None
    codec: CodecName = "json"
    result_ttl_ms: Ms = 0
    dedup_ttl_ms: Ms = 0
    brief: bool = False
    """No option asks for this outcome: a storage forgets it early if the queue has more than `MAX_BRIEF` of these."""


class Fail(Value, frozen=True, tag="fail"):
    """The job failed. The same step enqueues `follow_up` for the fail handler, in the queue `<queue>/failed`."""

    id: str
    fence: At
    error: bytes
    failure_ttl_ms: Ms
    follow_up: Work | None = None
    counts: Literal["stalls", "timeouts"] | None = None
    """The count to increase, if a stall or a timeout ended the job."""
    dedup_ttl_ms: Ms = 0


class RetrySettlement(Value, frozen=True, tag="retry"):
    """The job runs again, after `delay_ms` or at `run_at` (wall time). `counts` names the count to increase. After a
    stall without a delay the job keeps its place."""

    id: str
    fence: At
    error: bytes | None = None
    delay_ms: Ms = 0
    run_at: WallAt | None = None
    counts: Literal["retries", "stalls", "timeouts"] = "retries"


class Release(Value, frozen=True, tag="release"):
    """The job goes back to its place in the queue. The run does not count."""

    id: str
    fence: At


Settlement = Complete | Fail | RetrySettlement | Release


class LeaseRef(Value, frozen=True):
    """Identifies a lease for `extend`, with the progress to store."""

    id: str
    fence: At
    progress: bytes | None = None
