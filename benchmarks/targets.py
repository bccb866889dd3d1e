"""One page for all targets, from what the runs have left in benchmarks/results/: met, missed, or not measured.

./dev bench targets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.pages import RESULTS, Judged, number, table, targets
from benchmarks.peers.figures import Run
from benchmarks.peers.systems import SYSTEMS
from benchmarks.peers.targets import judged
from benchmarks.scale import Curve

REDIS_BYTES = 420
FROM_SCALE = (
    Judged("idle commands/s, 200 queues", "≤ 3"),
    Judged("1,000,000 queued against 10,000, cost per job", "≤ 1.15 ×"),
    Judged("1,000,000 kept against 10,000, cost per job", "≤ 1.15 ×"),
    Judged("100,000 due at one instant, a script call at p99.9, ms", "≤ 10"),
    Judged("1 to 16 idle workers on one queue, claims per job", "≤ 1.2"),
)
"""What a whole run of `./dev bench scale` judges, for when there is none."""
REASONS: Mapping[str, str] = {
    "drain, inline, against BullMQ on Node": (
        "The rounds had 2.24, 1.59 and 1.89 ×, on a machine that is shared. By CPU, a job costs BullMQ's worker twice "
        "as much as ours, and its server three times."
    ),
    "enqueue, one at a time": (
        "Huey pushes onto a list. An enqueue here is a script that looks for the id, notes the request in the queue's "
        "ledger and keeps its reply for a repetition: the server takes three times as long, the client no longer. Even "
        "the limit, our function over a bare socket, is slower than Huey."
    ),
    "call p50": (
        "Huey's idle worker gets the job with the wake-up, by a BRPOP that loses it if the worker dies. Here a worker "
        "is woken and then claims: one round trip more, for the lease."
    ),
    "pickup p50": (
        "The same round trip, on a machine that has gone cold: even the limit, bare sockets and our functions, is "
        "later than a peer whose worker gets the job with the wake-up."
    ),
    "round trips with 100 waiters": (
        "Client, worker and server share two cores, and a call costs them about 110 µs together, half of it the "
        "client's."
    ),
    "1,000,000 kept against 10,000, cost per job": (
        "Not understood yet. Beside 100,000 both curves are higher than beside a million: the server may have been "
        "growing its tables."
    ),
}
"""Why a target is missed, by what it is for: shown only while it is."""
UNKNOWN = "not known yet"


def rows(folder: Path) -> list[Judged]:
    """Every target, with what is known of it."""
    beside, limits = _run(folder / "peers.json"), _run(folder / "limits.json")
    return [*judged(beside, SYSTEMS), _on_redis(limits.bytes_queued), *_of_curves(folder / "scale.json")]


def _run(file: Path) -> Run:
    return msgspec.json.decode(file.read_bytes(), type=Run) if file.exists() else Run({}, [])


def _of_curves(file: Path) -> Sequence[Judged]:
    if not file.exists():
        return FROM_SCALE
    curves = msgspec.json.decode(file.read_bytes(), type=list[Curve])
    return [curve.target for curve in curves if curve.target is not None]


def _on_redis(queued: Mapping[str, float]) -> Judged:
    what, wanted = "bytes per queued job, Redis 7.0", f"≤ {REDIS_BYTES}"
    for server, size in queued.items():
        if server.startswith("redis 7.0"):
            return Judged(what, wanted, number(size), size <= REDIS_BYTES)
    return Judged(what, wanted)


def markdown(folder: Path, reasons: Mapping[str, str] = REASONS) -> str:
    found, about = rows(folder), _run(folder / "peers.json").about
    met = sum(row.met is True for row in found)
    parts = [
        "# Results\n",
        "Written by `./dev bench targets`; how things are measured: [benchmarks](../README.md). A ratio says how many "
        "times better Holdfast is than the other, also where less is better, and is the median of the rounds' own "
        "ratios; beside it are the medians of both.\n",
        *([table(["", ""], list(about.items()))] if about else []),
        f"{met} of {len(found)} targets are met.\n",
        targets(found),
    ]
    if missed := [f"- {row.what}: {reasons.get(row.what, UNKNOWN)}" for row in found if row.met is False]:
        parts += ["## Why some are missed\n", *missed, ""]
    if pages := [f"- [{title}]({name})" for name, title in PAGES.items() if (folder / name).exists()]:
        parts += ["## The runs\n", *pages, ""]
    return "\n".join(parts)


PAGES = {
    "peers.md": "Side by side with other queues",
    "ours.md": "Holdfast by itself",
    "limits.md": "The limits",
    "scale.md": "What may grow, and what must not",
}


def main() -> None:
    RESULTS.mkdir(exist_ok=True)
    page = markdown(RESULTS)
    (RESULTS / "README.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
