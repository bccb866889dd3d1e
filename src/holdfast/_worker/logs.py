"""How a worker logs that is a program of its own: lines of text, or of JSON. Ids and durations, no payloads."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from holdfast._core.text import printable

FORMATS = ("text", "json")


class Logs(msgspec.Struct, frozen=True):
    """How a process logs; nothing is set up unless this is given."""

    format: str
    level: str


class TextLines(logging.Formatter):
    """Time, level, what is said."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")


class JsonLines(logging.Formatter):
    """One object a line: `at`, `level`, `logger`, `message`, and what is known of a job or a worker."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # Half a character, from an id that is no text.
            return msgspec.json.encode({key: printable(str(value)) for key, value in line.items()}).decode()


def set_up(logs: Logs) -> None:
    """Have everything that is logged in this process written to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if logs.format == "json" else TextLines())
    logging.basicConfig(level=logs.level.upper(), handlers=[handler])
