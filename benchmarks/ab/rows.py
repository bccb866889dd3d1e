"""Rows of the comparison: a scenario on a storage, and the number of jobs of a slice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.ab.revisions import Problem

STORAGES = ("sqlite", "valkey")
JOBS = {
    "enqueue": 1_000,
    "bulk": 8_000,
    "drain": 3_000,
    "drain-kept": 3_000,
    "pool": 1_500,
    "pool-kept": 1_500,
    "call": 150,
}
"""Jobs of a slice, by scenario: about 0.1 s of CPU time."""


class Row(msgspec.Struct, frozen=True):
    """A scenario on a storage."""

    scenario: str
    storage: str

    @property
    def name(self) -> str:
        return f"{self.scenario}-{self.storage}"

    @property
    def jobs(self) -> int:
        """Jobs of a slice."""
        return JOBS[self.scenario]

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures, in the order of the driver's reply."""
        return (self.name,) if self.storage == "sqlite" else (self.name, f"{self.name}, server")


ROWS = tuple(Row(scenario, storage) for scenario in JOBS for storage in STORAGES)


def choose(only: Sequence[str], storage: str | None) -> list[Row]:
    """Rows by scenario (`drain`) or name (`drain-sqlite`), and by storage. All rows if nothing is chosen."""
    for term in only:
        if not any(term in (row.scenario, row.name) for row in ROWS):
            known = ", ".join([*JOBS, *(row.name for row in ROWS)])
            raise Problem(f"unknown row {term!r}: pass one of {known}")
    chosen = [row for row in ROWS if not only or row.scenario in only or row.name in only]
    chosen = [row for row in chosen if storage in (None, row.storage)]
    if not chosen:
        raise Problem(f"no row is left: --only {','.join(only)} has no row on {storage}")
    return chosen
