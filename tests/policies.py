"""The policies of a task, a fail handler and a pull queue without options."""

from __future__ import annotations

from holdfast._core.retry_policy import Policy

TASK = Policy()
FAIL_HANDLER = Policy(max_retries=100, min_backoff_ms=10_000, max_backoff_ms=900_000)
PULL = Policy(timeout_ms=None, max_retries=None, max_stalls=None, max_timeouts=None, min_backoff_ms=0)
