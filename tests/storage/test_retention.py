"""Records past their forget time, on every storage of ours."""

from holdfast.storage.conformance.retention import *  # noqa: F403
