"""Notices changed source files, for workers that load the code again while a user edits it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from traceback import TracebackException

log = logging.getLogger("holdfast.worker")

POLL_S = 0.5
"""Interval of the looks at all files. After a change, the files of one more interval belong to it."""


def source_folders(error: BaseException | None = None) -> list[str]:
    """Folders of the loaded modules that are below the current folder, without installed packages. With the error of
    an import, also those of the modules that it went through."""
    here = os.path.join(os.getcwd(), "")
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    shown = None if error is None else TracebackException.from_exception(error, lookup_lines=False)
    while shown is not None:
        files += [frame.filename for frame in shown.stack]
        files.append(getattr(shown, "filename", None))  # Of a syntax error.
        shown = shown.__cause__ or shown.__context__
    folders = {os.path.dirname(os.path.abspath(file)) for file in files if file}
    return sorted(folder for folder in folders if f"{folder}/".startswith(here) and "site-packages" not in folder)


async def next_change(folders: Callable[[], Iterable[str]], seen: dict[str, dict[str, int]]) -> str:
    """Wait until Python files in these folders change, appear or are deleted, and return one of them. `seen` keeps the
    times of all files by folder between two calls. The files of a folder that is new among the folders are not a
    change."""
    while True:
        found = await asyncio.to_thread(_times, folders())
        both = found.keys() & seen.keys()
        changed = sorted(file for folder in both for file, _ in found[folder].items() ^ seen[folder].items())
        if changed:
            await asyncio.sleep(POLL_S)
            found = await asyncio.to_thread(_times, folders())
        for folder in sorted(found):
            if found[folder] and not seen.get(folder):
                log.info("watching the Python files in %s", folder)
        seen.clear()
        seen.update(found)
        if changed:
            return changed[0]
        await asyncio.sleep(POLL_S)


def _times(folders: Iterable[str]) -> dict[str, dict[str, int]]:
    """When each Python file of these folders was written, in nanoseconds, by folder. A missing folder has no files."""
    times: dict[str, dict[str, int]] = {folder: {} for folder in folders}
    for folder, files in times.items():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    with suppress(OSError):  # It was deleted meanwhile, or is a link to nothing: a lock of an editor.
                        files[entry.path] = entry.stat().st_mtime_ns
    return times
