"""A wrong use is refused where it is written, with an error that says what was tried and what to do."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast import (
    Failure,
    Holdfast,
    HoldfastError,
    JobFailed,
    LayoutTooNew,
    NotOpen,
    OptionError,
    PayloadRejected,
    Retry,
    StorageUnavailable,
    Update,
    content_id,
    current_job,
)
from tests import servers
from tests.app.conftest import Place

pytestmark = pytest.mark.storages("memory")  # a test that depends on the storage names all of them

AppMaker = Callable[..., Holdfast[Any]]


@pytest.fixture
def idle() -> Holdfast[Any]:
    """An app that is not open, for mistakes that need no storage."""
    return Holdfast("memory://")


# Definitions


def test_an_unknown_option_of_a_task_is_named_and_the_right_one_suggested(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match=r"task has no option 'retries': did you mean 'max_retries'\?"):
        idle.task(retries=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match=r"'time_out': did you mean 'timeout'\?"):
        idle.task(time_out=3)  # type: ignore[call-overload]
    with pytest.raises(OptionError, match=r"task has no option 'zebra': it takes .*timeout.*unique"):
        idle.task(zebra=3)  # type: ignore[call-overload]
    assert idle.tasks == []


def test_unknown_options_are_refused_wherever_options_are_taken(idle: Holdfast[Any]) -> None:
    @idle.task(name="t")
    async def task() -> None: ...

    with pytest.raises(OptionError, match=r"using has no option 'priorty': did you mean 'priority'\?"):
        task.using(priorty=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"enqueue has no option 'delayed': did you mean 'delay'\?"):
        idle.queue("q").bind(1, delayed=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"queue q has no option 'max_retry': did you mean 'max_retries'\?"):
        idle.queue("q", max_retry=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"stub has no option 'timeout'"):
        idle.stub(name="x", timeout=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"on_failure of t has no option 'unique'"):
        task.on_failure(unique="x")(lambda failure: None)  # type: ignore[call-overload]


@pytest.mark.parametrize("template", ["{user}", "x:{usr_id}", "{user_id.name}", "{user_id!r}", "{user_id:>5}", "{0}"])
def test_an_id_template_may_name_only_parameters(idle: Holdfast[Any], template: str) -> None:
    with pytest.raises(OptionError, match=r"the id template .* of t has .*: use only \{user_id\}"):

        @idle.task(name="t", unique=template)
        async def task(user_id: int) -> None: ...


def test_an_id_template_that_cannot_be_read_is_refused(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match=r"the id template '\{user_id' of t cannot be read"):

        @idle.task(name="t", singleton="{user_id")
        async def task(user_id: int) -> None: ...


def test_task_cannot_be_unique_and_singleton(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match="t: unique and singleton are mutually exclusive"):

        @idle.task(name="t", unique="a", singleton="b")
        async def task() -> None: ...


def test_two_tasks_do_not_share_a_queue(idle: Holdfast[Any]) -> None:
    @idle.task(name="t")
    async def first() -> None: ...

    with pytest.raises(OptionError, match=r"tasks .*first.* and .*second.* are both named 't': pass name=") as raised:

        @idle.task(name="t")
        async def second() -> None: ...

    assert "line" in str(raised.value)
    assert idle.tasks == ["t"]


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "a:b", "ü", "x" * 121, "a\n", "{a}", 5, None, b"q", "/failed"])
def test_a_queue_name_that_is_not_valid_is_refused(idle: Holdfast[Any], name: Any) -> None:
    with pytest.raises(OptionError, match=r"queue name .* is not valid: use 1 to 120 letters, digits"):
        idle.queue(name)
    if name:
        with pytest.raises(OptionError):
            idle.task(name=name)(lambda: None)


def test_task_cannot_use_the_queue_of_a_fail_handler(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match=r"t/failed is the name of a fail handler's queue: use @task\.on_failure"):
        idle.task(name="t/failed")(lambda: None)


def test_a_task_has_one_fail_handler_which_takes_a_failure(idle: Holdfast[Any]) -> None:
    @idle.task(name="t")
    async def task() -> None: ...

    with pytest.raises(OptionError, match="the fail handler of t must have one parameter, a Failure"):
        task.on_failure(lambda: None)  # type: ignore[type-var]

    @task.on_failure
    async def first(failure: Failure) -> None: ...

    with pytest.raises(OptionError, match="t already has a fail handler"):
        task.on_failure(first)


def test_stub_has_no_fail_handler(idle: Holdfast[Any]) -> None:
    @idle.stub(name="far")
    async def far() -> None: ...

    with pytest.raises(OptionError, match="far is a stub: register on_failure in the program that has the function"):

        @far.on_failure
        async def alert(failure: Failure) -> None: ...


def test_task_that_is_not_a_function_is_refused(idle: Holdfast[Any]) -> None:
    for wrong in (5, "name", int):
        with pytest.raises(OptionError, match="a task must be a function, not"):
            idle.task(wrong)  # type: ignore[arg-type]


async def agenerates() -> AsyncIterator[int]:
    yield 1


def generates() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [generates, agenerates, partial(generates)], ids=["sync", "async", "partial"])
def test_generator_function_is_refused_as_a_task(idle: Holdfast[Any], function: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="t is a generator function, and a job has one result: return a list"):
        idle.task(name="t")(function)
    with pytest.raises(OptionError, match="t/failed is a generator function"):
        idle.task(name="t")(lambda: None).on_failure(lambda failure: (yield failure))


@pytest.mark.parametrize("name", ["", None, 5])
def test_task_with_an_empty_name_is_refused(idle: Holdfast[Any], name: Any) -> None:
    with pytest.raises(OptionError, match="is not valid"):
        idle.task(name=name)(lambda: None)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("timeout", 0, "timeout must be from 0.001"),
        ("timeout", -1, "timeout must be from 0.001 to 315,360,000 seconds, not -1"),
        ("timeout", "30", r"timeout must be seconds or a timedelta, not '30' \(str\)"),
        ("timeout", None, "timeout must be seconds or a timedelta"),
        ("timeout", float("nan"), "timeout must be seconds"),
        ("timeout", True, "timeout must be seconds"),
        ("max_retries", -1, "max_retries must be a whole number from 0"),
        ("max_retries", 1.5, "max_retries must be a whole number"),
        ("max_stalls", "3", "max_stalls must be a whole number"),
        ("max_timeouts", True, "max_timeouts must be a whole number"),
        ("min_backoff", -0.1, "min_backoff must be from 0"),
        ("priority", 10, "priority must be a whole number from 0 to 9, not 10"),
        ("priority", -1, "priority must be a whole number from 0 to 9"),
        ("result_ttl", -1, "result_ttl must be from 0"),
        ("dedup_ttl", "1h", "dedup_ttl must be seconds"),
        ("failure_ttl", -5, "failure_ttl must be from 0"),
        ("size", 0, "size must be a whole number from 1"),
        ("concurrency", 0, "concurrency must be a whole number from 1"),
        ("queue_priority", "high", "queue_priority must be a whole number"),
        ("cancel_grace", -1, "cancel_grace must be from 0"),
        ("delivery", "exactly_once", "delivery must be one of 'at_least_once', 'at_most_once', not 'exactly_once'"),
        ("on_storage_loss", "panic", "on_storage_loss must be one of 'hold', 'kill'"),
        ("codec", "pickle", "codec 'pickle' is not known here: use json, msgpack, raw"),
    ],
)
def test_an_option_of_a_task_that_is_out_of_range_is_refused(
    idle: Holdfast[Any], option: str, value: Any, says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        idle.task(name="t", **{option: value})(lambda: None)


def test_max_backoff_below_min_backoff_is_refused(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match=r"max_backoff \(1 s\) is less than min_backoff \(5 s\)"):
        idle.task(name="t", min_backoff=5, max_backoff=1)(lambda: None)


def test_task_whose_definition_was_refused_can_be_defined_again(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError):
        idle.task(name="t", priority=99)(lambda: None)
    assert idle.tasks == []
    idle.task(name="t")(lambda: None)
    assert idle.tasks == ["t"]


# Requests


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("id", "", "1 to 512 bytes"),
        ("id", "x" * 513, "1 to 512 bytes, this one has 513"),
        ("id", "ü" * 257, "1 to 512 bytes, this one has 514"),
        ("id", 5, r"id must be text or bytes, not 5 \(int\)"),
        ("id", "\ud800", "lone surrogate"),
        ("priority", 10, "priority must be a whole number from 0 to 9, not 10"),
        ("priority", "9", "priority must be a whole number"),
        ("priority", True, "priority must be a whole number"),
        ("delay", -1, "delay must be from 0"),
        ("delay", "soon", r"delay must be seconds or a timedelta, not 'soon' \(str\)"),
        ("delay", float("inf"), "delay must be .*, not inf"),
        ("delay", 10**12, "delay must be from 0"),
        ("delay", timedelta(seconds=-1), "delay must be from 0"),
        ("run_at", datetime(2027, 1, 1), r"has no timezone: use datetime\.now\(UTC\)"),
        ("run_at", 1_800_000_000, r"run_at must be a datetime with a timezone, not 1800000000 \(int\)"),
        ("run_at", datetime(2200, 1, 1, tzinfo=UTC), "between 1970 and 2100"),
        ("on_conflict", "replace", r"on_conflict must be 'keep', 'update', 'raise' or Update\(…\), not 'replace'"),
        ("on_conflict", True, "on_conflict must be 'keep'"),
        ("timeout", 0, "timeout must be from 0.001"),
        ("max_retries", -1, "max_retries must be a whole number"),
        ("result_ttl", -1, "result_ttl must be from 0"),
    ],
)
async def test_an_option_of_a_request_that_is_out_of_range_is_refused(
    app: Holdfast[Any], option: str, value: Any, says: str
) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    with pytest.raises(OptionError, match=says):
        task.using(**{option: value})
    with pytest.raises(OptionError, match=says):
        await app.queue("t").enqueue({}, **{option: value})
    assert (await app.stats()).queues == []


async def test_two_times_for_one_job_are_refused(app: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match="delay and run_at are mutually exclusive: pass only one"):
        await app.queue("q").enqueue(1, delay=1, run_at=datetime.now(UTC))


async def test_an_update_with_a_rule_that_is_not_known_is_refused(app: Holdfast[Any]) -> None:
    with pytest.raises(HoldfastError, match="run_at"):
        await app.queue("q").enqueue(1, id="a", on_conflict=Update(run_at="sometimes"))  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [-1, "5", float("nan"), 10**9, True])
async def test_wait_that_is_not_a_duration_is_refused(app: Holdfast[Any], wait: Any) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    handle = await task.enqueue()
    with pytest.raises(OptionError, match="wait must be"):
        await handle.result(wait=wait)
    with pytest.raises(OptionError, match="wait must be"):
        await task.using(wait=wait).call()
    with pytest.raises(OptionError, match="wait must be"):
        await app.queue("t").lease(wait=wait)


async def test_wrong_arguments_raise_the_type_error_of_python(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task(a: int, *, b: int = 1) -> None: ...

    with pytest.raises(TypeError, match="t: missing a required argument: 'a'"):
        await task.enqueue()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="t: too many positional arguments"):
        await task.enqueue(1, 2)
    with pytest.raises(TypeError, match="t: got an unexpected keyword argument 'c'"):
        await task.call(1, c=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="t: multiple values for argument 'a'"):
        task.bind(1, a=2)
    assert (await app.stats()).queues == []


class Opaque:
    """Nothing that could be sent."""


async def test_an_argument_that_cannot_be_sent_is_named(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task(good: int, bad: Any, also: str = "") -> None: ...

    for bad, says in (
        (Opaque(), "Opaque"),
        (lambda: None, "function"),
        ([1, {"deep": Opaque()}], "Opaque"),
        (float("nan"), "JSON has no NaN"),
        ("\ud800", "surrogate"),
    ):
        with pytest.raises(PayloadRejected, match=f"argument 'bad' of t cannot be sent as json.*{says}"):
            await task.enqueue(1, bad)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(PayloadRejected, match=r"argument 'bad' of t .*levels of nested lists"):
        await task.enqueue(1, deep)
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(PayloadRejected, match="nested too deeply, or contains itself"):
        await task.enqueue(1, itself)
    with pytest.raises(PayloadRejected, match="the payload for q cannot be sent as json"):
        await app.queue("q").enqueue({"bad": Opaque()})
    assert (await app.stats()).queues == []


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_a_payload_that_is_too_large_is_refused_with_its_size(make_app: AppMaker) -> None:
    app = make_app(max_payload=100)

    @app.task(name="t")
    async def task(text: str) -> None: ...

    async with app:
        with pytest.raises(PayloadRejected, match="has 211 bytes, at most 100 are allowed: store it elsewhere"):
            await task.using(id="a").enqueue("x" * 200)
        with pytest.raises(PayloadRejected, match="at most 100"):
            await app.enqueue_many([task.bind("fits"), task.bind("x" * 200)])
        assert (await task.enqueue("fits")).placed == "new"


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_payload_limit_is_one_mebibyte_by_default(app: Holdfast[Any]) -> None:
    await app.queue("q").enqueue(b"x" * 1_048_576)
    with pytest.raises(PayloadRejected, match="has 1048577 bytes, at most 1048576"):
        await app.queue("q").enqueue(b"x" * 1_048_577)


def test_id_function_that_does_not_return_text_is_refused(idle: Holdfast[Any]) -> None:
    @idle.task(name="t", unique=lambda n: n)
    async def task(n: int) -> None: ...

    with pytest.raises(OptionError, match="the function that makes the ids of t returned 5, not text"):
        task.bind(5)
    with pytest.raises(OptionError, match="content_id has no arguments"):
        content_id()
    with pytest.raises(PayloadRejected, match="content_id cannot encode this content"):
        content_id(Opaque())


# Where the app is open


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_an_app_that_is_not_open_says_how_to_open_it(make_app: AppMaker) -> None:
    app = make_app()

    @app.task(name="t")
    async def task() -> None: ...

    queue = app.queue("q")
    for use in (
        lambda: task.enqueue(),
        lambda: task.call(),
        lambda: app.enqueue_many([task.bind()]),
        lambda: app.stats(),
        lambda: app.evict("worker"),
        lambda: queue.enqueue(1),
        lambda: queue.lease(wait=0),
        lambda: queue.get("a"),
        lambda: queue.stats(),
        lambda: anext(queue.jobs()),
        lambda: anext(queue.events()),
        lambda: queue.delete(),
    ):
        with pytest.raises(NotOpen, match="the app is not open: use it inside 'async with app:'"):
            await use()


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_an_app_that_was_closed_says_so_and_may_be_opened_again(make_app: AppMaker) -> None:
    app = make_app()
    async with app:
        handle = await app.queue("q").enqueue("kept", id="a")
        lease = await app.queue("q").lease(wait=0)
        assert lease is not None
    for use in (lambda: handle.result(), lambda: handle.state(), lambda: lease.complete(), lambda: app.stats()):
        with pytest.raises(NotOpen, match="async with app"):
            await use()
    async with app:
        assert await lease.complete("done")
        assert await handle.result() == "done"


@pytest.mark.storages("memory", "sqlite", "valkey")
def test_an_app_may_be_opened_on_one_loop_after_another(make_app: AppMaker) -> None:
    app = make_app()

    async def enqueue(n: int) -> int:
        async with app:
            await app.queue("q").enqueue(n)
            return (await app.queue("q").stats()).ready

    ready = [asyncio.run(enqueue(n)) for n in range(3)]
    assert ready == [1, 2, 3]


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_an_app_is_used_on_the_loop_that_opened_it(app: Holdfast[Any]) -> None:
    told: list[BaseException] = []

    async def use() -> None:
        await app.queue("q").enqueue(1)

    async def open_again() -> None:
        async with app:
            pass

    def elsewhere(what: Callable[[], Any]) -> None:
        try:
            asyncio.run(what())
        except BaseException as error:
            told.append(error)

    for what in (use, open_again):
        thread = threading.Thread(target=elsewhere, args=[what])
        thread.start()
        await asyncio.to_thread(thread.join)
    assert [type(error) for error in told] == [NotOpen, NotOpen]
    assert "another event loop" in str(told[0])
    assert "`.sync`" in str(told[0])
    assert "another event loop" in str(told[1])
    assert (await app.queue("q").enqueue(1)).placed == "new"


def test_an_app_outside_of_any_loop_points_to_the_blocking_verbs(idle: Holdfast[Any]) -> None:
    with pytest.raises(NotOpen, match=r"no running event loop: .*use `\.sync`"):
        _ = idle.storage


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_an_app_may_be_entered_more_than_once(make_app: AppMaker) -> None:
    app = make_app()
    async with app:
        async with app:
            await app.queue("q").enqueue(1)
        assert (await app.queue("q").stats()).ready == 1
    with pytest.raises(NotOpen):
        await app.stats()


FORK = """
import asyncio, os, sys
from holdfast import Holdfast, HoldfastError

app = Holdfast(sys.argv[1], namespace=sys.argv[2])
queue = app.queue("q")
loop = asyncio.new_event_loop()
loop.run_until_complete(app.__aenter__())
loop.run_until_complete(queue.enqueue(1, id="a"))
pid = os.fork()
if pid == 0:
    code = 1
    try:
        loop.run_until_complete(asyncio.wait_for(queue.enqueue(2, id="b"), 10))
    except HoldfastError as error:
        print(type(error).__name__, error, flush=True)
        code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert loop.run_until_complete(queue.get("b")) is None
assert loop.run_until_complete(queue.delete())
loop.run_until_complete(app.__aexit__())
loop.close()
"""


@pytest.mark.storages("memory", "sqlite", "valkey")
def test_open_app_is_refused_in_a_forked_child(place: Place) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, place.url, place.namespace]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "opened by another process: open a new one after a fork" in done.stdout


MEMORY_FORK = """
import os, sys
from holdfast import Holdfast, HoldfastError

app = Holdfast("memory://shared")
app.sync.queue("q").enqueue(1, id="a")
pid = os.fork()
if pid == 0:
    code = 1
    try:
        app.sync.queue("q").enqueue(2, id="b")
    except HoldfastError as error:
        print(type(error).__name__, error, flush=True)
        code = 0
    finally:
        os._exit(code)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_memory_is_not_shared_with_a_forked_child_and_says_so() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", MEMORY_FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0"
    assert "memory" in done.stdout.lower()


# URLs


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_unreachable_server_is_named_within_the_timeout() -> None:
    port = closed_port()
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match=rf"127\.0\.0\.1:{port}.*is it up"):
        async with Holdfast(f"redis://127.0.0.1:{port}?timeout=0.5"):
            pass
    assert time.monotonic() - began < 8


def test_unreachable_server_is_named_by_blocking_calls() -> None:
    app = Holdfast(f"valkey://127.0.0.1:{closed_port()}?timeout=0.5")
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="is it up"):
            app.sync.queue("q").enqueue(1)
    assert time.monotonic() - began < 15


async def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="nowhere"):
        async with Holdfast(f"sqlite:///{tmp_path}/nowhere/jobs.db"):
            pass


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgres://host/db", "has an unknown scheme: use one of sqlite, memory, redis"),
        ("jobs.db", "has an unknown scheme"),
        ("sqlite://jobs.db", r"does not name a file: use sqlite:///jobs\.db"),
        ("sqlite:///", "does not name a file"),
        ("sqlite:///:memory:", "does not name a file.*memory://"),
        ("sqlite:///jobs.db?timeout=5", "has an unknown option: it takes synchronous"),
        ("memory://x?y=1", "has an unknown option: it takes none"),
        ("redis://host:99999", "99999|port"),
        ("redis://host?timeout=never", "timeout"),
    ],
)
def test_a_url_that_is_not_valid_says_what_to_write(url: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        Holdfast(url)


def test_a_bad_url_in_the_environment_is_refused_when_the_app_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "mongodb://user:hunter2@host/db")
    with pytest.raises(OptionError, match=r"HOLDFAST_URL.*has an unknown scheme") as raised:
        Holdfast()
    assert "hunter2" not in str(raised.value)
    assert "memory" in repr(Holdfast("memory://")).lower()


def test_a_good_url_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{tmp_path}/from-env.db")
    assert "from-env.db" in repr(Holdfast())
    monkeypatch.setenv("HOLDFAST_URL", "")
    assert "holdfast.db" in repr(Holdfast())


def test_wrong_options_of_an_app_are_refused() -> None:
    with pytest.raises(OptionError, match="a storage URL must be text"):
        Holdfast(5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="namespace 'a b' is not valid"):
        Holdfast("memory://", namespace="a b")
    with pytest.raises(OptionError, match="codec 'pickle' is not known here"):
        Holdfast("memory://", codec="pickle")
    with pytest.raises(OptionError, match="max_payload must be a whole number"):
        Holdfast("memory://", max_payload=0)
    with pytest.raises(OptionError, match="url and storage are mutually exclusive"):
        Holdfast("memory://", storage=Holdfast("memory://")._session.transaction_storage)
    with pytest.raises(OptionError, match="is not a codec"):
        Holdfast("memory://").add_codec(object())  # type: ignore[arg-type]


SECRETS = [
    "redis://:hunter2@127.0.0.1:{port}/0?timeout=0.5",
    "redis://user:hunter2@127.0.0.1:{port}?timeout=0.5",
    "redis://127.0.0.1:{port}?password=hunter2&timeout=0.5",
    "valkey://us%40er:hunter2@127.0.0.1:{port}/0?timeout=0.5",
]


@pytest.mark.parametrize("url", SECRETS)
async def test_a_password_is_in_no_message_and_in_no_repr(url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = Holdfast(url.format(port=closed_port()))
    app.task(name="t")(lambda: None)
    assert "hunter2" not in repr(app)
    with pytest.raises(StorageUnavailable) as raised:
        await app.__aenter__()
    error: BaseException | None = raised.value
    while error is not None:
        assert "hunter2" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    "url",
    ["mysql://user:hunter2@host", "redis://user:hunter2@host:port", "sqlite://user:hunter2@host/x?password=hunter2"],
)
def test_a_password_is_not_in_the_refusal_of_a_url(url: str) -> None:
    with pytest.raises(OptionError) as raised:
        Holdfast(url)
    assert "hunter2" not in str(raised.value)


async def test_newer_sqlite_layout_is_refused_with_advice(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Holdfast(url) as app:
        await app.queue("q").enqueue(1)
    db = sqlite3.connect(tmp_path / "jobs.db")
    db.execute("UPDATE holdfast_meta SET value = 999 WHERE key = 'layout'")
    db.commit()
    db.close()
    with pytest.raises(LayoutTooNew, match=r"layout 999, this Holdfast reads up to \d+: upgrade it here"):
        async with Holdfast(url):
            pass
    with pytest.raises(LayoutTooNew):
        await asyncio.to_thread(Holdfast(url).sync.queue("q").get, "a")


# Workers


def test_a_worker_needs_tasks(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match="this app has no tasks: import the modules that define them"):
        idle.worker()

    @idle.stub(name="elsewhere")
    def stub() -> None: ...

    with pytest.raises(OptionError, match="this app has no tasks"):
        idle.worker()
    idle.task(name="here")(lambda: None)
    with pytest.raises(OptionError, match="no task matches 'elsewhere': the app has here"):
        idle.worker("elsewhere")


def test_pattern_that_matches_nothing_is_refused_with_the_known_queues(idle: Holdfast[Any]) -> None:
    idle.task(name="reports.daily")(lambda: None)
    idle.task(name="mail.send")(lambda: None)
    with pytest.raises(OptionError, match=r"no task matches 'report\.\*': the app has reports\.daily, mail\.send"):
        idle.worker("report.*")
    with pytest.raises(OptionError, match="no task matches 'nothing'"):
        idle.worker(["mail.*", "nothing"])
    assert idle.worker("reports.*").queues == ["reports.daily"]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lease", 0.4, "lease must be from 0.5 to 3,600 seconds, not 0.4"),
        ("lease", 3601, "lease must be from 0.5 to 3,600"),
        ("lease", "10", "lease must be seconds"),
        ("grace", -1, "grace must be from 0"),
        ("concurrency", 0, "concurrency must be a whole number from 1"),
        ("concurrency", 1.5, "concurrency must be a whole number"),
        ("name", "", "a worker name must have 1 to 200 printable characters"),
        ("name", "a\nb", "a worker name must have"),
    ],
)
def test_an_option_of_a_worker_that_is_out_of_range_is_refused(
    idle: Holdfast[Any], option: str, value: Any, says: str
) -> None:
    idle.task(name="t")(lambda: None)
    with pytest.raises(OptionError, match=says):
        idle.worker(**{option: value})


async def test_a_worker_runs_once(app: Holdfast[Any]) -> None:
    app.task(name="t")(lambda: None)
    worker = app.worker(name="single")
    async with worker:
        pass
    with pytest.raises(OptionError, match=r"worker single was started already: make another with app\.worker\(\)"):
        await worker.run()


async def test_annotations_that_cannot_be_read_stop_a_worker_before_it_claims(app: Holdfast[Any]) -> None:
    class Local:
        pass

    @app.task(name="t")
    async def task(value: Local) -> None: ...  # Its name is not to be found from outside of this function.

    with pytest.raises(OptionError, match=r"the annotations of t cannot be read .*Local"):
        async with app.worker():
            pass


# Stubs, handlers, leases


async def test_stub_cannot_be_called_directly(app: Holdfast[Any]) -> None:
    @app.stub(name="far.away")
    def render(doc: str) -> str: ...

    with pytest.raises(HoldfastError, match=r"far\.away .*(enqueue|call)"):
        render("text")
    handle = await render.enqueue("text")
    assert handle.queue == "far.away"


def test_a_stub_needs_a_name(idle: Holdfast[Any]) -> None:
    with pytest.raises(OptionError, match="a stub has no name: pass name=… of the queue"):
        idle.stub()  # type: ignore[call-arg]


def test_current_job_is_refused_outside_handlers() -> None:
    with pytest.raises(HoldfastError, match=r"no job runs here: call current_job\(\) only inside a handler"):
        current_job()


def test_retry_with_two_times_is_refused() -> None:
    with pytest.raises(OptionError, match="delay and at of Retry are mutually exclusive"):
        Retry(delay=1, at=datetime.now(UTC))


@pytest.mark.storages("memory", "sqlite", "valkey")
async def test_a_payload_of_the_wrong_type_fails_at_once_and_says_what_does_not_fit(app: Holdfast[Any]) -> None:
    @app.task(name="t")
    async def task(n: int) -> None: ...

    async with app.worker():
        handle = await app.queue("t").enqueue({"n": "seven"})
        with pytest.raises(JobFailed, match=r"the payload does not fit t\(n: .int.\).*Expected `int`") as raised:
            await handle.result()
        assert (raised.value.kind, raised.value.attempts) == ("permanent", 1)


async def test_states_ids_and_ttls_of_the_wrong_kind_are_refused_by_a_queue(app: Holdfast[Any]) -> None:
    queue = app.queue("q")
    for use in (
        lambda: queue.get(5),  # type: ignore[arg-type]
        lambda: queue.cancel(None),  # type: ignore[arg-type]
        lambda: queue.retry(5),  # type: ignore[arg-type]
        lambda: queue.result(""),
        lambda: queue.keep("x" * 600, 5),
    ):
        with pytest.raises(OptionError, match="a job id must"):
            await use()
    with pytest.raises(OptionError, match="ttl must be"):
        await queue.keep("a", -1)
    with pytest.raises(OptionError, match="is not a state: use one of"):
        await queue.purge("failed")
    with pytest.raises(OptionError, match="reason must have at most 500 printable characters"):
        await queue.pause(reason="x" * 501)


def test_every_error_is_a_holdfast_error() -> None:
    import holdfast

    errors = [
        value
        for value in vars(holdfast).values()
        if isinstance(value, type) and issubclass(value, Exception) and value not in (Retry, holdfast.PermanentError)
    ]
    assert len(errors) >= 13
    assert all(issubclass(error, HoldfastError) for error in errors)


def test_newer_layout_of_a_server_is_refused_with_advice() -> None:
    with servers.Server("valkey") as server:
        app = Holdfast(server.url)
        app.sync.queue("q").enqueue(1)
        app.sync.close()
        keys = [key for key in _keys(server) if b"layout" in key]
        assert len(keys) == 1
        server.command("SET", keys[0], "999")
        with pytest.raises(LayoutTooNew, match=r"999.*upgrade"):
            Holdfast(server.url).sync.queue("q").get("a")


def _keys(server: servers.Server) -> list[bytes]:
    found = server.command("KEYS", "*")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("hook", ["middleware", "after_execution", "on_event", "on_error"])
def test_hook_that_is_not_a_function_is_refused_at_registration(hook: str) -> None:
    app = Holdfast("memory://")
    with pytest.raises(OptionError, match=f"{hook} takes a function, not 'seconds'.*@app.{hook}"):
        getattr(app, hook)("seconds")
