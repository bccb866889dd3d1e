"""Platforms: Windows is refused at import, Python without the GIL is warned about, each in one sentence."""

from __future__ import annotations

import subprocess
import sys


def import_with(patch: str) -> subprocess.CompletedProcess[str]:
    """Import the package in a new process, after a patch of `sys`."""
    program = f"import sys; {patch}; import holdfast; print(holdfast.Holdfast.__name__)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)


def test_import_is_refused_on_windows() -> None:
    done = import_with("import asyncio, socket, subprocess; sys.platform = 'win32'")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Holdfast does not run on Windows")
    assert "use Linux" in last


def test_import_warns_on_free_threaded_python() -> None:
    done = import_with("sys._is_gil_enabled = lambda: False")
    assert (done.returncode, done.stdout) == (0, "Holdfast\n")
    assert done.stderr.count("Warning") == 1
    assert "RuntimeWarning: Holdfast is not tested on free-threaded Python" in done.stderr
    assert "PYTHON_GIL=1" in done.stderr


def test_import_says_nothing_on_other_platforms() -> None:
    for patch in ("pass", "sys._is_gil_enabled = lambda: True"):
        done = import_with(patch)
        assert (done.returncode, done.stdout, done.stderr) == (0, "Holdfast\n", "")
