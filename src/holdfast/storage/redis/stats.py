"""What a snapshot is made of: a queue's ledger and the sizes of its indexes, and what workers have announced."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast._core.jobs import FINISHED, State
from holdfast._core.replies import QueueStats, WorkerFacts, WorkerInfo
from holdfast.storage.local.views import served_by
from holdfast.storage.redis.codec import KINDS
from holdfast.storage.redis.raw import Reply

_decode_facts = msgspec.msgpack.Decoder(WorkerFacts).decode


def worker_stats(flat: list[bytes], now: int) -> list[WorkerInfo]:
    workers: list[WorkerInfo] = []
    for name, packed in zip(flat[::2], flat[1::2], strict=True):
        beat_at, expires_at = int.from_bytes(packed[:8], "little"), int.from_bytes(packed[8:16], "little")
        try:
            facts = _decode_facts(packed[17:])
        except msgspec.DecodeError:
            continue
        if expires_at > now:
            workers.append(WorkerInfo(name.decode(), facts, beat_at, expires_at, packed[16] == 1))
    return workers


def queue_stats(queue: str, reply: Reply, workers: Sequence[WorkerInfo]) -> QueueStats:
    now, ready, scheduled, oldest, sizes, past, retrying, deferred, paused, reason, totals = reply[:11]
    finished = {state: sizes[at] - past[at] for at, state in enumerate(list(State)[1:]) if state in FINISHED}
    return QueueStats(
        queue,
        ready=ready,
        scheduled=scheduled,
        running=sizes[0],
        retrying=retrying,
        deferred=deferred,
        completed=finished[State.COMPLETED],
        failed=finished[State.FAILED],
        cancelled=finished[State.CANCELLED],
        oldest_ready_ms=max(0, now - oldest) // 1000,
        paused=bool(paused),
        reason=reason.decode(),
        workers=[worker.worker for worker in workers if queue in served_by(worker)],
        totals={kind: n for kind, n in zip(KINDS, totals, strict=True) if n},
    )
