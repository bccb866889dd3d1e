"""A function's arguments as a payload, and ids that are made from them."""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast._core.arguments import Arguments, SignatureMismatch, content_id, id_maker
from holdfast._core.codec import Codecs
from holdfast.errors import OptionError, PayloadRejected

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.

if TYPE_CHECKING:
    from nowhere import Unfindable  # type: ignore[import-not-found]

CODECS = Codecs()
JSON = CODECS.get("json")


@dataclass
class Report:
    day: date
    pages: int = 1


@dataclass
class Other:
    name: str


class Extra(TypedDict, total=False):
    colour: str


class Colour(enum.Enum):
    RED = "red"


class Size(enum.StrEnum):
    LARGE = "large"


def plain(a: int, b: str = "x", *, c: float = 1.5) -> None: ...
def positional(a: int, b: int = 2, /, c: int = 3, *, d: int = 4) -> None: ...
def starred(a: int, *more: int, flag: bool = False, **named: str) -> None: ...
def only_stars(*args: int, **kwargs: int) -> None: ...
def nothing() -> None: ...
def typed(report: Report, at: datetime | None = None, tags: set[str] = frozenset()) -> Report: ...  # type: ignore[assignment]
def bare(a, b=2): ...
def raw(payload: bytes, /) -> bytes: ...
def raw_too(payload, /): ...
def whole(report: Report, /) -> None: ...
def anything(value: object) -> object: ...
def constrained(n: Annotated[int, msgspec.Meta(ge=1)]) -> None: ...
def keywords(*, a: int = 1, b: int) -> None: ...
def later(item: Defined_later) -> Defined_later: ...
def unfindable(item: Unfindable) -> None: ...


@dataclass
class Defined_later:  # noqa: N801
    number: int


FUNCTIONS = [plain, positional, starred, only_stars, nothing, bare, keywords]
VALUES = st.one_of(st.integers(0, 9), st.just("x"))


def carried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function is called with after a journey."""
    arguments = Arguments("f", function)
    data = arguments.encode(CODECS, JSON, arguments.by_name(args, kwargs))
    return arguments.call(arguments.decode(JSON, data))


def seen_by(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


# Binding


@patient
@given(
    st.sampled_from(FUNCTIONS), st.lists(st.integers(), max_size=5), st.dictionaries(st.sampled_from("abcdx"), VALUES)
)
def test_a_call_is_bound_as_python_binds_it_or_refused_as_python_refuses_it(
    function: Callable[..., Any], args: list[int], kwargs: dict[str, Any]
) -> None:
    def answer(bind: Callable[[], Any], prefix: str) -> Any:
        try:
            return dict(bind())
        except TypeError as refusal:
            return f"{prefix}{refusal}"

    here = answer(lambda: inspect.signature(function).bind(*args, **kwargs).arguments, "the task: ")
    assert answer(lambda: Arguments("the task", function).by_name(tuple(args), kwargs), "") == here


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, (1,), {}),
        (plain, (1, "y"), {"c": 2.5}),
        (plain, (), {"b": "y", "a": 1}),
        (positional, (1,), {}),
        (positional, (1, 5, 6), {"d": 7}),
        (positional, (1,), {"c": 6}),
        (starred, (1,), {}),
        (starred, (1, 2, 3), {"flag": True, "other": "x", "more": "y"}),
        (only_stars, (), {}),
        (only_stars, (1, 2), {"a": 3, "args": 4, "kwargs": 5}),
        (nothing, (), {}),
        (bare, (1,), {}),
        (typed, (Report(date(2027, 1, 15)),), {"at": datetime(2027, 1, 15, tzinfo=UTC), "tags": {"a", "b"}}),
    ],
)
def test_carried_arguments_equal_those_of_a_direct_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert seen_by(function, *carried(function, *args, **kwargs)) == seen_by(function, args, kwargs)


def test_only_given_arguments_are_sent() -> None:
    arguments = Arguments("f", plain)
    assert arguments.encode(CODECS, JSON, arguments.by_name((1,), {})) == b'{"a":1}'
    assert arguments.encode(CODECS, JSON, arguments.by_name((1,), {"c": 2.0})) == b'{"a":1,"c":2.0}'


def test_defaults_are_those_of_the_code_that_runs() -> None:
    def newer(a: int, b: str = "newer", *, c: float = 9.5) -> None: ...

    assert Arguments("f", newer).call(Arguments("f", newer).decode(JSON, b'{"a":1}')) == (
        (),
        {"a": 1, "b": "newer", "c": 9.5},
    )


# Writing


def test_the_argument_that_cannot_be_sent_is_named() -> None:
    arguments = Arguments("reports.make", plain)
    with pytest.raises(PayloadRejected, match=r"^argument 'b' of reports.make cannot be sent as json \(object\)"):
        arguments.encode(CODECS, JSON, {"a": 1, "b": object(), "c": 1.5})


def test_arguments_that_cannot_be_sent_together_are_refused_together() -> None:
    def deep(value: Any) -> None: ...

    value: Any = 1
    for _ in range(64):
        value = [value]
    with pytest.raises(PayloadRejected, match=r"^the arguments of deep cannot be sent"):
        Arguments("deep", deep).encode(CODECS, JSON, {"value": value})


# Reading


@pytest.mark.parametrize(
    "data", [b'{"a":1,"z":1}', b'{"z":1,"a":1}', b'{"a":"wrong","z":1}', b'{"a":1,"y":2,"z":1}', b'{"z":1}']
)
def test_unknown_parameter_raises_signature_mismatch(data: bytes) -> None:
    with pytest.raises(SignatureMismatch, match=r"f has no parameter .*'z'"):
        Arguments("f", plain).decode(JSON, data)


@pytest.mark.parametrize("data", [b'{"b":"x"}', b"{}"])
def test_missing_parameter_raises_signature_mismatch(data: bytes) -> None:
    with pytest.raises(SignatureMismatch, match="the payload of f has no 'a'"):
        Arguments("f", plain).decode(JSON, data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a":"1"}', "Expected `int`, got `str`"),
        (b'{"a":1,"b":null}', "Expected `str`, got `null`"),
        (b"[1]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b"", "truncated"),
        (b"\xff\x00", "malformed"),
        (b'{"a":1', "truncated"),
        (b'{"a":1}{"a":2}', "malformed"),
    ],
)
def test_a_payload_that_no_worker_could_read_is_rejected(data: bytes, why: str) -> None:
    with pytest.raises(PayloadRejected, match=why) as caught:
        Arguments("f", plain).decode(JSON, data)
    assert "does not fit f(" in str(caught.value)


def test_a_function_without_annotations_gets_what_the_payload_says() -> None:
    assert carried(bare, {"x": [1]}, None) == ((), {"a": {"x": [1]}, "b": None})


def test_object_takes_anything() -> None:
    assert carried(anything, [1, "a"]) == ((), {"value": [1, "a"]})


def test_constraints_of_an_annotation_are_checked() -> None:
    arguments = Arguments("f", constrained)
    assert arguments.call(arguments.decode(JSON, b'{"n":1}')) == ((), {"n": 1})
    with pytest.raises(PayloadRejected, match=">= 1"):
        arguments.decode(JSON, b'{"n":0}')


def test_parameter_with_default_may_precede_a_required_one() -> None:
    assert carried(keywords, b=2) == ((), {"a": 1, "b": 2})


def test_a_codec_of_another_name_reads_the_same_arguments() -> None:
    arguments = Arguments("f", typed)
    msgpack = CODECS.get("msgpack")
    data = arguments.encode(CODECS, msgpack, arguments.by_name((Report(date(2027, 1, 15), 3),), {}))
    assert arguments.decode(msgpack, data).report == Report(date(2027, 1, 15), 3)


# The whole payload


@pytest.mark.parametrize("function", [raw, raw_too])
@pytest.mark.parametrize("data", [b"", b"\x00\xff", b'{"a":1}'])
def test_the_only_positional_parameter_gets_the_bytes_untouched(function: Callable[..., Any], data: bytes) -> None:
    arguments = Arguments("f", function)
    assert arguments.whole
    assert arguments.raw
    assert arguments.encode(CODECS, CODECS.get("raw"), arguments.by_name((data,), {})) == data
    for codec in ("raw", "json", "msgpack"):
        assert arguments.call(arguments.decode(CODECS.get(codec), data)) == ((data,), {})


def test_a_typed_whole_payload_is_decoded() -> None:
    arguments = Arguments("f", whole)
    assert arguments.whole
    assert not arguments.raw
    data = arguments.encode(CODECS, JSON, arguments.by_name((Report(date(2027, 1, 15)),), {}))
    assert data == b'{"day":"2027-01-15","pages":1}'
    assert arguments.call(arguments.decode(JSON, data)) == ((Report(date(2027, 1, 15)),), {})
    with pytest.raises(PayloadRejected, match="does not fit f"):
        arguments.decode(JSON, b'{"day":"some day"}')


def test_a_whole_payload_of_the_wrong_type_is_refused_by_its_name() -> None:
    arguments = Arguments("f", raw)
    with pytest.raises(PayloadRejected, match="the payload of f cannot be sent as raw"):
        arguments.encode(CODECS, CODECS.get("raw"), arguments.by_name(("text",), {}))


def test_the_default_of_a_whole_payload_is_sent() -> None:
    def with_default(payload: bytes = b"none", /) -> None: ...

    arguments = Arguments("f", with_default)
    assert arguments.encode(CODECS, CODECS.get("raw"), arguments.by_name((), {})) == b"none"


@pytest.mark.parametrize("function", [positional, only_stars, nothing, plain])
def test_other_functions_do_not_get_the_whole_payload(function: Callable[..., Any]) -> None:
    assert not Arguments("f", function).whole
    assert not Arguments("f", function).raw


# Annotations


def test_annotation_may_name_a_later_definition() -> None:
    assert carried(later, Defined_later(1)) == ((), {"item": Defined_later(1)})
    assert Arguments("f", later).returns is Defined_later


def test_unresolvable_annotation_is_reported_only_when_it_is_needed() -> None:
    arguments = Arguments("reports.make", unfindable)
    assert arguments.by_name((1,), {}) == {"item": 1}
    assert arguments.encode(CODECS, JSON, {"item": 1}) == b'{"item":1}'
    for look in (lambda: arguments.returns, lambda: arguments.decode(JSON, b'{"item":1}')):
        with pytest.raises(OptionError, match=r"annotations of reports.make cannot be read.*Unfindable"):
            look()


def two_dataclasses(item: Report | Other) -> None: ...
def unpacked(**extra: Unpack[Extra]) -> None: ...
def returns_two_dataclasses() -> Report | Other: ...


@pytest.mark.parametrize("function", [unfindable, two_dataclasses, unpacked, returns_two_dataclasses])
def test_a_worker_refuses_annotations_that_cannot_be_read_before_it_takes_jobs(function: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match=r"reports\.make"):
        Arguments("reports.make", function).check(CODECS.get("json"))


@pytest.mark.parametrize("function", [*FUNCTIONS, typed, raw, raw_too, whole, later, anything])
def test_a_worker_accepts_annotations_that_can_be_read(function: Callable[..., Any]) -> None:
    Arguments("f", function).check(CODECS.get("json"))


# Ids


def make_id(function: Callable[..., Any], template: Any, *args: Any, **kwargs: Any) -> str:
    arguments = Arguments("f", function)
    return id_maker(arguments, template)(arguments.by_name(args, kwargs))


def two(a: str | None, b: str | None) -> None: ...
def maybe(a: str | None) -> None: ...
def any_value(value: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "template", "args", "id"),
    [
        (plain, "report:{a}", (7,), "report:7"),
        (plain, "{a}/{b}/{c}", (7,), "7/x/1.5"),
        (plain, "fixed", (7,), "fixed"),
        (plain, "{{a}}{a}", (7,), "{a}7"),
        (plain, "ü {a}", (7,), "ü 7"),
        (two, "{a}:{b}", ("a:b", "c"), "a%3Ab:c"),
        (two, "{a}:{b}", ("", "ada@x.org"), ":ada@x.org"),
        (maybe, "{a}", (None,), "~"),
        (maybe, "{a}", ("~",), "%7E"),
        (maybe, "{a}", ("ü b",), "%C3%BC%20b"),
        (starred, "{a}|{more}|{named}", (1, 2, 3), "1|%5B2%2C3%5D|%7B%7D"),
        (any_value, "{value}", (True,), "true"),
        (any_value, "{value}", (date(2027, 1, 15),), "2027-01-15"),
        (any_value, "{value}", (UUID(int=1),), "00000000-0000-0000-0000-000000000001"),
        (any_value, "{value}", (Colour.RED,), "red"),
        (any_value, "{value}", (Size.LARGE,), "large"),
    ],
)
def test_an_id_is_made_from_the_arguments(function: Callable[..., Any], template: str, args: Any, id: str) -> None:
    assert make_id(function, template, *args) == id


def test_a_default_that_was_left_out_makes_the_same_id_as_one_that_was_given() -> None:
    assert make_id(plain, "{a}:{b}", 1) == make_id(plain, "{a}:{b}", 1, "x") == make_id(plain, "{a}:{b}", b="x", a=1)


@pytest.mark.parametrize(
    "template",
    ["{z}", "{}", "{0}", "{a.real}", "{a[0]}", "{a!r}", "{a:>3}", "{a:{b}}", "{", "}", "{a", "", 5, None, b"a"],
)
def test_a_template_is_checked_when_the_task_is_defined(template: Any) -> None:
    with pytest.raises(OptionError, match=r"of reports\.make"):
        id_maker(Arguments("reports.make", plain), template)


def test_the_refusal_of_a_template_says_what_it_may_name() -> None:
    with pytest.raises(OptionError, match=r"use only \{a\}, \{b\}, \{c\}"):
        id_maker(Arguments("f", plain), "{user}")
    with pytest.raises(OptionError, match="plain text"):
        id_maker(Arguments("f", nothing), "{user}")


TEXT = st.text(st.sampled_from("ab:/-_.@+~%|{}3A ü"), max_size=5)
MAYBE = st.none() | TEXT
SEPARATORS = [":", "/", "|", " ", "-", "_", ".", "@", "+", "~", "::", "-x-", "a", "3", "%", "{{", "ü"]


@patient
@given(MAYBE, MAYBE, MAYBE, MAYBE, st.sampled_from(SEPARATORS))
@example("x-y", "z", "x", "y-z", "-")
@example("a@b", "c", "a", "b@c", "@")
@example("%3A", "", ":", "", ":")
@example(None, "", "", None, "~")
def test_different_arguments_never_make_the_same_id(
    a: str | None, b: str | None, c: str | None, d: str | None, between: str
) -> None:
    template = f"sync{between}{{a}}{between}{{b}}"
    try:
        same = make_id(two, template, a, b) == make_id(two, template, c, d)
    except OptionError:
        assert between in ("3", "%", "~", "{{")  # What cannot be told from an escape may be refused.
        return
    assert same == ((a, b) == (c, d))


def test_adjacent_template_fields_are_refused_when_the_task_is_defined() -> None:
    with pytest.raises(OptionError, match=r"\{a\}\{b\}"):
        id_maker(Arguments("f", two), "{a}{b}")


@patient
@given(st.none() | TEXT, st.none() | TEXT)
def test_none_makes_an_id_that_no_text_makes(a: str | None, b: str | None) -> None:
    assert (make_id(maybe, "{a}", a) == make_id(maybe, "{a}", b)) == (a == b)


def test_a_function_makes_ids_from_all_arguments_and_defaults() -> None:
    def make(a: int, c: float, **others: Any) -> str:
        return f"{a}-{c}-{others['b']}"

    assert make_id(plain, make, 1) == "1-1.5-x"
    assert make_id(starred, lambda *args, **kwargs: f"{args}{kwargs}", 1, 2, other="x").startswith("(")
    assert make_id(raw, lambda payload: payload.decode(), b"abc") == "abc"


@pytest.mark.parametrize("gave", [None, 5, b"bytes"])
def test_id_function_that_does_not_return_text_is_refused(gave: Any) -> None:
    with pytest.raises(OptionError, match="ids of f returned"):
        make_id(plain, lambda **_: gave, 1)


# Ids of content


CONTENT = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@patient
@given(CONTENT, CONTENT)
def test_equal_content_and_only_equal_content_has_equal_ids(a: Any, b: Any) -> None:
    same = msgspec.json.encode(a, order="sorted") == msgspec.json.encode(b, order="sorted")
    assert (content_id(a) == content_id(b)) == same
    assert len(content_id(a)) == 40


def test_content_id_ignores_the_order_of_dicts_and_sets() -> None:
    @dataclass
    class Unordered:
        y: int
        x: int

    assert content_id({"b": 1, "a": {"d": {3, 1}, "c": 2}}) == content_id({"a": {"c": 2, "d": {1, 3}}, "b": 1})
    assert content_id(Unordered(x=1, y=2)) == content_id({"x": 1, "y": 2})
    assert content_id(a=1, b=2) == content_id(b=2, a=1) == content_id({"a": 1, "b": 2})
    assert content_id(1, 2) == content_id([1, 2]) != content_id([2, 1])
    assert content_id("x", a=1) == content_id("x", {"a": 1})


def test_content_id_is_stable_across_releases() -> None:
    assert content_id({"to": "ada", "n": 1}) == hashlib.sha256(b'{"n":1,"to":"ada"}').hexdigest()[:40]


def test_content_can_name_a_tasks_jobs() -> None:
    assert make_id(plain, content_id, 1) == content_id({"a": 1, "b": "x", "c": 1.5})
    assert make_id(raw, content_id, b"abc") == content_id(b"abc")


@pytest.mark.parametrize("content", [object(), float("nan"), {"a": [float("inf")]}, "\ud800"])
def test_content_that_cannot_be_encoded_has_no_id(content: object) -> None:
    with pytest.raises(PayloadRejected, match="content_id cannot encode"):
        content_id(content)


def test_no_content_has_no_id() -> None:
    with pytest.raises(OptionError, match="content_id has no arguments"):
        content_id()
