"""Holdfast beside other job queues: the same work for all, on this machine, one after the other.

Each system is installed from its registry into .bench/, runs in its own processes against a private Valkey without
persistence (or a SQLite file), and is measured in every round, in an order that changes. What comes of it is written to
benchmarks/results/. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

from benchmarks.peers.report import Page
from benchmarks.peers.run import folder, options, run
from benchmarks.peers.systems import HOLDFAST, HOLDFAST_SQLITE, SYSTEMS, System

PAGE = Page("peers", "Side by side", "./dev bench peers")


def main() -> None:
    parser = options(PAGE, __doc__)
    parser.add_argument("--only", metavar="NAME,...", help="these systems, by how their names begin; and Holdfast")
    asked = parser.parse_args()
    run(PAGE, chosen(asked.only), asked, folder(asked, partial=asked.only is not None))


def chosen(only: str | None) -> list[System]:
    """What to compare with is always among them."""
    if only is None:
        return list(SYSTEMS)
    names = only.split(",")
    wanted = [s for s in SYSTEMS if any(s.name == name or s.name.startswith(f"{name},") for name in names)]
    if not wanted:
        raise SystemExit(f"none of these is known; there are: {'; '.join(system.name for system in SYSTEMS)}")
    needed = {HOLDFAST_SQLITE if system.on == "sqlite" else HOLDFAST for system in wanted}
    return [system for system in SYSTEMS if system in wanted or system.name in needed]


if __name__ == "__main__":
    main()
