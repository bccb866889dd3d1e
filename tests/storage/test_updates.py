"""Repeated requests for one id on every storage of ours."""

from holdfast.storage.conformance.deferred import *  # noqa: F403
from holdfast.storage.conformance.updates import *  # noqa: F403
