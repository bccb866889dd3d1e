"""`enqueue` and `call`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast import Holdfast, Lease
from holdfast._core.extension import BACKOFF, numbers_in
from holdfast._core.jobs import Job
from holdfast._core.options import from_at
from holdfast._core.retry_policy import expires_at
from tests.app.conftest import Place
from tests.cli.conftest import Result, Run, harmless, until

HOSTILE = "red \x1b[31m \x9b2J \u202e turned \x7f"


async def record(app: Holdfast[Any], queue: str, id: str) -> Job:
    (job,) = await app.storage.get(queue, [id])
    assert job is not None
    return job


async def take(app: Holdfast[Any], queue: str = "emails", **options: Any) -> Lease:
    lease = await app.queue(queue).lease(**{"wait": 0, **options})
    assert lease is not None
    return lease


# enqueue


async def test_every_option_of_enqueue_reaches_the_job(run: Run, app: Holdfast[Any]) -> None:
    words = ["enqueue", "emails", '{"to": "ada"}', "--id", "one", "--priority", "9", "--timeout", "2.5", "--json"]
    told = run(*words, "--delay", "3600", "--expires", "60", "--backoff", "5,1m")
    assert (told.status, told.err) == (0, "")
    job = await record(app, "emails", "one")
    assert told.json == {"placed": "new", "id": "one", "queue": "emails", "generation": job.generation}
    assert (job.work.payload, job.work.priority, job.work.timeout_ms) == (b'{"to":"ada"}', 9, 2500)
    assert from_at(job.run_at) - from_at(job.generation) == timedelta(hours=1)
    assert expires_at(job) == job.generation + 3_660_000_000
    assert numbers_in(job.work.extension, BACKOFF) == (5_000, 60_000)
    wrong = run("enqueue", "emails", "1", "--backoff", "5,soon")
    assert (wrong.status, "'soon' is not a length of time" in wrong.err) == (2, True)
    told = run("enqueue", "emails", "null", "--no-template", "--run-at", "2099-01-31T08:00:00+01:00")
    placed, id = told.out.split()
    assert (told.status, placed) == (0, "new")
    job = await record(app, "emails", id)
    assert (job.work.payload, job.work.priority) == (b"null", 5)
    assert from_at(job.run_at) == datetime(2099, 1, 31, 7, tzinfo=UTC)


async def test_on_conflict_decides_what_happens_to_an_existing_id(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await queue.enqueue(1, id="a")
    assert run("enqueue", "emails", "2", "--id", "a")[:2] == (0, "duplicate a\n")
    assert (await record(app, "emails", "a")).work.payload == b"1"
    assert run("enqueue", "emails", "3", "--id", "a", "--on-conflict", "raise").says_no(1, "already exists")
    assert run("enqueue", "emails", "4", "--id", "a", "--on-conflict", "update")[:2] == (0, "updated a\n")
    lease = await take(app)
    assert lease.payload == 4
    assert run("enqueue", "emails", "5", "--id", "a", "--on-conflict", "update")[:2] == (0, "deferred a\n")
    assert await lease.complete("done")
    assert await (await take(app)).complete("all done")
    assert run("enqueue", "emails", "6", "--id", "a", "--on-conflict", "keep")[:2] == (0, "completed a\n")
    assert run("call", "emails", "6", "--id", "a")[:2] == (0, '"all done"\n')


@pytest.mark.storages("sqlite")
async def test_payload_is_json_text_or_bytes_from_arguments_or_stdin(run: Run, app: Holdfast[Any]) -> None:
    async def taken() -> object:
        lease = await take(app)
        assert await lease.complete()
        return lease.payload

    inputs: list[tuple[list[str], str | bytes | None, object]] = [
        (["-"], '{"a": [1, "ż"]}\n', {"a": [1, "ż"]}),
        (["-", "--text"], "one\ntwo\n", "one\ntwo"),
        (["-", "--raw"], b"\x89PNG\r\n\x00\xff\n", b"\x89PNG\r\n\x00\xff\n"),
        (["--", "-5"], None, -5),
    ]
    for words, stdin, payload in inputs:
        told = run("enqueue", "emails", "--no-template", *words, stdin=stdin)
        assert told.status == 0, told
        assert await taken() == payload


@pytest.mark.storages("sqlite")
async def test_mistake_prints_one_line_exits_with_2_and_stores_nothing(run: Run, app: Holdfast[Any]) -> None:
    ask = ["enqueue", "emails", "--no-template"]
    mistakes: list[tuple[list[str | bytes], str]] = [
        ([*ask, "{to: ada}"], "the payload is not JSON"),
        ([*ask, b'"\xff"'], "the payload is not JSON"),
        (["enqueue", "no such/queue", "1"], "queue name"),
        ([*ask, "1", "--id", ""], "a job id must have"),
        ([*ask, "1", "--delay", "1", "--run-at", "2099-01-01T00:00:00Z"], "mutually exclusive"),
        (["complete", "no-token"], "is not a lease token"),
    ]
    for told, (words, part) in zip(run.each(*(words for words, _ in mistakes)), mistakes, strict=True):
        assert told.says_no(2, part), words
        assert harmless(told.err)
    large = run(*ask, "-", "--raw", stdin=b"x" * 1_048_577)
    assert large.says_no(2, "at most 1048576 are allowed")
    assert run("enqueue", "emails", "-", stdin="[" * 100_000).says_no(2, "JSON")
    assert (await app.queue("emails").stats()).ready == 0


@pytest.mark.storages("sqlite")
async def test_an_option_that_is_wrong_is_named_with_status_2(run: Run, app: Holdfast[Any]) -> None:
    ask = ["enqueue", "emails", "1", "--no-template"]
    mistakes: list[tuple[list[str], str]] = [
        ([*ask, "--priority", "10"], "--priority"),
        ([*ask, "--delay", "1e12"], "--delay"),
        ([*ask, "--run-at", "tomorrow"], "2027-01-31T08:00:00+01:00"),
        ([*ask, "--run-at", "2099-01-01T00:00:00"], "time zone"),
        ([*ask, "--text", "--raw"], "--text and --raw"),
        (["lease", "emails", "--seconds", "nan"], "--seconds"),
        (["fail", "token", "message", "--delay", "1"], "need --retry"),
    ]
    for told, (words, part) in zip(run.each(*(words for words, _ in mistakes)), mistakes, strict=True):
        assert (told.status, told.out) == (2, ""), words
        assert part in told.err
        assert "Traceback" not in told.err


@pytest.mark.storages("sqlite")
async def test_stdin_that_is_not_valid_text_is_refused(run: Run, app: Holdfast[Any]) -> None:
    assert run("enqueue", "emails", "-", "--text", stdin=b"caf\xe9").says_no(2, "--raw")
    assert (await app.queue("emails").stats()).ready == 0


# call


async def test_call_command_prints_the_result_or_the_reason_for_none(run: Run, place: Place) -> None:
    app = place.app()
    blocked = asyncio.Event()

    @app.task(name="add", result_ttl=0)
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task(name="give")
    async def give(what: str) -> object:
        return bytes.fromhex(what)

    @app.task(name="raise", max_retries=0)
    async def fail() -> None:
        raise ValueError(f"no such user {HOSTILE}")

    @app.task(name="wait")
    async def wait() -> str:
        await blocked.wait()
        return "done"

    def call(*words: str) -> Any:
        return asyncio.to_thread(run, "call", *words)

    async with app, app.worker():
        added, text, given, failed, late = await asyncio.gather(
            call("add", '{"a": 1, "b": 2}'),
            call("give", '{"what": "c5bc"}'),
            call("give", '{"what": "ff00"}'),
            call("raise", "{}"),
            call("wait", "{}", "--id", "late", "--wait", "0.2"),
        )
        assert added == (0, "3\n", "")
        assert (text.status, text.json) == (0, "xbw=")
        assert (given.status, given.json) == (0, "/wA=")
        assert failed.says_no(1, "ValueError: no such user")
        assert harmless(failed.err)
        assert late.says_no(4, "late")
        waiting = asyncio.create_task(asyncio.to_thread(run, "result", "wait", "late"))
        blocked.set()
        assert await waiting == (0, '"done"\n', "")
        await app.queue("wait").pause()
        cancelled = asyncio.create_task(call("wait", "{}", "--id", "never"))
        await until(lambda: app.queue("wait").cancel("never"))
        assert (await cancelled).says_no(1, "was cancelled")


# The ids of tasks


SHOP = """\
from holdfast import Holdfast, content_id

app = Holdfast()


@app.task(name="sync", singleton="user:{user}")
async def sync(user: int, full: bool = False) -> int:
    return user


@app.task(name="mail", unique=content_id)
async def mail(to: str) -> str:
    return to


@app.task(name="plain")
async def plain(number: int) -> int:
    return number
"""


def in_order(run: Run, *commands: list[str]) -> list[Result]:
    return [run(*words) for words in commands]


async def test_ids_of_tasks_are_those_that_a_worker_has_stored(run: Run, place: Place, app: Holdfast[Any]) -> None:
    worker = place.app()

    @worker.task(name="sync", singleton="user:{user}")
    async def sync(user: int, full: bool = False) -> int:
        return user

    @worker.task(name="mail", unique=lambda to: to)
    async def mail(to: str) -> str:
        return to

    @worker.task(name="plain")
    async def plain(number: int) -> int:
        return number

    async with worker, worker.worker(lease=1):
        await until(lambda: _is_described(app, "plain"))
    for queue in ("sync", "mail", "plain"):
        await app.queue(queue).pause()
    first, again, other, full, made, chosen, plain_one, plain_two, wrong = in_order(
        run,
        ["enqueue", "sync", '{"user": 7}'],
        ["enqueue", "sync", '{"user": 7, "full": true}'],
        ["enqueue", "sync", '{"user": 8}', "--on-conflict", "raise"],
        ["enqueue", "sync", '{"user": 7}', "--no-template"],
        ["enqueue", "mail", '{"to": "ada"}'],
        ["enqueue", "mail", '{"to": "ada"}', "--id", "ada"],
        ["enqueue", "plain", '{"number": 1}'],
        ["enqueue", "plain", '{"number": 1}'],
        ["enqueue", "sync", "{}"],
    )
    assert (first.out, again.out) == ("new user:7\n", "updated user:7\n")
    assert (await record(app, "sync", "user:7")).work.payload == b'{"user":7,"full":true}'
    assert other.out == "new user:8\n"
    assert full.out.startswith("new ")
    assert "user:7" not in full.out
    assert made.says_no(2, "a function in the code makes the unique ids of mail: pass --app MODULE:APP, or --id")
    assert chosen.out == "new ada\n"
    assert plain_one.out != plain_two.out
    assert wrong.says_no(2, "has no 'user'")


async def _is_described(app: Holdfast[Any], queue: str) -> bool:
    return (await app.storage.read_notes([f"task:{queue}"]))[0] is not None


async def test_ids_of_tasks_are_those_of_the_app_that_a_command_names(run: Run, app: Holdfast[Any]) -> None:
    (run.folder / "shop.py").write_text(SHOP)
    (run.folder / "pyproject.toml").write_text('[tool.holdfast]\napp = "shop:app"\n')
    mailed, same, synced, wrong, by_project = in_order(
        run,
        ["enqueue", "mail", '{"to": "ada"}', "--app", "shop:app"],
        ["enqueue", "mail", '{"to": "ada"}', "--app", "shop:app"],
        ["enqueue", "sync", '{"user": 7}', "--app", "shop:app"],
        ["enqueue", "sync", '{"user": "Ada"}', "--app", "shop:app"],
        ["enqueue", "sync", '{"user": 9}'],
    )
    assert (mailed.out.split()[0], same.out) == ("new", mailed.out.replace("new", "duplicate"))
    assert (synced.out, by_project.out) == ("new user:7\n", "new user:9\n")
    assert wrong.says_no(2, "the payload does not fit sync")


async def test_queue_that_no_worker_has_served_is_refused_without_an_id(run: Run, app: Holdfast[Any]) -> None:
    refusal = "no worker has served emails, so it is not known whether its task has unique or singleton ids"
    assert run("enqueue", "emails", "1").says_no(2, refusal)
    assert run("call", "emails", "1", "--wait", "0").says_no(2, refusal)
    assert run("enqueue", "emails", "1", "--no-template").status == 0
    assert run("enqueue", "emails", "1").says_no(2, refusal)
    assert await (await take(app)).complete()  # It is a queue for leases.
    assert run("enqueue", "emails", "1").status == 0
