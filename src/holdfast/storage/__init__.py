"""Storages: `connect` makes one from a URL, `Storage` is the class of all of them, `audit` checks a queue."""

from __future__ import annotations

from holdfast._core.jobs import Complete, Fail, Release, RetrySettlement, Settlement
from holdfast.storage.base import Storage, audit
from holdfast.storage.urls import connect

__all__ = ["Complete", "Fail", "Release", "RetrySettlement", "Settlement", "Storage", "audit", "connect"]
