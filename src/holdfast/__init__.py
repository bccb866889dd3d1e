"""Holdfast: a reliable job queue for Python, on Redis or Valkey or on one SQLite file."""

from holdfast.errors import (
    DuplicateJob,
    HoldfastError,
    JobCancelled,
    JobFailed,
    JobForgotten,
    JobNotFound,
    LayoutTooNew,
    OptionError,
    PayloadRejected,
    StorageFull,
    StorageUnavailable,
    WaitTimeout,
)
from holdfast.jobs import Placed, State, Update

__all__ = [
    "DuplicateJob",
    "HoldfastError",
    "JobCancelled",
    "JobFailed",
    "JobForgotten",
    "JobNotFound",
    "LayoutTooNew",
    "OptionError",
    "PayloadRejected",
    "Placed",
    "State",
    "StorageFull",
    "StorageUnavailable",
    "Update",
    "WaitTimeout",
]
