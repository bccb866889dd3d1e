"""Values to bytes and back: what comes back as it was, and what is refused where it was written."""

from __future__ import annotations

import enum
import math
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._core.codec import MAX_DEPTH, Codecs, canonical
from holdfast.errors import OptionError, PayloadRejected

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # A busy machine is no failure.

T = TypeVar("T")
FORMATS = ["json", "msgpack"]


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Address(TypedDict):
    street: str
    number: int


class Point(NamedTuple):
    x: int
    y: int


class Item(msgspec.Struct):
    name: str
    price: Decimal


@dataclass
class Order(Generic[T]):
    id: uuid.UUID
    lines: list[T]
    at: datetime
    notes: dict[str, list[str | None]] = field(default_factory=dict[str, list[str | None]])


class Model(pydantic.BaseModel):
    number: int
    at: datetime | None = None
    inner: list[Model] = []


class Aliased(pydantic.BaseModel):
    number: int = pydantic.Field(alias="theNumber")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    at: datetime
    id: uuid.UUID
    tags: set[int]


class Computed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    number: int

    @pydantic.computed_field
    def double(self) -> int:
        return 2 * self.number


class Box(pydantic.BaseModel, Generic[T]):
    value: T


@dataclass
class Measured:
    label: str
    values: dict[str, list[float]]


class Reading(msgspec.Struct, array_like=True):
    value: float


class Gauge(pydantic.BaseModel):
    value: float


NOW = datetime(2027, 1, 15, 8, 30, 1, 123456, UTC)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
ORDER = Order(ID, [Item("nail", Decimal("0.10"))], NOW, {"a": ["b", None]})


@pytest.fixture
def codecs() -> Codecs:
    return Codecs()


def there_and_back(codecs: Codecs, value: object, type: Any, name: str) -> Any:
    return codecs.decode("it", codecs.encode("it", value, codecs.get(name)), name, type)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("value", "type"),
    [
        (None, None),
        (True, bool),
        (-(2**63), int),
        (2**64 - 1, int),
        (0.1, float),
        ('ä \x00 \U0001f600 "null" [{', str),
        (b"\x00\xff", bytes),
        (NOW, datetime),
        (NOW.replace(tzinfo=None), datetime),
        (NOW.astimezone(timezone(timedelta(hours=-5))), datetime),
        (date(2027, 1, 15), date),
        (time(8, 30), time),
        (timedelta(days=-1, microseconds=1), timedelta),
        (ID, uuid.UUID),
        (Decimal("1.10"), Decimal),
        (Colour.RED, Colour),
        (Level.HIGH, Level),
        ({1, 2, 3}, set[int]),
        (frozenset({"a"}), frozenset[str]),
        ((1, "a"), tuple[int, str]),
        (Point(1, 2), Point),
        ({"street": "High", "number": 1}, Address),
        ({1: "one", 2: "two"}, dict[int, str]),
        ({ID: NOW}, dict[uuid.UUID, datetime]),
        (Item("nail", Decimal("0.10")), Item),
        (ORDER, Order[Item]),
        ([ORDER, ORDER], list[Order[Item]]),
        ({"a": [(1, {ID})]}, dict[str, list[tuple[int, set[uuid.UUID]]]]),
        ("b", Literal["a", "b"]),
        (None, Item | None),
        ({"a": [1, None, "x", {"b": 1.5}]}, Any),
    ],
)
def test_value_survives_encoding_and_decoding(codecs: Codecs, name: str, value: object, type: Any) -> None:
    again = there_and_back(codecs, value, type, name)
    assert again == value
    assert again.__class__ is value.__class__


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("value", "type"),
    [
        pytest.param(Model(number=1, at=NOW, inner=[Model(number=2)]), Model, id="nested"),
        pytest.param([Model(number=1)], list[Model], id="list"),
        pytest.param({"a": (1, Model(number=1))}, dict[str, tuple[int, Model]], id="deep inside"),
        pytest.param(Box[int](value=1), Box[int], id="generic"),
        pytest.param(Aliased(theNumber=1), Aliased, id="alias"),
        pytest.param(Strict(at=NOW, id=ID, tags={1, 2}), Strict, id="strict"),
        pytest.param(Computed(number=1), Computed, id="computed"),
    ],
)
def test_pydantic_model_survives_encoding_and_decoding(codecs: Codecs, name: str, value: object, type: Any) -> None:
    assert there_and_back(codecs, value, type, name) == value


def test_a_pydantic_model_refuses_what_it_does_not_accept(codecs: Codecs) -> None:
    with pytest.raises(PayloadRejected, match="valid integer"):
        codecs.decode("it", b'{"number":"many"}', "json", Model)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@patient
@given(JSON, st.sampled_from(FORMATS))
def test_every_json_value_survives_encoding_and_decoding(value: object, name: str) -> None:
    assert there_and_back(Codecs(), value, Any, name) == value


@pytest.mark.parametrize("name", FORMATS)
def test_object_is_anything(codecs: Codecs, name: str) -> None:
    assert there_and_back(codecs, {"a": [1]}, object, name) == {"a": [1]}
    assert there_and_back(codecs, [1, "a"], list[object], name) == [1, "a"]


def test_unhashable_annotation_is_decoded(codecs: Codecs) -> None:
    assert codecs.decode("it", b"1", "json", Annotated[int, {"unit": "m"}]) == 1


def nested(depth: int, innermost: object = 1) -> object:
    value = innermost
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def endless() -> list[object]:
    value: list[object] = []
    value.append(value)
    return value


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "around",
    [
        pytest.param(lambda bad: bad, id="itself"),
        pytest.param(lambda bad: [1, [bad]], id="in a list"),
        pytest.param(lambda bad: {"a": {"b": bad}}, id="in a dict"),
        pytest.param(lambda bad: {"a": (None, bad)}, id="in a tuple"),
        pytest.param(lambda bad: {bad}, id="in a set"),
        pytest.param(lambda bad: {bad: 1}, id="as a key"),
        pytest.param(lambda bad: Measured("null", {"a": [1.0, bad]}), id="in a dataclass"),
        pytest.param(lambda bad: [Reading(bad)], id="in a struct"),
        pytest.param(lambda bad: {"a": Gauge(value=bad)}, id="in a pydantic model"),
    ],
)
def test_nan_and_infinity_are_refused_in_json(codecs: Codecs, around: Any, bad: float) -> None:
    with pytest.raises(PayloadRejected, match="the argument"):
        codecs.encode("the argument", around(bad))


def test_text_containing_null_is_accepted(codecs: Codecs) -> None:
    assert codecs.encode("it", Measured("null", {"null": [1.5]})) == b'{"label":"null","values":{"null":[1.5]}}'


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(object(), "a builtins.object cannot be encoded", id="object"),
        pytest.param({"a": [object()]}, "a builtins.object cannot be encoded", id="object inside"),
        pytest.param(print, "cannot be encoded", id="function"),
        pytest.param(int, "cannot be encoded", id="class"),
        pytest.param((n for n in range(3)), "cannot be encoded", id="generator"),
        pytest.param(1j, "cannot be encoded", id="complex"),
        pytest.param("\ud800", "surrogates not allowed", id="lone surrogate"),
        pytest.param({"\ud800": 1}, "surrogates not allowed", id="lone surrogate in a key"),
        pytest.param(endless(), "nested too deeply, or contains itself", id="contains itself"),
        pytest.param(nested(100_000), "nested too deeply|levels of nested", id="very deep"),
    ],
)
def test_value_that_cannot_be_encoded_is_refused_with_its_name_and_a_reason(
    codecs: Codecs, name: str, value: object, why: str
) -> None:
    with pytest.raises(PayloadRejected, match=why) as caught:
        codecs.encode("argument 'a' of f", value, codecs.get(name))
    assert str(caught.value).startswith(f"argument 'a' of f cannot be sent as {name}")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("key", [(1, 2), None, frozenset({1})])
def test_json_refuses_keys_that_cannot_be_written_as_text(codecs: Codecs, key: object) -> None:
    with pytest.raises(PayloadRejected, match="cannot be encoded"):
        codecs.encode("it", {key: 1})


def test_depth_limit_is_exact_and_ignores_siblings(codecs: Codecs) -> None:
    assert codecs.decode("it", codecs.encode("it", nested(MAX_DEPTH)), "json") == nested(MAX_DEPTH)
    assert MAX_DEPTH == 64
    assert codecs.encode("it", [[1]] * 1000)
    assert codecs.encode("it", [nested(MAX_DEPTH - 1), nested(MAX_DEPTH - 1)])
    assert codecs.encode("it", ["[" * 1000, '{"\\"[[' * 1000])
    with pytest.raises(PayloadRejected, match=f"more than {MAX_DEPTH}"):
        codecs.encode("it", nested(MAX_DEPTH + 1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b'{"a":', b"[" * 100_000])
def test_garbage_is_rejected_when_it_is_read(codecs: Codecs, name: str, data: bytes) -> None:
    with pytest.raises(PayloadRejected, match=f"the payload cannot be read as {name} of Item"):
        codecs.decode("the payload", data, name, Item)


@pytest.mark.parametrize(
    ("data", "type"),
    [
        (b'"1"', int),
        (b"1.5", int),
        (b'{"name":"nail"}', Item),
        (b'{"name":1,"price":"1"}', Item),
        (b"[1]", list[str]),
        (b'"blue"', Colour),
        (b'"2027-13-01"', date),
        (b"{}", complex),
        (b"null", int),
    ],
)
def test_a_value_of_the_wrong_type_is_rejected_not_converted(codecs: Codecs, data: bytes, type: Any) -> None:
    with pytest.raises(PayloadRejected, match="cannot be read as json"):
        codecs.decode("it", data, "json", type)


def test_in_msgpack_bytes_stay_bytes_and_it_is_not_json(codecs: Codecs) -> None:
    data = codecs.encode("it", {"a": b"\x00\xff"}, codecs.get("msgpack"))
    assert codecs.decode("it", data, "msgpack") == {"a": b"\x00\xff"}
    assert len(data) < len(codecs.encode("it", {"a": b"\x00\xff"}))


@pytest.mark.parametrize("value", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
@pytest.mark.parametrize("type", [Any, object, bytes, bytes | None])
def test_raw_bytes_are_left_alone(codecs: Codecs, value: object, type: Any) -> None:
    data = codecs.encode("it", value, codecs.get("raw"))
    assert data.__class__ is bytes
    assert codecs.decode("it", data, "raw", type) == b"\x00\xff"


@pytest.mark.parametrize("value", ["text", 1, None, [b"a"]])
def test_raw_takes_nothing_but_bytes(codecs: Codecs, value: object) -> None:
    with pytest.raises(PayloadRejected, match="must be bytes"):
        codecs.encode("it", value, codecs.get("raw"))


@pytest.mark.parametrize("type", [str, int, Item, list[bytes]])
def test_raw_gives_nothing_but_bytes(codecs: Codecs, type: Any) -> None:
    with pytest.raises(PayloadRejected, match="raw bytes cannot be decoded"):
        codecs.decode("it", b"1", "raw", type)


class Reversed:
    """A codec of a user's own."""

    name = "reversed"

    def encode(self, value: object) -> bytes:
        return str(value).encode()[::-1]

    def decode(self, data: bytes, type: Any) -> Any:
        return type(data[::-1])


class Impostor(Reversed):
    name = "json"


class Clumsy(Reversed):
    name = "has spaces"


class Nameless:
    def encode(self, value: object) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes, type: Any) -> Any:
        raise NotImplementedError


class Helpless:
    name = "helpless"


class Mute:
    name = "mute"

    def decode(self, data: bytes, type: Any) -> Any:
        raise NotImplementedError


def test_custom_codec_is_used_by_its_name() -> None:
    codecs = Codecs(Reversed())
    assert codecs.default.name == "reversed"
    assert codecs.encode("it", 123) == b"321"
    assert codecs.decode("it", b"321", "reversed", int) == 123
    assert codecs.decode("it", b"123", "json", int) == 123


def test_payload_that_a_custom_codec_cannot_decode_is_rejected(codecs: Codecs) -> None:
    codecs.add(Reversed())
    with pytest.raises(PayloadRejected, match="cannot be read as reversed of int"):
        codecs.decode("it", b"x", "reversed", int)


@pytest.mark.parametrize("name", ["yaml", "", "JSON"])
def test_an_unknown_codec_is_refused_and_the_known_ones_are_named(codecs: Codecs, name: str) -> None:
    for ask in (lambda: codecs.get(name), lambda: Codecs(name), lambda: codecs.decode("it", b"1", name)):
        with pytest.raises(OptionError, match="json, msgpack, raw"):
            ask()


def test_codec_name_cannot_be_given_to_another_codec(codecs: Codecs) -> None:
    with pytest.raises(OptionError, match="another codec named 'json'"):
        codecs.add(Impostor())
    codecs.add(Reversed())
    codecs.add(Reversed())
    assert codecs.decode("it", b"1", "json") == 1


@pytest.mark.parametrize("codec", [Clumsy(), Nameless(), Helpless(), Mute(), object(), None])
def test_object_that_is_not_a_codec_is_refused(codecs: Codecs, codec: Any) -> None:
    with pytest.raises(OptionError, match="is not a codec"):
        codecs.add(codec)


@patient
@given(JSON)
def test_canonical_json_is_equal_for_equal_values(value: object) -> None:
    def turned(value: object) -> object:
        match value:
            case dict():
                return {key: turned(value[key]) for key in reversed(list(value))}
            case list():
                return [turned(item) for item in value]
            case _:
                return value

    assert canonical(turned(value)) == canonical(value)
    assert msgspec.json.decode(canonical(value)) == value


def test_the_canonical_json_has_sorted_keys_and_sets_and_no_spaces() -> None:
    assert canonical({"b": {3, 1, 2}, "a": {"d": 1, "c": None}}) == b'{"a":{"c":null,"d":1},"b":[1,2,3]}'
    with pytest.raises(ValueError, match="NaN"):
        canonical({"a": math.nan})
