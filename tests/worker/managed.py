"""A program whose work is `app.run_worker`, as a management command: `python -m tests.worker.managed MODULE:APP`."""

from __future__ import annotations

import argparse
import logging

from holdfast import Holdfast
from holdfast._worker.app_loader import import_app

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--grace", type=float, default=25.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    import_app(given.target, Holdfast).run_worker(processes=given.processes, grace=given.grace)
