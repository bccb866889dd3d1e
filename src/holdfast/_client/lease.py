"""The pull API: a lease on one job, in its holder's hands."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from holdfast._client.session import Session
from holdfast._core.failure import error_from_exception, truncate_error
from holdfast._core.jobs import Job, Release, Settlement, SettleResult
from holdfast._core.jobs import LeaseRef as Holding
from holdfast._core.options import Seconds, from_at, to_at, to_ms
from holdfast._core.retry_policy import Policy, Raised, Returned, verdict
from holdfast.errors import HoldfastError, JobError, OptionError

MIN_SECONDS_MS, MAX_SECONDS_MS = 100, 86_400_000

_rng = random.Random()


class Lease:
    """The right to work on one job until `deadline`. Settle it once: complete, retry, fail or release.

    Each of those gives True to exactly one caller. False means that the lease was lost: another may be at the job, and
    nothing was changed.
    """

    def __init__(
        self,
        app: Session,
        queue: str,
        policy: Policy,
        job: Job,
        worker: str,
        seconds_ms: int,
        *,
        restored: bool = False,
    ) -> None:
        assert job.run is not None
        self._restored = restored
        """It was taken over: when it was claimed, by which clock, is not known here."""
        self._app = app
        self._policy = policy
        self._job = job
        self._worker = worker
        self._length_ms = seconds_ms
        self.queue = queue
        self.id = job.id
        self.payload: Any = app.codecs.decode_or_leave(job.work.payload, job.work.codec)
        """Decoded; bytes if they were enqueued as bytes, or cannot be read."""
        self.attempt = job.attempts
        """1 for the first lease."""
        self.fence = job.run.fence
        self.deadline = from_at(job.run.until_at)
        """By the storage's clock. `extend` moves it."""
        self._claimed_at = job.run.until_at - 1000 * seconds_ms
        self._began_at = time.monotonic()
        """Two readings, of the storage's clock and soon after of ours: so a deadline is never put too late."""
        self.cancel_asked = False
        """Somebody has cancelled the job: `extend` says so. Any settlement ends it then; a completion counts."""
        self._extended = asyncio.Event()
        self.settled = False
        """This lease was settled here, or is known to be lost."""

    @property
    def token(self) -> str:
        """This lease as text: `await app.lease(token)` gives it back, in any process."""
        parts = (self.queue, self.id.encode("utf-8", "surrogateescape"), self.fence, self._worker, self._length_ms)
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("=")

    async def complete(self, result: object = None) -> bool:
        """The work is done. `result` may be any JSON value, or bytes."""
        returned = Returned(None)
        if result is not None:
            returned = Returned(*self._app.codecs.encode_any(f"the result of job {self.id!r}", result))
        return await self._settle(verdict(self._job, returned, self._policy, _rng))

    async def retry(
        self, *, delay: Seconds | None = None, at: datetime | None = None, error: BaseException | str | None = None
    ) -> bool:
        """The job shall run again: after `delay`, at `at`, or after the queue's backoff (none unless given). It counts
        as a retry; past the queue's or the job's limit it fails instead."""
        if delay is not None and at is not None:
            raise OptionError("delay and at are both given: one of them says when")
        told = _as_error(error, JobError(type="Retry", message="asked to run again"))
        when = Raised(
            told,
            None if delay is None else to_ms("delay", delay),
            None if at is None else to_at("at", at),
        )
        return await self._settle(verdict(self._job, when, self._policy, _rng))

    async def fail(self, error: BaseException | str = "failed") -> bool:
        """The job is given up; it is listed as failed until it is forgotten, and can be retried by hand."""
        told = _as_error(error, JobError(type="Failed", message="failed"))
        permanent = Raised(msgspec.structs.replace(told, kind="permanent"))
        return await self._settle(verdict(self._job, permanent, self._policy, _rng))

    async def release(self) -> bool:
        """Give the job back, uncounted: it keeps its place in front."""
        return await self._settle(Release(self.id, self.fence))

    async def extend(self, seconds: Seconds | None = None, *, progress: object = None) -> bool:
        """Hold the lease for as long again (or for `seconds`) from now. False if it is lost. See `cancel_asked`."""
        length_ms = self._length_ms if seconds is None else to_ms("seconds", seconds, MIN_SECONDS_MS, MAX_SECONDS_MS)
        told = None
        if progress is not None:
            told = self._app.codecs.encode(f"progress of job {self.id!r}", progress, self._app.codecs.get("json"))
        lease_from_token = Holding(self.id, self.fence, told)
        sent_at = time.monotonic()
        reply = await self._app.storage.extend(self.queue, [lease_from_token], worker=self._worker, lease_ms=length_ms)
        if reply.lost:
            self.settled = True
            return False
        self._length_ms = length_ms
        self._extended.set()
        self.cancel_asked = bool(reply.cancel_asked)
        self.deadline = from_at(self._claimed_at + round((sent_at - self._began_at) * 1e6) + 1000 * length_ms)
        if self._restored:
            (job,) = await self._app.storage.get(self.queue, [self.id])
            if job is not None and job.run is not None and job.run.fence == self.fence:
                self.deadline = from_at(job.run.until_at)
        return True

    async def _keep_extending(self) -> None:
        """Extend every quarter of the lease, until it is settled: what `leased` does."""
        while not self.settled:
            self._extended.clear()
            try:
                async with asyncio.timeout(self._length_ms / 4000):
                    await self._extended.wait()
            except TimeoutError:
                with suppress(HoldfastError):  # The next one may get through.
                    await self.extend()

    async def _settle(self, settlement: Settlement) -> bool:
        (reply,) = await self._app.storage.settle(self.queue, [settlement], worker=self._worker)
        self.settled = True
        return reply is SettleResult.OK

    def __repr__(self) -> str:
        return f"<lease of job {self.id!r} in {self.queue} until {self.deadline:%H:%M:%S}>"


class Token(NamedTuple):
    """What a lease is known by."""

    queue: str
    id: bytes
    fence: int
    worker: str
    length_ms: int


def read_token(token: str) -> Token:
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        return msgspec.msgpack.decode(data, type=Token)
    except (ValueError, TypeError):
        raise OptionError(f"{token!r:.80} is no token of a lease: it is what `lease` printed") from None


def _as_error(error: BaseException | str | None, otherwise: JobError) -> JobError:
    if error is None:
        return otherwise
    if isinstance(error, BaseException):
        return error_from_exception(error, "retriable")
    return truncate_error(JobError(type=otherwise.type, message=error.encode("utf-8", "replace").decode()))
