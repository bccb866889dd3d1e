"""Values by themselves: ids, replies that read as truth, topics."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from holdfast._core.events import Event, EventKind, Topic
from holdfast._core.jobs import new_id
from holdfast._core.replies import CancelResult


def test_ids_are_unique_and_sort_by_the_time_they_were_made() -> None:
    made = []
    for _ in range(5):
        made.append([new_id() for _ in range(100)])
        time.sleep(0.002)
    assert len({id for ids in made for id in ids}) == 500
    for earlier, later in pairwise(made):
        assert max(earlier) < min(later)


def test_generated_id_needs_no_shell_quotes_and_does_not_look_like_an_option() -> None:
    for _ in range(1000):
        id = new_id()
        assert len(id) == 22
        assert id.isascii()
        assert not set(id) - set("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz~")
        assert id[0] == "0"


@pytest.mark.parametrize("reply", CancelResult)
def test_a_cancel_is_true_only_if_the_job_will_not_run(reply: CancelResult) -> None:
    assert bool(reply) is (reply is CancelResult.CANCELLED)


@pytest.mark.parametrize(
    ("topic", "kind", "covered"),
    [
        (Topic("q"), EventKind.CLAIMED, True),
        (Topic("other"), EventKind.CLAIMED, False),
        (Topic("q", "ready"), EventKind.ENQUEUED, True),
        (Topic("q", "ready"), EventKind.STALLED, True),
        (Topic("q", "ready"), EventKind.COMPLETED, False),
        (Topic("q", "ends"), EventKind.COMPLETED, True),
        (Topic("q", "ends"), EventKind.CANCEL_ASKED, True),
        (Topic("q", "ends"), EventKind.FORGOTTEN, True),
        (Topic("q", "ends"), EventKind.RETRIED, False),
        (Topic("q", "ends", "a"), EventKind.FAILED, True),
        (Topic("q", "ends", "b"), EventKind.FAILED, False),
    ],
)
def test_a_topic_covers_its_queue_its_kinds_and_its_id(topic: Topic, kind: EventKind, covered: bool) -> None:
    assert topic.covers(Event(kind, "q", "a", 1)) is covered
