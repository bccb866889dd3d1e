"""`lease`, and `complete`, `extend`, `release`, `fail` by its token. In Python: `Lease.token`."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast, Lease, OptionError
from holdfast._core.jobs import Job
from holdfast._core.options import from_at
from tests.app.conftest import Place
from tests.cli.conftest import PROGRAM, Run, harmless

HOSTILE = "red \x1b[31m \x9b2J \u202e turned \x7f"
LOST = "the lease is lost"
NOT_TEXT = b"id-\xff\xfe"


async def record(app: Holdfast[Any], queue: str, id: str) -> Job:
    (job,) = await app.storage.get(queue, [id])
    assert job is not None
    return job


async def take(app: Holdfast[Any], queue: str = "emails", **options: Any) -> Lease:
    lease = await app.queue(queue).lease(**{"wait": 0, **options})
    assert lease is not None
    return lease


# lease, complete, extend, release, fail


async def test_a_lease_is_one_line_of_json_and_its_token_completes_it(run: Run, app: Holdfast[Any]) -> None:
    assert run("lease", "emails", "--wait", "0") == (4, "", "")
    await app.queue("emails").enqueue({"to": "ada"}, id="one")
    told = run("lease", "emails", "--seconds", "60", "--wait", "0")
    job = await record(app, "emails", "one")
    assert job.run is not None
    assert (told.status, told.err, job.run.lease_ms) == (0, "", 60_000)
    assert told.json.pop("token")
    assert {name: told.json[name] for name in told.json if name != "token"} == {
        "queue": "emails",
        "id": "one",
        "attempt": 1,
        "fence": job.run.fence,
        "deadline": from_at(job.run.until_at).isoformat().replace("+00:00", "Z"),
        "payload": {"to": "ada"},
    }
    assert run("complete", told.json["token"], "-", stdin='{"sent": true}') == (0, "completed\n", "")
    assert await app.queue("emails").result("one") == {"sent": True}
    assert run("complete", told.json["token"]).says_no(1, LOST)


async def test_a_lease_waits_for_a_job_that_comes(run: Run, app: Holdfast[Any]) -> None:
    waiting = run.start("lease", "emails", "--wait", "20")
    await app.queue("emails").enqueue("hello", delay=0.7)
    told = await waiting.end()
    assert (told.status, told.json["payload"]) == (0, "hello")
    assert run("complete", told.json["token"], "--text", "a result") == (0, "completed\n", "")
    assert await app.queue("emails").result(told.json["id"]) == "a result"


async def test_exactly_one_of_several_completions_of_a_lease_succeeds(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    lease = await take(app)
    everybody = [run.start("complete", lease.token, str(number)) for number in range(4)]
    told = [await each.end() for each in everybody]
    assert sorted(each.status for each in told) == [0, 1, 1, 1]
    assert all(each.says_no(1, LOST) for each in told if each.status == 1)
    assert await app.queue("emails").result("one") == [each.status for each in told].index(0)


async def test_extend_prints_the_stored_deadline(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    lease = await take(app, seconds=60)

    async def until_at() -> datetime:
        job = await record(app, "emails", "one")
        assert job.run is not None
        return from_at(job.run.until_at)

    def printed(out: str) -> datetime:
        word, rest = out.split(" ", 1)
        assert (word, rest[19:23]) == ("until", " UTC")
        return datetime.fromisoformat(rest[:19]).replace(tzinfo=UTC)

    told = run("extend", lease.token, "--seconds", "600", "--progress", '{"percent": 40}')
    assert (told.status, told.err) == (0, "")
    assert abs(printed(told.out) - await until_at()) < timedelta(seconds=2)
    info = await app.queue("emails").get("one")
    assert info is not None
    assert info.progress == {"percent": 40}
    await app.queue("emails").cancel("one")
    told = run("extend", lease.token)
    assert (told.status, told.out.partition(" UTC")[2]) == (0, ", cancel asked\n")
    assert abs(printed(told.out) - await until_at()) < timedelta(seconds=2)
    assert run("extend", lease.token, "--progress", "{").says_no(2, "JSON")
    await lease.complete()
    assert run("extend", lease.token).says_no(1, LOST)


async def test_lease_can_be_released_retried_or_failed(run: Run, app: Holdfast[Any]) -> None:
    queue = app.queue("emails")
    await queue.enqueue(None, id="one")
    token = (await take(app)).token
    assert run("release", token) == (0, "released\n", "")
    job = await record(app, "emails", "one")
    assert (job.state, job.retries, job.stalls) == ("waiting", 0, 0)
    assert run("release", token).says_no(1, LOST)
    token = (await take(app)).token
    assert run("fail", token, "no answer", "--retry", "--delay", "3600") == (0, "to be retried\n", "")
    info = await queue.get("one")
    assert info is not None
    assert info.error is not None
    assert (info.state, info.retries, info.error.message) == ("waiting", 1, "no answer")
    assert info.run_at - datetime.now(UTC) > timedelta(minutes=59)
    await queue.enqueue(None, id="one", on_conflict="update")
    token = (await take(app)).token
    assert run("fail", token, HOSTILE) == (0, "failed\n", "")
    info = await queue.get("one")
    assert info is not None
    assert info.error is not None
    assert (info.state, info.error.kind, info.error.message) == ("failed", "permanent", HOSTILE)
    assert run("fail", token, "--retry").says_no(1, LOST)


@pytest.mark.storages("sqlite")
async def test_result_that_is_not_json_leaves_the_lease_unchanged(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    token = (await take(app)).token
    assert run("complete", token, "{no").says_no(2, "JSON")
    assert run("complete", token, "-", "--raw", stdin=b"\xff\x00") == (0, "completed\n", "")
    assert await app.queue("emails").result("one") == b"\xff\x00"


@pytest.mark.storages("sqlite")
async def test_fail_command_accepts_an_error_of_any_bytes(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    told = run("fail", (await take(app)).token, b"caf\xe9 is closed")
    assert (told.status, told.out, told.err) == (0, "failed\n", "")
    info = await app.queue("emails").get("one")
    assert info is not None
    assert info.error is not None
    assert info.error.message.endswith("is closed")


async def test_job_whose_id_is_not_text_can_be_leased_and_settled(run: Run, app: Holdfast[Any]) -> None:
    told = run("enqueue", "emails", '"hello"', "--id", NOT_TEXT, "--json")
    assert (told.status, told.json["placed"], told.err) == (0, "new", "")
    told = run("enqueue", "emails", '"hello"', "--id", NOT_TEXT)
    assert (told.status, told.out.split()[0]) == (0, "duplicate")
    assert harmless(told.out)
    told = run("lease", "emails", "--wait", "0")
    assert (told.status, told.json["payload"], told.err) == (0, "hello", "")
    assert run("complete", told.json["token"]) == (0, "completed\n", "")
    info = await app.queue("emails").get(NOT_TEXT)
    assert info is not None
    assert info.state == "completed"


@pytest.mark.storages("sqlite")
@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("jq")), reason="needs bash and jq")
async def test_the_shell_worker_of_the_help_works(run: Run, app: Holdfast[Any]) -> None:
    """As it is printed, again and again, but it looks only once for a job; `send-mail` fails for ben."""
    for name in ("ada", "ben"):
        await app.queue("emails").enqueue({"to": name}, id=name)
    example = run("lease", "--help").out.partition("Example: ")[2].partition("\n")[2].partition("\n\n")[0]
    assert "holdfast complete" in example
    functions = f"""
        holdfast() {{
          if [ "$1" = lease ]; then set -- "$@" --wait 0; fi
          {" ".join(PROGRAM)} "$@"
        }}
        send-mail() {{
          jq -r .to > letter; cat letter >> sent
          ! grep -q ben letter
        }}
    """
    script = f"{textwrap.dedent(functions)}\nwhile (\n{textwrap.dedent(example)}\n); do true; done"
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", script],
        cwd=run.folder,
        env=run.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["completed", "to be retried"]
    assert (run.folder / "sent").read_text().split() == ["ada", "ben"]
    stats = await app.queue("emails").stats()
    assert (stats.completed, stats.scheduled, stats.retrying) == (1, 1, 1)


# Tokens


def forged(token: str, **changes: Any) -> str:
    """A token with some parts of another."""
    parts = msgspec.msgpack.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    custom_id = dict(zip(["queue", "id", "fence", "worker", "length_ms"], parts, strict=True)) | changes
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(list(custom_id.values()))).decode().rstrip("=")


async def test_forged_token_settles_nothing(run: Run, app: Holdfast[Any], tmp_path: Path) -> None:
    await app.queue("emails").enqueue(None, id="one")
    lease = await take(app, seconds=60)
    token, fence = lease.token, lease.fence
    assert forged(token) == token
    lost: list[dict[str, Any]] = [
        {"fence": fence + 1},
        {"fence": 0},
        {"worker": "somebody"},
        {"worker": "\x1b[2J"},
        {"id": b"another"},
        {"queue": "another"},
    ]
    for changes in lost:
        assert await app.lease(forged(token, **changes)) is None, changes
    wrong: list[dict[str, Any]] = [{"queue": "../emails"}, {"queue": 7}, {"fence": "7"}, {"id": b""}]
    for changes in wrong:
        with pytest.raises(OptionError):
            await app.lease(forged(token, **changes))
    told = run.each(
        ["complete", forged(token, **lost[0])],
        ["complete", forged(token, queue="\x1b[2J")],
        ["complete", token, "--url", f"sqlite:///{tmp_path}/elsewhere.db"],
        ["complete", token, "--namespace", f"{run.place.namespace}-b"],
    )
    for each, status in zip(told, [1, 2, 1, 1], strict=True):
        assert each.says_no(status, LOST if status == 1 else "queue name")
        assert harmless(each.err)
    job = await record(app, "emails", "one")
    assert (job.state, job.fence) == ("running", fence)
    assert await lease.complete()


@pytest.mark.storages("sqlite")
async def test_a_token_cannot_hold_a_job_for_longer_than_a_lease_may_last(run: Run, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    lease = await take(app, seconds=60)

    async def extended(token: str) -> bool:
        again = await app.lease(token)
        return again is not None and await again.extend()

    for length_ms in (-1, 0, 10**15):
        with pytest.raises(OptionError):
            await extended(forged(lease.token, length_ms=length_ms))
    assert run("extend", forged(lease.token, length_ms=10**15)).says_no(2)
    job = await record(app, "emails", "one")
    assert job.run is not None
    assert from_at(job.run.until_at) == lease.deadline


async def test_token_restores_the_lease_in_another_program(place: Place, app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue({"to": "ada"}, id="one")
    lease = await take(app, seconds=60)
    async with place.app() as other:
        again = await other.lease(lease.token)
        assert again is not None
        same = ("queue", "id", "payload", "attempt", "fence", "deadline", "token")
        assert {name: getattr(again, name) for name in same} == {name: getattr(lease, name) for name in same}
        assert await again.complete("done")
        assert not await lease.complete("too late")
        assert await other.lease(lease.token) is None
    assert await app.queue("emails").result("one") == "done"


async def test_token_is_refused_once_the_lease_moved(app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    first = await take(app, seconds=0.1)
    second = await take(app, seconds=60, wait=10)
    assert await app.lease(first.token) is None
    again = await app.lease(second.token)
    assert again is not None
    assert (again.fence, again.attempt) == (second.fence, 2)
    assert await again.release()


async def test_lease_restored_from_a_token_has_its_deadline(app: Holdfast[Any]) -> None:
    await app.queue("emails").enqueue(None, id="one")
    lease = await take(app, seconds=10)
    assert await lease.extend(seconds=600)
    job = await record(app, "emails", "one")
    assert job.run is not None
    again = await app.lease(lease.token)
    assert again is not None
    assert again.deadline == from_at(job.run.until_at)
    for seconds in (1000, 20):
        assert await again.extend(seconds=seconds)
        job = await record(app, "emails", "one")
        assert job.run is not None
        early = from_at(job.run.until_at) - again.deadline
        assert timedelta(0) <= early < timedelta(seconds=2)
    assert await again.complete()


@pytest.mark.storages("sqlite")
@pytest.mark.parametrize("token", ["", "no token", "é", "\udcff", None, 7, b"bytes"])
async def test_invalid_token_is_refused_in_python(app: Holdfast[Any], token: Any) -> None:
    with pytest.raises(OptionError, match="is not a lease token"):
        await app.lease(token)
