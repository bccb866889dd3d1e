"""Leases on every storage of ours."""

from holdfast.storage.conformance.leases import *  # noqa: F403
