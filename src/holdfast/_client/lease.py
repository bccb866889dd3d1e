"""The pull API: a lease of one job."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from holdfast._client.session import Session
from holdfast._core.extension import headers_in
from holdfast._core.failure import error_from_exception, truncate_error
from holdfast._core.jobs import Job, LeaseRef, Release, Settlement
from holdfast._core.options import OPTIONS, Seconds, from_at, to_at, to_ms
from holdfast._core.replies import SettleResult
from holdfast._core.retry_policy import QueueConfig, Raised, Returned, verdict
from holdfast.errors import HoldfastError, JobError, OptionError

Token = tuple[str, bytes, int, str, int]
_rng = random.Random()

to_lease_ms = OPTIONS["seconds"].convert
"""Convert the `seconds` of a lease to milliseconds. Raises `OptionError`."""


class Lease:
    """The right to run one job until `deadline`. Settle it once: complete, retry, fail or release.

    Each of these returns True if it settled the job. False means that the lease was lost and nothing was changed;
    another worker may run the job.
    """

    def __init__(
        self, session: Session, config: QueueConfig, job: Job, worker: str, length_ms: int, *, restored: bool = False
    ) -> None:
        assert job.run is not None
        self._restored = restored
        """The lease comes from a token, so the time of its claim by the clock of this process is not known."""
        self._session = session
        self._policy = config.policy
        self._job = job
        self._worker = worker
        self._length_ms = length_ms
        self.queue = config.queue
        self.id = job.id
        self.payload: Any = session.codecs.decode_or_leave(job.work.payload, job.work.codec)
        """The decoded payload; bytes if it was enqueued as bytes or cannot be decoded."""
        self.headers = headers_in(job.work.extension)
        self.attempt = job.attempts
        """Number of this lease of the job; 1 is the first."""
        self.fence = job.run.fence
        self.deadline = from_at(job.run.until_at)
        """End of the lease by the clock of the storage. `extend` moves it."""
        self._claimed_at = job.run.until_at - 1000 * length_ms
        self._began_at = time.monotonic()
        """Clock of this process after the claim, at storage time `_claimed_at`. A deadline from both is never late."""
        self.cancel_asked = False
        """The job was cancelled, as `extend` found. Any settlement ends the job then; `complete` still completes it."""
        self._extended = asyncio.Event()
        self.settled = False
        """The lease was settled here, or is known to be lost."""

    @property
    def token(self) -> str:
        """The lease as text. `await app.lease(token)` returns the lease in any process."""
        parts = (self.queue, self.id.encode("utf-8", "surrogateescape"), self.fence, self._worker, self._length_ms)
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("=")

    async def complete(self, result: object = None) -> bool:
        """Complete the job. `result` may be any JSON value, or bytes."""
        returned = Returned(None)
        if result is not None:
            returned = Returned(*self._session.codecs.encode_any(f"the result of job {self.id!r}", result))
        return await self._settle(verdict(self._job, returned, self._policy, _rng))

    async def retry(
        self, *, delay: Seconds | None = None, at: datetime | None = None, error: BaseException | str | None = None
    ) -> bool:
        """Run the job again: after `delay`, at `at`, or after the backoff of the queue (0 by default). It counts as a
        retry; a job that exceeds its limit of retries fails instead."""
        if delay is not None and at is not None:
            raise OptionError("delay and at are mutually exclusive: pass only one")
        raised = Raised(
            _as_error(error, JobError(type="Retry", message="asked to run again")),
            delay_ms=None if delay is None else to_ms("delay", delay),
            run_at=None if at is None else to_at("at", at),
        )
        return await self._settle(verdict(self._job, raised, self._policy, _rng))

    async def fail(self, error: BaseException | str = "failed") -> bool:
        """Fail the job. It is listed as failed until it is forgotten; until then `queue.retry` runs it again."""
        cause = _as_error(error, JobError(type="Failed", message="failed"))
        permanent = Raised(msgspec.structs.replace(cause, kind="permanent"))
        return await self._settle(verdict(self._job, permanent, self._policy, _rng))

    async def release(self) -> bool:
        """Return the job to its place in the queue. The lease does not count as a retry."""
        return await self._settle(Release(self.id, self.fence))

    async def extend(self, seconds: Seconds | None = None, *, progress: object = None) -> bool:
        """Move the deadline to `seconds` from now, by default the length of the lease. Updates `cancel_asked`. Returns
        False if the lease is lost."""
        length_ms = self._length_ms if seconds is None else to_lease_ms(seconds)
        codecs, what = self._session.codecs, f"progress of job {self.id!r}"
        encoded = None if progress is None else codecs.encode(what, progress, codecs.get("json"))
        lease = LeaseRef(self.id, self.fence, encoded)
        sent_at = time.monotonic()
        reply = await self._session.storage.extend(self.queue, [lease], worker=self._worker, lease_ms=length_ms)
        if reply.lost:
            self.settled = True
            return False
        self._length_ms = length_ms
        self._extended.set()
        self.cancel_asked = bool(reply.cancel_asked)
        self.deadline = from_at(self._claimed_at + round((sent_at - self._began_at) * 1e6) + 1000 * length_ms)
        if self._restored:
            (job,) = await self._session.storage.get(self.queue, [self.id])
            if job is not None and job.run is not None and job.run.fence == self.fence:
                self.deadline = from_at(job.run.until_at)
        return True

    async def _keep_extending(self) -> None:
        """Extend the lease after every quarter of its length, until it is settled. `Queue.leased` runs this."""
        while not self.settled:
            self._extended.clear()
            try:
                async with asyncio.timeout(self._length_ms / 4000):
                    await self._extended.wait()
            except TimeoutError:
                with suppress(HoldfastError):  # The next one may succeed.
                    await self.extend()

    async def _settle(self, settlement: Settlement) -> bool:
        (reply,) = await self._session.storage.settle(self.queue, [settlement], worker=self._worker)
        self.settled = True
        return reply is SettleResult.OK

    def __repr__(self) -> str:
        return f"<lease of job {self.id!r} in {self.queue} until {self.deadline:%H:%M:%S}>"


def read_token(token: str) -> Token:
    """Decode a `Lease.token` to queue, id, fence, worker and length in milliseconds."""
    try:
        data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        parts: Token = msgspec.msgpack.decode(data, type=Token)
    except (ValueError, TypeError):
        raise OptionError(f"{token!r:.80} is not a lease token: pass the token printed by `holdfast lease`") from None
    return parts


def _as_error(error: BaseException | str | None, otherwise: JobError) -> JobError:
    if error is None:
        return otherwise
    if isinstance(error, BaseException):
        return error_from_exception(error, "retriable")
    return truncate_error(JobError(type=otherwise.type, message=error.encode("utf-8", "replace").decode()))
