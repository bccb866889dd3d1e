"""Log lines of `holdfast worker` and of child processes: ids and durations, no payloads."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast._core.text import escape_control
from holdfast._worker.current_job import running

FORMATS = ("text", "json")


class Logs(msgspec.Struct, frozen=True):
    """Log settings of a process. Without them Holdfast does not configure logging."""

    format: str
    level: str


def set_up_logging(logs: Logs) -> None:
    """Write the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(job_log_filter)
    handler.setFormatter(JsonLines() if logs.format == "json" else TextLines())
    logging.basicConfig(level=logs.level.upper(), handlers=[handler])


def job_log_filter(record: logging.LogRecord) -> bool:
    """Add the running job to a log record, for the filters of a logging handler: `job_queue`, `job_id` and
    `job_attempt`. Outside of a run they are empty."""
    current = running.get(None)
    record.job_queue = "" if current is None else current.queue
    record.job_id = "" if current is None else escape_control(current.id)
    record.job_attempt = "" if current is None else current.attempt
    return True


class TextLines(logging.Formatter):
    """One line per record, with the job at its end if a handler logs; then the traceback, if there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- The name is that of the base class.
        line = super().formatMessage(record)
        facts = _facts(record)
        if record.__dict__.get("job_id") and "id" not in record.__dict__.get("facts", {}):
            line += f" [{record.__dict__['job_id']} of {facts['queue']}, attempt {facts['attempt']}]"
        return f"{line}\n{facts['traceback'].rstrip()}" if facts.get("traceback") else line


class JsonLines(logging.Formatter):
    """One JSON object per line: `at`, `level`, `logger`, `message`, the facts of a job or a worker, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # A surrogate, from an id that is not text.
            return msgspec.json.encode({key: escape_control(str(value)) for key, value in line.items()}).decode()


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    """The facts of an event or a worker, or those of the job whose handler logs."""
    known = record.__dict__
    facts: dict[str, Any] = known.get("facts", {})
    if known.get("job_id"):
        facts = {"queue": known["job_queue"], "id": known["job_id"], "attempt": known["job_attempt"], **facts}
    return facts
