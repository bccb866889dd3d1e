"""Text that others wrote, made fit to be shown: in a log, in a terminal."""

from __future__ import annotations


def length(seconds: float) -> str:
    """A length of time, short: 3 s, 2 min, 5 h, 4 d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def printable(text: str) -> str:
    """One line without anything that moves a cursor, ends the line, turns it around or cannot be written: such
    characters are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
