"""Failures as data: what is stored of an exception, and what a fail handler's job carries. Reading an exception never
fails, whatever its class does.
"""

from __future__ import annotations

import concurrent.futures.thread
import traceback
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import msgspec

from holdfast._core.jobs import Job, Work
from holdfast._core.options import to_at, to_ms
from holdfast.errors import JobError, Retry

MAX_MESSAGE = 4_096
"""Characters of an error's message that are stored: the first ones."""
MAX_TRACEBACK = 16_384
"""Characters of a traceback that are stored: the last ones."""
MAX_FOLLOW_UP_BYTES = 524_288
"""A failed job's payload travels to its fail handler unless it is larger; then the handler's run looks it up."""

_hidden_files = {concurrent.futures.thread.__file__}
"""Files whose frames are the same for every run, and are left out of stored tracebacks."""


def hide_frames_of(file: str) -> None:
    """Leave the frames of this file out of stored tracebacks: for the modules that call handlers, at import."""
    _hidden_files.add(file)


def error_from_exception(error: BaseException, kind: Literal["permanent", "retriable", "timeout"]) -> JobError:
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be made)"
    text = _traceback(error)
    details = safe_getattr(error, "details")
    if details is not None:
        try:
            if len(msgspec.json.encode(details)) > MAX_TRACEBACK:
                details = None
        except (TypeError, ValueError, RecursionError):
            details = None
    name = type(error).__qualname__
    return truncate_error(
        JobError(type=name, message=_clean(message), kind=kind, traceback=_clean(text), details=details)
    )


def safe_getattr(error: BaseException, name: str) -> Any:
    """An attribute of any exception; None if it has none, or if reading it fails."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def _traceback(error: BaseException) -> str:
    """A traceback without the frames that are the same for every run."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        for part in _parts(shown):
            part.stack = traceback.StackSummary.from_list([f for f in part.stack if f.filename not in _hidden_files])
        return "".join(shown.format())
    except Exception:
        return "(its traceback could not be made)"


def _parts(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """A traceback, and those of what caused it."""
    yield shown
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            yield from _parts(other)


def _clean(text: str) -> str:
    """Text that can be written: a lone surrogate cannot."""
    return text.encode("utf-8", "replace").decode()


def retry_time(error: BaseException) -> tuple[int | None, int | None]:
    """When the error says that the job should run again."""
    if isinstance(error, Retry):
        delay_ms = None if error.delay is None else to_ms("Retry's delay", error.delay)
        return delay_ms, None if error.at is None else to_at("Retry's at", error.at)
    at = safe_getattr(error, "retry_at")
    if isinstance(at, datetime):
        return None, to_at("retry_at", at)
    if isinstance(at, int | float) and not isinstance(at, bool) and 0 < at < 4_102_444_800:
        return None, round(at * 1_000_000)
    return None, None


def encode_error(error: JobError) -> bytes:
    return msgspec.json.encode(error)


def decode_error(data: bytes | None) -> JobError:
    """The error in a record; one that another program wrote there becomes an `Error` with its text."""
    try:
        return msgspec.json.decode(data or b"", type=JobError)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return JobError(type="Error", message=(data or b"").decode("utf-8", "replace")[:MAX_MESSAGE])


def truncate_error(error: JobError) -> JobError:
    if len(error.message) <= MAX_MESSAGE and len(error.traceback) <= MAX_TRACEBACK:
        return error
    message = error.message if len(error.message) <= MAX_MESSAGE else error.message[: MAX_MESSAGE - 1] + "…"
    return msgspec.structs.replace(error, message=message, traceback=error.traceback[-MAX_TRACEBACK:])


HISTORY = ("run_at", "attempts", "retries", "stalls", "timeouts")
"""Fields of a failed job that its fail handler gets."""


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a fail handler's job. Its own id names the failed job: `id@generation`."""

    error: JobError
    run_at: int
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    codec: str
    form: Literal["json", "base64", "left"]
    """How the payload travels: as the JSON that it is, as bytes, or not at all, because it is large. Then it is still
    in the failed record."""
    payload: msgspec.Raw


def follow_up(job: Job, error: JobError, *, carry: bool = True) -> Work:
    """The job of the fail handler. It keeps its priority."""
    payload = job.work.payload or b""
    form: Literal["json", "base64", "left"] = "base64"
    if not carry or len(payload) > MAX_FOLLOW_UP_BYTES:
        form = "left"
    elif job.work.codec == "json" and _is_json(payload):
        form = "json"
    raw = payload if form == "json" else msgspec.json.encode(b"" if form == "left" else payload)
    data = FollowUp(
        error=error,
        codec=job.work.codec,
        form=form,
        payload=msgspec.Raw(raw),
        **{name: getattr(job, name) for name in HISTORY},
    )
    return Work(msgspec.json.encode(data), "json", job.work.priority)


def _is_json(payload: bytes) -> bool:
    """Raw JSON goes out as it came in: what is not JSON would spoil the whole."""
    try:
        msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
