"""Values to bytes and back: JSON (the default), msgpack, raw bytes, or a codec of your own.

The producer encodes a value, so that a value that cannot be sent fails where it was written. The reader decodes it
against its annotations. A record notes which codec wrote it: a queue may mix them. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Protocol, cast

import msgspec

from holdfast.errors import OptionError, PayloadRejected

MAX_DEPTH = 64
"""Lists and objects inside each other, in JSON: deeper ones are mistakes, or attacks."""

UNDECODABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError)
"""What a codec may raise on bytes that are not of the asked type."""


class Codec(Protocol):
    """How values travel. `decode` is given a type as `msgspec.convert` takes it, `Any` included."""

    name: str
    """Stored with each payload, so it never changes its meaning."""

    def encode(self, value: object) -> bytes: ...
    def decode(self, data: bytes, type: Any) -> Any: ...


class MsgspecCodec:
    """A format that msgspec writes and reads: dataclasses, Structs, TypedDicts, times, UUIDs, Decimals, bytes, pydantic
    models. Msgpack is smaller and faster than JSON, and its bytes stay bytes. Decoders are made once per type."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._module = module
        self._encoder = module.Encoder(enc_hook=_encode_other)
        self._decoders: dict[Any, Any] = {}

    def encode(self, value: object) -> bytes:
        data: bytes = self._encoder.encode(value)
        return data

    def decode(self, data: bytes, type: Any) -> Any:
        try:
            decoder = self._decoders.get(type)
        except TypeError:  # An annotation that cannot be hashed.
            return self._module.Decoder(type, dec_hook=_decode_other).decode(data)
        if decoder is None:
            decoder = self._decoders[type] = self._module.Decoder(type, dec_hook=_decode_other)
        return decoder.decode(data)


class JsonCodec(MsgspecCodec):
    """JSON by msgspec, with bytes as base64. Refuses what other readers of JSON could not read."""

    def encode(self, value: object) -> bytes:
        data: bytes = self._encoder.encode(value)
        _refuse_nan(value, data)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} lists and objects inside each other")
        return data


class RawCodec:
    """Bytes as they are."""

    name = "raw"

    def encode(self, value: object) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise TypeError(f"it must be bytes, not {type(value).__name__}")
        return bytes(cast("bytes", value))

    def decode(self, data: bytes, type: Any) -> Any:
        if type not in (Any, object, bytes, bytes | None):
            raise TypeError(f"raw bytes were sent where {type!r} is wanted")
        return data


class Codecs:
    """The codecs that an app knows, by name."""

    def __init__(self, default: str | Codec = "json") -> None:
        built_in = (JsonCodec("json", msgspec.json), MsgspecCodec("msgpack", msgspec.msgpack), RawCodec())
        self._known: dict[str, Codec] = {codec.name: codec for codec in built_in}
        if not isinstance(default, str):
            self.add(default)
        self.default = self.get(default if isinstance(default, str) else default.name)

    def add(self, codec: Codec) -> None:
        """Make a codec known. One that an app reads with must be known where it is read."""
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
            raise OptionError(
                f"codec {name!r:.60} is not known here: it is one of {', '.join(self._known)}, or add_codec it"
            )
        return codec

    def encode(self, what: str, value: object, codec: Codec | None = None) -> bytes:
        """A value as bytes; `what` names it in the error that is raised if it cannot be sent."""
        codec = codec or self.default
        try:
            return codec.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            kind = type(value).__name__
            raise PayloadRejected(
                f"{what} cannot be sent as {codec.name} ({kind}): {_reason(error)}."
                " Send plain values, dataclasses, msgspec Structs or pydantic models"
            ) from error

    def decode(self, what: str, data: bytes, name: str, type: Any = Any) -> Any:
        """Bytes that the named codec wrote, as a value of a type."""
        codec = self.get(name)
        try:
            return codec.decode(data, type)
        except UNDECODABLE as error:
            raise PayloadRejected(f"{what} cannot be read as {name} of {_shown(type)}: {_reason(error)}") from error

    def encode_any(self, what: str, value: object) -> tuple[bytes, str]:
        """Bytes unchanged, any other value by the app's codec: the data, and the name of the codec."""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(cast("bytes", value)), "raw"
        return self.encode(what, value), self.default.name

    def decode_or_leave(self, data: bytes | None, name: str) -> Any:
        """A value; the bytes themselves if they cannot be decoded here."""
        if data is None:
            return None
        try:
            return self.decode("it", data, name)
        except (PayloadRejected, OptionError):
            return data


def canonical(value: object) -> bytes:
    """The one JSON of a value: keys sorted, sets ordered, no spaces."""
    data = msgspec.json.encode(value, enc_hook=_encode_other, order="sorted")
    _refuse_nan(value, data)
    return data


def _refuse_nan(value: object, data: bytes) -> None:
    """JSON has no NaN and no infinity: msgspec writes null, or a name as a key. Look closer only where one is."""
    if b"null" in data or b'"nan"' in data or b'inf"' in data:
        try:
            json.dumps(msgspec.to_builtins(value, enc_hook=_encode_other), allow_nan=False)
        except ValueError:
            raise ValueError("NaN and infinity have no place in JSON: send None, or a string") from None


def _encode_other(value: Any) -> Any:
    """What msgspec does not know: a pydantic model, if that is installed."""
    if _is_pydantic(type(value)):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    raise TypeError(f"there is no way to write a {type(value).__module__}.{type(value).__qualname__}")


def _decode_other(type: Any, value: Any) -> Any:
    if _is_pydantic(type):
        return type.model_validate_json(msgspec.json.encode(value))
    if type is object:
        return value
    raise TypeError(f"there is no way to read a {_shown(type)}")


def _is_pydantic(type: Any) -> bool:
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)  # A caller that has a model has imported it.
    return model is not None and isinstance(type, model.__class__)


def _depth(data: bytes) -> int:
    """How deep a JSON text goes."""
    deepest = depth = 0
    for bracket in re.findall(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", data)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or contains itself"
    return str(error)[:300] or type(error).__name__


def _shown(type: Any) -> str:
    return getattr(type, "__qualname__", None) or str(type)
