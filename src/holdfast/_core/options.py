"""Options as callers write them: one table, and the checks and conversions that follow from it.

To add an option to tasks, write three things:
1. Its key and its type in the TypedDict of each place where it is allowed. Type checkers of users read these.
2. Its row in `OPTIONS`: name, help, default, bounds. Checks, docs/reference/api.md and the command line follow from it.
3. A field of the same name (`name_ms` for a length) in the struct that carries the value, and the code that reads it:
   `Policy` or `QueueConfig` (retry_policy.py) for a worker, `Work` (jobs.py) for a value stored with each request.

Three words for time: `timeout` limits a run, `wait` is how long a caller waits, `lease` and `seconds` are the length of
a lease. Callers pass lengths as seconds or timedeltas, points in time as aware datetimes; fields are as in jobs.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Required, TypedDict, get_args, get_origin, get_type_hints

import msgspec

from holdfast._core.extension import MAX_HEADERS, MAX_HEADERS_BYTES
from holdfast._core.jobs import DEFAULT_PRIORITY, MAX_MS, Update
from holdfast.errors import OptionError

Seconds = float | timedelta
OnConflict = Literal["keep", "update", "raise"] | Update
IdTemplate = str | Callable[..., str]
Delivery = Literal["at_least_once", "at_most_once"]
ErrorTypes = type[Exception] | tuple[type[Exception], ...]
Delays = Seconds | Sequence[Seconds]
"""Delays before the first retry, the second and so on; the last one is used for all further retries."""
BackoffFunction = Callable[[int, Exception], Seconds | None]
"""Takes the number of the retry, 1 for the first, and the exception. None means the backoff without the function."""
Backoff = Delays | BackoffFunction
Expires = Seconds | datetime
Headers = Mapping[str, str]

DEFAULT_WAIT_S = 30.0
MAX_WAIT_S = 30 * 86_400
"""30 days. A caller that waits for longer passes None."""
MAX_COUNT = 1_000_000
MAX_DELAYS = 100
"""Maximum number of delays of one backoff."""


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
    backoff: Delays
    expires: Expires
    headers: Headers


class UsingOptions(EnqueueOptions, total=False):
    """Options of one call of a task: `task.using`."""

    wait: Seconds | None


class HandlerOptions(TypedDict, total=False):
    """Options of a fail handler. A task has them too."""

    timeout: Seconds
    max_retries: int
    max_stalls: int
    max_timeouts: int
    retry_on: ErrorTypes
    no_retry_on: ErrorTypes
    backoff: Backoff
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
    expires: Expires
    remember_failures: bool
    result_ttl: Seconds
    dedup_ttl: Seconds
    delivery: Delivery
    on_storage_loss: Literal["hold", "kill"]
    codec: str


class StubOptions(TypedDict, total=False):
    """Options of a task that is defined in another program: what a producer needs."""

    name: Required[str]
    unique: IdTemplate
    singleton: IdTemplate
    priority: int
    expires: Expires
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
    """Type of the value that a caller passes, as in the TypedDicts."""
    help: str
    """One sentence that is true in every place where the option is allowed: for the docs and the command line."""
    default: Any = None
    default_text: str = "none"
    """How the docs describe a default of None."""
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
        """Default of the option in the place of this TypedDict."""
        return _OTHER_DEFAULTS.get(place, {}).get(self.name, self.default)

    def convert(self, value: Any) -> Any:
        """Check a value that a caller passed and return the value of the field. Raises `OptionError`."""
        least, most = self.bounds
        if self.is_length:
            return to_ms(self.name, value, round(1000 * least), round(1000 * most))
        if self.type is int:
            return to_count(self.name, value, int(least), int(most))
        if self.type is datetime:
            return to_at(self.name, value)
        if self.type is bool:
            return to_flag(self.name, value)
        if self.type is Expires:
            if isinstance(value, datetime):
                to_at(self.name, value)
                return value
            return to_ms(self.name, value, round(1000 * least), round(1000 * most))
        if self.type is ErrorTypes:
            return to_error_types(self.name, value)
        if self.type == Headers:
            return to_headers(self.name, value)
        if self.type is Backoff:
            return value if callable(value) else to_delays(self.name, value)
        if get_origin(self.type) is Literal:
            choices: tuple[str, ...] = get_args(self.type)
            if value not in choices:
                raise OptionError(f"{self.name} must be one of {', '.join(map(repr, choices))}, not {value!r:.60}")
        return value


_TYPES = {
    name: type for place in (LeaseOptions, UsingOptions, TaskOptions) for name, type in get_type_hints(place).items()
}
"""Type of each option. A place may allow only a part of it: a request takes no function as `backoff`."""


def _row(name: str, help: str, **more: Any) -> Option:
    return Option(name, _TYPES[name], help, **more)


RESULT_TTL = "3,600 s; 300 s if there is no result and no chosen id"

_ROWS = [
    _row("name", "Name of the queue.", default_text="`module.function`"),
    _row(
        "unique",
        'Template such as "sync:{user}", or function, that makes the id from the arguments. '
        "A second request with this id is a duplicate and does not run.",
    ),
    _row(
        "singleton",
        'Template such as "sync:{user}", or function, that makes the id from the arguments. '
        "A second request with this id replaces a waiting request. "
        "If the job runs, it runs again afterwards.",
    ),
    _row("id", "Id of the job in its queue, 1 to 512 bytes.", default_text="a new one"),
    _row(
        "on_conflict",
        "If the id exists: keep the old request, update it, or raise DuplicateJob.",
        default_text='`"keep"`; `"update"` for a singleton',
    ),
    _row("delay", "Time from now until the job is due."),
    _row("run_at", "Time at which the job is due, with a time zone: 2027-01-31T08:00:00+01:00.", default_text="now"),
    _row(
        "expires",
        "After this time the job does not start any more: it fails. "
        "Seconds count from the time when the job is due. You can also give a point in time.",
        default_text="never",
        least=0.001,
        most=MAX_MS // 1000,
    ),
    _row(
        "headers",
        "Small map of text that handlers, hooks and fail handlers see: at most 16 entries, 4,096 bytes as JSON.",
    ),
    _row("timeout", "Maximum length of one run.", default=60, least=0.001),
    _row("max_retries", "Maximum number of retries after an exception.", default=10, default_text="no limit"),
    _row("max_stalls", "How often a job may lose its worker or process.", default=3, default_text="no limit"),
    _row("max_timeouts", "How many runs of a job may time out.", default=3),
    _row("retry_on", "Only these exceptions are retried; others fail the job at once.", default_text="all exceptions"),
    _row("no_retry_on", "These exceptions fail the job at once."),
    _row(
        "backoff",
        "Delays before the first retry, the second and so on, without jitter. Further retries use the last delay.",
        default_text="`min_backoff` to `max_backoff`",
    ),
    _row("min_backoff", "Time before the first retry; it doubles with each further retry, with jitter.", default=2),
    _row("max_backoff", "Maximum time before a retry.", default=300),
    _row("priority", "Priority of the job in its queue; higher first.", default=DEFAULT_PRIORITY, most=9),
    _row("result_ttl", "How long the outcome of a completed job is kept.", default_text=RESULT_TTL),
    _row(
        "dedup_ttl",
        "For this time after a job has completed, a new request with its id does not run, but gets the old result. "
        'If on_conflict is "update", the new request runs. This is the default of singletons.',
        default_text="as `result_ttl`",
    ),
    _row("failure_ttl", "How long the record of a failed job is kept.", default=7 * 86_400),
    _row(
        "remember_failures",
        "While the record of a failed job is kept, a new request with its id gets the failure and does not run.",
        default=False,
    ),
    _row("cancel_grace", "How long a run may take to end after it was asked to stop. Then it is killed.", default=1),
    _row("delivery", "With at_most_once a job that was started never runs again.", default="at_least_once"),
    _row(
        "on_storage_loss",
        "What happens to runs while the storage cannot be reached: they continue (hold), or the worker kills them "
        "before their leases end (kill).",
        default_text='`"hold"`; `"kill"` for a singleton',
    ),
    _row(
        "size",
        "Units of capacity that one run uses. A child process has 100: at size 10 it runs ten jobs at the same time. "
        "An inline worker has 1,000.",
        default=10,
        least=1,
        most=100_000,
    ),
    _row("concurrency", "Maximum number of runs at the same time in one worker.", default_text="no limit", least=1),
    _row("queue_priority", "A worker serves queues with a higher number first.", default=100),
    _row("codec", "Name of the codec that writes arguments and results.", default_text="the app's"),
    _row("seconds", "Length of the lease.", default=30, least=0.1, most=86_400),
    _row("wait", "How long the call waits; 0 checks once and does not wait.", default=DEFAULT_WAIT_S, most=MAX_WAIT_S),
]
OPTIONS = {option.name: option for option in _ROWS}
"""Every option by its name."""
_OTHER_DEFAULTS: dict[type[Any], dict[str, Any]] = {
    HandlerOptions: {"max_retries": 100, "min_backoff": 10, "max_backoff": 900},
    PullOptions: {"timeout": None, "max_retries": None, "max_stalls": None, "max_timeouts": None, "min_backoff": 0},
}
"""Defaults of a place that differ from those of the table."""


def options_of(place: type[Any]) -> list[Option]:
    """Return the options of a TypedDict, in the order of the table."""
    return [option for option in _ROWS if option.name in place.__annotations__]


def check_names(what: str, place: type[Any], options: Mapping[str, Any]) -> None:
    """Refuse an option that the TypedDict `place` does not have. `what` names the place in the message."""
    for name in options:
        if name not in place.__annotations__:
            names = sorted(place.__annotations__)
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(names)}"
            raise OptionError(f"{what} has no option {name!r}: {hint}")


def given_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request as fields, checked and converted. An option that is None counts as not given."""
    return {OPTIONS[name].field: OPTIONS[name].convert(value) for name, value in options.items() if value is not None}


def all_fields(place: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of the table as a field: the given ones, checked and converted, else the default of the
    place. None is refused unless it is the default."""
    fields: dict[str, Any] = {}
    for option in _ROWS:
        default = option.default_in(place)
        value = options.get(option.name, default)
        fields[option.field] = None if value is None and default is None else option.convert(value)
    return fields


def to_ms(name: str, value: Seconds, least_ms: int = 0, most_ms: int = MAX_MS) -> int:
    """Convert a number of seconds or a timedelta to milliseconds, rounded up."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise OptionError(f"{name} must be seconds or a timedelta, not {value!r:.60} ({type(value).__name__})")
    ms = math.ceil(round(1000 * seconds, 3)) if 0 <= seconds <= most_ms else -1
    if not least_ms <= ms <= most_ms:
        bounds = f"{least_ms / 1000:,.12g} to {most_ms / 1000:,.12g}"
        raise OptionError(f"{name} must be from {bounds} seconds, not {value!r:.60}")
    return ms


def to_at(name: str, value: datetime) -> int:
    """Convert a datetime with a time zone to microseconds since the epoch."""
    if not isinstance(value, datetime):
        raise OptionError(f"{name} must be a datetime with a timezone, not {value!r:.60} ({type(value).__name__})")
    if value.utcoffset() is None:
        raise OptionError(f"{name}={value!r} has no timezone: use datetime.now(UTC) + … or value.astimezone()")
    at = round((value - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))
    if not 1 <= at < 4_102_444_800_000_000:
        raise OptionError(f"{name} must be between 1970 and 2100, not {value!r:.60}")
    return at


def from_at(at: int) -> datetime:
    return datetime.fromtimestamp(at // 1_000_000, UTC) + timedelta(microseconds=at % 1_000_000)


def to_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {value!r:.60}")
    return value


def to_error_types(name: str, value: ErrorTypes) -> tuple[type[Exception], ...]:
    types = value if isinstance(value, tuple) else (value,)
    for one in types:
        if not isinstance(one, type) or not issubclass(one, Exception):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"{name} must be an exception class or a tuple of them, not {value!r:.60}")
    return types


def to_delays(name: str, value: Delays) -> tuple[int, ...]:
    """Convert a length or a list of lengths to milliseconds."""
    delays: Sequence[Any] = [value] if isinstance(value, int | float | timedelta | str) else value
    if not isinstance(delays, Sequence):
        raise OptionError(f"{name} must be seconds, a timedelta or a list of them, not {value!r:.60}")
    if not 1 <= len(delays) <= MAX_DELAYS:
        raise OptionError(f"{name} must have 1 to {MAX_DELAYS} delays, not {len(delays)}")
    return tuple(to_ms(name, delay) for delay in delays)


def to_headers(name: str, value: Headers) -> bytes:
    """Check headers, and return them as JSON."""
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for item in value.items() for part in item):
        raise OptionError(f"{name} must be a dict with text as keys and values, not {value!r:.60}")
    try:
        data = msgspec.json.encode({str.__str__(key): str.__str__(text) for key, text in value.items()})
    except UnicodeEncodeError as error:
        raise OptionError(f"{name} cannot be encoded as UTF-8: {error}") from None
    if len(value) > MAX_HEADERS or len(data) > MAX_HEADERS_BYTES:
        raise OptionError(
            f"{name} has {len(value)} entries and {len(data)} bytes as JSON: at most {MAX_HEADERS} entries and"
            f" {MAX_HEADERS_BYTES} bytes are allowed"
        )
    return data


def to_count(name: str, value: int, least: int = 0, most: int = MAX_COUNT) -> int:
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{name} must be a whole number from {least} to {most}, not {value!r:.60}")
    return value


def to_update(value: OnConflict) -> Update | None:
    """Return how a request changes a job whose id exists; None keeps the job unchanged."""
    if isinstance(value, Update):
        return value
    if value not in ("keep", "update", "raise"):
        raise OptionError(f"on_conflict must be 'keep', 'update', 'raise' or Update(…), not {value!r:.60}")
    return Update() if value == "update" else None
