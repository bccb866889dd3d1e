"""Exceptions as data: what is stored of one, and what it says of itself. Whatever it is, reading it never fails."""

from __future__ import annotations

import concurrent.futures.thread
import traceback
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast._core import retry_policy
from holdfast._core.options import to_at, to_ms
from holdfast.errors import JobError, Retry

_OURS = {str(Path(__file__).parents[1] / "_worker" / "handler.py"), concurrent.futures.thread.__file__}
"""Where frames come from that are the same for every run."""


def error_from_exception(error: BaseException, kind: Literal["permanent", "retriable", "timeout"]) -> JobError:
    """An exception as it is stored."""
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be made)"
    text = _traceback(error)
    details = safe_getattr(error, "details")
    if details is not None:
        try:
            if len(msgspec.json.encode(details)) > retry_policy.MAX_TRACEBACK:
                details = None
        except (TypeError, ValueError, RecursionError):
            details = None
    name = type(error).__qualname__
    told = JobError(type=name, message=message, kind=kind, traceback=text, details=details)
    return retry_policy.cut(msgspec.structs.replace(told, message=_clean(message), traceback=_clean(text)))


def safe_getattr(error: BaseException, name: str) -> Any:
    """An attribute of somebody's exception; None if it has none, or if asking for it fails."""
    try:
        return getattr(error, name, None)
    except Exception:
        return None


def _traceback(error: BaseException) -> str:
    """A traceback without the frames that are ours: they are the same for every run, and say nothing."""
    try:
        told = traceback.TracebackException.from_exception(error)
        for part in _parts(told):
            part.stack = traceback.StackSummary.from_list([f for f in part.stack if f.filename not in _OURS])
        return "".join(told.format())
    except Exception:
        return "(its traceback could not be made)"


def _parts(told: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """A traceback, and those of what caused it."""
    yield told
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
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
