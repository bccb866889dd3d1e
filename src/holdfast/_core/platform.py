"""Where Holdfast runs. The import of this module refuses Windows and warns about Python without the GIL."""

from __future__ import annotations

import sys
import warnings


def check_platform(platform: str, *, has_gil: bool) -> None:
    """Raise ImportError on Windows; warn where no test has run."""
    if platform == "win32":
        raise ImportError(
            "Holdfast does not run on Windows, which lacks Unix datagram sockets, process groups and POSIX signals:"
            " use Linux, for example in WSL 2 or a container"
        )
    if not has_gil:
        warnings.warn(
            "Holdfast is not tested on free-threaded Python without the GIL: set PYTHON_GIL=1, or use a regular build",
            RuntimeWarning,
            stacklevel=2,
        )


check_platform(sys.platform, has_gil=getattr(sys, "_is_gil_enabled", lambda: True)())
