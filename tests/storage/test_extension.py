"""The extension of a record: what travels with the work, what stays with the generation, what is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from holdfast._core.extension import FIRST_WORK_TAG, MAX_EXTENSION_BYTES, Extension
from holdfast._core.jobs import Fail, Job, Request, State, Update, Work
from holdfast._core.replies import SettleResult
from holdfast.errors import OptionError
from holdfast.storage import audit
from holdfast.storage.validation import MAX_CALL_BYTES
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence

OF_WORK: Extension = ((128, b"key"), (200, b""), (255, b"\x00last"))
OTHER: Extension = ((129, b"other"),)
OF_RECORD: Extension = ((1, b"one"), (99, b""), (127, b"\xff" * 300))
"""Tags that this release does not know."""

Act = Callable[[Stage, Job], Awaitable[object]]


async def tag(stage: Stage, harness: Harness, id: str = "a") -> None:
    await harness.tag_record(stage.storage, "q", id, OF_RECORD)
    assert (await stage.the(id)).extension == OF_RECORD


async def expire(stage: Stage, _: Job) -> None:
    assert (await stage.expire()).stalled == ["a"]


KEEPING: dict[str, Act] = {
    "nothing": lambda stage, job: stage.extend(job, progress=b"half"),
    "retry": lambda stage, job: stage.retry(job),
    "timeout": lambda stage, job: stage.retry(job, counts="timeouts", delay=5),
    "release": lambda stage, job: stage.release(job),
    "stall": expire,
    "cancel": lambda stage, _: stage.cancel(),
    "keep": lambda stage, _: stage.keep("a", 60),
    "prioritize": lambda stage, _: stage.prioritize("a", 9),
    "wait": lambda stage, _: stage.keep("a", 60, at_least=True),
    "duplicate": lambda stage, _: stage.enqueue("a", b"2", extension=OTHER),
    "complete": lambda stage, job: stage.complete(job),
    "fail": lambda stage, job: stage.fail(job),
    "repair": lambda stage, _: audit(stage.storage, "q", repair=True),
}


@pytest.mark.parametrize("act", KEEPING.values(), ids=KEEPING)
async def test_extension_of_a_generation_is_kept(stage: Stage, harness: Harness, act: Act) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    job = await stage.claim_one()
    assert (job.work.extension, job.extension) == (OF_WORK, OF_RECORD)
    await act(stage, job)
    job = await stage.the()
    assert (job.work.extension, job.extension) == (OF_WORK, OF_RECORD)


async def test_completed_record_drops_only_its_payload(stage: Stage) -> None:
    await stage.enqueue("1", extension=OF_WORK, priority=7)
    await stage.complete(await stage.claim_one())
    job = await stage.the("1")
    assert job.work == Work(None, priority=7, extension=OF_WORK)


async def test_cancel_of_a_waiting_job_keeps_the_extension(stage: Stage, harness: Harness) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    await stage.cancel()
    job = await stage.the()
    assert (job.state, job.work.extension, job.extension) == (State.CANCELLED, OF_WORK, OF_RECORD)


@pytest.mark.parametrize(("payload", "expected"), [(True, OTHER), (False, OF_WORK)])
async def test_update_takes_the_extension_with_the_payload(
    stage: Stage, harness: Harness, payload: bool, expected: Extension
) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    await stage.enqueue("a", b"2", extension=OTHER, update=Update(payload=payload))
    job = await stage.the()
    assert (job.work.extension, job.extension) == (expected, ())


@pytest.mark.parametrize(("payload", "expected"), [(True, OTHER), (False, OF_WORK)])
async def test_merge_takes_the_extension_with_the_payload(
    stage: Stage, harness: Harness, payload: bool, expected: Extension
) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    job = await stage.claim_one()
    await stage.enqueue("a", b"2", extension=OTHER, update=Update(payload=payload))
    running = await stage.the()
    assert (running.work.extension, running.extension) == (OF_WORK, OF_RECORD)
    await stage.retry(job)
    job = await stage.the()
    assert (job.work.extension, job.extension) == (expected, ())


async def test_promotion_takes_the_extension_of_the_next_request(stage: Stage, harness: Harness) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    job = await stage.claim_one()
    await stage.enqueue("a", b"2", extension=OTHER, update=Update())
    await stage.complete(job)
    job = await stage.the()
    assert (job.state, job.work.extension, job.extension) == (State.WAITING, OTHER, ())


async def test_restart_with_the_stored_payload_takes_its_extension(stage: Stage, harness: Harness) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    await stage.fail(await stage.claim_one())
    await stage.enqueue("a", None, update=Update(payload=False))
    job = await stage.the()
    assert (job.state, job.work.extension, job.extension) == (State.WAITING, OF_WORK, ())


async def test_restart_with_a_new_payload_takes_its_extension(stage: Stage, harness: Harness) -> None:
    await stage.enqueue(extension=OF_WORK)
    await tag(stage, harness)
    await stage.fail(await stage.claim_one())
    await stage.enqueue("a", b"2")
    job = await stage.the()
    assert (job.work.extension, job.extension) == ((), ())


async def test_follow_up_has_an_extension(stage: Stage) -> None:
    await stage.enqueue()
    await stage.fail(await stage.claim_one(), follow_up=Work(b"failed", extension=OTHER))
    (job,) = (await stage.storage.claim("q/failed", 1, worker="w1", lease_ms=1000)).jobs
    assert job.work == Work(b"failed", extension=OTHER)


async def test_new_id_of_many_keeps_its_extension(stage: Stage) -> None:
    requests = [Request(f"id{n}", Work(b"1", extension=OF_WORK if n % 2 else ())) for n in range(100)]
    await stage.storage.enqueue("q", requests)
    jobs = await stage.storage.get("q", [request.id for request in requests])
    assert [job.work for job in jobs if job] == [request.work for request in requests]


async def test_list_leaves_out_large_entries_only(stage: Stage, harness: Harness) -> None:
    await stage.enqueue(extension=((128, b"small"), (129, b"x" * 4097)))
    await harness.tag_record(stage.storage, "q", "a", ((1, b"x" * 4097), (2, b"x" * 4096)))
    (job,) = (await stage.storage.scan("q")).jobs
    assert (job.work.extension, job.extension) == (((128, b"small"),), ((2, b"x" * 4096),))


async def test_claim_counts_extensions_into_its_reply(stage: Stage) -> None:
    for n in range(4):
        await stage.enqueue(f"{n}", b"x" * (MAX_CALL_BYTES // 2 - 60_000), extension=((128, b"x" * 65_000),))
    assert len(await stage.claim(4)) == 1


TOO_LARGE: Extension = ((128, b"x" * (MAX_EXTENSION_BYTES - 4)),)
REFUSED: dict[str, tuple[object, str]] = {
    "a tag of the record": (((FIRST_WORK_TAG - 1, b""),), "the tags 127:"),
    "one of each": (((1, b""), (128, b"")), "the tags 1, 128:"),
    "twice": (((128, b""), (128, b"")), "ascending"),
    "descending": (((129, b""), (128, b"")), "ascending"),
    "too large": (TOO_LARGE, "has 65537 bytes, at most 65536"),
    "tag 0": (((0, b""),), "extension="),
    "tag 256": (((256, b""),), "extension="),
    "text": (((128, "text"),), "extension="),
    "no entries": (128, "extension="),
}


@pytest.mark.parametrize(("entries", "message"), REFUSED.values(), ids=REFUSED)
async def test_wrong_extension_of_a_request_is_refused(stage: Stage, entries: Extension, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        await stage.enqueue(extension=entries)
    await stage.enqueue("b")
    follow_up = Fail("b", fence(await stage.claim_one()), b"error", 0, Work(b"failed", extension=entries))
    with pytest.raises(OptionError, match=message):
        await stage.settle(follow_up)


async def test_extension_of_the_largest_size_is_stored(stage: Stage) -> None:
    largest: Extension = ((128, b"x" * (MAX_EXTENSION_BYTES - 5)),)
    await stage.enqueue(extension=largest)
    assert (await stage.the()).work.extension == largest


async def test_extensions_count_into_the_size_of_a_call(stage: Stage) -> None:
    requests = [Request(f"{n}", Work(b"", extension=((128, b"x" * 65_000),))) for n in range(17)]
    with pytest.raises(OptionError, match="bytes in one call"):
        await stage.storage.enqueue("q", requests)
    await stage.storage.enqueue("q", requests[:16])
    jobs = await stage.claim(16)
    batch = [Fail(j.id, fence(j), b"", 0, Work(b"", extension=((128, b"x" * 65_531),))) for j in jobs]
    assert await stage.storage.settle("q", batch[:15], worker="w1") == [SettleResult.OK] * 15
