"""Behind a Redis storage's back: plain commands on the server that tests share, where nothing is checked."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast._core.extension import Extension, pack_extension
from holdfast._core.jobs import Job, Next, Outcome, State, StoredLease
from holdfast.storage.local.table import VIEWS
from holdfast.storage.redis import RedisStorage
from holdfast.storage.redis import codec as form
from holdfast.storage.redis.audit import INDEXES
from holdfast.storage.validation import id_bytes
from tests import servers

META = ("layout", "last_at", "last_stamp", "skew", "paused", "has_brief", "priorities", "forget_at", *VIEWS)
TOTALS = struct.Struct(f"<Bqqq BBH q qq {len(form.KINDS)}q")
"""The metadata of a queue up to its totals: the format is at the head of keyspace.lua. The rest is not changed."""

Member = tuple[str, bytes, float]
"""An entry of an index: the index, the member, its score."""


class RedisSaboteur:
    """Breaks a queue on Redis or Valkey without the storage's knowledge. What is in `counts` is stored as a number; all
    other counts are the sizes of indexes."""

    counts = frozenset({"retrying", "deferred"})

    def __init__(self, storage: RedisStorage, name: str, queue: str = "q") -> None:
        server = servers.shared("valkey" if name == "valkey" else "redis")
        assert server is not None
        self._server = server
        self._namespace = storage.namespace
        self.key = f"{{{storage.namespace}/{queue}}}"

    def command(self, *args: str | bytes | float) -> Any:
        return self._server.command(*args)

    def contents(self) -> object:
        """Every key of the namespace, with its value and whether it expires."""
        _, keys = self.command("SCAN", 0, "MATCH", f"{{{self._namespace}[/}}]*", "COUNT", 1_000_000)
        return {key: (self._value(key), self.command("PTTL", key) < 0) for key in sorted(keys)}

    def _value(self, key: bytes) -> object:
        match self.command("TYPE", key):
            case b"string":
                return self.command("GET", key)
            case b"hash":
                flat = self.command("HGETALL", key)
                return dict(zip(flat[::2], flat[1::2], strict=True))
            case b"zset":
                return self.command("ZRANGE", key, 0, -1, "WITHSCORES")
            case b"set":
                return sorted(self.command("SMEMBERS", key))
            case _:
                return self.command("LRANGE", key, 0, -1)

    # Indexes

    def entries(self, id: str) -> list[Member]:
        """Where a job is listed."""
        found: list[Member] = []
        for index in INDEXES:
            flat = self.command("ZRANGE", self.key + index, 0, -1, "WITHSCORES")
            for member, score in zip(flat[::2], flat[1::2], strict=True):
                if (member[8:] if index.startswith(":w") else member) == id.encode():
                    found.append((index, member, float(score)))
        return found

    def lose(self, id: str) -> None:
        for index, member, _ in self.entries(id):
            self.command("ZREM", self.key + index, member)

    def list_at(self, index: str, score: float, member: bytes) -> None:
        assert self.command("ZADD", self.key + index, score, member) == 1

    def double(self, id: str) -> None:
        job = self.job(id)
        if job.state is State.WAITING:
            self.list_at(":running", job.run_at, id.encode())
        else:
            member = form.waiting_member(job.arrival, id.encode())
            self.list_at(f":w{job.work.priority}", job.run_at, member)

    def misplace(self, id: str) -> None:
        self.lose(id)
        self.double(id)

    def strand(self, id: str) -> None:
        """A lease stays behind as well."""
        assert self.command("HDEL", self.key + ":jobs", id) == 1

    # Records

    def raw(self, id: str, where: str = ":jobs") -> bytes:
        found = self.command("HGET", self.key + where, id)
        assert isinstance(found, bytes), f"there is no {where} of {id!r}"
        return found

    def overwrite(self, id: str, raw: bytes, where: str = ":jobs") -> None:
        assert self.command("HSET", self.key + where, id, raw) == 0, "the saboteur missed"

    def job(self, id: str) -> Job:
        run = self.command("HGET", self.key + ":runs", id)
        return form.decode_job(id.encode(), self.raw(id), None if run is None else form.decode_run(run))

    def tag(self, id: str, entries: Extension) -> None:
        """Set the extension of a record, if there is one. Its place in the indexes stays."""
        field = id_bytes(id)
        raw, run = (self.command("HGET", self.key + where, field) for where in (":jobs", ":runs"))
        if raw is not None:
            job = form.decode_job(field, raw, None if run is None else form.decode_run(run))
            tagged = encode(replace(job, extension=entries), waiters=_waiters(raw))[0]
            self.command("HSET", self.key + ":jobs", field, tagged)

    def write(self, id: str, job: Job) -> None:
        """A record as it could have been written, in the index where it belongs."""
        self.lose(id)
        raw, run = encode(job)
        self.overwrite(id, raw)
        if run is not None:
            self.overwrite(id, run, ":runs")
        if job.outcome is not None:
            self.list_at(f":{job.outcome.state}", job.outcome.forget_at, id.encode())
        elif job.run is not None:
            self.list_at(":running", job.run.until_at, id.encode())
        else:
            self.list_at(f":w{job.work.priority}", job.run_at, form.waiting_member(job.arrival, id.encode()))

    def restamp(self, id: str, field: str, stamp: int) -> None:
        job = self.job(id)
        if field in ("generation", "arrival"):
            self.write(id, replace(job, **{field: stamp}))
            return
        if field == "start of the last run":
            assert job.outcome is not None
            self.write(id, replace(job, outcome=replace(job.outcome, started_at=stamp)))
            return
        assert job.run is not None
        if field == "fence":
            self.write(id, replace(job, run=replace(job.run, fence=stamp)))
            return
        assert job.run.next is not None
        self.write(id, replace(job, run=replace(job.run, next=replace(job.run.next, generation=stamp))))

    def end_while_running(self, id: str) -> None:
        self.write(id, replace(self.job(id), outcome=Outcome(1, State.FAILED, 1, 2**52, error=b"e")))

    def garble(self, id: str) -> None:
        self.overwrite(id, self.raw(id)[:7])

    # The metadata

    def read_meta(self) -> dict[str, Any]:
        packed = self.command("GET", self.key + ":meta")
        assert isinstance(packed, bytes)
        numbers = TOTALS.unpack_from(packed)
        fields: dict[str, Any] = dict(zip(META, numbers, strict=False))
        return {**fields, "totals": numbers[len(META) :], "rest": packed[TOTALS.size :]}

    def write_meta(self, fields: dict[str, Any]) -> None:
        packed = TOTALS.pack(*(fields[name] for name in META), *fields["totals"])
        self.command("SET", self.key + ":meta", packed + fields["rest"])

    def metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        fields = self.read_meta()
        shown = {
            "counts": {name: fields[name] for name in self.counts},
            "totals": dict(zip(form.KINDS, fields["totals"], strict=True)),
        }
        change(shown)
        assert shown["counts"].keys() <= self.counts, "the metadata has no such count"
        fields |= shown["counts"]
        fields["totals"] = [shown["totals"][kind] for kind in form.KINDS]
        self.write_meta(fields)


def _waiters(raw: bytes) -> bytes:
    """The clients that wait for the end of a job, as its record lists them."""
    if not raw[0] & form.LONG:
        return b""
    *_, error_size, previous_size, waiters_size = form._LONG.unpack_from(raw, form._HEAD.size)
    at = form._HEAD.size + form._LONG.size + max(error_size - 1, 0) + previous_size
    return raw[at : at + waiters_size]


def encode(job: Job, waiters: bytes = b"") -> tuple[bytes, bytes | None]:
    """A record and its run, as record.lua writes them, but never in the short form."""
    previous = b"" if job.previous is None else encode_outcome(job.previous)
    flags = form.MARK | form.LONG | (form.FLAG_CUSTOM_ID if job.custom_id else 0)
    keep = 0 if job.keep_ms is None else job.keep_ms + 1
    middle = form._LONG.pack(
        *(job.arrival, job.wall_at, job.attempts - (job.started_at is not None), job.retries, job.stalls, job.timeouts),
        *(keep, job.keep_until_at, _size(job.error), len(previous), len(waiters)),
    )
    middle += (job.error or b"") + previous + waiters
    if job.outcome is not None:
        outcome = encode_outcome(job.outcome)
        flags |= form.FLAG_FINISHED
        middle += form._SIZE.pack(len(outcome)) + outcome
    terms = form.terms_of(job.work)
    if terms:
        flags |= form.TERMS
        middle += form._SHORT.pack(len(terms)) + terms
    if job.extension or job.work.extension:
        extension = pack_extension(job.extension + job.work.extension)
        flags |= form.EXTENDED
        middle += form._SIZE.pack(len(extension)) + extension
    if job.work.payload is not None:
        flags |= form.PAYLOAD
    head = form._HEAD.pack(flags, job.work.priority, job.generation, job.run_at)
    return head + middle + (job.work.payload or b""), None if job.run is None else encode_run(job.run)


def encode_outcome(outcome: Outcome) -> bytes:
    worker, codec = outcome.worker.encode(), outcome.codec.encode()
    head = form._OUTCOME.pack(
        *(
            form.BRIEF_STATE if outcome.brief else form.STATES.index(outcome.state),
            outcome.generation,
            outcome.started_at,
            outcome.ended_at,
        ),
        *(outcome.forget_at, outcome.dedup_at),
        *(len(worker), len(codec), _size(outcome.result), _size(outcome.error)),
    )
    return head + worker + codec + (outcome.result or b"") + (outcome.error or b"")


def encode_run(run: StoredLease) -> bytes:
    flags = (form.OVERDUE if run.overdue else 0) | (form.CANCEL_ASKED if run.cancel_asked else 0)
    rest = b""
    if run.progress is not None:
        flags |= form.PROGRESS
        rest += form._SIZE.pack(len(run.progress)) + run.progress
    if run.next is not None:
        flags |= form.NEXT
        rest += _encode_next(run.next)
    worker = run.worker.encode()
    return form._RUN.pack(flags, run.fence, run.lease_ms, run.until_at, len(worker)) + worker + rest


def _encode_next(following: Next) -> bytes:
    work, rule = following.work, following.takes_run_at
    number = int(rule) if isinstance(rule, bool) else form.RULES.index(rule)
    terms, section, takes_payload = form.terms_of(work), b"", int(following.takes_payload)
    if work.extension:
        extension = pack_extension(work.extension)
        takes_payload |= form.EXTENDED
        section = form._SIZE.pack(len(extension)) + extension
    head = form._NEXT.pack(
        *(following.generation, following.run_at, following.arrival, following.wall_at),
        *(takes_payload, number, following.resets_counts, work.priority, len(terms)),
    )
    return head + terms + section + (work.payload or b"")


def _size(value: bytes | None) -> int:
    return 0 if value is None else len(value) + 1
