"""Text for people: durations, counts, and foreign text made safe for a log or a terminal."""

from __future__ import annotations

from datetime import datetime


def format_duration(seconds: float) -> str:
    """Format a duration: 3 s, 2 min, 5 h, 4 d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_moment(at: datetime, seconds: float) -> str:
    """Format a point in time and its distance from now in seconds, which is negative in the past."""
    distance = f"in {format_duration(seconds)}" if seconds >= 0 else f"{format_duration(-seconds)} ago"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({distance})"


def escape_control(text: str) -> str:
    """Return the text with every character that is not printable (line ends, cursor and direction controls) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_times(count: int) -> str:
    """Format a number of times: once, or 3 times."""
    return "once" if count == 1 else f"{count} times"


def format_count(count: int, noun: str) -> str:
    """Format a count and its noun: 1 job, 2,000 jobs."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
