"""The arguments of a function as a payload: an object by parameter name, which any language can write.

A payload has only the arguments that the caller passed; the worker's code adds its defaults. A function whose only
parameter is positional-only takes the whole payload instead: as bytes, or as the annotated type.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import string
import types
from collections.abc import Callable, Collection, Mapping
from inspect import Parameter
from typing import Any, get_type_hints
from urllib.parse import quote

import msgspec

from holdfast._core.codec import UNDECODABLE, Codec, Codecs, canonical
from holdfast._core.options import IdTemplate
from holdfast._core.type_hooks import WITHOUT_HOOKS, TypeHooks
from holdfast.errors import OptionError, PayloadRejected

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class SignatureMismatch(Exception):
    """A payload has other parameters than the function: its producer has older or newer code than the worker."""


class Arguments:
    """The parameters of one function, and their payloads. Annotations are read late: they may name a later class."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        if _is_generator(function):
            raise OptionError(f"{name} is a generator function, and a job has one result: return a list instead")
        self.name = name
        self.function = function
        self.signature = inspect.signature(function)
        self._parameters = list(self.signature.parameters.values())
        kinds = [parameter.kind for parameter in self._parameters]
        self.whole = kinds == [Parameter.POSITIONAL_ONLY]
        """The only parameter takes the whole payload."""
        self._plain = all(kind in _NAMED for kind in kinds)
        """All arguments can be passed by name."""
        self._positional = [p.name for p in self._parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        self._names = {p.name for p in self._parameters}
        self._required = {p.name for p in self._parameters if p.default is p.empty and p.kind not in _VARIABLE}

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(_with_hints(self.function), include_extras=True)
        except Exception as error:
            raise OptionError(
                f"the annotations of {self.name} cannot be read ({error}): import the names at the top of the module,"
                " not only under TYPE_CHECKING or inside a function"
            ) from error

    @property
    def returns(self) -> Any:
        return self.hints.get("return", Any)

    @property
    def raw(self) -> bool:
        """Whether the function takes the payload as bytes, without decoding."""
        return self.whole and self.hints.get(self._parameters[0].name, bytes) is bytes

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter name. Raises the TypeError that the call itself would raise."""
        if self._plain and not args and self._required <= kwargs.keys() <= self._names:
            return kwargs
        if self._plain and len(args) <= len(self._positional):
            given = dict(zip(self._positional, args, strict=False))
            if not kwargs.keys() & given.keys() and kwargs.keys() <= self._names:
                given.update(kwargs)
                if self._required <= given.keys():
                    return given
        try:
            return dict(self.signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None

    def encode(self, codecs: Codecs, codec: Codec, given: Mapping[str, Any]) -> bytes:
        """Encode the arguments of a call. The error names the argument that cannot be encoded."""
        if self.whole:
            (parameter,) = self._parameters
            payload = given.get(parameter.name, parameter.default)
            return codecs.encode(f"the payload of {self.name}", payload, codec)
        try:
            return codecs.encode(f"the arguments of {self.name}", given, codec)
        except PayloadRejected:
            for name, value in given.items():
                codecs.encode(f"argument {name!r} of {self.name}", value, codec)
            raise

    def decode(self, codec: Codec, data: bytes) -> Any:
        """Decode a payload to one value for `call`. Raises `SignatureMismatch`, or `PayloadRejected` if no other worker
        could decode it either."""
        if self.whole and self.raw:
            return data
        wanted = self.hints.get(self._parameters[0].name, Any) if self.whole else self._struct
        try:
            return codec.decode(data, wanted)
        except UNDECODABLE as error:
            if not self.whole:
                self._compare_names(codec, data)
            raise PayloadRejected(f"the payload does not fit {self.name}{self.signature}: {error}") from error

    def check(self, codec: Codec) -> None:
        """Check that the codec can decode every parameter and the result. Raises `OptionError` with the name of one."""
        types = {f"parameter {parameter.name!r}": self._field(parameter)[1] for parameter in self._parameters}
        for what, type in {**types, "the result": self.returns}.items():
            try:
                codec.decode(b"", type)
            except TypeError as error:
                raise OptionError(f"{what} of {self.name} has a type that {codec.name} cannot read: {error}") from error
            except UNDECODABLE:
                pass  # Empty bytes fit no type; only the type itself is checked here.
        if not self.whole:
            try:
                _ = self._struct
            except Exception as error:
                raise OptionError(f"the parameters of {self.name} cannot be decoded: {error}") from error

    def named(self, decoded: Any) -> dict[str, Any]:
        """Return arguments by parameter name, from the value that `decode` returned."""
        return {self._parameters[0].name: decoded} if self.whole else msgspec.structs.asdict(decoded)

    def call(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for the function, from the value that `decode` returned."""
        if self.whole:
            return (given,), {}
        by_name: dict[str, Any] = msgspec.structs.asdict(given)
        return ((), by_name) if self._plain else _spread(self._parameters, by_name)

    @functools.cached_property
    def _struct(self) -> type[msgspec.Struct]:
        fields = [self._field(parameter) for parameter in self._parameters]
        return msgspec.defstruct(name_of(self.function), fields, kw_only=True, forbid_unknown_fields=True)

    def _field(self, parameter: Parameter) -> Any:
        hint = self.hints.get(parameter.name, Any)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            return parameter.name, types.GenericAlias(tuple, (hint, ...)), ()
        if parameter.kind is Parameter.VAR_KEYWORD:
            return parameter.name, types.GenericAlias(dict, (str, hint)), msgspec.field(default_factory=dict)
        if parameter.default is parameter.empty:
            return parameter.name, hint
        return parameter.name, hint, msgspec.field(default_factory=lambda: parameter.default)

    def _compare_names(self, codec: Codec, data: bytes) -> None:
        """Raise `SignatureMismatch` if a payload has other parameters than the function."""
        try:
            found = codec.decode(data, dict[str, Any])
        except UNDECODABLE:
            return
        if unknown := sorted(found.keys() - self._names):
            raise SignatureMismatch(f"{self.name} has no parameter {', '.join(map(repr, unknown))}") from None
        if missing := sorted(self._required - found.keys()):
            raise SignatureMismatch(f"the payload of {self.name} has no {', '.join(map(repr, missing))}") from None


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, of the function of a partial, or of the class of a callable object."""
    return getattr(_with_hints(function), "__name__", type(function).__name__)


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_with_hints(function))


def _is_generator(function: Callable[..., Any]) -> bool:
    called = _with_hints(function)
    return inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)


def _with_hints(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that has the annotations: that of a partial, or `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    called: Callable[..., Any] = type(function).__call__
    return function if inspect.isroutine(function) else called


def id_maker(
    arguments: Arguments, template: IdTemplate, hooks: TypeHooks = WITHOUT_HOOKS
) -> Callable[[dict[str, Any]], str]:
    """Return a function that makes the id of a job from its arguments. Checks a template when the task is defined."""
    name, parameters = arguments.name, arguments.signature.parameters
    if not callable(template):
        return id_filler(name, parameters, template, hooks)
    defaults = _defaults(parameters)

    def called(given: dict[str, Any]) -> str:
        args, kwargs = _spread(parameters.values(), {**defaults, **given})
        id = template(*args, **kwargs)
        if not isinstance(id, str):
            raise OptionError(f"the function that makes the ids of {name} returned {id!r:.60}, not text")
        return id

    return called


def id_filler(
    name: str, parameters: Mapping[str, Parameter], template: str, hooks: TypeHooks = WITHOUT_HOOKS
) -> Callable[[dict[str, Any]], str]:
    """Return a function that fills an id template with arguments. `name` is that of the task."""
    defaults = _defaults(parameters)
    what = f"the id template {template!r:.80} of {name}"
    try:
        pieces = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as error:
        raise OptionError(f"{what} cannot be read: {error}") from None
    if not template:
        raise OptionError(f"the id template of {name} is empty")
    for _, field, spec, conversion in pieces:
        if field is not None and (field not in parameters or spec or conversion):
            names = ", ".join(f"{{{name}}}" for name in parameters) or "plain text"
            raise OptionError(f"{what} has {{{field}}}: use only {names} in it, or pass a function")
    special = _separators(what, pieces)

    def filled(given: dict[str, Any]) -> str:
        values = {**defaults, **given}
        return "".join(
            literal + ("" if field is None else _escaped(values[field], special, hooks))
            for literal, field, _, _ in pieces
        )

    return filled


def _defaults(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    empty: dict[Any, Any] = {Parameter.VAR_POSITIONAL: (), Parameter.VAR_KEYWORD: {}}
    return {p.name: empty.get(p.kind, p.default) for p in parameters.values()}


def _separators(what: str, pieces: list[Any]) -> str:
    """Return the characters between two fields. Values escape them, or different arguments could make the same id."""
    fields = [at for at, piece in enumerate(pieces) if piece[1] is not None]
    between = [pieces[at][0] for at in fields[1:]]
    if "" in between:
        raise OptionError(f"{what} needs a character between two fields: use ':' or '-'")
    special = "".join(sorted(set("".join(between))))
    if set(special) & set("0123456789ABCDEF%~"):
        raise OptionError(f"{what} has a digit, a letter from A to F, % or ~ between two fields: use ':' or '-'")
    return special


def _escaped(value: object, special: str, hooks: TypeHooks) -> str:
    """Format a value as part of an id. The escapes make the ids of ("a:b", "c") and ("a", "b:c") different."""
    if value is None:
        return "~"
    text = value if isinstance(value, str) else canonical(value, hooks).decode().strip('"')
    escaped = quote(text, safe="@+").replace("~", "%7E")
    for character in special:
        escaped = escaped.replace(character, f"%{ord(character):02X}")
    return escaped


def content_id(*args: object, **kwargs: object) -> str:
    """Return an id made from content: equal content has an equal id, in any order of keys.

    It is the first 40 hex digits of the SHA-256 of the canonical JSON: of the value, of a list of several arguments, or
    of an object of named ones. A task can use it as `unique=content_id`.

    >>> content_id({"b": 1, "a": 2}) == content_id({"a": 2, "b": 1})
    True
    """
    if not args and not kwargs:
        raise OptionError("content_id has no arguments: pass the content to make an id from")
    value: object = args[0] if len(args) == 1 and not kwargs else [*args, kwargs] if args and kwargs else args or kwargs
    try:
        return hashlib.sha256(canonical(value)).hexdigest()[:40]
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadRejected(f"content_id cannot encode this content: {error}") from error


def _spread(parameters: Collection[Parameter], values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return values by name as arguments of a call: by name, or by position before a `*args`."""
    starred = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters)
    positional = (Parameter.POSITIONAL_ONLY, *([Parameter.POSITIONAL_OR_KEYWORD] if starred else []))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters:
        value = values[parameter.name]
        if parameter.kind is Parameter.VAR_POSITIONAL:
            args.extend(value)
        elif parameter.kind is Parameter.VAR_KEYWORD:
            kwargs.update(value)
        elif parameter.kind in positional:
            args.append(value)
        else:
            kwargs[parameter.name] = value
    return tuple(args), kwargs
