"""The app of a worker with child processes: where it is, its environment says, because its children import it."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import Holdfast
from holdfast._core.clock import SystemClock
from tests.chaos.point_jobs import MAX_PAYLOAD, Notes, Program

URL, NAMESPACE, NOTES = "HOLDFAST_POINT_URL", "HOLDFAST_POINT_NAMESPACE", "HOLDFAST_POINT_NOTES"

app: Holdfast[None] = Holdfast(os.environ[URL], namespace=os.environ[NAMESPACE], max_payload=MAX_PAYLOAD)
program = Program(app, SystemClock(), Notes(Path(os.environ[NOTES])))
