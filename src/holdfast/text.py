"""Text that others wrote, made fit to be shown: in a log, in a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line without anything that moves a cursor, ends the line, turns it around or cannot be written: such
    characters are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
