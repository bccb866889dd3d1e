"""Ids from the notes of tasks are those that the tasks themselves give."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast, OptionError
from holdfast._core.tasks import TaskNote, id_from_note, signature_hash


def note_of(function: Callable[..., Any], **options: Any) -> tuple[Any, TaskNote]:
    app = Holdfast("memory://")
    task = app.task(name="t", **options)(function)
    (handler,) = app._parts().handlers
    return task, msgspec.json.decode(handler.config.note, type=TaskNote)


def by_name(user: int, kind: str = "full", *, page: int | None = None) -> None: ...


def whole(doc: str, /) -> None: ...


@pytest.mark.parametrize(
    ("template", "payload"),
    [
        ("user:{user}", {"user": 7}),
        ("{kind}:{user}", {"user": 7}),
        ("{kind}:{user}", {"user": 7, "kind": "a:b c"}),
        ("{page}-{user}", {"user": 7}),
        ("{page}-{user}", {"user": 7, "page": 3}),
        ("only", {"user": 7}),
    ],
)
def test_id_from_a_note_is_that_of_the_task(template: str, payload: dict[str, Any]) -> None:
    for rule in ("unique", "singleton"):
        task, note = note_of(by_name, **{rule: template})
        assert note.rule == rule
        assert id_from_note("t", note, payload) == task.bind(**payload).id


def test_id_from_the_note_of_a_task_that_takes_the_whole_payload() -> None:
    task, note = note_of(whole, unique="doc:{doc}")
    assert id_from_note("t", note, "a b") == task.bind("a b").id


def test_task_without_a_template_leaves_the_id_to_the_request() -> None:
    _, note = note_of(by_name)
    assert id_from_note("t", note, {"user": 7}) is None


def test_function_as_a_template_cannot_be_stored_in_a_note() -> None:
    _, note = note_of(by_name, unique=lambda user, kind, page: str(user))
    with pytest.raises(OptionError, match="pass --app MODULE:APP, or --id"):
        id_from_note("t", note, {"user": 7})


@pytest.mark.parametrize(("payload", "why"), [({}, "has no 'user'"), ([7], "must be an object"), ("7", "an object")])
def test_payload_that_does_not_fit_the_template_is_refused(payload: Any, why: str) -> None:
    _, note = note_of(by_name, unique="{user}")
    with pytest.raises(OptionError, match=why):
        id_from_note("t", note, payload)


def test_signature_hash_depends_on_parameters_and_not_on_values() -> None:
    def same(user: int, kind: str = "other", *, page: int | None = None) -> None: ...
    def more(user: int, kind: str = "full", *, page: int | None = None, extra: int) -> None: ...
    def required(user: int, kind: str, *, page: int | None = None) -> None: ...

    known = signature_hash(inspect.signature(by_name))
    assert signature_hash(inspect.signature(same)) == known
    assert len({known, *(signature_hash(inspect.signature(other)) for other in (more, required))}) == 3
