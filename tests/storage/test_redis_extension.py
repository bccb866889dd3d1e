"""The extension of a record on Redis and Valkey: entries of the work travel with the payload, entries of the job end
with their generation, plain records have the same bytes as without extensions, and a malformed section is garbled."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast._core.clock import ManualClock
from holdfast._core.extension import Extension, pack_extension
from holdfast._core.jobs import Job, State, Update, Work
from holdfast._core.replies import CancelResult, KeepResult
from holdfast.storage import audit
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis import codec as form
from tests.storage.behind import RedisSaboteur
from tests.storage.harness import Harness
from tests.storage.stage import Stage

STORAGES = ("valkey", "redis")

OLD: Extension = ((128, b"old"), (255, b""))
NEW: Extension = ((130, b"new" * 100),)
OF_JOB: Extension = ((1, b"job"), (127, b"\x00\xff"))
PAYLOAD = Update(payload=True)
NO_PAYLOAD = Update(payload=False)


@pytest.fixture
def saboteur(stage: Stage, harness: Harness) -> RedisSaboteur:
    assert isinstance(stage.storage, RedisStorage)
    return RedisSaboteur(stage.storage, harness.name)


async def mark(stage: Stage, saboteur: RedisSaboteur, id: str = "a") -> None:
    """Give a job entries of its generation, as a later release could."""
    saboteur.write(id, replace(saboteur.job(id), extension=OF_JOB))
    assert (await stage.the(id)).extension == OF_JOB


def test_plain_record_keeps_its_bytes() -> None:
    raw = bytes.fromhex("a605" + "0006651728988000" + "0006651728988001") + b"payload"
    job = form.decode_job(b"a", raw, None)
    assert (job.generation, job.run_at, job.work, job.extension) == (
        0x6651728988000,
        0x6651728988001,
        Work(b"payload"),
        (),
    )


async def test_job_without_entries_is_stored_without_a_section(
    stage: Stage, saboteur: RedisSaboteur, clock: ManualClock
) -> None:
    now = clock.now_us()
    await stage.enqueue("a")
    assert saboteur.raw("a") == b"\xa6\x05" + now.to_bytes(8) * 2 + b"payload"
    await stage.enqueue("later", delay=5, timeout_ms=7, result_ttl_ms=8)
    terms = (9).to_bytes(8, "little") + b"\x96\xa4json\x07\xc0\xc0\xc0\xc0"
    assert saboteur.raw("later") == (
        b"\xb6\x05" + (now + 1).to_bytes(8) + (now + 5_000_000).to_bytes(8) + b"\x13\x00" + terms + b"payload"
    )


async def test_entries_are_stored_behind_one_flag(stage: Stage, saboteur: RedisSaboteur, clock: ManualClock) -> None:
    now = clock.now_us().to_bytes(8)
    await stage.enqueue("a", extension=((200, b"v"),))
    section = b"\x06\x00\x00\x00" + b"\xc8\x01\x00\x00\x00v"
    assert saboteur.raw("a") == b"\xe6\x05" + now * 2 + section + b"payload"


async def test_work_entries_stay_with_the_work(stage: Stage) -> None:
    await stage.enqueue("a", extension=OLD)
    await stage.enqueue("a", b"ignored", extension=NEW)
    assert (await stage.the()).work == Work(b"payload", extension=OLD)
    job = await stage.claim_one()
    assert job.work == Work(b"payload", extension=OLD)
    await stage.retry(job)
    assert (await stage.the()).work.extension == OLD
    await stage.fail(await stage.claim_one())
    assert (await stage.the()).work == Work(b"payload", extension=OLD)
    await stage.enqueue("a", None, update=NO_PAYLOAD)
    assert (await stage.the()).work == Work(b"payload", extension=OLD)
    await stage.complete(await stage.claim_one())
    assert (await stage.the()).work == Work(None, extension=OLD)
    await stage.enqueue("a", update=PAYLOAD, extension=NEW)
    assert (await stage.the()).work == Work(b"payload", extension=NEW)
    await stage.enqueue("a", b"none", update=PAYLOAD)
    assert (await stage.the()).work == Work(b"none")


@pytest.mark.parametrize("takes_payload", [True, False])
async def test_update_of_a_waiting_job_takes_entries_with_the_payload(stage: Stage, takes_payload: bool) -> None:
    await stage.enqueue("a", extension=OLD)
    await stage.enqueue("a", b"new", update=Update(payload=takes_payload), extension=NEW)
    assert (await stage.the()).work.extension == (NEW if takes_payload else OLD)


@pytest.mark.parametrize("takes_payload", [True, False])
@pytest.mark.parametrize("end", ["complete", "retry"])
async def test_next_carries_the_entries_of_its_request(stage: Stage, takes_payload: bool, end: str) -> None:
    await stage.enqueue("a", extension=OLD)
    job = await stage.claim_one()
    await stage.enqueue("a", b"new", update=Update(payload=takes_payload), extension=NEW)
    run = (await stage.the()).run
    assert run is not None
    assert run.next is not None
    assert (run.next.work, run.next.takes_payload) == (Work(b"new", extension=NEW), takes_payload)
    await stage.enqueue("a", b"other", update=NO_PAYLOAD)  # Keeps the work of the first request in next.
    if end == "complete":
        await stage.complete(job)
        assert (await stage.the()).work == Work(b"new", extension=NEW)
    else:
        await stage.retry(job)
        assert (await stage.the()).work == (
            Work(b"new", extension=NEW) if takes_payload else Work(b"payload", extension=OLD)
        )


async def test_job_entries_last_as_long_as_the_generation(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a", extension=OLD)
    await mark(stage, saboteur)

    async def both() -> tuple[Extension, Extension]:
        job = await stage.the()
        return job.extension, job.work.extension

    job = await stage.claim_one()
    assert (job.extension, job.work.extension) == (OF_JOB, OLD)
    await stage.extend(job, progress=b"half")
    await stage.retry(job)
    assert await both() == (OF_JOB, OLD)
    await stage.release(await stage.claim_one())
    assert await both() == (OF_JOB, OLD)
    await stage.claim_one()
    await stage.expire()
    assert ((await stage.the()).stalls, await both()) == (1, (OF_JOB, OLD))
    assert await stage.keep("a", 60) is KeepResult.LIVE
    job = await stage.claim_one()
    await stage.cancel()
    assert await both() == (OF_JOB, OLD)
    await stage.fail(job)
    assert ((await stage.the()).state, await both()) == (State.CANCELLED, (OF_JOB, OLD))
    await stage.enqueue("a", None, update=NO_PAYLOAD)
    assert await both() == ((), OLD)


@pytest.mark.parametrize("end", ["complete", "fail"])
async def test_finished_record_keeps_the_entries_of_its_generation(
    stage: Stage, saboteur: RedisSaboteur, end: str
) -> None:
    await stage.enqueue("a")
    await mark(stage, saboteur)
    job = await stage.claim_one()
    await (stage.complete(job) if end == "complete" else stage.fail(job))
    assert (await stage.the()).extension == OF_JOB


async def test_job_entries_end_with_an_update_of_a_waiting_job(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a", extension=OLD)
    await mark(stage, saboteur)
    await stage.enqueue("a", update=NO_PAYLOAD)
    job = await stage.the()
    assert (job.extension, job.work.extension) == ((), OLD)


@pytest.mark.parametrize("end", ["complete", "retry", "release"])
async def test_job_entries_end_when_next_takes_over(stage: Stage, saboteur: RedisSaboteur, end: str) -> None:
    await stage.enqueue("a")
    await mark(stage, saboteur)
    job = await stage.claim_one()
    await stage.enqueue("a", update=PAYLOAD)
    assert (await stage.the()).extension == OF_JOB
    await {"complete": stage.complete, "retry": stage.retry, "release": stage.release}[end](job)  # type: ignore[operator]
    assert (await stage.the()).extension == ()


async def test_follow_up_carries_its_entries(stage: Stage) -> None:
    await stage.enqueue("a")
    await stage.fail(await stage.claim_one(), follow_up=Work(b"failed", priority=7, max_retries=2, extension=NEW))
    (job,) = (await stage.storage.claim("q/failed", 1, worker="w", lease_ms=1000)).jobs
    assert job.work == Work(b"failed", priority=7, max_retries=2, extension=NEW)


MALFORMED = {
    "an entry that is cut off": b"\x80\x05\x00\x00\x00abc",
    "a head that is cut off": b"\x80\x00",
    "tags that descend": pack_extension(((200, b"a"), (128, b"b"))),
    "a tag twice": pack_extension(((200, b"a"), (200, b"b"))),
    "tag 0": b"\x00\x00\x00\x00\x00",
}


def with_section(raw: bytes, section: bytes, size: int | None = None) -> bytes:
    length = len(section) if size is None else size
    return bytes([raw[0] | form.EXTENDED]) + raw[1:18] + length.to_bytes(4, "little") + section + raw[18:]


@pytest.mark.parametrize("name", [*MALFORMED, "a section that is cut off"])
async def test_malformed_section_is_garbled_to_every_reader(stage: Stage, saboteur: RedisSaboteur, name: str) -> None:
    await stage.enqueue("a")
    await stage.enqueue("sound", extension=NEW)
    section = MALFORMED.get(name, b"")
    saboteur.overwrite("a", with_section(saboteur.raw("a"), section, None if section else 1000))
    assert [(p.kind, p.id) for p in (await audit(stage.storage, "q")).problems if p.id] == [("garbled", "a")]
    assert (await stage.the("a")).state is State.FAILED
    assert await stage.cancel("a") is CancelResult.FINISHED
    assert [job.id for job in await stage.claim(10)] == ["sound"]
    assert (await stage.the("a")).state is State.FAILED


async def test_next_with_entries_of_a_job_is_garbled(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a")
    await stage.claim_one()
    await stage.enqueue("a", update=PAYLOAD, extension=NEW)
    run = saboteur.raw("a", ":runs")
    packed = pack_extension(NEW)
    assert packed in run
    saboteur.overwrite("a", run.replace(packed, b"\x01" + packed[1:]), ":runs")
    assert (await stage.the("a")).state is State.FAILED
    assert [(p.kind, p.id) for p in (await audit(stage.storage, "q", repair=True)).problems if p.id] == [
        ("garbled", "a")
    ]


async def test_record_with_a_section_is_repaired_with_its_entries(stage: Stage, saboteur: RedisSaboteur) -> None:
    await stage.enqueue("a", extension=OLD)
    await mark(stage, saboteur)
    saboteur.misplace("a")
    await audit(stage.storage, "q", repair=True)
    job: Job = await stage.claim_one()
    assert (job.extension, job.work) == (OF_JOB, Work(b"payload", extension=OLD))
