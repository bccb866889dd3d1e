"""The verbs with the defaults that tests want: see holdfast.storage.conformance.verbs."""

from holdfast.storage.conformance.verbs import Stage, fence, heard

__all__ = ["Stage", "fence", "heard"]
