"""`status`, `jobs`, `show`, `explain`, `events`; and what holds for every command: where it looks, what it never shows,
how it ends."""

from __future__ import annotations

import asyncio
import fcntl
import inspect
import json
import os
import pty
import re
import socket
import struct
import subprocess
import termios
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Lease
from holdfast._core.jobs import Request, Work
from holdfast.cli.inspect import jobs as jobs_command
from tests.app.conftest import Place
from tests.app.test_damaged_queue import damage
from tests.cli.conftest import PROGRAM, Result, Run, harmless, until

HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\u202ed\re\x7ff\u2028g"
"""Clears the screen, names the window, turns red (in C1), turns the line around, goes back to its beginning."""
SECRET = "hunter2"


async def take(app: Holdfast[Any], queue: str = "emails", **options: Any) -> Lease:
    lease = await app.queue(queue).lease(**{"wait": 0, **options})
    assert lease is not None
    return lease


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


async def in_a_thread(run: Run, *words: str, **options: Any) -> Result:
    """Run a command while the test's own loop goes on."""
    return await asyncio.to_thread(run, *words, **options)


# status


async def test_status_shows_queues_and_workers_in_numbers(run: Run, app: Holdfast[Any], place: Place) -> None:
    queue = app.queue("emails")
    for number in range(5):
        await queue.enqueue(number)
    await queue.enqueue(None, delay=3600)
    await (await take(app)).fail("no")
    await (await take(app)).retry(delay=3600)
    await take(app)
    await app.queue("letters").pause(reason="no stamps")
    worker = place.app()

    @worker.task(name="letters")
    async def letters() -> None: ...

    async with worker, worker.worker(name="postman"):
        await until(lambda: _has_workers(app, "letters"))
        shown, told = await asyncio.gather(
            in_a_thread(run, "status"), in_a_thread(run, "status", "emails", "--json"), return_exceptions=False
        )
    assert (shown.status, shown.err) == (0, "")
    head, emails, letters_row, *_ = shown.lines
    names = ["queue", "ready", "scheduled", "running", "retrying", "failed", "oldest", "workers"]
    assert cells(head)[:8] == names
    assert cells(emails)[:6] == ["emails", "2", "2", "1", "1", "1"]
    assert cells(letters_row) == ["letters", "0", "0", "0", "0", "0", "-", "1", "paused: no stamps"]
    assert any(cells(line)[0] == "postman" for line in shown.lines if line)
    (stats,) = told.json["queues"]
    assert (stats["queue"], stats["ready"], stats["failed"], stats["totals"]["enqueued"]) == ("emails", 2, 1, 6)
    assert [each["worker"] for each in told.json["workers"]] == ["postman"]
    assert run("status", "no.such.queue").says_no(1, "no.such.queue")


async def _has_workers(app: Holdfast[Any], queue: str) -> bool:
    return bool((await app.queue(queue).stats()).workers)


async def test_status_takes_patterns_and_leaves_out_empty_queues(run: Run, app: Holdfast[Any]) -> None:
    for name in ("pages.new", "pages.old", "emails"):
        await app.queue(name).enqueue(None, id="a")
    await app.queue("emails").purge()
    some, every, whole, named, none = run.each(
        ["status", "pages.*"], ["status"], ["status", "--all"], ["status", "emails"], ["status", "letters.*"]
    )
    assert [cells(line)[0] for line in some.lines[1:3]] == ["pages.new", "pages.old"]
    assert "emails" not in some.out + every.out
    assert "1 empty queue without a worker not shown: pass --all" in every.out
    assert "emails" in whole.out
    assert "not shown" not in whole.out + some.out
    assert cells(named.lines[1])[0] == "emails"
    assert none.says_no(1, "letters.*")


async def test_id_without_its_escapes_is_found_if_it_is_the_only_one(run: Run, app: Holdfast[Any]) -> None:
    page = app.task(name="page", unique="page:{url}")(lambda url: None)
    await page.enqueue("http://a/b?c")
    assert page.id_for("http://a/b?c") == "page:http%3A%2F%2Fa%2Fb%3Fc"
    for told in run.each(
        ["show", "page", "page:http://a/b?c"],
        ["explain", "page", "page:http://a/b?c"],
        ["cancel", "page", "page:http://a/b?c"],
    ):
        assert (told.status, told.err) == (0, ""), told
    assert "cancelled" in run("show", "page", "page:http://a/b?c").out
    assert "page:http%3A%2F%2Fa%2Fb%3Fc" in run("retry", "page", "page:http://a/b?c").out
    await app.queue("page").enqueue(None, id="page:http://a%2Fb?c")
    ambiguous = run("show", "page", "page:http://a/b?c")
    assert ambiguous.says_no(1, "`holdfast jobs page` lists the ids")


@pytest.mark.storages("sqlite")
async def test_id_that_is_not_utf_8_is_looked_for(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("q").enqueue(None, id=b"\xfe")
    assert run("show", "q", b"\xfe").status == 0
    commands: list[list[str | bytes]] = [[command, "q"] for command in ("show", "explain", "stack", "retry", "result")]
    commands += [["prioritize", "q", "5"], ["keep", "q", "--ttl", "1h"], ["cancel", "q"]]
    for told in run.each(*([*command, b"\xff"] for command in commands)):
        assert (told.status, "\\udcff" in told.out + told.err, "Traceback" in told.err) == (1, True, False), told


async def test_rates_are_differences_of_totals(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await app.enqueue_many(queue.bind(number) for number in range(100))
    watch = run.start("status", "--watch", "--every", "1.5", "--times", "2")
    assert "enqueued/s" not in await watch.line()
    await app.enqueue_many(queue.bind(number) for number in range(50))
    await (await take(app)).complete()
    told = await watch.end()
    assert (told.status, told.err) == (0, "")
    assert "\x1b" not in told.out
    at = next(number for number, line in enumerate(told.lines) if "enqueued/s" in line)
    rates = dict(zip(cells(told.lines[at]), cells(told.lines[at + 1]), strict=True))
    assert rates["ready"] == "149"
    assert 0 < float(rates["enqueued/s"]) <= 50
    assert 0 < float(rates["completed/s"]) <= 1
    assert float(rates["enqueued/s"]) / float(rates["completed/s"]) == pytest.approx(50, rel=0.6)
    assert (rates["failed/s"], rates["retried/s"]) == ("0.0", "0.0")


@pytest.mark.storages("sqlite")
async def test_watch_on_a_terminal_redraws_until_it_is_interrupted(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    os.set_blocking(terminal, False)
    seen = ""

    def sees(part: str, times: int = 1) -> bool:
        nonlocal seen
        try:
            seen += os.read(terminal, 65_536).decode()
        except (BlockingIOError, OSError):
            pass  # Nothing new; or, once all have closed it, nothing more.
        return seen.count(part) >= times

    try:
        watch = run.start(
            "status", "--watch", "--every", "0.2", stdin=end, stdout=end, stderr=end, env={"TERM": "xterm"}
        )
        os.close(end)
        await until(lambda: sees("emails"), 20)
        await app.queue("letters").enqueue(None)
        await until(lambda: sees("letters"), 20)
        assert sees("\x1b[2J", 2)
        assert sees("enqueued/s")
        watch.interrupt()
        await until(lambda: watch.process.poll() is not None or sees("\0"), 20)
        sees("\0")
        assert watch.process.returncode == 130
        assert "Traceback" not in seen
        assert "Aborted" not in seen
    finally:
        os.close(terminal)


@pytest.mark.storages("sqlite")
async def test_watch_with_json_prints_one_object_per_line(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None)
    told = run("status", "--watch", "--every", "0.1", "--times", "3", "--json")
    objects = [json.loads(line) for line in told.lines]
    assert [each["queues"][0]["queue"] for each in objects] == ["emails"] * 3
    assert len({each["now"] for each in objects}) == 3


# jobs, show


async def test_jobs_are_listed_by_state_up_to_the_limit(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    for number in range(4):
        await queue.enqueue({"secret": "payload"}, id=f"job-{number}")
    await (await take(app)).fail("no such user")
    lease = await take(app)
    all_of_them, failed, two, none = run.each(
        ["jobs", "emails"],
        ["jobs", "emails", "--state", "failed", "--json"],
        ["jobs", "emails", "--state", "waiting", "--limit", "1"],
        ["jobs", "emails", "--state", "cancelled"],
    )
    states = {cells(line)[0]: cells(line)[1] for line in all_of_them.lines[1:5]}
    assert states == {"job-0": "failed", "job-1": "running", "job-2": "waiting", "job-3": "waiting"}
    running = next(line for line in all_of_them.lines if line.startswith("job-1"))
    assert cells(running)[-1] == f"pull-{running.rpartition('pull-')[2]}"
    assert (failed.json["id"], failed.json["error"]["message"]) == ("job-0", "no such user")
    assert "payload" not in failed.json
    assert (cells(two.lines[1])[0], len(two.lines)) == ("job-2", 3)
    assert "more" in two.lines[2]
    assert (none.status, none.out) == (0, "no cancelled jobs in emails\n")
    assert all("secret" not in each.out for each in (all_of_them, failed, two))
    assert await lease.release()


async def test_jobs_of_all_queues_or_of_a_pattern_have_their_queue(run: Run, app: Holdfast[Any]) -> None:
    for name in ("pages.a", "pages.b", "other"):
        await app.queue(name).enqueue(None, id=f"failed-{name}")
        lease = await app.queue(name).lease(wait=0)
        assert lease is not None
        await lease.fail("no")
        await app.queue(name).enqueue(None)
    failed, pages, limited, as_json, none, unknown = run.each(
        ["jobs", "--state", "failed"],
        ["jobs", "pages.*", "--state", "failed"],
        ["jobs", "--limit", "5"],
        ["jobs", "pages.*", "other", "--state", "failed", "--json"],
        ["jobs", "--state", "running"],
        ["jobs", "nothing.*"],
    )
    assert [cells(line)[:2] for line in failed.lines[1:]] == [
        [name, f"failed-{name}"] for name in ("other", "pages.a", "pages.b")
    ]
    assert [cells(line)[0] for line in pages.lines] == ["queue", "pages.a", "pages.b"]
    assert (len(limited.lines), limited.lines[-1].startswith("… more jobs exist: use --limit 10, or")) == (7, True)
    assert [json.loads(line)["queue"] for line in as_json.lines] == ["other", "pages.a", "pages.b"]
    assert (none.status, none.out) == (0, "no running jobs in any queue\n")
    assert unknown.says_no(1, "no queue matches 'nothing.*'")


async def test_jobs_of_a_queue_that_cannot_be_read_are_an_error(run: Run, app: Holdfast[Any], place: Place) -> None:
    await app.queue("q").enqueue(None, id="a")
    damage(place, "q")
    for told in run.each(["jobs"], ["jobs", "*", "--state", "failed"], ["jobs", "q"]):
        assert told.says_no(3, "the metadata of queue 'q' cannot be read: run `holdfast repair q`")
    await app.queue("q").repair()


@pytest.mark.storages("sqlite")
async def test_jobs_of_one_state_read_only_the_queues_that_have_some(
    app: Holdfast[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        await app.queue(f"busy-{number}").enqueue(None)
    scanned: list[str] = []
    scan = app.storage.scan

    async def counted(queue: str, **options: Any) -> Any:
        scanned.append(queue)
        return await scan(queue, **options)

    monkeypatch.setattr(app.storage, "scan", counted)
    assert jobs_command.callback is not None
    jobs: Any = inspect.unwrap(jobs_command.callback)
    listed = {"running": False, "older": None, "as_json": False}
    await jobs(app, (), state="failed", limit=50, **listed)
    assert scanned == []
    await jobs(app, (), state="waiting", limit=1, **listed)
    assert scanned == ["busy-0", "busy-1"]
    assert "more jobs exist" in capsys.readouterr().out


@pytest.mark.storages("sqlite")
async def test_deep_payload_of_another_language_is_shown(run: Run, app: Holdfast[Any]) -> None:
    deep = Request("deep", Work(b"[" * 700 + b"]" * 700), custom_id=True)
    await app.storage.enqueue("emails", [deep])
    for told in run.each(["show", "emails", "deep", "--payload"], ["show", "emails", "deep", "--payload", "--json"]):
        assert (told.status, told.err) == (0, "")
        assert "[[[[" in told.out


async def test_a_payload_is_shown_only_if_asked_for(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await queue.enqueue({"card": "4711"}, id="one")
    await (await take(app)).retry(error="try later", delay=0)
    lease = await take(app)
    await lease.extend(progress={"percent": 40})
    await queue.enqueue({"card": "4712"}, id="two")
    await (await take(app)).complete({"paid": "4713"})
    plain, as_json, whole, whole_json, done, done_whole = run.each(
        ["show", "emails", "one"],
        ["show", "emails", "one", "--json"],
        ["show", "emails", "one", "--payload"],
        ["show", "emails", "one", "--payload", "--json"],
        ["show", "emails", "two", "--json"],
        ["show", "emails", "two", "--payload", "--json"],
    )
    assert not any("471" in each.out for each in (plain, as_json, done))
    fields = dict(line.split(maxsplit=1) for line in plain.lines)
    assert (fields["state"], fields["attempts"], fields["retries"]) == ("running", "2", "1")
    assert (fields["progress"], fields["error"]) == ('{"percent":40}', "Retry: try later (retriable)")
    assert as_json.json["progress"] == {"percent": 40}
    assert '{"card":"4711"}' in whole.out
    assert whole_json.json["payload"] == {"card": "4711"}
    assert done_whole.json["result"] == {"paid": "4713"}
    assert run("show", "emails", "three").says_no(1, "there is no job 'three' in emails")
    assert await lease.complete()


# explain


async def test_explain_says_why_a_job_is_not_running(run: Run, app: Holdfast[Any]) -> None:
    emails, letters = app.queue("emails"), app.queue("letters")
    await letters.enqueue(None, id="failed")
    await (await take(app, "letters")).fail("no such user")
    await letters.enqueue(None, id="done")
    await (await take(app, "letters")).complete()
    await letters.enqueue(None, id="cancelled")
    await letters.cancel("cancelled")
    await letters.enqueue(None, id="backing off")
    await (await take(app, "letters")).retry(delay=3600, error="no answer")
    await letters.enqueue(None, id="later", delay=7200)
    await letters.enqueue(None, id="deferring")
    held = await take(app, "letters")
    await letters.enqueue("newer", id="deferring", on_conflict="update")
    for number in range(3):
        await emails.enqueue(None, id=f"ready-{number}")
    await emails.enqueue(None, id="urgent", priority=9)
    await emails.enqueue(None, id="not due", priority=9, delay=60)
    await emails.pause(reason="no stamps")
    record = (await app.storage.get("letters", ["deferring"]))[0]
    assert record is not None
    ids = ["failed", "done", "cancelled", "backing off", "later", "deferring", "no such job"]
    asked = [["explain", "letters", id, "--json"] for id in ids]
    asked += [["explain", "emails", id, "--json"] for id in ("ready-2", "urgent")]
    told = {each.json["id"]: each for each in run.each(*asked)}

    def reasons(id: str) -> str:
        assert told[id].status == (1 if id == "no such job" else 0), told[id]
        return "; ".join(told[id].json["reasons"])

    assert "it has failed, after 1 run, with Failed: no such user (permanent)" in reasons("failed")
    assert reasons("done").startswith("it has completed, after 1 run; it is remembered until")
    assert reasons("cancelled").startswith("it was cancelled")
    backoff = r"its backoff until .* UTC \(in 60 min\), after Retry: no answer \(retriable\); .*; .* retried once"
    assert re.search(backoff, reasons("backing off"))
    assert re.match(r"it is scheduled for \d{4}-.* UTC \(in 1\d\d min\)", reasons("later"))
    assert "no live worker serves this queue" in reasons("later")
    assert re.match(
        f"it runs on worker {record.worker} since .*, attempt 1; its lease lasts until", reasons("deferring")
    )
    assert "a newer request is deferred until this run ends" in reasons("deferring")
    assert "the queue is paused: no stamps; no live worker serves this queue; 3 jobs in front" in reasons("ready-2")
    assert "in front" not in reasons("urgent")
    assert (told["no such job"].json["state"], told["later"].json["state"]) == (None, "waiting")
    shown = run("explain", "letters", "no such job")
    assert (shown.status, shown.lines[0], shown.err) == (1, "no such job of letters: not found", "")
    assert await held.complete()


async def test_explain_reports_a_worker_without_free_capacity(run: Run, place: Place, app: Holdfast[Any]) -> None:
    worker = place.app()
    go = asyncio.Event()

    @worker.task(name="emails")
    async def emails() -> None:
        await go.wait()

    async with worker, worker.worker(name="postman", concurrency=1):
        for number in range(3):
            await app.queue("emails").enqueue({}, id=f"job-{number}")
        await until(lambda: _is_running(app, "job-0"))
        first, second, third = await asyncio.gather(
            *(in_a_thread(run, "explain", "emails", f"job-{number}") for number in range(3))
        )
        go.set()
    assert first.lines[0] == "job-0 of emails: running"
    where = rf"  - it runs on worker postman on host {re.escape(socket.gethostname())} since .* ago\), attempt 1"
    assert re.fullmatch(where, first.lines[1])
    assert second.lines[:2] == [
        "job-1 of emails: waiting",
        "  - it is ready: the next worker with free capacity claims it",
    ]
    assert third.lines[:2] == ["job-2 of emails: waiting", "  - 1 job in front of it"]


async def _is_running(app: Holdfast[Any], id: str) -> bool:
    info = await app.queue("emails").get(id)
    return info is not None and info.state == "running"


async def test_long_runs_are_listed_by_the_time_of_their_start(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    for number in range(3):
        await queue.enqueue(None, id=f"job-{number}")
    await (await take(app)).complete("sent")
    held = await take(app)
    await asyncio.sleep(1.1)
    young, all_of_them, old, both, wrong = run.each(
        ["jobs", "emails", "--older", "1h"],
        ["jobs", "emails"],
        ["jobs", "emails", "--running", "--older", "1s", "--json"],
        ["jobs", "emails", "--state", "failed", "--older", "1s"],
        ["jobs", "emails", "--older", "soon"],
    )
    assert young.out == "no running jobs in emails\n"
    took = {cells(line)[0]: line for line in all_of_them.lines[1:]}
    assert re.search(r" \d\.\d s  +pull-", took["job-0"])
    assert re.search(r" \d\.\d s so far  pull-", took["job-1"])
    assert (old.json["id"], old.json["finished_at"]) == ("job-1", None)
    assert (both.status, wrong.status) == (2, 2)
    assert "not a length of time" in wrong.err
    assert await held.complete()


# stack


async def test_stack_of_a_running_job_is_printed(run: Run, place: Place, app: Holdfast[Any]) -> None:
    worker = place.app()
    go = threading.Event()

    @worker.task(name="emails")
    async def emails() -> None:
        while not go.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @worker.task(name="letters")
    def letters() -> None:
        go.wait(20)

    async with worker, worker.worker(name="postman", lease=2):
        await app.queue("emails").enqueue({}, id="a")
        await app.queue("letters").enqueue({}, id="b")
        await until(lambda: _is_running(app, "a"))
        first = await in_a_thread(run, "stack", "emails", "a")
        second = await in_a_thread(run, "stack", "letters", "b")
        shown = await in_a_thread(run, "show", "emails", "a", "--json")
        go.set()
    assert shown.json["host"] == socket.gethostname()
    assert first.lines[0] == "a of emails on postman, most recent call last:"
    assert "in emails" in first.out
    assert "in letters" in second.out
    assert "holdfast/_worker/handler.py" not in first.out + second.out


async def test_job_without_a_stack_says_why(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    for id in ("by hand", "lost", "waiting"):
        await queue.enqueue(None, id=id)
    held = await take(app)
    await app.storage.claim("emails", 1, worker="gone", lease_ms=60_000)
    none, waiting, by_hand, lost = run.each(
        ["stack", "emails", "none"],
        ["stack", "emails", "waiting"],
        ["stack", "emails", "by hand"],
        ["stack", "emails", "lost"],
    )
    assert none.says_no(1, "there is no job 'none' in emails")
    assert waiting.says_no(1, "is waiting: only a running job has a stack")
    assert by_hand.says_no(1, "it was leased by hand, not by a worker")
    assert lost.says_no(1, "its worker gone sends no heartbeats")
    await app.storage.announce("gone", {"queues": ["emails"]}, ttl_ms=60_000)
    silent = run("stack", "emails", "lost", "--wait", "0.5")
    assert silent.says_no(4, "worker gone did not answer within 0.5 s")
    assert await held.complete()


# events


async def test_events_are_printed_as_they_happen(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await queue.enqueue(None, id="first")
    listening = run.start("events")
    heard = asyncio.create_task(listening.line())

    async def is_heard() -> bool:
        await queue.enqueue(None, id="first", on_conflict="update")
        return heard.done()

    await until(is_heard, 20)  # It says nothing when it begins to listen.
    assert (await heard).split() == ["updated", "emails", "first"]
    await queue.enqueue(None, id=HOSTILE, priority=9)
    await (await take(app)).complete()
    lines = [await listening.line()]
    while not lines[-1].startswith("completed"):
        lines.append(await listening.line())
    kinds = [line.split()[0] for line in lines if "first" not in line]
    assert kinds == ["enqueued", "claimed", "completed"]
    assert all(harmless(line) for line in lines)
    listening.interrupt()
    told = await listening.end()
    assert (told.status, told.err.strip()) == (130, "")


@pytest.mark.storages("sqlite")
async def test_events_stop_at_the_limit_and_print_json(run: Run, app: Holdfast[Any]) -> None:
    assert run("events").says_no(1)
    listening = run.start("events", "emails", "--times", "1", "--json")

    async def has_ended() -> bool:
        await app.queue("emails").enqueue(None)
        return listening.process.poll() is not None

    await until(has_ended, 20)
    told = await listening.end()
    assert (told.status, told.json["event"], told.json["queue"], told.err) == (0, "enqueued", "emails", "")


# What holds for every command


@pytest.mark.storages("sqlite")
async def test_stored_text_cannot_move_the_terminal_cursor(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await queue.enqueue({HOSTILE: HOSTILE}, id=HOSTILE)
    lease = await take(app, seconds=60)
    await lease.extend(progress=HOSTILE)
    await queue.enqueue(HOSTILE, id="given")
    await queue.enqueue(HOSTILE, id="failed", priority=9)
    await (await take(app)).fail(ValueError(HOSTILE))
    told = run.each(
        ["jobs", "emails"],
        ["jobs", "emails", "--json"],
        ["show", "emails", HOSTILE, "--payload"],
        ["show", "emails", HOSTILE, "--payload", "--json"],
        ["show", "emails", "failed", "--payload"],
        ["explain", "emails", HOSTILE],
        ["explain", "emails", "failed"],
        ["explain", "emails", "failed", "--json"],
        ["lease", "emails", "--wait", "0"],
        ["pause", "emails", "--reason", HOSTILE],
        ["show", "emails", HOSTILE * 2],
        ["call", "emails", "1", "--id", "failed", "--wait", "0"],
        [HOSTILE],
    )
    for each in told:
        assert harmless(each.out), each
        assert harmless(each.err), each
        assert "Traceback" not in each.err
    assert told[3].json["payload"] == {HOSTILE: HOSTILE}
    assert told[8].json["payload"] == HOSTILE
    assert told[1].lines
    assert await lease.complete()


@pytest.mark.storages("sqlite")
async def test_characters_that_the_terminal_cannot_encode_are_escaped(run: Run, app: Holdfast[Any]) -> None:
    told = run("enqueue", "emails", "1", "--id", "żółć", env={"PYTHONIOENCODING": "latin-1"})
    assert (told.status, told.err) == (0, "")
    assert told.out.startswith("new \\u017c")


@pytest.mark.storages("valkey")
async def test_a_password_is_never_shown(run: Run, place: Place, app: Holdfast[Any]) -> None:
    """A server without passwords takes any."""
    await app.queue("emails").enqueue(None, id="one")
    there = place.url.replace("://", f"://default:{SECRET}@")
    wrong = f"user:{SECRET}@127.0.0.1"
    told = run.each(
        ["status", "--url", there],
        ["explain", "emails", "one", "--url", there],
        ["status", "no.such.queue", "--url", there],
        ["doctor", "--url", there],
        ["status", "--url", f"redis://{wrong}:1/0?timeout=0.5"],
        ["status", "--url", f"redis://{wrong}:port"],
        ["status", "--url", f"nosuch://{wrong}"],
        ["status", "--url", f"redis://127.0.0.1:1/0?pwd={SECRET}"],
        ["status", "--url", f"sqlite://{wrong}/jobs.db"],
        ["status", "--url", f"redis://127.0.0.1:1/0?password={SECRET}&timeout=0.5"],
    )
    assert [each.status for each in told] == [0, 0, 1, told[3].status, 3, 2, 2, 2, 2, 3]
    for each in told:
        assert SECRET not in each.out + each.err
        assert "Traceback" not in each.err


@pytest.mark.storages("sqlite")
async def test_missing_storage_prints_one_line_and_exits_with_3(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database " * 100)
    told = run.each(
        ["status", "--url", "redis://127.0.0.1:1/0?timeout=0.5"],
        ["enqueue", "emails", "1", "--url", "sqlite:////no/such/folder/jobs.db"],
        ["status", "--url", f"sqlite:///{tmp_path}/text.db"],
    )
    for each in told:
        assert each.says_no(3)


@pytest.mark.storages("sqlite")
async def test_option_overrides_environment_and_environment_overrides_project(run: Run, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    settings = f'[tool.holdfast]\nurl = "sqlite:///{tmp_path}/project.db"\nnamespace = "one"\n'
    (project / "pyproject.toml").write_text(settings)
    bare: dict[str, str | None] = {"HOLDFAST_URL": None, "HOLDFAST_NAMESPACE": None}
    given: dict[str, str | None] = {"HOLDFAST_URL": f"sqlite:///{tmp_path}/given.db"}
    here = project / "src"
    assert run("enqueue", "by-project", "1", "--no-template", cwd=here, env=bare).status == 0
    assert run("enqueue", "by-environment", "1", "--no-template", cwd=here, env=bare | given).status == 0
    line = ["--url", f"sqlite:///{tmp_path}/line.db", "--namespace", "two"]
    assert run("enqueue", "by-line", "1", "--no-template", *line, cwd=here, env=bare | given).status == 0
    assert run("enqueue", "by-default", "1", "--no-template", env=bare).status == 0
    for file, namespace, queue in [
        (tmp_path / "project.db", "one", "by-project"),
        (tmp_path / "given.db", "one", "by-environment"),
        (tmp_path / "line.db", "two", "by-line"),
        (run.folder / "holdfast.db", "hf", "by-default"),
    ]:
        assert file.exists()
        async with Holdfast(f"sqlite:///{file}", namespace=namespace) as app:
            assert [stats.queue for stats in (await app.stats()).queues] == [queue]


@pytest.mark.storages("sqlite")
async def test_broken_settings_file_is_named_as_a_mistake(run: Run, tmp_path: Path) -> None:
    broken: list[tuple[bytes, str]] = [
        (b"[tool.holdfast\n", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b'[tool.holdfast]\nredis = "x"\n', "unknown names in [tool.holdfast]: redis"),
        (f'[tool.holdfast]\nurl = ["redis://u:{SECRET}@h"]\n'.encode(), "url must be text"),
        (b'tool = "x"\n', "must be a table"),
        (b"[tool]\nholdfast = 3\n", "must be a table"),
        (b'[tool.holdfast]\nurl = "nosuch://x"\n', "has an unknown scheme"),
    ]
    bare: dict[str, str | None] = {"HOLDFAST_URL": None, "HOLDFAST_NAMESPACE": None}
    for number, (text, part) in enumerate(broken):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "pyproject.toml").write_bytes(text)
        told = await in_a_thread(run, "status", cwd=folder, env=bare)
        assert told.says_no(2, part)
        assert "pyproject.toml" in told.err
        assert SECRET not in told.err
        assert [file.name for file in folder.iterdir()] == ["pyproject.toml"]
    variable, empty, memory = (
        run("status", url="nosuch://x"),
        run("status", "--url", ""),
        run("status", url="memory://"),
    )
    assert variable.says_no(2, "HOLDFAST_URL")
    assert empty.says_no(2, "--url is empty")
    assert memory.says_no(2, "memory://")


@pytest.mark.storages("sqlite")
async def test_reading_commands_create_no_file(run: Run) -> None:
    bare: dict[str, str | None] = {"HOLDFAST_URL": None}
    told = run.each(["status"], ["jobs", "emails"], ["show", "emails", "one"], ["explain", "emails", "one"], env=bare)
    assert all(each.says_no(1, "holdfast.db") for each in told)
    assert list(run.folder.iterdir()) == []


async def test_interrupted_lease_command_claims_nothing(run: Run, app: Holdfast[Any]) -> None:
    """That it waits is known from a job which it refused before."""
    queue = app.queue("emails")
    await queue.enqueue(None, id="retried")
    await (await take(app)).retry()
    waiting = run.start("lease", "emails", "--wait", "60", "--max-retries", "0")
    await until(lambda: _has_failed(app, "retried"), 20)
    waiting.interrupt()
    told = await waiting.end()
    assert (told.status, told.out, told.err.strip()) == (130, "", "")
    await queue.enqueue(None)
    assert await (await take(app)).complete()


async def _has_failed(app: Holdfast[Any], id: str) -> bool:
    info = await app.queue("emails").get(id)
    return info is not None and info.state == "failed"


@pytest.mark.storages("sqlite")
async def test_closed_output_pipe_is_not_an_error(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await app.enqueue_many(queue.bind(None, id=f"{number:04} {'x' * 200}") for number in range(1000))
    jobs = " ".join(PROGRAM) + " jobs emails --limit 1000"
    script = f"{jobs} | head -1; echo ${{PIPESTATUS[0]}}; {jobs} --json | head -1; echo ${{PIPESTATUS[0]}}"
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script],
        env=run.environment(),
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    head, status, first, second_status = done.stdout.splitlines()
    assert cells(head)[0] == "id"
    assert json.loads(first)["queue"] == "emails"
    assert (status, second_status) == ("0", "0")
