"""Notices changed source files, for workers that load the code again while a user edits it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress

log = logging.getLogger("holdfast.worker")

POLL_S = 0.5
"""Interval of the looks at all files. After a change, the files of one more interval belong to it."""


def source_folders() -> list[str]:
    """Folders of the loaded modules that are below the current folder, without installed packages."""
    here = os.path.join(os.getcwd(), "")
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    folders = {os.path.dirname(os.path.abspath(file)) for file in files if file}
    return sorted(folder for folder in folders if f"{folder}/".startswith(here) and "site-packages" not in folder)


async def next_change(folders: Callable[[], Iterable[str]], seen: dict[str, int]) -> str:
    """Wait until Python files in these folders change, appear or are deleted, and return one of them. `seen` keeps the
    times of all files between two calls. The files of a folder that is new among the folders are not a change."""
    while True:
        known = _folders_of(seen)
        found = await asyncio.to_thread(_times, folders())
        both = known & _folders_of(found)
        changed = [file for file in found.keys() | seen.keys() if found.get(file) != seen.get(file)]
        changed = sorted(file for file in changed if os.path.dirname(file) in both)
        if changed:
            await asyncio.sleep(POLL_S)
            found = await asyncio.to_thread(_times, folders())
        seen.clear()
        seen.update(found)
        for folder in sorted(_folders_of(seen) - known):
            log.info("watching the Python files in %s", folder)
        if changed:
            return changed[0]
        await asyncio.sleep(POLL_S)


def _folders_of(files: Iterable[str]) -> set[str]:
    return {os.path.dirname(file) for file in files}


def _times(folders: Iterable[str]) -> dict[str, int]:
    """When each Python file of these folders was written, in nanoseconds."""
    times: dict[str, int] = {}
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    with suppress(OSError):  # It was deleted meanwhile, or is a link to nothing: a lock of an editor.
                        times[entry.path] = entry.stat().st_mtime_ns
    return times
