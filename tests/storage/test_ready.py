"""One look at many queues on every storage of ours."""

from holdfast.storage.conformance.ready import *  # noqa: F403
