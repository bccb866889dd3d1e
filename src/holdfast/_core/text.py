"""Text for people: durations, counts, and text of others made safe for a log or a terminal."""

from __future__ import annotations

from datetime import datetime


def format_duration(seconds: float) -> str:
    """A duration, short: 3 s, 2 min, 5 h, 4 d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_moment(at: datetime, seconds: float) -> str:
    """A point in time, and how far ahead it is; negative seconds are in the past."""
    distance = f"in {format_duration(seconds)}" if seconds >= 0 else f"{format_duration(-seconds)} ago"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({distance})"


def escape_control(text: str) -> str:
    """One line without anything that moves a cursor, ends the line, turns it around or cannot be written: such
    characters are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_times(count: int) -> str:
    """How often: once, or 3 times."""
    return "once" if count == 1 else f"{count} times"


def format_count(count: int, noun: str) -> str:
    """A count and its noun: 1 job, 2,000 jobs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
