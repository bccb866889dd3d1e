"""Rehearsals without a loop, what they say about requests, and the mixin of unittest."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import BoundRequest, EventKind, Holdfast, NotOpen, OptionError, State
from holdfast.testing import RehearsedRequest, rehearse
from holdfast.testing.rehearsal import START


@pytest.fixture
def app(tmp_path: Path) -> Holdfast[Any]:
    """Not open, on a file that must never be made."""
    return Holdfast(f"sqlite:///{tmp_path}/real.db")


# Without a loop


def test_drain_and_advance_block_in_a_test_that_is_not_async(app: Holdfast[Any], tmp_path: Path) -> None:
    ran: list[str] = []

    @app.task(name="remind", min_backoff=10, max_backoff=10)
    def remind(who: str) -> str:
        ran.append(who)
        if len(ran) == 1:
            raise ValueError("at first")
        return f"dear {who}"

    with rehearse(app) as jobs:
        handle = remind.sync.enqueue("ada")
        later = remind.sync.using(delay=60).enqueue("grace")
        assert [run.kind for run in jobs.sync.drain()] == [EventKind.RETRIED]
        assert [run.kind for run in jobs.sync.advance(10)] == [EventKind.COMPLETED]
        assert handle.result(wait=0) == "dear ada"
        assert later.state() is State.WAITING
        assert [run.id for run in jobs.sync.advance(minutes=1)] == [later.id]
        assert jobs.now == START + timedelta(seconds=70)
    assert ran == ["ada", "ada", "grace"]
    assert list(tmp_path.iterdir()) == []


def test_blocking_drain_runs_async_handlers_and_handlers_that_block(app: Holdfast[Any]) -> None:
    @app.task(name="add")
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task(name="total")
    def total(numbers: list[int]) -> int:
        result = 0
        for number in numbers:
            result = add.sync.call(result, number)
        return result

    with rehearse(app) as jobs:
        handle = total.sync.enqueue([1, 2, 3])
        assert len(jobs.sync.drain()) == 4
        assert handle.result(wait=0) == 6


async def test_blocking_drain_in_a_loop_is_refused(app: Holdfast[Any]) -> None:
    with rehearse(app) as jobs, pytest.raises(NotOpen, match="await the async version"):
        jobs.sync.drain()


def test_blocking_forms_have_the_signatures_and_docstrings_of_the_async_ones(app: Holdfast[Any]) -> None:
    import inspect

    jobs = rehearse(app)
    for verb in (jobs.drain, jobs.advance):
        blocking = getattr(jobs.sync, verb.__name__)
        assert (inspect.signature(blocking), blocking.__doc__) == (inspect.signature(verb), verb.__doc__)


# What was enqueued


@pytest.fixture
def remind(app: Holdfast[Any]) -> Any:
    @app.task(name="remind", unique="{who}-{day}")
    async def remind(who: str, day: int = 1, tags: tuple[str, ...] = ()) -> None: ...

    return remind


async def test_an_enqueued_request_is_found_by_some_of_its_arguments(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        await remind.enqueue("ada", 3, tags=("a", "b"))
        await jobs.drain()
        jobs.assert_enqueued(remind)
        jobs.assert_enqueued("remind", day=3)
        jobs.assert_enqueued(remind, who="ada", day=3, tags=("a", "b"))
        jobs.assert_enqueued(remind, tags=["a", "b"])
        jobs.assert_not_enqueued(remind, who="grace")
        jobs.assert_not_enqueued(remind, who="ada", day=4)
        jobs.assert_not_enqueued("other")


async def test_defaults_are_arguments_and_requests_of_handlers_are_found(app: Holdfast[Any], remind: Any) -> None:
    @app.task(name="plan")
    async def plan() -> None:
        await app.enqueue_many(remind.bind("ada", day) for day in (1, 2))

    with rehearse(app) as jobs:
        await plan.enqueue()
        jobs.assert_not_enqueued(remind)
        await jobs.drain()
        jobs.assert_enqueued(remind, day=1)
        assert [request.arguments["day"] for request in jobs.enqueued(remind)] == [1, 2]


async def test_options_of_using_are_compared(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        await remind.using(delay=60, priority=7, id="x", expires=90).enqueue("ada")
        jobs.assert_enqueued(remind.using(delay=60), who="ada")
        jobs.assert_enqueued(remind.using(delay=timedelta(minutes=1), priority=7, id="x", expires=90))
        for options in ({"delay": 61}, {"priority": 6}, {"id": "y"}, {"expires": 80}, {"run_at": jobs.now}):
            jobs.assert_not_enqueued(remind.using(**options), who="ada")


async def test_headers_of_using_are_among_those_of_the_request(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        await remind.using(headers={"tenant": "7", "trace": "a"}).enqueue("ada")
        jobs.assert_enqueued(remind.using(headers={"tenant": "7"}))
        jobs.assert_not_enqueued(remind.using(headers={"tenant": "8"}))
        jobs.assert_not_enqueued(remind.using(headers={"tenant": "7", "other": "a"}))


async def test_headers_of_hooks_leave_other_options_as_they_are(app: Holdfast[Any], remind: Any) -> None:
    @app.before_enqueue
    def trace(request: BoundRequest[Any]) -> None:
        request.add_headers({"trace": "a"})

    with rehearse(app) as jobs:
        await remind.using(expires=60, backoff=[1, 2]).enqueue("ada")
        jobs.assert_enqueued(remind.using(expires=60))
        jobs.assert_enqueued(remind.using(backoff=[1, 2]))
        jobs.assert_not_enqueued(remind.using(expires=61))
        jobs.assert_not_enqueued(remind.using(backoff=[1]))


async def test_a_delay_of_zero_is_no_delay(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        await remind.using(run_at=jobs.now + timedelta(hours=1)).enqueue("ada", 1)
        await remind.using(delay=1).enqueue("ada", 2)
        jobs.assert_not_enqueued(remind.using(delay=0))
        await remind.enqueue("ada", 3)
        jobs.assert_enqueued(remind.using(delay=0), day=3)


async def test_arguments_are_compared_as_json_if_they_have_no_truth_value(app: Holdfast[Any]) -> None:
    app.codec_hooks(np.ndarray, encode=lambda array: array.tolist(), decode=np.array)

    @app.task(name="sum")
    async def total(numbers: np.ndarray[Any, Any]) -> None: ...

    with rehearse(app) as jobs:
        await total.enqueue(np.array([1, 2, 3]))
        jobs.assert_enqueued(total, numbers=np.array([1, 2, 3]))
        jobs.assert_not_enqueued(total, numbers=np.array([1, 2, 4]))


async def test_a_duplicate_was_not_enqueued(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        await remind.enqueue("ada")
        await remind.enqueue("ada", tags=("again",))
        jobs.assert_not_enqueued(remind, tags=("again",))
        assert len(jobs.enqueued()) == 1


async def test_a_failed_assertion_lists_what_was_enqueued_instead(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        with pytest.raises(AssertionError) as nothing:
            jobs.assert_enqueued(remind, who="ada")
        assert str(nothing.value) == "remind(who='ada') was not enqueued: nothing was"
        await remind.using(delay=60, priority=7).enqueue("grace")
        await app.queue("emails").enqueue([1, 2])
        with pytest.raises(AssertionError) as other:
            jobs.assert_enqueued(remind.using(delay=60), who="ada")
        assert str(other.value).splitlines() == [
            "remind(who='ada') with delay=60 was not enqueued; these were:",
            "  remind(who='grace', day=1, tags=()), due after 60 s, priority 7",
            "  emails([1, 2])",
        ]
        with pytest.raises(AssertionError, match=r"^remind\(day=1\) was enqueued:\n  remind\(who='grace'"):
            jobs.assert_not_enqueued(remind, day=1)
        await app.enqueue_many(remind.bind(f"user {number}") for number in range(10))
        with pytest.raises(AssertionError, match=r"\n  and 2 more$"):
            jobs.assert_enqueued("reminds")


async def test_an_argument_that_the_task_does_not_have_is_refused(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs, pytest.raises(OptionError, match="remind has no parameter 'whom': it has who, day"):
        jobs.assert_not_enqueued(remind, whom="ada")


async def test_enqueued_requests_have_their_time_and_priority(app: Holdfast[Any], remind: Any) -> None:
    with rehearse(app) as jobs:
        handle = await remind.using(run_at=START + timedelta(hours=1), priority=9).enqueue("ada")
        assert jobs.enqueued() == [
            RehearsedRequest(
                queue="remind",
                id=handle.id,
                arguments={"who": "ada", "day": 1, "tags": ()},
                run_at=START + timedelta(hours=1),
                delay=3600,
                priority=9,
            )
        ]


# With unittest


CASES = """
import unittest
from holdfast import Holdfast
from holdfast.testing import RehearsalMixin

app = Holdfast("redis://nowhere.invalid:1")

@app.task
def remind(who: str) -> str:
    return f"dear {who}"

class BlockingTest(RehearsalMixin, unittest.TestCase):
    app = app

    def test_a_reminder(self):
        handle = remind.sync.using(delay=86_400).enqueue("ada")
        self.jobs.sync.advance(days=1)
        self.assertEqual(handle.result(), "dear ada")

    def test_nothing_is_left_of_the_other_test(self):
        self.assertEqual(self.jobs.enqueued(), [])

class AsyncTest(RehearsalMixin, unittest.IsolatedAsyncioTestCase):
    app = app

    async def test_a_reminder(self):
        await remind.enqueue("ada")
        self.assertEqual(len(await self.jobs.drain()), 1)

class EagerTest(RehearsalMixin, unittest.TestCase):
    app = app
    eager = True

    def test_a_reminder(self):
        self.assertEqual(remind.sync.call("ada"), "dear ada")

class LastTest(unittest.TestCase):
    def test_the_app_is_itself_again(self):
        self.assertIn("nowhere.invalid", repr(app))
"""


@pytest.mark.suite("usual")
def test_a_test_case_of_unittest_rehearses_its_app(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text(textwrap.dedent(CASES))
    command = [sys.executable, "-W", "error", "-m", "unittest", "-v", "test_shop"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "Ran 5 tests" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
