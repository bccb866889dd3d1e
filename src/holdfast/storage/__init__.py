"""Storages: `connect` makes one from a URL, `Storage` is the class of all of them, `audit` checks a queue.

The class is in base.py, URLs are in urls.py. Memory and SQLite are in local/, Redis and Valkey in redis/.
"""

from __future__ import annotations

from holdfast._core.jobs import Complete, Fail, Release, RetrySettlement, Settlement
from holdfast.storage.base import Storage, audit
from holdfast.storage.urls import connect

__all__ = ["Complete", "Fail", "Release", "RetrySettlement", "Settlement", "Storage", "audit", "connect"]
