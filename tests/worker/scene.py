"""What task modules of these tests share: the app of the test that runs, and notes of what handlers did.

Imported in child processes, never by a test: which storage it is comes from the environment.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from holdfast import Holdfast, current_job

NOTES = "HOLDFAST_TEST_NOTES"
NAMESPACE = "HOLDFAST_TEST_NAMESPACE"


def make_app(**options: Any) -> Holdfast[Any]:
    """An app on the storage of the test that runs: HOLDFAST_URL."""
    return Holdfast(namespace=os.environ[NAMESPACE], **options)


def note(what: str, **more: Any) -> None:
    """Write a line that the test can read: what happened, when, where, and in which run. One write, so lines of several
    processes do not mix."""
    try:
        job = current_job()
        run: dict[str, Any] = {"queue": job.queue, "id": job.id, "attempt": job.attempt, "fence": job.fence}
    except Exception:
        run = {}
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **run, **more}) + "\n"
    notes = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(notes, line.encode())
    finally:
        os.close(notes)
