"""What a child sends, seen from its parent: a process in which a handler ran may send anything."""

from __future__ import annotations

from typing import cast

import pytest

from holdfast._core.retry_policy import Returned
from holdfast._worker.processes.child_handle import ChildHandle
from holdfast._worker.processes.messages import Begin, Finished, FromChild, Progress, Refused
from holdfast._worker.processes.pool import Pool
from holdfast.version import VERSION


class Reports:
    """In place of a pool: what a child reports to it."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def child_moved(self, child: ChildHandle) -> None:
        pass

    def finished(self, *args: object) -> None:
        self.calls.append(args)

    refused = progressed = child_answered = finished


@pytest.mark.parametrize("message", [Finished(7, Returned(None)), Refused(7), Progress(7, b"1")], ids=str)
async def test_a_message_about_an_unknown_run_is_ignored(message: FromChild) -> None:
    reports = Reports()
    begin = Begin(VERSION, "w", "no.module:app", [], None)
    child = ChildHandle(1, cast("Pool", reports), begin, spare=False)
    child.received([message])
    assert reports.calls == []
    await child.live()
    assert child.failure is not None
