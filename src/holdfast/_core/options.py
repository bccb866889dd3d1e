"""Options as callers write them: one table, and the checks and conversions that follow from it.

To add an option to tasks, write three things:
1. Its key and its type in the TypedDict of each place where it is allowed. Type checkers of users read these.
2. Its row in `OPTIONS`: name, help, default, bounds.
3. Its use: a field of the same name (`name_ms` for a length) in the struct that carries the value, which is `Policy` or
   `QueueConfig` (retry_policy.py) for what a worker applies, and `Work` (jobs.py) for what is stored with each request;
   and the code that reads this field.
The check of unknown names and of bounds, the conversion, the tables of docs/reference/api.md and the options of the
command line follow from the TypedDict and the row.

Three words for time: `timeout` limits a run, `wait` is how long a caller waits, `lease` and `seconds` are the length of
a lease. Every length is a number of seconds or a timedelta; fields hold milliseconds and end in `_ms`. Points in time
are aware datetimes; fields hold microseconds since the epoch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Required, TypedDict, get_args, get_origin, get_type_hints

import msgspec

from holdfast._core.jobs import DEFAULT_PRIORITY, MAX_MS, Update
from holdfast.errors import OptionError

Seconds = float | timedelta
OnConflict = Literal["keep", "update", "raise"] | Update
IdTemplate = str | Callable[..., str]
Delivery = Literal["at_least_once", "at_most_once"]
OnStorageLoss = Literal["hold", "kill"]

DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 30 * 86_400
"""30 days. A caller that waits for longer passes None."""
MAX_COUNT = 1_000_000


class EnqueueOptions(TypedDict, total=False):
    """Options of one request: `queue.enqueue`, `queue.bind` and `queue.call`."""

    id: str | bytes
    on_conflict: OnConflict
    delay: Seconds
    run_at: datetime
    priority: int
    result_ttl: Seconds
    dedup_ttl: Seconds
    timeout: Seconds
    max_retries: int
    max_stalls: int
    max_timeouts: int


class UsingOptions(EnqueueOptions, total=False):
    """Options of one call of a task: `task.using`."""

    wait: Seconds | None


class HandlerOptions(TypedDict, total=False):
    """Options of a fail handler, which a task has too: how it is run."""

    timeout: Seconds
    max_retries: int
    max_stalls: int
    max_timeouts: int
    min_backoff: Seconds
    max_backoff: Seconds
    failure_ttl: Seconds
    cancel_grace: Seconds
    size: int
    concurrency: int
    queue_priority: int


class TaskOptions(HandlerOptions, total=False):
    """Options of a task."""

    name: str
    unique: IdTemplate
    singleton: IdTemplate
    priority: int
    result_ttl: Seconds
    dedup_ttl: Seconds
    delivery: Delivery
    on_storage_loss: OnStorageLoss
    codec: str


class StubOptions(TypedDict, total=False):
    """Options of a task that is defined in another program: what a producer needs."""

    name: Required[str]
    unique: IdTemplate
    singleton: IdTemplate
    priority: int
    delivery: Delivery
    codec: str


class PullOptions(TypedDict, total=False):
    """Limits of a queue that is pulled from: `app.queue` and `app.lease`."""

    max_retries: int
    max_stalls: int
    min_backoff: Seconds
    max_backoff: Seconds
    result_ttl: Seconds
    failure_ttl: Seconds


class LeaseOptions(TypedDict, total=False):
    """Options of `queue.lease` and `queue.leased`."""

    seconds: Seconds
    wait: Seconds | None


class Option(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    type: Any
    """What a caller may pass, None aside: as in the TypedDicts."""
    help: str
    """One sentence that is true in every place where the option is allowed: for the docs and the command line."""
    default: Any = None
    fail_default: Any = msgspec.UNSET
    """Default in a fail handler, if it differs."""
    pull_default: Any = msgspec.UNSET
    """Default in a queue that is pulled from, if it differs."""
    default_text: str = ""
    """How the docs describe the default, where it is not a plain value."""
    least: float = 0
    """Lower bound: seconds of a length, or a count."""
    most: float = 0
    """Upper bound; the upper bound of its type if 0."""

    @property
    def is_length(self) -> bool:
        return self.type in (Seconds, Seconds | None)

    @property
    def field(self) -> str:
        """Name of the field that carries the value."""
        return f"{self.name}_ms" if self.is_length else self.name

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound of a length in seconds, or of a count."""
        return self.least, self.most or (MAX_MS // 1000 if self.is_length else MAX_COUNT)

    def default_in(self, place: type[Any]) -> Any:
        """The default in one place."""
        special = {HandlerOptions: self.fail_default, PullOptions: self.pull_default}.get(place, msgspec.UNSET)
        return self.default if special is msgspec.UNSET else special

    def convert(self, value: Any) -> Any:
        """The value of the field, from the value that a caller passed. Raises `OptionError`."""
        least, most = self.bounds
        if self.is_length:
            return to_ms(self.name, value, round(1000 * least), round(1000 * most))
        if self.type is int:
            return to_count(self.name, value, int(least), int(most))
        if self.type is datetime:
            return to_at(self.name, value)
        if get_origin(self.type) is Literal:
            choices: tuple[str, ...] = get_args(self.type)
            if value not in choices:
                raise OptionError(f"{self.name} is one of {', '.join(map(repr, choices))}, not {value!r:.60}")
        return value


_TYPES = {
    name: type
    for place in (TaskOptions, StubOptions, UsingOptions, PullOptions, LeaseOptions)
    for name, type in get_type_hints(place).items()
}


def _row(name: str, help: str, **more: Any) -> Option:
    return Option(name, _TYPES[name], help, **more)


_ROWS = [
    _row("name", "Name of the queue.", default_text="`module.function`"),
    _row(
        "unique",
        "Id of the job, made from the arguments by a template or a function. A second request is a duplicate.",
        default_text="none",
    ),
    _row(
        "singleton", "Like unique, but a second request updates the first one, or runs after it.", default_text="none"
    ),
    _row("id", "Id of the job in its queue, 1 to 512 bytes.", default_text="a new one"),
    _row(
        "on_conflict",
        "If the id exists: keep the old request, update it, or raise DuplicateJob.",
        default_text='`"keep"`; `"update"` for a singleton',
    ),
    _row("delay", "Time from now until the job is due.", default_text="none"),
    _row(
        "run_at",
        "Point in time at which the job is due, with a time zone: 2027-01-31T08:00:00+01:00.",
        default_text="now",
    ),
    _row("timeout", "Maximum length of one run.", default=60, pull_default=None, least=0.001),
    _row(
        "max_retries",
        "Fail a job that was retried more often than this after an exception.",
        default=10,
        fail_default=100,
        pull_default=None,
        default_text="no limit",
    ),
    _row(
        "max_stalls",
        "Fail a job whose worker or process was lost more often than this.",
        default=3,
        pull_default=None,
        default_text="no limit",
    ),
    _row("max_timeouts", "Fail a job that timed out more often than this.", default=3, pull_default=None),
    _row(
        "min_backoff",
        "Time before the first retry; it doubles with each further retry, with jitter.",
        default=2,
        fail_default=10,
        pull_default=0,
    ),
    _row("max_backoff", "Maximum time before a retry.", default=300, fail_default=900),
    _row("priority", "Priority of the job in its queue; higher first.", default=DEFAULT_PRIORITY, most=9),
    _row(
        "result_ttl",
        "How long the end of a job is remembered, if it has a chosen id, a result, or a waiting caller.",
        default=3_600,
    ),
    _row(
        "dedup_ttl",
        "How long a completed id answers further requests with its old result.",
        default_text="as `result_ttl`",
    ),
    _row("failure_ttl", "How long a failed job is listed.", default=7 * 86_400),
    _row("cancel_grace", "How long a run may take to end after it was cancelled.", default=1),
    _row("delivery", "With at_most_once a job that was started never runs again.", default="at_least_once"),
    _row(
        "on_storage_loss",
        "Whether runs continue while the storage cannot be reached, or end before their lease can expire.",
        default_text='`"hold"`; `"kill"` for a singleton',
    ),
    _row(
        "size",
        "Units of capacity that a run takes; a process has 100, an inline worker 1,000.",
        default=10,
        least=1,
        most=100_000,
    ),
    _row("concurrency", "Maximum number of runs at the same time in one worker.", default_text="no limit", least=1),
    _row("queue_priority", "Priority of the queue among those of a worker; higher first.", default=100),
    _row("codec", "Name of the codec that writes arguments and results.", default_text="the app's"),
    _row("seconds", "Length of the lease.", default=30, least=0.1, most=86_400),
    _row("wait", "Maximum time to wait; 0 checks once.", default=DEFAULT_WAIT_S, most=MAX_WAIT_S),
]
OPTIONS = {option.name: option for option in _ROWS}
"""The table."""


def options_of(place: type[Any]) -> list[Option]:
    """The options that a TypedDict has."""
    return [option for option in _ROWS if option.name in place.__annotations__]


def check_names(what: str, place: type[Any], options: Mapping[str, Any]) -> None:
    """Refuse an unknown option, and suggest the one that was probably meant. `what` names the place to the caller."""
    for name in options:
        if name not in place.__annotations__:
            names = sorted(place.__annotations__)
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(names)}"
            raise OptionError(f"{what} has no option {name!r}: {hint}")


def given_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request as fields, checked and converted. None means the default, as if it were not given."""
    return {OPTIONS[name].field: OPTIONS[name].convert(value) for name, value in options.items() if value is not None}


def all_fields(place: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the table as a field: the given ones, checked and converted, and the defaults of this place.
    None is refused, except where it is the default."""
    fields: dict[str, Any] = {}
    for option in _ROWS:
        default = option.default_in(place)
        value = options.get(option.name, default)
        fields[option.field] = None if value is None and default is None else option.convert(value)
    return fields


def to_ms(name: str, value: Seconds, least_ms: int = 0, most_ms: int = MAX_MS) -> int:
    """A length in milliseconds, from a number of seconds or a timedelta; rounded up."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise OptionError(f"{name} is a number of seconds or a timedelta, not {value!r:.60} ({type(value).__name__})")
    ms = math.ceil(round(1000 * seconds, 3)) if 0 <= seconds <= most_ms else -1
    if not least_ms <= ms <= most_ms:
        raise OptionError(f"{name} is from {least_ms / 1000:g} to {most_ms / 1000:g} seconds, not {value!r:.60}")
    return ms


def to_at(name: str, value: datetime) -> int:
    """A point in time in microseconds since the epoch. Refuses a datetime without a time zone."""
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


def to_count(name: str, value: int, least: int = 0, most: int = 1_000_000) -> int:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{name} is a whole number from {least} to {most}, not {value!r:.60}")
    return value


def to_update(value: OnConflict) -> Update | None:
    """How a request changes a job whose id exists; None keeps the job as it is."""
    if isinstance(value, Update):
        return value
    if value not in ("keep", "update", "raise"):
        raise OptionError(f"on_conflict is 'keep', 'update', 'raise' or Update(…), not {value!r:.60}")
    return Update() if value == "update" else None
