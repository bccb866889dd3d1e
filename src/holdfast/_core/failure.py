"""Failures as data: the stored form of an exception, and the payload of a fail handler's job.

Reading an exception never raises, also if a method of its class does.
"""

from __future__ import annotations

import concurrent.futures.thread
import traceback
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Literal

import msgspec

from holdfast._core.extension import only_headers
from holdfast._core.jobs import Job, Work
from holdfast._core.options import to_at, to_ms
from holdfast.errors import JobError, Retry

MAX_MESSAGE = 4_096
"""Maximum number of characters of a stored message; the rest at its end is cut off."""
MAX_TRACEBACK = 16_384
"""Maximum number of characters of a stored traceback; the rest at its beginning is cut off."""
MAX_TRACEBACK_PART = 2_048
"""Maximum number of characters of one frame or message in a stored traceback, so that a message displaces no frame."""
MAX_FOLLOW_UP_BYTES = 524_288
"""Maximum size of a payload in the job of a fail handler, which reads a larger one from the failed record."""

_hidden_files = {concurrent.futures.thread.__file__}
"""Files whose frames are the same for every run. Stored tracebacks omit them."""


def hide_frames_of(file: str) -> None:
    """Omit the frames of this file from stored tracebacks. Modules that call handlers do this at import."""
    _hidden_files.add(file)


def error_from_exception(error: BaseException, kind: Literal["permanent", "retriable", "timeout"]) -> JobError:
    try:
        message = str(error)
    except Exception:
        message = "(str() of the exception raised)"
    details = safe_getattr(error, "details")
    try:
        fits = len(msgspec.json.encode(details)) <= MAX_TRACEBACK
    except (TypeError, ValueError, RecursionError):
        fits = False
    return truncate_error(
        JobError(
            type=type(error).__qualname__,
            message=_clean(message),
            kind=kind,
            traceback=_clean(_traceback(error)),
            details=details if fits else None,
        )
    )


def safe_getattr(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception; None if it does not exist, or if reading it raises."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def _traceback(error: BaseException) -> str:
    """Return the traceback as text, without the frames that are the same for every run."""
    try:
        shown = traceback.TracebackException.from_exception(error)
        for part in _parts(shown):
            part.stack = traceback.StackSummary.from_list([f for f in part.stack if f.filename not in _hidden_files])
        return "".join(map(_cut, shown.format()))
    except Exception:
        return "(formatting the traceback raised)"


def _cut(part: str) -> str:
    return part if len(part) <= MAX_TRACEBACK_PART else f"{part[: MAX_TRACEBACK_PART - 2]}…\n"


def visible_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception without its first frames that are the same for every run."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename in _hidden_files:
        shown = shown.tb_next
    return shown or error.__traceback__


def is_wrong_call(error: BaseException) -> bool:
    """Return whether an exception is the TypeError of a call with wrong arguments: it has no frame of the handler."""
    last = error.__traceback__ if isinstance(error, TypeError) else None
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_filename in _hidden_files


def _parts(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield a traceback and those of its causes, contexts and grouped exceptions."""
    yield shown
    for other in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if other is not None:
            yield from _parts(other)


def _clean(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def retry_time(error: BaseException) -> tuple[int | None, int | None]:
    """Return the delay in milliseconds, or else the wall time, at which the error asks the job to run again."""
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
    """Decode the error of a record. Bytes that are not a `JobError` become the message of an error of type `Error`."""
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
"""Fields of a failed job that the payload of its fail handler's job repeats."""


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a fail handler's job. The id of that job names the failed job: `id@generation`."""

    error: JobError
    run_at: int
    attempts: int
    retries: int
    stalls: int
    timeouts: int
    codec: str
    form: Literal["json", "base64", "left"]
    """Form of `payload`: the JSON itself, base64 of other bytes, or left in the failed record because of its size."""
    payload: msgspec.Raw


def follow_up(job: Job, error: JobError, *, carry: bool = True) -> Work:
    """Return the work of the fail handler's job. It has the priority and the headers of the failed job."""
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
    return Work(msgspec.json.encode(data), "json", job.work.priority, extension=only_headers(job.work.extension))


def _is_json(payload: bytes) -> bool:
    """Return whether a payload can be embedded as raw JSON; other bytes would make the whole follow-up invalid."""
    try:
        msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
