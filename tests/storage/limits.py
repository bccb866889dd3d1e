"""Lower the number of brief outcomes that a queue keeps, in Python and in Lua: the real one takes long to reach."""

from __future__ import annotations

import pytest

from holdfast._core import lifecycle
from holdfast.storage.redis import calls, script


def lower_brief_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Storages that are opened from now on keep `limit` brief outcomes of a queue."""
    constant = f"MAX_BRIEF = 10, 2, {lifecycle.MAX_BRIEF}"
    keyspace = script.SOURCES["keyspace"]
    assert keyspace.count(constant) == 1
    lowered = {**script.SOURCES, "keyspace": keyspace.replace(constant, f"MAX_BRIEF = 10, 2, {limit}")}
    monkeypatch.setattr(lifecycle, "MAX_BRIEF", limit)
    monkeypatch.setattr(calls, "SOURCES", lowered)
