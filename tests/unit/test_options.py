"""Options as callers write them: lengths, points in time, counts, choices, and names that do not exist."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._client.request import RequestTemplate
from holdfast._client.task import queue_config, retry_rules
from holdfast._client.waiters import to_wait_s
from holdfast._core.extension import EXPIRES_AT, EXPIRES_IN, pack_numbers
from holdfast._core.jobs import MAX_MS, Update
from holdfast._core.options import (
    DEFAULT_WAIT_S,
    MAX_DELAYS,
    MAX_WAIT_S,
    OPTIONS,
    Delays,
    EnqueueOptions,
    HandlerOptions,
    LeaseOptions,
    Option,
    PullOptions,
    Seconds,
    StubOptions,
    TaskOptions,
    UsingOptions,
    all_fields,
    check_names,
    from_at,
    given_fields,
    options_of,
    to_at,
    to_count,
    to_ms,
    to_update,
)
from holdfast._core.retry_policy import Policy, QueueConfig
from holdfast.errors import OptionError
from tests.policies import FAIL_HANDLER, PULL, TASK

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.


class Nowhere(tzinfo):
    """A timezone that does not know its offset."""

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        return None


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (-0.0, 0),
        (1, 1_000),
        (0.5, 500),
        (0.1 + 0.2, 300),
        (1.001, 1_001),
        (0.0001, 1),
        (1.0001, 1_001),
        (timedelta(), 0),
        (timedelta(minutes=1, milliseconds=5), 60_005),
        (timedelta(microseconds=1), 1),
        (MAX_MS / 1000, MAX_MS),
        (timedelta(days=3650), MAX_MS),
    ],
)
def test_duration_is_seconds_or_a_timedelta_and_is_never_rounded_down(value: Any, ms: int) -> None:
    assert to_ms("delay", value) == ms


@patient
@given(st.integers(0, MAX_MS))
def test_every_number_of_milliseconds_can_be_given_in_seconds(ms: int) -> None:
    assert to_ms("delay", ms / 1000) == ms == to_ms("delay", timedelta(milliseconds=ms))


@pytest.mark.parametrize(
    "value",
    [
        *("5", b"5", None, True, False, [], Decimal(5), Fraction(5), 1j, datetime.now(UTC), object),
        math.nan,
    ],
)
def test_invalid_duration_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="delay must be seconds or a timedelta"):
        to_ms("delay", value)


@pytest.mark.parametrize(
    "value",
    [
        *(-1, -0.001, timedelta(days=-1), MAX_MS, timedelta.max, 1e306, -1e306, math.inf, -math.inf),
        pytest.param(10**400, id="huge"),
        pytest.param(-(10**400), id="hugely negative"),
    ],
)
def test_duration_out_of_bounds_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^delay "):
        to_ms("delay", value)


@patient
@given(st.one_of(st.floats(), st.integers(), st.timedeltas(), st.text(), st.none()))
def test_any_value_given_as_a_duration_is_accepted_or_refused(value: Any) -> None:
    try:
        assert 0 <= to_ms("delay", value) <= MAX_MS
    except OptionError as refusal:
        assert "delay" in str(refusal)  # noqa: PT017


@pytest.mark.parametrize(("value", "fits"), [(0.499, False), (0.5, True), (3600, True), (3600.001, False)])
def test_bounds_of_a_duration_are_inclusive(value: float, fits: bool) -> None:
    if fits:
        assert to_ms("lease", value, 500, 3_600_000) == value * 1000
    else:
        with pytest.raises(OptionError, match=r"lease must be from 0\.5 to 3,600 seconds"):
            to_ms("lease", value, 500, 3_600_000)


def test_a_point_in_time_is_the_same_in_every_timezone() -> None:
    at = datetime(2027, 1, 15, 8, 0, 0, 123_456, UTC)
    assert to_at("run_at", at) == 1_800_000_000_123_456
    assert to_at("run_at", at.astimezone(timezone(timedelta(hours=-11, minutes=-30)))) == 1_800_000_000_123_456


OFFSETS = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@patient
@given(st.datetimes(datetime(1970, 1, 2), datetime(2099, 12, 30), timezones=OFFSETS))
def test_point_in_time_is_exact_to_the_microsecond(value: datetime) -> None:
    at = to_at("run_at", value)
    assert from_at(at) == value.astimezone(UTC)
    assert from_at(at).tzinfo is UTC


@patient
@given(st.integers(1, 4_102_444_799_999_999))
def test_every_microsecond_can_be_given_as_a_point_in_time(at: int) -> None:
    assert to_at("run_at", from_at(at)) == at


@pytest.mark.parametrize("value", [datetime(2027, 1, 15), datetime(2027, 1, 15, tzinfo=Nowhere())])  # type: ignore[abstract]
def test_naive_datetime_is_refused_with_advice(value: datetime) -> None:
    with pytest.raises(OptionError, match=r"run_at=.* has no timezone: use datetime.now\(UTC\)"):
        to_at("run_at", value)


@pytest.mark.parametrize("value", [1_800_000_000, 1.8e9, "2027-01-15T08:00:00Z", date(2027, 1, 15), None, timedelta(1)])
def test_value_that_is_not_a_datetime_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="run_at must be a datetime with a timezone"):
        to_at("run_at", value)


@pytest.mark.parametrize("year", [1, 1969, 2100, 9999])
def test_point_in_time_outside_1970_to_2100_is_refused(year: int) -> None:
    with pytest.raises(OptionError, match="between 1970 and 2100"):
        to_at("run_at", datetime(year, 6, 1, tzinfo=timezone(timedelta(hours=-12))))


def test_last_microsecond_of_the_allowed_range_is_accepted() -> None:
    last = datetime(2099, 12, 31, 23, 59, 59, 999_999, UTC)
    assert from_at(to_at("run_at", last)) == last
    with pytest.raises(OptionError, match="between 1970 and 2100"):
        to_at("run_at", last + timedelta(microseconds=1))


def test_a_wait_is_seconds_or_for_ever() -> None:
    assert DEFAULT_WAIT_S == 30
    assert to_wait_s(None) is None
    assert to_wait_s(timedelta(days=30)) == MAX_WAIT_S == 2_592_000
    assert to_wait_s(0) == 0
    assert to_wait_s(1.5) == to_wait_s(timedelta(seconds=1.5)) == 1.5
    for bad in (-1, MAX_WAIT_S + 1, "5", True):
        with pytest.raises(OptionError, match="wait must be"):
            to_wait_s(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "fits"), [(-1, False), (0, True), (9, True), (10, False)])
def test_a_count_is_within_its_bounds(value: int, fits: bool) -> None:
    if fits:
        assert to_count("priority", value, 0, 9) == value
    else:
        with pytest.raises(OptionError, match="priority must be a whole number from 0 to 9"):
            to_count("priority", value, 0, 9)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, Decimal(1)])
def test_count_that_is_not_a_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="max_retries must be a whole number from 0"):
        to_count("max_retries", value)


def test_a_choice_is_one_of_the_choices() -> None:
    delivery = Option("delivery", Literal["a", "b"], "How.")
    assert delivery.convert("a") == "a"
    for bad in ("c", "", None, ["a"]):
        with pytest.raises(OptionError, match="delivery must be one of 'a', 'b', not"):
            delivery.convert(bad)


@pytest.mark.parametrize(
    ("value", "delays_ms"),
    [(5, (5_000,)), (timedelta(minutes=1), (60_000,)), ([1, 0.5], (1_000, 500)), ((0, timedelta(1)), (0, 86_400_000))],
)
def test_backoff_is_a_length_or_a_list_of_lengths(value: Any, delays_ms: tuple[int, ...]) -> None:
    assert OPTIONS["backoff"].convert(value) == delays_ms


@pytest.mark.parametrize("value", ["5", [], [1] * (MAX_DELAYS + 1), [1, "2"], [-1], {1, 2}, None, object()])
def test_backoff_that_is_not_a_list_of_lengths_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="backoff must"):
        OPTIONS["backoff"].convert(value)


def test_a_backoff_function_is_taken_by_a_task_and_refused_by_a_request() -> None:
    def backoff(retry: int, error: Exception) -> float:
        return retry

    assert retry_rules({"backoff": backoff}).backoff is backoff
    with pytest.raises(OptionError, match="a function as backoff belongs to the task"):
        RequestTemplate("q", {"backoff": backoff})


NOON = datetime(2027, 1, 15, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("options", "entry"),
    [
        ({"expires": 5}, (EXPIRES_IN, 5_000)),
        ({"expires": timedelta(minutes=1), "delay": 9}, (EXPIRES_IN, 69_000)),
        ({"expires": 5, "run_at": NOON}, (EXPIRES_AT, to_at("", NOON) + 5_000_000)),
        ({"expires": NOON, "delay": 9}, (EXPIRES_AT, to_at("", NOON))),
    ],
)
def test_expiry_of_a_request_counts_from_the_time_when_it_is_due(options: Any, entry: tuple[int, int]) -> None:
    (found,) = RequestTemplate("q", options).request.work.extension
    assert found == (entry[0], pack_numbers(entry[1]))


@pytest.mark.parametrize("value", [0, -1, "5", True, datetime(2027, 1, 15)])
def test_expiry_that_is_not_a_time_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="expires"):
        OPTIONS["expires"].convert(value)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_option_that_is_not_true_or_false_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="remember_failures must be True or False"):
        OPTIONS["remember_failures"].convert(value)


@pytest.mark.parametrize("value", [ValueError, (ValueError, OSError)])
def test_exceptions_are_a_class_or_a_tuple_of_classes(value: Any) -> None:
    assert OPTIONS["retry_on"].convert(value) == (value if isinstance(value, tuple) else (value,))


@pytest.mark.parametrize(
    "value", ["ValueError", ValueError("no"), [ValueError], (ValueError, 5), int, SystemExit, None]
)
def test_what_is_not_an_exception_class_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(OptionError, match="no_retry_on must be an exception class or a tuple"):
        OPTIONS["no_retry_on"].convert(value)


@pytest.mark.parametrize(
    ("value", "update"),
    [
        ("keep", None),
        ("raise", None),
        ("update", Update()),
        (Update(run_at="if_later"), Update(run_at="if_later")),
    ],
)
def test_a_conflict_has_a_rule(value: Any, update: Update | None) -> None:
    assert to_update(value) == update


@pytest.mark.parametrize("value", ["replace", "", None, True, ["keep"], Update])
def test_unknown_rule_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="on_conflict must be 'keep', 'update', 'raise' or Update"):
        to_update(value)


@pytest.mark.parametrize(
    ("place", "name", "meant"),
    [
        (UsingOptions, "prioriy", "priority"),
        (UsingOptions, "waits", "wait"),
        (UsingOptions, "max_retry", "max_retries"),
        (EnqueueOptions, "runat", "run_at"),
        (TaskOptions, "time_out", "timeout"),
        (TaskOptions, "singelton", "singleton"),
        (TaskOptions, "max_stall", "max_stalls"),
        (HandlerOptions, "min_backof", "min_backoff"),
        (StubOptions, "nam", "name"),
    ],
)
def test_misspelt_name_is_refused_with_the_right_one(place: type[Any], name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"using has no option '{name}': did you mean '{meant}'?"):
        check_names("using", place, {name: 1})


@pytest.mark.parametrize(
    ("place", "name"),
    [(EnqueueOptions, "wait"), (HandlerOptions, "unique"), (StubOptions, "timeout"), (UsingOptions, "zzz")],
)
def test_option_of_another_function_is_refused(place: type[Any], name: str) -> None:
    with pytest.raises(OptionError, match=f"has no option '{name}'"):
        check_names("enqueue", place, {name: 1})


def test_unknown_name_is_refused_with_all_known_names() -> None:
    with pytest.raises(
        OptionError, match=r"it takes backoff, dedup_ttl, delay, expires, headers, id, max_retries, .*wait$"
    ):
        check_names("using", UsingOptions, {"zzzzzz": 1})


PLACES = [EnqueueOptions, UsingOptions, HandlerOptions, TaskOptions, StubOptions, PullOptions, LeaseOptions]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_typed_dicts_have_rows_of_the_same_type_in_the_table(place: type[Any]) -> None:
    types = {option.name: option.type for option in options_of(place)}
    if place in (EnqueueOptions, UsingOptions):  # A function does not travel with a request.
        types["backoff"] = Delays
    assert get_type_hints(place) == types


def test_every_row_of_the_table_is_allowed_somewhere() -> None:
    assert set(OPTIONS) == {name for place in PLACES for name in get_type_hints(place)}


def test_every_default_of_the_table_is_a_valid_value() -> None:
    for option in OPTIONS.values():
        for place in PLACES:
            default = option.default_in(place)
            assert default is None or option.convert(default) is not None, (option.name, place)


def test_a_default_that_is_not_a_value_is_described() -> None:
    undescribed = [
        (option.name, place)
        for place in (TaskOptions, HandlerOptions, UsingOptions, PullOptions)
        for option in options_of(place)
        if option.default_in(place) is None and not option.default_text
    ]
    assert undescribed == []


def test_help_is_one_line_of_whole_sentences() -> None:
    wrong = [o.name for o in OPTIONS.values() if not (o.help[0].isupper() and o.help[-1] == "." and "\n" not in o.help)]
    assert wrong == []


@pytest.mark.parametrize(
    ("place", "policy"),
    [(TaskOptions, TASK), (HandlerOptions, FAIL_HANDLER), (PullOptions, PULL)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_defaults_of_the_table_make_the_default_policies(place: type[Any], policy: Policy) -> None:
    assert queue_config("q", place, {}) == QueueConfig(queue="q", policy=policy)


def test_fields_of_a_request_are_those_given_and_none_is_not_given() -> None:
    assert given_fields({"delay": 1.5, "priority": None, "max_retries": 3}) == {"delay_ms": 1_500, "max_retries": 3}


def test_fields_of_a_task_are_all_with_defaults() -> None:
    fields = all_fields(TaskOptions, {"timeout": 5, "concurrency": None})
    assert (fields["timeout_ms"], fields["max_retries"], fields["concurrency"]) == (5_000, 10, None)
    with pytest.raises(OptionError, match="timeout must be seconds"):
        all_fields(TaskOptions, {"timeout": None})


def test_an_option_carries_its_bounds_and_its_name_into_the_refusal() -> None:
    option = Option("cache_ttl", Seconds, "Time.", least=1, most=60)
    assert (option.field, option.convert(60)) == ("cache_ttl_ms", 60_000)
    with pytest.raises(OptionError, match="cache_ttl must be from 1 to 60 seconds, not 61"):
        option.convert(61)
