"""How values are encoded and decoded whose types msgspec does not know.

The hooks of an app come first. Without one, pydantic models and subclasses of float, int and str are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, get_origin

import msgspec

from holdfast.errors import OptionError

EncodeHook = Callable[[Any], object]
"""Returns what stands for a value: one that can be encoded."""
DecodeHook = Callable[[Any], Any]
"""Returns the value again, from the decoded form of what the encode hook returned."""

_PLAIN: tuple[type[Any], ...] = (str, int, float)


class TypeHooks:
    """The hooks of one app, by type."""

    def __init__(self) -> None:
        self._encode: dict[type[Any], EncodeHook] = {}
        self._decode: dict[type[Any], DecodeHook] = {}

    def add(self, kind: type[Any], encode: EncodeHook | None, decode: DecodeHook | None) -> None:
        """Add the hooks of a type. Raises `OptionError` if they would never be called, or replace others."""
        if not isinstance(kind, type):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"codec_hooks takes a class, not {kind!r:.60}")
        given = {"encode": encode, "decode": decode}
        if encode is None and decode is None:
            raise OptionError(f"codec_hooks of {shown(kind)} has no hook: pass encode=… or decode=…")
        for name, hook in given.items():
            if hook is not None and not callable(hook):
                raise OptionError(f"{name} of codec_hooks of {shown(kind)} must be a function, not {hook!r:.60}")
        if not _is_unknown(kind):
            raise OptionError(f"codec_hooks of {shown(kind)} would not be called: msgspec encodes this type itself")
        if (encode and kind in self._encode) or (decode and kind in self._decode):
            raise OptionError(f"{shown(kind)} already has codec_hooks: add them only once")
        if encode is not None:
            self._encode[kind] = encode
        if decode is not None:
            self._decode[kind] = decode

    def encode(self, value: Any) -> Any:
        """Return what stands for a value that msgspec cannot encode. The hook of a class is that of its subclasses."""
        if self._encode:
            for kind in type(value).__mro__:
                if kind in self._encode:
                    return self._encode[kind](value)
        if _is_pydantic(type(value)):
            return value.model_dump(mode="json", by_alias=True, round_trip=True)
        for plain in _PLAIN:
            if isinstance(value, plain):
                return plain(value)
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot be encoded")

    def decode(self, type: Any, value: Any) -> Any:
        """Return a value as a type that msgspec cannot decode. A decode hook is not for subclasses of its type."""
        hook = self._decode.get(get_origin(type) or type)
        if hook is not None:
            return hook(value)
        if _is_pydantic(type):
            return type.model_validate_json(msgspec.json.encode(value))
        if type is object:
            return value
        for plain in _PLAIN:
            if isinstance(type, _CLASS) and issubclass(type, plain):
                return type(msgspec.convert(value, plain, strict=plain is str))
        raise TypeError(f"a {shown(type)} cannot be decoded")


_CLASS = type
"""The builtin, for functions that have a parameter of this name."""


def shown(type: Any) -> str:
    return getattr(type, "__qualname__", None) or str(type)


def _is_unknown(kind: type[Any]) -> bool:
    """Return whether msgspec asks a hook for values of a class."""
    try:
        return kind is not object and isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
    except Exception:  # A class that msgspec knows, but cannot use.
        return False


def _is_pydantic(type: Any) -> bool:
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)  # A caller that has a model has imported pydantic.
    return model is not None and isinstance(type, model.__class__)


WITHOUT_HOOKS = TypeHooks()
"""For values that belong to no app."""
