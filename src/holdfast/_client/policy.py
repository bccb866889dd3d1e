"""From the options of a task, a fail handler or a pulled queue to the policy that a worker applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast._core.options import Where, all_fields
from holdfast._core.retry_policy import Policy, QueueConfig
from holdfast.errors import OptionError

AT_MOST_ONCE = {"max_retries": 0, "max_stalls": 0, "max_timeouts": 0}
"""Limits of a task that promises to run a job at most once."""


def queue_config(queue: str, place: Where, options: Mapping[str, Any]) -> QueueConfig:
    """How the jobs of one queue are run: the given options, and the defaults of the place where they were given."""
    fields = all_fields(place, options)
    changes: dict[str, Any] = {**_backoff(fields, options), **_delivery(fields)}
    policy = Policy(**{**_named_in(Policy, fields), **changes})
    return QueueConfig(queue=queue, policy=policy, **_named_in(QueueConfig, fields))


def _named_in(struct: type[msgspec.Struct], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a struct has."""
    return {name: fields[name] for name in struct.__struct_fields__ if name in fields}


def _backoff(fields: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, int]:
    """The shortest and the longest backoff. If only one is given and crosses the default of the other, both are equal
    to the given one."""
    shortest, longest = fields["min_backoff_ms"], fields["max_backoff_ms"]
    if shortest <= longest:
        return {}
    if "min_backoff" in options and "max_backoff" in options:
        raise OptionError(f"max_backoff ({longest / 1000:g} s) is less than min_backoff ({shortest / 1000:g} s)")
    given = shortest if "min_backoff" in options else longest
    return {"min_backoff_ms": given, "max_backoff_ms": given}


def _delivery(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `delivery`, `singleton` and `on_storage_loss` mean for a run."""
    at_most_once = fields["delivery"] == "at_most_once"
    exclusive = fields["singleton"] is not None
    on_storage_loss = fields["on_storage_loss"] or ("kill" if exclusive else "hold")
    return {
        **(AT_MOST_ONCE if at_most_once else {}),
        "at_most_once": at_most_once,
        "exclusive": exclusive,
        "dies_with_storage": on_storage_loss == "kill",
    }
