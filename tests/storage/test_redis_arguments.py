"""Calls that no client of ours makes: what no client could read is refused, and no byte is changed."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from holdfast._core.jobs import Complete, Fail, Request, RetrySettlement, Update, Work
from holdfast._core.replies import Placed, SettleResult
from holdfast.errors import StorageUnavailable
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis.codec import request_args, settlement_args
from holdfast.storage.redis.raw import Argument
from tests.storage.behind import RedisSaboteur
from tests.storage.harness import Harness
from tests.storage.stage import Stage, fence
from tests.storage.test_redis_calls import call

STORAGES = ("valkey", "redis")
NUMBER = 1000
LATE = 2**53
TOO_LONG_MS = 10 * 365 * 24 * 3_600_000 + 1


@pytest.fixture
def saboteur(stage: Stage, harness: Harness) -> RedisSaboteur:
    assert isinstance(stage.storage, RedisStorage)
    return RedisSaboteur(stage.storage, harness.name)


def request(id: bytes | str = "b", terms: bytes = b"", payload: bytes = b"x", **fields: int) -> list[Argument]:
    """A request, with other fields in its head."""
    names = ("priority", "has_payload", "custom_id", "updates", "takes_payload", "rule", "resets", "when", "at", "keep")
    head = {**dict.fromkeys(names, 0), "priority": 5, "has_payload": 1, "custom_id": 1}
    assert fields.keys() <= head.keys()
    return [id, struct.pack("<8BQQ", *(head | fields).values()), terms, payload]


def terms(*options: Any, ttl: int = 0) -> bytes:
    return struct.pack("<Q", ttl) + msgspec.msgpack.encode(options)


def extended(entries: bytes) -> list[Argument]:
    return request(has_payload=65, terms=struct.pack("<H", 0) + entries)


TERMS = ("json", None, None, None, None, None)
ENQUEUES: dict[str, Sequence[Argument]] = {
    "no items": [],
    "a field is missing": request()[:3],
    "too many items": [arg for n in range(251) for arg in request(f"{n}")],
    "an empty id": request(""),
    "an id of 70,000 bytes": request(bytes(70_000)),
    "an id of 513 bytes": request(b"x" * 513),
    "a short head": ["b", b"short", b"", b"x"],
    "a long head": ["b", bytes(25), b"", b"x"],
    "priority 10": request(priority=10),
    "a flag that does not exist": request(has_payload=2),
    "custom_id 2": request(custom_id=2),
    "updates 2": request(updates=2),
    "takes_payload 2": request(takes_payload=2),
    "resets_counts 2": request(resets=2),
    "rule 4": request(rule=4),
    "when 3": request(when=3),
    "a delay of more than ten years": request(when=1, at=TOO_LONG_MS),
    "a time of 2**53": request(when=2, at=LATE),
    "a time of 2**63": request(when=2, at=2**63),
    "a time of 0": request(when=2, at=0),
    "keep_ms of more than ten years": request(keep=TOO_LONG_MS),
    "no payload": request(has_payload=0),
    "an update that takes no payload": request(has_payload=0, updates=1, takes_payload=1),
    "terms of 7 bytes": request(terms=bytes(7)),
    "terms that are not msgpack": request(terms=bytes(8) + b"\xc1"),
    "terms with five options": request(terms=terms(*TERMS[:5])),
    "terms with more bytes": request(terms=terms(*TERMS) + b"\0"),
    "terms with text for a number": request(terms=terms("json", "soon", None, None, None, None)),
    "terms with a negative number": request(terms=terms("json", None, -1, None, None, None)),
    "terms with a fraction": request(terms=terms("json", 1.5, None, None, None, None)),
    "terms with a timeout of 0": request(terms=terms("json", 0, None, None, None, None)),
    "terms with an endless timeout": request(terms=terms("json", TOO_LONG_MS, None, None, None, None)),
    "terms with an endless ttl": request(terms=terms(*TERMS, ttl=TOO_LONG_MS + 1)),
    "terms with a codec that is not UTF-8": request(terms=bytes(8) + b"\x96\xa1\xff\xc0\xc0\xc0\xc0\xc0"),
    "terms without a codec": request(terms=terms("", None, None, None, None, None)),
    "terms of 70,000 bytes": request(terms=terms("x" * 70_000, None, None, None, None, None)),
    "terms that are cut off": request(has_payload=65, terms=b"\xff\xff"),
    "an extension of a job": extended(struct.pack("<BI", 1, 1) + b"x"),
    "an extension that is cut off": extended(struct.pack("<BI", 200, 9) + b"x"),
    "an extension that is empty": extended(b""),
    "an extension of 70,000 bytes": extended(struct.pack("<BI", 200, 70_000) + bytes(70_000)),
}
OTHERS: dict[str, tuple[str, Sequence[Argument]]] = {
    "a claim of 0": ("claim", (0, "w", 1000)),
    "a claim of -1": ("claim", (-1, "w", 1000)),
    "a claim of 251": ("claim", (251, "w", 1000)),
    "a claim of one and a half": ("claim", ("1.5", "w", 1000)),
    "a claim of nan": ("claim", ("nan", "w", 1000)),
    "a claim of words": ("claim", ("many", "w", 1000)),
    "a claim without a length": ("claim", (1, "w")),
    "a claim with more": ("claim", (1, "w", 1000, "more")),
    "a lease of 0": ("claim", (1, "w", 0)),
    "a lease of -1000": ("claim", (1, "w", -1000)),
    "a lease of 2**53": ("claim", (1, "w", LATE)),
    "a worker without a name": ("claim", (1, "", 1000)),
    "a worker of 70,000 bytes": ("claim", (1, "w" * 70_000, 1000)),
    "a worker that is not UTF-8": ("claim", (1, b"\xff", 1000)),
    "a worker with a surrogate": ("claim", (1, b"\xed\xa0\x80", 1000)),
    "a worker that is cut off": ("claim", (1, b"w\xc3", 1000)),
    "a worker with a line": ("claim", (1, "w\n", 1000)),
    "a cancel of nothing": ("cancel", ()),
    "a cancel of an empty id": ("cancel", ("",)),
    "a keep of -1": ("keep", (-1, 0, "a")),
    "a keep of more than ten years": ("keep", (TOO_LONG_MS, 0, "a")),
    "a keep with a code": ("keep", (1000, 2, "a")),
    "a priority of 10": ("prioritize", (10, "a")),
    "a priority of nothing": ("prioritize", (1,)),
    "a pause of 2": ("pause", (2, "")),
    "a pause without a reason": ("pause", (1,)),
    "a reason of 70,000 bytes": ("pause", (1, "x" * 70_000)),
    "a sweep of 0": ("sweep", (0, "")),
    "a sweep of 101": ("sweep", (101, "")),
    "a purge of -1": ("purge", (-1, "1")),
    "a purge of a state that does not exist": ("purge", (1, "16")),
    "a drop of 201": ("drop", (201,)),
    "a verb that does not exist": ("unknown", (1,)),
}
SETTLEMENTS: dict[str, Callable[[int], Sequence[Argument]]] = {
    "a short head": lambda fence: ("a", b"short", "", ""),
    "a field is missing": lambda fence: ("a", head(1, fence), ""),
    "an empty id": lambda fence: ("", head(1, fence), "", "json"),
    "kind 0": lambda fence: ("a", head(0, fence), "", ""),
    "kind 5": lambda fence: ("a", head(5, fence), "", ""),
    "has_body 2": lambda fence: ("a", head(1, fence, 1000, has_body=2), "", "json"),
    "counts of no retry": lambda fence: ("a", head(3, fence), "", ""),
    "counts 4": lambda fence: ("a", head(3, fence, counts=4), "", ""),
    "a result for more than ten years": lambda fence: ("a", head(1, fence, TOO_LONG_MS), "", "json"),
    "a result for 2**63 ms": lambda fence: ("a", head(1, fence, 2**63), "", "json"),
    "an id for more than ten years": lambda fence: ("a", head(1, fence, 0, TOO_LONG_MS), "", "json"),
    "a failure for more than ten years": lambda fence: ("a", head(2, fence, TOO_LONG_MS, has_body=1), "e", ""),
    "a delay of more than ten years": lambda fence: ("a", head(3, fence, TOO_LONG_MS, counts=1), "", ""),
    "a retry at 2**53": lambda fence: ("a", head(3, fence, 0, LATE, counts=1), "", ""),
    "a fence of 2**63": lambda fence: ("a", head(1, 2**63), "", "json"),
    "no codec": lambda fence: ("a", head(1, fence, 1000), "r", ""),
    "a codec that is not UTF-8": lambda fence: ("a", head(1, fence, 1000), "r", b"\xff"),
    "a codec of 300 bytes": lambda fence: ("a", head(1, fence, 1000), "r", "x" * 300),
    "a follow-up that is cut off": lambda fence: ("a", head(2, fence, has_body=1), "e", b"\5"),
    "a follow-up with terms that are cut off": lambda fence: ("a", head(2, fence, has_body=1), "e", b"\5\xff\0"),
    "a follow-up of priority 10": lambda fence: ("a", head(2, fence, has_body=1), "e", b"\x0a\0\0x"),
    "a follow-up without an extension": lambda fence: ("a", head(2, fence, has_body=1), "e", b"\x45\0\0\0\0\0\0"),
}
EXTENDS: dict[str, Callable[[int], Sequence[Argument]]] = {
    "a field is missing": lambda fence: ("a", fence),
    "a fence of words": lambda fence: ("a", "mine", ""),
    "a negative fence": lambda fence: ("a", -1, ""),
    "progress without a plus": lambda fence: ("a", fence, "half"),
}


def head(kind: int, fence: int, first: int = 0, second: int = 0, *, has_body: int = 0, counts: int = 0) -> bytes:
    return struct.pack("<BQQQBB", kind, fence, first, second, has_body, counts)


async def is_refused(stage: Stage, saboteur: RedisSaboteur, verb: str, args: Sequence[Argument]) -> None:
    before = saboteur.contents()
    with pytest.raises(StorageUnavailable, match="HOLDFAST_ARGUMENTS"):
        await call(stage, verb, NUMBER, args)
    assert saboteur.contents() == before


@pytest.mark.parametrize("exists", [True, False], ids=["queue", "none"])
@pytest.mark.parametrize("what", ENQUEUES)
async def test_malformed_enqueue_is_refused(stage: Stage, saboteur: RedisSaboteur, what: str, exists: bool) -> None:
    if exists:
        await stage.enqueue("a")
    await is_refused(stage, saboteur, "enqueue", ENQUEUES[what])


async def test_one_malformed_request_refuses_all_of_its_call(stage: Stage, saboteur: RedisSaboteur) -> None:
    await is_refused(stage, saboteur, "enqueue", [*request("b"), *request("c", priority=10)])


@pytest.mark.parametrize("what", OTHERS)
async def test_malformed_call_is_refused(stage: Stage, saboteur: RedisSaboteur, what: str) -> None:
    await stage.enqueue("a")
    await is_refused(stage, saboteur, *OTHERS[what])


@pytest.mark.parametrize("what", SETTLEMENTS)
async def test_malformed_settlement_is_refused(stage: Stage, saboteur: RedisSaboteur, what: str) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await is_refused(stage, saboteur, "settle", ["w1", *SETTLEMENTS[what](fence(job))])
    assert await stage.complete(job)


async def test_follow_up_of_a_fail_handler_is_refused(stage: Stage, saboteur: RedisSaboteur) -> None:
    companion = Stage(stage.storage, stage.clock, "q/failed")
    await companion.enqueue("a")
    job = await companion.claim_one()
    failure = settlement_args(Fail("a", fence(job), b"e", 1000, Work(b"x")))
    await is_refused(companion, saboteur, "settle", ["w1", *failure])


@pytest.mark.parametrize("what", EXTENDS)
async def test_malformed_extend_is_refused(stage: Stage, saboteur: RedisSaboteur, what: str) -> None:
    await stage.enqueue("a")
    job = await stage.claim_one()
    await is_refused(stage, saboteur, "extend", ["w1", 1000, *EXTENDS[what](fence(job))])


@pytest.mark.parametrize(
    ("key", "client", "number", "verb", "args"),
    [
        ("q", "twelve-chars", "1", "enqueue", request()),
        ("{hf/a b}:meta", "twelve-chars", "1", "enqueue", request()),
        ("{hf/q}/other:meta", "twelve-chars", "1", "pause", ["1", ""]),
        ("{hf}:meta", "twelve-chars", "1", "enqueue", request()),
        ("{hf/q}:jobs", "twelve-chars", "1", "enqueue", request()),
        ("{hf/q}:meta", "short", "1", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars-and-more", "1", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", "0", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", "-1", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", "1.5", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", f"{2**54}", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", "one", "enqueue", request()),
        ("{hf/q}:meta", "twelve-chars", "1", "announce", ["w", b"\x80", "1000"]),
        ("{hf}:meta", "twelve-chars", "1", "announce", ["", b"\x80", "1000"]),
        ("{hf}:meta", "twelve-chars", "1", "announce", ["w", b"\xc1", "1000"]),
        ("{hf}:meta", "twelve-chars", "1", "announce", ["w", b"\1", "1000"]),
        ("{hf}:meta", "twelve-chars", "1", "announce", ["w", b"\x80", "0"]),
        ("{hf}:meta", "twelve-chars", "1", "write_notes", ["0", "name", "value"]),
        ("{hf}:meta", "twelve-chars", "1", "write_notes", ["1000", "name", "value", "without a value"]),
        ("{hf}:meta", "twelve-chars", "1", "write_notes", ["1000", "name", bytes(16_385)]),
        ("{hf}:meta", "twelve-chars", "1", "write_notes", ["1000", "", "value"]),
        ("{hf/q}:meta", "twelve-chars", "1", "write_notes", ["1000", "name", "value"]),
        ("{hf}:meta", "twelve-chars", "", "list", ["not a name"]),
        ("{hf}:meta", "twelve-chars", "", "layout", ["99"]),
    ],
)
async def test_malformed_head_of_a_call_is_refused(
    stage: Stage, saboteur: RedisSaboteur, key: str, client: str, number: str, verb: str, args: Sequence[Argument]
) -> None:
    assert isinstance(stage.storage, RedisStorage)
    library, (namespace, _, _) = stage.storage._calls._library, saboteur.key.partition("/")
    await stage.storage.snapshot()  # The server has the library.
    key = key.replace("{hf", namespace)
    now = stage.clock.now_us()
    before = saboteur.contents()
    for name in (library.name, library.enqueue):
        with pytest.raises(Exception, match="HOLDFAST_ARGUMENTS"):
            saboteur.command("FCALL", name, 1, key, verb, client, number, *args, now)
    assert saboteur.contents() == before


async def test_valid_calls_at_the_limits_are_accepted(stage: Stage) -> None:
    longest = Request("x" * 512, Work(b""), delay_ms=TOO_LONG_MS - 1, keep_ms=TOO_LONG_MS - 1, custom_id=True)
    every = Work(b"", "ü" * 20, 9, TOO_LONG_MS - 1, 1_000_000, 0, 200, TOO_LONG_MS - 1, 0, extension=((255, b"x"),))
    replies = await stage.storage.enqueue("q", [longest, Request("every", every)])
    assert [enqueued.placed for enqueued in replies] == [Placed.NEW] * 2
    assert (await stage.the("every")).work == every
    worker = "wörker-日本-🙂"
    (job,) = (await stage.storage.claim("q", 250, worker=worker, lease_ms=86_400_000)).jobs
    assert job.worker == worker
    retry = RetrySettlement("every", fence(job), b"e", run_at=4_102_444_799_999_999)
    assert await stage.storage.settle("q", [retry], worker=worker) == [SettleResult.OK]
    (reply,) = await stage.storage.enqueue("q", [Request("every", every, update=Update())])
    assert reply.placed is Placed.UPDATED
    (job,) = (await stage.storage.claim("q", 1, worker=worker, lease_ms=100)).jobs
    await stage.storage.settle("q", [Complete("every", fence(job), b"r", "c" * 40, TOO_LONG_MS - 1)], worker=worker)
    assert (await stage.the("every")).outcome.codec == "c" * 40  # type: ignore[union-attr]
    assert request_args(longest)[0] == b"x" * 512
