"""Options as callers write them, and what they mean: seconds become milliseconds, datetimes become microseconds.

Three words for time: `timeout` limits a run, `wait` is how long a caller waits, `lease` and `seconds` are the length of
a lease. Every length is a number of seconds or a timedelta.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Required, TypedDict

from holdfast._core.jobs import MAX_MS, Update
from holdfast.errors import OptionError

Seconds = float | timedelta
OnConflict = Literal["keep", "update", "raise"] | Update
IdTemplate = str | Callable[..., str]

DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 30 * 86_400
"""A month: who waits longer says None."""


class EnqueueOptions(TypedDict, total=False):
    """What may be said of one request."""

    id: str | bytes
    """The job's name in its queue. Without one, each request is a job of its own."""
    on_conflict: OnConflict
    """What to do about an id that is there: "keep" it, "update" it or `Update(…)`, or "raise" `DuplicateJob`."""
    delay: Seconds
    run_at: datetime
    """An aware datetime; not before then."""
    priority: int
    """0 to 9, higher first; 5 unless the task says otherwise."""
    result_ttl: Seconds
    """How long the end is remembered."""
    dedup_ttl: Seconds
    """How long a completed id answers "keep" from its cache; as long as the result, unless given."""
    timeout: Seconds
    max_retries: int
    max_stalls: int
    max_timeouts: int


class UsingOptions(EnqueueOptions, total=False):
    """What may be said of one call of a task."""

    wait: Seconds | None
    """How long to wait for the result: 30 s unless given, None for ever, 0 looks once."""


class HandlerOptions(TypedDict, total=False):
    """How a handler is run. The defaults are in holdfast.policy, and other ones for fail handlers."""

    timeout: Seconds
    max_retries: int
    max_stalls: int
    max_timeouts: int
    min_backoff: Seconds
    max_backoff: Seconds
    failure_ttl: Seconds
    cancel_grace: Seconds
    """How long a run may take to end once it was cancelled."""
    size: int
    """Units of capacity that a run takes; a process has 100, an inline worker 1,000."""
    concurrency: int
    """Runs at the same time, in one worker."""
    queue_priority: int
    """Of the queue among those that a worker serves, higher first."""


class TaskOptions(HandlerOptions, total=False):
    """What may be said of a task."""

    name: str
    """The queue's name; `module.function` unless given."""
    unique: IdTemplate
    """The id, made from the arguments: a second request for it is a duplicate of the first."""
    singleton: IdTemplate
    """The same, but a second request updates the first, or runs after it: the newest one is never dropped."""
    priority: int
    result_ttl: Seconds
    dedup_ttl: Seconds
    delivery: Literal["at_least_once", "at_most_once"]
    on_storage_loss: Literal["hold", "kill"]
    """What a run does when the storage cannot be reached: go on, or end before its lease can pass on (the default for
    a singleton)."""
    codec: str
    """Which codec writes arguments and results: json unless given."""


class StubOptions(TypedDict, total=False):
    """What a producer must know of a task that is defined elsewhere."""

    name: Required[str]
    unique: IdTemplate
    singleton: IdTemplate
    priority: int
    delivery: Literal["at_least_once", "at_most_once"]
    codec: str


def to_ms(name: str, value: Seconds, least_ms: int = 0, most_ms: int = MAX_MS) -> int:
    """A length in milliseconds. Refuses what is not a number of seconds or a timedelta."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise OptionError(f"{name} is a number of seconds or a timedelta, not {value!r:.60} ({type(value).__name__})")
    ms = math.ceil(round(1000 * seconds, 3)) if 0 <= seconds <= most_ms else -1
    if not least_ms <= ms <= most_ms:
        raise OptionError(f"{name} is from {least_ms / 1000:g} to {most_ms / 1000:g} seconds, not {value!r:.60}")
    return ms


def to_at(name: str, value: datetime) -> int:
    """A point in time in microseconds since the epoch. A naive datetime is refused: nobody knows whose clock it is."""
    if not isinstance(value, datetime):
        raise OptionError(f"{name} is a datetime with a timezone, not {value!r:.60} ({type(value).__name__})")
    if value.utcoffset() is None:
        raise OptionError(
            f"{name}={value!r} has no timezone: use datetime.now(UTC) + … or value.astimezone(), or give a delay"
        )
    at = round((value - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    if not 1 <= at < 4_102_444_800_000_000:
        raise OptionError(f"{name} is between 1970 and 2100, not {value!r:.60}")
    return at


def from_at(at: int) -> datetime:
    return datetime.fromtimestamp(at // 1_000_000, UTC) + timedelta(microseconds=at % 1_000_000)


def to_wait_s(value: Seconds | None) -> float | None:
    """How long a caller waits, in seconds; None is for ever."""
    return None if value is None else to_ms("wait", value, 0, MAX_WAIT_S * 1000) / 1000


def to_count(name: str, value: int, least: int = 0, most: int = 1_000_000) -> int:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{name} is a whole number from {least} to {most}, not {value!r:.60}")
    return value


def to_choice(name: str, value: str, choices: Iterable[str]) -> str:
    choices = list(choices)
    if value not in choices:
        raise OptionError(f"{name} is one of {', '.join(map(repr, choices))}, not {value!r:.60}")
    return value


def to_update(value: OnConflict) -> Update | None:
    """The rule for an id that is there; None keeps it."""
    if isinstance(value, Update):
        return value
    if value not in ("keep", "update", "raise"):
        raise OptionError(f"on_conflict is 'keep', 'update', 'raise' or Update(…), not {value!r:.60}")
    return Update() if value == "update" else None


def check_known(what: str, options: Mapping[str, Any], known: type) -> None:
    """Refuse an option that there is none of, and name the one that was probably meant."""
    names = known.__annotations__.keys()
    for name in options:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(names))}"
            raise OptionError(f"{what} has no option {name!r}: {hint}")
