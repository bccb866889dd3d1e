"""What a child says, seen from its parent: a process in which a handler ran may say anything."""

from __future__ import annotations

import pytest

from holdfast._core.retry_policy import Returned
from holdfast._worker.processes.child_handle import ChildHandle, Parent
from holdfast._worker.processes.messages import Begin, Done, FromChild, Progress, Refused
from holdfast.version import VERSION


@pytest.mark.parametrize("message", [Done(7, Returned(None)), Refused(7), Progress(7, b"1")], ids=str)
async def test_a_message_about_an_unknown_run_is_ignored(message: FromChild) -> None:
    told: list[object] = []
    parent = Parent(
        moved=lambda child: None,
        run_over=lambda *what: told.append(what),
        refused=told.append,
        progressed=lambda: told.append("progress"),
        answered=lambda *what: told.append(what),
    )
    child = ChildHandle(1, Begin(VERSION, "w", "no.module:app", [], None), parent, spare=False, drain_grace_s=1)
    child._received([message])
    assert told == []
    await child.live()
    assert child.failure is not None
