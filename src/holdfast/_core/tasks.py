"""Facts about a task that a worker stores as a note, for commands that enqueue without the code of the task."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any, Literal

import msgspec

from holdfast._core.arguments import Arguments, id_filler
from holdfast._core.codec import canonical
from holdfast.errors import OptionError

SIGNATURE_CHARS = 6

IdRule = Literal["none", "unique", "singleton"]
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class TaskNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    rule: IdRule = "none"
    template: str | None = None
    """Template of the ids. None with a rule: a function makes them, which only the code has."""
    parameters: list[str] = []
    defaults: dict[str, Any] = {}
    """Defaults of parameters that the template may use, if JSON can carry them."""
    whole: bool = False
    """The only parameter takes the whole payload."""


def describe_task(arguments: Arguments, rule: IdRule, template: object) -> TaskNote:
    text = template if isinstance(template, str) else None
    parameters = list(arguments.signature.parameters.values())
    given = {p.name: p.default for p in parameters if p.default is not p.empty} if text else {}
    return TaskNote(
        rule=rule,
        template=text,
        parameters=[p.name for p in parameters] if text else [],
        defaults={name: value for name, value in given.items() if _is_json(value)},
        whole=arguments.whole,
    )


def signature_hash(signature: Signature) -> str:
    """Return a hash of the parameters of a function: names, kinds, annotations, and which have defaults."""
    parts = [f"{p.kind} {p.name} {p.default is p.empty} {_annotation(p)}" for p in signature.parameters.values()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:SIGNATURE_CHARS]


def id_from_note(queue: str, note: TaskNote, payload: object) -> str | None:
    """Return the id of a job with this payload; None for a new id. Raises OptionError if the note cannot say it."""
    if note.rule == "none":
        return None
    if note.template is None:
        raise OptionError(
            f"a function in the code makes the {note.rule} ids of {queue}: pass --app MODULE:APP, or --id"
        )
    given: Mapping[str, Any] = {note.parameters[0]: payload} if note.whole else _named(queue, payload)
    parameters = {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=note.defaults.get(name, Parameter.empty))
        for name in note.parameters
    }
    for name in note.parameters:
        if f"{{{name}}}" in note.template and name not in given and name not in note.defaults:
            raise OptionError(f"the payload for {queue} has no {name!r}, which its id {note.template!r} needs")
    return id_filler(queue, parameters, note.template)({name: given[name] for name in given if name in parameters})


def _named(queue: str, payload: object) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise OptionError(f"the payload for {queue} must be an object of its arguments by name, not {payload!r:.60}")
    return payload  # pyright: ignore[reportUnknownVariableType]


def _annotation(parameter: Parameter) -> str:
    return _ADDRESS.sub("", inspect.formatannotation(parameter.annotation))


def _is_json(value: object) -> bool:
    try:
        canonical(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, str | int | float | bool | None)
