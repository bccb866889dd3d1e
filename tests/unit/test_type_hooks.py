"""Types that msgspec does not know: the hooks of an app, and subclasses of float, int and str."""

from __future__ import annotations

import math
from datetime import datetime
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

import pytest

from holdfast._core.codec import Codecs, canonical
from holdfast._core.type_hooks import TypeHooks
from holdfast.errors import OptionError, PayloadRejected

T = TypeVar("T")


class Celsius(float): ...


class UserId(int): ...


class Slug(str): ...


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


@pytest.fixture
def codecs() -> Codecs:
    return Codecs()


@pytest.fixture(params=["json", "msgpack"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def there_and_back(codecs: Codecs, value: object, type: Any, name: str) -> Any:
    return codecs.decode("it", codecs.encode("it", value, codecs.get(name)), name, type)


@pytest.mark.parametrize("value", [Celsius(1.5), Celsius(2), UserId(3), Slug("a b")])
def test_subclass_of_a_plain_type_survives(codecs: Codecs, name: str, value: object) -> None:
    again = there_and_back(codecs, value, type(value), name)
    assert (again, type(again)) == (value, type(value))
    assert there_and_back(codecs, [value], Any, name) == [value]


def test_keys_that_are_subclasses_survive(codecs: Codecs, name: str) -> None:
    assert there_and_back(codecs, {UserId(1): 2}, dict[UserId, int], name) == {UserId(1): 2}


@pytest.mark.parametrize(("data", "type"), [(b"1.5", UserId), (b'"hot"', Celsius), (b"3", Slug), (b"null", UserId)])
def test_other_values_are_refused_for_a_subclass(codecs: Codecs, data: bytes, type: Any) -> None:
    with pytest.raises(PayloadRejected):
        codecs.decode("it", data, "json", type)


def test_subclass_of_float_that_is_nan_is_refused_as_json(codecs: Codecs) -> None:
    with pytest.raises(PayloadRejected, match="NaN"):
        codecs.encode("it", Celsius(math.nan))


def test_hooks_encode_and_decode_a_type(codecs: Codecs, name: str) -> None:
    codecs.hooks.add(Fraction, str, Fraction)
    value = {"a": [Fraction(1, 3)]}
    assert there_and_back(codecs, value, dict[str, list[Fraction]], name) == value


def test_encode_hook_of_a_class_is_that_of_its_subclasses(codecs: Codecs, name: str) -> None:
    codecs.hooks.add(PurePosixPath, str, None)
    assert there_and_back(codecs, Path("/srv"), str, name) == "/srv"
    with pytest.raises(PayloadRejected, match="PurePosixPath cannot be decoded"):
        codecs.decode("it", codecs.encode("it", Path("/srv"), codecs.get(name)), name, PurePosixPath)


def test_hook_may_return_a_value_with_a_hook(codecs: Codecs, name: str) -> None:
    codecs.hooks.add(Box, lambda box: {"box": box.value}, lambda value: Box(value["box"]))
    assert there_and_back(codecs, Box(Box(Slug("a"))), Any, name) == {"box": {"box": "a"}}
    assert there_and_back(codecs, Box("a"), Box[str], name).value == "a"


def test_hook_of_a_subclass_of_float_comes_before_the_float(codecs: Codecs, name: str) -> None:
    codecs.hooks.add(Celsius, lambda value: f"{value:g} C", lambda text: Celsius(text.removesuffix(" C")))
    assert there_and_back(codecs, Celsius(1.5), str, name) == "1.5 C"
    assert there_and_back(codecs, Celsius(1.5), Celsius, name) == 1.5


def test_hook_that_refuses_a_value_rejects_the_payload(codecs: Codecs, name: str) -> None:
    codecs.hooks.add(Fraction, str, Fraction)
    with pytest.raises(PayloadRejected, match="Invalid literal for Fraction"):
        codecs.decode("it", codecs.encode("it", "a third", codecs.get(name)), name, Fraction)


def test_hooks_belong_to_one_app(codecs: Codecs) -> None:
    codecs.hooks.add(Fraction, str, Fraction)
    with pytest.raises(PayloadRejected, match=r"Fraction cannot be encoded.*or add app\.codec_hooks"):
        Codecs().encode("it", Fraction(1, 3))


def test_canonical_json_uses_hooks() -> None:
    hooks = TypeHooks()
    hooks.add(Fraction, str, None)
    assert canonical({"b": Fraction(1, 3), "a": Celsius(1)}, hooks) == b'{"a":1.0,"b":"1/3"}'


@pytest.mark.parametrize(
    ("kind", "hooks", "reason"),
    [
        (Fraction, {}, "has no hook: pass encode=… or decode=…"),
        (Fraction, {"encode": "text"}, "encode of codec_hooks of Fraction must be a function"),
        (datetime, {"encode": str}, "datetime would not be called: msgspec encodes this type itself"),
        (object, {"encode": str}, "object would not be called"),
        ("Fraction", {"encode": str}, "codec_hooks takes a class, not 'Fraction'"),
    ],
)
def test_hooks_that_could_not_work_are_refused(codecs: Codecs, kind: Any, hooks: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        codecs.hooks.add(kind, hooks.get("encode"), hooks.get("decode"))


def test_second_hook_of_a_type_is_refused(codecs: Codecs) -> None:
    codecs.hooks.add(Fraction, str, None)
    codecs.hooks.add(Fraction, None, Fraction)
    with pytest.raises(OptionError, match="Fraction already has codec_hooks"):
        codecs.hooks.add(Fraction, repr, None)
