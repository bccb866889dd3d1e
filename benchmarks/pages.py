"""What reports are made of: numbers in words, tables in Markdown, and the frame of a plot in SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

RESULTS = Path(__file__).with_name("results")
INK, FAINT = "#212529", "#495057"


def number(value: float) -> str:
    """With three digits or so."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    if value >= 0.1:
        return f"{value:.3g}"
    return f"{value:.2g}" if value >= 0.001 else "< 0.001"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, of_numbers: bool = False) -> str:
    """All columns of numbers but the first are set to the right."""
    rule = ["---", *["---:" if of_numbers else "---"] * (len(heads) - 1)]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in (heads, rule, *rows))
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


class Judged(msgspec.Struct, frozen=True):
    """A target, and what was measured: nothing yet, or whether it is met."""

    what: str
    wanted: str
    measured: str = "-"
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """A missed target stays in its table, to be seen."""
        return "not measured" if self.met is None else "met" if self.met else "**missed**"


def targets(rows: Iterable[Judged]) -> str:
    return table(["", "target", "measured", ""], ([row.what, row.wanted, row.measured, row.verdict] for row in rows))


def plot(width: int, height: int, title: str, shapes: Iterable[str]) -> str:
    """An image of that size with its title; the shapes begin below 44."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="15" fill="{INK}">{escape(title)}</text>',
    ]
    return "\n".join([*lines, *shapes, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, colour: str = FAINT, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'
