"""Values to bytes and back: JSON (the default), msgpack, raw bytes, or a codec of your own.

The producer encodes a value, so a value that cannot be encoded raises there. The reader decodes it as the annotated
type. A record names the codec that wrote it, so a queue may mix codecs. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol, cast

import msgspec

from holdfast._core.type_hooks import WITHOUT_HOOKS, TypeHooks, shown
from holdfast.errors import OptionError, PayloadRejected

MAX_DEPTH = 64
"""Maximum depth of nested lists and objects in JSON. Deeper nesting is a mistake or an attack."""

UNDECODABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)
"""Errors that a codec may raise for bytes that do not fit the type."""


class Codec(Protocol):
    """Encodes values to bytes and decodes them. `decode` receives a type as `msgspec.convert` does, possibly `Any`."""

    name: str
    """Name that is stored with each payload, so its meaning must never change."""

    def encode(self, value: object) -> bytes: ...
    def decode(self, data: bytes, type: Any) -> Any: ...


class MsgspecCodec:
    """A format of msgspec: dataclasses, Structs, TypedDicts, times, UUIDs, Decimals, bytes, pydantic models. Msgpack is
    smaller and faster than JSON, and does not encode bytes as text. There is one decoder per type."""

    def __init__(self, name: str, module: Any, hooks: TypeHooks) -> None:
        self.name = name
        self._module = module
        self._hooks = hooks
        self._encoder = module.Encoder(enc_hook=hooks.encode)
        self._decoders: dict[Any, Any] = {}

    def encode(self, value: object) -> bytes:
        data: bytes = self._encoder.encode(value)
        return data

    def decode(self, data: bytes, type: Any) -> Any:
        try:
            decoder = self._decoders.get(type)
        except TypeError:  # The annotation is not hashable.
            return self._module.Decoder(type, dec_hook=self._hooks.decode).decode(data)
        if decoder is None:
            decoder = self._decoders[type] = self._module.Decoder(type, dec_hook=self._hooks.decode)
        return decoder.decode(data)


class JsonCodec(MsgspecCodec):
    """JSON by msgspec, with bytes as base64. Refuses values that other readers of JSON could not read."""

    def encode(self, value: object) -> bytes:
        data: bytes = self._encoder.encode(value)
        _refuse_nan(value, data, self._hooks)
        if len(data) > 2 * MAX_DEPTH and data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} levels of nested lists and objects")
        return data


class RawCodec:
    """Bytes without a change."""

    name = "raw"

    def encode(self, value: object) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"it must be bytes, not {type(value).__name__}")
        return bytes(cast("bytes", value))

    def decode(self, data: bytes, type: Any) -> Any:
        if type not in (Any, object, bytes, bytes | None):
            raise TypeError(f"raw bytes cannot be decoded as {type!r}")
        return data


class Codecs:
    """The codecs that an app knows, by name."""

    def __init__(self, default: str | Codec = "json") -> None:
        self.hooks = TypeHooks()
        """Encode and decode the types that `json` and `msgpack` do not know."""
        built_in = (
            JsonCodec("json", msgspec.json, self.hooks),
            MsgspecCodec("msgpack", msgspec.msgpack, self.hooks),
            RawCodec(),
        )
        self._known: dict[str, Codec] = {codec.name: codec for codec in built_in}
        if not isinstance(default, str):
            self.add(default)
        self.default = self.get(default if isinstance(default, str) else default.name)

    def add(self, codec: Codec) -> None:
        """Add a codec. Every app that reads its payloads must add it too."""
        name = getattr(codec, "name", None)
        able = all(callable(getattr(codec, method, None)) for method in ("encode", "decode"))
        if not able or not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.+-]{1,40}", name):
            raise OptionError(f"{codec!r:.60} is not a codec: it needs a name, encode(value) and decode(data, type)")
        if name in self._known and self._known[name] is not codec and type(self._known[name]) is not type(codec):
            raise OptionError(f"there is another codec named {name!r}: stored payloads would change their meaning")
        self._known[name] = codec

    def get(self, name: str) -> Codec:
        codec = self._known.get(name)
        if codec is None:
            raise OptionError(f"codec {name!r:.60} is not known here: use {', '.join(self._known)}, or app.add_codec")
        return codec

    def encode(self, what: str, value: object, codec: Codec | None = None) -> bytes:
        """Encode a value. `what` names it in the error that is raised if it cannot be encoded."""
        codec = codec or self.default
        try:
            return codec.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise PayloadRejected(
                f"{what} cannot be sent as {codec.name} ({type(value).__name__}): {_reason(error)}."
                " Send plain values, dataclasses, msgspec Structs or pydantic models, or add app.codec_hooks"
            ) from error

    def decode(self, what: str, data: bytes, name: str, type: Any = Any) -> Any:
        """Decode the bytes of the named codec as a value of this type. `what` names the bytes in the error."""
        codec = self.get(name)
        try:
            return codec.decode(data, type)
        except UNDECODABLE as error:
            raise PayloadRejected(f"{what} cannot be read as {name} of {shown(type)}: {_reason(error)}") from error

    def encode_any(self, what: str, value: object) -> tuple[bytes, str]:
        """Return bytes unchanged, or another value encoded by the app's codec; and the name of the codec."""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(cast("bytes", value)), "raw"
        return self.encode(what, value), self.default.name

    def decode_or_leave(self, data: bytes | None, name: str) -> Any:
        """Decode a value; return the bytes themselves if they cannot be decoded here."""
        if data is None:
            return None
        try:
            return self.decode("it", data, name)
        except (PayloadRejected, OptionError):
            return data


def canonical(value: object, hooks: TypeHooks = WITHOUT_HOOKS) -> bytes:
    """Return the canonical JSON of a value: keys and sets sorted, no spaces."""
    data = msgspec.json.encode(value, enc_hook=hooks.encode, order="sorted")
    _refuse_nan(value, data, hooks)
    return data


def _refuse_nan(value: object, data: bytes, hooks: TypeHooks) -> None:
    """Raise if a value has NaN or infinity, which JSON does not have: msgspec writes null, or a name as a key."""
    if b"null" in data or b'"nan"' in data or b'inf"' in data:
        try:
            json.dumps(msgspec.to_builtins(value, enc_hook=hooks.encode), allow_nan=False)
        except ValueError:
            raise ValueError("JSON has no NaN and no infinity: use None or a string") from None


def _depth(data: bytes) -> int:
    """Return the depth of nested lists and objects in a JSON text."""
    deepest = depth = 0
    for bracket in re.findall(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    return str(error)[:300] or type(error).__name__
