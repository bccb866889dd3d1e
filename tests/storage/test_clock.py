"""A clock that steps, on every storage of ours."""

from holdfast.storage.conformance.clock_steps import *  # noqa: F403
from holdfast.storage.conformance.clock_times import *  # noqa: F403
