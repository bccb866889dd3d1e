"""Text for people: counts, and foreign text made safe for a log or a terminal."""

from __future__ import annotations


def escape_control(text: str) -> str:
    """Return the text with every character that is not printable (line ends, cursor and direction controls) escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_times(count: int) -> str:
    """Format a number of times: once, or 3 times."""
    return "once" if count == 1 else f"{count} times"
